"""Answers compared as mathematics, in a child that neither hangs nor runs what it reads."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isotrain.process.pool import Pool
from isotrain.rewards.base import RewardInput, Scored
from isotrain.rewards.build import MATH_MEMORY
from isotrain.rewards.function import REWARD_CALLS

RIGHT: list[tuple[str, object]] = [
    ("The answer is \\boxed{\\frac{1}{2}}.", "0.5"),
    ("The answer is 1/2", "\\frac{1}{2}"),
    ("so we get 3 + 4*5", "23"),
    ("$\\frac{2}{4}$", "\\frac12"),
    ("\\boxed{1,234}", "1234"),
    ("#### 72", "72"),
    ("it is -3.50", "-\\frac{7}{2}"),
    ("$\\{3, 1, 2\\}$", "\\{1,2,3\\}"),
    ("$x \\in (-\\infty, 3)$", "x < 3"),
    ("$(1, 2)$", "(1,2)"),
    ("$x = \\pm 2$", "\\{-2, 2\\}"),
    ("$\\frac{x^2-y^2}{x-y}$", "x+y"),
    ("$\\sqrt{3+2\\sqrt2}$", "1+\\sqrt2"),
    ("$\\sin^2 x + \\cos^2 x$", "1"),
    ("$y = \\frac{-2x+3}{5}$", "5y+2x=3"),
    ("$\\int_0^1 x\\,dx$", "0.5"),
    ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}"),
    ("x" * 5000 + " \\boxed{7}", "$7$"),
    ("the answer is 7", 7),
]
WRONG: list[tuple[str, object]] = [
    ("\\boxed{2}", "3"),
    ("\\boxed{7}" + " and so on" * 500, "7"),
    ("", "3"),
    ("no idea", "3"),
    ("$(2, 1)$", "(1, 2)"),
    ("$" * 4000, "1"),
    ("\\frac{" * 600, "1"),
    ("\\boxed{" * 500, "1"),
    ("{0.__class__} %s \\boxed{%n}", "1"),
]


def run(answers: list[RewardInput], timeout: float, size: int = 1) -> list[Scored]:
    pool = Pool(
        REWARD_CALLS,
        {"kind": "math"},
        name="reward.math",
        timeout=timeout,
        processes=size,
        memory=MATH_MEMORY,
    )
    try:
        return [future.result(120) for future in pool.submit(answers)]
    finally:
        pool.close()


@pytest.mark.heavy
def test_scores_right_and_wrong_answers() -> None:
    missing = [("1", None), ("1", " "), ("1", "1" * 5000), ("5", "in $, not told")]
    results = run(
        [RewardInput(response, answer) for response, answer in RIGHT + WRONG + missing], timeout=60.0
    )
    failed, results = results[-4:], results[:-4]
    assert [result.failure for result in failed] == ["error"] * 4
    assert "reward.answer_key" in failed[0].detail and "reward.answer_key" in failed[3].detail
    assert [result.failure for result in results] == [None] * len(results)
    scores = [result.score for result in results]
    assert [case for case, score in zip(RIGHT, scores, strict=False) if score != 1.0] == []
    assert [case for case, score in zip(WRONG, scores[len(RIGHT) :], strict=True) if score != 0.0] == []


@pytest.mark.heavy
def test_hostile_answers_end_in_time() -> None:
    hostile = [
        "$" + "(" * 2000 + "1" + ")" * 2000 + "$",
        "$9^{9^{9^{9}}}$",
        "$100000000!$",
        "$\\operatorname{ones}(100000, 100000)$",
    ]
    start = time.monotonic()
    results = run([RewardInput(text, "3") for text in hostile] + [RewardInput("3", "3")], timeout=1.0, size=2)
    assert time.monotonic() - start < 240.0  # each within a second, on a machine that may have little time
    assert all(result.score == 0.0 for result in results[:-1])
    assert results[-1] == Scored(1.0)


EVALUATION = """
import json, sys
from isotrain.rewards.mathematics import PythonRefused, load_math
score = load_math()
seen = []
def watch(event, arguments):
    name = arguments[0].co_filename if event == "exec" else arguments[1] if event == "compile" else ""
    if event == "os.system" or name.startswith("<"):
        seen.append((event, name))
sys.addaudithook(watch)
for response in json.loads(sys.argv[1]):
    seen.clear()
    score(response, "3")
    print(response, seen)
import sympy
for attempt in (lambda: sympy.lambdify(sympy.Symbol("x"), 1), lambda: compile("1", "<string>", "eval")):
    try:
        attempt()
        print("ran")
    except PythonRefused:
        print("refused")
"""


@pytest.mark.heavy
def test_no_text_is_run_as_python(tmp_path: Path) -> None:
    note = tmp_path / "note"
    call = f"__import__('os').system('touch {note}')"
    texts = [
        call,
        f"\\boxed{{{call}}}",
        f"${call}$",
        f"answer: {call}",
        "3/4 + (1)(2)",
        "1.5",
        "2**3",
        "$2^3$",
    ]
    command = [sys.executable, "-c", EVALUATION, json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [f"{text} []" for text in texts] + ["refused", "refused"]
    assert not note.exists()


def test_without_math_verify_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from isotrain.rewards.mathematics import load_math\n"
        "try:\n    load_math()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(
        "RewardError reward.math needs math-verify: pip install '.[math]' in a clone of isotrain"
    )


@pytest.mark.slow
def test_scores_are_those_of_math_verify_itself() -> None:
    code = """
import json, sys
from math_verify import parse, verify
cases = json.loads(sys.argv[1])
box = lambda text: text if "$" in text else "\\\\boxed{" + text + "}"
print(json.dumps([verify(parse(box(str(a))), parse(r[-4096:])) for r, a in cases]))
"""
    cases = RIGHT + WRONG
    command = [sys.executable, "-c", code, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    ours = [result.score for result in run([RewardInput(*case) for case in cases], timeout=60.0)]
    assert [float(score) for score in json.loads(done.stdout)] == ours
