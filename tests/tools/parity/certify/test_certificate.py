"""Certificates: what is in them, that nothing can be changed unseen, that strangers' files are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from certified_runs import certify, flip, leaves, rewrite, run_of, verdict_of, written
from isotrain.errors import CertificateError, DataError
from isotrain.tools.parity.certify import certificate as certificates
from isotrain.tools.parity.certify.certificate import (
    canonical,
    digest_of,
    read_certificate,
    write_certificate,
)
from isotrain.tools.parity.certify.issue import certificate_of, first_of, portable, side_of
from isotrain.tools.parity.read.runs import read_run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("certified")).read_text()


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def test_what_is_in_it(tmp_path: Path) -> None:
    made = certify(tmp_path)
    assert made.computation == "same" and made.date == "2026-08-14T12:30:15Z" and made.format == 4
    assert (made.reference.label, made.candidate.label) == ("cpu-amx", "cpu-avx512")
    assert made.reference.device == "A Processor (R)" and made.reference.ranks == 2
    assert made.reference.settings == {"type": "cpu", "ranks": 2}
    assert made.figures.loss_metric == "train/loss" and made.figures.reward_metric == "critic/rewards/mean"
    # The loss is 1e-4 (1 + step / 7) away over twelve steps, the reward 1e-4.
    assert made.figures.loss_error == pytest.approx(1e-2 * (1 + 6.5 / 7))
    assert made.figures.reward_error == pytest.approx(1e-2) and made.figures.steps == 12
    assert made.figures.throughput_ratio == pytest.approx(1, abs=1e-5)
    states = {level.name: level.state for level in made.levels}
    assert states == {"P0": "not run", "P1": "same", "P2": "cannot tell", "P3": "same"}
    assert made.levels[1].checks[0].limit is None and made.levels[1].checks[0].passed is None
    assert set(made.curves) == {"train/loss", "critic/rewards/mean", "perf/throughput"}
    assert set(made.inputs) == {
        *(
            f"{role}/{name}"
            for role in ("reference", "candidate")
            for name in ("metrics.jsonl", "resolved.json", "environment.json")
        ),
        "reference/layer_trace/steps.safetensors",
        "candidate/layer_trace/steps.safetensors",
    }
    subject = made.subject
    assert (subject.algorithm, subject.model, subject.parameters) == ("sft", "Tiny-1", 1_234_567)
    assert (subject.dtype, subject.engine, subject.kind) == ("bfloat16", "none", "paired")


def test_texts_of_a_recipe_may_have_lines_and_those_of_a_device_not(tmp_path: Path) -> None:
    """They are shown: of a device's name, a second line would be another row of a table."""
    path = write_certificate(tmp_path / "c", certify(tmp_path, recipe={"separator": "Step:\n\t"}))
    assert read_certificate(path).recipe["separator"] == "Step:\n\t"
    with pytest.raises(CertificateError, match="cannot be printed"):
        certify(tmp_path / "bell", recipe={"separator": "\a"})
    rewrite(path, lambda c: c["reference"]["environment"]["device"].update(name="A\n| B |"))
    with pytest.raises(DataError, match="cannot be printed"):
        read_certificate(path)


def test_nothing_of_the_machine_is_in_it(tmp_path: Path) -> None:
    path = written(tmp_path)
    text = path.read_text()
    assert str(tmp_path) not in text and "/somebody" not in text
    content = json.loads(text)
    assert content["recipe"]["model"]["path"] == "Tiny-1"
    assert content["recipe"]["data"]["train"] == ["train.jsonl", "work/more.jsonl"]
    assert not {"output", "device", "observe"} & set(content["recipe"])
    environment = content["reference"]["environment"]
    assert environment["variables"]["OMP_PLACES"] == "places" and "command" not in environment


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/a/b/c", "c"),
        ("~/a/b.py:f", "b.py:f"),
        ("C:\\Users\\me\\model", "model"),
        ("work/tiny", "work/tiny"),
        ("org/model", "org/model"),
        ({"a": ["/x/y", 1.5, None]}, {"a": ["y", 1.5, None]}),
    ],
)
def test_removes_paths_of_a_machine(given: Any, expected: Any) -> None:
    assert portable(given) == expected


def test_written_and_read(tmp_path: Path) -> None:
    made = certify(tmp_path / "runs")
    path = write_certificate(tmp_path / "c", made)
    assert path.name == f"sft-tiny-1-cpu-amx-cpu-avx512-paired-{made.digest[:8]}.json"
    assert read_certificate(path) == made
    content = json.loads(path.read_text())
    stated = content.pop("digest")
    assert stated == made.digest == digest_of(content)
    assert write_certificate(tmp_path / "c", read_certificate(path)) == path, "the same content again is fine"
    assert os.listdir(tmp_path / "c") == [path.name]


