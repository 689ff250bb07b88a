"""Worker processes: what kills its process is one failure, and all other work is done."""

import importlib
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from ...errors import ParityError

A = TypeVar("A")
B = TypeVar("B")
HOME = os.path.dirname(sys.modules[__name__.partition(".")[0]].__file__ or "")
IMPORTS = os.path.dirname(importlib.__file__)
MAX_ITEMS = 100  # of one process, since jax keeps all compiled programs in memory
SAFE = "PYTHONSAFEPATH"  # keeps the current folder off the front of a new process's path


@dataclass(frozen=True)
class Failure:
    """Describes work that raised, exited or killed its process, without a subject."""

    text: str


@dataclass(frozen=True)
class LastResult:
    """The result of a process that must not be reused, e.g. because a kernel broke its device."""

    result: Any


def attempt(work: Callable[[A], B], item: A) -> B | Failure:
    """Returns the result of `work`, or a `Failure` for any exception, `SystemExit` included."""
    try:
        return work(item)
    except ParityError as error:
        return Failure(str(error))
    except BaseException as error:
        return Failure(_error_text(error))


@dataclass(eq=False)
class _Worker:
    """A process, this end of its pipe, and the number of items it was given."""

    process: BaseProcess
    pipe: Connection
    items: int = 0


class Workers:
    """Processes that take one item at a time; for one that died, a new one is started.

    If two modules have the same name, workers import the one that plain Python would: `folders` and
    the current folder come last on the path.

    Attributes:
      most: maximum number of processes.
      folders: extra import folders, searched before the current folder.
      settings: environment variables for the processes.
    """

    def __init__(self, most: int = 1, settings: Mapping[str, str] | None = None):
        self.most = most
        self.folders: tuple[str, ...] = ()
        self.settings = dict(settings or {})
        self._started: list[_Worker] = []
        self._idle: list[_Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._started:
            worker.process.kill()
        for worker in [*self._started]:
            self._end(worker)

    def call(self, work: Callable[[A], B], item: A) -> B | Failure:
        """Runs one item."""
        return next(self.map(work, [item]))

    def map(self, work: Callable[[A], B], items: Sequence[A]) -> Iterator[B | Failure]:
        """Yields the results in the order of the items."""
        done: dict[int, B | Failure] = {}
        following = 0
        for i, result in self.as_completed(work, items):
            done[i] = result
            while following in done:
                yield done.pop(following)
                following += 1

    def as_completed(
        self, work: Callable[[A], B], items: Sequence[A]
    ) -> Iterator[tuple[int, B | Failure]]:
        """Yields the index of each item with its result, as soon as it has one.

        `work` and `items` must be picklable. An item is a failure if a process dies of it that did
        nothing before; if it did, that may be the cause, and the item gets a new process.
        """
        waiting, busy = deque(range(len(items))), {}
        most, retried = max(1, min(self.most, len(items) // 2)), set()
        while waiting or busy:
            while waiting and len(busy) < most:
                i = waiting.popleft()
                worker = self._idle.pop() if self._idle and i not in retried else self._new()
                worker.items += 1
                busy[worker] = i
                try:
                    worker.pipe.send((work, items[i]))
                except OSError:  # it died while it was idle, which is found below
                    pass
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in [*busy]:
                if worker.pipe not in ready and worker.process.is_alive():
                    continue
                i = busy.pop(worker)
                try:
                    if not worker.pipe.poll():  # a process of its own may hold the other end
                        raise EOFError
                    result = worker.pipe.recv()
                except (EOFError, OSError):
                    if worker.items > 1:
                        retried.add(i)
                        waiting.appendleft(i)
                    else:
                        yield i, Failure(_end_of(worker.process))
                    continue
                if isinstance(result, LastResult) or worker.items >= MAX_ITEMS:
                    self._end(worker)
                else:
                    self._idle.append(worker)
                yield i, result.result if isinstance(result, LastResult) else result

    def _end(self, worker: _Worker) -> None:
        """Ends a process that gets no more work, which would keep its memory."""
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._started.remove(worker)

    def _new(self) -> _Worker:
        """Starts a process, which ignores Ctrl-C, and imports nothing of the current folder yet."""
        context = get_context("spawn")
        pipe, child_end = context.Pipe()
        process = context.Process(target=_serve, args=(child_end, self.folders, self.settings))
        worker = _Worker(process, pipe)
        before = os.environ.get(SAFE)
        os.environ[SAFE] = "1"
        blocks = hasattr(signal, "pthread_sigmask")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else ()
        try:
            process.start()
            self._started.append(worker)
        finally:
            os.environ.pop(SAFE) if before is None else os.environ.update({SAFE: before})
            if blocks:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child_end.close()
        return worker


def _serve(pipe: Connection, folders: tuple[str, ...], settings: Mapping[str, str]) -> None:
    """Does what comes through the pipe, until it is closed."""
    os.environ.pop(SAFE, None)
    os.environ.update(settings)
    sys.path += [path for path in (*folders, os.getcwd()) if path not in sys.path]
    # One thread for torch, so that processes do not compete for cores; read when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    while True:
        try:
            work, item = pipe.recv()
        except (EOFError, OSError):
            return
        except BaseException as error:
            result = Failure(_error_text(error))
        else:
            result = attempt(work, item)
        try:
            pipe.send(result)
        except OSError:
            return
        except Exception as error:
            pipe.send(Failure(f"its result cannot be sent: {_error_text(error)}"))


def _end_of(process: BaseProcess) -> str:
    """How a process ended that gives no more results."""
    process.join(timeout=1.0)
    process.kill()  # one that lives on without its pipe
    process.join()
    code = process.exitcode or 0
    if code >= 0:
        return f"it ended its process with exit code {code}"
    try:
        return f"its process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was killed by signal {-code}"


def _error_text(error: BaseException) -> str:
    """The exception in one line, with the innermost location outside this library."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:  # its location is not in the traceback
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    if isinstance(error, SystemExit):
        text = f"it exited: sys.exit({error.code!r})"
    else:
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith((HOME, IMPORTS, "<frozen"))]
    user_frames = [f for f in outside if "site-packages" not in f.filename] or outside
    return text + (
        f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
    )
