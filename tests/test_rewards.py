"""What cheating pays in each reading of the reward, what honest replies pay, and the reward as verl calls it."""

import json
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memloc.ids import parse_reply
from memloc.rewards import (
    ANSWERS,
    EVIDENCE,
    FORMS,
    OUTCOMES,
    REWARD_PATH,
    RewardConfig,
    answer_reward,
    check_truth,
    compute_score,
    evidence_reward,
    f1_exact,
    f1_of,
    folded,
    form_reward,
    outcome,
    read_truth,
    reward_preset,
    score_reply,
    truth_text,
)
from memloc.toy import ToyTask, toy_samples

MODES = ("paper", "released", "memloc")
PAPER, RELEASED, OURS = map(reward_preset, MODES)
SEGMENTS = ("Ana: I bought two boats.", "Ben: Milk for me.", "Ana: One of them is called Zoe.", "Ben: I like maps.", "Cleo: Nice weather.", "Ana: It rains.")
N, GOLD, ANSWER = len(SEGMENTS), (1, 3), "Zoe"
WHOLE = " ".join(SEGMENTS)

pieces = st.sampled_from(["<reason>", "</reason>", "<id>", "</id>", "<answer>", "</answer>", "<ids>", "<ID>", "1", "2", "3", "6", "7", "99", "0", "-", "1-6", ",", " ", "\n",
                          "none", "one", "and", "Zoe", "zoe", "é", "unknown", "a", "two boats", "²", "９", "…", "7 May 2023", "<", "x"*50, "\u200b", "\x00"])
whole = st.tuples(st.text(max_size=20), st.lists(st.integers(-1, 12), max_size=8).map(lambda ids: ", ".join(map(str, ids))) | st.sampled_from(["none", "", "1-6", "all"]),
                  st.sampled_from(["Zoe", "a", "", "unknown", "She is called Zoe", "Zoe, milk, maps"]) | st.text(max_size=20))
texts = st.text(max_size=200) | st.lists(pieces, max_size=40).map("".join) | whole.map(lambda parts: "<reason>{}</reason><id>{}</id><answer>{}</answer>".format(*parts))
configs = st.builds(RewardConfig, alpha=st.floats(0, 0.5), beta=st.floats(0, 0.5), evidence=st.sampled_from(EVIDENCE), answer=st.sampled_from(ANSWERS),
                    form=st.sampled_from(FORMS), gate=st.booleans(), correct=st.sampled_from(["exact", "recall"]), answer_share=st.floats(0.01, 1))
golds = st.sets(st.integers(1, N))
answers = st.sampled_from(["Zoe", "a", "no", "unknown", "two boats", "7 May 2023", "?", "The", "3"])


def reply(ids: str, answer: str = ANSWER, reason: str = "see [1].") -> str:
    return f"<reason>{reason}</reason><id>{ids}</id><answer>{answer}</answer>"


def score(text, config=OURS, gold=GOLD, answer=ANSWER):
    return score_reply(text, N, gold, answer, config)


class TestAnyText:
    @settings(max_examples=150, deadline=None)
    @given(texts, golds, answers, configs, st.booleans())
    def test_no_text_raises_and_every_term_lies_between_0_and_1(self, text, gold, answer, config, cut):
        reward = score_reply(text, N, gold, answer, config, cut)
        assert all(0 <= value <= 1 for value in reward[:4]) and type(reward.correct) is bool and reward.n_ids >= 0
        assert reward.form in (0, 1) and (reward.total == 0 or reward.form == 1 or not config.gate)
        weights = config.alpha, config.beta, 1 - config.alpha - config.beta
        told = weights[0]*reward.answer + weights[1]*reward.evidence + weights[2]*reward.form
        assert reward.total == pytest.approx(told if reward.form or not config.gate else 0, abs=1e-8)

    @settings(max_examples=60, deadline=None)
    @given(texts, golds, answers, st.sampled_from(MODES), st.booleans())
    def test_the_reward_for_verl_is_the_same(self, text, gold, answer, mode, by_parquet):
        truth = json.dumps({"gold": sorted(gold), "answer": answer, "n_segments": N})
        told = compute_score("x", text, truth, {"mode": mode}) if by_parquet else compute_score("x", text, truth, mode=mode)
        total, *rest = score_reply(text, N, gold, answer, reward_preset(mode))
        assert list(told) == ["score", "evidence", "answer", "form", "correct", "n_ids"]
        assert list(told.values()) == [total, *map(float, rest)] and all(type(value) is float for value in told.values())

    @pytest.mark.parametrize("text", ["<id>"*20_000, "<answer>" + "1, "*20_000, "</id>"*9_000 + "<id>"*9_000, "<reason>"*5_000 + "</reason>"*5_000])
    def test_a_looping_model_is_scored_in_time(self, text):
        assert score(text).total == score(text, PAPER).total == 0


