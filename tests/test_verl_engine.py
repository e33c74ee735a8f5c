"""verl's settings, data, reward and registry; the reference through the stages; the stage loop on recorded rollouts."""

import contextlib
import io
import json
import os
import random
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from memloc.artifacts import read_json
from memloc.chat import Sampling
from memloc.hints import HintBook
from memloc.llm import LocalModel
from memloc.rewards import RewardConfig, compute_score
from memloc.toy import ToyTask, toy_samples, write_toy
from memloc.verl_engine import (
    MANAGER,
    TERMS,
    VerlConfig,
    VerlPaths,
    ask_policy,
    check_lengths,
    cluster_commands,
    compose_config,
    contrasts,
    gather_samples,
    keep_samples,
    kept_samples,
    last_groups,
    method_settings,
    offer_hint,
    override,
    plan_lines,
    prepare_stage,
    prompt_lengths,
    reached,
    read_dumps,
    read_metrics,
    reflections,
    rehearse,
    run_command,
    run_stages,
    size_settings,
    stage_command,
    stage_settings,
    validate,
    verl_profile,
    verl_rows,
    write_parquet,
)

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent/"shared"/"data"
SMALL = VerlConfig(steps_per_stage=3, batch_size=4, mini_batch_size=4, micro_batch_size=2, gpus_per_node=2, max_prompt_length=256,
                   max_response_length=64, save_every=1, more=("data.dataloader_num_workers=0",))
SAMPLES = toy_samples(ToyTask(negatives=0.0), 12, seed=3)
HINT = "Compare every part with the name before you choose."
WRONG = "<reason>nothing fits.</reason><id>none</id><answer>sun</answer>"


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("policy")/"sft")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    "What `datasets` unpacks goes into a folder of the tests."
    import datasets

    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, str(tmp_path_factory.mktemp("datasets"))
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture
def paths(tmp_path, sft):
    return VerlPaths(tmp_path/"run", sft)


@pytest.fixture
def written(paths):
    "Paths with the prompts of all three stages."
    for stage in (1, 2, 3):
        write_parquet(SAMPLES, {SAMPLES[1].sample_id: HINT} if stage > 1 else {}, paths.parquet(stage))
    write_parquet(SAMPLES[:4], {}, paths.validation, split="validation")
    return paths


@pytest.fixture
def trusted(monkeypatch):
    "Settings are composed and validated in other tests; the loop alone needs neither."
    monkeypatch.setattr("memloc.verl_engine.compose_config", lambda *_: None)
    monkeypatch.setattr("memloc.verl_engine.validate", lambda *_: None)


def quiet(function, *args, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args, **kwargs)


class TestSettings:
    @pytest.mark.parametrize("changes, words", [
        ({"group_size": 1}, "lone reply"), ({"gpus_per_node": 7}, "400 replies"), ({"mini_batch_size": 30}, "multiple of mini_batch_size"),
        ({"tensor_parallel": 3}, "tensor_parallel"), ({"rollout_engine": "hf"}, "'hf'"), ({"eta_homo": 1.5}, "eta_homo"), ({"nodes": 0}, "nodes"),
        ({"micro_batch_size": 7}, "micro_batch_size"), ({"hint_place": "before"}, "'before'"), ({"save_every": 0}, "save_every"),
    ])
    def test_what_cannot_be_is_refused_with_its_value(self, changes, words):
        with pytest.raises(ValueError, match=words):
            VerlConfig(**changes)

    def test_the_defaults_are_the_paper_s(self):
        config = VerlConfig()
        assert (config.n_stages, config.steps_per_stage, config.group_size, config.learning_rate, config.kl_coef) == (3, 60, 4, 1e-6, 0.01)
        assert config.batch_size*config.steps_per_stage == 6000


