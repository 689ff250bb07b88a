# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. Many heads
#
# The softmax gives each token one row of weights that adds up to one. Whoever listens closely to
# one word has little attention left for another. The remedy is simple: several heads side by
# side, each with its own queries, keys and values.
#
# At the end of this chapter you will understand
#
# * several heads as a loop, and the same heads as one set of wide matrices cut in pieces;
# * what happens to the axes on the way, worked by hand on a tensor small enough to read;
# * why `reshape` alone does not cut heads, and how it lets the future in;
# * four ways to write multi-head attention, and a proof that they are one function;
# * where the parameters of GPT-2 are, from its smallest size to its largest.

# %%
import importlib.util
import math
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from flax_attn import (
    CAUSAL,
    MultiHeadAttention,
    MultiHeadAttentionCombined,
    MultiHeadAttentionEinsum,
    MultiHeadAttentionWrapper,
    attention_weights,
)
from flax_attn.parity import Rule, compare, judge, port

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch

    import torch_ref.multi_head
    import torch_ref.multi_head_wrapper

print("compared with", "PyTorch, live" if HAS_TORCH else "numbers that PyTorch printed once")

# %%
jax.config.update("jax_default_matmul_precision", "float32")  # all digits, on every device
np.set_printoptions(precision=4, suppress=True, linewidth=100)
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.titlesize": 10})

WORDS = ["Your", "journey", "starts", "with", "one", "step"]
x = jnp.asarray(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)  # T D
batch = jnp.stack([x, x])  # B T D


def heat(ax, table, title, rows=WORDS, columns=WORDS, cmap="Blues", least=0.0, most=1.0):
    table = np.asarray(table)
    digits = 2 if table.dtype.kind == "f" else 0
    image = ax.imshow(table, cmap=cmap, vmin=least, vmax=most)
    ax.set_title(title)
    ax.set_xticks(range(table.shape[1]), columns, rotation=40)
    ax.set_yticks(range(table.shape[0]), rows)
    for (t, s), number in np.ndenumerate(table):
        dark = abs(image.norm(number) - (least < 0) / 2) > 0.6 / (1 + (least < 0))
        color = "white" if dark else "black"
        ax.text(s, t, f"{number:.{digits}f}", ha="center", va="center", color=color)


# %% [markdown]
# ## Heads side by side
#
# Each head $n$ is a causal attention as in chapter 3, with weights of its own. Their context
# vectors are laid end to end:
#
# $$\mathrm{head}_n(x) = \mathrm{softmax}\!\left(\frac{Q_n K_n^\top}{\sqrt{H}} + M\right) V_n,
# \qquad
# c = \big[\,\mathrm{head}_1(x)\;\big|\;\dots\;\big|\;\mathrm{head}_N(x)\,\big],$$
#
# where $M$ is $-\infty$ above the diagonal and 0 elsewhere, and $H$ is the width of one head. As
# code, a loop:


# %%
def head(x, W_query, W_key, W_value):
    q, k, v = x @ W_query, x @ W_key, x @ W_value  # T H each
    scores = q @ k.T / q.shape[-1] ** 0.5  # T T
    later = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)  # T T
    return jax.nn.softmax(jnp.where(later, -jnp.inf, scores), axis=-1) @ v  # T H


def side_by_side(x, heads):
    return jnp.concatenate([head(x, *weights) for weights in heads], axis=-1)  # T (N H)


# %% [markdown]
# Two heads of width 2, with the numbers that torch draws under seed 123. The library calls this
# `MultiHeadAttentionWrapper`; its table is the one torch prints.

# %%
DRAWN = [  # per head W_query, W_key, W_value as torch keeps them: (d_out, d_in)
    [
        [[-0.23542964, 0.01912448, -0.28674594], [0.21772662, -0.49193421, 0.42322308]],
        [[-0.41964141, -0.45901766, -0.36482018], [0.26147819, -0.21332639, 0.21605217]],
        [[-0.49001414, -0.35029206, -0.21198919], [-0.11346072, -0.44043937, 0.37804362]],
    ],
    [
        [[-0.13615717, 0.18532233, 0.40826949], [0.10756382, 0.15787685, 0.55729234]],
        [[-0.26039040, 0.18287641, -0.25687245], [0.41260317, 0.46110451, -0.53230095]],
        [[0.49285263, 0.27569306, 0.25159022], [0.23768058, 0.47995073, -0.07623307]],
    ],
]
NAMES = ("W_query", "W_key", "W_value")
heads = [[jnp.asarray(weight).T for weight in three] for three in DRAWN]  # d_in H each

