"""Dumps that msprobe 26.2.0 made on a CPU (`make_msprobe_dumps.py`), and what strangers may send instead."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from isotrain.cli.main import app
from isotrain.errors import DataError
from isotrain.tools.parity.compare.power import evidence_of
from isotrain.tools.parity.levels.dumps import dump_levels
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.protocol import verdict_on
from isotrain.tools.parity.read import msprobe_dump
from isotrain.tools.parity.read.msprobe_dump import places, read_part
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.verdict import Verdict

ARCHIVE = Path(__file__).with_name("msprobe_dumps.tar.xz")
ATTENTION = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dumps")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path


def levels(dumps: Path, one: str, other: str) -> tuple[Level, Level]:
    return dump_levels(dumps / one, dumps / other)


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", "compare", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.mark.parametrize("suffix", ["", "-bf16"])
def test_other_kernels_round_otherwise_and_that_is_all(dumps: Path, suffix: str) -> None:
    """Attention as one fused operator, and as matrix products and a softmax."""
    apis, modules = levels(dumps, f"reference{suffix}", f"other-kernels{suffix}")
    assert (apis.state, modules.state) == ("same", "same"), (apis.words, modules.words)
    # Honest, and not bit for bit the same, or it would show nothing.
    assert all(0 < check.value <= check.limit / 2 for check in modules.checks), modules.checks
    assert "calls are made by one run only" in apis.words and "no float64" in apis.words
    assert "do not show every difference" in modules.words
    swapped = levels(dumps, f"other-kernels{suffix}", f"reference{suffix}")
    assert [level.state for level in swapped] == ["same", "same"]


@pytest.mark.parametrize("name", ["scale", "scale-2-percent"])
def test_a_wrong_scale_is_named_by_its_layer_and_its_constant(dumps: Path, name: str) -> None:
    apis, modules = levels(dumps, "reference", name)
    assert (apis.state, modules.state) == ("different", "different")
    assert f"{ATTENTION} is the smallest module with equal inputs and other outputs" in modules.words
    assert f"the first difference is in the inputs of {ATTENTION}.o_proj at step 0" in modules.words
    expected = {"scale": "0.388909", "scale-2-percent": "0.360624"}[name]
    assert f"scaled_dot_product_attention.1 in {ATTENTION} gets equal inputs at step 0" in apis.words
    assert f"scale is {expected} in place of 0.353553" in apis.words
    assert modules.evidence["first"]["name"] == ATTENTION
    assert ATTENTION in modules.causes[0]


def test_finds_a_wrong_scale_in_bfloat16(dumps: Path) -> None:
    """Where the statistics themselves are rounded, the constant still shows what a norm may hide."""
    apis, _ = levels(dumps, "reference-bf16", "scale-bf16")
    assert apis.state == "different" and f"in {ATTENTION}" in apis.words and "scale is 0.388909" in apis.words


def test_compares_dumps_of_modules_or_apis_alone(dumps: Path) -> None:
    apis, modules = levels(dumps, "modules", "modules-scale")
    assert apis.state == "not run" and "level L1 or mix" in apis.words
    assert modules.state == "different" and ATTENTION in modules.words
    apis, modules = levels(dumps, "apis", "apis-scale")
    assert modules.state == "not run" and "level L0 or mix" in modules.words
    # Such a dump does not tell modules.
    assert apis.state == "different" and "scaled_dot_product_attention.1 gets equal inputs" in apis.words


def test_other_tokens_are_no_difference_of_the_computation(dumps: Path) -> None:
    """Responses that each run sampled for itself: everything differs, and no layer is to blame."""
    for level in levels(dumps, "reference", "other-tokens"):
        assert level.state == "cannot tell" and "the same batch and the same responses" in level.words
        assert "embed" in level.words
    result = compare(dumps / "reference", dumps / "other-tokens")
    assert result.exit_code == 3 and "Computation: inconclusive. " in result.output


def test_finds_other_tokens_between_the_same_largest_and_smallest(dumps: Path, tmp_path: Path) -> None:
    """Then only the rows that are looked up tell, at every step."""

    def others(call: dict[str, Any]) -> None:
        call["output"][0]["Norm"] *= 1.03

    for step, state in (("step0", "cannot tell"), ("step1", "same")):
        changed = rewritten(
            dumps / "modules", tmp_path / step, "Module.model.embed_tokens.", others, step=step
        )
        level = dump_levels(dumps / "modules", changed)[1]
        assert level.state == state, level.words
        assert ("model.embed_tokens looks up other rows" in level.words) == (step == "step0")
        # A later step with other tokens is left out, and the others are compared.
        assert ("of 1 step" in level.words) == (step == "step1")


def test_finds_other_weights(dumps: Path, tmp_path: Path) -> None:
    def heavier(call: dict[str, Any]) -> None:
        call["parameters"]["weight"]["Norm"] *= 1.01

    changed = rewritten(dumps / "modules", tmp_path, "Module.model.layers.0.mlp.up_proj.", heavier)
    level = dump_levels(dumps / "modules", changed)[1]
    assert level.state == "cannot tell"
    assert "the weights of model.layers.0.mlp.up_proj differ (norm off by 1.0e-02" in level.words


def test_the_step_after_an_update_is_judged_less_strictly(dumps: Path, tmp_path: Path) -> None:
    def further(call: dict[str, Any], factor: float) -> None:
        call["output"][0]["Norm"] *= factor

    name = "Module.model.layers.1.mlp.LlamaMLP.forward.0"
    for step, factor, state in (
        ("step0", 1.0001, "different"),
        ("step1", 1.0001, "same"),
        ("step1", 1.01, "different"),
    ):
        changed = rewritten(
            dumps / "modules",
            tmp_path / f"{step}-{factor}",
            name,
            lambda call, by=factor: further(call, by),
            step,
        )
        assert dump_levels(dumps / "modules", changed)[1].state == state, (step, factor)


def test_counts_accumulated_micro_batches_as_one_step(dumps: Path) -> None:
    level = levels(dumps, "accumulated", "accumulated-other-kernels")[1]
    assert level.state == "same" and "31 modules in 164 calls of 1 step agree" in level.words, level.words


def test_checksums_do_not_tell_rounding_from_mistakes(dumps: Path) -> None:
    """They come with statistics, which decide."""
    part = read_part(places(dumps / "checksums")[0])
    assert any(tensor.checksum for call in part.calls for tensor in call.outputs)
    without = [level.state for level in levels(dumps, "checksums", "checksums")]
    assert without == ["not run", "same"]


def test_a_number_that_is_none(dumps: Path, tmp_path: Path) -> None:
    def spoil(call: dict[str, Any]) -> None:
        call["output"][0].update(Max=float("nan"), Mean=float("nan"), Norm=float("nan"))

    changed = rewritten(dumps / "modules", tmp_path, "Module.model.layers.0.mlp.LlamaMLP.forward.0", spoil)
    level = dump_levels(dumps / "modules", changed)[1]
    assert level.state == "different" and "outputs of model.layers.0.mlp at step 0" in level.words


def test_dumps_alone_answer_for_the_computation(dumps: Path, tmp_path: Path) -> None:
    verdict: Verdict = verdict_on(dumps / "reference", dumps / "scale")
    assert verdict.outcome.verdict == "inconclusive" and verdict.computation.verdict == "different"
    assert verdict.words.startswith(
        "Reject: the computations differ; whether the runs end up alike is open.\n"
        "Outcome: inconclusive. Dumps of single steps have no curves"
    )
    assert evidence_of(verdict) == "dumps"
    result = compare(dumps / "reference", dumps / "scale", "--report", tmp_path / "report")
    assert result.exit_code == 1, result.output
    assert ATTENTION in result.output and "BROKEN" not in result.output
    assert ATTENTION in (tmp_path / "report" / "report.html").read_text()
    assert compare(dumps / "reference", dumps / "scale", "--require", "outcome").exit_code == 3
    # Nothing has seen more than two steps, so this never says that it is the same.
    honest = compare(dumps / "reference", dumps / "other-kernels")
    assert honest.exit_code == 3 and "No level has followed whole runs" in honest.output


def test_takes_dumps_beside_logs(dumps: Path, tmp_path: Path) -> None:
    logs = []
    for name, shift in (("a", 0.0), ("b", 1e-9)):
        logs.append(tmp_path / f"{name}.csv")
        rows = [f"{step},{1 / step + shift}" for step in range(1, 41)]
        logs[-1].write_text("\n".join(["step,train/loss", *rows]))
    honest = compare(
        *logs, "--dump", dumps / "reference", dumps / "other-kernels", "--require", "computation"
    )
    assert honest.exit_code == 0 and "Computation: the same." in honest.output, honest.output
    wrong = compare(*logs, "--dump", dumps / "reference", dumps / "scale", "--require", "computation")
    assert wrong.exit_code == 1 and ATTENTION in wrong.output
    assert compare(*logs, "--dump", dumps / "reference", dumps / "scale").exit_code == 0
    for arguments, words in (
        ((logs[0], dumps / "reference"), "the other is not: give two dumps"),
        ((*logs, "--dump", *logs), "is no dump of msprobe"),
        ((dumps / "reference", dumps / "scale", "--rerun", logs[0]), "two dumps have no curves"),
    ):
        refused = compare(*arguments)
        assert refused.exit_code == 2 and words in " ".join(refused.output.split()), refused.output


def test_reads_the_layout_of_verl(dumps: Path, tmp_path: Path) -> None:
    """`save_path/step_N/STAGE/step0/rank0`."""
    for run, variant in (("gpu", "modules"), ("npu", "modules-scale")):
        for step in (1, 2, 10):
            stage = tmp_path / run / f"step_{step}" / "actor_update" / "step0"
            source = next((dumps / ("modules" if step < 10 else variant) / "step0").iterdir())
            shutil.copytree(source, stage / "rank0")
            shutil.copytree(
                source, tmp_path / run / f"step_{step}" / "ref_compute_log_prob" / "step0" / "rank0"
            )
    assert [place.step for place in places(tmp_path / "gpu")] == [1, 1, 2, 2, 10, 10]
    assert places(tmp_path / "gpu")[0].label == "actor_update"
    level = dump_levels(tmp_path / "gpu", tmp_path / "npu")[1]
    assert level.state == "different" and f"{ATTENTION}, actor_update is the smallest" in level.words
    assert "at step 10" in level.words
    one_step = dump_levels(tmp_path / "gpu" / "step_10", tmp_path / "npu" / "step_10")[1]
    assert one_step.state == "different"
    # A single process has no rank, and is compared with a rank 0.
    assert dump_levels(dumps / "modules" / "step0", tmp_path / "gpu" / "step_1" / "actor_update" / "step0")
    apart = dump_levels(tmp_path / "gpu", dumps / "modules")[1]
    assert apart.state == "not run" and "no step and rank in common" in apart.words


def rewritten(
    dump: Path, out: Path, name: str, change: Callable[[dict[str, Any]], None], step: str = "step0"
) -> Path:
    """A copy with other numbers in the calls whose names begin so."""
    shutil.copytree(dump, out / "changed")
    (file,) = (out / "changed" / step).glob("*/dump.json")
    content = json.loads(file.read_text())
    found = [call for key, call in content["data"].items() if key.startswith(name) and "forward" in key]
    assert found
    for call in found:
        change(call)
    file.write_text(json.dumps(content))
    return out / "changed"


def test_hostile_dumps_are_refused_or_compared(dumps: Path, tmp_path: Path) -> None:
    """A level or a DataError, whatever is in the files."""
    shutil.copytree(dumps / "apis", tmp_path / "a")
    (file,) = (tmp_path / "a").rglob("dump.json")
    data, draw = file.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(changed))
            changed[at : at + draw.randrange(1, 30)] = draw.choice(
                [b"", b"null", b"[]", b"{}", b"NaN", b"-1e999", b'"', b"9" * 400, b'"shape": [', b"\xff\x00"]
            )
        file.write_bytes(changed)
        try:
            for level in dump_levels(dumps / "apis", tmp_path / "a"):
                assert level.state in ("same", "different", "cannot tell", "not run")
        except DataError as error:
            assert "dump.json" in str(error)
            refused += 1
    assert 5 < refused < 60


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "not a JSON object"),
        ({}, 'no object "data"'),
        ({"data": {}}, "no module and no API"),
        ({"data": {"Torch.add.0.forward": 3}}, "is no object"),
        ({"data": {"Torch.a\x1b[31m.0.forward": {}}}, "has no name"),
        ({"data": {"Torch.add.0.forward": {"output": {"type": "t", "dtype": 1, "shape": 3}}}}, "shape"),
        (
            {"data": {"Torch.add.0.forward": {"output": {"type": "t", "dtype": "", "shape": [], "Max": []}}}},
            "statistic that is no number",
        ),
    ],
)
def test_refuses_damaged_dumps(tmp_path: Path, content: Any, words: str) -> None:
    (tmp_path / "dump.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"dump\.json") as error:
        read_part(places(tmp_path)[0])
    assert words in str(error.value) and "\x1b" not in str(error.value)


def test_refuses_dumps_beyond_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested: Any = {}
    for _ in range(90):
        nested = [nested]
    (tmp_path / "dump.json").write_text(json.dumps({"data": {"Torch.add.0.forward": {"output": nested}}}))
    with pytest.raises(DataError, match="nested too deeply"):
        read_part(places(tmp_path)[0])
    outside = tmp_path.parent / "outside.json"
    outside.write_text("{}")
    (tmp_path / "dump.json").unlink()
    (tmp_path / "dump.json").symlink_to(outside)
    with pytest.raises(DataError, match="leads out"):
        read_run(tmp_path)
    (tmp_path / "dump.json").unlink()
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"nor dump\.json"):
        read_run(tmp_path)
    for rank in ("proc1", "proc2"):
        (tmp_path / "step0" / rank).mkdir(parents=True)
        (tmp_path / "step0" / rank / "dump.json").write_text("{}")
    with pytest.raises(DataError, match="several processes"):
        places(tmp_path)
    for name in ("_MAX_FILES", "_MAX_ENTRIES"):
        with monkeypatch.context() as patch, pytest.raises(DataError, match="more than 1 "):
            patch.setattr(msprobe_dump, name, 1)
            places(tmp_path)
    with contextlib.suppress(DataError):
        read_part(places(tmp_path / "step0" / "proc1")[0])
