# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Trainable weights
#
# *21 minutes to read, 30 seconds to run on a quiet machine with two cores.*
# [Query, key and value](#Why-query,-key-and-value) ·
# [Step by step](#Step-by-step) ·
# [All words at once](#All-words-at-once) ·
# [Why divide by a root](#Why-divide-by-the-root-of-the-width) ·
# [Version 1](#Version-1-with-three-matrices) ·
# [Version 2](#Version-2-with-three-Linear-layers) ·
# [Frozen or trainable](#Frozen-or-trainable) ·
# [Exercises](#Exercises)
#
# In chapter 1 the embeddings alone decided which word looks at which. Now every word gets three
# vectors, one to ask with, one to be found by and one to hand over. Three matrices make them, and
# matrices can be trained.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
places = {
    "x": (0, 0),
    "queries q = x W_q": (1.7, 1),
    "keys k = x W_k": (1.7, 0),
    "values v = x W_v": (1.7, -1),
    "scores q @ k.T": (3.8, 0.5),
    "weights: softmax": (5.7, 0.5),
    "context c": (7.4, -0.3),
}
x_, q_, k_, v_, scores_, weights_, context_ = places
arrows = [(x_, q_), (x_, k_), (x_, v_), (q_, scores_), (k_, scores_), (scores_, weights_)]
fig, ax = plt.subplots(figsize=(8.8, 2.4), layout="constrained")
for start, end in [*arrows, (weights_, context_), (v_, context_)]:
    middle = 0.45 * np.array(places[start]) + 0.55 * np.array(places[end])
    ax.plot(*zip(places[start], places[end], strict=True), color="0.3", lw=1, zorder=1)
    ax.annotate("", middle, places[start], arrowprops={"arrowstyle": "-|>", "color": "0.3"})
for name, (right, up) in places.items():
    box = {"boxstyle": "round,pad=0.45", "facecolor": "lightsteelblue", "edgecolor": "0.3"}
    ax.text(right, up, name, ha="center", va="center", bbox=box)
ax.set(xlim=(-0.5, 8.1), ylim=(-1.6, 1.6))
ax.set_title("One word x makes a query, a key and a value")
ax.axis("off")
plt.show()

# %% [markdown]
# This is the formula that every transformer computes, and the picture is its left to right:
#
# $$C = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V,
#   \qquad Q = X W_q, \quad K = X W_k, \quad V = X W_v$$
#
# At the end of this chapter you will
#
# * know what queries, keys and values are for, and have computed each by hand;
# * tell weight parameters from attention weights, and frozen parameters from trainable ones;
# * know why the scores are divided by $\sqrt d$: what it does to their variance and to gradients;
# * have written the layer as a class, and shown that it is PyTorch's function.
#
# `x` is the sentence of chapter 1: six words, three numbers each. It comes from `climb.py`, the
# file beside these notebooks, which also draws tables (`heat`) and compares them (`same`,
# `as_printed`).

# %%
from climb import HAS_TORCH, as_printed, heat, same, tokens, x

# %% [markdown]
# ## Why query, key and value
#
# The names come from looking things up. In a dictionary you ask with a **query**, it is compared
# with the **keys**, and you get the **value** of the key that fits:

# %%
pages = {"red": 10.0, "green": 50.0, "blue": 90.0}
print(pages["red"])

# %% [markdown]
# Attention is a dictionary that never says no. Query and keys are vectors, and how well they fit is
# their dot product. The answer is a mixture of *all* values, most of it from the keys that fit
# best. The longer the query, the closer the answer is to the plain lookup. A query of zeros gets
# the mean.

# %%
keys = jnp.eye(3)  # red, green, blue
values = jnp.array([10.0, 50.0, 90.0])
for length in (0, 2, 20):
    query = length * keys[0]  # asks for red
    print(f"query of length {length:2d}: {jax.nn.softmax(keys @ query) @ values:.4f}")

same(jax.nn.softmax(keys @ (20 * keys[0])) @ values, pages["red"])

