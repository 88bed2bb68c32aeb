"""The answer to "why do they disagree": a sentence, the causes by their shares, and lines that cure it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from isotrain.language import capital, listed, tr
from isotrain.tools.mismatch.attribution import FEWEST_SEQUENCES, Attribution
from isotrain.tools.mismatch.causes import CAUSES, ROUNDING
from isotrain.tools.mismatch.matter import Effect

if TYPE_CHECKING:
    from isotrain.tools.mismatch.experiments import Findings

Outcome = Literal["explained", "fault", "unexplained"]
EXIT_CODES: Mapping[Outcome, int] = {"explained": 0, "fault": 1, "unexplained": 3}
# Of the whole: what may be left when all causes are removed, and from where on a cause is worth a remedy.
LARGEST_REST, WORTH_A_REMEDY = 0.1, 0.05
# The engine's own distance from float32 over the trainer's, or the inverse: more is no property of the type.
LARGEST_ROUNDING_RATIO = 3.0
FEWEST_TOKENS = 100
# What rounding can cause, and how many times its usual size it may be.
_ARITHMETIC = {"prefix", "batch", "decode", "head", "routing"}
LARGEST_SHARE = 3.0


@dataclass(frozen=True)
class Diagnosis:
    outcome: Outcome
    sentence: str
    faults: tuple[str, ...]
    problems: tuple[str, ...]
    """Why it is not explained."""
    remedies: tuple[str, ...]
    """Recipe lines, and advice where there is none."""
    notes: tuple[str, ...]
    attribution: Attribution
    effect: Effect

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def as_json(self) -> dict[str, Any]:
        attribution = self.attribution
        return {
            "outcome": self.outcome,
            "sentence": str(self.sentence),
            "nats_per_token": attribution.total,
            "shares": {s.cause: {**asdict(s), "part": attribution.part(s)} for s in attribution.shares},
            "rest": {**asdict(attribution.rest), "part": attribution.part(attribution.rest)},
            "sequences": attribution.sequences,
            "tokens": attribution.tokens,
            **{
                name: [str(text) for text in getattr(self, name)]
                for name in ("faults", "problems", "remedies", "notes")
            },
            "effect": asdict(self.effect),
        }


def judge(attribution: Attribution, findings: Findings, effect: Effect, dtype: str) -> Diagnosis:
    faults = (*_faults(findings), *_too_large(attribution, findings, dtype))
    problems = tuple(_problems(attribution, findings, dtype))
    outcome: Outcome = "fault" if faults else "unexplained" if problems else "explained"
    return Diagnosis(
        outcome,
        _sentence(attribution, outcome),
        faults,
        problems,
        tuple(dict.fromkeys(_remedies(attribution, findings))),
        tuple(_notes(attribution, findings, dtype)),
        attribution,
        effect,
    )


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _sentence(attribution: Attribution, outcome: Outcome) -> str:
    total = f"{attribution.total:.2g}"
    if not attribution.tokens:
        return tr("There is no token to compare.")
    if not attribution.total:
        return tr("Trainer and engine agree bit for bit on all tokens.")
    if attribution.total <= ROUNDING["float32"] and outcome == "explained":
        return tr(
            "Trainer and engine differ by {total} nats per token on average: rounding of float32.",
            total=total,
        )
    parts = listed(
        tr("{percent} {cause}", percent=percent(attribution.part(s)), cause=CAUSES[s.cause].label)
        for s in attribution.ranked[:3]
        if attribution.part(s) >= WORTH_A_REMEDY
    )
    values = {"total": total, "parts": parts, "rest": percent(attribution.part(attribution.rest))}
    if outcome == "unexplained":
        return tr(
            "Trainer and engine differ by {total} nats per token on average, and that is not explained: "
            "{parts}, {rest} rest.",
            **values,
        )
    return tr(
        "Trainer and engine differ by {total} nats per token on average: {parts}, {rest} unexplained.",
        **values,
    )


def _faults(findings: Findings) -> Iterator[str]:
    if findings.ids:
        yield tr("The engine sampled after other token ids than were trained: {how}.", how=findings.ids)
    if findings.convention == "raw":
        yield tr(
            "The engine reports log-probs at temperature 1, the trainer computes them at the temperature."
        )
    if findings.convention == "processed":
        yield tr("The engine's log-probs are those after top-p and top-k, the trainer's those of all tokens.")
    if findings.weights:
        yield tr(
            "{count} of {compared} tensors of the engine are not those of the checkpoint: {names}.",
            count=len(findings.weights),
            compared=findings.compared,
            names=", ".join(sorted(findings.weights)[:5]),
        )
    if findings.stale_prefix:
        yield tr("Cached prefixes are not those of these weights: with an empty cache, log-probs are others.")
    for name in sorted(findings.routers):
        yield tr("The engine's router of {name} has other scores from the same input.", name=name)
    for name, error in sorted(findings.modules.items(), key=lambda item: -item[1])[:3]:
        yield tr(
            "The engine's {name} computes something else from the same input and weights: its output "
            "is {error} off.",
            name=name,
            error=percent(error),
        )


def _too_large(attribution: Attribution, findings: Findings, dtype: str) -> Iterator[str]:
    """Properties of arithmetic that change more than arithmetic of this type does."""
    named = {"routing": bool(findings.routers), "prefix": findings.stale_prefix}
    for share in attribution.ranked:
        is_large = share.nats > LARGEST_SHARE * ROUNDING[dtype] and share.low > 0
        if share.cause in _ARITHMETIC and is_large and not named.get(share.cause):
            yield tr(
                "{cause}: {nats} nats per token, more than rounding in {dtype} explains.",
                cause=capital(CAUSES[share.cause].label),
                nats=f"{share.nats:.2g}",
                dtype=dtype,
            )


def _problems(attribution: Attribution, findings: Findings, dtype: str) -> Iterator[str]:
    rest = attribution.rest
    if not math.isfinite(attribution.total):
        yield tr("A log-prob is not a finite number.")
    if attribution.sequences < FEWEST_SEQUENCES or attribution.tokens < FEWEST_TOKENS:
        yield tr(
            "{sequences} sequences with {tokens} tokens are too few to tell: at least {fewest} and "
            "{fewest_tokens} are needed.",
            sequences=attribution.sequences,
            tokens=attribution.tokens,
            fewest=FEWEST_SEQUENCES,
            fewest_tokens=FEWEST_TOKENS,
        )
    if not findings.compared:
        yield tr("No weight of the engine could be compared with the checkpoint.")
    if not findings.modules_compared and not findings.weights:
        yield tr("No module of the engine could be compared with the trainer's.")
    if "recording" in findings.active:
        yield tr(
            "The same engine with these weights does not repeat the recorded log-probs: they differ by "
            "{difference} nats per token.",
            difference=f"{findings.repeated:.2g}",
        )
    # All of the interval must be small, on either side: causes can also explain too much.
    farthest = max(abs(rest.low), abs(rest.high))
    if farthest > ROUNDING["float32"] and farthest > LARGEST_REST * attribution.total:
        yield tr(
            "{rest} is left when all causes are removed ({low} to {high}).",
            rest=percent(attribution.part(rest)),
            low=percent(rest.low / attribution.total),
            high=percent(rest.high / attribution.total),
        )
    engine = max(1e-9, findings.rounding_ratio)
    sides = {tr("The engine"): engine, tr("The trainer"): 1 / engine}
    for side, ratio in sides.items():
        if ratio > LARGEST_ROUNDING_RATIO and attribution.total > ROUNDING[dtype] / 4:
            yield tr(
                "{side} is {ratio} times as far from float32 as the other side: not what its type explains.",
                side=side,
                ratio=f"{ratio:.1f}",
            )


def _remedies(attribution: Attribution, findings: Findings) -> Iterator[str]:
    if findings.convention == "processed":
        yield from ("rollout.top_p: 1.0", "rollout.top_k: -1")
    named = {"prefix"} if findings.stale_prefix else set()
    matters = attribution.total > ROUNDING["float32"]
    for share in attribution.ranked:
        cause = CAUSES[share.cause]
        if cause.fault or share.cause in named or (matters and attribution.part(share) >= WORTH_A_REMEDY):
            yield from (*cause.remedy, *filter(None, [cause.advice]))


def _notes(attribution: Attribution, findings: Findings, dtype: str) -> Iterator[str]:
    if shared := [CAUSES[s.cause].label for s in attribution.shares if s.shared]:
        yield tr("Shared: the two orders of removal disagree on {causes}.", causes=listed(shared))
    if findings.unread:
        yield tr(
            "{count} tensors could not be read from the engine and were compared only by what their "
            "modules compute: {names}.",
            count=len(findings.unread),
            names=", ".join(sorted(findings.unread)[:3]),
        )
    if findings.route_changes:
        yield tr("Experts differ for {share} of tokens and layers.", share=percent(findings.route_changes))
    if attribution.total <= ROUNDING[dtype]:
        yield tr("So much is usual for {dtype}.", dtype=dtype)
