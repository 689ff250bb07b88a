"""Folders as transformers writes them: `load` makes a model of one, and `save` writes one."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..._internal.replacing import replacing
from ...errors import CheckpointError
from ...positions import Rotary
from ...weights.checkpoint import Checkpoint
from ...weights.fitting import Cast
from ...weights.known_layers import flax_state
from ...weights.load import Shardings
from ...weights.load import load as load_weights
from ...weights.rule import Rule
from ...weights.save import save as save_weights
from ...weights.shards import SINGLE
from .._config import USUAL, Config
from .._naming import named_layers
from .._published import INFINITY
from .._reading import NAME
from .._whole import Named, of_all
from .build import body_of, model
from .decoder import Decoder
from .encoder import Encoder
from .facts import Body
from .transformer import Transformer

EMBEDDINGS = ("embed_tokens", "embed_patches")  # of which a model has one


def rules_of(whole: Transformer, *, in_files: bool = True) -> tuple[Rule, ...]:
    """Returns the rules from transformers' names to those of a model.

    Names of modules in memory and names in files are both in there, as rules that may match
    nothing: `parity.compare` with a model of transformers and `weights.load` take the same rules. A
    decoder is that of the class with a head, `LlamaForCausalLM`, an encoder that without one.

    Args:
      whole: the model.
      in_files: whether names are included that files alone have, as ViT's; False for `save_lora`,
        since PEFT names modules in memory.

    Raises:
      TypeError: if it is not one that `model` returned.

    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
    >>> print(rules_of(model(config, rngs=nnx.Rngs(0)))[0])
    Rule.optional("transformer.wte -> embed_tokens")
    """
    if not isinstance(whole, Transformer):
        raise TypeError(f"A model of families.model is needed; got {type(whole).__name__}.")
    _, body = _row_of(whole)
    heads = (body.saved_head or body.head, body.head)[0 if in_files else 1 :]
    return _rules(whole, body.base if body.head else "", heads, in_files)


def load(
    folder: str | os.PathLike[str],
    *,
    part: str | None = None,
    rngs: nnx.Rngs | None = None,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    scan: bool = False,
    remat: bool = False,
    cast: Cast = "widen",
    sharding: Shardings = None,
    manifest: bool | None = None,
) -> Any:
    """Returns the model of a folder of transformers, with its weights, in evaluation.

    The folder holds `config.json`, and `model.safetensors` or its shards. A head that is tied may
    be in the file too. Of a file of a larger model, such as one with a head for classification,
    an encoder takes its own weights; without those of a pooler its `pooler` is None.

    Args:
      folder: its path.
      part, dtype, param_dtype, scan, remat: as in `model`.
      rngs: source of the dropout; None for `nnx.Rngs(0)`.
      cast, sharding, manifest: as in `weights.load`.

    Raises:
      ValueError: for a path that is no folder, and as in `model`.
      TypeError: as in `model`.
      CheckpointError: as in `weights.load`.

    Source: `from_pretrained` of transformers 5.24.

    >>> import tempfile
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
    >>> one = model(config, rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as name:
    ...     save(one, name)
    ...     other = load(name)
    >>> bool((one.norm.scale[...] == other.norm.scale[...]).all())
    True
    """
    if not isinstance(folder, str | os.PathLike) or not os.path.isdir(folder):
        raise ValueError(
            "load reads a folder with config.json and the weights; got "
            f"{folder!r}, which is none. Nothing is downloaded."
        )
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
    options |= {"part": part, "scan": scan, "remat": remat}
    key = jax.random.key(0) if rngs is None else rngs.dropout()

    def built() -> Decoder | Encoder:
        return model(folder, rngs=nnx.Rngs(key), **options)

    whole = nnx.eval_shape(built)
    checkpoint = Checkpoint(folder, False, True)
    names, (fields, body) = list(checkpoint.entries), _row_of(whole)
    tables = [x.sides[0] for x in body.names_of(fields) if x.sides[1] in EMBEDDINGS]
    prefix = _prefix_in(checkpoint.path, names, {f"{table}.weight" for table in tables})
    if isinstance(whole, Decoder):
        ends = tuple(f".{head}.weight" for head in (body.saved_head or body.head, body.head))
        heads = [x.removesuffix(".weight") for x in names if f".{x}".endswith(ends)]
        rules = _rules(whole, prefix, heads)
        if prefix not in ("", body.base):  # the text of a multimodal model
            below = (f"{prefix}.", *(f"{head}." for head in heads))
            rules += tuple(Rule.skip(name) for name in names if not name.startswith(below))
    else:
        rules = _rules(whole, "", ())
        sides = [rule.sides for rule in rules if rule.kind == "move"]
        dot = f"{prefix}." if prefix else ""
        of_pooler = tuple(dot + source for source, target in sides if target.startswith("pooler."))
        if of_pooler and not any(name.startswith(of_pooler) for name in names):
            whole.pooler = nnx.data(None)
    rules = (*_old_norms(rules, names), *rules)
    load_weights(
        whole,
        folder,
        prefix=prefix if isinstance(whole, Encoder) else "",
        rules=rules,
        cast=cast,
        sharding=sharding,
        manifest=manifest,
    )
    _fill_rest(whole, built)
    whole.eval()
    return whole


def save(
    whole: Transformer,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
    manifest: bool = False,
) -> None:
    """Writes a model as a folder that transformers opens: config.json, and the weights.

    A decoder is written with its head, unless that is tied; an encoder as its base model.

    Args:
      whole: the model; this process must be able to read all of its arrays.
      folder: created if missing.
      max_shard_bytes, manifest: as in `weights.save`.

    Raises:
      ValueError: for a model with adapters, and as in `weights.save`.
      TypeError: if it is not one that `model` returned.

    Source: `save_pretrained` of transformers 5.24.
    """
    layered = _unstacked(whole)
    rules = rules_of(layered)
    if any(isinstance(module, nnx.LoRA) for _, module in nnx.iter_modules(whole)):
        raise ValueError(
            "The model has adapters of nnx.LoRA, which no file of transformers holds: write them "
            "by weights.save_lora, and save the model before it is wrapped."
        )
    target, config = Path(folder), json.loads(whole.config)
    target.mkdir(parents=True, exist_ok=True)
    where = target / SINGLE if max_shard_bytes is None else target
    save_weights(layered, where, rules=rules, max_shard_bytes=max_shard_bytes, manifest=manifest)
    for field in ("torch_dtype", "quantization_config"):  # of the file that was read
        config.pop(field, None)
    dtypes = {str(x.get_value().dtype) for x in flax_state(layered).values()}
    config["dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    if isinstance(whole, Encoder):
        config.pop("architectures", None)  # perhaps of a class with a head
    text = json.dumps(config, indent=2, sort_keys=True)
    with replacing(target / NAME) as file:
        file.write(text.replace(" Infinity", f" {json.dumps(INFINITY)}").encode())


def _row_of(whole: Transformer) -> tuple[Config, Body]:
    """The config of a model as its row reads it, and the row."""
    return body_of(json.loads(whole.config), None)


def _rules(
    whole: Transformer, prefix: str, heads: Iterable[str], in_files: bool = True
) -> tuple[Rule, ...]:
    """The rules of a model.

    Args:
      whole: the model.
      prefix: of the base model's names, without its dot.
      heads: names that a head may have.
      in_files: as in `rules_of`.
    """
    fields, body = _row_of(whole)
    names, dot = body.names_of(fields, in_files), f"{prefix}." if prefix else ""
    rules = [moved for rule in names for moved in _in_layers(rule, dot, whole)]
    heads = list(dict.fromkeys(heads))
    if isinstance(whole, Decoder) and whole.lm_head is None:
        table = f"{dot}{names[0].sides[0]}.weight"
        rules += [Rule.tied(f"{head}.weight -> {table}").made_optional() for head in heads]
    elif isinstance(whole, Decoder):
        rules += [Rule.optional(f"{head} -> lm_head") for head in heads]
    places = _places(whole)
    layers = list[tuple[int, Named]]()
    source = "transformers" if in_files else "modules"
    for number, layer in named_layers(json.loads(whole.config), None, source, ("", None)):
        place = f"{places[number]}.self_attn" if whole.stack else USUAL
        layer = layer._replace(source=dot + layer.source, target=place)
        layers.append((number, layer._replace(rest=True, optional=True)))
    return (*rules, *of_all(layers))


def _places(whole: Transformer) -> list[str]:
    """The path of each layer in a model."""
    period, stacked = len(whole.stack), len(whole.stack) * whole.periods
    return [
        *(f"stack.{number % period}.{number // period}" for number in range(stacked)),
        *(f"layers.{number}" for number in range(len(whole.layers))),
    ]


def _in_layers(rule: Rule, dot: str, whole: Transformer) -> Iterator[Rule]:
    """Yields a row's rule with a prefix, for each layer by itself if some are stacked."""
    source, target = rule.sides
    if not whole.stack or "*" not in source:
        yield rule.renamed(f"{dot}{source} -> {target}")
        return
    for number, place in enumerate(_places(whole)):
        name = target.replace("layers.*", place)
        yield rule.renamed(f"{dot}{source.replace('*', str(number))} -> {name}")


def _prefix_in(path: Path, names: Sequence[str], tables: set[str]) -> str:
    """The prefix of the base model's names in a file, found by the name of its embedding."""
    prefixes = {
        name.removesuffix(table).removesuffix(".")
        for name in names
        for table in tables
        if f".{name}".endswith(f".{table}")
    }
    if len(prefixes) == 1:
        return prefixes.pop()
    which = f"it has {', '.join(sorted(prefixes))}" if prefixes else "it has none"
    why = f"A file must hold one {' or '.join(sorted(tables))}, below any prefix; {which}."
    raise CheckpointError(path, None, why)


def _old_norms(rules: Sequence[Rule], names: Sequence[str]) -> list[Rule]:
    """Rules for files of before transformers 1, whose norms have a gamma and a beta."""
    if not any(name.endswith(".gamma") for name in names):
        return []
    return [
        Rule.optional(f"{source}.{old} -> {target}.{new}")
        for source, target in (rule.sides for rule in rules if rule.kind == "move")
        for old, new in (("gamma", "scale"), ("beta", "bias"))
        if source.endswith("LayerNorm")
    ]


def _fill_rest(whole: Transformer, built: Callable[[], Transformer]) -> None:
    """Gives an abstract model its random keys, and tables that are no weights."""
    tables = [
        (path, name)
        for path, module in nnx.iter_modules(whole)
        for name, value in vars(module).items()
        if isinstance(value, Rotary) and jax.tree.leaves(value)
    ]

    def rest() -> tuple[Any, list[Rotary]]:
        concrete = built()
        modules = dict(nnx.iter_modules(concrete))
        rotaries = [getattr(modules[path], name) for path, name in tables]
        return nnx.state(concrete, nnx.RngState), rotaries

    if tables or jax.tree.leaves(nnx.state(whole, nnx.RngState)):
        keys, rotaries = jax.jit(rest)()
        nnx.update(whole, keys)
        modules = dict(nnx.iter_modules(whole))
        for (path, name), rotary in zip(tables, rotaries, strict=True):
            setattr(modules[path], name, rotary)


def _unstacked(whole: Transformer) -> Transformer:
    """The same model with its layers apart, which may share its arrays."""
    if not isinstance(whole, Transformer) or not whole.stack:
        return whole
    layered = nnx.eval_shape(lambda: model(json.loads(whole.config), rngs=nnx.Rngs(0)))
    if isinstance(layered, Encoder) and getattr(whole, "pooler", None) is None:
        layered.pooler = nnx.data(None)
    before, places = flax_state(whole), _places(whole)
    for path, variable in flax_state(layered).items():
        first, _, rest = path.partition(".")
        number, _, inner = rest.partition(".")
        place = places[int(number)] if first == "layers" else path
        if not place.startswith("stack."):
            same = f"{place}.{inner}" if first == "layers" else path
            variable.set_value(before[same].get_value())
            continue
        _, at, period = place.split(".")
        variable.set_value(before[f"stack.{at}.{inner}"].get_value()[int(period)])
    return layered
