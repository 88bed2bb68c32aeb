"""Wrong recipes, commands and data files: each ends within seconds in a message that says what to write.

A row is a name, the words of the command, what the message must say, and the files that it needs. `-s` prints
the last line and the seconds of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import NamedTuple, cast

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


SHIPPED = "train tiny-sft output=runs/a"
GRPO = "train tiny-grpo output=runs/a"
ROW = '{"prompt": "a", "completion": "b"}\n'
TINY = {
    "work/tiny/model/config.json": "{}",
    "work/tiny/train.jsonl": ROW,
    "work/tiny/validation.jsonl": ROW,
    "work/tiny/prompts.jsonl": ROW,
    "work/tiny/prompts-validation.jsonl": ROW,
}


def data(name: str, text: str | bytes, says: str) -> Wrong:
    return Wrong(f"{SHIPPED} data.train={name}", says, {**TINY, name: text})


RUN = {"runs/b/resolved.json": "{}", "runs/b/metrics.jsonl": ""}
# Without --dry-run: refused before torch is imported and before any process starts.
STARTS = {
    "a device that is none": Wrong(f"{SHIPPED} device.type=gpu", "did you mean 'cuda'?", TINY),
    "a vendor as a device": Wrong(f"{SHIPPED} device.type=ascend", "use one of: auto", TINY),
    "a GPU's recipe on a CPU": Wrong(f"{SHIPPED} device.type=cuda", "or use device.type=cpu", TINY),
    "64 ranks on few cores": Wrong(f"{SHIPPED} device.ranks=100000", "set at most", TINY),
    "64 ranks on few cores, online": Wrong(f"{GRPO} device.ranks=100000", "set at most", TINY),
    "no data": Wrong(f"{SHIPPED} data.train=nix.jsonl", "data.train: nix.jsonl: no such file", TINY),
    "no validation data": Wrong(
        f"{SHIPPED} data.validation=nix.csv", "data.validation: nix.csv: no such", TINY
    ),
    "no prompts": Wrong(f"{GRPO} data.train=/nix", "data.train: /nix: no such file or directory", TINY),
    "a path that is no hub's name": Wrong(
        f"{SHIPPED} data.train=a/b/c", "a/b/c: no such file or directory", TINY
    ),
    "data before `prepare`": Wrong(SHIPPED, "data.train: work/tiny/train.jsonl: no such file"),
    "an empty directory": Wrong(
        f"{SHIPPED} data.train=d", "the directory has no .jsonl", {**TINY, "d/a.txt": ""}
    ),
    "an unknown kind of file": data("a.txt", "a", "convert it to .jsonl, .parquet or .csv"),
    "no rows": data("a.jsonl", "\n\n", "there are no rows"),
    "a row that is a list": data("a.jsonl", "[1, 2]\n", "a.jsonl:1: a row must be a JSON object, not a list"),
    "broken JSON": data("a.jsonl", '{"a": \n', "a.jsonl:1: broken JSON at"),
    "another encoding": data("a.jsonl", '{"text": "ä"}'.encode("latin-1"), "save the file as UTF-8"),
    "CSV without names": data("a.csv", "a,,b\n1,2,3\n", "the first line must name the columns"),
    "CSV with a comma": data("a.csv", "prompt,completion\na,b,c\n", "quote a text that has a comma"),
    "CSV alone with names": data("a.csv", "prompt,completion\n", "there are no rows"),
    "Parquet that is none": data("a.parquet", b"PAR1", "broken Parquet"),
    "columns of no known format": data("a.jsonl", '{"q": 1, "a": 2}\n', "no known format has the columns"),
    "a prompt column that is none": Wrong(f"{GRPO} data.prompt_key=question", "question", TINY),
    "a prompt that is a number": Wrong(
        GRPO, "prompts.jsonl:1", {**TINY, "work/tiny/prompts.jsonl": '{"prompt": 3}\n'}
    ),
    "no model": Wrong(f"{SHIPPED} model.path=./nix", "set a Hugging Face model directory", TINY),
    "a model that is a file": Wrong(
        f"{SHIPPED} model.path=m.bin", "has no config.json", {**TINY, "m.bin": ""}
    ),
    "a run as a model": Wrong(
        f"{SHIPPED} model.path=runs/b", "isotrain export runs/b --out DIR", {**TINY, **RUN}
    ),
    "a broken config.json": Wrong(
        SHIPPED, "config.json cannot be used", {**TINY, "work/tiny/model/config.json": "{"}
    ),
    "a hub's name offline": Wrong(f"{SHIPPED} model.path=Qwen/Qwen9-1B", "HF_HUB_OFFLINE is set", TINY),
    "a path as a hub's name": Wrong(
        f"{SHIPPED} model.path=a/b/c", "neither a local model directory nor", TINY
    ),
    "an output that is a file": Wrong(
        "train tiny-sft output=a", "set output to a writable directory", {**TINY, "a": ""}
    ),
    "an output in a file": Wrong(
        "train tiny-sft output=a/b", "set output to a writable directory", {**TINY, "a": ""}
    ),
}


def ends(tmp_path: Path, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    monkeypatch.chdir(tmp_path)
    for name, text in wrong.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    started = time.monotonic()
    done = CliRunner().invoke(app, wrong.command.split(), env={"COLUMNS": "300", "ISOTRAIN_LANG": "en"})
    seconds = time.monotonic() - started
    assert isinstance(done.exception, SystemExit) and done.exit_code in (1, 2), (done.output, done.exc_info)
    return done.output, seconds


class Started:
    """In place of the module that starts training: nothing of this page gets so far."""

    def launch(self, *_: object) -> None:
        raise AssertionError("training was started")


@pytest.mark.parametrize("name", [*DRY, *COMMANDS, *STARTS])
def test_wrong_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wrong = (DRY | COMMANDS | STARTS)[name]
    monkeypatch.setitem(sys.modules, "isotrain.trainers.launch", cast("ModuleType", Started()))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    output, seconds = ends(tmp_path, wrong, monkeypatch)
    assert wrong.says in output, output
    assert "Traceback" not in output and seconds < 4 * SECONDS  # other work on the machine
    print(json.dumps({"name": name, "seconds": round(seconds, 2), "says": output.strip().splitlines()[-1]}))
