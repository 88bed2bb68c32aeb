"""Three tiny families of models with random weights, over one tokenizer and one set of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen3-moe", "gemma3")
DATA = "llama"
"""The directory that has the data; every family has the same tokenizer."""


def make_families(work: Path) -> None:
    """Write what is missing below `work`; a family without its marker is made again."""
    from isotrain.data.prepare.tiny import make_model, make_tiny, make_tokenizer

    shape: dict[str, Any] = {"seed": 0, "layers": 2, "hidden": 64, "tie_word_embeddings": True}
    for family in FAMILIES:
        out, done = work / family, work / family / "done"
        if done.exists():
            continue
        if family == DATA:
            make_tiny(out)
        else:
            vocab = max(512, make_tokenizer(out / "model"))
            if family == "qwen3-moe":
                # Two key heads for four query heads: which of them belong together matters.
                make_model(out / "model", architecture="qwen3_moe", heads=4, kv_heads=2, vocab=vocab, **shape)
            else:
                make_gemma(out / "model", vocab)
        done.touch()


def make_gemma(out: Path, vocab: int) -> None:
    """Gemma 3's text model: sliding windows, norms of queries and keys, norms around both blocks.

    The width is no square number: the embedding's scale is its root, which bfloat16 has to round.
    """
    import torch
    import transformers

    hf: Any = transformers  # its constructors have no types
    config = hf.AutoConfig.for_model(
        "gemma3_text",
        vocab_size=vocab,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=2048,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.08,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = hf.GenerationConfig(pad_token_id=0, eos_token_id=2)
    model.save_pretrained(out)
