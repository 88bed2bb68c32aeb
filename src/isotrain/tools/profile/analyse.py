"""Where the time of profiled steps goes: each phase's share, who waits for whom, and what would change it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from isotrain.errors import DataError
from isotrain.files import parse_json, read_regular
from isotrain.observe.metrics import read_metrics
from isotrain.observe.run_directory import LARGEST_JSON, RunDirectory
from isotrain.observe.spans import STEP, Span

UNACCOUNTED = "not accounted for"
RANKS, ENGINES, REWARDS = "training rank", "rollout engine", "reward worker"
# Beside what its worker does: a thread that writes what a save has copied.
BESIDE = "write_checkpoint"
# Of less than this share nothing is said.
SMALLEST = 0.01
Seconds = dict[str, float]


@dataclass(frozen=True)
class Profile:
    """The time of profiled steps; all seconds are sums over them."""

    steps: list[int]
    seconds: float
    longest: float
    phases: Seconds
    """What the loop was doing or waiting for: they add up to all seconds."""
    waits: dict[str, Seconds]
    """Of each kind of worker: how long one of them was idle on average, by whom it waited for."""
    hosts: list[str]
    slowdown: float | None
    """Time of a profiled step over that of another, validation and checkpoints aside; None without others."""
    advice: str
    traces: str
    """Where torch's traces are, if there are any."""

    @property
    def shares(self) -> Seconds:
        """Share of each phase, the largest first; what was not recorded is the last."""
        known = [item for item in self.phases.items() if item[0] != UNACCOUNTED]
        known.sort(key=lambda item: -item[1])
        rest = (UNACCOUNTED, self.phases.get(UNACCOUNTED, 0.0))
        return {name: seconds / self.seconds for name, seconds in [*known, rest]}

    @property
    def largest(self) -> str:
        return max(self.shares, key=lambda name: self.shares[name])

    def as_json(self) -> dict[str, Any]:
        waits = {
            kind: {who: seconds / self.seconds for who, seconds in of_kind.items()}
            for kind, of_kind in self.waits.items()
        }
        return {
            "steps": self.steps,
            "seconds_per_step": self.seconds / len(self.steps),
            "shares": self.shares,
            "waits": waits,
            "largest": self.largest,
            "advice": self.advice,
            "slowdown": self.slowdown,
            "hosts": self.hosts,
            "traces": self.traces,
        }

    def lines(self) -> list[str]:
        each, count = self.seconds / len(self.steps), len(self.steps)
        steps = f"step{'s' * (count > 1)} {', '.join(map(str, self.steps))}"
        total = f"{steps}: {each:.3g} s" + (f" each, the longest {self.longest:.3g} s" if count > 1 else "")
        if self.slowdown is not None:
            total += f"; {self.slowdown:.2g} times the median of the steps that are not recorded"
        shares = dict(self.shares)
        unknown = f"{UNACCOUNTED} {_percent(shares.pop(UNACCOUNTED))}"
        large = [f"{name} {_percent(share)}" for name, share in shares.items() if share >= SMALLEST]
        small = _percent(sum(share for share in shares.values() if share < SMALLEST))
        share = self.shares[self.largest]
        stands_out = "" if share >= 0.3 else " (no part stands out)"
        clocks = "by the clock of one machine"
        if len(self.hosts) > 1:
            clocks = f"by the clocks of {len(self.hosts)} machines, which may differ by more than phases take"
        traces = f"operators: open {self.traces} in ui.perfetto.dev" if self.traces else "no traces"
        return [
            total,
            f"time: {', '.join(large)}, smaller parts {small}, {unknown}",
            f"waiting: {self._waiting()}",
            f"largest: {self.largest}, {_percent(share)}{stands_out}; {self.advice}",
            f"recorded {clocks}; {traces}",
        ]

    def _waiting(self) -> str:
        kinds = []
        for kind, of_kind in self.waits.items():
            total = sum(of_kind.values()) / self.seconds
            reasons = [
                f"for {who} {_percent(seconds / self.seconds)}"
                for who, seconds in sorted(of_kind.items(), key=lambda item: -item[1])
                if seconds >= SMALLEST * self.seconds
            ]
            kinds.append(f"a {kind} {_percent(total)}" + (f" ({', '.join(reasons)})" if reasons else ""))
        return "; ".join(kinds) or "ranks wait for each other inside of update, which the trace shows"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def profile_of(run: RunDirectory, steps: Mapping[int, Sequence[Span]]) -> Profile:
    """The profile of some steps, by what `read_spans` has of them."""
    if not steps or not all(steps.values()):
        which = f"of step {next(iter(steps))}" if steps else "yet"
        raise DataError(
            f"{run.path} has no profile {which}: train with observe.profile.steps=[3,4], or give a step "
            f"that {run.profile} has"
        )
    phases: Seconds = defaultdict(float)
    waits: dict[str, Seconds] = defaultdict(lambda: defaultdict(float))
    walls = []
    for spans in steps.values():
        step = _Step(spans)
        walls.append(step.whole.end - step.whole.start)
        step.add_to(phases, waits)
    recipe = _recipe(run)
    shown = Profile(
        steps=list(steps),
        seconds=sum(walls),
        longest=max(walls),
        phases=dict(phases),
        waits={kind: dict(of_kind) for kind, of_kind in waits.items()},
        hosts=sorted({span.host for spans in steps.values() for span in spans}),
        slowdown=_slowdown(run, set(steps)),
        advice="",
        traces=f"{run.profile}/step-*/trace-*" if any(run.profile.glob("step-*/trace-*")) else "",
    )
    return replace(shown, advice=advice(shown.largest, recipe))


