from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.nn.functional as F

from isotrain.models.logits import LogitTransform
from isotrain.models.packed import TokenHead

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Qwen's vocabulary, the largest that people post-train often.
VOCABULARY = 151_936
WIDTH = 8


def make(
    device: str, *, tokens: int = 13, width: int = 8, vocabulary: int = 50, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Hidden states, head weight and targets, the same on every device."""
    generator = torch.Generator().manual_seed(3)
    hidden_ND = torch.randn(tokens, width, generator=generator)
    weight_VD = torch.randn(vocabulary, width, generator=generator)
    targets_N = torch.randint(0, vocabulary, (tokens,), generator=generator)
    hidden_ND, weight_VD = (x.to(device, dtype).requires_grad_() for x in (hidden_ND, weight_VD))
    return hidden_ND, weight_VD, targets_N.to(device)


def reference_logps(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor
) -> torch.Tensor:
    return torch.log_softmax(hidden_ND @ weight_VD.t(), -1).gather(1, targets_N[:, None])[:, 0]


def test_log_probs_by_hand() -> None:
    # Logits (0, ln 3) and (0, 0): the second token has probability 3/4, then 1/2.
    hidden_ND = torch.tensor([[1.0], [0.0]])
    weight_VD = torch.tensor([[1.0], [3.0]]).log()
    head = TokenHead(hidden_ND, weight_VD, torch.tensor([1, 1]), chunk=1)
    expected = torch.tensor([0.75, 0.5]).log()
    torch.testing.assert_close(head.logps(), expected)
    torch.testing.assert_close(head.nll_share(4), -expected.sum() / 4)


@pytest.mark.parametrize("chunk", [1, 5, 13, 1000])
def test_chunked_log_probs_equal_the_full_softmax(device_type: str, chunk: int) -> None:
    factor_N = torch.linspace(-1, 2, 13, device=device_type)
    hidden_ND, weight_VD, targets_N = make(device_type)
    logp_N = TokenHead(hidden_ND, weight_VD, targets_N, chunk).logps()
    (logp_N * factor_N).sum().backward()

    full = make(device_type)
    expected_N = reference_logps(*full)
    (expected_N * factor_N).sum().backward()
    assert logp_N.shape == (13,) and logp_N.device.type == device_type
    torch.testing.assert_close(logp_N, expected_N, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden_ND.grad, full[0].grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight_VD.grad, full[1].grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 13, 1000])
def test_share_equals_cross_entropy(device_type: str, chunk: int) -> None:
    hidden_ND, weight_VD, targets_N = make(device_type)
    share = TokenHead(hidden_ND, weight_VD, targets_N, chunk).nll_share(40)
    (3 * share).backward()

    hidden, weight, targets = make(device_type)
    expected = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum") / 40
    (3 * expected).backward()
    torch.testing.assert_close(share, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden_ND.grad, hidden.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight_VD.grad, weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_chunk_is_bitwise_a_plain_loss(device_type: str, dtype: torch.dtype) -> None:
    hidden_ND, weight_VD, targets_N = make(device_type, dtype=dtype)
    share = TokenHead(hidden_ND, weight_VD, targets_N, chunk=64).nll_share(7)
    share.backward()

    hidden, weight, targets = make(device_type, dtype=dtype)
    nll_N = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")
    (nll_N.sum() / 7).backward()
    assert torch.equal(share, nll_N.sum() / 7)
    assert torch.equal(hidden_ND.grad, hidden.grad) and torch.equal(weight_VD.grad, weight.grad)


def test_shares_of_parts_add_up(device_type: str) -> None:
    hidden_ND, weight_VD, targets_N = make(device_type)
    whole = TokenHead(hidden_ND, weight_VD, targets_N, chunk=4).nll_share(13)
    parts = [
        TokenHead(hidden_ND[part], weight_VD, targets_N[part], chunk=4).nll_share(13)
        for part in (slice(0, 3), slice(3, 13))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["logps", "nll_share"])
def test_a_frozen_weight_gets_no_gradient(device_type: str, loss: str) -> None:
    gradients = []
    for frozen in (False, True):
        hidden_ND, weight_VD, targets_N = make(device_type)
        weight_VD.requires_grad_(not frozen)
        head = TokenHead(hidden_ND, weight_VD, targets_N, chunk=5)
        (head.logps().sum() if loss == "logps" else head.nll_share(13)).backward()
        assert (weight_VD.grad is None) == frozen
        gradients.append(hidden_ND.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("loss", ["logps", "nll_share"])
def test_no_token_gives_a_zero_gradient(device_type: str, loss: str) -> None:
    hidden_ND, weight_VD, targets_N = make(device_type, tokens=0)
    head = TokenHead(hidden_ND, weight_VD, targets_N, chunk=5)
    value = head.logps().sum() if loss == "logps" else head.nll_share(13)
    value.backward()
    assert value.item() == 0
    assert hidden_ND.grad is not None and hidden_ND.grad.shape == (0, 8)
    assert weight_VD.grad is not None and torch.equal(weight_VD.grad, torch.zeros_like(weight_VD))


def test_without_gradients(device_type: str) -> None:
    head = TokenHead(*make(device_type), chunk=5)
    with torch.no_grad():
        share, logp_N = head.nll_share(40), head.logps()
    assert not share.requires_grad and not logp_N.requires_grad
    torch.testing.assert_close(share, head.nll_share(40), rtol=1e-6, atol=0)
    assert torch.equal(logp_N, head.logps())


def test_bfloat16_weight_gradient_is_summed_in_float32(device_type: str) -> None:
    options = {"tokens": 2048, "width": 16, "vocabulary": 32, "dtype": torch.bfloat16}
    hidden_ND, weight_VD, targets_N = make(device_type, **options)
    TokenHead(hidden_ND, weight_VD, targets_N, chunk=16).nll_share(1).backward()
    assert weight_VD.grad is not None and weight_VD.grad.dtype == torch.bfloat16

    hidden, weight, targets = make(device_type, **options)
    naive = torch.zeros_like(weight)
    for part in torch.arange(2048, device=device_type).split(16):
        nll = F.cross_entropy(F.linear(hidden[part], weight).float(), targets[part], reduction="sum")
        naive += torch.autograd.grad(nll, weight)[0]

    exact_hidden, exact_weight = hidden.detach().cpu().double(), weight.detach().cpu().double()
    exact_weight.requires_grad_()
    F.cross_entropy(exact_hidden @ exact_weight.t(), targets.cpu(), reduction="sum").backward()

    def error(gradient: torch.Tensor) -> float:
        assert exact_weight.grad is not None
        return float((gradient.cpu().double() - exact_weight.grad).norm() / exact_weight.grad.norm())

    # Rounding to bfloat16 alone is 2^-9 at most; every addition in it adds as much again.
    assert error(weight_VD.grad) < 2**-8
    assert error(weight_VD.grad) < 0.25 * error(naive)


def reference_entropies(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, temperature: float) -> torch.Tensor:
    logp_NV = torch.log_softmax(hidden_ND @ weight_VD.t() / temperature, -1)
    return -(logp_NV.exp() * logp_NV).sum(-1)


def test_entropies_by_hand() -> None:
    # Four equal logits, then (0, 0, 0, ln 3): probabilities 1/6, 1/6, 1/6, 1/2.
    hidden_ND, weight_VD = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [1.0], [1.0], [3.0]]).log()
    head = TokenHead(hidden_ND, weight_VD, torch.tensor([0, 3]), chunk=1)
    logp_N, entropy_N = head.logps_and_entropies()
    six, two = torch.tensor([6.0, 2.0]).log()
    torch.testing.assert_close(logp_N, torch.stack([-torch.tensor(4.0).log(), -two]))
    torch.testing.assert_close(entropy_N, torch.stack([torch.tensor(4.0).log(), (six + two) / 2]))
    # At half the temperature ln 3 becomes ln 9: the last token has 9 of 12 parts.
    torch.testing.assert_close(head.logps(0.5)[1], torch.tensor(0.75).log())


@pytest.mark.parametrize("chunk", [1, 5, 13, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("uses", ["logps", "entropies", "both"])
def test_temperature_and_entropies_equal_full_logits(
    device_type: str, chunk: int, temperature: float, uses: str
) -> None:
    logp_factor = torch.linspace(-1, 2, 13, device=device_type) * (uses != "entropies")
    entropy_factor = torch.linspace(1, -3, 13, device=device_type) * (uses != "logps")
    hidden_ND, weight_VD, targets_N = make(device_type)
    head = TokenHead(hidden_ND, weight_VD, targets_N, chunk)
    logp_N, entropy_N = head.logps_and_entropies(temperature)
    assert torch.equal(logp_N, head.logps(temperature)), "the same bits, with entropies or without"
    # An output that the loss does not depend on at all takes another path than one with gradient zero.
    terms = [(logp_N * logp_factor).sum()] if uses != "entropies" else []
    terms += [(entropy_N * entropy_factor).sum()] if uses != "logps" else []
    sum(terms).backward()

    full = make(device_type)
    expected_logp_N = reference_logps(full[0] / temperature, *full[1:])
    expected_entropy_N = reference_entropies(full[0], full[1], temperature)
    (expected_logp_N * logp_factor + expected_entropy_N * entropy_factor).sum().backward()
    assert logp_N.dtype == entropy_N.dtype == torch.float32 and entropy_N.device.type == device_type
    torch.testing.assert_close(logp_N, expected_logp_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_N, expected_entropy_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden_ND.grad, full[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_VD.grad, full[1].grad, rtol=1e-4, atol=1e-5)


TRANSFORMS = [LogitTransform(scale=0.5), LogitTransform(cap=1.5), LogitTransform(scale=1.7, cap=2.5)]


def transformed(
    transform: LogitTransform, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """The formula written out, for autograd."""
    logits_NV = transform.scale * (hidden_ND @ weight_VD.t())
    if transform.cap is not None:
        logits_NV = transform.cap * torch.tanh(logits_NV / transform.cap)
    return torch.log_softmax(logits_NV / temperature, -1)


def test_scaled_and_capped_log_probs_by_hand() -> None:
    # Products 0 and 1; the cap makes 2 tanh(3 * 1 / 2) of the second.
    hidden_ND = torch.ones(1, 1, requires_grad=True)
    weight_VD, targets_N = torch.tensor([[0.0], [1.0]]), torch.tensor([1])
    head = TokenHead(hidden_ND, weight_VD, targets_N, chunk=1, transform=LogitTransform(3.0, 2.0))
    logit, slope = 2 * math.tanh(1.5), 3 * (1 - math.tanh(1.5) ** 2)
    probability = 1 / (1 + math.exp(-logit))
    assert head.logps().item() == pytest.approx(math.log(probability), abs=1e-6)
    assert head.logits_of([1]).item() == pytest.approx(logit, abs=1e-6)
    ((_, logits_CV),) = head.logits()
    assert logits_CV[0].tolist() == pytest.approx([0.0, logit], abs=1e-6)
    for value in (head.logps().sum(), -head.nll_share(1)):
        (gradient,) = torch.autograd.grad(value, hidden_ND)
        assert gradient.item() == pytest.approx((1 - probability) * slope, abs=1e-6)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 13])
@pytest.mark.parametrize("loss", ["logps", "entropies", "both", "nll_share"])
def test_scaled_and_capped_heads_equal_full_logits(
    device_type: str, transform: LogitTransform, chunk: int, loss: str
) -> None:
    temperature = 1.0 if loss == "nll_share" else 0.6
    hidden_ND, weight_VD, targets_N = make(device_type)
    head = TokenHead(hidden_ND, weight_VD, targets_N, chunk, transform=transform)
    full = make(device_type)
    logp_NV = transformed(transform, full[0], full[1], temperature)
    expected_N = logp_NV.gather(1, targets_N[:, None])[:, 0]
    factor_N = torch.linspace(-1, 2, 13, device=device_type)
    if loss == "nll_share":
        value, expected = 3 * head.nll_share(40), -3 * expected_N.sum() / 40
    else:
        logp_N, entropy_N = head.logps_and_entropies(temperature)
        torch.testing.assert_close(logp_N, expected_N, rtol=1e-6, atol=2e-6)
        pairs = [(logp_N, expected_N), (entropy_N, -(logp_NV.exp() * logp_NV).sum(-1))]
        pairs = {"logps": pairs[:1], "entropies": pairs[1:], "both": pairs}[loss]
        value, expected = (
            torch.stack([(x * factor_N).sum() for x in side]).sum() for side in zip(*pairs, strict=True)
        )
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    value.backward()
    expected.backward()
    for found, gradient in zip((hidden_ND.grad, weight_VD.grad), (full[0].grad, full[1].grad), strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_entropies_that_no_loss_needs_leave_the_gradient_s_bits(device_type: str) -> None:
    gradients = []
    for entropies in (False, True):
        hidden_ND, weight_VD, targets_N = make(device_type)
        head = TokenHead(hidden_ND, weight_VD, targets_N, chunk=5)
        (head.logps_and_entropies(0.7)[0] if entropies else head.logps(0.7)).sum().backward()
        gradients.append((hidden_ND.grad, weight_VD.grad))
    assert torch.equal(gradients[0][0], gradients[1][0]) and torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("frozen", [False, True])
def test_entropies_of_no_token_and_of_a_frozen_weight(device_type: str, frozen: bool) -> None:
    for tokens in (0, 13):
        hidden_ND, weight_VD, targets_N = make(device_type, tokens=tokens)
        head = TokenHead(hidden_ND, weight_VD.requires_grad_(not frozen), targets_N, chunk=5)
        sum(part.sum() for part in head.logps_and_entropies()).backward()
        assert hidden_ND.grad is not None and (weight_VD.grad is None) == frozen


def test_entropies_in_bfloat16_are_float32_of_its_logits(device_type: str) -> None:
    hidden_ND, weight_VD, targets_N = make(device_type, dtype=torch.bfloat16)
    logp_N, entropy_N = TokenHead(hidden_ND, weight_VD, targets_N, chunk=64).logps_and_entropies()
    (logp_N + entropy_N).sum().backward()
    logp_NV = torch.log_softmax(F.linear(hidden_ND, weight_VD).float(), -1)
    assert torch.equal(logp_N, logp_NV.gather(1, targets_N[:, None])[:, 0])
    torch.testing.assert_close(entropy_N, -(logp_NV.exp() * logp_NV).sum(-1), rtol=1e-6, atol=1e-6)
    assert hidden_ND.grad is not None and hidden_ND.grad.dtype == torch.bfloat16


def peak_bytes(tokens: int, chunk: int, loss: str = "nll_share", frozen: bool = False) -> int:
    """The most that loss and gradient hold on the device beyond their inputs; the counter is exact."""
    gc.collect()  # what earlier tests left behind must not be freed meanwhile
    hidden_ND, weight_VD, targets_N = make("npu", tokens=tokens, width=WIDTH, vocabulary=VOCABULARY)
    head = TokenHead(hidden_ND, weight_VD.requires_grad_(not frozen), targets_N, chunk)
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    if loss == "entropies":
        sum(part.sum() for part in head.logps_and_entropies(0.9)).backward()
    else:
        (head.nll_share(tokens) if loss == "nll_share" else head.logps().sum()).backward()
    return int(torch.npu.max_memory_allocated() - before)


@pytest.mark.heavy
def test_memory_grows_with_the_chunk_and_not_with_the_tokens() -> None:
    all_logits, chunk_logits = 8192 * VOCABULARY * 4, 32 * VOCABULARY * 4  # 4.6 GiB, 19 MiB
    weight = VOCABULARY * WIDTH * 4
    short, long = peak_bytes(256, 32), peak_bytes(8192, 32)
    # Only the gradient of the hidden states grows with the tokens, and what is cast on the way.
    assert 0 <= long - short < 2 * 8192 * WIDTH * 4 < all_logits / 1000
    # Logits, log-probs and their gradient, and the weight's gradient as it is summed.
    assert long < 3 * chunk_logits + 4 * weight < all_logits / 50
    assert 2 * short - 4 * weight < peak_bytes(256, 64) <= 2 * short
    for loss in ("nll_share", "logps"):
        assert peak_bytes(256, 32, loss) < 3 * chunk_logits + 4 * weight
        assert peak_bytes(256, 32, loss, frozen=True) < 3 * chunk_logits + weight / 10
    assert peak_bytes(256, 32, "entropies") < 4.1 * chunk_logits + 4 * weight


def test_memory_without_gradients_is_that_of_one_chunk() -> None:
    with torch.no_grad():
        head = TokenHead(*make("npu", tokens=256, width=WIDTH, vocabulary=VOCABULARY), 32)
        before = torch.npu.memory_allocated()
        torch.npu.reset_peak_memory_stats()
        head.nll_share(256)
        assert torch.npu.max_memory_allocated() - before < 2.1 * 32 * VOCABULARY * 4
        torch.npu.reset_peak_memory_stats()
        head.logps_and_entropies(0.9)
        assert torch.npu.max_memory_allocated() - before < 3.1 * 32 * VOCABULARY * 4
