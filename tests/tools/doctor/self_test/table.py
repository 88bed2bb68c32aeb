"""Prints the rows of docs/self-test.md: the self-test on a device, or the verdicts on injected faults.

PYTHONPATH=tests:tests/device python tests/tools/doctor/self_test/table.py npu | cpu | FAULT ... | faults
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import npusim
from test_faults import FAULTS, verdicts

from isotrain.tools.doctor.self_test.run import SelfTest
from isotrain.tools.doctor.self_test.stages import STAGES
from isotrain.tools.doctor.self_test.verdicts import Engine, SelfTestSetting


def stages(device: str, work: str) -> None:
    if device == "npu":
        (Path(work) / "machine").mkdir()
        os.environ |= npusim.environment(2, host=Path(work) / "machine")
    # vLLM has no build for the simulated device.
    engine: Engine = "vllm" if device == "cpu" and find_spec("vllm") else "hf"
    print(f"| stage | {device}, {engine} | seconds |", "|---|---|---|", sep="\n")
    seconds = 0.0
    for verdict in SelfTest(SelfTestSetting(device=device, engine=engine, work=work)).run():
        seconds += verdict.seconds
        print(
            f"| `{verdict.stage}` | {verdict.outcome}: {verdict.result} | {verdict.seconds:.0f} |", flush=True
        )
    print(f"| {len(STAGES)} stages | | {seconds:.0f} |")


def faults(names: list[str]) -> None:
    known = {fault.name: fault for fault in FAULTS}
    for name in known if names == ["faults"] else names:
        fault = known[name]
        with tempfile.TemporaryDirectory() as directory:
            work = Path(directory) / "work"
            work.mkdir()
            verdict = verdicts(fault, work)[fault.stage]
        named = verdict.outcome == "failed" and fault.words in verdict.result
        print(f"| {fault.what} | `{fault.stage}` | {verdict.result if named else 'NOT NAMED'} |", flush=True)


def main(arguments: list[str]) -> None:
    if arguments in (["npu"], ["cpu"]):
        with tempfile.TemporaryDirectory() as work:
            stages(arguments[0], work)
    elif arguments:
        faults(arguments)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
