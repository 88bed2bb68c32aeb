"""Weights on an engine's devices that wait beside its model until it has finished a batch, or a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from isotrain.children import in_background
from isotrain.errors import WeightUpdateError
from isotrain.weights.digest import Contents, Weight
from isotrain.weights.transport import open_incoming
from isotrain.weights.update import WeightUpdate, update_limit


@dataclass(frozen=True)
class Peers:
    """The workers of one engine. Each keeps a part of the buckets, and all get them from it as they load."""

    index: int = 0
    size: int = 1
    broadcast: Callable[[torch.Tensor, int], object] = lambda bucket, index: None
    """Fill a bucket on all workers from that of the worker with this index."""


ALONE = Peers()


class SecondBuffer:
    """They come in a thread of their own while the engine generates, and nothing of the model is touched: an
    update that fails on its way leaves the engine as it was.
    """

    def __init__(self, engine: str, device: torch.device, worker: int = 0, peers: Peers = ALONE) -> None:
        self._engine, self._device, self._worker, self._peers = engine, device, worker, peers
        self._update: WeightUpdate | None = None
        self._taking: Future[tuple[list[_Bucket], str]] = Future()

    def begin(self, update: WeightUpdate, timeout: float) -> None:
        """Take what is sent; what an update has left that was given up goes first."""
        self._update, self._taking = update, Future()
        self._taking = in_background(lambda: self._hold(update, timeout))

    @contextmanager
    def open(self, update: WeightUpdate, timeout: float) -> Iterator[Contents]:
        """The tensors of an update that was taken before; of any other, as `open_incoming` gives them."""
        begun, self._update = self._update, None
        taking, self._taking = self._taking, Future()
        if begun is None or (begun.version, begun.sources) != (update.version, update.sources):
            del taking  # and the memory with it
            with self._incoming(update, timeout) as contents:
                yield contents
            return
        buckets, digest = taking.result(update_limit(timeout, update.bytes))
        if digest != update.digest:
            raise WeightUpdateError(
                f"{self._engine}: weight update {update.version} in its second buffer is another one than "
                "was sent"
            )
        tensors = self._from_all(buckets)
        try:
            yield Contents(tensors, update.version, digest)
        finally:
            for _ in tensors:  # the other workers wait for the buckets of this one, also if it has failed
                pass

    def _incoming(self, update: WeightUpdate, timeout: float) -> AbstractContextManager[Contents]:
        return open_incoming(update, self._engine, timeout, self._device, self._worker)

    def _hold(self, update: WeightUpdate, timeout: float) -> tuple[list[_Bucket], str]:
        """All buckets, in the order in which every worker gets them; this one keeps the bytes of its own."""
        buckets: list[_Bucket] = []
        held = [0] * self._peers.size
        with self._incoming(update, timeout) as contents:
            last: torch.Tensor | None = None
            for name, tensor in contents.tensors:
                # The last one is alive here, and so no later bucket is in its place.
                if last is None or _place(tensor) != _place(last):
                    size = tensor.untyped_storage().nbytes()
                    holder = held.index(min(held))  # the same on all workers
                    held[holder] += size
                    whole = _whole(tensor, size) if holder == self._peers.index else None
                    buckets.append(_Bucket(holder, size, [], whole))
                start = int(tensor.storage_offset()) * tensor.itemsize
                buckets[-1].entries.append(_Entry(name, tensor.dtype, tensor.shape, start, tensor.nbytes))
                last = tensor
            return buckets, contents.digest

    def _from_all(self, buckets: list[_Bucket]) -> Iterator[Weight]:
        """The tensors of all buckets, one bucket of another worker at a time."""
        for bucket in buckets:
            whole = bucket.bytes
            if whole is None:
                whole = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
            self._peers.broadcast(whole, bucket.holder)
            for entry in bucket.entries:
                part = whole[entry.start : entry.start + entry.size]
                yield entry.name, part.view(entry.dtype).view(entry.shape)
            # What this worker has given out is of no more use to it.
            bucket.bytes = None


@dataclass
class _Entry:
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    size: int


@dataclass
class _Bucket:
    """One bucket of an update, of which one worker keeps the bytes."""

    holder: int
    size: int
    entries: list[_Entry]
    bytes: torch.Tensor | None


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """All bytes of the bucket in which a tensor lies."""
    return tensor.reshape(-1).view(torch.uint8).as_strided((size,), (1,), 0)
