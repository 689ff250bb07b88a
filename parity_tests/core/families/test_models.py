"""Whole models equal those of transformers: folders read and written, gradients, greedy tokens."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.parity import compare, judge
from flax_attn.parity.sides.torch.float64 import lifted
from parity_tests.core.drawing import float64 as float64
from parity_tests.families.whole import SMALLS, Whole, config_of, model_of
from parity_tests.tables import with_nightly

from .folders import opened

COMMIT = [Whole(name) for name in ("llama", "gemma3_text", "bert", "vit", "gpt2")]
DECODERS = [small for small in SMALLS if small.is_decoder]
NEW = 20
SHARD = 20_000  # bytes
NOTHING = MappingProxyType({})

of_all = pytest.mark.parametrize("small", with_nightly(SMALLS, commit=COMMIT), ids=str)
# Beside them factors, and layers whose parts are parallel.
of_all_and_more = pytest.mark.parametrize(
    "small",
    with_nightly(SMALLS, commit=[*COMMIT, Whole("granite"), Whole("gpt_neox")]),
    ids=str,
)
of_decoders = pytest.mark.parametrize(
    "small", with_nightly(DECODERS, commit=[x for x in COMMIT if x.is_decoder]), ids=str
)


class Call(NamedTuple):
    """What a model is given: the arguments of both sides, and which outputs are looked at."""

    x: np.ndarray
    flax: Mapping[str, Any] = NOTHING
    torch: Mapping[str, Any] = NOTHING
    real: np.ndarray | None = None
    pools: bool = True


def of_images(small):
    return "image_size" in small.fields


def is_long(small):
    """Whether the rotary of a row depends on its length, which transformers takes of all rows."""
    return small.fields.get("rope_parameters", {}).get("rope_type") == "longrope"


def padding(small):
    """Tokens of padding in each row; few where what comes after a prompt is rotated otherwise."""
    return np.arange(3) if is_long(small) else np.asarray([0, 2, 5])


def tokens_of(small, seed=0):
    """Three rows of seven tokens, none of them padding; two have the end of a text, one twice."""
    x = np.random.RandomState(seed).randint(7, small.fields["vocab_size"], (3, 7))
    x[0, [3, 5]] = x[2, 1] = 6
    return x


def images(small, *size):
    return np.random.RandomState(0).standard_normal((2, *size, small.fields["num_channels"]))


def calls(small):
    """The calls that are compared."""
    name, fields = small.name, small.fields
    if of_images(small):
        size = np.broadcast_to(fields["image_size"], 2)
        yield Call(images(small, *size))
        if size[0] == size[1]:  # all that transformers interpolates
            more = {} if name == "dinov2" else {"interpolate_pos_encoding": True}
            yield Call(images(small, 20, 25), torch=more)
        if name == "dinov2" and fields.get("use_mask_token", True):
            masked = np.arange(18).reshape(2, 9) % 4 == 1
            yield Call(images(small, *size), {"masked": masked}, {"bool_masked_pos": masked})
        return
    x, slots = tokens_of(small), np.arange(7)
    yield Call(x)
    yield Call(x[:, :4])
    if small.is_decoder:
        real = slots >= padding(small)[:, None]
        places = np.maximum(real.cumsum(1) - 1, 0)
        yield Call(x, {"valid": real}, {"attention_mask": real + 0, "position_ids": places}, real)
        return
    real = slots < 7 - padding(small)[:, None]
    there = np.where(real, x, fields["pad_token_id"])  # by which RoBERTa counts positions
    pools = not name.startswith("siglip")  # which takes the last token, whatever it is
    yield Call(there, {"valid": real}, {"attention_mask": real + 0}, real, pools)
    if name in ("bert", "roberta"):
        types = x % fields.get("type_vocab_size", 2)
        yield Call(x, {"token_types": types}, {"token_type_ids": types})


def in_torch(model, call):
    """The outputs of transformers' model: logits, or hidden states and what is pooled."""
    import torch

    x = call.x.transpose(0, 3, 1, 2) if call.x.ndim == 4 else call.x
    with torch.no_grad(), lifted():
        more = {
            key: torch.tensor(value) if key != "interpolate_pos_encoding" else value
            for key, value in call.torch.items()
        }
        out = model(torch.tensor(x), **more)
    return [value.numpy() for value in named(out)]


