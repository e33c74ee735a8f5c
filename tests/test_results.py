"""What README says is what the committed rows say."""

import json
import re
from pathlib import Path

import nbformat
import polars as pl
import pytest

from memloc.results import (
    heldout_markdown,
    markdown_table,
    publish,
    read_rows,
    readme_block,
    rows_to_keep,
    shpo_markdown,
    with_block,
)

ROOT = Path(__file__).resolve().parent.parent
LOCOMO = ROOT/"nbs/results/locomo.csv"


def test_readme_table_is_made_from_the_committed_rows():
    text = (ROOT/"README.md").read_text("utf-8")
    rows = read_rows(LOCOMO)
    assert rows.filter(pl.col("split") == "all", pl.col("table") == "retrieval")["n"].max() == 1982
    assert with_block(text, readme_block(rows)) == text


def test_committed_rows_come_from_a_clean_commit():
    rows = read_rows(LOCOMO)
    assert rows_to_keep(rows).equals(rows)
    assert rows["commit"].n_unique() == 1


def test_a_changed_figure_changes_the_readme(tmp_path):
    rows = read_rows(LOCOMO).with_columns(value=pl.col("value") + 1)
    (tmp_path/"run").mkdir()
    (tmp_path/"nbs/results").mkdir(parents=True)
    rows.write_csv(tmp_path/"run/rows.csv")
    (tmp_path/"README.md").write_text((ROOT/"README.md").read_text("utf-8"), "utf-8")
    publish(tmp_path/"run", "locomo", root=tmp_path)
    assert (tmp_path/"README.md").read_text("utf-8") != (ROOT/"README.md").read_text("utf-8")


def test_two_data_sets_do_not_share_a_table():
    rows = read_rows(LOCOMO)
    with pytest.raises(ValueError, match="2 data sets"):
        markdown_table(pl.concat([rows, rows.with_columns(dataset=pl.lit("other@1"))]))


QUOTED = [("paper", "all", 3, "32.2"), ("paper: seeds only", "all", 3, "57.7"), ("view turn:mean", "all", 3, "47.0"),
          ("view turn:top2", "all", 3, "59.5"), ("paper: routing", "all", 3, "55.5"), ("BM25 session", "all", 3, "83.2"),
          ("view observation:max", "all", 3, "66.8"), ("memloc", "all", 3, "87.8")]
TUNING = {"nbs/02_routing.ipynb": [("memloc: routing, uniform", "dev", 3, "88.9"), ("memloc: routing", "dev", 3, "88.3"),
                                   ("paper: routing", "dev", 3, "56.7")],
          "nbs/03_graph_ppr.ipynb": [("memloc", "dev", 3, "90.0"), ("memloc: seeds only", "dev", 3, "89.8"),
                                     ("memloc: routing", "dev", 3, "88.3")]}


@pytest.mark.parametrize(("path", "figures"), [("nbs/index.ipynb", QUOTED), *TUNING.items()])
def test_figures_in_the_lessons_are_those_of_the_committed_rows(path, figures):
    rows = read_rows(LOCOMO).filter(pl.col("metric") == "recall")
    prose = "\n".join(cell.source for cell in nbformat.read(ROOT/path, as_version=4).cells if cell.cell_type == "markdown")
    for system, split, k, quoted in figures:
        (value,) = rows.filter((pl.col("system") == system) & (pl.col("split") == split) & (pl.col("k") == k))["value"]
        assert f"{value:.1f}" == quoted, system
        assert quoted in prose, (system, quoted)


@pytest.mark.parametrize("commit", ["0012345", "12e4567", "1234567"])
def test_a_commit_of_digits_stays_text(tmp_path, commit):
    (tmp_path/"run").mkdir()
    (tmp_path/"nbs/results").mkdir(parents=True)
    read_rows(LOCOMO).with_columns(commit=pl.lit(commit)).write_csv(tmp_path/"run/rows.csv")
    publish(tmp_path/"run", "other", root=tmp_path)
    assert set(read_rows(tmp_path/"nbs/results/other.csv")["commit"]) == {commit}


def test_figures_of_the_locator_are_those_of_the_committed_rows():
    prose = "\n".join(cell.source for cell in nbformat.read(ROOT/"nbs/06_locator.ipynb", as_version=4).cells if cell.cell_type == "markdown")
    rows = read_rows(LOCOMO).filter(pl.col("table") == "evidence", pl.col("system") == "memloc + encoder locator")
    for split, quoted in (("all", "| 27.2 | 65.0 | 33.9 |"), ("test", "| 26.2 | 64.2 | 33.0 |")):
        value = {r["metric"]: r["value"] for r in rows.filter(pl.col("split") == split).iter_rows(named=True)}
        assert quoted == f"| {value['evidence_precision']:.1f} | {value['evidence_recall']:.1f} | {value['evidence_f1']:.1f} |"
        assert quoted in prose
    paired = pl.read_csv(ROOT/"nbs/results/locomo-paired.csv", infer_schema_length=None).filter(
        pl.col("split") == "all", pl.col("system") == "memloc + encoder locator", pl.col("metric") == "recall")
    gain = {row["k"]: row for row in paired.iter_rows(named=True)}
    assert f"+{gain[1]['difference']:.2f}, interval +{gain[1]['low']:.2f} to +{gain[1]['high']:.2f}" in prose
    assert gain[3]["difference"] == 0


