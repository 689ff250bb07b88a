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
# *22 minutes to read, 2 minutes to run on a quiet machine with two cores.*
# [Quadratic memory](#What-quadratic-memory-is) ·
# [One row](#One-row-never-seen-as-a-whole) ·
# [All rows](#All-rows) ·
# [Gradients](#Gradients-without-stored-weights) ·
# [Masks](#What-the-mask-hides-is-not-computed) ·
# [Backends](#Which-backend-runs) ·
# [Times](#Times) ·
# [Exercises](#Exercises)
#
# The formula of all these chapters has one large array: the weights, one number for every pair of
# tokens. With twice the text it is four times as large. It is written, read again, and thrown away.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

# %%
N, H = 12, 64
lengths = 2 ** np.arange(7, 18)
table = 4.0 * N * lengths**2
lists = 4.0 * N * H * 4 * lengths
fig, ax = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
ax.loglog(lengths, table, "o-", label="the weights, T x S")
ax.loglog(lengths, lists, "o-", label="queries, keys, values, output")
ax.axhline(80e9, color="gray", ls="--")
ax.text(lengths[0], 100e9, "a large GPU, 80 GB", color="gray")
ax.set_xticks([128, 1024, 8192, 65_536], ["128", "1,024", "8,192", "65,536"])
ax.set(xlabel="T = S tokens", ylabel="bytes of one layer, float32")
ax.minorticks_off()
ax.set_title("The table of weights outgrows everything else")
ax.legend()
plt.show()

# %% [markdown]
# The picture shows one layer with 12 heads of width 64, as in GPT-2's smallest model. This chapter
# computes the same function without ever storing the table.
#
# At the end you will understand
#
# * what "quadratic memory" is, in bytes;
# * the **online softmax**: how to take a softmax of a row that you never see as a whole;
# * how to compute the gradient without storing the attention weights;
# * which blocks of a mask need not be computed at all;
# * how to ask this library which backend it uses, and why: `explain` and `use_backend`.
#
# The six words of chapter 1, `tokens` and `x`, come from `climb.py`, a small file beside these
# notebooks, as do `diagram`, which draws boxes, and `same`, which compares two arrays.

# %%
from climb import HAS_TORCH, diagram, same, tokens, x

# %% [markdown]
# ## What quadratic memory is
#
# Queries and the output are lists of T vectors, keys and values are lists of S vectors. Their size
# grows with the text. The weights are a table of T rows and S columns, one table for each head.
# With $N$ heads of width $H$, and four bytes a number, that is
#
# $$\text{bytes} = 4 \cdot N \cdot T \cdot S \qquad \text{against} \qquad
# 4 \cdot N \cdot H \cdot (2\,T + 2\,S).$$
#
# Here are some points of the picture at the top, with N = 12 heads of width H = 64.

# %%
for T, a, b in zip(lengths, table, lists, strict=True):
    if T in (1024, 8192, 131_072):
        print(f"T = {T:>6}: weights {a / 1e9:>8.2f} GB, all the rest {b / 1e9:.2f} GB")

# %% [markdown]
# At 256 tokens the two are equal. Beyond that the table is larger. And a model in training keeps
# the table of every layer until its gradient is computed.
#
# ### Measured
#
# The compiler behind `jit` knows how much temporary memory a program will need before it runs. So
# nothing has to be run here: we compile for a shape (`jax.ShapeDtypeStruct`), and ask.
#
# `attend` is the one function below most layers of this library. There are several ways to compute
# it, its **backends**. `"reference"` is the plain formula, with the table. `"blockwise"` is what
# this chapter is about.


# %%
from flax_attn import attend


def plain(q, k, v):  # T N H
    return attend(q, k, v, backend="reference")


# %%
def blockwise(q, k, v):  # T N H
    return attend(q, k, v, backend="blockwise")


# %%
def both_ways(attention):
    """The output's sum and its gradients: one step of training."""
    return jax.value_and_grad(lambda *x: attention(*x).sum(), argnums=(0, 1, 2))


