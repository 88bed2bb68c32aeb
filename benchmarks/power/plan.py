"""Which runs are made and compared, all of it decided before the first of them.

Rotation decides what runs where: every choice below depends on positions in lists, never on a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import npusim

from isotrain.tools.parity.compare.power import Evidence
from isotrain.tools.parity.devices import backend
from mutations.held_out import HELD_OUT, LAYERS, HeldOut
from power.families import DATA, FAMILIES
from power.runs import Job

DTYPES = ("float32", "bfloat16")
SHORT, LONG = 60, 500
LATE = {SHORT: 36, LONG: 300}
SEEDS = 4
Algorithm = Literal["sft", "dpo", "replay", "free", "sampler"]

CHOICE = (
    "Chosen in advance: mistakes in layers on every family that has such a layer, mistakes in data, loss and "
    "optimizer on two of the three families in turn, in float32 and bfloat16 in turn; online mistakes on two "
    "families in turn; late mistakes also over 500 steps; honest pairs on all families and types"
)

_COMMON = (
    *("data.validation=null", "trainer.save_every=0", "model.gradient_checkpointing=false"),
    *("observe.loggers=[]", "device.type=cpu"),
)
_PROBED = ("observe.layer_trace=3", "observe.operators=true")
_SFT = (
    *("data.batch_size=8", "data.max_length=128", "data.too_long=drop"),
    "data.tokens_per_micro_batch=256",
)
# A live reference: a cached one would be another run's.
_DPO = (
    *("data.batch_size=8", "trainer.validate_first=false", "algorithm.reference=live"),
    "data.tokens_per_micro_batch=256",
)
_ONLINE = (
    *("rollout.engine=hf", "data.batch_size=4", "rollout.n=8", "rollout.temperature=0.9"),
    *("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.02", "algorithm.mini_batch_size=2"),
    # It would stop runs whose engine has other weights, which parity is to find by itself here.
    *("rollout.weight_check_tolerance=100", "optimizer.lr=2e-3", "reward.function.concurrency=1"),
)
_DRAWS = ("data.batch_size=64", "rollout.max_tokens=24", "rollout.record=true")
_RECIPES: dict[Algorithm, str] = {
    "sft": "tiny-sft",
    "dpo": "tiny-dpo",
    "replay": "tiny-grpo",
    "free": "tiny-grpo",
    "sampler": "tiny-grpo",
}
# Of seconds of a core; only estimates of the time left come from it.
_COST: dict[Algorithm, float] = {"sft": 12, "dpo": 12, "replay": 12, "free": 18, "sampler": 6}
_WEIGHT = {"float32": 0.75, "bfloat16": 1.25}
# A long run spends less of its time on its start and its probes.
_LONG_COST = 45.0


@dataclass(frozen=True)
class Kind:
    """What the two runs of a pair have in common."""

    algorithm: Algorithm
    family: str
    dtype: str
    steps: int = SHORT
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        told = [self.algorithm, self.family, self.dtype, *([str(self.steps)] if self.steps == LONG else [])]
        return "-".join([*told, *(text.partition("=")[2] for text in self.settings)])

    @property
    def reference(self) -> str:
        """A replay is compared with the free run that recorded its responses."""
        return (
            f"{replace(self, algorithm='free').name if self.algorithm == 'replay' else self.name}-reference"
        )

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        match self.algorithm:
            case "sft" | "dpo":
                return ("logs", "reruns", "probes", "probes+reruns")
            case "free":
                return ("logs", "reruns")
            case "replay":
                return ("replay",)
            case _:
                return ("sampler",)

    def job(self, name: str, work: Path) -> Job:
        model, data = work / self.family / "model", work / DATA
        steps = 1 if self.algorithm == "sampler" else self.steps
        settings: tuple[str, ...] = (
            *(f"trainer.steps={steps}", f"model.path={model}", f"model.dtype={self.dtype}"),
            *_COMMON,
        )
        after = None
        match self.algorithm:
            case "sft":
                settings += (f"data.train={data / 'train.jsonl'}", *_SFT, *_PROBED)
            case "dpo":
                settings += (f"data.train={data / 'pairs.jsonl'}", *_DPO, *_PROBED)
            case _:
                settings += (f"data.train={data / 'prompts.jsonl'}", *_ONLINE)
                settings += (f"reward.function.path={data / 'reward.py'}:score",)
        match self.algorithm:
            case "replay":
                settings += (f"rollout.replay={work / 'runs' / self.reference}", *_PROBED)
                after = self.reference
            case "sampler":
                settings += _DRAWS
        return Job(
            name,
            _RECIPES[self.algorithm],
            settings + self.settings,
            variables=(("ISOTRAIN_LATE_STEP", str(LATE[self.steps])),),
            after=after,
            cost=_WEIGHT[self.dtype] * (_COST[self.algorithm] if self.steps == SHORT else _LONG_COST),
        )


@dataclass(frozen=True)
class Way:
    """A harmless way to compute the same."""

    name: str
    settings: tuple[str, ...] = ()
    server: str = "cpu"
    ranks: int = 1
    patch: str | None = None
    logs_only: bool = False
    """Whether run directories say that it was meant to be another training, and logs do not."""

    def of(self, job: Job) -> Job:
        patches = (("power.honest_patches", self.patch),) if self.patch else ()
        return replace(
            job,
            settings=job.settings + self.settings,
            server=self.server,
            ranks=self.ranks,
            patches=job.patches + patches,
        )


@dataclass(frozen=True)
class Pair:
    kind: Kind
    truth: Literal["mutation", "honest"]
    name: str
    what: str
    job: Job
    reference: str
    """The run that it is compared with."""
    control: str
    """The honest run that it must not be equal to; none for draws, which are compared with no run."""
    evidence: tuple[Evidence, ...]


_AVX2, _PLAIN = Way("AVX2 kernels", server="avx2"), Way("SSE kernels", server="plain")
_NPU = Way("simulated npu", ("device.type=npu",), "npu")
_FUSED = Way("simulated npu, fused", ("device.type=npu", "model.fused=auto"), "npu")
_PADDED = Way("padded attention", ("model.attention=padded",))
_RANKS = Way("2 ranks", ("device.ranks=2",), ranks=2)
_EAGER = Way("eager attention", patch="eager-attention")
_SPLIT = Way("split products", patch="split-products")
_NORMS = Way("other norms", patch="other-norms")
_ADAM = Way("other AdamW kernel", patch="other-adam")
_MICRO = Way("larger micro-batches", ("data.tokens_per_micro_batch=1024",), logs_only=True)
_EXPERTS = Way("grouped experts", ("model.experts=grouped_mm",))
HONEST: dict[tuple[Algorithm, int], tuple[Way, ...]] = {
    ("sft", SHORT): (_RANKS, _AVX2, _PLAIN, _PADDED, _EAGER, _SPLIT, _NORMS),
    ("sft", LONG): (_AVX2, _SPLIT, _MICRO),
    ("dpo", SHORT): (_AVX2, _PLAIN, _EAGER, _NORMS),
    ("replay", SHORT): (_AVX2, _PLAIN, _NPU, _EAGER, _NORMS),
    ("free", SHORT): (_AVX2, _SPLIT, Way("seed 101", ("seed=101",)), Way("seed 102", ("seed=102",))),
}
# Of short SFT, in one type each.
_IN_TYPE: dict[str, tuple[Way, ...]] = {"float32": (_NPU, _MICRO), "bfloat16": (_FUSED, _ADAM)}
# Draws have seeds of their own; where rounding differs, they are drawn from slightly other probabilities.
DRAWN = (
    (Way("seed 1", ("seed=1",)), ()),
    (replace(_AVX2, settings=("seed=2",)), ("rollout.top_p=0.9",)),
    (replace(_PLAIN, settings=("seed=3",)), ("rollout.top_k=20",)),
    (replace(_SPLIT, settings=("seed=4",)), ()),
)
# The members of an envelope: weights moved in their last digit, and what else devices vary.
_MEMBER_WAYS = (Way(""), _PADDED, _AVX2, _PLAIN)

SFT = tuple(Kind("sft", family, dtype) for family in FAMILIES for dtype in DTYPES)
SFT_LONG = tuple(
    Kind("sft", family, dtype, LONG)
    for family, dtype in zip(FAMILIES, ("bfloat16", "float32", "float32"), strict=True)
)
DPO = tuple(Kind("dpo", f, d) for f, d in zip(FAMILIES, ("float32", "bfloat16", "float32"), strict=True))
FREE = tuple(Kind("free", f, d) for f, d in zip(FAMILIES, ("bfloat16", "float32", "bfloat16"), strict=True))
REPLAY = tuple(replace(kind, algorithm="replay") for kind in FREE)
SAMPLER = tuple(Kind("sampler", family, dtype) for family in FAMILIES for dtype in DTYPES)
KINDS = (*SFT, *SFT_LONG, *DPO, *FREE, *REPLAY, *SAMPLER)


def servers() -> dict[str, Mapping[str, str]]:
    """Variables that libraries read once, by the name of the set."""
    slowest = {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    }
    return {
        "cpu": {},
        "avx2": backend("cpu-avx2").variables,
        "plain": slowest,
        "npu": npusim.environment(),
    }


def references(work: Path) -> Iterator[Job]:
    for kind in KINDS:
        if kind.algorithm in ("sft", "dpo", "free"):
            job = kind.job(kind.reference, work)
            records = ("rollout.record=true",) if kind.algorithm == "free" else ()
            yield replace(job, settings=job.settings + records)


def members(kind: Kind, work: Path) -> list[Job]:
    """Reruns of the reference: those of runs that sample have seeds of their own."""
    if kind.algorithm == "free":
        seeds = range(201, 201 + SEEDS)
        jobs = [(kind.job(f"{kind.name}-rerun-{n}", work), n) for n in seeds]
        return [replace(job, settings=(*job.settings, f"seed={n}")) for job, n in jobs]
    if kind.algorithm not in ("sft", "dpo"):
        return []
    found = []
    for number, way in enumerate(_MEMBER_WAYS, start=1):
        job = way.of(kind.job(f"{kind.name}-member-{number}", work))
        # Operators are compared between reference and candidate alone.
        own = ("observe.operators=false", f"model.perturbation={number}")
        found.append(replace(job, settings=(*job.settings, *own)))
    return found


def pairs(work: Path) -> list[Pair]:
    return [*_honest(work), *_drawn_honestly(work), *_mutated(work)]


def _honest(work: Path) -> Iterator[Pair]:
    for kind in KINDS:
        ways = HONEST.get((kind.algorithm, kind.steps), ())
        if kind.algorithm == "sft" and kind.steps == SHORT:
            ways += _IN_TYPE[kind.dtype] + ((_EXPERTS,) if kind.family == "qwen3-moe" else ())
        for number, way in enumerate(ways):
            job = way.of(kind.job(f"{kind.name}-honest-{number}", work))
            kept: tuple[Evidence, ...] = ("logs", "reruns") if way.logs_only else kind.evidence
            yield Pair(kind, "honest", way.name, way.name, job, kind.reference, kind.reference, kept)


def _drawn_honestly(work: Path) -> Iterator[Pair]:
    for kind in SAMPLER:
        for number, (way, settings) in enumerate(DRAWN):
            own = replace(kind, settings=settings)
            job = way.of(own.job(f"{kind.name}-honest-{number}", work))
            yield Pair(own, "honest", way.name, way.name, job, "", "", ("sampler",))


def _mutated(work: Path) -> Iterator[Pair]:
    for number, bug in enumerate(HELD_OUT):
        for kind in _kinds_of(bug, number):
            # Those of samplers are drawn with another seed than honest ones.
            job = kind.job(f"{kind.name}-mutation-{bug.name}", work)
            job = replace(job, ranks=bug.ranks, patches=(("held_out_patches", bug.name),))
            reference = control = kind.reference
            if bug.ranks > 1:
                # Held against an honest run on as many ranks.
                job = replace(job, settings=(*job.settings, f"device.ranks={bug.ranks}"))
                reference = control = f"{kind.name}-honest-{HONEST['sft', SHORT].index(_RANKS)}"
            elif kind.algorithm == "sampler":
                reference, control = "", f"{kind.name}-control"
            yield Pair(kind, "mutation", bug.name, bug.what, job, reference, control, kind.evidence)


def controls(work: Path) -> Iterator[Job]:
    """Of samplers: the run without the mistake, with the same seed and settings."""
    for name, kind in {f"{p.kind.name}-control": p.kind for p in _mutated(work)}.items():
        if kind.algorithm == "sampler":
            yield kind.job(name, work)


def _kinds_of(bug: HeldOut, number: int) -> Iterator[Kind]:
    everywhere = bug in LAYERS or len(bug.families) < len(FAMILIES)
    left_out = FAMILIES[number % len(FAMILIES)]
    for place, family in enumerate(bug.families):
        dtypes = bug.dtypes if len(bug.families) == 1 else (bug.dtypes[(number + place) % len(bug.dtypes)],)
        for kind in bug.kinds:
            if kind == "sampler":
                yield from (Kind(kind, family, dtype, SHORT, bug.settings) for dtype in dtypes)
            elif family == left_out and not everywhere:
                continue
            elif kind == "sft":
                yield from (Kind(kind, family, dtype) for dtype in dtypes)
            else:
                known = next(k for k in (*DPO, *FREE, *REPLAY) if (k.algorithm, k.family) == (kind, family))
                yield from [known] if known.dtype in bug.dtypes else []
        if bug.long:
            long = next(k for k in SFT_LONG if k.family == family)
            yield from [long] if long.dtype in bug.dtypes else []
