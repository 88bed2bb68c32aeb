"""Overrides have the values that Hydra gives them; what its grammar does not have is not guessed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from isotrain.tools.imports.convert import convert
from isotrain.tools.imports.hydra import OverrideValueError, override_value

# Text and value, as Hydra 1.3.8 reads them.
VALUES: list[tuple[str, Any]] = [
    ("", ""), ("1", 1), ("+1", 1), ("-1", -1), ("1_000", 1000), ("1_000.5", 1000.5), ("1__0", "1__0"),
    ("010", "010"), ("00", "00"), ("0x10", "0x10"), ("0o7", "0o7"), ("1_", "1_"), ("_1", "_1"),
    (".5", 0.5), ("5.", 5.0), ("-.5", -0.5), ("1e-6", 1e-6), ("1E-6", 1e-6), ("1.e3", 1000.0), ("1e5", 1e5),
    ("0.1_0", 0.1), ("inf", math.inf), ("-inf", -math.inf), (".inf", ".inf"), ("1e", "1e"),
    ("1.2.3", "1.2.3"),
    ("True", True), ("tRuE", True), ("FALSE", False), ("yes", "yes"), ("no", "no"), ("on", "on"), ("y", "y"),
    ("null", None), ("NULL", None), ("None", "None"), ("none", "none"),
    ("''", ""), ('""', ""), ("'1'", "1"), ("'true'", "true"), ("'null'", "null"), ("' '", " "),
    ("'${x}'", "${x}"),
    (r"'a\'b'", "a'b"), (r"'a\\b'", r"a\\b"), (r"'a\nb'", r"a\nb"), ('"a\'b"', "a'b"), (r"'a\\'", "a\\"),
    ("[]", []), ("[1,2]", [1, 2]), ("[ 1 , 2 ]", [1, 2]), ("[a b,c]", ["a b", "c"]),
    ("['a', \"b\"]", ["a", "b"]),
    ("[null,true,1e-6,1_000,yes]", [None, True, 1e-6, 1000, "yes"]), ("[[1,2],[3]]", [[1, 2], [3]]),
    ("{}", {}), ("{a:1}", {"a": 1}), ("{a: 1, b: 2}", {"a": 1, "b": 2}), ("{a:{b:null}}", {"a": {"b": None}}),
    ("{a.b:1}", {"a.b": 1}), ("{1:a}", {"1": "a"}), ("{a:1,a:2}", {"a": 2}), ("{a: b: c}", {"a": "b: c"}),
    ("{a:'x, y'}", {"a": "x, y"}), ("[{a:yes}]", [{"a": "yes"}]),
    ("${x.y}", "${x.y}"), ("a${x}b", "a${x}b"), ("a: b", "a: b"), ("a b", "a b"), (" a ", "a"),
    ("- 1", "- 1"),
    (r"a\,b", "a,b"), (r"a\=b", "a=b"), (r"a\ b", "a b"), (r"a\b", r"a\b"), (r"[a\,b]", ["a,b"]),
    ("|", "|"), ("?", "?"), ("a*b", "a*b"), ("a@b", "a@b"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"),
]  # fmt: skip
REFUSED = [
    "1,2", "a,b", "[1,2", "[,]", "[a,]", "{'a':1}", "{a:}", "{:1}", "{a=b}", "[a=b]", "a=b", "x=",
    "a;b", "a&b",
    "a(b", "a(b)", "int(1)", "choice(1,2)", "a!b", "a#b", "a'b", "'a'b", 'a"b"', "é", "a{b}", "a[b]", "<x>",
    "a\nb", "&a", "!!python/x", "`a`", "[" * 100, "'a", "${x",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values_are_those_of_hydra(text: str, value: Any) -> None:
    read = override_value(text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("text", REFUSED)
def test_text_outside_the_grammar_has_no_value(text: str) -> None:
    with pytest.raises(OverrideValueError):
        override_value(text)


def test_the_tables_hold_for_hydra_itself() -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    for text, value in VALUES:
        read = parser.parse_override(f"a={text}").value()
        assert str(getattr(read, "text", read)) == str(value) or isinstance(value, dict | list), text
    for text in REFUSED:
        try:
            # isotrain reads no function, and one run is no sweep.
            assert parser.parse_override(f"a={text}").is_sweep_override() or "(" in text
        except Exception as error:
            assert "Error" in type(error).__name__ or "Exception" in type(error).__name__, text


COMMAND = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 {} \\\n"
)


def imported(*overrides: str) -> Any:
    pytest.importorskip("tree_sitter_bash")
    quoted = " ".join(f'"{word}"' for word in ("data.train_files=gsm8k", "data.val_files=gsm8k", *overrides))
    return convert(COMMAND.format(quoted).encode(), "verl")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.train_batch_size=1_000", "batch_size: 1000"),
        ("actor_rollout_ref.actor.optim.lr=.5e-6", "lr: 5e-7"),
        ("actor_rollout_ref.actor.optim={lr:2e-6}", "lr: 2e-6"),
        ("actor_rollout_ref.actor.optim={lr: 2e-6, weight_decay: 0.2}", "weight_decay: 0.2"),
    ],
)
def test_values_reach_the_recipe(override: str, line: str) -> None:
    result = imported(override)
    assert result.same_training and f"{line}  #" in result.recipe


@pytest.mark.parametrize("value", ["1,2", "int(4)", "[1", "{a", "4;5", "a=b"])
def test_a_value_that_hydra_refuses_is_a_difference(value: str) -> None:
    result = imported(f"data.max_prompt_length={value}")
    assert not result.same_training and "Hydra does not read its value" in result.unknown[-1].why


@pytest.mark.parametrize("key", ["a..b", "a.", "data.", "+++a.b"])
def test_a_key_that_hydra_refuses_is_a_difference(key: str) -> None:
    assert not imported(f"{key}=1").same_training
