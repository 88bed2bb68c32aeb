"""What verl's keys become, value by value, and what is told of the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.errors import IsotrainError
from isotrain.recipe.load import parse_recipe, resolved
from isotrain.tools.imports import hydra
from isotrain.tools.imports.convert import Imported, convert
from isotrain.tools.imports.draft import Draft
from isotrain.tools.imports.source import ImportSourceError, flatten

SCRIPTS = Path(__file__).parent / "scripts"
RUNNER = CliRunner()
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
ONLINE = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.train_files=gsm8k.parquet",
          "data.val_files=gsm8k-test.parquet", "actor_rollout_ref.rollout.name=vllm")  # fmt: skip


def imported(*overrides: str, version: str | None = None, rows: int | None = None) -> Imported:
    return convert("\n".join([*ONLINE, *overrides]).encode(), "verl", version, rows)


def fields(result: Imported) -> dict[str, Any]:
    return flatten(resolved(parse_recipe(result.recipe, "recipe")))


def script(name: str) -> Imported:
    pytest.importorskip("tree_sitter_bash")
    return convert((SCRIPTS / name).read_bytes(), "verl")


def refused(result: Imported) -> dict[str, bool]:
    return {item.key: item.changes for item in result.refused}


def test_imports_a_grpo_script() -> None:
    result = script("verl-grpo.sh")
    found = fields(result)
    expected = {
        "name": "grpo-3B",
        "device.ranks": 16,
        "device.mesh.context": 2,
        "device.mesh.context_attention": "ulysses",
        "model.path": "Qwen/Qwen2.5-3B-Instruct",
        "data.train": "~/data/gsm8k/train.parquet",
        "data.max_length": 2048,
        "data.batch_size": 256,
        "data.shuffle": False,
        "data.too_long": "drop",
        # 2 (2048 + 4096) tokens on each of two ranks of a context
        "data.tokens_per_micro_batch": 2 * 6144 * 2,
        "algorithm.mini_batch_size": 64,
        "algorithm.kl.place": "loss",
        "algorithm.kl.coefficient": 0.005,
        "algorithm.kl.estimator": "k3",
        "rollout.max_tokens": 4096,
        "rollout.n": 8,
        "rollout.tensor_parallel": 2,
        "reward.gsm8k.method": "strict",
        "optimizer.lr": 2e-6,
        "optimizer.warmup_ratio": 0.05,
        "trainer.epochs": 3,
        "trainer.validate_every": 10,
        "observe.loggers": ["console", "tensorboard"],
    }
    assert {name: found[name] for name in expected} == expected
    assert result.same_training and not result.unknown
    assert "lr: 2e-6  # actor_rollout_ref.actor.optim.lr\n" in result.recipe
    assert "256 prompts = 4 updates of 64 prompts, each with 8 responses" in result.recipe


def test_imports_a_ppo_script() -> None:
    found = fields(script("verl-ppo.sh"))
    expected = {
        "algorithm.name": "ppo",
        "algorithm.gamma": 0.99,
        "algorithm.lam": 0.95,
        "algorithm.ppo_epochs": 2,
        "algorithm.kl.place": "reward",
        "algorithm.kl.estimator": "k1",
        "algorithm.kl.controller": "adaptive",
        "algorithm.kl.target": 0.05,
        "algorithm.critic.lr": 2e-5,
        "algorithm.critic.clip": 0.3,
        "algorithm.critic.warmup_steps": 5,
        "data.tokens_per_micro_batch": 4 * 1024,
        "trainer.steps": 200,
        "optimizer.warmup_steps": 20,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "policy", "critic"),
    [
        ((), "token-mean", "token-mean"),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",), "seq-mean-token-sum", "seq-mean-token-sum"),
        (("critic.loss_agg_mode=seq-mean-token-mean",), "token-mean", "seq-mean-token-mean"),
        ((f"{ACTOR}.policy_loss.loss_mode=gspo",), "seq-mean-token-mean", "token-mean"),
    ],
)
def test_the_critic_aggregates_as_the_actors_key_says_or_its_own(
    keys: tuple[str, ...], policy: str, critic: str
) -> None:
    result = imported("algorithm.adv_estimator=gae", *keys)
    found = fields(result)
    assert (found["algorithm.loss.aggregation"], found["algorithm.critic.aggregation"]) == (policy, critic)
    assert not [key for key in refused(result) if "agg_mode" in key]


def test_imports_a_dapo_script() -> None:
    result = script("verl-dapo.sh")
    found = fields(result)
    expected = {
        "algorithm.loss.clip_ratio_low": 0.2,
        "algorithm.loss.clip_ratio_high": 0.28,
        "algorithm.loss.dual_clip": 10.0,
        # 10 rounds of 384 prompts are 30 steps of 128: the first, and 29 times again
        "algorithm.dynamic_sampling.max_attempts": 29,
        "algorithm.overlong.buffer": 2048,
        "algorithm.overlong.factor": 1.0,
        "rollout.validation.n": 4,
        "rollout.validation.temperature": 1.0,
        "reward.function.path": "rewards/dapo.py:compute_score",
    }
    assert {name: found[name] for name in expected} == expected
    assert any("filter_groups.metric acc" in note for note in result.notes)


def test_imports_other_scripts() -> None:
    plus = fields(script("verl-reinforce++.sh"))
    assert plus["algorithm.name"] == "reinforce++" and plus["rollout.engine"] == "sglang"
    assert plus["algorithm.rollout_correction.level"] == "token"
    assert plus["algorithm.rollout_correction.upper"] == 2.5
    rloo = fields(script("verl-rloo-lora.sh"))
    assert rloo["model.lora.targets"] == ["q_proj", "v_proj"] and rloo["device.mesh.replicas"] == 2
    sft = fields(script("verl-sft.sh"))
    assert (sft["device.ranks"], sft["data.format"], sft["seed"]) == (4, "messages", 1111)
    assert (sft["optimizer.schedule"], sft["optimizer.betas"]) == ("cosine", [0.9, 0.999])


@pytest.mark.parametrize("keys", [ONLINE, ("optim.lr=1e-5",)], ids=["online", "sft"])
def test_a_run_goes_on_from_its_own_directory_only(keys: tuple[str, ...]) -> None:
    result = convert("\n".join([*keys, "trainer.resume_mode=resume_path"]).encode(), "verl")
    assert refused(result) == {"trainer.resume_mode": False}
    assert fields(result)["trainer.resume"] == "auto"


def test_saved_configuration_resolves_its_references() -> None:
    result = convert((SCRIPTS / "verl-config.yaml").read_bytes(), "verl")
    found = fields(result)
    assert result.kind == "config"
    assert found["output"] == "checkpoints/import-tests/gspo"
    assert found["algorithm.loss.name"] == "gspo" and found["algorithm.loss.clip_ratio_low"] == 0.0003
    assert found["algorithm.loss.aggregation"] == "seq-mean-token-mean"
    assert found["data.tokens_per_micro_batch"] == 4096


@pytest.mark.parametrize("name", ["gpg-qwen2-7b-fsdp.log", "gpg-qwen2-7b-megatron.log"])
def test_imports_real_logs(name: str, shared_data: Path, tmp_path: Path) -> None:
    """Both print their configuration; GPG's advantages are the only thing that isotrain does not have."""
    result = convert((shared_data / "verl-logs" / name).read_bytes(), "verl")
    assert result.kind == "log" and not result.unknown
    assert {key for key, changed in refused(result).items() if changed} == {"algorithm.adv_estimator"}
    found = fields(result)
    assert found["algorithm.loss.name"] == "reinforce" and found["algorithm.scale_by_std"] is False
    assert found["trainer.steps"] in (210, 105)
    assert found["optimizer.schedule"] == ("linear" if "megatron" in name else "constant")
    path = tmp_path / "recipe.yaml"
    path.write_text(result.recipe)
    assert RUNNER.invoke(app, ["train", str(path), "--dry-run"]).exit_code == 0


