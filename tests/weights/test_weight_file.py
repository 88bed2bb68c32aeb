"""Weights through shared memory: what arrives is what was sent, and damage never passes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from isotrain.errors import WeightUpdateError
from isotrain.weights import file as weight_file
from isotrain.weights.digest import checksum
from isotrain.weights.file import open_update, path_of, read_update, remove_abandoned, write_update


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        ("a.weight", torch.randn(70, 33, generator=draw)),
        ("b.weight", torch.randn(64, 64, generator=draw).bfloat16()),
        ("transposed", torch.randn(5, 7, generator=draw).t()),
        ("scalar", torch.tensor(3.0)),
        ("empty", torch.empty(0, 4)),
        ("counts", torch.arange(9)),
    ]


def equal(left: list[tuple[str, torch.Tensor]], right: list[tuple[str, torch.Tensor]]) -> bool:
    return all(
        a == b and x.dtype == y.dtype and torch.equal(x, y)
        for (a, x), (b, y) in zip(left, right, strict=True)
    )


def test_what_arrives_is_what_was_sent(tmp_path: Path, device_type: str) -> None:
    sent = [(name, tensor.to(device_type)) for name, tensor in weights()]
    update = write_update(iter(sent), 3, tmp_path)
    assert (update.version, update.tensors) == (3, len(sent))
    assert update.bytes == sum(tensor.nbytes for _, tensor in sent)
    with open_update(update, "e") as arrived:
        assert equal(weights(), arrived.tensors)
        assert (arrived.version, arrived.digest) == (3, update.digest)
    with safe_open(path_of(update), "pt") as file:  # an ordinary safetensors file
        assert torch.equal(file.get_tensor("b.weight"), weights()[1][1])
    assert stat.S_IMODE(os.stat(path_of(update)).st_mode) == 0o600


def test_the_digest_covers_names_types_shapes_order_and_bytes(tmp_path: Path) -> None:
    plain = [("a", torch.zeros(4)), ("b", torch.ones(4))]
    variants = [
        plain,
        [("a", torch.zeros(4)), ("c", torch.ones(4))],
        [("a", torch.zeros(4, dtype=torch.int32)), ("b", torch.ones(4))],
        [("a", torch.zeros(2, 2)), ("b", torch.ones(4))],
        plain[::-1],
        [("a", torch.tensor([0.0, 0, 0, 1e-30])), ("b", torch.ones(4))],
    ]
    assert len({write_update(v, 1, tmp_path).digest for v in variants}) == len(variants)
    assert write_update(plain, 2, tmp_path).digest == write_update(plain, 1, tmp_path).digest


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive = 0

    class Tracked(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive
        for index in range(20):
            alive += 1
            assert alive <= 2  # the one before is let go of when the next one is asked for
            yield str(index), torch.zeros(10).as_subclass(Tracked)

    assert write_update(stream(), 1, tmp_path).tensors == 20


def test_two_files_take_turns_and_the_last_version_stays(tmp_path: Path) -> None:
    updates = [write_update(weights(version), version, tmp_path) for version in (1, 4, 6)]
    assert updates[0].sources == updates[2].sources != updates[1].sources
    for version, update in ((4, updates[1]), (6, updates[2])):
        with open_update(update, "e") as arrived:
            assert equal(arrived.tensors, weights(version))
    with pytest.raises(WeightUpdateError, match=r"engine 4: weight update 1 .*holds version 6"):
        next(read_update(updates[0], "engine 4"))


def test_a_reader_keeps_its_version_while_newer_ones_are_written(tmp_path: Path) -> None:
    first = write_update(weights(1), 1, tmp_path)
    with open_update(first, "e") as arrived:
        later = [write_update(weights(version), version, tmp_path) for version in range(2, 6)]
        assert equal(arrived.tensors, weights(1))
    with open_update(later[-1], "e") as newest:
        assert equal(newest.tensors, weights(5))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(weight_file.FILES)


def test_half_a_file_is_never_read(tmp_path: Path) -> None:
    write_update(weights(1), 1, tmp_path)
    old = write_update(weights(2), 2, tmp_path)
    write_update(weights(3), 3, tmp_path)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(4)[:2]
        with pytest.raises(WeightUpdateError, match="is being overwritten"):
            next(read_update(old, "e"))
        raise ValueError("the sender fails")

    with pytest.raises(ValueError, match="the sender fails"):
        write_update(stream(), 4, tmp_path)
    with pytest.raises(WeightUpdateError, match="was not written to the end"):
        next(read_update(old, "e"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(offset: int, data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            file.write(data)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, "bytes of tensors"),
        (empty, "has 0 bytes"),
        (Path.unlink, "was announced but is not there"),
        (overwrite(-3, b"\xa5"), "digest"),
        (overwrite(weight_file.HEADER_ROOM + 5, b"\xa5"), "digest"),
        (overwrite(7, b"\x7f"), "was not written to the end"),
        (overwrite(8, b"x"), "damaged header"),
        (overwrite(60, b"\xff\xff"), "damaged header"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    update = write_update(weights(), 8, tmp_path)
    change(Path(path_of(update)))
    with pytest.raises(WeightUpdateError, match=f"engine 2: weight update 8.*{message}"):
        list(read_update(update, "engine 2"))


@pytest.mark.parametrize("field", ["tensors", "bytes", "digest", "version"])
def test_an_announcement_that_does_not_fit(tmp_path: Path, field: str) -> None:
    update = write_update(weights(), 8, tmp_path)
    wrong = replace(update, **{field: "0" * 64 if field == "digest" else 9})
    with pytest.raises(WeightUpdateError, match="engine 2: weight update"):
        list(read_update(wrong, "engine 2"))


def test_a_header_may_outgrow_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "HEADER_ROOM", 4096)
    many = [(f"layer.{index}.weight", torch.full((3, 5), float(index))) for index in range(500)]
    update = write_update(many, 1, tmp_path)
    with open_update(update, "e") as arrived:
        assert equal(many, arrived.tensors)
    with safe_open(path_of(update), "pt") as file:
        assert torch.equal(file.get_tensor("layer.321.weight"), many[321][1])


def test_the_same_name_twice(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="name appears twice"):
        write_update([("a", torch.zeros(1)), ("a", torch.zeros(1))], 1, tmp_path)


def test_refuses_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="cannot write a weight update"):
        write_update(weights(), 1, tmp_path / "missing")


MAKE = """
import os, sys, torch
from pathlib import Path
from isotrain.weights import file
if sys.argv[1] != "-":
    os.access = lambda path, mode: False
    file.tempfile.tempdir = sys.argv[1]
