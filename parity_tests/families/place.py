"""Where the classes of a model type are."""

from typing import NamedTuple


class Model(NamedTuple):
    """Where the classes of an encoder with a decoder are.

    Attributes:
      folder: of `transformers.models`.
      prefix: the beginning of the classes' names.
    """

    folder: str
    prefix: str


class Place(NamedTuple):
    """Where the classes of a family are.

    Attributes:
      folder: of `transformers.models`.
      prefix: the beginning of the classes' names.
      text: what follows it in names of those of a text model.
      block: the class that holds one attention.
      gives: "tensor", or "tuple" where the block returns it as the first of several.
      whole: whether the model takes embedded tokens; else its attention is given no more than x.
      attention: what the class of its attention is called behind prefix and text.
      crossing: the field of the config that lists layers with a `CrossAttention` in its place.
      width: the field of the config that says how wide embedded tokens are.
      config: the beginning of the name of the config's class, where it is not that of the others.
    """

    folder: str
    prefix: str
    text: str = ""
    block: str = "DecoderLayer"
    gives: str = "tensor"
    whole: bool = True
    attention: str = "Attention"
    crossing: str = ""
    width: str = "hidden_size"
    config: str = ""

    def __repr__(self) -> str:
        """As it is written, without what is so by default."""
        first = (repr(x) for x in self[:2])
        rest = zip(self._fields[2:], self[2:], strict=True)
        said = (f"{name}={x!r}" for name, x in rest if x != self._field_defaults[name])
        return f"Place({', '.join((*first, *said))})"
