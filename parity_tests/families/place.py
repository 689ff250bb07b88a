"""Where the classes of a model type are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Model(NamedTuple):
    """Where the classes of an encoder with a decoder are.

    Attributes:
      folder: of `transformers.models`.
      prefix: the beginning of the classes' names.
    """

    folder: str
    prefix: str


class Called(NamedTuple):
    """How an attention is called that takes other inputs than tokens.

    Attributes:
      inputs: from a config and the index of a layer to what both sides are given, by name.
      torch: `torch(attention, config, index, **inputs)`, as the layer of the whole model calls it.
      flax: `flax(layer, **inputs)`.
    """

    inputs: Callable[[Any, int], dict[str, np.ndarray]]
    torch: Callable[..., Any]
    flax: Callable[..., Any] = lambda layer, **inputs: layer(**inputs)


class Place(NamedTuple):
    """Where the classes of a family are.

    Attributes:
      folder: of `transformers.models`; "" for that of its own tables.
      prefix: the beginning of the classes' names; "" for that of its config's class.
      text: what follows it in names of those of a text model.
      block: the class that holds one attention, or several such, with blanks between.
      gives: "tensor", or "tuple" where the block returns it as the first of several.
      whole: whether the model takes embedded tokens; else its attention is given no more than x.
      attention: what the class of its attention is called behind prefix and text.
      crossing: the field of the config that lists layers with a `CrossAttention` in its place.
      width: the field of the config that says how wide embedded tokens are.
      config: the beginning of the name of the config's class, where it is not that of the others;
        "folder.Name" where it is in another folder.
      causal: whether the attention is given a causal mask where the model takes no tokens.
      output: a module in the attention whose output is meant, where a norm or a sum follows.
      path: where a whole model has the attention, {} for the layer, if no config makes it alone;
        or `path(config, index)` where it stands in a stage.
      hands: what a block is given beside `witness.HANDED` that its attention takes.
      called: how it is called, where it takes other inputs than tokens.
    """

    folder: str = ""
    prefix: str = ""
    text: str = ""
    block: str = "DecoderLayer"
    gives: str = "tensor"
    whole: bool = True
    attention: str = "Attention"
    crossing: str = ""
    width: str = "hidden_size"
    config: str = ""
    causal: bool = False
    output: str = ""
    path: str | Callable[[Any, int], str] = ""
    hands: tuple[str, ...] = ()
    called: Called | None = None

    def __repr__(self) -> str:
        """As it is written, without what is so by default."""
        first = (repr(x) for x in self[:2])
        rest = zip(self._fields[2:], self[2:], strict=True)
        said = (f"{name}={x!r}" for name, x in rest if x != self._field_defaults[name])
        return f"Place({', '.join((*first, *said))})"


class Places(dict[str, Place]):
    """Places by model type; the usual one for a type that is not listed."""

    def __missing__(self, name: str) -> Place:
        return Place()
