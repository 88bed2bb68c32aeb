"""The process of one rank that `launch` started."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from isotrain.errors import IsotrainError, may_pass
from isotrain.lifetime import die_with_parent
from isotrain.recipe.load import load_resolved
from isotrain.terminal import guard
from isotrain.trainers.preemption import CLOSING_SECONDS, PREEMPTED, Preempted, preemptible
from isotrain.trainers.run import train_supervised

RECIPE_FILE = "recipe.json"
SOURCE_FILE = "recipe.yaml"
ERROR_FILE = "error-{rank}.txt"
CRASH_FILE = "crash-{rank}.txt"
PREEMPTED_FILE = "preempted"
LAUNCHER_VARIABLE = "ISOTRAIN_LAUNCHER"


def main(job: Path) -> int:
    # A rank whose launcher was killed would go on writing into a run directory that is being resumed.
    die_with_parent(int(os.environ[LAUNCHER_VARIABLE]))
    rank = os.environ["RANK"]
    recipe, source = load_resolved(job / RECIPE_FILE), (job / SOURCE_FILE).read_text()
    try:
        # The launcher outlives its ranks: it tells the user how the run has ended.
        with preemptible(recipe.trainer.preemption_seconds, closing=CLOSING_SECONDS, spares=2) as preemption:
            train_supervised(recipe, source, preemption)
    except Preempted:
        (job / PREEMPTED_FILE).touch()
        return PREEMPTED
    except Exception as error:
        ours = isinstance(error, IsotrainError)
        text = str(error) if ours else f"rank {rank} failed:\n{traceback.format_exc()}"
        file = CRASH_FILE if may_pass(error) else ERROR_FILE
        (job / file.format(rank=rank)).write_text(text)
        return 1
    return 0


if __name__ == "__main__":
    guard()  # its output is the terminal of the command
    sys.exit(main(Path(sys.argv[1])))
