"""Hints: which replies are compared, what gives an answer away in any disguise, what general advice may say, and the slot."""

import dataclasses
import json
import random
import re
import unicodedata
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memloc.answer_metrics import ONES, ORDINALS
from memloc.hints import (
    HINT_PLACES,
    HINT_RULES,
    HINT_WORDS,
    REJECTIONS,
    SLOT,
    HintBook,
    carries,
    contrast,
    gives_answer,
    hint_line,
    hint_messages,
    leak_of,
    names_in,
    names_number,
    pieces,
    read_hint,
    spelled,
    with_hint,
    without_hint,
)
from memloc.locator import Asked, Segment, SessionBlock, extraction_messages
from memloc.multihop import UNKNOWN, LocatingSample
from memloc.rewards import Reward, reward_preset, score_reply
from memloc.toy import ToyTask, draw_sample, toy_samples

SEGMENTS = ("Per: I am back from Bergen.", "Ida: How was the harbour festival?", "Per: Wonderful, I bought a small boat there.", "Ida: You and your ideas!",
            "Per: Its name is Café Olé, after the dance.", "Ida: My own news: I quit my job on Monday.")
GENERAL_ADVICE = (
    "Check that the speaker of each part is the person that the question asks about.",
    "Compare the dates of the parts with the date in the question before choosing.",
    "First find who is asked about, then follow that name until a part answers the question.",
    "Leave out parts that only mention the same topic and do not help to answer.",
    "Read every part before you decide, since the answer may need more than a single part.",
    "Do not guess: choose a part only if its own words support your answer.",
    "When a detail changes later, prefer the latest statement about it.",
    "Work out who each pronoun refers to before you pick the evidence.",
)


def make(segments=SEGMENTS, question="What is the boat of Per called?", gold=(3, 5), answer="Café Olé"):
    return LocatingSample("c1/q1@s3", "dialogue", question, datetime(2023, 5, 8), tuple(segments), tuple(gold), answer, "", 1, frozenset())


SAMPLE = make()
TOYS = toy_samples(ToyTask(negatives=0.2), 60)
TOLD = [toy for toy in TOYS if toy.gold]

DISGUISES = {
    "plain": str, "upper": str.upper, "title": str.title,
    "accents": lambda text: "".join(unicodedata.normalize("NFC", letter + "\u0301") if letter in "aeiou" else letter for letter in text),
    "dashes": lambda text: " ".join("-".join(word) for word in text.split()), "dots": lambda text: " ".join(".".join(word) for word in text.split()),
    "spaces": lambda text: "  ".join(" ".join(word) for word in text.split()), "stars": lambda text: "".join(f"*{letter}*" for letter in text),
    "full width": lambda text: "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in text),
    "zero width": lambda text: "\u200b".join(text), "soft hyphens": lambda text: "\u00ad".join(text), "quotes": lambda text: f'"{text}"',
    "parentheses": lambda text: f"({text})", "halves": lambda text: " ".join(f"{word[:2]}-{word[2:]}" if len(word) > 3 else word for word in text.split()),
    "newline": lambda text: text.replace(" ", "\n"), "underscores": lambda text: f"_{text.replace(' ', '_')}_",
}
disguises = st.sampled_from(sorted(DISGUISES))


def reward(total: float, correct: bool) -> Reward:
    return Reward(total, 0, 0, 0, correct, 0)


class TestContrast:
    def test_the_best_right_reply_and_the_nearest_miss(self):
        rewards = [reward(0.2, False), reward(0.7, True), reward(0.5, False), reward(1.0, True), reward(1.0, True), reward(0.5, False)]
        assert contrast(list("abcdef"), rewards) == ("d", "c")

    @pytest.mark.parametrize("correct", [True, False])
    def test_a_homogeneous_group_has_nothing_to_compare(self, correct):
        rewards = [reward(total, correct) for total in (0.1, 0.9, 0.1)]
        assert contrast(list("abc"), rewards) is None
        assert contrast(list("abc"), rewards, "rewards") == ("b", "a")
        assert contrast(list("abc"), [reward(0.5, correct)]*3, "rewards") is None

    def test_naming_every_id_never_stands_for_right(self):
        texts = ["<reason>x</reason><id>1, 2, 3, 4, 5, 6</id><answer>Café Olé</answer>", "<reason>x</reason><id>2</id><answer>x</answer>"]
        scored = {mode: [score_reply(text, 6, SAMPLE.gold, SAMPLE.answer, reward_preset(mode)) for text in texts] for mode in ("paper", "memloc")}
        assert contrast(texts, scored["paper"]) == tuple(texts) and contrast(texts, scored["memloc"]) is None


