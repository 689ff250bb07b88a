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
# A model that writes text guesses the next word from the words so far. While it learns, the
# whole sentence lies in front of it, so somebody has to cover the words that come later.
#
# At the end of this chapter you will understand
#
# * that an average of the past is a softmax of zeros with the future covered;
# * how one head turns that plain average into a chosen one;
# * where in the layer tokens talk to each other, and where they do not;
# * two ways to cover the future, why they are one function, and where they stop being one;
# * what dropout does to attention, what a batch is, and why torch stores the mask and JAX
#   does not.

# %%
import importlib.util

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from flax_attn import (
    CAUSAL,
    CausalAttention,
    CausalRenormalisedAttention,
    SingleHeadAttention,
    UniformCausalAverage,
    attention_weights,
)
from flax_attn.parity import compare, judge, port

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch

    import torch_ref.causal_attention
    import torch_ref.causal_renormalised
    import torch_ref.single_head

print("compared with", "PyTorch, live" if HAS_TORCH else "numbers that PyTorch printed once")

# %%
jax.config.update("jax_default_matmul_precision", "float32")  # all digits, on every device
np.set_printoptions(precision=4, suppress=True, linewidth=100)
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.titlesize": 10})

# %% [markdown]
# The sentence of the first two chapters: six words, three numbers each. `heat` draws a table
# with the words on its axes; a cell that is covered stays grey.

# %%
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


def heat(ax, table, title, names=WORDS, most=1.0, cmap="Blues"):
    table = np.asarray(table)
    digits = 2 if table.dtype.kind == "f" else 0
    ax.imshow(np.where(np.isfinite(table), table, np.nan), cmap=cmap, vmax=most, vmin=0)
    ax.set(title=title, facecolor="0.85")
    ax.set_xticks(range(table.shape[1]), names[: table.shape[1]], rotation=45, ha="right")
    ax.set_yticks(range(table.shape[0]), names[: table.shape[0]])
    for (t, s), number in np.ndenumerate(table):
        text = f"{number:.{digits}f}".replace("-inf", r"$-\infty$")
        color = "white" if number > 0.6 * most else "black"
        ax.text(s, t, text, ha="center", va="center", fontsize=7, color=color)


# %% [markdown]
# ## The average of the past, three times
#
# Before anything is chosen, let every word simply take the mean of all words so far, its own
# included:
#
# $$c_t = \frac{1}{t}\sum_{s \le t} x_s .$$
#
# As a loop, that is:

# %%
by_loop = jnp.stack([x[: t + 1].mean(axis=0) for t in range(len(x))])  # T D
print(by_loop)

# %% [markdown]
# A mean is a weighted sum, and a weighted sum for every row at once is a matrix product. The
# lower triangle of ones, each row divided by its sum, holds the weights.

# %%
tril = jnp.tril(jnp.ones((6, 6)))  # T T
averaging = tril / tril.sum(axis=-1, keepdims=True)  # T T
by_product = averaging @ x  # T D

np.testing.assert_allclose(by_product, by_loop, rtol=1e-6)

# %% [markdown]
# Third time, now as attention would do it. All scores are zero: no word is more interesting
# than another. What may not be seen gets $-\infty$, since $e^{-\infty} = 0$. The softmax of
# each row does the rest:
#
# $$s_{tu} = \begin{cases} 0 & u \le t \\ -\infty & u > t \end{cases}
# \qquad w_{tu} = \frac{e^{s_{tu}}}{\sum_{v} e^{s_{tv}}} .$$
#
# The softmax runs over the last axis (`axis=-1`), the words that are looked at. Every row adds
# up to one; columns need not.

# %%
future = jnp.triu(jnp.ones((6, 6), dtype=bool), k=1)  # T T, True where a word is still to come
zeros = jnp.where(future, -jnp.inf, 0.0)  # T T
uniform = jax.nn.softmax(zeros, axis=-1)  # T T

np.testing.assert_allclose(uniform, averaging, rtol=1e-6)
np.testing.assert_allclose(uniform.sum(axis=-1), 1.0, rtol=1e-6)

fig, axes = plt.subplots(1, 2, figsize=(8, 3.7), layout="constrained")
heat(axes[0], zeros, "scores: zero, or covered")
heat(axes[1], uniform, "weights: the mean of the past")
plt.show()

