"""Samples for reinforcement learning: four layouts, test parts kept out, everything left out counted; and the real files where they are."""

import collections
import gzip
import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memloc.data import load, sample
from memloc.ids import parse_citations, parse_reply
from memloc.locator import EXTRACT_RULES
from memloc.multihop import LocatingSample, normalised
from memloc.rl_data import (
    LOCOMO_SPEAKERS,
    CutConfig,
    LabelledQuestion,
    Talk,
    Turn,
    benchmark_samples,
    build_rl_samples,
    closed_conversations,
    closed_parts,
    closed_texts,
    dialogue_heldout,
    dialogue_parts,
    equal_shares,
    family_of,
    left_out,
    load_halumem,
    load_time_dialogue,
    locomo_part,
    negative_sessions,
    option_answer,
    printed_sessions,
    read_time_files,
    refuse_test,
    spoken_turn,
    spread,
    stating_turn,
    stretch,
    stretches,
    talks_of,
    time_talks,
)

REAL = Path(__file__).resolve().parents[2]/"shared"/"data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the research data is not here")
TELLING = ("answer_", "has_answer", "_abs")


def check(each: LocatingSample, config: CutConfig | None = None) -> None:
    "What must hold of every sample."
    config = config or CutConfig()
    shown = range(1, len(each.segments) + 1)
    read = parse_reply(each.target, shown)
    assert (read.ids, read.repaired, read.out_of_range) == (each.gold, (), ()) and read.status == ("ok" if each.gold else "no ids")
    assert set(parse_citations(each.reason, shown).ids) == set(each.gold) <= set(shown) and list(each.gold) == sorted(set(each.gold))
    assert each.gold or each.answer == "unknown"
    assert 2 <= len(each.segments) <= config.n_segments and all(text.strip() for text in each.segments) and len(each.gold) < len(each.segments)
    assert sum(len(text.split()) for text in each.segments) <= config.max_words
    system, user = messages = each.messages
    assert system["content"] == EXTRACT_RULES and all(user["content"].count(f"[{number}]") == 2 for number in shown)
    prompt = json.dumps(messages)
    assert not any(mark in prompt for mark in TELLING)
    assert any(key.startswith("session:") for key in each.keys) and each.source


def write(path: Path, value, lines: bool = False) -> Path:
    "A JSON file, packed if its name says so."
    path.parent.mkdir(parents=True, exist_ok=True)
    content = ("\n".join(map(json.dumps, value)) if lines else json.dumps(value)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def counts(lint: pl.DataFrame) -> dict[str, int]:
    "What was left out, by reason."
    return dict(left_out(lint).group_by("rule").agg(pl.sum("count")).iter_rows())


def talk(name: str, *texts: str, conversation: str = "c") -> Talk:
    return Talk(f"{conversation}/{name}", conversation, tuple(Turn(f"{conversation}/{name}/t{i}", "Ann", text) for i, text in enumerate(texts)), None)


class TestStretch:
    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data(), st.integers(2, 12), st.integers(2, 200), st.integers(0, 99))
    def test_they_are_the_longest_of_all_that_keep_both_limits(self, words, data, n_segments, max_words, seed):
        gold, config = sorted(data.draw(st.sets(st.integers(0, len(words) - 1), max_size=3))), CutConfig(n_segments, max_words)
        every = [range(start, stop) for start in range(len(words)) for stop in range(start + max(2, len(gold) + 1), min(len(words), start + n_segments) + 1)
                 if set(gold) <= set(range(start, stop)) and sum(words[start:stop]) <= max_words]
        longest = [one for one in every if not any(set(one) < set(other) for other in every)]
        assert stretches(words, gold, config) == longest
        shown = stretch(words, gold, config, np.random.default_rng(seed))
        assert shown in longest if longest else shown is None

    def test_the_place_of_the_evidence_says_nothing(self):
        places = collections.Counter(10 - stretch([5]*30, [10], CutConfig(6, 600), np.random.default_rng(seed)).start for seed in range(1200))
        assert set(places) == set(range(6)) and max(places.values()) < 1.4*min(places.values())

    def test_settings_are_checked(self):
        for wrong in ({"n_segments": 1}, {"max_words": 0}, {"negatives": -1}, {"longest_answer": 0}, {"seed": -1}):
            with pytest.raises(ValueError, match="must be at least"):
                CutConfig(**wrong)


class TestNegatives:
    def question(self, **changes) -> LabelledQuestion:
        return replace(LabelledQuestion("c/q", "c", "made", "Where?", "there", ("c/s0",), frozenset(["c/s0/t0"])), **changes)

    def test_a_copy_of_the_evidence_is_no_negative(self):
        text = "We shall meet at the old mill behind the church at noon."
        talks = {each.session_id: each for each in (talk("s0", text, "Yes."), talk("s1", text.upper(), "Well."), talk("s2", "Something else altogether.", "Yes."))}
        assert negative_sessions(self.question(), talks, 9, np.random.default_rng(0)) == ["c/s2"]

    def test_own_conversation_first_and_never_what_is_to_be_avoided(self):
        talks = {each.session_id: each for each in (talk("s0", "a", "b"), talk("s1", "c", "d"), talk("s2", "e", "f"), talk("s0", "g", "h", conversation="x"))}
        question = self.question(avoid=frozenset(["c/s2"]))
        for seed in range(10):
            assert negative_sessions(question, talks, 1, np.random.default_rng(seed)) == ["c/s1"]
        assert negative_sessions(question, talks, 9, np.random.default_rng(0)) == ["c/s1", "x/s0"]


