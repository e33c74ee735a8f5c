"""Answers of the baselines: the generator's prompt, every system, nothing lost on the way into the tables."""

import shutil
from collections import Counter
from fnmatch import fnmatchcase

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_answer_metrics import make_answered
from test_baselines import WordEncoder
from test_llm import Server

from memloc import baseline_answers, baselines
from memloc.answer_metrics import constant_answers, gold_answers, read_answers, score_answers
from memloc.artifacts import Stage, read_json, sha256_file, stage_manifest, stage_table
from memloc.baseline_answers import (
    NO_READER,
    BaselineAnswersConfig,
    answer_name,
    fit_newest,
    full_sessions,
    ranked_context,
    run_baseline_answers,
    stand_in_replies,
)
from memloc.baselines import BaselinesConfig, Session, Tools, keep_newest, run_baselines
from memloc.chat import LLMError, Reply
from memloc.data import DataConfig, run_data
from memloc.evaluation import SHARED, EvaluationConfig, answer_groups, run_evaluation, score_once
from memloc.generation import ANSWERS, Found, KeptSession, build_context, chat_messages, extractive_answer, read_memory
from memloc.paper_tables import counterparts, generator_of
from memloc.tables import merge_rows

SYSTEMS = "no memory; full context; BM25, whole session; RecurSum"


def session(name: str, *texts: str) -> KeptSession:
    return KeptSession(name, None, tuple((f"{name}/t{i:03d}", text) for i, text in enumerate(texts)))


class Toy:
    "A chat model that counts words, answers with the last word of the question, and can fail or die."

    name, key = "local:toy", "toy-1"

    def __init__(self, context=100_000, fails=lambda text: False, dies_at=None, says=None):
        self.context, self.fails, self.dies_at, self.says, self.prompts = context, fails, dies_at, says, []

    def count_tokens(self, messages):
        return sum(len(message["content"].split()) for message in messages)

    def chat(self, batch, sampling, on_reply=None):
        outcomes = []
        for place, messages in enumerate(batch):
            if len(self.prompts) == self.dies_at:
                raise KeyboardInterrupt
            self.prompts.append(messages)
            text = messages[-1]["content"]
            said = self.says or f"{text.split()[-1].strip('?')} [1]"
            outcome = LLMError("timeout", "no reply") if self.fails(text) else Reply(
                said, n_prompt_tokens=self.count_tokens(messages), n_completion_tokens=2, seconds=0.5, finish_reason="stop")
            outcomes.append(outcome)
            if on_reply:
                on_reply(place, outcome)
        return outcomes


@pytest.fixture(scope="module")
def ranked_run(tmp_path_factory):
    "Twelve questions of the sample, ranked by four baselines."
    folder = tmp_path_factory.mktemp("ranked")
    run_data(DataConfig(limit_questions=12), folder)
    with Stage(folder, "units", {"captions": True}) as stage:
        stage.json("encoder", {"name": "words"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "run_encoder", lambda run_dir: WordEncoder())
        run_baselines(BaselinesConfig(SYSTEMS), folder)
    return folder


@pytest.fixture
def run_dir(ranked_run, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path/"cache"))
    monkeypatch.setattr(baseline_answers, "run_encoder", lambda run_dir: WordEncoder())
    return shutil.copytree(ranked_run, tmp_path/"run")


def answer(run_dir, model=None, systems="all", **more):
    run_baseline_answers(BaselineAnswersConfig(systems, "local:toy" if model else "extractive", **more), run_dir, model)
    return stage_table(run_dir, "baseline_answers", "answers")


def counts(run_dir):
    return stage_manifest(run_dir, "baseline_answers")["counts"]


class TestNames:
    @pytest.mark.parametrize("published, table, name", [
        ("RAPTOR", "paper Table 1/13", answer_name("RAPTOR", "extractive", "smollm2")), ("Full", "paper Table 11", answer_name("full context", None, "smollm2")),
        ("Full History", "paper Table 1/13", "full context (smollm2)"), ("MemoryTree", "paper Table 1/13", answer_name("MemTree", "smollm2", "smollm2")),
        ("MemoryAgent", "paper Table 1/13", "MemAgent (smollm2, untrained)"), ("MemGAS (SmolLM2)", "paper Table 10", answer_name("MemGAS", "extractive", "smollm2"))])
    def test_the_papers_rows_find_ours_and_its_generator(self, published, table, name):
        assert any(fnmatchcase(name.lower(), pattern.lower()) for pattern, *_ in counterparts(table, published))
        assert generator_of(name).split(",")[0] == "smollm2"

    def test_another_generator_is_no_counterpart(self):
        for name in (answer_name("MemGAS", "smollm2", "extractive"), answer_name("MemGAS", "smollm2", "qwen")):
            assert not any(fnmatchcase(name.lower(), pattern.lower()) for pattern, *_ in counterparts("paper Table 10", "MemGAS (SmolLM2)"))


