"""Figures that were measured in this project, and what the simulator gives for them.

The targets are those of benchmarks/README.md and docs/examples.md.
"""

from __future__ import annotations

import numpy as np
from simulate.lengths import Constant, Counts, Empirical, Lognormal
from simulate.run import simulate
from simulate.settings import Controller, Decode, Engines, Rewards, Run, Sync, Update
from simulated_figures import FITTED, HELD_OUT, UNFITTED, Figure, fit, swap

STEPS = 3
# Of `controller.py`: 16,384 trajectories, 16 responses to a prompt, 8 ranks to a machine.
TRAJECTORIES, OWN_64, OWN_1024, OWN_10240 = 16384, 0.19, 0.26, 1.3
# Of a step of `asynchrony.py`, beside the wait for the batch and the update (short run on a busy machine).
OTHER_SECONDS = 0.23
COLLECT_1024_GROUPS, CALLS_8_AGENTS, CALLS_A_STEP = 1.32, 0.036, 3


def recipe_steps() -> list[Figure]:
    """`gsm8k-grpo`, and the same model in `rollout_overhead` and `versus_trl`, all on two cores."""
    lengths = Empirical(tuple(range(8, 17)))  # 10 to 14 on average over the run, at most 16
    engine = Engines(1, Decode(0.1, 1e-4), at_once=256)
    recipe = Run(8, 8, lengths, engine, Update(), Sync(publish=1.1), prompt_tokens=43, placement="colocated")
    short = Lognormal(38.0, 0.8, 64)  # 128 responses of 4,940 tokens together
    overhead = Run(32, 4, short, engine, Update(), prompt_tokens=43)
    questions = Run(4, 8, Constant(64), engine, Update(), prompt_tokens=100, placement="colocated")

    def generation(run: Run, base: float, a_sequence: float) -> float:
        decode = Decode(base, a_sequence)
        return simulate(swap(run, engines__decode=decode), STEPS).parts["generation"]

    def base_for(a_sequence: float) -> float:
        return fit(lambda base: generation(recipe, base, a_sequence), 2.4, 1e-4, 1.0)

    a_sequence = fit(lambda value: generation(overhead, base_for(value), value), 10.2, 1e-5, 2e-3)
    base = base_for(a_sequence)
    a_token = fit(
        lambda value: simulate(swap(recipe, update__per_token=value), STEPS).parts["update"], 4.1, 1e-4, 1
    )
    whole = swap(recipe, engines__decode=Decode(base, a_sequence), update__per_token=a_token)
    held = swap(questions, engines__decode=Decode(base, a_sequence), update__per_token=a_token)
    told = simulate(swap(held, sync__publish=0.95), STEPS)
    inputs = (
        "measured: batch, lengths, parts of the recipe's step; assumed: prompts of 100 tokens in versus_trl"
    )
    case = "gsm8k-grpo, 2 cores"
    return [
        Figure(case, "s sampling", "here", 2.4, generation(recipe, base, a_sequence), FITTED, inputs),
        Figure(case, "s update", "here", 4.1, simulate(whole, STEPS).parts["update"], FITTED, inputs),
        Figure(case, "s step", "here", 8.0, simulate(whole, STEPS).step_seconds, HELD_OUT, inputs),
        Figure("rollout_overhead", "s of 128 responses", "here", 10.2, generation(overhead, base, a_sequence),
               FITTED, inputs),
        Figure("versus_trl, GRPO", "s sampling", "here", 3.85, told.parts["generation"], HELD_OUT, inputs),
        Figure("versus_trl, GRPO", "s update", "here", 8.0, told.parts["update"], HELD_OUT, inputs),
        Figure("versus_trl, GRPO", "s step", "here", 12.7, told.step_seconds, HELD_OUT, inputs),
    ]  # fmt: skip


