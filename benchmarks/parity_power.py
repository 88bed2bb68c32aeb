"""Would parity have caught it: mistakes and honest pairs through the protocol, beside the published rule.

Every mutation of tests/mutations is trained as a variant of an honest reference run, and every honest pair
differs in what may differ between devices. A mistake that is called the same training is a miss, an honest
pair that is not is a false alarm. `--write` puts the table where reports find it.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import QUICK, REPOSITORY, Options, report

sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "device")]

import npusim  # noqa: E402

import mutations  # noqa: E402
from isotrain.parity.backends import backend  # noqa: E402
from isotrain.errors import IsotrainError  # noqa: E402
from isotrain.parity.power import EVIDENCE, Evidence, Power, PowerRow  # noqa: E402
from isotrain.parity.protocol import Companions, verdict_on  # noqa: E402
from isotrain.parity.verdict import Same, Verdict  # noqa: E402

MEMBERS = 6
PROTOCOL = (
    "Levels P0 to P3 on a model of two layers, 60 to 80 steps, float32 unless the run says bf16; an envelope "
    "of 6 runs; online runs replayed from recorded responses, but for grpo-free"
)
TIME_LIMIT = 600.0
# A run of a tiny model is mostly the start of its process: two at a time, with one thread each.
AT_ONCE = 2


@dataclass(frozen=True)
class Kind:
    """A reference run: a recipe of the library and changes to it."""

    recipe: str
    settings: tuple[str, ...]
    replays: bool = False
    """Whether others train on the responses that it recorded."""


_SFT = (
    "trainer.steps=80",
    "data.validation=null",
    "trainer.save_every=0",
    "data.tokens_per_micro_batch=1024",
)
_ONLINE = (
    *("trainer.steps=60", "data.validation=null", "rollout.engine=hf", "data.batch_size=8", "rollout.n=8"),
    *("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.02", "algorithm.mini_batch_size=4"),
    *("rollout.weight_check_tolerance=100", "optimizer.lr=2e-3"),
)
_DPO = ("trainer.steps=80", "data.validation=null", "trainer.validate_first=false")
KINDS = {
    "sft": Kind("tiny-sft", _SFT),
    "sft-2-ranks": Kind("tiny-sft", (*_SFT, "device.ranks=2")),
    "sft-bf16": Kind("tiny-sft", (*_SFT, "model.dtype=bfloat16")),
    "dpo": Kind("tiny-dpo", _DPO),
    "dpo-bf16": Kind("tiny-dpo", (*_DPO, "model.dtype=bfloat16")),
    "grpo": Kind("tiny-grpo", _ONLINE, replays=True),
    "reinforce++": Kind("tiny-grpo", (*_ONLINE, "algorithm.name=reinforce++"), replays=True),
}
_FREE = {"grpo-free": "grpo"}
# Mistakes that are also made where everything is noisier.
IN_BF16 = (
    *("mask-shifted", "data-order", "attention-scale", "dropout-on", "accumulation", "learning-rate"),
    *("warm-up", "no-clipping"),
)
MUTATIONS = (
    *mutations.MUTATIONS,
    *(replace(m, run="sft-bf16") for m in mutations.MUTATIONS if m.name in IN_BF16),
)


@dataclass(frozen=True)
class Honest:
    name: str
    kind: str
    settings: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def _backend(kind: str, label: str, *settings: str) -> Honest:
    chosen = backend(label)
    variables = dict(chosen.variables) | ({} if chosen.type == "cpu" else npusim.environment())
    told = f"{label} simulated" if chosen.type != "cpu" else label
    return Honest(" ".join([told, *settings]), kind, (f"device.type={chosen.type}", *settings), variables)


_TWO = {"OMP_NUM_THREADS": "2"}
HONEST = (
    Honest("rerun", "sft"),
    Honest("two threads", "sft", variables=_TWO),
    Honest("deterministic", "sft", ("device.determinism=on",)),
    Honest("2 ranks", "sft", ("device.ranks=2",)),
    _backend("sft", "cpu-avx2"),
    _backend("sft", "cpu-avx512"),
    _backend("sft", "npu"),
    _backend("sft", "npu", "model.fused=on"),
    _backend("sft", "npu", "device.ranks=2"),
    Honest("rerun", "sft-2-ranks"),
    Honest("rerun", "sft-bf16"),
    Honest("two threads", "sft-bf16", variables=_TWO),
    Honest("2 ranks", "sft-bf16", ("device.ranks=2",)),
    _backend("sft-bf16", "cpu-avx2"),
    _backend("sft-bf16", "cpu-avx512"),
    _backend("sft-bf16", "npu"),
    _backend("sft-bf16", "npu", "model.fused=on"),
    Honest("two threads", "dpo", variables=_TWO),
    Honest("2 ranks", "dpo", ("device.ranks=2",)),
    _backend("dpo", "cpu-avx2"),
    _backend("dpo", "npu"),
    _backend("dpo-bf16", "cpu-avx512"),
    _backend("dpo-bf16", "npu"),
    Honest("replay", "grpo"),
    Honest("replay, 2 ranks", "grpo", ("device.ranks=2",)),
    _backend("grpo", "cpu-avx2"),
    _backend("grpo", "npu"),
    _backend("reinforce++", "cpu-avx2"),
    _backend("reinforce++", "npu"),
    Honest("rerun", "grpo-free"),
)


class Runs:
    """Trains in child processes, a few at a time; what is finished in the directory is not run again."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.started: dict[str, Future[Path]] = {}

    def run(
        self, name: str, kind: Kind, settings: tuple[str, ...], variables: Mapping[str, str]
    ) -> Future[Path]:
        if name not in self.started:
            self.started[name] = self.pool.submit(self._train, name, kind, settings, variables)
        return self.started[name]

    def _train(self, name: str, kind: Kind, settings: tuple[str, ...], variables: Mapping[str, str]) -> Path:
        output = self.work / name
        done = output / "done"
        if done.exists():
            return output
        tiny = self.work / "tiny"
        moved = [text.replace("work/tiny", str(tiny)) for text in self._paths(kind.recipe)]
        command = [
            *(sys.executable, "-m", "isotrain", "train", kind.recipe, *moved, "device.type=cpu"),
            *(
                *kind.settings,
                *settings,
                "observe.layer_trace=3",
                "observe.operators=true",
                f"output={output}",
            ),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        begin = time.monotonic()
        with (self.work / f"{name}.log").open("wb") as log:
            result = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=TIME_LIMIT
            )
        print(
            f"  {name}: {time.monotonic() - begin:.0f} s, exit {result.returncode}",
            file=sys.stderr,
            flush=True,
        )
        if result.returncode == 0:
            done.touch()
        return output

    @staticmethod
    def _paths(recipe: str) -> list[str]:
        from isotrain.recipe import library
        from isotrain.recipe.load import parse_recipe, read_source

        path = library.locate(recipe)
        values = parse_recipe(read_source(path), str(path), [])
        found = [f"model.path={values.model.path}", f"data.train={values.data.train}"]
        if values.reward is not None and values.reward.function is not None:
            found.append(f"reward.function.path={values.reward.function.path}")
        return found


