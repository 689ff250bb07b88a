"""No field of a config is ignored: a change is the same on both sides, or refused by its name."""

import copy
from dataclasses import fields
from zlib import crc32

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import families
from flax_attn.parity import judge, port
from flax_attn.parity.sides.torch_float64 import lifted
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal
from parity_tests.families import witness
from parity_tests.families.configs import BOTH, place, titled

WORDS = (
    "gelu",
    "default",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear",
    "other",
)


def others(value):
    """What a field may be changed to, the first that transformers takes."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2] if value else [1, 0.25]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    return [2, 0.5, True, "other"]


def places(value, path=()):
    """Where numbers, words and nothing stand in a config, each with its path."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from places(inside, (*path, key))
    elif isinstance(value, list):
        for key, inside in enumerate(value):
            yield from places(inside, (*path, key))
    elif value is None or isinstance(value, bool | int | float | str):
        yield path, value


def changed(config, path, value):
    new = copy.deepcopy(config)
    at = new
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return new


def theirs(given, small):
    """The module of transformers with weights drawn by name, and its output; None if it refuses."""
    import torch

    try:
        config = witness.config_of(given, small.name)
        layer = witness.attention(config, small.name, small.index).double().eval()
        with torch.no_grad():
            for name, tensor in layer.named_parameters():
                tensor.copy_(torch.tensor(normal(crc32(name.encode()), *tensor.shape) / 4))
            x = torch.tensor(normal(0, 2, 7, config.hidden_size))
            with lifted():
                y = witness.call(config, small.name, small.index)(layer, x)
    except Exception as refused:
        return refused, None
    return layer, y.numpy()


def ours(given, small, layer):
    """The output of the family's layer with the same weights; or why it refuses."""
    how = {"rngs": nnx.Rngs(0), "param_dtype": jnp.float64}
    try:
        mine = families.attention(given, small.index, **how)
    except ValueError as refused:
        return refused
    port(layer, mine, families.rules(given, small.index)).eval()
    return np.asarray(mine(jnp.asarray(normal(0, 2, 7, mine.o_proj.out_features))))


def plain_defaults(name):
    """Fields that a file may leave out, with numbers and flags that their class gives them."""
    found = fields(witness.found(name, "Config"))
    return {x.name: x.default for x in found if isinstance(x.default, bool | int | float)}


def unchanged(got, before):
    return got.shape == before.shape and judge.exact(got, before).ok


# Of each family the first config in the new spelling, the second in the old one, and so on.
TURNS = [pair for pair in BOTH if (place(pair[0]) % 2 == 0) == (pair[1] == "new")]


@pytest.mark.parametrize(("small", "spelling"), TURNS, ids=titled)
def test_no_field_is_ignored(small, spelling, transformers):
    given = small.spelt(spelling)
    if spelling == "new":
        given = witness.config_of(given, small.name).to_dict()
    else:
        given = {**plain_defaults(small.name), **given}
    layer, before = theirs(given, small)
    assert before is not None, layer
    first = ours(given, small, layer)
    assert judge.same_function(first, before).ok
    for path, value in places(given):
        check(given, small, path, value, layer, before, first)


def check(given, small, path, value, layer, before, first):
    where = ".".join(map(str, path))
    for other in others(value):
        new = changed(given, path, other)
        module, want = theirs(new, small)
        if want is not None:
            break
    got = ours(new, small, layer if want is None else module)
    if isinstance(got, ValueError):
        field = [key for key in path if isinstance(key, str)][-1]
        assert want is None or field in str(got), f"{where}={other!r}: {got}"
    elif want is None:
        told = f"{where}={other!r}: transformers refuses it ({module}), and ours changes"
        assert unchanged(got, first), told
    else:
        same = [unchanged(*pair) for pair in ((got, first), (want, before))]
        assert same[0] == same[1], f"{where}={other!r}: a change on one side alone, {same}"
        assert judge.same_function(got, want).ok, f"{where}={other!r}: another change"
