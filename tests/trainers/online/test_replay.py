"""A replay learns from recorded responses what the recorded run learnt: bit for bit on the same device.

Most runs here are the real loop over a rank in this process, on invented responses; those over Ray are in
tests/cli/test_parity_runs.py.

P: tokens of a prompt, N: those of a response.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand_made_step import NOBODY, Here
from online_runs import online_recipe, run_online
from transformers import AutoConfig, AutoModelForSequenceClassification

from isotrain.data.loader import Sampler
from isotrain.data.record import Recorded, read_step, read_trajectories, step_file, write_trajectories
from isotrain.data.trajectory import EpisodePart, Trajectory, Turn, with_common_prompt
from isotrain.engine.world import open_store
from isotrain.errors import DataError
from isotrain.observe.console import Console
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.build import TRAIN, open_prompts
from isotrain.trainers.job import Recorder, ResumeState
from isotrain.trainers.online.build import build_trainer
from isotrain.trainers.online.messages import Group, Score, describe
from isotrain.trainers.online.metrics import Failures
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.recording import (
    Replayed,
    check_recording,
    frozen_models,
    model_digests,
    write_description,
)
from isotrain.trainers.online.rollouts import Batch, Make, Seconds, SyncBatches
from support import stable_metrics

pytestmark = pytest.mark.ray

N, MAX_TOKENS, BATCH, STEPS = 3, 6, 4, 3
Rows = list[dict[str, float]]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "overlong": {"buffer": 3}},
    "several updates, corrected": {
        "name": "grpo",
        "mini_batch_size": 2,
        "ppo_epochs": 2,
        "rollout_correction": {"level": "token"},
        "kl": {"place": "loss", "coefficient": 0.1},
    },
    "ppo": {"name": "ppo", "critic": {"lr": 1e-2}, "mini_batch_size": 2},
    "reinforce++": {
        "name": "reinforce++",
        "kl": {"place": "reward", "coefficient": 0.05, "controller": "adaptive", "horizon": 50},
    },
    "remax": {"name": "remax"},
    "dynamic sampling": {"name": "grpo", "dynamic_sampling": {"max_attempts": 2}},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(tiny: Path, output: Path, device_type: str, **sections: dict[str, Any]) -> Recipe:
    rollout = {"engine": "hf", "n": N, "max_tokens": MAX_TOKENS, "record": True}
    sections["rollout"] = {**rollout, **sections.get("rollout", {})}
    return online_recipe(tiny, output, device_type, trainer={"steps": STEPS}, **sections)


class Inventor:
    """A maker of batches whose responses no model wrote, with scores, failures and replaced draws."""

    def __init__(self, recipe: Recipe, put: Callable[[Any], int]) -> None:
        self.recipe, self.put, self.step = recipe, put, 0
        self.prompts = open_prompts(recipe)[TRAIN]
        self.sampler = Sampler(len(self.prompts), BATCH, recipe.seed)
        self.draw = np.random.default_rng(0)

    def begin(self) -> Make:
        return lambda next_may_begin: self.make()

    def again(self, groups: list[Group], gone: Collection[Any]) -> list[Group]:
        raise AssertionError("nothing is lost")

    def make(self) -> Batch:
        self.step += 1
        first = self.sampler.taken
        rows = self.sampler.next_batch().tolist()
        indices = list(range(first, first + BATCH))
        resampled = 0
        if self.recipe.algorithm.name == "grpo" and self.recipe.algorithm.dynamic_sampling.max_attempts:
            resampled = 1
            more = Sampler(len(self.prompts), 1, self.recipe.seed, taken=self.sampler.taken)
            indices, rows = [*indices[1:], self.sampler.taken], [*rows[1:], int(more.next_batch()[0])]
            self.sampler.taken += 1
        groups = [self._group(prompt_index, row) for prompt_index, row in zip(indices, rows, strict=True)]
        greedy = {prompt_index: self.draw.random() for prompt_index in indices}
        compares = self.recipe.algorithm.name == "remax"
        others = Failures()
        if compares:
            greedy[indices[0]], others = math.nan, Failures(BATCH, {"crash": 1}, "crash: it ended")
        if resampled:
            others = Failures(N, {"error": N}, "error: it raised")
        return Batch(
            groups, greedy if compares else None, self.sampler.taken, Seconds(1.0, 1.0), resampled, others
        )

    def _group(self, prompt_index: int, row: int) -> Group:
        group = tuple(self._trajectory(prompt_index, row, sample) for sample in range(N))
        if self.recipe.rollout and self.recipe.rollout.environment:
            parts = [part for trajectory in group for part in self._episode(trajectory)]
            group = tuple(with_common_prompt(parts))
        scores = [
            Score(value, {"function": value, "form": value / 3}, None, "") for value in self.draw.random(N)
        ]
        if prompt_index == 2:
            scores[1] = Score(0.0, {}, "timeout", "too slow")
        return Group(describe(group), self.put(group), tuple(scores), "invented")

    def _episode(self, trajectory: Trajectory) -> Iterator[Trajectory]:
        """Two turns around a tool's answer; every other episode goes on in a sequence of its own."""
        length = len(trajectory.mask_N)
        parts = 1 + trajectory.sample % 2
        for part in range(parts):
            turns = (Turn(0, 1, 0.5, 1, 0, 0.25), Turn(length - 1, length, 0.25, 0, 0, 0.0))
            mask_N = np.zeros(length, np.bool_)
            mask_N[[0, -1]] = True
            tokens_T = trajectory.tokens_T.copy()
            tokens_T[trajectory.prompt_length - 2 + part : trajectory.prompt_length] += part
            yield replace(
                trajectory,
                tokens_T=tokens_T,
                mask_N=mask_N,
                logp_N=np.where(mask_N, trajectory.logp_N, np.float32(0)),
                episode=EpisodePart(part, parts, turns[: 1 if length == 1 else 2], 0.5 * part, 1.0),
            )

    def _trajectory(self, prompt_index: int, row: int, sample: int) -> Trajectory:
        prompt_P = self.prompts[row].tokens_P
        length = int(self.draw.integers(1, MAX_TOKENS + 1))
        response_N = self.draw.integers(3, 100, length)
        return Trajectory(
            row=row,
            prompt_index=prompt_index,
            sample=sample,
            seed=0,
            prompt_length=len(prompt_P),
            tokens_T=np.concatenate([prompt_P, response_N]).astype(np.int32),
            mask_N=np.ones(length, np.bool_),
            logp_N=self.draw.normal(-5.0, 0.5, length).astype(np.float32),
            version_N=np.full(length, max(0, self.step - 2), np.int32),
            finished=length < MAX_TOKENS,
        )


