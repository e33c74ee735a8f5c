"""A memory that grows and shrinks against a rebuild by the plain functions; fast paths against their plain definitions."""

from datetime import datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memloc.graph_ppr import (
    GraphSettings,
    MemoryGraph,
    build_graphs,
    candidate_table,
    edge_table,
    graph_preset,
    largest,
    search_conversation,
    seed_mass,
)
from memloc.incremental import IncrementalIndex, aggregate_blocks, session_members
from memloc.memory_units import GRANULARITIES, UnitIndex
from memloc.routing import aggregate, conversation_similarities, ranking_table, routing_preset, stack_views

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