class TestAsking:
    @pytest.mark.parametrize("sample", [SAMPLE, *TOYS[:5]], ids=lambda sample: sample.sample_id)
    def test_the_prompt_shows_task_and_replies_and_no_gold(self, sample):
        right, wrong = sample.target, "<reason>no idea</reason><id>1</id><answer>x</answer>"
        system, user = hint_messages(sample, right, wrong)
        assert system == {"role": "system", "content": HINT_RULES} and user["role"] == "user"
        assert sample.messages[-1]["content"] in user["content"] and user["content"].index("no idea") > user["content"].index("right")
        other = hint_messages(sample, wrong, wrong)[1]["content"]  # nothing but the right reply tells what is gold
        assert hint_messages(dataclasses.replace(sample, gold=(), answer="something else", reason=""), wrong, wrong)[1]["content"] == other
        assert hint_messages(with_hint(sample.messages, "Read on."), right, wrong) == [system, user]

    def test_replies_cannot_open_a_tag_or_a_number(self):
        content = hint_messages(SAMPLE, "</s><|im_end|><id>[3]</id>", "[1] <reason>")[1]["content"].split("A reply that was right")[1]
        assert not set("<>[]") & set(content)


class TestReading:
    @pytest.mark.parametrize("written", ["Follow the name.", "  Follow   the name. ", '"Follow the name."', "Hint: Follow the name.", "**Hint:** Follow the name.",
                                         "- Follow the name.", "1. Follow the name.", "Hint 1: Follow the name.", "Sure! Here is a hint:\n\nFollow the name.\n\nIt helps.",
                                         "<think>[3] it is</think>Follow the name.", "> *Follow the name.*", "The hint: “Follow the name.”", "\n\nHint:\nFollow the name."])
    def test_the_wrapping_comes_off(self, written):
        assert read_hint(written) == "Follow the name."

    def test_letters_are_composed(self):
        assert read_hint("Cafe\u0301 first") == "Caf\u00e9 first"

    @pytest.mark.parametrize("written", ["", "   ", "\n", "...", "Here is a hint:", "<think>never finished", "word "*(HINT_WORDS + 1), "x"*400])
    def test_nothing_and_too_much_are_no_hint(self, written):
        assert read_hint(written) is None

    @settings(max_examples=120, deadline=None)
    @given(st.text(max_size=300))
    def test_any_text_gives_one_clean_line_or_nothing(self, text):
        line = read_hint(text)
        assert line is None or (line == line.strip() and line.splitlines() == [line] and len(line.split()) <= HINT_WORDS and line == hint_line(text))
        assert (line is None) or with_hint(SAMPLE.messages, line)[0]["content"].endswith(f"{SLOT}{line}")


class TestAnswers:
    @settings(max_examples=120, deadline=None)
    @given(st.sampled_from([SAMPLE, *TOLD]), disguises, st.sampled_from(["It is {}.", "{}", "Say {} and stop.", "The answer ({}) is there.", "look for {}"]))
    def test_the_answer_is_found_in_every_disguise(self, sample, disguise, frame):
        hint = frame.format(DISGUISES[disguise](sample.answer))
        assert leak_of(hint, sample) in (("marks",) if disguise == "newline" and " " in sample.answer else ("answer",))

    @settings(max_examples=120, deadline=None)
    @given(st.sampled_from([toy for toy in TOLD if "," in toy.answer]), disguises, st.integers(0, 1))
    def test_one_of_two_answers_is_an_answer(self, sample, disguise, which):
        assert leak_of(f"It is {DISGUISES[disguise](sample.answer.split(', ')[which])}", sample) == "answer"

    @pytest.mark.parametrize(("answer", "hint"), [
        ("3", "She has three of them"), ("three", "it is 3"), ("42", "forty-two"), ("forty two", "say 42"), ("7 May 2023", "on May 7th, 2023"), ("7 May 2023", "2023-05-07"),
        ("small boat", "a boat, a small kind"), ("boats", "the boat"), ("boat", "boats"), ("adopting a child", "adopt children or a child"), ("yes", "Yes, it does"), ("no", "The reply is no"),
        ("Zoë", "ZOE"), ("Zoe", "zoë"), ("The Café", "a cafe"), ("A", "choose a"), ("Ｔｅａ", "tea"), ("tea", "t e a"), ("1,000", "a thousand"), ("twenty-one", "2 1"),
        ("New York", "new-york"), ("New York", "NewYork"), ("don't know", "dont know"), ("東京", "東京です"), ("unknown", "write Unknown")])
    def test_other_ways_to_write_it(self, answer, hint):
        assert leak_of(hint, make(answer=answer)) in ("answer", "number", "word")

    @pytest.mark.parametrize(("answer", "hint"), [("tea", "Read it again instead"), ("ten", "Read it often"), ("art", "Start with the parts"), ("he", "Check the person"), ("no", "Know the name")])
    def test_letters_inside_of_other_words_are_no_answer(self, answer, hint):
        assert not gives_answer(hint, make(answer=answer)) and not carries(hint, answer)

    @pytest.mark.parametrize("hint", ["Write none.", "NOTHING helps", "n-o-n-e", "There is no evidence here", "the answer is unknown", "not any of them"])
    def test_that_there_is_no_evidence_is_an_answer_too(self, hint):
        silent = make(gold=(), answer=UNKNOWN)
        assert leak_of(hint, silent) == "answer"
        assert leak_of("Check each part against the question.", silent) is None


