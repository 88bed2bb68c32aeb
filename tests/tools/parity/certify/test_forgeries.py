"""Certificates that were edited and sealed again: what `verify` says of each, as the docs list it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certified_runs import MESHED, SIMULATED, rewrite, written
from isotrain.tools.parity.certify.verify import is_consistent, verify

PAGE = Path(__file__).parents[4] / "docs" / "certificates.md"
Content = dict[str, Any]


def environment(content: Content, side: str = "candidate") -> Content:
    found: Content = content[side]["environment"]
    return found


def device(**facts: Any) -> Callable[[Content], object]:
    return lambda c: environment(c)["device"].update(facts)


def packages(**versions: str) -> Callable[[Content], object]:
    return lambda c: environment(c)["packages"].update({k.replace("_", "-"): v for k, v in versions.items()})


def npu(content: Content, name: str = "Ascend910B3", version: str = "2.13.0") -> None:
    """What one has to change for a consistent story of another device."""
    environment(content)["device"].update(type="npu", name=name)
    environment(content)["packages"].update({"torch-npu": version})
    content["candidate"]["settings"].update(type="npu")


def replayed(content: Content) -> None:
    content["recipe"]["rollout"] = {"engine": "vllm"}


def scale(role: str, factor: float) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        for curve in content["curves"].values():
            curve[role] = [factor * value for value in curve[role]]

    return change


def copy_curves(content: Content) -> None:
    for curve in content["curves"].values():
        curve["candidate"] = curve["reference"]


def levels(**fields: Any) -> Callable[[Content], object]:
    return lambda c: [level.update(fields) for level in c["levels"]]


def all_of(*changes: Callable[[Content], object]) -> Callable[[Content], object]:
    return lambda content: [change(content) for change in changes]


def drop(mapping: str, name: str) -> Callable[[Content], object]:
    return lambda c: c[mapping].pop(name)


FORGERIES: dict[str, tuple[Callable[[Content], object], str | None]] = {
    "another device's name": (device(name="Ascend910B3"), None),
    "a mesh left out everywhere": (
        lambda c: [m.pop("mesh") for m in (c["candidate"]["settings"], environment(c)["device"])],
        None,
    ),
    "a larger model's name": (lambda c: c["recipe"]["model"].update(path="Qwen3-8B"), "recipe"),
    "a larger model's name, recipe sealed": (
        all_of(lambda c: c["recipe"]["model"].update(path="Qwen3-8B"), lambda c: seal_recipe(c)),
        None,
    ),
    "another learning rate": (lambda c: c["recipe"]["optimizer"].update(lr=1e-4), "recipe"),
    "a smaller loss error": (lambda c: c["figures"].update(loss_error=1e-6), "figures"),
    "the candidate's curves scaled": (scale("candidate", 1.01), "figures"),
    "the candidate's curves replaced by the reference's": (copy_curves, "figures"),
    "one value of a curve": (
        lambda c: c["curves"]["train/loss"]["candidate"].__setitem__(3, 0.7),
        "figures",
    ),
    "a loss left out": (drop("curves", "train/loss"), "figures"),
    "a wider margin": (lambda c: c["outcome"]["effects"][0].update(margin=1.0), "outcome"),
    "a smaller difference": (lambda c: c["outcome"]["effects"][0].update(difference=0.0), "outcome"),
    "a narrower interval": (lambda c: c["outcome"]["effects"][0].update(low=-1e-9, high=1e-9), "outcome"),
    "every level 'same'": (levels(state="same"), None),
    "a level left out": (lambda c: c["levels"].pop(), "digest"),
    "the only level that followed a run called not run": (
        lambda c: c["levels"][3].update(state="not run", checks=[]),
        "computation",
    ),
    "a failed check called passed over": (
        lambda c: c["levels"][3]["checks"][0].update(passed=False),
        "levels",
    ),
    "words of P1": (lambda c: c["levels"][1].update(words="all 10,000 layers agree"), None),
    "another commit": (lambda c: environment(c).update(commit="cd" * 20), None),
    "a simulated device made real, in all places": (
        lambda c: npu(c, name="Ascend910B3", version="2.13.0"),
        None,
    ),
    "a date after its runs": (lambda c: c.update(date="2026-09-01T00:00:00Z"), None),
}


def seal_recipe(content: Content) -> None:
    from isotrain.tools.parity.certify.certificate import digest_of

    content["recipe_sha256"] = digest_of(content["recipe"])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By a word in the name of the forgery."""
    candidates = {"": None, "simulated": SIMULATED, "mesh": MESHED}
    return {
        kind: written(tmp_path_factory.mktemp("c"), candidate=candidate).read_text()
        for kind, candidate in candidates.items()
    }


@pytest.mark.parametrize("name", FORGERIES)
def test_finds_a_forgery(tmp_path: Path, originals: dict[str, str], name: str) -> None:
    change, found_by = FORGERIES[name]
    path = tmp_path / "c.json"
    path.write_text(originals[next((kind for kind in ("simulated", "mesh") if kind in name), "")])
    assert is_consistent(verify(path))
    found = verify(rewrite(path, change))
    wrong = [finding.name for finding in found if finding.state == "wrong"]
    assert (found_by in wrong) if found_by else not wrong, found


def test_the_page_lists_them() -> None:
    assert len(FORGERIES) >= 20
    text = PAGE.read_text(encoding="utf-8")
    for name, (_, found_by) in FORGERIES.items():
        says = f"inconsistent: {found_by}" if found_by else "consistent, and claimed: nobody signed it"
        assert f"| {name} | {says} |" in text, name


def test_a_simulated_device_is_derived(tmp_path: Path, originals: dict[str, str]) -> None:
    """Its name alone, or its package alone, is not enough to make it real."""
    from isotrain.tools.parity.certify.certificate import read_certificate

    path = tmp_path / "c.json"
    for change in (device(name="Ascend910B3"), packages(torch_npu="2.13.0")):
        path.write_text(originals["simulated"])
        assert read_certificate(rewrite(path, change)).candidate.simulated
