"""A small config of a family, in both spellings."""

from dataclasses import dataclass, field
from typing import Any

from .sizes import LLAMA_SIZES, MORE, SIZES

LATEST = ("gemma4_text", "laguna", "mistral4")  # which never had the older spelling
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
        sizes = {**SIZES.get(self.name, LLAMA_SIZES), **MORE.get(self.alias, {})}
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
