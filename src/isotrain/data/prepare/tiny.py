"""A model, its tokenizer and toy tasks, made on the spot for first runs and tests."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from isotrain.data.prepare import tiny_environment, tiny_reward
from isotrain.data.prepare.tiny_reward import KINDS

Architecture = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]

# The last two: eight experts, two for each token. DeepSeek's first layer is dense, as published.
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        # Published with these; transformers takes them for granted, vLLM reads them.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        # As published, and the only sizes that vLLM's latent attention on CPUs takes.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ChatML without generation markers: what most published models have.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SYSTEM = ("You are a careful calculator.", "Answer in one short line.")
_QUESTIONS = ("What is {}?", "How much is {}?", "Please work out {}.", "{} = ?", "Tell me the result of {}.")
_REQUESTS = ("{} wants {}.", "For {}: write {}.", "{} asks for {}, please.", "Dear {}, only {}!")
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
_FOLLOW_UPS = ("And {}?", "Now {}.", "What about {}?")


def make_tiny(
    out: Path,
    *,
    seed: int = 0,
    train_rows: int = 2000,
    validation_rows: int = 200,
    architecture: Architecture = "llama",
    layers: int = 2,
    hidden: int = 64,
    # Heads of 32: the smallest that vLLM's attention on CPUs takes.
    heads: int = 2,
    kv_heads: int = 1,
    vocab: int = 512,
    tie_word_embeddings: bool = True,
) -> None:
    """Write a model and two tasks for it; the same arguments give the same bytes.

    `train.jsonl` and `validation.jsonl` are for supervised training, `prompts.jsonl` with `reward.py` and
    `questions.jsonl` with `environment.py` for reinforcement learning; `pairs.jsonl`, `responses.jsonl` and
    `steps.jsonl` are preference data for the prompts. Each has a `-validation` one beside it.
    """
    out.mkdir(parents=True, exist_ok=True)
    for rows, own_seed, suffix in (
        (train_rows, 2 * seed + 1, ""),
        (validation_rows, 2 * seed + 2, "-validation"),
    ):
        supervised = "train" if not suffix else "validation"
        _write_rows(out / f"{supervised}.jsonl", toy_rows(rows, seed=own_seed))
        prompts = list(toy_prompts(rows, seed=own_seed))
        _write_rows(out / f"prompts{suffix}.jsonl", prompts)
        _write_rows(out / f"questions{suffix}.jsonl", map(_without_the_answer, prompts))
        for kind, items in toy_preferences(prompts, own_seed).items():
            _write_rows(out / f"{kind}{suffix}.jsonl", items)
    (out / "reward.py").write_bytes(Path(tiny_reward.__file__).read_bytes())
    (out / "environment.py").write_bytes(Path(tiny_environment.__file__).read_bytes())
    size = make_tokenizer(out / "model", vocab=vocab, seed=seed)
    make_model(
        out / "model",
        seed=seed,
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=max(vocab, size),
        tie_word_embeddings=tie_word_embeddings,
    )


def toy_rows(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Conversations of one to four sums: short enough to learn in a minute, of many lengths."""
    draw = random.Random(seed)
    for _ in range(count):
        messages = []
        if draw.random() < 0.25:
            messages.append({"role": "system", "content": draw.choice(_SYSTEM)})
        for turn in range(draw.choice((1, 1, 1, 2, 3, 4))):
            sum_, result = _sum(draw)
            phrases = _FOLLOW_UPS if turn else _QUESTIONS
            messages.append({"role": "user", "content": draw.choice(phrases).format(sum_)})
            messages.append({"role": "assistant", "content": f"{sum_} = {result}"})
        yield {"messages": messages}


