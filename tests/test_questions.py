"""What a question asks for, late interaction, learned weights, and the views made of them."""

from datetime import datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memloc.data import sample
from memloc.encoders import Encoder
from memloc.fusion import fit_weights, learn_from_run
from memloc.graph_ppr import GRAPH_PRESETS, build_graphs, graph_preset, search_conversation
from memloc.late import PieceReader, Pieces, cached_pieces, encode_pieces, late_scores, piece_weights, silent_ids
from memloc.memory_units import UnitIndex, build_units, encode_units
from memloc.questions import LATER, Asked, asked_dates, date_closeness, read_questions, topic
from memloc.routing import (
    ROUTING_PRESETS,
    conversation_similarities,
    parse_view,
    replace,
    route,
    routing_preset,
    routing_weights,
    speakers_of,
    stack_views,
    subset_settings,
    windows,
)

# --- names -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("question", "speakers", "expected"), [
    ("What did Ann's sister say to Bo?", ["Ann", "Bo"], "What did sister say to?"),
    ("Did Anna meet Ann?", ["Ann"], "Did Anna meet?"),                     # a name inside another word stays
    ("did ANN go?", ["Ann"], "did go?"),
    ("Where does Jean-Luc live?", ["Jean", "Jean-Luc"], "Where does live?"),  # the longer name first
    ("What did the assistant say?", ["user", "assistant"], "What did the assistant say?"),
    ("Ann?", ["Ann"], "Ann?"),
    ("What (exactly) is C++?", ["C++"], "What (exactly) is?"),
    ("Who?", ["", "  "], "Who?"),
])
def test_names_are_taken_out(question, speakers, expected):
    assert topic(question, speakers) == expected


# --- dates -----------------------------------------------------------------------------------------------------

def day(*date: int) -> datetime:
    return datetime(*date)


@pytest.mark.parametrize(("question", "expected"), [
    ("What happened on 5 July 2023?", [(day(2023, 7, 5), day(2023, 7, 6))]),
    ("What happened on July 5th, 2023?", [(day(2023, 7, 5), day(2023, 7, 6))]),
    ("What happened in December 2022?", [(day(2022, 12, 1), day(2023, 1, 1))]),
    ("What happened in 2022?", [(day(2022, 1, 1), day(2023, 1, 1))]),
    ("What happened in February?", [(day(2023, 2, 1), day(2023, 3, 1)), (day(2024, 2, 1), day(2024, 3, 1))]),
    ("What may happen, and when will she march?", []),
    ("How many of the 2000 people came on 12345?", [(day(2000, 1, 1), day(2001, 1, 1))]),
    ("What happened yesterday?", []),
])
def test_times_in_a_question(question, expected):
    assert asked_dates(question, years=[2023, 2024]) == expected


def test_relative_times_need_the_moment_of_asking():
    asked = datetime(2023, 5, 30, 23, 31)
    assert asked_dates("What did I buy yesterday?", asked) == [(day(2023, 5, 29), day(2023, 5, 30))]
    [(start, end)] = asked_dates("What did I buy two weeks ago?", asked)
    assert start <= day(2023, 5, 16) < end


@given(st.integers(-2_000, 2_000), st.integers(1, 60))
def test_closeness_is_zero_inside_and_falls_outside(shift, length):
    start = datetime(2022, 3, 1)
    ranges = [[(start, start + timedelta(days=length))]]
    dates = [start + timedelta(days=shift), start + timedelta(days=shift + (1 if shift >= 0 else -1))]
    near, far = date_closeness(ranges, dates)[0]
    assert (near == 0) == (0 <= shift <= length + LATER)
    assert far <= near


def test_closeness_without_dates_is_missing():
    found = date_closeness([[], [(day(2023, 1, 1), day(2023, 2, 1))]], [None, datetime(2023, 1, 5)])
    assert np.isnan(found[0]).all() and np.isnan(found[1, 0]) and found[1, 1] == 0


# --- late interaction ------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder("minilm")


def random_pieces(rng, sizes) -> Pieces:
    vectors = rng.normal(size=(sum(sizes), 16))
    vectors = (vectors/np.linalg.norm(vectors, axis=1, keepdims=True)*127).round().astype(np.int8)
    return Pieces(rng.integers(0, 30, sum(sizes)).astype(np.int32), vectors, np.cumsum([0, *sizes]))