def test_no_content_is_written_over_another(tmp_path: Path) -> None:
    made = certify(tmp_path / "runs")
    path = write_certificate(tmp_path, made)
    path.write_text("something else")
    with pytest.raises(CertificateError, match="another content"):
        write_certificate(tmp_path, made)
    assert path.read_text() == "something else"


def test_runs_that_differ_get_none(tmp_path: Path) -> None:
    made = certify(tmp_path / "runs", shift=0.5)
    assert made.computation == "different"
    with pytest.raises(CertificateError, match="only runs that agree get a certificate"):
        write_certificate(tmp_path / "c", made)
    forged = made.model_copy(
        update={"computation": "same", "outcome": made.outcome.model_copy(update={"verdict": "equivalent"})}
    )
    with pytest.raises(CertificateError, match="was changed after it was made"):
        write_certificate(tmp_path / "c", forged)
    assert not (tmp_path / "c").exists()


def test_a_file_that_says_different_is_no_certificate(tmp_path: Path) -> None:
    path = rewrite(written(tmp_path), lambda content: content.update(computation="different"))
    with pytest.raises(DataError, match="computation 'different'"):
        read_certificate(path)


@pytest.mark.heavy
def test_every_leaf_is_sealed(tmp_path: Path) -> None:
    """The nearest other float, one more step, another letter: each changed leaf alone is found."""
    path = written(tmp_path)
    text = path.read_text()
    places = list(leaves(json.loads(text)))
    assert len(places) > 150
    for place in places:
        content = json.loads(text)
        flip(content, place)
        assert canonical(content) != canonical(json.loads(text)), place
        path.write_text(json.dumps(content))
        with pytest.raises(DataError, match=path.name):
            read_certificate(path)
    path.write_text(text)
    read_certificate(path)


