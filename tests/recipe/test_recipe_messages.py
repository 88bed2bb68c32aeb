from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import Field

from isotrain.errors import RecipeError
from isotrain.recipe import document
from isotrain.recipe.check import EXAMPLES, check
from isotrain.recipe.fields import expected, leaves, options
from isotrain.recipe.load import parse_recipe
from isotrain.recipe.names import NOTES, OTHER_NAMES, OTHER_VALUES, nearest
from isotrain.recipe.schema import Recipe, Section

BAD = """\
name: my run
output: 2026
seed: true
lr: 1e-4
model:
  partial_pretrain: some/model
  dtype: bf16
  lora: {rnak: 8, rank: "8", targets: 3}
data:
  train: [1, b.jsonl, {}]
  max_length: 1e3
  tokens_per_micro_batch: 1_000
algorithm: sft
optim:
  clip_grad: 1.0
  something: 3
optimizer:
  betas: [0.9]
trainr:
  steps: 3
trainer:
  steps: 2.5
  logger: [console]
observe:
  loggers: console
optimizer.lr: 3
"""

BAD_LINES = """\
r.yaml:1: 'name' is the text 'my run'; expected text of letters, digits and . _ + -, starting with a letter or digit
r.yaml:2: 'output' is 2026; expected text; put it in quotes: "2026"
r.yaml:3: 'seed' is true; expected a whole number, at least 0 and below 4294967296
r.yaml:4: unknown key 'lr'; did you mean 'optimizer.lr'?
r.yaml:6: unknown key 'model.partial_pretrain'; did you mean 'model.path'?
r.yaml:7: 'model.dtype' is the text 'bf16'; expected one of 'bfloat16', 'float16', 'float32'; did you mean 'bfloat16'?
r.yaml:8: unknown key 'model.lora.rnak'; did you mean 'model.lora.rank'?
r.yaml:8: 'model.lora.rank' is the text '8'; expected a whole number, at least 0; write 8 without quotes
r.yaml:8: 'model.lora.targets' is 3; expected 'all-linear' or a list of texts
r.yaml:10: item 1 of 'data.train' is 1; expected text; put it in quotes: "1"
r.yaml:10: item 3 of 'data.train' is a section; expected text
r.yaml:11: 'data.max_length' is 1e3; expected a whole number, at least 2; write 1000
r.yaml:12: 'data.tokens_per_micro_batch' is the text '1_000'; expected a whole number, at least 2; write 1000 without quotes
r.yaml:13: 'algorithm' is the text 'sft'; expected a section with keys such as name; write 'algorithm: {name: sft}'
r.yaml:15: unknown key 'optim.clip_grad'; did you mean 'optimizer.max_grad_norm'?
r.yaml:16: unknown key 'optim.something'; known here: name, output, seed, device, model, data, algorithm, rollout, reward, cluster, optimizer, trainer, observe
r.yaml:18: 'optimizer.betas' is the list [0.9]; expected a list of 2 numbers
r.yaml:19: unknown key 'trainr'; did you mean 'trainer'?
r.yaml:22: 'trainer.steps' is 2.5; expected a whole number, at least 1, or null
r.yaml:23: unknown key 'trainer.logger'; did you mean 'observe.loggers'?
r.yaml:25: 'observe.loggers' is the text 'console'; expected a list of 'console', 'tensorboard', 'wandb', 'swanlab', 'mlflow'; write [console]
r.yaml:26: unknown key 'optimizer.lr'; write 'lr' inside the section 'optimizer'
override 'device.ranks=0': 'device.ranks' is 0; expected a whole number, at least 1
"""  # noqa: E501


def lines(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, "r.yaml", overrides)
    return str(error.value).splitlines()


def test_all_problems_at_once_in_file_order() -> None:
    assert lines(BAD, "device.ranks=0") == BAD_LINES.splitlines()


def test_missing_keys_are_named_with_an_example_where_they_belong() -> None:
    assert lines("model:\n  dtype: float32\nseed: 1\n") == [
        "r.yaml:1: 'model.path' is missing; it takes text: write 'path: Qwen/Qwen3-0.6B' in section 'model'",
        "r.yaml: 'name' is missing; it takes text of letters, digits and . _ + -, starting with a letter or "
        "digit: write 'name: my-run'",
        "r.yaml: 'output' is missing; it takes text: write 'output: runs/my-run'",
        "r.yaml: 'data.train' is missing; it takes text or a list of texts: write 'train: data/train.jsonl' "
        "in section 'data'",
        "r.yaml: 'algorithm.name' is missing; it takes one of 'sft', 'dpo', 'kto', 'rm', 'prm', 'grpo', "
        "'rloo', 'reinforce++', "
        "'reinforce++-baseline', 'remax', 'ppo': write 'name: sft' in section 'algorithm'",
    ]


def test_every_required_field_has_an_example() -> None:
    required = {leaf.path for leaf in leaves(Recipe) if leaf.info.is_required()}
    assert required == set(EXAMPLES)


def test_no_pattern_of_the_schema_is_shown_as_a_regular_expression() -> None:
    assert not [leaf.path for leaf in leaves(Recipe) if "matching" in expected(leaf.info)]


def test_a_rule_between_fields_stands_at_the_field_it_names() -> None:
    text = "name: a\noutput: b\nmodel: {path: c}\nalgorithm: {name: sft}\n"
    text += "data:\n  train: d\n  max_length: 20000\n"
    assert lines(text + "lr: 1") == [
        "r.yaml:7: data: tokens_per_micro_batch (16384) is below max_length (20000): "
        "raise it to at least 20000",
        "r.yaml:8: unknown key 'lr'; did you mean 'optimizer.lr'?",
    ]


