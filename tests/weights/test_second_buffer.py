"""Weights that come while an engine generates, and wait beside it until it has finished."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from receivers import Receiver, ready
from transformers import AutoModelForCausalLM

from isotrain.children import in_background
from isotrain.errors import WeightUpdateError
from isotrain.models.conversion import Publisher
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine
from isotrain.trainers.online.engine_loop import EngineLoop, Prompts
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import Supply
from isotrain.weights.devices import BroadcastTransport, HostCarrier
from isotrain.weights.digest import HOST, Weight
from isotrain.weights.file import write_update
from isotrain.weights.second_buffer import Peers, SecondBuffer
from isotrain.weights.stream import ALIGNMENT, StreamSender, give_up, wait_for_end
from isotrain.weights.transport import rehearse_incoming
from isotrain.weights.update import StoreSource, WeightUpdate

pytestmark = pytest.mark.heavy

TIMEOUT = 30.0
PROMPT_P = np.arange(5, 15, dtype=np.int32)


def weights(tiny: Path, change: float = 0.0) -> Iterator[Weight]:
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    publish, draw = Publisher(model), torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        yield from publish(name, parameter.detach() + change * torch.randn(parameter.shape, generator=draw))


def opened(receivers: int = 1) -> StreamSender:
    return BroadcastTransport().open("127.0.0.1", receivers, TIMEOUT, HOST)


def source(sender: StreamSender) -> StoreSource:
    (only,) = sender.sources
    return only


def as_sent(announced: WeightUpdate, sent: WeightUpdate) -> WeightUpdate:
    return replace(announced, tensors=sent.tensors, bytes=sent.bytes, digest=sent.digest)


class Writing:
    """An engine in its loop, and how far its response is."""

    def __init__(self, tiny: Path, device_type: str, in_flight: bool) -> None:
        self.tokens, self._moved = 0, threading.Condition()
        device = torch.device(device_type)
        engine = HfEngine(tiny / "model", name="e", dtype="float32", device=device)
        draw, engine._ends = engine._draw, set()  # no end comes before its time
        self._goes_on = threading.Event()

        def counted(*args: Any) -> None:
            draw(*args)
            with self._moved:
                self.tokens += 1
                self._moved.notify_all()
            if self.tokens == 40:
                assert self._goes_on.wait(TIMEOUT)

        engine._draw = counted  # type: ignore[method-assign]
        self.engine, self.loop = engine, EngineLoop(lambda: engine, in_flight)

    def response(self) -> Any:
        supply = Supply([PromptRequest(0, 0)], 1)
        prompts = Prompts(
            supply,
            lambda taken: [Request(row, index, 0, 7, PROMPT_P) for index, row in taken],
            1,
            Sampling(48),
        )
        future = in_background(lambda: list(self.loop.generate(prompts)))
        self.wait_for(5)
        return future

    def wait_for(self, tokens: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self.tokens >= tokens, TIMEOUT)

    def go_on(self) -> None:
        self._goes_on.set()


@pytest.mark.parametrize("in_flight", [False, True])
def test_they_come_while_the_engine_generates(tiny: Path, device_type: str, in_flight: bool) -> None:
    """The sender is done before the response is; then the engine has exactly what was sent."""
    writing, sender = Writing(tiny, device_type, in_flight), opened()
    engine, response = writing.engine, writing.response()
    announced = sender.announce(3, 0, TIMEOUT)
    writing.loop.run(lambda: engine.receive(announced), beside=True)
    sent = sender.send(weights(tiny, 0.02), 3)
    wait_for_end(source(sender), 3, TIMEOUT)
    assert not response.done() and engine.version == 0
    updating = in_background(lambda: writing.loop.update(as_sent(announced, sent)))
    if in_flight:
        # Its loop is held at one token: the update may come before the next.
        assert not updating.done()
    writing.go_on()
    updating.result(TIMEOUT)
    (trajectory,) = response.result(TIMEOUT)[0]
    versions = trajectory.version_N.tolist()
    assert len(versions) == 48 and versions == sorted(versions) and versions[0] == 0
    assert versions[-1] == (3 if in_flight else 0)
    sequences = [np.arange(5, 30, dtype=np.int32)]
    (logp_T,) = writing.loop.run(lambda: engine.logps(sequences))
    engine.update_weights(write_update(list(weights(tiny, 0.02)), 3))
    assert engine.logps(sequences)[0].tobytes() == logp_T.tobytes()
    engine.update_weights(write_update(list(weights(tiny)), 4))
    assert abs(engine.logps(sequences)[0] - logp_T).max() > 1e-3


def test_one_that_is_given_up_leaves_the_engine_as_it_was(tiny: Path) -> None:
    """Two engines were to come, one has died: the other goes on, and takes the next update."""
    engine = HfEngine(tiny / "model", name="e", dtype="float32", device=HOST)
    sender = opened(receivers=2)
    announced = sender.announce(1, 0, TIMEOUT)
    engine.receive(announced)
    sending = in_background(lambda: sender.send(weights(tiny, 0.02), 1))
    waiting = in_background(lambda: wait_for_end(source(sender), 1, TIMEOUT))
    give_up(source(sender), 1, "rollout engine 1 died")
    with pytest.raises(WeightUpdateError, match="1 of 2 receivers came before it was given up: rollout eng"):
        sending.result(10)
    with pytest.raises(WeightUpdateError, match=r"weight update 1 was not sent: .*rollout engine 1 died"):
        waiting.result(10)
    (before,) = engine.logps([PROMPT_P])
    assert engine.version == 0
    engine.update_weights(write_update(list(weights(tiny)), 1))  # which does not look into the buffer
    assert engine.version == 1 and engine.logps([PROMPT_P])[0].tobytes() == before.tobytes()


def test_another_one_than_was_sent_is_refused(tiny: Path) -> None:
    buffer, sender = SecondBuffer("engine 0", HOST), opened()
    announced = sender.announce(1, 0, TIMEOUT)
    buffer.begin(announced, TIMEOUT)
    sent = as_sent(announced, sender.send(weights(tiny), 1))
    with (
        pytest.raises(WeightUpdateError, match="weight update 1 in its second buffer is another one"),
        buffer.open(replace(sent, digest="0" * 64), TIMEOUT),
    ):
        pass


class Workers:
    """Workers of one engine as threads, with a broadcast among them."""

    def __init__(self, size: int) -> None:
        self.size, self.moved = size, [0] * size
        self._meet = threading.Barrier(size, timeout=TIMEOUT)
        self._given: list[torch.Tensor | None] = [None] * size

    def peers(self, index: int) -> Peers:
        def broadcast(bucket: torch.Tensor, holder: int) -> None:
            self._given[index] = bucket
            self._meet.wait()
            given = self._given[holder]
            assert given is not None
            if index != holder:
                assert given.shape == bucket.shape and given.dtype == bucket.dtype
                bucket.copy_(given)
                self.moved[index] += len(bucket)
            self._meet.wait()

        return Peers(index, self.size, broadcast)

    def buffers(self) -> list[SecondBuffer]:
        return [SecondBuffer("engine 0", HOST, index, self.peers(index)) for index in range(self.size)]


def kept(buffer: SecondBuffer) -> int:
    buckets, _ = buffer._taking.result(TIMEOUT)
    return sum(len(bucket.bytes) for bucket in buckets if bucket.bytes is not None)


def test_workers_of_an_engine_keep_a_part_each_and_load_the_whole(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three buffers have the bytes of one update together, and every worker loads all of it, bit for bit."""
    monkeypatch.setattr(HostCarrier, "bucket_bytes", 1 << 14)
    workers, sender = Workers(3), opened(receivers=3)
    announced = sender.announce(1, 0, TIMEOUT)
    buffers = workers.buffers()
    for buffer in buffers:
        buffer.begin(announced, TIMEOUT)
    sent = as_sent(announced, sender.send(weights(tiny), 1))
    parts = [kept(buffer) for buffer in buffers]
    # What is between tensors counts in a bucket, and not in the update.
    assert sent.bytes <= sum(parts) <= sent.bytes + ALIGNMENT * sent.tensors
    # The largest tensor has a bucket of its own.
    largest = max(tensor.nbytes for _, tensor in weights(tiny))
    assert max(parts) - min(parts) <= largest

    def load(index: int) -> dict[str, torch.Tensor]:
        with buffers[index].open(sent, TIMEOUT) as contents:
            return {name: tensor.clone() for name, tensor in contents.tensors}

    expected = dict(weights(tiny))
    for loading in [in_background(lambda index=index: load(index)) for index in range(3)]:
        loaded = loading.result(TIMEOUT)
        assert list(loaded) == list(expected)
        for name, tensor in loaded.items():
            assert torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype
    assert [part + moved for part, moved in zip(parts, workers.moved, strict=True)] == [sum(parts)] * 3


