from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_templates as styles
import numpy as np
import pytest
import torch

from isotrain.data.chat import closing_tokens
from isotrain.data.encode import PromptEncoder, TooLong
from isotrain.data.items import Item
from isotrain.data.preference import Kind, PreferenceEncoder, separator_tokens
from isotrain.data.rows import Row
from isotrain.data.tokenise import build_store, cached_store
from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError
from isotrain.trainers.online.reward_models import ProcessRewardModel, ResponseRewardModel

PAIR = {"prompt": "What is 12 plus 30?", "chosen": "It is 42.", "rejected": "It is 43 or so."}
STEPS = {
    "prompt": "What is 12 plus 30?",
    "completions": ["12 + 30 = 42", "It is 42."],
    "labels": [True, 0.25],
}
MakeEncoder = Callable[..., PreferenceEncoder]


@pytest.fixture
def make_encoder(make_tokenizer: Callable[..., Any]) -> MakeEncoder:
    def make(
        kind: Kind,
        template: str | None = None,
        max_length: int = 200,
        too_long: TooLong = "error",
        **options: Any,
    ) -> PreferenceEncoder:
        return PreferenceEncoder(make_tokenizer(template), kind, max_length, too_long, **options)

    return make


def one(encoder: PreferenceEncoder, values: dict[str, Any]) -> Item:
    (item,) = encoder(Row(values, "rows.jsonl:7"))
    return item


def text(encoder: PreferenceEncoder, item: Item, number: int, marked: bool) -> str:
    sample = item.samples[number]
    return str(encoder.tokenizer.decode(sample.tokens_T[sample.mask_T == marked]))


@pytest.mark.parametrize("template", [None, styles.CHATML])
def test_both_sides_of_a_pair(make_encoder: MakeEncoder, template: str | None) -> None:
    encoder = make_encoder("pairs", template)
    values = PAIR
    if template:
        values = {**PAIR, "chosen": [{"role": "assistant", "content": PAIR["chosen"]}]}
        values["rejected"] = [{"role": "assistant", "content": PAIR["rejected"]}]
    item = one(encoder, values)
    assert PAIR["chosen"] in text(encoder, item, 0, marked=True)
    assert PAIR["rejected"] in text(encoder, item, 1, marked=True)
    chosen, rejected = item.samples
    prompts = [int(np.argmax(sample.mask_T)) for sample in item.samples]
    assert prompts[0] == prompts[1] > 0, "the boundary between prompt and response is the same"
    assert np.array_equal(chosen.tokens_T[: prompts[0]], rejected.tokens_T[: prompts[1]])
    assert PAIR["prompt"] in text(encoder, item, 0, marked=False)
    assert len(item.values_V) == 0 and len(item) == len(chosen) + len(rejected)
    assert one(encoder, {**values, "margin": 1.5}).values_V.tolist() == [1.5]


