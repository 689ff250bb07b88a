"""`Recording`: torch's side of a comparison, read from a file that `record` wrote."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import ParityError
from ...weights.described import Source
from ...weights.plan import Plan
from .. import judge
from ..call_spec import CallSpec
from ..decode import Cut
from ..options import Options
from ..sides.original import Arrays, Original, Part, Stepped
from ..sides.run import OUTPUT, Run, RunRequest, is_floating
from ..sides.steps import Steps
from .store import DAMAGE, Reader, opened

REMEDY = "record it with flax_attn.parity.record, where torch is"
NO_FLOAT64 = (
    "torch was not recorded in float64: its own result in {} stands for the truth, and what its "
    "rounding changes there in three runs for its error, so that the same precision is all that is "
    "judged"
)

NO_NOISE = (
    "torch's own rounding noise was not recorded: what this input cannot tell counts as different"
)


class Recording:
    """Torch's results from a file; replaces the torch module in `compare`, `plan` and `port`.

    Tensors are read lazily. torch need not be installed.

    Args:
      file: a file written by `record`.

    Attributes:
      path: path of the file.
      name: name of torch's class.
      modules: class and settings of each torch submodule, by path.
      order: the submodules in the order in which torch called them.
      dtypes, weights, training: the recorded dtypes, the kind of weights ("random" or "given"), and
        the optimizer with its number of steps.

    Raises:
      ParityError: if the file is not a recording, is damaged, or has a newer format.

    >>> import tempfile, torch
    >>> from flax import nnx
    >>> from flax_attn.parity import compare, record
    >>> file = Path(tempfile.mkdtemp()) / "linear.safetensors"
    >>> _ = record(torch.nn.Linear(3, 2), (np.ones((4, 3)),), file, dtypes=("float64",))
    >>> compare(Recording(file), nnx.Linear(3, 2, rngs=nnx.Rngs(0))).ok
    True
    """

    def __init__(self, file: str | PathLike[str]):
        self.path = Path(file)
        facts, self.reader = opened(self.path, REMEDY)
        if "cases" in facts:
            raise ParityError(
                f"{self.path} holds sketches of cases, which `flax-attn parity` reads: {REMEDY}."
            )
        self.facts = facts
        self.loaded: Arrays = {}
        try:
            self.name: str = facts["name"]
            self.library: Literal["torch", "jax"] = facts.get("library", "torch")
            self.sources = [_source(fields) for fields in facts["sources"]]
            self.modules = {k: Part(**self.reader.value(x)) for k, x in facts["modules"].items()}
            self.order: list[str] = facts["order"]
            self.trained: dict[str, bool | None] = facts["trained"]
            self.dropouts: list[str] = facts["dropouts"]
            self.weights: Literal["random", "given"] = facts["weights"]
            self.dtypes = tuple(facts["runs"])
            self.training = _training(facts, self.reader)
            self.recorded: dict[str, str] = facts["versions"]
            self.request = _request(facts["request"], self.reader)
            self.keeps = self.reader.value(facts["keeps"])
        except DAMAGE as error:
            raise self.reader.damaged(error) from error

    @property
    def parts(self) -> list[str]:
        return [name for name in self.modules if name]

    @property
    def values(self) -> Arrays:
        if not self.loaded:
            stored = self.facts["values"].items()
            self.loaded.update({name: self.reader.tensor(x) for name, x in stored})
        return self.loaded

    @property
    def versions(self) -> dict[str, str]:
        version = f"{self.recorded[self.library]} (recorded)"
        return {"torch": version} if self.library == "torch" else {"jax of the record": version}

    @property
    def notes(self) -> list[str]:
        """Origin of the recording, and what it lacks."""
        # Lower case: the library that made it, whatever its side is called.
        by = f"{self.library} {self.recorded[self.library]} on {self.recorded['machine']}"
        notes = [*self.facts["notes"], f"compared with {self.path.name}, recorded by {by}"]
        if "float64" not in self.dtypes:
            notes.append(NO_FLOAT64.format(" and ".join(self.dtypes)))
        elif "noise" not in self.facts["runs"]["float64"]:
            notes.append(NO_NOISE)
        known = {"gradients": self.facts["request"]["grads"], "taps": self.facts["request"]["taps"]}
        return notes + [f"{what} were not recorded" for what, has in known.items() if not has]

    def call_spec(self, with_call: CallSpec) -> "Recording":
        """Returns a copy bound to the arguments of a call.

        Raises:
          ParityError: if the call differs from the recorded one.
        """
        known = self.request
        for what, want, has in (
            ("seed", with_call.seed, known.seed),
            ("train", with_call.train, known.train),
            ("constants", {*with_call.constants} or None, {*known.constants}),
        ):
            if want not in (None, has):
                self._refuse(f"{what}={_shown(want)}", f"{what}={_shown(has)}")
        if with_call.call is not None:
            raise ParityError(
                f"{self.path} holds what torch gave, and calls nothing: give torch_call= to record."
            )
        other = copy(self)
        args, kwargs = self._arguments(with_call)
        flags = with_call.grads and known.grads, with_call.taps and known.taps
        facts = known.seed, known.train, *flags, known.constants
        other.request = RunRequest(args, kwargs, *facts)
        return other

    def _arguments(self, call_spec: CallSpec) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns the recorded arguments, or the given ones after checking that they are equal."""
        known = self.request
        arrays = RunRequest(call_spec.inputs, call_spec.kwargs, 0, False, False, False).arrays()
        has = {k: self.reader.tensor(x) for k, x in self.facts["request"]["arrays"].items()}
        if not call_spec.inputs and not call_spec.kwargs:
            if self.facts["request"]["call"] is None:
                raise ParityError(
                    f"{self.path} holds the arrays among the inputs alone, since others cannot be "
                    "written down: give compare the inputs too, as they were recorded."
                )
            return known.args, known.kwargs
        if arrays.keys() != has.keys():
            self._refuse(f"the inputs {_listed(arrays)}", f"the inputs {_listed(has)}")
        for name, x in arrays.items():
            if not judge.exact(x, has[name]).ok:
                raise ParityError(
                    f"Input {name!r} is another than was recorded in {self.path}: give no inputs, "
                    "and the recorded ones are used, or record again."
                )
        return call_spec.inputs, call_spec.kwargs

    def check(self, options: Options) -> None:
        """Raises ParityError for comparison options that were not recorded."""
        missing = [dtype for dtype in options.dtypes if dtype not in self.dtypes]
        if missing:
            self._refuse(f"dtypes {', '.join(missing)}", ", ".join(self.dtypes))
        as_is = options.weights == "as_is"
        carried = self.weights if as_is else options.weights
        if carried != self.weights or (as_is and self.weights != "given" and self.sources):
            self._refuse(f'weights="{options.weights}"', f'weights="{self.weights}"')
        if options.optimizer is not None:
            self._check_training(*options.optimizer, options.steps)
        for dtype in options.dtypes if options.noise else ():
            if "noise" not in self.facts["runs"][dtype]:
                self._refuse(f"noise=True in {dtype}", "none there; say record(..., noise=True)")

    def _check_training(self, name: str, settings: Mapping[str, Any], steps: int) -> None:
        known, count = self.training
        if known is None or (name, dict(settings)) != known or steps > count:
            has = "no optimizer" if known is None else f"optimizer={known!r}, steps={count}"
            self._refuse(f"optimizer={(name, dict(settings))!r}, steps={steps}", has)

    def _refuse(self, call_spec: str, has: str) -> None:
        raise ParityError(f"{self.path} was not recorded with {call_spec}; it has {has}.")

    def with_weights(self, strategy: str, plan: Plan | None) -> "Recording":
        """Returns itself, since its weights were fixed when it was recorded.

        Raises:
          ParityError: if a rule skips a tensor that was recorded with random values.
        """
        skipped = plan.skipped if plan else ()
        kinds = {source.name: source.kind for source in self.sources}
        skipped_names = [x for x in self.facts["skipped"] if x in skipped]
        drawn = [x for x in skipped if kinds[x] != "buffer" and x not in skipped_names]
        if self.weights == "random" and drawn:
            raise ParityError(
                f"{drawn[0]}, which a rule skips, has random numbers in {self.path}: give record "
                'the rule too, rules=[Rule.skip(...)], or say weights="given" there.'
            )
        return self

    def with_output(self, name: str) -> "Recording":
        other = copy(self)
        other.request = replace(self.request, output=name)
        return other

    def run(self, dtype: str, keeps: Sequence[np.ndarray]) -> tuple[Run, Run]:
        run = self._named(self.facts["runs"][dtype]["torch"])
        if dtype == "float64":
            return run, run
        if "float64" in self.dtypes:
            return run, self._named(self.facts["runs"][dtype]["truth"])
        return _largest_move(run, [*self.noisy(dtype, keeps)]), run

    def noisy(self, dtype: str, keeps: Sequence[np.ndarray]) -> Iterator[Run]:
        return map(self._named, self.facts["runs"][dtype].get("noise", ()))

    def _named(self, tree: Any) -> Run:
        """Reads a run; its output gets the name that the request has for it."""
        run = self.reader.value(tree)
        for kind in (run.outputs, run.others):
            named = {self.request.output + k.removeprefix(OUTPUT): x for k, x in kind.items()}
            kind.clear()
            kind.update(named)
        return run

    def buffers(self) -> Arrays:
        kinds = {source.name: source.kind for source in self.sources}
        return {name: x for name, x in self.values.items() if kinds[name] == "buffer"}

    def with_buffers(self, values: Arrays) -> None:
        """Returns None: a recording cannot run torch again."""

    def quick(self, keeps: Sequence[np.ndarray]) -> Run:
        return self.run("float64", keeps)[0]

    def program(self, truth: Run) -> None:
        """Returns None: a recording cannot run torch again."""

    def steps(self, optimizer: Any, count: int, keeps: Sequence[np.ndarray]) -> Iterator[Stepped]:
        for step in self.facts["steps"][:count]:
            yield Stepped(*self.reader.value(step))

    def decoded(self, decode: Any, cuts: Sequence[Cut], dtype: str) -> tuple[dict, dict]:
        if decode.torch is not None:
            raise ParityError(f"{self.path} calls nothing: give Decode(torch=...) to record.")
        stored = self.facts["runs"][dtype].get("decoded", [])
        known = {Cut(tuple(lengths)): sides for lengths, *sides in stored}
        missing = [str(cut) for cut in cuts if known and cut not in known]
        if missing:
            self._refuse(f"the cut {missing[0]}", ", ".join(map(str, known)))
        sides = [{c: Steps(self.reader.value(known[c][i])) for c in cuts if known} for i in (0, 1)]
        return sides[0], sides[1]


