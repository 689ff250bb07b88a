"""pytest plugin: parity cases as parameters, `assert_parity` as a fixture, and reports.

The plugin imports nothing slow (jax, numpy, this library) until a test uses a case or the fixture,
so that other test suites are not slowed down.

* A test with the argument `case`, in a module with a list `CASES` of `flax_attn.parity.Case`, runs
  once per case.
* The fixture `assert_parity` is `flax_attn.parity.assert_parity`, its report named after the test.
* `--parity-seed N` draws other weights, inputs and cotangents, in both.
* Failures are reported in full at the end; tracebacks stop where the harness begins.
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

PROPERTY = "parity report"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--parity-seed N`."""
    parser.getgroup("flax_attn").addoption(
        "--parity-seed",
        type=int,
        metavar="N",
        help="seed of the weights, inputs and cotangents of parity cases, in place of their own",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    """Reports the seed, if given."""
    seed = config.getoption("parity_seed")
    return None if seed is None else f"parity seed: {seed}"


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrises tests with argument `case` by their module's `CASES`, unless the suite does."""
    # A mark, or a hook of the suite, may have given it values already.
    is_parametrised = any("case" in call.params for call in getattr(metafunc, "_calls", ()))
    if "case" not in metafunc.fixturenames or is_parametrised:
        return
    kind = _loaded("parity.cases.case", "Case")
    cases = getattr(metafunc.module, "CASES", None)
    if kind is None or not isinstance(cases, list | tuple):
        return
    strange = [entry for entry in cases if not isinstance(entry, kind)]
    if len(strange) == len(cases):  # a list of something else
        return
    if strange:
        where = metafunc.definition.nodeid.partition("::")[0]
        pytest.fail(
            f"CASES in {where} must hold flax_attn.parity.Case objects; it holds {strange[0]!r}.",
            pytrace=False,
        )
    seed = metafunc.config.getoption("parity_seed")
    placed = [_placed(case, metafunc.module, seed) for case in cases]
    metafunc.parametrize("case", placed, ids=str)


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`flax_attn.parity.assert_parity`; the report has the test's name and its command."""
    from ..parity import assert_parity
    from ..parity.cases.case import quoted

    seed = request.config.getoption("parity_seed")
    name, (_, *inside) = request.node.name, request.node.nodeid.split("::")
    path = os.path.relpath(request.node.path, request.config.invocation_params.dir)
    command = f"pytest {quoted('::'.join((path, *inside)))}"
    command += "" if seed is None else f" --parity-seed {seed}"

    def check(torch_module: Any, flax_module: Any, *inputs: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        seeded = {} if seed is None else {"seed": seed}
        arguments = {"title": name, "reproduce": command, **options, **seeded}
        return assert_parity(torch_module, flax_module, *inputs, **arguments)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Shortens a ParityError to its headline and stores its text for the summary."""
    kind = _loaded("errors", "ParityError")
    error = None if call.excinfo is None else call.excinfo.value
    text = str(error) if kind is not None and isinstance(error, kind) else ""
    if kind is not None and text and not item.config.getoption("fulltrace"):
        has_traceback = item.config.getoption("tbstyle") != "no"
        where = "(whole under 'parity reports')" if has_traceback else "(whole without --tb=no)"
        call.excinfo = _shortened(error, kind, where)
    report = yield
    if text:
        report.user_properties.append((PROPERTY, text))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the full reports of all failures."""
    if config.getoption("tbstyle") == "no":
        return
    failed = [r for kind in ("failed", "error") for r in terminalreporter.getreports(kind)]
    texts = [
        (report.nodeid, text)
        for report in failed
        for key, text in getattr(report, "user_properties", ())
        if key == PROPERTY
    ]
    if texts:
        terminalreporter.section("parity reports")
    for nodeid, text in texts:
        terminalreporter.write_sep("-", nodeid)
        terminalreporter.write_line(text)


def _loaded(module: str, name: str) -> Any:
    """A class of flax_attn, or None if the suite has not imported it and so has no instances."""
    return getattr(sys.modules.get(f"flax_attn.{module}"), name, None)


def _placed(case: Any, module: Any, seed: int | None) -> Any:
    """Copies a case, setting its home to the list that contains it, and its seed."""
    case = copy.copy(case)
    case.home = case.home._replace(module=module.__name__, file=module.__file__ or "")
    if seed is not None:
        case.seed = seed
    return case


def _shortened(error: Any, kind: type, where: str) -> Any:
    """The same error with its headline and where to find its text, without the harness's frames."""
    report, lines = getattr(error, "report", None), str(error).splitlines()
    first = getattr(report, "first", None)
    headline = lines[0] + ("" if first is None else f"; first: {first.tap}")
    short = kind(f"{headline}\n{where}", report)
    home = os.path.join(os.path.dirname(sys.modules[kind.__module__].__file__ or ""), "")
    outside = _without(error.__traceback__, home) or error.__traceback__
    return pytest.ExceptionInfo.from_exc_info((kind, short, outside))


def _without(trace: TracebackType | None, folder: str) -> TracebackType | None:
    """Removes the frames of files in one folder from a traceback."""
    if trace is None:
        return None
    rest = _without(trace.tb_next, folder)
    if trace.tb_frame.f_code.co_filename.startswith(folder):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