class TestHonest:
    @pytest.mark.parametrize("mode", MODES)
    def test_the_target_of_every_sample_is_worth_exactly_one(self, mode):
        for sample in toy_samples(ToyTask(negatives=0.2), 200):
            reward = score_reply(sample.target, len(sample.segments), sample.gold, sample.answer, reward_preset(mode))
            assert reward == (1, 1, 1, 1, True, len(sample.gold))

    @given(st.permutations([1, 3, 4]))
    def test_the_order_of_ids_is_free(self, ids):
        assert score(reply(", ".join(map(str, ids))), gold=(4, 1, 3)).total == 1

    @settings(max_examples=60, deadline=None)
    @given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n), min_size=1), st.sets(st.integers(1, n), min_size=1))))
    def test_evidence_agrees_with_counting(self, case):
        n, named, gold = case
        text = reply(", ".join(map(str, named)))
        parsed = parse_reply(text, range(1, n + 1))
        precision, recall = len(named & gold)/len(named), len(named & gold)/len(gold)
        f1 = 2*precision*recall/(precision + recall) if recall else 0
        assert evidence_reward(parsed, gold, n, "recall") == recall
        assert evidence_reward(parsed, gold, n, "f1") == pytest.approx(f1) == pytest.approx(f1_of(named, gold))
        found = evidence_reward(parsed, gold, n)
        assert 0 <= found <= 1 and (found == 1) == (named == gold)

    @pytest.mark.parametrize(("kind", "worth"), [("recall", 1), ("f1", 0.8), ("f1_exact", (0.8 - 0.5)/0.5/2)])
    def test_ids_that_were_not_shown_count_as_named(self, kind, worth):
        reward = score(reply("1, 3, 99"), reward_preset("paper", evidence=kind, correct="exact"))
        assert reward.evidence == pytest.approx(worth) and not reward.correct and reward.n_ids == 3

    def test_a_nearer_reply_is_worth_more(self):
        worth = [score(reply(ids)).total for ids in ("1, 3", "1, 3, 5", "3", "3, 5", "5")]
        assert worth == sorted(worth, reverse=True) and worth[2] > worth[-1]

    def test_writing_of_the_answer_is_free(self):
        for said, gold in (("ZOË.", "Zoe"), ("2 boats", "two boats"), ("May 7th, 2023", "7 May 2023"), ("the Café", "cafe"), ("A", "a"), ("Ｚｏｅ", "Zoe"), ("1,000", "1000")):
            assert answer_reward(said, gold) == 1, (said, gold)

    def test_a_few_more_words_keep_their_share(self):
        assert answer_reward("she has two boats", "two boats") == 0.5
        assert answer_reward("around two boats", "two boats") == pytest.approx(2/3)
        assert answer_reward("she has two boats", "two boats", least=0.6) == 0


