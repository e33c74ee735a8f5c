"""The data stage on real files (skipped where they are not), on generated files, and over a loopback server."""

import gzip
import hashlib
import json
import lzma
import threading
import unicodedata
from collections import Counter
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memloc.artifacts import stage_table
from memloc.cleaning import is_telling
from memloc.data import (
    KNOWN,
    DataConfig,
    largest_remainders,
    lint_file,
    lint_report,
    load,
    run_data,
    stratified,
    subset_of,
)
from memloc.evaluation import dataset_label
from memloc.fetch import DATASETS, Source, fetch
from memloc.schema import COLUMNS, LABEL_FREE
from memloc.tables import subset_name

REAL = Path(__file__).resolve().parents[2]/"shared"/"data"
LOCOMO = REAL/"locomo"/"locomo10.json"
PARTS = sorted((REAL/"longmemeval").glob("longmemeval_s_cleaned.dev.part*.json.xz"))
ORACLE = REAL/"longmemeval"/"longmemeval_oracle.dev.json.gz"
MT_BENCH = REAL/"long_mt_bench_plus"/"LongMTBench_PLUS.conv0.json"
needs_real = pytest.mark.skipif(not LOCOMO.is_file(), reason=f"research data is not shipped and not found at {REAL}")


def rule(dataset, name: str) -> pl.DataFrame:
    return dataset.lint.filter(pl.col("rule") == name)


# LoCoMo


@pytest.fixture(scope="module")
def locomo():
    return load("locomo", LOCOMO)


@needs_real
def test_locomo_counts(locomo):
    assert locomo.label == "locomo@79fa87e9"
    assert [locomo.tables()[name].height for name in COLUMNS][:5] == [10, 272, 5882, 1986, 1986]
    assert Counter(locomo.gold["category"]) == {
        "multi-hop": 282, "temporal": 321, "open-domain": 96, "single-hop": 841, "adversarial": 446}
    assert Counter(locomo.annotations["kind"])["summary"] == 272
    assert locomo.turns["caption"].count() == 1226
    assert locomo.sessions["date"].null_count() == 0


@needs_real
def test_locomo_split(locomo):
    splits = dict(locomo.conversations.select("conversation_id", "split").rows())
    assert {name for name, split in splits.items() if split == "dev"} == {"conv-26", "conv-30", "conv-41"}
    assert Counter(splits.values()) == {"dev": 3, "test": 7}


@needs_real
def test_locomo_evidence(locomo):
    without = locomo.gold.filter(pl.col("evidence_sessions").list.len() == 0)
    assert locomo.gold.height - without.height == 1982
    assert without["question_id"].to_list() == ["conv-26/q030", "conv-26/q046", "conv-50/q039", "conv-50/q042"]
    assert rule(locomo, "question without evidence").height == 4
    assert set(rule(locomo, "evidence does not exist")["value"]) == {"D10:19", "D4:36"}
    assert rule(locomo, "evidence not readable")["value"].to_list() == ["D"]
    assert rule(locomo, "repeated evidence")["value"].to_list() == ["D4:5"]
    repaired = rule(locomo, "malformed evidence").filter(pl.col("record").str.contains("question"))
    assert set(repaired["value"]) == {"D8:6; D9:17", "D:11:26", "D9:1 D4:4 D4:6", "D22:1 D22:2 D9:10 D9:11",
                                      "D21:18 D21:22 D11:15 D11:19", "D30:05"}
    evidence = dict(locomo.gold.select("question_id", "evidence_turns").rows())
    assert evidence["conv-50/q069"] == ["conv-50/s029/t004"]
    assert evidence["conv-26/q037"] == ["conv-26/s007/t005", "conv-26/s008/t016"]
    assert len(evidence["conv-43/q018"]) == 7 and "conv-43/s010/t025" in evidence["conv-43/q018"]
    assert len(evidence["conv-42/q058"]) == 6 and len(evidence["conv-47/q038"]) == 2 and len(evidence["conv-42/q088"]) == 2


