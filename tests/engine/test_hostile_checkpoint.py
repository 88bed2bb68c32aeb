"""Checkpoints from elsewhere: whatever is in them, they give an error of ours and lead nowhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import newest, save, shards, sign
from safetensors.torch import save_file

from isotrain.engine.checkpoint import layout
from isotrain.engine.checkpoint.layout import problem_in, read_manifest
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.errors import CheckpointError


def replaced(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: {**manifest, key: value}


def files_become(*names: str, **expected: Any) -> Callable[[dict[str, Any]], Any]:
    described = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest(), **expected}
    return lambda manifest: {**manifest, "ranks": len(names), "files": dict.fromkeys(names, described)}


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a path upwards": files_become("../../secret"),
    "an absolute path": files_become("/etc/passwd"),
    "a path beside a real file": files_become("rank-00000.safetensors", "../../secret"),
    "a subdirectory": files_become("rank-00000.safetensors/../../../secret"),
    "no files": replaced("files", {}),
    "files as a list": replaced("files", ["rank-00000.safetensors"]),
    "a file without a description": replaced("files", {"rank-00000.safetensors": None}),
    "a size in words": files_become("rank-00000.safetensors", size="six"),
    "a negative size": files_become("rank-00000.safetensors", size=-1),
    "a sum that is a number": files_become("rank-00000.safetensors", sha256=7),
    "more ranks than files": replaced("ranks", 1_000_000_000),
    "no ranks": replaced("ranks", 0),
    "half a rank": replaced("ranks", 1.0),
    "ranks in words": replaced("ranks", "one"),
    "true ranks": replaced("ranks", True),
    "another step": replaced("step", 11),
    "a negative step": replaced("step", -10),
    "an endless step": replaced("step", 10**300),
    "a step in words": replaced("step", "10"),
    "another format": replaced("format", 2),
    "a format like an essay": replaced("format", "x" * 100_000),
    "a list as format": replaced("format", [[]]),
    "no state": replaced("state", None),
    "words in the state": replaced("state", {"taken": "many"}),
    "a negative state": replaced("state", {"taken": -1}),
    "an endless state": replaced("state", {"taken": 10**30}),
    "not a number": replaced("state", {"taken": float("nan")}),
    "nothing": lambda manifest: None,
    "a list": lambda manifest: [manifest],
    "an empty object": lambda manifest: {},
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_manifest_is_refused(tmp_path: Path, hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    root = tmp_path / "checkpoints"
    save(root, 5)
    directory = save(root, 10)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(HOSTILE[hostile](manifest)))
    sign(directory)
    read: list[Path] = []
    monkeypatch.setattr(layout, "sha256_of", lambda path: read.append(path) or _digest(path))
    with pytest.raises(ValueError, match=r"^manifest\.json (is|has|does) .{,120}$"):
        read_manifest(directory)
    step, said = newest(root)
    assert step == 5 and "step-00000010 is not used: manifest.json " in said
    assert read and all(path.parent.parent == root for path in read)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, '{"step": ' + "1" * 10_000 + "}", "\udcff"])
def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    directory = save(tmp_path, 10)
    (directory / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    sign(directory)
    with pytest.raises(ValueError, match=r"manifest\.json is not JSON"):
        read_manifest(directory)
    assert newest(tmp_path)[0] is None


def test_a_count_that_is_missing_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no 'epochs'"):
        CheckpointReader(save(tmp_path, 10)).state["epochs"]


def place(**changes: Any) -> dict[str, str]:
    described = {"x": {"shape": [4, 3], "offset": [0, 0], **changes}}
    return {"shards": json.dumps(described), "extras": "{}"}


HOSTILE_FILES: dict[str, dict[str, str] | None] = {
    "no metadata": None,
    "no extras": {"shards": "{}"},
    "places that are no JSON": {"shards": "{", "extras": "{}"},
    "places in a list": {"shards": "[1]", "extras": "{}"},
    "endless nesting": {"shards": "[" * 100_000, "extras": "{}"},
    "a tensor that is not there": {"shards": '{"y": {"shape": [1], "offset": [0]}}', "extras": "{}"},
    "a part outside of the whole": place(offset=[1, 0]),
    "a negative offset": place(offset=[-1, 0]),
    "other dimensions": place(shape=[12]),
    "a shape in words": place(shape=["4", "3"]),
    "no shape": place(shape=None),
    "a shape of fractions": place(shape=[4.0, 3.0]),
    "a whole that nobody has": place(shape=[4, 10**15]),
}


@pytest.mark.parametrize("hostile", HOSTILE_FILES)
def test_a_hostile_rank_file_is_refused(tmp_path: Path, hostile: str) -> None:
    """Its sum is right, so only opening it shows what it is."""
    directory = save(tmp_path, 10)
    file = directory / "rank-00000.safetensors"
    save_file({"x": torch.zeros(4, 3)}, file, metadata=HOSTILE_FILES[hostile])
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][file.name] = {"size": file.stat().st_size, "sha256": _digest(file)}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    sign(directory)
    reader = CheckpointReader(directory)
    assert reader.problems() == []
    with pytest.raises(CheckpointError):
        reader.whole("x")
    with pytest.raises(CheckpointError):
        CheckpointReader(directory).fill(shards({"x": torch.zeros(5, 3)}), rank=0)


def test_a_rank_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path, 10)
    reader = CheckpointReader(directory)
    (directory / "rank-00000.safetensors").write_bytes(b"\x80\x04." * 100)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is not a rank's file"):
        reader.shapes()


def test_problem_in_names_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.safetensors").mkdir()
    assert problem_in(tmp_path, "rank-00000.safetensors", {}) == "rank-00000.safetensors is missing"
