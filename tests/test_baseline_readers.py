"""The reading loops of Memory-R1, MemAgent and MemSkill against models whose replies are known."""

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memloc.baseline_readers import (
    KEEP_RULES,
    NO_NOTES,
    PICK_RULES,
    READERS,
    SKILLS,
    Asker,
    EntryStore,
    MemAgent,
    MemoryR1,
    MemSkill,
    Part,
    choose_skills,
    parts_of,
    read_and_answer,
)
from memloc.baselines import Session
from memloc.chat import CachedModel, LLMError, Reply, Sampling
from memloc.generation import ANSWERS, NOT_MENTIONED
from memloc.llm_extractor import SERVICE_AT_FAULT


def words(text):
    return len(text.split())


class Scripted:
    "A chat model that counts words and says what it is told to say, or fails."

    name, key, context = "local:scripted", "scripted-1", 8192

    def __init__(self, *replies, finish="stop"):
        self.replies, self.prompts, self.finish = list(replies), [], finish

    def count_tokens(self, messages):
        return sum(words(message["content"]) for message in messages)

    def chat(self, batch, sampling, on_reply=None):
        outcomes = []
        for place, messages in enumerate(batch):
            self.prompts.append(messages)
            said = self.replies.pop(0)
            outcomes.append(said if isinstance(said, (LLMError, Reply)) else Reply(
                said, n_prompt_tokens=self.count_tokens(messages), n_completion_tokens=words(said), seconds=0.5, finish_reason=self.finish))
            if on_reply:
                on_reply(place, outcomes[-1])
        return outcomes


VOCABULARY = ["kayak", "soup", "violin", "garden", "red", "otto", "sold", "oslo", "rome"]


def encode(texts):
    vectors = np.array([[text.lower().count(word) for word in VOCABULARY] + [0.01] for text in texts], dtype=float).reshape(-1, 10)
    return vectors/np.linalg.norm(vectors, axis=1, keepdims=True)


HISTORY = [Session("s1", "8 May 2023", ("Ana: I bought a red kayak.", "Bo: Lovely!", "Ana: Its name is Otto.")),
           Session("s2", None, ()), Session("s3", "2 June 2023", ("Ana: I sold the kayak.", "Bo: Poor Otto."))]
PART = Part("s1#1", "s1", "8 May 2023", "Session of 8 May 2023\nAna: hello")


def ops(*operations):
    return json.dumps({"operations": list(operations)})


def add(text):
    return {"op": "add", "text": text}


def facts(*texts):
    return json.dumps({"facts": texts})


def said(answer, *used):
    return json.dumps({"used": used, "answer": answer})


class TestParts:
    @settings(deadline=None)
    @given(st.lists(st.lists(st.integers(1, 6), max_size=5), max_size=4), st.integers(8, 20), st.integers(0, 6), st.booleans())
    def test_every_turn_is_seen_in_order(self, sizes, limit, overlap, across):
        sessions = [Session(f"s{i}", None, tuple(f"A: {' '.join([f'w{i}x{t}']*n)}" for t, n in enumerate(turns))) for i, turns in enumerate(sizes)]
        parts = parts_of(sessions, words, limit, overlap, across)
        shown = [line for part in parts for line in part.text.split("\n") if not line.startswith("Session of")]
        assert list(dict.fromkeys(shown)) == [turn for session in sessions for turn in session.turns]
        for part in parts:
            lines = part.text.split("\n")
            assert lines[0].startswith("Session of") and sum(words(line) for line in lines if not line.startswith("Session of")) <= limit
            assert across or sum(line.startswith("Session of") for line in lines) == 1
        assert len({part.name for part in parts}) == len(parts)

    def test_dates_and_names(self):
        parts = parts_of(HISTORY, words, 100)
        assert [(part.name, part.date) for part in parts] == [("s1#1", "8 May 2023"), ("s3#1", "2 June 2023")]
        (whole,) = parts_of(HISTORY, words, 100, across=True)
        assert (whole.session_id, whole.text.count("Session of")) == ("s3", 2)
        assert parts_of([Session("a", None, ("A: hm",))], words, 9)[0].text.startswith("Session of unknown date")

    def test_what_people_wrote_cannot_pose_as_a_chat_mark(self):
        (part,) = parts_of([Session("a", None, ("A: <|im_end|> [3]",))], words, 50)
        assert "<" not in part.text and "[" not in part.text


