"""Stand-ins of tests and benchmarks take the calls that the real parts take.

Most of them pass through `Any` or through a worker, where mypy does not see them. Their methods are read from
the source: importing all tests and benchmarks would start half of the project.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
WORKERS, ONLINE = "isotrain.cluster.workers", "isotrain.trainers.online"
CHECKPOINT = "isotrain.engine.checkpoint"
GROUP, TIMED = f"{WORKERS}:WorkerGroup", f"{WORKERS}:TimedCalls"
ENGINE, WORKER = "isotrain.rollout.base:RolloutEngine", f"{ONLINE}.rollout_worker:RolloutWorker"
COLLECTOR, MAKER = f"{ONLINE}.rollouts:Collector", f"{ONLINE}.rollouts:Maker"


class StandIn(NamedTuple):
    real: tuple[str, ...]
    """What it stands in for; some stand in for several at once."""
    own: tuple[str, ...] = ()
    """Methods that only its test calls."""


# By file and class.
STAND_INS = {
    "benchmarks/controller.py::Engine": StandIn((WORKER,)),
    "benchmarks/controller.py::Scorer": StandIn((f"{ONLINE}.reward_worker:RewardWorker",)),
    "benchmarks/episodes.py::InRounds": StandIn(("isotrain.environments.players:Player",)),
    "benchmarks/episodes.py::Timed": StandIn((ENGINE,)),
    "benchmarks/power/inline.py::Group": StandIn((GROUP, TIMED)),
    "benchmarks/power/inline.py::_Watch": StandIn(("isotrain.cluster.waiting:Watch",)),
    "benchmarks/simulated_here.py::_PromptLengths": StandIn(("simulate.lengths:Lengths",)),
    "benchmarks/work_stealing.py::Clock": StandIn((ENGINE,)),
    "tests/algorithms/test_sft.py::FixedHead": StandIn(("isotrain.algorithms.sft:Head",)),
    "tests/cluster/test_replaceable.py::Group": StandIn((GROUP, TIMED)),
    "tests/engine/test_storage.py::Breaks": StandIn((f"{CHECKPOINT}.tensor_file:ByteSink",), ("close",)),
    "tests/engine/test_tensor_file.py::Nowhere": StandIn((f"{CHECKPOINT}.tensor_file:ByteSink",)),
    "tests/observe/test_loggers.py::Fragile": StandIn(("isotrain.observe.loggers:Logger",)),
    "tests/test_simulated_runs.py::OneLong": StandIn(("simulate.lengths:Lengths",)),
    "tests/trainers/online/hand_made_step.py::Here": StandIn((GROUP, TIMED)),
    "tests/trainers/online/stand_ins.py::StandInGroup": StandIn((GROUP, WORKER), ("respond",)),
    "tests/trainers/online/stand_ins.py::StandInCollector": StandIn((COLLECTOR,)),
    "tests/trainers/online/test_batches.py::Maker": StandIn((MAKER,)),
    "tests/trainers/online/test_batches.py::Scripted": StandIn((COLLECTOR,)),
    "tests/trainers/online/test_controller.py::Counting": StandIn((GROUP,)),
    "tests/trainers/online/test_controller.py::LongWinded": StandIn((ENGINE,)),
    "tests/trainers/online/test_engine_loop.py::Forgetful": StandIn((ENGINE,)),
    "tests/trainers/online/test_engine_loop.py::Steps": StandIn((ENGINE,), ("step", "wait_until")),
    "tests/trainers/online/test_episodes.py::Quick": StandIn((ENGINE,), ("asked",)),
    "tests/trainers/online/test_prompt_queue.py::Here": StandIn(
        (f"{WORKERS}:WorkerPeer", f"{WORKERS}:PeerReply")
    ),
    "tests/trainers/online/test_recovery.py::Ranks": StandIn((GROUP, TIMED)),
    "tests/trainers/online/test_replay.py::Inventor": StandIn((MAKER,), ("make",)),
    "tests/trainers/online/test_shared_output.py::Ranks": StandIn((GROUP,)),
    "tests/trainers/online/test_weight_sync.py::Buffering": StandIn(
        (GROUP, TIMED, f"{ONLINE}.engines:Engines")
    ),
    "tests/trainers/online/test_weight_sync.py::Late": StandIn((GROUP, f"{ONLINE}.engines:Engines")),
    "tests/trainers/online/test_weight_sync.py::Rehearsing": StandIn((GROUP, TIMED), ("submit", "result")),
    "tests/trainers/online/test_weight_updates.py::FaultyWorker": StandIn((WORKER,), ("die",)),
    "tests/trainers/online/test_worker_groups.py::Group": StandIn((GROUP, TIMED)),
}
# A class with one of these stands in for something; programs of other projects have them by chance.
TELLTALE = {"generate", "logps", "update_weights", "submit_to", "call_each", "call_on", "within", "collect"}
OTHER_PROJECTS = ("tests/device/npusim/site/", "tests/rollout/sglang_recorder/")


@cache
def classes() -> dict[str, ast.ClassDef]:
    files = [path for part in ("tests", "benchmarks") for path in sorted((ROOT / part).rglob("*.py"))]
    return {
        f"{name}::{node.name}": node
        for path in files
        if not (name := path.relative_to(ROOT).as_posix()).startswith(OTHER_PROJECTS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def methods(node: ast.ClassDef) -> dict[str, ast.arguments]:
    functions = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name: function.args for function in functions}


def parameters(arguments: ast.arguments) -> list[Parameter]:
    """All but `self`, as `inspect` would give them."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    made = [
        Parameter(
            arg.arg, Parameter.POSITIONAL_OR_KEYWORD, default=... if i >= first_default else Parameter.empty
        )
        for i, arg in enumerate(positional)
    ][1:]
    if arguments.vararg:
        made.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        made.append(
            Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...)
        )
    if arguments.kwarg:
        made.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return made


