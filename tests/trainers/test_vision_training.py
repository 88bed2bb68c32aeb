"""Whole supervised runs on pictures: learnt, resumed bit for bit, exported and loaded by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from isotrain.data.packing import pack
from isotrain.data.rows import read_rows
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_reference
from isotrain.engine.export import export_run
from isotrain.engine.world import join_world
from isotrain.errors import RecipeError
from isotrain.models.files import load_tokenizer
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import ModelSection, Recipe
from isotrain.trainers.encoder import sample_encoder
from isotrain.trainers.launch import launch
from support import stable_metrics, tiny_recipe
from vision_models import FAMILIES, coloured, make_vlm

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=FAMILIES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, and `train.jsonl` beside its pictures: red ones and blue ones, to be named."""
    out = tmp_path_factory.mktemp(request.param)
    make_vlm(out / "model", request.param)
    rows = []
    for number in range(24):
        colour = ("red", "blue")[number % 2]
        (out / f"{number}.png").write_bytes(coloured(colour, 28 + 28 * (number % 3)))
        asked = {"role": "user", "content": "<image>?"}
        rows.append(
            {"messages": [asked, {"role": "assistant", "content": colour}], "images": f"{number}.png"}
        )
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def recipe_of(files: Path, out: Path, device_type: str = "cpu", **sections: Any) -> Recipe:
    data = {"image_key": "images", "max_length": 100, **sections.pop("data", {})}
    return tiny_recipe(files, out, device_type, data=data, **sections)


def test_resume_is_exact(files: Path, tmp_path: Path, device_type: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer = {"steps": 4, "save_every": 2}
    launch(recipe_of(files, whole, device_type, trainer=trainer), "")
    launch(recipe_of(files, parts, device_type, trainer=trainer), "")
    shutil.rmtree(parts / "checkpoints" / "step-00000004")
    torch.manual_seed(999)
    launch(recipe_of(files, parts, device_type, trainer=trainer), "")
    assert len(json.loads((parts / "environment.json").read_text())["starts"]) == 2
    assert stable_metrics(parts) == stable_metrics(whole)
    last, again = (
        sorted((run / "checkpoints" / "step-00000004").glob("*.safetensors")) for run in (whole, parts)
    )
    assert last and [file.read_bytes() for file in last] == [file.read_bytes() for file in again]


@pytest.mark.parametrize("model", [{}, {"vision": "frozen"}, {"lora": {"rank": 4}}], ids=str)
def test_an_exported_model_has_the_same_log_probs(files: Path, tmp_path: Path, model: dict[str, Any]) -> None:
    recipe = recipe_of(files, tmp_path / "run", model=model, trainer={"steps": 3})
    launch(recipe, "")
    exported = export_run(tmp_path / "run", tmp_path / "exported", None, adapter_only=False)
    before, after = (load_file(d / "model.safetensors") for d in (files / "model", exported))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed
    assert any("visual" in name for name in changed) == (not model)
    # As transformers computes them, against the packed forward of the exported files.
    rows = list(read_rows(recipe.data.train))[:4]
    encoder = sample_encoder(load_tokenizer(exported), recipe)
    samples = [item.samples[0] for row in rows for item in encoder.values(row)]
    device = choose_device("cpu")
    with join_world(device) as world:
        section = ModelSection(path=str(exported), dtype="float32", attention="sdpa")
        engine = build_reference(section, device=device, world=world)
        (logp_N,) = engine.infer([pack(samples)], lambda head: head.logps())
    theirs: Any = AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32).eval()
    processor, expected = encoder.pictures.files.processor, []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens_T).long()[None]
        (picture,) = sample.pictures
        seen = torch.zeros_like(tokens)
        seen[0, picture.start : picture.stop] = 1
        with torch.no_grad():
            logits = theirs(
                input_ids=tokens,
                mm_token_type_ids=seen,
                pixel_values=torch.from_numpy(processor.normalised(picture.patches_PD)),
                image_grid_thw=torch.tensor([picture.grid]),
            ).logits[0]
        logp = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        expected.append(logp[torch.from_numpy(sample.mask_T[1:])])
    assert (logp_N - torch.cat(expected)).abs().max() < 1e-5


def test_it_learns_what_only_the_picture_says(files: Path, tmp_path: Path) -> None:
    """The same run on pictures of one colour, blind to the answer, stays at the entropy of two answers."""
    if "qwen3" in files.name:
        pytest.skip("one family is enough")
    course = {"trainer": {"steps": 60}, "optimizer": {"schedule": "constant"}}
    launch(recipe_of(files, tmp_path / "seeing", **course), "")
    blind = tmp_path / "blind"
    shutil.copytree(files, blind)
    for path in blind.glob("*.png"):
        path.write_bytes(coloured("grey", 28))
    launch(recipe_of(blind, tmp_path / "run", **course), "")
    seeing, unseeing = (
        sum(row["train/loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")[-5:]) / 5
        for name in ("seeing", "run")
    )
    # `red` and `blue` with their ends: ln 2 for the first letter, spread over 4.5 tokens on average.
    assert seeing < 0.05 < 0.14 < unseeing


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"too_long": "truncate"}}, "could cut a picture"),
        ({"model": {"compile": True}}, "model.compile"),
        ({"model": {"fused": "on"}}, "model.fused"),
        ({"algorithm": {"name": "dpo"}}, "use sft, or remove it"),
        ({"device": {"ranks": 2, "mesh": {"context": 2}}}, "needs device.mesh.context: 1"),
        ({"data": {"images": {"min_pixels": 9, "max_pixels": 4}}}, "is above max_pixels"),
    ],
)
def test_recipes_refuse_what_is_not_supported(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=message):
        recipe_of(tmp_path, tmp_path, **sections)
