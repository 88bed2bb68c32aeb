"""One sender and two receivers in processes of their own, on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from receivers import TIMEOUT, Receiver, ready

from isotrain.children import in_background
from isotrain.errors import WeightUpdateError
from isotrain.weights.devices import BroadcastTransport, HostCarrier
from isotrain.weights.digest import HOST
from isotrain.weights.send import SendOrder, Sent, WeightSender
from isotrain.weights.stream import ALIGNMENT, StreamSender
from isotrain.weights.update import REHEARSAL, WeightUpdate

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Receiver]]:
    with ready(*(Receiver(f"engine {index}") for index in range(2))) as made:
        yield made


def opened(receivers: int) -> StreamSender:
    return BroadcastTransport().open("127.0.0.1", receivers, TIMEOUT, HOST)


def weights() -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(300, 7, generator=draw)),
        ("b", torch.randn(33, generator=draw).bfloat16()),
        ("large", torch.randn(900, 10, generator=draw).t()),
        ("scalar", torch.tensor(4.0)),
        ("empty", torch.empty(0, 3)),
        ("c", torch.arange(5)),
    ]


def test_all_receivers_have_the_same(
    receivers: list[Receiver], device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCarrier, "bucket_bytes", 10_000)  # several buckets, and a tensor larger than one
    sender = opened(2)
    for version in (4, 5):
        announced = sender.announce(version, 0, TIMEOUT)
        assert announced.sources == sender.sources
        for receiver in receivers:
            receiver.order(announced)
        sent = sender.send(((n, t.to(device_type)) for n, t in weights()), version)
        assert (sent.version, sent.tensors) == (version, len(weights()))
        assert sent.bytes == sum(tensor.nbytes for _, tensor in weights())
        for receiver in receivers:
            arrived = receiver.read()
            assert arrived["sums"] == {name: float(tensor.double().sum()) for name, tensor in weights()}
            assert arrived["types"] == {name: str(tensor.dtype) for name, tensor in weights()}
            assert arrived["shapes"] == {name: list(tensor.shape) for name, tensor in weights()}


@pytest.mark.parametrize("damage", ["bit", "exchanged", "unwritten"])
def test_finds_damage_on_the_way(receivers: list[Receiver], damage: str) -> None:
    sender = opened(2)
    announced = sender.announce(1, 0, TIMEOUT)
    receivers[0].order(announced)
    receivers[1].order(announced, damage=damage)
    with pytest.raises(WeightUpdateError, match=r"weight update 1: engine 1: .*damaged: digest"):
        sender.send(weights(), 1)
    assert "sums" in receivers[0].read()
    assert receivers[1].read()["error"].startswith("engine 1: weight update 1 is damaged: digest")


def test_a_bucket_arrives_while_the_one_before_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the one behind it: an engine has room for two."""
    monkeypatch.setattr(HostCarrier, "bucket_bytes", 2 * ALIGNMENT)
    honest, sizes, more = HostCarrier.receive, [], threading.Condition()

    def receive(self: HostCarrier, size: int, described: dict[str, Any]) -> torch.Tensor:
        bucket = honest(self, size, described)
        with more:
            sizes.append(size)
            more.notify_all()
        return bucket

    monkeypatch.setattr(HostCarrier, "receive", receive)
    sender = opened(1)
    announced = sender.announce(1, 0, TIMEOUT)
    two_in_a_bucket = [(f"w{number}", torch.full((ALIGNMENT // 4,), float(number))) for number in range(6)]
    sending = in_background(lambda: sender.send(two_in_a_bucket, 1))
    with BroadcastTransport().receive(announced, "engine", TIMEOUT, HOST) as contents:
        tensors = iter(contents.tensors)
        first, second = next(tensors), next(tensors)
        with more:
            assert more.wait_for(lambda: len(sizes) == 2, TIMEOUT)  # nobody has asked for it
        third = next(tensors)
        assert len(sizes) == 2
        names = [name for name, _ in (first, second, third, *tensors)]
    assert names == [name for name, _ in two_in_a_bucket] and sizes == [2 * ALIGNMENT] * 3
    assert sending.result(TIMEOUT).tensors == 6


def test_a_receiver_that_does_not_come_and_then_does(receivers: list[Receiver]) -> None:
    sender = opened(2)
    announced = sender.announce(1, 0, 1.0)
    receivers[0].order(announced, timeout=2.0)
    with pytest.raises(WeightUpdateError, match="weight update 1: 1 of 2 receivers came within 1 s"):
        sender.send(weights(), 1)
    left = receivers[0].read()
    assert "engine 0: weight update 1 did not arrive" in left["error"] and left["seconds"] < 30
    again = sender.announce(1, 0, TIMEOUT)  # the failed attempt leaves nothing behind
    for receiver in receivers:
        receiver.order(again)
    assert sender.send(weights(), 1).tensors == len(weights())
    assert all("sums" in receiver.read() for receiver in receivers)


def test_a_sender_that_fails_says_so(receivers: list[Receiver]) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()[:2]
        raise ValueError("out of memory")

    sender = opened(2)
    announced = sender.announce(1, 0, TIMEOUT)
    for receiver in receivers:
        receiver.order(announced)
    with pytest.raises(ValueError, match="out of memory"):
        sender.send(stream(), 1)
    for receiver in receivers:
        answer = receiver.read()
        assert "the sender aborted weight update 1: ValueError('out of memory')" in answer["error"]
        assert answer["seconds"] < TIMEOUT


def test_refuses_another_version_than_announced(receivers: list[Receiver]) -> None:
    sender = opened(1)
    sender.announce(3, 0, TIMEOUT)
    receivers[0].order(WeightUpdate(4, sender.sources, 0, 0, ""))
    assert "weight update 4 was announced" in receivers[0].read()["error"]


def test_a_rehearsal_that_nobody_comes_to(receivers: list[Receiver]) -> None:
    policy: Any = SimpleNamespace(world=SimpleNamespace(device=HOST, rank=0))
    rank = WeightSender(policy, torch.float32, lambda but_weights: None)
    order = SendOrder(REHEARSAL, "broadcast", "127.0.0.1", 2, timeout=0.5)
    announced = rank.announce(order)
    assert announced.update is not None
    receivers[0].order(announced.update, timeout=1.0)
    assert rank.send(order).error in (
        "WeightUpdateError: weight update -1: 1 of 2 receivers came within 0.5 s",
        "no end within 0.5 s",
    )
    assert "error" in receivers[0].read()
    order = replace(order, timeout=TIMEOUT)  # the next attempt knows nothing of it
    announced = rank.announce(order)
    assert announced.update is not None
    for receiver in receivers:
        receiver.order(announced.update)
    assert rank.send(order) == Sent()
    assert all(receiver.read()["shapes"] == {"rehearsal": [1024]} for receiver in receivers)
    elsewhere = replace(order, transport="ipc", host="203.0.113.1")
    assert rank.announce(elsewhere).error.startswith("rank 0 cannot listen on 203.0.113.1: ")
    assert rank.announce(replace(elsewhere, receivers=0)) == Sent()


def test_works_where_one_side_connects_on_demand_elsewhere(
    receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks of large jobs do: both sides must say the same here, or the group crashes."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    sender = opened(2)
    announced = sender.announce(1, 0, TIMEOUT)
    for receiver in receivers:
        receiver.order(announced)
    sender.send(weights(), 1)
    assert all("sums" in receiver.read() for receiver in receivers)


def test_nothing_listens_beyond_the_address_given(receivers: list[Receiver]) -> None:
    sender = opened(2)
    seen: set[str] = set()
    pids = [os.getpid(), *(receiver.process.pid for receiver in receivers)]

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights():
            sockets = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
            seen.update(
                line.split()[3] for line in sockets.splitlines() if any(f"pid={pid}," in line for pid in pids)
            )
            yield name, tensor

    announced = sender.announce(1, 0, TIMEOUT)
    for receiver in receivers:
        receiver.order(announced)
    sending = threading.Thread(target=sender.send, args=(stream(), 1))
    sending.start()
    sending.join(timeout=30)
    assert all("sums" in receiver.read() for receiver in receivers)
    assert len(seen) >= 4  # the store, and gloo in each of the three processes
    assert {address.rpartition(":")[0] for address in seen} == {"127.0.0.1"}
