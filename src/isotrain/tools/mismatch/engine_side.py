"""The engine's part of a diagnosis, in a process of its own: `python -m ... WORK PROCESS`.

A process is the engine with one setting: `given`, as it samples; `plain`, without a quantised cache;
`float32`.

B: rows, N: response tokens, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from isotrain.children import die_with_parent
from isotrain.device.detect import choose_device
from isotrain.errors import RolloutError
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.models.load import build_causal_lm, layers_of
from isotrain.models.routes import mixtures
from isotrain.models.weights import WeightFiles
from isotrain.rollout.base import Sampling
from isotrain.rollout.build import build_rollout
from isotrain.rollout.hf import HfEngine, left_padded
from isotrain.tools.mismatch.job import (
    COMPARED,
    SEQUENCES,
    TENSORS,
    Job,
    first_rows,
    inside_file,
    pass_file,
    read,
    write,
)
from isotrain.tools.mismatch.passes import Forced, Inside, Pass, Sequence_, Side, conventions, looking
from isotrain.weights.file import write_update


def module_names(directory: Path) -> list[str]:
    """The parts of each layer that take and give hidden states, and its routers."""
    model = build_causal_lm(directory, "sdpa")
    layers = {id(layer) for layer in layers_of(model)}
    names = [
        f"{name}.{child}"
        for name, layer in model.named_modules()
        if id(layer) in layers
        for child, part in layer.named_children()
        if "norm" not in type(part).__name__.lower()
    ]
    return names + [f"{name.removesuffix('experts')}gate" for name, _ in mixtures(model)]


def compare_weights(work: Path, directory: Path, tensors: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Write the engine's tensors that are not those of the files, in the engine's type, bit for bit."""
    files, differs = WeightFiles(directory), dict[str, torch.Tensor]()
    unread = [name for name in files.file_of if name not in tensors]
    for name in files.file_of.keys() - set(unread):
        whole, own = files.whole(name), tensors[name].cpu()
        rounded = [whole.to(own.dtype), whole.to(getattr(torch, dtype)).to(own.dtype)]
        if not any(own.shape == w.shape and torch.equal(own, w) for w in rounded):
            differs[name] = own.contiguous().clone()
    save_file(differs, work / TENSORS)
    found = {"weights": list(differs), "unread": unread, "compared": len(files.file_of) - len(unread)}
    (work / COMPARED).write_text(json.dumps(found), encoding="utf-8")


@contextmanager
def started(job: Job, process: str) -> Iterator[Side]:
    """The engine of a process, given its tokens."""
    options = dict(job.rollout.engine_options)
    if process != "given":
        options.pop("kv_cache_dtype", None)
    # Hooks run in eager mode and in one worker, and weights are in files.
    changes = {"eager": True, "tensor_parallel": 1, "exact": False, "load_format": "safetensors"}
    side = side_of(job.rollout.engine)
    engine = build_rollout(
        job.rollout.model_copy(update={**changes, "engine_options": options}),
        job.model.path,
        "float32" if process == "float32" else job.dtype,
        device=choose_device(job.device),
        max_prompt=max(1, job.max_length - job.rollout.max_tokens),
        seed=job.seed,
        name=job.rollout.engine,
        head_float32=job.model.head_dtype == "float32",
    )
    try:
        yield side(engine, job.sampling)
    finally:
        engine.close()


def side_of(engine: str) -> Callable[[Any, Sampling], Side]:
    if engine == "vllm":
        from isotrain.tools.mismatch.vllm_side import VllmSide

        return VllmSide
    if engine == "hf":
        return HfSide
    raise RolloutError(f"--engine: isotrain cannot look into {engine} yet; write vllm or hf")