@needs_real
def test_locomo_traps_and_answers(locomo):
    adversarial = locomo.gold.filter(pl.col("category") == "adversarial")
    assert adversarial["is_abstention"].all() and adversarial["trap"].null_count() == 0
    assert adversarial.filter(pl.col("answer").is_not_null()).select("answer", "trap").rows() == [("No", "Yes")] * 2
    assert not locomo.gold.filter(pl.col("category") != "adversarial")["is_abstention"].any()
    assert Counter(locomo.gold["answer_type"]) == {"text": 1536, "int": 6, None: 444}
    assert rule(locomo, "trap and no answer").height == 444 and rule(locomo, "trap and answer").height == 2
    assert rule(locomo, "answer is not text").height == 6


@needs_real
def test_locomo_other_irregularities(locomo):
    assert rule(locomo, "date without session").height == 16
    assert rule(locomo, "newline in turn").height == 37
    assert rule(locomo, "repeated question").height == 12
    kept_out = rule(locomo, "field not kept").group_by("field").agg(pl.col("value").cast(int).sum())
    assert dict(kept_out.rows()) == {"img_url": 910, "query": 888, "re-download": 206}
    assert locomo.turns["text"].str.contains("\n").sum() == 37


@needs_real
def test_locomo_turns_are_those_of_the_file(locomo):
    texts = [turn["text"] for record in sorted(json.loads(LOCOMO.read_text("utf-8")), key=lambda r: r["sample_id"])
             for number in range(1, 40) for turn in record["conversation"].get(f"session_{number}", [])]
    ordered = locomo.turns.join(locomo.sessions.select("session_id", place="position"), "session_id")
    assert ordered.sort("conversation_id", "place", "position")["text"].to_list() == texts


@needs_real
def test_locomo_captions_can_be_left_out():
    assert load("locomo", LOCOMO, captions=False).turns["caption"].count() == 0


# LongMemEval


@pytest.fixture(scope="module")
def longmemeval():
    return load("longmemeval", PARTS[0])


@needs_real
def test_longmemeval_counts(longmemeval):
    assert longmemeval.label == "longmemeval_s@7249d5f4"
    assert [longmemeval.tables()[name].height for name in COLUMNS][:5] == [50, 2396, 24563, 50, 50]
    assert set(longmemeval.conversations["split"]) == {"dev"}
    assert Counter(longmemeval.gold["answer_type"]) == {"text": 45, "int": 5}
    assert longmemeval.gold["is_abstention"].sum() == 5
    assert rule(longmemeval, "sessions out of order").height == 23
    assert rule(longmemeval, "sessions after the question").height == 11
    assert rule(longmemeval, "repeated session id").height == 2
    assert rule(longmemeval, "session starts with the assistant").height == 200
    assert rule(longmemeval, "empty turn").height == 1
    without = rule(longmemeval, "gold session without a marked turn")
    assert without["record"].str.extract(r"(lme-\w+)").n_unique() == 12


@needs_real
def test_longmemeval_gold_agrees_with_the_file(longmemeval):
    records = json.loads(lzma.decompress(PARTS[0].read_bytes()))
    gold = {row["source_question_id"]: row for row in longmemeval.gold.iter_rows(named=True)}
    places = dict(longmemeval.sessions.select("session_id", "source_session_id").rows())
    texts = dict(longmemeval.turns.select("turn_id", "text").rows())
    for record in records:
        row = gold[record["question_id"]]
        named = {record["haystack_session_ids"][int(places[session])] for session in row["evidence_sessions"]}
        assert named == set(record["answer_session_ids"])
        marked = sorted(turn["content"] for turns in record["haystack_sessions"] for turn in turns if turn.get("has_answer"))
        assert sorted(texts[turn] for turn in row["evidence_turns"]) == marked


