"""How far two instruction sets round log-softmax and entropy apart, over tiny and real vocabularies.

Random logits in float32, beside float64. `ratio` is the mean error of the entropy with AVX2 kernels over that
with AVX-512 ones, for the largest vocabulary: both are correct, and neither shows what the other one does.

    python benchmarks/vocabulary_rounding.py [--rows 64] [--vocabularies 512 49152 151936]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import bench

CAPABILITIES = ("avx2", "avx512")


def errors(rows: int, vocabulary: int) -> dict[str, float]:
    """Signed means, as this process computes them."""
    import torch

    torch.manual_seed(0)
    logits_RV = 2.5 * torch.randn(rows, vocabulary)
    logp_RV, exact_RV = logits_RV.log_softmax(-1), logits_RV.double().log_softmax(-1)
    entropy_R = -torch.linalg.vecdot(logp_RV.exp(), logp_RV)
    exact_R = -torch.linalg.vecdot(exact_RV.exp(), exact_RV)
    return {
        "log_softmax": float((logp_RV.double() - exact_RV).mean()),
        "entropy": float((entropy_R.double() - exact_R).mean()),
    }


def measured(capability: str, rows: int, vocabulary: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--rows", str(rows), "--side", str(vocabulary)]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = bench.Options(__doc__, vocabularies=[512, 49152])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[512, 49152, 151936])
    parser.add_argument("--side", type=int, help="used by itself: measure one vocabulary in this process")
    options = parser.read()
    if options.side:
        print(json.dumps(errors(options.rows, options.side)))
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for vocabulary in sorted(options.vocabularies):
        found[str(vocabulary)] = {c: measured(c, options.rows, vocabulary) for c in CAPABILITIES}
        one, other = (abs(found[str(vocabulary)][c]["entropy"]) for c in CAPABILITIES)
        bench.report("vocabulary_rounding", one / max(other, 1e-12), goal=None, met=None, errors=found)


if __name__ == "__main__":
    main()
