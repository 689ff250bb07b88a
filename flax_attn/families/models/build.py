"""`model`: builds a whole model from its published config."""

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ...layers._init import LayerInit
from .._choose import family_of, layer_of, resolved
from .._config import Config
from .blocks import Build
from .decoder import Decoder
from .encoder import Encoder
from .facts import Body
from .rows import ROWS
from .unbuilt import why_not


def model(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    part: str | None = None,
    rngs: nnx.Rngs,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    scan: bool = False,
    remat: bool = False,
) -> Any:
    """Returns the whole model of a published config: a `Decoder` or an `Encoder`.

    Initial values are as in transformers: normal with `initializer_range`, and zero biases. A fresh
    model trains: `eval()` turns its dropout off. `load` fills it with published weights.

    Shapes: a decoder takes tokens `*B T` to logits `*B T V`; an encoder takes tokens `*B T`, or
    images `*B Y X channels`, to hidden states `*B T D` and a pooled state.

    Args:
      config: as in `attention`.
      part: "text", "vision" or "audio" of a multimodal model.
      rngs: source of the initial weights and of the dropout.
      dtype: of the computation; None promotes weights and inputs.
      param_dtype: of the weights.
      scan: whether layers are stacked and run by `jax.lax.scan`, a period of their kinds in each
        step, so that a deep model compiles as fast as one period.
      remat: whether a gradient computes each layer again in place of storing its steps.

    Raises:
      ValueError: for a model_type that is not built whole, naming the part that is missing; and as
        in `attention`.
      TypeError: as in `attention`.

    Source: the modelling code of transformers 5.24.

    >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    >>> config = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 40, **heads}
    >>> decoder = model({**config, "vocab_size": 11}, rngs=nnx.Rngs(0))
    >>> decoder(jnp.ones((2, 5), jnp.int32)).shape
    (2, 5, 11)
    """
    config, part = resolved(config, part)
    fields, body = body_of(config, part)
    init = LayerInit(
        kernel_init=nnx.initializers.normal(fields["initializer_range"] or 0.02),
        bias_init=nnx.initializers.zeros,
        rngs=rngs,
        dtype=dtype,
        param_dtype=param_dtype,
    )

    shape = Decoder if body.head else Encoder
    build = Build(fields, body, partial(layer_of, config, part), init)
    return shape(build, json.dumps(dict(config), default=str), scan=scan, remat=remat)


def body_of(config: Mapping[str, Any], part: str | None) -> tuple[Config, Body]:
    """Returns the config as its row reads it, and the row.

    Raises:
      ValueError: for a model_type that is not built whole.
    """
    name = config["model_type"]
    if name not in ROWS:
        raise ValueError(why_not(config))
    _, fields = family_of(config, part)
    ROWS[name].check(fields)
    return fields, ROWS[name]
