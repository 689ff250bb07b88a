"""Mutants on trial: each is put in place of its module, in a process that stays warm, and judged.

A process imports jax once and runs the laws of a file on the file as it is. Then, mutant after
mutant, the module and all that is built on it are made anew (`chain`), the laws are called one by
one until one fails, and everything is put back. A mutant that finds no end goes down with its
process, and a new one is started.
"""

import ast
import importlib
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType

from flax_attn.parity.cases.strict import CACHE

from .chain import Chain, Sources
from .files import FILES, books_of, module_of, path_of
from .naming import change_of
from .operators import Mutant, sites

ROOT = Path(__file__).parents[3]
PACKAGES = frozenset({"flax_attn", "parity_tests", "torch_ref"})
SECONDS, SECONDS_TO_WARM = 40, 300  # of work
SLOWER = 2  # times as long as with nothing changed, where that is more
PATIENCE = 10  # times as long for a process that waits
LARGEST = 2**33  # bytes of a process before a new one takes its place: jax keeps what it was told

Laws = Mapping[str, tuple[str, ...]]
Tell = Callable[[Mutant, str | None, float], None]


def source_of(file: str) -> str:
    return (ROOT / path_of(file)).read_text("utf-8")


def chain_of(file: str, laws: Laws = FILES) -> Chain:
    return Chain(Sources(ROOT, PACKAGES), module_of(file), books_of(laws[file]))


class Trial:
    """A changed module, what is built on it, and its laws, which hold while nothing is changed."""

    def __init__(self, chain: Chain):
        self.chain = chain
        self.tree = ast.parse(chain.sources.text(chain.changed))
        self.sites = sites(self.tree)
        for module in (*chain.above, *chain.books):
            importlib.import_module(module)
        self.code = {
            module: compile(chain.sources.text(module), chain.sources.path(module), "exec")
            for module in chain.above
        }
        self.last_broken: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # of each law, with nothing changed
        self.kills: Counter[str] = Counter()
        broken = self.broken(None)  # by the same road as any mutant, so that no law fails for that
        if broken is not None:
            raise RuntimeError(f"{chain.changed} as it stands breaks the law {broken}.")

    def broken(self, change: int | None) -> str | None:
        """The law that fails, with the change of that number made or none; None if all hold."""
        if change is None:
            return self.broken_by(self.code[self.chain.changed], "")
        site = self.sites[change]
        site.make()
        try:
            code = compile(ast.fix_missing_locations(self.tree), "mutant", "exec")
        except (SyntaxError, ValueError) as fault:
            return f"at compilation: {type(fault).__name__} {fault}"
        finally:
            site.undo()
        return self.broken_by(code, site.where)

    def broken_by(self, code: CodeType, where: str) -> str | None:
        """The same of any code for the module; neighbours of `where` likely break the same law."""
        at = "at import"
        with warnings.catch_warnings(), _put_back(self._touched()):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", CACHE)
            try:
                for module, whole in {**self.code, self.chain.changed: code}.items():
                    self._make_anew(module, whole)
                for name, law in self._laws(self.last_broken.get(where)):
                    at, begun = name, time.process_time()
                    law()
                    self.seconds.setdefault(name, time.process_time() - begun)
            except KeyboardInterrupt:
                raise
            except BaseException as fault:  # what pytest.raises raises is no Exception
                self.last_broken[where] = at
                self.kills[at] += 1
                text = str(fault).strip().partition("\n")[0]
                return f"{at}: {type(fault).__name__} {text}"
        return None

    def _make_anew(self, module: str, code: CodeType) -> None:
        names = vars(sys.modules[module])
        for name in [name for name in names if not name.startswith("__")]:
            if not _is_submodule(names[name], f"{module}.{name}"):
                del names[name]
        exec(code, names)
        for handed in self.chain.reexports[module]:
            if handed.attribute in names and handed.package in sys.modules:
                vars(sys.modules[handed.package])[handed.name] = names[handed.attribute]

    def _touched(self) -> list[ModuleType]:
        packages = {r.package for handed in self.chain.reexports.values() for r in handed}
        return [sys.modules[name] for name in {*self.chain.above, *packages} & set(sys.modules)]

    def _laws(self, first: str | None) -> Iterator[tuple[str, Callable[[], None]]]:
        """That one first, then those that found most in the least time."""

        books = {book: vars(sys.modules[book]) for book in self.chain.books}
        laws = [
            (name, law)
            for book, names in books.items()
            for name, law in names.items()
            if name.startswith("test_") and law.__module__ == book
        ]
        return iter(sorted(laws, key=lambda law: (law[0] != first, self._cost(law[0]))))

    def _cost(self, law: str) -> float:
        return self.seconds.get(law, 0.0) / (1 + self.kills[law])