# %%
def scratch(function, T):
    """Bytes of temporary memory that the compiled function needs, for four heads of width 64."""
    x = jax.ShapeDtypeStruct((T, 4, 64), jnp.float32)
    return jax.jit(function).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


# %%
some = [1024, 2048, 4096, 8192, 16_384]
needs = {
    "plain, forward": [scratch(plain, T) for T in some],
    "plain, with gradients": [scratch(both_ways(plain), T) for T in some],
    "blockwise, forward": [scratch(blockwise, T) for T in some],
    "blockwise, with gradients": [scratch(both_ways(blockwise), T) for T in some],
}

# %%
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
# works on several blocks at once. That is quicker and takes some memory, though only a fraction of
# the table. Longer texts go through a loop, one block at a time. From there on, memory grows as T
# does: twice the text, twice the bytes.

# %%
for kind in ("forward", "with gradients"):
    plainly, blocks = np.array(needs[f"plain, {kind}"]), np.array(needs[f"blockwise, {kind}"])
    assert plainly[-1] > 3.5 * plainly[-2]
    assert blocks[-1] < 2.5 * blocks[-2] and plainly[-1] > 30 * blocks[-1]

# %% [markdown]
# ## One row never seen as a whole
#
# How is that possible? A softmax needs the whole row: its largest number, to be safe, and the sum
# of all exponentials. Let us take the six words of [chapter 1](01_attention_without_weights.ipynb)
# again, and the query *journey*, and look at only **two keys at a time**. We begin with the last
# word, to show that any order will do.

# %%
x = np.asarray(x, np.float64).round(2)  # T D, in 64 bits
query, keys, values = x[1], x[::-1], x[::-1]  # the last word first: any order will do
NAMES = tokens[::-1]

# %% [markdown]
# For what has been seen so far we keep three things: the largest score $m$, the sum $z$ of the
# exponentials, and the sum $o$ of the values, each times its exponential. Both sums are taken
# **relative to the largest score so far**: $e^{s - m}$ in place of $e^s$. For each new block of
# scores $s_j$ with values $v_j$ these three are updated
# ([Milakov and Gimelshein](https://arxiv.org/abs/1805.02867), 2018):
#
# $$m' = \max(m, \max_j s_j), \qquad
# z' = e^{m - m'}\, z + \sum_j e^{s_j - m'}, \qquad
# o' = e^{m - m'}\, o + \sum_j e^{s_j - m'}\, v_j.$$
#
# When a larger score comes, everything so far was measured against the wrong maximum. One factor,
# $e^{m - m'}$, corrects it. At the end $o / z$ is the context vector. (The papers call it the
# output, and so it has the letter $o$.)

# %%
from itertools import pairwise

blocks = ["step\none", "with\nstarts", "journey\nYour"]
boxes = {"m, z, o\nempty": (0, 0, "lightsteelblue")}
arrows = []
for n, block in enumerate(blocks, 1):
    boxes[block] = (1.7 * n, 0.9, "navajowhite")
    boxes[f"m, z, o\nafter {2 * n} keys"] = (1.7 * n, 0, "lightsteelblue")
    arrows += [(block, f"m, z, o\nafter {2 * n} keys")]
states = [name for name in boxes if name.startswith("m, z, o")]
boxes["o / z"] = (6.6, 0, "palegreen")
arrows += [*pairwise(states), (states[-1], "o / z")]
diagram(boxes, arrows, size=(8.4, 1.9), title="Two keys at a time, and three things are kept")

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
# Look at the corrections. The first one is $e^{-\infty} = 0$: there was nothing to correct.
# *Starts* has a higher score than anything before it, so the sums of two words are multiplied by
# 0.68. *Journey* itself is a little higher still. The result is what chapter 1 found with all six
# scores at once:

# %%
scores = keys @ query
weights = np.exp(scores) / np.exp(scores).sum()
print(o / z)
same(o / z, weights @ values, within=1e-12)

