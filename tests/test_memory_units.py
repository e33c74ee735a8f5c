"""Memory units: views that are missing stay missing, dates come from the session, work is bounded."""
import time
from datetime import datetime

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memloc import memory_units
from memloc.artifacts import Stage, stage_array, stage_manifest, stage_table
from memloc.cleaning import LintLog, clean_tree
from memloc.data import session_text
from memloc.encoders import Encoder
from memloc.memory_units import (
    DATE_WORDS,
    ExtractionError,
    ExtractiveExtractor,
    SessionInput,
    SessionNotes,
    UnitIndex,
    UnitsConfig,
    build_units,
    centrality,
    clip_turns,
    encode_units,
    key_phrases,
    resolve_date,
    run_units,
    split_sentences,
)
from memloc.schema import PlainConversation, TableBuilder

MONDAY = datetime(2023, 5, 8, 13, 56)


def tables(*conversations: dict):
    log = LintLog("test")
    builder = TableBuilder("test", log)
    for conversation in conversations:
        builder.add(PlainConversation.model_validate(clean_tree(conversation, log)))  # as the loaders do
    return builder.dataset("test", "0" * 64)


def build(data, **settings):
    return build_units(data.sessions, data.turns, data.annotations, UnitsConfig(**settings), progress=False)


def said(*texts: str, date: str | None = "2023-05-08 13:56", name: str = "s1", **extra) -> dict:
    turns = [{"speaker": ("Nora", "Dev")[i % 2], "text": text} for i, text in enumerate(texts)]
    return {"session_id": name, "date": date, "turns": turns, **extra}


def texts_of(units: pl.DataFrame, granularity: str) -> list[str]:
    return units.filter(pl.col("granularity") == granularity)["text"].to_list()


@pytest.mark.parametrize(("words", "date"), [
    ("yesterday", "7 May 2023"), ("the day before yesterday", "6 May 2023"), ("today", "8 May 2023"), ("tonight", "8 May 2023"),
    ("last night", "7 May 2023"), ("tomorrow", "9 May 2023"), ("last Monday", "1 May 2023"), ("next Monday", "15 May 2023"),
    ("last Friday", "5 May 2023"), ("this Friday", "12 May 2023"), ("three days ago", "5 May 2023"), ("in 2 days", "10 May 2023"),
    ("two weeks ago", "week of 24 April 2023"), ("last week", "week of 1 May 2023"), ("next month", "June 2023"),
    ("last year", "2022"), ("in two years", "2025"), ("May 3rd", "3 May 2023"), ("3rd of May", "3 May 2023"),
    ("Dec. 28", "28 December 2022"), ("1 January 2020", "1 January 2020"), ("June, 2021", "June 2021"),
    ("2023-06-01", "1 June 2023"), ("2023/5/30", "30 May 2023"), ("2023-13-40", None), ("30 February 2023", None),
])
def test_dates_resolve_against_the_session(words, date):
    assert DATE_WORDS.fullmatch(words)
    assert resolve_date(words, MONDAY) == date


@pytest.mark.parametrize("text", ["It may rain 5 times", "on Friday", "in May", "5/8/2023", "a second ago", "I sat down", "version 2023-05-081"])
def test_words_that_do_not_determine_a_date_are_left_alone(text):
    assert not DATE_WORDS.findall(text)


def test_without_a_session_date_nothing_is_invented():
    data = tables({"conversation_id": "c", "sessions": [said("I ran yesterday.", "The race is on 3 September, and last week too.", date=None)]})
    units = build(data)
    assert texts_of(units, "event") == []
    assert texts_of(units, "time") == []
    known = build(tables({"conversation_id": "c", "sessions": [said("We met on 3 September 2021.", date=None)]}))
    assert texts_of(known, "event") == ["3 September 2021: Nora: We met on 3 September 2021."]


