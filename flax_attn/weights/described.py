"""A torch module's tensors, described so that they can be written down and read without torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")
HEADS += ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "kv_heads")


@dataclass(frozen=True)
class Source:
    """One named tensor of a torch module.

    Attributes:
      name: dotted, as in `state_dict`.
      kind: the known type of the module that holds it, or "Parameter"; "buffer" for one that is
        not a statistic of a norm.
      shape: torch's.
      dtype: torch's, without "torch.".
      same_as: the first name of the same tensor, if it is tied, else "".
      heads: how many heads what holds it says that it has, for proposals alone: not written down.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    same_as: str = ""
    heads: tuple[int, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        fields = {**asdict(self), "shape": list(self.shape)}
        del fields["heads"]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Source":
        """The source that `to_json` wrote."""
        return cls(**{**fields, "shape": tuple(fields["shape"])})


def head_counts(owner: Any) -> list[int]:
    """The numbers of heads that an object, or its `config`, says that it has."""
    namespaces = [getattr(owner, "__dict__", {})]
    namespaces.append(getattr(namespaces[0].get("config"), "__dict__", {}))
    counts = [facts.get(name) for facts in namespaces for name in HEADS]
    return [n for n in counts if isinstance(n, int) and not isinstance(n, bool) and n > 1]
