"""`identify`: tells which layer of this library a torch module is: guesses, each proven or not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain
from typing import Any

from ..errors import ParityError
from ..parity import judge
from ..parity.compare import compare
from ..parity.port import plan, set_flax
from ..parity.report import Report
from ..parity.sides.calls import plain_call
from ..parity.torch_module import read
from ..weights.rule import Rule
from .by_config import of_class, of_config
from .by_hand import by_hand
from .call import Call
from .candidate import Candidate, Drawn, called

MORE, LONGEST = 23, 1024  # tokens of the calls that are compared beside the caller's
MOST_TAPPED = 300  # tokens of a call whose steps and gradients are compared too
REASON = 200  # characters of an error that are printed
BY_HAND = "write the port and compare it, step by step (docs/porting.md)"


@dataclass(frozen=True)
class Proof:
    """One comparison.

    Attributes:
      name: what was compared.
      report: its result; None if the module cannot take it.
      tokens: number of tokens.
      why: why it cannot.
    """

    name: str
    report: Report | None
    tokens: int = 0
    why: str = ""

    @property
    def differs(self) -> bool:
        """Whether it shows that the layer is another one."""
        return self.report is not None and not self.report.ok

    @property
    def where(self) -> str:
        """Its tokens, and the first step that differs."""
        first = str(self.report.first if self.report is not None else None).splitlines()[0]
        return f"{self.tokens:,} tokens, first at {first}"

    def __str__(self) -> str:
        if self.report is None:
            return f"not proven  {self.name}: {self.why}"
        if self.report.ok:
            return f"equal       {self.name}, {self.tokens:,} tokens"
        return f"DIFFERENT   {self.name}, {self.where}"


@dataclass(frozen=True)
class Identified:
    """What a torch module is, from `identify`; `print(result)` shows all of it.

    Attributes:
      text: Python that builds the layer, without `rngs`; the nearest one if `layer` is None; "" if
        no guess ran.
      layer: the layer with the module's weights; None unless every comparison is equal.
      rules: carry the weights, for `port`, `plan` and `compare`.
      proofs: the comparisons.
      notes: how the layer is called in place of the module, a line each.
      why: why no layer is named, or "".

    >>> print(Identified(why="2 guesses, and none has the module's weights"))
    no layer: 2 guesses, and none has the module's weights
    """

    text: str = ""
    layer: Any = None
    rules: tuple[Rule, ...] = ()
    proofs: tuple[Proof, ...] = ()
    notes: tuple[str, ...] = ()
    why: str = ""

    @property
    def reports(self) -> list[Report]:
        """Reports of the comparisons."""
        return [proof.report for proof in self.proofs if proof.report is not None]

    @property
    def limit(self) -> list[str]:
        """The numbers of tokens at which the layer is equal, beyond which nothing is said."""
        equal = sorted({p.tokens for p in self.proofs if p.report is not None and p.report.ok})
        counts = [f"{tokens:,}" for tokens in equal]
        text = " and ".join(filter(None, (", ".join(counts[:-1]), *counts[-1:])))
        return [f"Equal at {text} tokens"] if self.layer is not None else []

    def __str__(self) -> str:
        lines = [self.text, *self.limit] if self.layer is not None else [f"no layer: {self.why}"]
        if self.layer is None and self.text:
            lines.append(f"nearest: {self.text}")
        lines += [f"  {line}" for line in (*self.notes, *map(str, self.proofs))]
        return "\n".join([*lines, *(f"  {rule}" for rule in self.rules)])


def identify(
    torch_module: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    torch_call: Callable[..., Any] | None = None,
) -> Identified:
    """Tells which layer of this library an attention module of torch is, and proves it.

    Guesses, the cheapest first: the attention of the module's `config` (transformers' own modules
    have it, with `layer_idx`); `torch.nn.MultiheadAttention`; else a grouped-query or cross
    attention with its sizes, where its weights can be mapped by names and shapes, with up to 48
    sets of options. A guess that computes the same in float64 is compared: values and gradients
    with these inputs and weights, then with other weights at 23 tokens, at 1,024 or the most that
    the module takes, and in train mode if it has a dropout. A layer that a comparison calls
    different is not named. Neither the module nor the inputs are changed.

    Args:
      torch_module: the attention alone, without the norm before it or a sum with its input.
      inputs, kwargs: arguments of its call: arrays of numpy, jax or torch. The first floating one
        of three axes holds the tokens, `B T D` or `T B D`, equal ones the same; others that are no
        masks hold a memory. Masks, positions, and tables of cosines and sines are continued for
        more tokens; tables and rates in float32 are replaced by the layer's where they are its.
      torch_call: called as `call(torch_module, *inputs, **kwargs)` instead of the module.

    Returns:
      An `Identified`; its `layer` is None if no layer is equal, and `why` says the reason.

    Raises:
      TypeError: if torch_module is no torch module.
      ValueError: if no input is a floating array of two or three axes; if the module does not run.

    >>> import numpy as np, torch
    >>> module = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    >>> x = np.ones((2, 5, 12))
    >>> result = identify(module, x, torch_call=lambda m, x: m(x, x, x)[0])
    >>> result.text, result.limit
    ('TransformerMultiHeadAttention(12, 3)', ['Equal at 5, 23 and 1,024 tokens'])
    """
    import torch

    if not isinstance(torch_module, torch.nn.Module):
        kind = torch_module if isinstance(torch_module, type) else type(torch_module)
        raise TypeError(f"identify takes an object of a torch.nn.Module; got {kind.__name__}.")
    call = Call.of(inputs, kwargs or {}, torch_call or plain_call)
    search = _Search(torch_module, call)
    try:
        search.drawn.output(call)
    except Exception as error:  # whatever the module raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        name = type(torch_module).__name__
        raise ValueError(f"{name} does not run on these inputs: {reason[:REASON]}") from error
    return search.result()


class _Search:
    """Guesses, and what became of them."""

    def __init__(self, module: Any, call: Call):
        self.module, self.call, self.drawn = module, call, Drawn(module)
        self.guessed: list[tuple[float, Candidate, Call]] = []
        self.reasons: dict[str, None] = {}

    def result(self) -> Identified:
        """The first guess that is equal everywhere, else the nearest."""
        best: Identified | None = None
        named = chain.from_iterable(f(self.module) for f in (of_config, of_class))
        guesses = chain.from_iterable(map(self._variants, named))
        for candidate in chain(guesses, by_hand(self.drawn, self.call)):
            try:
                error, candidate, call = self._error(candidate)
            except (ParityError, TypeError, ValueError) as reason:  # it is not built, or not called
                self.reasons[" ".join(str(reason).split())[:REASON]] = None
                continue
            if error == 0.0:
                best = self._proven(candidate, call)
                if best.layer is not None:
                    return best
            self.guessed.append((error, candidate, call))
        if best is None and self.guessed:
            # Other tables that torch computed in float32 are for `compare` to reconcile.
            _, candidate, call = min(self.guessed, key=lambda x: x[0])
            best = self._proven(candidate, call)
        return best or Identified(why=self._why())

    def _why(self) -> str:
        if not self.reasons:
            return f"no guess has the module's weights: {BY_HAND}"
        return f"no guess ran ({next(iter(self.reasons))}): {BY_HAND}"

    def _variants(self, base: Candidate) -> Iterator[Candidate]:
        """A guess with each mask of the call, and with none of its own."""
        ordered = replace(self.call, order=base.order)
        for mask in (None, *range(len([*ordered.masks()]))):
            yield replace(base, mask=mask)
            yield replace(base, mask=mask, sees_all=True)

    def _error(self, candidate: Candidate) -> tuple[float, Candidate, Call]:
        """How far a guess is off with random weights, 0.0 for equal; the guess and its call.

        Raises:
          ParityError, TypeError, ValueError: if it cannot be built, filled or called.
        """
        layer = candidate.build()
        known = signature(type(layer).__call__).parameters
        takes = 1 + sum(name in known for name in ("memory", "key", "value"))
        candidate = replace(candidate, takes=takes)
        call = replace(self.call, order=candidate.order).exact(layer)
        other = call.at(call.length, 0, layer)  # random tokens: those of the caller may be equal
        want = self.drawn.output(other, layer)
        got = self.drawn.output_of(candidate, layer, other)
        if got.shape != want.shape:
            raise ValueError(f"{candidate.text} gives {got.shape}, the module {want.shape}")
        error = judge.error(got, want)
        return 0.0 if judge.same_function(got, want).ok else error, candidate, call

    def _proven(self, candidate: Candidate, call: Call) -> Identified:
        """A guess with its comparisons, until one is different."""
        proofs: list[Proof] = []
        for proof in self._proofs(candidate, call):
            proofs.append(proof)
            if proof.differs:
                why = f"the nearest of {len(self.guessed) + 1} guesses differs at {proof.where}"
                why = f"{why}; start from it: {BY_HAND}"
                more = candidate.rules, tuple(proofs), candidate.lines, why
                return Identified(candidate.text, None, *more)
        layer = candidate.build()
        values = plan(self.module, layer, candidate.rules).forward(read(self.module))
        for path, value in values.items():
            set_flax(layer, {path: value}, value.dtype)
        order = sorted(proofs, key=lambda proof: (proof.tokens == 0, proof.tokens))
        return Identified(candidate.text, layer, candidate.rules, tuple(order), candidate.lines)

    def _proofs(self, candidate: Candidate, call: Call) -> Iterator[Proof]:
        layer = candidate.build()
        yield self._proof("these inputs and weights", candidate, call, weights="given")
        longest = self._most(call, layer)
        for length in dict.fromkeys((longest, min(MORE, longest))):
            if length != call.length:
                name = "other weights and tokens"
                yield self._proof(name, candidate, call.at(length, 1, layer), weights="random")
        if longest < LONGEST:
            why = f"it runs with no more than {longest:,}"
            yield Proof("more tokens", None, why=why)
        if self._drops():
            yield self._in_train_mode(candidate, call)

    def _most(self, call: Call, layer: Any) -> int:
        """The most tokens that the module takes, up to `LONGEST`."""
        most, refused = call.length, LONGEST + 1
        while refused - most > 1:
            middle = LONGEST if refused > LONGEST else (most + refused) // 2
            is_taken = self.drawn.takes(call.at(middle, 2, layer))
            most, refused = (middle, refused) if is_taken else (most, middle)
        return most

    def _drops(self) -> bool:
        """Whether the module has a rate of dropout."""
        parts = (vars(part) for part in self.module.modules())
        rates = (x for part in parts for name, x in part.items() if name == "p" or "drop" in name)
        return any(isinstance(rate, float) and rate > 0 for rate in rates)

    def _in_train_mode(self, candidate: Candidate, call: Call) -> Proof:
        name = "train mode"
        try:
            proof = self._proof(name, candidate, call, weights="random", train=True)
        except ParityError as reason:  # such as dropout of other values too
            return Proof(name, None, why=str(reason).splitlines()[0])
        return proof

    def _proof(
        self, name: str, candidate: Candidate, call: Call, weights: Any, train: bool = False
    ) -> Proof:
        whole, layer = call.length <= MOST_TAPPED, candidate.build()
        report = compare(
            self.module,
            layer,
            *candidate.arrays(call),
            dtypes=("float64",),
            eager=False,
            taps=whole,
            grads=whole,
            train=train,
            weights=weights,
            rules=candidate.rules,
            torch_call=lambda module, *x: called(module, call, layer, x[: len(call.groups)]),
            flax_call=candidate.output,
            title=f"{type(self.module).__name__} and {candidate.text}: {name}",
        )
        return Proof(name, report, tokens=call.length)
