# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Fast attention
#
# The formula of this climb has one large array: the weights, one number for every pair of tokens.
# Twice the text, four times the array. It is written, read again, and thrown away. This last
# chapter computes the same function without ever having it.
#
# At the end you will understand
#
# * what "quadratic memory" is, in bytes, and who pays for it;
# * the **online softmax**: how to take a softmax of a row that you never see as a whole;
# * how the gradient is had without having kept the weights;
# * which blocks of a mask need not be computed at all;
# * how to ask this library which way it takes, and why: `explain` and `use_backend`.

# %%
import importlib.util
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from matplotlib.colors import ListedColormap

from flax_attn import (
    CAUSAL,
    FULL,
    Segments,
    Softcap,
    TransformerMultiHeadAttention,
    Window,
    assume_platform,
    attend,
    attention_weights,
    explain,
    use_backend,
)

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch

    from torch_ref.simplified_self_attention import SimplifiedSelfAttention

np.set_printoptions(precision=4, suppress=True)
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.titlesize": 10})
jax.config.update("jax_default_matmul_precision", "float32")  # all digits, on every device

# %% [markdown]
# ## What quadratic memory is
#
# Queries and the output are lists of T vectors, keys and values of S. Their size grows with the
# text. The weights are a table of T rows and S columns, one for each head. With $N$ heads of width
# $H$, and four bytes a number:
#
# $$\text{bytes} = 4 \cdot N \cdot T \cdot S \qquad \text{against} \qquad
# 4 \cdot N \cdot H \cdot (2\,T + 2\,S).$$
#
# GPT-2's smallest model has N = 12 heads, H = 64 wide.

# %%
N, H = 12, 64
lengths = 2 ** np.arange(7, 18)
table = 4.0 * N * lengths**2
lists = 4.0 * N * H * 4 * lengths

for T, a, b in zip(lengths, table, lists, strict=True):
    if T in (1024, 8192, 131_072):
        print(f"T = {T:>6}: weights {a / 1e9:>8.2f} GB, all the rest {b / 1e9:.2f} GB")

figure, ax = plt.subplots(figsize=(5.5, 3.2))
ax.loglog(lengths, table, "o-", label="the weights, T x S")
ax.loglog(lengths, lists, "o-", label="queries, keys, values, output")
ax.axhline(80e9, color="gray", ls="--")
ax.text(lengths[0], 100e9, "a large GPU, 80 GB", color="gray")
ax.set_xticks([128, 1024, 8192, 65_536], ["128", "1,024", "8,192", "65,536"])
ax.set(xlabel="T = S", ylabel="bytes, one layer", title="float32, 12 heads of width 64")
ax.legend()
figure.tight_layout()

# %% [markdown]
# At 256 tokens the two are equal. After that the table takes over. And a model in training keeps
# the table of every layer until its gradient is taken.
#
# ## Measured
#
# The compiler behind `jit` knows how much scratch memory a program will need before it runs. So
# nothing has to be run here: we compile for a shape (`jax.ShapeDtypeStruct` is an array's shape and
# type without its numbers), and ask.
#
# `attend` is the one function below most layers of this library, and there are several ways to
# compute it, its **backends**. `"reference"` is the plain formula, table and all; `"blockwise"` is
# what this chapter is about.


# %%
def plain(q, k, v):  # T N H
    return attend(q, k, v, backend="reference")


def blockwise(q, k, v):  # T N H
    return attend(q, k, v, backend="blockwise")


def both_ways(attention):
    """The output's sum and its gradients: one step of training."""
    return jax.value_and_grad(lambda *x: attention(*x).sum(), argnums=(0, 1, 2))


def scratch(function, T):
    """Bytes of temporary memory that the compiled function needs, for four heads of width 64."""
    x = jax.ShapeDtypeStruct((T, 4, 64), jnp.float32)
    return jax.jit(function).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


