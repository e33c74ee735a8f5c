"""Rows that are kept: found without looking at every file, whole or absent, the same for any number of workers."""
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from memloc import encoders, memory_units, shards
from memloc.artifacts import function_hash
from memloc.encoders import VectorCache
from memloc.memory_units import ExtractiveExtractor, SessionInput, build_units, content_notes
from memloc.shards import ShardFolder, compute_kept, n_workers, read_texts, write_texts


def texts(*values: str) -> np.ndarray:
    return np.array(values, dtype=object)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*.parquet"))


def opened(monkeypatch) -> list[Path]:
    "Files that are read from now on, whole or only their addresses."
    seen, read = [], pl.read_parquet
    monkeypatch.setattr(pl, "read_parquet", lambda path, **more: seen.append(Path(path)) or read(path, **more))
    return seen


def vectors_of(rng: np.random.Generator, folder: Path, n_shards: int, n: int = 3) -> dict[str, np.ndarray]:
    cache, known = VectorCache(folder), {}
    for shard in range(n_shards):
        names, rows = [f"{shard}-{row}" for row in range(n)], rng.normal(size=(n, 4)).astype(np.float32)
        cache.put(names, rows)
        known |= dict(zip(names, rows, strict=True))
    return known


def test_a_look_up_opens_what_is_asked_for(tmp_path, monkeypatch):
    known = vectors_of(np.random.default_rng(0), tmp_path, 50)
    cache = VectorCache(tmp_path)
    assert not cache.get(["not there"])  # reads the addresses, once
    seen = opened(monkeypatch)
    np.testing.assert_array_equal(cache.get(["17-2"])["17-2"], known["17-2"])
    assert len(seen) == 1
    cache.get(["17-0", "17-1"])
    assert len(seen) == 1, "a shard just read is in memory"
    cache.get(["3-0", "4-0", "17-2"])
    assert len(seen) == 3
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("the folder was listed although all addresses are known"))
    cache.get(list(known))


def test_few_shards_stay_in_memory(tmp_path):
    known = vectors_of(np.random.default_rng(0), tmp_path, 50)
    cache = VectorCache(tmp_path, held=3)
    found = cache.get(list(known))
    assert list(found) == sorted(known, key=lambda one: (cache._place[one][0], list(known).index(one)))
    assert all((found[one] == known[one]).all() for one in known)
    assert len(cache._values) == 3


def test_rows_of_others_are_found_and_misses_do_not_list_the_folder_again_and_again(tmp_path, monkeypatch):
    mine, theirs = ShardFolder(tmp_path), ShardFolder(tmp_path)
    assert mine.get(["a"]) == {}
    theirs.put(["a"], texts("1"))
    mine.refresh()
    assert mine.get(["a"]) == {"a": "1"}
    listed, glob = [], Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: listed.append(1) or time.sleep(0.05) or glob(self, pattern))
    mine._look_again()
    first = len(listed)
    for _ in range(100):
        mine.get(["not there"])
    assert len(listed) <= first + 1


def test_small_shards_are_merged_and_nothing_is_lost(tmp_path):
    known = vectors_of(np.random.default_rng(0), tmp_path, 90, 30)
    old = VectorCache(tmp_path)
    assert len(old.get(list(known))) == 2_700 and len(files(tmp_path)) == 90, "shards of the last hour are left alone"
    for path in files(tmp_path):
        os.utime(path, (1e9, 1e9))
    merged = VectorCache(tmp_path)
    merged.get(["0-0"])
    assert len(files(tmp_path)) == 2
    old._values.clear()
    for cache in (old, merged, VectorCache(tmp_path)):  # the first still has the small ones in its index
        found = cache.get(list(known))
        assert set(found) == set(known) and all((found[one] == known[one]).all() for one in known)
    assert max(len(encoders.read_shard(path)[0]) for path in files(tmp_path)) <= 2_048


def test_a_repeated_address_keeps_its_row_through_a_merge(tmp_path):
    cache = ShardFolder(tmp_path)
    for number in range(80):
        cache.put([f"{number}"], texts(f"{number}"))
    for value in ("one", "two", "three"):
        ShardFolder(tmp_path).put(["twice"], texts(value))
    before = ShardFolder(tmp_path).get(["twice"])
    assert ShardFolder(tmp_path, age=0).merge() == 0  # nothing known yet, nothing merged
    ShardFolder(tmp_path, age=0).get(["0"])
    assert len(files(tmp_path)) == 4
    assert ShardFolder(tmp_path).get(["twice"]) == before


def test_half_written_files_of_others_are_no_shards(tmp_path):
    ShardFolder(tmp_path).put(["a"], texts("1"))
    (tmp_path/".123.abc.parquet").write_bytes(b"PAR1 half")
    assert ShardFolder(tmp_path).get(["a", "b"]) == {"a": "1"}


def test_a_damaged_shard_names_the_file_and_the_remedy(tmp_path):
    ShardFolder(tmp_path).put(["a", "b"], texts("1", "2"))
    (shard,) = files(tmp_path)
    whole = shard.read_bytes()
    for broken in (whole[:40], b"not parquet", b""):
        shard.write_bytes(broken)
        with pytest.raises(ValueError, match=f"{shard.name}: damaged cache shard .*; delete this file and run again"):
            ShardFolder(tmp_path).get(["a"])
    pl.DataFrame({"address": ["a", "b"], "text": ["1", "3"]}).write_parquet(shard)
    with pytest.raises(ValueError, match="content does not match its name"):
        ShardFolder(tmp_path).get(["a"])
    shard.unlink()
    assert ShardFolder(tmp_path).get(["a"]) == {}


def test_a_row_in_two_shards_outlives_one_of_them(tmp_path):
    reader = ShardFolder(tmp_path)
    first, second = write_texts(tmp_path, ["a", "b"], ["1", "2"]), write_texts(tmp_path, ["a", "c"], ["1", "3"])
    assert reader.get(["a", "b", "c"]) == {"a": "1", "b": "2", "c": "3"}
    for gone, left in ((first, {"a": "1", "c": "3"}), (second, {})):
        gone.unlink()
        reader.refresh()
        assert reader.get(["a", "c"]) == left


def read_and_merge(folder: str, writer: int) -> None:
    cache = ShardFolder(folder, n_small=3, age=0)
    for part in range(25):
        cache.put([f"{writer}-{part}"], texts(f"{writer} {part}"))
        cache.get(["not there", f"{writer}-{part//2}"])
        cache.refresh()
        cache.merge()
        assert cache.get([f"{writer}-{part//3}"]) == {f"{writer}-{part//3}": f"{writer} {part//3}"}


def test_processes_that_write_and_merge_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=read_and_merge, args=(str(tmp_path), one)) for one in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = ShardFolder(tmp_path).get([f"{one}-{part}" for one in range(3) for part in range(25)])
    assert found == {f"{one}-{part}": f"{one} {part}" for one in range(3) for part in range(25)}


# --- notes

def sessions(n: int, seed: int = 0) -> list[SessionInput]:
    rng = np.random.default_rng(seed)
    words = np.array("Nora paints the old harbour yesterday while Dev repairs two bicycles last week and tomorrow they plant beans".split(" "))  # noqa: SIM905
    return [SessionInput(f"s{i}", datetime(2024, 1, 1 + i % 28), tuple(
        (("Nora", "Dev")[turn % 2], " ".join(rng.choice(words, 12)).capitalize() + ".") for turn in range(6))) for i in range(n)]


def notes_of(extractor: ExtractiveExtractor, inputs: list[SessionInput]) -> list:
    extractor.prepare(inputs)
    return [extractor.notes(one) for one in inputs]


def test_notes_are_the_same_kept_or_not_and_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PART", 4)
    inputs = [*sessions(9), SessionInput("hostile", None, (("A", "half \ud83d here yesterday. " * 9), ("B\n", "")))]
    plain = [ExtractiveExtractor(kept=False).notes(one) for one in inputs]
    assert notes_of(ExtractiveExtractor(kept=False, workers=1), inputs) == plain
    assert notes_of(ExtractiveExtractor(cache_dir=tmp_path/"two", workers=2), inputs) == plain
    assert notes_of(ExtractiveExtractor(cache_dir=tmp_path/"one", workers=1), inputs) == plain
    assert notes_of(ExtractiveExtractor(cache_dir=tmp_path/"one", workers=1), inputs) == plain  # from disk
    kept = [sorted(path.name for path in (tmp_path/name/"notes").rglob("*.*")) for name in ("one", "two")]
    assert kept[0] == kept[1] and len(kept[0]) == 4  # three parts and the settings: the same bytes have the same names


def test_kept_notes_are_not_made_again_until_code_or_settings_change(tmp_path, monkeypatch):
    inputs, made = sessions(5), []
    real = memory_units.key_phrases

    def counted(turns, n):
        made.append(turns)
        return real(turns, n)

    notes_of(ExtractiveExtractor(cache_dir=tmp_path), inputs)
    changed = ExtractiveExtractor(cache_dir=tmp_path).folder
    monkeypatch.setattr(memory_units, "key_phrases", counted)  # other code: another folder
    assert ExtractiveExtractor(cache_dir=tmp_path).folder != changed
    for again in (5, 5, 10):
        settings = {"max_keywords": 7} if again == 10 else {}
        notes_of(ExtractiveExtractor(cache_dir=tmp_path, **settings), inputs)
        assert len(made) == again
    assert len(list((tmp_path/"notes").iterdir())) == 3
    assert ExtractiveExtractor(max_events=1).folder == ExtractiveExtractor().folder  # applied when dates are resolved


