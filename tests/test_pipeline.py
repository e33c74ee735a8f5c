"""The pipeline on a toy project of two stages."""

import os
import shutil
import subprocess
import sys
import time

import nbformat
import polars as pl
import pytest

import memloc
from memloc.artifacts import read_json, write_table
from memloc.pipeline import StageError, load_profile, run_profile

IMPORTS = "import polars as pl\nfrom pathlib import Path\nfrom memloc.artifacts import Stage, stage_table"
SQUARES = """if run_dir:
    lines = Path(data).read_text().splitlines() if data else []
    with Stage(run_dir, "squares", {"n": n}, [data] if data else []) as stage:
        stage.table("squares", pl.DataFrame({"i": range(n), "square": [i*i for i in range(n)]}), "i")
        stage.json("lines", lines)"""
TOTAL = """if run_dir:
    with Stage(run_dir, "total", {"scale": scale}) as stage:
        total = scale*stage_table(run_dir, "squares", "squares")["square"].sum()
        stage.json("report", {"total": total})
        stage.table("rows", pl.DataFrame({"metric": ["total"], "value": [total]}), "metric")"""
PROFILE = """description: Squares and their sum
stages:
  - {notebook: 00_squares.ipynb, stage: squares, parameters: {n: 5}}
  - {notebook: 01_total.ipynb, stage: total}
"""


def write_second(write_notebook, folder, work=TOTAL):
    cells = IMPORTS, ("run_dir = ''\nscale = 1.0\nshared = 0", "parameters"), work
    write_notebook(folder/"nbs"/"01_total.ipynb", *cells)


def make_project(folder, write_notebook):
    "A project folder with two stage notebooks and one profile."
    cells = IMPORTS, ("run_dir = ''\nn = 4\ndata = ''\nshared = 0", "parameters"), SQUARES
    write_notebook(folder/"nbs"/"00_squares.ipynb", *cells)
    write_second(write_notebook, folder)
    (folder/"nbs"/"profiles").mkdir()
    (folder/"nbs"/"profiles"/"toy.yaml").write_text(PROFILE)
    return folder


@pytest.fixture
def project(tmp_path, write_notebook):
    return make_project(tmp_path/"project", write_notebook)


@pytest.fixture
def write_total(project, write_notebook):
    "Writes the second notebook, with a last cell of choice."
    return lambda work=TOTAL: write_second(write_notebook, project, work)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_notebook):
    "A project whose profile has been run, with a package of its own."
    folder = make_project(tmp_path_factory.mktemp("finished")/"project", write_notebook)
    (folder/"memloc").mkdir()
    # the toy package hides the real one from the kernels, so it lends them its modules
    (folder/"memloc"/"__init__.py").write_text(f"__path__.append({os.path.dirname(memloc.__file__)!r})\n")
    run_profile("toy", root=folder)
    return folder


def total_of(project, name="toy"):
    return read_json(project/"runs"/name/"report.json")["total"]


def test_first_run_does_all_second_run_nothing(project):
    first = run_profile("toy", root=project)
    assert first.ran == ("squares", "total") and total_of(project) == 30
    assert [path.name for path in first.report] == ["report.json", "rows.csv", "report.html"]
    assert (first.folder/"rows.csv").read_text() == "metric,value\ntotal,30.0\n"
    log = read_json(first.folder/"run.json")
    assert log["host"]["total"]["seconds"] > 0 and log["host"]["total"]["peak_memory_mib"] > 20
    assert log["stages"]["squares"]["parameters"] == {"n": 5, "data": "", "shared": 0}
    started = time.perf_counter()
    second = run_profile("toy", root=project)
    assert (second.ran, second.skipped, second.report) == ((), ("squares", "total"), first.report)
    assert time.perf_counter() - started < 5


def test_the_report_needs_nothing_from_outside(project):
    page = (run_profile("toy", root=project).folder/"report.html").read_text()
    assert "<h" in page or "<pre" in page
    assert "<script" not in page and "<link" not in page and 'src="http' not in page


