"""`flax-attn identify`: which layer of this library a torch class is, as Python that builds it.

Imports torch only when the command runs.
"""

import argparse
import ast
import builtins
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .._internal.nearest import did_you_mean
from .wrap import wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from ..identify.identify import Identified

BATCH, LENGTH = 2, 7  # of the tokens, unless --shape gives others
# Where the width of a token is likely to stand; other numbers are tried after these.
WIDTHS = ("hidden_size", "d_model", "embed_dim", "dim", "n_embd", "width")
# Arguments of `forward` that may all be the tokens.
TOKENS = {"q", "k", "v", "query", "key", "value", "queries", "keys", "values"}


def add_to(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "identify",
        help="say which layer of this library an attention module of torch is, with proofs",
        description="Builds the torch class, compares it on random tokens with layers that it may "
        "be, and prints Python that builds the equal one and loads the weights, and the proofs. "
        "The class must run on tokens alone; one that takes more is for flax_attn.parity.identify. "
        "Imports and runs the class's own code: name only code that you trust. Ends with 0 if a "
        "layer is proven equal, 1 if none is, 2 if the class cannot be built or run.",
    )
    parser.add_argument(
        "name", metavar="CLASS", help="its import path: package.module.Class; see also --config"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON object: the constructor's keywords; or the items of its argument `config`, and "
        "beside them its other arguments, such as layer_idx; default: no arguments",
    )
    parser.add_argument(
        "--shape",
        metavar="B,T,D",
        help=f"batch, tokens and width of the input; default: {BATCH},{LENGTH} and the width that "
        "runs, of the config's numbers and the module's",
    )


def identify(options: argparse.Namespace, console: "Console") -> int:
    """Identifies a class and prints what it is.

    Args:
      options: `name`, `config` and `shape`, as given on the command line.
      console: prints the result.

    Returns:
      0 if a layer is proven equal, else 1.

    Raises:
      ValueError: without torch; for a class that cannot be imported, built or run, a file that is
        no JSON object, and a shape that does not fit.
    """
    from ..parity.cases.home import has_torch

    if not has_torch():
        raise ValueError("identify needs torch: pip install 'flax-attn[torch]'.")
    config = _config(options.config)
    shape = _shape(options.shape)
    module = _built(_class_of(options.name), config)
    inputs = _inputs(module, shape, _numbers(config))

    from ..identify.identify import identify

    result = identify(module, *inputs)
    if result.layer is None:
        console.out(wrapped(str(result), console.width), highlight=False)
        return 1
    console.out(program(result, type(module).__name__), highlight=False)
    return 0


def program(result: "Identified", name: str) -> str:
    """Python that builds the layer and loads the weights, then the comparisons as comments.

    Args:
      result: of a module that is a layer of this library.
      name: the torch module's class.

    Returns:
      a program in which only `torch_module` is undefined.
    """
    then = [line for line in result.notes if line.startswith("layer.")]
    code = ast.walk(ast.parse("\n".join([result.text, *then])))
    used = {node.id for node in code if isinstance(node, ast.Name)}
    public = sorted(used - {*dir(builtins), "layer", "torch_module"})
    rules = [f"    {rule}," for rule in result.rules]
    notes = [line for line in result.notes if line not in then]
    about = [f"# {line}" for line in (*result.limit, *notes, *map(str, result.proofs))]
    lines = [
        "from flax import nnx",
        f"from flax_attn import {', '.join(public)}",
        f"from flax_attn.parity import {'Rule, ' if rules else ''}port",
        "",
        f"layer = {result.text[:-1]}, rngs=nnx.Rngs(0))",
        *then,
        *(["rules = [", *rules, "]"] if rules else ["rules = []"]),
        f"port(torch_module, layer, rules)  # torch_module: your {name}",
        "",
        *about,
    ]
    return "\n".join(lines)


# What is given on the command line.


