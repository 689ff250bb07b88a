"""What layers share that hold all their weights: a call, and heads without sinks."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from ..masks import Mask
from ._grouped import GroupedHeads, Norm


class WeightsAttention(GroupedHeads):
    """Self attention by `attend_by_weights`. A layer adds `read`, the equation of its weights."""

    def refuse(self, k_norm: Norm | None, sinks: bool) -> None:
        """Raises ValueError for sinks."""
        if sinks:
            raise ValueError(
                f"{type(self).__name__} has no sinks, which join the denominator of `attend`'s "
                "softmax; got sinks=True. Leave it out, or use GroupedQueryAttention."
            )

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself; arguments as of `GroupedQueryAttention`."""
        x, seen = self.tokens(x, mask, valid)  # *B T D
        how = {"mask": seen, **self.how(deterministic)}
        del how["sinks"]
        return self.output(self.read(*self.heads(x, positions), **how), valid)  # *B T D

    def read(
        self,
        q: Float[Array, "*B T N H"],
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K H"],
        **how: Any,
    ) -> Float[Array, "*B T N H"]:
        """What the heads read; `how` is what `attend_by_weights` is given beside them."""
        raise NotImplementedError
