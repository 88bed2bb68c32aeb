"""The chaos benchmark's own judgement: it must see what a run under faults could get wrong."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import chaos_faults
import numpy as np
import pytest
from chaos_checks import compare, responses
from chaos_faults import Faults, Processes, SmallDisk

from isotrain.data.record import Marks, Recorded, step_file, write_trajectories
from isotrain.data.trajectory import Trajectory

BATCH, N = 2, 2


def write_run(output: Path, steps: dict[int, list[tuple[int, int]]], **metrics: float) -> Path:
    """With these responses, as prompt index and number, learnt from in each step."""
    for step, learnt in steps.items():
        records = [
            Recorded(
                Trajectory(
                    row=0,
                    prompt_index=prompt,
                    sample=sample,
                    seed=0,
                    prompt_length=1,
                    tokens_T=np.ones(2, np.int32),
                    mask_N=np.ones(1, np.bool_),
                    logp_N=np.zeros(1, np.float32),
                    version_N=np.zeros(1, np.int32),
                    finished=True,
                ),
                Marks(0.0, {}, None, "", None, 0.0),
                None,
            )
            for prompt, sample in learnt
        ]
        write_trajectories(step_file(output / "trajectories", step, 0), records)
    rows = [{"step": step, "rollout/staleness/max": 0.0, "timing_s/step": 1.0, **metrics} for step in steps]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return output


GOOD = {1: [(0, 0), (0, 1), (1, 0), (1, 1)], 2: [(2, 0), (2, 1), (3, 0), (3, 1)]}


@pytest.mark.parametrize(
    ("second", "lost", "doubled"),
    [
        (GOOD[2], 0, 0),
        (GOOD[2][:3], 1, 0),
        ([*GOOD[2], (3, 1)], 0, 1),
        ([*GOOD[2][:3], (1, 1)], 1, 1),  # one of the first step again, in the place of another
    ],
)
def test_lost_and_doubled_responses_are_counted(
    tmp_path: Path, second: list[tuple[int, int]], lost: int, doubled: int
) -> None:
    found = responses(write_run(tmp_path, {**GOOD, 2: second}), 2, BATCH, N, staleness=0)
    assert (found["expected"], found["lost"], found["doubled"], found["too_old"]) == (8, lost, doubled, 0)


def test_metrics_are_compared_but_for_times(tmp_path: Path) -> None:
    wild = write_run(tmp_path / "wild", GOOD, **{"actor/pg_loss": 0.5, "perf/throughput": 1.0})
    calm = write_run(tmp_path / "calm", GOOD, **{"actor/pg_loss": 0.5, "perf/throughput": 2.0})
    assert compare(wild, calm, 2)["different"] == 0
    other = write_run(tmp_path / "other", GOOD, **{"actor/pg_loss": 0.75})
    found = compare(wild, other, 2)
    assert (found["different"], found["first_step"], found["largest"]) == (2, 1, {"actor/pg_loss": 0.25})


def test_processes_are_found_by_a_variable_and_by_its_session() -> None:
    """A child that hides the variable, as a process title can, belongs to the run as well."""
    mark = f"CHAOS_TEST={os.getpid()}"
    processes = Processes(mark)
    script = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={})\n"
        "print('started', flush=True)\ntime.sleep(600)\n"
    )
    name, _, value = mark.partition("=")
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, name: value},
        start_new_session=True,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline()
        try:
            found = {process.pid for process in processes.all()}
            assert parent.pid in found and len(found) == 2
            parent.kill()
            parent.wait()
            assert len(processes.all()) == 1  # the child, whose parent is gone
        finally:
            processes.kill_all()


def test_every_kind_of_fault_comes_as_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chaos_faults.subprocess, "run", lambda *_, **__: Refused())
    disk = SmallDisk(tmp_path / "disk", 1)
    assert disk.complaint == "not permitted"
    faults = Faults(Processes("nobody=1"), disk, 1.0, 2.0, random.Random(0))
    monkeypatch.setattr(Faults, "victims", lambda *_: ["someone"])
    kinds = faults.kinds()
    assert "full disk" not in kinds
    drawn = [faults.next_kind(1) for _ in range(3 * len(kinds))]
    assert sorted(map(str, drawn)) == sorted([*kinds] * 3)


class Refused:
    """What `mount` says to a user who may not."""

    returncode, stderr = 1, "not permitted\n"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)
