"""Streams and events of the simulated npu: names and time stamps, since work is never pending."""

import contextlib
import time
from collections.abc import Iterator

import torch

Device = torch.device | str | int | None


def _device(device: Device) -> torch.device:
    index = device if isinstance(device, int) else (torch.device(device).index if device else None)
    return torch.device("npu", torch.npu.current_device() if index is None else index)


class Stream(torch.Stream):
    """A stream of one device."""

    def __new__(cls, device: Device = None, priority: int = 0, **identity: int) -> "Stream":
        """A new stream, or with `stream_id`, `device_index` and `device_type` a handle on an existing one."""
        if identity:
            return super().__new__(cls, priority=priority, **identity)
        return super().__new__(cls, device=_device(device), priority=priority)

    @property
    def npu_stream(self) -> int:
        """The address of the stream on a real device."""
        return self.stream_id

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Records an event on this stream."""
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """A point in time, noted here because `torch.Event` only measures events of its exact type."""

    _seconds: float | None = None

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> "Event":
        """Like an event of `torch.cuda`."""
        return super().__new__(
            cls,
            torch.device("npu"),
            enable_timing=enable_timing,
            blocking=blocking,
            interprocess=interprocess,
        )

    def record(self, stream: torch.Stream | None = None) -> None:
        """Notes the time."""
        super().record(stream)
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to a later one."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("both events must be recorded before calculating elapsed time")
        return (end_event._seconds - self._seconds) * 1000


def _handle(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def current_stream(device: Device = None) -> Stream:
    """The stream that this thread uses on a device."""
    return _handle(torch._C._accelerator_getStream(_device(device).index))


def default_stream(device: Device = None) -> Stream:
    """The stream that exists without being made."""
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return Stream(stream_id=0, device_index=_device(device).index, device_type=kind)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes a stream current on its device."""
    if stream is not None:
        torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes a stream and its device current for a while; None changes nothing."""
    if stream is None:
        yield
        return
    device, previous = torch.npu.current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(previous)
        torch.npu.set_device(device)
