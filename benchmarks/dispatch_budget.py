"""Kernels, waits of the host and bytes through host memory of what a step repeats. Lower is better.

On the simulated npu, which counts every operator that is given to the device and every time that the host
waits for a result of it:

- `weights`: one weight update of a mixture of experts from one process to another, by both ways that devices
  have. Kernels and waits of each side, for each tensor and each GB; bytes that pass through host memory. What
  an engine does with the tensors is not part of it, but its copies of them to the device are. Also what an
  asynchronous run does: `second_buffer` today, `file` before.
- `training`: one update of the tiny model, with and without fused operators. Kernels and waits of one further
  layer, as the difference between four layers and two. A fused operator counts as one kernel forward and one
  backward, whatever the simulation computes it from.
- `sampling`: vLLM's own function draws the next tokens of 64 responses, with a seed each and without.
- `switch`: a colocated rank with policy and reference leaves the device to its engine and comes back, in the
  order of an online run, the first time and later. What sending the weights takes is in `weights`; an engine
  that sleeps discards its own.

`ratio` is the number of kernels of both sides for each tensor of a weight update. A simulation counts calls:
what a kernel costs on a chip, and into how many kernels its libraries divide an operator, it does not know.

    PYTHONPATH=tests/device/npusim/site python benchmarks/dispatch_budget.py [--bucket 16777216]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bench
from weight_streams import open_sender

# A copy into the bucket, and what belongs to the bucket.
GOAL = 2.0
HOST_SHARE = 0.01
DEVICE_ROUTES = ("broadcast", "ipc", "second_buffer")
TIMEOUT = 300.0
RESPONSES, VOCABULARY = 64, 4096
LENGTHS = (37, 64, 27)


# What the simulation's fused operators are made of, less one kernel for each of them.
inner: Counter[str] = Counter()
FUSED = ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_grouped_matmul")


def counts() -> dict[str, int]:
    return {name: value - inner[name] for name, value in counted().items()}


def counted() -> dict[str, int]:
    import torch_npu

    device = torch_npu._C
    return {
        "kernels": int(device.kernel_launches()),
        "waits": int(device.host_waits()),
        "host_bytes": int(device.copied_bytes()),
    }


@contextmanager
def one_kernel() -> Iterator[None]:
    before = counted()
    yield
    inner.update({name: value - before[name] for name, value in counted().items()})
    inner["kernels"] -= 1


def as_one(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, counted once forward and once backward."""
    import torch

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rebuild: Callable[..., Any], *tensors: Any) -> Any:
            # Without the hooks of checkpointing, which would compute the layer again inside of the operator.
            kept = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
            with one_kernel(), kept, torch.enable_grad():
                ctx.given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
                made = rebuild(*ctx.given)
            ctx.single = isinstance(made, torch.Tensor)
            ctx.made = [made] if ctx.single else list(made)
            results = [m.detach() if isinstance(m, torch.Tensor) else m for m in ctx.made]
            return results[0] if ctx.single else tuple(results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with one_kernel():
                pairs = [
                    (m, g)
                    for m, g in zip(ctx.made, gradients, strict=True)
                    if g is not None and isinstance(m, torch.Tensor) and m.requires_grad
                ]
                wanted = [t for t in ctx.given if t.requires_grad]
                made, given = zip(*pairs, strict=True)
                found = iter(torch.autograd.grad(made, wanted, given, allow_unused=True))
                return None, *(next(found) if t.requires_grad else None for t in ctx.given)

    def call(*args: Any, **kwargs: Any) -> Any:
        values, tree = tree_flatten((args, kwargs))
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]

        def rebuild(*tensors: Any) -> Any:
            filled = dict(zip(places, tensors, strict=True))
            again, named = tree_unflatten([filled.get(n, v) for n, v in enumerate(values)], tree)
            return operator(*again, **named)

        tensors = [values[place] for place in places]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return Once.apply(rebuild, *tensors)  # type: ignore[no-untyped-call]
        with one_kernel():
            return rebuild(*tensors)

    from torch.utils._pytree import tree_flatten, tree_unflatten

    return call


