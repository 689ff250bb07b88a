"""Torch runs lifted to float64: no float32 inside, the same function, and torch is restored."""

import re
import sys

import numpy as np
import pytest

from flax_attn.parity import compare, judge
from flax_attn.parity.sides.torch.dispatch import dispatch_mode
from flax_attn.parity.sides.torch.float64 import lifted
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="torch is lifted")

HERE = __file__.rpartition("/")[2]


def ones(**sizes):
    return sizes | dict(attn_implementation="eager", vocab_size=50)


LLAMA = ones(
    **dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, head_dim=4),
    **dict(num_attention_heads=6, num_key_value_heads=3, pad_token_id=0),
)
MODELS = {  # with the lines that ask for float32
    "LlamaModel": (
        LLAMA,
        {"modeling_llama.py float", "modeling_llama.py to", "modeling_llama.py softmax"},
    ),
    "T5EncoderModel": (
        ones(d_model=24, d_kv=5, d_ff=20, num_layers=2, num_heads=3),
        {"modeling_t5.py to", "modeling_t5.py float"},
    ),
    "GPT2Model": (
        ones(n_embd=24, n_layer=2, n_head=3, n_positions=16, bos_token_id=1, eos_token_id=2),
        set(),
    ),
    "BertModel": (
        ones(
            **dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3),
            **dict(intermediate_size=20, max_position_embeddings=16),
        ),
        set(),
    ),
}


def outcome(model):
    """The last hidden state and all gradients, as numpy arrays."""
    random = np.random.RandomState(7)
    ids, mask = torch.tensor(random.randint(3, 50, (3, 7))), torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    out = model(input_ids=ids, attention_mask=mask).last_hidden_state
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(
        out, params, torch.tensor(random.standard_normal(out.shape)), allow_unused=True
    )
    used = [g.numpy().ravel() for g in grads if g is not None]
    return out.detach().numpy(), np.concatenate(used)


def watch():
    """A mode that notes every narrow floating result, as a recorder around or inside would."""

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen, self.narrow = 0, []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.seen += 1
            for x in out if isinstance(out, tuple | list) else (out,):
                if torch.is_tensor(x) and x.dtype in (torch.float32, torch.complex64):
                    self.narrow.append(str(func))
            return out

    return Watch()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", with_nightly(MODELS, commit=4))
def test_a_lifted_model_is_the_float64_function(name, monkeypatch):
    transformers = pytest.importorskip("transformers")
    sizes, asked = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes)).double().eval()
    plain = outcome(model)
    inside, around = watch(), watch()
    with lifted() as notes, inside:
        got = outcome(model)
    with around, lifted() as again:
        other = outcome(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        truth = outcome(model)
    for a, b, c, d in zip(got, truth, other, plain, strict=True):
        assert judge.same_function(a, b).ok and judge.exact(a, c).ok
        assert judge.same_function(d, b).ok is not bool(asked)
    assert inside.seen and inside.narrow == [] and around.narrow == []
    assert notes == again and len(set(notes)) == len(notes)
    assert {re.sub(r":\d+", "", note.partition(" in ")[0]) for note in notes} == asked
    assert all(note.endswith(" in float32: lifted to float64") for note in notes)


def test_the_norm_of_llama_is_computed_in_float64():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    random = np.random.RandomState(1)
    x, gain = random.standard_normal((3, 5, 8)) / 100, random.standard_normal(8)
    norm = llama.LlamaRMSNorm(8).double()
    norm.weight.data.copy_(torch.tensor(gain))
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.variance_epsilon) * gain
    assert not judge.same_function(norm(torch.tensor(x)).detach().numpy(), want).ok
    with lifted():
        got = norm(torch.tensor(x)).detach().numpy()
    assert judge.same_function(got, want).ok


