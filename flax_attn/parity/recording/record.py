"""`record`: saves the first side's results, for a comparison elsewhere or later."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...weights.plan import Plan
from ...weights.rule import Rule
from ..call_spec import CallSpec
from ..decode import Decode
from ..options import DTYPES, Options, Weights
from ..rows import optimizers
from ..side_checks import arguments, check_recorded
from ..sides.jax.original import JaxOriginal
from ..sides.torch.live import Live
from ..versions import versions
from .store import FORMAT, NotSerializable, Writer, write

Side = Live | JaxOriginal


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
    """Saves torch's results to a file; `compare(Recording(file), ...)` then needs no torch.

    Saves inputs, weights, outputs, taps, gradients, dropout masks, torch's own rounding noise and,
    in narrow dtypes, the float64 truth. The module runs on the CPU and is not changed. Without
    "float64" in `dtypes` nothing runs in float64: torch's own result serves as the truth, and its
    change in three runs with perturbed rounding as torch's error.

    Args:
      torch_module: the original: a module or function of torch, or an nnx module or JAX function.
      inputs, kwargs: arguments of its call, as for `compare`.
      file: the `.safetensors` file to write; an existing file is replaced.
      dtypes, grads, taps, constants, optimizer, steps, seed, torch_call: as for `compare`.
      train: runs in train mode; torch draws the dropout masks from `seed`.
      noise: whether torch's rounding noise is recorded. True: in every dtype; None: in float64
        only, or in every dtype if float64 is not recorded; False: never. Without it, differences
        within rounding noise count as different, and the file is less than half as large.
      weights: "random" draws new weights, the same as `compare`; "given" records torch's own.
      rules: only skip rules matter: the tensors they name keep their own values.
      decode: `Decode(torch=step)`, if torch also runs step by step; in the first of `dtypes`.

    Returns:
      The file's path.

    Raises:
      ParityError: if the module fails in a dtype, or the file cannot be written.
      TypeError: if it is none of these, or an input is a torch tensor.
      ValueError: for an unknown dtype or kind of weights.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "linear.safetensors"
    >>> record(torch.nn.Linear(3, 2), (np.ones((4, 3)),), file, dtypes=("float64",)).name
    'linear.safetensors'
    """
    torch_module = check_recorded(torch_module)
    options = Options(dtypes, optimizer=optimizer, steps=steps, weights=weights)
    _check(options, noise, train, decode)
    call = arguments(tuple(inputs), kwargs)
    call_spec = CallSpec(*call, constants, seed, train, grads, taps, torch_call)
    live = call_spec.side(torch_module)
    skips = [rule for rule in rules if rule.kind == "skip"]
    names = [source.name for source in live.sources]
    skipped = [name for rule in skips for group, _ in rule.groups(names) for name in group]
    live = live.with_weights(weights, Plan((), (), tuple(skipped), ()))
    return write(
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


def _described(live: Side, strategy: str, skipped: Sequence[str], writer: Writer) -> dict[str, Any]:
    """Collects what a comparison needs before running anything."""
    request, parts = live.request, live.modules
    values = {**live.stored(), **live.values}
    return {
        "format": FORMAT,
        "library": live.library,
        "versions": {**versions(live.library), "machine": platform.platform()},
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


def _call(live: Side, writer: Writer) -> Any:
    """The arguments as JSON; None if not serializable, so that they must be passed again."""
    request = live.request
    try:
        return writer.tree("inputs", [request.args, dict(request.kwargs)])
    except NotSerializable:
        return None


def _noisy_in(dtypes: Sequence[str], noise: bool | None) -> Sequence[str]:
    """The dtypes in which rounding noise is recorded."""
    if noise is None and "float64" in dtypes:
        return ("float64",)
    return () if noise is False else dtypes


def _ran(
    live: Side,
    options: Options,
    noisy: Sequence[str],
    decode: Decode | None,
    writer: Writer,
) -> dict[str, Any]:
    """Runs torch in every dtype and collects the results."""
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


def _steps(live: Side, decode: Decode, dtype: str, writer: Writer) -> Iterator[list[Any]]:
    """Yields each split with the results of torch's own steps in `dtype` and in float64."""
    cuts = decode.checked(live.request.arrays())
    torch_run, truth = live.decoded(decode, cuts, dtype)
    for cut in cuts:
        sides = [writer.tree(f"steps/{cut}", x[cut].outputs) for x in (torch_run, truth)]
        yield [list(cut.lengths), *sides]


def _trained(
    live: Side, options: Options, keeps: Sequence[np.ndarray], writer: Writer
) -> dict[str, Any]:
    """Collects the optimizer steps, if there is an optimizer."""
    if options.optimizer is None:
        return {}
    made = optimizers.make(*options.optimizer)
    steps = live.steps(made, options.steps, keeps)
    after = [writer.tree("steps", [step.gradients, step.values]) for step in steps]
    name, settings = options.optimizer
    return {"optimizer": [name, writer.tree("", dict(settings))], "steps": after}
