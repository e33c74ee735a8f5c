"""The reader of ids and citations under generated prose, ranges, brackets, repeats and hostile text."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memloc.ids import STATUSES, neutralise, parse_citations, parse_reply, read_numbers

VALID = range(1, 21)
id_lists = st.lists(st.integers(1, 20), min_size=1, max_size=8, unique=True)
prose = st.text(st.characters(blacklist_characters="<>", blacklist_categories=("Cs",)), max_size=60)
wordy = st.lists(st.sampled_from(["the", "boat", "segments", "about", "pump", "and", "see", "here"]), max_size=4).map(" ".join)
anything = st.text(max_size=200) | st.lists(st.sampled_from(
    ["<id>", "</id>", "<reason>", "</reason>", "<answer>", "</answer>", "<ids>", "1", "-", " 4", "[12]", ",", "none", "2-4", "\n", "x", "９", "²",
     "99999999999999999999", "<", "and", "ten", "…", ".."]), max_size=30).map("".join)


def reply(ids: str, reason: str = "so it is", answer: str = "x") -> str:
    return f"<reason>{reason}</reason><id>{ids}</id><answer>{answer}</answer>"


@given(id_lists)
def test_well_formed_replies_come_back_in_emission_order(ids):
    parsed = parse_reply(reply(", ".join(map(str, ids))), VALID)
    assert (parsed.ids, parsed.status, parsed.repaired, parsed.out_of_range) == (tuple(ids), "ok", (), ())


@given(id_lists, st.sampled_from(["{}", "[{}]", "({})", "#{}", "【{}】", "**{}**", "s{}", "'{}'"]),
       st.sampled_from([", ", " ", ";", " and ", "\n", "\n- ", ",\n"]), wordy, wordy)
def test_brackets_separators_and_prose_do_not_change_the_ids(ids, form, joint, before, after):
    text = f"{before} {joint.join(form.format(n) for n in ids)} {after}"
    parsed = parse_reply(reply(text), VALID)
    assert parsed.ids == tuple(ids) and parsed.status == "ok"
    assert ("words around ids" in parsed.repaired) == bool(set((before + " " + after).split()) - {"and"})


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(["-", " - ", "–", "—", " to ", " through ", "..", "…"]))
def test_ranges_include_both_ends_and_keep_their_direction(first, last, joint):
    step = 1 if first <= last else -1
    assert parse_reply(reply(f"{first}{joint}{last}"), VALID).ids == tuple(range(first, last + step, step))


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=8))
def test_every_number_is_either_shown_or_reported(numbers):
    parsed = parse_reply(reply(", ".join(map(str, numbers))), VALID)
    assert set(parsed.ids) | set(parsed.out_of_range) == set(numbers)
    assert set(parsed.ids) <= set(VALID) and not set(parsed.out_of_range) & set(VALID)
    assert parsed.status == ("ok" if parsed.ids else "parse failure")


@given(id_lists, prose, prose)
def test_numbers_outside_the_id_tag_are_no_ids(ids, reason, answer):
    text = reply(", ".join(map(str, ids)), f"[12] {reason} 7", f"{answer} [3] 15")
    assert parse_reply(text, VALID).ids == tuple(ids)
    assert parse_reply(f"[12] {reason} 7", VALID).ids == ()


@given(id_lists, id_lists)
def test_an_id_tag_inside_the_reason_is_talk(ids, quoted):
    text = reply(", ".join(map(str, ids)), f"somebody wrote <id>{quoted}</id> here")
    assert parse_reply(text, VALID).ids == tuple(ids)


@given(id_lists, id_lists)
def test_the_first_of_several_statements_counts_and_the_rest_is_listed(first, second):
    parsed = parse_reply(reply(str(first)) + reply(str(second)), VALID)
    assert parsed.ids == tuple(first) and "tags repeated" in parsed.repaired


@settings(max_examples=300)
@given(anything)
def test_nothing_raises_and_all_ids_were_shown(text):
    parsed = parse_reply(text, VALID)
    assert parsed.status in STATUSES and set(parsed.ids) <= set(VALID) and len(set(parsed.ids)) == len(parsed.ids)
    assert bool(parsed.ids) == (parsed.status == "ok")
    cited = parse_citations(text, VALID)
    assert set(cited.ids) <= set(VALID) and len(set(cited.ids)) == len(cited.ids)


@settings(max_examples=300)
@given(anything, id_lists)
def test_neutral_text_can_hold_no_mark_and_survives_quoting(text, ids):
    safe = neutralise(text)
    assert not set("[]<>＜＞【】") & set(safe)
    assert all(line.startswith("    ") for line in safe.split("\n")[1:])
    parsed = parse_reply(reply(", ".join(map(str, ids)), safe, safe), VALID)
    assert parsed.ids == tuple(ids) and parsed.repaired == ()
    assert parse_citations(safe, VALID).ids == ()


@pytest.mark.parametrize("text", ["none", "None", "none.", "[]", "", "no relevant segments", "N/A", "Nothing here"])
def test_no_evidence_is_a_statement(text):
    assert parse_reply(reply(text), VALID).status == "no ids"


@pytest.mark.parametrize("text", ["the boat one", "1.5", "10:30", "99", "4th", "0", "-3", "9"*5000, "noon"])
def test_what_names_nothing_is_a_failure_and_not_no_evidence(text):
    assert parse_reply(reply(text), VALID).status == "parse failure"


@pytest.mark.parametrize("text, ids", [("two and four", (2, 4)), ("seven", (7,)), ("the one about boats", ()), ("1-3-5", (1, 3, 5)),
                                       ("- 1\n- 4", (1, 4)), ("1. 4.", (1, 4)), ("５, ③", (5, 3)), ("[2] to [4]", (2, 3, 4))])
def test_odd_lists(text, ids):
    assert read_numbers(text, VALID).ids == ids


@pytest.mark.parametrize("text, ids", [("<id>4, 2", (4, 2)), ("<ID>4</ID>", (4,)), ("< id >4< / id >", (4,)), ("<ids>[4]</ids>", (4,)),
                                       ("<reason>why <id>4</id>", (4,)), ("<id>4<answer>x</answer>", (4,)), ("<id>4</id></id>", (4,))])
def test_broken_tags_are_read_and_listed(text, ids):
    parsed = parse_reply(text, VALID)
    assert parsed.ids == ids and parsed.repaired


def test_wide_ranges_cost_nothing():
    parsed = parse_reply(reply("1-999999999"), VALID)
    assert parsed.ids == tuple(VALID) and parsed.out_of_range == (999999999,)


@given(id_lists, prose.filter(lambda text: not re.search(r"[\[【［]", text)))
def test_citations_in_prose(ids, text):
    answer = text + "".join(f" [{n}]" for n in ids) + f" [{ids[0]}, 99]"
    read = parse_citations(answer, VALID)
    assert (read.ids, read.out_of_range, read.text) == (tuple(ids), (99,), text.strip())


@pytest.mark.parametrize("text, ids", [("none, as of 2023-05-08", ()), ("none (2 sessions checked)", ()), ("none of 1-5", ()), ("all except 3", ()),
                                       ("not 3", ()), ("no. 3", (3,)), ("part 3 (5 May 2023)", (3,)), ("4, said on 2023-05-08", (4,))])
def test_numbers_beside_none_and_dates_are_no_ids(text, ids):
    parsed = parse_reply(reply(text), VALID)
    assert parsed.ids == ids and parsed.status == ("ok" if ids else "parse failure") and parsed.repaired


@pytest.mark.parametrize("text, ids", [("<id>3, 1", (3,)), ("<id>1", ()), ("<id>3, ", (3,)), ("<id>", ()), ("<id>3, 1</id><answer>x", (3, 1))])
def test_a_reply_that_its_limit_cut_loses_half_a_number(text, ids):
    assert parse_reply(text, VALID, cut=True).ids == ids
    assert (parse_reply(text, VALID, cut=True).status == "ok") == bool(ids)


def test_a_tag_opened_twice_names_the_inner_ids():
    parsed = parse_reply("<id><id>3</id></id>", VALID)
    assert (parsed.ids, parsed.status) == ((3,), "ok") and parsed.repaired


@pytest.mark.parametrize("text, ids, kept", [("Paris [1 and 2]", (1, 2), "Paris"), ("Paris 【1】", (1,), "Paris"), ("Paris [1, 2", (1,), "Paris"),
                                             ("Paris [part 1].", (1,), "Paris."), ("[#4] Rome", (4,), "Rome"), ("a [image: 3 cats]", (), "a [image: 3 cats]")])
def test_what_is_read_as_a_citation_is_taken_out(text, ids, kept):
    read = parse_citations(text, VALID)
    assert (read.ids, read.text) == (ids, kept)


@pytest.mark.parametrize("text", ["<" + " "*60_000, " "*60_000 + "[", "1" + " "*60_000, "[1" + " "*60_000])
def test_long_runs_of_blanks_cost_nothing(text):
    started = time.process_time()
    parse_reply(text, VALID)
    parse_citations(text, VALID)
    assert time.process_time() - started < 2
