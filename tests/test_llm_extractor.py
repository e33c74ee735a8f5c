"""Notes by a language model: what fails is counted, what is invented is rejected, what was paid is kept."""

import json
from collections import Counter
from datetime import datetime

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_llm import Server
from test_memory_units import said, tables, texts_of, write_data

from memloc.artifacts import read_json, stage_manifest, stage_table
from memloc.chat import CachedModel, LLMError, Reply
from memloc.endpoint import EndpointModel
from memloc.llm import LocalModel
from memloc.llm_extractor import (
    EXAMPLE,
    JOINT,
    LLMExtractor,
    extraction_prompt,
    ground_date,
    json_of_reply,
    main_script,
    read_notes,
    supported_notes,
)
from memloc.memory_units import ExtractionError, SessionInput, SessionNotes, UnitsConfig, build_units, run_units

MONDAY = datetime(2023, 5, 8, 13, 56)
VIEWS = JOINT[0]


def session(*texts: str, date: datetime | None = MONDAY, name: str = "c/s000") -> SessionInput:
    return SessionInput(name, date, tuple((("Nora", "Dev")[i % 2], text) for i, text in enumerate(texts)))


def notes_json(summary="Nora ran.", keywords=("race",), events=()) -> str:
    return json.dumps({"summary": summary, "keywords": list(keywords), "events": [{"date": d, "event": e} for d, e in events]})


class Scripted:
    "Gives prepared outcomes in order and remembers the prompts."
    name, context = "scripted", 4096

    def __init__(self, *replies, key="scripted"):
        self.replies, self.prompts, self.key = list(replies), [], key

    def count_tokens(self, messages):
        return 10

    def chat(self, batch, sampling, on_reply=None):
        outcomes = []
        for place, prompt in enumerate(batch):
            self.prompts.append(prompt)
            made = self.replies.pop(0)
            outcomes.append(Reply(made, model=self.name) if isinstance(made, str) else made)
            if on_reply:
                on_reply(place, outcomes[-1])
        return outcomes


# --- reading replies ---


@pytest.mark.parametrize("raw", ["", "No.", "[]", "null", "5", '{"summary": "a"}', '{"summary": 1, "keywords": [], "events": []}',
                                 '{"summary": "a", "keywords": "b", "events": []}', '{"summary": "a", "keywords": [], "events": ["2023"]}',
                                 '{"summary": "a", "keywords": [], "events": [{"date": "2023"}]}'])
def test_other_json_is_a_failure_not_an_empty_note(raw):
    with pytest.raises(ValueError, match="not the JSON asked for"):
        read_notes(raw, VIEWS)


@pytest.mark.parametrize("raw", ["```json\n%s\n```", "Here it is: %s Hope it helps!", "%s,", "\n\n%s"])
def test_wrapped_json_is_repaired(raw):
    assert read_notes(raw % notes_json(), VIEWS)[0] == json.loads(notes_json())


@given(st.text(max_size=200))
def test_any_text_is_notes_or_a_value_error(raw):
    try:
        notes, _ = read_notes(raw, VIEWS)
    except ValueError:
        return
    assert set(notes) == set(VIEWS)


def test_characters_are_real_ones():
    notes, _ = read_notes(r'{"summary": "cafe\u0301 \\u4e2d", "keywords": [], "events": []}', VIEWS)
    assert notes["summary"] == "caf\u00e9 中"


def test_json_of_another_form():
    schema = {"type": "object", "required": ["n"]}
    assert json_of_reply(r'{"n": [1, "caf\\u00e9"]}', schema) == ({"n": [1, "café"]}, False)
    assert json_of_reply('Here: {"n": 2', schema) == ({"n": 2}, True)
    for raw in ('[{"n": 1}]', "n: 1", '{"n": ' + "[" * 5000 + "]" * 5000 + "}"):
        with pytest.raises(ValueError, match="not the JSON asked for"):
            json_of_reply(raw, schema)


# --- dates ---


@pytest.mark.parametrize(("words", "date"), [
    ("2023-05-08", "8 May 2023"), ("2023-05-07", "7 May 2023"), ("7 May 2023", "7 May 2023"), ("2023-05", "May 2023"), ("2023", "2023"),
    ("2023-05-12", "12 May 2023"), ("2023-05-05", "5 May 2023"), ("2023-04-10", "April 2023"), ("2023-07-04", "July 2023"),
    ("2023-05-02", "week of 1 May 2023"), ("2022-06", None), ("2024-05-08", None), ("2023-06-20", None), ("1931-02-14", None),
    ("next week", None), ("", None), ("2023-02-30", None), ("08/05/2023", None),
])
def test_dates_are_kept_only_as_far_as_the_session_supports_them(words, date):
    text = "I ran yesterday. Last month I fell, last week I rested. See you on Friday. We fly in July."
    assert ground_date(words, session(text)) == date


def test_undated_sessions_support_only_what_they_spell_out():
    undated = session("I ran yesterday, and on 3 September 2021 too. Also 5/8/2022.", date=None)
    assert ground_date("2021-09-03", undated) == "3 September 2021"
    assert ground_date("2022-05-08", undated) == "8 May 2022"
    assert ground_date("2021", undated) == "2021"
    for words in ("2023-05-07", "2026-11-30", "2020"):
        assert ground_date(words, undated) is None


