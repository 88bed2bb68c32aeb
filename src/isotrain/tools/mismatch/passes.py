"""An engine's forced log-probs: it is given the tokens, and computes them under a chosen setting.

T: tokens of a sequence, N: its response tokens, C: conventions, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.trajectory import Trajectory
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import processed

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
    def of(cls, trajectory: Trajectory) -> Sequence_:
        t = trajectory
        return cls(t.tokens_T, t.prompt_length, t.mask_N, t.logp_N)

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
    """Inputs and outputs of the engine's modules, each sequence read alone; rows are tokens."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    routers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Logits of routers by the name of the module around them."""

    def tensors(self) -> dict[str, torch.Tensor]:
        kinds = {"in": self.inputs, "out": self.outputs, "router": self.routers}
        return {f"{kind}/{name}": t for kind, of in kinds.items() for name, t in of.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Inside:
        inside = cls()
        kinds = {"in": inside.inputs, "out": inside.outputs, "router": inside.routers}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            kinds[kind][name] = tensor
        return inside


class Side(Protocol):
    """An engine that can be given its tokens."""

    def sample(self, prompts: Sequence[npt.NDArray[np.int32]], n: int) -> list[Trajectory]: ...

    def force(self, way: Pass, sequences: Sequence[Sequence_]) -> list[Forced]: ...

    def look_inside(self, sequences: Sequence[Sequence_], names: Iterable[str]) -> Inside: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights that it computes with, by its own names; of packed ones as they multiply."""


def conventions(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, sampling: Sampling
) -> npt.NDArray[np.float32]:
    """Log-probs of the targets in each convention."""
    logits_NV = logits_NV.float()
    hot_NV = {
        "raw": logits_NV,
        "temperature": logits_NV / sampling.temperature,
        "processed": processed(logits_NV, sampling),
    }
    rows = [hot_NV[c].log_softmax(-1).gather(1, targets_N[:, None])[:, 0] for c in CONVENTIONS]
    logp_CN: npt.NDArray[np.float32] = torch.stack(rows).clamp(min=LEAST_LOGP).cpu().numpy()
    return logp_CN


def requests_of(prompts: Sequence[npt.NDArray[np.int32]], n: int) -> list[Request]:
    return [
        Request(row=row, prompt_index=row, sample=sample, seed=1000 * row + sample, prompt_P=prompt_P)
        for row, prompt_P in enumerate(prompts)
        for sample in range(n)
    ]


def joined(parts: Sequence[Inside]) -> Inside:
    """Sequences one after the other."""

    def of(tables: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        names = [name for name in tables[0] if all(name in table for table in tables)] if tables else []
        return {name: torch.cat([table[name] for table in tables]) for name in names}

    return Inside(
        of([part.inputs for part in parts]),
        of([part.outputs for part in parts]),
        of([part.routers for part in parts]),
    )
