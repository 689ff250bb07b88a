"""When a device file lets "auto" choose this library's own kernel.

No GPU is here: the platform is assumed, with the kind of a device, which is for these tests.
"""

import json
import subprocess
import sys
import time
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from socket import socket
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Alibi,
    Dropout,
    Full,
    Prefix,
    ScoreFn,
    Window,
    assume_platform,
    attend,
    explain,
    frozen,
    use_device_file,
)
from flax_attn.backends import choice, device_file
from flax_attn.command import check_device_command as command
from flax_attn.device_check import requests
from flax_attn.device_check.part import Part
from flax_attn.device_check.random_requests import draw_request
from flax_attn.rules import Request, rules_of
from parity_tests.core.backends.refusal import told
from parity_tests.tables import each

ROOT = Path(__file__).parents[3]
GPU = "NVIDIA H200"
T = 512  # shorter ones are for the plain formula
Q = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
on_a_gpu = partial(assume_platform, "gpu", (9, 0), device_kind=GPU)


def kind(x=Q, **rules) -> str:
    return device_file.kind_of(Request.of(x, x, x, rules_of(**rules)))


KIND = kind(mask=CAUSAL)


def times(ratio=0.5, high=0.6) -> dict:
    return {"seconds": 1e-4, "ratio": ratio, "interval": [ratio, high]}


