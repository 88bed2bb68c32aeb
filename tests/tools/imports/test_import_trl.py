"""What scripts, configurations and commands of TRL become, and what is told of the rest."""

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

RUNNER = CliRunner()

SFT = """\
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

MODEL = "Qwen/Qwen2.5-0.5B"
BASE_LR = 2e-4
dataset = load_dataset("trl-lib/Capybara", split="train")
dataset = dataset.shuffle(seed=1)
args = SFTConfig(
    f"runs/{MODEL}",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2 * 2,
    learning_rate=BASE_LR / 2,
    assistant_only_loss=True,
    logging_steps=5,
)
lora = LoraConfig(r=32, target_modules="all-linear")
trainer = SFTTrainer(model=MODEL, args=args, train_dataset=dataset, peft_config=lora)
trainer.train()
"""

GRPO = """\
from datasets import load_dataset
from rewards import length_reward
from trl import GRPOConfig, GRPOTrainer

def format_reward(completions, **kwargs):
    return [1.0 if "<answer>" in c else 0.0 for c in completions]

def main():
    dataset = load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})
    args = GRPOConfig(
        output_dir="out/grpo", use_vllm=True, per_device_train_batch_size=4, gradient_accumulation_steps=8,
        num_generations=16, max_completion_length=1024, epsilon_high=0.28, eval_strategy="steps",
        eval_steps=40, steps_per_generation=32, max_steps=100, num_iterations=2,
    )
    args.seed = 7
    trainer = GRPOTrainer(
        "Qwen/Qwen2.5-1.5B-Instruct", [format_reward, length_reward], args,
        train_dataset=dataset["train"], eval_dataset=dataset["test"],
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""  # fmt: skip

DPO = """\
LR=5.0e-7
accelerate launch --num_processes 8 trl/scripts/dpo.py --dataset_name trl-lib/ultrafeedback_binarized \\
    --model_name_or_path Qwen/Qwen2-0.5B-Instruct --learning_rate $LR --num_train_epochs 1 --loss_type ipo \\
    --per_device_train_batch_size 2 --gradient-accumulation-steps 8 --no_remove_unused_columns \\
    --use_peft --lora_r 32 --lora_alpha 16 --model_init_kwargs '{"dtype": "bfloat16"}'
"""

KTO = """\
model_name_or_path: m
datasets:
  - path: json
    data_files: [a.jsonl, b.jsonl]
