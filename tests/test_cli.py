"""The command line: exit codes, messages, JSON."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from memloc.cli import app

STAGE = """from memloc.artifacts import Stage
if fail: raise ValueError("turn t7 has no text")
with Stage(run_dir, "only", {"n": n}) as stage: stage.json("report", {"n": n, "ks": list(ks)})"""


@pytest.fixture
def project(tmp_path, write_notebook):
    write_notebook(tmp_path/"nbs"/"00_only.ipynb", ("run_dir = ''\nn = 1\nks = [1]\nfail = False", "parameters"), STAGE)
    (tmp_path/"nbs"/"profiles").mkdir()
    (tmp_path/"nbs"/"profiles"/"toy.yaml").write_text(
        "description: one stage\nstages: [{notebook: 00_only.ipynb, stage: only}]")
    return tmp_path


def memloc(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_run_with_two_parameters(project):
    done = memloc("run", "toy", "--root", project, "-p", "n=7", "-p", "ks=[1, 3]", "--name", "seven", "--json")
    assert done.exit_code == 0, done.output
    outcome = json.loads(done.stdout)
    assert outcome["ran"] == ["only"] and outcome["folder"].endswith("runs/seven")
    assert json.loads((project/"runs"/"seven"/"report.json").read_text()) == {"n": 7, "ks": [1, 3]}
    again = memloc("run", "toy", "--root", project, "-p", "n=7", "-p", "ks=[1, 3]", "--name", "seven")
    assert "up to date" in again.stderr and "report.html" in again.stdout


def test_a_failing_stage_exits_with_1_and_one_message(project):
    done = memloc("run", "toy", "--root", project, "-p", "fail=true")
    assert done.exit_code == 1
    assert "stage only failed in cell 2: ValueError: turn t7 has no text" in done.stderr
    assert "notebooks/00_only.ipynb" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [
    ["run", "tory"], ["run", "toy", "-p", "m=1"], ["run", "toy", "-p", "n"], ["run", "toy", "-p", "n=1", "-p", "n=2"],
    ["run", "toy", "--data", "absent.json"], ["run", "toy", "--unknown-option"],
    ["run"], ["data", "fetch", "no-such-set"], ["nonsense"],
])
def test_wrong_commands_exit_with_2(project, monkeypatch, arguments):
    monkeypatch.chdir(project)
    done = memloc(*arguments)
    assert done.exit_code == 2 and done.stderr.strip() and "Traceback" not in done.stderr


def test_lint_counts_rows_and_json(tmp_path):
    file = tmp_path/"chat.json"
    turns = [{"speaker": "Mia", "text": "Hi Tom"}]
    sessions = [{"session_id": "s01", "date": "some day", "turns": turns}]
    file.write_text(json.dumps({"conversations": [{"conversation_id": "mia-tom", "sessions": sessions}]}))
    shown = memloc("lint", file)
    assert shown.exit_code == 0 and "some day" in shown.stdout
    rows = json.loads(memloc("lint", file, "--json").stdout)
    assert {"file", "record", "field", "rule", "value", "action", "detail"} <= set(rows[0])
    assert "some day" in memloc("lint", file, "--rows", 5, "--dataset", "plain").stdout


@pytest.mark.parametrize("content", [None, "[{", '{"conversations": 3}'])
def test_lint_of_a_bad_file_exits_with_1_and_names_it(tmp_path, content):
    file = tmp_path/"chat.json"
    if content is not None:
        file.write_text(content)
    done = memloc("lint", file)
    assert done.exit_code == 1 and "chat.json" in done.stderr and "Traceback" not in done.stderr


def test_data_list():
    sources = json.loads(memloc("data", "list", "--json").stdout)
    assert {"locomo", "longmemeval_s"} <= set(sources) and all(source["licence"] for source in sources.values())
    assert "locomo10.json" in memloc("data", "list").stdout


def test_version():
    assert memloc("version").stdout.startswith("memloc 0.")
    assert json.loads(memloc("version", "--json").stdout)["libraries"]["numpy"].startswith("1.26")


def test_the_command_starts_light():
    heavy = ["torch", "transformers", "matplotlib", "graspologic", "papermill", "nbformat", "polars"]
    code = f"import sys, memloc.cli; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