class TestSources:
    def test_test_parts_are_known_by_name(self):
        assert [closed_parts(f"locomo:{number}") != () for number in (26, 30, 41, 42, 43, 44, 47, 48, 49, 50)] == [False]*3 + [True]*7
        assert closed_parts("time-dialogue+derived+locomo:44") == ("locomo:44",) and closed_parts("halumem") == closed_parts("longmemeval-dev") == ()
        assert closed_parts("locomo") == () and family_of("time-dialogue-test+locomo:44") == "time-dialogue-test"

    def test_refusal_names_parts_and_counts(self):
        made, _ = benchmark_samples(sample())
        refuse_test(made)
        wrong = [replace(made[0], source="locomo:50"), replace(made[1], source="locomo:50"), replace(made[2], source="longmemeval-test")]
        with pytest.raises(ValueError, match=rf"3 samples.*locomo:50 \(2\), longmemeval-test \(1\).*{re.escape(made[0].sample_id)}.*allow_test=True"):
            refuse_test([*made, *wrong])
        refuse_test([*made, *wrong], allow_test=True)

    def test_a_renamed_copy_is_found_by_its_text(self):
        closed = closed_conversations(sample())
        kept, _ = benchmark_samples(sample(), conversations=closed, allow_test=True)
        disguised = [replace(each, source="my-own-data", sample_id=f"mine/{i}") for i, each in enumerate(kept)]
        refuse_test(disguised)
        with pytest.raises(ValueError, match="a text of a test conversation"):
            build_rl_samples(disguised, n=5, texts=closed_texts(sample()))
        ours, _ = benchmark_samples(sample())
        assert build_rl_samples(ours, n=5, texts=closed_texts(sample())).samples


class TestBenchmarks:
    def test_the_shipped_conversations(self):
        made, lint = benchmark_samples(sample())
        gold = {row["question_id"]: row for row in sample().gold.iter_rows(named=True)}
        for each in made:
            check(each)
            question, session = each.sample_id.split("@")
            marked = [turn for turn in gold[question]["evidence_turns"] if turn.startswith(f"{session}/")]
            assert len(each.gold) == len(marked) and each.source == "sample"
            assert each.answer in ("unknown", gold[question]["answer"])
        assert len({each.sample_id for each in made}) == len(made)
        assert set(counts(lint)) <= {"unanswerable", "answer too long", "no answer", "no evidence label", "stretch does not fit", "session without labelled turn"}

    def test_every_question_is_used_or_counted(self):
        config = CutConfig(n_segments=4, max_words=60, negatives=0)
        made, lint = benchmark_samples(sample(), config)
        asked = sample().questions.filter(~pl.col("conversation_id").is_in(list(closed_conversations(sample()))))["question_id"]
        told = {each.sample_id.split("@")[0] for each in made} | {record.split("@")[0] for record in lint["record"]}
        assert told == set(asked)
        for each in made:
            check(each, config)

    def test_seed_and_neighbours(self):
        made, _ = benchmark_samples(sample())
        assert made == benchmark_samples(sample())[0] != benchmark_samples(sample(), CutConfig(seed=14))[0]
        one = made[0].sample_id.split("/")[0]
        assert benchmark_samples(sample(), conversations=[one])[0] == [each for each in made if each.sample_id.startswith(f"{one}/")]

    def test_unanswerable_questions_show_their_trap_and_nothing_is_found(self):
        more, lint = benchmark_samples(sample(), CutConfig(unanswerable=True))
        trap = set(sample().gold.filter("is_abstention")["question_id"])
        assert not counts(lint).get("unanswerable") and {each.answer for each in more if each.sample_id.split("@")[0] in trap} == {"unknown"}

    def test_conversations_are_checked(self):
        closed = sorted(closed_conversations(sample()))
        for wrong, message in ((["nowhere"], "no conversation 'nowhere'"), ([*closed, *sample().conversations["conversation_id"]], "is a test conversation")):
            with pytest.raises(ValueError, match=message):
                benchmark_samples(sample(), conversations=wrong)
        kept, _ = benchmark_samples(sample(), conversations=closed, allow_test=True)
        assert {each.source for each in kept} == {"sample-test"}

    def test_speakers(self):
        name = sample().turns["speaker"][0]
        made, _ = benchmark_samples(sample(), speakers=[name])
        assert made and all(text.startswith(f"{name}: ") for each in made for text in each.segments)

    def test_parts_share_no_text(self):
        train, held = dialogue_parts(sample(), 1)
        texts = [frozenset(key for each in talks_of(sample(), part).values() for key in each.keys) for part in (train, held)]
        assert not texts[0] & texts[1] and set(train) | set(held) == set(sample().conversations["conversation_id"]) - closed_conversations(sample())
        with pytest.raises(ValueError, match="held_out=5"):
            dialogue_parts(sample(), 5)


