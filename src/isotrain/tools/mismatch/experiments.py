"""The experiments of an attribution, from what both sides computed: `python -m ... WORK`, after the engine.

N: response tokens, C: conventions, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isotrain.children import die_with_parent
from isotrain.errors import ModelError
from isotrain.models.config import model_end_tokens
from isotrain.models.load import load_tokenizer
from isotrain.tools.mismatch.attribution import Array, Removed, needed
from isotrain.tools.mismatch.causes import ORDER, ROUNDING
from isotrain.tools.mismatch.job import Job, WeightDifferences, read_forced, read_inside, read_sequences
from isotrain.tools.mismatch.passes import CONVENTIONS, Forced, Pass, Sequence_
from isotrain.tools.mismatch.trainer_side import Trainer, head_logps, wrong_modules

# A hypothesis is taken where it leaves less than this of the median difference.
FITS = 0.5
# How much further repeated log-probs may be from the reported ones than batches are from each other.
REPEATS = 3.0
# Of a stale prefix: how much more than another batch it changes.
STALE = 10.0
_ENGINE_CAUSES = {"recording", "prefix", "batch", "decode", "kv_cache", "head", "dtype"}
ALONE, TOGETHER, CACHED = Pass(False, False), Pass(True, True), Pass(True, True, cached=True)


@dataclass
class Findings:
    """What was seen on the way, for the report."""

    active: list[str]
    convention: str
    ids: str = ""
    """How the engine's tokens differed from the recorded ones."""
    weights: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    compared: int = 0
    modules: dict[str, float] = field(default_factory=dict)
    modules_compared: int = 0
    routers: dict[str, float] = field(default_factory=dict)
    """Routers with other scores from the same input, and how far these are off."""
    stale_prefix: bool = False
    route_changes: float = 0.0
    """Share of tokens and layers whose experts differ."""
    rounding_ratio: float = 1.0
    """The engine's distance from float32 over the trainer's."""
    repeated: float = 0.0
    """Mean difference between the reported log-probs and the same engine's for the same tokens."""


def mean_apart(a: Sequence[Any], b: Sequence[Any]) -> float:
    return float(np.mean(np.abs(np.concatenate(a).astype(float) - np.concatenate(b).astype(float))))


def median_apart(a: Sequence[Any], b: Sequence[Any]) -> float:
    return float(np.median(np.abs(np.concatenate(a).astype(float) - np.concatenate(b).astype(float))))