def test_published_scripts_equal_our_recipes(shared_data: Path) -> None:
    """The two runs that verl's first Ascend support was published with equal our recipes for them."""
    pytest.importorskip("tree_sitter_bash")
    pages = list((shared_data.parent / "seeds").glob("004*"))
    if not pages:
        pytest.skip("no published scripts in the shared data")
    sft, grpo = re.findall(r"```shell\n(.*?)```", pages[0].read_text(), re.S)
    supervised = convert(sft.encode(), "verl")
    found = fields(supervised)
    assert found["data.prompt_key"] == "extra_info.question" and found["model.lora.rank"] == 32
    assert (found["optimizer.schedule"], found["optimizer.warmup_ratio"]) == ("cosine", 0.1)
    assert {item.key for item in supervised.questions} == {"trainer.default_local_dir", "--nproc_per_node"}
    assert supervised.same_training  # directories and numbers of devices do not change it
    ours = Path(__file__).parents[3] / "recipes" / "gsm8k-grpo-2x8.yaml"
    theirs, own = (
        fields(convert(grpo.encode(), "verl")),
        flatten(resolved(parse_recipe(ours.read_text(), "x"))),
    )
    same = [name for name in own if name.startswith(("algorithm.kl", "optimizer", "rollout.n", "data.max"))]
    assert len(same) > 12
    assert {name: theirs[name] for name in same} == {name: own[name] for name in same}


