"""Multi-hop questions as locating tasks: layouts, splits, numbering, targets; and the real files where they are."""

import collections
import gzip
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from memloc.data import sample
from memloc.ids import neutralise, parse_citations, parse_reply
from memloc.locator import EXTRACT_RULES
from memloc.multihop import (
    DistractorPool,
    LocatingSample,
    MultihopQuestion,
    Passage,
    all_keys,
    build_sample,
    build_samples,
    components,
    dialogue_samples,
    gold_keys,
    gold_places,
    load_multihop,
    load_pool,
    passage_keys,
    pools_of,
    quote,
    segment_text,
    select,
    split_questions,
    window,
)

REAL = Path(__file__).resolve().parents[2]/"shared"/"data"/"multihop"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the research data is not here")
CONTEXT = [["Tern (boat)", ["Tern is a wooden boat of nine metres.", " It was built by Ada Lund in Sandvik."]],
           ["Ada Lund", ["Ada Lund (born 1902) was a boat builder from Norhavn.", " She kept two goats."]],
           ["Gull (boat)", ["Gull is an iron boat of twelve metres.", " It was built by Per Holm in Vestby."]],
           ["Per Holm", ["Per Holm (born 1899) was a smith from Vestby."]]]
HOTPOT = {"_id": "5a", "question": "When was the builder of the Tern born?", "answer": "1902", "type": "bridge", "level": "hard",
          "supporting_facts": [["Tern (boat)", 1], ["Ada Lund", 0]], "context": CONTEXT}
WIKI = HOTPOT | {"_id": "w", "evidences": [["Tern", "builder", "Ada Lund"], ["Ada Lund", "date of birth", "1902"]], "evidences_id": [], "answer_id": None}
MUSIQUE = {"id": "2hop__1_2", "question": HOTPOT["question"], "answer": "1902", "answer_aliases": [], "answerable": True,
           "paragraphs": [{"idx": i, "title": title, "paragraph_text": "".join(sentences), "is_supporting": i < 2} for i, (title, sentences) in enumerate(CONTEXT)],
           "question_decomposition": [{"id": 1, "question": "Tern >> builder", "answer": "Ada Lund", "paragraph_support_idx": 0},
                                      {"id": 2, "question": "When was #1 born?", "answer": "1902", "paragraph_support_idx": 1}]}
IRCOT = {"question_id": "5a", "question_text": HOTPOT["question"], "answers_objects": [{"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": ["1902"]}],
         "contexts": [{"id": str(i), "title": title, "paragraph_text": " ".join(sentences), "is_supporting": i < 2} for i, (title, sentences) in enumerate(CONTEXT)]}
EVIDENCE = {"question": HOTPOT["question"], "answer": "1902", "type": "bridge", "level": "hard",
            "evidence": ["Tern (boat) | It was built by Ada Lund in Sandvik.", "Ada Lund | Ada Lund (born 1902) was a boat builder from Norhavn."]}
UNTITLED = EVIDENCE | {"evidence": [text.split(" | ")[1] for text in EVIDENCE["evidence"]]}


def write(folder: Path, name: str, records: list, lines: bool = False, packed: bool = False) -> Path:
    "A file of records, in a folder that names the set."
    path = folder/name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(map(json.dumps, records)) + "\n" if lines else json.dumps(records)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def made_up(n: int, n_distractors: int = 9, chain: bool = False) -> list[MultihopQuestion]:
    "Questions about ports that share distractors with their neighbours and evidence with none."
    def passage(kind: str, i: int) -> Passage:
        return Passage(f"{kind} {i}", (f"The {kind} number {i} lies in the district of D{i} in the north.", f"People of {kind} {i} are fond of soup number {i}."))

    found = []
    for i in range(n):
        others = [passage(kind, (i + j) % n) for j in range(1, n_distractors) for kind in ("port", "town")][:n_distractors]
        found.append(MultihopQuestion(f"hotpotqa/{i}", "hotpotqa", f"Which district is port {i} in?", f"D{i}", (passage("port", i), passage("town", i), *others),
                                      ((0, i % 2), (1, 0)), (f"port {i}, town: town {i}", f"town {i}, district: D{i}") if chain else (), 2, "made.json"))
    return found