wrapper = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
for part, three in zip(wrapper.heads, heads, strict=True):
    for name, weight in zip(NAMES, three, strict=True):
        getattr(part, name).kernel[...] = weight

np.testing.assert_allclose(wrapper(x), side_by_side(x, heads), rtol=1e-5)
printed = [
    [-0.4519, 0.2216, 0.4772, 0.1063],
    [-0.5874, 0.0058, 0.5891, 0.3257],
    [-0.6300, -0.0632, 0.6202, 0.3860],
    [-0.5675, -0.0843, 0.5478, 0.3589],
    [-0.5526, -0.0981, 0.5321, 0.3428],
    [-0.5299, -0.1081, 0.5077, 0.3493],
]
assert judge.printed(wrapper(batch), [printed, printed])
print(wrapper(x))

if HAS_TORCH:
    torch.manual_seed(123)
    twin = torch_ref.multi_head_wrapper.MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2)
    ported = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(1))
    port(twin, ported)
    assert judge.printed(ported(batch), [printed, printed])
    report = compare(twin, ported, np.asarray(batch), dtypes=("float64",), jit=False)
    assert report.ok, report

# %% [markdown]
# Four columns: two numbers from each of *two heads*. The source says "because of two batches";
# the batch has its own axis and never touches the columns. Five sentences and three heads show
# it.

# %%
three = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=3, rngs=nnx.Rngs(0))
five = jnp.stack([x] * 5)
print("5 sentences, 2 heads:", wrapper(five).shape)
print("2 sentences, 3 heads:", three(batch).shape)
assert wrapper(five).shape == (5, 6, 4) and three(batch).shape == (2, 6, 6)

# %% [markdown]
# What do the two heads look at? Random weights have mild opinions, so for the picture all scores
# are multiplied by 20, as training might do in time. *Step* then listens most to *journey* and
# *starts* in one head, and most to *one* in the other. Each head has a full row to spend.

# %%
q, k = (jnp.stack([x @ three[i] for three in heads], axis=1) for i in (0, 1))  # T N H each
weights = attention_weights(q, k, mask=CAUSAL, scale=20 / 2**0.5)  # N T T
np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-5)
assert int(weights[0, 5].argmax()) in (1, 2) and int(weights[1, 5].argmax()) == 4

fig, axes = plt.subplots(1, 2, figsize=(8, 3.7), layout="constrained")
for n, ax in enumerate(axes):
    heat(ax, weights[n], f"weights of head {n + 1}, sharpened")
plt.show()

# %% [markdown]
# ## One wide matrix, cut in pieces
#
# Two heads mean six small products. But $x W_1$ and $x W_2$ read the same $x$, so lay the
# matrices side by side and multiply once:
#
# $$x\,[\,W_1 \mid W_2\,] = [\,x W_1 \mid x W_2\,].$$
#
# Columns belong to heads. This is the **weight split**: three wide products, whatever the number
# of heads, and the result is cut.

# %%
W_query, W_key, W_value = (jnp.concatenate(pair, axis=1) for pair in zip(*heads, strict=True))
wide = x @ W_query  # T (N H)

for n in range(2):
    np.testing.assert_allclose(wide[:, 2 * n : 2 * n + 2], x @ heads[n][0], rtol=1e-5)

fig, axes = plt.subplots(1, 3, figsize=(9, 3.6), layout="constrained")
look = {"cmap": "RdBu_r", "least": -1.0, "most": 1.0}
heat(axes[0], x, "x", columns=["0", "1", "2"], **look)
labels = ["1", "1", "2", "2"]
heat(axes[1], W_query, "[W_query of 1 | of 2]", ["0", "1", "2"], labels, **look)
heat(axes[2], wide, "their product: all queries", columns=labels, **look)
for ax in axes[1:]:
    ax.axvline(1.5, color="black", lw=2)
    ax.set_xlabel("head")
