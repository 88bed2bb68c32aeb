"""The one filter between texts of strangers and the terminal.

Names of metrics, paths, rows, fields of certificates and messages of workers come from files that anybody
may have written. Whatever a process prints passes through here, and what could steer a terminal is spelled
out: `\\x1b` for the character that starts an escape sequence. Colours and the progress bar come from rich's
consoles that are made here: rich keeps text apart from styles until it writes, so that text is filtered
before styles are added to it.

What is written past Python's streams is not seen here: by C libraries, by other programs that inherit them.
"""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

if TYPE_CHECKING:
    from rich.console import Console

# Line feeds and tabs are layout. Spaces of other widths are ordinary in many languages.
_LAYOUT = "\n\t"
# Colours, and what the bar of `observe/console.py` moves with: hide and show the cursor, up, erase the line.
_OURS = re.compile(r"(\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[[0-9]*[AK]|\r)")


def visible(text: str, *, one_line: bool = False) -> str:
    """The text with everything spelled out that steers a terminal or is not to be seen.

    From U+007F on the spelling is that of JSON, in which it means the same character: JSON stays JSON. Lower
    ones never occur in it. `one_line` spells out line feeds and tabs too: for names, which could otherwise
    pretend to be a line of ours.
    """
    if text.isprintable():
        return text
    kept = "" if one_line else _LAYOUT
    return "".join(c if _is_shown(c) or c in kept else _spelled(c) for c in text)


def _is_shown(character: str) -> bool:
    """Not so controls, surrogates, bidirectional and zero-width marks, separators of lines and paragraphs."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _spelled(character: str) -> str:
    if character < "\x7f":
        return f"\\x{ord(character):02x}"
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


class _Filter(io.TextIOBase):
    """A stream in front of another one. It has no `buffer`: bytes would pass beside the filter."""

    # Whether the terminal's line is empty; standard output and errors share it.
    _fresh: ClassVar[bool] = True

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self._stream, "errors", None)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def flush(self) -> None:
        self._stream.flush()

    def reconfigure(self, **settings: Any) -> None:
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(**settings)

    def close(self) -> None:
        """The stream is Python's; it is not closed with its filter."""

    def _pass_on(self, text: str) -> None:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:  # a narrow encoding, such as ASCII
            text = "".join(c if _fits(c, self.encoding) else _spelled(c) for c in text)
        self._stream.write(text)
        _Filter._fresh = text.endswith("\n")


def _fits(character: str, encoding: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


class _Styled(_Filter):
    """For what has been filtered before it was styled: only the sequences of ours pass."""

    _passing = _OURS

    def write(self, text: str) -> int:
        parts = self._passing.split(text)  # texts and sequences by turns
        self._pass_on("".join(part if at % 2 else visible(part) for at, part in enumerate(parts)))
        return len(text)


class _Coloured(_Styled):
    """For consoles of others, whose texts nobody has filtered: plain colours alone pass."""

    _passing = re.compile(r"(\x1b\[(?:(?:[0-7]|[39][0-7])(?:;(?=[0-9])|(?=m)))*m)")


class Guard(_Filter):
    """A stream on which nothing steers the terminal, except that a progress line may overwrite itself.

    Libraries begin such a line with a carriage return. It passes at the start of a write, while the line has
    nothing else in it.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        beneath = getattr(stream, "rich_proxied_file", stream)
        self._styled: _Styled = beneath._styled if isinstance(beneath, Guard) else _Styled(beneath)

    @property
    def rich_proxied_file(self) -> IO[str]:
        """Where consoles of rich write that are not this program's: rich asks for this name."""
        return cast("IO[str]", _Coloured(self._styled._stream))

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() needs str, not {type(text).__name__}")
        if not text:
            return 0
        lines = text.replace("\r\n", "\n")
        returns = _Filter._fresh and lines.startswith("\r")
        self._pass_on("\r" * returns + visible(lines[returns:]))
        _Filter._fresh |= returns and "\n" not in lines
        return len(text)


def guard() -> None:
    """Put the filter before this process's output, for good; once is enough."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guard):
            setattr(sys, name, Guard(stream))


@contextmanager
def guarded() -> Iterator[None]:
    """The same for a while."""
    before = sys.stdout, sys.stderr
    guard()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        sys.stdout, sys.stderr = before


def beneath(stream: IO[str]) -> IO[str]:
    """Where a library's own progress may move the cursor: for code whose texts are all ours."""
    return cast("IO[str]", stream._styled) if isinstance(stream, Guard) else stream


@cache
def filtered_console() -> type[Console]:
    """The class of this program's consoles: they filter texts before they style them on a guarded stream."""
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.text import Text

    class FilteredConsole(Console):
        @property
        def file(self) -> IO[str]:
            stream = self._file or (sys.stderr if self.stderr else sys.stdout)
            filtered = beneath(stream)
            return super().file if filtered is stream else filtered

        @file.setter
        def file(self, stream: IO[str]) -> None:
            self._file = stream

        def render_str(self, text: str, **settings: Any) -> Text:
            # Before columns are measured and lines are broken: what is spelled out is longer.
            return super().render_str(visible(text) if self._filters() else text, **settings)

        def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            filters = self._filters()
            for segment in super().render(renderable, options):
                if segment.control or not filters:
                    yield segment
                else:
                    yield Segment(visible(segment.text), segment.style)

        def _filters(self) -> bool:
            return isinstance(self.file, _Styled)

    return FilteredConsole


def rich_console(**settings: Any) -> Console:
    """A console of rich for this program's own output."""
    return filtered_console()(**settings)
