"""One whole weight update of an engine against a plain copy of the same bytes in memory. Lower is better.

The model is SmolLM2-135M in bfloat16. In each turn the weights go both ways, in alternating order, between
copies of them from one buffer to another:

- `file`: written to shared memory with their digest (`write`), and taken by an engine in the same process
  (`take`: map, verify, load, repack). It is how asynchronous runs sent weights everywhere once.
- `second_buffer`: sent into a second buffer of the engine (`send`), which generates meanwhile in a run, and
  loaded from there (`load`).

`ratio` is the median over the turns of the time of `file` over the mean of the copies, `second_buffer` that
of the other way, `after_over_before` its time over that of files. `stop_after_over_before` is `load` over
`take`: what stops an asynchronous engine.

By default the engine is vLLM on the host, and weights are sent through sockets. This runs with one thread and
then, in a process of its own, with two: a colocated engine has as many as its machine has cores. `ratio` is
that of one thread, which is what the goal was set for. A run's `timing_s/update_weights` is longer: it also
has the gathering of shards, the cast to the engine's type, the calls through Ray and the weight check.

With `--device npu` the weights are on one device of the simulated npu, and the engine, transformers, on
another. Then `ratio` is the share of the bytes that pass through host memory by way of the second buffer, and
each way has counts of both sides together: such bytes, kernels, waits of the host. The simulation is a host:
its seconds compare what the host does, and nothing of a chip or a link.

    python benchmarks/weight_sync.py [--turns 9] [--threads 1 2]
    PYTHONPATH=tests/device/npusim/site python benchmarks/weight_sync.py --device npu
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import bench

GOAL = 20.0
HOST_SHARE = 0.01
TIMEOUT = 120.0


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def measure(turns: int, kind: str) -> Iterator[dict[str, Any]]:
    import torch
    from dispatch_budget import counted
    from smollm2 import smollm2
    from transformers import AutoModelForCausalLM

    from isotrain.rollout.hf import HfEngine
    from isotrain.rollout.vllm import VllmEngine
    from isotrain.weights.devices import BroadcastTransport
    from isotrain.weights.digest import checksum
    from isotrain.weights.file import host_bytes, open_update, write_update

    home, there = (
        (torch.device(kind, 0), torch.device(kind, 1)) if kind == "npu" else [torch.device("cpu")] * 2
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=bench.DTYPE)
    weights = [(name, parameter.detach().to(home)) for name, parameter in model.named_parameters()]
    size = sum(tensor.nbytes for _, tensor in weights)
    source = torch.cat([tensor.reshape(-1) for _, tensor in weights])
    target = torch.empty_like(source)
    engine: Any
    if kind == "npu":
        engine = HfEngine(smollm2(), name="engine", dtype=bench.DTYPE, device=there, update_timeout=TIMEOUT)
    else:
        engine = VllmEngine(
            smollm2(), name="engine", dtype=bench.DTYPE, device_type=kind, max_length=256, cache_bytes=1 << 28
        )
    sender = BroadcastTransport().open("127.0.0.1", 1, TIMEOUT, home)

    def by_file(version: int) -> dict[str, float]:
        started = time.perf_counter()
        update = write_update(weights, version)
        written = time.perf_counter()
        engine.update_weights(update)
        taken = time.perf_counter()
        with open_update(update, "engine"):
            verified = time.perf_counter() - taken
        return {"write": written - started, "take": taken - written, "of which verify": verified}

    def by_second_buffer(version: int) -> dict[str, float]:
        started = time.perf_counter()
        announced = sender.announce(version, size, TIMEOUT)
        engine.receive(announced)
        sent = sender.send(weights, version)
        there = time.perf_counter()
        engine.update_weights(replace(announced, tensors=sent.tensors, bytes=sent.bytes, digest=sent.digest))
        return {"send": there - started, "load": time.perf_counter() - there}

    def digest() -> None:
        for _, tensor in weights:
            checksum(host_bytes(tensor))

    ways = {"file": by_file, "second_buffer": by_second_buffer}
    values: dict[str, list[float]] = defaultdict(list)
    made: dict[str, dict[str, float]] = {}
    for turn in range(turns + 2):  # the first two fill both files and are left out
        copies, of_turn = [seconds(lambda: target.copy_(source))], {}
        for way in ways if turn % 2 == 0 else reversed(ways):
            before = counted() if kind == "npu" else {}
            of_turn[way] = ways[way](turn)
            if before:
                made[way] = {name: value - before[name] for name, value in counted().items()}
            copies.append(seconds(lambda: target.copy_(source)))
        file, buffer, copy = of_turn["file"], of_turn["second_buffer"], mean(copies)
        whole = {"file": file["write"] + file["take"], "second_buffer": sum(buffer.values())}
        print(f"turn {turn}: copy {copy:.3f} s, {whole}", file=sys.stderr, flush=True)
        if turn <= 1:
            continue
        figures = {
            **{f"{way} over copy": duration / copy for way, duration in whole.items()},
            "after over before": whole["second_buffer"] / whole["file"],
            "stop": buffer["load"] / file["take"],
            "copy": copy,
            "of which digest": seconds(digest),
            **file,
            **buffer,
        }
        for name, value in figures.items():
            values[name].append(value)
        spread = {name: bench.spread(of_turns) for name, of_turns in values.items()}
        yield {
            "ratios": spread["file over copy"],
            "second_buffer": spread["second_buffer over copy"],
            "after_over_before": spread["after over before"],
            "stop_after_over_before": spread["stop"],
            "bytes": size,
            "tensors": len(weights),
            "copy_s": spread["copy"],
            "copy_gb_per_s": round(size / spread["copy"]["median"] / 1e9, 3),
            "phases_s": {phase: spread[phase] for phase in (*file, "of which digest", *buffer)},
            **{
                f"counted_{way}": {
                    "host_share": counts["host_bytes"] / size,
                    "kernels_per_gb": counts["kernels"] / size * 1e9,
                    **counts,
                }
                for way, counts in made.items()
            },
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
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.read()
    if options.alone:
        for told in measure(options.turns, options.device):
            print("turn " + json.dumps(told), flush=True)
        return
    if options.device == "npu":
        os.environ.setdefault("NPU_SIM_DEVICES", "2")
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
        for told in measure(options.turns, options.device):
            share = told["counted_second_buffer"]["host_share"]
            told["file"] = told.pop("ratios")  # those of times, and not of `ratio`
            bench.report("weight_sync", share, goal=HOST_SHARE, met=share <= HOST_SHARE, device="npu", **told)
        return
    named: dict[str, Any] = {}
    for threads in options.threads:
        for told in measured_with(threads, options.turns):
            named[f"threads_{threads}"] = told
            ratio = named[f"threads_{options.threads[0]}"]["ratios"]["median"]
            bench.report("weight_sync", ratio, goal=GOAL, met=ratio <= GOAL, **named)


if __name__ == "__main__":
    main()