@needs_real
def test_longmemeval_labels_do_not_leak(longmemeval):
    records = json.loads(lzma.decompress(PARTS[0].read_bytes()))
    names = {name for record in records for name in [*record["haystack_session_ids"], record["question_id"]]}
    for table in LABEL_FREE:
        frame = getattr(longmemeval, table)
        assert not any("answer" in column for column in frame.columns)
        for column in (column for column in frame.columns if column not in ("text", "question")):
            values = set(frame[column].cast(pl.String).drop_nulls())
            assert not values & names, (table, column)
            assert not any(is_telling(value) for value in values), (table, column)
    said = Counter(unicodedata.normalize("NFC", turn["content"]) for record in records for turns in record["haystack_sessions"] for turn in turns)
    assert Counter(longmemeval.turns["text"]) == said  # "answer_" in a text is what somebody wrote
    assert rule(longmemeval, "not NFC").height == 1


@needs_real
def test_longmemeval_histories_are_sorted(longmemeval):
    dates = longmemeval.sessions.sort("conversation_id", "position").group_by("conversation_id").agg("date")["date"]
    assert all(list(part) == sorted(part) for part in dates)


@needs_real
def test_every_part_is_known():
    for path in PARTS[1:]:
        digest = hashlib.sha256(lzma.decompress(path.read_bytes())).hexdigest()
        assert KNOWN[digest][0] == "longmemeval_s"


@needs_real
def test_packing_does_not_change_the_label(tmp_path):
    content = lzma.decompress(PARTS[6].read_bytes())
    for name, data in (("a.json", content), ("b.json.gz", gzip.compress(content, 1)), ("c", PARTS[6].read_bytes())):
        (tmp_path/name).write_bytes(data)
        assert load("longmemeval_s", tmp_path/name).label == "longmemeval_s@6221854d"


@needs_real
def test_oracle_and_s_are_not_mixed():
    oracle = load("longmemeval_oracle", ORACLE)
    assert oracle.questions.height == 301 and oracle.gold["is_abstention"].sum() == 19
    assert oracle.conversations["conversation_id"].n_unique() == 301
    with pytest.raises(ValueError, match="this is longmemeval_oracle"):
        load("longmemeval_s", ORACLE)


def test_longmemeval_m_has_the_same_layout(tmp_path):
    history = [[{"role": "user", "content": f"chat {i}"}] for i in range(502)]
    record = {"question_id": "q_abs", "question_type": "multi-session", "question": "?", "answer": 15,
              "question_date": "2023/05/30 (Tue) 23:31", "answer_session_ids": ["answer_a"],
              "haystack_session_ids": [f"ultrachat_{i}" for i in range(501)] + ["answer_a"],
              "haystack_dates": ["2023/05/20 (Sat) 02:21"] * 502, "haystack_sessions": history}
    (tmp_path/"m.json").write_text(json.dumps([record]))
    loaded = load("longmemeval_m", tmp_path/"m.json", allow_unknown_hash=True)
    assert loaded.sessions["source_session_id"].to_list() == [str(i) for i in range(502)]
    assert loaded.gold["evidence_sessions"].to_list() == [[loaded.sessions["session_id"][501]]]
    assert loaded.gold["is_abstention"].to_list() == [True] and loaded.gold["answer_type"].to_list() == ["int"]


# Long-MT-Bench+


@needs_real
def test_long_mt_bench_plus():
    loaded = load("long_mt_bench_plus", MT_BENCH)
    assert [loaded.tables()[name].height for name in COLUMNS][:5] == [1, 5, 138, 27, 27]
    assert Counter(loaded.turns["speaker"]) == {"human": 69, "bot": 69}
    marks = rule(loaded, "speaker mark")
    assert Counter(marks["value"]) == {"[human]:": 8, "[bot]:": 3}
    assert not loaded.questions["question"].str.starts_with("[human]").any()
    exchanges = [text for session in json.loads(MT_BENCH.read_text("utf-8"))[0]["sessions"] for text in session]
    pairs = loaded.turns["text"].to_list()
    assert [f"[human]: {a}\n[bot]: {b}" for a, b in zip(pairs[::2], pairs[1::2], strict=True)] == exchanges


