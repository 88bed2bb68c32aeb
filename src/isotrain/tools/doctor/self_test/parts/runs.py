"""Training runs of the small model: SFT beside the host's, GRPO on one device and on two machines."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.children import module_command
from isotrain.cluster.cores import shared_cores
from isotrain.device.detect import choose_device
from isotrain.engine.checkpoint.layout import MARKER, step_directory
from isotrain.observe.metrics import read_metrics
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.online import ClusterSection
from isotrain.tools.doctor.self_test.verdicts import (
    Reporter,
    SelfTestSetting,
    Stage,
    StageFailed,
    StageSkipped,
    own_setting,
    tell_progress,
)

if TYPE_CHECKING:
    from isotrain.cluster.connect import Node

SFT_STEPS, GRPO_STEPS = 20, 2
# Relative difference of each loss. In float32 devices differ by rounding alone, in bfloat16 by what 20 steps
# make of it.
FLOAT32, BFLOAT16, IDENTICAL = 1e-3, 3e-2, 0.0
MOST_CORES = 8
# Last lines of output of each worker of a failed run.
WORKER_LINES = 20
LONGEST_ERROR = 500


def main() -> None:
    setting = own_setting()
    {"sft": supervised, "colocated": colocated, "two-machines": two_machines}[setting.mode](setting)


def supervised(setting: SelfTestSetting) -> None:
    device = choose_device(setting.device)
    stage_of = Reporter(setting.verdicts, independent=True).stage

    @cache
    def losses(name: str, *changes: str) -> list[float]:
        """Losses of the run of this name; the same run is not run twice."""
        output = setting.directory / "sft" / name
        fixed = (
            "model.dtype=float32",
            f"trainer.steps={SFT_STEPS}",
            "data.batch_size=8",
            "trainer.save_every=0",
            "model.fused=off",  # the host has none; they have a stage of their own
        )
        train(setting, "tiny-sft", output, *fixed, *changes)
        return column(output, "train/loss")

    def on(device_type: str, *changes: str) -> list[float]:
        return losses(
            "-".join([device_type, *(c.split("=")[-1] for c in changes)]),
            f"device.type={device_type}",
            *changes,
        )

    with stage_of("sft") as stage:
        _needs_another_device(setting)
        _compare(stage, on("cpu"), on(device.type), FLOAT32)
    with stage_of("fused") as stage:
        if device.fused_operators is None:
            raise StageSkipped("isotrain has no fused operators for this device")
        _compare(stage, on(device.type), on(device.type, "model.fused=on"), FLOAT32)
    with stage_of("two-ranks") as stage:
        if setting.devices < 2:
            raise StageSkipped("there is one device; it needs two")
        _compare(stage, on(device.type), on(device.type, "device.ranks=2"), FLOAT32)
    with stage_of("sft-bfloat16") as stage:
        _needs_another_device(setting)
        half = "model.dtype=bfloat16"
        _compare(stage, on("cpu", half), on(device.type, half), BFLOAT16)
    with stage_of("repeatable") as stage:
        repeatable = (f"device.type={device.type}", "device.determinism=on")
        _compare(stage, losses("first", *repeatable), losses("second", *repeatable), IDENTICAL)


def _needs_another_device(setting: SelfTestSetting) -> None:
    if setting.device == "cpu":
        raise StageSkipped("the device is the host itself")


def _compare(stage: Stage, losses: list[float], others: list[float], allowed: float) -> None:
    if not (len(losses) == len(others) == SFT_STEPS and all(map(math.isfinite, [*losses, *others]))):
        raise StageFailed(
            f"{len(losses)} and {len(others)} losses for {SFT_STEPS} steps, or some are not finite"
        )
    difference = max(abs(a - b) / abs(a) for a, b in zip(losses, others, strict=True))
    stage.at_most("relative difference of losses", difference, allowed)
    stage.result = f"losses of {SFT_STEPS} steps differ by at most {difference:.1e} (allowed: {allowed:g})"


def colocated(setting: SelfTestSetting) -> None:
    stage_of = Reporter(setting.verdicts, independent=True).stage
    output = setting.directory / "grpo"
    settings = (*_grpo_settings(setting), "data.batch_size=8", "cluster.address=local")
    # Two, where there are two: engines of one machine can be in each other's way.
    together = 1 if setting.device == "cpu" else min(2, setting.devices)
    with stage_of("colocated-save") as stage:
        placed = ("cluster.placement=colocated", f"device.ranks={together}", f"rollout.engines={together}")
        _save_and_resume(stage, setting, output, *settings, *placed)
    with stage_of("weight-route") as stage:
        if setting.device == "cpu":
            raise StageSkipped("on the host there is no device memory between which weights could go")
        ways = [_check_route(output, "ipc")]
        if setting.devices > 1:
            output = setting.directory / "grpo-separate"
            apart = ("cluster.placement=separate", "device.ranks=1", "rollout.engines=1", "trainer.steps=1")
            train(setting, "tiny-grpo", output, *settings, *apart)
            ways.append(_check_route(output, "broadcast"))
        stage.result = "; ".join(ways)
    with stage_of("engine-cores") as stage:
        if together < 2:
            raise StageSkipped("there is one engine; it needs two")
        stage.result = _check_cores(setting.directory / "grpo", together)


def _save_and_resume(stage: Stage, setting: SelfTestSetting, output: Path, *settings: str) -> None:
    settings = (*settings, "trainer.save_every=1")
    train(setting, "tiny-grpo", output, *settings, f"trainer.steps={GRPO_STEPS}")
    for step in range(1, GRPO_STEPS + 1):
        if not (step_directory(RunDirectory(output).checkpoints, step) / MARKER).exists():
            raise StageFailed(f"there is no complete checkpoint of step {step}")
    train(setting, "tiny-grpo", output, *settings, f"trainer.steps={GRPO_STEPS + 1}")
    losses = column(output, "actor/pg_loss")
    if len(losses) != GRPO_STEPS + 1 or not all(map(math.isfinite, losses)):
        raise StageFailed(
            f"{len(losses)} finite losses for {GRPO_STEPS + 1} steps, one of them after resuming"
        )
    apart = max(column(output, "training/rollout_logp_diff_mean"))
    stage.metrics["difference of log-probs"] = apart
    stage.metrics["seconds of a save"] = max(column(output, "timing_s/save_checkpoint"), default=0.0)
    stage.result = (
        f"{GRPO_STEPS} steps saved, 1 after resuming, log-probs within {apart:.1e} of the trainer's"
    )


def _check_route(output: Path, expected: str) -> str:
    """Which way a run's weights went, by its own record: a run that falls back to files only warns."""
    starts = RunDirectory(output).starts()
    ways = {start["device"]["rollout"].get("weights by") for start in starts} - {None}
    if not ways:
        raise StageSkipped(f"{output.name} did not come to send weights")
    if ways != {expected}:
        begin = "warning: weights go through host memory"
        warnings = [line[line.index(begin) :] for line in _log(output) if begin in line]
        raise StageFailed(
            f"weights of {output.name} went by {' and '.join(sorted(ways))} in place of {expected}: "
            f"{(warnings or ['the run does not say why'])[0]}"
        )
    return f"{output.name} by {expected}"


