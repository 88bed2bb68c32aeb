"""The reference engine: a transformers model with a cache and a sampling loop, on any device.

B: rows, P: prompt tokens, N: response tokens, T: both, S: tokens of a padded row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache

from isotrain.data.items import Sample
from isotrain.data.packing import pack, pack_shared, plan_samples
from isotrain.data.pictures import Picture, PictureProcessor
from isotrain.data.trajectory import Trajectory
from isotrain.engine.engine import InferenceModel
from isotrain.errors import ModelError, RolloutError, WeightUpdateError
from isotrain.models.attention import shares_prompts
from isotrain.models.config import text_config, vocabulary_size
from isotrain.models.conversion import (
    Conversion,
    PublishedParts,
    WholeParameter,
    conversions,
    published_shapes,
    stored_buffers,
)
from isotrain.models.load import keep_attention_cap, language_model, read_config
from isotrain.models.packed import TokenHead
from isotrain.models.routes import FREE, RouteReplay
from isotrain.models.vision import Vision, left_padded_rows, sees
from isotrain.rollout.base import (
    More,
    Request,
    Sampling,
    check_idle,
    check_tokens,
    no_more,
    stop_tokens,
    trajectory_of,
)
from isotrain.rollout.sampling import choose, draw, logps_of
from isotrain.weights.second_buffer import SecondBuffer
from isotrain.weights.transport import check_written, erase, rehearse_incoming, unwritten
from isotrain.weights.update import WeightUpdate


@dataclass
class _Row:
    request: Request
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False
    kept: int = 0
    """Tokens that are not drawn again."""
    routes: list[npt.NDArray[np.int16]] = field(default_factory=list)
    """Experts of the prompt's tokens, then of the others that it has read, if they are recorded."""
    settled: bool = False
    """Whether all tokens were drawn from the ranks' forward pass."""

    @property
    def tokens_T(self) -> npt.NDArray[np.int32]:
        return np.concatenate([self.request.prompt_P, np.array(self.tokens, dtype=np.int32)])

    @property
    def sample(self) -> Sample:
        """For a batch whose loss-bearing tokens are those of the response."""
        tokens_T = self.tokens_T
        is_response_T = np.arange(len(tokens_T)) >= len(self.request.prompt_P)
        return Sample(tokens_T, is_response_T, self.request.pictures)


