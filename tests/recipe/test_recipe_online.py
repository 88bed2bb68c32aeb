"""Recipes of online algorithms: variants, optional sections, and what is said when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.errors import RecipeError
from isotrain.recipe.difference import difference
from isotrain.recipe.load import load_resolved, parse_recipe, resolved, write_resolved
from isotrain.recipe.rules import ENGINE_OPTIONS
from isotrain.recipe.schema import Algorithm, Recipe

HEAD = "name: a\noutput: b\nmodel: {path: c}\ndata: {train: d}\n"
GRPO = HEAD + "algorithm:\n  name: grpo\n"
PARTS = "rollout:\n  n: 4\nreward:\n  gsm8k:\n    method: strict\n"
NAMES = [kind.model_fields["name"].annotation.__args__[0] for kind in Algorithm.__args__]


OFFLINE = ("sft", "dpo", "kto", "rm", "prm")


def lines(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, "r.yaml", overrides)
    return str(error.value).splitlines()


def recipe(name: str) -> Recipe:
    parts = "" if name in OFFLINE else PARTS
    return parse_recipe(f"{HEAD}algorithm: {{name: {name}}}\n{parts}", "r.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_resolved_reads_back_equal(name: str, tmp_path: Path) -> None:
    before = recipe(name)
    write_resolved(before, tmp_path / "resolved.json")
    after = load_resolved(tmp_path / "resolved.json")
    assert after == before and type(after.algorithm) is type(before.algorithm)
    assert next(iter(resolved(after)["algorithm"])) == "name"
    assert resolved(after)["cluster"] is None
    if name in OFFLINE:
        assert resolved(after)["rollout"] is None and resolved(after)["reward"] is None


@pytest.mark.parametrize(
    ("reward", "there"),
    [
        ("reward:\n  gsm8k:\n", {"gsm8k"}),
        ("reward:\n  gsm8k:\n    # method: flexible\n  math: {}\n", {"gsm8k", "math"}),
        ("reward:\n  gsm8k: null\n  math:\n", {"math"}),
        ("reward: {gsm8k: ~, math: }\n", {"math"}),
        ("reward: {gsm8k}\n", {"gsm8k"}),
    ],
)
def test_an_empty_section_is_there_and_null_is_not(reward: str, there: set[str]) -> None:
    found = parse_recipe(HEAD + "algorithm: {name: ppo}\nrollout:\n" + reward, "r.yaml")
    assert found.rollout is not None and found.rollout.n == 1
    assert found.cluster is None
    parts = ("gsm8k", "math", "function", "model")
    assert {part for part in parts if getattr(found.reward, part) is not None} == there


def test_overrides_reach_into_variants_and_optional_sections() -> None:
    text = HEAD + "algorithm: {name: grpo}\nrollout: null\n"
    found = parse_recipe(
        text, "r.yaml", ["rollout.n=4", "reward.gsm8k.method=flexible", "algorithm.name=rloo"]
    )
    assert found.algorithm.name == "rloo"
    assert found.rollout is not None and found.rollout.n == 4
    assert found.reward is not None and found.reward.gsm8k is not None
    assert found.reward.gsm8k.method == "flexible"

    found = parse_recipe(GRPO + PARTS, "r.yaml", ["reward={math: {}}", "reward.gsm8k={}", "cluster={}"])
    assert found.reward is not None and found.reward.gsm8k is not None and found.reward.math is not None
    assert found.cluster is not None

    found = parse_recipe(GRPO + PARTS, "r.yaml", ["reward.gsm8k=null", "reward.math={}"])
    assert found.reward is not None and found.reward.gsm8k is None


UNKNOWN_NAME = (
    "expected one of 'sft', 'dpo', 'kto', 'rm', 'prm', "
    "'grpo', 'rloo', 'reinforce++', 'reinforce++-baseline', 'remax', 'ppo'"
)
NEEDS_ROLLOUT = "r.yaml: 'rollout' is missing; grpo needs it to sample responses: write 'rollout: {n: 4}'"
NEEDS_REWARD = "r.yaml: 'reward' is missing; grpo needs it to score responses: write 'reward: {gsm8k: {}}'"
NO_PART = (
    "no reward is set; add one of gsm8k, math, choice, code, function, plugin, model, process, environment, "
    "such as gsm8k: {}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            HEAD + "algorithm: {name: gropo, lam: 1}\n" + PARTS,
            [f"r.yaml:5: 'algorithm.name' is the text 'gropo'; {UNKNOWN_NAME}; did you mean 'grpo'?"],
        ),
        (
            HEAD + "algorithm: {name: gae}\n" + PARTS,
            [f"r.yaml:5: 'algorithm.name' is the text 'gae'; {UNKNOWN_NAME}; did you mean 'ppo'?"],
        ),
        (
            HEAD + "algorithm:\n  ppo_epochs: 2\n" + PARTS,
            [
                "r.yaml:5: 'algorithm.name' is missing; "
                + UNKNOWN_NAME.replace("expected", "it takes")
                + ": write 'name: sft' in section 'algorithm'"
            ],
        ),
        (
            GRPO + "  lam: 0.9\n  critic: {lr: 1}\n" + PARTS,
            [
                "r.yaml:7: unknown key 'algorithm.lam'; it belongs to ppo, not to grpo: remove it",
                "r.yaml:8: unknown key 'algorithm.critic'; it belongs to ppo, not to grpo: remove it",
            ],
        ),
        (
            HEAD + "algorithm: {name: sft, ppo_epochs: 2}\n",
            ["r.yaml:5: unknown key 'algorithm.ppo_epochs'; sft has no such key: remove it"],
        ),
        (
            GRPO + "gamma: 0.9\ncritic: {optim: {lr: 1}}\n" + PARTS,
            [
                "r.yaml:7: unknown key 'gamma'; "
                "did you mean 'algorithm.gamma', which belongs to reinforce++ and ppo?",
                "r.yaml:8: unknown key 'critic.optim.lr'; "
                "did you mean 'algorithm.critic.lr', which belongs to ppo?",
            ],
        ),
        (
            GRPO + "  kl_ctrl: {kl_coef: 1}\n  use_kl_loss: true\n" + PARTS,
            [
                "r.yaml:7: unknown key 'algorithm.kl_ctrl.kl_coef'; did you mean 'algorithm.kl.coefficient'?",
                "r.yaml:8: unknown key 'algorithm.use_kl_loss'; did you mean 'algorithm.kl.place'? "
                "Write 'place: loss'.",
            ],
        ),
        (
            GRPO + "rollout:\n  n: 0\n  temperatur: 1\nreward:\n  gsm8k:\n    metod: strict\n",
            [
                "r.yaml:8: 'rollout.n' is 0; expected a whole number, at least 1",
                "r.yaml:9: unknown key 'rollout.temperatur'; did you mean 'rollout.temperature'?",
                "r.yaml:12: unknown key 'reward.gsm8k.metod'; did you mean 'reward.gsm8k.method'?",
            ],
        ),
        # What is missing is said together with what is wrong elsewhere.
        (
            GRPO + "lr: 1\n",
            ["r.yaml:7: unknown key 'lr'; did you mean 'optimizer.lr'?", NEEDS_ROLLOUT, NEEDS_REWARD],
        ),
        (GRPO + "rollout: null\nreward: {math: {}}", [NEEDS_ROLLOUT.replace("r.yaml", "r.yaml:7")]),
        (
            GRPO + "rolout:\n  n: 3\nrewards: {gsm8k: {}}",
            [
                "r.yaml:7: unknown key 'rolout'; did you mean 'rollout'?",
                "r.yaml:9: unknown key 'rewards'; did you mean 'reward'?",
            ],
        ),
        (
            HEAD + "algorithm: {name: sft}\nrollout:\n  n: 4\nreward: {gsm8k: {}}\ncluster:\n",
            [
                "r.yaml:6: 'rollout' cannot be used with sft, which samples no responses; remove it",
                "r.yaml:8: 'reward' cannot be used with sft, which scores no responses; remove it",
                "r.yaml:9: 'cluster' cannot be used with sft, which runs without one; remove it",
            ],
        ),
        (GRPO + "rollout:\nreward:\n", [f"r.yaml:8: reward: {NO_PART}"]),
        (GRPO + "rollout:\nreward:\n  timeout: 3\n  math: null", [f"r.yaml:10: reward: {NO_PART}"]),
        (
            GRPO + "rollout:\nreward:\n  gsm8: {}\n",
            ["r.yaml:9: unknown key 'reward.gsm8'; did you mean 'reward.gsm8k'?"],
        ),
        (
            GRPO + "rollout:\nreward: gsm8k\n",
            [
                "r.yaml:8: 'reward' is the text 'gsm8k'; expected a section with keys such as "
                "gsm8k, math, choice, code; write 'reward: {gsm8k: {}}'"
            ],
        ),
        (
            GRPO + "rollout:\nreward:\n  function: f.py:score\n  model:\n",
            [
                "r.yaml:9: 'reward.function' is the text 'f.py:score'; expected a section with keys such as "
                "path, concurrency, start_timeout, memory_gb; write 'function: {path: f.py:score}'",
                "r.yaml:10: 'reward.model.path' is missing; it takes text: "
                "write 'path: models/my-reward-model' in section 'reward.model'",
            ],
        ),
        (
            GRPO + "rollout:\nreward:\n  function: {path: f.py}\n",
            [
                "r.yaml:9: 'reward.function.path' is the text 'f.py'; "
                "expected text of the form FILE.py:FUNCTION"
            ],
        ),
        (
            GRPO + "rollout:\n  n: 1\nreward: {gsm8k: {}}\n",
            ["r.yaml:8: rollout.n (1) is too small: grpo compares responses, set 2 or more"],
        ),
        (
            GRPO + "rollout:\n  n: 2\n  staleness: 1\nreward: {gsm8k: {}}\n",
            [
                "r.yaml:9: rollout.staleness (1) lets engines run during training, which needs "
                "separate devices: set cluster.placement: separate"
            ],
        ),
        (
            GRPO + "rollout:\n  n: 2\n  in_flight: true\nreward: {gsm8k: {}}\n",
            [
                "r.yaml:9: rollout.in_flight (true) updates weights during generation, but with "
                "rollout.staleness (0) generation ends before training begins: set staleness to 1 or more, "
                "or remove in_flight"
            ],
        ),
        (
            GRPO
            + "rollout:\n  n: 2\n  in_flight: true\n  engine: sglang\n  staleness: 1\n"
            + "cluster: {placement: separate}\nreward: {gsm8k: {}}\n",
            [
                "r.yaml:9: rollout.in_flight (true) cannot be used with rollout.engine sglang, which takes "
                "weights between responses: set engine: vllm, or remove in_flight"
            ],
        ),
        *(
            (
                GRPO.replace("name: grpo", "name: grpo\n  router_replay: R3")
                + PARTS.replace("n: 4", settings),
                [
                    "r.yaml:7: algorithm.router_replay (R3) takes routes from rollout.engine hf alone, and "
                    "with exact there are no others than the trainer's: set engine: hf without exact, or "
                    "router_replay: R2 or disabled"
                ],
            )
            for settings in ("n: 4", "n: 4\n  engine: hf\n  exact: true")
        ),
        (
            GRPO.replace("{path: c}", "{path: c, compile: true}") + "  router_replay: R2\n" + PARTS,
            ["r.yaml:7: algorithm.router_replay (R2) cannot be used with model.compile: remove one"],
        ),
        (
            GRPO + "  router_replay: R2\n  rollout_correction: {bypass_mode: true}\n" + PARTS,
            [
                "r.yaml:7: algorithm.router_replay (R2) takes routes of the pass for old log-probs, which "
                "rollout_correction.bypass_mode leaves out: set R3, or remove one of the two",
            ],
        ),
        (
            GRPO + "rollout:\n  n: 2\n  exact: true\nreward: {gsm8k: {}}\n",
            [
                "r.yaml:9: rollout.exact (true) needs the trainer's kernels, which rollout.engine vllm does "
                "not have: set engine: hf, or remove exact"
            ],
        ),
        (
            GRPO
            + "rollout:\n  n: 2\n  exact: true\n  engine: hf\n  in_flight: true\n  staleness: 1\n"
            + "cluster: {placement: separate}\nreward: {gsm8k: {}}\n",
            [
                "r.yaml:9: rollout.exact (true) draws a response from one version of the weights, "
                "rollout.in_flight (true) from several: remove one of the two"
            ],
        ),
        *(
            (
                GRPO.replace("{path: c}", f"{{path: c, {setting}}}")
                + PARTS.replace("n: 4", "n: 4\n  engine: hf\n  exact: true"),
                [
                    f"r.yaml:10: rollout.exact (true) cannot be used with model.{field}: the engine computes "
                    "whole layers without it, and rounds in another way: remove one of the two"
                ],
            )
            for field, setting in (("lora", "lora: {rank: 4}"), ("compile", "compile: true"))
        ),
        (
            GRPO + "rollout:\n  n: 2\n  engine_options: {kv_cache_dtype: fp8}\nreward: {gsm8k: {}}\n",
            [
                "r.yaml:9: rollout.engine_options.kv_cache_dtype cannot be set: known are "
                + ", ".join(sorted(ENGINE_OPTIONS))
            ],
        ),
        (
            GRPO
            + "rollout:\n  n: 2\n  engine: hf\n  engine_options: {max_num_seqs: 8}\nreward: {gsm8k: {}}\n",
            ["r.yaml:10: rollout.engine_options are options of vLLM: set engine: vllm, or remove them"],
        ),
        (
            GRPO + "rollout:\n  max_tokens: 20000\n  n: 2\nreward: {gsm8k: {}}\n",
            [
                "r.yaml:8: data.tokens_per_micro_batch (16384) is below data.max_length + rollout.max_tokens "
                "(21024): raise it to at least 21024"
            ],
        ),
        # `algorithm.loss` is a section here and a value of dpo.
        (
            GRPO + "  loss:\n    name: clp\n    clip_ratio_low: -1\n    entropy: yes\n" + PARTS,
            [
                "r.yaml:8: 'algorithm.loss.name' is the text 'clp'; "
                "expected one of 'clip', 'gspo', 'cispo', 'reinforce', 'gmpo', 'sapo', 'dppo-tv', "
                "'dppo-kl'; did you mean 'clip'?",
                "r.yaml:9: 'algorithm.loss.clip_ratio_low' is -1; expected a number, at least 0",
                "r.yaml:10: 'algorithm.loss.entropy' is the text 'yes'; expected a number, at least 0",
            ],
        ),
        (
            GRPO + '  loss: {clip_ratio_high: "0.28"}\n' + PARTS + "trainer: {resume: nevr}\n",
            [
                "r.yaml:7: 'algorithm.loss.clip_ratio_high' is the text '0.28'; "
                "expected a number, at least 0; write 0.28 without quotes",
                "r.yaml:13: 'trainer.resume' is the text 'nevr'; "
                "expected one of 'auto', 'never', 'start_over'; did you mean 'never'?",
            ],
        ),
        (
            HEAD + "algorithm: {name: dpo, beta: 0, loss: {name: clip}}\n",
            [
                "r.yaml:5: 'algorithm.beta' is 0; expected a number, above 0, or null",
                "r.yaml:5: 'algorithm.loss' is a section; expected one of 'sigmoid', 'ipo', 'simpo', 'orpo'",
            ],
        ),
        # Rules between sections are all told at once, beside each other.
        (
            GRPO + "rollout:\n  n: 1\n  engine: hf\n  engines: 2\n  tensor_parallel: 2\nreward: {math: {}}\n",
            [
                "r.yaml:8: rollout.n (1) is too small: grpo compares responses, set 2 or more",
                "r.yaml:10: device.ranks (1) is below 4, the number of devices that rollout.engines (2) with "
                "rollout.tensor_parallel (2) share with training: raise it, lower one of the others, or "
                "set cluster.placement: separate",
                "r.yaml:11: rollout.tensor_parallel (2) cannot be used with rollout.engine hf, "
                "which runs on one device: remove it",
            ],
        ),
        (
            GRPO + PARTS + "cluster:\n  address: ray://10.0.0.1:10001\n",
            [
                "r.yaml:13: 'cluster.address' is the text 'ray://10.0.0.1:10001'; expected text of the form "
                "HOST:PORT (a ray:// client does not work), local or auto"
            ],
        ),
        (
            GRPO + "  rollout_correction: {level: token, mode: mask, upper: 0.5}\n" + PARTS,
            [
                "r.yaml:7: algorithm.rollout_correction: upper (0.5) masks every token with mode: mask, "
                "where lower is 1 / upper: raise it above 1, or set lower"
            ],
        ),
        (
            GRPO + "  rollout_correction:\n    level: token\n    lower: 3.0\n" + PARTS,
            [
                "r.yaml:9: algorithm.rollout_correction: lower (3) must be below upper (2): lower it, "
                "or raise upper",
            ],
        ),
        (
            GRPO + "  rollout_correction: {level: sequence}\n" + PARTS.replace("n: 4", "n: 4\n  top_p: 0.9"),
            [
                "r.yaml:7: algorithm.rollout_correction.level (sequence) cannot be used with rollout.top_p "
                "(0.9): the engine normalizes over the kept tokens, the trained model over all, so the "
                "weights of long responses vanish: take tokens (level: token), or sample from all "
                "tokens"
            ],
        ),
        (
            GRPO
            + "  rollout_correction: {reject: {seq_sum_k1: 2, token_k1: 2}}\n"
            + PARTS.replace("n: 4", "n: 4\n  top_k: 9"),
            [
                "r.yaml:7: algorithm.rollout_correction.reject.seq_sum_k1 cannot be used with rollout.top_k "
                "(9): the engine normalizes over the kept tokens, the trained model over all, so the "
                "weights of long responses vanish: take tokens (reject: {token_k1: 2.0}), or sample from all "
                "tokens"
            ],
        ),
        (
            GRPO + "  rollout_correction: {level: token, bypass_mode: true}\n" + PARTS,
            [
                "r.yaml:7: algorithm.rollout_correction.level (token) cannot be used with bypass_mode: the "
                "ratio of the clip loss has the engine's log-probs already: set level: off, or loss.name: "
                "reinforce"
            ],
        ),
        (
            GRPO + "  rollout_correction: {reject: {seq_mean_k1: [0.9, 0.99]}}\n" + PARTS,
            [
                "r.yaml:7: 'algorithm.rollout_correction.reject': seq_mean_k1 must have equal probabilities "
                "inside its bounds: k1 needs a ratio above 1, or two around it ([0.99, 1.01]), k2 and k3 a "
                "number above 0"
            ],
        ),
        (
            GRPO + "  rollout_correction: {reject: {seq_mean: 2}}\n" + PARTS,
            [
                "r.yaml:7: 'algorithm.rollout_correction.reject' is a section; expected a section of numbers "
                "or a list of 2 numbers under token_k1, token_k2, token_k3, seq_sum_k1, seq_sum_k2, "
                "seq_sum_k3, seq_mean_k1, seq_mean_k2, seq_mean_k3, seq_max_k2, seq_max_k3"
            ],
        ),
        (
            GRPO + "  kl: {place: reward, controller: adaptive, horizon: 204}\n" + PARTS,
            [
                "r.yaml:7: algorithm.kl.horizon (204) is too short: one step of 1024 responses could take "
                "the coefficient to 0 or below: set more than 204"
            ],
        ),
        (
            GRPO + "  kl:\n    controller: adaptive\n" + PARTS,
            [
                "r.yaml:8: algorithm.kl: controller: adaptive needs place: reward: set it, or use "
                "controller: fixed"
            ],
        ),
    ],
)
def test_what_is_wrong_is_said_at_its_line(text: str, expected: list[str]) -> None:
    assert lines(text) == expected


@pytest.mark.parametrize(
    ("overrides", "last"),
    [
        (
            ["algorithm.name=rlo"],
            f"override 'algorithm.name=rlo': 'algorithm.name' is the text 'rlo'; {UNKNOWN_NAME}; "
            "did you mean 'rloo'?",
        ),
        (
            ["algorithm.critic.lr=1"],
            "override 'algorithm.critic.lr=1': unknown key 'algorithm.critic'; "
            "it belongs to ppo, not to grpo: remove it",
        ),
        (
            ["reward.gsm8k="],
            "override 'reward.gsm8k=': nothing after '='; write 'reward.gsm8k={}' for all defaults",
        ),
        (
            ["algorithm.loss.name=clp"],
            "override 'algorithm.loss.name=clp': 'algorithm.loss.name' is the text 'clp'; "
            "expected one of 'clip', 'gspo', 'cispo', 'reinforce', 'gmpo', 'sapo', 'dppo-tv', "
            "'dppo-kl'; did you mean 'clip'?",
        ),
        (["reward=null"], NEEDS_REWARD.replace("r.yaml", "override 'reward=null'")),
        (
            ["algorithm.name=sft"],
            "r.yaml:9: 'reward' cannot be used with sft, which scores no responses; remove it",
        ),
    ],
)
def test_what_is_wrong_with_an_override(overrides: list[str], last: str) -> None:
    assert lines(GRPO + PARTS, *overrides)[-1] == last


CONVENTIONS = {
    "grpo": ["verl", "openrlhf", "trl"],
    "rloo": ["verl", "openrlhf", "trl"],
    "reinforce++": ["verl", "openrlhf"],
    "reinforce++-baseline": ["verl", "openrlhf"],
    "remax": ["verl"],
    "ppo": ["verl", "openrlhf"],
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_convention_is_that_of_a_framework_which_has_the_algorithm(name: str) -> None:
    text = f"{HEAD}algorithm:\n  name: {name}\n{PARTS}"
    for convention in ("verl", "openrlhf", "trl"):
        override = f"algorithm.convention={convention}"
        if convention in CONVENTIONS[name]:
            parse_recipe(text, "r.yaml", [override])
            continue
        assert lines(text, override) == [
            f"override '{override}': algorithm: convention ({convention}) names a framework "
            f"that does not have {name}: write {' or '.join(CONVENTIONS[name])}"
        ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.placement=separate", "rollout.engines=2"],
        ["device.ranks=4", "rollout.engines=2", "rollout.tensor_parallel=2"],
        ["rollout.engines=2", "rollout.replay=runs/recorded"],
        ["algorithm.rollout_correction={level: sequence}", "rollout.top_k=0"],
        ["algorithm.rollout_correction={level: token, upper: 0.5}", "rollout.top_k=20"],
        ["algorithm.rollout_correction={level: token, mode: mask, upper: 1.0, lower: 0.5}"],
        ["algorithm.kl={place: reward, controller: adaptive, horizon: 205}"],
        ["cluster.address=local"],
        ["cluster.address=head.example:6379"],
    ],
)
def test_what_a_run_can_have(overrides: list[str]) -> None:
    parse_recipe(GRPO + PARTS, "r.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "estimator", "dual_clip"),
    [
        ([], "k3", 3.0),
        (["algorithm.kl.place=loss", "algorithm.convention=openrlhf"], "k3", None),
        (["algorithm.kl.place=reward", "algorithm.convention=trl"], "k1", None),
        (["algorithm.kl={place: reward, estimator: k3}"], "k3", 3.0),
        (["algorithm.convention=trl", "algorithm.loss.dual_clip=3"], "k3", 3.0),
        (["algorithm.loss.dual_clip=null"], "k3", None),
    ],
)
def test_defaults_that_another_choice_decides(
    overrides: list[str], estimator: str, dual_clip: float | None
) -> None:
    algorithm = resolved(parse_recipe(GRPO + PARTS, "r.yaml", overrides))["algorithm"]
    assert (algorithm["kl"]["estimator"], algorithm["loss"]["dual_clip"]) == (estimator, dual_clip)


SUPERVISED = {"lr": 1e-5, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_ratio": 0.1}
ONLINE = {"lr": 1e-6, "betas": [0.9, 0.999], "schedule": "constant", "warmup_ratio": 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_has_the_defaults_of_the_algorithm(name: str) -> None:
    def optimizer(found: Recipe) -> dict[str, object]:
        return {key: value for key, value in resolved(found)["optimizer"].items() if key in ONLINE}

    assert optimizer(recipe(name)) == (SUPERVISED if name in OFFLINE else ONLINE)
    text = f"{HEAD}algorithm: {{name: {name}}}\n{'' if name in OFFLINE else PARTS}"
    written = (
        f"optimizer: {{lr: {SUPERVISED['lr']}, betas: [0.9, 0.95], schedule: cosine, warmup_ratio: 0.1}}"
    )
    assert optimizer(parse_recipe(text + written, "r.yaml")) == SUPERVISED
    # Without sections in between, as workers read it: nothing is shared with the next recipe.
    plain = {"name": "a", "output": "b", "model": {"path": "c"}, "data": {"train": "d"}}
    Recipe.model_validate(
        {**plain, "algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": {"math": {}}}
    )
    assert optimizer(Recipe.model_validate({**plain, "algorithm": {"name": "sft"}})) == SUPERVISED


def test_difference_names_sections_that_came_or_went_once() -> None:
    before = recipe("grpo")
    after = parse_recipe(
        GRPO + PARTS, "r.yaml", ["reward.gsm8k=null", "reward.math={}", "rollout.n=8", "algorithm.name=rloo"]
    )
    assert difference(before, after) == [
        "algorithm.name: grpo -> rloo",
        "algorithm.scale_by_std: true -> (absent)",
        "rollout.n: 4 -> 8",
        'reward.gsm8k: {"method": "strict", "format_score": 0.0, "weight": 1.0} -> null',
        'reward.math: null -> {"processes": null, "weight": 1.0}',
    ]


def test_temperatures_that_an_engine_would_raise() -> None:
    (said,) = lines(GRPO + PARTS, "rollout.temperature=0.005")
    assert said.endswith("'rollout.temperature' is 0.005; expected a number, at least 0.01")
    (said,) = lines(GRPO + PARTS, "rollout.validation.temperature=0.005")
    assert "between 0 and 0.01" in said and "write 0 for greedy responses" in said
    for temperature in ("0", "0.01"):
        parse_recipe(GRPO + PARTS, "r.yaml", [f"rollout.validation.temperature={temperature}"])
