"""Joins a cluster without authentication and prints how it is introduced: `python open_cluster.py HOME`.

To be run in a network namespace of its own: such a cluster runs code for anyone who reaches it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from isotrain.cluster.connect import join_cluster
from isotrain.device.cpu import Cpu
from isotrain.errors import ClusterError
from isotrain.recipe.online import ClusterSection

PORT = 6399

if __name__ == "__main__":
    head = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={PORT}"),
            *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=1"),
            *("--object-store-memory=100000000", f"--temp-dir={sys.argv[1]}"),
        ],
        env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        section = ClusterSection(address=f"127.0.0.1:{PORT}")
        deadline = time.monotonic() + 90
        while True:
            try:
                with join_cluster(section, Cpu(), answer_timeout=60) as joined:
                    print(joined.introduction)
                break
            except ClusterError:  # its head replies a moment before its first node is there
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
    finally:
        head.terminate()
        head.wait(timeout=30)
