"""Wrong recipes, commands and data files: each ends within seconds in a message that says what to write.

A row is a name, the words of the command, what the message must say, and the files that it needs. `-s` prints
the last line and the seconds of each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app

# None of them needs torch, whose import alone takes longer on a busy machine.
SECONDS = 5.0


class Wrong(NamedTuple):
    command: str
    says: str
    files: Mapping[str, str | bytes] = MappingProxyType({})


SFT = "name: a\noutput: runs/a\nmodel: {path: tiny/model}\ndata: {train: d.jsonl}\nalgorithm: {name: sft}\n"
STEPS = "".join(f'{{"step": {step}, "reward": 0.5, "loss": 1}}\n' for step in range(1, 40))
DRY = {
    "no recipe": Wrong("train nothing --dry-run", "no recipe called 'nothing'"),
    "a mistyped recipe": Wrong("train tiny-stf --dry-run", "did you mean 'tiny-sft'?"),
    "no file": Wrong("train r.yaml --dry-run", "no such file; `isotrain recipes` lists recipes"),
    "a directory": Wrong("train . --dry-run", "cannot be read"),
    "an empty recipe": Wrong("train r.yaml --dry-run", "r.yaml", {"r.yaml": ""}),
    "a list": Wrong("train r.yaml --dry-run", "r.yaml", {"r.yaml": "- a\n- b\n"}),
    "broken YAML": Wrong("train r.yaml --dry-run", "r.yaml:2", {"r.yaml": "a: 1\n b: [\n"}),
    "a tab": Wrong("train r.yaml --dry-run", "r.yaml:2", {"r.yaml": "model:\n\tpath: a\n"}),
    "a key twice": Wrong("train r.yaml --dry-run", "r.yaml:6", {"r.yaml": SFT + "name: b\n"}),
    "not UTF-8": Wrong("train r.yaml --dry-run", "save the file as UTF-8", {"r.yaml": b"name: \xff\n"}),
    "a model file": Wrong(
        "train m.safetensors --dry-run", "m.safetensors", {"m.safetensors": b"\0" * 300_000}
    ),
    "an unknown key": Wrong("train tiny-sft optimizer.learning_rate=1 --dry-run", "optimizer.lr"),
    "an unknown section": Wrong("train tiny-sft optimiser.lr=1 --dry-run", "did you mean 'optimizer"),
    "another framework's key": Wrong("train tiny-grpo rollout.num_generations=4 --dry-run", "rollout.n"),
    "an override without =": Wrong("train tiny-sft optimizer.lr --dry-run", "optimizer.lr"),
    "an override with spaces": Wrong("train tiny-sft optimizer.lr =1 --dry-run", "optimizer.lr"),
    "an override with dashes": Wrong("train tiny-sft --optimizer.lr=1 --dry-run", "No such option"),
    "a text for a number": Wrong("train tiny-sft optimizer.lr=fast --dry-run", "'optimizer.lr'"),
    "a negative rate": Wrong("train tiny-sft optimizer.lr=-1 --dry-run", "'optimizer.lr'"),
    "a rate of nan": Wrong("train tiny-sft optimizer.lr=nan --dry-run", "'optimizer.lr'"),
    "a fraction of a step": Wrong("train tiny-sft trainer.steps=1.5 --dry-run", "'trainer.steps'"),
    "no steps": Wrong("train tiny-sft trainer.steps=0 --dry-run", "'trainer.steps'"),
    "a batch of 0": Wrong("train tiny-sft data.batch_size=0 --dry-run", "'data.batch_size'"),
    "a batch as a text": Wrong("train tiny-sft data.batch_size=32k --dry-run", "'data.batch_size'"),
    "an unknown algorithm": Wrong("train tiny-sft algorithm.name=grop --dry-run", "'grpo'"),
    "an unknown dtype": Wrong("train tiny-sft model.dtype=fp16 --dry-run", "'model.dtype'"),
    "an unknown engine": Wrong("train tiny-grpo rollout.engine=vlm --dry-run", "'vllm'"),
    "an unknown schedule": Wrong("train tiny-sft optimizer.schedule=cos --dry-run", "'cosine'"),
    "an unknown logger": Wrong("train tiny-sft observe.loggers=[wandbb] --dry-run", "wandb"),
    "no device": Wrong("train tiny-sft device.type=gpu --dry-run", "did you mean 'cuda'?"),
    "ranks of 0": Wrong("train tiny-sft device.ranks=0 --dry-run", "'device.ranks'"),
    "a mesh that does not divide": Wrong(
        "train tiny-sft device.ranks=3 device.mesh.context=2 --dry-run", "device.ranks"
    ),
    "rollout in SFT": Wrong("train tiny-sft rollout.n=8 --dry-run", "rollout"),
    "GRPO without rollout": Wrong("train tiny-sft algorithm.name=grpo --dry-run", "rollout"),
    "a group of one": Wrong("train tiny-grpo rollout.n=1 --dry-run", "rollout.n"),
    "no reward": Wrong("train tiny-grpo reward.function=null --dry-run", "reward"),
    "a reward without a function": Wrong("train tiny-grpo reward.function.path=r.py --dry-run", "r.py"),
    "a reward that is no Python": Wrong(
        "train tiny-grpo reward.function.path=r.py:f --dry-run", "r.py", {"r.py": "def f(:\n"}
    ),
    "a reward with another name": Wrong(
        "train tiny-grpo reward.function.path=r.py:f --dry-run",
        "r.py",
        {"r.py": "def g(response):\n    return 1\n"},
    ),
    "a negative restart": Wrong("train tiny-sft --restarts -1", "--restarts"),
    "restarts without resume": Wrong("train tiny-sft --restarts 1 trainer.resume=never", "trainer.resume"),
}
COMMANDS = {
    "an unknown command": Wrong("trian tiny-sft", "Did you mean 'train'?"),
    "an unknown option": Wrong("train tiny-sft --dryrun", "--dry-run"),
    "no argument": Wrong("train", "Missing argument"),
    "an unknown language": Wrong("--lang fr recipes", "'fr'"),
    "a shipped recipe that is none": Wrong("recipes tiny", "tiny"),
    "--out without a name": Wrong("recipes --out r.yaml", "isotrain recipes NAME --out FILE"),
    "a file that exists": Wrong("recipes tiny-sft --out r.yaml", "is not overwritten", {"r.yaml": ""}),
    "no directory of runs": Wrong("runs nowhere", "there is no directory nowhere"),
    "the logs of no run": Wrong("logs nowhere", "is it a run directory?"),
    "the export of no run": Wrong("export nowhere --out m", "nowhere"),
    "an export without --out": Wrong("export nowhere", "--out"),
    "a view of no run": Wrong("view nowhere --export p.html", "nowhere"),
    "a plan for an unknown device": Wrong("plan tiny-sft --device a1000", "a100"),
    "a plan for a strange size": Wrong("plan tiny-sft --memory much", "write it as 64GB"),
    "a plan of a mistyped recipe": Wrong("plan tiny-stf", "did you mean 'tiny-sft'?"),
    "a preview of a mistyped recipe": Wrong("preview tiny-stf", "did you mean 'tiny-sft'?"),
    "a plan for no devices": Wrong("plan tiny-sft --devices 0", "--devices"),
    "an import of no file": Wrong("import verl nothing.sh", "nothing.sh"),
    "an import of an unknown framework": Wrong("import verll a.sh", "'verl'"),
    "an import of an empty script": Wrong("import verl a.sh", "no command of verl", {"a.sh": ""}),
    "a variable without a value": Wrong("import verl a.sh --set NODES", "NAME=VALUE", {"a.sh": "x"}),
    "parity of no run": Wrong("parity compare a b", "a"),
    "parity of one run": Wrong("parity compare a", "Missing argument"),
    "parity of empty logs": Wrong("parity compare a.log b.log", "a.log", {"a.log": "", "b.log": ""}),
    "a strange margin": Wrong(
        "parity compare a.jsonl b.jsonl --margin reward", "margin", {"a.jsonl": STEPS, "b.jsonl": STEPS}
    ),
    "a certificate that is none": Wrong("parity verify c.json", "c.json", {"c.json": "{}"}),
    "GSM8K from nowhere": Wrong("prepare gsm8k --out w --source nowhere", "nowhere"),
    "a doctor for an unknown device": Wrong("doctor --for tpu", "tpu"),
    "a doctor of no folder": Wrong("doctor nowhere", "nowhere"),
}


def ends(tmp_path: Path, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    monkeypatch.chdir(tmp_path)
    for name, text in wrong.files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    started = time.monotonic()
    done = CliRunner().invoke(app, wrong.command.split(), env={"COLUMNS": "300", "ISOTRAIN_LANG": "en"})
    seconds = time.monotonic() - started
    assert isinstance(done.exception, SystemExit) and done.exit_code in (1, 2), (done.output, done.exc_info)
    return done.output, seconds


@pytest.mark.parametrize("name", [*DRY, *COMMANDS])
def test_wrong_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wrong = (DRY | COMMANDS)[name]
    output, seconds = ends(tmp_path, wrong, monkeypatch)
    assert wrong.says in output, output
    assert "Traceback" not in output and seconds < 4 * SECONDS  # other work on the machine
    print(json.dumps({"name": name, "seconds": round(seconds, 2), "says": output.strip().splitlines()[-1]}))
