"""Copies of checkpoints behind a URL: whole or not there, and the run resumes from them."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_files import STATE, flip, shards, tensors, worlds

from isotrain.engine.checkpoint.layout import step_directory, steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.resume_point import lost_checkpoint, resume_point
from isotrain.engine.checkpoint.storage import Storage, StorageError
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.errors import CheckpointError
from isotrain.observe.run_directory import RunDirectory


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """fsspec's own file systems; a real object store is not among the tests."""
    if request.param == "file":
        yield f"file://{tmp_path}/store/run"
        return
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"


def path_of(url: str, name: str) -> tuple[Any, str]:
    fs, root = fsspec.core.url_to_fs(url)
    return fs, f"{root}/{name}"


def save(
    root: Path, url: str, step: int, whole: dict[str, torch.Tensor], *, ranks: int = 1, keep: int = 3
) -> list[CheckpointWriter]:
    writers = [CheckpointWriter(root, rank, ranks, keep, Storage(url)) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        writer.save(step, shards(whole, rank, ranks), {"rank": rank}, STATE)
    for writer in writers:
        writer.wait()
    return writers


def resume(root: Path, url: str, ranks: int = 1) -> list[tuple[CheckpointReader | None, list[str]]]:
    def one(world: Any) -> tuple[CheckpointReader | None, list[str]]:
        return resume_point(root, world, Storage(url))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, worlds(ranks)))


def step_of(root: Path, url: str) -> tuple[int | None, str]:
    ((reader, complaints),) = resume(root, url)
    return (reader.step if reader else None), "\n".join(complaints)


def holds(reader: CheckpointReader | None, expected: dict[str, torch.Tensor]) -> bool:
    assert reader is not None and not reader.problems()
    return all(torch.equal(reader.whole(name), tensor) for name, tensor in expected.items())


def test_the_stored_files_are_the_local_ones(url: str, tmp_path: Path) -> None:
    save(tmp_path / "local", url, 5, tensors(), ranks=2)
    for file in step_directory(tmp_path / "local", 5).iterdir():
        fs, path = path_of(url, f"step-00000005/{file.name}")
        assert fs.cat_file(path) == file.read_bytes(), file.name
    fs, root = path_of(url, "step-00000005")
    assert len(fs.ls(root)) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_another_number_of_ranks_resumes_where_nothing_is_left(url: str, tmp_path: Path, ranks: int) -> None:
    save(tmp_path / "local", url, 5, tensors(1), ranks=3)
    save(tmp_path / "local", url, 9, tensors(2), ranks=3)
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "new").mkdir()
    for reader, complaints in resume(tmp_path / "new", url, ranks):
        assert holds(reader, tensors(2)) and reader is not None and reader.step == 9 and not complaints
    assert steps_in(tmp_path / "new") == [9] and not list((tmp_path / "new").glob(".*"))


def test_local_ones_are_used_unless_they_are_older_or_damaged(url: str, tmp_path: Path) -> None:
    root = tmp_path / "local"
    save(root, url, 5, tensors(1))
    save(root, url, 9, tensors(2))
    shutil.copytree(root, tmp_path / "kept")
    before = (step_directory(root, 9) / "COMPLETE").stat().st_mtime_ns
    assert step_of(root, url) == (9, "")
    assert (step_directory(root, 9) / "COMPLETE").stat().st_mtime_ns == before, "nothing was fetched"
    flip(step_directory(root, 9) / "rank-00000.safetensors")
    assert step_of(root, url) == (9, "")
    shutil.rmtree(step_directory(root, 9))
    assert step_of(root, url) == (9, "") and holds(CheckpointReader(step_directory(root, 9)), tensors(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_killed_at_any_moment_the_storage_has_the_old_or_the_new(url: str, tmp_path: Path) -> None:
    """Every operation on the storage in turn is the last; the local directory is then lost."""
    old, new, moment = tensors(1), tensors(2), 0
    fs = Storage(url)._fs
    while True:
        root = tmp_path / str(moment)
        if fs.exists(path_of(url, "")[1]):
            fs.rm(path_of(url, "")[1].rstrip("/"), recursive=True)
        save(root, url, 10, old, keep=1)
        left, log = moment, list[str]()

        def deadly(name: str, action: Callable[..., Any]) -> Callable[..., Any]:
            def act(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                if threading.current_thread().name.startswith("checkpoint-"):
                    log.append(name)  # noqa: B023
                    if left == 0:
                        raise SystemExit
                    left -= 1
                return action(*arguments, **options)

            return act

        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "pipe_file", "rm_file", "rm", "makedirs"):
                patch.setattr(type(fs), name, deadly(name, getattr(type(fs), name)))
            writer = CheckpointWriter(root, 0, 1, 1, Storage(url))
            writer.save(20, shards(new), {}, STATE)
            writer.wait()
        shutil.rmtree(root)
        step, said = step_of(root, url)
        assert step in (10, 20), (moment, log, said)
        assert holds(CheckpointReader(step_directory(root, step)), old if step == 10 else new)
        if left:
            break
        moment += 1
    assert {"open", "pipe_file", "rm"} <= set(log) and moment > 4
    assert Storage(url).steps() == [20] and step == 20


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no marker", r"it was not finished \(no COMPLETE marker\)"),
        ("no file", r"rank-00001\.safetensors is missing"),
        ("no manifest", r"manifest\.json is missing"),
        ("cut", r"rank-00001\.safetensors has 10 bytes instead of"),
        ("flipped", r"rank-00001\.safetensors is damaged \(SHA-256 differs\)"),
        ("manifest", r"manifest\.json is damaged"),
        ("other step", r"manifest\.json is of step 9"),
    ],
)
def test_what_is_not_whole_is_refused_with_the_reason(
    url: str, tmp_path: Path, damage: str, words: str
) -> None:
    root = tmp_path / "local"
    save(root, url, 5, tensors(1), ranks=2)
    save(root, url, 9, tensors(2), ranks=2)
    shutil.rmtree(root)
    fs, directory = path_of(url, "step-00000009")
    file = f"{directory}/rank-00001.safetensors"
    if damage == "no marker":
        fs.rm_file(f"{directory}/COMPLETE")
    elif damage == "no file":
        fs.rm_file(file)
    elif damage == "no manifest":
        fs.rm_file(f"{directory}/manifest.json")
    elif damage == "cut":
        fs.pipe_file(file, fs.cat_file(file)[:10])
    elif damage == "flipped":
        data = bytearray(fs.cat_file(file))
        data[-1] ^= 1
        fs.pipe_file(file, bytes(data))
    elif damage == "manifest":
        fs.pipe_file(f"{directory}/manifest.json", b"{}")
    else:
        fs.copy(directory, directory.replace("09", "11"), recursive=True)
        fs.rm(directory, recursive=True)
    reader, complaints = resume(root, url)[0]
    assert holds(reader, tensors(1)) and reader is not None and reader.step == 5
    (said,) = complaints
    assert re.search(words, said) and url in said
    assert not list(root.glob(".*"))