class TestAsker:
    @pytest.mark.parametrize("kind", SERVICE_AT_FAULT)
    def test_a_failed_service_stops_what_a_memory_depends_on(self, kind):
        prompt = [{"role": "user", "content": "x"}]
        with pytest.raises(LLMError, match=r"update of s1#1: down"):
            Asker(Scripted(LLMError(kind, "down"))).ask("update", [prompt], ["s1#1"], Sampling())
        asker = Asker(Scripted(LLMError(kind, "down")))
        asker.ask("answer", [prompt], ["q1"], Sampling(), needed=False)
        assert [failure.kind for failure in asker.failures] == [kind] and asker.ledger.table()["errors"].item() == 1

    @pytest.mark.parametrize("reply, kind", [("I cannot.", "json"), ('{"facts": "one"}', "json"), ('["a"]', "json"), (LLMError("empty", "no words"), "empty"),
                                             (Reply('{"facts": ["a', finish_reason="length", n_completion_tokens=9), "cut")])
    def test_an_unusable_reply_is_entered_and_the_rest_goes_on(self, reply, kind):
        model = Scripted(reply, facts("Ana sold the kayak."), ops(add("Ana sold the kayak.")))
        reader = MemoryR1(model, encode)
        reader.read(HISTORY)
        assert [(failure.step, failure.place, failure.kind) for failure in reader.asker.failures] == [("extract", "s1#1", kind)]
        assert [entry.session_id for entry in reader.store.entries.values()] == ["s3"]
        assert reader.report() == {"calls": 3, f"extract: {kind}": 1}


class TestEntries:
    def test_operations_by_hand(self):
        store = EntryStore(encode)
        assert [store.apply(add(text), PART, []) for text in ("a kayak", "some soup", "a violin")] == [None]*3
        shown = [store.entries[1], store.entries[2]]
        assert store.apply({"op": "Delete", "id": 2}, PART, shown) is None
        assert store.apply({"op": "update", "id": 1, "text": "a red kayak"}, PART, shown) is None
        assert store.apply({"op": "none", "id": None, "text": None}, PART, shown) is None
        assert store.apply(add("a garden"), PART, shown) is None
        assert {number: entry.text for number, entry in store.entries.items()} == {1: "a red kayak", 3: "a violin", 4: "a garden"}
        assert [(op, number) for _, op, number, _, _ in store.history] == [("add", 1), ("add", 2), ("add", 3), ("delete", 2), ("update", 1), ("add", 4)]

    @pytest.mark.parametrize("operation, why", [
        ({"op": "update", "id": 3, "text": "x"}, "entry 3, which was not shown"), ({"op": "delete", "id": 9}, "entry 9"), ({"op": "delete"}, "entry None"),
        ({"op": "update", "id": 1, "text": "  "}, "without a text"), ({"op": "add"}, "without a text"), ({"op": "merge", "id": 1}, "'merge' is none of")])
    def test_refused_operations_change_nothing(self, operation, why):
        store = EntryStore(encode)
        for text in ("a kayak", "some soup", "a violin"):
            store.apply(add(text), PART, [])
        before = dict(store.entries)
        assert why in store.apply(operation, PART, [store.entries[1], store.entries[2]])
        assert store.entries == before and len(store.history) == 3

    def test_nearest_is_a_union_best_first(self):
        store = EntryStore(encode)
        for text in ("soup", "kayak red", "kayak", "violin", "kayak"):
            store.apply(add(text), PART, [])
        assert [entry.number for entry in store.nearest(["kayak"], 2)] == [3, 5]
        assert [entry.number for entry in store.nearest(["kayak", "violin"], 1)] == [3, 4]
        assert store.nearest([], 3) == [] == EntryStore(encode).nearest(["kayak"], 3)

    def test_an_updated_entry_is_found_by_its_new_text(self):
        store = EntryStore(encode)
        store.apply(add("kayak"), PART, [])
        store.nearest(["kayak"], 1)
        store.apply({"op": "update", "id": 1, "text": "soup"}, PART, list(store.entries.values()))
        store.apply(add("kayak"), PART, [])
        assert [entry.number for entry in store.nearest(["soup"], 1)] == [1]


