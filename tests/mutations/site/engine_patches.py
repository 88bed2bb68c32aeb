"""Held-out mistakes of online training: in policy updates, in rollout engines and in samplers."""

# The modules of isotrain are given as they are; their private parts are what is changed.
from collections.abc import Callable
from dataclasses import replace
from typing import Any

Patch = Callable[[Any], None]

# policy updates


def _settings(**changes: Any) -> Patch:
    def patch(rank: Any) -> None:
        right = rank.update_settings

        def changed(*arguments: Any) -> Any:
            found = right(*arguments)
            return replace(found, **{k: v(found) if callable(v) else v for k, v in changes.items()})

        rank.update_settings = changed

    return patch


def _higher_clip(settings: Any) -> dict[str, Any]:
    return {**settings.loss_options, "clip_ratio_high": 0.28}


def _advantages(change: Callable[[Any, Any], Any]) -> Patch:
    def patch(estimators: Any) -> None:
        right = estimators.ADVANTAGES["grpo"]

        def changed(rewards_R: Any, group_R: Any, **options: Any) -> Any:
            return change(right.function(rewards_R, group_R, **options), group_R)

        estimators.ADVANTAGES["grpo"] = replace(right, function=changed)

    return patch


def _of_population(advantages_R: Any, group_R: Any) -> Any:
    """Divided by the standard deviation of a population, not of a sample."""
    size = group_R.bincount().max().item()
    return advantages_R * (size / (size - 1)) ** 0.5


def _of_neighbour(advantages_R: Any, group_R: Any) -> Any:
    return advantages_R.roll(1)


def _reference_follows(rank: Any) -> None:
    """The reference is the policy of the moment."""
    right = rank.PolicyRank._reference_log_probs

    def changed(self: Any) -> Any:
        models = self.models
        self.models = replace(models, reference=self.policy)
        try:
            return right(self)
        finally:
            self.models = models

    rank.PolicyRank._reference_log_probs = changed


_FIRST_MOVED = 300


def _other_ids(rank: Any) -> None:
    """The trainer's tokenizer lacks a token: all ids above it are one lower."""
    right = rank.pack_trajectories

    def changed(trajectories: Any, *arguments: Any) -> Any:
        moved = [
            replace(t, tokens_T=(t.tokens_T - (t.tokens_T >= _FIRST_MOVED)).astype(t.tokens_T.dtype))
            for t in trajectories
        ]
        return right(moved, *arguments)

    rank.pack_trajectories = changed


# rollout engines


def _after_update(change: Callable[[Any, dict[str, Any], dict[str, Any]], None]) -> Patch:
    """What becomes of the engine's parameters, given those that it had before."""

    def patch(hf: Any) -> None:
        take = hf.HfEngine.update_weights

        def changed(self: Any, update: Any) -> None:
            import torch

            own = dict(self._model.named_parameters(remove_duplicate=False))
            before = {name: p.detach().clone() for name, p in own.items()}
            take(self, update)
            with torch.no_grad():
                change(self, own, before)

        hf.HfEngine.update_weights = changed

    return patch


def _one_not_taken(engine: Any, own: dict[str, Any], before: dict[str, Any]) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    own[name].copy_(before[name])


