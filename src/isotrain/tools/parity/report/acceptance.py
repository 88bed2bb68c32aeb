"""The acceptance rules of verl's Ascend community, applied by name to two runs, as a table.

`verl-ascend-nightly` is `baseline/check_npu.py` of verl-ascend-recipe, which verl's nightly workflows run:
means of steps 5 to 14, memory at the last step. `verl-ascend-task` is the acceptance text of its community
tasks. That does not say whether an error of 5 % is absolute, as in verl's published formula, or relative.
Both are computed; where they disagree, the line is left open.
S: steps that both runs have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isotrain.errors import DataError
from isotrain.language import Language, listed, said, tr, using
from isotrain.tools.parity.compare.objections import SPEED
from isotrain.tools.parity.run import Numbers, RunLog, Series, common, section

Status = Literal["holds", "broken", "not in the logs", "depends on the definition"]

REWARD = ("critic/rewards/mean", "critic/score/mean", "rollout/reward_mean", "train/reward", "reward")
LOSS = ("train/loss", "loss", "gpt_loss")
MISMATCH = ("training/rollout_probs_diff_mean",)
SECONDS = ("timing_s/step", "perf/time_per_step", "timing/step_total")
MEMORY = ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb")
_EVALUATION = re.compile(r"val-core/|val/test_score/|eval/eval_.*(pass|acc|score|reward)")

_PERCENT = 5.0
# The nightly check.
_FIRST, _LAST = 5, 14
# The community tasks: what counts as long, and the windows between which a curve rises or falls. The text has
# no windows; ten steps are what contributors report.
_STEPS, _HOURS, _WINDOW = 100, 12.0, 10
# An Atlas A2 has chips of the series 910B, which is what its tools call the device.
_A100, _A2 = re.compile(r"\bA100\b"), re.compile(r"\bA2\b|910B")
# Not counted in a throughput: these steps compile.
_WARM_UP = 4


@dataclass(frozen=True)
class Line:
    requirement: str
    status: Status
    metric: str = ""
    reference: float | None = None
    candidate: float | None = None
    measured: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Devices:
    """As a run recorded it, otherwise as the user states it."""

    reference: str | None
    candidate: str | None


@dataclass(frozen=True)
class Acceptance:
    rule: str
    source: str
    reference: RunLog
    candidate: RunLog
    devices: Devices
    lines: tuple[Line, ...]

    @property
    def accepted(self) -> bool | None:
        """True if every line holds, False if one is broken; None if the logs do not say."""
        if any(line.status == "broken" for line in self.lines):
            return False
        return True if all(line.status == "holds" for line in self.lines) else None


def accept(
    rule: str, reference: RunLog, candidate: RunLog, stated: tuple[str | None, str | None] = (None, None)
) -> Acceptance:
    """Every line of a rule; one that the logs have no values for is never taken to hold.

    `stated` are the devices of the two runs as the user names them, because logs of other trainers do not.
    """
    if rule not in RULES:
        raise DataError(f"--rule {rule!r}: there are {', '.join(RULES)}")
    source, lines = RULES[rule]
    devices = Devices(_recorded(reference) or stated[0], _recorded(candidate) or stated[1])
    results = tuple(lines(reference, candidate, devices))
    return Acceptance(rule, source, reference, candidate, devices, results)


def _recorded(run: RunLog) -> str | None:
    name = section(run.environment, "device").get("name")
    return name if isinstance(name, str) and name else None


# The nightly check


def _nightly(reference: RunLog, candidate: RunLog, _: Devices) -> Iterator[Line]:
    def line(
        requirement: str,
        names: Sequence[str],
        value_of: Callable[[Series], float | None],
        change: Callable[[float, float], float],
        unit: str,
        holds: Callable[[float], bool],
    ) -> Line:
        return _of_two_values(requirement, names, (reference, candidate), value_of, change, unit, holds)

    steps = f"{_FIRST}-{_LAST}"
    yield line(
        tr("reward, mean of steps {steps}: within 0.05", steps=steps),
        REWARD,
        _mean_of_window,
        lambda a, b: b - a,
        "",
        lambda difference: abs(difference) <= 0.05,
    )
    yield line(
        tr("probabilities of rollout and training apart, mean of steps {steps}: within 5 %", steps=steps),
        MISMATCH,
        _mean_of_window,
        _percent,
        " %",
        lambda percent: abs(percent) <= _PERCENT,
    )
    yield line(
        tr("throughput, mean of steps {steps}: not below -5 %", steps=steps),
        SPEED,
        _mean_of_window,
        _percent,
        " %",
        lambda percent: percent >= -_PERCENT,
    )
    yield line(
        tr("time a step, mean of steps {steps}: not above +5 %", steps=steps),
        SECONDS,
        _mean_of_window,
        _percent,
        " %",
        lambda percent: percent <= _PERCENT,
    )
    yield line(
        tr("memory at the last step: not above +1 GB"),
        MEMORY,
        lambda series: float(series.values_S[-1]),
        lambda a, b: b - a,
        " GB",
        lambda difference: difference <= 1,
    )


def _mean_of_window(series: Series) -> float | None:
    """Over those of the steps that the log has, as the check does it."""
    window = series.values_S[(series.steps_S >= _FIRST) & (series.steps_S <= _LAST)]
    return float(window.mean()) if len(window) else None


def _percent(reference: float, candidate: float) -> float:
    return 100 * (candidate - reference) / reference if reference else math.nan


def _of_two_values(
    requirement: str,
    names: Sequence[str],
    runs: tuple[RunLog, RunLog],
    value_of: Callable[[Series], float | None],
    change: Callable[[float, float], float],
    unit: str,
    holds: Callable[[float], bool],
) -> Line:
    """A line about one value of each run."""
    metrics = _find(runs, names)
    metric = _named(metrics)
    a, b = (value_of(run.metrics[name]) if name else None for run, name in zip(runs, metrics, strict=True))
    if a is None or b is None:
        what = tr("steps {first}-{last}", first=_FIRST, last=_LAST) if all(metrics) else f"`{names[0]}`"
        return Line(requirement, "not in the logs", metric, a, b, remark=_lacking((a, b), what))
    value = change(a, b)
    if not math.isfinite(b):
        remark = tr("the candidate's value is not finite")
        return Line(requirement, "broken", metric, a, b, remark=remark)
    if not math.isfinite(value):
        remark = tr("the reference's value is 0 or not finite")
        return Line(requirement, "not in the logs", metric, a, b, remark=remark)
    measured = f"{value:+.4g}{unit}"
    if change is _percent and (rounded := _rounding(runs, metrics, a)) > _PERCENT:
        coarse = tr("logged with three decimals, which may be {rounded:.0f} % of it", rounded=rounded)
        return Line(requirement, "not in the logs", metric, a, b, measured, coarse)
    remark = _short_window(runs, metrics) if value_of is _mean_of_window else ""
    status: Status = "holds" if holds(value) else "broken"
    return Line(requirement, status, metric, a, b, measured, remark)


def _rounding(runs: tuple[RunLog, RunLog], metrics: Sequence[str | None], value: float) -> float:
    """How many percent of a value verl's older logs may have lost: up to 0.4 they have three decimals."""
    values = [run.metrics[name].values_S for run, name in zip(runs, metrics, strict=True) if name]
    coarse = any((np.round(values_S, 3) == values_S).all() for values_S in values)
    return 100 * 0.0005 / abs(value) if coarse else 0.0


