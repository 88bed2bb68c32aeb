"""Published wheels of torch_npu in a cache: fetched, unzipped, made to load without Ascend's libraries."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from functools import cache
from pathlib import Path

VERSIONS = ("2.5.1", "2.6.0", "2.7.1", "2.10.0", "2.13.0")
PYTHONS = tuple(dict.fromkeys([f"{sys.version_info[0]}.{sys.version_info[1]}", "3.11", "3.10"]))
TAGS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
# The runtime that the wheel calls, and libraries that it only names.
RUNTIME = "ascendcl"
EMPTY = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
CALLED = re.compile(r"(acl|Msprof|rt)\w+")
# Everything fails but what importing takes: the library can be set up, and there is no device.
RESULTS = {
    "aclInit": "(void) { return 0; }",
    "aclFinalize": "(void) { return 0; }",
    "aclrtGetDeviceCount": "(unsigned *count) { *count = 0; return 0; }",
}
FAILS = "(void) { return 500000; }"


NEWEST, NEWEST_OR_PRE = "newest", "newest-or-pre-release"
"""In place of a version: the newest that the registry has now, whatever is in the cache."""

SOURCES = {"vllm"}
"""Packages of which the source archive is read: their wheels hold gigabytes for CUDA."""


SOURCE = ".tar.gz"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class Unavailable(Exception):
    """What is missing here, for the reason of a skip."""


def cache_directory() -> Path:
    """`$ISOTRAIN_WHEELS`, or a folder of the user's cache."""
    if chosen := os.environ.get("ISOTRAIN_WHEELS"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isotrain" / "wheels"


def unzipped(version: str, package: str = "torch_npu") -> Path:
    """The directory that holds a package of a version as its wheel has it."""
    version = released(version, package)
    path = _cached(package, version) or _download(package, version)
    is_source = path.name.endswith(SOURCE)
    directory = path.with_name(path.name.removesuffix(SOURCE).removesuffix(".whl"))
    if not directory.is_dir():
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            if is_source:
                with tarfile.open(path) as archive:
                    archive.extractall(work, filter="data")
                _move(Path(work) / directory.name, directory)
            else:
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(work)
                _move(Path(work), directory)
    return directory


@cache
def released(version: str, package: str) -> str:
    """The version that the registry has now, for one of the names above.

    Without regard to wheels: a version that is published as source alone is the newest all the same.
    """
    if version not in (NEWEST, NEWEST_OR_PRE):
        return version
    command = [*PIP, "index", "versions", package, *(["--pre"] if version == NEWEST_OR_PRE else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if found := re.match(r"\S+ \((\S+)\)", done.stdout):
        return found[1]
    raise Unavailable(f"no package registry says which version of {package} is the newest")


def fits_this_python(directory: Path) -> bool:
    return f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in directory.name


def _cached(package: str, version: str) -> Path | None:
    machine = platform.machine()
    tags = [f"cp{python.replace('.', '')}-*{machine}" for python in PYTHONS]
    for tag in [*tags, f"cp*-abi3-*{machine}", "py3-none-any"]:
        found = sorted(cache_directory().glob(f"{package}-{version}-{tag}.whl"))
        if found:
            return found[0]
    source = cache_directory() / f"{package}-{version}{SOURCE}"
    return source if source.is_file() else None


def _download(package: str, version: str) -> Path:
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    said = ""
    for python in () if package in SOURCES else PYTHONS:
        with tempfile.TemporaryDirectory(dir=cache) as work:
            done = subprocess.run(
                _pip(package, version, python, work), capture_output=True, text=True, timeout=600
            )
            for wheel in Path(work).glob("*.whl"):
                return wheel.rename(cache / wheel.name)
        said += done.stderr
    if source := _download_source(package, version):
        return source
    # A registry that answers lists the versions that it has for this Python.
    if "from versions: " in said and "(from versions: none)" not in said:
        raise AssertionError(f"no wheel of {package} {version} for Python {', '.join(PYTHONS)}:\n{said}")
    raise Unavailable(f"{package} {version} is not in {cache} and no package registry can be reached")


def _download_source(package: str, version: str) -> Path | None:
    """By its link: pip would build an archive to learn what it is. None where there is none."""
    # No package has this version, so that pip lists the links that it knows, and ends.
    command = [*PIP, "-vv", "download", "--no-deps", "--no-binary=:all:", f"{package}==0.dev0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    link = re.search(
        rf"Found link (https://\S+/{package}-{re.escape(version)}{re.escape(SOURCE)})#sha256=(\w{{64}}) ",
        done.stdout + done.stderr,
    )
    if link is None:
        return None
    with urllib.request.urlopen(link[1], timeout=600) as reply:
        data = reply.read()
    assert hashlib.sha256(data).hexdigest() == link[2], "the archive is not what the registry says"
    with tempfile.TemporaryDirectory(dir=cache_directory()) as work:
        path = Path(work) / "archive"
        path.write_bytes(data)
        return path.rename(cache_directory() / f"{package}-{version}{SOURCE}")


def _pip(package: str, version: str, python: str, directory: str) -> list[str]:
    command = [*PIP, "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", directory]
    command += ["--retries", "1", "--timeout", "20"]
    for tag in TAGS:
        command += ["--platform", f"{tag}_{platform.machine()}"]
    return [*command, f"{package}=={version}"]


def stubs(wheel: Path) -> Path:
    """A directory of libraries in place of Ascend's, which let an unzipped wheel be imported."""
    tools = {name: shutil.which(name) for name in ("gcc", "nm")}
    if None in tools.values():
        raise Unavailable("libraries to import torch_npu without CANN are built with gcc and nm")
    source = "".join(f"int {name}{RESULTS.get(name, FAILS)}\n" for name in _called(wheel))
    directory = cache_directory() / f"stubs-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if not directory.is_dir():
        cache_directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_directory()) as work:
            _compile(Path(work) / f"lib{RUNTIME}.so", source)
            for name in EMPTY:
                _compile(Path(work) / f"lib{name}.so", "")
            _move(Path(work), directory)
    return directory


def _called(wheel: Path) -> list[str]:
    """Functions of the runtime that the wheel's libraries leave open."""
    package, names = wheel / "torch_npu", set[str]()
    for library in [*package.glob("lib/*.so"), *package.glob("_C*.so")]:
        command = ["nm", "-D", "--undefined-only", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        symbols = (line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.strip())
        names.update(symbol for symbol in symbols if CALLED.fullmatch(symbol))
    return sorted(names)


def _compile(library: Path, source: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=120)


def _move(work: Path, directory: Path) -> None:
    """The finished directory in one step; another process may have been faster."""
    finished = work / "finished"
    parts = list(work.iterdir())
    finished.mkdir()
    for part in parts:
        part.rename(finished / part.name)
    try:
        finished.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
