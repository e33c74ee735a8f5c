"""The toy task, its tokenizer, its model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from memloc.chat import Sampling
from memloc.ids import parse_reply
from memloc.llm import LocalModel
from memloc.locator import Asked, LLMLocator, Segment, SessionBlock
from memloc.toy import NAMES, ToyTask, draw_sample, toy_model, toy_samples, toy_tokenizer, write_toy

TOKENIZER = toy_tokenizer()


def evidence_by_rule(sample):
    "What a reader who knows the rule would point at: follow names from the one asked for."
    facts = [tuple(text.split()) for text in sample.segments]
    found, wanted = [], [sample.question]
    for name in wanted:
        for number, (first, second) in enumerate(facts, start=1):
            if first == name:
                found.append(number)
                wanted += [second] if second in NAMES else []
    return set(found)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), low=st.integers(2, 9), more=st.integers(0, 4), names=st.integers(3, 16), chains=st.floats(0, 1),
       negatives=st.floats(0, 1))
def test_every_sample_is_solvable_and_written_in_the_form(seed, low, more, names, chains, negatives):
    task = ToyTask((low, min(9, low + more)), n_names=names, chains=chains, negatives=negatives)
    sample = draw_sample(task, task.n_segments[1], np.random.default_rng(seed))
    assert evidence_by_rule(sample) == set(sample.gold)
    read = parse_reply(sample.target, range(1, len(sample.segments) + 1))
    assert (read.ids, read.answer, read.repaired) == (sample.gold, sample.answer, ())
    assert all(f'"{sample.segments[number - 1]}" [{number}]' in sample.reason for number in sample.gold)
    tokens = TOKENIZER(sample.target)["input_ids"]
    prompt = TOKENIZER.apply_chat_template(sample.messages, add_generation_prompt=True, return_dict=False)
    assert TOKENIZER.decode(tokens) == sample.target
    assert TOKENIZER.unk_token_id not in tokens + prompt


def test_evidence_stands_at_every_number_equally_often():
    samples = toy_samples(ToyTask(n_segments=(6, 6), negatives=0), 3000)
    first = np.bincount([sample.gold[0] for sample in samples if len(sample.gold) == 1], minlength=7)[1:]
    assert chisquare(first).pvalue > 0.001
    linked = np.bincount([number for sample in samples if sample.n_hops == 2 for number in sample.gold], minlength=7)[1:]
    assert chisquare(linked).pvalue > 0.001


def test_shares_of_the_task_are_kept():
    samples = toy_samples(ToyTask(chains=0.3, negatives=0.1), 3000)
    assert abs(np.mean([not sample.gold for sample in samples]) - 0.1) < 0.03
    assert abs(np.mean([sample.n_hops == 2 for sample in samples]) - 0.27) < 0.03


def test_no_sample_is_in_both_splits_whatever_the_seed():
    train, test = ({sample.sample_id for seed in seeds for sample in toy_samples(ToyTask(n_segments=(2, 2)), 500, seed, split)}
                   for seeds, split in (((1, 2), "train"), ((2, 3), "test")))
    assert train and test and not train & test


def test_short_sessions_come_first():
    lengths = [len(sample.segments) for sample in toy_samples(ToyTask(n_segments=(2, 6)), 1000, rising=True)]
    assert set(lengths[:300]) == {2, 3} and set(lengths[700:]) == {2, 3, 4, 5, 6}


def test_wrong_difficulties_and_splits_are_refused():
    for wrong in ({"n_segments": (1, 6)}, {"n_segments": (2, 12)}, {"n_evidence": (2, 1)}, {"n_names": 2}, {"chains": 1.5}, {"negatives": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ToyTask(**wrong)
    with pytest.raises(ValueError, match="split"):
        toy_samples(ToyTask(), 1, split="dev")


def test_the_model_is_small_seeded_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    one, two, other = toy_model(TOKENIZER, seed=1), toy_model(TOKENIZER, seed=1), toy_model(TOKENIZER, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    assert sum(weight.numel() for weight in one.parameters()) < 100_000
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_a_saved_toy_is_served_like_any_model_and_plugs_into_the_locator(tmp_path):
    model = LocalModel(str(write_toy(tmp_path/"toy")), device="cpu")
    sample = toy_samples(ToyTask(), 1)[0]
    assert model.encode(sample.messages) == TOKENIZER.apply_chat_template(sample.messages, add_generation_prompt=True, return_dict=False)
    block = SessionBlock("c/s000", tuple(Segment("c/s000", f"c/s000/t{i:03d}", "turn", text) for i, text in enumerate(sample.segments)))
    (found,) = LLMLocator(model, Sampling(max_tokens=8)).locate({"c/s000": block}, [Asked("q", sample.question, ("c/s000",), (1.0,))])
    assert [call["status"] for call in found.calls] == ["parse failure"]