def _config(name: str | None) -> dict[str, Any]:
    """The object in a JSON file; empty without a file."""
    if name is None:
        return {}
    try:
        config = json.loads(Path(name).read_text("utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"--config {name} cannot be read: {reason}.") from error
    except ValueError as error:
        raise ValueError(f"--config {name} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise ValueError(f"--config takes a JSON object of keywords; {name} holds a {kind}.")
    return config


def _shape(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    pieces = [piece.strip() for piece in text.split(",")]
    if len(pieces) != 3 or not all(piece.isdecimal() and int(piece) > 0 for piece in pieces):
        raise ValueError(f"--shape takes batch, tokens and width, such as 2,7,64; got {text!r}.")
    batch, length, features = map(int, pieces)
    return batch, length, features


# The class.


def _class_of(name: str) -> type:
    """The class of an import path; imports its module and nothing else."""
    import torch

    place, _, last = name.rpartition(".")
    if not place or not all(map(str.isidentifier, name.split("."))):
        raise ValueError(f"a class is named package.module.Class; got {name!r}.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(place)
    except Exception as error:
        raise ValueError(f"{place} cannot be imported: {_sentence(error)}") from error
    value = getattr(module, last, None)
    known = {
        key: x
        for key, x in {**vars(module), last: value}.items()
        if isinstance(x, type) and issubclass(x, torch.nn.Module)
    }
    if last in known:
        return known[last]
    hint = did_you_mean(last, known, "the module has") if known else "the module has none."
    problem = f"there is no {last} in {place}" if value is None else f"{name} is none"
    raise ValueError(f"identify takes a class of torch.nn.Module, and {problem}: {hint}")


def _built(cls: type, config: dict[str, Any]) -> Any:
    """The module, in eval mode."""
    import torch

    parameters = [*inspect.signature(cls).parameters.values()]
    keywords = _keywords(cls, parameters, config)
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in keywords.keys() - {*known}:
            hint = did_you_mean(key, known, "its arguments are") if known else "it takes none."
            raise ValueError(f"{cls.__name__} takes no argument {key!r}: {hint}")
    absent = [p.name for p in _required(parameters) if p.name not in keywords]
    if absent:
        names = ", ".join(absent)
        raise ValueError(
            f"{cls.__name__} needs {names}: give {'it' if len(absent) == 1 else 'them'} in the "
            "JSON object of a file, with --config FILE."
        )
    try:
        torch.manual_seed(0)
        return cls(**keywords).eval()
    except Exception as error:
        raise ValueError(
            f"{cls.__name__} cannot be built: {_sentence(error)} What it reads is an item of the "
            "JSON object in the file of --config."
        ) from error


def _keywords(
    cls: type, parameters: Sequence[inspect.Parameter], config: dict[str, Any]
) -> dict[str, Any]:
    """The constructor's keywords: the config's items, or the whole of it as `config`.

    Other required arguments next to `config` are items of the same name. The whole is an object of
    the class's own config class, if its module has one, else a namespace.
    """
    required = [parameter.name for parameter in _required(parameters)]
    if "config" not in required or not config or "config" in config:
        return config
    others = {name: config[name] for name in required if name in config}
    # Of several config classes, the one whose name and the class's share the longest start.
    known = vars(sys.modules[cls.__module__]).items()
    configs = [x for name, x in known if isinstance(x, type) and name.endswith("Config")]
    fitting = [x for x in configs if cls.__name__.startswith(x.__name__.removesuffix("Config"))]
    kind = max(fitting, key=lambda x: len(x.__name__), default=None)
    items = {key: x for key, x in config.items() if key not in others}
    if kind is None:
        return {"config": _namespace(config), **others}
    try:
        made = kind(**items)
    except Exception as error:
        raise ValueError(f"--config does not fit {kind.__name__}: {_sentence(error)}") from error
    if getattr(made, "_attn_implementation", "") is None:
        made._attn_implementation = "eager"  # as a model would choose
    return {"config": made, **others}


def _required(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.default is p.empty and p.kind not in stars]


def _namespace(value: Any) -> Any:
    """Objects as namespaces, at every depth."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: _namespace(x) for key, x in value.items()})
    return [*map(_namespace, value)] if isinstance(value, list) else value


def _sentence(error: Exception) -> str:
    """An error's first line as the end of a sentence."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".rstrip(": .")
    return f"{text}."


# The tokens.


def _inputs(module: Any, shape: tuple[int, int, int] | None, numbers: Mapping[str, int]) -> Any:
    """Arguments of a forward pass that runs: random tokens `B T D` for each that takes them."""
    import numpy as np
    import torch

    name = type(module).__name__
    needed = [p.name for p in _required([*inspect.signature(module.forward).parameters.values()])]
    several = len(needed) > 1 and {*needed} <= TOKENS
    dtype = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    shapes = [(BATCH, LENGTH, width) for width in _widths(module, numbers)]
    problems = {}
    for sizes in shapes if shape is None else [shape]:
        inputs = [np.random.RandomState(0).standard_normal(sizes)] * (len(needed) if several else 1)
        try:
            with torch.no_grad():
                module(*(torch.from_numpy(x).to(dtype) for x in inputs))
        except Exception as error:
            problems[sizes] = _sentence(error)
        else:
            return inputs
    if not problems:
        raise ValueError(
            f"{name} shows no width of its tokens: give --shape B,T,D, such as 2,7,64."
        )
    first = next(iter(problems.values()))
    if shape is not None:
        raise ValueError(f"{name} does not run on --shape {','.join(map(str, shape))}: {first}")
    widths = ", ".join(str(width) for *_, width in problems)
    raise ValueError(
        f"{name} runs on no tokens {BATCH},{LENGTH},D with D of {widths}: {first} If it "
        "takes tokens alone, give --shape B,T,D; if it takes more (a memory, cos and sin, a mask), "
        "call flax_attn.parity.identify(module, *inputs, kwargs={...})."
    )


def _numbers(config: Mapping[str, Any]) -> dict[str, int]:
    """Positive integers of a config, at every depth."""
    numbers = {}
    for key, value in config.items():
        if isinstance(value, dict):
            numbers = {**_numbers(value), **numbers}
        elif type(value) is int and value > 0:
            numbers[key] = value
    return numbers


def _widths(module: Any, numbers: Mapping[str, int]) -> Iterator[int]:
    """Sizes that may be a token's width, likely ones first, each once."""
    import torch

    attributes = {key: x for key, x in vars(module).items() if type(x) is int and x > 0}
    linears = [m.in_features for m in module.modules() if isinstance(m, torch.nn.Linear)]
    names = [part[name] for name in WIDTHS for part in (numbers, attributes) if name in part]
    yield from dict.fromkeys([*names, *linears[:1], *numbers.values(), *attributes.values()])
