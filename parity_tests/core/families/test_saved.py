"""A folder as transformers writes it: each kind of layer of it, built and filled, gives the same.

Nothing but the folder is read: config.json as text, and the names that the file has.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn import families, weights
from flax_attn.families._choose import resolved
from flax_attn.families._naming import named_layers
from flax_attn.families._published import ALIASES
from flax_attn.families._saved import SAVED
from flax_attn.layers import CrossLayerAttention
from flax_attn.parity import judge, port
from flax_attn.parity.draw import normal
from flax_attn.weights.checkpoint import Checkpoint
from parity_tests.families import eager, parts
from parity_tests.families.facts import model_of, smalls
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

from .test_whole import alike, at

pytestmark = pytest.mark.nightly

# Of which some layers, that read what an earlier one chose, are refused, and so the whole.
ONE_LAYER = ("glm_moe_dsa",)
NOWHERE_ELSE = ("albert", "longcat_flash")  # layers with one attention, a layer with two
TYPES = families.TYPES
# Of each way to write names one, and files with numbers or tables that JSON or layers do not have.
COMMIT = ("vit", "dinov2", "dinov3_vit", "kimi_linear", "nomic_bert", "olmo_hybrid", "segformer")
COMMIT += ("swin", "tipsv2_vision_model", "minimax", "mamba2", "gpt2", "bert", "t5", "falcon_h1")


def of_type(name):
    """The small configs of a model type, or one for each part."""
    if name not in parts.MODELS:
        return smalls(name)
    family = ALIASES.get(name, name)
    first = {small.part: small for small in reversed(PARTS) if small.name == family}
    return [replace(small, alias="" if name == family else name) for small in first.values()]


def written(small, folder):
    """The model of a config, whose weights are drawn by name and written to a folder."""
    import torch

    config = eager.config_of(small.spelt("new"), small)
    of = parts if isinstance(small, parts.Part) else None
    model = of.model_of(config, small.model_type) if of else model_of(config, small.model_type)
    model = model.float().eval()
    for path, tensor in model.named_parameters():
        tensor.data.copy_(torch.tensor(normal(0, path, tuple(tensor.shape)) / 4))
    model.save_pretrained(folder)
    return config, model


def layers(folder, small):
    """The number of each layer, with its place in the file and in the model."""
    names, part = Checkpoint(folder / "model.safetensors", None, False).entries, _part(small)
    if small.name in ONE_LAYER:
        return [(small.index, *[f"layers.{small.index}.self_attn"] * 2)]
    every = {}
    for index, named in named_layers(*resolved(folder, part), "transformers", ("", None)):
        where = (index, named.target.format(index))
        every.setdefault(where, set()).add(named.source.format(index))
    files = {
        where: [x for x in places if any(name.startswith(f"{x}.") for name in names)]
        for where, places in every.items()
    }
    assert all(len(places) == 1 for places in files.values()), files
    return [(index, places[0], target) for (index, target), places in files.items()]


def kinds(folder, small):
    """Of each kind of layer the first: its number and places."""
    first = {}
    for index, *places in layers(folder, small):
        layer = nnx.eval_shape(lambda i=index: _built(folder, small, i))
        first.setdefault(str(nnx.graphdef(layer)), (index, *places))
    return list(first.values())


def _part(small):
    return getattr(small, "part", None)


def _built(folder, small, index):
    how = {"rngs": nnx.Rngs(0), "param_dtype": jnp.float64}
    return families.attention(folder, index, part=_part(small), **how)


def filled_at_once(folder, small, every, to):
    """The layers at these places, out of one load by the rules of all layers.

    They lie where `to` says, or where torch has them, if it is None.
    """
    part, checkpoint = _part(small), Checkpoint(folder / "model.safetensors", None, False)
    made = {target: _built(folder, small, index) for index, _, target in every}
    names = {target: target if to is None else to.format(i) for i, _, target in every}
    arrays = {}
    for index, place, _ in every:
        rules = families.rules(folder, index, part=part)
        beside = tuple(f"{place}.{rule.names}." for rule in rules if rule.kind == "skip")
        entries = [x for x in checkpoint.entries if x.startswith(f"{place}.")]
        arrays |= {x: checkpoint.read(x) for x in entries if not x.startswith(beside)}
    model = at({names[target]: layer for target, layer in made.items()})
    rules = families.rules(
        folder, part=part, to=to
    )  # of layers too that are not the first of a kind
    weights.load(model, arrays, rules=rules, cast="widen", partial=True)
    return made


def with_weights_of(model, path, config, small):
    """A layer of transformers in float64, its tables too, and how it is called."""
    layer, call = eager.of_transformers(config, small)
    layer.load_state_dict(dict(model.get_submodule(path).named_parameters()), strict=False)
    return layer.double().eval(), call


def check(small, folder):
    config, model = written(small, folder)
    every, part = kinds(folder, small), _part(small)
    places = (None,) if small.name in NOWHERE_ELSE else (None, "blocks.{}.attn")
    places = () if small.name in ONE_LAYER else places
    at_once = [filled_at_once(folder, small, every, to) for to in places]
    for index, place, path in every:
        one, mine = replace(small, index=index), _built(folder, small, index)
        rules = families.rules(folder, index, part=part)
        weights.load(mine, folder, prefix=place, rules=rules, cast="widen")
        theirs, call = with_weights_of(model, path, config, one)
        alike(port(theirs, _built(folder, small, index), rules), mine)
        for made in at_once:
            alike(made[path], mine)
        if not isinstance(mine, CrossLayerAttention):  # which reads the keys of another layer
            want = eager.output_of_torch(config, one, theirs, call)
            got = eager.output_of_flax(config.to_dict(), one, mine)
            assert judge.same_function(got, want).ok, path


# Its class asks for a window wherever a layer has that kind, and Exaone's do without.
REFUSED_BY_CLASS = [("kolibri1", 2)]
ROWS = [(name, i) for name in TYPES for i in range(len(of_type(name)))]
ROWS = [row for row in ROWS if row not in REFUSED_BY_CLASS]


@pytest.mark.parametrize(("name", "number"), with_nightly(ROWS, commit=[(x, 0) for x in COMMIT]))
def test_every_kind_of_layer_is_filled_by_the_file(name, number, tmp_path, transformers):
    with jax.enable_x64(True):
        check(of_type(name)[number], tmp_path)


def test_every_model_type_is_saved_and_read():
    assert {*TYPES} == {*families.TYPES} and {*SAVED} <= {*TYPES}
