"""Parse YAML text to plain values, each with the line it came from."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import yaml

from isotrain.errors import RecipeError
from isotrain.language import Message, listed, tr

Path = tuple[str | int, ...]

# A recipe is a page of text. The limits stop a hostile file before the parser recurses or expands.
MAX_CHARACTERS = 256 * 1024
MAX_DEPTH = 16
MAX_DIGITS = 30

_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# The core rules of YAML 1.2. Those of 1.1, PyYAML's own, read `1e-4` as text, `on` as true, `1:30` as 90
# and `2026-01-01` as a date.
_RULES = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
)


def read_source(
    path: pathlib.Path,
    longest: int = MAX_CHARACTERS,
    opened: Callable[[pathlib.Path], BinaryIO] = lambda path: path.open("rb"),
) -> str:
    """The text of a recipe file of at most `longest` bytes; it may be a pipe of the shell."""
    try:
        with opened(path) as file:
            # One byte more than is allowed, so that a device file or a model file given by mistake ends here.
            data = file.read(longest + 1)
    except FileNotFoundError:
        text = tr("no such file; `isotrain recipes` lists recipes to start from")
        raise error_at(str(path), text) from None
    except OSError as error:
        raise error_at(str(path), tr("cannot be read: {error}", error=error.strerror)) from None
    if len(data) > longest:
        raise error_at(str(path), tr("longer than {size} KiB; is this a recipe?", size=longest // 1024))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        text = tr("not UTF-8 text; save the file as UTF-8")
        raise error_at(f"{path}:{line}:{column}", text) from None


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute


class RecipeDumper(yaml.SafeDumper):
    """Writes what `RecipeLoader` reads back: text that looks like a number there is quoted here."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute


for _name, _pattern, _first in _RULES:
    for _class in (RecipeLoader, RecipeDumper):
        _firsts = [*_first, ""] if _name == "null" else list(_first)
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})\Z"), _firsts)


@dataclass(frozen=True)
class SourcePlace:
    """Where a value was written: `file:line`, or an override."""

    order: tuple[int, int, int]
    label: str


@dataclass(frozen=True)
class Problem:
    place: SourcePlace
    text: str
    path: Path = ()

    @property
    def words(self) -> str:
        return listed((self.place.label, self.text), ": ")

    def __str__(self) -> str:
        return str(self.words)


