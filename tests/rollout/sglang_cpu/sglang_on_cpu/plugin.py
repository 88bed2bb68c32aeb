"""Seeds per request on a processor.

SGLang honours seeds in its deterministic mode alone. That mode refuses attention without kernels of its own,
replaces matrix products by Triton's, and turns a seed into noise with a Triton kernel: none of it runs here.
torch's attention and products give a row the same result in any batch of these tests, which check that.
"""

from __future__ import annotations

import sys
from typing import Any

WORD = 0xFFFFFFFF


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """MurmurHash3 of (seed, position, column), as SGLang's kernel has it; unsigned words in 64 bits."""
    import torch

    def mix(hashed: Any, word: Any) -> Any:
        word = (word * 0xCC9E2D51) & WORD
        word = (((word << 15) | (word >> 17)) & WORD) * 0x1B873593 & WORD
        hashed = hashed ^ word
        hashed = ((hashed << 13) | (hashed >> 19)) & WORD
        return (hashed * 5 + 0xE6546B64) & WORD

    seed, positions = seed.to(torch.int64), positions.to(torch.int64)
    row_B = torch.zeros_like(seed)
    for word_B in (seed & WORD, (seed >> 32) & WORD, positions & WORD):
        row_B = mix(row_B, word_B)
    hashed_BV = mix(row_B[:, None], col_indices.to(torch.int64)[None, :] & WORD) ^ 16
    hashed_BV = ((hashed_BV ^ (hashed_BV >> 16)) * 0x85EBCA6B) & WORD
    hashed_BV = ((hashed_BV ^ (hashed_BV >> 13)) * 0xC2B2AE35) & WORD
    return hashed_BV ^ (hashed_BV >> 16)


def register() -> None:
    from sglang.srt import batch_invariant_ops, server_args
    from sglang.srt.utils import torch_memory_saver_adapter as saver

    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
    # The real one preloads a library that needs libcuda; on a processor there is nothing to save.
    saver.TorchMemorySaverAdapter.create = staticmethod(lambda enable: saver._TorchMemorySaverAdapterNoop())
    from sglang.kernels.ops.sampling import murmur_hash

    murmur_hash.murmur_hash32 = murmur_hash32
    if (sampler := sys.modules.get("sglang.srt.layers.sampler")) is not None:
        sampler.murmur_hash32 = murmur_hash32  # type: ignore[attr-defined]
