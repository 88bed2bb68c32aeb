"""`isotrain parity compare` as people and programs see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from isotrain.cli.main import app


def log(path: Path, shift: float = 0.0, steps: int = 30) -> Path:
    """A verl console log."""
    lines = [
        f"(TaskRunner pid=7) step:{step} - actor/pg_loss:{0.5 / step + shift} - "
        f"critic/rewards/mean:{step / 40} - actor/grad_norm:{1 / step} - perf/throughput:{1000 * (1 + shift)}"
        for step in range(1, steps + 1)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", "compare", *map(str, arguments)], env={"COLUMNS": "120"})


def test_the_same_curves(tmp_path: Path) -> None:
    result = compare(log(tmp_path / "a.log"), log(tmp_path / "b.log", 1e-8))
    assert result.exit_code == 0, result.output
    accepted = "Accept: the runs end up alike, and the computation is the same.\nOutcome: equivalent. "
    assert result.output.startswith(accepted) and "all 30 steps" in result.output
    assert "\nComputation: the same. the curves agree" in result.output
    assert "P3  not run" in result.output
    for words in ("actor/pg_loss", "critic/rewards/mean", "holds", "of at most 2 hundredths", "throughput"):
        assert words in result.output, result.output


def test_a_broken_rule_makes_runs_different(tmp_path: Path) -> None:
    result = compare(log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.03))
    assert result.exit_code == 1 and "BROKEN" in result.output
    assert result.output.startswith(
        "Reject: the runs end up apart, and the computations differ.\n"
        "Outcome: different. actor/pg_loss is 0.03 higher on average (95 % interval"
    )
    assert "more than the margin of 0.02" in result.output and "Computation: different." in result.output
    result = compare(
        log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.03), "--metric", "critic/rewards/mean"
    )
    assert result.exit_code == 0


def test_other_lengths_are_in_the_first_sentence(tmp_path: Path) -> None:
    result = compare(log(tmp_path / "a.log"), log(tmp_path / "b.log", steps=20))
    assert result.exit_code == 3
    assert "step 20" in result.output.splitlines()[1]
    allowed = compare(tmp_path / "a.log", tmp_path / "b.log", "--allow", "steps")
    assert allowed.exit_code == 0
    assert "over 20 steps: the reference has 30, the candidate 20" in allowed.output.splitlines()[1]


def test_which_answer_the_exit_code_gives(tmp_path: Path) -> None:
    """A bias of 0.001 is nothing that matters, and another computation."""
    pair = (log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.001))
    assert compare(*pair).exit_code == compare(*pair, "--require", "outcome").exit_code == 0
    assert compare(*pair, "--require", "computation").exit_code == 1
    assert compare(*pair, "--margin", "loss=0.0005").exit_code == 1
    assert compare(*pair, "--require", "everything").exit_code == 2


def test_json_and_the_reference(tmp_path: Path) -> None:
    one, other = log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.001)
    told = json.loads(compare(one, other, "--json").output)
    swapped = json.loads(compare(one, other, "--reference", other, "--json").output)
    told, swapped = told["comparison"], swapped["comparison"]
    assert told["curves"]["actor/pg_loss"]["signed_mean"] == pytest.approx(0.001)
    assert swapped["curves"]["actor/pg_loss"]["signed_mean"] == pytest.approx(-0.001)
    assert len(told["reference"]["sha256"]) == 1


def test_curves_alone_may_leave_it_open_until_reruns_decide(tmp_path: Path) -> None:
    """Reruns of the reference that lie as far away make it the same, closer ones make it different."""
    pair = (log(tmp_path / "a.log"), log(tmp_path / "b.log", 4e-5), "--require", "computation")
    result = compare(*pair)
    assert result.exit_code == 3 and "three or more runs of the reference" in result.output
    for shift, code in ((4e-5, 0), (1e-6, 1)):
        reruns = [log(tmp_path / f"{sign * shift}.log", sign * shift) for sign in (-1, 1, 0.5, -0.5)]
        result = compare(*pair, *(word for rerun in reruns for word in ("--rerun", rerun)))
        assert result.exit_code == code, result.output


def test_pairs_of_seeds(tmp_path: Path) -> None:
    seeds = [
        (log(tmp_path / f"a{n}.log", n / 1e4), log(tmp_path / f"b{n}.log", n / 1e4)) for n in range(1, 4)
    ]
    pairs = [word for pair in seeds for word in ("--pair", *pair)]
    result = compare(log(tmp_path / "a.log"), log(tmp_path / "b.log"), "--free", *pairs)
    assert result.exit_code == 0 and "-0.000223 to 0.000223" in result.output, result.output


def test_reruns_are_whole_runs_of_their_own(tmp_path: Path) -> None:
    one, other = log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.001)
    whole = [log(tmp_path / f"m{n}.log", n * 1e-4) for n in range(1, 4)]

    def told(*members: Path) -> Result:
        return compare(one, other, *(word for member in members for word in ("--rerun", member)))

    assert told(*whole).exit_code in (0, 1)
    for members, words in (
        ((*whole, log(tmp_path / "short.log", steps=3)), "is not there at each of the reference's steps"),
        ((*whole, whole[0]), "names a run twice"),
        ((*whole, one), "names a run twice, or the reference"),
    ):
        result = told(*members)
        assert result.exit_code == 2 and words in result.output, result.output


def test_writes_the_report(tmp_path: Path) -> None:
    pair = (log(tmp_path / "a.log"), log(tmp_path / "b.log", 1e-8))
    result = compare(*pair, "--report", tmp_path / "report")
    assert result.exit_code == 0 and "report.html" in result.output
    assert json.loads((tmp_path / "report" / "verdict.json").read_text())["computation"]["verdict"] == "same"


def test_an_error_that_nobody_foresaw_is_not_called_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr("isotrain.tools.parity.protocol.verdict_on", fail)
    result = compare(log(tmp_path / "a.log"), log(tmp_path / "b.log"))
    assert result.exit_code == 2 and "no such luck" in result.output, result.output


def test_nothing_is_cut_at_80_columns(tmp_path: Path) -> None:
    pair = (log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.03))
    arguments = ["parity", "compare", *map(str, pair)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.output, result.output
    assert "critic/rewards/mean: equivalent, margin 0.04" in result.output
    rows = [line for line in result.output.splitlines() if line.startswith(("whole run", "last quarter"))]
    assert len(rows) == 4 and max(map(len, rows)) <= 80 and all(" to " in row for row in rows[:1])


def test_mistakes_end_with_code_2(tmp_path: Path) -> None:
    one = log(tmp_path / "a.log")
    result = compare(one, tmp_path / "nowhere.log")
    assert result.exit_code == 2 and "nowhere.log" in result.output and "Traceback" not in result.output
    assert "--reference c: write" in compare(one, one, "--reference", "c").output
    assert "what can be allowed" in compare(one, one, "--allow", "nan").output


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:1] = ['parity', 'compare'];"
        "from isotrain.cli.main import main; main()"
    )
    pair = [str(log(tmp_path / name)) for name in ("a.log", "b.log")]
    done = subprocess.run([sys.executable, "-c", code, *pair], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_metric_with_another_name(tmp_path: Path) -> None:
    one = log(tmp_path / "a.log")
    other = tmp_path / "b.csv"
    other.write_text("step,loss\n" + "".join(f"{s},{0.5 / s}\n" for s in range(1, 31)))
    assert compare(one, other, "--metric", "actor/pg_loss=loss").exit_code == 0
    result = compare(one, other, "--metric", "actor/pg_los=loss")
    assert result.exit_code == 2 and "did you mean" in result.output


def test_an_acceptance_rule_and_its_tables(tmp_path: Path) -> None:
    pair = (log(tmp_path / "a.log"), log(tmp_path / "b.log"), "--rule", "verl-ascend-nightly")
    result = compare(*pair, "--report", tmp_path / "report")
    assert result.exit_code == 3 and "### Acceptance: verl-ascend-nightly" in result.output
    assert "not in the logs" in result.output and "达标" in result.output
    assert {path.name for path in (tmp_path / "report").glob("*.md")} == {
        "acceptance.md",
        "acceptance.zh.md",
        "summary.md",
        "summary.zh.md",
    }
    slower = compare(pair[0], log(tmp_path / "c.log", -0.2), *pair[2:])
    assert slower.exit_code == 1 and "**broken**" in slower.output
    assert "there are verl-ascend-nightly" in compare(*pair[:2], "--rule", "none").output
    assert "--devices A100: write" in compare(*pair, "--devices", "A100").output


def test_a_resumed_log_is_noted(tmp_path: Path) -> None:
    resumed = log(tmp_path / "b.log")
    lines = resumed.read_text().splitlines()
    resumed.write_text("\n".join([*lines[:20], *lines[15:]]) + "\n")
    result = compare(log(tmp_path / "a.log"), resumed)
    assert result.exit_code == 0 and "resumed" in result.output


def test_a_package_that_is_missing_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 says `different`, 3 `inconclusive`: an error is neither."""
    pair = (log(tmp_path / "a.log"), log(tmp_path / "b.log"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = compare(*pair, "--report", tmp_path / "report")
    assert result.exit_code == 2 and "matplotlib" in result.output, result.output
