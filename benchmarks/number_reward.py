"""Rewards of benchmarks on GSM8K."""

import re


def score(response: str, answer: str) -> float:
    """Whether the right number is among those of a response."""
    return float(answer in re.findall(r"\d+", response))


def digits(response: str) -> float:
    """The share of digits: it differs between almost all responses, so that few of them have a gradient."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
