"""Metrics against independent implementations, statistics against scipy and statsmodels, the stage on a tiny run."""

import json
import logging
import math
import time

import ir_measures
import numpy as np
import polars as pl
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import RR, R, Success, nDCG
from statsmodels.stats.contingency_tables import mcnemar

from memloc.artifacts import Stage, stage_manifest, stage_table
from memloc.evaluation import (
    EvaluationConfig,
    ceiling_scores,
    evaluate_rankings,
    evidence_items,
    group_copies,
    question_groups,
    run_evaluation,
    score_run,
    split_gold,
)
from memloc.plots import category_bars, interval_dots, recall_curves
from memloc.routing import ranking_table
from memloc.tables import (
    METRICS,
    ROWS,
    above_ceiling,
    as_rows,
    beside_paper,
    load_paper,
    merge_rows,
    table,
)
from memloc.uncertainty import (
    intervals,
    mcnemar_p_value,
    paired_difference,
    paired_table,
    resample_counts,
    sign_flip_p_values,
    summarise,
)

KS = (1, 3, 5, 10)


def ranking_frame(lists):
    "{(system, question_id): [session_id, ...]} as a rankings table."
    rows = [
        (system, question, rank, session, 1 / rank)
        for (system, question), sessions in lists.items()
        for rank, session in enumerate(sessions, 1)
    ]
    return pl.DataFrame(
        rows,
        schema={
            "system": pl.String,
            "question_id": pl.String,
            "rank": pl.Int32,
            "session_id": pl.String,
            "score": pl.Float64,
        },
        orient="row",
    )


def gold_frame(evidence):
    "{question_id: [session_id, ...]} as a gold table."
    return pl.DataFrame(
        {"question_id": list(evidence), "evidence_sessions": list(evidence.values())},
        schema={"question_id": pl.String, "evidence_sessions": pl.List(pl.String)},
    )


def values_of(scores):
    "{(system, question_id, metric, k): value}."
    return {row[:4]: row[4] for row in scores.iter_rows()}


@st.composite
def problems(draw):
    "Random rankings, whole or cut, and evidence, some of it not ranked."
    n_sessions, n_questions = draw(st.integers(1, 14)), draw(st.integers(1, 4))
    sessions = [f"s{i:02d}" for i in range(n_sessions)]
    lists = {
        ("a", f"q{i}"): draw(st.permutations(sessions))[: draw(st.integers(1, n_sessions))] for i in range(n_questions)
    }
    evidence = {
        f"q{i}": draw(st.lists(st.sampled_from([*sessions, "elsewhere"]), min_size=1, max_size=6, unique=True))
        for i in range(n_questions)
    }
    return lists, evidence


@settings(max_examples=60, deadline=None)
@given(problems())
def test_metrics_agree_with_ir_measures(problem):
    lists, evidence = problem
    ours = values_of(evaluate_rankings(ranking_frame(lists), gold_frame(evidence), KS))
    qrels = [ir_measures.Qrel(question, session, 1) for question, sessions in evidence.items() for session in sessions]
    run = [
        ir_measures.ScoredDoc(question, session, -rank)
        for (_, question), sessions in lists.items()
        for rank, session in enumerate(sessions)
    ]
    names = {R: "recall", nDCG: "ndcg", RR: "mrr"}
    wanted = [measure @ k for measure in names for k in KS]
    n_compared = 0
    for found in ir_measures.iter_calc(wanted, qrels, run):
        name = {"R": "recall", "nDCG": "ndcg", "RR": "mrr"}[found.measure.NAME]
        assert ours["a", found.query_id, name, found.measure["cutoff"]] == pytest.approx(found.value, abs=1e-9)
        n_compared += 1
    assert n_compared == len(wanted) * len(evidence)


def plain_lme_ndcg(flags, n_relevant, k):
    "LongMemEval's definition as a loop: the first value whole, then 1/log2(2), 1/log2(3), ..."

    def gain(values):
        total = 0.0
        for i, value in enumerate(values[:k]):
            total += value if i == 0 else value / math.log2(i + 1)
        return total

    return gain(flags) / gain([1] * n_relevant)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_all_any_and_lme_ndcg_agree_with_loops(problem):
    lists, evidence = problem
    ours = values_of(evaluate_rankings(ranking_frame(lists), gold_frame(evidence), KS))
    for (system, question), sessions in lists.items():
        for k in KS:
            found = [session in sessions[:k] for session in evidence[question]]
            assert ours[system, question, "recall_all", k] == float(all(found))
            assert ours[system, question, "recall_any", k] == float(any(found))
            flags = [int(session in evidence[question]) for session in sessions]
            expected = plain_lme_ndcg(flags, len(evidence[question]), k)
            assert ours[system, question, "ndcg_lme", k] == pytest.approx(expected, abs=1e-12)
            assert (
                ours[system, question, "recall_all", k]
                <= ours[system, question, "recall", k]
                <= ours[system, question, "recall_any", k]
            )


IR_NAMES = {"R": "recall", "nDCG": "ndcg", "RR": "mrr", "Success": "recall_any"}