HACKS = {  # name: (reply, paper total, released total, our total)
    "every id": (reply("1, 2, 3, 4, 5, 6"), 1.0, 1.0, 0.4),
    "every id, wrong answer": (reply("1, 2, 3, 4, 5, 6", "tea"), 0.7, 0.7, 0.1),
    "every id as a range": (reply("1-6"), 0.9, 1.0, 0.0),
    "every id and more": (reply("1, 2, 3, 4, 5, 6, 7, 8"), 0.9, 1.0, 0.0),
    "whole session as the answer": (reply("2", WHOLE), 0.4, 0.4, 0.1),
    "a whole segment as the answer": (reply("2", SEGMENTS[2]), 0.4, 0.4, 0.1),
    "all candidates": (reply("2", "milk, Zoe, maps, boats"), 0.4, 0.4, 0.1),
    "three candidates": (reply("2", "milk or Zoe or maps"), 0.4, 0.4, 0.1),
    "every id and the whole session": (reply("1, 2, 3, 4, 5, 6", WHOLE), 1.0, 1.0, 0.1),
    "one letter of the answer": (reply("2", "Z"), 0.1, 0.4, 0.1),
    "one letter": (reply("2", "a"), 0.1, 0.1, 0.1),
    "answer first": ("<answer>Zoe</answer><reason>see [1].</reason><id>1, 3</id>", 0.9, 1.0, 0.0),
    "ids first": ("<id>1, 3</id><reason>see [1].</reason><answer>Zoe</answer>", 0.9, 1.0, 0.0),
    "tags inside the answer": ("<reason>see [1].</reason><id>1, 3</id><answer>Zoe</reason><id>2</id></answer>", 0.9, 1.0, 0.0),
    "everything twice": (reply("1, 3")*2, 0.9, 1.0, 0.0),
    "a second list of ids": (reply("1, 3") + "<id>2</id>", 0.9, 1.0, 0.0),
    "a second answer": (reply("1, 3") + "<answer>milk</answer>", 0.9, 1.0, 0.0),
    "answer in the reason only": (reply("2", "", reason="The answer is Zoe."), 0.1, 0.1, 0.1),
    "answer in the reason, none given": ("<reason>It is Zoe, see [1] and [3].</reason>", 0.0, 0.0, 0.0),
    "answer in the id tag": (reply("Zoe", ""), 0.0, 0.1, 0.0),
    "tags inside of the reason": (f"<reason>{reply('1, 3')}</reason>", 0.9, 1.0, 0.0),
    "empty ids": (reply(""), 0.3, 0.4, 0.0),
    "blank ids": (reply(" , "), 0.3, 0.4, 0.0),
    "ids as words": (reply("one and three"), 0.9, 1.0, 0.0),
    "ids described": (reply("the parts about boats"), 0.3, 0.4, 0.0),
    "ids with talk": (reply("parts 1 and 3"), 0.9, 1.0, 0.0),
    "ids taken back": (reply("none, or 1, 3"), 0.3, 0.4, 0.0),
    "repeated ids": (reply("1, 3, 1, 3"), 0.9, 1.0, 0.0),
    "nothing at all": ("", 0.0, 0.0, 0.0),
    "only tags": ("<reason></reason><id></id><answer></answer>", 0.0, 0.1, 0.0),
    "unfinished": ("<reason>see [1].</reason><id>1, 3</id><answer>Zoe", 0.9, 0.9, 0.0),
    "talk around": ("Sure! " + reply("1, 3") + " I hope this helps.", 0.9, 1.0, 0.0),
}


