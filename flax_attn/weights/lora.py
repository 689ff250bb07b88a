"""`save_lora` and `load_lora`: adapters of `nnx.LoRA` as the files of PEFT.

PEFT adds `factor * x A^T B^T` to the output of a module, nnx `x lora_a lora_b`, without a factor.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._internal.replacing import replacing
from ..errors import CheckpointError, quoted
from .checkpoint import Checkpoint
from .einops_layout import axis_groups
from .entry import MAX_HEADER_BYTES, Entry, open_regular
from .fitting import fit, under
from .known_layers import flax_state, get_path
from .load import array_like, cast_to
from .mapping import some
from .move import Move, Stack
from .rule import Rule
from .safetensors import write_file
from .save import moves_back
from .strict_json import check_name, parse

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Fields of a config that are read, or that change no output. Every other one must be empty.
_FIELDS = """r lora_alpha use_rslora rank_pattern alpha_pattern lora_dropout fan_in_fan_out
target_modules exclude_modules layers_to_transform layers_pattern task_type revision auto_mapping
base_model_name_or_path inference_mode peft_version eva_config megatron_core qalora_group_size"""
# Other values ask for something else, or changed the model's own weights.
_ONLY: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none",)}
_ONLY["init_lora_weights"] = (True, False, "gaussian", "orthogonal", "eva")
_NAME, _END = re.compile(r"base_model\.model\..+\.lora_[AB]\.weight"), r"\.?lora_[AB]\.weight$"
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.\*?|\\d\+?)+")  # no groups, which may take forever

Factors = tuple[np.ndarray, np.ndarray]  # lora_a [in, r], lora_b [r, out]
Block = tuple[np.ndarray, dict[str, np.ndarray]]  # lora_a, lora_b by weight


def save_lora(
    model: nnx.Module,
    folder: str | os.PathLike[str],
    *,
    prefix: str = "",
    rules: Sequence[Rule] = (),
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
) -> None:
    """Writes a model's adapters so that `peft.PeftModel.from_pretrained` reads them.

    `lora_alpha` equals the rank, so that PEFT's factor is 1. Adapters that share a torch module, as
    those of q, k and v share a `qkv_proj`, become one: equal `lora_a` are written once, others one
    below the other, with blocks of zeros in B, so that their ranks add up.

    Shapes: lora_a `[in, r]` -> A `[r, in]`, lora_b `[r, out]` -> B `[out, r]`.

    Args:
      model: has projections in `nnx.LoRA` or `nnx.LoRALinear`; not modified.
      folder: created if missing, for `adapter_model.safetensors` and `adapter_config.json`.
      prefix: the start of every module's name in torch, as in `save`.
      rules: the rules passed to `load` for the model's weights. Where these are two spellings, the
        names are those in files; leave the optional rules out for those of torch's modules.
      base_model_name_or_path: where PEFT finds the model, for the config.
      task_type: such as "CAUSAL_LM", for the config.

    Raises:
      ValueError: without adapters, and for one whose projection is no `nnx.Linear`, or no module
        with a `weight` in torch by these rules.
      TypeError: if the model is not an `nnx.Module`.

    Source: https://github.com/huggingface/peft, `utils/save_and_load.py`.

    >>> import tempfile
    >>> layer = nnx.Dict(q_proj=nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_lora(layer, folder, prefix="layers.0.self_attn")
    ...     print(*Checkpoint(Path(folder) / WEIGHTS, None, False).entries, sep="\\n")
    base_model.model.layers.0.self_attn.q_proj.lora_A.weight
    base_model.model.layers.0.self_attn.q_proj.lora_B.weight
    """
    bare, adapters = _without_adapters(model)
    where, dot = Path(folder), f"{prefix}." if prefix else ""
    state = {path: x.get_value() for path, x in flax_state(bare).items()}
    moves = moves_back(bare, state, [rule for rule in rules if rule.kind == "move"])
    kernels = {f"{path}.kernel": lora for path, lora in adapters.items()}
    moves = [move for move in moves if not kernels.keys().isdisjoint(move.targets)]
    odd = kernels.keys() - {target for move in moves for target in move.targets}
    if odd or not kernels:
        what = f"one at {some(odd)}" if odd else "none"
        raise ValueError(f"nnx.LoRA must wrap a projection with a kernel; the model has {what}.")
    modules: dict[str, Factors] = {}
    for move in moves:
        _check_pair(where, move, bare)
        blocks: dict[bytes, Block] = {}
        for target in [target for target in move.targets if target in kernels]:
            a, b = map(np.asarray, _factors_of(kernels[target]))
            blocks.setdefault(a.tobytes(), (a, {}))[1][target] = b
        widths = {target: state[target].shape[1] for target in move.targets}
        moved = _move_factors(move, [*blocks.values()], widths, back=True)
        modules |= {_module_of(name): factors for name, factors in moved.items()}
    placed = _placed(where, modules, bare, rules, prefix)
    if {move.targets for move in placed} != {move.targets for move in moves}:
        raise ValueError("With these rules two adapters would trade places, or have one name.")
    tensors = {
        f"base_model.model.{dot}{module}.lora_{letter}.weight": x.T
        for module, factors in modules.items()
        for letter, x in zip("AB", factors, strict=True)
    }
    for name in tensors:
        check_name(where, name)
    ranks = {dot + module: a.shape[1] for module, (a, _) in modules.items()}
    rank = max(ranks.values(), key=[*ranks.values()].count)
    others = {module: each for module, each in ranks.items() if each != rank}
    config = {"peft_type": "LORA", "task_type": task_type, "inference_mode": True, "bias": "none"}
    config |= {"base_model_name_or_path": base_model_name_or_path, "target_modules": sorted(ranks)}
    config |= {"r": rank, "lora_alpha": rank, "rank_pattern": others, "alpha_pattern": others}
    config |= {"fan_in_fan_out": any(map(_is_input_first, moves)), "init_lora_weights": True}
    config |= {"lora_dropout": 0.0, "modules_to_save": None, "use_dora": False, "use_rslora": False}
    where.mkdir(parents=True, exist_ok=True)
    write_file(where / WEIGHTS, tensors)
    with replacing(where / CONFIG) as file:
        file.write(json.dumps(config, indent=2, sort_keys=True).encode())


def load_lora(
    model: nnx.Module,
    folder: str | os.PathLike[str],
    *,
    prefix: str = "",
    rules: Sequence[Rule] = (),
) -> None:
    """Fills a model's adapters from a folder of PEFT, and wraps projections that have none.

    PEFT's factor, `lora_alpha / r`, or with `use_rslora` `lora_alpha / sqrt(r)`, is multiplied into
    lora_b in float32 or wider, and rounded once to the dtype of the adapter. A new adapter has the
    dtypes of its projection. One of a fused module gives q, k and v the same lora_a. This needs
    neither torch nor pickle; the model changes only after everything was checked.

    Shapes: A `[r, in]` -> lora_a `[in, r]`, B `[out, r]` -> lora_b `[r, out]`.

    Args:
      model: its weights are loaded before. Where it has an adapter already, the file must have one
        of the same rank.
      folder: has `adapter_model.safetensors` and `adapter_config.json`.
      prefix: the start of the names of the model's modules in torch, as in `load`.
      rules: the rules passed to `load` for the model's weights.

    Raises:
      CheckpointError: if a file is invalid or does not fit the model, and for a config that asks
        for more than LoRA, such as `use_dora` or `modules_to_save`.
      ValueError: for an `nnx.LoRA` that wraps nothing.
      TypeError: if the model is not an `nnx.Module`.

    Source: https://github.com/huggingface/peft, `tuners/lora/layer.py`.

    >>> import tempfile
    >>> one = nnx.Dict(q_proj=nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0)))
    >>> other = nnx.Dict(q_proj=nnx.Linear(3, 4, rngs=nnx.Rngs(1)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_lora(one, folder)
    ...     load_lora(other, folder)
    >>> bool((other.q_proj.lora_a[...] == one.q_proj.lora.lora_a[...]).all())
    True
    """
    bare, adapters = _without_adapters(model)
    path, modules = _read(Path(folder), prefix)
    ready: dict[str, Factors] = {}
    for move in _placed(path, modules, bare, rules, prefix):
        _check_pair(path, move, bare)
        blocks = [(modules[_module_of(x)][0], {x: modules[_module_of(x)][1]}) for x in move.sources]
        widths = {x: modules[_module_of(x)][1].shape[1] for x in move.sources}
        for target, (a, b) in _move_factors(move, blocks, widths, back=False).items():
            owner, kinds = _module_of(target), [get_path(bare, target).get_value().dtype] * 2
            if owner in adapters:
                now = _factors_of(adapters[owner])
                kinds = [x.dtype for x in now]
                if now[0].shape[1] != a.shape[1]:
                    why = f"It has rank {a.shape[1]}, and the model's adapter {now[0].shape[1]}."
                    raise CheckpointError(path, owner, why, "Wrap with that rank, or not at all.")
            ready[owner] = (
                cast_to(a, np.dtype(kinds[0]), path, owner),
                cast_to(b, np.dtype(kinds[1]), path, owner),
            )
    if missing := [owner for owner in adapters if owner not in ready]:
        why = f"The model has an adapter at {some(missing)}, and the file none."
        raise CheckpointError(path, None, why)
    for owner, (a, b) in ready.items():
        lora = adapters.get(owner) or _wrap(model, owner, a.shape[1])
        for variable, value in ((lora.lora_a, a), (lora.lora_b, b)):
            variable.set_value(array_like(value, variable.get_value(), None))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _factors_of(lora: nnx.LoRA) -> list[Any]:
    return [x.get_value() for x in (lora.lora_a, lora.lora_b)]


def _without_adapters(model: nnx.Module) -> tuple[nnx.Module, dict[str, nnx.LoRA]]:
    """Returns a copy of the model without wrappers, and its adapters by projection's path."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"The model must be a flax.nnx.Module; got {type(model).__name__}.")
    bare, adapters = nnx.clone(model), dict[str, nnx.LoRA]()
    for pieces, node in nnx.iter_modules(model):
        path = ".".join(map(str, pieces))
        owner, _, last = path.rpartition(".")
        if not isinstance(node, nnx.LoRA):
            continue
        if isinstance(get_path(model, owner), nnx.LoRALinear):
            adapters[owner] = node
        elif node.base_module is None or not path:
            raise ValueError(f"The adapter at {path!r} must wrap a projection of the model.")
        else:
            adapters[path] = node
            setattr(get_path(bare, owner), last, get_path(bare, path).base_module)
    return bare, adapters


def _wrap(model: nnx.Module, path: str, rank: int) -> nnx.LoRA:
    """Wraps a projection in an adapter of its dtypes."""
    base = get_path(model, path)
    dtypes = {"dtype": base.dtype, "param_dtype": base.kernel.get_value().dtype}

    def adapter() -> nnx.LoRA:
        return nnx.LoRA(base.in_features, rank, base.out_features, rngs=nnx.Rngs(0), **dtypes)

    with jax.enable_x64(True):  # otherwise a float64 adapter would become float32
        lora = nnx.eval_shape(adapter)  # nothing is drawn
    lora.base_module = nnx.data(base)
    setattr(get_path(model, _module_of(path)), path.rpartition(".")[2], lora)
    return lora


def _placed(
    path: Path,
    modules: Mapping[str, Factors],
    bare: nnx.Module,
    rules: Sequence[Rule],
    prefix: str,
) -> list[Move]:
    """Returns where the weights of these torch modules would go; CheckpointError if nowhere."""
    rules = [rule for rule in rules if rule.kind != "tied"]
    entries: dict[str, Entry] = {}
    for module, (a, b) in modules.items():
        name, shape = f"{module}.weight", (b.shape[1], a.shape[0])
        groups = ((rule.layout, *each) for rule in rules for each in rule.groups([name]))
        layout, sources, targets = next(groups, (None, (name,), (name,)))
        by_type = layout is None and not targets[0].endswith(".kernel")
        is_transposed = not by_type and _is_input_first(Move(sources, targets, layout))
        entries[name] = Entry(path, "F32", shape[::-1] if is_transposed else shape, 0, 0)
    nothing = dict[str, np.ndarray]().__getitem__  # values are read to compare ties alone
    moves = fit(path, entries, bare, rules, nothing, "narrow", True, prefix)
    for move in moves:
        if isinstance(move, Stack):
            why = f"{some(move.targets)} is stacked by nnx.vmap; adapters need separate layers."
            raise CheckpointError(path, None, why)
    return [move for move in moves if isinstance(move, Move)]


def _check_pair(path: Path, move: Move, bare: nnx.Module) -> None:
    """Raises CheckpointError unless modules with a weight become Linears with inputs in order."""
    are_linear = all(isinstance(get_path(bare, _module_of(x)), nnx.Linear) for x in move.targets)
    left, right = _axes(move)
    if not are_linear or right[0] not in left or any(x[-7:] != ".weight" for x in move.sources):
        why = f"Its way to {some(move.targets)}, {move.layout}, is not that of an nnx.Linear."
        raise CheckpointError(path, move.sources[0], why, "Only such can have an adapter here.")


def _axes(move: Move) -> tuple[list[str], list[str]]:
    """Axes of a weight in torch, and of the kernel `[in, out]`, without those of the braces."""
    left, right = map(axis_groups, (move.layout or "i o -> i o").split("->"))
    return left[len(move.sources) > 1 :], right[len(move.targets) > 1 :]


def _is_input_first(move: Move) -> bool:
    """Whether torch's weight is `[in, out]`, as that of transformers' Conv1D is."""
    left, right = _axes(move)
    return left[0] == right[0]


def _move_factors(
    move: Move, blocks: Sequence[Block], widths: Mapping[str, int], back: bool
) -> dict[str, Factors]:
    """Moves low-rank factors like the weights that they add to; the ranks of all blocks add up.

    Args:
      widths: number of outputs of each weight; those that a block does not have are zeros.
      back: whether the blocks are Flax's, and the result is torch's.
    """
    is_transposed, parts = not _is_input_first(move), list[dict[str, np.ndarray]]()
    for a, adapters in blocks:
        dtype = next(iter(adapters.values())).dtype
        values = {x: adapters.get(x, np.zeros((a.shape[1], n), dtype)) for x, n in widths.items()}
        sized = replace(move, sizes={**move.sizes, _axes(move)[1][0]: a.shape[1]}, shift=0.0)
        if back:
            part = {x: b.T if is_transposed else b for x, b in sized.back(values).items()}
        else:
            part = sized.forward({x: b.T if is_transposed else b for x, b in values.items()})
        parts.append(part)
    a = np.concatenate([a for a, _ in blocks], axis=1)
    return {x: (a, np.concatenate([part[x] for part in parts])) for x in parts[0]}


def _read(folder: Path, prefix: str) -> tuple[Path, dict[str, Factors]]:
    """Reads the factors of the modules below a prefix, the second multiplied by PEFT's factor."""
    if not (folder / WEIGHTS).exists() and (pickled := folder / "adapter_model.bin").exists():
        why, hint = "It is a pickle, which is not read.", f"Save it again with peft, as {WEIGHTS}."
        raise CheckpointError(pickled, None, why, hint)
    config, checkpoint = _read_config(folder / CONFIG), Checkpoint(folder / WEIGHTS, None, False)
    path, entries = checkpoint.path, checkpoint.entries
    for name in entries:
        if not _NAME.fullmatch(name):
            why = "It is no lora_A.weight or lora_B.weight of a module, and only those are read."
            raise CheckpointError(path, name, why)
    modules: dict[str, Factors] = {}
    below = ".".join(filter(None, ("base_model.model", prefix)))
    for module in dict.fromkeys(re.sub(_END, "", name) for name in under(path, entries, below)):
        names = [f"{below}.{module}.lora_{letter}.weight" for letter in "AB"]
        shapes = [[*entries[x].shape] if x in entries else [] for x in names]
        if [*map(len, shapes)] != [2, 2] or shapes[0][0] != shapes[1][1] or not shapes[0][0]:
            why = f"A module has lora_A [r, in] and lora_B [out, r]; these are {shapes}."
            raise CheckpointError(path, names[0], why)
        a, b = (checkpoint.read(name).T for name in names)
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b)):
            raise CheckpointError(path, names[0], f"It is {a.dtype}, lora_B {b.dtype}: no floats.")
        whole = f"{prefix}.{module}" if prefix else module
        factor = _factor(folder / CONFIG, config, whole, len(b))
        wide = np.promote_types(b.dtype, np.float32)
        modules[module] = (a, b.astype(wide) * wide.type(factor))
    return path, modules


