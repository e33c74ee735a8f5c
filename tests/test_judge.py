"""The verdict parser under generated replies, and the judge on planted answers."""

import json

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from memloc.chat import LLMError, Reply
from memloc.judge import (
    PHRASES,
    PLANTED,
    RULES,
    VERDICTS,
    VerdictError,
    acceptance,
    cohen_kappa,
    examine_judge,
    judge,
    judge_items,
    judge_messages,
    judge_scores,
    judged_by_all,
    parse_verdict,
    planted_answers,
    prompt_agreement,
    question_kind,
    raise_if_all_failed,
)


def read(text):
    try:
        return parse_verdict(text)
    except VerdictError:
        return None


phrases = st.sampled_from(sorted(PHRASES))
cases = st.sampled_from([str.lower, str.upper, str.title])
wrappers = st.sampled_from(["{}", "  {} ", "{}.", "{}!", "**{}**", '"{}"', "`{}`", "\n{}\n", "Verdict: {}", "verdict is {}.",
                            "Final judgement: {}", "The answer is {}.", "This response is {}", "```\n{}\n```"])


@given(phrases, cases, wrappers)
def test_every_clear_form_is_read(phrase, case, wrapper):
    assert read(wrapper.format(case(phrase))) is PHRASES[phrase]


@given(phrases, st.sampled_from(["verdict", "label", "correct", "judgement", "Verdict"]), st.text(max_size=40), st.booleans())
def test_json_is_read(phrase, key, reason, fenced):
    text = json.dumps({"reason": reason, key: phrase})
    assert read(f"```json\n{text}\n```" if fenced else text) is PHRASES[phrase]


@given(st.text())
def test_any_text_gives_a_verdict_or_an_error(text):
    assert read(text) in (True, False, None)


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=60), st.booleans())
def test_words_around_a_verdict_make_it_an_error(words, front):
    "A reply of one line that holds more than the verdict is read only in the listed sentences."
    words = "".join(character for character in words if character.isalpha())
    if not words:
        return
    text = f"yes {words}" if front else f"{words} yes"
    assert read(text) in (None, True)
    if words.lower() not in ("verdict", "label", "judgement", "judgment"):
        assert read(text) is None


@given(phrases, phrases)
def test_two_verdicts_agree_or_are_an_error(first, second):
    found = read(f"Verdict: {first}\nVerdict: {second}")
    assert found is (PHRASES[first] if PHRASES[first] == PHRASES[second] else None)
    assert read(f"{first} and {second}") is None
    keyed = read(json.dumps({"verdict": first, "label": second}))
    assert keyed is (PHRASES[first] if PHRASES[first] == PHRASES[second] else None)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json(value):
    found = read(json.dumps(value))
    if isinstance(value, dict) and not any(key.lower() in ("verdict", "label", "correct", "judgement", "judgment") for key in value):
        assert found is None
    assert found in (True, False, None)


@pytest.mark.parametrize("text", [
    "", " ", "maybe", "yes and no", "yes, but the year is wrong", "not incorrect", "not wrong", "no no", "CORRECTINCORRECT", "in correct",
    "partially correct", "almost right", "correct?", "{}", '{"verdict": null}', '{"verdict": 1}', '{"verdict": "not wrong"}',
    '{"verdict": "yes"', '{"verdict": ["yes"]}', '{"correct": "yes", "correct": "no"}', '[{"verdict": "yes"}]', "The answer: yes\nNo.",
    "Verdict: yes\nwhich I am not sure of", "I would say the verdict: yes", "true false", "y", "n", "1", "[" * 5000, '{"a":' * 5000,
    '{"verdict": ' + "1" * 5000 + "}", '{"verdict": "yes", "sure": ' + "9" * 5000 + "}", '{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "verdict": "yes"}'])
def test_unclear_replies_are_errors(text):
    with pytest.raises(VerdictError):
        parse_verdict(text)


def test_incorrect_is_not_correct():
    assert [parse_verdict(text) for text in ("CORRECT", "INCORRECT", "Not correct.", "ＹＥＳ")] == [True, False, False, True]
    assert parse_verdict("The gold says May, so this is incorrect at first sight.\nVerdict: correct") is True


class Scripted:
    "A judge that answers by a function of the prompt."

    name, key, context = "scripted", "scripted", 8192

    def __init__(self, say):
        self.say, self.seen = say, []

    def count_tokens(self, messages):
        return 1

    def chat(self, batch, sampling, on_reply=None):
        self.seen += batch
        outcomes = [self.say(messages[0]["content"], messages[1]["content"]) for messages in batch]
        outcomes = [Reply(one, n_prompt_tokens=10, n_completion_tokens=1) if isinstance(one, str) else one for one in outcomes]
        for place, outcome in enumerate(outcomes):
            if on_reply:
                on_reply(place, outcome)
        return outcomes


def table(n=6):
    kinds = ["temporal", "single-hop", "preference", "adversarial", "knowledge-update", "single-hop"]
    gold = pl.DataFrame({"question_id": [f"q{i}" for i in range(n)], "category": kinds[:n],
                         "answers": [[f"fact {i}"] if kinds[i] != "adversarial" else [] for i in range(n)],
                         "is_abstention": [kind == "adversarial" for kind in kinds[:n]]})
    asked = gold.select("question_id", question=pl.lit("What?"))
    said = gold.select("question_id", answer=pl.lit("something"))
    return judge_items(said, asked, gold)


