"""Verification: what a forger could change although the digest fits; runs that are not those."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certified_runs import leaves, rewrite, run_of, trace, written
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
    assert {finding.name: finding.state for finding in findings} == {
        "digest": "right",
        "recipe": "right",
        "figures": "right",
        "levels": "right",
        "outcome": "right",
        "computation": "right",
        "inputs": "not checked",
    }


def test_a_file_without_a_certificate_has_a_wrong_digest(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    assert wrong(verify(tmp_path / "c.json")) == ["digest"]
    assert wrong(verify(tmp_path / "absent.json")) == ["digest"]


@pytest.mark.heavy
def test_the_curves_and_their_figures_hold_each_other(path: Path) -> None:
    """A forger who makes the digest anew still cannot change one value of the two runs, or one figure."""
    text = path.read_text()
    sides = ("reference", "candidate")
    places = [
        place
        for place in leaves(json.loads(text))
        if place[0] == "figures"
        or (place[0] == "curves" and place[2] in sides and place[1] != "perf/throughput")
    ]
    assert len(places) == 7 + 2 * 2 * 12
    for place in places:
        path.write_text(text)

        def change(content: Any, place: tuple[Any, ...] = place) -> None:
            *above, last = place
            for key in above:
                content = content[key]
            value = content[last]
            kinds: dict[type, Callable[[Any], Any]] = {
                float: lambda x: x * (1 + 1e-6) + 1e-9,
                int: lambda x: x + 1,
                str: lambda x: "val/" + x,
            }
            content[last] = kinds[type(value)](value)

        assert wrong(verify(rewrite(path, change)))[0] == "figures", place


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda c: c["recipe"].update(seed=2), ["recipe"]),
        (lambda c: c["levels"][2].update(state="different"), ["computation"]),
        (lambda c: c["levels"][3].update(state="cannot tell"), ["computation"]),
        (lambda c: c["levels"][3]["checks"][0].update(passed=False), ["levels"]),
        (lambda c: c["levels"][0].update(checks=c["levels"][2]["checks"]), ["levels"]),
        (lambda c: [level.update(state="not run", checks=[]) for level in c["levels"]], ["computation"]),
        (lambda c: c["outcome"]["effects"][0].update(margin=1.0), ["outcome"]),
        (lambda c: c["outcome"]["effects"][0].update(difference=0.0), ["outcome"]),
        (lambda c: c["outcome"]["effects"].pop(), ["outcome"]),
        (lambda c: c["figures"].update(loss_metric=None, loss_error=None, loss_relative=None), ["figures"]),
        (lambda c: c["figures"].update(loss_metric="critic/rewards/mean"), ["figures"]),
        (lambda c: c["curves"]["train/loss"].update(candidate=[1.7e308] * 12), ["figures"]),
        (lambda c: c["curves"].pop("train/loss"), ["figures"]),
        (lambda c: c["curves"].pop("perf/throughput"), ["figures"]),
        (lambda c: [c["curves"].pop(name) for name in ("train/loss", "critic/rewards/mean")], ["figures"]),
    ],
)
def test_finds_what_contradicts_the_curves(
    path: Path, change: Callable[[Any], object], names: list[str]
) -> None:
    assert wrong(verify(rewrite(path, change))) == names


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
        (lambda c: c["recipe"].update(seed=2), ["recipe", "device of reference"]),
        (
            lambda c: c["curves"]["perf/throughput"].update(
                reference=c["curves"]["perf/throughput"]["candidate"]
            ),
            ["figures", "curves of reference"],
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


MORE_RUNS = "3 pairs of runs with the same seeds"


def stated(content: Any, difference: float, half: float, evidence: str = MORE_RUNS, **changes: Any) -> None:
    """All effects as if further runs had been looked at; none of those is in the file."""
    for effect in content["outcome"]["effects"]:
        middle = effect["difference"] + difference
        effect |= {"difference": middle, "low": middle - half, "high": middle + half, "evidence": evidence}
        effect |= changes


@pytest.mark.parametrize(
    "change",
    [
        lambda c: stated(c, 0.0, 0.001, margin=5.0),
        lambda c: stated(c, 0.0, 5.0, verdict="equivalent"),
        lambda c: stated(c, 0.0, 0.001, low=None, verdict="equivalent"),
        lambda c: [stated(c, 0.0, 0.001), c["outcome"]["effects"].pop()],
        lambda c: stated(c, 0.0, 0.001, verdict="inconclusive"),
    ],
)
def test_words_about_further_runs_do_not_hide_what_the_curves_say(
    path: Path, change: Callable[[Any], object]
) -> None:
    findings = verify(rewrite(path, lambda c: [c["outcome"].update(verdict="equivalent"), change(c)]))
    assert "outcome" in wrong(findings)


def test_an_outcome_of_further_runs_that_the_curves_allow_is_not_checked(path: Path) -> None:
    findings = verify(rewrite(path, lambda c: stated(c, 1e-6, 1e-4)))
    assert {finding.name: finding.state for finding in findings}["outcome"] == "not checked"
    assert is_consistent(findings)
