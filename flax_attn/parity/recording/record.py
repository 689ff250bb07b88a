"""`record`: writes down what torch does, for a comparison on a machine without torch."""

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from ...errors import CheckpointError, ParityError
from ...weights.plan import Plan
from ...weights.rule import Rule
from ...weights.safetensors import write_file
from ..call_spec import CallSpec, is_torch_module
from ..decode import Decode
from ..options import DTYPES, Options, Weights
from ..rows import optimizers
from ..sides.live import Live
from ..torch_module import read
from ..versions import versions
from .recording import FORMAT, KEY
from .store import NotSerializable, Spool, Writer


def record(
    torch_module: Any,
    inputs: Sequence[Any],
    file: str | PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: Sequence[str] = DTYPES,
    grads: bool = True,
    taps: bool = True,
    train: bool = False,
    constants: Sequence[str] = (),
    noise: bool | None = None,
    optimizer: tuple[str, Mapping[str, Any]] | None = None,
    steps: int = 1,
    weights: Weights = "random",
    rules: Sequence[Rule] = (),
    seed: int = 0,
    torch_call: Callable[..., Any] | None = None,
    decode: Decode | None = None,
) -> Path:
    """Writes what torch gives into a file, with which `compare(Recording(file), ...)` needs no
    torch.

    Inputs, weights, outputs, taps, gradients, dropout masks, torch's own rounding noise, and in
    narrow dtypes the float64 truth as well. The module runs on the CPU and is not changed. Without
    "float64" among `dtypes` nothing runs in float64: the widest result stands for the truth, and
    what torch's own rounding changes in three runs for its error.

    Args:
      torch_module: the original.
      inputs, kwargs: arguments of its call, as of `compare`.
      file: to write, `.safetensors`; one of that name is replaced.
      dtypes, grads, taps, constants, optimizer, steps, seed, torch_call: as of `compare`.
      train: in train mode; torch draws the dropout masks, from a stream of `seed`.
      noise: whether torch's rounding noise is recorded: True in every dtype, None in float64 alone
        or where nothing runs in float64, False nowhere. Then what an input cannot tell counts as
        different, and the file is less than half as large.
      weights: "random" draws new ones, the same as `compare`, "given" records torch's as they are.
      rules: of which those count that skip: what they name keeps its own values.
      decode: `Decode(torch=step)`, if torch also runs step by step; in the first of `dtypes`.

    Returns:
      The file's path.

    Raises:
      ParityError: if the module fails in a dtype, or the file cannot be written.
      TypeError: if it is no torch module, or inputs are no numpy arrays.
      ValueError: for a dtype or a kind of weights that does not exist.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "linear.safetensors"
    >>> record(torch.nn.Linear(3, 2), (np.ones((4, 3)),), file, dtypes=("float64",)).name
    'linear.safetensors'
    """
    if not is_torch_module(torch_module):
        raise TypeError(f"record takes a torch.nn.Module; got {type(torch_module).__name__}.")
    options = Options(dtypes, optimizer=optimizer, steps=steps, weights=weights)
    _check(options, noise, train, decode)
    call_spec = CallSpec(
        tuple(inputs), kwargs or {}, constants, seed, train, grads, taps, torch_call
    )
    live = call_spec.live(torch_module)
    skips = [rule for rule in rules if rule.kind == "skip"]
    names = [source.name for source in live.sources]
    skipped = [name for rule in skips for group, _ in rule.groups(names) for name in group]
    live = live.with_weights(weights, Plan((), (), tuple(skipped), ()))
    return _written(
        Path(file),
        lambda writer: {
            **_described(live, weights, skipped, writer),
            **_ran(live, options, _noisy_in(dtypes, noise), decode, writer),
        },
    )


def _check(options: Options, noise: bool | None, train: bool, decode: Decode | None) -> None:
    if options.weights == "as_is":
        raise ValueError('A recording has weights: say weights="random" or "given"; got "as_is".')
    if options.optimizer is not None and "float64" not in options.dtypes:
        raise ValueError("Steps of an optimizer are compared in float64, which dtypes leaves out.")
    if noise is False and "float64" not in options.dtypes:
        raise ValueError("Without float64 rounding noise is all that tells torch's error; got no.")
    if decode is not None and (decode.torch is None or train):
        why = "train=True" if train else "Decode(torch=None), which needs no word here"
        raise ValueError(f"record(decode=) takes Decode(torch=step), in eval mode; got {why}.")


