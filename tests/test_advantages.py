"""Advantages and loss against loops in NumPy and against verl itself; zero spread; the weight of groups; the reference."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memloc.advantages import (
    group_advantages,
    group_weights,
    has_spread,
    register_shpo,
    shpo_advantage,
    shpo_loss,
)

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
REWARDS = (0.0, 0.1, 0.24, 0.3, 0.4, 0.7, 0.9, 1.0)  # verl's mean of several equal ones differs from some of these


def advantages_by_hand(rewards, correct, index, eta):
    "The formulas of the method in float64, one group after the other."
    found = np.zeros(len(rewards))
    for query in set(index):
        places = [i for i, each in enumerate(index) if each == query]
        group = np.array([rewards[i] for i in places])
        if group.max() > group.min():
            mixed = len({bool(correct[i]) for i in places}) == 2
            found[places] = (group - group.mean())/(group.std(ddof=1) + 1e-6)*(1 if mixed else eta)
    return found


replies = st.lists(st.tuples(st.sampled_from(REWARDS), st.booleans(), st.integers(0, 4)), min_size=1, max_size=24)


class TestAdvantages:
    @given(replies, st.sampled_from((0.0, 0.25, 0.5, 1.0)))
    @settings(max_examples=200, deadline=None)
    def test_the_loop_in_numpy_agrees(self, drawn, eta):
        rewards, correct, index = (list(column) for column in zip(*drawn, strict=True))
        found = group_advantages(rewards, correct, index, eta)
        assert np.isfinite(found).all()
        assert found == pytest.approx(advantages_by_hand(rewards, correct, index, eta), abs=2e-4)

    @pytest.mark.parametrize("n", range(1, 17))
    def test_zero_spread_is_exactly_zero(self, n):
        for reward in REWARDS:
            for correct in ([True]*n, [i % 2 == 0 for i in range(n)]):
                assert group_advantages([reward]*n, correct, ["q"]*n).tolist() == [0.0]*n

    def test_verl_alone_does_not_give_zero(self):
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

        column = torch.full((3, 1), 0.9)
        assert compute_grpo_outcome_advantage(column, torch.ones(3, 1), np.zeros(3))[0].min() > 0.05

    def test_eta_scales_exactly_the_homogeneous_groups(self):
        rng = np.random.default_rng(0)
        rewards, index = rng.random(400).astype(np.float32), np.repeat(np.arange(100), 4)
        correct = np.repeat(rng.random(100) < 0.5, 4)
        mixed = np.repeat(rng.random(100) < 0.4, 4)
        correct[mixed] = np.tile([True, False, True, True], mixed.sum()//4)
        plain = group_advantages(rewards, correct, index, 1.0)
        for eta in (0.0, 0.125, 0.5):
            weighted = group_advantages(rewards, correct, index, eta)
            assert (weighted[mixed] == plain[mixed]).all()
            assert (weighted[~mixed] == plain[~mixed]*np.float32(eta)).all()

    def test_order_and_names_of_queries_do_not_matter(self):
        rng = np.random.default_rng(1)
        rewards, correct, index = rng.random(40), rng.random(40) < 0.5, rng.integers(0, 10, 40)
        found, order = group_advantages(rewards, correct, index), rng.permutation(40)
        shuffled = group_advantages(rewards[order], correct[order], [f"query {i}" for i in index[order]])
        assert shuffled == pytest.approx(found[order], abs=1e-5)

    def test_the_mask_is_kept(self):
        mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
        rewards = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.0, 0.0]])
        found, returns = shpo_advantage(rewards, mask, ["q", "q"], {}, torch.tensor([1.0, 0.0]))
        assert ((found != 0) == (mask > 0)).all() and torch.equal(found, returns)

    def test_without_division_by_the_deviation(self):
        rewards = torch.tensor([[1.0], [0.0], [0.3], [0.1]])
        found, _ = shpo_advantage(rewards, torch.ones(4, 1), ["a", "a", "b", "b"], {"norm_adv_by_std_in_grpo": False, "eta_homo": 0.5},
                                  torch.tensor([1.0, 0.0, 0.0, 0.0]))
        assert found.flatten().tolist() == pytest.approx([0.5, -0.5, 0.05, -0.05])

    @pytest.mark.parametrize("broken", [float("nan"), float("inf")])
    def test_a_reward_that_is_no_number_is_refused(self, broken):
        with pytest.raises(ValueError, match="reply 1 of query 'a'"):
            group_advantages([0.1, broken], [True, False], ["a", "a"])

    @pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan")])
    def test_a_weight_outside_is_refused(self, eta):
        with pytest.raises(ValueError, match="eta_homo"):
            group_weights([True], ["a"], eta)

    def test_unequal_lengths_are_refused(self):
        for broken in (lambda: group_weights([True], ["a", "b"]), lambda: has_spread([1.0], ["a", "b"])):
            with pytest.raises(ValueError, match="zip"):
                broken()


class TestInVerl:
    @pytest.fixture(scope="class")
    def batch(self):
        from verl import DataProto

        rng = np.random.default_rng(2)
        lengths = rng.integers(1, 6, 32)
        mask = torch.tensor(np.arange(6)[None] < lengths[:, None]).float()
        rewards = torch.zeros(32, 6)
        rewards[torch.arange(32), torch.tensor(lengths) - 1] = torch.tensor(rng.choice(REWARDS, 32), dtype=torch.float32)
        uid = np.array([f"u{i//4}" for i in range(32)], dtype=object)
        return DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask, "reward_baselines": torch.tensor(rng.random(32) < 0.4).float()},
                                   {"uid": uid})

    def test_the_registry_has_it_and_takes_it_twice(self):
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        register_shpo()
        register_shpo()
        assert get_adv_estimator_fn("shpo") is shpo_advantage

    def test_verl_computes_what_the_cpu_trainer_computes(self, batch):
        from verl.trainer.ppo.ray_trainer import compute_advantage

        register_shpo()
        found = compute_advantage(batch, "shpo", config={"eta_homo": 0.3}).batch["advantages"]
        one = group_advantages(batch.batch["token_level_rewards"].sum(1).numpy(), batch.batch["reward_baselines"].bool().numpy(),
                               batch.non_tensor_batch["uid"], 0.3)
        assert torch.equal(found, torch.tensor(one)[:, None]*batch.batch["response_mask"])

    def test_with_eta_one_it_is_grpo_wherever_a_group_has_spread(self, batch):
        from verl.trainer.ppo.ray_trainer import compute_advantage

        register_shpo()
        ours = compute_advantage(batch, "shpo", config={"eta_homo": 1.0}).batch["advantages"].clone()
        grpo = compute_advantage(batch, "grpo").batch["advantages"]
        spread = has_spread(batch.batch["token_level_rewards"].sum(1).tolist(), batch.non_tensor_batch["uid"]) > 0
        assert spread.any() and torch.equal(ours[spread], grpo[spread])

    def test_a_trainer_that_tells_no_correctness_is_refused(self, batch):
        from verl.trainer.ppo.ray_trainer import compute_advantage

        register_shpo()
        untold = batch.select(batch_keys=["token_level_rewards", "response_mask"], non_tensor_batch_keys=["uid"])
        with pytest.raises(ValueError, match="memloc.shpo_verl"):
            compute_advantage(untold, "shpo", config={})


def loss_by_hand(now, old, ref, advantages, mask, clip, kl_coef, mode):
    "Objective and distance in float64, token by token."
    policy, distance = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, t in np.ndindex(mask.shape):
        ratio, a = np.exp(now[i, t] - old[i, t]), advantages[i, t]
        gain = min(ratio*a, min(max(ratio, 1 - clip), 1 + clip)*a)
        policy[i, t] = -max(gain, 3*a) if a < 0 else -gain  # verl's guard: the ratio of a bad token counts at most 3
        x = ref[i, t] - now[i, t]
        distance[i, t] = np.exp(x) - x - 1
    sums = {"policy": (policy*mask).sum(1), "distance": (distance*mask).sum(1)}
    seen = mask.sum(1) > 0
    if mode == "token-mean":
        means = {name: values.sum()/mask.sum() for name, values in sums.items()}
    elif mode == "seq-mean-token-mean":
        means = {name: (values[seen]/mask.sum(1)[seen]).mean() for name, values in sums.items()}
    else:
        means = {name: values[seen].mean()/(mask.shape[1] if mode.endswith("norm") else 1) for name, values in sums.items()}
    return means["policy"] + kl_coef*means["distance"], means["policy"], means["distance"]


def draw(seed, n=6, length=9):
    rng = np.random.default_rng(seed)
    old = -rng.random((n, length))*3
    now, ref = old + rng.normal(0, 0.4, old.shape), old + rng.normal(0, 0.3, old.shape)
    mask = (np.arange(length)[None] < rng.integers(1, length + 1, n)[:, None]).astype(float)
    return now, old, ref, rng.normal(0, 1, (n, 1))*mask, mask


def tensors(arrays):
    return [torch.tensor(array, dtype=torch.float64) for array in arrays]


class TestLoss:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("seed", range(5))
    def test_the_loop_in_numpy_agrees(self, mode, seed):
        arrays = draw(seed)
        loss, parts = shpo_loss(*tensors(arrays), clip=0.2, kl_coef=0.07, loss_aggregation=mode)
        by_hand = loss_by_hand(*arrays, 0.2, 0.07, mode)
        assert (loss.item(), parts.policy_loss, parts.kl) == pytest.approx(by_hand, rel=1e-5)

    def test_a_very_improbable_bad_token_counts_at_most_three(self):
        arrays = [np.array([[value]]) for value in (0.0, -5.0, 0.0, -1.0, 1.0)]
        assert shpo_loss(*tensors(arrays))[1].policy_loss == pytest.approx(3.0)

    def test_the_gradient_is_that_of_the_formula(self):
        now, old, ref, advantages, mask = tensors(draw(3))
        now.requires_grad_(True)
        shpo_loss(now, old, ref, advantages, mask, kl_coef=0.07)[0].backward()
        arrays = draw(3)
        for i, t in ((0, 0), (1, 2), (3, 0), (5, 8)):
            sides = []
            for step in (1e-5, -1e-5):
                moved = arrays[0].copy()
                moved[i, t] += step
                sides.append(loss_by_hand(moved, *arrays[1:], 0.2, 0.07, "token-mean")[0])
            assert now.grad[i, t].item() == pytest.approx((sides[0] - sides[1])/2e-5, abs=1e-4)

    @pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
    def test_pieces_add_up_to_the_batch(self, mode):
        batch = tensors(draw(4))
        whole, size = shpo_loss(*batch, loss_aggregation=mode)[0], {"n_tokens": int(batch[4].sum()), "n_replies": 6}
        pieces = [shpo_loss(*(one[i:i + 2] for one in batch), loss_aggregation=mode, **size)[0] for i in (0, 2, 4)]
        assert sum(pieces).item() == pytest.approx(whole.item(), rel=1e-6)

    def test_the_distance_is_to_the_reference_and_to_nothing_else(self):
        now, old, ref, advantages, mask = tensors(draw(5))
        base = shpo_loss(now, old, ref, advantages, mask)
        nearer = shpo_loss(now, old, now, advantages, mask)
        assert nearer[1].kl == 0 and nearer[0].item() == nearer[1].policy_loss == base[1].policy_loss
        assert base[0].item() == pytest.approx(base[1].policy_loss + 0.01*base[1].kl)
        older = shpo_loss(now, old - 0.5, ref, advantages, mask)
        assert older[1].kl == base[1].kl and older[1].policy_loss != base[1].policy_loss

    def test_without_advantages_only_the_reference_pulls(self):
        now, old, ref, advantages, mask = tensors(draw(6))
        now.requires_grad_(True)
        shpo_loss(now, old, ref, torch.zeros_like(advantages), mask)[0].backward()
        towards = torch.sign(ref - now.detach())*mask
        assert torch.equal(-torch.sign(now.grad), towards)

    def test_verl_s_own_loss_says_the_same(self):
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu
        from verl.workers.config import FSDPActorConfig
        from verl.workers.utils.losses import ppo_loss

        now, old, ref, advantages, mask = (one.float() for one in tensors(draw(7)))
        config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_kl_loss=True, kl_loss_coef=0.07)
        prompt = torch.ones(6, 2)
        data = TensorDict({"prompts": prompt, "responses": torch.zeros(6, 9), "attention_mask": torch.cat([prompt, mask], 1).long(), "response_mask": mask.bool(),
                           "old_log_probs": old, "ref_log_prob": ref, "advantages": advantages}, batch_size=6)
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=6, max_response_len=9)
        rows = [torch.cat([torch.zeros(1), row[keep.bool()], torch.zeros(1)]) for row, keep in zip(now, mask, strict=True)]  # shifted by one token
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        loss, metrics = ppo_loss(config, {"log_probs": nested}, data)
        ours, parts = shpo_loss(now, old, ref, advantages, mask, kl_coef=0.07)
        assert loss.item() == pytest.approx(ours.item(), rel=1e-5)
        assert metrics["kl_loss"].values[0] == pytest.approx(parts.kl, rel=1e-5)

    @pytest.mark.parametrize("wrong", [{"clip": 0.0}, {"clip": float("nan")}, {"loss_aggregation": "sum"}])
    def test_a_wrong_setting_is_refused(self, wrong):
        with pytest.raises(ValueError, match="clip|sum"):
            shpo_loss(*tensors(draw(8)), **wrong)


def test_the_import_is_light_and_that_of_verl_starts_and_fetches_nothing():
    program = """
import socket, sys
def refuse(self, address): raise AssertionError(f"a connection to {address}")
socket.socket.connect = socket.socket.connect_ex = refuse
import memloc.advantages
assert not {"torch", "verl", "ray"} & set(sys.modules), "heavy"
memloc.advantages.register_shpo()
import ray
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
assert get_adv_estimator_fn("shpo") is memloc.advantages.shpo_advantage and not ray.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
