"""Time of `isotrain evaluate` over that of a bare loop over vLLM: generation and scores. Lower is better.

SmolLM2-135M-Instruct in bfloat16 on sums of GSM8K. Processes take turns on the same rows with the same seeds.
`bare` calls `vllm.LLM.generate` on all token ids at once, with the settings that we start the engine with,
decodes the responses and compares the answers. `evaluate` is what the command runs: the engine, scores in a
thread meanwhile, and a line on disk for each row. Loading the model is in neither.

`ratio` is the median over the turns of the time of `evaluate` over that of `bare`; `scores_equal` says that
each response of each row has the same score in both.

    python benchmarks/evaluate_overhead.py [--turns 7] [--rows 32] [--responses 4] [--tokens 64]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import bench
from smollm2 import smollm2
from turns import Measured, Turns, take_turns

GOAL = 1.05
Answer = Callable[[int], tuple[float, list[list[float]]]]
"""From a turn to seconds, and scores by row."""


def make_recipe(options: argparse.Namespace, directory: Path) -> Any:
    from isotrain.data.prepare.gsm8k import prepare_gsm8k_sums
    from isotrain.tools.evaluate.recipe import Options, evaluation_recipe

    prepare_gsm8k_sums(bench.gsm8k(), directory)
    overrides = [
        f"rollout.max_tokens={options.tokens}",
        "rollout.kv_cache_gb=0.5",
        f"model.dtype={bench.DTYPE}",
        "device.type=cpu",
    ]
    asked = Options(str(directory / "train.jsonl"), "gsm8k", options.responses, 1.0)
    return evaluation_recipe(str(options.model or smollm2()), asked, overrides, directory)


def engine_of(recipe: Any, longest: int) -> Any:
    from isotrain.device.detect import choose_device
    from isotrain.rollout.build import build_rollout

    return build_rollout(
        recipe.rollout,
        recipe.model.path,
        recipe.model.dtype,
        device=choose_device("cpu"),
        max_prompt=longest,
        seed=recipe.seed,
        name="engine",
    )


def evaluated(recipe: Any, engine: Any, questions: list[Any], rows: int, directory: Path) -> Answer:
    from isotrain.models.files import load_tokenizer
    from isotrain.rewards.build import build_scorer
    from isotrain.tools.evaluate.evaluate import Scoring, generate_and_score
    from isotrain.tools.evaluate.log import ItemLog

    tokenizer, scorer = load_tokenizer(Path(recipe.model.path)), build_scorer(recipe.reward, None)
    scorer.start()

    def answer(turn: int) -> tuple[float, list[list[float]]]:
        chosen, out = questions[turn * rows : (turn + 1) * rows], directory / f"turn-{turn}"
        out.mkdir()
        started = time.perf_counter()
        with ItemLog(out) as log:
            scoring = Scoring(scorer, tokenizer, recipe.reward.answer_key, chosen, log, lambda _: None)
            generate_and_score(engine, recipe, chosen, scoring)
        seconds = time.perf_counter() - started
        items = sorted(log.items, key=lambda item: item.row)
        return seconds, [[response.score for response in item.responses] for item in items]

    return answer


def bare(recipe: Any, engine: Any, questions: list[Any], rows: int) -> Answer:
    from vllm import SamplingParams

    from isotrain.data.formats import value_at
    from isotrain.data.trajectory import sample_seed
    from isotrain.models.files import load_tokenizer
    from isotrain.rewards.mathematics import gsm8k_score
    from isotrain.rollout.base import stop_tokens

    tokenizer, n = load_tokenizer(Path(recipe.model.path)), recipe.rollout.validation.n
    ends = list(stop_tokens(Path(recipe.model.path)))

    def answer(turn: int) -> tuple[float, list[list[float]]]:
        chosen = questions[turn * rows : (turn + 1) * rows]
        started = time.perf_counter()
        parameters = [
            SamplingParams(
                temperature=recipe.rollout.validation.temperature,
                seed=sample_seed(recipe.seed, -1 - question.row, sample),
                max_tokens=recipe.rollout.max_tokens,
                stop_token_ids=ends,
                logprobs=0,
                detokenize=False,
                flat_logprobs=True,
            )
            for question in chosen
            for sample in range(n)
        ]
        prompts = [{"prompt_token_ids": q.prompt_P.tolist()} for q in chosen for _ in range(n)]
        outputs = engine._llm.generate(prompts, parameters, use_tqdm=False)
        texts = tokenizer.batch_decode(
            [output.outputs[0].token_ids for output in outputs],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        scores = [
            [
                gsm8k_score(text, str(value_at(question.values, recipe.reward.answer_key)))
                for text in texts[number * n : (number + 1) * n]
            ]
            for number, question in enumerate(chosen)
        ]
        return time.perf_counter() - started, scores

    return answer


def run_side(options: argparse.Namespace) -> None:
    from isotrain.tools.evaluate.evaluate import read_questions

    directory = Path(tempfile.mkdtemp())
    try:
        recipe = make_recipe(options, directory)
        needed = (options.turns + 1) * options.rows
        questions = list(islice(read_questions(recipe, Path(recipe.model.path)), needed))
        if len(questions) < needed:
            raise SystemExit(f"{needed} rows are needed, {len(questions)} are there")
        engine = engine_of(
            recipe, max(len(question.prompt_P) for question in questions if question.prompt_P is not None)
        )
        sides = {
            "bare": lambda: bare(recipe, engine, questions, options.rows),
            "evaluate": lambda: evaluated(recipe, engine, questions, options.rows, directory),
        }
        answer, turns = sides[options.side](), Turns(1)
        for turn in range(options.turns + 1):
            seconds, scores = answer(turn)
            turns.after_step(
                seconds=seconds,
                checksum=zlib.crc32(json.dumps(scores).encode()),
                responses=sum(map(len, scores)),
                correct=sum(map(sum, scores)),
            )
        engine.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def tell(results: Measured) -> None:
    rows = {side: [turn["rows"][0] for turn in told] for side, told in results.items()}
    pairs = list(zip(rows["evaluate"], rows["bare"], strict=True))
    ratio = bench.spread([ours["seconds"] / theirs["seconds"] for ours, theirs in pairs])
    equal = all(ours["checksum"] == theirs["checksum"] for ours, theirs in pairs)
    bench.report(
        "evaluate_overhead",
        ratio["median"],
        goal=GOAL,
        met=ratio["median"] <= GOAL and equal,
        ratios=ratio,
        scores_equal=equal,
        responses=sum(ours["responses"] for ours, _ in pairs),
        correct=sum(ours["correct"] for ours, _ in pairs),
        seconds={side: bench.spread([row["seconds"] for row in each]) for side, each in rows.items()},
    )


def main() -> None:
    parser = bench.Options(__doc__, turns=1, rows=4, responses=2, tokens=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", type=Path, help="another model than SmolLM2-135M-Instruct")
    parser.add_argument("--side", choices=["bare", "evaluate"], help=argparse.SUPPRESS)
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # read when torch is imported
    if options.side:
        return run_side(options)
    take_turns(["bare", "evaluate"], options.turns, tell)


if __name__ == "__main__":
    main()
