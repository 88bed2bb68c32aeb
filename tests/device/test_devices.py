from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isotrain.device import cpu
from isotrain.device.accelerator import CUDA, Accelerator
from isotrain.device.base import Device, Memory
from isotrain.device.cpu import Cpu
from isotrain.device.detect import DEVICES, choose_device
from isotrain.device.npu import NPU
from isotrain.errors import DeviceError

MEMBERS = [name for name in vars(Device) if not name.startswith("_")]


@pytest.fixture
def device(device_type: str) -> Device:
    return choose_device(device_type)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Accelerators report the name that is put here."""
    names = [""]
    monkeypatch.setattr(Accelerator, "name", lambda self: names[0])
    yield names


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_the_whole_interface(name: str) -> None:
    found = DEVICES[name]
    assert found.type == name and len(MEMBERS) > 15
    for member in MEMBERS:
        declared, value = vars(Device)[member], getattr(found, member)
        if isinstance(declared, property):
            assert not callable(value), member
        else:
            expected = list(inspect.signature(declared).parameters)[1:]
            assert list(inspect.signature(value).parameters) == expected, member
    assert isinstance(found.flash_attention, bool) and isinstance(found.fused_adamw, bool)
    assert "gloo" in found.collectives, "host numbers are exchanged too"
    hides = found.visible_devices_variable
    assert hides is None or hides in found.numerics_variables


def test_auto_takes_the_accelerator_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") is NPU
    monkeypatch.setattr(Accelerator, "available", lambda self: self.type in ("cuda", "npu"))
    assert choose_device("auto") is CUDA
    monkeypatch.setattr(Accelerator, "available", lambda self: False)
    assert choose_device("auto").type == "cpu"


def test_refuses_unknown_devices_and_suggests_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"device\.type: unknown device 'npus'; did you mean 'npu'\?"):
        choose_device("npus")
    with pytest.raises(DeviceError, match=r"unknown device 'gpu'; did you mean 'cuda'\?"):
        choose_device("gpu")
    with pytest.raises(DeviceError, match="unknown device 'abacus'; use one of: auto, cuda, npu, cpu"):
        choose_device("abacus")


@pytest.mark.skipif(CUDA.available(), reason="there is one")
def test_refuses_an_absent_device() -> None:
    with pytest.raises(DeviceError, match=r"no 'cuda' device is usable here \(usable: npu, cpu\).*type=auto"):
        choose_device("cuda")
    assert CUDA.count() == 0


def test_a_device_that_torch_does_not_know_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "npu")
    assert not NPU.available() and NPU.count() == 0


def test_present_devices_are_counted_and_named(device: Device) -> None:
    assert device.available() and device.count() >= 1 and device.name()
    assert NPU.count() == 2 and Cpu().count() == len(os.sched_getaffinity(0))


def test_activate_makes_a_device_current() -> None:
    assert Cpu().activate(1) == torch.device("cpu")
    torch.npu.set_compile_mode(jit_compile=True)
    try:
        assert NPU.activate(1) == torch.device("npu:1")
        assert torch.npu.current_device() == 1
        assert torch.npu.is_jit_compile_false(), "operators are not compiled for each shape"
    finally:
        assert NPU.activate(0) == torch.device("npu:0")


def draw(device_type: str) -> list[float]:
    on_device = torch.rand(4, device=device_type)
    return [*torch.rand(4).tolist(), *on_device.tolist()]


def test_generators_go_on_from_a_saved_state(device: Device) -> None:
    device.seed(5)
    draw(device.type)
    state = device.rng_state()
    assert all(part.dtype == torch.uint8 and part.device.type == "cpu" for part in state.values())
    first, second = draw(device.type), draw(device.type)
    device.set_rng_state(state)
    assert draw(device.type) == first and first != second


def test_a_seed_fixes_host_and_device(device: Device) -> None:
    device.seed(5)
    first = draw(device.type)
    device.seed(6)
    other = draw(device.type)
    device.seed(5)
    assert draw(device.type) == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_memory_of_an_accelerator_follows_its_tensors() -> None:
    torch.npu.empty_cache()
    before = NPU.memory()
    torch.npu.reset_peak_memory_stats()
    tensor = torch.empty(1 << 20, device="npu")
    held = NPU.memory()
    del tensor
    after = NPU.memory()
    size = 4 << 20
    peak = before.allocated + size
    assert held == Memory(allocated=peak, peak=peak, free=held.free, total=before.total)
    assert 0 < before.free - held.free <= size  # a part may have been cached by the allocator
    assert after.allocated == before.allocated and after.peak == peak
    torch.npu.reset_peak_memory_stats()
    assert NPU.memory().peak == before.allocated < before.total == 64 << 30


def test_memory_of_the_host_follows_its_tensors() -> None:
    """In a process of its own: the allocator of this one may have room left, so that nothing grows."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this kernel cannot reset the peak")
    program = """
import json, torch
from pathlib import Path
from isotrain.device.cpu import Cpu

device = Cpu()
before = device.memory()
Path("/proc/self/clear_refs").write_text("5")
tensor = torch.ones(SIZE // 4)
held = device.memory()
del tensor
after = device.memory()
Path("/proc/self/clear_refs").write_text("5")
print(json.dumps([vars(memory) for memory in (before, held, after, device.memory())]))
"""
    size = 128 << 20
    done = subprocess.run(
        [sys.executable, "-c", program.replace("SIZE", str(size))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, held, after, reset = json.loads(done.stdout)
    assert 0 < before["allocated"] <= before["peak"] < before["total"]
    assert held["allocated"] - before["allocated"] > 0.9 * size
    assert held["allocated"] - after["allocated"] > 0.9 * size
    assert after["peak"] - after["allocated"] > 0.9 * size  # the kernel counts a little late
    assert after["peak"] - reset["peak"] > 0.9 * size


def test_a_system_without_proc_reports_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_read", lambda path: "")
    assert Cpu().name() == "cpu"
    assert (Cpu().memory().allocated, Cpu().memory().peak) == (0, 0)


def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(Cpu, "count", lambda self: 8)
    for ranks, threads in ((1, "8"), (2, "4"), (3, "2"), (16, "1")):
        assert Cpu().rank_environment(ranks) == {"OMP_NUM_THREADS": threads}
        assert NPU.rank_environment(ranks)["OMP_NUM_THREADS"] == "1"


def test_many_ranks_wait_longer_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HCCL_CONNECT_TIMEOUT"
    monkeypatch.delenv(name, raising=False)
    assert name not in NPU.rank_environment(8, 63)
    assert NPU.rank_environment(8, 64)[name] == "1200"
    monkeypatch.setenv(name, "300")
    assert NPU.rank_environment(8, 64)[name] == "300"


def test_processes_on_one_device_choose_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    host, own, first = "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE", "HCCL_IF_BASE_PORT"
    for name in (host, own, first):
        monkeypatch.delenv(name, raising=False)
    assert NPU.rank_environment(8).items() >= {host: "auto", own: "auto"}.items()
    monkeypatch.setenv(own, "61000-61050")
    assert NPU.rank_environment(8).items() >= {host: "auto", own: "61000-61050"}.items()
    monkeypatch.setenv(first, "50000")  # a range would overrule it
    assert host not in NPU.rank_environment(8)
    assert all(device.port_variables({}) == {} for device in (CUDA, Cpu()))


@pytest.mark.parametrize("name", DEVICES)
def test_the_user_decides_on_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert DEVICES[name].rank_environment(2)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A10", 125),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_the_longest_name_counts(named: list[str], name: str, tflops: float) -> None:
    named[0] = name
    assert CUDA.peak_flops(torch.bfloat16) == CUDA.peak_flops(torch.float16) == tflops * 1e12
    assert CUDA.peak_flops(torch.float32) is None


def test_peaks_that_are_not_known(named: list[str]) -> None:
    named[0] = "some device to come"
    assert CUDA.peak_flops(torch.bfloat16) is None and NPU.peak_flops(torch.bfloat16) is None
    assert Cpu().peak_flops(torch.bfloat16) is None


def test_peak_of_the_simulated_device() -> None:
    assert NPU.name().startswith("Ascend910B3") and NPU.peak_flops(torch.bfloat16) == 295e12


def test_synchronize_waits_for_the_queue_of_an_accelerator(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.npu, "synchronize", lambda: waited.append("npu"))
    device.synchronize()
    assert waited == (["npu"] if device.type == "npu" else [])