# %% [markdown]
# In chapter 1 one vector had all three roles. But what a word looks for, what it can be found by
# and what it has to tell are different things. So each word gets three vectors:
#
# | | it says | made by |
# | --- | --- | --- |
# | **query** $q_t$ | what I am looking for | $x_t W_q$ |
# | **key** $k_t$ | what I can be found by | $x_t W_k$ |
# | **value** $v_t$ | what I hand over when found | $x_t W_v$ |
#
# ### Three matrices
#
# $$W_q, W_k, W_v \in \mathbb{R}^{d_\text{in} \times d_\text{out}}, \qquad d_\text{in} = 3, \quad
#   d_\text{out} = 2$$
#
# The numbers are random to begin with. These are the ones that PyTorch draws after the seed 123, so
# that you can follow along with a book or a video that uses them.

# %%
W_query = jnp.array([[0.29611194, 0.5165623], [0.25167072, 0.6885568], [0.07397246, 0.86652195]])
W_key = jnp.array([[0.13657987, 0.10247904], [0.18405646, 0.72644675], [0.3152539, 0.68710667]])
W_value = jnp.array([[0.075635314, 0.19663817], [0.31641197, 0.40174013], [0.1185683, 0.8273954]])
print(W_query, W_key, W_value, sep="\n\n")

# %%
if HAS_TORCH:
    import torch

    torch.manual_seed(123)
    for W in (W_query, W_key, W_value):
        same(W, torch.rand(3, 2), within=0)

# %% [markdown]
# Two different things are called weights, and you should keep them apart.
#
# | | **weight parameters** | **attention weights** |
# | --- | --- | --- |
# | here | $W_q, W_k, W_v$ | $w = \operatorname{softmax}(\ldots)$ |
# | come from | training | the sentence, anew each time |
# | shape | $(d_\text{in}, d_\text{out})$, whatever the sentence | $(T, T)$ |
# | rows add up to one | no | yes |
# | after training | fixed | as different as the sentences |
#
# ## Step by step
#
# *Journey* asks. Its query is its embedding times $W_q$, a product of shapes
# $(3) \cdot (3 \times 2) \rightarrow (2)$.

# %%
JOURNEY, STEP = 1, 5
query_journey = x[JOURNEY] @ W_query  # d_out
print(query_journey)
as_printed(query_journey, [0.4306, 1.4551])

# %% [markdown]
# To be found and mixed, every word needs a key and a value. And since every word will ask, all get
# a query too.

# %%
queries = x @ W_query  # T d_out
keys = x @ W_key  # T d_out
values = x @ W_value  # T d_out
for name, table in {"queries": queries, "keys": keys, "values": values}.items():
    print(name, table, sep="\n")

as_printed(keys[JOURNEY], [0.4433, 1.1419])

# %%
fig, axes = plt.subplots(1, 4, figsize=(9, 3.2), width_ratios=(3, 2, 2, 2))
heat(axes[0], x, "embeddings", columns=["0", "1", "2"], most=1.5)
named = {"queries": queries, "keys": keys, "values": values}
for ax, (name, table) in zip(axes[1:], named.items(), strict=True):
    heat(ax, table, name, columns=["0", "1"], most=1.5)
    ax.set_yticks([])
fig.tight_layout()
plt.show()

# %% [markdown]
# **What stays behind.** The embedding of a word is its private information. Other words compare
# themselves with its key and receive its value, and nothing else of it. Our embeddings have three
# numbers and the values two, so there is a direction in which a word can change and tell the same.
# (`jnp.cross` gives the arrow at a right angle to both columns of $W_v$.)

# %%
private = 5 * jnp.cross(W_value[:, 0], W_value[:, 1])  # d_in
changed = x[JOURNEY] + private
print("journey was", x[JOURNEY], "and is now", changed)
print("its value was", values[JOURNEY], "and is now", changed @ W_value)
same(changed @ W_value, values[JOURNEY])

# %% [markdown]
# Training decides what each matrix lets through: what a word asks, what it offers and what it
# tells.
#
# **Scores.** How much does *step* matter to *journey*? That is the dot product of its key with the
# query of *journey*. And so for every word:
#
# $$s_j = q_\text{journey} \cdot k_j$$

# %%
scores_journey = keys @ query_journey  # T
print(scores_journey)
as_printed(scores_journey, [1.2705, 1.8524, 1.8111, 1.0795, 0.5577, 1.5440])

# %% [markdown]
# Queries and keys have two numbers each, so this can be drawn. The score of a key is how far it
# reaches in the direction of the query, times the length of the query.

