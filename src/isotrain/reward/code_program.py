"""The program that runs in the sandbox: the solution, then calls of its functions or assert statements."""

from __future__ import annotations

import json
import secrets
from typing import Any

from isotrain.reward.code_tests import CallTest, SourceTest

# It reads its one line of stdin before the solution runs, and drops what the solution prints. Result lines
# begin with a random word: a solution that ends early has not passed. One that searches its own process for
# the word can still forge results.
PROGRAM = """\
def main():
    import json, os, sys, types
    job = json.loads(sys.stdin.readline())
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    scope = module.__dict__
    for name in ("setup", "solution"):
        exec(compile(job[name], name, "exec"), scope)
    for index, test in enumerate(job["tests"]):
        try:
            if "source" in test:
                exec(compile(test["source"], "test", "exec"), scope)
                told = True
            else:
                function = scope.get(test["function"]) or getattr(scope["Solution"](), test["function"])
                told = function(*test["arguments"])
            line = json.dumps([index, told])
        except BaseException as error:
            sys.stderr.write(f"test {index}: {type(error).__name__}: {error}\\n"[:1000])
            continue
        results.write(f"{job['word']} {line}\\n")
        results.flush()


main()
"""


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
