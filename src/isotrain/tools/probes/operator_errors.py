"""How far every operator of a training step is from the same operator in float64 on the host."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from isotrain.engine.engine import TrainingEngine
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.probes.operator_oracles import (
    LARGEST,
    NoOracleError,
    Part,
    is_attention,
    least_norm,
    part_of,
    should_return,
    to_host,
)

BLOCKS = 64
"""Parts of a result, each of neighbouring rows, over which standard errors are taken."""
COMPARED = 2
"""Calls of one signature that are compared: the later ones only have other numbers in them."""

# They move or make numbers and compute none. Views are told by their schema.
_COPIES = {
    *("_to_copy", "copy_", "_foreach_copy_", "clone", "_unsafe_view", "lift_fresh", "contiguous"),
    *("cat", "stack", "embedding", "index", "index_select", "gather", "where", "masked_fill", "masked_fill_"),
    *("repeat", "repeat_interleave", "flip", "roll", "tril", "triu", "constant_pad_nd", "masked_select"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "fill_", "zero_", "_foreach_zero_", "set_"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "resize_", "is_pinned"),
    *("split_with_sizes_copy", "slice_backward", "select_backward", "_pin_memory", "record_stream"),
}
_EXCHANGES = {"c10d", "_c10d_functional", "c10d_functional", "fsdp", "symm_mem"}
# Masks put the most negative number of a type beside scores: beside such numbers no error would be seen.
_MASK = 1e30


@dataclass(frozen=True)
class SignedShare:
    value: float
    error: float
    """Its standard error."""


@dataclass(frozen=True)
class Deviation:
    """Deviation of one result, or the worst of several."""

    error: float
    """The difference's norm over the oracle's."""
    eps: float
    """The rounding unit of the result's type: errors of different types are compared in it."""
    result: str
    non_finite: int
    terms: float
    """Numbers that were summed for each of the result, as far as shapes tell."""
    gain: SignedShare
    """Of the result that the error has: where all numbers are 1 % too large, 0.01."""
    blocks: int

    def worse(self, other: Deviation) -> Deviation:
        most = max(self, other, key=lambda deviation: deviation.error / deviation.eps)
        return Deviation(
            error=most.error,
            eps=most.eps,
            result=most.result,
            non_finite=self.non_finite + other.non_finite,
            terms=max(self.terms, other.terms),
            gain=max(self.gain, other.gain, key=lambda share: abs(share.value)),
            blocks=min(self.blocks, other.blocks),
        )


def deviation(
    result: torch.Tensor, oracle: torch.Tensor, *, least_norm: float = 0.0, given: int = 0
) -> Deviation | None:
    """A result, on the host, beside what it should be in float64; None where there is nothing to compare.

    `least_norm` is what the norm counts as at least, `given` the elements of the largest argument.
    """
    info = torch.finfo(result.dtype)
    representable, finite = oracle.to(result.dtype).isfinite(), result.isfinite()
    keep = representable & finite & (oracle.abs() < _MASK)
    non_finite = int((representable & ~finite).sum())
    if not (non_finite or bool(keep.any())):
        return None
    expected, actual = oracle[keep], result.double()[keep]
    difference = actual - expected
    norm, got, off = (float(x.norm()) for x in (expected, actual, difference))
    squares = expected.square()
    if norm and norm < least_norm:  # what is left of larger numbers is no measure
        squares = squares * (least_norm / norm)
    return Deviation(
        error=off / (max(norm, least_norm) or got) if off else 0.0,
        eps=info.eps,
        result=str(result.dtype).removeprefix("torch."),
        non_finite=non_finite,
        terms=max(1.0, given / result.numel()),
        gain=signed_share(difference * expected, squares),
        blocks=min(BLOCKS, len(expected)),
    )


def signed_share(parts: torch.Tensor, wholes: torch.Tensor) -> SignedShare:
    """The ratio of two sums, and how much it changes from one block of neighbours to the next."""
    count = min(BLOCKS, len(parts))
    if count == 0 or not (total := float(wholes.sum())):
        return SignedShare(0.0, 0.0)
    parts_B, wholes_B = (torch.stack([b.sum() for b in x.tensor_split(count)]) for x in (parts, wholes))
    value = float(parts_B.sum()) / total
    rest_B = parts_B - value * wholes_B
    return SignedShare(value, math.sqrt(count / max(1, count - 1)) * float(rest_B.norm()) / total)


@dataclass
class _Entry:
    calls: int = 0
    worst: Deviation | None = None