def check_sample(each: LocatingSample) -> None:
    "What must hold of every sample."
    shown = range(1, len(each.segments) + 1)
    read = parse_reply(each.target, shown)
    assert (read.ids, read.repaired, read.out_of_range) == (each.gold, (), ())
    assert read.status == ("ok" if each.gold else "no ids") and read.reason == each.reason
    cited = parse_citations(each.reason, shown)
    assert set(cited.ids) == set(each.gold) <= set(shown) and not cited.out_of_range
    assert len(set(each.gold)) == len(each.gold) and all(text.strip() for text in each.segments)
    assert each.gold or read.answer == "unknown"
    system, user = each.messages
    assert system == {"role": "system", "content": EXTRACT_RULES} and user["role"] == "user"
    assert all(user["content"].count(f"[{number}]") == 2 for number in shown) and f"[{len(shown) + 1}]" not in user["content"]


class TestLayouts:
    @pytest.mark.parametrize("name, record, lines, packed", [
        ("hotpotqa/hotpot_train_v1.1.json", HOTPOT, False, False), ("hotpotqa/dev.jsonl.gz", HOTPOT, True, True),
        ("2wikimultihopqa/train.json", WIKI, False, False), ("musique/musique_ans_v1.0_dev.jsonl", MUSIQUE, True, False),
        ("hotpotqa/dev_subsampled.jsonl", IRCOT, True, False), ("hotpotqa/evidence.json", EVIDENCE, False, False),
        ("hotpotqa/untitled.jsonl", UNTITLED, True, False)])
    def test_every_layout_gives_the_same_evidence(self, tmp_path, name, record, lines, packed):
        (question,), lint = load_multihop(write(tmp_path, name, [record], lines, packed))
        assert question.source == name.split("/")[0] and question.n_hops == 2 and question.answer == "1902" and lint.height == 0
        texts = [" ".join(question.passages[passage].sentences[i] for i in sentences) for passage, sentences in gold_places(question)]
        assert texts == ["It was built by Ada Lund in Sandvik.", "Ada Lund (born 1902) was a boat builder from Norhavn."]

    def test_columns_of_a_parquet_copy_are_pairs(self, tmp_path):
        context = {"title": [title for title, _ in CONTEXT], "sentences": [sentences for _, sentences in CONTEXT]}
        facts = {"title": ["Tern (boat)", "Ada Lund"], "sent_id": [1, 0]}
        record = {key: value for key, value in HOTPOT.items() if key != "_id"} | {"id": "5a", "context": context, "supporting_facts": facts}
        (tmp_path/"hotpotqa").mkdir()
        pl.DataFrame([record]).write_parquet(tmp_path/"hotpotqa/train.parquet")
        (question,), _ = load_multihop(tmp_path)
        (plain,), _ = load_multihop(write(tmp_path, "hotpotqa/plain.json", [HOTPOT]))
        assert replace(question, file=plain.file) == plain

    def test_steps_become_statements(self, tmp_path):
        (question,), _ = load_multihop(write(tmp_path, "m.jsonl", [MUSIQUE], lines=True))
        assert question.chain == ("Tern, builder: Ada Lund", "When was Ada Lund born: 1902")
        (question,), _ = load_multihop(write(tmp_path, "w.json", [WIKI]))
        assert question.chain == ("Tern, builder: Ada Lund", "Ada Lund, date of birth: 1902")

    def test_repeats_are_found_across_files_and_the_fuller_copy_stays(self, tmp_path):
        other = EVIDENCE | {"question": "  when was the builder of the 'Tern' born"}
        write(tmp_path, "hotpotqa/a.json", [other])
        write(tmp_path, "hotpotqa/b.jsonl", [IRCOT], lines=True)
        write(tmp_path, "musique/c.jsonl", [MUSIQUE], lines=True)
        questions, lint = load_multihop(tmp_path)
        assert [(q.source, q.file) for q in questions] == [("hotpotqa", "b.jsonl"), ("musique", "c.jsonl")]
        assert questions[0].gold == ((0, 1), (1, 0))  # marks of the evidence file
        assert lint["rule"].to_list() == ["repeated question"] and "a.json left out" in lint["detail"][0]

    def test_irregular_records_are_repaired_or_set_aside_and_listed(self, tmp_path):
        records = [HOTPOT | {"_id": "a", "question": "a?", "supporting_facts": [["Tern (boat)", 9], ["Ada Lund", 0]]},
                   HOTPOT | {"_id": "b", "question": "b?", "supporting_facts": [["Tern (boat)", 9], ["Tern (boat)", 0], ["Ada Lund", 0]]},
                   HOTPOT | {"_id": "c", "question": "c?", "supporting_facts": [["Nowhere", 0]]},
                   HOTPOT | {"_id": "d", "question": "d?", "context": []},
                   HOTPOT | {"_id": "e", "question": "e?", "context": [*CONTEXT, CONTEXT[3]]}]
        questions, lint = load_multihop([write(tmp_path, "hotpotqa/x.json", records), write(tmp_path, "m.jsonl", [MUSIQUE | {"answerable": False}], lines=True)])
        assert {q.question: q.gold for q in questions} == {"a?": ((0, None), (1, 0)), "b?": ((0, 0), (1, 0)), "e?": ((0, 1), (1, 0))}
        assert sorted(lint.select("record", "rule").iter_rows()) == [
            ("2hop__1_2", "not answerable"), ("a", "no such sentence"), ("b", "no such sentence"), ("c", "supporting passage missing"),
            ("d", "no context"), ("e", "repeated passage")]

    @pytest.mark.parametrize("record, message", [
        ({"_id": "t", "question": "?", "context": []}, "record 0 has .*without labels"), ({"question": 3}, "without labels"),
        (HOTPOT | {"answer": None}, r"\[0\].*answer"), (MUSIQUE | {"paragraphs": [{"title": "x"}]}, "paragraph_text"), ("text", "record 0 has str")])
    def test_what_cannot_be_read_is_refused_by_name(self, tmp_path, record, message):
        with pytest.raises(ValueError, match=f"(?s)x.json.*{message}"):
            load_multihop(write(tmp_path, "hotpotqa/x.json", [record]))

    def test_a_set_that_nobody_names_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="do not say which set"):
            load_multihop(write(tmp_path, "x.json", [EVIDENCE]))
        with pytest.raises(FileNotFoundError, match="no such file"):
            load_multihop(tmp_path/"missing")
        (tmp_path/"empty").mkdir()
        with pytest.raises(FileNotFoundError, match="no JSON"):
            load_multihop(tmp_path/"empty")

    def test_pools_are_read_in_both_layouts_and_once(self, tmp_path):
        write(tmp_path, "a.json", [{"title": "Grip", "text": "Grip is an island.  It is small."}, {"title": "Grip", "text": "Grip is an island.  It is small."}])
        (tmp_path/"b.json").write_text(json.dumps({"Kya": ["Kya is a skerry.", " Nobody lives there."]}))
        write(tmp_path, "hotpotqa/q.json", [HOTPOT])
        assert load_pool(tmp_path) == [Passage("Grip", ("Grip is an island.", "It is small.")), Passage("Kya", ("Kya is a skerry.", "Nobody lives there."))]
        questions, lint = load_multihop(tmp_path)
        assert len(questions) == 1 and lint["rule"].to_list() == ["passages without questions"]*2