def original_of(torch_module: Any, call_spec: CallSpec) -> Original:
    """Returns torch's side of a comparison: live, or recorded."""
    is_recording = isinstance(torch_module, Recording)
    return torch_module.call_spec(call_spec) if is_recording else call_spec.side(torch_module)


def _source(fields: Mapping[str, Any]) -> Source:
    plain = {key: value for key, value in fields.items() if key != "heads"}
    source = Source.from_json(plain)
    return Source(**{**vars(source), "heads": tuple(fields["heads"])})


def _training(facts: Mapping[str, Any], reader: Reader) -> tuple[Any, int]:
    if "optimizer" not in facts:
        return None, 1
    name, settings = facts["optimizer"]
    return (name, reader.value(settings)), len(facts["steps"])


def _request(facts: Mapping[str, Any], reader: Reader) -> RunRequest:
    """Builds the recorded `RunRequest`; without arguments if they were not serializable."""
    args, kwargs = reader.value(facts["call"]) if facts["call"] is not None else ((), {})
    flags = {key: facts[key] for key in ("seed", "train", "grads", "taps")}
    return RunRequest(args, kwargs, constants=frozenset(facts["constants"]), **flags)


def _largest_move(run: Run, noisy: Sequence[Run]) -> Run:
    """Combines noisy runs: for each value, the run in which rounding changed it most."""
    made = copy(noisy[0])
    made.keeps, made.rates, made.places = run.keeps, run.rates, run.places
    for kind in ("outputs", "gradients", "taps"):
        moved = [getattr(other, kind) for other in noisy]
        wants = getattr(run, kind).items()
        setattr(made, kind, {k: _most(x, [other[k] for other in moved]) for k, x in wants})
    return made


def _most(want: np.ndarray, moved: Sequence[np.ndarray]) -> np.ndarray:
    if not is_floating(want):
        return want
    return max(moved, key=lambda x: judge.error(x, want))


def _listed(arrays: Mapping[str, Any]) -> str:
    return ", ".join(arrays) or "none"


def _shown(value: Any) -> str:
    return repr(tuple(sorted(value))) if isinstance(value, set) else repr(value)
