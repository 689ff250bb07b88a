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
# *21 minutes to read, 30 seconds to run on a quiet machine with two cores.*
# [Heads side by side](#Heads-side-by-side) ·
# [One wide matrix](#One-wide-matrix,-cut-in-pieces) ·
# [Mixing the heads](#Mixing-the-heads) ·
# [The class](#The-class) ·
# [Four ways](#Four-ways-to-write-it) ·
# [What it costs](#Loop-or-split) ·
# [GPT-2](#GPT-2-from-its-smallest-size-to-its-largest) ·
# [Exercises](#Exercises)
#
# The softmax gives each token one row of weights, and the row adds up to one: who attends strongly
# to one word has little left for the others. The remedy is to have several heads side by side, each
# of which compares the words in another respect.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
tokens = "Your journey starts with one step".split()
respects = {  # two of the many things that can be read off the three numbers of a word
    "first number less second": np.array([0.28, -0.32, -0.28, -0.36, 0.52, -0.75]),
    "first less third": np.array([-0.46, -0.11, -0.07, -0.11, 0.67, -0.50]),
}
fig, axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for n, (ax, (name, y)) in enumerate(zip(axes, respects.items(), strict=True)):
    for j, share in enumerate(jax.nn.softmax(10 * y[0] * y)):  # how much Your looks at word j
        ax.plot([0, j], [0, 1], color=f"C{n}", lw=12 * share, alpha=0.6)
        ax.text(j, 1.1, f"{share:.0%}\n{tokens[j]}", ha="center")
    ax.text(0, -0.1, "Your", ha="center", va="top")
    ax.set(xlim=(-0.5, 5.5), ylim=(-0.3, 1.6), title=f"Head {n + 1} compares: {name}")
    ax.axis("off")
plt.show()

# %% [markdown]
# The same word *Your* looks at *one* in the first head, and at *step* in the second. This is
# **multi-head attention**, and each head has queries, keys and values of its own.
#
# At the end of this chapter you will understand
#
# * several heads as a loop, and the same heads as wide matrices that are cut in pieces;
# * what a head can compare: its subspace of the numbers of a word;
# * what happens to the axes on the way, worked by hand on a tensor small enough to read;
# * why `reshape` alone does not cut heads, and how it lets a token see the future;
# * how to write multi-head attention as a class, and four ways to write it that are one function;
# * where the parameters of GPT-2 are.
#
# The six words `tokens`, their numbers `x`, and what draws and compares come from `climb.py`, the
# file beside these notebooks.

# %%
from climb import HAS_TORCH, as_printed, diagram, heat, same, tokens, x

# %% [markdown]
# ## Heads side by side
#
# Each head $n$ is a causal attention as in chapter 3, with weights of its own. The context vectors
# of all heads are laid end to end:
#
# $$\mathrm{head}_n(x) = \mathrm{softmax}\!\left(\frac{Q_n K_n^\top}{\sqrt{H}} + M\right) V_n,
# \qquad
# c = \big[\,\mathrm{head}_1(x)\;\big|\;\dots\;\big|\;\mathrm{head}_N(x)\,\big],$$
#
# where $M$ is $-\infty$ above the diagonal and 0 elsewhere, $N$ is the number of heads, and $H$ is
# the width of one head.


# %%
def head(x, W_query, W_key, W_value):
    q, k, v = x @ W_query, x @ W_key, x @ W_value  # T H each
    scores = q @ k.T / q.shape[-1] ** 0.5  # T T
    future = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)  # T T
    return jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1) @ v  # T H


def side_by_side(x, heads):
    return jnp.concatenate([head(x, *matrices) for matrices in heads], axis=-1)  # T (N H)


# %% [markdown]
# Here are two heads of width 2, with the numbers that PyTorch draws after the seed 123. PyTorch
# stores each matrix as (d_out, d_in), so it is transposed.

