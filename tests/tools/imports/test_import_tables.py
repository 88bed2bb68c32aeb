"""Every key of the tables of keys by frequency is handled by name, and the counts that the docs state."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from isotrain.recipe.names import all_names
from isotrain.recipe.schema import Recipe
from isotrain.tools.imports.keys import (
    KeyRule,
    KeyTable,
    expanded,
    key_table,
    openrlhf_offline,
    openrlhf_ppo,
    verl_ppo,
    verl_sft,
)
from isotrain.tools.imports.trl import TRAINERS

DOCS = Path(__file__).parents[3] / "docs" / "import-measurements.md"
TRL = tuple(key_table("trl", "common", kind) for kind in TRAINERS)
TABLES = (verl_ppo(), verl_sft(), openrlhf_ppo(), openrlhf_offline(), *TRL)


def rows(shared: Path, name: str) -> list[list[str]]:
    path = shared.parent / "import" / name
    if not path.is_file():
        pytest.skip(f"no {path.name} in the shared data")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line.split("\t") for line in lines[1:]]


def counts(rules: list[KeyRule]) -> str:
    kinds = Counter(rule.kind for rule in rules)
    return f"| {kinds['mapped']} | {kinds['no effect']} | {kinds['refused']} |"


def test_every_key_of_verl_has_a_rule_of_its_own(shared_data: Path) -> None:
    keys = [row[0] for row in rows(shared_data, "verl-keys.tsv")]
    rules = [verl_ppo().exact.get(key) or verl_sft().exact.get(key) for key in keys]
    assert [key for key, rule in zip(keys, rules, strict=True) if rule is None] == []
    line = f"| verl | {len(keys)} {counts([rule for rule in rules if rule])}"
    assert line in DOCS.read_text()


def test_every_flag_of_openrlhf_has_a_rule_of_its_own(shared_data: Path) -> None:
    table = {**openrlhf_offline().exact, **openrlhf_ppo().exact}
    flat = openrlhf_ppo().flat.keys() | openrlhf_offline().flat.keys()
    flags = rows(shared_data, "openrlhf-keys.tsv")
    keys = [row[0].removeprefix("(removed) ") for row in flags]
    assert [key for key in keys if key not in table] == []
    legacy = [name for row in flags for name in re.findall(r"\w+", re.sub(r"\([^)]*\)|<=[\d.]+", "", row[4]))]
    unknown = {name for name in legacy if name not in flat and name not in table}
    assert unknown == set()
    assert f"| OpenRLHF | {len(keys)} {counts([table[key] for key in keys])}" in DOCS.read_text()


@pytest.mark.parametrize("place", range(len(TABLES)))
def test_rules_name_fields_that_exist(place: int) -> None:
    """A section or a field; a rule without effect and a refusal say why."""
    names = {*all_names(Recipe)}
    for rule in (*TABLES[place].exact.values(), *TABLES[place].patterns):
        if rule.kind == "mapped":
            assert rule.field in names, rule.key
        else:
            assert rule.why, rule.key


@pytest.mark.parametrize("table", [openrlhf_ppo(), openrlhf_offline()])
def test_flat_names_lead_to_rules(table: KeyTable) -> None:
    keys = openrlhf_ppo().exact.keys() | openrlhf_offline().exact.keys()
    assert table.flat and [old for old, new in table.flat.items() if new not in keys] == []


@pytest.mark.parametrize("table", TABLES, ids=["verl", "verl sft", "openrlhf ppo", "openrlhf", *TRAINERS])
def test_no_key_below_a_refused_one_is_without_effect(table: KeyTable) -> None:
    """Patterns go in their order: `*._target_` alone has no effect."""
    refused = [rule.key for rule in table.patterns if rule.kind == "refused" and rule.key.endswith("*")]
    for pattern in refused:
        rule = table.find(pattern.rstrip("*").rstrip(".").replace("*", "x") + "._target_")
        assert rule is not None and rule.kind == "refused", pattern


def test_braces_stand_for_several_keys() -> None:
    assert expanded("a.{b,c}.{d,e}") == ["a.b.d", "a.b.e", "a.c.d", "a.c.e"]
