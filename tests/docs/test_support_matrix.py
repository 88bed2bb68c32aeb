"""The support matrix: every row from a file, simulated devices told as such, no damage passed over."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support_matrix import main, published_figures, render

from certified_runs import MESHED, SIMULATED, written
from isotrain.errors import DataError
from isotrain.tools.parity.certify import signing
from isotrain.tools.parity.certify.signing import sign

pytestmark = pytest.mark.heavy

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"


def rows(page: str) -> list[list[str]]:
    """Cells of the first table."""
    lines = [line for line in page.split("## What they ran on")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert main(["--check", str(PAGE)]) == 0, (
        "run `python docs/tools/support_matrix.py docs/support-matrix.md`"
    )


def test_says_that_there_are_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("not a certificate")
    page = render(tmp_path)
    assert "no certificates yet" in page and "| " not in page
    with pytest.raises(DataError, match="no such directory"):
        render(tmp_path / "absent")


def test_a_row_has_the_figures_of_its_certificate(tmp_path: Path) -> None:
    path = written(tmp_path)
    page = render(path.parent)
    head, row = rows(page)
    cells = dict(zip(head, row, strict=True))
    assert cells == {
        "algorithm": "sft",
        "model": "Tiny-1 (1.23 M parameters), bfloat16",
        "reference": "cpu-amx",
        "candidate": "cpu-avx512",
        "engine": "none",
        "kind": "paired",
        "steps": "12",
        "loss error, hundredths": "0.0193",
        "published by others, hundredths": "0.19",
        "loss error, relative, %": cells["loss error, relative, %"],
        "reward error, hundredths": "0.01",
        "throughput, candidate / reference": "1",
        "same at": "P1, P3 (P2 left it open)",
        "not run": "P0",
        "outcome": "equivalent",
        "computation": "same",
        "date": "2026-08-14",
        "standing": "**claimed**",
        "certificate": f"[{path.stem[-8:]}](../certificates/{path.name})",
    }
    assert "A Processor (R)" in page and "torch 2.13.0+cpu" in page and "OMP\\_NUM\\_THREADS=2" in page
    assert "pyarrow" not in page and "OpenRLHF" in page and "not comparable" in page
    assert "no certificates" not in page and "(simulated)" not in page


def test_simulated_devices_say_so_in_the_table(tmp_path: Path) -> None:
    page = render(written(tmp_path, candidate=SIMULATED).parent)
    assert "never the hardware's numerics" in page.split("##")[0]
    [row] = rows(page)[1:]
    assert row[2:4] == ["cpu-amx", "npu **(simulated)**"]


def test_a_mesh_is_in_the_table(tmp_path: Path) -> None:
    recipe = {"algorithm": {"name": "reinforce++"}}
    page = render(written(tmp_path, candidate=MESHED, recipe=recipe).parent)
    head, row = rows(page)
    cells = dict(zip(head, row, strict=True))
    assert cells["reference"] == "cpu-amx" and cells["candidate"] == "cpu, context 2 (ring)"
    assert cells["not run"] == "P0, P1" and cells["published by others, hundredths"] == "4.95"
    assert "| candidate: cpu, context 2 (ring) |" in page


def test_order_and_what_is_missing(tmp_path: Path) -> None:
    directory = tmp_path / "all"
    directory.mkdir()
    for number, algorithm in enumerate(("sft", "remax", "grpo")):
        recipe = {"algorithm": {"name": algorithm}}
        path = written(tmp_path / str(number), recipe=recipe, reward=number == 0)
        shutil.copy(path, directory)
    found = rows(render(directory))[1:]
    assert [row[0] for row in found] == ["grpo", "remax", "sft"]
    assert found[1][12] == "-" and found[0][12] == "0.61", "nobody has published one for remax"
    assert found[0][14] == "-" and found[2][14] == "0.01"


def test_damage_ends_the_page_with_the_files_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    page = tmp_path / "page.md"
    assert main([str(page)], path.parent) == 0 and main(["--check", str(page)], path.parent) == 0
    before = page.read_text()
    text = path.read_text()
    for change in (text[:-9], text.replace("AVX512_CORE_AMX", "AVX512_CORE_MAX"), "{}"):
        path.write_text(change)
        assert main([str(page)], path.parent) == 1
        assert path.name in capsys.readouterr().err and page.read_text() == before
    path.write_text(text)
    path.rename(path.with_name("grpo-large-model.json"))
    assert main([str(page)], path.parent) == 1
    assert "its content's name is sft-tiny-1" in capsys.readouterr().err


def test_text_of_strangers_stays_in_its_cell(tmp_path: Path) -> None:
    hostile = "x | y](http://a) <script>alert(1)</script> **b** `c` \\"
    page = render(written(tmp_path, recipe={"model": {"path": hostile, "dtype": hostile}}).parent)
    assert "<script>" not in page and "](http" not in page and "**b**" not in page and "`c`" not in page
    assert all(len(row) == 19 for row in rows(page))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_shows_who_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
    sign(path, key)
    public = (tmp_path / "key.pub").read_text()
    (path.parent / "allowed_signers").write_text(f"lab@example.org {public}")
    assert rows(render(path.parent))[1][6] == "**claimed**", "a list beside the file is its sender's"
    monkeypatch.setattr(signing, "TRUSTED", path.parent / "allowed_signers")
    assert rows(render(path.parent))[1][6] == "signed by lab@example.org"
    (tmp_path / "certificates" / f"{path.name}.sig").write_text("no signature")
    with pytest.raises(DataError, match="signature"):
        render(path.parent)


def test_published_figures_stay_as_published() -> None:
    assert published_figures()["loss_error_hundredths"] == {
        "sft": 0.19,
        "dpo": 1.81,
        "kto": 0.37,
        "rm": 0.85,
        "prm": 1.61,
        "ppo": 1.85,
        "reinforce++": 1.94,
        "grpo": 0.61,
    }
