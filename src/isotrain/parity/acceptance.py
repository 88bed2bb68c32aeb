"""The acceptance rules of verl's Ascend community, applied by name to two runs.

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
from isotrain.parity.run import Numbers, Run, Series, common, section

Status = Literal["holds", "broken", "not in the logs", "depends on the definition"]

REWARD = ("critic/rewards/mean", "critic/score/mean", "rollout/reward_mean", "train/reward", "reward")
LOSS = ("train/loss", "loss", "gpt_loss")
MISMATCH = ("training/rollout_probs_diff_mean",)
SPEED = ("perf/throughput", "throughput", "tokens_per_second")
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
class Words:
    """The same in English and in Chinese."""

    en: str
    zh: str


@dataclass(frozen=True)
class Line:
    requirement: Words
    status: Status
    metric: str = ""
    reference: float | None = None
    candidate: float | None = None
    measured: Words = Words("", "")
    remark: Words = Words("", "")


@dataclass(frozen=True)
class Devices:
    """As a run recorded it, otherwise as the user states it."""

    reference: str | None
    candidate: str | None


@dataclass(frozen=True)
class Acceptance:
    rule: str
    source: str
    reference: Run
    candidate: Run
    devices: Devices
    lines: tuple[Line, ...]

    @property
    def accepted(self) -> bool | None:
        """True if every line holds, False if one is broken; None if the logs do not say."""
        if any(line.status == "broken" for line in self.lines):
            return False
        return True if all(line.status == "holds" for line in self.lines) else None


def accept(
    rule: str, reference: Run, candidate: Run, stated: tuple[str | None, str | None] = (None, None)
) -> Acceptance:
    """Every line of a rule; one that the logs have no values for is never taken to hold.

    `stated` are the devices of the two runs as the user names them, because logs of other trainers do not.
    """
    if rule not in RULES:
        raise DataError(f"--rule {rule!r}: there are {', '.join(RULES)}")
    source, lines = RULES[rule]
    devices = Devices(_recorded(reference) or stated[0], _recorded(candidate) or stated[1])
    found = tuple(lines(reference, candidate, devices))
    return Acceptance(rule, source, reference, candidate, devices, found)


def _recorded(run: Run) -> str | None:
    name = section(run.environment, "device").get("name")
    return name if isinstance(name, str) and name else None


# The nightly check


def _nightly(reference: Run, candidate: Run, _: Devices) -> Iterator[Line]:
    def line(
        requirement: Words,
        names: Sequence[str],
        value_of: Callable[[Series], float | None],
        change: Callable[[float, float], float],
        unit: str,
        holds: Callable[[float], bool],
    ) -> Line:
        return _of_two_values(requirement, names, (reference, candidate), value_of, change, unit, holds)

    steps = f"{_FIRST}-{_LAST}"
    yield line(
        Words(f"reward, mean of steps {steps}: within 0.05", f"reward，第 {steps} 步均值：差值绝对值 ≤ 0.05"),
        REWARD,
        _mean_of_window,
        lambda a, b: b - a,
        "",
        lambda difference: abs(difference) <= 0.05,
    )
    yield line(
        Words(
            f"probabilities of rollout and training apart, mean of steps {steps}: within 5 %",
            f"训推概率差，第 {steps} 步均值：变化率 ≤ 5 %",
        ),
        MISMATCH,
        _mean_of_window,
        _percent,
        " %",
        lambda percent: abs(percent) <= _PERCENT,
    )
    yield line(
        Words(f"throughput, mean of steps {steps}: not below -5 %", f"吞吐，第 {steps} 步均值：下降 ≤ 5 %"),
        SPEED,
        _mean_of_window,
        _percent,
        " %",
        lambda percent: percent >= -_PERCENT,
    )
    yield line(
        Words(
            f"time a step, mean of steps {steps}: not above +5 %", f"单步耗时，第 {steps} 步均值：上升 ≤ 5 %"
        ),
        SECONDS,
        _mean_of_window,
        _percent,
        " %",
        lambda percent: percent <= _PERCENT,
    )
    yield line(
        Words("memory at the last step: not above +1 GB", "最后一步显存：超出基线 ≤ 1 GB"),
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
    requirement: Words,
    names: Sequence[str],
    runs: tuple[Run, Run],
    value_of: Callable[[Series], float | None],
    change: Callable[[float, float], float],
    unit: str,
    holds: Callable[[float], bool],
) -> Line:
    """A line about one value of each run."""
    found = _find(runs, names)
    metric = _named(found)
    a, b = (value_of(run.metrics[name]) if name else None for run, name in zip(runs, found, strict=True))
    if a is None or b is None:
        what = Words(f"steps {_FIRST}-{_LAST}", f"第 {_FIRST}-{_LAST} 步") if all(found) else _code(names[0])
        return Line(requirement, "not in the logs", metric, a, b, remark=_lacking((a, b), what))
    value = change(a, b)
    if not math.isfinite(b):
        said = Words("the candidate's value is not finite", "候选值不是有限数")
        return Line(requirement, "broken", metric, a, b, remark=said)
    if not math.isfinite(value):
        said = Words("the reference's value is 0 or not finite", "基准值为 0 或不是有限数")
        return Line(requirement, "not in the logs", metric, a, b, remark=said)
    measured = f"{value:+.4g}{unit}"
    if change is _percent and (rounded := _rounding(runs, found, a)) > _PERCENT:
        said = Words(
            f"logged with three decimals, which may be {rounded:.0f} % of it",
            f"日志只保留三位小数，舍入可达 {rounded:.0f} %",
        )
        return Line(requirement, "not in the logs", metric, a, b, Words(measured, measured), said)
    remark = _short_window(runs, found) if value_of is _mean_of_window else Words("", "")
    status: Status = "holds" if holds(value) else "broken"
    return Line(requirement, status, metric, a, b, Words(measured, measured), remark)


def _rounding(runs: tuple[Run, Run], found: Sequence[str | None], value: float) -> float:
    """How many percent of a value verl's older logs may have lost: up to 0.4 they have three decimals."""
    values = [run.metrics[name].values_S for run, name in zip(runs, found, strict=True) if name]
    coarse = any((np.round(values_S, 3) == values_S).all() for values_S in values)
    return 100 * 0.0005 / abs(value) if coarse else 0.0


