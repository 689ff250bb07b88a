"""Applies a printed change to torch on a second draw, and compares all outputs with Flax's."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_attn.parity import judge
from flax_attn.parity.call_spec import CallSpec
from flax_attn.parity.compare import make_pair
from flax_attn.parity.options import Options
from flax_attn.parity.recording.recording import original_of
from flax_attn.parity.search.gradients import gradients
from flax_attn.parity.search.replay import Replay, in_float64
from flax_attn.parity.search.span import Cause

from .fault import Subject


def gives_flax(
    subject: Subject, port: type[nnx.Module], seed: int, causes: Sequence[Cause], kind: str
) -> bool:
    """Whether torch with the changes of causes has the outputs, or gradients, of a port."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        pair, mine = _pair(subject, port, seed)
    tape = pair.original.program(mine)
    changes = {k: x for cause in causes for k, x in cause.changes.items()}
    try:
        with in_float64(), np.errstate(all="ignore"):
            if kind == "gradient":
                made = pair.names.gradients(gradients(tape, changes, pair.request.cotangent))
                return all(_same(mine.gradients[k], made[k]) for k in made)
            replay = Replay(tape, changes)
            values = {k: replay.value(tape.marks[f"output {k}"]) for k in mine.outputs}
    except Exception:  # a change that does not run there does not hold
        return False
    arrays = {k: x.detach().resolve_conj().numpy() for k, x in values.items()}
    return all(_same(mine.outputs[k], arrays[k]) for k in arrays)


def _pair(subject: Subject, port: type[nnx.Module], seed: int) -> tuple[Any, Any]:
    """Both sides with the weights and inputs of a seed, and Flax's run."""
    given = subject.options
    names = ("constants", "train", "grads", "taps", "torch_call")
    defaults = ((), False, True, True, None)
    constants, train, grads, taps, call = map(given.get, names, defaults)
    spec = CallSpec(subject.inputs(seed), {}, constants, seed, train, grads, taps, call)
    options = Options(
        ("float64",), jit=False, rules=subject.rules, flax_call=given.get("flax_call")
    )
    original = original_of(subject.theirs(), spec)
    pair = make_pair(original, port(rngs=nnx.Rngs(0)), options)
    side = pair.flax("float64", "eager")
    return pair, pair.run_flax(side, pair.weights(pair.narrow("float64")))


def _same(got: np.ndarray, made: np.ndarray) -> bool:
    return got.shape == made.shape and judge.same_function(got, made, zero=True).ok
