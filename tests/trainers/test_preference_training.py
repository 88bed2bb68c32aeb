"""Runs on preference responses: anchors at the first step, learning, and what must not change the result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.engine.export import export_run
from isotrain.errors import DataError, RecipeError, ZeroGradientError
from isotrain.recipe.schema import Recipe
from isotrain.trainers.launch import launch
from preference_runs import ALGORITHMS, KIND, assert_same_run, preference_recipe, write_preferences
from support import run_cli, stable_metrics, write_recipe

pytestmark = pytest.mark.heavy

Plain = Callable[[str, str], list[dict[str, float]]]
LN2 = math.log(2)
LORA = {"lora": {"rank": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preferences(tmp_path_factory.mktemp("preference"))


def train(recipe: Recipe) -> list[dict[str, float]]:
    launch(recipe, "")
    return stable_metrics(recipe.output)


SAVED = {"steps": 6, "save_every": 2}


@pytest.fixture(scope="module")
def plain(tiny: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Metrics of each algorithm on each device, run once: what other runs are compared with."""

    @cache
    def run(name: str, device_type: str) -> list[dict[str, float]]:
        output = tmp_path_factory.mktemp("plain") / "run"
        return train(preference_recipe(name, tiny, rows, output, device_type, trainer=SAVED))

    return run


@pytest.mark.parametrize("model", [{}, LORA], ids=["all weights", "adapters"])
def test_anchors_of_losses_with_a_reference(
    tiny: Path, rows: Path, tmp_path: Path, device_type: str, model: dict[str, Any]
) -> None:
    def first(name: str, output: str, **algorithm: Any) -> dict[str, float]:
        sections = {"algorithm": {"name": name, **algorithm}, "trainer": {"steps": 1}, "model": model}
        return train(preference_recipe(name, tiny, rows, tmp_path / output, device_type, **sections))[0]

    row = first("dpo", "dpo", label_smoothing=0.1)
    assert row["train/loss"] == pytest.approx(LN2, abs=2e-6)
    assert row["train/margin"] == pytest.approx(0.0, abs=1e-5)
    assert first("dpo", "ipo", loss="ipo", beta=0.5)["train/loss"] == pytest.approx(1.0, abs=1e-4)
    row = first("kto", "kto", desirable_weight=1.5, undesirable_weight=1.5)
    assert row["train/loss"] == pytest.approx(0.75, abs=1e-5)
    assert row["train/kl"] == pytest.approx(0.0, abs=1e-5)


def test_a_new_reward_model_knows_nothing(tiny: Path, rows: Path, tmp_path: Path, device_type: str) -> None:
    (row,) = train(preference_recipe("rm", tiny, rows, tmp_path / "rm", device_type, trainer={"steps": 1}))
    assert row["train/loss"] == pytest.approx(LN2, rel=1e-6) and row["train/margin"] == 0.0


@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns(tiny: Path, rows: Path, tmp_path: Path, name: str) -> None:
    held_out = str(rows / f"{KIND[name]}-held-out.jsonl")
    recipe = preference_recipe(
        name,
        tiny,
        rows,
        tmp_path / name,
        "cpu",
        data={"validation": held_out, "batch_size": 16, "tokens_per_micro_batch": 1024},
        algorithm={"name": name, **({"beta": 0.5} if name == "kto" else {})},
        trainer={"steps": 400 if name == "prm" else 120, "validate_first": True},
    )
    before, *_, last = train(recipe)
    assert last["val/loss"] < before["val/loss"]
    if name == "kto":
        assert last["val/margin"] > 1.0 > 0.01 > abs(before["val/margin"])
    elif name == "prm":
        assert last["val/f1"] > 0.8
    else:
        assert last["val/accuracy"] > 0.9
    plots = {path.name for path in (tmp_path / name / "plots").iterdir()}
    assert {"loss.png", "preference.png"} <= plots


