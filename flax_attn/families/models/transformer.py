"""The layers of a model, one after the other, or stacked over their periods for a scan."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from ...layers._layer import Layer
from .blocks import Block, Build

Caches = list[Any]  # of each stacked place of a period, then of each other layer


class Transformer(Layer):
    """The base of `Decoder` and `Encoder`.

    Attributes:
      stack: a block for each place of a period, whose Params have the periods as first axis;
        empty without a scan. Gemma 3 has periods of five layers with a window and one without.
      layers: the layers that are not stacked.
      remat: whether a gradient computes each layer again in place of storing its steps.
      config: the published config as JSON.
    """

    stack: nnx.List
    layers: nnx.List
    remat: bool
    config: str
    deterministic: bool = False

    def set_layers(self, build: Build, scan: bool, remat: bool) -> None:
        """Builds the layers."""
        depth = build.config.count("num_hidden_layers")
        period = period_of(build, depth) if scan else depth + 1
        self.periods = depth // period
        keys = jax.random.split(build.init.rngs.params(), (period, self.periods)) if scan else ()

        def stacked(place: int) -> Block:
            return nnx.vmap(lambda key: Block(build.with_keys(nnx.Rngs(key)), place))(keys[place])

        self.stack = nnx.List([stacked(place) for place in range(period if self.periods else 0)])
        first = self.periods * period
        self.layers = nnx.List([Block(build, index) for index in range(first, depth)])
        self.remat, self.deterministic = remat, False

    def run_layers(
        self, x: Float[Array, "*B T D"], caches: Caches | None, call: dict[str, Any]
    ) -> tuple[Float[Array, "*B T D"], Caches | None]:
        """The hidden states after all layers, and the new caches, or None.

        Args:
          x: hidden states.
          caches: from `init_cache` or an earlier call.
          call: keywords of each block: deterministic, and those of its attention.
        """
        places, after = len(self.stack), []
        before = [None] * (places + len(self.layers)) if caches is None else caches
        if places:
            x, after = self._scanned(x, before[:places], call)
        for block, cache in zip(self.layers, before[places:], strict=True):
            x, cache = self._called(block, x, cache, call)
            after.append(cache)
        return x, None if caches is None else after

    def _scanned(self, x: Array, caches: Caches, call: dict[str, Any]) -> tuple[Array, Caches]:
        """Runs the stacked layers, one period after the other."""
        graph, state = nnx.split(self.stack)

        def period(x: Array, each: tuple[Any, Caches]) -> tuple[Array, tuple[Any, Caches]]:
            places, after = nnx.merge(graph, each[0]), []
            for block, cache in zip(places, each[1], strict=True):
                x, cache = self._called(block, x, cache, call)
                after.append(cache)
            return x, (nnx.state(places, nnx.RngState), after)

        x, (keys, after) = jax.lax.scan(period, x, (state, caches))
        self._store_counts(self.stack, keys, call)
        return x, after

    def _called(
        self, block: Block, x: Array, cache: Any, call: dict[str, Any]
    ) -> tuple[Array, Any]:
        """Calls a block; with `remat` a gradient computes it again."""
        if not self.remat:
            return block(x, cache, **call)
        graph, state = nnx.split(block)

        @jax.checkpoint
        def computed(state: Any, x: Array, cache: Any) -> Any:
            copy = nnx.merge(graph, state)
            return copy(x, cache, **call), nnx.state(copy, nnx.RngState)

        result, keys = computed(state, x, cache)
        self._store_counts(block, keys, call)
        return result

    def _store_counts(self, module: nnx.Module, keys: Any, call: dict[str, Any]) -> None:
        """Stores the counts of random keys after a call, if dropout may have drawn some."""
        off = call["deterministic"]
        if not (self.deterministic if off is None else off) and jax.tree.leaves(keys):
            nnx.update(module, keys)


def period_of(build: Build, depth: int) -> int:
    """The number of layers after which the kinds of layers begin anew."""
    kinds = [_kind(build, index) for index in range(depth)]
    periods = range(1, depth + 1)
    return next(p for p in periods if all(kinds[i] == kinds[i % p] for i in range(depth)))


def _kind(build: Build, index: int) -> tuple[bool, str]:
    """What tells a layer from others: whether it has the first norm, and its attention."""

    def attention() -> nnx.Module:
        return build.with_keys(nnx.Rngs(0)).attention_of(index)

    return build.has_norm_in_front(index), str(nnx.graphdef(nnx.eval_shape(attention)))