# %%
fig, ax = plt.subplots(figsize=(4.6, 3.6), layout="constrained")
arrow = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.008}
ax.quiver(0, 0, *query_journey, color="tab:red", label="query of journey", **arrow)
ax.plot(*keys.T, "o", color="tab:blue", label="keys")
along = query_journey / jnp.linalg.norm(query_journey)  # d_out, of length one
for token, key in zip(tokens, keys, strict=True):
    ax.plot(*zip(key, (key @ along) * along, strict=True), ":", color="0.6")
    place = (6, 3 if token == "journey" else -9)
    ax.annotate(token, key, place, textcoords="offset points", color="tab:blue")
ax.set(xlim=(-0.2, 1.5), ylim=(0, 1.6), aspect="equal")
ax.set_title("Journey and starts reach farthest along the query")
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# **Weights.** The scores are divided by $\sqrt{d_\text{out}}$, which has a section of its own
# below. Then comes the softmax.
#
# $$w_j = \operatorname{softmax}\!\left(\frac{s}{\sqrt{d_\text{out}}}\right)_j$$

# %%
weights_journey = jax.nn.softmax(scores_journey / 2**0.5)  # T
print(weights_journey, "sum", weights_journey.sum())
as_printed(weights_journey, [0.1500, 0.2264, 0.2199, 0.1311, 0.0906, 0.1820])

# %% [markdown]
# **Context.** As in chapter 1, except that now the *values* are mixed.
#
# $$c_\text{journey} = \sum_j w_j v_j$$

# %%
context_journey = weights_journey @ values  # d_out
print(context_journey)
as_printed(context_journey, [0.3061, 0.8210])

# %% [markdown]
# > **Try it.** Compute the context vector of *one*. Is it far from that of *journey*?
#
# <details><summary>Answer</summary>
#
# ```python
# ONE = 4
# context_one = jax.nn.softmax(keys @ queries[ONE] / 2**0.5) @ values  # d_out
# as_printed(context_one, [0.2927, 0.7891])
# apart = [float(jnp.linalg.norm(y[ONE] - y[JOURNEY])) for y in (values, x)]
# print(f"contexts {jnp.linalg.norm(context_one - context_journey):.3f}, values {apart[0]:.2f}")
# ```
#
# No. It is $(0.293, 0.789)$, and that of *journey* is $(0.306, 0.821)$: 0.03 apart, where their
# values are 0.71 apart. Untrained weights are nearly equal, so every word gets nearly the mean of
# all values.
#
# </details>
#
# ## All words at once
#
# This is the whole formula, one line for each step.


# %%
def self_attention(x, W_query, W_key, W_value):
    queries, keys, values = x @ W_query, x @ W_key, x @ W_value  # T d_out each
    scores = queries @ keys.T / keys.shape[-1] ** 0.5  # T T
    weights = jax.nn.softmax(scores, axis=-1)  # T T
    return weights @ values, weights  # T d_out, T T


context, weights = self_attention(x, W_query, W_key, W_value)
print(context)
same(context[JOURNEY], context_journey)

# %% [markdown]
# The scores before the division, as a table:

# %%
scores = queries @ keys.T  # T T
print(scores)
same(scores[JOURNEY], scores_journey)

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.8, 3.9), layout="constrained")
heat(axes[0], scores, "scores: no longer symmetric")
heat(axes[1], weights, "attention weights", cmap="Greens", most=0.3)
for ax in axes:
    ax.set(xlabel="key: the word looked at", ylabel="query: the word that asks")
plt.show()

# %% [markdown]
# *Journey* gives *step* 1.54, and *step* gives *journey* 1.32: asking and being asked differ now.
# Still, all weights are nearly the same. The parameters are random, and nothing has been learned.
#
# The parameters fit any sentence, and the attention weights belong to one sentence. Four words in
# another order give another table of another shape, from the same 18 numbers:

# %%
other = x[jnp.array([4, 5, 0, 1])]  # one step, Your journey
other_weights = self_attention(other, W_query, W_key, W_value)[1]
print(f"{W_query.size + W_key.size + W_value.size} parameters")
print(f"{weights.size} attention weights for six words, {other_weights.size} for four")

