"""The catalogue has exactly the texts of the source, and `said` speaks the language that was chosen."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from isotrain.errors import DataError, RecipeError
from isotrain.language import (
    Language,
    capital,
    chosen,
    language_of,
    listed,
    padded,
    said,
    tr,
    using,
    words_of,
)
from isotrain.tools.doctor.rules import rules

SOURCE = Path(__file__).parents[1] / "src" / "isotrain"
CATALOGUES = sorted((SOURCE / "translations" / "zh").glob("*.json"))
# Its texts are data: they are read from rules.yaml below.
DATA = SOURCE / "tools" / "doctor" / "rules.py"


def given_literals(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Line and text of what `tr` is given, and of what `listed` puts between; None if it is no literal."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "tr":
            yield node.lineno, _literal(node.args[0])
        elif node.func.id == "listed":
            yield node.lineno, _literal(node.args[1]) if len(node.args) > 1 else ", "


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def texts_of_the_source() -> dict[str, str]:
    """Every text that can be said, and where it is."""
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if path in (SOURCE / "language.py", DATA):
            continue
        for line, text in given_literals(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(SOURCE)}:{line}"
            assert text is not None, f"{where}: tr and listed take literals, which the catalogue can have"
            if text.strip() and "\n" not in text:  # else it is layout
                found.setdefault(text, where)
    for rule in rules():
        found |= {rule.symptom: f"rules.yaml, {rule.id}", rule.fix: f"rules.yaml, {rule.id}"}
    return found


def catalogue() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in CATALOGUES:
        texts = json.loads(path.read_text(encoding="utf-8"))
        assert not found.keys() & texts, (
            f"{path.name}: {sorted(found.keys() & texts)} are in another file too"
        )
        found |= texts
    return found


def placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def test_the_catalogue_has_every_text_and_no_other() -> None:
    texts, known = texts_of_the_source(), catalogue()
    assert len(texts) > 200
    missing = [f"{where}: {text}" for text, where in texts.items() if text not in known]
    assert not missing, "no Chinese for:\n" + "\n".join(missing)
    assert not known.keys() - texts.keys(), "not said anywhere"


def test_translations_have_the_placeholders_of_their_texts() -> None:
    for english, chinese in catalogue().items():
        assert placeholders(english) == placeholders(chinese), english
        assert chinese.strip(), english


def test_literals_are_found_in_calls_only() -> None:
    tree = ast.parse("tr('a' 'b', x=1)\ntr(name)\nlisted(x)\nlisted(x, '; ')\nother('c')\n'd'")
    assert [text for _, text in given_literals(tree)] == ["ab", None, ", ", "; "]


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh"}, "zh"),
        ({"LANG": "zha_XX.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
        ({"LC_CTYPE": "zh_CN.UTF-8"}, "en"),
    ],
)
def test_the_language_of_a_locale(variables: dict[str, str], language: str) -> None:
    assert language_of(variables) is Language(language)


def test_english_is_what_a_message_is() -> None:
    message = tr("install CANN {cann}", cann="9.1.0")
    with using(Language.zh):
        assert message == "install CANN 9.1.0" and f"{message}!" == "install CANN 9.1.0!"
        assert json.dumps({"fix": message}) == '{"fix": "install CANN 9.1.0"}'
        assert str(DataError(message)) == "install CANN 9.1.0"
        assert said(message) == "安装 CANN 9.1.0" == words_of(DataError(message))
    assert said(message) == "install CANN 9.1.0" == words_of(DataError(message))


def test_texts_in_texts() -> None:
    inner = tr("write device.ranks={ranks}", ranks=2)
    outer = tr(
        "add machines with {count} more devices to the Ray cluster, or {remedy}", count=1, remedy=inner
    )
    with using(Language.zh):
        assert said(outer) == "向 Ray 集群加入还有 1 个设备的机器，或者写 device.ranks=2"
        assert said(listed([inner, tr("install the driver")], "; ")) == "写 device.ranks=2；安装驱动"
        assert said(capital(tr("install the driver"))) == "安装驱动"
    assert outer == "add machines with 1 more devices to the Ray cluster, or write device.ranks=2"
    assert listed([inner, "b"], "; ") == "write device.ranks=2; b"
    assert capital(tr("install the driver")) == "Install the driver" == capital("install the driver")


def test_chinese_characters_have_no_space_between_them() -> None:
    item, number = tr("item {number} of {name!r}", number=2, name="data.train"), tr("a whole number")
    with using(Language.zh):
        one = tr("{name} is {found}; expected {takes}", name=item, found="3", takes=number)
        assert said(one) == "'data.train' 的第 2 项的值是 3；应为整数"
        other = tr(
            "{name} is {found}; expected {takes}", name="'a'", found=tr("empty"), takes=tr("true or false")
        )
        assert said(other) == "'a' 的值是空；应为 true 或 false"
        assert said(tr("{text} {form}", text=tr("text"), form=tr("matching {pattern}", pattern="^中$"))) == (
            "匹配 ^中$ 的文本"
        )
        assert (
            said(tr("{names} and {last}", names="中 文", last="b")) == "中 文和 b"
        )  # a user's own space stays


def test_braces_in_templates() -> None:
    with using(Language.zh):
        assert said(tr("nothing after '='; write '{key}={{}}' for all defaults", key="a")) == (
            "'=' 后面没有内容；全部使用默认值请写 'a={}'"
        )


def test_what_the_catalogue_does_not_have_is_said_in_english() -> None:
    with using(Language.zh):
        assert said(tr("nobody says {this}", this=tr("none"))) == "nobody says none"
        assert said("none") == "none"  # a name of a user's, not a text of ours
        assert words_of(DataError("two", "words")) == "('two', 'words')"


def test_messages_survive_processes_and_copies() -> None:
    message = tr("install CANN {cann}", cann="9.1.0")
    for other in (pickle.loads(pickle.dumps(DataError(message))).args[0], copy.deepcopy(message)):
        with using(Language.zh):
            assert other == message and said(other) == "安装 CANN 9.1.0"


def test_passwords_are_hidden_in_every_language() -> None:
    error = RecipeError(listed([tr("error: {message}", message="s3://me:secret@host/x"), "://a:b@c"], "; "))
    assert str(error) == "error: s3://***@host/x; ://***@c"
    with using(Language.zh):
        assert words_of(error) == "错误：s3://***@host/x；://***@c"


def test_the_choice_ends_with_its_block() -> None:
    with using(Language.zh), using(Language.en):
        assert chosen() is Language.en
    assert chosen() is Language.en


def test_columns_of_wide_characters() -> None:
    assert (
        padded("same", 6) == "same  "
        and padded("相同", 6) == "相同  "
        and padded("不同（？）", 4) == "不同（？）"
    )
