"""Hostile input: each case runs, or fails with an error that names file, place and remedy."""

import gzip
import json
import lzma
from datetime import datetime

import polars as pl
import pytest

from memloc.artifacts import stage_table
from memloc.data import DataConfig, detect_layout, lint_file, load, parse_date, run_data, session_text


def conversation(sessions: list, questions: list | None = None, **more) -> dict:
    return {"conversation_id": "c", "sessions": sessions, "questions": questions or [], **more}


def session(name: str, *texts: str, **more) -> dict:
    return {"session_id": name, "turns": [{"speaker": "A", "text": text} for text in texts], **more}


@pytest.fixture
def loaded(tmp_path):
    "Write one conversation, run the stage, read the tables back."
    def run(*conversations: dict) -> dict[str, pl.DataFrame]:
        path = tmp_path/"chat.json"
        path.write_text(json.dumps({"conversations": list(conversations)}), "utf-8")
        run_data(DataConfig("plain", str(path)), tmp_path/"run")
        names = ("conversations", "sessions", "turns", "questions", "gold", "annotations", "lint")
        return {name: stage_table(tmp_path/"run", "data", name) for name in names}
    return run


def rules(tables) -> list[str]:
    return tables["lint"]["rule"].to_list()


# shapes


def test_empty_conversation(loaded):
    tables = loaded(conversation([], [{"question": "Who?", "answer": "nobody", "category": "abstention"}]))
    assert tables["conversations"]["n_sessions"].to_list() == [0] and tables["sessions"].height == 0
    assert "empty conversation" in rules(tables)


def test_one_session_one_turn(loaded):
    tables = loaded(conversation([session("s", "hi", date="2024-01-01")], [{"question": "?", "evidence": ["s:1"]}]))
    assert tables["gold"]["evidence_turns"].to_list() == [["c/s000/t000"]] and rules(tables) == []


def test_session_without_turns_and_empty_turn(loaded):
    tables = loaded(conversation([session("s", date="2024-01-01"), session("t", "", "  ", "x", date="2024-01-02")]))
    assert tables["sessions"]["n_turns"].to_list() == [0, 3]
    assert sorted(rules(tables)) == ["empty session", "empty turn", "empty turn"]
    assert session_text(tables["turns"]) == "A: x"


def test_zero_questions(loaded):
    tables = loaded(conversation([session("s", "hi", date="2024-01-01")]))
    assert tables["questions"].height == tables["gold"].height == 0
    assert tables["gold"].schema["evidence_turns"] == pl.List(pl.String)


def test_no_conversation_is_an_error(tmp_path):
    (tmp_path/"none.json").write_text('{"conversations": []}')
    with pytest.raises(ValueError, match=r"none\.json: there is no conversation"):
        load("plain", tmp_path/"none.json")


# dates


def test_no_dates_keep_the_order_of_the_file(loaded):
    tables = loaded(conversation([session("b", "1"), session("a", "2"), session("c", "3")]))
    assert tables["sessions"]["source_session_id"].to_list() == ["b", "a", "c"]
    assert tables["sessions"]["date"].null_count() == 3 and rules(tables) == ["no date"] * 3


@pytest.mark.parametrize("text", ["soon", "May 2023", "0000-00-00", "2024-13-45", "99999999999999", "Tuesday", "１２月", "2024-02-30"])
def test_unreadable_dates_are_unknown_never_today(loaded, text):
    tables = loaded(conversation([session("a", "1", date="2024-01-01"), session("b", "2", date=text)]))
    assert tables["sessions"]["date"].to_list() == [datetime(2024, 1, 1), None]
    assert rules(tables) == ["unreadable date"] and tables["lint"]["value"].to_list() == [text]


def test_future_dates_are_noted(loaded):
    tables = loaded(conversation([session("a", "1", date="2990-01-01")]))
    assert tables["sessions"]["date"].to_list() == [datetime(2990, 1, 1)] and rules(tables) == ["date in the future"]


def test_mixed_time_zones_become_comparable(loaded):
    dates = ["2024-01-01T12:00:00+05:00", "2024-01-01T08:00:00", "2024-01-01T09:00:00Z", "0001-01-01T00:00:00+10:00"]
    tables = loaded(conversation([session(str(i), "x", date=date) for i, date in enumerate(dates)]))
    found = tables["sessions"].select("source_session_id", "date").rows()
    assert found == [("0", datetime(2024, 1, 1, 7)), ("1", datetime(2024, 1, 1, 8)), ("2", datetime(2024, 1, 1, 9)), ("3", None)]
    assert {"mixed time zones", "time zone", "unreadable date"} == set(rules(tables))


