"""Benchmarks: `--quick` runs and says what it has measured; a line of results after each turn."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bench
import mutants
import pytest

TESTS = Path(__file__).parent
BENCHMARKS = TESTS.parent / "benchmarks"
SCRIPTS = [path for path in BENCHMARKS.glob("*.py") if "def main()" in path.read_text()]

SCRIPT = """
import bench
from turns import Turns, take_turns

def tell(responses):
    turns = len(responses["a"])
    assert turns == len(responses["b"])
    bench.report("script", turns, goal=1.0, met=True, rows=[turn["rows"][0]["x"] for turn in responses["b"]])

parser = bench.Options(__doc__, turns=2)
parser.add_argument("--turns", type=int, default=3)
parser.add_argument("--side")
options = parser.read()
if options.side:
    turns = Turns(1)
    for x in range(options.turns + 2):
        turns.after_step(x=x)
else:
    take_turns(["a", "b"], options.turns, tell)
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_options_come_from_the_helper(script: Path) -> None:
    text = script.read_text()
    assert "Options(__doc__" in text and "parser.read()" in text and "ArgumentParser" not in text


@pytest.mark.parametrize(
    ("arguments", "turns"), [((), 3), (("--quick",), 2), (("--quick", "--turns", "1"), 1)]
)
def test_a_line_after_each_turn(tmp_path: Path, arguments: tuple[str, ...], turns: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["ratio"] for line in lines] == list(range(1, turns + 1)), done.stderr
    # The first turn warms up.
    assert lines[-1]["rows"] == list(range(1, turns + 1))
    assert all(line.get("quick", False) == ("--quick" in arguments) for line in lines)


def test_sides_that_need_the_same_model_build_it_once(tmp_path: Path) -> None:
    """All sides of a benchmark start at the same time; on a new machine none finds the model in the cache."""
    program = """
import sys, time
from pathlib import Path
from smollm2 import built_once

def build(directory):
    (directory / "config.json").write_text("{}")
    time.sleep(0.5)  # a side that takes the directory now has a model without weights
    (directory / "weights").write_text(sys.argv[2])
    print("built", flush=True)

target = built_once(Path(sys.argv[1]), build)
assert (target / "weights").read_text() in "abc"
"""
    target = tmp_path / "models" / "model"
    left_behind = tmp_path / "models" / ".model.partial"  # of a side that was killed
    left_behind.mkdir(parents=True)
    (left_behind / "damaged").touch()
    sides = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(target), side],
            env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in "abc"
    ]
    printed = [side.communicate(timeout=60)[0] for side in sides]
    assert [side.returncode for side in sides] == [0, 0, 0]
    assert sorted(printed) == ["", "", "built\n"]
    assert {path.name for path in target.iterdir()} == {"config.json", "weights"}
    assert not left_behind.exists()


def test_a_single_turn_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    bench.report("one", 1.6e-05, 1.0, True, ratios=bench.spread([1.6e-05]), step_s={"a": bench.spread([2.0])})
    bench.report("two", 1.5, 2.5, True, ratios=bench.spread([1.0, 2.0]))
    bench.report("noisy", 1.5, 1.4, False, ratios=bench.spread([1.0, 2.0]))
    one, two, noisy = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one["turns"] == 1 and one["note"].startswith("one turn") and "ratios" not in one
    assert one["ratio"] == 1.6e-05 and one["step_s"] == {"a": {"value": 2.0, "count": 1}}
    assert two["turns"] == 2 and "note" not in two
    assert two["ratios"] == {"median": 1.5, "min": 1.0, "max": 2.0, "count": 2}
    assert noisy["note"].startswith("inconclusive")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_no_number_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        bench.report("name", 1.0, 1.0, True, seconds=bench.spread([value]))


class Case(NamedTuple):
    keys: tuple[str, ...]
    """Of the last line, beside those of `bench.report`."""
    met: bool = False
    """Whether it must meet its goal: what it compares is exact, however busy the machine is."""
    arguments: tuple[str, ...] = ()
    simulated_npu: bool = False
    minutes: float = 10.0
    rows: bool = False
    """Whether it prints a table in place of a ratio."""


