"""Train in a child process and pass on its output and errors.

In this process, training would change what cannot be changed back: variables that libraries read once,
torch's switches and threads, random numbers, memory of devices. And where torch has been used before, the
numbers would not be those of the command line.
"""

from __future__ import annotations

import codecs
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from isotrain import errors
from isotrain.children import die_with_parent, module_command
from isotrain.engine.checkpoint.layout import resume_hint
from isotrain.errors import IsotrainError, LaunchError, PreemptedError, install
from isotrain.language import said, tr
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved, write_resolved
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.terminal import guard, visible
from isotrain.trainers.preemption import (
    CLOSING_SECONDS,
    CLOSING_SECONDS_ONLINE,
    PREEMPTED,
    Preempted,
    preemptible,
)

_RECIPE, _SOURCE, _ERROR = "recipe.json", "recipe.yaml", "error.json"
_LAUNCHER = "ISOTRAIN_LAUNCHER"
_INTERRUPTED = 130
# A variable for a terminal of this process must not make the child draw a bar into a pipe.
_PIPE = {"PYTHONIOENCODING": "utf-8", "FORCE_COLOR": "", "TTY_COMPATIBLE": "0"}

# Packages that a plain installation leaves out, and the extra that brings them.
_EXTRAS = {
    "datasets": "hub",
    "modelscope_hub": "modelscope",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "ray": "online",
}


def train_here(recipe: Recipe, source: str) -> None:
    """Train in this process; `source` is the recipe's text as the user wrote it."""
    from isotrain.tools.doctor.examine import preflight
    from isotrain.trainers.first_look import first_look

    for warning in preflight(recipe):
        print(said(tr("warning: {text}", text=warning)), file=sys.stderr, flush=True)
    first_look(recipe)
    closing = CLOSING_SECONDS_ONLINE if isinstance(recipe.algorithm, OnlineSection) else CLOSING_SECONDS
    checkpoints = RunDirectory(recipe.output).checkpoints

    def last_words() -> str:
        return f"preempted: {resume_hint(checkpoints)}"

    seconds = recipe.trainer.preemption_seconds
    with preemptible(seconds, closing=closing, last_words=last_words) as preemption:
        from isotrain.trainers.launch import launch

        try:
            launch(recipe, source, preemption)
        except KeyboardInterrupt:
            print(resume_hint(checkpoints), file=sys.stderr, flush=True)
            raise
        except BaseException as error:
            if not (preemption.requested or isinstance(error, Preempted)):
                raise
            # Asked to end, the run ended: what it met on the way out, such as lost workers, does not matter.
            if isinstance(error, Exception):
                print(f"warning: while the run was ending: {error}", file=sys.stderr)
            preemption.announce()
            preemption.say_last_words()
            raise (KeyboardInterrupt if preemption.interrupted else Preempted) from error


def train_in_child(recipe: Recipe, source: str) -> None:
    """Train in a child; what it prints is printed here, what it raises is raised here."""
    with tempfile.TemporaryDirectory(prefix="isotrain-") as directory:
        job = Path(directory)
        write_resolved(recipe, job / _RECIPE)
        (job / _SOURCE).write_text(source, encoding="utf-8")
        process = subprocess.Popen(
            module_command("isotrain.api.child", directory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_PIPE, _LAUNCHER: str(os.getpid())},
            start_new_session=True,  # an interruption is passed on below, once
        )
        try:
            _relay(process)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _relay(process)  # it may be finishing a checkpoint
            raise
        finally:
            process.kill()
            process.wait()
        if process.returncode == -signal.SIGINT or process.returncode == _INTERRUPTED:
            raise KeyboardInterrupt
        if process.returncode == PREEMPTED:
            raise PreemptedError("SIGTERM ended training; call train again to resume")
        if process.returncode:
            raise _error(job / _ERROR, process.returncode)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The package to install for an import that failed; None if no installation would help."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "isotrain"):
        return None
    return f"this needs the package {package!r}: {install(_EXTRAS.get(package, 'train'))}"


def _relay(process: subprocess.Popen[bytes]) -> None:
    """Print what a process prints until it ends; what it has started may hold the pipe open for longer.

    A child whose output is a pipe draws no bar: nothing of ours needs the sequences that are filtered here. C
    libraries write past the child's own filter, and some streams here have none, such as those of notebooks.
    """
    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        ended = process.poll() is not None
        if select.select([process.stdout], [], [], 0 if ended else 0.2)[0]:
            if not (output := os.read(process.stdout.fileno(), 1 << 16)):
                process.wait()
                return
            # A carriage return is a library's progress; it would let a line overwrite another one.
            lines = decoder.decode(output).replace("\r\n", "\n").replace("\r", "\n")
            sys.stdout.write(visible(lines))
            sys.stdout.flush()
        elif ended:
            return


def _error(path: Path, code: int) -> IsotrainError:
    """The child's own error, or how it ended without one."""
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
        error: IsotrainError = getattr(errors, report["kind"], LaunchError)(report["message"])
        return error
    if code < 0:
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        return LaunchError(f"training was killed by signal {-code}{memory}")
    return LaunchError(f"training ended with exit code {code}; see its output above")


def _main(job: Path) -> int:
    from isotrain.tools.doctor.plugin import hide_a_plugin_that_cannot_load

    die_with_parent(int(os.environ[_LAUNCHER]))
    hide_a_plugin_that_cannot_load()
    try:
        recipe = load_resolved(job / _RECIPE)
        train_here(recipe, (job / _SOURCE).read_text(encoding="utf-8"))
    except IsotrainError as error:
        # One that users can catch, and that says whether the same call may succeed.
        kind = next(base for base in type(error).__mro__ if base.__module__ == errors.__name__)
        report = {"kind": kind.__name__, "message": str(error)}
    except ModuleNotFoundError as error:
        if (words := missing_package(error)) is None:
            raise
        report = {"kind": LaunchError.__name__, "message": words}
    except KeyboardInterrupt:
        return _INTERRUPTED
    else:
        return 0
    (job / _ERROR).write_text(json.dumps(report), encoding="utf-8")
    return 1


if __name__ == "__main__":
    guard()
    sys.exit(_main(Path(sys.argv[1])))
