"""A simulated npu for tests, which proves code paths and never Ascend numerics or speed."""

import contextlib
import importlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

SITE = Path(__file__).with_name("site")


def environment(
    devices: int = 2, *, host: Path | None = None, memory: int | None = None, exclusive: bool = False
) -> dict[str, str]:
    """The whole environment of a subprocess in which `import torch` finds the simulated npu by itself.

    `host` is a directory: all processes that have the same share its devices, as those of one machine do.
    `memory` is that of each device in bytes, `exclusive` gives a device to the first process that uses it.
    """
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    strict = {
        "NPU_SIM_HOST": host and str(host),
        "NPU_SIM_MEMORY_MB": None if memory is None else repr(memory / 2**20),
        "NPU_SIM_EXCLUSIVE": "1" if exclusive else None,
    }
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "NPU_SIM_DEVICES": str(devices),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        **{name: value for name, value in strict.items() if value},
    }


class Process(NamedTuple):
    """What a process held of a device, in bytes; `held` is left as it was when the process ended."""

    pid: int
    rank: int
    """Its RANK, or -1 for a process that is no training rank."""
    held: int
    peak: int


class Usage(NamedTuple):
    """The memory of one device of a simulated machine."""

    peak: int
    """The most that all processes held at once, with what their allocators cached."""
    processes: list[Process]


def usage(host: Path, device: int = 0) -> Usage:
    """Who has used a device of the machine `host`, in the order in which they came."""
    together, *rows = struct.iter_unpack("=4q", (host / f"npu-{device}").read_bytes())
    return Usage(together[3], [Process(*row) for row in rows if row[0]])


def load() -> None:
    """Makes the device available in this process, for good; `NPU_SIM_DEVICES` says how many, 2 by default.

    Call it before transformers or accelerate are imported: they look for an npu once, at import.
    """
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
    importlib.import_module("torch_npu")
    import torch

    # The autograd engine makes one thread per device at the first backward of a process, which may be past.
    torch.autograd.set_multithreading_enabled(False)


def run_ranks(command: list[str], ranks: int = 2, timeout: float = 120) -> list[str]:
    """Runs one process per rank as torchrun would; returns their outputs or raises the first failure."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **environment(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        codes = _wait(processes, timeout)
        outputs = [_content(log) for log in logs]
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        if code:
            raise RuntimeError(f"rank {rank} ended with {code}:\n{output}")
    if None in codes:
        raise TimeoutError(f"ranks still ran after {timeout} s:\n" + "\n".join(outputs))
    return outputs


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Exit codes; when one rank fails the others would wait for it, so they are ended with code None."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return codes


def _content(log: IO[str]) -> str:
    log.seek(0)
    return log.read()
