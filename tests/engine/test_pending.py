"""Waiting for a checkpoint that others write."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from isotrain.engine.checkpoint import writer as module
from isotrain.engine.checkpoint.layout import wait_for_pending
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.models.weights import Shard


def test_nothing_is_waited_for_where_nothing_is_written(tmp_path: Path) -> None:
    said: list[str] = []
    for root in (tmp_path / "none", tmp_path):
        wait_for_pending(root, 0.0, said.append)
    assert not said


def test_a_slow_write_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    write = module.write_tensors

    def write_tensors(*args: Any) -> Any:
        assert slow.wait(20)
        return write(*args)

    monkeypatch.setattr(module, "write_tensors", write_tensors)
    writer = CheckpointWriter(tmp_path, 0, 1, keep=1)
    writer.save(3, {"w": Shard(torch.ones(2), (2,), (0,))}, {}, {})
    while not (tmp_path / ".writing-step-00000003").exists():
        time.sleep(0.01)
    said: list[str] = []
    wait_for_pending(tmp_path, 0.1, said.append)
    assert said == ["warning: checkpoint step-00000003 was not written within 0.1 s and is abandoned"]
    threading.Timer(1.5, slow.set).start()
    wait_for_pending(tmp_path, 60.0, said.append)
    assert said[1:] == ["waiting up to 60 s for checkpoint step-00000003"]
    assert CheckpointReader(tmp_path / "step-00000003").problems() == []
    writer.wait()