class _Step:
    """The spans of one step, and what was going on at each moment of it."""

    def __init__(self, spans: Sequence[Span]) -> None:
        leaders = sorted(
            (span for span in spans if span.name == STEP),
            key=lambda span: (span.worker != "controller", span.worker),
        )
        if not leaders:
            raise DataError("the profile of a step has no span of the whole step; remove it")
        self.whole = leaders[0]
        by_worker: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if span.name not in (STEP, BESIDE):
                by_worker[span.worker].append(span)
        self.own = by_worker.pop(self.whole.worker, [])
        self.workers = {leader.worker: by_worker.get(leader.worker, []) for leader in leaders[1:]} | by_worker
        # Without a controller, each rank is its own loop: the first one's is shown.
        if self.whole.worker != "controller":
            self.workers = {}

    def add_to(self, phases: Seconds, waits: dict[str, Seconds]) -> None:
        """Between two neighbouring ends of spans, everybody does one thing."""
        every = [self.whole, *self.own, *(span for spans in self.workers.values() for span in spans)]
        start, end = self.whole.start, self.whole.end
        times = sorted({min(max(time, start), end) for span in every for time in (span.start, span.end)})
        kinds = {kind: [w for w in self.workers if w.startswith(kind)] for kind in (RANKS, ENGINES)}
        for left, right in pairwise(times):
            now = (left + right) / 2
            phase = self._phase(now)
            phases[phase] += right - left
            for kind, workers in kinds.items():
                idle = [worker for worker in workers if _at(self.workers[worker], now) is None]
                if workers:
                    waits[kind][self._awaited(kind, phase, now)] += (right - left) * len(idle) / len(workers)

    def _phase(self, now: float) -> str:
        own = _at(self.own, now)
        if own is None:
            return UNACCOUNTED
        if own == "wait_for_batch":
            return self._doing(ENGINES, now) or self._doing(REWARDS, now) or own
        return (self._doing(RANKS, now) or own) if own == "learn" else own

    def _doing(self, kind: str, now: float) -> str | None:
        """What the first busy worker of a kind does; generation, where one engine does that."""
        names = [_at(spans, now) for worker, spans in sorted(self.workers.items()) if worker.startswith(kind)]
        return "generate" if "generate" in names else next(filter(None, names), None)

    def _awaited(self, kind: str, phase: str, now: float) -> str:
        """For whom an idle worker waits: whoever works on what the loop waits for."""
        if phase in ("generate", "reward"):
            busy = ENGINES if phase == "generate" else REWARDS
            return f"other {busy}s" if busy == kind else f"{busy}s"
        other = RANKS if kind == ENGINES else ENGINES
        return f"{other}s" if self._doing(other, now) else "the controller"


