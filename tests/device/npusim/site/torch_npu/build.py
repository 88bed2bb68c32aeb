"""Compiles the C++ of the simulated npu once per source and torch version, then imports the library."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

NAME = "npusim_C"
SOURCES = sorted(Path(__file__).with_name("csrc").iterdir())
FLAGS = ["-O1", "-g0"]


def cache_directory() -> Path:
    """`$NPU_SIM_CACHE`, or a folder of the user's cache, with one subfolder per distinct build."""
    if chosen := os.environ.get("NPU_SIM_CACHE"):
        root = Path(chosen)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isotrain"
    digest = hashlib.sha256(repr((torch.__version__, sys.implementation.cache_tag, FLAGS)).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return root / f"npusim-{digest.hexdigest()[:16]}"


def library() -> ModuleType:
    """The compiled extension; a finished build is imported without looking at any header."""
    directory = cache_directory()
    finished = directory / "finished"
    if finished.exists():
        return _import(directory / f"{NAME}.so")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "building").open("w") as lock:
        # The kernel drops this lock with its process, so a build that was killed blocks nobody.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if finished.exists():
            return _import(directory / f"{NAME}.so")
        module = _compile(directory)
        finished.touch()
        return module


def _import(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(directory: Path) -> ModuleType:
    from torch.utils import cpp_extension

    print(f"building the simulated npu in {directory} (a few minutes, once)", file=sys.stderr)
    # torch's own lock file survives a killed build and would block every later one.
    (directory / "lock").unlink(missing_ok=True)
    before = dict(os.environ)
    os.environ.setdefault("MAX_JOBS", "2")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        return cpp_extension.load(
            NAME,
            [str(source) for source in SOURCES if source.suffix == ".cpp"],
            extra_cflags=FLAGS,
            build_directory=str(directory),
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
