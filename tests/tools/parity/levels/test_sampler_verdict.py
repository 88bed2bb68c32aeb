"""The test of samplers on samplers that are right, and on those that are wrong in known ways.

pytestmark = pytest.mark.heavy

Q: positions, V: the vocabulary.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from isotrain.tools.parity.levels.drawn import Drawn, Settings
from isotrain.tools.parity.levels.sampler import FALSE_ALARMS, SamplerResult, judge_sampler

Floats = npt.NDArray[np.float64]
VOCABULARY = 40


def make_logits(random: np.random.Generator, positions: int) -> Floats:
    """From nearly flat to peaked, as those of a language model are."""
    return random.normal(0, 1, (positions, VOCABULARY)) * random.uniform(0.5, 4.0, (positions, 1))


def draw(
    random: np.random.Generator,
    logits_QV: Floats,
    settings: Settings,
    *,
    more_p: int = 0,
    more_k: int = 0,
) -> npt.NDArray[np.int64]:
    """A sampler of its own, by Gumbel noise; `more_p`, `more_k` tokens too many are left in."""
    logits_QV = logits_QV / settings.temperature
    rank_QV = np.argsort(np.argsort(-logits_QV, axis=1, kind="stable"), axis=1)
    out_QV = rank_QV >= (settings.top_k + more_k if settings.top_k > 0 else VOCABULARY)
    p_QV = np.where(out_QV, 0.0, np.exp(logits_QV))
    p_QV /= p_QV.sum(1, keepdims=True)
    if settings.top_p < 1:
        # The first token with which the sum reaches top-p is the last that is left in.
        sums_QV = np.cumsum(-np.sort(-p_QV, axis=1), axis=1)
        out_QV |= rank_QV > np.maximum((sums_QV < settings.top_p).sum(1) + more_p, 0)[:, None]
    noise_QV = random.gumbel(size=logits_QV.shape)
    return np.where(out_QV, -np.inf, logits_QV + noise_QV).argmax(1)


def judged(
    asked: Settings, used: Settings | None = None, *, positions: int, seed: int, **wrong: Any
) -> SamplerResult:
    random = np.random.default_rng(seed)
    logits_QV = make_logits(random, positions)
    drawn = Drawn(asked)
    drawn.add(logits_QV, draw(random, logits_QV, used or asked, **wrong))
    return judge_sampler(drawn)


HONEST = {
    "all": Settings(),
    "top-p": Settings(top_p=0.9),
    "top-k": Settings(top_k=8),
    "both": Settings(temperature=0.7, top_p=0.95, top_k=20),
}


@pytest.mark.parametrize("name", HONEST)
def test_false_alarms_are_as_rare_as_designed(name: str) -> None:
    """Designed is 1 %: of 200 samples 2; 8 or more would come in one of a thousand cases."""
    verdicts = Counter(judged(HONEST[name], positions=300, seed=seed).verdict for seed in range(200))
    assert FALSE_ALARMS == 0.01 and verdicts["different"] <= 7, verdicts


@pytest.mark.parametrize("name", HONEST)
def test_enough_tokens_say_same(name: str) -> None:
    """Of four samples one may be a false alarm. What two boundaries leave says less of the temperature."""
    positions = 60_000 if name == "both" else 25_000
    verdicts = Counter(judged(HONEST[name], positions=positions, seed=seed).verdict for seed in range(4))
    assert verdicts["same"] >= 3, verdicts


@pytest.mark.parametrize("name", HONEST)
def test_the_temperature_is_unbiased(name: str) -> None:
    scores = []
    for seed in range(100, 120):
        random, drawn = np.random.default_rng(seed), Drawn(HONEST[name])
        logits_QV = make_logits(random, 3000)
        drawn.add(logits_QV, draw(random, logits_QV, HONEST[name]))
        scores.append(drawn.score / np.sqrt(drawn.information))
    assert abs(np.mean(scores)) * np.sqrt(len(scores)) < 3.5 and 0.6 < np.std(scores) < 1.5


def test_what_is_not_rejected_is_not_the_same_for_that() -> None:
    """A temperature that is 5 % off, with too few tokens to reject it."""
    verdicts = Counter(
        judged(Settings(temperature=1.05), Settings(), positions=1500, seed=seed).verdict
        for seed in range(40)
    )
    assert not verdicts["same"] and verdicts["inconclusive"] > 10, verdicts


def test_few_tokens_say_that_they_are_few() -> None:
    result = judged(Settings(top_p=0.9), positions=60, seed=1)
    assert result.verdict == "inconclusive" and "times as many" in result.words
    assert "the last token within top-p" in result.words
    assert judge_sampler(Drawn(Settings())).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("asked", "used", "wrong", "words"),
    [
        (Settings(), Settings(temperature=0.95), {}, "temperature looks like 0.9"),
        (Settings(), Settings(temperature=1.05), {}, "temperature looks like 1.0"),
        (Settings(top_p=0.9), Settings(temperature=1.05, top_p=0.9), {}, "temperature looks like 1.0"),
        (Settings(top_p=0.9), None, {"more_p": -1}, "top-p cuts one token too early"),
        (Settings(top_p=0.9), None, {"more_p": 1}, "top-p cuts one token too late"),
        (Settings(top_k=8), None, {"more_k": -1}, "top-k cuts one token too early"),
        (Settings(top_k=8), None, {"more_k": 1}, "top-k cuts one token too late"),
        (Settings(top_p=0.9), Settings(), {}, "top-p is ignored"),
        (Settings(top_k=8), Settings(), {}, "top-k is ignored"),
    ],
)
def test_finds_each_fault_of_a_sampler(
    asked: Settings, used: Settings | None, wrong: dict[str, int], words: str
) -> None:
    """A temperature that is 5 % off needs more tokens than a boundary that is one token off."""
    positions = 25_000 if "temperature" in words else 2000
    for seed in range(3):
        result = judged(asked, used, positions=positions, seed=seed, **wrong)
        assert result.verdict == "different" and words in result.words, result.words
        assert len(result.faults) == 1, result.words


@pytest.mark.parametrize("asked", [Settings(), Settings(top_k=5)])
def test_finds_a_sampler_that_always_draws_token_0(asked: Settings) -> None:
    drawn = Drawn(asked)
    drawn.add(make_logits(np.random.default_rng(0), 300), np.zeros(300, np.int64))
    result = judge_sampler(drawn)
    assert result.verdict == "different" and "always token 0" in result.words, result.words


def test_finds_a_greedy_sampler() -> None:
    logits_QV = make_logits(np.random.default_rng(0), 300)
    drawn = Drawn(Settings())
    drawn.add(logits_QV, logits_QV.argmax(1))
    result = judge_sampler(drawn)
    assert result.verdict == "different" and "always the most likely token" in result.words, result.words


def test_a_fault_without_a_name() -> None:
    """Probabilities of other tokens: neither a temperature nor a boundary."""
    random = np.random.default_rng(2)
    logits_QV = make_logits(random, 2000)
    drawn = Drawn(Settings())
    drawn.add(logits_QV, (draw(random, logits_QV, Settings()) + 1) % VOCABULARY)
    result = judge_sampler(drawn)
    assert result.verdict == "different" and result.faults


def test_accepts_ties_and_rounding_at_the_boundary() -> None:
    """Tokens of equal logits at the boundary, and logits of which the engine's differ by rounding."""
    random = np.random.default_rng(3)
    logits_QV = np.round(make_logits(random, 3000) * 2) / 2
    for settings in (Settings(top_k=8), Settings(top_p=0.9)):
        drawn = Drawn(settings)
        noise_QV = random.normal(0, 2e-5, logits_QV.shape)
        drawn.add(logits_QV, draw(random, logits_QV + noise_QV, settings))
        assert judge_sampler(drawn).verdict != "different", judge_sampler(drawn).words


