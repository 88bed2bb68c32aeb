"""Held-out mistakes of optimizers, schedules and the exchange of gradients between ranks."""

# The modules of isotrain are given as they are; their private parts are what is changed.
import os
from collections.abc import Callable
from typing import Any

from mutation_patches import Patch, _update


def late_step() -> int:
    """From which step on mistakes act that only later steps have."""
    return int(os.environ["ISOTRAIN_LATE_STEP"])


# optimizer


def _kept(names: Callable[[str], bool], from_step: Callable[[], int]) -> Patch:
    """Parameters that an update leaves as they are, from a step on."""
    done = [0]

    def update(engine: Any, right: Any, work: Any, lr: float) -> Any:
        import torch

        done[0] += 1
        held = {name: p for name, p in engine.trained.items() if names(name)}
        assert held
        before = {name: p.detach().clone() for name, p in held.items()}
        result = right(engine, work, lr)
        if done[0] >= from_step():
            with torch.no_grad():
                for name, p in held.items():
                    p.copy_(before[name])
        return result

    return _update(update)


def _state_lost() -> Patch:
    """As after a resume that found weights and no moments."""
    done = [0]

    def update(engine: Any, right: Any, work: Any, lr: float) -> Any:
        done[0] += 1
        if done[0] == late_step():
            engine.optimizer.state.clear()
        return right(engine, work, lr)

    return _update(update)


def _schedule(change: Callable[..., Any]) -> Patch:
    def patch(build: Any) -> None:
        make = build.make_schedule
        build.make_schedule = lambda *arguments: change(make, *arguments)

    return patch


def _restarted(make: Any, *arguments: Any) -> Any:
    right = make(*arguments)
    return lambda step: right(step if step < late_step() else step - late_step() + 1)


def _longer_cosine(make: Any, kind: str, lr: float, total: int, warmup: float, *others: Any) -> Any:
    return make(kind, lr, round(1.1 * total), warmup / 1.1, *others)


def _optimizer(change: Callable[..., Any]) -> Patch:
    def patch(build: Any) -> None:
        make = build.make_optimizer
        build.make_optimizer = lambda model, **options: change(make, model, options)

    return patch


def _other_beta(make: Any, model: Any, options: Any) -> Any:
    first, second = options["betas"]
    return make(model, **{**options, "betas": (first, 0.999 if second < 0.99 else 0.95)})


def _larger_epsilon(make: Any, model: Any, options: Any) -> Any:
    return make(model, **{**options, "eps": 1e-6})


def _decay_in_gradient(make: Any, model: Any, options: Any) -> Any:
    import torch

    right = make(model, **options)
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in right.param_groups]
    return torch.optim.Adam(groups, betas=options["betas"], eps=options["eps"], fused=options["fused"])


def _uncorrected(engine: Any, update: Any, work: Any, lr: float) -> Any:
    """Moments that start at zero are taken as they are."""
    from isotrain.engine.state import start_optimizer_state

    start_optimizer_state(engine)
    for state in engine.optimizer.state.values():
        state["step"].fill_(1e6)
    return update(engine, work, lr)


def _clip(change: Callable[[Any, Callable[[Any], float]], float]) -> Patch:
    def patch(engine: Any) -> None:
        right = engine.TrainingEngine.clip_gradients
        engine.TrainingEngine.clip_gradients = lambda self: change(self, right)

    return patch


def _gradients(engine: Any) -> list[Any]:
    from isotrain.models.weights import shard_of

    return [shard_of(p.grad).local for p in engine.trained.values() if p.grad is not None]


def _clipped_one_by_one(engine: Any, right: Callable[[Any], float]) -> float:
    limit, engine.max_grad_norm = engine.max_grad_norm, 0.0
    norm = right(engine)
    engine.max_grad_norm = limit
    for gradient in _gradients(engine):
        gradient.mul_((limit / (gradient.norm() + 1e-6)).clamp(max=1.0))
    return norm


def _summed_in_bf16(engine: Any) -> None:
    create = engine.TrainingEngine.__init__

    def changed(self: Any, *arguments: Any) -> None:
        import torch

        def rounded(p: Any) -> None:
            p.grad.copy_(p.grad.to(torch.bfloat16))

        create(self, *arguments)
        for p in self.trained.values():
            p.register_post_accumulate_grad_hook(rounded)

    engine.TrainingEngine.__init__ = changed


# several ranks


def _summed_for_averaged(engine: Any, right: Callable[[Any], float]) -> float:
    for gradient in _gradients(engine):
        gradient.mul_(engine.world.size)
    return right(engine)


def _clipped_by_rank(engine: Any, right: Callable[[Any], float]) -> float:
    from torch.nn.utils import get_total_norm

    gradients = _gradients(engine)
    norm = get_total_norm(gradients)
    for gradient in gradients:
        gradient.mul_((engine.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    # Every rank tells its own.
    return float(norm)


def _reduced_in_bf16(build: Any) -> None:
    import torch

    right = build.MixedPrecisionPolicy
    build.MixedPrecisionPolicy = lambda **options: right(**{**options, "reduce_dtype": torch.bfloat16})


_ENGINE = "isotrain.engine.engine"
_BUILD = "isotrain.engine.build"
_TRAINERS = "isotrain.trainers.build"


def _at_once() -> int:
    return 1


PATCHES: dict[str, dict[str, Patch]] = {
    "norm-frozen": {
        _ENGINE: _kept(lambda name: name.endswith("layers.1.post_attention_layernorm.weight"), _at_once)
    },
    "layer-frozen-late": {_ENGINE: _kept(lambda name: ".layers.1." in name, late_step)},
    "state-lost-late": {_ENGINE: _state_lost()},
    "schedule-restarted-late": {_TRAINERS: _schedule(_restarted)},
    "cosine-longer": {_TRAINERS: _schedule(_longer_cosine)},
    "adam-beta": {_BUILD: _optimizer(_other_beta)},
    "adam-epsilon": {_BUILD: _optimizer(_larger_epsilon)},
    "decay-in-gradient": {_BUILD: _optimizer(_decay_in_gradient)},
    "bias-uncorrected": {_ENGINE: _update(_uncorrected)},
    "clipped-one-by-one": {_ENGINE: _clip(_clipped_one_by_one)},
    "gradients-bf16": {_ENGINE: _summed_in_bf16},
    "average-as-sum": {_ENGINE: _clip(_summed_for_averaged)},
    "clipped-by-rank": {_ENGINE: _clip(_clipped_by_rank)},
    "reduced-in-bf16": {_BUILD: _reduced_in_bf16},
}
