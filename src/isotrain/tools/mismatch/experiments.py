"""The experiments of an attribution, from what both sides computed: `python -m ... WORK`, after the engine.

N: response tokens, C: conventions, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from isotrain.children import die_with_parent
from isotrain.errors import ModelError
from isotrain.models.config import chosen_experts, model_end_tokens
from isotrain.models.files import load_tokenizer
from isotrain.tools.mismatch.attribution import Array, Removed, needed
from isotrain.tools.mismatch.causes import ORDER, ROUNDING
from isotrain.tools.mismatch.job import COMPARED, SEQUENCES, TENSORS, Job, inside_file, pass_file, read
from isotrain.tools.mismatch.passes import (
    CONVENTIONS,
    Convention,
    Forced,
    Inside,
    Pass,
    Sequence_,
    conventions,
    looking,
)
from isotrain.tools.mismatch.trainer_side import Trainer, wrong_modules

# A hypothesis is taken where it leaves less than this of the median difference.
FITS = 0.5
# How much further repeated log-probs may be from the reported ones than batches are from each other.
REPEATS = 3.0
# Of a stale prefix: how much more than another batch it changes.
STALE = 10.0
_ENGINE_CAUSES = {"recording", "prefix", "batch", "decode", "kv_cache", "head", "dtype"}
ALONE, TOGETHER, CACHED = Pass(False, False), Pass(True, True), Pass(True, True, cached=True)
NOTHING: Removed = frozenset()


@dataclass
class Findings:
    """What was seen on the way, for the report."""

    active: list[str] = field(default_factory=list)
    """Causes that can be there at all."""
    convention: Convention = CONVENTIONS[0]
    """Of the reported log-probs."""
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


class Bench:
    """Both sides' numbers, each computed when an experiment first asks for it."""

    def __init__(self, job: Job, work: Path) -> None:
        self.job, self.work = job, work
        self.findings = Findings(**json.loads((work / COMPARED).read_text(encoding="utf-8")))
        self.sequences = read(work / SEQUENCES, Sequence_)
        self.reported = [s.logp_N.astype(np.float64) for s in self.sequences]
        self.tensors = load_file(work / TENSORS)
        self.inside = self.inside_in(job.dtype)
        self._forced: dict[tuple[str, Pass], list[Forced]] = {}
        self._trainers: dict[str, Trainer] = {}
        self._hidden: dict[Any, tuple[list[torch.Tensor], torch.Tensor]] = {}
        self.variant: list[Sequence_] = []
        """The sequences with the tokens that the engine had, where these are known."""
        self.other_ids: list[int] = []
        """Sequences of which other tokens were sampled than were recorded."""

    def apart(self, a: Sequence[Array], b: Sequence[Array], by: Callable[[Array], Any] = np.mean) -> float:
        """Over the tokens that the policy wrote: nothing is reported of the others."""
        apart = [np.abs(x - y)[s.mask_N] for x, y, s in zip(a, b, self.sequences, strict=True)]
        return float(by(np.concatenate(apart)))

    def inside_in(self, dtype: str) -> Inside:
        process = self.job.looked_into if dtype == self.job.dtype else "float32"
        return Inside.from_tensors(load_file(inside_file(self.work, process)))

    def forced(self, process: str, way: Pass) -> list[Forced]:
        if (process, way) not in self._forced:
            self._forced[process, way] = read(pass_file(self.work, process, way), Forced)
        return self._forced[process, way]

    def own(self, way: Pass, process: str = "given") -> list[Array]:
        """The engine's log-probs by its own head, in the convention that it reports."""
        row = CONVENTIONS.index(self.findings.convention)
        return [f.logp_CN[row].astype(np.float64) for f in self.forced(process, way)]

    @property
    def repeated(self) -> list[Array]:
        """The engine's log-probs of the recorded tokens, as it samples."""
        return self.own(CACHED if self.job.has_cache else TOGETHER)

    def trainer(self, dtype: str) -> Trainer:
        if dtype not in self._trainers:
            self._trainers[dtype] = Trainer(self.job, dtype)
        return self._trainers[dtype]

    def by_head(
        self,
        hidden: Sequence[torch.Tensor],
        weight_VD: torch.Tensor,
        removed: Removed,
        convention: Convention,
        sequences: Sequence[Sequence_] | None = None,
    ) -> list[Array]:
        wide = "head" in removed or self.job.model.head_dtype == "float32"
        kind, row = torch.float32 if wide else getattr(torch, self.job.dtype), CONVENTIONS.index(convention)
        return [
            conventions(F.linear(h_ND.to(kind), weight_VD.to(kind)), s.response_N, self.job.sampling)[
                row
            ].astype(np.float64)
            for h_ND, s in zip(hidden, sequences or self.sequences, strict=True)
        ]

    def trained(self, removed: Removed, convention: Convention, variant: bool = False) -> list[Array]:
        """The trainer's log-probs with what is removed; `variant`: of the tokens that the engine had."""
        dtype = "float32" if "dtype" in removed else self.job.dtype
        # An engine that is given tokens has those of the recording.
        with_variant = variant or bool("ids" in removed and self.variant and not removed & _ENGINE_CAUSES)
        sequences = self.variant if with_variant else self.sequences
        changes = removed & {"weights", "routing", "module"}
        if (key := (dtype, with_variant, changes)) not in self._hidden:
            trainer = self.trainer(dtype)
            with ExitStack() as stack:
                if "weights" in changes:
                    stack.enter_context(trainer.with_weights(self.tensors))
                inside = self.inside_in(dtype) if changes & {"routing", "module"} else self.inside
                if "routing" in changes:
                    stack.enter_context(trainer.with_routes(inside))
                    stack.enter_context(trainer.with_outputs(inside, self.findings.routers))
                if "module" in changes:
                    stack.enter_context(trainer.with_outputs(inside, self.findings.modules))
                hidden, weight_VD = trainer.hidden(sequences)
                self._hidden[key] = hidden, weight_VD.clone()
        return self.by_head(*self._hidden[key], removed, convention, sequences)

    def generated(self, removed: Removed) -> list[Array]:
        """The engine's log-probs with what is removed; the reported ones where nothing of it is."""
        if not removed & _ENGINE_CAUSES:
            if "ids" not in removed:
                return self.reported
            pairs = zip(self.reported, self.repeated, strict=True)
            return [b if number in self.other_ids else a for number, (a, b) in enumerate(pairs)]
        process = "float32" if "dtype" in removed else "plain" if "kv_cache" in removed else "given"
        way = Pass("decode" not in removed, "batch" not in removed)
        cached = self._is_there("prefix", removed)
        if cached and way == TOGETHER and process == "given":
            way, cached = CACHED, False
        if "head" not in removed and "dtype" not in removed:
            logps = self.own(way, process)
        else:
            hidden = [torch.from_numpy(f.hidden_ND) for f in self.forced(process, way)]
            logps = self.by_head(hidden, self._head("dtype" in removed), removed, self.findings.convention)
        # What forcing the recorded tokens has removed with them, while it is still to be there.
        offsets = [np.zeros(len(logp_N)) for logp_N in logps]

        def add(a: Sequence[Array], b: Sequence[Array], numbers: Sequence[int]) -> None:
            for number in numbers:
                offsets[number] = offsets[number] + a[number] - b[number]

        everywhere = range(len(logps))
        if cached:  # only decoding together, as it samples, has the cached prefixes
            add(self.own(CACHED), self.own(TOGETHER), everywhere)
        if self._is_there("ids", removed) and self.variant:
            # In the types of the experiment: others would add their rounding.
            types = removed & {"dtype", "head"}
            sampled, recorded = (self.trained(types, CONVENTIONS[0], other) for other in (True, False))
            add(sampled, recorded, everywhere)
        if self._is_there("recording", removed):
            add(self.reported, self.repeated, everywhere)
        elif self._is_there("ids", removed):
            add(self.reported, self.repeated, self.other_ids)
        return [logp_N + offset_N for logp_N, offset_N in zip(logps, offsets, strict=True)]

    def _is_there(self, cause: str, removed: Removed) -> bool:
        return cause in self.findings.active and cause not in removed

    def _head(self, float32: bool) -> torch.Tensor:
        """The engine's head: the checkpoint's, unless its tensors differ."""
        stored = "lm_head.weight" not in self.findings.unread
        stale = self.tensors.get("lm_head.weight" if stored else "model.embed_tokens.weight")
        if stale is not None:
            return stale
        trainer = self.trainer("float32" if float32 else self.job.dtype)
        weight: torch.Tensor = trainer.pretrained.get_output_embeddings().weight
        return weight.detach().cpu()


