"""One whole weight update of a vLLM engine against a plain copy of the same bytes in memory. Lower is better.

The model is SmolLM2-135M in bfloat16. In each turn the weights are written to shared memory with their digest
(`write_update`) and taken by an engine in the same process (`update_weights`: map, verify, load, repack), and
before and after that they are copied from one buffer to another. `ratio` is the median over the turns of the
update's time over the mean of both copies. The phases are measured one by one in turns of their own. In the
same turns the weights go the way of an asynchronous run, with the host in the place of devices: sent through
sockets into the engine's second buffer (`send`), and loaded from there (`load`), for which alone generation
stops. `second_buffer` is both of them over the copy.

All of it with one thread and then, in a process of its own, with two: a colocated engine has as many as its
machine has cores. `ratio` is that of one thread, which is what the goal was set for. A run's
`timing_s/update_weights` is longer: it also has the gathering of shards, the cast to the engine's type, the
calls through Ray and the weight check.

    python benchmarks/weight_sync.py [--turns 9] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import bench

GOAL = 20.0
TIMEOUT = 120.0


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def measure(turns: int) -> Iterator[dict[str, Any]]:
    import torch
    from smollm2 import smollm2
    from transformers import AutoModelForCausalLM

    from isotrain.rollout.vllm import VllmEngine
    from isotrain.weights.devices import BroadcastTransport
    from isotrain.weights.digest import HOST, checksum
    from isotrain.weights.file import host_bytes, open_update, write_update

    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=bench.DTYPE)
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    size = sum(tensor.nbytes for _, tensor in weights)
    source = torch.cat([tensor.reshape(-1) for _, tensor in weights])
    target = torch.empty_like(source)
    engine = VllmEngine(
        smollm2(), name="engine", dtype=bench.DTYPE, device_type="cpu", max_length=256, cache_bytes=1 << 28
    )

    sender = BroadcastTransport().open("127.0.0.1", 1, TIMEOUT, HOST)

    def buffered(version: int) -> tuple[float, float]:
        """Seconds until the second buffer has all, and those of loading it."""
        started = time.perf_counter()
        announced = sender.announce(version, size, TIMEOUT)
        engine.receive(announced)
        sent = sender.send(weights, version)
        there = time.perf_counter()
        engine.update_weights(replace(announced, tensors=sent.tensors, bytes=sent.bytes, digest=sent.digest))
        return there - started, time.perf_counter() - there

    def verify() -> None:
        with open_update(update, "engine"):
            pass

    def digest() -> None:
        for _, tensor in weights:
            checksum(host_bytes(tensor))

    ratios, copies = [], []
    names = ("write", "of which digest", "verify", "take", "send", "load")
    phases: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 2):  # the first two fill both files and are left out
        before = seconds(lambda: target.copy_(source))
        started = time.perf_counter()
        update = write_update(weights, turn)
        written = time.perf_counter()
        engine.update_weights(update)
        ended = time.perf_counter()
        copy = (before + seconds(lambda: target.copy_(source))) / 2
        sending, loading = buffered(turn)
        if turn > 1:
            phases["send"].append(sending)
            phases["load"].append(loading)
            ratios.append((ended - started) / copy)
            copies.append(copy)
            phases["write"].append(written - started)
            phases["take"].append(ended - written)
            phases["verify"].append(seconds(verify))
            phases["of which digest"].append(seconds(digest))
        print(f"turn {turn}: copy {copy:.3f} s, update {ended - started:.3f} s", file=sys.stderr, flush=True)
        if turn > 1:
            total = bench.spread([a + b for a, b in zip(phases["write"], phases["take"], strict=True)])
            yield {
                "ratios": bench.spread(ratios),
                "second_buffer": bench.spread(
                    [
                        (sent + loaded) / copied
                        for sent, loaded, copied in zip(phases["send"], phases["load"], copies, strict=True)
                    ]
                ),
                "bytes": size,
                "tensors": len(weights),
                "copy_s": bench.spread(copies),
                "update_s": total,
                "update_gb_per_s": round(size / total["median"] / 1e9, 3),
                "copy_gb_per_s": round(size / bench.spread(copies)["median"] / 1e9, 3),
                "phases_s": {phase: bench.spread(values) for phase, values in phases.items()},
            }
    engine.close()


def measured_with(threads: int, turns: int) -> Iterator[dict[str, Any]]:
    """In a process of its own, because the number of threads is read when torch is imported."""
    quick = ["--quick"] if bench.QUICK else []
    command = [sys.executable, __file__, "--turns", str(turns), "--alone", *quick]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("turn "):
                yield json.loads(line.removeprefix("turn "))
    if process.returncode:
        raise SystemExit(f"the measurement ended with code {process.returncode}")


def main() -> None:
    parser = bench.Options(__doc__, turns=2, threads=[1])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.read()
    if options.alone:
        for told in measure(options.turns):
            print("turn " + json.dumps(told), flush=True)
        return
    named: dict[str, Any] = {}
    for threads in options.threads:
        for told in measured_with(threads, options.turns):
            named[f"threads_{threads}"] = told
            ratio = named[f"threads_{options.threads[0]}"]["ratios"]["median"]
            bench.report("weight_sync", ratio, goal=GOAL, met=ratio <= GOAL, **named)


if __name__ == "__main__":
    main()
