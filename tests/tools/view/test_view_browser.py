"""The page in a real browser: what it draws, and that hostile text stays text."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from view_runs import PROMPT, make_run, response, tokenizer_of

from isotrain.tools.view.export import export
from isotrain.tools.view.run import RunView

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium to run the page"),
]
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>\u202eend"


def dom_of(address: str, profile: Path) -> str:
    """The page after its scripts have run."""
    assert CHROMIUM is not None
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    )
    done = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={profile}", "--virtual-time-budget=8000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "ready" in re.search(r"<body class=\"([^\"]*)\"", done.stdout)[1], done.stderr  # type: ignore[index]
    assert "Refused" not in done.stderr and "Uncaught" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    encode = tokenizer_of(tiny).encode
    prompt, call, result, said = (encode(text).ids for text in (PROMPT, "call(2)", "5\n", HOSTILE))
    mask = [True] * len(call) + [False] * len(result) + [True] * len(said)
    group = [
        response(
            [*call, *result, *said], prompt, mask=mask, reward=1.0, source=HOSTILE, parts={HOSTILE: 1.0}
        ),
        response(call, prompt, sample=1, failure="timeout", detail=HOSTILE),
    ]
    return make_run(
        tmp_path_factory.mktemp("browser") / "run", tiny / "model", 4, step_1=group, step_2=group[:1]
    )


def words(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


def part(html: str, name: str) -> str:
    """One section of the page."""
    found = re.search(rf'<section id="{name}".*?</section>', html, re.DOTALL)
    assert found is not None
    return found[0]


def check_all(address: str, profile: Path) -> None:
    curves = dom_of(f"{address}#curves", profile)
    drawn = part(curves, "curves")
    assert "<title>shown · isotrain</title>" in curves
    # Reward and entropy; the score equals the reward, and is not drawn again.
    assert drawn.count('<figure class="chart"') == 2 and 'class="validation"' in drawn
    assert re.search(r'<path d="M[\d.,L]+"', drawn)

    table = part(dom_of(f"{address}#trajectories?filter=step%3D1&sort=reward", profile), "trajectories")
    body = table[table.index("<tbody>") :]
    assert body.count("<tr") == 2 and "1–2 of 2" in words(table)
    assert body.index("timeout") > body.index("</tr>"), "the lower reward is second"

    page = dom_of(f"{address}#episode?step=1&rank=0&index=0", profile)
    shown = part(page, "episode")
    assert "<title>shown · isotrain</title>" in page, "no text of the model was run"
    assert "<img" not in page and "onerror=" not in re.sub(r">[^<]*<", "><", page)
    assert words(shown).count("<script>document.title='owned'</script>") >= 3, "response, source and part"
    assert "\u202e" not in page and "\\u202eend" in words(shown)
    kinds = re.findall(r'<article class="turn (\w+)"', shown)
    assert kinds == ["prompt", "prompt", "policy", "environment", "policy"]
    assert re.search(r'class="token" style="background-color', shown) and "Group of 2" in words(shown)

    failed = words(part(dom_of(f"{address}#episode?step=1&rank=0&index=1", profile), "episode"))
    assert "Not scored: timeout" in failed and "document.title" in failed


def test_the_servers_page_works_in_a_browser(run: Path, tmp_path: Path, serve: Callable[..., Any]) -> None:
    check_all(serve(run).server.url, tmp_path / "profile")


def test_the_exported_page_works_in_a_browser(run: Path, tmp_path: Path) -> None:
    export([RunView(run)], tmp_path / "page.html", 10)
    check_all((tmp_path / "page.html").as_uri(), tmp_path / "profile")
