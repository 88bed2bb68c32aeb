"""Mistakes that no threshold and no test of parity was developed on, as changes to imported modules.

Each changes names where they are used, so that it also acts in a process that has imported everything. The
benchmark of parity's power runs them once; nothing else may be tuned on them.
"""

# The modules of isotrain are given as they are; their private parts are what is changed.
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine_patches import PATCHES as ENGINE_PATCHES
from mutation_patches import Patch, _model, _samples
from optimizer_patches import PATCHES as OPTIMIZER_PATCHES

# Sequences of the tiny tasks have 20 to 150 tokens: what happens on devices past 512 keys, happens here.
_KEYS = 32


# attention


def _attend(change: Callable[..., Any]) -> Patch:
    """Scores and mask of every packed attention, given to `change`, which returns the output."""

    def patch(attention: Any) -> None:
        import torch

        def attend(query: Any, key: Any, value: Any, scaling: Any, dropout: float, window: Any) -> Any:
            tokens, seen = query.shape[2], key.shape[2]
            mask = torch.ones(tokens, seen, dtype=torch.bool).tril(seen - tokens)
            if window is not None:
                mask = mask.triu(seen - tokens - window + 1)
            groups = query.shape[1] // key.shape[1]
            parts = [x.float() for x in (query, key, value)]
            return change(*parts, mask, scaling, groups).to(query.dtype)

        attention._attend = attend

    return patch


def _sdpa(query: Any, key: Any, value: Any, mask: Any, scaling: Any, groups: int) -> Any:
    import torch.nn.functional as F

    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _unmasked_past(query: Any, key: Any, value: Any, mask: Any, scaling: Any, groups: int) -> Any:
    mask = mask.clone()
    mask[:, _KEYS:] = True
    return _sdpa(query, key, value, mask, scaling, groups)


def _unmasked(query: Any, key: Any, value: Any, mask: Any, scaling: Any, groups: int) -> Any:
    return _sdpa(query, key, value, mask | True, scaling, groups)


def _heads_in_turn(query: Any, key: Any, value: Any, mask: Any, scaling: Any, groups: int) -> Any:
    key, value = (x.repeat(1, groups, 1, 1) for x in (key, value))
    return _sdpa(query, key, value, mask, scaling, 1)


def _rounded_softmax(query: Any, key: Any, value: Any, mask: Any, scaling: Any, groups: int) -> Any:
    import torch

    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    share = scores.softmax(-1)
    return (share + (share.to(torch.bfloat16).float() - share).detach()) @ value


def _window(change: Callable[[int], int | None]) -> Patch:
    def patch(attention: Any) -> None:
        right = attention._attend

        def attend(query: Any, key: Any, value: Any, scaling: Any, dropout: float, window: Any) -> Any:
            return right(query, key, value, scaling, dropout, None if window is None else change(window))

        attention._attend = attend

    return patch


# layers


def _uniform_attention(model: Any) -> None:
    # Not zero, which the kernels multiply with the mask's infinities.
    model.model.layers[1].self_attn.scaling = 1e-8