# %%
DRAWN = [  # for each head W_query, W_key, W_value
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
heads = [[jnp.array(matrix).T for matrix in three] for three in DRAWN]  # d_in H each

# %%
by_loop = side_by_side(x, heads)
print(by_loop)
as_printed(by_loop[1], [-0.5874, 0.0058, 0.5891, 0.3257])

# %% [markdown]
# The library calls this `MultiHeadAttentionWrapper`. It holds a list of heads, and takes batches.

# %%
from flax_attn import MultiHeadAttentionWrapper

NAMES = ("W_query", "W_key", "W_value")
wrapper = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
for part, three in zip(wrapper.heads, heads, strict=True):
    for name, matrix in zip(NAMES, three, strict=True):
        getattr(part, name).kernel[...] = matrix

# %%
batch = jnp.stack([x, x])  # B T D
print(wrapper(batch))
same(wrapper(batch)[0], by_loop)

# %% [markdown]
# The next cell repeats it in PyTorch, and proves that both are the same function.

# %%
from flax_attn.parity import compare, port

if HAS_TORCH:
    import torch

    import torch_ref.multi_head_wrapper

    torch.manual_seed(123)
    twin = torch_ref.multi_head_wrapper.MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2)
    same(port(twin, nnx.clone(wrapper))(batch), wrapper(batch))
    report = compare(twin, wrapper, np.asarray(batch), dtypes=("float64",), jit=False)
    assert report.ok, report
    print(report.summary())

# %% [markdown]
# There are four columns: two numbers from each of *two heads*. A common slip is to explain them by
# the two sentences of the batch, but the batch has an axis of its own. Five sentences and three
# heads show it.

# %%
three_heads = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=3, rngs=nnx.Rngs(0))
print("5 sentences, 2 heads:", wrapper(jnp.stack([x] * 5)).shape)
print("2 sentences, 3 heads:", three_heads(batch).shape)
assert three_heads(batch).shape == (2, 6, 6)

# %% [markdown]
# ### Heads look at different subspaces
#
# What do the two heads look at? With random weights all scores are small, and both rows are nearly
# flat. So let us choose the matrices. A query of the first head is the first number of a word less
# the second, times a constant that makes the weights sharp. In the second head it is the first less
# the third. Keys are made in the same way.

# %%
first, second = jnp.array([[1.0, -1.0, 0.0], [1.0, 0.0, -1.0]])  # D each
chosen = [10**0.5 * direction[:, None] for direction in (first, second)]  # D H each, with H = 1
q = k = jnp.stack([x @ W for W in chosen], axis=1)  # T N H

# %% [markdown]
# The three numbers of a word are a space, and a matrix with fewer columns keeps a **subspace** of
# it. Here that is one line for each head. What lies at a right angle to this line, the head does
# not see. `attention_weights` takes both heads at once. The future is not covered here, so that you
# see whole rows.

# %%
from flax_attn import attention_weights

weights = attention_weights(q, k, scale=1.0)  # N T T
for n in (0, 1):
    shares = [f"{share:.0%} {token}" for token, share in zip(tokens, weights[n, 0], strict=True)]
    print(f"Your in head {n + 1}:", ", ".join(shares))
assert [tokens[int(row.argmax())] for row in weights[:, 0]] == ["one", "step"]

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.7), layout="constrained")
for n, (ax, cmap) in enumerate(zip(axes, ("Blues", "Oranges"), strict=True)):
    heat(ax, weights[n], f"weights of head {n + 1}", most=1, cmap=cmap)
fig.suptitle("Two heads group the same six words in two ways", fontsize=10)
plt.show()

# %% [markdown]
# In head 1 *Your* and *one* look at each other and at themselves, and the other four at *step*. In
# head 2 *one* is alone. Nobody chooses such matrices in a real model: training finds them. And each
# head has a full row of weights to spend.
#
# > **Try it.** Give both heads the same weights: `side_by_side(x, [heads[0], heads[0]])`. What do
# > you gain by the second one?
#
# <details><summary>Answer</summary>
#
# ```python
# twice = side_by_side(x, [heads[0], heads[0]])  # T (N H)
# same(twice[:, 2:], twice[:, :2])
# assert jnp.linalg.matrix_rank(twice) == jnp.linalg.matrix_rank(twice[:, :2]) == 2
# ```
#
# Nothing. The last two columns repeat the first two, at twice the cost. Heads are worth having as
# far as they look at different things.
#
# </details>
#
# ## One wide matrix, cut in pieces
#
# Two heads need six small products. But $x W_1$ and $x W_2$ read the same $x$, so you can lay the
# matrices side by side and multiply once:
#
# $$x\,[\,W_1 \mid W_2\,] = [\,x W_1 \mid x W_2\,].$$
#
# Columns belong to heads. This is the **weight split**: three wide products, whatever the number of
# heads, and each result is cut in pieces.

