"""Check an online recipe before any worker starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, NamedTuple

from isotrain import user_file
from isotrain.data.formats import value_at
from isotrain.data.prepare.verifiers_tasks import find_environment
from isotrain.environments import interfaces
from isotrain.errors import (
    DataError,
    EpisodeError,
    IsotrainError,
    ModelError,
    RecipeError,
    RewardError,
    RolloutError,
    SandboxError,
    install,
)
from isotrain.observe.environment import package_name
from isotrain.observe.loggers import check_loggers
from isotrain.observe.run_directory import RunDirectory
from isotrain.plugins import ADVANTAGES, POLICY_LOSSES, REWARDS, find_plugin
from isotrain.recipe.online import (
    ClusterSection,
    CodeSection,
    Online,
    OnlineSection,
    PpoSection,
    RewardSection,
    RolloutSection,
)
from isotrain.recipe.schema import Recipe
from isotrain.rewards.build import code_sandbox, reward_source
from isotrain.rewards.function import check_function, function_file
from isotrain.rollout.vllm_import import cannot_import, lacks_library, lacks_torchvision

if TYPE_CHECKING:  # transformers come with these, and a dry run does without
    from isotrain.data.encode import Prompt
    from isotrain.data.store import SampleStore


def check_online(recipe: Recipe) -> list[str]:
    """Raise if the run would fail after its workers have started; returns warnings."""
    algorithm, rollout, reward = _sections(recipe)
    for problem in _not_here(recipe):
        raise problem
    _check_plugins(algorithm, reward)
    ends = [*_check_ends(recipe), *_check_window(recipe, rollout)] if rollout.generates else []
    return [*_check_models(recipe, algorithm, reward), *ends, *_warnings(recipe, algorithm, rollout)]


# Of so many rows at least one must have the reference answer that rewards are to compare with.
ROWS_TO_CHECK = 100


def check_answers(reward: RewardSection, prompts: SampleStore[Prompt]) -> None:
    """Refuse an `answer_key` that the rows do not have, where the recipe names one or a rule needs it."""
    is_default = reward.answer_key == RewardSection.model_fields["answer_key"].default
    if is_default and not (reward.gsm8k or reward.math or reward.choice or reward.code):
        return
    rows = [prompts[number].row for number in range(min(len(prompts), ROWS_TO_CHECK))]
    if any(value_at(row, reward.answer_key) is not None for row in rows):
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    near = difflib.get_close_matches(reward.answer_key, columns, n=1)
    raise RecipeError(
        f"reward.answer_key: none of the first {len(rows)} rows of data.train has '{reward.answer_key}'; "
        + (f"did you mean '{near[0]}'? " if near else "")
        + f"they have {', '.join(columns)}"
    )


def response_ends(recipe: Recipe) -> str:
    """The tokens at which engines end a response, for users."""
    from isotrain.data.chat import end_tokens
    from isotrain.models.config import model_end_tokens
    from isotrain.models.files import load_tokenizer, model_directory

    directory = model_directory(recipe.model.path)
    tokenizer = load_tokenizer(directory)
    return _named(tokenizer, end_tokens(model_end_tokens(directory), tokenizer))


def _named(tokenizer: Any, tokens: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in tokens) or "none"


def _check_ends(recipe: Recipe) -> list[str]:
    """Where the engines would not stop, responses run on to `rollout.max_tokens` and tools are not called."""
    from isotrain.data.chat import end_of_turn, end_tokens
    from isotrain.models.config import model_end_tokens
    from isotrain.models.files import load_tokenizer, model_directory

    directory = model_directory(recipe.model.path)
    tokenizer = load_tokenizer(directory)
    model_ends, turn = model_end_tokens(directory), end_of_turn(tokenizer)
    ends = end_tokens(model_ends, tokenizer)
    if not ends:
        return [
            "model.path: neither generation_config.json nor the tokenizer has an end token: every response "
            "has rollout.max_tokens tokens; set eos_token_id in generation_config.json"
        ]
    if tokenizer.chat_template and turn is None:
        return [
            "model.path: the chat template ends an assistant's turn without a special token of its own; "
            f"responses end only at {_named(tokenizer, ends)}. If the model ends its turns with something "
            "else, add that token to eos_token_id in generation_config.json"
        ]
    if turn is not None and turn not in model_ends:
        return [
            f"model.path: the chat template ends a turn with {_named(tokenizer, [turn])}, but "
            f"generation_config.json ends responses at {_named(tokenizer, model_ends)}; responses end at both"
        ]
    return []


# Their `sliding_window` counts the tokens that one sees: in vLLM without itself, in transformers with it.
_WIDER_IN_VLLM = {"cohere2", "cohere2_moe"}


def _check_window(recipe: Recipe, rollout: RolloutSection) -> list[str]:
    from isotrain.models.config import text_config
    from isotrain.models.files import model_directory
    from isotrain.models.load import read_config

    text = text_config(read_config(model_directory(recipe.model.path)))
    window, longest = getattr(text, "sliding_window", None), recipe.data.max_length + rollout.max_tokens
    if rollout.engine != "vllm" or text.model_type not in _WIDER_IN_VLLM or not window or longest <= window:
        return []
    return [
        f"rollout.engine: in sliding layers of model type '{text.model_type}' a token sees {window + 1} "
        f"tokens in vLLM and {window} in training, as in transformers: log-probs of longer sequences differ. "
        f"Set rollout.engine: hf, or data.max_length and rollout.max_tokens whose sum is {window} at most "
        f"(now {longest})"
    ]


def look_online(recipe: Recipe) -> list[str]:
    """The same for a dry run, without torch; what this machine lacks is only a warning."""
    algorithm, rollout, _ = _sections(recipe)
    problems = _not_here(recipe)
    lacking = [f"a run on this machine would fail: {problem}" for problem in problems]
    return [*lacking, *_warnings(recipe, algorithm, rollout)]


def _sections(recipe: Recipe) -> tuple[OnlineSection, RolloutSection, RewardSection]:
    algorithm, rollout, reward = recipe.algorithm, recipe.rollout, recipe.reward
    assert isinstance(algorithm, OnlineSection) and rollout is not None and reward is not None
    return algorithm, rollout, reward


def _warnings(recipe: Recipe, algorithm: OnlineSection, rollout: RolloutSection) -> list[str]:
    warnings = []
    ranks, placement = recipe.device.ranks, (recipe.cluster or ClusterSection()).placement
    generating = rollout.engine_count(ranks, placement) * rollout.tensor_parallel
    if rollout.generates and placement == "colocated" and generating < ranks:
        warnings.append(
            f"{ranks - generating} of {ranks} devices are idle while responses are generated; remove "
            "rollout.engines, or set a rollout.tensor_parallel that divides device.ranks"
        )
    if (size := algorithm.mini_batch_size) and (rest := recipe.data.batch_size % size):
        warnings.append(
            f"algorithm.mini_batch_size ({size}) does not divide data.batch_size "
            f"({recipe.data.batch_size}): the last update of each step has only {rest} prompts"
        )
    if rollout.generates and rollout.engine == "sglang":
        warnings.append("rollout.engine: sglang has run on CPUs only, on no accelerator yet")
    if rollout.staleness and not algorithm.rollout_correction.is_on:
        warnings.append(
            f"rollout.staleness is {rollout.staleness} without a correction for old responses; "
            "set algorithm.rollout_correction.level=token"
        )
    return warnings


def _check_models(recipe: Recipe, algorithm: OnlineSection, reward: RewardSection) -> list[str]:
    """Models that read the policy's tokens must be there, with its tokenizer."""
    from isotrain.models.files import model_directory

    readers = {
        "algorithm.distillation.path": algorithm.distillation.path,
        "reward.model.path": reward.model and reward.model.path,
        "reward.process.path": reward.process and reward.process.path,
        "algorithm.critic.path": algorithm.critic.path if isinstance(algorithm, PpoSection) else None,
    }
    warnings = []
    for field, path in readers.items():
        if path:
            warnings += _check_vocabulary(model_directory(recipe.model.path), path, field)
    return warnings


