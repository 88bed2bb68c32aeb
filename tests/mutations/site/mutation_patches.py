"""What each mutation changes: module by module, after its import. Nothing here is imported by isotrain."""

# The modules of isotrain are given as they are; their private parts are what is changed.
from collections.abc import Callable
from dataclasses import replace
from typing import Any

Patch = Callable[[Any], None]


def _samples(change: Callable[[Any], Any]) -> Patch:
    """Every sample changed just before it is packed."""

    def patch(loader: Any) -> None:
        pack = loader.pack
        loader.pack = lambda samples: pack([change(sample) for sample in samples])

    return patch


def _mask_shifted(sample: Any) -> Any:
    mask_T = sample.mask_T.copy()
    mask_T[1:], mask_T[0] = sample.mask_T[:-1], False
    return replace(sample, mask_T=mask_T)


def _prompts_learnt(sample: Any) -> Any:
    return replace(sample, mask_T=sample.mask_T | True)


def _without_a_token(sample: Any) -> Any:
    import numpy as np

    return replace(sample, tokens_T=np.delete(sample.tokens_T, 1), mask_T=np.delete(sample.mask_T, 1))


def _data_order(sampler: Any) -> None:
    permute = sampler.permute
    sampler.permute = lambda offset_B, rows, seed, epoch: permute(offset_B, rows, seed + 1, epoch)


def _neighbours_seen(loader: Any) -> None:
    pack = loader.pack

    def packed(samples: Any) -> Any:
        batch = pack(samples)
        return replace(batch, lengths=(sum(batch.lengths),))

    loader.pack = packed


def _model(change: Callable[[Any], None]) -> Patch:
    """The language model changed when it is built, before it has weights."""

    def patch(build: Any) -> None:
        build_causal_lm = build.build_causal_lm

        def changed(*arguments: Any) -> Any:
            model = build_causal_lm(*arguments)
            change(model)
            return model

        build.build_causal_lm = changed

    return patch


def _norm_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-5


def _attention_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.02


def _dropout_on(model: Any) -> None:
    import torch.nn.functional as F

    model.model.layers[0].mlp.register_forward_hook(
        lambda module, _, output: F.dropout(output, 0.01, module.training)
    )


def _layer_in_bf16(model: Any) -> None:
    import torch

    def rounded(module: Any, inputs: Any, output: Any) -> Any:
        return output + (output.to(torch.bfloat16).to(output.dtype) - output).detach()

    model.model.layers[1].mlp.register_forward_hook(rounded)


def _rotary_base(model: Any) -> None:
    rotary = model.model.rotary_emb
    dim = rotary.inv_freq.shape[0]
    import torch

    base = 1.01 ** (-torch.arange(dim, dtype=torch.float32) / dim)
    rotary.inv_freq = rotary.inv_freq * base.to(rotary.inv_freq.device)
    rotary.original_inv_freq = rotary.inv_freq


def _silu_approximate(model: Any) -> None:
    import torch

    class Hard(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * torch.sigmoid(1.01 * x)

    for layer in model.model.layers:
        layer.mlp.act_fn = Hard()


def _accumulation(engine: Any) -> None:
    """The loss that is told is right; its gradient is that of the sum over micro-batches."""
    step = engine.TrainingEngine.step

    def changed(self: Any, batches: Any, loss: Any, lr: float) -> Any:
        def scaled(head: Any, tokens: int) -> Any:
            share = loss(head, tokens)
            return share + (len(batches) - 1) * (share - share.detach())

        return step(self, batches, scaled, lr)

    engine.TrainingEngine.step = changed


def _rank_mean(engine: Any) -> None:
    def own_tokens(self: Any, batches: Any) -> int:
        return sum(batch.loss_tokens for batch in batches) * self.world.size

    engine.TrainingEngine._loss_tokens = own_tokens


def _update(before: Callable[..., Any]) -> Patch:
    """`TrainingEngine.update` with other arguments, or something done after it."""

    def patch(engine: Any) -> None:
        update = engine.TrainingEngine.update
        engine.TrainingEngine.update = lambda self, work, lr: before(self, update, work, lr)

    return patch


def _higher_rate(engine: Any, update: Any, work: Any, lr: float) -> Any:
    return update(engine, work, lr * 1.01)


def _bf16_moments(engine: Any, update: Any, work: Any, lr: float) -> Any:
    import torch

    result = update(engine, work, lr)
    for state in engine.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].to(torch.bfloat16))
    return result


def _late_warm_up(optimizers: Any) -> None:
    make = optimizers.make_schedule

    def late(*arguments: Any) -> Any:
        right = make(*arguments)
        return lambda step: right(max(step - 1, 1))

    optimizers.make_schedule = late


