"""Evaluations with the reference engine: rows are accounted for, a kill changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.data.prepare.tiny_reward import score as tiny_score
from isotrain.errors import DataError, RecipeError
from isotrain.tools.evaluate.chat import text_pieces
from isotrain.tools.evaluate.log import Item, ItemLog, Response, read_items
from isotrain.tools.evaluate.results import draw_curve, is_complete, results_of

ROWS = 6


@pytest.fixture(scope="module")
def data(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sources, the last row with a prompt that is too long."""
    rows = [json.loads(line) for line in (tiny / "prompts-validation.jsonl").read_text().splitlines()[:ROWS]]
    rows = [row | {"data_source": f"part {number % 2}"} for number, row in enumerate(rows)]
    rows[-1]["prompt"][0]["content"] = "long " * 400
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(tiny: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("evaluate", str(tiny / "model"), "--data", str(data), "--out", str(out), "-n", "3"),
        *("--reward", f"{tiny}/reward.py:score", "reward.answer_key=answer", "rollout.engine=hf"),
        *("rollout.max_tokens=6", "model.dtype=float32", "device.type=cpu", "data.max_length=128", *more),
    ]


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture(scope="module")
def whole(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    output = run(*arguments(tiny, data, out), code=3).output
    assert "prompts too long (wrong)" in output and "some rows or responses have no score" in output
    return out


def test_every_row_is_accounted_for(whole: Path, data: Path) -> None:
    items, results = read_items(whole / "responses.jsonl"), json.loads((whole / "results.json").read_text())
    assert [item.row for item in items] == list(range(ROWS))
    assert [dict(item.values) for item in items] == [json.loads(line) for line in data.open()]
    assert all(len(item.responses) == 3 for item in items)
    parts = results["results"]
    assert list(parts) == ["part 0", "part 1", "all rows"]
    assert [part["rows"] for part in parts.values()] == [3, 3, 6]
    assert [part["too_long_prompts"] for part in parts.values()] == [0, 1, 1]
    cut = sum(not r.finished for item in items if not item.too_long for r in item.responses)
    assert parts["all rows"]["truncated_responses"] == cut > 0
    # The row that cannot be answered counts as wrong, and not as nothing.
    scores = [tiny_score(r.text, item.values["answer"]) for item in items for r in item.responses]
    assert parts["all rows"]["metrics"]["mean@3"]["mean"] == pytest.approx(sum(scores) / (3 * ROWS))
    assert not any(r.text for r in items[-1].responses) and items[-1].too_long


def test_a_kill_changes_nothing(tiny: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    """Resumed from two rows and half a line; again when all is done, without the model."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "evaluation.json").write_bytes((whole / "evaluation.json").read_bytes())
    lines = (whole / "responses.jsonl").read_bytes().splitlines(keepends=True)
    (out / "responses.jsonl").write_bytes(b"".join(lines[1:3]) + lines[3][:50])
    assert "resumed: 2 of 6" in run(*arguments(tiny, data, out), code=3).output
    assert read_items(out / "responses.jsonl") == read_items(whole / "responses.jsonl")
    assert (out / "results.json").read_bytes() == (whole / "results.json").read_bytes()
    before = (out / "responses.jsonl").read_bytes()
    run(*arguments(tiny, data, out), code=3)
    assert (out / "responses.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", ["rollout.max_tokens=7", "seed=5", "rollout.validation.temperature=0.5"])
def test_a_directory_of_another_evaluation_is_refused(
    tiny: Path, data: Path, whole: Path, change: str
) -> None:
    output = run(*arguments(tiny, data, whole, change), code=1).output
    assert "another evaluation, which differs in recipe" in output


def test_changed_rows_are_another_evaluation(tiny: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "rows.jsonl"
    other.write_text(data.read_text().replace("part 0", "part 9"))
    assert "differs in data" in run(*arguments(tiny, other, whole), code=1).output


def test_a_reward_that_always_fails_ends_the_evaluation(tiny: Path, tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def score(response):\n    raise KeyError('no such column')\n")
    rows = tiny / "prompts-validation.jsonl"
    settings = ["--reward", f"{reward}:score", "-n", "4", "--limit", "20", "reward.function.concurrency=1"]
    output = run(*arguments(tiny, rows, tmp_path / "out", *settings), code=1).output
    assert "responses got a score" in output and "no such column" in output


def test_some_failed_rewards_are_counted_and_told(tiny: Path, tmp_path: Path) -> None:
    reward = tmp_path / "sometimes.py"
    reward.write_text(
        "def score(response, row):\n    if row['answer'] == 'digits':\n        raise ValueError('digits!')\n"
        "    return 1.0\n"
    )
    rows = [json.loads(line) for line in (tiny / "prompts-validation.jsonl").read_text().splitlines()[:6]]
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run(*arguments(tiny, data, out, "--reward", f"{reward}:score", "-n", "1"), code=3).output
    failed = sum(row["answer"] == "digits" for row in rows)
    assert 0 < failed < 6 and "digits!" in output
    (part,) = json.loads((out / "results.json").read_text())["results"].values()
    assert part["without_score"] == {"error": failed}
    assert part["metrics"]["pass@1"]["mean"] == pytest.approx(1 - failed / 6)


def test_score_reads_what_evaluate_wrote(tiny: Path, whole: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    reward = {"function": {"path": f"{tiny}/reward.py:score"}, "answer_key": "answer"}
    values = {"name": "r", "output": "o", "model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"n": 4}}
    recipe.write_text(json.dumps({**values, "algorithm": {"name": "grpo"}, "reward": reward}))
    lines = run("score", str(recipe), str(whole / "responses.jsonl"), "--json").output.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    items = [json.loads(line) for line in (whole / "responses.jsonl").open()]
    again = [[scored["score"] for scored in row["scores"]] for row in rows]
    assert again == [[response["score"] for response in item["responses"]] for item in items]
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"text": "123", "answer": "digits"}\n{"text": ["12", "ab"], "answer": "digits"}\n')
    output = run("score", str(recipe), str(plain), "--response-key", "text").output
    assert "2 rows, 3 responses, mean score 0.6667, 0 without a score" in output
    assert "must be a response" in run("score", str(recipe), str(plain), code=1).output


def item(row: int, scores: Sequence[float], failure: str | None = None) -> Item:
    return Item(row, "data", {}, 3, tuple(Response("a", score, 1, True, failure) for score in scores))


def test_a_complete_evaluation_has_no_row_without_a_score() -> None:
    assert is_complete(results_of([item(0, [1.0]), item(1, [0.0])], (), 1.0))
    assert not is_complete(results_of([item(0, [1.0]), item(1, [0.0], "timeout")], (), 1.0))


def test_a_failed_score_is_never_correct() -> None:
    """Also where `reward.failed_score` is that of a right answer."""
    (part,) = results_of([item(0, [1.0, 1.0], "error")], (1,), 1.0)["results"].values()
    assert part["metrics"]["pass@1"]["mean"] == 0.0


def test_a_row_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with ItemLog(tmp_path) as log:
        log.add([item(0, [1.0])])
        log.add([item(0, [1.0])])
    with pytest.raises(DataError, match="row 0 is there twice"):
        ItemLog(tmp_path)
    (tmp_path / "responses.jsonl").write_text('{"row": 0}\n')
    with pytest.raises(DataError, match="no line of an evaluation"):
        ItemLog(tmp_path)


def test_a_curve_has_a_point_for_each_checkpoint(tmp_path: Path) -> None:
    by_step = {step: results_of([item(0, [0.5]), item(1, [step / 9])], (), 1.0) for step in (3, 6)}
    draw_curve(tmp_path / "curve.png", "run", by_step)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--reward", "gsm9k"], "is unknown: write gsm8k"),
        (["-k", "4"], "pass@k is estimated from -n 3 responses"),
        (["--steps", "4"], "is no run directory"),
        (["reward.function=null", "reward.model.path=m"], "reward.model needs training ranks"),
        (["--temperature", "0"], "would repeat one greedy response"),
    ],
)
def test_options_that_cannot_be(tiny: Path, data: Path, tmp_path: Path, more: list[str], words: str) -> None:
    output = run(*arguments(tiny, data, tmp_path / "out", *more), code=1).output
    assert words in " ".join(output.split())


def test_pieces_are_the_text_and_never_half_a_character() -> None:
    data = "aé€😀b".encode()

    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    pieces = list(text_pieces(iter(data), decode))
    assert pieces == ["a", "é", "€", "😀", "b"]
    assert "".join(text_pieces(iter(data[:-2]), decode)) == decode(data[:-2])


def test_chat_streams_and_filters_what_steers_a_terminal(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import isotrain.tools.evaluate.chat as chat

    written = run(
        "chat", str(tiny / "model"), "--temperature", "0", "--max-tokens", "4", "--dtype", "float32"
    )
    assert written.output.endswith("> \n")
    monkeypatch.setattr(chat, "text_pieces", lambda *_: iter(["a\x1b]0;x\x07", "\r", "b"]))
    lines = iter(["hello", "/clear", "again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    output = run("chat", str(tiny / "model"), "--dtype", "float32", "--max-tokens", "4").output
    assert output.count("a\\x1b]0;x\\x07\\x0db\n") == 2 and "\x1b" not in output


def test_the_stream_is_what_the_engine_generates(tiny: Path) -> None:
    import numpy as np

    from isotrain.device.detect import choose_device
    from isotrain.rollout.base import Request, Sampling
    from isotrain.rollout.hf import HfEngine

    device = choose_device("cpu").activate(0)
    engine = HfEngine(tiny / "model", name="engine", dtype="float32", device=device)
    request = Request(0, 0, 0, 11, np.array([5, 9, 2, 40], np.int32))
    (whole,) = engine.generate([request], Sampling(12))
    assert list(engine.stream(request, Sampling(12))) == whole.response_N.tolist()


def test_rewards_of_ranks_are_refused_for_score(tmp_path: Path) -> None:
    from isotrain.recipe.load import check_values
    from isotrain.tools.evaluate.recipe import check_reward

    values: dict[str, Any] = {"name": "r", "output": "o", "model": {"path": "m"}, "data": {"train": "t"}}
    values |= {"algorithm": {"name": "rloo"}, "rollout": {"n": 2}, "reward": {"model": {"path": "m"}}}
    with pytest.raises(RecipeError, match=r"reward\.model needs training ranks"):
        check_reward(check_values(values, "recipe"))
