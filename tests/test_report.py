"""The report says what the evaluation says, one row a question is enough to compute it again, and nothing is counted twice."""

import shutil
from pathlib import Path

import nbformat
import polars as pl
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from test_answer_metrics import make_answered, without_evidence

import memloc.failures
import memloc.plots
import memloc.report
from memloc.artifacts import Stage, read_json, stage_manifest, stage_table, write_json, write_table
from memloc.evaluation import EvaluationConfig, run_evaluation
from memloc.failures import STAGES, find_failures
from memloc.pipeline import Step, publish
from memloc.report import (
    RECORD,
    ReportConfig,
    baseline_costs,
    baseline_names,
    card,
    draw_method,
    failure_browser,
    lost_counts,
    main_variant,
    method_counts,
    question_table,
    recall_families,
    run_report,
    spread,
    stage_costs,
    to_show,
    what_was_run,
)

CONFIG = EvaluationConfig(n_bootstrap=100, ks="3,10")
PROFILES = sorted((Path(__file__).resolve().parent.parent/"nbs"/"profiles").glob("*.yaml"))


def rewrite(run, stage, **tables):
    "A finished stage with some tables replaced or added."
    manifest = stage_manifest(run, stage)
    known = {name.removesuffix(".parquet"): stage_table(run, stage, name.removesuffix(".parquet")) for name in manifest["outputs"] if name.endswith(".parquet")}
    plain = {name.removesuffix(".json"): read_json(run/stage/name) for name in manifest["outputs"] if name.endswith(".json")}
    with Stage(run, stage, manifest["settings"]) as again:
        for name, table in (known | tables).items():
            again.table(name, table, table.columns[0])
        for name, content in plain.items():
            again.json(name, content)
        again.counts = manifest["counts"]


def made_run(folder, evidence=True, **settings):
    "The made-up run of the answer tests, with texts, prompts, and some wrong answers; the baselines stage beside it."
    make_answered(folder, **settings)
    turns = stage_table(folder, "data", "turns")
    rewrite(folder, "data", turns=turns.with_columns(speaker=pl.lit("Ida"), text=pl.lit("<b>the boat</b> & ") + pl.col("turn_id"), caption=pl.lit(None, pl.String)))
    if not evidence:
        without_evidence(folder)
    number = pl.col("question_id").str.slice(-3).cast(pl.Int64)
    turned = pl.when(number % 5 == 4).then(7 - pl.col("rank")).when(number % 5 == 2).then((pl.col("rank") + 1) % 6 + 1).otherwise("rank")  # the first becomes last, or third
    for stage in ("graph", "locator"):
        rewrite(folder, stage, rankings=stage_table(folder, stage, "rankings").with_columns(rank=turned).sort("system", "question_id", "rank"))
    base = stage_table(folder, "locator", "rankings")
    named = base.filter(pl.col("rank") <= 2 + number % 2).select("question_id", "session_id", turn_id=pl.col("session_id") + "/t1", rank="rank")
    rewrite(folder, "locator", evidence=named)
    answers = stage_table(folder, "generation", "answers").with_columns(citations=pl.lit([], pl.List(pl.String)))
    wrong = (pl.col("variant") == "cue") & (number % 3 > 0) & (pl.col("status") == "ok")
    answers = answers.with_columns(answer=pl.when(wrong).then(pl.lit("nonsense")).otherwise("answer"), abstained=pl.col("abstained") & ~wrong)
    seen = base.filter(pl.col("rank") <= 2).sort("question_id", "rank").join(turns.select("session_id", "turn_id"), on="session_id", maintain_order="left")
    segments = seen.select(pl.lit("cue").alias("variant"), "question_id", number=pl.int_range(1, pl.len() + 1).over("question_id"), session_id="session_id", turn_id="turn_id")
    contexts = segments.group_by("variant", "question_id", maintain_order=True).agg(sessions=pl.col("session_id").unique(maintain_order=True), n_segments=pl.len())
    rewrite(folder, "generation", answers=answers, segments=segments, contexts=contexts)
    ranking = stage_table(folder, "graph", "rankings").with_columns(system=pl.lit("TF-IDF, whole session"), rank=7 - pl.col("rank"))
    costs = pl.DataFrame([("TF-IDF, whole session", c, 3, 50, 20, 1, 4, 1.25, 0.5) for c in ("c1", "c2")], orient="row", schema=[
        "system", "conversation_id", "n_calls", "n_tokens_in", "n_tokens_out", "n_stand_in", "n_encoded", "seconds_build", "seconds_search"])
    with Stage(folder, "baselines", {"writer": "extractive"}) as stage:
        stage.table("rankings", ranking, ["question_id", "rank"])
        stage.table("cost", costs, "conversation_id")
        stage.json("systems", [{"system": "TF-IDF, whole session", "source": "a book", "writer": None}])
        stage.count(systems=1)
    run_evaluation(CONFIG, folder)
    return folder


