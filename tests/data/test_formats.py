from __future__ import annotations

from typing import Any

import pytest

from isotrain.data.formats import ChatMessage, ChatRow, ColumnNames, Text, detect, normalise
from isotrain.data.rows import Row
from isotrain.errors import DataError

ASKED, SAID = ChatMessage("user", "Q"), ChatMessage("assistant", "A")
PLAIN = ColumnNames(has_template=False)


def read(values: dict[str, Any], columns: ColumnNames | None = None) -> ChatRow | Text:
    columns = columns or ColumnNames()
    row = Row(values, "a.jsonl:7")
    return normalise(row, detect(row, columns), columns)


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def test_messages() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    values = {
        "messages": [
            {"role": "user", "content": "Q", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "R", "name": "f"},
            {"role": "assistant", "content": "A"},
        ],
        "tools": '[{"name": "f"}]',
    }
    assert read(values) == ChatRow(
        (
            ASKED,
            ChatMessage("assistant", None, {"tool_calls": [call]}),
            ChatMessage("tool", "R", {"name": "f"}),
            SAID,
        ),
        tools=[{"name": "f"}],
    )


def test_prompt_completion_strings_stay_text() -> None:
    assert read({"prompt": "Q", "completion": "A"}) == Text("Q", "A")


def test_prompt_completion_messages_take_loss_on_the_completion() -> None:
    values = {
        "prompt": chat(("user", "Q"), ("assistant", "A"), ("user", "Q")),
        "completion": chat(("assistant", "A")),
    }
    assert read(values) == ChatRow((ASKED, SAID, ASKED, SAID), loss_from=3)
    mixed = {"prompt": chat(("user", "Q")), "completion": "A"}
    assert read(mixed) == ChatRow((ASKED, SAID), loss_from=1)


def test_chosen_keys_make_a_conversation_if_there_is_a_template() -> None:
    values = {"prompt": chat(("user", "Q with hint")), "extra_info": {"question": "Q", "answer": "A"}}
    keys = ("extra_info.question", "extra_info.answer")
    assert read(values, ColumnNames(*keys)) == ChatRow((ASKED, SAID), loss_from=1)
    assert read(values, ColumnNames(*keys, has_template=False)) == Text("Q", "A")
    both = read(values, ColumnNames("prompt", "extra_info.answer"))
    assert both == ChatRow((ChatMessage("user", "Q with hint"), SAID), loss_from=1)


def test_a_column_with_dots_in_its_name_wins() -> None:
    assert read({"a.b": "Q", "a": {"b": "X"}, "c": "A"}, ColumnNames("a.b", "c", False)) == Text("Q", "A")


def test_text() -> None:
    assert read({"text": "All of it.", "id": 3}) == Text("", "All of it.")


def test_sharegpt() -> None:
    values = {
        "system": "S",
        "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
    }
    assert read(values) == ChatRow((ChatMessage("system", "S"), ASKED, SAID))
    assert read({"conversations": chat(("user", "Q"), ("assistant", "A"))}) == ChatRow((ASKED, SAID))


def test_alpaca() -> None:
    assert read({"instruction": "Q", "input": "", "output": "A"}) == ChatRow((ASKED, SAID))
    full = {"instruction": "Q", "input": "I", "output": "A", "system": "S", "history": [["Q", "A"]]}
    assert read(full) == ChatRow(
        (ChatMessage("system", "S"), ASKED, SAID, ChatMessage("user", "Q\n\nI"), SAID)
    )
    plain = read({"instruction": "Q {x}", "input": "I", "output": "A"}, PLAIN)
    assert isinstance(plain, Text)
    assert plain.prompt.endswith("### Instruction:\nQ {x}\n\n### Input:\nI\n\n### Response:\n")


def test_undetectable_names_row_columns_and_shapes() -> None:
    with pytest.raises(DataError) as caught:
        read({"question": "Q", "answer": "A"})
    message = str(caught.value)
    assert message.startswith("a.jsonl:7: ") and "'question', 'answer'" in message
    assert '{"messages": [' in message and "data.prompt_key" in message


def test_rl_rows_get_a_hint() -> None:
    values = {"prompt": chat(("user", "Q")), "extra_info": {"question": "Q", "answer": "A"}}
    with pytest.raises(DataError, match=r"data\.prompt_key=extra_info\.question"):
        read(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": []}, "'messages' must be a list of messages"),
        ({"messages": "hello"}, "'messages' must be a list of messages, not 'hello'"),
        ({"messages": ["hello"]}, r"messages\[0\] must be"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content must be a string, not 3"),
        ({"messages": chat(("user", "Q"))}, "no assistant message to learn from"),
        ({"messages": chat(("assistant", "A")), "tools": "{"}, "'tools' is not JSON"),
        ({"messages": chat(("assistant", "A")), "tools": "{}"}, None),
        ({"messages": chat(("assistant", "A")), "tools": {"a": 1}}, "'tools' must be a list"),
        ({"prompt": "Q", "completion": 3}, "'completion' must be a list of messages, not 3"),
        ({"text": None}, "'text' must be a string, not None"),
        ({"conversations": [{"from": "alien", "value": "A"}]}, r"conversations\[0\] is from 'alien'"),
        ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\] must be"),
        ({"instruction": "Q", "output": "A", "history": ["x"]}, r"history\[0\] must be \[question, answer\]"),
        (
            {"prompt": chat(("user", "Q")), "completion": chat(("user", "Q"))},
            "no assistant message to learn from",
        ),
    ],
)
def test_rows_that_do_not_fit(values: dict[str, Any], message: str | None) -> None:
    if message is None:
        read(values)
        return
    with pytest.raises(DataError, match=f"^a.jsonl:7: .*{message}"):
        read(values)


def test_later_rows_must_fit_the_first() -> None:
    with pytest.raises(DataError, match=r"no 'messages': the row has 'text'"):
        normalise(Row({"text": "a"}, "a.jsonl:2"), "messages", ColumnNames())


def test_missing_part_of_a_path() -> None:
    with pytest.raises(DataError, match=r"no 'a\.b\.c': what stands before 'c' is 'Q'"):
        read({"a": {"b": "Q"}}, ColumnNames("a.b.c", "a.b"))


def test_conversations_need_a_template() -> None:
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        read({"messages": chat(("user", "Q"), ("assistant", "A"))}, PLAIN)
