"""The few figures by which a verdict is told in one line."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from isotrain.tools.parity.compare.published import Kind, kind_of
from isotrain.tools.parity.run import RunLog, section
from isotrain.tools.parity.verdict import Verdict

UNKNOWN = "unknown"

_LONGEST_CELL = 80


@dataclass(frozen=True)
class Facts:
    algorithm: str
    model: str
    reference_device: str
    candidate_device: str
    loss: str | None
    """The metric that stands for all losses: the first of training, else the first."""
    reward: str | None
    throughput: float | None
    """The candidate's, as a multiple of the reference's."""


def facts(verdict: Verdict) -> Facts:
    comparison = verdict.comparison
    recipe = comparison.reference.recipe or comparison.candidate.recipe or {}
    algorithm = recipe.get("algorithm", recipe.get("task"))
    speed = list(comparison.speed.values())
    return Facts(
        algorithm=_text(algorithm.get("name") if isinstance(algorithm, dict) else algorithm),
        model=_model(recipe.get("model")),
        reference_device=device_of(comparison.reference),
        candidate_device=device_of(comparison.candidate),
        loss=_metric(verdict, "loss"),
        reward=_metric(verdict, "reward"),
        # The last is that without the warm-up, where the runs were long enough.
        throughput=speed[-1].ratio if speed else None,
    )


def device_of(run: RunLog) -> str:
    device = section(run.environment, "device")
    name = _text(device.get("name") or device.get("type"))
    ranks = device.get("ranks")
    return f"{name} × {ranks}" if isinstance(ranks, int) and ranks > 1 else name


def _model(section: Any) -> str:
    """A model's name as on a hub; of a folder the last part, because the rest is about a machine."""
    path = _text(section.get("path") if isinstance(section, dict) else section)
    parts = PurePath(path).parts
    return path if len(parts) == 2 and not PurePath(path).is_absolute() else parts[-1] if parts else UNKNOWN


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() else UNKNOWN


def _metric(verdict: Verdict, kind: Kind) -> str | None:
    comparison = verdict.comparison
    names = [name for name in comparison.curves if kind_of(name) == kind]
    return next((name for name in names if not name.startswith("val")), names[0] if names else None)


def safe_cell(text: str, longest: int = _LONGEST_CELL) -> str:
    """Text that Markdown shows as it is: no cell ends early, no link or tag begins."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)[:longest]
    return html.escape(re.sub(r"([\\`*\[\]|~])", r"\\\1", shown), quote=False)
