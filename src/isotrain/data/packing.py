"""Samples and trajectories to packed micro-batches: no padding, a token budget each, balanced over ranks.

T: tokens of a micro-batch, all samples one after the other. N: its loss-bearing tokens; those of trajectories
are all response tokens, also those that the policy did not write. S: its samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.items import Sample
from isotrain.data.packed_pictures import PackedPictures, joined_pictures
from isotrain.data.pictures import Picture
from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError

# Attention costs as much as everything else at roughly 12 x hidden size tokens; 4k hidden is the middle of
# the models people post-train. Only the balance between ranks depends on it, never a result.
ATTENTION_CROSSOVER = 49152


RoutesOfTokens = npt.NDArray[np.int16]
"""`routes_TLK` of one sample."""

FREE = -1
"""In place of experts: a mixture's router chooses for itself, as for a token that no engine has read."""


class ExpertRoutes(NamedTuple):
    """Experts of each token, in each layer that has some."""

    chosen: torch.Tensor
    """`chosen_TLK`; or `chosen_RLK`, in the order in which the routers of this rank see tokens."""
    as_seen: bool = False
    """Whether it is the second."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch. The shift by one is done here: position `predict_N[i]` predicts `targets_N[i]`."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    lengths: tuple[int, ...]
    """Tokens of each segment, on the host: kernels that need bounds get them without a device sync."""
    predict_N: torch.Tensor
    targets_N: torch.Tensor
    last_S: torch.Tensor
    """Position of each sample's last token."""
    continues: tuple[int, ...] = ()
    """For each segment the number of the one that it continues, or -1; empty where each is a sample."""
    predict_on_host_N: npt.NDArray[np.int64] | None = None
    """`predict_N` on the host, also of a batch on a device: what is decided by it needs no device sync."""
    routes: ExpertRoutes | None = None
    """Experts that a mixture sends these tokens to, where they are given."""
    pictures: PackedPictures | None = None

    @property
    def loss_tokens(self) -> int:
        return len(self.predict_N)

    def to(self, device: torch.device) -> PackedBatch:
        return replace(
            self,
            tokens_T=self.tokens_T.to(device, non_blocking=True),
            positions_T=self.positions_T.to(device, non_blocking=True),
            predict_N=self.predict_N.to(device, non_blocking=True),
            targets_N=self.targets_N.to(device, non_blocking=True),
            last_S=self.last_S.to(device, non_blocking=True),
            routes=None
            if self.routes is None
            else self.routes._replace(chosen=self.routes.chosen.to(device, non_blocking=True)),
            pictures=None if self.pictures is None else self.pictures.to(device),
        )


def pack(samples: Sequence[Sample], routes: Sequence[RoutesOfTokens | None] = ()) -> PackedBatch:
    """Lay samples one after the other.

    Without samples the batch is a single token that bears no loss: every rank must take part in every
    collective, also when there is less work than ranks.
    """
    if not samples:
        samples = [Sample(np.zeros(1, np.int32), np.zeros(1, np.bool_))]
    lengths = tuple(len(sample) for sample in samples)
    tokens_T = np.concatenate([sample.tokens_T for sample in samples]).astype(np.int64)
    # A sample's first token is predicted by nothing: it must not be predicted by the sample before it.
    bears_loss_T = np.concatenate([np.concatenate([[False], sample.mask_T[1:]]) for sample in samples])
    target_at_N = np.flatnonzero(bears_loss_T)
    sources = [(number, 0, n) for number, n in enumerate(lengths)]
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        lengths=lengths,
        predict_N=torch.from_numpy(target_at_N - 1),
        targets_N=torch.from_numpy(tokens_T[target_at_N]),
        last_S=torch.tensor(lengths).cumsum(0) - 1,
        predict_on_host_N=target_at_N - 1,
        routes=_joined_routes(samples, routes, sources),
        pictures=joined_pictures(samples, sources),
    )


# A tower of 0.6 billion weights reads four patches for each token of a language model of 4 to 8 billion.
PATCH_COST = 0.1


