"""The judge laboratory: samples, planted answers, trust, flips, a real endpoint, and rows that stand beside the paper's."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import polars as pl
import pytest
from scipy.stats import binomtest
from sklearn.metrics import cohen_kappa_score

from memloc import judge_lab, notebooks
from memloc.artifacts import Stage, stage_manifest
from memloc.chat import CachedModel, LLMError, Reply
from memloc.judge import RULES
from memloc.judge_lab import (
    KNOWN,
    SOURCES,
    JudgeLabConfig,
    acceptance_table,
    agreement_table,
    flip_table,
    judge_sources,
    lab_answers,
    lab_models,
    lab_rows,
    plot_judges,
    run_judge_lab,
    sampled_answers,
    trust,
    trust_table,
)
from memloc.paper_tables import LINE, Records, build_table, load_records, table_text
from memloc.results import keep_results
from memloc.schema import COLUMNS
from memloc.tables import ROWS, load_paper

ROOT = Path(__file__).resolve().parent.parent
CATEGORIES = ["multi-session"]*6 + ["temporal-reasoning"]*4 + ["single-session-preference"]*2


def make_run(folder: Path, label: str = "longmemeval_s@7249d5f4") -> Path:
    "A run with twelve questions of three categories, the last one an abstention question, answered by two variants."
    n = len(CATEGORIES)
    names = [f"c{i % 2}/q{i:02}" for i in range(n)]
    gold = [(name, kind, None if i == n - 1 else f"fact {i} number {i}", "text", None, [], [], i == n - 1, None)
            for i, (name, kind) in enumerate(zip(names, CATEGORIES, strict=True))]
    tables = {"gold": gold, "questions": [(name, name[:2], f"what is {name}?", None) for name in names],
              "conversations": [("c0", "made up", "dev", 1), ("c1", "made up", "test", 1)]}
    with Stage(folder, "data", {}) as stage:
        for name, rows in tables.items():
            stage.table(name, pl.DataFrame(rows, schema=COLUMNS[name], orient="row"), next(iter(COLUMNS[name])))
        stage.json("dataset", {"label": label})
    said = [(name, variant, f"it is fact {i}" if i % 2 else f"fact {i} number {i}", False, "ok") for i, name in enumerate(names) for variant in ("cue", "mmr")]
    with Stage(folder, "generation", {"model": "local:smollm2"}) as stage:
        stage.table("answers", pl.DataFrame(said, schema=["question_id", "variant", "answer", "abstained", "status"], orient="row"), "question_id")
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path/"run")


class Scripted:
    "A judge that answers by a function of rule, reference and answer."

    context = 8192

    def __init__(self, say, name="scripted"):
        self.say, self.name, self.key, self.asked = say, name, name, 0

    def count_tokens(self, messages):
        return 1

    def chat(self, batch, sampling, on_reply=None):
        outcomes = []
        for place, (rule, texts) in enumerate(batch):
            self.asked += 1
            _, reference, answer, _ = texts["content"].split("\n")
            said = self.say(rule["content"], reference.partition(": ")[2], answer.partition(": ")[2])
            outcomes.append(Reply(said, n_prompt_tokens=10, n_completion_tokens=1) if isinstance(said, str) else said)
            if on_reply:
                on_reply(place, outcomes[-1])
        return outcomes


def exact(rule, reference, answer):
    if reference.startswith("(none"):
        return "yes" if "mentioned" in answer.lower() else "no"
    return "yes" if answer == reference else "no"


def generous(rule, reference, answer):
    "Exact under the strict prompt; under the others anything with the reference's number in it."
    if "all of it" in rule or reference.startswith("(none"):
        return exact(rule, reference, answer)
    return "yes" if set(re.findall(r"\d+", reference)) & set(re.findall(r"\d+", answer)) else "no"


class TestSample:
    def test_each_category_has_its_share_and_the_seed_decides(self, run):
        system, items = sampled_answers(run, "cue", 6, seed=3)
        assert system == "cue (smollm2)"
        number = items["question_id"].str.slice(-2).cast(pl.Int64).to_list()
        assert [sum(CATEGORIES[i] == kind for i in number) for kind in dict.fromkeys(CATEGORIES)] == [3, 2, 1]
        assert items.equals(sampled_answers(run, "cue", 6, seed=3)[1])
        assert any(not items.equals(sampled_answers(run, "cue", 6, seed=seed)[1]) for seed in (4, 5, 6))
        assert len(sampled_answers(run, "cue", 0)[1]) == len(sampled_answers(run, "cue", 99)[1]) == 12

    def test_a_variant_that_was_not_run(self, run):
        with pytest.raises(ValueError, match=r"no answers of variant 'none'; it has \['cue', 'mmr'\]"):
            sampled_answers(run, "none")

    @pytest.mark.parametrize(("change", "told"), [({"n": -1}, "n=-1"), ({"prompts": "strict,,lenient"}, "separated by ','"), ({"models": "a;a"}, "'a;a'"),
                                                  ({"prompts": "kind"}, "no prompt 'kind'"), ({"limit": 0.0}, "0 < limit"), ({"max_tokens": 0}, "max_tokens=0")])
    def test_settings_that_cannot_be(self, change, told):
        with pytest.raises(ValueError, match=told):
            JudgeLabConfig(**change)


class TestPlanted:
    def test_every_source_says_what_it_is_called(self, run):
        _, items = sampled_answers(run, n=0)
        sources = lab_answers(items)
        assert tuple(sources) == SOURCES and set(KNOWN) == set(SOURCES) - {"system"}
        known = dict(items.select("question_id", "answers").iter_rows())
        for name, answer in sources["wrong"].select("question_id", "answer").iter_rows():
            assert answer not in known[name]
        assert sources["right"].filter(pl.col("kind") != "abstention").select(pl.col("answers").list.first() == pl.col("answer")).to_series().all()
        assert "abstention" not in sources["abstaining"]["kind"] and len(sources["abstaining"]) == 11

    def test_an_exact_judge_makes_no_slip_and_a_nodding_one_is_found_out(self, run):
        _, items = sampled_answers(run, n=0)
        table = trust_table(judge_sources({"exact": Scripted(exact), "nods": Scripted(lambda *_: "yes")}, items))
        for row in table.filter(model="exact").iter_rows(named=True):
            assert [row[source] for source in ("readable", *KNOWN)] == [100, 100, 0, 0, 0]
            assert row["trust"] == "open: too few planted answers (12 right, 12 wrong, 12 vague, 11 abstaining)"
        assert table.filter(model="nods")["trust"].str.starts_with("no: accepts 12 of 12 wrong").all()

    def planted(self, n, slips=0, source="wrong"):
        rows = [(kind, known != (kind == source and i < slips), "ok") for kind, known in KNOWN.items() for i in range(n)]
        return pl.DataFrame(rows, schema=["source", "verdict", "status"], orient="row")

    def test_trust_needs_enough_planted_answers(self):
        assert [trust(self.planted(n))[:4] for n in (35, 36)] == ["open", "yes"]
        assert binomtest(0, 36).proportion_ci().high < 0.1 < binomtest(0, 35).proportion_ci().high
        assert trust(self.planted(100, 5)) == "open: too few planted answers (100 wrong)"
        assert trust(self.planted(100, 11, "right")) == "no: refuses 11 of 100 right"
        assert trust(self.planted(100, 11), limit=0.2) == "yes"

    def test_unreadable_replies_speak_against_a_judge_and_failed_calls_do_not(self):
        unread = pl.DataFrame([("vague", None, "no verdict")]*40, schema=["source", "verdict", "status"], schema_overrides={"verdict": pl.Boolean}, orient="row")
        failed = unread.with_columns(status=pl.lit("error: timeout"))
        assert trust(pl.concat([self.planted(40), failed])) == "yes"
        assert trust(pl.concat([self.planted(40), unread])) == "no: 80% of its replies are verdicts"
        assert trust(unread).startswith("no: 0% of its replies are verdicts")


class TestTables:
    def test_unreadable_verdicts_and_failed_calls_are_counted_and_never_a_no(self, run):
        def say(rule, reference, answer):
            if "fact 0 " in reference:
                return "Yes and no."
            return LLMError("timeout", "after 1 s") if "fact 2 " in reference else "yes"
        _, items = sampled_answers(run, n=0)
        verdicts = judge_sources({"odd": Scripted(say)}, items, ["strict"])
        own = acceptance_table(verdicts).filter(source="system").row(0, named=True)
        assert (own["accepted"], own["n"], own["no_verdict"], own["errors"]) == (100.0, 10, 1, 1)
        assert (own["low"], own["high"]) == (100.0, 100.0)
        rows = lab_rows(verdicts, "s", run, n_bootstrap=100)
        assert rows.filter(system="s", split="all").select("value", "n").row(0) == (100.0, 10)
        mute = judge_sources({"mute": Scripted(lambda *_: "perhaps")}, items, ["strict"])
        table = acceptance_table(mute)
        assert table["accepted"].null_count() == len(SOURCES) and table["no_verdict"].to_list() == [12, 12, 12, 12, 11]
        assert lab_rows(mute, "s", run).is_empty() and trust_table(mute)["trust"].item().startswith("no: 0%")
        with pytest.raises(RuntimeError, match="all 59 calls failed; the first: error: connection"):
            judge_sources({"down": Scripted(lambda *_: LLMError("connection", "nobody there"))}, items, ["strict"])

    def test_flips_by_hand(self, run):
        _, items = sampled_answers(run, n=0)
        verdicts = judge_sources({"exact": Scripted(exact), "generous": Scripted(generous)}, items)
        accepted = {(row["model"], row["prompt"]): row["accepted"] for row in acceptance_table(verdicts).filter(source="system").iter_rows(named=True)}
        assert accepted["exact", "strict"] == accepted["generous", "strict"] == pytest.approx(600/12)
        assert accepted["generous", "lenient"] == pytest.approx(1100/12)  # all but the abstention question, which was answered
        flips = {row["fixed"]: row for row in flip_table(verdicts).iter_rows(named=True)}
        assert flips["exact"]["flip_rate"] == flips["strict"]["flip_rate"] == 0
        assert flips["generous"]["flip_rate"] == flips["lenient"]["flip_rate"] == pytest.approx(500/12, abs=1e-3)
        assert flips["generous"]["low"] < 500/12 < flips["generous"]["high"] and flips["generous"]["n"] == 12
        assert [flips[name]["varied"] for name in ("generous", "lenient")] == ["3 prompts", "2 models"]
        pairs = agreement_table(verdicts)
        assert len(pairs) == 15 and dict(pairs["differ"].value_counts().rows()) == {"both": 6, "prompt": 6, "model": 3}
        pair = pairs.filter(first="lenient_generous", second="strict_generous").row(0, named=True)
        wide = verdicts.filter(model="generous", source="system").pivot("prompt", index="question_id", values="verdict")
        assert pair["kappa"] == pytest.approx(cohen_kappa_score(wide["lenient"], wide["strict"]))
        assert pair["agreement"] == 1 - pair["flip_rate"] == pytest.approx(7/12)
        for row in pairs.iter_rows(named=True):  # the flip rate is never smaller than the difference
            (a, b) = (accepted[tuple(reversed(row[side].split("_")))] for side in ("first", "second"))
            assert 100*row["flip_rate"] >= abs(a - b) - 1e-3

    def test_flips_need_readable_verdicts_of_all(self, run):
        def say(rule, reference, answer):
            return "perhaps" if "all of it" in rule and "fact 1" in reference else generous(rule, reference, answer)
        _, items = sampled_answers(run, n=0)
        found = flip_table(judge_sources({"one": Scripted(say)}, items)).row(0, named=True)
        assert found["n"] == 10  # facts 1 and 10 (11 is the abstention question, without a reference) are unreadable once
        nothing = flip_table(judge_sources({"mute": Scripted(lambda *_: "perhaps")}, items)).row(0, named=True)
        assert (nothing["flip_rate"], nothing["n"]) == (None, 0)

    def test_micro_and_macro(self, run):
        _, items = sampled_answers(run, n=0)
        verdicts = judge_sources({"exact": Scripted(lambda rule, reference, answer: "yes" if "number 0" in answer or "number 8" in answer else "no")}, items, ["strict"])
        rows = lab_rows(verdicts, "s", run, "2026-01-02", "abc1234", 100).filter(system="s")
        value = {row["split"]: row["value"] for row in rows.iter_rows(named=True)}
        assert value["all"] == pytest.approx(200/12, abs=1e-3)
        assert value["all, macro"] == pytest.approx(100*(1/6 + 1/4 + 0)/3, abs=1e-3)
        assert value["dev"] == pytest.approx(200/6, abs=1e-3) and value["test"] == 0
        assert rows.schema == pl.Schema(ROWS) and set(rows["metric"]) == {"judge_strict_exact"} and set(rows["table"]) == {"judge"}

    def test_the_picture_shows_every_judge_and_source(self, run):
        _, items = sampled_answers(run, n=0)
        axes = plot_judges(acceptance_table(judge_sources({"exact": Scripted(exact), "mute": Scripted(lambda *_: "hm")}, items), 100)).axes[0]
        assert [text.get_text() for text in axes.get_yticklabels()] == [f"{prompt}, {model}" for model in ("mute", "exact") for prompt in ("strict", "rubric", "lenient")]
        assert len(axes.containers) == len(SOURCES)


class Handler(BaseHTTPRequestHandler):
    "Chat completions: `exact` as a judge, with faults by the words of the answer."

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rule, texts = (message["content"] for message in body["messages"])
        self.server.seen.append((body["model"], texts))
        _, reference, answer, _ = texts.split("\n")
        fault = self.server.fault(reference)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": exact(rule, reference.partition(": ")[2], answer.partition(": ")[2])}}
        made = {"error": {"message": "refused"}} if fault else {
            "id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice],
            "usage": {"prompt_tokens": 90, "completion_tokens": 1, "total_tokens": 91}}
        raw = json.dumps(made).encode()
        self.send_response(400 if fault else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    one = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    one.seen, one.fault = [], lambda reference: False
    thread = threading.Thread(target=one.serve_forever, daemon=True)
    thread.start()
    yield one
    one.shutdown()
    one.server_close()


class TestEndpoint:
    def test_a_laboratory_over_http_resumes_with_what_failed(self, run, server, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path/"cache"))
        url = f"http://127.0.0.1:{server.server_port}/v1"
        config = JudgeLabConfig(f"endpoint:big@{url}; endpoint:other@{url}", "strict,lenient", n=3, n_bootstrap=100, out_dir=str(tmp_path/"lab"))
        items = sampled_answers(run, "cue", 3)[1]
        broken = json.dumps(items.filter(pl.col("kind") != "abstention")["answers"][0][0])  # as the judge's prompt quotes it
        server.fault = lambda reference: broken in reference
        first = run_judge_lab(config, run)
        n = 2*2*sum(map(len, lab_answers(items).values()))
        assert first.verdicts.height == n
        assert first.verdicts["status"].str.starts_with("error: request").sum() == 2*2*5 == stage_manifest(tmp_path/"lab", "judge_lab")["counts"]["errors"]
        assert "20 calls" not in caplog.text and "10 of" in caplog.text  # by model
        asked, server.fault = len(server.seen), lambda reference: False
        second = run_judge_lab(config, run)
        distinct = {(model, text) for model, text in server.seen[asked:]}
        texts = {part.filter(pl.col("answers").list.first() == json.loads(broken))["answer"][0] for part in lab_answers(items).values()}
        assert len(server.seen) - asked == 2*2*len(texts) and all(broken in text.split("\n")[1] for _, text in distinct)
        assert second.verdicts["status"].unique().to_list() == ["ok"]
        assert second.trust.filter(pl.col("right") == 100, pl.col("wrong") == 0, pl.col("vague") == 0, pl.col("abstaining") == 0).height == 4
        assert second.flips["flip_rate"].to_list() == [0.0]*4
        run_judge_lab(config, run)
        assert len(server.seen) - asked == 2*2*len(texts)  # nothing is asked a third time
        assert not (run/"judge_lab").exists()

    def test_names_that_would_share_a_metric(self):
        with pytest.raises(ValueError, match="two are called 'big'"):
            lab_models("endpoint:big@http://127.0.0.1:1/v1; endpoint:big@http://127.0.0.1:2/v1")


class TestRun:
    def test_a_run_leaves_the_same_files_twice_and_asks_once(self, run, tmp_path):
        inner = Scripted(generous)
        model, config = CachedModel(inner, tmp_path/"cache"), JudgeLabConfig(n=6, n_bootstrap=100)
        found = [(run_judge_lab(config, run, {"g": model}), stage_manifest(run, "judge_lab")["outputs"]) for _ in range(2)]
        assert found[0][1] == found[1][1] and set(found[0][1]) >= {"verdicts.parquet", "rows.csv", "report.md", "trust.parquet"}
        assert inner.asked <= found[0][0].verdicts.height  # the rest were the same question: abstention has one rule
        report = (run/"judge_lab"/"report.md").read_text()
        assert report.count("6 answers") == 5 and "| trust |" in report

    def test_rows_stand_in_table_14_and_the_planted_answers_stay_in_the_record(self, run, tmp_path, monkeypatch):
        monkeypatch.setattr(judge_lab, "git_commit", lambda: "abc1234")
        lab = run_judge_lab(JudgeLabConfig(n=0, prompts="strict,lenient", n_bootstrap=100), run, {"smollm2": Scripted(generous)})
        records = tmp_path/"records"
        shutil.copytree(ROOT/"nbs/results", records, ignore=shutil.ignore_patterns("tables", "*.png"))
        assert keep_results(run/"judge_lab", records/"longmemeval-judge.csv", ["judge"]) > 0
        kept = load_records(records).filter(file="longmemeval-judge")
        assert set(kept["system"]) == {"cue (smollm2)", *(f"planted: {source}" for source in KNOWN)}
        assert kept.filter(system="planted: wrong", split="all", metric="judge_strict_smollm2")["value"].item() == 0.0
        blocks = build_table("table_14", load_paper()[0], Records(load_records(records)))
        ours = pl.concat(pl.DataFrame(lines, schema=LINE) for _, lines in blocks).filter(file="longmemeval-judge")
        assert set(ours["system"]) == {"MemLoc"} and set(ours["metric"]) == {"judge_gpt4o", "judge_gpt5", "judge_claude_sonnet_4_6", "judge_deepseek_v4_pro"}
        assert set(ours["our_metric"]) == {"judge_strict_smollm2", "judge_lenient_smollm2"}
        line = ours.filter(metric="judge_gpt4o", our_metric="judge_lenient_smollm2").row(0, named=True)
        assert line["paper"] == 68.4 and line["n"] == 12 and "judge lenient_smollm2, not gpt4o" in line["differs"] and "12 questions, not 500" in line["differs"]
        mine = lab.rows.filter(system="cue (smollm2)", split="all", metric="judge_lenient_smollm2").row(0, named=True)
        assert (line["ours"], line["low"], line["high"]) == (mine["value"], mine["low"], mine["high"])
        assert "ours is judge_lenient_smollm2, in percent; our n = 12" in table_text("table_14", blocks, load_paper()[1])

    def test_rows_of_uncommitted_code_are_not_kept(self, run, tmp_path, monkeypatch):
        monkeypatch.setattr(judge_lab, "git_commit", lambda: "abc1234+changes")
        run_judge_lab(JudgeLabConfig(n=4, n_bootstrap=100), run, {"exact": Scripted(exact)})
        with pytest.raises(ValueError, match="cannot be kept"):
            keep_results(run/"judge_lab", tmp_path/"x.csv")


def test_papermill_finds_every_setting(monkeypatch):
    path = ROOT/"nbs/parts/judge_lab.ipynb"
    monkeypatch.setitem(notebooks.STAGE_CONFIGS, "judge_lab", "memloc.judge_lab:JudgeLabConfig")
    assert notebooks.check_parameters(path) == []
    assert list(notebooks.notebook_parameters(path))[:3] == ["run_dir", "models", "prompts"] and len(RULES) == 3
