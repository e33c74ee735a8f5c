"""What stages leave on disk: atomic, sorted, checked."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import polars as pl
import pytest

from memloc.artifacts import (
    Stage,
    changed_outputs,
    git_commit,
    read_array,
    read_json,
    read_table,
    sha256_file,
    stage_manifest,
    stage_table,
    without_host,
    write_json,
    write_table,
)


@dataclass(frozen=True)
class Config:
    n: int = 3


def write_stage(run_dir, order=1, **settings):
    rows = pl.DataFrame({"id": ["a", "b", "c"], "text": ["Hello 🙂", "你好", None]})[::order]
    with Stage(run_dir, "toy", Config(**settings)) as stage:
        stage.table("rows", rows, sort_by="id")
        stage.array("vectors", np.arange(6, dtype=np.float32).reshape(3, 2))
        stage.count(n_rows=np.int64(3))


def test_same_content_gives_same_bytes_whatever_the_row_order(tmp_path):
    write_stage(tmp_path/"one")
    write_stage(tmp_path/"two", order=-1)
    one, two = stage_manifest(tmp_path/"one", "toy"), stage_manifest(tmp_path/"two", "toy")
    assert without_host(one) == without_host(two)
    assert one["host"].keys() >= {"seconds"}
    assert one["counts"] == {"n_rows": 3} and one["settings"] == {"n": 3}
    assert stage_table(tmp_path/"one", "toy", "rows")["text"].to_list() == ["Hello 🙂", "你好", None]


def test_a_failing_writer_leaves_the_old_file_and_no_debris(tmp_path):
    path = tmp_path/"rows.parquet"
    write_table(pl.DataFrame({"id": [1]}), path, "id")
    before = sha256_file(path)
    with pytest.raises(pl.exceptions.PolarsError):
        write_table(pl.DataFrame({"id": [1], "bad": [object()]}), path, "id")
    assert sha256_file(path) == before
    assert os.listdir(tmp_path) == ["rows.parquet"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path/"note.txt"
    path.write_text("whole")
    code = ("import sys, time\nfrom memloc.artifacts import replacing\n"
            "with replacing(sys.argv[1]) as temporary:\n"
            "    temporary.write_text('half'); print('ready', flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.read_text() == "whole"


def test_an_interrupted_stage_is_not_finished(tmp_path):
    write_stage(tmp_path)
    with pytest.raises(KeyboardInterrupt), Stage(tmp_path, "toy", {}) as stage:
        stage.table("rows", pl.DataFrame({"id": ["z"]}), "id")
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError, match="has not finished"):
        stage_table(tmp_path, "toy", "rows")
    assert read_table(tmp_path/"toy"/"rows.parquet")["id"].to_list() == ["z"]


def test_leftovers_of_another_setting_are_removed(tmp_path):
    write_stage(tmp_path)
    with Stage(tmp_path, "toy", {}) as stage:
        stage.text("note.csv", "a\n")
    assert sorted(os.listdir(tmp_path/"toy")) == ["manifest.json", "note.csv"]


def test_changed_and_missing_outputs_are_noticed(tmp_path):
    write_stage(tmp_path)
    assert changed_outputs(tmp_path, "toy") == []
    (tmp_path/"toy"/"vectors.npy").unlink()
    write_table(pl.DataFrame({"id": ["x"]}), tmp_path/"toy"/"rows.parquet", "id")
    assert changed_outputs(tmp_path, "toy") == ["rows.parquet", "vectors.npy"]


def test_inputs_are_named_relative_to_the_run(tmp_path):
    write_stage(tmp_path/"run")
    outside = tmp_path/"chat.json"
    outside.write_text("[]")
    with Stage(tmp_path/"run", "next", {}, inputs=[tmp_path/"run"/"toy"/"rows.parquet", outside]):
        pass
    assert set(stage_manifest(tmp_path/"run", "next")["inputs"]) == {"toy/rows.parquet", "chat.json"}
    with pytest.raises(FileNotFoundError, match="absent.json"), Stage(tmp_path/"run", "n", {}, [tmp_path/"absent.json"]):
        pass


def test_no_pickles(tmp_path):
    np.save(tmp_path/"pickle.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_array(tmp_path/"pickle.npy")


def test_json_of_dates_numbers_and_surrogates(tmp_path):
    value = {"date": datetime(2024, 5, 8), "n": np.int64(3), "text": "half \ud83d", "path": tmp_path}
    write_json(value, tmp_path/"a.json")
    assert read_json(tmp_path/"a.json") == {"date": "2024-05-08T00:00:00", "n": 3, "text": "half \ud83d",
                                            "path": str(tmp_path)}
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        write_json({"set": {1}}, tmp_path/"b.json")
    assert not (tmp_path/"b.json").exists()


def test_figures_have_the_same_bytes_each_time(tmp_path):
    from matplotlib.figure import Figure

    hashes = []
    for _ in range(2):
        figure = Figure()
        figure.subplots().plot([1, 2])
        with Stage(tmp_path, "plot", {}) as stage:
            hashes.append(sha256_file(stage.figure("line", figure)))
    assert hashes[0] == hashes[1]


def test_commit(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit(tmp_path) == "unknown"
    (tmp_path/"a").write_text("a")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    commit = git_commit(tmp_path)
    assert len(commit) == 7
    (tmp_path/"a").write_text("b")
    assert git_commit(tmp_path) == f"{commit}+changes"


def test_two_inputs_of_one_name_both_count(tmp_path):
    files = [tmp_path/"data"/source/"dev.json" for source in ("hotpotqa", "musique")]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text(str(number))
    with Stage(tmp_path/"run", "sft", {}, files):
        pass
    assert set(stage_manifest(tmp_path/"run", "sft")["inputs"]) == {"hotpotqa/dev.json", "musique/dev.json"}
