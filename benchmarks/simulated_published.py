"""Figures that others have published, and what the simulator gives for them.

Sources, read in November 2026:
- verl, docs/advance/fully_async.md: Qwen2.5-Math-7B with DAPO on H20, colocated and fully asynchronous.
- AReaL, blog/AReaL_v0_3.md: hours for 1,000 steps, synchronous and asynchronous, 1.5B and 7B.
- RollPacker (arXiv 2509.21009): tail batching against veRL; the oversampling is in its artifact.
- Console logs of verl, public repository diqiuzhuanzhuan/verldata, commit 42e31cd: Qwen2-7B, 8 GPUs, GPG.
- verl, verl/checkpoint_engine/README.md; MoonshotAI/checkpoint-engine, README.md; slime's blog.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulate.hardware import (
    Device,
    Efficiency,
    Model,
    Transfer,
    decode_of,
    line_through,
    sequences_at_once,
    training_seconds_per_token,
)
from simulate.lengths import Lengths, Lognormal, lognormal_of
from simulate.run import simulate
from simulate.settings import Decode, Engines, Run, Update
from simulated_figures import FITTED, HELD_OUT, UNFITTED, Figure, fit, swap

# Data sheets: dense bfloat16, memory bandwidth, memory.
H20 = Device("H20", 148.0, 4.0, 96.0)
H800 = Device("H800", 989.0, 3.35, 80.0)
QWEN_1_5B = Model("Qwen2.5-1.5B", 1.5, 1.5, 28, 2, 128)
QWEN_7B = Model("Qwen2.5-7B", 7.6, 7.6, 28, 4, 128)
ASSUMED = Efficiency()
SIGMA, BY_PROMPT = 1.0, 0.5
STEPS = 5
SHARED_BY = 4


def skewed(mean: float, longest: int) -> Lognormal:
    """The mean is that before truncation."""
    return Lognormal(mean * 2.718281828 ** (-(SIGMA**2) / 2), SIGMA, longest, BY_PROMPT)


def case(
    model: Model,
    device: Device,
    prompts: int,
    lengths: Lengths,
    engines: int,
    ranks: int,
    mini_batches: int,
) -> Run:
    """One device an engine, a long sequence shared by four ranks; data-sheet speeds."""
    one_rank = training_seconds_per_token(model, device, 1, ASSUMED)
    return Run(
        prompts=prompts,
        n=16,
        lengths=lengths,
        engines=Engines(
            engines,
            decode_of(model, device, 1, ASSUMED),
            sequences_at_once(model, device, 1, 4096, ASSUMED),
        ),
        update=Update(
            per_token=one_rank / ranks,
            per_token_of_longest=one_rank / SHARED_BY,
            mini_batches=mini_batches,
        ),
        prompt_tokens=150,
    )


@dataclass(frozen=True)
class Verl:
    devices: int
    step: float
    generation: float
    update: float
    old_log_prob: float
    asynchronous_step: float


VERL = (
    Verl(32, 790.10, 357.41, 313.81, 107.71, 294.77),
    Verl(64, 365.28, 150.72, 133.41, 70.26, 189.26),
    Verl(128, 356.30, 177.85, 113.81, 53.92, 150.63),
)


def verl_fully_async() -> list[Figure]:
    """512 prompts x 16, at most 28k tokens, 16 updates a step. The mean length is not published: it is fitted
    to one figure, the update on 32 devices."""

    def colocated(mean: float, devices: int) -> Run:
        run = case(QWEN_7B, H20, 512, skewed(mean, 28672), devices, devices, 16)
        return swap(run, placement="colocated", switch=5.0, sync__publish=2.0)

    def update(mean: float) -> float:
        return simulate(colocated(mean, 32), STEPS).parts["update"]

    mean = fit(update, VERL[0].update, 100, 20_000)
    figures = []
    inputs = (
        "published: batch, limit, devices, staleness 0.5, partial rollout; assumed: shape of lengths, "
        f"efficiencies; fitted: mean length {mean:.0f} before truncation"
    )
    for row in VERL:
        sync = simulate(colocated(mean, row.devices), STEPS)
        half = case(QWEN_7B, H20, 512, skewed(mean, 28672), row.devices // 2, row.devices // 2, 16)
        ahead = swap(half, staleness=0.5, order="finished", in_flight=True, sync__publish=2.0, sync__load=2.0)
        told, name = simulate(ahead, 3 * STEPS).step_seconds, f"verl, 7B, {row.devices} H20"
        # The simulated step leaves out the log-probs, which the asynchronous runs do not compute.
        whole = sync.step_seconds + row.old_log_prob
        kind = FITTED if row is VERL[0] else HELD_OUT
        figures += [
            Figure(name, "s generation", "verl", row.generation, sync.parts["generation"], HELD_OUT, inputs),
            Figure(name, "s update", "verl", row.update, sync.parts["update"], kind, inputs),
            Figure(name, "s step, asynchronous", "verl", row.asynchronous_step, told, HELD_OUT, inputs),
            Figure(name, "step, synchronous over asynchronous", "verl", row.step / row.asynchronous_step,
                   whole / told, HELD_OUT, inputs),
        ]  # fmt: skip
    return figures


AREAL = {"1.5B, 128 H800": (41.0, 14.8, QWEN_1_5B, 128), "7B, 192 H800": (57.7, 25.4, QWEN_7B, 192)}
AREAL_LONGEST = 27648


def _areal_runs(model: Model, devices: int, mean: float) -> tuple[Run, Run]:
    """Synchronous: all devices take turns. Asynchronous: three quarters generate."""
    lengths = skewed(mean, AREAL_LONGEST)
    together = case(model, H800, 512, lengths, devices, devices, 4)
    apart = case(model, H800, 512, lengths, devices * 3 // 4, devices // 4, 4)
    return (
        swap(together, placement="colocated", switch=2.0, sync__publish=1.0),
        swap(apart, engines__even_share=False, staleness=8, order="finished", in_flight=True,
             sync__load=2.0, sync__publish=1.0),
    )  # fmt: skip


def areal() -> list[Figure]:
    """The mean length is fitted to the synchronous step of the smaller model; the larger one has it too."""

    def synchronous(mean: float) -> float:
        return simulate(_areal_runs(QWEN_1_5B, 128, mean)[0], 3).step_seconds

    mean = fit(synchronous, 41.0 * 3.6, 500, 20_000)
    inputs = (
        "published: devices, hours for 1,000 steps, 16 responses, limit 27k, staleness 8; assumed: 512 "
        "prompts, 3/4 of the devices generate, shape of lengths, efficiencies; fitted: mean length "
        f"{mean:.0f} before truncation"
    )
    figures = []
    for name, (slow, fast, model, devices) in AREAL.items():
        together, apart = _areal_runs(model, devices, mean)
        sync, ahead = simulate(together, 3).step_seconds, simulate(apart, 24).step_seconds
        kind = FITTED if model is QWEN_1_5B else HELD_OUT
        figures += [
            Figure(f"AReaL, {name}", "s step, synchronous", "AReaL", slow * 3.6, sync, kind, inputs),
            Figure(f"AReaL, {name}", "s step, asynchronous", "AReaL", fast * 3.6, ahead, HELD_OUT, inputs),
            Figure(f"AReaL, {name}", "synchronous over asynchronous", "AReaL", slow / fast, sync / ahead,
                   HELD_OUT, inputs),
        ]  # fmt: skip
    return figures


def rollpacker() -> list[Figure]:
    """Tail batching drops long responses and repeats their prompts later. Here they continue in the next
    step, which is the nearest policy of the simulator. Nothing is fitted."""
    inputs = (
        "published: 7B on 16 and 128 H800, 25 % more prompts under way; assumed: 64 prompts x 16 to 8 "
        "devices, means of a quarter of the limits of 8k and 32k, shape of lengths, efficiencies"
    )
    figures = []
    for devices, longest, target in ((16, 8192, 2.03), (128, 32768, 2.56)):
        plain = case(QWEN_7B, H800, 8 * devices, skewed(longest / 4, longest), devices, devices, 1)
        plain = swap(plain, placement="colocated", switch=2.0, sync__publish=1.0)
        continued = swap(plain, staleness=0.25, order="finished")
        ratio = simulate(plain, STEPS).step_seconds / simulate(continued, 3 * STEPS).step_seconds
        name = f"7B, {devices} H800, limit {longest // 1024}k"
        figures.append(
            Figure(
                f"RollPacker, {name}", "veRL over RollPacker", "RollPacker", target, ratio, UNFITTED, inputs
            )
        )
    return figures


@dataclass(frozen=True)
class Window:
    """Means of ten steps of a log."""

    steps: str
    length: float
    truncated: float
    prompt: float
    generate: float
    old_log_prob: float
    update: float


# 1,024 prompts x 5 responses of at most 1,024 tokens, four engines of two devices, FSDP; and Megatron.
FSDP = (
    Window("1-10", 261.2, 0.020, 100.9, 54.0, 32.56, 132.2),
    Window("11-20", 233.0, 0.012, 100.3, 49.6, 31.41, 127.4),
    Window("51-60", 220.3, 0.003, 101.2, 56.2, 30.88, 125.2),
    Window("91-100", 220.2, 0.001, 101.4, 75.1, 30.89, 125.4),
    Window("201-210", 589.3, 0.428, 101.0, 106.3, 48.80, 186.0),
)
MEGATRON = Window("1-10", 176.0, 0.001, 93.7, 38.8, 53.60, 110.1)


def verl_logs() -> list[Figure]:
    """The update is a line through the first two windows; decoding has one parameter from the first."""

    def run(window: Window, a_sequence: float) -> Run:
        lengths = lognormal_of(window.length, 1024, window.truncated, BY_PROMPT)
        # Two devices of 2 TB/s read 15.2 GB of weights; the kind of device is not in the log.
        engines = Engines(4, Decode(0.005 + 15.2e9 / (2 * 2e12 * 0.6), a_sequence), at_once=256)
        return Run(1024, 5, lengths, engines, Update(), prompt_tokens=round(window.prompt))

    def generate(window: Window, a_sequence: float) -> float:
        return simulate(run(window, a_sequence), 1).steps[0].generation

    def tokens(window: Window) -> float:
        return 1024 * 5 * (window.prompt + window.length)

    first, second = FSDP[:2]
    a_sequence = fit(lambda value: generate(first, value), first.generate, 1e-6, 1e-2)
    lines = {
        part: line_through((tokens(second), getattr(second, part)), (tokens(first), getattr(first, part)))
        for part in ("update", "old_log_prob")
    }
    inputs = "published: batch, means and limits of lengths, times; assumed: memory bandwidth 2 TB/s"
    figures = []
    for window in (*FSDP, MEGATRON):
        name = f"verl log, 7B, 8 GPUs, steps {window.steps}" + (", Megatron" if window is MEGATRON else "")
        kind = FITTED if window is first else HELD_OUT
        told = generate(window, a_sequence)
        figures.append(Figure(name, "s generate_sequences", "log", window.generate, told, kind, inputs))
        if window is MEGATRON:
            continue
        kind = FITTED if window in (first, second) else HELD_OUT
        for part, line in lines.items():
            told = line.seconds(tokens(window))
            figures.append(Figure(name, f"s {part}", "log", getattr(window, part), told, kind, inputs))
    return figures


# Gigabytes of the published weights, seconds.
DEEPSEEK_16, KIMI_16 = (689.0, 10.19), (1030.0, 14.36)
CHECKPOINT_ENGINE = {
    "DeepSeek-V3.1 FP8, 256 H20": (689.0, 11.33),
    "Kimi-K2 FP8, 256 H20": (1030.0, 16.04),
    "GLM-4.5-Air, 8 H800": (214.0, 3.47),
    "Qwen3-235B, 8 H800": (470.0, 6.22),
}
OTHERS = {
    "slime, IPC, 30B-A3B, 8 H100": (61.0, 3.0),
    "verl, 30B-A3B to 30 H100, broadcast over InfiniBand": (61.0, 7.0),
    "verl, 30B-A3B to 30 on 910C": (61.0, 11.0),
    "verl with checkpoint-engine, 30B-A3B on 910C, update without offload": (61.0, 3.5),
}


def weight_line() -> Transfer:
    return line_through(DEEPSEEK_16, KIMI_16)


def weight_sync() -> list[Figure]:
    """A line through two rows of checkpoint-engine on 16 H20; all else is held out, also other devices."""
    line = weight_line()
    inputs = "published: seconds; sizes of the published files"
    rows = [("checkpoint-engine, DeepSeek-V3.1 FP8, 16 H20", *DEEPSEEK_16, FITTED)]
    rows += [("checkpoint-engine, Kimi-K2 FP8, 16 H20", *KIMI_16, FITTED)]
    rows += [(f"checkpoint-engine, {name}", *pair, HELD_OUT) for name, pair in CHECKPOINT_ENGINE.items()]
    rows += [(name, *pair, HELD_OUT) for name, pair in OTHERS.items()]
    return [
        Figure(name, "s weight sync", name.split(",")[0], seconds, line.seconds(gigabytes), kind, inputs)
        for name, gigabytes, seconds, kind in rows
    ]