# %% [markdown]
# The picture shows the weights after each block. Every step is the softmax of the keys so far. New
# keys take their share from all the others in the same proportion.

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
# As a function, for blocks of any size:


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


# %%
same(online(scores, values, 1), weights @ values, within=1e-12)
same(online(scores[::-1], values[::-1], 4), weights @ values, within=1e-12)

# %% [markdown]
# > **Try it.** Print `online(scores, values, 6)`. How many corrections does it need?
#
# <details><summary>Answer</summary>
#
# ```python
# print(online(scores, values, 6))
# same(online(scores, values, 6), weights @ values, within=1e-12)
# ```
#
# None. All six scores are in one block, so its maximum is that of the row. The only factor,
# $e^{-\infty} = 0$, is applied to sums that are still zero. It is the usual softmax.
#
# </details>
#
# A very large score does no harm, as it would to a softmax without the maximum. Let *Your*, in the
# last block, have one.

# %%
loud = scores + np.array([0, 0, 0, 0, 0, 1000.0])
with np.errstate(over="ignore", invalid="ignore"):
    print("exponentials as they are:", np.exp(loud) @ values / np.exp(loud).sum())
print("block by block:          ", online(loud, values, 2))
same(online(loud, values, 2), values[5])

# %% [markdown]
# ## All rows
#
# Rows do not depend on each other, so a block of queries can go at once: $m$ and $z$ get one number
# for each row, and $o$ one vector. The library's backend `"blockwise"` is this loop, with blocks
# that fit into the processor's *cache*, a small and fast memory.
#
# Rabe and Staats, [Self-attention Does Not Need O(n²) Memory](https://arxiv.org/abs/2112.05682)
# (2021), computed attention in this way in JAX, and its gradient too, by computing each block
# again.
# [FlashAttention](https://arxiv.org/abs/2205.14135) (Dao and others, 2022) made it one kernel for
# GPUs, in which a block never leaves the fast memory of the chip. That made it quicker than the
# plain formula, too.
#
# We keep one more number for each row, the logarithm of the sum of its exponentials:
#
# $$L = \log \sum_j e^{s_j} = m + \log z.$$
#
# It is called **log-sum-exp**, and we will need it for the gradients and in an exercise. (The scale
# is 1.0, because chapter 1 did not scale.)


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


# %%
out, lse = in_blocks(x, x, x, rows=3, cols=2)
with jax.enable_x64(True):
    one_head = jnp.asarray(x)[:, None]  # T N H
    ours, our_lse = attend(
        one_head, one_head, one_head, scale=1.0, backend="blockwise", return_lse=True
    )
same(ours[:, 0], out, within=1e-12)
same(our_lse[:, 0], lse, within=1e-12)
print(out)

# %%
if HAS_TORCH:
    import torch

    from torch_ref.simplified_self_attention import SimplifiedSelfAttention

    same(SimplifiedSelfAttention()(torch.tensor(x)), out, within=1e-12)

# %% [markdown]
# ## Gradients without stored weights
#
# The gradient of a softmax needs the weights, and we did not store them. But with the one number
# $L$ for each row, any block of weights $w$ can be computed again from its queries and keys. So
# only the output and $L$ are stored, and the gradient goes over the blocks once more. Write $do$
# for the gradient of the loss with respect to the output $o$, $ds$ for that of the scores, and so
# on: each is one name, not a product. Three lines of the chain rule lead to it. Take one row,
# with the scores $s_j = q \cdot k_j$, the weights $w_j = e^{s_j - L}$ and the output $o = \sum_j
# w_j v_j$. The first line is the output's own derivative. The second puts in that of the softmax,
# $\partial w_j / \partial s_i = w_j (\delta_{ij} - w_i)$, which
# [chapter 2](02_trainable_weights.ipynb) has with $i$ and $j$ in each other's place;
# $\delta_{ij}$ is 1 where $i = j$, else 0. The third puts the first into the sum of the second:
#
# $$dw_j = do \cdot v_j, \qquad dv_j = w_j\, do,$$
#
# $$ds_i = \sum_j dw_j\, w_j (\delta_{ij} - w_i) = w_i \Big(dw_i - \sum_j w_j\, dw_j\Big),$$
#
# $$D = \sum_j w_j\, dw_j = \sum_j w_j\, (do \cdot v_j) = do \cdot o.$$
#
# So $ds_i = w_i (dw_i - D)$. Two numbers depend on the whole row: $L$, which is stored, and $D$,
# for which the output is enough. Since $s_j = q \cdot k_j$, the rest is $dq = \sum_j ds_j\, k_j$
# and $dk_j = ds_j\, q$; a key is used by every row, so its $dk_j$ and $dv_j$ are sums over the
# rows. For all rows at once, with $L$ and $D$ as columns and $\circ$ for the product number by
# number:
#
# $$w = e^{q k^\top - L}, \qquad D = \text{rowsum}(do \circ o), \qquad
# ds = w \circ (do\, v^\top - D),$$
#
# $$dq = ds\, k, \qquad dk = ds^\top q, \qquad dv = w^\top do.$$
#
# With scores scaled by $c$, as in a layer, $dq$ and $dk$ get the factor $c$ too.
#
# This takes a little more arithmetic and far less memory. Since a processor mostly waits for
# memory, it is quicker too.


# %%
def gradients_in_blocks(q, k, v, o, lse, do, cols):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    D = (do * o).sum(-1, keepdims=True)  # T 1
    for start in range(0, len(k), cols):
        block = slice(start, start + cols)
        w = np.exp(q @ k[block].T - lse[:, None])  # the weights of these keys, again
        ds = w * (do @ v[block].T - D)
        dq += ds @ k[block]
        dk[block] = ds.T @ q
        dv[block] = w.T @ do
    return dq, dk, dv


# %%
do = np.random.RandomState(0).standard_normal(out.shape)
by_hand = gradients_in_blocks(x, x, x, out, lse, do, cols=2)


# %%
def loss(q, k, v, backend):
    o = attend(q[:, None], k[:, None], v[:, None], scale=1.0, backend=backend)
    return (o[:, 0] * do).sum()


# %% [markdown]
# We compare with the gradients that JAX computes, of the plain formula and of the library's blocks.

# %%
with jax.enable_x64(True):
    for backend in ("reference", "blockwise"):
        by_jax = jax.grad(loss, argnums=(0, 1, 2))(*[jnp.asarray(x)] * 3, backend)
        same(by_hand, by_jax, within=1e-12)

# %% [markdown]
# ## What the mask hides is not computed
#
# A mask hides pairs. If it hides a whole block, the block is skipped: no product and no exponential
# are computed. If it hides nothing of a block, the mask itself need not be computed there. Only the
# blocks on the border need both.
#
# Here are 96 tokens in blocks of 8, with four masks: the past (chapter 3); the token itself and the
# 15 before it; several documents packed into one row, each of which sees only itself; and the past
# within the same document. `&` combines masks.

# %%
from flax_attn import CAUSAL, Segments, Softcap, Window

ids = jnp.repeat(jnp.arange(4), jnp.array([20, 36, 12, 28]))  # four documents in one row
masks = {
    "Causal()": CAUSAL,
    "Window(15, 0)": Window(15, 0),
    "Segments(ids)": Segments(ids),
    "Causal() & Segments(ids)": CAUSAL & Segments(ids),
}


# %%
from flax_attn import attention_weights


def block_kinds(mask, T=96, size=8):
    """0 for a hidden block, 1 for one on the border, 2 for one that is seen as a whole."""
    nothing = jnp.zeros((T, 1, 1))
    seen = np.asarray(attention_weights(nothing, nothing, mask=mask))[0] > 0  # T T
    blocks = seen.reshape(T // size, size, T // size, size)
    return blocks.any((1, 3)).astype(int) + blocks.all((1, 3))


# %%
from matplotlib.colors import ListedColormap

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
figure.suptitle("white: skipped, orange: masked, blue: computed without the mask")
plt.show()

# %%
assert (block_kinds(CAUSAL) > 0).sum() == 12 * 13 / 2

# %% [markdown]
# > **Try it.** Draw `Window(15, 15)`, a window to both sides.
#
# <details><summary>Answer</summary>
#
# ```python
# kinds = block_kinds(Window(15, 15))
# fig, ax = plt.subplots(figsize=(3, 3), layout="constrained")
# ax.pcolormesh(kinds, cmap=colors, vmin=0, vmax=2, edgecolors="lightgray", lw=0.5)
# ax.invert_yaxis()
# plt.show()
# assert [int((kinds == kind).sum()) for kind in range(3)] == [90, 20, 34]
# ```
#
# A band to both sides of the diagonal. Of the 144 blocks 34 are computed without the mask, 20 with
# it, and 90 are skipped. A longer text makes the band longer and no wider, so the work grows with T
# and not with its square.
#
# </details>
#
# That is why masks are objects in this library, and not arrays of T x T booleans: an object can
# tell which keys a block of queries may see. The compiler counts the arithmetic that is left, here
# for one head and 1,024 tokens:

# %%
from flax_attn import FULL

one = jax.ShapeDtypeStruct((1024, 1, 64), jnp.float32)
count = {}
for name, mask in {"FULL": FULL, "CAUSAL": CAUSAL, "Window(127, 0)": Window(127, 0)}.items():

    def masked(q, k, v, mask=mask):
        return attend(q, k, v, mask=mask, backend="blockwise")

    count[name] = jax.jit(masked).lower(one, one, one).compile().cost_analysis()["flops"]
    print(f"{name:>15}: {count[name] / 1e6:.0f} million operations")

# %%
if jax.default_backend() == "cpu":
    assert count["Window(127, 0)"] < count["CAUSAL"] < count["FULL"]

# %% [markdown]
# ## Which backend runs
#
# `attend` has more backends than these two. All of them have to give the same results, and each one
# says what it can compute. `explain` takes the arguments of `attend`, computes nothing, and prints
# what every backend says, in the order in which they are tried. (`assume_platform` asks as if on
# another machine, so that this page is the same on all machines.)

# %%
from flax_attn import assume_platform, explain

small, long = jnp.ones((6, 4, 64)), jnp.ones((1024, 4, 64))
with assume_platform("cpu"):
    few = explain(small, small, small, mask=CAUSAL)
    many = explain(long, long, long, mask=CAUSAL)
print(few, many, sep="\n\n")
assert (few.chosen, many.chosen) == ("reference", "blockwise")

# %% [markdown]
# Line by line:
#
# * **cudnn**, **tokamax** and **splash** are *kernels*: programs written for one kind of device,
#   NVIDIA's GPUs or Google's TPUs. Each refuses and gives the reason: this is a CPU, or the kernel
#   is not installed.
# * **pallas** is a kernel of this library for GPUs. It runs only where you ask for it by name.
# * **blockwise** is this chapter, in plain JAX. It *could* compute six words, but it is passed
#   over, because the plain formula is as quick there.
# * **reference** is the plain formula. It can compute everything and is tried last.
# * **chosen** is the first that neither refuses nor is passed over.
#
# Now we ask as if on an H100, a large NVIDIA GPU (9.0 is the number of its generation). There one
# usually computes in `bfloat16`: two bytes a number, about three digits.

# %%
half = long.astype(jnp.bfloat16)
with assume_platform("gpu", (9, 0)):
    print(explain(half, half, half, mask=CAUSAL))

# %% [markdown]
# > **Try it.** What does `explain` say for `small` in `bfloat16` on the same GPU? And for
# > `assume_platform("tpu")`?
#
# <details><summary>Answer</summary>
#
# ```python
# tiny = small.astype(jnp.bfloat16)
# with assume_platform("gpu", (9, 0)):
#     on_gpu = explain(tiny, tiny, tiny, mask=CAUSAL)
# with assume_platform("tpu"):
#     on_tpu = explain(tiny, tiny, tiny, mask=CAUSAL)
#     long_on_tpu = explain(half, half, half, mask=CAUSAL)
# print(on_gpu, on_tpu, sep="\n\n")
# assert (on_gpu.chosen, on_tpu.chosen) == ("reference", "reference")
# assert long_on_tpu.chosen == "splash"
# ```
#
# On both machines `reference` is chosen. The GPU's kernel `cudnn` could compute six words, but it
# is passed over: for a table of 6 x 6 weights the plain formula is as quick. On a TPU `cudnn`
# refuses, since there is no NVIDIA GPU, and `splash` is passed over for the same reason. With 1,024
# words `splash` is chosen there.
#
# </details>
#
# Here are two requests that cuDNN cannot compute. The first has a *softcap*: some models replace
# every score by $c \tanh(s / c)$, so that none is larger than $c$. The second has float32 numbers.

# %%
with assume_platform("gpu", (9, 0)):
    capped = explain(half, half, half, mask=CAUSAL, score=Softcap(30.0))
    exact = explain(long, long, long, mask=CAUSAL)
print(capped, exact, sep="\n\n")
assert capped.chosen != "cudnn" and exact.chosen != "cudnn"

# %% [markdown]
# No backend rounds your numbers or ignores your softcap to be quick. If it would have to, it
# refuses.
#
# ### Choosing yourself
#
# `attend(..., backend=...)` chooses for one call. `use_backend` chooses for all calls inside its
# block, in layers too. The results stay the same, and a backend that cannot compute something
# raises an error.

# %%
from flax import nnx

from flax_attn import TransformerMultiHeadAttention, use_backend

layer = TransformerMultiHeadAttention(48, 4, rngs=nnx.Rngs(0))
text = jax.random.normal(jax.random.key(0), (2, 300, 48))

# %%
with use_backend("reference"):
    first = layer(text, mask=CAUSAL)
with use_backend("blockwise"):
    second = layer(text, mask=CAUSAL)
same(first, second)

# %%
with assume_platform("cpu"), use_backend("cudnn"):
    try:
        layer(text)
    except NotImplementedError as refusal:
        print(refusal)
    else:
        raise AssertionError("cudnn cannot run there")

# %% [markdown]
# ## Times
#
# We compare the plain formula, written out, with the blocks: causal, eight heads of width 64. The
# first call compiles and is not counted. Then the two take turns, and we keep the quickest call of
# each, the one that other programs disturbed least. The times are those of the machine that made
# this page, measured in a few seconds. Yours will be different.


# %%
import time


def quickest(competitors, inputs, rounds):
    """The least time of each function, in seconds; they take turns."""
    found = {name: [] for name in competitors}
    for turn in range(rounds + 1):
        for name, function in competitors.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            if turn:  # the first call compiles
                found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}


# %%
def plain_causal(q, k, v):  # T N H
    scores = jnp.einsum("tnh,snh->nts", q, k) / q.shape[-1] ** 0.5  # N T S
    past = jnp.tril(jnp.ones(scores.shape[1:], bool))[None]
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
    return jnp.einsum("nts,snh->tnh", weights, v)  # T N H


# %%
def blockwise_causal(q, k, v):  # T N H
    return attend(q, k, v, mask=CAUSAL, backend="blockwise")


# %%
steps_timed = {
    "forward": {"plain": jax.jit(plain_causal), "blockwise": jax.jit(blockwise_causal)},
    "with gradients": {
        "plain": jax.jit(both_ways(plain_causal)),
        "blockwise": jax.jit(both_ways(blockwise_causal)),
    },
}

# %%
lengths_timed = [256, 512, 1024, 2048]
clock = {kind: [] for kind in steps_timed}
for T in lengths_timed:
    inputs = jax.random.normal(jax.random.key(T), (3, T, 8, 64))
    results = [f(*inputs) for f in steps_timed["forward"].values()]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)  # equal before they are timed
    for kind, competitors in steps_timed.items():
        clock[kind].append(quickest(competitors, inputs, rounds=max(7, 16_384 // T)))

# %%
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
# Part of the gain is the half of the pairs that the blocks skip. The rest is memory traffic: the
# table is written and read several times, while a block stays in the cache until it is used. In the
# end both lines grow with the square of T, because the *arithmetic* is still quadratic. That is the
# point of fast attention: the same numbers for the same pairs, but no large array.
#
# ### The benchmark
#
# The command `flax-attn bench` measures with more care: all competitors are proven equal in float64
# first, and they take turns in another order in each round. These are figures that it gave on two
# cores of a CPU: causal, two heads of width 64, float32. How many times as long as this library do
# JAX's own `jax.nn.dot_product_attention` and PyTorch take? Where a line ends, a call would have
# taken too long.

# %%
lengths_bench = [256, 512, 1024, 2048, 4096, 8192, 16_384]
recorded = {
    "jax.nn, forward": [3.39, 3.66, 6.41, 5.41, 6.05, 9.72],
    "jax.nn, with gradients": [2.75, 4.59, 9.37, 10.0, 8.69],
    "PyTorch, forward": [0.943, 1.39, 2.01, 1.35, 1.09, 1.2, 1.26],
    "PyTorch, with gradients": [1.17, 1.72, 1.85, 1.46, 1.22, 1.6, 1.2],
}

# %%
figure, ax = plt.subplots(figsize=(8, 3.4))
for (name, ratios), style in zip(recorded.items(), ("C0o-", "C0s--", "C1o-", "C1s--"), strict=True):
    ax.semilogx(lengths_bench[: len(ratios)], ratios, style, label=name)
ax.axhline(1, color="gray", lw=1)
ax.text(lengths_bench[-1], 0.85, "flax_attn", color="gray", ha="right", va="top")
ax.set_xticks(lengths_bench, [f"{T:,}" for T in lengths_bench])
ax.minorticks_off()
ax.set(xlabel="T = S", ylabel="time over that of flax_attn", ylim=(0, 11))
ax.set_title("Above 1 is slower than flax_attn")
ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
figure.tight_layout()

# %% [markdown]
# PyTorch works block by block too, so it is close. [docs/benchmarks.md](../docs/benchmarks.md) has
# links to all tables, also to those rows where this library is slower.
#
# ## Exercises
#
# **1.** A text is so long that its keys and values are on two machines, a part on each. Each
# machine can compute `attend(q, its_keys, its_values, return_lse=True)`. Combine the two results,
# without moving a key.
#
# <details><summary>Answer</summary>
#
# The log-sum-exp of each part says how much weight it has in all: the parts are two "keys" with the
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
# same(both, attend(q, k, v))
# ```
#
# It is the online softmax again, with blocks that are on different machines, and it works for any
# number of them.
#
# </details>
#
# **2.** How many blocks of a causal mask are skipped, masked, and computed without the mask, if 96
# tokens are cut into blocks of 16? Guess, then count. What happens to the share of skipped blocks
# as blocks get smaller?
#
# <details><summary>Answer</summary>
#
# ```python
# kinds = block_kinds(CAUSAL, size=16)
# assert [int((kinds == kind).sum()) for kind in range(3)] == [15, 6, 15]
# ```
#
# With $n$ blocks in a row, $n(n-1)/2$ are skipped, $n$ are on the border, and the rest is seen as a
# whole. The share that is skipped, $(n-1)/2n$, approaches one half.
#
# </details>
#
# **To read:** Milakov and Gimelshein,
# [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867); Rabe and Staats,
# [Self-attention Does Not Need O(n²) Memory](https://arxiv.org/abs/2112.05682); Dao and others,
# [FlashAttention](https://arxiv.org/abs/2205.14135).
#
# Next: [9. What today's models changed](09_what_todays_models_changed.ipynb), six published models
# and what each of them changed in the formula.
