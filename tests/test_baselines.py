"""Every registered baseline keeps the contract; each mechanism gives what a hand calculation gives; a killed stage goes on."""

import hashlib
import re
import sys
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from memloc import baselines
from memloc.artifacts import Stage, read_json, stage_table
from memloc.baselines import (
    BASELINES,
    Baseline,
    BaselineError,
    BaselinesConfig,
    ExtractiveWriter,
    FullContext,
    MemGAS,
    ModelWriter,
    NoMemory,
    OneView,
    RecurSum,
    SeCom,
    Session,
    Tools,
    Written,
    best_unit,
    chosen_baselines,
    climb,
    denoised,
    extractive_text,
    gap_similarity,
    keep_newest,
    piece_key,
    rank_baseline,
    rank_conversation,
    read_sessions,
    register,
    run_baselines,
    shown_name,
    topic_starts,
)
from memloc.chat import LLMError, Reply
from memloc.data import DataConfig, run_data, sample
from memloc.evaluation import read_rankings
from memloc.lexical import LexicalIndex
from memloc.pipeline import locked
from memloc.routing import BASELINES as ROUTED
from memloc.routing import ROUTING_PRESETS, dense_similarity, parse_view, ranking_table, routed_systems
from memloc.tables import as_rows

chosen_baselines("all")  # modules that register more are imported
NAMES = sorted(BASELINES)