def variants(bench: Bench) -> Iterator[tuple[str, list[Sequence_]]]:
    """Other tokens before the responses, of the kinds that templates get wrong."""

    prompts: list[list[int]] = [s.prompt_P.tolist() for s in bench.sequences]

    def changed(others: list[list[int]]) -> list[Sequence_]:
        return [
            replace(s, tokens_T=np.array([*other, *s.response_N], np.int32), prompt_length=len(other))
            for s, other in zip(bench.sequences, others, strict=True)
        ]

    try:
        tokenizer: Any = load_tokenizer(bench.job.directory)
    except ModelError:
        tokenizer = None
    starts = [] if tokenizer is None or tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    for token in dict.fromkeys([*starts, *model_end_tokens(bench.job.directory)]):
        yield f"token {token} before the prompt", changed([[token, *prompt] for prompt in prompts])
        yield f"token {token} after the prompt", changed([[*prompt, token] for prompt in prompts])
    yield "the prompt without its first token", changed([prompt[1:] or prompt for prompt in prompts])
    yield "the prompt without its last token", changed([prompt[:-1] or prompt for prompt in prompts])
    if tokenizer is not None:
        texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
        again = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        yield "the prompt decoded and encoded again", changed(again)


def find_faults(bench: Bench) -> Findings:
    """Mistakes by name, and which causes can be there, before shares are computed."""
    job, rounding, findings = bench.job, ROUNDING[bench.job.dtype], bench.findings
    # The trainer's convention, unless another one fits much better.
    distances = {c: bench.apart(bench.reported, bench.trained(NOTHING, c), np.median) for c in CONVENTIONS}
    best, usual = min(CONVENTIONS, key=lambda c: distances[c]), distances[CONVENTIONS[0]]
    if usual > rounding and distances[best] < FITS * usual:
        findings.convention = best
    first, together = bench.repeated, bench.own(TOGETHER)
    others = [bench.apart(first, bench.own(way)) for way in (TOGETHER, Pass(True, False), ALONE)]
    read = bench.apart(together, bench.own(Pass(True, False)))
    findings.stale_prefix = job.has_cache and others[0] > STALE * max(read, rounding / 2)
    allowed = REPEATS * max(rounding / 2, *others)
    findings.repeated = bench.apart(bench.reported, first)
    if findings.repeated > allowed:
        _look_for_ids(bench, allowed)
    if not findings.weights:
        _look_into_modules(bench)
    if bench.inside.routers:
        findings.route_changes = _route_changes(bench)
    if job.dtype != "float32":
        process = "plain" if job.quantised else "given"
        engine = bench.apart(bench.own(ALONE, process), bench.own(ALONE, "float32"))
        both = bench.trained(frozenset({"dtype", "head"}), findings.convention)
        trainer = bench.apart(bench.trained(NOTHING, findings.convention), both)
        findings.rounding_ratio = engine / max(1e-9, trainer)
    there = {
        "ids": bool(findings.ids),
        "sampling": findings.convention != CONVENTIONS[0],
        "weights": bool(findings.weights),
        "recording": findings.repeated > allowed and not findings.ids,
        "prefix": job.has_cache,
        "kv_cache": job.quantised,
        "routing": bool(bench.inside.routers),
        "module": bool(findings.modules),
        "dtype": job.dtype != "float32",
    }
    findings.active = [name for name in ORDER if there.get(name, True)]
    return findings


