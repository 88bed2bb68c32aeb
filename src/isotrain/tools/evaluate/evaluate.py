"""One model on one data set: an engine generates, rewards score meanwhile, each finished row is kept.

P: prompt tokens.
"""

from __future__ import annotations

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.encode import PromptEncoder, json_line
from isotrain.data.rows import read_rows, source_digest
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.engine.export import export_run
from isotrain.errors import DataError, RewardError
from isotrain.models.config import positions
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.models.load import read_config
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe
from isotrain.rewards.base import RewardInput, Scored, Scorer
from isotrain.rewards.build import build_scorer, reward_source
from isotrain.rewards.responses import reward_inputs, source_of
from isotrain.rollout.base import Request, RolloutEngine
from isotrain.rollout.build import build_rollout
from isotrain.rollout.validation import sample_requests, validation_index, validation_sampling
from isotrain.tools.evaluate.log import Item, ItemLog, Response, write_settings
from isotrain.tools.evaluate.recipe import check_reward, choose_step, is_run, model_identity

# As many responses without a score, and none with one, are a mistake in the reward section.
FIRST = 32
SECONDS_BETWEEN_LINES = 10.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    row: int
    values: Mapping[str, Any]
    prompt_P: npt.NDArray[np.int32] | None
    """None where it is too long."""
    cut: bool = False