def test_a_worker_that_fails_does_not_hold_up_the_others(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCarrier, "bucket_bytes", 1 << 14)
    workers, sender = Workers(2), opened(receivers=2)
    announced = sender.announce(1, 0, TIMEOUT)
    buffers = workers.buffers()
    for buffer in buffers:
        buffer.begin(announced, TIMEOUT)
    sent = as_sent(announced, sender.send(weights(tiny), 1))

    def load(index: int) -> int:
        with buffers[index].open(sent, TIMEOUT) as contents:
            for number, _ in enumerate(contents.tensors):
                if index == 1 and number == 1:
                    raise RuntimeError("the model has another shape")
            return number + 1

    first, second = (in_background(lambda index=index: load(index)) for index in range(2))
    assert first.result(TIMEOUT) == sent.tensors
    with pytest.raises(RuntimeError, match="another shape"):
        second.result(TIMEOUT)


def test_a_sender_says_why_there_is_no_update(tiny: Path) -> None:
    sender = opened()
    announced = sender.announce(2, 0, TIMEOUT)
    with ready(Receiver("engine 0")) as (receiver,):
        receiver.order(announced, damage="bit")
        with pytest.raises(WeightUpdateError, match="damaged"):
            sender.send(weights(tiny), 2)
    with pytest.raises(WeightUpdateError, match=r"weight update 2 was not sent: .*engine 0.*damaged"):
        wait_for_end(source(sender), 2, TIMEOUT)
    with pytest.raises(WeightUpdateError, match="does not send version 1, but 2"):
        wait_for_end(source(sender), 1, TIMEOUT)


def test_a_rehearsal_names_the_memory_that_is_missing() -> None:
    sender = opened()
    announced = sender.announce(-1, 1 << 60, TIMEOUT)
    error = rehearse_incoming(announced, "engine 0", TIMEOUT, HOST)
    assert (
        "no room for a second buffer of 1.15e+09 GB beside the engine: lower rollout.memory_utilization"
        in error
    )
    announced = opened().announce(-1, 1 << 60, TIMEOUT)
    assert "second buffer of 2.88e+08 GB" in rehearse_incoming(announced, "engine 0", TIMEOUT, HOST, 0, 4)
