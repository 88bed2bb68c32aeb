"""Members of an envelope: each rounds otherwise, and in turn they compute otherwise."""

from __future__ import annotations

from isotrain.api import load_recipe
from isotrain.parity.members import member_settings


def test_what_they_vary() -> None:
    recipe = load_recipe("tiny-sft")
    found = member_settings(recipe, 8, ranks=True)
    assert [settings[0] for settings in found] == [f"model.perturbation={n}" for n in range(1, 9)]
    assert found[0][1:] == () and found[1][1:] == ("model.attention=padded",)
    assert found[2][1:] == ("data.tokens_per_micro_batch=1024",)
    assert "device.ranks=2" in found[3] and found[4][1:] == ()
    assert all("device.ranks=2" not in settings for settings in member_settings(recipe, 8, ranks=False))


def test_they_stay_recipes() -> None:
    """A pair must fit into a micro-batch, and what is small already is not made smaller."""
    for name in ("tiny-dpo", "tiny-sft", "tiny-grpo"):
        for settings in member_settings(load_recipe(name), 4, ranks=True):
            load_recipe(name, *settings)
    small = load_recipe("tiny-sft", "data.tokens_per_micro_batch=1024")
    assert not any(
        "tokens_per_micro_batch" in text for s in member_settings(small, 4, ranks=False) for text in s
    )
