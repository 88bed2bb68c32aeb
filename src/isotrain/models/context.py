"""Context parallelism: a micro-batch whose tokens are split over a group of ranks.

Each rank runs the layers over its own tokens. Attention, which sees the others' too, exchanges tokens for
heads (Ulysses), passes keys and values around (`ring.py`), or both. Heads give numbers for a rank's own
tokens, which are then gathered: objectives see those of all tokens, on every rank of the group.

The ranks form `ring` parts of the tokens, and each part is split again over `heads` ranks, which exchange
tokens for heads within attention. With one part, tokens stay in their order. With several, each segment is
cut into twice as many pieces as there are parts, and a part gets the n-th piece from the front and the n-th
from the back: causal attention is then equally much work for all of them.

H: query heads, G: key/value heads, T: packed tokens, L: this rank's, D: head size, U: ranks that exchange
heads, N: tokens whose states are used, M: this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from isotrain.errors import ModelError
from isotrain.models.attention import missing_borders, refuse_unsupported
from isotrain.models.ring import RingTokens, ring_attention

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ContextRank:
    """One of `heads * ring` ranks; those of a part are neighbours."""

    heads: int
    ring: int
    index: int

    @property
    def size(self) -> int:
        return self.heads * self.ring


class TokenRun(NamedTuple):
    """Neighbouring tokens of a segment: from `start` up to `stop`, counted within it."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True)
class ContextLayout:
    lengths: tuple[int, ...]
    """Tokens of each segment. Those that only fill up a part are segments of their own, at the end."""
    continues: tuple[int, ...]
    """For each segment the one that it continues, or -1; empty where none does."""
    parts: tuple[tuple[TokenRun, ...], ...]
    """Runs of tokens in each part of the ring, in its order."""
    places_L: torch.Tensor
    """Which packed token each of this rank's tokens is; T for those that fill up."""
    order_T: npt.NDArray[np.int64]
    """Where each packed token is among all ranks' tokens, one rank's after the other's."""
    sizes: tuple[int, ...]
    """Tokens of each rank."""


def lay_out(lengths: Sequence[int], continues: Sequence[int], rank: ContextRank) -> ContextLayout:
    """A function of the batch alone: every rank of the group computes it for itself."""
    segments, trunks = list(lengths), list(continues)
    first = (0, *accumulate(lengths))
    parts, places = _parts(lengths, rank.ring), []
    for runs in parts:
        part = np.concatenate(
            [np.zeros(0, np.int64), *(first[s] + np.arange(start, stop) for s, start, stop in runs)]
        )
        missing = -len(part) % rank.heads if len(part) else rank.heads
        if missing:
            runs.append(TokenRun(len(segments), 0, missing))
            segments.append(missing)
            trunks += [-1] if trunks else []
        places += np.split(np.concatenate([part, np.full(missing, first[-1])]), rank.heads)
    order_T = np.empty(first[-1] + 1, np.int64)
    order_T[np.concatenate(places)] = np.arange(sum(map(len, places)))
    return ContextLayout(
        tuple(segments),
        tuple(trunks),
        tuple(map(tuple, parts)),
        torch.from_numpy(places[rank.index]),
        order_T[:-1],
        tuple(map(len, places)),
    )


def _parts(lengths: Sequence[int], ring: int) -> list[list[TokenRun]]:
    """The pieces of all segments for each part of the ring.

    Pieces that get one token more are chosen in turn: many short segments fill all parts alike.
    """
    if ring == 1:
        return [[TokenRun(number, 0, length) for number, length in enumerate(lengths)]]
    pieces, turn = 2 * ring, 0
    parts: list[list[TokenRun]] = [[] for _ in range(ring)]
    for number, length in enumerate(lengths):
        size, more = divmod(length, pieces)
        bounds = (0, *accumulate(size + ((piece - turn) % pieces < more) for piece in range(pieces)))
        turn = (turn + more) % pieces
        for piece in range(pieces):
            if bounds[piece] < bounds[piece + 1]:
                run = TokenRun(number, bounds[piece], bounds[piece + 1])
                parts[min(piece, pieces - 1 - piece)].append(run)
    return parts


@dataclass(frozen=True)
class SelectedTokens:
    """Which of the selected tokens are whose."""

    counts: tuple[int, ...]
    """How many each rank has."""
    own_M: torch.Tensor
    """Which of them are this rank's."""
    at_M: torch.Tensor
    """Where those are among this rank's tokens."""
    order_N: npt.NDArray[np.int64]
    """Where each is among all ranks' selected ones, one rank's after the other's."""