# %%
W_query, W_key, W_value = (jnp.concatenate(pair, axis=1) for pair in zip(*heads, strict=True))
wide = x @ W_query  # T (N H)
same(wide[:, 2:], x @ heads[1][0])

# %%
fig, axes = plt.subplots(1, 3, figsize=(9, 3.6), layout="constrained")
look = {"cmap": "RdBu_r", "least": -1.0, "most": 1.0}
columns = ["1", "1", "2", "2"]
heat(axes[0], x, "x", columns=["0", "1", "2"], **look)
heat(axes[1], W_query, "[W_query of 1 | of 2]", ["0", "1", "2"], columns, **look)
heat(axes[2], wide, "their product: all queries", columns=columns, **look)
for ax in axes[1:]:
    ax.axvline(1.5, color="black", lw=2)
    ax.set_xlabel("head")
plt.show()

# %% [markdown]
# To cut, give the columns two axes, $N$ heads and $H$ numbers, and bring the heads before the
# tokens. Then every head is a matrix of its own, and `@` works on all of them at once, as it does
# on the sentences of a batch.
#
# $$(T,\; N H) \;\xrightarrow{\text{reshape}}\; (T, N, H) \;\xrightarrow{\text{swap}}\; (N, T, H)$$

# %%
queries = jnp.swapaxes(wide.reshape(6, 2, 2), 0, 1)  # N T H
print(wide.shape, "->", queries.shape)
same(queries[1], x @ heads[1][0])

# %% [markdown]
# ### By hand
#
# Here is a tensor that is cut already: one sentence, two heads, three tokens, four numbers, so
# `(1, 2, 3, 4)`. Multiplied by itself with the last two axes swapped, it gives a table of scores
# for each head, `(1, 2, 3, 3)`. The axes before them are only carried along, as in a loop.

# %%
a = jnp.array(
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

# %%
products = a @ a.mT  # B N T T
print(products)
same(products[0], jnp.stack([a[0, n] @ a[0, n].T for n in range(2)]))  # a loop over heads

# %% [markdown]
# One of these numbers by hand: tokens 1 and 2 of the first head.

# %%
by_hand = 0.2745 * 0.8993 + 0.6584 * 0.0390 + 0.2775 * 0.9268 + 0.8573 * 0.7388
print(f"{by_hand:.4f}")
same(products[0, 0, 0, 1], by_hand)

# %% [markdown]
# ### Reshape alone is not enough
#
# `wide.reshape(N, T, H)` has the right shape too, without any swap. It is wrong, and no error is
# raised. A reshape never moves numbers. It takes them in the order in which they are stored, token
# after token. To see it, let each number say which token it belongs to:

# %%
origin = jnp.repeat(jnp.arange(1, 7)[:, None], 4, axis=1)  # T (N H): token 1 to 6
right = jnp.swapaxes(origin.reshape(6, 2, 2), 0, 1)  # N T H
wrong = origin.reshape(2, 6, 2)  # the same shape
assert right.shape == wrong.shape

# %%
places = [f"place {t}" for t in range(1, 7)]
titles = "swapped: head 1", "swapped: head 2", "reshaped: head 1", "reshaped: head 2"
fig, axes = plt.subplots(1, 4, figsize=(9, 3.6), layout="constrained")
for ax, table, title in zip(axes, (*right, *wrong), titles, strict=True):
    heat(ax, table, title, places, ["", ""], "viridis_r", 1, 9)
plt.show()

# %% [markdown]
# In the wrong one, the second head begins with token 4. The mask does not know that: it covers
# *places*. So the first context vector sees *Your* in one head and the fourth word, *with*, in the
# other. The gradient says so.


# %%
def attention_of_heads(cut):
    def run(x):
        q, k, v = (cut(x @ W) for W in (W_query, W_key, W_value))  # N T H
        scores = q @ k.mT / 2**0.5  # N T T
        future = jnp.triu(jnp.ones((6, 6), dtype=bool), k=1)  # T T
        weights = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1)  # N T T
        return jnp.swapaxes(weights @ v, 0, 1).reshape(6, 4)  # T (N H)

    return run


