"""Operators of a step beside float64: what is compared, how, and that training does not notice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from isotrain.tools.probes.operator_errors import OperatorRecorder, deviation
from isotrain.tools.probes.operator_oracles import attention
from isotrain.trainers.launch import launch
from support import stable_metrics, tiny_recipe

EPS = 2.0**-23


def only(errors: OperatorRecorder) -> dict[str, Any]:
    (row,) = errors.as_json()["operators"]
    return dict(row)


def by_name(errors: OperatorRecorder) -> dict[str, dict[str, Any]]:
    return {row["operator"]: row for row in errors.as_json()["operators"]}


def test_deviation_equals_a_sum_by_hand() -> None:
    oracle = torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64)
    seen = deviation(torch.tensor([3.0, -4.01, 0.0]), oracle)
    assert seen is not None
    assert seen.error == pytest.approx(0.01 / 5, rel=1e-4)
    assert seen.non_finite == 0
    # A sum whose terms cancel is judged by what they are.
    left = torch.tensor([1e-9], dtype=torch.float64)
    cancelled = deviation(torch.tensor([5e-8]), left, least_norm=1.0)
    assert cancelled is not None and cancelled.error == pytest.approx(4.9e-8, rel=1e-3)


def test_signed_shares_and_their_standard_errors() -> None:
    """A gain that is put in comes out; rounding alone is within its own standard error."""
    torch.manual_seed(0)
    oracle = torch.randn(256, 64, dtype=torch.float64)
    noise = 1e-3 * torch.randn(256, 64, dtype=torch.float64)
    honest = deviation(oracle + noise, oracle)
    gained = deviation(1.002 * oracle + noise, oracle)
    assert honest is not None and gained is not None
    assert honest.blocks == 64
    error = 1e-3 / 128  # of a mean over 128 x 128 numbers
    assert honest.gain.error == pytest.approx(error, rel=0.3) and abs(honest.gain.value) < 4 * error
    assert gained.gain.value == pytest.approx(0.002, abs=4 * error)
    assert gained.gain.error == pytest.approx(error, rel=0.3)
    # Beside terms that cancel, what is left is a share of them.
    small = deviation(1.5 * oracle, oracle, least_norm=1000 * float(oracle.norm()))
    assert small is not None and small.gain.value == pytest.approx(0.0005)
    assert small.gain.error == pytest.approx(0, abs=1e-12)


def test_what_is_not_finite_is_counted_unless_the_type_cannot_hold_it() -> None:
    oracle = torch.tensor([1.0, 2.0, 1e39, -3e38], dtype=torch.float64)
    seen = deviation(torch.tensor([1.0, math.nan, math.inf, -3e38]), oracle)
    assert seen is not None and seen.non_finite == 1
    assert seen.error == 0  # beside masks no error would be seen
    nothing = torch.zeros(2, dtype=torch.float64)
    wrong = deviation(torch.tensor([0.0, 1.0]), nothing)
    assert wrong is not None and wrong.error == 1


def test_what_an_operator_writes_to_is_compared(device_type: str) -> None:
    weights = [torch.full((3,), 0.1, device=device_type), torch.full((2, 2), 0.7, device=device_type)]
    with OperatorRecorder() as errors:
        weights[0].mul_(0.3)
        torch._foreach_mul_(weights, torch.tensor(0.7, device=device_type))
        torch._foreach_add_(weights, 0.1)
    rows = by_name(errors)
    assert set(rows) == {"aten.mul_.Tensor", "aten._foreach_mul_.Tensor", "aten._foreach_add_.Scalar"}
    assert all(0 < row["error"] < EPS for row in rows.values())
    assert rows["aten._foreach_add_.Scalar"]["shapes"] == "{1 x [3], 1 x [2, 2]}"


def test_the_fused_optimizer_is_compared() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.randn(8, 8)
    with OperatorRecorder() as errors:
        optimizer.step()
    assert by_name(errors)["aten._fused_adamw_.default"]["error"] < EPS


def test_only_what_computes_is_compared(device_type: str) -> None:
    x = torch.randn(4, 6, device=device_type)
    with OperatorRecorder(compared=1) as errors:
        x.t().contiguous().to(torch.bfloat16)
        torch.cat([x, x])
        x > 0  # noqa: B015
        x.argmax(-1)
        F.dropout(x, 0.5)
        torch.zeros_like(x)
        x.new_empty(3).normal_()
        for _ in range(3):
            x.exp()
        x.sum(0)
        x.sum(1)  # another argument, another comparison
    calls = {row["operator"]: row["calls"] for row in errors.as_json()["operators"]}
    calls.pop("aten.mul.Tensor", None)  # the host's dropout is made of others
    calls.pop("aten.div_.Scalar", None)
    assert calls == {"aten.exp.default": 3, "aten.sum.dim_IntList": 2}


def test_results_on_the_device_are_as_without(device_type: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 16, device=device_type)

    def compute() -> torch.Tensor:
        torch.manual_seed(1)
        return F.dropout(F.silu(x @ x), 0.3).softmax(-1)

    before = compute()
    with OperatorRecorder():
        assert torch.equal(compute(), before)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("mm", 600), ("bmm", 1500), ("add", 300), ("softmax", 700), ("lists", 700), ("in place", 300)],
)
def test_a_part_of_a_large_call_is_exact(name: str, limit: int) -> None:
    torch.manual_seed(0)
    wide, tall, batch = torch.randn(20, 30), torch.randn(30, 25), torch.randn(4, 20, 30)
    calls = {
        "mm": lambda: wide @ tall,
        "bmm": lambda: torch.bmm(batch, tall.expand(4, 30, 25)),
        "add": lambda: batch + wide[:, :1],
        "softmax": lambda: batch.softmax(-1),
        "lists": lambda: torch._foreach_add_(
            [torch.randn(300), torch.randn(20, 30)], [torch.randn(300), wide]
        ),
        "in place": lambda: batch.add_(wide),
    }
    with OperatorRecorder(largest=limit) as errors:
        calls[name]()
    assert errors.skipped_large == 0
    assert only(errors)["error"] < 2 * EPS


def test_large_calls_without_an_exact_part_are_counted() -> None:
    with OperatorRecorder(largest=10) as errors:
        torch.randn(100).cumsum(0)
        torch._foreach_norm([torch.randn(100)])
        torch.randn(100).softmax(0)
    assert errors.skipped_large == 3 and errors.as_json()["operators"] == []


def test_operators_that_the_host_cannot_compute_are_named() -> None:
    with torch.library._scoped_library("isotrain_test", "DEF") as library:
        library.define("narrow_only(Tensor x) -> Tensor")

        def narrow_only(x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:
                raise NotImplementedError("no kernel")
            return x + 1

        library.impl("narrow_only", narrow_only, "CPU")
        with OperatorRecorder() as errors:
            torch.ops.isotrain_test.narrow_only(torch.ones(3))
    assert errors.as_json()["no_oracle"] == ["isotrain_test.narrow_only.default"]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_that_of_torch(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    wanted = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=causal, scale=0.3, enable_gqa=True
    )
    found = attention(query.double(), key.double(), value.double(), is_causal=causal, scale=0.3)
    assert torch.allclose(found, wanted, atol=1e-14)
    with OperatorRecorder() as errors:
        F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    assert any("scaled_dot_product" in name for name in by_name(errors))


@pytest.mark.heavy
def test_a_run_records_its_first_step(tiny: Path, tmp_path: Path, device_type: str) -> None:
    dtype = "float32" if device_type == "cpu" else "bfloat16"

    def run(name: str, operators: bool, steps: int = 1) -> Path:
        recipe = tiny_recipe(
            tiny,
            tmp_path / name,
            device_type,
            model={"dtype": dtype},
            trainer={"steps": steps},
            optimizer={"schedule": "constant", "warmup_ratio": 0.0},
            observe={"operators": operators},
        )
        launch(recipe, "")
        return tmp_path / name

    plain, watched = run("plain", operators=False), run("watched", operators=True)
    assert stable_metrics(plain) == stable_metrics(watched)
    assert not (plain / "layer_trace").exists()
    record = watched / "layer_trace" / "operators.json"
    content = json.loads(record.read_text())
    assert (content["dtype"], content["device"]) == (dtype, device_type)
    assert content["no_oracle"] == [] and content["skipped_large"] == 0
    names = {row["operator"] for row in content["operators"]}
    assert {"aten.mm.default", "aten.rsqrt.default", "aten._foreach_norm.Scalar"} <= names
    assert {"aten.silu_backward.default", "aten._log_softmax_backward_data.default"} <= names
    assert any("adamw" in name for name in names)
    assert all(row["error"] < 0.01 and row["non_finite"] == 0 for row in content["operators"])
    if dtype == "float32":
        assert max(row["error"] for row in content["operators"]) < 50 * EPS
    record.unlink()
    run("watched", operators=True, steps=2)
    assert not record.exists()  # it went on after step 1