def owners(layout: ContextLayout, predict_N: npt.NDArray[np.int64], rank: ContextRank) -> SelectedTokens:
    selected_N = layout.order_T[predict_N]
    starts = np.array((0, *accumulate(layout.sizes)))
    owner_N = np.searchsorted(starts[1:], selected_N, side="right")
    own_M = np.flatnonzero(owner_N == rank.index)
    order_N = np.empty(len(owner_N), np.int64)
    order_N[np.argsort(owner_N, kind="stable")] = np.arange(len(owner_N))
    return SelectedTokens(
        tuple(np.bincount(owner_N, minlength=rank.size).tolist()),
        torch.from_numpy(own_M),
        torch.from_numpy(selected_N[own_M] - starts[rank.index]),
        order_N,
    )


CONTEXT = "isotrain_context"
WHOLE = "set device.mesh.context to 1, and model.attention=padded"

# Newer versions of torch warn of the old name.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place in its group, and the connections to the others."""

    place: ContextRank
    all_ranks: dist.ProcessGroup
    heads: dist.ProcessGroup
    """Ranks of this one's part of the ring."""
    ring: dist.ProcessGroup
    """Ranks with this one's heads in the other parts."""


def head_ranks(size: int, query_heads: int, key_heads: int, kind: str) -> int:
    """Over how many of `size` ranks the heads are split; what remains forms a ring.

    Exchanging heads moves fewer bytes than a ring does. Where there are more ranks than key/value heads,
    these are repeated.
    """
    fits = [
        ranks
        for ranks in range(1, size + 1)
        if size % ranks == 0
        and query_heads % ranks == 0
        and (key_heads % ranks == 0 or ranks % key_heads == 0)
    ]
    if kind == "ring":
        return 1
    if kind == "ulysses" and fits[-1] != size:
        raise ModelError(
            f"device.mesh.context: {query_heads} query and {key_heads} key/value heads cannot be split over "
            f"{size} ranks; set device.mesh.context to {fits[-1]}, or context_attention to auto"
        )
    return fits[-1]


