"""Every notebook runs from top to bottom on a CPU, and is stored without what it printed."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BEFORE = """
from tests import demo
compiling = demo.compiling_once()
compiling.__enter__()
"""


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def path(request):
    return request.param


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert code_cells(notebook)
    assert not [cell for cell in code_cells(notebook) if cell.outputs or cell.execution_count]


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(path, monkeypatch):
    """Its own cells as they are, after one that has executables compiled when they are called."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # compiled as for its readers
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEFORE))
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    client.execute()
    assert any(cell.outputs for cell in code_cells(notebook))
