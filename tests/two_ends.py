"""Two pytest processes that share the test files: one begins at the front, one at the back, until they meet.

Fixed halves were out of balance whenever tests were added. With `--claims DIR --end front|back` a process
claims one file after the other in DIR, which is common to both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("two processes that share the tests")
    group.addoption("--claims", type=Path, help="directory in which both claim files; see .ci/halves")
    group.addoption("--end", choices=["front", "back"], default="front")
    group.addoption("--front", default="", help="directories at the front, separated by spaces")


def ordered(items: Sequence[pytest.Item], front: Sequence[Path]) -> list[list[pytest.Item]]:
    """The tests of each file, files of the directories in `front` first."""
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)

    def place(file: Path) -> int:
        return next((i for i, folder in enumerate(front) if file.is_relative_to(folder)), len(front))

    return [by_file[file] for file in sorted(by_file, key=place)]


def claimed(claims: Path, file: Path) -> bool:
    """Whether this process got it."""
    try:
        (claims / hashlib.sha256(str(file).encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    claims: Path | None = config.getoption("claims")
    if claims is None or config.option.collectonly or session.testsfailed:
        return None  # as pytest does it
    files = ordered(session.items, [config.rootpath / folder for folder in config.getoption("front").split()])
    if config.getoption("end") == "back":
        files.reverse()
    mine = (tests for tests in files if claimed(claims, tests[0].path))
    # The next test decides which fixtures end with one: a file is claimed before the last test of another.
    tests = next(mine, [])
    while tests:
        for item, following in pairwise(tests):
            _run(session, item, following)
        last, tests = tests[-1], next(mine, [])
        _run(session, last, tests[0] if tests else None)
    return True


def _run(session: pytest.Session, item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