def _find(runs: tuple[Run, Run], names: Sequence[str]) -> tuple[str | None, str | None]:
    """The first of these metrics that both have; otherwise the first that each has."""
    has = [[name for name in names if name in run.metrics and len(run.metrics[name])] for run in runs]
    both = next((name for name in has[0] if name in has[1]), None)
    return both or next(iter(has[0]), None), both or next(iter(has[1]), None)


def _named(found: Sequence[str | None]) -> str:
    return " / ".join(dict.fromkeys(name for name in found if name))


def _code(name: str) -> Words:
    return Words(f"`{name}`", f"`{name}`")


def _lacking(values: Sequence[object], what: Words) -> Words:
    """Which side has no value."""
    sides = (Words("reference", "基准"), Words("candidate", "候选"))
    who = [side for side, value in zip(sides, values, strict=True) if value is None]
    return Words(
        f"{what.en} missing in the {' and the '.join(side.en for side in who)}",
        f"{'和'.join(side.zh for side in who)}日志缺少 {what.zh}",
    )


def _short_window(runs: tuple[Run, Run], names: Sequence[str | None]) -> Words:
    counts = []
    for run, name in zip(runs, names, strict=True):
        steps_S = run.metrics[name or ""].steps_S
        counts.append(int(((steps_S >= _FIRST) & (steps_S <= _LAST)).sum()))
    whole = _LAST - _FIRST + 1
    if min(counts) == whole:
        return Words("", "")
    return Words(
        f"{counts[0]} and {counts[1]} of these {whole} steps are in the logs",
        f"两份日志分别只有其中 {counts[0]}、{counts[1]} 步（共 {whole} 步）",
    )


# The community tasks


