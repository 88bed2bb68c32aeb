from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from jobs import LR, Job, policy_objective
from transformers import AutoConfig, AutoModelForCausalLM

from isotrain.data.packing import pack
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.engine import TrainingEngine, UpdateResult, Work
from isotrain.engine.world import join_world
from isotrain.models.packed import TokenHead
from isotrain.tools.probes.score_tests.recorder import ScoreTestRecorder

SAMPLES = [jobs.sample(length, seed) for seed, length in enumerate((12, 7, 20, 9, 31, 25, 40, 33, 18, 26))]
BATCH = pack(SAMPLES)


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


@pytest.fixture
def host(tiny: Path) -> Iterator[Callable[[Path], Job]]:
    device = choose_device("cpu")
    with join_world(device) as world:
        yield lambda model: Job(device, world, model)


def update(engine: TrainingEngine) -> UpdateResult:
    return engine.update([(BATCH, policy_objective(BATCH))], LR)


def recorded(engine: TrainingEngine, directory: Path) -> dict[str, Any]:
    engine.probes.append(ScoreTestRecorder(directory))
    update(engine)
    found: dict[str, Any] = json.loads((directory / "step-000001-rank-00000.json").read_text())
    return found


def offs(content: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What each constant is off by, and its standard error."""
    return {
        f"{module['module']} {one['constant']}": (one["off"], one["error"])
        for module in content["modules"]
        for one in module["constants"]
    }


def hooks_of(engine: TrainingEngine) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_models_are_as_stated(job: Job, tmp_path: Path, dtype: str) -> None:
    content = recorded(job.policy(dtype=dtype), tmp_path)
    assert content["not_tested"] == {} and content["ranks"] == 1
    kinds = [module["kind"] for module in content["modules"]]
    assert sorted(set(kinds)) == ["attention", "norm", "rotary"]
    assert kinds.count("norm") == 5 and kinds.count("attention") == 2
    assert all(module["dtype"] == dtype for module in content["modules"])
    assert all(module["rest"] < (2 if dtype == "bfloat16" else 16) for module in content["modules"])
    for name, (off, error) in offs(content).items():
        if not name.endswith("epsilon"):
            assert abs(off) < (1e-3 if dtype == "bfloat16" else 1e-5), name
        assert error is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_constants_are_named(job: Job, tmp_path: Path, dtype: str) -> None:
    engine = job.policy(dtype=dtype)
    layers: Any = engine.model.pretrained.model.layers
    layers[1].self_attn.scaling *= 1.02
    layers[0].post_attention_layernorm.register_forward_hook(lambda module, _, output: 1.01 * output)
    found = offs(recorded(engine, tmp_path))
    assert found["model.layers.1.self_attn scale"][0] == pytest.approx(0.02, abs=2e-3)
    assert found["model.layers.0.post_attention_layernorm gain"][0] == pytest.approx(0.01, abs=2e-3)
    assert abs(found["model.layers.0.self_attn scale"][0]) < 1e-3


def test_training_does_not_notice_it_and_it_goes(job: Job, tmp_path: Path) -> None:
    plain, tested = (job.policy(gradient_checkpointing=True) for _ in range(2))
    untouched = hooks_of(plain)
    tested.probes.append(ScoreTestRecorder(tmp_path))

    def work() -> Work:
        tested.infer([BATCH], TokenHead.logps)
        assert hooks_of(tested) > untouched or list(tmp_path.iterdir()), "only a training step is looked at"
        return [(BATCH, policy_objective(BATCH))]

    for _ in range(2):
        assert update(plain) == tested.update(work, LR)
        assert hooks_of(tested) == untouched
    assert jobs.same(jobs.local(plain), jobs.local(tested))


def test_tests_models_with_adapters_and_padding(
    host: Callable[[Path], Job], tiny: Path, tmp_path: Path
) -> None:
    job = host(tiny / "model")
    plain = offs(recorded(job.policy(), tmp_path / "plain"))
    for name, options in {"lora": {"lora": {"rank": 4}}, "padded": {"attention": "padded"}}.items():
        content = recorded(job.policy(**options), tmp_path / name)
        assert set(offs(content)) == set(plain) and content["not_tested"] == {}
        assert abs(offs(content)["model.layers.1.self_attn scale"][0]) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tests_norms_of_queries(host: Callable[[Path], Job], tmp_path: Path, dtype: str) -> None:
    make_tiny(tmp_path / "tiny", train_rows=8, validation_rows=8, architecture="qwen3")
    engine = host(tmp_path / "tiny" / "model").policy(dtype=dtype)
    layers: Any = engine.model.pretrained.model.layers
    layers[1].self_attn.scaling *= 1.02
    content = recorded(engine, tmp_path / "out")
    found = offs(content)
    assert content["not_tested"] == {} and "model.layers.0.self_attn.q_norm epsilon" in found
    assert found["model.layers.1.self_attn scale"][0] == pytest.approx(0.02, abs=2e-3)
    assert abs(found["model.layers.0.self_attn scale"][0]) < (1e-3 if dtype == "bfloat16" else 1e-5)


def windowed(path: Path) -> Path:
    """A Gemma: windows of 6 in its first layer, another base in its second, norms that add one."""
    config = AutoConfig.for_model(
        "gemma3_text",
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6},
        **{"query_pre_attn_scalar": 24, "initializer_range": 0.08, "max_position_embeddings": 512},
        layer_types=["sliding_attention", "full_attention"],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_and_norms_that_add_one(host: Callable[[Path], Job], tmp_path: Path, dtype: str) -> None:
    engine = host(windowed(tmp_path / "model")).policy(dtype=dtype)
    layers: Any = engine.model.pretrained.model.layers
    layers[0].self_attn.scaling *= 0.98
    content = recorded(engine, tmp_path / "out")
    found = offs(content)
    assert content["not_tested"] == {}
    assert found["model.layers.0.self_attn scale"][0] == pytest.approx(-0.02, abs=2e-3)
    assert abs(found["model.layers.1.self_attn scale"][0]) < (1e-3 if dtype == "bfloat16" else 1e-5)
    assert abs(found["model.rotary_emb (sliding_attention) base"][0]) < 1e-3
    assert all(module["rest"] < 16 for module in content["modules"])


def test_a_dropped_window_is_no_scale(host: Callable[[Path], Job], tmp_path: Path) -> None:
    engine = host(windowed(tmp_path / "model")).policy()
    layers: Any = engine.model.pretrained.model.layers
    layers[0].self_attn.sliding_window = None
    content = recorded(engine, tmp_path / "out")
    rests = {module["module"]: module["rest"] for module in content["modules"]}
    assert rests["model.layers.0.self_attn"] > 1000 > 16 > rests["model.layers.1.self_attn"]


def test_a_model_of_another_kind_says_why(host: Callable[[Path], Job], tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", train_rows=8, validation_rows=8, architecture="deepseek_v3")
    content = recorded(host(tmp_path / "tiny" / "model").policy(), tmp_path / "out")
    assert content["modules"] == []
    assert content["not_tested"]["model.layers.0.self_attn"].startswith(
        "the formulas of model type 'deepseek_v3'"
    )
