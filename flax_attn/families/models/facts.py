"""The facts of a model type beside its attention, and what a config makes of them.

A fact is a constant, the name of a field of the config, or a function of the config.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ...norms import Cast
from ...weights.rule import Rule
from .._config import Config

Fact = str | float | bool | None | Callable[[Config], Any]
Names = tuple[Rule, ...] | Callable[[Config], tuple[Rule, ...]]
Order = Literal["before", "after", "both", "sums", "parallel", "shared"]


def read(config: Config, fact: Fact) -> Any:
    """The value of a fact for a config.

    >>> read(Config({"n_inner": None}, {}), lambda config: config["n_inner"] or 4)
    4
    """
    if callable(fact):
        return fact(config)
    return config[fact] if isinstance(fact, str) else fact


def count(config: Config, fact: Fact) -> int:
    """The value of a fact that must be a whole number of at least 1."""
    return config.count(fact) if isinstance(fact, str) else read(config, fact)


def number(config: Config, fact: Fact) -> float:
    """The value of a fact that must be a number above zero."""
    return config.number(fact) if isinstance(fact, str) else read(config, fact)


def flag(config: Config, fact: Fact) -> bool:
    """The value of a fact that must be True or False; None means False."""
    return config.flag(fact) if isinstance(fact, str) else bool(read(config, fact))


def rate(config: Config, fact: Fact) -> float:
    """The value of a fact that must be between 0 and 1."""
    return config.rate(fact) if isinstance(fact, str) else float(read(config, fact))


@dataclass(frozen=True)
class NormFacts:
    """The norms of a model.

    Attributes:
      kind: "rms" or "layer".
      eps: added to the variance.
      plus_one: whether an RMS norm multiplies by `1 + scale`.
      cast: when an RMS norm casts to the dtype of its input, see `rms_norm`.
      bias: whether a layer norm has a bias.
      has_gain: whether it has a scale.
    """

    kind: Literal["rms", "layer"]
    eps: Fact
    plus_one: bool = False
    cast: Cast = "before"
    bias: Fact = True
    has_gain: Fact = True


@dataclass(frozen=True)
class MlpFacts:
    """The feed-forward part.

    Attributes:
      width: of its hidden units.
      activation: the field with its name, as in `ACTIVATIONS`.
      is_gated: whether the activated units are multiplied by others, `act(gate) * up`.
      bias: whether its projections have biases.
      dropout: of the hidden units.
    """

    width: Fact
    activation: Fact
    is_gated: Fact = False
    bias: Fact = True
    dropout: Fact = 0.0


@dataclass(frozen=True)
class Body:
    """A row: what a model type has beside its attention.

    Attributes:
      norm: its norms.
      mlp: its feed-forward parts.
      names: rules from transformers' names to those of `Decoder` or `Encoder`, relative to the base
        model; the first one is that of the embedding.
      saved: the same for the names in files, if these differ.
      base: prefix of the base model in a model with a head.
      order: where the norms of a layer stand: "before" attention and the feed-forward part,
        "after" them, "both", of the "sums" with the residual, before both "parallel" parts, or
        one "shared" by them.
      first_norm: whether the first layer has a norm before its attention.
      branch_scale: whether each part's output has a trained factor per component in place of a
        norm after it.
      residual_factor: multiplies what a part adds.
      final_norm: whether the last hidden states are normalised.
      embedding_norm: whether the embeddings are normalised.
      embedding_factor: multiplies the embeddings.
      embedding_width: of the embeddings; None for that of the model.
      positions: number of learned positions; None for none.
      position_offset: the row of the table of the first position.
      dropout: of what a part adds.
      embedding_dropout: of the embeddings.
      logit_factor: multiplies the logits.
      softcap: of the logits; None for none.
      head: name of the head in transformers; "" for an encoder.
      saved_head: the same in files; "" if it is equal.
      is_tied: whether the head shares the table of the embedding.
      token_types: number of types of tokens; None for none.
      patch_bias: whether the projection of patches has a bias; None for a model of tokens.
      class_token: whether a trained token stands before the patches.
      mask_token: whether a trained token replaces patches that are masked.
      pooler: how an encoder pools: "first" for a projection of the first token, "token" for the
        first one itself, "end" for the one at the end of the text, "last" for a projection of the
        last one, "attention" for a trained query; "" for none.
      pooler_activation, pooler_width: of the projection of "first" and "last".
      pooler_norm: whether the final norm is applied to the pooled state alone (CLIP's images).
      check: raises ValueError for a config that is not served.
    """

    norm: NormFacts
    mlp: MlpFacts
    names: Names
    saved: Names = ()
    base: str = "model"
    order: Order | Callable[[Config], Order] = "before"
    first_norm: bool = True
    branch_scale: bool = False
    residual_factor: Fact = 1.0
    final_norm: Fact = True
    embedding_norm: bool = False
    embedding_factor: Fact = 1.0
    embedding_width: Fact = None
    positions: Fact = None
    position_offset: Fact = 0
    dropout: Fact = 0.0
    embedding_dropout: Fact = 0.0
    logit_factor: Fact = 1.0
    softcap: Fact = None
    head: str = "lm_head"
    saved_head: str = ""
    is_tied: Fact = "tie_word_embeddings"
    token_types: Fact = None
    patch_bias: Fact = None
    class_token: bool = False
    mask_token: Fact = False
    pooler: Literal["", "first", "token", "end", "last", "attention"] = ""
    pooler_activation: Fact = None
    pooler_width: Fact = "hidden_size"
    pooler_norm: bool = False
    check: Callable[[Config], None] = lambda config: None

    def order_of(self, config: Config) -> Order:
        """Where the norms of a layer stand."""
        return self.order(config) if callable(self.order) else self.order

    def names_of(self, config: Config, in_files: bool = True) -> tuple[Rule, ...]:
        """The rules of the names in files, where these differ, and of those in memory."""
        saved, names = (x(config) if callable(x) else x for x in (self.saved, self.names))
        return (*saved, *names) if in_files else names


def _gelu_fast(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


# By the names in configs, as transformers computes them.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    **dict.fromkeys(("gelu", "gelu_python"), _gelu),
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"), _gelu_tanh
    ),
    "gelu_fast": _gelu_fast,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def activation_of(config: Config, fact: Fact) -> str:
    """The name of an activation; ValueError for one that is not in `ACTIVATIONS`."""
    name = read(config, fact)
    if name not in ACTIVATIONS:
        field = config.name(fact) if isinstance(fact, str) else "the activation"
        raise ValueError(f"{field} must be one of {', '.join(ACTIVATIONS)}; got {name!r}.")
    return name


def pair(config: Config, field: str) -> tuple[int, int]:
    """A size in rows and columns, from one number or two; ValueError for anything else."""
    sizes = config[field]
    sizes = (sizes, sizes) if isinstance(sizes, int) else sizes
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or not all(isinstance(x, int) and x > 0 for x in sizes)
    ):
        raise ValueError(f"{field} must be one whole number or two; got {config[field]!r}.")
    return sizes[0], sizes[1]


def grid_of(config: Config) -> tuple[int, int]:
    """The number of patches of an image of the config's size, in rows and columns."""
    (y, x), patch = pair(config, "image_size"), pair(config, "patch_size")
    return y // patch[0], x // patch[1]