def test_sort_is_stable_and_undated_sessions_follow(loaded):
    dates = ["2024-02-01", None, "2024-01-01", "2024-01-01"]
    tables = loaded(conversation([session(str(i), "x", **({"date": date} if date else {})) for i, date in enumerate(dates)]))
    assert tables["sessions"]["source_session_id"].to_list() == ["2", "3", "0", "1"]


@pytest.mark.parametrize("text", ["", " ", "x" * 10_000, "1" * 400, "((((", "2024-01-01T00:00:00+99:99", "\n"])
def test_parse_date_survives(text):
    assert parse_date(text) is None


# names


def test_duplicate_session_ids_keep_both(loaded):
    tables = loaded(conversation([session("s", "1", "2", date="2024-01-02"), session("s", "3", date="2024-01-01")],
                                 [{"question": "?", "evidence": ["s:1"]}, {"question": "??", "evidence": ["s:2"]}]))
    assert tables["sessions"]["session_id"].n_unique() == 2
    assert [len(turns) for turns in tables["gold"]["evidence_turns"]] == [2, 1]
    assert "repeated session id" in rules(tables)


def test_duplicate_conversation_ids_are_an_error(loaded):
    with pytest.raises(ValueError, match=r"chat\.json: two conversations are called 'c'; give each"):
        loaded(conversation([]), conversation([]))


def test_telling_names_do_not_reach_the_tables(loaded):
    tables = loaded(conversation([session("answer_1", "x", date="2024-01-01")], [{"question": "?", "evidence": ["answer_1:1"],
                                 "question_id": "q_abs"}], conversation_id="q_abs"))
    assert tables["gold"]["evidence_turns"].list.len().to_list() == [1]
    for name in ("conversations", "sessions", "turns", "questions", "lint"):
        assert "answer_1" not in tables[name].write_csv() and "_abs" not in tables[name].write_csv()


@pytest.mark.parametrize("reference", ["", ":", "s", "s:0", "s:2", "s:-1", "s:²", "s:1:1", "nowhere:1", "s:99999999999999999999"])
def test_odd_evidence_is_set_aside_or_means_the_session(loaded, reference):
    tables = loaded(conversation([session("s", "x", date="2024-01-01")], [{"question": "?", "evidence": [reference]}]))
    if reference == "s":
        assert tables["gold"]["evidence_sessions"].to_list() == [["c/s000"]]
    else:
        assert rules(tables) == ["evidence does not exist", "question without evidence"]


# text


def test_long_turn_is_kept_whole(loaded):
    tables = loaded(conversation([session("s", "a" * 76_560, date="2024-01-01")]))
    assert tables["turns"]["text"].str.len_chars().to_list() == [76_560] and rules(tables) == ["very long turn"]


@pytest.mark.parametrize("text", ["🎉👩‍👩‍👧", "衣带渐宽终不悔", "{name} {{x}} {0}", "<|endoftext|> [INST] </s> <s>", "a\u2028b\r\nc\td", "%s \\n \\ud83d",
                                  "[bold]x[/] [human]: y"])
def test_text_is_kept_as_it_is(loaded, text):
    tables = loaded(conversation([session("s", text, date="2024-01-01")]))
    assert tables["turns"]["text"].to_list() == [text] and rules(tables) == []


def test_broken_characters_are_replaced_and_logged(loaded):
    tables = loaded(conversation([session("s", "a\ud83db", "x\0y", "cafe\u0301", date="2024-01-01")]))
    assert tables["turns"]["text"].to_list() == ["a\ufffdb", "x\ufffdy", "café"]
    assert sorted(rules(tables)) == ["NUL character", "lone surrogate", "not NFC"]
    assert "conversations[0].sessions[0].turns[0].text" in tables["lint"]["record"].to_list()


# files


def good() -> bytes:
    return json.dumps({"conversations": [conversation([session("s", "hi" * 200, date="2024-01-01")])]}).encode()


@pytest.mark.parametrize(("content", "reason"), [
    (good()[:100], "not JSON, line 1 column"),
    (b"", "the file is empty"),
    (b"\xff\xfehello", "byte 0 is not UTF-8"),
    (b"hello", "not JSON"),
    (lzma.compress(good())[:60], "damaged or cut short"),
    (lzma.compress(good()) + b"garbage", "damaged or cut short"),
    (gzip.compress(good())[:60], "damaged or cut short"),
    (gzip.compress(good())[:-8] + b"12345678", "damaged or cut short"),
    (b"PAR1 and no more", "damaged or cut short"),
    (b"PK\x03\x04 zip", "zip archive; unpack it"),
    (good() + b"\n{", "line 2 is not JSON"),
    (b"[" * 100_000, "not JSON|nested too deeply"),
    (b"null", r"not in the plain form: \[0\]"),
    (b"[1, 2]", r"\[0\]"),
    (b'{"conversations": {"a": 1}}', "conversations"),
    (b'{"conversations": [], "conversation": []}', "unknown key 'conversation'"),
])
def test_damaged_files(tmp_path, content, reason):
    path = tmp_path/"chat.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        load("plain", path)
    assert "chat.json" in str(error.value) and len(str(error.value)) < 700


