"The reinforcement learning on a processor: replies, update, states, stages, and what is kept."

import functools
import json
import operator
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from memloc import shpo
from memloc.artifacts import read_json, stage_table
from memloc.hints import HintBook
from memloc.results import read_rows, shpo_markdown
from memloc.rewards import Reward
from memloc.sft import SFTConfig, load_network, reader_of
from memloc.shpo import (
    ALGORITHMS,
    Rollout,
    ShpoConfig,
    batch_of,
    cold_start,
    draw_replies,
    finished_shpo,
    log_probabilities,
    over_seeds,
    pad_token,
    pieces_of,
    plot_shpo,
    queries_of_step,
    read_rollouts,
    run_shpo,
    shpo_profile,
    shpo_samples,
    toy_hint,
    toy_lessons,
    train_steps,
    update,
)
from memloc.toy import ToyTask, toy_samples

TINY = ShpoConfig(n_queries=8, n_heldout=6, n_stages=2, steps_per_stage=2, queries_per_step=4, group_size=3, max_tokens=30)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    "A toy that keeps the form now and then."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cold_start("toy", tmp_path_factory.mktemp("shpo") / "start", n_samples=6_400)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reader(start):
    return reader_of(str(start))


def networks(reader):
    return load_network(reader, SFTConfig()).eval(), load_network(reader, SFTConfig()).eval().requires_grad_(False)


def weights(network):
    return torch.cat([value.detach().flatten() for value in network.parameters()])


