"""Check the trainer of `memloc.shpo` on one bare GPU machine: does it run there, how fast, and with the same losses as on a processor?

    python scripts/gpu_check.py                       # from a clone; needs torch, transformers, accelerate and peft only
    python scripts/gpu_check.py --small FOLDER        # with a trained locator, like runs/sft-small/sft/model
    python scripts/gpu_check.py --json check.json

It draws, scores and updates with the functions of `memloc.shpo` itself. Two things stand in for what a bare machine lacks. Libraries
that `memloc` imports and this check never calls (polars, pydantic, ...) are placeholders while it is imported; a call of one is an
error. And where verl is missing, its four loss functions are replaced by the ones below, written from the equations;
`tests/test_gpu_check.py` holds them against verl's. The table says what was replaced. Prints one table; progress goes to stderr.
Exit code 1: an agreement check failed, a part failed, or nothing could be run.
"""

import time

STARTED = time.monotonic()  # importing torch takes its time too

import argparse
import copy
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("polars", "pydantic", "scipy", "dateutil", "httpx", "yaml", "tqdm")  # what importing `memloc.shpo` imports, beside numpy
SEED = 13
SMALL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True}  # the shape of SmolLM2-135M


# Placeholders


class Absent(type):
    "The type of names of a library that is not installed: they can be written down and derived from, not used."

    sealed = False  # after the imports a call is an error

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.path}.{name}")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        if Absent.sealed:
            raise ImportError(f"{cls.path} was called, and {cls.path.split('.')[0]} is not installed here; install it, or leave out what needs it")
        return cls


class Name(metaclass=Absent):
    "A name in a missing library."

    path = ""

    def __init_subclass__(cls, **_: Any) -> None:
        "Class keywords of the library's classes are taken and ignored."

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class Rows:
    "A table as a list of rows, where polars is missing: it keeps what it is given."

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.rows = list(rows)

    def to_dicts(self) -> list[dict[str, Any]]:
        return self.rows


NAMES: dict[str, Any] = {"polars.DataFrame": Rows}


def absent(path: str) -> Any:
    "The placeholder of a dotted name, always the same one."
    if path not in NAMES:
        NAMES[path] = Absent(path.rpartition(".")[2], (Name,), {"path": path})
    return NAMES[path]


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "The last finder that Python asks: makes modules for missing libraries, and notes which."

    def __init__(self) -> None:
        self.missing: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if name in LIBRARIES:
            self.missing.append(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if top in self.missing else None

    def exec_module(self, module: ModuleType) -> None:
        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return absent(f"{module.__name__}.{name}")

        module.__getattr__ = named


@contextmanager
def placeholders() -> Iterator[list[str]]:
    "Missing libraries can be imported inside the block; afterwards they are missing again, and their names cannot be called."
    finder = Placeholders()
    Absent.sealed = False
    sys.meta_path.append(finder)
    try:
        yield finder.missing
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.missing]:
            del sys.modules[name]
        Absent.sealed = True


# The loss where verl is missing


def group_normalised(token_level_rewards: Any, response_mask: Any, index: Sequence[Any], epsilon: float = 1e-6,
                     norm_adv_by_std_in_grpo: bool = True) -> tuple[Any, Any]:
    "GRPO's advantage (Eq. 23): a reply's reward, less the mean of its group, over the group's deviation. A group of one keeps its reward."
    totals, groups = token_level_rewards.sum(-1), {}
    for place, query in enumerate(index):
        groups.setdefault(query, []).append(place)
    values = torch.zeros_like(totals)
    for places in groups.values():
        group, alone = totals[places], len(places) == 1
        centred = group if alone else group - group.mean()
        deviation = 1.0 if alone else group.std()
        values[places] = centred/(deviation + epsilon) if norm_adv_by_std_in_grpo else centred
    advantages = values.unsqueeze(-1)*response_mask
    return advantages, advantages


def mean_over_tokens(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, batch_num_tokens: int | None = None, **_: Any) -> Any:
    "Mean over the tokens of all replies."
    if loss_agg_mode != "token-mean":
        raise ValueError(f"loss_aggregation {loss_agg_mode!r} needs verl; without it there is only 'token-mean'")
    return (loss_mat*loss_mask).sum()/(batch_num_tokens or loss_mask.sum())


