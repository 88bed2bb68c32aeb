from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from isotrain.data.pictures import PictureProcessor
from isotrain.data.prepare.tiny_vision import COLOURS, NAMES, VisionArchitecture, make_tiny_vision


def rows(file: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    return table


def test_the_same_seed_gives_the_same_model_and_pictures(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_vision(tmp_path / name, seed=seed, train_rows=20, validation_rows=5)
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's random numbers are its own"
    for file, is_other in (("model/model.safetensors", True), ("model/tokenizer.json", False)):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b and (a != c) == is_other
    a, b, c = (rows(tmp_path / name / "pictures.parquet") for name in "abc")
    assert a == b != c and a[:5] != rows(tmp_path / "a/pictures-validation.parquet")


def test_only_the_picture_says_what_is_wanted(tmp_path: Path) -> None:
    make_tiny_vision(tmp_path, train_rows=200, validation_rows=1)
    table = rows(tmp_path / "pictures.parquet")
    assert {json.dumps(row["prompt"]) for row in table} == {'[{"role": "user", "content": "<image>?"}]'}
    counts = {kind: sum(row["answer"] == kind for row in table) for kind in COLOURS}
    assert all(70 < count < 130 for count in counts.values()), counts
    for row in table:
        (picture,) = row["images"]
        pixels_PC = np.array(Image.open(io.BytesIO(picture["bytes"]))).reshape(-1, 3)
        seen = [kind for kind, colour in COLOURS.items() if (pixels_PC == colour).all(1).any()]
        assert seen == [row["answer"]]
    for row, prompt in zip(rows(tmp_path / "train.parquet"), table, strict=True):
        assert row["images"] == prompt["images"]
        assert [m["content"] for m in row["messages"]] == ["<image>?", NAMES[prompt["answer"]]]


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
def test_model_tokenizer_and_processor_fit(tmp_path: Path, architecture: VisionArchitecture) -> None:
    make_tiny_vision(tmp_path, train_rows=2, validation_rows=1, architecture=architecture)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    size = sum(parameter.numel() for parameter in model.parameters())
    assert 0.4e6 < size < 0.7e6 and model.config.text_config.vocab_size == len(tokenizer) == 264
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert model.config.vision_start_token_id == tokenizer.convert_tokens_to_ids("<|vision_start|>")
    # Fused kernels take published heads and sections only.
    rope = model.config.text_config.rope_parameters
    assert 2 * sum(rope["mrope_section"]) == model.config.text_config.head_dim == 128
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    said = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert said == "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
    process = PictureProcessor.of_model(tmp_path / "model")
    picture = process(rows(tmp_path / "pictures.parquet")[0]["images"][0]["bytes"])
    assert (picture.grid, picture.tokens) == ((1, 4, 4), 4)
    patches = torch.from_numpy(process.normalised(picture.patches_PD))
    with torch.no_grad():
        features = model.model.get_image_features(patches, torch.tensor([picture.grid]), return_dict=True)
    assert features.pooler_output[0].shape == (4, 128)