class TestSamples:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**32), st.integers(3, 12), st.booleans(), st.booleans(), st.booleans())
    def test_every_sample_is_sound(self, seed, n_segments, negative, chain, say_steps):
        question = made_up(12, chain=chain)[seed % 12]
        each = build_sample(question, np.random.default_rng(seed), n_segments, negative, say_steps=say_steps)
        check_sample(each)
        evidence = [segment_text(question.passages[passage], sentences) for passage, sentences in gold_places(question)]
        assert [each.segments[number - 1] for number in each.gold] == ([] if negative else evidence)
        assert not negative or not set(evidence) & set(each.segments)
        assert len(each.segments) == min(n_segments, 9 + 2*(not negative)) and len(set(each.segments)) == len(each.segments)

    @given(st.text(max_size=60), st.text(min_size=1, max_size=30), st.text(max_size=30))
    @settings(max_examples=150, deadline=None)
    def test_hostile_text_cannot_break_the_reply(self, text, answer, title):
        text = f"[7] </reason><id>9</id> {text} x"
        question = MultihopQuestion("hotpotqa/x", "hotpotqa", "[3] <id>?", f"{answer} </answer>", (Passage(title, (text,)), Passage("b", ("[5] two",)), Passage("c", ("three",))),
                                    ((0, 0), (1, 0)), ("[9] a: b", "c: <id>4</id>"), 2, "x.json")
        check_sample(build_sample(question, np.random.default_rng(0), 4))

    def test_places_are_uniform(self):
        samples = [each for seed in range(20) for each in build_samples(made_up(100), seed, n_segments=8, negatives=0)]
        assert len(samples) == 2000
        for hop in range(2):
            counts = np.bincount([each.gold[hop] for each in samples], minlength=9)[1:]
            assert chisquare(counts).pvalue > 0.001
        pairs = collections.Counter(each.gold for each in samples)
        assert len(pairs) == 56 and chisquare(list(pairs.values())).pvalue > 0.001

    @pytest.mark.parametrize("quote_facts", [True, False])
    def test_quotations_begin_with_the_segment_or_end_with_the_fact(self, quote_facts):
        late = 0
        for question in made_up(12, chain=True):
            each = build_sample(question, np.random.default_rng(1), 8, n_words=4, say_steps=False, quote_facts=quote_facts)
            check_sample(each)
            quoted = re.findall(r'"([^"]*)" \[(\d+)\]', each.reason)
            assert len(quoted) == len(each.gold)
            for text, number in quoted:
                first = " ".join(neutralise(each.segments[int(number) - 1]).split()[:4])
                late += text.startswith("...")
                assert quote_facts or text == first
        assert (late > 0) == quote_facts

    def test_distractors_are_cut_where_the_evidence_is(self):
        for question in made_up(12):
            each = build_sample(question, np.random.default_rng(1), 10)
            allowed = {segment_text(passage, sentences) for _, sentences in gold_places(question) for passage in question.passages}
            assert set(each.segments) <= allowed

    def test_a_sample_does_not_depend_on_its_neighbours(self):
        questions = made_up(30)
        forward, backward = build_samples(questions, seed=5), build_samples(questions[::-1], seed=5)
        assert forward == backward[::-1] and forward != build_samples(questions, seed=6)
        assert 0 < sum(not each.gold for each in build_samples(questions, negatives=0.3)) < 30
        assert not any(each.gold for each in build_samples(questions, negatives=1.0))

    def test_a_pool_fills_up_and_never_gives_the_evidence_back(self):
        questions = made_up(12, n_distractors=1)
        pool = DistractorPool([passage for question in questions for passage in question.passages])
        for question in questions:
            each = build_sample(question, np.random.default_rng(3), 8, pool=pool)
            evidence = {question.passages[i].title for i in question.gold_passages}
            assert len(each.segments) == 8 and sum(text.split(":")[0] in evidence for text in each.segments) == 2
        with pytest.raises(ValueError, match="give a pool"):
            build_sample(made_up(3, n_distractors=0)[0], np.random.default_rng(0))

    def test_a_distractor_that_repeats_the_evidence_is_left_out(self):
        question = made_up(12)[0]
        copy = Passage("another title", question.passages[0].sentences)
        each = build_sample(replace(question, passages=(*question.passages, copy)), np.random.default_rng(0), 12)
        assert not any(text.startswith("another title") for text in each.segments)

    def test_untitled_evidence_stands_among_untitled_distractors(self):
        question = made_up(12)[0]
        bare = replace(question, passages=tuple(replace(passage, title="") if i in question.gold_passages else passage for i, passage in enumerate(question.passages)))
        each = build_sample(bare, np.random.default_rng(0), 8)
        assert len(each.gold) == 2 and not any(":" in text for text in each.segments)
        assert all(":" in text for text in build_sample(question, np.random.default_rng(0), 8).segments)

    def test_a_passage_is_shown_once_and_no_negative_states_the_answer(self):
        question = made_up(12, n_distractors=1)[0]
        twice = Passage("Soup", ("Soup is eaten in the north of the country.",))
        telling = Passage("Ferry", ("A ferry goes from the port to D0 twice a day.",))
        pool = DistractorPool([twice, replace(twice, title="soup"), telling, Passage("Bread", ("Bread is eaten in the north of the country too.",))])
        shown = build_sample(question, np.random.default_rng(0), 9, pool=pool).segments
        assert sum("Soup is eaten" in text for text in shown) == 1 and any("ferry" in text for text in shown)
        for seed in range(20):
            negative = build_sample(question, np.random.default_rng(seed), 9, negative=True, pool=pool)
            assert not any("D0" in text for text in negative.segments)

    @given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=20), st.sampled_from("abcdefgx"), st.integers(1, 8))
    def test_quotations_are_short_literal_and_hold_the_fact(self, words, fact, n_words):
        said = quote(" ".join(words), fact, n_words).removeprefix("... ")
        assert said in " ".join(words) and len(said.split()) <= n_words and (fact in said or fact not in words)


