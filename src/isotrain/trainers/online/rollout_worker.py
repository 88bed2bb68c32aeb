"""A worker around an engine; it keeps the trajectories where the ranks fetch them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.cluster.cores import bound_cores, core_list
from isotrain.cluster.objects import put
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.errors import EngineLost
from isotrain.observe.spans import Span, SpanLog, spanned
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Request, RolloutEngine, Sampling
from isotrain.rollout.build import build_rollout
from isotrain.rollout.validation import sample_requests
from isotrain.trainers.build import TRAIN, open_prompts
from isotrain.trainers.online.engine_loop import EngineLoop, Prompts
from isotrain.trainers.online.episodes import Episodes
from isotrain.trainers.online.messages import PromptRequest, Responses, TrajectoriesHandle, describe
from isotrain.trainers.online.prompt_queue import Draws, Supply
from isotrain.weights.check import check_pictures
from isotrain.weights.stream import wait_for_end
from isotrain.weights.update import StoreSource, WeightUpdate

Written = tuple[Responses, TrajectoriesHandle]
"""All responses to one draw."""


class RolloutWorker:
    def __init__(self, recipe: dict[str, Any], name: str, episodes: str | None = None) -> None:
        """`episodes`: the text of the file of `rollout.environment` or `rollout.agent`, if there is one."""
        self.recipe = Recipe.model_validate(recipe)
        self.name, self._source = name, episodes
        self._episodes: Episodes | None = None
        self._held: list[tuple[int, TrajectoriesHandle]] = []
        self._lock = threading.Lock()  # in flight, several calls run at a time
        self.spans = SpanLog(name, on=bool(self.recipe.observe.profile.steps))

    def start(self) -> dict[str, str]:
        """Load the engine; returns its settings."""
        cores = os.sched_getaffinity(0)
        self.stores = open_prompts(self.recipe)
        assert self.recipe.rollout is not None
        self.loop = EngineLoop(self._build, self.recipe.rollout.in_flight)
        if self._source is not None:
            self._episodes = Episodes(self.recipe, self._source, self.loop)
        bound = core_list(bound_cores(cores))
        return {**self.engine.settings, **({"cores": bound} if bound else {})}

    @property
    def engine(self) -> RolloutEngine:
        return self.loop.engine

    def _build(self) -> RolloutEngine:
        recipe = self.recipe
        assert recipe.rollout is not None and isinstance(recipe.algorithm, OnlineSection)
        return build_rollout(
            recipe.rollout,
            recipe.model.path,
            recipe.model.dtype,
            device=choose_device(recipe.device.type),
            max_prompt=self._longest_prompt(),
            seed=recipe.seed,
            name=self.name,
            repeatable=recipe.device.determinism != "off" or recipe.rollout.record,
            head_float32=recipe.model.head_dtype == "float32",
            routes=recipe.algorithm.router_replay == "R3",
            trained=recipe.model,
            token_budget=recipe.data.tokens_per_micro_batch,
            pictures=recipe.data.images.max_per_prompt if recipe.data.image_key else 0,
        )

    def _longest_prompt(self) -> int:
        if self._source is not None:
            return self.recipe.data.max_length  # with what an environment adds to it
        return max(int(store.lengths.max()) for store in self.stores.values())

    def generate(
        self,
        store: str,
        prompts: Sequence[PromptRequest] | Draws,
        n: int,
        sampling: Sampling,
        version: int = 0,
    ) -> Iterator[Written]:
        """`n` responses to each prompt, handed over together as soon as the last of them is there.

        None is begun before the update to `version`. Their handles are kept here until `release`: Ray forgets
        to count references that travel inside the items of a stream, and would free what the controller still
        means to use.
        """
        # In flight, one place stays free for weight checks: they come while responses are generated.
        room = (self._episodes or self.engine).at_once - self.loop.in_flight
        gradual = self.loop.in_flight or self._episodes is not None
        supply = Supply(prompts, max(1, room // n), gradual=gradual)
        urgent = store != TRAIN  # training waits for validation, and not for the batches ahead of it
        with self.spans.span("generate"), _dying_with_its_engine():
            for group in self._groups(store, supply, n, sampling, version, urgent):
                handle = put(tuple(group))
                with self._lock:
                    self._held.append((group[0].prompt_index, handle))
                yield describe(group), handle

    def _groups(
        self, store: str, supply: Supply, n: int, sampling: Sampling, version: int, urgent: bool
    ) -> Iterator[list[Trajectory]]:
        if self._episodes is not None:
            rows = self.stores[store]
            return self._episodes.generate(
                supply, lambda row: rows[row].row, n, sampling, version, urgent=urgent
            )
        prompts = Prompts(
            supply, lambda taken: self._requests(store, taken, n), n, sampling, version, urgent=urgent
        )
        return self.loop.generate(prompts)

    def release(self, done: int) -> None:
        """Forget the responses to draws before `done`; those of validation are before all of them."""
        with self._lock:
            self._held = [(index, handle) for index, handle in self._held if index >= done]

    def _requests(self, store: str, prompt_requests: Sequence[PromptRequest], n: int) -> list[Request]:
        prompts = self.stores[store]
        requests = []
        for prompt_index, row in prompt_requests:
            prompt, seed = prompts[row], self.recipe.seed
            requests += sample_requests(row, prompt_index, prompt.tokens_P, n, seed, prompt.pictures)
        return requests

    def report(self) -> None:
        """Returns as soon as all earlier calls are done."""

    def begin_profile(self) -> None:
        self.spans.begin()

    def end_profile(self) -> list[Span]:
        return self.spans.take()

    @spanned("update_weights")
    def update(self, update: WeightUpdate) -> int:
        """Take new weights; returns the version that the engine now has."""
        with _dying_with_its_engine():
            self.loop.update(update)
        return self.engine.version

    @spanned("receive_weights")
    def receive(self, update: WeightUpdate, timeout: float) -> None:
        """Take what is sent into a second buffer, beside generation; returns when all engines have it."""
        with _dying_with_its_engine():
            self.loop.run(lambda: self.engine.receive(update), beside=True)
        source = update.source()
        assert isinstance(source, StoreSource), "of an update that is sent"
        wait_for_end(source, update.version, timeout)

    def rehearse(self, update: WeightUpdate, timeout: float) -> str:
        """Whether weights can be sent to this engine's devices; returns the error if they cannot."""
        try:
            with _dying_with_its_engine():
                self.loop.run(lambda: self.engine.rehearse(update, timeout))
        except Exception as error:  # of any kind, from drivers as well
            return f"{self.name}: {error}"
        return ""

    @spanned("weight_check")
    def weight_check(self, prompts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """Log-probs of all prompts, one after the other."""
        with _dying_with_its_engine():
            seen = []
            if self.recipe.data.image_key:
                seen = [check_pictures(prompts, lambda row: self.stores[TRAIN][row].pictures)]
            return np.concatenate(self.loop.run(lambda: self.engine.logps(prompts, *seen)))

    def version_and_check(
        self, prompts: Sequence[npt.NDArray[np.int32]]
    ) -> tuple[int, npt.NDArray[np.float32]]:
        return self.engine.version, self.weight_check(prompts)

    def update_and_check(
        self, update: WeightUpdate, prompts: Sequence[npt.NDArray[np.int32]]
    ) -> tuple[int, npt.NDArray[np.float32]]:
        """In one call, because calls that run at the same time have no order."""
        return self.update(update), self.weight_check(prompts)

    @spanned("sleep")
    def sleep(self) -> None:
        with _dying_with_its_engine():
            self.loop.run(self.engine.sleep)

    @spanned("wake")
    def wake_for_weights(self) -> None:
        """There is no memory to generate yet: the ranks still hold what they send."""
        with _dying_with_its_engine():
            self.loop.run(lambda: self.engine.wake(weights_only=True))

    @spanned("wake")
    def wake(self) -> None:
        with _dying_with_its_engine():
            self.loop.run(self.engine.wake)

    def close(self) -> None:
        """At any time, also before `start` and again."""
        try:
            if self._episodes is not None:
                self._episodes.close()
        finally:
            if hasattr(self, "loop"):
                self.loop.close()


@contextmanager
def _dying_with_its_engine() -> Iterator[None]:
    """An engine that is lost needs a new process: this one ends, and the controller starts another."""
    try:
        yield
    except EngineLost as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
