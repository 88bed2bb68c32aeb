"""Writes checkpoints in the background: staged in memory, committed atomically, old ones removed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from isotrain.engine.checkpoint.layout import (
    FORMAT,
    MANIFEST,
    MARKER,
    WRITING,
    rank_file,
    step_directory,
    step_name,
    steps_in,
    sync,
)
from isotrain.engine.checkpoint.storage import Storage, StorageError, StoredCopy
from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.models.weights import Shard
from isotrain.observe.run_directory import write_saved
from isotrain.observe.spans import SpanLog

# Ranks write at their own pace to one file system; one that is silent for longer than this has failed.
PEER_TIMEOUT_SECONDS = 1800.0


class CheckpointWriter:
    """One rank's writer. Ranks meet through the file system only: no collective runs beside training.

    Each rank writes its shards into a temporary directory and then a small report; the first rank waits
    for all reports, writes the manifest, renames the directory and puts the marker in. A failed save leaves
    earlier checkpoints alone and is reported by `failure()`.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        ranks: int,
        keep: int,
        storage: Storage | None = None,
        saved: Path | None = None,
        spans: SpanLog | None = None,
    ) -> None:
        """`saved` is a file outside of `root` that gets the newest complete step."""
        assert keep >= 1, "the newest checkpoint is never removed"
        self.root = root
        self.rank = rank
        self.ranks = ranks
        self.keep = keep
        self.storage = storage
        self.saved = saved
        self.spans = spans or SpanLog("")
        self._thread: threading.Thread | None = None
        self._unreported: list[str] = []
        self._newest_failure: str | None = None
        if rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            for leftover in root.glob(f"{WRITING}*"):
                remove(leftover)

    def save(
        self,
        step: int,
        shards: Mapping[str, Shard],
        extras: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        copied: bool = False,
    ) -> None:
        """Copy the shards and write them in the background; waits for an earlier save to end first.

        `extras` is this rank's own JSON (its host generators), `state` the loop's, the same on every rank.
        `copied` shards are host copies that nothing changes before `join`: they are written as they are.
        """
        self.join()
        self._newest_failure = None
        # The copy is what makes the save consistent: training changes the weights while the thread writes.
        staged = {
            name: shard.local.detach().to("cpu", copy=not copied).contiguous()
            for name, shard in shards.items()
        }
        places = {name: {"shape": shard.shape, "offset": shard.offset} for name, shard in shards.items()}
        metadata = {"shards": json.dumps(places), "extras": json.dumps(extras)}
        # No daemon: a loop that ends with an error does not take the checkpoint being written with it.
        self._thread = threading.Thread(
            target=self._run, args=(step, staged, metadata, dict(state)), name=f"checkpoint-{step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written; `failure()` then has the newest failure, even an old one."""
        self.join()
        if self._newest_failure and self._newest_failure not in self._unreported:
            self._unreported.append(self._newest_failure)

    def failure(self) -> str | None:
        """The error since the last call, if there was one."""
        failures = [self._unreported.pop(0) for _ in range(len(self._unreported))]
        return "; ".join(failures) or None

    def join(self) -> None:
        """Wait until nothing is being written; `failure()` says nothing more by it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(
        self, step: int, staged: dict[str, torch.Tensor], metadata: dict[str, str], state: dict[str, Any]
    ) -> None:
        target = step_directory(self.root, step)
        temporary = self.root / f"{WRITING}{target.name}"
        try:
            if self.rank == 0:
                self._remove_leftovers(temporary)
            temporary.mkdir(exist_ok=True)
            with self.spans.span("write_checkpoint"):
                report = self._write_shards(temporary, step, staged, metadata)
                if self.rank == 0:
                    self._commit(temporary, target, step, state, report)
        except Exception as error:  # a thread has no caller to raise to: the loop asks for the failure
            who = "" if isinstance(error, _PeerFailure) else f"rank {self.rank}: "
            self._newest_failure = f"checkpoint {target.name} was not saved: {who}{error}"
            self._unreported.append(self._newest_failure)
            self._report_failure(temporary, str(error))

    def _write_shards(
        self, temporary: Path, step: int, staged: dict[str, torch.Tensor], metadata: dict[str, str]
    ) -> dict[str, Any]:
        path = temporary / rank_file(self.rank)
        copy = StoredCopy(self.storage, step, path.name)
        try:
            with path.open("wb") as file:
                written = write_tensors(_Both(file, copy), staged, metadata)
                file.flush()
                os.fsync(file.fileno())
        finally:
            copy.close()
        report = {"file": written.report(), "not_stored": copy.error}
        self._write_report(temporary, report)
        return report

    def _write_report(self, temporary: Path, report: dict[str, Any]) -> None:
        # Renamed into place, so that the first rank never reads half a report.
        partial = temporary / f"report-{self.rank:05d}.partial"
        partial.write_text(json.dumps(report))
        partial.rename(_report(temporary, self.rank))

    def _report_failure(self, temporary: Path, error: str) -> None:
        if self.rank == 0:
            remove(temporary)  # also gives a full disk its space back
            return
        try:
            (temporary / rank_file(self.rank)).unlink(missing_ok=True)
            self._write_report(temporary, {"error": error})
        except OSError:
            # An empty file still fits on a full disk. Failing that, the first rank runs into its time limit.
            with contextlib.suppress(OSError):
                _report(temporary, self.rank).touch()

    def _commit(
        self, temporary: Path, target: Path, step: int, state: dict[str, Any], own_report: dict[str, Any]
    ) -> None:
        reports = {0: own_report} | {rank: _await_report(temporary, rank) for rank in range(1, self.ranks)}
        for rank, report in reports.items():
            if "error" in report:
                raise _PeerFailure(f"rank {rank}: {report['error']}")
            _report(temporary, rank).unlink()
        manifest = json.dumps(
            {
                "format": FORMAT,
                "step": step,
                "ranks": self.ranks,
                "state": state,
                "files": {rank_file(rank): report["file"] for rank, report in reports.items()},
            },
            indent=1,
        )
        # While the local one is not complete yet, so that whoever waits for that waits for this too.
        self._commit_copy(step, manifest, reports)
        commit_directory(temporary, target, manifest)
        self._note_saved(step)
        self._remove_old(step)

    def _note_saved(self, step: int) -> None:
        """After the checkpoint is complete: a kill in between leaves one that nobody would miss."""
        if self.saved is not None:
            try:
                write_saved(self.saved, step)
            except OSError as error:
                self._unreported.append(
                    f"checkpoint {step_name(step)} was saved, but {self.saved} not: {error}"
                )

    def _commit_copy(self, step: int, manifest: str, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """A copy that fails is reported, and the local checkpoint is committed all the same."""
        if self.storage is None:
            return
        failed = [
            f"rank {rank}: {report['not_stored']}" for rank, report in reports.items() if report["not_stored"]
        ]
        if not failed:
            try:
                self.storage.commit(step, manifest)
                self.storage.remove_old(step, self.keep)
            except StorageError as error:
                failed = [str(error)]
        if failed:
            where = f"was not stored at {self.storage.url}"
            self._newest_failure = f"checkpoint {step_name(step)} {where}: {'; '.join(failed)}"
            self._unreported.append(self._newest_failure)

    def _remove_old(self, newest: int) -> None:
        """Keeps the last complete ones; one without a marker was never finished, or its removal was not.

        What cannot be removed now is tried again after the next save: the new checkpoint is safe already.
        """
        steps = [step for step in steps_in(self.root) if step <= newest]
        complete = [step for step in steps if (step_directory(self.root, step) / MARKER).exists()]
        for step in set(steps) - set(complete[: self.keep]):
            remove(step_directory(self.root, step))

    def _remove_leftovers(self, temporary: Path) -> None:
        """A rank that came late to a failed save has made its directory again; names sort by step."""
        for leftover in self.root.glob(f"{WRITING}*"):
            if leftover.name < temporary.name:
                remove(leftover)


def remove(directory: Path) -> None:
    """Remove a checkpoint, or as much of it as possible; of a link only the link, whatever it leads to."""
    with contextlib.suppress(OSError):
        if directory.is_symlink():
            directory.unlink()
            return
        # Without its marker it is no checkpoint any more, however far the removal gets.
        (directory / MARKER).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def commit_directory(temporary: Path, target: Path, manifest: str) -> None:
    """Make a directory with all files of a checkpoint that checkpoint."""
    _write_synced(temporary / MANIFEST, manifest)
    sync(temporary)
    if target.is_symlink():
        target.unlink()
    elif target.exists():  # an earlier one of the same step that turned out to be damaged
        shutil.rmtree(target)
    temporary.rename(target)
    try:
        sync(target.parent)
        _write_synced(target / MARKER, hashlib.sha256(manifest.encode()).hexdigest())
        sync(target)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        raise


class _Both:
    """The local file, and its copy in the storage."""

    def __init__(self, file: BinaryIO, copy: StoredCopy) -> None:
        self._file, self._copy = file, copy

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self._copy.write(data)


class _PeerFailure(Exception):
    """The report of another rank, or an error if it did not report."""


def _report(temporary: Path, rank: int) -> Path:
    return temporary / f"report-{rank:05d}.json"


def _await_report(temporary: Path, rank: int) -> dict[str, Any]:
    path = _report(temporary, rank)
    deadline = time.monotonic() + PEER_TIMEOUT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise _PeerFailure(f"rank {rank} did not report within {PEER_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.02)
    report: dict[str, Any] = json.loads(path.read_text() or '{"error": "could not even write its report"}')
    return report


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
