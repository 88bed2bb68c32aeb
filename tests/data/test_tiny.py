from __future__ import annotations

import hashlib
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotrain.data.encode import Encoder, PromptEncoder
from isotrain.data.prepare.tiny import Architecture, make_tiny
from isotrain.data.rows import read_rows
from isotrain.data.tokenise import cached_store


def sums(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny(tmp_path / name, seed=seed, train_rows=20, validation_rows=5)
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's random numbers are its own"
    a, b, c = (sums(tmp_path / name) for name in "abc")
    assert a == b
    for name in ("train.jsonl", "validation.jsonl", "prompts.jsonl", "model/model.safetensors"):
        assert a[name] != c[name]
    assert a["train.jsonl"] != a["validation.jsonl"]
    assert a["prompts.jsonl"] != a["prompts-validation.jsonl"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_model_and_tokenizer_fit(tmp_path: Path, architecture: Architecture, tied: bool) -> None:
    make_tiny(tmp_path, train_rows=5, validation_rows=1, architecture=architecture, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.model_type == architecture
    assert model.config.vocab_size == 512 >= len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_rows_are_right_and_of_many_lengths(tmp_path: Path) -> None:
    make_tiny(tmp_path, train_rows=100, validation_rows=10)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encode = Encoder(tokenizer, "auto", "prompt", "completion", 256, "error")
    rows = list(read_rows(str(tmp_path / "train.jsonl")))
    assert len(rows) == 100
    lengths = set()
    for row in rows:
        sample = encode(row)
        assert sample is not None
        lengths.add(len(sample))
        answers = [m["content"] for m in row.values["messages"] if m["role"] == "assistant"]
        assert tokenizer.decode(sample.tokens_T[sample.mask_T]) == "".join(f"{a}<|im_end|>" for a in answers)
        for answer in answers:
            left, right = answer.split(" = ")
            a, operation, b = left.split()
            assert int(right) == (int(a) + int(b) if operation == "+" else int(a) - int(b))
    assert len(lengths) > 20


def test_the_task_for_rewards(tmp_path: Path) -> None:
    make_tiny(tmp_path, train_rows=200, validation_rows=20)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encoder = PromptEncoder(tokenizer, "prompt", 64, "error")
    store = cached_store(str(tmp_path / "prompts.jsonl"), encoder, tmp_path / "cache")
    assert len(store) == 200
    for number in range(len(store)):
        text, answer = tokenizer.decode(store[number].tokens_P), store[number].row["answer"]
        assert answer in text and text.endswith("<|im_start|>assistant\n")
    answers = [store[number].row["answer"] for number in range(len(store))]
    assert 70 < answers.count("digits") < 130 and set(answers) == {"digits", "capitals"}


def test_the_reward(tmp_path: Path) -> None:
    make_tiny(tmp_path, train_rows=5, validation_rows=1, layers=1)
    score = runpy.run_path(str(tmp_path / "reward.py"))["score"]
    assert score("123", "digits") == 1 and score("AB1x", "digits") == 0.25
    assert score("AB1x", "capitals") == 0.5 and score("123", "capitals") == 0
    assert score("", "digits") == 0
    assert score("\u0663\u00c4", "digits") == score("\u0663\u00c4", "capitals") == 0, "ASCII only"
