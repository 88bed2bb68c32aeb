"""P0 over two recorded steps: honest devices pass, a badly rounding operator is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from isotrain.errors import DataError
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.levels.operators import RECORD, operators_level
from isotrain.trainers.launch import launch
from support import tiny_recipe

pytestmark = pytest.mark.heavy

Row = dict[str, Any]


def row(name: str = "aten.mm.default", shapes: str = "[2, 2] [2, 2]", **values: Any) -> Row:
    honest: Row = {
        "operator": name,
        "shapes": shapes,
        "dtypes": "float32 float32",
        "result": "float32",
        "error": 1e-7,
        "non_finite": 0,
        "terms": 1.0,
    }
    return honest | values


def write(run: Path, content: Any) -> Path:
    (run / RECORD).parent.mkdir(parents=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (run / RECORD).write_text(text)
    return run


def level(tmp_path: Path, reference: list[Row], candidate: list[Row]) -> Level:
    return operators_level(
        write(tmp_path / "reference", {"operators": reference, "no_oracle": []}),
        write(tmp_path / "candidate", {"operators": candidate, "no_oracle": ["vendor.attention.default"]}),
    )


def test_same_if_as_good_as_the_reference(tmp_path: Path) -> None:
    found = level(
        tmp_path, [row(), row("aten.exp.default")], [row(error=2e-7), row("aten.exp.default", error=0.0)]
    )
    assert (found.name, found.state) == ("P0", "same")
    assert found.words == (
        "all 2 operators of a step, at 2 shapes, round as well as the reference's "
        "(largest error ratio 2, aten.mm)"
    )
    (check,) = found.checks
    assert check.passed and check.value == pytest.approx(2e-7 * 4 * 2**23) and "aten.mm at" in check.note
    shown = found.evidence["operators"][0]
    assert shown["operator"] == "aten.mm.default" and shown["dtype"] == "float32"
    assert (shown["reference"], shown["candidate"]) == (1e-7, 2e-7)
    assert found.evidence["no_oracle"]["candidate"] == ["vendor.attention.default"]


def test_a_reference_that_is_exact_by_chance_is_no_excuse(tmp_path: Path) -> None:
    assert level(tmp_path, [row(error=0.0)], [row(error=1e-7)]).state == "same"


def test_a_worse_operator_is_named(tmp_path: Path) -> None:
    silu = "aten.silu.default"
    found = level(
        tmp_path,
        [row(), row(silu, "[512, 64]"), row("aten.exp.default")],
        [row(), row(silu, "[512, 64]", error=8.4e-5), row("aten.exp.default", error=1e-5)],
    )
    assert found.state == "different"
    assert found.words.startswith("aten.silu is off by 2.82e+03 rounding units, at [512, 64]")
    assert found.words.endswith("and 1 more calls are too far off")
    assert found.causes == ("the candidate's kernel of aten.silu", "the candidate's kernel of aten.exp")
    back = level(tmp_path / "back", [row(error=8.4e-5)], [row()])
    assert back.state == "different" and back.words.startswith("in the reference aten.mm is off by")
    assert found.checks[0].passed is False


def test_shorter_types_are_held_to_less_because_they_say_less(tmp_path: Path) -> None:
    narrow = {"result": "bfloat16", "dtypes": "bfloat16 bfloat16"}
    good, bad = row(error=2e-3, **narrow), row(error=2e-2, **narrow)
    assert level(tmp_path / "a", [good], [row(error=1.2e-2, **narrow)]).state == "same"
    assert level(tmp_path / "b", [good], [bad]).state == "different"
    assert level(tmp_path / "c", [bad], [bad]).state == "same", "off alike"


@pytest.mark.parametrize(
    ("result", "gain", "state"),
    [
        ("float32", 1e-5, "different"),
        ("float32", 4e-7, "same"),  # no more than approximations of functions have
        ("bfloat16", -4e-3, "different"),
        ("bfloat16", 1.1e-3, "same"),  # sums of narrow numbers, one after another
    ],
)
def test_a_kernel_with_a_gain_is_named(tmp_path: Path, result: str, gain: float, state: str) -> None:
    """Far within the limit of its rounding error; its standard error says that it is no chance."""
    kernel = {"result": result, "dtypes": f"{result} {result}", "error": abs(gain)}
    sure = row(gain=gain, gain_error=abs(gain) / 20, blocks=64, **kernel)
    found = level(tmp_path / "a", [row(**kernel)], [sure])
    assert found.state == state, found.words
    if state == "different":
        assert f"is {100 * abs(gain):.3g} % (+- " in found.words
        assert ("too large" if gain > 0 else "too small") in found.words
        gains = [check for check in found.checks if check.name == "gain"]
        assert gains[0].passed is False and gains[0].value == abs(gain)
    by_chance = row(gain=gain, gain_error=abs(gain) / 2, blocks=64, **kernel)
    assert level(tmp_path / "b", [row(**kernel)], [by_chance]).state == "same"
    assert level(tmp_path / "c", [sure], [sure]).state == "same", "off alike"


def test_sums_of_many_terms_may_drift(tmp_path: Path) -> None:
    long = row(gain=1e-4, gain_error=1e-6, blocks=64, terms=49152.0, error=1e-4)
    assert level(tmp_path / "a", [row()], [long]).state == "same"
    assert level(tmp_path / "b", [row()], [{**long, "terms": 512.0}]).state == "different"


def test_softmax_of_a_real_vocabulary(tmp_path: Path) -> None:
    """AVX2 kernels sum its exponentials in one direction: as many terms as a row has."""
    honest = row("aten._softmax.default", gain=1.5e-6, gain_error=1e-8, blocks=64)
    assert level(tmp_path / "a", [row()], [row(), honest | {"shapes": "[64, 49152]"}]).state == "same"
    assert level(tmp_path / "b", [row()], [row(), honest | {"shapes": "[64, 64]"}]).state == "different"


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    found = level(tmp_path, [row()], [row(non_finite=2)])
    assert found.state == "different" and "2 values that are not finite" in found.words
    json.dumps(found.evidence, allow_nan=False)


def test_operators_of_one_side_are_listed_and_held_to_their_type(tmp_path: Path) -> None:
    fused = "vendor.rms_norm.default"
    honest = level(tmp_path / "a", [row(), row("aten.pow.default")], [row(), row(fused)])
    assert honest.state == "same" and "1 calls that the reference does not make" in honest.words
    assert {(m["operator"], m["missing in"]) for m in honest.evidence["missing"]} == {
        (fused, "reference"),
        ("aten.pow.default", "candidate"),
    }
    wrong = level(tmp_path / "b", [row()], [row(), row(fused, error=1e-3)])
    assert wrong.state == "different" and wrong.words.startswith(fused.removesuffix(".default"))


def test_cannot_tell_without_operators_in_common(tmp_path: Path) -> None:
    assert level(tmp_path, [row()], [row(shapes="[3, 3] [3, 3]")]).state == "cannot tell"


def test_not_recorded(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference", {"operators": [row()]})
    found = operators_level(reference, tmp_path)
    assert found.state == "not run"
    assert (
        "the candidate has no layer_trace/operators.json" in found.words
        and "observe.operators" in found.words
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"operators": {}}',
        '{"operators": [3]}',
        {"operators": [row(error="small")]},
        {"operators": [row(error=-1.0)]},
        {"operators": [row(error=True)]},
        {"operators": [row(error=10**400)]},
        {"operators": [row(error=float("nan"))]},
        {"operators": [row(terms=float("inf"))]},
        {"operators": [row(result="int8")]},
        {"operators": [row(result=[])]},
        {"operators": [row(shapes=["2"])]},
        {"operators": [row("\x1b[31mred")]},
        {"operators": [row(shapes="x" * 30_000)]},
        {"operators": [row(), row()]},
        {"operators": [], "no_oracle": [3]},
        {"operators": [{}]},
    ],
)
def test_hostile_records(tmp_path: Path, content: Any) -> None:
    reference = write(tmp_path / "reference", {"operators": [row()]})
    with pytest.raises(DataError, match=r"operators\.json"):
        operators_level(reference, write(tmp_path / "candidate", content))


def record(tiny: Path, output: Path, device_type: str, dtype: str, **model: Any) -> Path:
    recipe = tiny_recipe(
        tiny,
        output,
        device_type,
        data={"batch_size": 4},
        model={"dtype": dtype, **model},
        trainer={"steps": 1, "save_every": 0},
        observe={"operators": True},
    )
    launch(recipe, "")
    return output


@contextmanager
def wrong_kernel(name: str, kernel: Callable[..., torch.Tensor]) -> Iterator[None]:
    """On the simulated device only: the host's kernels are the oracle."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(
            name, lambda *args: kernel(*(arg.cpu() for arg in args)).to(args[0].device), "PrivateUse1"
        )
        yield


