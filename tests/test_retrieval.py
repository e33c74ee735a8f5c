"""Routing and graph against oracles, gold that must not matter, and awkward conversations end to end."""

import json
from pathlib import Path

import igraph
import numpy as np
import polars as pl
import pytest
from sklearn.mixture import GaussianMixture

from memloc.artifacts import stage_table
from memloc.data import DataConfig, load, run_data
from memloc.encoders import Encoder
from memloc.evaluation import EvaluationConfig, run_evaluation
from memloc.graph_ppr import (
    GraphConfig,
    GraphEdges,
    candidate_table,
    communities,
    fit_mixture,
    join_parts,
    propagate,
    run_graph,
    seed_mass,
    semantic_edges,
    session_adjacency,
    session_scores,
    similar_members,
    two_means_split,
)
from memloc.memory_units import UnitsConfig, run_units
from memloc.routing import (
    MEMLOC_VIEWS,
    ROUTING_PRESETS,
    RoutingConfig,
    aggregate,
    chosen_presets,
    parse_view,
    ranking_table,
    relative_entropy,
    route,
    routing_weights,
    run_routing,
)

LOCOMO = Path(__file__).resolve().parents[2]/"shared/data/locomo/locomo10.json"
needs_locomo = pytest.mark.skipif(not LOCOMO.is_file(), reason=f"{LOCOMO} is not there")


def run_stages(folder: Path, **data_settings) -> Path:
    "Data, units, routing and graph of a run."
    run_data(DataConfig(**data_settings), folder)
    run_units(UnitsConfig(), folder)
    run_routing(RoutingConfig(), folder)
    run_graph(GraphConfig(), folder)
    return folder


def plain_file(path: Path, conversations: list[dict]) -> Path:
    path.write_text(json.dumps({"conversations": conversations}), "utf-8")
    return path


def talk(n_sessions: int, n_turns: int = 4, dated: bool = True, conversation_id: str = "c") -> dict:
    "A conversation with one question about its middle session."
    words = ["harbour", "violin", "carburettor", "sourdough", "glacier", "lantern", "compass", "orchard"]
    sessions = []
    for i in range(n_sessions):
        turns = [{"speaker": "Ana" if j % 2 else "Ben", "text": f"The {words[i % 8]} number {i} kept us busy, part {j}."}
                 for j in range(n_turns)]
        sessions.append({"session_id": f"s{i}", "turns": turns} | ({"date": f"2024-{1 + i % 12:02d}-{1 + i // 12:02d}"} if dated else {}))
    return {"conversation_id": conversation_id, "sessions": sessions,
            "questions": [{"question": f"What about the {words[(n_sessions//2) % 8]}?", "evidence": [f"s{n_sessions//2}:1"]}]}


@pytest.fixture(scope="module")
def locomo_similarities() -> list[np.ndarray]:
    "Cosines between the sessions of four LoCoMo conversations, from whole sessions and from summaries."
    data, encoder, out = load("locomo", LOCOMO), Encoder(), []
    chosen = data.sessions.filter(pl.col("conversation_id").is_in(data.conversations["conversation_id"].sort()[:4].to_list()))
    turns = data.turns.group_by("session_id", maintain_order=True).agg(pl.col("text").str.join("\n"))
    summaries = data.annotations.filter(pl.col("kind") == "summary").select("session_id", "text")
    for table in (turns, summaries):
        joined = chosen.sort("conversation_id", "position").join(table, on="session_id", how="inner", maintain_order="left")
        vectors = encoder.encode(joined["text"].to_list(), progress=False).astype(np.float64)
        for rows in joined.with_row_index("row").partition_by("conversation_id", maintain_order=True):
            out.append(vectors[rows["row"].to_numpy()] @ vectors[rows["row"].to_numpy()].T)
    return out


# --- mixture -----------------------------------------------------------------------------------------------------