print(file.write_update([("a", torch.zeros(3))], 1).source(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.heavy
def test_the_private_directory_goes_with_its_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and killed.stdout is not None
    directory, abandoned = (Path(p.stdout.readline().strip()).parent for p in (process, killed))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    killed.kill()
    killed.wait()
    remove_abandoned(tmp_path)
    assert abandoned.exists()  # too young: it might not be locked yet
    old = time.time() - 100
    for path in (directory, abandoned):
        os.utime(path, (old, old))
    remove_abandoned(tmp_path)
    assert directory.exists() and not abandoned.exists()
    process.communicate("\n", timeout=60)
    assert not directory.exists()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8191, 8192, 8200, 20_001])
def test_the_check_sum_sees_every_bit_and_every_row(size: int) -> None:
    data = bytearray(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes())
    total = checksum(memoryview(data))
    assert checksum(memoryview(bytes(data))) == total and 0 <= total < 2**64
    assert checksum(memoryview(data + b"\0")) != total
    for place in {0, size // 2, size - 1} if size else ():
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            assert checksum(memoryview(changed)) != total
    row = 8 * 1024
    if size > 2 * row:
        assert checksum(memoryview(data[row : 2 * row] + data[:row] + data[2 * row :])) != total


def test_a_run_removes_what_its_own_processes_left(tmp_path: Path) -> None:
    own, other = (tmp_path / f"{weight_file.PREFIX}{run}-x" for run in ("1a", "2b"))
    for path in (own, other):
        path.mkdir()
    remove_abandoned(tmp_path, 0.0, "1a-")
    assert not own.exists() and other.exists()
