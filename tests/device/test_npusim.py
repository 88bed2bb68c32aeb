"""The simulated npu offers the device module, operators and process groups that training code expects."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import npusim
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.heavy

RANKS = str(Path(npusim.__file__).with_name("ranks.py"))


@pytest.fixture(scope="module", autouse=True)
def npu() -> None:
    npusim.load()


def in_subprocess(code: str, devices: int = 2, **variables: str) -> str:
    """What a fresh interpreter prints in which nothing but the environment knows of the simulation."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    environment = {**npusim.environment(devices), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 9)
    )


def train(device: str, **options: bool) -> tuple[list[float], list[torch.Tensor]]:
    model = small_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        ids = torch.randint(0, 50, (4, 12), generator=generator).to(device)
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 9)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_training_equals_cpu(options: dict[str, bool]) -> None:
    losses, weights = train("npu", **options)
    expected_losses, expected_weights = train("cpu", **options)
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_forward_and_backward(masked: bool, grouped: bool) -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, 8, 16), (2, 2 if grouped else 4, 8, 16), (2, 2 if grouped else 4, 8, 16)]
    host = [torch.randn(shape, requires_grad=True) for shape in shapes]
    device = [x.detach().npu().requires_grad_() for x in host]
    mask = torch.rand(2, 1, 8, 8) > 0.3 if masked else None
    results = []
    for inputs in (host, device):
        chosen = mask.to(inputs[0].device) if mask is not None else None
        out = functional.scaled_dot_product_attention(
            *inputs, attn_mask=chosen, is_causal=not masked, enable_gqa=grouped
        )
        out.square().sum().backward()
        assert out.device == inputs[0].device
        results.append([out.detach().cpu(), *(x.grad.cpu() for x in inputs)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)


def test_a_recomputed_layer_drops_the_same_values() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5) * x

    x = torch.ones(64, device="npu", requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y.detach()) and 0 < y.count_nonzero() < 64


def test_operators_that_resize_view_and_index() -> None:
    x = torch.arange(12.0).view(3, 4).npu()
    out = torch.empty(0, device="npu")
    torch.add(x, 1, out=out)
    assert out.shape == (3, 4) and out.untyped_storage().nbytes() == 48
    assert x.t()[1:].reshape(-1)[0].item() == 1 and x.unfold(0, 2, 1).shape == (2, 4, 2)
    x[torch.tensor([0, 2]), 1] = -1.0  # indices may stay on the host
    assert x[:, 1].tolist() == [-1, 5, -1]
    assert torch.view_as_complex(x.view(3, 2, 2)).abs().sum().item() > 0
    part = x[1]
    part.mul_(0)
    assert x[1].tolist() == [0, 0, 0, 0]
    assert x.topk(2).indices.device.type == "npu" and x.nonzero().shape[1] == 2
    assert torch.tril_indices(3, 3, device="npu").device == torch.device("npu:0")
    out.untyped_storage().resize_(0)
    out.untyped_storage().resize_(48)
    assert out.fill_(2).sum().item() == 24


def test_convolution_equals_cpu() -> None:
    layer, x = nn.Conv1d(3, 4, 3), torch.randn(2, 3, 8)
    layer(x).sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    layer.npu()(x.npu()).sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), expected)


def test_devices_do_not_mix() -> None:
    x = torch.ones(2, device="npu:0")
    for other in (torch.ones(2), torch.ones(2, device="npu:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + other
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]  # a host scalar is allowed, as on every device


def test_several_devices() -> None:
    assert torch.npu.device_count() == 2
    with torch.npu.device(1):
        assert torch.empty(1, device="npu").device == torch.device("npu:1")
    assert torch.npu.current_device() == 0
    moved = torch.arange(3, device="npu:0").to("npu:1")
    assert moved.device.index == 1 and moved.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="107001"):
        torch.empty(1, device="npu:2")
    assert torch.npu.get_device_name().startswith("Ascend910B") and torch.npu.is_bf16_supported()


