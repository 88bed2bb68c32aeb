"""Reads a source: finds out what it is, and which of its commands trains."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from isotrain.imports import hydra, log
from isotrain.imports.shell import Command, read_script
from isotrain.imports.source import LARGEST, ImportSourceError, Setting, Source, Unknown, flatten

_MODULES = {
    "verl": re.compile(
        r"(?:verl|recipe|dapo)(?:\.\w+)*\.(?:main_(?!generation|eval)\w+|\w*sft_trainer\w*|\w*fully_async\w*main)"
    ),
    "openrlhf": re.compile(r"openrlhf\.cli\.train_\w+"),
}
_FILES = {
    "verl": re.compile(r"(?:.*/)?(?:main_(?:ppo|dapo)\w*|\w*sft_trainer\w*|fully_async_main)\.py"),
    "openrlhf": re.compile(r"(?:.*/)?train_(?:ppo_ray|ppo|sft|dpo|rm|kto|prm|kd)\.py"),
}
_COUNTS = ("nproc_per_node", "nproc-per-node", "nnodes", "num_gpus", "num_nodes")


def read_bytes(name: str) -> bytes:
    """The source: a file, or standard input for `-`."""
    if name == "-":
        data = sys.stdin.buffer.read(LARGEST + 1)
    else:
        try:
            with Path(name).open("rb") as file:
                data = file.read(LARGEST + 1)
        except OSError as error:
            raise ImportSourceError(f"{name}: cannot be read: {error.strerror}") from None
    if len(data) > LARGEST:
        raise ImportSourceError(f"{name}: longer than {LARGEST // 2**20} MiB; give the part with the command")
    return data


def read_source(data: bytes, framework: str) -> Source:
    """What the text of a source says about a training with `framework`."""
    text = data.decode("utf-8-sig", "replace")
    if "\x00" in text:
        raise ImportSourceError("this is not text; give a script, a command, a configuration or a log")
    if framework == "verl" and (found := _from_log(text)):
        return found
    if framework == "verl" and _is_config(text):
        source = Source("config")
        hydra.read_config(source, text)
        return source
    if framework == "verl" and _is_overrides(text):
        source = Source("overrides")
        lines = enumerate(text.splitlines(), start=1)
        hydra.read_overrides(
            source, [(line.strip().removeprefix("- "), number) for number, line in lines if line.strip()]
        )
        return source
    return _from_script(text, framework)


def _from_log(text: str) -> Source | None:
    """A log has a printed configuration; without one, the command that `set -x` printed."""
    if "{'" not in text and "+ " not in text:
        return None
    lines = log.plain_lines(text)
    printed = log.printed_config(lines)
    traced = log.traced_command(lines)
    if printed is None and traced is None:
        return None
    if printed is None:
        assert traced is not None
        source = _from_script(traced[0], "verl")
        source.settings = {key: Setting(item.value, traced[1]) for key, item in source.settings.items()}
    else:
        source = Source("log")
        for key, value in flatten(printed[0]).items():
            source.set(key, value, printed[1])
    source.kind, source.total_steps = "log", log.total_steps(lines)
    return source


def _is_config(text: str) -> bool:
    sections = set(re.findall(r"^(\w+):\s*$", text, re.M))
    return len(sections & {"actor_rollout_ref", "algorithm", "trainer", "data", "model", "optim"}) >= 2


def _is_overrides(text: str) -> bool:
    """One override per line, as in `.hydra/overrides.yaml`; few keys, such as `model_engine`, have no dot."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    pattern = re.compile(r"(?:- )?(?:\+{1,2}|~)?[a-z_]\w*(\.\w+)*=[^\\]*")
    found = [pattern.fullmatch(line) for line in lines]
    return len(lines) > 1 and all(found) and any(match and match[1] for match in found)


