from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chat_templates as styles
import pytest

from isotrain.data.encode import Encoder
from isotrain.data.rows import Row
from isotrain.errors import DataError


@pytest.fixture
def encoder(make_tokenizer: Callable[..., Any]) -> Callable[..., Encoder]:
    def make(template: str | None = styles.CHATML, **options: Any) -> Encoder:
        tokenizer = make_tokenizer(template, eos="<|im_end|>")
        arguments = {
            "format": "auto",
            "prompt_key": "prompt",
            "completion_key": "completion",
            "max_length": 100,
            "too_long": "error",
        }
        return Encoder(tokenizer, **{**arguments, **options})

    return make


def row(answer: str = "Paris", line: int = 1) -> Row:
    messages = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": answer}]
    return Row({"messages": messages}, f"a.jsonl:{line}")


def test_the_first_row_decides(encoder: Callable[..., Encoder]) -> None:
    encode = encoder()
    sample = encode(row())
    assert sample is not None
    assert encode.tokenizer.decode(sample.tokens_T[sample.mask_T]) == "Paris<|im_end|>"
    with pytest.raises(DataError, match=r"a\.jsonl:2: no 'messages'"):
        encode(Row({"text": "a"}, "a.jsonl:2"))


def test_too_long(encoder: Callable[..., Encoder]) -> None:
    sample = encoder()(row())
    assert sample is not None
    limit = len(sample)
    assert encoder(max_length=limit)(row()) is not None
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {limit} tokens, but data\.max_length is {limit - 1};"):
        encoder(max_length=limit - 1)(row(line=3))
    assert encoder(max_length=limit - 1, too_long="drop")(row()) is None
    cut = encoder(max_length=limit - 1, too_long="truncate")(row())
    assert cut is not None
    assert cut.tokens_T.tolist() == sample.tokens_T.tolist()[:-1]
    assert cut.mask_T.tolist() == sample.mask_T.tolist()[:-1]


def test_nothing_left_to_learn(encoder: Callable[..., Encoder]) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: no token has loss in the first 4 of its \d+;"):
        encoder(max_length=4, too_long="truncate")(row())
    nothing = Row({"text": ""}, "a.jsonl:1")
    with pytest.raises(DataError, match=r"a\.jsonl:1: no token has loss; remove the row"):
        encoder(None)(nothing)
    assert encoder(None, too_long="drop")(nothing) is None


def test_the_first_token_bears_no_loss(encoder: Callable[..., Encoder]) -> None:
    sample = encoder(None)(Row({"text": "The answer is Paris"}, "a.jsonl:1"))
    assert sample is not None
    assert not sample.mask_T[0] and sample.mask_T[1:].all()


def test_template_errors_name_the_row(encoder: Callable[..., Encoder]) -> None:
    with pytest.raises(DataError, match=r"^a\.jsonl:1: the chat template gives no exact mask for message 1"):
        encoder(styles.HOSTILE)(row())


def test_settings_are_all_that_samples_depend_on(encoder: Callable[..., Encoder]) -> None:
    encode = encoder()
    before = encode.settings
    encode(row())
    assert (
        encode.settings
        == before
        == {
            "format": "auto",
            "max_length": 100,
            "too_long": "error",
            "prompt_key": "prompt",
            "completion_key": "completion",
            "has_template": True,
        }
    )
