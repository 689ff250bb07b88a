"""Constructor arguments shared by all layers: initializers, dtypes and dropout."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature, signature
from typing import Any, Required, TypedDict, TypeVar

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from ._common import dot_general_sharded, torch_uniform
from ._dropout import AttentionDropout

InitFn = TypeVar("InitFn", bound=Callable[..., Any])


class InitKeywords(TypedDict, total=False):
    """Keyword arguments of `InitWithoutDropout`, for constructors that forward them.

    Usage: `@init_signature def __init__(..., **more: Unpack[InitKeywords])`.
    """

    kernel_init: Initializer | None
    bias_init: Initializer | None
    rngs: Required[nnx.Rngs]
    dtype: Any
    param_dtype: Any


class LayerInitKeywords(InitKeywords, total=False):
    """Keyword arguments of `LayerInit`, likewise with `@layer_init_signature`."""

    dropout: float


@dataclass(frozen=True, kw_only=True)
class LayerInit:
    """Initializers, dtypes and dropout of a layer.

    Args:
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; None uses PyTorch's.
      rngs: random keys for the initial values and the dropout.
      dtype: of the arithmetic; None promotes inputs and weights.
      param_dtype: of the weights.

    >>> LayerInit(rngs=nnx.Rngs(0)).linear(3, 2, use_bias=False).kernel.shape
    (3, 2)
    """

    dropout: float = 0.0
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None
    rngs: nnx.Rngs
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if not hasattr(self.rngs, "params"):
            raise TypeError(
                "rngs must be random keys such as nnx.Rngs(0), or nnx.Rngs(key); got "
                f"{type(self.rngs).__name__}."
            )

    def linear(self, in_features: int, out_features: int, use_bias: bool = True) -> nnx.Linear:
        """A linear projection with these initializers and dtypes.

        Inputs and kernel may be sharded along the contracted axis; see `dot_general_sharded`.
        """
        linear_kwargs = {
            "use_bias": use_bias,
            "dot_general": dot_general_sharded,
            **self.torch_initializers(in_features),
        }
        return nnx.Linear(in_features, out_features, **linear_kwargs)

    def torch_initializers(self, fan_in: int) -> dict[str, Any]:
        """Keyword arguments that initialize as PyTorch does, from U(+-1 / sqrt(fan_in)).

        Initializers passed to the layer take precedence.
        """
        start = torch_uniform(fan_in)
        return {
            "kernel_init": start if self.kernel_init is None else self.kernel_init,
            "bias_init": start if self.bias_init is None else self.bias_init,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "rngs": self.rngs,
        }

    @classmethod
    def of(cls, keywords: LayerInitKeywords) -> "LayerInit":
        """Builds a `LayerInit` from the keywords it knows; the others are ignored."""
        names = (part.name for part in fields(cls))
        return cls(**{name: keywords[name] for name in names if name in keywords})

    def attention_dropout(self) -> AttentionDropout | None:
        """Dropout module, or None at rate zero, so that the state holds no random key."""
        return AttentionDropout(self.dropout, rngs=self.rngs) if self.dropout else None

    def param(
        self, shape: tuple[int, ...], default: Initializer, is_bias: bool = False
    ) -> nnx.Param:
        """A parameter drawn by the layer's initializer if it is set, else by `default`."""
        initializer = self.bias_init if is_bias else self.kernel_init
        start = default if initializer is None else initializer
        return nnx.Param(start(self.rngs.params(), shape, self.param_dtype))


@dataclass(frozen=True, kw_only=True)
class InitWithoutDropout(LayerInit):
    """`LayerInit` for layers without dropout, or with their own `dropout` argument.

    >>> InitWithoutDropout(rngs=nnx.Rngs(0), dropout=0.1)
    Traceback (most recent call last):
    TypeError: InitWithoutDropout.__init__() got an unexpected keyword argument 'dropout'
    """

    dropout: float = field(default=0.0, init=False)


def keywords_of(base: Callable[..., Any]) -> Callable[[InitFn], InitFn]:
    """Decorator that replaces `**more` in a signature by the keyword-only arguments of `base`.

    `help` and `inspect` then show them. `base` is a function, or a class (for its constructor).

    >>> class Base:
    ...     def __init__(self, size, *, bias=False): ...
    >>> @keywords_of(Base)
    ... def init(self, size, *, gate, **more): ...
    >>> print(signature(init))
    (self, size, *, gate, bias=False)
    """

    def decorate(init: InitFn) -> InitFn:
        before = signature(init)
        named = [x for x in before.parameters.values() if x.kind != Parameter.VAR_KEYWORD]
        names = {x.name for x in named}
        of_base = signature(base.__init__ if isinstance(base, type) else base).parameters.values()
        more = [x for x in of_base if x.kind == Parameter.KEYWORD_ONLY and x.name not in names]
        shown = Signature([*named, *more], return_annotation=before.return_annotation)
        init.__signature__ = shown  # pyright: ignore[reportFunctionMemberAccess]
        return init

    return decorate


layer_init_signature = keywords_of(LayerInit)
init_signature = keywords_of(InitWithoutDropout)
