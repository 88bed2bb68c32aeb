from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from run_samples import VERSION, event, field, plugin, record, simple, tensor, tensorboard

from isotrain.errors import DataError
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.read.tensorboard import masked_crc


def write(path: Path, *events: bytes) -> Path:
    path.write_bytes(VERSION + b"".join(events))
    return path


def test_masks_checksums() -> None:
    # CRC32C of 32 zero bytes is 8a9136aa (RFC 3720); rotated right by 15 bits, plus TensorFlow's constant.
    crc = 0x8A9136AA
    assert masked_crc(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_file_by_its_name_and_by_its_content(tmp_path: Path) -> None:
    for name in ("events.out.tfevents.1.host", "renamed"):
        run = read_run(tensorboard(tmp_path / name))
        assert run.format == "TensorBoard events"
        series = run.metrics["train/loss"]
        assert series.steps_S.tolist() == [0, 1, 2, 3, 4]
        expected = [struct.unpack("<f", struct.pack("<f", 1 / step))[0] for step in range(1, 6)]
        assert series.values_S.tolist() == expected
        assert set(run.sha256) == {name}


def test_what_the_real_writer_writes(tmp_path: Path) -> None:
    writer_of = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    long = "a/" + "very/" * 40 + "long/tag"
    with writer_of(str(tmp_path / "runs" / "mine")) as writer:
        for step in range(300):
            writer.add_scalar("train/loss", 1 / (step + 1), step)
            writer.add_scalar("train/new", 2.5 * step, step, new_style=True)
            writer.add_scalar("train/double", 0.1 * step, step, new_style=True, double_precision=True)
            writer.add_scalar(long, math.nan if step == 7 else step, step)
        writer.add_text("train/text", "hello", 3)
        writer.add_histogram("train/histogram", np.arange(100), 3)
    run = read_run(tmp_path)
    assert set(run.metrics) == {"train/loss", "train/new", "train/double", long}
    assert all(series.steps_S.tolist() == list(range(300)) for series in run.metrics.values())
    assert run.metrics["train/new"].values_S.tolist() == [2.5 * step for step in range(300)]
    assert run.metrics["train/double"].values_S.tolist() == [0.1 * step for step in range(300)]
    assert math.isnan(run.metrics[long].values_S[7])
    [name] = run.sha256
    assert name.startswith("runs/mine/events.out.tfevents.")


def test_reads_tensors_of_every_kind(tmp_path: Path) -> None:
    scalar = plugin("scalars")
    path = write(
        tmp_path / "events.out.tfevents.1",
        event(
            1,
            tensor("packed", b"\x08\x01" + field(5, struct.pack("<f", 0.5)), metadata=scalar),
            tensor("plain", b"\x08\x01" + b"\x2d" + struct.pack("<f", 0.25), metadata=scalar),
            tensor("raw", b"\x08\x02" + field(4, struct.pack("<d", 0.1)), metadata=scalar),
            tensor("double", b"\x08\x02" + field(6, struct.pack("<d", 0.3)), metadata=scalar),
            tensor("int", b"\x08\x09" + field(10, b"\x05"), metadata=scalar),
            tensor("two", b"\x08\x01" + field(5, struct.pack("<2f", 1, 2)), metadata=scalar),
            tensor("text", b"\x08\x07" + field(8, b"hi"), metadata=plugin("text")),
            tensor("other", b"\x08\x01" + field(5, struct.pack("<f", 1)), metadata=plugin("pr_curves")),
            simple("old", 2.0),
        ),
        # A writer says what a tag is for only once.
        event(-2, tensor("packed", b"\x08\x01" + field(5, struct.pack("<f", 0.75)))),
    )
    metrics = read_run(path).metrics
    assert {name: series.values_S.tolist() for name, series in metrics.items()} == {
        "packed": [0.75, 0.5],
        "plain": [0.25],
        "raw": [0.1],
        "double": [0.3],
        "int": [5.0],
        "old": [2.0],
    }
    assert metrics["packed"].steps_S.tolist() == [-2, 1]


def loss(steps: range, value: float, tag: str = "loss") -> list[bytes]:
    return [event(step, simple(tag, value)) for step in steps]


def test_a_resumed_run_in_one_more_file(tmp_path: Path) -> None:
    # 1..10 with a validation at 10, resumed after 6, stopped at 8: what was at 9 and 10 never came again.
    write(tmp_path / "events.out.tfevents.99.a", *loss(range(1, 11), 1.0), *loss(range(5, 11, 5), 1.0, "val"))
    write(tmp_path / "events.out.tfevents.100.a", *loss(range(7, 9), 2.0))
    run = read_run(tmp_path)
    assert run.metrics["loss"].steps_S.tolist() == list(range(1, 9))
    assert run.metrics["loss"].values_S.tolist() == [1.0] * 6 + [2.0] * 2
    assert run.metrics["val"].steps_S.tolist() == [5]
    assert len(run.sha256) == 2


def test_a_resumed_run_in_the_same_file(tmp_path: Path) -> None:
    series = read_run(
        write(tmp_path / "x.tfevents", *loss(range(1, 6), 1.0), *loss(range(4, 7), 2.0))
    ).metrics["loss"]
    assert series.steps_S.tolist() == [1, 2, 3, 4, 5, 6]
    assert series.values_S.tolist() == [1, 1, 1, 2, 2, 2]


def test_reads_a_second_writer_with_other_tags(tmp_path: Path) -> None:
    write(tmp_path / "events.out.tfevents.1.a", *loss(range(1, 6), 1.0))
    write(tmp_path / "events.out.tfevents.2.a", *loss(range(1, 6), 2.0, "val"))
    assert {name: len(series) for name, series in read_run(tmp_path).metrics.items()} == {"loss": 5, "val": 5}


def test_more_than_one_run_below(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tensorboard(tmp_path / name / "events.out.tfevents.1")
    with pytest.raises(DataError, match="more than one run: give one of a, b"):
        read_run(tmp_path)
    tensorboard(tmp_path / "events.out.tfevents.1")
    assert len(read_run(tmp_path).sha256) == 1


def test_a_last_record_that_is_cut(tmp_path: Path) -> None:
    whole = tensorboard(tmp_path / "events.out.tfevents.1").read_bytes()
    last = len(event(4, simple("train/loss", 0.2)))
    for cut in range(1, last):
        (tmp_path / "events.out.tfevents.1").write_bytes(whole[:-cut])
        assert len(read_run(tmp_path).metrics["train/loss"]) == 4


def test_every_damaged_byte_is_seen(tmp_path: Path) -> None:
    whole = tensorboard(tmp_path / "events.out.tfevents.1").read_bytes()
    start = len(VERSION)
    for at in range(start, len(whole) - len(event(4, simple("train/loss", 0.2)))):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        (tmp_path / "events.out.tfevents.1").write_bytes(damaged)
        with pytest.raises(DataError, match=r"tfevents\.1: the record at byte \d+ is damaged"):
            read_run(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"\x2a\x7f", b"\x2b", b"\x10" + b"\xff" * 12, field(5, field(1, field(1, b"\xff\xfe"))), b"\x09\x00"],
)
def test_refuses_nonsense_with_a_sound_checksum(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "events.out.tfevents.1", record(content), *loss(range(3), 1.0))
    with pytest.raises(DataError, match=f"the record at byte {len(VERSION)} is damaged"):
        read_run(path)


def test_a_record_beyond_the_bound_is_passed_over(tmp_path: Path) -> None:
    image = record(field(5, field(1, field(1, b"image") + field(4, bytes(9 << 20)))))
    path = write(tmp_path / "events.out.tfevents.1", *loss(range(2), 1.0), image, *loss(range(2, 4), 1.0))
    assert read_run(path).metrics["loss"].steps_S.tolist() == [0, 1, 2, 3]


def test_refuses_a_log_without_scalars(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no scalars"):
        read_run(write(tmp_path / "events.out.tfevents.1"))


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    tensorboard(tmp_path / "outside")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.out.tfevents.1").symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="leads out"):
        read_run(tmp_path / "run")
