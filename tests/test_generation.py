"""Contexts, prompts and answers: what is shown, what cannot be forged, what happens when it does not fit or fails."""

import shutil
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memloc.artifacts import Stage, read_json, stage_manifest, stage_table
from memloc.chat import LLMError, Reply
from memloc.data import DataConfig, run_data
from memloc.generation import (
    NOT_MENTIONED,
    VARIANT_NAMES,
    Context,
    Found,
    GenerationConfig,
    KeptSession,
    abstains,
    build_context,
    chat_messages,
    extractive_answer,
    fit_context,
    mmr_order,
    read_answer,
    read_found,
    run_generation,
)


def session(name: str, *texts: str) -> KeptSession:
    return KeptSession(name, datetime(2024, 1, 2, 9), tuple((f"{name}/t{i:03d}", text) for i, text in enumerate(texts)))


MEMORY = {"s0": session("s0", "A: we met in Oslo.", "B: lovely."), "s1": session("s1", "A: the cat is Ludo.", "B: hm.", "A: ok."),
          "s2": session("s2", "B: rain again.")}
FOUND = Found(("s2", "s0", "s1"), ("s1", "s0", "s2"), ("s1",), {"s1": ("s1/t000",), "s0": ("s0/t000",)})


def words(messages) -> int:
    return sum(len(message["content"].split()) for message in messages)


class Scripted:
    "A chat model that counts words and says what it is told to say, or fails."

    name, key, context = "scripted", "scripted-1", 600

    def __init__(self, *replies):
        self.replies, self.prompts = list(replies), []

    def count_tokens(self, messages):
        return words(messages)

    def chat(self, batch, sampling, on_reply=None):
        outcomes = []
        for place, messages in enumerate(batch):
            self.prompts.append(messages)
            said = self.replies.pop(0) if self.replies else "Oslo [1]"
            outcome = said if isinstance(said, Exception) else Reply(said, n_prompt_tokens=words(messages), n_completion_tokens=2)
            outcomes.append(outcome)
            if on_reply:
                on_reply(place, outcome)
        return outcomes


class TestVariants:
    @pytest.mark.parametrize("name, sessions, cues", [
        ("evidence", ["s1", "s0"], []), ("mmr", ["s2", "s0", "s1"], []), ("extract", ["s0", "s1", "s2"], []),
        ("rerank", ["s1", "s0", "s2"], []), ("cue", ["s1", "s0", "s2"], [1, 4])])
    def test_what_each_shows(self, name, sessions, cues):
        context = build_context("Where?", None, FOUND, MEMORY, name)
        assert [each.session_id for each in context.sessions] == sessions
        assert context.cues == cues
        full = sum(len(MEMORY[each].turns) for each in sessions)
        assert len(context.numbers) == (2 if name == "evidence" else full)

    def test_numbers_run_from_one_over_all_sessions_and_hold_no_id(self):
        context = build_context("Where?", None, FOUND, MEMORY)
        assert list(context.numbers) == [1, 2, 3, 4, 5, 6]
        text = chat_messages(context)[1]["content"]
        assert not any(part in text for part in ("s0", "s1", "/t0"))

    def test_an_order_of_the_locator_is_kept(self):
        found = replace(FOUND, reranked=("s0", "s2", "s1"))
        assert [each.session_id for each in build_context("?", None, found, MEMORY, n_sessions=2).sessions] == ["s0", "s2"]

    def test_selected_is_the_chain_and_falls_back_visibly(self):
        chosen = build_context("?", None, FOUND, MEMORY, context="selected")
        assert ([each.session_id for each in chosen.sessions], chosen.fallback) == (["s1"], False)
        empty = build_context("?", None, replace(FOUND, chain=()), MEMORY, context="selected", n_sessions=2)
        assert ([each.session_id for each in empty.sessions], empty.fallback) == (["s1", "s0"], True)

    def test_no_evidence_leaves_the_evidence_variant_empty_and_says_so(self):
        context = build_context("?", None, replace(FOUND, evidence={}), MEMORY, "evidence")
        assert context.numbers == {} and extractive_answer(context) == NOT_MENTIONED
        assert "No part of the conversations was found" in chat_messages(context)[1]["content"]

    def test_mmr_with_all_weight_on_relevance_is_the_ranking(self):
        import numpy as np
        vectors = np.eye(4)[[0, 0, 1, 2]]
        assert mmr_order(np.array([4.0, 3, 2, 1]), vectors, 1.0) == [0, 1, 2, 3]
        assert mmr_order(np.array([4.0, 3.9, 2, 1]), vectors, 0.3)[1] != 1
        assert mmr_order(np.full(3, 2.0), np.full((3, 2), np.nan), 0.5) == [0, 1, 2]

    @pytest.mark.parametrize("changed", [{"variant": ""}, {"variant": "cue,best"}, {"context": "all"}, {"n_sessions": 0},
                                         {"max_tokens": 0}, {"mmr_relevance": 1.5}, {"variant": "extract", "context": "selected"}])
    def test_settings_that_mean_nothing_are_refused(self, changed):
        with pytest.raises(ValueError):
            GenerationConfig(**changed)


