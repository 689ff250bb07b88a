# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Looking back only
#
# *27 minutes to read, 20 seconds to run on a quiet machine with two cores.*
# [The average of the past](#The-average-of-the-past) ·
# [A head that chooses](#A-head-that-chooses) ·
# [Where tokens talk](#Where-tokens-talk) ·
# [Two ways to cover the future](#Two-ways-to-cover-the-future) ·
# [Masks](#Writing-the-mask-down) ·
# [Dropout](#Dropout) ·
# [The class](#The-class) ·
# [Buffers](#What-is-stored-and-what-is-computed) ·
# [Exercises](#Exercises)
#
# A model that writes text guesses the next word from the words so far. While it learns, the whole
# sentence lies in front of it, so the words that come later have to be covered.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
tokens = "Your journey starts with one step".split()
titles = "Chapters 1 and 2: every word sees all words", "Here: dotted lines are hidden"
fig, axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for ax, title in zip(axes, titles, strict=True):
    for t, j in np.ndindex(6, 6):  # word t below looks at word j above
        is_hidden = ax is axes[1] and j > t
        look = {"color": "0.6", "ls": ":"} if is_hidden else {"color": "tab:blue", "alpha": 0.6}
        ax.plot([t, j], [0, 1], lw=1.5, **look)
    for j, token in enumerate(tokens):
        ax.text(j, 1.1, token, ha="center")
        ax.text(j, -0.1, token, ha="center", va="top")
    ax.set(ylim=(-0.3, 1.3), title=title)
    ax.axis("off")
plt.show()

# %% [markdown]
# The words below ask, and the words above are looked at. No solid line leads to the right. This is
# **causal attention**, and another name for it is **masked attention**.
#
# At the end of this chapter you will understand
#
# * why an average of the past is a softmax of zeros with the future covered;
# * how one head turns that plain average into a chosen one;
# * two ways to cover the future, why they are the same function, and where they stop being the
#   same;
# * what dropout does to attention, and why it is used;
# * how to write causal attention as a class, for batches, and how to show that it is right.
#
# `x` is the sentence of the first two chapters: six words, three numbers each. It comes from
# `climb.py`, as `heat`, `same` and `as_printed` do.

# %%
from climb import HAS_TORCH, as_printed, heat, same, x

# %% [markdown]
# ## The average of the past
#
# Before anything is chosen, let every word take the mean of all words so far, its own included:
#
# $$c_t = \frac{1}{t}\sum_{j \le t} x_j .$$
#
# As a loop, that is:

# %%
by_loop = jnp.stack([x[: t + 1].mean(axis=0) for t in range(6)])  # T D
print(by_loop)

# %% [markdown]
# A mean is a weighted sum, and weighted sums of all rows at once are a matrix product. The weights
# are the lower triangle of ones (`jnp.tril`), each row divided by its sum.

# %%
lower = jnp.tril(jnp.ones((6, 6)))  # T T
print(lower)

# %%
averaging = lower / lower.sum(axis=-1, keepdims=True)  # T T
same(averaging @ x, by_loop)

# %% [markdown]
# Here is a third way, now as attention would do it. All scores are zero: no word is more
# interesting than another. What must not be seen gets $-\infty$, because $e^{-\infty} = 0$. The
# softmax of each row does the rest:
#
# $$s_{tj} = \begin{cases} 0 & j \le t \\ -\infty & j > t \end{cases}
# \qquad w_{tj} = \frac{e^{s_{tj}}}{\sum_{i} e^{s_{ti}}} .$$
#
# `jnp.triu(..., k=1)` marks what lies above the diagonal: the words that are still to come.

# %%
future = jnp.triu(jnp.ones((6, 6), dtype=bool), k=1)  # T T
zeros = jnp.where(future, -jnp.inf, 0.0)  # T T
uniform = jax.nn.softmax(zeros, axis=-1)  # T T
same(uniform, averaging)

# %%
fig, axes = plt.subplots(1, 2, figsize=(8, 3.7), layout="constrained")
heat(axes[0], zeros, "scores: zero, or covered", most=1)
heat(axes[1], uniform, "weights: the mean of the past", most=1)
plt.show()

# %% [markdown]
# It looks like a long way to write a mean. But now we only have to replace the zeros by scores
# that know the words. Everything else stays.
#
# The library calls this `UniformCausalAverage`. Given unit vectors, its output shows the weights
# themselves: 1, 1/2, 1/3 and so on.

# %%
from flax_attn import UniformCausalAverage

print(UniformCausalAverage()(jnp.eye(8)))
same(UniformCausalAverage()(x), by_loop)

# %% [markdown]
# > **Try it.** Put a 5 in place of one zero, in the last row. How much weight does that word get?
#
# <details><summary>Answer</summary>
#
# ```python
# row = jax.nn.softmax(zeros.at[5, 2].set(5.0)[5])  # T
# print(row)
# same(row[2], np.exp(5) / (np.exp(5) + 5))
# ```
#
# 97 %: $e^5 = 148$, and each of the five others has $e^0 = 1$, so it is $148 / 153$. A score of 5
# is nearly a choice of one word.
#
# </details>
#
# ## A head that chooses
#
# Now let every token ask and answer, as in chapter 2. The query $q_t = x_t W_q$ says what token $t$
# looks for, and the key $k_j = x_j W_k$ says what token $j$ has to offer. Their dot product
# replaces the zeros:
#
# $$s_{tj} = q_t \cdot k_j .$$
#
# It is not divided by anything yet. One such set of queries and keys is called a **head**. Here are
# the scores of one head for eight random tokens, 32 numbers each, with queries and keys of 16
# numbers. PyTorch drew the weights.

# %%
head_scores = np.array(
    [
        [-1.762866, -1.301070, 0.565159, 2.161565, -1.067398, 1.963205, 1.076545, -0.452951],
        [-3.333430, -1.655575, 0.104049, 3.378201, -2.182498, 1.041487, -0.055714, 0.292728],
        [-1.022628, -1.260642, 0.076228, -0.3812503, -0.984304, -1.430302, 0.074921, -0.954654],
        [0.783589, -0.801428, -0.336800, -0.849628, -0.560230, -1.170147, -1.292656, -1.025978],
        [-1.256613, 0.018719, -0.787974, -1.320432, 2.036323, 0.863809, 0.371880, 0.925766],
        [-0.312619, 2.415242, -0.110585, -0.993053, 3.344908, -2.522856, 1.418667, 1.219621],
        [1.087570, 1.965192, -0.262128, -0.315790, 0.609053, 1.261553, -0.548414, 0.804846],
        [-1.804413, -0.412597, -0.830614, 0.5898499, -0.798694, -0.585601, 0.643321, 0.630276],
    ]
)  # T T
print(head_scores)

# %% [markdown]
# A common slip is to read such a table by eye as "from -2 to 2". It runs from -3.3 to 3.4. Where
# PyTorch is installed, the next cell draws the table again.

# %%
if HAS_TORCH:
    import torch

    torch.manual_seed(1337)
    drawn = torch.randn(4, 8, 32)  # B T D
    key, query = (torch.nn.Linear(32, 16, bias=False) for _ in range(2))
    with torch.no_grad():
        as_printed((query(drawn) @ key(drawn).mT)[0], head_scores)

print(f"from {head_scores.min():.4f} to {head_scores.max():.4f}")

# %% [markdown]
# Cover the future and take the softmax of each row. Now every token has its own opinion about its
# past.

# %%
later = np.triu(np.ones((8, 8), dtype=bool), k=1)  # T T
head_masked = np.where(later, -np.inf, head_scores)  # T T
print(head_masked)

# %%
head_weights = jax.nn.softmax(head_masked, axis=-1)  # T T
print(head_weights)
as_printed(head_weights[5], [0.0176, 0.2689, 0.0215, 0.0089, 0.6812, 0.0019, 0, 0])

# %%
numbers = [str(t + 1) for t in range(8)]
fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
heat(axes[0], head_masked, "scores, future covered", numbers, numbers, "RdBu_r", -3.4, 3.4)
heat(axes[1], head_weights, "weights", numbers, numbers, most=1)
plt.show()

# %% [markdown]
# ### Scaled or not
#
# These scores are not divided by $\sqrt{16}$, and nothing terrible happens. The reason is PyTorch's
# start: `nn.Linear(32, 16)` draws its weights between $\pm 1/\sqrt{32}$. So each number of a query
# has a variance of only $1/3$, and a score one of $16 \cdot \tfrac13 \cdot \tfrac13 \approx 1.8$.
# Training makes queries and keys larger, and then the division of chapter 2 matters. The divisor
# is the root of the *head's* width, 16, never of the token's, 32.

# %%
scaled = jax.nn.softmax(head_masked / 16**0.5, axis=-1)  # T T
print(f"largest weight of token 6: {head_weights[5].max():.2f}, scaled {scaled[5].max():.2f}")
assert scaled[5].max() < head_weights[5].max()

# %% [markdown]
# ### With values
#
# So far a head would mix the tokens themselves. Instead, each token may hand over something made
# for the purpose, its value $v_j = x_j W_v$:
#
# $$c_t = \sum_{j \le t} w_{tj}\, v_j$$
#
# This is the whole head, written out:


# %%
def head(x, W_query, W_key, W_value):
    q, k, v = x @ W_query, x @ W_key, x @ W_value  # T H each
    scores = q @ k.T  # T T
    later = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)  # T T
    weights = jax.nn.softmax(jnp.where(later, -jnp.inf, scores), axis=-1)  # T T
    return weights @ v  # T H


# %% [markdown]
# The library's `SingleHeadAttention` is the same function. It takes a batch as well as one
# sentence. With `value=False` it mixes the tokens themselves, and with `scale=True` it divides by
# $\sqrt{\text{head size}}$.

# %%
from flax_attn import SingleHeadAttention

layer = SingleHeadAttention(32, 16, rngs=nnx.Rngs(0))
kernels = [part.kernel[...] for part in (layer.query, layer.key, layer.value)]
random_tokens = jax.random.normal(jax.random.key(1), (4, 8, 32))  # B T D
same(layer(random_tokens)[0], head(random_tokens[0], *kernels))

# %% [markdown]
# Is the layer PyTorch's function? `compare` answers that. It gives both the same random weights,
# and compares outputs, intermediate values and gradients in float64, where two ways to write one
# function differ by far less than its limit of 1e-12.

# %%
from flax_attn.parity import compare

if HAS_TORCH:
    import torch_ref.single_head

    twin = torch_ref.single_head.SingleHeadAttention(32, 16)
    report = compare(twin, layer, np.asarray(random_tokens))
    assert report.ok, report
    print(report)

# %% [markdown]
# ## Where tokens talk
#
# A query is computed from its own token alone, and so are key and value. Tokens do not communicate
# before `q @ k.T`. Derivatives show it: how much does row $t$ of something change when token $j$
# is moved? We take the size of each block of derivatives,
#
# $$J_{tj} = \left\lVert \frac{\partial\, y_t}{\partial\, x_j} \right\rVert .$$


# %%
def influence(function):
    jacobian = jax.jacobian(function)(x)  # T H T D
    return jnp.sqrt((jacobian**2).sum(axis=(1, 3)))  # T T


# %% [markdown]
# The weights for it are those that PyTorch draws for three `nn.Linear(3, 2)` after the seed 789, as
# (d_in, d_out). We keep them for the next sections.

# %%
W_query = jnp.array(
    [[0.31605908, -0.1682854], [0.45680857, -0.33787704], [0.51183486, -0.09177387]]
)
W_key = jnp.array([[0.40580583, 0.21336074], [-0.47042054, -0.26005065], [0.2368052, -0.51054299]])
W_value = jnp.array(
    [[0.25256988, 0.5191074], [-0.14147827, -0.08516758], [-0.19618134, -0.20432705]]
)


# %%
def uncovered(x):
    return jax.nn.softmax((x @ W_query) @ (x @ W_key).T, axis=-1) @ (x @ W_value)  # T H


of_queries = influence(lambda x: x @ W_query)
of_uncovered = influence(uncovered)
of_causal = influence(lambda x: head(x, W_query, W_key, W_value))
assert (of_queries[~np.eye(6, dtype=bool)] == 0).all()  # each word depends on itself only
assert (of_causal[future] == 0).all()  # no word depends on a later one

# %%
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), layout="constrained")
heat(axes[0], of_queries, "queries", cmap="Greens", most=1)
heat(axes[1], of_uncovered, "context, nothing covered", cmap="Greens", most=1)
heat(axes[2], of_causal, "context, future covered", cmap="Greens", most=1)
axes[0].set_ylabel("this row changes")
fig.supxlabel("when this word is moved")
plt.show()

# %% [markdown]
# ## Two ways to cover the future
#
# From here on the scores are scaled, $s_{tj} = q_t \cdot k_j / \sqrt{2}$.
#
# The **late** way takes the softmax over all six words, erases the future afterwards, and divides
# each row by what is left of it.

# %%
unscaled = (x @ W_query) @ (x @ W_key).T  # T T
everybody = jax.nn.softmax(unscaled / 2**0.5, axis=-1)  # T T
print(everybody)

# %%
erased = everybody * lower  # T T, the rows no longer add up to one
print(erased)

# %%
late = erased / erased.sum(axis=-1, keepdims=True)  # T T
print(late)
as_printed(late[3], [0.2758, 0.2460, 0.2462, 0.2319, 0, 0])

# %% [markdown]
# The **early** way covers the future before the softmax. These are the scores before scaling:

# %%
masked = jnp.where(future, -jnp.inf, unscaled)  # T T
print(masked)
as_printed(masked[2], [0.4594, 0.1703, 0.1731, -np.inf, -np.inf, -np.inf])

# %%
early = jax.nn.softmax(masked / 2**0.5, axis=-1)  # T T
print(early)
same(early, late)

# %% [markdown]
# ### Does the late way leak
#
# One often reads that the late way leaks information: the first softmax has divided by a sum $Z_t$
# that the future took part in. That is true. But $Z_t$ is one number for the whole row, and the
# second division cancels it:
#
# $$\frac{e^{s_{tj}} / Z_t}{\sum_{i \le t} e^{s_{ti}} / Z_t}
#   = \frac{e^{s_{tj}}}{\sum_{i \le t} e^{s_{ti}}} .$$
#
# The right side is the early way. They are the same function, so their gradients are the same too.
# The library has both as layers. We compare them in float64, with the same weights.

# %%
from flax_attn import CausalAttention, CausalRenormalisedAttention

random = np.random.RandomState(0)
sentence, pull = random.standard_normal((8, 5)), random.standard_normal((8, 4))  # T D, T d_out


def weighted(layer, x, rows=slice(None)):
    return (layer(x)[rows] * pull[rows]).sum()  # one number, of which to take the gradient


# %%
with jax.enable_x64(True):
    late_layer, early_layer = (
        kind(5, 4, 8, 0.0, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        for kind in (CausalRenormalisedAttention, CausalAttention)
    )
    words = jnp.asarray(sentence)
    slopes = [jax.grad(weighted, argnums=1)(each, words) for each in (late_layer, early_layer)]
    same(late_layer(words), early_layer(words), within=1e-12)
    same(*slopes, within=1e-12)

# %% [markdown]
# Now the question itself: does the context of the first three tokens depend on tokens four to
# eight? For the late way the gradient consists of rounding errors, sixteen places down. For the
# early way it is exactly zero.

# %%
with jax.enable_x64(True):
    of_late, of_early = (
        np.asarray(jax.grad(weighted, argnums=1)(each, words, slice(3)))
        for each in (late_layer, early_layer)
    )
from_future, from_past = abs(of_late[3:]).max(), abs(of_late[:3]).max()
print(f"late way: {from_future:.0e} from the future, {from_past:.1f} from the past")
assert from_future < 1e-14 and (of_early[3:] == 0).all()

# %% [markdown]
# Where PyTorch is installed, we can also compare across the two ways: PyTorch's *late* layer
# against our *early* one. They are found equal, gradients included.

# %%
if HAS_TORCH:
    import torch_ref.causal_renormalised

    twin = torch_ref.causal_renormalised.CausalRenormalisedAttention(5, 4, 8)
    mine = CausalAttention(5, 4, 8, 0.0, rngs=nnx.Rngs(0))
    report = compare(twin, mine, random.standard_normal((2, 7, 5)), dtypes=("float64",))
    assert report.ok, report
    print(report.summary())

# %% [markdown]
# ### Where they part
#
# Numbers in a computer are rounded, and there the two ways differ in three respects.
#
# **First, in the last bits.** The early way never looks at the future, so the past keeps every bit
# when the future changes. The late way divides by the future and cancels it again, and rounding
# leaves a trace. Here we keep the first three words and change the others.


# %%
def both_ways(x):
    s = (x @ W_query) @ (x @ W_key).T / 2**0.5  # T T
    erased = jax.nn.softmax(s, axis=-1) * lower  # T T
    early = jax.nn.softmax(jnp.where(future, -jnp.inf, s), axis=-1)  # T T
    return erased / erased.sum(axis=-1, keepdims=True), early


# %%
moved = [
    abs(a - b)[:3].max() for a, b in zip(both_ways(x), both_ways(x.at[3:].mul(-2.0)), strict=True)
]
print(f"the past moves by: late {moved[0]:.0e}, early {moved[1]:.0e}")
assert moved[0] < 1e-6 and moved[1] == 0

# %% [markdown]
# **Second, when a covered score is large.** Let a row see two words with the scores 0 and 1, and
# cover a third whose score grows. The two weights should be 0.27 and 0.73 whatever the third score
# is. In float32 the late way loses the smaller weight first, since it rounds to zero. Then both
# are zero, and it divides zero by zero, which gives NaN ("not a number").

# %%
covered = jnp.arange(0.0, 121.0)  # the score of the covered word
row = jnp.stack([jnp.zeros_like(covered), jnp.ones_like(covered), covered], axis=-1)  # 121 3
part = jax.nn.softmax(row, axis=-1)[:, :2]  # 121 2
by_late = part / part.sum(axis=-1, keepdims=True)  # 121 2
by_early = jax.nn.softmax(row[:, :2], axis=-1)  # 121 2
lost = int(jnp.isnan(by_late[:, 0]).argmax())
print("first NaN at a covered score of", lost)

# %%
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(covered, by_early, color="tab:blue", lw=5, alpha=0.35, label=["early", None])
ax.plot(covered, by_late, color="tab:red", lw=1.5, label=["late", None])
ax.axvspan(lost, 120, color="tab:red", alpha=0.1)
ax.text((lost + 120) / 2, 0.5, "late: NaN", ha="center", color="tab:red")
ax.set(xlabel="score of the covered word", ylabel="weights of the two others", ylim=(0, 1))
ax.set_title("A large score that is covered spoils the late way only")
ax.legend(loc="upper left", ncols=2, frameon=False)
plt.show()
assert 80 < lost < 110

# %% [markdown]
# **Third, with dropout in between.** Dropout sets weights to zero at random ([more
# below](#Dropout)). If it comes before the second division, nothing cancels any more. Worse, if
# all weights of a row are dropped, that row is 0/0. With half of the weights dropped, this loses
# the first word's row in every second draw, and the second word's in every fourth.

# %%
draws = jax.random.bernoulli(jax.random.key(3), 0.5, (20_000, 6, 6))  # True is kept
dropped_first = erased * draws
dropped_first /= dropped_first.sum(axis=-1, keepdims=True)
share_lost = jnp.isnan(dropped_first).any(axis=-1).mean(axis=0)  # T
print("share of rows lost:", share_lost)
same(share_lost, 0.5 ** np.arange(1, 7), within=0.02)

# %% [markdown]
# So the late way leaks nothing, but it costs a second pass over the table and fails where the early
# way does not. Everybody uses the early way, and so do the layers from here on.
#
# > **Try it.** In the picture with the red lines, start with scores 0 and 10 instead of 0 and 1.
# > Where does the red line leave the blue one now?
#
# <details><summary>Answer</summary>
#
# ```python
# row = jnp.stack([jnp.zeros_like(covered), jnp.full_like(covered, 10.0), covered], axis=-1)
# part = jax.nn.softmax(row, axis=-1)[:, :2]  # 121 2
# by_late = part / part.sum(axis=-1, keepdims=True)  # 121 2
# gone = int((by_late[:, 0] == 0).argmax())
# first_nan = int(jnp.isnan(by_late[:, 0]).argmax())
# print("the smaller weight is zero from", gone, "on, and NaN from", first_nan, "on")
# assert (gone, first_nan) == (lost - 1, lost + 9)
# ```
#
# Where NaN begins, and that is 9 later than before: at 98 on the machine that made this page, in
# place of 89. NaN comes when $e^{10 - c}$ has rounded to zero too, where $c$ is the covered score.
# The smaller weight is lost at 88, as before. But it is 0.00005 now, and a line so near to zero
# does not show it.
#
# </details>
#
# ## Writing the mask down
#
# `jnp.triu(..., k=1)` is True above the diagonal, and False on it and below it. (A common slip is
# to say "True elsewhere" about one of the two sides.) The diagonal matters: a word may see itself,
# so no row is empty.
#
# There are two conventions for what `True` means in a mask.
#
# | `True` = hidden | `True` = visible |
# | --- | --- |
# | `tensor.masked_fill(mask, -inf)` | `torch.nn.functional.scaled_dot_product_attention` |
# | `torch.nn.MultiheadAttention` | `jax.nn.dot_product_attention`, `flax.nnx` |
# | `jnp.where(mask, -inf, scores)` | everything in `flax_attn` that takes a mask |
#
# The library's function `attention_weights` returns the weights of any queries and keys. It wants
# an axis of heads after the tokens, and it divides the scores by $\sqrt{2}$ itself.

# %%
from flax_attn import CAUSAL, attention_weights

q, k = (x @ W_query)[:, None], (x @ W_key)[:, None]  # T N H, with one head
same(attention_weights(q, k, mask=~future)[0], early)
same(attention_weights(q, k, mask=CAUSAL)[0], early)

# %% [markdown]
# Both lines say the same: `~future` ("not future") is a table of True and False, and `CAUSAL` is
# the library's name for this mask. And here is what happens if you mix up the conventions.

# %%
mistaken = attention_weights(q, k, mask=future)[0]  # True meant hidden, and was read as visible
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.7), layout="constrained")
heat(axes[0], future.astype(int), "True = hidden: future", most=1)
heat(axes[1], (~future).astype(int), "True = visible: ~future", most=1)
heat(axes[2], mistaken, "future, read as visible", most=1)
plt.show()
same(mistaken.sum(axis=-1), [1, 1, 1, 1, 1, 0])

# %% [markdown]
# In the picture on the right every row but the last still adds up to one, and no error is raised.
# The model reads the future and learns wonderfully, until it has to write. A mask of *numbers*, 0
# and 1 or 0 and $-\infty$, could mean anything, so the library refuses it:

# %%
try:
    attention_weights(q, k, mask=lower)
except TypeError as error:
    print(error)

# %% [markdown]
# The last row of the mistaken mask sees nothing at all. A plain softmax of such a row is NaN. This
# library returns zeros for it, as you see in the picture.

# %%
nothing = jnp.full(4, -jnp.inf)
print(jax.nn.softmax(nothing), mistaken[-1])
assert jnp.isnan(jax.nn.softmax(nothing)).all() and (mistaken[-1] == 0).all()

# %% [markdown]
# ### In place or a new array
#
# PyTorch code often says `scores.masked_fill_(mask, -torch.inf)`. The underscore at the end means
# *in place*: the tensor itself changes, and so does every other name for it. JAX arrays never
# change, and `jnp.where` makes a new one. Under `jit` the compiler reuses the memory where it can.

# %%
if HAS_TORCH:
    mine = torch.tensor(np.asarray(unscaled))
    yours = mine  # another name for the same tensor
    mine.masked_fill_(torch.tensor(np.asarray(future)), -torch.inf)
    print("yours has", int(torch.isinf(yours).sum()), "covered scores")

print("the JAX array still has", int(jnp.isinf(unscaled).sum()))
assert jnp.isfinite(unscaled).all()

# %% [markdown]
# ## Dropout
#
# A network with many parameters can learn its training sentences by heart and then do worse on new
# ones. This is called **overfitting**. Dropout works against it: in training, each weight is set to
# zero with probability $p$, so that no word can rely on one particular other word being there. The
# weights that are left are divided by $1 - p$, so that each weight stays what it was *on average*:
#
# $$\tilde w_{tj} = \frac{m_{tj}}{1 - p}\, w_{tj}, \qquad m_{tj} \in \{0, 1\},\quad
#   P(m_{tj} = 1) = 1 - p .$$
#
# GPT-2 trained with $p = 0.1$. Many recent large models use no dropout: they read so much text that
# they see most of it only once, and cannot learn it by heart.
#
# Here is a draw with $p = 0.5$, recorded from PyTorch: dropout applied to a table of ones.

# %%
kept = np.array(
    [
        [1, 1, 1, 1, 1, 1],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
        [1, 0, 0, 0, 0, 1],
        [0, 1, 0, 0, 0, 0],
    ]
)
print(kept / (1 - 0.5))

# %% [markdown]
# Applied to our weights, it leaves rows that no longer add up to one. The last row keeps a third of
# its sum. That is intended.

# %%
dropped = kept / 0.5 * early  # T T
print(dropped)
as_printed(dropped[3], [0.5517, 0.4921, 0, 0, 0, 0])

# %%
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.7), layout="constrained")
heat(axes[0], early, "weights", most=2)
heat(axes[1], kept / 0.5, "kept / (1 - p)", most=2)
heat(axes[2], dropped, "dropped out", most=2)
plt.show()

# %% [markdown]
# In Flax, dropout is the module `nnx.Dropout(p, rngs=...)`. It draws anew at each call. A module
# knows whether it is in training: `layer.eval()` switches dropout off, `layer.train()` on.

# %%
dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
print("training:  ", dropout(jnp.ones(8)))
dropout.eval()
print("evaluation:", dropout(jnp.ones(8)))
assert (dropout(early) == early).all()

# %% [markdown]
# There is a second common place for dropout, after the sum: on the context vectors. Dropout on the
# weights hides some *words* from a token. Dropout on the context hides some of its *features*,
# whichever word they came from. The library's `CausalAttention` has both, as `dropout` and
# `context_dropout`.
#
# ## The class
#
# Now everything comes together. `nnx.Linear(d_in, d_out, use_bias=False)` is one matrix, and three
# of them make queries, keys and values.
#
# ### A batch of two
#
# A model reads several sentences at once, a **batch**, stacked along a new first axis: `B T D`.
# Here is our sentence twice. The new axis changes what a transpose means: `.T` turns *all* axes
# around, and `.mT` ("matrix transpose") swaps the last two only.

# %%
batch = jnp.stack([x, x])  # B T D
print("batch", batch.shape, "  .T", batch.T.shape, "  .mT", batch.mT.shape)
assert (batch.mT == jnp.swapaxes(batch, 1, 2)).all()  # PyTorch: batch.transpose(1, 2)

# %% [markdown]
# `@` multiplies matrices, the last two axes, and carries the others along as a loop would. With
# `.mT` each sentence meets itself, and no sentence sees another. With `.T` the shapes do not fit.

# %%
print("batch @ batch.mT:", (batch @ batch.mT).shape)
same((batch @ batch.mT)[1], x @ x.T)
try:
    batch @ batch.T
except (TypeError, ValueError) as error:
    print("batch @ batch.T:", str(error).splitlines()[0])

# %% [markdown]
# So the class below takes one sentence or a batch.


# %%
class MyCausalAttention(nnx.Module):
    def __init__(self, d_in, d_out, dropout=0.0, *, rngs):
        self.W_query = nnx.Linear(d_in, d_out, use_bias=False, rngs=rngs)
        self.W_key = nnx.Linear(d_in, d_out, use_bias=False, rngs=rngs)
        self.W_value = nnx.Linear(d_in, d_out, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):  # B T d_in
        q = self.W_query(x)  # B T d_out
        k = self.W_key(x)  # B T d_out
        v = self.W_value(x)  # B T d_out
        scores = q @ k.mT / q.shape[-1] ** 0.5  # B T T
        future = jnp.triu(jnp.ones(scores.shape[-2:], bool), k=1)  # T T
        weights = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1)  # B T T
        return self.dropout(weights) @ v  # B T d_out


# %% [markdown]
# To compare with a book or a video, here are the weights that PyTorch draws for this layer after
# the seed 123. PyTorch stores (d_out, d_in), so each matrix has to be transposed.

# %%
DRAWN = {
    "W_query": [[-0.23542964, 0.01912448, -0.28674594], [0.21772662, -0.49193421, 0.42322308]],
    "W_key": [[-0.41964141, -0.45901766, -0.36482018], [0.26147819, -0.21332639, 0.21605217]],
    "W_value": [[-0.49001414, -0.35029206, -0.21198919], [-0.11346072, -0.44043937, 0.37804362]],
}
mine = MyCausalAttention(3, 2, rngs=nnx.Rngs(0))
for name, weight in DRAWN.items():
    getattr(mine, name).kernel[...] = jnp.array(weight).T

# %%
print(batch.shape, "->", mine(batch).shape)
print(mine(batch))
printed = [[-0.4519, 0.2216], [-0.5874, 0.0058], [-0.6300, -0.0632]]
as_printed(mine(batch)[0, :3], printed)

# %% [markdown]
# ### Line by line
#
# | line | what it does | shape here |
# | --- | --- | --- |
# | `nnx.Linear(d_in, d_out, ...)` | one trained matrix for each role | 3 x 2 each |
# | `nnx.Dropout(dropout, ...)` | no parameters; it draws anew at each call | |
# | `q = self.W_query(x)`, `k`, `v` | the matrix times each token by itself | 2 x 6 x 2 each |
# | `q @ k.mT` | 36 dot products for each sentence | 2 x 6 x 6 |
# | `/ q.shape[-1] ** 0.5` | the root of the width, read from the array | 2 x 6 x 6 |
# | `future = jnp.triu(...)` | as long as *this* text, which may be short | 6 x 6 |
# | `jnp.where(future, -jnp.inf, scores)` | the same table covers each sentence | 2 x 6 x 6 |
# | `jax.nn.softmax(..., axis=-1)` | every row adds up to one | 2 x 6 x 6 |
# | `self.dropout(weights)` | some weights become zero, in training only | 2 x 6 x 6 |
# | `... @ v` | each token gets its mixture of values | 2 x 6 x 2 |
#
# The same lines outside the class:

# %%
q, k, v = mine.W_query(batch), mine.W_key(batch), mine.W_value(batch)  # B T d_out each
scores = q @ k.mT / q.shape[-1] ** 0.5  # B T T
covered = jnp.where(jnp.triu(jnp.ones((6, 6), bool), k=1), -jnp.inf, scores)  # B T T
by_lines = mine.dropout(jax.nn.softmax(covered, axis=-1)) @ v  # B T d_out
print(q.shape, scores.shape, covered.shape, by_lines.shape)
same(by_lines, mine(batch))

# %% [markdown]
# The library's `CausalAttention` takes one number more, the **context length**: how many tokens the
# model can read at most. With the same weights it is the same function.

# %%
ours = CausalAttention(3, 2, context_length=6, dropout=0.0, rngs=nnx.Rngs(0))
nnx.update(ours, nnx.state(mine, nnx.Param))  # copies the parameters
same(ours(batch), mine(batch))

# %% [markdown]
# And both are PyTorch's. `port` copies the weights of a PyTorch layer into a Flax layer and
# transposes what has to be transposed. `compare` judges *your* class here, not the library's. (Its
# scores are seen on PyTorch's side only. Chapter 7 shows how a class of yours can report them.)

# %%
from flax_attn.parity import port

if HAS_TORCH:
    import torch_ref.causal_attention

    torch.manual_seed(123)
    twin = torch_ref.causal_attention.CausalAttention(3, 2, 6, 0.0)
    ported = port(twin, MyCausalAttention(3, 2, rngs=nnx.Rngs(1)))
    same(ported(batch), mine(batch))
    report = compare(twin, ported, np.asarray(batch))
    assert report.ok, report
    print(report)

# %% [markdown]
# Two checks remain that are the point of this chapter. Two different sentences in a batch give what
# each gives alone. And cutting off the end of a sentence changes nothing before the cut.

# %%
same(mine(jnp.stack([x, x[::-1]]))[1], mine(x[::-1]))
same(mine(x[:4]), mine(x)[:4])

# %% [markdown]
# > **Try it.** Build `MyCausalAttention(3, 2, dropout=0.5, rngs=nnx.Rngs(0))` and call it twice on
# > `x`. Then call `.eval()` on it and try again.
#
# <details><summary>Answer</summary>
#
# ```python
# layer = MyCausalAttention(3, 2, dropout=0.5, rngs=nnx.Rngs(0))
# first, second = layer(x), layer(x)
# layer.eval()
# assert (first != second).any() and (layer(x) == layer(x)).all()
# ```
#
# In training the two calls differ, because dropout draws anew at each call. After `.eval()` nothing
# is dropped, and both calls give the same.
#
# </details>
#
# ## What is stored and what is computed
#
# PyTorch's layer stores the mask as a *buffer*. A tensor on a PyTorch module can be
#
# | | trained | moves with `.to(device)` | in `state_dict` |
# | --- | --- | --- | --- |
# | `nn.Parameter` | yes | yes | yes |
# | `register_buffer` | no | yes | yes, unless `persistent=False` |
# | plain attribute | no | no | no |
#
# PyTorch needs the mask as a tensor on the same device as the scores. A buffer moves along, and is
# not built anew at each call. The price is that it fixes the context length, and that the table is
# part of every checkpoint, as it is here. With `persistent=False` a buffer moves along in the same
# way, and is left out of `state_dict`.

# %%
if HAS_TORCH:
    print("parameters:", [name for name, _ in twin.named_parameters()])
    print("buffers:   ", [name for name, _ in twin.named_buffers()])
    print("state_dict:", [*twin.state_dict()])
    twin.register_buffer("table", twin.mask, persistent=False)
    assert "mask" in twin.state_dict() and "table" not in twin.state_dict()
    assert report.constants == ("mask",)  # computed here, so it is not copied