ASKED = {
    "float": lambda t, x: x.float(),
    "to": lambda t, x: x.to(t.float32),
    "to another": lambda t, x: x.to(t.ones(1, dtype=t.float32)),
    "type": lambda t, x: x.type(t.FloatTensor),
    "type_as": lambda t, x: x.type_as(t.zeros(1, dtype=t.float32)),
    "softmax": lambda t, x: t.softmax(x, -1, dtype=t.float32),
    "nn.softmax": lambda t, x: t.nn.functional.softmax(x, dim=-1, dtype=t.float32),
    "log_softmax": lambda t, x: t.nn.functional.log_softmax(x, dim=-1, dtype=t.float32),
    "sum": lambda t, x: x.sum(-1, dtype=t.float32),
    "mean": lambda t, x: x.mean(dtype=t.float32),
    "cumsum": lambda t, x: x.cumsum(-1, dtype=t.float32),
    "arange": lambda t, x: x + t.arange(0, 0.5, 0.1, dtype=t.float32),
    "arange, ints": lambda t, x: x + t.arange(5).float() / 3,
    "linspace": lambda t, x: x + t.linspace(0, 1, 5, dtype=t.float32),
    "full": lambda t, x: x * t.full((5,), 0.1, dtype=t.float32),
    "zeros": lambda t, x: t.zeros(3, 5, dtype=t.float32).copy_(x),
    "new": lambda t, x: x * x.new_full((5,), 0.1, dtype=t.float32),
    "tensor": lambda t, x: x * t.tensor(0.1, dtype=t.float32),
    "tensor, default": lambda t, x: x * t.tensor(0.1),
    "ints divided": lambda t, x: x * (t.arange(5) / 3),
    "complex": lambda t, x: t.view_as_real(x.to(t.complex64) * t.exp(t.tensor(0.1j))),
}


@pytest.mark.parametrize("inference", [False, True])  # there, casts reach modes undecomposed
@pytest.mark.parametrize("f", ASKED.values(), ids=ASKED)
def test_casts_to_float32_become_float64(f, inference, monkeypatch):
    x = torch.tensor(np.random.RandomState(2).standard_normal((3, 5)))
    with torch.inference_mode(inference), lifted():
        got = f(torch, x)
    for narrow, wide in dict(float32="float64", complex64="complex128").items():
        monkeypatch.setattr(torch, narrow, getattr(torch, wide))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "FloatTensor", torch.DoubleTensor)
    torch.set_default_dtype(torch.float64)
    try:
        want = f(torch, x)
    finally:
        monkeypatch.undo()
        torch.set_default_dtype(torch.float32)
    assert judge.exact(got.numpy(), want.numpy()).ok


ROUNDS = {  # each rounds float64 once, in the dtype that it is called by
    "bfloat16": lambda t, x: x.bfloat16(),
    "float16": lambda t, x: x.to(t.float16),
    "float16, half": lambda t, x: x.half(),
    "bfloat16, type": lambda t, x: x.type(t.BFloat16Tensor),
    "bfloat16, zeros": lambda t, x: t.zeros(3, 5, dtype=t.bfloat16).copy_(x),
    "bfloat16, tensor": lambda t, x: t.tensor(x.tolist(), dtype=t.bfloat16),
    "bfloat16, after float32": lambda t, x: x.float().bfloat16(),
}


@pytest.mark.nightly
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ROUNDS)
def test_casts_to_16_bits_round_and_are_reported(name, inference, wide):
    x, dtype = np.random.RandomState(2).standard_normal((3, 5)), name.partition(",")[0]
    with torch.inference_mode(inference), lifted() as notes:
        got = ROUNDS[name](torch, torch.tensor(x))
        got = got.float() if wide else got
    assert str(got.dtype) == ("torch.float64" if wide else f"torch.{dtype}")
    assert judge.exact(got.double().numpy(), x.astype(dtype).astype("float64")).ok
    told = [note for note in notes if "torch's own rounding" in note]
    assert told and all(note.startswith(f"{HERE}:") and dtype in note for note in told)
    with torch.inference_mode(inference), lifted(all_narrow=True) as notes:
        got = ROUNDS[name](torch, torch.tensor(x))
    assert judge.exact(got.numpy(), x).ok
    assert told == [note for note in notes if "torch's own rounding" in note]


def test_gradients_behind_a_rounding_are_told_by_the_line_that_rounds():
    x = torch.tensor([1.0, 2.5], dtype=torch.float64, requires_grad=True)
    with lifted() as notes:
        y = (x / 3).bfloat16() * 3.0  # the line
        (grad,) = torch.autograd.grad(y.double().sum(), x)
    line = test_gradients_behind_a_rounding_are_told_by_the_line_that_rounds.__code__
    assert grad.dtype == torch.float64
    assert {note.partition(" ")[0] for note in notes} == {f"{HERE}:{line.co_firstlineno + 3}"}


