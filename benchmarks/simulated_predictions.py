"""What the simulator expects where nothing was measured: 1,024 to 102,400 devices.

Data-sheet speeds of an H800 with the assumed efficiencies; nothing is fitted to these sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from simulate.hardware import (
    Device,
    Failures,
    Model,
    decode_of,
    sequences_at_once,
    training_seconds_per_token,
)
from simulate.lengths import Lognormal
from simulate.run import Outcome, simulate
from simulate.settings import Controller, Engines, Run, Sync, Update, controller_seconds
from simulated_figures import swap
from simulated_here import CALLS_A_STEP, TRAJECTORIES, controller_costs
from simulated_published import ASSUMED, H800, weight_line

from isotrain.cluster.node_proxy import teams
from isotrain.cluster.placement import Placement, Slot
from isotrain.device.accelerator import CUDA
from isotrain.recipe.library import find
from isotrain.recipe.load import load_recipe
from isotrain.tools.plan.estimate import FILE_GB_S
from isotrain.trainers.online import worker_groups
from isotrain.trainers.online.weight_sync import possible_routes

N, A_MACHINE, SLICE = 16, 8, 1024
LENGTHS = Lognormal(7000, 0.8, 32768, by_prompt=0.5)
MEAN_LENGTH = 9000
"""About that of the distribution above; the cache is sized for it."""
LINK_GB, MICRO_BATCH, PASSES = 50.0, 16384, 3
"""Gigabytes a second between machines for one device; tokens; weights are gathered twice, gradients once."""
SYNC_GROWTH = 0.12
"""Of a weight sync for 16 times the receivers: checkpoint-engine from 16 to 256 devices."""
FILE_GB = FILE_GB_S[True]
"""Gigabytes a second of each side where weights go through files: an estimate by reading the code, for 141 GB
over two machines. Nobody has measured it on such machines."""
SLOW_SYNC_GB = 61.0 / 11.0
"""Gigabytes a second of the slowest published sync, on 910C."""
# 466 interruptions in 54 days on 16,384 devices (Llama 3).
FAILURES = Failures(hours_between=54 * 24 * 16384 / 466, restart_seconds=600.0, engine_seconds=300.0)
SAVE_EVERY, STATE_BYTES, STORAGE_GB, HOST_GB = 600.0, 12, 100.0, 20.0
"""Seconds; bytes of a parameter with optimizer state; gigabytes a second to storage, and from a device."""


STALENESS = {"colocated": 0, "staleness 1": 1, "in flight": 2}


@dataclass(frozen=True)
class Case:
    model: Model
    tensor_parallel: int
    experts_stay: bool
    """Whether expert parallelism keeps the experts' weights where they are."""
    context: int
    eighths: int
    """Of the devices, for engines, where they have their own: chosen so that neither side waits for long."""

    def ranks(self, devices: int) -> int:
        return devices * (8 - self.eighths) // 8


DENSE = Case(Model("32B dense", 32.8, 32.8, 64, 8, 128), 4, False, 4, eighths=6)
MIXTURE = Case(Model("235B-A22B", 235.0, 22.0, 94, 4, 128), 8, True, 4, eighths=7)


