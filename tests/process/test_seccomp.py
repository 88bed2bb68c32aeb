"""The seccomp filter, interpreted: what it decides on every machine, not only on that of the tests."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from isotrain.process.seccomp import MACHINES, seccomp_filter

ALLOWED, KILLED, REFUSED, UNKNOWN = "allowed", "killed", errno.EPERM, errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {
        "read": 0,
        "socket": 41,
        "socketpair": 53,
        "clone": 56,
        "execve": 59,
        "unshare": 272,
        "memfd_create": 319,
    },
    "aarch64": {
        "read": 63,
        "socket": 198,
        "socketpair": 199,
        "clone": 220,
        "execve": 221,
        "unshare": 97,
        "memfd_create": 279,
    },
}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def decide(machine: str, number: int, first: int = 0, architecture: int | None = None) -> str | int:
    """The kernel's interpreter, as far as this filter needs it."""
    program = list(struct.iter_unpack("<HBBI", seccomp_filter(machine)))
    data = struct.pack("<iIQQ", number, architecture or ARCHITECTURES[machine], 0, first)
    value, place = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            kind = operand & 0xFFFF0000
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED, 0x00050000: operand & 0xFFFF}[kind]
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_decides_by_call_arguments_and_architecture(machine: str) -> None:
    numbers = NUMBERS[machine]
    assert decide(machine, numbers["read"]) == decide(machine, numbers["execve"]) == ALLOWED
    assert decide(machine, numbers["unshare"]) == decide(machine, numbers["memfd_create"]) == REFUSED
    assert decide(machine, 425) == REFUSED and decide(machine, 435) == UNKNOWN
    thread, process, user, network = 0x3D0F00, 17, 0x10000000 | 17, 0x40000000 | 17
    assert [decide(machine, numbers["clone"], flags) for flags in (thread, process)] == [ALLOWED] * 2
    assert [decide(machine, numbers["clone"], flags) for flags in (user, network, 0x20000)] == [REFUSED] * 3
    for call in ("socket", "socketpair"):
        families = {family: decide(machine, numbers[call], family) for family in range(64)}
        assert {family for family, decision in families.items() if decision == ALLOWED} == {1, 2, 10}
        assert set(families.values()) == {ALLOWED, REFUSED}
    # The numbers of another architecture mean other calls.
    assert decide(machine, numbers["read"], architecture=0x40000003) == KILLED
    assert decide(machine, 0x40000000 | numbers["read"]) == REFUSED


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].is_file():
        pytest.skip("no headers of the kernel: install linux-libc-dev")
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    refused = {number for number in range(1024) if decide(machine, number, first=1) in (REFUSED, UNKNOWN)}
    names = {name for name, number in known.items() if number in refused}
    expected = {
        *("add_key", "bpf", "clone3", "fsconfig", "fsmount", "fsopen", "fspick", "io_uring_enter"),
        *("io_uring_register", "io_uring_setup", "kcmp", "keyctl", "memfd_create", "memfd_secret", "mount"),
        *("mount_setattr", "move_mount", "msgget", "open_tree", "open_tree_attr", "perf_event_open"),
        *("pidfd_getfd", "pivot_root", "syslog"),
        *("process_vm_readv", "process_vm_writev", "ptrace", "request_key", "setns", "shmget", "umount2"),
        *("unshare", "userfaultfd"),
    }
    # Older headers do not know all of them; `syscalls` is how many there are.
    assert names - {"syscalls"} == expected & known.keys()
