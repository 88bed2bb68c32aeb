"""Every key of the tables of keys by frequency is handled by name, and the counts that the docs state."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from isotrain.recipe.names import all_names
from isotrain.recipe.schema import Recipe
from isotrain.tools.imports import openrlhf_keys, verl_keys, verl_sft
from isotrain.tools.imports.rules import KeyRule, KeyTable, expanded

DOCS = Path(__file__).parents[3] / "docs" / "import.md"
TABLES = (verl_keys.TABLE, verl_sft.TABLE, openrlhf_keys.PPO_TABLE, openrlhf_keys.OFFLINE_TABLE)


def rows(shared: Path, name: str) -> list[list[str]]:
    path = shared.parent / "import" / name
    if not path.is_file():
        pytest.skip(f"no {path.name} in the shared data")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line.split("\t") for line in lines[1:]]


def counts(rules: list[KeyRule]) -> str:
    found = Counter(rule.kind for rule in rules)
    return f"| {found['mapped']} | {found['no effect']} | {found['refused']} |"


def test_every_key_of_verl_has_a_rule_of_its_own(shared_data: Path) -> None:
    keys = [row[0] for row in rows(shared_data, "verl-keys.tsv")]
    found = [verl_keys.TABLE.exact.get(key) or verl_sft.TABLE.exact.get(key) for key in keys]
    assert [key for key, rule in zip(keys, found, strict=True) if rule is None] == []
    line = f"| verl | {len(keys)} {counts([rule for rule in found if rule])}"
    assert line in DOCS.read_text()


def test_every_flag_of_openrlhf_has_a_rule_of_its_own(shared_data: Path) -> None:
    table = {**openrlhf_keys.OFFLINE_TABLE.exact, **openrlhf_keys.PPO_TABLE.exact}
    flat = openrlhf_keys.FLAT.keys() | openrlhf_keys.FLAT_PPO.keys() | openrlhf_keys.FLAT_OFFLINE.keys()
    found = rows(shared_data, "openrlhf-keys.tsv")
    keys = [row[0].removeprefix("(removed) ") for row in found]
    assert [key for key in keys if key not in table] == []
    legacy = [name for row in found for name in re.findall(r"\w+", re.sub(r"\([^)]*\)|<=[\d.]+", "", row[4]))]
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


@pytest.mark.parametrize("flat", [openrlhf_keys.FLAT, openrlhf_keys.FLAT_PPO, openrlhf_keys.FLAT_OFFLINE])
def test_flat_names_lead_to_rules(flat: dict[str, str]) -> None:
    keys = openrlhf_keys.PPO_TABLE.exact.keys() | openrlhf_keys.OFFLINE_TABLE.exact.keys()
    assert [old for old, new in flat.items() if new not in keys] == []


@pytest.mark.parametrize("table", TABLES, ids=["verl", "verl sft", "openrlhf ppo", "openrlhf"])
def test_no_key_below_a_refused_one_is_without_effect(table: KeyTable) -> None:
    """Patterns go in their order: `*._target_` alone has no effect."""
    refused = [rule.key for rule in table.patterns if rule.kind == "refused" and rule.key.endswith("*")]
    for pattern in refused:
        rule = table.find(pattern.rstrip("*").rstrip(".").replace("*", "x") + "._target_")
        assert rule is not None and rule.kind == "refused", pattern


def test_braces_stand_for_several_keys() -> None:
    assert expanded("a.{b,c}.{d,e}") == ["a.b.d", "a.b.e", "a.c.d", "a.c.e"]