FASTER = {"fwd": times(), "fwd+bwd": times()}
RIGHT = {"kind": KIND, "backend": "pallas", "forward": True, "backward": True, "times": FASTER}
SLOWER = {**RIGHT, "times": {**FASTER, "fwd+bwd": times(1.3, 1.4)}}
LEFT = ["machine.jsonl", "requests.jsonl"]
UNSURE = {**RIGHT, "times": {**FASTER, "fwd": times(0.9, 1.1)}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "device.json"


def written(path, *rows, device: Any = GPU, capability: Any = (9, 0)):
    device_file.write(path, device, capability, rows or [RIGHT])
    return path


def found() -> tuple[str | None, str]:
    """What "auto" chooses on the GPU, and what is said of the kernel; traced compiles nothing."""
    explanations = []
    ask = partial(explain, mask=CAUSAL)
    jax.eval_shape(lambda q: explanations.append(ask(q, q, q)), Q)
    (explanation,) = explanations
    (line,) = (x for x in str(explanation).splitlines() if x.startswith("pallas"))
    return explanation.chosen, line.removeprefix("pallas").strip()


def program(mask=CAUSAL) -> str:
    return str(jax.make_jaxpr(lambda q: attend(q, q, q, mask=mask))(Q))


# What it says.


def test_the_kernel_is_taken_without_a_warning_where_it_is_proven(path):
    choice.warn_once.cache_clear()
    with use_device_file(written(path)), on_a_gpu(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() == ("pallas", "chosen")
        assert "pallas_call" in program()
    with on_a_gpu(), pytest.warns(UserWarning, match="'blockwise', slow on a gpu"):
        assert "pallas_call" not in program()


NOT_TAKEN = {
    "nothing of the kind": ([{**RIGHT, "kind": kind()}], "proves nothing of such requests"),
    "of another backend": ([{**RIGHT, "backend": "cudnn"}], "proves nothing of such requests"),
    "another output": (
        [{**RIGHT, "forward": False}],
        "not equal to the formula there, forward",
    ),
    "another gradient": (
        [RIGHT, {**RIGHT, "backward": False}],
        "equal to the formula there, backward",
    ),
    "a failure": ([RIGHT, {"kind": KIND, "backend": "pallas"}], "was not equal to the formula"),
    "a process that ended": ([RIGHT, {"kind": KIND, "backend": "-"}], "was not equal"),
    "slower": ([RIGHT, SLOWER], "it was slower there (1.3 times blockwise's time, fwd+bwd"),
    "not surely faster": ([UNSURE], "it was not surely faster there (0.9 times blockwise's"),
    "no time": ([RIGHT, {**RIGHT, "times": {"fwd": times()}}], "has no time of it there"),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_the_proven_kernel_is_passed_over_for_other_requests(name, path):
    rows, words = NOT_TAKEN[name]
    with use_device_file(written(path, *rows)), on_a_gpu():
        chosen, said = found()
    assert chosen == "blockwise" and words in said and said.startswith("passed over: ")
    assert said.endswith('; backend="pallas" asks for it')


ELSEWHERE = {
    "jax": "the device file is of jax 0.0.1; this is " + jax.__version__,
    "jaxlib": "the device file is of jaxlib 0.0.1; this is ",
    "flax_attn": "the device file is of flax_attn 0.0.1; this is ",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_file_of_another_version_counts_for_nothing(name, path, monkeypatch):
    other = {**device_file.versions(), name: "0.0.1"}
    with monkeypatch.context() as patch:
        patch.setattr(device_file, "versions", lambda: other)
        written(path)
    with use_device_file(path), on_a_gpu():
        chosen, said = found()
    assert chosen == "blockwise" and ELSEWHERE[name] in said


def test_a_file_of_another_device_counts_for_nothing(path):
    for changed, words in (
        ({"device": "NVIDIA A100"}, "the device file is of NVIDIA A100; this is NVIDIA H200"),
        ({"capability": (8, 0)}, "the device file is of capability 8.0; this is 9.0"),
        ({"capability": None}, "the device file is of capability None; this is 9.0"),
    ):
        with use_device_file(written(path, **changed)), on_a_gpu():
            chosen, said = found()
        assert chosen == "blockwise" and words in said


def test_a_device_file_of_a_cpu_never_selects_the_kernel(path):
    with use_device_file(written(path, device=jax.devices()[0].device_kind, capability=None)):
        chosen, said = found()
    assert chosen == "blockwise" and "it runs interpreted on a cpu" in said


def test_several_devices_that_may_share_a_request_are_left_to_blocks(path, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # and no type of an array names a mesh
    with use_device_file(written(path)), on_a_gpu():
        chosen, said = found()
    assert chosen == "blockwise" and "XLA may divide the request over several devices" in said


def test_an_assumed_platform_ignores_the_device_file(path):
    with use_device_file(written(path)), assume_platform("gpu", (9, 0)):
        chosen, said = found()
    assert chosen == "blockwise" and "no device file counts for an assumed platform" in said


def test_export_does_not_read_it(path):
    """JAX would refuse to export such a kernel, which is not stable over its versions."""

    def exported(function):
        return jax.export.export(function, platforms=["cuda"])(Q).mlir_module()

    def fresh():
        return jax.jit(lambda q: attend(q, q, q, mask=CAUSAL))

    with use_device_file(written(path)), on_a_gpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # blocks are slow on a GPU
        assert "triton" not in exported(fresh())
        traced = fresh()
        assert "pallas_call" in str(traced.trace(Q).jaxpr)
        with pytest.raises(ValueError, match="no compatibility guarantees"):
            exported(traced)
        with use_device_file(None):
            assert "triton" not in exported(traced)


# What counts as one kind.


@frozen
class Causal(Full):
    """A mask of a user's, under the name of one of this library's."""


X = jnp.ones((1, T, 2, 16))
DIFFERENT = {
    "dtype": lambda: kind(Q.update(dtype=jnp.bfloat16), mask=CAUSAL),
    "width": lambda: kind(Q.update(shape=(1, T, 2, 32)), mask=CAUSAL),
    "length": lambda: kind(Q.update(shape=(1, 1025, 2, 16)), mask=CAUSAL),
    "mask": lambda: kind(mask=CAUSAL | Prefix(3)),
    "sinks": lambda: kind(mask=CAUSAL, sinks=jnp.ones(2)),
    "score": lambda: kind(mask=CAUSAL, score=Alibi(np.ones(2))),
    "dropout": lambda: kind(mask=CAUSAL, dropout=Dropout(0.1, jax.random.key(0))),
    "positions": lambda: kind(mask=CAUSAL, q_positions=np.arange(T)),
    "array as scale": lambda: kind(mask=CAUSAL, scale=jnp.ones(())),
}


@each("name", DIFFERENT)
def test_kinds_of_requests_differ_by_each_field(name):
    assert DIFFERENT[name]() != KIND


def test_parts_that_may_differ_from_proof_to_use_are_kinds_of_their_own():
    kinds = []
    jax.eval_shape(lambda x: kinds.append(kind(score=Alibi(x))), jnp.ones(2))
    for slope in (0.5, jnp.ones(())):
        kinds.append(kind(score=ScoreFn(lambda x, b, n, q, k, slope=slope: x - slope * n)))
        kinds.append(kind(score=ScoreFn(lambda x, b, n, q, k: x - slope * n)))  # noqa: B023
    assert ["arrays in the score" in x for x in kinds] == [True, False, True, False, True]
    assert kind(mask=CAUSAL & Window(3, 0)) == kind(mask=Window(9, 0) & CAUSAL)
    assert f"mask {__name__}.Causal" in kind(mask=Causal())
    with jax.default_matmul_precision("tensorfloat32"):
        assert "tensorfloat32 products" in kind()
    with jax.default_matmul_precision("highest"):
        assert kind(mask=CAUSAL) == KIND
    kv = Q.update(shape=(1, T + 1, 1, 16))
    cut = Request.of(Q, kv, kv, rules_of(mask=CAUSAL))
    assert "grouped heads, T < S" in device_file.kind_of(cut)


# How it is read.


def test_a_program_is_traced_again_for_other_contents_alone(path, tmp_path):
    count = []
    function = jax.jit(lambda q: count.append(1) or attend(q, q, q, mask=CAUSAL))
    copy = tmp_path / "copy.json"
    copy.write_bytes(written(path).read_bytes())
    other = written(tmp_path / "other.json", SLOWER)
    with on_a_gpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file, traces in ((None, 1), (path, 2), (copy, 2), (other, 3)):
            with use_device_file(file):
                function.trace(Q)
                assert len(count) == traces
                function.trace(Q)
                assert len(count) == traces


def test_use_device_file_holds_from_the_call_on_or_inside_a_with(path):
    with on_a_gpu():
        setting = use_device_file(written(path))
        assert found()[0] == "pallas"
        with setting:
            assert found()[0] == "pallas"
            with use_device_file(None):
                assert found()[0] == "blockwise"
            assert found()[0] == "pallas"
        assert "no device file is in use (flax_attn.use_device_file)" in found()[1]
        with setting:
            assert found()[0] == "pallas"


def test_the_environment_variable_names_a_file_that_is_read_lazily(path, monkeypatch):
    device_file._of_variable.cache_clear()
    monkeypatch.setenv("FLAX_ATTN_DEVICE_FILE", str(path))
    with assume_platform("gpu", (9, 0)):
        assert found()[0] == "blockwise"  # nothing is there to read
    with on_a_gpu():
        with told(FileNotFoundError, "no device file", str(path)):
            attend(X, X, X, mask=CAUSAL)
        written(path)
        assert found()[0] == "pallas"
        path.unlink()
        assert found()[0] == "pallas", "it was read twice"
        with use_device_file(None):
            assert found()[0] == "blockwise"
    device_file._of_variable.cache_clear()


BROKEN = {
    "no JSON": (lambda text: text[:-9], "is broken, it is no JSON"),
    "no text": (lambda text: "", "is broken, it is no JSON"),
    "no object": (lambda text: "[]", "has the format None, not 'flax-attn device, format 1'"),
    "format": (lambda text: text.replace("format 1", "format 2"), "format 2', not"),
    "changed": (lambda text: text.replace("true", "false"), "its digest does not fit"),
    "no digest": (lambda text: text.replace('"digest"', '"other"'), "its digest does not fit"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_device_file_is_refused(name, path):
    change, words = BROKEN[name]
    path.write_text(change(written(path).read_text()))
    with told(ValueError, str(path), words, "`flax-attn check-device --out FOLDER` writes"):
        use_device_file(path)


@pytest.mark.parametrize(
    "name", ["device", "capability", "versions", "rows", "times", "fields of rows"]
)
def test_a_device_file_without_a_field_is_refused(name, path):
    document = json.loads(written(path).read_text())
    document |= {"rows": [{**RIGHT, "times": {"fwd": []}}]} if name == "times" else {}
    document |= {"rows": ["text"]} if name == "fields of rows" else {}
    document.pop(name, None)
    del document["digest"]
    path.write_text(json.dumps({**document, "digest": device_file._digest(document)}))
    with told(ValueError, "a field is missing or wrong"):
        use_device_file(path)


def test_a_missing_device_file_is_refused(path, tmp_path):
    with told(FileNotFoundError, f"There is no device file {path}", "FOLDER/device.json"):
        use_device_file(path)
    with told(ValueError, f"{tmp_path} cannot be read"):
        use_device_file(tmp_path)


# Several processes.


class Service:
    """The store of `jax.distributed`, in which process 1 of two has left a digest, or none."""

    def __init__(self, digest):
        self.digest = digest

    def key_value_set(self, key, value):
        assert key.startswith("flax_attn/device_file/") and key.endswith("/0")
        self.mine = value

    def blocking_key_value_get(self, key, milliseconds):
        if key.endswith("/0"):
            return self.mine
        if self.digest is None:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.digest


def test_processes_of_one_job_have_the_same_file(path, monkeypatch):
    digest = json.loads(written(path).read_text())["digest"]
    state = import_module("jax._src.distributed").global_state
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(state, "client", Service(digest))
    with use_device_file(path):
        pass
    monkeypatch.setattr(state, "client", Service("0" * 64))
    with told(ValueError, "process 1 has the digest 000", str(path), "process 0", digest):
        use_device_file(path)
    monkeypatch.setattr(state, "client", Service(None))
    with told(ValueError, "Process 1 has taken no device file within 300 seconds", str(path)):
        use_device_file(path)
    monkeypatch.setattr(state, "client", None)
    with told(ValueError, "jax.distributed.initialize must come first"):
        use_device_file(path)


PROCESS = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from flax_attn import use_device_file
for path in sys.argv[3:]:
    try:
        use_device_file(path)
        print("taken")
    except ValueError as error:
        print(error)
"""


@pytest.mark.nightly
def test_two_processes_compare_their_files(path, tmp_path):
    other = written(tmp_path / "other.json", SLOWER)
    written(path)
    with socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), *files],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for i, files in enumerate([[path, path], [path, other]])
    ]
    for run in runs:
        first, second = run.communicate(timeout=120)[0].splitlines()
        assert first == "taken" and "must run one program" in second and run.returncode == 0


# How it is written.


class Here:
    """Workers that do the work in this process."""

    def __init__(self, most=1):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, work, item):
        return work(item)

    def map(self, work, items):
        return map(work, items)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Runs the requests of a check in which kernels give what is listed; its folder."""
    monkeypatch.setattr(requests, "Workers", Here)
    monkeypatch.setattr(requests, "FEW", 2)

    def run(timed=None):
        equal = {"verdict": "equal", "share": 0.1, "forward": True, "backward": True}
        rows = [{"kind": KIND, "backend": name, **equal} for name in ("pallas", "blockwise")]
        rows = [{"kind": KIND, "backend": "splash", "verdict": "refuses"}, *rows]
        ended = requests.Failure("it ended")
        monkeypatch.setattr(requests, "_checked", lambda item: ended if item.number else rows)
        of_kernel = [{"kind": KIND, "backend": "pallas", "times": FASTER}]
        monkeypatch.setattr(requests, "_timed", lambda item: timed or of_kernel)
        Part(tmp_path, "machine", 0.0).write(platform="gpu", device=GPU, capability=[9, 0])
        requests.run(Part(tmp_path, "requests", time.time() + 60, small=True))
        command._leave_device_file(tmp_path)
        return tmp_path / command.DEVICE_FILE

    return run


def test_the_device_check_writes_the_device_file(checked):
    file = checked()
    assert sorted(x.name for x in file.parent.iterdir()) == [file.name, *LEFT]
    rows = device_file.read(file).rows
    assert rows[0] == device_file.Row.of(RIGHT) and rows[1].backend == "blockwise"
    drawn = draw_request(1, small=True)
    q, k, v = (drawn.arrays()[x] for x in "qkv")
    ended = device_file.kind_of(Request.of(q, k, v, rules_of(mask=drawn.mask)))
    assert rows[2][:2] == (ended, device_file.ANY) and len(rows) == 3
    with use_device_file(file), on_a_gpu():
        assert found() == ("pallas", "chosen")


def test_a_kernel_that_fails_while_timed_is_not_taken(checked):
    failed = {"kind": KIND, "backend": "pallas", "verdict": "failed", "text": "it broke"}
    with use_device_file(checked([failed])), on_a_gpu():
        assert "was not equal to the formula" in found()[1]


@pytest.mark.nightly
def test_times_are_of_both_passes_beside_blockwise(path):
    rows: Any = requests._timed(requests.Item(1, True, ("pallas", "blockwise"), path))
    for row, name in zip(rows, ("pallas", "blockwise"), strict=True):
        assert row["backend"] == name and row["kind"].startswith("float32, widths 8 and 12")
        assert row["times"].keys() == {"fwd", "fwd+bwd"}
        assert all(x["seconds"] > 0 and len(x["interval"]) == 2 for x in row["times"].values())
    assert all(x["ratio"] == 1 for x in rows[1]["times"].values())