def test_scores_equal_the_formula_and_do_not_depend_on_blocks(monkeypatch):
    rng = np.random.default_rng(3)
    questions, texts = random_pieces(rng, [3, 0, 5]), random_pieces(rng, [4, 0, 1, 7, 0])
    weights = np.array([1, 0, 2, 0.5, 0, 0, 1, 3.0])
    expected = np.zeros((3, 5))
    for q in range(3):
        span = range(*questions.indptr[q:q + 2])
        for t in range(5):
            said = texts.vectors[slice(*texts.indptr[t:t + 2])]/127
            if len(said) and weights[span].sum():
                expected[q, t] = sum(weights[j]*(said @ (questions.vectors[j]/127)).max() for j in span)/weights[span].sum()
    assert np.allclose(late_scores(questions, texts, weights), expected, atol=1e-6)
    monkeypatch.setattr("memloc.late.BLOCK", 2)
    assert np.allclose(late_scores(questions, texts, weights), expected, atol=1e-6)


def test_rare_pieces_weigh_more_and_stop_words_nothing(encoder):
    texts = encode_pieces(encoder, ["the dog barked", "the cat slept", "the dog slept"])
    asked = encode_pieces(encoder, ["the dog cat ?"])
    words = [encoder.tokenizer.id_to_token(int(one)) for one in asked.ids]
    weight = dict(zip(words, piece_weights(asked, texts, np.arange(4), silent_ids(encoder))))
    assert weight["the"] == weight["?"] == 0 < weight["dog"] < weight["cat"]


def test_pieces_do_not_depend_on_their_company_and_are_kept(encoder, tmp_path, monkeypatch):
    alone = encode_pieces(encoder, ["Nora swam at dawn."])
    among = encode_pieces(encoder, ["x", "Nora swam at dawn.", "A much longer sentence about something else entirely."])
    part = slice(*among.indptr[1:3])
    assert (among.ids[part] == alone.ids).all()
    assert np.abs(among.vectors[part].astype(int) - alone.vectors).max() <= 1
    first = cached_pieces(encoder, ["Nora swam at dawn."], tmp_path)
    monkeypatch.setattr("memloc.late.encode_pieces", lambda *_: pytest.fail("read again"))
    assert (cached_pieces(encoder, ["Nora swam at dawn."], tmp_path).vectors == first.vectors).all()
    next(tmp_path.glob("*/vectors.npy")).write_bytes(b"cut")
    with pytest.raises(ValueError, match="damaged entry.*delete this folder"):
        cached_pieces(encoder, ["Nora swam at dawn."], tmp_path)


def test_no_texts_and_no_words(encoder):
    assert late_scores(encode_pieces(encoder, ["Who?"]), encode_pieces(encoder, []), np.ones(2)).shape == (1, 0)
    assert PieceReader(encoder).scores(["the?"], ["Nora swam."], np.array([0, 1])).tolist() == [[0.0]]


# --- learned weights -------------------------------------------------------------------------------------------

def test_learned_weights_find_the_view_that_is_right():
    rng = np.random.default_rng(8)
    gold = rng.random((200, 10)) < 0.15
    scores = rng.normal(size=(200, 3, 10))
    scores[:, 1] += 1.5*gold
    weights = fit_weights([scores[:100], scores[100:]], [gold[:100], gold[100:]])
    assert weights[1] > 0.6 and abs(sum(weights) - 1) < 0.01
    assert fit_weights([scores], [gold]) == weights  # blocks do not matter
    with pytest.raises(ValueError, match="no question has evidence"):
        fit_weights([scores], [np.zeros_like(gold)])


def test_learned_weights_are_checked_and_shared_among_present_views():
    similarity = np.array([[[0.1, 0.2], [np.nan, np.nan], [0.5, 0.1]]])
    assert np.allclose(routing_weights(similarity, kind="learned", learned=(1, 5, 3)), [[0.25, 0, 0.75]])
    for wrong in ((), (1, 2), (1, -1, 2), (1, np.nan, 2)):
        with pytest.raises(ValueError, match="learned weights"):
            routing_weights(similarity, kind="learned", learned=wrong)


# --- views -----------------------------------------------------------------------------------------------------

def test_windows_stay_within_their_session():
    assert windows(["a", "b", "c", "d"], np.array([0, 3, 3, 4])) == ["a\nb", "a\nb\nc", "b\nc", "d"]