def test_kernels_run_this_interpreter_whatever_the_user_has_installed(project, tmp_path, write_total, monkeypatch):
    kernel = tmp_path/"jupyter"/"kernels"/"python3"
    kernel.mkdir(parents=True)
    (kernel/"kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "x", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path/"jupyter"))
    write_total(f"import sys, os\nassert sys.executable == {sys.executable!r}\n"
                f"assert os.environ['HF_HUB_OFFLINE'] == '1'\n{TOTAL}")
    assert run_profile("toy", root=project).ran == ("squares", "total")
    assert "PYTHONPATH" not in os.environ


class TestWhatMakesAStageRunAgain:
    @pytest.fixture
    def project(self, finished, tmp_path):
        return shutil.copytree(finished, tmp_path/"project")

    def test_a_parameter_of_the_second_stage(self, project):
        assert run_profile("toy", root=project, parameters={"scale": 2}).ran == ("total",)
        assert total_of(project) == 60

    def test_a_parameter_of_the_first_stage_and_what_follows(self, project):
        assert run_profile("toy", root=project, parameters={"n": 3}).ran == ("squares", "total")
        assert total_of(project) == 5

    def test_a_shared_parameter_reaches_every_stage(self, project):
        assert run_profile("toy", root=project, parameters={"shared": 1}).ran == ("squares", "total")
        log = read_json(project/"runs"/"toy"/"run.json")
        assert [stage["parameters"]["shared"] for stage in log["stages"].values()] == [1, 1]

    def test_code_of_the_notebook_but_not_its_prose(self, project, write_total):
        path = project/"nbs"/"01_total.ipynb"
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell("More words."))
        nbformat.write(notebook, path)
        assert run_profile("toy", root=project).ran == ()
        write_total(TOTAL + "\n# another line")
        assert run_profile("toy", root=project).ran == ("total",)

    def test_a_module_of_the_package(self, project):
        (project/"memloc"/"new.py").write_text("x = 1\n")
        assert run_profile("toy", root=project).ran == ("squares", "total")

    def test_an_output_that_was_edited_or_removed(self, project):
        write_table(pl.DataFrame({"i": [9], "square": [81]}), project/"runs"/"toy"/"squares"/"squares.parquet", "i")
        assert run_profile("toy", root=project).ran == ("squares",)  # same bytes again: the second stage rests
        (project/"runs"/"toy"/"total"/"report.json").unlink()
        assert run_profile("toy", root=project).ran == ("total",)

    def test_force(self, project):
        assert run_profile("toy", root=project, force=True).ran == ("squares", "total")

    def test_the_data_file(self, project, monkeypatch):
        (project/"chat.txt").write_text("one\n")
        monkeypatch.chdir(project)
        assert run_profile("toy", data="chat.txt").ran == ("squares", "total")  # root is found from here
        assert run_profile("toy", data="chat.txt").ran == ()
        (project/"chat.txt").write_text("one\ntwo\n")
        assert run_profile("toy", data="chat.txt").ran == ("squares", "total")
        assert read_json(project/"runs"/"toy"/"squares"/"lines.json") == ["one", "two"]


def test_a_failing_cell_keeps_what_ran_and_the_next_run_resumes(project, write_total):
    run_profile("toy", root=project)
    write_total("print('so far')\nraise ValueError('turn t7 has no text')")
    with pytest.raises(StageError, match=r"stage total failed in cell \d: ValueError: turn t7 has no text") as failure:
        run_profile("toy", root=project, parameters={"n": 3})
    partly = project/"runs"/"toy"/"notebooks"/"01_total.ipynb"
    assert str(partly) in str(failure.value)
    kinds = [output.output_type for cell in nbformat.read(partly, 4).cells for output in cell.get("outputs", [])]
    assert "stream" in kinds and "error" in kinds
    assert not (project/"runs"/"toy"/"report.json").exists(), "an old report must not pass for the new one"
    write_total()
    resumed = run_profile("toy", root=project, parameters={"n": 3})
    assert (resumed.ran, resumed.skipped, total_of(project)) == (("total",), ("squares",), 5)


def test_a_dying_kernel_is_an_error(project, write_total):
    write_total("import os; os._exit(9)")
    with pytest.raises(StageError, match="stage total lost its kernel"):
        run_profile("toy", root=project)


def test_a_stage_without_manifest_is_an_error(project, write_total):
    write_total("pass")
    with pytest.raises(StageError, match="ended without a manifest"):
        run_profile("toy", root=project)


def test_cells_marked_not_to_run_are_skipped(project, write_notebook):
    write_notebook(project/"nbs"/"01_total.ipynb", IMPORTS, "#| eval: false\nraise SystemExit",
                   ("run_dir = ''\nscale = 1.0", "parameters"), TOTAL)
    assert run_profile("toy", root=project).ran == ("squares", "total")


@pytest.mark.parametrize(("arguments", "message"), [
    ({"parameters": {"skale": 2}}, r"unknown parameter 'skale'; did you mean scale\? known: data, n, scale, shared"),
    ({"parameters": {"run_dir": "x"}}, "unknown parameter 'run_dir'"),
    ({"parameters": {"n": "five"}}, "parameter n='five' is of type str"),
    ({"name": "../elsewhere"}, "run name"),
    ({"profile": "tory"}, r"unknown profile 'tory'; did you mean toy\?"),
    ({"data": "absent.json"}, "absent.json: no such data file"),
])
def test_wrong_commands_are_refused_before_anything_runs(project, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_profile(**{"profile": "toy", "root": project, **arguments})
    assert not (project/"runs"/"toy"/"notebooks").exists()


@pytest.mark.parametrize(("text", "message"), [
    ("stages: []", "description"),
    ("description: d\nstages: [{notebook: 00_squares.ipynb}]", "needs `notebook` and `stage`"),
    ("description: d\nstages: [{notebook: absent.ipynb, stage: s}]", "absent.ipynb"),
    ("description: d\nstages: [{notebook: 00_squares.ipynb, stage: s, parameters: {nn: 1}}]", "no parameter 'nn'"),
])
def test_wrong_profiles_are_refused(project, text, message):
    (project/"nbs"/"profiles"/"bad.yaml").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_profile("bad", project)


def test_another_profile_does_not_write_into_the_same_run(project):
    run_profile("toy", root=project)
    (project/"nbs"/"profiles"/"other.yaml").write_text(PROFILE)
    with pytest.raises(ValueError, match="holds a run of profile 'toy'"):
        run_profile("other", root=project, name="toy")


def test_two_runs_into_one_name_refuse(project):
    (project/"runs"/"toy").mkdir(parents=True)
    code = ("import sys, time\nfrom memloc.pipeline import locked\n"
            "with locked(sys.argv[1]): print('held', flush=True); time.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code, str(project/"runs"/"toy")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match=f"process {holder.pid} is writing into this run"):
            run_profile("toy", root=project)
        assert run_profile("toy", root=project, name="second").ran == ("squares", "total")
    finally:
        holder.kill()
        holder.wait()
    assert run_profile("toy", root=project).ran == ("squares", "total"), "a killed process holds no lock"


def test_a_changed_or_missing_report_is_made_again(project):
    folder = run_profile("toy", root=project).folder
    (folder/"report.json").unlink()
    (folder/"report.html").write_text("changed", "utf-8")
    again = run_profile("toy", root=project)
    assert again.ran == () and (folder/"report.json").is_file() and (folder/"report.html").read_text("utf-8") != "changed"


@pytest.mark.parametrize(("name", "text", "reason"), [("run.json", "[]", "not the log of a run"), ("run.json", '{"profile": "toy"}', "not the log of a run"),
                                                      ("squares/manifest.json", "{}", "not the manifest of a stage")])
def test_damaged_files_of_a_run_are_named_with_a_remedy(project, name, text, reason):
    first = run_profile("toy", root=project)
    (first.folder/name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}: {reason}.* delete it and run"):
        run_profile("toy", root=project)


def test_a_named_file_is_found_from_where_one_stands_and_its_content_counts(tmp_path, write_notebook, monkeypatch):
    folder = make_project(tmp_path/"project", write_notebook)
    cells = IMPORTS, ("run_dir = ''\nscale = 1.0\nshared = 0\ncorrections = ''\nmodel = ''", "parameters"), TOTAL
    write_notebook(folder/"nbs"/"01_total.ipynb", *cells)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"fixes\.csv: no such file \(parameter corrections\)"):
        run_profile("toy", root=folder, parameters={"corrections": "fixes.csv"})
    (tmp_path/"fixes.csv").write_text("a")
    (tmp_path/"models"/"mine").mkdir(parents=True)
    (tmp_path/"models"/"mine"/"weights").write_text("1")
    given = {"corrections": "fixes.csv", "model": "local:models/mine?batch_size=2"}
    first = run_profile("toy", root=folder, parameters=given)
    assert read_json(first.folder/"run.json")["stages"]["total"]["parameters"]["model"] == f"local:{tmp_path}/models/mine?batch_size=2"
    assert run_profile("toy", root=folder, parameters=given).ran == ()
    for name in ("fixes.csv", "models/mine/weights"):
        (tmp_path/name).write_text("b")
        assert run_profile("toy", root=folder, parameters=given).ran == ("total",)


def test_a_parameter_without_a_value_is_named(project):
    with pytest.raises(ValueError, match="parameter n has no value"):
        run_profile("toy", root=project, parameters={"n": None})
