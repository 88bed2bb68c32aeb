"""Weights from device memory to device memory of other processes, on the simulated npu."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import npusim
import pytest
import torch
import torch_npu
from receivers import Receiver, ready

from isotrain.errors import WeightUpdateError
from isotrain.weights.devices import CollectiveCarrier, HostCarrier, _DeviceCarrier
from isotrain.weights.digest import HOST, ROW_BYTES, bucket_checksum, checksum
from isotrain.weights.stream import Control, Deadline, StreamSender
from isotrain.weights.transport import TRANSPORTS

pytestmark = pytest.mark.heavy

BUCKET = 1 << 20
# Starting a simulated device takes a while.
TIMEOUT = 60.0
DEVICE = torch.device("npu:0")


@pytest.fixture(scope="module")
def receivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Receiver]]:
    """On another device than the sender's, and on the same one."""
    environment = npusim.environment(host=tmp_path_factory.mktemp("machine"))
    # The sender is a process of this machine, too: HCCL's ports are not in the way.
    environment |= {"HCCL_NPU_SOCKET_PORT_RANGE": "auto", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}
    with ready(*(Receiver(f"engine {index}", f"npu:{index}", environment) for index in (1, 0))) as made:
        yield made


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """12 MiB, in three types, one of them larger than a bucket."""
    draw = torch.Generator().manual_seed(0)
    for layer in range(16):
        yield f"layers.{layer}.w", torch.randn(256, 256, generator=draw).to("npu:0")
        yield f"layers.{layer}.t", torch.randn(255, 255, generator=draw).to("npu:0").t()
        yield f"layers.{layer}.b", torch.randn(33, generator=draw).bfloat16().to("npu:0")
    yield "embedding", torch.randn(1000, 500, generator=draw).to("npu:0")
    yield "scalar", torch.tensor(4.0, device="npu:0")
    yield "empty", torch.empty(0, 3, device="npu:0")
    yield "steps", torch.arange(5, device="npu:0")


def opened(transport: str, receivers: int, device: torch.device = DEVICE) -> StreamSender:
    sender = TRANSPORTS[transport].open("127.0.0.1", receivers, TIMEOUT, device)
    assert isinstance(sender, StreamSender)
    return sender


