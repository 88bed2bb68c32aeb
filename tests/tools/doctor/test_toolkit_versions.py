"""Versions of drivers and toolkits in order."""

from __future__ import annotations

import itertools

import pytest

from isotrain.tools.doctor.matrix import final, order, satisfies


@pytest.mark.parametrize(
    "ascending",
    [
        "8.0.RC3 8.0.0 8.1.RC1.alpha001 8.1.RC1 8.1.0 8.2.RC1 8.3.RC2 8.5.0 8.5.1 9.0.0 9.1.0-beta.1 9.1.0",
        "23.0.5 24.1.rc1.b030 24.1.rc3 25.2.0 25.3.rc1 25.3.rc1.2 25.5.t3.b001 25.5.0 25.5.2 26.0.rc1",
    ],
)
def test_previews_sort_before_releases(ascending: str) -> None:
    versions = ascending.split()
    keys = [order(version) for version in versions]
    assert all(a < b for a, b in itertools.pairwise(keys))


def test_spelling_and_builds_do_not_count() -> None:
    assert order("25.3.RC1") == order("25.3.rc1")
    assert order("24.1.rc1.b030") == order("24.1.rc1")
    assert final("8.1.RC1.alpha001") == "8.1.RC1" and final("9.1.0-beta.1") == "9.1.0"


def test_conditions_compare_previews_and_releases() -> None:
    assert satisfies("8.3.RC2", ">=8.3.RC1,<9") and not satisfies("9.0.0", ">=8.3.RC1,<9")
    assert satisfies("8.1.RC1", "8.1.RC1") and not satisfies("8.1.RC1.alpha001", "8.1.RC1")
    assert satisfies("25.2.0", "!=25.3.rc1")
