"""A memory that grows and shrinks against a rebuild by the plain functions; fast paths against their plain definitions."""

import zlib
from datetime import datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memloc.data import sample
from memloc.graph_ppr import (
    GraphSettings,
    MemoryGraph,
    build_graphs,
    candidate_table,
    edge_table,
    graph_preset,
    largest,
    propagate,
    search_conversation,
    seed_mass,
    spread,
    transition_matrix,
)
from memloc.incremental import IncrementalIndex, session_members
from memloc.lexical import terms
from memloc.memory_units import GRANULARITIES, UnitIndex, build_units
from memloc.routing import (
    RoutingSettings,
    aggregate,
    conversation_similarities,
    ranking_table,
    routing_preset,
    stack_views,
)

DAY = datetime(2024, 3, 1)
WORDS = ["harbour", "violin", "brake", "sourdough", "glacier", "lantern", "Nora", "Dev", "the", "painted", "paints", "2019"]


def units_of(sessions: dict[str, tuple[datetime | None, dict]], dim: int) -> tuple[UnitIndex, list[str]]:
    "The stage's tables of some sessions, in date order."
    order = sorted(sessions, key=lambda each: (sessions[each][0] or datetime.min, each))
    rows, vectors = [], []
    for session_id in order:
        for name, (texts, parts) in sessions[session_id][1].items():
            for member, text in enumerate(texts):
                rows.append((f"{session_id}#{name}", "c", session_id, name, member, text, len(vectors)))
                vectors.append(parts[member])
    schema = {"unit_id": pl.String, "conversation_id": pl.String, "session_id": pl.String, "granularity": pl.String,
              "member": pl.Int32, "text": pl.String, "vector_row": pl.Int32}
    table = pl.DataFrame({"conversation_id": ["c"]*len(order), "session_id": order, "position": range(len(order))},
                         schema={"conversation_id": pl.String, "session_id": pl.String, "position": pl.Int32})
    stacked = np.array(vectors, dtype=np.float32).reshape(-1, dim)
    return UnitIndex(pl.DataFrame(rows, schema, orient="row"), stacked, table), order


def rebuilt(sessions, routing, graph, questions, query_vectors) -> tuple[MemoryGraph, tuple[np.ndarray, ...]]:
    "Graph and search by the functions that the stages use."
    units, order = units_of(sessions, query_vectors.shape[1])
    memory = build_graphs(units, {"c": order}, routing.views, graph)["c"]
    raw = conversation_similarities(units, "c", questions, query_vectors, routing.views)
    return memory, search_conversation(memory, stack_views(raw, routing.views), routing, graph)


