"""One rank of a machine reads what all of its ranks need, in few reads, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from isotrain.models import weights
from isotrain.models.load import build_causal_lm
from isotrain.models.weights import SINGLE, WeightFiles, parts_of, source_parts

RANKS = 8


@pytest.fixture
def job() -> Iterator[None]:
    """Rank 2 of a job of eight; nothing is sent."""
    dist.init_process_group("fake", rank=2, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sizes and places of reads."""
    done: list[tuple[int, int]] = []
    read = os.pread

    def counted(descriptor: int, size: int, start: int) -> bytes:
        done.append((size, start))
        return read(descriptor, size, start)

    monkeypatch.setattr(os, "pread", counted)
    return done


def sharded(shape: tuple[int, ...]) -> DTensor:
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = -(-shape[0] // RANKS)
    local = torch.empty(max(0, min(rows, shape[0] - 2 * rows)), *shape[1:])
    return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=local.stride())


def test_parts_of_other_ranks_are_known(job: None) -> None:
    tensor = sharded((20, 3))  # three rows a rank; the seventh has two, the last none
    parts = [(part[0].start, part[0].stop) for part in parts_of(tensor, range(RANKS))]
    assert parts[:7] == [(0, 3), (3, 6), (6, 9), (9, 12), (12, 15), (15, 18), (18, 20)]
    assert all(start == stop for start, stop in parts[7:])
    whole = torch.ones(4, 2)
    assert list(parts_of(whole, range(RANKS))) == [(slice(0, 4), slice(0, 2))]


def test_reads_are_joined(job: None, tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """Four ranks of a machine: their rows of each tensor are one read, and tensors that touch are too."""
    tensors = {f"w{number:02d}": torch.randn(1024, 256) for number in range(16)}
    save_file(tensors, tmp_path / SINGLE)
    files = WeightFiles(tmp_path)
    parts = [(name, part) for name in tensors for part in parts_of(sharded((1024, 256)), range(4))]
    assert files.read_ahead(parts) == sum(size for size, _ in reads) == 16 * 512 * 1024
    assert len(reads) == 16, "in place of 64"
    data = (tmp_path / SINGLE).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert sorted(start - header for _, start in reads) == [n * 1024 * 1024 for n in range(16)]
    reads.clear()
    parts = [(name, part) for name in tensors for part in parts_of(sharded((1024, 256)), range(RANKS))]
    assert files.read_ahead(parts) == 16 << 20 and len(reads) == 2, "blocks of 8 MiB of one file"


def test_a_machine_without_room_reads_nothing(
    tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not stay in the cache would be read twice."""
    save_file({"w": torch.ones(64, 4)}, tmp_path / SINGLE)
    monkeypatch.setattr(weights, "_available_memory", lambda: 1024)
    assert WeightFiles(tmp_path).read_ahead([("w", (slice(0, 64), slice(None)))]) == 0 and not reads


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_all_of_a_model_is_read(architecture: str, tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """A whole model on one rank: every byte of its tensors, fused experts among them."""
    from isotrain.data.prepare.tiny import make_tiny

    make_tiny(tmp_path, train_rows=1, validation_rows=1, architecture=architecture)
    model, files = build_causal_lm(tmp_path / "model", "sdpa"), WeightFiles(tmp_path / "model")
    tensors = dict(model.named_parameters())
    size = sum(
        end - begin for name in set(files.file_of.values()) for begin, end in files._places(name).values()
    )
    assert files.read_ahead(source_parts(model, tensors, files, [0])) == size
