"""The command line: exit codes, messages, JSON."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memloc.cli import app

STAGE = """from memloc.artifacts import Stage
if fail: raise ValueError("turn t7 has no text")
with Stage(run_dir, "only", {"n": n}) as stage: stage.json("report", {"n": n, "ks": list(ks)})"""


@pytest.fixture
def project(tmp_path, write_notebook):
    write_notebook(tmp_path/"nbs"/"00_only.ipynb", ("run_dir = ''\nn = 1\nks = [1]\nfail = False", "parameters"), STAGE)
    (tmp_path/"nbs"/"profiles").mkdir()
    (tmp_path/"nbs"/"profiles"/"toy.yaml").write_text(
        "description: one stage\nstages: [{notebook: 00_only.ipynb, stage: only}]")
    return tmp_path


def memloc(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_run_with_two_parameters(project):
    done = memloc("run", "toy", "--root", project, "-p", "n=7", "-p", "ks=[1, 3]", "--name", "seven", "--json")
    assert done.exit_code == 0, done.output
    outcome = json.loads(done.stdout)
    assert outcome["ran"] == ["only"] and outcome["folder"].endswith("runs/seven")
    assert json.loads((project/"runs"/"seven"/"report.json").read_text()) == {"n": 7, "ks": [1, 3]}
    again = memloc("run", "toy", "--root", project, "-p", "n=7", "-p", "ks=[1, 3]", "--name", "seven")
    assert "up to date" in again.stderr and "report.html" in again.stdout


def test_a_failing_stage_exits_with_1_and_one_message(project):
    done = memloc("run", "toy", "--root", project, "-p", "fail=true")
    assert done.exit_code == 1
    assert "stage only failed in cell 2: ValueError: turn t7 has no text" in done.stderr
    assert "notebooks/00_only.ipynb" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [
    ["run", "tory"], ["run", "toy", "-p", "m=1"], ["run", "toy", "-p", "n"], ["run", "toy", "-p", "n=1", "-p", "n=2"],
    ["run", "toy", "--data", "absent.json"], ["run", "toy", "--unknown-option"],
    ["run"], ["data", "fetch", "no-such-set"], ["nonsense"],
])
def test_wrong_commands_exit_with_2(project, monkeypatch, arguments):
    monkeypatch.chdir(project)
    done = memloc(*arguments)
    assert done.exit_code == 2 and done.stderr.strip() and "Traceback" not in done.stderr


def test_lint_counts_rows_and_json(tmp_path):
    file = tmp_path/"chat.json"
    turns = [{"speaker": "Mia", "text": "Hi Tom"}]
    sessions = [{"session_id": "s01", "date": "some day", "turns": turns}]
    file.write_text(json.dumps({"conversations": [{"conversation_id": "mia-tom", "sessions": sessions}]}))
    shown = memloc("lint", file)
    assert shown.exit_code == 0 and "some day" in shown.stdout
    rows = json.loads(memloc("lint", file, "--json").stdout)
    assert {"file", "record", "field", "rule", "value", "action", "detail"} <= set(rows[0])
    assert "some day" in memloc("lint", file, "--rows", 5, "--dataset", "plain").stdout


@pytest.mark.parametrize("content", [None, "[{", '{"conversations": 3}'])
def test_lint_of_a_bad_file_exits_with_1_and_names_it(tmp_path, content):
    file = tmp_path/"chat.json"
    if content is not None:
        file.write_text(content)
    done = memloc("lint", file)
    assert done.exit_code == 1 and "chat.json" in done.stderr and "Traceback" not in done.stderr


def test_data_list():
    sources = json.loads(memloc("data", "list", "--json").stdout)
    assert {"locomo", "longmemeval_s"} <= set(sources) and all(source["licence"] for source in sources.values())
    assert "locomo10.json" in memloc("data", "list").stdout


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from memloc.toy import ToyTask, toy_samples, write_toy
    from memloc.verl_engine import keep_samples

    folder = tmp_path_factory.mktemp("policy")
    keep_samples(toy_samples(ToyTask(), 16, seed=3), folder/"samples.jsonl")
    return write_toy(folder/"sft")


def shpo_on_verl(policy, run, *more):
    return memloc("shpo", "small", "--engine", "verl", "--policy", policy, "--samples", policy.parent/"samples.jsonl", "--run", run, *more)


def test_a_dry_run_of_shpo_validates_every_stage_and_prints_its_commands(policy, tmp_path):
    import yaml

    run = tmp_path/"my run"
    done = shpo_on_verl(policy, run, "--gpus", "2", "--dry-run", "-s", "kl_coef=2e-2")
    assert done.exit_code == 0, done.output
    lines = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
    trainings, between, (whole,) = lines[1:6:2], lines[0:6:2], lines[6:]
    for stage, (training, before) in enumerate(zip(trainings, between, strict=True), 1):
        assert training[1:3] == ["-m", "verl.trainer.main_ppo"] and f"trainer.total_training_steps={20*stage}" in training
        assert before == [*whole, "--prepare", str(stage)]
        written = yaml.safe_load((run/"shpo"/f"stage{stage}"/"verl.yaml").read_text())
        assert (written["algorithm"]["adv_estimator"], written["trainer"]["n_gpus_per_node"]) == ("shpo", 2)
        assert written["actor_rollout_ref"]["actor"]["kl_loss_coef"] == 0.02 and written["actor_rollout_ref"]["model"]["path"] == str(policy)
        assert written["data"]["train_files"] == [str(run/"shpo"/f"stage{stage}"/"train.parquet")] and (run/"shpo"/f"stage{stage}"/"train.parquet").is_file()
    assert not (run/"shpo"/"settings.json").exists() and not (run/"shpo"/"checkpoints").exists()
    assert memloc(*whole[1:], "--prepare", 1).stdout.strip() == str(run/"shpo"/"stage1"/"train.parquet")  # as printed
    early = memloc(*whole[1:], "--prepare", 2)
    assert early.exit_code == 1 and "run the command of the stage before first" in early.stderr


@pytest.mark.parametrize("more, words", [
    (["--policy", "absent"], "the one that the cold start leaves"), (["-s", "kl_coeff=1"], "'kl_coeff' is no setting"), (["--gpus", "3"], "change batch_size or micro_batch_size"),
    (["--data", "."], "not both"), (["-s", "max_prompt_length=20"], "raise max_prompt_length to"), (["--prepare", "4"], "stage 4 does not exist"),
    (["-s", "batch_size=32", "-s", "mini_batch_size=32", "--dry-run"], "16 samples do not fill one batch of 32"), (["--engine", "ray"], "choose one of cpu, verl"),
])
def test_what_is_wrong_with_shpo_on_verl_is_said_with_its_remedy(policy, tmp_path, more, words):
    done = shpo_on_verl(policy, tmp_path/"run", *(more if words.startswith(("stage", "16")) else [*more, "--dry-run"]))
    assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments, words", [
    (["sample", "--engine", "verl"], "choose one of small, paper"), (["--engine", "verl"], "--policy None"), (["sample", "--gpus", "8"], "add --engine verl"),
    (["--prepare", "1"], "add --engine verl"), (["-s", "seed"], "key=value"),
])
def test_wrong_options_of_shpo_are_refused(project, monkeypatch, arguments, words):
    monkeypatch.chdir(project)
    done = memloc("shpo", *arguments)
    assert done.exit_code == 2 and words in done.stderr and not (project/"runs").exists()


def test_without_cards_the_engine_verl_says_so_and_starts_nothing(policy, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = shpo_on_verl(policy, tmp_path/"run")
    assert done.exit_code == 1 and "0 of 1 cards are here" in done.stderr and "--dry-run" in done.stderr
    assert not (tmp_path/"run").exists()


def test_shpo_on_the_cpu_gets_its_profile_and_its_changes(tmp_path, monkeypatch):
    import polars as pl

    from memloc import shpo

    asked = []
    monkeypatch.setattr(shpo, "shpo_profile", lambda profile, changes: asked.append((profile, changes)) or shpo.ShpoConfig())
    monkeypatch.setattr(shpo, "run_shpo", lambda config, folder, until=None: asked.append((config, folder)) or pl.DataFrame({"system": ["start"], "reward": [0.5]}))
    done = memloc("shpo", "--run", tmp_path/"run", "-s", "seed=7", "--policy", tmp_path/"sft", "--data", "locomo10.json")
    assert done.exit_code == 0 and json.loads(done.stdout) == [{"system": "start", "reward": 0.5}]
    assert asked == [("sample", {"seed": 7, "policy": str(tmp_path/"sft"), "dialogue": str(Path.cwd()/"locomo10.json")}), (shpo.ShpoConfig(), tmp_path/"run")]
    assert json.loads(memloc("shpo", "--run", tmp_path/"run", "--dry-run").stdout)["algorithm"] == "shpo" and len(asked) == 3


def test_version():
    assert memloc("version").stdout.startswith("memloc 0.")
    assert json.loads(memloc("version", "--json").stdout)["libraries"]["numpy"].startswith("1.26")


def test_the_command_starts_light():
    heavy = ["torch", "transformers", "matplotlib", "graspologic", "papermill", "nbformat", "polars"]
    code = f"import sys, memloc.cli; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