plt.show()

# %% [markdown]
# To cut, give the columns two axes, $N$ heads and $H$ numbers, and bring the heads before the
# tokens. Then every head is a matrix of its own, and `@` works on all of them at once, as it
# does on the sentences of a batch.
#
# $$(T,\; N H) \;\xrightarrow{\text{reshape}}\; (T, N, H) \;\xrightarrow{\text{swap}}\; (N, T, H)$$

# %%
queries = jnp.swapaxes(wide.reshape(6, 2, 2), 0, 1)  # N T H
for n in range(2):
    np.testing.assert_allclose(queries[n], x @ heads[n][0], rtol=1e-5)
print(queries.shape)

# %% [markdown]
# ### A head-split tensor by hand
#
# One sentence, two heads, three tokens, four numbers: `(1, 2, 3, 4)`. Multiplied with itself,
# the last two axes swapped, it gives a table of scores per head, `(1, 2, 3, 3)`. The axes before
# them are only carried along, as a loop would.

# %%
a = jnp.asarray(
    [
        [
            [
                [0.2745, 0.6584, 0.2775, 0.8573],
                [0.8993, 0.0390, 0.9268, 0.7388],
                [0.7179, 0.7058, 0.9156, 0.4340],
            ],
            [
                [0.0772, 0.3565, 0.1479, 0.5331],
                [0.4066, 0.2318, 0.4545, 0.9737],
                [0.4606, 0.5159, 0.4220, 0.5786],
            ],
        ]
    ]
)  # B N T H
at_once = a @ jnp.swapaxes(a, -2, -1)  # B N T T
by_loop = jnp.stack([a[0, n] @ a[0, n].T for n in range(2)])  # N T T

np.testing.assert_allclose(at_once[0], by_loop, rtol=1e-6)
first = [[1.3208, 1.1631, 1.2879], [1.1631, 2.2150, 1.8424], [1.2879, 1.8424, 2.0402]]
second = [[0.4391, 0.7003, 0.5903], [0.7003, 1.3737, 1.0620], [0.5903, 1.0620, 0.9912]]
assert np.allclose(at_once, [[first, second]], atol=2e-4)  # from inputs of four decimals

by_hand = sum(float(a[0, 0, 0, h] * a[0, 0, 1, h]) for h in range(4))
print(f"head 1, tokens 1 and 2: {by_hand:.4f}")
print(at_once)

# %% [markdown]
# ### Reshape alone is not enough
#
# `wide.reshape(N, T, H)` has the right shape too, without any swap. It is wrong, and nothing
# complains. A reshape never moves numbers: it deals them out in the order in which they lie,
# token after token. Let each number say which token it comes from:

# %%
origin = jnp.repeat(jnp.arange(1, 7)[:, None], 4, axis=1)  # T (N H): token 1 to 6
right = jnp.swapaxes(origin.reshape(6, 2, 2), 0, 1)  # N T H
wrong = origin.reshape(2, 6, 2)  # the same shape
assert right.shape == wrong.shape

places = [f"place {t}" for t in range(1, 7)]
fig, axes = plt.subplots(1, 4, figsize=(9, 3.6), layout="constrained")
for ax, table, title in zip(
    axes,
    (*right, *wrong),
    ("swapped: head 1", "swapped: head 2", "reshaped: head 1", "reshaped: head 2"),
    strict=True,
):
    heat(ax, table, title, places, ["", ""], "viridis_r", least=1, most=9)
plt.show()

# %% [markdown]
# In the wrong one the "second head" begins with token 4. So the mask covers the wrong cells, and
# the first context vector depends on tokens four and up. The gradient tells:


# %%
def attention_of_heads(cut):
    def run(x):
        q, k, v = (cut(x @ W) for W in (W_query, W_key, W_value))  # N T H
        scores = q @ k.mT / 2**0.5  # N T T
        later = jnp.triu(jnp.ones((6, 6), dtype=bool), k=1)  # T T
        weights = jax.nn.softmax(jnp.where(later, -jnp.inf, scores), axis=-1)  # N T T
        return jnp.swapaxes(weights @ v, 0, 1).reshape(6, 4)  # T (N H)

    return run


swapped = attention_of_heads(lambda y: jnp.swapaxes(y.reshape(6, 2, 2), 0, 1))
reshaped = attention_of_heads(lambda y: y.reshape(2, 6, 2))

np.testing.assert_allclose(swapped(x), wrapper(x), rtol=1e-5)  # the weight split is the wrapper
assert abs(reshaped(x) - wrapper(x)).max() > 0.01  # this is not

for name, function in (("swapped", swapped), ("reshaped", reshaped)):
    felt = jax.grad(lambda x, function=function: function(x)[0].sum())(x)  # T D
    told = [word for word, row in zip(WORDS, felt, strict=True) if (row != 0).any()]
    print(f"{name:8} the first row feels {', '.join(told)}")
    assert (told == ["Your"]) == (name == "swapped")

# %% [markdown]
# ## Mixing the heads
#
# Laid end to end, the heads never meet. A last matrix mixes them. Written by heads, it is a sum:
# each head puts its context through its own rows of $W_O$.
#
# $$\mathrm{out} = [\,c_1 \mid \dots \mid c_N\,]\, W_O + b_O = \sum_{n=1}^{N} c_n W_O^{(n)} + b_O$$
#
# `MultiHeadAttention` is the weight split with this projection. Its `d_out` is the width of *all
# heads together* (in the wrapper it was that of one), so `num_heads` must divide it. With
# `d_out=2` and two heads, each head is one number wide.

# %%
layer = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
for name, weight in zip(NAMES, heads[0], strict=True):
    getattr(layer, name).kernel[...] = weight  # the same seed, so the same first numbers
W_out = jnp.asarray([[-0.16675779, 0.22697258], [0.50002599, 0.13173823]]).T  # (N H) d_out
b_out = jnp.asarray([0.19335887, 0.68254095])
layer.out_proj.kernel[...], layer.out_proj.bias[...] = W_out, b_out

printed = [
    [0.3190, 0.4858],
    [0.2943, 0.3897],
    [0.2856, 0.3593],
    [0.2693, 0.3873],
    [0.2639, 0.3928],
    [0.2575, 0.4028],
]
assert judge.printed(layer(batch), [printed, printed])

contexts = [head(x, *(W[:, n : n + 1] for W in heads[0])) for n in range(2)]  # T 1 each
by_heads = sum(c @ W_out[n : n + 1] for n, c in enumerate(contexts)) + b_out  # T d_out
np.testing.assert_allclose(layer(x), by_heads, rtol=1e-5)
print(layer(x))

try:
    MultiHeadAttention(3, 2, 6, 0.0, num_heads=3, rngs=nnx.Rngs(0))
except ValueError as error:
    print(error)

if HAS_TORCH:
    torch.manual_seed(123)
    twin = torch_ref.multi_head.MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)
    ported = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(1))
    port(twin, ported)
    assert judge.printed(ported(batch), [printed, printed])

# %% [markdown]
# ## The shapes on the way
#
# Larger numbers make axes easier to tell apart: 30 sentences of 50 tokens, 512 wide, 8 heads.
# `jax.eval_shape` runs the shapes without the numbers.


# %%
def multi_head(x, W_query, W_key, W_value, W_out, num_heads, note=lambda name, value: None):
    B, T, _ = x.shape
    note("x", x)
    q, k, v = (
        jnp.swapaxes((x @ W).reshape(B, T, num_heads, -1), 1, 2) for W in (W_query, W_key, W_value)
    )
    note("queries, keys, values", q)
    scores = q @ k.mT / q.shape[-1] ** 0.5  # B N T T
    note("scores, weights", scores)
    later = jnp.triu(jnp.ones((T, T), dtype=bool), k=1)  # T T
    weights = jax.nn.softmax(jnp.where(later, -jnp.inf, scores), axis=-1)  # B N T T
    context = weights @ v  # B N T H
    note("context", context)
    context = jnp.swapaxes(context, 1, 2)  # B T N H
    note("context, axes swapped back", context)
    context = context.reshape(B, T, -1)  # B T (N H)
    note("context, heads joined", context)
    return context @ W_out  # B T d_out


