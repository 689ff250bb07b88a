"""Compares a proposed layer with the module, in what was not measured too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

from ..errors import ParityError
from ..parity.compare import compare
from ..parity.report import Report
from .dropout import Drops
from .inputs import Inputs, as_tensors, first_output
from .plain import plainly
from .propose import Proposal

MOST_TAPPED = 300  # tokens of a call whose steps are compared too
LONGEST = 1024  # tokens of the longest call, if they are all that the module gets and it runs


@dataclass(frozen=True)
class Proof:
    """One comparison.

    Attributes:
      name: what was compared.
      report: its result; None if the module cannot take it.
      why: why it cannot.
      tokens: number of tokens; 0 if nothing was compared.
    """

    name: str
    report: Report | None
    why: str = ""
    tokens: int = 0

    @property
    def differs(self) -> bool:
        """Whether it shows that the layer is another one."""
        return self.report is not None and not self.report.ok

    def __str__(self) -> str:
        if self.report is None:
            return f"not proven  {self.name}: {self.why}"
        if self.report.ok:
            return f"equal       {self.name}, {self.tokens} tokens"
        return f"DIFFERENT   {self.name}, {self.tokens} tokens, first at {self.report.first}"


@dataclass(frozen=True)
class Prover:
    """Compares proposals with a module.

    Attributes:
      module: torch's.
      inputs: the call as it was given.
      calls: the calls that were measured, with other tokens.
      drops: the module's dropout.
    """

    module: Any
    inputs: Inputs
    calls: Sequence[Inputs]
    drops: Drops

    def proofs(self, proposal: Proposal) -> Iterator[Proof]:
        """All comparisons, until one is different."""
        for proof in self._all(proposal):
            yield proof
            if proof.differs:
                return

    def _all(self, proposal: Proposal) -> Iterator[Proof]:
        first, last = self.calls[0], self.calls[-1]
        yield self._proof("these inputs and weights", proposal, self.inputs, weights="given")
        other = first.drawn(first.sizes[1], 1)
        yield self._proof("other weights and tokens", proposal, other, seed=1)
        if len(self.calls) == 1:
            yield Proof("more tokens", None, "the module takes this number of tokens alone")
        else:  # beyond what was measured, unless the caller gives a mask for it
            yield self._at_more_tokens(proposal, last)
        if self.drops.elsewhere:
            yield Proof(
                "train mode",
                None,
                "it drops other values than weights too: use compare(train=True)",
            )
        elif self.drops.rate:
            yield self._in_train_mode(proposal, self.inputs)
        yield from self._not_called(proposal)

    def _at_more_tokens(self, proposal: Proposal, last: Inputs) -> Proof:
        """A length that was not measured, unless the caller gives a mask for it."""
        length = last.sizes[1] if last.others else self._most(last)
        run, more = len(self.calls) - 1, last.drawn(length, 2)
        return self._proof("more tokens", proposal, more, seed=2, run=run)

    def _most(self, last: Inputs) -> int:
        """The most tokens that the module takes, up to `LONGEST`."""
        most, refused = last.sizes[1], LONGEST + 1
        while refused - most > 1:
            middle = LONGEST if refused > LONGEST else (most + refused) // 2
            if takes(self.module, last.drawn(middle, 2)):
                most = middle
            else:
                refused = middle
        return most

    def _not_called(self, proposal: Proposal) -> Iterator[Proof]:
        """What the module takes and this call does not give."""
        names = signature(self.module.forward).parameters
        if any("mask" in name for name in names) and not proposal.called[0].call:
            yield Proof("a padded row", None, "this call gives no mask")
        if any("past" in name or "cache" in name for name in names):
            why = "this reads no caches: use compare(decode=Decode(...))"
            yield Proof("cached steps", None, why)

    def _in_train_mode(self, proposal: Proposal, inputs: Inputs) -> Proof:
        name = "train mode with its dropout"
        try:
            return self._proof(name, proposal, inputs, seed=3, train=True)
        except ParityError as reason:  # such as a mask for each head alone
            return Proof(name, None, str(reason))

    def _proof(
        self,
        name: str,
        proposal: Proposal,
        inputs: Inputs,
        weights: Any = "random",
        seed: int = 0,
        train: bool = False,
        run: int = 0,
    ) -> Proof:
        report = compare(
            self.module,
            proposal.build(run),
            *inputs.arrays,
            dtypes=("float64",),
            eager=False,
            taps=inputs.sizes[1] < MOST_TAPPED,  # which cost minutes there, and say no more
            train=train,
            weights=weights,
            seed=seed,
            rules=proposal.rules,
            torch_call=_torch_call(inputs),
            flax_call=_flax_call(inputs, proposal.called[run].call),
            title=f"{type(self.module).__name__} and {proposal.text}: {name}",
        )
        return Proof(name, report, tokens=inputs.sizes[1])


def takes(module: Any, inputs: Inputs) -> bool:
    """Whether a torch module runs on these."""
    import torch

    module = deepcopy(module).double().eval()
    args, kwargs = as_tensors(inputs.with_arrays(*inputs.arrays))
    try:
        with torch.no_grad():
            plainly(inputs.call, flex_only=True)(module, *args, **kwargs)
    except Exception:  # whatever a module raises at a length that it does not take
        return False
    return True


def _torch_call(inputs: Inputs) -> Callable[..., Any]:
    run = plainly(inputs.call, flex_only=True)

    def call(module: Any, *arrays: Any) -> Any:
        args, kwargs = as_tensors(inputs.with_arrays(*arrays))
        return first_output(run(module, *args, **kwargs))

    return call


def _flax_call(inputs: Inputs, options: Mapping[str, Any]) -> Callable[..., Any]:
    def call(layer: Any, *arrays: Any) -> Any:
        return inputs.from_btd(layer(*map(inputs.to_btd, arrays), **options))

    return call
