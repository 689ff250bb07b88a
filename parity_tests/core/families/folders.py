"""Small models without torch, and their folders, whose tensors a test may change."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from flax_attn import families
from flax_attn.parity import draw
from flax_attn.weights.checkpoint import Checkpoint
from flax_attn.weights.known_layers import flax_state
from flax_attn.weights.safetensors import write_file


def drawn(config, seed=0, dtype=np.float32, **options):
    """A model whose weights are drawn by numpy, so that nothing is compiled."""
    options |= {"param_dtype": dtype}
    model = nnx.eval_shape(lambda: families.model(config, rngs=nnx.Rngs(0), **options))
    for path, variable in flax_state(model).items():
        shape = variable.get_value().shape
        scale = 2 * shape[-2] ** -0.5 if len(shape) > 1 else 1 / 16
        scale = 1.0 if "embed" in path else scale
        value = path.endswith("scale") + scale * draw.normal(seed, path, shape)
        variable.set_value(value.astype(dtype))
    for variable in jax.tree.leaves(nnx.state(model, nnx.RngState), is_leaf=is_variable):
        shape = variable.get_value().shape
        if isinstance(variable, nnx.RngKey):
            variable.set_value(jax.random.split(jax.random.key(seed), shape))
        else:  # of numpy it would be counted up in place
            variable.set_value(jax.device_put(np.zeros(shape, np.uint32)))
    model.eval()
    return model


def opened(folder, **options):
    """The model of a folder, on one device by name: to put its arrays there compiles nothing."""
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return families.load(folder, sharding=there, **options)


def is_variable(x):
    return isinstance(x, nnx.Variable)


def write(folder, config, change=lambda tensors: tensors, **options):
    """Writes the folder of a drawn model with other tensors; returns the model."""
    model = drawn(config, **options)
    families.save(model, folder)
    (path,) = Path(folder).glob("*.safetensors")
    checkpoint = Checkpoint(path, False, False)
    write_file(path, change({name: checkpoint.read(name) for name in checkpoint.entries}))
    return model