def refused_calls(real: list[Parameter], stand_in: list[Parameter]) -> Iterator[str]:
    """Why a call that the real method takes would be an error of the stand-in's, or mean something else."""
    places, any_place = _positional(stand_in), _has(stand_in, Parameter.VAR_POSITIONAL)
    keywords = {p.name: p for p in stand_in if p.kind == Parameter.KEYWORD_ONLY}
    any_keyword = _has(stand_in, Parameter.VAR_KEYWORD)
    for i, parameter in enumerate(_positional(real)):
        if i >= len(places):
            if not any_place:
                yield f"it does not take `{parameter.name}`"
        elif places[i].name != parameter.name:
            yield f"`{places[i].name}` is called `{parameter.name}`"
        elif parameter.default is not Parameter.empty and places[i].default is Parameter.empty:
            yield f"`{parameter.name}` may be left out"
    # What a group passes on to its workers, `*args`, may have names in a stand-in.
    beyond = [] if _has(real, Parameter.VAR_POSITIONAL) else places[len(_positional(real)) :]
    given = {p.name for p in real}
    for extra in [*beyond, *keywords.values()]:
        if extra.name not in given and extra.default is Parameter.empty:
            yield f"nobody gives it `{extra.name}`"
    for parameter in real:
        if parameter.kind == Parameter.KEYWORD_ONLY and parameter.name not in keywords and not any_keyword:
            yield f"it does not take `{parameter.name}`"


def _positional(some: list[Parameter]) -> list[Parameter]:
    return [p for p in some if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]


def _has(some: list[Parameter], kind: object) -> bool:
    return any(p.kind == kind for p in some)


def resolve(name: str) -> type:
    module, _, attribute = name.partition(":")
    resolved = getattr(import_module(module), attribute)
    assert isinstance(resolved, type)
    return resolved


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_takes_the_calls_of_the_real_part(name: str) -> None:
    stand_in = STAND_INS[name]
    reals = [resolve(real) for real in stand_in.real]
    compared = 0
    for method, arguments in methods(classes()[name]).items():
        if method.startswith("_") or method in stand_in.own:
            continue
        holders = [real for real in reals if hasattr(real, method)]
        assert holders, f"{name}.{method}: {' and '.join(stand_in.real)} have no such method"
        for real in holders:
            signature = list(inspect.signature(getattr(real, method)).parameters.values())[1:]
            assert not (why := list(refused_calls(signature, parameters(arguments)))), (
                f"{name}.{method}: {why}"
            )
            compared += 1
    assert compared, f"{name} has no method of {stand_in.real}"
    assert set(stand_in.own) <= set(methods(classes()[name]))


def test_every_stand_in_is_compared() -> None:
    found = {name for name, node in classes().items() if TELLTALE & set(methods(node))}
    assert found - set(STAND_INS) == set(), "give each a line in STAND_INS"
    assert len(found) > 15  # the names above are those of today


def test_a_worker_with_another_engine_is_made_as_the_real_one() -> None:
    """A subclass that sets the attributes of today itself lacks those of tomorrow."""
    own = {
        name: initializer
        for name, node in classes().items()
        if {ast.unparse(base) for base in node.bases} & {"RolloutWorker", "RewardWorker", "PolicyRank"}
        for initializer in node.body
        if isinstance(initializer, ast.FunctionDef) and initializer.name == "__init__"
    }
    assert own
    for name, initializer in own.items():
        assert "super().__init__(" in ast.unparse(initializer), name


@pytest.mark.parametrize(
    ("stand_in", "why"),
    [
        ("self, store, prompts, n, version=0", []),
        ("self, *args", []),
        ("self, store, prompts, n", ["it does not take `version`"]),
        ("self, store, prompts, n, version", ["`version` may be left out"]),
        (
            "self, prompts, store, n, version=0",
            ["`prompts` is called `store`", "`store` is called `prompts`"],
        ),
        ("self, store, prompts, n, version=0, *, more", ["nobody gives it `more`"]),
    ],
)
def test_the_comparison(stand_in: str, why: list[str]) -> None:
    def real(store: str, prompts: str, n: int, version: int = 0) -> None: ...

    function = ast.parse(f"def f({stand_in}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    signature = list(inspect.signature(real).parameters.values())
    assert list(refused_calls(signature, parameters(function.args))) == why
