"""`isotrain parity verify` and `isotrain parity sign` as people see them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from certified_runs import rewrite, written
from isotrain.cli.main import app


def parity(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_consistent_certificate_is_verified(tmp_path: Path) -> None:
    path = written(tmp_path)
    result = parity("verify", path)
    assert result.exit_code == 0 and "\nconsistent\n" in result.output
    assert "nobody signed it" in result.output
    runs = tmp_path / "runs"
    result = parity("verify", path, "--reference", runs / "reference", "--candidate", runs / "candidate")
    assert result.exit_code == 0 and "inputs of candidate" in result.output, result.output
    result = parity("verify", path, "--reference", runs / "candidate")
    assert result.exit_code == 1 and "WRONG  inputs of reference" in result.output


def test_an_inconsistent_certificate_is_refused(tmp_path: Path) -> None:
    path = rewrite(written(tmp_path), lambda content: content["figures"].update(loss_error=0.0), seal=False)
    result = parity("verify", path)
    assert result.exit_code == 1 and "WRONG  digest" in result.output and "was changed" in result.output
    assert "INCONSISTENT" in result.output
    result = parity("verify", tmp_path / "absent.json")
    assert result.exit_code == 1 and "absent.json" in result.output and "Traceback" not in result.output


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_signature_says_who_signed(tmp_path: Path) -> None:
    path, key = written(tmp_path), tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
    result = parity("sign", path, "--key", key)
    assert result.exit_code == 0 and f"{path.name}.sig" in result.output
    signers = tmp_path / "signers"
    signers.write_text(f"lab@example.org {(tmp_path / 'key.pub').read_text()}")
    result = parity("verify", path, "--allowed-signers", signers)
    assert result.exit_code == 0 and "signed by lab@example.org" in result.output
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{key}2"], check=True, timeout=60)
    strangers = tmp_path / "strangers"
    strangers.write_text(f"lab@example.org {(tmp_path / 'key2.pub').read_text()}")
    result = parity("verify", path, "--allowed-signers", strangers)
    assert result.exit_code == 1 and "is the key of nobody in" in result.output
    assert "NOT SIGNED by anybody in the list" in result.output
    assert parity("verify", path).exit_code == 0, "nobody has said whose signature is asked for"
    path.write_text(path.read_text() + "\n")
    result = parity("verify", path, "--allowed-signers", signers)
    assert result.exit_code == 1 and "is no signature of it" in result.output
    Path(f"{path}.sig").unlink()
    result = parity("verify", path, "--allowed-signers", signers)
    assert result.exit_code == 1 and "nobody signed it" in result.output
    path.with_name(f"{path.name}.sig").touch()
    result = parity("sign", path, "--key", key)
    assert result.exit_code == 2 and "delete it to sign again" in result.output


@pytest.mark.heavy
def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:1] = ['parity', 'verify'];"
        "from isotrain.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, str(written(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