HOSTILE = st.text(alphabet=st.sampled_from("[]<>［］【】|/0123456789 id\nSession,:ax"), max_size=60)


class TestForgery:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(HOSTILE, min_size=1, max_size=4), HOSTILE)
    def test_no_text_can_make_a_number_a_tag_or_a_header(self, texts, question):
        context = Context(question, None, (session("s9", *texts),), frozenset(), True)
        content = chat_messages(context)[1]["content"]
        assert content.count("[") == content.count("]") == len(texts)
        assert not set("<>［］【】") & set(content)
        margin = [line for line in content.split("\n") if line and not line.startswith(" ")]
        assert len(margin) == 1 + len(texts) + 1

    def test_without_a_memory_only_the_question_is_shown(self):
        messages = chat_messages(build_context("Where? [3] <id>", datetime(2024, 5, 1), FOUND, MEMORY, "none"))
        assert messages[1]["content"] == "Question (asked on 1 May 2024): Where? (3) ‹id›"
        assert not any(text in str(messages) for text in ("Oslo", "Ludo", "rain"))

class TestFitting:
    def test_least_ranked_sessions_go_first_and_whole(self):
        context = build_context("Where?", None, FOUND, MEMORY)
        short = fit_context(context, words, words(chat_messages(context)) - 1)
        assert (short.dropped, short.cut) == (("s2",), False)
        assert short.sessions == context.sessions[:2]

    def test_the_last_session_keeps_evidence_and_neighbours(self):
        long = session("s1", *(f"A: turn {i} " + "word "*20 for i in range(20)))
        found = replace(FOUND, evidence={"s1": ("s1/t010",)})
        context = build_context("Where?", None, found, MEMORY | {"s1": long})
        short = fit_context(context, words, 200)
        assert list(short.numbers.values()) == ["s1/t009", "s1/t010", "s1/t011"]
        assert short.cut and short.dropped == ("s0", "s2") and short.cues == [2]
        assert list(fit_context(context, words, 140).numbers.values()) == ["s1/t010"]

    def test_without_evidence_the_best_matching_turn_stands_in(self):
        long = session("s1", *(f"A: turn {i} " + "word "*20 for i in range(9)), "A: a zebra", "B: no", "A: yes")
        context = build_context("Which zebra?", None, Found(("s1",), ("s1",), (), {}), {"s1": long})
        assert "s1/t009" in fit_context(context, words, 170).numbers.values()

    def test_what_cannot_fit_is_an_error(self):
        with pytest.raises(ValueError, match="longer context"):
            fit_context(build_context("Where?", None, FOUND, MEMORY), words, 10)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(90, 200))
    def test_a_prompt_fits_or_raises(self, limit):
        context = build_context("Where?", None, FOUND, MEMORY)
        try:
            assert words(chat_messages(fit_context(context, words, limit))) <= limit
        except ValueError:
            assert limit < words(chat_messages(replace(context, sessions=context.sessions[:1])))


class TestReading:
    NUMBERS = MappingProxyType({1: "t1", 2: "t2", 12: "t12"})

    @pytest.mark.parametrize("text, answer, citations, bad", [
        ("Oslo [1]", "Oslo", ("t1",), 0), ("Oslo [2][1] and more [2]", "Oslo and more", ("t2", "t1"), 0),
        ("Oslo [99]", "Oslo", (), 1), ("Oslo", "Oslo", (), 0), ("Answer: 12 cats [12]", "12 cats", ("t12",), 0)])
    def test_citations(self, text, answer, citations, bad):
        read = read_answer(text, self.NUMBERS)
        assert (read.answer, read.citations, read.bad_citations) == (answer, citations, bad)

    @pytest.mark.parametrize("text", [NOT_MENTIONED, "not mentioned", "I don't know.", "I’m sorry, but I cannot answer that.",
                                      "The conversations do not give... no information about it.", "This is not specified.",
                                      "It cannot be determined from the parts.", "Unknown", "We do not know"])
    def test_abstentions(self, text):
        assert abstains(text)

    @pytest.mark.parametrize("text", ["Oslo", "He did not know.", "An unknown painter", "No", "Not in May, in June", "",
                                      "Yes, that's her, I don't know why we waited.", "Nothing", "The unknown soldier's tomb"])
    def test_answers_that_are_none(self, text):
        assert not abstains(text)

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=200))
    def test_any_reply_is_read_and_cites_only_what_was_shown(self, text):
        assert set(read_answer(text, self.NUMBERS).citations) <= set(self.NUMBERS.values())


class TestExtractive:
    def test_it_cites_the_sentence_it_takes(self):
        reply = extractive_answer(build_context("What is the cat called?", None, FOUND, MEMORY))
        assert reply == "the cat is Ludo. [1]"

    def test_cues_confine_it_and_nothing_matching_is_an_abstention(self):
        assert extractive_answer(build_context("Was there rain?", None, FOUND, MEMORY)) == NOT_MENTIONED
        assert extractive_answer(build_context("Was there rain?", None, FOUND, MEMORY, "rerank")) == "rain again. [6]"


def write_locator(run_dir, questions, retrieved) -> None:
    "The locator's files: evidence in the first two turns of the second session retrieved, which becomes the chain."
    evidence, selected, rankings = [], [], []
    for question in questions:
        order = retrieved[question]
        chain = [order[1]]
        evidence += [(question, chain[0], f"{chain[0]}/t{i:03d}", 1, 0.5, "encoder") for i in (0, 1)]
        selected.append((question, 1, chain[0]))
        rankings += [("memloc + encoder locator", question, rank, each, 1.0/rank)
                     for rank, each in enumerate([*chain, *(each for each in order if each not in chain)], start=1)]
    text, small = pl.String, pl.Int32
    with Stage(run_dir, "locator", {"base": "memloc", "locator": "encoder", "top_k": 10}) as stage:
        stage.table("evidence", pl.DataFrame(evidence, orient="row", schema={
            "question_id": text, "session_id": text, "turn_id": text, "rank": small, "score": pl.Float64, "source": text}), "turn_id")
        stage.table("selected", pl.DataFrame(selected, orient="row", schema={
            "question_id": text, "rank": small, "session_id": text}), ["question_id", "rank"])
        stage.table("rankings", pl.DataFrame(rankings, orient="row", schema={
            "system": text, "question_id": text, "rank": small, "session_id": text, "score": pl.Float64}), ["question_id", "rank"])
        stage.table("calls", pl.DataFrame([(question, "extract", 0, 0, 0.1) for question in questions], orient="row", schema={
            "question_id": text, "step": text, "n_prompt_tokens": small, "n_completion_tokens": small, "seconds": pl.Float64}), "question_id")


