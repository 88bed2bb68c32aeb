"""The tokens at which a model ends its response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def end_tokens(directory: Path) -> tuple[int, ...]:
    """From the generation configuration, or else the model's own; some models have several."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found: Any = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
