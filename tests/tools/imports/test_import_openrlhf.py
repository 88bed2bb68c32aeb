"""What OpenRLHF's flags become, flat and dotted, and what is told of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.errors import IsotrainError
from isotrain.recipe.load import parse_recipe, resolved
from isotrain.tools.imports.convert import Imported, convert
from isotrain.tools.imports.source import flatten

pytest.importorskip("tree_sitter_bash")

SCRIPTS = Path(__file__).parent / "scripts"
RUNNER = CliRunner()
BASE = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset a.jsonl "
    "--data.apply_chat_template --reward.model_name_or_path rm --data.max_len 2048 "
    "--rollout.max_new_tokens 1024 "
)


def imported(flags: str, command: str = BASE, version: str | None = None) -> Imported:
    return convert((command + flags).encode(), "openrlhf", version)


def fields(result: Imported) -> dict[str, Any]:
    return flatten(resolved(parse_recipe(result.recipe, "recipe")))


def script(name: str) -> Imported:
    return convert((SCRIPTS / name).read_bytes(), "openrlhf")


@pytest.mark.parametrize("path", sorted(SCRIPTS.iterdir()), ids=lambda path: path.name)
def test_every_script_passes_a_dry_run(path: Path, tmp_path: Path) -> None:
    framework = path.name.partition("-")[0]
    recipe = tmp_path / "recipe.yaml"
    result = RUNNER.invoke(app, ["import", framework, str(path), "--out", str(recipe)])
    expected = 1 if path.name in ("openrlhf-reinforce++.sh", "openrlhf-rloo-async.sh") else 0
    assert result.exit_code == expected, result.output
    assert RUNNER.invoke(app, ["train", str(recipe), "--dry-run"]).exit_code == 0


def test_ppo_with_flat_flags() -> None:
    result = script("openrlhf-ppo.sh")
    found = fields(result)
    expected = {
        "device.ranks": 8,
        "model.path": "models/llama-sft",
        "data.batch_size": 256,
        "data.max_length": 512,
        "data.prompt_key": "question",
        "rollout.max_tokens": 1024,
        "rollout.engines": 4,
        "data.tokens_per_micro_batch": 2 * 1536,
        "algorithm.name": "ppo",
        "algorithm.convention": "openrlhf",
        # 128 samples, one response to each prompt
        "algorithm.mini_batch_size": 128,
        "algorithm.gamma": 0.99,
        "algorithm.lam": 0.95,
        "algorithm.kl.place": "reward",
        "algorithm.kl.coefficient": 0.02,
        "algorithm.kl.estimator": "k1",
        "algorithm.critic.path": "models/llama-rm",
        "algorithm.critic.lr": 8e-6,
        "algorithm.critic.clip": 0.2,
        "algorithm.loss.aggregation": "token-mean",
        "reward.model.path": "models/llama-rm",
        "cluster.placement": "colocated",
        "cluster.offload": True,
        "optimizer.lr": 5e-7,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.schedule": "cosine",
        "optimizer.warmup_ratio": 0.03,
        "optimizer.min_lr_ratio": 0.1,
        "optimizer.weight_decay": 0.0,
        "observe.loggers": ["console", "wandb"],
    }
    assert {name: found[name] for name in expected} == expected
    assert "algorithm.loss.dual_clip" in found and found["algorithm.loss.dual_clip"] is None
    assert result.version == "0.8.0" and "{wandb_token}" not in result.recipe
    assert "lr: 5e-7  # actor_learning_rate\n" in result.recipe


def test_samples_become_prompts() -> None:
    result = script("openrlhf-reinforce++.sh")
    found = fields(result)
    expected = {
        "algorithm.name": "reinforce++-baseline",
        # 256 samples / 8 responses
        "algorithm.mini_batch_size": 32,
        "data.batch_size": 64,
        "data.max_length": 1024,
        "rollout.max_tokens": 4096,
        "data.tokens_per_micro_batch": 16384,
        "algorithm.kl.place": "loss",
        "algorithm.kl.estimator": "k2",
        "algorithm.loss.clip_ratio_low": 0.2,
        "algorithm.loss.clip_ratio_high": 0.27,
        "algorithm.rollout_correction.mode": "mask",
        "algorithm.rollout_correction.lower": 0.5,
        "algorithm.rollout_correction.upper": 5.0,
        "reward.answer_key": "answer",
        "reward.function.path": "openrlhf_reward.py:score",
        "trainer.epochs": 3,
        "trainer.resume": "auto",
        "optimizer.betas": [0.9, 0.98],
    }
    assert {name: found[name] for name in expected} == expected
    assert "256 samples / 8 responses; a step of 64 prompts is 2 updates" in result.recipe
    assert result.version == "0.11.0"


def test_asynchronous_training() -> None:
    found = fields(script("openrlhf-rloo-async.sh"))
    assert (found["rollout.staleness"], found["rollout.in_flight"]) == (2, True)
    assert found["cluster.placement"] == "separate" and found["algorithm.kl.place"] == "off"


def test_sft_dpo_kto_and_reward_models() -> None:
    sft = fields(script("openrlhf-sft.sh"))
    assert (sft["data.prompt_key"], sft["data.completion_key"]) == ("question", "response")
    assert (sft["data.batch_size"], sft["model.lora.rank"], sft["device.ranks"]) == (256, 32, 8)
    assert (sft["optimizer.lr"], sft["data.tokens_per_micro_batch"]) == (5e-6, 8192)
    dpo = fields(script("openrlhf-dpo.sh"))
    assert (dpo["algorithm.name"], dpo["algorithm.beta"], dpo["optimizer.lr"]) == ("dpo", 0.05, 5e-7)
    assert dpo["data.tokens_per_micro_batch"] == 2 * 2048 and dpo["model.offload.optimizer"] is True
    kto = fields(script("openrlhf-kto.sh"))
    assert (kto["algorithm.beta"], kto["algorithm.desirable_weight"]) == (0.1, 1.5)
    rm = fields(script("openrlhf-rm.sh"))
    assert (rm["algorithm.name"], rm["algorithm.loss"], rm["optimizer.lr"]) == ("rm", "sigmoid", 9e-6)


def test_losses_of_a_version() -> None:
    """0.5.9 averages over each response first; value clipping was 0.2 until 0.8."""
    flat = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data a.jsonl --reward_pretrain rm"
    old = fields(convert(flat.encode(), "openrlhf", "0.5.9"))
    assert old["algorithm.loss.aggregation"] == "seq-mean-token-mean" and old["algorithm.critic.clip"] == 0.2
    assert old["algorithm.critic.aggregation"] == "seq-mean-token-mean"
    new = fields(convert(flat.encode(), "openrlhf"))
    assert new["algorithm.loss.aggregation"] == "token-mean" and new["algorithm.critic.clip"] == 0.5
    assert new["algorithm.critic.aggregation"] == "token-mean"


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--train.batch_size 100 --rollout.n_samples_per_prompt 8", "train.batch_size"),
        ("--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --train.batch_size 64",
         "algo.kl.init_coef"),
        ("--actor.policy_loss_type other", "actor.policy_loss_type"),
        ("--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis",
         "algo.advantage.is_correction_type"),
        ("--algo.advantage.no_std_norm", "algo.advantage.no_std_norm"),
        ("--data.max_samples 1000", "data.max_samples"),
        ("--reward.clip_range -1 1", "reward.clip_range"),
        ("--reward.normalize_enable", "reward.normalize_enable"),
        ("--ds.load_in_4bit", "ds.load_in_4bit"),
        ("--actor.optim muon", "actor.optim"),
        ("--actor.lr_scheduler polynomial", "actor.lr_scheduler"),
    ],
)  # fmt: skip
def test_refused_values_change_the_training(flags: str, key: str) -> None:
    result = imported(flags)
    assert key in {item.key for item in result.refused if item.changes}
    assert not result.same_training


def test_agents_are_taken_over() -> None:
    found = fields(imported("--train.agent_func_path tools/agent.py --data.label_key label"))
    assert found["rollout.environment.path"] == "tools/agent.py:AgentExecutor"
    assert found["reward.environment.weight"] == 1.0 and found["reward.answer_key"] == "label"


def test_plain_text_prompts_are_a_question() -> None:
    command = BASE.replace("--data.apply_chat_template ", "")
    assert [item.key for item in imported("", command).questions] == ["data.apply_chat_template"]


def test_a_response_that_fills_the_rest_is_refused() -> None:
    result = imported("", BASE.replace("--rollout.max_new_tokens 1024", ""))
    assert "data.max_len" in {item.key for item in result.refused}


def test_trainers_that_are_not_imported_are_named() -> None:
    with pytest.raises(IsotrainError, match="train_kd is not imported"):
        imported("", "deepspeed --module openrlhf.cli.train_kd --pretrain m")