@pytest.mark.parametrize("base", [datetime(1, 1, 1), datetime(9999, 12, 31, 23)])
@pytest.mark.parametrize("words", ["yesterday", "tomorrow", "last week", "May 3", "in 99 years", "99 years ago"])
def test_dates_at_the_ends_of_time_do_not_crash(base, words):
    assert resolve_date(words, base) is None or isinstance(resolve_date(words, base), str)


@given(st.lists(st.text(max_size=60), max_size=12), st.integers(1, 200))
def test_clipping_fits_and_only_shortens_the_longest(texts, budget):
    clipped = clip_turns(texts, budget)
    assert sum(map(len, clipped)) <= budget
    assert all(text.startswith(short) for text, short in zip(texts, clipped, strict=True))
    cut = [len(short) for text, short in zip(texts, clipped, strict=True) if len(short) < len(text)]
    assert not cut or max(map(len, clipped)) == cut[0] == min(cut)
    if sum(map(len, texts)) <= budget:
        assert clipped == texts


def test_centrality_is_networkx_pagerank():
    import networkx as nx
    from sklearn.feature_extraction.text import TfidfVectorizer

    sentences = ["the tiler broke a tile", "the tile was blue", "blue paint for the kitchen", "a kitchen tile costs little", "zebra"]
    vectors = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", stop_words="english", sublinear_tf=True).fit_transform(sentences)
    links = (vectors @ vectors.T).toarray()
    np.fill_diagonal(links, 0)
    ours = centrality(sentences)
    linked = nx.from_numpy_array(links[:4, :4])
    theirs = np.array(list(nx.pagerank(linked, alpha=0.85, tol=1e-12, max_iter=1000).values()))
    np.testing.assert_allclose(ours[:4] / ours[:4].sum(), theirs, atol=1e-9)  # the unlinked sentence keeps to itself
    assert centrality(["...", "!"]).tolist() == [0.5, 0.5]


