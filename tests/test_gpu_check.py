"""The check for a bare GPU machine: its own loss against verl's, its placeholders, and a run where nothing but the four libraries can be imported."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from memloc.advantages import group_advantages, shpo_loss
from memloc.toy import ToyTask, toy_samples, write_toy

BARE = ("torch", "transformers", "accelerate", "peft", "numpy")
HIDDEN = ("verl", "polars", "pydantic", "trl", "ray", "openai", "graspologic", "tensordict", "scipy", "sklearn", "datasets", "sentence_transformers", "dateutil")
QUICK = ("--device", "cpu", "--toy-sft", "20", "--heldout", "8", "--queries", "4")
# Runs a script in a Python where only BARE, with what they require, and the clone can be imported.
BARELY = """
import re, runpy, sys
from importlib import metadata
from packaging.requirements import Requirement

def name_of(text):
    return re.sub("[-_.]+", "-", text).lower()

bare, hidden, script, *arguments = sys.argv[1:]
kept, todo = set(), bare.split(",")
while todo:
    name = name_of(todo.pop())
    if name not in kept:
        kept.add(name)
        try:
            wanted = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            continue
        todo += [each.name for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})]
gone = {top for top, names in metadata.packages_distributions().items() if not kept & set(map(name_of, names))} - {"memloc"}
gone |= set(hidden.split(","))

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in gone else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
assert not gone & set(sys.modules), gone & set(sys.modules)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def check(root):
    "The script as a module."
    spec = importlib.util.spec_from_file_location("gpu_check", root/"scripts"/"gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def verl():
    "verl's functions."
    from verl.trainer.ppo import core_algos

    return core_algos


def draw(seed, n=12, length=9, dtype=torch.float64):
    "Log-probabilities, some very far apart, advantages and a mask; the first reply is empty."
    rng = np.random.default_rng(seed)
    old = -rng.random((n, length))*3
    far = np.where(rng.random((n, length)) < 0.1, rng.choice([-30.0, -4.0, 4.0, 30.0], (n, length)), 0)
    now, ref = old + rng.normal(0, 0.5, old.shape) + far, old + rng.normal(0, 0.3, old.shape)
    lengths = rng.integers(1, length + 1, n)
    lengths[0] = 0
    mask = (np.arange(length)[None] < lengths[:, None]).astype(float)
    return [torch.tensor(each, dtype=dtype) for each in (now, old, ref, rng.normal(0, 1, (n, 1))*mask, mask)]


def groups(seed, n=40):
    "Rewards and their queries: groups of one to many, the last one without spread."
    rng = np.random.default_rng(seed)
    index = np.concatenate([rng.integers(0, 12, n), [99], [77]*5])
    return np.concatenate([rng.random(n), [0.4], [0.9]*5]), index


def with_gradient(function, value):
    "Result and gradient of its sum."
    value = value.clone().requires_grad_()
    result = function(value)
    result.sum().backward()
    return result.detach(), value.grad


class TestLoss:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("scaled", [True, False])
    def test_the_advantages_are_verls(self, check, verl, seed, scaled):
        rewards, index = groups(seed)
        column, mask = torch.tensor(rewards)[:-5, None]*torch.tensor([0.25, 0.75, 0.0]), torch.tensor([1.0, 1.0, 0.0]).expand(len(rewards) - 5, 3)
        found, wanted = (function(column, mask, index[:-5], norm_adv_by_std_in_grpo=scaled)[0]
                         for function in (check.group_normalised, verl.compute_grpo_outcome_advantage))
        assert wanted.abs().max() > 0.3 and (wanted[:, 2] == 0).all()
        assert (found - wanted).abs().max() < 1e-6

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("n_tokens", [None, 321])
    def test_the_clipped_objective_is_verls_with_gradient(self, check, verl, seed, n_tokens):
        from memloc.advantages import actor_config

        now, old, _, advantages, mask = draw(seed)
        config, seen = actor_config(0.2, "token-mean", {"batch_num_tokens": n_tokens} if n_tokens else {}), []

        def loss(function):
            def of(log_prob):
                value, metrics = function(old, log_prob, advantages, mask, "token-mean", config)
                seen.append([metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"]])
                return value
            return of

        (found, slope), (wanted, wanted_slope) = (with_gradient(loss(function), now) for function in (check.clipped_objective, verl.compute_policy_loss_vanilla))
        assert abs(found - wanted) < 1e-6 and (slope - wanted_slope).abs().max() < 1e-6 and wanted_slope.abs().max() > 0
        assert seen[0] == pytest.approx(seen[1], abs=1e-6) and 0 < seen[1][0] < 1

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("whole", [{}, {"batch_num_tokens": 321}])
    def test_the_distance_is_verls_with_gradient(self, check, verl, seed, whole):
        now, _, ref, _, mask = draw(seed)

        def distance(of, mean):
            return lambda log_prob: mean(of(log_prob, ref, "low_var_kl"), mask, "token-mean", **whole)

        found, slope = with_gradient(distance(check.low_variance_kl, check.mean_over_tokens), now)
        wanted, wanted_slope = with_gradient(distance(verl.kl_penalty, verl.agg_loss), now)
        assert abs(found - wanted) < 1e-6 and wanted > 0.02
        assert (slope - wanted_slope).abs().max() < 1e-6

    @pytest.mark.parametrize("seed", range(3))
    def test_the_projects_functions_give_the_same_with_either(self, check, verl, seed, monkeypatch):
        rewards, index = groups(seed)
        correct, arrays = rewards > 0.5, draw(seed)

        def found():
            advantages = group_advantages(rewards, correct, index, 0.5)
            (loss, slope), parts = with_gradient(lambda now: shpo_loss(now, *arrays[1:], kl_coef=0.07, n_tokens=99, n_replies=12)[0], arrays[0]), \
                shpo_loss(*arrays, kl_coef=0.07, n_tokens=99, n_replies=12)[1]
            return advantages, [loss.item(), *parts], slope

        wanted = found()
        for name, module in check.own_loss().items():
            monkeypatch.setitem(sys.modules, name, module)
        ours = found()
        assert (wanted[0][-5:] == 0).all() and (ours[0][-5:] == 0).all(), "a group without spread teaches nothing"
        assert ours[0] == pytest.approx(wanted[0], abs=1e-6) and ours[1] == pytest.approx(wanted[1], abs=1e-6)
        assert (ours[2] - wanted[2]).abs().max() < 1e-6

    def test_what_only_verl_has_is_refused(self, check):
        with pytest.raises(ValueError, match="seq-mean-token-sum"):
            check.mean_over_tokens(torch.ones(2, 2), torch.ones(2, 2), "seq-mean-token-sum")
        with pytest.raises(ValueError, match="'abs'"):
            check.low_variance_kl(torch.ones(2, 2), torch.ones(2, 2), "abs")


class TestPlaceholders:
    def test_names_of_a_missing_library_can_be_written_and_not_called(self, check, monkeypatch):
        monkeypatch.setattr(check, "LIBRARIES", ("missinglib", "numpy"))
        with check.placeholders() as missing:
            found = importlib.import_module("missinglib")
            Base, Field, check_it, parts = found.Base, found.Field, found.check_it, found.parts

            class Record(Base, extra="forbid"):
                count: parts.Table | None = Field(default=1)

                @check_it("count")
                def at_least(cls, value):
                    return value

        assert missing == ["missinglib"] and "missinglib" not in sys.modules and importlib.util.find_spec("missinglib") is None
        for use in (Record, lambda: parts.read("file"), lambda: Field(default=2)):
            with pytest.raises(ImportError, match="missinglib is not installed"):
                use()

    def test_the_table_that_stands_in_keeps_its_rows(self, check):
        assert check.absent("polars.DataFrame")([{"a": 1}]).to_dicts() == [{"a": 1}]


def rows_of(report):
    return {(row["part"], row["what"]): row for row in report["rows"]}


class TestRun:
    @pytest.fixture(scope="class")
    def bare(self, root, tmp_path_factory):
        "Output and report of a run on a bare machine."
        report = tmp_path_factory.mktemp("bare")/"check.json"
        command = [sys.executable, "-c", BARELY, ",".join(BARE), ",".join(HIDDEN), str(root/"scripts"/"gpu_check.py"), *QUICK, "--steps", "2", "--skip-small", "--json", str(report)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=report.parent, env=environment)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout, json.loads(report.read_text("utf-8"))

    def test_it_needs_nothing_but_four_libraries(self, bare):
        report = bare[1]
        assert {"polars", "pydantic", "scipy", "dateutil"} <= set(report["absent"]) and report["loss"] == "own torch, checked against verl in the tests"
        assert not report["failed"] and len(report["steps"]["toy"]) == 2

    def test_it_prints_one_aligned_table(self, bare):
        lines = bare[0].splitlines()
        assert lines[0].split() == ["part", "what", "value", "compared", "with", "difference", "remark"] and set(lines[1]) == {"-", " "}
        starts = [i for i in range(len(lines[1])) if lines[1][i] == "-" and (i == 0 or lines[1][i - 1] == " ")]
        assert len(starts) == 6 and all(line[start - 2:start].strip() == "" for line in lines for start in starts[1:])
        for word in ("absent libraries", "log-probability", "gradient norm", "KL to the start", "held-out reward", "generation", "update", "all checks passed"):
            assert word in bare[0], word

    def test_it_trains_as_with_verl(self, bare, check, tmp_path, capsys):
        assert check.main([*QUICK, "--steps", "2", "--skip-small", "--json", str(tmp_path/"check.json")]) == 0
        full, lean = json.loads((tmp_path/"check.json").read_text("utf-8")), bare[1]
        assert full["loss"].startswith("verl 0.") and full["absent"] == []
        for one, other in zip(full["steps"]["toy"], lean["steps"]["toy"], strict=True):
            for name in ("reward", "policy_loss", "kl", "gradient_norm"):
                assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
        assert rows_of(full)["toy", "held-out reward"]["value"] == pytest.approx(rows_of(lean)["toy", "held-out reward"]["value"])

    def test_a_small_policy_from_a_folder(self, check, tmp_path):
        options = check.parsed([*QUICK, "--steps", "1", "--small", str(write_toy(tmp_path/"tiny"))])
        table = check.Table()
        log = check.run_part("small", check.load_project(), options, check.Clock(100), table)
        rows = rows_of({"rows": table.rows})
        assert not table.failed and len(log) == 1 and rows["small", "policy"]["value"] == "tiny"
        assert "agrees" in rows["small", "gradient norm"]["remark"] and rows["small", "seconds a step"]["value"] > 0

    def test_random_weights_of_a_given_shape(self, check, tmp_path):
        from memloc.hints import HintBook
        from memloc.shpo import ShpoConfig, roll_out

        shape = check.SMALL | {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
        samples = toy_samples(ToyTask(), 4)
        reader, network = check.random_policy(check.load_project(), tmp_path/"random", samples, shape)
        found = roll_out(network, reader, samples[:1], HintBook(), ShpoConfig(group_size=2, max_tokens=8), 1)
        assert len(found) == 2 and network.config.vocab_size == 49152
        assert reader.tokenizer.decode(reader.encode(samples[0].messages)).count(samples[0].messages[-1]["content"]) == 1

    def test_a_broken_part_is_told_and_the_other_one_runs(self, check, tmp_path, capsys, monkeypatch):
        def broken(*_):
            raise RuntimeError("no such kernel")

        seen = []
        monkeypatch.setitem(check.PARTS, "toy", (broken, *check.PARTS["toy"][1:]))
        monkeypatch.setitem(check.PARTS, "small", (lambda *_: seen.append(1), *check.PARTS["small"][1:]))
        for name in ("agreement", "train"):
            monkeypatch.setattr(check, name, lambda *_: [])
        assert check.main([*QUICK]) == 1 and seen == [1]
        assert "RuntimeError: no such kernel" in capsys.readouterr().out

    def test_an_agreement_that_fails_gives_a_code(self, check, capsys, monkeypatch):
        monkeypatch.setattr(check, "train", lambda *_: [])
        assert check.main([*QUICK, "--skip-small", "--toy-sft", "1", "--tolerance", "-1"]) == 1
        assert "DISAGREES with cpu float64" in capsys.readouterr().out

    @pytest.mark.parametrize("more", [("--seconds", "0.01"), ("--device", "cuda:99")])
    def test_nothing_that_could_be_run_gives_a_code_and_a_reason(self, check, more, capsys):
        assert check.main([*QUICK, "--skip-small", *more]) == 1
        assert "nothing could be run: " in capsys.readouterr().out
