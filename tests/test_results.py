"""What README says is what the committed rows say."""

from pathlib import Path

import polars as pl
import pytest

from memloc.results import markdown_table, publish, rows_to_keep, with_block

ROOT = Path(__file__).resolve().parent.parent
LOCOMO = ROOT/"nbs/results/locomo.csv"


def test_readme_table_is_made_from_the_committed_rows():
    text = (ROOT/"README.md").read_text("utf-8")
    rows = pl.read_csv(LOCOMO, infer_schema_length=None)
    assert rows.filter(pl.col("split") == "all")["n"].max() == 1982
    assert with_block(text, markdown_table(rows)) == text


def test_committed_rows_come_from_a_clean_commit():
    rows = pl.read_csv(LOCOMO, infer_schema_length=None)
    assert rows_to_keep(rows).equals(rows)
    assert rows["commit"].n_unique() == 1


def test_a_changed_figure_changes_the_readme(tmp_path):
    rows = pl.read_csv(LOCOMO, infer_schema_length=None).with_columns(value=pl.col("value") + 1)
    (tmp_path/"run").mkdir()
    (tmp_path/"nbs/results").mkdir(parents=True)
    rows.write_csv(tmp_path/"run/rows.csv")
    (tmp_path/"README.md").write_text((ROOT/"README.md").read_text("utf-8"), "utf-8")
    publish(tmp_path/"run", "locomo", tmp_path)
    assert (tmp_path/"README.md").read_text("utf-8") != (ROOT/"README.md").read_text("utf-8")


def test_two_data_sets_do_not_share_a_table():
    rows = pl.read_csv(LOCOMO, infer_schema_length=None)
    with pytest.raises(ValueError, match="2 data sets"):
        markdown_table(pl.concat([rows, rows.with_columns(dataset=pl.lit("other@1"))]))
