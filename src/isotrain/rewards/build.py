"""From the recipe's reward section to one scorer that adds up its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, Protocol

from isotrain.errors import one_line
from isotrain.process.pool import Pool
from isotrain.process.sandbox import Limits, Sandbox, build_sandbox
from isotrain.recipe.online import CodeSection, FunctionSection, RewardPluginSection, RewardSection
from isotrain.rewards.base import LARGEST_SCORE, RewardInput, Scored, Scorer
from isotrain.rewards.code import CodeReward
from isotrain.rewards.function import REWARD_CALLS, read_source
from isotrain.rewards.mathematics import choice_letter, find_choice, gsm8k_score, right_answer

# sympy's powers and factorials can ask for any amount of memory; a wrong response must not take the
# machine's.
MATH_MEMORY = 2 << 30
# Its parser keeps tables that grow with every new text.
MATH_LIFETIME = 5000
# Calls of an async function that wait side by side in one process.
CALLS_AT_ONCE = 16
# Processes of one reward worker where the recipe names no number: machines have more cores than spare memory.
MOST_PROCESSES = 8

# Characters of a reference answer that an error quotes: its end, where a worked solution has its number.
SHOWN = 60


class Immediate:
    """A reward that this process computes: quick, and without code that we did not write."""

    def __init__(self, score: Callable[[RewardInput], Scored]) -> None:
        self._score = score

    def start(self) -> None:
        pass

    def submit(self, items: Sequence[RewardInput]) -> list[Future[Scored]]:
        futures: list[Future[Scored]] = [Future() for _ in items]
        for future, item in zip(futures, items, strict=True):
            future.set_result(self._score(item))
        return futures

    def close(self) -> None:
        pass


def score_gsm8k(item: RewardInput, method: Literal["strict", "flexible"], format_score: float) -> Scored:
    if item.answer is None:
        detail = "the row has no reference answer; check reward.answer_key"
        return Scored(0.0, failure="error", detail=detail)
    right = right_answer(item.answer, method)
    if right is None:
        shown = one_line(str(item.answer)[-SHOWN:])
        detail = f"the reference answer {shown!r} is not a plain number; check reward.answer_key"
        return Scored(0.0, failure="error", detail=detail)
    return Scored(gsm8k_score(item.response, right, method, format_score))


def score_choice(item: RewardInput) -> Scored:
    right = choice_letter(item.answer)
    if right is None:
        shown = one_line(repr(item.answer)[-SHOWN:])
        detail = f"the reference answer {shown} is no letter and no number from 0; check reward.answer_key"
        return Scored(0.0, failure="error", detail=detail)
    return Scored(float(find_choice(item.response) == right))


def score_of_environment(item: RewardInput) -> Scored:
    """The reward that the environment itself gave for an episode."""
    return item.environment or Scored(0.0, failure="error", detail="the environment gave no reward")


class RewardPart(Protocol):
    """One reward of several."""

    def start(self) -> None: ...

    def submit(self, items: Sequence[RewardInput]) -> list[Future[Scored]]: ...

    def close(self) -> None: ...


class WeightedSum:
    """Runs its parts concurrently; if one fails, or the environment has, the response gets `failed_score`."""

    def __init__(self, parts: dict[str, tuple[RewardPart, float]], failed_score: float) -> None:
        self._parts, self._failed_score = parts, failed_score

    def start(self) -> None:
        for part, _ in self._parts.values():
            part.start()

    def score(self, items: Sequence[RewardInput]) -> list[Scored]:
        futures = {name: part.submit(items) for name, (part, _) in self._parts.items()}
        return [
            self._add({name: of_part[index].result() for name, of_part in futures.items()}, item.environment)
            for index, item in enumerate(items)
        ]

    def _add(self, results: dict[str, Scored], environment: Scored | None) -> Scored:
        parts: dict[str, float] = {}
        failed: Scored | None = None
        total = 0.0
        if environment is not None and environment.failure:
            detail = f"episode: {environment.detail}"
            return Scored(self._failed_score, parts, environment.failure, detail)
        for name, result in results.items():
            if result.failure:
                failed = failed or Scored(
                    self._failed_score, parts, result.failure, f"reward.{name}: {result.detail}"
                )
                continue
            total += self._parts[name][1] * result.score
            parts[name] = result.score
            parts.update({f"{name}/{key}": value for key, value in result.parts.items()})
        if not failed and not abs(total) <= LARGEST_SCORE:
            failed = Scored(self._failed_score, parts, "error", f"the weighted sum {total:g} is out of range")
        return failed or Scored(total, parts)

    def close(self) -> None:
        for part, _ in self._parts.values():
            part.close()


def reward_source(reward: RewardSection) -> str | None:
    """The text of the user's file, read once, so that all processes of a run have the same function."""
    return read_source(reward.function.path) if reward.function else None


def build_scorer(reward: RewardSection, source: str | None) -> Scorer:
    """All rewards but those of models; `source` is what `reward_source` gave."""
    cores = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    parts: dict[str, tuple[RewardPart, float]] = {}
    if environment := reward.environment:
        parts["environment"] = Immediate(score_of_environment), environment.weight
    if gsm8k := reward.gsm8k:
        score = partial(score_gsm8k, method=gsm8k.method, format_score=gsm8k.format_score)
        parts["gsm8k"] = Immediate(score), gsm8k.weight
    if choice := reward.choice:
        parts["choice"] = Immediate(score_choice), choice.weight
    if math := reward.math:
        pool = Pool(
            REWARD_CALLS,
            {"kind": "math"},
            name="reward.math",
            timeout=reward.timeout,
            processes=math.processes or cores,
            lifetime=MATH_LIFETIME,
            memory=MATH_MEMORY,
        )
        parts["math"] = pool, math.weight
    if code := reward.code:
        code_reward = CodeReward(
            code_sandbox(code), score=code.score, timeout=code.timeout, processes=code.processes or cores
        )
        parts["code"] = code_reward, code.weight
    if function := reward.function:
        assert source is not None
        setup: dict[str, Any] = {"kind": "function", "path": function.path, "source": source}
        parts["function"] = _pool("reward.function", function, setup, reward.timeout, cores), function.weight
    if plugin := reward.plugin:
        setup = {"kind": "plugin", "name": plugin.name, "options": plugin.options}
        parts["plugin"] = _pool("reward.plugin", plugin, setup, reward.timeout, cores), plugin.weight
    return WeightedSum(parts, reward.failed_score)


def code_sandbox(code: CodeSection) -> Sandbox:
    """Where code of responses runs."""
    limits = Limits(seconds=code.timeout, memory=int(code.memory_gb * 2**30))
    return build_sandbox(code.sandbox, limits, code.python)


def _pool(
    name: str,
    section: FunctionSection | RewardPluginSection,
    setup: dict[str, Any],
    timeout: float,
    cores: int,
) -> Pool[RewardInput, Scored]:
    return Pool(
        REWARD_CALLS,
        setup,
        name=name,
        timeout=timeout,
        processes=section.concurrency or cores,
        concurrency=section.concurrency or CALLS_AT_ONCE,
        start_timeout=section.start_timeout,
        memory=int(section.memory_gb * 2**30) if section.memory_gb else None,
        passed=section.environment,
    )
