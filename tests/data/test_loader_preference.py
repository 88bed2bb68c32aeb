from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from encoders import Encoding

from isotrain.data.items import ITEMS, Item, Sample
from isotrain.data.loader import BatchLoader, Sampler, donors
from isotrain.data.rows import Row
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import build_store
from isotrain.errors import DataError


def make_store(directory: Path, pairs: bool, prompts: Sequence[int] = range(7)) -> SampleStore[Item]:
    """Prompts of as many tokens and one more; responses say which item and side they belong to."""

    def items(row: Row) -> list[Item]:
        number = row.values["number"]
        prompt = [1] * (prompts[number] + 1)
        responses = [[100 + number] * (2 + number % 3), [200 + number] * 3][: 2 if pairs else 1]
        samples = tuple(
            Sample(
                np.array(prompt + response, np.int32),
                np.arange(len(prompt) + len(response)) >= len(prompt),
            )
            for response in responses
        )
        return [Item(samples, np.array([] if pairs else [number % 2], np.float32))]

    rows = [Row({"number": number}, str(number)) for number in range(len(prompts))]
    return build_store(rows, Encoding(ITEMS, items), directory / "store", "key")


def loader(store: SampleStore[Item], rank: int = 0, ranks: int = 1, **options: object) -> BatchLoader:
    sampler = Sampler(len(store), 5, 0, shuffle=True, limit=None)
    return BatchLoader(store, sampler, 24, rank, ranks, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("share", [True, False])
def test_ranks_share_out_a_step(tmp_path: Path, ranks: int, share: bool) -> None:
    store = make_store(tmp_path, pairs=True)
    steps = [loader(store, rank, ranks, share_prompts=share).next_step() for rank in range(ranks)]
    assert len({len(step.batches) for step in steps}) == 1, "equally many micro-batches"
    numbers = sorted(number for step in steps for batch in step.batches for number in batch.numbers)
    assert numbers == sorted(int(row) for row in Sampler(7, 5, 0, True, None).next_batch())
    for step in steps:
        assert step.items == 5 and step.tokens == sum(step.lengths) and len(step.lengths) == 10
        for batch in step.batches:
            assert len(batch.packed.tokens_T) <= 24
            assert batch.packed.loss_tokens == sum(batch.lengths)
            targets = batch.packed.targets_N.split(batch.lengths) if batch.lengths else ()
            told = [(int(part[0]) // 100, int(part[0]) % 100) for part in targets]
            assert told == [(side, number) for number in batch.numbers for side in (1, 2)]


def test_a_shared_prompt_is_stored_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, pairs=True)
    plain, shared = (loader(store, share_prompts=share).next_step() for share in (False, True))

    def stored(step: object) -> int:
        return sum(len(batch.packed.tokens_T) for batch in step.batches)  # type: ignore[attr-defined]

    prompts = sum(number + 1 for batch in plain.batches for number in batch.numbers)
    assert stored(plain) - stored(shared) == prompts and plain.tokens == shared.tokens


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([0, 0, 1, 1, 2, 2, 3, 3], id="chosen and rejected"),
        pytest.param([0, 1, 2, 3, 4], id="one response each"),
        pytest.param([0, 0, 0, 0, 1, 1, 1, 2, 2, 2], id="several in a row"),
        pytest.param([0, 1, 2, 0, 1, 2, 0, 0, 3], id="far apart"),
        pytest.param([0, 1, 0, 0, 0, 0, 0, 0, 0, 0], id="one prompt has almost all"),
        pytest.param([1, 0, 0, 0], id="at the end"),
    ],
)
def test_a_mismatched_response_is_to_another_prompt(tmp_path: Path, prompts: list[int]) -> None:
    store = make_store(tmp_path, pairs=False, prompts=prompts)
    given: dict[int, dict[int, int]] = {}
    for ranks in (1, 2):
        for rank in range(ranks):
            own = loader(store, rank, ranks, longest=24)
            for step in (own.next_step() for _ in range(8)):
                for batch in step.mismatched:
                    targets = batch.packed.targets_N.split(batch.lengths) if batch.lengths else ()
                    for number, part in zip(batch.numbers, targets, strict=True):
                        (response,) = set(part.tolist())
                        given.setdefault(ranks, {})[number] = response - 100
    assert given[1] == given[2] and sorted(given[1]) == list(range(len(prompts)))
    for number, donor in given[1].items():
        assert prompts[number] != prompts[donor]


def test_mismatched_responses_are_used_evenly() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 400)
    found = donors(ids)
    assert np.all(ids[found] != ids)
    assert np.bincount(found, minlength=400).max() <= 4
    assert sorted(donors(np.repeat(np.arange(9), 3))) == list(range(27)), "each once"


def test_one_prompt_has_no_mismatched_response(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 3 responses belong to one prompt.*add rows of a second prompt"):
        loader(make_store(tmp_path, pairs=False, prompts=[4, 4, 4]), longest=24)


def test_a_mismatched_sample_is_as_long_as_allowed(tmp_path: Path) -> None:
    store = make_store(tmp_path, pairs=False)
    step = loader(store, longest=6).next_step()
    assert step.labels == 5
    assert sorted(n for b in step.mismatched for n in b.numbers) == sorted(
        n for b in step.batches for n in b.numbers
    )
    ends = [[0, *(batch.packed.last_S + 1).tolist()] for batch in step.mismatched]
    assert max(length for own in ends for length in np.diff(own)) == 6


def test_one_pass_sees_every_item_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, pairs=True)
    once = BatchLoader(store, Sampler(7, 5, 0, shuffle=False, limit=7), 24, 0, 1)
    for _ in range(2):
        seen = [n for step in once.one_pass() for batch in step.batches for n in batch.numbers]
        assert sorted(seen) == list(range(7))
