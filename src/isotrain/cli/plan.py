"""`isotrain plan`: memory and time of a recipe before a device is taken."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from isotrain.cli.arguments import Overrides, RecipeName
from isotrain.device.vendors import DEVICES, device_named
from isotrain.errors import PlanError
from isotrain.recipe import library
from isotrain.recipe.load import load_recipe
from isotrain.terminal import rich_console

if TYPE_CHECKING:
    from isotrain.tools.plan.plan import RecipePlan


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    devices: Annotated[int, Option(min=1, help="How many devices there are.")] = 8,
    device: Annotated[str, Option(help=f"Their kind: {', '.join(DEVICES)}.")] = "a2",
    memory: Annotated[
        str | None, Option(metavar="SIZE", help="Memory of one, such as 64GB; by default its kind's.")
    ] = None,
    search: Annotated[bool, Option("--search", help="Look for changes with which it fits.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tell whether a recipe fits on devices, how long a step takes, and what to change.

    No device is needed, and no weights: the model's config.json is enough. Ends with 1 if it does not fit.

    Examples:

        isotrain plan gsm8k-grpo-8x --devices 8 --device a2

        isotrain plan my.yaml --devices 64 --memory 64GB --search
    """
    kind = device_named(device)
    size = _gigabytes(memory) if memory else kind.memory_gb
    given = load_recipe(library.locate(recipe), [*(overrides or []), f"device.ranks={devices}"])
    from isotrain.tools.plan.plan import make_plan  # torch comes in only here
    from isotrain.tools.plan.plan import search as search_plans

    if not search:
        result = make_plan(given, devices, kind, size)
    else:
        for result in search_plans(given, devices, kind, size):
            if not as_json:
                changes = " ".join(result.changes) or "the recipe as it is"
                verdict = "fits" if result.fits else "does not fit"
                typer.echo(f"{changes}: {result.needed_gb:.1f} GB, {verdict}", err=True)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=1))
    else:
        _show(result, searched=search)
    if not result.fits:
        raise typer.Exit(1)


def _gigabytes(text: str) -> float:
    size = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:Gi?B?)?\s*", text, re.IGNORECASE)
    if not size or float(size[1]) <= 0:
        raise PlanError(f"--memory: '{text}' is not a size; write it as 64GB")
    return float(size[1])


def whole_run(steps: int | None, seconds: float) -> str:
    if steps is None:
        return "the whole run: data.train is not here, so its steps are not known; set trainer.steps"
    total = steps * seconds
    unit, name = next(
        ((u, n) for u, n in ((86400, "days"), (3600, "hours"), (60, "minutes")) if total >= u), (1, "seconds")
    )
    count = f"{steps:,} step{'s' * (steps != 1)}"
    return f"the whole run: {count}, about {total / unit:.1f} {name}, without validation and start"


def _show(result: RecipePlan, searched: bool) -> None:
    from rich.table import Table

    from isotrain.tools.plan import estimate

    console = rich_console(soft_wrap=True, highlight=False)
    word = "[green]fits[/]" if result.fits else "[red]does not fit[/]"
    console.print(
        f"{word}: {result.needed_gb:.1f} of {result.device_gb:.0f} GB on each of {result.devices} devices "
        f"({result.device.title}), {result.ranks} training ranks"
    )
    for problem in result.problems:
        console.print(f"  {problem}")
    for name in result.shipped_sizes:
        console.print(f"  {name}: neither here nor on the Hub; the sizes that isotrain ships are taken")
    table = Table("memory of a training rank", "GB", box=None, header_style="bold", pad_edge=False)
    for name, size in sorted(result.memory.parts.items(), key=lambda part: -part[1]):
        table.add_row(name, f"{size / estimate.GB:.2f}")
    table.add_row(f"peak, in the {result.memory.phase}", f"{result.memory.peak / estimate.GB:.2f}")
    if communicators := sum(result.memory.communicators):
        table.add_row(f"buffers of {communicators} communicators", f"{result.buffers_gb:.2f}")
    for name, guessed in result.guessed_gb.items():
        table.add_row(f"guessed: {name}", f"{guessed:.2f}")
    if result.memory.host > estimate.GB // 10:
        table.add_row("in host memory, beside it", f"{result.memory.host / estimate.GB:.2f}")
    console.print(table)
    if result.engines is not None:
        engines = result.engines
        console.print(
            f"engines: {engines.engines} of {engines.tensor_parallel} devices; on each "
            f"{engines.weights_gb:.1f} GB of weights and {max(0.0, engines.cache_gb):.1f} GB of cache, for "
            f"{engines.responses} of the longest responses"
        )
        if engines.buffer_gb:
            room = (
                ""
                if engines.has_room
                else (
                    "; there is no room for it: weights will go through files, unless you lower "
                    "rollout.memory_utilization"
                )
            )
            console.print(f"  {engines.buffer_gb:.1f} GB for weights that come while it generates{room}")
    times = Table("time of a step", "seconds", box=None, header_style="bold", pad_edge=False)
    for name, seconds in result.time.seconds.items():
        times.add_row(name, f"{seconds:.1f}")
    times.add_row("sum", f"{result.time.total:.1f}")
    console.print(times)
    console.print(f"bottleneck: {result.time.bottleneck}")
    console.print(whole_run(result.steps, result.time.total))
    if estimate.THROUGH_FILES in result.time.seconds:
        on_one, between = estimate.FILE_GB_S
        console.print(f"files are guessed at {on_one:g} GB/s on one machine, {between:g} GB/s to others")
    if result.changes:
        console.print("changes: " + " ".join(result.changes))
    elif not result.fits and not searched:
        console.print("--search looks for changes with which it fits")
    confirmed = "data sheet" if result.device.confirmed else "reported, not confirmed by a data sheet"
    console.print(
        "How sure: the peak is that of the real training step, run without values; it agrees with the exact "
        "counter of a simulated device (docs/plan.md) and was not compared with hardware. Times are guesses "
        f"within a factor of 2: peak speed ({confirmed}) at {estimate.TRAINING_EFFICIENCY:.0%} in training, "
        f"links and memory at {estimate.BANDWIDTH_EFFICIENCY:.0%}, samples half as long as the longest."
    )
