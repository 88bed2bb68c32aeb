"""Code of responses, scored in a real sandbox by the tests of its row."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from isotrain.errors import RewardError
from isotrain.process import fusion
from isotrain.process.sandbox import Limits
from isotrain.recipe.online import RewardSection
from isotrain.rewards.base import RewardInput, Scored, Scorer
from isotrain.rewards.build import build_scorer
from sandboxes import bubblewrap, fusion_server

DOUBLE = {"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["2\n", "4\n", "6\n", "8\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7", "assert math.isclose(add(0.5, 0.5), 1)"]
SETUP = {"test_setup_code": "import math"}
HUMAN_EVAL = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n"


@contextmanager
def scorer(**code: Any) -> Iterator[Scorer]:
    section = RewardSection.model_validate({"code": {"processes": 2, **code}, "failed_score": -1.0})
    with bubblewrap(Limits()):  # skips where there is none
        built = build_scorer(section, None)
        built.start()
        try:
            yield built
        finally:
            built.close()


def written(code: str, answer: Any, row: dict[str, Any] | None = None) -> RewardInput:
    return RewardInput(f"Here it is:\n```python\n{code}\n```\nDone.", answer, row or {})


def test_the_share_of_tests_that_pass() -> None:
    items = {
        1.0: written("print(int(input()) * 2)", DOUBLE),
        0.75: written("n = int(input())\nprint(n * 2 if n != 3 else 7)", json.dumps(DOUBLE)),
        0.5: written("def add(a, b):\n    print('noise')\n    return a + b if a == 1 else 0", CALLS),
        2 / 3: written("def add(a, b):\n    return a + b if b != 4 else None", ASSERTS, SETUP),
        0.0: written("def add(a, b):\n    return 0", HUMAN_EVAL, {"entry_point": "add"}),
    }
    with scorer(score="share") as rewards:
        scored = rewards.score(list(items.values()))
    assert [one.failure for one in scored] == [None] * len(items)
    assert [one.score for one in scored] == pytest.approx(list(items))
    assert scored[0] == Scored(1.0, {"code": 1.0, "code/no_code": 0.0, "code/timeout": 0.0})


def test_every_test_must_pass() -> None:
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    items = [
        written("print(int(input()) * 2)", DOUBLE),
        written("n = int(input())\nprint(n * 2 if n != 3 else 7)", DOUBLE),
        written("def add(a, b):\n    return a + b", CALLS),
        written(method, CALLS),
        written("def add(a, b):\n    return a + b", ASSERTS, SETUP),
        written("def add(a, b):\n    return a + b", [*ASSERTS[:2], "assert add(1, 1) == 3"]),
        written("def add(a, b):\n    return a + b", {"test": HUMAN_EVAL, "entry_point": "add"}),
    ]
    with scorer() as rewards:
        scored = rewards.score(items)
    assert [one.score for one in scored] == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "print('[0, 3]'); print('[1, 7]')",
        "import atexit; atexit.register(print, '[0, true]')",
        "def add(a, b",
        "",
        "add = 3",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.close(1); os.close(2)",
        "b'x' * 2**34",
        "while True: print('x' * 1000)",
    ],
)
def test_ways_to_end_without_passing(code: str) -> None:
    with scorer(score="share", timeout=2.0) as rewards:
        scored = rewards.score([written(code, CALLS), written(code, ASSERTS, SETUP), written(code, DOUBLE)])
    assert [(one.score, one.failure) for one in scored] == [(0.0, None)] * 3


def test_time_of_the_models_code_is_a_score_and_no_failure() -> None:
    slow = "n = int(input())\nwhile n > 1: pass\nprint(2 * n)"
    begun = time.monotonic()
    with scorer(score="share", timeout=1.0) as rewards:
        scored = rewards.score(
            [
                written(slow, DOUBLE),
                written("def add(a, b):\n    while a == 3: pass\n    return a + b", CALLS),
                written("while True: pass", ASSERTS),
            ]
        )
    assert [(one.score, one.failure) for one in scored] == [(0.25, None), (0.5, None), (0.0, None)]
    assert all(one.parts["code/timeout"] == 1.0 for one in scored)
    assert time.monotonic() - begun < 20  # none of the tests after the first slow one was run


def test_tests_that_take_long_together_are_bounded() -> None:
    many = {"inputs": ["\n"] * 1000, "outputs": ["1\n"] * 1000}
    begun = time.monotonic()
    with scorer(score="share", timeout=0.4) as rewards:
        (scored,) = rewards.score([written("import time; time.sleep(0.2); print(1)", many)])
    assert scored.failure is None and scored.parts["code/timeout"] == 1.0
    assert 0.0 <= scored.score < 0.05 and time.monotonic() - begun < 15


def test_no_code_scores_zero_and_no_tests_is_an_error() -> None:
    with scorer() as rewards:
        none, empty = rewards.score([RewardInput("I do not know.", CALLS), written("print(1)", "42")])
    assert none == Scored(0.0, {"code": 0.0, "code/no_code": 1.0, "code/timeout": 0.0})
    assert (empty.score, empty.failure) == (-1.0, "error")
    assert empty.detail.startswith("reward.code: the row has no tests; check reward.answer_key")


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


@pytest.mark.parametrize("depth", [300, 980, 5000, 200_000])
def test_deep_rows_are_scored_or_refused_and_end_no_run(depth: int) -> None:
    """Each at another place that reads, sends or compares it."""
    code = f"def f(*x):\n    y = 1\n    for _ in range({min(depth, 5000)}):\n        y = [y]\n    return y"
    deep: Any = 1
    for _ in range(min(depth, 5000)):
        deep = [deep]
    functional = [{"input": "1", "output": nested(depth), "testtype": "functional"}]
    items = [
        written(code, nested(depth)),
        written(code, functional, {"metadata": '{"func_name": "f"}'}),
        written(code, functional, {"metadata": nested(depth)}),
        written(code, {"inputs": [[1], deep], "outputs": [1, deep], "fn_name": "f"}),
        written(code, {"inputs": [nested(depth)], "outputs": ["1"], "fn_name": "f"}),
        written(code, {"inputs": [deep], "outputs": [deep]}),
        written(code, {"test_list": deep}),
        written("def f(*x):\n    return 1", {"inputs": [[1]], "outputs": [1], "fn_name": "f"}),
    ]
    with scorer(score="share") as rewards:
        *hard, easy = rewards.score(items)
    assert (easy.score, easy.failure) == (1.0, None)
    for scored in hard:
        assert scored.failure in (None, "error")
        assert scored.failure is None or "reward.answer_key" in scored.detail, scored.detail


def test_a_broken_sandbox_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "PAUSE", 0.01)
    with fusion_server(None) as server:
        section = RewardSection.model_validate({"code": {"sandbox": server.address}, "failed_score": -1.0})
        built = build_scorer(section, None)
        server.replies = [(500, b"")]
        with pytest.raises(
            RewardError, match=r"reward\.code\.sandbox: http://127\.0\.0\.1:\d+ replied with HTTP"
        ):
            built.start()
        server.replies = [(503, b"")] * 3
        (scored,) = built.score([written("print(1)", DOUBLE)])
        built.close()
    assert (scored.score, scored.failure) == (-1.0, "error")
    assert scored.detail.startswith("reward.code: http://127.0.0.1") and "failed 3 times" in scored.detail


def test_the_same_scores_over_http() -> None:
    with (
        bubblewrap(Limits()) as inner,
        fusion_server(inner) as server,
        scorer(sandbox=server.address) as rewards,
    ):
        scored = rewards.score(
            [
                written("print(int(input()) * 2)", DOUBLE),
                written("def add(a, b):\n    return a + b", CALLS),
                written("def add(a, b):\n    return a - b", ASSERTS, SETUP),
            ]
        )
        assert all(path == "/run_code" for path, _ in server.requests)
    assert [(one.score, one.failure) for one in scored] == [(1.0, None), (1.0, None), (0.0, None)]


@pytest.mark.parametrize(
    "where",
    ["docker", "ftp://host", "http://", "http://user:word@host:80", "bubblewrap2", "http://host:port"],
)
def test_addresses_that_are_none(where: str) -> None:
    with pytest.raises(ValueError, match="sandbox"):
        RewardSection.model_validate({"code": {"sandbox": where}})