def test_old_ones_are_removed(url: str, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path / "local", url, step, tensors(step), keep=2)
    assert Storage(url).steps() == [4, 3]
    fs, path = path_of(url, "step-00000001")
    assert not fs.exists(path)


def test_a_step_that_is_saved_again_replaces_the_stored_one(url: str, tmp_path: Path) -> None:
    save(tmp_path / "local", url, 5, tensors(1), ranks=2)
    shutil.rmtree(tmp_path / "local")
    save(tmp_path / "local", url, 5, tensors(2), ranks=2)
    shutil.rmtree(tmp_path / "local")
    assert holds(resume(tmp_path / "local", url)[0][0], tensors(2))


@pytest.mark.parametrize("operation", ["open_file", "commit"])
def test_a_storage_that_fails_costs_the_copy_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def fails(*arguments: Any) -> None:
        raise StorageError("no such bucket")

    monkeypatch.setattr(Storage, operation, fails)
    url = f"file://{tmp_path}/store"
    (writer,) = save(tmp_path / "local", url, 5, tensors())
    failure = writer.failure()
    assert failure and "step-00000005 was not stored at file://" in failure and "no such bucket" in failure
    assert holds(CheckpointReader(step_directory(tmp_path / "local", 5)), tensors())
    assert not Storage(url).steps() or not Storage(url).is_complete(5)


def test_a_rank_whose_copy_breaks_off_leaves_no_stored_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, opened = f"file://{tmp_path}/store", Storage.open_file

    class Breaks:
        def write(self, data: memoryview) -> None:
            raise ConnectionResetError("gone")

        def close(self) -> None: ...

    def open_file(self: Storage, step: int, name: str) -> Any:
        return Breaks() if name == "rank-00001.safetensors" else opened(self, step, name)

    monkeypatch.setattr(Storage, "open_file", open_file)
    leading, _ = save(tmp_path / "local", url, 5, tensors(), ranks=2)
    failure = leading.failure()
    assert failure and "rank 1: ConnectionResetError: gone" in failure
    assert not Storage(url).is_complete(5)
    assert holds(CheckpointReader(step_directory(tmp_path / "local", 5)), tensors())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_storage_that_does_not_respond_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Starting again from the first step would be worse."""
    url = f"file://{tmp_path}/store"
    save(tmp_path / "local", url, 5, tensors())
    shutil.rmtree(tmp_path / "local")

    def fails(*arguments: Any, **options: Any) -> None:
        raise TimeoutError("no response")

    monkeypatch.setattr(type(Storage(url)._fs), "ls", fails)
    with pytest.raises(CheckpointError, match=r"no response|another rank"):
        resume(tmp_path / "local", url, ranks)


def test_names_that_are_no_steps_are_passed_over(url: str, tmp_path: Path) -> None:
    save(tmp_path / "local", url, 5, tensors())
    for name in ("step-5/x", "step-000000005/x", "notes/x", "step-00000007.old/x"):
        fs, path = path_of(url, name)
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, b"x")
    assert Storage(url).steps() == [5]


def test_a_manifest_cannot_lead_out_of_its_directory(url: str, tmp_path: Path) -> None:
    """Even with a marker that fits it."""
    save(tmp_path / "local", url, 5, tensors())
    shutil.rmtree(tmp_path / "local")
    fs, path = path_of(url, "step-00000005/manifest.json")
    text = fs.cat_file(path).decode().replace("rank-00000.safetensors", "../../rank-00000.safetensors")
    Storage(url).commit(5, text)
    step, said = step_of(tmp_path / "local", url)
    assert step is None and "does not describe rank-00000.safetensors" in said
    assert said.endswith("no valid checkpoint in " + url)
    # It was complete once: the run does not start from its first step unless it is told to.
    run, (world,) = RunDirectory(tmp_path), worlds(1)
    lost = lost_checkpoint(run, world, None, Storage(url))
    assert lost is not None and lost.fatal and lost.step == 5
    assert "start_over and another trainer.checkpoint_storage" in lost.words
    fs.rm_file(path_of(url, "step-00000005/COMPLETE")[1])
    assert lost_checkpoint(run, world, None, Storage(url)) is None, "it was never finished"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StorageError, match=r"trainer\.checkpoint_storage: s3://bucket/run .*s3fs"):
        Storage("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StorageError, match=r"pip install '\.\[storage\]' in a clone of isotrain"):
        Storage("memory://run")
