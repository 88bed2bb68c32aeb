"""Would parity have caught it: held-out mistakes and honest pairs, by kind of evidence.

Every mistake of tests/mutations/held_out.py is trained as a variant of an honest reference run, on three tiny
families of models, in float32 and bfloat16. Honest pairs compute the same in another way. A mistake that is
called the same is a miss, an honest pair that is called different is a false alarm. Pairs that are equal in
every bit do not count. The ratio is the share of right calls among all that were made with all evidence.
`--write` puts the table where reports find it.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench import REPOSITORY, Options, report

sys.path[:0] = [str(REPOSITORY / part) for part in ("src", "tests", "tests/device")]

from power.judge import Case, Judged, judge_case  # noqa: E402
from power.plan import CHOICE, Pair, controls, members, pairs, references, servers  # noqa: E402
from power.runs import AT_ONCE, Job, Runs  # noqa: E402
from power.table import markdown  # noqa: E402

from isotrain.tools.parity.compare.power import Power, PowerRow  # noqa: E402

PROTOCOL = (
    "Held-out bugs and honest pairs on tiny Llama, Qwen3-MoE and Gemma 3 models, float32 and bfloat16, 60 "
    "and 500 steps of SFT, DPO and GRPO, run once after every threshold was fixed"
)
PACKAGED = REPOSITORY / "src" / "isotrain" / "tools" / "parity" / "power.json"
TIME_LIMIT = 900.0


def prepare(work: Path) -> None:
    """Variables of all runs, then models and data; in a child, because torch has no place in this process."""
    path = [*sys.path[:3], str(REPOSITORY / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        **{"ISOTRAIN_CACHE": str(work / "cache"), "PYTHONPATH": os.pathsep.join(path)},
    }
    script = "import sys, pathlib, power.families as f; f.make_families(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(work)], check=True, stderr=subprocess.DEVNULL)


def jobs_of(work: Path, chosen: Sequence[Pair]) -> list[Job]:
    """Everything that the pairs need, references first."""
    kinds = {pair.kind.name: pair.kind for pair in chosen}
    needed = {name for pair in chosen for name in (pair.kind.reference, pair.reference, pair.control)}
    jobs = [job for job in (*references(work), *controls(work)) if job.name in needed]
    jobs += [job for kind in kinds.values() for job in members(kind, work)]
    known = {job.name for job in jobs} | {pair.job.name for pair in chosen}
    # The control of a run on two ranks is itself an honest pair, which `--only` may have left out.
    jobs += [p.job for p in pairs(work) if p.job.name in needed - known]
    jobs += [pair.job for pair in chosen]
    return jobs + [_sampler_test(pair) for pair in chosen if "sampler" in pair.evidence]


def train(runs: Runs, jobs: Sequence[Job]) -> None:
    for done in [runs.submit(job) for job in jobs]:
        done.result()


def _sampler_test(pair: Pair) -> Job:
    return Job(f"{pair.job.name}-test", "sampler", (), after=pair.job.name, cost=6.0)


def case_of(runs: Runs, pair: Pair) -> Case | str:
    """The pair's files, or why there are none."""
    candidate = runs.path(pair.job.name)
    if not runs.ended_well(pair.job.name):
        return f"its run ended early: {runs.failure(pair.job.name)}"
    result = None
    if "sampler" in pair.evidence:
        result = runs.path(f"{pair.job.name}-test.result")
        if not result.is_file():
            return "its drawn tokens could not be tested"
    reruns = [job.name for job in members(pair.kind, runs.work)]
    if any(not runs.ended_well(name) for name in filter(None, (pair.reference, *reruns))):
        return "the reference, or a rerun of it, ended early"
    control = runs.path(pair.control) if pair.control and runs.ended_well(pair.control) else None
    reference = runs.path(pair.reference)
    return Case(reference, candidate, tuple(map(runs.path, reruns)), control, pair.evidence, result)