class TestOddFiles:
    def read(self, tmp_path, *records, name="hotpotqa/odd.json"):
        return load_multihop(write(tmp_path, name, list(records)))

    @pytest.mark.parametrize(("change", "rule"), [
        ({"supporting_facts": []}, "no evidence"), ({"answer": " "}, "no answer"), ({"question": ""}, "no question"),
        ({"context": [["Tern (boat)", []], *CONTEXT[1:]]}, "no evidence"),
        ({"context": CONTEXT[1:]}, "supporting passage missing"),
        ({"context": [*CONTEXT, ["Tern (boat)", ["Another boat of that name.", "It was built by nobody."]]]}, "supporting passage ambiguous")])
    def test_what_cannot_be_used_is_set_aside_and_said(self, tmp_path, change, rule):
        (kept,), lint = self.read(tmp_path, HOTPOT | change | {"_id": "odd"}, HOTPOT | {"question": "Another question?"})
        assert kept.question == "Another question?"
        assert (rule in lint.filter(pl.col("action") == "set aside")["rule"].to_list())

    def test_of_two_passages_with_one_title_the_one_with_the_sentence_is_meant(self, tmp_path):
        context = [["Tern (boat)", ["A stub."]], *CONTEXT]
        (question,), lint = self.read(tmp_path, HOTPOT | {"context": context})
        assert segment_text(question.passages[question.gold[0][0]], (question.gold[0][1],)).endswith("built by Ada Lund in Sandvik.") and lint.height == 0

    def test_the_same_id_in_two_files_means_two_questions(self, tmp_path):
        write(tmp_path, "hotpotqa/a.json", [HOTPOT])
        write(tmp_path, "hotpotqa/b.json", [HOTPOT | {"question": "Another question?"}])
        questions, lint = load_multihop(tmp_path)
        assert len({question.question_id for question in questions}) == 2 and lint["rule"].to_list() == ["id of another question"]

    def test_a_file_of_passages_and_questions_gives_both(self, tmp_path):
        path = write(tmp_path, "hotpotqa/mixed.JSON", [{"title": "Tern", "text": "A sea bird of the north."}, HOTPOT])
        questions, lint = load_multihop(tmp_path)
        assert len(questions) == 1 and lint["rule"].to_list() == ["passages without questions"]
        assert [passage.title for passage in load_pool(path)] == ["Tern"]
        with pytest.raises(ValueError, match="text"):
            load_pool(write(tmp_path, "pool.json", [{"title": "Tern", "text": None}]))

    def test_an_empty_file_is_noted_and_a_strange_one_refused(self, tmp_path):
        write(tmp_path, "hotpotqa/a.json", [HOTPOT])
        write(tmp_path, "hotpotqa/empty.json", [])
        assert load_multihop(tmp_path)[1]["rule"].to_list() == ["no records"]
        (tmp_path/"hotpotqa/data.json").write_text('{"data": []}')
        with pytest.raises(ValueError, match="data.json: record 0"):
            load_multihop(tmp_path)
        with pytest.raises(ValueError, match="supporting_facts"):
            self.read(tmp_path/"other", HOTPOT | {"supporting_facts": {"title": None, "sent_id": None}})

    def test_a_folder_that_names_the_set_is_believed(self, tmp_path):
        (question,), _ = self.read(tmp_path, HOTPOT | {"_id": 7}, name="2wikimultihopqa/train.json")
        assert (question.source, question.question_id) == ("2wikimultihopqa", "2wikimultihopqa/7")

    def test_dates_and_the_first_of_several_answers(self, tmp_path):
        dated = IRCOT | {"answers_objects": [{"number": "", "date": {"day": "3", "month": "May", "year": "1902"}, "spans": []}, {"spans": ["x"]}]}
        (question,), _ = self.read(tmp_path, dated)
        assert question.answer == "3 May 1902"

    def test_an_answer_with_a_colon_is_found_whole(self, tmp_path):
        context = [["Ada Lund", ["Ada Lund wrote it.", "It is called Covenant.", "Its name on the cover is Alien: Covenant."]], *CONTEXT[2:], ["Tern (boat)", ["Built by Ada Lund."]]]
        steps = [{"id": 1, "question": "Tern >> builder", "answer": "Ada Lund", "paragraph_support_idx": 3},
                 {"id": 2, "question": "#1 >> work", "answer": "Alien: Covenant", "paragraph_support_idx": 0}]
        paragraphs = [{"idx": i, "title": title, "paragraph_text": "  ".join(texts), "is_supporting": i in (0, 3)} for i, (title, texts) in enumerate(context)]
        (question,), _ = self.read(tmp_path, MUSIQUE | {"answer": "Alien: Covenant", "paragraphs": paragraphs, "question_decomposition": steps}, name="m.json")
        assert "Alien: Covenant" in segment_text(question.passages[0], dict(gold_places(question))[0])
        assert "Alien: Covenant" in build_sample(question, np.random.default_rng(0), 4).reason


