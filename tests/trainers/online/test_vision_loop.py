"""The online loop on pictures: GRPO learns what only the picture says, is recorded and replayed.

The real loop over a rank in this process, with responses of the real reference engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colour_runs import BATCH, MAX_TOKENS, N, colour_files, colour_recipe
from hand_made_step import NOBODY, Here
from test_replay import digests, replay_of, stable

from isotrain.data.loader import Sampler
from isotrain.data.prepare.tiny_reward import score
from isotrain.data.record import read_step
from isotrain.engine.world import open_store
from isotrain.errors import DataError
from isotrain.models.files import load_tokenizer
from isotrain.observe.console import Console
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Sampling
from isotrain.rollout.hf import HfEngine
from isotrain.rollout.validation import sample_requests
from isotrain.trainers.build import TRAIN, open_prompts
from isotrain.trainers.job import Recorder, ResumeState
from isotrain.trainers.online.build import build_trainer
from isotrain.trainers.online.messages import Group, PromptRequest, Score, describe
from isotrain.trainers.online.metrics import Failures
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.recording import check_recording, write_description
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.rollouts import Batch, Make, Seconds, SyncBatches
from isotrain.weights.file import write_update
from isotrain.weights.send import full_weights
from vision_models import coloured

pytestmark = pytest.mark.heavy

STEPS = 60
Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_files(tmp_path_factory.mktemp("vision"))


def blind_copy(files: Path, out: Path) -> Path:
    shutil.copytree(files, out)
    for path in out.glob("*.png"):
        path.write_bytes(coloured("grey", 28))
    return out


class Responses:
    """A maker of batches: the reference engine with the rank's weights, and the tiny task's reward."""

    def __init__(self, recipe: Recipe, rank: PolicyRank, put: Callable[[Any], int]) -> None:
        self.recipe, self.rank, self.put, self.step = recipe, rank, put, 0
        directory = Path(recipe.model.path)
        self.engine = HfEngine(
            directory, name="engine", dtype="float32", device=torch.device("cpu"), batch=999
        )
        self.tokenizer = load_tokenizer(directory)
        self.prompts = open_prompts(recipe)[TRAIN]
        self.sampler = Sampler(len(self.prompts), BATCH, recipe.seed)

    def begin(self) -> Make:
        return lambda next_may_begin: self.make()

    def make(self) -> Batch:
        if self.step:
            self.engine.update_weights(write_update(full_weights(self.rank.policy, torch.float32), self.step))
        self.step += 1
        first, rows = self.sampler.taken, self.sampler.next_batch().tolist()
        requests = [
            request
            for index, row in enumerate(rows, start=first)
            for prompt in [self.prompts[row]]
            for request in sample_requests(row, index, prompt.tokens_P, N, self.recipe.seed, prompt.pictures)
        ]
        done = sorted(
            self.engine.generate(requests, Sampling(MAX_TOKENS)), key=lambda t: (t.prompt_index, t.sample)
        )
        groups = []
        for start in range(0, len(done), N):
            group = tuple(done[start : start + N])
            answer = self.prompts[group[0].row].row["answer"]
            texts = [self.tokenizer.decode(t.response_N, skip_special_tokens=True) for t in group]
            scores = [
                Score(value, {"function": value}, None, "") for value in (score(x, answer) for x in texts)
            ]
            groups.append(Group(describe(group), self.put(group), tuple(scores), "tiny"))
        return Batch(groups, None, self.sampler.taken, Seconds(1.0, 1.0), 0, Failures())


def train(recipe: Recipe) -> Rows:
    """The loop; returns its metrics, after the weights of the tower were seen to change."""
    rank, objects, rows = PolicyRank(resolved(recipe)), [], []

    def put(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    rollout = recipe.rollout
    assert rollout is not None
    with pytest.MonkeyPatch.context() as patch:
        where = "isotrain.trainers.online"
        patch.setattr(f"{where}.policy_rank.fetch", lambda handles: [objects[h] for h in handles])
        patch.setattr(f"{where}.recording.put", put)
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
            recorder = Recorder(Console())
            recorder.loggers = [SimpleNamespace(write=lambda step, values: rows.append(dict(values)))]
            trainer = build_trainer(
                recipe,
                ClusterSection(),
                open_prompts(recipe),
                groups,
                described,
                recorder,
                ResumeState(0, {}, []),
            )
            if rollout.generates:
                trainer.batches = SyncBatches(Responses(recipe, rank, put).begin)
                Path(recipe.output).mkdir(parents=True, exist_ok=True)
                if rollout.record:
                    write_description(recipe, digests(recipe), trainer.job.steps)
            else:
                check_recording(str(rollout.replay), recipe, digests(recipe), trainer.job.steps)
            before = [p.detach().clone() for p in rank.policy.model.vision.tower.parameters()]
            trainer.train(0)
            after = rank.policy.model.vision.tower.parameters()
            assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.ndim > 1)
        finally:
            rank.close()
    return rows


def reward_of(rows: Rows) -> float:
    return sum(row["critic/rewards/mean"] for row in rows[-5:]) / 5


def difference(rows: Rows) -> float:
    return max(row["training/rollout_logp_diff_mean"] for row in rows)


@pytest.mark.slow
def test_grpo_learns_what_only_the_picture_says(files: Path, tmp_path: Path) -> None:
    rows = train(colour_recipe(files, tmp_path / "run", STEPS))
    control = train(colour_recipe(blind_copy(files, tmp_path / "blind"), tmp_path / "control", STEPS))
    print(f"reward {reward_of(rows[:1]) * 5:.3f} -> {reward_of(rows):.3f}, blind {reward_of(control):.3f}")
    assert difference(rows) < 1e-5 and reward_of(rows) > 0.9 and reward_of(control) < 0.65


@pytest.mark.parametrize("name", ["rloo", "reinforce++", "reinforce++-baseline"])
def test_other_algorithms_train_on_pictures(files: Path, tmp_path: Path, name: str) -> None:
    rows = train(colour_recipe(files, tmp_path / "run", 2, algorithm={"name": name}))
    assert len(rows) == 2 and difference(rows) < 1e-5


def test_a_replay_learns_the_same_and_refuses_an_altered_picture(files: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(files, data)
    recipe = colour_recipe(data, tmp_path / "run", 2, rollout={"record": True})
    rows = train(recipe)
    recorded = read_step(tmp_path / "run" / "trajectories", 1)
    assert all(len(record.trajectory.pictures) == 1 for record in recorded)
    assert 1 < len({record.trajectory.pictures for record in recorded}) <= 4
    again = train(replay_of(recipe, tmp_path / "again"))
    assert stable(again) == stable(rows)
    (data / "3.png").write_bytes(coloured("green", 56))
    with pytest.raises(DataError, match=r"data\.train: .* was recorded with other content"):
        train(replay_of(recipe, tmp_path / "altered"))


def test_a_rollout_worker_is_told_a_row_and_reads_its_pictures_itself(files: Path, tmp_path: Path) -> None:
    worker = RolloutWorker(resolved(colour_recipe(files, tmp_path / "run", 1)), "engine")
    worker.stores = open_prompts(worker.recipe)
    requests = worker._requests(TRAIN, [PromptRequest(7, 3)], 2)
    (expected,) = worker.stores[TRAIN][3].pictures
    assert [[p.digest for p in request.pictures] for request in requests] == [[expected.digest]] * 2
    assert expected.stop <= len(requests[0].prompt_P)
