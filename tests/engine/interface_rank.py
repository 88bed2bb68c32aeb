"""One rank of two as torchrun starts them; prints the sum over both and the interfaces in use."""

from __future__ import annotations

import os
from datetime import timedelta

from isotrain.device.cpu import Cpu
from isotrain.engine import world

# Ranks that connect to themselves would wait for half an hour.
world.COLLECTIVE_TIMEOUT = timedelta(seconds=30)


class WithDevices(Cpu):
    """The host, with a variable for the interface of its own collectives."""

    interface_variable = "DEVICE_SOCKET_IFNAME"  # type: ignore[assignment]


with world.join_world(WithDevices()) as joined:
    (total,) = joined.sum([1.0 + joined.rank])
    print(total, os.environ["GLOO_SOCKET_IFNAME"], os.environ["DEVICE_SOCKET_IFNAME"])