seen = {}
square = jax.ShapeDtypeStruct((512, 512), jnp.float32)
out = jax.eval_shape(
    lambda x, *W: multi_head(x, *W, 8, lambda name, value: seen.update({name: value.shape})),
    jax.ShapeDtypeStruct((30, 50, 512), jnp.float32),
    *[square] * 4,
)
for name, shape in {**seen, "output": out.shape}.items():
    print(f"{name:28}{shape}")

assert seen["context, axes swapped back"] == (30, 50, 8, 64)

# %% [markdown]
# Mark the line before the last two: after the swap back, the context is
# `(30, 50, num_heads, head_dim)`, tokens first, then heads (the source has it otherwise). Only so
# does the reshape that follows lay the heads *of one token* end to end.
#
# ## Four ways to write it
#
# | class | what is different |
# | --- | --- |
# | `MultiHeadAttentionWrapper` | a loop over heads |
# | `MultiHeadAttention` | three wide matrices, cut into heads |
# | `MultiHeadAttentionCombined` | one matrix for all: `[queries, keys, values]` |
# | `MultiHeadAttentionEinsum` | weights as torch keeps them, (out, in); axes named, none swapped |
#
# Same weights in all of them? Let us carry them by hand. Three heads of width 4 over tokens 10
# wide, all in float64, where one function written in four ways must agree to 1e-12.

# %%
with jax.enable_x64(True):
    random = np.random.RandomState(4)
    W = {name: random.standard_normal((10, 12)) for name in NAMES}  # d_in (N H)
    W_mix, b_mix = random.standard_normal((12, 12)), random.standard_normal(12)
    sentences = jnp.asarray(random.standard_normal((2, 7, 10)))  # B T D
    common = {"rngs": nnx.Rngs(0), "param_dtype": jnp.float64}

    split = MultiHeadAttention(10, 12, 7, 0.0, 3, **common)
    loop = MultiHeadAttentionWrapper(10, 4, 7, 0.0, 3, **common)
    combined = MultiHeadAttentionCombined(10, 12, 7, 0.0, 3, **common)
    einsum = MultiHeadAttentionEinsum(10, 12, 7, 0.0, 3, **common)

    for name, kernel in W.items():
        getattr(split, name).kernel[...] = kernel
        getattr(einsum, name)[...] = kernel.T  # (out, in)
        for n, part in enumerate(loop.heads):
            getattr(part, name).kernel[...] = kernel[:, 4 * n : 4 * n + 4]  # its columns
    combined.qkv.kernel[...] = np.concatenate(list(W.values()), axis=1)  # 10 36
    for each in (split, combined, einsum):
        each.out_proj.kernel[...], each.out_proj.bias[...] = W_mix, b_mix

    want = np.asarray(multi_head(sentences, *W.values(), W_mix, 3) + b_mix)  # B T d_out
    outputs = {
        "wrapper, then mixed": loop(sentences) @ W_mix + b_mix,
        "split": split(sentences),
        "combined": combined(sentences),
        "einsum": einsum(sentences),
    }
    for name, got in outputs.items():
        verdict = judge.same_function(np.asarray(got), want)
        print(f"{name:20} differs by {verdict.error:.0e}")
        assert verdict.ok, verdict

# %% [markdown]
# Where torch is at hand, one torch module, the weight split, is held against all of them,
# gradients included. A `Rule` says where its weights go. It reads like einops: `n` counts the
# names in braces, `o` and `i` are torch's output and input axes.

