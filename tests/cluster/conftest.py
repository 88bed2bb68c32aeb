"""What the tests of cluster share: workers that find their classes, and no cluster of the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import npusim
import pytest


@pytest.fixture(scope="module", autouse=True)
def workers_find_the_tests() -> Iterator[None]:
    """Ray's processes inherit the environment of the one that starts them, but not its `sys.path`."""
    with pytest.MonkeyPatch.context() as patch:
        places = [str(npusim.SITE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        yield
