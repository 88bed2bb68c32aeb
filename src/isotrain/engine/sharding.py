"""Splits a model over the mesh with FSDP2."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from isotrain.engine.world import World
from isotrain.errors import ModelError
from isotrain.models.packed import PackedModel
from isotrain.models.scalar import ScalarModel


def shard_model(model: PackedModel | ScalarModel, world: World, dtype: torch.dtype) -> None:
    """Shard each layer, then the rest; gradients are summed over ranks in float32, never averaged.

    Losses are shares of a global mean already (see `algorithms.sft`): averaging would divide twice.
    """
    if world.size == 1 and all(p.dtype == dtype for p in model.parameters()):
        return  # nothing to split and nothing to cast: FSDP would only copy every weight and gradient
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    pretrained = model.pretrained
    layer_names = set(pretrained._no_split_modules or ())
    layers = [module for module in pretrained.modules() if type(module).__name__ in layer_names]
    if not layers:
        raise ModelError(f"cannot tell the layers of {type(pretrained).__name__} apart to shard them")
    for module in [*layers, model]:
        if world.size == 1:
            # A single rank gathers nothing: freeing and refilling weights would only cost copies.
            fully_shard(module, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False)
            continue
        fully_shard(module, mesh=world.mesh, mp_policy=policy, reshard_after_forward=module is not model)
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