def by_hand(metric, ranks, k):
    "A metric from the ranks of one question's evidence."
    if metric == "recall":
        return sum(rank <= k for rank in ranks)/len(ranks)
    return all(rank <= k for rank in ranks) if metric == "recall_all" else max([1/rank for rank in ranks if rank <= k], default=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = made_run(tmp_path_factory.mktemp("report")/"run", failures=[("c1/q004", "cue")])
    run_report(ReportConfig(), folder)
    return folder


@pytest.fixture(scope="module")
def questions(run):
    return stage_table(run, "report", "questions")


class TestOneRowAQuestion:
    def test_all_questions_are_there_and_excluded_as_in_the_evaluation(self, run, questions):
        counts = stage_manifest(run, "evaluation")["counts"]
        assert questions.schema == pl.Schema(RECORD)
        assert questions["question_id"].to_list() == stage_table(run, "data", "questions")["question_id"].to_list()
        assert (len(questions), questions.filter(excluded="").height) == (counts["n_questions"], counts["n_scored"])
        told = questions.filter(pl.col("excluded") != "").select("question_id", "category", reason="excluded")
        assert told.equals(stage_table(run, "evaluation", "excluded")) and len(told) == 1

    @pytest.mark.parametrize(("column", "system"), [("evidence_ranks", "memloc"), ("located_evidence_ranks", "memloc + encoder locator")])
    def test_every_recall_can_be_computed_again(self, run, questions, column, system):
        rows = stage_table(run, "evaluation", "rows").filter(system=system, table="retrieval")
        for split, metric, k, value, n in rows.filter(pl.col("metric").is_in(["recall", "recall_all", "mrr"])).select("split", "metric", "k", "value", "n").iter_rows():
            part, _, category = split.partition("/")
            mine = questions.filter(pl.lit(part == "all") | (pl.col("split") == part), excluded="")
            mine = mine.filter(~pl.col("is_abstention") if category == "answerable" else pl.lit(not category) | (pl.col("category") == category))
            ranks = mine[column].to_list()
            each = [by_hand(metric, [rank or 99 for rank in one], k) for one in ranks]
            assert len(each) == n and 100*sum(each)/n == pytest.approx(value, abs=1e-3), (split, metric, k)

    def test_rankings_are_the_first_sessions_with_their_scores(self, run, questions):
        ranked = stage_table(run, "graph", "rankings").filter(pl.col("rank") <= 10).sort("question_id", "rank")
        opened = questions.select("question_id", session_id="ranking", score="ranking_scores").explode("session_id", "score")
        assert opened.equals(ranked.select("question_id", "session_id", "score"))

    def test_answers_calls_and_named_turns_are_those_of_the_stages(self, run, questions):
        opened = questions.select("question_id", "answers").explode("answers").unnest("answers")
        stored = stage_table(run, "generation", "answers").sort("question_id", "variant")
        same = ["question_id", "variant", "answer", "status", "abstained", "citations", "n_prompt_tokens", "seconds"]
        assert opened.sort("question_id", "variant").select(same).cast({"n_prompt_tokens": pl.Int64}).equals(stored.select(same).cast({"n_prompt_tokens": pl.Int64}))
        calls = stage_table(run, "locator", "calls")
        assert questions["locator_prompt_tokens"].sum() == calls["n_prompt_tokens"].sum() and questions["locator_seconds"].sum() == pytest.approx(calls["seconds"].sum())
        named = questions.select("question_id", "named_turns").explode("named_turns").drop_nulls()
        evidence = stage_table(run, "locator", "evidence").sort("question_id", "rank").select("question_id", named_turns="turn_id")
        assert named.equals(evidence)

    def test_copies_of_a_session_are_one_item(self, run, tmp_path):
        copied = shutil.copytree(run, tmp_path/"run")
        before = question_table(copied).filter(pl.col("evidence_ranks").list.len() == 2)[0]
        pair = before["evidence_sessions"][0].to_list()
        sessions = stage_table(copied, "data", "sessions")
        rewrite(copied, "data", sessions=sessions.with_columns(source_session_id=pl.when(pl.col("session_id").is_in(pair)).then(pl.lit("same")).otherwise("source_session_id")))
        after = question_table(copied).filter(question_id=before["question_id"][0])
        assert after["evidence_ranks"].to_list() == [[min(before["evidence_ranks"][0])]]

    def test_verdicts_of_a_judge(self, run, tmp_path):
        copied = shutil.copytree(run, tmp_path/"run")
        asked = stage_table(copied, "data", "questions")["question_id"]
        verdicts = pl.DataFrame([("cue (smollm2)", name, prompt, i % 2 == 0, "ok") for i, name in enumerate(asked) for prompt in ("lenient", "strict")],
                                orient="row", schema=["system", "question_id", "prompt", "verdict", "status"])
        rewrite(copied, "evaluation", verdicts=verdicts)
        table = question_table(copied, ReportConfig(report_rule="judge"))
        assert set(table["verdicts"].list.len()) == {2} and table["verdicts"][0].to_list()[0] == {"system": "cue (smollm2)", "prompt": "lenient", "verdict": True, "status": "ok"}
        known = table.drop_nulls("lost").select("question_id", (pl.col("lost") == "").alias("right"))
        expected = dict(zip(asked, [i % 2 == 0 for i in range(len(asked))], strict=True))
        assert len(known) > 30 and all(expected[name] == right for name, right in known.iter_rows())


class TestWhatIsMissing:
    @pytest.mark.parametrize("gone", [("generation",), ("locator", "generation", "baselines")])
    def test_absent_stages_leave_empty_columns_and_a_report(self, run, tmp_path, gone):
        copied = shutil.copytree(run, tmp_path/"run")
        for stage in gone:
            shutil.rmtree(copied/stage)
        run_evaluation(CONFIG, copied)
        table = run_report(ReportConfig(), copied)
        assert table.schema == pl.Schema(RECORD) and len(table) == 40 and table["evidence_ranks"].list.len().sum() > 0
        if "generation" in gone:
            assert table["lost"].null_count() == 40 and table["answers"].list.len().sum() == 0 and main_variant(copied) == ""
        if "locator" in gone:
            assert table["locator_calls"].null_count() == 40 and not stage_manifest(copied, "report")["inputs"].get("locator/rankings.parquet")
        draw_method(method_counts(copied, table))
        assert what_was_run(copied).frame.height > 8

    def test_a_locator_that_read_some_questions(self, tmp_path):
        folder = made_run(tmp_path, located=12)
        table = run_report(ReportConfig(), folder)
        assert table["locator_calls"].count() == 12 == (table["located_ranking"].list.len() > 0).sum()
        assert table["lost"].count() <= 12 and lost_counts(table)["questions"][-1] == table["lost"].count()
        assert (table["pieces"].list.len() > 0).sum() <= 12

    def test_no_gold_evidence_at_all(self, tmp_path):
        folder = made_run(tmp_path, evidence=False)
        table = run_report(ReportConfig(), folder)
        assert set(table["excluded"]) == {"no gold evidence"} and table["evidence_ranks"].list.len().sum() == 0
        assert set(table["lost"].drop_nulls()) <= {"", "generation"}  # abstention questions only
        assert table.filter(pl.col("lost").is_not_null())["is_abstention"].all()

    def test_no_evaluation_and_wrong_names(self, run, tmp_path):
        with pytest.raises(FileNotFoundError, match="stage 'evaluation' has not finished"):
            run_report(ReportConfig(), tmp_path)
        with pytest.raises(ValueError, match=r"no ranking of 'mem0'; report_system must be one of \['BM25 session'"):
            question_table(run, ReportConfig(report_system="mem0"))
        with pytest.raises(ValueError, match="report_variant='none': the run has the variants"):
            question_table(run, ReportConfig(report_variant="none"))
        for wrong in ({"report_metric": "f1"}, {"report_rule": "best"}, {"report_k": 0}, {"n_shown": -1}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                ReportConfig(**wrong)


class TestWhereItWasLost:
    def test_the_stages_are_those_of_a_slow_oracle(self, run, questions):
        ranked = {key: part["session_id"].to_list() for (key,), part in stage_table(run, "locator", "rankings").sort("question_id", "rank").partition_by("question_id", as_dict=True).items()}
        for row in questions.iter_rows(named=True):
            (cue,) = [each for each in row["answers"] if each["variant"] == "cue"]
            if cue["status"] != "ok" or (not row["evidence_sessions"] and not row["is_abstention"]):
                assert row["lost"] is None
                continue
            number, order = int(row["question_id"][-3:]), ranked[row["question_id"]]
            places = [order.index(session) + 1 for session in row["evidence_sessions"]]
            stages = ["generation" if place <= 2 else "retrieval" if place > 3 else "reranking" if number % 2 else "extraction" for place in places]
            expected = "" if number % 3 == 0 else "generation" if row["is_abstention"] else min(stages, key=STAGES.index)
            assert row["lost"] == expected == cue["lost"], row["question_id"]
        assert {*STAGES, "", None} == set(questions["lost"])

    def test_counts_add_up_to_every_question(self, run, questions):
        counts, found = lost_counts(questions), find_failures(run)
        total = counts.row(-1, named=True)
        assert total["right"] + sum(total[stage] for stage in STAGES) == total["questions"] == found.n_questions
        assert total["questions"] + questions["lost"].null_count() == len(questions) and questions["lost"].null_count() == len(found.left_out) == 2
        assert counts[:-1]["missed"].sum() == total["missed"] == len(found.missed) > 0
        recorded = stage_manifest(run, "report")["counts"]
        assert (recorded["n_right"], recorded["n_missed"]) == (total["right"], total["missed"])
        with pytest.raises(AssertionError, match="do not add up"):
            lost_counts(questions.with_columns(lost=pl.lit("nowhere")))

    def test_a_variant_without_memory_is_wrong_at_no_stage(self, questions):
        none = questions.select("answers").explode("answers").unnest("answers").filter(variant="none")
        assert none.filter(~pl.col("right"))["lost"].null_count() == none.filter(~pl.col("right")).height > 0

    def test_cards_show_every_stage_and_escape_what_people_wrote(self, run, questions):
        cards = failure_browser(run, questions, ReportConfig(n_shown=3))
        page, total = cards._repr_html_(), lost_counts(questions).row(-1, named=True)
        assert page.count("<details>") == sum(min(3, total[stage]) for stage in STAGES) == len(repr(cards).splitlines())
        assert "&lt;b&gt;the boat&lt;/b&gt; &amp;" in page and "<b>the boat" not in page
        for stage in STAGES:
            assert page.count(f'href="#lost-{stage}"') == page.count(f'id="lost-{stage}"') == 1 and f"{stage} ({total[stage]})" in page
        row = questions.filter(lost="retrieval").row(0, named=True)
        one = card(row | {"question": "<script>alert(1)</script>"}, {}, "cue")
        assert "<script" not in one and "its session was no candidate" in one and all(f"<b>{name}</b>" in one for name in row["evidence_sessions"])
        assert failure_browser(run, questions, ReportConfig(n_shown=0))._repr_html_().count("<details>") == 0

    @pytest.mark.parametrize("n", [0, 1, 2, 5, 7, 9])
    def test_rows_are_spread_and_none_comes_twice(self, n):
        shown = spread(pl.DataFrame({"i": range(7)}), n)["i"].to_list()
        assert len(shown) == len(set(shown)) == min(n, 7) and shown == sorted(shown)
        assert n < 2 or (shown[0], shown[-1]) == (0, 6)

    def test_shown_questions_are_missed_ones(self, questions):
        shown = to_show(questions, 2)
        assert shown["lost"].is_in(STAGES).all() and shown.group_by("lost").len()["len"].max() == 2


class TestTablesAndPictures:
    def test_both_recalls_of_all_systems_are_the_evaluations(self, run):
        rows = stage_table(run, "evaluation", "rows")
        frame = recall_families(rows, baseline_names(run)).frame
        assert set(frame["system"]) == set(rows.filter(table="retrieval")["system"]) and frame.columns[3:] == ["recall@3", "recall@10", "recall_all@3", "recall_all@10"]
        for row in frame.iter_rows(named=True):
            for name in frame.columns[3:]:
                metric, _, k = name.partition("@")
                (value,) = rows.filter(table="retrieval", split="all", system=row["system"], metric=metric, k=int(k))["value"]
                assert row[name].startswith(f"{value:.2f} [")
        assert dict(frame.select("system", "kind").iter_rows()) == {
            "ceiling": "bound", "memloc": "memloc", "memloc + encoder locator": "memloc", "memloc: routing": "memloc", "BM25 session": "baseline", "TF-IDF, whole session": "baseline", "view turn": "one view"}

    def test_cost_is_the_sum_of_the_records(self, run):
        costs = {row["stage"]: row for row in stage_costs(run).iter_rows(named=True)}
        assert list(costs) == ["data", "units", "routing", "graph", "baselines", "locator", "generation", "evaluation"]
        assert (costs["locator"]["calls"], costs["locator"]["prompt_tokens"], costs["locator"]["completion_tokens"]) == (80, 8000, 800)
        assert (costs["generation"]["calls"], costs["generation"]["prompt_tokens"]) == (80, 80*300) and costs["baselines"]["calls"] == 0  # no model behind the writer
        assert baseline_costs(run).rows() == [("TF-IDF, whole session", "a book", "none", 2.5, 1.0, 6, 100, 40, 8)]

    def test_the_picture_has_the_numbers_of_the_run(self, run, questions):
        counts = method_counts(run, questions)
        pieces = questions.select("pieces").explode("pieces").drop_nulls().unnest("pieces")
        assert (counts["sessions"], counts["sessions_each"], counts["candidates"], counts["tokens"]) == (12, 6, 3, 300)
        assert counts["kept_candidate"] == pytest.approx(pieces["candidate"].mean()) and counts["pieces"] == len(pieces)
        said = " ".join(text.get_text() for text in draw_method(counts).axes[0].texts)
        assert all(part in said for part in ("2 conversations", "12 sessions", "first 3\nsessions", "300 tokens", f"{100*counts['kept_shown']:.1f} %", "Retrieve", "Localize", "Generate"))

    def test_what_was_run_names_data_and_code(self, run):
        told = dict(what_was_run(run).frame.iter_rows())
        assert (told["data set"], told["questions scored"], told["excluded"], told["main ranking"]) == ("locomo@79fa87e9", "39 of 40", "1 no gold evidence", "memloc")
        assert told["size"].startswith("2 conversations, 12 sessions") and told["commit"] == stage_manifest(run, "evaluation")["commit"]


class TestTheNotebook:
    @pytest.mark.slow
    def test_its_cells_run_on_whole_and_bare_runs(self, run, tmp_path, root):
        cells = nbformat.read(root/"nbs"/"09_report.ipynb", as_version=4).cells
        source = [one.source for one in cells if one.cell_type == "code" and one.source.startswith("if run_dir")]
        assert len(source) >= 8
        bare = shutil.copytree(run, tmp_path/"bare")
        for stage in ("baselines", "locator", "generation"):
            shutil.rmtree(bare/stage)
        run_evaluation(CONFIG, bare)
        for folder, least in ((run, 14), (bare, 7), (made_run(tmp_path/"unlabelled", evidence=False), 6)):
            shown: list = []
            space = vars(memloc.plots) | vars(memloc.failures) | vars(memloc.evaluation) | vars(memloc.report)
            space |= {name: field.default for name, field in ReportConfig.__dataclass_fields__.items()}
            space |= {"run_dir": str(folder), "display": lambda *what, shown=shown: shown.extend(what)}
            for code in source:
                exec(code, space)  # noqa: S102
            assert len(shown) >= least, folder.name

    def test_it_is_small_and_the_last_step_of_every_profile(self, root):
        assert (root/"nbs"/"09_report.ipynb").stat().st_size < 300_000
        assert len(PROFILES) >= 4
        for path in PROFILES:
            steps = [step["stage"] for step in yaml.safe_load(path.read_text())["stages"]]
            assert steps[-2:] == ["evaluation", "report"], path.name

    def test_no_other_module_reads_what_it_writes(self, root):
        for path in (root/"memloc").glob("*.py"):
            assert path.stem == "report" or ".report import" not in path.read_text(), path.name

    def test_the_run_keeps_the_rows_of_the_stage_before(self, tmp_path):
        for stage in ("evaluation", "report"):
            (tmp_path/stage).mkdir()
        write_json({"n": 1}, tmp_path/"evaluation"/"report.json")
        write_table(pl.DataFrame({"metric": ["recall"], "value": [1.0]}), tmp_path/"evaluation"/"rows.parquet", "metric")
        notebook = new_notebook(cells=[new_markdown_cell("Lesson."), new_markdown_cell("## Run this stage"), new_code_cell("secret", outputs=[
            new_output("display_data", data={"text/html": "<details><summary>a card</summary></details>", "text/plain": "a card"})])])
        (tmp_path/"notebooks").mkdir()
        nbformat.write(notebook, tmp_path/"notebooks"/"09_report.ipynb")
        found = publish(tmp_path, [Step(Path("08_evaluation.ipynb"), "evaluation"), Step(Path("09_report.ipynb"), "report")])
        assert [path.name for path in found] == ["report.json", "rows.csv", "report.html"] and read_json(tmp_path/"report.json") == {"n": 1}
        page = (tmp_path/"report.html").read_text()
        assert "<details><summary>a card" in page and "Lesson." not in page and "secret" not in page and ": report</title>" in page


def test_two_reports_of_one_run_have_equal_bytes(run, tmp_path):
    copied = shutil.copytree(run, tmp_path/"run")
    run_report(ReportConfig(), copied)
    assert stage_manifest(copied, "report")["outputs"] == stage_manifest(run, "report")["outputs"]