def assert_same(index: IncrementalIndex, sessions, questions, query_vectors) -> None:
    "Edges, transition, scores and ranking of an index are those of a rebuild."
    memory, (scores, inner, empty) = rebuilt(sessions, index.routing, index.settings, questions, query_vectors)
    grown = index.graph()
    assert grown.session_ids == memory.session_ids
    for ours, theirs in zip(grown.edges, memory.edges, strict=True):
        for name in ("source", "target", "semantic"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        np.testing.assert_allclose(ours.similarity, theirs.similarity, rtol=0, atol=1e-9)
        assert ours.unfitted == theirs.unfitted
    assert (grown.transition != memory.transition).nnz == 0
    found = index.search(questions, query_vectors)
    np.testing.assert_array_equal(found, scores)
    ids = [f"q{i}" for i in range(len(questions))]
    ours = search_conversation(grown, index.similarity(questions, query_vectors), index.routing, index.settings)
    assert ranking_table("x", ids, grown.session_ids, *ours[:2]).equals(ranking_table("x", ids, memory.session_ids, scores, inner))
    np.testing.assert_array_equal(ours[2], empty)


def drawn_members(rng: np.random.Generator, dim: int, names) -> dict:
    "Texts and unit vectors of the granularities of a session; some are missing, some texts are empty or repeated."
    out = {}
    for name in names:
        n = 0 if rng.random() < 0.25 else int(rng.integers(1, 5)) if name in ("turn", "observation", "event") else 1
        if n or rng.random() < 0.5:
            texts = [" ".join(rng.choice(WORDS, int(rng.integers(0, 7)))) for _ in range(n)]
            vectors = rng.normal(size=(n, dim)).astype(np.float32)
            out[name] = (texts, vectors/np.linalg.norm(vectors, axis=1, keepdims=True))
    return out


OPERATIONS = st.lists(st.tuples(st.sampled_from(["add", "add", "add", "remove", "search"]), st.integers(0, 15), st.integers(0, 10**6)),
                      min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@example([("search", 0, 0)], "memloc", "earlier", 20)
@example([("add", 0, 0), ("remove", 0, 0), ("search", 0, 0), ("add", 0, 1)], "memloc", "earlier", 20)
@given(OPERATIONS, st.sampled_from(["memloc", "memloc", "paper", "released"]), st.sampled_from(["earlier", "all"]), st.sampled_from([2, 4, 20]))
def test_any_order_of_adds_and_removes_equals_a_rebuild(operations, preset, candidates, n_candidates):
    routing = routing_preset(preset)
    graph = graph_preset(preset, candidates=candidates, n_candidates=n_candidates)
    index, sessions, dim = IncrementalIndex(routing, graph), {}, 6
    asked = np.random.default_rng(3).normal(size=(3, dim)).astype(np.float32)
    questions = ["Who painted the harbour?", "", "brake brake 2019 zebra"]
    for what, place, seed in operations:
        session_id, rng = f"s{place:02d}", np.random.default_rng(seed)
        if what == "search":
            index.search(questions, asked)
        elif session_id in sessions:
            index.remove(session_id)
            del sessions[session_id]
        elif what == "add":
            date = None if place == 7 else DAY + timedelta(days=place//3)  # three sessions share a day, one has none
            sessions[session_id] = (date, drawn_members(rng, dim, GRANULARITIES))
            index.add(session_id, *sessions[session_id])
    if sessions:
        assert_same(index, sessions, questions, asked)
    else:
        assert index.search(questions, asked).shape == (3, 0)


def term_vectors(texts: list[str], dim: int = 64) -> np.ndarray:
    "Unit vectors of texts without a model: each term has a random direction of its own."
    parts = [[np.random.default_rng(zlib.crc32(term.encode())).normal(size=dim) for term in found] or [np.ones(dim)] for found in terms(texts)]
    sums = np.array([np.sum(each, axis=0) for each in parts], dtype=np.float32)
    return sums/np.linalg.norm(sums, axis=1, keepdims=True)


def test_sample_arrives_in_random_order_and_loses_sessions():
    data, rng = sample(), np.random.default_rng(5)
    chosen = data.sessions.filter(pl.col("conversation_id") == "nora-dev")
    turns = data.turns.join(chosen.select("session_id"), on="session_id", how="semi")
    notes = data.annotations.filter(pl.col("conversation_id") == "nora-dev")
    table = build_units(chosen, turns, notes, progress=False).with_columns(vector_row=pl.int_range(pl.len(), dtype=pl.Int32))
    units = UnitIndex(table, term_vectors(table["text"].to_list()), chosen)
    questions = data.questions.filter(pl.col("conversation_id") == "nora-dev")["question"].to_list()[:12]
    asked = term_vectors(questions)
    members, dates = session_members(units, "nora-dev"), dict(chosen.select("session_id", "date").iter_rows())
    index, there = IncrementalIndex(graph=graph_preset("memloc", n_candidates=6)), {}
    for step, session_id in enumerate(rng.permutation(list(members)).tolist()):
        there[session_id] = (dates[session_id], members[session_id])
        index.add(session_id, *there[session_id])
        if step % 5 == 4:
            gone = sorted(there)[int(rng.integers(len(there)))]
            index.remove(gone)
            del there[gone]
            assert_same(index, there, questions, asked)
    assert len(there) == len(members) - 3


def test_what_does_not_fit_is_refused():
    index = IncrementalIndex()
    with pytest.raises(ValueError, match="empty"):
        index.graph()
    with pytest.raises(ValueError, match="s1: granularity 'mood'"):
        index.add("s1", DAY, {"mood": (["x"], np.zeros((1, 4)))})
    index.add("s1", DAY, {"turn": (["Nora painted"], np.ones((1, 4), np.float32))})
    with pytest.raises(ValueError, match="one model"):
        index.add("s2", DAY, {"turn": (["Nora painted"], np.ones((1, 5), np.float32))})
    with pytest.raises(ValueError, match="already there"):
        index.add("s1", DAY, {})
    with pytest.raises(KeyError, match="s2"):
        index.remove("s2")
    assert index.session_ids == ("s1",)
    with pytest.raises(ValueError, match="n_candidates=0"):
        IncrementalIndex(graph=GraphSettings(n_candidates=0))


# --- fast paths against their plain definitions --------------------------------------------------------------------

def plain_candidates(similarity, n_candidates, candidates):
    n = len(similarity)
    allowed = np.tri(n, k=-1, dtype=bool) if candidates == "earlier" else ~np.eye(n, dtype=bool)
    ranked = np.where(allowed & np.isfinite(similarity), similarity, -np.inf)
    index = np.argsort(-ranked, axis=1, kind="stable")[:, :n_candidates]
    values = np.take_along_axis(ranked, index, 1)
    pad = ((0, 0), (0, n_candidates - index.shape[1]))
    return np.pad(index, pad), np.pad(np.where(np.isfinite(values), values, np.nan), pad, constant_values=np.nan)


def plain_seeds(similarity, weights, n_seeds):
    raw = (weights[..., None]*np.nan_to_num(similarity, nan=0.0)).reshape(len(similarity), -1)
    rank = np.argsort(np.argsort(-raw, axis=1, kind="stable"), axis=1, kind="stable")
    kept = np.where((rank < n_seeds) & (raw > 0), raw, 0.0)
    total = kept.sum(1)
    return (kept/np.where(total > 0, total, 1.0)[:, None]).T, total <= 0


def coarse(rng: np.random.Generator, shape, missing: float, dtype) -> np.ndarray:
    "Values with many ties, some of them missing."
    values = rng.integers(-5, int(rng.integers(0, 200)), shape).astype(dtype)/16
    values[rng.random(shape) < missing] = np.nan
    return values


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 200), st.integers(1, 25), st.sampled_from([0.0, 0.3, 0.9]),
       st.sampled_from([np.float32, np.float64]), st.sampled_from(["earlier", "all"]))
def test_selection_equals_sorting(seed, n, k, missing, dtype, candidates):
    rng = np.random.default_rng(seed)
    similarity = coarse(rng, (n, n), missing, dtype)
    for ours, plain in zip(candidate_table(similarity, k, candidates), plain_candidates(similarity, k, candidates), strict=True):
        assert ours.dtype == plain.dtype
        np.testing.assert_array_equal(ours, plain)
    asked = coarse(rng, (3, 2, n + 1), missing, dtype)
    weights = rng.random((3, 2))
    for ours, plain in zip(seed_mass(asked, weights, k), plain_seeds(asked, weights, k), strict=True):
        np.testing.assert_array_equal(ours, plain)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 12), max_size=30), st.integers(1, 4), st.sampled_from(["mean", "max", "top"]),
       st.integers(1, 5), st.sampled_from([np.float32, np.float64]))
