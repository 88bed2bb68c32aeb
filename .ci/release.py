#!/usr/bin/env python3
"""Makes what a release publishes: sdist, wheel, their digests, an SBOM and the notes. Publishes nothing.

    .ci/release.py OUT [--tag v0.2.0]

Both archives are built twice, in two clones, and must be equal byte for byte. A tag must be that of the
version and of the newest section of CHANGELOG.md. Needs hatchling (requirements/build.txt) and git.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# What users may install, in the versions that were tested together.
LOCK = ".ci/requirements.lock"


def build(directory: Path) -> tuple[Path, Path]:
    """The sdist of this commit, and the wheel that is built from it, without the network."""
    clone = directory / "isotrain"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True, timeout=120)
    hatch = [sys.executable, "-m", "hatchling", "build", "--target"]
    subprocess.run([*hatch, "sdist"], cwd=clone, check=True, capture_output=True, timeout=300)
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    source = directory / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*hatch, "wheel"], cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = (source / "dist").glob("*.whl")
    return sdist, wheel


def version_of(repository: Path) -> str:
    text = (repository / "src/isotrain/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def notes_of(changelog: str, version: str) -> str:
    """The section of a version; refuses a release whose changes stand elsewhere."""
    sections = re.split(r"^## (.+)$", changelog, flags=re.MULTILINE)[1:]
    unreleased, first = sections[1].strip(), sections[2]
    if sections[0] != "Unreleased" or not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", first):
        raise SystemExit(
            f"CHANGELOG.md: expected an empty Unreleased and then {version} with its date, not {first}"
        )
    if unreleased:
        raise SystemExit(f"CHANGELOG.md: move what is under Unreleased to {version}")
    return sections[3].strip() + "\n"


def components(lock: str) -> list[dict[str, object]]:
    """The pinned packages, with the digests of their files, as CycloneDX has them."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)((?:\s*\\\n\s+--hash=\S+)*)", lock, re.MULTILINE)
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
            "hashes": [
                {"alg": "SHA-256", "content": digest}
                for digest in re.findall(r"sha256:([0-9a-f]{64})", hashes)
            ],
        }
        for name, version, hashes in pins
    ]


def sbom(version: str, files: dict[str, str]) -> dict[str, object]:
    """CycloneDX 1.6: the archives, and the versions of other packages that they were tested with."""
    purl = f"pkg:pypi/isotrain@{version}"
    listed = components((REPOSITORY / LOCK).read_text(encoding="utf-8"))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": purl,
                "name": "isotrain",
                "version": version,
                "purl": purl,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [{"name": f"sha256:{name}", "value": digest} for name, digest in files.items()],
            }
        },
        "components": listed,
        "dependencies": [{"ref": purl, "dependsOn": [item["bom-ref"] for item in listed]}],
    }


def main(out: Path, tag: str | None) -> None:
    version = version_of(REPOSITORY)
    if tag is not None:
        if tag != f"v{version}":
            raise SystemExit(f"the tag is {tag}, but src/isotrain/__init__.py has version {version}")
        notes = notes_of((REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        (out / "notes.md").parent.mkdir(parents=True, exist_ok=True)
        (out / "notes.md").write_text(notes, encoding="utf-8")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        archives = [
            {path.name: path.read_bytes() for path in build(Path(place))} for place in (first, second)
        ]
    if archives[0] != archives[1]:
        raise SystemExit("two builds of this commit differ: the release would not be reproducible")
    (out / "dist").mkdir(parents=True, exist_ok=True)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in archives[0].items()}
    for name, content in archives[0].items():
        (out / "dist" / name).write_bytes(content)
        print(f"{digests[name]}  {name}")
    (out / "sbom.cdx.json").write_text(json.dumps(sbom(version, digests), indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tag")
    options = parser.parse_args()
    main(options.out, options.tag)
