"""verl's own actor and reference on a processor, through two stages of SHPO; prints what a test wants to know as JSON.

verl 0.8.0 has no rollout engine for processors, so the replies are given. All else is verl's: the worker that holds actor and reference,
its settings, dataset and reward manager, advantages, update, checkpoint. What verl takes from a card is replaced in `without_a_card`.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHDYNAMO_DISABLE="1")

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.main_ppo import create_rl_dataset
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import attention_utils, hf_tokenizer, npu_flash_attn_utils
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers import engine_workers
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from memloc.shpo_verl import carry_correct
from memloc.toy import ToyTask, toy_samples, write_toy
from memloc.verl_engine import VerlConfig, VerlPaths, compose_config, validate, write_parquet

PROMPT, REPLY = 96, 48  # tokens
ON_CPU = ("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.model.use_remove_padding=False",
          "+actor_rollout_ref.model.override_config.attn_implementation=sdpa", "actor_rollout_ref.model.enable_gradient_checkpointing=False",
          *(f"actor_rollout_ref.{part}.fsdp_config.use_torch_compile=False" for part in ("actor", "ref")),
          "data.dataloader_num_workers=0")
CONFIG = VerlConfig(steps_per_stage=2, batch_size=4, mini_batch_size=4, micro_batch_size=8, gpus_per_node=1, max_prompt_length=PROMPT,
                    max_response_length=REPLY, save_every=1, learning_rate=1e-3, eta_homo=0.25, more=ON_CPU)


def without_a_card() -> None:
    "Put something harmless in the place of what needs a card."
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name in ("memory_reserved", "memory_allocated", "max_memory_reserved", "max_memory_allocated", "empty_cache"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_, **__: 0)
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(transformer_impl.FSDPEngineWithLMHead)
    attention_utils._get_attention_functions = lambda: tuple(
        getattr(npu_flash_attn_utils, name) for name in ("index_first_axis", "pad_input", "rearrange", "unpad_input"))
    transformer_impl.CPUOffloadPolicy = lambda **_: None
    engine_workers.aggressive_empty_cache = engine_workers.set_numa_affinity = lambda *_, **__: None


def worker_of(config):
    "verl's worker with actor and reference; the rollout engine is left out."
    worker = engine_workers.ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor_rollout_ref")
    worker.role = "actor_ref"
    worker.init_model()
    return worker


def replies_to(batch, targets):
    "Four given replies to each prompt: one right; all four right for the first prompt."
    wrong = "<reason>nothing.</reason><id>none</id><answer>tea</answer>"
    return [targets[row["sample_id"]] if i == 0 or first == 0 else wrong
            for first, row in enumerate(batch["extra_info"]) for i in range(4)]


def rollout(tokenizer, batch, replies):
    "Prompts and replies as verl's agent loop lays them out, each prompt four times."
    prompts = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for messages in batch["raw_prompt"] for _ in range(4)]
    written = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in replies]
    pad, columns = tokenizer.pad_token_id, {}
    columns["prompts"] = torch.tensor([[pad]*(PROMPT - len(row)) + row for row in prompts])
    columns["responses"] = torch.tensor([row + [pad]*(REPLY - len(row)) for row in written])
    columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], 1)
    seen = [[0]*(PROMPT - len(p)) + [1]*(len(p) + len(r)) + [0]*(REPLY - len(r)) for p, r in zip(prompts, written, strict=True)]
    columns["attention_mask"] = torch.tensor(seen)
    columns["position_ids"] = (columns["attention_mask"].cumsum(1) - 1).clamp(min=0)
    columns["response_mask"] = columns["attention_mask"][:, PROMPT:]
    told = {name: np.repeat(batch[name], 4) for name in ("data_source", "reward_model", "extra_info")}
    return DataProto.from_dict(columns, {**told, "uid": np.repeat(np.arange(len(batch["raw_prompt"])).astype(object), 4)})


def score(manager, data):
    "Rewards by verl's reward manager, and correctness where the estimator looks for it."
    scored = [manager.loop.run_until_complete(manager.run_single(data[i:i + 1])) for i in range(len(data))]
    data.batch["token_level_rewards"] = manager.assemble_rm_scores(data, [one["reward_score"] for one in scored])
    for name in scored[0]["reward_extra_info"]:
        data.non_tensor_batch[name] = np.array([one["reward_extra_info"][name] for one in scored])
    return carry_correct(data)


def log_probs(worker, data, which):
    "Log-probabilities of the replies under `actor` or `ref`, as verl's trainer gets them."
    inside = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(inside, calculate_entropy=False, compute_loss=False, temperature=1.0)
    found = (worker.compute_ref_log_prob if which == "ref" else worker.compute_log_prob)(inside)
    return no_padding_2_padding(tu.get(found, "log_probs"), inside).float()*data.batch["response_mask"]


def update(worker, data):
    "One update by verl; its metrics."
    data.meta_info["temperature"] = 1.0
    inside = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(inside, calculate_entropy=False, global_batch_size=16, mini_batch_size=16, epochs=1, seed=1,
                         dataloader_kwargs={"shuffle": False}, compute_loss=True)
    metrics = tu.get(worker.update_actor(inside), "metrics")
    return {name: float(np.sum(metrics[name])) for name in ("kl_loss", "actor/pg_loss", "loss")}


def main(folder):
    without_a_card()
    paths = VerlPaths(Path(folder)/"run", write_toy(Path(folder)/"sft"))
    samples = toy_samples(ToyTask(n_segments=(3, 4)), 4, seed=3)
    targets, said, seen = {sample.sample_id: sample.target for sample in samples}, [], {}
    for stage in (1, 2):
        write_parquet(samples, {samples[1].sample_id: "Compare every part."} if stage == 2 else {}, paths.parquet(stage))
        write_parquet(samples, {}, paths.validation)
        config = compose_config(CONFIG, stage, paths)
        validate(config, paths)
        OmegaConf.resolve(config)
        tokenizer, worker = hf_tokenizer(str(paths.sft)), worker_of(config)
        asyncio.set_event_loop(asyncio.new_event_loop())
        manager = load_reward_manager(config, tokenizer)
        dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
        batch = collate_fn([dataset[i] for i in range(4)])
        data = score(manager, rollout(tokenizer, batch, replies_to(batch, targets)))
        fresh = log_probs(worker, data, "actor")
        checkpoint = paths.checkpoints/f"global_step_{CONFIG.last_step(stage - 1)}"/"actor"
        if stage > 1:
            worker.load_checkpoint(str(checkpoint))
        start = log_probs(worker, data, "actor")
        for step in (1, 2):
            data.batch["old_log_probs"], data.batch["ref_log_prob"] = log_probs(worker, data, "actor"), log_probs(worker, data, "ref")
            data = compute_advantage(data, config.algorithm.adv_estimator, config=config.algorithm)
            saved = {name: data.batch[name].tolist() for name in ("old_log_probs", "ref_log_prob", "advantages", "response_mask")}
            said.append({"stage": stage, "step": step, **update(worker, data), **saved, "correct": data.non_tensor_batch["correct"].tolist()})
        seen[stage] = {"fresh": fresh.tolist(), "start": start.tolist(), "end": log_probs(worker, data, "actor").tolist(),
                       "ref": log_probs(worker, data, "ref").tolist(), "correct": data.non_tensor_batch["correct"].tolist()}
        worker.save_checkpoint(str(paths.policy(CONFIG.last_step(stage)).parent), None, CONFIG.last_step(stage))
    return {"steps": said, "stages": seen, "policy": str(paths.policy(CONFIG.last_step(2)))}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(sys.argv[1])))
