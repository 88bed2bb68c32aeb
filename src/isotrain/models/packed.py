"""Hugging Face models over packed samples: the backbone, and heads for token log-probs or scores.

Log-probs and entropies are computed in chunks: no step holds all tokens' logits.

T: packed tokens, N: those whose states are used, C: tokens of a chunk, S: samples, L: longest sample,
D: hidden size, V: vocabulary, K: classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from isotrain.models.attention import FUSED, SEGMENTS, is_padded, shares_prompts
from isotrain.models.context import ContextGroup, Split
from isotrain.models.experts import RouterBalance
from isotrain.models.fused import NONE_FUSED, Fused
from isotrain.models.logits import PLAIN, LogitTransform, read_transform
from isotrain.models.mixers import unpack_mixers
from isotrain.models.routes import FREE, RouteReplay
from isotrain.models.vision import Embedded, Pictures, Vision


def _chunks(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


def _logits(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    return transform(F.linear(hidden_CD, weight_VD).float())


def _cooled(logits_CV: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


class _HeadGradient:
    """Gradients of a head collected chunk by chunk; the weight's is summed in float32."""

    def __init__(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, needs_weight: bool) -> None:
        self.hidden_ND = torch.empty_like(hidden_ND)
        # Zero, not None, where no token bears loss: in a reduction all ranks must bring the same tensors.
        empty = needs_weight and len(hidden_ND) == 0
        self.weight_VD: torch.Tensor | None = torch.zeros_like(weight_VD) if empty else None

    def add(self, part: slice, grad_CD: torch.Tensor, grad_VD: torch.Tensor | None = None) -> None:
        """Take in what one chunk gives: its own hidden states' gradient, and its share of the weight's."""
        self.hidden_ND[part] = grad_CD
        if grad_VD is not None:
            # The first chunk's gradient is kept as it is: a single chunk needs no float32 copy.
            self.weight_VD = grad_VD if self.weight_VD is None else self.weight_VD.float().add_(grad_VD)


class NllShare(torch.autograd.Function):
    """The gradient is known before the backward pass, because nothing after the sum depends on its terms.

    The division happens before the head's matrix products, as it does in a loop written out by hand: with a
    single chunk the two agree bit for bit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        loss_tokens: int,
        chunk: int,
        transform: LogitTransform,
        scale: float,
    ) -> torch.Tensor:
        gradient = _HeadGradient(hidden_ND, weight_VD, needs_weight=ctx.needs_input_grad[1])
        leaf_VD = weight_VD.detach().requires_grad_(ctx.needs_input_grad[1])
        share = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        for part in _chunks(len(targets_N), chunk):
            hidden_CD = hidden_ND[part].detach().requires_grad_()
            with torch.enable_grad():
                logits_CV = _logits(hidden_CD, leaf_VD, transform)
                nll_C = F.cross_entropy(logits_CV, targets_N[part], reduction="none")
                del logits_CV  # or it lives while the next chunk's are made
                value = nll_C.sum() / loss_tokens
            inputs = (hidden_CD, leaf_VD) if leaf_VD.requires_grad else (hidden_CD,)
            gradient.add(part, *torch.autograd.grad(value, inputs, torch.full_like(value, scale)))
            share += value.detach()
        ctx.gradient, ctx.weight_dtype, ctx.scale = gradient, weight_VD.dtype, scale
        return share

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, grad = ctx.gradient, grad / ctx.scale
        grad_weight = None
        if gradient.weight_VD is not None:
            grad_weight = _scaled(gradient.weight_VD, grad).to(ctx.weight_dtype)
        return _scaled(gradient.hidden_ND, grad), grad_weight, None, None, None, None, None


def _scaled(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # A loss that is the last word has gradient 1. Where looking is free, that saves a pass over the weight.
    return tensor if factor.is_cpu and factor.item() == 1.0 else tensor * factor


class LogpsAndEntropies(torch.autograd.Function):
    """Entropies that are not wanted are not computed, and mean nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
        temperature: float,
        transform: LogitTransform,
        entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp_N, norm_N, entropy_N = _all_chunks(
            hidden_ND, weight_VD, targets_N, chunk, temperature, transform, entropies
        )
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, norm_N, entropy_N)
        ctx.chunk, ctx.temperature, ctx.transform = chunk, temperature, transform
        ctx.set_materialize_grads(False)  # an output that nothing depends on is seen as such
        return logp_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad_logp_N, grad_entropy_N)


