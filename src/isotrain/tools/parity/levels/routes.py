"""Which experts the tokens of a mixture went to, in runs and truths, and whether rounding says why.

A rounding may send a token to another expert, whose output differs by more than rounding. So each run is
held against a truth that takes the run's own routes. Whether the routes are right is a question of its own: a
token may go elsewhere only where the truth's scores of the two experts are near.

T: tokens, K: experts of one token, E: all experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from isotrain.language import tr
from isotrain.tools.parity.levels.layer_errors import (
    DIFFERENT,
    SAME,
    Difference,
    LayerRating,
    against_truth,
    expected_rounding,
)
from isotrain.tools.parity.read.layer_trace import Update
from isotrain.tools.parity.run import ROLES, Numbers

Role = Literal["reference", "candidate"]
Indices = npt.NDArray[np.int32]

_QUANTILE = 2.33
"""Of 99 % in a normal distribution: more flips than this are too many."""


@dataclass(frozen=True)
class Flips:
    """Tokens of a layer that a run sends to other experts than float64 would, from the same inputs."""

    step: int
    name: str
    role: Role
    count: int
    tokens: int
    furthest: float
    """Gap of the two scores in expected errors; not a number where the scores do not tell."""
    beyond: int
    """Flips of more than one expected error. Nearer scores are ties, which one kernel breaks in one way."""
    allowed: tuple[float, float]
    """As many of those are explained by errors `SAME` and `DIFFERENT` times as large as expected."""

    @property
    def state(self) -> Literal["same", "cannot tell", "different"]:
        if self.furthest > DIFFERENT or self.beyond > self.allowed[1]:
            return "different"
        # Not a number compares as false.
        return "same" if self.furthest <= SAME and self.beyond <= self.allowed[0] else "cannot tell"

    @property
    def words(self) -> str:
        if self.furthest <= SAME:
            return tr(
                "the {role} sends {count} of {tokens} tokens at step {step} to experts of {name} that score "
                "more than one expected error below those of float64; rounding explains {allowed:.0f}",
                role=ROLES[self.role],
                count=self.beyond,
                tokens=self.tokens,
                step=self.step,
                name=self.name,
                allowed=self.allowed[0],
            )
        return tr(
            "the {role} sends {count} of {tokens} tokens at step {step} to other experts of {name} than "
            "float64 does; the furthest is {furthest:.3g} expected errors away, right up to {same:g}, wrong "
            "beyond {different:g}",
            role=ROLES[self.role],
            count=self.count,
            tokens=self.tokens,
            step=self.step,
            name=self.name,
            furthest=self.furthest,
            same=SAME,
            different=DIFFERENT,
        )

    def as_json(self) -> dict[str, Any]:
        numbers = {"furthest": self.furthest, "allowed": self.allowed[1]}
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        place = {"step": self.step, "name": self.name, "role": self.role}
        return {**place, "flips": self.count, "tokens": self.tokens, **finite, "state": self.state}


@dataclass(frozen=True)
class StepRoutes:
    """One step of both runs, and the truths that it has."""

    step: int
    reference: Update
    candidate: Update
    truths: tuple[Update, ...] = ()

    @property
    def sides(self) -> dict[Role, Update]:
        return {"reference": self.reference, "candidate": self.candidate}

    def truth_of(self, role: Role) -> Update | None:
        """The one with the run's own routes; else one that has them up to some layer."""
        side = self.sides[role]
        own = (truth for truth in self.truths if first_apart(side, truth) is None)
        return next(own, self.truths[0] if self.truths else None)

    @property
    def apart(self) -> str | None:
        """The first layer in which the runs send a token to other experts."""
        return first_apart(self.reference, self.candidate)

    @property
    def held(self) -> bool:
        """Whether each run has a truth with its own routes."""
        truths = {role: self.truth_of(role) for role in self.sides}
        return all(t is not None and first_apart(self.sides[r], t) is None for r, t in truths.items())

    def ratings(self, dtype: str) -> Iterator[LayerRating]:
        """Both runs against float64, as far as it has their routes."""
        reference, candidate = (self.truth_of(role) for role in self.sides)
        if reference is None or candidate is None:
            return
        ends = [first_apart(self.reference, reference), first_apart(self.candidate, candidate)]
        before = self._before(next(iter(sorted(filter(None, ends), key=self._place)), None))
        for rating in against_truth(self.step, self.reference, self.candidate, (reference, candidate), dtype):
            if before is None or (rating.difference.kind, rating.difference.name) in before:
                yield rating

    def keeps(self, difference: Difference) -> bool:
        """Whether the two runs can be held against each other there: from the same inputs and routes."""
        before = self._before(self.apart)
        alike = before is None or difference.kind in ("weight", "data")
        return alike or (difference.kind, difference.name) in (before or ())

    def flips(self, ratings: Mapping[tuple[str, str], LayerRating], dtype: str) -> Iterator[Flips]:
        """Of each run, in layers up to the first whose routes the truth does not share."""
        for role, side in self.sides.items():
            truth = self.truth_of(role)
            if truth is None:
                continue
            for name, route_TK in side.routes.items():
                if name in truth.scores and len(truth.scores[name]) == len(route_TK):
                    expected = self._expected(name, ratings, truth, dtype)
                    yield _flips(self.step, name, role, truth.scores[name], route_TK, expected)
                if name == first_apart(side, truth):
                    break

    def _expected(
        self, name: str, ratings: Mapping[tuple[str, str], LayerRating], truth: Update, dtype: str
    ) -> float:
        """Error of the router's logits, of their size: the nearer run's, or what rounding explains."""
        names = list(truth.kinds["activation"])
        place, block = names.index(name), name.rpartition(".")[0] + "."
        inner = [n for n in names[:place] if n.startswith(block) and not n.startswith(name)]
        rating = ratings.get(("activation", inner[-1])) if inner else None
        return rating.limit / DIFFERENT if rating is not None else expected_rounding(dtype, place)

    def _before(self, name: str | None) -> set[tuple[str, str]] | None:
        """What is computed before a layer of experts; None for all."""
        if name is None:
            return None
        return {("activation", n) for n in list(self.reference.kinds["activation"])[: self._place(name)]}

    def _place(self, name: str) -> int:
        names = list(self.reference.kinds["activation"])
        inside = (place for place, n in enumerate(names) if n == name or n.startswith(name + "."))
        return next(inside, len(names))