# %%
qkv = "{W_query,W_key,W_value}.weight"
apart = "heads.{0,1,2}"
RULES = {
    "split": [],  # equal names need no word
    "combined": [Rule(f"{qkv} -> qkv.kernel", "n o i -> i (n o)")],
    "einsum": [Rule(f"{name}.weight -> {name}", "o i -> o i") for name in NAMES],
}
if HAS_TORCH:
    tokens = np.asarray(sentences)
    twin = torch_ref.multi_head.MultiHeadAttention(10, 12, 7, 0.0, 3)
    for name, mine in {"split": split, "combined": combined, "einsum": einsum}.items():
        report = compare(twin, mine, tokens, rules=RULES[name], dtypes=("float64",), eager=False)
        assert report.ok, report
        print(f"{name:9}", report.summary())

    beside = [Rule(f"{apart}.{n}.weight -> {n}.kernel", "n o i -> i (n o)") for n in NAMES]
    twin = torch_ref.multi_head_wrapper.MultiHeadAttentionWrapper(10, 4, 7, 0.0, 3)
    bare = MultiHeadAttention(10, 12, 7, 0.0, 3, out_proj=False, rngs=nnx.Rngs(0))
    report = compare(twin, bare, tokens, rules=beside, dtypes=("float64",), eager=False)
    assert report.ok, report
    print("wrapper  ", report.summary())

# %% [markdown]
# Shapes alone prove nothing here. The 36 columns of the combined matrix may lie as [3, N, H]
# (all queries, all keys, all values, as here and in GPT-2) or as [N, 3, H] (head by head, as in
# GPT-NeoX and BLOOM). Both are 10 x 36. Read one for the other and every shape fits:

# %%
with jax.enable_x64(True):
    good = combined.qkv.kernel[...].reshape(10, 3, 3, 4)  # D 3 N H
    combined.qkv.kernel[...] = jnp.swapaxes(good, 1, 2).reshape(10, 36)  # D (N 3 H)
    mixed_up = np.asarray(combined(sentences))
    combined.qkv.kernel[...] = good.reshape(10, 36)

verdict = judge.same_function(mixed_up, want)
assert mixed_up.shape == want.shape and not verdict.ok
print(f"same shape {mixed_up.shape}, wrong by {verdict.error:.0%}")

# %% [markdown]
# ## Loop or split: what does it cost?
#
# Same numbers, so the only question is time. Sixteen heads of width 16, eight sentences of 64
# tokens; both ways in turns, so that both meet the same busy machine, and the fastest of each.
# Called eagerly, the loop starts sixteen times as many small operations. Under `jit` the compiler
# sees all of them before it runs one, and much of the gap closes. The numbers are this machine's;
# yours will differ.

# %%
narrow, N = 16, 16
tokens = jax.random.normal(jax.random.key(0), (8, 64, N * narrow))  # B T D
rivals = {
    "wrapper": MultiHeadAttentionWrapper(N * narrow, narrow, 64, 0.0, N, rngs=nnx.Rngs(0)),
    "split": MultiHeadAttention(
        N * narrow, N * narrow, 64, 0.0, N, out_proj=False, rngs=nnx.Rngs(0)
    ),
}


def in_turns(functions, rounds=15):
    times = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - start)
    return {name: min(taken[1:]) for name, taken in times.items()}


def compiled(layer):
    program = jax.jit(layer)
    return lambda: program(tokens)


ways = {
    "eager": {name: lambda layer=layer: layer(tokens) for name, layer in rivals.items()},
    "jit": {name: compiled(layer) for name, layer in rivals.items()},
}
for way, functions in ways.items():
    taken = in_turns(functions)
    print(
        f"{way:6} wrapper {1e3 * taken['wrapper']:6.1f} ms, split {1e3 * taken['split']:6.1f} ms: "
        f"{taken['wrapper'] / taken['split']:.1f} times as long"
    )

# %% [markdown]
# ## GPT-2, from 117M to 1.5B
#
# The four sizes of GPT-2 differ in width, heads and depth; a head is 64 wide in all of them. One
# attention layer of width $D$ has four $D \times D$ matrices with biases:
#
# $$4D^2 + 4D .$$
#
# The number of heads is not in the formula: cutting costs no parameter. We do not need the
# memory to count. `nnx.eval_shape` builds the layer of shapes only.

