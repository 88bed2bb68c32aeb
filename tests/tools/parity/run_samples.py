"""Small runs in every format, as their programs write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

from isotrain.observe.metrics import MetricsLog
from isotrain.observe.run_directory import RunDirectory
from isotrain.tools.parity.read.tensorboard import masked_crc


def isotrain_run(path: Path, steps: int = 5) -> Path:
    run = RunDirectory.create(
        path,
        "task: sft\n",
        {"task": "sft", "seed": 1},
        {"device": {"type": "cpu"}, "data": {"train": "ab12"}},
    )
    with MetricsLog(run.metrics) as log:
        for step in range(1, steps + 1):
            log.append(step, {"loss": 1 / step, "lr": 1e-5, "tokens": 100 * step})
    return path


def verl_line(step: int) -> str:
    return (
        f"step:{step} - global_seqlen/mean:458966.5 - actor/pg_loss:{0.1 / (step + 1)!r} - actor/lr:2e-06"
        f" - critic/rewards/mean:-0.0182796623557806 - timing_s/gen:np.float64({20.5 + step}) - actor/kl:nan"
    )


def verl_console(path: Path, steps: int = 5) -> Path:
    lines = ["(TaskRunner pid=222265) {'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,", "step: a word"]
    lines.append("(TaskRunner pid=222265) step:0 - val-core/openai/gsm8k/reward/mean@1:0.25")
    for step in range(1, steps + 1):
        lines.append(f"\x1b[36m(TaskRunner pid=222265)\x1b[0m {verl_line(step)}")
        lines.append(f"Training Progress:   1%|1         | {step}/108 [16:49<30:00:53, 1009.85s/it]")
    path.write_text("\n".join(lines) + "\n")
    return path


def verl_file(path: Path, steps: int = 5) -> Path:
    rows = [
        {"step": step, "data": {"actor/pg_loss": 0.1 / step, "actor/kl": None}}
        for step in range(1, steps + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def openrlhf_lines(path: Path, steps: int = 5) -> Path:
    lines = []
    for step in range(1, steps + 1):
        status = {
            "policy_loss": 0.5 / step,
            "kl": 0.0,
            "rollout/reward_mean": 1 - 1 / step,
            "note": "it's, a: {",
        }
        lines.append(
            f"(PPOTrainer pid=7) INFO 01-02 03:04:05 ppo_trainer.py:547] ✨ Global step {step}: {status}"
        )
        lines.append(
            f"(ActorModel pid=8) Train epoch [1/1]: 100%|##########| 4/4 [00:01<00:00, 3.0it/s, pg=0.{step}]"
        )
    lines.append("✨ Evaluation completed in 0:00:09, global_step 4, eval_metrics: {'eval_gsm8k_pass1': 0.5}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def openrlhf_bars(path: Path, steps: int = 5) -> Path:
    text = f"Train step of epoch 0:   0%|          | 0/{steps} [00:00<?, ?it/s]"
    for done in range(steps):
        values = f"gpt_loss={2.5 - done / 10:.3g}, lr=1e-5"
        for count in (done, done + 1):
            text += f"\rTrain step of epoch 0:  10%|#  | {count}/{steps} [00:01<00:09,  1.02s/it, {values}]"
    path.write_text("Train epoch:   0%|          | 0/1 [00:00<?, ?it/s]\n" + text + "\n")
    return path


def csv_table(path: Path, steps: int = 5) -> Path:
    rows = [f"{step},{1 / step!r},{'' if step % 2 else 0.5},note" for step in range(1, steps + 1)]
    path.write_text("\n".join(["Global_Step,loss,reward,comment", *rows]) + "\n")
    return path


def json_lines(path: Path, steps: int = 5) -> Path:
    rows = [{"_step": step, "loss": 1 / step, "tokens": step, "note": "x"} for step in range(1, steps + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def wandb_chart(path: Path, steps: int = 5) -> Path:
    names = [f'"calm-sun-1 - {name}{end}"' for name in ("loss", "reward") for end in ("", "__MIN", "__MAX")]
    rows = [",".join([f'"{step}"', *[f'"{1 / step!r}"'] * 6]) for step in range(1, steps + 1)]
    path.write_text("\n".join([",".join(['"Step"', *names]), *rows]) + "\n")
    return path


def swanlab_export(path: Path, steps: int = 5) -> Path:
    names = [f"calm-sun-{name}{end}" for name in ("loss", "reward") for end in ("_step", "_timestamp")]
    rows = [
        f"{step},{1 / step!r},{1752000000000 + step},0.5,{1752000000000 + step}" for step in range(steps)[1:]
    ]
    path.write_text("\n".join([",".join(["step", *names]), *rows]) + "\n")
    return path


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value >= 0x80:
        out, value = out + bytes((value & 0x7F | 0x80,)), value >> 7
    return out + bytes((value,))


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    crc = struct.pack("<I", masked_crc(length)), struct.pack("<I", masked_crc(content))
    return length + crc[0] + content + crc[1]


def event(step: int, *values: bytes) -> bytes:
    head = b"\x09" + struct.pack("<d", 1.7e9) + (b"\x10" + varint(step) if step else b"")
    return record(head + field(5, b"".join(field(1, value) for value in values)))


def simple(tag: str, value: float) -> bytes:
    return field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)


def plugin(name: str) -> bytes:
    return field(9, field(1, field(1, name.encode())))


def tensor(tag: str, content: bytes, *, metadata: bytes = b"") -> bytes:
    return field(1, tag.encode()) + metadata + field(8, content)


VERSION = record(b"\x09" + struct.pack("<d", 1.7e9) + field(3, b"brain.Event:2"))


def tensorboard(path: Path, steps: int = 5) -> Path:
    events = [event(step, simple("train/loss", 1 / (step + 1))) for step in range(steps)]
    path.write_bytes(VERSION + b"".join(events))
    return path


SAMPLES: dict[str, Callable[..., Path]] = {
    "metrics.jsonl": isotrain_run,
    "verl.log": verl_console,
    "verl.jsonl": verl_file,
    "openrlhf.log": openrlhf_lines,
    "bars.log": openrlhf_bars,
    "events.out.tfevents.1.host": tensorboard,
    "table.csv": csv_table,
    "wandb.csv": wandb_chart,
    "swanlab.csv": swanlab_export,
    "rows.jsonl": json_lines,
}
