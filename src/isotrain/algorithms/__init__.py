"""Pure maths: losses, advantages and divergences, one small file each. Imports torch and nothing else."""

from isotrain.algorithms.advantages import ADVANTAGES
from isotrain.algorithms.aggregate import AGGREGATIONS
from isotrain.algorithms.kl import KL_ESTIMATORS
from isotrain.algorithms.policy import POLICY_LOSSES
from isotrain.algorithms.sft import sft_loss

# `algorithm.name` to its loss.
SUPERVISED_LOSSES = {"sft": sft_loss}

__all__ = ["ADVANTAGES", "AGGREGATIONS", "KL_ESTIMATORS", "POLICY_LOSSES", "SUPERVISED_LOSSES", "sft_loss"]
