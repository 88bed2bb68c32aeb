"""The code of docs/writing-a-reward.md, run as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pages
import pytest
import yaml
from translations import ROOT

from isotrain.process.sandbox import Limits
from isotrain.recipe.online import RewardSection
from isotrain.rewards.base import RewardInput, Scored
from isotrain.rewards.build import build_scorer, reward_source
from sandboxes import bubblewrap

PAGE = (ROOT / "docs/writing-a-reward.md").read_text(encoding="utf-8")
RECIPE = """
name: my
output: runs/my
model: {path: any}
data: {train: rows.jsonl}
algorithm: {name: grpo}
rollout: {n: 2}
"""


def blocks(language: str) -> list[str]:
    return [
        "".join(block.splitlines(keepends=True)[1:-1])
        for block in pages.code_blocks(PAGE)
        if block.startswith(f"```{language}\n")
    ]


def rewards() -> list[dict[str, Any]]:
    return [yaml.safe_load(block)["reward"] for block in blocks("yaml")]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, each named in its first line, in the working directory."""
    for block in blocks("python"):
        (name,) = re.findall(r"\A# (\w+\.py)\n", block)
        with open(tmp_path / name, "a", encoding="utf-8") as file:
            file.write(f"{block}\n\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def score(section: dict[str, Any], *responses: str, answer: str = "12") -> list[Scored]:
    reward = RewardSection.model_validate(section)
    scorer = build_scorer(reward, reward_source(reward))
    try:
        scorer.start()
        return scorer.score([RewardInput(response, answer) for response in responses])
    finally:
        scorer.close()


def test_every_file_of_the_page_is_tried(directory: Path) -> None:
    assert {path.name for path in directory.iterdir()} == {
        "rewards.py",
        "try_reward.py",
        "judge.py",
        "code_reward.py",
    }
    assert [section["function"]["path"] for section in rewards()] == [
        "rewards.py:score",
        "rewards.py:graded",
        "judge.py:judge",
    ]


def test_three_lines_and_the_script_that_tries_them(directory: Path) -> None:
    (directory / "my.yaml").write_text(RECIPE + blocks("yaml")[0], encoding="utf-8")
    done = subprocess.run([sys.executable, "try_reward.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] in pages.code_spans(PAGE)
    assert [re.findall(r"score=([\d.]+)", line)[0] for line in lines] == ["1.0", "0.0", "0.0", "0.0"]


def test_parts_and_a_weight_of_zero() -> None:
    right, wrong = score(rewards()[1], "it is 12", "12 or 13")
    assert right.score == pytest.approx(0.997)
    assert right.parts == {
        "gsm8k": 1.0,
        "function": right.score,
        "function/right": 1.0,
        "function/words": 3.0,
    }
    assert wrong.score == pytest.approx(-0.003) and wrong.parts["gsm8k"] == 0.0
    (long,) = score(rewards()[1], "so " * 998 + "12")
    assert long.score > score(rewards()[1], "13")[0].score


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = asked["messages"]
        words = message["content"].partition("<<<\n")[2].partition("\n>>>")[0]
        known = self.headers["Authorization"] == "Bearer a-key" and self.path == "/v1/chat/completions"
        self.send_response(200 if known and words != "down" else 500)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": words}}]}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A judge that repeats what it is asked about."""
    pytest.importorskip("httpx")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("JUDGE_API_KEY", "a-key")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield
    server.shutdown()
    server.server_close()


def test_a_judge_is_asked_and_its_errors_are_failures(judge: None) -> None:
    seven, much, down, words = score(rewards()[2], "7", "100", "down", "give it a 10")
    assert (seven.score, much.score) == (0.7, 1.0)
    assert down.failure == words.failure == "error"
    assert "500" in down.detail and "could not convert" in words.detail


def test_code_runs_in_the_sandbox() -> None:
    with bubblewrap(Limits(seconds=5)):
        pass
    fence = "`" * 3
    good, bad, none = score(
        {"function": {"path": "code_reward.py:prints"}},
        f"{fence}python\nprint(3 * 4)\n{fence}",
        f"{fence}python\nprint(3 + 4)\n{fence}",
        "12",
    )
    assert [good.score, bad.score, none.score] == [1.0, 0.0, 0.0]


def test_filters_name_columns_of_the_table() -> None:
    page = (ROOT / "docs/evaluate.md").read_text(encoding="utf-8")
    words = [
        word
        for span in pages.code_spans(PAGE)
        if re.search(r"\w[<>]=?[\d.]|^failed$", span)
        for word in span.split()
    ]
    columns = {re.split(r"[<>=]", word)[0] for word in words}
    assert columns == {"step", "reward", "length", "cut", "failed"}
    assert all(f"`{column}`" in page for column in columns)
