"""One training rank's part of a profiled step: its spans, and torch's trace of its operators."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import NamedTuple

from isotrain.device.base import Device, Profiler
from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import Span, SpanLog, profile_directory

# A larger trace is compressed, which Perfetto opens as well.
LARGEST_PLAIN = 1 << 20


class Profiled(NamedTuple):
    """A rank's record of a step."""

    spans: list[Span]
    problem: str | None
    """Why there is no trace, where there should be one."""


class RankProfile:
    def __init__(self, spans: SpanLog, run: RunDirectory, device: Device, rank: int, trace: bool) -> None:
        self._spans, self._run, self._device, self._rank, self._trace = spans, run, device, rank, trace
        self._profiler: Profiler | None = None

    def begin(self) -> None:
        if self._trace:
            self._profiler = self._device.profiler()
            self._profiler.start()
        self._spans.begin()

    def end(self, step: int) -> Profiled:
        spans, problem = self._spans.take(), None
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._device.synchronize()
            profiler.stop()
            try:
                directory = profile_directory(self._run, step)
                directory.mkdir(parents=True, exist_ok=True)
                _export(profiler, directory / f"trace-rank-{self._rank}.json")
            except (OSError, RuntimeError) as error:  # a full disk costs the trace, not the run
                problem = f"rank {self._rank} has no trace of step {step}: {error}"
        return Profiled(spans, problem)


def _export(profiler: Profiler, file: Path) -> None:
    packed = file.with_name(f"{file.name}.gz")
    for old in (file, packed):
        old.unlink(missing_ok=True)
    profiler.export_chrome_trace(str(file))
    if file.stat().st_size > LARGEST_PLAIN:
        with file.open("rb") as plain, gzip.open(packed, "wb", compresslevel=3) as target:
            shutil.copyfileobj(plain, target)
        file.unlink()