def in_ir_measures(evidence, scored, measures=(R, nDCG, RR, Success), ks=KS):
    "{(question, metric, k): value} of rankings {question: {session: score}}."
    qrels = [ir_measures.Qrel(question, session, 1) for question, sessions in evidence.items() for session in sessions]
    run = [ir_measures.ScoredDoc(question, session, score) for question, each in scored.items() for session, score in each.items()]
    found = ir_measures.iter_calc([measure @ k for measure in measures for k in ks], qrels, run)
    return {(one.query_id, IR_NAMES[one.measure.NAME], one.measure["cutoff"]): one.value for one in found}


@st.composite
def tied_problems(draw):
    "Scores of which many are equal, and evidence, some of it not ranked."
    sessions = [f"s{i:02d}" for i in range(draw(st.integers(1, 12)))]
    scores = {f"q{i}": {session: draw(st.sampled_from([0.0, 0.5, 1.0])) for session in sessions} for i in range(draw(st.integers(1, 3)))}
    evidence = {name: draw(st.lists(st.sampled_from([*sessions, "elsewhere", "nowhere"]), min_size=1, max_size=5, unique=True)) for name in scores}
    return scores, evidence


def mirrored(session):
    "A name that sorts the other way round."
    return "".join(chr(0x7E - ord(character) + 0x21) for character in session)


