"""Simulated runs against closed forms and bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulate.lengths import Constant, Counts, Lognormal
from simulate.run import PARTS, simulate
from simulate.settings import Controller, Decode, Engines, Rewards, Run, Sync, Update

SKEWED = Lognormal(200, 1.0, 2000, by_prompt=0.3)


def run(**changes: object) -> Run:
    plain = Run(
        prompts=16,
        n=4,
        lengths=Constant(100),
        engines=Engines(4, Decode(0.01, 0.001), at_once=64),
        update=Update(fixed=0.5, per_token=1e-4),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_constant_lengths_have_a_closed_form() -> None:
    """16 prompts on 4 engines: 16 sequences each, all of 100 tokens."""
    told = simulate(
        run(
            prompt_tokens=20,
            engines=Engines(4, Decode(0.01, 0.001, prefill_per_token=1e-3), at_once=64),
            rewards=Rewards(2.0),
            sync=Sync(publish=0.7, load=0.3),
            controller=Controller(a_step=0.2),
        ),
        steps=4,
    )
    generation = 4 * 20 * 1e-3 + 100 * (0.01 + 16 * 0.001)
    update = 0.5 + 1e-4 * 16 * (20 + 4 * 100)
    assert told.steps[0].total == pytest.approx(generation + 2.0 + 0.2 + update + 0.7)
    for step in told.steps[1:]:
        assert step.total == pytest.approx(0.3 + generation + 2.0 + 0.2 + update + 0.7)
        assert step.generation == pytest.approx(0.3 + generation)
        assert (step.reward, step.controller, step.sync) == pytest.approx((2.0, 0.2, 0.7))
    assert told.responses_per_second == pytest.approx(64 * 4 / sum(step.total for step in told.steps))


def test_cached_tokens_slow_decoding_down() -> None:
    """One sequence of L tokens after a prompt of p: base L + c (p L + L^2 / 2)."""
    engines = Engines(1, Decode(0.01, per_cached_token=1e-5), at_once=1)
    told = simulate(run(prompts=1, n=1, engines=engines, prompt_tokens=50, update=Update(0.1)), steps=1)
    assert told.steps[0].generation == pytest.approx(100 * 0.01 + 1e-5 * (50 * 100 + 100**2 / 2))


def test_a_limit_of_sequences_makes_waves() -> None:
    """64 responses, 8 at a time on one engine: 8 waves."""
    told = simulate(run(engines=Engines(1, Decode(0.01, 0.001), at_once=8)), steps=2)
    assert told.steps[0].generation == pytest.approx(8 * 100 * (0.01 + 8 * 0.001))


class OneLong:
    """All responses have 10 tokens, but for the first of each step."""

    def draw(self, random: np.random.Generator, prompts: int, n: int) -> Counts:
        lengths_PG = np.full((prompts, n), 10)
        lengths_PG[0, 0] = 1000
        return lengths_PG


def test_one_long_response_holds_up_the_step() -> None:
    """63 of 64 end after 10 tokens; the last one runs alone to 1000."""
    engines = Engines(1, Decode(0.01, 0.001), at_once=64)
    told = simulate(run(lengths=OneLong(), engines=engines), steps=2)
    assert told.steps[0].generation == pytest.approx(10 * (0.01 + 0.064) + 990 * 0.011)
    assert told.steps[0].longest == 1000


def test_one_queue_evens_out_a_slow_engine() -> None:
    """Two engines, one at half speed, one sequence at a time of 1 s or 2 s: 12 responses in 8 s, not 12 s."""
    engines = Engines(2, Decode(0.01), at_once=1, slower=(2.0,))
    queue = run(prompts=12, n=1, engines=engines)
    split = replace(queue, engines=replace(engines, one_queue=False))
    assert simulate(queue, steps=1).steps[0].generation == pytest.approx(8.0)
    assert simulate(split, steps=1).steps[0].generation == pytest.approx(12.0)


def test_scores_wait_for_free_workers() -> None:
    """64 responses come together; 16 are scored at a time."""
    told = simulate(run(rewards=Rewards(1.0, at_once=16)), steps=1)
    assert told.steps[0].reward == pytest.approx(4.0)


def test_the_controller_collects_groups_one_after_the_other() -> None:
    told = simulate(run(controller=Controller(a_group=0.1)), steps=1)
    assert told.steps[0].reward == pytest.approx(16 * 0.1)


@pytest.mark.parametrize("in_flight", [False, True])
def test_staleness_hides_the_shorter_side(in_flight: bool) -> None:
    """Generation takes 2.6 s. With a longer update a step takes the update, with a shorter one generation."""
    stale = run(staleness=1, in_flight=in_flight, update=Update(5.0))
    assert simulate(stale, steps=8).step_seconds == pytest.approx(5.0)
    short = replace(stale, update=Update(1.0))
    assert simulate(short, steps=12).step_seconds == pytest.approx(2.6, rel=0.02)
    assert simulate(replace(short, staleness=0, in_flight=False), steps=3).step_seconds == pytest.approx(3.6)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("update", [0.1, 3.0, 30.0])
def test_the_staleness_bound_holds(staleness: int, in_flight: bool, update: float) -> None:
    told = simulate(
        run(lengths=SKEWED, staleness=staleness, in_flight=in_flight, update=Update(update)), steps=12, seed=3
    )
    assert told.staleness <= staleness
    if update == 30.0:  # training is the bottleneck: the engines are as far ahead as they may be
        assert told.staleness == staleness


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"staleness": 2, "in_flight": True},
        {"placement": "colocated", "switch": 1.0},
        {"staleness": 0.5, "in_flight": True, "order": "finished"},
        {"staleness": 0.5, "order": "finished", "placement": "colocated"},
    ],
)
def test_work_is_conserved(changes: dict[str, object]) -> None:
    """Steps take as many responses as they should, none twice, and none that was not generated."""
    steps = 8
    told = simulate(run(lengths=SKEWED, **changes), steps=steps, seed=1)
    assert [step.responses for step in told.steps] == [64] * steps
    assert told.generated >= 64 * steps
    assert sum(step.tokens for step in told.steps) <= told.generated_tokens
    if not changes:
        assert told.generated == 64 * steps
        assert sum(step.tokens for step in told.steps) == told.generated_tokens
    assert 0.0 <= told.engines_idle <= 1.0 and 0.0 < told.engines_filled <= 1.0
    assert 0.0 <= told.ranks_idle <= 1.0
    assert sum(told.parts[part] for part in PARTS) == pytest.approx(told.step_seconds)


def test_the_same_seed_gives_the_same_run() -> None:
    random = run(lengths=SKEWED, rewards=Rewards(1.0, sigma=0.5, at_once=8), staleness=1)
    assert simulate(random, steps=6, seed=5).steps == simulate(random, steps=6, seed=5).steps
    assert simulate(random, steps=6, seed=5).steps != simulate(random, steps=6, seed=6).steps


def test_settings_of_time_do_not_change_lengths() -> None:
    slow = run(lengths=SKEWED, engines=Engines(2, Decode(0.5), at_once=4), rewards=Rewards(9.0, sigma=1.0))
    fast = run(lengths=SKEWED)
    tokens = [[step.tokens for step in simulate(one, steps=3).steps] for one in (slow, fast)]
    assert tokens[0] == tokens[1]


def test_loading_weights_is_no_idle_time() -> None:
    """Each step: 2 s of loading, 2.6 s of generation, 1 s of update in which the engines wait."""
    told = simulate(run(sync=Sync(load=2.0), update=Update(1.0), staleness=0), steps=40)
    assert told.engines_idle == pytest.approx(1.0 / 5.6, rel=0.05)


def test_colocated_steps_add_both_sides_and_the_switch() -> None:
    together = run(placement="colocated", switch=1.5, update=Update(2.0))
    assert simulate(together, steps=3).step_seconds == pytest.approx(2.6 + 2 * 1.5 + 2.0)


def test_longer_responses_continue_in_the_next_step() -> None:
    """With half a batch more under way, a step does not wait for the longest."""
    whole = run(lengths=SKEWED, placement="colocated")
    parts = replace(whole, order="finished", staleness=0.5)
    assert simulate(parts, steps=20).step_seconds < 0.9 * simulate(whole, steps=20).step_seconds


def test_updates_in_flight_do_not_wait_for_long_responses() -> None:
    drained = run(lengths=SKEWED, staleness=2, update=Update(0.1))
    steps = {flight: simulate(replace(drained, in_flight=flight), steps=20) for flight in (False, True)}
    assert steps[True].step_seconds < 0.9 * steps[False].step_seconds
    assert steps[True].engines_filled > steps[False].engines_filled


@pytest.mark.parametrize(
    "slower",
    [
        {"lengths": Lognormal(300, 1.0, 2000, by_prompt=0.3)},
        {"engines": Engines(2, Decode(0.01, 0.001), at_once=64)},
        {"engines": Engines(4, Decode(0.02, 0.001), at_once=64)},
        {"engines": Engines(4, Decode(0.01, 0.001), at_once=4)},
        {"rewards": Rewards(3.0)},
        {"sync": Sync(publish=1.0)},
        {"sync": Sync(load=1.0)},
        {"controller": Controller(a_step=1.0)},
        {"controller": Controller(a_group=0.5)},
        {"update": Update(fixed=0.5, per_token=3e-4)},
        {"update": Update(fixed=0.5, per_token=1e-4, per_token_of_longest=5e-3)},
    ],
)
def test_more_work_takes_longer(slower: dict[str, object]) -> None:
    usual = run(lengths=SKEWED)
    assert simulate(replace(usual, **slower), steps=3).step_seconds > simulate(usual, steps=3).step_seconds


def test_more_staleness_is_never_slower() -> None:
    seconds = [
        simulate(run(lengths=SKEWED, staleness=k, in_flight=k > 0, update=Update(2.0)), steps=20).step_seconds
        for k in (0, 1, 2, 4)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"staleness": -1}, "at least 0"),
        ({"prompts": 0}, "at least 1"),
        ({"staleness": 0.5}, "order='finished'"),
        ({"staleness": 1, "placement": "colocated"}, "cannot generate ahead"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**changes)


def test_too_few_steps_for_means() -> None:
    with pytest.raises(ValueError, match="more than 3"):
        simulate(run(staleness=2), steps=3)
