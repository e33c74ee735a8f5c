"""The trace of a question agrees with the run's files, survives gaps in the run, and draws."""

import json
import shutil

import numpy as np
import polars as pl
import pytest
from test_generation import located_run  # noqa: F401  (a fixture)

from memloc.artifacts import stage_table
from memloc.evaluation import trace_table
from memloc.generation import GenerationConfig, run_generation
from memloc.graph_ppr import propagate, transition_matrix
from memloc.trace import drawable, mass_moved, plot_trace, trace_lines, trace_question

QUESTION = "ingrid/q003"


@pytest.fixture(scope="module")
def answered_once(located_run, tmp_path_factory):  # noqa: F811
    run_dir = shutil.copytree(located_run, tmp_path_factory.mktemp("answered")/"run")
    run_generation(GenerationConfig(model="extractive", variant="cue,mmr"), run_dir)
    return run_dir


@pytest.fixture
def answered(answered_once, tmp_path):
    return shutil.copytree(answered_once, tmp_path/"run")


def test_mass_moved_balances_on_random_graphs():
    rng = np.random.default_rng(3)
    for restart in (0.1, 0.5, 0.9):
        source, target = rng.integers(0, 12, (2, 20))
        apart = source != target
        transition = transition_matrix(12, source[apart], target[apart])
        seeds = rng.dirichlet(np.ones(12))[:, None]
        mass = propagate(transition, seeds, restart)[:, 0]
        start, end, moved = mass_moved(transition, mass, restart)
        lonely = (1 - restart)*transition.diagonal()*mass
        assert np.allclose(np.bincount(end, moved, 12) + restart*seeds[:, 0] + lonely, mass, atol=1e-8)
        assert (np.diff(moved) <= 0).all() and (start != end).all()


class TestTrace:
    def test_it_is_json_and_agrees_with_the_graph_stage(self, answered):
        trace = trace_question(answered, QUESTION)
        assert json.loads(json.dumps(trace, allow_nan=False)) == trace
        assert trace["retrieval"]["largest_difference"] < 1e-9
        assert sum(seed["mass"] for seed in trace["retrieval"]["seeds"]) == pytest.approx(1)
        assert sum(view["weight"] for view in trace["retrieval"]["views"]) == pytest.approx(1)
        assert sum(each["score"] for each in trace["sessions"]) == pytest.approx(1)

    def test_it_tells_what_the_tables_tell(self, answered):
        trace = trace_question(answered, QUESTION)
        mine = pl.col("question_id") == QUESTION, pl.col("variant") == "cue"
        segments = stage_table(answered, "generation", "segments").filter(*mine).sort("number")
        assert [each["turn_id"] for each in trace["prompt"]["segments"]] == segments["turn_id"].to_list()
        answer = stage_table(answered, "generation", "answers").filter(*mine).row(0, named=True)
        assert trace["answer"]["answer"] == answer["answer"]
        assert [each["turn_id"] for each in trace["answer"]["citations"]] == answer["citations"]
        assert trace["chain"] == [each["session_id"] for each in trace["sessions"] if each["chain"]]
        assert [each["session_id"] for each in trace["sessions"] if each["n_evidence"]] == trace["chain"]
        assert [each["position"] for each in trace["sessions"]] == list(range(17))

    def test_edges_exist_in_the_graph(self, answered):
        edges = stage_table(answered, "graph", "edges")
        known = {frozenset(pair) for pair in edges.select("source", "target").iter_rows()}
        walked = trace_question(answered, QUESTION)["retrieval"]["edges"]
        assert walked and all(frozenset((each["source"], each["target"])) in known for each in walked)
        masses = [each["mass"] for each in walked]
        assert masses == sorted(masses, reverse=True)

    def test_cost_names_every_stage(self, answered):
        cost = trace_question(answered, QUESTION)["cost"]
        assert [(each["stage"], each["scope"]) for each in cost] == [
            ("data", "stage"), ("units", "stage"), ("routing", "stage"), ("graph", "stage"), ("locator", "question"),
            ("generation", "question")]

    def test_another_variant(self, answered):
        trace = trace_question(answered, QUESTION, "mmr")
        assert trace["prompt"]["variant"] == "mmr" and not any(each["cue"] for each in trace["prompt"]["segments"])
        with pytest.raises(ValueError, match="no answer of variant 'rerank'"):
            trace_question(answered, QUESTION, "rerank")

    def test_no_gold_label_is_read(self, answered):
        (answered/"data"/"gold.parquet").unlink()
        assert trace_question(answered, QUESTION)["answer"]["status"] == "ok"

    def test_a_run_that_ended_early(self, answered):
        shutil.rmtree(answered/"generation")
        assert trace_question(answered, QUESTION)["answer"] is None
        shutil.rmtree(answered/"locator")
        trace = trace_question(answered, QUESTION)
        assert trace["evidence"] == [] and trace["retrieval"]["system"] == "memloc"
        assert plot_trace(trace).axes

    def test_a_system_without_a_walk(self, answered):
        trace = trace_question(answered, QUESTION, system="memloc: routing")
        assert trace["retrieval"] == {"system": "memloc: routing"}
        assert plot_trace(trace).axes

    def test_unknown_names(self, answered):
        with pytest.raises(ValueError, match="no question 'q9'; ids look like"):
            trace_question(answered, "q9")
        with pytest.raises(ValueError, match="no ranking of system 'bm99'"):
            trace_question(answered, QUESTION, system="bm99")


class TestFigure:
    def test_axes_are_labelled_and_the_words_are_there(self, answered):
        figure = plot_trace(trace_question(answered, QUESTION))
        weights, sessions, words = figure.axes
        assert (weights.get_xlabel(), sessions.get_ylabel(), sessions.get_xlabel()) == ("weight", "session score", "date of the session")
        written = [text.get_text() for text in words.texts]
        assert written[0] == "Question" and any(line.startswith("Evidence: 2 turns") for line in written)

    def test_hostile_text_draws_without_a_warning(self, answered, recwarn):
        trace = trace_question(answered, QUESTION)
        trace["question"]["text"] = r"$\frac{ 食べる 🎉 " + "x"*1000
        trace["evidence"][0]["text"] = "$x^$\n\n\t" + "y"*500
        trace["answer"] |= {"answer": "", "status": "error: timeout: ∎ $"}
        plot_trace(trace).canvas.draw()
        assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
        assert max(len(line) for _, line in trace_lines(trace)) <= 128

    def test_undated_sessions_are_drawn_in_order(self, answered):
        trace = trace_question(answered, QUESTION)
        for each in trace["sessions"]:
            each["date"] = None
        assert plot_trace(trace).axes[1].get_xlabel() == "session, in order"


def test_drawable():
    assert drawable("a\nb") == "a b" and drawable("食") == "□" and drawable("x"*9, 5) == "xxxx…"


def test_the_table_below_a_trace_tells_named_cited_and_gold(answered):
    trace = trace_question(answered, QUESTION)
    shown = trace_table(trace, answered)
    gold = stage_table(answered, "data", "gold").filter(pl.col("question_id") == QUESTION)
    for mark, turns in (("named", {each["turn_id"] for each in trace["evidence"]}), ("gold", set(gold["evidence_turns"].item())),
                        ("cited", {each["turn_id"] for each in trace["answer"]["citations"]})):
        assert set(shown.frame.filter(pl.col(mark) == "yes")["turn_id"]) == turns
    assert gold["answer"].item() in str(shown) and trace["answer"]["answer"] in str(shown)
