"""Bytes of weights that pass through host memory on their way from device to device. Lower is better.

A model of the size of SmolLM2-135M in bfloat16 (269 MB) goes from one process to another on the simulated
npu, by both ways that devices have: `collective` (HCCL, NCCL) to another device, and `shared`, in memory of
the same device that both processes see. `ratio` is what the simulated device copied to or from the host, on
both sides, over the bytes of the weights: what is left are check sums. `extra_buckets` is the most device
memory that each side needed beside the weights, in buckets of `--bucket` bytes (a run has 256 MiB).

The simulation proves what goes where. Its times are those of a CPU and are not reported.

    PYTHONPATH=tests/device/npusim/site python benchmarks/weight_streams.py [--bucket 67108864]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import bench

GOAL = 0.0001
MOST_BUCKETS = 2.0
LAYERS, HIDDEN, INNER, HEADS, VOCABULARY = 30, 576, 1536, 192, 49152
TIMEOUT = 120.0


def weights() -> Iterator[tuple[str, Any]]:
    """Shapes as SmolLM2-135M has them, the embedding, of 57 MB, in one piece."""
    import torch

    def new(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16).to("npu:0")

    yield "model.embed_tokens.weight", new(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HEADS, HIDDEN),
            "self_attn.v_proj": (HEADS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", new(*shape)
    yield "model.norm.weight", new(HIDDEN)


def memory(device: str) -> dict[str, int]:
    import torch
    import torch_npu

    module: Any = torch.get_device_module("npu")
    return {"copied": int(torch_npu._C.copied_bytes()), "peak": int(module.max_memory_allocated(device))}


def receive(device: str) -> None:
    """The engine's process: takes tensor after tensor and keeps none."""
    import torch

    from isotrain.weights.transport import open_incoming
    from isotrain.weights.update import WeightUpdate

    update = WeightUpdate.from_json(json.loads(sys.stdin.readline()))
    with open_incoming(update, "engine", TIMEOUT, torch.device(device)) as contents:
        for _ in contents.tensors:
            pass
    print(json.dumps(memory(device)))


def open_sender(
    transport: str, bucket: int, script: str, timeout: float
) -> tuple[Any, subprocess.Popen[str]]:
    """A sender on the first device, and `script --receive DEVICE` as the process of the other side."""
    import torch

    from isotrain.weights import devices
    from isotrain.weights.transport import TRANSPORTS

    devices._DeviceCarrier.bucket_bytes = bucket
    sender = TRANSPORTS[transport].open("127.0.0.1", 1, timeout, torch.device("npu:0"))
    target = "npu:0" if transport == "ipc" else "npu:1"
    command = [sys.executable, script, "--receive", target]
    return sender, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def announce(sender: Any, child: subprocess.Popen[str], timeout: float) -> None:
    """Tell the other side of the first update."""
    announced = sender.announce(1, 0, timeout)
    assert announced is not None and child.stdin is not None
    child.stdin.write(json.dumps(asdict(announced)) + "\n")
    child.stdin.flush()


def send(transport: str, bucket: int) -> dict[str, Any]:
    import torch

    held = list(weights())
    size = sum(tensor.nbytes for _, tensor in held)
    sender, child = open_sender(transport, bucket, __file__, TIMEOUT)
    assert child.stdout is not None
    module: Any = torch.get_device_module("npu")
    module.reset_peak_memory_stats(0)
    before = {"copied": memory("npu:0")["copied"], "peak": int(module.memory_allocated(0))}
    announce(sender, child, TIMEOUT)
    sender.send(held, 1)
    theirs = json.loads(child.stdout.readline())
    child.wait(timeout=60)
    after = memory("npu:0")
    copied = after["copied"] - before["copied"] + theirs["copied"]
    return {
        "bytes": size,
        "through_host": copied,
        "share": copied / size,
        "extra_buckets": {
            "sender": round((after["peak"] - before["peak"]) / bucket, 3),
            "receiver": round(theirs["peak"] / bucket, 3),
        },
    }


def main() -> None:
    parser = bench.Options(__doc__)
    parser.add_argument("--bucket", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.read()
    if options.receive:
        receive(options.receive)
        return
    os.environ.setdefault("NPU_SIM_DEVICES", "2")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    told = {name: send(name, options.bucket) for name in ("broadcast", "ipc")}
    worst = max(found["share"] for found in told.values())
    extra = max(most for found in told.values() for most in found["extra_buckets"].values())
    met = worst <= GOAL and extra <= MOST_BUCKETS
    bench.report("weight_streams", worst, goal=GOAL, met=met, bucket=options.bucket, **told)


if __name__ == "__main__":
    main()