class TestHeldout:
    def test_it_is_evidence_within_the_limits_in_a_fixed_order(self):
        probe, config = dialogue_heldout(sample(), 12, max_words=80), CutConfig(8, 80)
        for each in probe:
            check(each, config)
        names = [each.sample_id for each in probe]
        assert names == sorted(set(names)) and len(names) == 12 and all(each.gold for each in probe)
        assert not {name.split("/")[0] for name in names} & closed_conversations(sample())
        assert probe == dialogue_heldout(sample(), 12, max_words=80) != dialogue_heldout(sample(), 12, 14, max_words=80)

    def test_a_smaller_probe_is_a_part_of_a_larger_one(self):
        small, large = ({each.sample_id: each for each in dialogue_heldout(sample(), n)} for n in (5, 20))
        assert small.items() <= large.items() and len(large) == 20

    def test_held_out_conversations_share_nothing_with_the_others(self):
        train, held = dialogue_parts(sample(), 1)
        probe, trained = dialogue_heldout(sample(), 5, conversations=held), benchmark_samples(sample(), conversations=train)[0]
        assert {each.sample_id.split("/")[0] for each in probe} == set(held)
        assert not frozenset().union(*(each.keys for each in probe)) & frozenset().union(*(each.keys for each in trained))

    def test_what_is_refused(self):
        for n in (0, 9_999):
            with pytest.raises(ValueError, match=f"n={n} samples are asked for, and [0-9]+ can be made"):
                dialogue_heldout(sample(), n)
        with pytest.raises(ValueError, match="is a test conversation"):
            dialogue_heldout(sample(), 2, conversations=closed_conversations(sample()))


class TestLongMemEval:
    @pytest.fixture(scope="class")
    def dataset(self, tmp_path_factory):
        def record(number: int, n_sessions: int) -> dict:
            names = [f"answer_{number}_{i}" for i in range(n_sessions)]
            said = [[{"role": "user", "content": f"My locker at the pool this year has number {number}{i}.", "has_answer": True},
                     {"role": "assistant", "content": f"Number {number}{i} it is, I will remember that for you.", "has_answer": False}, {"role": "user", "content": "Thanks."}] for i in range(n_sessions)]
            return {"question_id": f"q{number}" + "_abs"*(number == 3), "question_type": "single-session-user", "question": f"Which locker, {number}?", "question_date": "2023/05/30 (Tue) 23:31",
                    "answer": number, "answer_session_ids": names, "haystack_session_ids": names, "haystack_dates": ["2023/05/20 (Sat) 02:21"]*n_sessions, "haystack_sessions": said}

        records = [record(number, 1 + (number == 2)) for number in range(5)]
        del records[4]["haystack_sessions"][0][0]["has_answer"]
        path = write(tmp_path_factory.mktemp("lme")/"oracle.json", records)
        return load("longmemeval_oracle", path, allow_unknown_hash=True)

    def test_only_development_questions_without_a_flag(self, dataset):
        with pytest.raises(ValueError, match="all its conversations are test conversations"):
            benchmark_samples(dataset)
        made, lint = benchmark_samples(dataset, development=["q0", "q2", "q3_abs", "q4"])
        assert {each.source for each in made} == {"longmemeval-dev"} and counts(lint) == {"unanswerable": 1, "no evidence label": 1}
        assert not any("Which locker, 1?" in each.question for each in made)
        closed = closed_conversations(dataset, ["q0", "q2", "q3_abs", "q4"])
        kept, _ = benchmark_samples(dataset, conversations=closed, development=["q0"], allow_test=True)
        assert {each.source for each in kept} == {"longmemeval-test"}

    def test_labels_do_not_show(self, dataset):
        made, _ = benchmark_samples(dataset, CutConfig(negatives=3), development=[f"q{i}" + "_abs"*(i == 3) for i in range(5)])
        for each in made:
            check(each)
        assert any(each.gold for each in made) and any(not each.gold for each in made)
        text = json.dumps([[each.sample_id, each.messages, each.source, sorted(each.keys)] for each in made])
        assert not any(mark in text for mark in TELLING)

    def test_negatives_come_from_other_histories(self, dataset):
        made, _ = benchmark_samples(dataset, development=["q0", "q2", "q4"])
        empty = [each for each in made if not each.gold]
        assert empty and all(each.sample_id.split("@")[1].split("/")[0] != each.sample_id.split("/")[0] for each in empty)

    def test_a_session_without_marked_turn_is_never_its_own_negative(self, dataset):
        made, _ = benchmark_samples(dataset, CutConfig(negatives=9), development=["q0", "q2", "q4"])
        for each in made:
            assert each.gold or each.sample_id.split("@")[1].split("/")[0] != each.sample_id.split("/")[0]

    def test_the_answer_needs_the_whole_evidence(self, dataset):
        made, _ = benchmark_samples(dataset, development=["q0", "q2"])
        assert {each.question: each.answer for each in made if each.gold} == {"Which locker, 0?": "0", "Which locker, 2?": "unknown"}


def memory(text: str, source: str = "primary", replaces: tuple = ()) -> dict:
    return {"index": 1, "memory_content": text, "memory_type": "Event Memory", "memory_source": source, "is_update": str(bool(replaces)), "original_memories": list(replaces),
            "importance": 0.5, "timestamp": "Dec 15, 2025, 08:41:23"}


def halu_session(day: int, said: list[tuple[str, str]], points: list[dict] | None, questions: list[dict] | None = None, **more) -> dict:
    stamp = f"Dec {day:02d}, 2025, 06:11:23"
    turns = [{"role": role, "content": text, "timestamp": stamp, "dialogue_turn": i//2} for i, (role, text) in enumerate(said)]
    session = {"start_time": stamp, "end_time": stamp, "dialogue_turn_num": len(turns)//2, "dialogue": turns, "dialogue_token_length": 10}
    return session | ({} if points is None else {"memory_points": points, "memory_points_count": len(points)}) | ({} if questions is None else {"questions": questions}) | more


def halu_question(text: str, answer: str, *evidence: str, kind: str = "Basic Fact Recall") -> dict:
    return {"question": text, "answer": answer, "evidence": [{"memory_content": each, "memory_type": "Event Memory"} for each in evidence], "difficulty": "easy", "question_type": kind}


WORKS, MOVED, OSLO, CELLO = "Nils Berg works as a baker in Tromsø.", "Nils Berg moved into a yellow house.", "Nils Berg lives in a rented room.", "Nils Berg plays the cello every Sunday."


def halu_user() -> dict:
    "A user with an update, an interference, an interference session without memory points, and questions of several kinds."
    small = [("user", "Hello there."), ("assistant", "Hello.")]
    sessions = [
        halu_session(1, [("user", "I work as a baker up in Tromsø."), ("assistant", "A baker in Tromsø, how nice! You work at night then?"), ("user", "Mostly.")],
                     [memory(WORKS), memory("Nils Berg works in a bank.", "interference")]),
        halu_session(2, [("user", "I still live in a rented room."), ("assistant", "I see.")], [memory(OSLO), memory("Nils Berg likes rain.")]),
        halu_session(3, small, [memory(CELLO), memory("Nils Berg is tired.")]),
        halu_session(4, small, None, [], is_generated_qa_session=True, session_id=3),
        halu_session(5, [("user", "Last week I moved into a yellow house."), ("assistant", "Congratulations!"), ("user", "And the garden is big.")],
                     [memory("Nils Berg has a garden."), memory(MOVED, replaces=(OSLO,))],
                     [halu_question("What does Nils work as?", "A baker.", WORKS), halu_question("Which house is new?", "The yellow one.", MOVED, kind="Dynamic Update"),
                      halu_question("Where does the baker live?", "In a yellow house.", WORKS, MOVED, kind="Multi-hop Inference"),
                      halu_question("What is his sister's name?", "It was not said.", kind="Memory Boundary"), halu_question("Lost?", "yes indeed", "No such point."),
                      halu_question("Long?", "word "*20, WORKS)]),
        halu_session(6, small, [memory("Nils Berg sold the house."), memory("Nils Berg is happy.")])]
    return {"uuid": "3f2a-77", "persona_info": "Name: Nils Berg; Gender: Male", "sessions": sessions, "token_cost": {}, "total_dialogue_token_length": 60, "total_question_count": 6}


class TestHaluMem:
    @pytest.fixture
    def path(self, tmp_path):
        return write(tmp_path/"HaluMem-Medium.jsonl.gz", [halu_user()], lines=True)

    def test_memory_points_as_segments(self, path):
        made, lint = load_halumem(path, CutConfig(negatives=5))
        for each in made:
            check(each)
        assert counts(lint) == {"unanswerable": 1, "evidence is no memory point": 1, "answer too long": 1} and {each.source for each in made} == {"halumem"}
        found = {(each.question, each.segments[each.gold[0] - 1]): each for each in made if each.gold}
        assert {pair: each.answer for pair, each in found.items()} == {
            ("What does Nils work as?", WORKS): "A baker.", ("Which house is new?", MOVED): "The yellow one.",
            ("Where does the baker live?", WORKS): "unknown", ("Where does the baker live?", MOVED): "unknown"}
        assert found["What does Nils work as?", WORKS].date == datetime(2025, 12, 1, 6, 11, 23) and found["Which house is new?", MOVED].asked_on == datetime(2025, 12, 5, 6, 11, 23)
        assert "Nils Berg works in a bank." in found["What does Nils work as?", WORKS].segments

    def test_later_sessions_and_replaced_points_are_no_negatives(self, path):
        made, _ = load_halumem(path, CutConfig(negatives=9, unanswerable=True))
        empty = {each.question: {text for other in made if other.question == each.question and not other.gold for text in other.segments} for each in made}
        assert "Nils Berg sold the house." not in set().union(*empty.values())
        assert OSLO not in empty["Which house is new?"] and CELLO in empty["Which house is new?"] and OSLO in empty["What does Nils work as?"]
        assert {MOVED, WORKS, OSLO, CELLO} <= empty["What is his sister's name?"]

    def test_turns_as_segments(self, path):
        made, lint = load_halumem(path, show="turns")
        for each in made:
            check(each)
        told = {each.question: each.segments[each.gold[0] - 1] for each in made if each.gold}
        assert told["What does Nils work as?"] == "user: I work as a baker up in Tromsø." and told["Which house is new?"] == "user: Last week I moved into a yellow house."
        assert {each.source for each in made} == {"halumem+derived"} and "no single turn states the evidence" not in counts(lint)
        user = halu_user()
        user["sessions"][0]["dialogue"][2]["content"] = "As I said, I work as a baker up in Tromsø."
        _, lint = load_halumem(write(path.parent/"two.jsonl", [user], lines=True), show="turns")
        assert counts(lint)["no single turn states the evidence"] == 3

    def test_a_user_is_read_once(self, path):
        write(path.parent/"HaluMem-Long.jsonl", [halu_user()], lines=True)
        both, lint = load_halumem(path.parent)
        assert both == load_halumem(path)[0] and counts(lint)["repeated user"] == 1

    def test_what_is_refused(self, path):
        with pytest.raises(ValueError, match="show='events'"):
            load_halumem(path, show="events")
        broken = halu_user()
        broken["sessions"][1]["dialogue"][0].pop("content")
        with pytest.raises(ValueError, match=r"broken.jsonl.*\[0\]\.sessions\[1\]\.dialogue\[0\]\.content"):
            load_halumem(write(path.parent/"broken.jsonl", [broken], lines=True))

    def test_names_do_not_show(self, path):
        made, _ = load_halumem(path)
        assert not any("3f2a" in each.sample_id or "3f2a" in json.dumps(each.messages) for each in made)


class TestStatingTurn:
    def test_one_turn_or_none(self):
        texts = ["I sold my old boat in the harbour.", "The weather was fine.", "Boats are expensive."]
        assert stating_turn(texts, "Ada sold her old boat") == 0
        assert stating_turn([*texts, "I sold my old boat."], "Ada sold her old boat") is None
        assert stating_turn(texts, "boat") is None and stating_turn([], "Ada sold her old boat") is None and stating_turn(texts, "Bo bought a new car yesterday") is None
        assert stating_turn(["a cat sat down"], "a big cat sat down") == 0


def spoke(*pairs: tuple[str, str]) -> list[dict]:
    return [{"speaker": speaker, "utterance": text, "utterance_date": "2023-05-03T11:52:00", "events": [{"event_time": ["unknown", "unknown"]}]} for speaker, text in pairs]


CONTEXTS = {
    "ann-and-cem": {"1": {"session_date": "2023-05-03T11:52:00", "content": spoke(("Ann Lee", "Ann Lee shares an image about [IMAGE: a red [new] bike], and says: I bought this bike yesterday."), ("Cem", "Bye!"))},
                    "2": {"session_date": "2023-05-09T09:00:00", "content": spoke(("Cem", "My exam is on Friday."), ("Ann Lee", "Good luck!"), ("Cem", "Bye!"))},
                    "3": {"session_date": "2023-06-01T09:00:00", "content": spoke(("Cem", "I passed."), ("Ann Lee", "Well done!"))}},
    "evan-and-sam": {"1": {"session_date": "2023-08-07T19:52:00", "content": spoke(("Evan", "I drove to the lake."), ("Sam", "Alone?"))}}}


def time_question(number: int, text: str, answer: str, context: str, *evidence: tuple) -> dict:
    return {"Question ID": f"id{number}", "Question": text, "Gold Answer": answer, "Level": "Level 1", "Task": "Extract", "Context": context, "Dataset Name": "TIME-Dial",
            "Evidence": [{"session_id": session, "utterance_id": 1, "speaker": "x", "utterance": said} for session, said in evidence]}


OPTIONS = "What happened before the exam?\nA.Cem sold a car.  \nB. Ann Lee bought a red bike.\nC. There is no answer."
QUESTIONS = [time_question(1, "When was the bike bought?", "May 2, 2023", "ann-and-cem", ("1", CONTEXTS["ann-and-cem"]["1"]["content"][0]["utterance"])),
             time_question(2, OPTIONS, "B", "ann-and-cem", (1, CONTEXTS["ann-and-cem"]["1"]["content"][0]["utterance"]), ("2", "My exam is on Friday.")),
             time_question(3, OPTIONS.replace("exam", "wedding"), "C", "ann-and-cem"),
             time_question(4, "Where did Evan go?", "to the lake", "evan-and-sam", ("1", "I drove to the lake.")),
             time_question(5, "Lost?", "yes", "ann-and-cem", ("2", "Nobody said this.")), time_question(6, "Elsewhere?", "yes", "no-such-context"),
             time_question(7, "Who says bye in May?", "Cem", "ann-and-cem", ("2", "Bye!"))]


def training(question: dict, lines: bool) -> dict:
    "The record that the authors' converter makes of a question."
    sessions = [{"session_id": f"session_{name}", "session_time": session["session_date"], "is_relevant": "no",
                 "utterances": [{"speaker": each["speaker"], "text": each["utterance"], "utterance_time": each["utterance_date"], "event_time": {"start": "unknown", "end": "unknown"},
                                 "is_relevant": "yes" if any(each["utterance"] == piece["utterance"] for piece in question["Evidence"]) else "no"} for each in session["content"]]}
                for name, session in CONTEXTS[question["Context"]].items()]
    prompt = f"You are a memory-aware assistant.\n\n**User Question:**\n2025-07-24 13:08:36.1: {question['Question']}\n\n***session memory:** \n...\n\n**Expected Response:**\n"
    extra = {"index": question["Question ID"], "gold_selected_sessions": [], "question_time_range": {"start": "2021-01-01", "end": "2025-12-31"}, "all_sessions": sessions}
    return {"data_source": "TIME-Dial", "prompt": [{"content": prompt, "role": "user"}], "ability": "Extract",
            "reward_model": {"ground_truth": {"answer": question["Gold Answer"], "selected_sessions": []}, "style": "rule-lighteval/TIME-Dial_v1"},
            "extra_info": json.dumps(extra) if lines else extra}


def printed(question: dict, sessions: dict) -> str:
    "The prompt of a results file."
    body = "\n".join(f"{session['session_date']}: <{name}>, " + "\n".join(f"{each['speaker']} {each['utterance_date']} : {each['utterance']}" for each in session["content"]) for name, session in sessions.items())
    return f"Rules.\n\n**User Question:**\n2025-07-24 13:08:36: {question['Question']}\n\n***session memory:** \n{body}\n\n**Expected Response:**\n```json\n```\n"


def result(question: dict, sessions: dict, named: bool = True) -> dict:
    return {"question": question["Question"], "prompt": printed(question, sessions), "model_output": "", "parsed_output": {}, "gold_answer": question["Gold Answer"]} | (
        {"question_id": question["Question ID"], "level": "Level 1", "task": "Extract"} if named else {"bm25_top5_session_ids": ["1"]})


class TestTimeDialogue:
    @pytest.fixture
    def labelled(self, tmp_path):
        write(tmp_path/"labelled"/"contexts.json", CONTEXTS)
        write(tmp_path/"labelled"/"questions.json.gz", QUESTIONS)
        return tmp_path/"labelled"

    def test_labelled_questions(self, labelled):
        made, lint = load_time_dialogue(labelled)
        for each in made:
            check(each)
        assert {each.source for each in made} == {"time-dialogue"}
        assert counts(lint) == {"unanswerable": 1, "test part: locomo:49": 1, "evidence is not in its session": 1, "dialogue is not here": 1}
        told = [(each.question.split("\n")[0], each.gold, each.answer, each.date.day) for each in made if each.gold]
        assert told == [("When was the bike bought?", (1,), "May 2, 2023", 3), ("What happened before the exam?", (1,), "unknown", 3), ("What happened before the exam?", (1,), "unknown", 9),
                        ("Who says bye in May?", (3,), "Cem", 9)]
        assert made[0].segments[0] == "Ann Lee: I bought this bike yesterday. [image: a red [new] bike]"
        assert all(each.segments != made[0].segments for each in made if not each.gold and each.question == made[0].question)

    def test_evaluation_questions_and_locomo_with_a_flag(self, labelled):
        write(labelled/"results.json", [result(QUESTIONS[0], CONTEXTS["ann-and-cem"])])
        made, lint = load_time_dialogue(labelled, allow_test=True)
        assert {each.source for each in made} == {"time-dialogue", "time-dialogue-test", "time-dialogue+locomo:49"}
        kept, lint = load_time_dialogue(labelled)
        assert {each.source for each in kept} == {"time-dialogue"} and counts(lint)["test part: time-dialogue-test"] == 1
        with pytest.raises(ValueError, match=r"locomo:49 \(1\), time-dialogue-test \(2\)"):
            build_rl_samples(made, n=3)

    @pytest.mark.parametrize("parquet", [False, True])
    def test_training_records(self, tmp_path, labelled, parquet):
        records = [training(question, parquet) for question in QUESTIONS[:4]]
        if parquet:
            pl.DataFrame(records).write_parquet(tmp_path/"train.parquet")
        path = tmp_path/"train.parquet" if parquet else write(tmp_path/"train.json", records)
        made, lint = load_time_dialogue(path)
        same, _ = load_time_dialogue(labelled)
        assert [(each.question, each.answer) for each in made if each.gold] == [(each.question, each.answer) for each in same if each.gold][:3]
        assert [(each.gold, each.segments) for each in made if each.gold] == [(each.gold, each.segments) for each in same if each.gold][:3]
        assert counts(lint) == {"unanswerable": 1, "test part: locomo:49": 1}

    def test_results_have_no_evidence(self, tmp_path):
        write(tmp_path/"ranges.json", {"id1": {"question": "?", "question_time_range": {"start": "2023-05-01T00:00:00", "end": "2023-05-02T00:00:00"}, "events": []}})
        write(tmp_path/"bm25.json", [result(QUESTIONS[1], {"1": CONTEXTS["ann-and-cem"]["1"]}, named=False), result(QUESTIONS[0], {}, named=False)])
        write(tmp_path/"full.json", [result(QUESTIONS[1], {}), result(QUESTIONS[0], {})])
        made, lint = load_time_dialogue(tmp_path, allow_test=True)
        assert made == [] and counts(lint) == {"no session": 1, "no evidence label": 1}
        assert lint.filter(pl.col("action") == "noted")["rule"].to_list() == ["time ranges only"]
        (each,), lint = load_time_dialogue(tmp_path, derive=True, allow_test=True)
        check(each)
        assert (each.source, each.gold, each.answer) == ("time-dialogue-test+derived", (1,), "Ann Lee bought a red bike.")
        assert load_time_dialogue(tmp_path, derive=True)[0] == []

    def test_a_labelled_copy_wins_over_results(self, labelled):
        write(labelled/"aaa_results.json", [result(QUESTIONS[1], CONTEXTS["ann-and-cem"])])
        made, _ = load_time_dialogue(labelled, derive=True, allow_test=True)
        assert {each.source for each in made if each.question.startswith("What happened")} == {"time-dialogue-test"}

    def test_printed_sessions_are_read_back(self):
        dialogue = CONTEXTS["ann-and-cem"]
        read = printed_sessions(printed(QUESTIONS[0], dialogue))
        assert read == [(name, session["session_date"], [(each["speaker"], each["utterance"]) for each in session["content"]]) for name, session in dialogue.items()]
        assert printed_sessions("nothing here") == []

    def test_pictures(self):
        assert spoken_turn("t", "Bo", "I like this [IMAGE: x]") == Turn("t", "Bo", "I like this [IMAGE: x]")
        assert spoken_turn("t", "Bo", "Bo shares an image about [IMAGE: a cat\non a mat], and says: Look\nhere") == Turn("t", "Bo", "Look\nhere", "a cat\non a mat")

    def test_options(self):
        assert option_answer(OPTIONS, "B") == "Ann Lee bought a red bike." and option_answer(OPTIONS, "A  B") == "Cem sold a car., Ann Lee bought a red bike."
        assert option_answer(OPTIONS, "D") == "D" and option_answer("When?", "A") == "A" and option_answer(OPTIONS, "(1)(3)(2)") == "(1)(3)(2)"

    def test_what_is_refused(self, tmp_path):
        for value, message in (([{"text": "x"}], r"\['text'\]"), ([], "NoneType"), ("text", "NoneType")):
            with pytest.raises(ValueError, match=f"x.json.*{message}"):
                load_time_dialogue(write(tmp_path/"x.json", value))
        broken = [{key: value for key, value in QUESTIONS[0].items() if key != "Gold Answer"}]
        with pytest.raises(ValueError, match=r"x.json.*\[0\].*Gold Answer"):
            load_time_dialogue(write(tmp_path/"x.json", broken))


class TestMixture:
    @given(st.dictionaries(st.text(max_size=3), st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 120))
    def test_shares_are_even_and_complete(self, sizes, n):
        shares = equal_shares(sizes, n)
        assert sum(shares.values()) == min(n, sum(sizes.values())) and all(0 <= shares[name] <= size for name, size in sizes.items())
        unfilled = [shares[name] for name, size in sizes.items() if shares[name] < size]
        assert not unfilled or max(shares.values()) - min(unfilled) <= 1

    def pool(self, source: str, n: int, empty: int) -> list[LocatingSample]:
        made, _ = benchmark_samples(sample(), CutConfig(negatives=0))
        full = [replace(made[0], sample_id=f"{source}/{i}", question=f"{source} {i}?", source=source, gold=(1 + i % 3,)) for i in range(n)]
        return full + [replace(each, sample_id=f"{each.sample_id}#", gold=(), answer="unknown") for each in full[:empty]]

    def test_sources_are_mixed_evenly(self):
        mixed = build_rl_samples(self.pool("a", 10, 10), self.pool("b:1", 200, 100), self.pool("b:2", 200, 100), self.pool("c", 300, 0), n=120)
        sizes = collections.Counter(family_of(each.source) for each in mixed.samples)
        assert sizes == {"a": 20, "b": 50, "c": 50}
        empty = collections.Counter(family_of(each.source) for each in mixed.samples if not each.gold)
        assert empty == {"a": 10, "b": 12}  # all of a is needed, so its negatives are too
        table = mixed.counts
        assert table["offered"].sum() == 920 and (table["repeated"] + table["taken"] + table["not_needed"] == table["offered"]).all() and table["taken"].sum() == 120

    def test_places_are_spread(self):
        crowd = [each for each in self.pool("a", 300, 0) if each.gold == (1,) or each.sample_id.endswith(("1", "2"))]
        places = collections.Counter(each.gold for each in spread(crowd, 60))
        assert places == {(1,): 20, (2,): 20, (3,): 20}

    def test_repeats_are_found_and_counted(self):
        pool = self.pool("a", 20, 5)
        again = [replace(each, sample_id=f"again/{i}", segments=(*each.segments, "one more"), source="b") for i, each in enumerate(pool) if each.gold]
        mixed = build_rl_samples(pool, again, n=99)
        assert sorted(each.sample_id for each in mixed.samples) == sorted(each.sample_id for each in pool)
        assert mixed.counts.filter(pl.col("source") == "b").select("offered", "repeated", "taken").row(0) == (20, 20, 0)

    def test_seed(self):
        pool = self.pool("a", 90, 30)
        assert build_rl_samples(pool, n=30).samples == build_rl_samples(pool, n=30).samples != build_rl_samples(pool, n=30, seed=1).samples
        for wrong in ({"n": 0}, {"n": 3, "without": 1.5}):
            with pytest.raises(ValueError, match="n must be at least 1"):
                build_rl_samples(pool, **wrong)


@needs_real
class TestRealFiles:
    @pytest.fixture(scope="class")
    def locomo(self):
        return load("locomo", REAL/"locomo"/"locomo10.json")

    @pytest.fixture(scope="class")
    def oracle(self):
        return load("longmemeval_oracle", REAL/"longmemeval"/"longmemeval_oracle.dev.json.gz")

    @pytest.fixture(scope="class")
    def locomo_made(self, locomo):
        return benchmark_samples(locomo)

    @pytest.fixture(scope="class")
    def oracle_made(self, oracle):
        return benchmark_samples(oracle)

    def test_locomo(self, locomo, locomo_made):
        made, lint = locomo_made
        for each in made:
            check(each)
        assert counts(lint) == {"unanswerable": 112, "answer too long": 21, "no evidence label": 2}
        assert collections.Counter((each.source, bool(each.gold)) for each in made) == {
            ("locomo:26", True): 183, ("locomo:26", False): 143, ("locomo:30", True): 85, ("locomo:30", False): 75, ("locomo:41", True): 195, ("locomo:41", False): 144}
        refuse_test(made, texts=closed_texts(locomo))
        with pytest.raises(ValueError, match="conv-42 is a test conversation"):
            benchmark_samples(locomo, conversations=["conv-42"])
        kept, _ = benchmark_samples(locomo, conversations=["conv-42"], allow_test=True)
        with pytest.raises(ValueError, match="locomo:42"):
            build_rl_samples(made, kept, n=100)
        with pytest.raises(ValueError, match="a text of a test conversation"):
            refuse_test([replace(each, source="mine") for each in kept], texts=closed_texts(locomo))

    def test_real_dialogue_is_held_out_for_small_windows(self, locomo):
        probe = dialogue_heldout(locomo, 200)
        for each in probe:
            check(each, CutConfig(8, 200))
        assert {each.source for each in probe} == {"locomo:26", "locomo:30", "locomo:41"} and all(each.gold for each in probe)
        assert len({each.sample_id for each in probe}) == 200 and probe == dialogue_heldout(locomo, 200)
        assert max(len(" ".join(message["content"] for message in each.messages).split()) for each in probe) < 400  # in all, with the rules
        with pytest.raises(ValueError, match="conv-42 is a test conversation"):
            dialogue_heldout(locomo, 5, conversations=["conv-42"])

    def test_longmemeval(self, oracle, oracle_made):
        made, lint = oracle_made
        for each in made:
            check(each)
        assert counts(lint) == {"answer too long": 38, "session without labelled turn": 28, "stretch does not fit": 14, "unanswerable": 19}
        assert collections.Counter((each.source, bool(each.gold)) for each in made) == {("longmemeval-dev", True): 417, ("longmemeval-dev", False): 244}
        first = collections.Counter(each.gold[0] for each in made if each.gold)
        assert first[1] > 0.7*sum(first.values())  # why places are spread
        users, _ = benchmark_samples(oracle, CutConfig(n_segments=8, max_words=400), speakers=["user"])
        chosen = collections.Counter(each.gold[0] for each in build_rl_samples(users, n=200, without=0.2).samples if each.gold)
        assert max(chosen.values()) < 0.3*sum(chosen.values())

    def test_the_two_files_of_longmemeval_ask_the_same(self, oracle_made):
        part = load("longmemeval_s", REAL/"longmemeval"/"longmemeval_s_cleaned.dev.part07.json.xz")
        haystack, _ = benchmark_samples(part)
        assert {each.sample_id.split("/")[0] for each in haystack if not each.gold} == {each.sample_id.split("@")[1].split("/")[0] for each in haystack if not each.gold}
        table = build_rl_samples(oracle_made[0], haystack, n=10_000).counts
        assert table.filter("evidence")["repeated"].sum() == sum(bool(each.gold) for each in haystack)

    def test_parts_of_longmemeval(self, oracle):
        train, held = dialogue_parts(oracle, 60)
        assert (len(train), len(held)) == (241, 60)
        texts = [frozenset(key for each in talks_of(oracle, part).values() for key in each.keys) for part in (train, held)]
        assert not texts[0] & texts[1]

    def test_locomos_speakers(self, locomo):
        people = {conversation: frozenset(group["speaker"].str.to_lowercase()) for (conversation,), group in locomo.turns.group_by("conversation_id")}
        assert {names: conversation.replace("conv-", "locomo:") for conversation, names in people.items()} == LOCOMO_SPEAKERS

    def test_time_dialogue(self):
        made, lint = load_time_dialogue(REAL/"time_dialogue")
        assert made == [] and counts(lint) == {"no evidence label": 187, "no session": 13}
        made, lint = load_time_dialogue(REAL/"time_dialogue", derive=True)
        assert made == [] and sum(counts(lint).values()) == 200
        made, lint = load_time_dialogue(REAL/"time_dialogue", derive=True, allow_test=True)
        for each in made:
            check(each)
        assert counts(lint) == {"no evidence label": 115, "no session": 13, "answer too long": 3}
        assert sum(bool(each.gold) for each in made) == 69 and all(each.source.startswith("time-dialogue-test+derived") for each in made)
        with pytest.raises(ValueError, match="time-dialogue-test"):
            build_rl_samples(made, n=10)

    def test_time_dialogue_holds_conversations_of_locomo(self, locomo):
        texts = {name: frozenset(key for each in talks_of(locomo, [name]).values() for key in each.keys if key.startswith("text:")) for name in locomo.conversations["conversation_id"]}
        named, shared = {}, {}
        for record, _ in read_time_files(REAL/"time_dialogue").records:
            talks = time_talks(record, "x").values()
            named[record.question_id] = locomo_part(turn.speaker for each in talks for turn in each.turns)
            shared[record.question_id] = next((name.replace("conv-", "locomo:") for name, keys in texts.items() if any(each.keys & keys for each in talks)), None)
        assert named == shared  # two ways to recognise a conversation, one result
        found = collections.Counter(filter(None, named.values()))
        assert found == {"locomo:44": 7, "locomo:30": 5, "locomo:50": 4, "locomo:49": 4, "locomo:42": 3, "locomo:26": 3, "locomo:47": 3, "locomo:41": 2, "locomo:43": 1, "locomo:48": 1}

    def test_a_training_set(self, locomo, locomo_made, oracle_made):
        mixed = build_rl_samples(locomo_made[0], oracle_made[0], n=600, texts=closed_texts(locomo))
        assert collections.Counter((family_of(each.source), bool(each.gold)) for each in mixed.samples) == {
            ("locomo", True): 225, ("locomo", False): 75, ("longmemeval-dev", True): 225, ("longmemeval-dev", False): 75}
        assert len({normalised(each.question) for each in mixed.samples}) > 350
