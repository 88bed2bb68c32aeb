"""Losses and advantages of episodes: what tools wrote has no part in them, rewards are where they belong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.algorithms.advantages import ADVANTAGES
from isotrain.algorithms.policy_losses import POLICY_LOSSES
from isotrain.data.packing import pack_trajectories
from isotrain.data.trajectory import EpisodePart, Trajectory, Turn, with_common_prompt
from isotrain.trainers.online.messages import (
    EpisodeFacts,
    Group,
    Score,
    Totals,
    describe,
    episode_facts,
    episode_numbers,
    last_sequences,
    plan_step,
)
from isotrain.trainers.online.metrics import episode_metrics, episode_penalties, trajectory_marks
from isotrain.trainers.online.step import AdvantageSettings, Micro, UpdateSettings, estimate, policy_objective

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"gamma": 0.9, "lam": 0.8},
    "reinforce++": {"gamma": 0.9},
    "remax": {},
}


def sequence(
    pieces: str,
    sample: int = 0,
    part: int = 0,
    parts: int = 1,
    rewards: tuple[float, ...] = (),
    earlier: float = 0.0,
    prompt: tuple[int, ...] = (7, 8, 9),
) -> Trajectory:
    """`pieces` has a letter for each response token: w for one that the policy wrote, t for a tool's."""
    mask_N = np.array([piece == "w" for piece in pieces])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask_N.astype(int), [0]])))
    spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    gains = [*rewards, *[0.0] * (len(spans) - len(rewards))]
    turns = tuple(Turn(start, end, gain, 1, 0, 0.5) for (start, end), gain in zip(spans, gains, strict=True))
    draw = np.random.default_rng(len(pieces) + 10 * sample + part)
    return Trajectory(
        row=3,
        prompt_index=5,
        sample=sample,
        seed=0,
        prompt_length=len(prompt),
        tokens_T=np.concatenate([prompt, draw.integers(10, 90, len(pieces))]).astype(np.int32),
        mask_N=mask_N,
        logp_N=np.where(mask_N, -1.0, 0.0).astype(np.float32),
        version_N=np.full(len(pieces), 4, np.int32),
        finished=True,
        episode=EpisodePart(part, parts, turns, earlier, sum(rewards)),
    )


def make_micro(trajectories: list[Trajectory], device_type: str = "cpu") -> Micro:
    batch = pack_trajectories(trajectories, range(len(trajectories))).to(torch.device(device_type))
    draw = torch.Generator().manual_seed(1)
    values_N, old_N, ref_N = torch.randn(3, len(batch.mask_N), generator=draw).to(device_type)
    return Micro(batch, old_logp_N=old_N, ref_logp_N=ref_N, values_N=values_N)


def run_estimate(micro: Micro, name: str, scores: list[float], kl: float = 0.0, weight: float = 1.0) -> None:
    per_trajectory = ADVANTAGES[name].per == "trajectory"
    estimate(
        [micro],
        AdvantageSettings(ADVANTAGES[name], OPTIONS.get(name, {}), "verl", weight),
        scores=dict(enumerate(scores)),
        trajectory_advantages={i: 1.0 + i for i in range(len(scores))} if per_trajectory else None,
        greedy=dict.fromkeys(range(len(scores)), 0.25),
        kl_estimator="k1",
        kl_coefficient=kl,
    )


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_no_gradient_reaches_what_tools_wrote(device_type: str, name: str, loss: str) -> None:
    """In the loss, in the advantage, in the KL penalty and in the entropy: exactly 0."""
    micro = make_micro([sequence("wwttwtw", rewards=(0.5, 0.25)), sequence("tww", 1)], device_type)
    run_estimate(micro, name, [1.0, 0.0], kl=0.1)
    assert micro.advantages_N is not None
    outside_N = ~micro.batch.mask_N
    assert not micro.advantages_N[outside_N].any() and micro.advantages_N.any()
    settings = UpdateSettings(
        temperature=1.0,
        ppo_epochs=1,
        loss=POLICY_LOSSES[loss],
        loss_options={},
        aggregation="token-mean",
        critic_aggregation="token-mean",
        horizon=16,
        entropy=0.3,
        kl_place="loss",
        kl_estimator="k3",
        correction={"level": "token", "mode": "truncate", "upper": 2.0, "lower": None},
        bypass=False,
    )
    draw = torch.Generator().manual_seed(2)
    logp_N, entropy_N = (
        torch.randn(len(outside_N), generator=draw).to(device_type).requires_grad_() for _ in range(2)
    )
    head: Any = SimpleNamespace(logps_and_entropies=lambda temperature: (logp_N, entropy_N))
    total, _ = policy_objective(micro, Totals(7, 2), settings, 0.1)(head)
    total.backward()
    for values_N in (logp_N, entropy_N):
        assert values_N.grad is not None
        assert (values_N.grad[outside_N] == 0).all() and (values_N.grad[~outside_N] != 0).any()
    # Whatever the numbers there are, nothing else depends on them.
    changed: Any = SimpleNamespace(
        logps_and_entropies=lambda temperature: (
            torch.where(outside_N, 123.0, logp_N),
            torch.where(outside_N, -7.0, entropy_N),
        )
    )
    micro.mismatch = None
    again, _ = policy_objective(micro, Totals(7, 2), settings, 0.1)(changed)
    assert torch.equal(again, total)


def test_advantages_across_a_tool_turn_by_hand(device_type: str) -> None:
    """GAE goes from the last token before the tool to the first after it, as if they were neighbours."""
    micro = make_micro([sequence("wttw")], device_type)
    run_estimate(micro, "ppo", [2.0])
    assert micro.values_N is not None and micro.advantages_N is not None and micro.returns_N is not None
    first, *_, last = micro.values_N.tolist()
    end = 2.0 - last
    start = 0.9 * last - first + 0.9 * 0.8 * end
    assert micro.advantages_N.tolist() == pytest.approx([start, 0.0, 0.0, end])
    assert micro.returns_N.tolist()[::3] == pytest.approx([start + first, end + last])


def test_rewards_of_turns_by_hand(device_type: str) -> None:
    """0.5 for the first turn, the rest of the score at the end; discounted over the policy's tokens."""
    micro = make_micro([sequence("wwttw", rewards=(0.5, 1.0))], device_type)
    run_estimate(micro, "reinforce++", [1.5])
    assert micro.returns_N is not None
    wanted = [0.9 * (0.5 + 0.9 * 1.0), 0.5 + 0.9 * 1.0, 0.0, 0.0, 1.0]
    assert micro.returns_N.tolist() == pytest.approx(wanted)
    run_estimate(micro, "reinforce++", [1.5], weight=0.0)  # of a reward that the environment does not give
    assert micro.returns_N.tolist() == pytest.approx([0.81 * 1.5, 0.9 * 1.5, 0.0, 0.0, 1.5])


def test_a_later_sequence_has_the_rewards_that_are_left(device_type: str) -> None:
    parts = [
        sequence("w", 0, 0, 2, (0.5,)),
        sequence("ww", 0, 1, 2, (0.25,), earlier=0.5, prompt=(7, 8, 9, 1)),
    ]
    micro = make_micro(parts, device_type)
    run_estimate(micro, "reinforce++", [0.75, 0.75])
    assert micro.returns_N is not None
    # The first sequence led to all of it; the second to what came after the first.
    assert micro.returns_N.tolist() == pytest.approx([0.75, 0.9 * 0.25, 0.25])


def group_of(sequences: list[Trajectory], scores: list[float]) -> Group:
    return Group(describe(sequences), 0, tuple(Score(s, {}, None, "") for s in scores), "test")  # type: ignore[arg-type]


def test_an_episode_counts_once_however_many_sequences_it_has() -> None:
    sequences = with_common_prompt(
        [
            sequence("wwt", 0, 0, 2),
            sequence("w", 0, 1, 2, prompt=(7, 8, 1, 2)),
            sequence("www", 1),
        ]
    )
    assert [t.prompt_length for t in sequences] == [2, 2, 2]
    group = group_of(sequences, [1.0, 0.0])
    groups = [group, group_of([sequence("w", 0)], [0.5])]
    assert group.responses.sequences == (2, 1) and group.responses.written == (2, 1, 3)
    assert episode_numbers(groups).tolist() == [0, 0, 1, 2]
    assert last_sequences(groups).tolist() == [1, 2, 3]
    assert [m.reward for m in trajectory_marks(groups, {}, np.array([1.0, 2.0, 3.0]))] == [1.0, 1.0, 2.0, 3.0]
    kl_E, mean = episode_penalties([[(0, 1.0, 0.5), (1, 2.0, 1.0)], [(3, 4.0, 2.0)]], groups)
    assert kl_E.tolist() == [3.0, 0.0, 4.0] and mean == pytest.approx(3.5 / 3)
    plan = plan_step(groups, 2, 512, 1, share_prompts=True)
    assert sorted(plan.of_ranks[0]) == [0, 1, 2, 3] and plan.ranks[0].totals == [Totals(7, 4)]
    metrics = episode_metrics(groups)
    assert metrics["episode/turns/mean"] == pytest.approx(4 / 3) and metrics["episode/turns/max"] == 2.0
    assert metrics["episode/sequences/mean"] == pytest.approx(4 / 3)
    assert metrics["timing_s/environment/max"] == 1.0


def test_what_differs_between_prompts_is_part_of_the_response() -> None:
    one, other = sequence("wtw", 0), sequence("ww", 1, prompt=(7, 8, 5, 6))
    found = with_common_prompt([one, other])
    for before, after in zip((one, other), found, strict=True):
        moved = before.prompt_length - 2
        assert after.tokens_T.tolist() == before.tokens_T.tolist() and after.prompt_length == 2
        assert after.mask_N.tolist() == [False] * moved + before.mask_N.tolist()
        assert after.version_N.tolist() == [4] * (moved + len(before.mask_N))
        assert before.episode and after.episode
        for turn, was in zip(after.episode.turns, before.episode.turns, strict=True):
            assert (turn.start, turn.end) == (was.start + moved, was.end + moved)
            assert after.mask_N[turn.start : turn.end].all()
    assert with_common_prompt([one]) == [one]
    first = sequence("w", prompt=(1, 2))
    assert [t.prompt_length for t in with_common_prompt([one, first])] == [1, 1]


def test_facts_of_an_episode_of_two_sequences() -> None:
    facts = episode_facts([sequence("wwtw", parts=2), sequence("wttttwwt", part=1, parts=2)])
    assert facts == EpisodeFacts(
        sequences=2, turns=4, calls=4, failed_calls=0, seconds=2.0, given=1 + 4, length=7
    )
    assert episode_facts([]).length == 0
