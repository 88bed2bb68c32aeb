"""Runs vllm-ascend's own sampler and worker on the host, with our worker extension.

B: requests, E: experts, H: hidden size, I: intermediate size, V: vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch_npu
import vllm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

# The worker first: it imports what the others need in an order that works.
import vllm_ascend.worker.worker as worker_module  # isort: skip
import vllm_ascend.ops.fused_moe.fused_moe as experts_module
import vllm_ascend.sample.sampler as sampler_module
import vllm_ascend.utils as utils_module

from isotrain.data.prepare.tiny import make_tiny
from isotrain.rollout import hf
from isotrain.rollout.vllm_worker import WeightReceiver
from isotrain.tools.doctor.self_test.parts.rollout import EngineCheck, all_stages
from isotrain.tools.doctor.self_test.verdicts import SelfTestSetting, read_verdicts
from isotrain.weights.file import write_update

# The values of a start without options of vllm-ascend's own, but for NZ, which the engine turns off.
CONFIG = SimpleNamespace(
    weight_nz_mode=0,
    enable_fused_mc2=0,
    enable_reduce_sample=False,
    enable_async_exponential=False,
    enable_sleep_mode_extra_cleanup=False,
)
E_, H, I_ = 4, 8, 6
B, V = 64, 32
TEMPERATURE, TOP_P = 0.8, 0.9


def set_up() -> None:
    for module in (worker_module, experts_module, sampler_module, utils_module):
        module.get_ascend_config = lambda: CONFIG
    # Operators that run: the plug-in's own composition, and a device without memory.
    torch_npu.npu_top_k_top_p = sampler_module._apply_top_k_top_p_pytorch
    torch.npu.mem_get_info = lambda: (0, 1)  # type: ignore[attr-defined]


def make_worker(runner: Any) -> Any:
    """The plug-in's worker with our extension, as vLLM joins them, without its start on a device."""
    kind = type("Worker", (worker_module.NPUWorker, WeightReceiver), {})
    worker = object.__new__(kind)
    text_config = SimpleNamespace(hidden_size=H)
    model_config = SimpleNamespace(
        dtype=torch.float32, hf_text_config=text_config, logprobs_mode="processed_logprobs"
    )
    worker.vllm_config = SimpleNamespace(model_config=model_config, quant_config=None)
    worker.model_runner, worker.device, worker.rank = runner, torch.device("cpu"), 0
    worker._sleep_saved_buffers = {}
    # The group of an engine on one device, which its start makes.
    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1, broadcast=None)
    return worker


