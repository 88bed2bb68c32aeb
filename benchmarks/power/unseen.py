"""Mistakes in one forced step that no threshold of parity was developed on.

Each is made on an engine that has been built, and returns what takes it back where it changed more than that
engine. S: samples, H: heads, L: queries, K: keys, D: size of a head.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Undo = Callable[[], None] | None


@dataclass(frozen=True)
class Unseen:
    what: str
    model: str
    make: Callable[[Any], Undo]


def _layer(engine: Any, number: int = 1) -> Any:
    return engine.model.pretrained.model.layers[number]


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _attention(change: Callable[..., Any]) -> Callable[[Any], Undo]:
    def make(engine: Any) -> Undo:
        from isotrain.models import attention

        return _replaced(attention, "_attend", change)

    return make


def _scores(query: Any, key: Any, value: Any, scaling: Any, window: Any, extra: int = 0) -> tuple[Any, Any]:
    """Masked scores; the first head may see `extra` later keys."""
    import torch

    queries, seen = query.shape[2], key.shape[2]
    mask_HLK = torch.ones(query.shape[1], queries, seen, dtype=torch.bool).tril(seen - queries)
    mask_HLK[0] = torch.ones(queries, seen, dtype=torch.bool).tril(seen - queries + extra)
    if window is not None:
        mask_HLK = mask_HLK.triu(seen - queries - window + 1)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ((query.float() * scale) @ key.transpose(2, 3)).masked_fill(~mask_HLK, -torch.inf), value


def _future_key(query: Any, key: Any, value: Any, scaling: Any, dropout: float, window: Any) -> Any:
    scores, value = _scores(query, key, value, scaling, window, extra=1)
    return (scores.softmax(-1) @ value).to(query.dtype)


def _plus_one(query: Any, key: Any, value: Any, scaling: Any, dropout: float, window: Any) -> Any:
    scores, value = _scores(query, key, value, scaling, window)
    powers = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return (powers / (powers.sum(-1, keepdim=True) + 1e-3) @ value).to(query.dtype)


def _norm_forward(kind: str) -> Callable[[Any], Undo]:
    def make(engine: Any) -> Undo:
        norm = _layer(engine).input_layernorm
        epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        gain = 1.0 if hasattr(norm, "eps") else 0.0

        def forward(hidden: Any) -> Any:
            wide = hidden.float()
            squares = wide.square().mean(-1, keepdim=True)
            if kind == "epsilon":
                scaled = wide / (squares.sqrt() + epsilon)
            else:
                scaled = wide / (squares.detach() + epsilon).sqrt()
            return (scaled * (norm.weight.float() + gain)).to(hidden.dtype)

        norm.forward = forward
        return None

    return make


def _embedding_detached(engine: Any) -> Undo:
    embedding = engine.model.pretrained.get_input_embeddings()
    embedding.register_forward_hook(lambda m, i, output: output.detach().requires_grad_())
    return None


def _dropout(engine: Any) -> Undo:
    from torch.nn import functional

    _layer(engine).self_attn.o_proj.register_forward_hook(
        lambda m, i, output: functional.dropout(output, 1e-3)
    )
    return None


def _activation(change: Callable[[Any, Any], Any]) -> Callable[[Any], Undo]:
    def make(engine: Any) -> Undo:
        act = _layer(engine).mlp.act_fn
        forward = act.forward
        act.forward = lambda x: change(forward, x)
        return None

    return make


def _steps_of_64th(forward: Any, x: Any) -> Any:
    return forward(x + ((x * 64).round() / 64 - x).detach())


def _slope_without_product(forward: Any, x: Any) -> Any:
    """SiLU's derivative as its sigmoid alone."""
    sigmoid = x.sigmoid().detach()
    return forward(x).detach() + x * sigmoid - (x * sigmoid).detach()


def _softcap(engine: Any) -> Undo:
    from isotrain.models import packed

    logits = packed._logits
    return _replaced(packed, "_logits", lambda *a, **k: 30.0 * (logits(*a, **k) / 30.0).tanh())


