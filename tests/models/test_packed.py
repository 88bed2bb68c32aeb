from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
)

from isotrain.data.items import Sample
from isotrain.data.packing import pack, pack_shared
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.load import IMPLEMENTATIONS, build_causal_lm
from isotrain.models.packed import PackedModel, TokenHead
from isotrain.recipe.schema import ModelSection, OptimizerSection
from windowed import save_windowed

LENGTHS = (9, 1, 20, 4)
TOKENS = sum(LENGTHS)


def load(directory: Path, device: str, attention: str, dtype: torch.dtype = torch.float32) -> PackedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=IMPLEMENTATIONS[attention]
    )
    return PackedModel(model.eval().to(device), attention, logits_chunk=7)


def tokens(device: str) -> torch.Tensor:
    return torch.randint(0, 60, (TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)


def hidden_states(
    model: PackedModel, tokens_T: torch.Tensor, lengths: tuple[int, ...] = LENGTHS
) -> torch.Tensor:
    place = torch.arange(len(tokens_T), device=tokens_T.device)
    positions_T = torch.cat([place[:length] for length in lengths])
    hidden_TD: torch.Tensor = model(
        tokens_T, positions_T, lengths, place, tokens_T, lambda head: head.hidden_ND
    )
    return hidden_TD


def one_by_one(model: PreTrainedModel, tokens_T: torch.Tensor) -> torch.Tensor:
    parts = [model.base_model(sample[None]).last_hidden_state[0] for sample in tokens_T.split(LENGTHS)]
    return torch.cat(parts)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens see the last five only."""
    path = tmp_path_factory.mktemp("windowed")
    save_windowed(path, vocab=64)
    return path


@pytest.fixture(params=["tiny", "windowed"])
def directory(request: pytest.FixtureRequest, tiny: Path, windowed: Path) -> Path:
    return tiny / "model" if request.param == "tiny" else windowed


@torch.no_grad()
def test_segments_and_padding_equal_samples_one_by_one(directory: Path, device_type: str) -> None:
    tokens_T = tokens(device_type)
    padded = load(directory, device_type, "padded")
    expected = one_by_one(padded.pretrained, tokens_T)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(hidden_states(padded, tokens_T), expected, rtol=0, atol=1e-5)
    packed = hidden_states(load(directory, device_type, "sdpa"), tokens_T)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_flash_equals_segments(tiny: Path, dtype: torch.dtype, tolerance: float) -> None:
    tokens_T = tokens("npu")
    flash = hidden_states(load(tiny / "model", "npu", "flash", dtype), tokens_T)
    segments = hidden_states(load(tiny / "model", "npu", "sdpa", dtype), tokens_T)
    assert flash.dtype == dtype
    torch.testing.assert_close(flash, segments, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_a_window_is_respected_whatever_attention_is_chosen(windowed: Path) -> None:
    device, results = choose_device("npu"), []
    for attention in ("auto", "sdpa"):
        section = ModelSection.model_validate({"path": str(windowed), "attention": attention})
        with join_world(device) as world:
            engine = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
            results.append(hidden_states(engine.model.eval(), tokens("npu")))
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("attention", ["sdpa", "padded", "flash"])
def test_samples_do_not_see_each_other(tiny: Path, attention: str) -> None:
    model = load(tiny / "model", "npu", attention)
    tokens_T = tokens("npu")
    changed = tokens_T.clone()
    changed[:10] = 7  # the first two samples
    with torch.no_grad():
        before, after = hidden_states(model, tokens_T), hidden_states(model, changed)
    assert torch.equal(before[10:], after[10:]) and not torch.equal(before[:10], after[:10])


@pytest.mark.parametrize("attention", ["sdpa", "padded", "flash"])
def test_order_in_the_pack_does_not_matter(tiny: Path, attention: str) -> None:
    model, tokens_T = load(tiny / "model", "npu", attention), tokens("npu")
    swapped = torch.cat([tokens_T[9:], tokens_T[:9]])
    with torch.no_grad():
        hidden_TD = hidden_states(model, tokens_T)
        other_TD = hidden_states(model, swapped, (*LENGTHS[1:], LENGTHS[0]))
    torch.testing.assert_close(torch.cat([other_TD[-9:], other_TD[:-9]]), hidden_TD, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "padded", "flash"])
def test_gradients_equal_samples_one_by_one(tiny: Path, attention: str) -> None:
    model, reference = (load(tiny / "model", "npu", kind) for kind in (attention, "padded"))
    tokens_T = tokens("npu")
    factor_TD = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(1)).npu()
    (hidden_states(model, tokens_T) * factor_TD).sum().backward()
    (one_by_one(reference.pretrained, tokens_T) * factor_TD).sum().backward()
    expected = dict(reference.pretrained.base_model.named_parameters())
    for name, p in model.pretrained.base_model.named_parameters():
        q = expected[name]
        assert p.grad is not None and q.grad is not None
        scale = float(q.grad.abs().max())
        torch.testing.assert_close(p.grad / scale, q.grad / scale, rtol=0, atol=1e-5, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_positions_are_the_given_ones(tiny: Path, attention: str) -> None:
    model, tokens_T = load(tiny / "model", "npu", attention), tokens("npu")[:20]
    place = torch.arange(20, device="npu")
    spread = model(tokens_T, 3 * place, (20,), place, tokens_T, lambda head: head.hidden_ND)
    reference = load(tiny / "model", "npu", "padded").pretrained.base_model
    expected = reference(tokens_T[None], position_ids=3 * place[None]).last_hidden_state[0]
    torch.testing.assert_close(spread, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(spread, hidden_states(model, tokens_T, (20,)), atol=1e-2)


def test_samples_do_not_meet_in_a_convolution(tmp_path: Path) -> None:
    config = Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    torch.manual_seed(0)
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers \(conv\) that would mix packed samples; .*=padded"):
        build_causal_lm(tmp_path, "sdpa")
    tokens_T = tokens("cpu")
    model = load(tmp_path, "cpu", "padded")
    assert build_causal_lm(tmp_path, "padded").config.layer_types == ["conv", "full_attention"]
    with torch.no_grad():
        expected = one_by_one(model.pretrained, tokens_T)
        torch.testing.assert_close(hidden_states(model, tokens_T), expected, rtol=0, atol=1e-5)


def test_the_objective_gets_the_predicting_positions(tiny: Path, device_type: str) -> None:
    model, tokens_T = load(tiny / "model", device_type, "sdpa"), tokens(device_type)
    everything = hidden_states(model, tokens_T)
    predict_N = torch.tensor([2, 30, 2], device=device_type)
    targets_N = torch.tensor([5, 6, 7], device=device_type)
    positions_T = torch.cat([torch.arange(length, device=device_type) for length in LENGTHS])
    head = model(tokens_T, positions_T, LENGTHS, predict_N, targets_N, lambda head: head)
    assert isinstance(head, TokenHead) and head.chunk == 7 and head.targets_N is targets_N
    assert torch.equal(head.hidden_ND, everything[predict_N])
    assert head.weight_VD is model.pretrained.get_output_embeddings().weight


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shared_prompt_changes_nothing(tiny: Path, device_type: str, checkpointing: bool) -> None:
    """Log-probs and gradients of answers with their prompt stored once, against a copy for each."""
    draw = np.random.default_rng(3)
    prompt, other = draw.integers(3, 60, 11), draw.integers(3, 60, 5)
    rows = [(prompt, 7), (other, 4), (prompt, 7), (prompt, 2), (other, 9), (prompt, 0)]
    samples = []
    for begin, length in rows:
        tokens_T = np.concatenate([begin, draw.integers(3, 60, length)]).astype(np.int32)
        samples.append(Sample(tokens_T, np.arange(len(tokens_T)) >= len(begin)))
    results = []
    for batch in (pack(samples), pack_shared(samples, [len(begin) for begin, _ in rows])):
        model = load(tiny / "model", device_type, "sdpa").train()
        if checkpointing:
            model.pretrained.gradient_checkpointing_enable({"use_reentrant": False})
        batch = batch.to(torch.device(device_type))
        logp_N = model(
            batch.tokens_T,
            batch.positions_T,
            batch.lengths,
            batch.predict_N,
            batch.targets_N,
            lambda head: head.logps(),
            batch.continues,
        )
        (logp_N * torch.linspace(-1, 2, len(logp_N), device=logp_N.device)).sum().backward()
        results.append((logp_N.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (plain_N, plain), (shared_N, shared) = results
    torch.testing.assert_close(shared_N, plain_N, rtol=0, atol=1e-5)
    for name, gradient in plain.items():
        torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=2e-5, msg=name)


def test_a_float32_head_multiplies_bfloat16_states_and_weights_in_float32(
    tiny: Path, device_type: str
) -> None:
    """Bitwise what autograd makes of both widened, and the gradients of a bfloat16 weight."""
    packed = load(tiny / "model", device_type, "sdpa", torch.bfloat16)
    packed.head_float32 = True
    hidden_ND = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(device_type, torch.bfloat16)
    hidden_ND = hidden_ND[:, : packed.pretrained.config.hidden_size].requires_grad_()
    targets_N = torch.arange(5, device=device_type)
    weight_VD = packed.pretrained.get_output_embeddings().weight
    logp_N = packed.head(hidden_ND, targets_N).logps()
    gradients = torch.autograd.grad(logp_N.sum(), (hidden_ND, weight_VD))
    wide = F.linear(hidden_ND.float(), weight_VD.float()).log_softmax(-1)
    expected_N = wide.gather(1, targets_N[:, None])[:, 0]
    assert torch.equal(logp_N, expected_N)
    assert not torch.equal(logp_N, TokenHead(hidden_ND, weight_VD, targets_N, 7).logps())
    for found, expected in zip(
        gradients, torch.autograd.grad(expected_N.sum(), (hidden_ND, weight_VD)), strict=True
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)