def test_long_mt_bench_plus_from_parquet(tmp_path):
    records = [{"conversation_id": 3, "sessions": [["[human]: a\n[bot]: b"]], "questions": ["q"], "answers": ["a"]}]
    pl.DataFrame(records).write_parquet(tmp_path/"0.parquet")
    loaded = load("long_mt_bench_plus", tmp_path/"0.parquet", allow_unknown_hash=True)
    assert loaded.turns["text"].to_list() == ["a", "b"]


# checksums, lint, stage


@needs_real
def test_changed_file_is_refused_without_the_flag(tmp_path):
    (tmp_path/"locomo10.json").write_bytes(LOCOMO.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"locomo10\.json: its sha256 [0-9a-f]{64} .*allow_unknown_hash=True"):
        load("locomo", tmp_path/"locomo10.json")
    assert load("locomo", tmp_path/"locomo10.json", allow_unknown_hash=True).lint["rule"][0] == "unknown release"


@needs_real
@pytest.mark.parametrize(("path", "name"), [(LOCOMO, "locomo"), (ORACLE, "longmemeval_oracle"), (MT_BENCH, "long_mt_bench_plus")])
def test_lint_file_finds_the_layout(path, name):
    found = lint_file(path)
    assert found.name == name
    assert lint_report(found)["count"].sum() == found.lint.height > 0


@needs_real
def test_gold_is_never_needed_to_load_the_rest(tmp_path):
    records = json.loads(LOCOMO.read_text("utf-8"))[:2]
    poisoned = json.loads(json.dumps(records))
    for record in poisoned:
        for item in record["qa"]:
            item |= {"answer": "POISON", "adversarial_answer": "POISON", "evidence": ["D1:1"], "category": 3}
    for name, content in (("clean", records), ("poisoned", poisoned)):
        (tmp_path/name).write_text(json.dumps(content), "utf-8")
    clean, dirty = (load("locomo", tmp_path/name, allow_unknown_hash=True) for name in ("clean", "poisoned"))
    for table in LABEL_FREE:
        assert getattr(clean, table).equals(getattr(dirty, table))
        assert "POISON" not in getattr(dirty, table).write_csv()


def write_plain(path: Path, conversations: list, lines: bool = False) -> Path:
    text = "\n".join(json.dumps(c) for c in conversations) if lines else json.dumps({"conversations": conversations})
    path.write_text(text, "utf-8")
    return path


def test_run_data_writes_what_it_loaded(tmp_path):
    conversation = {"conversation_id": "c", "sessions": [
        {"session_id": f"s{i}", "date": f"2024-01-{20 - i:02d}", "turns": [{"speaker": "A", "text": str(i)}]} for i in range(12)],
        "questions": [{"question": f"q{i}", "evidence": [f"s{i}:1"], "answer": i} for i in range(3)]}
    path = write_plain(tmp_path/"a.json", [conversation, {**conversation, "conversation_id": "d"}])
    summary = run_data(DataConfig("plain", str(path)), tmp_path/"run")
    assert dict(summary.rows())["turns"] == 24
    for name, table in load("plain", path).tables().items():
        assert stage_table(tmp_path/"run", "data", name).sort(table.columns[:3]).equals(table.sort(table.columns[:3]))
    run_data(DataConfig("plain", str(path), limit_questions=2), tmp_path/"short")
    assert stage_table(tmp_path/"short", "data", "questions").height == 2
    assert stage_table(tmp_path/"short", "data", "conversations")["conversation_id"].to_list() == ["c"]
    first, again = ((tmp_path/run/"data"/"turns.parquet").read_bytes() for run in ("run", "run"))
    run_data(DataConfig("plain", str(path)), tmp_path/"again")
    assert first == again == (tmp_path/"again"/"data"/"turns.parquet").read_bytes()


