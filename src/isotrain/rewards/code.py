"""Code in responses, scored by the tests of its row in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isotrain.errors import RewardError, SandboxError, one_line
from isotrain.process.sandbox import ProgramOutcome, Sandbox
from isotrain.rewards.base import RewardInput, Scored
from isotrain.rewards.code_tests import (
    CallTest,
    CodeTests,
    SourceTest,
    StdinTest,
    passed_calls,
    read_tests,
    same_output,
)

# All tests of a response together may take this many times the limit of one.
TESTS_IN_FULL = 10
# Runs in the sandbox. It reads its one line of stdin, and drops what the solution and the tests print. Its
# lines begin with a random word, which the process of the solution does not have.
PROGRAM = Path(__file__).with_name("code_harness.py").read_text(encoding="utf-8")
_FENCE = re.compile(r"[ \t]*(`{3,})[^`]*")


def last_block(response: str) -> str | None:
    """The last fenced code block that is closed; None where there is none."""
    last, fence = None, ""
    block: list[str] = []
    for line in response.split("\n"):
        if not fence:
            opened = _FENCE.fullmatch(line)
            fence, block = opened[1] if opened else "", []
        elif (closing := line.strip()).startswith(fence) and not closing.strip("`"):
            last, fence = "\n".join(block), ""
        else:
            block.append(line)
    return last


@dataclass(frozen=True)
class Graded:
    passed: int
    total: int
    timeout: bool = False
    """A test took longer than allowed; those after it were not run, and have not passed."""


class CodeReward:
    def __init__(
        self, sandbox: Sandbox, *, score: Literal["all", "share"], timeout: float, processes: int
    ) -> None:
        """`timeout`: seconds of one program; `processes`: programs at the same time."""
        self._sandbox, self._share, self._timeout = sandbox, score == "share", timeout
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="reward.code")

    def start(self) -> None:
        try:
            self._sandbox.start()
        except SandboxError as error:
            raise RewardError(f"reward.code.sandbox: {error}") from None

    def submit(self, items: Sequence[RewardInput]) -> list[Future[Scored]]:
        return [self._threads.submit(self._score, item) for item in items]

    def close(self) -> None:
        self._sandbox.close()
        self._threads.shutdown(cancel_futures=True)

    def _score(self, item: RewardInput) -> Scored:
        try:
            tests = read_tests(item.answer, item.row)
            code = last_block(item.response)
            graded = Graded(0, len(tests.tests)) if code is None else self.grade(code, tests)
        except (SandboxError, ValueError) as error:
            return Scored(0.0, failure="error", detail=one_line(str(error)))
        except RecursionError:
            detail = "the row's tests are nested too deeply; check reward.answer_key"
            return Scored(0.0, failure="error", detail=detail)
        except Exception as error:  # one row must not end the run
            return Scored(0.0, failure="error", detail=one_line(f"{type(error).__name__}: {error}"))
        share = graded.passed / graded.total
        parts = {"no_code": float(code is None), "timeout": float(graded.timeout)}
        return Scored(share if self._share else float(share == 1.0), parts)

    def grade(self, code: str, tests: CodeTests) -> Graded:
        """Run the tests; where all must pass, none after the first that fails."""
        deadline = time.monotonic() + TESTS_IN_FULL * self._timeout
        total = len(tests.tests)
        programs = [test for test in tests.tests if isinstance(test, StdinTest)]
        inside = [test for test in tests.tests if not isinstance(test, StdinTest)]
        passed, timeout = self._run_inside(code, tests.setup, inside, deadline) if inside else (0, False)
        if timeout or (passed < len(inside) and not self._share):
            return Graded(passed, total, timeout)
        for test in programs:
            outcome = self._run(code, test.stdin, deadline)
            if outcome.ended == "time":
                return Graded(passed, total, timeout=True)
            right = outcome.succeeded and same_output(outcome.stdout, test.expected)
            passed += right
            if not right and not self._share:
                break
        return Graded(passed, total)

    def _run_inside(
        self, code: str, setup: str, tests: list[CallTest | SourceTest], deadline: float
    ) -> tuple[int, bool]:
        """All in one program: how many have passed, and whether it took too long."""
        job, word = make_job(setup, code, tests)
        outcome = self._run(PROGRAM, job, deadline)
        if outcome.ended != "time" and not is_ready(outcome.stdout, word):
            reason = outcome.stderr.strip()[-300:] or f"it ended by {outcome.ended}"
            raise SandboxError(f"the program that runs the tests did not start: {reason}")
        results = read_results(outcome.stdout, word)
        calls = {index: test for index, test in enumerate(tests) if isinstance(test, CallTest)}
        passed = len(passed_calls(results, calls)) + len(
            results.keys() & (set(range(len(tests))) - calls.keys())
        )
        return passed, outcome.ended == "time"

    def _run(self, program: str, stdin: str, deadline: float) -> ProgramOutcome:
        left = deadline - time.monotonic()
        if left <= 0:
            return ProgramOutcome("time", None, "", "", 0.0)
        return self._sandbox.run(program, stdin, min(left, self._timeout))


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
    """Results of the tests by their index; those that failed are not in it."""
    results: dict[int, Any] = {}
    for line in stdout.split("\n"):
        if line.startswith(f"{word} "):
            try:
                index, result = json.loads(line[len(word) :])
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(index, int):
                results[index] = result
    return results