def test_margins_are_there_or_the_row_is_refused(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder("pairs", margins=True)
    assert one(encoder, {**PAIR, "margin": 0}).values_V.tolist() == [0.0]
    for values in (PAIR, {**PAIR, "margin": None}):
        with pytest.raises(DataError, match=r"rows.jsonl:7: no 'margin', but algorithm.margins is true"):
            one(encoder, values)


def test_a_pair_of_equal_tokens_is_refused(make_encoder: MakeEncoder) -> None:
    """The gradient of such a pair is 0. Both sides are cut before they differ, or the template trims them."""
    alike = {**PAIR, "chosen": "It is as we said 42.", "rejected": "It is as we said 7."}
    chosen, rejected = (s.tokens_T.tolist() for s in one(make_encoder("pairs"), alike).samples)
    common = next(i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    with pytest.raises(DataError, match=rf"rows.jsonl:7: .* the same {common} tokens.*data.max_length"):
        one(make_encoder("pairs", max_length=common, too_long="truncate"), alike)
    trims = styles.CHATML.replace("message.content", "(message.content | trim)")
    assert trims != styles.CHATML
    blank = {**PAIR, "rejected": PAIR["chosen"] + " "}
    with pytest.raises(DataError, match=r"the same .* tokens"):
        one(make_encoder("pairs", trims, scored=True), blank)
    assert make_encoder("pairs", trims, too_long="drop", scored=True)(Row(blank, "x")) == []


def test_responses(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder("responses")
    item = one(encoder, {"prompt": "1 + 1?", "completion": "2", "label": True})
    assert item.values_V.tolist() == [1.0] and len(item.samples) == 1
    good, bad = encoder(Row(PAIR, "rows.jsonl:7"))
    assert (good.values_V.tolist(), bad.values_V.tolist()) == ([1.0], [0.0])


@pytest.mark.parametrize("template", [None, styles.CHATML])
def test_marks_at_the_ends_of_steps(make_encoder: MakeEncoder, template: str | None) -> None:
    encoder = make_encoder("steps", template)
    asked = [{"role": "user", "content": STEPS["prompt"]}] if template else STEPS["prompt"]
    item = one(encoder, {**STEPS, "prompt": asked})
    begin = encoder.tokenizer.decode(item.samples[0].tokens_T)
    assert begin.startswith(f"{STEPS['prompt']}12" if template is None else "<|im_start|>system")
    (sample,) = item.samples
    assert item.values_V.tolist() == [1.0, 0.25] and sample.mask_T.sum() == 2 and sample.mask_T[-1]
    ends = np.flatnonzero(sample.mask_T) + 1
    assert encoder.tokenizer.decode(sample.tokens_T[: ends[0]]).endswith("12 + 30 = 42\n")
    assert encoder.tokenizer.decode(sample.tokens_T[ends[0] : ends[1]]) == "It is 42.\n"


@pytest.mark.parametrize("template", [None, styles.CHATML])
@pytest.mark.parametrize("in_messages", [False, True])
def test_reward_models_score_the_tokens_that_they_learn_from(
    make_encoder: MakeEncoder, template: str | None, in_messages: bool
) -> None:
    """A policy's response to the same prompt, in an online run, has the ids of the training sample."""
    if in_messages and template is None:
        pytest.skip("conversations need a template")
    asked = [{"role": "user", "content": PAIR["prompt"]}] if in_messages else PAIR["prompt"]
    steps, pairs = make_encoder("steps", template), make_encoder("pairs", template, scored=True)
    (prompt,) = PromptEncoder(steps.tokenizer, "prompt", 200, "error").values(Row({"prompt": asked}, "x"))

    def written(text: str) -> Trajectory:
        response_N = [*steps.tokenizer(text, add_special_tokens=False)["input_ids"], end]
        return Trajectory(
            row=0,
            prompt_index=0,
            sample=0,
            seed=0,
            prompt_length=len(prompt.tokens_P),
            tokens_T=np.concatenate([prompt.tokens_P, np.array(response_N, np.int32)]),
            mask_N=np.ones(len(response_N), np.bool_),
            logp_N=np.zeros(len(response_N), np.float32),
            version_N=np.zeros(len(response_N), np.int32),
            finished=True,
        )

    closing = closing_tokens(steps.tokenizer)
    end = closing[0]
    nothing: Any = None
    process = ProcessRewardModel(
        nothing, 200, nothing, steps.tokenizer, "\n", separator_tokens(steps.tokenizer, "\n", "x"), torch.min
    )
    (learnt,) = one(steps, {**STEPS, "prompt": asked}).samples
    scored, count = process._sample(written("\n".join(STEPS["completions"])))
    assert scored.tokens_T.tolist() == learnt.tokens_T.tolist() and count == 2
    assert scored.mask_T.tolist() == learnt.mask_T.tolist()

    said = [{"role": "assistant", "content": PAIR[side]} for side in ("chosen", "rejected")]
    sides = {"chosen": said[:1], "rejected": said[1:]} if in_messages else {}
    learnt, _ = one(pairs, {**PAIR, "prompt": asked, **sides}).samples
    scored = ResponseRewardModel(nothing, 200, closing, [end])._sample(written(PAIR["chosen"]))
    assert scored.tokens_T.tolist() == learnt.tokens_T.tolist()


def test_tools_of_a_prompt_are_read(make_encoder: MakeEncoder) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
    asked = [{"role": "user", "content": STEPS["prompt"]}]
    encoder = make_encoder("steps", "{{ tools }}" + styles.CHATML)
    with_tools = one(encoder, {**STEPS, "prompt": asked, "tools": tools})
    assert "adds" in encoder.tokenizer.decode(with_tools.samples[0].tokens_T)


def test_too_long(make_encoder: MakeEncoder) -> None:
    whole = one(make_encoder("steps"), STEPS)
    assert make_encoder("pairs", max_length=8, too_long="drop")(Row(PAIR, "x")) == []
    assert make_encoder("steps", max_length=8, too_long="drop")(Row(STEPS, "x")) == []
    with pytest.raises(DataError, match=r"rows.jsonl:7 \(chosen\): .* tokens, but data.max_length is 8"):
        one(make_encoder("pairs", max_length=8), PAIR)
    with pytest.raises(DataError, match=r"rows.jsonl:7: .* tokens, but data.max_length is"):
        one(make_encoder("steps", max_length=len(whole) - 1), STEPS)
    cut = one(make_encoder("steps", max_length=len(whole) - 1, too_long="truncate"), STEPS)
    assert cut.values_V.tolist() == [1.0] and cut.samples[0].mask_T[-1], "up to the last whole step"


def test_a_separator_needs_a_token(make_encoder: MakeEncoder) -> None:
    with pytest.raises(DataError, match="step_separator"):
        make_encoder("steps", step_separator="")


def test_store(make_encoder: MakeEncoder, tmp_path: Path) -> None:
    encoder = make_encoder("pairs", max_length=60, too_long="drop")
    rows = [Row(PAIR, "a"), Row({**PAIR, "prompt": "long " * 90}, "b"), Row({**PAIR, "margin": 2.0}, "c")]
    store = build_store(rows, encoder, tmp_path / "store", "key")
    assert (len(store), store.meta["dropped"], store.meta["samples"]) == (2, 1, 4)
    for number, values in enumerate([PAIR, {**PAIR, "margin": 2.0}]):
        expected, found = one(encoder, values), store[number]
        assert found.values_V.tolist() == expected.values_V.tolist()
        assert len(found) == store.lengths[number] == len(expected)
        for a, b in zip(found.samples, expected.samples, strict=True):
            assert np.array_equal(a.tokens_T, b.tokens_T) and np.array_equal(a.mask_T, b.mask_T)


def test_the_cache_knows_what_items_depend_on(make_encoder: MakeEncoder, tmp_path: Path) -> None:
    import json

    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(PAIR) + "\n")

    def digest(**options: Any) -> tuple[str, str]:
        store = cached_store(str(file), make_encoder(**options), tmp_path / "cache")
        return store.directory.name, store.digest

    first = digest(kind="pairs")
    assert digest(kind="pairs") == first
    assert digest(kind="responses")[0] != first[0] and digest(kind="pairs", max_length=100)[0] != first[0]
    file.write_text(json.dumps({**PAIR, "chosen": "42"}) + "\n")
    assert digest(kind="pairs")[1] != first[1]
