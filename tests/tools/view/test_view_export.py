"""The exported page: one file that loads nothing, with a bounded number of trajectories."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from view_runs import make_run, response, tokenizer_of

from isotrain.errors import RecipeError
from isotrain.tools.view.export import export
from isotrain.tools.view.run import RunView

HOSTILE = "</script><script>document.title='owned'</script><!--\u2028"


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = tokenizer_of(tiny).encode(HOSTILE).ids
    steps = {
        f"step_{step}": [
            response(tokens, prompt_index=10 * step + group, sample=sample, source=HOSTILE)
            for group in range(3)
            for sample in range(4)
        ]
        for step in range(1, 8)
    }
    return make_run(tmp_path_factory.mktemp("export") / "run", tiny / "model", steps=7, **steps)


def exported(run: Path, out: Path, trajectories: int) -> tuple[str, dict[str, Any]]:
    export([RunView(run)], out, trajectories)
    page = out.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="exported">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return page, json.loads(data[1])["runs"][0]


def test_the_page_loads_nothing_and_runs_only_its_own_script(run: Path, tmp_path: Path) -> None:
    page, _ = exported(run, tmp_path / "page.html", 20)
    # The name of SVG is not an address that is loaded.
    assert re.findall(r"\b(?:https?|wss?|ftp)://[^\"']*", page) == ["http://www.w3.org/2000/svg"]
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=\"(?!data:)", page)
    assert not re.findall(r"@import|url\(", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    assert "connect-src" not in policy[1]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]


def test_hostile_text_does_not_end_the_data(run: Path, tmp_path: Path) -> None:
    page, data = exported(run, tmp_path / "page.html", 4)
    assert page.count("</script>") == 2 and "owned'</script>" not in page
    assert data["rows"][0]["source"].startswith("</script><script>")


@pytest.mark.parametrize(
    ("most", "steps"), [(4, [1]), (8, [1, 7]), (28, list(range(1, 8))), (5000, list(range(1, 8)))]
)
def test_whole_groups_spread_over_the_run(run: Path, tmp_path: Path, most: int, steps: list[int]) -> None:
    _, data = exported(run, tmp_path / "page.html", most)
    assert len(data["rows"]) == min(most, 84) == len(data["episodes"])
    assert sorted({row["step"] for row in data["rows"]}) == steps
    groups = [(row["step"], row["prompt_index"]) for row in data["rows"]]
    assert all(groups.count(group) == 4 for group in groups)


def test_exports_at_most_as_many_episodes_as_asked(run: Path, tmp_path: Path) -> None:
    assert export([RunView(run)], tmp_path / "page.html", 6) == (6, 84)
    assert export([RunView(run), RunView(run)], tmp_path / "page.html", 0) == (0, 168)


def test_the_page_has_curves_and_pieces_of_text(run: Path, tmp_path: Path) -> None:
    _, data = exported(run, tmp_path / "page.html", 4)
    assert data["curves"]["critic/score/mean"]["steps"] == list(range(1, 8))
    assert data["curves"]["val-core/data/reward/mean@1"]["steps"] == [2, 4, 6]
    episode = next(iter(data["episodes"].values()))
    assert "pieces" not in episode["response"]
    text = "".join(data["pieces"][str(token)][0] for token in episode["response"]["ids"][:9])
    assert text.startswith("</script>")


def test_refuses_a_path_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--export: .*cannot be written"):
        export([RunView(run)], tmp_path / "no" / "page.html", 1)


PROGRAM = """
import sys
for name in ("pyarrow", "tokenizers", "torch", "transformers"):
    sys.modules[name] = None  # as where they are not installed
from pathlib import Path
from isotrain.tools.view.export import export
from isotrain.tools.view.run import RunView
run = RunView(Path(sys.argv[1]))
print(export([run], Path(sys.argv[2]), 10), run.state()["metrics"]["rows"], run.state()["problem"])
"""


def test_shows_curves_without_the_packages_of_training(run: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run), str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    needed = "trajectories need the package 'pyarrow': pip install '.[train]' in a clone of isotrain"
    assert done.stdout.strip() == f"(0, 0) 7 {needed}"