class Bench:
    """Both sides' numbers, each computed when an experiment first asks for it."""

    def __init__(self, job: Job, work: Path) -> None:
        self.job, self.work = job, work
        self.sequences = read_sequences(work)
        self.reported = [s.logp_N.astype(np.float64) for s in self.sequences]
        self.differences, self.inside = WeightDifferences.read(work), read_inside(work)
        self._forced: dict[tuple[str, Pass], list[Forced]] = {}
        self._trainers: dict[str, Trainer] = {}
        self._hidden: dict[Any, tuple[list[torch.Tensor], torch.Tensor]] = {}
        self.variant: list[Sequence_] | None = None
        """The sequences with the tokens that the engine had."""
        self.other_ids: set[int] = set()
        """Sequences of which other tokens were sampled than were recorded."""
        self.modules: dict[str, float] = {}
        self.routers: dict[str, float] = {}
        self.repeated = self.reported
        """The engine's log-probs of the recorded tokens, as it samples."""

    def forced(self, process: str, way: Pass) -> list[Forced]:
        if (process, way) not in self._forced:
            self._forced[process, way] = read_forced(self.work, process, way)
        return self._forced[process, way]

    def own(self, way: Pass, convention: str) -> list[Array]:
        place = CONVENTIONS.index(convention)
        return [f.logp_CN[place].astype(np.float64) for f in self.forced("given", way)]

    def trainer(self, dtype: str) -> Trainer:
        if dtype not in self._trainers:
            self._trainers[dtype] = Trainer(self.job, dtype)
        return self._trainers[dtype]

    @property
    def head_dtype(self) -> str:
        return "float32" if self.job.head_float32 else self.job.dtype

    @property
    def stale_head(self) -> torch.Tensor | None:
        """The engine's head, where it is not the checkpoint's."""
        tensors = self.differences.tensors
        tied = "lm_head.weight" not in self.differences.unread
        return tensors.get("lm_head.weight") if tied else tensors.get("model.embed_tokens.weight")

    def trained(self, removed: Removed, convention: str) -> list[Array]:
        """The trainer's log-probs with what is removed."""
        dtype = "float32" if "dtype" in removed else self.job.dtype
        # An engine that is given tokens has those of the recording.
        with_variant = "ids" in removed and self.variant is not None and not removed & _ENGINE_CAUSES
        sequences = self.variant if with_variant and self.variant is not None else self.sequences
        changes = frozenset(removed & {"weights", "routing", "module"})
        key = (dtype, sequences is self.variant, changes)
        if key not in self._hidden:
            trainer = self.trainer(dtype)
            with ExitStack() as stack:
                if "weights" in changes:
                    stack.enter_context(trainer.with_weights(self.differences))
                if "routing" in changes:
                    stack.enter_context(trainer.with_routes(self.inside))
                    stack.enter_context(trainer.with_outputs(self.inside, self.routers))
                if "module" in changes:
                    stack.enter_context(trainer.with_outputs(self.inside, self.modules))
                hidden, weight_VD = trainer.hidden(sequences)
                self._hidden[key] = hidden, weight_VD.clone()
        hidden, weight_VD = self._hidden[key]
        head = "float32" if "head" in removed else self.head_dtype
        place = CONVENTIONS.index(convention)
        return [
            head_logps(h, weight_VD, head, s.response_N, self.job)[place].astype(np.float64)
            for h, s in zip(hidden, sequences, strict=True)
        ]

    def generated(self, removed: Removed, convention: str, active: Sequence[str]) -> list[Array]:
        """The engine's log-probs with what is removed; the reported ones where nothing of it is."""
        if not removed & _ENGINE_CAUSES:
            return self.reported
        process = "float32" if "dtype" in removed else "plain" if "kv_cache" in removed else "given"
        decode = "decode" not in removed
        cached = decode and "prefix" in active and "prefix" not in removed and process == "given"
        together = "batch" not in removed
        forced = self.forced(process, Pass(decode, together, cached and together))
        if "head" not in removed and "dtype" not in removed:
            logps = [f.logp_CN[CONVENTIONS.index(convention)].astype(np.float64) for f in forced]
        else:
            logps = self._by_head("float32" if "head" in removed else self.head_dtype, forced, convention)
        return [
            logp_N + offset_N for logp_N, offset_N in zip(logps, self._offsets(removed, active), strict=True)
        ]

    def _by_head(self, dtype: str, forced: Sequence[Forced], convention: str) -> list[Array]:
        """By the trainer's head over the engine's hidden states; by the engine's own where the two differ."""
        weight_VD = self.stale_head
        if weight_VD is None:
            head = self.trainer(self.job.dtype).pretrained.get_output_embeddings()
            weight_VD = head.weight.detach().cpu()
        place = CONVENTIONS.index(convention)
        hidden = [torch.from_numpy(f.hidden_ND) for f in forced]
        return [
            head_logps(h, weight_VD, dtype, s.response_N, self.job)[place].astype(np.float64)
            for h, s in zip(hidden, self.sequences, strict=True)
        ]

    def _offsets(self, removed: Removed, active: Sequence[str]) -> list[Array]:
        """What forcing the recorded tokens has removed with them, while it is still to be there."""
        offsets = [np.zeros(len(s.response_N)) for s in self.sequences]
        if (
            "prefix" in active
            and "prefix" not in removed
            and removed & {"batch", "decode", "kv_cache", "dtype"}
        ):
            # Only decoding together, as it samples, has the cached prefixes.
            warm, cold = self.own(CACHED, CONVENTIONS[0]), self.own(TOGETHER, CONVENTIONS[0])
            offsets = [a - b for a, b in zip(warm, cold, strict=True)]
        if "ids" in active and "ids" not in removed and self.variant is not None:
            sampled = self.trained(frozenset({"ids"}), CONVENTIONS[0])
            recorded = self.trained(frozenset(), CONVENTIONS[0])
            return [o + a - b for o, a, b in zip(offsets, sampled, recorded, strict=True)]
        for number in range(len(offsets)):
            if ("recording" in active and "recording" not in removed) or (
                "ids" in active and "ids" not in removed and number in self.other_ids
            ):
                offsets[number] = offsets[number] + self.reported[number] - self.repeated[number]
        return offsets


def fitting_convention(bench: Bench) -> str:
    """The convention of the reported log-probs: the trainer's, unless another one fits much better."""
    apart = {c: median_apart(bench.reported, bench.trained(frozenset(), c)) for c in CONVENTIONS}
    best = min(CONVENTIONS, key=lambda c: apart[c])
    expected = CONVENTIONS[0]
    floor = ROUNDING[bench.job.dtype]
    return best if apart[best] < FITS * apart[expected] and apart[expected] > floor else expected