def train(recipe: Recipe) -> Rows:
    """The real loop over one rank of this process; records from invented responses, or replays."""
    rank, objects, rows = PolicyRank(resolved(recipe)), [], []

    def put(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    rollout = recipe.rollout
    assert rollout is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "isotrain.trainers.online.policy_rank.fetch", lambda handles: [objects[h] for h in handles]
        )
        patch.setattr("isotrain.trainers.online.recording.put", put)
        try:
            described = rank.start(open_store(None))
            groups: Any = SimpleNamespace(
                ranks=Here(rank),
                engines=[],
                relays=[],
                rewards=[],
                queue=[],
                colocated=False,
                routes=[NOBODY],
            )
            recorder, stores = Recorder(Console()), open_prompts(recipe)
            recorder.loggers = [SimpleNamespace(write=lambda step, values: rows.append(dict(values)))]
            trainer = build_trainer(
                recipe, ClusterSection(), stores, groups, described, recorder, ResumeState(0, {}, [])
            )
            if rollout.generates:
                trainer.batches = SyncBatches(Inventor(recipe, put).begin)
                Path(recipe.output).mkdir(parents=True, exist_ok=True)
                write_description(recipe, digests(recipe), STEPS)
            else:
                check_recording(str(rollout.replay), recipe, digests(recipe), trainer.job.steps)
            trainer.train(0)
        finally:
            rank.close()
    return rows


def digests(recipe: Recipe) -> dict[str, str]:
    return {name: store.digest for name, store in open_prompts(recipe).items()} | model_digests(recipe)


