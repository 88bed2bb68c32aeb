"""The reward of benchmarks on sums: whether the first number of a response is the right one."""

import re


def score(response: str, answer: str) -> float:
    found = re.search(r"\d+", response)
    return float(found is not None and found.group() == answer)
