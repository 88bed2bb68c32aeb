from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.errors import DataError
from isotrain.tools.parity.levels.score_tests import FAMILY_WISE, ScoreTests, compared, score_tests
from isotrain.tools.parity.read.score_tests import Module, Record

STATED = {"scale": 32**-0.5, "epsilon": 1e-6, "base": 1e4}
KINDS = {
    "norm": ("epsilon", "gain", "bias"),
    "attention": ("scale", "gain", "bias"),
    "rotary": ("base", "gain"),
}
NAMES = {"norm": "model.norm", "attention": "model.layers.1.self_attn", "rotary": "model.rotary_emb"}


def module(kind: str, dtype: str = "bfloat16", clusters: int = 40, **changes: Any) -> dict[str, Any]:
    offs = changes.pop("offs", {})
    constants = [
        {
            **{"constant": name, "stated": STATED.get(name), "off": offs.get(name, 0.0), "error": 1e-4},
            **{"effect": 1.0, "confused": []},
        }
        for name in KINDS[kind]
    ]
    facts = {"module": NAMES[kind], "kind": kind, "dtype": dtype, "clusters": clusters, "rest": 1.0}
    return {**facts, "constants": constants, **changes}


def write(run: Path, *modules: dict[str, Any], rank: int = 0, ranks: int = 1, **facts: Any) -> Path:
    content = {"format": 1, "step": 1, "ranks": ranks, "model_type": "llama", "modules": list(modules)}
    (run / "score_tests").mkdir(parents=True, exist_ok=True)
    file = run / "score_tests" / f"step-000001-rank-{rank:05d}.json"
    file.write_text(json.dumps({**content, "not_tested": {}, **facts}))
    return run