def test_pinned_memory_and_copies(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned() and not torch.arange(4.0).is_pinned()
    copy = pinned.to("npu", non_blocking=True)
    save_file({"x": copy}, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors", device="npu:1")["x"].device == torch.device("npu:1")
    torch.save(copy, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device.type == "npu"
    assert torch.load(tmp_path / "x.pt", map_location="cpu").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x, layer = torch.randn(2, 4, device="npu"), nn.Linear(4, 4).npu()
    with torch.autocast("npu", dtype=dtype):
        hidden = layer(x)
        assert hidden.dtype == (x @ x.t()).dtype == torch.bmm(x[None], x.t()[None]).dtype == dtype
        assert functional.scaled_dot_product_attention(x[None], x[None], x[None]).dtype == dtype
        assert hidden.softmax(-1).dtype == functional.layer_norm(hidden, (4,)).dtype == torch.float32
        assert functional.mse_loss(hidden, hidden).dtype == torch.float32
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32


def test_random_numbers_are_apart_from_the_host() -> None:
    torch.manual_seed(0)
    host = torch.get_rng_state()
    torch.npu.manual_seed_all(3)
    drawn = torch.randn(4, device="npu"), functional.dropout(torch.ones(64, device="npu"))
    assert torch.equal(torch.get_rng_state(), host)
    other = torch.npu.get_rng_state(1)
    torch.npu.manual_seed(3)
    assert torch.equal(torch.randn(4, device="npu"), drawn[0])
    assert torch.equal(functional.dropout(torch.ones(64, device="npu")), drawn[1])
    assert torch.equal(torch.npu.get_rng_state(1), other)

    states = torch.npu.get_rng_state_all()
    first = torch.rand(3, device="npu")
    torch.npu.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="npu"), first)
    generator = torch.Generator("npu").manual_seed(5)
    again = torch.Generator("npu").manual_seed(5)
    assert torch.equal(
        torch.randperm(9, device="npu", generator=generator), torch.randperm(9, device="npu", generator=again)
    )


def test_a_host_generator_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.randn(2, device="npu", generator=torch.Generator())


def test_memory_counters() -> None:
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    x = torch.empty(1 << 20, device="npu")
    assert torch.npu.memory_allocated() == before + (4 << 20)
    y = x + x  # memory that an operator made counts too
    assert torch.npu.memory_allocated() == before + (8 << 20)
    assert torch.npu.memory_allocated(1) < 1 << 20
    del x, y
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() == before + (8 << 20)
    assert torch.npu.memory_reserved() >= before + (8 << 20)
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before
    free, total = torch.npu.mem_get_info()
    assert total - free == before
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total, device="npu")


def test_streams_and_events() -> None:
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    side = torch.npu.Stream()
    default = torch.npu.current_stream()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side != default
        start.record()
        end.record(side)
    side.wait_stream(default)
    default.wait_event(end)
    torch.npu.synchronize()
    assert torch.npu.current_stream() == default == torch.npu.default_stream()
    assert start.elapsed_time(end) >= 0 and side.query()


def test_settings_are_remembered() -> None:
    assert torch.npu.matmul.allow_hf32 is False and torch.npu.conv.allow_hf32 is True
    torch.npu.set_compile_mode(jit_compile=True)
    assert not torch.npu.is_jit_compile_false()
    torch.npu.set_compile_mode(jit_compile=False)
    assert torch.npu.is_jit_compile_false()


