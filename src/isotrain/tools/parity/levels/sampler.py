"""Are tokens drawn from the probabilities that they should be drawn from?

Each part asks one question of the sums in `drawn.py`. Together they call a right sampler wrong in one of a
hundred cases (Holm). B: bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from scipy import interpolate, optimize, stats

from isotrain.tools.parity.levels.drawn import BINS, FACTORS_G, Boundary, Drawn

FALSE_ALARMS = 0.01
# Draws beyond a boundary that rounding is granted: of bf16 logits a few go further than `epsilon`.
GRANTED = 0.001
# "Same" says that the whole interval of the temperature is this near to the asked one, in shares of it, and
# that so many draws of the last token were to be expected; a boundary that cuts too early leaves none.
SEEN_TEMPERATURE = 0.05
SEEN_DRAWS = 12.0
# Of the draws to expect at a boundary: fewer are a token that is never drawn, and not just a rarer one.
NEVER = 0.25
_EDGE = 0.02

Verdict = Literal["same", "different", "inconclusive"]


@dataclass(frozen=True)
class SamplerTest:
    """One question."""

    name: str
    words: str
    """The count beside the expected one."""
    p: float
    """How often a right sampler is at least as far off."""
    rejected: bool = False


@dataclass(frozen=True)
class Temperature:
    """By maximum likelihood, with a 99 % interval; the asked one is among the settings."""

    estimate: float
    low: float
    high: float
    bounded: bool = True
    """Whether the estimate is between half and double the asked one; if not, it is that far off at least."""


@dataclass(frozen=True)
class SamplerResult:
    verdict: Verdict
    words: str
    positions: int
    temperature: Temperature | None
    parts: tuple[SamplerTest, ...]
    faults: tuple[str, ...] = ()
    """Faults by name."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge_sampler(drawn: Drawn) -> SamplerResult:
    """The verdict on all positions that were added."""
    if not drawn.count:
        return SamplerResult("inconclusive", "No drawn tokens: the sampler was not tested.", 0, None, ())
    parts = _holm(list(_parts(drawn)))
    temperature = _temperature(drawn)
    rejected = {part.name for part in parts if part.rejected}
    positions = f"{drawn.count:,} drawn tokens"
    if rejected:
        faults = tuple(_faults(drawn, rejected, temperature))
        words = f"Tokens are not drawn as asked: {'; '.join(faults)} ({positions})."
        return SamplerResult("different", words, drawn.count, temperature, parts, faults)
    missing = _missing(drawn, temperature)
    if missing:
        words = f"Nothing wrong was found in {positions}, but they cannot tell enough: {'; '.join(missing)}."
        return SamplerResult("inconclusive", words, drawn.count, temperature, parts)
    assert temperature is not None, "otherwise something is missing"
    words = (
        f"Tokens are drawn as asked: {positions} agree with the host's probabilities; "
        f"{_told(temperature, drawn.settings.temperature)}."
    )
    return SamplerResult("same", words, drawn.count, temperature, parts)


def _parts(drawn: Drawn) -> Iterator[SamplerTest]:
    for name, bins_B in (("shares by rank", drawn.by_rank_B), ("shares by id", drawn.by_id_B)):
        g = stats.power_divergence(bins_B, lambda_="log-likelihood")
        words = (
            f"G-test over {BINS} bins, {int(bins_B.min())} to {int(bins_B.max())} of {drawn.clear / BINS:.1f}"
        )
        # With few draws in a bin the test's own distribution is not that of chi-square.
        yield SamplerTest(name, words, float(g.pvalue) if drawn.clear >= 5 * BINS else 1.0)
    if drawn.clear:
        z = (drawn.rank_sum - drawn.clear / 2) / math.sqrt(drawn.clear / 12)
        mean = f"{drawn.rank_sum / drawn.clear:.4f}, expected 0.5"
        yield SamplerTest("mean share", mean, float(2 * stats.norm.sf(abs(z))))
    if drawn.information > 0:
        z = drawn.score / math.sqrt(drawn.information)
        yield SamplerTest("temperature", f"z = {z:+.2f}", float(2 * stats.norm.sf(abs(z))))
    yield _too_many("most likely token", drawn.best, drawn.best_expected, drawn.best_variance)
    yield _too_many("token 0", drawn.zero, drawn.zero_expected, drawn.zero_variance)
    for name, boundary in _boundaries(drawn):
        if boundary.positions:
            p = float(stats.binom.sf(boundary.outside - 1, boundary.positions, GRANTED))
            words = f"{boundary.outside:,} draws outside, at {boundary.positions:,} positions"
            yield SamplerTest(f"{name}, outside", words, p)
        if boundary.expected > 0:
            # Counts of rare draws: Poisson, whose variance is a little larger than theirs.
            p = float(min(1.0, 2 * stats.poisson.cdf(boundary.last, boundary.expected)))
            words = f"last token drawn {boundary.last:,} times, expected {boundary.expected:.1f}"
            yield SamplerTest(f"{name}, last token", words, p)


def _too_many(name: str, seen: int, expected: float, variance: float) -> SamplerTest:
    """Sums of unlike draws: normal where there are many, Poisson where there are few."""
    normal = float(stats.norm.sf((seen - 0.5 - expected) / math.sqrt(variance))) if variance > 0 else 1.0
    few = float(stats.poisson.sf(seen - 1, expected)) if expected > 0 else 1.0
    if variance <= 0 and seen > expected + 0.5:
        normal = 0.0
    p = normal if variance >= 25 else max(normal, few)
    return SamplerTest(name, f"drawn {seen:,} times, expected {expected:.1f}", p)


