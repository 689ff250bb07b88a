"""Whole models of transformers for the types that `families.model` builds, small and in float64."""

from dataclasses import dataclass
from typing import Any

from flax_attn.families._published import facts_of, has_field
from flax_attn.families.models.rows import ROWS
from flax_attn.parity import draw
from flax_attn.parity.sides.torch.float64 import lifted
from flax_attn.parity.torch_module import describe, write

from . import witness
from .configs import FILE

FEED_FORWARD = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim")
PADDING = 1
WORDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Whole:
    """One small config of a type, of the rows of "whole" in `small.json`."""

    name: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.number}"

    @property
    def is_decoder(self) -> bool:
        """Whether it gives logits."""
        return bool(ROWS[self.name].head)

    @property
    def fields(self) -> dict[str, Any]:
        """The config, as files have it."""
        facts = facts_of(self.name)
        sizes = {field: size for field, size in self.sizes().items() if has_field(facts, field)}
        words = dict.fromkeys(WORDS) if self.is_decoder else {"pad_token_id": PADDING}
        words = {} if "image_size" in sizes else words
        row = FILE["whole"][self.name][self.number]
        return {"model_type": self.name, **words, **sizes, **row}

    def sizes(self) -> dict[str, int]:
        """Drawn sizes, no two of which are equal."""
        random = draw.stream(self.number, self.name)
        groups, layers = map(int, random.permutation([2, 3]))
        return {
            "num_key_value_heads": groups,
            "num_hidden_layers": layers,
            "num_attention_heads": 2 * groups,
            "hidden_size": 2 * groups * int(random.choice([8, 12])),
            **dict.fromkeys(FEED_FORWARD, int(random.randint(17, 24))),
            "projection_size": int(random.randint(25, 31)),
            "max_position_embeddings": int(random.randint(52, 64)),
            "vocab_size": int(random.randint(80, 96)),
            "patch_size": 5,
            "image_size": 15,
            "num_channels": 7,
        }


SMALLS = [Whole(name, i) for name in FILE["whole"] for i in range(len(FILE["whole"][name]))]


def config_of(small: Whole) -> Any:
    """The config of transformers."""
    return witness.config_of(small.fields, small.name)


def model_of(config: Any, seed: int | None = 0) -> Any:
    """The model of a config, built so that its tables are in float64.

    Its weights are drawn, unless the seed is None; biases are small, since large ones make every
    token of a generated text the same.
    """
    classes = witness.library()
    with lifted():
        if ROWS[config.model_type].head:
            model = classes.AutoModelForCausalLM.from_config(config)
        else:
            model = getattr(classes, type(config).__name__.replace("Config", "Model"))(config)
    model = model.eval().double()
    if seed is not None:
        drawn = draw.parameters(seed, describe(model))
        write(model, {k: x / 8 if k.endswith("bias") else x for k, x in drawn.items()})
    return model
