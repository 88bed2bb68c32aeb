"""`isotrain evaluate`, `score` and `chat`: what a model can do, and what a reward says of responses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from isotrain.children import module_command
from isotrain.cli.arguments import AsJson, Overrides, RecipeName
from isotrain.errors import DataError, RecipeError, RolloutError, one_line
from isotrain.terminal import rich_console, visible

if TYPE_CHECKING:
    from isotrain.tools.evaluate.chat import Chat
    from isotrain.tools.evaluate.recipe import Options
    from isotrain.tools.evaluate.score import ScoredRow

Target = Annotated[
    str, typer.Argument(metavar="MODEL|RUN", help="A model directory, a Hub name, or a run directory.")
]
DataOption = Annotated[
    str | None, Option("--data", metavar="FILE", help="The rows; by default the run's validation rows.")
]
RewardOption = Annotated[
    str | None,
    Option("--reward", help="gsm8k, math, choice, code or FILE.py:FUNCTION; by default the run's reward."),
]


def evaluate(
    target: Target,
    overrides: Overrides = None,
    data: DataOption = None,
    reward: RewardOption = None,
    n: Annotated[int | None, Option("-n", min=1, help="Responses to each row.")] = None,
    temperature: Annotated[
        float | None, Option(min=0, help="0 is greedy: the default for one response, otherwise 1.")
    ] = None,
    k: Annotated[str, Option("-k", metavar="K,K", help="Which pass@k; by default the powers of 2.")] = "",
    correct: Annotated[float, Option(help="The score from which a response is correct, for pass@k.")] = 1.0,
    limit: Annotated[int | None, Option(min=1, help="Only so many rows, from the first on.")] = None,
    steps: Annotated[
        str | None, Option(metavar="N,N|all", help="Checkpoints of the run; by default the newest.")
    ] = None,
    against: Annotated[
        str | None, Option(metavar="MODEL|RUN", help="A second model, compared row by row.")
    ] = None,
    out: Annotated[Path | None, Option(help="Directory of results; by default evaluations/NAME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate responses to a data set, score them, and say how sure the scores are.

    Run the same command again to resume. Exit codes: 0 if each row was answered and scored, 3 if some were
    not (they are counted), 1 for an error.

    Examples:

        isotrain evaluate runs/gsm8k-grpo --steps all

        isotrain evaluate models/a --against models/b --data test.jsonl --reward math -n 8

        isotrain evaluate models/a rollout.engine=hf model.dtype=float32 --data mmlu.parquet --reward choice
    """
    from isotrain.tools.evaluate.recipe import Options, checkpoint_steps, is_run

    options = Options(data, reward, n, temperature, limit)
    chosen = _steps(steps, target, checkpoint_steps) if steps is not None else [None]
    if against is not None and len(chosen) > 1:
        raise RecipeError("--against compares two models: give --steps one step")
    if steps is not None and not is_run(target):
        raise RecipeError(f"--steps: {target} is no run directory")
    directory = out or Path("evaluations") / Path(target.rstrip("/")).name
    if len(chosen) == 1 and against is None:
        results = _evaluate_one(target, chosen[0], options, overrides or [], directory, _ks(k), correct)
        _print({_name(target, chosen[0]): results}, directory, as_json)
        return
    # A process for each model: no engine gives back all that it has taken.
    columns: dict[str, Path] = {}
    for step in chosen:
        name = _name(target, step) if against is not None else f"step {step}"
        columns[name] = directory / ("first" if against is not None else f"step-{step}")
    jobs = [(target, step, path) for step, path in zip(chosen, columns.values(), strict=True)]
    if against is not None:
        second = _name(against, None)
        columns[second if second not in columns else f"{second} (second)"] = directory / "second"
        jobs.append((against, None, directory / "second"))
    common = _arguments(options, overrides or [], k, correct)
    for model, step, path in jobs:
        at = [] if step is None else ["--steps", str(step)]
        # What it prints is progress: results are printed below.
        command = module_command("isotrain.cli.main", "evaluate", model, *common, *at, "--out", str(path))
        code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if code not in (0, 3):
            raise typer.Exit(code if code > 0 else 1)
    _print_several(columns, chosen, directory, target, against, as_json)


