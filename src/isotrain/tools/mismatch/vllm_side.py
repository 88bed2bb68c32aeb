"""vLLM, given its tokens: its own scheduler, cache and kernels run, and a hook puts the tokens in.

Only with one worker in this process (`rollout.tensor_parallel: 1`) and in eager mode: compiled graphs run no
hooks. Run with vLLM's V1 model runner on the CPU; not run on accelerators yet.

N: response tokens, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.trajectory import Trajectory
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.vllm import VllmEngine
from isotrain.tools.mismatch.hooks import looking
from isotrain.tools.mismatch.passes import Forced, Inside, Pass, Sequence_, conventions, joined, requests_of

# Of all logits but one: a sampler with any temperature then draws that one.
_NEVER = -1e4


class VllmSide:
    def __init__(self, engine: VllmEngine, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self.runner: Any = engine.llm.collective_rpc(lambda worker: worker.model_runner)[0]

    def sample(self, prompts: Sequence[npt.NDArray[np.int32]], n: int) -> list[Trajectory]:
        return list(self.engine.generate(requests_of(prompts, n), self.sampling))

    def force(self, way: Pass, sequences: Sequence[Sequence_]) -> list[Forced]:
        if not way.cached:
            self._drop_cache()
        if way.together:
            return self._run(way.decode, sequences)
        forced = []
        for sequence in sequences:
            forced += self._run(way.decode, [sequence])
            if not way.cached:
                self._drop_cache()
        return forced

    def tensors(self) -> dict[str, torch.Tensor]:
        """Linear layers may hold packed copies: a product with the identity is the weight, bit for bit."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        model = self.runner.get_model()
        tensors = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            for name, layer in model.named_modules():
                if isinstance(layer, LinearBase):
                    kind: Any = layer.params_dtype
                    eye = torch.eye(int(layer.input_size), dtype=kind, device=self.runner.device)
                    whole = layer.quant_method.apply(layer, eye, None).T
                    tensors |= _parts(model, name, layer, whole)
                elif isinstance(layer, ParallelLMHead):
                    kind = layer.weight.dtype
                    eye = torch.eye(int(layer.embedding_dim), dtype=kind, device=self.runner.device)
                    tensors[f"{name}.weight"] = layer.quant_method.apply(layer, eye, None).T
                elif isinstance(layer, VocabParallelEmbedding):
                    ids = torch.arange(layer.org_vocab_size, device=self.runner.device)
                    tensors[f"{name}.weight"] = layer(ids)
        return tensors

    def look_inside(self, sequences: Sequence[Sequence_], names: Iterable[str]) -> Inside:
        parts = []
        for sequence in sequences:
            self._drop_cache()
            parts.append(Inside())
            tokens = len(sequence.tokens_T)
            with looking(self.runner.get_model(), names, parts[-1]):
                self.engine.logps([sequence.tokens_T])
            for table in (parts[-1].inputs, parts[-1].outputs, parts[-1].routers):
                for name in [name for name, tensor in table.items() if len(tensor) != tokens]:
                    del table[name]  # it was read in parts
        return joined(parts)

    def _drop_cache(self) -> None:
        """Forget all cached prefixes; nothing may run."""
        assert self.engine.llm.reset_prefix_cache(), "the cache is in use"

    def _run(self, decode: bool, sequences: Sequence[Sequence_]) -> list[Forced]:
        table = _Table(self.runner, sequences, self.sampling)
        with _computing(self.runner, table.decoded if decode else None, table.read):
            if decode:
                requests = [
                    Request(row, row, 0, row, s.tokens_T[: s.prompt_length], len(s.response_N))
                    for row, s in enumerate(sequences)
                ]
                longest = max(len(s.response_N) for s in sequences)
                for _ in self.engine.generate(requests, Sampling(max_tokens=longest)):
                    pass
            else:
                self.engine.logps([s.tokens_T for s in sequences])
        return table.results()


