"""Eight ranks, forked; each says how many connections it has after a sum: `python many_ranks.py DEMAND`."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from isotrain.device.cpu import Cpu
from isotrain.engine import world

RANKS = 8


def connections() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the list's own
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def rank(number: int, store: str, out: Path) -> None:
    before = connections()
    os.environ.update(RANK=str(number), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(number))
    with world.join_world(Cpu(), store) as joined:
        (total,) = joined.sum([1.0])
        said = {
            "total": total,
            "sockets": connections() - before,
            "soft": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        (out / str(number)).write_text(json.dumps(said))
        joined.barrier()


if __name__ == "__main__":
    world.CONNECT_ON_DEMAND = int(sys.argv[1])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, min(hard, 512)))
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for number in range(RANKS):
            if (child := os.fork()) == 0:
                rank(number, f"{directory}/store", Path(directory))
                os._exit(0)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        assert not any(ended), ended
        print(
            json.dumps([json.loads((Path(directory) / str(number)).read_text()) for number in range(RANKS)])
        )
