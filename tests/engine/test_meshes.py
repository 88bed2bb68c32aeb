"""Micro-batches whose tokens are split over ranks give what one rank gives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mesh_ranks
import npusim
import pytest
import torch
import transformers
from jobs import Tensors, results
from mesh_ranks import CASES
from safetensors.torch import load_file

from few_experts import save_few_experts
from isotrain.data.prepare.tiny import make_tiny
from isotrain.engine.checkpoint.reader import CheckpointReader
from small_models import save_small
from windowed import save_windowed

Run = Callable[..., list[Tensors]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_tiny(path / "tiny")
    make_tiny(path / "mixture", architecture="qwen3_moe")
    save_few_experts(path / "few experts", 2)
    save_windowed(path / "windowed" / "model", vocab=512)
    save_small("gemma3_text", path / "capped" / "model", vocab_size=512, final_logit_softcapping=2.0)
    return path


@pytest.fixture(scope="module")
def run(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(
        device: str,
        ranks: int,
        context: int = 1,
        replicas: int = 1,
        expert: int = 1,
        only: Sequence[str] = (),
        out: Path | None = None,
    ) -> list[Tensors]:
        out = out or tmp_path_factory.mktemp("context")
        shape = [str(context), str(replicas), str(expert)]
        command = [sys.executable, mesh_ranks.__file__, device, str(models), str(out), *shape, *only]
        npusim.run_ranks(command, ranks, timeout=1200)
        return results(out, ranks)

    return run


Check = Callable[[Tensors, str, Sequence[str]], None]


@pytest.fixture(scope="module")
def check(run: Run) -> Check:
    alone: Tensors = {}

    def check(found: Tensors, kind: str, cases: Sequence[str]) -> None:
        if missing := [case for case in cases if f"auto/{case}/numbers" not in alone]:
            alone.update(*run("cpu", 1, only=missing))
        _compare(found, alone, kind, cases)

    return check


def _compare(found: Tensors, alone: Tensors, kind: str, cases: Sequence[str]) -> None:
    for case in cases:
        numbers, expected = found[f"{kind}/{case}/numbers"], alone[f"auto/{case}/numbers"]
        assert expected[0, 0] - expected[-1, 0] > 0.1, "nothing is learnt, so nothing would be compared"
        difference = numbers[:, 0] - expected[:, 0]
        assert difference.abs().max() <= 1e-5, (kind, case)
        assert difference.mean().abs() <= 1e-6, (kind, case)
        torch.testing.assert_close(numbers, expected, rtol=1e-3, atol=1e-4)
        prefix = f"{kind}/{case}/"
        names = [name for name in found if name.startswith(prefix) and not name.endswith("/numbers")]
        assert names
        for name in names:
            torch.testing.assert_close(
                found[name], alone[f"auto/{name.removeprefix(f'{kind}/')}"], rtol=1e-3, atol=2e-4
            )


QUICK = {"cpu": ["shared prompts", "capped head"], "npu": ["window over shared prompts"]}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("device", "cases"),
    [
        *QUICK.items(),
        *(
            pytest.param(device, [case for case in CASES if case not in cases], marks=pytest.mark.slow)
            for device, cases in QUICK.items()
        ),
    ],
)
def test_context_of_two_ranks_changes_nothing(run: Run, check: Check, device: str, cases: list[str]) -> None:
    first, second = run(device, 2, context=2, only=cases)
    for kind in ("ulysses", "ring"):
        check(first, kind, cases)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_context_of_four_ranks_changes_nothing(run: Run, check: Check, device: str) -> None:
    """Heads over two ranks and rings of two where heads are few, rings of four, two groups of two."""
    for found in run(device, 4, context=4):
        for kind in ("auto", "ring"):
            check(found, kind, list(CASES))
    for found in run(device, 4, context=2):
        for kind in ("ulysses", "ring"):
            check(found, kind, list(CASES))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("device", "cases"),
    [
        ("npu", ["policy"]),
        *(pytest.param(device, ["policy", "adapters"], marks=pytest.mark.slow) for device in ("cpu", "npu")),
    ],
)
def test_copies_of_the_weights_train_alike_and_one_is_saved(
    run: Run, check: Check, device: str, cases: list[str], tmp_path: Path
) -> None:
    """One is saved, as if there were no others; the ranks check that all of them resume from it."""
    for found in run(device, 2, replicas=2, only=cases, out=tmp_path):
        check(found, "auto", cases)
    (saved,) = (tmp_path / "checkpoints" / "auto" / "all").glob("step-*")
    first, second = (load_file(file) for file in sorted(saved.glob("*.safetensors")))
    assert all(name.startswith("generator/") for name in second) and len(first) > len(second)
    reader = CheckpointReader(saved)
    weights = {name.removeprefix("auto/policy/"): t for name, t in found.items() if "/policy/model." in name}
    assert weights
    for name, expected in weights.items():
        assert torch.equal(reader.whole(f"weights/pretrained.{name}"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_copies_of_a_single_row_train_alike(run: Run, check: Check, device: str) -> None:
    """A critic's head has one: columns are split over the two ranks of each copy."""
    for found in run(device, 4, replicas=2, only=["critic"]):
        check(found, "auto", ["critic"])


dispatches = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 19),
    reason="this version of transformers cannot send tokens to experts",
)


@dispatches
@pytest.mark.ranks
@pytest.mark.parametrize("device", ["cpu", pytest.param("npu", marks=pytest.mark.slow)])
def test_split_experts_change_nothing(run: Run, check: Check, device: str) -> None:
    """Each rank has half of the experts; their whole weights have the published names."""
    for found in run(device, 2, expert=2, only=["mixture"]):
        check(found, "auto", ["mixture"])


@dispatches
@pytest.mark.slow
@pytest.mark.ranks
def test_split_experts_over_grouped_products(run: Run, check: Check) -> None:
    """The device's own operator multiplies the rows that came from all ranks."""
    for found in run("npu", 2, expert=2, only=["fused mixture"]):
        check(found, "auto", ["fused mixture"])


@dispatches
@pytest.mark.slow
@pytest.mark.parametrize(("context", "expert"), [(1, 4), (1, 2), (2, 4), (2, 2), (4, 2)])
def test_split_experts_of_four_ranks(run: Run, check: Check, context: int, expert: int) -> None:
    """Of two ranks, experts are sharded over two groups; also where micro-batches are split."""
    kinds = {1: ["auto"], 2: ["ulysses", "ring"], 4: ["auto", "ring"]}[context]
    for found in run("cpu", 4, context=context, expert=expert, only=["mixture"]):
        for kind in kinds:
            check(found, kind, ["mixture"])


@dispatches
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("expert", [1, 2])
def test_fewer_experts_than_ranks(run: Run, check: Check, device: str, expert: int) -> None:
    """Two experts on four ranks: rows of each are split over all ranks, or over the two that have it."""
    for found in run(device, 4, expert=expert, only=["few experts"]):
        check(found, "auto", ["few experts"])
