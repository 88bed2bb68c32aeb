"""A recipe that verl's command can carry comes back equal; what it cannot carry is told."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from isotrain.recipe import library
from isotrain.recipe.load import check_values, load_recipe, parse_recipe
from isotrain.recipe.schema import Recipe
from isotrain.tools.imports.convert import convert
from isotrain.tools.imports.export import FieldDifference, spelled_out, to_verl

SCRIPTS = Path(__file__).parent / "scripts"


def again(recipe: Recipe) -> Recipe:
    """Through the text of the script, as a user would."""
    pytest.importorskip("tree_sitter_bash")
    return parse_recipe(convert(to_verl(recipe).script.encode(), "verl").recipe, "recipe")


@pytest.mark.parametrize(
    "name",
    [
        *("gsm8k-grpo-8x", "gsm8k-grpo-2x8", "gsm8k-ppo-8x", "gsm8k-reinforce++-8x", "gsm8k-sft-lora-8x"),
        *("qwen3-8b-grpo-8x", "qwen3-8b-grpo-sglang-4x", "dapo-qwen2.5-7b-16x", "dapo-qwen3-8b-16x"),
    ],
)
def test_recipes_of_the_library_come_back(name: str) -> None:
    recipe = load_recipe(library.find(name), ["trainer.save_every=20"])
    here, there = spelled_out(recipe), spelled_out(again(recipe))
    here["rollout.eager"] = there.get("rollout.eager")  # null lets the device decide; verl has no such value
    lost = {item.field for item in to_verl(recipe).differences}
    if name.startswith("dapo"):  # verl chooses rewards by data set, so an import asks for a function
        here, there = (
            {k: v for k, v in fields.items() if not k.startswith("reward.")} for fields in (here, there)
        )
        lost = {field for field in lost if not field.startswith(("reward.math.", "reward.function."))}
    assert {k: v for k, v in here.items() if v is not None} == there
    assert lost <= {"rollout.eager", "data.too_long"}


def drawn(chance: random.Random) -> dict[str, Any]:
    """A recipe of values that verl has too."""
    name = chance.choice(["grpo", "rloo", "ppo", "reinforce++", "reinforce++-baseline", "remax"])
    batch = chance.choice([8, 64, 96])
    place = chance.choice(["off", "loss", "reward"])
    loss = chance.choice(["clip", "gspo", "cispo", "reinforce", "gmpo", "sapo", "dppo-tv", "dppo-kl"])
    algorithm: dict[str, Any] = {
        "name": name,
        "mini_batch_size": batch // chance.choice([1, 2, 4]),
        "ppo_epochs": chance.choice([1, 2]),
        "loss": {"name": loss, "entropy": chance.choice([0, 0.01]), "clip_ratio_high": 0.28},
        "kl": {"place": place, "coefficient": chance.choice([0.001, 0.05])},
        "rollout_correction": chance.choice([{}, {"level": "token", "upper": 3.0},
                                             {"level": "token", "mode": "mask", "lower": 0.5, "upper": 4.0},
                                             {"bypass_mode": loss in ("clip", "reinforce")}]),
        "dynamic_sampling": {"max_attempts": chance.choice([0, 4])},
        "overlong": chance.choice([{}, {"buffer": 16, "factor": 0.5}]),
    }  # fmt: skip
    if not algorithm["rollout_correction"].get("bypass_mode"):
        algorithm["router_replay"] = chance.choice(["disabled", "R2"])
    if loss not in ("gspo", "gmpo", "sapo"):
        algorithm["loss"]["aggregation"] = chance.choice(
            ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
        )
    if place == "reward":
        algorithm["kl"]["estimator"] = chance.choice(["k1", "abs", "k2", "k3"])
    if name == "grpo":
        algorithm["scale_by_std"] = chance.choice([True, False])
    if name in ("ppo", "reinforce++"):
        algorithm["gamma"] = chance.choice([1.0, 0.9])
    if name == "ppo":
        algorithm["critic"] = {"lr": 3e-5, "clip": 0.4, "warmup_steps": 2, "path": "models/critic"}
        algorithm["critic"] |= chance.choice([{}, {"aggregation": "seq-mean-token-sum"}])
    return {
        "name": "drawn",
        "output": "runs/drawn it's",
        "seed": chance.randrange(2**31),
        "device": {"ranks": chance.choice([1, 8, 24])},
        "model": {"path": "models/a b", "lora": chance.choice([{}, {"rank": 8, "targets": ["q_proj"]}])},
        "data": {"train": ["a.parquet", "b,c.parquet"], "validation": "v.parquet", "max_length": 64,
                 "batch_size": batch, "too_long": chance.choice(["drop", "error", "truncate-left"]),
                 "tokens_per_micro_batch": 4096},
        "algorithm": algorithm,
        "rollout": {"n": 4, "max_tokens": 32, "temperature": chance.choice([1.0, 0.7]), "eager": False,
                    "validation": chance.choice([{}, {"n": 2, "temperature": 0.5}])},
        "reward": {"function": {"path": "dir/rewards.py:score"}},
        "optimizer": {"lr": chance.choice([1e-6, 3.5e-7]), "schedule": chance.choice(["constant", "cosine"]),
                      **chance.choice([{"warmup_ratio": 0.05}, {"warmup_steps": 7}]), "max_grad_norm": 0.5},
        "trainer": chance.choice([{"steps": 7, "save_every": 3}, {"epochs": 2, "save_every": 0}]),
        "observe": {"project": "null"},
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_drawn_recipes_come_back(seed: int) -> None:
    recipe = check_values(drawn(random.Random(seed)), "drawn")
    # verl cuts long prompts at their beginning, and a run with `error` has none.
    cut = FieldDifference("data.too_long", "error", "truncate-left", changes=False)
    differences = [cut] if recipe.data.too_long == "error" else []
    assert to_verl(recipe).differences == differences
    expected = spelled_out(recipe) | {item.field: item.there for item in differences}
    assert spelled_out(again(recipe)) == expected


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("optimizer.eps=1e-6", "optimizer.eps"),
        ("optimizer.schedule=linear", "optimizer.schedule"),
        ("rollout.top_k=5", None),
        ("reward.timeout=3", "reward.timeout"),
        ("algorithm.loss.dual_clip=null", "algorithm.loss.dual_clip"),
        ("optimizer.state_dtype=bfloat16", "optimizer.state_dtype"),
        ("model.lora.dropout=0.1", None),
        ("device.ranks=3", None),
    ],
)
def test_what_is_not_carried_over_is_told(override: str, field: str | None) -> None:
    recipe = load_recipe(
        library.find("gsm8k-grpo-8x"), ["trainer.save_every=20", "rollout.eager=false", override]
    )
    found = [item.field for item in to_verl(recipe).differences]
    assert found == ([field] if field else [])


def test_a_whole_script_goes_there_and_back() -> None:
    """import(export(import(script))) == import(script)."""
    pytest.importorskip("tree_sitter_bash")
    for name in ("verl-grpo.sh", "verl-dapo.sh", "verl-rloo-lora.sh", "verl-ppo.sh"):
        recipe = parse_recipe(convert((SCRIPTS / name).read_bytes(), "verl").recipe, name)
        assert spelled_out(again(recipe)) == spelled_out(recipe), name


def test_options_of_the_engine_go_there_and_back() -> None:
    options = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 16384,
        "enable_expert_parallel": True,
        "async_scheduling": False,
        "block_size": 128,
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 64]},
    }
    overrides = [f"rollout.engine_options={json.dumps(options)}"]
    recipe = load_recipe(library.find("gsm8k-grpo-8x"), ["trainer.save_every=20", *overrides])
    exported, back = to_verl(recipe), again(recipe)
    assert back.rollout is not None and back.rollout.engine_options == options
    assert "rollout.engine_options" not in [item.field for item in exported.differences]
    assert {key for key in exported.overrides if "max_num" in key or "engine_kwargs" in key} == {
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.rollout.max_num_batched_tokens",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_expert_parallel",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode",
    }
    # What verl has no key of, and its import does not read, is told.
    other = ["rollout.engine_options.compilation_config={use_inductor: false}"]
    lost = to_verl(load_recipe(library.find("gsm8k-grpo-8x"), other)).differences
    assert [item.changes for item in lost if item.field == "rollout.engine_options"] == [False]


@pytest.mark.parametrize(("loss", "top_k"), [("policy-gradient", None), ("k2", None), ("forward-kl", 16)])
def test_distillation_comes_back(loss: str, top_k: int | None) -> None:
    settings = {"path": "t", "loss": loss, "top_k": top_k, "clamp": 5.0, "coefficient": 0.5}
    overrides = [f"algorithm.distillation={json.dumps(settings)}"]
    recipe = load_recipe(library.find("gsm8k-grpo-8x"), overrides)
    here, there = spelled_out(recipe), spelled_out(again(recipe))
    names = [name for name in here if name.startswith("algorithm.distillation")]
    assert names and {name: here[name] for name in names} == {name: there.get(name) for name in names}
