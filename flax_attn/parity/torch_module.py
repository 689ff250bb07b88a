"""Describes a torch module's tensors, reads them as numpy arrays, and writes them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ..weights.described import Source, head_counts
from .sides.original import Part

# torch class -> kind of the tensors it holds.
_SAME = "Linear Bilinear Embedding LayerNorm RMSNorm GroupNorm PReLU MultiheadAttention"
_RECURRENT = "RNN GRU LSTM RNNCell GRUCell LSTMCell"
KINDS = {
    **{name: name for name in (_SAME + " " + _RECURRENT).split()},
    "_ConvNd": "Conv",
    "_ConvTransposeNd": "ConvTranspose",
    "_BatchNorm": "BatchNorm",
    "_InstanceNorm": "InstanceNorm",
}
STATISTICS = ("running_mean", "running_var")


def as_torch_module(function: Callable[..., Any]) -> Any:
    """A torch function as a module without parameters, under the function's name.

    >>> import torch
    >>> as_torch_module(torch.tanh)
    tanh()
    """
    import torch

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return type(
        getattr(function, "__name__", type(function).__name__),
        (torch.nn.Module,),
        {"forward": forward},
    )()


def describe(module: Any) -> list[Source]:
    """Describes every parameter and buffer of a torch module; tied ones under each name."""
    sources, first, heads = [], {}, {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        above = heads.get(prefix.rpartition(".")[0], ())
        heads[prefix] = tuple(dict.fromkeys((*head_counts(owner), *above)))
        for role, tensor in owner.named_parameters(recurse=False, remove_duplicate=False):
            same_as = first.setdefault(id(tensor), dot + role)
            kind = _kind(owner)
            sources.append(_source(dot + role, kind, tensor, same_as, heads[prefix]))
        for role, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
            same_as = first.setdefault(id(tensor), dot + role)
            kind = _kind(owner) if role in STATISTICS else "buffer"
            kind = kind if kind in ("BatchNorm", "InstanceNorm") else "buffer"
            sources.append(_source(dot + role, kind, tensor, same_as, heads[prefix]))
    return sources


def read(module: Any) -> dict[str, np.ndarray]:
    """Copies every parameter and buffer of a torch module to numpy, by name."""
    names = {source.name for source in describe(module)}
    tensors = {**dict(module.named_parameters(remove_duplicate=False))}
    tensors.update(module.named_buffers(remove_duplicate=False))
    return {name: to_numpy(tensor) for name, tensor in tensors.items() if name in names}


def write(module: Any, values: dict[str, np.ndarray]) -> None:
    """Copies arrays into parameters and buffers of a torch module, by name, in their dtypes."""
    import torch

    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(to_torch(value))


def to_numpy(tensor: Any) -> np.ndarray:
    """Copies a torch tensor to numpy, bit for bit, bfloat16 included."""
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return tensor.numpy().copy()


def to_torch(array: np.ndarray) -> Any:
    """Copies an array to a torch tensor, bit for bit; no memory is shared."""
    import torch

    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def part_of(module: Any) -> Part:
    """Describes one module, without its submodules."""
    facts = vars(module).items()
    settings = {name: x for name, x in facts if not name.startswith("_") and is_setting(x)}
    bases = type(module).__mro__[1:]
    in_torch = [path_of(base) for base in bases if base.__module__.startswith("torch.")]
    return Part(path_of(type(module)), tuple(in_torch), settings)


def path_of(kind: type) -> str:
    """The import path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_setting(value: Any) -> bool:
    """Whether `value` is None, a number, a string, a bool, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_setting, value))
    return value is None or isinstance(value, bool | int | float | str)


def _source(name: str, kind: str, tensor: Any, first: str, heads: tuple[int, ...]) -> Source:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Source(name, kind, tuple(tensor.shape), dtype, "" if first == name else first, heads)


def _kind(owner: Any) -> str:
    """The kind of the first known class in the owner's MRO.

    RMSNorm and LayerNorm classes of other packages are classified by what they compute, not by
    name: T5's LayerNorm is an RMSNorm. transformers' Conv1D is a Linear with Flax's weight layout.
    """
    for cls in type(owner).__mro__:
        if cls.__module__.startswith("torch.nn.") and cls.__name__ in KINDS:
            return KINDS[cls.__name__]
        if cls.__module__.startswith("transformers.") and cls.__name__ == "Conv1D":
            return "Conv1D"
    return _norm_kind(owner) or "Parameter"


def _norm_kind(owner: Any) -> str:
    """The norm that a module with a single gain computes, or ""; by name if it cannot be called.

    A norm is invariant to doubling its input; LayerNorm is also invariant to adding a constant.
    """
    params = dict(owner.named_parameters(recurse=False))
    sizes = {tuple(x.shape) for x in params.values()}
    gain = params.get("weight")
    ends = ("RMSNorm", "LayerNorm")
    called = next((end for end in ends if type(owner).__name__.endswith(end)), "")
    if gain is None or not gain.ndim or len(sizes) > 1 or any(True for _ in owner.children()):
        return called
    computed = _computes(type(owner), owner, tuple(gain.shape))
    return called if computed is None else computed


_COMPUTED: dict[type, str | None] = {}


def _computes(kind: type, owner: Any, shape: tuple[int, ...]) -> str | None:
    """ "RMSNorm", "LayerNorm", "" for another function, None if it takes other arguments."""
    import torch

    if kind not in _COMPUTED:
        x = torch.linspace(-3.0, 5.0, 2 * math.prod(shape)).reshape(2, *shape).sin() * 1e3
        try:
            with torch.no_grad():
                module = copy.deepcopy(owner).cpu().float().eval()
                module.weight.fill_(1.0)
                same, twice, moved = (module(y) for y in (x, 2 * x, x + 1e3))
        except Exception:
            _COMPUTED[kind] = None
        else:
            # A router with one weight returns a tuple, which no norm does.
            is_norm = torch.is_tensor(same) and same.shape == x.shape
            is_norm = is_norm and torch.allclose(same, twice, 1e-3, 1e-3)
            ends = "LayerNorm" if is_norm and torch.allclose(same, moved, 1e-3, 1e-3) else "RMSNorm"
            _COMPUTED[kind] = ends if is_norm else ""
    return _COMPUTED[kind]
