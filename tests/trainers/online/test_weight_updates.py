"""Engines have the trained model's weights after every update, and one that has not is found out.

T: tokens of a weight check.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from online_runs import online_recipe, run_online
from ray import cloudpickle
from transformers import AutoModelForCausalLM

from isotrain.cluster.connect import join_cluster
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.device.detect import choose_device
from isotrain.errors import WeightUpdateError
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.trainers.online.engines import Engines, Weights
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.weights.check import TOLERANCE
from isotrain.weights.file import write_update
from isotrain.weights.update import WeightUpdate
from support import needs_vllm

pytestmark = pytest.mark.ray

CHECK_T = np.arange(3, 35, dtype=np.int32)
TIMEOUT = 20.0


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_and_trainer_agree_after_every_update_of_adapters(tiny: Path, tmp_path: Path) -> None:
    """On-policy: the responses of a step were sampled with the weights that the step begins with."""
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        model={"lora": {"rank": 8}},
        data={"train": str(tiny / "prompts.jsonl"), "batch_size": 8, "max_length": 64},
        rollout={"engine": "vllm", "n": 8, "max_tokens": 12, "kv_cache_gb": 0.25},
        optimizer={"lr": 1e-2, "schedule": "constant", "warmup_ratio": 0.0},
        trainer={"steps": 10},
    )
    rows = read_metrics(run_online(recipe, tmp_path, timeout=800) / "metrics.jsonl")
    differences = [row["training/rollout_logp_diff_mean"] for row in rows]
    entropies = [row["actor/entropy"] for row in rows]
    print(f"mean differences of log-probs: at most {max(differences):.1e}")
    print("entropies: " + ", ".join(f"{entropy:.3f}" for entropy in entropies))
    assert len(rows) == 10 and max(differences) <= 1e-4
    assert max(row["rollout/weight_check_diff"] for row in rows) <= 1e-4
    # The updates were no small ones: the same weights throughout would also agree.
    assert abs(entropies[-1] - entropies[0]) > 0.05


class FaultyWorker(RolloutWorker):
    """The rollout worker, with one fault in how it takes weights."""

    def __init__(self, recipe: dict[str, Any], name: str, fault: str, note: str) -> None:
        super().__init__(recipe, name)
        self.fault, self.note = fault, Path(note)

    def start(self) -> None:
        if self.note.exists():
            time.sleep(3)
        super().start()

    def die(self) -> None:
        self.note.touch()
        os._exit(1)

    def update(self, update: WeightUpdate) -> int:
        if update.version == 1 and self.fault != "dies":
            return super().update(update)
        if self.fault == "skips":
            return self.engine.version
        if self.fault == "hangs":
            time.sleep(600)
        if self.fault == "lies":
            self.engine.version = update.version  # type: ignore[attr-defined]
            return self.engine.version
        if self.fault == "swaps":
            two_of_a_shape = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight")
            version = super().update(update)
            named = dict(self.engine._model.named_parameters())  # type: ignore[attr-defined]
            first, second = (named[name].data for name in two_of_a_shape)
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
            return version
        if self.fault == "dies" and not self.note.exists():
            self.die()
        return super().update(update)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = sys.modules[__name__]
    # Workers cannot import this file: they get the class itself.
    cloudpickle.register_pickle_by_value(here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with join_cluster(ClusterSection(address="local"), choose_device("cpu")):
            yield
    cloudpickle.unregister_pickle_by_value(here)


def further(tiny: Path, version: int, dtype: str = "float32") -> Weights:
    """An update for two engines: the tiny model, a good deal further."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=getattr(torch, dtype))
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        ids_T = torch.from_numpy(CHECK_T).long()
        logp_TV = model(ids_T[None]).logits[0, :-1].float().log_softmax(-1)
    update = write_update(model.named_parameters(), version)
    return Weights(version, [update, update], logp_TV.gather(1, ids_T[1:, None])[:, 0].numpy())


@contextmanager
def engines(
    tiny: Path, tmp_path: Path, fault: str, said: list[str], dtype: str = "float32"
) -> Iterator[Engines]:
    """Two real engines, the second with a fault, preference as in a run."""
    values = resolved(online_recipe(tiny, tmp_path / "run", model={"dtype": dtype}))
    members = [
        Member((values, f"rollout engine {index}", own, str(tmp_path / "note")))
        for index, own in enumerate(["none", fault])
    ]
    with WorkerGroup("rollout engine", FaultyWorker, members, start_timeout=120) as group:
        group.within(120).call(RolloutWorker.start)
        tolerance = TOLERANCE[dtype]
        yield Engines(
            group, 120.0, said.append, check_prompts=[CHECK_T], timeout=TIMEOUT, tolerance=tolerance
        )


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("fault", ["none", "dies"])
def test_engines_take_a_good_update(tiny: Path, tmp_path: Path, fault: str) -> None:
    said: list[str] = []
    trained = further(tiny, 1)
    with engines(tiny, tmp_path, fault, said) as both:
        before = both.group.call(RolloutWorker.weight_check, [CHECK_T])
        assert np.abs(before[0] - trained.logps).mean() > 0.2
        both.send(trained)
        assert both.settle() < 1e-5
        # Also the one that took the place of an engine that died in the middle of it.
        assert len(said) == (fault == "dies")
        for logps in both.group.call(RolloutWorker.weight_check, [CHECK_T]):
            np.testing.assert_allclose(logps, trained.logps, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["lies", "swaps"])
def test_weights_that_are_not_in_force_are_found_out(
    tiny: Path, tmp_path: Path, fault: str, dtype: str
) -> None:
    with engines(tiny, tmp_path, fault, [], dtype) as both:
        both.send(further(tiny, 1, dtype))
        print(f"difference by rounding: {both.settle():.1e}")
        both.send(further(tiny, 2, dtype))
        words = (
            r"^rollout engine 1: after weight update 2 its log-probs of 31 tokens differ .*weight_check_toler"
        )
        with pytest.raises(WeightUpdateError, match=words) as raised:
            both.settle()
        print(raised.value)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("skips", r"^rollout engine 1 has weights of version 1 after update 2$"),
        (
            "hangs",
            r"^rollout engine 1: weight update 2 did not end within 20 s \(rollout\.update_timeout\)$",
        ),
    ],
)
def test_a_bad_update_is_found_out(tiny: Path, tmp_path: Path, fault: str, words: str) -> None:
    with engines(tiny, tmp_path, fault, []) as both:
        both.send(further(tiny, 1))
        both.settle()
        both.send(further(tiny, 2))
        begin = time.monotonic()
        with pytest.raises(WeightUpdateError, match=words):
            both.settle()
        assert time.monotonic() - begin < TIMEOUT + 10


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_update_waits_for_an_engine_that_is_being_replaced(tiny: Path, tmp_path: Path) -> None:
    """The thread that makes batches ahead meets the death while the loop has new weights to send."""
    said: list[str] = []
    with engines(tiny, tmp_path, "none", said) as both, ThreadPoolExecutor(1) as thread:
        both.send(further(tiny, 1))
        both.settle()
        death = both.submit(1, FaultyWorker.die)
        replacing = thread.submit(both.result, death)
        while not said:
            time.sleep(0.01)
        second = further(tiny, 2)
        both.send(second)
        assert both.settle() < 1e-5
        replacing.result(60)
        assert len(said) == 1
        for logps in both.group.call(RolloutWorker.weight_check, [CHECK_T]):
            np.testing.assert_allclose(logps, second.logps, rtol=0, atol=1e-5)
