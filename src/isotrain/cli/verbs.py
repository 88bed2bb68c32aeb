"""The commands by name. The module of one is imported when it runs: a list of commands imports none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from isotrain.cli.arguments import command_with


class Verb(NamedTuple):
    """Where a command is defined, the first sentence of its help, and its options with several values."""

    path: str
    help: str
    several: Mapping[str, int] = {}


VERBS = {
    "train": Verb("train:train", "Train a model from a recipe."),
    "evaluate": Verb(
        "evaluate:evaluate", "Generate responses to a data set, score them, and say how sure the scores are."
    ),
    "score": Verb(
        "evaluate:score", "Apply a recipe's reward to rows that have responses, to see what a reward says."
    ),
    "chat": Verb("evaluate:chat", "Talk to a model or to a checkpoint of a run, token by token."),
    "view": Verb(
        "runs:view", "Show curves and recorded trajectories of a run in the browser, also while it trains."
    ),
    "recipes": Verb("recipes:recipes", "List the shipped recipes, print one, or copy one to change it."),
    "doctor": Verb(
        "doctor:doctor",
        "Report incompatible driver, toolkit and package versions on this machine, and what to install.",
    ),
    "plan": Verb(
        "plan:plan", "Tell whether a recipe fits on devices, how long a step takes, and what to change."
    ),
    "mismatch": Verb(
        "mismatch:mismatch",
        "Name why the engine's log-probs differ from the trainer's, with a share for each cause.",
    ),
    "runs": Verb("runs:runs", "List runs: state, step, last metrics, and what they wait for."),
    "profile": Verb(
        "profile:profile",
        "Say where the time of a step goes, who waits for whom, and which recipe field would change it.",
    ),
    "logs": Verb(
        "runs:logs",
        "Print what a run said: progress, warnings, and why it ended. Also of one that runs elsewhere.",
    ),
    "preview": Verb(
        "preview:preview", "Show the first training samples token by token, and which tokens have loss."
    ),
    "export": Verb("runs:export", "Write a checkpoint as a model that transformers, vLLM and others load."),
    "import": Verb(
        "recipes:import_recipe", "Write a recipe from a training script of verl, OpenRLHF or TRL."
    ),
    "export-config": Verb("recipes:export_config", "Write a recipe as a command of verl."),
    "prepare": Verb("prepare:app", "Write data sets, or a tiny model with data, to a directory."),
    "parity": Verb("verbs:parity", "Compare runs on two devices, or from two frameworks."),
}
PARITY_VERBS = {
    "compare": Verb(
        "parity:compare",
        "Compare two runs: do they end up alike, and is it the same computation?",
        {"pair": 2, "dump": 2},
    ),
    "baseline": Verb(
        "parity:baseline", "Write a small reference file from several reruns, for nightly jobs."
    ),
    "record": Verb(
        "parity_runs:record", "Train a recipe as the reference, with all that a later replay needs."
    ),
    "replay": Verb(
        "parity_runs:replay",
        "Train a recorded run again on this device from the same data, and compare the two runs.",
    ),
    "probe": Verb(
        "parity_runs:probe",
        "Record a few steps in the middle of a run, layer by layer, from one of its checkpoints.",
    ),
    "truth": Verb(
        "parity_runs:truth",
        "Repeat the first recorded step of a run in float64 on this host, and record its layers.",
    ),
    "sampler": Verb(
        "parity_runs:sampler", "Test the tokens that an engine drew against probabilities computed here."
    ),
    "contribute": Verb(
        "parity_certify:contribute",
        "Certify this machine's device alone: it trains each algorithm, and is held against float64.",
    ),
    "verify": Verb(
        "parity_certify:verify", "Say whether a certificate is consistent, and separately who signed it."
    ),
    "sign": Verb("parity_certify:sign", "Sign a certificate with an ssh key; the signature goes beside it."),
    "certify": Verb(
        "parity_certify:certify",
        "Train a recipe on two devices and certify that they agree, level by level; or certify finished "
        "runs.",
        {"from": 0, "candidate": 0},
    ),
}


class LazyGroup(TyperGroup):
    """A group whose commands are names and one sentence until one of them is called."""

    def __init__(self, *, verbs: Mapping[str, Verb], **settings: Any) -> None:
        super().__init__(**settings)
        self._verbs = verbs
        self.commands = {name: TyperCommand(name, help=verb.help) for name, verb in verbs.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load(name, self._verbs[name]), rest


def load(name: str, verb: Verb) -> Any:
    """The command itself."""
    module, attribute = verb.path.split(":")
    command = getattr(import_module(f"isotrain.cli.{module}"), attribute)
    if isinstance(command, LazyGroup):
        return command
    if not isinstance(command, typer.Typer):
        app, function = typer.Typer(add_completion=False), command
        app.command(name, cls=command_with(**verb.several))(function)
        command = app
    return typer.main.get_command(command)


parity = LazyGroup(name="parity", verbs=PARITY_VERBS, no_args_is_help=True, help=VERBS["parity"].help)
