"""The server: who may ask, what can be asked, and that strangers' text stays text."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from view_runs import PROMPT, make_run, response, tokenizer_of, write_metrics

from isotrain.data.record import step_file, write_trajectories
from isotrain.errors import DataError, RecipeError
from isotrain.tools.view.page import STATIC, static_file
from isotrain.tools.view.run import RunView
from isotrain.tools.view.server import ADDRESS, ViewServer

Serve = Callable[..., Any]
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\u202eevil\u2066"


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Path:
    encode = tokenizer_of(tiny).encode
    prompt = encode(PROMPT).ids
    called, result, said = encode("call(2)").ids, encode("5 水").ids, encode(HOSTILE).ids
    tokens = [*called, *result, *said]
    mask = [True] * len(called) + [False] * len(result) + [True] * len(said)
    version = [1] * len(called) + [1] * len(result) + [2] * len(said)
    failed = {"failure": HOSTILE, "detail": HOSTILE, "source": HOSTILE, "parts": {HOSTILE: float("nan")}}
    return make_run(
        tmp_path / "run",
        tiny / "model",
        step_1=[
            response(tokens, prompt, mask=mask, version=version, reward=1.0),
            response(said, prompt, sample=1, **failed),  # type: ignore[arg-type]
        ],
        step_2=[response(called, prompt, prompt_index=1), response([], prompt, prompt_index=1, sample=1)],
    )


def test_the_key_is_needed_for_everything(run: Path, serve: Serve) -> None:
    client = serve(run)
    key = client.server.key
    assert len(key) >= 32
    for path in ("", "static/page.js", "api/state"):
        assert client.send(f"/{key}/{path}").status == 200
        wrong = ["", "/", f"//{path}", f"/{key[:-1]}/{path}", f"/{key}x/{path}", f"/{path}", f"/%00/{path}"]
        for other in wrong:
            reply = client.send(other or "*")
            assert reply.status == 403, other
            assert key.encode() not in reply.body
    assert client.send(f"/{key}").status == 403, "relative links would miss the key"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1234", 200),
        ("127.0.0.1", 200),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_answers_only_to_names_of_this_machine(run: Path, serve: Serve, host: str, status: int) -> None:
    client = serve(run)
    assert client.send(f"/{client.server.key}/api/state", host=host).status == status


def test_pages_of_other_sites_may_not_ask(run: Path, serve: Serve) -> None:
    client = serve(run)
    path = f"/{client.server.key}/api/state"
    assert client.send(path, headers={"Sec-Fetch-Site": "cross-site"}).status == 403
    assert client.send(path, headers={"Sec-Fetch-Site": "same-origin"}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_refuses_all_methods_but_get(run: Path, serve: Serve, method: str) -> None:
    client = serve(run)
    assert client.send(f"/{client.server.key}/api/state", method).status == 501


@pytest.mark.parametrize(
    "path",
    [
        *("../run/resolved.json", "static/../run.py", "static/%2e%2e/run.py", "static//etc/passwd"),
        *("static/page.html", "static/", "api/", "api/../state", "resolved.json"),
    ],
)
def test_no_other_file_can_be_read(run: Path, serve: Serve, path: str) -> None:
    client = serve(run)
    reply = client.send(f"/{client.server.key}/{path}")
    assert reply.status in (400, 404) and len(reply.body) < 200


def test_headers_forbid_scripts_and_frames_of_others(run: Path, serve: Serve) -> None:
    client = serve(run)
    for path in ("", "static/page.js", "api/state", "nothing"):
        headers = client.send(f"/{client.server.key}/{path}").headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers
    page = client.send(f"/{client.server.key}/").body.decode()
    assert "://" not in page and "<style" not in page and "<script>" not in page


def test_it_listens_on_this_machine_only(run: Path, serve: Serve) -> None:
    client = serve(run)
    assert client.server.server_address[0] == ADDRESS == "127.0.0.1"


def test_names_a_port_that_is_taken(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RecipeError, match=f"--port: cannot use port {port}"):
            ViewServer([RunView(run)], port)


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("rows", {"run": 2}),
        ("rows", {}),
        ("rows", {"run": 0, "limit": 201}),
        ("rows", {"run": 0, "limit": 0}),
        ("rows", {"run": 0, "offset": -1}),
        ("rows", {"run": 0, "sort": "__class__"}),
        ("rows", {"run": 0, "where": "reward"}),
        ("rows", {"run": 0, "where": "reward:lt:nan"}),
        ("rows", {"run": 0, "where": "reward:has:1"}),
        ("rows", {"run": 0, "where": "prompt:eq:1"}),
        ("rows", {"run": 0, "where": "source:lt:a"}),
        ("episode", {"run": 0, "step": "1/../2", "rank": 0, "index": 0}),
        ("episode", {"run": 0, "step": "9" * 400, "rank": 0, "index": 0}),
        ("tokens", {"run": 0, "step": 1, "rank": 0, "index": 0, "part": "mask"}),
        ("tokens", {"run": 0, "step": 1, "rank": 0, "index": 0, "count": 10**6}),
        ("metrics", {"run": 0, "after": "x"}),
        ("nothing", {"run": 0}),
    ],
)
def test_refuses_queries_that_make_no_sense(
    run: Path, serve: Serve, name: str, query: dict[str, object]
) -> None:
    reply = serve(run).ask(name, **query)
    assert reply.status == 400 and reply.json["error"]


def test_refuses_too_many_conditions_or_names(run: Path, serve: Serve) -> None:
    client = serve(run)
    assert client.ask("rows", *[("where", "step:gt:0")] * 17, run=0).status == 400
    assert client.ask("metrics", *[("name", "a")] * 65, run=0, epoch=0).status == 400
    assert client.ask("metrics", *[("name", "a")] * 500, run=0, epoch=0).status == 400


def test_names_rows_that_are_not_there(run: Path, serve: Serve) -> None:
    client = serve(run)
    assert client.ask("episode", run=0, step=7, rank=0, index=0).status == 404
    assert "has no row 50" in client.ask("episode", run=0, step=1, rank=0, index=50).json["error"]


def test_shows_an_episode_token_by_token(run: Path, serve: Serve) -> None:
    shown = serve(run).get("episode", run=0, step=1, rank=0, index=0)
    told = shown["response"]
    pieces = [
        told["joined"].get(str(i), told["pieces"][str(token)][0]) for i, token in enumerate(told["ids"])
    ]
    text = "".join(pieces)
    assert text == "call(2)5 水" + HOSTILE.replace("\u202e", "\\u202e").replace("\u2066", "\\u2066")
    assert [value for value, _ in told["mask"]] == [True, False, True]
    assert [value for value, _ in told["version"]] == [1, 2]
    assert sum(count for _, count in told["mask"]) == len(told["logp"]) == told["all"]
    assert shown["parts"] == [["function", 1.0]] and shown["advantage"] == 0.25
    assert shown["prompt"]["pieces"][str(shown["prompt"]["ids"][0])] == ["<|im_start|>", True]


def test_hostile_words_are_spelled_out_everywhere(run: Path, serve: Serve) -> None:
    client = serve(run)
    place = {"run": 0, "step": 1}
    replies = [
        client.ask("rows", run=0),
        client.ask("episode", **place, rank=0, index=1),
        client.ask("group", **place, prompt_index=0),
    ]
    for reply in replies:
        assert reply.headers["Content-Type"].startswith("application/json")
        assert "\\\\u202e" in reply.body.decode(), "spelled out"
        assert not {"\u202e", "\u2066"} & set(json.dumps(reply.json, ensure_ascii=False))
    assert replies[1].json["parts"][0][1] == "nan"


def test_shows_a_group_with_the_ends_of_its_responses(run: Path, serve: Serve) -> None:
    rows = serve(run).get("group", run=0, step=2, prompt_index=1)["rows"]
    assert [(row["sample"], row["end"]) for row in rows] == [(0, "call(2)"), (1, "")]


def test_a_long_episode_comes_in_parts(tiny: Path, tmp_path: Path, serve: Serve) -> None:
    long = response(list(range(10, 110)) * 90, list(range(10, 60)) * 50)
    shown = serve(make_run(tmp_path / "run", tiny / "model", step_1=[long]))
    first = shown.get("episode", run=0, step=1, rank=0, index=0)
    assert (first["prompt"]["start"], len(first["prompt"]["ids"]), first["prompt"]["all"]) == (
        500,
        2000,
        2500,
    )
    assert (len(first["response"]["ids"]), first["response"]["all"]) == (8000, 9000)
    place = {"run": 0, "step": 1, "rank": 0, "index": 0}
    rest = shown.get("tokens", **place, part="response", start=8000)
    assert rest["ids"] == (list(range(10, 110)) * 90)[8000:] and len(rest["logp"]) == 1000
    assert shown.get("tokens", **place, part="prompt", start=0, count=500)["ids"] == list(range(10, 60)) * 10


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path, serve: Serve) -> None:
    shown = serve(make_run(tmp_path / "run", "nowhere/at-all", step_1=[response([5, 6])]))
    told = shown.get("episode", run=0, step=1, rank=0, index=0)
    assert told["response"]["ids"] == [5, 6] and told["response"]["pieces"] == {}
    assert "--tokenizer" in told["no_text"]


def test_follows_a_run_that_goes_on(run: Path, serve: Serve) -> None:
    client = serve(run)
    before = client.get("state")["runs"][0]
    assert (before["metrics"]["rows"], before["trajectories"]["rows"]) == (3, 4)
    write_metrics(run, 4, 6)
    write_trajectories(step_file(run / "trajectories", 3, 0), [response([1, 2, 3])])
    deadline = time.monotonic() + 20
    while (state := client.get("state")["runs"][0])["trajectories"]["rows"] == 4:
        assert time.monotonic() < deadline, "the new file was not seen"
        time.sleep(0.05)
    assert state["metrics"]["last"] == 6
    new = client.get("metrics", run=0, epoch=state["metrics"]["epoch"], after=3, name="actor/entropy")
    assert new["curves"]["actor/entropy"]["steps"] == [4, 5, 6]
    assert client.get("rows", run=0, limit=1)["rows"][0]["step"] == 3
    # Of another epoch all is sent again.
    whole = client.get("metrics", run=0, epoch=77, after=3, name="actor/entropy")
    assert len(whole["curves"]["actor/entropy"]["steps"]) == 6


def test_shows_two_runs_side_by_side(run: Path, tmp_path: Path, serve: Serve) -> None:
    second = make_run(tmp_path / "second", "nowhere", steps=5)
    client = serve(run, second)
    assert [state["metrics"]["rows"] for state in client.get("state")["runs"]] == [3, 5]
    assert client.get("metrics", run=1, name="actor/entropy")["rows"] == 5
    assert client.get("rows", run=1)["found"] == 0


def test_refuses_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory: give the `output`"):
        RunView(tmp_path)


def test_no_script_makes_markup_or_code_of_text() -> None:
    unsafe = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|DOMParser|srcdoc"
    )
    scripts = [path for path in STATIC if path.endswith(".js")]
    assert len(scripts) > 3
    for path in scripts:
        assert not unsafe.findall(static_file(path).decode()), path


def test_shows_the_turns_of_an_agents_episode(run: Path, serve: Serve) -> None:
    """A recording says of an episode which sequence of it a row is, and its turns."""
    path = step_file(run / "trajectories", 2, 0)
    table = pyarrow.parquet.read_table(path)
    turn = {"start": 0, "end": 2, "reward": 0.5, "calls": 1, "failures": 0, "seconds": 0.25}
    told = {"part": 1, "parts": 2, "earlier": 0.0, "failure": HOSTILE, "detail": "", "turns": [turn]}
    place, kind = table.schema.get_field_index("episode"), table.schema.field("episode").type
    later = table.set_column(place, "episode", pyarrow.array([told, {**told, "part": 0}], kind))
    same = pyarrow.array([0, 0], pyarrow.int64())
    later = later.set_column(later.schema.get_field_index("sample"), "sample", same)
    pyarrow.parquet.write_table(later, path)
    client = serve(run)
    rows = client.get("group", run=0, step=2, prompt_index=1)["rows"]
    assert [(row["index"], row["part"]) for row in rows] == [(1, 0), (0, 1)]
    shown = client.get("episode", run=0, step=2, rank=0, index=0)["episode"]
    assert shown["turns"] == [turn] and shown["parts"] == 2 and "\\u202e" in shown["failure"]
    assert client.get("episode", run=0, step=1, rank=0, index=0)["episode"] is None