# %% [markdown]
# ## Tokens do not communicate before q @ k
#
# The three products treat each word by itself: the query of *journey* would be the same in any
# other sentence. Words meet for the first time in the product of queries and keys. You can see it
# in the derivatives. How strongly does row $t$ of a result depend on word $j$? `jax.jacobian`
# computes all derivatives, and we take the size of each block.


# %%
def dependence(function):
    jacobian = jax.jacobian(function)(x)  # T d_out T d_in
    return jnp.sqrt((jacobian**2).sum(axis=(1, 3)))  # T T


of_queries = dependence(lambda x: x @ W_query)
of_context = dependence(lambda x: self_attention(x, W_query, W_key, W_value)[0])
assert (of_queries[~np.eye(6, dtype=bool)] == 0).all()  # exactly nothing
assert (of_context > 0).all()  # everything on everything

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.8, 3.9), layout="constrained")
heat(axes[0], of_queries, "query of each word", cmap="Purples")
heat(axes[1], of_context, "context vector of each word", cmap="Purples")
for ax in axes:
    ax.set(xlabel="depends on the embedding of", ylabel="row t")
plt.show()

# %% [markdown]
# The same holds for keys and values. In a transformer, tokens exchange information only in
# attention.
#
# ## Why divide by the root of the width
#
# A softmax depends on differences, so the *size* of the scores decides how sharp its answer is.
# Take five numbers, and then eight times these numbers:

# %%
numbers = jnp.array([0.1, -0.2, 0.3, -0.2, 0.5])
soft, sharp = jax.nn.softmax(numbers), jax.nn.softmax(8 * numbers)
print(soft)
print(sharp)
as_printed(sharp, [0.0326, 0.0030, 0.1615, 0.0030, 0.8000])

# %%
fig, ax = plt.subplots(figsize=(5.4, 2.3))
ax.bar(np.arange(5) - 0.2, soft, 0.4, label="softmax of x")
ax.bar(np.arange(5) + 0.2, sharp, 0.4, label="softmax of 8x")
ax.set_xticks(range(5), [f"x = {n:.1f}" for n in numbers])
ax.set(ylabel="weight", title="The same order, but sharper")
ax.legend()
plt.show()

# %% [markdown]
# And scores do grow with the width of queries and keys. Let all their numbers be independent, with
# mean 0 and variance 1. Each product $q_i k_i$ then has mean 0 and variance 1 again, and variances
# of independent terms add up:
#
# $$\operatorname{Var}(q \cdot k) = \sum_{i=1}^{d} \operatorname{Var}(q_i k_i) = d, \qquad
#   \operatorname{Var}\!\left(\frac{q \cdot k}{\sqrt d}\right) = 1$$
#
# The divisor is $\sqrt d$ and not $d$, because a number that is divided by $c$ has its variance
# divided by $c^2$. We measure it on 20,000 pairs for each width:

# %%
WIDTHS = (5, 20, 100, 1000)
variances = {}
for d in WIDTHS:
    q, k = jax.random.normal(jax.random.key(d), (2, 20_000, d))
    products = (q * k).sum(axis=-1)
    variances[d] = products.var(), (products / d**0.5).var()
    print("d = {:4d}: variance {:7.1f}, after division {:.2f}".format(d, *variances[d]))

same([variances[d][1] for d in WIDTHS], np.ones(4), within=0.1)

# %% [markdown]
# (A common slip is a variance near 100 labelled "dimension 20". It was computed at 100. At 20 it is
# 20.)
#
# ### What it does to gradients
#
# A sharp softmax is not wrong in itself, and a trained model may need one. But it is a bad place to
# *start*, because it hardly learns. The derivative of the weights $w$ by the scores $s$ is
#
# $$\frac{\partial w_i}{\partial s_j} = w_i (\delta_{ij} - w_j),$$
#
# where $\delta_{ij}$ is 1 if $i = j$, and else 0. If one weight is nearly 1 and the others nearly
# 0, every such product is nearly 0. Then almost nothing of what the loss says reaches the scores,
# or $W_q$ and $W_k$ behind them.


# %%
@jax.vmap
def gradient_size(scores):  # for each row of scores
    w = jax.nn.softmax(scores)
    derivative = w[:, None] * (jnp.eye(len(w)) - w[None, :])  # T T
    return jnp.linalg.norm(derivative)