def _task(reference: Run, candidate: Run, devices: Devices) -> Iterator[Line]:
    runs = reference, candidate
    is_reward = bool(_find(runs, REWARD)[1])
    names = REWARD if is_reward else LOSS
    found = _find(runs, names)
    yield _length(candidate, found[1])
    yield _trend(candidate, found[1], is_reward)
    yield _mean_error(runs, found, _code(names[0]))
    yield _evaluation(reference, candidate)
    yield _throughput(reference, candidate, devices)


def _length(candidate: Run, metric: str | None) -> Line:
    requirement = Words(f"{_STEPS} steps or {_HOURS:g} hours", f"训练 {_STEPS} 步或长跑 {_HOURS:g} 小时")
    if metric is None:
        said = Words("neither a reward nor a loss in the candidate", "候选日志既无 reward 也无 loss")
        return Line(requirement, "not in the logs", remark=said)
    steps = int((candidate.metrics[metric].steps_S > 0).sum())
    timed = _find((candidate, candidate), SECONDS)[0]
    hours = float(candidate.metrics[timed].values_S.sum()) / 3600 if timed else None
    time = "" if hours is None else f", {hours:.2f} h"
    time_zh = "" if hours is None else f"，{hours:.2f} 小时"
    measured = Words(f"{steps} steps{time}", f"{steps} 步{time_zh}")
    if steps >= _STEPS or (hours is not None and hours >= _HOURS):
        return Line(requirement, "holds", metric, measured=measured)
    if hours is None:
        said = Words(f"`{SECONDS[0]}` missing in the candidate", f"候选日志缺少 `{SECONDS[0]}`")
        return Line(requirement, "not in the logs", metric, measured=measured, remark=said)
    return Line(requirement, "broken", metric, measured=measured)


def _trend(candidate: Run, metric: str | None, is_reward: bool) -> Line:
    requirement = Words("loss falls and converges", "loss 下降且收敛")
    if is_reward:
        requirement = Words("reward rises", "reward 上升")
    values_S = candidate.metrics[metric].values_S if metric else np.empty(0)
    if metric is None or len(values_S) < 2 * _WINDOW:
        said = Words(f"fewer than {2 * _WINDOW} steps", f"少于 {2 * _WINDOW} 步")
        return Line(requirement, "not in the logs", metric or "", remark=said)
    first, last = float(values_S[:_WINDOW].mean()), float(values_S[-_WINDOW:].mean())
    measured = Words(
        f"{first:.4g} in the first {_WINDOW} steps, {last:.4g} in the last",
        f"首 {_WINDOW} 步均值 {first:.4g}，末 {_WINDOW} 步均值 {last:.4g}",
    )
    # A comparison with NaN is false, so a run that ended in NaN does not rise.
    right = last > first if is_reward else last < first
    remark = Words("", "")
    if right and not is_reward:
        remark = Words("it falls; the rule has no number for convergence", "已下降；规则未给出收敛的数值标准")
    return Line(requirement, "holds" if right else "broken", metric, measured=measured, remark=remark)


def _mean_error(runs: tuple[Run, Run], found: tuple[str | None, str | None], expected: Words) -> Line:
    requirement = Words("mean error below 5 %", "平均误差小于 5 %")
    if not found[0] or not found[1]:
        return Line(requirement, "not in the logs", _named(found), remark=_lacking(found, expected))
    steps_S, (a_S, b_S) = common([runs[0].metrics[found[0]], runs[1].metrics[found[1]]])
    if not len(steps_S):
        said = Words("no step in common", "没有共同的步")
        return Line(requirement, "not in the logs", _named(found), remark=said)
    remark = Words(f"over {len(steps_S)} steps in common", f"共同 {len(steps_S)} 步")
    return _error(requirement, _named(found), a_S, b_S, lambda percent: percent < _PERCENT, remark)