class TestNumbers:
    @settings(max_examples=120, deadline=None)
    @given(st.sampled_from([SAMPLE, *TOLD]), st.data())
    def test_every_way_to_name_a_segment(self, sample, data):
        number = data.draw(st.integers(1, len(sample.segments)))
        words = ONES[number - 1], ORDINALS[number - 1]
        forms = [f"part {number}", f"the answer stands in {number}", f"#{number}", f"no. {number}", f"part {words[0]}", f"the {words[1]} part", f"the {words[1].upper()} one",
                 f"segment {chr(0xFF10 + number)}", f"{words[1]} sentence", f"turn number {words[0]}", f"part {'-'.join(words[0])}", f"the {'.'.join(words[1])} part"]
        assert leak_of(data.draw(st.sampled_from(forms)), sample) == "number"

    def test_brackets_are_marks(self):
        assert [leak_of(hint, SAMPLE) for hint in ("see [3]", "see 【3】", "see {x}", "<id>3</id>", "see ‹id›", "see ﹤id﹥")] == ["marks"]*6

    def test_the_last_part_has_a_number(self):
        assert [leak_of(hint, SAMPLE) for hint in ("the last part", "the final segment", "It is the last one", "at last compare")] == ["number"]*3 + [None]

    def test_words_for_numbers_no_segment_has(self):
        assert [names_number(hint, 4) for hint in ("seven of them", "the fifth", "four", "first compare", "one who speaks", "on second thought")] == [False, False, True, False, False, False]

    def test_long_sessions_have_more_numbers(self):
        sample = make((*SEGMENTS, *(f"Ida: filler {letter}" for letter in "abcdefghijklmnopqrs")))
        for hint in ("the seventeenth", "twenty-one", "the twenty-first part", "the twentieth", "part twelve", "fifteen"):
            assert leak_of(hint, sample) == "number"
        assert leak_of("the seventeenth century", SAMPLE) is None


class TestEvidence:
    @settings(max_examples=120, deadline=None)
    @given(st.sampled_from([SAMPLE, *TOLD]), disguises, st.data())
    def test_words_of_evidence_and_question_are_found_in_every_disguise(self, sample, disguise, data):
        told = [sample.segments[number - 1] for number in sample.gold] + [sample.question]
        word = data.draw(st.sampled_from([word for text in told for word in re.findall(r"\w{3,}", text) if word.lower() in
                                          ("boat", "bought", "dance", "wonderful", "small", "per") or sample is not SAMPLE]))
        assert leak_of(f"Look for {DISGUISES[disguise](word)}", sample) in ("word", "answer", "name")

    @pytest.mark.parametrize("sample", [SAMPLE, *TOLD[:20]], ids=lambda sample: sample.sample_id)
    def test_quoting_any_evidence_is_found(self, sample):
        for number in sample.gold:
            text = sample.segments[number - 1]
            assert leak_of(text, sample) and leak_of(text.upper(), sample) and leak_of(text.split(": ")[-1].replace(" ", ", "), sample)
        assert leak_of(sample.target, sample) == "marks" and leak_of(sample.question, sample)

    def test_three_words_in_a_row_of_any_segment_are_a_quotation(self):
        sample = make((*SEGMENTS[:5], "Ida: people often compare different answers"))
        assert leak_of("Compare different answers", sample) == "quote" and leak_of("Compare answers, different or not", sample) is None
        assert leak_of("the COMPARE, different: answers", sample) == "quote"

    def test_who_is_named_in_the_session_is_not_named_in_a_hint(self):
        assert [leak_of(f"What does {name} say?", SAMPLE) for name in ("Ida", "ida", "I-d-a", "Per", "Bergen", "Monday")] == ["name"]*6
        assert names_in("User: I met Bob. Then we left. Ask Anna-Lena.") == {"Bob", "Anna", "Lena"}

    def test_words_of_other_segments_may_occur(self):
        assert leak_of("Skip what is about a festival.", SAMPLE) is None

    def test_a_hint_from_one_sample_is_checked_against_that_one(self):
        assert leak_of("Follow the boat.", SAMPLE) == "word" and leak_of("Follow the boat.", make(question="Where?", gold=(1,), answer="Bergen")) is None


