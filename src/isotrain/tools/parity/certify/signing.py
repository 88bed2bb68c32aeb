"""Signatures of certificates, by the keys that people already have for ssh."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isotrain.errors import CertificateError, DataError
from isotrain.tools.parity.certify.certificate import MAX_BYTES, read_certificate
from isotrain.tools.parity.read.bounded import Source

# Whoever signs mail or commits with the same key has not signed a certificate by that.
NAMESPACE = "isotrain-certificate"
TRUSTED = Path(__file__).parents[1] / "trusted_signers"
_MAX_SIGNATURE, _MAX_SIGNERS = 64 << 10, 1 << 20
_SECONDS, _SECONDS_TO_TYPE = 20, 180
_MOST_NAMES = 10

SignatureState = Literal["unsigned", "signed", "unlisted", "wrong"]


@dataclass(frozen=True)
class Signature:
    state: SignatureState
    """`unlisted`: it fits the file, but the list of trusted signers does not say whose key it is."""
    by: str = ""
    """Who, as the list of signers has it; the key's fingerprint where it is not listed."""
    words: str = ""


def signature_path(certificate: Path) -> Path:
    return certificate.with_name(certificate.name + ".sig")


def sign(certificate: Path, key: Path) -> Path:
    """Signs a certificate that is right in itself; ssh-keygen asks for a passphrase on the terminal."""
    read_certificate(certificate)
    signature = signature_path(certificate)
    if signature.exists() or signature.is_symlink():
        raise CertificateError(f"{signature} is there already; delete it to sign again")
    if not key.is_file():
        raise CertificateError(f"--key {key}: no such file; `ssh-keygen -t ed25519` makes one")
    files = [str(key.absolute()), str(certificate.absolute())]
    done = _ssh_keygen(["-Y", "sign", "-n", NAMESPACE, "-f", *files], seconds=_SECONDS_TO_TYPE)
    if done.returncode != 0 or not signature.is_file():
        raise CertificateError(
            f"{certificate} could not be signed: {_last_words(done)}. A passphrase is asked for on the "
            "terminal; where there is none, `ssh-add` the key before and give its .pub file as --key"
        )
    return signature


def signature_of(certificate: Path, signers: Path | None = None) -> Signature:
    """Who signed it, by a list of trusted signers in ssh's format; by default the one in the package.

    A list that lies beside the file would be its sender's.
    """
    signature = signature_path(certificate)
    if not signature.exists():
        return Signature("unsigned", words="nobody signed it: a claim that anyone can write")
    Source(signature).whole(_MAX_SIGNATURE)
    data = Source(certificate).whole(MAX_BYTES)
    file = ["-s", str(signature.absolute())]
    fits = _ssh_keygen(["-Y", "check-novalidate", "-n", NAMESPACE, *file], data)
    if fits.returncode != 0:
        return Signature("wrong", words=f"{signature.name} is no signature of it: {_last_words(fits)}")
    if signers is not None and not signers.is_file():
        raise DataError(f"{signers}: no such list of signers")
    listed_by = "the list that isotrain comes with" if signers is None else str(signers)
    signers = TRUSTED if signers is None else signers
    Source(signers).whole(_MAX_SIGNERS)
    key = re.search(r"SHA256:[A-Za-z0-9+/=]+", fits.stdout.decode(errors="replace"))
    fingerprint = key.group() if key else "a key"
    listed = ["-f", str(signers.absolute())]
    names = _ssh_keygen(["-Y", "find-principals", *file, *listed])
    candidates = names.stdout.decode(errors="replace").splitlines() if names.returncode == 0 else []
    if not candidates:
        words = (
            f"signed with {fingerprint}, which is the key of nobody in {listed_by}: a claim of whoever has it"
        )
        return Signature("unlisted", fingerprint, words)
    for name in candidates[:_MOST_NAMES]:
        done = _ssh_keygen(["-Y", "verify", "-n", NAMESPACE, "-I", name, *file, *listed], data)
        if done.returncode == 0:
            return Signature("signed", name, f"signed by {name}, whom {listed_by} has")
    words = f"{listed_by} does not let {candidates[0]} sign this: {_last_words(done)}"
    return Signature("wrong", candidates[0], words)


def _ssh_keygen(
    arguments: Sequence[str], data: bytes = b"", seconds: float = _SECONDS
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["ssh-keygen", *arguments], input=data, capture_output=True, timeout=seconds)
    except FileNotFoundError as error:
        raise CertificateError("signatures need ssh-keygen: install OpenSSH 8.9 or newer") from error
    except subprocess.TimeoutExpired as error:
        raise CertificateError(f"ssh-keygen did not end within {seconds:g} seconds") from error
    except (OSError, ValueError) as error:
        raise CertificateError(f"ssh-keygen could not be run ({error})") from error


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    words = " ".join(said[-2:]) or f"ssh-keygen ended with {done.returncode}"
    return "".join(letter for letter in words if letter.isprintable()).rstrip(".")