@settings(max_examples=30, deadline=None)
@given(tied_problems())
def test_ties_go_by_name_and_then_agree_with_ir_measures(problem):
    scores, evidence = problem
    names = list(next(iter(scores.values())))
    values = np.array([[each[name] for name in names] for each in scores.values()])
    ours = values_of(evaluate_rankings(ranking_table("a", list(scores), names, values), gold_frame(evidence), KS))
    theirs = in_ir_measures(evidence, scores, [RR])  # ties by ascending name, as ours
    theirs |= in_ir_measures(  # the other measures break ties by descending name
        {question: [mirrored(session) for session in each] for question, each in evidence.items()},
        {question: {mirrored(session): score for session, score in each.items()} for question, each in scores.items()},
        [R, nDCG, Success])
    assert len(theirs) == len(evidence) * len(IR_NAMES) * len(KS)
    for (question, metric, k), value in theirs.items():
        assert ours["a", question, metric, k] == pytest.approx(value, abs=1e-9), (metric, k)
        if metric == "recall":
            assert ours["a", question, "recall_all", k] == float(value > 1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_lme_ndcg_is_the_standard_gain_of_the_ranking_without_its_first(problem):
    lists, evidence = problem
    ours = values_of(evaluate_rankings(ranking_frame(lists), gold_frame(evidence), KS))
    rest = {question: {session: -rank for rank, session in enumerate(sessions[1:])} for (_, question), sessions in lists.items()}
    rest = {question: each or {"none": 0.0} for question, each in rest.items()}
    theirs = in_ir_measures(evidence, rest, [nDCG], [k - 1 for k in KS if k > 1])

    def ideal(n, k):
        return sum(1 / math.log2(rank + 1) for rank in range(1, min(n, k) + 1))

    for (_, question), sessions in lists.items():
        n, first = len(evidence[question]), float(sessions[0] in evidence[question])
        assert ours["a", question, "ndcg_lme", 1] == first
        for k in KS[1:]:
            gain = first + theirs[question, "ndcg", k - 1] * ideal(n, k - 1)
            assert ours["a", question, "ndcg_lme", k] == pytest.approx(gain / (1 + ideal(n - 1, k - 1)), abs=1e-9)


# Ranking s4 s1 s5 s2 s3; evidence s1 (rank 2), s2 (rank 4), s9 (not ranked). 1/log2(3) = 0.6309, 1/log2(5) = 0.4307
#   ndcg: gains 1/log2(rank + 1), the best three are 1 + 0.6309 + 0.5 = 2.1309 (at k = 1: 1)
#   ndcg_lme: gains 1, 1, 1/log2(3), 1/log2(4), ..., the best three are 1 + 1 + 0.6309 = 2.6309
BY_HAND = {
    "recall": {1: 0, 3: 1 / 3, 5: 2 / 3, 10: 2 / 3},
    "recall_all": {1: 0, 3: 0, 5: 0, 10: 0},
    "recall_any": {1: 0, 3: 1, 5: 1, 10: 1},
    "ndcg": {1: 0, 3: 0.6309 / 2.1309, 5: (0.6309 + 0.4307) / 2.1309, 10: (0.6309 + 0.4307) / 2.1309},
    "ndcg_lme": {1: 0, 3: 1 / 2.6309, 5: (1 + 0.5) / 2.6309, 10: (1 + 0.5) / 2.6309},
    "mrr": {1: 0, 3: 1 / 2, 5: 1 / 2, 10: 1 / 2},
}


def test_a_ranking_worked_by_hand():
    ours = values_of(evaluate_rankings(ranking_frame({("a", "q"): ["s4", "s1", "s5", "s2", "s3"]}), gold_frame({"q": ["s1", "s2", "s9"]}), KS))
    assert {metric for _, _, metric, _ in ours} == set(BY_HAND)
    for metric, at in BY_HAND.items():
        for k, value in at.items():
            assert ours["a", "q", metric, k] == pytest.approx(value, abs=1e-4), (metric, k)


def test_published_definitions_differ_and_both_are_there():
    rankings = ranking_frame({("first", "q"): ["s1", "s2", "s3"], ("second", "q"): ["s2", "s1", "s3"], ("second", "p"): ["s1", "s3", "s2"],
                              ("first", "p"): ["s1", "s3", "s2"]})
    ours = values_of(evaluate_rankings(rankings, gold_frame({"q": ["s1"], "p": ["s1", "s2"]}), (1, 2)))
    assert [ours[system, "q", "ndcg", 2] for system in ("first", "second")] == pytest.approx([1, 1 / math.log2(3)])
    assert [ours[system, "q", "ndcg_lme", 2] for system in ("first", "second")] == [1, 1]  # LongMemEval's cannot tell them apart
    assert [ours["first", "p", metric, 2] for metric in ("recall_any", "recall", "recall_all")] == [1, 0.5, 0]  # one of two pieces
    assert (ours["first", "p", "recall", 1], ours["first", "p", "ndcg", 1]) == (0.5, 1)  # at k = 1 recall cannot be whole, the gain can


@settings(max_examples=40, deadline=None)
@given(problems())
def test_nothing_exceeds_the_ceiling(problem):
    lists, evidence = problem
    ours = values_of(evaluate_rankings(ranking_frame(lists), gold_frame(evidence), KS))
    best = values_of(ceiling_scores(gold_frame(evidence), KS))
    for (_, question, metric, k), value in ours.items():
        assert value <= best["ceiling", question, metric, k] + 1e-12
    for question, sessions in evidence.items():
        assert best["ceiling", question, "recall", 3] == pytest.approx(min(3, len(sessions)) / len(sessions))


def test_copies_of_a_session_are_one_item():
    sessions = pl.DataFrame(
        {
            "session_id": ["c/s0", "c/s1", "c/s2", "c/s3"],
            "conversation_id": "c",
            "source_session_id": ["x", "y", "x", None],
        }
    )
    gold = group_copies(gold_frame({"q": ["c/s0", "c/s1", "c/s2"], "p": ["c/s3"], "none": []}), sessions)
    assert gold["evidence_groups"].to_list() == [[["c/s0", "c/s2"], ["c/s1"]], [["c/s3"]], None]
    rankings = ranking_frame(
        {("a", "q"): ["c/s2", "c/s1", "c/s0", "c/s3"], ("a", "p"): ["c/s3", "c/s0", "c/s1", "c/s2"]}
    )
    ours = values_of(evaluate_rankings(rankings, gold, (1, 2)))
    assert ours["a", "q", "recall", 1] == 0.5
    assert ours["a", "q", "recall_all", 2] == ours["a", "q", "ndcg", 2] == 1.0
    assert values_of(ceiling_scores(gold, (1,)))["ceiling", "q", "recall", 1] == 0.5


def test_repeated_and_missing_evidence():
    assert evidence_items(gold_frame({"q": ["s1", "s1"], "p": [], "r": ["s2"]})).rows() == [
        ("q", 1, "s1"),
        ("r", 1, "s2"),
    ]
    nothing = pl.DataFrame(
        {"question_id": ["q"], "evidence_sessions": [None]}, schema_overrides={"evidence_sessions": pl.List(pl.String)}
    )
    assert evidence_items(nothing).is_empty()


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({("a", "q"): ["s1", "s1"]}, "system 'a', question 'q': ranks must be"),
        ({("a", "p"): ["s1"]}, "system 'a' has no ranking for question 'q'"),
        ({("a", "q"): ["s1"], ("b", "p"): ["s1"]}, "system 'b' has no ranking for question 'q'"),
    ],
)
def test_broken_rankings_are_refused(lists, message):
    with pytest.raises(ValueError, match=message):
        evaluate_rankings(ranking_frame(lists), gold_frame({"q": ["s1"]}))


def test_ranks_must_start_at_one():
    shifted = ranking_frame({("a", "q"): ["s1", "s2"]}).with_columns(pl.col("rank") - 1)
    with pytest.raises(ValueError, match="ranks must be 1, 2, 3"):
        evaluate_rankings(shifted, gold_frame({"q": ["s1"]}))


def test_abstention_by_dataset():
    gold = gold_frame({"q1": ["s"], "q2": ["s"], "q3": []}).with_columns(
        category=pl.Series(["single-hop", "adversarial", "temporal"]), is_abstention=pl.Series([False, True, None])
    )
    assert split_gold(gold, "locomo@79fa87e9")[0]["question_id"].to_list() == ["q1", "q2"]
    scored, excluded = split_gold(gold, "longmemeval_s@12345678")
    assert scored["question_id"].to_list() == ["q1"]
    assert excluded.rows() == [("q2", "adversarial", "abstention question"), ("q3", "temporal", "no gold evidence")]
    assert len(split_gold(gold, "longmemeval_s", "never")[0]) == 2


