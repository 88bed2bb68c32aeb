"""vLLM, given its tokens: its own scheduler, cache and kernels run, and a hook puts the tokens in.

Only with one worker in this process and in eager mode: compiled graphs run no hooks. Run with vLLM's V1 model
runner on the CPU; not run on accelerators yet.

N: response tokens, V: vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.vllm import VllmEngine
from isotrain.tools.mismatch.passes import Forced, Inside, Sequence_, Side, conventions, looking

# Of all logits but one: a sampler with any temperature then draws that one.
_NEVER = -1e4


class VllmSide(Side):
    def __init__(self, engine: VllmEngine, sampling: Sampling) -> None:
        super().__init__(engine, sampling)
        self.runner: Any = engine.llm.collective_rpc(lambda worker: worker.model_runner)[0]

    def drop_cache(self) -> None:
        assert self.engine.llm.reset_prefix_cache(), "the cache is in use"

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """Linear layers may hold packed copies: a product with the identity is the weight, bit for bit."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        model: Any = self.runner.get_model()
        tensors = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
        for name, layer in model.named_modules():
            if isinstance(layer, LinearBase | ParallelLMHead):
                known: Any = layer
                size, kind = (
                    (known.embedding_dim, known.weight.dtype)
                    if isinstance(layer, ParallelLMHead)
                    else (known.input_size, known.params_dtype)
                )
                eye: Any = torch.eye(int(size), dtype=kind, device=self.runner.device)
                tensors |= _parts(model, name, known, known.quant_method.apply(known, eye, None).T)
            elif isinstance(layer, VocabParallelEmbedding):
                tensors[f"{name}.weight"] = layer(
                    torch.arange(layer.org_vocab_size, device=self.runner.device)
                )
        return tensors

    def look_inside(self, sequences: Sequence[Sequence_], names: Iterable[str]) -> Inside:
        with looking(self.runner.get_model(), names) as inside:
            for sequence in sequences:
                self.drop_cache()
                self.engine.logps([sequence.tokens_T])
        return inside

    def compute(self, batch: Sequence[Sequence_], decode: bool) -> list[Forced]:
        table = _Table(self.runner, batch, decode, self.sampling)
        # A response of several turns has the tokens in it that would end it.
        ends, self.engine._ends = self.engine._ends, ()
        try:
            with table.filled():
                if decode:
                    requests = [
                        Request(row, row, 0, row, s.prompt_P, len(s.response_N))
                        for row, s in enumerate(batch)
                    ]
                    longest = max(len(s.response_N) for s in batch)
                    list(self.engine.generate(requests, Sampling(max_tokens=longest)))
                else:
                    self.engine.logps([s.tokens_T for s in batch])
        finally:
            self.engine._ends = ends
        return table.results()


def _parts(model: Any, name: str, layer: Any, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights that a layer has put one on top of the other, by their own names."""
    prefix, _, last = name.rpartition(".")
    parts = (getattr(model, "packed_modules_mapping", None) or {}).get(last)
    if not parts:
        return {f"{name}.weight": whole}
    sizes = list(getattr(layer, "output_sizes", ()))
    pieces = whole.split(sizes) if len(sizes) == len(parts) else ()
    return {f"{prefix}.{part}.weight": piece for part, piece in zip(parts, pieces, strict=False)}


class _Table:
    """Which rows of logits belong to which token of which sequence, and what they say of it."""

    def __init__(self, runner: Any, sequences: Sequence[Sequence_], decode: bool, sampling: Sampling) -> None:
        self.runner, self.sequences, self.decode, self.sampling = runner, sequences, decode, sampling
        self._scored: list[str] | None = None
        self._of_request: dict[str, int] = {}
        self._forced: list[dict[int, Forced]] = [{} for _ in sequences]
        # By tokens and the number of new ones; responses to the same prompt are taken in turn.
        self._waiting: dict[tuple[bytes, int], list[int]] = defaultdict(list)
        for number, s in enumerate(sequences):
            given, new = (s.prompt_P, len(s.response_N)) if decode else (s.tokens_T, 1)
            self._waiting[given.tobytes(), new].append(number)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Have the logits of next tokens and of scored prompts pass by."""
        model, runner = self.runner.get_model(), self.runner
        compute, score = model.compute_logits, runner._get_prompt_logprobs_dict

        def compute_logits(hidden: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            logits: torch.Tensor = compute(hidden, *rest, **named)
            if self._scored is not None:
                self._note_prompt(self._scored.pop(0), hidden, logits)
            elif self.decode:
                return self._note_next(hidden, logits)
            return logits

        def score_prompts(hidden: Any, scheduled: dict[str, int], *rest: Any, **named: Any) -> Any:
            def remaining(request_id: str) -> int:
                request = runner.requests[request_id]
                return len(request.prompt_token_ids) - int(request.num_computed_tokens) - 1

            # As vLLM goes through them: those of this step that have a token left to score.
            self._scored = [r for r in runner.num_prompt_logprobs if scheduled.get(r) and remaining(r) > 0]
            try:
                return score(hidden, scheduled, *rest, **named)
            finally:
                self._scored = None

        model.compute_logits, runner._get_prompt_logprobs_dict = compute_logits, score_prompts
        try:
            yield
        finally:
            model.compute_logits, runner._get_prompt_logprobs_dict = compute, score

    def results(self) -> list[Forced]:
        results = []
        for sequence, table in zip(self.sequences, self._forced, strict=True):
            assert sorted(table) == list(range(len(sequence.response_N))), "every token was computed"
            parts = [table[place] for place in range(len(table))]
            logps, hidden = [p.logp_CN for p in parts], [p.hidden_ND for p in parts]
            results.append(Forced(np.concatenate(logps, axis=1), np.concatenate(hidden)))
        return results

    def _note_next(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Note the log-prob of each running request's next token, and have that token drawn."""
        forced = torch.full_like(logits, _NEVER)
        for row, request_id in enumerate(self.runner.input_batch.req_ids[: len(logits)]):
            place = len(self.runner.requests[request_id].output_token_ids)
            token = self._note(self._number(request_id), place, hidden[row], logits[row])
            forced[row, token] = 0.0
        return forced

    def _note_prompt(self, request_id: str, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Note the log-probs of a sequence that was read as a prompt, or of a part of it."""
        number = self._number(request_id)
        computed = int(self.runner.requests[request_id].num_computed_tokens)
        first = computed + 1 - self.sequences[number].prompt_length
        for row in range(max(0, -first), len(logits)):
            self._note(number, first + row, hidden[row], logits[row])

    def _number(self, request_id: str) -> int:
        """The sequence of a request."""
        if request_id not in self._of_request:
            request = self.runner.requests[request_id]
            tokens = np.asarray(request.prompt_token_ids, np.int32).tobytes()
            self._of_request[request_id] = self._waiting[tokens, request.sampling_params.max_tokens].pop(0)
        return self._of_request[request_id]

    def _note(self, number: int, place: int, hidden: torch.Tensor, logits: torch.Tensor) -> int:
        token_N = self.sequences[number].response_N[place : place + 1]
        logp_C1 = conventions(logits[None], token_N, self.sampling)
        self._forced[number][place] = Forced(logp_C1, hidden.detach()[None].float().cpu().numpy())
        return int(token_N[0])
