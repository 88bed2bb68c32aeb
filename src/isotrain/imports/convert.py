"""From the text of a source to a recipe and a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from isotrain.imports import openrlhf, openrlhf_keys, openrlhf_offline, verl, verl_keys, verl_sft
from isotrain.imports.draft import Draft, Finding
from isotrain.imports.read import read_source
from isotrain.imports.source import ImportSourceError, Source
from isotrain.imports.write import to_text


@dataclass(frozen=True)
class Imported:
    """A recipe, and what became of every key."""

    recipe: str
    framework: str
    version: str
    kind: str
    mapped: list[str]
    no_effect: list[Finding]
    refused: list[Finding]
    unknown: list[Finding]
    questions: list[Finding]
    notes: list[str]

    @property
    def same_training(self) -> bool:
        """Whether nothing was left out that changes what the model learns."""
        return not any(item.changes for item in (*self.refused, *self.unknown, *self.questions))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "same_training": self.same_training}


def convert(data: bytes, framework: str, version: str | None = None, rows: int | None = None) -> Imported:
    """The recipe of a script, command, configuration or log of `framework`."""
    return from_source(read_source(data, framework), framework, version, rows)


def from_source(
    source: Source, framework: str, version: str | None = None, rows: int | None = None
) -> Imported:
    """The same for what was read already."""
    draft = _verl(source, version, rows) if framework == "verl" else _openrlhf(source, version, rows)
    draft.notes += source.remarks
    if "model.path" not in draft.lines:
        draft.put("model.path", "MODEL", note="not known")
        draft.ask("model.path", "set it to the directory or Hub name of the model")
    text = to_text(draft)
    return Imported(
        text,
        framework,
        draft.version,
        source.kind,
        draft.mapped,
        draft.no_effect,
        draft.refused,
        draft.unknown,
        draft.questions,
        draft.notes,
    )


def _chosen(version: str | None, versions: tuple[str, ...], revealed: str | None) -> str:
    if version is not None and version not in versions:
        raise ImportSourceError(f"--version {version}: the defaults of {', '.join(versions)} are known")
    return revealed or version or versions[-1]


def _verl(source: Source, version: str | None, rows: int | None) -> Draft:
    chosen = _chosen(version, verl_keys.VERSIONS, _revealed(source))
    if verl_sft.is_sft(source):
        chosen = verl_sft.trainer_of(source, version)
        draft = Draft(source, verl_sft.TABLE, "verl", verl_sft.VERSIONS, chosen, rows=rows)
        verl_sft.fill(draft)
        draft.sort_keys(lambda key: None)
        return draft
    engine = source.settings.get("model_engine")
    if engine is not None and engine.value == "megatron":
        source.settings.setdefault("actor_rollout_ref.actor.strategy", engine)
    draft = Draft(source, verl_keys.TABLE, "verl", verl_keys.VERSIONS, chosen, rows=rows)
    verl.fill(draft)
    draft.sort_keys(verl.ignored(draft))
    return draft


def _openrlhf(source: Source, version: str | None, rows: int | None) -> Draft:
    trainer = source.program.rpartition("train_")[2] or _trainer(source)
    online = trainer in ("ppo_ray", "ppo")
    if not online and trainer not in openrlhf_offline.DEFAULTS:
        raise ImportSourceError(
            f"train_{trainer} is not imported; start from a recipe: `isotrain recipes` lists them"
        )
    flat = not any("." in key for key in source.settings)
    old = {"prompt_max_len", "generate_max_len", "bf16", "flash_attn"} & source.settings.keys()
    revealed = None if flat or not source.settings else openrlhf_keys.VERSIONS[-1]
    known = version if version in openrlhf_keys.VERSIONS[:-1] else None
    chosen = _chosen(version, openrlhf_keys.VERSIONS, revealed)
    if flat and source.settings:
        chosen = known or ("0.8.0" if old or trainer == "kto" else "0.10.1")
    names = {**openrlhf_keys.FLAT, **(openrlhf_keys.FLAT_PPO if online else openrlhf_keys.FLAT_OFFLINE)}
    aliases = {new: old for old, new in names.items()} if flat else {}
    aliases.update({names.get(key, key): key for key in source.settings})
    source.settings = {names.get(key, key): setting for key, setting in source.settings.items()}
    table = openrlhf_keys.PPO_TABLE if online else openrlhf_keys.OFFLINE_TABLE
    draft = Draft(source, table, "OpenRLHF", openrlhf_keys.VERSIONS, chosen, rows=rows, aliases=aliases)
    openrlhf.fill(draft) if online else openrlhf_offline.fill(draft, trainer)
    draft.sort_keys(_unused(draft) if online else lambda key: None)
    return draft


def _unused(draft: Draft) -> Callable[[str], str | None]:
    """Why a flag has no effect beside the others."""
    critic = draft.value("algo.advantage.estimator") == "gae"
    remote = bool(draft.value("reward.remote_url"))

    def reason(key: str) -> str | None:
        if key.startswith("critic.") and not critic:
            return "only gae has a critic"
        return "it is for reward models" if key == "reward.normalize_enable" and remote else None

    return reason


def _trainer(source: Source) -> str:
    """The trainer of flags without a command, from the flags that only it has."""
    keys = source.settings.keys()
    if keys & {"actor.model_name_or_path", "rollout.batch_size", "prompt_data", "rollout_batch_size"}:
        return "ppo_ray"
    if keys & {"model.beta", "beta"}:
        return "dpo"
    return "rm" if keys & {"model.loss_type", "chosen_key", "data.chosen_key"} else "sft"


def _revealed(source: Source) -> str | None:
    """The version of a whole configuration, from the keys that it has."""
    if source.kind not in ("log", "config") or len(source.settings) < 100:
        return None
    keys = source.settings
    if "trainer.use_v1" in keys or "reward.num_workers" in keys:
        return "2026-08"
    return "0.7.0" if "actor_rollout_ref.actor.optim.betas" in keys else "0.5.0"
