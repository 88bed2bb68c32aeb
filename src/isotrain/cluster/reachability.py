"""Whether a cluster replies at an address, and whether it needs a token."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import Enum


class Answer(Enum):
    OPEN = "open"
    """The cluster accepts requests."""
    REFUSED = "refused"
    """It needs a token, and got none or a wrong one."""
    NONE = "none"
    """No reply in time."""


# In a process of its own, because Ray reads its authentication mode once, and because its client cannot be
# interrupted while it waits for a reply.
_VISITOR = """
import os, sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_get(b"isotrain", None, timeout=10)
except AuthenticationError:
    print("refused", flush=True)
else:
    print("open", flush=True)
os._exit(0)
"""


def knock(address: str, timeout: float, *, stranger: bool = False) -> Answer:
    """How the cluster's head at `host:port` replies to this process, or to one without a token."""
    environment = dict(os.environ)
    if stranger:
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_")}
        environment["RAY_AUTH_MODE"] = "disabled"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _VISITOR, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return Answer.NONE
    last = done.stdout.split()[-1:]
    return Answer(last[0]) if last and done.returncode == 0 else Answer.NONE
