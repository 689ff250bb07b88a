"""Two JAX sides: mistakes are found, rewrites pass, and an empty proof says so."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Recording, Report, assert_parity, compare, record

from ...faults.subjects.jax_attentions import dropped, formula, inputs, online
from ...faults.subjects.jax_functions import TOKENS, Block, Rewritten, block
from ...tables import each, with_nightly
from .schema import validated

X = inputs()
QUICK = {"dtypes": ("float64",), "eager": False}


@pytest.fixture(autouse=True)
def as_people_write():
    with jax.numpy_rank_promotion("allow"):  # strict elsewhere in these tests
        yield


def judged(first, second, given, **options) -> Report:
    return validated(compare(first, second, *given, eager=False, **options))


def nothing(x):
    return jnp.zeros_like(x)


def one_number(x):
    return jnp.broadcast_to(x.sum() * 0 + 3, x.shape)


def not_numbers(x):
    return jnp.sqrt(-1 - x * x)


@pytest.mark.nightly
@each("alike", [nothing, one_number, not_numbers])
def test_outputs_that_do_not_depend_on_the_computation_prove_nothing(alike):
    report = compare(alike, lambda x: alike(x), np.arange(6.0).reshape(2, 3), eager=False)
    assert report.verdict == "nothing is proven" and not report.ok, str(report)
    assert "proves nothing" in str(report), str(report)


def test_one_constant_among_outputs_hides_no_difference():
    first = lambda x: (jnp.zeros(3), x * 2)  # noqa: E731
    second = lambda x: (jnp.zeros(3), x * 3)  # noqa: E731
    assert compare(first, first, X[0], **QUICK).ok
    assert not compare(first, second, X[0], **QUICK).ok


@pytest.mark.nightly
def test_weights_go_by_path_between_modules_of_one_tree():
    report = judged(block(), block(Rewritten), TOKENS, dtypes=("float64",))
    assert report.ok and report.params == 6, str(report)
    wrong = block(Rewritten)
    wrong.down = nnx.Linear(9, 7, rngs=nnx.Rngs(0))
    with pytest.raises(ParityError, match=r"down.kernel is \[9, 6\] in the first, \[9, 7\]"):
        compare(block(), wrong, *TOKENS)


@pytest.mark.nightly
def test_as_is_compares_each_module_with_its_own_weights():
    other = Block(rngs=nnx.Rngs(5))
    assert not compare(block(), other, *TOKENS, weights="as_is", **QUICK).ok
    assert compare(block(), block(), *TOKENS, weights="as_is", **QUICK).ok
    assert compare(block(), other, *TOKENS, weights="given", **QUICK).ok


@pytest.mark.nightly
def test_a_function_has_no_weights_to_carry():
    with pytest.raises(ValueError, match=r"between two nnx modules.*got .given."):
        compare(formula, online, *X, weights="given")
    module, graph = block(), nnx.split(block())
    function = lambda x: nnx.merge(*graph)(x)  # noqa: E731
    assert compare(module, function, *TOKENS, **QUICK).ok


@pytest.mark.nightly
def test_a_random_function_is_compared_on_one_draw_and_the_report_says_so():
    def otherwise(q, k, v, seen, bias, key):
        return dropped(q, k, v, seen, bias, jax.random.fold_in(key, 1))

    report = judged(dropped, otherwise, [*X, jax.random.key(0)], dtypes=("float64",))
    assert not report.ok and any("draws random numbers" in x for x in report.notes), str(report)

    def flat(key, share, shape):  # the same numbers, drawn in another shape
        return jax.random.bernoulli(key, share, (int(np.prod(shape)),)).reshape(shape)

    def drawn_flat(*given):
        return dropped(*given, draw=flat)

    same = judged(dropped, drawn_flat, [*X, jax.random.key(0)], dtypes=("float32", "bfloat16"))
    assert same.ok and any("draws random numbers" in x for x in same.notes), str(same)


@pytest.mark.nightly
def test_modules_in_train_mode_drop_the_same_places():
    report = judged(
        block(rate=0.3), Block(rate=0.3, rngs=nnx.Rngs(9)), TOKENS, dtypes=("float64",), train=True
    )
    assert report.ok, str(report)
    other = Block(rate=0.4, rngs=nnx.Rngs(9))
    report = judged(block(rate=0.3), other, TOKENS, dtypes=("float64",), train=True)
    assert not report.ok and "0.6" in str(report) and "torch" not in str(report), str(report)


class Shifted(Block):
    """Its norm has another epsilon, and so much dropout that a rounding may not hide it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm.epsilon = 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("train", [False, True])
def test_a_wrong_step_of_a_module_is_placed(train):
    first, wrong = block(rate=0.3), Shifted(rate=0.3, rngs=nnx.Rngs(9))
    report = judged(first, wrong, TOKENS, dtypes=("float64",), train=train)
    assert not report.ok and report.first is not None and report.first.tap == "norm", str(report)
    assert "diagnosis itself failed" not in str(report), str(report)
    right = judged(block(rate=0.3), Rewritten(rate=0.3, rngs=nnx.Rngs(9)), TOKENS, train=train)
    assert right.certain, str(right)


@pytest.mark.nightly
def test_functions_draw_by_themselves_also_in_train_mode():
    def otherwise(q, k, v, seen, bias, key):
        return dropped(q, k, v, seen, bias, jax.random.fold_in(key, 1))

    given = [*X, jax.random.key(0)]
    assert not judged(dropped, otherwise, given, dtypes=("float64",), train=True).ok
    assert judged(dropped, dropped, given, dtypes=("float64",), train=True).ok