class TestSplits:
    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 1000), st.integers(1, 10), st.integers(1, 10))
    def test_no_question_and_no_passage_is_shared(self, seed, dev, test):
        questions = made_up(40)
        splits = split_questions(questions, dev, test, seed)
        assert (len(splits.dev), len(splits.test)) == (dev, test)
        ids = [question.question_id for part in splits for question in part]
        assert sorted(ids) == sorted(question.question_id for question in questions)
        for one, other in itertools.combinations(splits, 2):
            assert not all_keys(one) & all_keys(other)
        kept = {question.question_id: question for part in splits for question in part}
        for question in questions:
            assert gold_places(kept[question.question_id])[0][1] == gold_places(question)[0][1] and gold_keys(kept[question.question_id]) == gold_keys(question)

    def test_questions_about_one_passage_stay_together(self):
        questions = made_up(20)
        shared = [replace(question, passages=(questions[0].passages[0], *question.passages[1:])) for question in questions[:6]] + questions[6:]
        for seed in range(10):
            splits = split_questions(shared, 3, 3, seed)
            assert {question.question_id for question in shared[:6]} <= {question.question_id for question in splits.train}

    def test_untitled_evidence_is_the_same_passage(self):
        whole = Passage("Ada Lund", ("Ada Lund was a boat builder.", "She lived in the old town of Norhavn."))
        assert passage_keys(whole) & passage_keys(Passage("", ("she lived in the old town of Norhavn",)))
        assert not passage_keys(whole) & passage_keys(Passage("", ("She lived.",)))

    @given(st.lists(st.frozensets(st.sampled_from("abcdefgh"), min_size=1, max_size=3), min_size=1, max_size=12))
    def test_components_are_those_of_merging_by_hand(self, keys):
        part = components(keys)
        merged = [{i} for i in range(len(keys))]
        for i, j in itertools.combinations(range(len(keys)), 2):
            if keys[i] & keys[j]:
                one, other = (next(group for group in merged if k in group) for k in (i, j))
                if one is not other:
                    merged.remove(other)
                    one |= other
        assert {frozenset(np.flatnonzero(part == p).tolist()) for p in set(part.tolist())} == set(map(frozenset, merged))

    def test_pools_share_nothing(self):
        splits = split_questions(made_up(30), 6, 6)
        extra = [Passage(f"extra {i}", (f"This is the passage number {i} of no question at all.",)) for i in range(60)]
        pools = pools_of(splits, [*extra, *(passage for question in splits.test for passage in question.passages)])
        keys = [frozenset().union(*pool.keys) for pool in pools]
        for i, j in itertools.permutations(range(3), 2):
            assert not keys[i] & keys[j] and not keys[i] & all_keys(splits[j])
        assert sum(len(set(extra) & set(pool.passages)) for pool in pools) == 60 and all(set(extra) & set(pool.passages) for pool in pools)

    def test_selection_takes_rare_strata_whole(self):
        questions = [replace(question, n_hops=4 if i < 5 else 3 if i < 25 else 2) for i, question in enumerate(made_up(200))]
        chosen = select(questions, 90)
        assert collections.Counter(question.n_hops for question in chosen) == {2: 65, 3: 20, 4: 5} and len({question.question_id for question in chosen}) == 90
        assert collections.Counter(question.n_hops for question in select(questions, 30)) == {2: 13, 3: 12, 4: 5}
        assert chosen == select(questions, 90) and chosen != select(questions, 90, seed=1)
        assert len(select(questions, 999, hops=(3, 4))) == 25