def sklearn_from_split(row: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, float]:
    groups = [row[~upper], row[upper]]
    fitted = GaussianMixture(2, weights_init=[len(g)/len(row) for g in groups], means_init=[[g.mean()] for g in groups],
                             precisions_init=[[[1/(g.var() + 1e-6)]] for g in groups])
    label = fitted.fit_predict(row[:, None])
    return label == fitted.means_.ravel().argmax(), fitted.score(row[:, None])


@needs_locomo
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_mixture_agrees_with_sklearn_on_locomo(locomo_similarities):
    values = np.concatenate([candidate_table(each)[1] for each in locomo_similarities])
    valid = np.isfinite(values)
    keep = valid.sum(1) >= 3
    values, valid = np.nan_to_num(values[keep]), valid[keep]
    assert len(values) > 170
    start = two_means_split(values, valid)
    members, likelihood, _ = fit_mixture(values, valid, start)
    oracle = [sklearn_from_split(row[mask], upper[mask]) for row, mask, upper in zip(values, valid, start, strict=True)]
    same = [bool((ours[mask] == theirs).all()) for ours, mask, (theirs, _) in zip(members, valid, oracle, strict=True)]
    assert np.mean(same) >= 0.99
    assert np.abs(likelihood - [value for _, value in oracle]).max() < 1e-6


def test_mixture_rule_for_few_and_equal_values_is_silent(recwarn):
    values = np.array([[0.5, 0, 0], [0.5, 0.4, 0], [0.3, 0.3, 0.3], [0.9, 0.2, 0.1], [0, 0, 0]])
    valid = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]], dtype=bool)
    members, fitted = similar_members(values, valid)
    assert fitted.tolist() == [False, False, False, True, False]
    assert members.any(1).tolist() == fitted.tolist()
    assert not recwarn.list


def test_mixture_does_not_depend_on_padding_or_batch():
    rng = np.random.default_rng(0)
    values = rng.random((60, 12))
    valid = np.ones_like(values, dtype=bool)
    alone = np.concatenate([similar_members(values[[i]], valid[[i]])[0] for i in range(60)])
    padded = similar_members(np.pad(values, ((0, 0), (0, 8))), np.pad(valid, ((0, 0), (0, 8))))[0][:, :12]
    assert (alone == similar_members(values, valid)[0]).all() and (alone == padded).all()


# --- graph and walk ----------------------------------------------------------------------------------------------

def node_pairs(graph) -> list[tuple[int, int]]:
    n = len(graph.session_ids)
    pairs = {tuple(sorted((int(s) + v*n, int(t) + v*n))) for v, part in enumerate(graph.edges)
             for s, t in zip(part.source, part.target, strict=True)}
    return sorted(pairs)


@needs_locomo
@pytest.mark.parametrize("restart", [0.1, 0.5, 0.9])
def test_walk_agrees_with_exact_solution_and_prpack(locomo_similarities, restart):
    two_views = [locomo_similarities[2], locomo_similarities[6]]
    graph = join_parts(["session", "summary"], [f"s{i:02d}" for i in range(len(two_views[0]))], semantic_edges(two_views))
    n_nodes = graph.transition.shape[0]
    seeds = np.random.default_rng(5).random((n_nodes, 20))
    seeds[seeds < 0.8] = 0
    seeds /= seeds.sum(0)
    ours = propagate(graph.transition, seeds, restart)
    exact = np.linalg.solve(np.eye(n_nodes) - (1 - restart)*graph.transition.toarray(), restart*seeds)
    assert np.abs(ours - exact).max() < 1e-8
    drawn = igraph.Graph(n_nodes, node_pairs(graph))
    assert min(drawn.degree()) > 0
    prpack = np.stack([drawn.personalized_pagerank(reset=column.tolist(), damping=1 - restart, directed=False) for column in seeds.T], 1)
    assert np.abs(ours - prpack).max() < 1e-8


