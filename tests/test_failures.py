"""Every missed question is assigned to one stage: against a slow oracle, on made-up runs and on the sample."""

import random
import shutil

import polars as pl
import pytest
from test_generation import located_run  # noqa: F401  (a fixture)

from memloc.artifacts import Stage, stage_manifest, stage_table
from memloc.failures import (
    STAGES,
    answered,
    browse,
    evidence_pieces,
    failure,
    find_failures,
    first_stage,
    is_right,
    keep_failures,
    lost_at,
    plot_failures,
    trace_pieces,
)
from memloc.generation import GenerationConfig, run_generation
from memloc.schema import COLUMNS


def frame(rows, columns):
    return pl.DataFrame(rows, schema=columns, orient="row")


def made_run(run, seed, n_questions=60):
    "A run of random facts: questions, gold, what was ranked, named, shown and answered."
    rng, sessions = random.Random(seed), [f"c/s{i}" for i in range(8)]
    turns = {session: [f"{session}/t{i}" for i in range(3)] for session in sessions}
    every = [turn for each in turns.values() for turn in each]
    facts, gold, ranked, named, seen, said = {}, [], [], [], [], []
    for number in range(n_questions):
        name, abstain = f"q{number:02d}", rng.random() < 0.15
        evidence = rng.sample(every, rng.choice([0, 1, 1, 2, 3]))
        where = sorted({turn[:4] for turn in evidence})
        if where and rng.random() < 0.2:
            evidence = [turn for turn in evidence if turn[:4] != where[0]]  # a session without a gold turn
        gold.append((name, rng.choice(["fact", "time"]), None if abstain else "yes", "text", None, evidence, where, abstain, None))
        order = rng.sample(sessions, 8)
        ranked += [("base", name, rank, session, 1/rank) for rank, session in enumerate(order, 1)]
        chosen = [turn for session in order[:4] for turn in turns[session] if rng.random() < 0.5]
        named += [(name, turn[:4], turn) for turn in chosen]
        shown = [turn for session in rng.sample(order[:4], 2) for turn in turns[session]]
        for variant in ("cue", "mmr", "none"):
            seen += [(variant, name, i, turn[:4], turn) for i, turn in enumerate(shown if variant != "none" else [], 1)]
            status = "error: timeout" if rng.random() < 0.05 else "ok"
            answer, quiet = rng.choice([("yes", False), ("no", False), ("Not mentioned.", True)])
            said.append((name, variant, answer if status == "ok" else None, quiet, status))
            facts[name, variant] = (order[:4], set(chosen), set(shown), answer, quiet, status)
    with Stage(run, "data", {}) as stage:
        tables = {"gold": gold, "questions": [(row[0], "c", f"{row[0]}?", None) for row in gold], "sessions": [(s, "c", i, None, "", s, 3) for i, s in enumerate(sessions)],
                  "turns": [(turn, session, "c", i, "Ann", turn, None) for session in sessions for i, turn in enumerate(turns[session])]}
        for name, rows in tables.items():
            stage.table(name, frame(rows, COLUMNS[name]), next(iter(COLUMNS[name])))
        stage.json("dataset", {"label": "made@1"})
    with Stage(run, "routing", {}) as stage:
        stage.table("rankings", frame(ranked, ["system", "question_id", "rank", "session_id", "score"]), ["question_id", "rank"])
    with Stage(run, "locator", {"base": "base", "top_k": 4}) as stage:
        stage.table("evidence", frame(named, {"question_id": pl.String, "session_id": pl.String, "turn_id": pl.String}), "question_id")
    with Stage(run, "generation", {"model": "toy"}) as stage:
        stage.table("segments", frame(seen, ["variant", "question_id", "number", "session_id", "turn_id"]), ["variant", "question_id", "number"])
        stage.table("answers", frame(said, {"question_id": pl.String, "variant": pl.String, "answer": pl.String, "abstained": pl.Boolean, "status": pl.String}), ["variant", "question_id"])
    return facts, {row[0]: row for row in gold}


def oracle(facts, gold, variant):
    "Question -> stage of the missed ones, by loops."
    found = {}
    for (name, which), (candidates, named, shown, answer, quiet, status) in facts.items():
        _, _, _, _, _, evidence, where, abstain, _ = gold[name]
        if which != variant or status != "ok" or (not where and not abstain):
            continue
        if quiet if abstain else answer == "yes":
            continue
        stages = []
        for session in where:
            for turn in [t for t in evidence if t[:4] == session] or [None]:
                if (turn in shown) if turn else any(t[:4] == session for t in shown):
                    stages.append("generation")
                elif session not in candidates:
                    stages.append("retrieval")
                elif variant == "cue" and not ((turn in named) if turn else any(t[:4] == session for t in named)):
                    stages.append("extraction")
                else:
                    stages.append("reranking")
        found[name] = "generation" if abstain else min(stages, key=STAGES.index)
    return found