class WordEncoder:
    "Texts as hashed bags of words: cheap, deterministic, and alike where words are alike."
    key = "words"

    def encode(self, texts):
        vectors = np.full((len(texts), 64), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                vectors[row, int.from_bytes(hashlib.md5(word.encode()).digest()[:4], "big") % 64] += 1
        return vectors/np.linalg.norm(vectors, axis=1, keepdims=True)

    def n_tokens(self, texts):
        return [len(text.split()) + 2 for text in texts]


@pytest.fixture
def tools():
    return Tools(WordEncoder())


@pytest.fixture(scope="module")
def small():
    "Two conversations of the sample, six sessions each, five questions each."
    data = sample()
    kept = ["nora-dev", "tomasz"]
    sessions = data.sessions.filter(pl.col("conversation_id").is_in(kept), pl.col("position") < 6)
    questions = data.questions.filter(pl.col("conversation_id").is_in(kept)).group_by("conversation_id", maintain_order=True).head(5)
    return replace(data, conversations=data.conversations.filter(pl.col("conversation_id").is_in(kept)), sessions=sessions,
                   turns=data.turns.join(sessions, "session_id", "semi"), questions=questions.select(data.questions.columns))


def history(*sessions):
    "Sessions from tuples of turns."
    return [Session(f"s{number}", None, turns) for number, turns in enumerate(sessions)]


def ranks_of(ranking):
    return {key: part.sort("rank")["session_id"].to_list() for (key,), part in ranking.partition_by("question_id", as_dict=True).items()}


class TestContract:
    @pytest.mark.parametrize("name", NAMES)
    def test_no_label_is_read_and_every_session_is_ranked_once(self, small, name):
        blind = replace(small, gold=None, annotations=None, lint=None, conversations=None)
        ranking = rank_baseline(name, blind, Tools(WordEncoder()))
        assert ranking.columns == ["system", "question_id", "rank", "session_id", "score"]
        owner = dict(small.questions.select("question_id", "conversation_id").iter_rows())
        there = {key: sorted(part["session_id"]) for (key,), part in small.sessions.partition_by("conversation_id", as_dict=True).items()}
        assert set(ranking["question_id"]) == set(owner)
        for (question,), part in ranking.partition_by("question_id", as_dict=True).items():
            assert sorted(part["rank"]) == list(range(1, 7)) and sorted(part["session_id"]) == there[owner[question]]

    @pytest.mark.parametrize("name", NAMES)
    def test_deterministic_and_no_question_influences_another(self, small, name):
        sessions = read_sessions(small.sessions, small.turns)["nora-dev"]
        questions = small.questions.filter(conversation_id="nora-dev")["question"].to_list()
        ids = [f"q{number}" for number in range(len(questions))]
        ranking, cost = rank_conversation(BASELINES[name], "c", sessions, ids, questions, Tools(WordEncoder()))
        again, same_cost = rank_conversation(BASELINES[name], "c", sessions, ids, questions, Tools(WordEncoder()))
        assert ranking.equals(again)
        assert {key: value for key, value in cost.items() if "seconds" not in key} == {key: value for key, value in same_cost.items() if "seconds" not in key}
        backwards, _ = rank_conversation(BASELINES[name], "c", sessions, ids[::-1], questions[::-1], Tools(WordEncoder()))
        assert ranks_of(backwards) == ranks_of(ranking)
        alone, _ = rank_conversation(BASELINES[name], "c", sessions, ids[2:3], questions[2:3], Tools(WordEncoder()))
        assert ranks_of(alone)["q2"] == ranks_of(ranking)["q2"]

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("sessions", [
        history(("Nora: hello there",)), history(()), history((), ()), history((), ("Nora: I sold the boat in May.",), ()),
        history(*[("Nora: the same words every day",)]*5), history(("...",), ("!?",), ("我喜欢音乐",)), history(("Nora: " + "word "*3000,)*2, ("Dev: short",)),
    ], ids=["one turn", "empty", "two empty", "one of three", "all equal", "no words", "very long"])
    def test_odd_histories(self, tools, name, sessions):
        ranking, _ = rank_conversation(BASELINES[name], "c", sessions, ["q0", "q1"], ["Who sold a boat?", "¿?"], tools)
        assert [sorted(ids) for ids in ranks_of(ranking).values()] == [[session.session_id for session in sessions]]*2

    @pytest.mark.parametrize("name", NAMES)
    def test_it_says_what_it_is(self, name):
        cls = BASELINES[name]
        assert cls.name == name and cls.source and all(one.endswith(".") for one in cls.departures)
        assert not cls.writes or cls.departures, "a system that wrote with a language model must say what stands in for it"

    def test_names_differ_from_those_of_other_stages(self):
        taken = {*ROUTED, *ROUTING_PRESETS, *routed_systems(ROUTING_PRESETS)}
        assert not taken & {shown_name(cls, Tools(WordEncoder())) for cls in BASELINES.values()}

    def test_equal_sessions_are_ranked_by_id_for_all_questions(self, tools):
        same = history(*[("Nora: a boat and a shop", "Dev: yes")]*4)
        for name in ("dense, best turn", "BM25, whole session", "SeCom", "TF-IDF, whole session"):
            ranking, _ = rank_conversation(BASELINES[name], "c", same, ["q0", "q1"], ["Which boat?", "shop"], tools)
            assert ranks_of(ranking) == {key: ["s0", "s1", "s2", "s3"] for key in ("q0", "q1")}

    def test_a_failure_names_system_and_conversation(self, tools):
        class Bad(FullContext):
            name = "bad one"

            def search(self, questions, tools):
                return np.full((len(questions), 1), np.inf)

        with pytest.raises(BaselineError, match=r"bad one, conversation 'c7': ValueError: search gave scores of shape \(1, 1\), infinite: 1"):
            rank_conversation(Bad, "c7", history(("a: b",), ("c: d",)), ["q"], ["?"], tools)

    def test_registration(self):
        with pytest.raises(ValueError, match="'SeCom' is registered twice"):
            register(type("Other", (SeCom,), {}))
        with pytest.raises(ValueError, match="class attribute 'name'"):
            register(type("Other", (Baseline,), {}))
        with pytest.raises(TypeError, match="tuple of sentences"):
            register(type("Other", (SeCom,), {"name": "other", "departures": "none."}))
        assert register(SeCom) is SeCom, "the cell of a class may be run again"
        with pytest.raises(ValueError, match="'RAGE' is unknown; choose from .*SeCom"):
            chosen_baselines("RAGE")


class TestTools:
    def test_counts(self, tools):
        assert tools.encode([]).shape == (0, 64)
        assert np.allclose(np.linalg.norm(tools.encode(["a boat", "a boat", ""]), axis=1), 1, atol=1e-5)
        assert (tools.cost.n_encoded, tools.count("a small boat"), tools.count("")) == (3, 3, 0)
        text = "Nora: I sold the old boat in May."
        assert tools.write("note", [text], 20) == text
        assert (tools.cost.n_calls, tools.cost.n_tokens_in, tools.cost.n_tokens_out) == (1, 8, 8)
        assert tools.write_all("note", [[], [" "], [text]], 20) == ["", "", text] and tools.cost.n_calls == 2
        assert tools.ask("Say yes.", ["a", "b"], 1) == [None, None]
        assert (tools.cost.n_calls, tools.cost.n_tokens_in) == (4, 18), "a model would have been asked"
        with pytest.raises(ValueError, match="task='poem'"):
            tools.write("poem", [text], 20)

    def test_extractive_texts(self):
        turns = ["Nora: I sold the boat to Emil. The weather was fine!", "Dev: When did you sell it?", "Nora: I sold the boat on 8 May 2023."]
        assert extractive_text("facts", turns, 9) == "Nora: I sold the boat on 8 May 2023."
        assert extractive_text("facts", turns, 100).split("\n") == ["Nora: I sold the boat to Emil.", "Nora: The weather was fine!", turns[2]]
        assert "boat" in extractive_text("keywords", turns, 10).lower()
        assert all(len(extractive_text(task, turns*40, 7).split()) <= 7 for task in baselines.TASKS)
        summary = extractive_text("summary", turns*3, 30)
        assert all(line.split(": ", 1)[1] in " ".join(turns) for line in summary.split("\n")), "only what was said"

    def test_the_same_group_is_read_once(self, monkeypatch):
        seen = []
        monkeypatch.setattr(baselines, "extractive_text", lambda *arguments: seen.append(arguments) or "x")
        writer = ExtractiveWriter()
        assert [one.text for one in writer.write("note", [["a"], ["a"], ["b"]], 5)] == ["x"]*3
        writer.write("note", [["a"]], 5)
        assert len(seen) == 2

    def test_units_of_several_sessions(self):
        scores = np.array([[.2, .9, .5], [.7, -.1, -.5]])
        assert np.array_equal(best_unit(scores, [[0], [0, 1], [1]], 3), [[.9, .9, np.nan], [.7, -.1, np.nan]], equal_nan=True)


class Chat:
    "A model whose replies are given by a function of the prompt."
    name, key, context = "local:toy", "toy", 200

    def __init__(self, reply):
        self.reply, self.prompts = reply, []

    def count_tokens(self, messages):
        return sum(len(message["content"].split()) for message in messages)

    def chat(self, batch, sampling, on_reply=None):
        self.prompts += batch
        outcomes = [self.reply(messages[1]["content"]) for messages in batch]
        return [Reply(one, None, 10, 3, model=self.name) if isinstance(one, str) else one for one in outcomes]


class TestModelWriter:
    def test_all_systems_ask_with_the_same_words_and_pay_the_models_tokens(self):
        chat = Chat(lambda text: f"about {text.split()[-1]} indeed so")
        tools = Tools(WordEncoder(), ModelWriter(chat))
        assert tools.writer.name == "toy" and shown_name(RecurSum, tools) == "RecurSum (toy)" and shown_name(FullContext, tools) == "full context"
        assert tools.write_all("summary", [["Nora: boat"], [], ["Dev: shop"]], 2) == ["about boat", "", "about shop"]
        assert (tools.cost.n_calls, tools.cost.n_tokens_in, tools.cost.n_tokens_out) == (2, 20, 6)
        assert {prompt[0]["content"] for prompt in chat.prompts} == {
            baselines.INSTRUCTION.format(task=baselines.TASKS["summary"], n_words=2)}

    def test_long_texts_are_clipped_to_what_the_model_reads(self):
        chat = Chat(lambda text: "fine")
        ModelWriter(chat).write("note", [["word "*500, "Dev: yes"]], 2)
        assert chat.count_tokens(chat.prompts[0]) + 20 <= chat.context and "Dev: yes" in chat.prompts[0][1]["content"]

    def test_a_text_it_fails_on_is_stood_in_for_and_counted(self):
        tools = Tools(WordEncoder(), ModelWriter(Chat(lambda text: LLMError("empty", "nothing") if "boat" in text else "a shop")))
        assert tools.write_all("note", [["Nora: I sold the boat."], ["Dev: shop"]], 9) == ["Nora: I sold the boat.", "a shop"]
        assert (tools.cost.n_calls, tools.cost.n_stand_in) == (2, 1)
        assert tools.ask("Borders?", ["a boat", "a shop"], 3) == [None, "a shop"] and tools.cost.n_stand_in == 2

    def test_a_service_at_fault_stops_the_run(self):
        tools = Tools(WordEncoder(), ModelWriter(Chat(lambda text: LLMError("connection", "refused"))))
        with pytest.raises(BaselineError, match=r"RecurSum \(toy\), conversation 'c': LLMError: connection: refused"):
            rank_conversation(RecurSum, "c", history(("Nora: boat",)), ["q"], ["?"], tools)


class Recorder(ExtractiveWriter):
    "A writer that numbers its memories and remembers what it read."
    name = "recorder"

    def __init__(self):
        self.read = []

    def write(self, task, groups, n_words):
        self.read += groups
        return [Written(f"memory {len(self.read)}", 1, 1) for _ in groups]


class TestMechanisms:
    def test_words_and_vectors_are_those_of_the_views(self, tools, small):
        sessions = read_sessions(small.sessions, small.turns)["tomasz"]
        questions = small.questions.filter(conversation_id="tomasz")["question"].to_list()
        ids, turns = [session.session_id for session in sessions], [turn for session in sessions for turn in session.turns]
        indptr = np.cumsum([0, *(len(session.turns) for session in sessions)])
        asked, encode = [f"q{number}" for number in range(len(questions))], tools.encode
        expected = {
            "dense, whole session": encode(questions) @ encode([session.text for session in sessions]).T,
            "dense, best turn": dense_similarity(encode(questions), encode(turns), indptr, parse_view("turn:max")),
            "BM25, whole session": LexicalIndex([session.text for session in sessions]).scores(questions),
        }
        for name, scores in expected.items():
            ranking, _ = rank_conversation(BASELINES[name], "c", sessions, asked, questions, tools)
            assert ranks_of(ranking) == ranks_of(ranking_table(name, asked, ids, scores.round(6)))

    def test_full_context_keeps_the_newest_turns(self, tools):
        sessions = history(("a: one two", "a: three four five"), ("b: six",), ("c: seven eight", "c: nine"))
        ranking, cost = rank_conversation(FullContext, "c", sessions, ["q"], ["?"], tools)
        assert ranks_of(ranking) == {"q": ["s2", "s1", "s0"]} and cost["n_encoded"] == cost["n_calls"] == 0
        assert keep_newest(sessions, tools, 100) == [(2, 7, 0), (1, 2, 0), (2, 5, 0)]
        assert keep_newest(sessions, tools, 11) == [(1, 4, 3), (1, 2, 0), (2, 5, 0)]
        assert keep_newest(sessions, tools, 4) == [(0, 0, 7), (0, 0, 2), (1, 2, 3)], "after the first cut nothing older is kept"
        with pytest.raises(ValueError, match="budget=0"):
            keep_newest(sessions, tools, 0)

    def test_no_memory_has_no_preference(self, tools):
        nothing = NoMemory()
        nothing.build(history(("a: b",), ("c: d",)), tools)
        assert not NoMemory.ranks and np.array_equal(nothing.search(["?"], tools), np.zeros((1, 2)))

    def test_a_recursive_memory_reads_the_one_before(self):
        recorder = Recorder()
        tools = Tools(WordEncoder(), recorder)
        ranking, _ = rank_conversation(RecurSum, "c", history(("a: x", "b: y"), (), ("c: z",)), ["q"], ["memory 2"], tools)
        assert recorder.read == [["a: x", "b: y"], ["memory 1", "c: z"]], "an empty session rewrites nothing"
        assert ranks_of(ranking)["q"] == ["s2", "s0", "s1"]

    def test_the_extractive_memory_has_room_for_the_new_session(self, tools):
        old = tuple(f"Nora: the boat on lake number {i} was painted blue by my sister" for i in range(40))
        memory = RecurSum()
        memory.build(history(old, ("Dev: my violin has a broken string",)), tools)
        assert "violin" in memory.memories[1] and "boat" in memory.memories[1]

    def test_topic_borders_by_hand(self):
        vectors = np.array([[1., 0], [1, 0], [0, 1], [0, 1], [1, 0], [1, 0]])
        assert np.allclose(gap_similarity(vectors, 1), [1, 0, 1, 0, 1])
        assert np.allclose(gap_similarity(vectors, 2), [2**-.5, 0, 1, 0, 2**-.5])  # at the first gap (1, 0) before and (1, 1) after, at the third (1, 1) on both sides
        assert topic_starts(vectors, 1) == topic_starts(vectors, 2) == [0, 2, 4]
        assert np.array_equal(climb(np.array([.1, .5, .5, .2, .3])), [.1, .5, .5, .5, .3])

    def test_segments_by_dips_by_a_model_and_the_best_one_counts(self, tools):
        boat, shop = ("Nora: boat sea boat", "Dev: sea boat sea", "Nora: boat sea"), ("Dev: shop rent shop", "Nora: rent shop rent", "Dev: shop rent")
        sessions = history(boat + shop, ("Nora: boat hello good morning",))
        secom = SeCom()
        secom.build(sessions, tools)
        assert secom.texts == ["\n".join(boat), "\n".join(shop), "Nora: boat hello good morning"] and secom.members == [[0], [0], [1]]
        assert secom.top_segments("shop rent", tools, 1) == ["\n".join(shop)]
        scores = secom.search(["shop rent"], tools)
        vector = tools.encode(["shop rent"])[0]
        assert np.isclose(scores[0, 0], max(secom.vectors[:2] @ vector)) and np.isclose(scores[0, 1], secom.vectors[2] @ vector)
        asked = Tools(WordEncoder(), ModelWriter(Chat(lambda text: "1, 3 and 99" if text.startswith("1. Nora: boat sea") else "none")))
        secom.build(sessions, asked)
        assert [text.count("\n") + 1 for text in secom.texts] == [2, 4, 1]

    def test_denoising_drops_the_commonest_words_and_keeps_the_rate(self):
        texts = ["Nora: the boat is the best", "Nora: the shop is new", "Nora: rent"]
        assert denoised(texts, 0.5) == ["boat the best", "shop is new", "rent"], "of equally common words the first goes"
        assert denoised(texts, 1.0) == texts
        long = [" ".join(f"w{number}" for number in range(100))]
        assert len(denoised(long, 0.9)[0].split()) == 90

    def test_memgas_joins_only_by_resemblance_and_walks_as_solved_exactly(self, tools, small):
        sessions = read_sessions(small.sessions, small.turns)["nora-dev"]
        question = small.questions["question"].to_list()[:1]
        memgas = MemGAS()
        memgas.build(sessions, tools)
        assert all(part.semantic.all() for part in memgas.graph.edges) and sum(len(part.source) for part in memgas.graph.edges)
        similarity = np.concatenate([tools.encode(question) @ node.T for node in memgas.nodes])
        p = np.exp(similarity/.1)/np.exp(similarity/.1).sum(1, keepdims=True)
        weight = np.exp(1 + (p*np.log(p)).sum(1)/np.log(6))
        seed = ((weight/weight.sum())[:, None]*similarity).ravel()
        seed[np.argsort(-seed, kind="stable")[15:]] = 0
        walk = memgas.graph.transition.toarray()
        mass = np.linalg.solve(np.eye(24) - .1*walk, .9*seed/seed.sum()).reshape(4, 6).sum(0)
        found = memgas.search(question, tools)[0]
        assert np.allclose(found[mass > 0], mass[mass > 0], atol=1e-6) and (found[mass <= 0] < 0).all()

    def test_an_own_baseline_is_one_class_and_appears_in_the_rows(self, small, tools, monkeypatch):
        monkeypatch.setattr(baselines, "BASELINES", dict(BASELINES))

        @register
        class FirstTurn(OneView):
            name, source = "first turn", "this test"

            def units(self, session):
                return list(session.turns[:1])

        ranking = pl.concat([rank_baseline(name, small, tools) for name in ("first turn", "BM25, best turn")])
        assert set(ranking["system"]) == {"first turn", "BM25, best turn"}
        summary = pl.DataFrame({"system": ["first turn", "BM25, best turn", "TF-IDF, whole session", "full context", "SeCom (extractive)"], "metric": "recall",
                                "k": 3, "value": 1., "low": 1., "high": 1., "n": 1, "split": "all"})
        assert as_rows(summary, "", "", "minilm")["encoder"].to_list() == ["minilm", "none", "none", "none", "minilm"]


@pytest.fixture(scope="module")
def data_run(tmp_path_factory):
    "A run with data and as much of the units stage as the baselines read."
    folder = tmp_path_factory.mktemp("run")
    run_data(DataConfig(limit_questions=40), folder)
    with Stage(folder, "units", {"captions": True}) as stage:
        stage.json("encoder", {"name": "words"})
    return folder


class TestStage:
    config = BaselinesConfig("BM25, best turn; full context; no memory; SeCom", budget=900)

    @pytest.fixture
    def run(self, data_run, tmp_path, monkeypatch):
        import shutil
        shutil.copytree(data_run, tmp_path/"run")
        monkeypatch.setattr(baselines, "run_encoder", lambda run_dir: WordEncoder())
        return tmp_path/"run"

    @pytest.fixture
    def built(self, monkeypatch):
        "Names of the systems built, in order; `stop` ends the process at one of them."
        seen = []

        def counting(cls, *arguments):
            if len(seen) == built_stop[0]:
                raise KeyboardInterrupt
            seen.append(cls.name)
            return rank_conversation(cls, *arguments)

        built_stop = [10**9]
        monkeypatch.setattr(baselines, "rank_conversation", counting)
        return seen, built_stop

    def test_what_it_leaves(self, run):
        summary = run_baselines(self.config, run)
        assert summary["system"].to_list() == ["BM25, best turn", "full context", "no memory", "SeCom (extractive)"]
        rankings, questions = stage_table(run, "baselines", "rankings"), stage_table(run, "data", "questions")
        assert set(rankings["system"]) == {"BM25, best turn", "full context", "SeCom (extractive)"}, "no memory ranks nothing"
        assert rankings.group_by("system").len()["len"].unique().to_list() == [questions.height*17]
        assert read_rankings(run).equals(rankings)
        contexts = stage_table(run, "baselines", "contexts")
        kept = contexts.group_by("conversation_id").agg(pl.col("n_tokens_kept", "n_tokens_cut").sum())
        assert kept["n_tokens_kept"].max() <= 900 and kept["n_tokens_cut"].min() > 0
        cost = stage_table(run, "baselines", "cost")
        assert cost.filter(system="no memory")["n_encoded"].sum() == 0 < cost.filter(system="SeCom (extractive)")["n_encoded"].min()
        told = {row["system"]: row for row in read_json(run/"baselines"/"systems.json")}
        assert told["SeCom (extractive)"]["writer"] == "extractive" and told["SeCom (extractive)"]["departures"] and told["full context"]["writer"] is None

    def test_a_stopped_run_loses_one_piece_and_ends_with_the_same_files(self, run, built, tmp_path):
        import shutil
        seen, stop = built
        shutil.copytree(run, tmp_path/"whole")
        run_baselines(self.config, tmp_path/"whole")
        n_pieces = len(seen)
        seen.clear()
        stop[0] = n_pieces - 3
        with pytest.raises(KeyboardInterrupt):
            run_baselines(self.config, run)
        assert not (run/"baselines"/"manifest.json").exists()
        spent = min((run/"baselines"/"work").glob("*.json"))
        spent.with_suffix(".parquet").unlink()  # killed between the two files of a piece
        seen.clear()
        stop[0] = 10**9
        run_baselines(self.config, run)
        assert len(seen) == 4
        for name in ("rankings", "contexts"):
            assert (run/"baselines"/f"{name}.parquet").read_bytes() == (tmp_path/"whole"/"baselines"/f"{name}.parquet").read_bytes()
        seen.clear()
        run_baselines(self.config, run)
        assert seen == []

    def test_what_changes_a_result_changes_its_piece(self, run, built, monkeypatch):
        seen, _ = built
        run_baselines(BaselinesConfig("BM25, best turn; SeCom"), run)
        n_conversations = len(seen)//2
        seen.clear()
        monkeypatch.setattr(SeCom, "rate", 0.8)
        run_baselines(BaselinesConfig("BM25, best turn; SeCom", budget=7), run)
        assert seen == ["SeCom"]*n_conversations
        assert len(list((run/"baselines"/"work").glob("*.parquet"))) == 2*n_conversations, "older pieces are removed"
        seen.clear()
        monkeypatch.setattr(baselines, "code_hash", lambda *names: "another code")
        run_baselines(BaselinesConfig("BM25, best turn"), run)
        assert len(seen) == n_conversations

    def test_another_seed_changes_the_pieces_of_systems_that_draw(self, run, built, monkeypatch):
        seen, _ = built
        monkeypatch.setattr(SeCom, "draws", True)
        run_baselines(BaselinesConfig("BM25, best turn; SeCom"), run)
        n_conversations = len(seen)//2
        seen.clear()
        run_baselines(BaselinesConfig("BM25, best turn; SeCom", seed=1), run)
        assert seen == ["SeCom"]*n_conversations
        with pytest.raises(ValueError, match="seed must be a whole number, at least 0, got -1"):
            BaselinesConfig(seed=-1)

    def test_the_code_of_a_piece_is_that_of_its_system_and_what_it_imports(self, tmp_path, monkeypatch):
        from types import SimpleNamespace
        package = tmp_path/"memloc"
        package.mkdir()
        for name, text in {"__init__": "", "system": "from .tools import one\n", "tools": "one = 1\n", "tables": "", "data": ""}.items():
            (package/f"{name}.py").write_text(text)
        monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(package/"__init__.py")))
        code = baselines.code_hash.__wrapped__
        first = code("system", "data")
        for unrelated in ("tables", "data"):
            (package/f"{unrelated}.py").write_text("changed = True\n")
        assert code("system", "data") == first
        (package/"tools.py").write_text("one = 2\n")
        assert code("system", "data") != first

    def test_the_key_of_a_class_outside_the_package_follows_its_code(self):
        def of(units):
            return piece_key(type("Mine", (OneView,), {"name": "mine", "source": "x", "units": units}), history(("a: b",)), {"q": "?"}, "shared")
        assert of(lambda self, session: [session.text]) == of(lambda self, session: [session.text])
        assert len({of(lambda self, session: [session.text]), of(lambda self, session: [session.text, "more"]),
                    of(lambda self, session: [session.date]), of(lambda self, session: [part for part in session.turns if part])}) == 4

    def test_the_executed_notebook_knows_the_systems_of_other_modules(self, run, tmp_path, monkeypatch):
        from importlib.util import module_from_spec, spec_from_file_location
        (tmp_path/"late_systems.py").write_text(
            "from memloc.baselines import OneView, register\n\n@register\nclass Late(OneView):\n    name, source = 'late one', 'this test'\n\n"
            "    def units(self, session):\n        return list(session.turns[-1:])\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(baselines, "BASELINES", dict(BASELINES))
        spec = spec_from_file_location("memloc.cells", baselines.__file__)  # what the cells of the notebook define, apart from the module
        cells = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "memloc.cells", cells)
        spec.loader.exec_module(cells)
        monkeypatch.setattr(cells, "EXTENSIONS", ("late_systems",))
        monkeypatch.setattr(cells, "run_encoder", lambda run_dir: WordEncoder())
        summary = cells.run_baselines(cells.BaselinesConfig("late one; SeCom"), run)
        assert summary["system"].to_list() == ["late one", "SeCom (extractive)"]
        assert cells.BASELINES["SeCom"] is not SeCom
        assert cells.class_settings(cells.BASELINES["SeCom"]) == baselines.class_settings(SeCom), "pieces of notebook and module are the same"

    def test_one_process_at_a_time(self, run):
        (run/"baselines").mkdir()
        with locked(run/"baselines"), pytest.raises(RuntimeError, match="is writing into this run"):
            run_baselines(self.config, run)

    def test_settings_are_checked(self, run):
        for budget in (0, 1.5, True):
            with pytest.raises(ValueError, match="budget must be a whole number"):
                BaselinesConfig(budget=budget)
        with pytest.raises(ValueError, match="names no baseline"):
            run_baselines(BaselinesConfig(" ; "), run)
        with pytest.raises(ValueError, match="model spec 'gpt'"):
            run_baselines(BaselinesConfig(writer="gpt"), run)