@pytest.mark.parametrize(("change", "place"), [
    ({"sessions": None}, r"conversations\[0\]\.sessions"),
    ({"sessions": [{"session_id": "s", "turns": [{"speaker": "A"}]}]}, r"conversations\[0\]\.sessions\[0\]\.turns\[0\]\.text"),
    ({"sessions": [{"session_id": "", "turns": []}]}, r"sessions\[0\]\.session_id"),
    ({"sessions": [{"session_id": "s", "turns": [], "date": 1700000000}]}, r"sessions\[0\]\.date"),
    ({"split": "validation"}, r"conversations\[0\]\.split"),
    ({"questions": [{"question": "?", "evidences": ["s:1"]}]}, r"questions\[0\]\.evidences"),
    ({"conversation_id": 7}, r"conversations\[0\]\.conversation_id"),
])
def test_wrong_schema_names_the_place(loaded, change, place):
    with pytest.raises(ValueError, match=rf"chat\.json: not in the plain form: .*{place}.*found.*Correct") as error:
        loaded({**conversation([]), **change})
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("layout", ["locomo", "longmemeval_s", "long_mt_bench_plus"])
@pytest.mark.parametrize("content", ["[]", "{}", "null", "[{}]", '[{"sample_id": 1}]', '"text"'])
def test_published_layouts_refuse_other_content(tmp_path, layout, content):
    path = tmp_path/"other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json"):
        load(layout, path, allow_unknown_hash=True)
    with pytest.raises(ValueError, match=r"other\.json: none of the layouts"):
        lint_file(path)


def test_locomo_with_damaged_sessions(tmp_path):
    path = tmp_path/"l.json"
    for session_1 in (None, "text", [1], [{"speaker": "A", "text": "x"}], [{"speaker": "A", "text": "x", "dia_id": "D1:9"}]):
        path.write_text(json.dumps([{"sample_id": "c", "conversation": {"session_1": session_1}, "qa": []}]))
        with pytest.raises(ValueError, match=r"l\.json.*session_1"):
            load("locomo", path, allow_unknown_hash=True)


def test_errors_for_names_and_paths(tmp_path):
    with pytest.raises(ValueError, match="'locomo10' is not known; choose one of"):
        load("locomo10", "x.json")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load("plain", tmp_path/"missing.json")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load("plain", tmp_path)
    with pytest.raises(ValueError, match="negative"):
        (tmp_path/"a.json").write_bytes(good())
        run_data(DataConfig("plain", str(tmp_path/"a.json"), limit_questions=-1), tmp_path/"run")


def test_detect_layout_names_the_keys():
    with pytest.raises(ValueError, match=r"notes\.json: none of the layouts .*'a'"):
        detect_layout([{"a": 1}], "notes.json")


def locomo_record(**changed) -> list[dict]:
    "A LoCoMo file of one session and one question."
    record = {"sample_id": "conv-1", "qa": [{"question": "Q?", "answer": "A", "evidence": ["D1:1"], "category": 4}],
              "conversation": {"speaker_a": "Mia", "speaker_b": "Leo", "session_1_date_time": "1:56 pm on 8 May, 2023",
                               "session_1": [{"speaker": "Mia", "dia_id": "D1:1", "text": "Hello."}]}}
    return [record | changed]


CONVERSATION = locomo_record()[0]["conversation"]
LOSING = {
    "two spellings of a session": (locomo_record(conversation=CONVERSATION | {"session_01": CONVERSATION["session_1"]}), "'session_01'"),
    "an event that is a text": (locomo_record(event_summary={"events_session_1": {"Mia": "one text", "date": "8 May, 2023"}}), "'Mia'"),
    "an observation that is a text": (locomo_record(observation={"session_1_observation": {"Mia": ["ox"]}}), "observation"),
    "an observation without reference": (locomo_record(observation={"session_1_observation": {"Mia": [["o"]]}}), "observation"),
}


@pytest.mark.parametrize("name", LOSING)
def test_what_would_be_lost_or_misread_is_refused_with_its_place(name, tmp_path):
    records, place = LOSING[name]
    path = tmp_path/"in.json"
    path.write_text(json.dumps(records), "utf-8")
    with pytest.raises(ValueError, match="in.json") as caught:
        load("locomo", path, allow_unknown_hash=True)
    assert place in str(caught.value)


@pytest.mark.parametrize("text", ['{"conversations": [], "conversations": [1]}', '{"a": 1}\n{"b": 1, "b": 2}'])
def test_a_key_that_stands_twice_is_refused(text, tmp_path):
    path = tmp_path/"in.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"in.json.*stands twice"):
        load("plain", path)
