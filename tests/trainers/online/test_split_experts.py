"""Online runs whose ranks hold different experts: engines get the weights of all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import npusim
import pytest
import split_experts_ranks
import torch
import transformers
from online_runs import drawn, online_recipe, run_online

from isotrain.data.prepare.tiny import make_tiny
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.observe.metrics import read_metrics
from support import needs_vllm, stable_metrics

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 19),
        reason="this version of transformers cannot send tokens to experts",
    ),
]

Trained = Callable[[str, int], Path]
ENGINES = pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[needs_vllm, pytest.mark.vllm, pytest.mark.slow])]
)
STEPS = 3


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    make_tiny(path, train_rows=64, validation_rows=1, architecture="qwen3_moe")
    return path


@pytest.fixture(scope="module")
def trained(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    work = tmp_path_factory.mktemp("split-experts")

    @cache
    def trained(engine: str, expert: int) -> Path:
        """Two ranks, which hold all experts or half of them each."""
        rollout = {"engine": engine, "n": 4, "max_tokens": 6, "record": True}
        recipe = online_recipe(
            mixture,
            work / f"{engine}-{expert}",
            device={"type": "cpu", "ranks": 2, "mesh": {"expert": expert}},
            model={"path": str(mixture / "model"), "dtype": "float32", "router_aux_loss": 0.01},
            rollout=rollout | ({"kv_cache_gb": 0.25} if engine == "vllm" else {}),
            trainer={"steps": STEPS, "save_every": 1, "keep_checkpoints": STEPS},
        )
        return run_online(recipe, work, f"{engine}-{expert}", timeout=800)

    return trained


@ENGINES
def test_engines_have_the_weights_of_all_ranks(trained: Trained, engine: str) -> None:
    """A response's log-probs are those of the weights that the step began with."""
    run = trained(engine, 2)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["rollout/version"] for row in rows] == [1.0, 2.0, 3.0]
    for row in rows:
        assert row["rollout/weight_check_diff"] <= 1e-4
        assert row["training/rollout_logp_diff_mean"] <= 1e-4
    # Experts of both ranks moved by a good part of the learning rate; one that no token chose does not.
    first, last = (CheckpointReader(run / "checkpoints" / f"step-{step:08d}") for step in (1, STEPS))
    for name in (name for name in first.shapes() if name.startswith("weights/") and ".experts." in name):
        change_E = (last.whole(name) - first.whole(name)).abs().amax(dim=(1, 2))
        assert len(change_E) == 8 and min(change_E[:4].max(), change_E[4:].max()) > 1e-3, name


@pytest.mark.slow
@ENGINES
def test_they_learn_what_ranks_with_all_experts_learn(trained: Trained, engine: str) -> None:
    runs = [trained(engine, expert) for expert in (1, 2)]
    whole, split = (stable_metrics(run)[0] for run in runs)
    for name in ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        # After the first update rounding may turn a sampled token.
        assert split[name] == pytest.approx(whole[name], abs=1e-5), name
    assert drawn(runs[0])[0] == drawn(runs[1])[0]
    one, other = (CheckpointReader(run / "checkpoints" / "step-00000001") for run in runs)
    assert one.shapes() == other.shapes()
    for name in one.shapes():
        if name.startswith("weights/"):
            torch.testing.assert_close(other.whole(name), one.whole(name), rtol=1e-3, atol=2e-4, msg=name)


@ENGINES
def test_what_is_sent_does_not_depend_on_the_split(
    trained: Trained, mixture: Path, tmp_path: Path, engine: str
) -> None:
    """Of one checkpoint, ranks with all experts and ranks with half of them send the same bytes."""
    digests = set()
    for expert in (1, 2):
        out = tmp_path / str(expert)
        out.mkdir()
        checkpoints = trained(engine, 2) / "checkpoints"
        program = [sys.executable, split_experts_ranks.__file__]
        command = [*program, str(mixture / "model"), str(checkpoints), str(out), str(expert)]
        npusim.run_ranks(command, 2, timeout=240)
        digests |= {(out / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(digests) == 1