swapped = attention_of_heads(lambda y: jnp.swapaxes(y.reshape(6, 2, 2), 0, 1))
reshaped = attention_of_heads(lambda y: y.reshape(2, 6, 2))
same(swapped(x), by_loop)  # the weight split is the loop


# %%
def seen_by_first_row(function):
    slopes = jax.grad(lambda x: function(x)[0].sum())(x)  # T D
    return [word for word, row in zip(tokens, slopes, strict=True) if (row != 0).any()]


print("swapped: ", seen_by_first_row(swapped))
print("reshaped:", seen_by_first_row(reshaped))
assert seen_by_first_row(reshaped) == ["Your", "with"]

# %% [markdown]
# ## Mixing the heads
#
# Laid end to end, the heads never meet. A last matrix, the **output projection** $W_O$, mixes them.
# Written by heads, it is a sum: each head multiplies its context by its own rows of $W_O$.
#
# $$\mathrm{out} = [\,c_1 \mid \dots \mid c_N\,]\, W_O + b_O = \sum_{n=1}^{N} c_n W_O^{(n)} + b_O$$

# %%
blue, orange, green = "lightsteelblue", "navajowhite", "palegreen"
diagram(
    {
        "x\nB T D": (0, 0, blue),
        "W_query": (1.4, 1, orange),
        "W_key": (1.4, 0, orange),
        "W_value": (1.4, -1, orange),
        "head 1\nB T H": (3.2, 0.8, green),
        "head 2\nB T H": (3.2, -0.8, green),
        "side by side\nB T (N H)": (4.9, 0, blue),
        "W_O": (6.2, 0, orange),
        "output\nB T D": (7.4, 0, blue),
    },
    [("x\nB T D", W) for W in ("W_query", "W_key", "W_value")]
    + [(W, f"head {n}\nB T H") for n in (1, 2) for W in ("W_query", "W_key", "W_value")]
    + [(f"head {n}\nB T H", "side by side\nB T (N H)") for n in (1, 2)]
    + [("side by side\nB T (N H)", "W_O"), ("W_O", "output\nB T D")],
    title="Each head takes its columns of queries, keys and values",
)

# %% [markdown]
# ## The class
#
# Here is all of it in one place, with a shape at the end of each line. `d_out` is now the width of
# *all heads together* (in the wrapper it was the width of one), so the number of heads must divide
# it.


# %%
class MyMultiHead(nnx.Module):
    def __init__(self, d_in, d_out, num_heads, *, rngs):
        self.num_heads = num_heads
        self.W_query = nnx.Linear(d_in, d_out, use_bias=False, rngs=rngs)
        self.W_key = nnx.Linear(d_in, d_out, use_bias=False, rngs=rngs)
        self.W_value = nnx.Linear(d_in, d_out, use_bias=False, rngs=rngs)
        self.out_proj = nnx.Linear(d_out, d_out, rngs=rngs)

    def cut(self, y):  # B T (N H)
        y = y.reshape(*y.shape[:-1], self.num_heads, -1)  # B T N H
        return jnp.swapaxes(y, -3, -2)  # B N T H

    def __call__(self, x):  # B T d_in
        q = self.cut(self.W_query(x))  # B N T H
        k = self.cut(self.W_key(x))  # B N T H
        v = self.cut(self.W_value(x))  # B N T H
        scores = q @ k.mT / q.shape[-1] ** 0.5  # B N T T
        future = jnp.triu(jnp.ones(scores.shape[-2:], bool), k=1)  # T T
        weights = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1)  # B N T T
        context = jnp.swapaxes(weights @ v, -3, -2)  # B T N H
        return self.out_proj(context.reshape(*x.shape[:-1], -1))  # B T d_out