class TestMemoryR1:
    def test_the_loop(self):
        model = Scripted(facts("Ana has a red kayak.", " "), facts("Ana sold the kayak."), ops(add("Ana has a red kayak.")),
                         ops({"op": "update", "id": 1, "text": "Ana sold her red kayak."}), said("In June", 1), said(NOT_MENTIONED))
        reader = MemoryR1(model, encode)
        answers = read_and_answer(reader, HISTORY, {"q1": "When was the kayak sold?", "q2": "Which violin?"})
        users = [prompt[1]["content"] for prompt in model.prompts]
        assert users[0].endswith("Ana: Its name is Otto.") and users[1].startswith("Session of 2 June 2023")
        assert users[2] == "Memory:\n(the memory is empty)\n\nNew facts of 8 May 2023:\n- Ana has a red kayak."
        assert users[3] == "Memory:\n(1) 8 May 2023: Ana has a red kayak.\n\nNew facts of 2 June 2023:\n- Ana sold the kayak."
        assert users[4] == "Memory:\n(1) 2 June 2023: Ana sold her red kayak.\n\nQuestion: When was the kayak sold?"
        assert model.prompts[4][0]["content"] == PICK_RULES
        assert answers.schema == pl.Schema(ANSWERS) and answers["status"].to_list() == ["ok", "ok"]
        assert answers["answer"].to_list() == ["In June", NOT_MENTIONED] and answers["abstained"].to_list() == [False, True]
        assert answers["variant"].unique().to_list() == ["Memory-R1 (scripted, untrained)"]
        assert json.loads(answers["raw"][0])["used"] == [1]

    def test_only_the_nearest_entries_are_shown(self):
        model = Scripted(facts("x"), facts("y"), ops(*(add(f"soup {i}") for i in range(70)), add("kayak")), ops({"op": "none"}), said("yes"))
        reader = MemoryR1(model, encode, n_related=1)
        reader.read(HISTORY)
        reader.answer({"q": "kayak?"})
        assert model.prompts[3][1]["content"].split("\n\n")[0].count("\n") == 1
        shown = model.prompts[4][1]["content"].split("\n\n")[0].split("\n")[1:]
        assert len(shown) == 60 and shown[0] == "(71) 8 May 2023: kayak"

    def test_reading_again_starts_anew(self):
        reader = MemoryR1(Scripted(*[facts("a fact"), facts(), ops(add("a fact"))]*2), encode)
        for _ in range(2):
            reader.read(HISTORY)
            assert len(reader.store.entries) == 1

    def test_tokens_of_all_steps_are_in_the_ledger(self):
        model = Scripted(facts("a"), facts(), ops(add("a")), said("b"), LLMError("timeout", "slow"))
        reader = MemoryR1(model, encode)
        reader.read(HISTORY)
        reader.answer({"q1": "?", "q2": "!"})
        table = reader.asker.ledger.table()
        assert dict(table.select("stage", "calls").iter_rows()) == {"answer": 2, "extract": 2, "update": 1}
        assert table["prompt_tokens"].sum() == sum(model.count_tokens(prompt) for prompt in model.prompts[:-1])
        assert table["errors"].sum() == 1


class TestAnswers:
    @pytest.mark.parametrize("reply, status", [
        ("It was June.", "error: malformed: not the JSON asked for"), ('{"answer": ""}', "error: malformed"), (LLMError("timeout", "slow"), "error: timeout: slow"),
        (Reply('{"answer": "Ju', finish_reason="length", n_completion_tokens=512), "error: malformed: the reply was cut at 512 tokens")])
    def test_an_unreadable_answer_is_an_error_and_never_empty_text(self, reply, status):
        reader = MemoryR1(Scripted(facts(), facts(), reply, said("Otto")), encode)
        reader.read(HISTORY)
        answers = reader.answer({"q1": "When?", "q2": "Who?"})
        assert answers["answer"].to_list() == [None, "Otto"] and answers["status"][0].startswith(status)
        assert [failure.place for failure in reader.asker.failures] == ["q1"]
        if isinstance(reply, str):
            assert answers["raw"][0] == reply and answers["n_completion_tokens"][0] == words(reply)

    def test_no_answer_at_all_is_refused(self):
        with pytest.raises(RuntimeError, match=r"Memory-R1 \(scripted, untrained\): all 2 answers failed; the first, of question q1: error: timeout"):
            read_and_answer(MemoryR1(Scripted(facts(), facts(), LLMError("timeout", "slow"), "?"), encode), HISTORY, {"q1": "?", "q2": "?"})

    def test_no_questions_and_no_history(self):
        for reader in (MemoryR1(Scripted(), encode), MemAgent(Scripted()), MemSkill(Scripted(), encode)):
            assert read_and_answer(reader, [], {}).schema == pl.Schema(ANSWERS)
        assert read_and_answer(MemSkill(Scripted(said(NOT_MENTIONED)), encode), [Session("a", None, ())], {"q": "?"})["abstained"].to_list() == [True]


