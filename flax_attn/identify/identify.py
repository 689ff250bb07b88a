"""`identify`: tells which layer of this library a torch module is, with proofs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from ..errors import ParityError
from ..parity.call_spec import CallSpec
from ..parity.port import plan, set_flax
from ..parity.report import Report
from ..parity.sides.calls import plain_call
from ..parity.sides.live import Live
from ..parity.torch_module import read
from ..weights.rule import Rule
from .dropout import dropout_of
from .inputs import Inputs
from .measure import Measured, measured
from .numbers import numbers_in
from .options import Facts
from .plain import plainly
from .program import Program
from .propose import Proposal, proposals
from .prove import Proof, Prover, takes
from .roles import Unclear

BATCH, SHORT, LONG, MORE = 2, 7, 11, 4  # of the calls that are measured
RETRY_LENGTH = 300  # tokens of the call that is measured where a longer one differs
# Standard deviations of their tokens: small ones reach no clamp, large ones not only its inside.
SIZES = (0.1, 1.0, 0.01)
MOST = 5  # proposals that are compared


@dataclass(frozen=True)
class Identified:
    """What a torch module is, from `identify`; `print(result)` shows all of it.

    Attributes:
      text: Python that builds the layer, without `rngs`; the nearest one if `layer` is None; "" if
        nothing was proposed.
      layer: the layer with the module's weights; None unless every comparison is equal.
      rules: carry the weights, for `port`, `plan` and `compare`.
      proofs: the comparisons.
      measured: what was measured, a line each.
      why: why no layer is named, or "".

    >>> print(Identified(why="no softmax between two products"))
    no layer: no softmax between two products
    """

    text: str = ""
    layer: Any = None
    rules: tuple[Rule, ...] = ()
    proofs: tuple[Proof, ...] = ()
    measured: tuple[str, ...] = field(default=())
    why: str = ""

    @property
    def reports(self) -> list[Report]:
        """Reports of the comparisons."""
        return [proof.report for proof in self.proofs if proof.report is not None]

    @property
    def limit(self) -> list[str]:
        """The most tokens that were compared, beyond which a window is not seen; [] if none."""
        tokens = max((proof.tokens for proof in self.proofs), default=0)
        return [f"not tested: more than {tokens} tokens"] if tokens else []

    def __str__(self) -> str:
        lines = [self.text] if self.layer is not None else [f"no layer: {self.why}"]
        if self.layer is None and self.text:
            lines.append(f"nearest: {self.text}")
        lines += [f"  {line}" for line in (*self.measured, *map(str, self.proofs), *self.limit)]
        return "\n".join([*lines, *(f"  {rule}" for rule in self.rules)])


def identify(
    torch_module: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    torch_call: Callable[..., Any] | None = None,
) -> Identified:
    """Tells which layer of this library an attention module of torch is, and proves it.

    The module runs in float64 with random weights. Its logits are measured as a function of
    queries, keys and positions, and its mask at two lengths. The layer with the fewest options that
    computes the same is built, and compared with the module: at these inputs, with other weights,
    with 1,024 tokens or the most that the module takes, and in train mode if it has a dropout. A
    layer that any comparison calls different is not named, nor one of a module that runs with more
    tokens and is not understood there. Neither the module nor the inputs are changed.

    Args:
      torch_module: the attention alone, without the norm before it or a sum with its input.
      inputs, kwargs: arguments of its call, as numpy arrays. One floating array of three axes holds
        the tokens; they are drawn anew. Masks, biases, cos and sin, and positions are read by what
        they do.
      torch_call: called as `call(torch_module, *inputs, **kwargs)` instead of the module.

    Returns:
      An `Identified`; its `layer` is None if no layer is equal, and `why` says the reason.

    Raises:
      TypeError: if an input is a jax or torch array, or torch_module is no module.
      ValueError: if no input is a floating array of three axes.

    >>> import numpy as np, torch
    >>> module = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    >>> x = np.ones((2, 5, 12))
    >>> result = identify(module, x, torch_call=lambda m, x: m(x, x, x)[0])
    >>> result.text
    'GroupedQueryAttention(12, 3, 3, 4, qkv_bias=True, out_bias=True, mask=FULL)'
    """
    whole = Inputs.of(torch_module, inputs, kwargs or {}, torch_call or plain_call)
    try:
        whole = whole.in_float64(numbers_in(torch_module))
        result = _at_length(torch_module, whole, LONG)
        compared = result.proofs[-1].tokens if result.proofs else 0
        if result.layer is None and compared > max(LONG, whole.sizes[1]):
            # What only far tokens show: a window, or the last of T5's buckets.
            return _retried(torch_module, whole, min(compared, RETRY_LENGTH), result)
    except (Unclear, ParityError) as reason:
        past = ": leave out the past keys and values that are given" if whole.gives_past else ""
        return Identified(why=f"{reason}{past}")
    return result


def _at_length(module: Any, inputs: Inputs, longest: int) -> Identified:
    """What the module is by calls of a few tokens and of `longest`, if only tokens come in."""
    prover, facts = _facts(module, inputs, longest)
    return _proven(prover, [*islice(proposals(facts), MOST)], facts)


def _retried(module: Any, inputs: Inputs, longest: int, result: Identified) -> Identified:
    """The same at `longest`; `result`, with the reason, if nothing is understood there."""
    try:
        return _at_length(module, inputs, longest)
    except (Unclear, ParityError) as reason:
        return replace(result, why=f"{result.why}; not understood at {longest} tokens: {reason}")


def _proven(prover: Prover, candidates: list[Proposal], facts: Facts) -> Identified:
    """The first candidate that is equal everywhere, else the one that differs latest."""
    tried: list[tuple[Proposal, tuple[Proof, ...]]] = []
    for proposal in candidates:
        try:
            proofs = tuple(prover.proofs(proposal))
        except ParityError as reason:  # a parameter that the layer does not have
            text, more = proposal.text, tuple(facts.lines())
            return Identified(text, None, proposal.rules, (), more, str(reason))
        if not any(proof.differs for proof in proofs):
            layer = _with_weights(prover.module, proposal)
            more = proofs, tuple(facts.lines())
            return Identified(proposal.text, layer, proposal.rules, *more)
        tried.append((proposal, proofs))
    proposal, proofs = max(tried, key=lambda x: len(x[1]))
    why = f"the nearest differs, {proofs[-1]}"
    return Identified(proposal.text, None, proposal.rules, proofs, tuple(facts.lines()), why)


def _with_weights(module: Any, proposal: Proposal) -> Any:
    """The layer with the module's weights, in their dtypes."""
    layer = proposal.build()
    values = plan(module, layer, proposal.rules).forward(read(module))
    for path, value in values.items():
        set_flax(layer, {path: value}, value.dtype)
    return layer