def _all_chunks(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    chunk: int,
    temperature: float,
    transform: LogitTransform,
    entropies: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the targets, the logarithm of each softmax's denominator, and entropies if wanted."""
    logp_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
    norm_N, entropy_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
    for part in _chunks(len(targets_N), chunk):
        logits_CV = _cooled(_logits(hidden_ND[part], weight_VD, transform), temperature)
        targets_C1 = targets_N[part, None]
        norm_N[part] = logits_CV.gather(1, targets_C1)[:, 0]
        logp_CV = torch.log_softmax(logits_CV, -1)
        logp_N[part] = logp_CV.gather(1, targets_C1)[:, 0]
        if entropies:
            entropy_N[part] = -torch.linalg.vecdot(torch.exp(logp_CV, out=logits_CV), logp_CV)
        del logits_CV, logp_CV  # before the next chunk's are there
    return logp_N, norm_N.sub_(logp_N), entropy_N


def _backward(
    ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The logits are computed a second time; what was learnt about them in the forward pass is not."""
    hidden_ND, weight_VD, targets_N, norm_N, entropy_N = ctx.saved_tensors
    if grad_logp_N is None:
        grad_logp_N = torch.zeros_like(norm_N)
    gradient = _HeadGradient(hidden_ND, weight_VD, ctx.needs_input_grad[1])
    for part in _chunks(len(targets_N), ctx.chunk):
        logits_CV = _logits(hidden_ND[part], weight_VD, ctx.transform)
        slope_CV = ctx.transform.slopes(logits_CV)
        logits_CV = _cooled(logits_CV, ctx.temperature)
        logp_CV, grad_logp_C1 = logits_CV.sub_(norm_N[part, None]), grad_logp_N[part, None]
        # d logp / d logits = onehot - p, and d entropy / d logits = -p (logp + entropy).
        if grad_entropy_N is None:
            grad_CV = logp_CV.exp_().mul_(-grad_logp_C1)
        else:
            grad_CV = (logp_CV + entropy_N[part, None]).mul_(grad_entropy_N[part, None]).add_(grad_logp_C1)
            grad_CV.mul_(logp_CV.exp_()).neg_()
        grad_CV.scatter_add_(1, targets_N[part, None], grad_logp_C1)
        if ctx.transform != PLAIN:
            grad_CV.mul_(slope_CV)
        grad_CV = _cooled(grad_CV, ctx.temperature).to(weight_VD.dtype)
        grad_VD = grad_CV.t() @ hidden_ND[part] if ctx.needs_input_grad[1] else None
        gradient.add(part, grad_CV @ weight_VD, grad_VD)
        del logits_CV, logp_CV, grad_CV, slope_CV
    grad_weight = None if gradient.weight_VD is None else gradient.weight_VD.to(weight_VD.dtype)
    return gradient.hidden_ND, grad_weight, None, None, None, None, None


class Divergences(torch.autograd.Function):
    """A divergence of each position's distribution from another model's, in chunks of both models' logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        other: TokenHead,
        divergence: Divergence,
        chunk: int,
        temperature: float,
        transform: LogitTransform,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, other.hidden_ND, other.weight_VD)
        ctx.divergence, ctx.chunk, ctx.temperature = divergence, chunk, temperature
        ctx.transforms = transform, other.transform
        values_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        for part in _chunks(len(hidden_ND), chunk):
            logits_CV = _cooled(_logits(hidden_ND[part], weight_VD, transform), temperature)
            other_CV = _logits(other.hidden_ND[part], other.weight_VD, other.transform)
            values_N[part] = divergence(logits_CV, _cooled(other_CV, temperature))
            del logits_CV, other_CV
        return values_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, other_ND, other_VD = ctx.saved_tensors
        gradient = _HeadGradient(hidden_ND, weight_VD, ctx.needs_input_grad[1])
        leaf_VD = weight_VD.detach().requires_grad_(ctx.needs_input_grad[1])
        transform, others = ctx.transforms
        for part in _chunks(len(hidden_ND), ctx.chunk):
            hidden_CD = hidden_ND[part].detach().requires_grad_()
            other_CV = _cooled(_logits(other_ND[part], other_VD, others), ctx.temperature)
            with torch.enable_grad():
                logits_CV = _cooled(_logits(hidden_CD, leaf_VD, transform), ctx.temperature)
                values_C = ctx.divergence(logits_CV, other_CV)
            inputs = (hidden_CD, leaf_VD) if leaf_VD.requires_grad else (hidden_CD,)
            gradient.add(part, *torch.autograd.grad(values_C, inputs, grad_N[part]))
            del logits_CV, other_CV, values_C  # before the next chunk's are there
        grad_weight = None if gradient.weight_VD is None else gradient.weight_VD.to(weight_VD.dtype)
        return gradient.hidden_ND, grad_weight, None, None, None, None, None


Result = TypeVar("Result")
Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits of two models, `CV` each, to one number a row."""
# A chunk of one model's logits is chosen for a pass that keeps two copies; a divergence keeps about eight.
DIVERGENCE_SHARE = 4


class Backbone(nn.Module):
    """Runs a model's base over packed samples and hands its head to an objective.

    The objective runs inside `forward`: sharded weights, the head's among them, are whole only there.
    """

    prefix: ClassVar[str] = "pretrained."
    """Before the Hugging Face names of its parameters."""

    def __init__(self, pretrained: PreTrainedModel, attention: str, fused: Fused = NONE_FUSED) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.attention = attention
        if not is_padded(attention):
            unpack_mixers(pretrained)
        self.fused = fused
        self.balance: RouterBalance | None = None
        """Set where the routers of a mixture are to spread tokens evenly."""
        self.imbalance: torch.Tensor | None = None
        """Result of `balance` in the last forward pass, while training."""
        self.replay: RouteReplay | None = None
        """Set where tokens are to take given routes through a mixture."""
        self.context: ContextGroup | None = None
        """Set where other ranks compute some of a micro-batch's tokens."""
        self.vision: Vision | None = None
        self.loss_scale = 1.0
        """What the backward pass will start from: gradients that are taken before it have it too."""

    def head(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None) -> Any:
        """The head that objectives get, over the selected states; some models have nothing to predict."""
        raise NotImplementedError

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        lengths: tuple[int, ...],
        predict_N: torch.Tensor,
        targets_N: torch.Tensor,
        objective: Callable[[Any], Result],
        continues: tuple[int, ...] = (),
        predict_on_host_N: npt.NDArray[np.int64] | None = None,
        routes: tuple[torch.Tensor, bool] | None = None,
        pictures: Pictures | None = None,
    ) -> Result:
        """`routes`: experts of all tokens, `chosen_TLK`, or as this rank's routers see them (and true)."""
        split = None
        if self.context is not None:
            assert shares_prompts(self.attention)
            inner = FUSED if self.attention == "fused" else SEGMENTS
            # Sharding moves tensors among its inputs to the device, arrays not.
            selected_N = predict_N.cpu().numpy() if predict_on_host_N is None else predict_on_host_N
            split = Split.of(self.context, lengths, continues, selected_N, inner)
        if self.replay is not None:
            self.replay.force(None if routes is None else self._as_seen(*routes, lengths, split))
        if split is None:
            hidden_TD = self.hidden_states(tokens_T, positions_T, lengths, continues, pictures)
            return objective(self.head(hidden_TD.index_select(0, predict_N), targets_N))
        # This rank's part of the tokens; all ranks of the group get the same result.
        output = self._run(
            input_ids=split.own(tokens_T)[None], position_ids=split.own(positions_T)[None], split=split
        )
        at_M, own_M = (x.to(tokens_T.device) for x in (split.selected.at_M, split.selected.own_M))
        hidden_MD = output.last_hidden_state[0].index_select(0, at_M)
        return objective(self.head(hidden_MD, targets_N[own_M], split))

    def _as_seen(
        self, chosen: torch.Tensor, as_seen: bool, lengths: tuple[int, ...], split: Split | None
    ) -> torch.Tensor:
        """Routes of tokens as this rank's routers see these: what fills up is free."""
        if as_seen:
            return chosen
        if split is not None:
            return split.own(chosen - FREE) + FREE
        if not is_padded(self.attention):
            return chosen
        rows = pad_sequence(list(chosen.split(lengths)), batch_first=True, padding_value=FREE)
        return rows.flatten(0, 1)

    def hidden_states(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        lengths: tuple[int, ...],
        continues: tuple[int, ...] = (),
        pictures: Pictures | None = None,
    ) -> torch.Tensor:
        """`lengths`, `continues` and `pictures` are those of a `PackedBatch`."""
        assert not continues or shares_prompts(self.attention)
        assert pictures is None or self.vision is not None, "the model sees nothing"
        seen = None if self.vision is None else self.vision(tokens_T, positions_T, pictures)
        if is_padded(self.attention):
            return self._padded(tokens_T, lengths, seen)
        extras: dict[str, Any] = {"segment_lengths": lengths, "segment_continues": continues}
        if self.attention == "flash":
            bounds = torch.tensor((0, *lengths), device=tokens_T.device).cumsum(0, dtype=torch.int32)
            extras = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
            extras |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
        inputs = {"input_ids": tokens_T[None], "position_ids": positions_T[None]}
        output = self._run(**inputs if seen is None else seen.inputs(lambda part: part[None]), **extras)
        hidden_TD: torch.Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _padded(
        self, tokens_T: torch.Tensor, lengths: tuple[int, ...], seen: Embedded | None
    ) -> torch.Tensor:
        def rows(part: torch.Tensor) -> torch.Tensor:
            return pad_sequence(list(part.split(lengths)), batch_first=True)

        tokens_SL = rows(tokens_T)
        place_L = torch.arange(tokens_SL.shape[1], device=tokens_T.device)
        real_SL = place_L[None] < torch.tensor(lengths, device=tokens_T.device)[:, None]
        inputs = {"input_ids": tokens_SL} if seen is None else seen.inputs(rows)
        output = self._run(attention_mask=real_SL.long(), **inputs)
        hidden_TD: torch.Tensor = output.last_hidden_state[real_SL]
        return hidden_TD

    def _run(self, **inputs: Any) -> Any:
        if self.vision is not None:
            return self.vision.language_model(use_cache=False, **inputs)
        if self.balance is None or not (self.training and torch.is_grad_enabled()):
            return self.pretrained.base_model(use_cache=False, **inputs)
        output = self.pretrained.base_model(use_cache=False, output_router_logits=True, **inputs)
        logits, split = output.router_logits, inputs.get("split")
        if split is not None:
            logits = tuple(split.of_tokens(layer_LE) for layer_LE in logits)
        self.imbalance = self.balance(logits, inputs.get("attention_mask"))
        return output


