"""The cold start: mask, truncation, determinism, a killed training, metrics, the model folder, several processes."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from memloc import sft
from memloc.artifacts import stage_manifest, stage_table
from memloc.chat import LLMError, Reply
from memloc.cli import app
from memloc.ids import parse_reply
from memloc.llm import LocalModel
from memloc.sft import (
    IGNORED,
    PROFILES,
    SFTConfig,
    evaluate_locator,
    fsdp_settings,
    id_scores,
    lexical_rows,
    load_network,
    prepare,
    read_log,
    reader_of,
    reply_row,
    run_sft,
    sample_tokens,
    score_means,
    start_folder,
    tokenize_sample,
    train_network,
    trainer_arguments,
    training_samples,
    without_segment,
)
from memloc.toy import ToyTask, draw_sample, toy_samples, write_toy

QUESTIONS = Path(__file__).resolve().parent.parent.parent/"shared"/"data"/"multihop"
TINY = SFTConfig(n_samples=160, n_heldout=6)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return reader_of(str(write_toy(tmp_path_factory.mktemp("toy")/"start")))


def trained(reader, config, folder):
    "Train on the toy's samples and return the trainer."
    train, dev = (prepare(reader, part, config.max_length).tokens for part in training_samples(config)[:2])
    return train_network(load_network(reader, config), reader, config, train, dev, folder)


def losses(folder):
    return read_log(folder/"log.jsonl").select("step", "kind", "loss").rows()


class TestMask:
    def test_the_loss_is_the_mean_over_completion_tokens(self, reader, tmp_path):
        trainer = trained(reader, replace(TINY, n_samples=32), tmp_path)
        tokens = [sample_tokens(reader, sample) for sample in toy_samples(ToyTask(), 5, seed=3)]
        batch = trainer.data_collator([{"input_ids": each.input_ids, "labels": each.labels} for each in tokens])
        network = trainer.model.eval()
        by_hand = []
        for each in tokens:
            logits = network(torch.tensor([each.input_ids])).logits[0].detach().double()
            for place, counts in enumerate(each.completion_mask):
                if counts:
                    by_hand.append(float(torch.logsumexp(logits[place - 1], 0) - logits[place - 1, each.input_ids[place]]))
        assert len(by_hand) == sum(each.n_completion for each in tokens) == int((batch["labels"] != IGNORED).sum())
        assert trainer.compute_loss(network, dict(batch)).item() == pytest.approx(np.mean(by_hand), rel=1e-5)

    def test_prompt_tokens_get_no_gradient(self, reader):
        network = load_network(reader, TINY)
        tokens = sample_tokens(reader, toy_samples(ToyTask(), 1)[0])
        logits = network(torch.tensor([tokens.input_ids])).logits
        logits.retain_grad()
        network.loss_function(logits, torch.tensor([tokens.labels]), network.config.vocab_size).backward()
        touched = logits.grad[0].abs().sum(-1) > 0
        assert touched.int().tolist() == [*tokens.completion_mask[1:], 0]  # each position predicts the next token

    def test_what_the_prompt_asks_for_is_never_a_label(self, reader):
        network, sample = load_network(reader, TINY), toy_samples(ToyTask(), 1)[0]
        tokens = sample_tokens(reader, sample)
        before = network(torch.tensor([tokens.input_ids]), labels=torch.tensor([tokens.labels])).loss
        assert all(label == IGNORED for label, mask in zip(tokens.labels, tokens.completion_mask, strict=True) if not mask)
        everything = network(torch.tensor([tokens.input_ids]), labels=torch.tensor([tokens.input_ids])).loss
        counted = sum(label != IGNORED for label in tokens.labels)
        assert counted == tokens.n_completion < len(tokens.input_ids) and everything.item() != pytest.approx(before.item(), rel=1e-3)

    def test_the_completion_is_the_target_and_an_end(self, reader):
        for sample in toy_samples(ToyTask(), 50):
            tokens = sample_tokens(reader, sample)
            assert tokens.input_ids[:-tokens.n_completion] == reader.encode(sample.messages)
            assert reader.tokenizer.decode(tokens.input_ids[-tokens.n_completion:-1]) == sample.target
            assert reader.tokenizer.convert_ids_to_tokens(tokens.input_ids[-1]) == reader.tokenizer.eos_token == "<end>"

    def test_a_template_without_an_end_is_refused(self, tmp_path):
        model = LocalModel(str(write_toy(tmp_path/"toy")))
        model.tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
        with pytest.raises(ValueError, match="no special token"):
            sample_tokens(model, toy_samples(ToyTask(), 1)[0])

    def test_small_pieces_of_a_batch_give_the_same_training(self, reader, tmp_path):
        for size in (32, 8):
            trained(reader, replace(TINY, n_samples=96, micro_batch_size=size), tmp_path/str(size))
        one, four = ([row[2] for row in losses(tmp_path/str(size)) if row[1] == "dev"] for size in (32, 8))
        assert one == pytest.approx(four, rel=1e-4)

    def test_the_development_loss_is_the_mean_over_samples(self, reader, tmp_path):
        trainer = trained(reader, replace(TINY, n_samples=32), tmp_path)
        dev = prepare(reader, training_samples(TINY).dev, TINY.max_length).tokens
        network, by_hand = trainer.model.eval(), []
        for each in dev:
            logits = network(torch.tensor([each.input_ids])).logits[0].detach().double().log_softmax(-1)
            by_hand.append(-np.mean([float(logits[place - 1, each.input_ids[place]]) for place, counts in enumerate(each.completion_mask) if counts]))
        assert [row[2] for row in losses(tmp_path) if row[1] == "dev"][-1] == pytest.approx(np.mean(by_hand), rel=1e-4)


class TestTruncation:
    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 10**6), n=st.integers(2, 9), room=st.integers(20, 80))
    def test_neither_evidence_nor_completion_is_ever_cut(self, reader, seed, n, room):
        sample = draw_sample(ToyTask(n_segments=(2, 9)), n, np.random.default_rng(seed))
        fitted = tokenize_sample(reader, sample, room)
        if fitted is None:
            distractors = [number for number in range(1, n + 1) if number not in sample.gold]
            for number in reversed(distractors[1:] if not sample.gold else distractors):
                sample = without_segment(sample, number)
            assert len(sample_tokens(reader, sample).input_ids) > room
            return
        tokens, shown = fitted
        assert len(tokens.input_ids) <= room
        assert [shown.segments[i - 1] for i in shown.gold] == [sample.segments[i - 1] for i in sample.gold]
        assert [text for text in sample.segments if text in shown.segments] == list(shown.segments)
        assert tokens == sample_tokens(reader, shown)
        assert parse_reply(shown.target, range(1, len(shown.segments) + 1)).ids == shown.gold
        assert all(f'"{shown.segments[i - 1]}" [{i}]' in shown.reason for i in shown.gold)

    def test_a_digit_inside_a_quotation_is_not_renumbered(self):
        sample = draw_sample(ToyTask(negatives=0, chains=0), 4, np.random.default_rng(1))
        sample = replace(sample, segments=("long distractor", "Ana: room [4] at 3", "b", "c"), gold=(2,), reason='"Ana: room (4) at 3" [2].')
        assert without_segment(sample, 1).reason == '"Ana: room (4) at 3" [1].'
        with pytest.raises(ValueError, match="segment 2 is evidence"):
            without_segment(sample, 2)

    def test_what_had_to_go_is_counted(self, reader):
        samples = toy_samples(ToyTask(n_segments=(2, 9)), 300)
        counts = prepare(reader, samples, 48).counts
        lengths = [len(sample_tokens(reader, sample).input_ids) for sample in samples]
        assert counts["shortened"] + counts["left_out"] == sum(length > 48 for length in lengths) > 0
        assert counts["samples"] + counts["left_out"] == 300 and counts["longest"] <= 48
        with pytest.raises(ValueError, match="max_length=16"):
            prepare(reader, samples, 16)


class TestTraining:
    def test_two_trainings_have_the_same_losses(self, reader, tmp_path):
        for name in "ab":
            trained(reader, TINY, tmp_path/name)
        assert losses(tmp_path/"a") == losses(tmp_path/"b")
        trained(reader, replace(TINY, seed=14), tmp_path/"c")
        assert losses(tmp_path/"a") != losses(tmp_path/"c")

    def test_a_killed_training_goes_on_where_it_was(self, reader, tmp_path, monkeypatch):
        whole = trained(reader, TINY, tmp_path/"whole")
        keep = sft.keep_log

        def dying(path):
            callback = keep(path)
            callback.on_step_begin = lambda args, state, control, **_: (_ for _ in ()).throw(KeyboardInterrupt) if state.global_step == 4 else None
            return callback

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sft, "keep_log", dying)
            trained(reader, TINY, tmp_path/"killed")
        assert (tmp_path/"killed"/"checkpoint-4").is_dir()
        with (tmp_path/"killed"/"log.jsonl").open("a") as file:
            file.write('{"step": 5, "kind": "tra')  # the power went off while a line was written
        resumed = trained(reader, TINY, tmp_path/"killed")
        assert resumed.state.global_step == whole.state.global_step == 5
        assert [row for row in losses(tmp_path/"killed") if row[1] == "dev"] == [row for row in losses(tmp_path/"whole") if row[1] == "dev"]
        for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, two)

    @pytest.mark.parametrize("part", ["optimizer.pt", "trainer_state.json"])
    def test_a_checkpoint_cut_off_by_a_kill_is_passed_over(self, reader, tmp_path, monkeypatch, part):
        from transformers import Trainer, TrainerState

        whole = trained(reader, TINY, tmp_path/"whole")

        def killed(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            saved = Trainer._save_optimizer_and_scheduler

            def save(self, folder):
                (killed if self.state.global_step == 4 and part == "optimizer.pt" else saved)(self, folder)

            patch.setattr(Trainer, "_save_optimizer_and_scheduler", save)
            written = TrainerState.save_to_json

            def write(self, path):
                if self.global_step == 4 and part == "trainer_state.json":
                    Path(path).write_text('{"half')
                    killed()
                written(self, path)

            patch.setattr(TrainerState, "save_to_json", write)
            trained(reader, TINY, tmp_path/"killed")
        assert (tmp_path/"killed"/"checkpoint-4").is_dir() and sft.last_checkpoint(tmp_path/"killed").name == "checkpoint-3"
        resumed = trained(reader, TINY, tmp_path/"killed")
        for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, two)

    @pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"precision": "bfloat16"}])
    def test_options_change_cost_not_learning(self, reader, tmp_path, changes):
        short = replace(TINY, n_samples=64)
        trained(reader, short, tmp_path/"plain")
        trained(reader, replace(short, **changes), tmp_path/"changed")
        plain, changed = (losses(tmp_path/name)[-1][2] for name in ("plain", "changed"))
        assert changed == pytest.approx(plain, rel=1e-5 if "gradient_checkpointing" in changes else 0.02)

    def test_the_library_is_told_everything_that_it_would_choose_otherwise(self, tmp_path):
        arguments = trainer_arguments(replace(PROFILES["paper"], data="x", precision="float32"), tmp_path)
        assert not arguments.bf16 and not arguments.packing and arguments.max_length is None and arguments.gradient_checkpointing
        assert arguments.gradient_accumulation_steps == 16 and arguments.lr_scheduler_type == "cosine"
        assert trainer_arguments(SFTConfig(), tmp_path).train_sampling_strategy == "sequential"
        assert not trainer_arguments(SFTConfig(), tmp_path).gradient_checkpointing

    def test_batches_that_processes_cannot_share_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(ValueError, match="3 processes"):
            trainer_arguments(SFTConfig(micro_batch_size=16), tmp_path)


class TestStage:
    def test_the_stage_leaves_a_model_that_the_locator_takes_by_path(self, tmp_path):
        summary = run_sft(replace(TINY, n_heldout=4), tmp_path)
        assert summary["system"].to_list() == ["untrained", "trained", "lexical top-1", "lexical top-2", "lexical top-3"]
        assert not (tmp_path/"sft"/"work").exists() and not list((tmp_path/"sft").glob(".*"))
        manifest = stage_manifest(tmp_path, "sft")
        assert manifest["settings"]["n_samples"] == 160 and manifest["counts"] == {"samples": 160, "shortened": 0, "left_out": 0, "steps": 5}
        rows = stage_table(tmp_path, "sft", "log")
        assert rows.filter(pl.col("kind") == "dev")["step"].to_list() == [1, 2, 3, 4, 5]
        model = LocalModel(str(tmp_path/"sft"/"model"))
        start = load_network(LocalModel(str(write_toy(tmp_path/"start"))), TINY)
        assert not torch.equal(model.model.model.embed_tokens.weight, start.model.embed_tokens.weight)
        held = stage_table(tmp_path, "sft", "heldout").filter(pl.col("system") == "trained").sort("sample_id")
        again = evaluate_locator(model, training_samples(replace(TINY, n_heldout=4)).test, "trained", 41).sort("sample_id")
        assert again["reply"].to_list() == held["reply"].to_list()

    def test_a_stage_killed_after_training_only_measures(self, tmp_path, monkeypatch):
        config, real = replace(TINY, n_samples=32, n_heldout=3), sft.heldout_rows

        def killed(system, *rest):
            if system == "trained":
                raise KeyboardInterrupt
            return real(system, *rest)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sft, "heldout_rows", killed)
            run_sft(config, tmp_path)
        assert not (tmp_path/"sft"/"manifest.json").exists() and (tmp_path/"sft"/"model"/"config.json").is_file()
        monkeypatch.setattr(sft, "train_network", None)  # a second training would fail
        assert run_sft(config, tmp_path).height == 5

    def broken_off(self, config, folder, monkeypatch, after="untrained"):
        "A run that was killed after a measurement."
        real = sft.heldout_rows

        def killed(system, *rest):
            rows = real(system, *rest)
            if system == after:
                raise KeyboardInterrupt
            return rows

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sft, "heldout_rows", killed)
            run_sft(config, folder)

    @pytest.mark.parametrize("change", [{"seed": 14}, {"n_heldout": 4}, {"learning_rate": 1e-3}])
    def test_an_unfinished_training_is_finished_with_its_own_settings(self, tmp_path, monkeypatch, change):
        config = replace(TINY, n_samples=32, n_heldout=3)
        self.broken_off(config, tmp_path, monkeypatch)
        with pytest.raises(ValueError, match=f"other settings \\({next(iter(change))}\\)"):
            run_sft(replace(config, **change), tmp_path)
        with pytest.raises(ValueError, match="other max_steps"):
            run_sft(config, tmp_path, max_steps=1)
        assert run_sft(config, tmp_path).height == 5

    def test_a_start_without_its_data_does_not_stand_in_the_way(self, tmp_path, monkeypatch):
        small = replace(sft.PROFILES["small"], model="toy-folder")
        for data, error in (("", ValueError), (str(tmp_path/"nowhere"), FileNotFoundError)):
            with pytest.raises(error, match="DATA=folder"):
                run_sft(replace(small, data=data), tmp_path/"run")
        assert not (tmp_path/"run/sft").exists()
        monkeypatch.setattr(sft, "ready", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):  # noted, and nothing computed
            run_sft(TINY, tmp_path/"run")
        with pytest.raises(OSError, match="disk"):
            run_sft(replace(TINY, seed=1), tmp_path/"run")

    def test_data_or_weights_that_changed_meanwhile_are_refused(self, tmp_path, monkeypatch):
        config, real = replace(TINY, n_samples=32, n_heldout=3), sft.toy_splits
        self.broken_off(config, tmp_path, monkeypatch)
        for part in ("test", "dev", "train"):
            with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"other samples \\({part}\\)"):
                patch.setattr(sft, "toy_splits", lambda config, part=part: real(config)._replace(**{part: getattr(real(config), part)[:-1]}))
                run_sft(config, tmp_path)
        start = tmp_path/"sft"/"work"/"start"
        write_toy(start, seed=99)
        with pytest.raises(ValueError, match="other weights"):
            run_sft(config, tmp_path)

    def test_a_finished_run_is_left_alone(self, tmp_path, monkeypatch):
        config = replace(TINY, n_samples=32, n_heldout=3)
        first = run_sft(config, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(sft, "train_network", None)
            assert run_sft(config, tmp_path).equals(first)
            with pytest.raises(ValueError, match="finished training with other settings \\(seed\\)"):
                run_sft(replace(config, seed=14), tmp_path)
            with pytest.raises(ValueError, match="max_steps"):
                run_sft(config, tmp_path, max_steps=1)
        (tmp_path/"sft"/"heldout.parquet").unlink()  # damaged: made again
        assert run_sft(config, tmp_path).equals(first)
        shutil.rmtree(tmp_path/"sft"/"model")
        assert run_sft(config, tmp_path).equals(first) and (tmp_path/"sft"/"model"/"config.json").is_file()

    def test_a_second_training_in_the_same_folder_is_refused(self, tmp_path):
        from memloc.pipeline import locked

        code = f"from memloc.pipeline import locked\nimport time\nwith locked({str(tmp_path)!r}):\n    print('in', flush=True)\n    time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "in\n"
            with pytest.raises(RuntimeError, match="is writing into this run"):
                run_sft(replace(TINY, n_samples=32), tmp_path)
            other.kill()
        assert locked(tmp_path)

    def test_a_kill_while_the_old_model_is_replaced_heals(self, tmp_path, monkeypatch):
        config, real = replace(TINY, n_samples=32, n_heldout=3), os.rename
        (tmp_path/"sft"/"model").mkdir(parents=True)
        (tmp_path/"sft"/"model"/"model.safetensors").write_text("an older model")

        def killed(source, target):
            if Path(target).name == "model":
                raise KeyboardInterrupt
            real(source, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sft.os, "rename", killed)
            run_sft(config, tmp_path)
        assert run_sft(config, tmp_path).height == 5 and (tmp_path/"sft"/"model"/"config.json").is_file()
        assert sorted(path.name for path in (tmp_path/"sft").iterdir() if path.is_dir()) == ["model"]

    def test_the_measured_precision_is_measured_once(self, tmp_path, monkeypatch):
        config = replace(TINY, n_samples=32, n_heldout=3, precision="measured")
        self.broken_off(config, tmp_path, monkeypatch)
        chosen = json.loads((tmp_path/"sft"/"work"/"training.json").read_text())["precision"]
        monkeypatch.setattr(sft, "choose_dtype", lambda *_: pytest.fail("measured again"))
        run_sft(config, tmp_path)
        assert stage_manifest(tmp_path, "sft")["settings"]["precision"] == chosen and run_sft(config, tmp_path).height == 5

    def test_what_was_left_out_is_in_the_report(self, tmp_path):
        run_sft(replace(TINY, n_samples=64, n_heldout=3, max_length=46), tmp_path)
        report = json.loads((tmp_path/"sft"/"report.json").read_text())
        assert report["splits"]["train"]["shortened"] > 0 and report["questions"]["generated"] > 64 and report["date"]
        weights = json.loads((tmp_path/"sft"/"weights.json").read_text())
        assert set(weights["start"]) & set(weights["trained"]) and weights["start"] != weights["trained"]

    @pytest.mark.parametrize("harm", ["weights", "template", "empty"])
    def test_a_broken_model_folder_is_named(self, tmp_path, harm):
        folder = write_toy(tmp_path/"toy")
        if harm == "weights":
            (folder/"model.safetensors").write_bytes(b"no weights")
        elif harm == "template":
            (folder/"chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
        else:
            folder = tmp_path/"empty"
            folder.mkdir()
        with pytest.raises(ValueError, match=str(folder)):
            load_network(reader_of(str(folder)), TINY)

    def test_lora_ends_as_an_ordinary_model(self, tmp_path):
        run_sft(replace(TINY, n_samples=96, n_heldout=3, lora_rank=4), tmp_path)
        assert not [path.name for path in (tmp_path/"sft"/"model").iterdir() if "adapter" in path.name]
        own = load_network(LocalModel(str(tmp_path/"sft"/"model")), TINY).state_dict()
        start = load_network(LocalModel(str(write_toy(tmp_path/"start"))), TINY).state_dict()
        moved = [name for name in own if not torch.equal(own[name], start[name])]
        assert moved and all("proj" in name for name in moved)

    def test_frozen_layers_keep_their_weights_and_the_others_learn(self, reader, tmp_path):
        config = replace(TINY, n_samples=64, frozen_layers=1)
        before = load_network(reader, TINY)
        network = trained(reader, config, tmp_path).model
        moved = {name: not torch.equal(value, dict(before.named_parameters())[name]) for name, value in network.named_parameters()}
        assert moved == {name: "layers.0." not in name and "embed" not in name for name in moved} and any(moved.values())
        with pytest.raises(ValueError, match="has 2 layers"):
            load_network(reader, replace(TINY, frozen_layers=2))
        with pytest.raises(ValueError, match="exclude each other"):
            replace(TINY, frozen_layers=1, lora_rank=4)

    def test_a_model_that_is_nowhere(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no-such/model"):
            start_folder("no-such/model", tmp_path)

    @pytest.mark.slow
    def test_the_sample_profile_learns(self, tmp_path):
        untrained, learned = (row for row in run_sft(PROFILES["sample"], tmp_path).to_dicts()[:2])
        assert untrained["exact"] < 0.05 and learned["exact"] >= 0.6 and learned["well_formed"] >= 0.99


class TestMetrics:
    sample = replace(draw_sample(ToyTask(negatives=0, chains=0), 4, np.random.default_rng(0)), gold=(2, 3), answer="tea, maps")

    def row(self, text, sample=None):
        return reply_row("x", sample or self.sample, Reply(text, n_completion_tokens=7))

    def test_a_right_reply(self):
        row = self.row("<reason>r</reason><id>3, 2</id><answer>tea, maps</answer>")
        assert [row[name] for name in sft.SCORES] == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 7.0]

    @pytest.mark.parametrize(("reply", "well_formed", "f1"), [
        ("<reason>r</reason><id>2</id><answer>tea</answer>", 1.0, 2/3), ("<id>2, 3</id>", 0.0, 1.0), ("2 and 3", 0.0, 0.0), ("", 0.0, 0.0),
        ("<reason>r</reason><id>2, 3, 9</id><answer>a</answer>", 0.0, 1.0), ("<reason>r</reason><id>none</id><answer>unknown</answer>", 1.0, 0.0)])
    def test_form_and_ids_are_two_things(self, reply, well_formed, f1):
        row = self.row(reply)
        assert row["well_formed"] == well_formed and row["f1"] == pytest.approx(f1)

    def test_an_unreadable_reply_is_not_the_same_as_none(self):
        negative = replace(self.sample, gold=(), answer="unknown")
        assert self.row("I cannot say.", negative)["exact"] == 0.0
        assert self.row("<reason>r</reason><id>none</id><answer>unknown</answer>", negative)["exact"] == 1.0
        assert reply_row("x", negative, LLMError("empty", "nothing"))["status"] == "error: empty"

    @given(st.sets(st.integers(1, 6)), st.sets(st.integers(1, 6)))
    def test_scores_against_a_slow_definition(self, predicted, gold):
        scores = id_scores(predicted, gold)
        both = [number for number in range(1, 7) if number in predicted and number in gold]
        if predicted and gold:
            precision, recall = len(both)/len(predicted), len(both)/len(gold)
            assert scores["precision"] == precision and scores["recall"] == recall
            assert scores["f1"] == pytest.approx(2*precision*recall/(precision + recall) if both else 0)
        assert scores["exact"] == float(predicted == gold)

    def test_lexical_rows_name_what_shares_words(self):
        sample = replace(self.sample, question="Where is the harbour?", segments=("tea", "the old harbour", "harbour fog harbour", "maps"), gold=(2, 3))
        assert lexical_rows([sample])["exact"].to_list() == [1.0]
        assert score_means(lexical_rows([replace(sample, question="zebra")]))["recall"][0] == 0.0


class TestFigures:
    def test_figures_come_from_the_rows(self, tmp_path):
        run_sft(replace(TINY, n_samples=32, n_heldout=5), tmp_path)
        rows, paired = sft.heldout_figures(stage_table(tmp_path, "sft", "heldout"), "toy@13", "2026-11-30", "abcdef0")
        report = {row["system"]: row for row in json.loads((tmp_path/"sft"/"report.json").read_text())["heldout"]}
        for row in rows.filter(pl.col("split") == "test").iter_rows(named=True):
            scale = 100 if row["metric"] in sft.PERCENT else 1
            assert row["value"] == pytest.approx(scale*report[row["system"]][row["metric"]], abs=0.01) and row["low"] <= row["value"] <= row["high"]
        assert set(paired["against"]) == {"untrained", "lexical top-1", "lexical top-2", "lexical top-3"} and set(paired["system"]) == {"trained"}
        held = {(r["system"], r["metric"]): r["value"] for r in rows.filter(pl.col("split") == "test").iter_rows(named=True)}
        for row in paired.iter_rows(named=True):
            assert row["difference"] == pytest.approx(held["trained", row["metric"]] - held[row["against"], row["metric"]], abs=0.01)

    def test_figures_of_changed_code_are_not_kept(self, tmp_path, monkeypatch):
        run_sft(replace(TINY, n_samples=32, n_heldout=3), tmp_path/"run")
        manifest = json.loads((tmp_path/"run"/"sft"/"manifest.json").read_text())
        for commit, kept in (("abcdef0", True), ("abcdef0+changes", False)):
            (tmp_path/"run"/"sft"/"manifest.json").write_text(json.dumps(manifest | {"commit": commit}))
            if kept:
                assert sft.keep_sft(tmp_path/"run", tmp_path/"kept.csv") > 20
                assert json.loads((tmp_path/"kept.json").read_text())["settings"]["n_samples"] == 32 and (tmp_path/"kept-paired.csv").is_file()
            else:
                with pytest.raises(ValueError, match="commit the changes"):
                    sft.keep_sft(tmp_path/"run", tmp_path/"no.csv")


class TestProfiles:
    def test_the_paper_profile_holds_the_papers_values(self):
        paper = PROFILES["paper"]
        assert (paper.model, paper.n_samples, paper.epochs, paper.learning_rate) == ("Qwen/Qwen3-8B", 4000, 5.0, 1e-5)

    def test_accelerate_accepts_the_settings(self, tmp_path):
        from accelerate.commands.config.config_args import load_config_from_file
        from accelerate.utils import FullyShardedDataParallelPlugin

        found = fsdp_settings(PROFILES["paper"], 8)
        (tmp_path/"fsdp.yaml").write_text(yaml.safe_dump(found))
        read = load_config_from_file(str(tmp_path/"fsdp.yaml"))
        assert (read.num_processes, str(read.distributed_type.value), read.mixed_precision) == (8, "FSDP", "bf16")
        known = {f"fsdp_{name}" for name in FullyShardedDataParallelPlugin.__dataclass_fields__} | {"fsdp_version", "fsdp_offload_params"}
        assert set(found["fsdp_config"]) <= known
        found["no_such_key"] = 1
        (tmp_path/"fsdp.yaml").write_text(yaml.safe_dump(found))
        with pytest.raises(ValueError, match="no_such_key"):
            load_config_from_file(str(tmp_path/"fsdp.yaml"))

    def test_a_dry_run_prints_settings_and_commands_and_does_nothing(self, tmp_path):
        done = CliRunner().invoke(app, ["train-sft", "paper", "--root", str(tmp_path), "--gpus", "8", "--dry-run", "-p", "data=questions"])
        assert done.exit_code == 0, done.output
        settings, _, rest = done.stdout.partition("\n# ")
        assert json.loads(settings)["n_samples"] == 4000
        first, second = rest.splitlines()[-2:]
        assert first.startswith("accelerate launch --config_file") and first.endswith(second) and second.startswith("memloc train-sft paper")
        assert not list(tmp_path.iterdir())

    def test_a_number_in_scientific_notation_is_a_number(self):
        assert sft.profile_config("sample", {"learning_rate": "1e-3"}).learning_rate == 1e-3

    @pytest.mark.parametrize("change", [{"epochs": float("inf")}, {"learning_rate": float("nan")}, {"seed": -1}, {"n_samples": 0}])
    def test_nonsense_is_refused(self, change):
        with pytest.raises(ValueError, match=next(iter(change))):
            replace(TINY, **change)

    @pytest.mark.parametrize("arguments", [["tiny"], ["sample", "--name", "a/b"], ["sample", "--name", "..", "--dry-run"], ["sample", "-p", "learning_rte=1"], ["sample", "-p", "n_samples=many"], ["small"],
                                           ["paper", "-p", "data=x", "-p", "lora_rank=8", "--gpus", "8"]])
    def test_wrong_commands_exit_with_2(self, tmp_path, arguments):
        done = CliRunner().invoke(app, ["train-sft", *arguments, "--root", str(tmp_path)])
        assert done.exit_code == 2 and "Traceback" not in done.stderr and done.stderr.strip()

    @pytest.mark.slow
    def test_two_processes_train_together(self, tmp_path):
        command = ["memloc", "train-sft", "sample", "--root", str(tmp_path), "-p", "n_samples=128", "-p", "micro_batch_size=16", "-p", "n_heldout=3"]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parent.parent)}
        launch = ["torchrun", "--standalone", "--nproc_per_node", "2", "--no-python"]  # accelerate starts no second process without a card
        done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        run = tmp_path/"runs"/"sft-sample"/"sft"
        assert (run/"work"/"trained").is_file() and (run/"model"/"config.json").is_file() and not (run/"manifest.json").exists()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and len(json.loads(done.stdout)) == 5 and (run/"manifest.json").is_file(), done.stderr[-2000:]


@pytest.mark.skipif(not QUESTIONS.is_dir(), reason="needs the question sets in ../shared/data/multihop")
class TestRealQuestions:
    @pytest.fixture(scope="class")
    def splits(self):
        return training_samples(replace(PROFILES["small"], data=str(QUESTIONS), n_samples=120, n_heldout=30))

    def test_splits_share_no_question_and_no_passage(self, splits):
        assert [len(part) for part in splits[:3]] == [120, sft.DEVELOPMENT, 30]
        assert splits.counts["questions"] == 3176 and splits.counts["set_aside"] > 100 and splits.counts["short_of_wanted"] == 0
        for one, two in ((splits.train, splits.dev), (splits.train, splits.test), (splits.dev, splits.test)):
            assert not {sample.question for sample in one} & {sample.question for sample in two}
            assert not {key for sample in one for key in sample.keys} & {key for sample in two for key in sample.keys}

    def test_all_sources_and_dialogue_are_in_the_training(self, splits):
        assert {sample.source for sample in splits.train} == {"hotpotqa", "musique", "2wikimultihopqa", "dialogue"}
        assert sum(sample.source == "dialogue" for sample in splits.train) == 12
        assert len({sample.sample_id.split("/")[0] for sample in splits.train if sample.source == "dialogue"}) > 1
        assert "dialogue" not in {sample.source for sample in splits.test}

    def test_too_few_questions_are_refused(self, tmp_path):
        record = {"_id": "1", "question": "Which?", "answer": "x", "supporting_facts": [["a", 0]], "context": [["a", ["x"]], ["b", ["y"]]]}
        (tmp_path/"hotpotqa.json").write_text(json.dumps([record]))
        with pytest.raises(ValueError, match="1 questions|leave nothing of 1 questions"):
            training_samples(replace(PROFILES["small"], data=str(tmp_path)))

    def test_real_samples_fit_with_their_evidence(self, splits, reader):
        from memloc.llm import smollm2_file

        smollm2_file()
        real = reader_of("smollm2")
        assert real.tokenizer.eos_token == "<|im_end|>"  # the packaged tokenizer names the start of a turn
        prepared = prepare(real, splits.train, 576)
        assert prepared.counts["left_out"] <= 6
        for tokens, shown in zip(prepared.tokens[:40], prepared.samples[:40], strict=True):
            assert real.tokenizer.decode(tokens.input_ids[-tokens.n_completion:]) == shown.target + "<|im_end|>"
            assert parse_reply(shown.target, range(1, len(shown.segments) + 1)).ids == shown.gold