def computing_cost(tokens: int, seen: int) -> float:
    """Cost of tokens that each see about `seen` tokens, in units of a token that sees few."""
    return tokens * (1 + seen / ATTENTION_CROSSOVER)


def plan_micro_batches(
    lengths: Sequence[int], budget: int, ranks: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Which sample goes into which micro-batch of which rank: `plan[rank][micro_batch]` lists samples.

    Every rank gets equally many micro-batches, and the k-th ones of all ranks cost about the same: the ranks
    meet in collectives at every layer, so the slowest sets the pace. The plan is a function of its arguments
    alone; all ranks compute it for themselves. `costs` are for what is not a single sample.
    """
    longest = max(lengths, default=0)
    assert longest <= budget, f"a sample of {longest} tokens exceeds the budget of {budget}"

    costs = costs or [computing_cost(length, length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def fill(per_rank: int) -> list[list[int]] | None:
        return _fill(order, lengths, costs, budget, per_rank * ranks)

    # One more micro-batch at a time would take thousands of attempts where samples leave much of each unused:
    # double the step until all fit, then halve it, to the fewest or, beyond hundreds, within 1 % of them.
    fewest = max(1, -(-_fewest_bins(lengths, budget) // ranks))
    enough, step = fewest, max(1, fewest // 128)
    while (bins := fill(enough)) is None:
        fewest, enough, step = enough + 1, enough + step, 2 * step
    while enough - fewest > enough // 128:
        middle = (fewest + enough) // 2
        if (fewer := fill(middle)) is None:
            fewest = middle + 1
        else:
            enough, bins = middle, fewer
    return [bins[rank::ranks] for rank in range(ranks)]


def _fewest_bins(lengths: Sequence[int], budget: int) -> int:
    """How many bins any packing needs at least: for all tokens, and for the samples of each size.

    At most k samples longer than budget / (k + 1) go into one bin.
    """
    sizes = np.sort(np.asarray(lengths, np.int64))
    fewest = -(-int(sizes.sum()) // budget)
    for k in range(1, min(len(sizes), 16) + 1):
        longer = len(sizes) - int(np.searchsorted(sizes, budget // (k + 1), side="right"))
        fewest = max(fewest, -(-longer // k))
    return fewest


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """In `order`, longest first, each into the cheapest bin that has room; None where one does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    open_bins = [(0.0, 0, index) for index in range(count)]
    # Bins without room for the sample at hand, emptiest first: later samples are shorter and may fit again.
    full_bins: list[tuple[int, float, int]] = []
    for sample in order:
        room = budget - lengths[sample]
        while full_bins and full_bins[0][0] <= room:
            tokens, cost, index = heapq.heappop(full_bins)
            heapq.heappush(open_bins, (cost, tokens, index))
        if not open_bins:
            return None
        cost, tokens, index = heapq.heappop(open_bins)
        bins[index].append(sample)
        cost, tokens = cost + costs[sample], tokens + lengths[sample]
        if tokens <= room:
            heapq.heappush(open_bins, (cost, tokens, index))
        else:
            heapq.heappush(full_bins, (tokens, cost, index))
    by_cost = sorted(bins, key=lambda samples: -sum(costs[i] for i in samples))
    return [sorted(samples) for samples in by_cost]


Places = npt.NDArray[np.int64]


# Samples that begin alike, packed with that beginning stored once.


@dataclass
class _Layout:
    """Segments one after the other, each with the one that it continues."""

    tokens: list[npt.NDArray[np.int32]] = field(default_factory=list)
    positions: list[Places] = field(default_factory=list)
    continues: list[int] = field(default_factory=list)
    stored: int = 0
    sources: list[tuple[int, int, int]] = field(default_factory=list)
    """For each segment, the sample that it is from, and which of its tokens."""

    def add(self, tokens_T: npt.NDArray[np.int32], position: int = 0, continues: int = -1) -> Places:
        """Store a segment whose first token is at `position` of its sample; returns where its tokens are."""
        self.tokens.append(tokens_T)
        self.positions.append(np.arange(position, position + len(tokens_T)))
        self.continues.append(continues)
        self.stored += len(tokens_T)
        return np.arange(self.stored - len(tokens_T), self.stored)


def same_prompt(samples: Sequence[Sample], prompts: Sequence[int]) -> list[list[int]]:
    """Numbers of the samples whose first `prompts[i]` tokens and pictures are equal, group by group."""
    groups: dict[tuple[bytes | str, ...], list[int]] = {}
    for number, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        # The same words with other pictures of one size are the same tokens.
        pictures = [picture.digest for picture in sample.pictures if picture.start < prompt]
        groups.setdefault((sample.tokens_T[:prompt].tobytes(), *pictures), []).append(number)
    return list(groups.values())


def pack_shared(
    samples: Sequence[Sample], prompts: Sequence[int], routes: Sequence[RoutesOfTokens | None] = ()
) -> PackedBatch:
    """As `pack` does, but equal prompts (the first `prompts[i]` tokens of sample i) are computed once.

    Loss-bearing tokens stay in the order of the samples. A prompt that only one sample has is not split off.
    Its routes are those of the first sample that has it.
    """
    if not samples:
        return pack(samples)
    layout = _Layout()
    places: list[Places] = [np.zeros(0, np.int64)] * len(samples)
    for members in same_prompt(samples, prompts):
        if len(members) == 1 or not prompts[members[0]]:
            for number in members:
                layout.sources.append((number, 0, len(samples[number])))
                places[number] = layout.add(samples[number].tokens_T)
            continue
        prompt = prompts[members[0]]
        layout.sources.append((members[0], 0, prompt))
        trunk, trunk_places = len(layout.tokens), layout.add(samples[members[0]].tokens_T[:prompt])
        # Neighbours of equal length share one attention call.
        for number in sorted(members, key=lambda member: len(samples[member])):
            rest_T = samples[number].tokens_T[prompt:]
            layout.sources += [(number, prompt, len(samples[number]))] if len(rest_T) else []
            rest_places = layout.add(rest_T, prompt, trunk) if len(rest_T) else np.zeros(0, np.int64)
            places[number] = np.concatenate([trunk_places, rest_places])
    # Within each sample: what it predicts from the second token on, and from where.
    targets = [np.flatnonzero(sample.mask_T[1:]) + 1 for sample in samples]
    tokens_T = np.concatenate(layout.tokens).astype(np.int64)
    predict_N = np.concatenate([place[at - 1] for place, at in zip(places, targets, strict=True)])
    target_at_N = np.concatenate([place[at] for place, at in zip(places, targets, strict=True)])
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(np.concatenate(layout.positions)),
        lengths=tuple(len(tokens) for tokens in layout.tokens),
        predict_N=torch.from_numpy(predict_N),
        predict_on_host_N=predict_N,
        targets_N=torch.from_numpy(tokens_T[target_at_N]),
        last_S=torch.tensor([int(place[-1]) for place in places]),
        continues=tuple(layout.continues) if max(layout.continues) >= 0 else (),
        routes=_joined_routes(samples, routes, layout.sources),
        pictures=joined_pictures(samples, layout.sources),
    )


