from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
from run_samples import isotrain_run

from isotrain.errors import DataError
from isotrain.observe.metrics import MetricsLog
from isotrain.observe.run_directory import RunDirectory
from isotrain.parity.sources.read import read_run


def test_a_run_with_its_recipe_environment_and_digests(tmp_path: Path) -> None:
    run = read_run(isotrain_run(tmp_path / "run"))
    assert run.format == "isotrain run"
    assert set(run.metrics) == {"loss", "lr", "tokens"}
    assert run.metrics["loss"].steps_S.tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["loss"].values_S.tolist() == [1 / step for step in range(1, 6)]
    assert run.recipe == {"task": "sft", "seed": 1}
    assert run.environment == {"device": {"type": "cpu"}}
    assert run.data == {"train": "ab12"}
    for name in ("metrics.jsonl", "resolved.json", "environment.json"):
        assert run.sha256[name] == hashlib.sha256((tmp_path / "run" / name).read_bytes()).hexdigest()
    assert len(run.sha256) == 3


def test_the_last_start_counts_and_a_resumed_log_is_exact(tmp_path: Path) -> None:
    path = isotrain_run(tmp_path / "run")
    RunDirectory.create(path, "", {"seed": 1}, {"device": {"type": "other"}, "data": {"train": "cd34"}})
    with MetricsLog.resume(path / "metrics.jsonl", 3) as log:
        log.append(4, {"loss": math.nan, "grad_norm": math.inf})
    run = read_run(path)
    assert run.data == {"train": "cd34"} and run.environment == {"device": {"type": "other"}}
    assert run.metrics["loss"].steps_S.tolist() == [1, 2, 3, 4]
    assert math.isnan(run.metrics["loss"].values_S[-1])
    assert run.metrics["grad_norm"].values_S.tolist() == [math.inf]


def test_curves_alone_and_a_torn_last_line(tmp_path: Path) -> None:
    path = isotrain_run(tmp_path / "run")
    (path / "resolved.json").unlink()
    (path / "environment.json").unlink()
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    run = read_run(path)
    assert run.recipe is None and run.environment is None and run.data == {}
    assert len(run.metrics["loss"]) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 5, "loss": 7.0}', "line 6: step 5 of loss is 7.0 here and 0.2 before"),
        ('{"step": 2, "new": 1.0}\n{"step": 1, "new": 1.0}', "line 7: step 1 of new comes after step 2"),
        ('{"step": 6.5, "loss": 7.0}', "line 6: `step` is not a whole number: '6.5'"),
        ('{"loss": 7.0}', "line 6: `step` is not a whole number"),
        ('{"step": 6, "loss": "high"}', "line 6: 'loss' is not a number: 'high'"),
        ('{"step": 6', "line 6: not JSON"),
        ("[" * 100_000, "line 6: not JSON"),
        ("[]", "line 6: not a JSON object"),
        ('{"step": 6, "\\u001b[31mred": 1}', "is not the name of a metric"),
    ],
)
def test_damaged_lines(tmp_path: Path, line: str, message: str) -> None:
    path = isotrain_run(tmp_path / "run")
    with open(path / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl") as error:
        read_run(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("resolved.json", "{", "resolved.json: not JSON"),
        ("resolved.json", "[1]", "resolved.json: not a JSON object"),
        ("environment.json", "{}", 'no list "starts"'),
        ("environment.json", '{"starts": [1]}', 'no list "starts"'),
        ("environment.json", '{"starts": [{"data": {"train": 1}}]}', "are not digests"),
        ("metrics.jsonl", "", "has the run taken a step"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = isotrain_run(tmp_path / "run")
    (path / name).write_text(content)
    with pytest.raises(DataError) as error:
        read_run(path)
    assert message in str(error.value)


def test_no_start_is_no_environment(tmp_path: Path) -> None:
    path = isotrain_run(tmp_path / "run")
    (path / "environment.json").write_text(json.dumps({"starts": []}))
    assert read_run(path).environment is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "resolved.json"])
def test_links_do_not_lead_out(tmp_path: Path, name: str) -> None:
    path = isotrain_run(tmp_path / "run")
    secret = tmp_path / "secret"
    (path / name).rename(secret)
    (path / name).symlink_to(secret)
    with pytest.raises(DataError, match="leads out"):
        read_run(path)