# %% [markdown]
# Mark the line that makes `context`: after the swap back, the axes of the context are tokens, then
# heads. (A common slip is to note them the other way round.) Only in this order does the `reshape`
# after it lay the heads *of one token* end to end.
#
# With two heads and `d_out=2`, each head is one number wide. These are PyTorch's weights after the
# seed 123. The first three matrices are the ones that you know.

# %%
mine = MyMultiHead(3, 2, num_heads=2, rngs=nnx.Rngs(0))
for name, matrix in zip(NAMES, heads[0], strict=True):
    getattr(mine, name).kernel[...] = matrix
mine.out_proj.kernel[...] = jnp.array([[-0.16675779, 0.22697258], [0.50002599, 0.13173823]]).T
mine.out_proj.bias[...] = jnp.array([0.19335887, 0.68254095])

# %%
print(mine(batch))
as_printed(mine(batch)[0, :2], [[0.3190, 0.4858], [0.2943, 0.3897]])

# %% [markdown]
# The library's `MultiHeadAttention` is this class, with a context length and dropout. With the same
# weights, it is the same function.

# %%
from flax_attn import MultiHeadAttention

ours = MultiHeadAttention(3, 2, context_length=6, dropout=0.0, num_heads=2, rngs=nnx.Rngs(0))
nnx.update(ours, nnx.state(mine, nnx.Param))
same(ours(batch), mine(batch))

# %% [markdown]
# And *your* class is PyTorch's function, gradients included:

# %%
if HAS_TORCH:
    import torch_ref.multi_head

    torch.manual_seed(123)
    twin = torch_ref.multi_head.MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)
    same(port(twin, nnx.clone(mine))(batch), mine(batch))
    report = compare(twin, mine, np.asarray(batch))
    assert report.ok, report
    print(report)

# %% [markdown]
# The sum over heads gives the same result, as the formula said:

# %%
contexts = [head(x, *(W[:, n : n + 1] for W in heads[0])) for n in range(2)]  # T 1 each
W_out, b_out = mine.out_proj.kernel[...], mine.out_proj.bias[...]
same(sum(c @ W_out[n : n + 1] for n, c in enumerate(contexts)) + b_out, mine(x))

# %% [markdown]
# What if the number of heads does not divide the width? Your class fails somewhere inside
# `reshape`. The library says it before it does any work:

# %%
try:
    MultiHeadAttention(3, 2, 6, 0.0, num_heads=3, rngs=nnx.Rngs(0))
except ValueError as error:
    print(error)

# %% [markdown]
# Larger sizes make axes easier to tell apart: 30 sentences of 50 tokens, 512 wide, 8 heads.
# `nnx.eval_shape` runs shapes without numbers, so it needs no memory for them, and
# `jax.ShapeDtypeStruct` is an array's shape and type without its numbers.

# %%
large = nnx.eval_shape(lambda: MyMultiHead(512, 512, num_heads=8, rngs=nnx.Rngs(0)))
text = jax.ShapeDtypeStruct((30, 50, 512), jnp.float32)
for name, step in {"cut": lambda m, x: m.cut(m.W_query(x)), "whole": lambda m, x: m(x)}.items():
    print(f"{name:6}", nnx.eval_shape(step, large, text).shape)