# a part of the questions

def strata(sizes: dict[str, dict[str, int]]) -> pl.DataFrame:
    "Questions of {conversation: {category: number}}."
    rows = [(f"{c}/{kind}{i:03d}", c, kind) for c, kinds in sizes.items() for kind, n in kinds.items() for i in range(n)]
    return pl.DataFrame(rows, schema={"question_id": pl.String, "conversation_id": pl.String, "category": pl.String}, orient="row")


SIZES = st.dictionaries(st.sampled_from("abcdefgh"), st.dictionaries(st.sampled_from("uvwxyz"), st.integers(1, 30), min_size=1), min_size=1)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.data())
def test_a_stratified_subset_has_the_shares_of_the_whole(sizes, data):
    questions = strata(sizes)
    n, seed = data.draw(st.integers(1, len(questions))), data.draw(st.integers(0, 3))
    chosen = stratified(questions, n, seed)
    assert len(set(chosen)) == len(chosen) == n and chosen == sorted(chosen)
    assert chosen == stratified(questions.sample(fraction=1, shuffle=True, seed=seed), n, seed)
    part, kinds = questions.filter(pl.col("question_id").is_in(chosen)), questions["category"].n_unique()
    got, whole = (dict(frame["category"].value_counts().iter_rows()) for frame in (part, questions))
    if n >= kinds:
        assert set(got) == set(whole)
    for kind, size in whole.items():
        share = n*size/len(questions)
        low = share - 1 - kinds if kinds > 1 else share - 1  # one seat for rounding, at most one given to each empty category
        assert max(low, 0) <= got.get(kind, 0) < share + 1 + 1e-9 and got.get(kind, 0) <= size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=8), st.data())
def test_seats_add_up(sizes, data):
    n = data.draw(st.integers(1, sum(sizes)))
    seats = largest_remainders(sizes, n)
    assert sum(seats) == n and all(0 <= seat <= size for seat, size in zip(seats, sizes, strict=True))
    if n >= len(sizes):
        assert min(seats) >= 1
    exact = [n*size/sum(sizes) for size in sizes]
    if min(exact) >= 1:
        assert all(abs(seat - share) < 1 for seat, share in zip(seats, exact, strict=True))


def test_conversations_get_their_share_over_all_categories():
    questions = strata({f"c{i}": {kind: 5 for kind in "uvwxyz"} for i in range(10)})  # 30 questions each, five of a kind
    for seed in range(3):
        part = questions.filter(pl.col("question_id").is_in(stratified(questions, 42, seed)))
        assert set(part["category"].value_counts()["count"]) == {7}
        assert set(part["conversation_id"].value_counts()["count"]) <= {4, 5} and part["conversation_id"].n_unique() == 10
    draws = {tuple(stratified(questions, 42, seed)) for seed in range(5)}
    assert len(draws) == 5


def test_a_subset_carries_its_name_into_the_run(tmp_path):
    whole = load("sample")
    part = subset_of(whole, "stratified:30", 2)
    assert (part.label, whole.label) == (f"{whole.label} stratified:30 seed 2", f"sample@{whole.sha256[:8]}")
    assert part.gold["category"].n_unique() == whole.gold["category"].n_unique()
    assert set(part.questions["conversation_id"]) == set(part.conversations["conversation_id"])
    run_data(DataConfig(subset="stratified:30", subset_seed=2), tmp_path/"run")
    assert json.loads((tmp_path/"run/data/dataset.json").read_text())["label"] == dataset_label(tmp_path/"run") == part.label
    assert subset_name(part.label) == "stratified:30 seed 2" and subset_name(whole.label) == ""
    assert stage_table(tmp_path/"run", "data", "questions")["question_id"].to_list() == sorted(part.questions["question_id"])
    run_data(DataConfig(subset="stratified:30", subset_seed=2), tmp_path/"again")
    assert (tmp_path/"run/data/questions.parquet").read_bytes() == (tmp_path/"again/data/questions.parquet").read_bytes()
    assert subset_of(whole, "stratified:30", 3).questions["question_id"].to_list() != part.questions["question_id"].to_list()