def _joined_routes(
    samples: Sequence[Sample],
    routes: Sequence[RoutesOfTokens | None],
    sources: Sequence[tuple[int, int, int]],
) -> ExpertRoutes | None:
    """In the order of the segments; samples without any leave the choice to the routers."""
    known = next((sample_TLK for sample_TLK in routes if sample_TLK is not None), None)
    if known is None:
        return None
    all_TLK = [
        np.full((len(sample), *known.shape[1:]), FREE, np.int16) if routes_TLK is None else routes_TLK
        for sample, routes_TLK in zip(samples, routes, strict=True)
    ]
    joined_TLK = np.concatenate([all_TLK[number][start:stop] for number, start, stop in sources])
    return ExpertRoutes(torch.from_numpy(joined_TLK))


# Pieces of groups are what is spread over ranks. Fewer for each rank, and ranks would wait for each other.
PIECES_PER_RANK = 4
# A piece of more than this part of a micro-batch leaves holes that nothing fits into.
LARGEST_PIECE = 1 / 8
# Unless so many prompts are longer: a prompt that is read once for so many tokens costs little.
PROMPTS_OF_PIECE = 4


class _Piece(NamedTuple):
    """Trajectories of one group that go to the same micro-batch."""

    numbers: list[int]
    tokens: int
    cost: float


