"""Short SFT runs: the device beside the host, two runs alike, fused operators, two ranks."""

from __future__ import annotations

import math
from functools import cache

from isotrain.device.detect import choose_device
from isotrain.self_test.parts.commands import column, train
from isotrain.self_test.verdicts import Reporter, Setting, Stage, StageFailed, StageSkipped, own_setting

STEPS = 20
# Of each loss, relative. In float32 devices differ by rounding alone, in bfloat16 by what 20 steps make of
# it.
FLOAT32, BFLOAT16, IDENTICAL = 1e-3, 3e-2, 0.0


def main() -> None:
    setting = own_setting()
    device = choose_device(setting.device)
    stage_of = Reporter(setting.verdicts, independent=True).stage

    @cache
    def losses(name: str, *changes: str) -> list[float]:
        """Of the run of this name; the same run is not run twice."""
        return _losses(setting, name, changes)

    def on(device_type: str, *changes: str) -> list[float]:
        return losses(
            "-".join([device_type, *(c.split("=")[-1] for c in changes)]),
            f"device.type={device_type}",
            *changes,
        )

    with stage_of("sft") as stage:
        _needs_another_device(setting)
        _compare(stage, on("cpu"), on(device.type), FLOAT32)
    with stage_of("sft-bfloat16") as stage:
        _needs_another_device(setting)
        half = "model.dtype=bfloat16"
        _compare(stage, on("cpu", half), on(device.type, half), BFLOAT16)
    with stage_of("repeatable") as stage:
        repeatable = (f"device.type={device.type}", "device.determinism=on")
        _compare(stage, losses("first", *repeatable), losses("second", *repeatable), IDENTICAL)
    with stage_of("fused") as stage:
        if device.fused_operators is None:
            raise StageSkipped("isotrain has no fused operators for this device")
        _compare(stage, on(device.type), on(device.type, "model.fused=on"), FLOAT32)
    with stage_of("two-ranks") as stage:
        if setting.devices < 2:
            raise StageSkipped("there is one device; it needs two")
        _compare(stage, on(device.type), on(device.type, "device.ranks=2"), FLOAT32)


def _needs_another_device(setting: Setting) -> None:
    if setting.device == "cpu":
        raise StageSkipped("the device is the host itself")


def _losses(setting: Setting, name: str, changes: tuple[str, ...]) -> list[float]:
    output = setting.directory / "sft" / name
    settings = ("model.dtype=float32", f"trainer.steps={STEPS}", "data.batch_size=8", "trainer.save_every=0")
    train(setting, "tiny-sft", output, *settings, *changes)
    return column(output, "train/loss")


def _compare(stage: Stage, one: list[float], other: list[float], allowed: float) -> None:
    if not (len(one) == len(other) == STEPS and all(map(math.isfinite, [*one, *other]))):
        raise StageFailed(f"{len(one)} and {len(other)} losses for {STEPS} steps, or some are not finite")
    difference = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    stage.at_most("relative difference of losses", difference, allowed)
    stage.result = f"losses of {STEPS} steps differ by at most {difference:.1e} (allowed: {allowed:g})"


if __name__ == "__main__":
    main()