def random_scores(n, systems, seed=0, ks=KS):
    "Rankings of 20 sessions for n questions, and their gold."
    rng = np.random.default_rng(seed)
    sessions = np.array([f"s{i:02d}" for i in range(20)])
    lists = {(system, f"q{i:04d}"): sessions[rng.permutation(20)].tolist() for system in systems for i in range(n)}
    evidence = {f"q{i:04d}": sessions[rng.choice(20, rng.integers(1, 4), replace=False)].tolist() for i in range(n)}
    return ranking_frame(lists), gold_frame(evidence)


def test_intervals_agree_with_scipy():
    values = np.random.default_rng(3).choice([0, 0.5, 1], size=(300, 2), p=[0.3, 0.2, 0.5])
    low, high = intervals(values, resample_counts(300, 4000, seed=5))
    for column in range(2):
        theirs = scipy.stats.bootstrap(
            (values[:, column],), np.mean, method="percentile", n_resamples=4000, rng=1
        ).confidence_interval
        assert low[column] == pytest.approx(theirs.low, abs=0.006)
        assert high[column] == pytest.approx(theirs.high, abs=0.006)


def test_sign_flips_agree_with_scipy():
    rng = np.random.default_rng(4)
    a = rng.choice([0.0, 0.5, 1.0], size=80)
    b = np.where(rng.random(80) < 0.3, rng.choice([0.0, 1.0], size=80), a)
    theirs = scipy.stats.permutation_test(
        (a, b),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        n_resamples=20_000,
        vectorized=True,
        rng=2,
    ).pvalue
    assert sign_flip_p_values((a - b)[:, None], 20_000, 7)[0] == pytest.approx(theirs, abs=0.02)


def test_sign_flips_are_exact_for_few_questions():
    assert sign_flip_p_values(np.ones((5, 1)), 20_000, 1)[0] == pytest.approx(2 / 2**5, abs=0.005)


def test_mcnemar_agrees_with_statsmodels():
    rng = np.random.default_rng(8)
    for _ in range(20):
        a, b = rng.integers(0, 2, size=(2, 40))
        counts = [[int(((a == x) & (b == y)).sum()) for y in (0, 1)] for x in (0, 1)]
        assert mcnemar_p_value(a, b) == pytest.approx(mcnemar(counts, exact=True).pvalue, abs=1e-12)


def test_mcnemar_by_hand():
    # six questions only a has, one only b has: 2 * (C(7,0) + C(7,1)) / 2**7 = 2 * 8 / 128
    a, b = np.array([1] * 6 + [0] + [1] * 10 + [0] * 3), np.array([0] * 6 + [1] + [1] * 10 + [0] * 3)
    assert mcnemar_p_value(a, b) == mcnemar_p_value(b, a) == pytest.approx(0.125)
    assert mcnemar_p_value(a[:6], b[:6]) == pytest.approx(2 / 2**6)  # six to none
    assert mcnemar_p_value(a[7:], b[7:]) == 1.0  # they never differ


def test_paired_statistics_agree_with_scipy():
    rankings, gold = random_scores(150, ["a", "b"], seed=2)
    scores = evaluate_rankings(rankings, gold, (5,))
    row = paired_table(scores, "a", ["b"], n_bootstrap=4000, seed=3).filter(metric="recall_all").row(0, named=True)
    a, b = (scores.filter(system=name, metric="recall_all").sort("question_id")["value"].to_numpy() for name in "ab")

    def difference(x, y, axis=-1):
        return 100 * (x.mean(axis=axis) - y.mean(axis=axis))

    theirs = scipy.stats.bootstrap((a, b), difference, paired=True, method="percentile", n_resamples=4000, rng=1).confidence_interval
    assert row["difference"] == pytest.approx(difference(a, b), abs=1e-3)
    assert (row["low"], row["high"]) == (pytest.approx(theirs.low, abs=0.8), pytest.approx(theirs.high, abs=0.8))
    tested = scipy.stats.permutation_test((a, b), difference, permutation_type="samples", n_resamples=20_000, vectorized=True, rng=2)
    assert row["p_value"] == pytest.approx(tested.pvalue, abs=0.025)
    wins, losses = int((a > b).sum()), int((a < b).sum())
    assert wins > 5 and losses > 5 and row["p_mcnemar"] == pytest.approx(scipy.stats.binomtest(wins, wins + losses).pvalue, abs=1e-12)
    unpaired = scipy.stats.bootstrap((a, a), difference, paired=False, method="percentile", n_resamples=999, rng=1).confidence_interval
    assert unpaired.high > 1 and paired_difference(a, a)["high"] == 0  # pairing is what makes equal systems equal