class TestContexts:
    def test_a_ranking_is_shown_as_the_generation_stage_shows_it(self):
        memory = {name: session(name, f"A: about {name}.") for name in ("s1", "s2", "s3", "s4")}
        theirs = build_context("What?", None, Found(("s3", "s1", "s2", "s4"), ("s1",), (), {}), memory, "mmr", "topk", 3)
        assert ranked_context("What?", None, ["s3", "s1", "s2", "s4"], memory, 3) == theirs
        empty = ranked_context("What?", None, [], memory, 3)
        assert "No part of the conversations was found" in chat_messages(empty)[1]["content"]
        assert "No part" not in chat_messages(ranked_context("What?", None, None, memory, 3))[1]["content"]

    @settings(deadline=None, max_examples=25)
    @given(st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=5), st.integers(1, 30))
    def test_the_full_context_is_what_the_baselines_stage_kept(self, sizes, budget):
        memory = {f"s{i}": session(f"s{i}", *(f"A: {' '.join(['w']*n)}" for n in turns)) for i, turns in enumerate(sizes)}
        sessions = [Session(name, None, tuple(text for _, text in each.turns)) for name, each in memory.items()]
        kept = keep_newest(sessions, Tools(WordEncoder()), budget)
        rows = pl.DataFrame([(name, i, *row) for i, (name, row) in enumerate(zip(memory, kept))], orient="row", schema={
            "session_id": pl.String, "position": pl.Int64, "n_turns_kept": pl.Int64, "n_tokens_kept": pl.Int64, "n_tokens_cut": pl.Int64})
        found = full_sessions(rows, memory, budget)
        assert [(each.session_id, len(each.turns)) for each in found] == [(name, n) for name, (n, *_) in zip(memory, kept) if n]
        assert all(each.turns == memory[each.session_id].turns[-len(each.turns):] for each in found)
        smaller = full_sessions(rows, memory, max(budget//2, 1))
        assert smaller == found[len(found) - len(smaller):]

    @settings(deadline=None, max_examples=25)
    @given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(90, 260))
    def test_as_many_of_the_newest_sessions_as_fit_whichever_question_is_asked(self, sizes, window):
        sessions, model = [session(f"s{i}", f"A: {' '.join(['w']*n)}") for i, n in enumerate(sizes)], Toy(window)
        asked = [ranked_context(text, None, [], {}) for text in ("Why?", "Why on earth did it rain?")]
        def longest(shown): return max(model.count_tokens(chat_messages(ranked_context(each.question, None, [s.session_id for s in shown], {s.session_id: s for s in shown}, 99))) for each in asked)
        found = fit_newest(sessions, asked, model, 8)
        assert found == sessions[len(sessions) - len(found):] and found
        assert longest(found) <= window - 8 or len(found) == 1
        assert len(found) == len(sessions) or longest(sessions[-len(found) - 1:]) > window - 8


WORD = st.sampled_from(["red", "kayak", "sold", "Oslo", "rain", "the", "blue"])
SAID = st.lists(st.lists(WORD, min_size=1, max_size=4).map(lambda words: f"A: {' '.join(words)}."), max_size=3)


class TestStandIn:
    @settings(deadline=None, max_examples=25)
    @given(st.lists(SAID, min_size=1, max_size=3), st.lists(st.tuples(st.permutations(range(3)), st.lists(WORD, min_size=1, max_size=3)), min_size=1, max_size=5))
    def test_one_index_for_many_says_what_one_for_each_says(self, texts, asked):
        memory = {f"s{i}": session(f"s{i}", *turns) for i, turns in enumerate(texts)}
        contexts = {("A", f"q{i}"): ranked_context(" ".join(words), None, [f"s{j}" for j in order if j < len(texts)], memory)
                    for i, (order, words) in enumerate(asked)}
        assert stand_in_replies(contexts) == {key: extractive_answer(each) for key, each in contexts.items()}

    def test_a_long_context_is_clipped_as_there_and_a_full_one_session_by_session(self):
        long = [session(f"s{i}", f"A: {'rain on the roof. '*900}The {word} boat was sold.") for i, word in enumerate(("red", "blue"))]
        context = {("A", "q"): ranked_context("Which boat was blue?", None, ["s0", "s1"], {each.session_id: each for each in long})}
        assert stand_in_replies(context)["A", "q"] == extractive_answer(context["A", "q"]) != "The blue boat was sold. [2]"
        assert stand_in_replies(context, full=True)["A", "q"] == "The blue boat was sold. [2]"


class TestStage:
    def test_every_system_answers_every_question_without_a_label(self, run_dir):
        (run_dir/"data"/"gold.parquet").unlink()
        found = answer(run_dir)
        assert found.schema == pl.Schema(ANSWERS) and set(found["status"]) == {"ok"}
        assert dict(found.group_by("variant").len().iter_rows()) == dict.fromkeys(
            ("no memory (extractive)", "full context (extractive)", "BM25, whole session (extractive)", "RecurSum, extractive writer (extractive)"), 12)
        assert read_json(run_dir/"baseline_answers"/"systems.json")["left_out"] == dict.fromkeys(("Memory-R1", "MemAgent", "MemSkill"), NO_READER)
        assert not any("gold" in name for name in stage_manifest(run_dir, "baseline_answers")["inputs"])
        assert found.filter(pl.col("variant") == "no memory (extractive)")["abstained"].all()
        first = sha256_file(run_dir/"baseline_answers"/"answers.parquet")
        answer(run_dir)
        assert sha256_file(run_dir/"baseline_answers"/"answers.parquet") == first

    def test_the_first_sessions_of_the_ranking_are_shown_and_cited(self, run_dir):
        found = answer(run_dir, systems="BM25, whole session", n_sessions=2)
        ranked = stage_table(run_dir, "baselines", "rankings").filter(pl.col("system") == "BM25, whole session", pl.col("rank") <= 2)
        shown = dict(stage_table(run_dir, "baseline_answers", "contexts").select("question_id", "sessions").iter_rows())
        for question, sessions in ranked.sort("rank").group_by("question_id", maintain_order=True).agg("session_id").iter_rows():
            assert shown[question] == sessions
        turns = {turn for each in read_memory(run_dir).values() for turn, _ in each.turns}
        for question, cited in found.select("question_id", "citations").iter_rows():
            assert set(cited) <= turns and all(turn.rsplit("/", 1)[0] in shown[question] for turn in cited)

    def test_the_questions_are_those_that_generation_answered(self, run_dir):
        ids = stage_table(run_dir, "data", "questions")["question_id"].to_list()
        with Stage(run_dir, "generation", {"model": "local:toy"}) as stage:
            stage.table("answers", pl.DataFrame({"question_id": ids[2:9]}), "question_id")
        assert set(answer(run_dir)["question_id"]) == set(ids[2:9])
        few = set(answer(run_dir, n_questions=3)["question_id"])
        assert len(few) == 3 and few < set(ids[2:9]) and set(answer(run_dir, n_questions=3)["question_id"]) == few

    def test_a_small_window_loses_the_oldest_sessions_and_says_how_much(self, run_dir):
        answer(run_dir, Toy(1200), "full context")
        told = stage_table(run_dir, "baseline_answers", "truncated")
        assert (told["n_sessions_shown"] < told["n_sessions"]).all() and counts(run_dir)["truncated_tokens"] == told["n_tokens_cut"].sum() > 0
        order = stage_table(run_dir, "data", "sessions").sort("conversation_id", "position").group_by("conversation_id", maintain_order=True).agg("session_id")
        history = {sessions[-1]: sessions for _, sessions in order.iter_rows()}
        for (shown,) in stage_table(run_dir, "baseline_answers", "contexts").select("sessions").iter_rows():
            assert shown == history[shown[-1]][-len(shown):]

    def test_failures_are_counted_kept_and_asked_again(self, run_dir):
        lost = stage_table(run_dir, "data", "questions")["question"][0]
        failing = Toy(fails=lambda text: lost in text and "Session 1" in text)
        found = answer(run_dir, failing, SYSTEMS)
        assert len(found) == 48 and counts(run_dir)["errors"] == 3 == (found["status"] != "ok").sum()
        kept, left_out = read_answers(run_dir, "baseline_answers")
        assert kept["question_id"].n_unique() == 11 and left_out["question_id"].n_unique() == 1
        again = Toy()
        assert set(answer(run_dir, again, SYSTEMS)["status"]) == {"ok"} and len(again.prompts) == 3

    def test_a_killed_run_goes_on(self, run_dir):
        with pytest.raises(KeyboardInterrupt):
            answer(run_dir, Toy(dies_at=20), SYSTEMS)
        rest = Toy()
        assert len(answer(run_dir, rest, SYSTEMS)) == 48
        first = Toy()
        shutil.rmtree(run_dir.parent/"cache")
        answer(run_dir, first, SYSTEMS)
        assert len(first.prompts) - len(rest.prompts) == 20

    def test_a_model_that_never_answers_is_an_error(self, run_dir):
        with pytest.raises(RuntimeError, match="all 48 calls failed"):
            answer(run_dir, Toy(fails=lambda text: True), SYSTEMS)

    @pytest.mark.parametrize("given, message", [({"systems": "RAPTOR"}, "'RAPTOR' is not among the baselines of this run"), ({"systems": " ; "}, "'nothing'"),
                                                ({"budget": 0}, "budget must be"), ({"n_questions": -1}, "n_questions must be")])
    def test_wrong_settings_are_named(self, run_dir, given, message):
        with pytest.raises(ValueError, match=message):
            answer(run_dir, **given)


class TestReaders:
    def test_an_unreadable_reply_is_the_answer_and_is_counted(self, run_dir):
        found = answer(run_dir, Toy(says="Her boat, I think."), "Memory-R1; MemAgent; MemSkill", n_questions=3)
        assert Counter(found["variant"]) == {f"{name} (toy, untrained)": 3 for name in ("Memory-R1", "MemAgent", "MemSkill")}
        assert set(found["status"]) == {"ok"} and set(found["answer"]) == {"Her boat, I think."} and counts(run_dir)["unreadable"] == 6
        reading = stage_table(run_dir, "baseline_answers", "reading")
        failed = dict(reading.group_by("system").agg(pl.col("failed").sum()).iter_rows())
        assert failed["MemAgent (toy, untrained)"] == 0 and failed["Memory-R1 (toy, untrained)"] == reading.filter(
            pl.col("system") == "Memory-R1 (toy, untrained)")["calls"].sum()

    def test_a_reply_in_the_form_asked_for(self, run_dir):
        found = answer(run_dir, Toy(says='{"used": [], "answer": "a boat"}'), "Memory-R1", n_questions=2)
        assert found["answer"].to_list() == ["a boat"]*2 and counts(run_dir)["unreadable"] == 0

    def test_a_reader_without_any_answer_is_an_error(self, run_dir):
        with pytest.raises(RuntimeError, match=r"MemAgent \(toy, untrained\): all 2 answers failed"):
            answer(run_dir, Toy(fails=lambda text: "Next part" not in text), "MemAgent", n_questions=2)


RAPTOR = "RAPTOR, extractive writer (smollm2)"


def with_baselines(folder, keep, failing=()):
    "A run with answers of two baselines to some of its questions; RAPTOR cites the gold evidence, nobody else cites."
    make_answered(folder)
    own = stage_table(folder, "generation", "answers").with_columns(citations=pl.lit([], pl.List(pl.String)))
    gold = stage_table(folder, "data", "gold").select("question_id", cited="evidence_turns")
    theirs = own.filter(pl.col("variant") == "cue")[:keep].join(gold, on="question_id", how="left")
    failed = pl.when(pl.col("question_id").is_in(list(failing))).then(pl.lit("error: timeout")).otherwise("status").alias("status")
    rows = [theirs.with_columns(failed, variant=pl.lit(name), citations=pl.col("cited" if name == RAPTOR else "citations")).drop("cited")
            for name in (RAPTOR, "no memory (smollm2)")]
    for stage, answers, model in (("generation", own, "local:smollm2"), ("baseline_answers", pl.concat(rows), "local:smollm2")):
        with Stage(folder, stage, {"model": model}) as written:
            written.table("answers", answers, ["variant", "question_id"])
    return folder


class TestTables:
    def test_the_same_questions_one_table(self, tmp_path):
        rows = run_evaluation(EvaluationConfig(n_bootstrap=100), with_baselines(tmp_path, 40)).filter(split="all")
        found = rows.filter(table="answers", metric="f1")
        assert set(found["system"]) == {"constant: not mentioned", "no memory (smollm2)", "cue (smollm2)", RAPTOR}
        assert found["n"].n_unique() == 1 and not rows["table"].str.starts_with(SHARED).any() and len(merge_rows(found)) == 4
        assert dict(rows.filter(table="cost", metric="generator_tokens").select("system", "value").iter_rows())[RAPTOR] == 300
        cited = rows.filter(table="cited evidence")
        assert set(cited["system"]) == {RAPTOR} and set(cited["value"]) == {100.0}

    def test_fewer_questions_two_tables_that_never_mix(self, tmp_path):
        rows = run_evaluation(EvaluationConfig(n_bootstrap=100), with_baselines(tmp_path, 10)).filter(split="all", metric="f1_trap")
        groups = {name: part for (name,), part in rows.partition_by("table", as_dict=True).items()}
        assert set(groups) == {"answers", f"{SHARED}answers"}
        assert set(groups["answers"]["n"]) == {40} and RAPTOR not in set(groups["answers"]["system"])
        assert set(groups[f"{SHARED}answers"]["n"]) == {10} and len(groups[f"{SHARED}answers"]) == 4
        assert f"{SHARED}cost. In tokens and seconds" in (tmp_path/"evaluation"/"report.md").read_text()
        scores = stage_table(tmp_path, "evaluation", "per_question").filter(pl.col("k").is_null())
        assert not scores.select("system", "question_id", "metric").is_duplicated().any()

    def test_failed_answers_are_listed_and_leave_the_other_stage_whole(self, tmp_path):
        ids = stage_table(make_answered(tmp_path), "data", "questions")["question_id"].to_list()[:2]
        groups, left_out = answer_groups(with_baselines(tmp_path, 40, failing=ids))
        assert groups[""]["question_id"].n_unique() == 40 and groups[SHARED]["question_id"].n_unique() == 38
        assert set(left_out["question_id"]) == set(ids)

    def test_without_the_generation_stage(self, tmp_path):
        shutil.rmtree(with_baselines(tmp_path, 12)/"generation")
        groups, left_out = answer_groups(tmp_path)
        assert list(groups) == [""] and set(groups[""]["system"]) == {RAPTOR, "no memory (smollm2)"} and left_out.is_empty()

    def test_scoring_each_answer_once_changes_nothing(self, tmp_path):
        answers, gold = answer_groups(with_baselines(tmp_path, 40))[0][""], gold_answers(stage_table(tmp_path, "data", "gold"))
        said = pl.concat([answers.select("system", "question_id", "answer", "abstained"), constant_answers(answers["question_id"].unique())])
        said = said.with_columns(answer=pl.when(pl.col("question_id").hash() % 5 == 0).then(None).otherwise("answer"))
        assert score_once(said, gold).equals(score_answers(said, gold))


@pytest.fixture
def server(tmp_path):
    one = Server(tmp_path/"calls.jsonl")
    yield one
    one.stop()


def test_an_endpoint_that_fails_once(run_dir, server):
    spec = f"endpoint:toy@{server.start('--echo', '--faults', 'empty')}?concurrency=1&retries=0&context=8192"
    config = BaselineAnswersConfig("BM25, whole session; no memory", spec, n_questions=3)
    run_baseline_answers(config, run_dir)
    assert counts(run_dir)["errors"] == 1 and len(server.answered()) == 6
    run_baseline_answers(config, run_dir)
    found = stage_table(run_dir, "baseline_answers", "answers")
    assert counts(run_dir)["errors"] == 0 and len(server.answered()) == 7
    assert set(found["variant"]) == {"BM25, whole session (toy)", "no memory (toy)"} and (found["n_prompt_tokens"] > 0).all()


@pytest.mark.slow
def test_the_packaged_model_with_and_without_memory(run_dir):
    run_baseline_answers(BaselineAnswersConfig("no memory; BM25, whole session", "local:smollm2", n_questions=2, max_tokens=12), run_dir)
    found = stage_table(run_dir, "baseline_answers", "answers")
    assert len(found) == 4 and (found["n_completion_tokens"] > 0).all()
    tokens = dict(found.group_by("variant").agg(pl.col("n_prompt_tokens").min()).iter_rows())
    assert tokens["no memory (smollm2)"] < 150 < tokens["BM25, whole session (smollm2)"]