def reference(runs: Runs, name: str) -> tuple[Future[Path], list[Future[Path]]]:
    """A kind's reference run, and the members of its envelope."""
    kind = KINDS[name]
    first = runs.run(f"{name}-reference", kind, ("rollout.record=true",) if kind.replays else (), {})
    if kind.replays:
        first.result()
    forced = replayed(runs, name)
    members = [
        runs.run(f"{name}-member-{n}", kind, (*forced, f"model.perturbation={n}"), {})
        for n in range(1, MEMBERS + 1)
    ]
    return first, members


def replayed(runs: Runs, name: str) -> tuple[str, ...]:
    return (f"rollout.replay={runs.work / f'{name}-reference'}",) if KINDS[name].replays else ()


def decided(runs: Runs, kind: str, candidate: Path) -> dict[Evidence, Verdict]:
    """The verdicts on a candidate with more and more evidence; none where its run ended with an error."""
    if not (candidate / "done").exists():
        return {}
    one, members = reference(runs, _FREE.get(kind, kind))
    allow = ("recipe",) if kind in _FREE else ()
    found: dict[Evidence, Verdict] = {}
    for evidence in EVIDENCE:
        # A log is the curves alone: no recipe, no digests, no layers.
        paths = [one.result(), candidate, *(m.result() for m in members)]
        if evidence != "probes":
            paths = [path / "metrics.jsonl" for path in paths]
        others = Companions(paths[2:] if evidence != "logs" else ())
        found[evidence] = verdict_on(paths[0], paths[1], others, allow=allow)
    return found