# %% [markdown]
# It looks like a long way to write a mean. But now only the zeros have to be replaced by
# something that knows the words, and the rest of the machine stays. The layer of this library
# is these three lines; at eight tokens it has the rows 1, 1/2, 1/3 ...

# %%
np.testing.assert_allclose(UniformCausalAverage()(x), by_loop, rtol=1e-6)

rows = UniformCausalAverage()(jnp.eye(8))  # the mean of unit vectors shows the weights themselves
for t in range(8):
    assert judge.printed(rows[t], [1 / (t + 1)] * (t + 1) + [0.0] * (7 - t))
print(rows)

# %% [markdown]
# ## A head that chooses
#
# Now let every token ask and answer, as in chapter 2: $q_t = x_t W_q$ says what token $t$ looks
# for, $k_s = x_s W_k$ what token $s$ has to offer. Their dot product replaces the zeros:
#
# $$s_{ts} = q_t \cdot k_s .$$
#
# It is not divided by anything yet. Here are the scores of one such head over eight random
# tokens (32 numbers wide, queries and keys 16 wide), as torch drew them. They run from -3.3 to
# 3.4; the notebook they come from says "from -2 to 2".

# %%
head_scores = np.asarray(
    [
        [-1.762866, -1.301070, 0.565159, 2.161565, -1.067398, 1.963205, 1.076545, -0.452951],
        [-3.333430, -1.655575, 0.104049, 3.378201, -2.182498, 1.041487, -0.055714, 0.292728],
        [-1.022628, -1.260642, 0.076228, -0.381250, -0.984304, -1.430302, 0.074921, -0.954654],
        [0.783589, -0.801428, -0.336800, -0.849628, -0.560230, -1.170147, -1.292656, -1.025978],
        [-1.256613, 0.018719, -0.787974, -1.320432, 2.036323, 0.863809, 0.371880, 0.925766],
        [-0.312619, 2.415242, -0.110585, -0.993053, 3.344908, -2.522856, 1.418667, 1.219621],
        [1.087570, 1.965192, -0.262128, -0.315790, 0.609053, 1.261553, -0.548414, 0.804846],
        [-1.804413, -0.412597, -0.830614, 0.589850, -0.798694, -0.585601, 0.643321, 0.630276],
    ]
)  # T T
if HAS_TORCH:
    torch.manual_seed(1337)
    tokens = torch.randn(4, 8, 32)  # B T D
    key, query = (torch.nn.Linear(32, 16, bias=False) for _ in range(2))
    with torch.no_grad():
        live = (query(tokens) @ key(tokens).transpose(-2, -1))[0].numpy()
    assert judge.printed(live, head_scores)

print(f"from {head_scores.min():.1f} to {head_scores.max():.1f}")
assert judge.printed([head_scores.min(), head_scores.max()], [-3.3334, 3.3782])

# %% [markdown]
# Cover the future, take the softmax row by row: every token now has its own opinion about its
# past.

# %%
NUMBERS = [str(t + 1) for t in range(8)]
later = np.triu(np.ones((8, 8), dtype=bool), k=1)  # T T
head_masked = jnp.where(later, -jnp.inf, head_scores)  # T T
head_weights = jax.nn.softmax(head_masked, axis=-1)  # T T

assert judge.printed(head_weights[1], [0.1574, 0.8426, 0, 0, 0, 0, 0, 0])
assert judge.printed(head_weights[5], [0.0176, 0.2689, 0.0215, 0.0089, 0.6812, 0.0019, 0, 0])
assert judge.printed(
    head_weights[7], [0.021, 0.0843, 0.0555, 0.2297, 0.0573, 0.0709, 0.2423, 0.2391]
)

fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
heat(axes[0], head_masked, "scores, future covered", NUMBERS, 3.4, "Oranges")
heat(axes[1], head_weights, "weights", NUMBERS)
plt.show()

# %% [markdown]
# ### Not scaled, or scaled
#
# These scores are not divided by $\sqrt{16}$, and nothing terrible happens. The reason is
# torch's start: `nn.Linear(32, 16)` draws from $\pm 1/\sqrt{32}$, so each number of a query has
# variance $1/3$ only, and a score $16 \cdot \tfrac13 \cdot \tfrac13 \approx 1.8$. Training makes
# queries and keys larger; then the division of chapter 2 matters. It is by the root of the
# *head's* width, 16, never by that of the token, 32.

