"""What goes into the sandbox to test a solution, and what comes out of it."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from isotrain.reward.code_tests import CallTest, SourceTest

# It reads its one line of stdin, and drops what the solution and the tests print. Its lines begin with a
# random word, which the process of the solution does not have.
PROGRAM = Path(__file__).with_name("code_harness.py").read_text(encoding="utf-8")


def make_job(setup: str, solution: str, tests: list[CallTest | SourceTest]) -> tuple[str, str]:
    """The line for the program's stdin, and the word that its results begin with."""
    word = secrets.token_hex(16)
    described: list[dict[str, Any]] = [
        {"source": test.source}
        if isinstance(test, SourceTest)
        else {"function": test.function, "arguments": test.arguments}
        for test in tests
    ]
    job = {"word": word, "setup": setup, "solution": solution, "tests": described}
    return json.dumps(job) + "\n", word


def is_ready(stdout: str, word: str) -> bool:
    """Whether the program came as far as the solution: before that, nothing that fails is the solution's."""
    return stdout.startswith(f"{word} ready\n")


def read_results(stdout: str, word: str) -> dict[int, Any]:
    """What the tests returned, by their index; those that failed are not in it."""
    found: dict[int, Any] = {}
    for line in stdout.split("\n"):
        if line.startswith(f"{word} "):
            try:
                index, told = json.loads(line[len(word) :])
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(index, int):
                found[index] = told
    return found
