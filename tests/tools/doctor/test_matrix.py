"""The support matrix and the rules as data."""

from __future__ import annotations

from pathlib import Path

import pytest
import stacks_page
from packaging.version import Version
from pydantic import ValidationError

from isotrain.tools.doctor.checks.versions import requirements
from isotrain.tools.doctor.matrix import Stack, fits, matrix, order, specifier
from isotrain.tools.doctor.nearest import carries_isotrain
from isotrain.tools.doctor.rules import rules

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "stacks.md").read_text() == stacks_page.render(), (
        "run `python docs/tools/stacks_page.py docs/stacks.md`"
    )


def test_nothing_of_an_accelerator_is_called_verified() -> None:
    """Until a certificate from such hardware exists."""
    assert {stack.device for stack in matrix().stacks if stack.status == "verified"} == {"cpu"}


def test_every_stack_names_its_parts() -> None:
    names = [stack.name for stack in matrix().stacks]
    assert len(set(names)) == len(names)
    for stack in matrix().stacks:
        assert stack.source and "torch" in stack.packages
        if stack.device == "npu":
            torch, plugin = Version(stack.packages["torch"]), Version(stack.packages["torch-npu"])
            assert torch.release == plugin.release, stack.name


def test_toolkits_are_in_order() -> None:
    toolkits = list(matrix().torch_npu_of_cann)
    assert toolkits == sorted(toolkits, key=order)


def test_stacks_with_an_old_torch_carry_no_isotrain() -> None:
    carried = {stack.name for stack in matrix().stacks if carries_isotrain(stack)}
    assert "verl, 2026" in carried and "OpenRLHF 0.7.5" not in carried


def test_rows_of_isotrain_are_within_its_own_bounds() -> None:
    bounds = {one.name: one.specifier for _, one in requirements()}
    own = [stack for stack in matrix().stacks if stack.name.startswith("isotrain on")]
    ranges = [
        (stack.name, name, text)
        for stack in own
        for name, text in stack.packages.items()
        if not text[0].isdigit()
    ]
    assert len(own) > 1 and len(ranges) > 1
    for stack_name, name, text in ranges:
        assert specifier(text) == bounds[name], (stack_name, name)


def test_builds_of_one_version_are_the_same() -> None:
    assert fits("2.10.0+cpu", "2.10.0") and fits("2.5.1rc1", "2.5.1.RC1") and not fits("2.5.1", "2.5.1rc1")
    with pytest.raises(ValidationError, match="Invalid version"):
        Stack(name="x", device="cpu", packages={"torch": "new"}, status="verified", source="y")


def test_rules_have_different_names() -> None:
    names = [rule.id for rule in rules()]
    assert len(set(names)) == len(names)


def test_every_complaint_has_a_finding() -> None:
    """Number 3, the order of device masks, is a check of its own: `mask-out-of-order`."""
    assert {rule.complaint for rule in rules()} - {None} == set(range(1, 16)) - {3}
