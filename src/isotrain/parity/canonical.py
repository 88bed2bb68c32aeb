"""JSON in one spelling, so that a digest of it is a digest of its content."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from isotrain.errors import DataError
from isotrain.files import parse_json
from isotrain.parity.sources.bounded import clipped


def canonical(content: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8, floats as their shortest exact spelling; a `ValueError` for the rest."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_of(content: Any) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


def strict_object(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object in which no key comes twice and every number is finite."""
    try:
        content = parse_json(data.decode(), constants=_refuse_constant, pairs=_once)
        canonical(content)  # 1e400 is JSON for infinity, and half a surrogate pair is no text
    except ValueError as error:
        raise DataError(f"{path}: not the JSON of isotrain ({clipped(str(error), 120)})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {clipped(name)} comes twice")
        content[name] = value
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def plain(value: Any) -> Any:
    """The same in words that every JSON reader knows; numbers that are not finite as in metrics.jsonl."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | int):
        return value
    # Of numpy, its numbers and arrays; of all else, such as paths, the text.
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
