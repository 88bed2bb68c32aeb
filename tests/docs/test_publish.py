"""Versions of the site beside each other, and the lists that its header reads."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urljoin

from publish import publish


def test_both_languages_lead_to_every_version(tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    (site / "zh").mkdir(parents=True)
    out.mkdir()
    (site / "index.html").write_text("first")
    assert publish(site, out, "0.9") == ["0.9"]
    (site / "index.html").write_text("second")
    assert publish(site, out, "0.10") == ["0.10", "0.9"]
    assert [(out / version / "index.html").read_text() for version in ("0.9", "0.10")] == ["first", "second"]
    assert "url=0.10/" in (out / "index.html").read_text()
    for language in ("", "zh/"):
        for here in ("0.9", "0.10"):
            base = f"http://host/{here}/{language}"
            entries = json.loads(
                (out / urljoin(base, "../versions.json").removeprefix("http://host/")).read_text()
            )
            led = {entry["title"]: urljoin(base, f"../{entry['version']}/") for entry in entries}
            assert led == {version: f"http://host/{version}/{language}" for version in ("0.10", "0.9")}
            # The theme takes the last part of its address for the name of the version that it shows.
            shown = base.rstrip("/").rpartition("/")[2]
            assert [e["title"] for e in entries if shown in (e["version"], *e["aliases"])] == [here]


def test_a_version_is_published_anew(tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    (site / "old.html").write_text("")
    publish(site, out, "0.1")
    (site / "old.html").rename(site / "new.html")
    publish(site, out, "0.1")
    assert sorted(path.name for path in (out / "0.1").iterdir()) == ["new.html", "versions.json"]