def named(out):
    names = ("logits", "last_hidden_state", "pooler_output")
    return [out[name] for name in names if out.get(name) is not None]


def outputs(out):
    """The outputs of the model of `families`."""
    return [x for x in out if x is not None] if isinstance(out, tuple) else [out]


@cache
def saved(small):
    """The model of transformers, the same read from its folder, and the names of its files."""
    model = model_of(config_of(small))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, **({} if small.number else {"max_shard_size": SHARD}))
        files = {path.name for path in Path(folder).iterdir()}
        return model, opened(folder, param_dtype=np.float64), files


def same(got, want, call=None):
    """Whether outputs are equal, and of padded rows those at real tokens."""
    assert len(got) == len(want)
    for i, (x, y) in enumerate(zip(map(np.asarray, got), want, strict=True)):
        if call is not None and call.real is not None and i == 0:
            x, y = x[call.real], y[call.real]
        if i == 0 or call is None or call.pools:
            assert judge.same_function(x, y).ok, judge.same_function(x, y)


@of_all_and_more
def test_a_folder_is_opened(small, transformers):
    """Outputs at two lengths or sizes, with padding, and with types of tokens or masked patches."""
    model, mine, files = saved(small)
    assert ("model.safetensors" in files) == (small.number > 0)  # else in shards
    every = list(calls(small))
    got = nnx.jit(lambda m: [outputs(m(x.x, **x.flax)) for x in every])(mine)
    for call, found in zip(every, got, strict=True):
        if is_long(small) and call.real is not None:
            for i, real in enumerate(call.real):
                alone = Call(call.x[i : i + 1, real])
                same([found[0][i : i + 1, real]], in_torch(model, alone))
        else:
            same(found, in_torch(model, call), call)


@of_all
def test_a_folder_is_written(small, tmp_path, transformers):
    """Transformers opens it and has the same bits again, from one file or from shards."""
    model, mine, _ = saved(small)
    families.save(mine, tmp_path, max_shard_bytes=SHARD if small.number else None)
    with lifted():
        back = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    first, second = model.state_dict(), back.state_dict()
    assert first.keys() == second.keys()
    assert all(judge.exact(x.numpy(), second[name].numpy()).ok for name, x in first.items())
    call = next(calls(small))
    same(in_torch(back, call), in_torch(model, call))


@pytest.mark.parametrize("small", with_nightly(SMALLS, commit=[Whole("gemma3_text")]), ids=str)
def test_layers_in_a_scan_are_written_one_by_one(small, tmp_path, transformers):
    mine = saved(small)[1]
    families.save(mine, tmp_path / "layers")
    options = {"param_dtype": np.float64, "scan": True}
    families.save(opened(tmp_path / "layers", **options), tmp_path / "scan")
    for path in (tmp_path / "layers").iterdir():
        assert (tmp_path / "scan" / path.name).read_bytes() == path.read_bytes()


@of_all
def test_values_and_gradients_are_transformers(small, transformers):
    model, mine, _ = saved(small)

    def together(values):
        return values[0] if len(values) == 1 else tuple(values)

    report = compare(
        model,
        mine,
        next(calls(small)).x,
        rules=families.rules_of(mine),
        torch_call=lambda model, x: together(
            named(model(x.permute(0, 3, 1, 2) if x.ndim == 4 else x))
        ),
        flax_call=lambda model, x: together(outputs(model(x))),
        dtypes=("float64",),
        taps=False,
        eager=False,
    )
    assert report.ok, str(report)


@of_decoders
def test_greedy_tokens_are_transformers(small, transformers):
    """Tokens are generated with a cache, for rows that are padded on the left."""
    import torch

    model, mine, _ = saved(small)
    x, real = tokens_of(small, 1), np.arange(7) >= padding(small)[:, None]
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        # In float32: a row of padding is NaN in a float64 that is not lifted, which takes long.
        words = (
            deepcopy(model)
            .float()
            .generate(torch.tensor(x), attention_mask=torch.tensor(real + 0), **options)
        )
    words = words[:, x.shape[1] :].numpy()
    got = families.generate(mine, x, NEW, valid=real)
    assert judge.same_values(np.asarray(got), words).ok
    # Else a wrong position or mask could go unnoticed; some whose head is tied repeat a token.
    assert len({*words.ravel()}) >= 4 or small.number
