from __future__ import annotations

import re
from pathlib import Path

import pytest

from isotrain.errors import RecipeError
from isotrain.recipe.load import load_recipe, parse_recipe

MINIMAL = """\
name: small
output: runs/small
model:
  path: some/model
data:
  train: rows.jsonl
algorithm:
  name: sft
"""


def lines(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, "r.yaml", overrides)
    return str(error.value).splitlines()


def test_minimal_recipe_has_the_defaults_of_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    recipe = load_recipe(path)
    assert recipe.model.path == "some/model"
    assert recipe.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1E-4", ".0001", "1.e-4", "+1e-4", "100e-6"])
def test_floats_in_every_spelling(text: str) -> None:
    assert parse_recipe(MINIMAL + f"optimizer: {{lr: {text}}}", "r.yaml").optimizer.lr == 1e-4
    assert parse_recipe(MINIMAL, "r.yaml", [f"optimizer.lr={text}"]).optimizer.lr == 1e-4


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "2026-01-01", "1:30", "1_000", "<<", "="])
def test_yaml_1_1_words_stay_text(word: str) -> None:
    assert parse_recipe(MINIMAL, "r.yaml", [f"observe.project={word}"]).observe.project == word


def test_booleans_are_only_true_and_false() -> None:
    assert parse_recipe(MINIMAL, "r.yaml", ["data.shuffle=False"]).data.shuffle is False
    (line,) = lines(MINIMAL + "trainer:\n  validate_first: yes\n")
    assert line == "r.yaml:10: 'trainer.validate_first' is the text 'yes'; expected true or false; write true"


def test_an_empty_section_is_all_defaults() -> None:
    assert parse_recipe(MINIMAL + "optimizer:\n  # lr: 1\n", "r.yaml").optimizer.lr == 1e-5


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_recipe(path).name == "small"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml:1:1: the recipe is empty"),
        ("# only a comment\n", "r.yaml:1:1: the recipe is empty"),
        ("\n- a\n- b\n", "r.yaml:2:1: the file is a list"),
        ("sft", "r.yaml:1:1: the file is a single value"),
        ("a: b: c", "r.yaml:1:5: not valid YAML: unexpected ':'"),
        ("a: 1\n\tb: 2", "r.yaml:2:1: not valid YAML: a tab"),
        (
            "a: 1\nb: [1, 2\n",
            "r.yaml:3:1: not valid YAML: a bracket or quote, opened on line 2, is not closed",
        ),
        ("a: @x", "r.yaml:1:4: not valid YAML: found character '@'"),
        ("a: 1\nb: '\x07'", "r.yaml:2:5: not valid YAML: the character U+0007"),
        ("a: &x 1", "r.yaml:1:4: recipes have no anchors"),
        ("a: *x", "r.yaml:1:4: recipes have no anchors"),
        ("a: !!python/object:os.system x", "r.yaml:1:4: recipes have no tags"),
        ("a: 1\n---\na: 2", "r.yaml:2:1: a second document"),
    ],
)
def test_files_that_are_not_a_recipe(text: str, message: str) -> None:
    assert lines(text)[0].startswith(message)


def test_not_utf8_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"name: a\noutput: caf\xe9\n")
    with pytest.raises(RecipeError, match=re.escape(f"{path}:2:12: not UTF-8")):
        load_recipe(path)


def test_refuses_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)


def test_an_alias_bomb_is_refused_unexpanded() -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert "no anchors" in lines(bomb)[0]


@pytest.mark.parametrize(
    "text", ["[" * 50_000, "{a: " * 20_000, "".join(f"{'  ' * i}a:\n" for i in range(300))]
)
def test_deep_nesting_is_refused_without_recursion(text: str) -> None:
    assert "levels deep" in lines(text)[0]


def test_a_huge_file_is_not_read_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RecipeError, match="is this a recipe"):
        load_recipe(path)


def test_duplicate_keys_name_both_lines() -> None:
    (line,) = lines(MINIMAL + "optimizer:\n  lr: 1e-4\n  eps: 1e-8\n  lr: 1e-5\n")
    assert line == "r.yaml:12: key 'optimizer.lr' is given twice, first on line 10; keep one"


@pytest.mark.parametrize("number", [".inf", "-.INF", ".nan", "1e999", "9" * 5000])
def test_numbers_that_are_none_are_reported_once(number: str) -> None:
    (line,) = lines(MINIMAL + f"optimizer: {{betas: [0.9, {number}]}}")
    assert line.startswith("r.yaml:9: item 2 of 'optimizer.betas' is ")


def test_half_a_character_is_reported() -> None:
    (line,) = lines(MINIMAL + 'observe: {project: "\\ud800"}')
    assert line == "r.yaml:9: 'observe.project' contains a lone surrogate: remove this half character"


def test_later_overrides_win_and_replace_wrong_values() -> None:
    recipe = parse_recipe(
        MINIMAL + "trainer: {steps: 5}\noptimizer: {lr: .inf}",
        "r.yaml",
        [
            "optimizer.lr=1",
            "optimizer.lr=1e-4",
            "observe.loggers=['console','tensorboard']",
            "model.lora.targets=[q_proj,v_proj]",
            "model.lora.rank=8",
            "trainer.steps=null",
            "output=runs/a=b",
            'observe.project=""',
            "data={train: [a.jsonl, b.jsonl]}",
        ],
    )
    assert recipe.optimizer.lr == 1e-4
    assert recipe.observe.loggers == ["console", "tensorboard"]
    assert recipe.model.lora.targets == ["q_proj", "v_proj"] and recipe.model.lora.rank == 8
    assert recipe.trainer.steps is None
    assert recipe.output == "runs/a=b"
    assert recipe.observe.project == ""
    assert recipe.data.train == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=", "nothing after '='; write trainer.steps=null for no value"),
        ("trainer.steps= # many", "nothing after '='"),
        ("trainer.steps", "expected key=value, for example optimizer.lr=1e-4"),
        ("=3", "expected key=value"),
        ("a..b=3", "expected key=value"),
        ("+optimizer.lr=3", "expected key=value"),
        ("lr=1e-4", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("optim.lr=1e-4", "unknown key 'optim.lr'; did you mean 'optimizer.lr'?"),
        ("optimizer.lr=-1", "'optimizer.lr' is -1; expected a number, at least 0"),
        ("name.first=x", "'name' holds a value, not a section"),
        ("data.train=*.jsonl", "not valid YAML: put text that starts with '*', '&', '!' or '%' in quotes"),
        ("data.train=*rows", "recipes have no anchors"),
        ("data.train=[a", "not valid YAML: a bracket or quote"),
        ("optimizer={lr: 1, lr: 2}", "key 'optimizer.lr' is given twice; keep one"),
        ("observe.loggers=[console, wand]", "item 2 of 'observe.loggers' is the text 'wand'"),
    ],
)
def test_problems_of_overrides_name_the_override(override: str, message: str) -> None:
    (line,) = lines(MINIMAL, override)
    assert line.startswith(f"override {override!r}: {message}")
