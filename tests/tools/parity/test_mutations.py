"""Mistakes of real trainers, as the first steps show them: each is found, and named where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mutations
from isotrain.tools.parity.protocol import verdict_on
from mutations import MUTATIONS, SITE
from support import run_cli, tiny_recipe, write_recipe

sys.path.append(str(SITE))

from mutation_patches import PATCHES

pytestmark = pytest.mark.heavy

STEPS = 8
# In every run of the tests, the others in the slow suite.
QUICK = {
    "norm-epsilon": "activations of model.layers.1.input_layernorm at step 1",
}
SLOW = {
    **{m.name: m.where or "" for m in MUTATIONS if m.run == "sft" and m.name not in QUICK},
    "mask-shifted": "takes its loss on other tokens",
    "learning-rate": "1.010 times the reference's",
}


def train(tiny: Path, output: Path, mutation: str) -> Path:
    recipe = tiny_recipe(
        tiny, output, "cpu", trainer={"steps": STEPS}, observe={"loggers": [], "layer_trace": 2}
    )
    variables = {**mutations.environment(mutation), "OMP_NUM_THREADS": "1"}
    run_cli("train", str(write_recipe(recipe, output.with_suffix(".yaml"))), **variables)
    return output


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny, tmp_path_factory.mktemp("reference") / "run", "none")


@pytest.mark.parametrize(
    ("mutation", "words"),
    [*QUICK.items(), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW.items())],
)
def test_mistakes_are_found_and_named(
    reference: Path, tiny: Path, tmp_path: Path, mutation: str, words: str
) -> None:
    verdict = verdict_on(reference, train(tiny, tmp_path / "run", mutation))
    assert verdict.computation.verdict == "different", verdict.words
    assert words in verdict.words


def test_an_honest_rerun_is_the_same(reference: Path, tiny: Path, tmp_path: Path) -> None:
    verdict = verdict_on(reference, train(tiny, tmp_path / "run", "none"))
    assert verdict.computation.verdict == "same", verdict.words


def test_every_mutation_has_its_patch() -> None:
    assert {m.name for m in MUTATIONS} | {"none"} == set(PATCHES)
    assert len(MUTATIONS) >= 16
