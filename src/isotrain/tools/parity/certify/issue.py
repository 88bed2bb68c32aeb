"""From a verdict over two runs to its certificate."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from pydantic import ValidationError

from isotrain import __version__
from isotrain.errors import CertificateError, DataError
from isotrain.tools.parity.certify.certificate import (
    FORMAT,
    Certificate,
    CertifiedSide,
    CheckFound,
    Curve,
    EffectFound,
    Figures,
    LevelFound,
    OutcomeFound,
    digest_of,
    problems_of,
    sealed,
)
from isotrain.tools.parity.compare.comparison import Comparison
from isotrain.tools.parity.compare.effects import VALIDATION
from isotrain.tools.parity.compare.objections import SPEED
from isotrain.tools.parity.compare.outcome import Outcome
from isotrain.tools.parity.compare.published import Kind, kind_of
from isotrain.tools.parity.levels.layers import TRUTH
from isotrain.tools.parity.levels.level import Check, Level
from isotrain.tools.parity.protocol import Companions
from isotrain.tools.parity.read.bounded import sha256_of
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog, common, section
from isotrain.tools.parity.verdict import Verdict

# What belongs to one side alone: its device is told there, the rest is about this machine.
_OF_ONE_SIDE = ("output", "device", "observe", "cluster")
_OF_ONE_RECORDING = ("record", "replay")
_PATH = re.compile(r"(?<![\w.~/])(?:~|[A-Za-z]:)?[/\\][^\s'\",;]*[/\\](?=[^\s'\",;/\\])")
_LONGEST_LINE = 2000
_TRACES = ("layer_trace", "score_tests", f"{TRUTH}/layer_trace")


def first_of(kind: Kind, metrics: Iterable[str]) -> str | None:
    """The metric that stands for a kind: a policy's loss before a critic's, then as runs record them."""
    of_kind = [metric for metric in metrics if kind_of(metric) == kind]
    of_policy = [metric for metric in of_kind if metric.endswith(("pg_loss", "policy_loss"))]
    return next(iter(of_policy or of_kind), None)


def _figures(comparison: Comparison) -> Figures:
    curves = comparison.curves
    loss_metric, reward_metric = first_of("loss", curves), first_of("reward", curves)
    loss = curves[loss_metric] if loss_metric is not None else None
    reward = curves[reward_metric] if reward_metric is not None else None
    speeds = list(comparison.speed.values())
    return Figures(
        steps=max(curve.steps for curve in curves.values()),
        loss_metric=loss_metric,
        loss_error=_hundredths(loss.mean_absolute) if loss else None,
        loss_relative=_hundredths(loss.mean_relative) if loss and loss.mean_relative is not None else None,
        reward_metric=reward_metric,
        reward_error=_hundredths(reward.mean_absolute) if reward else None,
        throughput_ratio=_finite(speeds[-1].ratio) if speeds else None,
    )


def _hundredths(value: float) -> float:
    return _finite(100 * value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise DataError("the curves are so far apart that there is no figure for it")
    return value


def certificate_of(
    verdict: Verdict,
    *,
    inputs: Mapping[str, str] | None = None,
    date: datetime.datetime | None = None,
) -> Certificate:
    """A verdict that certifies nothing has one too, but `write_certificate` refuses it.

    `inputs` are the SHA-256 of files that were read besides the two runs' own.
    """
    comparison = verdict.comparison
    runs = {"reference": comparison.reference, "candidate": comparison.candidate}
    try:
        curves = _curves(verdict)
        recipe = portable_recipe(comparison.reference)
        return sealed(
            {
                "format": FORMAT,
                "isotrain": __version__,
                "date": _utc(date),
                "reference": side_of(comparison.reference),
                "candidate": side_of(comparison.candidate),
                "recipe": recipe,
                "recipe_sha256": digest_of(recipe),
                "data": {**comparison.candidate.data, **comparison.reference.data},
                "inputs": {**_inputs(runs), **(inputs or {})},
                "allowed": _allowed(verdict),
                "curves": curves,
                "levels": tuple(level_found(level) for level in verdict.computation.levels),
                "figures": _figures(comparison),
                "outcome": outcome_found(verdict.outcome),
                "computation": verdict.computation.verdict,
            }
        )
    except ValidationError as error:
        raise CertificateError(f"no certificate can be made: {problems_of(error)}") from error


def other_inputs(comparison: Comparison, companions: Companions) -> dict[str, str]:
    """Digests of what the levels read besides the two runs' curves: traces, the truth, further runs."""
    pair = {"reference": comparison.reference.path, "candidate": comparison.candidate.path}
    digests = {
        f"{role}/{kind}/{file.name}": sha256_of(path, f"{kind}/{file.name}")
        for role, path in pair.items()
        for kind in _TRACES
        for file in sorted((path / kind).glob("*"))
    }
    others = {f"envelope-{n}": path for n, path in enumerate(companions.reruns, start=1)}
    for number, paths in enumerate(companions.pairs, start=1):
        others |= {f"seed-{number}-{side}": path for side, path in zip("ab", paths, strict=True)}
    return digests | _inputs({role: read_run(path) for role, path in others.items()})


