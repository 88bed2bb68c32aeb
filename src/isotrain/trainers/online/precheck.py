"""What can be seen to be wrong with an online recipe before any worker is started."""

from __future__ import annotations

from importlib.util import find_spec
from shutil import which

from isotrain.device.detect import choose_device
from isotrain.errors import RewardError, RolloutError
from isotrain.models.load import model_directory
from isotrain.recipe.online import OnlineSection, PpoSection, RewardSection, RolloutSection
from isotrain.recipe.schema import Recipe
from isotrain.reward.function import function_file
from isotrain.rollout.vllm import cannot_import


def check_online(recipe: Recipe) -> list[str]:
    """Raise where the run would fail once its workers have started; returns warnings."""
    algorithm, rollout, reward = recipe.algorithm, recipe.rollout, recipe.reward
    assert isinstance(algorithm, OnlineSection) and rollout is not None and reward is not None
    if rollout.generates:
        _check_generation(rollout, reward, recipe.device.type)
    if reward.model is not None:
        model_directory(reward.model.path, "reward.model.path")
    if reward.process is not None:
        model_directory(reward.process.path, "reward.process.path")
    if isinstance(algorithm, PpoSection) and algorithm.critic.path:
        model_directory(algorithm.critic.path, "algorithm.critic.path")
    warnings = []
    if rollout.generates and rollout.engine == "sglang":
        warnings.append(
            "rollout.engine: sglang is unverified: it has not run against a real SGLang server or device"
        )
    if rollout.staleness and algorithm.correction.level == "off":
        warnings.append(
            f"rollout.staleness is {rollout.staleness} and nothing corrects for the age of answers; "
            "algorithm.correction.level=token does"
        )
    return warnings


def _check_generation(rollout: RolloutSection, reward: RewardSection, device_type: str) -> None:
    """What answers and scores need; a replay has both."""
    if rollout.engine == "vllm" and find_spec("vllm") is None:
        raise cannot_import(ModuleNotFoundError(name="vllm"), choose_device(device_type).type)
    if rollout.engine == "sglang":
        _check_server_python(rollout.server_python)
    if reward.math is not None and find_spec("math_verify") is None:
        raise RewardError("reward.math: math-verify is not installed; pip install 'isotrain[math]'")
    if reward.function is not None:
        function_file(reward.function.path)


def _check_server_python(python: str | None) -> None:
    if python is None and find_spec("sglang") is None:
        raise RolloutError(
            "rollout.engine: sglang is not installed beside isotrain; make an environment for it "
            "(pip install 'isotrain[sglang]') and name its interpreter in rollout.server_python"
        )
    if python is not None and which(python) is None:
        raise RolloutError(f"rollout.server_python: {python!r} is no program that can be run")
