from enum import Enum
from typing import Any


class ImageReadMode(Enum):
    RGB = 3


def missing(*_: object, **__: object) -> None:
    raise NotImplementedError("the stub of torchvision computes nothing")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing
