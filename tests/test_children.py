"""Children of isotrain import what is installed, and not what lies in the working directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isotrain.children import module_command


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no switch for it")
def test_a_file_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("json", "argparse", "isotrain"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    command = module_command("isotrain", "--help")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr
    command.remove("-P")
    unsafe = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "imported from the working directory" in unsafe.stderr
