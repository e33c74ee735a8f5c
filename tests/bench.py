"""Speed as ratios measured in one run: a memory that grows, and the nodes of a finished run: `make bench [RUN=runs/locomo]`."""

import argparse
import platform
import resource
import time
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import igraph
import numpy as np
import polars as pl
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from memloc.artifacts import git_commit, stage_array, stage_manifest, stage_table
from memloc.evaluation import evaluate_rankings
from memloc.graph_ppr import (
    GraphEdges,
    _score_blocks,
    candidate_table,
    fit_mixture,
    graph_preset,
    join_parts,
    propagate,
    seed_mass,
    session_scores,
    temporal_edges,
    two_means_split,
    unit_similarity,
)
from memloc.incremental import IncrementalIndex
from memloc.lexical import terms
from memloc.memory_units import UnitIndex, time_text
from memloc.routing import ranking_table, route, routing_preset


def seconds(call, repeat: int = 3) -> tuple[float, object]:
    "Best time of a few calls, and the last result."
    best, result = np.inf, None
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return best, result


def sklearn_members(row: np.ndarray, upper: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    "scikit-learn's mixture of one row, from its default start or from a given split."
    if upper is None:
        fitted = GaussianMixture(2, random_state=0)
    else:
        groups = [row[~upper], row[upper]]
        fitted = GaussianMixture(2, weights_init=[len(g)/len(row) for g in groups], means_init=[[g.mean()] for g in groups],
                                 precisions_init=[[[1/(g.var() + 1e-6)]] for g in groups])
    label = fitted.fit_predict(row[:, None])
    return label == fitted.means_.ravel().argmax(), fitted.score(row[:, None])


def sklearn_rows(values, valid, starts=None) -> list[tuple[np.ndarray, float]]:
    return [sklearn_members(row[mask], None if starts is None else starts[i][mask])
            for i, (row, mask) in enumerate(zip(values, valid, strict=True))]


def graphs_of(similarities: dict, member_rows: dict, ids: dict, views) -> dict:
    "Memory graphs from given semantic members, for any way of fitting."
    out = {}
    for conversation, sessions in ids.items():
        parts = []
        for view in views:
            similarity, index, members = similarities[conversation, view], *member_rows[conversation, view]
            row, column = np.nonzero(members)
            later, earlier = temporal_edges(np.isfinite(np.diag(similarity)))
            source, target = np.r_[row, later], np.r_[index[row, column], earlier]
            parts.append(GraphEdges(source, target, np.arange(len(source)) < len(row), similarity[source, target]))
        out[conversation] = join_parts(views, sessions, parts)
    return out


def bench_mixture_and_walk(run: str, preset: str) -> None:
    routing, settings = routing_preset(preset), graph_preset(preset)
    sessions = stage_table(run, "data", "sessions").sort("conversation_id", "position")
    ids = {key: part["session_id"].to_list() for (key,), part in sessions.partition_by("conversation_id", as_dict=True, maintain_order=True).items()}
    blocks = _score_blocks(run, routing.views)
    ids = {key: ids[key] for key in blocks}
    units = UnitIndex(stage_table(run, "units", "units"), stage_array(run, "units", "vectors"), sessions)
    similarities = {(c, v): unit_similarity(units, c, v) for c in ids for v in routing.views}
    tables = {key: candidate_table(each, settings.n_candidates) for key, each in similarities.items()}
    values = np.concatenate([value for _, value in tables.values()])
    valid = np.isfinite(values)
    spread = np.where(valid, values, -np.inf).max(1) - np.where(valid, values, np.inf).min(1)
    keep = (valid.sum(1) >= 3) & (spread >= 1e-6)
    rows, mask = np.nan_to_num(values[keep]), valid[keep]
    ours_s, (ours, likelihood, start) = seconds(lambda: (*fit_mixture(rows, mask, s := two_means_split(rows, mask))[:2], s))
    default_s, default = seconds(lambda: sklearn_rows(rows, mask), 1)
    given = sklearn_rows(rows, mask, start)
    same = np.mean([(a[m] == b).all() for a, m, (b, _) in zip(ours, mask, given, strict=True)])
    gap = np.abs(likelihood - [value for _, value in given]).max()
    agree = np.mean([(a[m] == b).all() for a, m, (b, _) in zip(ours, mask, default, strict=True)])
    print(f"{preset}: mixture of {len(rows)} nodes: scikit-learn, per node / batched = {default_s/ours_s:.0f} times")
    print(f"{preset}: same start: equal members {100*same:.2f} %, largest difference of log-likelihood a point {gap:.1e}")
    print(f"{preset}: scikit-learn's default start: equal members {100*agree:.1f} %")
    theirs = np.zeros_like(valid)
    for row, m, (members, _) in zip(np.flatnonzero(keep), mask, default, strict=True):
        theirs[row, m] = members
    mine = np.zeros_like(valid)
    mine[keep] = ours
    ends = np.cumsum([len(index) for index, _ in tables.values()])[:-1]
    gold, recall = stage_table(run, "data", "gold"), {}
    for name, members in {"batched": mine, "scikit-learn": theirs}.items():
        dealt = {key: (index, part) for (key, (index, _)), part in zip(tables.items(), np.split(members, ends), strict=True)}
        graphs = graphs_of(similarities, dealt, ids, routing.views)
        ranked = pl.concat([rank(graphs[c], c, blocks[c], ids[c], routing, settings) for c in ids])
        table = evaluate_rankings(ranked, gold, ks=(3, 10))
        recall[name] = {k: table.filter((pl.col("metric") == "recall") & (pl.col("k") == k))["value"].mean()*100 for k in (3, 10)}
    print(f"{preset}: recall@3 / @10 with either: " + "; ".join(f"{n} {v[3]:.2f} / {v[10]:.2f}" for n, v in recall.items()))
    bench_walk(preset, graphs, blocks, ids, routing, settings)


def rank(graph, conversation, block, session_ids, routing, settings) -> pl.DataFrame:
    question_ids, similarity = block
    routed = route(similarity, routing)
    scores, _ = graph.search(routed.similarity, routed.weights, settings)
    return ranking_table("x", question_ids, session_ids, scores, routed.scores)


def bench_walk(preset, graphs, blocks, ids, routing, settings) -> None:
    "All questions at once against one exact solve and one PRPACK call per question."
    seeds = {c: seed_mass((r := route(blocks[c][1], routing)).similarity, r.weights, settings.n_seeds)[0] for c in ids}
    all_s, found = seconds(lambda: {c: propagate(graphs[c].transition, seeds[c], settings.restart) for c in ids})
    whole_s, _ = seconds(lambda: [session_scores(propagate(graphs[c].transition, seed_mass((r := route(blocks[c][1], routing)).similarity,
                         r.weights, settings.n_seeds)[0], settings.restart), len(routing.views)) for c in ids])
    first = next(iter(ids))
    a = graphs[first].transition.toarray()
    exact_s, exact = seconds(lambda: np.linalg.solve(np.eye(len(a)) - (1 - settings.restart)*a, settings.restart*seeds[first]))
    one_s, _ = seconds(lambda: propagate(graphs[first].transition, seeds[first], settings.restart))
    n = len(ids[first])
    pairs = sorted({tuple(sorted((int(s) + v*n, int(t) + v*n))) for v, part in enumerate(graphs[first].edges)
                    for s, t in zip(part.source, part.target, strict=True)})
    graph = igraph.Graph(len(a), pairs)
    prpack_s, prpack = seconds(lambda: [graph.personalized_pagerank(reset=c.tolist(), damping=1 - settings.restart, directed=False)
                                        for c in seeds[first].T], 1)
    linked = np.asarray(graph.degree()) > 0
    n_queries = sum(s.shape[1] for s in seeds.values())
    print(f"{preset}: walk of all {n_queries} questions {all_s:.2f} s, with routing and seeds {whole_s:.2f} s (limit 3 s)")
    print(f"{preset}: first conversation: exact solve / batched walk = {exact_s/one_s:.1f} times, PRPACK / batched walk = {prpack_s/one_s:.0f} times")
    print(f"{preset}: largest difference to the exact solve {np.abs(found[first] - exact).max():.1e}, to PRPACK (linked nodes) "
          f"{np.abs(found[first] - np.array(prpack).T)[linked].max():.1e}")


# --- a memory that grows ---------------------------------------------------------------------------------------------

def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors/np.linalg.norm(vectors, axis=-1, keepdims=True)


def generated_history(n_sessions: int, dim: int, n_turns: int, n_words: int, n_questions: int = 40, seed: int = 1):
    "Sessions (id, date, members) with planted evidence; questions, their vectors, and the ids of the sessions that answer them."
    rng = np.random.default_rng(seed)
    share = np.cumsum(1/np.arange(20, 20_020))
    drawn = np.searchsorted(share/share[-1], rng.random((n_sessions, n_turns, n_words)))
    words = np.array([f"w{i:05d}" for i in range(20_000)], dtype=object)[drawn]
    topics, topic = rng.normal(size=(200, dim)).astype(np.float32), rng.integers(0, 200, n_sessions)
    turn, summary, observation = (unit(topics[topic][:, None] + 1.5*rng.standard_normal((n_sessions, k, dim), dtype=np.float32))
                                  for k in (n_turns, 1, 3))
    gold = rng.choice(n_sessions, n_questions, replace=n_questions > n_sessions)
    questions, vectors = [], []
    for number, session in enumerate(gold):
        place = int(rng.integers(n_turns))
        words[session, place, :2] = f"planted{number}", f"hidden{number}"
        questions.append(f"planted{number} {words[session, place, -1]} {words[rng.integers(n_sessions), 0, 2]}")
        vectors.append(unit(turn[session, place] + 0.7*unit(rng.normal(size=dim))))
    blank, sessions = np.zeros((1, dim), np.float32), []
    for i in range(n_sessions):
        texts, date = [" ".join(said) for said in words[i]], datetime(2000, 1, 1) + timedelta(hours=3*i)
        sessions.append((f"s{i:06d}", date, {"session": (["\n".join(texts)], blank), "time": ([time_text(date)], blank), "turn": (texts, turn[i]),
                                             "summary": (texts[:1], summary[i]), "observation": (texts[:3], observation[i])}))
    return sessions, questions, np.array(vectors, dtype=np.float32), [f"s{session:06d}" for session in gold]


def timed(calls) -> np.ndarray:
    "Milliseconds of each call, shape (2, n_calls): on the clock, and of this process alone (what an idle core would take)."
    out = []
    for call in calls:
        start = time.perf_counter(), time.process_time()
        call()
        out.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return 1e3*np.array(out).T


def shown(milliseconds: np.ndarray) -> str:
    "Median on the clock and, in brackets, of the process alone."
    return "{:.1f} ms ({:.1f})".format(*np.median(milliseconds, axis=1))


def bench_growth(sizes, dim: int, n_turns: int, n_words: int, search_after_add: int = 5_000) -> None:
    "Adding, building and asking a memory of each size."
    last = None
    for size in sizes:
        sessions, questions, vectors, gold = generated_history(size + 10, dim, n_turns, n_words)
        memory = IncrementalIndex()
        add = timed([partial(memory.add, *each) for each in sessions[:size]])
        build = timed([memory.refresh])
        for _ in range(2 if size <= 1_000 else 0):
            again = IncrementalIndex()
            again.sessions, again._number_of, again._dim, again._n_keys = memory.sessions, memory._number_of, memory._dim, memory._n_keys
            build = np.minimum(build, timed([again.refresh]))
        query = timed([partial(memory.search, [questions[i]], vectors[i:i + 1]) for i in range(len(questions))])
        scores, ids = memory.search(questions, vectors), np.array(memory.session_ids)
        found = np.mean([answer in ids[np.argsort(-row)[:3]] for answer, row in zip(gold, scores, strict=True) if answer in memory.sessions])
        own = (add[1].sum() + build[1, 0])/size
        ratio = ""
        if last:
            ratio = (f" (a session {own/last[1]:.2f} times, graph {build[1, 0]/last[2]:.1f} times that of {last[0]} sessions; "
                     f"a session costs n^{np.log(own/last[1])/np.log(size/last[0]):.2f})")
        last = (size, own, build[1, 0])
        line = f"{size} sessions: R@3 {100*found:.0f}; add {shown(add)}; graph {shown(build)}{ratio}; query {shown(query)}"
        if size <= search_after_add:
            later = timed([step for each in sessions[size:size + (10 if size <= 1_000 else 2)]
                           for step in (partial(memory.add, *each), partial(memory.search, questions[:1], vectors[:1]))])
            line += f"; add then search {shown(later[:, ::2] + later[:, 1::2])}"
        print(f"{line}; peak memory so far {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024:.0f} MiB", flush=True)


def bench_incremental(sizes) -> None:
    "Growth on small sessions, and 500 sessions as long as LongMemEval's notes."
    processor = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    print(f"a memory that grows, one thread of {processor[0] if processor else platform.processor()}, commit {git_commit()}")
    print("medians on the clock; in brackets the time of the process alone, which is what an idle core would take")
    terms(["libraries are loaded here"])
    print("500 sessions of 6 turns of 15 terms, vectors of 384 numbers (targets: add 20 ms, graph 0.3 s, query 5 ms)")
    bench_growth([500], 384, 6, 15)
    print("growth, sessions of 4 turns of 6 terms, vectors of 32 numbers (target: query over 50,000 sessions 150 ms)")
    bench_growth(sizes, 32, 4, 6)


def encoding_flops(lengths: np.ndarray, weights: int, layers: int, dim: int) -> float:
    "Multiplications and additions that texts of these token counts need, without padding: matrices and attention."
    return float(2*weights*lengths.sum() + layers*4*dim*(lengths.astype(np.float64)**2).sum())


def bench_encoding(run: str, n_texts: int = 600) -> None:
    "Tokens a second, share of what the cores can do, and what sorting and reading nothing twice are worth."
    import torch

    from memloc.encoders import Encoder, encode_chunk

    encoder = Encoder(stage_manifest(run, "units")["settings"]["encoder"])
    texts = stage_table(run, "units", "units").filter(pl.col("granularity").is_in(["turn", "event", "keyword"]))["text"].to_list()
    given = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))[:n_texts]]
    unique = list(dict.fromkeys(texts))
    mixed = list(dict.fromkeys(given))
    lengths = np.minimum(encoder.n_tokens(mixed), encoder.max_length)
    in_order = [mixed[i] for i in np.argsort(-lengths, kind="stable")]
    size = 2_048
    matrix = torch.rand(size, size)
    encode_chunk(encoder, mixed[:32])  # loads the model
    sgemm_s, _ = seconds(lambda: matrix @ matrix)
    sorted_s, _ = seconds(lambda: encode_chunk(encoder, in_order), 2)
    mixed_s, _ = seconds(lambda: encode_chunk(encoder, mixed), 2)
    parameters = dict(encoder.model.named_parameters())
    weights = sum(value.numel() for name, value in parameters.items() if "embeddings" not in name)
    layers = len({name.partition("layer.")[2].partition(".")[0] for name in parameters if "layer." in name})
    done = encoding_flops(lengths, weights, layers, encoder.dim)/sorted_s/1e9
    peak = 2*size**3/sgemm_s/1e9
    tokens = int(lengths.sum())
    print(f"encoding {len(mixed)} texts, {tokens} tokens, {torch.get_num_threads()} threads: {tokens/sorted_s:.0f} tokens/s, {done:.0f} GFLOP/s "
          f"= {100*done/peak:.0f} % of sgemm's {peak:.0f}")
    print(f"encoding: order as it comes / sorted by length = {mixed_s/sorted_s:.2f} times the time")
    counts = dict(zip(unique, np.minimum(encoder.n_tokens(unique), encoder.max_length), strict=True))
    print(f"encoding: tokens of all {len(texts)} texts / of the {len(unique)} different ones = {sum(counts[one] for one in texts)/sum(counts.values()):.2f}")


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore", ConvergenceWarning)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="a finished run; runs/sample if it is there")
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 500, 1_000, 5_000, 10_000, 50_000], help="sessions of the memory that grows")
    given = parser.parse_args()
    bench_incremental(given.sizes)
    run = given.run or "runs/sample"
    if not (Path(run)/"graph/manifest.json").is_file():
        if given.run:
            parser.error(f"{run} is not a finished run; `make run` makes runs/sample, `make reproduce` the others")
        parser.exit(message="no finished run: the nodes of a run were not measured; `make run` makes runs/sample\n")
    print(f"{stage_manifest(run, 'data')['settings']['dataset']} in {run}, commit {git_commit()}")
    for preset in ("paper", "released", "memloc"):
        bench_mixture_and_walk(run, preset)
    bench_encoding(run)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024:.0f} MiB")