@pytest.mark.parametrize(
    ("transport", "device"), [("broadcast", HOST), ("broadcast", DEVICE), ("ipc", DEVICE)]
)
def test_every_transport_brings_the_same(
    receivers: list[Receiver], transport: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCarrier, "bucket_bytes", BUCKET)
    monkeypatch.setattr(_DeviceCarrier, "bucket_bytes", BUCKET)
    taking = receivers[1:] if transport == "ipc" else receivers
    sender = opened(transport, len(taking), device)
    digests = set()
    for version in (4, 5):
        announced = sender.announce(version, 0, TIMEOUT)
        for receiver in taking:
            receiver.order(announced, timeout=TIMEOUT)
        sent = sender.send(weights(), version)
        expected = {name: float(tensor.cpu().double().sum()) for name, tensor in weights()}
        assert (sent.version, sent.tensors) == (version, len(expected))
        digests.add(sent.digest)
        for receiver in taking:
            arrived = receiver.read()
            assert arrived["sums"] == expected
            assert arrived["shapes"] == {name: list(tensor.shape) for name, tensor in weights()}
            assert arrived["devices"] == [device.type]
            digests.add(arrived["digest"])
    # The same number whether host or device has added the bytes up.
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("transport", "buffered"), [("broadcast", False), ("broadcast", True), ("ipc", False)]
)
def test_no_weight_passes_through_host_memory(
    transport: str, buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither side needs more than two buckets beside the weights, or beside a second buffer of them."""
    monkeypatch.setattr(_DeviceCarrier, "bucket_bytes", BUCKET)
    held = [(name, tensor) for name, tensor in weights() if tensor.nbytes <= BUCKET]
    size = sum(tensor.nbytes for _, tensor in held)
    with ready(Receiver("engine", "npu:0" if transport == "ipc" else "npu:1", npusim.environment())) as (
        receiver,
    ):
        sender = opened(transport, 1)
        announced = sender.announce(1, 0, TIMEOUT)
        receiver.order(announced, timeout=TIMEOUT, sums=False, buffered=buffered)
        torch.npu.reset_peak_memory_stats(0)
        before, copied = torch.npu.memory_allocated(0), torch_npu._C.copied_bytes()
        sender.send(held, 1)
        arrived = receiver.read()
    assert arrived["types"].keys() == {name for name, _ in held}
    assert torch.npu.max_memory_allocated(0) - before <= 2 * BUCKET
    rows = sum(-(-tensor.nbytes // ROW_BYTES) * ROW_BYTES for _, tensor in held)
    assert arrived["peak"] <= 2 * BUCKET + (rows if buffered else 0)
    # One check sum of eight bytes for each bucket.
    buckets = 2 * size // BUCKET + 1
    for bytes_copied in (torch_npu._C.copied_bytes() - copied, arrived["copied"]):
        assert bytes_copied <= 8 * buckets < size / 10_000


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_work_for_the_device_grows_with_buckets_and_not_with_tensors(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one copy of each tensor into its bucket. A check sum of each tensor was 14 kernels a side."""
    monkeypatch.setattr(_DeviceCarrier, "bucket_bytes", BUCKET)
    held = [(f"experts.{number}", torch.randn(33, 31).to("npu:0")) for number in range(500)]
    buckets = -(-len(held) * ROW_BYTES // BUCKET)
    with ready(Receiver("engine", "npu:0" if transport == "ipc" else "npu:1", npusim.environment())) as (
        receiver,
    ):
        sender = opened(transport, 1)
        receiver.order(sender.announce(1, 0, TIMEOUT), timeout=TIMEOUT, sums=False)
        kernels, waits = torch_npu._C.kernel_launches(), torch_npu._C.host_waits()
        sender.send(held, 1)
        arrived = receiver.read()
    # One check sum of a bucket is what the host waits for.
    assert torch_npu._C.host_waits() - waits == arrived["waits"] == buckets
    assert torch_npu._C.kernel_launches() - kernels <= len(held) + 10 * buckets
    assert arrived["kernels"] <= 10 * buckets


@pytest.mark.parametrize("damage", ["bit", "exchanged", "unwritten"])
def test_finds_damage_on_the_device(receivers: list[Receiver], damage: str) -> None:
    sender = opened("ipc", 1)
    receivers[1].order(sender.announce(1, 0, TIMEOUT), damage=damage, timeout=TIMEOUT)
    with pytest.raises(WeightUpdateError, match=r"weight update 1: engine 0: .*damaged: digest"):
        sender.send(weights(), 1)
    assert receivers[1].read()["error"].startswith("engine 0: weight update 1 is damaged: digest")


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_a_sender_that_fails_says_so(receivers: list[Receiver], transport: str) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(weights())
        raise ValueError("out of memory")

    sender = opened(transport, 1)
    receivers[1].order(sender.announce(1, 0, TIMEOUT), timeout=TIMEOUT)
    with pytest.raises(ValueError, match="out of memory"):
        sender.send(stream(), 1)
    assert "the sender aborted weight update 1: ValueError" in receivers[1].read()["error"]


def test_sums_of_host_and_device_are_the_same() -> None:
    draw = torch.Generator().manual_seed(1)
    for rows in (1, 2, 3, 129):
        data = torch.randint(0, 256, (rows * ROW_BYTES,), generator=draw, dtype=torch.uint8)
        expected = bucket_checksum(data)
        assert expected == checksum(data.numpy().data) == bucket_checksum(data.to("npu"))
        for place in (0, len(data) // 2, len(data) - 1):
            for bit in (1, 128):
                data[place] ^= bit
                assert bucket_checksum(data.to("npu")) != expected
                data[place] ^= bit
        if rows > 1:
            exchanged = data.view(rows, -1).roll(1, 0).reshape(-1)
            assert bucket_checksum(exchanged.to("npu")) != expected


def test_the_host_shares_no_device_memory() -> None:
    sender = opened("ipc", 0, HOST)
    sender.announce(1, 0, TIMEOUT)
    with pytest.raises(WeightUpdateError, match="cannot be sent from device to device: cpu is none"):
        sender.send([], 1)


def test_a_stuck_broadcast_ends_its_communicator() -> None:
    """HCCL's groups inherit torch's `abort`, which does nothing, and have a call of their own."""
    reasons: list[str] = []
    stuck = SimpleNamespace(is_completed=lambda: False)
    carrier = object.__new__(CollectiveCarrier)
    carrier._control = cast(Control, SimpleNamespace(deadline=Deadline(0.0)))
    carrier._group = SimpleNamespace(broadcast=lambda *_: stuck, abort_hccl_comm=reasons.append)
    with pytest.raises(WeightUpdateError, match="did not arrive within 0 s"):
        carrier.send(torch.zeros(1))
    assert reasons == ["a bucket of weights did not arrive within 0 s"]