def write_units_and_graph(run_dir, config) -> None:
    "Rankings without an encoder: lexical views only."
    import numpy as np

    from memloc.graph_ppr import GraphConfig, run_graph
    from memloc.lexical import LexicalIndex
    from memloc.routing import RoutingConfig, chosen_presets, ranking_table, route, score_table, weight_table
    views, sessions = config["views"].split(","), stage_table(run_dir, "data", "sessions").sort("conversation_id", "position")
    said = {key: "\n".join(part["text"]) for (key,), part in
            stage_table(run_dir, "data", "turns").sort("session_id", "position").partition_by("session_id", as_dict=True).items()}
    rows = [(f"{each}#session", conversation, each, "session", 0, said[each], "dataset", row)
            for row, (each, conversation) in enumerate(sessions.select("session_id", "conversation_id").iter_rows())]
    with Stage(run_dir, "units", {}) as stage:
        stage.table("units", pl.DataFrame(rows, orient="row", schema=[
            "unit_id", "conversation_id", "session_id", "granularity", "member", "text", "source", "vector_row"]), "unit_id")
        stage.array("vectors", np.eye(3, dtype=np.float32)[np.arange(len(rows)) % 3])
    settings_of = chosen_presets(RoutingConfig(**config))["memloc"]
    scores, weights, rankings = [], [], []
    for (conversation,), part in sessions.partition_by("conversation_id", as_dict=True, maintain_order=True).items():
        asked = stage_table(run_dir, "data", "questions").filter(pl.col("conversation_id") == conversation)
        ids, order = asked["question_id"].to_list(), part["session_id"].to_list()
        found = LexicalIndex([said[each] for each in order]).scores(asked["question"].to_list()).astype(np.float64)
        routed = route(np.stack([found]*len(views), axis=1), settings_of)
        scores.append(score_table(ids, order, dict.fromkeys(views, found)))
        weights.append(weight_table("memloc", ids, settings_of.views, routed))
        rankings.append(ranking_table("memloc: routing", ids, order, routed.scores))
    with Stage(run_dir, "routing", config) as stage:
        stage.table("scores", pl.concat(scores), ["question_id", "session_id"])
        stage.table("weights", pl.concat(weights), ["question_id", "view"])
        stage.table("rankings", pl.concat(rankings), ["question_id", "rank"])
    run_graph(GraphConfig(), run_dir)


ROUTING = {"presets": "memloc", "weights": None, "temperature": None, "scale": None, "views": "lexical:session", "subsets": False}


@pytest.fixture(scope="session")
def located_run(tmp_path_factory):
    "The sample up to the locator, without any model."
    run_dir = tmp_path_factory.mktemp("located")
    run_data(DataConfig(), run_dir)
    write_units_and_graph(run_dir, ROUTING)
    ranked = stage_table(run_dir, "graph", "rankings").filter(pl.col("system") == "memloc").sort("question_id", "rank")
    retrieved = dict(ranked.group_by("question_id", maintain_order=True).agg("session_id").iter_rows())
    write_locator(run_dir, stage_table(run_dir, "data", "questions")["question_id"].to_list(), retrieved)
    return run_dir


@pytest.fixture
def run_dir(located_run, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path/"cache"))
    return shutil.copytree(located_run, tmp_path/"run")


