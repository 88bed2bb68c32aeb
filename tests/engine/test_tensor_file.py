"""Files written in one pass hold what safetensors' own writer would have written."""

from __future__ import annotations

import hashlib
import io
import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isotrain.engine.checkpoint.tensor_file import write_tensors

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
)
SHAPES = {"matrix": (3, 5), "scalar": (), "empty": (0,), "no rows": (0, 4), 'ü/quoted"\n': (7,)}
METADATA = {"shards": json.dumps({"a": [1, 2]}), "extras": 'ü " \\ \n', "format": "pt"}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, so that NaNs count as well."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def everything() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{dtype}/{name}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for name, shape in SHAPES.items()
    }


def test_the_file_equals_that_of_safetensors(tmp_path: Path) -> None:
    tensors = everything()
    tensors["nan"] = torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)
    with (tmp_path / "ours").open("wb") as file:
        written = write_tensors(file, tensors, METADATA)
    save_file(tensors, tmp_path / "theirs", metadata=METADATA)
    data = (tmp_path / "ours").read_bytes()
    assert (written.size, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == tensors.keys()
    assert all(same(ours[name], theirs[name]) and same(ours[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == METADATA
    # Each tensor can be read in place: it begins at a multiple of its own type's size.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in tensors.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.itemsize == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_in_the_order_of_names_the_bytes_are_equal_too(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"weights/{name}": torch.arange(name + 3).to(dtype) for name in range(9)}
    with (tmp_path / "ours").open("wb") as file:
        write_tensors(file, tensors, {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_no_tensors_and_no_metadata(tmp_path: Path) -> None:
    with (tmp_path / "ours").open("wb") as file:
        write_tensors(file, {}, {})
    assert load_file(tmp_path / "ours") == {}
    with safe_open(tmp_path / "ours", "pt") as file:
        assert not file.metadata()


def test_parts_of_larger_tensors(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {"rows": whole[1:3], "columns": whole[:, 2:4], "turned": whole.t()}
    with (tmp_path / "ours").open("wb") as file:
        write_tensors(file, tensors, {})
    read = load_file(tmp_path / "ours")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


class Nowhere:
    def write(self, data: memoryview, /) -> int:
        return len(data)


def test_tensors_are_read_one_at_a_time() -> None:
    described = {f"{n}": torch.empty(1 << 20, device="meta") for n in range(8)}
    turns: list[str] = []

    def read(name: str) -> torch.Tensor:
        turns.append(name)
        return torch.full((1 << 20,), float(name))

    tracemalloc.start()
    try:
        written = write_tensors(Nowhere(), described, {}, read)
        # Torch's memory is not traced: what is, would be a copy.
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert turns == list(described) and written.size > 8 * 4 << 20


def test_a_tensor_that_differs_from_what_was_announced_is_refused() -> None:
    described = {"a": torch.empty(3, device="meta")}
    with pytest.raises(ValueError, match=r"'a' is torch\.float32 \(4,\), announced were .* \(3,\)"):
        write_tensors(io.BytesIO(), described, {}, lambda _: torch.zeros(4))
    with pytest.raises(ValueError, match="announced"):
        write_tensors(io.BytesIO(), described, {}, lambda _: torch.zeros(3, dtype=torch.float16))