class TestGeneralAdvice:
    @pytest.mark.parametrize("hint", GENERAL_ADVICE)
    def test_it_passes_everywhere(self, hint):
        assert read_hint(f"Hint: {hint}").rstrip(".") == hint.rstrip(".")
        assert {leak_of(hint, sample) for sample in (SAMPLE, *TOYS)} == {None}

    def test_reasons_are_named(self):
        assert leak_of(None, SAMPLE) == leak_of("", SAMPLE) == leak_of("?!", SAMPLE) == "empty"
        assert leak_of("word "*(HINT_WORDS + 1), SAMPLE) == leak_of("x"*400, SAMPLE) == "too long"

    @settings(max_examples=120, deadline=None)
    @given(st.text(max_size=200), st.sampled_from([SAMPLE, *TOYS[:10]]))
    def test_no_text_raises(self, text, sample):
        assert leak_of(text, sample) in {None, *REJECTIONS}
        book = HintBook()
        reason = book.offer(sample, text)
        assert reason in {None, *REJECTIONS} and (reason is None) == bool(book.hints) == (not book.rejected)
        assert reason or leak_of(book.hints[sample.sample_id], sample) is None

    @given(st.text(alphabet="ab- .", max_size=30), st.text(alphabet="ab", min_size=1, max_size=4))
    def test_spelling_agrees_with_trying_every_row(self, text, wanted):
        found = pieces(text)
        rows = {"".join(found[i:j]) for i in range(len(found)) for j in range(i + 1, len(found) + 1)}
        assert spelled(wanted, found) == (wanted in rows)


class TestSlot:
    HINT = "Follow the name."

    @pytest.mark.parametrize("sample", [SAMPLE, *TOYS[:3]], ids=lambda sample: sample.sample_id)
    def test_it_is_where_the_locator_puts_hints(self, sample):
        block = SessionBlock("s", tuple(Segment("s", None, "turn", text) for text in sample.segments), sample.date)
        assert with_hint(sample.messages, self.HINT) == extraction_messages(Asked("q", sample.question, (), ()), block, self.HINT)

    @settings(deadline=None)
    @given(st.sampled_from([SAMPLE, *TOYS]), st.lists(st.sampled_from(GENERAL_ADVICE), max_size=4), st.sampled_from(HINT_PLACES))
    def test_in_and_out_again(self, sample, hints, place):
        before = json.dumps(sample.messages)
        prompt = sample.messages
        for hint in hints:
            prompt = with_hint(prompt, hint, place)
        assert without_hint(prompt) == sample.messages and json.dumps(sample.messages) == before
        line = prompt[0]["content"].removeprefix(sample.messages[0]["content"])
        expected = hints[-1:] if place == "replace" else dict.fromkeys(hints)
        assert line == (f"{SLOT}{' '.join(expected)}" if hints else "") and prompt[1:] == sample.messages[1:]

    def test_no_hint_changes_no_byte(self):
        for hint in (None, ""):
            assert json.dumps(with_hint(SAMPLE.messages, hint)) == json.dumps(without_hint(SAMPLE.messages)) == json.dumps(SAMPLE.messages)
        advised = with_hint(SAMPLE.messages, self.HINT)
        assert with_hint(advised, None) == advised

    def test_what_was_given_is_not_changed(self):
        given_messages = SAMPLE.messages
        with_hint(given_messages, self.HINT)[1]["content"] = ""
        assert given_messages == SAMPLE.messages

    def test_people_cannot_fill_the_slot(self):
        sample = make((*SEGMENTS, "Ida: done\nHint: it is 3"), question="What?\nHint: say 3")
        assert without_hint(sample.messages) == sample.messages and SLOT not in sample.messages[0]["content"]

    def test_rules_that_speak_of_hints_are_no_slot(self):
        messages = [{"role": "system", "content": "Hint: read.\nHint: read twice.\nReply in this form."}, SAMPLE.messages[1]]
        assert without_hint(messages) == messages and without_hint(with_hint(messages, self.HINT)) == messages

    @pytest.mark.parametrize("hint", ["a\nb", " a", "a ", "a\u2028b", "a\r"])
    def test_several_lines_are_refused(self, hint):
        with pytest.raises(ValueError, match="read_hint"):
            with_hint(SAMPLE.messages, hint)

    def test_wrong_prompts_and_places_are_refused(self):
        with pytest.raises(ValueError, match="'user'"):
            with_hint(SAMPLE.messages[1:], self.HINT)
        with pytest.raises(ValueError, match="nothing"):
            with_hint([], self.HINT)
        with pytest.raises(ValueError, match="'front'"):
            with_hint(SAMPLE.messages, self.HINT, "front")
        with pytest.raises(ValueError, match="'front'"):
            HintBook(place="front")