class HfEngine:
    """Refuses to generate from a failed update, or a sleep, until a good update, as every engine does."""

    updates_in_flight = True

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        dtype: str,
        device: torch.device,
        head_float32: bool = False,
        routes: bool = False,
        exact: InferenceModel | None = None,
        token_budget: int = 16384,
        batch: int = 64,
        update_timeout: float = 300.0,
    ) -> None:
        """`exact`: the model as the ranks compute it, in micro-batches of `token_budget`, to draw from.

        `routes`: trajectories have the experts of each token.
        """
        self.name, self.version, self._unusable = name, 0, ""
        self._running = self._between_tokens = False
        self._buffer = SecondBuffer(name, device)
        self._device, self.at_once, self._timeout = device, batch, update_timeout
        self._ends = set(stop_tokens(directory))
        self._exact, self._token_budget = exact, token_budget
        model: Any
        if exact is None:
            model = language_model(read_config(directory)).from_pretrained(
                directory, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
            )
        else:
            model = exact.model.pretrained
            self._config = text_config(model)
            self._packed_attention = self._config._attn_implementation
            self._config._attn_implementation = "sdpa"
        keep_attention_cap(model)
        self._cached_attention = text_config(model)._attn_implementation
        self._model = model.eval()
        self._routes = RouteReplay(self._model) if routes else None
        if head_float32:
            head = self._model.get_output_embeddings()
            head.forward = lambda hidden_BLD: F.linear(hidden_BLD.float(), head.weight.float())
        self._vision = None
        if sees(self._model.config):
            processor = PictureProcessor.of_model(directory)
            self._vision = Vision(self._model, torch.from_numpy(processor.table_CV), *processor.shape)
        self._vocabulary = vocabulary_size(self._model)
        self._move(device)

    @property
    def model(self) -> Any:
        """The transformers model, for diagnosis."""
        return self._model

    @property
    def settings(self) -> dict[str, str]:
        return {"transformers": transformers.__version__}

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        self._check_usable()
        check_idle(self.name, self._running)
        waiting = self._checked(requests)

        def ask() -> None:
            """Ask for requests between two tokens; new ones wait for the next batch."""
            self._between_tokens = True
            try:
                waiting.extend(self._checked(more()))
            finally:
                self._between_tokens = False
            self._check_usable()  # an update may have failed

        self._running = True
        try:
            ask()
            while waiting:
                batch = waiting[: self.at_once]
                del waiting[: self.at_once]
                yield from self._generate(batch, sampling, ask)
                ask()
        finally:
            self._running = False

    def stream(self, request: Request, sampling: Sampling) -> Iterator[int]:
        """The tokens of one response as they are sampled, for a reader who waits."""
        self._check_usable()
        (request,), row = self._checked([request]), _Row(request)
        ids_BS, mask_BS = (part_BS.to(self._device) for part_BS in left_padded([request.prompt_P]))
        cache = DynamicCache(config=self._model.config)
        while not row.finished:
            self._draw([row], self._step(ids_BS, mask_BS, cache), sampling)
            yield row.tokens[-1]
            ids_BS = torch.tensor([[row.tokens[-1]]], device=self._device)
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(1, 1)], dim=1)

    @torch.no_grad()
    def logps(
        self, sequences: Sequence[npt.NDArray[np.int32]], pictures: Sequence[tuple[Picture, ...]] = ()
    ) -> list[npt.NDArray[np.float32]]:
        self._check_usable()
        check_tokens(sequences, self._vocabulary, self.name)
        logps = []
        if self._exact is not None:
            samples = [Sample(tokens_T, np.ones(len(tokens_T), np.bool_)) for tokens_T in sequences]
            with self._packed() as model:
                results = model.infer([pack([sample]) for sample in samples], lambda head: head.logps())
            return [logp_T.cpu().numpy() for logp_T in results]
        for tokens_T, seen in zip(sequences, pictures or [()] * len(sequences), strict=True):
            ids_T = torch.from_numpy(tokens_T.astype(np.int64)).to(self._device)
            if seen:
                assert self._vision is not None
                batch = pack([Sample(tokens_T, np.ones(len(tokens_T), np.bool_), seen)]).to(self._device)
                embedded = self._vision(batch.tokens_T, batch.positions_T, batch.pictures)
                inputs = embedded.inputs(lambda packed: packed[None])
                hidden_BTH = self._vision.language_model(**inputs, use_cache=False).last_hidden_state
                logits_TV = self._model.get_output_embeddings()(hidden_BTH)[0, :-1].float()
            else:
                logits_TV = self._model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
            logp_T = logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
            logps.append(logp_T.cpu().numpy())
        return logps

    @torch.no_grad()
    def update_weights(self, update: WeightUpdate) -> None:
        check_idle(self.name, self._running and not self._between_tokens, WeightUpdateError)
        self._unusable = f"weight update {update.version} was not finished"
        weights, buffers = self._own(), stored_buffers(self._model)
        missing = {name for name, _ in self._model.named_parameters()} | buffers.keys()
        parts = PublishedParts(self._plan)
        with self._buffer.open(update, self._timeout) as contents:
            erase(weights.values())
            for published, tensor in contents.tensors:
                if published not in parts:
                    raise self._unfit(update, published, tensor, "no such parameter")
                for name, converted in self._converted(parts.add(published, tensor), update).items():
                    if name not in weights or weights[name].shape != converted.shape:
                        shape = f"{tuple(weights[name].shape)}" if name in weights else "no such parameter"
                        raise self._unfit(update, name, converted, shape)
                    weights[name].copy_(converted)
                    missing.discard(name)
        if missing:
            raise WeightUpdateError(
                f"{self.name}: weight update {update.version} lacks weights of {len(missing)} parameters: "
                f"{', '.join(sorted(missing)[:5])}"
            )
        check_written(update, self.name, unwritten(weights), len(weights))
        self.version, self._unusable = update.version, ""

    @cached_property
    def _plan(self) -> list[Conversion]:
        """How its tensors come from published ones, which does not change with their values."""
        tensors = self._own()
        return conversions(self._model, tensors, published_shapes(self._model, tensors))

    def _own(self) -> dict[str, torch.Tensor]:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return parameters | stored_buffers(self._model)

    def receive(self, update: WeightUpdate) -> None:
        self._buffer.begin(update, self._timeout)

    def rehearse(self, update: WeightUpdate, timeout: float) -> None:
        if error := rehearse_incoming(update, self.name, timeout, self._device):
            raise WeightUpdateError(error)

    def _converted(self, whole: WholeParameter | None, update: WeightUpdate) -> dict[str, torch.Tensor]:
        if whole is None:
            return {}
        conversion, tensors = whole
        try:
            return conversion.convert(self._model, tensors.__getitem__)
        except ModelError as error:
            raise WeightUpdateError(f"{self.name}: weight update {update.version}: {error}") from error

    def _unfit(self, update: WeightUpdate, name: str, tensor: torch.Tensor, shape: str) -> WeightUpdateError:
        return WeightUpdateError(
            f"{self.name}: weight update {update.version} has {name!r} of shape "
            f"{tuple(tensor.shape)}, the model has {shape}"
        )

    def sleep(self) -> None:
        if self._device.type == "cpu":
            return
        self._unusable = "it slept, and has no weights until the next update"
        self._move(torch.device("cpu"))
        # Another process cannot use memory that the allocator caches.
        torch.get_device_module(self._device).empty_cache()

    def wake(self, *, weights_only: bool = False) -> None:
        self._move(self._device)

    def close(self) -> None:
        self._unusable = "it was closed"
        self._model = None

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        self._model.tie_weights()  # a move between types of devices can make two parameters of one

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        check_tokens([request.prompt_P for request in requests], self._vocabulary, self.name)
        return list(requests)

    def _check_usable(self) -> None:
        if self._unusable:
            raise RolloutError(f"{self.name} does not generate: {self._unusable}")

    def _generate(
        self, requests: Sequence[Request], sampling: Sampling, between_tokens: Callable[[], None]
    ) -> Iterator[Trajectory]:
        rows = [_Row(request) for request in requests]
        if self._exact is None:
            yield from self._decode(rows, sampling, between_tokens)
            return
        while rows:
            for _ in self._decode([row for row in rows if not row.finished], sampling, between_tokens):
                self._check_usable()
            self._draw_again(rows, sampling)
            # The ranks compute a prompt once for its responses, which are therefore settled together.
            open_prompts = {row.request.prompt_index for row in rows if not row.settled}
            yield from (self._trajectory(row) for row in rows if row.request.prompt_index not in open_prompts)
            rows = [row for row in rows if row.request.prompt_index in open_prompts]

    def _decode(
        self, rows: list[_Row], sampling: Sampling, between_tokens: Callable[[], None]
    ) -> Iterator[Trajectory]:
        """Write rows to their ends, with a cache."""
        if not rows:
            return
        ids_BS, mask_BS = left_padded([row.tokens_T for row in rows])
        ids_BS, mask_BS = ids_BS.to(self._device), mask_BS.to(self._device)
        cache = DynamicCache(config=self._model.config)
        seen, shift_B = self._seen(rows)
        while True:
            with self._recording(rows, mask_BS[:, -ids_BS.shape[1] :]):
                logits_BV = self._step(ids_BS, mask_BS, cache, seen, shift_B)
            seen = None
            active = [index for index, row in enumerate(rows) if not row.finished]
            self._draw([rows[index] for index in active], logits_BV[active], sampling)
            done = [index for index in active if rows[index].finished]
            yield from (self._trajectory(rows[index]) for index in done)
            if len(done) == len(active):
                return
            between_tokens()
            # Ended rows are carried along until they are half of all: dropping them copies the cache.
            if 2 * (len(active) - len(done)) <= len(rows):
                keep = [index for index in active if index not in done]
                rows = [rows[index] for index in keep]
                kept_B = torch.tensor(keep, device=self._device)
                cache.batch_select_indices(kept_B)
                mask_BS = mask_BS[kept_B]
                shift_B = None if shift_B is None else shift_B[kept_B]
            ids_BS = torch.tensor([[row.tokens[-1]] for row in rows], device=self._device)
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(rows), 1)], dim=1)

    def _draw_again(self, rows: list[_Row], sampling: Sampling) -> None:
        """Draw all tokens of finished rows once more, with the same noise, from the ranks' own forward pass.

        A row is settled if every token is the same. Otherwise it goes on after the first that differs, which
        is replaced: a token is never drawn from a pass with a cache, whose kernels round in another way. What
        precedes the replaced one stays, so that each round settles more of the row.
        """
        assert self._exact is not None
        shared = shares_prompts(self._exact.model.attention)
        samples = [row.sample for row in rows]
        prompts = [len(row.request.prompt_P) for row in rows]
        budget = max(self._token_budget, *map(len, samples))
        for numbers in plan_samples(samples, prompts, budget, shared):
            part, lengths = [samples[i] for i in numbers], [len(rows[i].tokens) for i in numbers]
            batch = pack_shared(part, [prompts[i] for i in numbers]) if shared else pack(part)
            seeds = [rows[i].request.seed for i in numbers for _ in rows[i].tokens]
            positions = [position for length in lengths for position in range(length)]

            def drawn(
                head: TokenHead, seeds: list[int] = seeds, positions: list[int] = positions
            ) -> tuple[torch.Tensor, torch.Tensor]:
                tokens, logps = [], []
                for part, logits_CV in head.logits():
                    logp_CV = logps_of(logits_CV, sampling)
                    tokens.append(choose(logits_CV, logp_CV, sampling, seeds[part], positions[part]))
                    logps.append(logp_CV.gather(1, head.targets_N[part, None])[:, 0].cpu())
                return torch.cat(tokens), torch.cat(logps)

            with self._packed() as model:
                ((token_N, logp_N),) = model.infer([batch], drawn)
            for i, tokens, logps in zip(numbers, token_N.split(lengths), logp_N.split(lengths), strict=True):
                self._compare(rows[i], tokens.tolist(), logps.tolist(), sampling)

    def _compare(self, row: _Row, tokens: list[int], logps: list[float], sampling: Sampling) -> None:
        differing = (i for i in range(row.kept, len(tokens)) if tokens[i] != row.tokens[i])
        at = next(differing, None)
        row.settled, row.kept = at is None, len(tokens) if at is None else at + 1
        if at is not None:
            row.tokens[at:], row.finished = [tokens[at]], self._ends_with(tokens[at], at + 1, row, sampling)
            del row.versions[at + 1 :]
        row.logps = logps[: len(row.tokens)]

    @contextmanager
    def _packed(self) -> Iterator[InferenceModel]:
        """The ranks' model with their attention; decoding with a cache takes another."""
        assert self._exact is not None
        self._config._attn_implementation = self._packed_attention
        try:
            yield self._exact
        finally:
            self._config._attn_implementation = self._cached_attention

    def _ends_with(self, token: int, length: int, row: _Row, sampling: Sampling) -> bool:
        return token in self._ends or length >= row.request.room(sampling)

    @contextmanager
    def _recording(self, rows: Sequence[_Row], mask_BS: torch.Tensor) -> Iterator[None]:
        """Keep the experts of the tokens under the mask, if they are asked for."""
        if self._routes is None:
            yield
            return
        self._routes.record()
        yield
        routes_BSLK = self._routes.recorded().unflatten(0, mask_BS.shape).to("cpu", torch.int16)
        for row, routes_SLK, real_S in zip(rows, routes_BSLK, mask_BS.bool().cpu(), strict=True):
            if not row.finished:
                row.routes.append(routes_SLK[real_S].numpy())

    @torch.no_grad()
    def _seen(self, rows: Sequence[_Row]) -> tuple[dict[str, Any] | None, torch.Tensor | None]:
        """Inputs of the first pass over rows of which some have pictures, and how far positions fall behind.

        A picture takes as many positions as its longer side has tokens.
        """
        if self._vision is None or not any(row.request.pictures for row in rows):
            return None, None
        batch = pack([row.sample for row in rows]).to(self._device)
        assert batch.pictures is not None
        embedded = self._vision(batch.tokens_T, batch.positions_T, batch.pictures)
        ends = [
            positions_3L.max() + 1 for positions_3L in batch.pictures.positions_3T.split(batch.lengths, 1)
        ]
        shift_B = torch.stack(ends) - torch.tensor(batch.lengths, device=self._device)
        return embedded.inputs(partial(left_padded_rows, lengths=batch.lengths)), shift_B

    @torch.no_grad()
    def _step(
        self,
        ids_BS: torch.Tensor,
        mask_BS: torch.Tensor,
        cache: DynamicCache,
        seen: dict[str, Any] | None = None,
        shift_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits after the last token of each row; `seen` and `shift_B` as `_seen` gives them."""
        positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -ids_BS.shape[1] :]
        if shift_B is not None:
            positions_BS = positions_BS + shift_B[:, None]
        inputs: dict[str, Any] = {"attention_mask": mask_BS, "past_key_values": cache, "use_cache": True}
        if seen is not None:
            assert self._vision is not None
            output = self._vision.language_model(**seen, **inputs)
            hidden_BD = output.last_hidden_state[:, -1]
            head_BV: torch.Tensor = self._model.get_output_embeddings()(hidden_BD)
            return head_BV
        output = self._model(input_ids=ids_BS, position_ids=positions_BS, logits_to_keep=1, **inputs)
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV

    def _draw(self, rows: list[_Row], logits_BV: torch.Tensor, sampling: Sampling) -> None:
        seeds, positions = [row.request.seed for row in rows], [len(row.tokens) for row in rows]
        token_B, logp_B = draw(logits_BV, sampling, seeds, positions)
        for row, token, logp in zip(rows, token_B.tolist(), logp_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logps.append(logp)
            row.versions.append(self.version)
            row.finished = self._ends_with(token, len(row.tokens), row, sampling)

    def _trajectory(self, row: _Row) -> Trajectory:
        response_N, logp_N = np.array(row.tokens, dtype=np.int32), np.array(row.logps, dtype=np.float32)
        version_N = np.array(row.versions, dtype=np.int32)
        routes_TLK = None
        if row.routes:
            free_1LK = np.full_like(row.routes[0][:1], FREE)  # nobody has read the last token
            routes_TLK = np.concatenate([*row.routes, free_1LK])
        finished = row.tokens[-1] in self._ends
        return trajectory_of(row.request, response_N, logp_N, version_N, finished, routes_TLK)


def left_padded(prompts: Sequence[npt.NDArray[np.int32]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts that end together, and where they are; the padding is never attended to."""
    longest = max(len(prompt_P) for prompt_P in prompts)
    ids_BS = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask_BS = torch.zeros_like(ids_BS)
    for row, prompt_P in enumerate(prompts):
        ids_BS[row, longest - len(prompt_P) :] = torch.from_numpy(prompt_P)
        mask_BS[row, longest - len(prompt_P) :] = 1
    return ids_BS, mask_BS