class TestHacks:
    """Each is a reply that reads nothing or says nothing. `paper`: what the printed equations pay; ours: what is left."""

    @pytest.mark.parametrize("name", HACKS)
    def test_what_it_pays(self, name):
        text, *worth = HACKS[name]
        assert [score(text, config).total for config in (PAPER, RELEASED, OURS)] == pytest.approx(worth)

    @pytest.mark.parametrize("name", HACKS)
    def test_ours_never_calls_it_correct_and_pays_less_than_half(self, name):
        reward = score(HACKS[name][0])
        assert not reward.correct and reward.total < 0.5 < score(reply("1, 3")).total

    def test_the_paper_pays_in_full_for_reciting_the_prompt(self):
        for sample in toy_samples(ToyTask(negatives=0), 100):
            n = len(sample.segments)
            said = [text.split()[1] for text in sample.segments]
            text = reply(", ".join(map(str, range(1, n + 1))), ", ".join(said))
            recited = score_reply(text, n, sample.gold, sample.answer, PAPER)
            assert recited.correct and recited.total >= 0.7  # 1 where the answer's words stand in a row
            ours = score_reply(text, n, sample.gold, sample.answer)
            assert ours.evidence == float(len(sample.gold) == n) and ours.correct == (len(sample.gold) == n)

    def test_naming_every_id_is_worth_nothing_in_every_session(self):
        for n in range(1, 12):
            for gold in (set(gold) for k in range(1, min(n, 4) + 1) for gold in combinations(range(1, n + 1), k)):
                assert f1_exact(range(1, n + 1), gold, n) == float(len(gold) == n)

    @pytest.mark.parametrize(("ids", "answer", "worth"), [("none", "unknown", (1, 1, 1)), ("", "unknown", (0.9, 1, 0)), ("the boats", "unknown", (0.3, 0.4, 0)),
                                                          ("1, 2, 3, 4, 5, 6", "unknown", (0.4, 0.4, 0.4)), ("99", "unknown", (0.3, 0.4, 0)), ("none", "Zoe", (0.7, 0.7, 0.7))])
    def test_without_evidence_only_saying_so_counts(self, ids, answer, worth):
        assert [score(reply(ids, answer), config, (), "unknown").total for config in (PAPER, RELEASED, OURS)] == pytest.approx(worth)
        assert score(reply(ids, answer), gold=(), answer="unknown").correct == (ids == "none")

    def test_substrings_are_no_answers(self):
        pairs = (("unknown", "no"), ("14", "4"), ("bananas", "a"), ("tearoom", "tea"))
        assert [answer_reward(said, gold, "contains") for said, gold in pairs] == [1]*4
        assert [answer_reward(said, gold) for said, gold in pairs] == [0]*4

    def test_released_takes_any_part_of_the_answer_but_not_nothing(self):
        assert [answer_reward(said, "a small boat", "either") for said in ("a", "l", "small", " ", "", None)] == [1, 1, 1, 1, 0, 0]
        assert [answer_reward(said, "a small boat") for said in ("a", "l", "small", " ", "", None)] == [0]*6


TAGS = {"reason": "<reason>see [1].</reason>", "id": "<id>1, 3</id>", "answer": "<answer>Zoe</answer>"}


class TestForm:
    """`lenient` looks whether the tags occur, as a search for a pattern does; `strict` is the reader that had nothing to forgive."""

    def forms(self, text: str) -> tuple[float, ...]:
        return tuple(form_reward(text, parse_reply(text, range(1, N + 1)), kind) for kind in FORMS)

    def test_the_form_as_asked(self):
        assert self.forms("".join(TAGS.values())) == self.forms(reply("none", "unknown")) == (1, 1)

    @pytest.mark.parametrize("order", [order for order in permutations(TAGS) if order != tuple(TAGS)], ids=", ".join)
    def test_every_other_order_is_worth_nothing(self, order):
        text = "".join(TAGS[name] for name in order)
        assert self.forms(text) == (0, 1)
        assert [score(text, config).total for config in (PAPER, RELEASED, OURS)] == pytest.approx([0.9, 1, 0])

    @pytest.mark.parametrize("place", [0, 3])
    @pytest.mark.parametrize("name", TAGS)
    def test_every_tag_that_comes_twice_is_worth_nothing(self, name, place):
        parts = list(TAGS.values())
        text = "".join([*parts[:place], TAGS[name], *parts[place:]])
        assert self.forms(text) == (0, 1)
        assert score(text, RELEASED).total == pytest.approx(1) and (score(text).total, score(text).correct) == (0, False)

    @pytest.mark.parametrize("name", TAGS)
    def test_a_missing_or_an_unclosed_tag_is_worth_nothing(self, name):
        for text in ("".join(TAGS.values()).replace(TAGS[name], ""), "".join(TAGS.values()).replace(f"</{name}>", "")):
            assert self.forms(text) == (0, 0) and score(text).total == 0

    def test_what_no_reading_sees(self):
        "An empty reason beside right ids and answer: nothing in the three terms looks at the reason's words."
        assert [score(reply("1, 3", reason=""), config).total for config in (PAPER, RELEASED, OURS)] == [1, 1, 1]


