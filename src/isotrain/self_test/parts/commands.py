"""Commands of isotrain, as the parts run them."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from isotrain.observe.metrics import read_metrics
from isotrain.own_python import module_command
from isotrain.self_test.verdicts import Setting, StageFailed, tell_progress

# Of what each worker of a failed run wrote last.
WORKER_LINES = 20


def train(setting: Setting, recipe: str, output: Path, *changes: str) -> None:
    """A recipe on the small model, in processes of its own; what they say goes to the part's log."""
    tiny = setting.tiny
    files = {
        "tiny-sft": (f"data.train={tiny / 'train.jsonl'}",),
        "tiny-grpo": (
            f"data.train={tiny / 'prompts.jsonl'}",
            f"reward.function.path={tiny / 'reward.py'}:score",
        ),
    }[recipe]
    settings = (f"model.path={tiny / 'model'}", "data.validation=null", f"output={output}", *files, *changes)
    tell_progress(f"isotrain train {recipe} {' '.join(settings)}")
    process = subprocess.Popen(
        module_command("isotrain", "train", recipe, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:  # to the log as they come: a run that hangs never ends
        print(line, end="", flush=True)
        lines.append(line)
    if code := process.wait():
        for log in sorted((output / "logs").glob("*")):
            print(f"{log.name}:", *log.read_text(errors="replace").splitlines()[-WORKER_LINES:], sep="\n")
        how = f"killed by {signal.Signals(-code).name}; " if code < 0 else ""
        raise StageFailed(f"{output.name}: {how}{_error(lines)}")


def _error(said: list[str]) -> str:
    """What a command said last, from the line that says that it is an error."""
    lines = [line.strip() for line in said if line.strip()] or ["it ended without a message"]
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    return " ".join(lines[starts[-1] if starts else -1 :])[:500]


def column(output: Path, metric: str) -> list[float]:
    """A metric of all steps that have it."""
    return [float(row[metric]) for row in read_metrics(output / "metrics.jsonl") if metric in row]
