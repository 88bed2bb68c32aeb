"""When a mismatch may be called explained: whatever would make that a lie turns the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isotrain.language import Language, said, using
from isotrain.tools.mismatch.attribution import Attribution, attribute
from isotrain.tools.mismatch.causes import CAUSES, ORDER
from isotrain.tools.mismatch.experiments import Findings
from isotrain.tools.mismatch.matter import correlation, effect, effective
from isotrain.tools.mismatch.report import as_text, effect_lines, table, write_report
from isotrain.tools.mismatch.verdict import Diagnosis, judge
from isotrain.tools.parity.report.text import plain

HONEST = Findings(["batch", "decode", "head", "dtype"], compared=20, modules_compared=4)


def attribution(
    parts: dict[str, float], rest: float = 0.0, *, sequences: int = 8, tokens: int = 32
) -> Attribution:
    """Causes that change all tokens by the same amount, in this order."""
    results, left = {}, sum(parts.values()) + rest
    order = list(parts)
    for removed in {frozenset(order[i:j]) for i in range(len(order) + 1) for j in range(i, len(order) + 1)}:
        value = left - sum(parts[name] for name in removed)
        results[removed] = [np.full(tokens, value) for _ in range(sequences)]
    return attribute(results, order)


def diagnosis(
    shares: dict[str, float] | None = None, rest: float = 0.0, dtype: str = "bfloat16", **changes: Any
) -> Diagnosis:
    size = {name: changes.pop(name) for name in ("sequences", "tokens") if name in changes}
    given = attribution(shares or {"batch": 0.002, "dtype": 0.01}, rest, **size)
    return judge(given, replace(HONEST, **changes), effect([np.full(32, 0.01)] * 8), dtype)


def test_rounding_is_explained() -> None:
    result = diagnosis()
    assert (result.outcome, result.exit_code) == ("explained", 0)
    assert "83 % rounding of the layers, 17 % batch composition, 0 % unexplained" in result.sentence
    assert "algorithm.rollout_correction.level: token" in result.remedies


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": ["model.norm.weight"]}, "model.norm.weight"),
        ({"convention": "raw"}, "at temperature 1"),
        ({"convention": "processed"}, "top-p"),
        ({"ids": "the prompt without its first token"}, "without its first token"),
        ({"stale_prefix": True}, "Cached prefixes"),
        ({"modules": {"model.layers.1.self_attn": 0.2}}, "model.layers.1.self_attn"),
        ({"shares": {"head": 0.002}, "dtype": "float32"}, "Precision of the head"),
        ({"shares": {"decode": 0.2}}, "Decode kernels"),
    ],
)
def test_a_fault_is_named(changes: dict[str, Any], words: str) -> None:
    result = diagnosis(**changes)
    assert (result.outcome, result.exit_code) == ("fault", 1)
    assert any(words in fault for fault in result.faults)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rest": 0.006}, "is left"),
        ({"rest": -0.005}, "is left"),
        ({"sequences": 3}, "too few"),
        ({"tokens": 5}, "too few"),
        ({"compared": 0}, "No weight"),
        ({"modules_compared": 0}, "No module"),
        ({"rounding_ratio": 4.0}, "The engine is 4.0 times as far from float32"),
        ({"rounding_ratio": 0.25}, "The trainer is 4.0 times as far from float32"),
        ({"tokens": 0}, "too few"),
        ({"active": ["recording"], "repeated": 0.4}, "does not repeat"),
        ({"shares": {"batch": float("nan")}}, "finite"),
    ],
)
def test_what_is_not_explained_is_said(changes: dict[str, Any], words: str) -> None:
    result = diagnosis(**changes)
    assert (result.outcome, result.exit_code) == ("unexplained", 3)
    assert any(words in problem for problem in result.problems)


def test_every_cause_has_a_remedy_or_advice() -> None:
    assert all(cause.remedy or cause.advice for cause in CAUSES.values())
    assert list(ORDER) == list(CAUSES)


def test_remedies_are_lines_of_a_recipe() -> None:
    from isotrain.recipe.library import locate
    from isotrain.recipe.load import check_values, load_recipe, resolved

    for remedy in [line for cause in CAUSES.values() for line in cause.remedy]:
        key, _, value = remedy.partition(": ")
        content: Any = resolved(load_recipe(locate("tiny-grpo"), [f"{key}={value}"]))
        for part in key.split("."):
            content = content[part]
        assert str(content) == value
    assert check_values


def test_the_report_has_a_picture_and_the_rows_add_up(tmp_path: Any) -> None:
    result = diagnosis()
    write_report(tmp_path, result, "run", plain(result.as_json()), as_text(result))
    assert (tmp_path / "mismatch.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "mismatch.json").read_text())
    parts = [share["part"] for share in content["shares"].values()] + [content["rest"]["part"]]
    assert sum(parts) == pytest.approx(1.0)
    assert [row[0] for row in table(result)][-2:] == ["unexplained rest", "whole"]
    with using(Language.zh):
        assert "每 token" in said(result.sentence) and "各层的舍入" in said(result.sentence)


def test_effective_samples_of_known_weights() -> None:
    assert effective(np.zeros(10)) == 1.0
    # One weight that outdoes all others leaves one sample.
    assert effective(np.array([800.0, *[0.0] * 9])) == pytest.approx(0.1)
    assert effective(np.log([1.0, 3.0])) == pytest.approx(16 / 20)


def test_an_effect_is_told_where_it_is() -> None:
    quiet = effect([np.full(4, 1e-3)] * 12, np.arange(12.0))
    assert not quiet.is_visible and quiet.clipped == 0.0
    grows = effect([np.full(4, 1e-3 * (n + 1)) for n in range(12)], np.arange(12.0))
    assert (
        grows.advantage is not None and grows.advantage.coefficient == pytest.approx(1.0) and grows.is_visible
    )
    heavy = effect([np.full(40, 0.2 * (-1) ** n) for n in range(12)])
    assert heavy.sequence_samples < 0.6 and heavy.token_samples > 0.9 and heavy.is_visible
    assert any("It can change the update" in line for line in effect_lines(heavy))
    assert np.isnan(correlation(np.ones(12), np.arange(12.0)).p)