# %%
scaled = jax.nn.softmax(head_masked / 16**0.5, axis=-1)  # T T
print(f"standard deviation of the scores: {head_scores.std():.2f}, expected {(16 / 9) ** 0.5:.2f}")
print(f"largest weight of token 6: {head_weights[5].max():.2f}, scaled {scaled[5].max():.2f}")
assert scaled[5].max() < head_weights[5].max()

# %% [markdown]
# ### Then with values
#
# So far a head would mix the tokens themselves. A token may rather say something made for the
# purpose, $v_s = x_s W_v$. So there are three roles: what I look for (query), what I can be
# found by (key), what I say when I am heard (value).
#
# $$c_t = \sum_{s \le t} w_{ts}\, v_s$$
#
# The whole head, written out:


# %%
def head(x, W_query, W_key, W_value):
    q, k, v = x @ W_query, x @ W_key, x @ W_value  # T H each
    scores = q @ k.T  # T T
    later = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)  # T T
    weights = jax.nn.softmax(jnp.where(later, -jnp.inf, scores), axis=-1)  # T T
    return weights @ v  # T H


# %% [markdown]
# The library's `SingleHeadAttention` is the same function. It takes a batch as it takes one
# sentence; `value=False` mixes the tokens themselves, and `scale=True` divides by
# $\sqrt{\text{head size}}$.

# %%
layer = SingleHeadAttention(32, 16, rngs=nnx.Rngs(0))
batch_of_tokens = jax.random.normal(jax.random.key(1), (4, 8, 32))  # B T D
kernels = [part.kernel[...] for part in (layer.query, layer.key, layer.value)]

out = layer(batch_of_tokens)  # B T H
by_hand = jnp.stack([head(one, *kernels) for one in batch_of_tokens])  # B T H
np.testing.assert_allclose(out, by_hand, rtol=1e-4, atol=1e-6)

bare = SingleHeadAttention(32, 16, value=False, rngs=nnx.Rngs(0))
print("with values", out.shape, "and without", bare(batch_of_tokens).shape)

if HAS_TORCH:
    twin = torch_ref.single_head.SingleHeadAttention(32, 16)
    report = compare(twin, layer, np.asarray(batch_of_tokens))
    assert report.ok, report
    print(report)

# %% [markdown]
# ## Where tokens talk
#
# A query is computed from its own token alone, and so are key and value. Tokens do not
# communicate before `q @ k.T`. The derivative shows it: how much does row $t$ of something
# change when token $s$ is moved?
#
# $$J_{ts} = \left\lVert \frac{\partial\, y_t}{\partial\, x_s} \right\rVert$$

# %%
# The weights that torch.manual_seed(789) draws for three bias-free Linear layers, as (d_in, d_out).
W_query = jnp.asarray(
    [[0.31605908, -0.16828540], [0.45680857, -0.33787704], [0.51183486, -0.09177387]]
)
W_key = jnp.asarray(
    [[0.40580583, 0.21336074], [-0.47042054, -0.26005065], [0.23680520, -0.51054299]]
)
W_value = jnp.asarray(
    [[0.25256988, 0.51910740], [-0.14147827, -0.08516758], [-0.19618134, -0.20432705]]
)


def touch(function):
    jacobian = jax.jacobian(function)(x)  # T h T D
    return jnp.sqrt((jacobian**2).sum(axis=(1, 3)))  # T T


def full(x):
    q, k, v = x @ W_query, x @ W_key, x @ W_value  # T H each
    return jax.nn.softmax(q @ k.T, axis=-1) @ v  # T H


reach_query = touch(lambda x: x @ W_query)
reach_full = touch(full)
reach_causal = touch(lambda x: head(x, W_query, W_key, W_value))

assert (reach_query[~np.eye(6, dtype=bool)] == 0).all()  # nobody hears anybody
assert (reach_full > 0).all()  # everybody hears everybody
assert (reach_causal[future] == 0).all()  # nobody hears the future

fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), layout="constrained")
heat(axes[0], reach_query, "queries", cmap="Greens")
heat(axes[1], reach_full, "context, nothing covered", cmap="Greens")
heat(axes[2], reach_causal, "context, future covered", cmap="Greens")
axes[0].set_ylabel("this row changes")
fig.supxlabel("when this word is moved")
plt.show()

# %% [markdown]
# ## Two ways to cover the future
#
# From here on the scores are scaled, $s_{ts} = q_t \cdot k_s / \sqrt{2}$. The **late** way: take
# the softmax over all six words, erase the future afterwards, and divide each row by what is
# left of it.

# %%
scores = (x @ W_query) @ (x @ W_key).T / 2**0.5  # T T
everybody = jax.nn.softmax(scores, axis=-1)  # T T
erased = everybody * tril  # T T, rows no longer add up to one
late = erased / erased.sum(axis=-1, keepdims=True)  # T T

assert judge.printed(erased[1], [0.2041, 0.1659, 0, 0, 0, 0])
assert judge.printed(late[1], [0.5517, 0.4483, 0, 0, 0, 0])

fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.7), layout="constrained")
heat(axes[0], everybody, "softmax over everybody")
heat(axes[1], erased, "future erased")
heat(axes[2], late, "rows made whole")
plt.show()

# %% [markdown]
# The **early** way covers the future before the softmax, as in the first section.

# %%
early = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), axis=-1)  # T T

assert judge.printed(early[1], [0.5517, 0.4483, 0, 0, 0, 0])
assert judge.printed(early[3], [0.2758, 0.246, 0.2462, 0.2319, 0, 0])
np.testing.assert_allclose(late, early, rtol=1e-5)
print(early)

# %% [markdown]
# ### "The late way leaks." Does it?
#
# One often reads that the late way leaks: the first softmax has divided by a sum $Z_t$ in which
# the future took part. It has. But $Z_t$ is one number for the whole row, and the second
# division cancels it:
#
# $$\frac{e^{s_{ts}} / Z_t}{\sum_{u \le t} e^{s_{tu}} / Z_t}
#   = \frac{e^{s_{ts}}}{\sum_{u \le t} e^{s_{tu}}} .$$
#
# The right side is the early way. They are the same function, so their gradients are the same
# too. A claim like this is tested in float64, where the same function written in two ways
# differs by no more than 1e-12. First the outputs and the gradient of $x$:

# %%
with jax.enable_x64(True):
    random = np.random.RandomState(0)
    sentence = jnp.asarray(random.standard_normal((8, 5)))  # T D
    pull = jnp.asarray(random.standard_normal((8, 4)))  # T d_out
    both = [
        kind(5, 4, 8, 0.0, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        for kind in (CausalRenormalisedAttention, CausalAttention)
    ]

    def run(layer, sentence):
        return layer(sentence), jax.grad(lambda x: (layer(x) * pull).sum())(sentence)

    (out_late, grad_late), (out_early, grad_early) = (run(layer, sentence) for layer in both)
    for got, want in ((out_late, out_early), (grad_late, grad_early)):
        verdict = judge.same_function(got, want)
        print(f"difference {verdict.error:.0e}, limit {verdict.limit:.0e}")
        assert verdict.ok, verdict

# %% [markdown]
# Then the question itself: does the context of the first three tokens feel tokens four to
# eight? Through the late way the answer is a gradient of rounding errors, sixteen places down.

# %%
with jax.enable_x64(True):
    gradients = [
        jax.grad(lambda x, layer=layer: (layer(x)[:3] * pull[:3]).sum())(sentence) for layer in both
    ]
    size = float(jnp.linalg.norm(gradients[1]))
    past_of_late, future_of_late = np.asarray(gradients[0][:3]), np.asarray(gradients[0][3:])
    assert judge.same_function(past_of_late, np.asarray(gradients[1][:3])).ok
    assert judge.same_function(future_of_late, np.zeros_like(future_of_late), size).ok
    assert (gradients[1][3:] == 0).all()
    print(f"late:  {abs(future_of_late).max():.0e} from the future, {size:.1f} from the past")
    print("early: 0 from the future, exactly")

# %% [markdown]
# Where torch is at hand, the parity harness judges across the two ways: torch's *late* twin
# against our *early* layer, the same random weights in both, outputs and all gradients. It
# finds them equal.

# %%
if HAS_TORCH:
    twin = torch_ref.causal_renormalised.CausalRenormalisedAttention(5, 4, 8)
    mine = CausalAttention(5, 4, 8, 0.0, rngs=nnx.Rngs(0))
    report = compare(twin, mine, np.asarray(random.standard_normal((2, 7, 5))), dtypes=("float64",))
    assert report.ok, report
    outputs, gradients = (report.worst("float64", kind) for kind in ("output", "gradient"))
    print(f"{report.title}: outputs {outputs:.0e}, gradients {gradients:.0e}")

# %% [markdown]
# ### Where they do part
#
# Numbers in a computer are not exact, and there the two ways differ.
#
# **First, in the last bits.** The early way never looks at the future, so its past keeps every
# bit when the future changes. The late way divides by the future and cancels it again, and
# rounding leaves a trace.

# %%
other = x.at[3:].set(-2.0 * x[3:])  # the first three words stay, the others change
weights_early, weights_late = [], []
for words in (x, other):
    s = (words @ W_query) @ (words @ W_key).T / 2**0.5  # T T
    weights_early.append(jax.nn.softmax(jnp.where(future, -jnp.inf, s), axis=-1)[:3])
    part = jax.nn.softmax(s, axis=-1) * tril  # T T
    weights_late.append((part / part.sum(axis=-1, keepdims=True))[:3])

assert (weights_early[0] == weights_early[1]).all()
gap = float(abs(weights_late[0] - weights_late[1]).max())
assert gap < 1e-6
print(f"the past moves by: early 0, late {gap:.0e}")

# %% [markdown]
# **Second, when the future shouts.** Let a row see two words with scores 0 and 1, and hide a
# third whose score $s$ grows. The two weights should be 0.27 and 0.73, whatever $s$ is. In
# float32 $e^{-s}$ becomes zero before $s = 104$ (near 88, where the machine rounds the very
# smallest numbers to zero). The smaller weight goes first and the larger takes the whole row; then
# the late way divides nothing by nothing: NaN.

# %%
hidden = jnp.arange(0.0, 121.0)  # the score of the covered word
row = jnp.stack([jnp.zeros_like(hidden), jnp.ones_like(hidden), hidden], axis=-1)  # 121 3
part = jax.nn.softmax(row, axis=-1)[:, :2]  # 121 2
by_late = part / part.sum(axis=-1, keepdims=True)  # 121 2
by_early = jax.nn.softmax(row[:, :2], axis=-1)  # 121 2

lost = int(jnp.isnan(by_late[:, 0]).argmax())
assert np.isnan(by_late[lost:]).all() and 80 < lost < 110
np.testing.assert_allclose(by_early, np.broadcast_to([0.268941, 0.731059], (121, 2)), rtol=1e-5)

fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(hidden, by_early, color="tab:blue", lw=5, alpha=0.35, label=["early", None])
ax.plot(hidden, by_late, color="tab:red", lw=1.5, label=["late", None])
ax.axvspan(lost, 120, color="tab:red", alpha=0.1)
ax.text((lost + 120) / 2, 0.5, "late: NaN", ha="center", color="tab:red")
ax.set(xlabel="score of the covered word", ylabel="weights of the two others", ylim=(0, 1))
ax.legend(loc="upper left", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# **Third, with dropout in between.** Dropout sets weights to zero at random (more of it below).
# If it strikes before the rows are made whole, it does not cancel: the survivors share the row
# anew. Worse, where all of a short past was struck, the row is 0/0. With half of the weights
# dropped, the first word's row is lost in every second draw, the second word's in every fourth.

# %%
draws = jax.random.bernoulli(jax.random.key(3), 0.5, (20_000, 6, 6))  # True is kept
struck = erased * draws / 0.5
before = struck / struck.sum(axis=-1, keepdims=True)  # drop, then make whole
after = late * draws / 0.5  # make whole, then drop

lost = jnp.isnan(before).any(axis=-1).mean(axis=0)  # T
np.testing.assert_allclose(lost, 0.5 ** np.arange(1, 7), atol=0.02)
np.testing.assert_allclose(after.mean(axis=0), late, atol=0.02)  # right on average
print("share of rows lost, drop first:", lost.round(3))
print("row of 'journey', mean of all draws, drop last: ", after[:, 1].mean(axis=0).round(2))
print("row of 'journey', mean of those not lost, first:", jnp.nanmean(before[:, 1], 0).round(2))

# %% [markdown]
# So the late way is not wrong. It leaks nothing, costs a second pass over the table, and fails
# where the early way does not. Everybody uses the early way, and so do the layers from here on.
#
# A row may have nothing at all to look at, padding for instance. A plain softmax gives NaN
# for it. This library gives zeros.

# %%
nothing = jnp.full((1, 4), -jnp.inf)
assert jnp.isnan(jax.nn.softmax(nothing, axis=-1)).all()

q, k = (x @ W_query)[:, None], (x @ W_key)[:, None]  # T N H with one head
blind = np.tril(np.ones((6, 6), dtype=bool))
blind[2] = False  # "starts" may look at nothing
weights = attention_weights(q, k, mask=blind)[0]  # T T
assert (weights[2] == 0).all()
print(weights[:4])

# %% [markdown]
# ## Writing the mask down
#
# `triu(..., k=1)` has ones *above the diagonal only*: zeros on it, zeros below. (The source
# says "ones elsewhere".) The diagonal matters: a word may see itself, and so no row is empty.
#
# And two habits exist for what a `True` in a mask means.
#
# | `True` = hidden | `True` = visible |
# | --- | --- |
# | `tensor.masked_fill(mask, -inf)` | `torch.nn.functional.scaled_dot_product_attention` |
# | `torch.nn.MultiheadAttention` | `jax.nn.dot_product_attention`, `flax.nnx` |
# | `jnp.where(mask, -inf, scores)` | everything in `flax_attn` that takes a mask |

# %%
visible = ~future
assert (visible == jnp.tril(jnp.ones((6, 6), dtype=bool))).all()
by_mask = attention_weights(q, k, mask=CAUSAL)[0]  # T T, scaled by sqrt(2) of itself
np.testing.assert_allclose(by_mask, early, rtol=1e-5)
np.testing.assert_allclose(attention_weights(q, k, mask=visible)[0], early, rtol=1e-5)

mistaken = attention_weights(q, k, mask=future)[0]  # the wrong habit
np.testing.assert_allclose(mistaken.sum(axis=-1), [1, 1, 1, 1, 1, 0], rtol=1e-5)

fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.7), layout="constrained")
heat(axes[0], future.astype(int), "True = hidden: future")
heat(axes[1], visible.astype(int), "True = visible: ~future")
heat(axes[2], mistaken, "future, read as visible")
plt.show()