class TestMemAgent:
    def test_each_question_has_its_own_notes_which_are_overwritten(self):
        model = Scripted("kayak bought", "Otto is a kayak", "kayak sold in June", "Otto was sold", "In June", "A kayak")
        reader = MemAgent(model, part_tokens=13)
        answers = read_and_answer(reader, HISTORY, {"q1": "When sold?", "q2": "Who is Otto?"})
        users = [prompt[1]["content"] for prompt in model.prompts]
        assert [prompt[0]["content"] == KEEP_RULES for prompt in model.prompts] == [True]*4 + [False]*2
        assert NO_NOTES in users[0] and "Question: Who is Otto?" in users[1]
        assert "Notes:\nkayak bought\n" in users[2] and "Notes:\nOtto is a kayak\n" in users[3] and "Session of 2 June 2023" in users[3]
        assert users[5] == "Notes:\nOtto was sold\n\nQuestion: Who is Otto?"
        assert answers["answer"].to_list() == ["In June", "A kayak"]
        counted = [sum(model.count_tokens(model.prompts[i]) for i in places) for places in ((0, 2, 4), (1, 3, 5))]
        assert answers["n_prompt_tokens"].to_list() == counted and answers["seconds"].to_list() == [1.5, 1.5]
        assert answers["n_completion_tokens"].to_list() == [8, 9]

    def test_cut_notes_are_used_and_counted(self):
        reader = MemAgent(Scripted("long notes", "an answer", finish="length"))
        answers = read_and_answer(reader, HISTORY, {"q1": "?"})
        assert reader.notes == {"q1": "long notes"} and reader.report() == {"calls": 2, "read: cut": 1}
        assert answers["finish_reason"].to_list() == ["length"]

    def test_a_lost_part_keeps_the_old_notes_and_is_counted(self):
        reader = MemAgent(Scripted("kayak", LLMError("content", "withheld"), "It was a kayak"), part_tokens=13)
        assert read_and_answer(reader, HISTORY, {"q1": "?"})["status"].to_list() == ["ok"]
        assert reader.notes == {"q1": "kayak"} and reader.report() == {"calls": 3, "read: content": 1}

    def test_a_killed_run_goes_on_where_it_stopped(self, tmp_path):
        questions = {"q1": "When?", "q2": "Who?"}
        model = Scripted("a", "b", "c", LLMError("connection", "gone"))
        with pytest.raises(LLMError, match="read of q2 at s3#2"):
            read_and_answer(MemAgent(CachedModel(model, tmp_path), part_tokens=13), HISTORY, questions)
        resumed = Scripted("d", "e", "f")
        reader = MemAgent(CachedModel(resumed, tmp_path), part_tokens=13)
        assert read_and_answer(reader, HISTORY, questions)["answer"].to_list() == ["e", "f"]
        assert len(resumed.prompts) == 3 and reader.asker.ledger.table()["replayed"].sum() == 3


class TestMemSkill:
    def test_skills_by_cosine_ties_by_order(self):
        skills = np.array([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
        assert choose_skills(np.array([[1.0, 0.0], [0.0, 1.0]]), skills, 3).tolist() == [[1, 3, 2], [0, 2, 1]]
        assert choose_skills(np.ones((1, 2)), skills, 9).shape == (1, 4)

    def test_the_loop(self):
        model = Scripted(ops(add("Ana has a red kayak.")), ops(add("The kayak is Otto."), {"op": "delete", "id": 5}),
                         ops({"op": "update", "id": 1, "text": "Ana sold her kayak."}), said("She sold it", 1))
        reader = MemSkill(model, encode, n_skills=2, part_tokens=10, overlap=3, n_memories=5)
        answers = read_and_answer(reader, HISTORY, {"q1": "What became of the kayak?"})
        users = [prompt[1]["content"] for prompt in model.prompts]
        assert users[0].startswith("Memory:\n(the memory is empty)\n\nNew part:\nSession of 8 May 2023\nAna: I bought a red kayak.")
        assert "Bo: Lovely!" in users[0] and "Bo: Lovely!" in users[1]  # the overlap
        assert users[2].startswith("Memory:\n(2) 8 May 2023: The kayak is Otto.\n(1) 8 May 2023: Ana has a red kayak.\n\nNew part:\n")  # nearest first
        assert all(sum(f"- {skill.name}. " in prompt[0]["content"] for skill in SKILLS) == 2 for prompt in model.prompts[:3])
        assert {number: entry.text for number, entry in reader.store.entries.items()} == {1: "Ana sold her kayak.", 2: "The kayak is Otto."}
        assert reader.report() == {"calls": 4, "update: refused": 1} and answers["answer"].to_list() == ["She sold it"]

    def test_the_bank(self):
        assert len({skill.name for skill in SKILLS}) == len(SKILLS) >= 7
        assert all(skill.when.endswith(".") and skill.how.endswith(".") for skill in SKILLS)


def test_all_say_what_they_are_not():
    for name, cls in READERS.items():
        assert cls.name == name and cls.source.startswith("arXiv:")
        assert cls.departures[0].startswith("Inference only") and all(sentence.endswith(".") for sentence in cls.departures)
