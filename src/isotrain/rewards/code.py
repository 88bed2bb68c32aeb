"""Code in responses, scored in a sandbox by the tests of its row, which may have several forms."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from isotrain.errors import RewardError, SandboxError, one_line
from isotrain.process.sandbox import Sandbox
from isotrain.process.supervise import ProgramOutcome
from isotrain.rewards.base import RewardInput, Scored

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
FORMS = (
    "{inputs, outputs}, {inputs, outputs, fn_name}, a list of {input, output}, a list of assert statements, "
    "{test_list}, or {test, entry_point}"
)


@dataclass(frozen=True)
class StdinTest:
    """A program that reads stdin and prints `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A function that returns `expected`; it may be a method of a class `Solution`."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    wrapped: bool = False
    """`expected` may also be a list around what the function returns, as all results of this row are."""


@dataclass(frozen=True)
class SourceTest:
    """Statements that raise nothing."""

    source: str


Test = StdinTest | CallTest | SourceTest


@dataclass(frozen=True)
class CodeTests:
    tests: tuple[Test, ...]
    setup: str = ""
    """Source that runs before the solution where a test is not a program of its own."""


def read_tests(answer: Any, row: Mapping[str, Any]) -> CodeTests:
    """From the column `reward.answer_key`, and from columns of the row beside it where a form has several.

    Raises ValueError where there are none."""
    if isinstance(answer, str):
        answer = _read_text(answer, row)
    if isinstance(answer, Mapping):
        tests = _from_mapping(answer, row)
    elif isinstance(answer, Sequence) and answer and not isinstance(answer, (str, bytes)):
        tests = _from_list(answer, row)
    else:
        tests = None
    if tests is None or not tests.tests:
        raise ValueError(f"the row has no tests; check reward.answer_key, which may hold {FORMS}")
    return tests


def _read_text(text: str, row: Mapping[str, Any]) -> Any:
    """JSON, or HumanEval's column of source with the name of the function in another."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"test": text, "entry_point": row.get("entry_point")}


def _from_mapping(answer: Mapping[str, Any], row: Mapping[str, Any]) -> CodeTests | None:
    inputs, outputs = answer.get("inputs"), answer.get("outputs")
    if isinstance(inputs, Sequence) and isinstance(outputs, Sequence) and not isinstance(inputs, str):
        if len(inputs) != len(outputs):
            raise ValueError(f"the row has {len(inputs)} inputs and {len(outputs)} outputs")
        name = answer.get("fn_name")
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        return CodeTests(tuple(_pair(i, o, name, wrapped) for i, o in zip(inputs, outputs, strict=True)))
    if isinstance(answer.get("test"), str) and isinstance(answer.get("entry_point"), str):
        return CodeTests((SourceTest(f"{answer['test']}\n\ncheck({answer['entry_point']})\n"),))
    if isinstance(answer.get("test_list"), Sequence):
        return _from_list(answer["test_list"], answer)
    return None


def _from_list(answer: Sequence[Any], row: Mapping[str, Any]) -> CodeTests | None:
    if all(isinstance(test, str) for test in answer):
        imports = row.get("test_imports")
        lines = [row.get("test_setup_code"), *(imports if isinstance(imports, Sequence) else ())]
        setup = "\n".join(line for line in lines if isinstance(line, str))
        return CodeTests(tuple(SourceTest(test) for test in answer), setup)
    if all(isinstance(test, Mapping) and "input" in test and "output" in test for test in answer):
        name = _function_name(row)
        return CodeTests(
            tuple(
                _pair(test["input"], test["output"], name if test.get("testtype") == "functional" else None)
                for test in answer
            )
        )
    return None


def _function_name(row: Mapping[str, Any]) -> str | None:
    """LiveCodeBench keeps it in its column `metadata`, which is JSON."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None


def _pair(given: Any, expected: Any, function: str | None, wrapped: bool = False) -> Test:
    if not function:
        return StdinTest(_lines(given), _lines(expected))
    if isinstance(given, str):  # one argument a line, as JSON, and so is the result
        return CallTest(function, tuple(_json(line) for line in given.split("\n")), _json(expected))
    return CallTest(function, tuple(given) if isinstance(given, Sequence) else (given,), expected, wrapped)


def _lines(value: Any) -> str:
    """APPS has some texts as lists of their lines."""
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def same_output(printed: str, expected: str) -> bool:
    """Equal lines, without the space at their ends; numbers may be written in another way."""
    ours, theirs = _stripped(printed), _stripped(expected)
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(a: str, b: str) -> bool:
    ours, theirs = a.split(), b.split()
    if len(ours) != len(theirs) or not all(map(_NUMBER.fullmatch, ours + theirs)):
        return False
    try:
        return all(Decimal(x) == Decimal(y) for x, y in zip(ours, theirs, strict=True))
    except InvalidOperation:  # an exponent beyond what Decimal can hold
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Equal as JSON, with its types: a boolean, a text and a list are no number; 1.0 is 1, and NaN is NaN."""
    if isinstance(expected, bool) or isinstance(returned, bool):
        return returned is expected
    if isinstance(expected, (int, float)) and isinstance(returned, (int, float)):
        return returned == expected or (returned != returned and expected != expected)
    if isinstance(expected, (list, tuple)) and isinstance(returned, (list, tuple)):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(expected, Mapping) and isinstance(returned, Mapping):
        named = {_key(key): value for key, value in expected.items()}
        return returned.keys() == named.keys() and all(same_value(returned[k], v) for k, v in named.items())
    return type(returned) is type(expected) and bool(returned == expected)


def _key(key: Any) -> str:
    """As JSON writes it: results come as JSON, but a row's may not."""
    return key if isinstance(key, str) else json.dumps(key)


def passed_calls(returned: Mapping[int, Any], tests: Mapping[int, CallTest]) -> set[int]:
    """Which calls have given what was expected, by their index.

    APPS has some rows whose results are all wrapped in a list of one, and no mark that says so. Then all
    are read in the same way, the one in which more have passed: `5` and `[5]` are never both right."""
    tests = {index: test for index, test in tests.items() if index in returned}
    plain = {index for index, test in tests.items() if same_value(returned[index], test.expected)}
    inner = {i for i, test in tests.items() if test.wrapped and same_value(returned[i], test.expected[0])}
    return max(plain, inner, key=len)


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
