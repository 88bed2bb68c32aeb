"""The reference file of nightly jobs: curves of several reruns, averaged over blocks of records.

It may come from a stranger: JSON of a bounded size, whose every field is checked.

B: blocks, S: steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from isotrain.files import parse_json
from isotrain.language import tr
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.parity.read.bounded import Source, clipped
from isotrain.tools.parity.run import BASELINE, RunLog, Series
from isotrain.tools.parity.thresholds import FEWEST_RUNS

VERSION = 1
MOST_RUNS, MOST_METRICS = 20, 24
# Curves of `_NUMBERS` values take some 140 kB; a file with long configurations still is one.
_NUMBERS, _FEWEST_BLOCKS, _MOST_BLOCKS = 14_000, 32, 500
MAX_BYTES = 1 << 20
_HEAD = re.compile(rb'\s*\{\s*"format"\s*:\s*"isotrain parity baseline"')

# So bounded, sums and squares of hostile numbers stay finite.
_Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e100, le=1e100)]
_Step = Annotated[int, Field(ge=-(2**53), le=2**53)]
_Text = Annotated[str, Field(max_length=1000)]
_Digests = Annotated[dict[_Text, _Text], Field(max_length=100)]


@dataclass(frozen=True)
class BlockCurve:
    """One metric of every rerun, at the steps that all of them have."""

    first: _Step
    ends: Annotated[list[_Step], Field(min_length=1, max_length=_MOST_BLOCKS)]
    """The last step of each block."""
    records: Annotated[list[Annotated[int, Field(ge=1, le=2**31)]], Field(max_length=_MOST_BLOCKS)]
    """Values that each block is the mean of."""
    values: Annotated[list[list[_Number]], Field(max_length=MOST_RUNS)]
    """A list for each rerun."""

    @property
    def is_regular(self) -> bool:
        rising = bool((np.diff([self.first - 1, *self.ends]) > 0).all())
        sizes = {len(self.ends), len(self.records), *map(len, self.values)}
        return rising and len(sizes) == 1

    def block_means(self, series: Series) -> Series:
        """Another run's metric over the same blocks; one with fewer records than the reruns' is left out."""
        ends_B = np.array(self.ends)
        block_S = np.searchsorted(ends_B, series.steps_S)
        known_S = (series.steps_S >= self.first) & (block_S < len(ends_B))
        count_B = np.bincount(block_S[known_S], minlength=len(ends_B))
        sum_B = np.bincount(block_S[known_S], series.values_S[known_S], minlength=len(ends_B))
        whole_B = count_B >= np.array(self.records)
        return Series(ends_B[whole_B], sum_B[whole_B] / count_B[whole_B])

    def end(self) -> Series:
        """The last two steps that reruns recorded, without values."""
        last = self.ends[-1]
        interval = (last - self.first) / max(1, sum(self.records) - 1)
        return Series(np.unique([round(last - interval), last]), np.zeros(2))


@dataclass(frozen=True)
class Rerun:
    path: _Text
    format: _Text
    sha256: _Digests


@dataclass(frozen=True)
class BaselineFile:
    format: Literal["isotrain parity baseline"]
    version: Literal[1]
    isotrain: _Text
    date: _Text
    nights: Annotated[int, Field(ge=1, le=100_000)]
    false_alarms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """So many of these nights may be called different without a difference."""
    margins: dict[_Text, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    runs: Annotated[list[Rerun], Field(min_length=FEWEST_RUNS, max_length=MOST_RUNS)]
    recipe: dict[str, Any] | None
    settings: dict[str, Any] | None
    environment: dict[str, Any] | None
    planned_steps: Annotated[int, Field(ge=1, le=2**53)] | None
    data: _Digests
    left_out: Annotated[list[_Text], Field(max_length=MOST_METRICS * 10)]
    """Metrics that no run is compared by, because a rerun lacks them or they are not numbers there."""
    curves: Annotated[dict[_Text, BlockCurve], Field(min_length=1, max_length=MOST_METRICS)]
    digest: str = field(default="", compare=False)

    def reruns(self, path: Path, sha256: dict[str, str]) -> list[RunLog]:
        """Each rerun's curves; the first has what is known of all."""
        return [self._run(path, sha256, number) for number in range(len(self.runs))]

    def mean(self, path: Path, sha256: dict[str, str]) -> RunLog:
        """All reruns as one run."""
        return self._run(path, sha256, None)

    def _run(self, path: Path, sha256: dict[str, str], number: int | None) -> RunLog:
        metrics = {}
        for name, curve in self.curves.items():
            values_NB = np.array(curve.values)
            values_B = values_NB.mean(axis=0) if number is None else values_NB[number]
            metrics[name] = Series(np.array(curve.ends), values_B)
        records = max(max(curve.records) for curve in self.curves.values())
        about = tr(
            "{count} reruns, recorded {date}; a point is the mean of up to {records} steps",
            count=len(self.runs),
            date=self.date,
            records=records,
        )
        return RunLog(
            path,
            BASELINE,
            metrics,
            self.recipe,
            self.settings,
            self.environment,
            self.planned_steps,
            self.data,
            sha256,
            (about,),
        )