def _narrow_log_softmax(engine: Any) -> Undo:
    from isotrain.models import packed

    functional: Any = packed.__dict__["F"]

    def cross_entropy(logits: Any, targets: Any, reduction: str) -> Any:
        logp = logits.bfloat16().log_softmax(-1).float()
        return -logp.gather(-1, targets[:, None])[:, 0]

    changed = types.SimpleNamespace(**{**vars(functional), "cross_entropy": cross_entropy})
    return _replaced(packed, "F", changed)


def _half_head(engine: Any) -> Undo:
    from isotrain.models import packed

    def logits(hidden: Any, weight: Any, temperature: float = 1.0) -> Any:
        return (hidden.half() @ weight.half().T).float() / temperature

    return _replaced(packed, "_logits", logits)


def _embedding_not_decayed(engine: Any) -> Undo:
    embedding = engine.model.pretrained.get_input_embeddings().weight
    optimizer = engine.optimizer
    for group in list(optimizer.param_groups):
        if any(p is embedding for p in group["params"]):
            group["params"] = [p for p in group["params"] if p is not embedding]
            optimizer.add_param_group({"params": [embedding], "weight_decay": 0.0})
    return None


def _nadam(engine: Any) -> Undo:
    import torch

    old = engine.optimizer.param_groups
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in old]
    betas, eps = old[0]["betas"], old[0]["eps"]
    engine.optimizer = torch.optim.NAdam(groups, betas=betas, eps=eps, decoupled_weight_decay=True)
    return None


def _largest_norm(engine: Any) -> Undo:
    def clip() -> float:
        grads = [p.grad for p in engine.trained.values() if p.grad is not None]
        norm = max(float(grad.norm()) for grad in grads)
        for grad in grads:
            grad.mul_(min(1.0, engine.max_grad_norm / norm))
        return norm

    engine.clip_gradients = clip
    return None


def _keys_late(engine: Any) -> Undo:
    """Keys are rotated by the angles of the next position, in one layer."""
    attention = _layer(engine).self_attn
    forward = attention.forward
    modeling: Any = __import__(type(attention).__module__, fromlist=["apply_rotary_pos_emb"])
    rotate = modeling.apply_rotary_pos_emb

    def late(query: Any, key: Any, cos: Any, sin: Any, *rest: Any, **more: Any) -> Any:
        turned = rotate(query, key, cos, sin, *rest, **more)[0]
        cos, sin = (x.roll(-1, dims=1) for x in (cos, sin))
        return turned, rotate(query, key, cos, sin, *rest, **more)[1]

    def run(*args: Any, **kwargs: Any) -> Any:
        modeling.apply_rotary_pos_emb = late
        try:
            return forward(*args, **kwargs)
        finally:
            modeling.apply_rotary_pos_emb = rotate

    attention.forward = run
    return None


def _half_angles(engine: Any) -> Undo:
    rotary = engine.model.pretrained.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, *a, **k: tuple(t.half().to(t.dtype) for t in forward(x, *a, **k))
    return None


def _eight_bits(engine: Any) -> Undo:
    import torch
    from torch.nn import functional

    linear = _layer(engine).self_attn.v_proj

    def forward(x: Any) -> Any:
        weight = linear.weight
        scale = weight.detach().abs().amax() / 448
        narrow = (weight.detach() / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
        return functional.linear(x, (weight + (narrow - weight).detach()).to(x.dtype))

    linear.forward = forward
    return None


def _duplicates_lost(engine: Any) -> Undo:
    """The embedding's gradient has the last of equal tokens alone, as a store without addition."""
    import torch

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tokens: Any, weight: Any) -> Any:
            ctx.save_for_backward(tokens)
            ctx.shape = weight.shape
            return weight[tokens]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (tokens,) = ctx.saved_tensors
            full = grad.new_zeros(ctx.shape)
            full[tokens.reshape(-1)] = grad.reshape(-1, grad.shape[-1])
            return None, full

    embedding = engine.model.pretrained.get_input_embeddings()
    lookup: Any = Lookup.apply
    embedding.forward = lambda tokens: lookup(tokens, embedding.weight)
    return None


