"""The responses to one prompt on their way through a step."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass(eq=False)
class Group:
    index: int
    """Of the prompt, in the order in which prompts are drawn."""
    prompt_tokens: int
    lengths: tuple[int, ...]
    version: int = sys.maxsize
    """The oldest weights that began one of its responses."""
    ungenerated: int = 0
    unscored: int = 0
    generated_at: float = 0.0

    @property
    def tokens(self) -> int:
        """That the ranks compute: the prompt once, and all responses."""
        return self.prompt_tokens + sum(self.lengths)


@dataclass(eq=False)
class Response:
    group: Group = field(repr=False)
    tokens: int