def test_a_lifted_cast_copies_and_a_bit_view_keeps_its_dtype():
    x = torch.ones(3, dtype=torch.float64)
    with lifted():
        y = x.float()
        y += 1
        bits = torch.ones(2, dtype=torch.int32).view(torch.float32)
    assert x.tolist() == [1, 1, 1] and y.tolist() == [2, 2, 2]
    assert bits.dtype == torch.float32


def test_gradients_pass_lifted_casts_and_handwritten_backwards():

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x.float() ** 3).to(x.dtype)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return (3 * x.float() ** 2 * g.float()).to(g.dtype)

    x = torch.tensor(np.random.RandomState(4).standard_normal(7), requires_grad=True)
    with lifted() as notes:
        y = Cube.apply(x.to(torch.float32)).double()
        (grad,) = torch.autograd.grad(y.sum(), x)
    want = 3 * x.detach().numpy() ** 2
    assert judge.same_function(grad.numpy(), want).ok
    assert len(notes) == 3 and all(note.startswith(f"{HERE}:") for note in notes)


def test_operations_on_arrays_narrowed_before_the_lift_are_reported():
    constant, x = torch.full((3,), 0.1), torch.ones(3, dtype=torch.float64)
    with lifted() as notes:
        x * constant  # wide enough
        constant * constant  # not
        constant[None].reshape(3, 1).expand(3, 2).split(2)  # computes nothing
    line = (
        test_operations_on_arrays_narrowed_before_the_lift_are_reported.__code__.co_firstlineno + 4
    )
    said = "mul in float32: left so, since what it is computed from is"
    assert notes == [f"{HERE}:{line} {said}"]


@pytest.mark.parametrize("default", ["float32", "bfloat16"])
def test_the_lift_restores_torch(default):
    x = torch.ones(3, dtype=torch.float64)
    torch.set_default_dtype(getattr(torch, default))
    try:
        with pytest.raises(KeyError), lifted():
            raise KeyError
        assert torch.get_default_dtype() == getattr(torch, default)
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.float().dtype == torch.zeros(2).dtype == torch.float32


class Alibi(torch.nn.Module):
    """Falcon's way: a bias rounded to bfloat16, whatever the model's dtype."""

    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(6, 6)

    def forward(self, x):
        slopes = torch.pow(torch.tensor(2**-0.5, dtype=torch.float32), torch.arange(1, 6))
        bias = (slopes[:, None].bfloat16() * torch.arange(6)).to(x.dtype)
        return torch.softmax((self.q(x) + bias).float(), -1).to(x.dtype)


def alibi_port(rounds):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    class Port(nnx.Module):
        def __init__(self):
            self.q = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            slopes = jnp.asarray(2.0**-0.5, x.dtype) ** jnp.arange(1, 6).astype(x.dtype)
            narrow = jnp.bfloat16 if rounds else x.dtype
            bias = slopes[:, None].astype(narrow) * jnp.arange(6)[None].astype(narrow)
            return jax.nn.softmax(self.q(x) + bias.astype(x.dtype)[None])

    return Port()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_port_that_rounds_as_torch_does_is_right_and_one_that_does_not_is_wrong(dtype):
    x = np.random.RandomState(3).standard_normal((2, 5, 6))
    options = dict(dtypes=(dtype,), eager=False)
    report = compare(Alibi(), alibi_port(True), x, **options)
    assert report.ok, report
    line = Alibi.forward.__code__.co_firstlineno + 2
    told = f"{HERE}:{line} bfloat16 in bfloat16: torch's own rounding"
    assert any(note.startswith(told) for note in report.notes), report.notes
    assert sum(note.startswith(f"{HERE}:{line} bfloat16") for note in report.notes) == 1
    wrong = compare(Alibi(), alibi_port(False), x, **options)
    if dtype == "float64":
        assert not wrong.ok
    elif dtype == "float32":  # torch's own error is that of its rounding
        assert wrong.ratio(dtype) < 0.3


def test_the_lift_does_not_import_the_torch_compiler(monkeypatch):
    """Which torch imports for a mode that says nothing of it: seconds in each process."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    names = []

    def heard(func, args, kwargs):
        names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs)

    with dispatch_mode(heard):
        total = torch.ones(3) + torch.ones(3)
    assert "add" in names and total.tolist() == [2.0] * 3
    assert "torch._dynamo" not in sys.modules
