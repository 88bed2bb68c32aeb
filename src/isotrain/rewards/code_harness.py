"""The program that tests a solution in the sandbox; it runs there alone, without the rest of the package.

The solution runs in a process of its own, which never has the tests. The tests run in the first process:
what they call is a `Remote`, and what comes back are plain values. So nothing that the solution patches,
such as `builtins.exec`, and no object that it returns can decide what a test says about it.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import json
import operator
import os
import signal
import stat
import sys
import types
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterable
from typing import Any

TESTS, SOLUTION = "tests", "solution"
_PLAIN = {bool, int, float, str, type(None)}
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (tuple, list, set, frozenset, deque)}
_DICTS: dict[str, Any] = {kind.__name__: kind for kind in (Counter, OrderedDict, dict)}
_MUTABLE = (list, dict, set, deque, bytearray)
# Types whose values travel as the arguments of their constructor.
_VALUES: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.complex": lambda v: [v.real, v.imag],
    "builtins.range": lambda v: [v.start, v.stop, v.step],
    "builtins.bytes": lambda v: [list(v)],
    "builtins.bytearray": lambda v: [list(v)],
    "decimal.Decimal": lambda v: [str(v)],
    "fractions.Fraction": lambda v: [v.numerator, v.denominator],
    "datetime.date": lambda v: [v.year, v.month, v.day],
    "datetime.time": lambda v: [v.hour, v.minute, v.second, v.microsecond],
    "datetime.datetime": lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond],
    "datetime.timedelta": lambda v: [v.days, v.seconds, v.microseconds],
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "eq": operator.eq,
    "isinstance": lambda kind, value: isinstance(value, kind),
}
# What the solution may do with an object of the tests that it was given. Attributes: see `_allowed`.
_OF_TESTS = ("call", "iter", "next", "len", "getitem")


class Ended(Exception):
    """The other process is gone."""


class Remote:
    """An object of the other process. It equals no value of this one, and has no arithmetic."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __iter__(self) -> Any:
        return self._peer.ask("iter", self)

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __len__(self) -> int:
        return int(self._peer.ask("len", self))

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self) is True

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))

    def __eq__(self, other: object) -> bool:
        # Two objects of the solution compare themselves: the test has no value of its own for them.
        return type(other) is Remote and self._peer.ask("eq", self, other) is True

    def __hash__(self) -> int:
        return hash(self._number)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and self._peer.ask("isinstance", self, value) is True


