"""The contract with a real SGLang server on the CPU: `python sglang_child.py WORK PYTHON_OF_SGLANG`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from contract_checks import Checks, requests

from isotrain.rollout.base import Sampling
from isotrain.rollout.sglang import SglangEngine


class SglangChecks(Checks):
    engine: SglangEngine

    def death(self) -> None:
        """Last: nothing but a new engine follows."""
        iterator = self.engine.generate(requests(8), Sampling(max_tokens=40))
        next(iterator)
        os.killpg(self.engine._server.pid, signal.SIGKILL)
        self.results["death"] = {
            "first": self.error(lambda: list(iterator)),
            "then": self.error(lambda: self.engine.logps([requests(1)[0].prompt_P])),
        }


if __name__ == "__main__":
    checks = SglangChecks(Path(sys.argv[1]), "sglang", server_python=sys.argv[2])
    checks.results["settings"] = checks.engine.settings
    checks.run(checks.death)