def test_each_view_keeps_its_share_of_the_mass():
    rng = np.random.default_rng(6)
    similarity = rng.random((4, 3, 9))
    weights = routing_weights(similarity)
    parts = [semantic_edges([np.corrcoef(rng.random((9, 5)))])[0] for _ in range(3)]
    graph = join_parts("abc", [f"s{i}" for i in range(9)], parts)
    seeds, _ = seed_mass(similarity, weights, 15)
    mass = propagate(graph.transition, seeds, 0.1)
    assert np.allclose(mass.reshape(3, 9, 4).sum(1), seeds.reshape(3, 9, 4).sum(1), atol=1e-9)
    assert np.allclose(session_scores(mass, 3).sum(1), 1)


def test_isolated_node_keeps_its_seed_and_columns_sum_to_one():
    none = GraphEdges(np.array([], int), np.array([], int), np.array([], bool), np.array([]))
    graph = join_parts(["v"], ["a", "b"], [none])
    seeds = np.array([[0.7], [0.3]])
    assert np.allclose(propagate(graph.transition, seeds, 0.1), seeds)
    assert np.allclose(graph.transition.sum(0), 1)


def test_seeds_keep_exactly_the_largest_positive_nodes():
    similarity = np.random.default_rng(7).normal(size=(50, 4, 10))
    seeds, empty = seed_mass(similarity, np.full((50, 4), 0.25), 15)
    assert not empty.any() and np.allclose(seeds.sum(0), 1)
    for column, raw in zip(seeds.T, (0.25*similarity).reshape(50, -1), strict=True):
        assert set(np.flatnonzero(column)) == {i for i in np.argsort(-raw)[:15] if raw[i] > 0}


def test_missing_view_has_no_mass_and_no_edge():
    similarity = np.eye(4)
    similarity[2] = similarity[:, 2] = np.nan
    part = semantic_edges([similarity])[0]
    assert 2 not in part.source and 2 not in part.target
    assert part.unfitted == 3


def test_empty_seed_falls_back_to_the_inner_score_and_is_flagged(tmp_path):
    source = plain_file(tmp_path/"a.json", [talk(5)])
    run = run_stages(tmp_path/"run", dataset="plain", data=str(source))
    before = stage_table(run, "graph", "flags").height
    scores = stage_table(run, "routing", "scores").with_columns(pl.lit(-0.5).alias(view) for view in ROUTING_PRESETS["paper"].views)
    scores.write_parquet(run/"routing/scores.parquet")
    run_graph(GraphConfig(), run)
    flags = stage_table(run, "graph", "flags")
    assert before == 0 and "paper" in flags["preset"].to_list()


def test_communities_cover_every_session():
    adjacency = np.zeros((6, 6))
    adjacency[:3, :3] = adjacency[3:5, 3:5] = 1
    np.fill_diagonal(adjacency, 0)
    found = communities(adjacency)
    assert found.tolist() == [0, 0, 0, 1, 1, 2]
    graph = join_parts(["v"], list("abcd"), semantic_edges([np.corrcoef(np.random.default_rng(0).random((4, 3)))]))
    assert (session_adjacency(graph) == session_adjacency(graph).T).all()


# --- routing -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n_sessions", [5, 27, 50, 502])
def test_paper_weights_are_nearly_uniform(n_sessions):
    rng = np.random.default_rng(8)
    similarity = np.clip(rng.normal(0.25, 0.05, (200, 6, n_sessions)), -1, 1)
    weights = routing_weights(similarity)
    assert np.allclose(weights.sum(1), 1) and 0.14 < weights.min() and weights.max() < 0.21


def test_legacy_weights_reverse_the_principle():
    similarity = np.random.default_rng(9).normal(0.2, 0.01, (2, 60))
    similarity[0, 3] = 0.55
    entropy, _ = relative_entropy(similarity)
    assert (entropy > 1).all() and entropy[0] < entropy[1]
    assert routing_weights(similarity)[0] > routing_weights(similarity)[1]
    assert routing_weights(similarity, kind="legacy")[0] < routing_weights(similarity, kind="legacy")[1]


def test_entropy_agrees_with_scipy():
    from scipy.special import softmax
    from scipy.stats import entropy
    similarity = np.random.default_rng(10).random((3, 6, 20))
    assert np.allclose(relative_entropy(similarity)[0], entropy(softmax(similarity/0.1, -1), axis=-1))