def since(before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in counts().items()}


def weights(layers: int, experts: int) -> Iterator[tuple[str, Any]]:
    """Tensors as published files of a mixture name them, with small experts."""
    import torch

    def new(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16).to("npu:0")

    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", new(512, 512)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", new(512)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", new(96, 512)


def receive(device: str) -> None:
    """The engine's process: takes tensor after tensor and keeps none."""
    import torch

    from isotrain.weights.second_buffer import SecondBuffer
    from isotrain.weights.update import WeightUpdate

    torch.zeros(1, device=device)
    before, buffer = counts(), SecondBuffer("engine", torch.device(device))
    for line in sys.stdin:
        update = WeightUpdate.from_json(json.loads(line))
        if update.bytes and not update.digest:
            buffer.begin(update, TIMEOUT)
            continue
        with buffer.open(update, TIMEOUT) as contents:
            for _, tensor in contents.tensors:
                tensor.to(device)
        break
    print(json.dumps(since(before)))


def tell(child: subprocess.Popen[str], update: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(asdict(update)) + "\n")
    child.stdin.flush()


def weight_update(route: str, bucket: int, layers: int, experts: int) -> dict[str, Any]:
    held = list(weights(layers, experts))
    size = sum(tensor.nbytes for _, tensor in held)
    transport = "broadcast" if route == "second_buffer" else route
    sender, child = open_sender(transport, bucket, __file__, TIMEOUT)
    assert child.stdout is not None
    before = counts()
    if route != "file":
        announced = sender.announce(1, size if route == "second_buffer" else 0, TIMEOUT)
        tell(child, announced)
    sent = sender.send(held, 1)
    if route == "file":
        tell(child, sent)
    elif route == "second_buffer":
        told = {"tensors": sent.tensors, "bytes": sent.bytes, "digest": sent.digest}
        tell(child, replace(announced, **told))
    sides = {"sender": since(before), "receiver": json.loads(child.stdout.readline())}
    child.wait(timeout=60)
    both = {name: sum(side[name] for side in sides.values()) for name in before}
    return {
        "tensors": len(held),
        "bytes": size,
        "buckets": -(-size // bucket),
        **sides,
        "kernels_per_tensor": both["kernels"] / len(held),
        "kernels_per_gb": both["kernels"] / size * 1e9,
        "waits": both["waits"],
        "host_bytes_per_gb": both["host_bytes"] / size * 1e9,
        "host_share": both["host_bytes"] / size,
    }


def update(model: Path, fused: str, dtype: str) -> dict[str, int]:
    """The second update: the first one also makes what is kept."""
    import torch_npu

    for name in FUSED:  # before transformers asks for them
        setattr(torch_npu, name, as_one(getattr(torch_npu, name)))

    from isotrain.device.detect import choose_device
    from isotrain.engine.build import build_engine
    from isotrain.engine.world import join_world
    from isotrain.recipe.schema import ModelSection, OptimizerSection

    device = choose_device("npu")
    section = ModelSection.model_validate({"path": str(model), "dtype": dtype, "fused": fused})
    with join_world(device) as world:
        engine = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
        for _ in range(2):
            before = counts()
            learn(engine)
        return since(before)


def learn(engine: Any) -> None:
    import numpy as np

    from isotrain.data.items import Sample
    from isotrain.data.packing import pack

    draw = np.random.default_rng(0)
    samples = [Sample(draw.integers(4, 500, n).astype(np.int32), np.ones(n, np.bool_)) for n in LENGTHS]
    engine.step([pack(samples)], lambda head, tokens: head.nll_share(tokens), 1e-3)


def training(dtype: str) -> dict[str, Any]:
    """Of one further layer."""
    from isotrain.data.prepare.tiny import make_tiny

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for architecture in ("qwen3", "qwen3_moe"):
            models = {layers: Path(directory) / f"{architecture}-{layers}" for layers in (2, 4)}
            for layers, path in models.items():
                make_tiny(
                    path, train_rows=1, validation_rows=1, architecture=architecture, layers=layers,
                    hidden=128, heads=2, kv_heads=1,
                )  # fmt: skip
            for fused in ("off", "auto"):
                by_depth = {layers: _apart(path / "model", fused, dtype) for layers, path in models.items()}
                layer = {name: (by_depth[4][name] - by_depth[2][name]) / 2 for name in by_depth[2]}
                result[f"{architecture} fused={fused}"] = layer
    return result


def _apart(model: Path, fused: str, dtype: str) -> dict[str, int]:
    """In a process of its own: a process joins a world of ranks once."""
    command = [sys.executable, __file__, "--update", str(model), "--fused", fused, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise SystemExit(done.stderr)
    last: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return last


def sampling() -> dict[str, Any]:
    """Kernels of one token of all responses."""
    import torch

    try:
        from vllm.v1.sample.ops.topk_topp_sampler import random_sample
    except ImportError as missing:
        return {"not_counted": str(missing)}
    result: dict[str, Any] = {"responses": RESPONSES}
    for name, seeded in (("seeded", True), ("unseeded", False)):
        generators = {row: torch.Generator("npu").manual_seed(row) for row in range(RESPONSES * seeded)}
        probs = torch.full((RESPONSES, VOCABULARY), 1 / VOCABULARY, device="npu")
        before = counts()
        random_sample(probs, generators)
        result[name] = since(before)["kernels"]
    return result


def switch(dtype: str) -> dict[str, Any]:
    from isotrain.data.prepare.tiny import make_tiny
    from isotrain.device.detect import choose_device
    from isotrain.engine.build import build_engine, build_reference
    from isotrain.engine.offload import offload, onload
    from isotrain.engine.world import join_world
    from isotrain.recipe.schema import ModelSection, OptimizerSection

    device = choose_device("npu")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, join_world(device) as world:
        make_tiny(Path(directory), train_rows=1, validation_rows=1, layers=4, hidden=128)
        section = ModelSection.model_validate({"path": f"{directory}/model", "dtype": dtype})
        policy = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
        reference = build_reference(section, device=device, world=world)
        for name in ("first", "later"):
            learn(policy)
            before, held = counts(), device.memory().allocated
            offload(policy, keep_weights=True)
            offload(reference)  # now the engine wakes up, and the weights are sent
            offload(policy)
            freed = held - device.memory().allocated
            onload(policy)
            onload(reference)
            copied = since(before)
            share = copied["host_bytes"] / freed
            result[name] = {**copied, "held_bytes": freed, "host_share": share}
    return result


def main() -> None:
    parser = bench.Options(__doc__, layers=1, experts=32)
    parser.add_argument("--bucket", type=int, default=16 << 20, help="bytes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--part", choices=["weights", "training", "sampling", "switch"])
    for hidden in ("--receive", "--update", "--fused"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.read()
    os.environ.setdefault("NPU_SIM_DEVICES", "2")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    if options.receive:
        receive(options.receive)
    elif options.update:
        print(json.dumps(update(Path(options.update), options.fused, options.dtype)))
    else:
        sizes, part = (options.bucket, options.layers, options.experts), options.part
        others: dict[str, Callable[[], dict[str, Any]]] = {
            "training": lambda: training(options.dtype),
            "sampling": sampling,
            "switch": lambda: switch(options.dtype),
        }
        if part in others:
            bench.show(name="dispatch_budget", **others[part]())
            return
        sent = {name: weight_update(name, *sizes) for name in (*DEVICE_ROUTES, "file")}
        worst = max(sent[name]["kernels_per_tensor"] for name in DEVICE_ROUTES)
        bench.report(
            "dispatch_budget",
            worst,
            goal=GOAL,
            met=worst <= GOAL and max(sent[name]["host_share"] for name in DEVICE_ROUTES) <= HOST_SHARE,
            bucket=options.bucket,
            weights=sent,
            **({} if part else {name: count() for name, count in others.items()}),
        )


if __name__ == "__main__":
    main()