def evaluate(recipe: Recipe, target: str, step: int | None, directory: Path, tell: Tell) -> list[Item]:
    """All rows with their responses, those of an earlier start included; `step` is that of a run."""
    assert recipe.rollout is not None and recipe.reward is not None and recipe.data.validation is not None
    check_reward(recipe)
    if is_run(target):
        step = choose_step(target, step)
    source = reward_source(recipe.reward)
    settings = {
        "model": model_identity(target, step),
        "data": {"rows": recipe.data.validation, "digest": source_digest(recipe.data.validation)},
        "reward_file": source,
        "recipe": _identity(recipe),
    }
    write_settings(directory, settings)
    # A checkpoint has the tokenizer and the positions of the model that it was trained from.
    base = model_directory(recipe.model.path)
    questions = list(read_questions(recipe, base))
    if not questions:
        raise DataError(f"{recipe.data.validation}: no rows")
    with ItemLog(directory) as log:
        done = {item.row for item in log.items}
        if beyond := done - {question.row for question in questions}:
            raise DataError(f"{log.path}: row {max(beyond)} is not in the data; remove {directory}")
        missing = [question for question in questions if question.row not in done]
        if done and missing:
            tell(f"resumed: {len(done):,} of {len(questions):,} rows are done")
        log.add([_unanswered(question, recipe) for question in missing if question.prompt_P is None])
        missing = [question for question in missing if question.prompt_P is not None]
        if missing:
            with _weights(target, step, directory) as path:
                _answer(recipe, path, missing, load_tokenizer(base), source, log, tell)
        return sorted(log.items, key=lambda item: item.row)


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What decides responses and scores: other memory or another place is the same evaluation."""
    values = resolved(recipe)
    rollout = {key: values["rollout"][key] for key in ("engine", "max_tokens", "validation")}
    data = {key: values["data"][key] for key in ("prompt_key", "max_length", "too_long", "validation_rows")}
    model = {key: values["model"][key] for key in ("dtype", "head_dtype")}
    reward = {key: value for key, value in values["reward"].items() if key != "workers"}
    return {"seed": recipe.seed, "rollout": rollout, "data": data, "model": model, "reward": reward}


def read_questions(recipe: Recipe, base: Path) -> Iterator[Question]:
    """The rows to evaluate, each once. Prompts are cut only if the recipe says how."""
    assert recipe.rollout is not None and recipe.data.validation is not None
    data, limit = recipe.data, positions(read_config(base)).limit
    longest = data.max_length if limit is None else min(data.max_length, limit - recipe.rollout.max_tokens)
    if longest < 1:
        raise DataError(
            f"rollout.max_tokens ({recipe.rollout.max_tokens}) leaves no room for a prompt: the model has "
            f"{limit} positions"
        )
    if data.image_key is not None:
        raise DataError("data.image_key: rows with pictures cannot be evaluated yet; remove it for others")
    tokenizer = load_tokenizer(base)
    whole = PromptEncoder(tokenizer, data.prompt_key, longest, "drop")
    cut = PromptEncoder(tokenizer, data.prompt_key, longest, data.too_long)
    cuts = data.too_long.startswith("truncate")
    for number, row in enumerate(read_rows(recipe.data.validation)):
        if data.validation_rows is not None and number >= data.validation_rows:
            return
        prompt_P, values = whole(row), json.loads(json_line(row))
        is_cut = prompt_P is None and cuts
        yield Question(number, values, cut(row) if is_cut else prompt_P, is_cut)


def _unanswered(question: Question, recipe: Recipe) -> Item:
    """A prompt that is too long: all its responses count, as wrong ones."""
    assert recipe.rollout is not None and recipe.reward is not None
    response = Response("", recipe.reward.failed_score, 0, False, None, "the prompt is too long")
    responses = (response,) * recipe.rollout.validation.n
    return Item(question.row, source_of(question.values), question.values, 0, responses)


@contextmanager
def _weights(target: str, step: int | None, directory: Path) -> Iterator[str]:
    """The directory that the engine loads; that of a checkpoint is there for as long as it runs."""
    if step is None:
        yield target
        return
    path = directory / "model"
    shutil.rmtree(path, ignore_errors=True)  # of a start that was killed
    try:
        yield str(export_run(Path(target), path, step, adapter_only=False))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _answer(
    recipe: Recipe,
    path: str,
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    log: ItemLog,
    tell: Tell,
) -> None:
    assert recipe.rollout is not None and recipe.reward is not None
    scorer = build_scorer(recipe.reward, source)
    try:
        scorer.start()
        engine = build_rollout(
            recipe.rollout,
            path,
            recipe.model.dtype,
            device=choose_device(recipe.device.type),
            max_prompt=max(len(q.prompt_P) for q in questions if q.prompt_P is not None),
            seed=recipe.seed,
            name="engine",
            head_float32=recipe.model.head_dtype == "float32",
        )
        try:
            scoring = Scoring(scorer, tokenizer, recipe.reward.answer_key, questions, log, tell)
            generate_and_score(engine, recipe, questions, scoring)
        finally:
            engine.close()
    finally:
        scorer.close()


def generate_and_score(
    engine: RolloutEngine, recipe: Recipe, questions: Sequence[Question], scoring: Scoring
) -> None:
    """All responses to the questions; rows are scored and kept in the order in which they are finished."""
    assert recipe.rollout is not None
    n, sampling = recipe.rollout.validation.n, validation_sampling(recipe.rollout)
    requests = [request for question in questions for request in _requests(question, n, recipe.seed)]
    groups: dict[int, list[Trajectory]] = {}
    with scoring.running():
        for trajectory in engine.generate(requests, sampling):
            group = groups.setdefault(trajectory.row, [])
            group.append(trajectory)
            if len(group) == n:
                scoring.put(sorted(groups.pop(trajectory.row), key=lambda t: t.sample))
    assert not groups, "the engine has finished each response"


def _requests(question: Question, n: int, seed: int) -> list[Request]:
    assert question.prompt_P is not None
    return sample_requests(question.row, validation_index(question.row), question.prompt_P, n, seed)


class Scoring:
    """Scores finished groups in a thread: the engine does not wait for rewards."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        answer_key: str,
        questions: Sequence[Question],
        log: ItemLog,
        tell: Tell,
    ) -> None:
        self._scorer, self._tokenizer, self._answer_key = scorer, tokenizer, answer_key
        self._questions = {question.row: question for question in questions}
        self._log, self._tell = log, tell
        self._waiting: queue.SimpleQueue[list[Trajectory] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._done = self._failed = self._responses = 0
        self._told = self._started = time.monotonic()

    def put(self, group: list[Trajectory]) -> None:
        if self._error is not None:
            raise self._error
        self._waiting.put(group)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ends when all groups are scored; an error of the thread is raised here."""
        thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._waiting.put(None)
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while True:
                groups = [self._waiting.get()]
                while not self._waiting.empty():
                    groups.append(self._waiting.get())
                self._score([group for group in groups if group is not None])
                if groups[-1] is None:
                    return
        except BaseException as error:  # raised in the thread that generates
            self._error = error

    def _score(self, groups: Sequence[list[Trajectory]]) -> None:
        inputs: list[list[RewardInput]] = []
        for group in groups:
            values = self._questions[group[0].row].values
            inputs.append(reward_inputs(self._tokenizer, group, values, self._answer_key))
        scored = iter(self._scorer.score([item for of_group in inputs for item in of_group]))
        items = []
        for group, of_group in zip(groups, inputs, strict=True):
            results = [next(scored) for _ in of_group]
            responses = tuple(map(_response, group, of_group, results))
            question, length = self._questions[group[0].row], group[0].prompt_length
            source = source_of(question.values)
            items.append(Item(question.row, source, question.values, length, responses, question.cut))
        self._log.add(items)
        self._report(items)

    def _report(self, items: Sequence[Item]) -> None:
        failures = [r for item in items for r in item.responses if r.failure is not None]
        self._done += len(items)
        self._responses += sum(len(item.responses) for item in items)
        self._failed += len(failures)
        if self._failed == self._responses >= FIRST and failures:
            raise RewardError(
                f"none of the first {self._failed} responses got a score; the last because of "
                f"{failures[-1].failure}: {failures[-1].detail}; check --reward and reward.answer_key"
            )
        if time.monotonic() > self._told + SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            seconds = self._told - self._started
            left = seconds / self._done * (len(self._questions) - self._done)
            self._tell(
                f"{self._done:,} of {len(self._questions):,} rows, {seconds:.0f} s, about {left:.0f} s left"
            )


def _response(trajectory: Trajectory, item: RewardInput, scored: Scored) -> Response:
    length, finished = len(trajectory.response_N), trajectory.finished
    return Response(
        item.response, scored.score, length, finished, scored.failure, scored.detail, dict(scored.parts)
    )