def asynchrony() -> list[Figure]:
    """Decoding speed from the on-policy side; the other sides are held out."""
    on_policy = Run(
        32,
        8,
        Lognormal(18.0, 1.0, 96),  # 25 on average, up to 95
        Engines(1, Decode(0.01), at_once=256),
        Update(fixed=0.95),
        Sync(publish=OTHER_SECONDS),
        Rewards(seconds=1.0, at_once=256),
    )

    def seconds(run: Run, base: float) -> float:
        return simulate(swap(run, engines__decode=Decode(base)), 24).step_seconds

    base = fit(lambda value: seconds(on_policy, value), 112 / 24, 1e-3, 1.0)
    measured = {
        "staleness 1": (2.07, 54.6 / 24, swap(on_policy, staleness=1)),
        "in flight, staleness 2": (1.68, 68.0 / 24, swap(on_policy, staleness=2, in_flight=True)),
    }
    inputs = "measured: batch, lengths, reward of 1 s, update 0.95 s, other parts; a core for each side"
    sync = seconds(on_policy, base)
    figures = [Figure("asynchrony, 2 cores", "s step, on-policy", "here", 112 / 24, sync, FITTED, inputs)]
    for name, (ratio, step, run) in measured.items():
        told = seconds(run, base)
        figures += [
            Figure("asynchrony, 2 cores", f"s step, {name}", "here", step, told, HELD_OUT, inputs),
            Figure(
                "asynchrony, 2 cores", f"on-policy over {name}", "here", ratio, sync / told, HELD_OUT, inputs
            ),
        ]
    # Engine and rank share the machine: in flight, the update took 1.46 s in place of 0.95 s.
    slower = swap(on_policy, staleness=2, in_flight=True, update__fixed=1.46)
    contended = sync / seconds(slower, base * 1.46 / 0.95)
    both_cores = swap(on_policy, placement="colocated", update__fixed=0.95 / 2)
    colocated, case = seconds(both_cores, base / 2), "asynchrony, 2 cores"
    what = "on-policy over in flight, both sides slower by the measured 1.46/0.95"
    figures += [
        Figure(case, what, "here", 1.68, contended, HELD_OUT, inputs),
        Figure(
            case, "s step, colocated, taken as twice as fast", "here", 98 / 24, colocated, HELD_OUT, inputs
        ),
    ]
    return figures


class _PromptLengths:
    """Of `work_stealing.py`: the responses to a hard prompt are all long."""

    def draw(self, random: np.random.Generator, prompts: int, n: int) -> Counts:
        of_prompt_P1 = np.exp(3.5 + 0.8 * random.standard_normal((prompts, 1)))
        own_PG = random.uniform(0.8, 1.2, (prompts, n))
        return np.clip(of_prompt_P1 * own_PG, 1, 400).astype(np.int64)


def work_stealing() -> list[Figure]:
    """Engines that only keep time: nothing is fitted."""
    inputs = "all of them settings of the benchmark"

    def ratio(engines: Engines, prompts: int) -> float:
        queue = Run(prompts, 4, _PromptLengths(), engines, Update())
        split = swap(queue, engines__one_queue=False)
        return simulate(split, 20).step_seconds / simulate(queue, 20).step_seconds

    slow = Engines(8, Decode(0.01), at_once=32, slower=(2.0,))
    equal = Engines(4, Decode(0.01), at_once=16)
    what = "split over queue"
    return [
        Figure(
            "work_stealing", f"{what}, 1 of 8 at half speed", "here", 1.30, ratio(slow, 512), UNFITTED, inputs
        ),
        Figure(
            "work_stealing", f"{what}, 4 equal engines", "here", 1.05, ratio(equal, 384), UNFITTED, inputs
        ),
    ]


def controller_costs() -> tuple[float, float, float, float]:
    """Seconds: own work for a trajectory, for a rank; a call to an agent; a group to collect."""
    a_rank = (OWN_1024 - OWN_64) / (1024 - 64)
    own = (OWN_64 - 64 * a_rank) / TRAJECTORIES
    return own, a_rank, CALLS_8_AGENTS / (8 * CALLS_A_STEP), COLLECT_1024_GROUPS / 1024


def controller() -> list[Figure]:
    own, a_rank, _, a_group = controller_costs()
    inputs = "measured: CPU seconds at 64 and 1,024 ranks"
    collecting = Run(
        1024,
        16,
        Constant(1),
        Engines(4, Decode(1e-6), 4096),
        Update(),
        controller=Controller(a_group=a_group),
    )
    measured = ((64, OWN_64, FITTED), (1024, OWN_1024, FITTED), (10240, OWN_10240, HELD_OUT))
    figures = [
        Figure("controller", f"s own work, {ranks:,} ranks", "here", target,
               own * TRAJECTORIES + a_rank * ranks, kind, inputs)
        for ranks, target, kind in measured
    ]  # fmt: skip
    collect = simulate(collecting, 2).parts["reward"]
    return [
        *figures,
        Figure("controller", "s collecting 1,024 groups", "here", 1.32, collect, FITTED, inputs),
    ]
