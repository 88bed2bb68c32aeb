"""Calls that may hang in a driver or on a network, where no time limit of theirs can be trusted."""

from __future__ import annotations

import threading
from collections.abc import Callable


def error_within(seconds: float, act: Callable[[], object]) -> str:
    """Why the call has failed, or that it goes on after its time; empty where it has succeeded.

    A call that hangs keeps its thread, which does not keep the process from ending.
    """
    outcome: list[str] = []

    def attempt() -> None:
        try:
            act()
        except Exception as error:  # of any kind, from drivers as well
            outcome.append(f"{type(error).__name__}: {error}")
        else:
            outcome.append("")

    thread = threading.Thread(target=attempt, name="attempt", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no end within {seconds:g} s"
