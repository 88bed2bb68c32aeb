"""The environment of `gsm8k-tool`: a calculator that the policy can call before it answers.

It is an environment as TRL takes it: `reset` begins an episode, and the other public method is a tool. What
the model writes is parsed and never executed: numbers, + - * / and parentheses, nothing else.
"""

import ast
import operator
from fractions import Fraction
from typing import Any

LONGEST_EXPRESSION = 100
LARGEST_RESULT = 10**15

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    def reset(self, **row: Any) -> None:
        """Begins an episode: nothing is kept from call to call."""

    def calculate(self, expression: str) -> str:
        """Computes an expression of numbers, + - * / and parentheses.

        Args:
            expression: The expression, such as (15 + 27) * 8.
        """
        value = evaluate(expression)
        return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def evaluate(expression: str) -> Fraction:
    """The exact value; raises `ValueError` for anything but numbers, + - * / and parentheses."""
    if not isinstance(expression, str) or len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"an expression is text of at most {LONGEST_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("use numbers, + - * / and parentheses only") from None
    if abs(value) > LARGEST_RESULT:
        raise ValueError("the result is too large")
    return value


def _value(node: ast.expr) -> Fraction:
    """Value of a part; the length of the whole bounds its depth and its numbers."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        result: Fraction = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError
