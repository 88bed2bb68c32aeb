"""The contract with the reference engine: `python hf_child.py WORK`."""

from __future__ import annotations

import sys
from pathlib import Path

from contract_checks import Checks

if __name__ == "__main__":
    Checks(Path(sys.argv[1]), "hf").run()
