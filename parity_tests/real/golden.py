"""One trained layer, kept: parity on real weights without a download and without torch.

The file holds the self-attention of ANARCII's encoder: its weights, what it met while the model
numbered the two chains of trastuzumab, of unequal length, and torch's output and gradients for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import flax_attn
from flax_attn.layers.transformer_multi_head import TransformerMultiHeadAttention
from flax_attn.parity import ParityError, Report, Row, judge
from flax_attn.parity.cases.golden import sketch
from flax_attn.parity.compare import versions
from flax_attn.parity.rows.values import gradients
from flax_attn.parity.sides.flax import Flax
from flax_attn.parity.sides.pair import Names, canonical
from flax_attn.parity.sides.run import Request, Run, rounded
from flax_attn.parity.torch_module import describe
from flax_attn.weights.described import Source
from flax_attn.weights.plan import make_plan

from . import anarcii
from .fetch import ANARCII, read

NAME = "encoder.layers.0.self_attention"
LICENCE = "anarcii-2.0.8.dist-info/licenses/LICENCE"
GOLDEN = Path(str(files(flax_attn))) / "goldens" / "real_anarcii.npz"
DTYPES = ("float64", "float32")
TITLE = f"{anarcii.title(NAME)}, trained weights"


def record_golden(path: Path = GOLDEN, wheel: Path | None = None) -> Path:
    """Compares the layer live and writes what torch gave, with the licence as text beside it.

    Raises:
      ParityError: if the layer differs.
      RealError: if the wheel cannot be had.
    """
    from flax_attn.parity.sides.torch import run_torch
    from flax_attn.parity.torch_module import read as read_weights

    model = anarcii.Model(anarcii.load(wheel))
    model.number(anarcii.tokens(anarcii.CHAINS[:2]))
    report = anarcii.compare_attention(model, NAME)
    if not report.ok:
        raise ParityError(str(report), report)
    attention, inputs = model.attentions[NAME], anarcii.inputs(model, NAME)
    weights, sources = read_weights(attention), describe(attention)
    call, request = anarcii.torch_call(NAME), _request(inputs)
    runs = [run_torch(attention, call, request, weights, dtype) for dtype in DTYPES]
    layer = _layer()
    facts, arrays = _facts(*runs, Names(make_plan(sources, layer), layer, ()))
    arrays |= {f"weight {name}": x for name, x in weights.items()}
    arrays |= {f"input {name}": x for name, x in inputs.items()}
    meta = {
        "about": f"{ANARCII.requirement} (Greenshields-Watson et al.), {anarcii.MEMBER}, "
        f"{NAME}, weights unchanged.",
        "licence": f"{ANARCII.licence}\n\n{read(ANARCII, LICENCE, wheel).decode()}",
        "versions": versions(),
        "sources": [source.to_json() for source in sources],
        "facts": facts,
    }
    _write(path, meta, arrays)
    return path


def replay_golden(path: Path = GOLDEN, call: Callable[..., Any] | None = None) -> Report:
    """The Flax layer with the trained weights against what torch gave; needs neither torch nor net.

    Args:
      path: of the recorded file.
      call: `call(layer, query, real)` in place of the right one.

    Raises:
      ParityError: if nothing was recorded.
    """
    if not path.exists():
        raise ParityError(f"{path.name} is not recorded: record_golden() writes it, with torch.")
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    meta, layer = json.loads(str(arrays["meta"])), _layer()
    plan = make_plan([Source.from_json(fields) for fields in meta["sources"]], layer)
    weights = plan.forward(_named(arrays, "weight "))
    call = call or anarcii.flax_call(NAME)
    rows: list[Row] = []
    for dtype in DTYPES:
        inputs = {k: rounded(x, dtype) for k, x in _named(arrays, "input ").items()}
        held = canonical({k: rounded(x, dtype) for k, x in weights.items()}, layer)
        for mode in ("eager", "jit"):
            run = Flax(layer, call, _request(inputs), dtype, mode == "jit").run(held)
            rows += _judge(run, meta["facts"][dtype], arrays, dtype, mode)
    return Report(
        TITLE,
        tuple(rows),
        params=sum(len(move.sources) for move in plan.moves),
        notes=(meta["about"],),
        versions={**versions(), "torch": f"{meta['versions']['torch']} (recorded)"},
        reproduce="flax-attn parity",
    )


def _layer() -> TransformerMultiHeadAttention:
    return TransformerMultiHeadAttention(anarcii.WIDTH, anarcii.HEADS, rngs=nnx.Rngs(0))


def _request(inputs: Mapping[str, np.ndarray]) -> Request:
    return Request((), inputs, seed=0, train=False, grads=True, taps=False)


def _named(arrays: Mapping[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}


def _write(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
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


def _judge(
    run: Run, facts: list[Any], arrays: Mapping[str, np.ndarray], dtype: str, mode: str
) -> Iterator[Row]:
    for kind, name, scale, own in facts:
        if kind == "output":
            got, want = run.outputs[name], arrays[name]
        else:
            got, want = sketch(name, run.gradients[name]), arrays[f"gradient {name}"]
        if dtype == "float64":
            verdict = judge.same_function(got, want, scale)
        else:
            verdict = judge.within_precision(got, own, want, dtype, scale)
        yield Row(name, kind, dtype, mode, verdict)
