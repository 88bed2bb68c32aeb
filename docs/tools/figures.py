#!/usr/bin/env python3
"""Draws the pictures of docs/architecture.md, in both languages: `python docs/tools/figures.py [DIR]`.

They are narrow, so that a telephone shows them at a readable size, and have a background of their own, so
that they can be read on light and dark pages alike.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parents[1] / "images"
WIDTH = 440
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  .box { fill: #eef2ff; stroke: #4f5bd5 }
  .store { fill: #fff4e0; stroke: #b7791f }
  .note { fill: #f3f4f6; stroke: #9ca3af; stroke-dasharray: 4 3 }
  .line { fill: none; stroke: #57606a; stroke-width: 1.6 }
  .tokens { stroke: #b7791f; stroke-width: 2.4 }
  .weights { stroke: #1a7f37; stroke-width: 3.2 }
  .tip { fill: #57606a }
  .tokens-tip { fill: #b7791f }
  .weights-tip { fill: #1a7f37 }
  .badge { fill: #24292f }
  .number { fill: #ffffff; font-weight: 700; font-size: 12px }
  text { font: 13px system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif }
  text { fill: #24292f }
  .title { font-weight: 700; font-size: 13.5px }
  .small { font-size: 12px; fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d }
    .box { fill: #1f2547; stroke: #8c96ff }
    .store { fill: #3a2c10; stroke: #e0a84a }
    .note { fill: #21262d; stroke: #6e7681 }
    .line { stroke: #b1bac4 }
    .tokens { stroke: #e0a84a }
    .weights { stroke: #56d364 }
    .tip { fill: #b1bac4 }
    .tokens-tip { fill: #e0a84a }
    .weights-tip { fill: #56d364 }
    .badge { fill: #e6edf3 }
    .number { fill: #161b22 }
    text { fill: #e6edf3 }
    .small { fill: #b1bac4 }
  }
"""
SFT = {
    "en": (
        "One step of supervised training",
        [
            ("store", "rows", "JSONL or Parquet"),
            ("store", "SampleStore", "token ids and loss mask, tokenised once"),
            ("box", "Sampler, packing", "row numbers to micro-batches without padding"),
            ("box", "PackedModel.forward", "the loss of each token, as a share of the step"),
            ("box", "backward, FSDP2", "gradients summed over micro-batches and ranks"),
            ("box", "AdamW", "each rank updates its shard"),
            ("store", "metrics.jsonl, checkpoints", "written beside the next step"),
        ],
        ["every rank", "parity records here"],
    ),
    "zh": (
        "监督训练的一步",
        [
            ("store", "数据行", "JSONL 或 Parquet"),
            ("store", "SampleStore", "token id 和 loss mask，只分词一次"),
            ("box", "Sampler、packing", "由行号组成没有 padding 的 micro-batch"),
            ("box", "PackedModel.forward", "每个 token 的 loss，作为整步的一份"),
            ("box", "反向、FSDP2", "梯度在 micro-batch 和 rank 上求和"),
            ("box", "AdamW", "每个 rank 更新自己的分片"),
            ("store", "metrics.jsonl、检查点", "与下一步同时写出"),
        ],
        ["每个 rank", "parity 在此记录"],
    ),
}
ONLINE = {
    "en": (
        "One step of online RL",
        {
            "controller": ("controller", "prompt numbers, lengths, scores, handles"),
            "rollout": ("rollout workers", "engines generate"),
            "reward": ("reward workers", "text to scores"),
            "policy": ("policy ranks", "log-probs, updates"),
            "objects": ("Ray's object store", "trajectories: token ids, masks, log-probs, versions"),
            "weights": "weights, version = step",
            "legend": ("numbers and handles", "tokens", "weights"),
        },
    ),
    "zh": (
        "在线强化学习的一步",
        {
            "controller": ("controller", "prompt 序号、长度、分数、句柄"),
            "rollout": ("rollout worker", "引擎生成"),
            "reward": ("奖励 worker", "由文本得到分数"),
            "policy": ("策略 rank", "log-prob、更新"),
            "objects": ("Ray 的 object store", "轨迹：token id、mask、log-prob、版本"),
            "weights": "权重，版本 = 步号",
            "legend": ("数字和句柄", "token", "权重"),
        },
    ),
}


def box(kind: str, x: float, y: float, width: float, height: float, title: str, words: str) -> str:
    middle = x + width / 2
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>\n'
        + text(title, middle, y + height / 2 - 5, kind="title")
        + text(words, middle, y + height / 2 + 13)
    )


def arrow(*points: tuple[float, float], kind: str = "") -> str:
    """A line through the points, with a tip at the last; its last part is vertical or horizontal."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    size = 8 if kind else 6
    left = (x - size * (dx + dy * 0.6), y - size * (dy + dx * 0.6))
    right = (x - size * (dx - dy * 0.6), y - size * (dy - dx * 0.6))
    path = " ".join(f"{a:g},{b:g}" for a, b in points[:-1]) + f" {x - size * dx / 2:g},{y - size * dy / 2:g}"
    tip = " ".join(f"{a:g},{b:g}" for a, b in ((x, y), left, right))
    ending = f"{kind}-tip" if kind else "tip"
    return f'<polyline class="line {kind}" points="{path}"/>\n<polygon class="{ending}" points="{tip}"/>\n'


def badge(number: str, x: float, y: float) -> str:
    return (
        f'<circle class="badge" cx="{x}" cy="{y}" r="{9 + 2 * (len(number) > 1)}"/>\n'
        f'<text class="number" x="{x}" y="{y + 4.3}" text-anchor="middle">{number}</text>\n'
    )


def text(words: str, x: float, y: float, anchor: str = "middle", kind: str = "small") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>\n'


def page(height: int, title: str, drawn: str) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>\n'
        f"{drawn}</svg>\n"
    )


def supervised(language: str) -> str:
    title, boxes, (ranks, parity) = SFT[language]
    left, width, height, pitch = 62, 316, 52, 76
    top = 18
    # What every rank does for itself, from the packing to the optimizer.
    drawn = (
        f'<rect class="note" x="14" y="{top + 2 * pitch - 12}" width="412" height="{4 * pitch}" rx="9"/>\n'
    )
    drawn += text(ranks, left + 12, top + 2 * pitch + height + 16, "start")
    for number, (kind, name, words) in enumerate(boxes):
        y = top + number * pitch
        drawn += box(kind, left, y, width, height, name, words)
        if number:
            drawn += arrow((WIDTH / 2, y - pitch + height), (WIDTH / 2, y - 2))
            drawn += badge(str(number), WIDTH / 2 + 20, y - 12)
    drawn += badge("P", 402, top + 3 * pitch + height / 2)
    drawn += arrow((left + width, top + 3 * pitch + height / 2), (391, top + 3 * pitch + height / 2))
    drawn += text(parity, 418, top + 3 * pitch + height + 17, "end")
    return page(top + 7 * pitch - 8, title, drawn)


def online(language: str) -> str:
    title, words = ONLINE[language]
    columns, width, row, height = (10, 153, 296), 134, 166, 62
    store, bottom = 318, 420
    drawn = box("box", 10, 16, 420, 58, *words["controller"])
    for x, name in zip(columns, ("rollout", "reward", "policy"), strict=True):
        drawn += box("box", x, row, width, height, *words[name])
    drawn += box("store", 54, store, 332, 58, *words["objects"])
    # From the controller down on the left of each column, and up on the right.
    for x, down, up in zip(columns, "147", "369", strict=True):
        drawn += arrow((x + 36, 74), (x + 36, row - 2)) + badge(down, x + 36, 118)
        drawn += arrow((x + 98, row), (x + 98, 76)) + badge(up, x + 98, 118)
    under, first, second, third = row + height, 100, WIDTH / 2, 340
    drawn += arrow((first, under), (first, store - 2), kind="tokens") + badge("2", first, 272)
    drawn += arrow((second, store), (second, under + 2), kind="tokens") + badge("5", second, 272)
    drawn += arrow((third, store), (third, under + 2), kind="tokens") + badge("8", third, 272)
    drawn += arrow((374, under), (374, under + 20)) + badge("P", 374, under + 30)
    # Weights go around the store.
    drawn += arrow((410, under), (410, bottom), (30, bottom), (30, under + 2), kind="weights")
    drawn += badge("10", WIDTH / 2 - 98, bottom) + text(words["weights"], WIDTH / 2 + 14, bottom - 9)
    for x, kind, name in zip((24, 214, 316), ("", "tokens", "weights"), words["legend"], strict=True):
        drawn += f'<line class="line {kind}" x1="{x}" x2="{x + 26}" y1="{bottom + 30}" y2="{bottom + 30}"/>\n'
        drawn += text(name, x + 33, bottom + 34, "start")
    return page(bottom + 50, title, drawn)


def pictures() -> dict[str, str]:
    """Each by its file's name."""
    drawn = {}
    for language, ending in (("en", ""), ("zh", "-zh")):
        drawn[f"architecture-sft{ending}.svg"] = supervised(language)
        drawn[f"architecture-online{ending}.svg"] = online(language)
    return drawn


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    for name, drawn in pictures().items():
        (directory / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