def test_summary_and_pairs_match_plain_means():
    rankings, gold = random_scores(120, ["a", "b"])
    scores = evaluate_rankings(rankings, gold)
    groups = pl.DataFrame(
        {"split": ["all"] * 120 + ["dev"] * 30, "question_id": [f"q{i:04d}" for i in [*range(120), *range(30)]]}
    )
    summary = summarise(scores, groups, n_bootstrap=300, seed=1)
    dev = (
        scores.filter(pl.col("question_id") < "q0030")
        .group_by("system", "metric", "k")
        .agg((100 * pl.col("value").mean()).alias("plain"))
    )
    both = summary.filter(pl.col("split") == "dev").join(dev, on=["system", "metric", "k"])
    assert len(both) == 2 * 6 * 4 and both["n"].unique().to_list() == [30]
    assert (both["value"] - both["plain"]).abs().max() < 1e-3
    assert ((summary["low"] <= summary["value"] + 1e-6) & (summary["value"] <= summary["high"] + 1e-6)).all()
    one = {
        name: scores.filter(system=name, metric="ndcg", k=5).sort("question_id")["value"].to_numpy() for name in "ab"
    }
    alone = paired_difference(one["a"], one["b"], n_bootstrap=300, seed=1)
    row = paired_table(scores, "a", ["b"], groups, 300, 1).filter(split="all", metric="ndcg", k=5).row(0, named=True)
    assert row["difference"] == pytest.approx(100 * alone["difference"], abs=1e-3)
    assert (row["p_value"], row["n"]) == (alone["p_value"], 120)
    assert row["low"] == pytest.approx(100 * alone["low"], abs=1e-3)


def test_same_seed_same_numbers():
    rankings, gold = random_scores(50, ["a"])
    scores = evaluate_rankings(rankings, gold)
    shuffled = evaluate_rankings(rankings.sample(fraction=1, shuffle=True, seed=1), gold.reverse())
    assert scores.equals(shuffled)
    assert summarise(scores, seed=4).equals(summarise(shuffled, seed=4))
    assert not summarise(scores, seed=4).equals(summarise(scores, seed=5))


def test_fast_enough():
    rankings, gold = random_scores(2000, [f"system {i:02d}" for i in range(20)])
    start = time.perf_counter()
    summary = summarise(evaluate_rankings(rankings, gold))
    assert len(summary) == 20 * len(KS) * 6
    assert time.perf_counter() - start < 20  # about 3 s on an idle machine


def rows_for(systems, split="all", dataset="locomo@79fa87e9", **changes):
    summary = pl.DataFrame(
        [
            {
                "system": system,
                "metric": "recall",
                "k": k,
                "value": 10.0 * k,
                "low": 9.0 * k,
                "high": 10.5 * k,
                "n": 50,
                "split": split,
            }
            for system in systems
            for k in (3, 5)
        ]
    )
    return as_rows(summary, "retrieval", dataset, "minilm", "2026-01-02", "abc1234").with_columns(
        **{k: pl.lit(v) for k, v in changes.items()}
    )


@pytest.mark.parametrize(
    "change",
    [{"metric": "recall_all"}, {"split": "dev"}, {"dataset": "locomo@00000000"}, {"dataset": "other"}, {"commit": "z"},
     {"dataset": "locomo@79fa87e9 stratified:200 seed 13"}, {"dataset": "locomo@79fa87e9 first 40"}],
)
def test_merging_what_differs_is_refused(change):
    with pytest.raises(ValueError):
        merge_rows(rows_for(["a"]), rows_for(["a"], **change))


def test_a_subset_stands_beside_nothing_else():
    part = "locomo@79fa87e9 stratified:200 seed 13"
    assert len(merge_rows(rows_for(["a"], dataset=part), rows_for(["b"], dataset=part))) == 4
    for other in ("locomo@79fa87e9", "locomo", "locomo@79fa87e9 stratified:200 seed 14", "locomo@79fa87e9 stratified:100 seed 13"):
        with pytest.raises(ValueError, match="rows of a subset of the questions and of others"):
            merge_rows(rows_for(["a"], dataset=part), rows_for(["b"], dataset=other))
    paper, notes = load_paper()
    assert beside_paper(rows_for(["memloc"], dataset="locomo@79fa87e9"), paper, notes) and not beside_paper(rows_for(["memloc"], dataset=part), paper, notes)
    low = rows_for(["ceiling"], dataset=part).with_columns(value=pl.lit(1.0))
    assert above_ceiling(rows_for(["a"], dataset=part), low).height == 2  # the ceiling of the subset
    assert above_ceiling(rows_for(["a"], dataset="locomo@79fa87e9"), low).is_empty()  # says nothing about the whole


def test_longmemeval_s_is_not_m():
    paper = rows_for(["p"], dataset="longmemeval_s", table="paper")
    assert len(merge_rows(rows_for(["a"], dataset="longmemeval_s@1"), paper)) == 4
    for other in ("longmemeval_m@1", "longmemeval_oracle@1"):
        with pytest.raises(ValueError, match="do not belong"):
            merge_rows(rows_for(["a"], dataset=other), paper)


