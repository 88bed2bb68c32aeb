"""Write the tasks of a `verifiers` environment as rows, in the Python that has the environment.

Its only argument is JSON, `{name, arguments, limit, check}`. On its standard output are lines of JSON:
`{split, row}` for each task, `{refused: why}` where the environment cannot be loaded, and at the end
`{done: true}`.
With `check`, nothing is imported: only the packages are looked for.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any, TextIO

from isotrain.agents.verifiers_environments import check, load
from isotrain.errors import IsotrainError
from isotrain.user_file import where

SPLITS = ("train", "validation")


def main(arguments: list[str]) -> None:
    asked = json.loads(arguments[0])
    # What packages print while they are loaded is no row.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    os.dup2(2, 1)
    try:
        check(asked["name"])
        if not asked.get("check"):
            _rows(asked, lines)
    except IsotrainError as error:
        _write(lines, {"refused": str(error)[:4000]})
    except Exception as error:  # of the environment's own code
        _write(lines, {"refused": f"rollout.agent.verifiers: {asked['name']}: {where(error)}"[:4000]})
    else:
        _write(lines, {"done": True})
    lines.flush()
    os._exit(0)  # whatever threads the environment has started


def _rows(asked: dict[str, Any], lines: TextIO) -> None:
    environment = load(asked["name"], asked["arguments"])
    for split in SPLITS:
        for row in itertools.islice(environment.rows(split), asked["limit"]):
            _write(lines, {"split": split, "row": row})


def _write(lines: TextIO, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