# %% [markdown]
# > **Try it.** In `MyMultiHead`, leave out the swap in the line that makes `context`. Which check
# > tells you?
#
# <details><summary>Answer</summary>
#
# ```python
# class Unswapped(MyMultiHead):
#     def __call__(self, x):  # B T d_in
#         q, k, v = (self.cut(W(x)) for W in (self.W_query, self.W_key, self.W_value))  # B N T H
#         scores = q @ k.mT / q.shape[-1] ** 0.5  # B N T T
#         future = jnp.triu(jnp.ones(scores.shape[-2:], bool), k=1)  # T T
#         context = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1) @ v  # B N T H
#         return self.out_proj(context.reshape(*x.shape[:-1], -1))  # B T d_out
#
#
# unswapped = Unswapped(3, 2, num_heads=2, rngs=nnx.Rngs(0))
# nnx.update(unswapped, nnx.state(mine, nnx.Param))
# assert unswapped(batch).shape == mine(batch).shape
# print(seen_by_first_row(unswapped), f"{jnp.abs(unswapped(batch) - mine(batch)).max():.2f}")
# ```
#
# Not the shapes: they fit. The comparisons do: with the printed table, with the library's layer,
# and with PyTorch. And so does the gradient. The first row now sees *journey*, a word of its
# future, because its two numbers are those of words 1 and 2 in the first head.
#
# </details>
#
# ## Four ways to write it
#
# | class | what is different |
# | --- | --- |
# | `MultiHeadAttentionWrapper` | a loop over heads |
# | `MultiHeadAttention` | three wide matrices, cut into heads |
# | `MultiHeadAttentionCombined` | one matrix for all: `[queries, keys, values]` |
# | `MultiHeadAttentionEinsum` | weights as PyTorch stores them, (out, in); no axes are swapped |
#
# Are they the same function? We give them the same weights and compare. Three heads of width 4,
# tokens of 10 numbers, all in float64, where one function written in four ways must agree to 1e-12.

# %%
from flax_attn import MultiHeadAttentionCombined, MultiHeadAttentionEinsum

random = np.random.RandomState(4)
W = {name: random.standard_normal((10, 12)) for name in NAMES}  # d_in (N H)
W_mix, b_mix = random.standard_normal((12, 12)), random.standard_normal(12)
sentences = random.standard_normal((2, 7, 10))  # B T D

# %%
with jax.enable_x64(True):
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

# %%
with jax.enable_x64(True):
    inputs = jnp.asarray(sentences)
    want = loop(inputs) @ W_mix + b_mix  # the wrapper, then mixed
    for layer in (split, combined, einsum):
        same(layer(inputs), want, within=1e-12)

# %% [markdown]
# Where PyTorch is installed, one PyTorch module is compared with them, gradients included. A `Rule`
# says where its weights go. It reads like einops: `o` and `i` are PyTorch's output and input axes,
# and `n` counts the names in braces.

# %%
from flax_attn.parity import Rule

RULES = {
    "split": [],  # equal names need no rule
    "combined": [Rule("{W_query,W_key,W_value}.weight -> qkv.kernel", "n o i -> i (n o)")],
    "einsum": [Rule(f"{name}.weight -> {name}", "o i -> o i") for name in NAMES],
}
if HAS_TORCH:
    twin = torch_ref.multi_head.MultiHeadAttention(10, 12, 7, 0.0, 3)
    for name, layer in {"split": split, "combined": combined, "einsum": einsum}.items():
        once = {"dtypes": ("float64",), "eager": False}
        report = compare(twin, layer, sentences, rules=RULES[name], **once)
        assert report.ok, report
        print(f"{name:9}", report.summary())

# %% [markdown]
# Shapes alone prove nothing here. The 36 columns of the combined matrix may be ordered as [3, N, H]
# (all queries, all keys, all values, as here and in GPT-2) or as [N, 3, H] (head by head, as in
# GPT-NeoX and BLOOM). Both are 10 x 36. Read one as the other, and every shape fits:

# %%
with jax.enable_x64(True):
    mixed_up = nnx.clone(combined)
    by_head = combined.qkv.kernel[...].reshape(10, 3, 3, 4).swapaxes(1, 2)  # D N 3 H
    mixed_up.qkv.kernel[...] = by_head.reshape(10, 36)
    gap = float(abs(mixed_up(inputs) - want).max())
print(f"the same shape, and wrong by up to {gap:.1f}")
assert gap > 1

