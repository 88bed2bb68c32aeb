"""Work in a thread that does not keep the program from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Begin it. Not in an executor: one that waits for a worker must not keep the program from ending."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future
