"""Time of responses through isotrain's rollout layer over that of the engine alone. Lower is better.

SmolLM2-135M-Instruct in bfloat16. Processes take turns on the same prompts with the same seeds. `alone` calls
`vllm.LLM.generate` on token ids, or posts them to an SGLang server as one request (`--engine sglang`), with
the settings that we start the engine with. `layer` is a controller with a rollout worker in a private Ray
cluster: the worker turns outputs into trajectories and puts them into the object store group by group, and
the controller collects the handles, as in training but without rewards. `defaults`, for vLLM, is vLLM with
nothing set but type, length and size of the cache (which by itself takes the machine's memory), and so shows
what our settings cost. It has no seeds: with them vLLM's own sampler ends there with "CPU Generator does not
use offset".

`ratio` is the median over the turns of the layer's time over that of `alone`, `over_defaults` of both sides'
time for a token over that of `defaults`. `responses_equal` says that `layer` and `alone` wrote the same
tokens in all turns; `fetch_s` is the time it takes afterwards to fetch all trajectories from the store.

    python benchmarks/rollout_overhead.py [--turns 7] [--prompts 32] [--responses 4] [--tokens 64]
    python benchmarks/rollout_overhead.py --engine sglang --server-python .venv-sglang/bin/python
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import bench
import numpy as np
import numpy.typing as npt
from smollm2 import smollm2
from turns import Measured, Turns, take_turns

GOAL = 1.05


def sides(engine: str) -> list[str]:
    # With its defaults vLLM compiles for minutes.
    return ["alone", "layer"] if bench.QUICK or engine != "vllm" else ["alone", "layer", "defaults"]


class Work(NamedTuple):
    """What both sides do in a turn."""

    recipe: Any
    prompts: int

    def prompt_requests(self, turn: int) -> list[Any]:
        from isotrain.trainers.online.messages import PromptRequest

        return [
            PromptRequest(prompt_index, prompt_index)
            for prompt_index in range(turn * self.prompts, (turn + 1) * self.prompts)
        ]

    def wanted(self, turn: int) -> list[tuple[int, int]]:
        """Place and sample of each response."""
        return [
            (prompt_index, sample)
            for prompt_index, _ in self.prompt_requests(turn)
            for sample in range(self.recipe.rollout.n)
        ]


class Outcome(NamedTuple):
    seconds: float
    responses: dict[tuple[int, int], npt.NDArray[np.int32]]
    """By place and sample."""
    fetch: float = 0.0


def make_recipe(options: argparse.Namespace, directory: Path) -> Any:
    from isotrain.data.prepare.gsm8k import prepare_gsm8k_sums
    from isotrain.recipe.schema import Recipe

    prepare_gsm8k_sums(bench.gsm8k(), directory)
    return Recipe.model_validate(
        {
            "name": "rollout-overhead",
            "output": str(directory / "run"),
            "model": {"path": str(options.model or smollm2()), "dtype": bench.DTYPE},
            "data": {
                "train": str(directory / "train.jsonl"),
                "max_length": 96,
                "tokens_per_micro_batch": 96 + options.tokens,
            },
            "algorithm": {"name": "grpo"},
            "rollout": {
                "engine": options.engine,
                "server_python": options.server_python,
                "n": options.responses,
                "max_tokens": options.tokens,
                "kv_cache_gb": 0.5,
                "load_format": "safetensors",
            },
            "reward": {"gsm8k": {}},
        }
    )


def longest_prompt(recipe: Any) -> int:
    from isotrain.trainers.build import TRAIN, open_prompts

    return int(open_prompts(recipe)[TRAIN].lengths.max())


@contextmanager
def engine_alone(work: Work) -> Iterator[Callable[[int], Outcome]]:
    """The engine as we start it, and so certain to have the same settings, asked without us."""
    from isotrain.device.detect import choose_device
    from isotrain.rollout.build import build_rollout
    from isotrain.rollout.vllm import VllmEngine

    recipe = work.recipe
    engine = build_rollout(
        recipe.rollout,
        recipe.model.path,
        recipe.model.dtype,
        device=choose_device("cpu"),
        max_prompt=longest_prompt(recipe),
        seed=recipe.seed,
        name="alone",
    )
    try:
        if isinstance(engine, VllmEngine):
            yield responses_of(engine._llm, work)
        else:
            yield responses_of_server(engine, work)
    finally:
        engine.close()


@contextmanager
def vllm_defaults(work: Work) -> Iterator[Callable[[int], Outcome]]:
    import vllm

    recipe = work.recipe
    longest = longest_prompt(recipe) + recipe.rollout.max_tokens
    llm: Any = vllm.LLM(
        recipe.model.path,
        dtype=recipe.model.dtype,
        max_model_len=longest,
        kv_cache_memory_bytes=int(recipe.rollout.kv_cache_gb * 2**30),
    )
    try:
        yield responses_of(llm, work, seeded=False)
    finally:
        llm.llm_engine.engine_core.shutdown()  # its processes outlive this one otherwise


def responses_of(llm: Any, work: Work, seeded: bool = True) -> Callable[[int], Outcome]:
    from vllm import SamplingParams

    from isotrain.data.trajectory import sample_seed
    from isotrain.rollout.base import stop_tokens
    from isotrain.trainers.build import TRAIN, open_prompts

    recipe = work.recipe
    store = open_prompts(recipe)[TRAIN]

    def response(turn: int) -> Outcome:
        wanted = work.wanted(turn)
        prompts = [{"prompt_token_ids": store[prompt_index].tokens_P.tolist()} for prompt_index, _ in wanted]
        seeds = [sample_seed(recipe.seed, prompt_index, sample) for prompt_index, sample in wanted]
        started = time.perf_counter()
        parameters = [
            SamplingParams(
                temperature=recipe.rollout.temperature,
                seed=seed if seeded else None,
                max_tokens=recipe.rollout.max_tokens,
                logprobs=0,
                stop_token_ids=list(stop_tokens(Path(recipe.model.path))),
                detokenize=False,
                flat_logprobs=True,
            )
            for seed in seeds
        ]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - started
        responses = [np.asarray(output.outputs[0].token_ids, np.int32) for output in outputs]
        return Outcome(seconds, dict(zip(wanted, responses, strict=True)))

    return response


def responses_of_server(engine: Any, work: Work) -> Callable[[int], Outcome]:
    """SGLang takes a batch in one request, which is as little as one can ask of it."""
    from isotrain.data.trajectory import sample_seed
    from isotrain.rollout.base import Request, Sampling, stop_tokens
    from isotrain.rollout.sglang_messages import ask_response
    from isotrain.trainers.build import TRAIN, open_prompts

    recipe = work.recipe
    sampling = Sampling(recipe.rollout.max_tokens, recipe.rollout.temperature)
    store, ends = open_prompts(recipe)[TRAIN], list(stop_tokens(Path(recipe.model.path)))

    def response(turn: int) -> Outcome:
        wanted = work.wanted(turn)
        requests = [
            Request(place, place, sample, sample_seed(recipe.seed, place, sample), store[place].tokens_P)
            for place, sample in wanted
        ]
        asked = [ask_response(request, sampling, ends) for request in requests]
        each = {field: [one[field] for one in asked] for field in ("input_ids", "sampling_params")}
        body = {**each, "return_logprob": True}
        started = time.perf_counter()
        replies = engine._exchange.post("/generate", body, None)
        seconds = time.perf_counter() - started
        responses = [np.asarray(reply["output_ids"], np.int32) for reply in replies]
        return Outcome(seconds, dict(zip(wanted, responses, strict=True)))

    return response


@contextmanager
def through_ray(work: Work) -> Iterator[Callable[[int], Outcome]]:
    from isotrain.cluster.connect import join_cluster
    from isotrain.cluster.objects import fetch
    from isotrain.cluster.placement import Demand, place
    from isotrain.cluster.workers import Member, WorkerGroup, next_item, wait_any
    from isotrain.device.detect import choose_device
    from isotrain.recipe.load import resolved
    from isotrain.recipe.online import ClusterSection
    from isotrain.rollout.base import Sampling
    from isotrain.trainers.build import TRAIN
    from isotrain.trainers.online.rollout_worker import RolloutWorker

    recipe, device = work.recipe, choose_device("cpu")
    sampling = Sampling(recipe.rollout.max_tokens, recipe.rollout.temperature)

    def response(turn: int) -> Outcome:
        prompt_requests, handles = work.prompt_requests(turn), []
        started = time.perf_counter()
        stream = group.stream(0, RolloutWorker.generate, TRAIN, prompt_requests, recipe.rollout.n, sampling)
        while True:
            wait_any(group.watch, [stream])
            try:
                handles.append(next_item(group, stream)[1])
            except StopIteration:
                break
        collected = time.perf_counter()
        trajectories = [trajectory for responses in fetch(handles) for trajectory in responses or ()]
        fetched = time.perf_counter()
        responses = {(t.prompt_index, t.sample): t.response_N for t in trajectories}
        return Outcome(collected - started, responses, fetched - collected)

    with (
        join_cluster(ClusterSection(address="local"), device) as joined,
        place(joined, device, Demand(ranks=1, engines=1), 600.0) as placement,
    ):
        member = Member(
            (resolved(recipe), "rollout engine 0"), device.rank_environment(1), placement.engines[0]
        )
        with WorkerGroup("rollout engine", RolloutWorker, [member]) as group:
            group.call(RolloutWorker.start)
            yield response


def checksum(responses: dict[tuple[int, int], npt.NDArray[np.int32]]) -> int:
    sum_ = 0
    for _, response_N in sorted(responses.items()):
        sum_ = zlib.crc32(response_N.tobytes(), sum_)
    return sum_


def run_side(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Work(make_recipe(options, Path(directory)), options.prompts)
        started = {"alone": engine_alone, "layer": through_ray, "defaults": vllm_defaults}[options.side]
        with started(work) as response:
            turns = Turns(1)
            for turn in range(options.turns + 1):
                outcome = response(turn)
                turns.after_step(
                    seconds=outcome.seconds,
                    fetch_s=outcome.fetch,
                    tokens=sum(map(len, outcome.responses.values())),
                    checksum=checksum(outcome.responses),
                )


def tell(results: Measured) -> None:
    rows = {side: [turn["rows"][0] for turn in told] for side, told in results.items()}

    def column(side: str, name: str) -> Sequence[float]:
        return [row[name] for row in rows[side]]

    def over(own: Sequence[float], others: Sequence[float]) -> dict[str, float]:
        return bench.spread([a / b for a, b in zip(own, others, strict=True)])

    def seconds_a_token(side: str) -> list[float]:
        return [a / b for a, b in zip(column(side, "seconds"), column(side, "tokens"), strict=True)]

    ratio = over(column("layer", "seconds"), column("alone", "seconds"))
    equal = column("layer", "checksum") == column("alone", "checksum")
    bench.report(
        "rollout_overhead",
        ratio["median"],
        goal=GOAL,
        met=ratio["median"] <= GOAL and equal,
        ratios=ratio,
        over_defaults={
            side: over(seconds_a_token(side), seconds_a_token("defaults"))
            for side in ("layer", "alone")
            if "defaults" in results
        },
        responses_equal=equal,
        seconds={side: bench.spread(column(side, "seconds")) for side in results},
        fetch_s=bench.spread(column("layer", "fetch_s")),
        tokens=bench.spread(column("layer", "tokens")),
        tokens_per_s={
            side: bench.spread([1 / seconds for seconds in seconds_a_token(side)]) for side in results
        },
        processor_s={side: bench.spread([turn["processor_s"] for turn in results[side]]) for side in results},
        peak_gib={side: round(told[-1]["peak_bytes"] / 2**30, 2) for side, told in results.items()},
    )


def main() -> None:
    parser = bench.Options(__doc__, turns=1, prompts=4, responses=2, tokens=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", type=Path, help="another model than SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--server-python", help="with sglang: the Python of its environment")
    parser.add_argument("--side", choices=["alone", "layer", "defaults"], help=argparse.SUPPRESS)
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # read when torch is imported
    if options.side:
        return run_side(options)
    take_turns(sides(options.engine), options.turns, tell)


if __name__ == "__main__":
    main()