def _at(spans: Iterable[Span], now: float) -> str | None:
    """The innermost span at a moment."""
    inside = [span for span in spans if span.start <= now < span.end]
    return max(inside, key=lambda span: span.start).name if inside else None


def _slowdown(run: RunDirectory, profiled: set[int]) -> float | None:
    rows = read_metrics(run.metrics) if run.metrics.is_file() else []
    both: tuple[list[float], list[float]] = ([], [])
    for row in rows:
        # The first step compiles and allocates.
        if "timing_s/step" in row and row["step"] > 1:
            both[row["step"] in profiled].append(row["timing_s/step"])
    return median(both[True]) / median(both[False]) if all(both) and median(both[False]) > 0 else None


def _recipe(run: RunDirectory) -> Mapping[str, Any]:
    try:
        recipe = parse_json(read_regular(run.resolved, LARGEST_JSON))
    except (OSError, ValueError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def advice(phase: str, recipe: Mapping[str, Any]) -> str:
    """What to try for the phase that takes the most time."""
    if phase == "generate":
        return _generation(recipe)
    if phase == "reward":
        return f"raise reward.workers (now {_value(recipe, 'reward', 'workers')}), or make the reward faster"
    if phase == "save":
        every = _value(recipe, "trainer", "save_every")
        return f"raise trainer.save_every (now {every}), or put output or checkpoint_storage on a faster disk"
    return _FIELDS.get(phase, "no field of the recipe changes it: open the trace, or report it")


_UPDATE = (
    "raise data.tokens_per_micro_batch or device.ranks, set model.gradient_checkpointing=false where memory "
    "allows; the trace shows the operators"
)
_LEFT_OUT = "; that changes what is learnt"
_FIELDS = {
    "update": _UPDATE,
    "update_actor": _UPDATE,
    "update_critic": _UPDATE,
    "values": _UPDATE,
    "old_log_prob": "algorithm.mini_batch_size as large as data.batch_size, or "
    f"algorithm.rollout_correction.bypass_mode=true, needs no old log-probs{_LEFT_OUT}",
    "ref": f"algorithm.kl.place=off needs no reference{_LEFT_OUT}",
    "reward_model": "score with a smaller reward.model, or on more device.ranks",
    "validate": "raise trainer.validate_every, or lower data.validation_rows",
    "update_weights": "rollout.weight_transfer=auto sends from device to device, and rollout.staleness=1 "
    "beside generation (responses are then older)",
    "data": "put the token cache (ISOTRAIN_CACHE) on a local disk",
    "switch": "cluster.placement=separate needs no switch between ranks and engines",
    "not accounted for": "nothing was recorded there: open the trace",
}


def _generation(recipe: Mapping[str, Any]) -> str:
    ways = [f"raise rollout.engines (now {_value(recipe, 'rollout', 'engines')})"]
    if _value(recipe, "rollout", "engine") == "hf":
        ways.append("take a faster engine (rollout.engine=vllm)")
    else:
        ways.append("give the KV cache more memory (rollout.memory_utilization or kv_cache_gb)")
    if not _value(recipe, "rollout", "staleness"):
        ways.append(
            "or train meanwhile (rollout.staleness=1, cluster.placement=separate; responses are then older)"
        )
    return ", ".join(ways)


def _value(recipe: Mapping[str, Any], section: str, name: str) -> Any:
    values = recipe.get(section)
    value = values.get(name) if isinstance(values, dict) else None
    return "default" if value is None else value
