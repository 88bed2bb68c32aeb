"""Every word of the command that starts a training is accounted for, wherever it stands."""

from __future__ import annotations

import pytest

from isotrain.tools.imports.convert import convert
from isotrain.tools.imports.source import ImportSourceError

pytest.importorskip("tree_sitter_bash")

LAUNCHES = {
    "verl": [
        "python3 -u -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=gsm8k "
        "data.val_files=gsm8k trainer.nnodes=1",
        "uv run --frozen --extra vllm python3 -X faulthandler -m verl.trainer.main_ppo "
        "algorithm.adv_estimator=gae data.train_files=gsm8k data.val_files=gsm8k",
        "torchrun --standalone --nnodes=1 --nproc_per_node 8 -m verl.trainer.sft_trainer "
        "data.train_files=a.parquet optim.lr=1e-5",
    ],
    "openrlhf": [
        "ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray "
        "--actor.model_name_or_path m --reward.model_name_or_path r --data.prompt_dataset a.jsonl "
        "--data.apply_chat_template --rollout.max_new_tokens 512 --algo.advantage.estimator gae",
        "deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo --model.model_name_or_path m "
        "--data.dataset a.jsonl --data.apply_chat_template",
    ],
}
COMMANDS = [(framework, launch) for framework, launches in LAUNCHES.items() for launch in launches]
INSERTED = ("no.such.key=1", "+no.such.key=1", "--no.such.flag", "--no-such-flag=1", "-Z", "no-such-word")


def same(framework: str, script: str) -> bool:
    try:
        result = convert(script.encode(), framework)
    except ImportSourceError:
        return False
    assert sum(result.account.values()) > 0
    return result.same_training


@pytest.mark.parametrize(("framework", "launch"), COMMANDS)
def test_an_unknown_word_at_any_place_is_a_difference(framework: str, launch: str) -> None:
    assert same(framework, launch)
    words = launch.split()
    for place in range(len(words) + 1):
        for word in INSERTED:
            script = " ".join([*words[:place], word, *words[place:]])
            # The value of an option or flag may be any word; the one that stood there is left over.
            assert not same(framework, script), script


@pytest.mark.parametrize("form", ["export {}=1\n{}", "{}=1 {}", "env {}=1 {}"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("VLLM_USE_V1", True),
        ("HYDRA_FULL_ERROR", True),
        ("NCCL_DEBUG", True),
        ("VLLM_ASCEND_ENABLE_NZ", True),
        ("VLLM_BATCH_INVARIANT", False),
        ("VERL_NO_SUCH_SWITCH", False),
        ("SGLANG_NO_SUCH_SWITCH", False),
    ],
)
def test_variables_of_engines_are_accounted_for(form: str, name: str, expected: bool) -> None:
    launch = LAUNCHES["verl"][0]
    assert same("verl", form.format(name, launch)) is expected