def test_numbers_that_are_no_date_support_none():
    assert ground_date("2023-09-12", session("Room 9, 12 chairs, 2023 things")) is None


def test_dates_in_other_scripts():
    chinese = session("昨天我们去了公园，5月20日要去北京。")
    assert ground_date("2023-05-07", chinese) == "7 May 2023"
    assert ground_date("2023-05-20", chinese) == "20 May 2023"
    assert ground_date("2023-08-01", chinese) is None


@given(st.text(max_size=40), st.text(max_size=80), st.sampled_from([None, datetime(1, 1, 1), MONDAY, datetime(9999, 12, 31)]))
def test_grounding_never_crashes(words, text, date):
    assert ground_date(words, session(text, date=date)) is None or text


@pytest.mark.parametrize("date", [datetime(1, 1, 1), datetime(9999, 12, 31)])
def test_grounding_at_the_ends_of_time(date):
    assert ground_date(f"{date:%Y}".zfill(4) + f"-{date:%m-%d}", session("On Monday in May.", date=date)) is not None


# --- echoes, languages ---


def test_the_example_itself_is_rejected_whole():
    counts = Counter()
    notes = supported_notes(EXAMPLE, session("We talked about the weather."), counts)
    assert notes == SessionNotes()
    assert counts["echoes"] == 4


@pytest.mark.parametrize("of_prompt", [{"summary": "", "keywords": [], "events": []}, EXAMPLE])
def test_a_session_about_lighthouses_may_say_lighthouse(of_prompt):
    said = session("Odalys restored the Brava lighthouse lamp on 1931-02-14 and lit it, polishing lenses with Fenwick; she taught polish.")
    kept = supported_notes(of_prompt, said, Counter())
    assert bool(kept.summary) == bool(of_prompt["summary"])


def test_notes_in_another_language_are_rejected_and_counted():
    counts = Counter()
    found = {"summary": "Nora went to the park.", "keywords": ["公园", "VR"], "events": [{"date": "2023-05-07", "event": "Nora went out."}]}
    notes = supported_notes(found, session("昨天我们去了公园"), counts)
    assert notes == SessionNotes(keywords=("公园", "VR"))
    assert counts["other_language"] == 2
    kept = supported_notes(found | {"summary": "诺拉去了公园。", "events": []}, session("昨天我们去了公园"), counts)
    assert kept.summary == "诺拉去了公园。"
    assert main_script("") == ""


def test_the_prompt_asks_for_the_language_and_holds_the_session():
    system, user = extraction_prompt(session("昨天{}", "100 %s"), VIEWS)
    assert "language of the session" in system["content"]
    assert "昨天{}" in user["content"] and "8 May 2023, Monday" in user["content"]
    assert "c/s000" not in system["content"] + user["content"]


# --- failures ---


@pytest.mark.parametrize("kind", ["connection", "rate limit", "timeout", "access", "server"])
def test_a_service_at_fault_stops(kind):
    with pytest.raises(ExtractionError, match="c/s000") as caught:
        LLMExtractor(Scripted(LLMError(kind, "x"))).notes(session("a"))
    assert caught.value.service


@pytest.mark.parametrize("outcome", [LLMError("context", "x"), LLMError("empty", "x"), LLMError("content", "x"), LLMError("malformed", "x"),
                                     "prose", Reply(notes_json(), finish_reason="length")])
def test_a_session_at_fault_is_counted(outcome):
    extractor = LLMExtractor(Scripted(outcome))
    with pytest.raises(ExtractionError) as caught:
        extractor.notes(session("a"))
    assert not caught.value.service
    assert (extractor.report()["failed"], extractor.report()["loss"]) == (1, 1.0)


def test_a_missing_view_is_missing_and_the_others_stay():
    data = tables({"conversation_id": "c", "sessions": [said("I ran yesterday."), said("I slept.", name="s2"), said("I ate.", name="s3")]})
    extractor = LLMExtractor(Scripted(notes_json(events=[("2023-05-07", "Nora ran.")]), "No.", notes_json("", [])))
    failures = []
    units = build_units(data.sessions, data.turns, data.annotations, UnitsConfig(extractor="llm"), extractor, failures=failures)
    views = {name: set(units.filter(session_id=f"c/s00{i}")["granularity"]) for i, name in enumerate(("whole", "failed", "bare"))}
    assert views["whole"] == {"session", "turn", "time", "summary", "keyword", "event"}
    assert views["failed"] == views["bare"] == {"session", "turn", "time"}
    assert [failure.session_id for failure in failures] == ["c/s001"]
    assert texts_of(units, "event") == ["7 May 2023: Nora ran."]
    with pytest.raises(ExtractionError, match="c/s001"):
        build_units(data.sessions, data.turns, data.annotations, UnitsConfig(extractor="llm"), LLMExtractor(Scripted(notes_json(), "No.", "No.")))