def test_every_field_is_needed_and_no_other_is_known(tmp_path: Path) -> None:
    path = written(tmp_path)
    text = path.read_text()
    for name in json.loads(text):
        path.write_text(text)
        with pytest.raises(DataError, match=name):
            read_certificate(rewrite(path, lambda content, gone=name: content.pop(gone), seal=False))
    path.write_text(text)
    with pytest.raises(DataError, match=r"reference\.speed: Extra inputs"):
        read_certificate(rewrite(path, lambda content: content["reference"].update(speed=1)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (("format",), 1, "format"),
        (("format",), "3", "format"),
        (("date",), "2026-13-14T12:30:15Z", "date"),
        (("date",), "yesterday", "date"),
        (("reference", "label"), "cpu", "reference.label"),
        (("reference", "simulated"), False, "reference.simulated"),
        (("reference", "replayed"), 0, "reference.replayed"),
        (("candidate", "environment", "commit"), "a\nb", "candidate.environment"),
        (("candidate", "environment", "commit"), "a\u202eb", "candidate.environment"),
        (("candidate", "environment", "cpu"), {"a\nb": 1}, "candidate.environment"),
        (("candidate", "environment", "cpu"), {"features": ["x"] * 5000}, "candidate.environment"),
        (("inputs",), {"reference/../../etc/passwd": "ab" * 32}, "inputs"),
        (("inputs",), {"/etc/passwd": "ab" * 32}, "inputs"),
        (("inputs",), {"a\\..\\b": "ab" * 32}, "inputs"),
        (("inputs",), {"a/b": "AB" * 32}, "inputs"),
        (("curves",), {}, "curves"),
        (("curves", "train/loss", "steps"), [1, 2, 3, 3, 5, 6], "the steps do not rise"),
        (("curves", "train/loss", "steps"), [1, 2, 3, 4, 5, 2**70], "curves.train/loss.steps"),
        (("curves", "train/loss", "candidate"), [1.0], "not every run has a value"),
        (("curves", "train/loss", "candidate"), ["1.0"] * 12, "curves.train/loss.candidate.0"),
        (("curves", "train/loss", "candidate"), [True] * 12, "curves.train/loss.candidate.0"),
        (("levels",), [], "levels: are not P0, P1"),
        (("outcome", "verdict"), "good", "outcome.verdict"),
        (("recipe", "rollout"), {"engine": "other"}, "engine"),
        (("recipe", "algorithm"), "sft", "algorithm"),
        (("recipe", "model"), {"dtype": "float32"}, "model"),
        (("figures", "loss_error"), "0.1", "figures.loss_error"),
        (("recipe", "deep"), nested(90), "recipe"),
    ],
)
def test_wrong_values_are_told_by_field(
    tmp_path: Path, text: str, field: tuple[str, ...], value: Any, message: str
) -> None:
    def change(content: dict[str, Any]) -> None:
        *above, last = field
        for key in above:
            content = content[key]
        content[last] = value

    path = tmp_path / "c.json"
    path.write_text(text)
    rewrite(path, change)
    with pytest.raises(DataError, match=message) as error:
        read_certificate(path)
    assert path.name in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"recipe": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", "nested more than 100"),
        (b'{"digest": "%s"}' % (b"a" * 64), "and 12 more"),
        (b" " * (certificates.MAX_BYTES + 1), "larger than"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_refuses_hostile_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as error:
        read_certificate(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("value", "message"), [("1e400", "finite number"), ("NaN", "finite number"), ('"\\ud800"', "printed")]
)
def test_refuses_what_no_digest_is_over(tmp_path: Path, text: str, value: str, message: str) -> None:
    """Among what a run recorded of itself, where any JSON may stand."""
    path = tmp_path / "c.json"
    path.write_text(text.replace('"count": 8', f'"count": {value}'))
    with pytest.raises(DataError, match=message):
        read_certificate(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("pipe.json", "absent.json", "."):
        with pytest.raises(DataError, match=r"regular file|cannot be read"):
            read_certificate(tmp_path / name)


def test_refuses_too_many_curves(tmp_path: Path) -> None:
    def many(content: dict[str, Any]) -> None:
        content["curves"] |= {f"{number}/loss": content["curves"]["train/loss"] for number in range(64)}

    with pytest.raises(DataError, match="curves"):
        read_certificate(rewrite(written(tmp_path), many))


@pytest.mark.parametrize(
    "name", ["../../etc/cron.d/x", "/root", "..", "a/b\\c", "Ünïcode 模型", "x" * 150, "-rf"]
)
def test_names_cannot_lead_out_of_the_directory(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, recipe={"algorithm": {"name": name}})
    assert path.parent == tmp_path / "certificates" and path.is_file()
    assert set(path.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.") and len(path.name) < 255
    assert path.name[0] not in ".-"


def test_a_stand_in_is_always_told(tmp_path: Path) -> None:
    run = read_run(run_of(tmp_path / "run", device={"type": "npu", "name": "Ascend910B3"}))
    assert run.environment is not None
    assert not side_of(run).simulated and side_of(run).label == "npu"
    run.environment["packages"]["torch-npu"] = "2.13.0+sim"
    assert side_of(run).simulated and side_of(run).label == "npu-simulated"
    del run.environment["packages"]["torch-npu"]
    run.environment["device"]["name"] = "Ascend910B3-sim"
    assert side_of(run).simulated
    run.environment["packages"]["torch-npu"] = "2.13.0+sim"
    run.environment["device"]["type"] = "cpu"
    assert not side_of(run).simulated, "installed, but not what it ran on"


def test_what_was_allowed_is_told_without_paths(tmp_path: Path) -> None:
    short, long = (run_of(tmp_path / "runs" / name, steps=n) for name, n in (("a", 5), ("b", 6)))
    other = json.loads((long / "resolved.json").read_text())
    other["model"]["dtype"] = "float32"
    (long / "resolved.json").write_text(json.dumps(other))
    made = certificate_of(verdict_of(read_run(short), read_run(long), allow=["recipe"]))
    assert set(made.allowed) == {"recipe"} and "model.dtype" in made.allowed["recipe"]
    assert str(tmp_path) not in made.model_dump_json()
    assert made.curves["train/loss"].steps == (1, 2, 3, 4, 5)


def test_runs_that_nothing_is_known_of(tmp_path: Path) -> None:
    for missing in ("environment.json", "resolved.json"):
        runs = [read_run(run_of(tmp_path / missing / name)) for name in "ab"]
        (tmp_path / missing / "a" / missing).unlink()
        runs[0] = read_run(tmp_path / missing / "a")
        with pytest.raises(CertificateError, match=missing):
            certificate_of(verdict_of(*runs))


def test_recorded_facts_are_not_nested_without_end(tmp_path: Path, text: str) -> None:
    path, read = tmp_path / "c.json", 0
    for depth in range(12):
        path.write_text(text)
        rewrite(path, lambda content, depth=depth: content["reference"]["settings"].update(a=nested(depth)))
        try:
            read_certificate(path)
            read += 1
        except DataError:
            pass
    assert read == 8


def test_a_policys_loss_stands_for_the_training() -> None:
    assert first_of("loss", ["critic/vf_loss", "actor/kl_loss", "actor/pg_loss"]) == "actor/pg_loss"
    assert first_of("loss", ["train/loss", "val/loss"]) == "train/loss"
    assert first_of("reward", ["train/loss"]) is None
