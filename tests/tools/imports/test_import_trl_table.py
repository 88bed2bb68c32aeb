"""The table of TRL against the installed package: no key is missing, and no default has drifted."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any

import pytest

from isotrain.tools.imports.keys import KeyRule, KeyTable, key_table
from isotrain.tools.imports.trl import TRAINERS

pytestmark = pytest.mark.heavy  # transformers' and TRL's trainers are imported

# Keys of launchers, of scripts that load objects themselves, and of versions before 1.16.
OTHERS = {
    "num_processes", "num_machines", "accelerate_config", "warmup_ratio", "max_prompt_length", "logging_dir",
    "overwrite_output_dir", "save_safetensors",
}  # fmt: skip


@cache
def fields(kind: str) -> dict[str, Any]:
    """Fields with their defaults: of the trainer's configuration, and of what commands take besides."""
    trl = pytest.importorskip("trl")
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.utils import DatasetMixtureConfig

    name = {"reward": "Reward"}.get(kind, kind.upper())
    script = GRPOScriptArguments if kind == "grpo" else trl.ScriptArguments
    found: dict[str, Any] = {}
    for config in (getattr(trl, f"{name}Config"), trl.ModelConfig, script, DatasetMixtureConfig):
        for field in dataclasses.fields(config):
            default, make = field.default, field.default_factory
            found.setdefault(field.name, default if make is dataclasses.MISSING else make())
    return found


def table(kind: str) -> KeyTable:
    return key_table("trl", "common", kind)


def is_neutral(rule: KeyRule, default: Any) -> bool:
    return default in (*rule.neutral, [], "") or (isinstance(default, list) and not default)


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_field_has_a_rule_with_the_package_s_default(kind: str) -> None:
    rules, earlier = table(kind).exact, table(kind).flat
    assert sorted(fields(kind).keys() - rules.keys() - earlier.keys()) == []
    assert set(earlier.values()) <= rules.keys()
    for name, default in fields(kind).items():
        if name in earlier:
            continue  # deprecated there, and None
        rule = rules[name]
        if rule.kind == "mapped":
            assert rule.default(0) == default, name
            assert isinstance(rule.default(0), bool) == isinstance(default, bool), name
        elif rule.kind == "refused":
            assert is_neutral(rule, default), name


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_rule_is_of_a_field(kind: str) -> None:
    """A key that the package has no more would be accepted without an effect."""
    names = {name for name in table(kind).exact if "." not in name}
    assert sorted(names - fields(kind).keys() - OTHERS) == []


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_argument_of_a_trainer_has_a_rule(kind: str) -> None:
    trl = pytest.importorskip("trl")
    trainer = getattr(trl, f"{kind.upper() if kind != 'reward' else 'Reward'}Trainer")
    names = set(inspect.signature(trainer.__init__).parameters) - {"self", "model", "args", "kwargs"}
    rules = [table(kind).find(f"trainer.{name}") for name in sorted(names)]
    assert [name for name, rule in zip(sorted(names), rules, strict=True) if rule is None] == []


def test_lora_has_peft_s_defaults() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig()
    for name in ("r", "lora_alpha", "lora_dropout", "target_modules"):
        rule = table("sft").exact[f"peft.{name}"]
        assert rule.default(0) == getattr(config, name), name
    for name in ("use_rslora", "use_dora", "modules_to_save", "bias", "init_lora_weights"):
        assert is_neutral(table("sft").exact[f"peft.{name}"], getattr(config, name)), name