def test_kinds_and_rubrics():
    items = table()
    assert items["kind"].to_list() == ["temporal", "fact", "preference", "abstention", "knowledge-update", "fact"]
    assert question_kind("single-session-user", True) == "abstention"
    for prompt in RULES:  # an abstention question never gets the rule for facts (memorybench#82)
        assert "Only an answer that says so is right" in judge_messages(prompt, "?", [], "x", "abstention")[0]["content"]
        assert "do not contain" not in judge_messages(prompt, "?", ["x"], "x", "temporal")[0]["content"]


@given(st.text(max_size=80))
def test_texts_stay_inside_their_quotation_marks(text):
    content = judge_messages("strict", text, [text], text)[1]["content"]
    lines = content.split("\n")
    assert len(lines) == 4
    assert json.loads(lines[0].removeprefix("Question: ")) == json.loads(lines[2].removeprefix("Answer: ")) == text


def test_errors_are_no_verdicts():
    replies = iter(["yes", "no", "perhaps", LLMError("timeout", "after 1 s"), "INCORRECT", "yes"])
    found = judge(Scripted(lambda *_: next(replies)), table(), ["strict"])
    assert found.schema == pl.Schema(VERDICTS)
    assert found["verdict"].to_list() == [True, False, None, None, False, True]
    assert found["status"].to_list()[2:4] == ["no verdict", "error: " + str(LLMError("timeout", "after 1 s"))]
    assert acceptance(found).row(0) == ("strict", 0.5, 4, 1, 1)
    assert len(judge_scores(found, "s", "j")) == 4 and judge_scores(found, "s", "j")["metric"][0] == "judge_strict_j"


def test_a_judge_that_never_answers_is_an_error(caplog):
    down = LLMError("connection", "nobody there")
    with pytest.raises(RuntimeError, match="judge: all 18 calls failed; the first: error: connection: nobody there"):
        raise_if_all_failed(judge(Scripted(lambda *_: down), table()))
    raise_if_all_failed(judge(Scripted(lambda *_: "perhaps"), table()))
    assert not caplog.text
    replies = iter(["yes"] * 5 + [down])
    raise_if_all_failed(judge(Scripted(lambda *_: next(replies)), table(), ["strict"]))
    assert "judge: 1 of 6 calls failed" in caplog.text


def test_prompts_are_averaged_over_the_same_questions(caplog):
    def say(rule, text):
        unread = ("reasonable person" in rule and "fact 1" in text) or ("In doubt" in rule and "fact 2" in text)
        return "perhaps" if unread else "yes"
    assert judged_by_all(judge(Scripted(say), table())).to_list() == ["q0", "q3", "q4", "q5"]
    assert "2 of 6 questions lack a readable verdict" in caplog.text
    mute = judge(Scripted(lambda rule, text: "perhaps" if "reasonable person" in rule else "yes"), table().filter(pl.col("kind") != "abstention"))
    assert len(judged_by_all(mute)) == 5  # a prompt that is never understood does not take the others with it


def test_a_question_without_category_has_the_rubric_for_facts():
    assert (question_kind(None, False), question_kind(None, True)) == ("fact", "abstention")


def test_flips_and_kappa():
    def say(rule, text):
        return "yes" if "reasonable person" in rule or "fact 1" in text or "fact 2" in text else "no"
    agreement = prompt_agreement(judge(Scripted(say), table(), ["strict", "lenient", "rubric"]))
    row = agreement.filter(first="lenient", second="strict").row(0, named=True)
    assert (row["flip_rate"], row["n"]) == (0.5, 6)  # yes to 5 (not to the abstention question) against yes to 2
    assert agreement.filter(first="rubric", second="strict")["flip_rate"].item() == 0.0
    a, b = [True, False, True, True], [True, True, False, True]
    assert cohen_kappa(a, b) == pytest.approx(cohen_kappa_score(a, b))
    assert cohen_kappa([False], [False]) is None


def test_planted_answers():
    items = table()
    wrong = planted_answers(items, "wrong")
    assert all(answer not in golds for golds, answer in wrong.select("answers", "answer").iter_rows())
    assert wrong.filter(question_id="q1")["answer"].item() == "fact 5"  # the other fact question
    assert planted_answers(items, "wrong").equals(planted_answers(items.reverse(), "wrong"))
    same = items.with_columns(answers=pl.lit(["Seven"], dtype=pl.List(pl.String)))
    assert planted_answers(same.filter(pl.col("kind") != "abstention"), "wrong").is_empty()
    examined = examine_judge(Scripted(lambda *_: "yes"), items)
    assert set(examined["planted"]) == set(PLANTED) and examined["accepted"].to_list() == [1.0] * 9


def test_questions_without_gold_are_not_judged():
    gold = pl.DataFrame({"question_id": ["q"], "category": ["x"], "answers": [[]], "is_abstention": [False]},
                        schema_overrides={"answers": pl.List(pl.String)})
    asked = pl.DataFrame({"question_id": ["q"], "question": ["?"]})
    items = judge_items(pl.DataFrame({"question_id": ["q"], "answer": [None]}, schema_overrides={"answer": pl.String}), asked, gold)
    assert items.is_empty() and judge(Scripted(lambda *_: "yes"), items).is_empty()