def test_defaults_are_those_of_the_version() -> None:
    assert fields(imported(version="0.5.0"))["rollout.eager"] is True
    assert fields(imported(version="0.7.0"))["rollout.eager"] is False
    assert "default of actor_rollout_ref.rollout.enforce_eager" in imported().recipe
    with pytest.raises(IsotrainError, match=r"0\.5\.0, 0\.7\.0, 2026-08"):
        imported(version="0.1")


def test_routes_of_the_old_policy_are_replayed_there_too() -> None:
    result = imported(f"{ACTOR}.router_replay.mode=R2")
    assert result.same_training and fields(result)["algorithm.router_replay"] == "R2"


@pytest.mark.parametrize("name", ["fp16", "float16", "half"])
def test_float16_is_the_type_of_training_and_engines(name: str) -> None:
    key = f"{ACTOR}.fsdp_config.dtype={name}"
    result = imported(key, "actor_rollout_ref.rollout.dtype=float16")
    assert result.same_training and fields(result)["model.dtype"] == "float16"
    other = imported(key, "actor_rollout_ref.rollout.dtype=bfloat16")
    (refused,) = (finding for finding in other.refused if finding.key.endswith("rollout.dtype"))
    assert refused.why == "engines compute in model.dtype, which is float16"


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("geo_mean", "clip_ratio_low=0.3", {"name": "gmpo", "clip_ratio_low": 0.3}),
        ("sapo", "tau_neg=1.2", {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.2}),
        ("dppo_tv", "clip_ratio_c=20", {"name": "dppo-tv", "max_ratio": 20, "clip_ratio_high": 0.2}),
        ("dppo_kl", "clip_ratio=0.05", {"name": "dppo-kl", "max_ratio": 3.0}),
    ],
)
def test_losses_by_their_names_there(mode: str, options: str, expected: dict[str, Any]) -> None:
    result = imported(f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.{options}")
    found = fields(result)
    assert {name: found[f"algorithm.loss.{name}"] for name in expected} == expected
    aggregation = "token-mean" if mode.startswith("dppo") else "seq-mean-token-mean"
    assert found["algorithm.loss.aggregation"] == aggregation


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.adv_estimator=opo", "algorithm.adv_estimator"),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.loss_mode"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "actor_rollout_ref.actor.loss_agg_mode"),
        ("data.truncation=ends", "data.truncation"),
        ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n"),
        (f"{CORRECTION}.rollout_token_veto_threshold=1e-4", f"{CORRECTION}.rollout_token_veto_threshold"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "actor_rollout_ref.rollout.multi_turn.enable"),
        (f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.fsdp_config.model_dtype"),
        ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.temperature"),
        ("data.train_max_samples=100", "data.train_max_samples"),
        (f"{ACTOR}.router_replay.mode=R3", f"{ACTOR}.router_replay.mode"),
        ("actor_rollout_ref.actor.optim.optimizer=AdamW8bit", "actor_rollout_ref.actor.optim.optimizer"),
        ("critic.model.lora_rank=8", ""),
    ],
)  # fmt: skip
def test_refused_values_change_the_training(override: str, key: str) -> None:
    result = imported(override)
    if not key:  # a critic's key, where there is no critic
        assert result.same_training and "only PPO" in result.no_effect[-1].why
        return
    assert refused(result).get(key) is True and not result.same_training
    assert f"# REFUSED {key}" in result.recipe