some = [1024, 2048, 4096, 8192, 16_384]
needs = {
    "plain, forward": [scratch(plain, T) for T in some],
    "plain, with gradients": [scratch(both_ways(plain), T) for T in some],
    "blockwise, forward": [scratch(blockwise, T) for T in some],
    "blockwise, with gradients": [scratch(both_ways(blockwise), T) for T in some],
}
print("T".rjust(26), *(f"{T:>8}" for T in some))
for name, found in needs.items():
    print(f"{name:>26}", *(f"{n / 2**20:>8,.0f}" for n in found), " MiB")

# %%
figure, ax = plt.subplots(figsize=(5.5, 3.4))
for (name, found), style in zip(needs.items(), ("C0o-", "C0s--", "C1o-", "C1s--"), strict=True):
    ax.loglog(some, found, style, label=name)
ax.set_xticks(some, [f"{T:,}" for T in some])
ax.set_yticks([2**20 * n for n in (1, 16, 256, 4096, 65_536)])
ax.set_yticklabels(["1 MiB", "16 MiB", "256 MiB", "4 GiB", "64 GiB"])
ax.minorticks_off()
ax.set(xlabel="T = S", ylabel="scratch memory", title="measured, four heads of width 64")
ax.legend()
figure.tight_layout()

# %% [markdown]
# Doubling T costs the plain formula four times as much. On a CPU, up to 2,048 tokens, the library
# writes its blocks out side by side and works on several at once: that is quicker and takes some
# memory, though a fraction of the table. Longer texts go through a loop, one block at a time. From
# there on memory grows as T does: twice the text, twice the bytes.

# %%
for kind in ("forward", "with gradients"):
    plainly, blocks = np.array(needs[f"plain, {kind}"]), np.array(needs[f"blockwise, {kind}"])
    assert plainly[-1] > 3.5 * plainly[-2]
    assert blocks[-1] < 2.5 * blocks[-2] and plainly[-1] > 30 * blocks[-1]

# %% [markdown]
# ## One row, never seen as a whole
#
# How can that be? A softmax needs the whole row: its largest number, for safety, and the sum of all
# exponentials. Let us take the six words of [chapter 1](01_attention_without_weights.ipynb) again,
# and the query *journey*, and allow ourselves only **two keys at a time**.

# %%
WORDS = ["Your", "journey", "starts", "with", "one", "step"]
x = np.array(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)
query, keys, values = x[1], x[::-1], x[::-1]  # the last word first: any order will do
NAMES = WORDS[::-1]

# %% [markdown]
# We carry three things along, for what has been seen so far: the largest score $m$, the sum $z$ of
# the exponentials, and the sum $o$ of the values, each times its exponential. Both sums are taken
# **relative to the largest score so far**, with $e^{s - m}$ for $e^s$. A new block of scores $s_j$
# with values $v_j$ comes:
#
# $$m' = \max(m, \max_j s_j), \qquad
# z' = e^{m - m'}\, z + \sum_j e^{s_j - m'}, \qquad
# o' = e^{m - m'}\, o + \sum_j e^{s_j - m'}\, v_j.$$
#
# When a larger score turns up, everything so far was measured against the wrong maximum. One
# factor, $e^{m - m'}$, puts it right. At the end the output is $o / z$.

# %%
m, z, o = -np.inf, 0.0, np.zeros(3)
steps = []
for start in range(0, len(keys), 2):
    block = slice(start, start + 2)
    s = keys[block] @ query  # 2 scores; the others are not there
    larger = max(m, s.max())
    correction = np.exp(m - larger)
    p = np.exp(s - larger)
    z = correction * z + p.sum()
    o = correction * o + p @ values[block]
    m = larger
    steps.append((m, z, o / z))
    print(f"{' and '.join(NAMES[block]):>18}: scores {s}, correction {correction:.4f}")
    print(f"{'':>18}  m = {m:.4f}, z = {z:.4f}, o = {o}")

# %% [markdown]
# Look at the corrections. The very first is $e^{-\infty} = 0$: there was nothing to be corrected.
# *starts* scores higher than anything before it, so what two words had added up shrinks to 0.68
# of itself; *journey* itself is higher still, by a little. And the end is what chapter 1 found
# with all six scores at once:

