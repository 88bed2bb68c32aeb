"""A seccomp filter that refuses system calls which namespaces and resource limits do not cover.

Memory files and System V shared memory are not part of a process's address space. vsock reaches the host of a
virtual machine from any network namespace. A nested user namespace could mount a larger tmpfs. Two processes
of one program, as those of tests and solution, have the same user: the calls that reach into another one are
refused.
"""

from __future__ import annotations

import errno
import struct
from typing import NamedTuple

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data; the low word of the first argument on little-endian machines.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags of clone
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; of a pair, too: multiprocessing and asyncio use Unix's
_X32 = 0x40000000  # x86_64's other numbering of the same calls

# From here on Linux numbers system calls alike on all architectures.
_REFUSED_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "open_tree_attr": 467,
}
_CLONE3 = 435


class _Machine(NamedTuple):
    architecture: int
    clone: int
    socket: int
    socketpair: int
    refused: dict[str, int]


_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        clone=56,
        socket=41,
        socketpair=53,
        refused={
            "shmget": 29,
            "msgget": 68,
            "ptrace": 101,
            "syslog": 103,
            "pivot_root": 155,
            "mount": 165,
            "umount2": 166,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "unshare": 272,
            "perf_event_open": 298,
            "setns": 308,
            "kcmp": 312,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "memfd_create": 319,
            "bpf": 321,
            "userfaultfd": 323,
        },
    ),
    "aarch64": _Machine(
        0xC00000B7,
        clone=220,
        socket=198,
        socketpair=199,
        refused={
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "unshare": 97,
            "syslog": 116,
            "ptrace": 117,
            "msgget": 186,
            "shmget": 194,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "perf_event_open": 241,
            "setns": 268,
            "kcmp": 272,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "memfd_create": 279,
            "bpf": 280,
            "userfaultfd": 282,
        },
    ),
}
MACHINES = tuple(_MACHINES)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _return(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _refuse(number: int, error: int) -> bytes:
    return _instruction(_JUMP_EQUAL, number, 0, 1) + _return(_ERRNO | error)


def seccomp_filter(machine: str) -> bytes:
    """The filter for what `uname -m` says; a KeyError for machines other than `MACHINES`."""
    of = _MACHINES[machine]
    refused = _return(_ERRNO | errno.EPERM)
    program = _instruction(_LOAD_WORD, _ARCHITECTURE)
    program += _instruction(_JUMP_EQUAL, of.architecture, 1, 0) + _return(_KILL)
    program += _instruction(_LOAD_WORD, _NUMBER)
    program += _instruction(_JUMP_AT_LEAST, _X32, 0, 1) + refused
    for number in (*of.refused.values(), *_REFUSED_EVERYWHERE.values()):
        program += _refuse(number, errno.EPERM)
    # Its flags are behind a pointer. C libraries fall back to clone, whose flags can be read.
    program += _refuse(_CLONE3, errno.ENOSYS)
    program += _instruction(_JUMP_EQUAL, of.clone, 0, 4)
    program += _instruction(_LOAD_WORD, _FIRST_ARGUMENT)
    program += _instruction(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1) + refused + _return(_ALLOW)
    program += _instruction(_JUMP_EQUAL, of.socket, 2, 0)
    program += _instruction(_JUMP_EQUAL, of.socketpair, 1, 0) + _return(_ALLOW)
    program += _instruction(_LOAD_WORD, _FIRST_ARGUMENT)
    for family in _FAMILIES:
        program += _instruction(_JUMP_EQUAL, family, 0, 1) + _return(_ALLOW)
    return program + refused
