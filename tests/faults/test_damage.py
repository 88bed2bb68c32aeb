"""A damaged checkpoint is named and passed over; the run goes on from an older one as if nothing happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from isotrain.engine.checkpoint.layout import steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.errors import CheckpointError
from isotrain.recipe.schema import Recipe
from isotrain.trainers.launch import launch
from support import run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy

STEPS = (3, 6, 9)


def damageable(tiny: Path, output: Path, device_type: str, ranks: int = 1) -> Recipe:
    return tiny_recipe(
        tiny,
        output,
        device_type,
        device={"ranks": ranks},
        model={"lora": {"rank": 4, "dropout": 0.1}},
        trainer={"steps": STEPS[-1], "save_every": STEPS[0]},
        observe={"loggers": ["console"]},
    )


@pytest.fixture(scope="module")
def whole_runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A finished run on each device, made when it is first asked for."""
    made: dict[str, Path] = {}

    def whole(device_type: str) -> Path:
        if device_type not in made:
            made[device_type] = tmp_path_factory.mktemp(device_type) / "whole"
            launch(damageable(tiny, made[device_type], device_type), "")
        return made[device_type]

    return whole


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def flip_a_byte(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_off(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def delete(checkpoint: Path) -> None:
    (checkpoint / "rank-00000.safetensors").unlink()


def change_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"taken": ', '"taken": 1'))


def take_the_marker(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").unlink()


DAMAGES = {
    flip_a_byte: "rank-00000.safetensors is damaged (SHA-256 differs)",
    cut_off: "rank-00000.safetensors has ",
    delete: "rank-00000.safetensors is missing",
    change_the_manifest: "manifest.json is damaged",
    take_the_marker: "it was not finished (no COMPLETE marker)",
}


# In every run of the tests, the others in the slow suite: readers of checkpoints have tests of their own.
QUICK = (("cpu", flip_a_byte), ("cpu", take_the_marker), ("npu", delete))


def assert_mended(run: Path, whole: Path) -> None:
    assert stable_metrics(run) == stable_metrics(whole)
    assert steps_in(run / "checkpoints") == list(reversed(STEPS))
    assert all(not CheckpointReader(step(run, number)).problems() for number in STEPS)


@pytest.mark.parametrize(
    ("on", "damage"),
    [
        pytest.param(on, damage, marks=() if (on, damage) in QUICK else pytest.mark.slow)
        for on in ("cpu", "npu")
        for damage in DAMAGES
    ],
)
def test_the_run_goes_on_from_the_newest_valid_one(
    tiny: Path,
    tmp_path: Path,
    whole_runs: Callable[[str], Path],
    on: str,
    damage: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = whole_runs(on)
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    damage(step(run, 9))
    capsys.readouterr()
    launch(damageable(tiny, run, on), "")
    said = capsys.readouterr().out
    assert f"warning: checkpoint step-00000009 is not used: {DAMAGES[damage]}" in said
    assert "step-00000006" not in said and "resuming after step 6 of 9" in said
    assert_mended(run, whole)


def test_several_damaged_ones_are_all_named(
    tiny: Path, tmp_path: Path, whole_runs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = whole_runs("cpu")
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    flip_a_byte(step(run, 9))
    cut_off(step(run, 6))
    capsys.readouterr()
    launch(damageable(tiny, run, "cpu"), "")
    said = capsys.readouterr().out
    assert "step-00000009 is not used" in said and "step-00000006 is not used" in said
    assert "resuming after step 3 of 9" in said
    assert_mended(run, whole)


def damage_all(run: Path) -> None:
    for number, damage in zip(STEPS, (flip_a_byte, delete, take_the_marker), strict=True):
        damage(step(run, number))


def remove_all(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def unmount(run: Path) -> None:
    """The directory that another disk was mounted on is there and empty."""
    remove_all(run)
    (run / "checkpoints").mkdir()


def remove_from_an_older_run(run: Path) -> None:
    """A version that did not note what it saved."""
    (run / "saved.json").unlink()
    remove_all(run)


def content(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in ("metrics.jsonl", "log.txt")}


@pytest.mark.parametrize("lose", [damage_all, remove_all, unmount, remove_from_an_older_run])
def test_with_all_lost_it_stops_until_it_is_told_to_start_over(
    tiny: Path,
    tmp_path: Path,
    whole_runs: Callable[[str], Path],
    lose: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = whole_runs("cpu")
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = content(run)
    lose(run)
    recipe = damageable(tiny, run, "cpu")
    with pytest.raises(CheckpointError, match=r"trainer\.resume=start_over"):
        launch(recipe, "")
    said = capsys.readouterr().out
    if lose is damage_all:
        assert all(f"step-{number:08d} is not used" in said for number in STEPS)
    assert content(run)["metrics.jsonl"] == before["metrics.jsonl"]
    assert content(run)["log.txt"].startswith(before["log.txt"])
    trainer = recipe.trainer.model_copy(update={"resume": "start_over"})
    launch(recipe.model_copy(update={"trainer": trainer}), "")
    said = capsys.readouterr().out
    assert f"what was in {run} is in {run / 'earlier-1'}" in said and "step 1/9" in said
    assert content(run / "earlier-1")["metrics.jsonl"] == before["metrics.jsonl"]
    assert content(run / "earlier-1")["log.txt"].startswith(before["log.txt"])
    assert_mended(run, whole)
    # The same command without it goes on from there: starting over is not what the run remembers.
    launch(recipe, "")
    assert "resuming after step 9 of 9" in capsys.readouterr().out
    assert not (run / "earlier-2").exists()


def test_a_lost_newest_one_is_told_and_its_metrics_are_kept(
    tiny: Path, tmp_path: Path, whole_runs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = whole_runs("cpu")
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = content(run)["metrics.jsonl"]
    for number in (6, 9):
        shutil.rmtree(step(run, number))
    capsys.readouterr()
    launch(damageable(tiny, run, "cpu"), "")
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: the checkpoint of step 9 is lost: training again from step 4" in said
    assert (run / "earlier-1" / "metrics.jsonl").read_bytes() == before
    assert_mended(run, whole)
    launch(damageable(tiny, run, "cpu"), "")
    assert "warning" not in capsys.readouterr().out and not (run / "earlier-2").exists()


def test_a_run_without_a_checkpoint_yet_starts_again(
    tiny: Path, tmp_path: Path, whole_runs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a kill in the second step leaves it."""
    whole = whole_runs("cpu")
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    unmount(run)
    (run / "saved.json").unlink()
    rows = content(run)["metrics.jsonl"].splitlines(keepends=True)[:2]
    (run / "metrics.jsonl").write_bytes(b"".join(rows))
    capsys.readouterr()
    launch(damageable(tiny, run, "cpu"), "")
    assert "warning" not in capsys.readouterr().out
    assert (run / "earlier-1" / "metrics.jsonl").read_bytes() == b"".join(rows)
    assert_mended(run, whole)


def test_export_refuses_it_by_name(tmp_path: Path, whole_runs: Callable[[str], Path]) -> None:
    run = Path(shutil.copytree(whole_runs("cpu"), tmp_path / "run"))
    flip_a_byte(step(run, 6))
    done = run_cli("export", str(run), "--step", "6", "--out", str(tmp_path / "model"), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "checkpoint step-00000006 is not used: rank-00000.safetensors is damaged" in done.stderr
    assert "steps there: 3, 6, 9" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_damage_that_only_a_silent_rank_sees_is_named(tiny: Path, tmp_path: Path) -> None:
    """Ranks share the checking, but only the first one talks."""
    file = write_recipe(damageable(tiny, tmp_path / "run", "cpu", ranks=2), tmp_path / "recipe.yaml")
    run_cli("train", str(file), OMP_NUM_THREADS="1")
    whole = Path(shutil.copytree(tmp_path / "run", tmp_path / "whole"))
    (step(tmp_path / "run", 9) / "rank-00001.safetensors").unlink()
    done = run_cli("train", str(file), OMP_NUM_THREADS="1")
    assert "step-00000009 is not used: rank-00001.safetensors is missing" in done.stdout
    assert "resuming after step 6 of 9" in done.stdout
    assert_mended(tmp_path / "run", whole)
