"""Ring attention: queries stay, keys and values of all parts of the tokens pass by.

Each part's contribution comes with the logarithm of its softmax's denominator, so that contributions add up
to exact attention. In the backward pass keys and values go round once more and collect their gradients.

H: query heads, G: key/value heads, T: tokens of one part, D: head size, Q: queries of a block, K: its keys,
C: queries of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from isotrain.errors import ModelError

# Queries of a block where only near keys are seen: the mask stays small, and few keys are computed in vain.
BAND_QUERIES = 1024

Piece = tuple[int, int, int]
"""Neighbouring tokens of a segment: its number, the first, and the one after the last."""


class Block(NamedTuple):
    """Queries and keys, by their places within their parts."""

    queries: slice
    keys: slice
    causal: bool = False
    """Both are the same tokens, and each sees those up to itself; otherwise all keys are seen."""
    distance: int | None = None
    """With a window: tokens from the first key to the first query; a mask says which keys are seen."""


class _HeldSegment(NamedTuple):
    """The pieces of a segment within a part, which lie side by side there."""

    first: int
    pieces: tuple[tuple[int, int], ...]

    def tokens(self, start: int, stop: int) -> slice:
        """Places of some of the pieces."""
        before = self.first + sum(b - a for a, b in self.pieces[:start])
        return slice(before, before + sum(b - a for a, b in self.pieces[start:stop]))


@dataclass(frozen=True)
class RingTokens:
    """Which tokens each part holds, and which of them see each other."""

    parts: Sequence[Sequence[Piece]]
    lengths: Sequence[int]
    continues: Sequence[int]
    """For each segment the one that it continues, or -1; may be empty."""

    def size(self, part: int) -> int:
        return sum(stop - start for _, start, stop in self.parts[part])

    def blocks(self, query_part: int, other: int, window: int | None = None) -> Iterator[Block]:
        """Queries of the part `query_part` with keys of the part `other`."""
        theirs = self._segments_by_rank[other]
        for segment, queries in self._segments_by_rank[query_part].items():
            trunk = self.continues[segment] if self.continues else -1
            offset = self.lengths[trunk] if trunk >= 0 else 0
            for keys, before in ((theirs.get(trunk), offset), (theirs.get(segment), 0)):
                if keys is None:
                    continue
                if window is not None:
                    yield from _window_blocks(queries, keys, before, window)
                elif before:
                    yield Block(queries.tokens(0, len(queries.pieces)), keys.tokens(0, len(keys.pieces)))
                else:
                    yield from _earlier_blocks(queries, keys, same=query_part == other)

    @cached_property
    def _segments_by_rank(self) -> list[dict[int, _HeldSegment]]:
        held = []
        for part in self.parts:
            segments, first = {}, 0
            for segment, pieces in groupby(part, key=lambda piece: piece[0]):
                spans = tuple((start, stop) for _, start, stop in pieces)
                segments[segment] = _HeldSegment(first, spans)
                first += sum(stop - start for start, stop in spans)
            held.append(segments)
        return held


def _earlier_blocks(queries: _HeldSegment, keys: _HeldSegment, same: bool) -> Iterator[Block]:
    """Pieces of one segment do not overlap: of another part's, each is seen by all of a piece or by none."""
    if same:
        yield Block(queries.tokens(0, len(queries.pieces)), keys.tokens(0, len(keys.pieces)), causal=True)
        return
    seen = [sum(stop <= start for _, stop in keys.pieces) for start, _ in queries.pieces]
    for number, alike in groupby(range(len(seen)), key=lambda piece: seen[piece]):
        pieces = list(alike)
        if number:
            yield Block(queries.tokens(pieces[0], pieces[-1] + 1), keys.tokens(0, number))


def _window_blocks(queries: _HeldSegment, keys: _HeldSegment, before: int, window: int) -> Iterator[Block]:
    """Keys among the last `window` tokens up to each query; `before` tokens precede the queries' segment."""
    for q, (query_start, query_end) in enumerate(queries.pieces):
        place = queries.tokens(q, q + 1).start - query_start
        for start in range(query_start, query_end, BAND_QUERIES):
            stop = min(start + BAND_QUERIES, query_end)
            for k, (key_start, key_end) in enumerate(keys.pieces):
                low = max(key_start, before + start - window + 1)
                high = min(key_end, before + stop)
                if low < high:
                    at = keys.tokens(k, k + 1).start - key_start
                    yield Block(
                        slice(place + start, place + stop),
                        slice(at + low, at + high),
                        distance=before + start - low,
                    )


# Scores of all heads that are in memory at a time, where no kernel avoids them.
LARGEST_SCORES = 1 << 24