def test_the_untrained_model_as_locator_is_reported_as_it_is():
    rows = read_rows(ROOT/"nbs/results/locomo-llm60.csv").filter(pl.col("split") == "all")
    found = rows.filter(pl.col("system") == "memloc + llm locator")
    assert set(found.filter(pl.col("table") == "evidence")["value"]) == {0.0} and set(found["n"]) == {60}
    assert set(rows["table"]) == {"located", "evidence", "locator cost"}


@pytest.mark.parametrize("name", ["sft-sample", "sft-small"])
def test_figures_of_the_trainings_are_those_of_the_committed_rows(name):
    rows = read_rows(ROOT/f"nbs/results/{name}.csv")
    table = heldout_markdown(rows)
    prose = "\n".join(cell.source for cell in nbformat.read(ROOT/"nbs/04_sft.ipynb", as_version=4).cells if cell.cell_type == "markdown")
    assert table in prose
    if name == "sft-small":
        text = (ROOT/"README.md").read_text("utf-8")
        assert with_block(text, table, "sft") == text
    about = json.loads((ROOT/f"nbs/results/{name}.json").read_text())
    assert {about["commit"]} == set(rows["commit"]) and {about["date"]} == set(rows["date"]) and "+" not in about["commit"]
    held = {row["system"]: row for row in about["report"]["heldout"]}
    for row in rows.filter(pl.col("split") == "test", pl.col("metric") == "f1").iter_rows(named=True):
        assert row["value"] == pytest.approx(100*held[row["system"]]["f1"], abs=0.01)


@pytest.mark.parametrize("name", ["shpo-sample", "shpo-small", "shpo-small-72queries"])
def test_figures_of_the_reinforcement_learning_are_those_of_the_committed_rows(name):
    rows, paired = (read_rows(ROOT/f"nbs/results/{name}{end}.csv") for end in ("", "-paired"))
    table = shpo_markdown(rows, paired)
    prose = "\n".join(cell.source for cell in nbformat.read(ROOT/"nbs/05_shpo.ipynb", as_version=4).cells if cell.cell_type == "markdown")
    assert table in prose
    if name != "shpo-small-72queries":
        text = (ROOT/"README.md").read_text("utf-8")
        assert with_block(text, table, name) == text
    about = json.loads((ROOT/f"nbs/results/{name}.json").read_text())
    assert {about["commit"]} == set(rows["commit"]) and "+" not in about["commit"]
    held = pl.DataFrame([row | {"seed": run["settings"]["seed"]} for run in about["runs"] for row in run["report"]["heldout"]]).unique(("seed", "set", "system"))
    for row in rows.filter(pl.col("split") == "test", pl.col("metric") == "exact").iter_rows(named=True):
        part = held.filter(pl.col("set") == row["dataset"].split("@")[0], pl.col("system") == row["system"])
        assert row["value"] == pytest.approx(100*part["exact"].mean(), abs=0.01)


@pytest.mark.parametrize(("name", "quoted"), [("shpo-small", "0.50, 0.62 and 0.71"), ("shpo-small-72queries", "0.38, 0.47, 0.55")])
def test_rewards_in_training_are_those_of_the_committed_logs(name, quoted):
    (run,) = json.loads((ROOT/f"nbs/results/{name}.json").read_text())["runs"]
    means = pl.DataFrame(run["log"]).group_by("stage").agg(pl.col("reward").mean()).sort("stage")["reward"].to_list()
    assert [f"{mean:.2f}" for mean in means] == re.findall(r"0\.\d\d", quoted)
    assert quoted in "\n".join(cell.source for cell in nbformat.read(ROOT/"nbs/05_shpo.ipynb", as_version=4).cells)


def test_the_records_show_that_held_out_samples_got_better():
    small, sample = (read_rows(ROOT/f"nbs/results/shpo-{name}-paired.csv") for name in ("small", "sample"))
    gains = small.filter(pl.col("dataset").str.starts_with("notes"), pl.col("split") == "test", pl.col("metric").is_in(["reward", "f1"]))
    assert gains.height == 2 and (gains["low"] > 0).all() and (gains["n"] >= 200).all()
    (low,) = sample.filter(pl.col("split") == "seeds", pl.col("against") == "start", pl.col("metric") == "reward")["low"]
    assert low > 0 and sample.filter(pl.col("split") == "seeds")["n"].unique().to_list() == [5]
