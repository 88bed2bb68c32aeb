"""Calls that hang are given up in time, with the words of what has happened."""

from __future__ import annotations

import threading

from isotrain.rollout.attempts import error_within


def test_outcomes() -> None:
    def fails() -> None:
        raise OSError("no such network")

    assert error_within(60, lambda: 1) == ""
    assert error_within(60, fails) == "OSError: no such network"
    never = threading.Event()
    assert error_within(0.05, never.wait) == "no end within 0.05 s"
    never.set()
