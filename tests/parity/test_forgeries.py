"""Certificates that were edited and sealed again: what `verify` says of each, as the docs list it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certified_runs import MESHED, SIMULATED, rewrite, written
from isotrain.parity.figures import levels_again
from isotrain.parity.verify import is_consistent, verify

PAGE = Path(__file__).parents[2] / "docs" / "certificates.md"
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


def widen(content: Content) -> None:
    for curve in content["curves"].values():
        reference = curve["reference"]
        for values in curve["envelope"].values():
            values[:] = [r + 3 * (v - r) for v, r in zip(values, reference, strict=True)]


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
    "another processor's name": (device(name="AMD EPYC"), "records"),
    "an Ascend name on a CPU run": (device(name="Ascend910B3"), "records"),
    "device type npu, nothing else": (device(type="npu"), "records"),
    "type and name of an NPU, no torch-npu": (device(type="npu", name="Ascend910B3"), "records"),
    "an NPU, but the recipe asks for cpu": (
        all_of(device(type="npu", name="Ascend910B3"), packages(torch_npu="2.13.0")),
        "records",
    ),
    "an NPU with a torch-npu for another torch": (lambda c: npu(c, version="2.9.0"), "records"),
    "an NPU with a GPU's name": (lambda c: npu(c, name="NVIDIA H100"), "records"),
    "a GPU with a CPU build of torch": (
        all_of(
            device(type="cuda", name="NVIDIA H100"), lambda c: c["candidate"]["settings"].update(type="cuda")
        ),
        "records",
    ),
    "a type that does not exist": (device(type="tpu"), "records"),
    "AMX on a processor without it": (
        lambda c: environment(c, "reference")["cpu"].update(features=[]),
        "records",
    ),
    "x86 instructions on an ARM host": (lambda c: environment(c).update(machine="aarch64"), "records"),
    "another machine type": (lambda c: environment(c).update(machine="riscv64"), "records"),
    "8 ranks in the record": (device(ranks=8), "records"),
    "8 ranks in the recipe": (lambda c: c["candidate"]["settings"].update(ranks=8), "records"),
    "no ranks": (device(ranks=0), "records"),
    "a mesh left out of the recipe": (lambda c: c["candidate"]["settings"].pop("mesh"), "records"),
    "a mesh left out of the record": (lambda c: environment(c)["device"].pop("mesh"), "records"),
    "another way to split a mesh's context": (
        lambda c: c["candidate"]["settings"]["mesh"].update(context_attention="ulysses"),
        "records",
    ),
    "a mesh that the ranks cannot form": (
        lambda c: [
            m["mesh"].update(context=4) for m in (c["candidate"]["settings"], environment(c)["device"])
        ],
        "records",
    ),
    "a mesh of no number": (
        lambda c: [
            m["mesh"].update(context=0) for m in (c["candidate"]["settings"], environment(c)["device"])
        ],
        "records",
    ),
    "layers of a run with a mesh": (
        lambda c: [
            c["levels"][1].update(state="same"),
            c["inputs"].update({f"{s}/layer_trace/a": "ab" * 32 for s in ("reference", "candidate")}),
        ],
        "records",
    ),
    "a mesh left out everywhere": (
        lambda c: [m.pop("mesh") for m in (c["candidate"]["settings"], environment(c)["device"])],
        None,
    ),
    "a larger model's name": (lambda c: c["recipe"]["model"].update(path="Qwen3-8B"), "recipe"),
    "a larger model's name, recipe sealed": (
        all_of(lambda c: c["recipe"]["model"].update(path="Qwen3-8B"), lambda c: seal_recipe(c)),
        "records",
    ),
    "more parameters on one side": (
        lambda c: environment(c)["model"].update(parameters=8_000_000_000),
        "records",
    ),
    "another architecture on one side": (lambda c: environment(c)["model"].update(type="qwen3"), "records"),
    "no digest of the model": (drop("data", "model"), "records"),
    "made before its runs": (lambda c: c.update(date="2026-08-14T11:00:00Z"), "records"),
    "no torch": (lambda c: environment(c)["packages"].pop("torch"), "records"),
    "an engine that was not installed": (all_of(replayed, lambda c: seal_recipe(c)), "records"),
    "a replay without rollouts": (lambda c: c["candidate"].update(replayed=True), "records"),
    "more steps than the recipe": (
        lambda c: [curve.update(steps=list(range(2, 14))) for curve in c["curves"].values()],
        "records",
    ),
    "a run compared with itself": (
        lambda c: c["inputs"].update({"candidate/metrics.jsonl": c["inputs"]["reference/metrics.jsonl"]}),
        "records",
    ),
    "no digest of the candidate's curves": (drop("inputs", "candidate/metrics.jsonl"), "records"),
    "no digest of the traces": (drop("inputs", "candidate/layer_trace/steps.safetensors"), "records"),
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
    "a wider envelope": (widen, "P3 again"),
    "every level 'same'": (levels(state="same"), "P2 again"),
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
    from isotrain.parity.canonical import digest_of

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
def test_a_forgery(tmp_path: Path, originals: dict[str, str], name: str) -> None:
    change, found_by = FORGERIES[name]
    path = tmp_path / "c.json"
    path.write_text(originals[next((kind for kind in ("simulated", "mesh") if kind in name), "")])
    assert is_consistent(verify(path, again=levels_again))
    found = verify(rewrite(path, change), again=levels_again)
    wrong = [finding.name for finding in found if finding.state == "wrong"]
    assert (found_by in wrong) if found_by else not wrong, found


def test_the_page_lists_them() -> None:
    assert len(FORGERIES) >= 30
    text = PAGE.read_text(encoding="utf-8")
    for name, (_, found_by) in FORGERIES.items():
        says = f"inconsistent: {found_by}" if found_by else "consistent, and claimed: nobody signed it"
        assert f"| {name} | {says} |" in text, name


def test_a_simulated_device_is_derived(tmp_path: Path, originals: dict[str, str]) -> None:
    """Its name alone, or its package alone, is not enough to make it real."""
    from isotrain.parity.certificate import read_certificate

    path = tmp_path / "c.json"
    for change in (device(name="Ascend910B3"), packages(torch_npu="2.13.0")):
        path.write_text(originals["simulated"])
        assert read_certificate(rewrite(path, change)).candidate.simulated
