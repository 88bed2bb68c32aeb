"""A field that nothing reads is a promise that nobody keeps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from isotrain.recipe.fields import leaves
from isotrain.recipe.schema import Recipe
from isotrain.recipe.section import Section

SOURCE = Path(__file__).parents[2] / "src" / "isotrain"
# The schema's own rooms, and those that show or translate values but do not act on them.
NO_READERS = {"recipe", "cli", "imports"}


def reads(source: str) -> Iterator[tuple[str, str]]:
    """Each `section.field` that is read: configuration objects are named after their section."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Name):
                yield owner.id, node.attr
            elif isinstance(owner, ast.Attribute):
                yield owner.attr, node.attr
        elif isinstance(node, ast.FunctionDef):
            yield from reads_of_variables(node)


def reads_of_variables(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Each `name.field` of a name that is annotated with classes of sections, by their names."""
    annotations = {argument.arg: argument.annotation for argument in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            annotations[ast.unparse(node.target)] = node.annotation
    types = {
        name: re.findall(r"\w+Section", ast.unparse(annotation))
        for name, annotation in annotations.items()
        if annotation
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from ((name, node.attr) for name in types.get(node.value.id, ()))


def reads_of_methods(source: str) -> Iterator[tuple[str, str]]:
    """Each `self.field` and `self.section.field` in what a section computes; checks of values use none."""
    for section in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for method in (node for node in section.body if isinstance(node, ast.FunctionDef)):
            if any("validator" in ast.unparse(decorator) for decorator in method.decorator_list):
                continue
            for node in ast.walk(method):
                if not isinstance(node, ast.Attribute):
                    continue
                if ast.unparse(node.value) == "self":
                    yield section.name, node.attr
                elif isinstance(node.value, ast.Attribute) and ast.unparse(node.value.value) == "self":
                    yield node.value.attr, node.attr


def classes(section: str) -> set[str]:
    """Names of the classes that a section of this name has anywhere in the schema, and of their bases."""
    every, found = [Section], set()
    for model in every:
        every += model.__subclasses__()
        if info := model.model_fields.get(section):
            found |= set(re.findall(r"\w+Section", str(info.annotation)))
    return {base.__name__ for model in every if model.__name__ in found for base in model.__mro__}


def test_reads_sees_code_and_not_text() -> None:
    source = "# lora.rank\n'optimizer.eps'\nrecipe.data.train\nlr = f'{optimizer.lr}'\ndevice.type = 3\n"
    assert set(reads(source)) == {("recipe", "data"), ("data", "train"), ("optimizer", "lr")}
    typed = "def f(one: ASection | BSection, two: int):\n    return one.field, two.real\n"
    assert {("ASection", "field"), ("BSection", "field")} <= set(reads(typed))
    typed = "def f(self):\n    one: ASection = self.x.section\n    return one.field\n"
    assert ("ASection", "field") in set(reads(typed))
    computed = "class A:\n    @model_validator()\n    def f(self): self.x\n    def g(self): self.y\n"
    assert set(reads_of_methods(computed)) == {("A", "y")}
    assert "OnlineSection" in classes("algorithm")
    assert "FunctionSection" in classes("function") and "FunctionSection" not in classes("plugin")


def test_every_field_is_read() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in NO_READERS]
    found = {pair for path in files for pair in reads(path.read_text(encoding="utf-8"))}
    for path in (SOURCE / "recipe").rglob("*.py"):
        found |= set(reads_of_methods(path.read_text(encoding="utf-8")))
    unread = []
    # Variants of a section share fields.
    for path in dict.fromkeys(leaf.path for leaf in leaves(Recipe)):
        *sections, field = path.split(".")
        section = sections[-1] if sections else "recipe"
        if not found & {(name, field) for name in {section, *classes(section)}}:
            unread.append(path)
    assert not unread, f"no code reads these fields of the recipe: {', '.join(unread)}"


def options_of(source: str) -> Iterator[tuple[str, set[str]]]:
    """Each public function with arguments that only a keyword can give, and these."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.args.kwonlyargs:
            yield node.name, {argument.arg for argument in node.args.kwonlyargs}


def keywords_given(source: str) -> Iterator[tuple[str, str]]:
    """Each keyword that a call gives to a function, and each text that may be the name of one in `**`.

    A call through a table or an argument has no function's name: its keywords count for all.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else "*"
            yield from ((name, keyword.arg or "**") for keyword in node.keywords)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "**", node.value


def test_every_option_of_the_algorithms_is_given_by_a_caller() -> None:
    """An option that no caller gives always has its default, whatever the recipe says and the tests show."""
    files = list(SOURCE.rglob("*.py"))
    given = {pair for path in files for pair in keywords_given(path.read_text(encoding="utf-8"))}
    called = {name for name, _ in given}
    missing = []
    for path in (SOURCE / "algorithms").rglob("*.py"):
        for function, options in options_of(path.read_text(encoding="utf-8")):
            for option in sorted(options):
                by_name = (function, option) in given
                unpacked = ((function, "**") in given or function not in called) and ("**", option) in given
                through_a_table = function not in called and ("*", option) in given
                if not (by_name or unpacked or through_a_table):
                    missing.append(f"{function}({option}=)")
    assert not missing, f"no caller gives {', '.join(missing)}"


def test_an_option_of_another_function_does_not_count() -> None:
    source = "f(x, a=1)\ng(**o)\ntable[n](b=2)\no = {'c': 3}\n"
    assert {("f", "a"), ("g", "**"), ("*", "b"), ("**", "c")} <= set(keywords_given(source))
    assert dict(options_of("def f(x, *, a=1, b=2): ...\ndef _g(*, c): ...")) == {"f": {"a", "b"}}