def _name(target: str, step: int | None) -> str:
    name = Path(target.rstrip("/")).name
    return name if step is None else f"{name}, step {step}"


def _steps(text: str, target: str, known: Any) -> list[int | None]:
    steps: list[int | None] = known(target) if text == "all" else [_number(part) for part in text.split(",")]
    if not steps:
        raise RecipeError(f"--steps: {target} has no complete checkpoint")
    return list(dict.fromkeys(steps))


def _number(text: str) -> int:
    if not text.strip().isdecimal():
        raise RecipeError(f"{text!r} is no number; write numbers with commas between them")
    return int(text)


def _ks(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")] if text else []


def _arguments(options: Options, overrides: Sequence[str], k: str, correct: float) -> list[str]:
    values = {
        "--data": options.data,
        "--reward": options.reward,
        "-n": options.n,
        "--temperature": options.temperature,
        "--limit": options.limit,
        "-k": k or None,
        "--correct": correct,
    }
    named = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    return [*overrides, *named]


def _evaluate_one(
    target: str,
    step: int | None,
    options: Options,
    overrides: Sequence[str],
    directory: Path,
    ks: Sequence[int],
    correct: float,
) -> dict[str, Any]:
    from isotrain.tools.evaluate.evaluate import evaluate as run
    from isotrain.tools.evaluate.recipe import evaluation_recipe
    from isotrain.tools.evaluate.results import results_of, write_results

    recipe = evaluation_recipe(target, options, overrides, directory)
    assert recipe.rollout is not None
    n = recipe.rollout.validation.n
    if wrong := [number for number in ks if not 1 <= number <= n]:
        raise RecipeError(f"-k {wrong[0]}: pass@k is estimated from -n {n} responses; write 1 to {n}")
    items = run(recipe, target, step, directory, lambda line: typer.echo(line, err=True))
    results = results_of(items, ks, correct)
    write_results(directory, results)
    return results


def _print(columns: Mapping[str, Mapping[str, Any]], directory: Path, as_json: bool) -> None:
    from isotrain.tools.evaluate.results import INCOMPLETE, is_complete, table_of

    if as_json:
        typer.echo(json.dumps(dict(columns), ensure_ascii=False))
    else:
        rich_console().print(table_of(columns))
        typer.echo(f"wrote {directory}")
    incomplete = {name: results for name, results in columns.items() if not is_complete(results)}
    for name, results in incomplete.items():
        parts = results["results"].values()
        detail = next(filter(None, (part["first_failure"] for part in parts)), "prompts are too long")
        typer.echo(f"warning: {name}: some rows or responses have no score: {detail}", err=True)
    if incomplete:
        raise typer.Exit(INCOMPLETE)


def _print_several(
    columns: Mapping[str, Path],
    steps: Sequence[int | None],
    directory: Path,
    target: str,
    against: str | None,
    as_json: bool,
) -> None:
    from isotrain.observe.run_directory import write_atomically
    from isotrain.tools.evaluate.log import RESPONSES, read_items
    from isotrain.tools.evaluate.results import compare_items, comparison_line, draw_curve, read_results

    results = {name: read_results(path) for name, path in columns.items()}
    if against is not None:
        first, second = (read_items(path / RESPONSES) for path in columns.values())
        comparisons = compare_items(first, second)
        facts = {name: comparison.as_json() for name, comparison in comparisons.items()}
        write_atomically(directory / "comparison.json", json.dumps(facts, indent=2) + "\n")
        for name, comparison in comparisons.items():
            typer.echo(comparison_line(name, comparison), err=as_json)
    else:
        by_step = {step: each for step, each in zip(steps, results.values(), strict=True) if step is not None}
        draw_curve(directory / "curve.png", _name(target, None), by_step)
    _print(results, directory, as_json)


def score(
    recipe: RecipeName,
    data: Annotated[str, typer.Argument(metavar="FILE", help="Rows with responses, or responses.jsonl.")],
    overrides: Overrides = None,
    key: Annotated[
        str, Option("--response-key", help="Column of the response, or of a list of them.")
    ] = "response",
    as_json: Annotated[bool, Option("--json", help="One JSON object per row and line.")] = False,
) -> None:
    """Apply a recipe's reward to rows that have responses, to see what a reward says.

    Exit codes: 0 if each response has a score, 3 if some have none, 1 for an error.

    Examples:

        isotrain score my-recipe.yaml responses.jsonl

        isotrain score my-recipe.yaml evaluations/model/responses.jsonl reward.function.path=new.py:score
    """
    from isotrain.api import load_recipe
    from isotrain.tools.evaluate.recipe import check_reward
    from isotrain.tools.evaluate.results import INCOMPLETE
    from isotrain.tools.evaluate.score import score_rows

    checked = load_recipe(recipe, *(overrides or []))
    if checked.reward is None:
        raise RecipeError(f"{recipe} has no reward section; add one such as reward.gsm8k={{}}")
    check_reward(checked)
    total, count, failed, rows = 0.0, 0, 0, 0
    for row in score_rows(checked.reward, data, key):
        rows += 1
        for result in row.scores:
            failed += result.failure is not None
            total, count = total + result.score, count + 1
        typer.echo(json.dumps(row.as_json(), ensure_ascii=False) if as_json else _score_line(row))
    if not rows:
        raise DataError(f"{data}: no rows")
    summary = (
        f"{rows:,} rows, {count:,} responses, mean score {total / count:.4f}, {failed:,} without a score"
    )
    typer.echo(summary, err=as_json)
    if failed:
        raise typer.Exit(INCOMPLETE)


def _score_line(row: ScoredRow) -> str:
    scores = " ".join(
        f"{scored.score:g}" if scored.failure is None else f"{scored.failure} ({scored.detail})"
        for scored in row.scores
    )
    return one_line(f"{row.origin}: {scores}", limit=1000)


def chat(
    target: Target,
    step: Annotated[int | None, Option(min=0, help="The checkpoint of a run; the newest by default.")] = None,
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, Option(min=1, help="Longest reply.")] = 1024,
    dtype: Annotated[
        str | None, Option(help="bfloat16, float16 or float32; by default the run's, or bfloat16.")
    ] = None,
    device: Annotated[str, Option(help="Device; auto takes the best one.")] = "auto",
    seed: Annotated[int, Option(min=0)] = 0,
) -> None:
    """Talk to a model or to a checkpoint of a run, token by token.

    /clear forgets the conversation; an empty line or Ctrl-D ends it. Ctrl-C ends a reply.

    Examples:

        isotrain chat runs/tiny-sft

        isotrain chat Qwen/Qwen2.5-0.5B-Instruct --temperature 0
    """
    import tempfile

    from isotrain.engine.export import export_run
    from isotrain.models.files import model_directory
    from isotrain.observe.run_directory import RunDirectory
    from isotrain.recipe.load import load_resolved
    from isotrain.rollout.base import Sampling
    from isotrain.tools.evaluate.chat import Chat
    from isotrain.tools.evaluate.recipe import is_run

    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise RecipeError(f"--dtype {dtype}: write bfloat16, float16 or float32")
    with tempfile.TemporaryDirectory(prefix="isotrain-chat-") as directory:
        path = Path(directory) / "model"
        if is_run(target):
            dtype = dtype or load_resolved(RunDirectory(target).resolved).model.dtype
            export_run(Path(target), path, step, adapter_only=False)
        elif step is not None:
            raise RecipeError(f"--step: {target} is no run directory")
        else:
            path = model_directory(target, "MODEL")
        sampling = Sampling(max_tokens, temperature)
        conversation = Chat(path, device=device, dtype=dtype or "bfloat16", sampling=sampling, seed=seed)
        try:
            _talk(conversation)
        finally:
            conversation.close()


def _talk(conversation: Chat) -> None:
    while text := _line():
        if text == "/clear":
            conversation.messages.clear()
            continue
        try:
            for piece in conversation.reply(text):
                # A carriage return or an escape of the model's would pass as one of ours.
                typer.echo(visible(piece), nl=False)
        except KeyboardInterrupt:
            typer.echo(" (interrupted)", nl=False)
        except RolloutError as error:
            typer.echo(str(error), err=True)
        typer.echo("")


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo("")
        return ""
