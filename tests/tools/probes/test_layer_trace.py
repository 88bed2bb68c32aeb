from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from jobs import LR, TOKENS, Job, critic_objective, policy_objective
from safetensors import safe_open

from isotrain.data.packing import PackedBatch, pack
from isotrain.device.detect import choose_device
from isotrain.engine.engine import Objective, TrainingEngine, UpdateResult, Work
from isotrain.engine.world import join_world
from isotrain.models.packed import TokenHead
from isotrain.tools.probes.layer_trace import SIZE, LayerTrace, Sketch, _Update

BATCHES = [pack(jobs.SAMPLES[:2]), pack(jobs.SAMPLES[2:])]
ROWS = sum(len(batch.tokens_T) for batch in BATCHES)

Numbers = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def job(device_type: str, tiny: Path) -> Iterator[Job]:
    device = choose_device(device_type)
    with join_world(device) as world:
        yield Job(device, world, tiny / "model")


def update(engine: TrainingEngine, objective: Any = policy_objective) -> UpdateResult:
    return engine.update([(batch, objective(batch)) for batch in BATCHES], LR)


def read(directory: Path, step: int = 1) -> tuple[dict[str, Any], Numbers]:
    with safe_open(directory / f"step-{step:06d}-rank-00000.safetensors", "np") as file:
        facts = {name: json.loads(fact) for name, fact in file.metadata().items()}
        return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def recorded(engine: TrainingEngine, directory: Path, objective: Any = policy_objective) -> Any:
    engine.probes.append(LayerTrace(directory, steps=1))
    update(engine, objective)
    return read(directory)


def hooks_of(engine: TrainingEngine) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules())
    optimizer = engine.optimizer
    return on_modules + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def sketch(*parts: torch.Tensor) -> Sketch:
    made = Sketch()
    for part in parts:
        made.add(part)
    return made


def test_a_sketch_tells_the_distance() -> None:
    draw = torch.Generator().manual_seed(0)
    for rows, columns in ((300, 70), (40, 900), (1, 4096)):
        a = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
        error = 1e-6 * torch.randn(rows, columns, generator=draw, dtype=torch.float64)
        one, other = sketch(a), sketch(a + error)
        assert one.norm == pytest.approx(float(a.norm()), rel=1e-12)
        estimate = np.linalg.norm(one.numbers_KK - other.numbers_KK)
        # A single row has 32 buckets and not 1024.
        assert estimate == pytest.approx(float(error.norm()), rel=0.1 if rows > 1 else 0.4)


def test_a_sketch_is_the_same_everywhere() -> None:
    numbers_KK = sketch(torch.arange(12.0).reshape(3, 4)).numbers_KK
    places = {(int(i), int(j)): float(numbers_KK[i, j]) for i, j in zip(*numbers_KK.nonzero(), strict=True)}
    # Worked out with whole numbers of any length: rows and columns keep together, signs are theirs.
    assert places == {
        (7, 4): 7.0,
        (7, 5): -5.0,
        (7, 21): -4.0,
        (7, 26): 6.0,
        (15, 4): 3.0,
        (15, 5): -1.0,
        (15, 26): 2.0,
        (19, 4): 11.0,
        (19, 5): -9.0,
        (19, 21): -8.0,
        (19, 26): 10.0,
    }


def test_rows_go_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(1))
    whole, parts = sketch(x), sketch(x[:20].reshape(1, 20, 7), x[20:])
    np.testing.assert_allclose(parts.numbers_KK, whole.numbers_KK, rtol=1e-12)
    assert (parts.rows, parts.columns) == (50, 7)
    monkeypatch.setattr("isotrain.tools.probes.layer_trace._NUMBERS_AT_ONCE", 30)
    np.testing.assert_allclose(sketch(x).numbers_KK, whole.numbers_KK, rtol=1e-12)


def test_sketches_scalars_vectors_and_empty_tensors() -> None:
    assert sketch(torch.tensor(3.0)).norm == 3.0
    empty = sketch(torch.empty(0, 5))
    assert (empty.norm, empty.rows, empty.columns) == (0.0, 0, 5)
    vector = sketch(torch.ones(64))
    assert (vector.rows, vector.columns) == (1, 64) and vector.numbers_KK.shape == (SIZE, SIZE)


def test_it_records_what_the_engine_did(job: Job, tmp_path: Path) -> None:
    engine = job.policy()
    engine.max_grad_norm = 0.0
    before = jobs.local(engine)
    engine.probes.append(LayerTrace(tmp_path, steps=1))
    result = update(engine)
    facts, numbers = read(tmp_path)
    assert facts["micro_batches"] == 2 and facts["ranks"] == 1 and facts["step"] == 1
    assert numbers["loss"][0] == pytest.approx(result.loss, rel=1e-6)
    assert math.hypot(*numbers["parameter gradient/norm"]) == pytest.approx(result.grad_norm, rel=1e-5)
    names = facts["names"]
    order = names["activation"]
    assert order[0] == "model.embed_tokens" and order[-1] == "model.norm"
    assert order.index("model.layers.0.self_attn.q_proj") < order.index("model.layers.0.self_attn")
    assert order.index("model.layers.0") < order.index("model.layers.1.input_layernorm")
    assert names["gradient"][0] == "model.norm" and names["gradient"][-1] == "model.embed_tokens"
    assert (numbers["activation/shape"][:, 0] == ROWS).all() and (
        numbers["gradient/shape"][:, 0] == ROWS
    ).all()
    after = jobs.local(engine)
    for name, norm, weight in zip(
        names["update"], numbers["update/norm"], numbers["weight/norm"], strict=True
    ):
        key = f"weights/{engine.model.prefix}{name}"
        assert norm == pytest.approx(float((after[key] - before[key]).double().norm()), rel=1e-6)
        assert weight == pytest.approx(float(before[key].double().norm()), rel=1e-6)