def _queries_not_normed(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        # The weight stays in the graph: optimizers expect a gradient of it.
        norm.forward = lambda x, norm=norm: x + 0.0 * norm.weight.to(x.dtype)


def _norm_without_one(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda x: (norm._norm(x.float()) * norm.weight.float()).type_as(x)


def _rotate_pairs(modeling: Any) -> None:
    import torch

    def rotate_half(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    modeling.rotate_half = rotate_half


def _routers(change: Callable[[Any], None]) -> Patch:
    def each(model: Any) -> None:
        for layer in model.model.layers:
            change(layer.mlp.gate)

    return _model(each)


def _not_renormalised(gate: Any) -> None:
    gate.norm_topk_prob = False


def _routed_in_bf16(gate: Any) -> None:
    import torch

    right = gate.forward

    def rounded(hidden: Any) -> Any:
        return right(hidden + (hidden.to(torch.bfloat16).to(hidden.dtype) - hidden).detach())

    gate.forward = rounded


def _beyond_capacity_dropped(gate: Any) -> None:
    import torch

    right = gate.forward

    def limited(hidden: Any) -> Any:
        logits, scores, chosen = right(hidden)
        capacity = int(1.5 * chosen.numel() / gate.num_experts)
        place = torch.nn.functional.one_hot(chosen.flatten(), gate.num_experts).cumsum(0)
        place = place.gather(1, chosen.flatten()[:, None]).view_as(chosen)
        return logits, scores * (place <= capacity), chosen

    gate.forward = limited


def _exact_gelu(model: Any) -> None:
    import torch

    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


def _rounded_embedding_scale(model: Any) -> None:
    import torch

    scale = model.model.embed_tokens.embed_scale
    scale.copy_(scale.to(torch.bfloat16))


# data and loss


def _end_not_learnt(sample: Any) -> Any:
    mask_T = sample.mask_T.copy()
    mask_T[mask_T.nonzero()[0][-1:]] = False
    return replace(sample, mask_T=mask_T)


def _last_sample_lost(loader: Any) -> None:
    pack = loader.pack
    loader.pack = lambda samples: pack(samples[:-1] if len(samples) > 1 else samples)


def _batch_repeated(loader: Any) -> None:
    """Every tenth step trains on the batch of the step before."""
    next_step, seen = loader.BatchLoader.next_step, [0]
    before: list[Any] = [None]

    def repeated(self: Any) -> Any:
        found = next_step(self)
        seen[0] += 1
        before[0] = before[0] if seen[0] % 10 == 0 else found
        return before[0]

    loader.BatchLoader.next_step = repeated


def _prompt_counted(engine: Any) -> None:
    """The divisor also counts one token of each sample that bears no loss."""
    right = engine.TrainingEngine._loss_tokens

    def counted(self: Any, batches: Any) -> int:
        found: int = right(self, batches)
        return found + sum(len(batch.lengths) for batch in batches)

    engine.TrainingEngine._loss_tokens = counted


def _mean_of_sequences(engine: Any) -> None:
    import torch

    def step(self: Any, batches: Any, loss: Any, lr: float) -> Any:
        sequences = sum(len(batch.lengths) for batch in batches)

        def objective(batch: Any) -> Any:
            def share(head: Any) -> Any:
                sample_N = torch.searchsorted(batch.last_S, batch.predict_N)
                count_S = torch.bincount(sample_N, minlength=len(batch.lengths)).clamp(min=1)
                return -(head.logps() / count_S[sample_N]).sum() / sequences, {}

            return share

        result = self.update([(batch, objective(batch)) for batch in batches], lr)
        return replace(result, metrics={"loss_tokens": float(self._loss_tokens(batches))})

    engine.TrainingEngine.step = step


def _added_to_loss(term: Callable[[Any, Any], Any]) -> Patch:
    """`term(nll_N, logits_NV)` in the place of the negative log-likelihood of each token."""

    def patch(packed: Any) -> None:
        import torch.nn.functional as F

        def nll_share(self: Any, loss_tokens: int) -> Any:
            logits_NV = F.linear(self.hidden_ND, self.weight_VD).float()
            nll_N = F.cross_entropy(logits_NV, self.targets_N, reduction="none")
            return term(nll_N, logits_NV).sum() / loss_tokens

        packed.TokenHead.nll_share = nll_share

    return patch


def _smoothed(nll_N: Any, logits_NV: Any) -> Any:
    return 0.99 * nll_N - 0.01 * logits_NV.log_softmax(-1).mean(-1)


def _with_z_loss(nll_N: Any, logits_NV: Any) -> Any:
    return nll_N + 1e-4 * logits_NV.logsumexp(-1).square()


# preferences


def _mean_log_probs(module: Any) -> None:
    """Log-probs of a response averaged over its tokens, for policy and reference alike."""
    import torch

    right = module.sums
    module.sums = lambda values_N, lengths: right(values_N, lengths) / torch.tensor(lengths).clamp(min=1)


def _objective(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    def patch(preference: Any) -> None:
        right = preference.DpoWork._objective

        def changed(self: Any, batch: Any, ref_logp_S: Any, pairs: int) -> Any:
            work, ref_logp_S = change(self, ref_logp_S)
            return right(work, batch, ref_logp_S, pairs)

        preference.DpoWork._objective = changed

    return patch


def _larger_beta(work: Any, ref_logp_S: Any) -> tuple[Any, Any]:
    return replace(work, options={**work.options, "beta": 0.11}), ref_logp_S


def _neighbours_reference(work: Any, ref_logp_S: Any) -> tuple[Any, Any]:
    return work, ref_logp_S.roll(2)


_ENGINE = "isotrain.engine.engine"
_BUILD = "isotrain.engine.build"
_LOADER = "isotrain.data.loader"
_ATTENTION = "isotrain.models.attention"
_PACKED = "isotrain.models.packed"
_PREFERENCE = "isotrain.trainers.preference"
_REFERENCE = "isotrain.trainers.preference"
_MODELING = tuple(f"transformers.models.{n}.modeling_{n}" for n in ("llama", "qwen3_moe", "gemma3"))


PATCHES: dict[str, dict[str, Patch]] = {
    "mask-past-keys": {_ATTENTION: _attend(_unmasked_past)},
    "masks-dropped": {_ATTENTION: _attend(_unmasked)},
    "heads-in-turn": {_ATTENTION: _attend(_heads_in_turn)},
    "softmax-bf16": {_ATTENTION: _attend(_rounded_softmax)},
    "window-dropped": {_ATTENTION: _window(lambda window: None)},
    "window-larger": {_ATTENTION: _window(lambda window: window + 1)},
    "uniform-attention": {_BUILD: _model(_uniform_attention)},
    "queries-not-normed": {_BUILD: _model(_queries_not_normed)},
    "norm-without-one": {_BUILD: _model(_norm_without_one)},
    "rotary-pairs": dict.fromkeys(_MODELING, _rotate_pairs),
    "router-not-normed": {_BUILD: _routers(_not_renormalised)},
    "router-bf16": {_BUILD: _routers(_routed_in_bf16)},
    "expert-capacity": {_BUILD: _routers(_beyond_capacity_dropped)},
    "gelu-exact": {_BUILD: _model(_exact_gelu)},
    "embedding-scale": {_BUILD: _model(_rounded_embedding_scale)},
    "end-not-learnt": {_LOADER: _samples(_end_not_learnt)},
    "sample-lost": {_LOADER: _last_sample_lost},
    "batch-repeated": {_LOADER: _batch_repeated},
    "prompt-counted": {_ENGINE: _prompt_counted},
    "mean-of-sequences": {_ENGINE: _mean_of_sequences},
    "label-smoothing": {_PACKED: _added_to_loss(_smoothed)},
    "z-loss": {_PACKED: _added_to_loss(_with_z_loss)},
    "mean-log-probs": {_PREFERENCE: _mean_log_probs, _REFERENCE: _mean_log_probs},
    "beta-larger": {_PREFERENCE: _objective(_larger_beta)},
    "reference-of-neighbour": {_PREFERENCE: _objective(_neighbours_reference)},
    **OPTIMIZER_PATCHES,
    **ENGINE_PATCHES,
}