def controller_of(devices_of_ranks: int, responses: int, slices: int) -> Controller:
    own, a_rank, a_call, a_group = controller_costs()
    # A step's own work was measured for 16,384 trajectories; its part for ranks does not depend on them.
    return Controller(
        a_step=controller_seconds(
            ranks=devices_of_ranks,
            agents=len(teams(max(1, devices_of_ranks // A_MACHINE))),
            calls=CALLS_A_STEP,
            own=own * responses,
            per_rank=a_rank,
            per_agent_call=a_call,
        ),
        a_group=a_group * N / (TRAJECTORIES / 1024) * slices,
    )


def update_of(case: Case, device: Device, ranks: int) -> Update:
    """As slow as computing, or as gathering the weights for each micro-batch."""
    computing = training_seconds_per_token(case.model, device, 1, ASSUMED)
    gathered = case.model.active_billions if case.experts_stay else case.model.billions
    gathering = PASSES * 2 * gathered / LINK_GB / MICRO_BATCH
    return Update(
        fixed=2.0,
        per_token=max(computing, gathering) / ranks,
        per_token_of_longest=max(computing, gathering) / case.context,
    )


def route_of(mode: str) -> str:
    """The way that weights take in this mode, as the code of online runs chooses it.

    Devices and network are taken to allow it: a run that finds otherwise falls back to files.
    """
    staleness, in_flight = STALENESS[mode], mode == "in flight"
    together = mode == "colocated"
    overrides = [
        *(
            "device.type=cuda",
            f"device.ranks={A_MACHINE}",
            "rollout.engine=vllm",
            "rollout.tensor_parallel=4",
        ),
        *(f"cluster.placement={'colocated' if together else 'separate'}", f"rollout.staleness={staleness}"),
        *(f"rollout.in_flight={str(in_flight).lower()}", "cluster.address=local"),
    ]
    recipe = load_recipe(find("tiny-grpo"), overrides)
    anything: Any = None
    numbers = [str(number) for number in range(A_MACHINE)]
    ranks = tuple(Slot(anything, 0, "a", "a", (number,)) for number in numbers)
    at = "a" if together else "b"
    engines = tuple(Slot(anything, 0, at, at, tuple(numbers[i : i + 4])) for i in (0, 4))
    by_device = worker_groups._goes_by_device(recipe, CUDA)
    best, *_ = possible_routes(Placement(ranks, engines), 4, together=by_device)
    return best.transport


def sync_of(case: Case, engines: int, mode: str) -> Sync:
    """Ranks wait while weights are sent. Engines that keep generating meanwhile load them afterwards."""
    gigabytes = case.model.gigabytes
    if route_of(mode) == "file":
        return Sync(publish=gigabytes / FILE_GB, load=gigabytes / FILE_GB)
    growth = 1.0 + SYNC_GROWTH * max(0.0, math.log(engines * case.tensor_parallel / 16, 16))
    sending = weight_line().seconds(gigabytes) * growth
    # From a second buffer: each device reads its part of the weights, and writes it.
    copied = gigabytes / case.tensor_parallel / (1e3 * H800.terabytes_per_second * ASSUMED.bandwidth)
    return Sync(publish=sending, load=2 * copied if STALENESS[mode] else 0.0)


def build(case: Case, devices: int, prompts: int, mode: str, slices: int = 1) -> Run:
    """`slices`: simulate one part of so many equal ones. The controller serves all of them, so its time for a
    group is that much longer; all else that is common, such as the weight sync, is that of the whole."""
    ranks = devices if mode == "colocated" else case.ranks(devices)
    engines = (devices if mode == "colocated" else devices - ranks) // case.tensor_parallel
    decode = decode_of(case.model, H800, case.tensor_parallel, ASSUMED)
    at_once = sequences_at_once(case.model, H800, case.tensor_parallel, MEAN_LENGTH, ASSUMED)
    run = Run(
        prompts=prompts // slices,
        n=N,
        lengths=LENGTHS,
        engines=Engines(engines // slices, decode, at_once),
        update=update_of(case, H800, ranks // slices),
        sync=sync_of(case, engines, mode),
        controller=controller_of(ranks, prompts * N, slices),
        prompt_tokens=200,
    )
    if mode == "colocated":
        return swap(run, placement="colocated", switch=5.0)
    return swap(run, staleness=STALENESS[mode], in_flight=mode == "in flight")


def told_of(run: Run, outcome: Outcome) -> dict[str, Any]:
    return {
        "step_s": round(outcome.step_seconds, 1),
        "responses_per_s": round(outcome.responses_per_second, 1),
        "engines_idle": round(outcome.engines_idle, 3),
        "places_filled": round(outcome.engines_filled, 3),
        "ranks_idle": round(outcome.ranks_idle, 3),
        **{f"{part}_s": round(seconds, 1) for part, seconds in outcome.parts.items()},
        "longest": max(step.longest for step in outcome.steps),
        "staleness": outcome.staleness,
    }


MODES = {"colocated": 4, "staleness 1": 12, "in flight": 16}
"""Steps that are simulated."""


def routes() -> list[dict[str, Any]]:
    """For docs/scale.md, which may not say more than the code does."""
    rates = {"file": "an estimate by reading the code"}
    return [
        {"mode": mode, "weights go by": route, "rate": rates.get(route, "checkpoint-engine's")}
        for mode, route in ((mode, route_of(mode)) for mode in MODES)
    ]


def predict(case: Case, devices: int, prompts: int, mode: str, slices: int, steps: int) -> dict[str, Any]:
    run = build(case, devices, prompts, mode, slices)
    told = told_of(run, simulate(run, steps))
    told["responses_per_s"] = round(told["responses_per_s"] * slices, 1)
    return {
        "model": case.model.name,
        "devices": devices,
        "prompts": prompts,
        "mode": mode,
        "simulated_part": f"1/{slices}",
        **told,
    }


def central(case: Case, devices: int, prompts: int) -> dict[str, Any]:
    """What does not come from events: the controller, weights, checkpoints and failures."""
    ranks = case.ranks(devices)
    engines = (devices - ranks) // case.tensor_parallel
    control = controller_of(ranks, prompts * N, 1)
    state_gb = case.model.billions * STATE_BYTES
    blocking = state_gb / ranks / HOST_GB
    interval = FAILURES.best_interval(ranks, max(blocking, 1.0))
    return {
        "model": case.model.name,
        "devices": devices,
        "prompts": prompts,
        "controller_step_s": round(control.a_step, 2),
        "controller_collect_s": round(control.a_group * prompts, 1),
        **{f"weight_sync_s, {mode}": round(sync_of(case, engines, mode).publish, 1) for mode in MODES},
        "weight_sync_slow_s": round(case.model.gigabytes / SLOW_SYNC_GB, 1),
        "checkpoint_write_s": round(state_gb / STORAGE_GB, 1),
        "failures_an_hour": round(FAILURES.an_hour(devices), 3),
        "of_ranks_an_hour": round(FAILURES.an_hour(ranks), 3),
        "lost_share_ranks": round(FAILURES.lost_share(ranks, SAVE_EVERY, blocking), 4),
        # As long as the loss of a machine with engines ends the run as well.
        "lost_share_all": round(FAILURES.lost_share(devices, SAVE_EVERY, blocking), 4),
        "best_interval_s": round(interval),
        "engines_away": round(FAILURES.engines_away(engines, case.tensor_parallel), 6),
    }
