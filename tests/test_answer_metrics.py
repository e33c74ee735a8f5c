"""Answer metrics against transformers' SQuAD code, sacrebleu and loops; evidence, baselines and a run with answers."""

import json
import logging
import math

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evaluation import CONFIG, make_run
from transformers.data.metrics import squad_metrics

from memloc.answer_metrics import (
    CONSTANT,
    SCORES,
    answer_tokens,
    as_scores,
    bert_scores,
    bleu4,
    constant_answers,
    correct_answers,
    correct_gold,
    evidence_scores,
    exact_match,
    gold_answers,
    join_numbers,
    load_corrections,
    locator_costs,
    overlap_f1,
    read_answers,
    rouge_l,
    score_answers,
    squad_f1,
    squad_tokens,
    token_f1,
)
from memloc.artifacts import Stage, stage_manifest, stage_table
from memloc.evaluation import ROWS, EvaluationConfig, run_evaluation, score_table, summarise_scores
from memloc.evaluation import judge_items as REAL_ITEMS

relaxed = settings(deadline=None)
plain_words = st.lists(st.sampled_from(["the", "a", "cat", "Cat,", "dog's", "well-known", "7.5", "...", "An", "tea!", "three"]), max_size=8).map(" ".join)


@relaxed
@given(plain_words, plain_words)
def test_squad_metrics_agree_with_transformers(answer, gold):
    assert squad_tokens(answer) == squad_metrics.get_tokens(answer)
    assert squad_f1(answer, [gold]) == pytest.approx(squad_metrics.compute_f1(gold, answer))


@relaxed
@given(st.text(), st.text())
def test_any_text_can_be_scored(answer, gold):
    for metric in (token_f1, exact_match, squad_f1, bleu4, rouge_l):
        assert 0 <= metric(answer, [gold]) <= 1 + 1e-9
    assert token_f1(answer, [gold]) == pytest.approx(token_f1(gold, [answer]))
    assert token_f1(answer, [gold, answer]) == exact_match(answer, [gold, answer]) == 1.0


@pytest.mark.parametrize(("one", "other"), [
    ("7 May 2023", "May 7, 2023"), ("2023-05-07", "the 7th of May 2023"), ("7 may 2023", "May 7th 2023"), ("Sept. 3", "3 September"),
    ("the twenty-first", "21"), ("fifteen", "15"), ("one hundred and five", "105"), ("two thousand five hundred", "2,500"), ("third", "3rd"),
    ("zero", "0"), ("ＴＥＡ", "tea"), ("ninety nine", "99"), ("a hundred", "100"), ("three million", "3,000,000"), ("Café", "Cafe\u0301"),
    ("20 mph", "20 mph."), ("5 million", "5,000,000"), ("1.5 million", "1500000"), ("5 thousand", "5000"), ("$1.5 million", "1,500,000"),
    ("2 million 200 thousand", "2,200,000"), ("1.2345 thousand", "1234.5"), ("nineteen ninety", "1990"), ("in May nineteen ninety-five", "in May 1995"),
    ("nineteen, twenty", "19, 20"), ("07 May 2023", "7 May 2023"), ("May 07, 2023", "7 May 2023"), ("the 07th of Oct. 2023", "October 7, 2023"), ("self-care", "self care"), ("茶", "茶。")])
def test_same_answer_in_other_words(one, other):
    assert answer_tokens(one) == answer_tokens(other)
    assert exact_match(one, [other]) == 1.0


@pytest.mark.parametrize(("one", "other"), [
    ("7 May 2023", "7 June 2023"), ("5/7/2023", "7 May 2023"), ("1.5", "15"), ("one two", "12"), ("may be", "5"), ("-", "0"), ("6", "60"), ("5 million", "5"),
    ("5 millions", "5,000,000"), ("007 cats", "7 cats"), ("nineteen, ninety", "1990"), ("1990", "19 90")])
def test_different_answers_stay_different(one, other):
    assert exact_match(one, [other]) == 0.0