def attention_inputs(layout: str, heads: int) -> torch.Tensor:
    x_BNSD = torch.randn(2, heads, 6, 8, device="npu")
    x_BSND = x_BNSD.transpose(1, 2)
    shaped = {
        "BNSD": x_BNSD,
        "BSND": x_BSND,
        "BSH": x_BSND.flatten(2),
        "SBH": x_BSND.flatten(2).transpose(0, 1),
        "TND": x_BSND.flatten(0, 1),
    }
    return shaped[layout].contiguous().requires_grad_()


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH", "TND"])
@pytest.mark.parametrize("sparse_mode", [0, 3])
def test_fusion_attention_layouts_agree_with_torch(layout: str, sparse_mode: int) -> None:
    import torch_npu

    torch.manual_seed(0)
    reference = [attention_inputs("BNSD", heads) for heads in (4, 2, 2)]
    torch.manual_seed(0)
    inputs = [attention_inputs(layout, heads) for heads in (4, 2, 2)]
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1) if sparse_mode else None
    lengths = (6, 12) if layout == "TND" else None
    out, peak, total, *rest = torch_npu.npu_fusion_attention(
        *inputs, 4, layout, atten_mask=mask, scale=8**-0.5, sparse_mode=sparse_mode,
        actual_seq_qlen=lengths, actual_seq_kvlen=lengths,
    )  # fmt: skip
    assert len(rest) == 4 and out.shape == inputs[0].shape and peak.dtype == total.dtype == torch.float32
    assert peak.shape == ((12, 4, 8) if layout == "TND" else (2, 4, 6, 8))
    causal = bool(sparse_mode)
    expected = functional.scaled_dot_product_attention(*reference, is_causal=causal, enable_gqa=True)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert out.sum().item() == pytest.approx(expected.sum().item(), abs=1e-4)
    for x, y in zip(inputs, reference, strict=True):
        assert x.grad.norm().item() == pytest.approx(y.grad.norm().item(), rel=1e-4)


def test_fused_operators() -> None:
    import torch_npu

    x = torch.randn(2, 3, 4, 8, device="npu", requires_grad=True)
    gamma = torch.rand(8, device="npu")
    y, rstd = torch_npu.npu_rms_norm(x, gamma, 1e-5)
    torch.testing.assert_close(y, functional.rms_norm(x, (8,), gamma, 1e-5))
    assert rstd.shape == (2, 3, 4, 1) and rstd.dtype == torch.float32
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(torch_npu.npu_swiglu(x), functional.silu(gate) * up)
    angle = torch.rand(2, 3, 1, 8, device="npu")
    rotated = torch.cat((-up, gate), -1)
    torch.testing.assert_close(
        torch_npu.npu_rotary_mul(x, angle.cos(), angle.sin()), x * angle.cos() + rotated * angle.sin()
    )
    assert torch.autograd.grad(y.sum(), x)[0].device.type == "npu"


@pytest.mark.parametrize(
    "name", ["npu_fusion_attention", "npu_grouped_matmul", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu"]
)
def test_fused_operators_have_the_real_schemas(name: str) -> None:
    import torch_npu

    operator = getattr(torch_npu, name)
    assert operator is getattr(torch.ops.npu, name)
    declared = torch._C.parse_schema(f"npu::{name}{torch_npu.operators.SCHEMAS[name]}")
    assert operator.default._schema == declared
    with pytest.raises(RuntimeError, match=f"npu::{name}"):
        operator("not a tensor")


def test_fused_operators_refuse_what_is_not_documented() -> None:
    import torch_npu

    x, angle = torch.randn(1, 3, 2, 8, device="npu"), torch.ones(1, 3, 1, 8, device="npu")
    with pytest.raises(RuntimeError, match=r"gamma torch\.float32"):
        torch_npu.npu_rms_norm(x.bfloat16(), torch.ones(8, device="npu"))
    with pytest.raises(RuntimeError, match="between -1 and 1"):
        torch_npu.npu_rotary_mul(x, 1.1 * angle, angle)
    with pytest.raises(RuntimeError, match="four dimensions"):
        torch_npu.npu_rotary_mul(x, angle[0], angle[0])
    with pytest.raises(RuntimeError, match="angles of 4"):
        torch_npu.npu_rotary_mul(x, angle[..., :4], angle[..., :4])
    with pytest.raises(RuntimeError, match="no two halves"):
        torch_npu.npu_swiglu(x, dim=1)


def test_a_grouped_product() -> None:
    import torch_npu

    rows, weights = torch.randn(7, 4, device="npu"), torch.randn(3, 4, 5, device="npu")
    counts = torch.tensor([2, 0, 5], device="npu")

    def grouped(x: torch.Tensor, weight: torch.Tensor, group_type: int, groups: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=groups, split_item=3, group_type=group_type, group_list_type=1
        )[0]
        return result

    found = grouped(rows, weights, 0, counts)
    torch.testing.assert_close(found, torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[2]]))
    sums = grouped(rows.T, found, 2, counts)
    torch.testing.assert_close(sums[2], rows[2:].T @ found[2:])
    assert sums.shape == weights.shape and sums[1].isnan().all(), "anything may be there"
    with pytest.raises(RuntimeError, match="do not make 7"):
        grouped(rows, weights, 0, counts + 1)
    with pytest.raises(RuntimeError, match="transposed x"):
        grouped(rows.T.contiguous(), found, 2, counts)
    with pytest.raises(RuntimeError, match="derivative"):
        grouped(rows.requires_grad_(), weights, 0, counts)


