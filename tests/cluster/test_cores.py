"""Workers that bind themselves to cores are noticed, and those that share them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isotrain.cluster.cores import bound_cores, core_list, cores_by_machine, parse_cores, shared_cores


@pytest.mark.parametrize(
    ("cores", "text"), [(set(), ""), ({3}, "3"), ({0, 1, 2, 8}, "0-2,8"), ({5, 7, 8}, "5,7-8")]
)
def test_lists_are_written_as_linux_does(cores: set[int], text: str) -> None:
    assert core_list(cores) == text and parse_cores(text) == cores


def test_a_child_that_binds_itself_is_seen() -> None:
    """vLLM's workers are processes of their own where an engine has several devices."""
    before = os.sched_getaffinity(0)
    assert bound_cores(before) == set(), "nobody is bound"
    core = max(before)
    script = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        bound = bound_cores(before)
        child.stdin.close()
    assert bound == ({core} if before != {core} else set())


@pytest.mark.parametrize(
    ("cores", "machines", "shared"),
    [
        (["0-3", "4-7"], "aa", ""),
        (["0-3", "2-7"], "aa", "2-3"),
        (["0-3", "0-3"], "ab", ""),
        (["", "0-3"], "aa", ""),
        (["", ""], "aa", ""),
        (["0-1", "2-3", "0-1", "1-3"], "abab", "0-1"),
    ],
)
def test_only_workers_of_one_machine_can_share(cores: list[str], machines: str, shared: str) -> None:
    assert shared_cores({"cores": cores_by_machine(cores, machines)}) == shared


def test_nothing_is_recorded_where_nobody_is_bound() -> None:
    assert cores_by_machine(["", ""], "aa") == "" and shared_cores({}) == ""
