"""The reward of benchmarks on GSM8K: whether the right number is among those of a response."""

import re


def score(response: str, answer: str) -> float:
    return float(answer in re.findall(r"\d+", response))