def test_what_cannot_be_traced_in_float64_is_compared_in_the_others():
    def single_only(q, k, v, seen, bias):
        assert q.dtype != np.float64, "written for float32"
        return formula(q, k, v, seen, bias)

    report = judged(formula, single_only, X, dtypes=("float64", "float32"))
    assert report.ok and {row.dtype for row in report.rows} == {"float32"}, str(report)
    assert any(n.startswith("not compared in float64") for n in report.notes), report.notes
    report = judged(single_only, online, X, dtypes=("float64", "float32"))
    assert report.ok, str(report)
    with pytest.raises(ParityError, match=r"cannot be traced in float64.*written for float32"):
        compare(formula, single_only, *X, **QUICK)


def scaled(function, *given):
    return 2 * function(*given)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_recording_can_be_the_first_side(kind, tmp_path):
    first, second, given = formula, online, X
    if kind == "module":
        first, second, given = block(), block(Rewritten), TOKENS
    file = record(first, given, tmp_path / "first.safetensors", dtypes=("float64", "float32"))
    report = validated(compare(Recording(file), second, eager=False))
    assert report.ok and "jax of the record" in report.versions, str(report)
    report = compare(Recording(file), second, eager=False, flax_call=scaled)
    assert not report.ok and report.first.tap == "output", str(report)


@pytest.mark.nightly
def test_the_report_uses_the_names_of_both_sides():
    report = compare(formula, online, X[0], *(2 * x for x in X[1:3]), *X[3:], **QUICK)
    assert report.title == "online against formula" and report.sides == ("formula", "online")
    report = compare(formula, lambda *x: 2 * formula(*x), *X, **QUICK)
    assert report.first is not None
    words = "another scale: twice the matrix product, where formula has it as it is"
    assert re.sub(r" \([\w.]+:\d+\)", "", report.first.hint) == words  # without its line
    assert "the second" in str(report) and report.to_dict()["sides"] == ("formula", "the second")
    same = compare(formula, replace_name(formula), *X, **QUICK)
    assert same.sides == ("formula (first)", "formula (second)")


def replace_name(function):
    def formula(*x):
        return function(*x)

    return formula


@each(
    "first, second, words",
    [
        (Block, block(), "the class Block.*Build it first"),
        (block(), Block, "the class Block"),
        (3, formula, "got int and function"),
        (formula, None, "got function and NoneType"),
    ],
)
def test_objects_that_cannot_be_compared_are_refused(first, second, words):
    with pytest.raises(TypeError, match=words):
        compare(first, second, *X)


def test_options_of_torch_are_refused():
    with pytest.raises(ParityError, match="two JAX sides would take the same steps"):
        compare(block(), block(), *TOKENS, optimizer=("sgd", {"lr": 0.1}))
    from flax_attn.parity import Rule

    with pytest.raises(ParityError, match="exchange weights by equal paths"):
        compare(block(), block(), *TOKENS, rules=[Rule("a -> b")])


@pytest.mark.nightly
def test_assert_parity_raises_with_the_report():
    assert assert_parity(formula, online, *X, **QUICK).ok
    with pytest.raises(ParityError) as caught:
        assert_parity(formula, lambda *x: -formula(*x), *X, **QUICK)
    assert isinstance(caught.value.report, Report)


@pytest.mark.nightly
def test_jax_arrays_and_containers_are_inputs():
    def of_dict(parts, seen, scale):
        return {"out": formula(*parts["qkv"], seen, parts["bias"]) * scale, "n": parts["n"] + 1}

    parts = {"qkv": tuple(map(jnp.asarray, X[:3])), "bias": X[4], "n": np.int32(3)}
    report = judged(of_dict, jax.jit(of_dict), [parts, jnp.asarray(X[3]), 0.5])
    names = {row.name for row in report.rows}
    assert report.ok and {"output.out", "output.n", "input 0.qkv[1]"} <= names, sorted(names)


@pytest.mark.nightly
def test_noise_is_that_of_the_first_side():
    report = compare(formula, online, *X, dtypes=("float64",), eager=False, noise=True)
    noises = [row.verdict.noise for row in report.rows if row.kind in ("output", "gradient")]
    assert noises and all(x is not None and 1e-17 < x < 1e-14 for x in noises), noises
    assert "formula's own rounding noise" in report.text(full=True)


def convolved(x):
    numbers = ("NWC", "WIO", "NWC")
    kernel = jnp.cos(jnp.arange(3.0 * 6 * 4)).reshape(3, 6, 4).astype(x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (2,), [(1, 0)], dimension_numbers=numbers)


OPERATIONS = {
    "a loop": lambda x: jax.lax.scan(lambda c, t: (jnp.tanh(c + t), c * t), x[0], x)[1],
    "a convolution": convolved,
    "a lookup": lambda x: jnp.take(x[0], jnp.array([[1, 0], [7, 3]]), axis=0, mode="clip"),
    "products of one": lambda x: jnp.einsum("btd,bsd->bts", x, x) @ x,
    "a norm": lambda x: x / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3) * jax.nn.softmax(x, 1),
    "sums and orders": lambda x: jax.lax.cumsum(x, 1, reverse=True) * jnp.sort(x, 1),
    "a part written": lambda x: jax.lax.dynamic_update_slice(x, 3 * x[:, :2], (0, 4, 0)),
}


@pytest.mark.parametrize("name", with_nightly(OPERATIONS, commit=["a norm"]))
def test_a_mistake_around_any_operation_is_named(name):
    operation = OPERATIONS[name]
    x = np.random.default_rng(3).normal(size=(3, 8, 6))
    twice = compare(operation, lambda x: 2 * operation(x), x, **QUICK).first
    assert twice is not None and "twice" in twice.hint, twice
    turned = lambda x: operation(2 * jax.lax.stop_gradient(x) - x)  # noqa: E731
    assert "a gradient times -1 " in compare(operation, turned, x, **QUICK).first.hint
