"""Shares, waits and the named field, on steps whose answer is known by construction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import Span, write_spans
from isotrain.tools.profile.analyse import UNACCOUNTED, Profile, profile_of

Work = tuple[str, str, float, float]


def profiled(work: list[Work], end: float, leader: str = "controller", host: str = "a") -> list[Span]:
    return [
        Span("step", leader, "a", 0.0, end),
        *(Span(name, worker, host if "engine" in worker else "a", s, e) for name, worker, s, e in work),
    ]


def profile(tmp_path: Path, spans: list[Span]) -> Profile:
    return profile_of(RunDirectory(tmp_path), {3: spans})


def step(generating: float = 1.0, scoring: float = 0.5, saving: float = 0.5) -> tuple[list[Work], float]:
    """A synchronous step: two engines, of which one is half as fast; 2 s of learning, 0.25 s of nothing."""
    scored = generating + scoring
    learnt, sent = scored + 2.0, scored + 2.5
    end = sent + saving + 0.25
    return [
        ("wait_for_batch", "controller", 0.0, scored),
        ("generate", "rollout engine 0", 0.0, generating),
        ("generate", "rollout engine 1", 0.0, generating / 2),
        ("reward", "reward worker 0", generating / 2, scored),
        ("learn", "controller", scored, learnt),
        ("old_log_prob", "training rank 0", scored, scored + 0.5),
        ("update_actor", "training rank 0", scored + 0.5, learnt),
        ("update_weights", "controller", learnt, sent),
        ("send_weights", "training rank 0", learnt, sent),
        ("update_weights", "rollout engine 0", learnt, sent),
        ("update_weights", "rollout engine 1", learnt, sent),
        ("save", "controller", sent, sent + saving),
        ("save", "training rank 0", sent, sent + saving),
        ("write_checkpoint", "training rank 0", sent + saving, end),
    ], end


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    found = profile(tmp_path, profiled(*step()))
    assert sum(found.phases.values()) == pytest.approx(4.75) == pytest.approx(found.seconds)
    expected = {"generate": 1.0, "reward": 0.5, "old_log_prob": 0.5, "update_actor": 1.5}
    expected |= {"update_weights": 0.5, "save": 0.5, UNACCOUNTED: 0.25}
    assert found.phases == pytest.approx(expected)
    assert found.largest == "update_actor" and list(found.shares)[-1] == UNACCOUNTED


def test_who_waits_for_whom(tmp_path: Path) -> None:
    waits = profile(tmp_path, profiled(*step())).waits
    # Ranks: generation, rewards, and the moment at the end in which only a thread writes.
    ranks = {"rollout engines": 1.0, "reward workers": 0.5, "the controller": 0.25}
    assert {who: s for who, s in waits["training rank"].items() if s} == pytest.approx(ranks)
    # Of two engines one waits 0.5 s for the other; both wait for rewards, learning, saving.
    engines = {"other rollout engines": 0.25, "reward workers": 0.5, "training ranks": 2.5}
    found = {who: s for who, s in waits["rollout engine"].items() if s}
    assert found == pytest.approx(engines | {"the controller": 0.25})


@pytest.mark.parametrize(
    ("slow", "largest", "field"),
    [
        ({"generating": 9.0}, "generate", "rollout.engines"),
        ({"scoring": 9.0}, "reward", "reward.workers"),
        ({"saving": 9.0}, "save", "trainer.save_every"),
        ({}, "update_actor", "data.tokens_per_micro_batch"),
    ],
)
def test_the_slow_part_and_its_field_are_named(
    tmp_path: Path, slow: dict[str, float], largest: str, field: str
) -> None:
    found = profile(tmp_path, profiled(*step(**slow)))
    assert found.largest == largest and field in found.advice
    (line,) = [line for line in found.lines() if line.startswith("largest: ")]
    assert line.startswith(f"largest: {largest}, ") and ("no part stands out" in line) == (
        found.shares[largest] < 0.3
    )


def test_rewards_that_are_hidden_behind_generation_are_not_accused(tmp_path: Path) -> None:
    work, end = step(generating=5.0, scoring=0.0)
    assert profile(tmp_path, profiled(work, end)).phases.get("reward", 0.0) == 0.0


def test_ahead_of_training_engines_cost_only_the_wait(tmp_path: Path) -> None:
    """The engine generates all the time; the loop waits for a quarter of the step."""
    work = [
        ("wait_for_batch", "controller", 0.0, 1.0),
        ("generate", "rollout engine 0", 0.0, 4.0),
        ("learn", "controller", 1.0, 4.0),
        ("update_actor", "training rank 0", 1.0, 4.0),
    ]
    found = profile(tmp_path, profiled(work, 4.0))
    assert found.phases == pytest.approx({"generate": 1.0, "update_actor": 3.0})
    assert sum(found.waits["rollout engine"].values()) == 0.0


def test_ranks_without_a_controller(tmp_path: Path) -> None:
    rank, other = "training rank 0", "training rank 1"
    work = [("data", rank, 0.0, 3.0), ("update", rank, 3.0, 4.0), ("update", other, 0.0, 4.0)]
    spans = [*profiled(work, 4.0, leader=rank), Span("step", other, "a", 0.0, 4.0)]
    found = profile(tmp_path, spans)
    assert found.phases == pytest.approx({"data": 3.0, "update": 1.0}) and found.largest == "data"
    assert "ISOTRAIN_CACHE" in found.advice and not found.waits


def test_clocks_of_several_machines_are_mentioned(tmp_path: Path) -> None:
    work, end = step()
    assert "clock of one machine" in profile(tmp_path, profiled(work, end)).lines()[-1]
    assert "clocks of 2 machines" in profile(tmp_path, profiled(work, end, host="b")).lines()[-1]


def test_the_command(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    result = CliRunner().invoke(app, ["profile", str(tmp_path)])
    assert result.exit_code == 1 and "observe.profile.steps=[3,4]" in result.output
    write_spans(run, 3, "controller", profiled(*step()))
    write_spans(run, 4, "controller", profiled(*step(scoring=20.0)))
    result = CliRunner().invoke(app, ["profile", str(tmp_path), "--step", "3", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["largest"] == "update_actor"
    result = CliRunner().invoke(app, ["profile", str(tmp_path)])
    assert result.exit_code == 0 and "largest: reward" in result.output
    assert len(result.output.splitlines()) == 6, "five lines, and where the picture is"
    assert (run.plots / "timeline.png").read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["profile", str(tmp_path), "--step", "5"])
    assert result.exit_code == 1 and "no profile of step 5" in result.output