# %%
scores = keys @ query
weights = np.exp(scores) / np.exp(scores).sum()
np.testing.assert_allclose(o / z, weights @ values, rtol=1e-12)
np.testing.assert_allclose(o / z, [0.4419, 0.6515, 0.5683], atol=5e-5)  # as printed there
print(o / z)

# %% [markdown]
# Drawn: what the weights *seem* to be after each block. Every step is an honest softmax of the
# keys so far; new keys take their share from all the others alike.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
for i, (ax, (m_now, z_now, _)) in enumerate(zip(axes, steps, strict=True)):
    so_far = np.where(np.arange(6) < 2 * i + 2, np.exp(scores - m_now) / z_now, 0)
    ax.bar(NAMES, so_far, color=["C1" if j // 2 == i else "C0" for j in range(6)])
    ax.set_title(f"m = {m_now:.3f}, z = {z_now:.3f}")
    ax.tick_params(axis="x", rotation=40)
axes[0].set_ylabel("weight, so far")
figure.suptitle("blue: seen before, orange: the new block")
figure.tight_layout()
np.testing.assert_allclose(so_far, weights)

# %% [markdown]
# The order of the blocks does not matter, and a huge score does no harm, which it does to a softmax
# without the maximum. Let *Your*, in the last block, be a shout:


# %%
def online(scores, values, size):
    """Softmax of a row of scores, times values, `size` of them at a time."""
    m, z, o = -np.inf, 0.0, np.zeros(values.shape[1])
    for start in range(0, len(scores), size):
        s, v = scores[start : start + size], values[start : start + size]
        larger = max(m, s.max())
        p = np.exp(s - larger)
        z = np.exp(m - larger) * z + p.sum()
        o = np.exp(m - larger) * o + p @ v
        m = larger
    return o / z


loud = scores + np.array([0, 0, 0, 0, 0, 1000.0])
with np.errstate(over="ignore", invalid="ignore"):
    print("exponentials as they are:", np.exp(loud) @ values / np.exp(loud).sum())
print("block by block:          ", online(loud, values, 2))
np.testing.assert_allclose(online(loud, values, 2), values[5])
for size in (1, 2, 4, 6):
    np.testing.assert_allclose(online(scores, values, size), weights @ values, rtol=1e-12)
    np.testing.assert_allclose(online(scores[::-1], values[::-1], size), weights @ values)

# %% [markdown]
# ## All rows
#
# Rows do not know of each other, so all queries of a block can go at once: $m$ and $z$ get one
# number a row, $o$ one vector. The library's backend `"blockwise"` is this loop, with blocks that
# fit into the processor's *cache*, the small and fast memory next to it.
#
# Of each row we note down one number more, the logarithm of the sum of its exponentials:
#
# $$L = \log \sum_j e^{s_j} = m + \log z.$$
#
# It is called **log-sum-exp**, and will be of use twice. (Scale 1.0, since chapter 1 had none.)


# %%
def in_blocks(q, k, v, rows, cols):
    """Attention with `rows` x `cols` scores at any time, and the log-sum-exp of each row."""
    out, lse = np.empty((len(q), v.shape[1])), np.empty(len(q))
    for t in range(0, len(q), rows):
        mine = q[t : t + rows]
        m, z = np.full(len(mine), -np.inf), np.zeros(len(mine))
        o = np.zeros((len(mine), v.shape[1]))
        for start in range(0, len(k), cols):
            s = mine @ k[start : start + cols].T  # rows cols
            larger = np.maximum(m, s.max(-1))
            p, correction = np.exp(s - larger[:, None]), np.exp(m - larger)
            z = correction * z + p.sum(-1)
            o = correction[:, None] * o + p @ v[start : start + cols]
            m = larger
        out[t : t + rows], lse[t : t + rows] = o / z[:, None], m + np.log(z)
    return out, lse


out, lse = in_blocks(x, x, x, rows=3, cols=2)
with jax.enable_x64(True):
    one_head = jnp.asarray(x)[:, None]  # T N H
    ours, our_lse = attend(
        one_head, one_head, one_head, scale=1.0, backend="blockwise", return_lse=True
    )
np.testing.assert_allclose(ours[:, 0], out, rtol=1e-12)
np.testing.assert_allclose(our_lse[:, 0], lse, rtol=1e-12)

if HAS_TORCH:
    np.testing.assert_allclose(SimplifiedSelfAttention()(torch.tensor(x)), out, rtol=1e-12)
print(out)

# %% [markdown]
# ## The way back
#
# The gradient of a softmax needs the weights, and we did not keep them. But with one number a
# row, $L$, any block of weights $P$ can be computed again from its queries and keys. So nothing is
# kept but the output and $L$, and the way back walks over the blocks once more. Write $do$ for the
# gradient of the loss with respect to the output $o$, $ds$ for that of the scores, and so on, and
# $\circ$ for the product number by number:
#
# $$P = e^{q k^\top - L}, \qquad dP = do\, v^\top, \qquad
# ds = P \circ (dP - \text{rowsum}(do \circ o)),$$
#
# $$dq = ds\, k, \qquad dk = ds^\top q, \qquad dv = P^\top do.$$
#
# The term with *rowsum* is the only one that looks at a whole row: weights add up to one, so what
# one of them gains the others lose, on average $\sum_j P_j\, dP_j$. And that is $do \cdot o$, for
# which the output is enough.
#
# It is some more arithmetic in return for far less memory. Since one mostly waits for memory, it is
# quicker too.


# %%
def gradients_in_blocks(q, k, v, o, lse, do, cols):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for start in range(0, len(k), cols):
        block = slice(start, start + cols)
        p = np.exp(q @ k[block].T - lse[:, None])  # the weights of these keys, again
        dp = do @ v[block].T
        ds = p * (dp - (do * o).sum(-1, keepdims=True))
        dq += ds @ k[block]
        dk[block] = ds.T @ q
        dv[block] = p.T @ do
    return dq, dk, dv


do = np.random.RandomState(0).standard_normal(out.shape)
by_hand = gradients_in_blocks(x, x, x, out, lse, do, cols=2)

with jax.enable_x64(True):
    for backend in ("reference", "blockwise"):

        def loss(q, k, v, backend=backend):
            o = attend(q[:, None], k[:, None], v[:, None], scale=1.0, backend=backend)
            return (o[:, 0] * do).sum()

        by_jax = jax.grad(loss, argnums=(0, 1, 2))(*[jnp.asarray(x)] * 3)
        for got, want in zip(by_hand, by_jax, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
print("three gradients, by hand, by the plain formula and by the library's blocks: equal")

# %% [markdown]
# ## What nobody sees need not be computed
#
# A mask hides pairs. Where it hides a whole block, the block is skipped: no product, no
# exponential. Where it hides nothing of a block, nobody need look at the mask. Only the blocks on
# the border need both.
#
# Here are 96 tokens in blocks of 8, under four masks: the past (chapter 3); the token itself and 15
# before it; several documents packed into one row, each of which sees itself alone; and the past
# within one's own document. Masks are put together by `&`.

# %%
T, size = 96, 8
ids = jnp.repeat(jnp.arange(4), jnp.array([20, 36, 12, 28]))  # four documents in one row
masks = {
    "Causal()": CAUSAL,
    "Window(15, 0)": Window(15, 0),
    "Segments(ids)": Segments(ids),
    "Causal() & Segments(ids)": CAUSAL & Segments(ids),
}


def block_kinds(mask):
    """0 for a hidden block, 1 for one on the border, 2 for one that is seen as a whole."""
    nothing = jnp.zeros((T, 1, 1))
    seen = np.asarray(attention_weights(nothing, nothing, mask=mask))[0] > 0  # T T
    blocks = seen.reshape(T // size, size, T // size, size)
    return blocks.any((1, 3)).astype(int) + blocks.all((1, 3))


figure, axes = plt.subplots(1, 4, figsize=(11, 3.6), layout="constrained")
colors = ListedColormap(["white", "#fdae6b", "#3182bd"])
for ax, (name, mask) in zip(axes, masks.items(), strict=True):
    kinds = block_kinds(mask)
    ax.pcolormesh(kinds, cmap=colors, vmin=0, vmax=2, edgecolors="lightgray", lw=0.5)
    ax.set(title=f"{name}\n{(kinds > 0).mean():.0%} of the blocks", aspect="equal")
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_xlabel("blocks of keys")
axes[0].set_ylabel("blocks of queries")
figure.suptitle("white: skipped, orange: masked, blue: computed without a look at the mask")
assert (block_kinds(CAUSAL) > 0).sum() == 12 * 13 / 2

# %% [markdown]
# That is why masks are objects in this library and no arrays of T x T booleans: an object can be
# *asked* which keys a block of queries may see. The compiler counts what is left of the
# arithmetic, here for one head and 1,024 tokens:

# %%
one = jax.ShapeDtypeStruct((1024, 1, 64), jnp.float32)
count = {}
for name, mask in {"FULL": FULL, "CAUSAL": CAUSAL, "Window(127, 0)": Window(127, 0)}.items():

    def masked(q, k, v, mask=mask):
        return attend(q, k, v, mask=mask, backend="blockwise")

    count[name] = jax.jit(masked).lower(one, one, one).compile().cost_analysis()["flops"]
    print(f"{name:>15}: {count[name] / 1e6:.0f} million operations")
if jax.default_backend() == "cpu":
    assert count["Window(127, 0)"] < count["CAUSAL"] < count["FULL"]

# %% [markdown]
# ## Which way does it take? `explain`
#
# `attend` has more backends than these two. All are held to the same answers, and each says for
# itself what it can serve. `explain` takes the arguments of `attend`, computes nothing, and prints
# what every backend says, in the order in which they are tried. (`assume_platform` asks as if for
# another machine, so that this page reads alike on all.)

# %%
small, long = jnp.ones((6, 4, 64)), jnp.ones((1024, 4, 64))
with assume_platform("cpu"):
    print(explain(small, small, small, mask=CAUSAL))
    print()
    print(explain(long, long, long, mask=CAUSAL))
    assert explain(small, small, small).chosen == "reference"
    assert explain(long, long, long).chosen == "blockwise"

# %% [markdown]
# Line by line:
#
# * **cudnn**, **tokamax** and **splash** are *kernels*: programs written for one kind of device,
#   NVIDIA's GPUs or Google's TPUs. Each refuses and gives the reason: this is a CPU, or the kernel
#   is not installed.
# * **blockwise** is this chapter, in plain JAX. It *could* serve six words, but is passed over:
#   there the plain formula is as quick.
# * **reference** is the plain formula. It serves everything and is asked last.
# * **chosen** is the first that neither refuses nor is passed over.
#
# Now as if for an H100, a large NVIDIA GPU (9.0 is the number of its generation). There one usually
# computes in `bfloat16`: two bytes a number, about three digits.

# %%
half = long.astype(jnp.bfloat16)
with assume_platform("gpu", (9, 0)):
    print(explain(half, half, half, mask=CAUSAL))

# %% [markdown]
# Two requests that cuDNN cannot serve. The first has a *softcap*: some models bend every score to
# $c \tanh(s / c)$, so that none is larger than $c$. The second has plain float32 numbers.

# %%
with assume_platform("gpu", (9, 0)):
    capped = explain(half, half, half, mask=CAUSAL, score=Softcap(30.0))
    exact = explain(long, long, long, mask=CAUSAL)
print(capped, exact, sep="\n\n")
assert capped.chosen != "cudnn" and exact.chosen != "cudnn"

# %% [markdown]
# Nobody rounds your numbers or drops your softcap to be quick. A backend that would have to,
# refuses.
#
# ## Choosing yourself
#
# `attend(..., backend=...)` chooses for one call. `use_backend` does it for all calls inside,
# layers included. The answers stay the same, and what cannot be served is refused aloud.

# %%
layer = TransformerMultiHeadAttention(48, 4, rngs=nnx.Rngs(0))
tokens = jax.random.normal(jax.random.key(0), (2, 300, 48))

with use_backend("reference"):
    first = layer(tokens, mask=CAUSAL)
with use_backend("blockwise"):
    second = layer(tokens, mask=CAUSAL)
np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)

with assume_platform("cpu"), use_backend("cudnn"):
    try:
        layer(tokens)
    except NotImplementedError as refusal:
        print(refusal)
    else:
        raise AssertionError("cudnn cannot run there")

# %% [markdown]
# ## The clock
#
# The plain formula, written out, against the blocks, causal, eight heads of width 64. The first
# call compiles and is not counted. Then the two take turns, and we keep the quickest call of each,
# the one that other programs disturbed least. These are the times of the machine that made this
# page, taken in a few seconds: with you the numbers will be others, and may jump.


# %%
def quickest(contenders, inputs, rounds):
    """The least time of each function, in seconds; they take turns."""
    found = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, function in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            if turn:  # the first call compiles
                found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}


def plain_causal(q, k, v):  # T N H
    scores = jnp.einsum("tnh,snh->nts", q, k) / q.shape[-1] ** 0.5  # N T S
    past = jnp.tril(jnp.ones(scores.shape[1:], bool))[None]
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
    return jnp.einsum("nts,snh->tnh", weights, v)  # T N H


def blockwise_causal(q, k, v):  # T N H
    return attend(q, k, v, mask=CAUSAL, backend="blockwise")


steps_timed = {
    "forward": {"plain": jax.jit(plain_causal), "blockwise": jax.jit(blockwise_causal)},
    "with gradients": {
        "plain": jax.jit(both_ways(plain_causal)),
        "blockwise": jax.jit(both_ways(blockwise_causal)),
    },
}
lengths_timed = [256, 512, 1024, 2048]
clock = {kind: [] for kind in steps_timed}
for T in lengths_timed:
    inputs = jax.random.normal(jax.random.key(T), (3, T, 8, 64))
    results = [f(*inputs) for f in steps_timed["forward"].values()]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)  # equal before they are timed
    for kind, contenders in steps_timed.items():
        clock[kind].append(quickest(contenders, inputs, rounds=max(7, 16_384 // T)))

for kind, found in clock.items():
    print(f"{kind}, the plain formula's time over that of the blocks:")
    for T, times in zip(lengths_timed, found, strict=True):
        print(f"  T = {T:>5}: {times['plain'] / times['blockwise']:.1f}x")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
for ax, (kind, found) in zip(axes, clock.items(), strict=True):
    for name in ("plain", "blockwise"):
        ax.loglog(lengths_timed, [1e3 * t[name] for t in found], "o-", label=name)
    square = 1e3 * found[-1]["blockwise"] * (np.array(lengths_timed) / lengths_timed[-1]) ** 2
    ax.loglog(lengths_timed, square, ":", color="gray", label="grows with the square of T")
    ax.set_xticks(lengths_timed, [f"{T:,}" for T in lengths_timed])
    ax.minorticks_off()
    ax.set(xlabel="T = S", title=kind)
axes[0].set_ylabel("milliseconds")
axes[0].legend(loc="upper left")
figure.tight_layout()

# %% [markdown]
# Some of it is the half of the pairs that the blocks skip. The rest is traffic: the table is
# written and read several times over, while a block stays in the cache until it is used up. And
# both lines climb with the square of T in the end, for the *arithmetic* is still quadratic. That is
# the point of fast attention: not other numbers, not fewer pairs, but no large array.
#
# ## The benchmark
#
# Timing on a shared machine is a craft of its own. The command `flax-attn bench` does it with care:
# all contenders are proven equal in float64 first, and take turns in another order each round.
# These are figures that it gave on two cores of a CPU: causal, two heads of width 64, float32, and
# the longer a sentence, the fewer of them. How many times as long as this library do JAX's own
# `jax.nn.dot_product_attention` and PyTorch take? Where a line ends, a call would have taken too
# long.

# %%
lengths_bench = [256, 512, 1024, 2048, 4096, 8192, 16_384]
recorded = {
    "jax.nn, forward": [3.39, 3.66, 6.41, 5.41, 6.05, 9.72],
    "jax.nn, with gradients": [2.75, 4.59, 9.37, 10.0, 8.69],
    "PyTorch, forward": [0.943, 1.39, 2.01, 1.35, 1.09, 1.2, 1.26],
    "PyTorch, with gradients": [1.17, 1.72, 1.85, 1.46, 1.22, 1.6, 1.2],
}
figure, ax = plt.subplots(figsize=(8, 3.4))
for (name, ratios), style in zip(recorded.items(), ("C0o-", "C0s--", "C1o-", "C1s--"), strict=True):
    ax.semilogx(lengths_bench[: len(ratios)], ratios, style, label=name)
ax.axhline(1, color="gray", lw=1)
ax.text(lengths_bench[-1], 0.85, "flax_attn", color="gray", ha="right", va="top")
ax.set_xticks(lengths_bench, [f"{T:,}" for T in lengths_bench])
ax.minorticks_off()
ax.set(xlabel="T = S", ylabel="time over that of flax_attn", ylim=(0, 11))
ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
figure.tight_layout()

# %% [markdown]
# PyTorch works block by block too, so it is close. [docs/benchmarks.md](../docs/benchmarks.md) has
# all tables, the rows where this library is behind among them, and what was tried and did not help.
#
# ## Exercise
#
# A text is so long that its keys and values lie on two machines, half on each. Each can answer
# `attend(q, its_keys, its_values, return_lse=True)`. Put the two answers together, without moving
# a key.
#
# <details><summary>Answer</summary>
#
# Each half's log-sum-exp says how much weight it has in all: the halves are two "keys" with the
# scores $L_1$ and $L_2$. So take a softmax over the two, and mix the outputs:
#
# $$o = e^{L_1 - L}\, o_1 + e^{L_2 - L}\, o_2, \qquad L = \log(e^{L_1} + e^{L_2}).$$
#
# ```python
# q, k, v = jax.random.normal(jax.random.key(1), (3, 400, 4, 64))
# (o1, l1), (o2, l2) = (
#     attend(q, k[part], v[part], return_lse=True) for part in (slice(0, 150), slice(150, None))
# )
# share = jax.nn.softmax(jnp.stack([l1, l2]), axis=0)[..., None]  # 2 T N 1
# both = share[0] * o1 + share[1] * o2  # T N H
# np.testing.assert_allclose(both, attend(q, k, v), rtol=1e-4, atol=1e-6)
# ```
#
# It is the online softmax again, with blocks that happen to live far apart, and it works for any
# number of machines.
#
# </details>
#
# ## The top of the climb
#
# You began with six words and a dot product. You have given it weights, covered the future, split
# it into heads, put it into a recurrent model, trained a small GPT with it, carried it over from
# PyTorch, and computed it without its table. All of it was one formula:
#
# $$\text{softmax}\Big(\frac{q k^\top}{\sqrt{H}} + \text{mask}\Big)\, v.$$
#
# Where to go from here:
#
# * [the README](../README.md): what the library holds, and the table of what is proven;
# * [docs/recipes.md](../docs/recipes.md): a layer of your own, padding, mixed precision, saving,
#   exporting, moving over from other libraries, each in one piece that runs;
# * [docs/porting.md](../docs/porting.md): bring a module of your own from PyTorch, and prove it;
# * the layers themselves, in `flax_attn/layers`: one variant a file, each as short as what you
#   wrote here.
#
# Or back to the foot: [1. Attention without weights](01_attention_without_weights.ipynb).
