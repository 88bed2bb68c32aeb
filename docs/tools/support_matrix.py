"""Write the support matrix from certificates: `python docs/tools/support_matrix.py PATH`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isotrain.errors import DataError, IsotrainError
from isotrain.recipe.reference import page_command, table_row
from isotrain.tools.parity.certify.certificate import Certificate, CertifiedSide, read_certificate
from isotrain.tools.parity.certify.signing import Signature, signature_of
from isotrain.tools.parity.devices import uses_ring
from isotrain.tools.parity.levels.level import LEVELS

CERTIFICATES = Path(__file__).parents[2] / "certificates"
_PUBLISHED = Path(__file__).with_name("published_figures.yaml")

_HEAD = """# Support matrix

[中文](zh/support-matrix.md)

Which pairs of devices have a certificate that they train the same, on what, with which error. No row is of an
accelerator unless it names one. Every row is one file in [`certificates/`](../certificates); this page is
generated from those files alone, by
`python docs/tools/support_matrix.py docs/support-matrix.md`. A row that is *claimed* has no
signature of a [trusted signer](../src/isotrain/tools/parity/trusted_signers): anyone can write such a file.

**A simulated device exercises code paths, never the hardware's numerics.** Rows of one say *simulated*.

What the levels ask is told in [parity.md](parity.md). `isotrain parity verify FILE` says whether a
certificate is as it was made and who signed it, and with the runs' directories whether it is about them.
"""
_NONE = "There are no certificates yet: no pair of devices has been shown to train the same.\n"
# Versions that decide numbers; the certificate has the others as well.
_SHOWN_PACKAGES = ("isotrain", "torch", "transformers", "vllm", "sglang", "triton", "flash-attn", "numpy")
# Text of certificates is a stranger's: it must stay text, in its cell.
_ENTITIES = {letter: f"&#{ord(letter)};" for letter in "&<>|\\`*[]~!#"}
_ENTITIES["_"] = "\\_"  # common in names, and a page's source is read too


@dataclass(frozen=True)
class _MatrixEntry:
    name: str
    certificate: Certificate
    signature: Signature


def render(directory: Path = CERTIFICATES) -> str:
    """The whole page as Markdown; a certificate that is not valid ends it with that file's name."""
    entries = sorted(_entries(directory), key=_order)
    if not entries:
        return "\n".join([_HEAD, _NONE])
    return "\n".join([_HEAD, *_matrix(entries), *_sides(entries)])


def _entries(directory: Path) -> Iterator[_MatrixEntry]:
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; certificates are in isotrain's repository")
    for path in sorted(directory.glob("*.json")):
        certificate, signature = read_certificate(path), signature_of(path)
        if signature.state == "wrong":
            raise DataError(f"{path.name}: signature: {signature.words}")
        if path.name != certificate.file_name:
            raise DataError(f"{path.name}: its content's name is {certificate.file_name}")
        yield _MatrixEntry(path.name, certificate, signature)


def _order(entry: _MatrixEntry) -> tuple[str, ...]:
    certificate = entry.certificate
    subject = certificate.subject
    pair = (certificate.reference.label, certificate.candidate.label)
    return (subject.algorithm, subject.model, *pair, subject.kind, certificate.date, entry.name)


def _matrix(entries: Sequence[_MatrixEntry]) -> Iterator[str]:
    published = published_figures()
    yield "## Pairs with a certificate\n"
    yield from _table([_pair(entry, published) for entry in entries])
    yield (
        "Errors are means of absolute differences; hundredths are of the metric's own unit, which others "
        "write as %. What others published is not comparable in its setting (other models, data, devices) "
        f"and not verified by us. It is from: {_cell(published['source'])}."
    )
    yield ""
    yield from (f"- {name}: {title}: {question}" for name, (title, question) in LEVELS.items())
    yield ""


