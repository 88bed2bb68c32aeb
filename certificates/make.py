"""Makes the certificates in this directory anew.

    python certificates/make.py --work DIR [--reference-runs] [PAIR ...]

A PAIR is such as sft, sft-npu, reinforce++-ring or smollm2-sft; by default all. Finished runs in DIR are used
again. SmolLM2's need GSM8K, see benchmarks/bench.py. --reference-runs also makes the runs that `isotrain
parity contribute` compares with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests" / "device"), str(REPOSITORY / "benchmarks")]

import bench  # noqa: E402
import npusim  # noqa: E402
from smollm2 import smollm2  # noqa: E402

from isotrain.observe.environment import cpu_features  # noqa: E402
from isotrain.tools.parity.certify.reference_runs import TINY, take_over  # noqa: E402

# Reruns of the reference; fewer where each takes minutes.
MEMBERS, MEMBERS_OF_SMOLLM2 = 6, 4
ROWS = 1000
_DATA = ("model.path=tiny/model", "data.validation=null", "trainer.steps=60", "trainer.save_every=0")
_OFFLINE = (*_DATA, "trainer.validate_first=false", "optimizer.lr=1e-3")
_ONLINE = (
    *(*_DATA, "data.train=tiny/prompts.jsonl", "reward.function.path=tiny/reward.py:score"),
    *("data.batch_size=8", "rollout.engine=hf", "algorithm.mini_batch_size=4", "optimizer.lr=1e-3"),
    *("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.02", "rollout.weight_check_tolerance=100"),
)
# Small batches: one core trains each of the runs.
_SMOLLM2 = (
    *("model.path=SmolLM2-135M-Instruct", "data.batch_size=2", "data.validation=null", "trainer.steps=16"),
    *("trainer.save_every=0", "trainer.validate_every=0", "trainer.validate_first=false"),
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
    "smollm2-sft": (
        "gsm8k-sft-lora",
        (
            *(*_SMOLLM2, "data.train=gsm8k/train.parquet", "device.ranks=1"),
            *("model.lora=null", "optimizer.lr=2e-5"),
        ),
    ),
    "smollm2-grpo": ("gsm8k-grpo", (*_SMOLLM2, "data.train=gsm8k-sums/train.jsonl", "rollout.n=4")),
}
SIMULATED = ("sft", "dpo", "grpo")
# Two ranks that compute each micro-batch together, against one rank.
CONTEXT = {
    f"reinforce++-{way}": ("reinforce++", ("device.mesh.context=2", f"device.mesh.context_attention={way}"))
    for way in ("ring", "ulysses")
}
REFERENCE_RUNS = ("sft", "dpo", "grpo")


@dataclass(frozen=True)
class Pair:
    name: str
    algorithm: str
    devices: str
    settings: tuple[str, ...]
    candidate: tuple[str, ...] = ()
    """Settings of the candidate alone."""

    @property
    def uses_smollm2(self) -> bool:
        return self.algorithm.startswith("smollm2")


def pairs() -> dict[str, Pair]:
    """The two best instruction sets: in bfloat16, where they differ most, if there are units for it."""
    amx = "amx_tile" in cpu_features()
    hosts, dtype = ("cpu-avx512,cpu-amx", "bfloat16") if amx else ("cpu-avx2,cpu-avx512", "float32")
    found = [Pair(name, name, hosts, (f"model.dtype={dtype}",)) for name in RECIPES]
    found += [Pair(f"{name}-npu", name, "cpu,npu", ("model.dtype=float32",)) for name in SIMULATED]
    found += [
        Pair(name, algorithm, "cpu,cpu", ("model.dtype=float32",), ("device.ranks=2", *mesh))
        for name, (algorithm, mesh) in CONTEXT.items()
    ]
    return {pair.name: pair for pair in found}


def certify(pair: Pair, work: Path) -> int:
    recipe, settings = RECIPES[pair.algorithm]
    members = MEMBERS_OF_SMOLLM2 if pair.uses_smollm2 else MEMBERS
    command = [
        *(sys.executable, "-m", "isotrain", "parity", "certify", recipe, *settings, *pair.settings),
        *("--devices", pair.devices, "--members", str(members)),
        *(("--candidate", *pair.candidate) if pair.candidate else ()),
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


def prepare(work: Path, kind: str, *arguments: str) -> None:
    if not (work / kind).is_dir():
        command = [sys.executable, "-m", "isotrain", "prepare", kind, "--out", kind, *arguments]
        subprocess.run(command, cwd=work, check=True)


def make(chosen: Sequence[Pair], work: Path) -> int:
    work.mkdir(parents=True, exist_ok=True)
    prepare(work, "tiny", "--rows", str(ROWS))
    if any(pair.uses_smollm2 for pair in chosen):
        for kind in ("gsm8k", "gsm8k-sums"):
            prepare(work, kind, "--source", str(bench.gsm8k()))
        link = work / "SmolLM2-135M-Instruct"
        if not link.is_symlink():
            link.symlink_to(smollm2())
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
