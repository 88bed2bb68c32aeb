"""`isotrain train`: a recipe and overrides in, a run out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from typer import Option

from isotrain import api
from isotrain.children import die_with_parent, module_command
from isotrain.cli.arguments import Overrides, RecipeName
from isotrain.device.vendors import check_kind
from isotrain.engine.checkpoint.layout import newest_complete
from isotrain.errors import RETRYABLE, IsotrainError, RecipeError, may_pass
from isotrain.language import chosen
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.document import to_yaml
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection, OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.terminal import rich_console
from isotrain.trainers.preemption import PREEMPTED


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check the recipe, print it with all defaults, and stop.")
    ] = False,
    restarts: Annotated[
        int,
        Option(
            min=0,
            metavar="N",
            help="If training is killed or fails in a way that may pass, run it again, which resumes; "
            "at most N times without a new checkpoint.",
        ),
    ] = 0,
) -> None:
    """Train a model from a recipe.

    The same recipe runs on every device. Run the same command again to resume an interrupted run.

    Examples:

        isotrain train tiny-sft

        isotrain train my.yaml optimizer.lr=1e-4 trainer.steps=100

        isotrain train my.yaml --dry-run

        isotrain train my.yaml --restarts 3
    """
    if dry_run:
        from isotrain.trainers.online.precheck import look_online

        checked = api.load_recipe(recipe, *(overrides or []))
        check_kind(checked.device.type)
        warnings = look_online(checked) if isinstance(checked.algorithm, OnlineSection) else []
        show(checked)
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)
        return
    if restarts:
        checked = api.load_recipe(recipe, *(overrides or []))
        check_restarts(checked)
        language = chosen().value
        command = module_command("isotrain.cli.main", "--lang", language, "train", recipe, *(overrides or []))
        raise typer.Exit(supervise(command, RunDirectory(checked.output).checkpoints, restarts))
    try:
        api.train(recipe, *(overrides or []), in_process=True)
    except (IsotrainError, ModuleNotFoundError):
        raise
    except Exception as error:  # not one of ours, such as a device that failed
        traceback.print_exc()
        raise typer.Exit(RETRYABLE if may_pass(error) else 1) from None


def show(recipe: Recipe) -> None:
    """The resolved recipe on stdout, for people as YAML and for programs as JSON; the summary on stderr."""
    values = resolved(recipe)
    if sys.stdout.isatty():
        from rich.syntax import Syntax

        # Highlighted text rather than a Syntax block: that would cut long paths at the terminal's width.
        text = to_yaml(values)
        rich_console().print(Syntax(text, "yaml").highlight(text), soft_wrap=True, end="")
    else:
        typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
    typer.echo(summary(recipe), err=True)


def summary(recipe: Recipe) -> str:
    """A short summary of what a run of this recipe would do."""
    model, data, trainer, device = recipe.model, recipe.data, recipe.trainer, recipe.device
    weights = f"LoRA of rank {model.lora.rank}" if model.lora.rank else "all weights"
    train = data.train if isinstance(data.train, str) else ", ".join(data.train)
    length = (
        f"{trainer.steps} step{'s' * (trainer.steps != 1)}" if trainer.steps else f"{trainer.epochs} epoch(s)"
    )
    what = "prompts" if recipe.rollout else "samples"
    rows = {
        "algorithm": recipe.algorithm.name,
        "model": f"{model.path} ({model.dtype}, {weights})",
        "data": f"{train} ({data.batch_size} {what} per step)",
        **_online_rows(recipe),
        "length": length,
        "device": f"{device.type}, {device.ranks} rank(s)",
        "output": recipe.output,
    }
    lines = [f"  {name:<10} {value}" for name, value in rows.items()]
    return "\n".join([f"{recipe.name}: the recipe is valid; nothing was started", *lines])


def _online_rows(recipe: Recipe) -> dict[str, str]:
    rollout, reward, cluster = recipe.rollout, recipe.reward, recipe.cluster or ClusterSection()
    if rollout is None or reward is None:
        return {}
    parts = {
        "gsm8k": reward.gsm8k and f"gsm8k ({reward.gsm8k.method})",
        "math": reward.math and "math",
        "code": reward.code and f"code ({reward.code.score}, {reward.code.sandbox})",
        "function": reward.function and reward.function.path,
        "model": reward.model and reward.model.path,
        "process": reward.process and reward.process.path,
    }
    count = rollout.engine_count(recipe.device.ranks, cluster.placement)
    all_free = rollout.engines is None and cluster.placement == "separate"
    engines = "engines on all free devices" if all_free else f"{count} engine(s)"
    if rollout.tensor_parallel > 1:
        engines += f" of {rollout.tensor_parallel} devices each"
    when = f", up to {rollout.staleness} version(s) behind" if rollout.staleness else ""
    when += ", weight updates in flight" if rollout.in_flight else ""
    return {
        "rollout": f"{rollout.engine}, {rollout.n} response(s) per prompt, up to {rollout.max_tokens} tokens",
        "reward": " + ".join(text for text in parts.values() if text),
        "cluster": f"{cluster.placement}, {engines}{when}, Ray {cluster.address}",
    }


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
