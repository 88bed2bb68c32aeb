"""A nightly run against a file of reruns: when it is green, and what a green must never hide."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from isotrain.cli.main import app
from isotrain.errors import DataError
from isotrain.observe.metrics import MetricsLog
from isotrain.observe.run_directory import RunDirectory
from isotrain.tools.parity.baseline import make_baseline, verdict_against
from isotrain.tools.parity.compare.effects import effect_against_reruns, reruns_of
from isotrain.tools.parity.read.baseline import MAX_BYTES, is_baseline, read_baseline
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import Numbers

STEPS = 120
SCORE = "val-core/openai/gsm8k/reward/mean@1"
Change = Callable[[int, dict[str, float]], dict[str, float] | None]


def night(path: Path, seed: int, change: Change | None = None, steps: int = STEPS, every: int = 1) -> Path:
    """A free-running log of verl with a learning curve; `change` makes another row, or None for no row."""
    draw = np.random.default_rng(seed)
    level, lines = 0.004 * draw.normal(), []
    for step in range(every, steps + 1, every):
        row = {
            "actor/pg_loss": 0.01 * draw.normal(),
            "critic/rewards/mean": 0.7 - 0.4 * np.exp(-step / 40) + 0.01 * draw.normal() + level,
            "response_length/mean": 250 * np.exp(0.1 * draw.normal()),
            "actor/grad_norm": 0.3 * np.exp(0.1 * draw.normal()),
        }
        if step % 20 == 0:
            row[SCORE] = 0.5 + step / 1000 + 0.005 * draw.normal()
        changed = change(step, row) if change else row
        if changed is not None:
            lines.append(
                f"step:{step} - " + " - ".join(f"{name}:{value!r}" for name, value in changed.items())
            )
    path.write_text("\n".join(lines).replace("np.float64(", "").replace(")", "") + "\n")
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    reruns = [night(folder / f"{seed}.log", seed) for seed in range(10)]
    make_baseline(reruns, folder / "baseline.json", (), 365, 1.0)
    for path in reruns:
        path.unlink()  # the file alone is the reference
    return folder / "baseline.json"


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", "compare", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.mark.parametrize("seed", range(100, 106))
def test_an_honest_night_is_equivalent(reference: Path, tmp_path: Path, seed: int) -> None:
    result = compare(reference, night(tmp_path / "night.log", seed))
    assert result.exit_code == 0, result.output
    assert "Compared over 120 points up to step 120." in result.output


def without(name: str) -> Change:
    return lambda step, row: {key: value for key, value in row.items() if key != name}


def changed(name: str, change: Callable[[int, float], float]) -> Change:
    return lambda step, row: {k: change(step, v) if k == name else v for k, v in row.items()}


NAN = float("nan")
REWARD, LENGTH, NORM = "critic/rewards/mean", "response_length/mean", "actor/grad_norm"
NEVER_GREEN: dict[str, tuple[int, str, Change]] = {
    "ended early": (3, "ended at step 100 of 120", lambda step, row: row if step <= 100 else None),
    "every second line lost": (
        3,
        "has 60 of 120 points",
        lambda s, row: row if s % 2 == 0 else None,
    ),
    "died at once": (3, "ended at step 3 of 120", lambda step, row: row if step <= 3 else None),
    "no rewards": (3, f"lacks metrics of the baseline: {REWARD}", without(REWARD)),
    "no lengths": (3, "lacks metrics of the baseline: response_length/mean", without("response_length/mean")),
    "no validation": (3, f"lacks metrics of the baseline: {SCORE}", without(SCORE)),
    "validation stops": (
        3,
        f"has 3 of 6 points of {SCORE}",
        lambda step, row: row if step <= 60 else without(SCORE)(step, row),
    ),
    "validation is not a number": (3, "is not a number", changed(SCORE, lambda s, v: NAN if s == 120 else v)),
    "reward is not a number": (
        1,
        "not a number from step 120",
        changed(REWARD, lambda s, v: NAN if s == 120 else v),
    ),
    "gradient is not a number": (
        3,
        "actor/grad_norm of the candidate is not a number",
        changed("actor/grad_norm", lambda s, v: NAN if s > 60 else v),
    ),
    "lower reward": (1, "lower on average", changed(REWARD, lambda s, v: v - 0.1)),
    "late loss of reward": (1, "last quarter", changed(REWARD, lambda s, v: v - 0.12 * (s > 90))),
    "a flat reward": (1, "flat", changed(REWARD, lambda s, v: 0.6)),
    "worse validation": (1, SCORE, changed(SCORE, lambda s, v: v - 0.2)),
    "collapsed length": (
        3,
        "Also looks wrong: response_length",
        changed("response_length/mean", lambda s, v: v / 4),
    ),
    "gradient norm x30": (
        3,
        "Also looks wrong: actor/grad_norm",
        changed("actor/grad_norm", lambda s, v: 30 * v),
    ),
}


@pytest.mark.parametrize("name", NEVER_GREEN)
def test_what_is_never_green(reference: Path, tmp_path: Path, name: str) -> None:
    code, words, change = NEVER_GREEN[name]
    result = compare(reference, night(tmp_path / "night.log", 100, change))
    assert result.exit_code == code and words in result.output, result.output


@pytest.mark.parametrize("text", ["", "step:1 - timing_s/gen:1.0\n", "Traceback: CUDA error\n"])
def test_a_dead_run_is_an_error(reference: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "night.log").write_text(text)
    assert compare(reference, tmp_path / "night.log").exit_code == 2


def test_what_is_intended_can_be_allowed(reference: Path, tmp_path: Path) -> None:
    for name, change in (("metrics", without(SCORE)), ("steps", NEVER_GREEN["ended early"][2])):
        path = night(tmp_path / "night.log", 100, change)
        assert compare(reference, path).exit_code == 3
        assert compare(reference, path, "--allow", name).exit_code == 0


def sft(path: Path, seed: int, lr: float = 1e-5, data: str = "ab12", *, shift: float = 0.0) -> Path:
    recipe = {"seed": seed, "optimizer": {"lr": lr}, "trainer": {"steps": 40}}
    run = RunDirectory.create(path, "", recipe, {"device": {"type": "cpu"}, "data": {"train": data}})
    draw = np.random.default_rng(seed)
    with MetricsLog(run.metrics) as log:
        for step in range(1, 41):
            log.append(step, {"loss": 2 / step + shift + 0.003 * draw.normal(), "lr": lr})
    return path


def test_another_recipe_is_named_first_and_never_green(tmp_path: Path) -> None:
    reruns = [sft(tmp_path / f"{seed}", seed) for seed in range(10)]
    file = tmp_path / "baseline.json"
    make_baseline(reruns, file, (), 365, 1.0)
    assert compare(file, sft(tmp_path / "honest", 20)).exit_code == 0
    result = compare(file, sft(tmp_path / "lr", 21, lr=2e-5))
    assert result.exit_code == 3, result.output
    assert "the recipes differ: optimizer.lr: 1e-05 -> 2e-05" in result.output.splitlines()[1]
    assert compare(file, tmp_path / "lr", "--allow", "recipe").exit_code == 0
    result = compare(file, sft(tmp_path / "data", 22, data="cd34"))
    assert result.exit_code == 3 and "not trained on the same rows" in result.output.splitlines()[1]
    silent = sft(tmp_path / "silent", 23)
    RunDirectory(silent).resolved.unlink()
    result = compare(file, silent)
    assert result.exit_code == 3 and "does not say its recipe" in result.output
    assert compare(file, sft(tmp_path / "worse", 24, shift=0.05)).exit_code == 1


def test_margins_are_kept_and_may_be_replaced(tmp_path: Path) -> None:
    reruns = [sft(tmp_path / f"{seed}", seed) for seed in range(6)]
    make_baseline(reruns, tmp_path / "b.json", ("loss=0.5",), 365, 1.0)
    worse = sft(tmp_path / "worse", 24, shift=0.05)
    assert compare(tmp_path / "b.json", worse).exit_code == 0
    assert compare(tmp_path / "b.json", worse, "--margin", "loss=0.01").exit_code == 1


def test_it_is_small_and_long_runs_are_averaged(tmp_path: Path) -> None:
    reruns = [night(tmp_path / f"{seed}.log", seed, steps=1500) for seed in range(10)]
    size, reaches = make_baseline(reruns, tmp_path / "b.json", (), 365, 1.0)
    assert size == (tmp_path / "b.json").stat().st_size < 200_000
    assert [one.metric for one in reaches] == [REWARD, SCORE] and all(one.is_enough for one in reaches)
    file, _ = read_baseline(tmp_path / "b.json")
    curve = file.curves[REWARD]
    assert sum(curve.records) == 1500 and curve.ends[-1] == 1500
    series = read_run(reruns[0]).metrics[REWARD]
    assert np.mean(curve.values[0]) == pytest.approx(series.values_S.mean(), abs=1e-4)
    assert np.allclose(curve.block_means(series).values_S, curve.values[0], rtol=1e-5)
    assert compare(tmp_path / "b.json", night(tmp_path / "n.log", 50, steps=1500)).exit_code == 0
    result = compare(tmp_path / "b.json", night(tmp_path / "n.log", 50, steps=1499))
    assert (
        result.exit_code == 3
        and " of 1,500" not in result.output
        and "the candidate has" in result.output.lower()
    )
    result = compare(tmp_path / "b.json", night(tmp_path / "n.log", 50, steps=1497))
    assert result.exit_code == 3 and "ended at step 1,497 of 1,500" in result.output, result.output


def test_too_few_reruns_are_said(tmp_path: Path) -> None:
    reruns = [night(tmp_path / f"{seed}.log", seed) for seed in range(3)]
    with pytest.raises(DataError, match="2 runs: give 3 to 20"):
        make_baseline(reruns[:2], tmp_path / "b.json", (), 365, 1.0)
    arguments = ["parity", "baseline", *map(str, reruns), "--out", str(tmp_path / "b.json")]
    result = CliRunner().invoke(app, [*arguments, "--margin", "reward=0.001"], env={"COLUMNS": "200"})
    assert result.exit_code == 3 and "never equivalent within 0.001" in result.output, result.output
    assert compare(tmp_path / "b.json", night(tmp_path / "n.log", 50)).exit_code == 3
    result = CliRunner().invoke(app, [*arguments, "--nights", "10"])
    assert result.exit_code == 2 and "at most 0.5, of 10 nights" in result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda step, row: row if step <= 60 else None, "ended at step 60 of 120"),
        (changed(REWARD, lambda s, v: NAN if s == 9 else v), "not a number somewhere"),
        (None, "equal in every value"),
    ],
)
def test_reruns_are_whole_and_no_copies(tmp_path: Path, change: Change | None, words: str) -> None:
    reruns = [night(tmp_path / f"{seed}.log", seed) for seed in range(4)]
    night(reruns[3], 2 if change is None else 3, change)
    with pytest.raises(DataError, match=words):
        make_baseline(reruns, tmp_path / "b.json", (), 365, 1.0)
    assert not (tmp_path / "b.json").exists()


def test_it_replaces_a_baseline_and_nothing_else(reference: Path, tmp_path: Path) -> None:
    reruns = [night(tmp_path / f"{seed}.log", seed) for seed in range(3)]
    with pytest.raises(DataError, match="is no baseline"):
        make_baseline(reruns, reruns[0], (), 365, 1.0)
    for _ in range(2):
        make_baseline(reruns, tmp_path / "b.json", (), 365, 1.0)
    with pytest.raises(DataError, match="stands for the reference"):
        verdict_against(reference, reference)
    result = compare(reference, reruns[0], "--rerun", reruns[1])
    assert result.exit_code == 2 and "has its reruns in it" in result.output


def test_the_report_is_of_the_baseline(reference: Path, tmp_path: Path) -> None:
    compare(reference, night(tmp_path / "n.log", 50), "--report", tmp_path / "report")
    verdict = json.loads((tmp_path / "report" / "verdict.json").read_text())
    assert verdict["comparison"]["reference"]["sha256"].keys() == {"baseline.json"}
    assert verdict["power"] is None


def damaged(text: str, old: str, new: str) -> str:
    assert len(re.findall(old, text)) >= 1
    return re.sub(old, new, text, count=1)


HOSTILE: dict[str, Callable[[str], str]] = {
    "torn": lambda text: text[: len(text) // 2],
    "edited": lambda text: damaged(text, r'"false_alarms": 1\.0', '"false_alarms": 9.0'),
    "newer": lambda text: damaged(text, r'"version": 1', '"version": 2'),
    "not finite": lambda text: damaged(text, r'"values":\[\[[-0-9.e]+', '"values":[[NaN'),
    "huge": lambda text: damaged(text, r'"values":\[\[[-0-9.e]+', '"values":[[1e308'),
    "text": lambda text: damaged(text, r'"values":\[\[[-0-9.e]+', '"values":[["x"'),
    "another field": lambda text: damaged(text, r'"nights": 365', '"nights": 365, "x": 1'),
    "deep": lambda text: damaged(text, r'"recipe": null', '"recipe": ' + "[" * 5000 + "]" * 5000),
    "no curves": lambda text: re.sub(r'"curves": \{.*?\n\}', '"curves": {}', text, flags=re.S),
    "large": lambda text: text + " " * MAX_BYTES,
    "records": lambda text: damaged(text, r'"records":\[1', '"records":[' + "9" * 30),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_a_clean_error(reference: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(HOSTILE[kind](reference.read_text()))
    result = compare(path, night(tmp_path / "n.log", 50))
    assert result.exit_code == 2 and result.output.startswith("error: "), result.output
    assert "Traceback" not in result.output and len(result.output) < 1000


def resealed(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """As somebody who wants to deceive would write it: with the digest of the new content."""
    from isotrain.tools.parity.read.baseline import _digest

    content = json.loads(path.read_text())
    del content["digest"]
    change(content)
    path.write_text(json.dumps({**content, "digest": _digest(content)}))


def test_hostile_curves_with_a_right_digest(reference: Path, tmp_path: Path) -> None:
    log = night(tmp_path / "n.log", 50)

    def set_curve(**fields: object) -> Callable[[dict[str, object]], object]:
        return lambda content: content["curves"][REWARD].update(fields)  # type: ignore[index]

    file = json.loads(reference.read_text())
    ends = file["curves"][REWARD]["ends"]
    for fields in (
        {"ends": ends[::-1]},
        {"ends": ends[:-1]},
        {"values": file["curves"][REWARD]["values"][:-1]},
        {"first": ends[0] + 1},
    ):
        path = tmp_path / "b.json"
        path.write_text(reference.read_text())
        resealed(path, set_curve(**fields))
        assert is_baseline(path)
        result = compare(path, log)
        assert result.exit_code == 2 and "do not match" in result.output, (fields.keys(), result.output)
    path.write_text(reference.read_text())
    resealed(path, set_curve(records=[2**31] * len(ends)))
    assert compare(path, log).exit_code in (2, 3)


def draws(count: int, seed: int, spread: float) -> list[Numbers]:
    draw = np.random.default_rng(seed)
    return [0.01 * draw.normal(size=100) + spread * draw.normal() for _ in range(count)]


def test_the_interval_is_that_of_a_further_run() -> None:
    """By hand: Student's t of 2 degrees of freedom, 4.303, with the spread of 0.1 and its mean's third."""
    reruns = [np.full(40, level) + 1e-6 * np.arange(40) % 2e-6 for level in (-0.1, 0.0, 0.1)]
    effect = effect_against_reruns("reward", "reward", 1.0, reruns_of(reruns), reruns[1].copy(), 1e-4)
    interval = effect.windows[0].interval
    assert interval is not None and interval.high == pytest.approx(4.3027 * 0.1 * np.sqrt(4 / 3), rel=1e-3)


@pytest.mark.parametrize("count", [3, 5, 10])
def test_false_alarms_are_those_that_were_designed(count: int) -> None:
    """A margin of 0 leaves the interval alone; 5 % in place of one night of a year, to be seen in 4,000.

    Of so few steps that the noise between them is not known: nothing makes up for too narrow an interval.
    """
    alarms, nights = 0, 20
    for seed in range(200):
        runs = [run_S[:4] for run_S in draws(count + nights, seed, 1.0)]
        reruns = reruns_of(runs[:count])
        for run in runs[count:]:
            effect = effect_against_reruns("reward", "reward", 0.0, reruns, run, 0.05)
            alarms += effect.verdict == "different"
    # Nights of one year share their baseline, so the count varies more than a binomial's.
    assert 0.03 < alarms / 4000 < 0.075


def test_reruns_that_are_alike_by_chance_do_not_accuse() -> None:
    reruns = draws(3, 1, 0.0)
    level = float(np.mean([rerun.mean() for rerun in reruns]))
    alike = [rerun - rerun.mean() + level for rerun in reruns]
    equivalent, different = reruns_of(alike).reach(0.0, 0.05)
    assert different > 2 * 0.01 / 10 and equivalent < 0
