"""A worker around an engine; it keeps the trajectories where the ranks fetch them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.cluster.objects import put
from isotrain.data.trajectory import Trajectory, sample_seed
from isotrain.device.detect import choose_device
from isotrain.errors import EngineLost
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Request, RolloutEngine, Sampling, WeightUpdate
from isotrain.rollout.build import build_rollout
from isotrain.trainers.online.messages import PromptRequest, Responses, TrajectoriesHandle, describe
from isotrain.trainers.setup import open_prompts

Written = tuple[Responses, TrajectoriesHandle]
"""All responses to one draw."""


class RolloutWorker:
    def __init__(self, recipe: dict[str, Any], name: str) -> None:
        self.recipe = Recipe.model_validate(recipe)
        self.name = name
        self.held: list[tuple[int, TrajectoriesHandle]] = []

    def start(self) -> dict[str, str]:
        """Load the engine; returns its settings."""
        recipe = self.recipe
        assert recipe.rollout is not None
        self.stores = open_prompts(recipe)
        self.engine: RolloutEngine = build_rollout(
            recipe.rollout,
            recipe.model.path,
            recipe.model.dtype,
            device=choose_device(recipe.device.type),
            max_prompt=max(int(store.lengths.max()) for store in self.stores.values()),
            seed=recipe.seed,
            name=self.name,
        )
        return self.engine.settings

    def generate(
        self, store: str, prompt_requests: Sequence[PromptRequest], n: int, sampling: Sampling
    ) -> Iterator[Written]:
        """`n` responses to each draw, handed over together as soon as the last of them is there.

        Their handles are kept here until `release`: Ray forgets to count references that travel inside the
        items of a stream, and would free what the controller still means to use.
        """
        open_groups: dict[int, list[Trajectory]] = {request.prompt_index: [] for request in prompt_requests}
        with _dying_with_its_engine():
            for trajectory in self.engine.generate(self._requests(store, prompt_requests, n), sampling):
                group = open_groups[trajectory.prompt_index]
                group.append(trajectory)
                if len(group) == n:
                    del open_groups[trajectory.prompt_index]
                    group.sort(key=lambda t: t.sample)
                    handle = put(tuple(group))
                    self.held.append((trajectory.prompt_index, handle))
                    yield describe(group), handle

    def release(self, done: int) -> None:
        """Forget the responses to draws before `done`; those of validation are before all of them."""
        self.held = [(prompt_index, handle) for prompt_index, handle in self.held if prompt_index >= done]

    def _requests(self, store: str, prompt_requests: Sequence[PromptRequest], n: int) -> list[Request]:
        prompts = self.stores[store]
        return [
            Request(
                row,
                prompt_index,
                sample,
                sample_seed(self.recipe.seed, prompt_index, sample),
                prompts[row].tokens_P,
            )
            for prompt_index, row in prompt_requests
            for sample in range(n)
        ]

    def report(self) -> None:
        """Returns as soon as all earlier calls are done."""

    def update(self, update: WeightUpdate) -> int:
        """Take new weights; returns the version that the engine now has."""
        with _dying_with_its_engine():
            self.engine.update_weights(update)
        return self.engine.version

    def weight_check(self, sequence_T: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        with _dying_with_its_engine():
            (logps,) = self.engine.logps([sequence_T])
        return logps

    def sleep(self) -> None:
        with _dying_with_its_engine():
            self.engine.sleep()

    def wake(self) -> None:
        with _dying_with_its_engine():
            self.engine.wake()

    def close(self) -> None:
        """At any time, also before `start` and again."""
        if hasattr(self, "engine"):
            self.engine.close()


@contextmanager
def _dying_with_its_engine() -> Iterator[None]:
    """An engine that is lost needs a new process: this one ends, and the controller starts another."""
    try:
        yield
    except EngineLost as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
