"""How far the statistics of a dumped tensor are from those of another run, beside how far they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from isotrain.tools.parity.levels.layer_errors import NOT_A_NUMBER
from isotrain.tools.parity.read.msprobe_dump import Tensor

# Of a rounding: the distance from 1 to the next number. Narrower types than these are dumped without numbers.
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_WIDE = ("float64", "float32")
# In roundings. Norms and means are of many elements, whose roundings average out; the largest and smallest
# are single elements. In narrow types, the statistics themselves are rounded to that type.
_OF_ALL = {True: 64.0, False: 3.0}
_OF_ONE = {True: 256.0, False: 8.0}
_BACKWARD = 2.0
_DEPTH = 64
"""Calls after which an error's variance may have doubled, as in `layer_errors`."""
_LATER = {True: 100.0, False: 4.0}
"""Once weights may have been updated: a dump does not hold updates, and the first ones of Adam are little
more than signs, which change where a gradient is close to 0."""

# Of rows of a table: equal, but for how a statistic of them is summed and rounded; after updates, nearly.
_EQUAL, _OF_STATISTIC, _MOVED = 1e-6, 2.0, 0.02


@dataclass(frozen=True)
class DumpRating:
    """The statistic of a tensor that is closest to its limit, or beyond it."""

    statistic: str
    error: float
    limit: float
    place: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    @property
    def excess(self) -> float:
        return self.error / self.limit


AGREES = DumpRating("nothing", 0.0, 1.0)


@dataclass(frozen=True)
class DumpLimits:
    """For one call: in which type it computes, and what was computed before it."""

    dtype: str
    position: int = 0
    backward: bool = False
    later: bool = False
    lookup: bool = False
    """Whether rows of a table are taken as they are."""

    def _of(self, roundings: dict[bool, float]) -> float:
        wide = self.dtype in _WIDE
        size = roundings[wide] * _EPSILON[self.dtype] * math.sqrt(1 + self.position / _DEPTH)
        return size * (_BACKWARD if self.backward else 1.0) * (_LATER[wide] if self.later else 1.0)

    @property
    def of_all(self) -> float:
        if self.lookup:
            return _MOVED if self.later else max(_EQUAL, _OF_STATISTIC * _EPSILON[self.dtype])
        return self._of(_OF_ALL)

    @property
    def of_one(self) -> float:
        if self.lookup:
            return _MOVED if self.later else _EQUAL
        return self._of(_OF_ONE)


def coarsest(tensors: Sequence[Tensor], default: str = "float64") -> str:
    """The type with the largest rounding: what passed through it is rounded to it, however it is kept."""
    known = [tensor.dtype for tensor in tensors if tensor.dtype in _EPSILON]
    return max([default, *known], key=lambda dtype: _EPSILON[dtype])


def typical(tensor: Tensor) -> float:
    """The size of an element: the root of the mean square, where that is known."""
    if tensor.norm is not None and math.isfinite(tensor.norm) and tensor.size:
        return tensor.norm / math.sqrt(tensor.size)
    return _reach(tensor)


def _reach(tensor: Tensor) -> float:
    known = (abs(x) for x in (tensor.maximum, tensor.minimum) if x is not None and math.isfinite(x))
    return max(known, default=0.0)


def _own_size(_: Tensor) -> float:
    return 0.0


def worst(
    a: Sequence[Tensor], b: Sequence[Tensor], limits: DumpLimits, floor: Callable[[Tensor], float] = _own_size
) -> DumpRating:
    """Worst rating of the tensors that both have at the same place; another shape is beyond every limit.

    Errors are of a tensor's own size, or of `floor` where that is larger.
    """
    others = {tensor.place: tensor for tensor in b}
    ratings = [
        rate(tensor, others[tensor.place], limits, floor(tensor)) for tensor in a if tensor.place in others
    ]
    return max(ratings, key=lambda rating: rating.excess, default=AGREES)


def rate(a: Tensor, b: Tensor, limits: DumpLimits, floor: float = 0.0) -> DumpRating:
    if a.shape != b.shape:
        return DumpRating("shape", NOT_A_NUMBER, 1.0, a.place)
    if not (a.is_floating and b.is_floating):
        return _exact(a, b)
    ratings = list(_statistics(a, b, limits, floor))
    return max(ratings, key=lambda rating: rating.excess, default=AGREES)


def _exact(a: Tensor, b: Tensor) -> DumpRating:
    """Integers and truth values are not rounded."""
    pairs = ((a.checksum, b.checksum), (a.maximum, b.maximum), (a.minimum, b.minimum))
    for left, right in pairs:
        if left is not None and right is not None and left != right:
            return DumpRating("values", NOT_A_NUMBER, 1.0, a.place)
    return AGREES


def _statistics(a: Tensor, b: Tensor, limits: DumpLimits, floor: float) -> Iterator[DumpRating]:
    reach, norm = max(_reach(a), floor), None if a.norm is None else max(a.norm, floor * math.sqrt(a.size))
    for name, left, right, scale, limit in (
        ("norm", a.norm, b.norm, norm, limits.of_all),
        ("mean", a.mean, b.mean, max(typical(a), floor), limits.of_all),
        ("max", a.maximum, b.maximum, reach, limits.of_one),
        ("min", a.minimum, b.minimum, reach, limits.of_one),
    ):
        if left is None or right is None or scale is None:
            continue
        yield DumpRating(name, _error(left, right, scale), limit, a.place)


def _error(left: float, right: float, scale: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    error = abs(left - right) / scale if scale else math.inf
    return error if math.isfinite(error) else NOT_A_NUMBER
