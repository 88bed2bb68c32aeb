"""A diagnosis on disk: its settings, and what its child processes hand to each other. No pickle.

N: response tokens, C: conventions, D: hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from isotrain.files import parse_json, read_regular
from isotrain.rollout.base import Sampling
from isotrain.tools.mismatch.passes import Forced, Inside, Pass, Sequence_


@dataclass(frozen=True)
class Job:
    model: str
    """Model directory with the weights that both sides are to have."""
    engine: str
    dtype: str
    head_float32: bool = False
    device: str = "auto"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 64
    max_length: int = 2048
    seed: int = 0
    engine_options: dict[str, Any] = field(default_factory=dict)
    server_python: str | None = None
    kv_cache_gb: float = 0.5
    memory_utilization: float = 0.5
    attention: str = "auto"
    prompts: tuple[tuple[int, ...], ...] = ()
    """Sample from these; without them, the sequences are there already."""
    n: int = 1

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k)

    @property
    def quantised(self) -> bool:
        return str(self.engine_options.get("kv_cache_dtype", "auto")) not in ("auto", self.dtype)

    def write(self, work: Path) -> None:
        (work / "job.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, work: Path) -> Job:
        values: Any = parse_json(read_regular(work / "job.json", 1 << 26))
        values["prompts"] = tuple(tuple(prompt) for prompt in values["prompts"])
        return cls(**values)


# Tokens of all sequences together: the outputs of every module are kept for each.
MOST_ROWS = 4096


def first_rows(sequences: Sequence[Sequence_]) -> list[Sequence_]:
    """The first sequences that have no more tokens together than are looked at; at least one."""
    rows = np.cumsum([len(s.tokens_T) for s in sequences])
    return list(sequences[: max(1, int((rows <= MOST_ROWS).sum()))])


def write_sequences(work: Path, sequences: Sequence[Sequence_]) -> None:
    arrays: dict[str, Any] = {}
    for i, s in enumerate(sequences):
        arrays |= {f"tokens{i}": s.tokens_T, f"mask{i}": s.mask_N, f"logp{i}": s.logp_N}
        arrays[f"prompt{i}"] = np.array(s.prompt_length)
    np.savez(work / "sequences.npz", count=np.array(len(sequences)), **arrays)


def read_sequences(work: Path) -> list[Sequence_]:
    with np.load(work / "sequences.npz", allow_pickle=False) as a:
        return [
            Sequence_(a[f"tokens{i}"], int(a[f"prompt{i}"]), a[f"mask{i}"], a[f"logp{i}"])
            for i in range(int(a["count"]))
        ]


def _pass_file(work: Path, process: str, way: Pass) -> Path:
    return work / f"{process}-{'decode' if way.decode else 'read'}-{way.together:d}{way.cached:d}.npz"


def write_forced(work: Path, process: str, way: Pass, forced: Sequence[Forced]) -> None:
    arrays = {f"logp{i}": f.logp_CN for i, f in enumerate(forced)}
    arrays |= {f"hidden{i}": f.hidden_ND for i, f in enumerate(forced)}
    np.savez(_pass_file(work, process, way), allow_pickle=False, **arrays)


def read_forced(work: Path, process: str, way: Pass) -> list[Forced]:
    with np.load(_pass_file(work, process, way), allow_pickle=False) as a:
        return [Forced(a[f"logp{i}"], a[f"hidden{i}"]) for i in range(sum(k.startswith("logp") for k in a))]


def write_inside(work: Path, inside: Inside) -> None:
    save_file({name: t.contiguous() for name, t in inside.tensors().items()}, work / "inside.safetensors")


def read_inside(work: Path) -> Inside:
    path = work / "inside.safetensors"
    return Inside.from_tensors(load_file(path)) if path.is_file() else Inside()


@dataclass
class WeightDifferences:
    """The engine's tensors that are not those of the checkpoint, by published name."""

    compared: int
    unread: list[str]
    tensors: dict[str, torch.Tensor]

    def write(self, work: Path) -> None:
        described = {"compared": self.compared, "unread": self.unread}
        (work / "weights.json").write_text(json.dumps(described), encoding="utf-8")
        save_file({n: t.contiguous() for n, t in self.tensors.items()}, work / "weights.safetensors")

    @classmethod
    def read(cls, work: Path) -> WeightDifferences:
        values: Any = parse_json(read_regular(work / "weights.json", 1 << 26))
        return cls(values["compared"], values["unread"], load_file(work / "weights.safetensors"))
