"""A value that no field takes is refused with its key and line; no default stands in its place unsaid."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isotrain.tools.imports.convert import Imported, convert
from isotrain.tools.imports.draft import changes
from isotrain.tools.imports.keys import KeyTable, openrlhf_offline, openrlhf_ppo, verl_ppo, verl_sft

pytest.importorskip("tree_sitter_bash")

PPO = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=gsm8k \\
    data.val_files=gsm8k {}
"""
SFT = "torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer data.train_files=a.parquet {}"
OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m \\
    --reward.model_name_or_path r --data.prompt_dataset a.jsonl --data.apply_chat_template \\
    --rollout.max_new_tokens 512 --algo.advantage.estimator gae {}
"""
DPO = """deepspeed --module openrlhf.cli.train_dpo --model.model_name_or_path m --data.dataset a.jsonl \\
    --data.apply_chat_template {}
"""
TRAININGS = {
    "verl ppo": (PPO, "verl", verl_ppo()),
    "verl sft": (SFT, "verl", verl_sft()),
    "openrlhf ppo": (OPENRLHF, "openrlhf", openrlhf_ppo()),
    "openrlhf dpo": (DPO, "openrlhf", openrlhf_offline()),
}
# Keys whose value is a name without a list of choices, or which nothing uses beside other keys.
ANY_NAME = (
    "actor_rollout_ref.rollout.name", "data.prompt_split", "data.dataset_split", "train_split",
    "data.input_template",
)  # fmt: skip


def imported(script: str, framework: str, key: str, value: str) -> Imported:
    word = f"'{key}={value}'" if framework == "verl" else f"--{key} '{value}'"
    return convert(script.format(word).encode(), framework)


def fields(result: Imported) -> list[str]:
    lines = [line for line in result.recipe.splitlines() if not line.startswith("#")]
    return [line.partition("  #")[0] for line in lines]


def silent(script: str, framework: str, table: KeyTable) -> Iterator[str]:
    before = convert(script.format("").encode(), framework)
    for key, rule in table.exact.items():
        if rule.kind != "mapped" or not changes(rule.field) or key in ANY_NAME:
            continue
        result = imported(script, framework, key, "no-such-value")
        without_effect = key in {item.key for item in result.no_effect}
        if result.same_training and not without_effect and fields(result) == fields(before):
            yield key


@pytest.mark.parametrize("name", TRAININGS)
def test_no_key_takes_any_word(name: str) -> None:
    script, framework, table = TRAININGS[name]
    assert convert(script.format("").encode(), framework).same_training
    assert list(silent(script, framework, table)) == []


A = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("verl ppo", f"{A}.use_kl_loss", "yes"),
        ("verl ppo", f"{A}.use_kl_loss", "2"),
        ("verl ppo", f"{A}.strategy", "fsdp3"),
        ("verl ppo", "model_engine", "mega"),
        ("verl ppo", "actor_rollout_ref.rollout.n", "0"),
        ("verl ppo", "actor_rollout_ref.rollout.n", "1.5"),
        ("verl ppo", f"{A}.ppo_mini_batch_size", "-7"),
        ("verl ppo", f"{A}.optim.lr", "-1e-6"),
        ("verl ppo", f"{A}.optim.betas", "[0.9,2]"),
        ("verl ppo", "data.seed", "-7"),
        ("verl ppo", "data.train_batch_size", "[8]"),
        ("verl ppo", "trainer.total_epochs", "0"),
        ("verl ppo", "trainer.total_training_steps", "many"),
        ("verl ppo", "trainer.critic_warmup", "-2"),
        ("verl ppo", "actor_rollout_ref.rollout.temperature", "hot"),
        ("verl ppo", "actor_rollout_ref.rollout.top_p", "1.5"),
        ("verl sft", "trainer.total_training_steps", "-7"),
        ("verl sft", "data.multiturn.enable", "on"),
        ("openrlhf ppo", "actor.eps_clip_low_high", "0.2"),
        ("openrlhf ppo", "reward.overlong_buffer_len", "long"),
        ("openrlhf ppo", "train.agent_func_path", "agent"),
        ("openrlhf dpo", "data.max_samples", "all"),
    ],
)
def test_a_value_that_no_field_takes_is_refused_by_key_and_line(name: str, key: str, value: str) -> None:
    script, framework, _ = TRAININGS[name]
    result = imported(script, framework, key, value)
    assert not result.same_training
    line = script[: script.index("{}")].count("\n") + 1
    findings = (*result.refused, *result.unknown, *result.questions)
    assert {(item.key, item.line) for item in findings if item.changes} == {(key, line)}