class TestConfig:
    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("config", [SMALL, replace(SMALL, nodes=2, micro_batch_size=1, loss_aggregation="seq-mean-token-mean", test_every=2)])
    def test_every_stage_composes_validates_and_says_what_was_meant(self, written, stage, config):
        from omegaconf import OmegaConf

        composed = compose_config(config, stage, written)
        validate(composed, written)
        settings = method_settings(config) | size_settings(config) | stage_settings(config, stage, written)
        for key, value in settings.items():
            found = OmegaConf.select(composed, key.removeprefix("+"))
            found = list(found) if isinstance(value, list) else found
            assert found == ([str(one) for one in value] if isinstance(value, list) else str(value) if isinstance(value, Path) else value), key

    def test_the_default_of_eight_cards_is_fine(self, written):
        config = replace(VerlConfig(), max_prompt_length=256)
        write_parquet(toy_samples(ToyTask(), 100, seed=5), {}, written.parquet(1))
        validate(compose_config(config, 1, written), written)

    def test_the_numbers_of_the_method(self, written):
        composed = compose_config(SMALL, 3, written)
        policy = composed.actor_rollout_ref
        assert (composed.algorithm.adv_estimator, policy.rollout.n, policy.actor.optim.lr) == ("shpo", 4, 1e-6)
        assert (policy.actor.use_kl_loss, policy.actor.kl_loss_type, policy.actor.kl_loss_coef) == (True, "low_var_kl", 0.01)
        assert (policy.actor.policy_loss.loss_mode, policy.actor.clip_ratio_low, policy.actor.clip_ratio_high) == ("vanilla", 0.2, 0.2)
        assert composed.trainer.total_training_steps == 9 and policy.rollout.name == "vllm" and not composed.algorithm.use_kl_in_reward

    def test_each_section_becomes_what_verl_s_workers_make_of_it(self, written, sft):
        from omegaconf import OmegaConf
        from verl.utils.config import omega_conf_to_dataclass

        composed = compose_config(SMALL, 2, written)
        OmegaConf.resolve(composed)
        policy = {name: omega_conf_to_dataclass(composed.actor_rollout_ref[name]) for name in ("model", "actor", "rollout")}
        assert (policy["model"].path, policy["model"].lora_rank) == (str(sft), 0)
        assert policy["rollout"].agent.agent_loop_manager_class == MANAGER and policy["rollout"].n == 4
        assert policy["actor"].kl_loss_coef == 0.01 and policy["actor"].checkpoint.load_contents == ["model", "optimizer", "extra"]
        assert (policy["actor"].optim.lr, policy["actor"].optim.lr_scheduler_type, policy["actor"].ppo_epochs) == (1e-6, "constant", 1)

    @pytest.mark.parametrize("name", ["o'neil", "a b, c=1", "größe {x}", "100%", "null", "back\\slash", "7", "a$b", "end\\", "q\\'s"])
    def test_a_folder_may_have_an_unusual_name(self, tmp_path, name):
        paths = VerlPaths(tmp_path/name, write_toy(tmp_path/name/"sft"))
        write_parquet(SAMPLES, {}, paths.parquet(1))
        write_parquet(SAMPLES[:4], {}, paths.validation)
        composed = compose_config(SMALL, 1, paths)
        validate(composed, paths)
        assert composed.actor_rollout_ref.model.path == str(tmp_path/name/"sft")
        assert override("a", name).startswith("a=")

    @pytest.mark.parametrize("name", ["a[1]", "a*", "what?", "a::b"])
    def test_a_name_that_verl_reads_as_a_pattern_is_refused(self, tmp_path, sft, name):
        paths = VerlPaths(tmp_path/name, sft)
        write_parquet(SAMPLES, {}, paths.parquet(1))
        write_parquet(SAMPLES[:4], {}, paths.validation)
        with pytest.raises(ValueError, match="as a pattern"):
            validate(compose_config(SMALL, 1, paths), paths)

    @pytest.mark.parametrize("change, words", [
        ("reward.custom_reward_function.path=null", "reward.custom_reward_function.path"),
        ("reward.custom_reward_function.name=score_reply", "reward.custom_reward_function.path"),
        ("reward.reward_model.enable=True", "reward.reward_model.enable"),
        ("algorithm.adv_estimator=shpoo", "no such estimator"),
        ("~actor_rollout_ref.rollout.agent.agent_loop_manager_class", "agent_loop_manager_class"),
        ("~algorithm.eta_homo", "eta_homo"),
        ("actor_rollout_ref.actor.use_kl_loss=False", "not charged"),
        ("actor_rollout_ref.actor.kl_loss_type=kl", "not charged"),
        ("algorithm.use_kl_in_reward=True", "twice"),
        ("actor_rollout_ref.model.path=/elsewhere", "after fine-tuning"),
        ("trainer.resume_mode=disable", "forget"),
        ("trainer.save_freq=-1", "no next stage"),
        ("data.train_files=[/nowhere.parquet]", "no file /nowhere.parquet"),
        ("data.train_batch_size=16", "12 samples do not fill"),
    ])
    def test_what_would_show_late_or_never_is_refused(self, written, change, words):
        composed = compose_config(replace(SMALL, more=(change,)), 1, written)
        with pytest.raises(ValueError, match=words):
            validate(composed, written)

    def test_verl_s_own_checks_are_made(self, written):
        with pytest.raises(AssertionError, match="divisible"):
            validate(compose_config(replace(SMALL, more=("trainer.n_gpus_per_node=3",)), 1, written), written)

    @pytest.mark.parametrize("change", ["actor_rollout_ref.actor.kl_los_coef=1", "algorithm.eta=1", "reward.custom_reward_function.pth=x"])
    def test_an_unknown_key_is_refused(self, written, change):
        from hydra.errors import ConfigCompositionException

        with pytest.raises(ConfigCompositionException):
            compose_config(replace(SMALL, more=(change,)), 1, written)

    def test_the_metrics_file_reaches_the_processes_as_verl_merges_it(self, written):
        from omegaconf import OmegaConf
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        composed = compose_config(SMALL, 1, written)
        merged = OmegaConf.merge(get_ppo_ray_runtime_env(), composed.ray_kwargs.ray_init.runtime_env)
        assert merged.env_vars.VERL_FILE_LOGGER_PATH == str(written.metrics(1)/"1.jsonl") and "NCCL_DEBUG" in merged.env_vars


class TestCommands:
    def test_a_dry_run_is_shell_that_says_the_same(self, paths):
        whole = ["memloc", "shpo", "--run", "a b"]
        lines = [shlex.split(line) for line in plan_lines(SMALL, paths, whole) if not line.startswith("#")]
        assert lines[1:6:2] == [stage_command(SMALL, stage, paths) for stage in (1, 2, 3)]
        assert lines[0:6:2] == [[*whole, "--prepare", str(stage)] for stage in (1, 2, 3)] and lines[6:] == [whole]

    def test_several_machines_join_through_ray(self, paths):
        config = replace(SMALL, nodes=3, micro_batch_size=1, batch_size=6, mini_batch_size=6)
        head, *others = cluster_commands(config, "10.0.0.1")
        assert "--head" in head and len(others) == 2 and all("--address=10.0.0.1:6379" in other for other in others)
        assert "+ray_kwargs.ray_init.address=auto" in stage_command(config, 1, paths)
        assert cluster_commands(SMALL) == [] and not any("address" in part for part in stage_command(SMALL, 1, paths))

    @pytest.mark.slow
    def test_verl_s_own_command_reads_what_was_composed(self, written):
        import yaml
        from omegaconf import OmegaConf
        from verl.experimental.reward_loop import migrate_legacy_reward_impl

        printed = subprocess.run([*stage_command(SMALL, 2, written), "--cfg", "job"], check=True, capture_output=True, text=True,
                                 env=os.environ | {"PYTHONPATH": str(ROOT)}).stdout
        theirs = migrate_legacy_reward_impl(OmegaConf.create(yaml.safe_load(printed)))
        assert OmegaConf.to_container(theirs) == OmegaConf.to_container(compose_config(SMALL, 2, written))


