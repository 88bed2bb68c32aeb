"""Reward models stay within the token budget, and say the same as one response at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import npusim
import pytest
import reward_model_ranks
import torch
from reward_model_ranks import BUDGET, PROMPTS, RESPONSES, trajectories
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

SEPARATOR = "e"


@pytest.fixture(scope="module")
def reward(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A reward model and a process reward model, large enough in their weights that scores differ."""
    where = tmp_path_factory.mktemp("reward-models")
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    for name, kind in (("process", AutoModelForCausalLM), ("model", AutoModelForSequenceClassification)):
        model = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        model.save_pretrained(where / name)
        AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(where / name)
    process = {"path": str(where / "process"), "step_separator": SEPARATOR, "aggregate": "mean"}
    return {"model": {"path": str(where / "model")}, "process": process}


@torch.no_grad()
def one_by_one(reward: dict[str, Any]) -> dict[str, list[float]]:
    """Scores from transformers, each response by itself."""
    whole: Any = AutoModelForSequenceClassification.from_pretrained(reward["model"]["path"])
    steps: Any = AutoModelForCausalLM.from_pretrained(reward["process"]["path"])
    tokenizer: Any = AutoTokenizer.from_pretrained(reward["process"]["path"])

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    found: dict[str, list[float]] = {"model": [], "process": []}
    for trajectory in trajectories().values():
        # The chat template ends a turn with its end token and a new line.
        tokens = [*trajectory.tokens_T.tolist(), 2, 201]
        found["model"].append(whole(torch.tensor([tokens])).logits.item())
        text = tokenizer.decode(trajectory.response_N.tolist(), skip_special_tokens=True)
        read, good = trajectory.tokens_T[: trajectory.prompt_length].tolist(), []
        for step in (part for part in text.split(SEPARATOR) if part.strip()):
            read += ids(step) + ids(SEPARATOR)
            pair = steps(torch.tensor([read])).logits[0, -1, ids("-") + ids("+")]
            good.append(torch.softmax(pair, 0)[1].item())
        found["process"].append(sum(good) / len(good) if good else 0.0)
    return found


@pytest.mark.parametrize(
    ("ranks", "attention"),
    [(1, "sdpa"), (1, "padded"), pytest.param(2, "sdpa", marks=pytest.mark.slow)],
)
def test_scores_within_the_budget_equal_those_one_by_one(
    tiny: Path, tmp_path: Path, device_type: str, reward: dict[str, Any], ranks: int, attention: str
) -> None:
    model = {"path": str(tiny / "model"), "dtype": "float32", "attention": attention}
    if ranks == 1:
        reward_model_ranks.run(device_type, reward, model, tmp_path)
    else:
        given = [device_type, json.dumps(reward), json.dumps(model), str(tmp_path)]
        npusim.run_ranks([sys.executable, reward_model_ranks.__file__, *given], ranks, timeout=240)
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    for name, wanted in one_by_one(reward).items():
        scores = {int(i): score for rank in told for i, score in rank[name]["scores"].items()}
        assert [scores[i] for i in range(len(wanted))] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        sizes = [rank[name]["sizes"] for rank in told]
        assert len({len(own) for own in sizes}) == 1 and len(sizes[0]) > 1
        assert BUDGET / 2 < max(map(max, sizes)) <= BUDGET
        if attention == "sdpa":  # a prompt is not read again for each of its responses
            responses = sum(len(t.mask_N) for t in trajectories().values())
            assert sum(map(sum, sizes)) < responses + 0.75 * RESPONSES * sum(PROMPTS)
