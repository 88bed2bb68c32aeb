"""From the text of a source to a recipe, written as commented YAML and checked as one, and a report."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from isotrain.errors import IsotrainError, RecipeError
from isotrain.recipe.document import RecipeDumper
from isotrain.recipe.load import parse_recipe, resolved
from isotrain.recipe.names import all_names
from isotrain.recipe.schema import Recipe
from isotrain.tools.imports import keys, openrlhf, openrlhf_offline, trl, verl, verl_sft
from isotrain.tools.imports.draft import Draft, KeyFinding, RecipeLine
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.read import log_source, read_source
from isotrain.tools.imports.source import (
    ImportSource,
    ImportSourceError,
    KeySetting,
    ScriptCondition,
    Unknown,
    WordOutcome,
    without_secrets,
)

_MOST_TRIES = 20
_REQUIRED = {
    "name": "imported",
    "output": "runs/imported",
    "model.path": "MODEL",
    "data.train": "train.parquet",
}
_ORDER = {name: place for place, name in enumerate(dict.fromkeys(all_names(Recipe)))}
_WORST: tuple[WordOutcome, ...] = ("unknown", "refused", "mapped", "no effect")


class ImportAccountError(IsotrainError, RuntimeError):
    """Words of a source that ended nowhere."""


@dataclass(frozen=True)
class Imported:
    """A recipe, and what became of every key."""

    recipe: str
    framework: str
    version: str
    kind: str
    mapped: list[str]
    no_effect: list[KeyFinding]
    refused: list[KeyFinding]
    unknown: list[KeyFinding]
    questions: list[KeyFinding]
    notes: list[str]
    conditions: list[ScriptCondition]
    account: dict[WordOutcome, int]

    @property
    def same_training(self) -> bool:
        """Whether nothing was left out that changes what the model learns."""
        return not any(item.changes for item in (*self.refused, *self.unknown, *self.questions))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "same_training": self.same_training}


def convert(
    data: bytes,
    framework: str,
    version: str | None = None,
    rows: int | None = None,
    given: dict[str, str] | None = None,
) -> Imported:
    """The recipe of a script, command, configuration or log; `given` are variables of a script."""
    return from_source(read_source(data, framework, given), framework, version, rows)


def from_source(
    source: ImportSource, framework: str, version: str | None = None, rows: int | None = None
) -> Imported:
    """The same for what was read already."""
    draft = {"verl": _verl, "openrlhf": _openrlhf, "trl": _trl}[framework](source, version, rows)
    draft.notes += source.remarks
    if "model.path" not in draft.lines:
        draft.put("model.path", "MODEL", note="not known")
        draft.ask("model.path", "set it to the directory or Hub name of the model")
    return Imported(
        to_text(draft),
        framework,
        draft.version,
        source.kind,
        draft.mapped,
        draft.no_effect,
        draft.refused,
        draft.unknown,
        draft.questions,
        draft.notes,
        source.conditions,
        account(draft),
    )


def recipe_of_log(text: str) -> dict[str, Any] | None:
    """The resolved recipe of the configuration that a log of verl begins with; None if it prints none.

    `verl` has the values that no field of a recipe takes and that change the training.
    """
    source = log_source(text)
    if source is None:
        return None
    draft = _verl(source, None, None)
    recipe = resolved(parse_recipe(to_text(draft), "recipe"))
    left = [finding.key for finding in (*draft.refused, *draft.unknown) if finding.changes]
    return recipe | {"verl": {key: without_secrets(draft.raw(key)) for key in sorted(set(left))}}


def account(draft: Draft) -> dict[WordOutcome, int]:
    """How many words of the source became what; an error if one of them is lost.

    Words were counted where they were read. Every one of them has its own outcome or those of its keys.
    """
    source = draft.source
    counts: dict[WordOutcome, int] = {"mapped": 0, "no effect": 0, "refused": 0, "unknown": 0}
    lost: list[str] = []
    for number, entry in enumerate(source.entries):
        keys = [draft.renamed.get(key, key) for key in entry.keys]
        outcomes: set[WordOutcome | None] = set()
        for key in keys:
            # A key that is given again takes the value that it is given last.
            givers = source.settings[key].entries if key in source.settings else ()
            outcomes.add("no effect" if givers and number not in givers else draft.outcomes.get(key))
        outcome = entry.outcome or next((worst for worst in _WORST if worst in outcomes), None)
        if outcome is None or None in outcomes:
            lost.append(shown(entry.text))
        else:
            counts[outcome] += 1
    if lost or sum(counts.values()) != source.expected:
        raise ImportAccountError(
            f"internal error: {source.expected} words or keys were read, {sum(counts.values())} are "
            "accounted for"
            f"{'; lost: ' + ', '.join(lost[:5]) if lost else ''}. No recipe was written: please report this"
        )
    return counts


def _chosen(version: str | None, versions: tuple[str, ...], revealed: str | None) -> str:
    if version is not None and version not in versions:
        raise ImportSourceError(f"--version {version}: the defaults of {', '.join(versions)} are known")
    return revealed or version or versions[-1]


def _verl(source: ImportSource, version: str | None, rows: int | None) -> Draft:
    chosen = _chosen(version, keys.verl_ppo().versions, _revealed(source))
    if verl_sft.is_sft(source):
        chosen = verl_sft.trainer_of(source, version)
        draft = Draft(source, keys.verl_sft(), "verl", chosen, rows=rows)
        verl_sft.fill(draft)
        draft.sort_keys(verl_sft.unused(draft))
        return draft
    names = [source.settings.get(key) for key in ("model_engine", "--config-name")]
    engine = next((item for item in names if item is not None and "megatron" in str(item.value)), None)
    if engine is not None and not isinstance(engine.value, Unknown):
        source.settings.setdefault("actor_rollout_ref.actor.strategy", KeySetting("megatron", engine.line))
    draft = Draft(source, keys.verl_ppo(), "verl", chosen, rows=rows)
    draft.nullable = verl.NULLABLE
    draft.value("model_engine")
    verl.fill(draft)
    draft.sort_keys(verl.unused(draft))
    return draft


def _openrlhf(source: ImportSource, version: str | None, rows: int | None) -> Draft:
    trainer = source.program.rpartition("train_")[2] or _trainer(source)
    online = trainer in ("ppo_ray", "ppo")
    if not online and trainer not in openrlhf_offline.DEFAULTS:
        raise ImportSourceError(
            f"train_{trainer} is not imported; start from a recipe: `isotrain recipes` lists them"
        )
    table = keys.openrlhf_ppo() if online else keys.openrlhf_offline()
    flat = not any("." in key for key in source.settings)
    old = {"prompt_max_len", "generate_max_len", "bf16", "flash_attn"} & source.settings.keys()
    revealed = None if flat or not source.settings else table.versions[-1]
    known = version if version in table.versions[:-1] else None
    chosen = _chosen(version, table.versions, revealed)
    if flat and source.settings:
        chosen = known or ("0.8.0" if old or trainer == "kto" else "0.10.1")
    names = table.flat
    aliases = {new: old for old, new in names.items()} if flat else {}
    aliases.update({names.get(key, key): key for key in source.settings})
    source.settings = {names.get(key, key): setting for key, setting in source.settings.items()}
    source.settled = {names.get(key, key) for key in source.settled}
    draft = Draft(source, table, "OpenRLHF", chosen, rows=rows, aliases=aliases)
    draft.renamed = names
    openrlhf.fill(draft) if online else openrlhf_offline.fill(draft, trainer)
    verl.multimodal(draft)
    draft.sort_keys(openrlhf.unused(draft) if online else ())
    return draft


def _trl(source: ImportSource, version: str | None, rows: int | None) -> Draft:
    trainer, table = trl.prepare(source)
    draft = Draft(source, table, "TRL", _chosen(version, table.versions, None), rows=rows)
    draft.nullable = trl.nullable(table)
    trl.fill(draft, trainer)
    draft.sort_keys(trl.unused(draft, trainer))
    return draft


def _trainer(source: ImportSource) -> str:
    """The trainer of flags without a command, from the flags that only it has."""
    keys = source.settings.keys()
    if keys & {"actor.model_name_or_path", "rollout.batch_size", "prompt_data", "rollout_batch_size"}:
        return "ppo_ray"
    if keys & {"model.beta", "beta"}:
        return "dpo"
    return "rm" if keys & {"model.loss_type", "chosen_key", "data.chosen_key"} else "sft"


def _revealed(source: ImportSource) -> str | None:
    """The version of a whole configuration, from the keys that it has."""
    if source.kind not in ("log", "config") or len(source.settings) < 100:
        return None
    keys = source.settings
    if "trainer.use_v1" in keys or "reward.num_workers" in keys:
        return "2026-08"
    return "0.7.0" if "actor_rollout_ref.actor.optim.betas" in keys else "0.5.0"


def to_text(draft: Draft) -> str:
    """The recipe. A field that the schema refuses becomes a finding instead of a line."""
    for _ in range(_MOST_TRIES):
        text, places = _lines(draft)
        try:
            parse_recipe(text, "recipe")
            return text
        except RecipeError as error:
            problem = str(error)
            if not _remove(draft, problem, places):
                raise ImportSourceError(f"what was read makes no recipe: {shown(problem, 500)}") from None
    raise ImportSourceError("what was read makes no recipe: too many values are out of range")


def _remove(draft: Draft, problem: str, places: dict[int, str]) -> bool:
    """Take the fields out that the messages of `problem` name by line; whether there were any."""
    removed = False
    for message in problem.splitlines():
        located = re.match(r"recipe:(\d+)(?::\d+)?: (.*)", message)
        path = places.get(int(located[1])) if located else None
        if path is None:
            path = next((name for name in draft.lines if re.search(rf"\b{re.escape(name)}\b", message)), None)
        if path in draft.lines:
            line = draft.lines.pop(path)
            if path in _REQUIRED:
                draft.lines[path] = RecipeLine(_REQUIRED[path], "set this")
            why = located[2] if located else message
            place = next((s.line for key in line.keys if (s := draft.source.settings.get(key))), 0)
            name = line.comment.partition(":")[0] or path
            draft.refused.append(KeyFinding(name, shown(why, 200), place, True))
            for key in line.keys:
                if draft.outcomes.get(key) == "mapped":
                    draft.outcomes[key] = "refused"
                    draft.mapped.remove(draft.aliases.get(key, key))
            removed = True
    return removed


def _lines(draft: Draft) -> tuple[str, dict[int, str]]:
    """The text, and the field of each line, counted from 1."""
    out = _header(draft)
    places: dict[int, str] = {}
    tree: dict[str, Any] = {}
    for path, line in draft.lines.items():
        inside = tree
        *sections, name = path.split(".")
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = (path, line)
    for section in sorted(tree, key=list(Recipe.model_fields).index):
        _emit(out, places, section, tree[section], 0)
    return "\n".join(out) + "\n", places


def _header(draft: Draft) -> list[str]:
    title = f"# From {draft.framework} ({draft.source.kind}, with the defaults of version {draft.version})."
    lines = [
        title,
        "# Behind each field is the key that it came from. Check it: isotrain train THIS --dry-run",
    ]
    for heading, findings in (
        ("QUESTION", draft.questions),
        ("REFUSED", draft.refused),
        ("UNKNOWN", draft.unknown),
    ):
        for item in findings:
            where = f" (line {item.line})" if item.line else ""
            lines.append(f"# {heading} {shown(item.key, 120)}{where}: {shown(item.why, 400)}")
    for condition in draft.source.conditions:
        lines += [f"# CONDITION {shown(line, 300)}" for line in condition.report()]
    return [*lines, *(f"# NOTE {shown(note, 300)}" for note in draft.notes)]


def _emit(out: list[str], places: dict[int, str], name: str, node: Any, depth: int) -> None:
    indent = "  " * depth
    if isinstance(node, dict):
        if depth == 0 and out:
            out.append("")
        out.append(f"{indent}{name}:")
        # Values first: a section in between would look as if it held those after it.
        for key, inner in sorted(node.items(), key=lambda item: (isinstance(item[1], dict), _place(item[1]))):
            _emit(out, places, key, inner, depth + 1)
        return
    path, line = node
    assert isinstance(line, RecipeLine)
    comment = f"  # {shown(line.comment, 200)}" if line.comment else ""
    if depth == 0 and len(out) and out[-1].startswith("#"):
        out.append("")
    out.append(f"{indent}{name}: {_value(line.value)}{comment}")
    places[len(out)] = path


def _place(node: Any) -> int:
    """The place of a field in the schema; of a section, that of its first field."""
    return min(map(_place, node.values())) if isinstance(node, dict) else _ORDER.get(node[0], 0)


def _value(value: Any) -> str:
    """One value on one line."""
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e6:
        return re.sub(r"e([+-])0*(\d)", r"e\1\2", repr(value)).replace("e+", "e")
    text = yaml.dump(value, Dumper=RecipeDumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return str(text).removesuffix("\n").removesuffix("\n...").removesuffix("...").strip()
