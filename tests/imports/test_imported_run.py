"""A script for eight NPUs trains on a CPU: imported as it is, and made small by overrides alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from isotrain.observe.metrics import read_metrics
from support import needs_vllm, run_cli


def grpo_script(shared_data: Path) -> str:
    """The command of verl's guide for Ascend, out of the page that it stands in."""
    pages = [page.read_text() for page in sorted((shared_data.parent / "seeds").glob("*.txt"))]
    page = next(page for page in pages if "verl.trainer.main_ppo" in page)
    begin = page.rindex("\n", 0, page.index("python3 -m verl.trainer.main_ppo")) + 1
    return textwrap.dedent(page[begin : page.index("\n\n", begin)])


@pytest.mark.slow
@pytest.mark.ray
@needs_vllm
@pytest.mark.timeout(1200)
def test_it_learns(shared_data: Path, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter_bash")
    script, recipe, run = tmp_path / "grpo.sh", tmp_path / "grpo.yaml", tmp_path / "run"
    script.write_text(grpo_script(shared_data))
    told = run_cli("import", "verl", str(script), "--out", str(recipe))
    assert "32 keys mapped, 5 without effect, 0 refused, 0 unknown" in told.stdout + told.stderr
    run_cli(
        "train",
        str(recipe),
        f"output={run}",
        f"model.path={tiny / 'model'}",
        "model.dtype=float32",
        f"data.train={tiny / 'prompts.jsonl'}",
        "data.validation=null",
        "data.batch_size=16",
        "algorithm.mini_batch_size=8",
        "reward.gsm8k=null",
        f"reward.function.path={tiny / 'reward.py'}:score",
        "reward.answer_key=answer",
        "rollout.max_tokens=12",
        "rollout.tensor_parallel=1",
        "rollout.kv_cache_gb=0.25",
        "optimizer.lr=5e-3",
        "trainer.steps=45",
        "trainer.validate_every=0",
        "trainer.validate_first=false",
        "device.type=cpu",
        "device.ranks=1",
        "cluster.address=local",
        timeout=1100,
    )
    rewards = [row["critic/rewards/mean"] for row in read_metrics(run / "metrics.jsonl")]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
    print(f"mean reward of the first 3 steps {first:.3f}, of the last 5 {last:.3f}")
    assert first < 0.2 and last > 0.8
