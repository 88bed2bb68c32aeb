"""Rows of a mixture on their way to experts: the device's stable sort and its grouped product.

T: tokens, K: experts that each of them chose, R = T * K: rows, D: hidden size, E: experts.
"""

from __future__ import annotations

import time

import torch

from isotrain.device.detect import choose_device
from isotrain.models.experts import rows_by_expert
from isotrain.tools.doctor.self_test.verdicts import (
    Reporter,
    SelfTestSetting,
    Stage,
    StageFailed,
    StageSkipped,
    own_setting,
)
from isotrain.tools.probes.operator_errors import deviation

# Those of 30B-A3B; 131,072 tokens of a micro-batch make the second number of rows.
EXPERTS, CHOSEN, TOKENS = 128, 8, (37, 131_072)
HIDDEN, INTERMEDIATE = 64, 32
# As for attention in bfloat16.
ALLOWED = 2e-2


def main() -> None:
    setting = own_setting()
    with Reporter(setting.verdicts).stage("experts") as stage:
        if setting.device == "cpu":
            raise StageSkipped("the device is the host itself")
        milliseconds = check_sort(setting, stage)
        stage.result = f"{TOKENS[-1] * CHOSEN:,} rows are in the host's order, {milliseconds:.0f} ms"
        if check_product(setting, stage):
            stage.result += f"; grouped product within {stage.metrics['grouped product: error']:.1e}"


def check_sort(setting: SelfTestSetting, stage: Stage) -> float:
    """Equal keys must keep their order: otherwise a rerun adds in another. Returns milliseconds of one."""
    device = choose_device(setting.device)
    on, took = device.activate(0), 0.0
    for tokens in TOKENS:
        chosen_TK = torch.randint(0, EXPERTS, (tokens, CHOSEN), generator=torch.Generator().manual_seed(0))
        there = chosen_TK.to(on)
        rows_by_expert(there, EXPERTS)  # the first call may compile
        device.synchronize()
        started = time.perf_counter()
        sorted_by_device = rows_by_expert(there, EXPERTS)
        device.synchronize()
        took = 1e3 * (time.perf_counter() - started)
        names = ("sorted experts", "order of rows", "rows of each expert")
        for name, computed, expected in zip(
            names, sorted_by_device, rows_by_expert(chosen_TK, EXPERTS), strict=True
        ):
            if wrong := int((computed.cpu() != expected).sum()):
                raise StageFailed(f"{name} of {chosen_TK.numel()} rows: {wrong} differ from the host's")
    stage.metrics["milliseconds of a sort"] = took
    return took


def check_product(setting: SelfTestSetting, stage: Stage) -> bool:
    """Whether the device has such an operator; experts without rows are among the groups."""
    device = choose_device(setting.device)
    if device.fused_operators is None:
        return False
    draw = torch.Generator().manual_seed(0)
    chosen_TK = torch.randint(0, EXPERTS, (TOKENS[0], CHOSEN), generator=draw)
    sorted_R, _, counts_E = rows_by_expert(chosen_TK, EXPERTS)
    rows_RD = torch.randn(len(sorted_R), HIDDEN, generator=draw).bfloat16()
    weights_EDI = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=draw).bfloat16()
    on = device.activate(0)
    computed_RI = device.fused_operators.grouped_matmul(rows_RD.to(on), weights_EDI.to(on), counts_E.to(on))
    expected_RI = torch.einsum("rd,rdi->ri", rows_RD.double(), weights_EDI.double()[sorted_R])
    seen = deviation(computed_RI.detach().cpu(), expected_RI)
    assert seen is not None
    error = float("inf") if seen.non_finite else seen.error
    stage.at_most("grouped product: error", error, ALLOWED)
    return True


if __name__ == "__main__":
    main()
