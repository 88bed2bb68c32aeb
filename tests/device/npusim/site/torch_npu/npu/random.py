"""Random numbers of the simulated npu: one generator per device, apart from the host's."""

from collections.abc import Iterable

import torch

from torch_npu import _C

Device = torch.device | str | int

default_generators: tuple[torch.Generator, ...] = tuple(
    _C.default_generator(index) for index in range(_C.device_count())
)


def _generator(device: Device) -> torch.Generator:
    index = device if isinstance(device, int) else torch.device(device).index
    return default_generators[torch.npu.current_device() if index is None else index]


def get_rng_state(device: Device = "npu") -> torch.Tensor:
    """The state of one device, as a byte tensor on the host."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of every device."""
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Device = "npu") -> None:
    """Puts one device back to a state."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Puts every device back to its state."""
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    _generator("npu").manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds every device."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seeds the current device from the system."""
    _generator("npu").seed()


def seed_all() -> None:
    """Seeds every device alike from the system."""
    manual_seed_all(default_generators[0].seed() if default_generators else 0)


def initial_seed() -> int:
    """The seed of the current device."""
    return _generator("npu").initial_seed()