def _facts(module: Any, inputs: Inputs, longest: int) -> tuple[Prover, Facts]:
    """Measures the module at one length, or at two, in the first order of axes that can be read.

    Raises:
      Unclear, ParityError: the first reason, if none can be; that a call failed is the last to say.
    """
    reasons = []
    for ordered, size in product(inputs.orders(), SIZES):
        try:
            return _facts_of(module, ordered, size, longest)
        except (Unclear, ParityError) as reason:
            reasons.append(reason)
    raise min(reasons, key=lambda reason: isinstance(reason, ParityError))


def _facts_of(module: Any, inputs: Inputs, size: float, longest: int) -> tuple[Prover, Facts]:
    calls = _calls(inputs, size, longest)
    live, program, first = _measured_run(module, calls[0])
    runs, taken = [first], [calls[0]]
    for call in calls[1:]:
        if takes(module, call):  # else it is a module of one length
            runs.append(_measured_run(module, call)[2])
            taken.append(call)
    drops = dropout_of(live, program)
    names = [name for name, _ in module.named_parameters()]
    features = calls[0].sizes[2]
    memory = calls[0].arrays[1].shape[inputs.order[2]] if inputs.crosses else None
    facts = Facts(runs, drops.rate, numbers_in(module), names, features, memory, inputs.order)
    return Prover(module, inputs, taken, drops), facts


def _calls(inputs: Inputs, size: float, longest: int) -> list[Inputs]:
    """The calls that are measured: at two lengths, short ones if only the tokens come in."""
    length = inputs.sizes[1]
    lengths = (length, length + MORE) if inputs.others else (SHORT, max(longest, length))
    return [inputs.drawn(n, 0, BATCH, size) for n in lengths]


def _measured_run(module: Any, inputs: Inputs) -> tuple[Live, Program, Measured]:
    spec = CallSpec(inputs.args, inputs.kwargs, (), 0, False, True, True, plainly(inputs.call))
    live = spec.live(module).with_weights("random", None)
    run = live.alone("float64", None)
    program = Program(run, live.program(run))
    batch, length, _ = inputs.sizes
    try:
        return live, program, measured(program, batch, length, inputs.keys)
    except RuntimeError as reason:  # of torch, from an operation at other values
        raise Unclear(f"a step that cannot be evaluated at other values: {reason}") from None