def _look_for_ids(bench: Bench, allowed: float) -> None:
    """The reported log-probs are not those of these tokens: which others fit?"""
    findings, trainer = bench.findings, bench.trainer(bench.job.dtype)
    convention = findings.convention
    best = FITS * bench.apart(bench.reported, bench.trained(NOTHING, convention), np.median)
    for words, sequences in variants(bench):
        fitted = bench.by_head(*trainer.hidden(sequences), NOTHING, convention, sequences)
        if (apart := bench.apart(bench.reported, fitted, np.median)) < best:
            best, findings.ids, bench.variant = apart, words, sequences
    if findings.ids:
        return
    # A wrong engine is wrong in all sequences; wrong tokens are wrong in some of them.
    pairs = zip(bench.reported, bench.repeated, bench.sequences, strict=True)
    wrong = [
        n for n, (a, b, s) in enumerate(pairs) if np.abs(a - b)[s.mask_N].sum() > allowed * s.mask_N.sum()
    ]
    if 0 < len(wrong) <= 0.9 * len(bench.sequences):
        bench.other_ids = wrong
        findings.ids = f"{len(wrong)} of {len(bench.sequences)} sequences were sampled after other tokens"


def _look_into_modules(bench: Bench) -> None:
    """In the type of the model, and in float32, where rounding hides no mistake of the code."""
    findings = bench.findings
    if not bench.inside.inputs:
        return
    for dtype in dict.fromkeys((bench.job.dtype, "float32")):
        inside = bench.inside_in(dtype)
        float32 = bench.trainer("float32").given_inputs(bench.sequences, inside)
        same = float32 if dtype == "float32" else bench.trainer(dtype).given_inputs(bench.sequences, inside)
        findings.modules_compared = len(float32.outputs.keys() & same.outputs.keys() & inside.outputs.keys())
        findings.routers |= wrong_modules(inside.routers, same.routers, float32.routers, dtype)
        findings.modules |= wrong_modules(inside.outputs, same.outputs, float32.outputs, dtype)
    # What follows from other routes is no mistake of the experts.
    findings.modules = {n: error for n, error in findings.modules.items() if n not in findings.routers}


