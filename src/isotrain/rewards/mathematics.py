"""Final answers compared with the reference: as text by GSM8K's rules, or as mathematics by math-verify.

`load_math` is meant for a child process with a time limit; GSM8K's rules are verl's, so that scores agree.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from isotrain.errors import RewardError, install

# Only the end is read: it bounds the work, and an answer answered early and then doubted does not count.
GSM8K_TAIL = 300
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_NUMBER = re.compile(r"-?[0-9.,]+")
# What `find_answer` can give; a strict answer has lost its commas.
_COMPARABLE = {"strict": re.compile(r"-?[0-9.]+"), "flexible": _GSM8K_NUMBER}


def find_answer(response: str, method: Literal["strict", "flexible"]) -> str | None:
    """The last answer in the text, or None; `strict` takes only what follows `#### `."""
    tail = response[-GSM8K_TAIL:]
    if method == "strict":
        marked = _GSM8K_ANSWER.findall(tail)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    numbers = _GSM8K_NUMBER.findall(tail)
    # A lone full stop is the end of a sentence. Where there is nothing else, it counts as a wrong answer.
    return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)


def right_answer(value: Any, method: Literal["strict", "flexible"]) -> str | None:
    """A row's reference answer as text, or None if no answer that is found could ever equal it."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return text if _COMPARABLE[method].fullmatch(text) else None


def gsm8k_score(
    response: str, answer: str, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0
) -> float:
    """1 for the right answer, `format_score` for another one, 0 for none."""
    answered = find_answer(response, method)
    if answered is None:
        return 0.0
    return 1.0 if answered == answer else format_score


_STATED_CHOICE = re.compile(
    r"(?:\\boxed\{\s*(?:\\text\{)?|(?:(?i:answer)|答案)\W{0,3}(?:(?i:is)|为|是)?\W{0,4})\(?([A-Z])(?![A-Za-z'’])"
)
_BARE_CHOICE = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])(?:[.):：]|\s*$))")


def find_choice(response: str) -> str | None:
    """The letter that a response chooses: the last in `\\boxed{}` or after `answer`, or its first."""
    if stated := _STATED_CHOICE.findall(response[-TAIL:]):
        return str(stated[-1])
    bare = _BARE_CHOICE.match(response)
    return None if bare is None else bare[1] or bare[2]


def choice_letter(value: Any) -> str | None:
    """A row's reference answer as a letter; None if it is none. Numbers count from 0, as in MMLU."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 26:
        return chr(ord("A") + value)
    text = str(value).strip()
    return text if re.fullmatch("[A-Z]", text) else None


TAIL = 4096
"""Characters of a response that are read, from its end."""
LONGEST_ANSWER = 4096
_NUMBER = re.compile(r"[0-9]+|[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MONOMIALS = os.path.join("sympy", "polys", "monomials.py")


class PythonRefused(BaseException):
    """Python source reached the interpreter; no `except Exception` on the way may hide it."""


def load_math() -> Callable[[str, Any], float]:
    """A function of response and reference answer that gives 1 or 0. It has no time limit of its own."""
    try:
        import math_verify
        from math_verify import parser
    except ImportError as error:
        raise RewardError(f"reward.math needs math-verify: {install('math')} ({error})") from None
    # The warning that its limits are off: they use signals, and ours is the end of this process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    sympy, latex2sympy = parser.sympy, parser.latex2sympy
    sympy_parser = sympy.parsing.sympy_parser

    def read(text: str, *_: Any, **__: Any) -> Any:
        text = text.strip()
        if _NUMBER.fullmatch(text):
            return sympy.Integer(text) if text.isdigit() else sympy.Float(text)
        return latex2sympy(text.replace("**", "^"), is_real=True, normalization_config=None)

    # sympy reads any text, even a lone number, with Python's eval behind a filter; math-verify calls it for
    # numbers and for plain expressions such as 3/4. The LaTeX grammar reads the same arithmetic without it.
    assert callable(parser.parse_expr) and callable(sympy_parser.parse_expr)
    parser.parse_expr = sympy_parser.parse_expr = read

    def score(response: str, answer: Any) -> float:
        if answer is None or not (gold_text := str(answer).strip()):
            raise ValueError("the row has no reference answer; check reward.answer_key")
        if len(gold_text) > LONGEST_ANSWER:
            raise ValueError(f"the reference answer has more than {LONGEST_ANSWER} characters")
        if "\\boxed" not in gold_text and "$" not in gold_text:
            gold_text = f"\\boxed{{{gold_text}}}"
        gold = math_verify.parse(gold_text, parsing_timeout=None)
        if not gold:  # nothing would ever equal it
            raise ValueError(
                f"no answer in the reference answer {gold_text[-60:]!r}; check reward.answer_key"
            )
        given = math_verify.parse(response[-TAIL:], parsing_timeout=None)
        return float(math_verify.verify(gold, given, timeout_seconds=None))

    # The grammar's tables are built at its first use, which should not count against an answer's time.
    score("so \\boxed{\\frac{1}{2}}, which is 3/4 - 1/4", "0.5")
    sys.addaudithook(_refuse_python)
    return score


def _refuse_python(event: str, arguments: tuple[Any, ...]) -> None:
    """Second wall behind `read`: whatever sympy does with the model's text, it cannot run as Python.

    Code from files has their name. Code made while a module is imported, as by `dataclass`, is the module's,
    and sympy's products of monomials are made from nothing but the number of their variables.
    """
    if event == "exec":
        name = getattr(arguments[0], "co_filename", "")
    elif event == "compile":
        name = arguments[1]
    else:
        return
    if not isinstance(name, str) or not name.startswith("<") or name.startswith("<frozen"):
        return
    frame: FrameType | None = sys._getframe(1)
    if frame is not None and frame.f_code.co_filename.endswith(_MONOMIALS):
        return
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return
        frame = frame.f_back
    raise PythonRefused("Python source made from an answer was refused")
