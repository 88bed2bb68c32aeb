"""The notebook of the examples, executed cell by cell in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_the_quickstart(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "strip the outputs: they are made again below"
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    told = [text_of(cell) for cell in code]
    assert "step 20/20" in told[2] and "step-00000020" in told[2]
    assert any("image/png" in output.get("data", {}) for output in code[3].outputs)
    assert "Outcome: equivalent." in told[4] and "Computation: the same." in told[4]
    assert "Computation: different. the recipes differ: seed: 42 -> 1" in told[5]
    assert (tmp_path / "work" / "tiny-trained" / "config.json").is_file()


def text_of(cell: Any) -> str:
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(texts)
