"""`explain` as a table, and the warning if only a slow backend fits on an accelerator."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Causal,
    Lengths,
    Segments,
    assume_platform,
    attend,
    dot_product_attention,
    explain,
)
from flax_attn.backends import BACKENDS, choice
from flax_attn.backends.choice import Explanation, Verdict, slow_path_message
from flax_attn.rules import Request, Rules
from flax_attn.where import platform_of
from parity_tests.core.backends.refusal import told

LONG = 4096 * 4096


def verdicts(**refusals):
    return Explanation([Verdict(*pair) for pair in refusals.items()] + [Verdict("plain", None)])


@pytest.fixture
def on_a_gpu():
    """As if arrays lay on a GPU, and nothing had been told yet."""
    choice.warn_once.cache_clear()
    with assume_platform("gpu"):
        yield
    choice.warn_once.cache_clear()


def arrays(length=257):
    return [jnp.ones((length, 2, 4))] * 3


def slow():
    return pytest.warns(UserWarning, match="slow on a gpu")


# What is known of the arrays.


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


NUMBER, LENGTHS = shape(dtype=jnp.int32), shape(2, dtype=jnp.int32)
UNKNOWN = {
    "an offset": {"mask": Causal(NUMBER)},
    "lengths": {"mask": Lengths(LENGTHS) & CAUSAL},
    "documents": {"mask": Segments(shape(2, 256, dtype=jnp.int32))},
    "a table": {"mask": shape(2, 1, 256, 256, dtype=bool), "score": Additive(shape(4, 256, 256))},
    "numbers": {"scale": shape(), "sinks": shape(4), "score": Alibi(shape(2, 4))},
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_known_by_its_shape_alone_is_explained_as_it_is_under_jit(what):
    q, asked = shape(2, 256, 4, 16), UNKNOWN[what]
    leaves, structure = jax.tree.flatten(asked)
    traced = []

    def under_jit(*arrays):
        traced.append(explain(q, q, q, **structure.unflatten(arrays)))

    jax.eval_shape(under_jit, *leaves)
    assert str(explain(q, q, q, **asked)) == str(traced[0])


def test_a_shape_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="sinks needs one logit a query head"):
        explain(*[shape(2, 256, 4, 16)] * 3, sinks=shape(3))


# The table.


def test_the_table_has_a_line_a_backend_in_their_order():
    found = explain(*arrays())
    head, *lines = str(found).splitlines()
    assert head.split() == ["backend", "verdict"]
    assert [line.split()[0] for line in lines] == list(BACKENDS)
    for line, verdict in zip(lines, found, strict=True):
        if verdict.refusal is not None:
            assert line.endswith(f"  refuses: {verdict.refusal}")
    assert [line for line in lines if line.endswith("  chosen")] == [
        line for line in lines if line.split()[0] == found.chosen
    ]
    assert repr(found) == str(found)


def test_the_table_marks_backends_that_accept_but_are_not_chosen():
    found = verdicts(a_long_name="no", second=None)
    assert found.chosen == "second"
    assert str(found).splitlines() == [
        "backend      verdict",
        "a_long_name  refuses: no",
        "second       chosen",
        "plain        accepts",
    ]


def test_explain_warns_of_nothing(on_a_gpu):
    explain(*arrays())  # here a warning is an error


@pytest.mark.parametrize(
    "queries, keys, chosen",
    [
        (1, 64, "reference"),
        (1, 65, "blockwise"),
        (3, 192, "reference"),
        (3, 193, "blockwise"),
        (65, 250, "reference"),
        (127, 128, "reference"),
        (128, 128, "blockwise"),
    ],
)
def test_a_few_queries_on_a_long_cache_are_no_small_request(queries, keys, chosen):
    """64 float32 numbers of 2 heads for keys and values are 1 KiB a place."""
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.float32) for n in (queries, keys))
    assert explain(q, k, k).chosen == chosen


# The sentence, as a function of the platform.


def test_a_kernel_that_serves_is_no_slow_path():
    assert slow_path_message("gpu", verdicts(cudnn=None), LONG) is None
    assert slow_path_message("gpu", verdicts(cudnn="no", tokamax=None), LONG) is None
    assert slow_path_message("tpu", verdicts(splash=None), LONG) is None


def test_a_kernel_of_another_platform_still_warns():
    found = slow_path_message("tpu", verdicts(cudnn=None, splash="the mask is an array"), LONG)
    assert found is not None and "'cudnn', slow on a tpu" in found


@pytest.mark.parametrize("platform", ["cpu", "METAL"])
def test_without_kernels_there_is_no_warning(platform):
    assert (
        slow_path_message(platform, verdicts(cudnn="no", tokamax="no", splash="no"), LONG) is None
    )


def test_a_platform_that_is_not_known_has_attention_in_blocks():
    chosen = attend.__wrapped__.__globals__["_choose"]
    request = Request.of(*arrays(), Rules())
    vars(request)["where"] = request.where._replace(platform="METAL")
    assert chosen("auto", request, Rules(scale=1.0), None) == "blockwise"


def test_few_pairs_need_no_kernel():
    found = verdicts(cudnn="no")
    assert slow_path_message("gpu", found, 256 * 256) is None
    assert slow_path_message("gpu", found, 256 * 257) is not None


def test_the_sentence_has_the_reasons_of_this_platforms_kernels():
    refusals = {"cudnn": "needs float16 or bfloat16", "tokamax": "is not installed"}
    found = slow_path_message("gpu", verdicts(**refusals, splash="needs a TPU"), LONG)
    assert found == (
        "attend takes the backend 'plain', slow on a gpu, since no kernel serves the request "
        "(cudnn: needs float16 or bfloat16; tokamax: is not installed); "
        "backend='plain' asks for it without this warning."
    )


# The warning.


def test_a_slow_backend_warns_once_at_the_callers_line(on_a_gpu):
    with slow() as heard:
        attend(*arrays())
    assert len(heard) == 1 and heard[0].filename == __file__
    attend(*arrays())  # here a warning is an error
    attend(*arrays(300))
    jax.jit(attend)(*arrays())


@pytest.mark.nightly
@pytest.mark.parametrize("call", [jax.jit(attend), jax.vmap(attend), dot_product_attention])
def test_a_slow_backend_warns_under_transformations_too(on_a_gpu, call):
    with slow():
        call(*(x[None] for x in arrays()))


@pytest.mark.nightly
def test_no_warning_where_the_backend_was_named_or_is_fast(on_a_gpu):
    attend(*arrays(), backend="reference")  # here a warning is an error
    attend(*arrays(256))


def test_a_slow_backend_warns_again_for_another_reason(on_a_gpu, monkeypatch):
    with slow():
        attend(*arrays())

    def refusal(request, rules):
        return "another reason"

    changed = {**BACKENDS, "cudnn": BACKENDS["cudnn"]._replace(refusal=refusal)}
    monkeypatch.setitem(attend.__wrapped__.__globals__, "BACKENDS", changed)
    with pytest.warns(UserWarning, match="cudnn: another reason"):
        attend(*arrays())


def test_an_error_of_the_request_comes_first(on_a_gpu):
    with told(ValueError, "share length and heads"):
        attend(jnp.ones((400, 2, 4)), jnp.ones((400, 2, 4)), jnp.ones((401, 2, 4)))


# The platform.


def test_a_request_caches_its_placement_and_a_copy_recomputes_it():
    q, k, v = arrays()
    request = Request.of(q, k, v, Rules())
    assert request.where is request.where and request.where[::2] == (None, "cpu")
    assert len(jax.tree.leaves(request)) == 3
    mesh = jax.make_mesh((1,), ("x",))  # Explicit axes are part of a type, on one device too
    with assume_platform("tpu"), jax.set_mesh(mesh):
        spread = jax.device_put((q, k, v), jax.NamedSharding(mesh, jax.P()))
        moved = replace(request, q=spread[0], k=spread[1], v=spread[2])
        assert moved.where[::2] == ("explicit", "tpu") and moved.where.mesh.axis_names == ("x",)
        heard = []
        inside = lambda request: heard.append(request.where) or request.q  # noqa: E731
        jax.jit(inside)(moved)
        jax.jit(jax.shard_map(inside, in_specs=jax.P(), out_specs=jax.P()))(moved)
        assert [where[::2] for where in heard] == [("explicit", "tpu"), (None, "tpu")]
    jax.jit(inside)(request)
    assert request.where[::2] == heard[-1][::2] == (None, "cpu")


def test_the_platform_of_an_array_is_where_it_lies():
    cpu = jax.devices("cpu")[0]
    x = jax.device_put(jnp.ones(3), cpu)
    assert platform_of(x) == "cpu"
    heard = []
    jax.jit(lambda x: heard.append(platform_of(x)))(x)
    for device in (cpu, "cpu"):
        with jax.default_device(device):
            jax.jit(lambda x: heard.append(platform_of(x)))(x)
    assert heard == [jax.default_backend(), "cpu", "cpu"]