class TestMadeUpRuns:
    @pytest.mark.parametrize("seed", range(4))
    def test_stages_are_those_of_a_slow_oracle(self, tmp_path, seed):
        facts, gold = made_run(tmp_path, seed)
        for variant in ("cue", "mmr"):
            found = find_failures(tmp_path, variant)
            assert dict(found.missed.select("question_id", "stage").iter_rows()) == oracle(facts, gold, variant)
            counts = found.counts()
            total = dict(zip(counts.columns, counts.row(-1), strict=True))
            assert sum(total[stage] for stage in STAGES) == total["missed"] == len(found.missed)
            asked = {name for name, which in facts if which == variant}
            assert found.n_questions + len(found.left_out) == len(asked)
            assert not set(found.left_out["question_id"]) & set(found.missed["question_id"])
        assert find_failures(tmp_path, "mmr").counts()["extraction"].sum() == 0

    def test_all_stages_occur_and_draw(self, tmp_path):
        made_run(tmp_path, 0, 120)
        counts = find_failures(tmp_path).counts()
        assert min(counts.select(STAGES).row(-1)) > 0
        axes = plot_failures(counts).axes[0]
        tops = {round(bar.get_x(), 3): bar.get_y() + bar.get_height() for bar in axes.patches}
        assert len(axes.patches) == 4*len(counts) and all(top == pytest.approx(100) for top in tops.values())

    def test_one_question_agrees_with_the_table(self, tmp_path):
        made_run(tmp_path, 1)
        table = browse(tmp_path)
        found = find_failures(tmp_path)
        assert table["question_id"].to_list() == found.missed["question_id"].to_list()
        for row in table[:5].iter_rows(named=True):
            view = failure(tmp_path, row["question_id"])
            assert (view["stage"], view["gold"], view["answer"]) == (row["stage"], row["gold"], row["answer"]) and not view["right"]
            assert view["retrieved"] == row["retrieved"] and view["shown"] == row["shown"] and len(view["retrieved"]) == 4
            assert len(row["evidence"]) == len(view["pieces"])
            if view["gold"]:
                assert view["stage"] == first_stage([piece["stage"] for piece in view["pieces"]])
        right = answered(tmp_path, "cue")[0].filter("right")["question_id"][0]
        assert failure(tmp_path, right)["stage"] is None

    def test_filters(self, tmp_path):
        made_run(tmp_path, 2)
        whole = browse(tmp_path)
        part = browse(tmp_path, stage="retrieval", category="fact")
        assert part["question_id"].to_list() == whole.filter(stage="retrieval", category="fact")["question_id"].to_list() != []
        assert browse(tmp_path, limit=2).height == 2
        with pytest.raises(ValueError, match="stage 'rank' is unknown; choose one of retrieval"):
            browse(tmp_path, stage="rank")

    def test_wrong_names(self, tmp_path):
        facts, _ = made_run(tmp_path, 3)
        with pytest.raises(ValueError, match="no answers of variant 'rerank'"):
            find_failures(tmp_path, "rerank")
        with pytest.raises(ValueError, match="variant 'none' is shown no memory"):
            find_failures(tmp_path, "none")
        with pytest.raises(ValueError, match="question 'q99' has no stage: it is no answered question"):
            failure(tmp_path, "q99")
        failed = next(name for (name, variant), fact in facts.items() if variant == "cue" and fact[-1] != "ok")
        with pytest.raises(ValueError, match=f"{failed}' has no stage: error: timeout"):
            failure(tmp_path, failed)
        with pytest.raises(FileNotFoundError, match="evaluation"):
            find_failures(tmp_path, rule="judge")

    def test_verdicts_decide_where_there_are_some(self, tmp_path):
        made_run(tmp_path, 0)
        asked = answered(tmp_path, "cue")[0]["question_id"]
        verdicts = frame([("cue (toy)", name, "strict", None if i == 0 else i % 2 == 0) for i, name in enumerate(asked)], {
            "system": pl.String, "question_id": pl.String, "prompt": pl.String, "verdict": pl.Boolean})
        with Stage(tmp_path, "evaluation", {}) as stage:
            stage.table("verdicts", verdicts, "question_id")
        found = find_failures(tmp_path, rule="judge")
        assert found.missed["question_id"].to_list() == asked.gather_every(2, 1).to_list()
        assert found.left_out.filter(reason="no verdict")["question_id"].to_list() == [asked[0]]
        with pytest.raises(ValueError, match="no verdicts of the prompt 'lenient'"):
            find_failures(tmp_path, rule="judge", judge_prompt="lenient")

    def test_kept_counts(self, tmp_path, monkeypatch):
        made_run(tmp_path, 0)
        manifest = stage_manifest(tmp_path, "generation")
        monkeypatch.setattr("memloc.failures.stage_manifest", lambda run, stage: stage_manifest(run, stage) | ({"commit": "abc1234"} if stage == "generation" else {}))
        n = keep_failures(tmp_path, tmp_path/"kept.csv", date="2026-01-02")
        rows = pl.read_csv(tmp_path/"kept.csv")
        assert len(rows) == n and set(rows["variant"]) == {"cue", "mmr"} and set(rows["dataset"]) == {"made@1"} and manifest["commit"]
        assert (rows.select(pl.sum_horizontal(STAGES)).to_series() == rows["missed"]).all()
        monkeypatch.setattr("memloc.failures.stage_manifest", lambda run, stage: stage_manifest(run, stage) | {"commit": "abc1234+changes"})
        with pytest.raises(ValueError, match="cannot be kept"):
            keep_failures(tmp_path, tmp_path/"kept.csv")


