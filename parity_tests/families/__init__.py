"""Parity of the families: what `flax-attn parity --families` proves against transformers.

Nothing of torch or transformers is imported until `rows` is called.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from flax_attn import families
from flax_attn.families._typos import nearest_name
from flax_attn.parity import Report, compare

from . import parts, witness
from .configs import CONFIGS, Small
from .parts import PARTS, Part

ONCE: dict[str, Any] = {"dtypes": ("float64",), "eager": False, "taps": False}


class Proof(NamedTuple):
    """One config of a family: its model_type, the classes on both sides, and the comparison."""

    family: str
    reference: str
    layer: str
    report: Report


def chosen(names: Sequence[str] = ()) -> list[Small | Part]:
    """The small configs of these model types, or of all that are not aliases.

    Raises:
      ValueError: for a name that is no served model type.
    """
    if unknown := [name for name in names if name not in families.TYPES]:
        near = [f" Did you mean {x!r}?" for x in map(nearest_type, unknown[:1]) if x]
        raise ValueError(
            f"--families takes model types, which `flax_attn.families.TYPES` lists; got "
            f"{', '.join(unknown)}.{''.join(near)}"
        )
    every = [*CONFIGS, *PARTS]
    if not names:
        return every
    return [
        replace(small, alias="" if small.name == name else name)
        for name in dict.fromkeys(names)
        for small in every
        if small.name == families.ALIASES.get(name, name)
    ]


def nearest_type(name: str) -> str | None:
    """The model type that a name may be a typo of."""
    return nearest_name(name, families.TYPES)


def rows(
    smalls: Sequence[Small | Part], say: Callable[[str], Any] = lambda text: None
) -> Iterator[Proof]:
    """Proofs in float64 with gradients, each as it is made.

    Args:
      smalls: the small configs.
      say: called with the model_type before each.
    """
    for small in smalls:
        say(small.model_type)
        yield prove(small) if isinstance(small, Small) else prove_part(small)


def prove(small: Small, **options: Any) -> Proof:
    """One config, as transformers writes it.

    Args:
      small: the config.
      options: of `compare`.
    """
    name, index = small.model_type, small.index
    config = witness.config_of(small.spelt("new"), name)
    given = config.to_dict()
    theirs = witness.attention(config, name, index)
    mine = families.attention(given, index, rngs=nnx.Rngs(0))
    how = {
        "rules": families.rules(given, index),
        "torch_call": witness.call(config, name, index),
        "flax_call": witness.flax_call(name),
        "kwargs": witness.inputs(config, name, index),
        "title": f"{name}, layer {index}: {small.fields} {small.rope}",
    }
    report = compare(theirs, mine, **{**ONCE, **how, **options})
    return Proof(name, type(theirs).__name__, type(mine).__name__, report)


def prove_part(small: Part, **options: Any) -> Proof:
    """One attention of an encoder-decoder model; `options` as of `prove`."""
    name = small.model_type
    config = parts.config_of(small.given, name)
    given = config.to_dict()
    theirs = parts.attention(parts.model_of(config, name), small)
    mine = families.attention(given, small.index, part=small.part, rngs=nnx.Rngs(0))
    how = {
        "rules": families.rules(given, small.index, part=small.part),
        "torch_call": parts.call(config, small),
        "title": f"{name}, {small.part} {small.index}: {small.fields}",
    }
    report = compare(theirs, mine, **{**ONCE, **how, "kwargs": inputs(small, config), **options})
    return Proof(name, type(theirs).__name__, type(mine).__name__, report)


def inputs(small: Part, config: Any) -> dict[str, np.ndarray]:
    """What an attention of an encoder-decoder model is given."""
    config = parts.of_part(config, small.part)
    memory = {"memory": drawn(9, config)} if small.part == "cross" else {}
    bias = np.random.RandomState(1).standard_normal((config.num_attention_heads, 7, 7))
    given = {"bias": bias} if parts.is_handed_a_bias(small) else {}
    return {"x": drawn(7, config), **memory, **given}


def drawn(length: int, config: Any) -> np.ndarray:
    """Two sequences of tokens."""
    return np.random.RandomState(length).standard_normal((2, length, config.hidden_size))