def first_apart(a: Update, b: Update) -> str | None:
    """The first layer of experts that tokens go through otherwise; the order in a row means nothing."""
    for name in [*a.routes, *(n for n in b.routes if n not in a.routes)]:
        if name not in a.routes or name not in b.routes or moved(a, b, name):
            return name
    return None


def moved(a: Update, b: Update, name: str) -> int:
    """How many tokens go to other experts."""
    routes = [np.sort(update.routes[name], axis=1) for update in (a, b) if name in update.routes]
    if len(routes) < 2 or routes[0].shape != routes[1].shape:
        return len(routes[0])
    return int((routes[0] != routes[1]).any(axis=1).sum())


def other_width(steps: Sequence[StepRoutes]) -> str | None:
    """Two routers that choose another number of experts."""
    for step in steps:
        for name, route_TK in step.reference.routes.items():
            other = step.candidate.routes.get(name)
            if other is not None and other.shape[1] != route_TK.shape[1]:
                return tr(
                    "the candidate's router of {name} chooses {other} experts for each token, the "
                    "reference's {own}",
                    name=name,
                    other=other.shape[1],
                    own=route_TK.shape[1],
                )
    return None


def open_routes(steps: Sequence[StepRoutes], flips: Sequence[Flips]) -> str | None:
    """What the routes leave open: flips that rounding hardly explains, layers held against nothing."""
    if near := next((flip for flip in flips if flip.state == "cannot tell"), None):
        return near.words
    if any(step.truths and step.held for step in steps):
        return None
    for step in steps:
        if (name := step.apart) is not None:
            return tr(
                "the candidate sends {count} tokens at step {step} to other experts of {name}, as a rounding "
                "may; what follows can only be held against float64: `isotrain parity truth REFERENCE`, and "
                "the same with `--routes CANDIDATE`",
                count=moved(step.reference, step.candidate, name),
                step=step.step,
                name=name,
            )
        if step.truths and not step.held:
            return tr(
                "the truth of step {step} sends tokens to other experts than the runs; run `isotrain parity "
                "truth` again",
                step=step.step,
            )
    return None


def _flips(step: int, name: str, role: Role, scores_TE: Numbers, route_TK: Indices, expected: float) -> Flips:
    tokens, experts = scores_TE.shape
    count = route_TK.shape[1]
    ranked_TE = np.argsort(-scores_TE, axis=1, kind="stable")
    free_TE, chosen_TE = np.zeros((2, tokens, experts), dtype=bool)
    np.put_along_axis(free_TE, ranked_TE[:, :count], True, axis=1)
    inside = (route_TK >= 0) & (route_TK < experts)
    np.put_along_axis(chosen_TE, np.where(inside, route_TK, ranked_TE[:, :1]), True, axis=1)
    missed_T = np.where(free_TE & ~chosen_TE, scores_TE, -np.inf).max(axis=1)
    taken_T = np.where(chosen_TE & ~free_TE, scores_TE, np.inf).min(axis=1)
    flipped_T = (free_TE & ~chosen_TE).any(axis=1)
    # Two scores, each with an error. One expert twice takes no other: no error does that. A score that was
    # masked, as those of groups that were not chosen, has no distance.
    apart_T = np.where(np.isinf(taken_T) & (taken_T > 0), np.inf, missed_T - taken_T)
    apart_T = np.where(np.isneginf(taken_T), np.nan, apart_T) / (math.sqrt(2) * expected)
    flipped = apart_T[flipped_T]
    furthest = float(flipped.max()) if len(flipped) else 0.0
    beyond = int((flipped > 1).sum())
    allowed = (math.inf, math.inf)
    if count < experts:
        best_TE = np.take_along_axis(scores_TE, ranked_TE, axis=1)
        with np.errstate(invalid="ignore"):
            margin_T = (best_TE[:, count - 1] - best_TE[:, count]) / (math.sqrt(2) * expected)
        margin_T = margin_T[margin_T > 1]
        allowed = (_most_flips(margin_T / SAME), _most_flips(margin_T / DIFFERENT))
    return Flips(step, name, role, int(flipped_T.sum()), tokens, furthest, beyond, allowed)


def _most_flips(margin_T: Numbers) -> float:
    """99 % of steps have at most so many, where each token flips if a normal error exceeds its margin."""
    chances = [math.erfc(float(m) / math.sqrt(2)) / 2 for m in margin_T]
    return sum(chances) + _QUANTILE * math.sqrt(sum(p * (1 - p) for p in chances)) + 1
