"""`isotrain parity probe`: a few steps in the middle of a run, on two devices, from one checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from isotrain.cli.main import app
from isotrain.engine.checkpoint.layout import step_directory
from isotrain.tools.parity.devices import backend
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.protocol import verdict_on
from isotrain.trainers import build
from preference_runs import preference_recipe, write_preferences
from support import run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy

AT, STEPS, LAYER = 12, 20, "model.layers.1.mlp"


def parity(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", *map(str, arguments)], env={"COLUMNS": "120"})


def recipe_of(tiny: Path, output: Path, **sections: Any) -> Path:
    sections = {
        "trainer": {"steps": STEPS, "save_every": AT, "keep_checkpoints": 3},
        "observe": {"layer_trace": 3, "loggers": []},
        "optimizer": {"lr": 1e-2},
        **sections,
    }
    return write_recipe(tiny_recipe(tiny, output, "cpu", **sections), output.with_suffix(".yaml"))


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """Matrices this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference with a checkpoint in its middle."""
    path = tmp_path_factory.mktemp("probed") / "here"
    result = parity("record", recipe_of(tiny, path), "observe.operators=false")
    assert result.exit_code == 0, result.output
    return path


class Saturating:
    """A kernel that cuts off what is beyond a bound, as narrow types do: right until the numbers grow."""

    def __init__(self, patch: pytest.MonkeyPatch, bound: float) -> None:
        self.bound, self.largest = bound, list[float]()
        build_task = build.build_task

        def changed(*arguments: Any, **options: Any) -> Any:
            engine, task = build_task(*arguments, **options)
            (layer,) = (module for name, module in engine.model.named_modules() if name.endswith(LAYER))
            layer.register_forward_hook(self.cut)
            return engine, task

        patch.setattr(build, "build_task", changed)

    def cut(self, _: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        self.largest.append(float(output.detach().abs().max()))
        return output.clamp(-self.bound, self.bound)


def test_a_mistake_that_the_first_steps_do_not_show(
    here: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        looking = Saturating(patch, bound=float("inf"))
        result = parity("probe", here, "--step", AT, "--out", tmp_path / "here-12")
        assert result.exit_code == 0 and "--reference" in result.output, result.output
    later = looking.largest[0]
    candidate = tmp_path / "there"
    with monkeypatch.context() as patch:
        early = Saturating(patch, bound=0.97 * later)
        recipe = recipe_of(tiny, candidate)
        result = CliRunner().invoke(app, ["train", str(recipe)])
        assert result.exit_code == 0, result.output
        assert any(size > early.bound for size in early.largest), "later steps must go beyond it"
        probed = parity(
            "probe", here, "--step", AT, "--out", tmp_path / "there-12", "--reference", tmp_path / "here-12"
        )
    level = verdict_on(here, candidate).level("P1")
    assert level.state == "same", f"the first three steps do not show it: {level.words}"
    assert probed.exit_code == 1, probed.output
    level = verdict_on(tmp_path / "here-12", tmp_path / "there-12").level("P1")
    assert level.state == "different"
    assert f"activations of {LAYER.removeprefix('model.')} at step {AT + 1}" in level.words.replace(
        "model.", ""
    )


def test_a_probe_goes_on_exactly_where_the_run_was(here: Path, tmp_path: Path) -> None:
    """On another machine, with a copy of the directory: the steps of the run itself come out."""
    copied = tmp_path / "copied"
    shutil.copytree(here, copied)
    shutil.rmtree(step_directory(copied / "checkpoints", STEPS))
    out = tmp_path / "out"
    assert parity("probe", copied, "--step", AT, "--out", out, "--steps", 2).exit_code == 0
    steps = [row for row in stable_metrics(here) if AT < row["step"] <= AT + 2]
    assert stable_metrics(out) == steps
    traced = sorted(path.name[:11] for path in (out / "layer_trace").glob("step-*"))
    assert traced == [f"step-{AT + 1:06d}", f"step-{AT + 2:06d}"]
    assert (out / "score_tests").is_dir()
    # Again, and against itself: no level objects.
    again = parity("probe", copied, "--step", AT, "--out", tmp_path / "b", "--steps", 2, "--reference", out)
    assert "2 forced steps from step 13 on agree" in again.output, again.output


def test_what_cannot_be_probed(here: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((here, "--step", 7), "no checkpoint of step 7 (there are: 12, 20)"),
        ((tmp_path, "--step", AT), "is not a run directory"),
        ((here, "--step", STEPS), "nothing is left to record"),
    ):
        result = parity("probe", *arguments, "--out", tmp_path / "out")
        assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output
    damaged = tmp_path / "damaged"
    shutil.copytree(here, damaged)
    file = step_directory(damaged / "checkpoints", AT) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = parity("probe", damaged, "--step", AT, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "is damaged" in result.output
    recipe = recipe_of(tmp_path, tmp_path / "without")
    result = CliRunner().invoke(
        app, ["train", str(recipe), "observe.layer_trace=0", "observe.layer_trace_after=4"]
    )
    assert result.exit_code != 0 and "layer_trace_after needs layer_trace" in " ".join(result.output.split())


def probed_pair(run: Path, work: Path, *, step: int) -> Level:
    """Both sides from processes of their own: AVX2 kernels against what the processor has."""
    for label in ("cpu", "cpu-avx2"):
        arguments = ("probe", str(run), "--step", str(step), "--out", str(work / label), "--steps", "2")
        run_cli("parity", *arguments, **backend(label).variables)
    return verdict_on(work / "cpu", work / "cpu-avx2").level("P1")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_instructions_are_the_same(tiny: Path, tmp_path: Path, dtype: str) -> None:
    recipe = recipe_of(tiny, tmp_path / "run", model={"dtype": dtype})
    run_cli("parity", "record", str(recipe), "observe.operators=false")
    level = probed_pair(tmp_path / "run", tmp_path, step=AT)
    assert level.state == "same", level.words
    assert any(check.value > 0 for check in level.checks), "bit for bit the same shows nothing"


@pytest.mark.slow
def test_preferences(tiny: Path, tmp_path: Path) -> None:
    sections = {"trainer": {"steps": 6, "save_every": 3}}
    recipe = preference_recipe("dpo", tiny, write_preferences(tmp_path), tmp_path / "run", "cpu", **sections)
    run_cli("parity", "record", str(write_recipe(recipe, tmp_path / "dpo.yaml")), "observe.operators=false")
    level = probed_pair(tmp_path / "run", tmp_path, step=3)
    assert level.state == "same" and "2 forced steps from step 4 on" in level.words, level.words
    assert stable_metrics(tmp_path / "cpu") == stable_metrics(tmp_path / "run")[3:5]


@pytest.mark.slow
@pytest.mark.ray
def test_recorded_responses(tiny: Path, tmp_path: Path) -> None:
    """GRPO: the probe trains on what the run sampled after that step."""
    recipe = tiny_recipe(
        tiny,
        tmp_path / "run",
        "cpu",
        data={
            "train": str(tiny / "prompts.jsonl"),
            "batch_size": 4,
            "max_length": 64,
            "tokens_per_micro_batch": 256,
        },
        algorithm={"name": "grpo"},
        rollout={"engine": "hf", "n": 4, "max_tokens": 6},
        reward={"function": {"path": f"{tiny / 'reward.py'}:score"}, "answer_key": "answer"},
        cluster={"address": "local"},
        trainer={"steps": 5, "save_every": 2},
    )
    run_cli("parity", "record", str(write_recipe(recipe, tmp_path / "grpo.yaml")), "observe.operators=false")
    level = probed_pair(tmp_path / "run", tmp_path, step=2)
    assert level.state == "same" and "2 forced steps from step 3 on" in level.words, level.words
    losses = [
        {row["step"]: row["actor/pg_loss"] for row in stable_metrics(tmp_path / run)}
        for run in ("run", "cpu")
    ]
    assert losses[1] == {step: losses[0][step] for step in (3, 4)}