def clipped_objective(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, loss_agg_mode: str, config: Any) -> tuple[Any, dict[str, float]]:
    "The negated clipped objective (Eq. 27); a token with a negative advantage counts at most three times."
    change = (log_prob - old_log_prob).clamp(-20, 20)
    ratio = change.exp()
    plain, clipped = ratio*advantages, ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)*advantages
    gain = torch.minimum(plain, clipped)
    gain = torch.where(advantages < 0, torch.maximum(gain, 3*advantages), gain)
    n_tokens = response_mask.sum()
    seen = {"actor/pg_clipfrac": ((clipped < plain)*response_mask).sum()/n_tokens, "actor/ppo_kl": -(change*response_mask).sum()/n_tokens}
    loss = mean_over_tokens(-gain, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {name: value.item() for name, value in seen.items()}


def low_variance_kl(log_prob: Any, ref_log_prob: Any, kl_penalty: str) -> Any:
    "Distance to the reference, token by token: exp(x) - x - 1 with x = log(reference/policy), and at most 10."
    if kl_penalty != "low_var_kl":
        raise ValueError(f"kl_penalty {kl_penalty!r} needs verl; without it there is only 'low_var_kl'")
    x = (ref_log_prob - log_prob).clamp(-20, 20)
    return (x.exp() - x - 1).clamp(-10, 10)


STANDINS = {"verl": {}, "verl.trainer": {}, "verl.trainer.ppo": {}, "verl.workers": {}, "verl.workers.config": {"FSDPActorConfig": SimpleNamespace},
            "verl.trainer.ppo.core_algos": {"compute_grpo_outcome_advantage": group_normalised, "agg_loss": mean_over_tokens,
                                            "compute_policy_loss_vanilla": clipped_objective, "kl_penalty": low_variance_kl}}


def own_loss() -> dict[str, ModuleType]:
    "Modules under verl's names that hold the functions above."
    made = {}
    for name, members in STANDINS.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update({"__path__": [], **members})
    return made


def loss_source() -> str:
    "Where the loss comes from; without verl the functions above are put in its place."
    if importlib.util.find_spec("verl"):
        try:
            importlib.import_module("verl.trainer.ppo.core_algos")
            importlib.import_module("verl.workers.config")
            return f"verl {importlib.metadata.version('verl')}"
        except ImportError as error:
            say(f"verl is here and cannot be imported ({error}); its loss is replaced")
    sys.modules.update(own_loss())
    return "own torch, checked against verl in the tests"


# Parts


class Project(NamedTuple):
    "The modules of `memloc` that the check uses."

    shpo: Any
    advantages: Any
    sft: Any
    toy: Any
    notes: Any
    hints: Any
    llm: Any
    loss: str             # where the loss comes from
    missing: list[str]    # libraries that are placeholders


def load_project() -> Project:
    "Import `memloc` from this clone."
    import transformers  # before the placeholders: it looks for optional libraries when it is imported

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.path.insert(0, str(ROOT))
    with placeholders() as missing:
        modules = [importlib.import_module(f"memloc.{name}") for name in ("shpo", "advantages", "sft", "toy", "notes", "hints", "llm")]
    return Project(*modules, loss_source(), sorted(missing))


def say(text: str) -> None:
    "A line of progress."
    print(text, file=sys.stderr, flush=True)


def told(error: Exception) -> str:
    "An error in one line."
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Clock:
    "The time that is left."

    def __init__(self, seconds: float, started: float | None = None):
        self.started, self.seconds = time.monotonic() if started is None else started, seconds

    @property
    def spent(self) -> float:
        "Seconds since the start."
        return time.monotonic() - self.started

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        "Whether something that long ends before that share of the time is over."
        return self.spent + seconds <= share*self.seconds


class Table:
    "Rows of the answer, and what failed."

    COLUMNS = ("part", "what", "value", "compared with", "difference", "remark")

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def add(self, part: str, what: str, value: Any, other: Any = None, difference: Any = None, remark: str = "") -> None:
        self.rows.append(dict(zip(self.COLUMNS, (part, what, value, other, difference, remark), strict=True)))

    def fail(self, part: str, what: str, why: str) -> None:
        self.failed.append(f"{part}, {what}: {why}")

    def text(self) -> str:
        "All rows, aligned."
        def shown(value: Any) -> str:
            return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)

        cells = [self.COLUMNS, *(tuple(map(shown, row.values())) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([lines[0], "  ".join("-"*width for width in widths), *lines[1:]])


class Part(NamedTuple):
    "A policy with everything its steps need."

    name: str
    network: Any
    reader: Any
    train: list[Any]    # samples
    held: list[Any]     # samples
    config: Any         # a `ShpoConfig`
    steps: int
    until: float        # share of the time after which no new step begins
    remark: str = ""    # about its rewards


def optimizer_of(network: Any, learning_rate: float) -> Any:
    "The optimizer of `memloc.shpo.train_steps`."
    return torch.optim.AdamW([value for value in network.parameters() if value.requires_grad], lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)


def cold_start(project: Project, network: Any, reader: Any, samples: Sequence[Any], n_steps: int, learning_rate: float, clock: Clock, until: float) -> int:
    "Teach the form by plain cross-entropy on the replies; returns the steps made before that share of the time was over."
    size, pad, done = len(samples)//max(n_steps, 1), project.shpo.pad_token(reader), 0
    optimizer, warm = optimizer_of(network, learning_rate), max(1, n_steps//20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1)/warm if step < warm else (1 + math.cos(math.pi*(step - warm)/max(1, n_steps - warm)))/2)
    network.train()
    for step in range(n_steps):
        if not clock.allows(0, until):
            break
        rows = [project.sft.sample_tokens(reader, sample) for sample in samples[step*size:(step + 1)*size]]
        longest = max(len(row.input_ids) for row in rows)
        spaces = [longest - len(row.input_ids) for row in rows]
        ids, labels, mask = (torch.tensor(grid, device=network.device) for grid in (
            [row.input_ids + [pad]*space for row, space in zip(rows, spaces, strict=True)],
            [row.labels + [project.sft.IGNORED]*space for row, space in zip(rows, spaces, strict=True)],
            [[1]*len(row.input_ids) + [0]*space for row, space in zip(rows, spaces, strict=True)]))
        network(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
    network.eval()
    return done


def moved(network: Any, noise: float) -> Any:
    "A copy with a little noise on every matrix, the same on every device."
    other, generator = copy.deepcopy(network), torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for value in other.parameters():
            if value.dim() > 1:
                value += (noise*torch.randn(value.shape, generator=generator)).to(value.device)*value.std()
    return other


def losses_of(project: Project, policy: Any, reference: Any, part: Part, rollouts: Sequence[Any], advantages: np.ndarray) -> tuple[dict[str, float], Any]:
    "What an update measures, the loss as if the reference had drawn the replies, and the log-probabilities."
    shpo, config = project.shpo, part.config
    seen = shpo.update(policy, reference, torch.optim.SGD(policy.parameters(), lr=0.0), rollouts, advantages, part.reader, config)
    batch = shpo.batch_of([each.prompt for each in rollouts[::config.group_size]], [each.reply for each in rollouts], shpo.pad_token(part.reader), policy.device)
    with torch.inference_mode():
        now, before = (shpo.log_probabilities(network, batch, config.temperature) for network in (policy, reference))
        push = torch.tensor(advantages, device=policy.device).unsqueeze(1)*batch.mask
        loss, _ = project.advantages.shpo_loss(now, before, before, push, batch.mask, config.clip, config.kl_coef)
    found = {"loss of the update": seen["policy_loss"] + config.kl_coef*seen["kl"], "KL to the start": seen["kl"],
             "gradient norm": seen["gradient_norm"], "loss off the policy": loss.item()}
    return found, (now*batch.mask).double().cpu()


def agreement(project: Project, part: Part, n_samples: int, noise: float, tolerance: float, table: Table) -> None:
    "The same replies and the same weights on the device and on the processor."
    part = part._replace(config=dataclasses.replace(part.config, group_size=4))
    rollouts = project.shpo.roll_out(part.network, part.reader, part.train[:n_samples], project.hints.HintBook(), part.config, seed=SEED)
    advantages = np.random.default_rng(SEED).normal(size=len(rollouts)).astype(np.float32)
    policy, on_cpu = moved(part.network, noise), part.network.device.type == "cpu"
    here, logs = losses_of(project, policy, part.network, part, rollouts, advantages)
    pair = [copy.deepcopy(network).to("cpu") for network in (policy, part.network)]
    there, wanted = losses_of(project, *([each.double() for each in pair] if on_cpu else pair), part, rollouts, advantages)
    where = "cpu float64" if on_cpu else "cpu float32"

    def judge(what: str, value: float | None, other: float | None, difference: float, kind: str) -> None:
        good = difference <= tolerance  # not so for NaN
        table.add(part.name, what, value, other, f"{difference:.1e} {kind}", f"{'agrees with' if good else 'DISAGREES with'} {where}")
        if not good:
            table.fail(part.name, what, f"differs by {difference:.2g} ({kind}) from {where}; at most {tolerance:g} is allowed")

    judge("log-probability", None, None, float((logs - wanted).abs().max()), "nats, largest")
    for what, value in here.items():
        judge(what, value, there[what], abs(value - there[what])/max(abs(there[what]), 1e-2), "relative")
    again = project.shpo.roll_out(part.network, part.reader, part.train[:n_samples], project.hints.HintBook(), part.config, seed=SEED)
    same = np.mean([one.reply == other.reply for one, other in zip(rollouts, again, strict=True)])
    table.add(part.name, "replies drawn again with the same seed", f"{same:.0%} the same")


HELD = {"reward": "held-out reward", "reward_drawn": "held-out reward, drawn replies", "exact": "held-out exact ids"}


def held_out(project: Project, part: Part, network: Any) -> dict[str, np.ndarray]:
    "Rewards of the most probable and of drawn replies, and exactness of the former."
    rows = project.shpo.heldout_rewards("policy", network, part.reader, part.held, part.config).to_dicts()
    return {name: np.array([row[name] for row in rows]) for name in HELD}


def train(project: Project, part: Part, clock: Clock, table: Table) -> list[dict[str, Any]]:
    "Steps of the trainer, with held-out rewards before and after; the rows of its log."
    network, config, log = part.network, part.config, []
    started = clock.spent
    before = held_out(project, part, network)
    looked, longest = clock.spent - started, 0.0
    reference = copy.deepcopy(network).requires_grad_(False)
    optimizer = optimizer_of(network, config.learning_rate)
    for step in range(part.steps):
        if not clock.allows(looked + 1.5*longest, part.until):
            table.add(part.name, "steps left out", part.steps - step, remark="for lack of time")
            break
        started = clock.spent
        row, _ = project.shpo.one_step(network, reference, optimizer, part.reader, part.train, project.hints.HintBook(), config, 0, step)
        log.append(row)
        longest = max(longest, clock.spent - started)
        say(f"{part.name}: step {step + 1}, reward {row['reward']:.3f}, {longest:.1f} s at most")
    after = held_out(project, part, network)
    for name, label in HELD.items():
        change, n = after[name] - before[name], len(part.held)
        table.add(part.name, label, after[name].mean(), before[name].mean(), f"{change.mean():+.3f} ± {change.std(ddof=1)/math.sqrt(n):.3f}",
                  f"after and before {len(log)} steps, {n} samples{part.remark}")
    times(part, log, table)
    return log


def times(part: Part, log: Sequence[dict[str, Any]], table: Table) -> None:
    "Where the time of a step goes."
    if not log:
        return
    settled = log[1:] or log
    drawing, updating = (float(np.median([row[name] for row in settled])) for name in ("seconds_drawing", "seconds_updating"))
    n, whole = part.config.queries_per_step*part.config.group_size, drawing + updating
    size = f"{n} replies of {np.mean([row['length'] for row in settled]):.0f} tokens"
    table.add(part.name, "seconds a step", whole, log[0]["seconds_drawing"] + log[0]["seconds_updating"], None, f"median, and the first; {size}")
    table.add(part.name, "  of them generation and scoring", drawing, remark=f"{drawing/whole:.0%}; {sum(row['length'] for row in settled)*n/sum(row['seconds_drawing'] for row in settled):.0f} tokens a second")
    table.add(part.name, "  of them update", updating, remark=f"{updating/whole:.0%}")
    table.add(part.name, "reward of the replies drawn, last step", log[-1]["reward"], log[0]["reward"], f"{log[-1]['reward'] - log[0]['reward']:+.3f}", "last and first step")
    if part.network.device.type == "cuda":
        table.add(part.name, "GPU memory, most", torch.cuda.max_memory_allocated(part.network.device)/2**30, remark="GiB")


def distinct(samples: Sequence[Any], n: int) -> list[Any]:
    "The first n different samples."
    return list({sample.sample_id: sample for sample in samples}.values())[:n]


def settings(project: Project, profile: str, options: argparse.Namespace, **changes: Any) -> Any:
    "A profile of `memloc.shpo`, without hints, and smaller where asked."
    config = project.shpo.SHPO_PROFILES[profile]
    return dataclasses.replace(config, algorithm="no hints", queries_per_step=options.queries or config.queries_per_step, **changes)


def toy_part(project: Project, options: argparse.Namespace, folder: Path, clock: Clock, table: Table) -> Part:
    "The toy after a short cold start."
    toy, config = project.toy, settings(project, "sample", options, n_heldout=options.heldout)
    reader = project.sft.reader_of(str(toy.write_toy(folder/"toy", seed=SEED)))
    network = project.sft.load_network(reader, project.sft.SFTConfig()).to(options.device)
    lessons = toy.toy_samples(toy.ToyTask(), 32*options.toy_sft, SEED, rising=True)
    started = clock.spent
    done = cold_start(project, network, reader, lessons, options.toy_sft, 3e-3, clock, 0.35)
    short = "" if done == options.toy_sft else f"; time was short, {options.toy_sft} steps were wanted"
    table.add("toy", "cold start", f"{done} steps", remark=f"{clock.spent - started:.1f} s for {32*done} samples{short}")
    samples = [distinct(toy.toy_samples(toy.ToyTask(), 2*n, seed, split), n)
               for n, seed, split in ((config.n_queries, SEED + 1, "train"), (config.n_heldout, SEED, "test"))]
    return Part("toy", network, reader, *samples, config, options.steps or 20, 1.0 if options.skip_small else 0.5)


def random_policy(project: Project, folder: Path, samples: Sequence[Any], shape: dict[str, Any]) -> tuple[Any, Any]:
    "A Llama with random weights and a byte-level tokenizer made from the prompts; for timing."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    marks = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator([message["content"] for sample in samples for message in sample.messages],
                             trainers.BpeTrainer(vocab_size=2048, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    template = ("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
                "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=marks[0], eos_token=marks[1], additional_special_tokens=marks[2:],
                                        chat_template=template, clean_up_tokenization_spaces=False)
    config = LlamaConfig(**shape, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(SEED)
    return project.sft.reader_of(str(folder)), LlamaForCausalLM(config).eval()


def small_part(project: Project, options: argparse.Namespace, folder: Path, clock: Clock, table: Table) -> Part:
    "A small language model: the given one, the packaged one after a short cold start, or a random one of its shape."
    on_gpu, notes = torch.device(options.device).type == "cuda", project.notes
    config = settings(project, "small", options, n_heldout=64 if on_gpu else 8, heldout_draws=1)
    samples = [distinct(notes.note_samples(notes.NotesTask(), 2*n, seed, split), n)
               for n, seed, split in ((config.n_queries, SEED + 1, "train"), (config.n_heldout, SEED, "test"))]
    source, remark, n_sft = options.small, "", 0
    if not source:
        try:
            source = str(project.llm.smollm2_folder())
            n_sft = options.small_sft if options.small_sft >= 0 else 80*on_gpu
            remark = "; SmolLM2 as packaged does not know the form" if not n_sft else ""
        except (ImportError, OSError, ValueError) as error:  # not installed, without its converter, or damaged: the table says which
            remark = "; RANDOM WEIGHTS: rewards mean nothing"
            table.add("small", "policy", "random weights", remark=f"no packaged weights ({told(error)[:90]})")
    if source:
        reader = project.sft.reader_of(source)
        n_layers = json.loads((Path(reader.folder)/"config.json").read_text("utf-8")).get("num_hidden_layers", 0)
        frozen = config.frozen_layers if n_layers > config.frozen_layers else 0
        network = project.sft.load_network(reader, project.sft.SFTConfig(frozen_layers=frozen))
        table.add("small", "policy", Path(source).name, remark=f"{frozen} of {n_layers} layers frozen")
    else:
        reader, network = random_policy(project, folder/"small", samples[0], SMALL)
    network = network.to(options.device)
    if n_sft:
        started = clock.spent
        done = cold_start(project, network, reader, notes.note_samples(notes.NotesTask(), 4*n_sft, SEED), n_sft, 1e-4, clock, 0.75)
        table.add("small", "cold start", f"{done} steps", remark=f"{clock.spent - started:.1f} s for {4*done} samples")
    lengths = [len(reader.encode(sample.messages)) for sample in samples[0]]
    table.add("small", "weights, million", sum(value.numel() for value in network.parameters())/1e6, remark=f"prompts of {np.mean(lengths):.0f} tokens")
    return Part("small", network, reader, *samples, config, options.steps or 6, 1.0, remark)


PARTS: dict[str, tuple[Callable[..., Part], float, int, float]] = {  # how to make it, shortest time, samples and noise of the agreement check
    "toy": (toy_part, 10, 4, 0.05), "small": (small_part, 40, 2, 0.02)}


def run_part(name: str, project: Project, options: argparse.Namespace, clock: Clock, table: Table) -> list[dict[str, Any]]:
    "One policy: agreement, then steps."
    make, shortest, n_samples, noise = PARTS[name]
    if not clock.allows(shortest):
        table.add(name, "left out", None, remark=f"{clock.spent:.0f} of {clock.seconds:.0f} s are over, and it takes {shortest:.0f} s or more")
        return []
    try:
        with tempfile.TemporaryDirectory() as folder:
            part = make(project, options, Path(folder), clock, table)
            say(f"{name}: ready after {clock.spent:.0f} s")
            agreement(project, part, n_samples, noise, options.tolerance, table)
            return train(project, part, clock, table)
    except Exception as error:  # noqa: BLE001 - the other part may still tell something; the exit code says that this one failed
        traceback.print_exc()
        table.add(name, "FAILED", None)
        table.fail(name, "failed", told(error))
        return []


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    "The command line."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="", help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--steps", type=int, default=0, help="steps of the trainer; default: 20 for the toy, 6 for the small policy")
    parser.add_argument("--queries", type=int, default=0, help="queries a step; default: as in the profiles sample and small")
    parser.add_argument("--seconds", type=float, default=330.0, help="time for everything; nothing new begins that would pass it")
    parser.add_argument("--small", default="", help="folder of a small causal language model; default: the packaged SmolLM2, else random weights")
    parser.add_argument("--skip-small", action="store_true", help="the toy only")
    parser.add_argument("--toy-sft", type=int, default=800, help="steps of the toy's cold start, 32 samples each")
    parser.add_argument("--small-sft", type=int, default=-1, help="steps of the packaged model's cold start, 4 samples each; default: 80 on a GPU, else 0")
    parser.add_argument("--heldout", type=int, default=128, help="held-out samples of the toy, at least 2")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference to the processor: relative, of log-probabilities in nats")
    parser.add_argument("--json", default="", help="file for the table and the log of every step")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if min(options.steps, options.queries, options.toy_sft) < 0 or options.heldout < 2 or options.seconds <= 0:
        parser.error("--steps, --queries and --toy-sft must be at least 0, --heldout at least 2, --seconds above 0")
    return options


def main(arguments: Sequence[str] | None = None, started: float | None = None) -> int:
    "Run the check; the exit code."
    options, table = parsed(arguments), Table()
    clock, logs, project = Clock(options.seconds, started), {}, None
    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device)
        project = load_project()
    except (ImportError, RuntimeError, ValueError, OSError, AssertionError) as error:  # the last: torch without CUDA
        table.fail("all", "nothing could be run", told(error))
    else:
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
        table.add("all", "device", str(device), remark=f"{card}; float32 products: {torch.get_float32_matmul_precision()}; {torch.get_num_threads()} threads")
        table.add("all", "versions", f"torch {torch.__version__}", remark=", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "accelerate", "peft", "numpy") if importlib.util.find_spec(name)))
        table.add("all", "loss", project.loss.partition(",")[0], remark=project.loss.partition(", ")[2])
        table.add("all", "absent libraries", len(project.missing), remark=", ".join(project.missing) or "none: no placeholders")
        for name in ("toy", "small")[:1 if options.skip_small else 2]:
            logs[name] = run_part(name, project, options, clock, table)
        if not any(row["part"] in PARTS and row["what"] != "left out" for row in table.rows):
            table.fail("all", "nothing could be run", f"--seconds {options.seconds:g} is too little")
    table.add("all", "seconds", clock.spent, remark="; ".join(table.failed) or "all checks passed")
    print(table.text())
    if options.json:
        found = {"rows": table.rows, "failed": table.failed, "settings": vars(options), "loss": project and project.loss,
                 "absent": project and project.missing, "steps": logs, "seconds": clock.spent}
        Path(options.json).write_text(json.dumps(found, indent=1, default=float) + "\n", "utf-8")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main(started=STARTED))
