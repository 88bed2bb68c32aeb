from __future__ import annotations

import io
from pathlib import Path

import pytest
from run_samples import openrlhf_bars, openrlhf_lines

from isotrain.errors import DataError
from isotrain.tools.parity.read.runs import read_run


def test_lines_of_steps_count_and_bars_beside_them_do_not(tmp_path: Path) -> None:
    run = read_run(openrlhf_lines(tmp_path / "ppo.log"))
    assert run.format == "OpenRLHF log"
    assert run.metrics["policy_loss"].steps_S.tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["policy_loss"].values_S.tolist() == [0.5 / step for step in range(1, 6)]
    assert run.metrics["eval/eval_gsm8k_pass1"].steps_S.tolist() == [4]
    assert set(run.metrics) == {"policy_loss", "kl", "rollout/reward_mean", "eval/eval_gsm8k_pass1"}


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        # 0.8.1 to 0.9.6, and 0.9.7 to 0.11.0 without asynchronous rollout.
        ("✨ Global step {}: ", "✨ Evaluation completed in 0:00:09, global_step {}, eval_metrics: "),
        # 0.9.7 to 0.11.0 with it.
        ("Global step {}: ", "Eval at step {}: "),
    ],
)
def test_reads_lines_of_every_version(tmp_path: Path, train: str, evaluation: str) -> None:
    """The texts were taken from the sources of every tagged version."""
    before = "(PPOTrainer pid=7) INFO 06-30 01:02:03 ppo_trainer_async.py:244] "
    lines = [before + train.format(step) + str({"policy_loss": 0.5 / step}) for step in (1, 2, 3)]
    lines.insert(2, before + evaluation.format(2) + str({"eval_gsm8k_pass1": 0.25}))
    # Asynchronous rollout may tell of an evaluation when the next step is done.
    lines.append(before + evaluation.format(2) + str({"eval_math_pass1": 0.75}))
    (tmp_path / "log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = read_run(tmp_path / "log")
    assert run.metrics["policy_loss"].steps_S.tolist() == [1, 2, 3]
    assert run.metrics["policy_loss"].values_S.tolist() == [0.5, 0.25, 0.5 / 3]
    assert run.metrics["eval/eval_gsm8k_pass1"].values_S.tolist() == [0.25]
    assert run.metrics["eval/eval_math_pass1"].steps_S.tolist() == [2] and run.notes == ()


def test_reads_the_numbers_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "Global step 1: {'a': nan, \"b\": np.float64(0.5), 'c': tensor(2., device='x'), 'd': None,"
        " 'e': [1, {'f': 2}], 'g': \"it's 'a': 3\", 'h': -inf, 'i': True}, 'j': 5\nEval at step 1: {'a': 7}\n"
    )
    metrics = read_run(tmp_path / "log").metrics
    assert set(metrics) == {"a", "b", "c", "h", "i", "eval/a"}
    assert (
        metrics["b"].values_S[0] == 0.5
        and metrics["c"].values_S[0] == 2
        and metrics["eval/a"].values_S[0] == 7
    )


def test_reads_progress_bars(tmp_path: Path) -> None:
    run = read_run(openrlhf_bars(tmp_path / "sft.log"))
    assert run.metrics["gpt_loss"].steps_S.tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["gpt_loss"].values_S.tolist() == [2.5, 2.4, 2.3, 2.2, 2.1]


@pytest.mark.parametrize("interval", [0, 1000])
def test_reads_bars_that_tqdm_prints(tmp_path: Path, interval: float) -> None:
    """Whether or not it prints when the count moves, a value belongs to the batch that gave it."""
    tqdm = pytest.importorskip("tqdm").tqdm
    file = io.StringIO()
    losses = [0.693, 0.693, 0.5, float("nan"), float("nan"), 0.25, 12345678.0]
    for epoch in range(2):
        bar = tqdm(range(7), desc=f"Train step of epoch {epoch}", file=file, mininterval=interval)
        for number, loss in enumerate(losses):
            bar.set_postfix({"loss": loss + epoch, "lr": 1e-5})
            bar.update()
            if number == 3:
                inner = tqdm(
                    range(2), desc=f"Eval stage of steps {epoch * 7 + 4}", file=file, mininterval=interval
                )
                for batch in range(2):
                    inner.update()
                    inner.set_postfix({"eval gpt_loss": 1.5 + batch})
                inner.close()
        bar.close()
    (tmp_path / "log").write_text(file.getvalue())
    metrics = read_run(tmp_path / "log").metrics
    assert metrics["loss"].steps_S.tolist() == list(range(1, 15))
    expected = [float(f"{loss + epoch:.3g}") for epoch in range(2) for loss in losses]
    assert [str(value) for value in metrics["loss"].values_S.tolist()] == [str(value) for value in expected]
    assert metrics["eval/eval gpt_loss"].steps_S.tolist() == [4, 11]
    assert metrics["eval/eval gpt_loss"].values_S.tolist() == [2.5, 2.5]


def test_a_bar_that_is_cut_ends_with_the_last_value(tmp_path: Path) -> None:
    text = openrlhf_bars(tmp_path / "log").read_bytes()
    for keep in (3, 4, 5, 6):
        (tmp_path / "log").write_bytes(b"\r".join(text.split(b"\r")[:keep]))
        assert len(read_run(tmp_path / "log").metrics["gpt_loss"]) == keep // 2


def test_numbers_ppo_bars_over_episodes(tmp_path: Path) -> None:
    lines = [
        f"(A pid=9) Episode [{episode}/2]:  50%|# | {count}/2 [00:01<00:01, 1.0s/it, policy_loss=0.{n}]"
        for n, (episode, count) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)], start=1)
    ]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    series = read_run(tmp_path / "log").metrics["policy_loss"]
    assert series.steps_S.tolist() == [1, 2, 3, 4] and series.values_S.tolist() == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Global step 6: {'kl': 0.1, 'kl':", "line 12: the values of step 6 break off"),
        ("Global step 6: {'kl': 0.1, 'policy", "line 12: the values of step 6 break off"),
    ],
)
def test_refuses_wrong_lines(tmp_path: Path, line: str, message: str) -> None:
    path = openrlhf_lines(tmp_path / "ppo.log")
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"ppo\.log") as error:
        read_run(path)
    assert message in str(error.value)


def test_a_bar_that_starts_again_is_refused(tmp_path: Path) -> None:
    text = openrlhf_bars(tmp_path / "log").read_text()
    (tmp_path / "log").write_text(text + text.replace("gpt_loss=2.", "gpt_loss=3."))
    with pytest.raises(DataError, match=r"step 1 of gpt_loss is 3\.5 here and 2\.5 before"):
        read_run(tmp_path / "log")


def test_hostile_quotes_take_no_time(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "Global step 1: {'a': 1, '" + "\\'" * 1_000_000 + "\\\nGlobal step 2: {'a': 1}\n"
    )
    with pytest.raises(DataError, match="break off"):
        read_run(tmp_path / "log")