def _find(runs: tuple[RunLog, RunLog], names: Sequence[str]) -> tuple[str | None, str | None]:
    """The first of these metrics that both have; otherwise the first that each has."""
    has = [[name for name in names if name in run.metrics and len(run.metrics[name])] for run in runs]
    both = next((name for name in has[0] if name in has[1]), None)
    return both or next(iter(has[0]), None), both or next(iter(has[1]), None)


def _named(metrics: Sequence[str | None]) -> str:
    return " / ".join(dict.fromkeys(name for name in metrics if name))


def _lacking(values: Sequence[object], what: str) -> str:
    """Which side has no value."""
    if all(value is None for value in values):
        return tr("{what} missing in the reference and the candidate", what=what)
    if values[0] is None:
        return tr("{what} missing in the reference", what=what)
    return tr("{what} missing in the candidate", what=what)


def _short_window(runs: tuple[RunLog, RunLog], names: Sequence[str | None]) -> str:
    counts = []
    for run, name in zip(runs, names, strict=True):
        steps_S = run.metrics[name or ""].steps_S
        counts.append(int(((steps_S >= _FIRST) & (steps_S <= _LAST)).sum()))
    whole = _LAST - _FIRST + 1
    if min(counts) == whole:
        return ""
    return tr(
        "{one} and {other} of these {whole} steps are in the logs",
        one=counts[0],
        other=counts[1],
        whole=whole,
    )