def test_aggregation_agrees_with_a_loop():
    rng = np.random.default_rng(11)
    scores, indptr = rng.random((5, 30)), np.array([0, 4, 4, 10, 11, 30])
    for how, rule in {"mean": np.mean, "max": np.max, "top": lambda x: np.sort(x)[-2:].mean()}.items():
        found = aggregate(scores, indptr, how, 2)
        for query in range(5):
            for session in range(5):
                members = scores[query, indptr[session]:indptr[session + 1]]
                assert np.isnan(found[query, session]) if not len(members) else np.isclose(found[query, session], rule(members))


def test_equal_scores_are_ordered_by_the_second_score_then_by_id():
    table = ranking_table("x", ["q"], ["c", "a", "b", "d"], np.array([[1.0, 1.0, 1.0, np.nan]]), np.array([[0.0, 0.0, 5.0, 9.0]]))
    assert table["session_id"].to_list() == ["b", "a", "c", "d"]


@pytest.mark.parametrize("name", ["", "turn:", "lexical:", "turn:top0", "lexical:turn:top2", "turn:whole", "Turn", "a b", "nonsense", "lexical:session+nonsense"])
def test_bad_view_names_are_refused_with_the_name(name):
    with pytest.raises(ValueError, match="view"):
        parse_view(name)


@pytest.mark.parametrize("views", [{"nonsense": None}, ["session"], "session,turn:middle"])
def test_views_of_the_wrong_kind_are_refused(views):
    with pytest.raises((TypeError, ValueError), match="view"):
        chosen_presets(RoutingConfig(views=views))


def test_no_candidates_is_refused():
    with pytest.raises(ValueError, match="n_candidates must be at least 1"):
        semantic_edges([np.eye(3)], n_candidates=0)


def test_unknown_weights_are_refused():
    with pytest.raises(ValueError, match="legasy"):
        route(np.zeros((1, 6, 3)), ROUTING_PRESETS["paper"].__class__(("session",), weights="legasy"))


# --- gold and awkward conversations ------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    source = plain_file(folder/"two.json", [talk(9, conversation_id="c1"), talk(6, conversation_id="c2")])
    return run_stages(folder/"run", dataset="plain", data=str(source))


def test_no_gold_label_is_read_before_evaluation(small_run):
    rankings = {stage: stage_table(small_run, stage, "rankings") for stage in ("routing", "graph")}
    gold = small_run/"data/gold.parquet"
    kept = gold.read_bytes()
    try:
        gold.write_bytes(b"poison")
        run_units(UnitsConfig(), small_run)
        run_routing(RoutingConfig(), small_run)
        run_graph(GraphConfig(), small_run)
        for stage, before in rankings.items():
            assert stage_table(small_run, stage, "rankings").equals(before)
    finally:
        gold.write_bytes(kept)


def test_rankings_hold_every_session_once(small_run):
    for stage in ("routing", "graph"):
        table = stage_table(small_run, stage, "rankings")
        groups = table.group_by("system", "question_id").agg(pl.len(), pl.col("session_id").n_unique().alias("unique"),
                                                             pl.col("rank").min().alias("first"), pl.col("rank").max().alias("last"))
        assert groups.filter((pl.col("len") != pl.col("unique")) | (pl.col("first") != 1) | (pl.col("last") != pl.col("len"))).height == 0
    assert {"paper", "released", "memloc"} <= set(stage_table(small_run, "graph", "rankings")["system"])


def test_unit_and_seed_order_of_input_does_not_matter(small_run, tmp_path):
    turned = [talk(9, conversation_id="c1"), talk(6, conversation_id="c2")]
    for conversation in turned:
        conversation["sessions"].reverse()
    other = run_stages(tmp_path/"run", dataset="plain", data=str(plain_file(tmp_path/"turned.json", turned)))
    for system in ("paper", "memloc"):
        pick = [stage_table(run, "graph", "rankings").filter(pl.col("system") == system).sort("question_id", "rank")["session_id"].to_list()
                for run in (small_run, other)]
        assert pick[0] == pick[1]


