"""Checkpoints are whole or absent, fit any number of ranks, and are not believed unchecked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SHAPES, STATE, flip, leftovers, newest, save, shards, split, tensors, worlds
from safetensors import safe_open

from isotrain.engine.checkpoint import layout, writer
from isotrain.engine.checkpoint.layout import step_directory, steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader, newest_valid
from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.errors import CheckpointError
from isotrain.models.weights import Shard


@pytest.mark.parametrize("ranks", [1, 3])
def test_round_trip_and_layout(tmp_path: Path, ranks: int) -> None:
    whole = tensors()
    directory = save(tmp_path / "checkpoints", 20, whole, ranks=ranks)
    files = [f"rank-{rank:05d}.safetensors" for rank in range(ranks)]
    assert directory.name == "step-00000020"
    assert sorted(path.name for path in directory.iterdir()) == ["COMPLETE", "manifest.json", *files]
    assert not leftovers(directory.parent)
    reader = CheckpointReader(directory)
    assert (reader.step, reader.ranks, dict(reader.state)) == (20, ranks, STATE)
    assert reader.shapes() == SHAPES and reader.files == files and reader.problems() == []
    assert [reader.extras(rank) for rank in range(ranks)] == [{"rank": rank} for rank in range(ranks)]
    for rank in range(ranks):
        into = shards({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, rank, ranks)
        reader.fill(into, rank)
        assert all(torch.equal(into[name].local, shards(whole, rank, ranks)[name].local) for name in whole)


def test_the_manifest_has_the_sum_of_every_file_and_the_marker_that_of_the_manifest(tmp_path: Path) -> None:
    directory = save(tmp_path, 5, ranks=2)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert set(manifest) == {"format", "step", "ranks", "state", "files"}
    for name, expected in manifest["files"].items():
        data = (directory / name).read_bytes()
        assert expected == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    assert (directory / "COMPLETE").read_text() == digest


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path) -> None:
    """Every byte is accounted for by safetensors, JSON or a sum in hexadecimal."""
    for path in save(tmp_path, 5, ranks=2).iterdir():
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            assert 8 + length + max(ends) == len(data)
            assert all(json.loads(text) for text in header["__metadata__"].values())
        elif path.suffix == ".json":
            json.loads(data)
        else:
            assert path.name == "COMPLETE" and len(bytes.fromhex(data.decode())) == 32


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_who_may_read_the_directory_may_read_the_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        directory = save(tmp_path / "checkpoints", 5, ranks=2)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64])
def test_types_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(12).reshape(4, 3).to(dtype)
    reader = CheckpointReader(save(tmp_path, 1, {"x": value}, ranks=2))
    assert reader.whole("x").dtype == dtype and torch.equal(reader.whole("x"), value)


def test_what_changes_after_save_is_not_saved(
    tmp_path: Path, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on with the same memory while the thread writes."""
    begun, may_write = threading.Event(), threading.Event()

    def held_back(*arguments: Any) -> Any:
        begun.set()
        assert may_write.wait(timeout=30)
        return write_tensors(*arguments)

    monkeypatch.setattr(writer, "write_tensors", held_back)
    live, before = tensors(device=device_type), tensors()
    state = dict(STATE)
    saver = CheckpointWriter(tmp_path, 0, 1, keep=1)
    saver.save(7, shards(live), {}, state)
    for tensor in live.values():
        tensor.zero_()
    state["taken"] = 999
    assert begun.wait(timeout=30)
    assert steps_in(tmp_path) == [] and leftovers(tmp_path)
    may_write.set()
    saver.wait()
    reader = CheckpointReader(step_directory(tmp_path, 7))
    assert reader.state["taken"] == STATE["taken"]
    assert all(torch.equal(reader.whole(name), tensor) for name, tensor in before.items())