@pytest.mark.parametrize("loss", ["ipo", "simpo", "orpo"])
def test_the_kin_of_dpo_learn(tiny: Path, rows: Path, tmp_path: Path, loss: str) -> None:
    recipe = preference_recipe(
        "dpo",
        tiny,
        rows,
        tmp_path / loss,
        "cpu",
        algorithm={"name": "dpo", "loss": loss},
        data={"batch_size": 16, "tokens_per_micro_batch": 1024},
        trainer={"steps": 60},
    )
    metrics = train(recipe)
    assert sum(row["train/accuracy"] for row in metrics[-10:]) / 10 > 0.8
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_do_not_matter(
    tiny: Path, rows: Path, tmp_path: Path, plain: Plain, device_type: str, name: str
) -> None:
    """A step is several micro-batches of 256 tokens, or one; padded, no prompt is shared."""
    for attention in ("sdpa", "padded"):
        sections = {"data": {"tokens_per_micro_batch": 4096}, "model": {"attention": attention}}
        other = train(preference_recipe(name, tiny, rows, tmp_path / attention, device_type, **sections))
        assert_same_run(plain(name, device_type)[: len(other)], other)


@pytest.mark.parametrize(
    ("name", "on", "context"),
    [
        pytest.param(name, on, context, marks=() if (name, on) == ("kto", "npu") else pytest.mark.slow)
        for name in ALGORITHMS
        for on in ("cpu", "npu")
        for context in (1, 2)
    ],
)
def test_ranks_do_not_matter(
    tiny: Path, rows: Path, tmp_path: Path, on: str, name: str, context: int
) -> None:
    """KTO's reference point is a mean over all ranks, before anything is cut off at 0."""
    one = preference_recipe(name, tiny, rows, tmp_path / "one", on)
    expected = train(one)
    over_two = {"ranks": 2, "mesh": {"context": context}}
    two = preference_recipe(name, tiny, rows, tmp_path / "two", on, device=over_two)
    run_cli("train", str(write_recipe(two, tmp_path / "two.yaml")))
    found = stable_metrics(tmp_path / "two")
    for a, b in zip(expected, found, strict=True):
        # KTO's `kl` is a mean of sums over whole responses, about -40 each: rounding alone moves it by 3e-5.
        assert b.pop("train/kl", 0.0) == pytest.approx(a.pop("train/kl", 0.0), abs=2e-4)
    assert_same_run(expected, found)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_checkpointing_activations_does_not_matter(
    tiny: Path, rows: Path, tmp_path: Path, plain: Plain, device_type: str, name: str
) -> None:
    recipe = preference_recipe(name, tiny, rows, tmp_path / "run", device_type)
    other = not recipe.model.gradient_checkpointing
    changed = preference_recipe(
        name, tiny, rows, tmp_path / "run", device_type, model={"gradient_checkpointing": other}
    )
    metrics = train(changed)
    assert_same_run(plain(name, device_type)[: len(metrics)], metrics, rel=1e-5, abs_=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resume_is_exact(
    tiny: Path, rows: Path, tmp_path: Path, plain: Plain, device_type: str, name: str
) -> None:
    recipe = preference_recipe(name, tiny, rows, tmp_path / "parts", device_type, trainer=SAVED)
    train(recipe)
    (tmp_path / "parts" / "checkpoints" / "step-00000006" / "COMPLETE").unlink()
    torch.manual_seed(999)
    assert train(recipe) == plain(name, device_type)


def test_a_reward_model_is_exported_as_a_classifier(tiny: Path, rows: Path, tmp_path: Path) -> None:
    recipe = preference_recipe(
        "rm",
        tiny,
        rows,
        tmp_path / "run",
        "cpu",
        data={"validation": str(rows / "pairs-held-out.jsonl"), "validation_rows": 8},
        trainer={"steps": 10},
    )
    last = train(recipe)[-1]
    out = export_run(tmp_path / "run", tmp_path / "model", None, adapter_only=False)
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    margins = []
    for line in (rows / "pairs-held-out.jsonl").read_text().splitlines()[:8]:
        row = json.loads(line)
        scores = []
        for side in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            with torch.no_grad():
                tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
                scores.append(model(tokens).logits[0, 0].item())
        margins.append(scores[0] - scores[1])
    assert sum(margins) / 8 == pytest.approx(last["val/margin"], abs=1e-4)
    assert abs(last["val/margin"]) > 1e-3


def test_a_classifier_of_steps_learns_and_is_exported(
    tiny: Path, rows: Path, tmp_path: Path, device_type: str
) -> None:
    recipe = preference_recipe(
        "prm",
        tiny,
        rows,
        tmp_path / "run",
        device_type,
        algorithm={"name": "prm", "head": "classifier"},
        data={"validation": str(rows / "steps-held-out.jsonl"), "batch_size": 16, "validation_rows": 20},
        trainer={"steps": 60},
    )
    first, *_, last = train(recipe)
    assert first["train/loss"] == pytest.approx(LN2, rel=1e-6), "a new head is undecided"
    assert last["val/loss"] < 0.9 * LN2
    out = export_run(tmp_path / "run", tmp_path / "model", None, adapter_only=False)
    model = AutoModelForTokenClassification.from_pretrained(out, dtype=torch.float32).eval()
    assert model.config.id2label == {0: "bad", 1: "good"}
    tokenizer = AutoTokenizer.from_pretrained(out)
    losses = []
    for line in (rows / "steps-held-out.jsonl").read_text().splitlines()[:20]:
        row = json.loads(line)
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        for step, label in zip(row["completions"], row["labels"], strict=True):
            tokens += tokenizer(step + "\n", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits_C = model(torch.tensor([tokens])).logits[0, -1]
            losses.append(-torch.log_softmax(logits_C, 0)[int(label)].item())
    assert sum(losses) / len(losses) == pytest.approx(last["val/loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "sections", "error", "message"),
    [
        ("rm", {"model": LORA}, RecipeError, "a reward model must train all weights"),
        (
            "prm",
            {"model": LORA, "algorithm": {"name": "prm", "head": "classifier"}},
            RecipeError,
            "a classifier of steps must train all weights",
        ),
        ("dpo", {"algorithm": {"name": "dpo", "reference": "adapters-off"}}, RecipeError, "needs adapters"),
        (
            "prm",
            {"algorithm": {"name": "prm", "good_token": "good step"}},
            DataError,
            "set a text that is one token",
        ),
        ("dpo", {"data": {"train": "responses.jsonl"}}, DataError, "no 'chosen'"),
        (
            "rm",
            {"algorithm": {"name": "rm", "margins": True}, "data": {"train": "pairs.jsonl"}},
            DataError,
            r"pairs.jsonl:1: no 'margin', but algorithm.margins is true",
        ),
    ],
)
def test_refuses_recipes_with_mistakes(
    tiny: Path,
    rows: Path,
    tmp_path: Path,
    name: str,
    sections: dict[str, dict[str, Any]],
    error: type[Exception],
    message: str,
) -> None:
    if "data" in sections:
        sections = {**sections, "data": {"train": str(rows / sections["data"]["train"])}}
    with pytest.raises(error, match=message):
        launch(preference_recipe(name, tiny, rows, tmp_path / "run", "cpu", **sections), "")


def test_a_run_that_learns_nothing_fails(
    tiny: Path, rows: Path, tmp_path: Path, device_type: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only undesirable responses, which have no weight; it ends long before its last step."""
    lines = [json.loads(line) for line in (rows / "responses.jsonl").read_text().splitlines()]
    bad = [json.dumps(line) + "\n" for line in lines if not line["label"]]
    (tmp_path / "bad.jsonl").write_text("".join(bad[:64]))
    sections: dict[str, Any] = {
        "data": {"train": str(tmp_path / "bad.jsonl"), "batch_size": 2},
        "algorithm": {"name": "kto", "undesirable_weight": 0.0},
        "trainer": {"steps": 500, "save_every": 4},
    }
    recipe = preference_recipe("kto", tiny, rows, tmp_path / "run", device_type, **sections)
    with pytest.raises(ZeroGradientError, match=r"step 10: the gradient .* exactly 0 and the loss is 0"):
        launch(recipe, "")
    assert len(stable_metrics(recipe.output)) == 9
    # A resumed run knows it, too: it goes on from step 8.
    with pytest.raises(ZeroGradientError, match="step 10: the gradient of every update so far is exactly 0"):
        launch(recipe, "")
    assert "not used" not in capfd.readouterr().err


def test_preview_shows_both_sides(tiny: Path, rows: Path, tmp_path: Path) -> None:
    for name, words in (("dpo", ("chosen:", "rejected:")), ("kto", ("response:",)), ("prm", ("solution:",))):
        recipe = preference_recipe(name, tiny, rows, tmp_path / "run", "cpu")
        file = write_recipe(recipe, tmp_path / f"{name}.yaml")
        shown = CliRunner().invoke(app, ["preview", str(file), "--rows", "2"]).output
        assert all(shown.count(word) == 2 for word in words), shown