def rollouts_with(network, reader, rewards, correct=None, group_size=3):
    "Drawn replies with rewards as given."
    samples = toy_samples(ToyTask(), len(rewards) // group_size, seed=4)
    prompts = [reader.encode(each.messages) for each in samples]
    replies = draw_replies(network, reader, prompts, group_size, 20, 1.0, seed=2)
    correct = correct or [value > 0.5 for value in rewards]
    return [Rollout(samples[i // group_size], prompts[i // group_size], reply, "", Reward(rewards[i], 0.0, 0.0, 0.0, correct[i], 1))
            for i, reply in enumerate(replies)]


class TestSharedPrompts:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_scores_and_gradients_are_those_of_reading_pair_by_pair(self, reader, temperature):
        network, _ = networks(reader)
        prompts = [reader.encode(each.messages) for each in toy_samples(ToyTask(), 4, seed=3)]
        assert len(set(map(len, prompts))) > 1  # padding matters
        replies = draw_replies(network, reader, prompts, 3, 30, 1.0, seed=1)
        assert len(set(map(len, replies))) > 1
        batch = batch_of(prompts, replies, pad_token(reader))
        shared = log_probabilities(network, batch, temperature)
        (shared * batch.mask).sum().backward()
        gradients = [value.grad.clone() for value in network.parameters()]
        network.zero_grad()
        total = 0
        for i, reply in enumerate(replies):
            logits = network(torch.tensor([prompts[i // 3] + reply])).logits[0] / temperature
            alone = logits.log_softmax(-1)[-len(reply) - 1:-1].gather(-1, torch.tensor(reply)[:, None])[:, 0]
            assert torch.allclose(alone, shared[i, :len(reply)], atol=1e-5)
            total = total + alone.sum()
        total.backward()
        for value, gradient in zip(network.parameters(), gradients, strict=True):
            assert torch.allclose(value.grad, gradient, atol=1e-3, rtol=1e-4)

    def test_one_token_replies(self, reader):
        network, _ = networks(reader)
        prompts = [reader.encode(each.messages) for each in toy_samples(ToyTask(), 2, seed=3)]
        batch = batch_of(prompts, [[5], [6], [7], [8]], pad_token(reader))
        found = log_probabilities(network, batch)
        alone = network(torch.tensor([prompts[1]])).logits[0, -1].log_softmax(-1)
        assert found.shape == (4, 1) and torch.allclose(found[2:, 0], alone[[7, 8]], atol=1e-5)

    def test_draws_follow_the_probabilities(self, reader):
        "The first token of many replies is distributed as the network says."
        network, _ = networks(reader)
        prompt = reader.encode(toy_samples(ToyTask(), 1, seed=3)[0].messages)
        firsts = [reply[0] for reply in draw_replies(network, reader, [prompt], 400, 1, 3.0, seed=1)]
        with torch.inference_mode():
            expected = (network(torch.tensor([prompt])).logits[0, -1] / 3.0).softmax(-1)
        likely = int(expected.argmax())
        share, p = firsts.count(likely) / 400, float(expected[likely])
        assert abs(share - p) < 4 * np.sqrt(p * (1 - p) / 400)

    def test_cold_draws_are_the_most_probable_replies(self, reader):
        network, _ = networks(reader)
        prompts = [reader.encode(each.messages) for each in toy_samples(ToyTask(), 4, seed=3)]
        drawn, end = draw_replies(network, reader, prompts, 3, 30, 1e-4, seed=1), shpo.end_of_turn(reader.tokenizer)
        for i, prompt in enumerate(prompts):
            row = network.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30, eos_token_id=end, pad_token_id=end)[0, len(prompt):].tolist()
            assert drawn[3 * i:3 * i + 3] == [row] * 3

    def test_draws_repeat_with_the_seed_and_end_with_their_end(self, reader):
        network, _ = networks(reader)
        prompts = [reader.encode(each.messages) for each in toy_samples(ToyTask(), 3, seed=3)]
        first, again, other = (draw_replies(network, reader, prompts, 4, 30, 1.0, seed=seed) for seed in (1, 1, 2))
        assert first == again != other and len(first) == 12
        end = shpo.end_of_turn(reader.tokenizer)
        assert all(end not in reply[:-1] and (reply[-1] == end or len(reply) == 30) for reply in first)


class TestUpdate:
    def test_pieces_do_not_change_the_step(self, reader):
        moved = []
        for most in (3, 6, 1000):
            network, reference = networks(reader)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            rollouts = rollouts_with(network, reader, [1.0, 0.0, 0.5] * 4)
            advantages = np.array([1.0, -1.0, 0.0] * 4, dtype=np.float32)
            seen = update(network, reference, optimizer, rollouts, advantages, reader, replace(TINY, micro_batch_size=most))
            moved.append((weights(network), seen))
        for other, seen in moved[1:]:
            assert torch.allclose(other, moved[0][0], atol=1e-6)
            assert seen == pytest.approx(moved[0][1], abs=1e-5)

    def test_pieces_hold_every_reply_once_in_whole_groups(self):
        class Fake:
            def __init__(self, n):
                self.reply = [0] * n

        rollouts = [Fake(n) for n in (9, 9, 1, 2, 5, 5)]
        pieces = pieces_of(rollouts, 2, 4)
        assert sorted(functools.reduce(operator.iadd, pieces, [])) == list(range(6)) and all(piece[i] + 1 == piece[i + 1] for piece in pieces for i in range(0, len(piece), 2))
        assert pieces_of(rollouts, 2, 1) == [[2, 3], [4, 5], [0, 1]]

    def test_no_advantage_and_no_distance_move_nothing(self, reader):
        network, reference = networks(reader)
        before = weights(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        seen = update(network, reference, optimizer, rollouts_with(network, reader, [0.3] * 6), np.zeros(6, dtype=np.float32), reader, TINY)
        assert torch.allclose(weights(network), before, atol=1e-6) and seen["kl"] == pytest.approx(0, abs=1e-7)

    def test_the_distance_is_to_the_policy_after_the_cold_start(self, reader):
        network, reference = networks(reader)
        rollouts, nothing = rollouts_with(network, reader, [0.3] * 6), np.zeros(6, dtype=np.float32)
        with torch.no_grad():
            for value in reference.parameters():
                value.add_(0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
        before, far = weights(network), weights(reference)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        kls = [update(network, reference, optimizer, rollouts, nothing, reader, replace(TINY, kl_coef=0.5))["kl"] for _ in range(20)]
        assert kls[0] > 1e-4 and kls[-1] < kls[0]  # pulled towards the reference
        assert not torch.equal(weights(network), before) and torch.equal(weights(reference), far)
        free = networks(reader)[0]
        update(free, reference, torch.optim.SGD(free.parameters(), lr=1.0), rollouts, nothing, reader, replace(TINY, kl_coef=0.0))
        assert torch.allclose(weights(free), before, atol=1e-6)

    def test_good_replies_become_more_likely_and_bad_ones_less(self, reader):
        network, reference = networks(reader)
        rollouts = rollouts_with(network, reader, [1.0, 0.0, 0.0] * 2)
        batch = batch_of([rollouts[0].prompt, rollouts[3].prompt], [each.reply for each in rollouts], pad_token(reader))
        with torch.no_grad():
            before = (log_probabilities(network, batch) * batch.mask).sum(1)
        advantages = np.array([1.4, -0.7, -0.7] * 2, dtype=np.float32)
        for _ in range(5):
            update(network, reference, torch.optim.SGD(network.parameters(), lr=0.05), rollouts, advantages, reader, TINY)
        with torch.no_grad():
            after = (log_probabilities(network, batch) * batch.mask).sum(1)
        assert ((after - before)[[0, 3]] > 0).all() and (after - before)[[1, 2, 4, 5]].mean() < 0


class TestStages:
    def test_every_query_comes_once_before_any_comes_again(self):
        seen = functools.reduce(operator.iadd, (queries_of_step(10, 4, step, (1, 0)) for step in range(5)), [])
        assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
        assert queries_of_step(10, 4, 2, (1, 0)) != queries_of_step(10, 4, 2, (1, 1))

    def test_a_broken_training_ends_like_an_unbroken_one(self, reader, tmp_path):
        samples, ends = toy_samples(ToyTask(), 8, seed=5), []
        for name, stops in (("whole", [None]), ("broken", [1, 3, None])):
            for stop in stops:
                network, reference = networks(reader)
                steps, book, told = train_steps(network, reference, reader, samples, TINY, tmp_path / name, until=stop)
                if stop == 3:  # killed while step 4 was being kept: its files are there, its state is not
                    shutil.copyfile(tmp_path / name / "steps/00002.parquet", tmp_path / name / "steps/00003.parquet")
                    (tmp_path / name / "steps/00003.json").write_text(json.dumps(read_json(tmp_path / name / "steps/00002.json") | {"reward": -1.0}))
                    (tmp_path / name / ".next").mkdir()
            ends.append((weights(network), steps.drop("seconds_drawing", "seconds_updating"), book.hints, told))
        assert torch.equal(ends[0][0], ends[1][0])
        assert ends[0][1].equals(ends[1][1]) and ends[0][2] == ends[1][2]
        assert ends[0][3].equals(ends[1][3])
        assert len(list((tmp_path / "broken").glob("step-*"))) == 1

    def test_all_queries_are_asked_in_every_stage_and_only_mixed_ones_get_a_hint(self, reader, tmp_path):
        network, reference = networks(reader)
        samples = toy_samples(ToyTask(negatives=0), 8, seed=5)
        config = replace(TINY, n_stages=3, group_size=6)
        _, book, told = train_steps(network, reference, reader, samples, config, tmp_path)
        rows = read_rollouts(tmp_path)
        for stage in range(3):
            assert set(rows.filter(pl.col("stage") == stage)["sample_id"]) == {each.sample_id for each in samples}
        mixed = rows.group_by("stage", "sample_id").agg(pl.col("correct").n_unique() == 2).filter("correct")
        asked = {(row["stage"] - 1, row["sample_id"]) for row in told.iter_rows(named=True)}
        assert asked == {(stage, name) for stage, name, _ in mixed.iter_rows() if stage < 2} and asked
        for each in samples:
            assert (book.prompt(each) == each.messages) == (each.sample_id not in book.hints)

    @pytest.mark.parametrize(("algorithm", "hints", "eta"), [("shpo", True, 0.25), ("no hints", False, 0.25), ("no eta", True, 1.0), ("grpo", False, 1.0)])
    def test_what_an_algorithm_is_made_of(self, algorithm, hints, eta):
        config = ShpoConfig(algorithm=algorithm, eta_homo=0.25)
        assert (config.hints, config.eta) == (hints, eta) and algorithm in ALGORITHMS

    def test_eta_scales_exactly_the_homogeneous_groups(self, reader, monkeypatch, tmp_path):
        found = {}
        for algorithm in ("grpo", "no hints"):
            network, reference = networks(reader)
            samples = toy_samples(ToyTask(), 8, seed=5)
            shpo.train_steps(network, reference, reader, samples, replace(TINY, algorithm=algorithm, eta_homo=0.5), tmp_path / algorithm, until=1)
            found[algorithm] = read_rollouts(tmp_path / algorithm)
        whole, scaled = (found[name].with_columns(mixed=pl.col("correct").n_unique().over("sample_id") == 2) for name in ("grpo", "no hints"))
        assert whole["reply"].equals(scaled["reply"])  # the same draws
        ratio, plain, halved = np.where(whole["mixed"].to_numpy(), 1.0, 0.5), whole["advantage"].to_numpy(), scaled["advantage"].to_numpy()
        assert np.allclose(halved, plain * ratio) and np.isfinite(halved).all() and 0 < (ratio < 1).sum() < len(ratio)
        flat = whole.filter(pl.col("total").n_unique().over("sample_id") == 1)
        assert (flat["advantage"] == 0).all()


class TestLessons:
    def test_lessons_show_and_ask_for_fitting_hints(self):
        lessons = toy_lessons(400)
        hinted = [each for each in lessons if "\nHint: " in each.messages[0]["content"]]
        coached = [each for each in lessons if each.target in shpo.HINTS.values()]
        assert 70 < len(hinted) < 130 and 35 < len(coached) < 90
        assert {each.messages[0]["content"].rpartition("Hint: ")[2] for each in hinted} == set(shpo.HINTS.values())

    def test_hints_of_the_toy_tell_chains_from_lists(self):
        for each in toy_samples(ToyTask(), 60, seed=2):
            hint = toy_hint(each)
            assert (hint == shpo.HINTS["none"]) == (not each.gold) and (hint == shpo.HINTS["chain"]) == (each.n_hops == 2)


class TestRun:
    def test_a_run_writes_what_it_promises_and_is_left_alone(self, start, tmp_path, caplog):
        config = replace(TINY, policy=str(start))
        means = run_shpo(config, tmp_path / "run")
        folder = tmp_path / "run/shpo"
        assert means["system"].to_list() == ["start", "shpo"] and means["n"].to_list() == [6, 6]
        assert {"heldout.parquet", "log.parquet", "rollouts.parquet", "report.json", "curves.png", "manifest.json", "model"} <= {path.name for path in folder.iterdir()}
        assert not (folder / "work").exists()
        assert stage_table(tmp_path / "run", "shpo", "rollouts").height == 4 * 4 * 3
        trained = load_network(reader_of(str(folder / "model")), SFTConfig())
        assert not torch.equal(weights(trained), weights(load_network(reader_of(str(start)), SFTConfig())))
        stamp = (folder / "manifest.json").stat().st_mtime_ns
        assert run_shpo(config, tmp_path / "run").equals(means) and (folder / "manifest.json").stat().st_mtime_ns == stamp
        with pytest.raises(ValueError, match="learning_rate.*another name"):
            run_shpo(replace(config, learning_rate=1e-3), tmp_path / "run")
        network = load_network(reader_of(str(start)), SFTConfig())
        network.save_pretrained(folder / "model")  # other weights than those that were measured
        assert finished_shpo(tmp_path / "run", config) is None
        (folder / "model/model.safetensors").unlink()
        assert finished_shpo(tmp_path / "run", config) is None

    def test_other_settings_do_not_go_on_with_a_broken_run(self, start, tmp_path, monkeypatch):
        monkeypatch.setattr(shpo, "write_shpo", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_shpo(replace(TINY, policy=str(start)), tmp_path / "run")
        with pytest.raises(ValueError, match="unfinished training with other settings .seed"):
            run_shpo(replace(TINY, policy=str(start), seed=1), tmp_path / "run")

    def test_a_finished_run_is_not_replaced_by_one_with_other_settings(self, start, tmp_path):
        config = replace(TINY, policy=str(start), n_stages=1, steps_per_stage=1)
        run_shpo(config, tmp_path / "run")
        (tmp_path / "run/shpo/curves.png").unlink()
        with pytest.raises(ValueError, match="finished training with other settings .seed"):
            run_shpo(replace(config, seed=5), tmp_path / "run")
        other = shutil.copytree(start, tmp_path / "other")
        network = load_network(reader_of(str(other)), SFTConfig())
        with torch.no_grad():
            next(network.parameters()).add_(0.1)
        network.save_pretrained(other)
        shutil.copytree(tmp_path / "run", tmp_path / "moved")
        with pytest.raises(ValueError, match="other settings .policy, start"):
            run_shpo(replace(config, policy=str(other)), tmp_path / "moved")

    def test_models_and_prompts_that_do_not_fit_are_refused(self, reader):
        from transformers import (
            BloomConfig,
            BloomForCausalLM,
            LlamaConfig,
            LlamaForCausalLM,
            MistralConfig,
            MistralForCausalLM,
        )

        samples, size = toy_samples(ToyTask(), 3, seed=3), len(reader.tokenizer)
        shape = {"vocab_size": size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                 "initializer_range": 0.5}
        torch.manual_seed(1)
        shpo.refuse_unfit(LlamaForCausalLM(LlamaConfig(**shape)).eval(), reader, samples, TINY)
        with pytest.raises(ValueError, match=r"MistralForCausalLM.*sliding window"):
            shpo.refuse_unfit(MistralForCausalLM(MistralConfig(**shape, sliding_window=16)).eval(), reader, samples, TINY)
        with pytest.raises(ValueError, match=r"BloomForCausalLM.*engine verl"):
            shpo.refuse_unfit(BloomForCausalLM(BloomConfig(vocab_size=size, hidden_size=32, n_layer=2, n_head=2)).eval(), reader, samples, TINY)
        with pytest.raises(ValueError, match=r"toy/.*lower max_tokens"):
            shpo.refuse_unfit(networks(reader)[0], reader, samples, replace(TINY, max_tokens=reader.context))

    def test_a_reply_with_a_special_token_inside_is_worth_nothing(self, reader, monkeypatch):
        (sample,) = toy_samples(ToyTask(negatives=0), 1, seed=5)
        good, end = reader.tokenizer(sample.target, add_special_tokens=False).input_ids, shpo.end_of_turn(reader.tokenizer)
        for place, worth in ((None, 1.0), (0, 0.0), (len(good) // 2, 0.0), (len(good), 0.0)):
            body = good if place is None else [*good[:place], pad_token(reader), *good[place:]]
            monkeypatch.setattr(shpo, "draw_replies", lambda *_, body=body: [[*body, end]])
            (rollout,) = shpo.roll_out(None, reader, [sample], HintBook(), TINY, 0, 1)
            assert rollout.reward.total == worth, place

    def test_held_out_samples_are_not_trained_on(self):
        for config in (TINY, replace(TINY, data="notes", policy="notes")):
            train, sets = shpo_samples(config)
            held = sets[config.data]
            assert (len(train), len(held)) == (8, 6)
            assert not {(each.question, each.segments) for each in train} & {(each.question, each.segments) for each in held}

    def test_runs_of_several_seeds_are_compared_and_kept(self, start, tmp_path, monkeypatch):
        monkeypatch.setattr(shpo, "cold_start", lambda policy, folder, seed: start)
        rows = shpo.compare(TINY, tmp_path / "runs", seeds=(1, 2), algorithms=("shpo", "grpo"))
        assert rows.group_by("seed", "system").len()["len"].to_list() == [6] * 6
        monkeypatch.setattr(shpo, "refuse_dirty", lambda commits: None)
        runs = sorted((tmp_path / "runs").glob("*-[12]"))
        assert shpo.keep_shpo(runs, tmp_path / "kept.csv") > 20
        paired = pl.read_csv(tmp_path / "kept-paired.csv")
        assert {("test", 12), ("seeds", 2)} <= set(paired.select("split", "n").iter_rows())
        kept = pl.read_csv(tmp_path / "kept.csv").filter(pl.col("metric") == "reward", pl.col("split") == "test")
        for name, value in kept.select("system", "value").iter_rows():
            assert value == pytest.approx(100 * rows.filter(pl.col("system") == name)["reward"].mean(), abs=0.01)
        table = shpo_markdown(read_rows(tmp_path / "kept.csv"), read_rows(tmp_path / "kept-paired.csv"))
        (value,) = paired.filter(pl.col("split") == "seeds", pl.col("metric") == "reward", pl.col("against") == "grpo")["difference"]
        means = rows.group_by("seed", "system").agg(pl.col("reward").mean()).group_by("system").agg(pl.col("reward").mean())
        assert value == pytest.approx(100 * (means.filter(system="shpo")["reward"][0] - means.filter(system="grpo")["reward"][0]), abs=1e-6)
        assert f"| *shpo − grpo, 2 seeds* | {value:+.1f} [" in table and "| toy, n = 12: start |" in table and "Seeds 1, 2;" in table

    def test_drawn_replies_are_left_out_or_averaged(self, reader):
        network, _ = networks(reader)
        samples = toy_samples(ToyTask(), 5, seed=5)
        none, four = (shpo.heldout_rewards("start", network, reader, samples, replace(TINY, heldout_draws=n)) for n in (0, 4))
        assert none["reward_drawn"].null_count() == 5
        drawn = shpo.roll_out(network, reader, samples, HintBook(), TINY, 0, 4)
        assert four["reward_drawn"].to_list() == pytest.approx([np.mean([each.reward.total for each in drawn[4*i:4*i + 4]]) for i in range(5)])
        assert none.drop("reward_drawn").equals(four.drop("reward_drawn"))

    def test_curves_with_and_without_hints(self, reader, tmp_path):
        network, reference = networks(reader)
        steps, _, _ = train_steps(network, reference, reader, toy_samples(ToyTask(), 8, seed=5), replace(TINY, algorithm="grpo"), tmp_path)
        told = pl.DataFrame({"stage": [1, 1, 1], "sample_id": ["a", "b", "c"], "written": ["x", "y", ""], "rejected": [None, "answer", "empty"]})
        for table in (told, pl.DataFrame()):
            axes = plot_shpo(steps, table).axes
            assert len(axes) == 5
        assert [bar.get_width() for bar in plot_shpo(steps, told).axes[4].patches] == [1, 1, 1]


@pytest.mark.long
def test_over_five_seeds_the_held_out_reward_rises(tmp_path):
    "Twelve minutes: `pytest -m long`."
    rows = shpo.compare(ShpoConfig(), tmp_path, algorithms=("shpo",))
    assert rows["seed"].n_unique() == 5 and over_seeds(rows, "shpo", "start")["low"] > 0


def test_interval_over_seeds_is_students():
    rows = pl.DataFrame([{"seed": seed, "system": name, "reward": 0.2 + 0.1 * (name == "a") + 0.01 * seed * (name == "a")} for seed in range(4) for name in "ab"])
    found = over_seeds(rows, "a", "b")
    values = 100 * np.array([0.10, 0.11, 0.12, 0.13])
    half = 3.182446 * values.std(ddof=1) / 2
    assert (found["difference"], found["low"], found["high"]) == pytest.approx((values.mean(), values.mean() - half, values.mean() + half), abs=1e-4)


@pytest.mark.parametrize(("changes", "words"), [({"algorithm": "ppo"}, "grpo"), ({"group_size": 1}, "group_size must be at least 2"), ({"eta_homo": 2}, "eta_homo"),
                                                ({"learning_rate": 0.0}, "learning_rate"), ({"reward": "mine"}, "mine"), ({"data": "x"}, "notes"),
                                                ({"queries_per_step": 9000}, "queries_per_step"), ({"data": "notes"}, "other prompts"), ({"kl_coef": float("nan")}, "kl_coef")])
def test_settings_that_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        shpo_profile("sample", changes)