class Killer:
    """Ends the writing thread at one moment, between two operations on the disk.

    SystemExit is no Exception, so that the writer's own clean-up does not run: as if the process were gone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left, self.log = at, list[str]()
        for module, name in [
            (writer, "write_tensors"),
            (writer, "sync"),
            (writer, "_write_synced"),
            (shutil, "rmtree"),
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "unlink"),
        ]:
            monkeypatch.setattr(module, name, self._deadly(name, getattr(module, name)))

    def _deadly(self, name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name.startswith("checkpoint-"):
                self.log.append(name)
                if self.left == 0:
                    raise SystemExit
                self.left -= 1
            return action(*arguments, **options)

        return act


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_killed_at_any_moment_the_newest_valid_one_is_the_old_or_the_new(tmp_path: Path) -> None:
    """Every operation on the disk in turn is the last; then the step is saved again."""
    old, new, moments = tensors(1), tensors(2), 0
    while True:
        root = tmp_path / str(moments)
        # The step is there already, damaged: its removal is among the moments.
        save(root, 10, old, keep=2)
        flip(save(root, 20, old, keep=2) / "rank-00000.safetensors")
        saver = CheckpointWriter(root, 0, 1, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            killer = Killer(patch, at=moments)
            saver.save(20, shards(new), {}, STATE)
            saver.wait()
        step, said = newest(root)
        assert step in (10, 20), (moments, killer.log, said)
        expected = old if step == 10 else new
        reader = CheckpointReader(step_directory(root, step))
        assert all(torch.equal(reader.whole(name), tensor) for name, tensor in expected.items())
        if step == 10 and steps_in(root) == [20, 10]:
            assert "step-00000020 is not used" in said
        if killer.left:
            break
        save(root, 20, new, keep=1)
        assert newest(root) == (20, "") and steps_in(root) == [20] and not leftovers(root)
        moments += 1
    assert moments > 10 and {"write_tensors", "sync", "_write_synced", "rename", "rmtree"} <= set(killer.log)
    marker = len(killer.log) - 1 - killer.log[::-1].index("_write_synced")
    assert killer.log.index("rename") < marker, "the marker comes last"


@pytest.mark.heavy
def test_a_loop_that_ends_with_an_error_does_not_lose_the_checkpoint_being_written(tmp_path: Path) -> None:
    code = f"""
import time, torch
from pathlib import Path
from isotrain.engine.checkpoint import writer
from isotrain.models.weights import Shard
write_tensors = writer.write_tensors
writer.write_tensors = lambda *arguments: time.sleep(0.5) or write_tensors(*arguments)
saver = writer.CheckpointWriter(Path({str(tmp_path)!r}), 0, 1, keep=1)
saver.save(10, {{"x": Shard(torch.ones(3), (3,), (0,))}}, {{}}, {{}})
raise ArithmeticError("the loss is not finite")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "not finite" in done.stderr
    assert newest(tmp_path) == (10, "")


