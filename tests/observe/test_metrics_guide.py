"""What is measured is explained: docs/metrics.md names every metric."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from isotrain.observe.console import SHOWN
from isotrain.observe.plots import POLICY, ROLLOUT, TIMING

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "isotrain"
METRIC = re.compile(
    r"(actor|critic|perf|prompt_length|response_length|reward|rollout|rollout_corr|timing_s|train|training|val"
    r"|val-core)/(\w|<>)+(/\w+)*(@<>)?"
)


# Counts between ranks, controller and checkpoint, and beginnings of names: nobody sees them in a run.
NO_METRICS = {
    *("actor/skipped", "critic/skipped", "critic/updates", "critic/score", "critic/rewards"),
    "timing_s/environment",
}


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
    trainers = SOURCE / "trainers"
    files = [*(SOURCE / "algorithms").rglob("*.py"), *(trainers / "online").glob("*.py")]
    return {
        name
        for file in [*files, trainers / "supervised.py"]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if METRIC.fullmatch(name := name_in(node)) and not name.endswith("/<>")
    }


def name_in(node: ast.AST) -> str:
    """A metric that the code names: as text, with `<>` for what is put in, or by what is measured."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(p.value) if isinstance(p, ast.Constant) else "<>" for p in parts)
        case ast.Call(func=ast.Attribute(attr="_timed"), args=[ast.Constant(value=str(text))]):
            return f"timing_s/{text}"
        case ast.Call(func=ast.Name(id="extent"), args=[ast.Constant(value=str(text)), _]):
            return f"{text}/mean"
    return ""


def test_shortened_names_are_read_in_full() -> None:
    page = "| metric |\n|---|\n| `a/x/mean`, `/max` | m |\n| `b/y_max`, `_std` | `no` |\n"
    assert documented(page) == {"a/x/mean", "a/x/max", "b/y_max", "b/y_std"}


def test_every_metric_is_explained() -> None:
    shown = {name for name, _, _ in SHOWN}
    shown |= {name for _, curves in (*POLICY, *ROLLOUT) for name, _, _ in curves}
    shown |= {f"timing_s/{part}" for part in TIMING if part != "other"}
    wanted = measured() | shown
    assert {"train/loss", "actor/pg_loss", "training/rollout_probs_diff_std"} <= wanted
    assert {"rollout/resampled", "reward/<>/mean", "val/reward_failures", "timing_s/adv"} <= wanted
    assert {"val-core/<>/reward/mean@<>", "prompt_length/mean", "reward/timeouts"} <= wanted
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert not wanted - NO_METRICS - {re.sub(r"<\w+>", "<>", name) for name in documented(page)}