def compare(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> ScoreTests:
    found = score_tests(write(tmp_path / "a", a), write(tmp_path / "b", b))
    assert found is not None
    json.dumps(found.as_json(), allow_nan=False)
    return found


def test_a_scale_is_named_with_its_size(tmp_path: Path) -> None:
    found = compare(tmp_path, module("attention"), module("attention", offs={"scale": 0.02}))
    (one,) = found.different
    assert (one.module, one.constant, one.candidate.state) == ("model.layers.1.self_attn", "scale", "off")
    assert one.reference.state == "as stated" and one.low < 0.02 < one.high
    assert found.words == (
        "model.layers.1.self_attn: the attention scale is 2.00 % too high (interval 1.96 to 2.04 %)"
    )


def test_the_reference_may_be_the_wrong_one(tmp_path: Path) -> None:
    found = compare(tmp_path, module("norm", offs={"gain": -0.01}), module("norm"))
    assert found.words.startswith("model.norm: the norm's gain is 1.00 % too low (interval 0.96 to 1.04 %)")
    assert found.words.endswith(" in the reference")


def test_both_off_alike_is_no_difference(tmp_path: Path) -> None:
    wrong = module("rotary", offs={"base": 0.01})
    found = compare(tmp_path, wrong, wrong)
    assert not found.different and found.findings[0].candidate.state == "off"
    assert found.words.startswith("2 of 2 constants are as the config states, or off alike")


@pytest.mark.parametrize(
    ("kind", "dtype", "offs", "different"),
    [
        ("attention", "bfloat16", {"scale": 0.0019}, False),
        ("attention", "bfloat16", {"scale": 0.0025}, True),
        ("attention", "float32", {"scale": 0.0012}, True),
        ("norm", "bfloat16", {"gain": 0.0004}, False),
        ("norm", "bfloat16", {"bias": -0.0008}, True),
        ("rotary", "bfloat16", {"gain": 0.0012}, False),
        ("norm", "bfloat16", {"epsilon": 0.05}, False),
        ("norm", "bfloat16", {"epsilon": 9.0}, True),
    ],
)
def test_what_is_of_no_consequence(
    tmp_path: Path, kind: str, dtype: str, offs: dict[str, float], different: bool
) -> None:
    found = compare(tmp_path, module(kind, dtype), module(kind, dtype, offs=offs))
    assert bool(found.different) == different


def test_an_interval_that_is_wide_decides_nothing(tmp_path: Path) -> None:
    own = module("attention", offs={"scale": 0.02})
    own["constants"][0]["error"] = 0.01
    found = compare(tmp_path, module("attention"), own)
    assert not found.different and found.not_resolved == 1
    own["constants"][0]["error"] = None
    assert not compare(tmp_path, module("attention"), own).different
    for clusters, different in ((40, True), (3, False)):
        few = module("attention", clusters=clusters, offs={"scale": 0.02})
        few["constants"][0]["error"] = 1e-3
        assert bool(compare(tmp_path, module("attention"), few).different) == different, "three say little"


def test_an_epsilon_that_nobody_notices_is_not_off(tmp_path: Path) -> None:
    own = module("norm", offs={"epsilon": 9.0})
    own["constants"][0]["effect"] = 1e-6
    assert not compare(tmp_path, module("norm"), own).different


def test_words_name_the_epsilon_and_its_interval(tmp_path: Path) -> None:
    own = module("norm", offs={"epsilon": 9.0})
    own["constants"][0]["confused"] = ["gain"]
    words = compare(tmp_path, module("norm"), own).words
    assert words == (
        "model.norm: the norm's epsilon is 1e-05 in place of 1e-06 "
        "(interval 10 to 10 times; the norm's gain would explain it as well)"
    )


def test_what_no_constant_explains_gets_no_name(tmp_path: Path) -> None:
    found = compare(tmp_path, module("attention"), module("attention", offs={"scale": -0.4}, rest=50.0))
    assert not found.different and found.unexplained == ("model.layers.1.self_attn",)
    assert found.findings[0].candidate.state == "unexplained"


def test_finds_configs_that_state_something_else(tmp_path: Path) -> None:
    own = module("rotary")
    own["constants"][0]["stated"] = 5e5
    found = compare(tmp_path, module("rotary"), own)
    assert (
        found.words == "model.rotary_emb: the rotary base is 500000 by its config, 10000 by the reference's"
    )


def test_the_family_wise_level_holds() -> None:
    """Honest pairs of 40 constants whose errors are larger than any floor: about 1 % have any finding."""
    draw = np.random.default_rng(0)
    plain = Module.model_validate(module("attention", clusters=2000))

    def noisy() -> Record:
        modules = {}
        for name in map(str, range(40)):
            change = {"off": float(draw.normal() * 0.02), "error": 0.02}
            constants = [plain.constants[0].model_copy(update=change)]
            modules[name] = plain.model_copy(update={"module": name, "constants": constants})
        return Record(modules=modules, not_tested={})

    alarms = 0
    for _ in range(300):
        found = compared(noisy(), noisy())
        alarms += any("off" in (one.candidate.state, one.reference.state) for one in found.findings)
    assert alarms <= 9, f"{alarms} of 300 where {FAMILY_WISE:.0%} was designed"


def test_ranks_are_averaged(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", module("attention"), rank=0, ranks=2)
    write(reference, module("attention"), rank=1, ranks=2)
    candidate = write(tmp_path / "b", module("attention", offs={"scale": 0.018}), rank=0, ranks=2)
    assert score_tests(reference, candidate) is None, "a rank's file is missing"
    write(candidate, module("attention", offs={"scale": 0.022}), rank=1, ranks=2)
    found = score_tests(reference, candidate)
    assert found is not None and found.different[0].candidate.off == pytest.approx(0.02)


def test_nothing_was_recorded(tmp_path: Path) -> None:
    assert score_tests(tmp_path, write(tmp_path / "b", module("norm"))) is None


def test_lists_modules_of_one_side(tmp_path: Path) -> None:
    a = write(tmp_path / "a", module("norm"), module("rotary"))
    found = score_tests(
        a, write(tmp_path / "b", module("norm"), not_tested={"model.x": "attention with dropout"})
    )
    assert found is not None and found.tested == 3
    assert found.not_tested == {
        "model.rotary_emb": "not recorded by the other run",
        "model.x": "attention with dropout",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"modules": "none"},
        {"modules": [{"module": "x"}]},
        {"modules": [{**module("norm"), "module": "a\x1b[2Jb"}]},
        {"modules": [{**module("norm"), "rest": 1e999}]},
        {"modules": [module("norm"), module("norm")]},
        {"modules": [{**module("norm"), "clusters": -1}]},
        {"not_tested": {"model.norm": "why\nnot"}},
        {"ranks": 0},
    ],
)
def test_refuses_files_of_strangers(tmp_path: Path, change: dict[str, Any]) -> None:
    a, b = write(tmp_path / "a", module("norm")), write(tmp_path / "b", module("norm"), **change)
    with pytest.raises(DataError) as error:
        score_tests(a, b)
    assert str(error.value).replace("\n", "").isprintable()


def test_refuses_damaged_and_misleading_files(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", module("norm")), write(tmp_path / "b", module("norm"))
    file = b / "score_tests" / "step-000001-rank-00000.json"
    for content in (b"", b"[" * 100_000, b"\xff\xfe", b"{}"):
        file.write_bytes(content)
        with pytest.raises(DataError):
            score_tests(a, b)
    file.unlink()
    os.symlink(a / "score_tests" / file.name, file)
    with pytest.raises(DataError, match="leads out"):
        score_tests(a, b)
