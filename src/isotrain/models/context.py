"""Context parallelism: a micro-batch whose tokens are split over a group of ranks.

Each rank runs the layers over its own tokens. Attention, which sees the others' too, exchanges tokens for
heads (Ulysses), passes keys and values around (`ring.py`), or both. Heads give numbers for a rank's own
tokens, which are then gathered: objectives see those of all tokens, on every rank of the group.

H: query heads, G: key/value heads, T: packed tokens, L: this rank's, D: head size, U: ranks that exchange
heads, N: tokens whose states are wanted, M: this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from isotrain.errors import ModelError
from isotrain.models.attention import hands_nothing_on, refuse_unsupported
from isotrain.models.context_layout import ContextRank, Layout, Wanted, lay_out, owners
from isotrain.models.ring import ring_attention
from isotrain.models.ring_blocks import RingTokens

CONTEXT = "isotrain_context"
WHOLE = "set device.mesh.context to 1, and model.attention=padded"

# Newer versions of torch warn of the old name.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place in its group, and the connections to the others."""

    place: ContextRank
    everyone: dist.ProcessGroup
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
    layout: Layout
    wanted: Wanted
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
        filled = torch.cat([values_T, values_T.new_zeros(1)])
        return filled[self.layout.places_L.to(values_T.device)]

    def of_wanted(self, values_M: torch.Tensor) -> torch.Tensor:
        """Numbers of this rank's wanted tokens -> those of all ranks."""
        return _gathered(self.group, values_M, self._wanted_rooms)

    def summed(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' single numbers, added in the same order on all of them."""
        place = self.group.place
        rooms = _Rooms.of((1,) * place.size, np.arange(place.size))
        return _gathered(self.group, own[None], rooms).sum()

    def of_tokens(self, values_L: torch.Tensor) -> torch.Tensor:
        """Numbers of this rank's tokens -> those of all packed tokens."""
        return _gathered(self.group, values_L, self._token_rooms)

    # Derived once for all layers, and for all numbers that are gathered.

    @cached_property
    def ring(self) -> RingTokens:
        return RingTokens(self.layout.parts, self.layout.lengths, self.layout.continues)

    @cached_property
    def _wanted_rooms(self) -> _Rooms:
        return _Rooms.of(self.wanted.counts, self.wanted.order_N)

    @cached_property
    def _token_rooms(self) -> _Rooms:
        return _Rooms.of(self.layout.sizes, self.layout.order_T)


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
        raise hands_nothing_on(module, WHOLE)
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
class _Rooms:
    """Where numbers are once they are gathered.

    Of equal size for all ranks, with room at the end: the fastest and most widely supported collective.
    """

    longest: int
    """The most that a rank has."""
    room: torch.Tensor
    """Of each number, in the order that is wanted."""

    @classmethod
    def of(cls, counts: Sequence[int], order: npt.NDArray[np.int64]) -> _Rooms:
        longest = max(counts)
        owner = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum([0, *counts[:-1]])
        return cls(
            longest, torch.from_numpy((owner * longest + np.arange(len(owner)) - starts[owner])[order])
        )


def _gathered(group: ContextGroup, own: torch.Tensor, rooms: _Rooms) -> torch.Tensor:
    if not rooms.longest:
        return own
    gathered: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        own, group.everyone, group.place, rooms.longest, rooms.room.to(own.device)
    )
    return gathered


class _Gather(torch.autograd.Function):
    """All ranks compute the same from what is gathered, so each keeps the gradient of its own part."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        place: ContextRank,
        longest: int,
        room: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(room)
        ctx.first, ctx.count, ctx.rows = place.index * longest, len(own), place.size * longest
        padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
        everyones = own.new_empty(ctx.rows, *own.shape[1:])
        _all_gather(everyones, padded, group=group)
        return everyones[room]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (room,) = ctx.saved_tensors
        everyones = grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, room, grad)
        return everyones[ctx.first : ctx.first + ctx.count], None, None, None, None