@dataclass
class Document:
    """Plain values, where each was written, how each was spelled, and what is wrong with the writing."""

    source: str
    values: Any = None
    places: dict[Path, SourcePlace] = field(default_factory=dict)
    spelling: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    rejected: set[Path] = field(default_factory=set)

    def place(self, path: Path) -> SourcePlace:
        """The place of a path or, if it was not written, of the nearest thing around it that was."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return SourcePlace((0, 1 << 30, 0), self.source)

    def complain(self, path: Path, text: str) -> None:
        """Note one problem per path: later ones follow from the first."""
        if path in self.rejected:
            return
        self.rejected.add(path)
        self.problems.append(Problem(self.place(path), text, path))

    def forget(self, path: Path) -> None:
        """Drop what is known of a value that an override replaces, and of everything below it."""

        def stays(other: Path) -> bool:
            return other[: len(path)] != path

        self.places = {other: place for other, place in self.places.items() if stays(other)}
        self.spelling = {other: text for other, text in self.spelling.items() if stays(other)}
        self.problems = [problem for problem in self.problems if stays(problem.path)]
        self.rejected = {other for other in self.rejected if stays(other)}


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def named(path: Path) -> str:
    """A path as sentences call it: `'optimizer.lr'`, or `item 1 of 'optimizer.betas'`."""
    if path and isinstance(path[-1], int):
        return tr("item {number} of {name!r}", number=path[-1] + 1, name=dotted(path[:-1]))
    return repr(dotted(path))


def error_at(where: str, text: str) -> RecipeError:
    return RecipeError(listed((where, text), ": "))


def without_place(error: RecipeError) -> str:
    """Text of an `error_at` without its place."""
    (message,) = error.args
    assert isinstance(message, Message)
    return message.parts[-1]


def parse(text: str, source: str, override: int | None = None, root: Path = ()) -> Document:
    """Text to a document. `override` is the number of the override that `text` is the value of, if any.

    Raises `RecipeError` for text that is not YAML; problems of single values are left in `problems`.
    """
    document = Document(source)
    if len(text) > MAX_CHARACTERS:
        raise error_at(source, tr("longer than {size} KiB; is this a recipe?", size=MAX_CHARACTERS // 1024))
    reader = _NodeReader(document, override)
    try:
        reader.check_events(text)
        node = yaml.compose(text, Loader=RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        text = tr("not valid YAML: {problem}", problem=_in_our_words(error))
        raise error_at(reader.point(mark), text) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        where = source if override is not None else f"{source}:{line}:{column}"
        code = ord(error.character) if isinstance(error.character, str) else error.character
        text = tr("not valid YAML: the character U+{code:04X} is not allowed", code=code)
        raise error_at(where, text) from None
    if node is not None:
        document.values = reader.value(node, root)
    return document


def to_yaml(values: dict[str, Any]) -> str:
    """Plain values as YAML that `parse` reads back equal."""
    return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=1000)


def as_written(value: Any) -> Any:
    """Value that a recipe gets from the text `value` without quotes."""
    if not isinstance(value, str):
        return value
    try:
        document = parse(value, "")
    except RecipeError:
        return value
    return value if document.problems else document.values


class _NodeReader:
    """Fills one document from YAML nodes."""

    def __init__(self, document: Document, override: int | None) -> None:
        self.document = document
        self.override = override

    def point(self, mark: yaml.Mark | None) -> str:
        """`file:line:column`, or the override alone: its few characters need no column."""
        if self.override is not None or mark is None:
            return self.document.source
        return f"{self.document.source}:{mark.line + 1}:{mark.column + 1}"

    def place(self, node: yaml.Node) -> SourcePlace:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        if self.override is not None:
            return SourcePlace((1, self.override, column), self.document.source)
        return SourcePlace((0, line, column), f"{self.document.source}:{line}")

    def check_events(self, text: str) -> None:
        """Refuse what only attacks need (aliases, tags, deep nesting) before anything recursive runs."""
        depth = documents = 0
        for event in yaml.parse(text, Loader=RecipeLoader):
            where = self.point(event.start_mark)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise error_at(where, tr("a second document starts here; a recipe is one document"))
            elif isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                text = tr("nested more than {depth} levels deep; is this a recipe?", depth=MAX_DEPTH)
                raise error_at(where, text)
            if getattr(event, "anchor", None) is not None:
                text = tr(
                    "recipes have no anchors and aliases ('&name', '*name'); write the value out, or put "
                    "text that starts with '*' or '&' in quotes"
                )
                raise error_at(where, text)
            if getattr(event, "tag", None) is not None:
                text = tr(
                    "recipes have no tags ('!name'); leave it out, or put text that starts with '!' in quotes"
                )
                raise error_at(where, text)

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.document.places.setdefault(path, self.place(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        self.document.spelling[path] = node.value
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                text = tr("a key is a list or a section; expected a name")
                self.document.problems.append(Problem(place, text))
                continue
            key = key_node.value
            here = (*path, key)
            if key in first:
                text = tr("key {key!r} is given twice; keep one", key=dotted(here))
                if self.override is None:
                    text = tr(
                        "key {key!r} is given twice, first on line {line}; keep one",
                        key=dotted(here),
                        line=first[key].start_mark.line + 1,
                    )
                self.document.problems.append(Problem(place, text))
                continue
            first[key] = key_node
            self.document.places[here] = place
            values[key] = self.value(value_node, here)
        return values

    def scalar(self, node: yaml.ScalarNode, path: Path) -> str | int | float | bool | None:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "bool":
            return bool(text.lower() == "true")
        if kind == "int" and len(text) <= MAX_DIGITS:
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind in ("int", "float"):
            plain = text.lower().replace(".inf", "inf").replace(".nan", "nan")
            number = float(plain) if kind == "float" else math.inf
            if not math.isfinite(number):
                shown = text if len(text) <= MAX_DIGITS else f"{text[:MAX_DIGITS]}..."
                wrong = tr(
                    "{name} is {found}; expected an ordinary finite number", name=named(path), found=shown
                )
                self.document.complain(path, wrong)
            return number
        if any("\ud800" <= character <= "\udfff" for character in text):
            wrong = tr("{name} contains a lone surrogate: remove this half character", name=named(path))
            self.document.complain(path, wrong)
        return str(text)


def _in_our_words(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or tr("it cannot be read")
    if "'\\t'" in problem:
        return tr("a tab where YAML needs spaces; indent with spaces")
    if "mapping values are not allowed" in problem:
        return tr("unexpected ':'; put text that contains ': ' in quotes, and check the indentation")
    if "could not find expected ':'" in problem:
        return tr("a key without ':'; write 'key: value'")
    if "cannot start any token" in problem:
        return tr("{problem}; put text that starts with it in quotes", problem=problem)
    if "<stream end>" in problem or "end of stream" in problem:
        if error.context_mark is None:
            return tr("a bracket or quote is not closed")
        line = error.context_mark.line + 1
        return tr("a bracket or quote, opened on line {line}, is not closed", line=line)
    if any(word in (error.context or "") for word in ("an alias", "an anchor", "a tag", "a directive")):
        return tr("put text that starts with '*', '&', '!' or '%' in quotes")
    if "but found" in problem and error.context:
        return tr(
            "{context}: {problem}; check the indentation and the brackets",
            context=error.context,
            problem=problem,
        )
    return problem