def _read_config(path: Path) -> dict[str, Any]:
    """Reads a config; CheckpointError if it asks for anything but LoRA."""
    with open_regular(path) as file:
        config = parse(path, file.read(MAX_HEADER_BYTES).rstrip())
    for name, value in {"peft_type": None, **config}.items():
        if value not in _ONLY[name] if name in _ONLY else value and name not in _FIELDS.split():
            why = f"It says {quoted(name)}: {json.dumps(value)[:60]}, and only plain LoRA is read."
            raise CheckpointError(path, None, why)
    for name, more, kind in (("r", "rank_pattern", int), ("lora_alpha", "alpha_pattern", float)):
        patterns = config.get(more) or {}
        values = [config.get(name), *(patterns.values() if isinstance(patterns, dict) else [None])]
        if not all(type(x) in (int, kind) and abs(x) < 2**31 for x in values):
            raise CheckpointError(path, None, f"{name} and the values of {more} must be numbers.")
        for key in patterns:
            if not _PATTERN.fullmatch(key) or sum(map(key.count, "*+")) > 2:
                why = f"{more} has {quoted(key)}; names with dots, `\\d+` and two `.*` are read."
                raise CheckpointError(path, None, why)
    return config


def _factor(path: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """PEFT's factor of a module; CheckpointError if the config has another rank for it."""

    def value(name: str, more: str) -> Any:
        patterns = config.get(more) or {}
        matching = (x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(matching, config[name])

    r, alpha = value("r", "rank_pattern"), value("lora_alpha", "alpha_pattern")
    if r != rank:
        why = f"It says rank {r} for {quoted(module)}, and lora_A has rank {rank}."
        raise CheckpointError(path, None, why)
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)
