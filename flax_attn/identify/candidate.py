"""A layer that a torch module may be, and a module with weights of its own to try it on."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..masks import FULL
from ..parity import draw
from ..parity.port import plan, set_flax
from ..parity.sides.torch.float64 import lifted
from ..parity.torch_module import describe, read, write
from ..positions import Frequencies
from ..weights.rule import Rule
from .call import BATCH_FIRST, Call, as_tensors, first_output
from .tables import exact_rates


@dataclass(frozen=True)
class Candidate:
    """A layer that a module may be.

    Attributes:
      text: Python that builds it, without `rngs`.
      names: what the text uses.
      rules: carry the weights.
      sees_all: whether its own mask is set to `FULL`.
      order: axes of batch, tokens and features of the module's tokens.
      mask: which of the call's masks it gets, by its number in `Call.masks`; None for none.
      takes: how many of the call's tokens and memories it gets.
      is_one_of_few: whether it is tried as one program, and not by steps that many guesses share.
    """

    text: str
    names: Mapping[str, Any] = field(repr=False)
    rules: tuple[Rule, ...] = ()
    sees_all: bool = False
    order: tuple[int, int, int] = BATCH_FIRST
    mask: int | None = None
    takes: int = 1
    is_one_of_few: bool = True

    @property
    def lines(self) -> tuple[str, ...]:
        """How the layer is called in place of the module, where it is not `layer(x)`."""
        full = ("layer.mask = FULL  # the module got no mask, and hides nothing",)
        swapped = ("the module takes `T B D`: layer(x.swapaxes(0, 1)).swapaxes(0, 1)",)
        masked = ("the call's mask goes to the layer: layer(x, mask=m), m True if a key is seen",)
        finest = ("torch's eps=None is 2.2e-16 in float64 and 1.2e-07 in float32",)
        is_swapped, is_masked = self.order != BATCH_FIRST, self.mask is not None
        is_finest = str(np.finfo(np.float64).eps) in self.text
        more = (*masked * is_masked, *finest * is_finest)
        return (*full * self.sees_all, *swapped * is_swapped, *more)

    def build(self) -> Any:
        """The layer with zeros, for which nothing is compiled, unless it has tables of its own."""

        def built() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of fields that are for other layers
                return eval(f"{self.text[:-1]}, rngs=rngs)", {**self.names, "rngs": nnx.Rngs(0)})

        layer = built() if "Alibi" in self.text else with_zeros(built)
        if self.sees_all:
            layer.mask = FULL
        layer.eval()
        return layer

    def arrays(self, call: Call) -> list[np.ndarray]:
        """The tokens and memories of a call, and the mask that the layer gets."""
        masks = [] if self.mask is None else [[*call.masks()][self.mask]]
        return [*call.inputs, *masks]

    def output(self, layer: Any, *arrays: Any) -> Any:
        """The layer's output for these, which are ordered as the module's."""
        *inputs, mask = arrays if self.mask is not None else (*arrays, None)
        options = {} if mask is None else {"mask": mask}
        # Either order is its own inverse.
        inputs = [x.transpose(self.order) if x.ndim == 3 else x for x in inputs[: self.takes]]
        y = layer(*inputs, **options)
        return y.transpose(self.order) if y.ndim == 3 else y


def with_zeros(built: Callable[[], nnx.Module]) -> Any:
    """A module whose weights are zeros, for which nothing is compiled, unless it has own rates."""

    def of_leaf(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key(0) if is_key else np.zeros(leaf.shape, leaf.dtype)

    layer = nnx.eval_shape(built)
    if isinstance(getattr(getattr(layer, "rotary", None), "scaling", None), Frequencies):
        return built()
    graph, weights = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(of_leaf, weights))


def called(module: Any, call: Call, layer: Any, inputs: Sequence[Any]) -> Any:
    """The first output of a torch module for these tokens and memories.

    Rates of a rotary that torch rounded to float32, in a buffer of the module or of one that
    `call.run` refers to, are those of the layer while it runs.
    """
    args, kwargs = as_tensors(call.with_inputs(*inputs))
    modules, rotary, replaced = [module, *call.modules()], getattr(layer, "rotary", None), []
    for part in chain.from_iterable(x.modules() for x in modules) if rotary is not None else ():
        for name, buffer in part._buffers.items():
            exact = None if buffer is None else exact_rates(rotary, buffer)
            if exact is not None:
                replaced.append((part, name, buffer, exact))
                part._buffers[name] = exact
    try:
        return first_output(call.run(module, *args, **kwargs))
    finally:
        for part, name, buffer, exact in replaced:
            if part._buffers[name] is exact:  # the module may have made others for this length
                part._buffers[name] = buffer


class Drawn:
    """A torch module in float64, in eval mode, with random weights."""

    def __init__(self, module: Any):
        self.module = deepcopy(module).double().eval()
        self.sources = describe(self.module)
        write(self.module, draw.parameters(0, self.sources))

    def output(self, call: Call, layer: Any = None) -> np.ndarray:
        """Its first output, with a layer's rates; whatever the module raises is let through."""
        import torch

        with torch.no_grad(), lifted():
            return called(self.module, call, layer, call.inputs).numpy()

    def takes(self, call: Call) -> bool:
        """Whether it runs on these inputs."""
        try:
            self.output(call)
        except Exception:  # whatever a module raises at a length that it does not take
            return False
        return True

    def output_of(self, candidate: Candidate, layer: Any, call: Call) -> np.ndarray:
        """The output of a layer with these weights.

        Raises:
          ParityError: if the weights do not fit.
          ValueError, TypeError: if the layer does not take the inputs.
        """
        mapping = plan(self.module, layer, candidate.rules)
        set_flax(layer, mapping.forward(read(self.module)), np.float64)
        arrays = [x if x.dtype == bool else x.astype(np.float64) for x in candidate.arrays(call)]
        run = nnx.jit(candidate.output) if candidate.is_one_of_few else candidate.output
        with jax.enable_x64(True):
            return np.asarray(run(layer, *map(jnp.asarray, arrays)))