def variants(bench: Bench) -> Iterator[tuple[str, list[Sequence_]]]:
    """Other tokens before the responses, of the kinds that templates get wrong."""
    ends = list(model_end_tokens(Path(bench.job.model)))
    starts, again = [], None
    try:
        tokenizer: Any = load_tokenizer(Path(bench.job.model))
    except ModelError:
        tokenizer = None
    if tokenizer is not None:
        if tokenizer.bos_token_id is not None:
            starts.append(int(tokenizer.bos_token_id))

        def again(s: Sequence_) -> Sequence_:
            text = tokenizer.decode(s.tokens_T[: s.prompt_length], skip_special_tokens=False)
            return _with_prompt(s, tokenizer.encode(text, add_special_tokens=False))

    def changed(change: Any) -> list[Sequence_]:
        return [change(s) for s in bench.sequences]

    def prompt(s: Sequence_) -> list[int]:
        return [int(t) for t in s.tokens_T[: s.prompt_length]]

    for token in dict.fromkeys([*starts, *ends]):
        yield f"token {token} before the prompt", changed(lambda s, t=token: _with_prompt(s, [t, *prompt(s)]))
        yield f"token {token} after the prompt", changed(lambda s, t=token: _with_prompt(s, [*prompt(s), t]))
    yield "the prompt without its first token", changed(lambda s: _with_prompt(s, prompt(s)[1:] or prompt(s)))
    yield "the prompt without its last token", changed(lambda s: _with_prompt(s, prompt(s)[:-1] or prompt(s)))
    if again is not None:
        yield "the prompt decoded and encoded again", changed(again)


def _with_prompt(s: Sequence_, prompt: Sequence[int]) -> Sequence_:
    tokens_T = np.concatenate([np.asarray(prompt, np.int32), s.response_N])
    return replace(s, tokens_T=tokens_T, prompt_length=len(prompt)) if len(prompt) else s


def find_faults(bench: Bench) -> Findings:
    """Mistakes by name, before shares are computed."""
    job, rounding = bench.job, ROUNDING[bench.job.dtype]
    convention = fitting_convention(bench)
    findings = Findings([], convention, "", list(bench.differences.tensors), bench.differences.unread)
    findings.compared = bench.differences.compared
    together = bench.own(TOGETHER, convention)
    spread = mean_apart(together, bench.own(Pass(True, False), convention))
    first = together
    if job.engine != "hf":
        first = bench.own(CACHED, convention)
        stale = mean_apart(first, together)
        findings.stale_prefix = stale > STALE * max(spread, rounding / 2)
    spread = max(spread, mean_apart(together, bench.own(ALONE, convention)), rounding / 2)
    bench.repeated = first
    findings.repeated = mean_apart(bench.reported, first)
    if findings.repeated > REPEATS * spread:
        _look_for_ids(bench, findings, first, REPEATS * spread)
    if not findings.weights:
        _look_into_modules(bench, findings)
    if bench.inside.routers:
        findings.route_changes = _route_changes(bench)
    if job.dtype != "float32":
        place = CONVENTIONS.index(convention)
        exact = [f.logp_CN[place] for f in bench.forced("float32", ALONE)]
        both = frozenset({"dtype", "head"})
        findings.rounding_ratio = mean_apart(bench.own(ALONE, convention), exact) / max(
            1e-9, mean_apart(bench.trained(frozenset(), convention), bench.trained(both, convention))
        )
    return findings


def _look_for_ids(bench: Bench, findings: Findings, repeated: Sequence[Array], allowed: float) -> None:
    """The reported log-probs are not those of these tokens: which others fit?"""
    convention = findings.convention
    usual = median_apart(bench.reported, bench.trained(frozenset(), convention))
    best = FITS * usual
    for words, sequences in variants(bench):
        bench.variant = sequences
        apart = median_apart(bench.reported, bench.trained(frozenset({"ids"}), convention))
        bench._hidden = {k: v for k, v in bench._hidden.items() if not k[1]}
        if apart < best:
            best, findings.ids, chosen = apart, words, sequences
    bench.variant = chosen if findings.ids else None
    if findings.ids:
        return
    # A wrong engine is wrong in all sequences; wrong tokens are wrong in some of them.
    apart_R = np.array([mean_apart([r], [f]) for r, f in zip(bench.reported, repeated, strict=True)])
    wrong = apart_R > allowed
    if 0 < wrong.sum() <= 0.9 * len(wrong):
        bench.other_ids = set(np.flatnonzero(wrong).tolist())
        findings.ids = f"{int(wrong.sum())} of {len(wrong)} sequences were sampled after other tokens"