def _is_submodule(value: object, name: str) -> bool:
    return isinstance(value, ModuleType) and value is sys.modules.get(name)


@contextmanager
def _put_back(modules: list[ModuleType]) -> Iterator[None]:
    held = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for names, before in held:
            names.clear()
            names.update(before)


def serve(connection: Connection, laws: Laws) -> None:
    """Answers a file with None once its laws hold, and a mutant with the law that fails or None.

    The first of the answer is what went wrong beside that.
    """
    os.environ["MUTANTS"] = "1"  # laws run operation by operation: see core/backends/law_cases.py
    importlib.import_module("parity_tests.conftest")  # strict promotion, as in all tests
    jax = importlib.import_module("jax")
    jax.config.update("jax_disable_most_optimizations", True)  # as there too: most run once
    trials: dict[str, Trial] = {}
    while True:
        asked = connection.recv()
        file = asked if isinstance(asked, str) else asked.file
        try:
            if file not in trials:
                trials[file] = Trial(chain_of(file, laws))
            connection.send((None, None if asked == file else _judged(trials[file], asked)))
        except Exception as fault:
            connection.send((f"{type(fault).__name__}: {fault}", None))


def _judged(trial: Trial, mutant: Mutant) -> str | None:
    if not mutant.change.startswith(change_of(trial.sites[mutant.number])):
        raise RuntimeError(f"{path_of(mutant.file)} was edited while its mutants ran.")
    return trial.broken(mutant.number)


class Worker:
    """A process that serves, started anew whenever a mutant takes it down or it grows large."""

    def __init__(self, laws: Laws = FILES):
        self.laws = laws
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, dict(self.laws)), daemon=True)
        self.process.start()
        other.close()
        self.warm: dict[str, float] = {}  # by file, seconds that a mutant may take

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _start_again(self) -> None:
        self.stop()
        self._start()

    def broken(self, mutant: Mutant) -> str | None:
        if _memory(self.process.pid) > LARGEST:
            self._start_again()
        if mutant.file not in self.warm:
            before = _worked(self.process.pid) or 0.0
            with_end = self._ask(mutant.file, SECONDS_TO_WARM)
            if with_end is not None:
                raise RuntimeError(f"{path_of(mutant.file)} as it stands: {with_end}.")
            took = (_worked(self.process.pid) or 0.0) - before
            self.warm[mutant.file] = max(SECONDS, round(SLOWER * took))
        return self._ask(mutant, self.warm[mutant.file])

    def _ask(self, asked: Mutant | str, seconds: float) -> str | None:
        try:
            self.connection.send(asked)
            if self._answers(seconds):
                fault, law = self.connection.recv()
                if fault is not None:
                    raise RuntimeError(fault)
                return law
            with_end = f"no end within {seconds} seconds"
        except (EOFError, ConnectionError):
            with_end = "the process died"
        self._start_again()
        return with_end

    def _answers(self, seconds: float) -> bool:
        """Whether it does within so many seconds of work, however busy the machine is."""
        begun, worked = time.monotonic(), _worked(self.process.pid)
        while not self.connection.poll(1):
            waited = time.monotonic() - begun
            now = _worked(self.process.pid)
            spent = waited if worked is None or now is None else now - worked
            if spent > seconds or waited > PATIENCE * seconds:
                return False
        return True


def _worked(pid: int | None) -> float | None:
    """Seconds of processor time of a process; None where the system does not say."""
    path = Path(f"/proc/{pid}/stat")
    if not path.exists():
        return None
    fields = path.read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int | None) -> int:
    """Bytes that a process holds; 0 where the system does not say."""
    path = Path(f"/proc/{pid}/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if path.exists() else 0


def try_all(
    mutants: Iterable[Mutant], jobs: int, tell: Tell = lambda *_: None, laws: Laws = FILES
) -> dict[Mutant, str | None]:
    """For each mutant the law that fails, or None: it lives. `tell` also hears the seconds."""
    own, workers = threading.local(), []

    def set_up() -> None:
        own.worker = Worker(laws)
        workers.append(own.worker)

    def judged(mutant: Mutant) -> tuple[Mutant, str | None]:
        begun = time.perf_counter()
        fate = own.worker.broken(mutant)
        tell(mutant, fate, time.perf_counter() - begun)
        return mutant, fate

    with ThreadPoolExecutor(jobs, initializer=set_up) as pool:
        try:
            return dict(pool.map(judged, mutants))
        finally:
            for worker in workers:
                worker.stop()
