"""GRPO with rollout and training on the same device: it saves at each step, and resumes."""

from __future__ import annotations

import math

from isotrain.engine.checkpoint.layout import MARKER, step_directory
from isotrain.observe.run_directory import RunDirectory
from isotrain.self_test.parts.commands import column, train
from isotrain.self_test.verdicts import Reporter, StageFailed, own_setting

STEPS = 2


def main() -> None:
    setting = own_setting()
    with Reporter(setting.verdicts).stage("colocated-save") as stage:
        output = setting.directory / "grpo"
        settings = (
            f"device.type={setting.device}",
            f"model.dtype={setting.dtype}",
            f"rollout.engine={setting.engine}",
            "rollout.kv_cache_gb=0.25",
            "rollout.memory_utilization=0.3",
            "rollout.eager=true",  # graphs have a stage of their own
            "data.batch_size=8",
            "cluster.address=local",
            "cluster.placement=colocated",
            "trainer.save_every=1",
        )
        train(setting, "tiny-grpo", output, *settings, f"trainer.steps={STEPS}")
        for step in range(1, STEPS + 1):
            if not (step_directory(RunDirectory(output).checkpoints, step) / MARKER).exists():
                raise StageFailed(f"there is no complete checkpoint of step {step}")
        train(setting, "tiny-grpo", output, *settings, f"trainer.steps={STEPS + 1}")
        losses = column(output, "actor/pg_loss")
        if len(losses) != STEPS + 1 or not all(map(math.isfinite, losses)):
            raise StageFailed(
                f"{len(losses)} finite losses for {STEPS + 1} steps, one of them after resuming"
            )
        stage.metrics["difference of log-probs"] = max(column(output, "training/rollout_logp_diff_mean"))
        stage.metrics["seconds of a save"] = max(column(output, "timing_s/save_checkpoint"), default=0.0)
        apart = stage.metrics["difference of log-probs"]
        stage.result = f"{STEPS} steps saved, 1 after resuming, log-probs within {apart:.1e} of the trainer's"


if __name__ == "__main__":
    main()
