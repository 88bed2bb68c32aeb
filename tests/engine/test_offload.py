"""A model that was in host memory is the same model, and its device memory was free meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from jobs import Job

from isotrain.device.detect import choose_device
from isotrain.engine.checkpoint import writer
from isotrain.engine.checkpoint.layout import step_directory
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.engine.offload import offload, onload
from isotrain.engine.state import engine_shards, optimizer_updates, restore
from isotrain.engine.world import join_world
from isotrain.models.packed import TokenHead
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.schema import TrainerSection
from isotrain.trainers.job import RankCheckpoints
from isotrain.weights.send import full_weights

Outcome = Callable[[str, int], Path]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["policy", "lora", "critic"])
def test_memory_is_given_away_and_training_is_not_changed(outcome: Outcome, ranks: int, kind: str) -> None:
    for found in jobs.results(outcome("npu", ranks), ranks):
        nothing, before, away, after = found[f"offload/{kind}/bytes"].tolist()
        assert before - nothing > 100_000 and after == before
        assert away - nothing < 1024, "only buffers stay"
        assert found[f"offload/{kind}/same"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_model_frees_its_memory_and_comes_back_bitwise(outcome: Outcome, ranks: int) -> None:
    for found in jobs.results(outcome("npu", ranks), ranks):
        freed, held = found["offload/reference/freed"].tolist()
        assert freed >= held > 100_000
        assert found["offload/reference/same"]


def test_an_offloaded_model_cannot_run(tiny: Path) -> None:
    device = choose_device("npu")
    with join_world(device) as world:
        job = Job(device, world, tiny / "model")
        engine = job.policy()
        offload(engine)
        for ask in (
            lambda: engine.infer(job.batches, TokenHead.logps),
            lambda: jobs.updates(engine, jobs.policy_objective, job.batches),
            lambda: next(full_weights(engine, torch.float32)),
            lambda: restore(engine, device, None),  # type: ignore[arg-type]
        ):
            with pytest.raises(AssertionError, match="offloaded"):
                ask()
        onload(engine)
        assert engine.infer(job.batches, TokenHead.logps)[0].isfinite().all()


@pytest.mark.parametrize("updated", [True, False])
def test_it_is_saved_from_host_memory(tiny: Path, updated: bool) -> None:
    device = choose_device("npu")
    with join_world(device) as world:
        job = Job(device, world, tiny / "model")
        engine = job.policy()
        if updated:
            jobs.updates(engine, jobs.policy_objective, job.batches)
            before, count = jobs.local(engine), optimizer_updates(engine)
            offload(engine)
        else:  # a critic's warm-up: there is no optimizer state yet, and no room on the device to make it
            offload(engine)
            before, count = {}, 0
        held = device.memory().allocated
        saved = engine_shards(engine)
        assert all(shard.local.device.type == "cpu" for shard in saved.values())
        assert optimizer_updates(engine) == count
        assert device.memory().allocated == held
        found = {name: shard.local for name, shard in saved.items()}
        onload(engine)
        wanted = before or jobs.local(engine)
        assert jobs.same(found, wanted), "also what has become of the copies after the model went back"
        jobs.updates(engine, jobs.policy_objective, job.batches)
        assert jobs.same(found, wanted) and not jobs.same(found, jobs.local(engine))
        written: list[bool] = []
        engine.before_reuse = lambda: written.append(jobs.same(found, wanted))
        buffers = {key: storage.data_ptr() for key, storage in engine.host_copies.items()}
        offload(engine)
        assert written == [True], "a checkpoint may be written from them until then"
        again = {key: storage.data_ptr() for key, storage in engine.host_copies.items()}
        assert {key: again[key] for key in buffers} == buffers, "host memory must not hold the state twice"
        onload(engine)


def test_it_waits_for_a_checkpoint_that_is_written_from_host_memory(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is in host memory once, also while it is written."""
    may_write = threading.Event()

    def held_back(*arguments: Any) -> Any:
        assert may_write.wait(timeout=60)
        return write_tensors(*arguments)

    monkeypatch.setattr(writer, "write_tensors", held_back)
    device = choose_device("npu")
    with join_world(device) as world:
        job = Job(device, world, tiny / "model")
        engine = job.policy()
        jobs.updates(engine, jobs.policy_objective, job.batches)
        expected = jobs.local(engine)
        run = RunDirectory(tmp_path)
        checkpoints = RankCheckpoints.open(run, TrainerSection(), device, {"": engine})
        offload(engine)
        checkpoints.save(3, {}, copied=True)
        onload(engine)
        jobs.updates(engine, jobs.policy_objective, job.batches)
        away = threading.Thread(target=lambda: offload(engine))
        away.start()
        away.join(0.5)
        assert away.is_alive(), "its copies would be written over"
        may_write.set()
        away.join(60)
        checkpoints.finish()
        assert checkpoints.writer.failure() is None
        reader = CheckpointReader(step_directory(run.checkpoints, 3))
        assert all(torch.equal(reader.whole(name), tensor) for name, tensor in expected.items())
        onload(engine)


