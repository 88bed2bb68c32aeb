"""Makes the certificates of tiny models anew.

    python certificates/make.py --work DIR [--reference-runs] [PAIR ...]

A PAIR is such as sft or sft-npu; by default all. Finished runs in DIR are used again. --reference-runs also
makes the runs that `isotrain parity contribute` compares with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests" / "device")]

import npusim  # noqa: E402

from isotrain.observe.environment import cpu_features  # noqa: E402
from isotrain.parity.reference_runs import TINY, take_over  # noqa: E402

MEMBERS = 6
ROWS = 1000
_DATA = ("model.path=tiny/model", "data.validation=null", "trainer.steps=60", "trainer.save_every=0")
_OFFLINE = (*_DATA, "trainer.validate_first=false", "optimizer.lr=1e-3")
_ONLINE = (
    *(*_DATA, "data.train=tiny/prompts.jsonl", "reward.function.path=tiny/reward.py:score"),
    *("data.batch_size=8", "rollout.engine=hf", "algorithm.mini_batch_size=4", "optimizer.lr=1e-3"),
    *("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.02", "rollout.weight_check_tolerance=100"),
)
# Algorithms, each with the recipe that it is a change of.
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft": ("tiny-sft", (*_DATA, "data.train=tiny/train.jsonl")),
    "dpo": ("tiny-dpo", (*_OFFLINE, "data.train=tiny/pairs.jsonl")),
    "kto": ("tiny-dpo", (*_OFFLINE, "data.train=tiny/responses.jsonl", "algorithm.name=kto")),
    "rm": ("tiny-rm", (*_OFFLINE, "data.train=tiny/pairs.jsonl")),
    "prm": ("tiny-dpo", (*_OFFLINE, "data.train=tiny/steps.jsonl", "algorithm.name=prm")),
    "grpo": ("tiny-grpo", _ONLINE),
    "ppo": ("tiny-grpo", (*_ONLINE, "algorithm.name=ppo", "optimizer.lr=2e-4")),
    "reinforce++": ("tiny-grpo", (*_ONLINE, "algorithm.name=reinforce++", "optimizer.lr=2e-4")),
}
SIMULATED = ("sft", "dpo", "grpo")
REFERENCE_RUNS = ("sft", "dpo", "grpo")


@dataclass(frozen=True)
class Pair:
    name: str
    algorithm: str
    devices: str
    settings: tuple[str, ...]


def pairs() -> dict[str, Pair]:
    """The two best instruction sets: in bfloat16, where they differ most, if there are units for it."""
    amx = "amx_tile" in cpu_features()
    hosts, dtype = ("cpu-avx512,cpu-amx", "bfloat16") if amx else ("cpu-avx2,cpu-avx512", "float32")
    found = [Pair(name, name, hosts, (f"model.dtype={dtype}",)) for name in RECIPES]
    found += [Pair(f"{name}-npu", name, "cpu,npu", ("model.dtype=float32",)) for name in SIMULATED]
    return {pair.name: pair for pair in found}


def certify(pair: Pair, work: Path) -> int:
    recipe, settings = RECIPES[pair.algorithm]
    command = [
        *(sys.executable, "-m", "isotrain", "parity", "certify", recipe, *settings, *pair.settings),
        *("--devices", pair.devices, "--members", str(MEMBERS)),
        *("--work", pair.name, "--certificates", str(REPOSITORY / "certificates")),
    ]
    environment = npusim.environment() if "npu" in pair.devices else dict(os.environ)
    with (work / f"{pair.name}.log").open("w") as log:
        done = subprocess.run(
            command,
            cwd=work,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    print(f"{pair.name}: exit code {done.returncode}, see {work / pair.name}.log", flush=True)
    return done.returncode


def make(chosen: Iterable[Pair], work: Path) -> int:
    if not (work / "tiny").is_dir():
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "isotrain", "prepare", "tiny", "--out", "tiny", "--rows", str(ROWS)]
        subprocess.run(command, cwd=work, check=True)
    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(lambda pair: certify(pair, work), chosen))


def keep_reference_runs(work: Path) -> None:
    """The runs themselves, and the model and data that they were trained on."""
    shutil.rmtree(TINY.parent, ignore_errors=True)
    for name in REFERENCE_RUNS:
        take_over(work / name, name)
    shutil.copytree(work / "tiny" / "model", TINY / "model")
    for file in ("train.jsonl", "pairs.jsonl", "prompts.jsonl", "reward.py"):
        shutil.copyfile(work / "tiny" / file, TINY / file)


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("--reference-runs", action="store_true")
    options.add_argument("pairs", nargs="*", choices=[*pairs(), []])
    given = options.parse_args()
    failed = make([pairs()[name] for name in given.pairs or pairs()], given.work.resolve())
    if given.reference_runs:
        keep_reference_runs(given.work.resolve())
    return failed


if __name__ == "__main__":
    sys.exit(main())
