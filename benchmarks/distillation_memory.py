"""Peak memory of a full-vocabulary divergence from a teacher, over that of one matrix of the policy's logits.

1,024 response tokens, a vocabulary of 152,000, hidden size 896, forward and backward, on the host in float32.
Both heads are there before; what is counted comes on top. `whole` is torch on all logits at once. A chunk's
logits are 64 MiB by default (`model.logits_chunk`), and a divergence keeps several of both models.

    python benchmarks/distillation_memory.py [--tokens 1024] [--vocabulary 152000]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import bench

HIDDEN = 896
# Two copies of the head's gradient, of 0.88 matrices each, are in it.
GOAL = 3.0
LOSSES = ("forward-kl", "reverse-kl", "jsd")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_side(options: argparse.Namespace) -> None:
    from functools import partial

    import torch

    from isotrain.algorithms.distillation import divergence
    from isotrain.engine.build import LOGIT_BYTES
    from isotrain.models.packed import TokenHead

    loss, _, side = options.side.partition(" ")
    tokens, vocabulary = options.tokens, options.vocabulary
    draw = torch.Generator().manual_seed(0)
    hidden_ND, other_ND = (torch.randn(tokens, HIDDEN, generator=draw) for _ in range(2))
    weight_VD, other_VD = (torch.randn(vocabulary, HIDDEN, generator=draw) / 30 for _ in range(2))
    weight_VD.requires_grad_()
    hidden_ND.requires_grad_()
    weight_VD.grad = torch.zeros_like(weight_VD)
    targets_N = torch.zeros(tokens, dtype=torch.long)
    before = peak()
    compare = partial(divergence, loss, None)
    if side == "whole":
        values_N = compare(hidden_ND @ weight_VD.T, other_ND @ other_VD.T)
    else:
        chunk = max(1, LOGIT_BYTES // (4 * vocabulary))
        teacher = TokenHead(other_ND, other_VD, targets_N, chunk)
        values_N = TokenHead(hidden_ND, weight_VD, targets_N, chunk).divergences(teacher, compare)
    values_N.mean().backward()
    print(json.dumps({"bytes": peak() - before, "mean": values_N.mean().item()}))


def measured(side: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, *sys.argv, "--side", side], stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = bench.Options(__doc__, tokens=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.read()
    if options.side:
        return run_side(options)
    matrix = 4 * options.tokens * options.vocabulary
    sides = {loss: {side: measured(f"{loss} {side}") for side in ("chunks", "whole")} for loss in LOSSES}
    worst = max(side["chunks"]["bytes"] for side in sides.values())
    bench.report(
        "distillation_memory",
        worst / matrix,
        goal=GOAL,
        met=worst / matrix <= GOAL if options.tokens >= 1024 else None,
        matrix_gib=matrix / 2**30,
        gib={
            loss: {name: side["bytes"] / 2**30 for name, side in both.items()} for loss, both in sides.items()
        },
        means_agree=all(
            abs(both["chunks"]["mean"] - both["whole"]["mean"]) <= 1e-4 * abs(both["whole"]["mean"])
            for both in sides.values()
        ),
    )


if __name__ == "__main__":
    main()