def row(name: str, kind: str, what: str, where: str | None, found: Mapping[Evidence, Verdict]) -> PowerRow:
    called: dict[Evidence, Same] = {evidence: one.computation.verdict for evidence, one in found.items()}
    if not found:  # its run failed: somebody noticed
        called = dict.fromkeys(EVIDENCE, "different")
    words = found["probes"].level("P1").words if found else ""
    named = where if where is not None and where in words else None
    published = bool(found) and not found["logs"].comparison.broken
    return PowerRow(what, "mutation" if name else "honest", kind, called, named, published)


Todo = list[tuple[str, str, str, str | None, "Future[Path]"]]
"""Of each pair: mutation or nothing, kind of run, what it is, where it lives, its run."""


def tell(rows: list[PowerRow], file: Path | None) -> None:
    power = Power(PROTOCOL, datetime.date.today().isoformat(), tuple(rows))
    if file:
        file.write_text(json.dumps(power.as_json(), indent=1) + "\n")
    probed = power.of("probes")
    assert probed is not None
    right = probed.caught + probed.honest - probed.accused
    told = {key: value for key, value in power.as_json().items() if key != "rows"}
    report("parity_power", right / len(rows), 1.0, right == len(rows), **told)


def tabulate(runs: Runs, todo: Todo, file: Path | None) -> None:
    """Every pair decided and printed as a row; of mutations that live somewhere, whether P1 said where."""
    rows = list[PowerRow]()
    print(f"| | run | what | published rule | {' | '.join(EVIDENCE)} | named |\n|" + "---|" * 8, flush=True)
    for name, kind, what, where, run in todo:
        try:
            found = decided(runs, kind, run.result())
        except IsotrainError as error:
            print(f"{what}: {error}", file=sys.stderr)
            found = {}
        last = row(name, kind, what, where, found)
        rows.append(last)
        published = "accepts" if last.published else "rejects"
        cells = (last.kind, kind, what, published, *last.verdicts.values(), last.named or "-")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if found and (found["probes"].computation.verdict == "different") != (last.kind == "mutation"):
            print(f"    {found['probes'].words}", file=sys.stderr, flush=True)
        tell(rows, file)


def main() -> None:
    parser = Options(__doc__, only="sft learning-rate", work=Path(tempfile.gettempdir()) / "parity-power")
    parser.add_argument(
        "--work", type=Path, required=not QUICK, help="where runs are kept; finished ones are reused"
    )
    parser.add_argument("--only", help="mutations and honest pairs whose kind or name contains this")
    parser.add_argument("--write", type=Path, help="write the table as JSON")
    options = parser.read()
    work = options.work.resolve()
    if not (work / "tiny").exists():
        command = [sys.executable, "-m", "isotrain", "prepare", "tiny", "--out", str(work / "tiny")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    runs = Runs(work)
    todo: Todo = []
    wanted: Callable[[str], bool] = lambda text: not options.only or options.only in text  # noqa: E731
    pairs = [h for h in HONEST if wanted(f"{h.kind} {h.name}")]
    wrong = [m for m in MUTATIONS if wanted(f"{m.run} {m.name}")]
    for kind in dict.fromkeys(_FREE.get(k, k) for k in [*(h.kind for h in pairs), *(m.run for m in wrong)]):
        reference(runs, kind)
    for m in wrong:
        base = _FREE.get(m.run, m.run)
        forced = () if m.run in _FREE else replayed(runs, base)
        run = runs.run(f"{m.run}-mutation-{m.name}", KINDS[base], forced, mutations.environment(m.name))
        todo.append((m.name, m.run, m.what, m.where, run))
    for h in pairs:
        base = _FREE.get(h.kind, h.kind)
        forced = () if h.kind in _FREE else replayed(runs, base)
        run = runs.run(f"{h.kind}-honest-{HONEST.index(h)}", KINDS[base], (*forced, *h.settings), h.variables)
        todo.append(("", h.kind, h.name, None, run))
    tabulate(runs, todo, options.write)


if __name__ == "__main__":
    main()
