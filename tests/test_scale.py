"""Many histories: pieces that depend on their conversation alone, and workers that may die."""
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from memloc import scale
from memloc.artifacts import Stage, stage_array, stage_table
from memloc.data import DataConfig, run_data
from memloc.memory_units import UnitsConfig, run_units
from memloc.scale import build_histories, join_pieces

WORDS = ["Nora", "paints", "the", "harbour", "yesterday", "Dev", "repairs", "bicycles", "beans", "soup", "heron", "passport"]


def write_histories(folder: Path, n_files: int = 2, n_each: int = 3, n_sessions: int = 2) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for file in range(n_files):
        talks = [{"conversation_id": f"c{file}{each}", "sessions": [
            {"session_id": f"s{i}", "date": f"2024-02-{i + 1:02d}",
             "turns": [{"speaker": "Nora", "text": " ".join(rng.choice(WORDS, 15)) + "."} for _ in range(4)]} for i in range(n_sessions)],
            "questions": [{"question": "Who?", "answer": "Nora", "category": "who", "evidence": ["s0:1"]}]} for each in range(n_each)]
        (folder/f"part{file}.json").write_text(json.dumps({"conversations": talks}))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_histories(tmp_path_factory.mktemp("many")/"files")


@pytest.fixture(scope="module")
def here(source):
    "Made in this process."
    return source.parent/"here", build_histories(source, source.parent/"here")


def content(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_pieces_joined_are_the_stages_units(source, here, tmp_path):
    out, pieces = here
    run_data(DataConfig("plain", str(source/"part*.json")), tmp_path)
    run_units(UnitsConfig(), tmp_path)
    units, vectors = join_pieces(pieces, out)
    with Stage(tmp_path, "joined", {}) as stage:
        stage.table("units", units, ["unit_id", "member"])
    assert (tmp_path/"joined/units.parquet").read_bytes() == (tmp_path/"units/units.parquet").read_bytes()
    assert stage_table(tmp_path, "units", "units").equals(units)
    np.testing.assert_allclose(vectors, stage_array(tmp_path, "units", "vectors"), atol=2e-6)


def test_the_bytes_of_a_piece_depend_on_its_conversation_alone(source, here, tmp_path):
    out, _ = here
    alone = build_histories([source/"part1.json"], tmp_path)
    assert alone["conversation_id"].to_list() == ["c10", "c11", "c12"]
    everything = content(out)
    assert content(tmp_path) == {name: data for name, data in everything.items() if name.partition("/")[0] in set(alone["piece"])}


def test_a_stopped_run_goes_on_and_damage_is_made_good(source, here, tmp_path, monkeypatch, caplog):
    out, pieces = here
    encode, calls = scale.encode_units, []

    def dies_at_third(*args, **more):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("stopped")
        return encode(*args, **more)

    monkeypatch.setattr(scale, "encode_units", dies_at_third)
    with pytest.raises(RuntimeError) as caught:
        build_histories(source, tmp_path)
    assert caught.value.__notes__ == [f"while conversation 'c02' of {source/'part0.json'} was read"]
    assert len(list(tmp_path.rglob("piece.json"))) == 2
    again = build_histories(source, tmp_path)
    assert again["made"].to_list() == [False, False, True, True, True, True]
    assert content(tmp_path) == content(out)
    damaged = tmp_path/pieces["piece"][4]/"vectors.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert build_histories(source, tmp_path)["made"].to_list() == [False]*4 + [True, False]
    assert "a damaged piece; it is made again" in caplog.text
    assert content(tmp_path) == content(out)


def test_settings_and_words_change_the_piece(source, here, tmp_path):
    _, pieces = here
    assert not set(pieces["piece"]) & set(build_histories(source/"part0.json", tmp_path, UnitsConfig(max_keywords=3))["piece"])
    other = json.loads((source/"part0.json").read_text())
    other["conversations"][0]["questions"] = []
    other["conversations"][1]["sessions"][0]["turns"][0]["text"] = "Something else."
    (tmp_path/"other.json").write_text(json.dumps(other))
    changed = build_histories(tmp_path/"other.json", tmp_path/"other")["piece"].to_list()
    same = [one == two for one, two in zip(pieces["piece"], changed, strict=False)]
    assert same == [True, False, True], "questions change nothing, words do"


def test_what_is_wrong_is_named(source, tmp_path, monkeypatch):
    empty = tmp_path/"empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=f"{empty}: no file of conversations"):
        build_histories(empty, tmp_path/"out")
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        build_histories(source, tmp_path/"out", workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    before = dict(os.environ)
    with pytest.raises(ImportError, match="address='local' needs ray .*: pip install 'ray"):
        build_histories(source, tmp_path/"out", address="local")
    assert dict(os.environ) == before


def below(pid: int, of_each):
    "Something about each process below a process; one that ends meanwhile is left out."
    import psutil

    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(of_each(each))
    return found


def workers_of(pid: int) -> list[int]:
    "Processes of Ray below a process that make pieces."
    named = below(pid, lambda each: (each.pid, "".join(each.cmdline())))
    return [one for one, name in named if "PieceMaker" in name]


@pytest.mark.slow
def test_a_killed_worker_costs_its_own_piece_and_the_bytes_are_those_made_here(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else its workers wait for everybody else on a busy machine
    source, out = write_histories(tmp_path/"files", 2, 4, 2), tmp_path/"ray"
    killed, kept = [], {}

    def kill_one() -> None:
        until = time.monotonic() + 600
        while time.monotonic() < until and not killed:
            done = list(out.glob("*/piece.json"))
            workers = workers_of(os.getpid())
            if done and workers:
                kept.update({path: path.stat().st_mtime_ns for path in done})
                os.kill(workers[0], signal.SIGKILL)
                killed.append(workers[0])
            time.sleep(0.02)

    watcher = threading.Thread(target=kill_one)
    watcher.start()
    pieces = build_histories(source, out, address="local", workers=2)
    watcher.join()
    assert killed and 1 <= len(kept) < 8, "the worker was killed in the middle"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what was finished is not made again"
    here = build_histories(source, tmp_path/"here")
    assert content(out) == content(tmp_path/"here")
    assert pieces.drop("made").equals(here.drop("made"))
    assert not build_histories(source, out)["made"].any()
