"""A script for eight NPUs trains on a CPU: imported as it is, and made small by overrides alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isotrain.observe.metrics import read_metrics
from support import needs_vllm, run_cli

MAPPED = ("32 keys mapped, 5 without effect, 0 refused", "34 keys mapped, 5 without effect, 0 refused")
# A command with its continued lines.
COMMAND = re.compile(r"python3 -m verl\.trainer\.main_ppo(?:.*\\\n)*.*\n")


def grpo_script(shared_data: Path, page: int) -> str:
    """One of the commands with which verl's support of Ascend was published, out of its page."""
    pages = [path.read_text() for path in sorted((shared_data.parent / "seeds").glob("*.txt"))]
    found = [match[0] for text in pages for match in COMMAND.finditer(text)]
    if len(found) != len(MAPPED):
        pytest.skip("the published scripts are not in the shared data")
    return found[page]


@pytest.mark.slow
@pytest.mark.ray
@needs_vllm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", range(len(MAPPED)))
def test_an_imported_recipe_learns(shared_data: Path, tiny: Path, tmp_path: Path, page: int) -> None:
    pytest.importorskip("tree_sitter_bash")
    script, recipe, run = tmp_path / "grpo.sh", tmp_path / "grpo.yaml", tmp_path / "run"
    script.write_text(grpo_script(shared_data, page))
    told = run_cli("import", "verl", str(script), "--out", str(recipe))
    assert MAPPED[page] in told.stdout + told.stderr
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
        "observe.loggers=[console]",
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
