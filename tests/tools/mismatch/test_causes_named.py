"""Causes put into the reference engine are named by the experiments, and nothing is named where none is."""

from __future__ import annotations

from pathlib import Path

import mismatch_causes
import pytest

CASES = ("stale tensor", "raw log-probs at T=0.7", "top-p convention", "template off by one", "bf16 head")
OTHERS = ("other batch composition", "decode kernel", "wrong rope in one layer", "re-tokenised turn")


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine's part of all cases, one engine for all of them."""
    work = tmp_path_factory.mktemp("cases")
    mismatch_causes.measure_all(work, tiny / "model", "hf", [*CASES, *OTHERS], 2, "float32")
    return work


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_the_cause_is_named_with_its_share(measured: Path, case: str) -> None:
    result = mismatch_causes.judge(measured, case, "float32")
    assert result["largest"] == result["cause"] and result["part"] > 0.9, result
    assert result["outcome"] == "fault" and len(result["faults"]) == 1, result
    assert abs(result["rest"]) < 0.05


def test_the_stale_tensor_is_named(measured: Path) -> None:
    (fault,) = mismatch_causes.judge(measured, "stale tensor", "float32")["faults"]
    assert mismatch_causes.STALE in fault and fault.startswith("1 of ")


@pytest.mark.parametrize("seed", range(2))
def test_an_honest_engine_is_not_accused(measured: Path, seed: int) -> None:
    result = mismatch_causes.judge(measured, f"honest {seed}", "float32")
    assert result["outcome"] == "explained" and not result["faults"] and result["nats"] < 1e-5


@pytest.mark.heavy
def test_rounding_of_bfloat16_hides_no_fault(tiny: Path, tmp_path: Path) -> None:
    """Each of them is larger than the rounding, and its two ends agree."""
    cases = ["stale tensor", "wrong rope in one layer", "template off by one"]
    mismatch_causes.measure_all(tmp_path, tiny / "model", "hf", cases, 1, "bfloat16")
    for case in cases:
        result = mismatch_causes.judge(tmp_path, case, "bfloat16")
        assert result["largest"] == result["cause"] and result["part"] > 0.8, result
        assert abs(result["ends"][0] - result["ends"][1]) < 0.1 and result["rest"] < 0.05, result
        assert result["outcome"] == "fault" and len(result["faults"]) == 1, result
    honest = mismatch_causes.judge(tmp_path, "honest 0", "bfloat16")
    assert honest["outcome"] == "explained" and honest["largest"] == "dtype", honest


@pytest.mark.heavy
def test_routes_of_a_mixture(tmp_path: Path) -> None:
    model = mismatch_causes.model_directory("mixture", tmp_path)
    mismatch_causes.measure_all(tmp_path, model, "hf", ["routing"], 1, "float32")
    routing = mismatch_causes.judge(tmp_path, "routing", "float32")
    assert routing["largest"] == "routing" and routing["part"] > 0.5 and routing["outcome"] == "fault", (
        routing
    )
    honest = mismatch_causes.judge(tmp_path, "honest 0", "float32")
    assert honest["outcome"] == "explained" and not honest["faults"], honest
