"""Whatever a source holds: it is not run, its secrets are not copied, and no traceback comes of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.errors import IsotrainError
from isotrain.recipe.load import parse_recipe
from isotrain.tools.imports import read
from isotrain.tools.imports.convert import convert

SCRIPTS = sorted((Path(__file__).parent / "scripts").iterdir())
RUNNER = CliRunner()
FRAMEWORKS = ("verl", "openrlhf")

# Pieces that are inserted, cut and repeated; `CANARY` is a file that must never appear.
PIECES = [
    "$(touch CANARY)", "`touch CANARY`", "; touch CANARY;", "|| touch CANARY", "&& touch CANARY\n",
    "> CANARY",
    "<(touch CANARY)", "${x:-$(touch CANARY)}", "$((a[$(touch CANARY)]))", "eval 'touch CANARY'",
    "exec touch CANARY\n", "trap 'touch CANARY' EXIT\n", "source CANARY\n", "${x@P}",
    "$'\\x00'", "((", "))", "[[",
    "${", "}", "'", '"', "\\", "\n", "<<EOF\n", "EOF\n", "=", "[", "]", "{", "&x", "*x",
    "!!python/object:os.system",
    "é\u2028", "\x1b[31m", "\ue000", "\x00", "1e999", "-" * 50, "9" * 40, "nan", ".inf", "null", "$@", "$#",
    "--", "+", "~a.b", "a.b=", "{'a': {'b': 1}}", "${a.b}", "${oc.select:a,${b}}", "True", "[[[[", "(((", "%",
    "actor_rollout_ref.rollout.n=-1", "data.train_batch_size=0", "trainer.nnodes=1e30",
    "data.train_files={a:1}",
    "trainer.experiment_name=../../etc/passwd", "actor_rollout_ref.model.path=''", "algorithm.gamma=2",
    "--train.batch_size x", "--actor.adam.betas a b c", "--data.max_len 3", "--lora_rank -5", "--max_epochs",
]  # fmt: skip


def mutated(text: str, chance: random.Random, canary: Path) -> bytes:
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(text) + 1)
        kind = chance.random()
        if kind < 0.6:
            text = text[:place] + chance.choice(PIECES).replace("CANARY", str(canary)) + text[place:]
        elif kind < 0.8:
            text = text[:place] + text[place + chance.randrange(1, 200) :]
        else:
            piece = text[place : place + chance.randrange(1, 80)]
            text = text[:place] + piece * chance.randrange(1, 20) + text[place:]
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        data = (
            data[: len(data) // 2] + bytes(chance.randrange(256) for _ in range(20)) + data[len(data) // 2 :]
        )
    return data


def attempt(data: bytes, framework: str) -> bool:
    """Whether it became a recipe, which is valid then; anything but our own error fails the test."""
    try:
        result = convert(data, framework)
    except IsotrainError as error:
        assert str(error)
        return False
    parse_recipe(result.recipe, "recipe")
    return True


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_scripts_are_never_run_and_end_in_no_traceback(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter_bash")
    chance, canary = random.Random(seed), tmp_path / "canary"
    recipes = 0
    for _ in range(40):
        path = chance.choice(SCRIPTS)
        framework = chance.choice([path.name.partition("-")[0]] * 4 + list(FRAMEWORKS))
        recipes += attempt(mutated(path.read_text(), chance, canary), framework)
        assert not canary.exists()
    assert recipes > 10  # most mutations leave something to import: the errors are not all there is


def test_a_script_that_bash_would_run_is_not_run_here(tmp_path: Path) -> None:
    """The canary is one: bash itself makes the file."""
    pytest.importorskip("tree_sitter_bash")
    canary = tmp_path / "canary"
    script = f"x=$(touch {canary})\npython3 -m verl.trainer.main_ppo a.b=$x\n"
    assert attempt(script.encode(), "verl")
    assert not canary.exists()
    subprocess.run(["bash", "-c", script.replace("python3", "true")], check=True, timeout=30)
    assert canary.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x01\x02",
        b"\xff\xfe\xff",
        b"a: &x [*x, *x]\ntrainer:\ndata:\n",
        b"trainer:\n  x: !!python/object/apply:os.system ['touch canary']\ndata:\n  a: 1\n",
        b"trainer:\n" + b"".join(b" " * i + b"a:\n" for i in range(1, 400)) + b"data:\n  a: 1\n",
        b"data:\n  a: " + b"[" * 5000 + b"\ntrainer:\n  b: 1\n",
        b"{'actor_rollout_ref': {" + b"'a': {" * 3000 + b"\n",
        b"{'actor_rollout_ref': {'a': " + b"(" * 3000 + b")" * 3000 + b"}}\n",
        b"{'a': {'b': __import__('os').system('touch canary')}}\n",
        b"trainer.a=${trainer.a}\ntrainer.experiment_name=${trainer.experiment_name}\n",
        b"trainer.experiment_name=${trainer.project_name}\ntrainer.project_name=${trainer.experiment_name}x\n",
        b"a.b=" + b"x" * 2_000_000,
        b"python3 -m verl.trainer.main_ppo " + b"a.b=1 " * 30000,
        b"cat /etc/passwd",
    ],
    ids=range(15),
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bombs_and_rubbish(
    data: bytes, framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tree_sitter_bash")
    monkeypatch.chdir(tmp_path)
    attempt(data, framework)
    assert list(tmp_path.iterdir()) == []


def seconds(text: str) -> float:
    start = time.process_time()
    attempt(text.encode(), "verl")
    return time.process_time() - start


@pytest.mark.parametrize(
    "piece",
    [
        "{'a': {\n}\n",
        "{'a': {'b': 1,\n 'c': [}\n",
        "\n \n",
        "sft_trainer",
        "fully_async",
        "a_",
        "$(key",
        "A+=(a.b=1); [ $N = 1 ] && A+=(a.c=2)\n",
    ],
)
def test_time_grows_with_the_length_only(piece: str) -> None:
    """Four times the text takes about four times the time: far below the sixteen of quadratic readers."""
    pytest.importorskip("tree_sitter_bash")
    head, tail = "python3 -m verl.trainer.main_ppo x.", "=1\ntrainer:\n"
    short, long = (head + piece * (size // len(piece)) + tail for size in (15_000, 60_000))
    seconds(short)
    assert min(seconds(long) for _ in range(2)) < 9 * min(seconds(short) for _ in range(2)) + 0.2


def test_a_broken_configuration_of_a_log_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(read, "_parsed", lambda text: calls.append(text))
    assert read.printed_config(["{'a': {'b': 1,", *[" 'c': {'d': 1}"] * 500, "}}", "{'a': {'b': 1}}"]) is None
    assert len(calls) == 2


def test_comments_cannot_leave_their_line() -> None:
    data = b'trainer:\n  project_name: a\ndata:\n  a: 1\n"x\\nmodel: {path: evil}\\n#": 1\n'
    result = convert(data, "verl")
    assert "\nmodel: {path: evil}" not in result.recipe


SECRETS = (
    "0123456789abcdef0123456789abcdef01234567",
    "hunter2",
    "hf_abcdefghijklmnopqrstuv",
    "sk-abcdefghijklmnopqrst",
)


def test_secrets_are_never_copied() -> None:
    pytest.importorskip("tree_sitter_bash")
    script = f"""