def _described(live: Live, strategy: str, skipped: Sequence[str], writer: Writer) -> dict[str, Any]:
    """What a comparison must know before anything runs."""
    request, parts = live.request, live.modules
    values = {**read(live.module), **live.values}
    return {
        "format": FORMAT,
        "versions": {**versions(), "machine": platform.platform()},
        "name": live.name,
        "sources": [{**x.to_json(), "heads": list(x.heads)} for x in live.sources],
        "modules": {name: writer.tree(name, vars(part)) for name, part in parts.items()},
        "trained": dict(live.trained),
        "dropouts": live.dropouts,
        "notes": live.notes,
        "request": {
            "arrays": {k: writer.tensor(f"inputs/{k}", x) for k, x in request.arrays().items()},
            "call": _call(live, writer),
            "constants": sorted(request.constants),
            **{key: getattr(request, key) for key in ("seed", "train", "grads", "taps")},
        },
        "weights": strategy,
        "skipped": list(skipped),
        "values": {k: writer.tensor(f"weights/{k}", x) for k, x in values.items()},
    }


def _call(live: Live, writer: Writer) -> Any:
    """The arguments as JSON, or None if it cannot hold them: then they must be given again."""
    request = live.request
    try:
        return writer.tree("inputs", [request.args, dict(request.kwargs)])
    except NotSerializable:
        return None


def _noisy_in(dtypes: Sequence[str], noise: bool | None) -> Sequence[str]:
    """The dtypes whose rounding noise is recorded."""
    if noise is None and "float64" in dtypes:
        return ("float64",)
    return () if noise is False else dtypes


def _ran(
    live: Live, options: Options, noisy: Sequence[str], decode: Decode | None, writer: Writer
) -> dict[str, Any]:
    """What torch gave."""
    wide = "float64" in options.dtypes
    runs, keeps, order = {}, None, []
    for dtype in options.dtypes:
        torch_run = live.alone(dtype, keeps)
        keeps, order = torch_run.keeps, torch_run.order
        entry: dict[str, Any] = {"torch": writer.tree(f"{dtype}/torch", torch_run)}
        if wide and dtype != "float64":
            entry["truth"] = writer.tree(f"{dtype}/truth", live.truth(dtype, keeps))
        if dtype in noisy:
            moved = live.noisy(dtype, keeps)
            entry["noise"] = [writer.tree(f"{dtype}/noise", run) for run in moved]
        if decode is not None and dtype == options.dtypes[0]:
            entry["decoded"] = [*_steps(live, decode, dtype, writer)]
        runs[dtype] = entry
    masks = [writer.tensor("dropout mask", keep) for keep in keeps or ()]
    trained = _trained(live, options, keeps or (), writer)
    return {"runs": runs, "keeps": masks, "order": order, **trained}


def _steps(live: Live, decode: Decode, dtype: str, writer: Writer) -> Iterator[list[Any]]:
    """Each cut, and what torch's own steps gave in `dtype` and in float64."""
    cuts = decode.checked(live.request.arrays())
    torch_run, truth = live.decoded(decode, cuts, dtype)
    for cut in cuts:
        sides = [writer.tree(f"steps/{cut}", x[cut].outputs) for x in (torch_run, truth)]
        yield [list(cut.lengths), *sides]


def _trained(
    live: Live, options: Options, keeps: Sequence[np.ndarray], writer: Writer
) -> dict[str, Any]:
    """The steps of an optimizer, if there is one."""
    if options.optimizer is None:
        return {}
    made = optimizers.make(*options.optimizer)
    steps = live.steps(made, options.steps, keeps)
    after = [writer.tree("steps", [step.gradients, step.values]) for step in steps]
    name, settings = options.optimizer
    return {"optimizer": [name, writer.tree("", dict(settings))], "steps": after}


def _written(path: Path, facts: Callable[[Writer], dict[str, Any]]) -> Path:
    """Writes the file of what `facts` collects; tensors wait beside it, since memory is short."""
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
            writer = Writer(Spool(file, Path(file.name)))
            text = json.dumps({**facts(writer), "checksums": writer.checksums})
            write_file(path, writer.tensors, {KEY: text})
    except (OSError, CheckpointError) as error:
        why = getattr(error, "strerror", None) or error
        raise ParityError(f"{path} cannot be written: {why}.") from error
    return path
