"""Vision-language models train as transformers' own forward and backward say, however samples are packed."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import npusim
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import vision_ranks
from isotrain.data.items import Sample
from isotrain.data.packing import PackedBatch, pack, pack_shared, same_prompt
from isotrain.data.pictures import PictureProcessor, positions_of
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.attention import SEGMENTS
from isotrain.recipe.schema import ModelSection, OptimizerSection
from vision_models import FAMILIES, PATCH, SIZES, make_vlm, png, samples_of, token

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@contextmanager
def engine_of(directory: Path, device_type: str = "cpu", **model: Any) -> Iterator[TrainingEngine]:
    section = ModelSection(path=str(directory), **{"dtype": "float32", "attention": "sdpa", **model})
    device = choose_device(device_type)
    with join_world(device) as world:
        # Without clipping, and with a momentum of 0.5, the first moments are half of the gradients.
        optimizer = OptimizerSection(lr=1e-3, betas=(0.5, 0.9), max_grad_norm=0, weight_decay=0)
        yield build_engine(section, optimizer, device=device, world=world, seed=0)


def alone(directory: Path, samples: list[Sample]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of each sample by itself, and gradients of their mean: plain transformers, its own positions.

    There an image token that a policy wrote would count as a picture: another token is embedded in its place,
    with the image token's embedding.
    """
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).train()
    processor, pad = PictureProcessor.of_model(directory), token(directory)
    logps = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens_T.astype(np.int64))[None]
        seen = torch.zeros_like(tokens)
        for picture in sample.pictures:
            seen[0, picture.start : picture.stop] = 1
        embeds = model.get_input_embeddings()(tokens)
        grid = torch.tensor([picture.grid for picture in sample.pictures])
        positions, deep = None, {}
        if sample.pictures:
            positions, _ = model.model.get_rope_index(tokens, mm_token_type_ids=seen, image_grid_thw=grid)
            pixels = torch.cat(
                [torch.from_numpy(processor.normalised(p.patches_PD)) for p in sample.pictures]
            )
            output = model.model.visual(pixels, grid_thw=grid)
            embeds = embeds.masked_scatter(seen[..., None].bool(), output.pooler_output)
            assert np.array_equal(positions[:, 0], positions_of(len(sample), sample.pictures))
            if features := getattr(output, "deepstack_features", None):
                deep = {"visual_pos_masks": seen.bool(), "deepstack_visual_embeds": features}
        hidden = model.model.language_model(
            inputs_embeds=embeds, position_ids=positions, use_cache=False, **deep
        ).last_hidden_state
        logp = model.lm_head(hidden[0, :-1]).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        logps.append(logp[torch.from_numpy(sample.mask_T[1:])])
    assert pad in samples[0].tokens_T
    logp_N = torch.cat(logps)
    (-logp_N.mean()).backward()
    return logp_N.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def logps_and_gradients(
    engine: TrainingEngine, batches: list[PackedBatch]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logp_N = torch.cat(engine.infer(batches, lambda head: head.logps())).cpu()
    engine.step(batches, lambda head, tokens: head.nll_share(tokens), 0.0)
    return logp_N, {
        name.removeprefix(engine.model.prefix): 2 * engine.optimizer.state[parameter]["exp_avg"].cpu()
        for name, parameter in engine.trained.items()
    }


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative to each tensor's own size."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / (b[name].norm() + 1e-6)).item() for name in a)


@pytest.mark.parametrize("layout", ["packed", "shared", "padded", "one by one"])
def test_layouts_agree_with_each_sample_alone(directory: Path, device_type: str, layout: str) -> None:
    samples, prompts = samples_of(directory)
    expected_N, gradients = alone(directory, samples)
    batches = {
        "packed": lambda: [pack(samples)],
        "padded": lambda: [pack(samples)],
        "shared": lambda: [pack_shared(samples, prompts)],
        "one by one": lambda: [pack([sample]) for sample in samples],
    }[layout]()
    with engine_of(directory, device_type, attention="padded" if layout == "padded" else "sdpa") as engine:
        logp_N, own = logps_and_gradients(engine, batches)
    assert (logp_N - expected_N).abs().max() < TOLERANCE
    assert largest(own, gradients) < 2 * TOLERANCE
    assert expected_N.std() > 0.1, "a model whose log-probs are alike would hide errors"


def test_pixel_values_are_the_processors(directory: Path, device_type: str) -> None:
    samples, _ = samples_of(directory)
    pictures = samples[2].pictures
    theirs = Qwen2VLImageProcessorPil.from_pretrained(directory)
    images = [
        png((2 * w * PATCH[k], 2 * h * PATCH[k]), 10 + i)
        for k in [directory_family(directory)]
        for i, (w, h) in enumerate(SIZES[1])
    ]
    expected = theirs(images=[Image.open(io.BytesIO(image)) for image in images], return_tensors="pt")
    with engine_of(directory, device_type) as engine:
        patches = torch.cat([torch.from_numpy(p.patches_PD) for p in pictures]).to(engine.world.device)
        assert torch.equal(engine.model.vision._normalised(patches).cpu(), expected["pixel_values"])


def directory_family(directory: Path) -> str:
    return next(family for family in FAMILIES if directory.name.startswith(family))


def test_the_tower_is_not_causal_and_has_its_own_attention(directory: Path) -> None:
    samples, _ = samples_of(directory)
    with engine_of(directory) as engine:
        before = engine.infer([pack(samples)], lambda head: head.logps())[0]
        config = engine.model.pretrained.config
        assert config.text_config._attn_implementation == SEGMENTS
        assert config.vision_config._attn_implementation == "sdpa"
        # What the remedy prevents: our function refuses to be asked for attention that is not causal.
        config.vision_config._attn_implementation = SEGMENTS
        with pytest.raises(ModelError, match="not causal"):
            engine.infer([pack(samples)], lambda head: head.logps())
    assert torch.isfinite(before).all()


def test_each_picture_is_encoded_once_in_a_pack(qwen: Path) -> None:
    samples, prompts = samples_of(qwen)
    patches = sum(len(p.patches_PD) for sample in samples[::2] for p in sample.pictures)
    for batch in (pack(samples), pack_shared(samples, prompts)):
        assert batch.pictures is not None and len(batch.pictures.patches_PD) == patches
    assert pack(samples[4:]).pictures is None


def test_prompts_of_the_same_words_and_other_pictures_are_not_shared(qwen: Path) -> None:
    samples, prompts = samples_of(qwen)
    first = samples[0]
    other = PictureProcessor.of_model(qwen)(png((84, 56), 99), first.pictures[0].start)
    assert other.tokens == first.pictures[0].tokens
    twin = replace(samples[1], pictures=(other,))
    assert same_prompt([first, samples[1]], prompts[:2]) == [[0, 1]]
    assert same_prompt([first, twin], prompts[:2]) == [[0], [1]]
    expected_N, _ = alone(qwen, [first, twin])
    with engine_of(qwen) as engine:
        (logp_N,) = engine.infer([pack_shared([first, twin], prompts[:2])], lambda head: head.logps())
    assert (logp_N - expected_N).abs().max() < TOLERANCE
    same_N, _ = alone(qwen, [first, samples[1]])
    assert (same_N - expected_N).abs().max() > 1e-3, "the picture does not matter to this model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_tower_is_left_alone(directory: Path, dtype: str) -> None:
    samples, _ = samples_of(directory)
    with engine_of(directory, vision="frozen", dtype=dtype) as engine:
        assert not any(".visual." in name for name in engine.trained)
        tower = engine.model.vision.tower
        assert {p.dtype for p in tower.parameters()} == {getattr(torch, dtype)}
        before = [p.clone() for p in tower.parameters()]
        result = engine.step([pack(samples), pack(samples[4:])], lambda head, n: head.nll_share(n), 1e-3)
        assert result.applied and result.grad_norm > 0
        assert all(torch.equal(a, b) for a, b in zip(before, tower.parameters(), strict=True))


def test_a_trained_tower_gets_zero_and_not_nothing_from_text_alone(qwen: Path) -> None:
    """On one rank as on several: AdamW moves weights that have a gradient of 0."""
    samples, _ = samples_of(qwen)
    with engine_of(qwen) as engine:
        engine.step([pack(samples[4:])], lambda head, tokens: head.nll_share(tokens), 0.0)
        moments = [s["exp_avg"] for p, s in engine.optimizer.state.items()]
        assert len(moments) == len(engine.trained)


def test_rotations_reach_sharded_blocks_in_float32(directory: Path) -> None:
    samples, _ = samples_of(directory)
    with engine_of(directory, dtype="bfloat16") as engine:
        types = []
        for block in engine.model.vision.tower.blocks:
            block.attn.register_forward_pre_hook(
                lambda module, args, kwargs: types.append(kwargs["position_embeddings"][0].dtype),
                with_kwargs=True,
            )
        engine.infer([pack(samples)], lambda head: head.logps())
    assert set(types) == {torch.float32}


def test_adapters_are_on_the_language_model_alone(directory: Path) -> None:
    samples, _ = samples_of(directory)
    with engine_of(directory, lora={"rank": 2}) as engine:
        assert engine.trained and all(".language_model." in name for name in engine.trained)
        result = engine.step([pack(samples)], lambda head, tokens: head.nll_share(tokens), 1e-3)
        assert result.applied and result.grad_norm > 0
    with (
        pytest.raises(ModelError, match=r"'(qkv|linear_fc1)' cannot have an adapter"),
        engine_of(directory, lora={"rank": 2, "targets": ["linear_fc1" if "3" in directory.name else "qkv"]}),
    ):
        pass


@pytest.mark.parametrize("setting", [{"compile": True}, {"fused": "on"}])
def test_refuses_what_is_not_supported(qwen: Path, setting: dict[str, Any]) -> None:
    with (
        pytest.raises(ModelError, match="not supported for model type 'qwen2_5_vl'"),
        engine_of(qwen, **setting),
    ):
        pass


@pytest.mark.parametrize("vision", ["train", "frozen"])
def test_a_rank_without_a_picture_equals_one_process(
    directory: Path, device_type: str, tmp_path: Path, vision: str
) -> None:
    vision_ranks.run(device_type, directory, tmp_path, vision)
    command = [sys.executable, vision_ranks.__file__, device_type, str(directory), str(tmp_path), vision]
    npusim.run_ranks(command, 2, timeout=240)
    one = load_file(tmp_path / "1-0.safetensors")
    for rank in range(2):
        two = load_file(tmp_path / f"2-{rank}.safetensors")
        assert any("visual" in name for name in two), "engines get the tower too"
        for name, tensor in two.items():
            if not name.startswith("logps/"):
                assert torch.allclose(tensor, one[name], rtol=1e-4, atol=2e-6), name
    logps = [load_file(tmp_path / f"2-{rank}.safetensors")[f"logps/{rank}"] for rank in range(2)]
    assert (torch.cat(logps) - one["logps/0"]).abs().max() < TOLERANCE