def _look_into_modules(bench: Bench, findings: Findings) -> None:
    inside, dtype = bench.inside, bench.job.dtype
    if not inside.inputs:
        return
    float32 = bench.trainer("float32").given_inputs(bench.sequences, inside)
    same = float32 if dtype == "float32" else bench.trainer(dtype).given_inputs(bench.sequences, inside)
    findings.modules_compared = len(float32.outputs.keys() & same.outputs.keys() & inside.outputs.keys())
    routers = wrong_modules(inside.routers, same.routers, float32.routers, dtype)
    bench.routers = findings.routers = routers
    wrong = wrong_modules(inside.outputs, same.outputs, float32.outputs, dtype)
    # What follows from other routes is no mistake of the experts.
    bench.modules = findings.modules = {name: e for name, e in wrong.items() if name not in routers}


def _route_changes(bench: Bench) -> float:
    """The share of choices of experts in which trainer and engine differ."""
    from isotrain.models.config import chosen_experts
    from isotrain.tools.mismatch.hooks import looking
    from isotrain.tools.mismatch.passes import Inside

    trainer, seen = bench.trainer(bench.job.dtype), Inside()
    chosen = chosen_experts(trainer.pretrained.config)
    with looking(trainer.pretrained, [f"{name}.gate" for name in bench.inside.routers], seen):
        trainer.hidden(bench.sequences)
    shares = []
    for name, logits in bench.inside.routers.items():
        own, theirs = (t.float().topk(chosen).indices.sort(-1).values for t in (seen.routers[name], logits))
        shares.append((own != theirs).any(-1).float().mean().item())
    return float(np.mean(shares))


def active_causes(bench: Bench, findings: Findings) -> list[str]:
    """Causes that can be there at all with these settings."""
    job = bench.job
    active = {"batch", "decode", "head"}
    if findings.ids:
        active.add("ids")
    elif findings.repeated > REPEATS * max(ROUNDING[job.dtype] / 2, 1e-9) and _not_repeated(bench, findings):
        active.add("recording")
    for name, there in {
        "sampling": findings.convention != CONVENTIONS[0],
        "weights": bool(findings.weights),
        "prefix": job.engine != "hf",
        "kv_cache": job.quantised,
        "routing": bool(bench.inside.routers),
        "module": bool(findings.modules),
        "dtype": job.dtype != "float32",
    }.items():
        if there:
            active.add(name)
    return [name for name in ORDER if name in active]


def _not_repeated(bench: Bench, findings: Findings) -> bool:
    """Whether the engine gives others than the reported log-probs, by more than batches differ."""
    first = bench.own(CACHED if bench.job.engine != "hf" else TOGETHER, findings.convention)
    others = [bench.own(way, findings.convention) for way in (TOGETHER, Pass(True, False), ALONE)]
    spread = max([ROUNDING[bench.job.dtype] / 2, *(mean_apart(first, other) for other in others)])
    return findings.repeated > REPEATS * spread


def experiments(bench: Bench, findings: Findings) -> dict[Removed, list[Array]]:
    """`trainer - engine` for each experiment of both orders, over the tokens that the policy wrote."""
    results = {}
    for removed in needed(findings.active):
        convention = findings.convention if "sampling" in removed else CONVENTIONS[0]
        trained = bench.trained(removed, convention)
        generated = list(bench.generated(removed, findings.convention, findings.active))
        if "ids" in removed and not removed & _ENGINE_CAUSES:
            for number in bench.other_ids:
                generated[number] = bench.repeated[number]
        results[removed] = [
            (t - g)[s.mask_N] for t, g, s in zip(trained, generated, bench.sequences, strict=True)
        ]
    return results


def save(work: Path, results: Mapping[Removed, Sequence[Array]], findings: Findings) -> None:
    arrays = {f"{'+'.join(sorted(r))}/{i}": d for r, ds in results.items() for i, d in enumerate(ds)}
    np.savez(work / "experiments.npz", allow_pickle=False, **arrays)
    (work / "findings.json").write_text(json.dumps(vars(findings)), encoding="utf-8")


def load(work: Path) -> tuple[dict[Removed, list[Array]], Findings]:
    results: dict[Removed, list[Array]] = {}
    with np.load(work / "experiments.npz", allow_pickle=False) as arrays:
        for key in arrays:
            names = key.rpartition("/")[0]
            results.setdefault(frozenset(names.split("+")) - {""}, []).append(arrays[key])
    return results, Findings(**json.loads((work / "findings.json").read_text(encoding="utf-8")))


@torch.no_grad()
def run_experiments(work: Path) -> None:
    """All experiments of a directory in which the engine's part is done."""
    job = Job.read(work)
    bench = Bench(job, work)
    findings = find_faults(bench)
    findings.active = active_causes(bench, findings)
    save(work, experiments(bench, findings), findings)


if __name__ == "__main__":
    die_with_parent()
    run_experiments(Path(sys.argv[1]))
