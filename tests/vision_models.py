"""Tiny random vision-language models with tokenizer and processor files, made offline."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from isotrain.data.items import Sample
from isotrain.data.pictures import PictureProcessor

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}

# In patches of two; the prompts with their pictures, two responses each.
SIZES = [[(3, 2)], [(2, 4), (5, 3)], []]


def make_vlm(out: Path, family: str) -> Path:
    """Three vision layers, one of them over the whole picture; weights so large that differences show."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    hf: Any = transformers
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    patch = PATCH[family]
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [4, 6, 6],
            **({"mrope_interleaved": True} if family == "qwen3_vl" else {}),
        },
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": patch,
    }
    if family == "qwen3_vl":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    config = hf.AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": (16 * patch) ** 2},
    }
    (out / "preprocessor_config.json").write_text(json.dumps(processor))
    return out


def png(size: tuple[int, int], seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def token(directory: Path, name: str = "<|image_pad|>") -> int:
    return int(transformers.AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(name))


def samples_of(directory: Path) -> tuple[list[Sample], list[int]]:
    """Two responses to each prompt, one of which has the image token, and where the responses begin."""
    processor, pad = PictureProcessor.of_model(directory), token(directory)
    draw, samples, prompts = np.random.default_rng(0), [], []
    for number, sizes in enumerate(SIZES):
        parts, pictures = [draw.integers(0, 200, 4)], []
        for place, (width, height) in enumerate(sizes):
            side = 2 * processor.patch
            image = png((width * side, height * side), 10 * number + place)
            pictures.append(replace(processor(image), start=sum(map(len, parts))))
            parts += [np.full(pictures[-1].tokens, pad), draw.integers(0, 200, 3 + place)]
        for length in (5, 8):
            response = draw.integers(0, 200, length)
            response[length // 2] = pad
            tokens_T = np.concatenate([*parts, response]).astype(np.int32)
            prompts.append(len(tokens_T) - length)
            samples.append(Sample(tokens_T, np.arange(len(tokens_T)) >= prompts[-1], tuple(pictures)))
    return samples, prompts


def coloured(name: str, side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), name).save(file, "PNG")
    return file.getvalue()
