"""Runs inside each vLLM worker: takes weights and reports what it took.

vLLM's layer-wise reload is called directly: its transfer engines on top of it change from version to version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    get_layerwise_info,
)
from vllm.platforms import current_platform

from isotrain.errors import WeightUpdateError
from isotrain.weights.digest import Contents
from isotrain.weights.second_buffer import Peers, SecondBuffer
from isotrain.weights.transport import check_written, erase, rehearse_incoming, unwritten
from isotrain.weights.update import WeightUpdate


@dataclass
class UpdateOutcome:
    """The weights that a worker read and gave to its model; complete if the error is empty."""

    version: int = -1
    tensors: int = 0
    digest: str = ""
    error: str = ""


class WeightReceiver:
    """Adds methods to vLLM's workers, which calls can reach by name."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    rank: int

    def isotrain_report_sampled(self) -> str:
        """Make log-probs those of the distribution that is sampled; returns an error, or nothing.

        The sampler of a platform's plug-in may ignore the engine's `logprobs_mode`: its
        log-probs are then those before temperature, top-k and top-p, until the sampler itself has the mode.
        """
        sampler = self.model_runner.sampler
        for part in (sampler, getattr(sampler, "topk_topp_sampler", sampler)):
            if not hasattr(part, "logprobs_mode"):
                return f"{type(part).__name__} has no logprobs_mode"
            part.logprobs_mode = self.vllm_config.model_config.logprobs_mode
        return ""

    def isotrain_head_dtype(self) -> str:
        """The type in which logits are computed; empty where the engine has no such choice."""
        processors = [m for m in self.model_runner.get_model().modules() if isinstance(m, LogitsProcessor)]
        dtypes = {str(getattr(processor, "head_dtype", "")) for processor in processors}
        return ", ".join(sorted(dtypes))

    def isotrain_update(self, engine: str, update: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Errors are returned, not raised: one worker's would leave the replies of the others unread."""
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            model, config = self.model_runner.get_model(), self.vllm_config.model_config
            try:
                announced = WeightUpdate.from_json(update)
                with self._isotrain_buffer(engine).open(announced, timeout) as contents:
                    outcome = _take(model, config, announced, contents, engine)
            except Exception as error:
                outcome = UpdateOutcome(error=_text(error, engine))
        return asdict(outcome)

    def isotrain_receive(self, engine: str, update: dict[str, Any], timeout: float) -> None:
        """Begin to take an update into the second buffer."""
        self._isotrain_buffer(engine).begin(WeightUpdate.from_json(update), timeout)

    def _isotrain_buffer(self, engine: str) -> SecondBuffer:
        buffer: SecondBuffer | None = self.__dict__.get("isotrain_buffer")
        if buffer is None:
            buffer = self.__dict__["isotrain_buffer"] = SecondBuffer(engine, self.device, self.rank, _peers())
        return buffer

    def isotrain_rehearse(self, engine: str, update: dict[str, Any], timeout: float) -> str:
        """Returns an error, or nothing."""
        announced, workers = WeightUpdate.from_json(update), _peers().size
        return rehearse_incoming(announced, engine, timeout, self.device, self.rank, workers)


def _peers() -> Peers:
    group = get_tp_group()
    return Peers(group.rank_in_group, group.world_size, group.broadcast)


def _take(
    model: nn.Module, config: Any, update: WeightUpdate, contents: Contents, engine: str
) -> UpdateOutcome:
    """The model is opened for reloading only now: a file has been found whole before."""
    # Asked before reloading, during which a head that is tied to the embedding is a parameter of its own.
    parameters = {name for name, _ in model.named_parameters()}
    _lay_out_experts_for_kernels(model)
    initialize_layerwise_reload(model)
    # What vLLM computed from weights, as for latent attention, is gone now and will be computed again.
    parameters &= {name for name, _ in model.named_parameters()}
    _pack_experts_again(model)
    _erase(model, parameters)
    with _new_tensors_are_nan():
        try:
            count = _load(model, parameters, contents, update, engine)
        finally:
            # Also after a failure: the layers are then unusable, but in a state that takes the next update.
            finalize_layerwise_processing(model, config)
    _pack_tied_layers(model)
    check_written(update, engine, _unwritten(model, parameters), len(parameters))
    return UpdateOutcome(contents.version, count, contents.digest)


def _load(
    model: Any,
    parameters: set[str],
    contents: Contents,
    update: WeightUpdate,
    engine: str,
) -> int:
    """Returns how many tensors the model took."""
    counted = _Counted(iter(contents.tensors))
    loaded: set[str] | None = model.load_weights(counted)
    if not counted.exhausted and counted.count != update.tensors:
        raise WeightUpdateError(f"{engine}: the model took {counted.count} tensors and left the others")
    incomplete = parameters - loaded if loaded is not None else set()
    incomplete |= set(_incomplete(model)) & parameters
    if incomplete:
        raise WeightUpdateError(
            f"{engine}: weight update {update.version} lacks weights of {len(incomplete)} of "
            f"{len(parameters)} parameters: {', '.join(sorted(incomplete)[:5])}"
        )
    return counted.count


def _erase(model: nn.Module, parameters: set[str]) -> None:
    """Erase `parameters`, which the update must write, and the copies of them that are packed for CPUs."""
    for prefix, layer in model.named_modules():
        kept = get_layerwise_info(layer).kernel_tensors
        tensors = kept[0] if kept else {}
        erase(tensor for name, tensor in tensors.items() if _path(prefix, name) in parameters)
        if _PACKED in vars(layer):
            setattr(layer, _PACKED, _not_packed)


def _unwritten(model: nn.Module, parameters: set[str]) -> list[str]:
    stale = [_path(prefix, "weight") for prefix, layer in model.named_modules() if _has_old_copy(layer)]
    return stale + unwritten({name: p for name, p in model.named_parameters() if name in parameters})


def _has_old_copy(layer: nn.Module) -> bool:
    """Whether the weights that are packed for CPUs were not renewed, or hold a NaN."""
    multiply = vars(layer).get(_PACKED)
    if multiply is None or multiply is _not_packed:
        return multiply is not None
    if not isinstance(layer, LinearBase):
        return False
    width = int(getattr(layer, "input_size_per_partition", layer.input_size))
    # Packed weights cannot be read, but zero times NaN is NaN.
    zeros = torch.zeros(1, width, dtype=layer.params_dtype)
    return bool(multiply(zeros, layer.weight, None).isnan().any())


# The attribute of a layer that multiplies by weights that vLLM has packed for CPUs; they cannot be read.
_PACKED = "cpu_linear"


def _not_packed(*_: object) -> torch.Tensor:
    raise WeightUpdateError("a weight update did not renew the packed copy of a weight")


def _path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


@contextmanager
def _new_tensors_are_nan() -> Iterator[None]:
    """A part of a fused weight that is taken but not written is then NaN, instead of what was in memory."""
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch then fills what `empty` returns
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


class _Counted:
    """An iterator that knows how many tensors were taken, and whether those were all."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.count, self.exhausted = 0, False
        self._tensors = tensors

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            pair = next(self._tensors)
        except StopIteration:
            self.exhausted = True
            raise
        self.count += 1
        return pair


def _incomplete(model: nn.Module) -> Iterator[str]:
    """Parameters of layers that wait for more; `load_weights` takes any part of a fused one for the whole."""
    for prefix, layer in model.named_modules():
        info, parameters = get_layerwise_info(layer), dict(layer.named_parameters(recurse=False))
        if parameters and info.can_load() and info.load_numel < _expected_numel(layer, parameters):
            yield from (f"{prefix}.{name}" for name in parameters)


def _expected_numel(layer: nn.Module, parameters: dict[str, nn.Parameter]) -> int:
    if isinstance(layer, VocabParallelEmbedding):
        # The rows that fill the vocabulary up to a round number are in no checkpoint.
        rows = layer.num_org_embeddings_per_partition
        return sum(rows * parameter[0].numel() for parameter in parameters.values())
    # vLLM notes there what of a parameter is in the checkpoint, where it has filled the rest up.
    return sum(
        getattr(parameter, "weight_loader_numel", parameter.numel()) for parameter in parameters.values()
    )


def _lay_out_experts_for_kernels(model: nn.Module) -> None:
    """Undo what a plug-in's `wake_up` does for loaders that write into parameters.

    Its kernels take experts transposed. `wake_up` replaces them by views in the layout of checkpoints; the
    reload makes tensors in the layout of kernels, and copies them into what is there.
    """
    for layer in model.modules():
        for name in ("w13_weight", "w2_weight"):
            weight = layer._parameters.get(name)
            if weight is not None and not weight.is_contiguous() and weight.mT.is_contiguous():
                layer.register_parameter(name, nn.Parameter(weight.data.mT, requires_grad=False))


def _pack_experts_again(model: nn.Module) -> None:
    """On CPUs, vLLM packs experts only while it builds their kernel, and would leave updated ones unpacked.

    Seen in 0.32: the tensors have the right sizes, and the log-probs are wrong.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and current_platform.is_cpu():
            method.moe_kernel = None  # type: ignore[union-attr]


def _pack_tied_layers(model: nn.Module) -> None:
    """A head that is tied to the embedding gets no weights itself, but its packed copy must follow them."""
    first: dict[int, nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        method = getattr(layer, "quant_method", None)
        if weight is None or weight.numel() == 0 or not isinstance(method, QuantizeMethodBase):
            continue
        if first.setdefault(id(weight), layer) is not layer:
            method.process_weights_after_loading(layer)


def _text(error: Exception, engine: str) -> str:
    return str(error) if isinstance(error, WeightUpdateError) else f"{engine}: {error!r}"