class TestParquet:
    def test_verl_s_dataset_class_loads_it(self, written, sft):
        from verl.trainer.main_ppo import create_rl_dataset
        from verl.utils import hf_tokenizer
        from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
        from verl.utils.tokenizer import normalize_token_ids

        composed, tokenizer = compose_config(SMALL, 2, written), hf_tokenizer(str(sft))
        dataset = quiet(create_rl_dataset, composed.data.train_files, composed.data, tokenizer, None)
        assert type(dataset) is RLHFDataset and len(dataset) == len(SAMPLES)
        reader, rows = LocalModel(str(sft)), verl_rows(SAMPLES, {SAMPLES[1].sample_id: HINT})
        for i, (sample, row) in enumerate(zip(SAMPLES, rows, strict=True)):
            item = dataset[i]
            assert item["raw_prompt"] == row["prompt"] and item["index"] == i and item["extra_info"] == row["extra_info"]
            assert item["reward_model"] == row["reward_model"] and item["data_source"] == sample.source
            tokens = normalize_token_ids(tokenizer.apply_chat_template(item["raw_prompt"], add_generation_prompt=True, tokenize=True))
            assert tokens == reader.encode(row["prompt"]) and len(tokens) == prompt_lengths([row["prompt"]], sft)[0]
        batch = collate_fn([dataset[i] for i in range(4)])
        assert [info["sample_id"] for info in batch["extra_info"]] == [sample.sample_id for sample in SAMPLES[:4]]

    def test_a_hint_changes_its_row_and_no_other(self):
        plain, hinted = verl_rows(SAMPLES, {}), verl_rows(SAMPLES, {SAMPLES[2].sample_id: HINT})
        assert [a == b for a, b in zip(plain, hinted, strict=True)] == [i != 2 for i in range(len(SAMPLES))]
        assert hinted[2]["prompt"][0]["content"].endswith(f"\nHint: {HINT}") and hinted[2]["prompt"][1:] == plain[2]["prompt"][1:]

    def test_the_evidence_is_nowhere_but_in_the_ground_truth(self):
        for sample, row in zip(SAMPLES, verl_rows(SAMPLES, {}), strict=True):
            told = json.loads(row["reward_model"]["ground_truth"])
            assert told == {"gold": list(sample.gold), "answer": sample.answer, "n_segments": len(sample.segments), "sample_id": sample.sample_id}
            assert "gold" not in json.dumps([row["prompt"], row["extra_info"]]) and sample.reason not in json.dumps(row["prompt"])

    def test_the_reward_reads_it_and_heeds_the_mode(self, paths):
        for mode, worth in (("memloc", 0.0), ("released", None)):
            (row,) = write_parquet(SAMPLES[:1], {}, paths.parquet(1), mode).to_dicts()
            truth, told = row["reward_model"]["ground_truth"], row["extra_info"]
            assert compute_score("toy", SAMPLES[0].target, truth, told)["score"] == pytest.approx(1.0)
            got = compute_score("toy", "no tags at all", truth, told)["score"]
            assert got == worth if worth is not None else told["mode"] == mode

    def test_what_cannot_be_told_apart_or_read_is_refused(self, paths):
        with pytest.raises(ValueError, match="given twice"):
            write_parquet([SAMPLES[0], SAMPLES[0]], {}, paths.parquet(1))
        with pytest.raises(ValueError, match="no samples"):
            write_parquet([], {}, paths.parquet(1))
        with pytest.raises(ValueError, match="mode"):
            write_parquet(SAMPLES, {}, paths.parquet(1), "memlok")
        assert not paths.parquet(1).exists()

    def test_a_prompt_that_verl_would_cut_is_refused_by_name(self, sft):
        rows = verl_rows(SAMPLES, {})
        longest = check_lengths(rows, sft, 256)
        assert check_lengths(rows, sft, longest) == longest
        with pytest.raises(ValueError, match=f"with {longest} tokens; raise max_prompt_length to {longest}"):
            check_lengths(rows, sft, longest - 1)

    def test_a_dataloader_stopped_in_the_middle_goes_on_with_the_next_stage_s_prompts(self, written, sft):
        from torchdata.stateful_dataloader import StatefulDataLoader
        from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
        from verl.utils import hf_tokenizer
        from verl.utils.dataset.rl_dataset import collate_fn

        def loader(stage):
            data = compose_config(SMALL, stage, written).data
            dataset = quiet(create_rl_dataset, data.train_files, data, hf_tokenizer(str(sft)), None)
            return StatefulDataLoader(dataset, batch_size=4, drop_last=True, collate_fn=collate_fn, sampler=create_rl_sampler(data, dataset))

        def ids(batch): return [info["sample_id"] for info in batch["extra_info"]]

        whole = [ids(batch) for batch in loader(1)]
        first = loader(1)
        got = [ids(next(iterator := iter(first)))]
        second = loader(2)
        second.load_state_dict(first.state_dict())
        rest = list(second)
        assert iterator is not None and got + [ids(batch) for batch in rest] == whole
        told = {info["sample_id"]: info["hinted"] for batch in rest for info in batch["extra_info"]}
        assert told.get(SAMPLES[1].sample_id, True) and not any(told[other] for other in set(told) - {SAMPLES[1].sample_id})


def random_replies(n, seed=0):
    "Right replies, broken ones, and noise, in the toy's words."
    rng = random.Random(seed)
    pieces = ["<reason>", "</reason>", "<id>", "</id>", "<answer>", "</answer>", "none", ",", ".", "unknown", "tea", "ana", "[1]", *map(str, range(1, 8))]
    found = []
    for _ in range(n):
        sample, kind = rng.choice(SAMPLES), rng.random()
        words = sample.target.replace(">", "> ").replace("<", " <").split()
        if kind < 0.3:
            words[rng.randrange(len(words))] = rng.choice(pieces)
        elif kind < 0.5:
            words = words[:rng.randrange(len(words) + 1)]
        elif kind < 0.6:
            rng.shuffle(words)
        elif kind < 0.8:
            words = rng.choices(pieces, k=rng.randrange(1, 30))
        found.append((sample, " ".join(words)))
    return found


