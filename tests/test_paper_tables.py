"""The paper's tables beside ours: complete, never mixed, and the same bytes every time."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from memloc.paper_tables import (
    LINE,
    PAPER_TABLES,
    Records,
    build_table,
    data_statistics,
    draw_training,
    extra_tables,
    is_whole,
    load_records,
    number_text,
    our_metrics,
    over_runs,
    published_lines,
    refuse_pair,
    repeated_runs,
    run_statistics,
    runs_table,
    sections,
    seed_table,
    t_interval,
    table_text,
    training_curves,
    write_svg,
    write_tables,
)
from memloc.tables import METRICS, ROWS, load_paper

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT/"nbs/results"
PAPER, NOTES = load_paper()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("tables")
    return out, write_tables(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class TestBytes:
    def test_another_process_writes_the_same_and_so_it_is_committed(self, written, tmp_path):
        code = "import sys; from memloc.paper_tables import write_tables; write_tables(sys.argv[1])"
        environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env=environment, cwd=tmp_path)
        first = contents(written[0])
        assert contents(tmp_path) == first
        assert contents(RESULTS/"tables") == first, "run `make tables` and commit what changed"

    def test_plain_line_ends_no_clock_no_path(self, written):
        for name, content in contents(written[0]).items():
            text = content.decode("utf-8")
            assert "\r" not in text and text.endswith("\n"), name
            assert "/work/" not in text and "<dc:date>" not in text and "Matplotlib" not in text, name

    def test_a_changed_record_changes_the_table(self, written, tmp_path):
        folder = copy_of_records(tmp_path)
        rows = load_records(folder).filter(file="locomo").drop("file")
        bumped = pl.when((pl.col("system") == "memloc") & (pl.col("metric") == "recall")).then(pl.col("value") - 1).otherwise("value")
        rows.with_columns(value=bumped).write_csv(folder/"locomo.csv")
        records = Records(load_records(folder))
        for name, same in (("table_02_07", False), ("table_12", True)):
            text = table_text(name, build_table(name, PAPER, records), NOTES, extra_tables(name, folder, PAPER, records.frame))
            assert (text.encode() == contents(written[0])[f"{name}.md"]) == same


def lines_of(name: str, folder: Path) -> pl.DataFrame:
    blocks = build_table(name, PAPER, Records(load_records(folder)))
    return pl.concat(pl.DataFrame(lines, schema=LINE) for _, lines in blocks)


def copy_of_records(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RESULTS, tmp_path/"results", ignore=shutil.ignore_patterns("tables", "*.png")))


class TestThePapersRecord:
    @pytest.mark.parametrize(("name", "cells"), [("table_01_13", 265), ("table_02_07", 144), ("table_03", 15), ("table_04", 42), ("table_05", 8), ("table_06", 16),
                                                 ("table_08", 19), ("table_09", 120), ("table_10", 128), ("table_11", 48), ("table_12", 9), ("table_14", 28)])
    def test_every_value_is_there_once(self, written, name, cells):
        out, index = written
        row = index.filter(table=name).row(0, named=True)
        assert (row["published"], row["with ours"] + row["empty"]) == (cells, cells)
        frame = pl.read_csv(out/f"{name}.csv", infer_schema_length=None).drop_nulls("paper")
        assert frame.unique(["table", "dataset", "metric", "system", "k"]).height == cells

    @pytest.mark.parametrize(("table", "dataset", "system", "metric", "k", "value"), [
        ("paper Table 1/13", "longmemeval_s", "MemLoc (8B)", "judge_gpt4o", None, 68.4),
        ("paper Table 1/13", "long_mt_bench_plus", "MemLoc (4B)", "bleu4_unstated", None, 13.7),
        ("paper Table 1/13", "longmemeval_m", "Full History", "tokens_unstated", None, 128000),
        ("paper Table 2/7", "longmemeval_m", "MemGAS", "recall_all", 10, 77.02),
        ("paper Table 3", "locomo", "+ Extract + Rerank + Cue", "judge_gpt4o", None, 57.4),
        ("paper Table 4", "longmemeval_s", "Full (SFT+GRPO)", "recall", 5, 92.47),
        ("paper Table 8", "longmemeval_s", "w/o Time", "recall", 3, 87.6),
        ("paper Table 9, BGE-M3", "locomo", "RecurSum", "recall", 3, 58.96),
        ("paper Table 9, Contriever", "locomo", "MemGAS", "recall_all", 10, 81.82),
        ("paper Table 10", "long_mt_bench_plus", "MemLoc (Qwen3-8B (think))", "f1_unstated", None, 40.1),
        ("paper Table 11", "locomo", "MemGAS", "filter_seconds_session", None, 0.47),
        ("paper Table 14", "longmemeval_s", "MemSkill", "judge_claude_sonnet_4_6", None, 56.4),
        ("paper Figure 3", "shpo", "MemLoc (8B)", "reply_tokens", 180, 145)])
    def test_values(self, table, dataset, system, metric, k, value):
        at = pl.col("k").is_null() if k is None else pl.col("k") == k
        assert PAPER.filter(at, table=table, dataset=dataset, system=system, metric=metric)["value"].to_list() == [value]

    def test_no_row_comes_twice_and_every_row_has_a_remark(self):
        assert not PAPER.select("table", "dataset", "system", "metric", "k", "split").is_duplicated().any()
        assert PAPER.join(NOTES, on=["table", "dataset", "system"], how="anti").is_empty()

    def test_what_has_a_number_of_questions_is_a_whole_number_of_them(self):
        known = PAPER.drop_nulls("n").filter(pl.col("split") == "all", pl.col("metric").str.contains("recall_all|judge"))
        assert len(known) > 150 and all(is_whole(value, n) for value, n in known.select("value", "n").iter_rows())
        unknown = PAPER.filter(pl.col("n").is_null(), pl.col("metric").str.starts_with("judge"), pl.col("split") == "all")
        told = unknown.join(NOTES, on=["table", "dataset", "system"])["note"]
        assert len(told) == len(unknown) > 10 and told.str.contains("no whole number of").all()

    def test_the_blocks_of_table_9_are_of_two_kinds(self):
        block = PAPER.filter(pl.col("table").str.starts_with("paper Table 9"), pl.col("metric").str.starts_with("recall"))
        kinds = block.with_columns(ours=pl.col("system").str.contains("MemLoc")).select("encoder", "ours", "metric").unique()
        assert {encoder for encoder, ours, metric in kinds.iter_rows() if metric == "recall_all"} == {"MiniLM", "MPNet", "Contriever"}
        assert set(kinds.filter("ours")["metric"]) == {"recall"}
        bge = block.filter(encoder="BGE-M3")["value"]
        assert sum(is_whole(value, 1986) for value in bge) < len(bge)/2


class TestNothingIsMixed:
    def test_a_section_has_one_metric_one_data_set_one_number_of_questions(self):
        records = Records(load_records())
        for name in PAPER_TABLES:
            for _, lines in build_table(name, PAPER, records):
                for key, part in sections(lines):
                    assert part.select(pl.struct("dataset", "metric").n_unique()).item() == 1
                    assert part.drop_nulls("ours").select(pl.struct("our_metric", "n").n_unique()).item() <= 1
                    assert part["paper"].is_not_null().any() or set(part["empty"]) <= {"not in the paper", "the paper has no value on this data"}, key

    @pytest.mark.parametrize(("theirs", "ours"), [("recall", "recall_all"), ("recall_all", "recall"), ("judge_gpt4o", "f1"), ("f1_unstated", "bleu4"), ("reward", "recall")])
    def test_pairs_of_different_metrics_are_refused(self, theirs, ours):
        assert our_metrics(theirs, [ours]) == []
        with pytest.raises(ValueError, match=f"{theirs} of the paper and {ours} of ours"):
            refuse_pair(theirs, ours)

    def lines(self):
        theirs = PAPER.filter(table="paper Table 9", system="MemLoc w/o locator", metric="recall")
        return published_lines(theirs, Records(load_records()))

    def test_lines_that_do_not_belong_together_are_refused(self):
        lines = self.lines()
        assert len(sections(lines)) == 1
        for change, told in (({"split": "dev"}, "rows with split"), ({"metric": "recall_any"}, "rows with metric"), ({"dataset": "locomo@00000000"}, "rows of the datasets"),
                             ({"commit": "abc1234"}, "comes twice")):
            wrong = [line | {"sources": (line["sources"][0], line["sources"][1] | change)} for line in lines]
            with pytest.raises(ValueError, match=told):
                sections([*lines, *wrong])
        mixed = [line | {"our_metric": "recall_any"} for line in lines]
        with pytest.raises(ValueError, match="do not belong in one line"):
            sections(mixed)
        assert [key[3] for key, _ in sections([*lines, lines[0] | {"n": 60}])] == [1982, 60]

    def test_three_runs_are_not_paired_with_one(self, written):
        frame = pl.read_csv(written[0]/"table_05.csv", infer_schema_length=None)
        assert frame["ours"].null_count() == frame.height

    def test_every_empty_cell_says_why_and_every_pair_what_differs(self, written):
        for name in PAPER_TABLES:
            frame = pl.read_csv(written[0]/f"{name}.csv", schema_overrides=LINE).with_columns(pl.col("differs", "empty").fill_null(""))
            one_sided = pl.col("paper").is_null() | pl.col("ours").is_null()
            assert (frame.filter(one_sided)["empty"] != "").all(), name
            assert (frame.filter(~one_sided)["differs"] != "").all(), name
            assert frame.filter(~one_sided, pl.col("n").is_null()).is_empty(), name

    def test_ours_are_the_records(self, written):
        records = load_records().filter(pl.col("split") == "all")
        for name in PAPER_TABLES:
            frame = pl.read_csv(written[0]/f"{name}.csv", schema_overrides=LINE).drop_nulls("ours")
            found = frame.join(records.select(our_system="system", our_metric="metric", k="k", ours="value", n="n", file="file"),
                               on=["our_system", "our_metric", "k", "ours", "n", "file"], how="anti", nulls_equal=True)
            assert found.is_empty(), (name, found)


class TestNewRecords:
    def row(self, **more):
        return dict.fromkeys(ROWS) | {"table": "retrieval", "dataset": "locomo@79fa87e9", "system": "SeCom (extractive)", "preset": "", "encoder": "minilm", "metric": "recall_all",
                                      "k": 3, "value": 44.0, "low": 42.0, "high": 46.0, "n": 1982, "split": "all", "date": "2026-01-02", "commit": "abc1234"} | more

    def test_a_baseline_finds_its_line(self, tmp_path):
        folder = copy_of_records(tmp_path)
        rows = [self.row(), self.row(system="BM25 session"), self.row(table="answers", metric="f1_trap", k=None, system="SeCom (smollm2)", n=1986),
                self.row(table="judge", metric="judge_strict_gpt-4o", k=None, system="cue (gpt-4o-mini)", n=1986)]
        pl.DataFrame(rows, schema=ROWS).write_csv(folder/"baselines.csv")
        found = lines_of("table_02_07", folder).filter(file="baselines")
        secom = found.filter(system="SeCom").row(0, named=True)
        assert (secom["paper"], secom["ours"], secom["our_system"]) == (55.24, 44.0, "SeCom (extractive)")
        assert secom["differs"] == "encoder minilm, not Contriever; 1,982 questions, not 1,986; rebuilt from its description"
        assert found.filter(our_system="BM25 session").height == 1  # beside the one of another run, not in its place
        answers = lines_of("table_01_13", folder).filter(file="baselines")
        assert "generator smollm2, not GPT-4o-mini; metric f1_trap" in answers.filter(system="SeCom")["differs"][0]
        judged = answers.filter(our_metric="judge_strict_gpt-4o").row(0, named=True)
        assert judged["system"] == "MemLoc (8B)" and "judge strict_gpt-4o, not gpt4o" in judged["differs"]

    def test_longmemeval_fills_its_tables(self, tmp_path):
        folder = copy_of_records(tmp_path)
        rows = [self.row(dataset="longmemeval_s@7249d5f4", metric="recall", system=name, n=282) for name in ("view session", "paper: routing, without time", "memloc")]
        pl.DataFrame(rows, schema=ROWS).write_csv(folder/"lme.csv")
        frame = lines_of("table_08", folder).filter(pl.col("paper").is_not_null() & pl.col("ours").is_not_null())
        assert len(frame) == 2
        assert set(frame["system"]) == {"Session", "w/o Time"}
        assert frame["differs"].str.contains("cleaned release of the data").all()
        assert "no run on longmemeval_s is recorded" not in lines_of("table_04", folder)["empty"]

    def test_no_records(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no records of ours; keep those of a run first"):
            load_records(tmp_path)


class TestRuns:
    def test_the_printed_intervals_are_t_intervals(self):
        rows = PAPER.filter(table="paper Table 5", metric="judge_gpt4o")
        for row in rows.iter_rows(named=True):
            sd = PAPER.filter(table="paper Table 5", metric="judge_gpt4o_sd", dataset=row["dataset"])["value"].item()
            assert t_interval(row["value"], sd, 3) == pytest.approx((row["low"], row["high"]), abs=0.006)

    def test_against_scipy(self):
        from scipy.stats import t, tstd

        values = [0.47, 0.52, 0.44]
        found = run_statistics(values)
        assert found["sd"] == pytest.approx(tstd(values))
        assert (found["low"], found["high"]) == pytest.approx(t.interval(0.95, 2, loc=found["mean"], scale=tstd(values)/3**0.5))
        with pytest.raises(ValueError, match="a deviation needs at least two"):
            run_statistics([1.0])

    def kept(self, seed, reward):
        log = [{"stage": 0, "step": step, "reward": reward + step/100, "length": 20 - step} for step in range(3)]
        return {"settings": {"seed": seed}, "log": log, "report": {"heldout": [{"set": "toy", "system": "shpo", "reward": reward, "f1": 0.5, "exact": 0.1}]}}

    def test_trainings_with_several_seeds_give_a_table_and_curves(self, tmp_path):
        folder = copy_of_records(tmp_path)
        (folder/"shpo-made.json").write_text(json.dumps({"runs": [self.kept(1, 0.4), self.kept(2, 0.5), self.kept(13, 0.6)]}))
        found = seed_table(folder).filter(record="shpo-made", metric="reward").row(0, named=True)
        assert (found["mean"], found["sd"], found["n"], found["seeds"]) == (0.5, 0.1, 3, "1, 2, 13")
        curves = training_curves(folder, PAPER).filter(source="shpo-made, seed 2")
        assert curves.select("step", "reward", "reply_tokens").rows() == [(1, 0.5, 20.0), (2, 0.51, 19.0), (3, 0.52, 18.0)]
        assert "shpo-made" in str(extra_tables("table_05", folder, PAPER, load_records(folder))[-1])
        write_svg(draw_training(training_curves(folder, PAPER)), tmp_path/"a.svg")
        write_svg(draw_training(training_curves(folder, PAPER)), tmp_path/"b.svg")
        assert (tmp_path/"a.svg").read_bytes() == (tmp_path/"b.svg").read_bytes() != (RESULTS/"tables/figure_03.svg").read_bytes()

    def run(self, *values, **more):
        "Result rows of a made-up run, recall at 3, 5 and 10."
        at = zip((3, 5, 10), values, strict=True)
        rows = [dict.fromkeys(ROWS) | {"table": "retrieval", "dataset": "sample@d6015d99", "system": "RAPTOR (extractive)", "preset": "", "encoder": "minilm", "metric": "recall",
                                       "k": k, "value": value, "low": value - 10, "high": value + 8, "n": 112, "split": "all", "date": "2026-01-02", "commit": "abc1234"} | more
                for k, value in at]
        return pl.DataFrame(rows, schema=ROWS)

    def test_both_intervals_and_their_names(self):
        from scipy.stats import t, tstd

        found = over_runs({3: self.run(44.0, 50.0, 60.0), 1: self.run(47.0, 50.0, 60.0), 2: self.run(52.0, 50.0, 60.0)}).sort("k")
        row = found.row(0, named=True)
        values = [47.0, 52.0, 44.0]
        assert row["mean"] == pytest.approx(sum(values)/3, abs=1e-4) and row["sd"] == pytest.approx(tstd(values), abs=1e-4) and row["runs"] == 3 and row["seeds"] == "1, 2, 3"
        assert (row["runs_low"], row["runs_high"]) == pytest.approx(t.interval(0.95, 2, loc=row["mean"], scale=tstd(values)/3**0.5), abs=1e-3)
        assert (row["n"], row["questions_low"], row["questions_high"]) == (112, pytest.approx(row["mean"] - 10, abs=1e-3), pytest.approx(row["mean"] + 8, abs=1e-3))
        steady = found.row(1, named=True)
        assert (steady["sd"], steady["runs_low"], steady["runs_high"], steady["questions_low"]) == (0, 50, 50, 40)

    @pytest.mark.parametrize(("change", "told"), [
        ({"commit": "def5678"}, "seeds 1 and 2 differ in commit"), ({"encoder": "mpnet"}, "differ in encoder"), ({"preset": "paper"}, "differ in preset"),
        ({"dataset": "sample@d6015d99 stratified:50 seed 2"}, "differ in dataset"), ({"n": 111}, "seed 1 has RAPTOR .* with n = 112, seed 2 has not"),
        ({"system": "memloc"}, "must score the same systems"), ({"metric": "recall_all"}, "must score the same")])
    def test_runs_that_differ_in_more_than_the_seed_are_refused(self, change, told):
        with pytest.raises(ValueError, match=told):
            over_runs({1: self.run(1.0, 2.0, 3.0), 2: self.run(1.0, 2.0, 3.0, **change)})

    def test_one_run_or_one_twice_is_refused(self):
        with pytest.raises(ValueError, match="a deviation needs at least two"):
            over_runs({1: self.run(1.0, 2.0, 3.0)})
        with pytest.raises(ValueError, match="seed 2: RAPTOR .* comes twice"):
            over_runs({1: self.run(1.0, 2.0, 3.0), 2: pl.concat([self.run(1.0, 2.0, 3.0)]*2)})
        assert over_runs({1: self.run(1.0, 2.0, 3.0), 2: self.run(1.0, 2.0, 3.0, date="2026-02-03")}).height == 3  # a day is no difference

    def test_committed_runs_with_seeds_are_in_table_5(self, tmp_path):
        folder = copy_of_records(tmp_path)
        before = load_records(folder).height
        (folder/"seeds").mkdir(exist_ok=True)
        for seed, value in ((1, 44.0), (2, 47.0), (7, 50.0)):
            rows = pl.concat([self.run(value, 60.0, 70.0), self.run(80.0, 85.0, 90.0, system="memloc", preset="memloc")])
            rows.write_csv(folder/f"seeds/toy-seed{seed}.csv")
        (folder/"seeds/toy-seed1-paired.csv").write_text("split\nall\n")
        assert sorted(repeated_runs(folder)["toy"]) == [1, 2, 7] and load_records(folder).height == before
        table = next(each for each in extra_tables("table_05", folder, PAPER, load_records(folder)) if "Ours, toy" in each.heading)
        assert "seed only (1, 2, 7)" in table.heading and table.notes == ["the same in all runs, to the last digit kept: memloc"]
        assert table.frame.row(0)[:6] == ("RAPTOR (extractive)", "minilm", "recall@3", 3, "47.00", "3.00")
        assert {"95 % t interval over runs", "95 % bootstrap interval over questions"} <= set(table.frame.columns)


class WideEncoder:
    "Words hashed into 256 dimensions; a word is a token."

    def encode(self, texts):
        import zlib

        import numpy as np
        vectors = np.zeros((len(texts), 256), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                vectors[row, zlib.crc32(word.encode()) % 256] += 1
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors/np.where(norms > 0, norms, 1)

    def n_tokens(self, texts):
        return [len(text.split()) for text in texts]


@pytest.mark.slow
def test_three_seeds_of_a_run_give_one_result_and_raptor_does_not(tmp_path):
    import random

    import numpy as np

    from memloc import baselines
    from memloc.artifacts import Stage
    from memloc.baseline_trees import Raptor, RaptorSettings
    from memloc.data import DataConfig, run_data, sample, subset_of
    from memloc.evaluation import EvaluationConfig, run_evaluation
    from memloc.graph_ppr import GraphConfig, run_graph
    from memloc.memory_units import UnitsConfig, run_units
    from memloc.routing import RoutingConfig, run_routing

    part = subset_of(sample(), "stratified:24")
    run_data(DataConfig(subset="stratified:24"), tmp_path/"base")
    run_units(UnitsConfig(), tmp_path/"base")
    runs, ranked = {}, set()
    for seed in (1, 2, 3):
        run = Path(shutil.copytree(tmp_path/"base", tmp_path/str(seed)))
        random.seed(seed)
        np.random.seed(seed)
        run_routing(RoutingConfig(), run)
        run_graph(GraphConfig(), run)
        seeded = type("Seeded", (Raptor,), {"__init__": lambda self, seed=seed: Raptor.__init__(self, RaptorSettings(chunk_tokens=40, seed=seed))})
        with pytest.MonkeyPatch.context() as patch, Stage(run, "baselines", {}) as stage:
            patch.setattr(baselines, "BASELINES", {"RAPTOR": seeded})
            stage.table("rankings", baselines.rank_baseline("RAPTOR", part, baselines.Tools(WideEncoder())), ["system", "question_id", "rank"])
        runs[seed] = run_evaluation(EvaluationConfig(seed=seed, n_bootstrap=200), run)
        ranked.add(b"".join((run/stage/"rankings.parquet").read_bytes() for stage in ("routing", "graph")))
    assert len(ranked) == 1
    found = over_runs(runs)
    ours = found.filter(~pl.col("system").str.contains("RAPTOR"))
    assert {"memloc", "paper", "released", "BM25 session", "ceiling"} <= set(ours["system"]) and ours["sd"].max() == 0
    assert found.filter(pl.col("system").str.contains("RAPTOR"))["sd"].max() > 0
    table = runs_table("sample", runs)
    assert set(table.frame["system"]) == {"RAPTOR (extractive)"} and "memloc" in table.notes[0]


def test_statistics_of_the_data():
    from memloc.data import sample

    rows = dict(data_statistics([sample(), sample()], tokenizer="minilm").select("metric", "value").iter_rows())
    once = dict(data_statistics([sample()], tokenizer="minilm").select("metric", "value").iter_rows())
    assert rows["conversations"] == 2*once["conversations"] and rows["words_per_conversation"] == once["words_per_conversation"]
    assert once["tokens_minilm"] > once["words_per_conversation"]


def test_numbers_as_text():
    assert [number_text(*pair) for pair in ((None, "recall"), (55.2, "recall"), (103137.0, "tokens_unstated"), (0.5, "reward"))] == ["", "55.20", "103,137", "0.50"]


def test_every_ranking_metric_keeps_its_meaning():
    assert set(PAPER.filter(pl.col("metric").is_in(list(METRICS)))["metric"]) == {"recall", "recall_all", "ndcg_unstated"}
