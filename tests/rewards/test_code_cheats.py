"""Solutions that try to decide their own verdict pass no test; honest ones of every kind pass all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from isotrain.process.sandbox import Limits
from isotrain.recipe.online import RewardSection
from isotrain.rewards.base import RewardInput, Scorer
from isotrain.rewards.build import build_scorer
from sandboxes import bubblewrap

ASSERTS = [
    "assert f(1) == 2",
    "assert abs(f(3) - 6) < 1e-9",
    "assert math.isclose(f(4), 8)",
    "assert sorted([f(2), f(1)]) == [2, 4] and isinstance(f(2), int)",
]
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert not candidate(2) != 4\n"
CALLS = {"inputs": [[1], [2]], "outputs": [2, 4], "fn_name": "f"}

YES = """
class Yes{base}:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *a: True
    __ne__ = lambda *a: False
    __sub__ = __rsub__ = __abs__ = lambda *a: Yes()
    __hash__ = lambda self: 0
    __float__ = lambda self: 77.0
    __index__ = __int__ = lambda self: 77
    __class__ = property(lambda self: int)
def f(x):
    return Yes()
"""
WRONG = "\ndef f(x):\n    return 0\n"
# Finds what it can in its own process and in those beside it, and writes whatever might count to all of them.
FORGE = """
import json, os, re
def everywhere(data):
    for fd in range(64):
        try:
            os.write(fd, data)
        except OSError:
            pass
    for pid in (1, os.getppid()):
        for fd in range(8):
            try:
                with open(f'/proc/{pid}/fd/{fd}', 'wb', buffering=0) as file:
                    file.write(data)
            except OSError:
                pass
def forge(text):
    for word in set(re.findall('[0-9a-f]{32}', text)):
        everywhere(b''.join(f'{word} [{i}, true]\\n'.encode() for i in range(9)))
        everywhere(f'{word} [0, 2]\\n{word} [1, 4]\\n'.encode())
