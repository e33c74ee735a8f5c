"""From conversations to scored answers through a real server that fails: nothing lost, nothing asked twice, the second run free."""

import json
import signal
from collections import Counter

import polars as pl
import pytest
from test_llm import Server

from memloc.artifacts import read_json, stage_manifest, stage_table
from memloc.generation import GenerationConfig, run_generation
from memloc.locator import LocatorConfig, run_locator
from memloc.pipeline import StageError, run_profile

DAYS = ["The ferry to Hov leaves at six. I bought two tickets.", "My aunt Runa sold the blue boat to a baker.", "It rained on the roof all week."]
QUESTIONS = [("Who bought the boat of Runa?", "a baker", ["s2:1"]), ("When does the ferry leave?", "at six", ["s1:1"])]


@pytest.fixture
def project(tmp_path, root, monkeypatch):
    "The notebooks and modules of this project, a memory of three sessions, and a cache that holds nothing."
    monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path/"cache"))
    folder = tmp_path/"project"
    folder.mkdir()
    for name in ("nbs", "memloc"):
        (folder/name).symlink_to(root/name)
    sessions = [{"session_id": f"s{i}", "date": f"2024-03-0{i}", "turns": [{"speaker": "Ida", "text": day}, {"speaker": "Bo", "text": "I see."}]}
                for i, day in enumerate(DAYS, start=1)]
    questions = [{"question": asked, "answer": answer, "evidence": evidence} for asked, answer, evidence in QUESTIONS]
    (tmp_path/"chat.json").write_text(json.dumps({"conversations": [{"conversation_id": "c", "sessions": sessions, "questions": questions}]}))
    return folder


@pytest.fixture
def server(tmp_path):
    one = Server(tmp_path/"calls.jsonl")
    yield one
    one.stop()


def answered(server) -> Counter:
    "How often each prompt got a readable reply."
    lines = [json.loads(line) for line in server.log.read_text().splitlines()] if server.log.exists() else []
    return Counter(json.dumps(line["messages"]) for line in lines if line["fault"] not in ("malformed", "empty", "429", "500"))


def test_a_server_killed_midway_and_a_server_that_misbehaves(project, server, tmp_path):
    settings = {"locator.locator": "llm", "locator.max_tokens": 24, "generation.variant": "cue", "generation.max_tokens": 12,
                "locator.model": f"endpoint:smollm2@{server.url}?concurrency=1&retries=2",
                "generation.model": f"endpoint:smollm2@{server.url}?concurrency=1&retries=2", "n_bootstrap": 100}

    def run():
        return run_profile("plain", tmp_path/"chat.json", "served", settings, root=project)

    server.start("--die-after", "4")
    with pytest.raises(StageError, match=r"stage generation failed .* all 2 calls failed; the first: connection"):
        run()
    assert server.process.wait(10) == -signal.SIGKILL
    counts = stage_manifest(project/"runs"/"served", "locator")["counts"]
    assert (counts["calls"], counts["errors"]) == (6, 2)
    assert sum(answered(server).values()) == 4

    server.start("--faults", "429,ok,malformed,empty,think")  # the two reads that are missing, two answers, of which one will do
    second = run()
    assert second.ran == ("locator", "generation", "evaluation", "report")
    assert stage_manifest(second.folder, "locator")["counts"]["errors"] == 1
    assert stage_manifest(second.folder, "generation")["counts"]["errors"] == 1
    third = run()
    assert third.ran == ("locator", "generation", "evaluation", "report")
    assert set(answered(server).values()) == {1} and len(answered(server)) == 6 + 2
    answers = stage_table(third.folder, "generation", "answers")
    assert set(answers["status"]) == {"ok"} and not answers["answer"].str.contains("think|<").any()
    (row,) = read_json(third.folder/"generation"/"ledger.json")
    assert (row["calls"], row["replayed"], row["errors"]) == (1, 1, 0)

    server.stop()
    assert run().ran == ()
    rows = pl.read_csv(third.folder/"rows.csv", infer_schema_length=None)
    assert {"answers", "evidence", "cost", "locator cost", "retrieval"} <= set(rows["table"])
    for stage, again in (("locator", lambda told: run_locator(LocatorConfig(**told), third.folder)),
                         ("generation", lambda told: run_generation(GenerationConfig(**told), third.folder))):
        again(stage_manifest(third.folder, stage)["settings"])
        (row,) = read_json(third.folder/stage/"ledger.json")
        assert (row["calls"], row["new_prompt_tokens"]) == (0, 0)
    assert stage_table(third.folder, "generation", "answers").equals(answers)
    assert set(answered(server).values()) == {1}
