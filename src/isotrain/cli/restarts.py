"""`isotrain train --restarts`: run training in a child process, and again where that may help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from isotrain.children import die_with_parent
from isotrain.engine.checkpoint.layout import newest_complete
from isotrain.errors import RETRYABLE, RecipeError
from isotrain.recipe.schema import Recipe
from isotrain.trainers.preemption import PREEMPTED

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LONGEST_PAUSE = 60.0


def check_restarts(recipe: Recipe) -> None:
    """Refuse what cannot be started again, or is started again by others."""
    if recipe.trainer.resume != "auto":
        raise RecipeError("--restarts: a restart has to resume; set trainer.resume=auto")
    if "RANK" in os.environ:
        raise RecipeError("--restarts: torchrun has its own; use `torchrun --max-restarts`")


def supervise(command: Sequence[str], checkpoints: Path, restarts: int) -> int:
    """Run the command until it ends for good; returns its exit code.

    At most so many restarts follow each other without a new checkpoint: one that makes progress is free.
    """
    supervisor, used = _Supervisor(command), 0
    while True:
        before = newest_complete(checkpoints)
        code = supervisor.run()
        reason = reason_to_restart(code)
        if reason is not None and supervisor.asked:
            # However the child ended: it was this signal that ended training, and a start resumes it.
            return 128 + supervisor.asked
        if reason is None:
            return code if code >= 0 else 128 - code
        newest = newest_complete(checkpoints)
        if newest is not None and (before is None or newest > before):
            used = 0
        if used == restarts:
            _say(f"{reason}; giving up: {restarts} restart(s) brought no new checkpoint")
            return code if code >= 0 else 128 - code
        used += 1
        pause = pause_before(used)
        start = "from the first step" if newest is None else f"after step {newest}"
        _say(f"{reason}; restart {used} of {restarts} in {pause:g} s, {start}")
        if not supervisor.pause(pause):
            return 128 + supervisor.asked


def reason_to_restart(code: int) -> str | None:
    """Why a child that ended like this is started again; None if that would not help, or nobody wants it."""
    if code < 0 and code != -signal.SIGINT:
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"training was killed by {signal.Signals(-code).name}{memory}"
    return {PREEMPTED: "training was preempted", RETRYABLE: "training failed"}.get(code)


def pause_before(restart: int) -> float:
    """Seconds: what has just failed may need time, such as a machine that comes back."""
    return min(LONGEST_PAUSE, 2.0 ** (restart - 1))


class _Supervisor:
    """One child at a time; signals to this process are the child's."""

    def __init__(self, command: Sequence[str]) -> None:
        self.asked = 0
        """The last signal that this process got."""
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under `nohup`, which the child inherits
                signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Start the child and wait for its end, which is near if a signal has come; its exit code."""
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this group reaches the child once, through this process
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        if self.asked:
            self._child.send_signal(self.asked)
        code = self._child.wait()
        self._child = None
        return code

    def pause(self, seconds: float) -> bool:
        """Whether it lasted: a signal ends it."""
        end = time.monotonic() + seconds
        while not self.asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.1, left))
        return not self.asked

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.asked = number
        if self._child is not None:
            self._child.send_signal(number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
