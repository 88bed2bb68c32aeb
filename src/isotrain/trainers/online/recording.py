"""A recorded run: what it says of itself, and its trajectories in the place of new responses.

P: tokens of a prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.cluster.objects import put
from isotrain.data.encode import Prompt
from isotrain.data.loader import Sampler
from isotrain.data.record import Recorded, read_others, read_step, step_file
from isotrain.data.store import SampleStore
from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError
from isotrain.files import parse_json, read_regular
from isotrain.models.files import model_directory
from isotrain.observe.run_directory import RunDirectory, write_atomically
from isotrain.recipe.difference import FIXED_BY_RECORDING
from isotrain.recipe.load import resolved
from isotrain.recipe.online import OnlineSection, PpoSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.online.messages import Group, Score, TrajectoriesHandle, describe
from isotrain.trainers.online.metrics import recorded_failures
from isotrain.trainers.online.precheck import UserFiles, named_file
from isotrain.trainers.online.rollouts import Batch, Make, Seconds
from isotrain.trainers.start import digest_field, model_digest

DESCRIPTION = "recorded.json"
_LARGEST = 1 << 20


def trajectories(run: str | Path) -> Path:
    """Where a run's recorded responses are."""
    return RunDirectory(run).trajectories


def frozen_models(recipe: Recipe) -> list[str]:
    """Sections of models whose weights a checkpoint does not hold: a run that goes on reads them again."""
    assert recipe.reward is not None and isinstance(recipe.algorithm, OnlineSection)
    read_again = recipe.model.lora.rank > 0 or recipe.algorithm.kl.place != "off"
    teacher = ["algorithm.distillation"] if recipe.algorithm.distillation.path else []
    scorers = [f"reward.{name}" for name in recipe.reward.reward_models]
    return (["model"] if read_again else []) + teacher + scorers


def model_directories(recipe: Recipe, sections: Collection[str] | None = None) -> dict[str, Path]:
    """All models of a step by their sections; only of these `sections`, if given."""
    assert recipe.reward is not None
    model, process = recipe.reward.model, recipe.reward.process
    critic = recipe.algorithm.critic.path if isinstance(recipe.algorithm, PpoSection) else None
    online = recipe.algorithm if isinstance(recipe.algorithm, OnlineSection) else None
    paths = {
        "model": recipe.model.path,
        "algorithm.critic": critic,
        "algorithm.distillation": online.distillation.path if online else None,
        "reward.model": model.path if model else None,
        "reward.process": process.path if process else None,
    }
    return {
        name: model_directory(path, digest_field(name))
        for name, path in paths.items()
        if path and (sections is None or name in sections)
    }


def model_digests(recipe: Recipe, sections: Collection[str] | None = None) -> dict[str, str]:
    return {name: model_digest(path) for name, path in model_directories(recipe, sections).items()}


def function_digests(recipe: Recipe, files: UserFiles) -> dict[str, str]:
    """Digests of the user's reward function, and environment or agent, where there are such."""
    assert recipe.rollout is not None and recipe.reward is not None
    function, named = recipe.reward.function, named_file(recipe.rollout)
    digests = {}
    if function is not None and files.reward is not None:
        digests["reward.function"] = _function_digest(function.path, files.reward)
    if named is not None and files.episodes is not None:
        path, field = named
        digests[field.removesuffix(".path")] = _function_digest(path, files.episodes)
    return digests


def _function_digest(path: str, text: str) -> str:
    return hashlib.sha256(f"{path.rpartition(':')[2]}\n{text}".encode()).hexdigest()


def write_description(recipe: Recipe, digests: Mapping[str, str], steps: int) -> None:
    """Beside the trajectories; `digests` are those of data and models."""
    directory = trajectories(recipe.output)
    directory.mkdir(exist_ok=True)
    content = {"recipe": _fields(recipe), "digests": dict(digests), "steps": steps}
    write_atomically(directory / DESCRIPTION, json.dumps(content, indent=2) + "\n")


def check_recording(run: str, recipe: Recipe, digests: Mapping[str, str], steps: int) -> None:
    """Refuse a recording that this recipe cannot be trained from, before any worker is started."""
    path = trajectories(run) / DESCRIPTION
    described = _read(path)
    recorded, expected = described["recipe"], _fields(recipe)
    for name, value in expected.items():
        if recorded.get(name) != value:
            raise DataError(f"{name} is {value!r}, but {path} was recorded with {recorded.get(name)!r}")
    for name, digest in digests.items():
        if described["digests"].get(name) != digest:
            raise DataError(
                f"{digest_field(name)}: {path} was recorded with other content (the digests differ)"
            )
    for step in range(recipe.observe.layer_trace_after + 1, steps + 1):
        if not (file := step_file(path.parent, step, 0)).is_file():
            raise DataError(
                f"{file} is missing, so step {step} of {steps} cannot be replayed; finish the recording, "
                f"or replay less of it with trainer.steps={step - 1}"
            )


def recorded_digests(run: str | Path) -> dict[str, Any]:
    """Digests of the data and models that a recording was made with."""
    digests: dict[str, Any] = _read(trajectories(run) / DESCRIPTION)["digests"]
    return digests