class TestStage:
    def test_no_gold_label_is_read(self, run_dir):
        (run_dir/"data"/"gold.parquet").unlink()
        assert run_generation(GenerationConfig(model="extractive"), run_dir)["without_answer"].to_list() == [0]
        assert not any("gold" in name for name in stage_manifest(run_dir, "generation")["inputs"])

    def test_table_3_in_one_run(self, run_dir):
        summary = run_generation(GenerationConfig(model="extractive", variant=",".join(VARIANT_NAMES), n_questions=6), run_dir)
        assert summary["variant"].to_list() == sorted(VARIANT_NAMES) and set(summary["questions"]) == {6}
        answers, segments = (stage_table(run_dir, "generation", name) for name in ("answers", "segments"))
        cited = answers.explode("citations").drop_nulls("citations")
        assert cited.join(segments, left_on=["variant", "question_id", "citations"], right_on=["variant", "question_id", "turn_id"],
                          how="anti").is_empty()
        assert segments.group_by("variant", "question_id").agg(
            whole=pl.col("number").sort() == pl.int_range(1, pl.len() + 1, dtype=pl.Int32)).explode("whole")["whole"].all()
        assert set(segments.filter("cue")["variant"]) == {"cue"}

    def test_a_second_run_is_equal(self, run_dir):
        outputs = []
        for _ in range(2):
            run_generation(GenerationConfig(model="extractive", n_questions=4), run_dir)
            outputs.append(stage_manifest(run_dir, "generation")["outputs"])
        assert outputs[0]["answers.parquet"] == outputs[1]["answers.parquet"]

    def test_errors_are_rows_asked_again_and_only_they(self, run_dir):
        first = Scripted("Oslo [1]", LLMError("timeout", "no reply"), "Rome [2]")
        run_generation(GenerationConfig(n_questions=3), run_dir, first)
        answers = stage_table(run_dir, "generation", "answers").sort("question_id")
        assert answers["status"].to_list()[::2] == ["ok", "ok"]
        assert answers["status"][1].startswith("error: timeout: no reply")
        assert answers["answer"].to_list() == ["Oslo", None, "Rome"]
        assert stage_manifest(run_dir, "generation")["counts"]["errors"] == 1
        second = Scripted("Paris [1]")
        run_generation(GenerationConfig(n_questions=3), run_dir, second)
        assert len(second.prompts) == 1
        assert stage_table(run_dir, "generation", "answers").sort("question_id")["answer"].to_list() == ["Oslo", "Paris", "Rome"]
        third = Scripted()
        run_generation(GenerationConfig(n_questions=3), run_dir, third)
        assert third.prompts == []
        (row,) = read_json(run_dir/"generation"/"ledger.json")
        assert (row["stage"], row["calls"], row["replayed"]) == ("generation", 0, 3)

    def test_a_reply_of_citations_alone_is_no_empty_answer(self, run_dir):
        run_generation(GenerationConfig(n_questions=1), run_dir, Scripted("[1] [2]"))
        answers = stage_table(run_dir, "generation", "answers")
        assert answers["answer"].to_list() == [None] and answers["status"][0].startswith("no answer")

    def test_the_bill_is_logged_before_the_first_call(self, run_dir, caplog):
        class Refuses(Scripted):
            def chat(self, batch, sampling, on_reply=None):
                assert "before the first call" in caplog.text and "'calls': 2" in caplog.text
                return super().chat(batch, sampling, on_reply)
        with caplog.at_level("INFO", "memloc.generation"):
            run_generation(GenerationConfig(n_questions=2), run_dir, Refuses())

    def test_too_long_prompts_are_shortened_warned_of_and_counted(self, run_dir, caplog):
        model = Scripted()
        with caplog.at_level("WARNING", "memloc.generation"):
            run_generation(GenerationConfig(n_questions=3, max_tokens=60), run_dir, model)
        assert "3 of 3 prompts were too long: 3 shortened" in caplog.text
        assert max(map(words, model.prompts)) <= 540
        contexts = stage_table(run_dir, "generation", "contexts")
        assert (contexts["dropped_sessions"].list.len() > 0).all()
        assert stage_manifest(run_dir, "generation")["counts"]["shortened"] == 3

    def test_nothing_fits(self, run_dir):
        model = Scripted()
        model.context = 80
        with pytest.raises(RuntimeError, match=r"no prompt fits the model; .*: no prompt: context: the prompt has"):
            run_generation(GenerationConfig(n_questions=2), run_dir, model)
        assert model.prompts == []

    def test_a_model_that_never_answers_is_an_error_of_the_stage(self, run_dir):
        with pytest.raises(RuntimeError, match="all 2 calls failed; the first: timeout: slow"):
            run_generation(GenerationConfig(n_questions=2), run_dir, Scripted(LLMError("timeout", "slow"), LLMError("timeout", "slow")))
        assert not (run_dir/"generation"/"manifest.json").exists()

    def test_three_traces(self, run_dir):
        run_generation(GenerationConfig(model="extractive", n_questions=5), run_dir)
        traces = read_json(run_dir/"generation"/"traces.json")
        assert len(traces) == 3 and all(trace["retrieval"]["largest_difference"] < 1e-9 for trace in traces)

    def test_diversified_retrieval_is_another_order_of_the_same_sessions(self, run_dir):
        plain, diverse = read_found(run_dir), read_found(run_dir, 0.1)
        assert all(set(plain[each].retrieved) == set(diverse[each].retrieved) for each in plain)
        assert any(plain[each].retrieved != diverse[each].retrieved for each in plain)

    def test_a_missing_locator_is_named(self, run_dir):
        shutil.rmtree(run_dir/"locator")
        with pytest.raises(FileNotFoundError, match="locator"):
            run_generation(GenerationConfig(model="extractive"), run_dir)


