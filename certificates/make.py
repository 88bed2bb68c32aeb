"""Makes the certificates in this directory anew.

    python certificates/make.py --work DIR [PAIR ...]

A PAIR is such as sft, sft-npu, reinforce++-ring or smollm2-sft; by default all. Finished runs in DIR are used
again. SmolLM2's need GSM8K, see benchmarks/bench.py.
"""

from __future__ import annotations

import argparse
import os
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

from isotrain.tools.parity.certify.contributed import contributed, recipe_of  # noqa: E402

# Reruns of the reference, where the truth does not decide.
MEMBERS = 4
ROWS = 1000
_TINY = ("trainer.steps=60",)
_VLLM = ("rollout.engine=vllm",)
_SMOLLM2 = (
    *("model.path=SmolLM2-135M-Instruct", "data.validation=null"),
    *("trainer.save_every=0", "trainer.validate_every=0", "trainer.validate_first=false"),
)
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    # A small batch: one core trains each of the runs.
    "smollm2-sft": (
        "gsm8k-sft-lora",
        (
            *(*_SMOLLM2, "data.train=gsm8k/train.parquet", "data.batch_size=2", "trainer.steps=16"),
            *("device.ranks=1", "model.lora=null", "optimizer.lr=2e-5"),
        ),
    ),
    # Of fewer responses none is right in the first step, and it would train nothing.
    "smollm2-grpo": ("gsm8k-grpo", (*_SMOLLM2, "data.train=gsm8k-sums/train.jsonl", "trainer.steps=8")),
}
"""Beside those that `isotrain parity contribute` trains."""
SIMULATED = ("sft", "dpo", "grpo")
# Two ranks that compute each micro-batch together, against one rank.
CONTEXT = {
    f"reinforce++-{way}": ("reinforce++", ("device.mesh.context=2", f"device.mesh.context_attention={way}"))
    for way in ("ring", "ulysses")
}


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
    """The two best instruction sets of every processor that we had."""
    hosts = "cpu-avx2,cpu-avx512"
    found = [Pair(name, name, hosts, ("model.dtype=float32",)) for name in (*contributed([]), *RECIPES)]
    found += [Pair(f"{name}-npu", name, "cpu,npu", ("model.dtype=float32",)) for name in SIMULATED]
    found += [
        Pair(name, algorithm, "cpu,cpu", ("model.dtype=float32",), ("device.ranks=2", *mesh))
        for name, (algorithm, mesh) in CONTEXT.items()
    ]
    return {pair.name: pair for pair in found}


def certify(pair: Pair, work: Path) -> int:
    if pair.uses_smollm2:
        recipe, settings = RECIPES[pair.algorithm]
    else:
        recipe, changes = recipe_of(pair.algorithm, Path("tiny/model"), Path("tiny"))
        settings = (*changes, *_TINY, *(_VLLM if "rollout.engine=hf" in changes else ()))
    command = [
        *(sys.executable, "-m", "isotrain", "parity", "certify", recipe, *settings, *pair.settings),
        *("--devices", pair.devices, "--members", str(MEMBERS)),
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


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("pairs", nargs="*", choices=[*pairs(), []])
    given = options.parse_args()
    return make([pairs()[name] for name in given.pairs or pairs()], given.work.resolve())


if __name__ == "__main__":
    sys.exit(main())
