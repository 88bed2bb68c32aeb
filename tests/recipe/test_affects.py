"""What fields affect, and what follows from it: resuming, comparing, replaying."""

from __future__ import annotations

import pytest

from isotrain.recipe.difference import (
    FIXED_BY_RECORDING,
    MAY_CHANGE_ON_RESUME,
    MAY_DIFFER_IN_PARITY,
    names_where,
    not_free,
)
from isotrain.recipe.fields import leaves
from isotrain.recipe.schema import Recipe
from isotrain.recipe.section import Affects, Section

ON_RESUME_ONLY = {
    *(f"trainer.{name}" for name in ("epochs", "steps", "validate_every", "validate_first")),
    *(f"trainer.{name}" for name in ("non_finite", "max_skipped_steps")),
    *(f"data.{name}" for name in ("tokens_per_micro_batch", "validation_rows")),
    *(f"rollout.validation.{name}" for name in ("n", "temperature")),
    *(f"reward.{name}" for name in ("timeout", "function.memory_gb", "plugin.memory_gb")),
    *(f"rollout.environment.{name}" for name in ("time_limit", "memory_gb")),
    *(f"rollout.agent.{name}" for name in ("time_limit", "memory_gb")),
    *(f"reward.code.{name}" for name in ("timeout", "memory_gb")),
}
IN_PARITY_ONLY = {"rollout.replay"}
BOTH = {
    *("name", "output"),
    *(f"trainer.{name}" for name in ("save_every", "keep_checkpoints", "checkpoint_storage")),
    *(f"trainer.{name}" for name in ("resume", "follow_links", "preemption_seconds")),
    *(
        f"model.{name}"
        for name in (
            *("attention", "compile", "experts", "fused", "gradient_checkpointing", "logits_chunk"),
            *(f"offload.{what}" for what in ("weights", "optimizer", "activations")),
        )
    ),
    *(f"rollout.{name}" for name in ("engines", "tensor_parallel", "memory_utilization", "kv_cache_gb")),
    *(
        f"rollout.{name}"
        for name in (
            *("eager", "load_format", "server_python", "weight_transfer", "update_timeout"),
            *("engine_options", "exact"),
            "weight_check_tolerance",
            "record",
        )
    ),
    *("reward.workers", "reward.math.processes"),
    *(f"rollout.environment.{name}" for name in ("concurrency", "start_timeout", "variables")),
    *(f"rollout.agent.{name}" for name in ("concurrency", "start_timeout", "variables", "python")),
    *(f"reward.code.{name}" for name in ("sandbox", "python", "processes")),
    *(
        f"reward.{part}.{name}"
        for part in ("function", "plugin")
        for name in ("concurrency", "start_timeout", "environment")
    ),
    *(leaf.path for leaf in leaves(Recipe) if leaf.path.startswith(("device.", "observe.", "cluster."))),
}


def test_the_three_lists() -> None:
    values = {leaf.path for leaf in leaves(Recipe)}
    assert MAY_CHANGE_ON_RESUME & values == ON_RESUME_ONLY | BOTH
    assert MAY_DIFFER_IN_PARITY & values == IN_PARITY_ONLY | BOTH
    assert set(FIXED_BY_RECORDING) == {
        *("seed", "algorithm.name", "data.batch_size"),
        *(f"rollout.{name}" for name in ("n", "max_tokens", "temperature")),
    }


def test_sections_are_free_only_as_a_whole() -> None:
    def sections(names: frozenset[str]) -> set[str]:
        return names - {leaf.path for leaf in leaves(Recipe)}

    everywhere = {"cluster", "device", "device.mesh", "model.offload", "observe", "observe.profile"}
    assert sections(MAY_CHANGE_ON_RESUME) == {*everywhere, "rollout.validation", "trainer"}
    assert sections(MAY_DIFFER_IN_PARITY) == everywhere


def test_what_is_not_declared_is_bound() -> None:
    """A new field is part of the outcome until somebody says otherwise."""

    class New(Section):
        field: int = 1

    (leaf,) = leaves(New)
    assert leaf.affects is Affects.OUTCOME
    assert not names_where(lambda a: a.may_change_on_resume or a.may_differ_in_parity, New)


@pytest.mark.parametrize(
    ("line", "free"),
    [
        ("device.type: cpu -> npu", True),
        ("device.of_another_version: 1 -> (absent)", True),
        ('cluster: null -> {"address": "local"}', True),
        ("rollout.engine: hf -> vllm", False),
        ("rollout.engines: 1 -> 2", True),
        ("devices: 1 -> 2", False),
    ],
)
def test_lines_are_matched_by_whole_names(line: str, free: bool) -> None:
    assert not_free([line], MAY_DIFFER_IN_PARITY) == ([] if free else [line])
