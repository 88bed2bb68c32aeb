"""Streamed weights are those that an export of the same engine has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
import torch
from jobs import Job, policy_objective, updates
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.export import export_run
from isotrain.engine.world import join_world
from isotrain.models.lora import lora_config
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import resolved
from isotrain.weights.send import full_weights
from support import tiny_recipe

Outcome = Callable[[str, int], Path]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "lora_rank"), [("full", 0), ("lora", 4)])
def test_equals_an_export(
    outcome: Outcome, tiny: Path, tmp_path: Path, device_type: str, ranks: int, kind: str, lora_rank: int
) -> None:
    out = outcome(device_type, ranks)
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", model={"lora": {"rank": lora_rank}})
    RunDirectory.create(recipe.output, "", resolved(recipe), {})
    shutil.copytree(out / kind / "checkpoints", tmp_path / "run" / "checkpoints", dirs_exist_ok=True)
    export_run(tmp_path / "run", tmp_path / "exported", None, adapter_only=False)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    base = load_file(tiny / "model" / "model.safetensors")
    prefix = {"full": "full/", "lora": "merged/"}[kind]
    for found in jobs.results(out, ranks):
        streamed = {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}
        assert streamed.keys() == exported.keys()
        for name, tensor in streamed.items():
            if kind == "full":
                assert torch.equal(tensor, exported[name]), name
            else:
                torch.testing.assert_close(tensor, exported[name], rtol=0, atol=1e-7, msg=name)
        assert not torch.allclose(
            streamed["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"]
        )


@pytest.mark.parametrize(
    "targets", ["all-linear", ["c_attn", "c_proj"]], ids=["all layers", "layers by name"]
)
def test_weights_that_lie_the_other_way_round(
    tiny: Path, tmp_path: Path, device_type: str, targets: str | list[str]
) -> None:
    """GPT-2's layers have inputs first: what is streamed is what peft merges."""
    config = GPT2Config(vocab_size=512, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.save_pretrained(tmp_path)
    device = choose_device(device_type)
    with join_world(device) as world:
        job = Job(device, world, tmp_path)
        engine = job.policy(lora={"rank": 4, "alpha": 8, "targets": targets})
        updates(engine, policy_objective, job.batches)
        streamed = {name: tensor.cpu() for name, tensor in full_weights(engine, torch.float32)}
        prefix = f"{engine.model.prefix}"
        trained = {name.removeprefix(prefix): p.detach().cpu() for name, p in engine.trained.items()}
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = get_peft_model(base, lora_config(4, 8, targets, 0.0))
    missing = adapted.base_model.model.load_state_dict(trained, strict=False)
    assert not missing.unexpected_keys and trained
    merged = adapted.merge_and_unload().state_dict()
    square = "transformer.h.0.attn.c_proj.weight"  # of this shape, a wrong way round raises no error
    assert not torch.equal(streamed[square], before[square])
    for name, tensor in streamed.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-7, msg=name)


def test_nothing_is_copied_where_the_type_fits(tiny: Path, device_type: str) -> None:
    device = choose_device(device_type)
    with join_world(device) as world:
        engine = Job(device, world, tiny / "model").policy()
        owned = {p.data_ptr() for p in engine.model.parameters()}
        assert {tensor.data_ptr() for _, tensor in full_weights(engine, torch.float32)} == owned
        assert not any(tensor.requires_grad for _, tensor in full_weights(engine, torch.float32))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_short_types_are_rounded_once(tmp_path: Path, device_type: str, lora_rank: int) -> None:
    """From sharded mixed precision, right after inference; a head of its own is among the weights."""
    make_tiny(tmp_path, train_rows=1, validation_rows=1, tie_word_embeddings=False)
    device = choose_device(device_type)
    with join_world(device) as world:
        job = Job(device, world, tmp_path / "model")
        engine = job.policy(dtype="bfloat16", lora={"rank": lora_rank})
        updates(engine, policy_objective, job.batches)
        engine.infer(job.batches, lambda head: head.logps())
        exact = {name: tensor.cpu() for name, tensor in full_weights(engine, torch.float32)}
        assert "lm_head.weight" in exact
        for name, tensor in full_weights(engine, torch.bfloat16):
            assert tensor.device.type == device_type and tensor.dtype == torch.bfloat16
            assert torch.equal(tensor.cpu(), exact.pop(name).bfloat16()), name
        assert not exact