class TestReward:
    @pytest.mark.parametrize("config", [SMALL, replace(SMALL, reward=RewardConfig(alpha=0.2, evidence="recall", gate=False))])
    def test_through_verl_s_manager_it_is_ours_on_a_thousand_replies(self, written, sft, config):
        import asyncio

        from verl import DataProto
        from verl.trainer.ppo.reward import load_reward_manager
        from verl.utils import hf_tokenizer

        asyncio.set_event_loop(asyncio.new_event_loop())
        tokenizer = hf_tokenizer(str(sft))
        manager = load_reward_manager(compose_config(config, 1, written), tokenizer)
        rows, seen = {row["extra_info"]["sample_id"]: row for row in verl_rows(SAMPLES, {}, config.reward.mode)}, set()
        fields = {name: value for name, value in asdict(config.reward).items() if name != "mode"}
        for sample, text in random_replies(1000):
            row = rows[sample.sample_id]
            tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            data = DataProto.from_dict({"responses": torch.tensor([tokens]), "attention_mask": torch.ones(1, 2 + len(tokens), dtype=torch.long)},
                                       {name: np.array([dict(row[name]) if isinstance(row[name], dict) else row[name]], dtype=object)
                                        for name in ("data_source", "reward_model", "extra_info")})
            found = manager.loop.run_until_complete(manager.run_single(data))
            ours = compute_score(sample.source, tokenizer.decode(tokens, skip_special_tokens=True), row["reward_model"]["ground_truth"],
                                 {"mode": config.reward.mode}, **fields)
            assert found == {"reward_score": ours["score"], "reward_extra_info": ours}
            seen.add(round(ours["score"], 3))
        assert len(seen) > 3 and {0.0, 1.0} <= seen
        manager.loop.close()

    def test_settings_of_the_reward_reach_it(self, written):
        from verl.trainer.ppo.reward import get_custom_reward_fn

        sample, truth = SAMPLES[0], verl_rows(SAMPLES, {})[0]["reward_model"]["ground_truth"]
        text = sample.target.replace(f"<answer>{sample.answer}", "<answer>sun")
        for alpha in (0.3, 0.1):
            config = replace(SMALL, reward=RewardConfig(alpha=alpha))
            found = get_custom_reward_fn(compose_config(config, 1, written))(data_source="toy", solution_str=text, ground_truth=truth,
                                                                            extra_info={"mode": "memloc"})
            assert found["score"] == pytest.approx(1 - alpha)

    def test_verl_can_average_and_dump_what_it_returns(self):
        from verl.trainer.ppo.metric_utils import process_validation_metrics

        scores = [compute_score("toy", text, row["reward_model"]["ground_truth"]) for row in verl_rows(SAMPLES, {}) for text in ("x", WRONG)]
        told = {name: [score[name] for score in scores] for name in scores[0]}
        process_validation_metrics(["toy"]*len(scores), [str(i//2) for i in range(len(scores))], {"reward": told["score"], **told})
        assert all(type(value) is float for score in scores for value in score.values()) and set(TERMS) < set(told)


class TestInVerlsProcess:
    def test_importing_the_manager_registers_the_estimator(self):
        "As verl's TaskRunner does it: by the class's full name, in a process that knows nothing else of ours."
        program = f"""
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.utils.import_utils import load_class_from_fqn
assert "shpo" not in ADV_ESTIMATOR_REGISTRY
manager = load_class_from_fqn({MANAGER!r}, "AgentLoopManager")
from verl.experimental.agent_loop import AgentLoopManager
assert issubclass(manager, AgentLoopManager) and "shpo" in ADV_ESTIMATOR_REGISTRY
import ray
assert not ray.is_initialized()
"""
        subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    def test_the_trainer_s_steps_carry_correctness_to_the_estimator(self):
        "Repeat, join, reorder: what verl does between the manager and the advantages."
        from verl import DataProto
        from verl.trainer.ppo.ray_trainer import compute_advantage, extract_reward

        from memloc.advantages import group_advantages
        from memloc.shpo_verl import carry_correct

        rng = np.random.default_rng(0)
        uid = np.array(["a", "b", "c"], dtype=object)
        batch = DataProto.from_dict({"dummy_tensor": torch.zeros(3, 1)}, {"uid": uid}).repeat(repeat_times=4, interleave=True)
        rewards, correct = rng.random(12).astype(np.float32), np.array([1.0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0])
        scores = torch.zeros(12, 3)
        scores[:, 1] = torch.tensor(rewards)
        made = DataProto.from_dict({"rm_scores": scores, "response_mask": torch.tensor([[1, 1, 0]]*12)}, {"correct": correct})
        made.meta_info["reward_extra_keys"] = ["correct"]
        batch = batch.union(carry_correct(made))
        order = torch.tensor(rng.permutation(12))
        batch.reorder(order)
        tensor, told = extract_reward(batch)
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = tensor
        batch.non_tensor_batch.update({name: np.array(value) for name, value in told.items()})
        found = compute_advantage(batch, "shpo", config={"eta_homo": 0.5, "norm_adv_by_std_in_grpo": True}).batch["advantages"][:, 0]
        assert found.numpy() == pytest.approx(group_advantages(rewards, correct, np.repeat(uid, 4), 0.5)[order.numpy()], abs=1e-6)


class TestReference:
    def test_every_stage_loads_the_policy_after_fine_tuning_and_resumes_in_one_folder(self, written, sft):
        found = [compose_config(SMALL, stage, written) for stage in (1, 2, 3)]
        assert {composed.actor_rollout_ref.model.path for composed in found} == {str(sft)}
        assert {(composed.trainer.default_local_dir, composed.trainer.resume_mode) for composed in found} == {(str(written.checkpoints), "auto")}
        assert [composed.trainer.total_training_steps for composed in found] == [3, 6, 9]
        assert {"model", "optimizer", "extra", "hf_model"} == set(found[0].actor_rollout_ref.actor.checkpoint.save_contents)

    def test_the_reference_has_no_path_of_its_own(self, written):
        from hydra.errors import ConfigCompositionException

        with pytest.raises(ConfigCompositionException, match="actor_rollout_ref.ref.model.path"):
            compose_config(replace(SMALL, more=("actor_rollout_ref.ref.model.path=/sft",)), 2, written)

    def test_a_checkpoint_is_loaded_into_the_actor_alone(self):
        from verl.workers.engine_workers import ActorRolloutRefWorker

        class Part:
            def __init__(self): self.loaded = []
            def load_checkpoint(self, path, *_): self.loaded.append(path)

        worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
        worker.role, worker.actor, worker.ref = "actor_rollout_ref", Part(), Part()
        worker.load_checkpoint("step_60/actor")
        assert (worker.actor.loaded, worker.ref.loaded) == (["step_60/actor"], [])

    @pytest.mark.slow
    def test_on_a_processor_verl_trains_two_stages_and_measures_against_the_policy_after_fine_tuning(self, tmp_path):
        from memloc.advantages import group_advantages, shpo_loss

        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path/"cache"), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, str(ROOT/"tests"/"verl_on_cpu.py"), str(tmp_path), str(tmp_path/"said.json")], check=True,
                       env=environment, capture_output=True, text=True)
        said = json.loads((tmp_path/"said.json").read_text())
        first, second = ({name: np.array(values) for name, values in said["stages"][stage].items()} for stage in "12")
        hinted = np.arange(16)//4 == 1  # in stage 2 the second prompt shows a hint
        assert (first["ref"] == second["ref"])[~hinted].all(), "the reference of stage 2 is that of stage 1"
        assert (first["ref"] != second["ref"])[hinted].any(1).all(), "the hint reaches verl's prompt"
        assert (first["fresh"] == first["ref"]).all() and (second["fresh"] == second["ref"]).all(), "both are the policy after fine-tuning"
        assert (second["start"] == first["end"])[~hinted].all() and not (second["start"] == second["ref"])[~hinted].all(), "the actor goes on where it was"
        distances = [step["kl_loss"] for step in said["steps"]]
        assert distances[0] == 0 and distances == sorted(distances), "the distance is not reset between the stages"
        right = (first["correct"] == 1) & (np.arange(16) >= 4)  # in mixed groups
        for stage in (first, second):
            gain = stage["end"].sum(1) - stage["start"].sum(1)
            assert gain[right].min() > 0 > gain[stage["correct"] == 0].max()
        for step in said["steps"]:
            old, ref, advantages, mask = (torch.tensor(step[name]) for name in ("old_log_probs", "ref_log_prob", "advantages", "response_mask"))
            _, parts = shpo_loss(old, old, ref, advantages, mask)
            assert (parts.policy_loss, parts.kl) == pytest.approx((step["actor/pg_loss"], step["kl_loss"]), rel=1e-3, abs=1e-4)
            ours = group_advantages([1.0]*4 + [1.0, 0.1, 0.1, 0.1]*3, step["correct"], np.repeat(np.arange(4), 4), 0.25)
            assert advantages[:, 0].numpy() == pytest.approx(ours, abs=1e-4)
        assert LocalModel(said["policy"]).chat([SAMPLES[0].messages], Sampling(max_tokens=4))[0] is not None


