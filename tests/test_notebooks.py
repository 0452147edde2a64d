"""The notebooks of docs/ run from top to bottom, and carry nothing of the machine they were written on."""

import nbformat
import pytest
from nbclient import NotebookClient

from grpo_rl.recipes import PACKAGE

DOCS = PACKAGE.parent / "docs"
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises with the cell and its error
    left = {path.name for path in tmp_path.iterdir()} - {"MUJOCO_LOG.TXT"}  # MuJoCo's own log of warnings
    assert not left, "a notebook writes into a temporary folder of its own"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), f"clear the outputs of: {cell.source[:60]}"
        assert cell.get("execution_count") is None
        assert not any(word in cell.source for word in ("/home/", "/Users/", "/root/", "C:\\"))


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["language", "quickstart"]
