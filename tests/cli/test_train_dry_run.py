from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from isotrain.cli import train
from isotrain.cli.main import app
from isotrain.errors import IsotrainError
from isotrain.recipe import document, library
from isotrain.recipe.load import load_recipe, parse_recipe, resolved
from isotrain.trainers.online import precheck

RUNNER = CliRunner()

# Runs the command line in a Python in which the packages of the `train` extra are not there.
WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "peft", "accelerate", "safetensors", "pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from isotrain.cli.main import main
main()
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_dry_run_puts_json_alone_on_stdout() -> None:
    result = RUNNER.invoke(app, ["train", "tiny-sft", "--dry-run", "optimizer.lr=5e-7", "trainer.steps=null"])
    assert result.exit_code == 0
    expected = load_recipe(library.find("tiny-sft"), ["optimizer.lr=5e-7", "trainer.steps=null"])
    assert json.loads(result.stdout) == resolved(expected)
    assert "nothing was started" in result.stderr and "1 epoch" in result.stderr


def test_dry_run_shows_people_yaml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(library.find("tiny-sft"), [f"output={'long/' * 50}"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    train.show(recipe)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert document.parse(plain, "stdout").values == resolved(recipe)


ONLINE = """\
name: a
output: b
model: {path: c}
data: {train: d, batch_size: 8}
algorithm: {name: grpo}
rollout: {n: 4, staleness: 1, engines: 2, tensor_parallel: 4}
reward:
  gsm8k:
  function: {path: "rewards.py:score"}
cluster: {placement: separate}
"""


def test_the_summary_of_an_online_recipe_says_what_would_run_where() -> None:
    lines = train.summary(parse_recipe(ONLINE, "r.yaml")).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *("algorithm", "model", "data", "rollout", "reward", "cluster", "length", "device", "output")
    ]
    assert lines[3:7] == [
        "  data       d (8 prompts per step)",
        "  rollout    vllm, 4 response(s) per prompt, up to 512 tokens",
        "  reward     gsm8k (strict) + rewards.py:score",
        "  cluster    separate, 2 engine(s) of 4 devices each, up to 1 version(s) behind, Ray auto",
    ]


def test_the_summary_says_where_a_run_without_a_cluster_section_goes() -> None:
    recipe = parse_recipe(ONLINE, "r.yaml", ["cluster=null", "rollout={n: 2}"])
    assert "  cluster    colocated, 1 engine(s), Ray auto" in train.summary(recipe).splitlines()


def test_the_summary_names_a_process_reward() -> None:
    recipe = parse_recipe(ONLINE, "r.yaml", ["reward={process: {path: models/prm}}"])
    assert "  reward     models/prm" in train.summary(recipe).splitlines()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def score(response):\n    return 1\n", ""),
        ("from elsewhere import *\n", ""),
        ("from elsewhere import judge as score\n", ""),
        ("def scores(response):\n    score = 1\n    return score\n", "has no function score; it has scores"),
        ("def score(response)\n", "rewards.py:1: expected ':'"),
    ],
)
def test_a_dry_run_reads_the_reward_function_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(ONLINE)
    (tmp_path / "rewards.py").write_text(source + "raise SystemExit(3)\n" * (not told))
    done = RUNNER.invoke(app, ["train", "r.yaml", "--dry-run"])
    assert done.exit_code == bool(told) and told in done.stderr
    assert ("the recipe is valid" in done.stderr) == (not told)