class Recorded:
    "A trainer that writes what verl would have written: dumps by verl's own function, progress, and a policy folder."

    def __init__(self, samples, right=lambda index, step: [index % 3 == 0 or i == 0 for i in range(4)], stop_after=None):
        self.samples, self.right, self.stop_after, self.commands = {sample.sample_id: sample for sample in samples}, right, stop_after, []

    def __call__(self, command):
        self.commands.append(command)
        said = {part.split("=", 1)[0].lstrip("+"): part.split("=", 1)[1].strip("'[]") for part in command[3:]}
        checkpoints, last = Path(said["trainer.default_local_dir"]), int(said["trainer.total_training_steps"])
        tracker, rows = checkpoints/"latest_checkpointed_iteration.txt", pl.read_parquet(said["data.train_files"]).to_dicts()
        done = int(tracker.read_text()) if tracker.exists() else 0
        metrics = Path(said["ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"])
        checkpoints.mkdir(parents=True, exist_ok=True)
        for step in range(done + 1, last + 1):
            self.dump(Path(said["trainer.rollout_data_dir"]), step, [rows[(4*(step - 1) + i) % len(rows)] for i in range(4)])
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step, "data": {"actor/kl_loss": step/100, "critic/score/mean": 0.5}}) + "\n")
            tracker.write_text(str(step))
            if step == self.stop_after:
                self.stop_after = None
                raise RuntimeError("killed")
        write_toy(checkpoints/f"global_step_{last}"/"actor"/"huggingface")

    def dump(self, folder, step, rows):
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        drawn = [(row, self.samples[row["extra_info"]["sample_id"]].target if right else WRONG)
                 for row in rows for right in self.right(row["extra_info"]["index"], step)]
        truths = [row["reward_model"]["ground_truth"] for row, _ in drawn]
        scores = [compute_score(row["data_source"], reply, truth, row["extra_info"]) for (row, reply), truth in zip(drawn, truths, strict=True)]
        extras = {name: [score[name] for score in scores] for name in scores[0]} | {"request_id": [str(i) for i in range(len(drawn))]}
        quiet(RayPPOTrainer._write_generations, [row["prompt"][-1]["content"] for row, _ in drawn], [reply for _, reply in drawn], truths,
              [score["score"] for score in scores], extras, str(folder), step)


def answers(folder, prompts):
    return [HINT if i % 2 == 0 else "Look at part 3." for i in range(len(prompts))]


def left_behind(paths):
    "Everything a training leaves that a next stage reads."
    tables = {f"prompts {stage}": pl.read_parquet(paths.parquet(stage)).to_dicts() for stage in (1, 2, 3)}
    return tables | {f"hints {stage}": read_json(paths.stage(stage)/"hints.json") for stage in (1, 2, 3)}


def prompts_of(paths, stage):
    return {row["extra_info"]["sample_id"]: row["prompt"] for row in pl.read_parquet(paths.parquet(stage)).to_dicts()}