def test_blocks_of_sessions_equal_the_walk_over_sessions(seed, sizes, n_queries, how, top, dtype):
    indptr = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    scores = np.random.default_rng(seed).normal(size=(n_queries, indptr[-1])).astype(dtype)
    np.testing.assert_array_equal(aggregate(scores, indptr, how, top), plain_aggregate(scores, indptr, how, top))


def plain_aggregate(scores, indptr, how, top):
    "One session after another."
    out = np.full((len(scores), len(indptr) - 1), np.nan)
    for session in np.flatnonzero(np.diff(indptr)):
        members = scores[:, indptr[session]:indptr[session + 1]]
        if how == "top":
            keep = min(top, members.shape[1])
            members = -np.partition(-members, keep - 1, axis=1)[:, :keep]
        out[:, session] = members.max(1) if how == "max" else members.mean(1)
    return out


@pytest.mark.parametrize("view", ["topic:turn:top2", "token:turn:max", "date", "lexical:turn:window"])
def test_views_that_need_the_questions_or_neighbours_are_refused(view):
    with pytest.raises(ValueError, match=f"view {view!r} is not served"):
        IncrementalIndex(RoutingSettings(("turn:max", view)))


def test_edge_table_lists_every_edge_in_its_order():
    sessions = {f"s{i}": (DAY + timedelta(days=i), drawn_members(np.random.default_rng(i), 6, GRANULARITIES)) for i in range(12)}
    units, order = units_of(sessions, 6)
    graphs = build_graphs(units, {"c": order}, routing_preset("memloc").views, GraphSettings())
    plain = [("memloc", conversation, view, graph.session_ids[source], graph.session_ids[target],
              "semantic" if semantic else "temporal", float(value))
             for conversation, graph in graphs.items() for view, part in zip(graph.views, graph.edges, strict=True)
             for source, target, semantic, value in zip(part.source, part.target, part.semantic, part.similarity, strict=True)]
    table = edge_table("memloc", graphs)
    assert table.equals(pl.DataFrame(plain, schema=table.schema, orient="row"))
    assert edge_table("memloc", {}).is_empty() and edge_table("memloc", {}).schema == table.schema


def test_largest_takes_the_first_of_equal_values():
    row, column, rank = largest(np.full((2, 300), 0.5), 3)
    assert (column.reshape(2, 3) == [0, 1, 2]).all() and (row == [0]*3 + [1]*3).all() and (rank.reshape(2, 3) == [0, 1, 2]).all()
    assert len(largest(np.full((2, 300), -np.inf), 3)[0]) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 300), st.integers(0, 600), st.integers(1, 3), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_walk_by_neighbours_has_the_bits_of_the_whole_product(seed, n_nodes, n_edges, n_queries, restart):
    rng = np.random.default_rng(seed)
    transition = transition_matrix(n_nodes, rng.integers(0, n_nodes, n_edges), rng.integers(0, n_nodes, n_edges))
    seeds = np.zeros((n_nodes, n_queries))
    seeds[rng.integers(0, n_nodes, n_queries), np.arange(n_queries)] = 1
    mass = seeds
    for _ in range(6):
        np.testing.assert_array_equal(spread(transition, mass, n_links=0), transition @ mass)
        mass = transition @ mass
    np.testing.assert_array_equal(propagate(transition, seeds, restart, undirected=True), propagate(transition, seeds, restart))