def _check_cores(output: Path, engines: int) -> str:
    """Engines may bind themselves to cores, some of them on ARM by what they see of the machine."""
    starts = RunDirectory(output).starts()
    if not any("weights by" in start["device"]["rollout"] for start in starts):
        raise StageSkipped(f"{output.name} did not come to send weights")
    for start in starts:
        if cores := shared_cores(start["device"]["rollout"]):
            raise StageFailed(f"engines of {output.name} are bound to the same cores: {cores}")
    bound = {start["device"]["rollout"].get("cores") for start in starts} - {None}
    return f"{engines} engines, {'cores ' + ', '.join(sorted(bound)) if bound else 'not bound to cores'}"


def _log(output: Path) -> list[str]:
    return RunDirectory(output).log.read_text(encoding="utf-8", errors="replace").splitlines()


def _sees(node: Node, path: str) -> bool:
    """Whether a directory of this machine is there on another one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look: Any = ray.remote(num_cpus=0)(os.path.isdir)
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return bool(ray.get(look.options(scheduling_strategy=there).remote(path), timeout=60))


def two_machines(setting: SelfTestSetting) -> None:
    from isotrain.cluster.connect import join_cluster, largest_node, living_nodes, resource_counts

    with Reporter(setting.verdicts).stage("two-machines") as stage:
        device = choose_device(setting.device)
        assert setting.cluster is not None
        with join_cluster(ClusterSection(address=setting.cluster), device):
            nodes = living_nodes()
            lacking = [node.host for node in nodes if not _sees(node, setting.work)]
            total, largest = resource_counts(device.ray_resource)[0], largest_node(device.ray_resource)
        machines = len(nodes)
        if machines < 2:
            raise StageSkipped(f"the cluster at {setting.cluster} has {machines} machine")
        if lacking:
            raise StageFailed(
                f"{', '.join(lacking)} cannot see {setting.work}; give --self-test a directory that all "
                "machines share"
            )
        ranks, engines = int(largest), int(min(largest, total - largest))
        if device.type == "cpu" and ranks > MOST_CORES:
            raise StageSkipped(f"Ray has {ranks} CPUs a machine: start it with --num-cpus=1")
        if engines < 1:
            raise StageFailed(f"only one machine of the cluster has {device.ray_resource}")
        output = setting.directory / "two-machines"
        settings = (
            *_grpo_settings(setting),
            f"device.ranks={ranks}",
            f"rollout.engines={engines}",
            f"cluster.address={setting.cluster}",
            "cluster.placement=separate",
            "cluster.start_timeout=200",
            f"trainer.steps={GRPO_STEPS}",
        )
        train(setting, "tiny-grpo", output, *settings)
        apart = column(output, "rollout/weight_check_diff")
        if len(apart) != GRPO_STEPS or not all(map(math.isfinite, apart)):
            raise StageFailed(f"{len(apart)} checked weight updates for {GRPO_STEPS} steps")
        seconds = max(column(output, "timing_s/update_weights"))
        stage.metrics |= {"difference of log-probs": max(apart), "seconds of a weight update": seconds}
        stage.result = (
            f"{ranks} ranks and {engines} engines on {machines} machines, {GRPO_STEPS} weight updates with "
            f"log-probs within {max(apart):.1e}"
        )


def _grpo_settings(setting: SelfTestSetting) -> Sequence[str]:
    return (
        f"device.type={setting.device}",
        f"model.dtype={setting.dtype}",
        f"rollout.engine={setting.engine}",
        "rollout.kv_cache_gb=0.25",
        "rollout.memory_utilization=0.3",
        "rollout.eager=true",  # graphs have a stage of their own
    )


def train(setting: SelfTestSetting, recipe: str, output: Path, *changes: str) -> None:
    """A recipe on the small model, in processes of its own; what they say goes to the part's log."""
    tiny = setting.tiny
    files = {
        "tiny-sft": (f"data.train={tiny / 'train.jsonl'}",),
        "tiny-grpo": (
            f"data.train={tiny / 'prompts.jsonl'}",
            f"reward.function.path={tiny / 'reward.py'}:score",
        ),
    }[recipe]
    settings = (f"model.path={tiny / 'model'}", "data.validation=null", f"output={output}", *files, *changes)
    tell_progress(f"isotrain train {recipe} {' '.join(settings)}")
    process = subprocess.Popen(
        module_command("isotrain", "train", recipe, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:  # to the log as they come: a run that hangs never ends
        print(line, end="", flush=True)
        lines.append(line)
    if code := process.wait():
        for log in sorted((output / "logs").glob("*")):
            print(f"{log.name}:", *log.read_text(errors="replace").splitlines()[-WORKER_LINES:], sep="\n")
        how = f"killed by {signal.Signals(-code).name}; " if code < 0 else ""
        raise StageFailed(f"{output.name}: {how}{_error(lines)}")


def _error(said: list[str]) -> str:
    """Last words of a command, from the line that says that it is an error."""
    lines = [line.strip() for line in said if line.strip()] or ["it ended without a message"]
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    text = " ".join(lines[starts[-1] if starts else -1 :])
    # A trace may be between what failed and why.
    return text if len(text) <= LONGEST_ERROR else f"{text[:200]} ... {text[200 - LONGEST_ERROR :]}"


def column(output: Path, metric: str) -> list[float]:
    """A metric of all steps that have it."""
    return [float(row[metric]) for row in read_metrics(output / "metrics.jsonl") if metric in row]


if __name__ == "__main__":
    main()
