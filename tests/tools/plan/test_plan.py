"""Whether a recipe fits, and what is proposed if not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isotrain.device.vendors import DataSheet, device_named
from isotrain.errors import PlanError
from isotrain.recipe.schema import Recipe
from isotrain.tools.plan import plan as plans
from isotrain.tools.plan.memory import TrainingMemory
from isotrain.tools.plan.plan import RecipePlan, alternatives, make_plan, search

GB = 2**30
A2 = device_named("a2")


def recipe(path: str, **sections: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "plan",
            "output": "runs/plan",
            "data": {"train": "rows.jsonl", "max_length": 256, "tokens_per_micro_batch": 4096},
            "model": {"path": path},
            "algorithm": {"name": "sft"},
            **sections,
        }
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """In place of fake steps, which take seconds: a gigabyte for each thousand tokens of a rank."""
    asked: dict[str, float] = {}

    def memory(recipe: Recipe, layers: int, ranks: int, micro_batches: int) -> TrainingMemory:
        tokens = recipe.data.tokens_per_micro_batch / recipe.device.mesh.context
        asked.update(layers=layers, ranks=ranks, micro_batches=micro_batches)
        return TrainingMemory(
            {"activations": int(tokens / 1000 * GB)}, "backward pass", 0, 1000, 1000, 1000, (1, 0)
        )

    monkeypatch.setattr(plans, "training_memory", memory)
    return asked


def test_fits_when_the_device_has_the_memory_of_the_peak(tiny: object, measured: dict[str, float]) -> None:
    given = recipe(f"{tiny}/model")
    plan = make_plan(given, 8, A2, 64)
    assert plan.fits and plan.ranks == 8 and measured["ranks"] == 8
    assert plan.needed_gb == pytest.approx(4.096 * 1.05 + 1.5 + 400 / 1024)
    # Twice 200 MB for each group of ranks, twice 20 MB for one whose ranks send to single others.
    ring = replace(plan, memory=replace(plan.memory, communicators=(2, 1)))
    assert ring.buffers_gb == pytest.approx((2 * 400 + 40) / 1024)
    assert not replace(plan, device_gb=5).fits
    assert "training needs 6.2 GB of 5" in replace(plan, device_gb=5).problems[0]
    assert set(plan.as_json()) >= {"fits", "needed_gb", "step_seconds", "bottleneck", "training_peak_parts"}


def test_the_first_change_that_is_enough_is_proposed(tiny: object, measured: dict[str, float]) -> None:
    data = {"train": "rows.jsonl", "max_length": 256, "tokens_per_micro_batch": 16384}
    given = recipe(f"{tiny}/model", data=data)
    tried = list(search(given, 8, A2, 6.5))
    assert [plan.fits for plan in tried] == [False] * (len(tried) - 1) + [True]
    assert tried[-1].changes == ("data.tokens_per_micro_batch=4096",)
    assert tried[-1].recipe.data.tokens_per_micro_batch == 4096
    tried = list(search(given, 8, A2, 5.0))
    assert "device.mesh.context=2" in tried[-1].changes and tried[-1].fits
    assert not list(search(given, 8, A2, 1.0))[-1].fits, "all were tried"


def test_proposes_only_contexts_that_divide_the_ranks(tiny: object) -> None:
    changes = [change for way in alternatives(recipe(f"{tiny}/model"), 6) for change in way]
    assert "device.mesh.context=2" in changes and "device.mesh.context=4" not in changes


def test_separate_engines_take_their_devices_from_training(tiny: object, measured: dict[str, float]) -> None:
    online = {
        "algorithm": {"name": "grpo"},
        "rollout": {"n": 8, "max_tokens": 256, "engines": 2, "tensor_parallel": 2},
        "reward": {"function": {"path": "rewards.py:score"}},
        "cluster": {"placement": "separate"},
    }
    plan = make_plan(recipe(f"{tiny}/model", **online), 16, A2, 64)
    assert plan.ranks == 12 and plan.engines is not None and plan.engines.engines == 2
    assert set(plan.time.seconds) == {"generation", "log-probs", "weight sync", "update"}
    full = replace(plan.engines, responses=0)
    assert "does not hold one response" in replace(plan, engines=full).problems[0]


# A device of round numbers: 100 TFLOPS, 2 TB/s of memory, 100 GB/s inside a machine of 8, 10 GB/s between.
ROUND = DataSheet("round", 64, 100, 2, 100, 10, 8)
ONLINE: dict[str, Any] = {
    "rollout": {"n": 4, "max_tokens": 512, "tensor_parallel": 2},
    "reward": {"function": {"path": "rewards.py:score"}},
}


def planned(
    path: str, monkeypatch: pytest.MonkeyPatch, dtype: str, devices: int = 8, gb: float = 64, **algorithm: Any
) -> RecipePlan:
    """4e9 weights, of which 3e9 are multiplied and 1.5e9 trained; steps of 64 prompts with 4 responses.

    The tiny model has 2 layers, 2 heads and one key head of 32: a token's cache has 2 x 2 x 32 numbers.
    """
    memory = TrainingMemory({"activations": GB}, "backward pass", 0, 3 * 10**9, 15 * 10**8, 4 * 10**9, (1, 0))
    monkeypatch.setattr(plans, "training_memory", lambda *_: memory)
    data = {"train": "r.jsonl", "max_length": 256, "batch_size": 64, "tokens_per_micro_batch": 4096}
    model = {"path": path, "dtype": dtype}
    sections = {"data": data, "model": model, "device": {"ranks": devices}, **ONLINE}
    given = recipe(path, algorithm={"name": "grpo", **algorithm}, **sections)
    return make_plan(given, devices, ROUND, gb)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_engine_memory_equals_a_sum_by_hand(
    tiny: object, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int
) -> None:
    """Weights and cache have the type of the model; each device of an engine has half of the weights."""
    engines = planned(f"{tiny}/model", monkeypatch, dtype).engines
    assert engines is not None and (engines.engines, engines.tensor_parallel) == (4, 2)
    weights = size * 4e9 / 2
    assert engines.weights_gb * GB == pytest.approx(weights)
    # Half of 64 GB, without weights and 3 GB for graphs and activations.
    cache = 32 * GB - weights - 3 * GB
    assert engines.cache_gb * GB == pytest.approx(cache)
    assert engines.responses == int(cache // (size * 128 * (256 + 512)))


@pytest.mark.parametrize(("gb", "has_room"), [(64, True), (7.5, True), (7, False)])
def test_the_devices_of_an_engine_that_generates_share_a_second_buffer(
    tiny: object, monkeypatch: pytest.MonkeyPatch, gb: float, has_room: bool
) -> None:
    """8e9 bytes on two devices, beside half of each; engines that wait for ranks need none."""
    sections: dict[str, Any] = {"cluster": {"placement": "separate"}}
    engines = planned(f"{tiny}/model", monkeypatch, "bfloat16").engines
    assert engines is not None and (engines.buffer_gb, engines.has_room) == (0, True)
    rollout = ONLINE["rollout"] | {"staleness": 1}
    monkeypatch.setitem(ONLINE, "rollout", rollout)
    for section, values in sections.items():
        monkeypatch.setitem(ONLINE, section, values)
    engines = planned(f"{tiny}/model", monkeypatch, "bfloat16", gb=gb).engines
    assert engines is not None and engines.buffer_gb * GB == pytest.approx(4e9)
    assert engines.has_room is has_room
    monkeypatch.setitem(ONLINE, "rollout", rollout | {"weight_transfer": "file"})
    engines = planned(f"{tiny}/model", monkeypatch, "bfloat16", gb=gb).engines
    assert engines is not None and engines.buffer_gb == 0


@pytest.mark.parametrize(
    ("rollout", "placement", "gb", "gb_s"),
    [
        ({"staleness": 1}, "separate", 64, None),
        ({"staleness": 1}, "separate", 7, 0.86),  # no room for the second buffer
        ({"weight_transfer": "file"}, "colocated", 64, 4.0),  # each machine writes for itself
    ],
)
def test_a_weight_sync_is_as_slow_as_its_route(
    tiny: object,
    monkeypatch: pytest.MonkeyPatch,
    rollout: dict[str, Any],
    placement: str,
    gb: float,
    gb_s: float | None,
) -> None:
    """8e9 bytes; by device, each device of an engine takes half of them, at 70 % of 10 GB/s."""
    monkeypatch.setitem(ONLINE, "rollout", ONLINE["rollout"] | rollout)
    monkeypatch.setitem(ONLINE, "cluster", {"placement": placement})
    seconds = planned(f"{tiny}/model", monkeypatch, "bfloat16", devices=32, gb=gb).time.seconds
    if gb_s is None:
        assert seconds["weight sync"] == pytest.approx(4e9 / (ROUND.between_gb_s * 1e9 * 0.7))
        assert "weight sync through files" not in seconds
    else:
        assert seconds["weight sync through files"] == pytest.approx(8 / gb_s)
        assert "weight sync" not in seconds


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_step_time_equals_a_sum_by_hand(
    tiny: object, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int
) -> None:
    kl = {"place": "loss"}
    seconds = planned(f"{tiny}/model", monkeypatch, dtype, kl=kl, ppo_epochs=3).time.seconds
    weights = size * 4e9 / 2
    # 64 responses an engine, all at one time: 256 tokens each on average, and all wait for the longest, 512.
    # A token reads the weights and, of each response, the cache of half the prompt and half its own tokens.
    token = (weights + 64 * (128 + 128) * size * 128) / (2e12 * 0.7) + 0.004
    assert seconds["generation"] == pytest.approx(512 * token)
    assert seconds["weight sync"] == pytest.approx(weights / (100e9 * 0.7))
    # 256 samples of 384 tokens, two passes: old log-probs and those of the reference.
    tokens, peak = 256 * 384, 8 * 100e12 * 0.4
    assert seconds["log-probs"] == pytest.approx(2 * 2 * 3e9 * tokens / peak)
    # 4 operations a multiplied weight, 2 a trained one, attention of 2 layers and width 64, one third again.
    attention = 6 * 2 * 64 * 256 * 384**2
    update = ((4 * 3e9 + 2 * 1.5e9) * tokens + attention) * 4 / 3 / peak
    assert seconds["update"] == pytest.approx(3 * update)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_time_on_links_equals_a_sum_by_hand(
    tiny: object, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int
) -> None:
    """More than one machine: the slow link carries weights to engines, and layers to ranks."""
    plan = planned(f"{tiny}/model", monkeypatch, dtype, devices=128, ppo_epochs=2)
    assert plan.time.seconds["weight sync"] == pytest.approx(size * 4e9 / 2 / (10e9 * 0.7))
    # One micro-batch a rank: weights twice, gradients of the trained half in float32, from 127 of 128 ranks.
    travelled = (2 * size * 4e9 + 4 * 4e9 * 0.5) * 127 / 128
    assert plan.time.seconds["update"] == pytest.approx(2 * travelled / (10e9 * 0.7))
    assert plan.time.bottleneck == "update" and plan.time.total == sum(plan.time.seconds.values())
    # A critic of the same size learns as well.
    ppo = planned(f"{tiny}/model", monkeypatch, dtype, devices=128, name="ppo")
    assert ppo.time.seconds["update"] == pytest.approx(plan.time.seconds["update"])


def test_a_small_cache_makes_responses_wait(tiny: object, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 16.5 * 2 * 128 * 768  # sixteen of the longest responses, and not a seventeenth
    plan = planned(f"{tiny}/model", monkeypatch, "bfloat16", gb=2 * (4e9 + 3 * GB + room) / GB)
    assert plan.engines is not None and plan.engines.responses == 16
    token = (4e9 + 16 * 256 * 2 * 128) / (2e12 * 0.7) + 0.004
    # 64 responses of 256 tokens by 16 at a time, and the rest of the longest.
    assert plan.time.seconds["generation"] == pytest.approx((256 * 64 / 16 + 256) * token)


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({"name": "grpo"}, 0),
        ({"name": "grpo", "mini_batch_size": 1}, 1),
        ({"name": "grpo", "ppo_epochs": 2}, 1),
        ({"name": "grpo", "kl": {"place": "loss"}}, 1),
        ({"name": "grpo", "kl": {"place": "reward"}}, 2),
        ({"name": "ppo", "kl": {"place": "loss"}, "mini_batch_size": 1}, 3),
    ],
)
def test_counts_the_forward_passes_before_the_updates(
    tiny: object, measured: dict[str, float], algorithm: dict[str, object], passes: int
) -> None:
    """As the loop makes them: no old log-probs for a single update."""
    online = {"rollout": {"n": 2}, "reward": {"function": {"path": "rewards.py:score"}}}

    def seconds(algorithm: dict[str, object]) -> float:
        plan = make_plan(recipe(f"{tiny}/model", algorithm=algorithm, **online), 8, A2, 64)
        return plan.time.seconds["log-probs"]

    one = seconds({"name": "grpo", "ppo_epochs": 2})
    assert one > 0 and seconds(algorithm) == pytest.approx(passes * one)


def test_engines_that_stay_awake_add_their_memory(tiny: object, measured: dict[str, float]) -> None:
    """With `cluster.offload: false`, training and engines need their memory at the same time."""
    online = {
        "algorithm": {"name": "grpo"},
        "rollout": {"n": 2, "max_tokens": 256, "memory_utilization": 0.5},
        "reward": {"function": {"path": "rewards.py:score"}},
    }
    asleep, awake = (
        make_plan(recipe(f"{tiny}/model", **online, cluster={"offload": offload}), 8, A2, 64)
        for offload in (True, False)
    )
    # Half of 64 GB, in place of what a sleeping one keeps.
    assert awake.needed_gb == pytest.approx(asleep.needed_gb + 32 - 4)
    assert asleep.guessed_gb["a sleeping engine"] == 4.0


@pytest.mark.parametrize("name", ["replicas", "expert"])
def test_refuses_a_mesh_that_cannot_be_planned(tiny: object, measured: dict[str, float], name: str) -> None:
    given = recipe(f"{tiny}/model", device={"ranks": 8, "mesh": {name: 2}})
    with pytest.raises(PlanError, match=rf"device\.mesh\.{name} cannot be planned.*: set it to 1"):
        make_plan(given, 8, A2, 64)


def test_changes_that_a_recipe_refuses_are_not_tried(tiny: object, measured: dict[str, float]) -> None:
    given = recipe(f"{tiny}/model", model={"path": f"{tiny}/model", "gradient_checkpointing": False})
    tried = [plan.changes for plan in search(given, 8, A2, 1.0)]
    assert len(tried) > 3 and not any("offload.activations" in change for way in tried for change in way)


def test_a_fake_step_is_not_fused(
    tiny: object, measured: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recipe] = []
    told = plans.training_memory

    def memory(recipe: Recipe, *sizes: int) -> TrainingMemory:
        seen.append(recipe)
        return told(recipe, *sizes)

    monkeypatch.setattr(plans, "training_memory", memory)
    model = {"path": f"{tiny}/model", "attention": "flash", "fused": "on"}
    plan = make_plan(recipe(f"{tiny}/model", model=model), 8, A2, 64)
    assert (seen[0].model.attention, seen[0].model.fused) == ("auto", "off")
    assert (plan.recipe.model.attention, plan.recipe.model.fused) == ("flash", "on")


def test_refuses_a_device_that_is_not_known() -> None:
    with pytest.raises(PlanError, match="known are a2"):
        device_named("tpu")