def test_parts_make_the_whole() -> None:
    random = np.random.default_rng(4)
    logits_QV = make_logits(random, 200).astype(np.float32)
    tokens_Q = draw(random, logits_QV, Settings(top_p=0.8))
    whole, parts = Drawn(Settings(top_p=0.8)), Drawn(Settings(top_p=0.8))
    whole.add(logits_QV, tokens_Q)
    for start in range(0, 200, 7):
        parts.add(logits_QV[start : start + 7] + 3.0, tokens_Q[start : start + 7])  # a constant has no say
    one, other = judge_sampler(whole), judge_sampler(parts)
    assert [p.p for p in one.parts] == pytest.approx([p.p for p in other.parts])
    assert json.loads(json.dumps(one.as_json()))["positions"] == 200


@pytest.mark.parametrize(
    ("logits", "tokens", "why"),
    [
        ([[0.0, 1.0]], [2], "outside the vocabulary"),
        ([[0.0, 1.0]], [-1], "outside the vocabulary"),
        ([[0.0, np.nan]], [0], "must be numbers"),
        ([[0.0, 1.0]], [0, 1], "one row of log-probs for each"),
        ([[]], [], "one row of log-probs for each"),
    ],
)
def test_what_cannot_be_judged(logits: list[list[float]], tokens: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Drawn(Settings()).add(np.array(logits), np.array(tokens))


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}])
def test_settings_that_draw_nothing(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="top_p must be above 0"):
        Settings(**values)
