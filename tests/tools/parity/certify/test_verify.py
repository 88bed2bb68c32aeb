"""Verification: a file that was changed, and runs that are not those of the certificate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certified_runs import rewrite, run_of, trace, written
from isotrain.tools.parity.certify.certificate import digest_of
from isotrain.tools.parity.certify.verify import Verified, is_consistent, verify


def wrong(findings: list[Verified]) -> list[str]:
    return [finding.name for finding in findings if finding.state == "wrong"]


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certified")
    written(directory)
    return directory


@pytest.fixture
def path(certified: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    [original] = (certified / "certificates").iterdir()
    copy = tmp_path / original.name
    copy.write_text(original.read_text())
    return copy


def test_a_certificate_is_consistent_without_its_runs(path: Path) -> None:
    findings = verify(path)
    assert is_consistent(findings)
    states = {finding.name: finding.state for finding in findings}
    assert states == {"digest": "right", "verdict": "not checked", "inputs": "not checked"}


def test_a_file_without_a_certificate_has_a_wrong_digest(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    assert wrong(verify(tmp_path / "c.json")) == ["digest"]
    assert wrong(verify(tmp_path / "absent.json")) == ["digest"]


def test_a_recipe_that_is_not_the_one_of_its_digest(path: Path) -> None:
    [finding] = verify(rewrite(path, lambda c: c["recipe"].update(seed=2)))
    assert finding.state == "wrong" and "recipe_sha256" in finding.words


def test_compares_a_certificate_with_its_runs(certified: Path, path: Path) -> None:
    runs = {role: certified / "runs" / role for role in ("reference", "candidate")}
    findings = verify(path, runs)
    assert is_consistent(findings), findings
    assert sum(finding.name.startswith(("inputs of", "curves of", "device of")) for finding in findings) == 6
    swapped = verify(path, {"reference": runs["candidate"], "candidate": runs["reference"]})
    assert {"inputs of reference", "curves of reference", "inputs of candidate"} <= set(wrong(swapped))
    assert wrong(verify(path, {"envelope-9": runs["candidate"]})) == ["inputs of envelope-9"]
    assert wrong(verify(path, {"reference": certified / "nowhere"})) == ["inputs of reference"]


def test_refuses_another_run(tmp_path: Path, path: Path) -> None:
    other = run_of(tmp_path / "other", shift=1e-12)
    trace(other)
    assert {"inputs of reference", "curves of reference"} <= set(wrong(verify(path, {"reference": other})))
    (other / "environment.json").write_text('{"starts": [{"device": {"name": NaN, "ranks": 2}}]}')
    assert "device of reference" in wrong(verify(path, {"reference": other}))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda c: c["reference"]["environment"]["packages"].update(torch="2.14.0"), ["device of reference"]),
        (lambda c: c["reference"]["environment"].update(commit="cd" * 20), ["device of reference"]),
        (lambda c: c["reference"]["environment"]["device"].update(name="X"), ["device of reference"]),
        (
            lambda c: [c["recipe"].update(seed=2), c.update(recipe_sha256=digest_of(c["recipe"]))],
            ["device of reference"],
        ),
        (
            lambda c: c["curves"]["perf/throughput"].update(
                reference=c["curves"]["perf/throughput"]["candidate"]
            ),
            ["curves of reference"],
        ),
        (lambda c: c["curves"]["train/loss"].update(steps=[*range(0, 11), 12]), ["curves of reference"]),
        (lambda c: c["inputs"].update({"reference/probe.json": "ab" * 32}), ["inputs of reference"]),
        (lambda c: c["inputs"].update({"reference/metrics.jsonl": "ab" * 32}), ["inputs of reference"]),
    ],
)
def test_told_otherwise_than_the_run_has_it(
    certified: Path, path: Path, change: Callable[[Any], object], names: list[str]
) -> None:
    runs = {"reference": certified / "runs" / "reference"}
    assert wrong(verify(rewrite(path, change), runs)) == names


def test_other_files_of_a_run(certified: Path, path: Path, tmp_path: Path) -> None:
    """Files beside the metrics count too; a link that leads out of the run is not followed."""
    run = run_of(tmp_path / "reference")
    (tmp_path / "secret").write_text("outside")
    (run / "probe.json").symlink_to(tmp_path / "secret")
    rewrite(path, lambda c: c.update(inputs={"reference/probe.json": "ab" * 32}))
    [finding] = [one for one in verify(path, {"reference": run}) if one.name == "inputs of reference"]
    assert finding.state == "wrong" and "leads out" in finding.words
