"""The sandbox that hostile programs run in, with a secret in the environment around it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hostile import LIMITS, SECRET

from isotrain.process.bubblewrap import Bubblewrap
from sandboxes import bubblewrap


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Bubblewrap]:
    os.environ["SANDBOX_TEST_KEY"] = SECRET
    with bubblewrap(LIMITS) as one:
        yield one
    del os.environ["SANDBOX_TEST_KEY"]
