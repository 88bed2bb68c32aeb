"""The reference engine, given its tokens.

B: rows, N: response tokens, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from isotrain.data.trajectory import Trajectory
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.rollout.base import Sampling
from isotrain.rollout.hf import HfEngine, left_padded
from isotrain.tools.mismatch.hooks import looking
from isotrain.tools.mismatch.passes import Forced, Inside, Pass, Sequence_, conventions, joined, requests_of


class HfSide:
    def __init__(self, engine: HfEngine, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self.model: Any = engine.model

    def sample(self, prompts: Sequence[npt.NDArray[np.int32]], n: int) -> list[Trajectory]:
        return list(self.engine.generate(requests_of(prompts, n), self.sampling))

    @torch.no_grad()
    def force(self, way: Pass, sequences: Sequence[Sequence_]) -> list[Forced]:
        batches = [list(sequences)] if way.together else [[sequence] for sequence in sequences]
        compute = self._decode if way.decode else self._read
        return [forced for batch in batches for forced in compute(batch)]

    def tensors(self) -> dict[str, torch.Tensor]:
        publish = Publisher(self.model)
        own = {**dict(self.model.named_parameters(remove_duplicate=False)), **stored_buffers(self.model)}
        return {n: t for name, tensor in own.items() for n, t in publish(name, tensor.detach())}

    @torch.no_grad()
    def look_inside(self, sequences: Sequence[Sequence_], names: Iterable[str]) -> Inside:
        parts = []
        for sequence in sequences:
            parts.append(Inside())
            with looking(self.model, names, parts[-1]):
                self.model(input_ids=self._ids(sequence.tokens_T)[None], use_cache=False)
        return joined(parts)

    def _ids(self, tokens_T: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(tokens_T.astype(np.int64)).to(self.model.device)

    def _forced(
        self, logits_NV: torch.Tensor, hidden_ND: torch.Tensor, response_N: npt.NDArray[np.int32]
    ) -> Forced:
        targets_N = torch.from_numpy(response_N.astype(np.int64))
        logp_CN = conventions(logits_NV.cpu(), targets_N, self.sampling)
        return Forced(logp_CN, hidden_ND.float().cpu().numpy())

    def _head(self, hidden_BND: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden_BND)
        return logits

    def _read(self, batch: Sequence[Sequence_]) -> list[Forced]:
        """Whole sequences, padded on the left as the engine pads prompts."""
        ids_BS, mask_BS = (t.to(self.model.device) for t in left_padded([s.tokens_T for s in batch]))
        extras = {} if len(batch) == 1 else {"attention_mask": mask_BS, "position_ids": _positions(mask_BS)}
        states_BSD = self.model.base_model(input_ids=ids_BS, use_cache=False, **extras).last_hidden_state
        results = []
        for states_SD, s in zip(states_BSD, batch, strict=True):
            hidden_ND = states_SD[-len(s.response_N) - 1 : -1]
            results.append(self._forced(self._head(hidden_ND[None])[0], hidden_ND, s.response_N))
        return results

    def _decode(self, batch: Sequence[Sequence_]) -> list[Forced]:
        """As the engine generates, with the tokens that are given in place of drawn ones."""
        ids_BS, mask_BS = left_padded([s.tokens_T[: s.prompt_length] for s in batch])
        ids_BS, mask_BS = ids_BS.to(self.model.device), mask_BS.to(self.model.device)
        cache = DynamicCache(config=self.model.config)
        hidden, logits = [], []
        longest = max(len(s.response_N) for s in batch)
        for place in range(longest):
            output = self.model.base_model(
                input_ids=ids_BS,
                attention_mask=mask_BS,
                position_ids=_positions(mask_BS)[:, -ids_BS.shape[1] :],
                past_key_values=cache,
                use_cache=True,
            )
            hidden.append(output.last_hidden_state[:, -1])
            logits.append(self._head(output.last_hidden_state[:, -1:])[:, 0])
            given = [int(s.response_N[place]) if place < len(s.response_N) else 0 for s in batch]
            ids_BS = torch.tensor(given, device=self.model.device)[:, None]
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(batch), 1)], dim=1)
        hidden_BND, logits_BNV = torch.stack(hidden, 1), torch.stack(logits, 1)
        return [
            self._forced(logits_BNV[row, :n], hidden_BND[row, :n], s.response_N)
            for row, s in enumerate(batch)
            for n in [len(s.response_N)]
        ]


def _positions(mask_BS: torch.Tensor) -> torch.Tensor:
    return (mask_BS.cumsum(1) - 1).clamp(min=0)