@relaxed
@given(st.integers(1, 999_999))
def test_numbers_in_words(number):
    ones = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
    tens = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

    def below_hundred(n):
        return [ones[n]] if n < 20 else [tens[n // 10]] + ([ones[n % 10]] if n % 10 else [])

    def below_thousand(n):
        return ([ones[n // 100], "hundred"] if n >= 100 else []) + (below_hundred(n % 100) if n % 100 else [])

    words = ([*below_thousand(number // 1000), "thousand"] if number >= 1000 else []) + below_thousand(number % 1000)
    assert join_numbers(words) == [str(number)]


def test_f1_against_a_loop():
    a, b = ["x", "y", "y", "z"], ["y", "y", "y", "w"]
    left, hits = list(b), 0
    for word in a:
        if word in left:
            left.remove(word)
            hits += 1
    precision, recall = hits / len(a), hits / len(b)
    assert overlap_f1(a, b) == pytest.approx(2 * precision * recall / (precision + recall))
    assert (overlap_f1([], []), overlap_f1([], b)) == (1.0, 0.0)


def test_bleu_is_sacrebleu():
    from sacrebleu import sentence_bleu
    text, gold = "she left the piano with her sister in august", "her sister took the piano in august"
    assert bleu4(text, [gold]) == pytest.approx(sentence_bleu(text, [gold], use_effective_order=True).score / 100)


@relaxed
@given(st.lists(st.sampled_from(["the cat", "tea", "7.5"]), max_size=12).map(" ".join))
def test_bleu_is_at_most_one(text):
    assert bleu4(text, [text]) <= 1


def test_bleu_of_a_known_rounding_error():
    assert max(bleu4(" ".join("abcdefghijklmnop"[:n]), [" ".join("abcdefghijklmnop"[:n])]) for n in range(1, 17)) == 1.0


@relaxed
@given(st.text(st.characters(max_codepoint=0x24F)), st.text(st.characters(max_codepoint=0x24F)))
def test_rouge_in_latin_script_is_the_default(answer, gold):
    from rouge_score.rouge_scorer import RougeScorer
    assert rouge_l(answer, [gold]) == RougeScorer(["rougeL"], use_stemmer=True).score(gold, answer)["rougeL"].fmeasure


def test_rouge_of_english_is_the_default():
    from rouge_score.rouge_scorer import RougeScorer
    answer, gold = "She was running to the stations, naïvely — 7.5 m² away ✌️", "The runner's station: 7.5 m², naïve"
    assert 0 < rouge_l(answer, [gold]) == RougeScorer(["rougeL"], use_stemmer=True).score(gold, answer)["rougeL"].fmeasure < 1


@pytest.mark.parametrize(("answer", "gold", "value"), [
    ("猫", "猫", 1), ("猫と犬", "猫", 0.5), ("Зелёный чай", "зелёный чай", 1), ("हिन्दी भाषा", "हिन्दी", 2 / 3), ("茶", "tea", 0), ("قهوة ٣", "قهوة", 2 / 3),
    ("Tokyo 猫 cafe", "Tokyo 猫", 0.8), ("✌️", "✌️", 0)])
def test_rouge_in_other_scripts(answer, gold, value):
    assert rouge_l(answer, [gold]) == pytest.approx(value)


def test_bert_score_with_a_tokenizer_without_length(tmp_path):
    import shutil

    from memloc.encoders import minilm_folder
    for path in minilm_folder().iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path / path.name)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("model_max_length")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    long = "tea and rain " * 400
    same = bert_scores(["green tea", long, ""], [["green tea"], [long], ["x"]], str(tmp_path))
    assert same[0] == pytest.approx(1, abs=1e-3) and same[1] == pytest.approx(1, abs=1e-3) and same[2] == 0.0
    assert same[0] == pytest.approx(bert_scores(["green tea"], [["green tea"]])[0], abs=1e-5)


GOLD = pl.DataFrame({
    "question_id": ["q1", "q2", "q3", "q4"], "category": ["temporal", "single-hop", "single-hop", "adversarial"],
    "answer": ["7 May 2023", "15", "blue", None], "answer_type": ["text", "int", "text", None], "trap": [None, None, None, "a red bicycle"],
    "is_abstention": [False, False, False, True], "source_question_id": [None, "x-2", None, None]})


def answers_of(*texts, system="s"):
    return pl.DataFrame({"system": system, "question_id": [f"q{i}" for i in range(1, len(texts) + 1)], "answer": texts,
                         "abstained": [text == "Not mentioned." for text in texts]})


def value_of(scores, question, metric, system="s"):
    found = scores.filter(system=system, question_id=question, metric=metric)["value"]
    return found.item() if len(found) else None


def test_protocols():
    scores = score_answers(answers_of("May 7, 2023", "fifteen", "red", "A red bicycle"), gold_answers(GOLD))
    assert scores.schema == pl.Schema(SCORES)
    assert [value_of(scores, f"q{i}", "exact_match") for i in range(1, 5)] == [1.0, 1.0, 0.0, None]
    assert value_of(scores, "q4", "f1_trap") == 1.0 and value_of(scores, "q4", "f1") is None
    assert value_of(scores, "q4", "abstention") == 0.0 and value_of(scores, "q1", "abstention") is None
    assert value_of(scores, "q1", "over_abstention") == 0.0 and value_of(scores, "q4", "over_abstention") is None
    assert "f1_trap" not in score_answers(answers_of("x"), gold_answers(GOLD.with_columns(trap=pl.lit(None, pl.String))))["metric"].to_list()


def test_f1_by_hand():
    # dog, named, rex against rex, big, dog (articles go): 2 shared words, 2*2/(3 + 3)
    assert token_f1("a dog named Rex", ["Rex, the big dog"]) == squad_f1("a dog named Rex", ["Rex, the big dog"]) == pytest.approx(2 / 3)
    # tea, tea, cup against tea, cup, full: tea is shared once, cup once: 2*2/(3 + 3)
    assert token_f1("tea tea cup", ["tea cup full"]) == pytest.approx(2 / 3)
    assert exact_match("The dog, Rex!", ["dog rex"]) == 1 and exact_match("rex dog", ["dog rex"]) == 0
    assert token_f1("rex dog", ["dog rex"]) == 1  # F1 knows no order


@pytest.mark.parametrize(("answer", "gold", "ours", "squad"), [
    ("2023-05-07", "7 May 2023", 1, 0), ("fifteen", "15", 1, 0), ("self care", "self-care", 1, 0), ("2500", "2,500", 1, 1), ("1.5", "15", 0, 1),
    ("fifteen cats", "15 cats", 1, 0.5)])
def test_two_definitions_of_f1(answer, gold, ours, squad):
    assert (token_f1(answer, [gold]), squad_f1(answer, [gold])) == (ours, squad)
    scores = score_answers(answers_of(answer), gold_answers(GOLD[:1].with_columns(answer=pl.lit(gold))))
    assert (value_of(scores, "q1", "f1"), value_of(scores, "q1", "f1_squad")) == (ours, squad)  # both are in every table


some_words = st.lists(st.sampled_from(["the", "Cat,", "cat", "sat", "on", "a", "mat", "7.5", "tea!", "tea"]), max_size=9).map(" ".join)


@relaxed
@given(some_words, some_words)
def test_bleu_is_sacrebleu_for_any_answer(answer, gold):
    from sacrebleu import sentence_bleu
    theirs = sentence_bleu(answer, [gold], lowercase=True, use_effective_order=True).score / 100
    assert bleu4(answer, [gold]) == pytest.approx(min(1.0, theirs), abs=1e-12)


def test_bleu_by_hand():
    # orders 1 to 4 of six words each: 5/6, 3/5, 2/4, 1/3; their product is 1/12
    assert bleu4("the cat sat on the mat", ["the cat sat on a mat"]) == pytest.approx((1 / 12) ** 0.25)
    # all orders whole, but four words for six: exp(1 - 6/4)
    assert bleu4("the cat sat on", ["the cat sat on a mat"]) == pytest.approx(math.exp(-0.5))


def test_definitions_of_bleu_differ():
    from sacrebleu import corpus_bleu, sentence_bleu
    # two words have no orders 3 and 4: left out here, smoothed to a small number where the order is not effective
    assert bleu4("green tea", ["green tea"]) == 1 > sentence_bleu("green tea", ["green tea"], use_effective_order=False).score / 100
    several = ["green tea with mint", "tea with a lot of mint"]
    # of several accepted answers the nearest counts; several references at once count the words of all
    assert bleu4("green tea with a lot of mint", several) < sentence_bleu("green tea with a lot of mint", several, use_effective_order=True).score / 100
    answers, golds = ["the cat sat on the mat", "tea"], ["the cat sat on a mat", "a pot of tea"]
    mean = (bleu4(answers[0], [golds[0]]) + bleu4(answers[1], [golds[1]])) / 2
    assert abs(mean - corpus_bleu(answers, [golds]).score / 100) > 0.02  # ours is a mean over questions


def test_rouge_by_hand():
    # longest common subsequence "tea and honey": precision 3/5, recall 3/4, F1 2*3/(5 + 4)
    assert rouge_l("tea with milk and honey", ["milk tea and honey"]) == pytest.approx(2 / 3)
    assert token_f1("tea with milk and honey", ["milk tea and honey"]) == pytest.approx(2 * 4 / 9)  # without order


def test_counting_traps_turns_the_order_of_two_answerers():
    careful = answers_of("7 May 2023", "15", "red", "Not mentioned.", system="careful")
    credulous = answers_of("7 May 2023", "15", "red", "a red bicycle", system="credulous")
    scores = score_answers(pl.concat([careful, credulous]), gold_answers(GOLD))
    mean = {key: (value, n) for *key, value, n in scores.group_by("system", "metric").agg(pl.col("value").mean(), pl.len()).iter_rows() for key in [tuple(key)]}
    # answerable questions only: 1 + 1 + 0 of three, for both
    assert mean["careful", "f1"] == mean["credulous", "f1"] == (pytest.approx(2 / 3), 3)
    # with the trap as gold: 1 + 1 + 0 + 0 against 1 + 1 + 0 + 1 of four; who is taken in is ahead
    assert mean["careful", "f1_trap"] == (pytest.approx(2 / 4), 4) and mean["credulous", "f1_trap"] == (pytest.approx(3 / 4), 4)
    assert mean["careful", "abstention"] == (1, 1) and mean["credulous", "abstention"] == (0, 1)


def test_the_constant_answer_pays_only_for_abstention():
    scores = score_answers(constant_answers(GOLD["question_id"]), gold_answers(GOLD))
    means = dict(scores.group_by("metric").agg(pl.col("value").mean()).iter_rows())
    assert (means["f1"], means["exact_match"], means["abstention"], means["over_abstention"], means["f1_trap"]) == (0, 0, 1, 1, 0)


def test_several_gold_answers():
    gold = gold_answers(GOLD[:1].with_columns(answers=pl.Series([["7 May 2023", "last Sunday"]])))
    assert value_of(score_answers(answers_of("last sunday"), gold), "q1", "f1") == 1.0
    with pytest.raises(ValueError, match="question 'q1' comes twice"):
        gold_answers(pl.concat([GOLD, GOLD[:1]]))


def test_an_answer_that_was_a_list_has_several_accepted_answers():
    listed = GOLD[:2].with_columns(answer=pl.Series([str(["Ada", "Ada L.", 7, None]), "15"]), answer_type=pl.Series(["list", "int"]))
    assert gold_answers(listed)["answers"].to_list() == [["Ada", "Ada L.", "7"], ["15"]]
    assert value_of(score_answers(answers_of("Ada L"), gold_answers(listed)), "q1", "exact_match") == 1.0
    assert gold_answers(GOLD.drop("answer_type"))["answers"].to_list() == gold_answers(GOLD)["answers"].to_list()
    for broken in ("Ada, Ada L.", "['Ada", "7"):
        with pytest.raises(ValueError, match=r"gold: question 'q1': answer .* cannot be read as one; correct it"):
            gold_answers(listed[:1].with_columns(answer=pl.lit(broken)))


def fixes_of(*rows):
    return pl.DataFrame(rows, schema=["question_id", "action", "answer"], orient="row")


def test_a_replacement_makes_an_abstention_question_answerable():
    published = gold_answers(GOLD)
    fixed = correct_gold(published, fixes_of(("q4", "replace", "a blue bicycle")))
    assert fixed.filter(question_id="q4").select("answers", "is_abstention").row(0) == (["a blue bicycle"], False)
    scores = score_answers(answers_of("x", "x", "x", "blue bicycle"), fixed)
    assert value_of(scores, "q4", "exact_match") == 1.0 and value_of(scores, "q4", "abstention") is None
    with pytest.raises(ValueError, match="question 'q4' is an abstention question, .* use 'replace'"):
        correct_gold(published, fixes_of(("q4", "accept", "a blue bicycle")))
    both = correct_gold(published, fixes_of(("q4", "accept", "blue"), ("q4", "replace", "a blue bicycle")))
    assert both.filter(question_id="q4")["answers"].to_list() == [["a blue bicycle", "blue"]]


def test_conflicts_of_corrections_under_two_ids():
    with pytest.raises(ValueError, match="question 'q2' is both dropped and corrected"):
        correct_gold(gold_answers(GOLD), fixes_of(("q2", "drop", None), ("x-2", "replace", "16")))


@pytest.mark.parametrize(("content", "message"), [
    ("", "not a CSV with the columns"), ("question_id,action,answer\nq1,replace,a,b,c\n", "not a CSV with the columns"),
    ("question_id,action,answer\nq1,replace\n", "action 'replace' with answer None"), ("question_id,action,answer\nq1,accept,   \n", "action 'accept' with answer None"),
    ("question_id,action,answer\n,drop,\n", "question None"), ("question_id,action,answer\nq1\n", "action None")])
def test_damaged_lists_of_corrections_name_their_file(tmp_path, content, message):
    path = tmp_path / "known.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"known.csv: .*{message}"):
        load_corrections(path)


def test_corrections(tmp_path):
    path = tmp_path / "fixes.csv"
    path.write_text("question_id,action,answer\nq1,accept,8 May 2023\nx-2,replace,16\nq3,drop,\n")
    fixes, published = load_corrections(path), gold_answers(GOLD)
    fixed = correct_gold(published, fixes)
    assert dict(fixed.select("question_id", "answers").iter_rows()) == {"q1": ["7 May 2023", "8 May 2023"], "q2": ["16"], "q4": []}
    ceiling = score_answers(correct_answers(published, fixes), published).filter(metric="exact_match")
    assert ceiling["value"].to_list() == [1.0, 0.0, 0.0]
    for content, message in [("question_id,answer\nq1,x\n", r"lacks the columns \['action'\]"), ("question_id,action,answer\nq1,fix,x\n", "action 'fix'"),
                             ("question_id,action,answer\nq1,drop,x\n", "action 'drop' with answer 'x'"),
                             ("question_id,action,answer\nq1,replace,\n", "action 'replace' with answer None"),
                             ("question_id,action,answer\nq1,drop,\nq1,accept,x\n", "both dropped and corrected")]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_corrections(path)
    path.write_text("question_id,action,answer\nq77,replace,x\n")
    with pytest.raises(ValueError, match="'q77' and 0 more are not in the gold"):
        correct_gold(published, load_corrections(path))


@relaxed
@given(st.sets(st.integers(0, 6)), st.sets(st.integers(0, 6), min_size=1))
def test_evidence_against_sets(named, gold):
    table = pl.DataFrame({"question_id": ["q"] * len(named), "turn_id": [f"t{i}" for i in named]},
                         schema={"question_id": pl.String, "turn_id": pl.String})
    scores = evidence_scores(table, pl.DataFrame({"question_id": ["q"], "evidence_turns": [[f"t{i}" for i in gold]]}), ["q"], "s")
    hits = len(named & gold)
    precision, recall = hits / len(named) if named else 0.0, hits / len(gold)
    assert value_of(scores, "q", "evidence_precision") == pytest.approx(precision)
    assert value_of(scores, "q", "evidence_recall") == pytest.approx(recall)
    assert value_of(scores, "q", "evidence_f1") == pytest.approx(2 * precision * recall / (precision + recall) if hits else 0.0)


def test_evidence_skips_questions_without_gold_and_those_not_asked():
    gold = pl.DataFrame({"question_id": ["a", "b", "c"], "evidence_turns": [["t1"], [], ["t2"]]})
    none = pl.DataFrame(schema={"question_id": pl.String, "turn_id": pl.String})
    assert evidence_scores(none, gold, ["a", "b"])["question_id"].unique().to_list() == ["a"]


def make_answered(folder, n=40, located=None, variants=("none", "cue"), failures=()):
    "The tiny run of the retrieval tests, with gold answers, a locator stage and a generation stage."
    make_run(folder, n=n)
    tables = {name: stage_table(folder, "data", name) for name in ("conversations", "sessions", "questions", "gold")}
    tables["turns"] = tables["sessions"].select("session_id", "conversation_id", position=pl.int_ranges(0, 3)).explode("position").with_columns(
        turn_id=pl.concat_str("session_id", pl.lit("/t"), pl.col("position").cast(pl.String)))
    adversarial = pl.col("category") == "adversarial"
    number = pl.int_range(pl.len()).cast(pl.String)
    tables["gold"] = tables["gold"].with_columns(
        answer=pl.when(adversarial).then(None).otherwise(pl.lit("fact ") + number), trap=pl.when(adversarial).then(pl.lit("trap ") + number),
        evidence_turns=pl.col("evidence_sessions").list.eval(pl.element() + "/t1"), source_question_id=pl.lit(None, pl.String))
    with Stage(folder, "data", {"dataset": "locomo"}) as stage:
        for name, table in tables.items():
            stage.table(name, table, table.columns[0])
        stage.json("dataset", {"label": "locomo@79fa87e9"})
    ids = tables["questions"]["question_id"].to_list()[:located]
    base = stage_table(folder, "graph", "rankings").filter(pl.col("question_id").is_in(ids))
    evidence = base.filter(pl.col("rank") <= 2).select("question_id", "session_id", turn_id=pl.col("session_id") + "/t1", rank="rank")
    calls = pl.DataFrame({"question_id": ids * 2, "step": ["extract"] * len(ids) + ["rerank"] * len(ids), "n_prompt_tokens": 100,
                          "n_completion_tokens": 10, "seconds": 0.5})
    with Stage(folder, "locator", {"base": "memloc", "locator": "encoder", "top_k": 3}) as stage:
        stage.table("rankings", base.with_columns(system=pl.lit("memloc + encoder locator")), ["system", "question_id", "rank"])
        stage.table("evidence", evidence, ["question_id", "turn_id"])
        stage.table("calls", calls, ["question_id", "step"])
    answers = dict(tables["gold"].select("question_id", "answer").iter_rows())
    rows = [{"question_id": name, "variant": variant, "answer": (answers[name] if variant == "cue" else "fact") or "Not mentioned.",
             "abstained": not answers[name] and variant == "cue", "status": "error: timeout" if (name, variant) in failures else "ok",
             "n_prompt_tokens": 300, "n_completion_tokens": 5, "seconds": 1.5} for name in ids for variant in variants]
    with Stage(folder, "generation", {"model": "local:smollm2", "variant": ",".join(variants)}) as stage:
        stage.table("answers", pl.DataFrame(rows), ["variant", "question_id"])
        stage.json("traces", [])
    return folder


def cell(rows, **equal):
    return rows.filter(**equal).row(0, named=True)


def test_a_run_with_answers(tmp_path):
    rows = run_evaluation(CONFIG, make_answered(tmp_path))
    assert rows.schema == pl.Schema(ROWS)
    assert set(rows["table"]) == {"retrieval", "ablation", "evidence", "answers", "locator cost", "cost"}
    cue = {"table": "answers", "system": "cue (smollm2)", "split": "all"}
    assert cell(rows, **cue, metric="f1") | {"low": 100.0, "high": 100.0} == cell(rows, **cue, metric="f1")
    assert (cell(rows, **cue, metric="f1")["value"], cell(rows, **cue, metric="f1")["n"]) == (100.0, 30)
    assert (cell(rows, **cue, metric="f1_trap")["n"], cell(rows, **cue, metric="abstention")["n"]) == (40, 10)
    assert cell(rows, **cue, metric="abstention")["value"] == 100 and cell(rows, **cue, metric="over_abstention")["value"] == 0
    guess = cell(rows, table="answers", system="no memory (smollm2)", split="all, macro", metric="f1")
    assert guess["value"] == pytest.approx(100 * 2 / 3, abs=0.01) and guess["encoder"] == "none"
    assert cell(rows, table="answers", system=CONSTANT, split="all", metric="f1")["value"] == 0
    named = cell(rows, table="evidence", system="memloc + encoder locator", split="all", metric="evidence_recall")
    every = cell(rows, table="evidence", system="every turn of the first 3", split="all", metric="evidence_recall")
    assert named["n"] == every["n"] == 39 and 0 < named["value"] <= every["value"]
    assert cell(rows, table="cost", system="cue (smollm2)", split="all", metric="generator_tokens")["value"] == 300
    assert cell(rows, table="locator cost", split="all", metric="locator_tokens")["value"] == 220
    harm = stage_table(tmp_path, "evaluation", "paired").filter(system="memloc + encoder locator", against="memloc", split="all", metric="recall", k=3)
    assert (harm["difference"].item(), harm["n"].item(), harm["p_value"].item()) == (0.0, 39, 1.0)
    text = (tmp_path / "evaluation" / "report.md").read_text()
    for part in ("## Evidence, answers and cost", "cue (smollm2)", "evidence_recall (n 39)", "generator_tokens (n 40)"):
        assert part in text
    assert math.isfinite(json.loads((tmp_path / "evaluation" / "report.json").read_text())["seconds"]["generation"])
    back = pl.read_csv(tmp_path / "evaluation" / "rows.csv", schema=ROWS).with_columns(pl.col(pl.String).fill_null(""))
    assert back.equals(stage_table(tmp_path, "evaluation", "rows"))
    assert score_table(rows, "answers").frame["system"].to_list() == [CONSTANT, "cue (smollm2)", "no memory (smollm2)"]


def test_a_locator_on_a_subset_gets_a_table_of_its_own(tmp_path):
    rows = run_evaluation(CONFIG, make_answered(tmp_path, located=12))
    located = rows.filter(table="located", split="all", metric="recall", k=3)
    assert set(located["system"]) == {"memloc", "memloc + encoder locator", "ceiling"} and set(located["n"]) == {11}
    assert "memloc + encoder locator" not in rows.filter(table="retrieval")["system"].to_list()
    assert set(rows.filter(table="retrieval", split="all")["n"]) == {39}
    paired = stage_table(tmp_path, "evaluation", "paired").filter(split="all", metric="recall", k=3)
    assert dict(paired.select("system", "n").iter_rows()) == {"memloc": 39, "memloc + encoder locator": 11}


def test_failed_answers_are_left_out_for_all_and_listed(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        rows = run_evaluation(CONFIG, make_answered(tmp_path, failures=[("c1/q001", "none"), ("c1/q002", "cue")]))
    assert set(rows.filter(table="answers", split="all", metric="f1")["n"]) == {28}
    assert stage_table(tmp_path, "evaluation", "left_out").rows() == [
        ("c1/q001", "none: error: timeout"), ("c1/q002", "cue: error: timeout")]
    assert "2 of 40 questions have no answer of every variant" in caplog.text
    assert len(json.loads((tmp_path / "evaluation" / "report.json").read_text())["answers_left_out"]) == 2


def test_scores_above_a_known_ceiling_warn(tmp_path, caplog):
    make_answered(tmp_path)
    gold = stage_table(tmp_path, "data", "gold")
    wrong = gold.filter(category="multi-hop")["question_id"].to_list()
    path = tmp_path / "known.csv"
    path.write_text("question_id,action,answer\n" + "".join(f"{name},replace,other\n" for name in wrong))
    with caplog.at_level(logging.WARNING):
        rows = run_evaluation(EvaluationConfig(n_bootstrap=200, corrections=str(path)), tmp_path)
    ceiling = cell(rows, table="answers", system="ceiling", split="all", metric="exact_match")["value"]
    assert ceiling == pytest.approx(100 * 20 / 30, abs=0.01)
    assert "answers, cue (smollm2): exact_match of 100.00 on all is above the ceiling of 66.67" in caplog.text
    assert cell(rows, table="answers, corrected gold", system="cue (smollm2)", split="all", metric="exact_match")["value"] == ceiling
    assert stage_manifest(tmp_path, "evaluation")["counts"]["n_above_ceiling"] > 0


def test_dropped_questions_are_no_impossible_scores(tmp_path, caplog):
    make_answered(tmp_path)
    gold = stage_table(tmp_path, "data", "gold")
    path = tmp_path / "known.csv"
    path.write_text("question_id,action,answer\n" + "".join(f"{name},drop,\n" for name in gold.filter(category="multi-hop")["question_id"]))
    with caplog.at_level(logging.WARNING):
        rows = run_evaluation(EvaluationConfig(n_bootstrap=200, corrections=str(path)), tmp_path)
    assert "above the ceiling" not in caplog.text and stage_manifest(tmp_path, "evaluation")["counts"]["n_above_ceiling"] == 0
    assert cell(rows, table="answers", system="cue (smollm2)", split="all", metric="exact_match")["n"] == 30  # published gold, all questions
    assert {name for name in rows["table"] if name.startswith("answers")} == {"answers", "answers, corrected gold"}
    assert "known.csv" in stage_manifest(tmp_path, "evaluation")["inputs"]


def without_evidence(folder, keep=()):
    "The same run, with gold evidence taken away from all questions but these."
    tables = {name: stage_table(folder, "data", name) for name in ("conversations", "sessions", "questions", "gold", "turns") if (folder / "data" / f"{name}.parquet").is_file()}
    empty, kept = pl.lit([], dtype=pl.List(pl.String)), pl.col("question_id").is_in(list(keep))
    tables["gold"] = tables["gold"].with_columns(pl.when(kept).then(name).otherwise(empty).alias(name) for name in ("evidence_sessions", "evidence_turns"))
    with Stage(folder, "data", {"dataset": "locomo"}) as stage:
        for name, table in tables.items():
            stage.table(name, table, table.columns[0])
        stage.json("dataset", {"label": "locomo@79fa87e9"})


def test_answers_without_gold_evidence_are_scored(tmp_path, caplog):
    without_evidence(make_answered(tmp_path))
    rows = run_evaluation(CONFIG, tmp_path)
    assert rows.schema == pl.Schema(ROWS) and set(rows["table"]) == {"answers", "locator cost", "cost"}
    assert cell(rows, table="answers", system="cue (smollm2)", split="all", metric="f1")["value"] == 100
    assert "none of 40 questions can be scored ({'no gold evidence': 40}) as to retrieval" in caplog.text
    text = (tmp_path / "evaluation" / "report.md").read_text()
    assert "0 of 40 questions scored" in text and "no tables of rankings" in text and "cue (smollm2)" in text
    assert stage_table(tmp_path, "evaluation", "paired").is_empty()
    counts = stage_manifest(tmp_path, "evaluation")["counts"]
    assert (counts["n_scored"], counts["n_excluded"], counts["n_systems"]) == (0, 40, 0)


def test_the_cells_of_a_run_without_gold_evidence(tmp_path, root):
    import nbformat

    import memloc.evaluation
    import memloc.plots
    cells = nbformat.read(root / "nbs" / "08_evaluation.ipynb", as_version=4).cells
    source = [one.source for one in cells if one.cell_type == "code" and one.source.startswith("if run_dir")]
    for folder, known in ((make_answered(tmp_path / "whole"), True), (make_answered(tmp_path / "bare"), False)):
        shown, space = [], vars(memloc.plots) | vars(memloc.evaluation)
        if not known:
            without_evidence(folder)
        space |= {name: CONFIG.__dataclass_fields__[name].default for name in CONFIG.__dataclass_fields__}
        space |= {"run_dir": str(folder), "n_bootstrap": 200, "display": lambda *what, shown=shown: shown.extend(what)}
        for code in source:
            exec(code, space)  # noqa: S102
        assert len(shown) > (8 if known else 3)


def use_judge(monkeypatch, folder, say):
    "A judge that answers by a function, with a replay cache."
    from test_judge import Scripted

    import memloc.llm
    from memloc.chat import CachedModel
    monkeypatch.setattr(memloc.llm, "cached_model", lambda spec, stage: CachedModel(Scripted(say), folder / "replies", stage=stage))


def test_failed_calls_of_the_judge_are_counted_and_repeated(tmp_path, monkeypatch, caplog):
    from memloc.chat import LLMError
    make_answered(tmp_path)
    config = EvaluationConfig(n_bootstrap=200, judge_model="local:toy", judge_questions=8)

    def failing(rule, text):
        if "reasonable person" in rule and text.split("\n")[1] == 'Reference: "fact 1"':
            return LLMError("timeout", "after 1 s")
        return "perhaps" if "In doubt" in rule and text.split("\n")[1] == 'Reference: "fact 2"' else "yes"
    use_judge(monkeypatch, tmp_path, failing)
    monkeypatch.setattr("memloc.evaluation.judge_items", lambda *given: REAL_ITEMS(*given).filter(pl.col("question_id").str.contains("c1/q00[0-7]")))
    rows = run_evaluation(config, tmp_path)
    verdicts, counts = stage_table(tmp_path, "evaluation", "verdicts"), stage_manifest(tmp_path, "evaluation")["counts"]
    planted = stage_table(tmp_path, "evaluation", "judge")
    failed, unread = verdicts["status"].str.starts_with("error").sum(), (verdicts["status"] == "no verdict").sum()
    assert failed == unread == 2  # one question each, of two variants
    assert counts["errors"] == failed + planted["errors"].sum() and counts["no_verdict"] == unread + planted["no_verdict"].sum()
    assert "calls failed and were not kept; run the stage again to repeat just these. The first: error: timeout" in caplog.text
    assert "2 of 8 questions lack a readable verdict of some prompt" in caplog.text
    assert set(rows.filter(table="judge", split="all")["n"]) == {6}
    ledger = json.loads((tmp_path / "evaluation" / "judge_ledger.json").read_text())
    assert ledger[0]["stage"] == "judge" and ledger[0]["errors"] > 0
    use_judge(monkeypatch, tmp_path, lambda *_: "yes")
    run_evaluation(config, tmp_path)
    again = json.loads((tmp_path / "evaluation" / "judge_ledger.json").read_text())[0]
    assert 0 < again["calls"] <= ledger[0]["errors"] and stage_manifest(tmp_path, "evaluation")["counts"]["errors"] == 0


def test_a_judge_that_cannot_be_reached_is_an_error(tmp_path, monkeypatch):
    from memloc.chat import LLMError
    make_answered(tmp_path)
    use_judge(monkeypatch, tmp_path, lambda *_: LLMError("connection", "refused"))
    with pytest.raises(RuntimeError, match=r"judge: all 48 calls failed; the first: error: connection: refused"):
        run_evaluation(EvaluationConfig(n_bootstrap=200, judge_model="local:toy", judge_questions=8), tmp_path)
    assert not (tmp_path / "evaluation" / "manifest.json").exists()


def test_a_judge_in_a_run(tmp_path, monkeypatch):
    use_judge(monkeypatch, tmp_path, lambda rule, text: "yes" if "fact" in text.split("\n")[2] else "no")
    rows = run_evaluation(EvaluationConfig(n_bootstrap=200, judge_model="local:toy", judge_questions=8), make_answered(tmp_path))
    found = rows.filter(table="judge", split="all")
    assert set(found["metric"]) == {f"judge_{name}_toy" for name in ("strict", "lenient", "rubric")} and set(found["n"]) == {8}
    assert len(stage_table(tmp_path, "evaluation", "verdicts")) == 2 * 3 * 8
    examined = stage_table(tmp_path, "evaluation", "judge").filter(planted="wrong")
    assert examined["accepted"].to_list() == [1.0] * 3  # this judge accepts anything that says "fact": now it is known


def test_answers_twice_are_refused(tmp_path):
    make_answered(tmp_path)
    answers = stage_table(tmp_path, "generation", "answers")
    with Stage(tmp_path, "generation", {"model": "local:smollm2"}) as stage:
        stage.table("answers", pl.concat([answers, answers[:1]]), ["variant", "question_id"])
    with pytest.raises(ValueError, match="was answered twice by variant"):
        read_answers(tmp_path)


def test_metrics_without_a_shared_question_are_left_out(caplog):
    scores = as_scores([("A", "q1", "f1", 1.0), ("B", "q2", "f1", 1.0)])
    groups = pl.DataFrame({"split": ["all", "all"], "question_id": ["q1", "q2"]})
    assert summarise_scores(scores, groups, groups.select("question_id", category=pl.lit("x"))).is_empty()
    assert "no question has a value of every system" in caplog.text


def test_costs_without_calls():
    none = pl.DataFrame(schema={"question_id": pl.String, "step": pl.String, "n_prompt_tokens": pl.Int64, "n_completion_tokens": pl.Int64,
                                "seconds": pl.Float64})
    assert locator_costs(none, ["q"], "s")["value"].to_list() == [0.0, 0.0, 0.0]