by_jax = jnp.linalg.norm(jax.jacobian(jax.nn.softmax)(numbers))
same(gradient_size(numbers[None])[0], by_jax)

# %% [markdown]
# Here is the size of that derivative for one query and six keys, averaged over 1,000 draws.

# %%
unscaled, scaled = [], []
for d in WIDTHS:
    q, *k = jax.random.normal(jax.random.key(d), (7, 1000, d))
    raw = jnp.stack([(q * one).sum(axis=-1) for one in k], axis=-1)  # 1000 6
    unscaled.append(gradient_size(raw).mean())
    scaled.append(gradient_size(raw / d**0.5).mean())

print("unscaled", np.array(unscaled), "scaled", np.array(scaled))
assert min(scaled) > 0.3 and unscaled[-1] < scaled[-1] / 5

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3), layout="constrained")
before, after = zip(*variances.values(), strict=True)
axes[0].loglog(WIDTHS, before, "o-", color="tab:red", label="q . k")
axes[0].loglog(WIDTHS, after, "o-", color="tab:blue", label="q . k / sqrt(d)")
axes[0].set(title="Variance of the scores", xlabel="width d")
axes[1].semilogx(WIDTHS, unscaled, "o-", color="tab:red", label="unscaled")
axes[1].semilogx(WIDTHS, scaled, "o-", color="tab:blue", label="scaled")
axes[1].set(title="Size of the softmax's derivative", xlabel="width d", ylim=(0, 0.5))
for ax in axes:
    ax.set_xticks(WIDTHS, WIDTHS)
    ax.minorticks_off()
    ax.legend()
plt.show()

# %% [markdown]
# Without the division, a wider layer would start with smaller gradients, for no other reason than
# its width. With it, the width makes no difference.
#
# > **Try it.** Divide by `d` instead of `d**0.5` in the last two cells. Is that better still? Look
# > at the weights of one row before you decide.
#
# <details><summary>Answer</summary>
#
# ```python
# # after the last two cells: d is 1000, and raw has 1,000 rows of six scores
# for divisor in (d**0.5, d):
#     row = jax.nn.softmax(raw[0] / divisor)
#     print(f"{gradient_size(raw / divisor).mean():.3f}", row)
# assert jnp.abs(row - 1 / 6).max() < 0.02
# ```
#
# No. The derivative hardly changes: 0.37 in place of 0.39. But look at the row. At $d = 1000$ all
# six weights are between 0.158 and 0.170, so the head takes nearly the plain mean, whatever the
# words say. The wider it is, the longer it would have to learn before it can choose a word.
#
# </details>
#
# ## Version 1 with three matrices
#
# A layer is the same function with a place for its parameters. In Flax that place is an
# `nnx.Module`, and an `nnx.Param` is a parameter.


# %%
class MySelfAttention(nnx.Module):
    def __init__(self, d_in, d_out, *, rngs):
        self.W_query = nnx.Param(jax.random.uniform(rngs.params(), (d_in, d_out)))
        self.W_key = nnx.Param(jax.random.uniform(rngs.params(), (d_in, d_out)))
        self.W_value = nnx.Param(jax.random.uniform(rngs.params(), (d_in, d_out)))

    def __call__(self, x):  # B T d_in
        queries = x @ self.W_query[...]  # B T d_out
        keys = x @ self.W_key[...]  # B T d_out
        values = x @ self.W_value[...]  # B T d_out
        scores = queries @ keys.mT / keys.shape[-1] ** 0.5  # B T T
        return jax.nn.softmax(scores, axis=-1) @ values  # B T d_out


# %% [markdown]
# With our three matrices in it, it gives our table. (`.mT` swaps the last two axes, so the class
# takes one sentence or a batch.)

# %%
mine = MySelfAttention(3, 2, rngs=nnx.Rngs(0))
mine.W_query[...], mine.W_key[...], mine.W_value[...] = W_query, W_key, W_value
print(mine(x))
same(mine(x), context)

# %% [markdown]
# The library's `SelfAttentionV1` is that class. `nnx.update` copies the parameters of one into the
# other.

# %%
from flax_attn import SelfAttentionV1