class Peer:
    """One end of the two pipes between the processes: calls there, and calls from there."""

    def __init__(self, reading: int, writing: int, functions: dict[str, Callable[..., Any]] | None) -> None:
        """`functions`: what the other process may ask for by name, and then do anything with the result;
        None in the process of the tests, which lends no more than what they pass on."""
        self._reading, self._writing = os.fdopen(reading, "rb"), writing
        self._functions = functions
        self._lent: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._exceptions: dict[str, type[Exception]] = {}

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        sent = [self._encode(argument) for argument in arguments]
        self._send(["ask", operation, sent, {name: self._encode(value) for name, value in named.items()}])
        while (message := self._receive())[0] == "ask":
            self._send(self._reply(*message[1:]))
        if message[0] == "raises":
            kind = self._exception(*message[1])
            error = kind.__new__(kind)
            error.args = (str(message[2]),)
            raise error
        for position, value in message[2]:
            _assign(arguments[position], self._decode(value))
        return self._decode(message[1])

    def serve(self) -> None:
        while True:
            self._send(self._reply(*self._receive()[1:]))

    def _reply(self, operation: str, sent: list[Any], sent_named: dict[str, Any]) -> list[Any]:
        try:
            of_tests = self._functions is None
            arguments = [self._decode(value, lending=of_tests) for value in sent]
            named = {name: self._decode(value, lending=of_tests) for name, value in sent_named.items()}
            if of_tests and not (sent[0][0] == "yours" and _allowed(operation, arguments)):
                raise TypeError(f"a test's object has no {operation} for the solution")
            action = (self._functions or {}).get(operation) or _OPERATIONS[operation]
            result = self._encode(action(*arguments, **named))
            changed = [
                [position, after]
                for position, value in enumerate(arguments)
                if isinstance(value, _MUTABLE) and (after := self._encode(value)) != sent[position]
            ]
            return ["gives", result, changed]
        except Ended:
            raise
        except BaseException as error:
            return ["raises", self._described(type(error)), str(error)[:1000]]

    def _send(self, message: list[Any]) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._writing, line) :]
        except OSError as error:
            raise Ended("the process of the solution has ended") from error

    def _receive(self) -> list[Any]:
        line = self._reading.readline()
        if not line.endswith(b"\n"):
            raise Ended("the process of the solution has ended")
        message = json.loads(line)
        if not isinstance(message, list) or message[0] not in ("ask", "gives", "raises"):
            raise Ended("the process of the solution wrote into the harness's pipe")
        return message

    def _encode(self, value: Any) -> Any:
        """JSON: the plain types as themselves, everything else as a list of a tag and its content."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is Remote:
            return ["yours", value._number]
        if (name := f"{kind.__module__}.{kind.__qualname__}") in _VALUES and not getattr(
            value, "tzinfo", None
        ):
            return ["value", [name, *_VALUES[name](value)]]
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return ["numpy", [value.tolist(), value.dtype.str]]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple", [kind.__name__, list(value._fields), *map(self._encode, value)]]
        for name, base in _CONTAINERS.items():
            if isinstance(value, base):
                return [
                    name,
                    list(value) if _PLAIN.issuperset(map(type, value)) else [*map(self._encode, value)],
                ]
        for name, base in _DICTS.items():
            if isinstance(value, base):
                return [name, [[self._encode(key), self._encode(item)] for key, item in value.items()]]
        for plain in (int, float, str):  # such as an IntEnum
            if isinstance(value, plain):
                return plain(value)
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        name = getattr(value, "__name__", "")
        if isinstance(name, str) and value is getattr(builtins, name, self):
            return ["builtin", name]
        if isinstance(value, type) and issubclass(value, Exception):
            return ["exception", self._described(value)]
        return ["mine", self._lend(value)]

    def _lend(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._lent[number] = value  # and so its id stays its own
        return number

    def _decode(self, value: Any, lending: bool = False) -> Any:
        """`lending`: for an object of the tests, which gets values alone."""
        if not isinstance(value, list):
            return value
        tag, content = value
        if tag in _CONTAINERS:
            if list not in map(type, content):
                return _CONTAINERS[tag](content)
            return _CONTAINERS[tag](self._decode(item, lending) for item in content)
        if tag in _DICTS:
            return _DICTS[tag]({self._decode(k, lending): self._decode(v, lending) for k, v in content})
        if tag == "namedtuple":
            return namedtuple(*content[:2])(*(self._decode(item, lending) for item in content[2:]))
        if tag == "value":
            assert content[0] in _VALUES
            module, _, name = content[0].rpartition(".")
            return getattr(importlib.import_module(module), name)(*content[1:])
        if tag == "numpy":
            return importlib.import_module("numpy").array(*content)[()]
        if tag == "module":
            assert not lending and content not in ("__main__", TESTS)
            return importlib.import_module(content)
        if tag == "builtin":
            builtin = getattr(builtins, content)
            assert not lending or isinstance(builtin, type)
            return builtin
        if tag == "exception":
            return self._exception(*content)
        return self._lent[content] if tag == "yours" else Remote(self, content)

    def _described(self, kind: type) -> list[str]:
        """An exception's name, with that of the type of Python that it is one of."""
        bases = (base.__name__ for base in kind.__mro__ if base is getattr(builtins, base.__name__, None))
        return [kind.__name__, next(bases)]

    def _exception(self, name: str, base: str) -> type[Exception]:
        known = getattr(builtins, base, None)
        if not (isinstance(known, type) and issubclass(known, Exception)):
            known = Exception  # a SystemExit of the solution does not end the tests
        return known if name == base else self._exceptions.setdefault(name, type(name, (known,), {}))


def _allowed(operation: str, arguments: list[Any]) -> bool:
    """Attributes only of objects whose class the tests define: a function's lead to all that it knows."""
    if operation in ("getattr", "setattr"):
        target, name = arguments[:2]
        return type(target).__module__ == TESTS and isinstance(name, str) and not name.startswith("_")
    return operation in _OF_TESTS


