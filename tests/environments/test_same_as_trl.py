"""One environment file, one policy, in TRL and here: the same tokens, the same mask, the same reward."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_documented_environments import call, documented, play
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.heavy

PROMPT = [{"role": "user", "content": "6 * 7?"}]
SAYS = [call("multiply", a=6, b=7), call("divide", a=1), call("submit", value="42"), "Done."]
END = 2


def in_trl(model: Path, environment: Any, says: Sequence[str], output: Path) -> dict[str, Any]:
    """What TRL's trainer makes of an episode in which the policy says these things."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=[],
        args=GRPOConfig(
            output_dir=str(output),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=900,
            max_tool_calling_iterations=4,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": PROMPT, "answer": "42"}]),
        processing_class=tokenizer,
        environment_factory=environment,
    )
    turns = iter(says)

    def generate(prompt_ids: Sequence[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        wrote = [*tokenizer(next(turns), add_special_tokens=False)["input_ids"], END]
        return [wrote for _ in prompt_ids], None

    trainer._generate_single_turn = generate
    rows = [{"prompt": PROMPT, "answer": "42"} for _ in range(2)]
    found: dict[str, Any] = trainer._generate_and_score_completions(rows)
    return {**found, "rewards": list(trainer._logs["rewards"].values())}


def test_the_same_tokens_mask_and_reward(tiny: Path, tmp_path: Path) -> None:
    template = qwen3_template()
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny / "model").save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (tmp_path / "calculator.py").write_text(documented("trl"))
    environment = runpy.run_path(str(tmp_path / "calculator.py"))["Calculator"]
    theirs = in_trl(model, environment, SAYS, tmp_path / "trl")

    (ours,), _ = play(tiny, tmp_path, "trl", "Calculator", "42", SAYS, tokenizer)
    masked = theirs["completion_mask"][0].bool()
    assert (
        theirs["prompt_ids"][0][theirs["prompt_mask"][0].bool()].tolist()
        == ours.tokens_T[: ours.prompt_length].tolist()
    )
    assert theirs["completion_ids"][0][masked].tolist() == ours.response_N.tolist()
    assert theirs["tool_mask"][0][masked].bool().tolist() == ours.mask_N.tolist()
    assert ours.episode is not None
    assert next(iter(theirs["rewards"][0])) == ours.episode.reward == 1.0


def qwen3_template() -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
