"""TRL 1.16 against isotrain on the same rows, model, batch size and optimizer. Higher is better.

What each algorithm's metrics mean is told in `versus_trl_sft.py`, `versus_trl_preference.py` and
`versus_trl_grpo.py`.

    python benchmarks/versus_trl.py --algorithm sft [--turns 5] [--steps 3]
    python benchmarks/versus_trl.py --algorithm dpo|kto|rm [--turns 5] [--steps 1]
    python benchmarks/versus_trl.py --algorithm grpo [--turns 4] [--lengths natural] [--prompts sums]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import bench
import versus_trl_grpo as grpo
import versus_trl_preference as preference
import versus_trl_sft as sft
from smollm2 import smollm2


def main() -> None:
    parser = bench.Options(__doc__, turns=1, steps=1)
    parser.add_argument("--algorithm", required=True, choices=["sft", *preference.ALGORITHMS, "grpo"])
    parser.add_argument("--turns", type=int, help="turns of each side that count (5, grpo: 4)")
    parser.add_argument("--steps", type=int, help="steps of a turn (1, sft: 3)")
    parser.add_argument(
        "--lengths", choices=["equal", "natural"], default="equal", help="of responses, in grpo"
    )
    parser.add_argument(
        "--prompts", choices=["questions", "sums"], default="questions", help="out of GSM8K, in grpo"
    )
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing, in grpo")
    parser.add_argument("--model", type=Path, help="another model for grpo (SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--side", choices=[*sft.SIDES, *preference.SIDES, *grpo.SIDES], help=argparse.SUPPRESS
    )
    options = parser.read()
    if options.algorithm == "sft":
        turns, steps = options.turns or 5, options.steps or 3
        if options.side:
            sft.run_side(options.side, turns, steps)
        else:
            sft.compare(turns)
        return
    if options.algorithm in preference.ALGORITHMS:
        turns, steps = options.turns or 5, options.steps or 1
        if options.side:
            preference.run_side(options.algorithm, options.side, turns, steps)
        else:
            preference.compare(options.algorithm, turns, steps)
        return
    turns, steps = options.turns or 4, options.steps or 1
    model = grpo.prepared_model(options.model or smollm2(), options.lengths)
    if options.side:
        grpo.run_side(options.side, model, steps, options.prompts, not options.keep_activations)
    else:
        grpo.compare(turns, options.lengths, options.prompts, not options.keep_activations)


if __name__ == "__main__":
    main()