class TestDumps:
    @pytest.fixture
    def dumped(self, paths):
        recorded = Recorded(SAMPLES)
        for step in (1, 2, 3):
            recorded.dump(paths.rollouts(1), step, verl_rows(SAMPLES, {})[4*step - 4:4*step])
        return paths.rollouts(1)

    def test_all_is_read_in_order(self, dumped):
        found = read_dumps(dumped, [1, 2, 3])
        assert found.height == 48 and found["step"].to_list() == sorted(found["step"].to_list())
        assert found["sample_id"].unique(maintain_order=True).to_list() == [sample.sample_id for sample in SAMPLES]
        assert found["correct"].dtype == pl.Boolean and set(found["reward"]) <= {1.0, 0.1}

    def test_steps_are_numbers_and_not_words(self, dumped):
        (dumped/"10.jsonl").write_bytes((dumped/"3.jsonl").read_bytes())
        assert read_dumps(dumped)["sample_id"].to_list()[-16:] == read_dumps(dumped, [3])["sample_id"].to_list()

    def test_a_missing_step_is_missed_unless_a_breakdown_explains_it(self, dumped):
        (dumped/"2.jsonl").unlink()
        with pytest.raises(FileNotFoundError, match="no rollouts of step 2"):
            read_dumps(dumped, [1, 2, 3])
        assert read_dumps(dumped, [1, 2, 3], spare=1).height == 32

    @pytest.mark.parametrize("line", ['{"input": "a", "outp', "[]", '{"gts": "{}", "step": 1, "output": "x", "score": 1}', '{"gts": null}'])
    def test_a_damaged_line_is_named(self, dumped, line):
        path = dumped/"2.jsonl"
        path.write_text("\n".join([*path.read_text().splitlines()[:4], line]))
        with pytest.raises(ValueError, match=r"2\.jsonl, line 5"):
            read_dumps(dumped)

    def test_a_line_separator_in_a_reply_ends_no_line(self, dumped):
        path = dumped/"1.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[0]["output"] = "a\u2028b\x85c"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        assert read_dumps(dumped)["reply"][0] == "a\u2028b\x85c"

    def test_the_last_group_counts_and_only_mixed_queries_have_a_contrast(self, dumped):
        recorded = Recorded(SAMPLES, right=lambda index, step: [True]*4)
        recorded.dump(dumped, 4, verl_rows(SAMPLES, {})[:2])
        found = read_dumps(dumped)
        assert {len(group) for group in last_groups(found).values()} == {4}
        assert set(contrasts(found)) == {sample.sample_id for i, sample in enumerate(SAMPLES) if i % 3 and i > 1}
        assert contrasts(found)[SAMPLES[2].sample_id] == (SAMPLES[2].target, WRONG)

    def test_the_nearest_miss_stands_beside_the_right_one(self, paths):
        sample, row = SAMPLES[4], verl_rows(SAMPLES, {})[4]
        near = sample.target.replace(f"<id>{sample.gold[0]}", f"<id>{sample.gold[0]}, {next(i for i in range(1, 7) if i not in sample.gold)}")
        recorded = Recorded(SAMPLES)
        recorded.dump(paths.rollouts(1), 1, [row])
        lines = [json.loads(line) for line in (paths.rollouts(1)/"1.jsonl").read_text().splitlines()]
        lines[2] |= {"output": near} | compute_score("toy", near, row["reward_model"]["ground_truth"])
        (paths.rollouts(1)/"1.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        assert contrasts(read_dumps(paths.rollouts(1)))[sample.sample_id] == (sample.target, near)


class TestStages:
    def test_set_size_is_equal_and_homogeneous_queries_keep_their_prompts(self, paths):
        reports = run_stages(SMALL, SAMPLES, paths, reflect=answers, train=Recorded(SAMPLES))
        assert reports["samples"].to_list() == [len(SAMPLES)]*3 and reports["mixed"].to_list() == [8]*3
        stages = [prompts_of(paths, stage) for stage in (1, 2, 3)]
        for prompts in stages:
            assert list(prompts) == [sample.sample_id for sample in SAMPLES]
        accepted = set(read_json(paths.stage(1)/"hints.json")["hints"])
        for i, sample in enumerate(SAMPLES):
            kept = stages[1][sample.sample_id] == stages[0][sample.sample_id] == sample.messages
            assert kept == (sample.sample_id not in accepted) and (i % 3 > 0 or kept)
        assert reports["hinted"].to_list() == [0, len(accepted), len(accepted)] and 0 < len(accepted) < 8
        assert reports["accepted"][0] + reports["rejected"][0] == 8 and read_json(paths.stage(1)/"hints.json")["rejected"] == {"number": 4}

    def test_a_query_that_is_homogeneous_later_keeps_the_hint_it_has(self, paths, trusted):
        recorded = Recorded(SAMPLES, right=lambda index, step: [step > 3 or i == 0 for i in range(4)])
        run_stages(SMALL, SAMPLES, paths, reflect=answers, train=recorded)
        assert prompts_of(paths, 2) == prompts_of(paths, 3) != prompts_of(paths, 1)

    @pytest.mark.parametrize("place, tail", [("replace", "\nHint: Read every part to the end."), ("append", f"\nHint: {HINT} Read every part to the end.")])
    def test_a_second_hint_replaces_the_first_or_joins_it(self, paths, place, tail, trusted):
        def twice(folder, prompts): return ["Read every part to the end." if "step_6" in str(folder) else HINT]*len(prompts)

        run_stages(replace(SMALL, hint_place=place), SAMPLES, paths, reflect=twice, train=Recorded(SAMPLES))
        assert prompts_of(paths, 3)[SAMPLES[1].sample_id][0]["content"].endswith(tail)
        assert prompts_of(paths, 3)[SAMPLES[1].sample_id][0]["content"].count("Hint:") == 1

    def test_steps_count_on_and_the_policy_of_each_stage_writes_its_hints(self, paths, trusted):
        asked, recorded = [], Recorded(SAMPLES)
        run_stages(SMALL, SAMPLES, paths, reflect=lambda folder, prompts: asked.append(folder) or answers(folder, prompts), train=recorded)
        assert asked == [paths.policy(step) for step in (3, 6, 9)] and reached(paths) == 9 and len(recorded.commands) == 3
        assert sorted(int(path.stem) for path in paths.rollouts(2).iterdir()) == [4, 5, 6]

    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory, sft):
        "A training that nothing broke off."
        paths = VerlPaths(tmp_path_factory.mktemp("whole"), sft)
        run_stages(SMALL, SAMPLES, paths, reflect=answers, train=Recorded(SAMPLES))
        return paths

    @pytest.mark.parametrize("step", [1, 3, 5, 6, 9])
    def test_killed_in_any_step_it_ends_as_if_nothing_had_happened(self, whole, tmp_path, sft, step, trusted):
        broken = VerlPaths(tmp_path/"broken", sft)
        recorded = Recorded(SAMPLES, stop_after=step)
        with pytest.raises(RuntimeError, match="killed"):
            run_stages(SMALL, SAMPLES, broken, reflect=answers, train=recorded)
        if step % 3 == 0:  # killed after the last step's checkpoint: the folder of the policy is there in a real training
            write_toy(broken.policy(step))
        run_stages(SMALL, SAMPLES, broken, reflect=answers, train=recorded)
        assert left_behind(whole) == left_behind(broken)

    def test_killed_while_hints_are_written_it_asks_again(self, whole, tmp_path, sft, trusted):
        broken, calls = VerlPaths(tmp_path/"broken", sft), []

        def failing(folder, prompts):
            calls.append(folder)
            if len(calls) == 2:
                raise RuntimeError("killed")
            return answers(folder, prompts)

        recorded = Recorded(SAMPLES)
        with pytest.raises(RuntimeError, match="killed"):
            run_stages(SMALL, SAMPLES, broken, reflect=failing, train=recorded)
        run_stages(SMALL, SAMPLES, broken, reflect=failing, train=recorded)
        assert left_behind(whole) == left_behind(broken) and len(recorded.commands) == 3

    def test_a_dump_lost_between_checkpoint_and_writing_costs_one_step(self, paths, trusted):
        recorded = Recorded(SAMPLES, stop_after=2)
        with pytest.raises(RuntimeError, match="killed"):
            run_stages(SMALL, SAMPLES, paths, reflect=answers, train=recorded)
        (paths.rollouts(1)/"2.jsonl").unlink()
        reports = run_stages(SMALL, SAMPLES, paths, reflect=answers, train=recorded)
        assert reports["steps"].to_list() == [2, 3, 3] and reports["samples"].to_list() == [12]*3

    def test_a_finished_training_is_not_trained_again(self, paths, trusted):
        first = run_stages(SMALL, SAMPLES, paths, reflect=answers, train=Recorded(SAMPLES))

        def never(*_): raise AssertionError("trained or asked again")

        assert run_stages(SMALL, SAMPLES, paths, reflect=never, train=never).equals(first)

    @pytest.mark.parametrize("changes", [{"kl_coef": 0.1}, {"reward": RewardConfig(alpha=0.1)}, {"seed": 7}])
    def test_other_settings_in_the_same_folder_are_refused(self, paths, changes, trusted):
        run_stages(replace(SMALL, n_stages=1), SAMPLES, paths, reflect=answers, train=Recorded(SAMPLES))
        with pytest.raises(ValueError, match=f"another {next(iter(changes))}"):
            run_stages(replace(SMALL, n_stages=1, **changes), SAMPLES, paths)
        with pytest.raises(ValueError, match="another samples"):
            run_stages(replace(SMALL, n_stages=1), SAMPLES[:8], paths)

    def test_a_trainer_that_stops_early_without_an_error_is_noticed(self, paths, trusted):
        with pytest.raises(RuntimeError, match="step 0 of 3"):
            run_stages(SMALL, SAMPLES, paths, reflect=answers, train=lambda command: None)
        with pytest.raises(RuntimeError, match="code 3"):
            run_command([sys.executable, "-c", "raise SystemExit(3)"])

    def test_nothing_is_started_with_settings_that_cannot_be_used(self, paths):
        def never(command): raise AssertionError("started")

        with pytest.raises(ValueError, match="not charged"):
            run_stages(replace(SMALL, more=(*SMALL.more, "actor_rollout_ref.actor.use_kl_loss=False")), SAMPLES, paths, train=never)

    def test_validation_uses_held_out_samples_where_there_are_any(self, paths, trusted):
        heldout = toy_samples(ToyTask(), 3, split="test")
        run_stages(replace(SMALL, n_stages=1), SAMPLES, paths, heldout, answers, Recorded(SAMPLES))
        rows = pl.read_parquet(paths.validation).to_dicts()
        assert [row["extra_info"]["sample_id"] for row in rows] == [sample.sample_id for sample in heldout]
        assert {row["extra_info"]["split"] for row in rows} == {"validation"}


    def test_commands_run_by_hand_end_as_the_loop_does(self, whole, tmp_path, sft, trusted):
        by_hand, recorded = VerlPaths(tmp_path/"hand", sft), Recorded(SAMPLES)
        for stage in (1, 2, 3):
            assert prepare_stage(SMALL, stage, SAMPLES, by_hand, answers) == by_hand.parquet(stage)
            if stage < 3:
                with pytest.raises(RuntimeError, match=f"step {3*stage - 3} is the last one trained"):
                    prepare_stage(SMALL, stage + 1, SAMPLES, by_hand, answers)
            by_hand.metrics(stage).mkdir(exist_ok=True)
            recorded(stage_command(SMALL, stage, by_hand))
        reports = run_stages(SMALL, SAMPLES, by_hand, reflect=answers, train=lambda command: pytest.fail("trained again"))
        assert reports.height == 3 and left_behind(whole) == left_behind(by_hand)
        with pytest.raises(ValueError, match="stage 4 does not exist"):
            prepare_stage(SMALL, 4, SAMPLES, by_hand)

    def test_a_rehearsal_does_not_touch_a_training_that_has_begun(self, tmp_path, sft, trusted, monkeypatch):
        from omegaconf import OmegaConf

        monkeypatch.setattr("memloc.verl_engine.compose_config", lambda config, stage, paths: OmegaConf.create({"stage": stage}))
        paths = VerlPaths(tmp_path/"run", sft)
        rehearse(SMALL, SAMPLES, paths)
        assert not (paths.folder/"settings.json").exists() and pl.read_parquet(paths.parquet(3)).height == len(SAMPLES)
        run_stages(SMALL, SAMPLES, paths, reflect=answers, train=Recorded(SAMPLES))
        before = left_behind(paths)
        assert len(rehearse(SMALL, SAMPLES, paths)) == 3 and left_behind(paths) == before
        with pytest.raises(ValueError, match="another kl_coef"):
            rehearse(replace(SMALL, kl_coef=0.5), SAMPLES, paths)