def row_of(pair: Pair, judged: Judged, work: Path) -> PowerRow:
    kind = pair.kind

    def told(words: str) -> str:
        """Without the directory of this machine."""
        return words.replace(f"{work}/", "")[:300]

    return PowerRow(
        pair.what,
        pair.truth,
        kind.algorithm,
        dict(judged.verdicts),
        told(judged.named) if judged.named else None,
        judged.published,
        kind.family,
        kind.dtype,
        1 if kind.algorithm == "sampler" else kind.steps,
        told(judged.note),
    )


def judge(runs: Runs, chosen: Sequence[Pair]) -> Power:
    cases = [case_of(runs, pair) for pair in chosen]
    # Not forked: this process has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_ONCE, mp_context=context) as pool:
        futures = [pool.submit(judge_case, case) for case in cases if isinstance(case, Case)]
        found = iter(futures)
        rows = [
            row_of(pair, Judged({}, note=case) if isinstance(case, str) else next(found).result(), runs.work)
            for pair, case in zip(chosen, cases, strict=True)
        ]
    return Power(PROTOCOL, datetime.date.today().isoformat(), tuple(rows))


def listing(chosen: Sequence[Pair], jobs: Sequence[Job]) -> str:
    """How many pairs of each sort there are."""
    counts = Counter((p.truth, p.kind.algorithm, p.kind.family, p.kind.dtype, p.kind.steps) for p in chosen)
    lines = [f"  {' '.join(map(str, key))}: {count}" for key, count in counts.items()]
    total = Counter(pair.truth for pair in chosen)
    bugs = len({pair.name for pair in chosen if pair.truth == "mutation"})
    minutes = sum(job.cost for job in jobs) / AT_ONCE / 60
    told = (
        f"{bugs} mistakes in {total['mutation']} pairs, {total['honest']} honest pairs; {len(jobs)} runs and "
        f"tests, about {minutes:.0f} minutes on {AT_ONCE} idle cores"
    )
    return "\n".join([*lines, told, CHOICE])


def main() -> None:
    parser = Options(__doc__, only="sft-qwen3-moe-float32 adam-beta")
    parser.add_argument(
        "--work", type=Path, help="where runs are kept; finished ones are reused (quick: new)"
    )
    parser.add_argument("--only", help="pairs whose kind and name contain this")
    parser.add_argument("--list", action="store_true", help="show what would be run, and end")
    parser.add_argument("--write", action="store_true", help="write the table into the package")
    options = parser.read()
    if options.work is None and not options.list and not options.quick:
        parser.error("--work DIR is needed")
    with tempfile.TemporaryDirectory() as directory:
        work = (options.work or Path(directory)).resolve()
        chosen = [p for p in pairs(work) if not options.only or options.only in f"{p.kind.name} {p.name}"]
        if not chosen:
            parser.error(f"--only: no pair's kind and name contain {options.only!r}; `--list` shows all")
        jobs = jobs_of(work, chosen)
        print(listing(chosen, jobs), file=sys.stderr, flush=True)
        if not options.list:
            measure(work, chosen, jobs, options.write)


def measure(work: Path, chosen: Sequence[Pair], jobs: Sequence[Job], write: bool) -> None:
    work.mkdir(parents=True, exist_ok=True)
    prepare(work)
    begun = time.monotonic()
    runs = Runs(work, servers(), TIME_LIMIT)
    try:
        train(runs, jobs)
    finally:
        runs.close()
    trained = time.monotonic() - begun
    power = judge(runs, chosen)
    text = json.dumps(power.as_json(), indent=1) + "\n"
    (work / "power.json").write_text(text)
    if write:
        PACKAGED.write_text(text)
    print(markdown(power))
    told = {key: value for key, value in power.as_json().items() if key != "rows"}
    all_calls = [(row.kind, call) for row in power.rows for call in row.verdicts.values()]
    right = sum((call == "different") == (kind == "mutation") for kind, call in all_calls)
    seconds = {"training_s": round(trained), "judging_s": round(time.monotonic() - begun - trained)}
    share = right / max(1, len(all_calls))
    # Where every run failed there is nothing to be wrong about.
    met = bool(all_calls) and right == len(all_calls)
    without = sum(not row.verdicts for row in power.rows)
    report("parity_power", share, 1.0, met, calls=len(all_calls), without_verdict=without, **seconds, **told)


if __name__ == "__main__":
    main()