def test_table_names_everything():
    shown = table(rows_for(["b", "a", "BM25 session"]))
    for part in ("recall:", "split all", "n 50", "dataset locomo@79fa87e9", "date 2026-01-02", "commit abc1234"):
        assert part in shown.heading
    assert shown.frame.columns == ["system", "encoder", "recall@3", "recall@5"]
    assert shown.frame.row(0) == ("BM25 session", "none", "30.00 [27.0, 31.5]", "50.00 [45.0, 52.5]")
    assert "| a | minilm | 30.00 [27.0, 31.5] |" in str(shown)


def test_paper_rows():
    paper, notes = load_paper()
    assert paper.schema == pl.Schema(ROWS)
    ranked = {"recall", "recall_all", "ndcg_unstated"}
    assert set(paper.drop_nulls("k").filter(~pl.col("table").str.contains("Figure"))["metric"]) == ranked and ranked <= set(METRICS)
    assert len(paper.join(notes, on=["table", "dataset", "system"], how="anti")) == 0
    full = paper.filter(dataset="locomo", system="MemLoc (Full)", metric="recall").sort("k")["value"].to_list()
    assert full == [77.85, 81.72, 90.09]
    assert paper.filter(table="paper Table 9", system="MemLoc w/o locator", metric="recall", k=3)[
        "value"
    ].to_list() == [53.19]
    others = paper.filter(metric="recall_all")
    assert dict(others.group_by("dataset").agg(pl.col("n").first()).iter_rows()) == {
        "locomo": 1986,
        "longmemeval_s": 470,
        "longmemeval_m": 470,
    }
    found = (others["value"] * others["n"] / 100).round() * 100 / others["n"]
    assert (found - others["value"]).abs().max() < 0.00501  # a whole number of questions each


def test_impossible_rows_are_reported(caplog):
    ceiling = rows_for(["ceiling"]).with_columns(pl.lit(29.0).alias("value"))
    with caplog.at_level(logging.WARNING):
        found = above_ceiling(rows_for(["a"], dataset="LoCoMo"), ceiling)
    assert found.select("system", "k", "ceiling").rows() == [("a", 3, 29.0), ("a", 5, 29.0)]
    assert "above the ceiling of 29.00" in caplog.text


