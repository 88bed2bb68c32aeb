"""A diagnosis on disk: its settings, and what its child processes hand to each other. No pickle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked

from isotrain.files import read_regular
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import ModelSection
from isotrain.rollout.base import Sampling
from isotrain.tools.mismatch.passes import Pass, Sequence_

Item = TypeVar("Item")


@checked(frozen=True)
class Job:
    model: ModelSection
    """Its path has the weights that both sides are to have."""
    rollout: RolloutSection
    device: str = "auto"
    max_length: int = 2048
    """Of a prompt with its response."""
    seed: int = 0
    prompts: tuple[tuple[int, ...], ...] = ()
    """Sample from these; without them, the sequences are there already."""

    @property
    def directory(self) -> Path:
        return Path(self.model.path)

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @property
    def sampling(self) -> Sampling:
        r = self.rollout
        return Sampling(r.max_tokens, r.temperature, r.top_p, r.top_k)

    @property
    def has_cache(self) -> bool:
        """Of prefixes, over requests."""
        return self.rollout.engine != "hf"

    @property
    def quantised(self) -> bool:
        return str(self.rollout.engine_options.get("kv_cache_dtype", "auto")) not in ("auto", self.dtype)

    @property
    def processes(self) -> list[str]:
        """The engine's processes: as it samples, then with single settings changed."""
        changed = {"plain": self.quantised, "float32": self.dtype != "float32"}
        return ["given", *(name for name, there in changed.items() if there)]

    @property
    def looked_into(self) -> str:
        """The process whose modules are compared: a quantised cache is a cause of its own."""
        return "plain" if self.quantised else "given"

    def write(self, work: Path) -> None:
        (work / "job.json").write_bytes(TypeAdapter(Job).dump_json(self))

    @classmethod
    def read(cls, work: Path) -> Job:
        return TypeAdapter(Job).validate_json(read_regular(work / "job.json", 1 << 26))


# Tokens of all sequences together: the outputs of every module are kept for each.
MOST_ROWS = 4096


def first_rows(sequences: Sequence[Sequence_]) -> list[Sequence_]:
    """The first sequences that have no more tokens together than are looked at; at least one."""
    rows = np.cumsum([len(s.tokens_T) for s in sequences])
    return list(sequences[: max(1, int((rows <= MOST_ROWS).sum()))])


SEQUENCES = "sequences.npz"
# The engine's tensors that are not those of the checkpoint, and the names and number of the others.
TENSORS, COMPARED = "weights.safetensors", "weights.json"


def inside_file(work: Path, process: str) -> Path:
    return work / f"inside-{process}.safetensors"


def pass_file(work: Path, process: str, way: Pass) -> Path:
    return work / f"{process}-{''.join(str(int(part)) for part in way)}.npz"


def write(path: Path, items: Sequence[Any]) -> None:
    """Dataclasses of arrays."""
    arrays = {f"{name}/{i}": value for i, item in enumerate(items) for name, value in vars(item).items()}
    np.savez(path, allow_pickle=False, count=np.array(len(items)), **arrays)


def read(path: Path, kind: Callable[..., Item]) -> list[Item]:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    with np.load(path, allow_pickle=False) as a:
        return [kind(*(a[f"{name}/{i}"][()] for name in names)) for i in range(int(a["count"]))]