def test_the_units_table_is_the_same_with_and_without_kept_notes(tmp_path, monkeypatch):
    from memloc.data import sample

    monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path))
    data = sample()
    part = data.sessions.filter(pl.col("position") < 3)
    data = dataclasses.replace(data, sessions=part, turns=data.turns.join(part, on="session_id", how="semi"))
    settings = memory_units.UnitsConfig(extractor="extractive")
    first, second = (build_units(data.sessions, data.turns, data.annotations, settings, progress=False) for _ in range(2))
    without = build_units(data.sessions, data.turns, data.annotations, settings, ExtractiveExtractor(kept=False), progress=False)
    assert first.equals(second) and first.equals(without)
    assert len(files(next((tmp_path/"notes").iterdir()))) == 1


def test_a_stopped_run_goes_on(tmp_path):
    "A process killed in its third part leaves two; the next one computes the rest."
    code = (
        "import os, sys; from memloc import memory_units, shards; sys.path.insert(0, 'tests'); from test_shards import sessions\n"
        "shards.PART, real, calls = 4, memory_units.content_notes, []\n"
        "def read(turns, **more):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 11: os.kill(os.getpid(), 9)\n"
        "    return real(turns, **more)\n"
        "items = {memory_units.content_address(one.turns): one.turns for one in sessions(20)}\n"
        "from functools import partial\n"
        "shards.compute_kept(partial(read, max_keywords=20, max_summary_sentences=10), items, shards.ShardFolder(sys.argv[1]), 1)\n")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path/"k")], cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == -signal.SIGKILL
    assert sum(len(read_texts(path)[0]) for path in files(tmp_path/"k")) == 8
    made = []

    def read(turns):
        made.append(turns)
        return content_notes(turns, 20, 10)

    items = {memory_units.content_address(one.turns): one.turns for one in sessions(20)}
    found = compute_kept(read, items, ShardFolder(tmp_path/"k"), 1)
    assert len(made) == 12 and list(found) == list(items)
    assert found == compute_kept(partial(content_notes, max_keywords=20, max_summary_sentences=10), items, None, 1)


def test_what_cannot_be_read_is_named(tmp_path):
    def fails(text: str) -> str:
        raise KeyError("no such thing")

    with pytest.raises(KeyError) as caught:
        compute_kept(fails, {"a": "It rained for three days."}, ShardFolder(tmp_path), 1)
    assert caught.value.__notes__ == ["item 0 of this part begins 'It rained for three days.'"]
    assert not files(tmp_path)


def test_workers_follow_the_environment(monkeypatch):
    import joblib

    monkeypatch.delenv("MEMLOC_WORKERS", raising=False)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 8)
    for threads, expected in (("", 8), ("3", 3), ("64", 8), ("2,1", 2), ("auto", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert n_workers() == expected
    monkeypatch.setenv("MEMLOC_WORKERS", "5")
    assert (n_workers(), n_workers(2)) == (5, 2)
    for wrong in ("0", "two", "-1"):
        monkeypatch.setenv("MEMLOC_WORKERS", wrong)
        with pytest.raises(ValueError, match=f"got '{wrong}'; set MEMLOC_WORKERS"):
            n_workers()


def test_the_checksum_of_a_function_is_the_same_everywhere_and_follows_what_it_calls():
    code = "from memloc.artifacts import function_hash; from memloc.memory_units import content_notes; print(function_hash(content_notes))"
    seeds = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
                            env=os.environ | {"PYTHONHASHSEED": seed}).stdout.strip() for seed in ("1", "2")]
    assert seeds == [function_hash(content_notes)]*2


@pytest.mark.parametrize(("name", "value"), [("SENTENCE_CHARACTERS", 301), ("CHAT_WORDS", frozenset({"hey"})), ("_MONTH", "x"), ("MAX_CANDIDATES", 7)])
def test_constants_count_where_they_are_used(name, value, monkeypatch):
    before = function_hash(content_notes)
    monkeypatch.setattr(memory_units, name, value)
    assert (function_hash(content_notes) == before) == (name == "_MONTH")  # only used to make DATE_WORDS, which counts


def test_the_notebooks_cells_have_the_checksum_of_the_module():
    "The executed notebook defines these functions itself; its notes are those of the module."
    import types

    cells = types.ModuleType("__main__")
    source = Path(memory_units.__file__).read_text("utf-8").replace("from .", "from memloc.")
    exec(compile(source, "<cell>", "exec"), vars(cells))  # noqa: S102
    assert cells.content_notes is not content_notes
    assert function_hash(cells.content_notes) == function_hash(content_notes)
    cells.SENTENCE_CHARACTERS = 7
    assert function_hash(cells.content_notes) != function_hash(content_notes)