def test_host_memory_is_pinned_and_used_again(tiny: Path) -> None:
    device = choose_device("npu")
    with join_world(device) as world:
        job = Job(device, world, tiny / "model")
        engine = job.policy()
        jobs.updates(engine, jobs.policy_objective, job.batches)
        offload(engine)
        first = {key: storage.data_ptr() for key, storage in engine.host_copies.items()}
        # Of a storage, torch 2.10 only knows whether CUDA has pinned it.
        copies = [torch.empty(0, dtype=torch.uint8).set_(one) for one in engine.host_copies.values()]
        assert first and all(copy.is_pinned() for copy in copies)
        onload(engine)
        jobs.updates(engine, jobs.policy_objective, job.batches)
        current = jobs.local(engine)
        offload(engine)
        assert {key: storage.data_ptr() for key, storage in engine.host_copies.items()} == first
        onload(engine)
        assert jobs.same(jobs.local(engine), current)


@torch.no_grad()
def test_frozen_weights_are_copied_once(tiny: Path) -> None:
    device = choose_device("npu")
    with join_world(device) as world:
        job = Job(device, world, tiny / "model")
        for engine in (job.reference(), job.policy(lora={"rank": 4})):
            frozen = next(p for name, p in engine.parameters.items() if name.endswith("embed_tokens.weight"))
            before = frozen.clone()
            offload(engine)
            onload(engine)
            frozen.zero_()  # nothing does this: it shows whether the next call reads the device
            offload(engine)
            onload(engine)
            assert torch.equal(frozen, before)


def test_a_switch_copies_what_is_trained_both_ways_and_the_rest_one_way(tiny: Path) -> None:
    """Between two updates, without a kernel or a wait of the host; frozen weights leave the device once."""
    import torch_npu

    device, counters = choose_device("npu"), torch_npu._C
    with join_world(device) as world:
        job = Job(device, world, tiny / "model")
        policy, reference = job.policy(), job.reference()
        for leave in (2, 1):
            jobs.updates(policy, jobs.policy_objective, job.batches, steps=1)
            calls = counters.kernel_launches(), counters.host_waits()
            held, copied = [device.memory().allocated], counters.copied_bytes()
            offload(policy, keep_weights=True)
            offload(policy)
            held.append(device.memory().allocated)
            offload(reference)
            held.append(device.memory().allocated)
            onload(policy)
            onload(reference)
            trained, frozen = held[0] - held[1], held[1] - held[2]
            assert trained > 2 * frozen > 0
            assert counters.copied_bytes() - copied == 2 * trained + leave * frozen
            assert (counters.kernel_launches(), counters.host_waits()) == calls


def test_on_the_host_there_is_nothing_to_do(tiny: Path) -> None:
    device = choose_device("cpu")
    with join_world(device) as world:
        engine = Job(device, world, tiny / "model").policy()
        places = [p.data_ptr() for p in engine.model.parameters()]
        offload(engine)
        assert [p.data_ptr() for p in engine.model.parameters()] == places and all(places)
        onload(engine)
