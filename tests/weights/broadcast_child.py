"""One receiver of a broadcast in a process of its own: prints what arrived, or why not, as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from isotrain.errors import WeightUpdateError
from isotrain.weights import stream
from isotrain.weights.digest import checksums
from isotrain.weights.transport import TRANSPORTS
from isotrain.weights.update import WeightUpdate


def damaged(bucket: torch.Tensor, places: list[tuple[int, int]]) -> list[int]:
    return [total ^ 1 for total in checksums(bucket, places)]


def receive(order: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """One tensor at a time, as an engine that copies each into its model does."""
    sums, types, shapes, devices = {}, {}, {}, set()
    update = WeightUpdate.from_json(order["update"])
    transport = TRANSPORTS[update.source().transport]
    with transport.receive(update, order["name"], order["timeout"], device) as contents:
        for name, tensor in contents.tensors:
            devices.add(tensor.device.type)
            sums[name] = float(tensor.cpu().double().sum()) if order["sums"] else 0.0
            types[name], shapes[name] = str(tensor.dtype), list(tensor.shape)
    return {"sums": sums, "types": types, "shapes": shapes, "digest": contents.digest, "devices": [*devices]}


def memory(device: torch.device) -> dict[str, int]:
    """Of the simulated npu: bytes copied to or from the host, and the most that was held."""
    if device.type == "cpu":
        return {}
    import torch_npu

    return {"copied": torch_npu._C.copied_bytes(), "peak": torch.npu.max_memory_allocated(device)}


def main() -> None:
    device = torch.device(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        started = time.perf_counter()
        # As if a bit had changed on the way.
        stream.checksums = damaged if order["damage"] else checksums
        try:
            answer = receive(order, device)
        except WeightUpdateError as error:
            answer = {"error": str(error)}
        seconds = time.perf_counter() - started
        print(json.dumps({**answer, **memory(device), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