def _error(
    requirement: Words, metric: str, a_S: Numbers, b_S: Numbers, holds: Callable[[float], bool], remark: Words
) -> Line:
    """A mean error in percent, as verl's formula has it and relative to the reference."""
    a, b = float(a_S.mean()), float(b_S.mean())
    if not np.isfinite(b_S).all():
        said = Words("the candidate has values that are not finite", "候选存在非有限数")
        return Line(requirement, "broken", metric, a, b, remark=said)
    if not np.isfinite(a_S).all():
        said = Words("the reference has values that are not finite", "基准存在非有限数")
        return Line(requirement, "not in the logs", metric, a, b, remark=said)
    absolute = 100 * float(np.abs(b_S - a_S).mean())
    if (a_S == 0).any():
        measured = Words(
            f"{absolute:.3g} % absolute; relative not defined, the reference is 0 at a step",
            f"绝对 {absolute:.3g} %；基准有为 0 的步，相对误差无定义",
        )
        return Line(requirement, "holds" if holds(absolute) else "broken", metric, a, b, measured, remark)
    relative = 100 * float((np.abs(b_S - a_S) / np.abs(a_S)).mean())
    measured = Words(
        f"{absolute:.3g} % absolute (verl's formula), {relative:.3g} % relative",
        f"绝对（verl 公式）{absolute:.3g} %，相对 {relative:.3g} %",
    )
    status: Status = "depends on the definition"
    if holds(absolute) == holds(relative):
        status = "holds" if holds(absolute) else "broken"
    return Line(requirement, status, metric, a, b, measured, remark)


def _evaluation(reference: Run, candidate: Run) -> Line:
    """By the validations of the logs: the one that is furthest apart after the last step that both have."""
    requirement = Words("downstream evaluation within 5 %", "下游评测误差 5 % 内")
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
        said = Words("no validation after training in both logs", "两份日志没有共同的训练后评测")
        return Line(requirement, "not in the logs", remark=said)
    _, name, step, a_S, b_S = worst
    remark = Words(
        f"validation in the log at step {step}, the worst of {compared}; not a separate evaluation",
        f"日志中第 {step} 步的验证集结果，{compared} 项中最差；不是单独的下游评测",
    )
    return _error(requirement, name, a_S, b_S, lambda percent: percent <= _PERCENT, remark)


def _throughput(reference: Run, candidate: Run, devices: Devices) -> Line:
    requirement = Words("A2: at least 0.7 x A100's throughput", "A2 达到 A100 吞吐的 0.7 倍以上")
    runs = reference, candidate
    found = _find(runs, SPEED)
    metric = _named(found)
    if not found[0] or not found[1]:
        return Line(requirement, "not in the logs", metric, remark=_lacking(found, _code(SPEED[0])))
    a, b = _steady(reference.metrics[found[0]]), _steady(candidate.metrics[found[1]])
    if not math.isfinite(b) or not math.isfinite(a) or a <= 0:
        said = Words("a throughput is not a positive number", "吞吐不是正数")
        return Line(requirement, "not in the logs", metric, a, b, remark=said)
    measured = Words(f"{b / a:.3f} x", f"{b / a:.3f} 倍")
    if not devices.reference or not devices.candidate:
        said = Words("the logs do not name the devices: state them", "日志未记录设备型号，请注明")
        return Line(requirement, "not in the logs", metric, a, b, measured, said)
    remark = Words(
        f"{devices.candidate} against {devices.reference}", f"{devices.candidate} 对比 {devices.reference}"
    )
    if not (_A100.search(devices.reference) and _A2.search(devices.candidate)):
        said = Words(f"{remark.en}: not an A2 and an A100", f"{remark.zh}：不是 A2 与 A100")
        return Line(requirement, "not in the logs", metric, a, b, measured, said)
    return Line(requirement, "holds" if b / a >= 0.7 else "broken", metric, a, b, measured, remark)


def _steady(series: Series) -> float:
    values_S = series.values_S
    return float((values_S[_WARM_UP:] if len(values_S) > 2 * _WARM_UP else values_S).mean())


_RECIPES = "https://github.com/verl-project/verl-ascend-recipe"
RULES: dict[str, tuple[str, Callable[[Run, Run, Devices], Iterator[Line]]]] = {
    "verl-ascend-nightly": (f"{_RECIPES}/blob/main/baseline/check_npu.py", _nightly),
    "verl-ascend-task": (f"{_RECIPES}/issues/79", _task),
}
