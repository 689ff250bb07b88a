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
      block: the class that holds one attention, or several such, with blanks between.
      gives: "tensor", or "tuple" where the block returns it as the first of several.
      whole: whether the model takes embedded tokens; else its attention is given no more than x.
      hands: what a block is given beside `witness.HANDED` that its attention takes.
      keeps: whether its attention keeps numbers that it makes in float32 when it is built.
    """

    folder: str
    prefix: str
    text: str = ""
    block: str = "DecoderLayer"
    gives: str = "tensor"
    whole: bool = True
    hands: tuple[str, ...] = ()
    keeps: bool = False