per_device_train_batch_size: 4
desirable_weight: 1.5
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_steps: 0.05
save_strategy: 'no'
"""


# Differences that follow from other keys than the one that would decide them.
ROOTS = ("epsilon_high", "use_bias_correction_kl", "generation_batch_size")


def imported(text: str, **given: str) -> Imported:
    return convert(text.encode(), "trl", given=given)


def fields(result: Imported) -> dict[str, Any]:
    return flatten(resolved(parse_recipe(result.recipe, "recipe")))


def has(result: Imported, expected: dict[str, Any]) -> None:
    found = fields(result)
    assert {name: found[name] for name in expected} == expected


def grpo(settings: str, **given: str) -> Imported:
    """A configuration of GRPO with these keys and the fewest others."""
    text = f"model_name_or_path: m\ndataset_name: org/rows\nreward_model_name_or_path: rm\n{settings}"
    return imported(text, trainer="grpo", **given)


def sft(settings: str, after: str = "") -> Imported:
    """A script of SFT with these arguments of its configuration, and statements before `train`."""
    text = (
        "from trl import SFTConfig, SFTTrainer\nfrom datasets import load_dataset\n"
        "data = load_dataset('org/rows')\n"
        f"args = SFTConfig(assistant_only_loss=True, {settings})\n"
        f"{after}\ntrainer = SFTTrainer('m', args=args, train_dataset=data['train'])\ntrainer.train()\n"
    )
    return imported(text)


def differences(result: Imported) -> dict[str, int]:
    """Keys that change the training and are not taken over, with their lines."""
    findings = (*result.refused, *result.unknown, *result.questions)
    return {item.key: item.line for item in findings if item.changes}


def test_a_script_of_sft() -> None:
    result = imported(SFT, num_processes="2")
    has(
        result,
        {
            "algorithm.name": "sft",
            "name": "Qwen2.5-0.5B",
            "output": "runs/Qwen/Qwen2.5-0.5B",
            "model.path": "Qwen/Qwen2.5-0.5B",
            "model.dtype": "bfloat16",
            # peft's defaults, not those of commands
            "model.lora.rank": 32,
            "model.lora.alpha": 8,
            "model.lora.dropout": 0.0,
            "model.lora.targets": "all-linear",
            "data.train": "trl-lib/Capybara",
            "data.format": "messages",
            "data.batch_size": 4 * 4 * 2,
            "data.too_long": "truncate",
            "optimizer.lr": 1e-4,
            "optimizer.betas": [0.9, 0.999],
            "optimizer.schedule": "linear",
            "optimizer.warmup_steps": 0,
            "optimizer.weight_decay": 0.0,
            "trainer.epochs": 3,
            "trainer.save_every": 500,
        },
    )
    assert result.same_training and differences(result) == {}
    assert (
        "batch_size: 32  # per_device_train_batch_size, gradient_accumulation_steps: 4 x 4 x 2 devices"
        in result.recipe
    )
    assert any("1 device is assumed" in note for note in imported(SFT).notes)


def test_a_script_of_grpo() -> None:
    """TRL counts responses of a device and updates; a step here is a generation with 4 x 2 updates."""
    result = imported(GRPO, num_processes="8")
    has(
        result,
        {
            "data.train": "a.jsonl",
            "data.batch_size": 4 * 8 * 32 // 16,
            "algorithm.mini_batch_size": 4 * 8 * 8 // 16,
            "algorithm.ppo_epochs": 2,
            "algorithm.convention": "trl",
            "algorithm.loss.aggregation": "token-mean",
            "algorithm.loss.clip_ratio_low": 0.2,
            "algorithm.loss.clip_ratio_high": 0.28,
            "algorithm.loss.dual_clip": None,
            "algorithm.kl.place": "off",
            "algorithm.rollout_correction.level": "sequence",
            "algorithm.rollout_correction.mode": "mask",
            "algorithm.rollout_correction.upper": 3.0,
            "algorithm.rollout_correction.lower": 0.0,
            "rollout.n": 16,
            "rollout.max_tokens": 1024,
            "rollout.memory_utilization": 0.3,
            "reward.function.path": "trl_reward.py:score",
            "trainer.steps": 100 // 8,
            "trainer.validate_every": 40 // 8,
            "seed": 7,
        },
    )
    assert fields(result)["data.validation"] == "b.jsonl"
    assert differences(result) == {"trainer.reward_funcs": 17}
    assert "format_reward(), rewards.length_reward()" in result.recipe


def test_a_command_of_dpo() -> None:
    pytest.importorskip("tree_sitter_bash")
    result = imported(DPO)
    has(
        result,
        {
            "device.ranks": 8,
            "data.batch_size": 2 * 8 * 8,
            "algorithm.name": "dpo",
            "algorithm.loss": "ipo",
            "algorithm.length_averaged": True,
            "model.lora.rank": 32,
            # disable_dropout, which is on, reaches the adapters
            "model.lora.dropout": 0.0,
            "model.lora.targets": ["q_proj", "v_proj"],
            "optimizer.lr": 5e-7,
            "trainer.epochs": 1,
        },
    )
    assert result.same_training and sum(result.account.values()) == 27
    short = imported(
        "trl dpo --model_name_or_path m --dataset_name org/rows --num_processes 4 --max_length 512"
    )
    has(short, {"device.ranks": 4, "data.batch_size": 32, "data.max_length": 512, "optimizer.lr": 1e-6})


def test_a_configuration_of_kto() -> None:
    result = imported(KTO)
    has(
        result,
        {
            "algorithm.name": "kto",
            "algorithm.desirable_weight": 1.5,
            "data.train": ["a.jsonl", "b.jsonl"],
            "data.shuffle": False,
            "optimizer.schedule": "cosine",
            "optimizer.min_lr_ratio": 0.1,
            "optimizer.warmup_ratio": 0.05,
            "trainer.save_every": 0,
        },
    )
    assert result.same_training


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("loss_type: grpo",
         {"algorithm.loss.aggregation": "seq-mean-token-mean", "algorithm.loss.name": "clip"}),
        ("loss_type: dr_grpo\nscale_rewards: false",
         {"algorithm.loss.aggregation": "seq-mean-token-sum-norm", "algorithm.scale_by_std": False}),
        ("loss_type: grpo\nimportance_sampling_level: sequence", {"algorithm.loss.name": "gspo"}),
        ("loss_type: cispo\nepsilon_high: 5.0",
         {"algorithm.loss.name": "cispo", "algorithm.loss.clip_ratio_low": 1.0,
          "algorithm.loss.clip_ratio_high": 4.0}),
        ("delta: 2.5", {"algorithm.loss.dual_clip": 2.5}),
        # k3 times the ratio has the gradient of k2 while the ratio is 1
        ("beta: 0.04",
         {"algorithm.kl.estimator": "k2", "algorithm.kl.coefficient": 0.04, "algorithm.kl.place": "loss"}),
        ("beta: 0.04\nuse_bias_correction_kl: false", {"algorithm.kl.estimator": "k3"}),
        ("top_k: 20\ntop_p: 0.9", {"rollout.top_k": 20, "rollout.top_p": 0.9}),
        ("use_vllm: true\nvllm_importance_sampling_correction: false",
         {"algorithm.rollout_correction.level": "off"}),
        ("use_vllm: true\nvllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_cap: 2.0",
         {"algorithm.rollout_correction.level": "token", "algorithm.rollout_correction.mode": "truncate",
          "algorithm.rollout_correction.upper": 2.0, "algorithm.rollout_correction.lower": None}),
        ("use_vllm: true\nvllm_mode: server", {"cluster.placement": "separate"}),
        ("max_prompt_length: 256", {"data.max_length": 256, "data.too_long": "truncate-left"}),
        ("cast_lm_head_to_fp32: true", {"model.head_dtype": "float32"}),
        ("bf16: false", {"model.dtype": "float32"}),
        ("fp16: true", {"model.dtype": "float16"}),
        ("reward_weights: [0.5]", {"reward.model.path": "rm", "reward.model.weight": 0.5}),
    ],
)  # fmt: skip
def test_settings_of_grpo(settings: str, expected: dict[str, Any]) -> None:
    result = grpo(settings)
    has(result, expected)
    assert result.same_training, differences(result)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("loss_type: sapo", "loss_type"),
        ("loss_type: bnpo", "loss_type"),
        ("loss_type: cispo", "epsilon_high"),
        ("scale_rewards: batch", "scale_rewards"),
        ("beta: 0.04\nnum_iterations: 2", "use_bias_correction_kl"),
        ("num_generations: 3", "generation_batch_size"),
        ("mask_truncated_completions: true", "mask_truncated_completions"),
        ("top_entropy_quantile: 0.2", "top_entropy_quantile"),
        ("generation_kwargs: {num_beams: 2}", "generation_kwargs.num_beams"),
        ("optim: adafactor", "optim"),
        ("lr_scheduler_type: polynomial", "lr_scheduler_type"),
        ("num_train_epochs: 0.5", "num_train_epochs"),
        ("dtype: bfloat16", "dtype"),
        ("sync_ref_model: true", "sync_ref_model"),
        ("max_completion_length: null", "max_completion_length"),
        ("no_such_key: 1", "no_such_key"),
        ("deepspeed: zero3.json", "deepspeed"),
        ("learning_rate: high", "learning_rate"),
    ],
)
def test_settings_that_are_differences(settings: str, key: str) -> None:
    result = grpo(settings)
    assert not result.same_training
    given = settings.partition(key)
    assert differences(result)[key] == (4 + given[0].count("\n") if given[1] else 0 if key in ROOTS else 4)


@pytest.mark.parametrize(
    ("settings", "after", "key", "line"),
    [
        ("learning_rate=float(x)", "", "learning_rate", 4),
        ("seed=1, **extra", "", "**extra", 4),
        ("seed=1", "if data: args.seed = 2", "seed", 5),
        ("seed=1", "args.packing = True", "packing", 5),
        ("seed=1", "data = data.map(str)", ".map(...)", 5),
        ("seed=1", "freeze(args)", "freeze(args)", 5),
        ("seed=1", "exec('1')", "exec(...)", 5),
        ("seed=1", "args['seed'] = 2", "args['seed'] = ...", 5),
        ("packing=True", "", "packing", 4),
        ("max_length=None", "", "max_length", 4),
    ],
)
def test_what_cannot_be_read_is_a_difference_with_its_line(
    settings: str, after: str, key: str, line: int
) -> None:
    result = sft(settings, after)
    assert differences(result)[key] == line
    assert fields(result)["algorithm.name"] == "sft"


def test_names_are_followed_where_they_are_certain() -> None:
    assert differences(sft("seed=N", "N = 3"))["seed"] == 4  # it is set after the call
    twice = imported(
        "from trl import SFTConfig, SFTTrainer\nN = 3\nN = N + 2\nSFTTrainer('m', args=SFTConfig(seed=N))"
    )
    has(twice, {"seed": 5})
    either = "from trl import *\nif a:\n    N = 3\nelse:\n    N = 4\nSFTTrainer('m', args=SFTConfig(seed=N))"
    assert "N is set in lines 3, 5" in imported(either).recipe


def test_objects_that_the_script_makes() -> None:
    text = (
        "from trl import *\nmodel = AutoModelForCausalLM.from_pretrained('m')\n"
        "tokenizer = AutoTokenizer.from_pretrained('m')\ntokenizer.pad_token = tokenizer.eos_token\n"
        "model.config.use_cache = False\n"
        "rows = load_dataset('org/a', 'b')\n"
        "trainer = {trainer}(model, SFTConfig(assistant_only_loss=True), train_dataset=rows,\n"
        "    processing_class=tokenizer)\n"
    )
    result = imported(text.replace("{trainer}", "SFTTrainer"))
    has(result, {"model.path": "m", "data.train": "org/a:b:train"})
    # transformers loads the type of the checkpoint
    assert differences(result) == {"model_init_kwargs.dtype": 2}
    changed = imported("class Mine(SFTTrainer):\n    pass\n" + text.replace("{trainer}", "Mine"))
    assert differences(changed)["Mine"] == 9
    other = imported(text.replace("{trainer}", "SFTTrainer") + "tokenizer.chat_template = 'x'\n")
    assert differences(other)["tokenizer.chat_template = ..."] == 9


def test_sft_says_which_tokens_have_loss() -> None:
    text = "model_name_or_path: m\ndataset_name: org/rows\n"
    assert "assistant_only_loss" in differences(imported(text, trainer="sft"))
    given = imported(text + "completion_only_loss: true\n", trainer="sft")
    has(given, {"data.format": "prompt-completion"})
    assert given.same_training


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "from trl import SFTTrainer\nSFTTrainer('m', args=parser.parse_args())",
            "give the command that runs it",
        ),
        ("import trl\nx = 1", "no call of SFTTrainer"),
        ("import trl\nSFTTrainer(", "line 2: this is no Python"),
        ("learning_rate: 1.0\n", "--set trainer=sft"),
        ("echo hello", "no command of trl was found"),
        ("import trl\nSFTTrainer(" + "(" * 5000, "this is no Python"),
        ("import trl\nx = " + "-" * 60_000 + "1\nSFTTrainer('m')", "too deeply nested"),
        ("import trl\nx = 1" + " + 1" * 200_000, "longer than 512 KiB"),
        ("import trl\nx0 = 1\n" + "".join(f"x{i + 1} = x{i} + x{i}\n" for i in range(39))
         + "SFTTrainer('m', args=SFTConfig(seed=x39))", "too many steps"),
        ("a:\n" + "".join(" " * i + "a:\n" for i in range(1, 400)), "nested"),
    ],
    ids=range(10),
)  # fmt: skip
def test_sources_without_a_training(text: str, expected: str) -> None:
    with pytest.raises(IsotrainError, match=expected):
        imported(text)


@pytest.mark.parametrize(
    "value",
    ["__import__('os').system('touch CANARY')", "open('CANARY', 'w')", "[0] * 10 ** 9", "'x' * 10 ** 9",
     "9 ** 9 ** 9", "f'{open(chr(67))}'", "(lambda: 1)()", "x.y.z[1]", "{'a': {'b': (1, 2)}}", "b'x'", "1j",
     "...", "a if b else c", "not 1", "1 / 0", "[*a]", "{**a}", "{1: 2}", "1 < 2", "await_", "f'{1:>9}'"],
)  # fmt: skip
def test_no_value_is_run(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = sft(f"run_name={value}")
    parse_recipe(result.recipe, "recipe")
    findings = (*result.refused, *result.unknown, *result.questions)
    assert any(item.key.startswith("run_name") for item in findings)
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_recipe_for_each_trainer(tmp_path: Path) -> None:
    for trainer in ("sft", "dpo", "kto", "reward", "grpo"):
        source, recipe = tmp_path / "a.yaml", tmp_path / f"{trainer}.yaml"
        source.write_text("model_name_or_path: m\ndataset_name: org/rows\n")
        answer = ("--set", f"trainer={trainer}")
        result = RUNNER.invoke(app, ["import", "trl", str(source), *answer, "--out", str(recipe)])
        # the loss of SFT and the reward of GRPO depend on what is not there
        assert result.exit_code == (1 if trainer in ("sft", "grpo") else 0), result.output
        assert RUNNER.invoke(app, ["train", str(recipe), "--dry-run"]).exit_code == 0