def _fields(recipe: Recipe) -> dict[str, Any]:
    fields = {}
    for name in FIXED_BY_RECORDING:
        value: Any = resolved(recipe)
        for part in name.split("."):
            value = value[part]
        fields[name] = value
    return fields


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_regular(path, _LARGEST))
    except FileNotFoundError:
        raise DataError(
            f"rollout.replay: there is no {path}; record a run with `isotrain parity record`, or with "
            "rollout.record=true"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), dict) for key in ("recipe", "digests")
    ):
        raise DataError(f"{path}: not the metadata of a recording; record the run again")
    return content


class Replayed:
    """A maker of batches: forced are trajectories, with the log-probs they were sampled with, and scores.

    Everything after that is computed anew. The files may come from another machine, so what the ranks would
    stumble over is looked at here: a draw that this run would not make, incomplete groups, strange tokens.
    """

    def __init__(
        self,
        directory: Path,
        prompts: SampleStore[Prompt],
        sampler: Sampler,
        *,
        done: int,
        attempts: int,
        n: int,
        max_prompt: int,
        max_tokens: int,
        vocabulary: int,
    ) -> None:
        """`sampler` and `done` are where a run goes on; `attempts` is how often draws may be replaced."""
        self.directory, self.prompts, self.step = directory, prompts, done
        self.sampler, self.taken = sampler, sampler.taken
        self.most = sampler.batch_size * (attempts + 1)
        self.n, self.max_tokens, self.vocabulary = n, max_tokens, vocabulary
        self.longest = max_prompt + max_tokens

    def begin(self) -> Make:
        self.step += 1
        self.sampler.taken = self.taken
        return lambda next_may_begin: self._make()

    def again(self, groups: list[Group], gone: Collection[TrajectoriesHandle]) -> list[Group]:
        """All groups of the batch, from the files that they came from."""
        return self._groups()[0]

    def _make(self) -> Batch:
        groups, greedy = self._groups()
        count = len(replace(self.sampler).next_batch())
        if len(groups) != count:
            raise self._wrong(f"has {len(groups)} prompts instead of {count}")
        self.taken = groups[-1].responses.prompt_index + 1
        return Batch(
            groups,
            greedy or None,
            taken=self.taken,
            seconds=Seconds(0.0, 0.0),
            # A draw that was replaced by another has left a gap.
            resampled=self.taken - self.sampler.taken - count,
            others=recorded_failures(read_others(self.directory, self.step)),
        )

    def _groups(self) -> tuple[list[Group], dict[int, float]]:
        """The step's groups in the order of their draws, and the greedy scores that were recorded."""
        groups: list[Group] = []
        greedy: dict[int, float] = {}
        for prompt_index, records in _by_draw(read_step(self.directory, self.step)):
            self._check(prompt_index, records)
            group = tuple(record.trajectory for record in records)
            scores = tuple(
                Score(m.score, m.parts, m.failure, m.detail) for t, m, _ in records if _begins_episode(t)
            )
            groups.append(Group(describe(group), put(group), scores, records[0].marks.source))
            if (score := records[0].marks.greedy) is not None:
                greedy[prompt_index] = score
        return groups, greedy

    def _check(self, prompt_index: int, records: Sequence[Recorded]) -> None:
        group = [record.trajectory for record in records]
        if [t.sample for t in group if _begins_episode(t)] != list(range(self.n)) or not _are_whole(group):
            raise self._wrong(f"does not have {self.n} responses to draw {prompt_index}")
        drawn = self._row(prompt_index)
        prompt_P = self.prompts[drawn].tokens_P
        for t in group:
            own_P = t.tokens_T[: t.prompt_length]
            # An environment adds to prompts: tools, and what it tells at the beginning.
            same = len(own_P) > 0 if t.episode else np.array_equal(own_P, prompt_P)
            if t.row != drawn or not same or t.prompt_length != group[0].prompt_length:
                raise self._wrong(
                    f"has a prompt for draw {prompt_index} that differs from the data of this recipe"
                )
            if len(t) > self.longest or (t.episode is None and len(t.mask_N) > self.max_tokens):
                raise self._wrong(f"has a response of {len(t.mask_N)} tokens to draw {prompt_index}")
            if ((t.tokens_T < 0) | (t.tokens_T >= self.vocabulary)).any():
                raise self._wrong(f"has tokens outside the vocabulary in a response to draw {prompt_index}")

    def _row(self, prompt_index: int) -> int:
        if not 0 <= prompt_index - self.sampler.taken < self.most:
            raise self._wrong(f"has responses to draw {prompt_index}, which is not part of this step")
        return int(replace(self.sampler, taken=prompt_index, batch_size=1, limit=None).next_batch()[0])

    def _wrong(self, what: str) -> DataError:
        """The files of a step are one thing: whatever is wrong is told of the first."""
        file = step_file(self.directory, self.step, 0)
        return DataError(f"{file}: step {self.step} {what}; record it again")


def _by_draw(records: Sequence[Recorded]) -> Iterator[tuple[int, list[Recorded]]]:
    for prompt_index, group in groupby(records, key=lambda record: record.trajectory.prompt_index):
        yield prompt_index, list(group)


def _begins_episode(trajectory: Trajectory) -> bool:
    return trajectory.episode is None or trajectory.episode.part == 0


def _are_whole(group: Sequence[Trajectory]) -> bool:
    """Whether each episode has all its sequences, in order."""
    for _, sequences in groupby(group, key=lambda t: t.sample):
        episodes = [t.episode for t in sequences if t.episode is not None]
        if [(e.part, e.parts) for e in episodes] != [(i, len(episodes)) for i in range(len(episodes))]:
            return False
    return True