def _other_layout(engine: Any, own: dict[str, Any], before: dict[str, Any]) -> None:
    """Rows of a rotary projection in pairs, where the engine expects halves."""
    weight = own["model.layers.0.self_attn.q_proj.weight"]
    head = engine._model.config.get_text_config().head_dim
    halves = weight.view(-1, 2, head // 2, weight.shape[1])
    weight.copy_(halves.transpose(1, 2).reshape_as(weight))


def _stale_prefixes(hf: Any) -> None:
    """Keys and values of prompts are those that the weights before the last update gave."""
    import copy

    take, step = hf.HfEngine.update_weights, hf.HfEngine._step

    def update(self: Any, update: Any) -> None:
        self._before = copy.deepcopy(self._model)
        take(self, update)

    def changed(self: Any, ids_BS: Any, mask_BS: Any, cache: Any) -> Any:
        stale = getattr(self, "_before", None)
        if ids_BS.shape[1] <= 2 or stale is None:
            return step(self, ids_BS, mask_BS, cache)
        # All of the prompt but its last token comes from the cache.
        new, self._model = self._model, stale
        step(self, ids_BS[:, :-1], mask_BS[:, :-1], cache)
        self._model = new
        return step(self, ids_BS[:, -1:], mask_BS, cache)

    hf.HfEngine.update_weights, hf.HfEngine._step = update, changed


def _engine_model(change: Callable[[Any], None]) -> Patch:
    def patch(hf: Any) -> None:
        create = hf.HfEngine.__init__

        def changed(self: Any, *arguments: Any, **options: Any) -> None:
            create(self, *arguments, **options)
            change(self._model)

        hf.HfEngine.__init__ = changed

    return patch


def _one_expert(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1


def _no_window(model: Any) -> None:
    """The engine's window is longer than any sequence."""
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = 4096
    model.config.sliding_window = 4096


def _prompt_token_missing(hf: Any) -> None:
    right = hf.left_padded
    hf.left_padded = lambda prompts: right([prompt_P[1:] for prompt_P in prompts])


def _padding_seen(hf: Any) -> None:
    """Positions are right, but padding is attended to."""

    def step(self: Any, ids_BS: Any, mask_BS: Any, cache: Any) -> Any:
        import torch

        positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -ids_BS.shape[1] :]
        with torch.no_grad():
            output = self._model(
                input_ids=ids_BS,
                attention_mask=torch.ones_like(mask_BS),
                position_ids=positions_BS,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]

    hf.HfEngine._step = step


# samplers


def _drawn(change: Callable[..., tuple[Any, Any]]) -> Patch:
    def patch(hf: Any) -> None:
        right = hf.draw

        def changed(logits_BV: Any, sampling: Any, seeds: Any, positions: Any) -> tuple[Any, Any]:
            return change(right, logits_BV, sampling, seeds, positions)

        hf.draw = changed

    return patch


def _always_zero(right: Any, logits_BV: Any, *arguments: Any) -> tuple[Any, Any]:
    token_B, _ = right(logits_BV, *arguments)
    return token_B * 0, logits_BV.float().log_softmax(-1)[:, 0].cpu()


def _temperature_ignored(
    right: Any, logits_BV: Any, sampling: Any, seeds: Any, positions: Any
) -> tuple[Any, Any]:
    return right(logits_BV, replace(sampling, temperature=1.0), seeds, positions)


def _one_noise_for_all(
    right: Any, logits_BV: Any, sampling: Any, seeds: Any, positions: Any
) -> tuple[Any, Any]:
    return right(logits_BV, sampling, [1] * len(seeds), positions)


def _coarse(right: Any, logits_BV: Any, *arguments: Any) -> tuple[Any, Any]:
    """Logits in steps of a quarter, as a head in few bits gives them."""
    return right((4 * logits_BV.float()).round() / 4, *arguments)


def _top_p(out: Callable[[Any, float], Any]) -> Patch:
    """`out(cumulated_BV, left_out)`: which tokens are left out, from the least likely up."""

    def patch(drawing: Any) -> None:
        import torch

        assert drawing.processed

        def processed(logits_BV: Any, sampling: Any) -> Any:
            logits_BV = logits_BV / sampling.temperature
            sorted_BV, order_BV = logits_BV.sort(dim=-1)
            out_BV = out(sorted_BV.softmax(-1).cumsum(-1), 1 - sampling.top_p)
            out_BV[:, -1] = False
            return logits_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), -torch.inf)

        drawing.processed = processed

    return patch


def _one_too_early(cumulated_BV: Any, left_out: float) -> Any:
    """The token that crosses the boundary is left out too."""
    import torch

    before_BV = torch.cat([cumulated_BV.new_zeros(len(cumulated_BV), 1), cumulated_BV[:, :-1]], dim=1)
    return before_BV <= left_out


def _one_too_late(cumulated_BV: Any, left_out: float) -> Any:
    import torch

    after_BV = torch.cat([cumulated_BV[:, 1:], cumulated_BV.new_ones(len(cumulated_BV), 1)], dim=1)
    return after_BV <= left_out


def _larger_k(drawing: Any) -> None:
    right = drawing.processed
    drawing.processed = lambda logits_BV, sampling: right(
        logits_BV, replace(sampling, top_k=sampling.top_k + 1)
    )


_RANK = "isotrain.trainers.online.policy_rank"
_ADVANTAGES = "isotrain.algorithms.advantages"
_HF = "isotrain.rollout.hf"
_DRAWING = "isotrain.rollout.sampling"

PATCHES: dict[str, dict[str, Patch]] = {
    "log-prob-temperature": {_RANK: _settings(temperature=1.0)},
    "kl-estimator": {_RANK: _settings(kl_estimator="k1")},
    "mean-of-responses": {_RANK: _settings(aggregation="seq-mean-token-mean")},
    "clip-higher": {_RANK: _settings(loss_options=_higher_clip)},
    "population-deviation": {_ADVANTAGES: _advantages(_of_population)},
    "advantage-of-neighbour": {_ADVANTAGES: _advantages(_of_neighbour)},
    "reference-follows": {_RANK: _reference_follows},
    "other-ids": {_RANK: _other_ids},
    "tensor-not-taken": {_HF: _after_update(_one_not_taken)},
    "other-layout": {_HF: _after_update(_other_layout)},
    "stale-prefixes": {_HF: _stale_prefixes},
    "one-expert": {_HF: _engine_model(_one_expert)},
    "engine-without-window": {_HF: _engine_model(_no_window)},
    "prompt-token-missing": {_HF: _prompt_token_missing},
    "padding-seen": {_HF: _padding_seen},
    "token-0": {_HF: _drawn(_always_zero)},
    "temperature-ignored": {_HF: _drawn(_temperature_ignored)},
    "one-noise": {_HF: _drawn(_one_noise_for_all)},
    "coarse-logits": {_HF: _drawn(_coarse)},
    "top-p-early": {_DRAWING: _top_p(_one_too_early)},
    "top-p-late": {_DRAWING: _top_p(_one_too_late)},
    "top-k-late": {_DRAWING: _larger_k},
}