def test_what_is_not_finished_is_named_and_not_used(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for step in (20, 30, 40, 50):
        shutil.copytree(step_directory(tmp_path, 10), step_directory(tmp_path, step))
    (tmp_path / "step-00000020").rename(tmp_path / ".writing-step-00000020")
    (tmp_path / "step-00000030" / "COMPLETE").unlink()
    (tmp_path / "step-00000040" / "COMPLETE").write_text("0" * 64)
    (tmp_path / "step-00000050" / "COMPLETE").write_text("")
    step, said = newest(tmp_path)
    assert step == 10
    assert "step-00000030 is not used: it was not finished (no COMPLETE marker)" in said
    assert "step-00000040 is not used: manifest.json is damaged" in said
    assert "step-00000050 is not used: manifest.json is damaged" in said
    CheckpointWriter(tmp_path, 0, 1, keep=3)
    assert not leftovers(tmp_path) and steps_in(tmp_path) == [50, 40, 30, 10]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: flip(d / "rank-00001.safetensors"), "rank-00001.safetensors is damaged"),
        (lambda d: flip(d / "rank-00000.safetensors", 20), "rank-00000.safetensors is damaged"),
        (lambda d: (d / "rank-00001.safetensors").write_bytes(b"1234"), "has 4 bytes instead of "),
        (lambda d: (d / "rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
        (lambda d: flip(d / "manifest.json", 30), "manifest.json is damaged"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda d: flip(d / "COMPLETE"), "manifest.json is damaged"),
        (lambda d: (d / "COMPLETE").write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
        (lambda d: (d / "COMPLETE").unlink(), "it was not finished"),
        (lambda d: (shutil.rmtree(d), d.write_text("")), "there is no such checkpoint"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], Any], reason: str) -> None:
    save(tmp_path, 10, ranks=2)
    damage(save(tmp_path, 20, ranks=2))
    step, said = newest(tmp_path)
    assert step == 10 and "step-00000020 is not used: " in said and reason in said


def test_nothing_valid_is_said(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, "")
    (save(tmp_path, 10) / "COMPLETE").unlink()
    step, said = newest(tmp_path)
    assert step is None and "step-00000010 is not used" in said
    assert said.endswith(f"no valid checkpoint in {tmp_path}")


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path, 10)

    def fails(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(layout, "sha256_of", fails)
    (problem,) = CheckpointReader(directory).problems()
    assert problem == "rank-00000.safetensors cannot be read (Input/output error)"


def test_other_names_are_not_steps(tmp_path: Path) -> None:
    for name in ("step-5", "step-000000000000007", "step-٠٠٠٠٠٠٠١", "step-00000003x", "step-" + "9" * 30):
        (tmp_path / name).mkdir()
    save(tmp_path, 100_000_000)
    assert steps_in(tmp_path) == [100_000_000] and newest(tmp_path) == (100_000_000, "")


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(1, 7):
        save(tmp_path, step, keep=keep)
        assert steps_in(tmp_path) == list(range(step, max(0, step - keep), -1))


def test_the_newest_is_never_removed(tmp_path: Path) -> None:
    """A run that was set back saves a lower step than those, damaged, that it did not resume from."""
    (save(tmp_path, 90) / "rank-00000.safetensors").write_bytes(b"")
    save(tmp_path, 40, keep=1)
    assert steps_in(tmp_path) == [90, 40] and newest(tmp_path)[0] == 40
    save(tmp_path, 90, keep=1)
    assert steps_in(tmp_path) == [90] and newest(tmp_path) == (90, "")


def test_what_an_interrupted_removal_left_goes_too(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step-00000010" / "COMPLETE").unlink()
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    save(tmp_path, 30)
    assert steps_in(tmp_path) == [30, 20]


def test_an_old_one_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10, keep=1)
    with monkeypatch.context() as patch:

        def refuse(*arguments: Any, **options: Any) -> None:
            raise OSError(39, "Directory not empty")

        patch.setattr(Path, "rmdir", refuse)
        patch.setattr("os.rmdir", refuse)
        save(tmp_path, 20, keep=1)
        assert newest(tmp_path) == (20, "") and steps_in(tmp_path) == [20, 10]
    save(tmp_path, 30, keep=1)
    assert steps_in(tmp_path) == [30]


def test_a_damaged_step_is_saved_again(tmp_path: Path) -> None:
    flip(save(tmp_path, 10, tensors(1), ranks=2) / "rank-00000.safetensors")
    (tmp_path / "step-00000010" / "rank-00007.safetensors").write_text("of a larger job")
    save(tmp_path, 10, tensors(2), ranks=1)
    assert newest(tmp_path) == (10, "")
    reader = CheckpointReader(step_directory(tmp_path, 10))
    assert torch.equal(reader.whole("weights/a"), tensors(2)["weights/a"])
    assert len(list(reader.directory.iterdir())) == 3


def start(root: Path, ranks: int) -> list[CheckpointWriter]:
    return [CheckpointWriter(root, rank, ranks, keep=3) for rank in range(ranks)]


def failing_for(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: Any, *arguments: Any) -> Any:
        if file._file.name.endswith(f"rank-{rank:05d}.safetensors"):
            raise OSError(28, "No space left on device")
        return write_tensors(file, *arguments)

    monkeypatch.setattr(writer, "write_tensors", fails)


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    leading, slow = start(tmp_path, 2)
    leading.save(10, shards(tensors(), 0, 2), {}, STATE)
    assert leading._thread is not None
    leading._thread.join(0.3)
    assert leading._thread.is_alive() and steps_in(tmp_path) == []
    slow.save(10, shards(tensors(), 1, 2), {}, STATE)
    slow.wait()
    leading.wait()
    assert leading.failure() is None and slow.failure() is None and newest(tmp_path) == (10, "")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    save(tmp_path, 5, ranks=2)
    with monkeypatch.context() as patch:
        failing_for(failing, patch)
        ranks = start(tmp_path, 2)
        for rank, each in enumerate(ranks):
            each.save(10, shards(tensors(), rank, 2), {}, STATE)
        for each in ranks:
            each.wait()
        told = [each.failure() or "" for each in ranks]
        assert told[0].startswith(f"checkpoint step-00000010 was not saved: rank {failing}: ")
        assert "No space left on device" in told[0] and "No space left on device" in told[failing]
    assert newest(tmp_path) == (5, "") and steps_in(tmp_path) == [5]
    # Whatever a rank left that came too late goes with the next save, which works again.
    for rank, each in enumerate(ranks):
        each.save(15, shards(tensors(), rank, 2), {}, STATE)
    for each in ranks:
        each.wait()
        assert each.failure() is None
    assert newest(tmp_path) == (15, "") and not leftovers(tmp_path)


def test_a_rank_without_room_for_its_report_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_for(1, monkeypatch)
    leading, full = start(tmp_path, 2)
    monkeypatch.setattr(full, "_write_report", _no_room)
    for rank, each in enumerate((leading, full)):
        each.save(10, shards(tensors(), rank, 2), {}, STATE)
    leading.wait()
    failure = "checkpoint step-00000010 was not saved: rank 1: could not even write its report"
    assert leading.failure() == failure and not leftovers(tmp_path)
    full.wait()


def _no_room(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_silent_rank_runs_into_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PEER_TIMEOUT_SECONDS", 0.2)
    save(tmp_path, 5, ranks=1)
    leading, silent = start(tmp_path, 2)
    leading.save(10, shards(tensors(), 0, 2), {}, STATE)
    leading.wait()
    failure = "checkpoint step-00000010 was not saved: rank 1 did not report within 0 s"
    assert leading.failure() == failure and newest(tmp_path) == (5, "") and not leftovers(tmp_path)
    # It was only slow: what it writes now belongs to nothing, and is removed by the next save.
    silent.save(10, shards(tensors(), 1, 2), {}, STATE)
    silent.wait()
    assert leftovers(tmp_path) == [".writing-step-00000010"]
    leading.save(11, shards(tensors(), 0, 2), {}, STATE)
    silent.save(11, shards(tensors(), 1, 2), {}, STATE)
    leading.wait()
    assert leading.failure() is None and newest(tmp_path) == (11, "") and not leftovers(tmp_path)


def test_every_failure_is_told_and_the_last_one_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_for(0, monkeypatch)
    saver = CheckpointWriter(tmp_path, 0, 1, keep=1)
    for step in (1, 2):
        saver.save(step, shards(tensors()), {}, STATE)
    saver.wait()
    told = saver.failure() or ""
    assert "step-00000001 was not saved" in told and "step-00000002 was not saved" in told
    assert saver.failure() is None
    # A loop may hear of it before it waits for the end, and must still end with an error.
    saver.wait()
    told = saver.failure() or ""
    assert "step-00000002 was not saved" in told and "step-00000001" not in told


def test_a_failing_marker_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk even 64 bytes may be too many, and the shards must give their room back."""
    save(tmp_path, 5)

    def full(path: Path, text: str) -> None:
        path.write_text("")
        if path.name == "COMPLETE":
            raise OSError(28, "No space left on device")
        path.write_text(text)

    monkeypatch.setattr(writer, "_write_synced", full)
    saver = CheckpointWriter(tmp_path, 0, 1, keep=1)
    saver.save(10, shards(tensors()), {}, STATE)
    saver.wait()
    assert "No space left" in (saver.failure() or "")
    assert steps_in(tmp_path) == [5] and not leftovers(tmp_path) and newest(tmp_path) == (5, "")


def agreed(roots: Sequence[Path]) -> list[tuple[int | None, list[str]]]:
    """What each rank takes and says; a rank's root is where it sees the checkpoints."""
    with ThreadPoolExecutor(len(roots)) as pool:
        found = list(pool.map(newest_valid, roots, worlds(len(roots))))
    return [(reader.step if reader else None, complaints) for reader, complaints in found]


def test_ranks_agree_and_the_first_says_what_any_of_them_found(tmp_path: Path) -> None:
    save(tmp_path, 10, ranks=3)
    flip(save(tmp_path, 20, ranks=3) / "rank-00001.safetensors")
    (save(tmp_path, 30, ranks=3) / "rank-00002.safetensors").unlink()
    (save(tmp_path, 40, ranks=3, keep=4) / "COMPLETE").unlink()
    for ranks in (2, 3, 4):
        found = agreed([tmp_path] * ranks)
        assert [step for step, _ in found] == [10] * ranks
        assert found[0][1] == [
            "checkpoint step-00000040 is not used: it was not finished (no COMPLETE marker)",
            "checkpoint step-00000030 is not used: rank-00002.safetensors is missing",
            "checkpoint step-00000020 is not used: rank-00001.safetensors is damaged (SHA-256 differs)",
        ]


def test_ranks_agree_where_their_file_systems_do_not(tmp_path: Path) -> None:
    """A network file system may show a new directory to one machine first; nobody may wait forever."""
    ahead, behind = tmp_path / "ahead", tmp_path / "behind"
    save(ahead, 10, ranks=2)
    shutil.copytree(ahead, behind)
    save(ahead, 20, ranks=2)
    assert [step for step, _ in agreed([ahead, behind])] == [10, 10]
    assert [step for step, _ in agreed([behind, ahead])] == [10, 10]
    assert agreed([ahead, behind])[0][1] == [
        "checkpoint step-00000020 is not used: another rank cannot read it"
    ]
    assert [step for step, _ in agreed([tmp_path / "none", ahead])] == [None, None]


@pytest.mark.parametrize("writers", [1, 2, 3, 5])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, writers: int) -> None:
    whole = tensors()
    reader = CheckpointReader(save(tmp_path, 10, whole, ranks=writers))
    assert all(torch.equal(reader.whole(name), tensor) for name, tensor in whole.items())
    for readers in range(1, 5):
        for rank in range(readers):
            into = shards({name: torch.full_like(t, torch.nan) for name, t in whole.items()}, rank, readers)
            reader.fill(into, rank)
            for name, tensor in whole.items():
                assert torch.equal(into[name].local, split(tensor, rank, readers).local), (name, rank)


def test_another_split_than_by_rows(tmp_path: Path) -> None:
    """A second mesh dimension would cut columns too."""
    whole = tensors()["weights/a"]
    reader = CheckpointReader(save(tmp_path, 10, {"x": whole}, ranks=3))
    into = Shard(torch.zeros(4, 2), tuple(whole.shape), (2, 3))
    reader.fill({"x": into}, rank=0)
    assert torch.equal(into.local, whole[2:6, 3:5])


@pytest.mark.parametrize(
    "wanted",
    [
        {"weights/unknown": (7, 5)},  # another model
        {"weights/a": (8, 5)},  # of another size
        {"weights/a": (7, 5, 1)},
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, wanted: dict[str, tuple[int, ...]]) -> None:
    reader = CheckpointReader(save(tmp_path, 10, ranks=2))
    into = shards({name: torch.zeros(shape) for name, shape in wanted.items()})
    with pytest.raises(
        CheckpointError, match=r"step-00000010: the checkpoint has no 'weights/.*' in the shape"
    ):
        reader.fill(into, rank=0)


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Anybody's tools can look into a checkpoint."""
    directory = save(tmp_path, 10)
    with safe_open(directory / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(SHAPES)
        assert torch.equal(file.get_tensor("weights/a"), tensors()["weights/a"])
