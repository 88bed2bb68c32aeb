"""The held-out mistakes and the plan of the benchmark that runs them, without running any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from power.plan import HONEST, KINDS, controls, members, pairs, references, servers

from mutations import MUTATIONS, SITE
from mutations.held_out import HELD_OUT
from support import needs_vllm

sys.path.append(str(SITE))

from held_out_patches import PATCHES

WORK = Path("work")


def test_each_has_its_patch_and_none_was_there_before() -> None:
    names = [bug.name for bug in HELD_OUT]
    assert len(names) == len(set(names)) >= 24 and set(names) == set(PATCHES)
    assert not set(names) & {mutation.name for mutation in MUTATIONS}


APPLY = """
import importlib, os, sys, traceback
import held_out_patches, mutation_patches
from isotrain.engine import optimizer
from isotrain.trainers import build
failed = []
for name, patches in (held_out_patches.PATCHES | mutation_patches.PATCHES).items():
    modules = [(importlib.import_module(module), patch) for module, patch in patches.items()]
    if child := os.fork():  # what one changes is gone with its process
        failed += [name] if os.waitpid(child, 0)[1] else []
    else:
        try:
            for module, patch in modules:
                patch(module)
            for owner in (optimizer, build):  # as the trainer calls it: a mistake trains, it does not raise
                owner.make_schedule("cosine", 1e-3, 10, 0.1, 0.0, None)(1)
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
print(failed)
"""


@needs_vllm
@pytest.mark.heavy
def test_each_finds_what_it_changes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", APPLY],
        env={**os.environ, "PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1", "ISOTRAIN_LATE_STEP": "5"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


def test_each_is_planned_and_every_run_has_a_name_of_its_own() -> None:
    found = pairs(WORK)
    assert {pair.name for pair in found if pair.truth == "mutation"} == {bug.name for bug in HELD_OUT}
    jobs = [*references(WORK), *controls(WORK), *(pair.job for pair in found)]
    jobs += [job for kind in KINDS for job in members(kind, WORK)]
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.server for job in jobs} <= servers().keys()


def test_what_a_pair_is_held_against_is_run() -> None:
    known = {job.name for job in (*references(WORK), *controls(WORK))} | {p.job.name for p in pairs(WORK)}
    for pair in pairs(WORK):
        assert {pair.reference, pair.control} <= known | {""}
        assert bool(pair.reference) == ("sampler" not in pair.evidence)


def test_both_types_and_all_families_have_honest_pairs_and_mistakes() -> None:
    for truth in ("honest", "mutation"):
        found = {(p.kind.family, p.kind.dtype) for p in pairs(WORK) if p.truth == truth}
        assert found == {(kind.family, kind.dtype) for kind in KINDS}
    assert {algorithm for algorithm, _ in HONEST} == {"sft", "dpo", "replay", "free"}
