"""Recipes that were resolved by different versions of isotrain."""

from __future__ import annotations

from isotrain.recipe.difference import changes, version_changes


def test_a_field_that_an_older_version_did_not_have() -> None:
    older = {"rollout": {"n": 8}}
    newer = {"rollout": {"n": 8, "in_flight": False}}
    assert changes(older, newer) == ["rollout.in_flight: (absent) -> false"]
    assert version_changes(older, newer) == version_changes(newer, older) == []


def test_one_that_is_used_still_counts() -> None:
    used = {"rollout": {"n": 8, "in_flight": True}}
    assert version_changes({"rollout": {"n": 8}}, used) == ["rollout.in_flight: (absent) -> true"]
    assert version_changes({"rollout": {"n": 4}}, {"rollout": {}}) == ["rollout.n: 4 -> (absent)"]


def test_a_section_that_is_not_used_means_the_same_as_none() -> None:
    older, newer = {"reward": {"gsm8k": {}}}, {"reward": {"gsm8k": {}, "code": None}}
    assert changes(older, newer) == ["reward.code: (absent) -> null"]
    assert version_changes(older, newer) == version_changes(newer, older) == []
    used = {"reward": {"gsm8k": {}, "code": {"score": "all"}}}
    assert version_changes(older, used) == ['reward.code: (absent) -> {"score": "all"}']
    assert version_changes(newer, used) == ['reward.code: null -> {"score": "all"}']
