"""Ray's object store: large values stay there while only handles of them travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

Value = TypeVar("Value")


@dataclass(frozen=True)
class Handle(Generic[Value]):
    """A value in the store. The reference is inside, so that passing a handle on never fetches the value."""

    reference: Any


def put(value: Value) -> Handle[Value]:
    """Into the store of this machine, owned by this process."""
    return Handle(ray.put(value))


def fetch(handles: Sequence[Handle[Value]]) -> list[Value | None]:
    """The values, from whichever machine has them; None where the process that owned one is gone."""
    try:
        values: list[Value | None] = ray.get([handle.reference for handle in handles])
        return values
    except ray.exceptions.ObjectLostError:
        return [_fetch(handle) for handle in handles]


def _fetch(handle: Handle[Value]) -> Value | None:
    try:
        value: Value = ray.get(handle.reference)
        return value
    except ray.exceptions.ObjectLostError:
        return None