def _check_vocabulary(policy: Path, path: str, field: str) -> list[str]:
    """Raise where the model at `path`, named by `field`, has another tokenizer; returns warnings."""
    from isotrain.models.config import vocabulary_size
    from isotrain.models.files import load_tokenizer, model_directory
    from isotrain.models.load import read_config

    directory = model_directory(path, field)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return [f"{field}: {path} has no tokenizer to compare with the policy's"]
    ours, theirs = load_tokenizer(policy).get_vocab(), load_tokenizer(directory).get_vocab()
    for token, number in ours.items():
        if theirs.get(token, number) != number:
            raise ModelError(
                f"{field}: its tokenizer is not the policy's: {token!r} has number {theirs[token]} there and "
                f"{number} in model.path; set a model with the policy's tokenizer"
            )
    unknown = {token: number for token, number in ours.items() if token not in theirs}
    if not unknown:
        return []
    size = vocabulary_size(read_config(directory))
    if max(unknown.values()) >= size:
        token = max(unknown, key=unknown.__getitem__)
        raise ModelError(
            f"{field}: its tokenizer is not the policy's: it has {size} tokens but not {token!r}, "
            f"number {unknown[token]} in model.path; set a model with the policy's tokenizer"
        )
    few = ", ".join(map(repr, sorted(unknown)[:5]))
    return [f"{field}: its tokenizer lacks {len(unknown)} token(s) of the policy, such as {few}"]


def _check_plugins(algorithm: OnlineSection, reward: RewardSection) -> None:
    """Load what packages have for the maths, which must fit the recipe."""
    from isotrain.trainers.online.build_rank import advantage_settings, plugin_loss

    assert isinstance(algorithm, Online)
    if algorithm.loss.plugin:
        plugin_loss(algorithm.loss.plugin)
    if "greedy_R" in advantage_settings(algorithm).estimator.needs and reward.reward_models:
        raise RecipeError(
            f"reward.{next(iter(reward.reward_models))} cannot be used with algorithm.advantage, whose "
            "greedy responses never reach the ranks: use another advantage or another reward"
        )