# %% [markdown]
# The third picture is the accident. Every row but the last still adds up to one, and no error is
# raised: the model reads the future and learns wonderfully, until it has to write. A mask of
# numbers (0 and 1, or 0 and $-\infty$) could mean anything, so it is refused:

# %%
try:
    attention_weights(q, k, mask=tril)
except TypeError as error:
    print(error)

# %% [markdown]
# ### In place, or a new array
#
# The torch notebooks write `scores.masked_fill_(mask, -torch.inf)`. The underscore means: *in
# place*. Everybody who holds that tensor sees the change. JAX arrays never change; `jnp.where`
# and `.at[...].set` give new ones, and under `jit` the compiler reuses the memory where it can.
# numpy stands in for torch where that is missing.

# %%
mine = np.asarray(scores).copy()
yours = mine  # another name for the same memory
mine[np.asarray(future)] = -np.inf
assert np.isinf(yours).sum() == 15

if HAS_TORCH:
    mine = torch.tensor(np.asarray(scores))
    yours = mine
    mine.masked_fill_(torch.tensor(np.asarray(future)), -torch.inf)
    assert torch.isinf(yours).sum() == 15

masked = jnp.where(future, -jnp.inf, scores)
assert jnp.isfinite(scores).all() and jnp.isinf(masked).sum() == 15
assert (scores.at[future].set(-jnp.inf) == masked).all()

try:
    scores[future] = -jnp.inf
except TypeError as error:
    print(str(error).split(". ")[0] + ".")

