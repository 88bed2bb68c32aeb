"""What has fewer rows than ranks is split along another dimension, and nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import checkpoint_files
import few_rows_ranks
import npusim
import pytest
import torch
from few_rows_ranks import STEPS
from jobs import Tensors, results
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from few_experts import save_few_experts
from isotrain.data.prepare.tiny import make_tiny
from isotrain.engine.build import split_dimension
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.writer import CheckpointWriter
from support import rank_of_two

Trained = Callable[..., Path]
ENGINES = ("mixture", "adapters", "critic")


@contextmanager
def one_thread() -> Iterator[None]:
    """As each of several ranks has: another number of them would sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The directory that ranks wrote; a mixture has half as many experts as there are, at the most, ranks."""

    @cache
    def models(experts: int) -> Path:
        path = tmp_path_factory.mktemp("models")
        make_tiny(path / "tiny", train_rows=1, validation_rows=1)
        save_few_experts(path / "mixture", experts)
        return path

    @cache
    def trained(device: str, experts: int, ranks: int, source: Path | None = None) -> Path:
        out = tmp_path_factory.mktemp(f"{device}-{ranks}")
        if ranks == 1:
            with one_thread():
                few_rows_ranks.main(device, models(experts), out, source)
            return out
        command = [sys.executable, few_rows_ranks.__file__, device, str(models(experts)), str(out)]
        npusim.run_ranks([*command, *([str(source)] if source else [])], ranks, timeout=400)
        return out

    return trained


def cases(*quick: str) -> pytest.MarkDecorator:
    """Two ranks, and four in the slow suite; two are enough on some devices."""
    given = [(device, ranks) for ranks in (2, 4) for device in ("cpu", "npu")]
    slow = [(device, ranks) for device, ranks in given if ranks == 4 or device not in quick]
    return pytest.mark.parametrize(
        ("device", "ranks"),
        [pytest.param(*one, marks=[pytest.mark.ranks, *[pytest.mark.slow] * (one in slow)]) for one in given],
    )


def saved(out: Path, name: str, step: int) -> Tensors:
    reader = CheckpointReader(out / name / f"step-{step:08d}")
    return {key: reader.whole(key) for key in reader.shapes()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


@cases("cpu", "npu")
def test_ranks_change_no_bit(trained: Trained, device: str, ranks: int) -> None:
    """Weights and bfloat16 moments, as saved and as sent to engines."""
    (alone,) = results(trained(device, ranks // 2, 1), 1)
    split = trained(device, ranks // 2, ranks)
    first, *others = results(split, ranks)
    for name in ENGINES:
        assert_same(saved(split, name, STEPS), saved(trained(device, ranks // 2, 1), name, STEPS))
    for found in (first, *others):
        for name, expected in alone.items():
            if name.endswith("/numbers"):
                torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
            elif "/dimension/" not in name:
                assert torch.equal(found[name], expected), name
    along = {name.split("/dimension/")[1] for name in first if "/dimension/" in name and first[name] == 1}
    ends = (
        "experts.gate_up_proj",
        "experts.down_proj",
        "gate.weight",
        "score.weight",
        "lora_A.default.weight",
    )
    assert all(any(name.endswith(end) for name in along) for end in ends)
    assert all(name.endswith(ends) for name in along)


@cases("npu")
def test_any_number_of_ranks_resumes(trained: Trained, device: str, ranks: int) -> None:
    one = trained(device, ranks // 2, 1)
    alone = trained(device, ranks // 2, 1, one)
    more = trained(device, ranks // 2, ranks, one)
    fewer = trained(device, ranks // 2, 1, trained(device, ranks // 2, ranks))
    for name in ENGINES:
        expected = saved(alone, name, 2 * STEPS)
        assert_same(saved(more, name, 2 * STEPS), expected)
        assert_same(saved(fewer, name, 2 * STEPS), expected)


@cases("cpu")
def test_padded_checkpoints_are_resumed(trained: Trained, device: str, ranks: int, tmp_path: Path) -> None:
    """As they were written when everything was split along the first dimension."""
    one = trained(device, ranks // 2, 1)
    for name in ENGINES:
        whole = saved(one, name, STEPS)
        writers = [CheckpointWriter(tmp_path / name, rank, ranks, keep=1) for rank in range(ranks)]
        for rank, writer in enumerate(writers):
            parts = checkpoint_files.shards(whole, rank, ranks)
            writer.save(STEPS, parts, {}, {"updates": STEPS})
        for writer in writers:  # the first waits for the others
            writer.wait()
    resumed, alone = trained(device, ranks // 2, ranks, tmp_path), trained(device, ranks // 2, 1, one)
    for name in ENGINES:
        assert_same(saved(resumed, name, 2 * STEPS), saved(alone, name, 2 * STEPS))


@pytest.mark.parametrize(
    ("shape", "dimension"),
    [((2, 8), None), ((1, 8), 1), ((1, 7, 8), 2), ((1, 7), None), ((1,), None), ((0, 8), 1)],
)
def test_splits_the_first_dimension_that_divides_evenly(
    shape: tuple[int, ...], dimension: int | None
) -> None:
    """The first one unless it has fewer rows than shards; of the others, the first that divides evenly."""
    with rank_of_two(0) as mesh:
        found = split_dimension(mesh)(nn.Parameter(torch.empty(shape, device="meta")))
    assert (found.dim if found is not None else None) == dimension


def test_copies_of_the_weights_do_not_count() -> None:
    with rank_of_two(0):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        assert split_dimension(mesh)(nn.Parameter(torch.empty(1, 8, device="meta"))) is None