# %% [markdown]
# > **Try it.** Which of the four layers can you build without an output projection? (Look for
# > `out_proj=False` in `help(MultiHeadAttention)`.)
#
# <details><summary>Answer</summary>
#
# ```python
# bare = MultiHeadAttention(3, 4, 6, 0.0, 2, out_proj=False, rngs=nnx.Rngs(0))
# for name, matrix in {"W_query": W_query, "W_key": W_key, "W_value": W_value}.items():
#     getattr(bare, name).kernel[...] = matrix
# same(bare(x), by_loop)
# for kind in (MultiHeadAttentionCombined, MultiHeadAttentionEinsum):
#     try:
#         kind(3, 4, 6, 0.0, 2, out_proj=False, rngs=nnx.Rngs(0))
#     except TypeError as error:
#         print(str(error).split(";")[0])
# ```
#
# Two of them. `MultiHeadAttentionWrapper` never has one, and `MultiHeadAttention` takes
# `out_proj=False`. With the same matrices it then is the wrapper. The other two raise a `TypeError`
# that lists what they take.
#
# </details>
#
# ## Loop or split
#
# The numbers are the same, so the only question is time. We take sixteen heads of width 16 and
# eight sentences of 64 tokens.

# %%
sixteen = jax.random.normal(jax.random.key(0), (8, 64, 256))  # B T D
no_mix = {"out_proj": False, "rngs": nnx.Rngs(0)}
rivals = {
    "wrapper": MultiHeadAttentionWrapper(256, 16, 64, 0.0, 16, rngs=nnx.Rngs(0)),
    "split": MultiHeadAttention(256, 256, 64, 0.0, 16, **no_mix),
}

# %% [markdown]
# The two take turns, so that both meet the same busy machine, and the fastest call of each counts.


# %%
import time


def seconds(function):
    start = time.perf_counter()
    jax.block_until_ready(function(sixteen))
    return time.perf_counter() - start


def ratio(functions):
    times = [[seconds(function) for function in functions] for _ in range(15)][1:]
    wrapper_time, split_time = np.min(times, axis=0)
    return wrapper_time / split_time


# %%
print(f"eager: the wrapper takes {ratio(rivals.values()):.1f} times as long as the split")
compiled = [jax.jit(layer) for layer in rivals.values()]
print(f"jit:   the wrapper takes {ratio(compiled):.1f} times as long as the split")

# %% [markdown]
# Without `jit`, the loop starts sixteen times as many small operations. With `jit`, the compiler
# sees all of them before it runs one, and much of the gap closes. These are this machine's numbers.
# Yours will differ.
#
# ## GPT-2 from its smallest size to its largest
#
# The four sizes of GPT-2 differ in width, heads and depth. A head is 64 wide in all of them. One
# attention layer of width $D$ has four $D \times D$ matrices with biases:
#
# $$4D^2 + 4D .$$
#
# The number of heads is not in the formula: cutting costs no parameters. To count them we build
# layers of shapes only.

# %%
import math

GPT2 = {  # name: (width, heads, layers)
    "117M": (768, 12, 12),
    "345M": (1024, 16, 24),
    "762M": (1280, 20, 36),
    "1542M": (1600, 25, 48),
}


def one_attention(D, num_heads):
    def build():
        return MultiHeadAttention(D, D, 1024, 0.1, num_heads, True, rngs=nnx.Rngs(0))

    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(build), nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves)


# %%
print([one_attention(D, num_heads) for D, num_heads, _ in GPT2.values()])
assert one_attention(768, 12) == 4 * 768**2 + 4 * 768

# %% [markdown]
# A whole model has more: the feed-forward network and the norms of each layer (chapter 6), and the
# embeddings of 50,257 tokens and 1,024 positions.

# %%
parts = {}
for name, (D, num_heads, layers) in GPT2.items():
    others = layers * (8 * D**2 + 9 * D) + 2 * D  # feed-forward and norms
    parts[name] = layers * one_attention(D, num_heads), others, (50_257 + 1_024) * D

# %%
for name, (attention, others, embeddings) in parts.items():
    total = attention + others + embeddings
    print(f"{name:>5}: attention {attention:11,} of {total:13,}, {attention / total:.0%}")

assert sum(parts["117M"]) == 124_439_808 and sum(parts["1542M"]) == 1_557_611_200