"""
CHEATS = {
    "exec": "import builtins\nbuiltins.exec = lambda *a, **k: None" + WRONG,
    "eval": "import builtins\nbuiltins.eval = lambda *a, **k: True" + WRONG,
    "compile": "import builtins\nreal = compile\nbuiltins.compile = lambda *a, **k: real('0', 'x', 'exec')"
    + WRONG,
    "assertion error": "import builtins\nclass Fine(BaseException):\n    pass\n"
    "builtins.AssertionError = Fine\nbuiltins.BaseException = ()" + WRONG,
    "builtins": "import builtins\nfor n in ('abs', 'sorted', 'isinstance', 'len', 'range', 'min', 'any'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)" + WRONG,
    "globals": "abs = lambda x: 0\nsorted = lambda x: [2, 4]\nisinstance = lambda *a: True\nassert_ = print"
    + WRONG,
    "module": "import math, sys, types\nfake = types.ModuleType('math')\n"
    "fake.isclose = lambda *a, **k: True\nmath.isclose = fake.isclose\nsys.modules['math'] = math = fake"
    + WRONG,
    "module class": "class math:\n    isclose = staticmethod(lambda *a, **k: True)" + WRONG,
    "module file": "import os\nfor place in ('/tmp', '/', '.'):\n    try:\n"
    "        open(place + '/math.py', 'w').write('isclose = print')\n    except OSError:\n        pass"
    + WRONG,
    "equal object": YES.replace("{base}", ""),
    "equal number": YES.replace("{base}", "(int)"),
    "equal text": YES.replace("{base}", "(str)"),
    "equal float": YES.replace("{base}", "(float)"),
    "equal mock": "import unittest.mock\ndef f(x):\n    return unittest.mock.ANY",
    "magic mock": "import unittest.mock\nf = unittest.mock.MagicMock()",
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import sys\ndef f(x):\n    sys.exit(0)",
    "exit of the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)" + WRONG,
    "interrupt": "import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGINT)\n    return 0",
    "at exit": "import atexit, os\natexit.register(lambda: os.write(1, b'[0, true]\\n'))" + WRONG,
    "streams": "import builtins, io, sys\nsys.stdout = sys.stderr = io.StringIO()\n"
    "builtins.print = lambda *a, **k: None" + WRONG,
    "json": "import json\nreal = json.dumps\njson.dumps = lambda v, **k: real([v[0], 2] if v else v)\n"
    "json.loads = lambda *a, **k: {}" + WRONG,
    "trace": "import sys\ndef skip(frame, event, arg):\n    if frame.f_code.co_filename == 'test':\n"
    "        frame.f_lineno = 1\n    return skip\nsys.settrace(skip)\nsys.setprofile(skip)" + WRONG,
    "threads": "import sys, threading\nthreading.settrace(lambda *a: None)\n"
    "threading.Thread(target=lambda: sys.modules.clear(), daemon=True).start()" + WRONG,
    "stdin again": FORGE + "os.lseek(0, 0, 0) if os.isatty(0) or os.fstat(0).st_size else 0\n"
    "forge(os.read(0, 1 << 20).decode())" + WRONG,
    "stdin of others": FORGE + "for pid in (1, os.getpid(), os.getppid()):\n    try:\n"
    "        forge(open(f'/proc/{pid}/fd/0').read())\n    except OSError:\n        pass" + WRONG,
    "memory of others": FORGE + "for pid in (1, os.getppid()):\n    try:\n"
    "        for line in open(f'/proc/{pid}/maps'):\n"
    "            if 'rw-p' in line:\n"
    "                begin, end = (int(n, 16) for n in line.split()[0].split('-'))\n"
    "                fd = os.open(f'/proc/{pid}/mem', os.O_RDWR)\n"
    "                forge(os.pread(fd, min(end - begin, 1 << 24), begin).decode('latin-1'))\n"
    "    except OSError:\n        pass" + WRONG,
    "garbage collector": FORGE + "import gc\nfor thing in gc.get_objects():\n    try:\n"
    "        if type(thing) is dict and 'word' in thing:\n            forge(str(thing['word']))\n"
    "    except Exception:\n        pass" + WRONG,
    "frames": FORGE + "import sys\nframe = sys._getframe()\nwhile frame:\n    forge(repr(frame.f_locals))\n"
    "    for value in frame.f_locals.values():\n        if type(value) is dict:\n"
    "            value['tests'] = [{'source': 'pass'}] * 9\n    frame = frame.f_back" + WRONG,
    "replies": FORGE + "def f(x):\n    everywhere(b'[\"gives\", true, []]\\n' * 9)\n    return 0",
    "requests": FORGE
    + "SOURCE = 'import builtins; builtins.abs = lambda *a: 0; builtins.sorted = lambda *a: [2, 4]'\n"
    "CALLS = [['builtin', 'exec'], SOURCE], [['module', 'tests'], '__dict__'], ['x'], []\n"
    "def f(x):\n    for call in CALLS:\n"
    "        everywhere(json.dumps(['ask', 'call', call, {}]).encode() + b'\\n')\n"
    "        everywhere(json.dumps(['ask', 'getattr', call, {}]).encode() + b'\\n')\n    return 0",
    "daemon": FORGE + "if os.fork() == 0:\n    os.setsid()\n    for _ in range(50):\n"
    "        everywhere(b'[\"gives\", true, []]\\n')\n    os._exit(0)" + WRONG,
    "own module": "import sys\nsys.modules['solution'].__dict__.clear()\n"
    "for name in ('__main__', 'tests'):\n    if name in sys.modules:\n"
    "        sys.modules[name].__dict__['exec'] = lambda *a: None\ndef f(x):\n    return 0",
    "descriptors": "import ctypes, os\nlibc = ctypes.CDLL(None)\nfor pid in (1, os.getppid()):\n"
    "    pidfd = libc.syscall(434, pid, 0)\n    for fd in range(8):\n"
    "        got = libc.syscall(438, pidfd, fd, 0)\n"
    "        if got >= 0:\n            os.write(got, b'[\"gives\", true, []]\\n')" + WRONG,
}
HONEST: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "plain": ("def f(x):\n    return 2 * x", ASSERTS, {"test_setup_code": "import math"}),
    "modules of the solution": (
        "import math, decimal as d\ndef f(x):\n    return d.Decimal(2 * x)",
        ["assert f(2) == 4 == d.Decimal(4)", "assert math.sqrt(f(8)) == 4"],
        {},
    ),
    "containers": (
        "import collections\ndef f(x):\n    return {1: (x, [x, {x}]), 'n': None}\n"
        "def c(s):\n    return collections.Counter(s)\n"
        "P = collections.namedtuple('P', 'x y')\ndef p():\n    return P(1, b'2')",
        [
            "assert f(1) == {1: (1, [1, {1}]), 'n': None}",
            "assert c('aab').most_common(1) == [('a', 2)]",
            "assert p() == (1, b'2') and p().y == b'2'",
            "assert isinstance(f(1)[1], tuple)",
        ],
        {},
    ),
    "in place": (
        "def f(rows):\n    rows.sort()\n    rows[0].append(7)",
        ["rows = [[3], [1]]\nf(rows)\nassert rows == [[1, 7], [3]]"],
        {},
    ),
    "callbacks": (
        "def f(g, xs):\n    return [g(x) for x in xs]",
        ["assert f(lambda x: -x, (n for n in range(3))) == [0, -1, -2]", "assert f(str, [1]) == ['1']"],
        {},
    ),
    "generators": (
        "def f(n):\n    yield from range(n)",
        ["assert list(f(3)) == [0, 1, 2]", "assert 2 in f(3)"],
        {},
    ),
    "errors": (
        "class Bad(ValueError):\n    pass\ndef f(x):\n    raise Bad('no') if x else KeyError(x)",
        [
            "try:\n    f(1)\nexcept Bad as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
            "try:\n    f(0)\nexcept KeyError:\n    pass\nelse:\n    assert False",
        ],
        {},
    ),
    "classes": (
        "class Node:\n    def __init__(self, value):\n        self.value, self.next = value, None\n"
        "    def __eq__(self, other):\n        return self.value == other.value\n"
        "def last(node):\n    return last(node.next) if node.next else node",
        ["assert last(first).value == 2", "assert isinstance(last(first), Node) and Node(1) == Node(1)"],
        {"test_setup_code": "first = Node(1)\nfirst.next = Node(2)"},
    ),
    "objects of the tests": (
        "def f(node):\n    node.value += 1\n    return node.double()",
        [
            "class N:\n    value = 1\n    def double(self):\n        return 2 * self.value\n"
            "n = N()\nassert f(n) == 4 == 2 * n.value"
        ],
        {},
    ),
    "a function named like a builtin": ("def sum(a, b):\n    return a - b", ["assert sum(3, 1) == 2"], {}),
    "large numbers": ("def f(n):\n    return 10 ** n", ["assert f(9000) == 10 ** 9000"], {}),
    "floats": ("def f(x):\n    return x / 0.0 if x else float('nan')", ["assert f(0) != f(0)"], {}),
    "noise": (
        "print('[0, true]')\ndef f(x):\n    print('noise')\n    return x",
        ["assert f('ä') == 'ä'"],
        {},
    ),
}


@pytest.fixture(scope="module")
def rewards() -> Iterator[Scorer]:
    code = {"score": "share", "processes": 2, "timeout": 20.0}
    with bubblewrap(Limits()):  # skips where there is none
        built = build_scorer(RewardSection.model_validate({"code": code}), None)
        built.start()
        yield built
        built.close()


def score(rewards: Scorer, code: str, *answers: tuple[Any, dict[str, Any]]) -> list[tuple[float, str | None]]:
    text = f"```python\n{code}\n```"
    scored = rewards.score([RewardInput(text, answer, row) for answer, row in answers])
    return [(result.score, result.failure) for result in scored]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_no_test(rewards: Scorer, name: str) -> None:
    rows: list[tuple[Any, dict[str, Any]]] = [
        (ASSERTS, {}),
        (CHECK, {"entry_point": "f"}),
        (CALLS, {}),
    ]
    assert score(rewards, CHEATS[name], *rows) == [(0.0, None)] * len(rows)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_solution_passes_all(rewards: Scorer, name: str) -> None:
    code, tests, row = HONEST[name]
    assert score(rewards, code, (tests, row)) == [(1.0, None)]