# The community tasks


def _task(reference: RunLog, candidate: RunLog, devices: Devices) -> Iterator[Line]:
    runs = reference, candidate
    is_reward = bool(_find(runs, REWARD)[1])
    names = REWARD if is_reward else LOSS
    metrics = _find(runs, names)
    yield _length(candidate, metrics[1])
    yield _trend(candidate, metrics[1], is_reward)
    yield _mean_error(runs, metrics, f"`{names[0]}`")
    yield _evaluation(reference, candidate)
    yield _throughput(reference, candidate, devices)


def _length(candidate: RunLog, metric: str | None) -> Line:
    requirement = tr("{steps} steps or {hours:g} hours", steps=_STEPS, hours=_HOURS)
    if metric is None:
        remark = tr("neither a reward nor a loss in the candidate")
        return Line(requirement, "not in the logs", remark=remark)
    steps = int((candidate.metrics[metric].steps_S > 0).sum())
    timed = _find((candidate, candidate), SECONDS)[0]
    hours = float(candidate.metrics[timed].values_S.sum()) / 3600 if timed else None
    measured = tr("{steps} steps", steps=steps)
    if hours is not None:
        measured = tr("{steps} steps, {hours:.2f} h", steps=steps, hours=hours)
    if steps >= _STEPS or (hours is not None and hours >= _HOURS):
        return Line(requirement, "holds", metric, measured=measured)
    if hours is None:
        remark = tr("{what} missing in the candidate", what=f"`{SECONDS[0]}`")
        return Line(requirement, "not in the logs", metric, measured=measured, remark=remark)
    return Line(requirement, "broken", metric, measured=measured)


def _trend(candidate: RunLog, metric: str | None, is_reward: bool) -> Line:
    requirement = tr("loss falls and converges")
    if is_reward:
        requirement = tr("reward rises")
    values_S = candidate.metrics[metric].values_S if metric else np.empty(0)
    if metric is None or len(values_S) < 2 * _WINDOW:
        remark = tr("fewer than {steps} steps", steps=2 * _WINDOW)
        return Line(requirement, "not in the logs", metric or "", remark=remark)
    first, last = float(values_S[:_WINDOW].mean()), float(values_S[-_WINDOW:].mean())
    measured = tr(
        "{first:.4g} in the first {window} steps, {last:.4g} in the last",
        first=first,
        window=_WINDOW,
        last=last,
    )
    # A comparison with NaN is false, so a run that ended in NaN does not rise.
    right = last > first if is_reward else last < first
    remark = ""
    if right and not is_reward:
        remark = tr("it falls; the rule has no number for convergence")
    return Line(requirement, "holds" if right else "broken", metric, measured=measured, remark=remark)