# %% [markdown]
# ## Dropout
#
# In training, each weight is set to zero with probability $p$, and the survivors are divided
# by $1 - p$, so that the weight stays what it was *on average*:
#
# $$\tilde w_{ts} = \frac{m_{ts}}{1 - p}\, w_{ts}, \qquad m_{ts} \in \{0, 1\},\quad
#   P(m_{ts} = 1) = 1 - p .$$
#
# Here is one draw that torch made at $p = 0.5$, and what it makes of our weights. Rows add up to
# one no longer; the last one keeps a third of its sum. That is meant: no word may rely on
# another being heard.

# %%
keep = np.asarray(
    [
        [1, 1, 1, 1, 1, 1],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
        [1, 0, 0, 0, 0, 1],
        [0, 1, 0, 0, 0, 0],
    ],
    dtype=bool,
)
dropped = jnp.where(keep, early / 0.5, 0.0)  # T T

assert judge.printed(dropped[0], [2.0, 0, 0, 0, 0, 0])
assert judge.printed(dropped[3], [0.5517, 0.4921, 0, 0, 0, 0])
assert judge.printed(dropped[5], [0, 0.3327, 0, 0, 0, 0])

fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.7), layout="constrained")
heat(axes[0], early, "weights")
heat(axes[1], keep / 0.5, "kept / (1 - p)", most=2.0)
heat(axes[2], dropped, "dropped out", most=2.0)
plt.show()

# %% [markdown]
# There is a second common place: after the sum, on the context vectors. Dropout on the weights
# makes a token deaf to some words; dropout on the context makes it forget some of its features,
# whoever said them. `CausalAttention` has both, as `dropout` and `context_dropout`. In `eval`
# mode neither does anything, not even to the last bit.

# %%
deaf = CausalAttention(3, 2, 6, dropout=0.5, rngs=nnx.Rngs(0))
forgetful = CausalAttention(3, 2, 6, dropout=0.0, context_dropout=0.5, rngs=nnx.Rngs(0))
plain = CausalAttention(3, 2, 6, dropout=0.0, rngs=nnx.Rngs(0))

half = forgetful(x)  # single features are gone, the others are doubled
kept = half != 0
assert 0 < kept.sum() < kept.size
np.testing.assert_allclose(half[kept], 2 * plain(x)[kept], rtol=1e-5)
assert (deaf(x) != deaf(x)).any()  # another draw at every call

for layer in (deaf, forgetful):
    layer.eval()
    assert (layer(x) == plain(x)).all()
print(half)

# %% [markdown]
# ## Batches
#
# A batch is several sentences stacked on a new first axis: `B T D`. Every matrix product of the
# head works on the last two axes, so nothing has to be rewritten, and no sentence hears another.
#
# Below is the layer with the weights that `torch.manual_seed(123)` draws, on the sentence
# stacked twice, beside the numbers that torch prints.

# %%
KERNELS = {  # torch's (d_out, d_in), as drawn
    "W_query": [[-0.23542964, 0.01912448, -0.28674594], [0.21772662, -0.49193421, 0.42322308]],
    "W_key": [[-0.41964141, -0.45901766, -0.36482018], [0.26147819, -0.21332639, 0.21605217]],
    "W_value": [[-0.49001414, -0.35029206, -0.21198919], [-0.11346072, -0.44043937, 0.37804362]],
}
causal = CausalAttention(3, 2, context_length=6, dropout=0.0, rngs=nnx.Rngs(0))
for name, weight in KERNELS.items():
    getattr(causal, name).kernel[...] = jnp.asarray(weight).T  # Linear is (out, in) there

batch = jnp.stack([x, x])  # B T D
context = causal(batch)  # B T d_out
printed = [
    [-0.4519, 0.2216],
    [-0.5874, 0.0058],
    [-0.6300, -0.0632],
    [-0.5675, -0.0843],
    [-0.5526, -0.0981],
    [-0.5299, -0.1081],
]
assert judge.printed(context, [printed, printed])
print(batch.shape, "->", context.shape)

if HAS_TORCH:
    torch.manual_seed(123)
    twin = torch_ref.causal_attention.CausalAttention(3, 2, 6, 0.0)
    ported = CausalAttention(3, 2, 6, 0.0, rngs=nnx.Rngs(1))
    port(twin, ported)  # transposes each Linear
    assert judge.printed(ported(batch), [printed, printed])

# %% [markdown]
# Two *different* sentences show more: each one's rows are those it has alone. And a sentence may
# be shorter than `context_length`. Cutting off the end changes nothing before it, which is the
# whole point of this chapter.

