"""The share of a model's responses to GSM8K test questions in the trained form `#### number`. Higher is
better.

`ratio` is that share; a response that goes round in circles until the token limit, as greedy responses of a
small model do, does not count. `correct` counts those whose number is right as well.

    python benchmarks/gsm8k_format.py --model DIR [--engine transformers|vllm] [--count 16]
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import bench

Chat = list[dict[str, str]]


def with_transformers(model_path: str, chats: Sequence[Chat], tokens: int) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)  # its results depend on its arguments
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="bfloat16").eval()
    responses = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
        responses.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return responses


def with_vllm(model_path: str, chats: Sequence[Chat], tokens: int) -> list[str]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams

    engine: Any = LLM(model_path, dtype="bfloat16", max_model_len=1024, enforce_eager=True)
    outputs = engine.chat(list(chats), SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    with (bench.gsm8k() / "test.jsonl").open() as file:
        rows = [json.loads(next(file)) for _ in range(options.count)]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    response = {"transformers": with_transformers, "vllm": with_vllm}[options.engine]
    responses = response(options.model, chats, options.tokens)
    for row, text in zip(rows[:2], responses, strict=False):
        print(f"Q: {row['question']}\nA: {text}\n")
    found = [re.search(r"#### (-?[0-9.,]+)\s*$", text.strip()) for text in responses]
    truths = [row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows]
    formatted = sum(match is not None for match in found) / len(rows)
    correct = sum(
        match is not None and match.group(1).replace(",", "").rstrip(".") == truth
        for match, truth in zip(found, truths, strict=True)
    )
    bench.report(
        f"responses {options.engine}",
        formatted,
        goal=0.5,
        met=formatted >= 0.5,
        correct=correct,
        count=len(rows),
    )


if __name__ == "__main__":
    main()
