"""The generated notes: one answer each, read back from their sentences alone; splits, shares, hints, lessons."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from memloc.hints import HINT_RULES, leak_of, split_hint
from memloc.ids import parse_reply
from memloc.lexical import terms
from memloc.llm import LocalModel
from memloc.multihop import UNKNOWN
from memloc.notes import (
    DAYS,
    NOTE_HINTS,
    POOLS,
    QUOTED,
    RELATIONS,
    SPLITS,
    NotesTask,
    note_hint,
    note_lessons,
    note_samples,
    words_of,
)
from memloc.sft import lexical_rows, sample_tokens, score_means

NAME = "[A-Za-z]+"


def patterns(wordings, person=NAME):
    "Wordings of each relation as patterns."
    parts = {"{person}": f"(?P<person>{person})", "{object}": f"(?P<object>{NAME})", "{value}": f"(?P<value>{NAME})"}
    return [(name, re.compile("".join(parts.get(part) or re.escape(part) for part in re.split(r"(\{\w+\})", text))))
            for name, relation in RELATIONS.items() for text in getattr(relation, wordings)]


NOTES, QUESTIONS, BRIDGED = patterns("notes"), patterns("questions", f"{NAME}|the person .+"), patterns("bridges")


def read(text, known):
    "The only way to read a text: relation, person, object, value."
    (found,) = [(name, match.groupdict(default="")) for name, pattern in known if (match := pattern.fullmatch(text))]
    return (found[0], *(found[1].get(part, "") for part in ("person", "object", "value")))


def solve(sample):
    "All chains that answer the question, read from the sentences only: numbers and answer of each, and of how many hops it is."
    facts = [read(text, NOTES) for text in sample.segments]
    last, person, thing, _ = read(sample.question, QUESTIONS)
    starts = [((), person)]
    if person.startswith("the person "):
        first, asked, about, _ = read(person, BRIDGED)
        starts = [((number,), fact[3]) for number, fact in enumerate(facts, start=1) if fact[:3] == (first, asked, about)]
    chains = [((*numbers, number), fact[3]) for numbers, person in starts for number, fact in enumerate(facts, start=1) if fact[:3] == (last, person, thing)]
    return chains, starts if person.startswith("the person ") else [], 1 + person.startswith("the person ")


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**6), low=st.integers(3, 12), more=st.integers(0, 4), two_hop=st.floats(0, 1), negatives=st.floats(0, 1),
       split=st.sampled_from(SPLITS))
def test_a_solver_that_reads_only_the_sentences_finds_the_gold_and_nothing_else(seed, low, more, two_hop, negatives, split):
    (sample,) = note_samples(NotesTask((low, min(12, low + more)), two_hop, negatives), 1, seed, split)
    chains, starts, n_hops = solve(sample)
    assert chains == ([(sample.gold, sample.answer)] if sample.gold else [])
    assert len(starts) == (n_hops == 2 and bool(sample.gold))  # without evidence not even half of a chain is shown
    assert (n_hops, sample.gold == ()) == (sample.n_hops, sample.answer == UNKNOWN)
    assert low <= len(sample.segments) <= min(12, low + more) and len(set(sample.segments)) == len(sample.segments)
    parsed = parse_reply(sample.target, range(1, len(sample.segments) + 1))
    assert (parsed.ids, parsed.answer, parsed.repaired, parsed.status) == (sample.gold, sample.answer, (), "ok" if sample.gold else "no ids")
    assert all(f'"{" ".join(sample.segments[number - 1].split()[:QUOTED])}" [{number}]' in sample.reason for number in sample.gold)
    assert all(8 <= len(text.split()) <= 14 for text in sample.segments)


def test_the_solver_sees_a_second_answer_and_a_missing_one():
    sample = next(each for each in note_samples(NotesTask(negatives=0), 50) if each.n_hops == 2)
    last, person, thing, _ = read(sample.segments[sample.gold[1] - 1], NOTES)
    spare = next(number for number in range(1, 9) if number not in sample.gold)
    for place, fact in ((spare, (person, thing, "elsewhere")), (sample.gold[1], ("Nobody", thing, "elsewhere"))):
        text = RELATIONS[last].notes[0].format(person=fact[0], object=fact[1], value=fact[2])
        changed = replace(sample, segments=tuple(text if number == place else old for number, old in enumerate(sample.segments, start=1)))
        assert solve(changed)[0] != [(sample.gold, sample.answer)]


def test_a_sample_does_not_depend_on_how_many_are_drawn_and_depends_on_the_seed():
    task = NotesTask()
    assert note_samples(task, 3, 7, "dev") == note_samples(task, 20, 7, "dev")[:3]
    assert len({sample.sample_id for seed in (1, 2) for sample in note_samples(task, 300, seed)}) == 600


def test_splits_share_no_name_no_key_and_no_note():
    shown = {split: [sample for seed in (1, 2) for sample in note_samples(NotesTask(), 200, seed, split)] for split in SPLITS}
    for one, two in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert not any(set(words_of(kind, one)) & set(words_of(kind, two)) for kind in POOLS)
        for parts in (lambda sample: sample.keys, lambda sample: sample.segments):
            a, b = ({each for sample in shown[split] for each in parts(sample)} for split in (one, two))
            assert a and b and not a & b
    sample = shown["test"][0]
    names = {word for text in (*sample.segments, sample.question) for word in re.findall(NAME, text) if any(word in pool.split() for pool in POOLS.values())}
    assert {f"name:{word}" for word in names} <= sample.keys


def test_every_word_of_a_pool_is_there_once_and_counts_for_word_matching():
    words = [word for pool in POOLS.values() for word in pool.split()]
    assert len(set(words)) == len(words) and all(len(found) == 1 for found in terms(words))
    assert all(len(words_of(kind, split)) >= 4 for kind in POOLS for split in SPLITS)


@pytest.mark.parametrize("split", SPLITS)
def test_evidence_and_its_look_alikes_stand_at_every_number_equally_often(split):
    samples = note_samples(NotesTask(negatives=0), 1200, split=split)
    for numbers in ([sample.gold[0] for sample in samples if sample.n_hops == 1], [sample.gold[0] for sample in samples if sample.n_hops == 2],
                    [sample.gold[1] for sample in samples if sample.n_hops == 2]):
        assert chisquare(np.bincount(numbers, minlength=9)[1:]).pvalue > 0.001
    gaps = Counter(sample.gold[1] > sample.gold[0] for sample in samples if sample.n_hops == 2)
    assert chisquare(list(gaps.values())).pvalue > 0.001  # the chain runs forwards as often as backwards


def test_shares_are_kept_and_all_relations_and_wordings_occur():
    samples = note_samples(NotesTask(two_hop=0.4, negatives=0.1), 2000)
    assert abs(np.mean([sample.n_hops == 2 for sample in samples]) - 0.4) < 0.03
    assert abs(np.mean([not sample.gold for sample in samples]) - 0.1) < 0.02
    texts = [text for sample in samples for text in sample.segments]
    for known, shown in ((NOTES, texts), (QUESTIONS, [sample.question for sample in samples])):
        counts = Counter(place for text in shown for place, (_, pattern) in enumerate(known) if pattern.fullmatch(text))
        assert len(counts) == len(known) == 16 and min(counts.values()) > 0.3*max(counts.values())
    bridges = Counter(place for sample in samples if sample.n_hops == 2 for place, (_, pattern) in enumerate(BRIDGED) if pattern.search(sample.question))
    assert len(bridges) == len(BRIDGED) == 6


def test_a_right_answer_stands_in_one_note_only_and_quotations_tell_notes_apart():
    for sample in note_samples(NotesTask(negatives=0), 500, split="dev"):
        values = [read(text, NOTES)[3] for text in sample.segments]
        assert values.count(sample.answer) == 1 or sample.answer in POOLS["person"].split()
    starts = [{" ".join(text.split()[:QUOTED]) for text in sample.segments} for split in SPLITS for sample in note_samples(NotesTask(), 300, split=split)]
    assert np.mean([len(found) < 8 for found in starts]) == 0


def test_distractors_have_each_part_of_the_evidence():
    seen = Counter()
    for sample in note_samples(NotesTask(negatives=0), 400):
        facts = [read(text, NOTES) for text in sample.segments]
        relation, person, thing, _ = facts[sample.gold[-1] - 1]
        others = [fact for number, fact in enumerate(facts, start=1) if number not in sample.gold]
        seen["relation"] += any(fact[0] == relation for fact in others)
        seen["person"] += any(person == fact[1] for fact in others)
        seen["thing"] += any(thing in fact for fact in others)
        seen["as value"] += any(fact[3] == read(sample.question, QUESTIONS)[1] for fact in others) or sample.n_hops == 2
    assert seen["relation"] == seen["thing"] == seen["as value"] == 400 and seen["person"] > 380


def test_matching_words_does_not_solve_it():
    samples = note_samples(NotesTask(), 300, split="test")
    for k, bar in ((1, 0.45), (2, 0.2)):
        assert score_means(lexical_rows(samples, k))["exact"][0] < bar


@pytest.mark.parametrize("split", SPLITS)
def test_hints_fit_and_tell_nothing(split):
    samples = note_samples(NotesTask(), 300, split=split)
    assert {leak_of(note_hint(sample), sample) for sample in samples} == {None}
    assert {note_hint(sample) for sample in samples} == set(NOTE_HINTS.values())
    assert all(4 <= len(hint.split()) <= 9 for hint in NOTE_HINTS.values())
    for sample in samples:
        assert (note_hint(sample) == NOTE_HINTS["none"]) == (not sample.gold)
        assert (note_hint(sample) == NOTE_HINTS["chain"]) == (len(sample.gold) == 2)


def test_lessons_are_plain_hinted_and_requests_in_their_shares():
    lessons, samples = note_lessons(1000, hinted=0.25, coached=0.15), note_samples(NotesTask(), 1000)
    kinds = Counter()
    for lesson, sample in zip(lessons, samples, strict=True):
        if lesson.messages[0]["content"].startswith(HINT_RULES):
            kinds["coached"] += 1
            assert lesson.target == note_hint(sample) and sample.question in lesson.messages[1]["content"]
            continue
        plain, hint = split_hint(lesson.messages)
        kinds["hinted" if hint else "plain"] += 1
        assert plain == sample.messages and lesson.target == sample.target and hint in ("", note_hint(sample))
    assert abs(kinds["coached"] - 150) < 40 and abs(kinds["hinted"] - 250) < 50
    assert all(lesson.messages == sample.messages for lesson, sample in zip(note_lessons(20, hinted=0, coached=0), samples))


def test_the_wrong_reply_of_a_request_has_the_form_and_other_ids():
    lessons, samples = note_lessons(200, hinted=0, coached=1), note_samples(NotesTask(), 200)
    for lesson, sample in zip(lessons, samples, strict=True):
        right, wrong = (part.translate(str.maketrans("‹›", "<>")) for part in
                        re.search(r"right:\n(.+)\n\nA reply that was wrong:\n(.+)\n\nHint:", lesson.messages[1]["content"]).groups())
        right, wrong = (parse_reply(text, range(1, 9)) for text in (right, wrong))
        assert (right.ids, wrong.status, wrong.repaired) == (sample.gold, "ok", ())
        assert set(wrong.ids) != set(sample.gold) and len(wrong.ids) == max(1, len(sample.gold)) and wrong.answer != right.answer
        assert wrong.ids[:-1] == sample.gold[:-1]


@pytest.mark.slow  # unpacks the model
def test_prompts_and_targets_are_short_for_smollm2():
    reader = LocalModel("smollm2", device="cpu")
    for split in SPLITS:
        for sample in note_samples(NotesTask(), 150, split=split):
            assert len(reader.encode(sample.messages)) <= 330
            assert len(reader.tokenizer.encode(sample.target)) <= 45
    tokens = [sample_tokens(reader, lesson) for lesson in note_lessons(100)]
    assert max(len(each.input_ids) for each in tokens) <= 512
    single = [name for name in POOLS["person"].split() if len(reader.tokenizer.encode(f" {name}")) == len(reader.tokenizer.encode(name)) == 1]
    assert len(single) == len(POOLS["person"].split())


def test_wrong_difficulties_and_splits_are_refused():
    for wrong in ({"n_segments": (2, 6)}, {"n_segments": (8, 6)}, {"n_segments": (8, 13)}, {"two_hop": 1.5}, {"negatives": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NotesTask(**wrong)
    with pytest.raises(ValueError, match="'validation'"):
        note_samples(NotesTask(), 1, split="validation")
    with pytest.raises(ValueError, match="'validation'"):
        words_of("person", "validation")
    assert words_of("day", "train") == words_of("day", "test") == list(DAYS)