def test_training_does_not_notice_it_and_it_goes(job: Job, tmp_path: Path) -> None:
    plain, traced = job.policy(), job.policy()
    untouched = hooks_of(plain)
    traced.probes.append(LayerTrace(tmp_path, steps=2))
    for step in range(3):
        assert update(plain) == update(traced)
        assert (hooks_of(traced) > untouched) == (step < 1)
    assert jobs.same(jobs.local(plain), jobs.local(traced))
    assert sorted(file.name[:11] for file in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_recomputation_and_inference_are_not_recorded(job: Job, tmp_path: Path) -> None:
    facts, numbers = recorded(job.policy(), tmp_path / "plain")
    engine = job.policy(gradient_checkpointing=True)
    engine.probes.append(LayerTrace(tmp_path / "again", steps=1))

    def work() -> Work:
        engine.infer(BATCHES, TokenHead.logps)
        return [(batch, policy_objective(batch)) for batch in BATCHES]

    engine.update(work, LR)
    other_facts, other_numbers = read(tmp_path / "again")
    assert other_facts == facts
    assert all(np.array_equal(numbers[name], other_numbers[name]) for name in numbers)


def test_sharded_bfloat16_has_the_same_entries(job: Job, tmp_path: Path) -> None:
    facts, numbers = recorded(job.policy(), tmp_path / "wide")
    other_facts, other_numbers = recorded(job.policy(dtype="bfloat16"), tmp_path / "narrow")
    assert other_facts["digests"] == facts["digests"]
    # Devices run attention in their own ways, but all layers are there.
    assert other_facts["names"] == facts["names"]
    for kind in ("activation", "gradient", "parameter gradient"):
        a, b = numbers[f"{kind}/sketch"], other_numbers[f"{kind}/sketch"]
        errors = np.linalg.norm(a - b, axis=(1, 2)) / numbers[f"{kind}/norm"]
        assert 1e-4 < errors.max() < 0.05


def test_names_do_not_show_adapters(job: Job, tmp_path: Path) -> None:
    facts, _ = recorded(job.policy(lora={"rank": 4}), tmp_path)
    layer = "model.layers.0.self_attn.q_proj"
    assert {layer, f"{layer}.lora_A", f"{layer}.lora_B"} <= set(facts["names"]["activation"])
    assert {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"} <= set(facts["names"]["update"])
    told = json.dumps(facts["names"])
    assert "base_layer" not in told and ".default" not in told


def test_records_a_critic(job: Job, tmp_path: Path) -> None:
    facts, numbers = recorded(job.critic(), tmp_path, critic_objective)
    assert "score.weight" in facts["names"]["update"] and "model.norm" in facts["names"]["activation"]
    # A new head is 0, and lets no gradient through to the layers before it.
    assert not numbers["gradient/norm"].any() and numbers["parameter gradient/norm"].any()


def test_digests_tell_what_changed(job: Job, tmp_path: Path) -> None:
    def digests(name: str, batches: list[PackedBatch]) -> dict[str, str]:
        engine = job.policy()
        engine.probes.append(LayerTrace(tmp_path / name, steps=1))
        engine.update([(batch, policy_objective(batch)) for batch in batches], LR)
        found: dict[str, str] = read(tmp_path / name)[0]["digests"]
        return found

    samples = jobs.SAMPLES
    first = digests("first", [pack(samples[:2])])
    assert digests("again", [pack(samples[:2])]) == first
    swapped = digests("swapped", [pack([samples[1], samples[0]])])
    assert swapped["tokens"] != first["tokens"]
    split = digests("split", [pack(samples[:1]), pack(samples[1:2])])
    assert split["tokens"] != first["tokens"] and split["packing"] != first["packing"]
    masked = [type(s)(s.tokens_T, s.mask_T & (np.arange(len(s.mask_T)) > 3)) for s in samples[:2]]
    mask = digests("mask", [pack(masked)])
    assert mask["tokens"] == first["tokens"] and mask["packing"] == first["packing"]
    assert mask["loss"] != first["loss"]


def test_calls_for_other_kinds_of_layers_are_told_apart(tmp_path: Path) -> None:
    """Their order may differ from process to process: it is that of a set of names."""
    kinds = {"sliding": torch.ones(2, 3), "full": torch.full((2, 3), 2.0)}
    recorded = []
    for order in (kinds, reversed(kinds)):
        trace = LayerTrace(tmp_path, 1)
        trace._update, trace._looking = _Update(), True
        for kind in order:
            trace._layer("rotary", torch.nn.Identity(), (torch.zeros(1), kind), kinds[kind])
        recorded.append(trace._update.sketches["activation"])
    assert recorded[0].keys() == {"rotary[sliding]", "rotary[full]"}
    for name, sketch in recorded[0].items():
        assert (sketch.numbers_KK == recorded[1][name].numbers_KK).all()


def test_an_update_that_was_left_out_leaves_nothing(job: Job, tmp_path: Path) -> None:
    def broken(batch: PackedBatch) -> Objective:
        return lambda head: (head.logps().sum() * float("nan") / TOKENS, {})

    facts, numbers = recorded(job.policy(), tmp_path / "plain")
    engine = job.policy()
    engine.probes.append(LayerTrace(tmp_path / "after", steps=1))
    assert not update(engine, broken).applied and not (tmp_path / "after").exists()
    update(engine)
    other_facts, other_numbers = read(tmp_path / "after")
    assert other_facts == facts
    assert all(np.array_equal(numbers[name], other_numbers[name]) for name in numbers)