# %%
pair = jnp.stack([x, x[::-1]])  # two sentences
np.testing.assert_allclose(causal(pair)[0], causal(x), rtol=1e-5)
np.testing.assert_allclose(causal(pair)[1], causal(x[::-1]), rtol=1e-5)
np.testing.assert_allclose(causal(x[:4]), causal(x)[:4], rtol=1e-5)

# %% [markdown]
# ## What is learnt, what is held, what is computed
#
# The source registers the mask as a *buffer*. In torch a tensor on a module can be
#
# | | trained | moves with `.to(device)` | in `state_dict` |
# | --- | --- | --- | --- |
# | `nn.Parameter` | yes | yes | yes |
# | `register_buffer` | no | yes | yes |
# | plain attribute | no | no | no |
#
# Eager torch needs the mask as a tensor that lies on the same device as the scores. A buffer
# moves along, and saves building it at every call. The price: the table is part of every
# checkpoint.

# %%
if HAS_TORCH:
    print("parameters:", [name for name, _ in twin.named_parameters()])
    print("buffers:   ", [name for name, _ in twin.named_buffers()])
    assert "mask" in twin.state_dict()
    report = compare(twin, ported, np.asarray(batch))
    assert report.ok and report.constants == ("mask",)  # computed here, so it is not carried over

# %% [markdown]
# In JAX a function is traced to a program before it runs. The shape of `scores` is known while
# tracing, so the mask is written as part of the computation: compare row number and column
# number. Nothing is stored, nothing is moved, nothing is in the checkpoint. The compiler usually
# does not even build the table; it asks "is $s > t$?" while it reads the scores.


# %%
def cover(scores):
    t, s = jnp.arange(6)[:, None], jnp.arange(6)
    return jnp.where(s > t, -jnp.inf, scores)


program = jax.make_jaxpr(cover)(scores)
assert [tuple(value.shape) for value in program.in_avals] == [(6, 6)]  # the scores, and no mask
assert "iota" in str(program)  # row and column numbers, made on the spot
print(program)

names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(causal, nnx.Param))]
print("parameters:", names)
assert names == ["W_key/kernel", "W_query/kernel", "W_value/kernel"]

# %% [markdown]
# ### Frozen, or trained
#
# A parameter that is not to be trained is a third thing: it is stored, but it gets no update.
# torch says `requires_grad=False` on the tensor. In nnx the tensor does not know; whoever takes
# the gradient says *with respect to what*. Here only the values learn:

# %%
only_values = nnx.All(nnx.Param, nnx.PathContains("W_value"))
student = nnx.clone(causal)
optimizer = nnx.Optimizer(student, optax.sgd(0.5), wrt=only_values)


@nnx.jit
def step(student, optimizer):
    def loss(student):
        return ((student(x) - x[:, :2]) ** 2).mean()

    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, only_values))(student)
    optimizer.update(student, grads)
    return value


losses = [float(step(student, optimizer)) for _ in range(20)]
assert losses[-1] < losses[0] / 2
assert (student.W_query.kernel[...] == causal.W_query.kernel[...]).all()  # frozen
assert (student.W_value.kernel[...] != causal.W_value.kernel[...]).all()  # trained
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# ## Exercise
#
# Let each word see itself and the *two* words before it, not its whole past. Write the mask
# with `jnp`, compute the weights of our sentence by the early way, and say which rows differ
# from `early`. Can the last context vector of *two* such layers, one upon the other, feel the
# first word of six?
#
# <details><summary>Answer</summary>
#
# ```python
# rows, columns = jnp.arange(6)[:, None], jnp.arange(6)
# visible = (columns <= rows) & (columns >= rows - 2)
# weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
# ```
#
# The first three rows are those of `early`, since they have no more than two words before them.
# In `flax_attn` this mask is `Window(2, 0)`, and
# `attention_weights(q, k, mask=Window(2, 0))[0]` gives the same table.
#
# Word six hears words four to six in one layer; word four has heard words two to four in the
# layer below. So two layers reach back four words, to word two, and not to the first. Each
# further layer adds two.
#
# </details>
#
# Next: [4. Many heads](04_many_heads.ipynb), where several of these work side by side.