def _boundaries(drawn: Drawn) -> tuple[tuple[str, Boundary], ...]:
    return (("top-p", drawn.top_p), ("top-k", drawn.top_k))


def _holm(parts: list[SamplerTest]) -> tuple[SamplerTest, ...]:
    """A designed rate of false alarms over all parts, however they depend on each other."""
    order = sorted(range(len(parts)), key=lambda place: parts[place].p)
    rejected = set()
    for done, place in enumerate(order):
        if parts[place].p > FALSE_ALARMS / (len(parts) - done):
            break
        rejected.add(place)
    return tuple(replace(part, rejected=place in rejected) for place, part in enumerate(parts))


def _temperature(drawn: Drawn) -> Temperature | None:
    """The likelihood is that of the grid, between whose points it is smooth."""
    if drawn.information <= 0:
        return None
    normalizer = interpolate.CubicSpline(FACTORS_G, drawn.normalizers_G)
    lowest, highest = float(FACTORS_G[0]), float(FACTORS_G[-1])

    def negative(factor: float) -> float:
        return float(normalizer(factor) - factor * drawn.drawn_logits)

    best = float(optimize.minimize_scalar(negative, bounds=(lowest, highest), method="bounded").x)
    information = max(float(normalizer(best, 2)), 1e-12)
    reach = float(stats.norm.isf(0.005)) / math.sqrt(information)
    asked = drawn.settings.temperature
    inside = lowest * (1 + _EDGE) < best < highest * (1 - _EDGE)
    low = asked / (best + reach)
    high = asked / (best - reach) if best > reach else math.inf
    return Temperature(asked / best, low, high, inside)


def _told(temperature: Temperature, asked: float) -> str:
    if not temperature.bounded:
        side = "at most" if temperature.estimate < asked else "at least"
        return f"temperature looks like {side} {temperature.estimate:.2f}, asked {asked:.2f}"
    between = f"{temperature.low:.3f} to {temperature.high:.3f}"
    return f"temperature looks like {temperature.estimate:.3f} ({between}), asked {asked:.3f}"


def _faults(drawn: Drawn, rejected: set[str], temperature: Temperature | None) -> Iterator[str]:
    """The names of what is wrong; the general questions have a say only where no other has."""
    token, times = max(drawn.tokens.items(), key=lambda item: item[1])
    others = drawn.count - times
    if others <= 0.01 * drawn.count and drawn.count > 20:
        yield f"always token {token} ({times:,} of {drawn.count:,} draws)"
        return
    if "most likely token" in rejected and drawn.best >= 0.99 * drawn.clear:
        asked = drawn.settings.temperature
        yield f"always the most likely token, as at temperature 0, asked {asked:.2f}"
        return
    named = []
    if temperature is not None and "temperature" in rejected:
        named.append(_told(temperature, drawn.settings.temperature))
    for name, boundary in _boundaries(drawn):
        faults = list(_boundary_faults(name, boundary, rejected))
        # Another temperature has another boundary of top-p: one token more or less is no error of its own.
        named += [fault for fault in faults if not named or name == "top-k" or "ignored" in fault]
    yield from named
    if not named:
        failed = [part for part in _parts(drawn) if part.name in rejected]
        yield "; ".join(f"{part.name}: {part.words}" for part in failed)


def _boundary_faults(name: str, boundary: Boundary, rejected: set[str]) -> Iterator[str]:
    if f"{name}, outside" in rejected:
        if boundary.next_outside == boundary.outside:
            yield f"{name} cuts one token too late ({boundary.outside:,} draws of the first token left out)"
        elif boundary.outside >= 0.7 * boundary.left_out:
            expected = f"{boundary.left_out:.0f} would be if nothing were cut"
            yield f"{name} is ignored ({boundary.outside:,} draws of tokens left out; {expected})"
        else:
            why = "it cuts too late, or the temperature is higher than asked"
            yield f"draws beyond {name} ({boundary.outside:,}): {why}"
    if f"{name}, last token" in rejected and boundary.last <= NEVER * boundary.expected:
        yield (
            f"{name} cuts one token too early (the last token was drawn {boundary.last:,} times, "
            f"expected {boundary.expected:.1f})"
        )


def _missing(drawn: Drawn, temperature: Temperature | None) -> list[str]:
    """Faults that these positions could not have shown."""
    asked, missing = drawn.settings.temperature, []
    if temperature is None or not temperature.bounded:
        missing.append("the temperature cannot be estimated")
    else:
        off = max(1 - temperature.low / asked, temperature.high / asked - 1)
        if off > SEEN_TEMPERATURE:
            times = (off / SEEN_TEMPERATURE) ** 2
            missing.append(
                f"{_told(temperature, asked)}, so it may be {off:.0%} off; "
                f"{SEEN_TEMPERATURE:.0%} needs about {times:.1f} times as many"
            )
    for name, boundary in _boundaries(drawn):
        # Where it never cuts, it has no say.
        if boundary.positions and boundary.expected < SEEN_DRAWS:
            missing.append(
                f"the last token within {name} is to be expected {boundary.expected:.1f} times, "
                f"{SEEN_DRAWS:.0f} are needed"
            )
    return missing