def plan_mini_batches(
    groups: Sequence[tuple[int, Sequence[int]]],
    groups_per_mini_batch: int,
    budget: int,
    ranks: int,
    share_prompts: bool,
) -> list[list[list[list[int]]]]:
    """`plan[mini_batch][rank][micro_batch]` lists trajectories, numbered through the groups in their order.

    A group is the length of a prompt and of the responses to it. Groups stay whole within a mini-batch; the
    last mini-batch may be smaller. Within a mini-batch all ranks have equally many micro-batches. With
    `share_prompts` a prompt counts once for all responses of its group in a micro-batch.
    """
    assert groups_per_mini_batch >= 1
    firsts = list(accumulate((len(responses) for _, responses in groups), initial=0))
    plan = []
    for start in range(0, len(groups), groups_per_mini_batch):
        mini = range(start, min(start + groups_per_mini_batch, len(groups)))
        least_pieces = -(-PIECES_PER_RANK * ranks // len(mini))
        pieces = [
            piece
            for group in mini
            for piece in _cut(*groups[group], firsts[group], least_pieces, budget, share_prompts)
        ]
        mini_plan = plan_micro_batches([p.tokens for p in pieces], budget, ranks, [p.cost for p in pieces])
        plan.append(
            [[sorted(i for p in micro for i in pieces[p].numbers) for micro in rank] for rank in mini_plan]
        )
    return plan


def plan_samples(
    samples: Sequence[Sample], prompts: Sequence[int], budget: int, share_prompts: bool
) -> list[list[int]]:
    """One rank's micro-batches of samples that begin with `prompts[i]` tokens of a prompt.

    A sample beyond the budget has a micro-batch of its own.
    """
    groups = same_prompt(samples, prompts)
    order = [number for members in groups for number in members]
    lengths = [
        (prompts[members[0]], [min(len(samples[i]), budget) - prompts[i] for i in members])
        for members in groups
    ]
    plan = plan_mini_batches(lengths, max(1, len(groups)), budget, 1, share_prompts)
    return [[order[i] for i in micro] for mini in plan for micro in mini[0]]


def _cut(
    prompt: int, responses: Sequence[int], first: int, least_pieces: int, budget: int, share: bool
) -> list[_Piece]:
    """A group in at least `least_pieces` pieces, if it has so many responses, each within the budget."""
    repeated = 0 if share else prompt
    once = prompt - repeated
    tokens = once + sum(repeated + response for response in responses)
    largest = min(budget, max(int(budget * LARGEST_PIECE), PROMPTS_OF_PIECE * prompt))
    count = max(1, min(len(responses), max(least_pieces, -(-tokens // largest))))
    order = sorted(range(len(responses)), key=lambda i: (-responses[i], i))
    while True:
        # Longest first into the piece that has least.
        lightest = [(once, piece) for piece in range(count)]
        members: list[list[int]] = [[] for _ in range(count)]
        for i in order:
            size, piece = heapq.heappop(lightest)
            members[piece].append(i)
            heapq.heappush(lightest, (size + repeated + responses[i], piece))
        if count >= len(responses) or max(size for size, _ in lightest) <= budget:
            break
        count = min(2 * count, len(responses))
    sizes = {piece: size for size, piece in lightest}
    return [
        _Piece(
            [first + i for i in chosen],
            sizes[piece],
            computing_cost(once, prompt)
            + sum(computing_cost(repeated + responses[i], prompt + responses[i]) for i in chosen),
        )
        for piece, chosen in enumerate(members)
        if chosen
    ]


@dataclass(frozen=True)
class PolicyBatch:
    packed: PackedBatch
    """Prompts and responses; its loss-bearing tokens are all response tokens."""
    lengths: tuple[int, ...]
    """Response tokens of each trajectory, on the host; may be 0."""
    mask_N: torch.Tensor
    """Which tokens the policy wrote."""
    rollout_logp_N: torch.Tensor
    """Log-probs of the policy that sampled, from its engine."""
    index: tuple[int, ...]
    """Number of each trajectory within the step."""
    turn_rewards_N: torch.Tensor | None = None
    """Where episodes have rewards by turn: those of all turns but the last, on their last tokens."""
    earlier: tuple[float, ...] = ()
    """Beside them: rewards that the episode of each trajectory was given in earlier sequences."""

    def to(self, device: torch.device) -> PolicyBatch:
        return replace(
            self,
            packed=self.packed.to(device),
            mask_N=self.mask_N.to(device, non_blocking=True),
            rollout_logp_N=self.rollout_logp_N.to(device, non_blocking=True),
            turn_rewards_N=None if self.turn_rewards_N is None else self.turn_rewards_N.to(device),
        )


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    index: Sequence[int],
    share_prompts: bool = False,
    pictures: Callable[[int], tuple[Picture, ...]] = lambda row: (),
) -> PolicyBatch:
    """Lay trajectories one after the other; without any, the batch has a token but no response tokens.

    With `share_prompts` a prompt with several responses is there once. `pictures` are those of a row.
    """
    assert len(trajectories) == len(index)
    samples = []
    for trajectory in trajectories:
        assert trajectory.prompt_length >= 1, "nothing would predict the response's first token"
        is_response_T = np.arange(len(trajectory)) >= trajectory.prompt_length
        own = pictures(trajectory.row)
        if (digests := tuple(picture.digest for picture in own)) != trajectory.pictures:
            raise DataError(
                f"the response to row {trajectory.row} saw other pictures ({_short(trajectory.pictures)}) "
                f"than data.train has there ({_short(digests)}); use the data that it was sampled from"
            )
        samples.append(Sample(trajectory.tokens_T, is_response_T, own))
    # Copies of the given types even for no trajectories at all, and memory that torch may write to.
    mask_N = np.concatenate([np.zeros(0, np.bool_), *(t.mask_N for t in trajectories)])
    logp_N = np.concatenate([np.zeros(0, np.float32), *(t.logp_N for t in trajectories)])
    prompts = [trajectory.prompt_length for trajectory in trajectories]
    routes = [trajectory.routes_TLK for trajectory in trajectories]
    turn_rewards = [_turn_rewards(trajectory) for trajectory in trajectories]
    episodes = [t.episode for t in trajectories if t.episode is not None]
    by_turn = any(episode.earlier for episode in episodes) or any(map(np.any, turn_rewards))
    return PolicyBatch(
        packed=pack_shared(samples, prompts, routes) if share_prompts else pack(samples, routes),
        lengths=tuple(len(t.mask_N) for t in trajectories),
        mask_N=torch.from_numpy(mask_N),
        rollout_logp_N=torch.from_numpy(logp_N),
        index=tuple(index),
        turn_rewards_N=torch.from_numpy(np.concatenate(turn_rewards)) if by_turn else None,
        earlier=tuple(t.episode.earlier if t.episode else 0.0 for t in trajectories) if by_turn else (),
    )


def _short(digests: Sequence[str]) -> str:
    return ", ".join(digest[:12] for digest in digests) or "none"


def _turn_rewards(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    """Rewards on the last tokens of all turns but the last, whose reward is part of that at the end."""
    rewards_N = np.zeros(len(trajectory.mask_N), np.float32)
    turns = trajectory.episode.turns if trajectory.episode else ()
    for turn in [turn for turn in turns if turn.end > turn.start][:-1]:
        rewards_N[turn.end - 1] = turn.reward
    return rewards_N