def _mean_error(runs: tuple[RunLog, RunLog], metrics: tuple[str | None, str | None], expected: str) -> Line:
    requirement = tr("mean error below 5 %")
    if not metrics[0] or not metrics[1]:
        return Line(requirement, "not in the logs", _named(metrics), remark=_lacking(metrics, expected))
    steps_S, (a_S, b_S) = common([runs[0].metrics[metrics[0]], runs[1].metrics[metrics[1]]])
    if not len(steps_S):
        remark = tr("no step in common")
        return Line(requirement, "not in the logs", _named(metrics), remark=remark)
    remark = tr("over {steps} steps in common", steps=len(steps_S))
    return _error(requirement, _named(metrics), a_S, b_S, lambda percent: percent < _PERCENT, remark)


def _error(
    requirement: str, metric: str, a_S: Numbers, b_S: Numbers, holds: Callable[[float], bool], remark: str
) -> Line:
    """A mean error in percent, as verl's formula has it and relative to the reference."""
    a, b = float(a_S.mean()), float(b_S.mean())
    if not np.isfinite(b_S).all():
        remark = tr("the candidate has values that are not finite")
        return Line(requirement, "broken", metric, a, b, remark=remark)
    if not np.isfinite(a_S).all():
        remark = tr("the reference has values that are not finite")
        return Line(requirement, "not in the logs", metric, a, b, remark=remark)
    absolute = 100 * float(np.abs(b_S - a_S).mean())
    if (a_S == 0).any():
        measured = tr(
            "{absolute:.3g} % absolute; relative not defined, the reference is 0 at a step", absolute=absolute
        )
        return Line(requirement, "holds" if holds(absolute) else "broken", metric, a, b, measured, remark)
    relative = 100 * float((np.abs(b_S - a_S) / np.abs(a_S)).mean())
    measured = tr(
        "{absolute:.3g} % absolute (verl's formula), {relative:.3g} % relative",
        absolute=absolute,
        relative=relative,
    )
    status: Status = "depends on the definition"
    if holds(absolute) == holds(relative):
        status = "holds" if holds(absolute) else "broken"
    return Line(requirement, status, metric, a, b, measured, remark)


def _evaluation(reference: RunLog, candidate: RunLog) -> Line:
    """By the validations of the logs: the one that is furthest apart after the last step that both have."""
    requirement = tr("downstream evaluation within 5 %")
    names = [name for name in candidate.metrics if _EVALUATION.match(name) and name in reference.metrics]
    worst: tuple[float, str, int, Numbers, Numbers] | None = None
    compared = 0
    for name in names:
        steps_S, (a_S, b_S) = common([reference.metrics[name], candidate.metrics[name]])
        if not len(steps_S) or steps_S[-1] <= 0:  # step 0 is the model before training
            continue
        compared += 1
        difference = abs(float(b_S[-1] - a_S[-1]))
        apart = difference if math.isfinite(difference) else math.inf
        if worst is None or apart > worst[0]:
            worst = apart, name, int(steps_S[-1]), a_S[-1:], b_S[-1:]
    if worst is None:
        remark = tr("no validation after training in both logs")
        return Line(requirement, "not in the logs", remark=remark)
    _, name, step, a_S, b_S = worst
    remark = tr(
        "validation in the log at step {step}, the worst of {compared}; not a separate evaluation",
        step=step,
        compared=compared,
    )
    return _error(requirement, name, a_S, b_S, lambda percent: percent <= _PERCENT, remark)


def _throughput(reference: RunLog, candidate: RunLog, devices: Devices) -> Line:
    requirement = tr("A2: at least 0.7 x A100's throughput")
    runs = reference, candidate
    metrics = _find(runs, SPEED)
    metric = _named(metrics)
    if not metrics[0] or not metrics[1]:
        return Line(requirement, "not in the logs", metric, remark=_lacking(metrics, f"`{SPEED[0]}`"))
    a, b = _steady(reference.metrics[metrics[0]]), _steady(candidate.metrics[metrics[1]])
    if not math.isfinite(b) or not math.isfinite(a) or a <= 0:
        remark = tr("a throughput is not a positive number")
        return Line(requirement, "not in the logs", metric, a, b, remark=remark)
    measured = tr("{ratio:.3f} x", ratio=b / a)
    if not devices.reference or not devices.candidate:
        remark = tr("the logs do not name the devices: state them")
        return Line(requirement, "not in the logs", metric, a, b, measured, remark)
    remark = tr("{candidate} against {reference}", candidate=devices.candidate, reference=devices.reference)
    if not (_A100.search(devices.reference) and _A2.search(devices.candidate)):
        remark = tr("{devices}: not an A2 and an A100", devices=remark)
        return Line(requirement, "not in the logs", metric, a, b, measured, remark)
    return Line(requirement, "holds" if b / a >= 0.7 else "broken", metric, a, b, measured, remark)


