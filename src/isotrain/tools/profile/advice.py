"""The recipe fields that change how long a phase of a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def advice(phase: str, recipe: Mapping[str, Any]) -> str:
    """What to try for the phase that takes the most time."""
    if phase == "generate":
        return _generation(recipe)
    if phase == "reward":
        return f"raise reward.workers (now {_value(recipe, 'reward', 'workers')}), or make the reward faster"
    if phase == "save":
        every = _value(recipe, "trainer", "save_every")
        return f"raise trainer.save_every (now {every}), or put output or checkpoint_storage on a faster disk"
    return _FIELDS.get(phase, "no field of the recipe changes it: open the trace, or report it")


_UPDATE = (
    "raise data.tokens_per_micro_batch or device.ranks, set model.gradient_checkpointing=false where memory "
    "allows; the trace shows the operators"
)
_LEFT_OUT = "; that changes what is learnt"
_FIELDS = {
    "update": _UPDATE,
    "update_actor": _UPDATE,
    "update_critic": _UPDATE,
    "values": _UPDATE,
    "old_log_prob": "algorithm.mini_batch_size as large as data.batch_size, or "
    f"algorithm.rollout_correction.bypass_mode=true, needs no old log-probs{_LEFT_OUT}",
    "ref": f"algorithm.kl.place=off needs no reference{_LEFT_OUT}",
    "reward_model": "score with a smaller reward.model, or on more device.ranks",
    "validate": "raise trainer.validate_every, or lower data.validation_rows",
    "update_weights": "rollout.weight_transfer=auto sends from device to device, and rollout.staleness=1 "
    "beside generation (responses are then older)",
    "data": "put the token cache (ISOTRAIN_CACHE) on a local disk",
    "switch": "cluster.placement=separate needs no switch between ranks and engines",
    "not accounted for": "nothing was recorded there: open the trace",
}


def _generation(recipe: Mapping[str, Any]) -> str:
    ways = [f"raise rollout.engines (now {_value(recipe, 'rollout', 'engines')})"]
    if _value(recipe, "rollout", "engine") == "hf":
        ways.append("take a faster engine (rollout.engine=vllm)")
    else:
        ways.append("give the KV cache more memory (rollout.memory_utilization or kv_cache_gb)")
    if not _value(recipe, "rollout", "staleness"):
        ways.append(
            "or train meanwhile (rollout.staleness=1, cluster.placement=separate; responses are then older)"
        )
    return ", ".join(ways)


def _value(recipe: Mapping[str, Any], section: str, name: str) -> Any:
    values = recipe.get(section)
    value = values.get(name) if isinstance(values, dict) else None
    return "default" if value is None else value