def test_names_of_other_trainers_lead_to_fields_that_exist() -> None:
    known = {leaf.path for leaf in leaves(Recipe)}
    assert not set(OTHER_NAMES.values()) - known
    assert not {name for name in OTHER_NAMES if name in known}
    assert not set(NOTES) - set(OTHER_NAMES)


def test_values_of_other_trainers_lead_to_choices_that_exist() -> None:
    kinds = [kind for leaf in leaves(Recipe) for kind in options(leaf.info.annotation)]
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    assert not set(OTHER_VALUES.values()) - choices
    assert not set(OTHER_VALUES) & choices


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("trainer.logger", "observe.loggers"),
        ("data.train_batch_size", "data.batch_size"),
        ("data.train_files", "data.train"),
        ("optim.lr", "optimizer.lr"),
        ("trainer.total_epochs", "trainer.epochs"),
        ("learning_rate", "optimizer.lr"),
        ("lora.rank", "model.lora.rank"),
        ("model.lora.lr", "optimizer.lr"),
        ("data.max_lenght", "data.max_length"),
        ("weight_decy", "optimizer.weight_decay"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.rollout.name", "rollout.engine"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.lr"),
        ("actor_rollout_ref.model.path", "model.path"),
        ("critic.optim.lr", "algorithm.critic.lr"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient"),
        ("optimizer.beta", "optimizer.betas"),
        ("beta", "algorithm.kl.coefficient"),
        ("vllm_num_engines", "rollout.engines"),
        ("device.zzz", None),
        ("x" * 100_000, None),
    ],
)
def test_suggests_the_nearest_known_name(wanted: str, near: str | None) -> None:
    assert nearest(wanted, Recipe) == near


def test_notes_are_said_after_the_suggestion() -> None:
    head = "name: a\noutput: b\nmodel: {path: c}\ndata: {train: d}\nalgorithm: {name: grpo}\n"
    head += "rollout: {n: 2}\nreward: {math: {}}\n"
    assert lines(
        head + "trainer: {n_gpus_per_node: 8, nnodes: 2}\n", "algorithm.loss.loss_scale_factor=10"
    ) == [
        "r.yaml:8: unknown key 'trainer.n_gpus_per_node'; did you mean 'device.ranks'? "
        "For online algorithms it counts the devices of all machines.",
        "r.yaml:8: unknown key 'trainer.nnodes'; did you mean 'device.ranks'? "
        "It counts devices: for online algorithms write those of all machines together.",
        "override 'algorithm.loss.loss_scale_factor=10': unknown key 'algorithm.loss.loss_scale_factor'; "
        "did you mean 'rollout.max_tokens'? 'aggregation: seq-mean-token-sum-norm' divides by it.",
    ]


def test_thousands_of_problems_are_quick_and_cut_short() -> None:
    found = lines("\n".join(f"lr{number}: 1" for number in range(5_000)))
    assert len(found) == 51 and found[-1] == "... and 4955 more problems"


class First(Section):
    name: Literal["first"]
    beta: float = Field(gt=0)


class Second(Section):
    name: Literal["second"]
    beta: str = "x"
    gamma: int = 1


class Choice(Section):
    algorithm: Annotated[First | Second, Field(discriminator="name")]
    extra: First | None = None


@pytest.mark.parametrize(
    ("text", "expected_lines"),
    [
        ("algorithm: {name: second, gamma: 3}", []),
        ("algorithm: {name: first, beta: 1}\nextra: null", []),
        ("algorithm: {name: second}\nextra: ~", []),
        (
            "algorithm: {name: second}\nextra: {name: first}",
            ["r:2: 'extra.beta' is missing; it takes a number, above 0: write 'beta: ...'"],
        ),
        (
            "algorithm: {name: second}\nextra:",
            ["r:2: 'extra.name' is missing; it takes 'first'", "r:2: 'extra.beta' is missing"],
        ),
        (
            "algorithm: {name: second}\nextra: true",
            ["r:2: 'extra' is true; expected a section with keys such as name, beta; write 'extra: {}'"],
        ),
        (
            "algorithm: {name: first}",
            ["r:1: 'algorithm.beta' is missing; it takes a number, above 0: write 'beta: ...'"],
        ),
        ("algorithm: {name: first, beta: 0}", ["r:1: 'algorithm.beta' is 0; expected a number, above 0"]),
        (
            "algorithm: {name: second, beta: 0}",
            ["r:1: 'algorithm.beta' is 0; expected text; put it in quotes"],
        ),
        (
            "algorithm: {name: first, beta: 1, gamma: 3}",
            ["r:1: unknown key 'algorithm.gamma'; it belongs to second, not to first: remove it"],
        ),
        (
            "algorithm: {name: first, beta: 1, gama: 3}",
            ["r:1: unknown key 'algorithm.gama'; did you mean 'algorithm.gamma', which belongs to second?"],
        ),
        (
            "algorithm: {name: secnd}",
            ["r:1: 'algorithm.name' is the text 'secnd'; expected one of 'first', 'second'"],
        ),
        ("algorithm: {gamma: 3}", ["r:1: 'algorithm.name' is missing; it takes one of 'first', 'second'"]),
        ("algorithm: second", ["r:1: 'algorithm' is the text 'second'; expected a section"]),
    ],
)
def test_a_choice_of_sections_is_checked_as_the_one_that_was_chosen(
    text: str, expected_lines: list[str]
) -> None:
    parsed = document.parse(text, "r")
    result: Any = check(parsed, Choice)
    found = [str(problem) for problem in parsed.problems]
    assert len(found) == len(expected_lines)
    assert all(line.startswith(start) for line, start in zip(found, expected_lines, strict=True)), found
    assert (result is None) == bool(expected_lines)
