"""A reward, advantages and policy losses of a package that is installed for real, used by their names."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isotrain.algorithms.aggregation import LossNormalizer
from isotrain.errors import RecipeError, RewardError
from isotrain.observe.environment import describe_environment
from isotrain.observe.metrics import read_metrics
from isotrain.plugins import ADVANTAGES, REWARDS, find_plugin
from isotrain.recipe.online import GrpoSection, PpoSection, RewardSection
from isotrain.recipe.policy_loss import PluginSection
from isotrain.recipe.schema import Recipe
from isotrain.rewards.base import RewardInput
from isotrain.rewards.build import build_scorer
from isotrain.trainers.online.build_rank import advantage_settings, plugin_loss, update_settings
from isotrain.trainers.online.precheck import changed_plugins, check_online, look_online
from support import run_cli, write_recipe

PACKAGE = "isotrain-demo-plugins"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package as pip installs it, seen by this process and by those that it starts."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "demo"
    source.mkdir()
    for file in (Path(__file__).parent / "demo").iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(target))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(target), *([before] if before else [])])
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    yield target
    sys.path.remove(str(target))
    sys.modules.pop("isotrain_demo_plugins", None)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def test_a_reward_by_name_in_its_own_process(site: Path) -> None:
    plugin = {"name": "digits", "options": {"bonus": 0.25}, "weight": 2.0}
    scorer = build_scorer(RewardSection.model_validate({"plugin": plugin}), None)
    try:
        scorer.start()
        (scored,) = scorer.score([RewardInput("12ab", None)])
    finally:
        scorer.close()
    assert (scored.score, scored.parts) == (1.5, {"plugin": 0.75, "plugin/length": 4.0})
    assert "isotrain_demo_plugins" not in sys.modules


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ({"name": "digit"}, "no installed package has 'digit' in its isotrain.rewards; available: digits"),
        ({"name": "broken"}, f"broken of {PACKAGE} 0.3 .* cannot be loaded: AttributeError"),
        ({"name": "number"}, f"number of {PACKAGE} 0.3 .* is not a function"),
        ({"name": "digits", "options": {"bonsu": 1}}, "does not take these options: .*'bonsu'"),
        ({"name": "digits", "options": {"response": "x"}}, "cannot take the option 'response'"),
    ],
)
def test_rewards_that_cannot_be_used(site: Path, plugin: dict[str, Any], said: str) -> None:
    scorer = build_scorer(RewardSection.model_validate({"plugin": plugin}), None)
    try:
        with pytest.raises(RewardError, match=said):
            scorer.start()
    finally:
        scorer.close()


def grpo(**fields: Any) -> GrpoSection:
    return GrpoSection.model_validate({"name": "grpo", **fields})


def test_an_advantage_by_name(site: Path) -> None:
    settings = advantage_settings(grpo(advantage={"name": "mean-only", "options": {"scale": 2.0}}))
    found = settings.estimator.function(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), **settings.options)
    assert found.tolist() == [-2.0, 2.0] and settings.estimator.per == "trajectory"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mean-onyl", "available: mean-only, "),
        ("function", f"function of {PACKAGE} 0.3 .* is of <class 'function'>, not an isotrain.algorithms"),
        ("with-values", "needs a critic's values_N: write algorithm.name: ppo"),
    ],
)
def test_advantages_that_cannot_be_used(site: Path, name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        advantage_settings(grpo(advantage={"name": name}))


def test_advantages_are_held_to_their_contract(site: Path) -> None:
    settings = advantage_settings(grpo(advantage={"name": "short"}))
    with pytest.raises(RecipeError, match="must return advantages_R, as long as the 2 rewards"):
        settings.estimator.function(torch.zeros(2), torch.zeros(2))
    ppo = PpoSection.model_validate({"name": "ppo", "advantage": {"name": "with-values"}})
    assert advantage_settings(ppo).estimator.needs == ("values_N",)
    critic = PpoSection.model_validate({"name": "ppo", "advantage": {"name": "mean-only"}})
    with pytest.raises(RecipeError, match="gives no returns for ppo's critic"):
        advantage_settings(critic)


def test_a_policy_loss_by_name(site: Path) -> None:
    share = LossNormalizer(torch.tensor([True, True]), [2], 2, 1)
    logp_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    given = {"aggregation": "token-mean", "correction_N": None}
    loss, metrics = plugin_loss(PluginSection(name="plain"))(
        logp_N, logp_N.detach(), torch.ones(2), share, **given
    )
    assert loss.item() == 1.5 and set(metrics) == {"actor/plain"}
    with pytest.raises(RecipeError, match="must return \\(loss, metrics\\)"):
        plugin_loss(PluginSection(name="per-token"))(logp_N, logp_N, torch.ones(2), share, **given)
    with pytest.raises(RecipeError, match=r"'clip' is built in: write algorithm\.loss\.name: clip"):
        plugin_loss(PluginSection(name="clip"))
    with pytest.raises(RecipeError, match=r"available: plain, .*algorithm.loss.name: clip \(built in\)"):
        plugin_loss(PluginSection(name="plian"))


def test_two_packages_with_one_name(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[isotrain.rewards]\ndigits = other:digits\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=f"{PACKAGE} 0.3 and other 1.0 both have 'digits'"):
        find_plugin(REWARDS, "digits", "reward.plugin.name")
    assert find_plugin(ADVANTAGES, "short", "algorithm.advantage.name").package == f"{PACKAGE} 0.3"


def online(tiny: Path, output: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "plugins",
            "output": str(output),
            "device": {"type": "cpu"},
            "model": {"path": str(tiny / "model"), "dtype": "float32"},
            "data": {"train": str(tiny / "prompts.jsonl"), "batch_size": 2, "max_length": 64},
            "algorithm": {
                "name": "grpo",
                "advantage": {"name": "mean-only", "options": {"scale": 0.5}},
                "loss": {"plugin": {"name": "plain"}},
            },
            "rollout": {"engine": "hf", "n": 2, "max_tokens": 6},
            "reward": {"plugin": {"name": "digits"}, "answer_key": "answer"},
            "cluster": {"address": "local"},
            "trainer": {"steps": 2},
        }
    )


def test_before_a_run(site: Path, tiny: Path, tmp_path: Path) -> None:
    recipe = online(tiny, tmp_path / "run")
    assert look_online(recipe) == check_online(recipe) == []
    assert update_settings(recipe, recipe.algorithm).loss_options == {}  # type: ignore[arg-type]
    wrong = recipe.model_copy(update={"reward": RewardSection.model_validate({"plugin": {"name": "digit"}})})
    (warning,) = look_online(wrong)
    assert warning.startswith("a run on this machine would fail: reward.plugin.name: no installed package")


def test_another_version_is_seen(site: Path, tiny: Path, tmp_path: Path) -> None:
    packages = describe_environment({}, ())["packages"]
    assert isinstance(packages, dict) and packages[PACKAGE] == "0.3"
    recipe = online(tiny, tmp_path)
    assert changed_plugins(recipe) == []
    (tmp_path / "environment.json").write_text(json.dumps({"starts": [{"packages": {PACKAGE: "0.2"}}]}))
    assert len(changed_plugins(recipe)) == 3
    assert changed_plugins(recipe)[0].endswith(f"{PACKAGE} 0.3 is installed, but {tmp_path} last used 0.2")


@pytest.mark.timeout(900)
def test_a_run_with_all_three(site: Path, tiny: Path, tmp_path: Path) -> None:
    recipe = online(tiny, tmp_path / "run")
    run_cli("train", str(write_recipe(recipe, tmp_path / "recipe.yaml")), timeout=800)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and all("actor/plain" in row for row in rows)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["starts"][0]["packages"][PACKAGE] == "0.3"
