"""GRPO over a Ray cluster, with so many ranks and engines that one machine cannot hold them."""

from __future__ import annotations

import math

from isotrain.cluster.connect import join_cluster, largest_node, living_nodes, resource_counts
from isotrain.device.detect import choose_device
from isotrain.recipe.online import ClusterSection
from isotrain.self_test.parts.commands import column, train
from isotrain.self_test.verdicts import Reporter, StageFailed, StageSkipped, own_setting

STEPS = 2
MOST_CORES = 8


def main() -> None:
    setting = own_setting()
    with Reporter(setting.verdicts).stage("two-machines") as stage:
        device = choose_device(setting.device)
        assert setting.cluster is not None
        with join_cluster(ClusterSection(address=setting.cluster), device):
            machines = len(living_nodes())
            total, largest = resource_counts(device.ray_resource)[0], largest_node(device.ray_resource)
        if machines < 2:
            raise StageSkipped(f"the cluster at {setting.cluster} has {machines} machine")
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
            f"cluster.address={setting.cluster}",
            "cluster.placement=separate",
            f"trainer.steps={STEPS}",
        )
        train(setting, "tiny-grpo", output, *settings)
        apart = column(output, "rollout/weight_check_diff")
        if len(apart) != STEPS or not all(map(math.isfinite, apart)):
            raise StageFailed(f"{len(apart)} checked weight updates for {STEPS} steps")
        seconds = max(column(output, "timing_s/update_weights"))
        stage.figures |= {"difference of log-probs": max(apart), "seconds of a weight update": seconds}
        stage.result = (
            f"{ranks} ranks and {engines} engines on {machines} machines, {STEPS} weight updates with "
            f"log-probs within {max(apart):.1e}"
        )


if __name__ == "__main__":
    main()
