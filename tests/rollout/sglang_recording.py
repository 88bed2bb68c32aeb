"""The recording server as a test sees it: what it was asked, and how it shall misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDER = Path(__file__).with_name("sglang_recorder")


class Recorder:
    def __init__(self, work: Path) -> None:
        self.work = work
        self.misbehave({})

    def misbehave(self, faults: dict[str, Any]) -> None:
        """By path; written at once, because the server reads it before each request."""
        part = self.work / "fault.part"
        part.write_text(json.dumps(faults))
        part.rename(self.work / "fault.json")

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.work / "requests.jsonl").read_text().splitlines()]

    def asked(self, path: str) -> list[dict[str, Any]]:
        found = [entry for entry in self.entries() if entry.get("path") == path]
        assert all(entry["key"] and not entry["unknown"] for entry in found)
        return [entry["body"] for entry in found]

    def start(self) -> dict[str, Any]:
        return next(entry for entry in self.entries() if "options" in entry)