def _from_script(text: str, framework: str) -> Source:
    shell = read_script(text)
    trainings = [(command, place) for command in shell.commands if (place := _module(command, framework))]
    source = Source("script", remarks=list(shell.remarks))
    if not trainings:
        bare = _bare(shell.commands, framework)
        if bare is None:
            other = "openrlhf" if framework == "verl" else "verl"
            hint = f"; it is one of {other}" if any(_module(c, other) for c in shell.commands) else ""
            example = "verl.trainer.main_ppo" if framework == "verl" else "openrlhf.cli.train_sft"
            raise ImportSourceError(
                f"no command of {framework} was found{hint}: expected a script with a line such as "
                f"`python3 -m {example} ...`"
            )
        trainings = [(bare, 0)]
    command, place = trainings[0]
    if len(trainings) > 1:
        where = ", ".join(str(other.lines[0]) for other, _ in trainings)
        source.remarks.append(f"there are {len(trainings)} trainings (lines {where}); this is the first")
    if not command.certain:
        source.remarks.append(
            f"line {command.lines[0]}: the training runs under a condition that is not known"
        )
    words = list(zip(command.words, command.lines, strict=True))
    if place:
        source.program = str(command.words[place]).removesuffix(".py").replace("/", ".")
        _launcher(source, words[:place])
        words = words[place + 1 :]
    _arguments(source, words, framework)
    return source


def _arguments(source: Source, words: list[tuple[str | Unknown, int]], framework: str) -> None:
    if framework == "verl":
        hydra.read_overrides(source, words)
    else:
        read_flags(source, words)


def _module(command: Command, framework: str) -> int:
    """Place of the word that names the trainer; 0 if the command is none."""
    words = [word if isinstance(word, str) else "" for word in command.words]
    for place, word in enumerate(words[1:], start=1):
        after_m = words[place - 1] in ("-m", "--module")
        if (after_m and _MODULES[framework].fullmatch(word)) or _FILES[framework].fullmatch(word):
            return place
    return 0


def _bare(commands: Iterable[Command], framework: str) -> Command | None:
    """Commands that are arguments only, such as overrides pasted from a script, as one."""
    pattern = re.compile(r"\+{0,2}[a-z_]+\.[\w.]+=" if framework == "verl" else "--")
    found = [
        command
        for command in commands
        if pattern.match(first.text if isinstance(first := command.words[0], Unknown) else first)
    ]
    if not found:
        return None
    words = tuple(word for command in found for word in command.words)
    return Command(words, tuple(line for command in found for line in command.lines), found[0].certain)


def _launcher(source: Source, words: list[tuple[str | Unknown, int]]) -> None:
    """Numbers of machines and devices that torchrun or deepspeed got."""
    for place, (word, line) in enumerate(words):
        text = word.text if isinstance(word, Unknown) else word
        name, equals, value = text.lstrip("-").partition("=")
        if text.startswith("--") and name in _COUNTS:
            following = words[place + 1][0] if place + 1 < len(words) else ""
            found = (word if isinstance(word, Unknown) else value) if equals else following
            source.launcher[name.replace("-", "_")] = Setting(
                found if isinstance(found, Unknown) else hydra.scalar(found), line
            )
    first = words[0][0] if words else ""
    if isinstance(first, str) and first:
        source.launcher["name"] = Setting(first.rpartition("/")[2], words[0][1])


def read_flags(source: Source, words: Iterable[tuple[str | Unknown, int]]) -> None:
    """`--flag`, `--name value`, `--name=value` and `--name value value` into `source`."""
    name, values, start = "", [], 0
    for word, line in [*words, ("--", 0)]:
        text = word.text if isinstance(word, Unknown) else word
        if not text.startswith("--"):
            if name:
                values.append(word if isinstance(word, Unknown) else hydra.scalar(word))
            elif text.strip():
                source.remarks.append(f"line {line}: {hydra.shown(text)} is no flag; it was left out")
            continue
        if name:
            source.set(name, True if not values else values[0] if len(values) == 1 else values, start)
        given, equals, value = text[2:].partition("=")
        name, start = given, line
        values = [] if not equals else [word if isinstance(word, Unknown) else hydra.scalar(value)]