@dataclass(frozen=True)
class Split:
    """One micro-batch, as a group computes it."""

    group: ContextGroup
    layout: ContextLayout
    selected: SelectedTokens
    inner: str
    """transformers' name for the attention that one rank computes over all tokens of its heads."""

    @classmethod
    def of(
        cls,
        group: ContextGroup,
        lengths: tuple[int, ...],
        continues: tuple[int, ...],
        predict_N: npt.NDArray[np.int64],
        inner: str,
    ) -> Split:
        layout = lay_out(lengths, continues, group.place)
        return cls(group, layout, owners(layout, predict_N, group.place), inner)

    def own(self, values_T: torch.Tensor) -> torch.Tensor:
        """This rank's tokens; those that fill up are 0."""
        filled = torch.cat([values_T, values_T.new_zeros(1, *values_T.shape[1:])])
        return filled[self.layout.places_L.to(values_T.device)]

    def of_selected(self, values_M: torch.Tensor) -> torch.Tensor:
        """Numbers of this rank's selected tokens -> those of all ranks."""
        return _gathered(self.group, values_M, self._selected_buffers)

    def summed(self, number: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' single numbers, added in the same order on all of them."""
        place = self.group.place
        buffers = _Buffers.of((1,) * place.size, np.arange(place.size))
        return _gathered(self.group, number[None], buffers).sum()

    def of_tokens(self, values_L: torch.Tensor) -> torch.Tensor:
        """Numbers of this rank's tokens -> those of all packed tokens."""
        return _gathered(self.group, values_L, self._token_buffers)

    # Derived once for all layers, and for all numbers that are gathered.

    @cached_property
    def ring(self) -> RingTokens:
        return RingTokens(self.layout.parts, self.layout.lengths, self.layout.continues)

    @cached_property
    def _selected_buffers(self) -> _Buffers:
        return _Buffers.of(self.selected.counts, self.selected.order_N)

    @cached_property
    def _token_buffers(self) -> _Buffers:
        return _Buffers.of(self.layout.sizes, self.layout.order_T)


def context_attention(
    module: torch.nn.Module,
    query_1HLD: torch.Tensor,
    key_1GLD: torch.Tensor,
    value_1GLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    split: Split | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature, over this rank's tokens."""
    refuse_unsupported(module, attention_mask, extras, "attention that is split over ranks", WHOLE)
    if split is None:
        raise missing_borders(module, WHOLE)
    heads, group = split.group.place.heads, split.group.heads
    query_1HTD, key_1GTD, value_1GTD = _tokens_for_heads(heads, group, query_1HLD, key_1GLD, value_1GLD)
    if split.group.place.ring > 1:
        out_1THD = ring_attention(
            query_1HTD,
            key_1GTD,
            value_1GTD,
            tokens=split.ring,
            group=split.group.ring,
            scaling=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
        )
    else:
        out_1THD, _ = ALL_ATTENTION_FUNCTIONS[split.inner](
            module,
            query_1HTD,
            key_1GTD,
            value_1GTD,
            None,
            segment_lengths=split.layout.lengths,
            segment_continues=split.layout.continues,
            scaling=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
        )
    return _heads_for_tokens(heads, group, out_1THD), None


# Without a mask function of the same name, transformers builds no mask: the segments are the mask.
AttentionInterface.register(CONTEXT, context_attention)


def _tokens_for_heads(
    ranks: int, group: dist.ProcessGroup, *tensors_1HLD: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Some heads of all tokens from all heads of some tokens, in one exchange for all tensors."""
    if ranks == 1:
        return tensors_1HLD
    if len({x.shape[-1] for x in tensors_1HLD}) > 1:  # values of latent attention are narrower than keys
        return tuple(_tokens_for_heads(ranks, group, x)[0] for x in tensors_1HLD)
    shares = [_per_rank(x[0], ranks) for x in tensors_1HLD]
    given_UhLD = torch.cat(shares, dim=1)
    taken_UhLD = _Exchange.apply(given_UhLD.contiguous(), group)  # type: ignore[no-untyped-call]
    parts = taken_UhLD.split([share.shape[1] for share in shares], dim=1)
    return tuple(part.transpose(0, 1).flatten(1, 2)[None] for part in parts)


def _per_rank(x_HLD: torch.Tensor, ranks: int) -> torch.Tensor:
    if len(x_HLD) % ranks:  # fewer key/value heads than ranks: neighbours share one
        x_HLD = x_HLD.repeat_interleave(ranks // len(x_HLD), dim=0)
    per_rank: torch.Tensor = x_HLD.unflatten(0, (ranks, -1))
    return per_rank


def _heads_for_tokens(ranks: int, group: dist.ProcessGroup, out_1ThD: torch.Tensor) -> torch.Tensor:
    """The way back, in the layout that attention returns: tokens before heads."""
    if ranks == 1:
        return out_1ThD
    given_ULhD = out_1ThD[0].unflatten(0, (ranks, -1))
    taken_ULhD: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        given_ULhD.contiguous(), group
    )
    return taken_ULhD.transpose(0, 1).flatten(1, 2)[None]


class _Exchange(torch.autograd.Function):
    """The n-th slice goes to rank n; its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, given_U: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(given_U, group)

    @staticmethod
    def backward(ctx: Any, grad_U: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grad_U.contiguous(), ctx.group), None


def _exchanged(given_U: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    taken_U = torch.empty_like(given_U)
    dist.all_to_all_single(taken_U, given_U, group=group)
    return taken_U


@dataclass(frozen=True)
class _Buffers:
    """Where numbers are once they are gathered.

    Of equal size for all ranks, with room at the end: the fastest and most widely supported collective.
    """

    longest: int
    """The most that a rank has."""
    place_of: torch.Tensor
    """Place of each number, in the order in which they are used."""

    @classmethod
    def of(cls, counts: Sequence[int], order: npt.NDArray[np.int64]) -> _Buffers:
        longest = max(counts)
        owner = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum([0, *counts[:-1]])
        return cls(
            longest, torch.from_numpy((owner * longest + np.arange(len(owner)) - starts[owner])[order])
        )


def _gathered(group: ContextGroup, values: torch.Tensor, buffers: _Buffers) -> torch.Tensor:
    if not buffers.longest:
        return values
    gathered: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        values, group.all_ranks, group.place, buffers.longest, buffers.place_of.to(values.device)
    )
    return gathered


class _Gather(torch.autograd.Function):
    """All ranks compute the same from what is gathered, so each keeps the gradient of its own part."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        group: dist.ProcessGroup,
        place: ContextRank,
        longest: int,
        place_of: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(place_of)
        ctx.first, ctx.count, ctx.rows = place.index * longest, len(values), place.size * longest
        padded = torch.cat([values, values.new_zeros(longest - len(values), *values.shape[1:])])
        all_values = values.new_empty(ctx.rows, *values.shape[1:])
        _all_gather(all_values, padded, group=group)
        return all_values[place_of]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_of,) = ctx.saved_tensors
        all_values = grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, place_of, grad)
        return all_values[ctx.first : ctx.first + ctx.count], None, None, None, None