v1 = SelfAttentionV1(3, 2, rngs=nnx.Rngs(0))
nnx.update(v1, nnx.state(mine, nnx.Param))
same(v1(x), mine(x))

# %% [markdown]
# And it is PyTorch's function, whatever the weights: outputs, scores, attention weights and
# gradients agree to the last digits of float64.

# %%
from flax_attn.parity import Case, compare

if HAS_TORCH:
    from torch_ref.self_attention_v1 import SelfAttentionV1 as OriginalV1

    torch.manual_seed(123)
    report = compare(OriginalV1(3, 2), v1, np.asarray(x))
else:
    report = Case(SelfAttentionV1, {"d_in": 3, "d_out": 2}, x=(6, 3)).report()
assert report.ok, report
print(report)

# %% [markdown]
# ## Version 2 with three Linear layers
#
# Version 2 says the same with `nnx.Linear`. That brings two things along: a bias if wanted
# (`qkv_bias=True`), and a better start. Version 1 starts from numbers between 0 and 1, whatever the
# width. Version 2 starts on both sides of zero, within $\pm 1/\sqrt{d_\text{in}}$, as
# `torch.nn.Linear` does: the wider the words, the smaller the numbers.

# %%
from flax_attn import SelfAttentionV2

v2 = SelfAttentionV2(3, 2, rngs=nnx.Rngs(0))
print(v2.W_query.kernel[...])
assert v2.W_query.kernel[...].min() < 0 and jnp.abs(v2.W_query.kernel[...]).max() < 3**-0.5

# %% [markdown]
# With three numbers a word this makes little difference. With 64 it decides whether the layer can
# learn. Here are the scores of 200 random words of 64 numbers at both starts, divided by
# $\sqrt{64}$ in both.

# %%
wide = jax.random.normal(jax.random.key(0), (200, 64))  # T d_in
start1, start2 = (kind(64, 64, rngs=nnx.Rngs(0)) for kind in (SelfAttentionV1, SelfAttentionV2))
wide_scores = {
    "version 1": (wide @ start1.W_query[...]) @ (wide @ start1.W_key[...]).T / 8,  # T T
    "version 2": start2.W_query(wide) @ start2.W_key(wide).T / 8,  # T T
}

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.4), layout="constrained")
for ax, (name, table) in zip(axes, wide_scores.items(), strict=True):
    ax.hist(np.asarray(table).ravel(), bins=80)
    ax.set(title=f"{name}: the spread is {table.std():.3g}", xlabel="score", yticks=[])
plt.show()

# %%
for name, table in wide_scores.items():
    largest, slope = jax.nn.softmax(table[:, :6]).max(axis=-1), gradient_size(table[:, :6])
    print(f"{name}: largest of six weights {largest.mean():.2f}, derivative {slope.mean():.3f}")
assert wide_scores["version 1"].std() > 50 * wide_scores["version 2"].std()

# %% [markdown]
# Version 1 starts with scores of a hundred and more. One weight is nearly 1, and the derivative of
# the softmax is nearly 0, as in the section on the root of the width. Version 2 starts with weights
# that are nearly equal, and its derivative is large. That is why one uses Linear.
#
# These are the weights that PyTorch draws for version 2 after the seed 789. PyTorch stores the
# matrix of a Linear layer as $(d_\text{out}, d_\text{in})$, and Flax as
# $(d_\text{in}, d_\text{out})$, so each one is transposed.

# %%
DRAWN = {
    "W_query": [[0.31605908, 0.45680857, 0.51183486], [-0.1682854, -0.33787704, -0.09177387]],
    "W_key": [[0.40580583, -0.47042054, 0.2368052], [0.21336074, -0.26005065, -0.51054299]],
    "W_value": [[0.25256988, -0.14147827, -0.19618134], [0.5191074, -0.08516758, -0.20432705]],
}
for name, weight in DRAWN.items():
    getattr(v2, name).kernel[...] = jnp.array(weight).T

print(v2(x))
as_printed(v2(x)[:2], [[-0.0739, 0.0713], [-0.0748, 0.0703]])

# %%
from flax_attn.parity import port