def _route_changes(bench: Bench) -> float:
    """The share of choices of experts in which trainer and engine differ."""
    trainer = bench.trainer(bench.job.dtype)
    chosen, routers = chosen_experts(trainer.pretrained.config), bench.inside.routers
    with looking(trainer.pretrained, [f"{name}.gate" for name in routers]) as seen:
        trainer.hidden(bench.sequences)
    shares = []
    for name, logits in routers.items():
        own, theirs = (t.float().topk(chosen).indices.sort(-1).values for t in (seen.routers[name], logits))
        shares.append((own != theirs).any(-1).float().mean().item())
    return float(np.mean(shares))


def experiments(bench: Bench) -> dict[Removed, list[Array]]:
    """`trainer - engine` for each experiment of both orders, over the tokens that the policy wrote."""
    results = {}
    for removed in needed(bench.findings.active):
        convention = bench.findings.convention if "sampling" in removed else CONVENTIONS[0]
        both = zip(bench.trained(removed, convention), bench.generated(removed), bench.sequences, strict=True)
        results[removed] = [(t - g)[s.mask_N] for t, g, s in both]
    return results


def save(work: Path, results: Mapping[Removed, Sequence[Array]], findings: Findings) -> None:
    arrays = {f"{n}/{i}": d_N for n, d_RN in enumerate(results.values()) for i, d_N in enumerate(d_RN)}
    np.savez(work / "experiments.npz", allow_pickle=False, **arrays)
    (work / "findings.json").write_text(json.dumps(vars(findings)), encoding="utf-8")


def load(work: Path) -> tuple[dict[Removed, list[Array]], Findings]:
    findings = Findings(**json.loads((work / "findings.json").read_text(encoding="utf-8")))
    removed, results = needed(findings.active), dict[Removed, list[Array]]()
    with np.load(work / "experiments.npz", allow_pickle=False) as arrays:
        for key in arrays:
            results.setdefault(removed[int(key.partition("/")[0])], []).append(arrays[key])
    return results, findings


@torch.no_grad()
def run_experiments(work: Path) -> None:
    """All experiments of a directory in which the engine's part is done."""
    bench = Bench(Job.read(work), work)
    findings = find_faults(bench)
    save(work, experiments(bench), findings)


if __name__ == "__main__":
    die_with_parent()
    run_experiments(Path(sys.argv[1]))