def _steady(series: Series) -> float:
    values_S = series.values_S
    return float((values_S[_WARM_UP:] if len(values_S) > 2 * _WARM_UP else values_S).mean())


_RECIPES = "https://github.com/verl-project/verl-ascend-recipe"
RULES: dict[str, tuple[str, Callable[[RunLog, RunLog, Devices], Iterator[Line]]]] = {
    "verl-ascend-nightly": (f"{_RECIPES}/blob/main/baseline/check_npu.py", _nightly),
    "verl-ascend-task": (f"{_RECIPES}/issues/79", _task),
}

# The table

_STATUS: dict[Status, str] = {
    "holds": tr("holds|of an acceptance"),
    "broken": tr("**broken**"),
    "not in the logs": tr("not in the logs"),
    "depends on the definition": tr("depends on the definition of the error"),
}
_REFERENCE, _CANDIDATE = tr("reference|of an acceptance"), tr("candidate|of an acceptance")
_COLUMNS = (
    *(tr("requirement"), tr("metric"), _REFERENCE, _CANDIDATE),
    *(tr("measured"), tr("result|of an acceptance"), tr("remark")),
)
_RESULT = {
    True: tr("**Accepted: every line of the rule holds.**"),
    False: tr("**Not accepted.**"),
    None: tr("**Open: nothing is broken, but the logs do not settle every line.**"),
}


def markdown(acceptance: Acceptance, language: Language) -> str:
    """The table of a pull request, in English or in Chinese."""
    counts = {status: sum(line.status == status for line in acceptance.lines) for status in _STATUS}
    devices = acceptance.devices
    with using(language):
        summary = said(
            listed(f"{count} {said(_STATUS[status]).strip('*')}" for status, count in counts.items() if count)
        )
        lines = [
            f"### {said(tr('Acceptance'))}: {acceptance.rule}",
            "",
            f"- {said(_REFERENCE)}: {_run(acceptance.reference, devices.reference)}",
            f"- {said(_CANDIDATE)}: {_run(acceptance.candidate, devices.candidate)}",
            f"- {said(tr('rule'))}: {acceptance.source}",
            "",
            "| " + " | ".join(map(said, _COLUMNS)) + " |",
            "|---|---|---|---|---|---|---|",
            *(_row(line) for line in acceptance.lines),
            "",
            f"{said(_RESULT[acceptance.accepted])} ({summary})",
        ]
    return "\n".join(lines) + "\n"


def _row(line: Line) -> str:
    cells = (
        said(line.requirement),
        _code(line.metric) if line.metric else "-",
        _number(line.reference),
        _number(line.candidate),
        said(line.measured) or "-",
        said(_STATUS[line.status]),
        _text(said(line.remark)),
    )
    return "| " + " | ".join(cells) + " |"


def _run(run: RunLog, device: str | None) -> str:
    digest = next(iter(run.sha256.values()), "")[:12]
    device = _text(device) if device else said(tr("device not recorded"))
    parts = [_code(run.path.name), _text(run.format), device]
    return ", ".join([*parts, f"sha256 {digest}"] if digest else parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _code(text: str) -> str:
    return "`" + _printable(text).replace("`", "'").replace("|", "\\|") + "`"


def _text(text: str) -> str:
    for mark in "\\*[]<>|":
        text = text.replace(mark, "\\" + mark)
    return _printable(text)


def _printable(text: str) -> str:
    """Names of a stranger's log go into a terminal and a web page."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
