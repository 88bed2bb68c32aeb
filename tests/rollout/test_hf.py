"""The reference engine on both devices: its responses, its log-probs and its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.errors import RolloutError, WeightUpdateError
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.recipe.online import RolloutSection
from isotrain.rollout.base import Request, RolloutEngine, Sampling
from isotrain.rollout.build import build_rollout
from isotrain.rollout.hf import HfEngine
from isotrain.weights.file import write_update
from isotrain.weights.update import FileSource, WeightUpdate
from small_models import small_config

pytestmark = pytest.mark.heavy

PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9, 17, 30)]


def requests(n: int = 1) -> list[Request]:
    return [
        Request(row=row, prompt_index=row, sample=sample, seed=1000 * row + sample, prompt_P=prompt)
        for row, prompt in enumerate(PROMPTS)
        for sample in range(n)
    ]


@pytest.fixture
def engine(tiny: Path, device_type: str) -> Iterator[RolloutEngine]:
    section = RolloutSection(engine="hf", max_tokens=40)
    built = build_rollout(
        section,
        str(tiny / "model"),
        "float32",
        device=choose_device(device_type),
        max_prompt=40,
        seed=0,
        name="e",
    )
    yield built
    built.close()


@pytest.fixture
def model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)


def forward(model: Any, tokens_T: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    ids = torch.from_numpy(tokens_T).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1] / temperature
    return np.asarray(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])


def test_log_probs_are_those_of_a_plain_forward(engine: RolloutEngine, model: Any) -> None:
    found = list(engine.generate(requests(3), Sampling(max_tokens=24, temperature=0.7)))
    assert sorted((t.row, t.sample) for t in found) == [(r.row, r.sample) for r in requests(3)]
    probed = engine.logps([t.tokens_T for t in found])
    for trajectory, logp in zip(found, probed, strict=True):
        assert (trajectory.tokens_T[: trajectory.prompt_length] == PROMPTS[trajectory.row]).all()
        assert trajectory.mask_N.all() and (trajectory.version_N == 0).all()
        plain = forward(model, trajectory.tokens_T, 0.7)[trajectory.prompt_length - 1 :]
        np.testing.assert_allclose(trajectory.logp_N, plain, atol=1e-5)
        np.testing.assert_allclose(logp, forward(model, trajectory.tokens_T), atol=1e-5)
        assert trajectory.finished == (trajectory.tokens_T[-1] == 2)
        assert trajectory.finished or len(trajectory.response_N) == 24
    assert len({t.tokens_T.tobytes() for t in found}) == len(found)


def test_an_response_does_not_depend_on_its_neighbours(engine: RolloutEngine) -> None:
    sampling = Sampling(max_tokens=40)
    together = {(t.row, t.sample): t for t in engine.generate(requests(16), sampling)}
    assert len({len(t.response_N) for t in together.values()}) > 1  # some ended early
    for request in requests(16)[::5]:
        (alone,) = engine.generate([request], sampling)
        other = together[request.row, request.sample]
        assert np.array_equal(alone.tokens_T, other.tokens_T)
        # The matrix products of another batch size round in another order.
        np.testing.assert_allclose(alone.logp_N, other.logp_N, atol=1e-5)


def test_greedy_and_ends(engine: RolloutEngine, model: Any) -> None:
    first, *others = (t for t in engine.generate(requests(1), Sampling(max_tokens=8, temperature=0.0)))
    for trajectory in (first, *others):
        ids = torch.from_numpy(trajectory.tokens_T).long()[None]
        best = model(ids).logits[0, :-1].argmax(-1)[trajectory.prompt_length - 1 :]
        assert best.tolist() == trajectory.response_N.tolist()
    # All tokens equally likely: of 512, one ends. About 1 in 14 responses of 40 does.
    flat = [(n, torch.zeros_like(p) if n == "model.norm.weight" else p) for n, p in model.named_parameters()]
    engine.update_weights(write_update(flat, 1))
    found = list(engine.generate(requests(40), Sampling(max_tokens=40)))
    finished = [t for t in found if t.finished]
    assert 2 <= len(finished) <= 30
    for trajectory in found:
        assert (trajectory.response_N[:-1] != 2).all()
        assert (trajectory.response_N[-1] == 2) == trajectory.finished
        assert trajectory.finished or len(trajectory.response_N) == 40
        np.testing.assert_allclose(trajectory.logp_N, -np.log(512), atol=1e-5)


def test_takes_good_updates_and_refuses_bad_ones(
    engine: RolloutEngine, model: Any, tmp_path: Path, device_type: str
) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    engine.update_weights(write_update(model.named_parameters(), 5))
    assert engine.version == 5
    (found,) = engine.generate(requests(1)[:1], Sampling(max_tokens=8))
    assert (found.version_N == 5).all()
    np.testing.assert_allclose(found.logp_N, forward(model, found.tokens_T)[2:], atol=1e-5)

    def write(tensors: list[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Into a file that no other update of this test takes."""
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        return write_update(tensors, 6, directory)

    weights = list(model.named_parameters())
    good = write(weights)
    unknown = [*weights, ("model.extra", torch.zeros(1))]
    shaped = [(n, p[:-1] if n == "model.norm.weight" else p) for n, p in weights]
    for bad, message in (
        (replace(good, digest="0" * 64), "e: weight update 6 is damaged: digest"),
        (replace(good, version=7), "e: weight update 7 .* the file holds version 6"),
        (replace(good, sources=(FileSource(f"{good.source()}x"),)), "e: weight update 6 .* is not there"),
        (write(weights[1:]), "e: weight update 6 lacks weights of 1 parameters: model.embed"),
        (write(unknown), "e: weight update 6 has 'model.extra' .* no such parameter"),
        (write(shaped), r"e: weight update 6 has 'model.norm.weight' of shape \(63,\).*\(64,\)"),
    ):
        with pytest.raises(WeightUpdateError, match=message):
            engine.update_weights(bad)
        with pytest.raises(RolloutError, match=r"e does not generate: weight update . was not finished"):
            list(engine.generate(requests(1), Sampling(max_tokens=2)))
        with pytest.raises(RolloutError, match="e does not generate"):
            engine.logps([PROMPTS[0]])
        assert engine.version == 5
        engine.update_weights(write_update(weights, 5))
    engine.sleep()
    engine.wake()
    if device_type != "cpu":  # a sleeping engine has no weights, as vLLM's
        with pytest.raises(RolloutError, match=r"e does not generate: it slept, and has no weights"):
            engine.logps([PROMPTS[0]])
        engine.update_weights(write_update(weights, 5))
    assert np.array_equal(next(engine.generate(requests(1), Sampling(max_tokens=8))).tokens_T, found.tokens_T)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_that_is_not_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_type: str, dtype: str, architecture: Any
) -> None:
    """Each in turn, in updates of 1e-6 that no log-prob could show."""
    make_tiny(tmp_path, train_rows=1, validation_rows=1, architecture=architecture)
    trained: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    device = torch.device(device_type)
    engine = HfEngine(tmp_path / "model", name="e", dtype=dtype, device=device)
    publish, copy, lost = Publisher(trained), torch.Tensor.copy_, torch.empty(0)

    def forgetful(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return self if self.data_ptr() == lost.data_ptr() else copy(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "copy_", forgetful)
    tied = {"lm_head.weight", "model.embed_tokens.weight"}
    for version, (name, tensor) in enumerate(engine._own().items(), 1):
        for parameter in trained.parameters():
            parameter.data += 1e-6
        tensors = [
            (n, t.to(getattr(torch, dtype)))
            for own_name, parameter in trained.named_parameters()
            for n, t in publish(own_name, parameter.detach())
        ]
        lost, update = tensor, write_update(tensors, version)
        with pytest.raises(
            WeightUpdateError, match=rf"e: weight update {version} did not write . of"
        ) as told:
            engine.update_weights(update)
        assert f": {', '.join(sorted(tied)) if name in tied else name};" in str(told.value)
        with pytest.raises(RolloutError, match="e does not generate"):
            engine.logps(PROMPTS[:1])
        lost = torch.empty(0)
        engine.update_weights(update)
    if device_type == "cpu":  # the simulated NPU computes no mixtures
        assert np.isfinite(engine.logps(PROMPTS[:1])[0]).all()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_an_update_of_a_mixture_is_in_published_form(tmp_path: Path, architecture: Any) -> None:
    make_tiny(tmp_path, train_rows=1, validation_rows=1, architecture=architecture)
    trained: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    publish, buffers = Publisher(trained), stored_buffers(trained)
    for tensor in (*trained.parameters(), *buffers.values()):
        tensor.data += 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    own = {**dict(trained.named_parameters()), **buffers}
    tensors = {n: t for name, tensor in own.items() for n, t in publish(name, tensor.detach())}
    assert sum(".experts." in name for name in tensors) >= 8 * 3
    engine = HfEngine(tmp_path / "model", name="e", dtype="float32", device=torch.device("cpu"))
    (before,) = engine.logps(PROMPTS[-1:])
    engine.update_weights(write_update(tensors.items(), 1))
    (after,) = engine.logps(PROMPTS[-1:])
    expected = forward(trained, PROMPTS[-1])
    assert np.allclose(after, expected, atol=1e-5) and not np.allclose(before, expected, atol=1e-2)
    tensors.pop(f"model.layers.1.mlp.experts.{3}.up_proj.weight")
    with pytest.raises(
        WeightUpdateError, match=r"update 2 lacks weights of 1 parameters: .*experts\.gate_up_proj"
    ):
        engine.update_weights(write_update(tensors.items(), 2))


def test_what_cannot_be_built(tiny: Path, tmp_path: Path) -> None:
    def build(model: Path, max_prompt: int, **section: Any) -> None:
        build_rollout(
            RolloutSection.model_validate(section),
            str(model),
            "float32",
            device=choose_device("cpu"),
            max_prompt=max_prompt,
            seed=0,
            name="e",
        )

    with pytest.raises(RolloutError, match=r"rollout.max_tokens: .* make 2049, .* write 1048 or less"):
        build(tiny / "model", 1000, engine="hf", max_tokens=1049)
    if "qwen3_next" not in CONFIG_MAPPING:
        return
    small_config("qwen3_next").save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match=r"'qwen3_next' in bfloat16 only; set rollout\.engine: hf"):
        build(tmp_path, 8, engine="vllm", max_tokens=8)


def test_a_float32_head_is_the_trainers(tiny: Path, device_type: str) -> None:
    """From hidden states in bfloat16; a head in bfloat16 gives other log-probs."""
    tokens_T = np.arange(5, 25, dtype=np.int32)
    logps = {}
    for wide in (True, False):
        engine = build_rollout(
            RolloutSection(engine="hf", max_tokens=4),
            str(tiny / "model"),
            "bfloat16",
            device=choose_device(device_type),
            max_prompt=40,
            seed=0,
            name="e",
            head_float32=wide,
        )
        logps[wide] = engine.logps([tokens_T])[0]
        engine.close()
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.bfloat16).to(device_type)
    ids = torch.from_numpy(tokens_T).long()[None].to(device_type)
    with torch.no_grad():
        hidden_TD = model.get_decoder()(ids).last_hidden_state[0, :-1]
        weight_VD = model.get_output_embeddings().weight
        wide_TV = F.linear(hidden_TD.float(), weight_VD.float()).log_softmax(-1)
    expected = wide_TV.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    assert np.array_equal(logps[True], expected) and not np.array_equal(logps[False], expected)
