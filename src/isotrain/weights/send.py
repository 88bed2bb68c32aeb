"""A rank's part in a weight update: gather the full weights, and send them as the controller says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from isotrain.data.items import Sample
from isotrain.data.packing import pack
from isotrain.data.pictures import Picture
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.offload import has_weights, onload
from isotrain.errors import WeightUpdateError
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.models.lora import ADAPTER, base_name, is_adapter
from isotrain.weights.check import check_pictures
from isotrain.weights.digest import HOST, Weight
from isotrain.weights.file import read_update
from isotrain.weights.transport import TRANSPORTS, Sender, error_within
from isotrain.weights.update import REHEARSAL, WeightUpdate

_WRAPPED = ".base_layer.weight"


@dataclass(frozen=True)
class SendOrder:
    """The controller's order to one rank."""

    version: int
    """Or `REHEARSAL`."""
    transport: str
    host: str
    """The address on which the rank listens for its receivers."""
    receivers: int
    """How many take the weights from this rank; without any it only helps to gather them."""
    timeout: float
    check_prompts: Sequence[npt.NDArray[np.int32]] | None = None
    """Prompts of the weight check, if the rank shall compute their log-probs."""
    offloads: bool = False
    """Whether the device is the engines' afterwards."""
    written: WeightUpdate | None = None
    """A file to send instead of the model's weights, to relays."""
    buffered: bool = False
    """Whether receivers keep the weights in a second buffer, and can do without them if sending fails."""


class Sent(NamedTuple):
    """A rank's reply; empty of a rank without receivers."""

    update: WeightUpdate | None = None
    """The update to announce to the engines."""
    logps: npt.NDArray[np.float32] | None = None
    """Log-probs of all tokens of the weight check but the first of each prompt, at temperature 1."""
    error: str = ""
    """The error of a rehearsal, why it cannot be a sender, or why buffers did not get all of it."""


class WeightSender:
    def __init__(
        self,
        policy: TrainingEngine,
        dtype: torch.dtype,
        offload: Callable[[bool], None],
        pictures: Callable[[int], tuple[Picture, ...]] = lambda row: (),
    ) -> None:
        """Engines get weights as `dtype`; `offload` is that of all models of the rank.

        `pictures`: those of a training prompt.
        """
        self._policy, self._dtype, self._offload, self._pictures = policy, dtype, offload, pictures
        self._senders: dict[tuple[str, torch.device], Sender] = {}

    def announce(self, order: SendOrder) -> Sent:
        """Make ready to send to engines that take the weights at the same time; returns what they are told.

        What is not sent makes room for the engines' weights.
        """
        logps, size = None, 0
        if order.version == REHEARSAL and order.buffered:
            size = self._size()
        elif order.written is None and order.version != REHEARSAL:
            onload(self._policy)
            logps = self._check_logps(order)
            if order.offloads:
                self._offload(True)
            size = self._size()
        if not order.receivers:
            return Sent()
        try:
            sender = self._sender(order)
        except (OSError, RuntimeError) as error:
            return Sent(error=f"rank {self._policy.world.rank} cannot listen on {order.host}: {error}")
        return Sent(sender.announce(order.version, size, order.timeout), logps)

    def send(self, order: SendOrder) -> Sent:
        """Send what was announced; or write, without an announcement, what engines will find.

        Weights that are offloaded return to the device for it, and nothing else does.
        """
        if order.version == REHEARSAL:
            return Sent(error=self._rehearse(order) if order.receivers else "")
        if order.written is not None:
            return Sent(self._sender(order).send(read_update(order.written), order.version))
        away = self._policy.on_host is not None
        onload(self._policy, weights_only=True)
        update, error, stream = None, "", full_weights(self._policy, self._dtype)
        if order.receivers:
            try:
                update = self._sender(order).send(stream, order.version)
            except WeightUpdateError as failure:
                if not order.buffered:
                    raise
                error = str(failure)
        for _ in stream:  # gathering a sharded weight takes every rank, whoever else takes it
            pass
        logps = self._check_logps(order)
        if away or order.offloads:
            self._offload(False)
        return Sent(error=error) if update is None else Sent(update, logps)

    def close(self) -> None:
        """Stop listening: the transport does not work here."""
        self._senders.clear()

    def _size(self) -> int:
        return sum(p.numel() for p in self._policy.parameters.values()) * self._dtype.itemsize

    def _sender(self, order: SendOrder) -> Sender:
        device = self._policy.world.device if order.written is None else HOST
        key = order.transport, device
        if key not in self._senders:
            transport = TRANSPORTS[order.transport]
            self._senders[key] = transport.open(order.host, order.receivers, order.timeout, device)
        return self._senders[key]

    def _rehearse(self, order: SendOrder) -> str:
        def attempt() -> None:
            probe = torch.arange(1024, dtype=torch.float32, device=self._policy.world.device)
            self._sender(order).send([("rehearsal", probe)], REHEARSAL)

        return error_within(order.timeout, attempt)

    def _check_logps(self, order: SendOrder) -> npt.NDArray[np.float32] | None:
        if order.check_prompts is None:
            return None
        pictures = check_pictures(order.check_prompts, self._pictures)
        samples = [
            Sample(prompt_P, np.ones(len(prompt_P), np.bool_), seen)
            for prompt_P, seen in zip(order.check_prompts, pictures, strict=True)
        ]
        (logp_N,) = self._policy.infer([pack(samples)], lambda head: head.logps())
        logps: npt.NDArray[np.float32] = logp_N.float().cpu().numpy()
        return logps


@torch.no_grad()
def full_weights(engine: TrainingEngine, dtype: torch.dtype) -> Iterator[Weight]:
    """Names and shapes are those of published files: a fused parameter becomes one tensor per expert.

    Every rank must go through all of them: putting a weight together is a collective.

    Adapters are merged into their weights. A tensor may be the parameter itself: use it before the next step.
    """
    assert has_weights(engine), "the model is offloaded"
    publish = Publisher(engine.model.pretrained)
    for name, parameter in engine.parameters.items():
        if is_adapter(name):
            continue
        if name.endswith(_WRAPPED):
            tensor = _merged(engine, name).to(dtype)
        else:
            # Rounded before it is gathered: fewer bytes travel, and rounding each part is rounding the whole.
            tensor = _whole(parameter.detach().to(dtype), engine.world.device)
        yield from publish(base_name(name.removeprefix(engine.model.prefix)), tensor)
    for name, buffer in stored_buffers(engine.model.pretrained).items():
        yield from publish(base_name(name), buffer)  # in its own type, which engines keep as well


def _merged(engine: TrainingEngine, name: str) -> torch.Tensor:
    from peft.tuners.lora import LoraLayer  # not by processes that have no adapters

    # In float32: adding in a shorter type would lose updates below its resolution.
    layer_name = name.removesuffix(_WRAPPED)
    weight, down, up = (
        _whole(engine.parameters[f"{layer_name}{part}"].detach(), engine.world.device).float()
        for part in (_WRAPPED, f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")
    )
    layer = engine.model.get_submodule(layer_name)
    assert isinstance(layer, LoraLayer)
    scaling: float = layer.scaling[ADAPTER]
    delta = (up @ down) * scaling
    # GPT-2's layers have inputs first.
    return weight + (delta.t() if getattr(layer, "fan_in_fan_out", False) else delta)


def _whole(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, where collectives are fast, also if weights are kept on the host."""
    tensor = tensor.to(device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
