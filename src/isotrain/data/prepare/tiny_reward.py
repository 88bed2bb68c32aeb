"""The reward of the tiny task: how much of a response is of the kind that was asked for."""

import string

KINDS = {"digits": string.digits, "capitals": string.ascii_uppercase}


def score(response: str, answer: str) -> float:
    """The share of the response's characters that are of the kind `answer`; 0 for an empty response."""
    if not response:
        return 0.0
    return sum(character in KINDS[answer] for character in response) / len(response)
