"""One step of a mapping: torch tensors, the Flax Params they fill, and the layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from .einops_layout import Size, backwards, lay_out, sizes_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """Torch tensors, the Flax Params or statistics they fill, and the layout (None: unchanged).

    `shift` is added to the values in the direction from torch to Flax.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    layout: str | None = None
    sizes: dict[str, Size] = field(default_factory=dict)
    shift: float = 0.0

    def forward(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts torch's arrays to Flax's."""
        return self._carry(values, self.sources, self.targets, self.layout, self.shift)

    def back(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts Flax's arrays to torch's."""
        layout = None if self.layout is None else backwards(self.layout)
        return self._carry(values, self.targets, self.sources, layout, -self.shift)

    def renamed(self, name: Callable[[str], str]) -> "Move":
        """Returns the same move for renamed torch tensors."""
        return replace(self, sources=tuple(map(name, self.sources)))

    def fitted(self, shapes: Mapping[str, Shape], wants: Mapping[str, Shape]) -> "Move":
        """Returns the move with the sizes of all axes.

        Args:
          shapes, wants: shapes of torch's tensors, and of Flax's.

        Raises:
          ValueError: if the layout does not fit torch's shapes.
          Misfit: if the resulting shapes are not Flax's.
        """
        parts = [shapes[name] for name in self.sources]
        sizes = dict(self.sizes)
        if self.layout is not None:
            sizes = sizes_of(self.layout, parts, len(self.targets), sizes)
        move = replace(self, sizes=sizes)
        empty = [np.broadcast_to(np.int8(0), shape) for shape in parts]
        for path, value in move.forward(dict(zip(self.sources, empty, strict=True))).items():
            if value.shape != wants[path]:
                raise Misfit(self.sources, parts, path, value.shape, wants[path])
        return move

    def _carry(self, values, sources, targets, layout, shift):
        arrays = [values[name] for name in sources]
        if shift:
            arrays = [x + np.asarray(shift, x.dtype) for x in arrays]
        rearranged = arrays if layout is None else lay_out(arrays, layout, len(targets), self.sizes)
        return dict(zip(targets, rearranged, strict=True))


class Misfit(Exception):
    """Raised if a move's result does not have the shape of its Flax target."""

    def __init__(self, sources: tuple[str, ...], shapes: list[Shape], path: str, got, want):
        super().__init__(
            f"{', '.join(sources)} {' '.join(str(list(s)) for s in shapes)} would fill {path} "
            f"as {list(got)}, but it is {list(want)}."
        )


@dataclass(frozen=True)
class Stack:
    """Moves of torch's separate layers, stacked along the first axis of nnx's Params."""

    layers: tuple[Move, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for layer in self.layers for name in layer.sources)

    @property
    def targets(self) -> tuple[str, ...]:
        return self.layers[0].targets

    @property
    def layout(self) -> str | None:
        return self.layers[0].layout

    def forward(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts torch's arrays to Flax's."""
        rearranged = [layer.forward(values) for layer in self.layers]
        return {path: np.stack([each[path] for each in rearranged]) for path in self.targets}

    def back(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts Flax's arrays to torch's."""
        each = (
            layer.back({path: values[path][i] for path in self.targets})
            for i, layer in enumerate(self.layers)
        )
        return {name: x for arrays in each for name, x in arrays.items()}

    def renamed(self, name: Callable[[str], str]) -> "Stack":
        """Returns the same move for renamed torch tensors."""
        return Stack(tuple(layer.renamed(name) for layer in self.layers))

    def fitted(self, shapes: Mapping[str, Shape], wants: Mapping[str, Shape]) -> "Stack":
        """Same as `Move.fitted`; the first axis of Flax's Params is the layers'."""
        for path in self.targets:
            if wants[path][:1] != (len(self.layers),):
                raise Misfit(
                    self.sources,
                    [shapes[name] for name in self.sources],
                    path,
                    (len(self.layers), *wants[path][1:]),
                    wants[path],
                )
        inner = {path: want[1:] for path, want in wants.items()}
        return Stack(tuple(layer.fitted(shapes, inner) for layer in self.layers))