HOSTILE = ["", "   ", "{braces} {{}} %s", "[SEP] <|endoftext|> [12]", "中文会话，没有空格。我们昨天去了公园。", "🙂🙂", "half \ud83d here", "a\nb\nc",
           "x" * 5_000, "1 " * 3_000, "| a | b |\n|---|---|\n" * 200, "((((" * 2_000, "Mr. " * 3_000, "\u202eabc\u0000def"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_turns_run(text, tmp_path):
    data = tables({"conversation_id": "c", "sessions": [said(text)]})
    started = time.perf_counter()
    units = build(data)
    assert time.perf_counter() - started < 10
    _, vectors = encode_units(units, Encoder(cache_dir=tmp_path), progress=False)
    assert np.isfinite(vectors).all()
    if not text.strip():
        assert set(units["granularity"]) == {"time"}


def test_a_turn_of_76560_characters_takes_seconds(tmp_path):
    text = ("On 12 May 2023 the board of the harbour met; yesterday it voted on budget item nine. " * 1_000)[:76_560]
    data = tables({"conversation_id": "c", "sessions": [said("Short question.", text)]})
    started = time.perf_counter()
    units = build(data)
    assert time.perf_counter() - started < 10
    assert len(texts_of(units, "turn")[1]) > 76_000
    assert len(texts_of(units, "event")) == UnitsConfig().max_events


def test_empty_conversations_and_no_conversations_run(tmp_path):
    empty = tables({"conversation_id": "c", "sessions": []}, {"conversation_id": "d", "sessions": [said(date=None)]})
    units, vectors = encode_units(build(empty), Encoder(cache_dir=tmp_path), progress=False)
    assert units.height == 0
    assert vectors.shape == (0, 384)
    index = UnitIndex(units, vectors, empty.sessions)
    assert index.view("d", "turn").indptr.tolist() == [0, 0]


def test_auto_takes_each_view_of_a_conversation_from_one_source():
    note = {"text": "Nora ran a race.", "date": "2023-05-07"}
    data = tables(
        {"conversation_id": "annotated", "sessions": [
            said("I ran yesterday, a full ten kilometres.", summary="Nora ran.", events=[note], observations=[{"text": "Nora runs."}]),
            said("Tomorrow I rest and read a long book.", name="s2", date="2023-05-09")]},
        {"conversation_id": "plain", "sessions": [said("I ran yesterday, a full ten kilometres.")]},
    )
    auto = build(data)
    source = {(row["session_id"], row["granularity"]): row["source"] for row in auto.iter_rows(named=True)}
    assert source["annotated/s000", "summary"] == source["annotated/s000", "event"] == source["annotated/s000", "observation"] == "dataset"
    assert source["annotated/s000", "keyword"] == source["annotated/s001", "keyword"] == "extractive"
    assert ("annotated/s001", "summary") not in source  # missing there, not filled from elsewhere
    assert ("annotated/s001", "event") not in source
    assert source["plain/s000", "summary"] == source["plain/s000", "event"] == "extractive"
    assert "7 May 2023: Nora ran a race." in texts_of(auto, "event")
    assert set(build(data, extractor="dataset")["source"]) == {"rendered", "dataset"}
    assert set(build(data, extractor="extractive")["source"]) == {"rendered", "extractive"}
    assert "observation" not in set(build(data, extractor="extractive")["granularity"])


def test_repeated_sessions_are_extracted_once_and_dated_separately(monkeypatch):
    calls = []
    monkeypatch.setattr(memory_units, "key_phrases", lambda turns, n: calls.append(1) or ("x",))
    turns = (("Nora", "I ran the race yesterday."),)
    extractor = ExtractiveExtractor()
    notes = [extractor.notes(SessionInput(name, date, turns)) for name, date in (("a", MONDAY), ("b", datetime(2024, 2, 2)), ("c", None))]
    assert len(calls) == 1
    assert [[event.date for event in one.events] for one in notes] == [["7 May 2023"], ["1 February 2024"], []]


def test_extractor_errors_name_the_session_and_stop():
    class Fails:
        name = "fails"

        def notes(self, session: SessionInput) -> SessionNotes:
            raise ExtractionError(session.session_id, "no answer")

    data = tables({"conversation_id": "c", "sessions": [said("Some words.")]})
    with pytest.raises(ExtractionError, match="c/s000: no answer"):
        build_units(data.sessions, data.turns, data.annotations, extractor=Fails())


def test_another_extractor_fits_the_interface():
    class Fixed:
        name = "fixed"

        def notes(self, session: SessionInput) -> SessionNotes:
            return SessionNotes(summary=f"{len(session.turns)} turns", keywords=("a", "b"))

    data = tables({"conversation_id": "c", "sessions": [said("Some words.", "")]})
    units = build_units(data.sessions, data.turns, data.annotations, extractor=Fixed())
    assert (texts_of(units, "summary"), texts_of(units, "keyword"), texts_of(units, "event")) == (["1 turns"], ["a, b"], [])


def test_captions_can_be_left_out():
    turns = [{"speaker": "Nora", "text": "", "caption": "a red kite"}]
    data = tables({"conversation_id": "c", "sessions": [{"session_id": "s", "date": None, "turns": turns}]})
    assert "red kite" in texts_of(build(data), "turn")[0]
    assert build(data, captions=False).height == 0


def test_session_unit_is_the_session_text():
    data = tables({"conversation_id": "c", "sessions": [said("One.", "", "Two\nlines.", " ")]})
    assert texts_of(build(data), "session") == [session_text(data.turns)]


def test_key_phrases_leave_out_names_and_small_talk():
    found = key_phrases((("Nora", "Hey Dev! Wow, the pottery workshop was awesome."), ("Dev", "Hey Nora, which pottery workshop?")))
    assert "pottery workshop" in found
    assert not {"hey", "nora", "dev", "wow"} & {word.lower() for phrase in found for word in phrase.split()}


def test_sentences_keep_their_speakers():
    assert split_sentences((("A", "One here. Two here."), ("B", "Three?"))) == [("A", "One here."), ("A", "Two here."), ("B", "Three?")]


def random_units(rng: np.random.Generator) -> tuple[pl.DataFrame, np.ndarray, pl.DataFrame]:
    rows, sessions = [], []
    for c in range(4):
        for s in range(int(rng.integers(1, 1_100 if c == 3 else 9))):  # s1000 must not come before s999
            session_id = f"c{c}/s{s:03d}"
            sessions.append((f"c{c}", session_id, s))
            rows += [(f"c{c}", session_id, g, m, f"{session_id} {g} {m}", "rendered") for g in ("turn", "event") for m in range(rng.integers(0, 3))]
    units = pl.DataFrame(rows, memory_units.COLUMNS, orient="row").sample(fraction=1, shuffle=True, seed=1)
    units = units.with_columns(pl.format("{}#{}", "session_id", "granularity").alias("unit_id"), vector_row=pl.int_range(pl.len(), dtype=pl.Int32))
    table = pl.DataFrame(sessions, {"conversation_id": pl.String, "session_id": pl.String, "position": pl.Int32}, orient="row")
    return units, rng.normal(size=(units.height, 4)).astype(np.float32), table


def test_unit_index_agrees_with_filtering():
    units, vectors, sessions = random_units(np.random.default_rng(3))
    index = UnitIndex(units, vectors, sessions.sample(fraction=1, shuffle=True, seed=2))
    for c in range(4):
        for granularity in ("turn", "event", "time"):
            view = index.view(f"c{c}", granularity)
            expected = sessions.filter(conversation_id=f"c{c}")["session_id"].to_list()
            assert list(view.session_ids) == expected
            for i, session_id in enumerate(expected):
                found = units.filter(pl.col("session_id") == session_id, pl.col("granularity") == granularity).sort("member")
                part = slice(view.indptr[i], view.indptr[i + 1])
                assert view.texts[part] == found["text"].to_list()
                np.testing.assert_array_equal(view.vectors[part], vectors[found["vector_row"].to_numpy()])
                assert view.present[i] == bool(found.height)
                if i > 12 and i < len(expected) - 12:
                    break


def write_data(run_dir, data) -> None:
    with Stage(run_dir, "data", {}) as stage:
        for name, key in (("sessions", "session_id"), ("turns", "turn_id"), ("annotations", ["session_id", "kind", "member"])):
            stage.table(name, getattr(data, name), key)


def test_the_stage_leaves_what_the_contract_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path / "cache"))
    data = tables({"conversation_id": "c", "sessions": [said("I ran yesterday.", "word " * 400), said("Hello there, old friend.", date=None, name="s2")]})
    for name in ("one", "two"):
        write_data(tmp_path / name, data)
        report = run_units(UnitsConfig(), tmp_path / name)
    units, vectors = stage_table(tmp_path / "one", "units", "units"), stage_array(tmp_path / "one", "units", "vectors")
    assert units.columns == ["unit_id", "conversation_id", "session_id", "granularity", "member", "text", "source", "vector_row"]
    assert units["vector_row"].to_list() == list(range(len(vectors)))
    assert units["member"].dtype == units["vector_row"].dtype == pl.Int32
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    counts = stage_manifest(tmp_path / "one", "units")["counts"]
    assert (counts["n_sessions"], counts["present_time"], counts["missing_time"], counts["missing_observation"]) == (2, 1, 1, 2)
    assert counts["n_truncated"] == report["n_truncated"].sum() >= 2
    first, second = (stage_manifest(tmp_path / name, "units")["outputs"] for name in ("one", "two"))
    assert first == second


@pytest.mark.parametrize("settings", [{"extractor": "gpt"}, {"max_keywords": 0}, {"max_events": -1}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
        UnitsConfig(**settings)
