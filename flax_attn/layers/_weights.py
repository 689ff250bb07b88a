"""Base of layers that materialize all attention weights."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from ..masks import Dense, Mask, as_mask
from ._self_attention import GroupedHeads, NormFn
from ._token_indices import documents_of


class WeightsAttention(GroupedHeads):
    """Self attention by `attend_by_weights`. Subclasses define `read`."""

    reads_documents = False  # whether `read` takes `documents`: padding and document ids

    def refuse(self, k_norm: NormFn | None, sinks: bool) -> None:
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
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself; arguments as in `GroupedQueryAttention`."""
        call: dict[str, Any] = {"mask": mask, "positions": positions, "valid": valid}
        tokens = self.tokens(x, deterministic=deterministic, **call)  # *B T D
        q, k, v, _ = self.project(tokens)  # *B T N H, *B T K H, *B T K H
        rules, visible = tokens.rules, tokens.rules.mask
        if tokens.real is not None:  # padding queries must not affect other weights
            visible = visible & Dense(tokens.real[..., None, :, None])
        attend_kwargs: dict[str, Any] = {"mask": visible, "score": rules.score}
        attend_kwargs |= {"scale": rules.scale, "dropout": rules.dropout}
        if self.reads_documents:
            documents = self.mask if mask is None else as_mask(mask)
            attend_kwargs["documents"] = documents_of(tokens.x, tokens.real, documents)
        return self.output(self.read(q, k, v, **attend_kwargs), tokens)  # *B T D

    def read(
        self,
        q: Float[Array, "*B T N H"],
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K H"],
        **attend_kwargs: Any,
    ) -> Float[Array, "*B T N H"]:
        """Attention output of the heads; `attend_kwargs` go to `attend_by_weights`."""
        raise NotImplementedError