def test_two_calls_ask_twice_and_keep_what_came():
    model = Scripted('{"summary": "Nora ran.", "keywords": []}', '{"events": [{"date": "2023-05-08", "event": "Nora ran."}]}', LLMError("empty", "x"),
                     '{"events": []}')
    extractor = LLMExtractor(model, joint=False)
    assert len(extractor.notes(session("a")).events) == 1
    assert extractor.notes(session("b")) == SessionNotes()
    assert (extractor.report()["calls"], extractor.report()["failed"]) == (4, 1)
    assert "events" not in model.prompts[0][0]["content"]
    assert "summary" not in model.prompts[1][0]["content"]


def test_limits_and_doubles():
    found = {"summary": "x", "keywords": ["a", "a", "b", " "], "events": [{"date": "2023-05-08", "event": "same"}] * 3}
    notes = supported_notes(found, session("a b"), Counter(), max_keywords=1, max_events=2)
    assert (notes.keywords, len(notes.events)) == (("a",), 1)


# --- resume, stage, real models ---


def test_a_stopped_extraction_continues_session_by_session(tmp_path):
    sessions = [session(f"I ran race {i}.", name=f"c/s{i:03d}") for i in range(4)]
    model = Scripted(notes_json(), notes_json(), LLMError("connection", "gone"), LLMError("connection", "gone"))
    extractor = LLMExtractor(CachedModel(model, tmp_path))
    extractor.prepare(sessions)
    assert extractor.notes(sessions[0]).summary == "Nora ran."
    with pytest.raises(ExtractionError, match="c/s002"):
        [extractor.notes(one) for one in sessions[1:]]
    resumed = Scripted(notes_json(), notes_json())
    again = LLMExtractor(CachedModel(resumed, tmp_path))
    again.prepare(sessions)
    assert [again.notes(one).summary for one in sessions] == ["Nora ran."] * 4
    assert [prompt[1]["content"].split("race ")[1][:2] for prompt in resumed.prompts] == ["2.", "3."]


@pytest.mark.parametrize("joint", [True, False])
def test_the_stage_with_a_language_model(tmp_path, monkeypatch, joint):
    from memloc import llm

    replies = {"summary": "Nora ran.", "keywords": ["race"], "events": [{"date": "2023-05-07", "event": "Nora ran."}, {"date": "1999-01-01", "event": "x"}]}

    class Answers(Scripted):
        def chat(self, batch, sampling, on_reply=None):
            views = sampling.json_schema["required"]
            self.replies = ["prose" if "slept" in prompt[1]["content"] else json.dumps({view: replies[view] for view in views}) for prompt in batch]
            return super().chat(batch, sampling, on_reply)

    model = Answers()
    monkeypatch.setattr(llm, "load_model", lambda spec: model)
    monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path / "cache"))
    write_data(tmp_path, tables({"conversation_id": "c", "sessions": [said("I ran yesterday."), said("I slept.", name="s2")]}))
    config = UnitsConfig(extractor="llm", model="endpoint:m", joint=joint)
    run_units(config, tmp_path)
    counts = stage_manifest(tmp_path, "units")["counts"]
    assert (counts["present_summary"], counts["missing_summary"], counts["extraction_invented_dates"]) == (1, 1, 1)
    assert counts["extraction_failed"] == stage_table(tmp_path, "units", "extraction_failures").height == (1 if joint else 2)
    assert read_json(tmp_path / "units" / "extraction.json")["loss"] == 0.5
    assert set(stage_table(tmp_path, "units", "units").filter(pl.col("granularity") == "event")["source"]) == {"llm"}
    asked = len(model.prompts)
    run_units(config, tmp_path)
    assert len(model.prompts) == asked  # replies were kept; prose is a reply, and reading it again is free


def test_against_a_real_server_with_faults(tmp_path):
    server = Server(tmp_path / "calls.jsonl")
    try:
        url = server.start("--echo", "--faults", "429,500")
        sessions = [session(text, name=f"c/s{i:03d}") for i, text in enumerate(("one two", "[[malformed]]", "[[empty]]", '} [] :"events" ,"" :"summary" ,[] :"keywords" {'))]
        extractor = LLMExtractor(CachedModel(EndpointModel("m", url, concurrency=1), tmp_path / "cache"))
        extractor.prepare(sessions)
        for one in sessions:
            with pytest.raises(ExtractionError):
                extractor.notes(one)
    finally:
        server.stop()
    assert [failure.kind for failure in extractor.failures] == ["json", "malformed", "empty", "json"]
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2  # the two replies; no error


def test_the_packaged_model_writes_notes_or_counted_failures(tmp_path):
    model = LocalModel("smollm2", device="cpu")
    extractor = LLMExtractor(CachedModel(model, tmp_path), max_tokens=96)
    one = session("I ran the river race yesterday, my first ten kilometres.", "Great! The tiler comes next Friday.")
    try:
        notes = extractor.notes(one)
    except ExtractionError:
        assert extractor.report()["failed"] == 1
    else:
        assert "lighthouse" not in notes.summary
        assert all(event.date.endswith("2023") for event in notes.events)
