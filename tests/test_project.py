"""Notebooks, modules, settings and stored outputs say the same. Each check is also shown to be able to fail."""

import copy
import json
import shutil
from pathlib import Path

import nbformat
import pytest

from memloc.notebooks import (
    STAGE_CONFIGS,
    check_clean,
    check_parameters,
    check_sync,
    compare_outputs,
    execute,
    project_notebooks,
)

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = project_notebooks(ROOT)
STAGES = [path for path in NOTEBOOKS if path.stem in STAGE_CONFIGS]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT/"nbs").with_suffix("").as_posix()


@pytest.fixture
def copied(tmp_path):
    "A copy of the project's notebooks and modules, to be broken."
    for name in ("nbs", "memloc"):
        shutil.copytree(ROOT/name, tmp_path/name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT/name, tmp_path/name)
    return tmp_path


def test_modules_are_what_the_notebooks_export():
    assert check_sync(ROOT) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_is_clean(path):
    assert check_clean(path, ROOT) == []


def test_every_stage_has_its_notebook():
    assert sorted(path.stem for path in STAGES) == sorted(STAGE_CONFIGS)


@pytest.mark.parametrize("path", STAGES, ids=name_of)
def test_parameters_cell_equals_the_dataclass(path):
    assert check_parameters(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_stored_outputs_are_true(path):
    assert compare_outputs(nbformat.read(path, as_version=4), execute(path)) == []


class TestTheChecksCanFail:
    def test_a_module_edited_by_hand(self, copied):
        module = copied/"memloc"/"artifacts.py"
        module.write_text(module.read_text().replace('"Checksum of a file\'s bytes."', '"Checksum."'))
        (problem,) = check_sync(copied)
        assert problem.startswith("memloc/artifacts.py: line ") and "'\"Checksum.\"'" in problem

    def test_a_notebook_edited_but_not_exported(self, copied):
        path = copied/"nbs"/"parts"/"artifacts.ipynb"
        path.write_text(path.read_text().replace("Checksum of a file's bytes.", "Checksum."))
        (problem,) = check_sync(copied)
        assert problem.startswith("memloc/artifacts.py: line ")

    def test_a_module_without_notebook_and_one_that_is_missing(self, copied):
        (copied/"memloc"/"artifacts.py").rename(copied/"memloc"/"stray.py")
        assert check_sync(copied) == ["memloc/stray.py: no notebook exports it",
                                      "memloc/artifacts.py: missing; run `make sync`"]

    @pytest.mark.parametrize("path", STAGES, ids=name_of)
    def test_each_parameter_renamed_changed_or_untagged(self, copied, path):
        path = copied/path.relative_to(ROOT)
        notebook = json.loads(path.read_text())
        (cell,) = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
        lines = "".join(cell["source"]).splitlines(keepends=True)
        for number, line in enumerate(lines):
            key, sign, _ = line.partition(" = ")
            if not sign:
                continue
            for broken in ("", f"{key}_ = 0\n", f"{key} = 'something else'\n"):
                cell["source"] = [*lines[:number], broken, *lines[number + 1:]]
                path.write_text(json.dumps(notebook))
                assert check_parameters(path), f"unnoticed: {line!r} -> {broken!r}"
        cell["source"], cell["metadata"] = lines, {}
        path.write_text(json.dumps(notebook))
        assert check_parameters(path) == [f"{path.name}: no cell is tagged `parameters`"]

    @pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
    def test_any_stored_output_edited_or_removed(self, path):
        fresh = nbformat.read(path, as_version=4)
        texts = 0
        for number, cell in enumerate(fresh.cells):
            for place in range(len(cell.get("outputs", []))):
                stored = nbformat.read(path, as_version=4)
                output = stored.cells[number].outputs[place]
                if "text" in output:
                    output.text = "edited " + output.text
                elif "text/plain" in output.data:
                    output.data["text/plain"] = "edited " + output.data["text/plain"]
                assert compare_outputs(stored, fresh), f"unnoticed: cell {number}"
                del stored.cells[number].outputs[place]
                assert compare_outputs(stored, fresh), f"unnoticed: cell {number}"
                texts += 1
        assert texts, f"{path.name} stores no outputs; run `make outputs`"

    def test_a_number_edited_in_a_stored_output(self, tmp_path, write_notebook):
        path = write_notebook(tmp_path/"a.ipynb", "print('recall@3', 0.8125, 'of', 1982, 'questions')")
        fresh = execute(path)
        for old, new in (("0.8125", "0.8225"), ("1982", "1983"), ("recall", "precision"), ("@3", "@5")):
            stored = copy.deepcopy(fresh)
            stored.cells[0].outputs[0].text = stored.cells[0].outputs[0].text.replace(old, new)
            assert len(compare_outputs(stored, fresh)) == 1, f"unnoticed: {old} -> {new}"

    def test_a_notebook_that_is_not_clean(self, copied):
        path = copied/"nbs"/"parts"/"artifacts.ipynb"
        notebook = nbformat.read(path, as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        code[0].execution_count = 3
        code[1].metadata["collapsed"] = True
        code[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="saved to /home/nora/run\n"),
                           nbformat.v4.new_output("stream", name="stderr", text="a warning\n")]
        path.write_text(nbformat.writes(notebook) + "\n")
        problems = check_clean(path, copied)
        assert len(problems) == 3
        for problem, part in zip(problems, ("not clean", "'/home/n'", "error or its stream"), strict=True):
            assert part in problem