def toy_prompts(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Requests for digits or for capital letters, and which of them.

    A random model earns a little by chance and learns the rest from rewards alone. It must read the prompt
    for that: responses that are scored against other prompts' rows stay near one half.
    """
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.choice(tuple(tiny_reward.KINDS))
        request = draw.choice(_REQUESTS).format(draw.choice(_NAMES), kind)
        yield {"prompt": [{"role": "user", "content": request}], "answer": kind}


def _write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


def _sum(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    if draw.random() < 0.5:
        return f"{a} + {b}", a + b
    return f"{a + b} - {a}", b


def make_tokenizer(
    out: Path,
    *,
    vocab: int = 512,
    seed: int = 0,
    special: Sequence[str] = (PAD, START, END),
    template: str = CHAT_TEMPLATE,
) -> int:
    """A byte-level BPE trained on toy conversations; returns the number of its tokens."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    # Digits one by one, as sums need them; then as GPT-2 splits.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (m["role"] + "\n" + m["content"] for row in toy_rows(500, seed=seed) for m in row["messages"])
    backend.train_from_iterator(texts, trainer)
    hf: Any = transformers  # its constructors have no types
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in special if token not in (END, PAD)],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out)
    return len(tokenizer)


def make_model(
    out: Path,
    *,
    seed: int,
    architecture: Architecture,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tie_word_embeddings: bool,
) -> None:
    """Random weights in float32, as a Hugging Face directory."""
    import transformers

    mixture = _EXPERTS.get(architecture, {})
    if mixture:
        # Two experts do the work of the dense layer.
        mixture = {"moe_intermediate_size": hidden * 3 // 2, **mixture}
    if architecture == "deepseek_v3":
        # Its keys are expanded to all heads; published ones are not tied, and vLLM ties none.
        kv_heads, tie_word_embeddings = heads, False
    config = transformers.AutoConfig.for_model(
        architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        # DeepSeek rotates a part of each head only.
        head_dim=mixture.get("qk_rope_head_dim", hidden // heads),
        max_position_embeddings=2048,
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        # Wider than the usual 0.02, which is made for wider models: this one learns in far fewer steps.
        initializer_range=0.08,
        **mixture,
    )
    save_random_weights(config, "AutoModelForCausalLM", out, seed)


def save_random_weights(config: Any, auto_class: str, out: Path, seed: int) -> None:
    import torch
    import transformers

    hf: Any = transformers  # its constructors have no types
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, auto_class).from_config(config, dtype=torch.float32)
    model.generation_config = hf.GenerationConfig(pad_token_id=0, eos_token_id=2)
    shown = hf.logging.is_progress_bar_enabled()
    hf.logging.disable_progress_bar()  # one shard needs none
    try:
        model.save_pretrained(out)
    finally:
        if shown:
            hf.logging.enable_progress_bar()


def _without_the_answer(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt that does not say what is wanted: an environment does."""
    said = [
        {**message, "content": message["content"].replace(row["answer"], "something")}
        for message in row["prompt"]
    ]
    return {**row, "prompt": said}


Rows = list[dict[str, Any]]


def toy_preferences(prompts: Rows, seed: int) -> dict[str, Rows]:
    """`pairs`, `responses` and `steps`, one row of each for every prompt."""
    draw = random.Random(seed)
    rows: dict[str, Rows] = {"pairs": [], "responses": [], "steps": []}
    for asked in prompts:
        prompt, right = asked["prompt"], asked["answer"]
        good, bad = _text(KINDS[right], draw, 4), _wrong_text(right, draw)
        rows["pairs"].append({"prompt": prompt, "chosen": _assistant(good), "rejected": _assistant(bad)})
        label = draw.random() < 0.5
        rows["responses"].append(
            {"prompt": prompt, "completion": _assistant(good if label else bad), "label": label}
        )
        labels = [draw.random() < 0.6 for _ in range(draw.randint(1, 3))]
        steps = [_text(KINDS[right], draw, 4) if label else _wrong_text(right, draw) for label in labels]
        rows["steps"].append({"prompt": prompt, "completions": steps, "labels": labels})
    return rows


def _text(characters: str, draw: random.Random, longest: int) -> str:
    return " ".join(draw.choice(characters) for _ in range(draw.randint(1, longest)))


def _wrong_text(right: str, draw: random.Random) -> str:
    """The other kind, or anything: otherwise any odd response would fool a reward model."""
    (wrong,) = set(KINDS) - {right}
    if draw.random() < 0.5:
        return _text(KINDS[wrong], draw, 4)
    text = _text(string.ascii_letters + string.digits + string.punctuation, draw, 8)
    return text.replace(" ", draw.choice((" ", "")))


def _assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