def _table(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    yield table_row(*rows[0])
    yield "|" + "---|" * len(rows[0])
    yield from (table_row(*row.values()) for row in rows)
    yield ""


def _pair(entry: _MatrixEntry, published: dict[str, Any]) -> dict[str, str]:
    certificate = entry.certificate
    ring = uses_ring(certificate.candidate.settings)
    errors = published["with_ring_attention_hundredths" if ring else "loss_error_hundredths"]
    subject, figures, signed = certificate.subject, certificate.figures, entry.signature
    return {
        "algorithm": _cell(subject.algorithm),
        "model": _cell(_model(certificate)),
        "reference": _device(certificate.reference),
        "candidate": _device(certificate.candidate),
        "outcome": certificate.outcome.verdict,
        "computation": certificate.computation,
        "standing": f"signed by {_cell(signed.by)}" if signed.state == "signed" else "**claimed**",
        "certificate": _link(entry.name),
        "kind": _kind(certificate),
        "engine": subject.engine,
        "steps": str(figures.steps),
        "loss error, hundredths": _number(figures.loss_error),
        "published by others, hundredths": _number(errors.get(subject.algorithm)),
        "loss error, relative, %": _number(figures.loss_relative),
        "reward error, hundredths": _number(figures.reward_error),
        "throughput, candidate / reference": _number(figures.throughput_ratio),
        "same at": _same_at(certificate),
        "not run": ", ".join(level.name for level in certificate.levels if level.state == "not run") or "-",
        "date": certificate.date[:10],
    }


def _sides(entries: Sequence[_MatrixEntry]) -> Iterator[str]:
    yield "## What they ran on\n"
    yield from _table(
        [_side(entry.name, role, side) for entry in entries for role, side in entry.certificate.sides.items()]
    )


def _side(name: str, role: str, side: CertifiedSide) -> dict[str, str]:
    return {
        "certificate": _link(name),
        "side": f"{role}: {_device(side)}",
        "hardware": _cell(side.device),
        "ranks": str(side.ranks or "unknown"),
        "isotrain at": _cell(side.commit or "unknown"),
        "versions": _cell(_versions(side)),
        "variables": _cell(", ".join(f"{k}={value}" for k, value in sorted(side.variables.items()))) or "-",
    }


@functools.cache
def published_figures() -> dict[str, Any]:
    """Loss errors that others state, and where."""
    content = yaml.safe_load(_PUBLISHED.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _model(certificate: Certificate) -> str:
    subject = certificate.subject
    count = subject.parameters
    size = "" if count is None else f" ({count / 1e6:.3g} M parameters)"
    return f"{subject.model}{size}, {subject.dtype}"


def _device(side: CertifiedSide) -> str:
    name = f"{side.label.removesuffix('-simulated')} **(simulated)**" if side.simulated else side.label
    return f"{name}, {side.mesh}" if side.mesh else name


def _kind(certificate: Certificate) -> str:
    allowed = ", ".join(certificate.allowed)
    return certificate.subject.kind + (f" (allowed to differ: {_cell(allowed)})" if allowed else "")


def _same_at(certificate: Certificate) -> str:
    names = {
        state: ", ".join(level.name for level in certificate.levels if level.state == state)
        for state in ("same", "cannot tell")
    }
    return names["same"] + (f" ({names['cannot tell']} left it open)" if names["cannot tell"] else "")


def _versions(side: CertifiedSide) -> str:
    shown = {
        name: version
        for name, version in side.packages.items()
        if any(name == known or name.startswith(f"{known}-") for known in _SHOWN_PACKAGES)
    }
    return ", ".join(f"{name} {version}" for name, version in sorted(shown.items()))


def _link(name: str) -> str:
    return f"[{name.removesuffix('.json')[-8:]}](../certificates/{name})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _cell(text: str) -> str:
    return "".join(_ENTITIES.get(letter, letter) for letter in text)


def main(arguments: Sequence[str] | None = None, directory: Path = CERTIFICATES) -> int:
    try:
        return page_command("python docs/tools/support_matrix.py", lambda: render(directory), arguments)
    except IsotrainError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
