"""Do the tests notice a small mistake in the code? The share of mutants that they kill; higher is better.

    python benchmarks/mutants.py src/isotrain/algorithms tests/algorithms
    python benchmarks/mutants.py src/isotrain/rollout tests/rollout --max 80 --marks "not (slow or ray)"
    python benchmarks/mutants.py src/isotrain/trainers tests/trainers --runs tests/trainers/test_supervised.py

One expression or statement inside a function is changed at a time, by the operators of `variants`. Tests are
collected once. They run once to learn which lines each of them executes; of each mutant, those run that
execute its line, quickest first, until one fails. Each run is a fork of the process that has imported
everything, in which the functions get the changed code: no file is written. Module constants and default
arguments are not changed.

Lines that only run in processes which the tests start, as Ray's workers, are not executed by these. With
`--runs`, such a mutant is written into a copy of `src`, and the tests given there run on that copy.

Prints one line for each mutant, then the score. Survivors are to be judged: some cannot change a result.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench
import pytest
from _pytest.runner import runtestprotocol

from isotrain.children import die_with_parent

FAST = "not slow and not heavy and not ray and not vllm and not ranks"
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}

Lines = list[tuple[str, int]]
Change = tuple[str, Callable[[], None], Callable[[], None]]
"""Name of the operator, how to make the change, how to take it back."""


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    operator: str
    code: types.CodeType
    source: str


def _attribute(node: Any, field: str, value: Any, operator: str) -> Change:
    before = getattr(node, field)
    return operator, lambda: setattr(node, field, value), lambda: setattr(node, field, before)


def variants(node: ast.AST) -> Iterator[Change]:
    """The changes of one node."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            if other := COMPARED.get(type(operator)):
                ops = [*node.ops[:number], other(), *node.ops[number + 1 :]]
                yield _attribute(node, "ops", ops, f"{type(operator).__name__} -> {other.__name__}")
    elif isinstance(node, ast.BinOp | ast.AugAssign) and (swapped := COMPUTED.get(type(node.op))):
        yield _attribute(node, "op", swapped(), f"{type(node.op).__name__} -> {swapped.__name__}")
    elif isinstance(node, ast.BoolOp):
        swapped_bool = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield _attribute(node, "op", swapped_bool(), f"{type(node.op).__name__} -> {swapped_bool.__name__}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        changed = not value if isinstance(value, bool) else 1 - value if value in (0, 1) else value + 1
        yield _attribute(node, "value", type(value)(changed), f"{value} -> {type(value)(changed)}")
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield _attribute(node, "id", NAMES[node.id], f"{node.id} -> {NAMES[node.id]}")
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield _attribute(node, "attr", NAMES[node.attr], f"{node.attr} -> {NAMES[node.attr]}")
    elif (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and ast.unparse(node.func).split(".")[-1] not in NAMES
    ):
        first, second = node.args[:2]
        if isinstance(first, ast.Name) and isinstance(second, ast.Name) and first.id != second.id:
            yield _attribute(node, "args", [second, first, *node.args[2:]], "arguments swapped")


def statements(owner: ast.AST) -> Iterator[tuple[int, Change]]:
    """Changes of what a node holds: a removed `not` or minus sign, a deleted statement with a side effect."""
    for field, value in ast.iter_fields(owner):
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            other: ast.AST | None = None
            name = ""
            if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.Not | ast.USub):
                other, name = item.operand, f"{type(item.op).__name__} removed"
            elif isinstance(item, ast.Expr) and isinstance(item.value, ast.Call):
                other, name = ast.Pass(), "call deleted"
            elif isinstance(item, ast.AugAssign) or (
                isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Attribute | ast.Subscript)
            ):
                other, name = ast.Pass(), "assignment deleted"
            if other is None:
                continue
            replaced = other
            if isinstance(value, list):
                replaced = [*value[:number], other, *value[number + 1 :]]  # type: ignore[assignment]
            yield item.lineno, _attribute(owner, field, replaced, name)


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when a function does, without checks, messages and annotations."""
    parts: list[ast.AST] = list(getattr(function, "body", []))
    while parts:
        node = parts.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr):
            continue
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.extend(node.body)
        elif isinstance(node, ast.AnnAssign):
            parts.extend([node.value] if node.value else [])
        else:
            parts.extend(ast.iter_child_nodes(node))


def mutants(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    outer = [
        node
        for scope in ast.walk(tree)
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for function in outer:
        nodes = list(_inside(function))
        changes = [
            (node.lineno, change) for node in nodes if hasattr(node, "lineno") for change in variants(node)
        ]
        changes += [change for node in [function, *nodes] for change in statements(node)]
        for line, (operator, make, take_back) in changes:
            make()
            code = compile(ast.fix_missing_locations(tree), str(path), "exec")
            source = ast.unparse(tree)
            take_back()
            yield Mutant(str(path), line, operator, code, source)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield part
            yield from _codes(part)


def apply(mutant: Mutant, functions: Sequence[types.FunctionType]) -> bool:
    """Give the functions of the file the changed code; False where it does not fit a closure."""
    changed = {(code.co_name, code.co_firstlineno): code for code in _codes(mutant.code)}
    for function in functions:
        key = function.__code__.co_name, function.__code__.co_firstlineno
        if function.__code__.co_filename == mutant.file and key in changed:
            try:
                function.__code__ = changed[key]
            except ValueError:
                return False
    return True


def forked(work: Callable[[], Any], cpu_seconds: float, seconds: float = 900) -> Any:
    """What `work` returns, computed in a fork; None where it takes longer, or ends the process.

    Seconds of the processor tell an endless loop from a busy machine; some tests wait instead.
    """
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(parent)
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds) + 1,) * 2)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        with contextlib.suppress(BaseException):
            os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    data, deadline = b"", time.monotonic() + seconds
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (part := os.read(reader, 1 << 20)):
            break
        data += part
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # the process that was forked above, and what it started
    os.waitpid(child, 0)
    os.close(reader)
    return json.loads(data) if data else None


def outcome_of_runs(file: str, source: str, tests: Sequence[str]) -> str:
    """Outcome of tests whose processes import a copy of `src` in which one file has another text."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "src")
        shutil.copytree(bench.REPOSITORY / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / Path(file).relative_to(bench.REPOSITORY / "src")).write_text(source, encoding="utf-8")
        path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "not npu",
            *tests,
        ]
        process = subprocess.Popen(
            command, cwd=bench.REPOSITORY, env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return "survived" if process.wait(timeout=1200) == 0 else "killed"
        except subprocess.TimeoutExpired:
            return "killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Run:
    """Runs mutants in place of the collected tests."""

    def __init__(
        self, sources: Sequence[Path], most: int | None, seed: int, seconds: float, runs: Sequence[str]
    ) -> None:
        self.sources, self.most, self.seed, self.seconds, self.runs = sources, most, seed, seconds, runs
        self.functions: list[types.FunctionType] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = session.items
        files = {str(path) for path in self.sources}
        self.functions = [
            item
            for item in gc.get_objects()
            if isinstance(item, types.FunctionType) and item.__code__.co_filename in files
        ]
        gc.freeze()  # a collection in a fork would copy all that torch has imported
        known = forked(lambda: self._baseline(items), 3600, 3600)
        assert known is not None, "the tests do not run to their end without a change"
        passed, lines, durations = known
        assert all(passed), [item.nodeid for item, good in zip(items, passed, strict=True) if not good]
        by_line: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for number in sorted(range(len(items)), key=lambda i: durations[i]):
            for file, line in lines[number]:
                by_line[file, line].append(number)
        chosen = [mutant for path in self.sources for mutant in mutants(path)]
        if self.most is not None and self.most < len(chosen):
            chosen = random.Random(self.seed).sample(chosen, self.most)
        if self.runs:
            first = chosen[0]
            unchanged = Path(first.file).read_text(encoding="utf-8")
            assert outcome_of_runs(first.file, unchanged, self.runs) == "survived", (
                "they fail without a change"
            )
        counts: defaultdict[str, int] = defaultdict(int)
        started = time.monotonic()
        for done, mutant in enumerate(chosen):
            if time.monotonic() - started > self.seconds:
                bench.show(stopped=f"after {done} of {len(chosen)} mutants")
                break
            tests = by_line[mutant.file, mutant.line]
            limit = 5 + 3 * sum(durations[i] for i in tests)
            outcome = "not executed"
            if tests:
                work = partial(self._outcome, mutant, [items[i] for i in tests])
                outcome = forked(work, limit, 30 + 4 * limit) or "killed"
            elif self.runs:
                outcome = outcome_of_runs(mutant.file, mutant.source, self.runs)
            counts[outcome] += 1
            place = str(Path(mutant.file).relative_to(bench.REPOSITORY))
            line = {"file": place, "line": mutant.line, "operator": mutant.operator, "outcome": outcome}
            bench.show(**line)
        counts.pop("no such function", None)
        killed, total = counts["killed"], max(1, sum(counts.values()))
        bench.report("mutants killed", killed / total, 0.9, killed / total >= 0.9, **counts)
        return True

    def _baseline(
        self, items: Sequence[pytest.Item]
    ) -> tuple[list[bool], list[list[tuple[str, int]]], list[float]]:
        """Of each test: whether it passes, the lines that it executes, and its seconds of the processor."""
        files = {str(path) for path in self.sources}
        seen: set[tuple[str, int]] = set()

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return trace

        passed, lines, durations = [], [], []
        for item, following in zip(items, [*items[1:], None], strict=True):
            seen.clear()
            started = time.process_time()
            sys.settrace(trace)
            reports = runtestprotocol(item, log=False, nextitem=following)
            sys.settrace(None)
            durations.append(time.process_time() - started)
            passed.append(not any(report.failed for report in reports))
            lines.append(sorted(seen))
        return passed, lines, durations

    def _outcome(self, mutant: Mutant, items: Sequence[pytest.Item]) -> str:
        if not apply(mutant, self.functions):
            return "no such function"
        for item, following in zip(items, [*items[1:], None], strict=True):
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                return "killed"
        return "survived"


def main() -> None:
    parser = bench.Options(__doc__, max=40)
    parser.add_argument("source", type=Path, help="a file, or a directory of them")
    parser.add_argument("tests", nargs="+", help="test files or directories")
    parser.add_argument("--marks", default=FAST, help="which of the tests, as `pytest -m`")
    # The functions of a file are the same on both devices.
    parser.add_argument("--select", default="not npu", help="which of the tests, as `pytest -k`")
    parser.add_argument("--max", type=int, help="mutants that are drawn; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--runs", nargs="*", default=[], help="tests for lines that only run in other processes"
    )
    parser.add_argument("--seconds", type=float, default=1500, help="no mutant begins after this time")
    options = parser.read()
    source = options.source.resolve()
    sources = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    run = Run(sources, options.max, options.seed, options.seconds, options.runs)
    sys.exit(pytest.main(["-s", "-m", options.marks, "-k", options.select, *options.tests], plugins=[run]))


if __name__ == "__main__":
    main()