def _decayed_norms(optimizers: Any) -> None:
    make = optimizers.make_optimizer

    def changed(model: Any, *, weight_decay: float, **options: Any) -> Any:
        optimizer = make(model, weight_decay=weight_decay, **options)
        for group in optimizer.param_groups:
            group["weight_decay"] = weight_decay
        return optimizer

    optimizers.make_optimizer = changed


def _no_clipping(engine: Any) -> None:
    create = engine.TrainingEngine.__init__

    def changed(self: Any, model: Any, optimizer: Any, world: Any, max_grad_norm: float) -> None:
        create(self, model, optimizer, world, 0.0)

    engine.TrainingEngine.__init__ = changed


def _reference_rounded(pairs: Any) -> None:
    import torch

    objective = pairs.DpoWork._objective
    pairs.DpoWork._objective = lambda self, batch, ref_logp_S, count: objective(
        self, batch, ref_logp_S.to(torch.bfloat16).float(), count
    )


def _no_baseline(estimators: Any) -> None:
    def scaled(rewards_R: Any, group_R: Any, **_: Any) -> Any:
        return rewards_R / (rewards_R.std() + 1e-6)

    estimators.ADVANTAGES["grpo"] = replace(estimators.ADVANTAGES["grpo"], function=scaled)


def _no_whitening(estimators: Any) -> None:
    plain = replace(estimators.ADVANTAGES["reinforce++"], whiten=False)
    estimators.ADVANTAGES["reinforce++"] = plain


def _kl_sign(step: Any) -> None:
    right = step.kl_loss

    def flipped(*arguments: Any, coefficient: float, **options: Any) -> Any:
        return right(*arguments, coefficient=-coefficient, **options)

    step.kl_loss = flipped


def _old_log_probs(step: Any) -> None:
    """Every update takes the log-probs of its own moment for the old ones: nothing is ever clipped."""
    right = step.policy_objective

    def changed(micro: Any, *arguments: Any) -> Any:
        micro.old_logp_N = None
        return right(micro, *arguments)

    step.policy_objective = changed


def _stale_weights(hf: Any) -> None:
    take = hf.HfEngine.update_weights
    waiting: dict[int, Any] = {}

    def late(self: Any, update: Any) -> None:
        from isotrain.weights.file import read_update

        held = waiting.get(id(self))
        waiting[id(self)] = [(name, tensor.clone()) for name, tensor in read_update(update, self._name)]
        take(self, update)
        if held is not None:
            import torch

            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            with torch.no_grad():
                for name, tensor in held:
                    parameters[name].copy_(tensor)

    hf.HfEngine.update_weights = late


_ENGINE = "isotrain.engine.engine"
_BUILD = "isotrain.engine.build"
_FEED = "isotrain.data.loader"

PATCHES: dict[str, dict[str, Patch]] = {
    "none": {},
    "mask-shifted": {_FEED: _samples(_mask_shifted)},
    "prompts-learnt": {_FEED: _samples(_prompts_learnt)},
    "template-token": {_FEED: _samples(_without_a_token)},
    "data-order": {"isotrain.data.loader": _data_order},
    "neighbours-seen": {_FEED: _neighbours_seen},
    "norm-epsilon": {_BUILD: _model(_norm_epsilon)},
    "attention-scale": {_BUILD: _model(_attention_scale)},
    "dropout-on": {_BUILD: _model(_dropout_on)},
    "layer-in-bf16": {_BUILD: _model(_layer_in_bf16)},
    "rotary-base": {_BUILD: _model(_rotary_base)},
    "silu-approximate": {_BUILD: _model(_silu_approximate)},
    "accumulation": {_ENGINE: _accumulation},
    "rank-mean": {_ENGINE: _rank_mean},
    "learning-rate": {_ENGINE: _update(_higher_rate)},
    "warm-up": {"isotrain.engine.optimizer": _late_warm_up},
    "bf16-moments": {_ENGINE: _update(_bf16_moments)},
    "decayed-norms": {"isotrain.engine.optimizer": _decayed_norms},
    "no-clipping": {_ENGINE: _no_clipping},
    "reference-rounded": {"isotrain.trainers.preference": _reference_rounded},
    "no-baseline": {"isotrain.algorithms.advantages": _no_baseline},
    "no-whitening": {"isotrain.algorithms.advantages": _no_whitening},
    "kl-sign": {"isotrain.trainers.online.step": _kl_sign},
    "old-log-probs": {"isotrain.trainers.online.step": _old_log_probs},
    "stale-weights": {"isotrain.rollout.hf": _stale_weights},
}
