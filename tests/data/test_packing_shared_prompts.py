from __future__ import annotations

import numpy as np
import pytest
import torch

from isotrain.data.items import Sample
from isotrain.data.packing import PackedBatch, pack, pack_shared


def sample(prompt: list[int], response: list[int]) -> Sample:
    tokens_T = np.array(prompt + response, np.int32)
    return Sample(tokens_T, np.arange(len(tokens_T)) >= len(prompt))


def samples_of(batch: PackedBatch) -> list[list[tuple[int, int]]]:
    """Every sample as tokens with their positions: each segment behind the one that it continues."""
    parts = [
        list(zip(tokens.tolist(), positions.tolist(), strict=True))
        for tokens, positions in zip(
            batch.tokens_T.split(batch.lengths), batch.positions_T.split(batch.lengths), strict=True
        )
    ]
    continues = batch.continues or (-1,) * len(parts)
    trunks = set(continues)
    return [
        (parts[trunk] if trunk >= 0 else []) + part
        for number, (part, trunk) in enumerate(zip(parts, continues, strict=True))
        if number not in trunks
    ]


def test_by_hand() -> None:
    samples = [sample([1, 2], [3, 4]), sample([5], [6]), sample([1, 2], [7]), sample([1, 2], [])]
    batch = pack_shared(samples, [2, 1, 2, 2])
    assert batch.tokens_T.tolist() == [1, 2, 7, 3, 4, 5, 6]
    assert batch.positions_T.tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert batch.lengths == (2, 1, 2, 2) and batch.continues == (-1, 0, 0, -1)
    # In the order of the samples: the first tokens of two responses are predicted by the same place.
    assert batch.predict_N.tolist() == [1, 3, 5, 1] and batch.targets_N.tolist() == [3, 4, 6, 7]
    assert batch.last_S.tolist() == [4, 6, 2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_all_samples_are_there(seed: int) -> None:
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 9, draw.integers(1, 6)).tolist() for _ in range(4)]
    chosen = [prompts[i] for i in draw.integers(0, 4, 12)]
    samples = [sample(prompt, draw.integers(0, 9, draw.integers(1, 7)).tolist()) for prompt in chosen]
    shared, plain = pack_shared(samples, [len(prompt) for prompt in chosen]), pack(samples)
    assert sorted(samples_of(shared)) == sorted(samples_of(plain))
    assert torch.equal(shared.targets_N, plain.targets_N)
    for name in ("tokens_T", "positions_T"):
        of_shared, of_plain = getattr(shared, name), getattr(plain, name)
        assert torch.equal(of_shared[shared.predict_N], of_plain[plain.predict_N])
        assert torch.equal(of_shared[shared.last_S], of_plain[plain.last_S])
    assert len(shared.tokens_T) < len(plain.tokens_T)


def test_nothing_to_share_is_a_plain_pack() -> None:
    samples = [sample([1, 2], [3, 4]), sample([1], [2, 3])]
    for given, prompts in ((samples, [2, 1]), ([], [])):
        shared, plain = pack_shared(given, prompts), pack(given)
        assert shared.continues == () and shared.lengths == plain.lengths
        for name in ("tokens_T", "positions_T", "predict_N", "targets_N", "last_S"):
            assert torch.equal(getattr(shared, name), getattr(plain, name))
