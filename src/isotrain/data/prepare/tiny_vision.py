"""A tiny vision-language model and two tasks: to name a shape's colour, or to write what the colour says."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any, Literal

from isotrain.data.prepare import tiny_reward
from isotrain.data.prepare.tiny import END, PAD, START, make_tokenizer, save_random_weights

VisionArchitecture = Literal["qwen2_5_vl", "qwen3_vl"]

# The order of published Qwen tokenizers. With 256 bytes they are all tokens: nothing is merged.
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_SPECIAL = (PAD, START, END, *_VISION)

# ChatML whose content is a text or a list of texts and pictures, as in published models.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

COLOURS = {"digits": (220, 30, 30), "capitals": (30, 30, 220)}
NAMES = {"digits": "red", "capitals": "blue"}
_SIDE = 56  # pixels: 4 x 4 patches, 2 x 2 image tokens, for both families

# Of each family as published: what the picture processor divides by, and how large its patches are.
_PICTURES: dict[VisionArchitecture, dict[str, Any]] = {
    "qwen2_5_vl": {
        "patch_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": "Qwen2_5_VLProcessor",
    },
    "qwen3_vl": {
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    },
}


def make_tiny_vision(
    out: Path,
    *,
    seed: int = 0,
    train_rows: int = 2000,
    validation_rows: int = 200,
    architecture: VisionArchitecture = "qwen2_5_vl",
) -> None:
    """Write a model, and rows with pictures for it; the same arguments give the same pictures and weights.

    `train.parquet` and `validation.parquet` are for supervised training, `pictures.parquet` with `reward.py`
    for reinforcement learning. The words of all prompts are the same: a model that does not look at the
    picture earns one half at best.
    """
    out.mkdir(parents=True, exist_ok=True)
    for rows, own_seed, suffix in (
        (train_rows, 2 * seed + 1, ""),
        (validation_rows, 2 * seed + 2, "-validation"),
    ):
        supervised = "train" if not suffix else "validation"
        _write_rows(out / f"pictures{suffix}.parquet", out / f"{supervised}.parquet", rows, own_seed)
    (out / "reward.py").write_bytes(Path(tiny_reward.__file__).read_bytes())
    vocab = make_tokenizer(
        out / "model", vocab=256 + len(_SPECIAL), seed=seed, special=_SPECIAL, template=CHAT_TEMPLATE
    )
    _make_model(out / "model", architecture, vocab, seed)
    # Written by hand: transformers makes such a file only where torchvision is installed.
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": _SIDE**2, "longest_edge": 256 * 32**2},
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_PICTURES[architecture],
    }
    (out / "model" / "preprocessor_config.json").write_text(json.dumps(pictures, indent=1) + "\n")


def _write_rows(prompts: Path, supervised: Path, count: int, seed: int) -> None:
    """The same pictures for both tasks."""
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(seed)
    answers, files = list[str](), list[bytes]()
    for _ in range(count):
        answers.append(draw.choice(tuple(COLOURS)))
        files.append(draw_picture(answers[-1], draw))
    text = pyarrow.string()
    pictures = pyarrow.array(
        [[{"bytes": file, "path": None}] for file in files],
        pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", text)])),
    )
    messages = pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))
    asked = {"role": "user", "content": "<image>?"}
    told = [[asked, {"role": "assistant", "content": NAMES[answer]}] for answer in answers]
    for file, columns in (
        (prompts, {"prompt": pyarrow.array([[asked]] * count, messages), "answer": pyarrow.array(answers)}),
        (supervised, {"messages": pyarrow.array(told, messages)}),
    ):
        pyarrow.parquet.write_table(pyarrow.table({**columns, "images": pictures}), file)


def draw_picture(answer: str, draw: random.Random) -> bytes:
    """A PNG: a square or a disc of some size at some place, on a light ground, in the answer's colour."""
    from PIL import Image, ImageDraw

    ground = (draw.randint(200, 255), draw.randint(200, 255), draw.randint(200, 255))
    image = Image.new("RGB", (_SIDE, _SIDE), ground)
    side = draw.randint(18, 33)
    x, y = draw.randint(0, _SIDE - side), draw.randint(0, _SIDE - side)
    canvas = ImageDraw.Draw(image)
    shape = draw.choice((canvas.rectangle, canvas.ellipse))
    shape((x, y, x + side - 1, y + side - 1), fill=COLOURS[answer])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _make_model(out: Path, architecture: VisionArchitecture, vocab: int, seed: int) -> None:
    """One head of 128, and the published sections of its rotary positions: fused kernels take no others."""
    import transformers

    ids = {token: index for index, token in enumerate(_SPECIAL)}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": _PICTURES[architecture]["patch_size"],
        "initializer_range": 0.08,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if architecture == "qwen2_5_vl":
        rope["mrope_section"] = [16, 24, 24]
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    else:
        rope |= {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model(
        architecture,
        text_config={
            "vocab_size": vocab,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "max_position_embeddings": 2048,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids[END],
            "pad_token_id": ids[PAD],
            # As for the other tiny models: it learns in far fewer steps than with the usual 0.02.
            "initializer_range": 0.08,
        },
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    save_random_weights(config, "AutoModelForImageTextToText", out, seed)
