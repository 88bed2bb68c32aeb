"""An engine's forced log-probs: it is given the tokens, and computes them under a chosen setting.

T: tokens of a sequence, N: its response tokens, C: conventions, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from isotrain.data.trajectory import Trajectory
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.sampling import processed

Convention = Literal["temperature", "processed", "raw"]
# The trainer's comes first: it knows temperature, and neither top-p nor top-k.
CONVENTIONS: tuple[Convention, ...] = ("temperature", "processed", "raw")
LEAST_LOGP = -50.0
"""In place of minus infinity, of a token outside top-p by rounding."""


@dataclass(frozen=True)
class Sequence_:
    """The tokens of a trajectory, and the log-probs that the engine reported of its response."""

    tokens_T: npt.NDArray[np.int32]
    prompt_length: int
    mask_N: npt.NDArray[np.bool_]
    logp_N: npt.NDArray[np.float32]

    @classmethod
    def of(cls, t: Trajectory) -> Sequence_:
        return cls(t.tokens_T, t.prompt_length, t.mask_N, t.logp_N)

    @property
    def prompt_P(self) -> npt.NDArray[np.int32]:
        return self.tokens_T[: self.prompt_length]

    @property
    def response_N(self) -> npt.NDArray[np.int32]:
        return self.tokens_T[self.prompt_length :]


class Pass(NamedTuple):
    """A way to compute given tokens."""

    decode: bool
    """Token by token, as responses are sampled; otherwise the whole sequence is read at once."""
    together: bool
    """All sequences in one batch; otherwise each alone."""
    cached: bool = False
    """With the prefixes that earlier requests left in the cache; otherwise the cache is emptied before."""


@dataclass
class Forced:
    """What the engine computed for the response tokens of one sequence."""

    logp_CN: npt.NDArray[np.float32]
    """By its own head, in each convention."""
    hidden_ND: npt.NDArray[np.float32]
    """What the head was given."""


@dataclass
class Inside:
    """Inputs and outputs of the engine's modules; rows are tokens, sequences follow each other."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    routers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Logits of routers by the name of the module around them."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{kind}/{name}": t for kind, table in vars(self).items() for name, t in table.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Inside:
        inside = cls()
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            getattr(inside, kind)[name] = tensor
        return inside

    def note(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As a hook: add what a module was given and gave; a name ending in `.gate` is a router."""
        values = [kwargs["hidden_states"]] if "hidden_states" in kwargs else [*args, *kwargs.values()]
        given = next((v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
        result = output[0] if isinstance(output, tuple) else output
        if given is None or not isinstance(result, torch.Tensor):
            return
        tables = [(self.inputs, name, given), (self.outputs, name, result)]
        if name.endswith(".gate"):
            tables = [(self.routers, name.removesuffix(".gate"), result)]
        for table, key, tensor in tables:
            rows = tensor.detach().reshape(-1, tensor.shape[-1]).to("cpu", copy=True).contiguous()
            table[key] = torch.cat([table[key], rows]) if key in table else rows


@contextmanager
def looking(model: nn.Module, names: Iterable[str]) -> Iterator[Inside]:
    """What the modules of these names are given and give while the model runs."""
    modules, inside = dict(model.named_modules()), Inside()
    with ExitStack() as hooks:
        for name in names:
            if name in modules:
                hook = partial(inside.note, name)
                hooks.enter_context(modules[name].register_forward_hook(hook, with_kwargs=True))
        yield inside


class Side:
    """An engine that can be given its tokens."""

    def __init__(self, engine: Any, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling

    def sample(self, prompts: Iterable[Sequence[int]], n: int) -> list[Sequence_]:
        requests = [
            Request(row, row, sample, 1000 * row + sample, np.array(prompt, np.int32))
            for row, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        return [Sequence_.of(t) for t in self.engine.generate(requests, self.sampling)]

    def force(self, way: Pass, sequences: Sequence[Sequence_]) -> list[Forced]:
        forced = []
        for batch in [sequences] if way.together else [[sequence] for sequence in sequences]:
            if not way.cached:
                self.drop_cache()
            forced += self.compute(batch, way.decode)
        return forced

    def drop_cache(self) -> None:
        """Forget all cached prefixes."""

    def compute(self, batch: Sequence[Sequence_], decode: bool) -> list[Forced]:
        raise NotImplementedError

    def look_inside(self, sequences: Sequence[Sequence_], names: Iterable[str]) -> Inside:
        """Each sequence read alone."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights that it computes with, by their published names; of packed ones as they multiply."""
        raise NotImplementedError


def conventions(
    logits_NV: torch.Tensor, targets_N: npt.NDArray[np.int32], sampling: Sampling
) -> npt.NDArray[np.float32]:
    """Log-probs of the targets in each convention."""
    logits_NV = logits_NV.float().cpu()
    hot_CNV = (logits_NV / sampling.temperature, processed(logits_NV, sampling), logits_NV)
    index_N1 = torch.from_numpy(targets_N.astype(np.int64))[:, None]
    rows = [hot_NV.log_softmax(-1).gather(1, index_N1)[:, 0] for hot_NV in hot_CNV]
    logp_CN: npt.NDArray[np.float32] = torch.stack(rows).clamp(min=LEAST_LOGP).numpy()
    return logp_CN