def _router(change: Callable[[Any, Any], Any]) -> Callable[[Any], Undo]:
    """`change` gets the router's own forward and its input."""

    def make(engine: Any) -> Undo:
        gate = _layer(engine).mlp.gate
        gate.forward = partial(change, gate.forward)
        return None

    return make


def _warmer(forward: Any, x: Any) -> Any:
    return forward(x * 1.01)


def _noisy(forward: Any, x: Any) -> Any:
    import torch

    return forward(x * (1 + 0.01 * (torch.rand_like(x) - 0.5)))


def _swapped(forward: Any, x: Any) -> Any:
    logits, weights, chosen = forward(x)
    return logits, weights, chosen.where(chosen > 1, 1 - chosen)


def _next_rank(forward: Any, x: Any) -> Any:
    """The second and third best in place of the first and second."""
    logits, _, chosen = forward(x)
    ranks = logits.float().topk(chosen.shape[-1] + 1, dim=-1)[1][:, 1:]
    weights = logits.float().softmax(-1).gather(-1, ranks)
    return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ranks


def _detached(forward: Any, x: Any) -> Any:
    logits, weights, chosen = forward(x)
    return logits, weights.detach(), chosen


BUGS = {
    "future-key": Unseen("one head of each layer sees one later key", "llama-512", _attention(_future_key)),
    "softmax-plus": Unseen("softmax divides by 0.001 more", "qwen3-8k", _attention(_plus_one)),
    "epsilon-outside": Unseen(
        "epsilon is added to the root, in one norm", "llama-512", _norm_forward("epsilon")
    ),
    "tied-one-side": Unseen(
        "a tied embedding has the head's gradient alone", "qwen3-8k", _embedding_detached
    ),
    "dropout-0.1%": Unseen("dropout of 0.1 % after one attention", "gemma3-2k", _dropout),
    "gelu-sigmoid": Unseen(
        "GELU as x sigmoid(1.702 x) in one layer",
        "gemma3-2k",
        _activation(lambda forward, x: x * (1.702 * x).sigmoid()),
    ),
    "activation-table": Unseen(
        "SiLU from a table in steps of 1/64", "llama-512", _activation(_steps_of_64th)
    ),
    "softcap": Unseen("logits are capped at 30 by tanh", "qwen3-8k", _softcap),
    "embedding-not-decayed": Unseen("the embedding is not decayed", "llama-512", _embedding_not_decayed),
    "nadam": Unseen("NAdam in place of AdamW", "gemma3-2k", _nadam),
    "largest-norm": Unseen("clipped by the largest norm, not that of all", "qwen3-8k", _largest_norm),
    "log-softmax-bf16": Unseen("log-softmax in bfloat16", "llama-512", _narrow_log_softmax),
    "head-float16": Unseen("logits in float16", "gemma3-2k", _half_head),
    "keys-late": Unseen("keys are rotated one position late in one layer", "qwen3-8k", _keys_late),
    "angles-float16": Unseen("rotary angles in float16", "llama-512", _half_angles),
    "weight-float8": Unseen("one projection's weights in 8 bits", "gemma3-2k", _eight_bits),
    "silu-slope": Unseen(
        "SiLU's backward lacks a term in one layer", "qwen3-8k", _activation(_slope_without_product)
    ),
    "norm-slope": Unseen(
        "one norm's backward takes its root as constant", "gemma3-2k", _norm_forward("slope")
    ),
    "duplicates-lost": Unseen("equal tokens' gradients are not summed", "llama-512", _duplicates_lost),
    "router-warmer": Unseen("one router's logits are 1 % larger", "mixture-512", _router(_warmer)),
    "router-noisy": Unseen("one router has noise of 1 %", "mixture-512", _router(_noisy)),
    "experts-swapped": Unseen("two experts are swapped behind one router", "mixture-512", _router(_swapped)),
    "next-rank": Unseen("one router takes ranks 2 and 3", "mixture-512", _router(_next_rank)),
    "router-detached": Unseen("one router's weights have no gradient", "mixture-512", _router(_detached)),
}