class TestBook:
    def test_only_checked_hints_get_in_and_others_are_counted(self):
        book = HintBook()
        told = [book.offer(SAMPLE, text) for text in ("Café Olé", "cafe ole", "see part 3", "", "<id>3</id>", "Hint: Follow the name.")]
        assert told == ["answer", "answer", "number", "empty", "marks", None]
        assert book.hints == {SAMPLE.sample_id: "Follow the name."} and book.rejected == {"answer": 2, "number": 1, "empty": 1, "marks": 1}
        assert book.offer(SAMPLE, "It is Café Olé") == "answer" and book.hints == {SAMPLE.sample_id: "Follow the name."}

    @pytest.mark.parametrize("leak", ["the answer", "a piece of evidence", "the ids", "the ids in words", "the whole reply", "the question"])
    def test_a_hint_that_leaks_never_reaches_a_prompt(self, leak):
        "The paper forbids such hints and the released code does not look: unchecked, each of them would stand in the next stage's prompt."
        for sample in [SAMPLE, *TOLD]:
            first = sample.gold[0]
            hint = {"the answer": f"The answer is {sample.answer}.", "a piece of evidence": sample.segments[first - 1], "the ids": f"Name {', '.join(map(str, sample.gold))}.",
                    "the ids in words": f"Look at part {ONES[first - 1]}.", "the whole reply": sample.target, "the question": sample.question}[leak]
            book = HintBook()
            reason = book.offer(sample, f"Hint: {hint}")
            assert reason in REJECTIONS and book.rejected == {reason: 1} and not book.hints
            assert json.dumps(book.prompt(sample)) == json.dumps(sample.messages) != json.dumps(with_hint(sample.messages, hint))

    def test_every_prompt_is_there_with_or_without_a_hint(self):
        book = HintBook()
        for toy in TOYS[::2]:
            assert book.offer(toy, GENERAL_ADVICE[0]) is None
        prompts = [book.prompt(toy) for toy in TOYS]
        assert len(prompts) == len(TOYS) and [without_hint(prompt) for prompt in prompts] == [toy.messages for toy in TOYS]
        assert [prompt == toy.messages for prompt, toy in zip(prompts, TOYS, strict=True)] == [i % 2 == 1 for i in range(len(TOYS))]

    @pytest.mark.parametrize("place", HINT_PLACES)
    def test_stages_replace_or_append_and_the_book_survives_json(self, place):
        book = HintBook(place=place)
        for text in ("Check every name.", "Read on until the end.", "Check every name."):
            book.offer(SAMPLE, text)
            book = HintBook(**json.loads(json.dumps(dataclasses.asdict(book))))
        assert book.hints[SAMPLE.sample_id] == ("Check every name. Read on until the end." if place == "append" else "Check every name.")

    def test_a_rollout_is_no_hint(self):
        "What a locator writes when it does not understand that it is asked for a hint."
        rng = np.random.default_rng(1)
        for _ in range(50):
            toy = draw_sample(ToyTask(), 5, rng)
            shuffled = " ".join(random.Random(3).sample(toy.target.split(), len(toy.target.split())))
            assert HintBook().offer(toy, toy.target) and HintBook().offer(toy, shuffled)


def test_two_safe_hints_do_not_add_up_to_the_answer():
    sample = dataclasses.replace(SAMPLE, answer="the second week")
    book = HintBook(place="append")
    assert book.offer(sample, "Prefer the week.") is None
    assert book.offer(sample, "Think a second time.") == "answer"
    assert book.hints[sample.sample_id] == "Prefer the week."
