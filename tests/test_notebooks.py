"""The notebooks run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_which_there_are() -> None:
    assert [path.name for path in NOTEBOOKS] == ["check-your-model.ipynb", "tour.ipynb"]


@pytest.mark.filterwarnings("ignore")  # of the notebook machinery; cells raise on their own errors
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    done = nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    images = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(images) >= 3