class TestSamples:
    def test_kept_samples_are_the_same_when_read(self, tmp_path):
        made = gather_samples(ROOT/"memloc"/"sample.json", 12)
        keep_samples(made, tmp_path/"samples.jsonl")
        assert kept_samples([tmp_path/"samples.jsonl"]) == made and len(made) == 12 and any(sample.date for sample in made)
        keep_samples(made[:1], tmp_path/"one.jsonl")
        assert kept_samples([tmp_path/"one.jsonl"]) == made[:1]

    @pytest.mark.parametrize("change, words", [({"gold": [9]}, "gold .9,. of"), ({"source": "locomo:47"}, "test part"), ({"segments": "abc"}, "samples form")])
    def test_a_sample_that_cannot_be_used_is_named(self, tmp_path, change, words):
        keep_samples(SAMPLES[:1], tmp_path/"samples.jsonl")
        (tmp_path/"samples.jsonl").write_text(json.dumps(json.loads((tmp_path/"samples.jsonl").read_text()) | change))
        with pytest.raises(ValueError, match=words):
            kept_samples([tmp_path/"samples.jsonl"])
        if words == "test part":
            assert kept_samples([tmp_path/"samples.jsonl"], allow_test=True)[0].source == "locomo:47"

    def test_a_file_of_another_kind_is_named(self, tmp_path):
        (tmp_path/"other.json").write_text('[{"context": "a", "question": "b"}]')
        with pytest.raises(ValueError, match=r"other\.json: neither HaluMem nor"):
            gather_samples(tmp_path, 3)

    @pytest.mark.skipif(not DATA.is_dir(), reason="needs the data sets in ../shared/data")
    def test_real_files_are_told_apart_and_no_test_part_gets_in(self, tmp_path):
        from memloc.rl_data import closed_parts

        for path in ("locomo/locomo10.json", "longmemeval/longmemeval_oracle.dev.json.gz", "time_dialogue/full_prompt_results.json.gz"):
            (tmp_path/Path(path).name).symlink_to(DATA/path)
        made = gather_samples(tmp_path, 200)
        families = {sample.source.split(":")[0] for sample in made}
        assert len(made) == 200 and {"locomo", "longmemeval-dev"} <= families and not any(closed_parts(sample.source) for sample in made)


