"""Encoders made of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.data.rows import Row
from isotrain.data.store import Codec


@dataclass
class Encoding:
    codec: Codec[Any]
    values: Callable[[Row], Sequence[Any]]
    tokenizer: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        return {}
