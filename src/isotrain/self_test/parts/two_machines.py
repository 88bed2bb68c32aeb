"""GRPO over a Ray cluster, with so many ranks and engines that one machine cannot hold them."""

from __future__ import annotations

import math
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from isotrain.cluster.connect import Node, join_cluster, largest_node, living_nodes, resource_counts
from isotrain.device.detect import choose_device
from isotrain.recipe.online import ClusterSection
from isotrain.self_test.parts.commands import column, train
from isotrain.self_test.verdicts import Reporter, StageFailed, StageSkipped, own_setting

STEPS = 2
MOST_CORES = 8


def sees(node: Node, path: str) -> bool:
    """Whether a directory of this machine is there on another one."""
    look: Any = ray.remote(num_cpus=0)(os.path.isdir)
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return bool(ray.get(look.options(scheduling_strategy=there).remote(path), timeout=60))


def main() -> None:
    setting = own_setting()
    with Reporter(setting.verdicts).stage("two-machines") as stage:
        device = choose_device(setting.device)
        assert setting.cluster is not None
        with join_cluster(ClusterSection(address=setting.cluster), device):
            nodes = living_nodes()
            lacking = [node.host for node in nodes if not sees(node, setting.work)]
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
            f"device.type={setting.device}",
            f"device.ranks={ranks}",
            f"model.dtype={setting.dtype}",
            f"rollout.engine={setting.engine}",
            f"rollout.engines={engines}",
            "rollout.kv_cache_gb=0.25",
            "rollout.memory_utilization=0.3",
            "rollout.eager=true",  # graphs have a stage of their own
            f"cluster.address={setting.cluster}",
            "cluster.placement=separate",
            "cluster.start_timeout=200",
            f"trainer.steps={STEPS}",
        )
        train(setting, "tiny-grpo", output, *settings)
        apart = column(output, "rollout/weight_check_diff")
        if len(apart) != STEPS or not all(map(math.isfinite, apart)):
            raise StageFailed(f"{len(apart)} checked weight updates for {STEPS} steps")
        seconds = max(column(output, "timing_s/update_weights"))
        stage.metrics |= {"difference of log-probs": max(apart), "seconds of a weight update": seconds}
        stage.result = (
            f"{ranks} ranks and {engines} engines on {machines} machines, {STEPS} weight updates with "
            f"log-probs within {max(apart):.1e}"
        )


if __name__ == "__main__":
    main()
