"""Ray's object store: large values stay there while only handles of them travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray


class Handle(NamedTuple):
    """A value in the store. The reference is inside, so that passing a handle on never fetches the value."""

    reference: Any


def put(value: Any) -> Handle:
    """Into the store of this machine, owned by this process."""
    return Handle(ray.put(value))


def fetch(handles: Sequence[Handle]) -> list[Any]:
    """The values, from whichever machine has them; None where the process that owned one is gone."""
    try:
        found: list[Any] = ray.get([handle.reference for handle in handles])
        return found
    except ray.exceptions.ObjectLostError:
        return [_fetch(handle) for handle in handles]


def _fetch(handle: Handle) -> Any:
    try:
        return ray.get(handle.reference)
    except ray.exceptions.ObjectLostError:
        return None
