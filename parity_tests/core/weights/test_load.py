"""`load`: bit for bit, by name, strict, only what is asked for, and all or nothing."""

import builtins

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from flax_attn import TransformerMultiHeadAttention
from flax_attn.parity import port
from flax_attn.weights import Rule, load, load_stacked, save
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.known_layers import flax_state
from flax_attn.weights.safetensors import write_file

from .files import alike, gqa, plain, refused, same, torch_values


def test_linear_weights_are_transposed_from_torch(tmp_path):
    path, there = tmp_path / "m.safetensors", torch_values()
    write_file(path, there)
    layer = plain()
    load(layer, path)
    for name, value in there.items():
        held = getattr(layer, name.removesuffix(".weight"))
        assert same(np.asarray(held.kernel[...]), np.ascontiguousarray(value.T))
    save(layer, tmp_path / "again.safetensors")
    again = Checkpoint(tmp_path / "again.safetensors", None, False)
    assert all(same(again.read(name), value) for name, value in there.items())


def matrices(attention):
    """The projections of an attention of transformers, as float32, which holds bfloat16."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {name: getattr(attention, name).weight.detach().float().numpy() for name in names}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_of_a_sharded_llama_of_transformers(dtype, tmp_path):
    torch = pytest.importorskip("torch", reason="writes the checkpoint")
    transformers = pytest.importorskip("transformers", reason="writes the checkpoint")
    config = transformers.LlamaConfig(
        hidden_size=12,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
        intermediate_size=9,
        num_hidden_layers=3,
        vocab_size=7,
    )
    theirs = transformers.LlamaModel(config).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    want = [
        {name: np.ascontiguousarray(x.T) for name, x in matrices(layer.self_attn).items()}
        for layer in theirs.layers
    ]
    layer = plain(param_dtype=dtype)
    load(layer, tmp_path, prefix="layers.2.self_attn")
    make = nnx.vmap(lambda key: plain(key, param_dtype=dtype))
    layers = make(jax.random.split(jax.random.key(0), 3))
    load_stacked(layers, tmp_path, "layers.{}.self_attn")
    for name, value in want[2].items():
        held, stacked = getattr(layer, name).kernel[...], getattr(layers, name).kernel[...]
        assert held.dtype == stacked.dtype == dtype
        assert same(np.asarray(held, np.float32), value)
        assert same(np.asarray(stacked, np.float32), np.stack([one[name] for one in want]))
    whole = plain(param_dtype=dtype)
    error = refused(whole, tmp_path, "do not fit", prefix="layers.2")
    assert "self_attn.q_proj.weight" in error.reason
    assert error.hint == "Pass prefix='layers.2.self_attn'."


def test_one_layer_is_read_without_the_rest(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    layers = {f"layers.{i}.{n}": v for i in range(5) for n, v in torch_values(i).items()}
    rest = np.zeros(1_000_000, np.float32)
    write_file(path, {"embed": rest, **layers})
    read, plain_open = [], builtins.open

    def counted(file, mode="r", *args, **kwargs):
        opened = plain_open(file, mode, *args, **kwargs)
        return Counting(opened, read) if file == path else opened

    monkeypatch.setattr(builtins, "open", counted)
    layer = plain()
    load(layer, path, prefix="layers.3")
    monkeypatch.undo()
    assert same(np.asarray(layer.q_proj.kernel[...].T), torch_values(3)["q_proj.weight"])
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert sum(read) == header + sum(x.nbytes for x in torch_values().values())


class Counting:
    """A file that notes how many bytes were read of it."""

    def __init__(self, file, counts):
        self.file, self.counts = file, counts

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.file.close()

    def fileno(self):
        return self.file.fileno()

    def seek(self, at):
        return self.file.seek(at)

    def read(self, size):
        self.counts.append(len(raw := self.file.read(size)))
        return raw

    def readinto(self, memory):
        self.counts.append(size := self.file.readinto(memory))
        return size


WRONG = {
    "a tensor missing": (lambda v: v.pop("k_proj.weight"), "k_proj.kernel .* filled by nothing"),
    "a tensor too many": (lambda v: v.update(x=np.zeros(3, np.float32)), r"x \[3\] goes to x"),
    "a bias too many": (
        lambda v: v.update({"o_proj.bias": np.zeros(12, np.float32)}),
        "o_proj.bias",
    ),
    "another shape": (
        lambda v: v.update({"k_proj.weight": np.zeros((13, 12), np.float32)}),
        r"k_proj.weight \[13, 12\] would fill k_proj.kernel as \[12, 13\]",
    ),
    "another dtype": (
        lambda v: v.update({"k_proj.weight": np.zeros((12, 12), np.float16)}),
        'k_proj.weight is float16 and k_proj.kernel is float32.*cast="widen"',
    ),
    "whole numbers": (
        lambda v: v.update({"k_proj.weight": np.zeros((12, 12), np.int32)}),
        "only floating",
    ),
    "one place twice": (
        lambda v: v.update({"k_proj.kernel": np.zeros((12, 12), np.float32)}),
        "filled twice",
    ),
    "NaN": (lambda v: v["v_proj.weight"].fill(np.nan), "NaN"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_failed_load_leaves_the_layer_unchanged(fault, tmp_path):
    change, told = WRONG[fault]
    there = torch_values()
    change(there)
    write_file(tmp_path / "m.safetensors", there)
    refused(plain(), tmp_path / "m.safetensors", told)


@pytest.mark.parametrize("renamed, to", [("o_proj", "dense"), ("v_proj", "value")])  # v: square
def test_all_problems_are_told_at_once_with_the_rules_that_may_be_meant(renamed, to, tmp_path):
    there = {name.replace(renamed, to): x for name, x in torch_values().items()}
    there["k_proj.weight"] = there["k_proj.weight"].astype(np.float16)
    write_file(tmp_path / "m.safetensors", there)
    error = refused(plain(), tmp_path / "m.safetensors", "do not fit")
    for told in (f"{to}.weight", f"{renamed}.kernel", "k_proj.weight is float16"):
        assert told in error.reason
    assert error.hint == f'\nyou may mean:\n  Rule("{to} -> {renamed}")'
    rules, layer = [Rule(f"{to} -> {renamed}")], plain()
    load(layer, tmp_path / "m.safetensors", cast="widen", rules=rules)
    kernel = getattr(layer, renamed).kernel
    assert same(np.asarray(kernel[...].T), there[f"{to}.weight"])


@pytest.mark.parametrize("name", ["v.{a", "v.{a,b}", "v.*", "v -> v_proj", "v, w", "(v)"])
def test_names_that_no_rule_can_say_are_refused_as_others_are(name, tmp_path):
    there = torch_values()
    there[name] = there.pop("v_proj.weight")
    write_file(tmp_path / "m.safetensors", there)
    error = refused(plain(), tmp_path / "m.safetensors", "do not fit")
    assert name in error.reason and not error.hint


@pytest.mark.nightly
def test_a_prefix_that_nothing_has(tmp_path):
    write_file(tmp_path / "m.safetensors", torch_values())
    refused(plain(), tmp_path / "m.safetensors", "begins with 'layers.0.'", prefix="layers.0")
    many = {f"x.{i}": np.zeros(0, np.float32) for i in range(10_001)}
    write_file(tmp_path / "m.safetensors", many)
    refused(plain(), tmp_path / "m.safetensors", "too many for a layer")


def test_a_prefix_ends_where_a_name_does(tmp_path):
    there = {f"layers.{i}.{n}": v for i in (1, 10, 11) for n, v in torch_values(i).items()}
    write_file(tmp_path / "m.safetensors", there)
    layer = plain()
    load(layer, tmp_path / "m.safetensors", prefix="layers.1")
    assert same(np.asarray(layer.q_proj.kernel[...].T), torch_values(1)["q_proj.weight"])


CASTS = [
    ("float32", "float32", {"exact", "widen", "narrow"}),
    ("bfloat16", "float32", {"widen", "narrow"}),
    ("float16", "float32", {"widen", "narrow"}),
    ("float32", "bfloat16", {"narrow"}),
    ("float16", "bfloat16", {"narrow"}),
    ("bfloat16", "float16", {"narrow"}),
]


@pytest.mark.nightly(but=["bfloat16-float16-allowed5-widen"])
@pytest.mark.parametrize("cast", ["exact", "widen", "narrow"])
@pytest.mark.parametrize("have, want, allowed", CASTS)
def test_dtypes_are_cast_only_if_asked(have, want, allowed, cast, tmp_path):
    dtypes = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in (have, want)}
    there = torch_values(dtype=dtypes[have])
    write_file(tmp_path / "m.safetensors", there)
    layer = plain(param_dtype=want)
    if cast in allowed:
        load(layer, tmp_path / "m.safetensors", cast=cast)
        expected = np.ascontiguousarray(there["k_proj.weight"].astype(dtypes[want]).T)
        assert same(np.asarray(layer.k_proj.kernel[...]), expected)
    else:
        refused(layer, tmp_path / "m.safetensors", "param_dtype", cast=cast)


@pytest.mark.nightly
def test_a_value_that_overflows_is_refused(tmp_path):
    there = torch_values()
    there["v_proj.weight"][3, 4] = 1e5
    write_file(tmp_path / "m.safetensors", there)
    layer = plain(param_dtype=jnp.float16)
    error = refused(layer, tmp_path / "m.safetensors", "overflows float16", cast="narrow")
    assert error.tensor == "v_proj.weight"
    there["v_proj.weight"][3, 4] = np.inf
    write_file(tmp_path / "m.safetensors", there)
    load(layer, tmp_path / "m.safetensors", cast="narrow", allow_nonfinite=True)
    assert np.isinf(layer.v_proj.kernel[4, 3])


def test_tensors_are_left_out_or_tied_by_rules_alone(tmp_path):
    path, there = tmp_path / "m.safetensors", torch_values()
    write_file(path, {**there, "again.weight": there["k_proj.weight"], "freq": np.zeros(2)})
    tied, skip = Rule.tied("again.weight -> k_proj.weight"), Rule.skip("freq")
    refused(plain(), path, "again.weight", rules=[skip])
    refused(plain(), path, "freq", rules=[tied])
    load(plain(), path, rules=[tied, skip])
    write_file(path, {**there, "again.weight": there["k_proj.weight"] + 1, "freq": np.zeros(2)})
    refused(plain(), path, "again.weight and k_proj.weight are not one", rules=[tied, skip])


def test_a_packed_torch_attention_goes_to_three_projections(tmp_path):
    torch = pytest.importorskip("torch", reason="the packed attention")

    theirs = torch.nn.MultiheadAttention(12, 3)
    there = {name: value.numpy() for name, value in theirs.state_dict().items()}
    write_file(tmp_path / "m.safetensors", there)
    one, other = (TransformerMultiHeadAttention(12, 3, rngs=nnx.Rngs(i)) for i in (0, 1))
    load(one, tmp_path / "m.safetensors")
    assert alike(one, port(theirs, other))


@pytest.mark.nightly
def test_an_abstract_layer_is_filled(tmp_path):
    one, other = gqa(0), nnx.eval_shape(lambda: gqa(1))
    save(one, tmp_path / "m.safetensors")
    load(other, tmp_path / "m.safetensors")
    assert alike(one, other)
    x = jnp.ones((2, 5, 12))
    assert (one(x) == other(x)).all()


def test_max_bytes_counts_what_the_layer_reads(tmp_path):
    path, size = tmp_path / "m.safetensors", sum(x.nbytes for x in torch_values().values())
    write_file(path, {**torch_values(), "rest": np.zeros(999, np.float32)})
    skip = [Rule.skip("rest")]
    load(plain(), path, rules=skip, max_bytes=size)
    refused(plain(), path, f"{size} bytes, more than max_bytes", rules=skip, max_bytes=size - 1)


def test_bad_arguments(tmp_path):
    path = tmp_path / "m.safetensors"
    save(plain(), path)
    for given, told in (
        ({"cast": "any"}, "cast must be one of exact, widen, narrow"),
        ({"sharding": {"q.kernel": None}}, "does not have; nearest: q_proj.kernel"),
    ):
        with pytest.raises(ValueError, match=told):
            load(plain(), path, **given)
    for run in (lambda: load({}, path), lambda: save({}, path)):
        with pytest.raises(TypeError, match=r"must be a flax.nnx.Module; got dict"):
            run()
    with pytest.raises(TypeError, match="holds Rule objects; got 'a -> b'"):
        load(plain(), path, rules=["a -> b"])


def test_arrays_stay_where_the_layer_was(tmp_path):
    save(plain(0), tmp_path / "m.safetensors")
    layer = plain(1)
    load(layer, tmp_path / "m.safetensors")
    assert not any(x.get_value().committed for x in flax_state(layer).values())
