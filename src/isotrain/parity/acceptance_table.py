"""The acceptance table of a pull request, as Markdown in English or in Chinese."""

from __future__ import annotations

from typing import Literal

from isotrain.parity.acceptance import Acceptance, Line, Status, Words
from isotrain.parity.run import Run

Language = Literal["en", "zh"]

_STATUS: dict[Status, Words] = {
    "holds": Words("holds", "达标"),
    "broken": Words("**broken**", "**不达标**"),
    "not in the logs": Words("not in the logs", "日志中没有"),
    "depends on the definition": Words("depends on the definition of the error", "取决于误差的定义"),
}
_TITLE, _RULE = Words("Acceptance", "验收"), Words("rule", "规则")
_REFERENCE, _CANDIDATE = Words("reference", "基准"), Words("candidate", "候选")
_HEAD = Words(
    "| requirement | metric | reference | candidate | measured | result | remark |",
    "| 要求 | 指标 | 基准 | 候选 | 实测 | 结论 | 说明 |",
)
_RESULT = {
    True: Words("**Accepted: every line of the rule holds.**", "**达标：规则的每一项都满足。**"),
    False: Words("**Not accepted.**", "**不达标。**"),
    None: Words(
        "**Open: nothing is broken, but the logs do not settle every line.**",
        "**未定：没有不达标项，但日志不足以判定每一项。**",
    ),
}


def markdown(found: Acceptance, language: Language) -> str:
    names = [_word(words, language) for words in (_REFERENCE, _CANDIDATE, _RULE)]
    lines = [
        f"### {_word(_TITLE, language)}: {found.rule}",
        "",
        f"- {names[0]}: {_run(found.reference, found.devices.reference, language)}",
        f"- {names[1]}: {_run(found.candidate, found.devices.candidate, language)}",
        f"- {names[2]}: {found.source}",
        "",
        _word(_HEAD, language),
        "|---|---|---|---|---|---|---|",
        *(_row(line, language) for line in found.lines),
        "",
        _summary(found, language),
    ]
    return "\n".join(lines) + "\n"


def _row(line: Line, language: Language) -> str:
    cells = (
        _word(line.requirement, language),
        _code(line.metric) if line.metric else "-",
        _number(line.reference),
        _number(line.candidate),
        _word(line.measured, language) or "-",
        _word(_STATUS[line.status], language),
        _text(_word(line.remark, language)),
    )
    return "| " + " | ".join(cells) + " |"


def _summary(found: Acceptance, language: Language) -> str:
    counts = {status: sum(line.status == status for line in found.lines) for status in _STATUS}
    said = [
        f"{count} {_word(_STATUS[status], language).strip('*')}" for status, count in counts.items() if count
    ]
    separator = ", " if language == "en" else "，"
    return f"{_word(_RESULT[found.accepted], language)} ({separator.join(said)})"


def _run(run: Run, device: str | None, language: Language) -> str:
    unknown = _word(Words("device not recorded", "未记录设备"), language)
    digest = next(iter(run.sha256.values()), "")[:12]
    parts = [_code(run.path.name), _text(run.format), _text(device) if device else unknown]
    return ", ".join([*parts, f"sha256 {digest}"] if digest else parts)


def _word(words: Words, language: Language) -> str:
    return words.en if language == "en" else words.zh


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _code(text: str) -> str:
    return "`" + _printable(text).replace("`", "'").replace("|", "\\|") + "`"


def _text(text: str) -> str:
    for mark in "\\*[]<>|":
        text = text.replace(mark, "\\" + mark)
    return _printable(text)


def _printable(text: str) -> str:
    """Names of a stranger's log go into a terminal and a web page."""
    return "".join(one if one.isprintable() else "?" for one in text)
