"""What the site's reference shows of a class: a Griffe extension.

Examples in docstrings become blocks of code. Of a layer, the whole constructor is shown, its call
and how a cache is made, wherever they are inherited from; what only the library calls is not.
"""

import inspect
import re
from importlib import import_module
from typing import Any, get_args

import reference
from griffe import (
    Class,
    Docstring,
    Extension,
    Function,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
)

from flax_attn import CAUSAL, FULL, Rules

# The layers, which are on pages of their own.
LAYERS = {name for _, names in reference.FAMILIES.values() for name in names.split()}
# Lines from a prompt on, up to the next blank one.
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
# Methods of other classes that only this library calls.
INSIDE = "bind at at_positions grid as_band as_runs as_segments key_range seen_range static reach "
INSIDE += "next_positions holds_beside by_slot join_documents advance"
# Defaults that have shorter names.
WRITTEN = {"Rules()": Rules(), "CAUSAL": CAUSAL, "FULL": FULL}
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: ParameterKind.keyword_only,
    inspect.Parameter.VAR_POSITIONAL: ParameterKind.var_positional,
    inspect.Parameter.VAR_KEYWORD: ParameterKind.var_keyword,
}


class Examples(Extension):
    """Puts a fence around each example, and shows of classes what their users call."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every object, before its docstring is read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Called for every class, after its members were read."""
        if cls.name in LAYERS:
            _as_called(cls)
        elif cls.path.startswith("flax_attn."):
            for name in INSIDE.split():
                cls.members.pop(name, None)


def fenced(text: str) -> str:
    """A text whose examples are blocks of Markdown."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


def _as_called(cls: Class) -> None:
    """A layer with the whole signatures of what users call, and nothing else."""
    layer = getattr(import_module(cls.module.path), cls.name)
    written = {**cls.members}
    cls.members.clear()
    for name in ("__init__", *reference.CALLED):
        function = getattr(layer, name, None)
        if inspect.isfunction(function):
            cls.set_member(name, _function(name, function, written.get(name)))


def _function(name: str, function: Any, written: Any) -> Function:
    """A method with the signature that it has when it is called."""
    parts = inspect.signature(function).parameters.values()
    known = getattr(written, "parameters", ())
    parameters = Parameters(*(one for part in parts for one in _parameters(part, known)))
    made = Function(name, parameters=parameters, returns=getattr(written, "returns", None))
    text = inspect.getdoc(function)
    if name != "__init__" and text:
        made.docstring = Docstring(fenced(text), parent=made)
    return made


def _parameters(part: inspect.Parameter, known: Any) -> list[Parameter]:
    """A parameter; its annotation and default as they are written, if they are.

    Keywords that a function hands on are the items of their `TypedDict`.
    """
    items = getattr(next(iter(get_args(part.annotation)), None), "__annotations__", {})
    if part.kind is part.VAR_KEYWORD and items:
        kind = ParameterKind.keyword_only
        return [
            Parameter(name, annotation=_annotation(value), kind=kind, default="...")
            for name, value in items.items()
        ]
    if part.name in known:
        return [known[part.name]]
    default = None if part.default is part.empty else _text(part.default)
    annotation = None if part.annotation is part.empty else _annotation(part.annotation)
    return [Parameter(part.name, annotation=annotation, kind=KINDS[part.kind], default=default)]


def _text(value: Any) -> str:
    """A default as one would write it."""
    text = getattr(value, "__name__", None) or repr(value)
    for name, constant in WRITTEN.items():
        text = text.replace(repr(constant), name)
    return text


def _annotation(value: Any) -> str:
    """An annotation without the modules of its names."""
    text = inspect.formatannotation(value)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Za-z_])", "", text)
    return text.replace("Union[Initializer, Callable[..., Any], NoneType]", "Initializer | None")