def test_questions_come_from_all_conversations(run_dir):
    chosen = []
    for seed in (1, 2):
        run_generation(GenerationConfig(model="extractive", n_questions=8, seed=seed), run_dir)
        chosen.append(sorted(stage_table(run_dir, "generation", "answers")["question_id"]))
    assert chosen[0] != chosen[1]
    assert sorted(name.split("/")[0] for name in chosen[0]) == sorted([*["ingrid"]*2, *["maribel-tess"]*2, *["nora-dev"]*2, *["tomasz"]*2])


@pytest.mark.slow
def test_the_packaged_model_answers(located_run, tmp_path):
    from memloc.llm import LocalModel
    run = shutil.copytree(located_run, tmp_path/"run")
    run_generation(GenerationConfig(n_questions=1, n_sessions=1, max_tokens=8), run, LocalModel("smollm2"))
    answers = stage_table(run, "generation", "answers")
    assert (answers["status"] == "ok").all() and (answers["n_prompt_tokens"] > 200).all()


SILENT = [
    "Not mentioned in the conversations.", "I don’t know.", "Unknown.",
    "There is no information about a car.", "It wasn't mentioned.", "It isn't stated in the conversations.",
    "I'm not sure", "He did not say.", "There is no answer.", "No answer.", "Insufficient information.",
    "I do not have enough information", "There isn't any information about it.",
    "The context does not specify", "It's unknown.", "The answer is not known.", "I have no idea.", "N/A",
    "Unclear.", "Not  mentioned", "The job of the man who bought the boat is not specified.",
    "I'm sorry, but I cannot find any mention of it.", "I can't tell from the conversations.",
    "The parts do not tell.", "It cannot be determined from the given parts.",
    "I don't know what she bought.", "No information available."]
TELLING = [
    "He does not know.", "A baker.", "Her, and I don't know why.", "", "She was never given a present",
    "The part did not fit", "Because he has no record player", "I don't know how to swim",
    "I can't find my keys", "no information technology degree", "He could not be found",
    "She said he had not said goodbye", "None", "None of them", "Not at home", "He didn't say goodbye",
    "They do not include nuts"]


@pytest.mark.parametrize(("answer", "silent"), [*((text, True) for text in SILENT), *((text, False) for text in TELLING)])
def test_abstention_is_told_from_answers(answer, silent):
    assert abstains(answer) is silent
