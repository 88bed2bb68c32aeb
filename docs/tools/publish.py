"""Adds the built site to a directory of versions: `python docs/tools/publish.py DIRECTORY VERSION`.

Each version has a directory of its own, as mike lays them out, and the header has a choice between them. mike
itself publishes one MkDocs build per version; a version of this site is two, one in each language.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

VERSION = re.compile(r"[0-9]+(\.[0-9]+)*")
LIST = "versions.json"
REDIRECT = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=%s/">\n'


def publish(site: Path, directory: Path, version: str) -> list[str]:
    """Copy the built site there as this version, anew if it exists; returns all versions, newest first."""
    target = directory / version
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(site, target)
    versions = sorted(
        (path.name for path in directory.iterdir() if VERSION.fullmatch(path.name)), key=_order, reverse=True
    )
    _write(directory / LIST, [{"version": one, "title": one, "aliases": []} for one in versions])
    for here in versions:
        # The theme looks beside the directory of a build, and the Chinese one is within that of its version.
        _write(
            directory / here / LIST,
            [
                {"version": f"../{one}/zh", "title": one, "aliases": ["zh"] if one == here else []}
                for one in versions
            ],
        )
    (directory / "index.html").write_text(REDIRECT % versions[0], encoding="utf-8")
    return versions


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _write(file: Path, entries: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("version", help="such as 0.2")
    options = parser.parse_args()
    if not VERSION.fullmatch(options.version):
        parser.error(f"version: {options.version!r} is not of the form 0.2")
    os.environ["DOCS_VERSION"] = options.version  # hooks.py: with the choice of versions
    import build

    if failed := build.main():
        return failed
    options.directory.mkdir(parents=True, exist_ok=True)
    print("versions:", ", ".join(publish(build.ROOT / "site", options.directory, options.version)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