class TestHedging:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(0.01, 1), min_size=2, max_size=7), st.data())
    def test_no_set_of_ids_beats_the_best_single_one(self, belief, data):
        "Whatever a policy believes about the one piece of evidence."
        n, belief = len(belief), np.array(belief)/sum(belief)
        named = data.draw(st.sets(st.integers(1, n), min_size=1))
        hedged = sum(p*f1_exact(named, {i}, n) for i, p in enumerate(belief, 1))
        assert hedged <= belief.max() + 1e-9

    def test_who_knows_nothing_names_as_many_as_there_are(self):
        for n in range(2, 13):
            worth = [sum(f1_exact(range(1, k + 1), {i}, n) for i in range(1, n + 1))/n for k in range(1, n + 1)]
            assert worth[0] == pytest.approx(1/n) and max(worth[1:]) < worth[0]

    def test_f1_alone_does_not_do_that(self):
        n = 8
        everything = sum(f1_of(range(1, n + 1), {i}) for i in range(1, n + 1))/n
        assert everything > sum(f1_of({1}, {i}) for i in range(1, n + 1))/n
        assert score(reply("1, 2, 3, 4, 5, 6"), reward_preset("memloc", evidence="f1"), (1,)).evidence > 1/N

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(1, 6))
    def test_no_list_of_answers_beats_the_best_single_one(self, belief, k):
        things, belief = ("tea", "milk", "maps", "poems", "boats", "trees")[:len(belief)], np.array(belief)/sum(belief)
        assume(k <= len(things))
        listed = sum(p*answer_reward(", ".join(things[:k]), thing) for thing, p in zip(things, belief, strict=True))
        assert listed <= belief.max() + 1e-9
        assert sum(answer_reward(", ".join(things[:k]), thing, "contains") for thing in things) == k


class TestOutcome:
    def test_every_small_group(self):
        for n in range(1, 6):
            for correct in product([False, True], repeat=n):
                expected = "right" if all(correct) else "mixed" if any(correct) else "wrong"
                assert outcome(correct) == expected in OUTCOMES

    def test_the_two_readings_differ_where_all_are_wrong_but_not_equally(self):
        rewards = [score(reply(ids)) for ids in ("2", "3", "2", "2")]
        correct, totals = [reward.correct for reward in rewards], [reward.total for reward in rewards]
        assert (outcome(correct, totals), outcome(correct, totals, "rewards")) == ("wrong", "mixed")
        assert outcome([True, False], [0.5, 0.5], "rewards") == "wrong" and outcome([True, True], [0.5, 0.5 + 1e-9], "rewards") == "right"

    def test_every_id_makes_a_group_right_by_the_paper_only(self):
        group = [reply("1, 2, 3, 4, 5, 6"), reply("1, 3, 5"), reply("1-6"), reply("3, 2, 1")]
        assert [outcome([score(text, config).correct for text in group]) for config in (PAPER, RELEASED, OURS)] == ["right", "right", "wrong"]

    @pytest.mark.parametrize(("correct", "rewards", "by"), [([], None, "correct"), ([True], None, "rewards"), ([True], [1, 2], "rewards"), ([True], [1], "luck")])
    def test_groups_that_cannot_be_named(self, correct, rewards, by):
        with pytest.raises(ValueError, match="group needs|luck"):
            outcome(correct, rewards, by)