_cpu_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    query_HQD: torch.Tensor,
    key_GKD: torch.Tensor,
    value_GKD: torch.Tensor,
    block: Block,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithm of each query's softmax denominator in float32."""
    key_HKD, value_HKD = (_per_query_head(x, len(query_HQD)) for x in (key_GKD, value_GKD))
    if query_HQD.is_cpu and block.distance is None:
        out, lse = _cpu_kernel(
            query_HQD[None], key_HKD[None], value_HKD[None], 0.0, block.causal, scale=scale
        )
        return out[0], lse[0]
    out_HQD = torch.empty(query_HQD.shape, dtype=torch.float32, device=query_HQD.device)
    lse_HQ = torch.empty(query_HQD.shape[:2], dtype=torch.float32, device=query_HQD.device)
    value_HKD = value_HKD.float()
    for part, scores_HCK in _scores(query_HQD, key_HKD, block, scale, window):
        lse_HQ[:, part] = scores_HCK.logsumexp(-1)
        # A query that sees none of the keys has no softmax, and adds nothing.
        share_HCK = scores_HCK.sub_(lse_HQ[:, part, None]).exp_().nan_to_num_(0.0)
        out_HQD[:, part] = share_HCK @ value_HKD
    return out_HQD, lse_HQ


def attend_backward(
    grad_HQD: torch.Tensor,
    query_HQD: torch.Tensor,
    key_GKD: torch.Tensor,
    value_GKD: torch.Tensor,
    out_HQD: torch.Tensor,
    lse_HQ: torch.Tensor,
    block: Block,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values; output and denominator are those over all keys of all blocks."""
    heads = len(key_GKD)
    key_HKD, value_HKD = (_per_query_head(x, len(query_HQD)) for x in (key_GKD, value_GKD))
    if query_HQD.is_cpu and block.distance is None:
        grads = _cpu_kernel_backward(
            *(x[None] for x in (grad_HQD, query_HQD, key_HKD, value_HKD, out_HQD, lse_HQ)),
            0.0,
            block.causal,
            scale=scale,
        )
        query, key, value = (grad[0] for grad in grads)
        return query, _per_key_head(key, heads), _per_key_head(value, heads)
    grad_query_HQD = torch.empty(query_HQD.shape, dtype=torch.float32, device=query_HQD.device)
    grad_key_HKD, grad_value_HKD = (
        torch.zeros(key_HKD.shape, dtype=torch.float32, device=query_HQD.device) for _ in range(2)
    )
    query, key, value, grad = (x.float() for x in (query_HQD, key_HKD, value_HKD, grad_HQD))
    mean_HQ = (grad * out_HQD).sum(-1)
    for part, scores_HCK in _scores(query_HQD, key_HKD, block, scale, window):
        share_HCK = scores_HCK.sub_(lse_HQ[:, part, None]).exp_()
        grad_value_HKD += share_HCK.mT @ grad[:, part]
        towards_HCK = (grad[:, part] @ value.mT).sub_(mean_HQ[:, part, None]).mul_(share_HCK).mul_(scale)
        grad_query_HQD[:, part] = towards_HCK @ key
        grad_key_HKD += towards_HCK.mT @ query[:, part]
    return grad_query_HQD, _per_key_head(grad_key_HKD, heads), _per_key_head(grad_value_HKD, heads)


def _scores(
    query_HQD: torch.Tensor, key_HKD: torch.Tensor, block: Block, scale: float, window: int | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Scores of some queries at a time, in float32; minus infinity where a key is not seen."""
    heads, queries, keys = len(query_HQD), query_HQD.shape[1], key_HKD.shape[1]
    key_HDK = key_HKD.float().mT
    chunk = max(1, LARGEST_SCORES // (heads * keys))
    at_K = torch.arange(keys, device=query_HQD.device)
    for start in range(0, queries, chunk):
        part = slice(start, min(start + chunk, queries))
        scores_HCK = (query_HQD[:, part].float() * scale) @ key_HDK
        if block.causal or block.distance is not None:
            at_C = torch.arange(part.start, part.stop, device=query_HQD.device)
            at_C1 = at_C[:, None] + (block.distance or 0)
            hidden_CK = at_K > at_C1
            if window is not None:
                hidden_CK |= at_K <= at_C1 - window
            scores_HCK.masked_fill_(hidden_CK, -torch.inf)
        yield part, scores_HCK


def _per_query_head(x_GKD: torch.Tensor, heads: int) -> torch.Tensor:
    return x_GKD.repeat_interleave(heads // len(x_GKD), dim=0) if len(x_GKD) != heads else x_GKD


def _per_key_head(grad_HKD: torch.Tensor, heads: int) -> torch.Tensor:
    """Query heads that share a key/value head add up."""
    if len(grad_HKD) == heads:
        return grad_HKD
    summed_GKD: torch.Tensor = grad_HKD.float().unflatten(0, (heads, -1)).sum(1)
    return summed_GKD


def ring_attention(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    *,
    tokens: RingTokens,
    group: dist.ProcessGroup,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's part within all parts; returns tokens before heads."""
    if dropout:
        raise ModelError(
            "ring attention has no dropout; set the model's attention_dropout to 0, or "
            "device.mesh.context_attention to ulysses"
        )
    if key_1GTD.shape != value_1GTD.shape:
        raise ModelError(
            "ring attention needs keys and values of one size; set device.mesh.context_attention to ulysses"
        )
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    out_HTD = _Ring.apply(  # type: ignore[no-untyped-call]
        query_1HTD[0], key_1GTD[0], value_1GTD[0], tokens, group, scale, sliding_window
    )
    result: torch.Tensor = out_HTD.transpose(0, 1)[None]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: torch.Tensor,
        key_GTD: torch.Tensor,
        value_GTD: torch.Tensor,
        tokens: RingTokens,
        group: dist.ProcessGroup,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        this_part = dist.get_rank(group)
        out_HTD = torch.zeros(query_HTD.shape, dtype=torch.float32, device=query_HTD.device)
        lse_HT = torch.full(out_HTD.shape[:2], -torch.inf, dtype=torch.float32, device=query_HTD.device)
        passing = _Passing(group, tokens, torch.stack([key_GTD, value_GTD]))
        for part, (key, value) in passing.parts():
            for block in tokens.blocks(this_part, part, window):
                at = block.queries
                more_HQD, more_HQ = attend(
                    query_HTD[:, at], key[:, block.keys], value[:, block.keys], block, scale, window
                )
                _merge(out_HTD[:, at], lse_HT[:, at], more_HQD, more_HQ)
        out_HTD = out_HTD.to(query_HTD.dtype)
        ctx.save_for_backward(query_HTD, key_GTD, value_GTD, out_HTD, lse_HT)
        ctx.tokens, ctx.group, ctx.scale, ctx.window = tokens, group, scale, window
        return out_HTD

    @staticmethod
    def backward(ctx: Any, grad_HTD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_HTD, key_GTD, value_GTD, out_HTD, lse_HT = ctx.saved_tensors
        this_part = dist.get_rank(ctx.group)
        grad_query_HTD = torch.zeros(query_HTD.shape, dtype=torch.float32, device=query_HTD.device)
        passing = _Passing(ctx.group, ctx.tokens, torch.stack([key_GTD, value_GTD]), gradients=True)
        for part, (key, value) in passing.parts():
            for block in ctx.tokens.blocks(this_part, part, ctx.window):
                at, seen = block.queries, block.keys
                grad_query, grad_key, grad_value = attend_backward(
                    grad_HTD[:, at],
                    query_HTD[:, at],
                    key[:, seen],
                    value[:, seen],
                    out_HTD[:, at],
                    lse_HT[:, at],
                    block,
                    ctx.scale,
                    ctx.window,
                )
                grad_query_HTD[:, at] += grad_query
                passing.gradient[0, :, seen] += grad_key
                passing.gradient[1, :, seen] += grad_value
        grad_key, grad_value = passing.gradient.to(key_GTD.dtype)
        return grad_query_HTD.to(query_HTD.dtype), grad_key, grad_value, None, None, None, None


class _Passing:
    """Keys and values of all parts one after the other, each handed on while it is used."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tokens: RingTokens,
        keys_and_values: torch.Tensor,
        gradients: bool = False,
    ) -> None:
        self._group, self._tokens, self._now = group, tokens, keys_and_values
        self.gradient = torch.zeros(
            keys_and_values.shape if gradients else 0, dtype=torch.float32, device=keys_and_values.device
        )
        """Gradient of the keys and values at hand; after the last part, of this rank's."""
        self._gradients = gradients

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        for step in range(size):
            part = (rank - step) % size
            following = (part - 1) % size
            waiting = None
            if step + 1 < size:
                incoming = self._room(self._now, following)
                waiting = self._pass_to_next(self._now, incoming)
            yield part, self._now
            if self._gradients:  # also after the last part: its gradient goes home
                arriving = self._room(self.gradient, following)
                _wait(self._pass_to_next(self.gradient, arriving))
                self.gradient = arriving
            if waiting is not None:
                _wait(waiting)
                self._now = incoming

    def _room(self, like: torch.Tensor, part: int) -> torch.Tensor:
        return like.new_empty(*like.shape[:2], self._tokens.size(part), like.shape[3])

    def _pass_to_next(self, given: torch.Tensor, taken: torch.Tensor) -> list[dist.Work]:
        group, size, rank = self._group, dist.get_world_size(self._group), dist.get_rank(self._group)
        to, source = (dist.get_global_rank(group, n % size) for n in (rank + 1, rank - 1))
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, given, to, group), dist.P2POp(dist.irecv, taken, source, group)]
        )


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _merge(
    out_HQD: torch.Tensor, lse_HQ: torch.Tensor, more_HQD: torch.Tensor, more_HQ: torch.Tensor
) -> None:
    """Add a contribution to what is there already, in place."""
    both_HQ = torch.logaddexp(lse_HQ, more_HQ)
    # Where neither sees a key, both are minus infinity, and nothing is added to nothing.
    here_HQ, more_HQ = ((x - both_HQ).nan_to_num(nan=-torch.inf).exp() for x in (lse_HQ, more_HQ))
    out_HQD.mul_(here_HQ[..., None]).add_(more_HQD * more_HQ[..., None])
    lse_HQ.copy_(both_HQ)