# %% [markdown]
# The names in the paper are a little off: the smallest model has 124 million parameters and the
# largest 1,558 million. Attention holds a fifth to a third of them.

# %%
fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
share = np.array([np.divide(part, sum(part)) for part in parts.values()])  # model, kind
start = np.cumsum(share, axis=1) - share
kinds = {"attention": "lightskyblue", "feed-forward and norms": "0.7", "embeddings": "0.88"}
for kind, (name, color) in enumerate(kinds.items()):
    bars = ax.barh(list(parts), share[:, kind], left=start[:, kind], color=color, label=name)
    ax.bar_label(bars, [f"{part:.0%}" for part in share[:, kind]], label_type="center")
ax.invert_yaxis()
ax.set(xlabel="share of all parameters", xlim=(0, 1))
fig.suptitle("The larger the model, the smaller the share of embeddings", fontsize=10)
ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
plt.show()

# %% [markdown]
# Parameters are not what makes attention expensive. The table of weights is: $N \cdot T^2$ numbers
# for every sentence and layer. At 1,024 tokens in float32:

# %%
for name, (_, num_heads, layers) in GPT2.items():
    table = num_heads * 1024**2 * 4 / 2**20  # MiB
    print(f"{name:>5}: {table:4.0f} MiB a layer, {layers * table / 1024:4.1f} GiB in all layers")

# %% [markdown]
# Twice as many tokens need four times as much. [Chapter 8](08_fast_attention.ipynb) computes the
# same function without this table.
#
# ## In a nutshell
#
# | word | meaning | shape |
# | --- | --- | --- |
# | head | one attention with weights of its own | `T H` |
# | weight split | wide matrices, whose columns are cut into heads | `B T (N H)` to `B N T H` |
# | output projection | mixes the heads of one token | `B T (N H)` to `B T D` |
#
# ## Exercises
#
# **1.** One can ask what a head is good for by silencing it. Silence the second of the three heads
# of `split` in two ways, and show that they agree: by setting a part of `out_proj.kernel` to zero,
# and by setting a part of `W_value.kernel` to zero. Would zeros in `W_query.kernel` do it too?
#
# <details><summary>Answer</summary>
#
# ```python
# with jax.enable_x64(True):
#     one, two, three = nnx.clone(split), nnx.clone(split), nnx.clone(split)
#     one.out_proj.kernel[...] = one.out_proj.kernel[...].at[4:8, :].set(0)  # rows that read it
#     two.W_value.kernel[...] = two.W_value.kernel[...].at[:, 4:8].set(0)  # columns that write it
#     three.W_query.kernel[...] = three.W_query.kernel[...].at[:, 4:8].set(0)
#     a, b, c = (layer(inputs) for layer in (one, two, three))
#     same(a, b, within=1e-12)
#     assert abs(a - c).max() > 0.1
# ```
#
# Rows of `out_proj` and columns of `W_value` belong to a head, so both remove its term from the
# sum. Zero queries make all scores of the head zero. Then the head is not silent: it becomes the
# plain average of the past, the first section of chapter 3.
#
# </details>
#
# **2.** Swap the two heads of `mine`: the columns of its three matrices, and something else, so
# that the output does not change. What else has to be swapped?
#
# <details><summary>Answer</summary>
#
# ```python
# other = nnx.clone(mine)
# for name in NAMES:
#     getattr(other, name).kernel[...] = getattr(mine, name).kernel[...][:, ::-1]
# other.out_proj.kernel[...] = mine.out_proj.kernel[...][::-1]  # the rows of W_O
# same(other(batch), mine(batch))
# ```
#
# The heads are a set: their order has no meaning, as long as each one finds its rows of $W_O$.
#
# </details>
#
# **To read:** Vaswani and others, [Attention Is All You Need](https://arxiv.org/abs/1706.03762),
# section 3.2; Rush and others,
# [The Annotated Transformer](https://nlp.seas.harvard.edu/annotated-transformer/); Michel and
# others, [Are Sixteen Heads Really Better than One?](https://arxiv.org/abs/1905.10650).
#
# Next: [Positions](positions.ipynb), which attention has to be given.