# %%
GPT2 = {  # name: (width, heads, layers)
    "117M": (768, 12, 12),
    "345M": (1024, 16, 24),
    "762M": (1280, 20, 36),
    "1542M": (1600, 25, 48),
}


def abstract(width, heads):
    return nnx.eval_shape(
        lambda: MultiHeadAttention(width, width, 1024, 0.1, heads, True, rngs=nnx.Rngs(0))
    )


rows = {}
print("size    width heads layers   one attention  all of them  whole model  share")
for name, (D, num_heads, layers) in GPT2.items():
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(abstract(D, num_heads), nnx.Param))]
    one = sum(math.prod(shape) for shape in shapes)
    assert one == 4 * D**2 + 4 * D and D // num_heads == 64
    embeddings = (50_257 + 1_024) * D  # tokens and positions; the output reuses the first
    others = layers * (8 * D**2 + 9 * D) + 2 * D  # two Linear layers and two norms, and a last norm
    total = layers * one + others + embeddings
    rows[name] = (layers * one, others, embeddings)
    print(
        f"{name:>5} {D:7,} {num_heads:5} {layers:6} {one:15,} {layers * one:12,} {total:12,}"
        f" {layers * one / total:6.0%}"
    )

assert sum(rows["117M"]) == 124_439_808 and sum(rows["1542M"]) == 1_557_611_200

# %% [markdown]
# The paper's names are a little off: the smallest model has 124 million parameters, the largest
# 1558. Attention holds a fifth to a third of them.

# %%
fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
left = np.zeros(4)
kinds = {"attention": "lightskyblue", "feed-forward and norms": "0.7", "embeddings": "0.88"}
for (name, color), counts in zip(kinds.items(), zip(*rows.values(), strict=True), strict=True):
    share = np.asarray(counts) / [sum(row) for row in rows.values()]
    ax.barh(list(rows), share, left=left, color=color, label=name)
    for y, (start, part) in enumerate(zip(left, share, strict=True)):
        ax.text(start + part / 2, y, f"{part:.0%}", ha="center", va="center")
    left += share
ax.invert_yaxis()
ax.set(xlabel="share of all parameters", xlim=(0, 1))
ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
plt.show()

# %% [markdown]
# Parameters are not what makes attention expensive. The table of weights is: $N \cdot T^2$
# numbers for every sentence and layer, thrown away after use. At 1024 tokens:

# %%
for name, (D, num_heads, layers) in GPT2.items():
    table = num_heads * 1024**2 * 4 / 2**20  # in MiB, float32
    text = jax.ShapeDtypeStruct((1, 1024, D), jnp.float32)
    out = nnx.eval_shape(lambda layer, x: layer(x), abstract(D, num_heads), text)
    assert out.shape == (1, 1024, D)
    print(f"{name:>5}: {table:4.0f} MiB a layer, {layers * table / 1024:4.1f} GiB in all layers")

# %% [markdown]
# Twice as many tokens, four times as much. [Chapter 8](08_fast_attention.ipynb) does without the
# table.
#
# ## Exercise
#
# One can ask what a head is good for by silencing it. Silence the second of the three heads of
# `split` in two ways, and show that they agree: by setting a part of `out_proj.kernel` to zero,
# and by setting a part of `W_value.kernel` to zero. Would zeros in `W_query.kernel` do it too?
#
# <details><summary>Answer</summary>
#
# ```python
# one, two, three = nnx.clone(split), nnx.clone(split), nnx.clone(split)
# one.out_proj.kernel[4:8, :] = 0  # the rows that read this head
# two.W_value.kernel[:, 4:8] = 0  # the columns that write it
# three.W_query.kernel[:, 4:8] = 0
# a, b, c = (layer(sentences) for layer in (one, two, three))
# assert abs(a - b).max() < 1e-5 < abs(a - c).max()
# ```
#
# Rows of `out_proj` and columns of `W_value` belong to a head, so both take its term out of the
# sum. Zero queries make all scores of the head zero: it does not fall silent, it becomes the plain
# average of the past, the first section of chapter 3.
#
# </details>
#
# Next: [5. Before transformers](05_before_transformers.ipynb), where attention came from.