def side_of(run: RunLog) -> CertifiedSide:
    """The certificate's record of a run's newest start."""
    if run.environment is None:
        raise CertificateError(f"{run.path} has no environment.json: nobody can say what it ran on")
    try:
        return CertifiedSide(
            environment=_printable({k: v for k, v in portable(run.environment).items() if k != "command"}),
            settings=_printable(portable(section(run.recipe, "device"))),
            replayed=section(run.recipe, "rollout").get("replay") is not None,
        )
    except ValidationError as error:
        raise CertificateError(f"{run.path}: environment.json: {problems_of(error)}") from error


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_line(name): _printable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return _line(value) if isinstance(value, str) else value


def portable_recipe(run: RunLog) -> dict[str, Any]:
    """The recipe that both sides share, without what only means something on the machine that it ran on."""
    if run.recipe is None:
        raise CertificateError(f"{run.path} has no resolved.json: nobody can say what was trained")
    shared: dict[str, Any] = portable({k: v for k, v in run.recipe.items() if k not in _OF_ONE_SIDE})
    if isinstance(rollout := shared.get("rollout"), dict):
        shared["rollout"] = {k: v for k, v in rollout.items() if k not in _OF_ONE_RECORDING}
    return shared


def portable(value: Any) -> Any:
    """JSON in which every absolute path is its last part."""
    if isinstance(value, dict):
        return {name: portable(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(inner) for inner in value]
    return _last_part(value) if isinstance(value, str) else value


def level_found(level: Level) -> LevelFound:
    checks = tuple(_check_found(check) for check in level.checks)
    return LevelFound(
        name=level.name, state=level.state, words=_words(level.words), checks=checks, truth=level.truth
    )


def outcome_found(outcome: Outcome) -> OutcomeFound:
    effects = tuple(
        EffectFound(
            metric=effect.metric,
            verdict=effect.verdict,
            difference=effect.windows[0].difference,
            low=whole.low if (whole := effect.windows[0].interval) else None,
            high=whole.high if whole else None,
            margin=effect.margin,
            evidence=effect.evidence,
        )
        for effect in outcome.effects
        if effect.windows[0].window != VALIDATION  # they are not among the curves of the file
    )
    return OutcomeFound(verdict=outcome.verdict, effects=effects)


def _check_found(check: Check) -> CheckFound:
    value, limit = (float(x) if math.isfinite(x) else None for x in (check.value, check.limit))
    # A comparison of numpy's numbers is not Python's `bool`.
    passed = None if check.passed is None else bool(check.passed)
    return CheckFound(name=check.name, value=value, limit=limit, passed=passed, note=_words(check.note))


def _curves(verdict: Verdict) -> dict[str, Curve]:
    """Everything that was compared, with the throughput of the two sides."""
    comparison = verdict.comparison
    pair = (comparison.reference, comparison.candidate)
    if not comparison.curves:
        raise CertificateError("no curve was compared: there is nothing to certify")
    curves = {m: _curve(m, *pair) for m in comparison.reference.metrics if m in comparison.curves}
    speed = next((name for name in SPEED if all(name in run.metrics for run in pair)), None)
    if comparison.speed and speed is not None:
        curves[speed] = _curve(speed, *pair)
    return curves


def _curve(metric: str, reference: RunLog, candidate: RunLog) -> Curve:
    steps_S, (a_S, b_S) = common([reference.metrics[metric], candidate.metrics[metric]])
    steps, a, b = (tuple(values.tolist()) for values in (steps_S, a_S, b_S))
    return Curve(steps=steps, reference=a, candidate=b)


def _inputs(runs: Mapping[str, RunLog]) -> dict[str, str]:
    return {f"{role}/{name}": digest for role, run in runs.items() for name, digest in run.sha256.items()}


def _allowed(verdict: Verdict) -> dict[str, str]:
    messages_by_name: dict[str, list[str]] = {}
    for difference in verdict.comparison.allowed:
        messages_by_name.setdefault(difference.name, []).append(_words(difference.message))
    return {name: _line("; ".join(messages)) for name, messages in messages_by_name.items()}


def _last_part(text: str) -> str:
    if text.startswith(("/", "~")):
        return PurePosixPath(text).name
    windows = PureWindowsPath(text)
    return windows.name if windows.drive and windows.root else text


def _line(text: str) -> str:
    """Words of any source as a certificate may hold them: one line, printable, not endless."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    shown = " ".join(shown.split())
    return shown if len(shown) <= _LONGEST_LINE else shown[:_LONGEST_LINE] + "..."


def _words(text: str) -> str:
    """Sentences about runs name them by their paths; what remains is the last part."""
    return _line(_PATH.sub("", text))


def _utc(date: datetime.datetime | None) -> str:
    moment = date or datetime.datetime.now(datetime.timezone.utc)
    return moment.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