class TestDialogue:
    @pytest.fixture(scope="class")
    def made(self):
        return dialogue_samples(sample(), negatives=2)

    def test_every_sample_is_sound(self, made):
        for each in made:
            check_sample(each)
        assert len({each.sample_id for each in made}) == len(made) and any(len(each.gold) > 1 for each in made)

    def test_no_test_conversation_is_used(self, made):
        held_out = set(sample().conversations.filter(pl.col("split") != "train")["conversation_id"])
        assert not {each.sample_id.split("/")[0] for each in made} & held_out
        said = set(sample().turns.filter(pl.col("conversation_id").is_in(held_out))["text"])
        assert not any(text.split(": ", 1)[1] in said for each in made for text in each.segments if len(text) > 60)
        with pytest.raises(ValueError, match="cannot be trained on"):
            dialogue_samples(sample(), split="test")
        relabelled = replace(sample(), conversations=sample().conversations.with_columns(split=pl.lit("test")))
        with pytest.raises(ValueError, match="cannot be trained on"):
            dialogue_samples(relabelled)

    def test_evidence_is_the_marked_turns(self, made):
        gold = {row["question_id"]: row for row in sample().gold.iter_rows(named=True)}
        texts = {row["turn_id"]: row["text"] for row in sample().turns.iter_rows(named=True)}
        for each in made:
            question, session = each.sample_id.split("@")
            marked = [turn for turn in gold[question]["evidence_turns"] if turn.startswith(session + "/")]
            assert len(each.gold) == len(marked)
            assert all(any(texts[turn].strip() in each.segments[number - 1] for turn in marked) for number in each.gold)
            assert each.answer == "unknown" or len(marked) == len(gold[question]["evidence_turns"])

    def test_a_session_whose_evidence_is_not_marked_is_no_negative(self):
        bare = replace(sample(), gold=sample().gold.with_columns(evidence_turns=pl.lit([], pl.List(pl.String))))
        evidence = {row["question_id"]: set(row["evidence_sessions"]) for row in sample().gold.iter_rows(named=True)}
        made = dialogue_samples(bare, negatives=1)
        assert made and not any(each.sample_id.split("@")[1] in evidence[each.sample_id.split("@")[0]] for each in made)

    @given(st.integers(1, 40), st.data(), st.integers(1, 12), st.integers(0, 99))
    def test_windows_hold_the_evidence(self, n_turns, data, n_segments, seed):
        gold = data.draw(st.lists(st.integers(0, n_turns - 1), max_size=3))
        shown = window(n_turns, gold, n_segments, np.random.default_rng(seed))
        assert set(gold) <= set(shown) <= set(range(n_turns)) and len(shown) >= min(n_segments, n_turns)
        assert len(shown) == min(n_turns, max(n_segments, max(gold, default=0) - min(gold, default=0) + 1))