def test_both_kinds_of_kl_are_refused() -> None:
    result = imported("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    assert refused(result) == {"algorithm.use_kl_in_reward": True}
    assert fields(result)["algorithm.kl.place"] == "loss"


def test_clip_ratio_alone_has_no_effect_as_in_verl() -> None:
    result = imported("actor_rollout_ref.actor.clip_ratio=0.1")
    assert fields(result)["algorithm.loss.clip_ratio_low"] == 0.2
    assert any("clip_ratio (0.1) has no effect in verl" in note for note in result.notes)
    without = imported(
        "actor_rollout_ref.actor.clip_ratio=0.1",
        "actor_rollout_ref.actor.clip_ratio_low=null",
        "actor_rollout_ref.actor.clip_ratio_high=null",
    )
    assert fields(without)["algorithm.loss.clip_ratio_high"] == 0.1


def test_the_old_sum_over_sequences_is_refused_only_in_old_versions() -> None:
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
    assert imported(mode).same_training
    assert refused(imported(mode, version="0.7.0")) == {"actor_rollout_ref.actor.loss_agg_mode": True}


def test_steps_of_a_warm_up_are_a_field() -> None:
    result = imported(f"{ACTOR}.optim.lr_warmup_steps=10", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.3")
    assert result.same_training and fields(result)["optimizer.warmup_steps"] == 10


@pytest.mark.parametrize(
    ("version", "cut", "expected"),
    [
        ("0.5.0", "error", "error"),
        ("0.5.0", "left", "truncate-left"),
        ("0.5.0", "right", "truncate"),
        ("0.5.0", "middle", "truncate-middle"),
        ("0.7.0", "left", "error"),
        ("2026-08", "error", "truncate-left"),
        ("2026-08", "right", "truncate-left"),
    ],
)
def test_long_prompts_are_cut_as_the_version_does(version: str, cut: str, expected: str) -> None:
    result = imported(f"data.truncation={cut}", version=version)
    assert result.same_training and fields(result)["data.too_long"] == expected
    dropped = imported(f"data.truncation={cut}", "data.filter_overlong_prompts=True", version=version)
    assert fields(dropped)["data.too_long"] == "drop"


def test_steps_end_with_the_epochs() -> None:
    steps = ("trainer.total_training_steps=50", "data.train_batch_size=100", "trainer.total_epochs=2")
    assert fields(imported(*steps))["trainer.steps"] == 50
    assert any("--rows N tells" in note for note in imported(*steps).notes)
    assert fields(imported(*steps, rows=1050))["trainer.steps"] == 20
    assert fields(imported(*steps, rows=100_000))["trainer.steps"] == 50


def test_a_step_of_the_asynchronous_trainer_is_what_it_fetches() -> None:
    result = imported(
        "data.train_batch_size=0", f"{ACTOR}.ppo_mini_batch_size=32", "async_training.require_batches=4"
    )
    assert fields(result)["data.batch_size"] == 128 and fields(result)["algorithm.mini_batch_size"] == 32
    assert refused(result)["async_training.require_batches"] is True


def test_arguments_without_their_command_are_all_taken() -> None:
    pytest.importorskip("tree_sitter_bash")
    lines = (
        b"algorithm.adv_estimator=rloo data.train_files=gsm8k\nactor_rollout_ref.rollout.n=6 \\\n  a.b=1\n"
    )
    result = convert(lines, "verl")
    assert fields(result)["rollout.n"] == 6 and [item.key for item in result.unknown] == ["a.b"]


def test_a_choice_of_engine_is_a_strategy() -> None:
    result = imported("model_engine=megatron", f"{ACTOR}.optim.lr_decay_style=linear")
    assert fields(result)["optimizer.schedule"] == "linear" and result.same_training


def test_a_name_with_a_date_keeps_the_rest() -> None:
    pytest.importorskip("tree_sitter_bash")
    command = 'python3 -m verl.trainer.main_ppo data.train_files=gsm8k trainer.experiment_name="a-$(date)"'
    result = convert(command.encode(), "verl")
    assert fields(result)["name"] == "a"
    assert [(item.key, item.changes) for item in result.questions if "name" in item.key] == [
        ("trainer.experiment_name", False)
    ]


def test_rows_without_a_known_reward_are_a_question() -> None:
    result = imported("data.train_files=math.parquet")
    assert [item.key for item in result.questions] == ["reward"]
    assert "default_compute_score as compute_score" in result.recipe
    assert fields(result)["reward.function.path"] == "verl_reward.py:compute_score"


def test_unknown_keys_are_told_without_their_secrets() -> None:
    result = imported(
        "+my.option=3", "+my.api_key=abcdefghijklmnop1", "trainer.project_name=hf_abcdefghijklmnopqrst"
    )
    assert {item.key for item in result.unknown} == {"my.option", "my.api_key"}
    assert not result.same_training
    everything = result.recipe + str(result.as_json())
    assert "abcdefghijklmnop1" not in everything and "hf_abc" not in everything


def test_a_named_configuration_file_is_not_guessed() -> None:
    pytest.importorskip("tree_sitter_bash")
    command = "python3 -m verl.trainer.main_ppo --config-name={} algorithm.adv_estimator=grpo"
    own = convert(command.format("ppo_megatron_trainer").encode(), "verl")
    assert "--config-name" not in refused(own)
    assert "megatron; isotrain has FSDP2" in " ".join(own.notes)
    assert "--config-name" in refused(convert(command.format("mine").encode(), "verl"))


def test_every_key_that_was_given_is_told() -> None:
    """Mapped, without effect, refused or unknown: never in two of them, never in none."""
    result = imported(
        "data.return_raw_chat=True", "trainer.balance_batch=False", "a.b=1", "data.truncation=ends"
    )
    told = [*result.mapped, *(item.key for item in (*result.no_effect, *result.refused, *result.unknown))]
    expected = {"algorithm.adv_estimator", "actor_rollout_ref.rollout.n", "data.train_files",
                "data.val_files",
                "actor_rollout_ref.rollout.name", "data.return_raw_chat", "trainer.balance_batch", "a.b",
                "data.truncation"}  # fmt: skip
    assert sorted(told) == sorted(expected)
    assert sum(result.account.values()) == len(expected)


def test_a_lost_word_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that went in are counted where they are read, so that a reader that drops one is noticed."""
    read = hydra.read_overrides
    monkeypatch.setattr(hydra, "read_overrides", lambda source, words: read(source, list(words)[:-1]))
    with pytest.raises(IsotrainError, match="internal error: 6 words or keys were read, 5"):
        imported("data.shuffle=False")


def test_a_key_without_outcome_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sort_keys = Draft.sort_keys

    def forgetful(draft: Draft, ignore: Any) -> None:
        sort_keys(draft, ignore)
        draft.outcomes.pop("data.shuffle")

    monkeypatch.setattr(Draft, "sort_keys", forgetful)
    with pytest.raises(IsotrainError, match=r"lost: data\.shuffle=False"):
        imported("data.shuffle=False")


CONDITION = """
DEVICE=${DEVICE:-$(detect)}
ACTOR=(actor_rollout_ref.actor.use_kl_loss=True)
EXTRA=()
if [ "$DEVICE" = npu ]; then
    ACTOR+=(actor_rollout_ref.actor.clip_ratio_high=0.4 trainer.n_gpus_per_node=16)
    EXTRA+=(trainer.device=npu)
fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \
    data.train_files=gsm8k data.val_files=gsm8k "${ACTOR[@]}" "${EXTRA[@]}"
"""


def test_both_branches_of_a_condition_are_told() -> None:
    pytest.importorskip("tree_sitter_bash")
    result = convert(CONDITION.encode(), "verl")
    assert fields(result)["algorithm.kl.place"] == "loss" and not result.same_training
    questions = {item.key: (item.why, item.changes) for item in result.questions}
    assert questions.keys() == {f"{ACTOR}.clip_ratio_high", "trainer.n_gpus_per_node"}
    assert 'it is 0.4 if [ "$DEVICE" = npu ] (line 5), not given' in questions[f"{ACTOR}.clip_ratio_high"][0]
    [condition] = result.conditions
    assert condition.names == ("DEVICE",) and condition.line == 5
    assert condition.sets['if [ "$DEVICE" = npu ]'] == (
        f"ACTOR+=({ACTOR}.clip_ratio_high=0.4 trainer.n_gpus_per_node=16)",
        "EXTRA+=(trainer.device=npu)",
    )
    assert "--set DEVICE=VALUE decides it" in result.recipe


@pytest.mark.parametrize(("device", "high"), [("npu", 0.4), ("gpu", 0.2)])
def test_a_variable_that_is_given_decides_a_condition(device: str, high: float) -> None:
    pytest.importorskip("tree_sitter_bash")
    result = convert(CONDITION.encode(), "verl", given={"DEVICE": device})
    assert result.same_training and not result.conditions and not result.questions
    assert fields(result)["algorithm.loss.clip_ratio_high"] == high


def test_variables_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter_bash")
    path = tmp_path / "run.sh"
    path.write_text(CONDITION)
    arguments = ["import", "verl", str(path)]
    without = RUNNER.invoke(app, arguments)
    assert without.exit_code == 1 and "--set DEVICE=VALUE decides it" in without.output
    assert RUNNER.invoke(app, [*arguments, "--set", "DEVICE=npu"]).exit_code == 0
    unused = RUNNER.invoke(app, [*arguments, "--set", "DEVICE=npu", "--set", "OTHER=1"])
    assert unused.exit_code == 1 and "does not use $OTHER" in unused.output
    assert "expected NAME=VALUE" in RUNNER.invoke(app, [*arguments, "--set", "DEVICE"]).output


EPOCHS = "actor_rollout_ref.actor.ppo_epochs"
ROLLOUT = "actor_rollout_ref.rollout"


def test_options_of_vllm_are_taken_over() -> None:
    given = (
        f"{ROLLOUT}.max_num_seqs=64",
        f"{ROLLOUT}.cudagraph_capture_sizes=[1,2,4]",
        f"+{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=True",
        f"{ROLLOUT}.max_num_batched_tokens=16384",
    )
    result = imported(*given)
    assert parse_recipe(result.recipe, "recipe").rollout.engine_options == {  # type: ignore[union-attr]
        "max_num_seqs": 64,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
        "enable_expert_parallel": True,
        "max_num_batched_tokens": 16384,
    }
    assert not result.unknown
    assert "engine_options" not in imported(f"{ROLLOUT}.max_num_batched_tokens=8192").recipe
    other = imported(*given, f"{ROLLOUT}.name=sglang")
    assert "engine_options" not in other.recipe and not other.unknown


TRAINING = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
    "data.train_files=gsm8k data.val_files=gsm8k"
)
# Scripts of which something is not known; behind each is what the report has to name.
NOT_THE_SAME = {
    "list in an unknown loop": (f'for x in $X; do A+=("{EPOCHS}=$x"); done; {TRAINING} "${{A[@]}}"', "loop"),
    "list of mapfile": (f'mapfile -t A < args; {TRAINING} "${{A[@]}}"', "mapfile"),
    "list from nowhere": (f'{TRAINING} "${{A[@]}}"', "$A"),
    "text from nowhere": (f"{TRAINING} $EXTRA", "$EXTRA"),
    "text of a program": (f"E=$(make args); {TRAINING} $E", "$(make args)"),
    "a file that is sourced": (f'A=(data.seed=1); source args.sh; {TRAINING} "${{A[@]}}"', "args.sh"),
    "eval": (f'A=(); eval "$MORE"; {TRAINING} "${{A[@]}}"', "runs text as a program"),
    "and": (f'A=(); [[ $N -gt 1 ]] && A+=({EPOCHS}=2); {TRAINING} "${{A[@]}}"', "ppo_epochs"),
    "or": (f'A=(); [[ $N -gt 1 ]] || A+=({EPOCHS}=2); {TRAINING} "${{A[@]}}"', "ppo_epochs"),
    "else": (f'if [ $N = 1 ]; then A=(); else A=({EPOCHS}=2); fi; {TRAINING} "${{A[@]}}"', "ppo_epochs"),
    "case": (f'case $N in 1) A=({EPOCHS}=2);; esac; {TRAINING} "${{A[@]}}"', "ppo_epochs"),
    "function": (f'f() {{ [ $N = 1 ] && A+=({EPOCHS}=2); }}; f; {TRAINING} "${{A[@]}}"', "ppo_epochs"),
    "text of a condition": (f'[ $N = 1 ] && E="{EPOCHS}=2"; {TRAINING} $E', "ppo_epochs"),
    "xargs": (f"echo {EPOCHS}=2 | xargs {TRAINING}", "xargs"),
    "shifted arguments": (f'f() {{ shift $N; {TRAINING} "$@"; }}; f a {EPOCHS}=2', "shifts"),
    "two trainings": (f"{TRAINING}; {TRAINING} {EPOCHS}=2", "there are 2 trainings"),
    "training of a condition": (f"if [ $N = 1 ]; then {TRAINING}; fi", "runs only if [ $N = 1 ]"),
    "braces": (f"{TRAINING} {EPOCHS}={{1,2}}", "braces"),
    "removed key": (f"{TRAINING} ~{ACTOR}.clip_ratio_low", "takes it out"),
    "no key": (f"{TRAINING} hello", "not key=value"),
    "empty value": (f"{TRAINING} algorithm.adv_estimator=", "not an estimator"),
    "null": (f"{TRAINING} {EPOCHS}=null", "null"),
    "another configuration": (f"{TRAINING} --config-name mine", "--config-name"),
    "configuration elsewhere": (f"{TRAINING} --config-path /x --config-name ppo_trainer", "--config-path"),
    "another program": (TRAINING.replace("verl.trainer.main_ppo", "recipe.prime.main_prime"), "main_prime"),
    "asynchronous program": (
        TRAINING.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo"),
        "rollout.staleness",
    ),
    "engine cache in 8 bits": (f"{TRAINING} +{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8", "kv_"),
    "frozen routers": (
        f"{TRAINING} +actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=True",
        "freeze_moe_router",
    ),
    "optimizer in bfloat16": (f"{TRAINING} {ACTOR}.optim.exp_avg_dtype=bf16", "exp_avg_dtype"),
    "critic's own schedule": (
        TRAINING.replace("=grpo", "=gae") + " critic.optim.min_lr_ratio=0.5",
        "critic.optim.min_lr_ratio",
    ),
    "shorter model": (f"{TRAINING} actor_rollout_ref.rollout.max_model_len=600", "max_model_len"),
    "more prompts": (f"{TRAINING} data.gen_batch_size=2048", "gen_batch_size"),
    "images": (f"{TRAINING} data.image_key=images", "not imported yet"),
    "model of images": (f"{TRAINING} actor_rollout_ref.model.path=Qwen2.5-VL-7B", "not imported yet"),
    "rows with images": (TRAINING.replace("gsm8k", "geo3k/train.parquet"), "not imported yet"),
    "a line that is not understood": (f"x=((\n{TRAINING}", "not understood"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_what_is_not_known_is_never_the_same_training(name: str) -> None:
    pytest.importorskip("tree_sitter_bash")
    source, named = NOT_THE_SAME[name]
    try:
        result = convert(source.encode(), "verl")
    except ImportSourceError as error:
        assert named in str(error) or "no command" in str(error)
        return
    assert not result.same_training
    findings = [item for item in (*result.refused, *result.unknown, *result.questions) if item.changes]
    assert any(named in f"{item.key} {item.why}" for item in findings)


# Scripts of which everything is known, and ppo_epochs.
THE_SAME = {
    "plain": (f"{TRAINING} {EPOCHS}=2", 2),
    "the last wins": (f"{TRAINING} {EPOCHS}=2 {EPOCHS}=3", 3),
    "a condition that a later word overrides": (
        f'A=(); [ $N = 1 ] && A+=({EPOCHS}=2); {TRAINING} "${{A[@]}}" {EPOCHS}=3',
        3,
    ),
    "both branches alike": (
        f'if [ $N = 1 ]; then A=({EPOCHS}=2); else A=({EPOCHS}=2); fi; {TRAINING} "${{A[@]}}"',
        2,
    ),
    "a branch that ends": (f"E=2; [ -f x ] || {{ E=3; exit 1; }}; {TRAINING} {EPOCHS}=$E", 2),
    "pluses": (f"{TRAINING} ++{EPOCHS}=2", 2),
    "torchrun, nohup and tee": (f"nohup torchrun {TRAINING[8:]} {EPOCHS}=2 2>&1 | tee log &", 2),
    "ray": (f"ray job submit --address=$A --runtime-env=e.yaml -- {TRAINING} {EPOCHS}=2", 2),
    "a function": (f'f() {{ {TRAINING} "$@"; }}; f {EPOCHS}=2', 2),
    "a program in a text": (f'E=2; bash -c "{TRAINING} {EPOCHS}=$E"', 2),
    "a list in a loop": (f'for k in ppo_epochs; do A+=({ACTOR}.$k=2); done; {TRAINING} "${{A[@]}}"', 2),
    "arguments": (f'set -- {EPOCHS}=2; {TRAINING} "$@"', 2),
    "a here-document": (f"read -r -d '' C <<EOF\n{TRAINING[11:]} {EPOCHS}=2\nEOF\npython3 -m $C", 2),
    "its own configuration": (f"{TRAINING} --config-path=config --config-name='ppo_trainer' {EPOCHS}=2", 2),
    "a launcher of a condition": (
        f'L=(python3); [ $N = 1 ] && L=(uv run python3); "${{L[@]}}" {TRAINING[8:]} {EPOCHS}=2', 2),
}  # fmt: skip


@pytest.mark.parametrize("name", THE_SAME)
def test_what_is_known_is_the_same_training(name: str) -> None:
    pytest.importorskip("tree_sitter_bash")
    source, epochs = THE_SAME[name]
    result = convert(source.encode(), "verl")
    assert result.same_training, (result.refused, result.unknown, result.questions)
    assert fields(result)["algorithm.ppo_epochs"] == epochs


def test_a_word_that_may_be_any_key_marks_the_fields() -> None:
    pytest.importorskip("tree_sitter_bash")
    result = convert(f"{TRAINING} $EXTRA {EPOCHS}=2".encode(), "verl")
    lines = dict(line.strip().split(":", 1) for line in result.recipe.splitlines() if ":" in line)
    assert "NOT KNOWN: ? may set it" in lines["n"] and "NOT KNOWN" not in lines["ppo_epochs"]


@pytest.mark.parametrize(
    ("names", "threshold", "reject"),
    [
        ("seq_mean_k1", "0.8_2.0", {"seq_mean_k1": [0.5, 1.25]}),
        ("seq_mean_k1", "1.01", {"seq_mean_k1": 1.01}),
        ("'token_k3,seq_max_k2'", "0.1", {"token_k3": 0.1, "seq_max_k2": 0.1}),
        ("'seq_sum_k1,token_k3'", "'0.5_2.0,0.01'", {"seq_sum_k1": [0.5, 2.0], "token_k3": 0.01}),
        ("geometric", "1.001", {"seq_mean_k1": 1.001}),
        ("geometric", f"1.2 {CORRECTION}.rollout_rs_threshold_lower=0.9", {"seq_mean_k1": [0.9, 1.2]}),
    ],
)
def test_rejections_bound_the_inverse_ratio(names: str, threshold: str, reject: dict[str, Any]) -> None:
    """verl bounds that of the engine to the trained model where it names the divergence."""
    threshold, *lower = threshold.split()
    result = imported(
        f"{CORRECTION}.rollout_rs={names}", f"{CORRECTION}.rollout_rs_threshold={threshold}", *lower
    )
    place = f"{CORRECTION}.reject."
    written = {name.removeprefix(place): value for name, value in fields(result).items() if place in name}
    assert written == reject
    assert refused(result)[f"{CORRECTION}.rollout_rs"], "losses are averaged over other tokens"


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_bypass_mode_chooses_the_loss(loss: str) -> None:
    keys = (f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type={loss}")
    result = imported(*keys, f"{CORRECTION}.rollout_is=token")
    written = fields(result)
    assert result.same_training and written[f"{CORRECTION}.bypass_mode"]
    expected = ("clip", "off") if loss == "ppo_clip" else ("reinforce", "token")
    assert (written["algorithm.loss.name"], written[f"{CORRECTION}.level"]) == expected


DISTILLATION = (
    "distillation.enabled=True",
    "distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-7B",
)
D_LOSS, TEACHER = "distillation.distillation_loss", "distillation.teacher_models.teacher_model"


@pytest.mark.parametrize(
    ("mode", "gradient", "loss"),
    [
        ("k1", True, "policy-gradient"),
        ("k3", False, "k3"),
        ("mse", False, "k2"),
        ("forward_kl_topk_tail", False, "forward-kl"),
    ],
)
def test_on_policy_distillation(mode: str, gradient: bool, loss: str) -> None:
    result = imported(
        *DISTILLATION,
        f"{D_LOSS}.loss_mode={mode}",
        f"{D_LOSS}.use_policy_gradient={gradient}",
        f"{D_LOSS}.use_task_rewards=False",
        f"{D_LOSS}.loss_max_clamp=10.0",
        f"{D_LOSS}.topk=64",
        "distillation.n_gpus_per_node=4",
        f"{TEACHER}.inference.tensor_model_parallel_size=2",
    )
    found, section = fields(result), "algorithm.distillation"
    assert found[f"{section}.path"] == "Qwen/Qwen2.5-7B" and found[f"{section}.loss"] == loss
    assert found[f"{section}.task_rewards"] is False and found[f"{section}.clamp"] == 10.0
    assert found.get(f"{section}.top_k") == (64 if loss == "forward-kl" else None)
    assert not any(
        "distillation" in key for key in (*refused(result), *(item.key for item in result.unknown))
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ((f"{D_LOSS}.loss_mode=k3", f"{D_LOSS}.use_policy_gradient=True"), f"{D_LOSS}.loss_mode"),
        ((f"{D_LOSS}.loss_mode=forward_kl_topk",), f"{D_LOSS}.loss_mode"),
        (("distillation.teacher_models.two.model_path=b",), "distillation.enabled"),
        ((f"{D_LOSS}.loss_mode=k3", f"{D_LOSS}.clip_ratio=0.4"), f"{D_LOSS}.clip_ratio"),
    ],
)
def test_other_distillation_is_refused(settings: tuple[str, ...], key: str) -> None:
    assert refused(imported(*DISTILLATION, *settings))[key]


def test_distillation_that_is_off_has_no_effect() -> None:
    result = imported("distillation.enabled=False", f"{D_LOSS}.loss_mode=k1", *DISTILLATION[1:])
    assert fields(result).get("algorithm.distillation.path") is None and not refused(result)