@pytest.mark.parametrize("name", ["topic:turn:whole", "token:turn:centroid", "token:turn:window", "topic:session+turn", "date:max", "token:"])
def test_views_that_make_no_sense_are_refused(name):
    with pytest.raises(ValueError, match="view"):
        parse_view(name)


@pytest.fixture(scope="module")
def history(encoder):
    data = sample()
    name = "maribel-tess"
    kept = [frame.filter(pl.col("conversation_id") == name) for frame in (data.sessions, data.turns, data.annotations, data.questions)]
    sessions, turns, notes, questions = kept
    units, vectors = encode_units(build_units(sessions, turns, notes, progress=False), encoder)
    index = UnitIndex(units, vectors, sessions)
    texts = questions["question"].to_list()
    dates = sessions.sort("position")["date"].to_list()
    asked = read_questions(texts, questions["date"].to_list(), speakers_of(turns)[name], dates, encoder.encode)
    return name, index, texts, encoder.encode(texts), asked


def test_every_view_of_fused_has_a_score(history, encoder):
    name, index, texts, vectors, asked = history
    settings = routing_preset("fused")
    found = conversation_similarities(index, name, texts, vectors, settings.views, asked, PieceReader(encoder))
    for view, scores in found.items():
        assert scores.shape == (len(texts), len(index.sessions[name]))
        named = np.array([bool(ranges) for ranges in asked.ranges])
        assert np.isfinite(scores).any(1).tolist() == (named.tolist() if view == "date" else [True]*len(texts)) or "observation" in view
    routed = route(stack_views(found, settings.views), settings)
    assert np.isfinite(routed.scores).all() and np.allclose(routed.weights.sum(1), 1)
    graph = build_graphs(index, {name: index.sessions[name]}, settings.views, graph_preset("fused"))[name]
    assert not len(graph.edges[settings.views.index("date")].source)  # dates join no sessions
    scores, _, _ = search_conversation(graph, stack_views(found, settings.views), settings, graph_preset("fused"))
    assert scores.shape == routed.scores.shape and (scores >= 0).all()


def test_topic_view_is_the_dense_view_of_another_question(history, encoder):
    name, index, texts, vectors, asked = history
    by_topic = conversation_similarities(index, name, texts, vectors, ["topic:turn:top2"], asked)["topic:turn:top2"]
    renamed = [topic(text, ["Maribel", "Tess"]) for text in texts]
    assert renamed != texts
    by_dense = conversation_similarities(index, name, renamed, encoder.encode(renamed), ["turn:top2"])["turn:top2"]
    assert np.array_equal(by_topic, by_dense)


@pytest.mark.parametrize("view", ["topic:turn:max", "token:turn:max", "date"])
def test_views_that_need_more_say_so(history, view):
    name, index, texts, vectors, _ = history
    with pytest.raises(ValueError, match=f"view {view!r} needs"):
        conversation_similarities(index, name, texts, vectors, [view])


def test_presets_have_one_weight_a_view_and_subsets_keep_them():
    assert ROUTING_PRESETS.keys() == GRAPH_PRESETS.keys()
    fused = routing_preset("fused")
    for label, settings in subset_settings(fused):
        assert len(settings.learned) == len(settings.views)
        assert all(dict(zip(fused.views, fused.learned))[view] == weight for view, weight in zip(settings.views, settings.learned)), label


def test_asked_is_empty_by_default():
    assert Asked().topic_vectors is None and replace(routing_preset("fused"), learned=()).learned == ()
    with pytest.raises(ValueError, match="dates of asking"):
        read_questions(["Who?"], [], [], [])


def test_weights_are_learned_from_a_run(tmp_path):
    from test_retrieval import plain_file, run_stages, talk
    source = plain_file(tmp_path/"in.json", [talk(9, conversation_id="c1"), talk(6, conversation_id="c2")])
    run = run_stages(tmp_path/"run", dataset="plain", data=str(source))
    weights = learn_from_run(str(run), ["lexical:turn:max", "turn:top2"], ["c1"])
    assert len(weights) == 2 and abs(sum(weights) - 1) < 0.01
    with pytest.raises(ValueError, match="no question about conversation 'c9'"):
        learn_from_run(str(run), ["turn:top2"], ["c9"])