def test_a_dry_run_warns_of_what_this_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.yaml").write_text(ONLINE)
    monkeypatch.setattr(precheck, "find_spec", lambda name: None)
    done = RUNNER.invoke(app, ["train", str(tmp_path / "r.yaml"), "--dry-run", "reward.math={}"])
    assert done.exit_code == 0 and json.loads(done.stdout)["name"] == "a"
    assert "warning: a run on this machine would fail: rollout.engine: vllm is not inst" in done.stderr
    assert "there is no file rewards.py" in done.stderr
    assert (
        "math-verify is not installed" in done.stderr
        and "algorithm.rollout_correction.level=token" in done.stderr
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "tiny-sft", "--dry-run"],
        ["train", "tiny-grpo", "--dry-run"],
        ["recipes"],
        ["recipes", "tiny-sft"],
        ["--version"],
    ],
)
def test_works_where_torch_is_not_installed(arguments: list[str]) -> None:
    done = without_torch(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_training_without_torch_says_what_to_install(tmp_path: Path) -> None:
    done = without_torch("train", "tiny-sft", f"output={tmp_path}/run")
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: this needs the package 'torch': pip install '.[train]' in a clone of isotrain\n"
    )


def test_the_recipe_and_its_text_are_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[object] = []
    fake = SimpleNamespace(launch=lambda recipe, source, preemption: started.extend([recipe, source]))
    monkeypatch.setitem(sys.modules, "isotrain.trainers.launch", fake)
    looked_at: list[object] = []
    first_look = SimpleNamespace(first_look=looked_at.append)
    monkeypatch.setitem(sys.modules, "isotrain.trainers.first_look", first_look)
    path = tmp_path / "mine.yaml"
    path.write_text(library.read("tiny-sft"))
    result = RUNNER.invoke(app, ["train", str(path), "seed=7"])
    assert result.exit_code == 0, result.output
    assert started == [*looked_at, path.read_text()] and looked_at == [load_recipe(path, ["seed=7"])]


def test_user_errors_are_a_message_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "bad [red].yaml"
    path.write_text("nmae: x\n")
    result = RUNNER.invoke(app, ["train", str(path), "--dry-run"])
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith(f"error: {path}:1: unknown key 'nmae'; did you mean 'name'?\n")
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTRAIN_DEBUG", "1")
    result = RUNNER.invoke(app, ["train", "no-such-recipe"])
    assert isinstance(result.exception, IsotrainError)


def test_an_interrupt_is_a_short_line_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(given: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "locate", interrupt)
    result = RUNNER.invoke(app, ["train", "tiny-sft"])
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


@pytest.mark.parametrize(
    "recipe",
    [
        *("gsm8k-sft-lora-8x", "gsm8k-grpo-8x", "gsm8k-grpo-2x8", "gsm8k-ppo-8x", "gsm8k-reinforce++-8x"),
        *("qwen3-8b-grpo-8x", "qwen3-8b-grpo-sglang-4x", "dapo-qwen2.5-7b-16x", "dapo-qwen3-8b-16x"),
    ],
)
def test_recipes_of_accelerator_size_are_valid_on_each_kind(recipe: str) -> None:
    """The commands that were published for Ascend, as recipes; nothing of a device is imported."""
    for device in ("npu", "cuda", "cpu"):
        done = RUNNER.invoke(app, ["train", recipe, f"device.type={device}", "--dry-run"])
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("tool", [True, False])
def test_the_recipe_with_a_tool_is_valid_with_it_and_without(tool: bool) -> None:
    without = ["rollout.environment=null", "data.prompt_key=prompt_without_tool"]
    done = RUNNER.invoke(app, ["train", "gsm8k-tool", *([] if tool else without), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert ("calculator.py:Calculator" in done.output) == tool
    assert ('"prompt_without_tool"' in done.output) != tool


def test_a_device_that_is_none_is_refused_by_name() -> None:
    done = CliRunner().invoke(app, ["train", "tiny-sft", "device.type=gpu", "--dry-run"])
    assert done.exit_code == 1 and "unknown device 'gpu'; did you mean 'cuda'?" in done.output


def test_one_step_is_not_steps() -> None:
    one, two = (
        CliRunner().invoke(app, ["train", "tiny-sft", f"trainer.steps={n}", "--dry-run"]).output
        for n in (1, 2)
    )
    assert "1 step\n" in one and "2 steps\n" in two
