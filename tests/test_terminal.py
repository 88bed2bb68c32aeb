"""Nothing that steers a terminal passes the filter, and what is ours does."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isotrain.observe.console import open_console
from isotrain.terminal import Guard, beneath, guard, guarded, rich_console, visible

# Letters that matter: escape sequences of seven and eight bits, moves, bells, marks that turn text around,
# that nobody sees, that break lines; halves of characters; and what must stay as it is.
HOSTILE = "\x1b\x9b\x9d\x90\x07\x08\r\x0b\x0c\x00\x7f\x85\u061c\u200b\u200d\u200e\u202a\u202e\u2028\u2029"
HOSTILE += "\u2060\u2066\u2069\ufeff\U000e0041\udc9b\ud800\xad"
ORDINARY = "aZ 09[];?mhJ2\\\"'\n\té中文　🙂\xa0$"


def hostile_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(HOSTILE + ORDINARY, k=draw.randint(1, 30))) for _ in range(count)]


class TestVisible:
    def test_what_stays(self) -> None:
        assert visible(ORDINARY) == ORDINARY
        assert visible("a\nb\tc") == "a\nb\tc" and visible("a\nb\tc", one_line=True) == r"a\x0ab\x09c"

    def test_what_is_spelled_out(self) -> None:
        assert visible("\x1b[31mred") == r"\x1b[31mred"
        assert visible("a\x9b\u202e\udc9b\U000e0041") == r"a\u009b\u202e\udc9b\udb40\udc41"

    @pytest.mark.parametrize("letter", HOSTILE)
    def test_every_letter(self, letter: str) -> None:
        assert letter not in visible(f"a{letter}b") and visible(f"a{letter}b").startswith("a\\")

    def test_it_can_be_repeated_and_leaves_json_alone(self) -> None:
        for text in hostile_texts(300, seed=1):
            once = visible(text)
            assert visible(once) == once
            value = {text: [text]}
            # Python's own escapes, too, join two halves of a character that stand side by side.
            assert json.loads(visible(json.dumps(value, ensure_ascii=False))) == json.loads(json.dumps(value))


class TestGuard:
    def test_a_progress_line_overwrites_itself_and_nothing_else(self) -> None:
        stream = io.StringIO()
        out = Guard(stream)
        for text in ("one\n", "\r 1 %", "\r 2 %", "\n", "two", "\rthree", "\n", "a\rb\r\n"):
            out.write(text)
        assert stream.getvalue() == "one\n\r 1 %\r 2 %\ntwo\\x0dthree\na\\x0db\n"

    def test_both_streams_share_the_line(self) -> None:
        one, other = io.StringIO(), io.StringIO()
        Guard(one).write("on its way")
        Guard(other).write("\rgone\n")
        assert other.getvalue() == "\\x0dgone\n"

    def test_narrow_encodings(self) -> None:
        raw = io.BytesIO()
        out = Guard(io.TextIOWrapper(raw, encoding="ascii"))
        print("é🙂\udc9b", file=out, flush=True)
        assert raw.getvalue() == b"\\u00e9\\ud83d\\ude42\\udc9b\n"

    def test_bytes_have_no_way_around_it(self) -> None:
        out = Guard(io.TextIOWrapper(io.BytesIO()))
        assert not hasattr(out, "buffer")
        with pytest.raises(TypeError):
            out.write(b"\x1b")  # type: ignore[arg-type]

    def test_streams_come_back(self) -> None:
        before = sys.stdout, sys.stderr
        with guarded():
            assert isinstance(sys.stdout, Guard) and isinstance(sys.stderr, Guard)
            first = sys.stdout
            guard()
            assert sys.stdout is first
        assert (sys.stdout, sys.stderr) == before


def rich_output(monkeypatch: pytest.MonkeyPatch, *renderables: object) -> str:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Guard(stream))
    settings = {"color_system": "standard", "width": 300, "markup": False, "highlight": False}
    rich_console(force_terminal=True, **settings).print(*renderables, style="red")
    return stream.getvalue()


class TestRich:
    def test_text_is_filtered_and_styles_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert rich_output(monkeypatch, "a\x1b[32mb\x9b") == "\x1b[31ma\\x1b[32mb\\u009b\x1b[0m\n"
        assert rich_output(monkeypatch, Text("a\x1b[8mb", "bold")) == "\x1b[1;31ma\\x1b[8mb\x1b[0m\n"

    def test_a_console_on_a_stream_of_its_own_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rich_output(monkeypatch, "one of ours")
        for make in (Console, rich_console):
            theirs = io.StringIO()
            make(file=theirs, width=300).print("a\x1b[32mb", Text("\u202e"))
            assert theirs.getvalue() == "a\x1b[32mb \u202e\n"

    def test_of_a_console_of_others_plain_colours_alone_pass(self) -> None:
        stream = io.StringIO()
        console = Console(file=Guard(stream), force_terminal=True, color_system="standard", width=300)
        console.print(Text("a\x1b[8mb\x1b[38;5;201m\x1b[A\r\u202e", "bold red"))
        assert stream.getvalue() == "\x1b[1;31ma\\x1b[8mb\\x1b[38;5;201m\\x1b[A\\u202e\x1b[0m\n"

    def test_tables_make_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = Table("\x1b[2Jname", box=None)
        table.add_row("\u202e\u2066")
        shown = rich_output(monkeypatch, table)
        assert r"\x1b[2Jname" in shown and r"\u202e\u2066" in shown

    def test_links_are_not_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "\x1b]8" not in rich_output(monkeypatch, Text("x", "link https://example.org"))

    @pytest.mark.parametrize("text", hostile_texts(100, seed=2))
    def test_fuzzed(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        table = Table(text)
        table.add_row(Text(text), text)
        for renderable in (text, Text(text), table):
            shown = rich_output(monkeypatch, renderable).replace("\x1b[31m", "").replace("\x1b[1;31m", "")
            assert not set(shown.replace("\x1b[0m", "")) & set(HOSTILE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_others_print_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        with guarded():
            with open_console() as console:
                console.start(3, 1)
                console.update(1, {"train/loss": 1.0, "val-core/\x1b[8mx": 1.0})
                print("hidden: \x1b[8mpassword\x1b]0;title\x07")
                console.message("warning: \x1b[2J\u202e")
            assert isinstance(sys.stdout, Guard)
    shown = stream.getvalue()
    for words in (r"val-core/\x1b[8mx", r"hidden: \x1b[8mpassword\x1b]0;title", r"\x1b[2J\u202e"):
        assert words in shown, repr(shown)
    assert (
        "\x1b[?25l" in shown
        and "\x1b[8m" not in shown
        and "\x1b[2J" not in shown
        and "\\x1b[?25" not in shown
    )


def test_lines_are_filtered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Guard(stream))
    console = open_console()
    console.start(1, 1)
    console.update(1, {"train/loss": 1.0, "val-core/\x1b[8mx": 1.0})
    assert r"val-core/\x1b[8mx" in stream.getvalue()


def test_a_library_with_several_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    out = beneath(Guard(stream))
    out.write("\n\rfile: 10 %\x1b[A\x1b]0;t\x07")
    assert stream.getvalue() == "\n\rfile: 10 %\x1b[A\\x1b]0;t\\x07"
    assert beneath(stream) is stream


def test_tracebacks(tmp_path: Path) -> None:
    """They are printed last, when commands have ended."""
    code = "from isotrain.terminal import guard; guard(); raise ValueError('\\x1b[31m\\x9b\\udc9b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.stderr.rstrip().endswith(rb"ValueError: \x1b[31m\u009b\udc9b")
