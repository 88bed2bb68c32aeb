"""The simulated npu refuses what a real one refuses: memory, doubles, devices and ports that others have."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import npusim
import pytest
import torch

pytestmark = pytest.mark.heavy

MIB = 1 << 20
# Whoever is started holds its memory until it is told to go on.
HOLD = """
    import sys, torch
    held = torch.empty({bytes}, dtype=torch.uint8, device="npu:{device}")
    print(*torch.npu.mem_get_info({device}), flush=True)
    {then}
"""


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def end_all() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def start(code: str, **options: object) -> subprocess.Popen[str]:
    # Training in this process, as earlier tests did, sets the ports of HCCL for all that it starts.
    inherited = {name: value for name, value in npusim.environment().items() if not name.startswith("HCCL_")}
    environment = {**inherited, **{name: str(value) for name, value in options.items()}}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate("\n", timeout=120)
    assert process.returncode == 0, error
    return out.strip()


def holding(
    host: Path, mib: int, then: str = "sys.stdin.readline()", device: int = 0, **options: object
) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with so much memory of a device, and what is free and there in all beside it."""
    code = HOLD.format(bytes=mib * MIB, then=then, device=device)
    process = start(code, NPU_SIM_HOST=host, NPU_SIM_MEMORY_MB=100, **options)
    assert process.stdout is not None
    return process, [int(number) for number in process.stdout.readline().split()]


def test_processes_share_the_memory_of_a_device(tmp_path: Path) -> None:
    first, info = holding(tmp_path, 60)
    assert info == [40 * MIB, 100 * MIB]
    second, info = holding(tmp_path, 30)
    assert info == [10 * MIB, 100 * MIB]
    third = start(
        HOLD.format(bytes=11 * MIB, then="", device=0), NPU_SIM_HOST=tmp_path, NPU_SIM_MEMORY_MB=100
    )
    _, error = third.communicate(timeout=120)
    assert third.returncode and "OutOfMemoryError: NPU out of memory. Tried to allocate 11.00 MiB" in error
    assert "(NPU 0; 100.00 MiB total capacity; 0.00 MiB already allocated" in error
    assert "10.00 MiB free" in error
    assert npusim.usage(tmp_path).peak == 90 * MIB
    finish(first)
    finish(second)


def test_a_mask_does_not_hide_who_uses_a_device(tmp_path: Path) -> None:
    masked, info = holding(tmp_path, 60, ASCEND_RT_VISIBLE_DEVICES=1)  # its 0 is the machine's 1
    assert info[0] == 40 * MIB
    same, info = holding(tmp_path, 5, device=1)
    other, alone = holding(tmp_path, 5, device=0)
    assert info[0] == 35 * MIB and alone[0] == 95 * MIB
    for process in (masked, same, other):
        finish(process)


def test_a_killed_process_gives_its_memory_back(tmp_path: Path) -> None:
    first, _ = holding(tmp_path, 60)
    first.kill()
    while (Path("/proc") / str(first.pid) / "stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    second, info = holding(tmp_path, 90)  # nobody has waited for the dead one yet
    assert info[0] == 10 * MIB
    first.wait()
    finish(second)
    assert [process.peak for process in npusim.usage(tmp_path).processes] == [60 * MIB, 90 * MIB]


def test_what_an_allocator_caches_is_not_free_to_others(tmp_path: Path) -> None:
    then = """sys.stdin.readline(); del held; print(*torch.npu.mem_get_info()); torch.npu.empty_cache()
    print(*torch.npu.mem_get_info()); print(torch.npu.memory_reserved(), torch.npu.max_memory_reserved())"""
    process, _ = holding(tmp_path, 60, then)
    cached, emptied, reserved = (line.split() for line in finish(process).splitlines())
    assert int(cached[0]) == 40 * MIB and int(emptied[0]) == 100 * MIB
    assert reserved == ["0", str(60 * MIB)]
    (row,) = npusim.usage(tmp_path).processes
    assert (row.held, row.peak, row.rank) == (0, 60 * MIB, -1)


def test_an_exclusive_device_has_one_process(tmp_path: Path) -> None:
    first, _ = holding(tmp_path, 1, NPU_SIM_EXCLUSIVE=1)
    second = start(
        HOLD.format(bytes=1, then="", device=0),
        NPU_SIM_HOST=tmp_path, NPU_SIM_MEMORY_MB=100, NPU_SIM_EXCLUSIVE=1,
    )  # fmt: skip
    _, error = second.communicate(timeout=120)
    assert second.returncode and "error code is 507033" in error and "Failed to start the device" in error
    neighbour, _ = holding(tmp_path, 1, device=1, NPU_SIM_EXCLUSIVE=1)
    finish(first)
    finish(neighbour)
    finish(holding(tmp_path, 1, NPU_SIM_EXCLUSIVE=1)[0])  # free again


LISTEN = """
    import sys, torch
    from torch_npu.distributed import listen
    torch.npu.set_device({device})
    try:
        listen(rank={rank})
    except RuntimeError as error:
        assert "bound already" in str(error), error
        print("clash", flush=True)
    else:
        print("free", flush=True)
    sys.stdin.readline()
"""


def clashes(host: Path, device: int = 0, rank: int = 0, **options: object) -> bool:
    """Whether a process that listens for a communicator, and goes on living, finds its ports taken."""
    assert all(process.poll() is None for process in STARTED), "who listened is gone"
    process = start(LISTEN.format(device=device, rank=rank), NPU_SIM_HOST=host, **options)
    assert process.stdout is not None
    return {"clash": True, "free": False}[process.stdout.readline().strip()]


def test_communicators_of_two_processes_on_one_device_clash_on_ports(tmp_path: Path) -> None:
    ranges = {"HCCL_NPU_SOCKET_PORT_RANGE": "61000-61001", "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60003"}
    assert not clashes(tmp_path)
    assert not clashes(tmp_path, device=1, rank=1), "the ranks of one job"
    assert clashes(tmp_path) and clashes(tmp_path, rank=1)
    assert not clashes(tmp_path, **dict.fromkeys(ranges, "auto"))
    assert [clashes(tmp_path, **ranges) for _ in range(3)] == [False, False, True]


def test_doubles_are_stored_and_moved_but_not_computed_with() -> None:
    x = torch.ones(2, 2, dtype=torch.float64).npu()
    assert x.cpu().tolist() == [[1, 1], [1, 1]] and x[0, 1].item() == 1
    assert torch.zeros(2, dtype=torch.float64, device="npu").tolist() == [0, 0]
    assert x.float().double().cpu().sum().item() == 4 and torch.cat([x, x]).shape == (4, 2)
    for compute in (
        lambda: x @ x,
        lambda: x + 1,
        lambda: x.sum(),
        lambda: x.float().sum(dtype=torch.float64),
        lambda: torch._foreach_mul([x], 2.0),
        lambda: x.exp_(),
        lambda: torch.nn.functional.conv1d(x[None], x[:, :, None]),
    ):
        with pytest.raises(RuntimeError, match="not implemented for DT_DOUBLE"):
            compute()
