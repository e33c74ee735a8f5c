"""Environment of the tests: offline, few threads, a vector cache of their own."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("MPLBACKEND", "agg")
_cache = tempfile.TemporaryDirectory(prefix="memloc-cache-")
os.environ.setdefault("MEMLOC_CACHE", _cache.name)

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from memloc.notebooks import clean_outputs

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    "The project folder."
    return ROOT


@pytest.fixture(scope="session")
def write_notebook():
    "Writes a notebook of code cells; a cell given as a pair (source, tag) gets the tag."
    def write(path: Path, *cells) -> Path:
        pairs = [cell if isinstance(cell, tuple) else (cell, None) for cell in cells]
        notebook = new_notebook(cells=[new_code_cell(source, id=f"c{i}", metadata={"tags": [tag]} if tag else {})
                                       for i, (source, tag) in enumerate(pairs)])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nbformat.writes(clean_outputs(notebook)) + "\n", "utf-8")
        return path
    return write
