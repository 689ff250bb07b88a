"""Cases: one comparison as data, used by pytest, the command line and the benchmark."""

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
from flax import nnx

from ...errors import ParityError
from ...weights.rule import Rule
from .. import draw
from ..compare import compare
from ..decode import Decode
from ..recording.record import record
from ..recording.recording import Recording
from ..report import Report
from ..torch_module import as_torch_module
from . import golden
from .home import caller_of, has_torch, is_from_this_library, quoted

Config = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Case:
    """A Flax class or a JAX function, its configuration, its reference and its inputs.

    Args:
      flax_class: an nnx module class, which receives `rngs` if its constructor accepts them, or a
        JAX function.
      config: constructor arguments, or keywords of the function, or a function that returns them.
      reference: import path of the reference: a torch module class or function, an nnx module
        class, or, for a JAX function, another; None means `torch_ref.<same file>.<same class>`.
      made_by: import path of a function that builds the reference from its arguments, for a class
        without an import path, or an instance that must be modified first.
      reference_config: the reference's arguments if different, or a function returning them.
      torch_call, flax_call: `call(module, **inputs)`, used instead of calling the module.
      rules: for the weight mapping.
      train: whether dropout is on, with the same masks on both sides.
      seed: for weights, inputs and cotangents.
      dtypes: dtypes to compare.
      constants: names of inputs that are not differentiated, such as a float mask.
      decode: how to also run both step by step with their caches.
      name: replaces the name derived from configuration and inputs.
      inputs: the call's arguments by name: a shape for standard normal values, or a numpy array.

    Attributes:
      eager: whether float64 also runs eagerly, not only under jit.
      home: the module that defines the case, which determines where its golden is stored.
      tells_class: whether its title includes the Flax class, to distinguish it from other cases.

    If torch, or the reference's package, is not installed, the case is compared with recorded
    results, and its report says so.

    Raises:
      ValueError: if there is no reference and the class is not one of this library's, or if
        `made_by` is given without a reference.
      TypeError: if the function `made_by` does not return a torch module.
      ParityError: by `check`, with the report, unless everything is equal.

    >>> case = Case(nnx.Linear, {"in_features": 3, "out_features": 2}, reference="torch.nn.Linear",
    ...     flax_call=lambda m, input: m(input), input=(4, 3), dtypes=("float64",))
    >>> case.report(live=True).ok
    True
    >>> import jax
    >>> Case(jax.nn.silu, {}, reference="jax.nn.swish", x=(3, 4), dtypes=("float64",)).check()
    """

    def __init__(
        self,
        flax_class: type[nnx.Module] | Callable[..., Any],
        config: Config,
        *,
        reference: str | None = None,
        made_by: str | None = None,
        reference_config: Config | None = None,
        torch_call: Callable[..., Any] | None = None,
        flax_call: Callable[..., Any] | None = None,
        rules: Sequence[Rule] = (),
        train: bool = False,
        seed: int = 0,
        dtypes: Sequence[str] = ("float64", "float32", "bfloat16"),
        constants: Sequence[str] = (),
        decode: Decode | None = None,
        name: str = "",
        **inputs: tuple[int, ...] | np.ndarray,
    ):
        self.flax_class: Any = flax_class
        self.config, self.inputs = config, inputs
        if made_by and not reference:
            raise ValueError(f"made_by={made_by!r} builds a reference; name it by reference= too.")
        if not reference and not is_from_this_library(self.flax_class):
            raise ValueError(
                f'Case({flax_class.__name__}) needs reference="package.Class"; '
                "only flax_attn's own layers have twins."
            )
        self.reference = reference or f"torch_ref.{self.variant}.{flax_class.__name__}"
        self.made_by = made_by
        self.reference_config = config if reference_config is None else reference_config
        self.flax_call, self.torch_call = flax_call or _call, torch_call or _call
        self.rules, self.train, self.seed, self.dtypes = tuple(rules), train, seed, tuple(dtypes)
        self.constants = (constants,) if isinstance(constants, str) else tuple(constants)
        self.name, self.eager, self.tells_class = name, True, self.is_function
        self.decode = decode
        self.home, self._first_seed = caller_of(self), seed

    @property
    def variant(self) -> str:
        """Name of the file that defines the Flax class."""
        return self.flax_class.__module__.rpartition(".")[2]

    @property
    def proven_equal_to(self) -> str:
        """The reference as shown in tables: its package and name."""
        package, _, name = self.reference.rpartition(".")
        return (
            f"{package.split('.')[0]}.{name}" if package.startswith("torch_ref") else self.reference
        )

    @property
    def reproduce(self) -> str:
        """The shell command that runs only this case."""
        is_library = self.home.is_own(self.flax_class)
        line = ["flax-attn", "parity", *([] if is_library else [shlex.quote(self.home.name)])]
        seed = [] if self.seed == self._first_seed else ["--seed", str(self.seed)]
        return " ".join([*line, quoted(str(self)), *seed])

    @property
    def titles(self) -> tuple[str, str]:
        """Titles under which it may be recorded: the current one, and the one with the class."""
        return str(self), self._title(tells_class=True)

    def __str__(self) -> str:
        return self._title(self.tells_class)

    def _title(self, tells_class: bool) -> str:
        parts = self.name or ",".join(f"{k}={_show(v)}" for k, v in _config(self.config).items())
        parts = ",".join(filter(None, (self.flax_class.__name__ * tells_class, parts)))
        inputs = ",".join(
            f"{k}={'x'.join(map(str, v if isinstance(v, tuple) else v.shape))}"
            for k, v in self.inputs.items()
        )
        end = ",train" if self.train else ""
        return f"{self.variant}[{parts}|{inputs}{end}|{self.proven_equal_to}]"

    @property
    def is_function(self) -> bool:
        """Whether two JAX functions are compared, for which torch need not be installed."""
        return not isinstance(self.flax_class, type)

    def flax_module(self) -> Any:
        """Builds the Flax module; a JAX function gets its keywords."""
        return self._built(self.flax_class, _config(self.config))

    def _built(self, kind: Any, config: Mapping[str, Any]) -> Any:
        if self.is_function:
            return partial(kind, **config)
        takes_rngs = "rngs" in inspect.signature(kind.__init__).parameters
        return kind(**config, **{"rngs": nnx.Rngs(self.seed)} if takes_rngs else {})

    def torch_module(self) -> Any:
        """Builds the reference; a torch function is wrapped in a module without parameters."""
        if self.made_by is not None:
            import torch

            module = _imported(self.made_by)(**_config(self.reference_config))
            if not isinstance(module, torch.nn.Module):
                kind = type(module).__name__
                raise TypeError(f"{self.made_by} must make a torch.nn.Module; got {kind}.")
            return module
        reference = _imported(self.reference)
        if self.is_function or (isinstance(reference, type) and issubclass(reference, nnx.Module)):
            return self._built(reference, _config(self.reference_config))
        if isinstance(reference, type):
            return reference(**_config(self.reference_config))
        return as_torch_module(reference)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the inputs, drawing those given as shapes."""
        return {
            name: draw.normal(self.seed, name, x) if isinstance(x, tuple) else np.asarray(x)
            for name, x in self.inputs.items()
        }

    def record(self, file: str | PathLike[str]) -> Path:
        """Records the reference's results; `report(recording=...)` then needs no torch.

        Args:
          file: the `.safetensors` file to write.
        """
        steps = self.decode if self.decode is not None and self.decode.torch else None
        return record(
            self.torch_module(),
            (),
            file,
            kwargs=self.arrays(),
            dtypes=self.dtypes,
            train=self.train,
            rules=self.rules,
            seed=self.seed,
            constants=self.constants,
            torch_call=self.torch_call,
            decode=steps,
        )

    def report(
        self,
        live: bool | None = None,
        eager: bool | None = None,
        recording: Recording | None = None,
    ) -> Report:
        """Runs the comparison, with torch or with torch's recorded results.

        Args:
          live: whether torch runs now; None means yes if torch is installed.
          eager: overrides the case's `eager`, unless None.
          recording: a file written by `record`, used instead of torch.
        """
        live = (has_torch() if live is None else live) or self.is_function
        eager = self.eager if eager is None else eager
        torch_call, decode = self.torch_call, self.decode
        if recording is not None:
            reference, torch_call = recording, None
            decode = None if decode is None else replace(decode, torch=None)  # steps are recorded
        elif not live:
            return golden.replay(self, self.dtypes, eager)
        else:
            try:
                reference = self.torch_module()
            except ModuleNotFoundError as error:
                package = (error.name or "").partition(".")[0]
                is_missing = bool(package) and find_spec(package) is None  # not a part of it alone
                if not is_missing or self.seed != self._first_seed:
                    raise
                why = f"{self.reference} cannot be imported here ({error})"
                try:
                    report = golden.replay(self, self.dtypes, eager)
                except ParityError as unrecorded:
                    raise ParityError(f"{why}, and {unrecorded}") from error
                return replace(report, replayed=f"compared with recorded results: {why}")
        return compare(
            reference,
            self.flax_module(),
            kwargs=self.arrays(),
            dtypes=self.dtypes,
            eager=eager,
            train=self.train,
            rules=self.rules,
            seed=self.seed,
            constants=self.constants,
            torch_call=torch_call,
            flax_call=self.flax_call,
            decode=decode,
            title=str(self),
            reproduce=self.reproduce,
        )

    def check(self) -> None:
        """Raises ParityError, with the report, unless everything is equal beyond rounding noise."""
        report = self.report()
        if not report.certain:
            raise ParityError(str(report), report)


def _call(module: Any, **inputs: Any) -> Any:
    return module(**inputs)


def _config(config: Config) -> Mapping[str, Any]:
    return config() if callable(config) else config


def _show(value: Any) -> str:
    plain = isinstance(value, bool | int | float | str | type(None))
    return str(value) if plain else type(value).__name__


def _imported(path: str) -> Any:
    """Imports the object with this import path."""
    package, _, name = path.rpartition(".")
    with catch_warnings():  # packages may warn on import
        simplefilter("ignore")
        return getattr(import_module(package), name)