def _assign(old: Any, new: Any) -> None:
    """Give an argument the content that the function has left in its copy of it."""
    assert type(old) is type(new) and isinstance(old, _MUTABLE)
    old.clear()
    (old.update if isinstance(old, (dict, set)) else old.extend)(new)


def _solve(reading: int, writing: int) -> None:
    module = types.ModuleType(SOLUTION)
    sys.modules[SOLUTION] = module
    scope = module.__dict__

    def run(name: str, source: str) -> None:
        exec(compile(source, name, "exec"), scope)

    def function(name: str) -> Any:
        return scope.get(name) or getattr(scope["Solution"](), name)

    Peer(reading, writing, {"run": run, "function": function, "global": scope.__getitem__}).serve()


def _names(sources: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that tests take from elsewhere, and those of them that are modules of Python to them."""
    used: set[str] = set()
    bound: set[str] = set()
    dotted: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).partition(".")[0])
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                dotted.add(node.value.id)
    free = used - bound
    # A solution may be asked for a function `sum`, but not bring its own `abs` to a test of something else.
    of_solution = free - set(dir(builtins)) or free
    modules = dotted & of_solution & set(getattr(sys, "stdlib_module_names", sys.builtin_module_names))
    return sorted(of_solution - modules), sorted(modules)


def _scope_of_tests(peer: Peer, setup: str, sources: list[str]) -> dict[str, Any]:
    sys.modules[TESTS] = types.ModuleType(TESTS)
    scope = sys.modules[TESTS].__dict__
    try:
        names, modules = _names([setup, *sources])
    except SyntaxError:
        names, modules = [], []  # said once more by the test itself
    for name in modules:
        scope[name] = importlib.import_module(name)
    for name in names:
        try:
            scope[name] = peer.ask("global", name)
        except Ended:
            raise
        except Exception:
            continue  # a NameError in the test that uses it
    exec(compile(setup, "setup", "exec"), scope)
    return scope


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(f"the function returned a {type(value).__name__}")


def _test(peer: Peer, job: dict[str, Any], report: Callable[[str], None]) -> None:
    try:
        peer.ask("run", "setup", job["setup"])
    except Exception as error:  # it may be about what the solution defines
        sys.stderr.write(f"setup: {type(error).__name__}: {error}\n"[:1000])
    peer.ask("run", "solution", job["solution"])
    sources = [test["source"] for test in job["tests"] if "source" in test]
    scope = _scope_of_tests(peer, job["setup"], sources) if sources else {}
    for index, test in enumerate(job["tests"]):
        try:
            value: Any = True
            if "source" in test:
                exec(compile(test["source"], "test", "exec"), scope)
            else:
                value = peer.ask("function", test["function"])(*test["arguments"])
            line = json.dumps([index, value], default=_plain)
        except BaseException as error:
            sys.stderr.write(f"test {index}: {type(error).__name__}: {error}\n"[:1000])
            continue
        report(line)


def _take_job() -> dict[str, Any]:
    """Read the job where the solution's process, which has the same user, cannot get it."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(4, 0, 0, 0, 0) != 0 or prctl(3, 0, 0, 0, 0) != 0:  # PR_SET_DUMPABLE, PR_GET_DUMPABLE
        raise OSError(ctypes.get_errno(), "the process of the tests cannot be made unreadable")
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    if stat.S_ISREG(os.fstat(0).st_mode):  # other processes, such as the shell before this one, have it too
        os.ftruncate(0, 0)
    return job


def main() -> None:
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    beside = os.path.dirname(os.path.abspath(__file__))  # a directory that a solution may write to
    sys.path[:] = [path for path in sys.path if path not in ("", beside)]
    to_solution, to_tests = os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    solution = os.fork()  # before there is anything in this process that the solution should not have
    if solution == 0:
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(to_solution[1])
        os.close(to_tests[0])
        try:
            _solve(to_solution[0], to_tests[1])
        finally:
            os._exit(0)
    job = _take_job()
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(nothing, 1)
    os.close(to_solution[0])
    os.close(to_tests[1])

    def report(line: str) -> None:
        results.write(f"{job['word']} {line}\n")
        results.flush()

    report("ready")
    try:
        _test(Peer(to_tests[0], to_solution[1], None), job, report)
    finally:
        os.kill(solution, signal.SIGKILL)


if __name__ == "__main__":
    main()