@dataclass(frozen=True)
class TokenHead:
    """The language-model head over the positions that predict loss-bearing tokens."""

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    targets_N: torch.Tensor
    chunk: int
    split: Split | None = None
    """Where other ranks have some of the positions: what these are for all is then gathered."""
    transform: LogitTransform = PLAIN
    loss_scale: float = 1.0
    """As in `Backbone`."""

    def nll_share(self, loss_tokens: int) -> torch.Tensor:
        """These tokens' share of the mean negative log-likelihood over `loss_tokens` tokens.

        Its gradient is taken while the logits are there: it costs no second pass over them.
        """
        if not torch.is_grad_enabled():
            return -self.logps().sum() / loss_tokens
        rest = (self.targets_N, loss_tokens, self.chunk, self.transform, self.loss_scale)
        share: torch.Tensor = NllShare.apply(self.hidden_ND, self.weight_VD, *rest)  # type: ignore[no-untyped-call]
        return share if self.split is None else self.split.summed(share)

    def logps(self, temperature: float = 1.0) -> torch.Tensor:
        """The targets' log-probs, float32; the logits are computed again in the backward pass."""
        return self._logps(temperature, entropies=False)[0]

    def logps_and_entropies(self, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The same log-probs, bit for bit, and the entropy of each token's distribution, float32.

        An entropy that no loss depends on costs nothing in the backward pass.
        """
        return self._logps(temperature, entropies=True)

    def _logps(self, temperature: float, entropies: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logp_N, entropy_N = LogpsAndEntropies.apply(  # type: ignore[no-untyped-call]
            self.hidden_ND,
            self.weight_VD,
            self.targets_N,
            self.chunk,
            temperature,
            self.transform,
            entropies,
        )
        return self._whole(logp_N), self._whole(entropy_N) if entropies else entropy_N

    def logits(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Logits of some positions after the other, float32, as log-probs are computed from."""
        for part in _chunks(len(self.hidden_ND), self.chunk):
            yield part, _logits(self.hidden_ND[part], self.weight_VD, self.transform)

    def divergences(self, other: TokenHead, divergence: Divergence, temperature: float = 1.0) -> torch.Tensor:
        """The divergence from a frozen model's distribution at each position, float32."""
        assert len(self.hidden_ND) == len(other.hidden_ND), "both heads are over the same positions"
        chunk = max(1, self.chunk // DIVERGENCE_SHARE)
        values_N = Divergences.apply(  # type: ignore[no-untyped-call]
            self.hidden_ND, self.weight_VD, other, divergence, chunk, temperature, self.transform
        )
        return self._whole(values_N)

    def logits_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of some tokens of the vocabulary alone, one column each."""
        return self._whole(_logits(self.hidden_ND, self.weight_VD[list(tokens)], self.transform))

    def _whole(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N if self.split is None else self.split.of_selected(values_N)


class PackedModel(Backbone):
    def __init__(
        self,
        causal_lm: PreTrainedModel,
        attention: str,
        logits_chunk: int,
        fused: Fused = NONE_FUSED,
        head_float32: bool = False,
    ) -> None:
        super().__init__(causal_lm, attention, fused)
        self.logits_chunk, self.head_float32 = logits_chunk, head_float32
        self.transform = read_transform(causal_lm)

    def head(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None) -> TokenHead:
        weight_VD = self.pretrained.get_output_embeddings().weight
        if self.head_float32:
            hidden_ND, weight_VD = hidden_ND.float(), weight_VD.float()
        return TokenHead(
            hidden_ND, weight_VD, targets_N, self.logits_chunk, split, self.transform, self.loss_scale
        )


# The head in Hugging Face's layout of sequence and token classifiers; the latter's has a bias.
SCORE, SCORE_BIAS = "score.weight", "score.bias"


@dataclass(frozen=True)
class ScalarHead:
    """The head over the selected positions: for a critic, the states before each response token."""

    hidden_ND: torch.Tensor
    weight_KD: torch.Tensor
    bias_K: torch.Tensor | None = None
    split: Split | None = None
    """Where other ranks have some of the positions: the numbers of all are then gathered."""

    def values(self) -> torch.Tensor:
        """The one number of each position."""
        return self.logits()[:, 0]

    def logits(self) -> torch.Tensor:
        """In float32, also the product: a narrower type has too few digits for returns and scores."""
        bias_K = None if self.bias_K is None else self.bias_K.float()
        logits_NK: torch.Tensor = F.linear(self.hidden_ND.float(), self.weight_KD.float(), bias_K)
        return logits_NK if self.split is None else self.split.of_selected(logits_NK)


class ScalarModel(Backbone):
    """A classifier; there is nothing to predict, and the targets are not read."""

    def head(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, split: Split | None = None
    ) -> ScalarHead:
        score = self.pretrained.get_submodule("score")
        assert isinstance(score, nn.Linear)
        return ScalarHead(hidden_ND, score.weight, score.bias, split)
