"""Reads a source: finds out what it is, and which of its commands trains."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.tools.imports import hydra
from isotrain.tools.imports.shell import ShellCommand, read_script
from isotrain.tools.imports.source import (
    LARGEST,
    ImportSource,
    ImportSourceError,
    KeySetting,
    Stray,
    Unknown,
    as_text,
    flatten,
)
from isotrain.tools.imports.trl_script import read_python

_MODULES = {
    "verl": re.compile(
        r"(?:verl|recipe|dapo)(?:\.\w+)*\.(?:main_(?!generation|eval)\w+|\w*sft_trainer\w*|\w*fully_async\w*main)"
    ),
    "openrlhf": re.compile(r"openrlhf\.cli\.train_\w+"),
    "trl": re.compile(r"trl\.scripts\.(?:sft|dpo|kto|reward|grpo)"),
}
_FILES = {
    "verl": re.compile(r"(?:.*/)?(?:main_(?:ppo|dapo)\w*|\w*sft_trainer\w*|fully_async_main)\.py"),
    "openrlhf": re.compile(r"(?:.*/)?train_(?:ppo_ray|ppo|sft|dpo|rm|kto|prm|kd)\.py"),
    "trl": re.compile(r"(?:.*/)?(?:sft|dpo|kto|reward|grpo)(?:_\w+)?\.py"),
}
_TRL_NAMES = ("sft", "dpo", "kto", "reward", "grpo")
# Flags of OpenRLHF that take no value: what follows one is no value of it.
_SWITCH = re.compile(
    r"_enable$|_reentrant$|offload$|colocate|packing_samples$|^bf16$|^flash_attn$|apply_chat_template$|multiturn$"
    r"|^gradient_checkpointing$|(^|\.)(use_(?!wandb|tensorboard|swanlab)|enable_|disable_|no_|save_|freeze_)\w+$"
    r"|enforce_eager$|sync_with_ray$|load_in_4bit$|overlap_comm$|normalize_reward$|load_checkpoint$|deepcompile$"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORKER = re.compile(r"^\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) ?|^\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ?")
_TRACE = re.compile(r"^\++ ((?:\S+ )?(?:python\S*|torchrun|deepspeed|ray) .*)$")
_STEPS = re.compile(r"Total training steps: (\d{1,9})\b")
_START = re.compile(r"^\{'\w+': ?\{")
_STRING = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
_BRACKETS = re.compile(r"[{}\[\]()]")
LONGEST_CONFIG = 512 * 1024
_MOST_DEPTH = 30
_LONGEST_NAME = 300
# What may stand before the program: others may change what is trained.
_LAUNCHERS = re.compile(
    r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed|uv|ray|env|nohup|time|numactl|accelerate)|run|job|submit|launch"
)
_SWITCHES = {
    "-u", "-O", "-B", "-I", "-s", "-E", "-P", "--", "-m", "--module", "--standalone", "--frozen",
    "--all-packages", "--multi_gpu", "--use_fsdp", "--use_deepspeed",
    "--no-sync", "--active", "--no-wait",
}  # fmt: skip
_OPTIONS = re.compile(
    r"-[XW]|--(?:nproc|nnodes|node|config_file|machine|main|master|rdzv|num|local|max|log|hostfile|include|exclude|launcher|extra|with|group"
    r"|package|project|python|address|runtime|working|submission|entrypoint)(?:[-_]\w+)*"
)
_ENGINE_VARIABLES = re.compile(r"(?:VLLM|SGLANG|VERL|HYDRA)_\w+")
# They change speed, places and logs.
_NO_EFFECT = re.compile(
    r"HYDRA_FULL_ERROR|VERL_\w*LOGG\w+|VERL_USE_MODELSCOPE|VLLM_(?:USE_V1|VERSION|ATTENTION_BACKEND|HOST_IP|PORT"
    r"|ALLREDUCE_USE_SYMM_MEM|A\w+_ENABLE_\w+|LOGGING_\w+|WORKER_MULTIPROC_METHOD|CACHE_ROOT|USE_MODELSCOPE"
    r"|RPC_\w+|\w+_TIMEOUT\w*|NO_USAGE_STATS|DISABLE_COMPILE_CACHE|TORCH_PROFILER_DIR)"
    r"|SGLANG_(?:\w+_TIMEOUT\w*|LOG\w*|USE_MODELSCOPE)"
)
_COUNTS = ("nproc_per_node", "nproc-per-node", "nnodes", "num_gpus", "num_nodes", "num_processes")
_PYTHON = re.compile(r"^\s*(?:from|import) [\w.]+|(?:SFT|DPO|KTO|Reward|GRPO)Trainer\s*\(", re.M)
_TRL_COMMAND = re.compile(
    r"(?:^|[\s/])(?:trl (?:sft|dpo|kto|reward|grpo)\b"
    r"|(?:accelerate|torchrun|python[\d.]*) [^#\n]*(?:\\\n|\.py|-m ))"
)


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


def read_source(data: bytes, framework: str, given: dict[str, str] | None = None) -> ImportSource:
    """The keys that the text of a source gives; `given` are the variables of `--set`."""
    text = data.decode("utf-8-sig", "replace")
    if "\x00" in text:
        raise ImportSourceError("this is not text; give a script, a command, a configuration or a log")
    if framework == "trl":
        return _trl_source(text, dict(given or {}))
    source = _without_variables(text) if framework == "verl" else None
    if source is None:
        return _from_script(text, framework, given or {})
    if given:
        raise ImportSourceError(f"--set is for scripts; this is a {source.kind}, which has no variables")
    return source


def _trl_source(text: str, given: dict[str, str]) -> ImportSource:
    """A Python script, a YAML file or a command; `--set` also answers what these leave open."""
    answers = {name: given.pop(name) for name in ("trainer", "num_processes") if name in given}
    if _PYTHON.search(text):
        source = read_python(text)
    elif _TRL_COMMAND.search(text) or not re.search(r"^\w+:(?: |$)", text, re.M):
        source = _from_script(text, "trl", given)
        given = {}
    else:
        source = ImportSource("config")
        hydra.read_config(source, text)
    if given:
        raise ImportSourceError(f"--set is for scripts; this is a {source.kind}, which has no variables")
    source.program = answers.pop("trainer", source.program)
    for name, value in answers.items():
        source.expected += 1
        source.enter(f"--set {name}")
        source.set(name, hydra.scalar(value))
    return source


def _without_variables(text: str) -> ImportSource | None:
    """A log, a configuration or overrides of verl."""
    if source := log_source(text):
        return source
    if _is_config(text):
        source = ImportSource("config")
        hydra.read_config(source, text)
        return source
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not _is_overrides([line for _, line in lines]):
        return None
    source = ImportSource("overrides", expected=len(lines))
    hydra.read_overrides(source, [(_unquoted(line.removeprefix("- ")), number, "") for number, line in lines])
    return source


def _unquoted(line: str) -> str:
    """Quotes of YAML around a whole override."""
    quoted = len(line) > 1 and line[0] == line[-1] and line[0] in "'\""
    return line[1:-1].replace("''", "'") if quoted and line[0] == "'" else line[1:-1] if quoted else line


def log_source(text: str) -> ImportSource | None:
    """A log has a printed configuration; without one, the command that `set -x` printed."""
    if "{'" not in text and "+ " not in text:
        return None
    lines = plain_lines(text)
    printed = printed_config(lines)
    traced = traced_command(lines)
    if printed is None and traced is None:
        return None
    if printed is None:
        assert traced is not None
        source = _from_script(traced[0], "verl", {})
        source.settings = {key: replace(item, line=traced[1]) for key, item in source.settings.items()}
    else:
        source = ImportSource("log", expected=hydra.count_leaves(printed[0]))
        for key, value in flatten(printed[0]).items():
            source.enter(key, printed[1])
            source.set(key, value, printed[1])
    source.kind, source.total_steps = "log", _total_steps(lines)
    return source


def plain_lines(text: str) -> list[str]:
    """Lines without colours and without the name of the Ray worker that printed them."""
    return [_WORKER.sub("", _COLOUR.sub("", line)) for line in text.splitlines()]


def printed_config(lines: list[str]) -> tuple[dict[str, Any], int] | None:
    """The first printed configuration and its line, counted from 1.

    Each line is read once: brackets are counted line by line, and only a text whose brackets are closed is
    parsed. `pprint` indents all lines but the first: a second beginning means that the first was broken off.
    """
    taken: list[str] = []
    start = length = depth = 0
    for number, line in enumerate(lines, start=1):
        if _START.match(line):
            taken, start, length, depth = [], number, 0, 0
        elif not taken:
            continue
        taken.append(line)
        length += len(line) + 1
        if length > LONGEST_CONFIG:
            raise ImportSourceError(f"line {start}: the printed configuration has no end")
        for character in _BRACKETS.findall(_STRING.sub("", line)):
            depth += 1 if character in "{[(" else -1
            if depth > _MOST_DEPTH or depth < 0:
                break
        if depth > _MOST_DEPTH or depth <= 0:
            values = _parsed("\n".join(taken)) if depth == 0 else None
            if values is not None:
                return values, start
            taken = []
    return None


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return values if isinstance(values, dict) and all(isinstance(key, str) for key in values) else None


def traced_command(lines: list[str]) -> tuple[str, int] | None:
    """The command that `set -x` printed, and its line."""
    for number, line in enumerate(lines, start=1):
        command = _TRACE.match(line)
        if command and ("verl." in line or "openrlhf." in line):
            return command[1], number
    return None


def _total_steps(lines: list[str]) -> int | None:
    for line in lines:
        if steps := _STEPS.search(line):
            return int(steps[1])
    return None


def _is_config(text: str) -> bool:
    sections = set(re.findall(r"^(\w+):[ \t]*$", text, re.M))
    return len(sections & {"actor_rollout_ref", "algorithm", "trainer", "data", "model", "optim"}) >= 2


def _is_overrides(lines: list[str]) -> bool:
    """One override per line, as in `.hydra/overrides.yaml`; few keys, such as `model_engine`, have no dot."""
    pattern = re.compile(r"(?:- )?['\"]?(?:\+{1,2}|~)?[a-z_]\w*(\.\w+)*(?:=[^\\]*)?")
    matches = [pattern.fullmatch(line) for line in lines]
    assigns = all("=" in line or line.removeprefix("- ").startswith("~") for line in lines)
    return len(lines) > 1 and assigns and all(matches) and any(match and match[1] for match in matches)


def _from_script(text: str, framework: str, given: dict[str, str]) -> ImportSource:
    shell = read_script(text, given)
    if unused := sorted(given.keys() - shell.pins_used):
        raise ImportSourceError(f"--set {unused[0]}: the script does not use ${unused[0]} before its end")
    trainings = [(command, place) for command in shell.commands if (place := _module(command, framework))]
    source = ImportSource("script", remarks=list(shell.notes))
    if not trainings:
        bare = _bare(shell.commands, framework)
        if bare is None:
            raise ImportSourceError(_no_command(shell.commands, framework))
        trainings = [(bare, 0)]
    command, place = trainings[0]
    source.conditions = [shell.conditions[number] for number in sorted(command.conditions)]
    source.expected = len(command.words)
    words = list(zip(command.words, command.lines, command.when, strict=True))
    if place:
        source.program = str(command.words[place]).removesuffix(".py").replace("/", ".")
        _launcher(source, words[: place + 1])
        words = words[place + 1 :]
    if framework == "verl":
        hydra.read_overrides(source, words)
    else:
        read_flags(source, words)
    line = command.lines[0]
    if len(trainings) > 1:
        where = ", ".join(str(other.lines[0]) for other, _ in trainings)
        why = f"there are {len(trainings)} trainings (lines {where}); this is the first: keep one of them"
        source.strays.append(Stray("the script", why, line))
    for name in sorted(command.environment):
        if _ENGINE_VARIABLES.fullmatch(name) and not _NO_EFFECT.fullmatch(name):
            source.strays.append(Stray(name, "a variable whose effect on the training is not known", line))
    if command.under:
        source.strays.append(Stray("the script", f"the training runs only {command.under}", line))
    if shell.broken_lines:
        why = f"line {shell.broken_lines[0]} is not understood, so what it sets is not known"
        source.strays.append(Stray("the script", why, shell.broken_lines[0]))
    return source


def _no_command(commands: Iterable[ShellCommand], framework: str) -> str:
    others = [name for name in _MODULES if name != framework and any(_module(c, name) for c in commands)]
    hint = f"; it is one of {others[0]}" if others else ""
    examples = {
        "verl": "verl.trainer.main_ppo",
        "openrlhf": "openrlhf.cli.train_sft",
        "trl": "trl.scripts.sft",
    }
    example = examples[framework]
    return (
        f"no command of {framework} was found{hint}: expected a script with a line such as "
        f"`python3 -m {example} ...`"
    )


def _module(command: ShellCommand, framework: str) -> int:
    """Place of the word that names the trainer; 0 if the command is none."""
    # A longer word is no program, and would take the expressions quadratic time.
    words = [word if isinstance(word, str) and len(word) <= _LONGEST_NAME else "" for word in command.words]
    for place, word in enumerate(words[1:], start=1):
        after_m = words[place - 1] in ("-m", "--module")
        if framework == "trl" and words[place - 1].rpartition("/")[2] == "trl" and word in _TRL_NAMES:
            return place
        if (after_m and _MODULES[framework].fullmatch(word)) or _FILES[framework].fullmatch(word):
            return place
    return 0


def _bare(commands: Iterable[ShellCommand], framework: str) -> ShellCommand | None:
    """Commands that are arguments only, such as overrides pasted from a script, as one."""
    pattern = re.compile(r"\+{0,2}[a-z_]+\.[\w.]+=" if framework == "verl" else "--")
    parts = [command for command in commands if pattern.match(as_text(command.words[0]))]
    if not parts:
        return None
    return ShellCommand(
        tuple(word for part in parts for word in part.words),
        tuple(line for part in parts for line in part.lines),
        tuple(when for part in parts for when in part.when),
        parts[0].under,
        frozenset[int]().union(*(part.conditions for part in parts)),
        frozenset[str]().union(*(part.environment for part in parts)),
    )


def _launcher(source: ImportSource, words: list[tuple[str | Unknown, int, str]]) -> None:
    """The words up to the name of the program; torchrun and deepspeed get numbers of machines and devices."""
    takes_value = False
    for place, (word, line, _) in enumerate(words):
        text, known = as_text(word), word.head if isinstance(word, Unknown) else word
        name, equals, value = known.lstrip("-").partition("=")
        is_option = known.startswith("-") and (equals or not isinstance(word, Unknown))
        is_value, takes_value = takes_value, False
        option = known.partition("=")[0]
        if not is_value and _OPTIONS.fullmatch(option):
            takes_value = not equals
        variable = re.fullmatch(r"[A-Za-z_]\w*", option) if equals else None
        expected = (
            is_value
            or option in _SWITCHES
            or bool(_OPTIONS.fullmatch(option))
            or bool(_LAUNCHERS.fullmatch(known))
            or place == len(words) - 1
            or (variable is not None and not _ENGINE_VARIABLES.match(option))
            or bool(_NO_EFFECT.fullmatch(option))
        )
        program = place in (0, len(words) - 1) or known in ("-m", "--module")
        source.enter(text, line, "mapped" if program else "no effect")
        if known.startswith("--") and name in _COUNTS and is_option:
            following = words[place + 1][0] if place + 1 < len(words) else ""
            number = replace(word, text=text.partition("=")[2]) if isinstance(word, Unknown) else value
            number = number if equals else following
            source.launcher[name.replace("-", "_")] = KeySetting(
                number if isinstance(number, Unknown) else hydra.scalar(number), line
            )
            source.entries[-1].outcome = "unknown" if isinstance(number, Unknown) else "mapped"
        elif isinstance(word, Unknown) and not is_option and not is_value:
            source.stray(hydra.shown(text), f"{word.why}; it begins the command", line)
        elif not isinstance(word, Unknown) and not expected:
            source.stray(hydra.shown(text), "what it changes before the program is not known", line)
    first = words[0][0] if words else ""
    if isinstance(first, str) and first:
        source.launcher["name"] = KeySetting(first.rpartition("/")[2], words[0][1])


def read_flags(source: ImportSource, words: Iterable[tuple[str | Unknown, int, str]]) -> None:
    """`--flag`, `--name value`, `--name=value` and `--name value value` into `source`."""
    name, start, condition = "", 0, ""
    values: list[Any] = []
    numbers: list[int] = []

    def end() -> None:
        if name:
            value = True if not values else values[0] if len(values) == 1 else values
            unknown = next((part for part in values if isinstance(part, Unknown)), value)
            source.set(name, unknown, start, condition, numbers)

    for word, line, when in words:
        text, known = as_text(word), word.head if isinstance(word, Unknown) else word
        is_flag = known.startswith("--")
        if is_flag:
            end()
            name, values, numbers = "", [], []
        source.enter(text, line)
        alone = not name or bool(values) or bool(_SWITCH.search(name))
        given, equals, value = known[2:].partition("=")
        part = (
            replace(word, text=text.partition("=")[2]) if isinstance(word, Unknown) else hydra.scalar(value)
        )
        if isinstance(word, Unknown) and ((is_flag and not equals) or (not known and alone)):
            source.stray(hydra.shown(text), f"{word.why}, so it may be any flag", line, opens=True)
        elif is_flag:
            name, start, condition, numbers = given, line, when, [len(source.entries) - 1]
            values = [part] if equals else []
        elif not name:
            source.stray(hydra.shown(text), "it is no flag, so what it changes is not known", line)
        else:
            numbers.append(len(source.entries) - 1)
            sometimes = Unknown(f"{hydra.shown(text)} is there only {when or 'sometimes'}")
            whole = word if isinstance(word, Unknown) else hydra.scalar(word)
            values.append(sometimes if when != condition else whole)
    end()
