"""The attention that training uses on this device, forward and backward, beside float64 on the host.

H: query heads, G: key/value heads, T: packed tokens, D: head size, L: tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
from transformers import AttentionInterface

from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine, choose_attention
from isotrain.engine.world import World, join_world
from isotrain.models.load import IMPLEMENTATIONS
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.tools.doctor.self_test.verdicts import Reporter, SelfTestSetting, Stage, own_setting
from isotrain.tools.probes.operator_errors import deviation
from isotrain.tools.probes.operator_oracles import attention as by_formula

LENGTHS = (37, 200, 1, 64, 200)
Dtype = Literal["float32", "bfloat16"]
# The norm of the difference over that of the result: some rounding units of the type, and none of a mistake.
ALLOWED: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 2e-2}


# Plain, and what the device has in its place.
FUSED: tuple[Literal["off", "auto"], ...] = ("off", "auto")


@dataclass
class AttentionCall:
    """One layer's attention: what went in and came out, with gradients after the backward pass."""

    query_HTD: torch.Tensor
    key_GTD: torch.Tensor
    value_GTD: torch.Tensor
    output_THD: torch.Tensor
    scale: float | None


@dataclass
class Spy:
    """Stands in for the attention function of one name, calls it, and keeps what passes."""

    function: Callable[..., tuple[torch.Tensor, None]]
    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **extras: Any,
    ) -> tuple[torch.Tensor, None]:
        output, nothing = self.function(module, query, key, value, *args, **extras)
        for tensor in (query, key, value, output):
            tensor.retain_grad()
        self.calls.append(AttentionCall(query, key, value, output, extras.get("scaling")))
        return output, nothing


def main() -> None:
    setting = own_setting()
    device = choose_device(setting.device)
    reporter = Reporter(setting.verdicts)
    with join_world(device) as world:
        with reporter.stage("attention") as stage:
            kinds: dict[str, str] = {}
            calls: dict[str, tuple[Dtype, list[AttentionCall]]] = {}
            for dtype, fused in product(ALLOWED, FUSED):
                model = _section(setting, dtype, fused)
                kind = choose_attention(setting.tiny / "model", model, device)
                if kinds.get(dtype) == kind:
                    continue  # there is no fused one
                label = dtype if fused == "off" else f"{dtype} fused"
                kinds[label] = kind
                calls[label] = dtype, _run(model, kind, device, world)
                for layer, call in enumerate(calls[label][1]):
                    _compare(stage, f"{label} output", call.output_THD, by_float64(call)[0], dtype, layer)
            stage.result = _sentence(stage, kinds)
        with reporter.stage("attention-backward") as stage:
            for label, (dtype, layers) in calls.items():
                for layer, call in enumerate(layers):
                    gradients = (call.query_HTD.grad, call.key_GTD.grad, call.value_GTD.grad)
                    for name, gradient, expected in zip(
                        ("query", "key", "value"), gradients, by_float64(call)[1:], strict=True
                    ):
                        assert gradient is not None
                        _compare(stage, f"{label} gradient of {name}", gradient, expected, dtype, layer)
            stage.result = _sentence(stage, kinds)


def _section(setting: SelfTestSetting, dtype: Dtype, fused: Literal["off", "auto"]) -> ModelSection:
    """Without checkpointing: each layer's attention is then called once."""
    path = str(setting.tiny / "model")
    return ModelSection(path=path, dtype=dtype, gradient_checkpointing=False, fused=fused)


def _run(model: ModelSection, kind: str, device: Device, world: World) -> list[AttentionCall]:
    """A forward and backward pass of the small model as training does it."""
    engine = build_engine(model, OptimizerSection(), device=device, world=world, seed=0)
    name = IMPLEMENTATIONS[kind]
    functions: Any = AttentionInterface()
    spy = Spy(functions[name])
    AttentionInterface.register(name, spy)  # after building, which registers some of them itself
    draw = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(4, 500, (sum(LENGTHS),), generator=draw).to(world.device)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS]).to(world.device)
    every_T = torch.arange(len(tokens_T), device=world.device)

    def objective(head: Any) -> torch.Tensor:
        loss: torch.Tensor = head.nll_share(len(tokens_T))
        return loss

    try:
        engine.model(tokens_T, positions_T, LENGTHS, every_T, tokens_T, objective).backward()
    finally:
        AttentionInterface.register(name, spy.function)
    return spy.calls


def by_float64(call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """Output and gradients of query, key and value by the formula, sample by sample."""
    inputs = [
        tensor.detach()[0].cpu().double().requires_grad_()
        for tensor in (call.query_HTD, call.key_GTD, call.value_GTD)
    ]
    parts = zip(*(tensor.split(LENGTHS, dim=1) for tensor in inputs), strict=True)
    outputs_HLD = [by_formula(q, k, v, is_causal=True, scale=call.scale) for q, k, v in parts]
    output_THD = torch.cat(outputs_HLD, dim=1).transpose(0, 1)
    assert call.output_THD.grad is not None
    output_THD.backward(call.output_THD.grad.detach()[0].cpu().double().reshape(output_THD.shape))
    gradients = [tensor.grad for tensor in inputs]
    return output_THD.detach(), *(gradient for gradient in gradients if gradient is not None)


def _compare(
    stage: Stage, what: str, computed: torch.Tensor, expected: torch.Tensor, dtype: Dtype, layer: int
) -> None:
    seen = deviation(computed.detach()[0].cpu().reshape(expected.shape), expected)
    assert seen is not None
    error = float("inf") if seen.non_finite else seen.error
    stage.at_most(f"{what}, layer {layer}: error", error, ALLOWED[dtype])


def _sentence(stage: Stage, kinds: dict[str, str]) -> str:
    worst = {
        label: max(
            value for name, value in stage.metrics.items() if name.startswith((f"{label} o", f"{label} g"))
        )
        for label in kinds
    }
    return "; ".join(f"{label.split()[0]} ({kinds[label]}) within {worst[label]:.1e}" for label in kinds)


if __name__ == "__main__":
    main()