AWKWARD = {
    "one session": [talk(1)],
    "one turn": [talk(1, 1)],
    "no dates": [talk(5, dated=False)],
    "empty session": [talk(4) | {"sessions": talk(4)["sessions"] + [{"session_id": "s9", "date": "2024-09-09", "turns": []}]}],
    "empty turn": [talk(4) | {"sessions": [s | {"turns": s["turns"] + [{"speaker": "Ana", "text": ""}]} for s in talk(4)["sessions"]]}],
    "long turn": [talk(4) | {"sessions": talk(4)["sessions"] + [
        {"session_id": "s9", "date": "2024-09-09", "turns": [{"speaker": "Ana", "text": "harbour lantern compass " * 3200}]}]}],
    "odd text": [talk(4) | {"sessions": talk(4)["sessions"] + [{"session_id": "s9", "date": "2024-09-09", "turns": [
        {"speaker": "Ana", "text": "我喜欢音乐 🎻 {x} <|im_end|> </s> [12] <id>3</id> \ud800"}]}]}],
    "mixed zones": [talk(4) | {"sessions": [s | {"date": f"2024-0{i + 1}-01T10:00:00" + ["Z", "", "+09:00", ""][i]}
                                            for i, s in enumerate(talk(4)["sessions"])]}],
    "conversation without sessions": [talk(4), {"conversation_id": "void", "sessions": [], "questions": []}],
    "conversation without questions": [talk(4), talk(4, conversation_id="mute") | {"questions": []}],
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_conversations_run_to_the_report(name, tmp_path):
    run = run_stages(tmp_path/"run", dataset="plain", data=str(plain_file(tmp_path/"in.json", AWKWARD[name])))
    run_evaluation(EvaluationConfig(n_bootstrap=100), run)
    rows = stage_table(run, "evaluation", "rows")
    found = rows.filter((pl.col("system") == "memloc") & (pl.col("metric") == "recall") & (pl.col("k") == 10))
    assert found.height and found["value"].is_between(0, 100).all()


def test_zero_questions_is_an_error_that_says_so(tmp_path):
    source = plain_file(tmp_path/"in.json", [talk(4) | {"questions": []}])
    run_data(DataConfig(dataset="plain", data=str(source)), tmp_path/"run")
    run_units(UnitsConfig(), tmp_path/"run")
    with pytest.raises(ValueError, match=r"questions.parquet holds no question.*add questions"):
        run_routing(RoutingConfig(), tmp_path/"run")


def test_unknown_preset_names_the_known_ones(small_run):
    with pytest.raises(ValueError, match="paper, released, memloc"):
        run_routing(RoutingConfig(presets="best"), small_run)


def test_memloc_preset_has_a_lexical_view():
    assert any(parse_view(view).scorer == "lexical" for view in MEMLOC_VIEWS)


@pytest.mark.parametrize("settings", [{"n_seeds": 2.5}, {"restart": True}, {"restart": "1e-1"}, {"n_candidates": "20"}])
def test_settings_of_the_wrong_type_are_refused_by_name(settings):
    with pytest.raises(TypeError, match=next(iter(settings))):
        GraphConfig(**settings)
    with pytest.raises(TypeError, match="temperature"):
        RoutingConfig(temperature="1e-3")


@pytest.mark.parametrize(("indptr", "how", "top"), [([0, 3], "mean", 0), ([1, 5], "mean", 0), ([0, 4, 2, 5], "max", 0), ([], "mean", 0),
                                                    ([0, 5], "median", 0), ([0, 5], "top", 0)])
def test_members_that_do_not_fit_and_unknown_rules_are_refused(indptr, how, top):
    with pytest.raises(ValueError, match="indptr must rise from 0|use 'mean', 'max'"):
        aggregate(np.zeros((2, 5)), np.array(indptr), how, top)
