"""Families with an open batch and an open length for `jax.export`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from flax_attn import families
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal
from parity_tests.families import witness
from parity_tests.families.configs import CONFIGS
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

OF_TOKENS = {x.name: x for x in CONFIGS if witness.PLACES[x.name].called is None}
OTHER = ("longformer", "xlnet")  # whose call takes more than tokens
NAMES = [name for name in OF_TOKENS if name not in OTHER]
AT_COMMIT = ["gpt_oss", "modernbert", "gemma2", "bloom", "phi3", "deepseek_v3", "recurrent_gemma"]


@pytest.mark.parametrize("name", with_nightly(NAMES, commit=AT_COMMIT))
def test_one_program_serves_every_batch_and_length(name, transformers):
    small = OF_TOKENS[name]
    config = witness.config_of(small.spelt("new"), small.model_type)
    layer = families.attention(
        config.to_dict(), small.index, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    width = config.hidden_size
    shape = (*export.symbolic_shape("b, t"), width)
    program = export.export(run)(state, jax.ShapeDtypeStruct(shape, float))
    for batch, length in [(2, 5), (1, 11)]:
        x = jnp.asarray(normal(0, batch, length, width))
        got, want = (np.asarray(call(state, x)) for call in (program.call, run))
        verdict = judge.same_function(got, want)
        assert verdict.ok, verdict