PREFERENCE = ("ratio_float32", "losses_agree", "step_s")
CASES = {
    "asynchrony": Case(("ratio_in_flight", "ratio_colocated", "rewards", "rewards_agree"), minutes=20),
    "chaos": Case(("faults", "responses", "metrics", "left"), met=True, minutes=30),
    "checkpoint_writing": Case(("one_pass_s", "read_back_s", "host_memory")),
    "compiled_layers": Case(("first_seconds",)),
    "controller": Case(("seconds", "parts_s", "bytes_a_trajectory", "calls", "step_s")),
    "evaluate_overhead": Case(("scores_equal", "seconds", "responses"), minutes=15),
    "episodes": Case(("seconds_overlapped", "idle_in_rounds"), minutes=15),
    "distillation_memory": Case(("gib", "matrix_gib", "means_agree")),
    "dispatch_budget": Case(
        ("weights", "training", "sampling", "switch"), met=True, simulated_npu=True, minutes=20
    ),
    "fused": Case(("max_loss_difference", "first_loss", "last_loss"), met=True, simulated_npu=True),
    "gsm8k_format": Case(("correct", "count")),
    "import_examples": Case(
        ("scripts", "same"), met=True, arguments=("--scripts", str(TESTS / "tools" / "imports" / "scripts"))
    ),
    "layer_trace_overhead": Case(("tested", "afterwards", "bytes_per_step")),
    "long_contexts": Case(("ratios", "peak_mib", "overhead"), met=True, simulated_npu=True, minutes=15),
    "muon": Case(("steps", "validation_loss")),
    "mutants": Case(("killed",), arguments=("src/isotrain/algorithms/kl.py", "tests/algorithms/test_kl.py")),
    "parity_baseline": Case(("reruns", "answers", "bytes"), rows=True),
    "parity_calibration": Case(("designed", "worst"), rows=True),
    "mismatch_causes": Case(("named", "injected", "false_accusations"), met=True, minutes=15),
    "mismatch_default": Case(("cause", "nats", "reward", "survived"), rows=True),
    "mismatch_watch": Case(("difference", "own_s", "step_s")),
    "parity_honest": Case(("pairs", "called", "different_95", "left_out", "bugs"), met=True, minutes=15),
    "parity_length": Case(("equivalent", "false_alarms", "different", "missed"), rows=True),
    "parity_power": Case(("calls", "without_verdict", "training_s"), minutes=20),
    "parity_truth": Case(("honest_right", "mistakes_right"), met=True, minutes=15),
    "plan_accuracy": Case(("cases",), met=True, simulated_npu=True),
    "plan_sizes": Case(("plans",)),
    "record_overhead": Case(("plain_step_s", "recording_step_s", "record_s"), minutes=15),
    "rollout_overhead": Case(("responses_equal", "seconds", "tokens"), minutes=15),
    "router_replay": Case(("disagreement", "gap_with", "gap_without")),
    "sandbox": Case(("sandbox_ms", "plain_ms", "per_second")),
    "simulated_scale": Case(("figures", "free_figures", "by_source")),
    "startup": Case(("processor_s", "wall_s", "slowest")),
    "stale_weights": Case(("lost", "honest", "value")),
    "supervised_overhead": Case(("losses_equal", "bare_step_s", "isotrain_step_s"), minutes=15),
    "truth_memory": Case(("peak_gb", "plan_gb", "plan_7b_gb"), met=True),
    "versions": Case(("resumed_metrics_equal", "by_recipe", "step_s"), minutes=15),
    "versus_trl sft": Case(("losses_agree", "ratio_packing"), arguments=("--algorithm", "sft"), minutes=20),
    "versus_trl dpo": Case(PREFERENCE, arguments=("--algorithm", "dpo"), minutes=20),
    "versus_trl kto": Case(PREFERENCE, arguments=("--algorithm", "kto"), minutes=20),
    "versus_trl rm": Case(PREFERENCE, arguments=("--algorithm", "rm"), minutes=20),
    "versus_trl grpo": Case(("step_s", "grad_norm"), arguments=("--algorithm", "grpo"), minutes=20),
    "vocabulary_rounding": Case(("errors",)),
    "weight_deltas": Case(("shares", "bytes_over_all"), met=True, minutes=15),
    "weight_streams": Case(("bucket", "broadcast", "ipc"), met=True, simulated_npu=True),
    "weight_sync": Case(("threads_1",)),
    "work_stealing": Case(("seconds", "engines", "prompts"), minutes=15),
}
# Wherever one of these is told, it holds whatever else the machine does.
ALWAYS = ("losses_equal", "losses_agree", "responses_equal", "scores_equal", "means_agree")


def test_every_benchmark_has_a_case() -> None:
    assert {name.split()[0] for name in CASES} == {script.stem for script in SCRIPTS}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", CASES)
def test_quick_runs_and_says_what_it_has_measured(name: str) -> None:
    case, script = CASES[name], BENCHMARKS / f"{name.split()[0]}.py"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if case.simulated_npu:
        environment["PYTHONPATH"] = str(BENCHMARKS.parent / "tests" / "device" / "npusim" / "site")
    done = subprocess.run(
        [sys.executable, str(script), "--quick", *case.arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 * case.minutes,
    )
    if "no GSM8K at" in done.stderr or "install the weights first" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines and all(line["quick"] for line in lines), done.stdout[-2000:]
    last = lines[-1]
    print(json.dumps(last))  # `-rP` shows it
    assert set(case.keys) <= set(last) and not any(last[key] in (None, {}, []) for key in case.keys), last
    assert all(map(math.isfinite, numbers(lines))) and any(numbers(last))
    assert all(last.get(key, True) is True for key in ALWAYS)
    if not case.rows:
        assert {"name", "ratio", "goal", "met"} <= set(last)
        assert last["met"] is True or not case.met, last


def test_mutants_change_what_a_function_does_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "LIMIT = 3\n\n\ndef f(a, b=2):\n    assert a != 7\n    found = []\n    found.append(a)\n"
        "    return max(a, b) if not a < b else -len(found) + a\n"
    )
    namespace: dict[str, Any] = {}
    results = {}
    for mutant in mutants.mutants(source):
        exec(mutant.code, namespace)
        results[mutant.line, mutant.operator] = [namespace["f"](1), namespace["f"](2), namespace["f"](5)]
    assert results == {
        (7, "call deleted"): [1, 2, 5],
        (8, "max -> min"): [0, 2, 2],
        (8, "Lt -> LtE"): [0, 1, 5],
        (8, "Not removed"): [2, 1, 4],
        (8, "Add -> Sub"): [-2, 2, 5],
        (8, "USub removed"): [2, 2, 5],
    }
