"""What each of two ranks does in the tests of `hccl`: `python ranks.py <backend>`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])


def on_device(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def collectives() -> None:
    """Every collective that training uses, with what it must give on two ranks."""
    mine = on_device(1.0 + RANK, 10.0)
    reductions = {"SUM": [3, 20], "AVG": [1.5, 10], "MIN": [1, 10], "MAX": [2, 10], "PRODUCT": [2, 100]}
    for op, expected in reductions.items():
        reduced = mine.clone()
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op))
        assert reduced.tolist() == expected, (op, reduced)
    gathered = torch.empty(4, device=DEVICE)
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.tolist() == [1, 10, 2, 10]
    parts = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    assert torch.cat(parts).tolist() == [1, 10, 2, 10]
    for dtype in (torch.float32, torch.bfloat16):
        share = torch.empty(2, device=DEVICE, dtype=dtype)
        dist.reduce_scatter_tensor(share, gathered.to(dtype), op=dist.ReduceOp.AVG)
        assert share.tolist() == gathered.view(2, 2)[RANK].tolist()
    dist.reduce_scatter(share.float(), [mine, mine])
    swapped = torch.empty(2, device=DEVICE)
    dist.all_to_all_single(swapped, on_device(RANK * 10.0, RANK * 10.0 + 1))
    assert swapped.tolist() == [RANK, RANK + 10]
    dist.broadcast(mine, src=1)
    assert mine.tolist() == [2, 10]
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    assert mine.tolist() == [4, 20]
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
        dist.all_gather_into_tensor(torch.empty(4, device=DEVICE), mine)
        dist.all_gather_into_tensor(torch.empty(4, device=DEVICE), mine)
    manager.wait()
    dist.barrier()


def point_to_point() -> None:
    """Both ranks send before they receive."""
    received = torch.empty(2, device=DEVICE)
    peer = 1 - RANK
    exchange = [dist.P2POp(dist.isend, on_device(RANK, 7), peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    assert received.tolist() == [peer, 7]


def groups() -> None:
    """Groups of one and of two ranks, made anew and split off."""
    alone = dist.new_group([0]), dist.new_group([1])
    value = on_device(5.0)
    dist.all_reduce(value, group=alone[RANK], op=dist.ReduceOp.AVG)
    assert value.item() == 5
    mesh = init_device_mesh("npu", (2, 1), mesh_dim_names=("data", "model"))
    dist.all_reduce(value, group=mesh["data"].get_group())
    assert value.item() == 10
    part = dist.split_group(split_ranks=[[0], [1]])
    dist.all_reduce(value, group=part)
    assert value.item() == 10


def objects() -> None:
    """Python objects, which travel as byte tensors."""
    everyone: list[object] = [None] * RANKS
    dist.all_gather_object(everyone, {"rank": RANK})
    assert everyone == [{"rank": 0}, {"rank": 1}]
    first = [f"from {RANK}"]
    dist.broadcast_object_list(first, src=0)
    assert first == ["from 0"]


def host_tensors() -> None:
    """CPU tensors travel by gloo in the mixed group, and not at all by hccl alone."""
    value = torch.tensor([1.0])
    if "gloo" in BACKEND:
        dist.all_reduce(value)
        assert value.item() == 2
        return
    try:
        dist.all_reduce(value)
    except RuntimeError as error:
        assert "No backend type associated with device type cpu" in str(error)
    else:
        raise AssertionError("hccl reduced a cpu tensor")


def bitwise_reductions() -> None:
    """HCCL refuses the bitwise reductions by name."""
    for name in ("BAND", "BOR", "BXOR"):
        try:
            dist.all_reduce(on_device(1, dtype=torch.int32), op=getattr(dist.ReduceOp, name))
        except RuntimeError as error:
            assert f"Cannot use ReduceOp.{name} with HCCL" in str(error)
        else:
            raise AssertionError(f"hccl accepted {name}")


class Block(nn.Module):
    """Attention and a feed-forward layer, recomputed in the backward pass."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        split = self.project(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class Model(nn.Module):
    """Two blocks between an embedding and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model: nn.Module, device_type: str) -> FSDPModule:
    """FSDP2 with bf16 parameters and fp32 sums, the division left to the loss."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return sharded


def train(device_type: str, steps: int = 3) -> list[float]:
    """The losses of a few steps; the same on every device that computes alike."""
    torch.manual_seed(0)
    model = Model().to(device_type)
    sharded = shard(model, device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 64, (2, 16), generator=generator).to(device_type)
        logits = sharded(ids).float().flatten(0, 1)
        loss = functional.cross_entropy(logits, ids.flatten()) / dist.get_world_size()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    assert dist.get_rank() or all(tensor.device.type == "cpu" for tensor in state.values())
    return losses


def fsdp2() -> None:
    """Sharded training on the npu and, where there is gloo too, the same on the cpu."""
    losses = train("npu")
    assert losses[-1] < losses[0]
    if "gloo" in BACKEND:
        expected = train("cpu")
        assert all(abs(x - y) < 1e-5 for x, y in zip(losses, expected, strict=True)), (losses, expected)


CHECKS = [collectives, point_to_point, groups, objects, host_tensors, bitwise_reductions, fsdp2]

if __name__ == "__main__":
    BACKEND = sys.argv[1]
    DEVICE = torch.device("npu", RANK)
    torch.set_num_threads(1)
    torch.npu.set_device(DEVICE)
    dist.init_process_group(BACKEND, device_id=DEVICE)
    for check in CHECKS:
        check()
    dist.destroy_process_group()