def is_baseline(path: Path) -> bool:
    return path.is_file() and begins_baseline(next(Source(path).chunks(), b""))


def begins_baseline(head: bytes) -> bool:
    return bool(_HEAD.match(head))


def read_baseline(path: Path) -> tuple[BaselineFile, dict[str, str]]:
    """The file and the SHA-256 of its bytes."""
    source = Source(path)
    text = source.whole(MAX_BYTES)
    again = "; make it again with `isotrain parity baseline`"
    try:
        content = parse_json(text.decode())
    except ValueError as error:
        raise source.error(f"not JSON ({clipped(str(error))}){again}") from error
    # A newer format has other fields: its version is what to say.
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise source.error(f"not a baseline of version {VERSION}{again}")
    try:
        baseline = TypeAdapter(BaselineFile).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise source.error(f"not a baseline: {clipped(where, 200)}: {first['msg']}{again}") from error
    if content.pop("digest", None) != _digest(content):
        raise source.error(f"damaged or edited: its digest is of another content{again}")
    for name, curve in baseline.curves.items():
        if not curve.is_regular or len(curve.values) != len(baseline.runs):
            raise source.error(f"not a baseline: the curves of {clipped(name)} do not match{again}")
    return baseline, source.sha256


def write_baseline(path: Path, baseline: BaselineFile) -> int:
    """Its size in bytes. A line for each metric, so that a repository shows what has changed."""
    content = asdict(baseline)
    del content["digest"]
    content["digest"] = _digest(content)
    curves = ",\n".join(f"{json.dumps(name)}: {_compact(one)}" for name, one in content["curves"].items())
    parts = [
        f'"curves": {{\n{curves}\n}}' if name == "curves" else f"{json.dumps(name)}: {_compact(value)}"
        for name, value in content.items()
    ]
    text = "{" + ",\n".join(parts) + "}\n"
    write_atomically(path, text)
    return len(text.encode())


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _digest(content: dict[str, Any]) -> str:
    """Finds damage; it does not say who made the file."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def blocks_of(steps_S: Any, metrics: int, runs: int) -> tuple[list[int], list[int]]:
    """The last step and the number of records of each block, so that the file stays small."""
    most = min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, _NUMBERS // (metrics * (runs + 2))))
    bounds = np.linspace(0, len(steps_S), min(most, len(steps_S)) + 1).round().astype(int)
    return [int(steps_S[end - 1]) for end in bounds[1:]], np.diff(bounds).tolist()


def block_values(curve: BlockCurve, series: Series) -> list[float]:
    """Six digits: a margin is far above them."""
    return [float(f"{value:.6g}") for value in curve.block_means(series).values_S.tolist()]
