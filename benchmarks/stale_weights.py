"""Does a weight update notice a tensor that it leaves stale, and how often does it raise false alarms?

One engine in this process takes small updates from a model whose attention is computed by another kernel, so
that the two round differently. In turn, each tensor is left stale in one of three ways:

- `lost`: the engine's loader is given the tensor and does not write it. The engine must refuse that update.
- `head` (vLLM on CPUs): the packed copy of a head that is tied to the embedding is not renewed. The same.
- `value`: the old value is written back after each update, which nothing in the engine can see. The weight
  check must notice it by the log-probs, after as many updates as it takes for them to exceed rounding.

`honest` counts false alarms in updates of which nothing was lost. `ratio` is the processor time of an update
over that of one without the search for stale tensors.

    python benchmarks/stale_weights.py [--engine hf] [--model tiny] [--dtype float32] [--lr 1e-6] [--limit 99]
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from smollm2 import smollm2
from transformers import AutoModelForCausalLM

from isotrain.data.prepare.tiny import make_tiny
from isotrain.errors import WeightUpdateError
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.rollout import hf, vllm
from isotrain.weights.check import TOLERANCE, WeightCheck, mean_difference
from isotrain.weights.file import write_update

GOAL = 1.25
PROMPT_LENGTH = 64


class Trained:
    """A model in float32 that each update moves a little, and what it publishes in the engine's type."""

    def __init__(self, directory: Path, dtype: str, lr: float, tokens: int) -> None:
        self.dtype, self.lr, self.version = getattr(torch, dtype), lr, 0
        self.master = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.rounded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=self.dtype, attn_implementation="eager"
        ).eval()
        self.random = torch.Generator().manual_seed(0)
        self.vocabulary = int(self.master.config.vocab_size)
        self.prompts = [
            self._ids(1, min(PROMPT_LENGTH, tokens)).numpy()[0].astype(np.int32)
            for _ in range(max(1, tokens // PROMPT_LENGTH))
        ]
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)

    def _ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(3, self.vocabulary, shape, generator=self.random)

    def move(self, learns: bool = True) -> None:
        """One step of a policy gradient with random advantages; without learning, a random one as long."""
        if learns:
            ids_BT = self._ids(4, 24)
            logp_BTV = self.master(ids_BT).logits[:, :-1].log_softmax(-1)
            logp_BT = logp_BTV.gather(2, ids_BT[:, 1:, None])[..., 0]
            advantage_B1 = torch.randn(len(ids_BT), 1, generator=self.random) + 0.5
            self.optimizer.zero_grad()
            (-(advantage_B1 * logp_BT).mean()).backward()
            self.optimizer.step()
        else:
            with torch.no_grad():
                for parameter in self.master.parameters():
                    signs = torch.randint(0, 2, parameter.shape, generator=self.random) * 2 - 1
                    parameter.add_(self.lr * signs)
        with torch.no_grad():
            for rounded, parameter in zip(self.rounded.parameters(), self.master.parameters(), strict=True):
                rounded.copy_(parameter)
        self.version += 1

    def published(self) -> dict[str, torch.Tensor]:
        publish = Publisher(self.rounded)
        own = {**dict(self.rounded.named_parameters()), **stored_buffers(self.rounded)}
        return {n: t for name, tensor in own.items() for n, t in publish(name, tensor.detach())}

    def update(self) -> Any:
        return write_update(self.published().items(), self.version)

    @torch.no_grad()
    def log_probs(self) -> Any:
        found = []
        for tokens_T in self.prompts:
            ids_T = torch.from_numpy(tokens_T).long()
            logp_TV = self.rounded(ids_T[None]).logits[0, :-1].float().log_softmax(-1)
            found.append(logp_TV.gather(1, ids_T[1:, None])[:, 0].numpy())
        return np.concatenate(found)


def make_engine(kind: str, directory: Path, dtype: str) -> Any:
    if kind == "hf":
        return hf.HfEngine(directory, name="engine", dtype=dtype, device=torch.device("cpu"))
    return vllm.VllmEngine(
        directory, name="engine", dtype=dtype, device_type="cpu", max_length=128, cache_bytes=1 << 28
    )


@contextlib.contextmanager
def lost_write(kind: str, target: str, engine: Any) -> Iterator[None]:
    """The loader does not copy the tensor `target`: a published name or, with `hf`, that of a parameter."""
    copy = torch.Tensor.copy_
    source, destination = (0, 0), 0
    if kind == "hf":
        destination = engine._own()[target].data_ptr()
        counted: Any = None
    else:
        from isotrain.rollout import vllm_worker

        counted = vllm_worker._Counted
        take = counted.__next__

        def noted(self: Any) -> tuple[str, torch.Tensor]:
            nonlocal source
            name, tensor = take(self)
            if name == target:
                source = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            return name, tensor

        counted.__next__ = noted

    def forgetful(self: torch.Tensor, other: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        lost = False
        if "meta" not in (
            self.device.type,
            other.device.type,
        ):  # where vLLM only counts what would be written
            lost = self.data_ptr() == destination or source[0] <= other.data_ptr() < source[1]
        return self if lost else copy(self, other, *rest, **named)

    torch.Tensor.copy_ = forgetful  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.copy_ = copy  # type: ignore[method-assign]
        if counted is not None:
            counted.__next__ = take


def refused(engine: Any, update: Any) -> str:
    try:
        engine.update_weights(update)
    except WeightUpdateError as error:
        return str(error)
    return ""


def lost_writes(kind: str, engine: Any, trained: Trained, step: int) -> dict[str, Any]:
    """Every tensor in turn, or every `step`th; the next update writes what the one before has lost."""
    names = list(engine._own() if kind == "hf" else trained.published())[::step]
    trained.move(learns=False)
    update, missed, example = trained.update(), [], ""
    for name in names:
        with lost_write(kind, name, engine):
            error = refused(engine, update)
        if "did not write" in error:
            example = error
        else:
            missed.append(name)
    assert not refused(engine, update)
    found = len(names) - len(missed)
    return {"tensors": len(names), "found": found, "missed": missed[:5], "example": example}


def stale_head(engine: Any, trained: Trained) -> str:
    from isotrain.rollout import vllm_worker

    pack = vllm_worker._pack_tied_layers
    vllm_worker._pack_tied_layers = lambda model: None
    try:
        trained.move(learns=False)
        return refused(engine, trained.update())
    finally:
        vllm_worker._pack_tied_layers = pack
        engine.update_weights(trained.update())


def honest(engine: Any, trained: Trained, updates: int) -> dict[str, Any]:
    check, problems, differences = WeightCheck(TOLERANCE[str(trained.dtype)[6:]]), [], []
    first_T = moved = None
    for _ in range(updates):
        trained.move()
        problem = refused(engine, trained.update())
        if not problem:
            logp_T, trained_T = np.concatenate(engine.logps(trained.prompts)), trained.log_probs()
            first_T = trained_T if first_T is None else first_T
            moved = mean_difference(trained_T, first_T)
            differences.append(mean_difference(logp_T, trained_T))
            problem = check.problem(0, trained.version, logp_T, trained_T)
        problems += [problem] if problem else []
    return {
        "updates": updates,
        "false_alarms": len(problems),
        "first_difference": f"{differences[0]:.2g}",
        "largest_difference": f"{max(differences):.2g}",
        "moved": f"{moved:.2g}",
        "alarms": problems[:2],
    }


def stale_values(engine: hf.HfEngine, trained: Trained, names: Sequence[str], limit: int) -> int | None:
    """Updates until the log-probs show that these tensors never change; None if that takes more."""
    check = WeightCheck(TOLERANCE[str(trained.dtype)[6:]])
    engine.update_weights(trained.update())
    own = engine._own()
    old = {name: own[name].detach().clone() for name in names}
    for number in range(limit + 1):
        if number:
            trained.move()
            engine.update_weights(trained.update())
        with torch.no_grad():
            for name in names:
                own[name].copy_(old[name])
        if check.problem(0, number, np.concatenate(engine.logps(trained.prompts)), trained.log_probs()):
            return number
    return None


def seconds(act: Callable[[], object]) -> float:
    """Of processor time: it does not depend on what else the machine does."""
    started = time.process_time()
    act()
    return time.process_time() - started


def time_ratio(kind: str, engine: Any, trained: Trained, turns: int) -> float:
    """Of an update with the search for stale tensors over one without, in pairs."""
    module: Any = hf
    off: dict[str, Any] = {"erase": lambda _: None, "unwritten": lambda _: []}
    if kind != "hf":
        from isotrain.rollout import vllm_worker

        module = vllm_worker
        off = {
            "_erase": lambda *_: None,
            "_unwritten": lambda *_: [],
            "_new_tensors_are_nan": contextlib.nullcontext,
        }
    on = {name: getattr(module, name) for name in off}
    update, ratios = trained.update(), []
    for _ in range(turns):
        times = {}
        for label, functions in (("on", on), ("off", off)):
            for name, function in functions.items():
                setattr(module, name, function)
            times[label] = min(seconds(lambda: engine.update_weights(update)) for _ in range(3))
        ratios.append(times["on"] / times["off"])
    for name, function in on.items():
        setattr(module, name, function)
    return statistics.median(ratios)


def model_directory(name: str, work: Path) -> Path:
    if name == "smollm2":
        return smollm2()
    architecture: Any = {"tiny": "llama", "mixture": "qwen3_moe"}[name]
    make_tiny(work, train_rows=2, validation_rows=2, architecture=architecture)
    return work / "model"


def main() -> None:
    parser = bench.Options(__doc__, honest=20, limit=20, turns=3)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--model", choices=("tiny", "mixture", "smollm2"), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--tokens", type=int, default=256, help="of the weight check")
    parser.add_argument("--step", type=int, default=1, help="every n-th tensor is left stale")
    parser.add_argument("--honest", type=int, default=500, help="updates of which nothing is lost")
    parser.add_argument(
        "--limit", type=int, default=0, help="updates after which a stale value must be noticed"
    )
    parser.add_argument("--turns", type=int, default=5)
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as work:
        directory = model_directory(options.model, Path(work))
        engine = make_engine(options.engine, directory, options.dtype)
        trained = Trained(directory, options.dtype, options.lr, options.tokens)
        results: dict[str, Any] = {"lost": lost_writes(options.engine, engine, trained, options.step)}
        head = options.engine == "vllm" and options.model != "mixture"
        results["head"] = stale_head(engine, trained) if head else None
        if options.honest:
            results["honest"] = honest(engine, trained, options.honest)
        if options.limit and options.engine == "hf":
            names = list(engine._own())
            results["value"] = {"all": stale_values(engine, trained, names, options.limit)} | {
                name: stale_values(engine, trained, [name], options.limit) for name in names
            }
        ratio = time_ratio(options.engine, engine, trained, options.turns)
        engine.close()
    lost = results["lost"]
    met = lost["found"] == lost["tensors"] and results.get("honest", {}).get("false_alarms", 0) == 0
    met = met and (not head or "did not write" in results["head"])
    how = {name: getattr(options, name) for name in ("engine", "model", "dtype", "lr", "tokens")}
    bench.report("stale_weights", ratio, GOAL, met and ratio <= GOAL, **how, **results)


if __name__ == "__main__":
    main()
