"""Expert parallelism: a rank holds some of each layer's experts, and tokens travel to the ones they chose.

transformers exchanges the tokens. Within a group of neighbouring ranks each has other experts; ranks with the
same experts in other groups share those weights as FSDP shards them.
"""

from __future__ import annotations

from collections.abc import Iterator

import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.config import number_of_experts

DISPATCH = "ep_dispatch_experts"


def split_experts(pretrained: PreTrainedModel, ranks: DeviceMesh) -> None:
    """Give each rank of a group its own experts; the model is still on the meta device."""
    kind, experts = pretrained.config.model_type, number_of_experts(pretrained.config)
    plan: dict[str, str] = getattr(pretrained, "ep_plan", None) or {}
    if DISPATCH not in plan.values():
        raise ModelError(
            f"device.mesh.expert: transformers {transformers.__version__} cannot split the experts of model "
            f"type '{kind}'; set it to 1"
        )
    if experts % ranks.size():
        raise ModelError(
            f"device.mesh.expert: {experts} experts cannot be divided by {ranks.size()}; set a divisor"
        )
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    # Without tensor parallelism, there is no mesh of it.
    apply_expert_parallelism(pretrained, ranks, None, plan)  # type: ignore[arg-type]


def split_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Those whose experts are split over ranks."""
    return (module for module in model.modules() if getattr(module, "_is_expert_parallel", False))
