from __future__ import annotations

import datetime
import decimal
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_templates as styles
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from encoders import Encoding

from isotrain.data import tokenise as module
from isotrain.data.encode import PROMPTS, Encoder, Prompt, PromptEncoder, TooLong, json_line
from isotrain.data.formats import value_at
from isotrain.data.prepare.gsm8k import prepare_gsm8k
from isotrain.data.rows import Row, read_rows
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import build_store, cached_store
from isotrain.errors import DataError

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
MakeEncoder = Callable[..., PromptEncoder]


@pytest.fixture
def make_encoder(make_tokenizer: Callable[..., Any]) -> MakeEncoder:
    def make(
        template: str | None = styles.CHATML,
        key: str = "prompt",
        max_length: int = 100,
        too_long: TooLong = "error",
        **tokenizer: Any,
    ) -> PromptEncoder:
        return PromptEncoder(make_tokenizer(template, **tokenizer), key, max_length, too_long)

    return make


def row(**values: Any) -> Row:
    return Row(values, "a:1")


class TestEncoder:
    @pytest.mark.parametrize("template", [styles.CHATML, styles.LLAMA3, styles.GEMMA, styles.QWEN3])
    def test_messages_end_where_the_response_begins(self, make_encoder: MakeEncoder, template: str) -> None:
        encoder = make_encoder(template, bos="<s>")
        expected = encoder.tokenizer.apply_chat_template(
            QUESTION, add_generation_prompt=True, return_dict=False
        )
        prompt_P = encoder(row(prompt=QUESTION))
        assert prompt_P is not None and prompt_P.dtype == np.int32
        assert prompt_P.tolist() == expected

    def test_tools_reach_the_template(self, make_encoder: MakeEncoder) -> None:
        tools = [{"type": "function", "function": {"name": "add_numbers", "parameters": {}}}]
        encoder = make_encoder("{{ tools | tojson }}" + styles.CHATML)
        expected = encoder.tokenizer.apply_chat_template(
            QUESTION, tools=tools, add_generation_prompt=True, return_dict=False
        )
        for given in (tools, json.dumps(tools)):
            prompt_P = encoder(row(prompt=QUESTION, tools=given))
            assert prompt_P is not None and prompt_P.tolist() == expected
        assert "add_numbers" in encoder.tokenizer.decode(expected)

    def test_a_string_is_a_question_where_there_is_a_template(self, make_encoder: MakeEncoder) -> None:
        encoder = make_encoder()
        as_string, as_messages = encoder(row(prompt=QUESTION[0]["content"])), encoder(row(prompt=QUESTION))
        assert as_string is not None and as_messages is not None
        assert as_string.tolist() == as_messages.tolist()

    def test_a_string_is_text_where_there_is_none(self, make_encoder: MakeEncoder) -> None:
        encoder = make_encoder(None, key="extra_info.question")
        prompt_P = encoder(row(extra_info={"question": "The response is"}))
        assert prompt_P is not None
        assert encoder.tokenizer.decode(prompt_P) == "The response is"

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"question": "x"}, "a:1: no 'prompt': the row has 'question'"),
            ({"prompt": []}, "'prompt' must be a list of messages"),
            ({"prompt": 3}, "'prompt' must be a list of messages"),
            ({"prompt": [{"content": "x"}]}, r"prompt\[0\] must be"),
            (
                {"prompt": [*QUESTION, {"role": "assistant", "content": "42"}]},
                "remove the response from the prompt",
            ),
        ],
    )
    def test_prompts_that_do_not_fit(
        self, make_encoder: MakeEncoder, values: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            make_encoder()(row(**values))

    def test_what_a_tokenizer_without_template_refuses(self, make_encoder: MakeEncoder) -> None:
        with pytest.raises(DataError, match="a:1: 'prompt' is a conversation, but the tokenizer has no chat"):
            make_encoder(None)(row(prompt=QUESTION))
        with pytest.raises(DataError, match="a:1: 'prompt' has no token"):
            make_encoder(None)(row(prompt=""))

    def test_a_template_that_refuses(self, make_encoder: MakeEncoder) -> None:
        template = "{{ raise_exception('system first') }}"
        with pytest.raises(DataError, match="a:1: the chat template refuses this prompt: system first"):
            make_encoder(template)(row(prompt=QUESTION))

    def test_too_long(self, make_encoder: MakeEncoder) -> None:
        whole = make_encoder()(row(prompt=QUESTION))
        assert whole is not None
        just = make_encoder(max_length=len(whole))(row(prompt=QUESTION))
        assert just is not None and just.tolist() == whole.tolist()
        message = rf"a:1: .* {len(whole)} tokens, but data.max_length is {len(whole) - 1}.*data.too_long"
        with pytest.raises(DataError, match=message):
            make_encoder(max_length=len(whole) - 1)(row(prompt=QUESTION))
        assert make_encoder(max_length=len(whole) - 1, too_long="drop")(row(prompt=QUESTION)) is None

    @pytest.mark.parametrize("length", [2, 5, 6])
    def test_cut_prompts(self, make_encoder: MakeEncoder, length: int) -> None:
        whole = make_encoder()(row(prompt=QUESTION))
        assert whole is not None and len(whole) > 6
        half = length // 2
        expected = {
            "truncate": [*whole[:length]],
            "truncate-left": [*whole[len(whole) - length :]],
            "truncate-middle": [*whole[:half], *whole[len(whole) - (length - half) :]],
        }
        for too_long, tokens in expected.items():
            kept = make_encoder(max_length=length, too_long=too_long)(row(prompt=QUESTION))
            assert kept is not None and kept.tolist() == tokens and len(tokens) == length
            same = make_encoder(max_length=len(whole), too_long=too_long)(row(prompt=QUESTION))
            assert same is not None and same.tolist() == whole.tolist()


def characters(row: Row) -> Any:
    """Code points for tokens; empty prompts are left out."""
    text = row.values["prompt"]
    return [Prompt(np.array([ord(c) for c in text], np.int32), json_line(row))] if text else []


def store_of(directory: Path, *values: dict[str, Any]) -> SampleStore[Prompt]:
    rows = [Row(v, f"a:{number}") for number, v in enumerate(values, start=1)]
    return build_store(rows, Encoding(PROMPTS, characters), directory, "key")


class TestStore:
    def test_prompts_and_rows_come_back_under_the_same_number(self, tmp_path: Path) -> None:
        kept = [
            {"prompt": "ab", "answer": "é\n\u2028", "n": 1.5, "deep": {"list": [1, None, {"x": True}]}},
            {"prompt": "cde", "answer": 10**30},
        ]
        store = store_of(tmp_path / "s", kept[0], {"prompt": "", "answer": "dropped"}, kept[1])
        assert (len(store), store.meta["rows"], store.meta["dropped"], store.tokens) == (2, 3, 1, 5)
        assert store.lengths.tolist() == [2, 3] and store.lengths.dtype == np.int64
        assert [store[i].tokens_P.tolist() for i in range(2)] == [[97, 98], [99, 100, 101]]
        assert [store[i].row for i in range(2)] == kept
        assert store[0].tokens_P.dtype == np.int32 and store[0].tokens_P.flags.writeable
        for number in (-1, 2):
            with pytest.raises(IndexError):
                store[number]
        again = SampleStore(tmp_path / "s", PROMPTS)
        assert again.digest == store.digest and again[1].row == kept[1]

    def test_the_digest_covers_tokens_and_rows(self, tmp_path: Path) -> None:
        variants = [
            [{"prompt": "ab", "answer": 1}, {"prompt": "c", "answer": 2}],
            [{"prompt": "ab", "answer": 1}, {"prompt": "c", "answer": 3}],
            [{"prompt": "ax", "answer": 1}, {"prompt": "c", "answer": 2}],
            [{"prompt": "c", "answer": 2}, {"prompt": "ab", "answer": 1}],
        ]
        digests = [store_of(tmp_path / str(i), *rows).digest for i, rows in enumerate(variants)]
        assert len(set(digests)) == len(variants)
        assert store_of(tmp_path / "again", *variants[0]).digest == digests[0]
        names = ("tokens.bin", "offsets.bin", "rows.jsonl", "row_offsets.bin")
        sums = [hashlib.sha256((tmp_path / "0" / name).read_bytes()).digest() for name in names]
        assert digests[0] == hashlib.sha256(b"".join(sums)).hexdigest()

    def test_types_of_parquet(self, tmp_path: Path) -> None:
        day = datetime.date(2024, 2, 29)
        moment = datetime.datetime(2024, 2, 29, 12, 30)
        price = decimal.Decimal("1.10")
        columns = {"prompt": ["a"], "day": [day], "moment": [moment], "price": [price]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        (given,) = read_rows(str(tmp_path / "a.parquet"))
        assert store_of(tmp_path / "s", dict(given.values))[0].row == {
            "prompt": "a",
            "day": "2024-02-29",
            "moment": "2024-02-29T12:30:00",
            "price": "1.10",
        }
        with pytest.raises(DataError, match=r"a:1: .*cannot hold 'image', 'parts' .*remove the column"):
            store_of(tmp_path / "t", {"prompt": "a", "image": b"\x89", "ok": 1, "parts": [{"x": b""}]})
        assert not (tmp_path / "t").exists()

    @pytest.mark.parametrize(
        "name", ["tokens.bin", "offsets.bin", "rows.jsonl", "row_offsets.bin", "meta.json"]
    )
    @pytest.mark.parametrize("damage", ["missing", "short", "long", "empty"])
    def test_files_of_a_wrong_size(self, tmp_path: Path, name: str, damage: str) -> None:
        store_of(tmp_path / "s", {"prompt": "ab"}, {"prompt": "c"})
        file = tmp_path / "s" / name
        data = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes({"short": data[:-8], "long": data + b"\0" * 8, "empty": b""}[damage])
        with pytest.raises(DataError, match="delete"):
            SampleStore(tmp_path / "s", PROMPTS)

    @pytest.mark.parametrize("name", ["offsets.bin", "row_offsets.bin"])
    @pytest.mark.parametrize("bounds", [[0, -8, 3], [0, 2**60, 3], [1, 2, 3], [0, 2, 2]])
    def test_bounds_that_lead_astray(self, tmp_path: Path, name: str, bounds: list[int]) -> None:
        store_of(tmp_path / "s", {"prompt": "ab"}, {"prompt": "c"})
        np.array(bounds, "<i8").tofile(tmp_path / "s" / name)
        with pytest.raises(DataError, match=f"{name}: damaged; delete"):
            SampleStore(tmp_path / "s", PROMPTS)

    @pytest.mark.parametrize(
        "meta", ["[]", "3", "{}", '{"rows": "2", "dropped": 0}', '{"rows": 2, "dropped": 0, "tokens": null}']
    )
    def test_descriptions_that_are_none(self, tmp_path: Path, meta: str) -> None:
        store_of(tmp_path / "s", {"prompt": "ab"}, {"prompt": "c"})
        (tmp_path / "s" / "meta.json").write_text(meta)
        with pytest.raises(DataError, match="delete"):
            SampleStore(tmp_path / "s", PROMPTS)

    @pytest.mark.parametrize("line", [b"\xff" * 16, b"[" * 16, b"[1,2,3,4,5,6, 7]"])
    def test_a_damaged_row(self, tmp_path: Path, line: bytes) -> None:
        store = store_of(tmp_path / "s", {"prompt": "a"}, {"prompt": "b"})
        assert (tmp_path / "s" / "rows.jsonl").read_bytes()[:16] == b'{"prompt": "a"}\n'
        with (tmp_path / "s" / "rows.jsonl").open("r+b") as file:
            file.write(line)
        with pytest.raises(DataError, match="entry 0 is damaged; delete"):
            store[0]
        assert store[1].row == {"prompt": "b"}


class TestCache:
    @pytest.fixture
    def source(self, tmp_path: Path) -> str:
        file = tmp_path / "a.jsonl"
        rows = [{"prompt": f"What is {n}?", "answer": n} for n in range(5)]
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return str(file)

    def test_builds_once(
        self, tmp_path: Path, source: str, make_encoder: MakeEncoder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = cached_store(source, make_encoder(), tmp_path / "cache")
        assert [first[i].row["answer"] for i in range(5)] == list(range(5))
        monkeypatch.setattr(module, "build_store", None)
        second = cached_store([source], make_encoder(), tmp_path / "cache")
        assert first.directory == second.directory and first.digest == second.digest

    def test_settings_have_stores_of_their_own(
        self, tmp_path: Path, source: str, make_encoder: MakeEncoder
    ) -> None:
        root = tmp_path / "cache"
        encoders = [
            make_encoder(),
            make_encoder(max_length=99),
            make_encoder(too_long="drop"),
            make_encoder(styles.PHI3),
            make_encoder(None),
        ]
        directories = {cached_store(source, encoder, root).directory for encoder in encoders}
        samples = Encoder(encoders[0].tokenizer, "prompt-completion", "prompt", "prompt", 100, "error")
        directories.add(cached_store(source, samples, root).directory)
        assert len(directories) == len(encoders) + 1

    def test_all_left_out(self, tmp_path: Path, source: str, make_encoder: MakeEncoder) -> None:
        with pytest.raises(DataError, match=r"5 of 5 rows were dropped; check data\.too_long"):
            cached_store(source, make_encoder(max_length=2, too_long="drop"), tmp_path / "cache")

    def test_gsm8k(self, tmp_path: Path, make_encoder: MakeEncoder) -> None:
        (tmp_path / "in").mkdir()
        for split in ("train", "test"):
            line = json.dumps({"question": "How many?", "answer": "#### 1,001"})
            (tmp_path / "in" / f"{split}.jsonl").write_text(line + "\n")
        prepare_gsm8k(tmp_path / "in", tmp_path / "out")
        encoder = make_encoder()
        store = cached_store(str(tmp_path / "out" / "train.parquet"), encoder, tmp_path / "cache")
        text = encoder.tokenizer.decode(store[0].tokens_P)
        assert "<|im_start|>user\nHow many? Let's" in text and text.endswith("assistant\n")
        assert value_at(store[0].row, "reward_model.ground_truth") == "1001"


def test_value_at() -> None:
    values = {"a": {"b": {"c": 1}, "none": None}, "a.b": 2, "text": "x"}
    assert value_at(values, "a.b.c") == 1
    assert value_at(values, "a.b") == 2, "a column of that name wins"
    for key in ("b", "a.x", "text.x", "a.none.x", ""):
        assert value_at(values, key) is None and value_at(values, key, 7) == 7
    assert value_at(values, "a.none", 7) is None