# %% [markdown]
# JAX traces a function to a program before it runs it. The shape of `scores` is known then, so the
# mask becomes part of the program: compare column number and row number. Nothing is stored or
# moved, and the compiler usually does not even build the table. (`iota` in the program below means
# the numbers 0, 1, 2 and so on.)


# %%
def cover(scores):
    return jnp.where(jnp.arange(6) > jnp.arange(6)[:, None], -jnp.inf, scores)


program = str(jax.make_jaxpr(cover)(unscaled))
assert "iota" in program
print(program)

# %% [markdown]
# ### Frozen or trained
#
# A parameter that should not be trained is stored but gets no update. PyTorch says
# `requires_grad=False` on the tensor. In Flax, whoever takes the gradient says *with respect to
# what*. Chapter 2 used a filter for it, and here is another: `nnx.All` means that both conditions
# hold, and `nnx.PathContains` looks at the name. Only the values will learn, and `optax.sgd` is
# plain gradient descent.

# %%
import optax

only_values = nnx.All(nnx.Param, nnx.PathContains("W_value"))
student = nnx.clone(mine)
optimizer = nnx.Optimizer(student, optax.sgd(0.5), wrt=only_values)


def distance(student):
    return ((student(x) - x[:, :2]) ** 2).mean()


# %% [markdown]
# `nnx.DiffState(0, only_values)` says: differentiate with respect to these parameters of argument
# 0.


# %%
@nnx.jit
def step(student, optimizer):
    of_values = nnx.DiffState(0, only_values)
    loss, gradients = nnx.value_and_grad(distance, argnums=of_values)(student)
    optimizer.update(student, gradients)
    return loss


losses = [float(step(student, optimizer)) for _ in range(20)]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert (student.W_query.kernel[...] == mine.W_query.kernel[...]).all()  # frozen
assert (student.W_value.kernel[...] != mine.W_value.kernel[...]).all()  # trained

# %% [markdown]
# ## In a nutshell
#
# | word | meaning |
# | --- | --- |
# | causal or masked attention | a token sees itself and the tokens before it |
# | mask | which pairs may see each other; covered scores get $-\infty$ before the softmax |
# | dropout | weights set to zero at random in training, the rest divided by $1 - p$ |
# | batch | sentences stacked along a first axis; they do not see each other |
# | context length | how many tokens a model can read at most |
#
# ## Exercises
#
# **1.** Let each word see itself and the *two* words before it, not its whole past. Write the mask
# with `jnp`, compute the weights of our sentence by the early way, and say which rows differ from
# `early`. In *two* such layers, one after the other, can the last context vector depend on the
# first word of six?
#
# <details><summary>Answer</summary>
#
# ```python
# rows, columns = jnp.arange(6)[:, None], jnp.arange(6)
# visible = (columns <= rows) & (columns >= rows - 2)
# windowed = jax.nn.softmax(jnp.where(visible, unscaled / 2**0.5, -jnp.inf), axis=-1)
# same(windowed[:3], early[:3])
# assert abs(windowed[3:] - early[3:]).max() > 0.01
# ```
#
# The first three rows are those of `early`, because they have no more than two words before them.
# In `flax_attn` this mask is `Window(2, 0)`, and `attention_weights(q, k, mask=Window(2, 0))[0]`
# gives the same table.
#
# Word six sees words four to six in one layer, and word four saw words two to four in the layer
# before. So two layers reach back four words, to word two and not to the first. Each further layer
# adds two.
#
# </details>
#
# **2.** A well-known lecture reads out two rows of causal weights, 0.3986, 0.6014 for *journey* and
# 0.2526, 0.3791, 0.3683 for *starts*. They belong to the two matrices below, which `torch.rand`
# gives after the seed 123 (chapter 2), with scores divided by $\sqrt 2$. Compute them.

# %%
W_q = jnp.array([[0.29611194, 0.5165623], [0.25167072, 0.6885568], [0.07397246, 0.86652195]])
W_k = jnp.array([[0.13657987, 0.10247904], [0.18405646, 0.72644675], [0.3152539, 0.68710667]])

# %% [markdown]
# <details><summary>Answer</summary>
#
# ```python
# scores = (x @ W_q) @ (x @ W_k).T / 2**0.5  # T T
# rows = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1)[1:3]  # 2 T
# as_printed(rows, [[0.3986, 0.6014, 0, 0, 0, 0], [0.2526, 0.3791, 0.3683, 0, 0, 0]])
# ```
#
# </details>
#
# **To read:** Andrej Karpathy, [Let's build GPT](https://www.youtube.com/watch?v=kCc8FmEb1nY),
# from which the average of the past and the head of eight tokens come; Srivastava and others,
# [Dropout](https://jmlr.org/papers/v15/srivastava14a.html).
#
# Next: [4. Many heads](04_many_heads.ipynb), where several heads work side by side.