def test_import_torch_loads_the_device() -> None:
    code = "import torch; print(torch.npu.device_count(), torch.accelerator.current_accelerator())"
    assert in_subprocess(code, devices=3) == "3 npu"
    assert in_subprocess(code, devices=4, ASCEND_RT_VISIBLE_DEVICES="1,3") == "2 npu"
    assert in_subprocess("import torch_npu, torch; print(torch.ones(2).npu().device)") == "npu:0"
    # The runtime sees nothing when the mask is not ascending.
    code = "import torch; print(torch.npu.device_count(), torch.npu.is_available())"
    assert in_subprocess(code, devices=4, ASCEND_RT_VISIBLE_DEVICES="3,1") == "0 False"


def test_a_forked_child_cannot_use_the_device() -> None:
    code = """
        import os, torch
        torch.ones(1, device="npu")
        if os.fork() == 0:
            try:
                torch.ones(1, device="npu")
            except RuntimeError as error:
                print(str(error)[:46], flush=True)
            os._exit(0)
        os.wait()
    """
    assert in_subprocess(code) == "Cannot re-initialize NPU in forked subprocess."


def test_transformers_trains_under_every_attention() -> None:
    code = """
        import json, torch
        from accelerate.utils import is_npu_available
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import is_torch_npu_available
        assert is_npu_available() and is_torch_npu_available()
        torch.set_num_threads(1)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2)
        lengths = [5, 9, 2]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        block = torch.block_diag(*[torch.ones(n, n).tril() for n in lengths]).bool()[None, None]
        losses = {}
        for name in ("eager", "sdpa", "flash_attention_2", "cu_seq_lens", "cpu"):
            flash, device = name in ("flash_attention_2", "cu_seq_lens"), "cpu" if name == "cpu" else "npu"
            torch.manual_seed(0)
            attention = "flash_attention_2" if flash else "eager" if name == "cpu" else name
            model = LlamaForCausalLM._from_config(config, attn_implementation=attention).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            generator = torch.Generator().manual_seed(1)
            losses[name] = []
            for _ in range(3):
                ids = torch.randint(0, 64, (1, 16), generator=generator).to(device)
                extra = {} if flash else {"attention_mask": torch.where(block, 0.0, -1e30).to(device)}
                if name == "cu_seq_lens":
                    cuts = bounds.to(device)
                    extra = dict(cu_seq_lens_q=cuts, cu_seq_lens_k=cuts, max_length_q=9, max_length_k=9)
                loss = model(ids, labels=ids, position_ids=positions.to(device), **extra).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
        print(json.dumps(losses))
    """
    losses = json.loads(in_subprocess(code).splitlines()[-1])
    for name, values in losses.items():
        assert values == pytest.approx(losses["cpu"], abs=1e-5), name


@pytest.mark.parametrize("backend", ["hccl", "cpu:gloo,npu:hccl"])
def test_collectives_and_fsdp2_on_two_ranks(backend: str) -> None:
    npusim.run_ranks([sys.executable, "-W", "ignore", RANKS, backend])


def test_a_failing_rank_ends_the_others() -> None:
    code = "import os, time; os.environ['RANK'] == '1' and exit('broken'); time.sleep(60)"
    with pytest.raises(RuntimeError, match=r"rank 1 ended with 1:\nbroken"):
        npusim.run_ranks([sys.executable, "-c", code])


@pytest.fixture(params=["hash", "file"])
def one_rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    store = dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("hccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp2_in_this_process(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    from npusim import ranks

    losses = ranks.train("npu", steps=2)
    assert losses[1] < losses[0]
    with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.BAND with HCCL"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32, device="npu"), op=dist.ReduceOp.BAND)