if HAS_TORCH:
    from torch_ref.self_attention_v2 import SelfAttentionV2 as OriginalV2

    torch.manual_seed(789)
    original = OriginalV2(3, 2)
    same(port(original, SelfAttentionV2(3, 2, rngs=nnx.Rngs(1)))(x), v2(x))
    report = compare(original, v2, np.asarray(x))
    assert report.ok, report
    print(report)

# %% [markdown]
# `port` copied the weights. A `torch.nn.Linear` is transposed because it is one, so nothing had to
# be said. What happens if one forgets the transposition? With luck the shapes protest:

# %%
try:
    x @ jnp.array(DRAWN["W_query"])
except TypeError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Without luck the matrix is square, as in most real models. Then everything runs, the numbers are
# wrong, and no error is raised. That is why this library copies weights by name and type, and
# proves the result. Chapter 7 does so with a trained model.

# %%
square = jax.random.normal(jax.random.key(0), (3, 3))
right, wrong = x @ square.T, x @ square
print(f"the same shape, and wrong by up to {jnp.abs(right - wrong).max():.1f}")
assert right.shape == wrong.shape

# %% [markdown]
# > **Try it.** Build version 2 with `qkv_bias=True`. How many parameters does it have?
#
# <details><summary>Answer</summary>
#
# ```python
# with_bias = SelfAttentionV2(3, 2, qkv_bias=True, rngs=nnx.Rngs(0))
# sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(with_bias, nnx.Param))]
# print(sizes)
# assert sum(sizes) == 24
# ```
#
# 24: three matrices of $3 \cdot 2$ numbers, and three biases of 2.
#
# </details>
#
# ## Frozen or trainable
#
# What makes a parameter trainable? In PyTorch each parameter has a switch, `requires_grad`, and
# where it is off, no gradient is kept. In JAX a parameter is an array like any other. Whoever takes
# the gradient says with respect to what, and the optimizer is told the same. The rest is
# **frozen**.
#
# Let *journey* learn to look at *step*: its context vector should become the value of *step*.
# Queries and keys may change. The values may not, or the layer could cheat and make all values the
# same.
#
# In Flax a *filter* says which parameters are meant. `nnx.All(a, b)` means both, `nnx.Not(a)` means
# the others, and `nnx.PathContains("W_value")` looks at the name.

# %%
import optax

learner = SelfAttentionV2(3, 2, rngs=nnx.Rngs(7))
target = learner.W_value(x[STEP])  # d_out
trainable = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("W_value")))
optimizer = nnx.Optimizer(learner, optax.adam(0.1), wrt=trainable)

# %% [markdown]
# The training step is that of chapter 0. Only `nnx.DiffState(0, trainable)` is new: differentiate
# argument 0 with respect to these parameters.


# %%
def distance(learner):
    return ((learner(x)[JOURNEY] - target) ** 2).sum()


@nnx.jit
def train_step(learner, optimizer):
    of_trainable = nnx.DiffState(0, trainable)
    loss, gradients = nnx.value_and_grad(distance, argnums=of_trainable)(learner)
    optimizer.update(learner, gradients)
    return loss


# %%
def look(layer):
    scores = layer.W_query(x) @ layer.W_key(x).T  # T T
    return jax.nn.softmax(scores / 2**0.5, axis=-1)  # T T


before, frozen = look(learner), learner.W_value.kernel[...]
losses = [float(train_step(learner, optimizer)) for _ in range(300)]
after = look(learner)
print(f"journey gives step {before[JOURNEY, STEP]:.2f} before, {after[JOURNEY, STEP]:.2f} after")
assert after[JOURNEY, STEP] > 0.8 and (learner.W_value.kernel[...] == frozen).all()

# %%
fig, axes = plt.subplots(1, 3, figsize=(10.4, 3.3), width_ratios=(6, 6, 5), layout="constrained")
heat(axes[0], before, "before", cmap="Greens", most=1)
heat(axes[1], after, "after 300 steps", cmap="Greens", most=1)
axes[2].semilogy(losses)
axes[2].set(title="loss", xlabel="step")
plt.show()

