"""One receiver of a broadcast in a process of its own: prints what arrived, or why not, as JSON."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from isotrain.errors import WeightUpdateError
from isotrain.weights.devices import CollectiveCarrier, HostCarrier, SharedCarrier
from isotrain.weights.digest import ROW_BYTES, Contents
from isotrain.weights.second_buffer import SecondBuffer
from isotrain.weights.stream import wait_for_end
from isotrain.weights.transport import TRANSPORTS
from isotrain.weights.update import StoreSource, WeightUpdate


def damage(bucket: torch.Tensor, kind: str) -> None:
    """What went wrong on the way: each tensor of a bucket begins at a row of its own."""
    first, last = bucket[:ROW_BYTES], bucket[-ROW_BYTES:]
    before = bucket.clone()
    if kind == "bit":
        bucket[-ROW_BYTES] ^= 128
    elif kind == "exchanged":
        first.copy_(before[-ROW_BYTES:])
        last.copy_(before[:ROW_BYTES])
    elif kind == "unwritten":
        first.zero_()
    assert not kind or not torch.equal(before.cpu(), bucket.cpu())


def damaged(receive: Any, kind: str) -> Any:
    def spoilt(self: Any, size: int, described: dict[str, Any]) -> torch.Tensor:
        bucket: torch.Tensor = receive(self, size, described)
        damage(bucket, kind)
        return bucket

    return spoilt


def opened(
    update: WeightUpdate, order: dict[str, Any], device: torch.device
) -> AbstractContextManager[Contents]:
    source, name, timeout = update.source(), order["name"], order["timeout"]
    if not order["buffered"]:
        return TRANSPORTS[source.transport].receive(update, name, timeout, device)
    buffer = SecondBuffer(name, device)
    buffer.begin(update, timeout)
    assert isinstance(source, StoreSource)
    wait_for_end(source, update.version, timeout)
    # The controller tells engines what the sender has told it.
    _, digest = buffer._taking.result(timeout)
    return buffer.open(replace(update, digest=digest), timeout)


def receive(order: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """One tensor at a time, as an engine that copies each into its model does."""
    sums, types, shapes, devices = {}, {}, {}, set()
    update = WeightUpdate.from_json(order["update"])
    with opened(update, order, device) as contents:
        for name, tensor in contents.tensors:
            devices.add(tensor.device.type)
            sums[name] = float(tensor.cpu().double().sum()) if order["sums"] else 0.0
            types[name], shapes[name] = str(tensor.dtype), list(tensor.shape)
    return {"sums": sums, "types": types, "shapes": shapes, "digest": contents.digest, "devices": [*devices]}


def memory(device: torch.device) -> dict[str, int]:
    """Of the simulated npu: bytes copied to or from the host, kernels, waits for it, and the most it held."""
    if device.type == "cpu":
        return {}
    import torch_npu

    return {
        "copied": torch_npu._C.copied_bytes(),
        "kernels": torch_npu._C.kernel_launches(),
        "waits": torch_npu._C.host_waits(),
        "peak": torch.npu.max_memory_allocated(device),
    }


def main() -> None:
    device = torch.device(sys.argv[1])
    carriers = {carrier: carrier.receive for carrier in (HostCarrier, CollectiveCarrier, SharedCarrier)}
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        started = time.perf_counter()
        for carrier, honest in carriers.items():
            carrier.receive = damaged(honest, order["damage"]) if order["damage"] else honest  # type: ignore
        try:
            answer = receive(order, device)
        except WeightUpdateError as error:
            answer = {"error": str(error)}
        seconds = time.perf_counter() - started
        print(json.dumps({**answer, **memory(device), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