class DrawsOfNoise(TorchDispatchMode):
    """Counts launches of the operator that sampling draws its noise with."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.exponential_.default
        return function(*args, **(kwargs or {}))


def draws_a_token(sampler: Any, *, seeded: bool) -> int:
    generators = {row: torch.Generator().manual_seed(row) for row in range(B)} if seeded else {}
    with DrawsOfNoise() as draws:
        sample(sampler, generators)
    return draws.count


def sample(sampler: Any, generators: dict[int, torch.Generator]) -> dict[str, float]:
    """Difference of the log-probs of sampled tokens to those of the distribution that was asked for."""
    logits_BV = 2 * torch.randn(B, V, generator=torch.Generator().manual_seed(0))
    tokens_B, logp_B = drawn(sampler, logits_BV, TEMPERATURE, torch.full((B,), TOP_P), generators)
    sorted_BV, order_BV = (logits_BV / TEMPERATURE).sort(descending=True)
    p_BV = sorted_BV.softmax(-1)
    sorted_BV[p_BV.cumsum(-1) - p_BV >= TOP_P] = -torch.inf
    expected_BV = torch.empty_like(sorted_BV).scatter_(1, order_BV, sorted_BV.log_softmax(-1))
    expected_B = expected_BV.gather(1, tokens_B[:, None])[:, 0]
    return {"gap": float((logp_B - expected_B).abs().mean()), "outside": int(expected_B.isinf().sum())}


def drawn(
    sampler: Any,
    logits_BV: torch.Tensor,
    temperature: float,
    top_p_B: torch.Tensor | None,
    generators: dict[int, torch.Generator],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the log-probs that the plug-in reports for them."""
    count = len(logits_BV)
    zeros, ones = torch.zeros(count), torch.ones(count)
    output = sampler(
        logits_BV.clone(),
        SamplingMetadata(
            temperature=torch.full((count,), temperature),
            all_greedy=False,
            all_random=True,
            top_p=top_p_B,
            top_k=None,
            generators=generators,
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=zeros,
            presence_penalties=zeros,
            repetition_penalties=ones,
            output_token_ids=[[] for _ in range(count)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        ),
    )
    return output.sampled_token_ids[:, 0].long(), output.logprobs_tensors.logprobs[:, 0]


def self_test(sampler: Any) -> dict[str, list[str]]:
    """Verdicts of the self-test's program on an engine whose tokens the plug-in's sampler draws."""
    hf.draw = lambda logits_BV, sampling, *_: drawn(sampler, logits_BV, sampling.temperature, None, {})
    with tempfile.TemporaryDirectory() as work:
        verdicts = Path(work) / "verdicts.jsonl"
        setting = SelfTestSetting(device="cpu", engine="vllm", work=work, verdicts=str(verdicts))
        make_tiny(setting.tiny, train_rows=1, validation_rows=1)
        check = EngineCheck(setting)
        check.start = lambda eager: hf.HfEngine(  # type: ignore[method-assign]
            setting.tiny / "model", name="engine", dtype=setting.dtype, device=torch.device("cpu")
        )
        with suppress(SystemExit):  # after the first stage that fails
            all_stages(check)
        return {verdict.stage: [verdict.outcome, verdict.result] for verdict in read_verdicts(verdicts)}


class Mixture(nn.Module):
    """A router and experts whose weights vLLM makes and vllm-ascend lays out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E_, bias=False), nn.Module()
        self.gate.requires_grad_(False)
        method = object.__new__(experts_module.AscendUnquantizedFusedMoEMethod)
        nn.Module.__init__(method)
        method.moe, method.dynamic_eplb = SimpleNamespace(is_act_and_mul=True, has_bias=False), False
        method.create_weights(
            self.experts,
            num_experts=E_,
            hidden_size=H,
            intermediate_size_per_partition=I_,
            params_dtype=torch.float32,
        )
        self.experts.quant_method = method

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            loader = getattr(parameter, "weight_loader", vllm_loader())
            loader(parameter, tensor)
            loaded.add(name)
        return loaded


def vllm_loader() -> Any:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return default_weight_loader


class Allocator:
    """Memory that is lost while the engine sleeps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def sleep(self, offload_tags: Any) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)

    def wake_up(self, tags: Any) -> None:
        pass


def update(rounds: int) -> list[dict[str, Any]]:
    """Sleep, wake for weights, update, wake for the cache, several times over; what each round leaves."""
    model = Mixture()
    record_metadata_for_reloading(model)
    model.load_weights((name, torch.zeros_like(p)) for name, p in list(model.named_parameters()))
    model.experts.quant_method.process_weights_after_loading(model.experts)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    worker = make_worker(SimpleNamespace(model=model, get_model=lambda: model))
    worker_module.CaMemAllocator = SimpleNamespace(get_instance=lambda: Allocator(model))
    outcomes = []
    for version in range(1, rounds + 1):
        draw = torch.Generator().manual_seed(version)
        shapes = {
            "gate.weight": (E_, H),
            "experts.w13_weight": (E_, 2 * I_, H),
            "experts.w2_weight": (E_, H, I_),
        }
        sent = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        worker.sleep(level=2)
        worker.wake_up(tags=["weights"])
        outcome = worker.isotrain_update("engine", asdict(write_update(sent.items(), version)), 60.0)
        worker.wake_up(tags=["kv_cache"])
        kernel = {name: t.mT if name.startswith("experts") else t for name, t in sent.items()}
        outcomes.append(
            {
                "error": outcome["error"],
                "equal": {n: bool(torch.equal(p, kernel[n])) for n, p in model.named_parameters()},
                "in_place": addresses == {n: p.data_ptr() for n, p in model.named_parameters()},
            }
        )
    return outcomes


def main() -> None:
    set_up()
    sampler = sampler_module.AscendSampler()  # as `NPUModelRunner` makes it
    before, stages = sample(sampler, {}), [self_test(sampler)]
    problem = make_worker(SimpleNamespace(sampler=sampler)).isotrain_report_sampled()
    refused = make_worker(SimpleNamespace(sampler=nn.Module())).isotrain_report_sampled()
    draws = [draws_a_token(sampler, seeded=seeded) for seeded in (True, False)]
    stages.append(self_test(sampler))
    result = {"vllm": vllm.__version__, "before": before, "after": sample(sampler, {}), "problem": problem}
    result |= {"stages": stages, "refused": refused, "draws": draws, "updates": update(2)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
