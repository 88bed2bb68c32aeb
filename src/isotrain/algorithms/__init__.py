"""Pure maths: losses, advantages and divergences, one small file each. Imports torch and nothing else."""

from isotrain.algorithms.sft import sft_loss

# `algorithm.name` to its loss.
SUPERVISED_LOSSES = {"sft": sft_loss}