class TestProfiles:
    def test_changes_are_read_as_the_settings_are(self):
        config = verl_profile("paper", {"kl_coef": "2e-2", "reward": "released", "more": ["a.b=1"], "gpus_per_node": 4})
        assert (config.kl_coef, config.reward.mode, config.more, config.n_gpus) == (0.02, "released", ("a.b=1",), 4)

    @pytest.mark.parametrize("changes, words", [({"kl_coeff": 1}, "'kl_coeff'"), ({"reward": "papr"}, "papr"), ({"seed": "x"}, "seed"), ({"nodes": 7}, "400 replies")])
    def test_a_wrong_change_is_named(self, changes, words):
        with pytest.raises(ValueError, match=words):
            verl_profile("paper", changes)


class TestHints:
    def test_every_answer_is_kept_with_its_reason(self, paths, sft):
        Recorded(SAMPLES).dump(paths.rollouts(1), 1, verl_rows(SAMPLES, {})[:6])
        book = HintBook()
        said = [HINT, "Take part 2.", None, f"It is {SAMPLES[5].answer}."]
        table = reflections(SAMPLES, read_dumps(paths.rollouts(1)), book, sft, 256, lambda folder, prompts: said)
        assert table["sample_id"].to_list() == [SAMPLES[i].sample_id for i in (1, 2, 4, 5)] and table["said"].to_list() == said
        assert table["rejected"].to_list() == [None, "number", "no answer", "answer"]
        assert book.hints == {SAMPLES[1].sample_id: HINT} and book.rejected == {"number": 1, "no answer": 1, "answer": 1}

    def test_a_hint_that_makes_the_prompt_too_long_leaves_the_old_one(self, sft):
        book = HintBook({SAMPLES[0].sample_id: HINT})
        assert offer_hint(book, SAMPLES[0], "Read every part to the end.", sft, 4) == "prompt too long"
        assert book.hints == {SAMPLES[0].sample_id: HINT} and book.rejected == {"prompt too long": 1}

    def test_without_a_mixed_query_nobody_is_asked(self, paths, sft):
        Recorded(SAMPLES, right=lambda index, step: [True]*4).dump(paths.rollouts(1), 1, verl_rows(SAMPLES, {})[:4])
        table = reflections(SAMPLES, read_dumps(paths.rollouts(1)), HintBook(), sft, 256, None)
        assert table.is_empty() and table.columns == ["sample_id", "said", "rejected"]

    def test_the_policy_s_folder_answers(self, sft):
        said = ask_policy(sft, [sample.messages for sample in SAMPLES[:3]], batch_size=2, max_tokens=4)
        assert len(said) == 3 and all(text is None or isinstance(text, str) for text in said)
        assert ask_policy(sft, [SAMPLES[0].messages], max_tokens=100_000) == [None]


class TestMetrics:
    def test_a_later_launch_wins_and_a_half_written_line_is_left_out(self, tmp_path):
        (tmp_path/"1.jsonl").write_text("".join(json.dumps({"step": i, "data": {"actor/kl_loss": i}}) + "\n" for i in (1, 2)) + '{"step": 3, "da')
        (tmp_path/"10.jsonl").write_text(json.dumps({"step": 3, "data": {"actor/kl_loss": 30}}) + "\n")
        (tmp_path/"2.jsonl").write_text("".join(json.dumps({"step": i, "data": {"actor/kl_loss": 10*i}}) + "\n" for i in (2, 3)))
        found = read_metrics(tmp_path)
        assert found.select("step", "actor/kl_loss").rows() == [(1, 1.0), (2, 20.0), (3, 30.0)] and found["critic/score/mean"].null_count() == 3

    def test_a_damaged_line_in_the_middle_is_named(self, tmp_path):
        (tmp_path/"1.jsonl").write_text('{"step": 1}\n{"step": 2, "data": {}}\n')
        with pytest.raises(ValueError, match="line 1"):
            read_metrics(tmp_path)

    def test_verl_s_own_logger_is_read(self, tmp_path, monkeypatch):
        from verl.utils.tracking import FileLogger

        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path/"1.jsonl"))
        logger = quiet(FileLogger, "memloc", "stage1")
        logger.log({"actor/kl_loss": np.float32(0.5), "response_length/mean": 12.0}, step=4)
        logger.finish()
        assert read_metrics(tmp_path).row(0, named=True)["actor/kl_loss"] == 0.5 and read_metrics(tmp_path)["step"].to_list() == [4]

    def test_the_stage_loop_leaves_them(self, paths, trusted):
        run_stages(replace(SMALL, n_stages=1), SAMPLES, paths, reflect=answers, train=Recorded(SAMPLES))
        assert read_metrics(paths.metrics(1))["step"].to_list() == [1, 2, 3]
