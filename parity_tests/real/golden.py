"""Trained layers, kept: parity on real weights without a download and without torch.

A file holds a layer's weights, what it met in a run of its model, and torch's output and gradients
for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

import flax_attn
from flax_attn.parity import ParityError, Report, Row, judge
from flax_attn.parity.recording.sketch import sketch
from flax_attn.parity.rows.values import gradients, judged_by_size
from flax_attn.parity.sides.flax.side import Flax
from flax_attn.parity.sides.pair import Names, canonical
from flax_attn.parity.sides.run import Run, RunRequest, rounded
from flax_attn.parity.torch_module import describe
from flax_attn.parity.versions import versions
from flax_attn.weights.described import Source
from flax_attn.weights.plan import make_plan

from .fetch import Wheel, read

FOLDER = Path(str(files(flax_attn))) / "goldens"
DTYPES = ("float64", "float32")
Arrays = Mapping[str, np.ndarray]


class Live(NamedTuple):
    """A layer of a model that runs in torch.

    Attributes:
      report: of its comparison with ours.
      attention: of torch, with the trained weights.
      call: of it.
      inputs: what it met.
      blocks: by name, the bytes of weights in blocks of Q4_1, as a GGUF file holds them.
    """

    report: Report
    attention: Any
    call: Callable[..., Any]
    inputs: Arrays
    blocks: Arrays


@dataclass(frozen=True)
class Kept:
    """A trained layer that comes with the library.

    Attributes:
      name: of its file.
      wheel: that its weights are from.
      about: what they are.
      licence: the member of the wheel that holds their licence.
      variant: whose layer it is.
      reference: the class in torch.
      title: of the report.
      layer: makes ours.
      call: of ours.
      live: runs the model in torch; from a wheel to read instead of fetching it.
    """

    name: str
    wheel: Wheel
    about: str
    licence: str
    variant: str
    reference: str
    title: str
    layer: Callable[[], nnx.Module]
    call: Callable[..., Any]
    live: Callable[[Path | None], Live]

    @property
    def path(self) -> Path:
        """Of its file."""
        return FOLDER / f"{self.name}.npz"

    @property
    def proven_equal_to(self) -> str:
        """What a table says."""
        return f"{self.reference}, trained weights"


def record_golden(kept: Kept, path: Path | None = None, wheel: Path | None = None) -> Path:
    """Compares the layer live and writes what torch gave, with the licence as text beside it.

    Raises:
      ParityError: if the layer differs, or blocks do not hold the weights that torch has.
      RealError: if the wheel cannot be had.
    """
    from flax_attn.parity.sides.torch.side import run_torch
    from flax_attn.parity.torch_module import read as read_weights

    report, attention, call, inputs, blocks = kept.live(wheel)
    if not report.ok:
        raise ParityError(str(report), report)
    request = _request(inputs)
    weights, sources = read_weights(attention), describe(attention)
    for name, found in blocks.items():
        if not judge.exact(dequantised(found), weights[name]).ok:
            raise ParityError(f"The blocks of {name} are not what torch has.")
    runs = [run_torch(attention, call, request, weights, dtype) for dtype in DTYPES]
    layer = kept.layer()
    facts, arrays = _facts(*runs, Names(make_plan(sources, layer), layer, ()))
    arrays |= {f"weight {name}": x for name, x in weights.items() if name not in blocks}
    arrays |= {f"blocks {name}": x for name, x in blocks.items()}
    arrays |= {f"input {name}": x for name, x in inputs.items()}
    meta = {
        "about": kept.about,
        "licence": f"{kept.wheel.licence}\n\n{read(kept.wheel, kept.licence, wheel).decode()}",
        "versions": versions(),
        "sources": [source.to_json() for source in sources],
        "facts": facts,
    }
    path = path or kept.path
    _write(path, meta, arrays)
    return path


def replay_golden(
    kept: Kept, path: Path | None = None, call: Callable[..., Any] | None = None
) -> Report:
    """The Flax layer with the trained weights against what torch gave; needs neither torch nor net.

    Args:
      kept: the layer.
      path: of the recorded file.
      call: of the layer, in place of the right one.

    Raises:
      ParityError: if nothing was recorded.
    """
    path = path or kept.path
    if not path.exists():
        raise ParityError(f"{path.name} is not recorded: record_golden() writes it, with torch.")
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    meta, layer = json.loads(str(arrays["meta"])), kept.layer()
    plan = make_plan([Source.from_json(fields) for fields in meta["sources"]], layer)
    opened = {name: dequantised(x) for name, x in _named(arrays, "blocks ").items()}
    weights = plan.forward({**_named(arrays, "weight "), **opened})
    rows: list[Row] = []
    for dtype in DTYPES:
        inputs = {k: rounded(x, dtype) for k, x in _named(arrays, "input ").items()}
        held = canonical({k: rounded(x, dtype) for k, x in weights.items()}, layer)
        for mode in ("eager", "jit"):
            call = call or kept.call
            run = Flax(layer, call, _request(inputs), dtype, mode == "jit").run(held)
            rows += _judge(run, meta["facts"][dtype], arrays, dtype, mode)
    return Report(
        kept.title,
        tuple(rows),
        params=sum(len(move.sources) for move in plan.moves),
        notes=(meta["about"],),
        versions={**versions(), "torch": f"{meta['versions']['torch']} (recorded)"},
        reproduce="flax-attn parity",
    )


def dequantised(blocks: np.ndarray) -> np.ndarray:
    """Weights in float32, out x in, of rows of Q4_1: 32 weights a block, `scale * number + least`.

    A block is 20 bytes: scale and least in float16, then the numbers of 0 to 15, the first 16 in
    the low halves of 16 bytes.

    >>> block = np.frombuffer(np.float16([0.5, -1.0]).tobytes() + bytes(range(16)), np.uint8)
    >>> dequantised(block[None])[0, 14:18].tolist()
    [6.0, 6.5, -1.0, -1.0]
    """
    parts = np.ascontiguousarray(blocks).reshape(len(blocks), -1, 20)
    scale, least = np.moveaxis(parts[..., :4].copy().view(np.float16).astype(np.float32), -1, 0)
    numbers = np.concatenate([parts[..., 4:] & 15, parts[..., 4:] >> 4], -1).astype(np.float32)
    return (scale[..., None] * numbers + least[..., None]).reshape(len(blocks), -1)


def _request(inputs: Arrays) -> RunRequest:
    return RunRequest((), inputs, seed=0, train=False, grads=True, taps=False)


def _named(arrays: Arrays, start: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}


def _write(path: Path, meta: Mapping[str, Any], arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)
    text = f"{path.name} holds trained weights: {meta['about']}\nTheir licence is {meta['licence']}"
    path.with_suffix(".licence.txt").write_text(text, encoding="utf-8")


def _facts(truth: Run, own: Run, names: Names) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What errors are measured against, and torch's results: outputs whole, gradients sketched."""
    facts: dict[str, Any] = {dtype: [] for dtype in DTYPES}
    arrays: dict[str, np.ndarray] = {}
    for name, want in truth.outputs.items():
        errors = (None, judge.error(own.outputs[name], want))
        for dtype, error in zip(DTYPES, errors, strict=True):
            facts[dtype].append(["output", name, None, error])
        arrays[name] = want
    for dtype in DTYPES:
        for name, want, scale, error in gradients(own, truth, names, dtype):
            facts[dtype].append(["gradient", name, scale, error])
            arrays[f"gradient {name}"] = sketch(name, want)
    return facts, arrays


def _judge(run: Run, facts: list[Any], arrays: Arrays, dtype: str, mode: str) -> Iterator[Row]:
    for kind, name, scale, own in facts:
        if kind == "output":
            got, want = run.outputs[name], arrays[name]
        else:
            got, want = sketch(name, run.gradients[name]), arrays[f"gradient {name}"]
        yield Row(name, kind, dtype, mode, judged_by_size(got, want, dtype, scale, own))
