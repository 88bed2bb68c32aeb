"""Exported models are the trained ones: other libraries load them and find the same loss."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import flip, split
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotrain.data.encode import Encoder
from isotrain.data.items import Item
from isotrain.data.prepare.tiny import make_tiny
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import cached_store
from isotrain.engine import export
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.export import export_run
from isotrain.errors import CheckpointError, RecipeError
from isotrain.models.files import load_tokenizer
from isotrain.observe.metrics import read_metrics
from isotrain.rollout.base import stop_tokens
from isotrain.trainers.launch import launch
from support import run_cli, tiny_recipe

pytestmark = pytest.mark.heavy

STEPS = (3, 6)


def train(tiny: Path, output: Path, **model: Any) -> Path:
    """A run with validation at each of its two checkpoints, and weights far from where they began."""
    recipe = tiny_recipe(
        tiny,
        output,
        "cpu",
        model=model,
        data={"validation": str(tiny / "validation.jsonl")},
        optimizer={"lr": 3e-2, "warmup_ratio": 0.0},
        trainer={"steps": STEPS[-1], "save_every": STEPS[0], "validate_every": STEPS[0]},
    )
    launch(recipe, "")
    return output


@pytest.fixture(scope="module")
def full_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny, tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def lora_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny, tmp_path_factory.mktemp("lora") / "run", lora={"rank": 4, "alpha": 16, "dropout": 0.1})


@pytest.fixture
def copied(full_run: Path, tmp_path: Path) -> Path:
    """A full run to damage."""
    return Path(shutil.copytree(full_run, tmp_path / "copied"))


def validation_store(tiny: Path, cache: Path) -> SampleStore[Item]:
    tokenizer = load_tokenizer(tiny / "model")
    encoder = Encoder(tokenizer, "auto", "prompt", "completion", 128, "error")
    return cached_store(str(tiny / "validation.jsonl"), encoder, cache / "tokens")


@torch.no_grad()
def loss_of(model: Any, store: SampleStore[Item]) -> float:
    """Mean negative log-likelihood of the tokens that bear loss, sample by sample, by the book."""
    model.eval()
    total, count = 0.0, 0
    for number in range(len(store)):
        (sample,) = store[number].samples
        tokens_1T = torch.from_numpy(sample.tokens_T).long()[None]
        mask_T = torch.from_numpy(sample.mask_T)[1:]
        logp_TV = model(input_ids=tokens_1T).logits[0, :-1].double().log_softmax(-1)
        logp_T = logp_TV.gather(-1, tokens_1T[0, 1:, None])[:, 0]
        total, count = total - float(logp_T[mask_T].sum()), count + int(mask_T.sum())
    return total / count


def engine_loss(run: Path, step: int) -> float:
    return next(row["val/loss"] for row in read_metrics(run / "metrics.jsonl") if row["step"] == step)


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def names_in(directory: Path) -> set[str]:
    return set(load_file(directory / "model.safetensors"))


def assert_clean(directory: Path) -> None:
    """A model that knows nothing of this project, with its tokenizer."""
    for file in directory.iterdir():
        assert file.suffix in (".json", ".safetensors", ".jinja", ".md", ".txt", ".model"), file
        if file.suffix == ".json":
            assert "isotrain" not in file.read_text() and "attn_implementation" not in file.read_text()
    # Somebody else's server will load it.
    assert len({file.stat().st_mode for file in directory.iterdir()}) == 1
    assert AutoTokenizer.from_pretrained(directory).chat_template
    assert not list(directory.parent.glob(".*.partial"))


@pytest.mark.parametrize("step", STEPS)
def test_a_full_model_has_the_engine_s_loss(
    full_run: Path, tiny: Path, cache: Path, tmp_path: Path, step: int
) -> None:
    out = export_run(full_run, tmp_path / "deep" / "model", step, adapter_only=False)
    store = validation_store(tiny, cache)
    assert loss_of(load(out), store) == pytest.approx(engine_loss(full_run, step), abs=1e-5)
    assert abs(loss_of(load(tiny / "model"), store) - engine_loss(full_run, step)) > 0.1
    assert_clean(out)
    # Saved like the base model: tied weights once, the same generation settings.
    assert (
        load_file(out / "model.safetensors").keys() == load_file(tiny / "model" / "model.safetensors").keys()
    )
    for name in ("config.json", "generation_config.json"):
        base, exported = (json.loads((path / name).read_text()) for path in (tiny / "model", out))
        assert exported == base
    assert exported["eos_token_id"] == 2


def test_an_exported_model_stops_where_it_was_taught_to(full_run: Path, tiny: Path, tmp_path: Path) -> None:
    """SFT of a base model whose configuration knows another end than its chat template."""
    base = Path(shutil.copytree(tiny / "model", tmp_path / "base"))
    settings = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 0}))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(base)
    run = Path(shutil.copytree(full_run, tmp_path / "run"))
    resolved = run / "resolved.json"
    resolved.write_text(resolved.read_text().replace(str(tiny / "model"), str(base)))
    out = export_run(run, tmp_path / "model", None, adapter_only=False)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert stop_tokens(out) == (0, 2)


@pytest.mark.parametrize("step", STEPS)
def test_a_merged_adapter_has_the_engine_s_loss(
    lora_run: Path, tiny: Path, cache: Path, tmp_path: Path, step: int
) -> None:
    out = export_run(lora_run, tmp_path / "model", step, adapter_only=False)
    store = validation_store(tiny, cache)
    assert loss_of(load(out), store) == pytest.approx(engine_loss(lora_run, step), abs=1e-5)
    assert abs(loss_of(load(tiny / "model"), store) - engine_loss(lora_run, step)) > 0.1
    assert_clean(out)
    assert (
        load_file(out / "model.safetensors").keys() == load_file(tiny / "model" / "model.safetensors").keys()
    )
    assert not list(out.glob("adapter*"))


def test_an_adapter_has_the_engine_s_loss(lora_run: Path, tiny: Path, cache: Path, tmp_path: Path) -> None:
    out = export_run(lora_run, tmp_path / "adapter", None, adapter_only=True)
    model = PeftModel.from_pretrained(load(tiny / "model"), out)
    assert loss_of(model, validation_store(tiny, cache)) == pytest.approx(engine_loss(lora_run, 6), abs=1e-5)
    assert_clean(out)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (4, 16, True)
    assert config["base_model_name_or_path"] == str(tiny / "model")
    assert all("lora_" in name for name in load_file(out / "adapter_model.safetensors"))
    # What peft itself would have saved.
    model.save_pretrained(tmp_path / "peft")
    theirs, ours = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "peft", out))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_untied_weights_and_another_architecture(cache: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path, train_rows=60, validation_rows=10, architecture="qwen3", tie_word_embeddings=False)
    run = train(tmp_path, tmp_path / "run")
    out = export_run(run, tmp_path / "out", None, adapter_only=False)
    assert "lm_head.weight" in load_file(out / "model.safetensors")
    store = validation_store(tmp_path, cache)
    assert loss_of(load(out), store) == pytest.approx(engine_loss(run, 6), abs=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_published_in_a_short_type_is_rounded_once(tiny: Path, tmp_path: Path, lora: bool) -> None:
    shutil.copytree(tiny, tmp_path / "short")
    load(tiny / "model").to(torch.bfloat16).save_pretrained(tmp_path / "short" / "model")
    # The base of the adapters is computed in float32 here: what is merged is what was trained.
    run = train(tmp_path / "short", tmp_path / "run", **({"lora": {"rank": 4}} if lora else {}))
    out = export_run(run, tmp_path / "out", None, adapter_only=False)
    exported = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    reader = CheckpointReader(run / "checkpoints" / "step-00000006")
    name = "model.layers.0.self_attn.q_proj"
    if lora:
        a, b = (
            reader.whole(f"weights/pretrained.{name}.lora_{side}.default.weight").double() for side in "AB"
        )
        base = load_file(tmp_path / "short" / "model" / "model.safetensors")[f"{name}.weight"].double()
        expected = base + b @ a * (16 / 4)
        error = (exported[f"{name}.weight"].double() - expected).abs()
        assert bool((error <= expected.abs() * 2**-8 + 1e-6).all())
    else:
        trained = reader.whole(f"weights/pretrained.{name}.weight")
        assert trained.dtype == torch.float32
        assert torch.equal(exported[f"{name}.weight"], trained.bfloat16())


def test_a_checkpoint_of_several_ranks(copied: Path, tmp_path: Path) -> None:
    reader = CheckpointReader(copied / "checkpoints" / "step-00000006")
    one = export_run(copied, tmp_path / "one", None, adapter_only=False)
    wholes = {name: reader.whole(name) for name in reader.shapes() if not name.startswith("generator/")}
    writers = [CheckpointWriter(copied / "checkpoints", rank, 3, keep=3) for rank in range(3)]
    for rank, writer in enumerate(writers):
        parts = {name: split(tensor, rank, 3) for name, tensor in wholes.items()}
        writer.save(7, parts, {}, dict(reader.state))
    for writer in writers:
        writer.wait()
    three = export_run(copied, tmp_path / "three", 7, adapter_only=False)
    assert (one / "model.safetensors").read_bytes() == (three / "model.safetensors").read_bytes()


def test_through_the_command_line(full_run: Path, tiny: Path, cache: Path, tmp_path: Path) -> None:
    done = run_cli("export", str(full_run), "--out", str(tmp_path / "model"), "--step", "3")
    assert done.stdout.strip() == f"wrote {tmp_path / 'model'}"
    loss = loss_of(load(tmp_path / "model"), validation_store(tiny, cache))
    assert loss == pytest.approx(engine_loss(full_run, 3), abs=1e-5)
    assert_clean(tmp_path / "model")


def test_an_existing_out_is_refused(full_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(RecipeError, match=r"--out: .*model exists;"):
        export_run(full_run, out, None, adapter_only=False)
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_a_step_that_is_not_there_lists_those_that_are(full_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)steps there: 3, 6\).*step-00000005 .*no such checkpoint"):
        export_run(full_run, tmp_path / "model", 5, adapter_only=False)
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_a_full_run_is_refused(full_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--adapter: this run trained all weights and has no adapter"):
        export_run(full_run, tmp_path / "model", None, adapter_only=True)
    assert not list(tmp_path.iterdir())


def test_what_is_no_run_is_refused(full_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a run directory \(no resolved\.json\)"):
        export_run(tmp_path, tmp_path / "model", None, adapter_only=False)
    shutil.copy(full_run / "resolved.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"has no valid checkpoint to export \(steps there: none\)"):
        export_run(tmp_path, tmp_path / "model", None, adapter_only=False)


def test_a_damaged_checkpoint_is_refused_or_passed_over_aloud(
    copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(copied / "checkpoints" / "step-00000006" / "rank-00000.safetensors")
    damaged = r"checkpoint step-00000006 is not used: rank-00000\.safetensors is damaged"
    with pytest.raises(CheckpointError, match=damaged):
        export_run(copied, tmp_path / "model", 6, adapter_only=False)
    assert not (tmp_path / "model").exists()
    with caplog.at_level(logging.WARNING, "isotrain"):
        out = export_run(copied, tmp_path / "model", None, adapter_only=False)
    assert "checkpoint step-00000006 is not used" in caplog.text
    expected = CheckpointReader(copied / "checkpoints" / "step-00000003").whole(
        "weights/pretrained.model.norm.weight"
    )
    assert torch.equal(load_file(out / "model.safetensors")["model.norm.weight"], expected)


def test_a_base_model_that_was_changed_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "changing")
    run = train(tmp_path / "changing", tmp_path / "run")
    shutil.rmtree(tmp_path / "changing" / "model")
    make_tiny(tmp_path / "changing", train_rows=1, validation_rows=1, layers=1)
    with pytest.raises(CheckpointError, match="its weights do not match"):
        export_run(run, tmp_path / "model", None, adapter_only=False)
    assert not (tmp_path / "model").exists()


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def fill_the_disk(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("accident", "expected", "words"),
    [
        (interrupt, KeyboardInterrupt, None),
        (fill_the_disk, CheckpointError, r"--out: .*model was not written \(.*No space left on device"),
    ],
)
def test_an_interrupted_export_leaves_nothing(
    full_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accident: Callable[..., None],
    expected: type[BaseException],
    words: str | None,
) -> None:
    """The tokenizer comes last: all the weights are written by then."""
    with monkeypatch.context() as patch:
        patch.setattr(export, "load_tokenizer", accident)
        with pytest.raises(expected, match=words):
            export_run(full_run, tmp_path / "model", None, adapter_only=False)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_replaced(full_run: Path, tmp_path: Path) -> None:
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "model-00007-of-00009.safetensors").write_text("half")
    out = export_run(full_run, tmp_path / "model", None, adapter_only=False)
    assert not list(out.glob("model-0*")) and [path.name for path in tmp_path.iterdir()] == ["model"]
