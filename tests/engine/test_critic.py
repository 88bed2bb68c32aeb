"""Critics and reward models: built from any directory, saved beside the policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from jobs import SAMPLES, STEPS, Job, critic_objective, updates
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from isotrain.data.packing import pack
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_critic, build_reward_model
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.scores import score_samples
from isotrain.engine.state import engine_shards, optimizer_updates, restore
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.packed import ScalarHead
from isotrain.recipe.schema import OptimizerSection

Outcome = Callable[[str, int], Path]


@pytest.fixture
def job(tiny: Path, device_type: str) -> Iterator[Job]:
    device = choose_device(device_type)
    with join_world(device) as world:
        yield Job(device, world, tiny / "model")


@pytest.fixture(scope="module")
def reward_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with one label, as transformers saves it."""
    return write_reward_model(tiny, tmp_path_factory.mktemp("judge"), labels=1)


def write_reward_model(tiny: Path, path: Path, labels: int) -> Path:
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=labels)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


def classifier(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def expected_scores(reward_model: Path) -> torch.Tensor:
    model = classifier(reward_model)
    return torch.cat([model(torch.from_numpy(one.tokens_T).long()[None]).logits[0] for one in SAMPLES])


def test_first_values_are_exactly_zero(outcome: Outcome, device_type: str) -> None:
    for ranks in (1, 2):
        for found in jobs.results(outcome(device_type, ranks), ranks):
            values_N = found["critic first values"]
            assert len(values_N) and torch.equal(values_N, torch.zeros_like(values_N))


def test_a_critic_begins_with_the_policy_s_backbone_and_trains_all_of_it(job: Job) -> None:
    critic, policy = job.critic(lora={"rank": 4}), job.policy()
    named = {name.removeprefix("pretrained."): p for name, p in critic.model.named_parameters()}
    assert torch.equal(named.pop("score.weight"), torch.zeros(1, 64, device=job.world.device))
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(named.pop(name.removeprefix("pretrained.")), parameter), name
    assert not named and critic.trained.keys() == dict(critic.model.named_parameters()).keys()
    every, trained = critic.parameter_counts
    assert every == trained == sum(p.numel() for p in critic.model.parameters()) - 512 * 64
    # The backbone has no gradient while the head is zero, and has one after that.
    before = jobs.local(critic)
    updates(critic, critic_objective, job.batches, steps=2)
    after = jobs.local(critic)
    assert not any(torch.equal(before[name], after[name]) for name in before if name.startswith("weights/"))


def test_a_critic_learns(job: Job) -> None:
    critic = job.critic()
    losses = [result.loss for _ in range(10) for result in updates(critic, critic_objective, job.batches)]
    assert losses[-1] < 0.2 * losses[0]


def test_a_critic_from_a_classifier_keeps_its_head(job: Job, reward_model: Path) -> None:
    place: dict[str, Any] = {"device": job.device, "world": job.world}
    critic = build_critic(job.section(), OptimizerSection(), path=str(reward_model), **place)
    (values_N,) = critic.infer([pack(SAMPLES)], ScalarHead.values)
    model = classifier(reward_model)
    with torch.no_grad():
        states = [model.base_model(torch.from_numpy(s.tokens_T).long()[None])[0][0, 2:-1] for s in SAMPLES]
        expected_N = model.score(torch.cat(states))[:, 0]
    assert expected_N.abs().max() > 0.01
    torch.testing.assert_close(values_N.cpu(), expected_N, rtol=0, atol=1e-5)


def test_scores_equal_transformers(job: Job, reward_model: Path) -> None:
    model = build_reward_model(str(reward_model), job.section(), device=job.device, world=job.world)
    scores = score_samples(model, [pack(SAMPLES[:4]).to(job.world.device), pack(SAMPLES[4:])])
    assert [len(scores_S) for scores_S in scores] == [4, 2] and scores[0].device.type == job.device.type
    found = torch.cat(scores).cpu()
    torch.testing.assert_close(found, expected_scores(reward_model), rtol=0, atol=1e-5)
    short = build_reward_model(
        str(reward_model), job.section(dtype="bfloat16"), device=job.device, world=job.world
    )
    (rough,) = score_samples(short, [pack(SAMPLES)])
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.cpu(), found, rtol=0, atol=0.02)


def test_refuses_a_reward_model_without_a_head(job: Job, tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"reward\.model\.path: .* has no 'score\.weight'; set a sequence"):
        build_reward_model(str(tiny / "model"), job.section(), device=job.device, world=job.world)


def test_refuses_a_reward_model_with_two_labels(job: Job, tiny: Path, tmp_path: Path) -> None:
    write_reward_model(tiny, tmp_path, labels=2)
    with pytest.raises(ModelError, match=r"reward\.model\.path: .* has 2 labels; set .* with one label"):
        build_reward_model(str(tmp_path), job.section(), device=job.device, world=job.world)


def test_paths_are_named_by_their_field(job: Job) -> None:
    place: dict[str, Any] = {"device": job.device, "world": job.world}
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path: '\./typo' does not exist"):
        build_critic(job.section(), OptimizerSection(), path="./typo", **place)
    with pytest.raises(ModelError, match=r"reward\.model\.path: '\./typo' does not exist"):
        build_reward_model("./typo", job.section(), **place)


@pytest.mark.parametrize("ranks", [1, 2])
def test_policy_and_critic_share_a_checkpoint(
    outcome: Outcome, job: Job, tmp_path: Path, device_type: str, ranks: int
) -> None:
    """Restored on one rank, whatever number of ranks saved them."""
    root = shutil.copytree(outcome(device_type, ranks) / "full" / "checkpoints", tmp_path / "checkpoints")
    reader = CheckpointReader(root / f"step-{STEPS:08d}")
    policy, critic = job.policy(), job.critic()
    updates(critic, critic_objective, job.batches, steps=1)
    restore(policy, job.device, reader)
    restore(critic, job.device, reader, prefix="critic/")
    assert optimizer_updates(policy) == optimizer_updates(critic) == STEPS
    names = {name for name in reader.shapes() if not name.startswith("generator/")}
    both = engine_shards(policy) | engine_shards(critic, prefix="critic/")
    assert names == both.keys() and len(both) == 3 * (len(policy.trained) + len(critic.trained))
    for name, shard in both.items():
        assert torch.equal(shard.local.detach().cpu(), reader.whole(name)), name
    (went_on,) = updates(critic, critic_objective, job.batches, steps=1)
    *_, uninterrupted = updates(job.critic(), critic_objective, job.batches, steps=STEPS + 1)
    assert went_on.loss == pytest.approx(uninterrupted.loss, rel=1e-5)
    assert ranks > 1 or went_on == uninterrupted