def replay_of(recipe: Recipe, output: Path, **sections: dict[str, Any]) -> Recipe:
    values = resolved(recipe)
    for section, changes in sections.items():
        values[section] = {**values[section], **changes}
    values["rollout"] = {**values["rollout"], "replay": recipe.output, "record": False}
    return Recipe.model_validate({**values, "output": str(output)})


def stable(rows: Rows) -> Rows:
    """Without what depends on the clock, and what only engines tell."""
    other = ("timing_s/", "perf/", "rollout/weight_check_diff")
    return [{name: value for name, value in row.items() if not name.startswith(other)} for row in rows]


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce++"])
def test_a_replay_of_episodes_equals_the_run(tiny: Path, tmp_path: Path, device_type: str, name: str) -> None:
    environment = {"path": f"{tiny / 'environment.py'}:Oracle"}
    recipe = small(
        tiny,
        tmp_path / "recorded",
        device_type,
        algorithm=ALGORITHMS[name],
        rollout={"environment": environment},
        reward={"environment": {}, "answer_key": "answer"},
    )
    recorded, replayed = train(recipe), train(replay_of(recipe, tmp_path / "replayed"))
    assert len(recorded) == STEPS and stable(replayed) == stable(recorded)
    assert recorded[0]["episode/sequences/mean"] == pytest.approx((N + N // 2) / N)
    assert recorded[0]["actor/grad_norm"] > 0


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_replay_is_the_recorded_run(tiny: Path, tmp_path: Path, device_type: str, name: str) -> None:
    recipe = small(tiny, tmp_path / "recorded", device_type, algorithm=ALGORITHMS[name])
    recorded, replayed = train(recipe), train(replay_of(recipe, tmp_path / "replayed"))
    assert len(recorded) == STEPS and stable(replayed) == stable(recorded)
    assert recorded[0]["reward/timeouts"] == 1.0 and recorded[2]["rollout/staleness/max"] == 1.0
    causes = {"dynamic sampling": "errors", "remax": "crashes"}
    for cause in ("errors", "crashes"):
        wanted = {"errors": N, "crashes": 1}[cause] if causes.get(name) == cause else 0
        assert [row[f"reward/{cause}"] for row in recorded] == [wanted] * STEPS
    assert recorded[1]["rollout/resampled"] == (1.0 if name == "dynamic sampling" else 0.0)
    assert recorded[0]["actor/grad_norm"] > 0 and "training/rollout_logp_diff_mean" in recorded[0]
    assert "rollout/weight_check_diff" in recorded[0] and "rollout/weight_check_diff" not in replayed[0]


def test_models_that_score_are_asked_anew(tiny: Path, tmp_path: Path) -> None:
    reward_model = tmp_path / "judge"
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(reward_model)
    reward = {
        "function": {"path": f"{tiny / 'reward.py'}:score"},
        "model": {"path": str(reward_model), "weight": 2.0},
    }
    recipe = small(tiny, tmp_path / "recorded", "cpu", reward=reward, algorithm={"name": "rloo"})
    recorded = train(recipe)
    assert stable(train(replay_of(recipe, tmp_path / "replayed"))) == stable(recorded)
    marks = [record.marks for record in read_step(tmp_path / "recorded" / "trajectories", 1)]
    (failed,) = (m for m in marks if m.failure)
    assert failed.score == failed.reward == 0.0, "a reward model has no say where a reward failed"
    assert all(m.reward != m.score for m in marks if m is not failed)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(reward_model)
    with pytest.raises(
        DataError, match=r"reward\.model\.path: .*recorded\.json was recorded with other content"
    ):
        train(replay_of(recipe, tmp_path / "another"))


def test_models_that_no_checkpoint_holds(tiny: Path, tmp_path: Path) -> None:
    """They are read again when a run goes on, so they must be the same ones."""
    preference = {"gsm8k": {}, "model": {"path": str(tiny / "model")}}
    cases: list[tuple[dict[str, dict[str, Any]], list[str]]] = [
        ({}, []),
        ({"algorithm": {"name": "ppo", "critic": {"path": str(tiny / "model")}}}, []),
        ({"algorithm": {"name": "grpo", "kl": {"place": "loss"}}}, ["model"]),
        ({"model": {"lora": {"rank": 2}}}, ["model"]),
        ({"reward": preference}, ["reward.model"]),
    ]
    for sections, wanted in cases:
        if "model" in sections:
            sections["model"] = {"path": str(tiny / "model"), **sections["model"]}
        recipe = small(tiny, tmp_path / "run", "cpu", **sections)
        found = frozen_models(recipe)
        assert found == wanted and list(model_digests(recipe, found)) == wanted
        assert "model" in model_digests(recipe)


def test_another_device_rounds_alone(tiny: Path, tmp_path: Path) -> None:
    """With responses forced, nothing but rounding is left to differ."""
    recipe = small(tiny, tmp_path / "recorded", "cpu", algorithm=ALGORITHMS["ppo"])
    recorded = stable(train(recipe))
    replayed = stable(train(replay_of(recipe, tmp_path / "replayed", device={"type": "npu"})))
    for one, other in zip(recorded, replayed, strict=True):
        assert one.keys() - other.keys() == set()
        for metric, value in one.items():
            assert other[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Rows]:
    recipe = small(tiny, tmp_path_factory.mktemp("replay") / "recorded", "cpu")
    return recipe, train(recipe)


@pytest.fixture
def copied(recorded: tuple[Recipe, Rows], tmp_path: Path) -> Recipe:
    """The recipe of a recording that a test may damage."""
    shutil.copytree(recorded[0].output, tmp_path / "copied")
    return recorded[0].model_copy(update={"output": str(tmp_path / "copied")})


def test_recordings_of_any_number_of_ranks(
    recorded: tuple[Recipe, Rows], copied: Recipe, tmp_path: Path
) -> None:
    directory = Path(copied.output) / "trajectories"
    for step in range(1, STEPS + 1):
        records = read_trajectories(step_file(directory, step, 0))
        for rank in range(3):
            write_trajectories(step_file(directory, step, rank), records[rank::3], ranks=3)
    # Left behind by more ranks, before the run went on with three.
    shutil.copy(step_file(directory, 1, 0), step_file(directory, 2, 3))
    assert stable(train(replay_of(copied, tmp_path / "replayed"))) == stable(recorded[1])
    step_file(directory, 2, 1).unlink()
    with pytest.raises(DataError, match=r"step-000002-rank-00001\.parquet"):
        train(replay_of(copied, tmp_path / "replayed"))


MISTAKES: dict[str, dict[str, Any]] = {
    r"rollout\.n is 2, but .*recorded\.json was recorded with 3": {"rollout": {"n": 2}},
    r"data\.batch_size is 8, but .* recorded with 4": {"data": {"batch_size": 8}},
    r"algorithm\.name is 'rloo', but .* recorded with 'grpo'": {"algorithm": {"name": "rloo"}},
    r"rollout\.temperature is 0\.5, but .* recorded with 1\.0": {"rollout": {"temperature": 0.5}},
    r"data\.train: .*recorded\.json was recorded with other content": {"data": {"prompt_key": "answer"}},
    r"step-000004-rank-00000\.parquet is missing.* trainer\.steps=3": {"trainer": {"steps": 4}},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_does_not_fit_is_named(recorded: tuple[Recipe, Rows], tmp_path: Path, message: str) -> None:
    recipe = replay_of(recorded[0], tmp_path / "replayed")
    values = resolved(recipe)
    for section, changes in MISTAKES[message].items():
        values[section] = {**values[section], **changes} if section != "algorithm" else changes
    changed = Recipe.model_validate(values)
    with pytest.raises(DataError, match=message):
        check_recording(recorded[0].output, changed, digests(changed), changed.trainer.steps or 0)


def test_refuses_a_missing_or_damaged_recording(
    recorded: tuple[Recipe, Rows], copied: Recipe, tmp_path: Path
) -> None:
    def check(run: Path | str) -> None:
        check_recording(str(run), recorded[0], {}, STEPS)

    with pytest.raises(DataError, match=r"there is no .*recorded\.json; record a run with"):
        check(tmp_path)
    description = Path(copied.output) / "trajectories" / "recorded.json"
    told = json.loads(description.read_text())
    assert told["steps"] == STEPS and told["recipe"]["data.batch_size"] == BATCH
    assert set(told["digests"]) == {"train", "model"}
    for damage in ("{", "[]", '{"recipe": {}}', " " * (2 << 20)):
        description.write_text(damage)
        with pytest.raises(DataError, match=r"recorded\.json: "):
            check(copied.output)


def other_prompt(record: Recorded) -> Recorded:
    tokens_T = record.trajectory.tokens_T.copy()
    tokens_T[0] += 1
    return record._replace(trajectory=replace(record.trajectory, tokens_T=tokens_T))


def strange_token(record: Recorded) -> Recorded:
    tokens_T = record.trajectory.tokens_T.copy()
    tokens_T[-1] = 2**31 - 1
    return record._replace(trajectory=replace(record.trajectory, tokens_T=tokens_T))


DAMAGES: dict[str, Callable[[list[Recorded]], list[Recorded]]] = {
    r"does not have 3 responses to draw 4": lambda records: records[1:],
    r"has 3 prompts instead of 4": lambda records: records[N:],
    r"has a prompt for draw 4 that differs": lambda records: [other_prompt(records[0]), *records[1:]],
    r"has tokens outside the vocabulary": lambda records: [strange_token(records[0]), *records[1:]],
    r"has responses to draw 99, which is not part of this step": lambda records: [
        *records[:-N],
        *(r._replace(trajectory=replace(r.trajectory, prompt_index=99)) for r in records[-N:]),
    ],
}


@pytest.mark.parametrize("message", DAMAGES)
def test_responses_that_are_not_of_this_training(copied: Recipe, tmp_path: Path, message: str) -> None:
    directory = Path(copied.output) / "trajectories"
    write_trajectories(step_file(directory, 2, 0), DAMAGES[message](read_step(directory, 2)))
    with pytest.raises(DataError, match=rf"step-000002-rank-00000\.parquet: step 2 {message}"):
        train(replay_of(copied, tmp_path / "replayed"))


def test_a_replay_goes_on_and_gives_lost_groups_again(recorded: tuple[Recipe, Rows]) -> None:
    recipe = recorded[0]
    prompts = open_prompts(recipe)[TRAIN]
    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isotrain.trainers.online.recording.put", lambda group: kept.append(group) or len(kept))
        maker = Replayed(
            Path(recipe.output) / "trajectories",
            prompts,
            Sampler(len(prompts), BATCH, recipe.seed, taken=BATCH),
            done=1,
            attempts=0,
            n=N,
            max_prompt=512,
            max_tokens=MAX_TOKENS,
            vocabulary=512,
        )
        batch = maker.begin()(lambda: None)
        again = maker.again(batch.groups, {batch.groups[0].handle})
        assert [g.responses for g in again] == [g.responses for g in batch.groups]
        assert not {g.handle for g in again} & {g.handle for g in batch.groups}
        after = maker.begin()(lambda: None)
    assert [g.responses.prompt_index for g in batch.groups] == [4, 5, 6, 7] and batch.taken == 8
    assert [g.responses.prompt_index for g in after.groups] == [8, 9, 10, 11]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("on", "ranks"), [("cpu", 2), ("npu", 1), ("npu", 2)])
@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce++"])
def test_real_responses_on_other_ranks(tiny: Path, tmp_path: Path, on: str, ranks: int, name: str) -> None:
    recipe = small(tiny, tmp_path / "recorded", "cpu", algorithm=ALGORITHMS[name])
    recorded = stable_metrics(run_online(recipe, tmp_path, "recorded"))
    device = {"type": on, "ranks": ranks}
    replayed = run_online(replay_of(recipe, tmp_path / "replayed", device=device), tmp_path, "replayed")
    for one, other in zip(recorded, stable_metrics(replayed), strict=True):
        assert one.keys() - other.keys() == {"rollout/weight_check_diff"}
        for metric in other:
            assert other[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-4), metric
