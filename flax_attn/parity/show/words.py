"""Titles of cases in words, from their names: `variant[arguments|inputs|reference]`."""

import re
from typing import NamedTuple

NAME = re.compile(r"(?P<variant>[^\[]*)\[(?:(?P<config>.*)\|)?(?P<inputs>[^|]*)\|(?P<of>[^|]*)\]")
SHAPE = re.compile(r"(?P<name>\w+)=(?P<sizes>(?:\d+(?:x\d+)*)?)")


class Words(NamedTuple):
    """A case in words: the two that are compared, and what sets it off from other cases."""

    pair: str
    details: str


def in_words(title: str, flax_class: str = "") -> Words:
    """The words for the name of a case; another title is returned as it is, without details.

    Args:
      title: the name of a case, or any other title.
      flax_class: the name of its Flax class; by default its variant stands for it.

    >>> pair, details = in_words("cross[d_in=3,bias=True|x=2x6x3,train|torch_ref.Cross]", "Cross")
    >>> pair
    'Cross against torch_ref.Cross'
    >>> details
    'd_in=3, bias=True; x of shape 2 x 6 x 3; in training'
    """
    match = NAME.fullmatch(title)
    if match is None:
        return Words(title, "")
    inputs = match["inputs"].split(",")
    trained = inputs[-1] == "train"
    shapes = [_input(text) for text in (inputs[:-1] if trained else inputs) if text]
    config = [part for part in (match["config"] or "").split(",") if part != flax_class]
    settings = ", ".join(part.strip() for part in config if part.strip())
    details = [settings, ", ".join(shapes), "in training" if trained else ""]
    pair = f"{flax_class or match['variant']} against {match['of']}"
    return Words(pair, "; ".join(filter(None, details)))


def numbered(title: str, flax_class: str, number: int) -> str:
    """The words for one case among several of the same pair; any other title as it is.

    >>> numbered("cross[d_in=3|x=6x3|torch_ref.Cross]", "", 2)
    'cross against torch_ref.Cross, case 2: d_in=3; x of shape 6 x 3'
    """
    pair, details = in_words(title, flax_class)
    return f"{pair}, case {number}: {details}" if details else pair


def _input(text: str) -> str:
    match = SHAPE.fullmatch(text)
    if match is None:
        return text
    sizes = match["sizes"].replace("x", " x ")
    return f"{match['name']} of shape {sizes}" if sizes else f"scalar {match['name']}"