# %% [markdown]
# That is what chapter 1 could not do. The rows of the other words changed too, because all words
# share the same three matrices.
#
# ## In a nutshell
#
# | word | formula | shape here |
# | --- | --- | --- |
# | weight parameters | $W_q, W_k, W_v$, learned | 3 x 2 each |
# | queries, keys, values | $Q = X W_q,\ K = X W_k,\ V = X W_v$, each word by itself | 6 x 2 each |
# | scores | $S = Q K^\top / \sqrt{d}$, where words meet | 6 x 6 |
# | attention weights | $W = \operatorname{softmax}(S)$, rows add up to one | 6 x 6 |
# | context vectors | $C = W V$ | 6 x 2 |
#
# ## Exercises
#
# **1.** Two layers that compute the same function give the same output as soon as they hold the
# same numbers. Here are the weights of a PyTorch version 2, drawn after the seed 789 when a version
# 1 had been built first. Put them into `v1` and into `v2`, and show that both give the same table.
# Mind how they are stored:
#
# | | holds | shape | computes |
# | --- | --- | --- | --- |
# | version 1, PyTorch or Flax | `W_query` | $(d_\text{in}, d_\text{out})$ | $x W$ |
# | `torch.nn.Linear` | `W_query.weight` | $(d_\text{out}, d_\text{in})$ | $x W^\top$ |
# | `nnx.Linear` | `W_query.kernel` | $(d_\text{in}, d_\text{out})$ | $x W$ |

# %%
weights_of_v2 = {  # (d_out, d_in)
    "W_query": [[0.30742657, 0.34845704, 0.15828492], [-0.17734346, -0.3440913, -0.4311712]],
    "W_key": [[-0.04451297, 0.23666754, -0.1329499], [-0.221118, 0.20495632, -0.465811]],
    "W_value": [[0.5479912, 0.247615, -0.027615687], [-0.2342338, 0.048407875, -0.43855363]],
}

# %% [markdown]
# <details><summary>Answer</summary>
#
# ```python
# for name, weight in weights_of_v2.items():
#     getattr(v1, name)[...] = jnp.array(weight).T
#     getattr(v2, name).kernel[...] = jnp.array(weight).T
#
# same(v1(x), v2(x))
# as_printed(v1(x)[:3], [[0.3671, -0.3086], [0.3675, -0.3095], [0.3675, -0.3094]])
# as_printed(v1(x)[3:], [[0.3670, -0.3073], [0.3670, -0.3061], [0.3672, -0.3085]])
# ```
#
# The library does it with a rule that says how names and axes differ, and proves the result as a
# function, gradients included:
#
# ```python
# from flax_attn.parity import Rule, plan
#
# rules = [Rule("*.weight -> *", "o i -> i o")]
# if HAS_TORCH:
#     torch.manual_seed(789)
#     _, original = OriginalV1(3, 2), OriginalV2(3, 2)
#     print(plan(original, v1, rules))
#     report = compare(original, v1, np.asarray(x), rules=rules)
# else:
#     reference = "torch_ref.self_attention_v2.SelfAttentionV2"
#     config = {"d_in": 3, "d_out": 2}
#     report = Case(SelfAttentionV1, config, reference=reference, rules=rules, x=(6, 3)).report()
# assert report.ok, report
# ```
#
# </details>
#
# **2.** Scores are $Q K^\top = X W_q W_k^\top X^\top$. So the two matrices could be one, $M = W_q
# W_k^\top$, and $X M X^\top$ would give the same scores. Check it. Then say why models keep two.
# How many numbers does $M$ have, and how many do $W_q$ and $W_k$ have, if a word has 768 numbers
# and a head has 64? What is the rank of $M$?
#
# <details>
# <summary>Answer</summary>
#
# ```python
# M = W_query @ W_key.T  # d_in d_in
# same(x @ M @ x.T, queries @ keys.T)
# assert M.shape == (3, 3) and jnp.linalg.matrix_rank(M) == 2
# ```
#
# $M$ has $768^2 = 589{,}824$ numbers, and the two have $2 \cdot 768 \cdot 64 = 98{,}304$, a sixth.
# The rank of $M$ is at most 64: two words are compared by 64 learned features, not by all 768
# numbers. And keys of 64 numbers are what a model stores for every word that it has read.
# </details>
#
# **To read:** Vaswani and others, [Attention Is All You Need](https://arxiv.org/abs/1706.03762),
# section 3.2.1, where the scaled dot product comes from.
#
# Next: [3. Looking back only](03_looking_back_only.ipynb)
