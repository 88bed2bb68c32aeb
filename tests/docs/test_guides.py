"""Commands, recipes, fields and metrics that the task-shaped guides name exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any, get_args

import pages
import pytest
import typer
import yaml
from pydantic import BaseModel
from translations import ROOT

from isotrain.cli.main import app
from isotrain.errors import RecipeError
from isotrain.recipe import library
from isotrain.recipe.load import load_recipe
from isotrain.recipe.schema import Recipe
from isotrain.tools.doctor.self_test.stages import STAGES

GUIDES = ("architecture", "choosing-an-algorithm", "first-day", "memory-and-speed", "writing-a-reward")
TEXTS = {name: (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in GUIDES}
FIELD = re.compile(
    r"((?:device|model|data|algorithm|rollout|reward|cluster|optimizer|trainer|observe)(?:\.\w+)+)"
)
METRIC = re.compile(
    r"(?:critic|actor|reward|rollout|training|timing_s|perf|response_length|episode|train|val)/[\w/<>]+"
)
RECIPE = re.compile(r"(?:gsm8k|tiny)-[\w+-]+")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `isotrain` command in the page's shell blocks."""
    for block in pages.code_blocks(text):
        if block.startswith("```bash\n"):
            for line in block.replace("\\\n", " ").splitlines()[1:-1]:
                words = shlex.split(line, comments=True)
                if words and words[0] == "isotrain":
                    yield words[1:]


ALL_COMMANDS = [words for text in TEXTS.values() for words in commands(text)]


def understand(words: list[str]) -> None:
    """Verb, options and, where there is a recipe, its changes; nothing is run."""
    command: Any = typer.main.get_command(app)
    name, rest = "isotrain", list(words)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(typer.Context(command, info_name=name), rest)
    parsed = command.make_context(name, rest).params
    if name in ("train", "plan", "preview") and parsed["recipe"] != "my.yaml":
        load_recipe(library.find(parsed["recipe"]), parsed["overrides"])


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_commands_are_understood(words: list[str]) -> None:
    understand(words)


def test_the_first_day_says_what_to_do_about_every_stage() -> None:
    rows = re.findall(r"^\| ([^|]+) \|[^|]+\|[^|]+\|$", TEXTS["first-day"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
    missing = {"two-machines"} | set(STAGES) - named
    assert missing == {"two-machines"} and "`two-machines`" in TEXTS["first-day"]


@pytest.mark.parametrize(
    "line", ["trian tiny-sft", "recipes tiny-sft --copy a", "train tiny-sft optimizer.l=1"]
)
def test_wrong_commands_are_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"trian|--copy|optimizer\.l"):
        understand(line.split())


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from models(each)


def is_field(path: str) -> bool:
    sections: list[type[BaseModel]] = [Recipe]
    found = False
    for part in path.split("."):
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        found = bool(fields)
        sections = [model for field in fields for model in models(field.annotation)]
    return found


@pytest.mark.parametrize("guide", GUIDES)
def test_fields_recipes_and_metrics_exist(guide: str) -> None:
    spans = pages.code_spans(TEXTS[guide])
    fields = {found[1] for span in spans if (found := FIELD.match(span)) and "/" not in span}
    assert fields and [path for path in sorted(fields) if not is_field(path)] == []
    named = {span for span in spans if RECIPE.fullmatch(span)}
    assert [name for name in named if not (ROOT / f"recipes/{name}.yaml").exists()] == []
    known = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    missing = [span for span in spans if METRIC.fullmatch(span) and not described(span, known)]
    assert missing == []


def described(metric: str, known: str) -> bool:
    """Whether the page of metrics has it, alone or as `/max` or `_std` behind another one."""
    if f"`{metric}`" in known:
        return True
    head, _, last = metric.rpartition("/")
    part = re.sub(r"^reward/[\w/]+/mean$", "reward/<part>/mean", metric)
    return f"`{part}`" in known or (f"`/{last}`" in known and f"`{head}/" in known)


SECTIONS = [
    block for text in TEXTS.values() for block in pages.code_blocks(text) if block.startswith("```yaml")
]


def load_section(block: str) -> None:
    """A YAML block, as changes to a recipe that has all sections."""
    changes = yaml.safe_load("".join(block.splitlines(keepends=True)[1:-1]))
    overrides = [f"{path}={json.dumps(value)}" for path, value in flat(changes)]
    assert overrides
    load_recipe(library.find("tiny-grpo"), overrides)


def test_sections_of_recipes_are_valid() -> None:
    assert len(SECTIONS) == sum(text.count("\n```yaml") for text in TEXTS.values()) > 0
    for block in SECTIONS:
        load_section(block)


def test_wrong_sections_are_noticed() -> None:
    with pytest.raises(RecipeError, match="rewards"):
        load_section("```yaml\nrewards:\n  gsm8k: {}\n```")


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_fields_that_do_not_exist_are_noticed() -> None:
    assert is_field("algorithm.critic.lr") and is_field("model.offload.weights") and is_field("reward.math")
    assert not is_field("algorithm.critics.lr") and not is_field("rollout.lr")
    assert not described("critic/nothing", "`critic/advantages/*`")
