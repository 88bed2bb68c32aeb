"""isotrain's part in a benchmark: the supervised trainer, fed from a given token store."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from turns import Turns

from isotrain.algorithms import sft_loss
from isotrain.data.feed import Feed
from isotrain.data.sampler import Sampler
from isotrain.data.store import TokenStore
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.world import join_world
from isotrain.observe.metrics import MetricsLog
from isotrain.observe.progress import Progress
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.trainers.recorder import Recorder
from isotrain.trainers.supervised import SupervisedTrainer


class RecorderInTurns(Recorder):
    """Writes metrics as always, then lets the other side work."""

    turns: Turns

    def write(self, step: int, values: Mapping[str, float]) -> None:
        super().write(step, values)
        self.turns.after_step(
            loss=values["train/loss"], tokens=values["train/tokens"], loss_tokens=values["train/loss_tokens"]
        )


def train_in_turns(
    store: TokenStore,
    model: ModelSection,
    optimizer: OptimizerSection,
    *,
    batch: int,
    budget: int,
    steps: int,
) -> None:
    """Rows in order, a constant learning rate, until the parent ends the process."""
    device = choose_device("cpu")
    with tempfile.TemporaryDirectory() as directory, join_world(device) as world:
        recorder = RecorderInTurns(Progress())
        recorder.log = MetricsLog(Path(directory) / "metrics.jsonl")
        trainer = SupervisedTrainer(
            engine=build_engine(model, optimizer, device=device, world=world, seed=0),
            device=device,
            loss=sft_loss,
            schedule=lambda step: optimizer.lr,
            feed=Feed(store, Sampler(len(store), batch, 0, shuffle=False), budget, 0, 1),
            validation=None,
            writer=CheckpointWriter(Path(directory) / "checkpoints", 0, 1, keep=1),
            recorder=recorder,
            steps=len(store) // batch,
            validate_every=0,
            save_every=0,
            max_skipped=0,
            peak_flops=None,
        )
        recorder.turns = Turns(steps)
        trainer.train(done=0)
