"""Small configs of each model type, from `small.json`, in both spellings.

No two sizes of a config are equal, so that a wrong axis cannot pass. The file has these keys:

- "sizes": the fields of every config of a type; "" for types that are not listed.
- "new_spelling_only": types that came after transformers 5, and never had `rope_theta` and
  `rope_scaling` beside each other.
- "alias_fields": what the class of an alias needs beside these so that its model can be built.
- "configs": for each config its type, the layer that is compared, further fields, the rotary
  parameters, and "local_theta", the base of layers with a window where they have their own.
- "parts": the same for the attentions of models that have several in a layer.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE: dict[str, Any] = json.loads(Path(__file__).with_name("small.json").read_text("utf-8"))
SIZES: dict[str, dict[str, Any]] = FILE["sizes"]
LATEST = FILE["new_spelling_only"]
BESIDE = ("partial_rotary_factor",)  # of the rotary, but not in the older rope_scaling
MODERN = ("modernbert", "modernbert-decoder")  # whose older files name both bases
GEMMAS = ("gemma3_text", "gemma3n_text")
LOCAL = {
    **dict.fromkeys(GEMMAS, "rope_local_base_freq"),
    **dict.fromkeys(MODERN, "local_rope_theta"),
}
OLD_NAMES = {
    ("gpt_neox", "rope_theta"): "rotary_emb_base",
    ("gpt_neox", "partial_rotary_factor"): "rotary_pct",
}


@dataclass(frozen=True)
class Small:
    """One config: its fields, its rotary, and which layer is looked at."""

    name: str
    fields: dict[str, Any]
    rope: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    local: float | None = None  # the base of layers with a window, where they have their own
    alias: str = ""  # another model_type with the same attention, and this config in its words

    @property
    def model_type(self) -> str:
        """Its own, or its alias."""
        return self.alias or self.name

    def spelt(self, spelling: str) -> dict[str, Any]:
        """The config as files have it since transformers 5 ("new"), or before ("old")."""
        sizes = {**SIZES.get(self.name, SIZES[""]), **FILE["alias_fields"].get(self.alias, {})}
        first = {"model_type": self.model_type, **sizes, **self.fields}
        if not self.rope:
            return first
        if self.name in LATEST:
            spelling = "new"
        scaling = {k: v for k, v in self.rope.items() if k not in ("rope_theta", *BESIDE)}
        if spelling == "new":
            full = {"rope_type": "default", **self.rope}
            sliding = {"rope_type": "default", "rope_theta": self.local}
            both = {"full_attention": full, "sliding_attention": sliding}
            return {**first, "rope_parameters": full if self.local is None else both}
        if "rope_type" in scaling and self.local is None:  # Gemma 3 came later
            scaling["type"] = scaling.pop("rope_type")
        beside = {"rope_theta": self.rope["rope_theta"], "rope_scaling": scaling or None}
        beside |= {key: self.rope[key] for key in BESIDE if key in self.rope}
        beside = {OLD_NAMES.get((self.name, key), key): x for key, x in beside.items()}
        if self.name in MODERN:
            beside["global_rope_theta"] = beside.pop("rope_theta")
        local = {LOCAL[self.name]: self.local} if self.name in LOCAL else {}
        return {**first, **beside, **local}


def _small(row: dict[str, Any]) -> Small:
    fields, rope = row.get("fields", {}), row.get("rope", {})
    return Small(row["type"], fields, rope, row["layer"], row.get("local_theta"))


CONFIGS = [_small(row) for row in FILE["configs"]]
NAMES = tuple(dict.fromkeys(small.name for small in CONFIGS))
BOTH = [(small, spelling) for small in CONFIGS for spelling in ("new", "old")]


def place(small: Small) -> int:
    """Which config of its family it is, from 0."""
    return [x for x in CONFIGS if x.name == small.name].index(small)


def titled(value: Any) -> str | None:
    """The id of a parameter of a test."""
    return f"{value.name}-{place(value)}" if isinstance(value, Small) else None
