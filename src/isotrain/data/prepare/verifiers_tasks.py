"""The tasks of a `verifiers` environment as rows for training with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

import yaml

from isotrain.children import module_arguments
from isotrain.errors import DataError

# Characters of one task: more than any prompt, and little enough to hold.
LONGEST_LINE = 1 << 24
EXPORT = "isotrain.environments.verifiers_environments"


def prepare_verifiers(
    name: str,
    out: Path,
    *,
    arguments: Mapping[str, Any],
    python: str | None = None,
    limit: int = 1_000_000,
    held_out: int = 0,
) -> dict[str, int]:
    """Write `train.jsonl` and, if there are tasks for it, `validation.jsonl`; returns how many rows each has.

    The last `held_out` tasks for training are for validation. `limit` is the maximum of tasks per file.
    """
    asked = {"name": name, "arguments": dict(arguments), "limit": limit}
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for message in exported(asked, python):
        splits[message["split"]].append(json.dumps(message["row"], ensure_ascii=False))
    train = splits["train"]
    if len(train) <= held_out:
        raise DataError(f"{name} has {len(train)} tasks for training, and --held-out is {held_out}")
    if held_out:
        splits["validation"] += train[-held_out:]
        del train[-held_out:]
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, rows in splits.items():
        if rows:
            file = out / f"{split}.jsonl"
            file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
            written[file.name] = len(rows)
    return written


def find_environment(name: str, python: str | None) -> None:
    """Raise `DataError` where this Python lacks the environment, `verifiers` or isotrain; imports none."""
    for _ in exported({"name": name, "check": True}, python):
        pass


def read_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """`a.b=1` is `{a: {b: 1}}`; values as YAML has them."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise DataError(f"--arg {pair}: write key=value, such as taskset.split=train")
        inside = arguments
        for name in names[:-1]:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise DataError(f"--arg {pair}: {name} already has a value")
        try:
            inside[names[-1]] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise DataError(f"--arg {pair}: the value is no YAML; put quotes around it") from None
    return arguments


def exported(asked: Mapping[str, Any], python: str | None) -> Iterator[dict[str, Any]]:
    """Messages of the environment's Python about it; raises `DataError` where there are none."""
    program = python or sys.executable
    if which(program) is None:
        raise DataError(f"there is no Python {program!r}")
    command = [program, *module_arguments(EXPORT, json.dumps(asked))]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(LONGEST_LINE):
                if not line.endswith(b"\n"):
                    raise DataError(f"{asked['name']}: a task has more than {LONGEST_LINE:,} characters")
                message: dict[str, Any] = json.loads(line)
                if "refused" in message:
                    raise DataError(message["refused"])
                if "done" in message:
                    return
                yield message
        finally:
            process.kill()
    raise DataError(
        f"{program} cannot load {asked['name']}: see above; isotrain must be installed there, too"
    )
