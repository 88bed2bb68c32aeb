"""The page by symptom names findings that the doctor has, and all that users complain about."""

from __future__ import annotations

import re
from pathlib import Path

from isotrain.tools.doctor.rules import rules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in (ROOT / "src" / "isotrain" / "tools" / "doctor").rglob("*.py")
)


def named() -> set[str]:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("|") and line.count("|") == 4]
    return {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row[2])}


def test_every_finding_that_is_named_exists() -> None:
    known = {rule.id for rule in rules()}
    assert len(named()) > 25
    assert not [name for name in named() if name not in known and f'"{name}"' not in SOURCES]


def test_every_complaint_is_there() -> None:
    known = {rule.complaint for rule in rules() if rule.id in named()}
    assert known >= set(range(1, 16)) - {3}
    assert "mask-out-of-order" in named()  # the third, which no rule but a check finds
