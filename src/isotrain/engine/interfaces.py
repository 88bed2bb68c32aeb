"""The network interface that collectives of several machines use."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable

from isotrain.errors import LaunchError

# Linux's request for the address of an interface.
SIOCGIFADDR = 0x8915
HOST_VARIABLE = "GLOO_SOCKET_IFNAME"
# Reserved for documents: nothing is sent there, but the system knows by which interface it would be.
ELSEWHERE = "192.0.2.1"


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has an IPv4 address."""
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if reply[20:24] == wanted:
                return name
    if wanted[0] == 127:  # every address of that net is the loopback interface's
        return interface_of("127.0.0.1")
    raise LaunchError(f"no network interface has the address {address}; set {HOST_VARIABLE} to its name")


def use_interface(find_address: Callable[[], str], device_variable: str | None) -> None:
    """Let collectives use the interface with that address, unless the user has set one.

    The device's too on one machine: by themselves they would listen on an interface that others reach.
    """
    if HOST_VARIABLE not in os.environ:
        os.environ[HOST_VARIABLE] = interface_of(find_address())
    if device_variable:
        os.environ.setdefault(device_variable, os.environ[HOST_VARIABLE])


def address_towards(host: str) -> str:
    """This machine's own address on the way to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return address


def address_towards_master(host: str, one_machine: bool) -> str:
    """The same for torchrun's MASTER_ADDR, which on rank 0's machine may be a name of 127.0.1.1.

    gloo by itself takes the address of this machine's name: where that is 127.0.1.1, as on many systems,
    other machines connect to themselves.
    """
    try:
        address = address_towards(host)
        return address if one_machine or not address.startswith("127.") else address_towards(ELSEWHERE)
    except OSError as error:
        raise LaunchError(
            f"no network interface of this machine leads to MASTER_ADDR={host} ({error}); set it to an IPv4 "
            f"address of rank 0's machine, or set {HOST_VARIABLE} to the interface between the machines"
        ) from error