export WANDB_API_KEY={SECRETS[0]}
export HF_TOKEN={SECRETS[2]}
MY_PASSWORD={SECRETS[1]}
python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data a.jsonl --reward_pretrain rm \\
    --use_wandb {SECRETS[0]} --wandb_org $HF_TOKEN --wandb_run_name "run-$MY_PASSWORD" \\
    --api_token {SECRETS[3]} --save_path https://user:{SECRETS[1]}@host/x --wandb_project {SECRETS[3]} \\
    --other "$(curl -H token={SECRETS[2]})"
"""
    result = convert(script.encode(), "openrlhf")
    everything = result.recipe + str(result.as_json())
    assert [secret for secret in SECRETS if secret in everything] == []


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    source, out = tmp_path / "overrides.txt", tmp_path / "recipe.yaml"
    source.write_text("algorithm.adv_estimator=gae\ndata.train_files=gsm8k\ndata.val_files=gsm8k\n")
    arguments = ["import", "verl", str(source), "--out", str(out)]
    assert RUNNER.invoke(app, arguments).exit_code == 0
    out.write_text("mine")
    refused = RUNNER.invoke(app, arguments)
    assert refused.exit_code == 1 and "--force" in refused.output and out.read_text() == "mine"
    assert RUNNER.invoke(app, [*arguments, "--force"]).exit_code == 0 and out.read_text() != "mine"


def test_without_the_parser_a_script_names_the_extra(tmp_path: Path) -> None:
    """And a configuration is read all the same, without torch."""
    program = (
        "import sys\n"
        "for name in ('tree_sitter', 'tree_sitter_bash', 'torch', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from isotrain.cli.main import main\n"
        "main()\n"
    )

    def run(path: Path, framework: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, "import", framework, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))

    folder = Path(__file__).parent / "scripts"
    refused = run(folder / "openrlhf-sft.sh", "openrlhf")
    assert refused.returncode == 1 and "pip install '.[import]' in a clone of isotrain" in refused.stderr
    assert "Traceback" not in refused.stderr
    config = run(folder / "verl-config.yaml", "verl")
    assert config.returncode == 0 and "name: gspo" in config.stdout
