"""What runs inside each worker of vLLM: it takes weights and tells what it took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from isotrain.errors import WeightUpdateError
from isotrain.rollout.broadcast import receive_update
from isotrain.rollout.transfer import open_update
from isotrain.rollout.update import WeightUpdate


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    engine: str
    timeout: float
    update: dict[str, Any]


@dataclass
class Outcome:
    """What a worker did with the last update it heard of; an empty error means that it is in the model."""

    version: int = -1
    tensors: int = 0
    digest: str = ""
    error: str = "no weight update arrived"


class OutcomeReport:
    """Adds one method to vLLM's workers, which calls can reach by name."""

    weight_transfer_engine: WeightReceiver

    def isotrain_outcome(self) -> dict[str, Any]:
        return asdict(self.weight_transfer_engine.outcome)


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Errors are kept, not raised: one worker's exception would leave the answers of the others unread."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.outcome = Outcome()
        self._reloading = False
        self._mapped = contextlib.ExitStack()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # The model is opened for reloading only when a file has been found whole: see `receive_weights`.
        self.outcome = Outcome()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = self.parse_update_info(update_info)
        try:
            self.receive_weights(info)
        except Exception as error:
            self.outcome.error = _text(error, info.engine)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        update, engine = WeightUpdate(**update_info.update), update_info.engine
        tensors: Iterator[tuple[str, torch.Tensor]]
        if update.transport == "file":
            tensors = iter(self._mapped.enter_context(open_update(update, engine)))
        else:
            tensors = receive_update(update, engine, update_info.timeout)
        parameters = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        self._reloading = True
        counted = _Counted(tensors)
        model: Any = self.model
        loaded: set[str] | None = model.load_weights(counted)
        if (
            next(counted, None) is not None
        ):  # asking also runs the checks after the last tensor of a broadcast
            raise WeightUpdateError(f"{engine}: the model took {counted.count} tensors of {update.tensors}")
        incomplete = parameters - loaded if loaded is not None else set()
        incomplete |= set(_incomplete(self.model)) & parameters
        if incomplete:
            raise WeightUpdateError(
                f"{engine}: weight update {update.version} lacks weights of {len(incomplete)} of "
                f"{len(parameters)} parameters: {', '.join(sorted(incomplete)[:5])}"
            )
        self.outcome = Outcome(update.version, counted.count, update.digest, error="")

    def finish_weight_update(self) -> None:
        """Also after a failure: the layers are then unusable, but in a state that takes the next update."""
        try:
            if self._reloading:
                finalize_layerwise_processing(self.model, self.model_config)
                _pack_tied_layers(self.model)
        except Exception as error:
            self.outcome.error = self.outcome.error or _text(error, "worker")
        finally:
            self._reloading = False
            self._mapped.close()

    def shutdown(self) -> None:
        self._mapped.close()


class _Counted:
    """An iterator that knows how many tensors were taken."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.count = 0
        self._tensors = tensors

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        pair = next(self._tensors)
        self.count += 1
        return pair


def _incomplete(model: nn.Module) -> Iterator[str]:
    """Parameters of layers that wait for more; `load_weights` takes any part of a fused one for the whole."""
    for prefix, layer in model.named_modules():
        info, own = get_layerwise_info(layer), dict(layer.named_parameters(recurse=False))
        if own and info.can_load() and info.load_numel < _wanted(layer, own):
            yield from (f"{prefix}.{name}" for name in own)


def _wanted(layer: nn.Module, own: dict[str, nn.Parameter]) -> int:
    if isinstance(layer, VocabParallelEmbedding):
        # The rows that fill the vocabulary up to a round number are in no checkpoint.
        rows = layer.num_org_embeddings_per_partition
        return sum(rows * parameter[0].numel() for parameter in own.values())
    return sum(get_tensor_load_numel(parameter) for parameter in own.values())


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
