"""What is known of the operators of our runs that the device does not run in one piece, and what to do."""

from __future__ import annotations

# The simulated device takes these apart where the wheel has a kernel, and a gradient, for the whole: the
# pieces that stand here never reach the real device.
PIECES = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "aten::scaled_dot_product_attention",
    "aten::repeat_interleave.Tensor": "aten::repeat_interleave.self_Tensor",
}

# Kernels that torch brings for every device, composed of other operators.
COMPOSITE = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)

# Would run on the host, with a copy there and back: none. A new entry says why it is there and what to do.
ON_HOST: dict[str, str] = {}

# Made to save launches, but on the device a loop over the tensors.
LOOPS = {
    "aten::_foreach_mul_.Tensor": (
        "gradient clipping multiplies by a factor that stays on the device: one launch per weight. The "
        "variant with a kernel takes a host number, which would wait for the device: leave it until a "
        "profile shows it"
    ),
}

# In double precision, which the chip computes slowly if at all: the simulated npu refuses it too.
IN_DOUBLE: dict[str, str] = {}