def short_silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x.bfloat16()).to(x.dtype)


def short_sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A matrix product that rounds after every term."""
    total = torch.zeros(left.shape[0], right.shape[1], dtype=left.dtype)
    for term in range(left.shape[1]):
        total += left[:, term, None] * right[None, term]
    return total


@pytest.fixture(scope="module")
def on_host(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    kept: dict[str, Path] = {}

    def get(dtype: str) -> Path:
        if dtype not in kept:
            kept[dtype] = record(tiny, tmp_path_factory.mktemp(dtype), "cpu", dtype)
        return kept[dtype]

    return get


@pytest.mark.parametrize(("dtype", "fused"), [("float32", "off"), ("bfloat16", "on")])
def test_the_simulated_device_rounds_as_the_host(
    tiny: Path, tmp_path: Path, on_host: Callable[[str], Path], dtype: str, fused: str
) -> None:
    found = operators_level(on_host(dtype), record(tiny, tmp_path / "run", "npu", dtype, fused=fused))
    assert found.state == "same", found.words
    assert len(found.evidence["operators"]) > 50


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(
    ("dtype", "name", "kernel", "words"),
    [
        ("float32", "silu", short_silu, " rounding units, at "),
        ("bfloat16", "mm", short_sums, " too small, at "),
    ],
)
def test_a_wrong_kernel_is_named(
    tiny: Path,
    tmp_path: Path,
    on_host: Callable[[str], Path],
    dtype: str,
    name: str,
    kernel: Callable[..., torch.Tensor],
    words: str,
) -> None:
    with wrong_kernel(name, kernel):
        candidate = record(tiny, tmp_path / "run", "npu", dtype, fused="off")
    found = operators_level(on_host(dtype), candidate)
    assert found.state == "different"
    assert found.words.startswith(f"aten.{name} is ") and words in found.words, found.words
    assert found.causes == (f"the candidate's kernel of aten.{name}",)
