"""Whether a run may be resumed, and the digest of the model that it starts from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from isotrain.errors import DeviceError, ModelError, RecipeError
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.difference import MAY_CHANGE_ON_RESUME
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe
from isotrain.trainers.start import check_run, model_digest, prepare_output, run_lock
from support import tiny_recipe

SECTIONS: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "grpo"},
    "rollout": {"engine": "hf", "n": 4, "max_tokens": 6},
    "reward": {"function": {"path": "rewards.py:score"}},
    "cluster": {"address": "local"},
}
FREE: dict[str, dict[str, Any]] = {
    "data.tokens_per_micro_batch": {"data": {"tokens_per_micro_batch": 256}},
    "data.validation_rows": {"data": {"validation_rows": 3}},
    "model.attention": {"model": {"attention": "padded"}},
    "model.gradient_checkpointing": {"model": {"gradient_checkpointing": False}},
    "rollout.validation": {"rollout": {"validation": {"n": 3, "temperature": 0.5}}},
    "reward.function.concurrency": {"reward": {"function": {"path": "rewards.py:score", "concurrency": 3}}},
}
BOUND: dict[str, dict[str, Any]] = {
    "data.max_length": {"data": {"max_length": 64}},
    "model.dtype": {"model": {"dtype": "bfloat16"}},
    "rollout.n": {"rollout": {"n": 2}},
    "reward.function.path": {"reward": {"function": {"path": "rewards.py:other"}}},
}


def recipe(tiny: Path, output: Path, changes: dict[str, dict[str, Any]]) -> Recipe:
    merged = {name: {**SECTIONS.get(name, {}), **changes.get(name, {})} for name in {**SECTIONS, **changes}}
    for name, base in (("model", {"path": str(tiny / "model"), "dtype": "float32"}), ("data", {})):
        merged[name] = {**base, **merged.get(name, {})}
    merged["data"] = {
        "train": "prompts.jsonl",
        "batch_size": 8,
        "max_length": 128,
        "tokens_per_micro_batch": 512,
        **merged["data"],
    }
    return tiny_recipe(tiny, output, "cpu", **merged)


@pytest.mark.parametrize("field", [*FREE, *BOUND])
def test_what_may_change_between_two_starts(tiny: Path, tmp_path: Path, field: str) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(resolved(recipe(tiny, tmp_path, {}))))
    changed = recipe(tiny, tmp_path, {**FREE, **BOUND}[field])
    if field in FREE:
        check_run(changed)
    else:
        with pytest.raises(RecipeError, match=rf"which this one cannot resume:\n  {field}"):
            check_run(changed)


def test_the_page_lists_what_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    table = page.split("These may be different from the first start")[1].split("\n\n")[1]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    patterns = [name.removesuffix(".*") for name in listed]
    missing = [
        name
        for name in MAY_CHANGE_ON_RESUME
        if not any(name == one or name.startswith(f"{one}.") for one in patterns)
        and not any(other.startswith(f"{name}.") for other in MAY_CHANGE_ON_RESUME)
    ]
    assert not missing and all(name in MAY_CHANGE_ON_RESUME for name in patterns)


def used_run(tiny: Path, output: Path) -> Recipe:
    """A recipe, and the run that it has left in its output."""
    used = recipe(tiny, output, {})
    run = RunDirectory.create(output, "", resolved(used), {})
    run.metrics.write_text('{"step": 1, "train/loss": 1.0}\n')
    run.log.write_text("said\n")
    return used


def quiet(_: str) -> None:
    pass


def with_trainer(of: Recipe, **changes: Any) -> Recipe:
    return of.model_copy(update={"trainer": of.trainer.model_copy(update=changes)})


@pytest.mark.parametrize(
    "name",
    [
        *(".lock", "metrics.jsonl", "log.txt", "status.json", "saved.json", "resolved.json", "trackers.json"),
        *("checkpoints", "plots", "trajectories", "tensorboard", "wandb"),
        *("plots/loss.png", "checkpoints/step-00000001", "layer_trace/step-1", "wandb/a/b/c"),
    ],
)
def test_a_run_directory_whose_links_lead_out_is_refused(tiny: Path, tmp_path: Path, name: str) -> None:
    """Training would append to the target, replace it or remove what is in it."""
    used = used_run(tiny, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        link.rmdir()
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere if "." not in link.name else elsewhere / "precious")
    for used_as in (used, with_trainer(used, resume="start_over")):
        with pytest.raises(RecipeError, match=rf"{name} is a link out .*trainer\.follow_links=true"):
            prepare_output(used_as, quiet)
    assert link.is_symlink() and (elsewhere / "precious").read_text() == "precious"
    prepare_output(with_trainer(used, follow_links=True), quiet)


def test_links_that_stay_inside_are_not_refused(tiny: Path, tmp_path: Path) -> None:
    """wandb makes some."""
    used = used_run(tiny, tmp_path / "run")
    (tmp_path / "run" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to("run-1")
    prepare_output(used, quiet)


def test_a_linked_lock_keeps_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)
    with pytest.raises(RecipeError, match="a link, which is not followed"), run_lock(tmp_path / "run", True):
        pass
    assert target.read_text() == "precious"


@pytest.mark.parametrize("output", ["file", "file/below", "/proc/run", "/sys/run"])
def test_an_output_that_cannot_be_written_is_told(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RecipeError, match="set output to a writable directory"),
        run_lock(tmp_path / output, True),
    ):
        pass


def test_starting_over_moves_all_of_a_run_aside(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    used = with_trainer(used_run(tiny, output), resume="start_over")
    (output / "mine.txt").write_text("not of the run")
    (output / "checkpoints" / "step-00000001").mkdir()
    said: list[str] = []
    prepare_output(used, said.append)
    assert said == [f"starting over: what was in {output} is in {output / 'earlier-1'}"]
    assert {path.name for path in output.iterdir()} == {"earlier-1", "mine.txt"}
    assert (output / "earlier-1" / "log.txt").read_text() == "said\n"
    assert (output / "earlier-1" / "checkpoints" / "step-00000001").is_dir()
    prepare_output(used, said.append)
    assert len(said) == 1, "nothing is left to move"
    used_run(tiny, output)
    prepare_output(used, quiet)
    assert (output / "earlier-2" / "metrics.jsonl").is_file()


def test_starting_over_leaves_a_linked_directory_where_it_is(tiny: Path, tmp_path: Path) -> None:
    used = with_trainer(used_run(tiny, tmp_path / "run"), resume="start_over", follow_links=True)
    disk = tmp_path / "disk"
    (disk / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").rmdir()
    (tmp_path / "run" / "checkpoints").symlink_to(disk)
    prepare_output(used, quiet)
    assert (tmp_path / "run" / "checkpoints").resolve() == disk
    assert (disk / "earlier-1" / "step-00000001").is_dir() and not (disk / "step-00000001").exists()


def test_only_weights_and_config_count_for_the_digest(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny / "model", copy)
    digest = model_digest(tiny / "model")
    (copy / "README.md").write_text("words")
    assert model_digest(copy) == digest
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_digest(copy) != digest, "one bit of a weight"


def test_names_a_model_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: .*config\.json cannot be read"):
        model_digest(tmp_path)


def test_more_ranks_than_a_host_can_hold_start_nothing(tiny: Path, tmp_path: Path) -> None:
    from isotrain.trainers.launch import launch

    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", device={"type": "cpu", "ranks": 10_000})
    with pytest.raises(DeviceError, match=r"10000 ranks would share \d+ cores.*set at most \d+"):
        launch(recipe, "")
    assert not (tmp_path / "run").exists()
