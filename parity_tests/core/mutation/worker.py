"""Mutants on trial: each is put in place of its module, in a process that stays warm, and judged.

A process imports jax once and runs the laws of a file on the file as it is. Then, mutant after
mutant, the module's names are replaced, the laws called one by one until one fails, and the names
put back. A mutant that finds no end goes down with its process, and a new one is started.
"""

import importlib
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from .operators import Mutant, mutated

ROOT = Path(__file__).parents[3]
FILES = {
    "reference": "flax_attn/reference.py",
    "mask_algebra": "flax_attn/masks/algebra.py",
    "masks": "flax_attn/masks/nodes.py",
    "scores": "flax_attn/scores.py",
    "judge": "flax_attn/parity/judge.py",
}
BELOW = {"mask_algebra": "masks"}  # whose classes must be made anew, and whose laws hold for both
SECONDS, SECONDS_TO_WARM = 20, 300


def source_of(file: str) -> str:
    return (ROOT / FILES[file]).read_text("utf-8")


def module_of(file: str) -> ModuleType:
    return importlib.import_module(FILES[file].removesuffix(".py").replace("/", "."))


def put_in_place(module: ModuleType, source: str) -> None:
    """The module's names replaced by those that `source` makes."""
    names = vars(module)
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    exec(compile(source, "mutant", "exec"), names)


class Trial:
    """One module, its source and its laws, all of which hold while nothing is changed."""

    def __init__(self, file: str):
        self.source = source_of(file)
        self.module = module_of(file)
        below = BELOW.get(file)
        self.below = {} if below is None else {module_of(below): source_of(below)}
        files = sorted(Path(__file__).parents[1].glob(f"*/test_laws_{below or file}*.py"))
        names = [f"parity_tests.core.{path.parent.name}.{path.stem}" for path in files]
        books = [vars(importlib.import_module(name)) for name in names]
        self.laws = [book[name] for book in books for name in book if name.startswith("test_")]
        broken = self.broken(None)  # by the same road as any mutant, so that no law fails for that
        if broken is not None:
            raise RuntimeError(f"{FILES[file]} as it stands breaks the law {broken}.")

    def broken(self, number: int | None) -> str | None:
        """The law that fails, with the change of that number made or none; None if all hold."""
        held, at = (
            [(vars(module), dict(vars(module))) for module in (self.module, *self.below)],
            "at import",
        )
        source = self.source if number is None else mutated(self.source, number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for module, text in {self.module: source, **self.below}.items():
                    put_in_place(module, text)
                for law in self.laws:
                    at = law.__name__
                    law()
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # what pytest.raises raises is no Exception
            text = str(fault).strip().partition("\n")[0]
            return f"{at}: {type(fault).__name__} {text}"
        finally:
            for names, before in held:
                names.clear()
                names.update(before)
        return None


def serve(connection: Connection) -> None:
    """Answers (file, number) with the law that fails; number None warms the file up."""
    importlib.import_module("parity_tests.conftest")  # strict promotion, as in all tests
    trials: dict[str, Trial] = {}
    while True:
        file, number = connection.recv()
        try:
            if file not in trials:
                trials[file] = Trial(file)
            connection.send(None if number is None else trials[file].broken(number))
        except Exception as fault:
            connection.send(f"{type(fault).__name__}: {fault}")


class Worker:
    """A process that serves, started anew whenever a mutant takes it down."""

    def __init__(self):
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.warm: set[str] = set()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def broken(self, mutant: Mutant) -> str | None:
        if mutant.file not in self.warm:
            fault = self._ask(mutant.file, None, SECONDS_TO_WARM)
            if fault is not None:
                raise RuntimeError(fault)
            self.warm.add(mutant.file)
        return self._ask(mutant.file, mutant.number, SECONDS)

    def _ask(self, file: str, number: int | None, seconds: float) -> str | None:
        try:
            self.connection.send((file, number))
            if self.connection.poll(seconds):
                return self.connection.recv()
            ended = f"no end within {seconds} seconds"
        except EOFError:
            ended = "the process died"
        self.stop()
        self._start()
        return ended


def try_all(
    mutants: Iterable[Mutant], jobs: int, tell: Callable[[Mutant], None] = lambda _: None
) -> dict[Mutant, str | None]:
    """For each mutant the law that fails, or None: it lives."""
    own, workers = threading.local(), []

    def set_up() -> None:
        own.worker = Worker()
        workers.append(own.worker)

    def judged(mutant: Mutant) -> tuple[Mutant, str | None]:
        fate = own.worker.broken(mutant)
        tell(mutant)
        return mutant, fate

    with ThreadPoolExecutor(jobs, initializer=set_up) as pool:
        try:
            return dict(pool.map(judged, mutants))
        finally:
            for worker in workers:
                worker.stop()