def _plugins(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Group, name and field of what a run takes from installed packages."""
    algorithm, rollout, reward = _sections(recipe)
    if algorithm.loss.plugin:
        yield POLICY_LOSSES, algorithm.loss.plugin.name, "algorithm.loss.plugin.name"
    if algorithm.advantage:
        yield ADVANTAGES, algorithm.advantage.name, "algorithm.advantage.name"
    if reward.plugin and rollout.generates:
        yield REWARDS, reward.plugin.name, "reward.plugin.name"


def changed_plugins(recipe: Recipe) -> list[str]:
    """Warnings of plugins whose package had another version when the run was last started."""
    starts = RunDirectory(recipe.output).starts()
    before = starts[-1].get("packages", {}) if starts else {}
    plugins = [find_plugin(*names) for names in _plugins(recipe)]
    return [
        f"{plugin.field}: {plugin.package} is installed, but {recipe.output} last used {old}"
        for plugin in plugins
        if (dist := plugin.entry.dist)
        and (old := before.get(package_name(dist.name))) not in (None, dist.version)
    ]


def _not_here(recipe: Recipe) -> Iterator[IsotrainError]:
    """Errors for what this machine lacks to log, and to make responses and scores (a replay has both)."""
    _, rollout, reward = _sections(recipe)
    try:
        check_loggers(recipe.observe.loggers)
    except RecipeError as problem:
        yield problem
    for group, name, field in _plugins(recipe):
        try:
            find_plugin(group, name, field)
        except RecipeError as problem:
            yield problem
    if not rollout.generates:
        return
    if rollout.engine == "vllm" and find_spec("vllm") is None:
        yield cannot_import(ModuleNotFoundError(name="vllm"), recipe.device.type)
    elif rollout.engine == "vllm":
        lacking = lacks_library() or (lacks_torchvision() if recipe.data.image_key else None)
        yield from [lacking] if lacking else []
    python = rollout.server_python
    if rollout.engine == "sglang" and python is None and find_spec("sglang") is None:
        yield RolloutError(
            "rollout.engine: sglang is not installed beside isotrain; create an environment for it "
            f"({install('sglang')}) and set rollout.server_python to its Python"
        )
    if rollout.engine == "sglang" and python is not None and which(python) is None:
        yield RolloutError(f"rollout.server_python: {python!r} is not an executable")
    if reward.math is not None and find_spec("math_verify") is None:
        yield RewardError(f"reward.math: math-verify is not installed; {install('math')}")
    yield from _no_episodes(rollout)
    if reward.code is not None:
        yield from _no_sandbox(reward.code)
    if reward.function is not None:
        try:
            function_file(reward.function.path)
        except RewardError as problem:
            yield problem
        else:
            check_function(reward.function.path)  # its text is as wrong on every machine


def _no_episodes(rollout: RolloutSection) -> Iterator[IsotrainError]:
    if (named := named_file(rollout)) is not None:
        path, field = named
        try:
            user_file.find(path, field, EpisodeError)
        except EpisodeError as problem:
            yield problem
        else:  # its text is as wrong on every machine
            user_file.check(path, "class" if rollout.environment else "function", field, EpisodeError)
    agent = rollout.agent
    if agent is None:
        return
    if find_spec("aiohttp") is None:
        yield EpisodeError(f"rollout.agent: aiohttp is not installed; {install('online')}")
    for field, program in (
        ("command", agent.command[0] if agent.command else None),
        ("python", agent.python),
    ):
        if program is not None and which(program) is None:
            yield EpisodeError(f"rollout.agent.{field}: {program!r} is not an executable")
            return
    if agent.verifiers is not None:
        try:
            find_environment(agent.verifiers, agent.python)
        except DataError as problem:
            yield EpisodeError(str(problem))


def _no_sandbox(code: CodeSection) -> Iterator[IsotrainError]:
    """Code of responses is never run without one."""
    sandbox = code_sandbox(code)
    try:
        sandbox.start()
    except SandboxError as problem:
        yield SandboxError(f"reward.code.sandbox: {problem}")
    finally:
        sandbox.close()


class UserFiles(NamedTuple):
    reward: str | None = None
    """Text of the file of `reward.function`."""
    episodes: str | None = None
    """Text of the file of `rollout.environment` or `rollout.agent`; a program has none, and it is empty."""


def read_user_files(recipe: Recipe) -> UserFiles:
    """None of them where nothing is generated."""
    rollout, reward = recipe.rollout, recipe.reward
    assert rollout is not None and reward is not None
    if not rollout.generates:
        return UserFiles()
    named = named_file(rollout)
    text = user_file.read(*named, EpisodeError) if named else None
    return UserFiles(reward_source(reward), "" if text is None and rollout.episodes else text)


def named_file(rollout: RolloutSection) -> tuple[str, str] | None:
    """`file.py:name` of the environment or agent, and the field that has it."""
    if rollout.environment is not None:
        return rollout.environment.path, interfaces.ENVIRONMENT_FIELD
    if rollout.agent is not None and rollout.agent.path is not None:
        return rollout.agent.path, interfaces.AGENT_FIELD
    return None
