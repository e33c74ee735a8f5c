"""The README's example runs as printed, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import polars as pl

from memloc.results import read_rows

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT/"README.md").read_text("utf-8")


def test_the_import_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "nora-dev/s004" in printed


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert len(targets) > 8
    assert [target for target in targets if not (ROOT/target).exists()] == []


RESULTS = ROOT/"nbs/results"
COMPARES = re.compile(r"\b(better|best|higher|highest|lower|lowest|worse|worst|ahead|beats?|outperforms?|wins?|won|faster|stronger|cannot be told)\b", re.IGNORECASE)
DEFINITIONS = ("best any ranking can do", "best two turns by vector alone")  # what a name means


def values(name: str, **row) -> dict[tuple[str, int | None], float]:
    "(system, k) -> value of the rows of a record."
    rows = read_rows(RESULTS/f"{name}.csv").filter(**row)
    return {(system, k): value for system, k, value in rows.select("system", "k", "value").iter_rows()}


def memloc_is_ahead(everyone: bool) -> bool:
    "On all and on held-out conversations, at every k, by an interval that excludes zero."
    paired = pl.read_csv(RESULTS/"locomo-paired.csv").filter(pl.col("system") == "memloc", pl.col("split").is_in(["all", "test"]),
                                                             pl.col("metric").is_in(["recall", "recall_all"]), pl.col("k").is_in([3, 5, 10]))
    assert everyone and set(paired["against"]) >= {system for system, _ in values("locomo", split="all", metric="recall", table="retrieval") if "extractive" in system}
    return bool((paired["low"] > 0).all())


def extractive_cannot_be_told() -> bool:
    "From BM25 over dated sessions, at every k, when no annotation of the data is read."
    value = values("locomo-extractive", split="all", metric="recall", table="retrieval")["memloc", 3]
    paired = pl.read_csv(RESULTS/"locomo-extractive-paired.csv").filter(
        pl.col("system") == "memloc", pl.col("against") == "BM25 session", pl.col("metric") == "recall", pl.col("split").is_in(["all", "test"]), pl.col("k") > 1)
    return f"reaches {value:.1f} at k = 3" in README and len(paired) == 6 and bool(((paired["low"] < 0) & (paired["high"] > 0)).all())


def bm25_is_ahead() -> bool:
    rows = values("locomo", split="all", metric="recall", table="retrieval")
    rebuilt = {system for system, _ in rows if system.endswith("(extractive)")}
    return len(rebuilt) == 9 and all(rows["BM25, whole session", k] > rows[system, k] for system in rebuilt for k in (3, 5, 10))


def pointing_cannot_be_told() -> bool:
    paired = pl.read_csv(RESULTS/"sft-small-paired.csv").filter(pl.col("against") == "lexical top-2", pl.col("metric") == "f1", pl.col("split") == "test")
    return len(paired) == 1 and paired["low"][0] < 0 < paired["high"][0]


def shpo_ends_lower() -> bool:
    reward = values("shpo-sample", split="test", metric="reward")
    return max(value for (system, _), value in reward.items() if system == "shpo") < min(
        value for (system, _), value in reward.items() if system in ("grpo", "no hints"))


CLAIMS = {"At every k `memloc` is ahead": lambda: memloc_is_ahead(everyone=True), "plain BM25 over whole sessions is ahead": bm25_is_ahead,
          "cannot be told from BM25 over sessions with their dates": extractive_cannot_be_told,
          "an F1 that cannot be told from": pointing_cannot_be_told, "end a little higher than SHPO": shpo_ends_lower}


def claims() -> list[str]:
    "Sentences of the README that compare, from the prose, each with its paragraph."
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    text = re.sub(r"<!-- (\S+):start -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if not part.startswith("|")]
    return [(sentence, part) for part in paragraphs for sentence in re.split(r"(?<=[.:;]) ", part) if COMPARES.search(sentence)]


def test_whoever_says_better_cites_a_record_and_the_record_says_so():
    found = [(sentence, part) for sentence, part in claims() if not any(known in sentence for known in DEFINITIONS)]
    assert len(found) == len(CLAIMS), "a comparison without its check, or a check without its comparison"
    for sentence, part in found:
        (claim,) = [claim for claim in CLAIMS if claim in sentence]
        assert "](nbs/results/" in part, sentence
        assert CLAIMS[claim](), sentence
