"""Serialisable descriptions of a torch module's tensors, which need no torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")
HEADS += ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "kv_heads")


@dataclass(frozen=True)
class Source:
    """One named tensor of a torch module.

    Attributes:
      name: dotted name, as in `state_dict`.
      kind: known type of the module that holds it, or "Parameter"; "buffer" for a buffer that is
        not a norm statistic.
      shape: torch's shape.
      dtype: torch's dtype, without "torch.".
      same_as: first name of the same tensor if it is tied, else "".
      heads: head counts of the modules that hold it; used only for proposals, not serialised.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    same_as: str = ""
    heads: tuple[int, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """Converts to a plain dict."""
        fields = {**asdict(self), "shape": list(self.shape)}
        del fields["heads"]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Source":
        """Creates a source from the output of `to_json`."""
        return cls(**{**fields, "shape": tuple(fields["shape"])})


def head_counts(owner: Any) -> list[int]:
    """Returns the head counts among the attributes of an object and of its `config`."""
    namespaces = [getattr(owner, "__dict__", {})]
    namespaces.append(getattr(namespaces[0].get("config"), "__dict__", {}))
    counts = [facts.get(name) for facts in namespaces for name in HEADS]
    return [n for n in counts if isinstance(n, int) and not isinstance(n, bool) and n > 1]
