"""One receiver of a broadcast in a process of its own: prints what arrived, or why not, as JSON."""

from __future__ import annotations

import json
import sys
import time

from isotrain.errors import WeightUpdateError
from isotrain.rollout import broadcast
from isotrain.rollout.base import WeightUpdate
from isotrain.rollout.transfer import checksum


def damaged(data: memoryview) -> int:
    return checksum(data) ^ 1


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        started = time.perf_counter()
        # As if a bit had changed on the way.
        broadcast.checksum = damaged if order["damage"] else checksum
        try:
            update = WeightUpdate(**order["update"])
            tensors = list(broadcast.receive_update(update, order["name"], order["timeout"]))
            answer = {
                "sums": {name: float(tensor.double().sum()) for name, tensor in tensors},
                "types": {name: str(tensor.dtype) for name, tensor in tensors},
                "shapes": {name: list(tensor.shape) for name, tensor in tensors},
            }
        except WeightUpdateError as error:
            answer = {"error": str(error)}
        print(json.dumps({**answer, "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
