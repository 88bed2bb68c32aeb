"""What a script, configuration or log of another framework says: keys with values and lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.errors import IsotrainError

LARGEST = 64 * 1024 * 1024
"""Bytes that are read of a source: logs are long."""
MOST_KEYS = 20_000

SECRET = "***"
_SECRET_NAME = re.compile(r"(?:^|[._-])(?:\w*key|\w*token|\w*secret|\w*password|passwd|credentials?)$", re.I)
_SECRET_VALUE = re.compile(r"(?:hf_|sk-|ghp_|glpat-)[\w-]{16,}|[0-9a-f]{40}|[0-9a-f]{64}", re.I)
_CREDENTIALS = re.compile(r"://[^/\s'\"@]*@")


class ImportSourceError(IsotrainError, ValueError):
    """A source that cannot be read, or in which no training was found; with what to give instead."""


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would tell; `text` has a question mark for what is missing."""

    why: str
    text: str = "?"


@dataclass(frozen=True)
class Setting:
    """One value as it was given; `line` is 0 if there are no lines."""

    value: Any
    line: int = 0


@dataclass
class Source:
    """Everything that was found. `kind` is `script`, `overrides`, `config` or `log`."""

    kind: str
    settings: dict[str, Setting] = field(default_factory=dict)
    program: str = ""
    launcher: dict[str, Setting] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    total_steps: int | None = None

    def set(self, key: str, value: Any, line: int = 0) -> None:
        if len(self.settings) >= MOST_KEYS:
            raise ImportSourceError(f"more than {MOST_KEYS} keys; is this a configuration?")
        self.settings.pop(key, None)
        self.settings[key] = Setting(value, line)


def secret_name(name: str) -> bool:
    """Whether a variable or key of this name may hold a credential."""
    return bool(_SECRET_NAME.search(name))


def holds_secret(name: str, value: str) -> bool:
    """The same, for a variable with a value: `INPUT_KEY=prompt` names a column."""
    harmless = re.fullmatch(r"[\d.]+|[A-Za-z_.]{1,15}", value) and not re.search("secret|passw", name, re.I)
    return bool(value) and secret_name(name) and not harmless


def without_secrets(value: Any) -> Any:
    """The value without what looks like a credential in it."""
    if isinstance(value, str):
        return SECRET if _SECRET_VALUE.fullmatch(value.strip()) else _CREDENTIALS.sub(f"://{SECRET}@", value)
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {
            key: SECRET if secret_name(str(key)) else without_secrets(item) for key, item in value.items()
        }
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; an empty section is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat
