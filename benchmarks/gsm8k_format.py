"""The share of a model's responses to GSM8K test questions in the trained form `#### number`. Higher is
better.

`ratio` is that share; a response that goes round in circles until the token limit, as greedy responses of a
small model do, does not count. `correct` counts those whose number is right as well.

    python benchmarks/gsm8k_format.py --model DIR [--engine transformers|vllm] [--count 16]
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import bench
from smollm2 import smollm2

Chat = list[dict[str, str]]


def with_transformers(model_path: str, chats: Sequence[Chat], tokens: int) -> Iterator[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)  # its results depend on its arguments
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=bench.DTYPE).eval()
    for chat in chats:
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
        yield str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def with_vllm(model_path: str, chats: Sequence[Chat], tokens: int) -> Iterator[str]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams

    engine: Any = LLM(model_path, dtype=bench.DTYPE, max_model_len=1024, enforce_eager=True)
    outputs = engine.chat(list(chats), SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
    yield from (output.outputs[0].text for output in outputs)


def tell(engine: str, rows: Sequence[dict[str, str]], responses: Sequence[str]) -> None:
    found = [re.search(r"#### (-?[0-9.,]+)\s*$", text.strip()) for text in responses]
    truths = [row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows]
    formatted = sum(match is not None for match in found) / len(rows)
    correct = sum(
        match is not None and match.group(1).replace(",", "").rstrip(".") == truth
        for match, truth in zip(found, truths, strict=True)
    )
    bench.report(
        f"responses {engine}", formatted, goal=0.5, met=formatted >= 0.5, correct=correct, count=len(rows)
    )


def main() -> None:
    parser = bench.Options(__doc__, count=4, tokens=32)
    parser.add_argument("--model", required=not bench.QUICK, help="quick: SmolLM2-135M-Instruct")
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.read()
    with (bench.gsm8k() / "test.jsonl").open() as file:
        rows = [json.loads(next(file)) for _ in range(options.count)]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    response = {"transformers": with_transformers, "vllm": with_vllm}[options.engine]
    responses: list[str] = []
    for text in response(options.model or str(smollm2()), chats, options.tokens):
        responses.append(text)
        if len(responses) <= 2:
            print(f"Q: {rows[len(responses) - 1]['question']}\nA: {text}\n")
        tell(options.engine, rows[: len(responses)], responses)


if __name__ == "__main__":
    main()