class OperatorRecorder(TorchDispatchMode):
    """While it is active, compares what operators return; training itself is not changed by it."""

    def __init__(self, compared: int = COMPARED, largest: int = LARGEST) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compared = compared
        self.largest = largest
        self.entries: dict[tuple[str, str, str], _Entry] = {}
        self.without_oracle: set[str] = set()
        self.skipped_large = 0
        self._seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # sharding asks for shapes
            return func(*args, **kwargs)
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # a sharded tensor's operators are those on its parts
        if not _computes(func, args, kwargs):
            return func(*args, **kwargs)
        key = (str(func), _shapes(args, kwargs), _dtypes(args, kwargs))
        entry = self.entries.setdefault(key, _Entry())
        entry.calls += 1
        signature = (*key, repr(tree_map(_without_tensors, (args, kwargs))))
        self._seen[signature] += 1
        if self._seen[signature] > self.compared:
            return func(*args, **kwargs)
        part = part_of(func, args, kwargs, self.largest)
        if part is None:
            self.skipped_large += 1
            return func(*args, **kwargs)
        # Before the operator runs: it may write to its arguments.
        given = to_host((part.args, dict(part.kwargs)))
        result = func(*args, **kwargs)
        self._compare(func, part, given, result, entry)
        return result

    def _compare(self, func: Any, part: Part, given: Any, result: Any, entry: _Entry) -> None:
        args, kwargs = given
        largest = max(leaf.numel() for leaf in tree_leaves(given) if _floating(leaf))
        try:
            least = least_norm(func, args, kwargs)
            expected = should_return(func, args, kwargs)
        except NoOracleError:
            self.without_oracle.add(str(func))
            return
        if func._schema.is_mutable:
            pairs = zip(_written(func, part.args, part.kwargs), _written(func, args, kwargs), strict=True)
        else:
            actual_leaves, expected_leaves = tree_leaves(part.of_output(result)), tree_leaves(expected)
            # What attention keeps for its backward pass is each kernel's own matter.
            first = 1 if is_attention(func) else None
            pairs = zip(actual_leaves[:first], expected_leaves[:first], strict=True)
        for actual, oracle in pairs:
            if not _floating(actual) or not _floating(oracle):
                continue
            if actual.shape != oracle.shape:
                self.without_oracle.add(str(func))
                continue
            seen = deviation(actual.detach().cpu(), oracle, least_norm=least, given=largest)
            if seen is not None:
                entry.worst = seen if entry.worst is None else entry.worst.worse(seen)

    def as_json(self) -> dict[str, Any]:
        return {
            "operators": [
                {"operator": name, "shapes": shapes, "dtypes": dtypes, "calls": entry.calls}
                | _as_json(entry.worst)
                for (name, shapes, dtypes), entry in self.entries.items()
                if entry.worst is not None
            ],
            "no_oracle": sorted(self.without_oracle),
            "skipped_large": self.skipped_large,
        }


class FirstUpdateOperators:
    """Records how the operators of the first update round, in `operators.json`; the leading rank does."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._directory = directory
        self._dtype = dtype
        self._done = False

    @contextmanager
    def around_update(self, engine: TrainingEngine) -> Iterator[None]:
        world = engine.world
        if self._done or not world.is_main:
            yield
            return
        self._done = True
        # The backward pass would have threads of its own, two of which might be in the mode at once.
        with torch.autograd.set_multithreading_enabled(False), OperatorRecorder() as errors:
            yield
        self._directory.mkdir(parents=True, exist_ok=True)
        content = {"dtype": self._dtype, "device": world.device.type, **errors.as_json()}
        write_atomically(self._directory / "operators.json", json.dumps(content, indent=1) + "\n")


def _as_json(worst: Deviation) -> dict[str, Any]:
    return {
        "result": worst.result,
        "error": worst.error,
        "gain": worst.gain.value,
        "gain_error": worst.gain.error,
        "blocks": worst.blocks,
        "non_finite": worst.non_finite,
        "terms": worst.terms,
    }


def _computes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether numbers come out that are not drawn, copied or exchanged."""
    namespace, _, name = func._schema.name.partition("::")
    if func.is_view or name in _COPIES or namespace in _EXCHANGES:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
        return False
    return any(map(_floating, tree_leaves((args, kwargs))))


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Attention counts as random for its dropout, which is mostly 0."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that the operator writes to, in the order of its schema."""
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _without_tensors(value: Any) -> Any:
    return None if isinstance(value, (torch.Tensor, torch.device)) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return _described(args, kwargs, lambda tensor: str(list(tensor.shape)))


def _dtypes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return _described(args, kwargs, lambda tensor: _name(tensor.dtype))


def _described(args: tuple[Any, ...], kwargs: Mapping[str, Any], say: Any) -> str:
    """A word per tensor; of a list, every word once with how often it comes."""
    words = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            words.append(say(value))
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            counts = Counter(say(v) for v in value if isinstance(v, torch.Tensor))
            words.append("{" + ", ".join(f"{count} x {word}" for word, count in counts.items()) + "}")
    return " ".join(words)