@needs_real
class TestRealFiles:
    @pytest.fixture(scope="class")
    def loaded(self):
        return load_multihop(REAL)

    @pytest.fixture(scope="class")
    def splits(self, loaded):
        return split_questions([question for question in loaded[0] if question.distractors])

    def test_counts(self, loaded):
        questions, lint = loaded
        per_file = collections.Counter(question.file for question in questions)
        assert per_file == {
            "2wiki_200_migres.jsonl.gz": 164, "2wiki_train500_migres.json.gz": 500, "hotpotqa_200_migres.jsonl.gz": 200,
            "hotpotqa_dev_subsampled_ircot.jsonl.gz": 485, "hotpotqa_train100_hipporag.json.gz": 100, "hotpotqa_test1000_evidence_ecm.json.gz": 927,
            "hotpotqa_train500_evidence_ecm.jsonl.gz": 500, "musique_200_migres.jsonl.gz": 200, "musique_train100_hipporag.json.gz": 100}
        hops = collections.Counter((question.source, question.n_hops) for question in questions)
        assert hops == {("hotpotqa", 2): 785 + 1427, ("musique", 2): 213, ("musique", 3): 59, ("musique", 4): 28,
                        ("2wikimultihopqa", 2): 529, ("2wikimultihopqa", 4): 135}
        assert len({question.question_id for question in questions}) == len(questions)
        rules = dict(lint.group_by("rule").len().iter_rows())
        assert rules == {"repeated question": 88, "no context": 36, "no such sentence": 6, "repeated passage": 29, "passages without questions": 3}
        assert sum(len(question.passages) < 10 for question in questions if question.source == "hotpotqa" and "ecm" not in question.file) == 13

    def test_telling_sentences_are_mostly_those_that_people_marked(self, loaded):
        marked = [question for question in loaded[0] if question.source == "hotpotqa" and question.distractors and "ircot" not in question.file]
        hits = []
        for question in marked:
            blind = replace(question, gold=tuple((passage, None) for passage in question.gold_passages))
            hits += [bool(set(found) & set(true)) for (_, found), (_, true) in zip(gold_places(blind), gold_places(question), strict=True)]
        assert len(hits) == 598 and np.mean(hits) > 0.9

    def test_the_pool(self):
        assert len(load_pool(REAL/"2wikimultihopqa")) > 6000

    def test_splits_share_nothing(self, splits):
        assert [len(part) for part in splits[1:]] == [200, 200] and len(splits.train) > 1300
        for one, other in itertools.combinations(splits, 2):
            assert not all_keys(one) & all_keys(other)
            assert not {(q.source, q.question.casefold()) for q in one} & {(q.source, q.question.casefold()) for q in other}

    def test_samples(self, splits):
        questions = select(splits.train, 1200)
        assert len(questions) >= 1150 and {question.n_hops for question in questions} == {2, 3, 4}
        pools = pools_of(splits)
        titles = {passage.title for part in splits for question in part for passage in question.passages if passage.title}
        samples = build_samples(questions, n_segments=8, pool=pools.train)
        held_out = build_samples(select(splits.test, 200), n_segments=8, pool=pools.test)
        for each in [*samples, *held_out]:
            check_sample(each)
            assert 7 <= len(each.segments) == len(set(each.segments)) and len(each.gold) in (0, each.n_hops)
            titled = [text.startswith(tuple(f"{title}:" for title in titles)) for text in each.segments]
            assert len(set(titled)) == 1  # a title is no sign of evidence
        assert np.mean([len(each.segments) == 8 for each in samples]) > 0.99
        assert not frozenset().union(*(each.keys for each in samples)) & frozenset().union(*(each.keys for each in held_out))
        places = np.bincount([number for each in samples for number in each.gold], minlength=9)[1:]
        assert chisquare(places).pvalue > 0.001
        words = [[len(text.split()) for each in samples for i, text in enumerate(each.segments, 1) if (i in each.gold) == wanted] for wanted in (True, False)]
        assert abs(np.mean(words[0]) - np.mean(words[1])) < 3  # length is no sign of evidence
