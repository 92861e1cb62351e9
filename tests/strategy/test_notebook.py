"""The notebook of the documentation runs, in a kernel as Jupyter starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_the_notebook_trains(run_folder: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    found = re.search(r"(\d+) steps, loss (\S+) before and (\S+) after", shown)
    assert found, shown
    assert int(found[1]) == 24
    assert float(found[3]) < 0.5 * float(found[2])
    assert "train_loss" in shown