def make_run(folder, dataset="locomo", n=40, seed=0):
    "A run folder as the stages before evaluation leave it: two conversations, six sessions each, four systems."
    rng, conversations = np.random.default_rng(seed), ["c1", "c2"]
    sessions = pl.DataFrame(
        [
            {"session_id": f"{c}/s{i:03d}", "conversation_id": c, "source_session_id": f"session_{i}"}
            for c in conversations
            for i in range(6)
        ]
    )
    questions = pl.DataFrame(
        [
            {"question_id": f"{c}/q{i:03d}", "conversation_id": c, "question": "?"}
            for c in conversations
            for i in range(n // 2)
        ]
    )
    kinds = ["multi-hop", "temporal", "single-hop", "adversarial"]
    gold = questions.select("question_id").with_columns(
        category=pl.Series([kinds[i % 4] for i in range(n)]),
        is_abstention=pl.Series([i % 4 == 3 for i in range(n)]),
        evidence_sessions=pl.Series(
            [
                [f"{c}/s{j:03d}" for j in rng.choice(6, 1 + (i % 4 == 0), replace=False)] if i else []
                for i, c in enumerate(questions["conversation_id"])
            ],
            dtype=pl.List(pl.String),
        ),
    )
    with Stage(folder, "data", {"dataset": dataset}) as stage:
        stage.table(
            "conversations",
            pl.DataFrame({"conversation_id": conversations, "split": ["dev", "test"]}),
            "conversation_id",
        )
        stage.table("sessions", sessions, "session_id")
        stage.table("questions", questions, "question_id")
        stage.table("gold", gold, "question_id")
        stage.json("dataset", {"name": dataset, "sha256": "79fa87e9" * 8, "label": f"{dataset}@79fa87e9"})
        stage.count(questions=n)
    with Stage(folder, "units", {"encoder": "minilm"}) as stage:
        stage.count(missing_event=2, n_truncated=7)

    def ranked(system, skill):
        lists = {}
        for question, evidence in gold.select("question_id", "evidence_sessions").iter_rows():
            names = sessions.filter(pl.col("conversation_id") == question.split("/")[0])["session_id"].to_list()
            lists[system, question] = sorted(names, key=lambda name: -rng.random() - skill * (name in evidence))
        return ranking_frame(lists)

    systems = {
        "routing": {"BM25 session": 0.4, "view turn": 0.1, "memloc: routing": 0.5, "memloc: routing, uniform": 0.4},
        "graph": {"memloc": 0.8},
    }
    for name, parts in systems.items():
        with Stage(folder, name, {}) as stage:
            stage.table(
                "rankings",
                pl.concat([ranked(system, skill) for system, skill in parts.items()]),
                ["system", "question_id", "rank"],
            )
    return folder


CONFIG = EvaluationConfig(n_bootstrap=200)


def test_stage_writes_everything(tmp_path):
    rows = run_evaluation(CONFIG, make_run(tmp_path))
    assert rows.schema == pl.Schema(ROWS)
    assert rows.equals(rows.unique(maintain_order=True)) and set(rows["dataset"]) == {"locomo@79fa87e9"}
    assert {"all", "dev", "test", "all/multi-hop", "all/answerable", "test/adversarial"} <= set(rows["split"])
    assert rows.filter(split="all")["n"].unique().to_list() == [39]
    assert rows.filter(split="all/answerable")["n"].unique().to_list() == [29]
    assert dict(rows.select("system", "preset").unique().iter_rows())["memloc: routing"] == "memloc"
    assert set(rows.filter(pl.col("encoder") == "none")["system"]) == {"BM25 session", "ceiling"}
    assert set(rows.filter(table="ablation")["system"]) == {"memloc: routing, uniform"}
    written = {path.name for path in (tmp_path / "evaluation").iterdir()}
    assert written == {
        "rows.parquet",
        "rows.csv",
        "per_question.parquet",
        "paired.parquet",
        "excluded.parquet",
        "report.json",
        "report.md",
        "manifest.json",
    }
    back = pl.read_csv(tmp_path / "evaluation" / "rows.csv", schema=ROWS).with_columns(pl.col(pl.String).fill_null(""))
    assert back.equals(stage_table(tmp_path, "evaluation", "rows"))
    assert stage_table(tmp_path, "evaluation", "excluded").rows() == [("c1/q000", "multi-hop", "no gold evidence")]
    assert stage_manifest(tmp_path, "evaluation")["counts"]["n_scored"] == 39


def test_report_says_what_was_measured(tmp_path):
    run_evaluation(CONFIG, make_run(tmp_path))
    report = json.loads((tmp_path / "evaluation" / "report.json").read_text())
    assert (report["dataset"], report["n_questions"], report["n_scored"]) == ("locomo@79fa87e9", 40, 39)
    assert report["excluded"] == {"no gold evidence": 1}
    assert report["stages"]["units"]["counts"] == {"missing_event": 2, "n_truncated": 7}
    assert report["settings"]["n_bootstrap"] == 200 and report["date"] and report["commit"]
    assert {row["against"] for row in report["paired"]} == {"BM25 session"}
    text = (tmp_path / "evaluation" / "report.md").read_text()
    for part in ("39 of 40 questions scored; excluded: 1 no gold evidence", "memloc", "MemLoc w/o locator", "McNemar"):
        assert part in text


def test_figures_of_a_run(tmp_path):
    rows = run_evaluation(CONFIG, make_run(tmp_path)).filter(table="retrieval")
    figures = [recall_curves(rows), category_bars(rows), interval_dots(rows, k=3)]
    for i, figure in enumerate(figures):
        axes = figure.axes[0]
        assert axes.get_title(loc="left") and axes.get_xlabel() and axes.get_ylabel()
        figure.savefig(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 5000


def test_gold_changes_only_the_scores(tmp_path):
    scores = score_run(CONFIG, make_run(tmp_path), "", "")
    again = score_run(CONFIG, tmp_path, "", "")
    assert scores.rows.equals(again.rows) and scores.paired.equals(again.paired)


def test_published_rows_stand_beside_ours_by_metric(tmp_path):
    rows = run_evaluation(CONFIG, make_run(tmp_path)).filter(table="retrieval")
    recall, recall_all = beside_paper(rows, *load_paper())
    main = recall.frame.filter(table="paper Table 2/7")["system"].to_list()
    assert "MemLoc (Full)" in main and "SeCom" not in main
    assert (
        "SeCom" in recall_all.frame["system"].to_list() and "MemLoc (Full)" not in recall_all.frame["system"].to_list()
    )
    assert recall.frame.filter(system="MemLoc (Full)")["note"].to_list()[0].startswith("fractional recall")
    assert beside_paper(rows.with_columns(dataset=pl.lit("sample@1")), *load_paper()) == []


def test_longmemeval_leaves_abstention_out(tmp_path):
    rows = run_evaluation(CONFIG, make_run(tmp_path, dataset="longmemeval_s"))
    assert rows.filter(split="all")["n"].unique().to_list() == [29]
    assert "all/answerable" not in rows["split"]


def test_missing_pieces_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the stage 'data' first"):
        run_evaluation(CONFIG, tmp_path)
    make_run(tmp_path)
    with pytest.raises(ValueError, match="no system 'mem0'; the rankings have"):
        run_evaluation(EvaluationConfig(compare="mem0"), tmp_path)
    assert not (tmp_path / "evaluation" / "manifest.json").exists()
    with pytest.raises(FileNotFoundError, match=r"absent\.csv: no such file of published rows"):
        run_evaluation(EvaluationConfig(n_bootstrap=100, paper_rows="absent.csv"), tmp_path)


def test_two_stages_may_not_use_one_name(tmp_path):
    make_run(tmp_path)
    rankings = stage_table(tmp_path, "graph", "rankings")
    with Stage(tmp_path, "locator", {}) as stage:
        stage.table("rankings", rankings, ["system", "question_id", "rank"])
    with pytest.raises(ValueError, match="system 'memloc' is ranked by the stages 'graph' and 'locator'"):
        score_run(CONFIG, tmp_path, "", "")


def test_nothing_to_score(tmp_path):
    make_run(tmp_path, n=2)
    gold = stage_table(tmp_path, "data", "gold").with_columns(evidence_sessions=pl.lit([], dtype=pl.List(pl.String)))
    tables = {name: stage_table(tmp_path, "data", name) for name in ("conversations", "sessions", "questions")}
    with Stage(tmp_path, "data", {}) as stage:
        for name, content in (tables | {"gold": gold}).items():
            stage.table(name, content, content.columns[0])
        stage.json("dataset", {"label": "locomo@1"})
    with pytest.raises(ValueError, match="none of 2 questions can be scored .*, and there are no answers either; give questions with gold evidence"):
        run_evaluation(CONFIG, tmp_path)
    with Stage(tmp_path, "data", {}) as stage:
        for name, content in (tables | {"gold": gold[:0], "questions": tables["questions"][:0]}).items():
            stage.table(name, content, content.columns[0])
        stage.json("dataset", {"label": "locomo@1"})
    with pytest.raises(ValueError, match="locomo@1: no questions; give the data stage a file whose conversations have questions"):
        run_evaluation(CONFIG, tmp_path)


def test_files_of_the_settings_are_inputs(tmp_path):
    make_run(tmp_path)
    rows = load_paper()[0]
    rows.write_csv(tmp_path / "published.csv")
    run_evaluation(EvaluationConfig(n_bootstrap=100, paper_rows=str(tmp_path / "published.csv")), tmp_path)
    assert "published.csv" in stage_manifest(tmp_path, "evaluation")["inputs"]
    with pytest.raises(FileNotFoundError, match=r"absent\.csv: no such list of corrections"):
        run_evaluation(EvaluationConfig(n_bootstrap=100, corrections="absent.csv"), tmp_path)


def test_the_encoder_of_a_locator_is_told():
    names = ["BM25 session", "BM25 session + encoder locator", "BM25 session + llm locator", "memloc + encoder locator"]
    rows = rows_for(names).unique("system", maintain_order=True)
    assert dict(rows.select("system", "encoder").iter_rows()) == dict(zip(names, ["none", "minilm", "none", "minilm"], strict=True))


def test_odd_categories_are_groups_of_their_own(caplog):
    gold = gold_frame({name: ["s"] for name in "pqrst"}).with_columns(
        category=pl.Series([None, "", "answerable", "adversarial", "temporal"]), is_abstention=pl.Series([False] * 3 + [True, False]))
    questions = gold.select("question_id", conversation_id=pl.lit("c"))
    groups = question_groups(gold, questions, pl.DataFrame({"conversation_id": ["c"], "split": ["test"]}))
    members = {name: "".join(part) for name, part in groups.group_by("split", maintain_order=True).agg("question_id").iter_rows()}
    assert groups["split"].null_count() == 0
    assert (members["all/unspecified"], members["all/answerable (category)"], members["all/answerable"]) == ("pq", "r", "pqrt")
    assert "shown as 'answerable (category)'" in caplog.text


def test_question_without_conversation_is_an_error():
    gold = gold_frame({"q": ["s"]}).with_columns(category=pl.lit("x"), is_abstention=pl.lit(False))
    questions = pl.DataFrame({"question_id": ["p"], "conversation_id": ["c"]})
    with pytest.raises(ValueError, match="question 'q' is in gold but not"):
        question_groups(gold, questions, pl.DataFrame({"conversation_id": ["c"], "split": ["test"]}))


@pytest.mark.parametrize(("a", "b"), [([np.nan, 1.0], [0.0, 0.0]), ([1.0, 1.0], [0.0]), ([], [])])
def test_a_paired_difference_of_unfit_values_is_refused(a, b):
    with pytest.raises(ValueError, match="equally long, non-empty rows of finite values"):
        paired_difference(a, b)


def test_baselines_as_opponents_are_those_of_the_run(tmp_path):
    from memloc.evaluation import opponents
    known = ["memloc", "BM25 session", "TF-IDF, whole session", "SeCom (extractive)"]
    assert opponents("BM25 session,baselines", known, tmp_path) == ["BM25 session"], "a run without the stage has none"
    with Stage(tmp_path, "baselines", {}) as stage:
        stage.table("rankings", pl.DataFrame({"system": ["SeCom (extractive)", "TF-IDF, whole session", "SeCom (extractive)"]}), "system")
    assert opponents("BM25 session, baselines", known, tmp_path) == ["BM25 session", "SeCom (extractive)", "TF-IDF, whole session"]
    assert opponents("baselines,SeCom (extractive)", known, tmp_path) == ["SeCom (extractive)", "TF-IDF, whole session"]
    with pytest.raises(ValueError, match="no system 'baseline'"):
        opponents("baseline", known, tmp_path)
