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
# The engine's own distance from float32 over the trainer's: more is no property of the type.
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
            "faults": [str(text) for text in self.faults],
            "problems": [str(text) for text in self.problems],
            "remedies": [str(text) for text in self.remedies],
            "notes": [str(text) for text in self.notes],
            "effect": self.effect.as_json(),
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
    parts = [
        tr("{percent} {cause}", percent=percent(attribution.part(s)), cause=CAUSES[s.cause].label)
        for s in attribution.ranked[:3]
        if attribution.part(s) >= WORTH_A_REMEDY
    ]
    if not attribution.total:
        return tr("Trainer and engine agree bit for bit on all tokens.")
    if attribution.total <= ROUNDING["float32"] and outcome == "explained":
        return tr(
            "Trainer and engine differ by {total} nats per token on average: rounding of float32.",
            total=total,
        )
    rest = percent(attribution.part(attribution.rest))
    if outcome == "unexplained":
        return tr(
            "Trainer and engine differ by {total} nats per token on average, and that is not explained: "
            "{parts}, {rest} rest.",
            total=total,
            parts=listed(parts),
            rest=rest,
        )
    return tr(
        "Trainer and engine differ by {total} nats per token on average: {parts}, {rest} unexplained.",
        total=total,
        parts=listed(parts),
        rest=rest,
    )


def _faults(findings: Findings) -> list[str]:
    faults = []
    if findings.ids:
        faults.append(
            tr("The engine sampled after other token ids than were trained: {how}.", how=findings.ids)
        )
    if findings.convention == "raw":
        faults.append(
            tr("The engine reports log-probs at temperature 1, the trainer computes them at the temperature.")
        )
    if findings.convention == "processed":
        faults.append(
            tr("The engine's log-probs are those after top-p and top-k, the trainer's those of all tokens.")
        )
    if findings.weights:
        names = ", ".join(sorted(findings.weights)[:5])
        faults.append(
            tr(
                "{count} of {compared} tensors of the engine are not those of the checkpoint: {names}.",
                count=len(findings.weights),
                compared=findings.compared,
                names=names,
            )
        )
    if findings.stale_prefix:
        faults.append(
            tr("Cached prefixes are not those of these weights: with an empty cache, log-probs are others.")
        )
    for name in sorted(findings.routers):
        faults.append(tr("The engine's router of {name} has other scores from the same input.", name=name))
    for name, error in sorted(findings.modules.items(), key=lambda item: -item[1])[:3]:
        faults.append(
            tr(
                "The engine's {name} computes something else from the same input and weights: its output "
                "is {error} off.",
                name=name,
                error=percent(error),
            )
        )
    return faults


def _too_large(attribution: Attribution, findings: Findings, dtype: str) -> Iterator[str]:
    """Properties of arithmetic that change more than arithmetic of this type does."""
    for share in attribution.ranked:
        if (share.cause == "routing" and findings.routers) or (
            share.cause == "prefix" and findings.stale_prefix
        ):
            continue  # it has been named
        if share.cause in _ARITHMETIC and share.nats > LARGEST_SHARE * ROUNDING[dtype] and share.low > 0:
            yield tr(
                "{cause}: {nats} nats per token, more than rounding in {dtype} explains.",
                cause=capital(CAUSES[share.cause].label),
                nats=f"{share.nats:.2g}",
                dtype=dtype,
            )


def _problems(attribution: Attribution, findings: Findings, dtype: str) -> list[str]:
    problems, rest = [], attribution.rest
    if not math.isfinite(attribution.total):
        problems.append(tr("A log-prob is not a finite number."))
    if attribution.sequences < FEWEST_SEQUENCES or attribution.tokens < FEWEST_TOKENS:
        problems.append(
            tr(
                "{sequences} sequences with {tokens} tokens are too few to tell: at least {fewest} and "
                "{fewest_tokens} are needed.",
                sequences=attribution.sequences,
                tokens=attribution.tokens,
                fewest=FEWEST_SEQUENCES,
                fewest_tokens=FEWEST_TOKENS,
            )
        )
    if not findings.compared:
        problems.append(tr("No weight of the engine could be compared with the checkpoint."))
    if not findings.modules_compared and not findings.weights:
        problems.append(tr("No module of the engine could be compared with the trainer's."))
    if "recording" in findings.active:
        problems.append(
            tr(
                "The same engine with these weights does not repeat the recorded log-probs: they differ by "
                "{difference} nats per token.",
                difference=f"{findings.repeated:.2g}",
            )
        )
    if rest.nats > ROUNDING["float32"] and abs(rest.low) > LARGEST_REST * attribution.total:
        problems.append(
            tr(
                "{rest} is left when all causes are removed ({low} to {high}).",
                rest=percent(attribution.part(rest)),
                low=percent(rest.low / attribution.total),
                high=percent(rest.high / attribution.total),
            )
        )
    if findings.rounding_ratio > LARGEST_ROUNDING_RATIO and attribution.total > ROUNDING[dtype] / 4:
        problems.append(
            tr(
                "The engine is {ratio} times as far from float32 as the trainer: not what its type explains.",
                ratio=f"{findings.rounding_ratio:.1f}",
            )
        )
    return problems


def _remedies(attribution: Attribution, findings: Findings) -> list[str]:
    remedies = []
    named = {"prefix"} if findings.stale_prefix else set()
    named |= {s.cause for s in attribution.ranked if CAUSES[s.cause].fault}
    if findings.convention == "processed":
        remedies += ["rollout.top_p: 1.0", "rollout.top_k: -1"]
    matters = attribution.total > ROUNDING["float32"]
    for share in attribution.ranked:
        cause = CAUSES[share.cause]
        if share.cause in named or (matters and attribution.part(share) >= WORTH_A_REMEDY):
            remedies += [*cause.remedy, *([cause.advice] if cause.advice else [])]
    return remedies


def _notes(attribution: Attribution, findings: Findings, dtype: str) -> list[str]:
    notes = []
    shared = [CAUSES[s.cause].label for s in attribution.shares if s.shared]
    if shared:
        notes.append(tr("Shared: the two orders of removal disagree on {causes}.", causes=listed(shared)))
    if findings.unread:
        names = ", ".join(sorted(findings.unread)[:3])
        notes.append(
            tr(
                "{count} tensors could not be read from the engine and were compared only by what their "
                "modules compute: {names}.",
                count=len(findings.unread),
                names=names,
            )
        )
    if findings.route_changes:
        notes.append(
            tr("Experts differ for {share} of tokens and layers.", share=percent(findings.route_changes))
        )
    if attribution.total <= ROUNDING[dtype]:
        notes.append(tr("So much is usual for {dtype}.", dtype=dtype))
    return notes
