"""What is measured is explained: docs/metrics.md names every metric."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from isotrain.observe.plots import POLICY, ROLLOUT, TIMING
from isotrain.observe.progress import SHOWN

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "isotrain"
METRIC = re.compile(
    r"(actor|critic|perf|response_length|rollout_corr|timing_s|train|training|val)/\w+(/\w+)?"
)


def documented(page: str) -> set[str]:
    """The names in the first cells of the tables; `/max` and `_std` stand for a name with another end."""
    names: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        whole = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name[0] in "/_":
                name = whole[: whole.rindex(name[0])] + name
            whole = name
            names.add(name)
    return names


def measured() -> set[str]:
    files = [*(SOURCE / "algorithms").rglob("*.py"), SOURCE / "trainers" / "supervised.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if METRIC.fullmatch(text)}


def test_shortened_names_are_read_in_full() -> None:
    page = "| metric |\n|---|\n| `a/x/mean`, `/max` | m |\n| `b/y_max`, `_std` | `no` |\n"
    assert documented(page) == {"a/x/mean", "a/x/max", "b/y_max", "b/y_std"}


def test_every_metric_is_explained() -> None:
    shown = {name for name, _, _ in SHOWN}
    shown |= {name for _, curves in (*POLICY, *ROLLOUT) for name, _, _ in curves}
    shown |= {f"timing_s/{part}" for part in TIMING if part != "other"}
    wanted = measured() | shown
    assert {"train/loss", "actor/pg_loss", "training/rollout_probs_diff_std"} <= wanted
    assert not wanted - documented((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