class TestSettings:
    def test_presets_say_what_they_are(self):
        assert RewardConfig() == OURS and OURS.name == "memloc"
        assert (PAPER.evidence, PAPER.answer, PAPER.form, PAPER.gate, PAPER.correct) == ("recall", "contains", "strict", False, "recall")
        assert (RELEASED.evidence, RELEASED.answer, RELEASED.form, RELEASED.gate) == ("recall", "either", "lenient", False)
        assert RewardConfig("paper").name.startswith("paper, evidence=f1_exact") and reward_preset("memloc", alpha=0.2).name == "memloc, alpha=0.2"

    @pytest.mark.parametrize("wrong", [{"mode": "ours"}, {"alpha": -0.1}, {"alpha": 0.6, "beta": 0.6}, {"alpha": float("nan")}, {"evidence": "f2"}, {"answer": "judge"},
                                       {"form": "loose"}, {"correct": "f1"}, {"answer_share": 0}, {"answer_share": 2}])
    def test_wrong_settings_are_refused_by_name(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RewardConfig(**wrong)

    def test_unknown_settings_from_the_trainer_are_refused(self):
        truth = json.dumps({"gold": [1], "answer": "x", "n_segments": 2})
        with pytest.raises(ValueError, match="alfa"):
            compute_score("x", "", truth, alfa=0.3)
        with pytest.raises(ValueError, match="'papers'"):
            compute_score("x", "", truth, {"mode": "papers"})
        with pytest.raises(ValueError, match="the parquet says mode 'paper', the settings say 'memloc'"):
            compute_score("x", "", truth, {"mode": "paper"}, mode="memloc")
        assert compute_score("x", "", truth, reward_router_address=None, reward_model_tokenizer=None)["score"] == 0


class TestTruth:
    def test_it_survives_the_parquet(self):
        for sample in toy_samples(ToyTask(negatives=0.3), 50):
            assert read_truth(truth_text(sample)) == (len(sample.segments), list(sample.gold), sample.answer)

    @pytest.mark.parametrize("text", ["", "Zoe", "[]", "3", '{"gold": [1]}', '{"gold": 1, "answer": "x", "n_segments": 2}', '{"gold": ["a"], "answer": "x", "n_segments": 2}'])
    def test_anything_else_is_refused_with_its_source(self, text):
        with pytest.raises(ValueError, match="locomo:26: ground_truth .* write the parquet again"):
            read_truth(text, "locomo:26")

    def test_a_truth_no_reply_could_meet_is_refused(self):
        for gold, answer, said in (((0,), "x", "gold id 0"), ((7,), "x", "gold id 7 is not among the 6"), ((1,), " ", "blank")):
            with pytest.raises(ValueError, match=said):
                check_truth(N, gold, answer)
            with pytest.raises(ValueError, match=said):
                score("x", gold=gold, answer=answer)

    def test_folding_keeps_other_scripts(self):
        assert [folded(text) for text in ("Straße", "Ångström", "ﬁn", "が", "한국", "co\u00adop")] == ["strasse", "angstrom", "fin", "が", "한국", "coop"]


def test_verl_loads_the_module_by_its_package_path_only(root):
    "verl executes a file outside of its package, where relative imports fail."
    reward = pytest.importorskip("verl.trainer.ppo.reward")
    from omegaconf import OmegaConf

    def load(path, **settings):
        return reward.get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": {"path": path, "name": "compute_score", "reward_kwargs": settings}}}))

    truth = json.dumps({"gold": list(GOLD), "answer": ANSWER, "n_segments": N})
    for mode in MODES:
        score_of = load(REWARD_PATH, mode=mode)
        for text, *_ in HACKS.values():
            told = score_of(data_source="x", solution_str=text, ground_truth=truth, extra_info={"index": 0, "num_turns": None})
            assert told["score"] == score(text, reward_preset(mode)).total
    with pytest.raises(RuntimeError, match="Error loading module"):
        load(str(root/"memloc"/"rewards.py"))