def _parts(model: Any, name: str, layer: Any, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights that a layer has put one on top of the other, by their own names."""
    prefix, _, last = name.rpartition(".")
    parts = (getattr(model, "packed_modules_mapping", None) or {}).get(last)
    if not parts:
        return {f"{name}.weight": whole}
    sizes = list(getattr(layer, "output_sizes", ()))
    return {
        f"{prefix}.{part}.weight": tensor
        for part, tensor in zip(parts, whole.split(sizes) if len(sizes) == len(parts) else (), strict=False)
    }


class _Table:
    """Which rows of logits belong to which token of which sequence."""

    def __init__(self, runner: Any, sequences: Sequence[Sequence_], sampling: Sampling) -> None:
        self.runner, self.sequences, self.sampling = runner, sequences, sampling
        self._of_request: dict[str, int] = {}
        self._logps: list[dict[int, Any]] = [{} for _ in sequences]

    def decoded(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Note the log-prob of each running request's next token, and have that token drawn."""
        forced = torch.full_like(logits, _NEVER)
        for row, request_id in enumerate(self.runner.input_batch.req_ids[: len(logits)]):
            request = self.runner.requests[request_id]
            number = self._number(request_id, request, len(request.prompt_token_ids))
            place = len(request.output_token_ids)
            token = int(self.sequences[number].response_N[place])
            self._note(number, place, hidden[row], logits[row])
            forced[row, token] = 0.0
        return forced

    def read(self, request_id: str, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Note the log-probs of a sequence that was read as a prompt, or of a part of it."""
        request = self.runner.requests[request_id]
        number = self._number(request_id, request, None)
        first = int(request.num_computed_tokens) + 1 - self.sequences[number].prompt_length
        for row in range(len(logits)):
            if first + row >= 0:
                self._note(number, first + row, hidden[row], logits[row])

    def results(self) -> list[Forced]:
        results = []
        for sequence, logps in zip(self.sequences, self._logps, strict=True):
            assert sorted(logps) == list(range(len(sequence.response_N))), "every token was computed"
            parts = [logps[place] for place in range(len(logps))]
            results.append(
                Forced(np.concatenate([p[0] for p in parts], axis=1), np.stack([p[1] for p in parts]))
            )
        return results

    def _number(self, request_id: str, request: Any, prompt: int | None) -> int:
        """The sequence of a request; responses to the same prompt are taken in turn."""
        if request_id not in self._of_request:
            tokens = np.asarray(request.prompt_token_ids, np.int32)
            taken = set(self._of_request.values())
            self._of_request[request_id] = next(
                number
                for number, s in enumerate(self.sequences)
                if number not in taken
                and np.array_equal(s.tokens_T[: s.prompt_length] if prompt else s.tokens_T, tokens)
                and (prompt is None or len(s.response_N) == request.sampling_params.max_tokens)
            )
        return self._of_request[request_id]

    def _note(self, number: int, place: int, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        token = torch.tensor([int(self.sequences[number].response_N[place])])
        logp_C1 = conventions(logits[None].cpu(), token, self.sampling)
        self._logps[number][place] = (logp_C1, hidden.detach().float().cpu().numpy())


@contextmanager
def _computing(
    runner: Any, decoded: Callable[[Any, Any], Any] | None, read: Callable[[str, Any, Any], None]
) -> Iterator[None]:
    """Have the runner's logits pass by: those of the next tokens, and those of prompts that are scored."""
    model = runner.get_model()
    compute, score = model.compute_logits, runner._get_prompt_logprobs_dict
    scored: list[str] | None = None

    def compute_logits(hidden: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden, *rest, **named)
        if scored is not None:
            read(scored.pop(0), hidden, logits)
            return logits
        return logits if decoded is None else decoded(hidden, logits)

    def score_prompts(hidden: Any, scheduled: dict[str, int], *rest: Any, **named: Any) -> Any:
        nonlocal scored

        def remaining(request_id: str) -> int:
            request = runner.requests[request_id]
            return len(request.prompt_token_ids) - int(request.num_computed_tokens) - 1

        # As vLLM goes through them: those of this step that have a token left to score.
        scored = [r for r in runner.num_prompt_logprobs if scheduled.get(r) and remaining(r) > 0]
        try:
            return score(hidden, scheduled, *rest, **named)
        finally:
            scored = None

    model.compute_logits, runner._get_prompt_logprobs_dict = compute_logits, score_prompts
    try:
        yield
    finally:
        model.compute_logits, runner._get_prompt_logprobs_dict = compute, score