@pytest.mark.parametrize("config", [DataConfig(subset="stratified:0"), DataConfig(subset="stratified:-3"), DataConfig(subset="stratified:x"), DataConfig(subset="200"),
                                    DataConfig(subset="stratified"), DataConfig(subset="stratified:129"), DataConfig(subset="stratified:٢٠"),
                                    DataConfig(subset="stratified:5", subset_seed=-1)])
def test_subsets_that_make_no_sense(tmp_path, config):
    with pytest.raises(ValueError, match=r"subset=.* write 'stratified:N' with N from 1 to the 128 questions of sample@"):
        run_data(config, tmp_path)


def test_two_ways_of_taking_a_part_are_refused(tmp_path):
    with pytest.raises(ValueError, match="subset='stratified:5' and limit_questions=4: choose one"):
        run_data(DataConfig(subset="stratified:5", limit_questions=4), tmp_path)


# any plain file survives the way into the tables

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
NAME = st.text("abcxyz0189", min_size=1, max_size=6)
DATE = st.none() | st.datetimes(datetime(1990, 1, 1), datetime(2024, 1, 1)).map(lambda d: d.isoformat(" ", "minutes"))
TURN = st.fixed_dictionaries({"speaker": NAME, "text": TEXT}, optional={"caption": TEXT})


@st.composite
def conversations(draw):
    names = draw(st.lists(NAME, unique=True, max_size=4))
    sessions = [{"session_id": name, "date": draw(DATE), "turns": draw(st.lists(TURN, max_size=3))} for name in names]
    references = [f"{s['session_id']}:{i + 1}" for s in sessions for i in range(len(s["turns"]))]
    question = st.fixed_dictionaries({
        "question": TEXT, "answer": st.none() | TEXT | st.integers(), "category": NAME,
        "evidence": st.lists(st.sampled_from(references), unique=True) if references else st.just([])})
    return {"sessions": sessions, "questions": draw(st.lists(question, max_size=3))}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(conversations(), min_size=1, max_size=3), st.booleans())
def test_plain_round_trip(tmp_path, drawn, lines):
    def nfc(text):
        return text if text is None else unicodedata.normalize("NFC", text)

    written = [{"conversation_id": f"c{i}", **conversation} for i, conversation in enumerate(drawn)]
    loaded = load("plain", write_plain(tmp_path/"chat.json", written, lines))
    for conversation in written:
        own = pl.col("conversation_id") == conversation["conversation_id"]
        sessions = loaded.sessions.filter(own)
        assert sorted(sessions["source_session_id"]) == sorted(s["session_id"] for s in conversation["sessions"])
        names = dict(sessions.select("session_id", "source_session_id").rows())
        for session in conversation["sessions"]:
            key = next(k for k, v in names.items() if v == session["session_id"])
            rows = loaded.turns.filter(session_id=key).sort("position").select("speaker", "text", "caption").rows()
            assert rows == [(t["speaker"], nfc(t["text"]), nfc(t.get("caption"))) for t in session["turns"]]
        gold = loaded.gold.filter(pl.col("question_id").str.starts_with(conversation["conversation_id"] + "/"))
        for question, row in zip(conversation["questions"], gold.iter_rows(named=True), strict=True):
            back = [f"{names[t.rsplit('/', 1)[0]]}:{int(t[-3:]) + 1}" for t in row["evidence_turns"]]
            assert back == question["evidence"]
            answer = question["answer"]
            assert row["answer"] == (nfc(answer) if isinstance(answer, str | None) else str(answer))


