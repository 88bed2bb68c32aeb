"""Text of a shell script: escapes, patterns, and what `${x...}` makes of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase, translate

# A gap has its number between two marks, a word under a condition begins with that of the condition.
GAP, MAYBE = "\ue000", "\ue001"
MARKS = re.compile(f"[{GAP}{MAYBE}]")
GAPS = re.compile(f"{GAP}(\\d+){GAP}")
MAYBES = re.compile(f"{MAYBE}(\\d+){MAYBE}")
# Octal, hexadecimal, Unicode, control characters, and names.
ANSI_ESCAPES = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|(u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8})|c(.)|(.))", re.S
)
_ANSI = dict(zip("abeEfnrtv\\'\"?", "\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))
CASES: dict[str, Callable[[str], str]] = {
    ",,": str.lower,
    "^^": str.upper,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


def literal(source: bytes, quoted: bool, splits: bool) -> Iterator[tuple[str, bool, bool]]:
    """Plain text; a character behind a backslash is quoted."""
    text = source.decode("utf-8", "replace").replace("\\\n", "")
    if quoted:
        yield re.sub(r'\\([$`"\\])', r"\1", text), True, False
        return
    for part in re.findall(r"\\.|[^\\]+|\\", text, re.S):
        escaped = part[0] == "\\" and len(part) == 2
        yield part[1:] if escaped else part, escaped, splits and not escaped


def ansi_escape(escape: re.Match[str]) -> str:
    """One escape of `$'...'`; a byte that is no character of its own becomes U+FFFD, which is refused."""
    octal, byte, character, control, name = escape.groups()
    if octal or byte:
        number = int(octal, 8) & 0xFF if octal else int(byte, 16)
        return chr(number) if 0 < number < 128 else "\ufffd"
    if character:
        number = int(character[1:], 16)
        return chr(number) if 0 < number < 0x110000 and not 0xD800 <= number < 0xE000 else "\ufffd"
    return chr(ord(control.upper()) & 0x1F) if control else _ANSI.get(name, escape[0])


def removed(operator: str, arguments: list[str]) -> Callable[[str], str] | None:
    """`${x%pattern}` and `${x#pattern}`, shortest or longest."""
    if operator not in ("%", "%%", "#", "##") or len(arguments) != 1 or "\\" in arguments[0]:
        return None
    pattern = re.compile(translate(arguments[0]), re.S)

    def remove(text: str) -> str:
        places = range(len(text) + 1)
        if operator in ("%", "##"):
            places = places[::-1]
        if operator[0] == "%":
            return next((text[:place] for place in places if pattern.match(text[place:])), text)
        return next((text[place:] for place in places if pattern.match(text[:place])), text)

    return remove


def matches(value: str, pattern: str) -> bool | None:
    """Whether a pattern of bash holds for a whole text; None if it is of a kind that is not read."""
    if re.search(r"\[\[?[:.=]|[?*+@!]\(", pattern):
        return None
    return fnmatchcase(value, re.sub(r"\[\^(?=.)", "[!", pattern))


def literal_pattern(text: str) -> str:
    """A pattern that holds for this text only."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def brace_range(text: str) -> list[str] | None:
    """`{1..3}`."""
    ends = re.fullmatch(r"\{(\d{1,4})\.\.(\d{1,4})\}", text)
    if not ends or ends[1][:1] == "0" != ends[1]:
        return None
    first, last = int(ends[1]), int(ends[2])
    step = 1 if last >= first else -1
    return [str(number) for number in range(first, last + step, step)]


def uncertain(words: list[str]) -> bool:
    """Whether number or text of the words is not known."""
    return any(MARKS.search(word) for word in words)


def many(word: str) -> bool:
    """Whether a word may be any number of words."""
    return bool(GAPS.fullmatch(MAYBES.sub("", word)))


def loose(word: str) -> bool:
    """Whether a word may be none, or several."""
    return many(word) or MAYBE in word
