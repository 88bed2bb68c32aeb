"""The reward of the tiny task: the fraction of a response that has the requested kind of characters."""

import string

KINDS = {"digits": string.digits, "capitals": string.ascii_uppercase}


def score(response: str, answer: str) -> float:
    """The fraction of characters of the kind `answer`; 0 for an empty response."""
    if not response:
        return 0.0
    return sum(character in KINDS[answer] for character in response) / len(response)
