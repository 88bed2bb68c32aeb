"""OpenRLHF's console output: lines `Global step 3: {...}` (0.8.1 to 0.11.0), or progress bars.

The lines start with a star, except those of asynchronous rollout from 0.9.7 on.

Bars (0.4.0 to 0.11.0 for SFT, DPO, KTO, RM and PRM; up to 0.8.0 for PPO) hold three digits a value and count
micro-batches, not optimizer steps; a resumed run starts its bar at 0. TensorBoard files have neither limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from isotrain.tools.parity.read.bounded import Source, number, whole_number
from isotrain.tools.parity.read.columns import Columns
from isotrain.tools.parity.run import RunLog

_TRAIN = re.compile(r"Global step ([0-9]{1,18}): (?=\{)")
_EVAL = re.compile(r"(?:global_step ([0-9]{1,18}), eval_metrics|Eval at step ([0-9]{1,18})): (?=\{)")
_BAR = re.compile(
    r"(Train step of epoch|Episode|Eval stage of (?:steps|global_step)) "
    r"(?:([0-9]{1,9})|\[([0-9]{1,9})/[0-9]+\]):"
    r" +[0-9]+%\|[^|]*\| ([0-9]{1,12})/([0-9]{1,12}) \[([^\[\]]*)\]"
)
# A string that is never closed is one token up to the end, so that hostile text is not scanned twice.
_TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.?)*(?:'|\Z)|"(?:[^"\\]|\\.?)*(?:"|\Z)|[\[\](){},:]|[^\s\[\](){},:'"]+|\s+|.""",
    re.DOTALL,
)
# Nearly every line is of this kind, which needs no look at single tokens.
_PLAIN = re.compile(r"\{(?:'[^'\\]*': [-+.0-9a-z]+(?:, |(?=\})))*\}")
_PAIR = re.compile(r"'([^'\\]+)': ([-+.0-9a-z]+)")
_MARKS = (b"lobal", b"Train step of epoch ", b"Episode [", b"Eval ")


def is_openrlhf_line(line: bytes) -> bool:
    text = _text(line)
    if text is None:
        return False
    bar = _BAR.search(text)
    return bool(_TRAIN.search(text) or (bar and _postfix(bar[6])))


def read_openrlhf(path: Path) -> RunLog:
    source = Source(path)
    lines, bars = Columns(source, resumes=True), _Bars(source)
    for number_, content, ended in source.console_lines():
        text = _text(content)
        if text is None:
            continue
        bar = _BAR.search(text)
        if bar:
            bars.saw(bar, number_)
        elif ended:
            # The last number of a line without an end may lack digits; a bar ends with its bracket.
            _add_line(source, lines, text, number_)
    bars.end()
    # PPO has bars inside its steps too: where there are lines of whole steps, only they count.
    columns = lines if lines else bars.columns
    return columns.run("OpenRLHF log", "no `Global step 3: {...}` and no progress bar with values")


def _text(line: bytes) -> str | None:
    if not any(mark in line for mark in _MARKS):
        return None
    return line.decode("utf-8", errors="replace")


def _add_line(source: Source, columns: Columns, text: str, line: int) -> None:
    for pattern, prefix in ((_TRAIN, ""), (_EVAL, "eval/")):
        matched = pattern.search(text)
        if matched:
            step = int(matched[1] or matched[2])
            values = _dictionary(text[matched.end() :])
            if values is None:
                raise source.error(f"the values of step {step} break off: is the rest on another line?", line)
            columns.add_row(step, [(prefix + name, value) for name, value in values.items()], line)
            return


def _dictionary(text: str) -> dict[str, float] | None:
    """The numbers of a dict as Python prints it, other values passed over; None where it has no end."""
    values: dict[str, float] = {}
    plain = _PLAIN.match(text)
    if plain:
        for name, value in _PAIR.findall(plain[0]):
            metric = number(value)
            if metric is not None:
                values[name] = metric
        return values
    depth = 0
    name, value, has_colon = "", "", False
    for matched in _TOKEN.finditer(text):
        token = matched[0]
        if depth == 1 and token in (",", "}"):
            metric = number(value)
            if has_colon and metric is not None:
                values[name] = metric
            name, value, has_colon = "", "", False
        elif depth == 1 and token == ":" and not has_colon:
            has_colon = True
        elif has_colon:
            value += token if len(value) < 200 else ""
        elif token[0] in "'\"" and len(token) > 2:
            name = token[1:-1]
        depth += (token in "[{(") - (token in "]})")
        if depth <= 0:
            return values
    return None


def _postfix(text: str) -> dict[str, float]:
    """`00:10<01:30, 2.0s/it, gpt_loss=2.31, lr=1e-5` without what tqdm itself says."""
    values = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        parsed = number(value) if equals else None
        if parsed is not None:
            values[name.strip()] = parsed
    return values


@dataclass
class _Shown:
    """A bar's content: `count` batches are done, and `values` were set last."""

    kind: str
    epoch: int
    count: int
    total: int
    values: dict[str, float]
    line: int

    def same_bar(self, other: _Shown) -> bool:
        return (self.kind, self.epoch, self.total) == (other.kind, other.epoch, other.total)


class _Bars:
    """Values by step, from bars whose values are set before their count moves on.

    Setting values always prints and moving the count sometimes does, so `7/50 [loss=a]` may still hold the
    values of batch 7, but the last print with that count holds those of batch 8.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.columns = Columns(source)
        self._now: _Shown | None = None
        self._taken = ""
        self._eval: tuple[int, dict[str, float], int] | None = None

    def saw(self, bar: re.Match[str], line: int) -> None:
        values = _postfix(bar[6])
        if not values:
            return
        number_ = whole_number(bar[2] or bar[3]) or 0
        if bar[1].startswith("Eval"):
            # Its mean is over more batches in each print; the last print counts.
            if self._eval and self._eval[0] != number_:
                self._take_eval()
            self._eval = number_, values, line
            return
        epoch = number_ - 1 if bar[1] == "Episode" else number_
        shown = _Shown(bar[1], epoch, int(bar[4]), int(bar[5]), values, line)
        before = self._now
        if before and not (before.same_bar(shown) and before.count == shown.count):
            self._take(before, last=not before.same_bar(shown))
        self._now = shown

    def end(self) -> None:
        if self._now:
            self._take(self._now, last=True)
        self._take_eval()

    def _take_eval(self) -> None:
        if self._eval:
            step, values, line = self._eval
            self.columns.add_row(step, [(f"eval/{name}", value) for name, value in values.items()], line)

    def _take(self, shown: _Shown, last: bool) -> None:
        # A bar that was cut may end with its count moved on, and values that were taken already.
        if shown.count >= shown.total or (last and repr(shown.values) == self._taken):
            return
        step = shown.epoch * shown.total + shown.count + 1
        if not -(2**63) <= step < 2**63:
            raise self._source.error(f"step {step} is too large", shown.line)
        self.columns.add_row(step, list(shown.values.items()), shown.line)
        self._taken = repr(shown.values)