class TestPieces:
    gold = frame([("q", ["a/t0", "a/t2", "b/t1"], ["a", "b", "d"])], {"question_id": pl.String, "evidence_turns": pl.List(pl.String), "evidence_sessions": pl.List(pl.String)})
    turns = frame([(f"{s}/t{i}", s) for s in "abcd" for i in range(3)], ["turn_id", "session_id"])

    def sessions(self, **source):
        return frame([(s, "c", source.get(s, s)) for s in "abcd"], ["session_id", "conversation_id", "source_session_id"])

    def test_turns_and_whole_sessions(self):
        found = evidence_pieces(self.gold, self.sessions(), self.turns)
        assert found.select("piece", "turn_id", "session_id").rows() == [(1, "a/t0", "a"), (2, "a/t2", "a"), (3, "b/t1", "b"), (4, None, "d")]

    def test_copies_are_one_piece(self):
        gold = self.gold.with_columns(evidence_turns=pl.lit(["a/t0", "b/t0"], pl.List(pl.String)), evidence_sessions=pl.lit(["a", "b"], pl.List(pl.String)))
        found = evidence_pieces(gold, self.sessions(b="a"), self.turns)
        assert found.select("piece", "turn_id").rows() == [(1, "a/t0"), (1, "b/t0")]

    @pytest.mark.parametrize("facts", [(c, n, s) for c in (True, False) for n in (True, False) for s in (True, False)])
    def test_a_piece_has_one_stage(self, facts):
        candidate, named, shown = facts
        stage = lost_at(*facts)
        assert (stage == "generation") == shown
        assert (stage == "retrieval") == (not shown and not candidate)
        assert (stage == "extraction") == (not shown and candidate and not named)


class TestSample:
    @pytest.fixture(scope="class")
    def run(self, located_run, tmp_path_factory):  # noqa: F811
        run = shutil.copytree(located_run, tmp_path_factory.mktemp("missed")/"run")
        run_generation(GenerationConfig(model="extractive", variant="cue,mmr,evidence"), run)
        return run

    def test_counts_add_up_and_more_shown_means_less_lost(self, run):
        for variant in ("cue", "mmr", "evidence"):
            found = find_failures(run, variant)
            gold = stage_table(run, "data", "gold")
            assert found.n_questions + len(found.left_out) == len(gold)
            assert found.counts()["missed"][-1] == len(found.missed) <= found.n_questions
            pieces = trace_pieces(run, variant)
            segments = stage_table(run, "generation", "segments").filter(variant=variant)
            shown = pieces.filter("shown", pl.col("turn_id").is_not_null())
            assert shown.join(segments, on=["question_id", "turn_id"], how="anti").is_empty()
            assert len(shown) or variant == "evidence"
        cue, evidence = (trace_pieces(run, variant) for variant in ("cue", "evidence"))
        assert (cue["shown"] | ~evidence["shown"]).all()  # in the variant "evidence" only named turns of the same sessions are shown

    def test_a_retrieval_failure_is_one(self, run):
        lost = browse(run, stage="retrieval", limit=3)
        gold = dict(stage_table(run, "data", "gold").select("question_id", "evidence_sessions").iter_rows())
        for row in lost.iter_rows(named=True):
            assert not set(gold[row["question_id"]]) <= set(row["retrieved"])


@pytest.mark.parametrize(("answer", "golds", "right"), [
    ("It was on 7 May 2023.", ["May 7, 2023"], True), ("seven cats", ["7"], True), ("Paris", ["London", "paris"], True), ("the cat", ["a dog"], False), ("", ["yes"], False),
    ("anything", ["..."], False)])
def test_contained_words(answer, golds, right):
    assert is_right(answer, golds, False) is right