class HfSide(Side):
    def __init__(self, engine: HfEngine, sampling: Sampling) -> None:
        super().__init__(engine, sampling)
        self.model: Any = engine.model

    @torch.no_grad()
    def compute(self, batch: Sequence[Sequence_], decode: bool) -> list[Forced]:
        return (self._decode if decode else self._read)(batch)

    def tensors(self) -> dict[str, torch.Tensor]:
        publish = Publisher(self.model)
        own = {**dict(self.model.named_parameters(remove_duplicate=False)), **stored_buffers(self.model)}
        return {n: t for name, tensor in own.items() for n, t in publish(name, tensor.detach())}

    @torch.no_grad()
    def look_inside(self, sequences: Sequence[Sequence_], names: Iterable[str]) -> Inside:
        with looking(self.model, names) as inside:
            for s in sequences:
                self._states(torch.from_numpy(s.tokens_T.astype(np.int64))[None])
        return inside

    def _states(self, ids_BS: torch.Tensor, **settings: Any) -> Any:
        return self.model.base_model(
            input_ids=ids_BS.to(self.model.device), **{"use_cache": False, **settings}
        ).last_hidden_state

    def _forced(self, hidden_ND: torch.Tensor, logits_NV: torch.Tensor, s: Sequence_) -> Forced:
        return Forced(conventions(logits_NV, s.response_N, self.sampling), hidden_ND.float().cpu().numpy())

    def _read(self, batch: Sequence[Sequence_]) -> list[Forced]:
        """Whole sequences, padded on the left as the engine pads prompts."""
        ids_BS, mask_BS = left_padded([s.tokens_T for s in batch])
        extras = {} if len(batch) == 1 else self._masked(mask_BS, ids_BS.shape[1])
        results = []
        for states_SD, s in zip(self._states(ids_BS, **extras), batch, strict=True):
            hidden_ND = states_SD[-len(s.response_N) - 1 : -1]
            results.append(self._forced(hidden_ND, self.model.get_output_embeddings()(hidden_ND[None])[0], s))
        return results

    def _decode(self, batch: Sequence[Sequence_]) -> list[Forced]:
        """As the engine generates, with the tokens that are given in place of drawn ones."""
        ids_BS, mask_BS = left_padded([s.prompt_P for s in batch])
        cache = DynamicCache(config=self.model.config)
        hidden, logits = [], []
        for place in range(max(len(s.response_N) for s in batch)):
            extras = self._masked(mask_BS, ids_BS.shape[1])
            states_B1D = self._states(ids_BS, past_key_values=cache, use_cache=True, **extras)[:, -1:]
            hidden.append(states_B1D[:, 0])
            logits.append(self.model.get_output_embeddings()(states_B1D)[:, 0])
            given = [int(s.response_N[place]) if place < len(s.response_N) else 0 for s in batch]
            ids_BS = torch.tensor(given)[:, None]
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(batch), 1)], dim=1)
        return [
            self._forced(hidden_ND[: len(s.response_N)], logits_NV[: len(s.response_N)], s)
            for hidden_ND, logits_NV, s in zip(
                torch.stack(hidden, 1), torch.stack(logits, 1), batch, strict=True
            )
        ]

    def _masked(self, mask_BS: torch.Tensor, last: int) -> dict[str, torch.Tensor]:
        """Of the last tokens of padded rows."""
        positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -last:]
        device = self.model.device
        return {"attention_mask": mask_BS.to(device), "position_ids": positions_BS.to(device)}


def take_tensors(side: Side, job: Job, process: str, wrong: Mapping[str, torch.Tensor]) -> None:
    """Give the engine the checkpoint's tensors but for the wrong ones: a fault is no matter of the type."""
    files, dtype = WeightFiles(job.directory), "float32" if process == "float32" else job.dtype
    tensors = ((n, wrong.get(n, files.whole(n)).to(getattr(torch, dtype))) for n in files.file_of)
    side.engine.update_weights(write_update(tensors, side.engine.version + 1))


def measure(job: Job, work: Path, side: Side, process: str) -> None:
    """All that a process has to tell, written to `work`."""
    if process != "given" and (wrong := load_file(work / TENSORS)):
        take_tensors(side, job, process, wrong)
    if process == "given" and job.prompts:
        write(work / SEQUENCES, first_rows(side.sample(job.prompts, job.rollout.n)))
    sequences = read(work / SEQUENCES, Sequence_)
    # The cached prefixes come first: they are those of the sampling before.
    cached = [Pass(True, True, cached=True)] if process == "given" and job.has_cache else []
    for way in [*cached, *(Pass(decode, together) for decode in (True, False) for together in (True, False))]:
        write(pass_file(work, process, way), side.force(way, sequences))
    if process == "given":
        compare_weights(work, job.directory, side.tensors(), job.dtype)
    if process in (job.looked_into, "float32"):
        inside = side.look_inside(sequences, module_names(job.directory)).tensors()
        rows = sum(len(s.tokens_T) for s in sequences)
        # Without a row for each token there is nothing to compare.
        save_file({name: t for name, t in inside.items() if len(t) == rows}, inside_file(work, process))


if __name__ == "__main__":
    die_with_parent()
    with started(job := Job.read(Path(sys.argv[1])), sys.argv[2]) as side:
        measure(job, Path(sys.argv[1]), side, sys.argv[2])
