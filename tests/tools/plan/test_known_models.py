"""Sizes of published models that isotrain ships, for plans without the Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from isotrain.errors import ModelError
from isotrain.tools.plan.estimate import Shape, config_directory, has_shipped_sizes
from isotrain.tools.plan.known_models import MODELS, known_model

ROOT = Path(__file__).parents[3]
# As the authors or the files of weights say; tied heads count once.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_sizes_make_the_published_number_of_parameters() -> None:
    assert MODELS.keys() == PUBLISHED.keys()
    for name, expected in PUBLISHED.items():
        values = MODELS[name].config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
        assert sum(weight.numel() for weight in model.parameters()) == expected, name


def test_every_hub_model_of_a_shipped_recipe_is_known() -> None:
    names = [yaml.safe_load(path.read_text())["model"]["path"] for path in (ROOT / "recipes").glob("*.yaml")]
    hub = {name for name in names if not name.startswith("work/")}
    assert len(hub) > 2 and [name for name in hub if known_model(name) is None] == []


def test_they_are_taken_where_the_hub_is_not_reached() -> None:
    name = "Qwen/Qwen2-7B-Instruct@main"
    shape = Shape.of(config_directory(name))
    assert (shape.layers, shape.config.hidden_size, has_shipped_sizes(name)) == (28, 3584, True)
    with pytest.raises(ModelError, match="neither a local directory"):
        config_directory("Qwen/Qwen2-7B-Chat-of-mine")


def test_a_local_model_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = Path("Qwen/Qwen2.5-0.5B")
    local.mkdir(parents=True)
    (local / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen2.5-1.5B"].config()))
    assert Shape.of(config_directory(str(local))).config.hidden_size == 1536
    assert not has_shipped_sizes(str(local))