# fetching, over a server on this machine

CONTENT = bytes(range(256)) * 2000


class Unreliable(BaseHTTPRequestHandler):
    """Knows ranges unless told otherwise; can break off, fail or send something else."""

    def do_GET(self):
        server = self.server
        wanted = self.headers["Range"]
        server.asked.append(wanted)
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
        if start >= len(server.content):
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = server.cuts.pop(0) if server.cuts else len(body)
        self.wfile.write(body[:cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    running = ThreadingHTTPServer(("127.0.0.1", 0), Unreliable)
    running.asked, running.cuts, running.statuses, running.ranges, running.content = [], [], [], True, CONTENT
    threading.Thread(target=running.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{running.server_port}/file"
    source = Source(url, "file.bin", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "none", "for a test")
    monkeypatch.setitem(DATASETS, "test", source)
    yield running
    running.shutdown()
    running.server_close()


def get(folder, **settings):
    return fetch("test", folder, progress=False, pause=0, **settings)


def test_fetch_goes_on_after_breaks(server, tmp_path):
    server.cuts = [100_000, 50_000]
    assert get(tmp_path).read_bytes() == CONTENT
    assert server.asked[0] is None and len(server.asked) == 3
    offsets = [int(wanted[6:-1]) for wanted in server.asked[1:]]
    assert 0 < offsets[0] <= 100_000 and offsets[0] < offsets[1] <= 150_000
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_fetch_goes_on_in_another_process_run(server, tmp_path):
    server.cuts = [200_000]
    with pytest.raises(ConnectionError, match=r"file\.bin\.part, run the same command"):
        get(tmp_path, retries=0)
    assert not (tmp_path/"file.bin").exists() and (tmp_path/"file.bin.part").exists()
    assert get(tmp_path).read_bytes() == CONTENT
    assert server.asked[1] is not None


def test_fetch_from_a_server_without_ranges(server, tmp_path):
    server.ranges, server.cuts = False, [100_000]
    assert get(tmp_path).read_bytes() == CONTENT


def test_fetch_retries_server_errors_but_not_404(server, tmp_path):
    server.statuses = [503, 500]
    assert get(tmp_path/"a").read_bytes() == CONTENT
    server.statuses, server.asked = [404], []
    with pytest.raises(ValueError, match="the server answers 404"):
        get(tmp_path/"b")
    assert len(server.asked) == 1


def test_fetch_refuses_a_wrong_checksum(server, tmp_path):
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(ValueError, match="sha256 .* expected"):
        get(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fetch_complete_part_is_only_checked(server, tmp_path):
    (tmp_path/"file.bin.part").write_bytes(CONTENT)
    assert get(tmp_path).read_bytes() == CONTENT


def test_fetch_without_a_checksum_never_goes_on(server, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "test", Source(DATASETS["test"].url, "file.bin", None, None, "none", ""))
    (tmp_path/"file.bin.part").write_bytes(b"another version")
    assert get(tmp_path).read_bytes() == CONTENT
    assert server.asked == [None]


def test_fetch_does_not_overwrite(server, tmp_path):
    (tmp_path/"file.bin").write_text("mine")
    with pytest.raises(FileExistsError, match="not overwritten"):
        get(tmp_path)
    assert (tmp_path/"file.bin").read_text() == "mine" and server.asked == []


def test_fetch_looks_for_room(server, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "test", Source(DATASETS["test"].url, "file.bin", 10**18, "0" * 64, "none", ""))
    with pytest.raises(ValueError, match="are needed"):
        get(tmp_path)


def test_fetch_unreachable(tmp_path):
    with pytest.raises(ConnectionError, match="after 2 attempts"):
        fetch("locomo", tmp_path, "http://127.0.0.1:9/nothing", progress=False, retries=1, pause=0)
