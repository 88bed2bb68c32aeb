"""Signatures, with the real ssh-keygen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from certified_runs import rewrite, written
from isotrain.errors import CertificateError, DataError
from isotrain.tools.parity.certify import signing
from isotrain.tools.parity.certify.signing import NAMESPACE, sign, signature_of, signature_path

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def make_key(path: Path, passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=60)
    return path


def listed(path: Path, key: Path, name: str = "lab@example.org", options: str = "") -> Path:
    public = key.with_name(key.name + ".pub").read_text().strip()
    path.write_text(f"# who may sign\n\n{name} {options} {public}\n")
    return path


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "key")


def test_knows_listed_signers(certificate: Path, key: Path) -> None:
    assert signature_of(certificate).state == "unsigned"
    assert sign(certificate, key) == signature_path(certificate)
    signers = listed(certificate.parent / "allowed_signers", key, options=f'namespaces="{NAMESPACE}"')
    found = signature_of(certificate, signers)
    assert (found.state, found.by) == ("signed", "lab@example.org")
    assert signature_of(certificate).state == "unlisted", "a list that lies beside it is its sender's"
    with pytest.raises(CertificateError, match="delete it to sign again"):
        sign(certificate, key)


@pytest.mark.parametrize("content", ["", "# nobody yet\n"])
def test_a_list_without_entries_vouches_for_nobody(
    tmp_path: Path, certificate: Path, key: Path, content: str
) -> None:
    sign(certificate, key)
    signers = tmp_path / "signers"
    signers.write_text(content)
    found = signature_of(certificate, signers)
    assert found.state == "unlisted" and found.by.startswith("SHA256:")


def test_trusted_signers_come_with_the_package(
    certificate: Path, key: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert signing.TRUSTED.is_file()
    sign(certificate, key)
    monkeypatch.setattr(signing, "TRUSTED", listed(tmp_path / "trusted", key))
    assert signature_of(certificate).state == "signed"


def test_refuses_wrong_signatures(tmp_path: Path, certificate: Path, key: Path) -> None:
    signers = listed(tmp_path / "signers", key)
    sign(certificate, key)
    assert signature_of(certificate, signers).state == "signed"
    # A content that is right in itself, but not the one that was signed.
    rewrite(certificate, lambda content: content.update(date="2026-08-15T00:00:00Z"))
    assert signature_of(certificate, signers).state == "wrong"
    signature_path(certificate).write_bytes(b"\xff no signature")
    assert signature_of(certificate, signers).state == "wrong"
    signature_path(certificate).unlink()
    sign(certificate, make_key(tmp_path / "stranger"))
    found = signature_of(certificate, signers)
    assert found.state == "unlisted" and "the key of nobody in" in found.words


@pytest.mark.parametrize("options", ['namespaces="git"', 'valid-before="20200101"'])
def test_a_key_that_is_listed_for_something_else(
    tmp_path: Path, certificate: Path, key: Path, options: str
) -> None:
    sign(certificate, key)
    assert signature_of(certificate, listed(tmp_path / "signers", key, options=options)).state != "signed"


def test_refuses_a_signature_for_something_else(tmp_path: Path, certificate: Path, key: Path) -> None:
    command = ["ssh-keygen", "-Y", "sign", "-n", "git", "-f", str(key), str(certificate)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    assert signature_of(certificate, listed(tmp_path / "signers", key)).state == "wrong"


def test_only_what_is_right_in_itself_is_signed(certificate: Path, key: Path) -> None:
    rewrite(certificate, lambda content: content.update(date="2026-08-15T00:00:00Z"), seal=False)
    with pytest.raises(DataError, match="digest"):
        sign(certificate, key)
    assert not signature_path(certificate).exists()


def test_says_what_cannot_be_signed(
    tmp_path: Path, certificate: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CertificateError, match="no such file"):
        sign(certificate, tmp_path / "absent")
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(CertificateError, match="could not be signed"):
        sign(certificate, tmp_path / "text")
    sign(certificate, key)
    with pytest.raises(DataError, match="no such list"):
        signature_of(certificate, tmp_path / "absent")
    signature_path(certificate).write_bytes(b"x" * 100_000)
    with pytest.raises(DataError, match="larger than"):
        signature_of(certificate)
    signature_path(certificate).unlink()
    os.mkfifo(signature_path(certificate))
    with pytest.raises(DataError, match="regular file"):
        signature_of(certificate)
    signature_path(certificate).unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CertificateError, match="install OpenSSH"):
        sign(certificate, key)


def test_stops_a_tool_that_hangs(
    tmp_path: Path, certificate: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "ssh-keygen"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(signing, "_SECONDS_TO_TYPE", 0.3)
    with pytest.raises(CertificateError, match=r"did not end within 0\.3 seconds"):
        sign(certificate, key)


def test_refuses_a_passphrase_without_a_terminal(tmp_path: Path, certificate: Path) -> None:
    key = make_key(tmp_path / "locked", "a passphrase")
    code = "import sys; from isotrain.cli.main import main; sys.argv[0] = 'isotrain'; main()"
    command = [sys.executable, "-c", code, "parity", "sign", str(certificate), "--key", str(key)]
    hidden = {"DISPLAY", "WAYLAND_DISPLAY", "SSH_ASKPASS", "SSH_AUTH_SOCK"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, start_new_session=True, env=environment
    )
    assert done.returncode == 2 and "passphrase" in done.stderr and "ssh-add" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not signature_path(certificate).exists()
