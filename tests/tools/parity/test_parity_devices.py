"""What a run's records say of its mesh, in tables and in the levels that it has none of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from certified_runs import MESHED, run_of, written
from isotrain.tools.parity.certify.certificate import read_certificate
from isotrain.tools.parity.devices import mesh_of, mesh_words, uses_ring, why_untraced
from isotrain.tools.parity.protocol import verdict_on
from isotrain.tools.parity.read.runs import read_run


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (None, ""),
        ({}, ""),
        ({"replicas": 1, "context": 1, "context_attention": "ring", "expert": 1}, ""),
        ({"context": 2}, "context 2 (auto)"),
        ({"context": 4, "context_attention": "ulysses", "replicas": 2}, "context 4 (Ulysses), replicas 2"),
        ({"expert": 8}, "expert 8"),
        ({"context": "<b>", "context_attention": "*x*"}, "context unknown (unknown)"),
        ("ring", ""),
    ],
)
def test_words(mesh: Any, words: str) -> None:
    assert mesh_words({"mesh": mesh}) == words


def test_what_changes_nothing_is_left_out() -> None:
    whole = {"replicas": 1, "context": 2, "context_attention": "auto", "expert": 1}
    assert mesh_of({"mesh": whole}) == mesh_of({"mesh": {"context": 2}}) != mesh_of({})
    assert uses_ring({"mesh": {"context": 2, "context_attention": "ring"}})
    assert not uses_ring({"mesh": {"context_attention": "ring"}})


def test_layers_are_not_asked_for(tmp_path: Path) -> None:
    """Whoever reads the verdict is told why, and not to set what a mesh refuses."""
    plain, meshed = run_of(tmp_path / "plain"), run_of(tmp_path / "meshed", 1e-4, **MESHED)
    assert why_untraced(read_run(plain), read_run(plain)) is None
    found = verdict_on(plain, meshed)
    for name in ("P0", "P1"):
        level = found.level(name)
        assert level.state == "not run"
        assert level.words == "not recorded: the candidate divides its layers over ranks (context 2 (ring))"
    assert "observe.operators" in verdict_on(plain, run_of(tmp_path / "other", 1e-4)).level("P0").words
    assert "the reference divides" in verdict_on(meshed, plain).level("P1").words


def test_it_is_in_the_name_of_a_certificate(tmp_path: Path) -> None:
    path = written(tmp_path, candidate=MESHED)
    assert path.name.startswith("sft-tiny-1-cpu-amx-cpu-context-2-ring-paired-")
    made = read_certificate(path)
    assert (made.reference.mesh, made.candidate.mesh) == ("", "context 2 (ring)")
