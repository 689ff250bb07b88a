# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Attention without weights
#
# A word means little alone. *Step* is a stair, a dance move or a measure taken; the words around it
# decide. **Self-attention** lets every word look at every other one and take home a mixture of what
# it saw.
#
# At the end of this chapter you will
#
# * compute attention by hand, for one word and then for all of them, in three lines;
# * know why a dot product measures likeness, and what it measures besides;
# * know why the softmax is there, over which axis it runs, and where the textbook formula breaks;
# * have checked a library layer against your own numbers.
#
# Nothing is trained here and there is not one parameter. You need numpy's `@`, no more.

# %%
import importlib.util
import timeit

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from flax_attn import SimplifiedSelfAttention, attention_weights
from flax_attn.parity import Case, compare

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    from torch_ref.simplified_self_attention import SimplifiedSelfAttention as Original

print("Checked against", "PyTorch itself." if HAS_TORCH else "numbers that PyTorch gave before.")

# %%
jax.config.update("jax_default_matmul_precision", "float32")  # all digits, on every device
np.set_printoptions(precision=4, suppress=True)
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.titlesize": 10})


def heat(ax, table, rows, columns, title, cmap="Blues", top=None):
    """A table as colours and numbers, with words on its axes."""
    image = ax.imshow(np.asarray(table), cmap=cmap, vmin=0, vmax=top)
    ax.set_xticks(range(len(columns)), columns, rotation=40)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_title(title)
    for (i, j), value in np.ndenumerate(np.asarray(table)):
        color = "white" if image.norm(value) > 0.65 else "black"
        ax.text(j, i, f"{value:.2f}", ha="center", va="center", color=color)


# %% [markdown]
# ## Six words, three numbers each
#
# The sentence is *Your journey starts with one step*. A computer needs numbers, so each word gets a
# vector, its **embedding**. Real models use hundreds or thousands of numbers a word and learn them;
# three made-up ones can be printed, and drawn.
#
# $$X \in \mathbb{R}^{T \times D}, \qquad T = 6 \text{ tokens}, \quad D = 3 \text{ numbers each}$$

# %%
tokens = ["Your", "journey", "starts", "with", "one", "step"]
x = jnp.array(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)  # T D
assert x.shape == (6, 3)

# %%
fig = plt.figure(figsize=(8.4, 3.7))
heat(fig.add_subplot(1, 2, 1), x, tokens, ["0", "1", "2"], "The embeddings, a row each")
ax = fig.add_subplot(1, 2, 2, projection="3d")
lift = {"journey": 0.1, "with": -0.16}  # of labels that would lie on an arrow
for token, (a, b, c), color in zip(tokens, np.asarray(x), plt.cm.tab10.colors, strict=False):
    ax.quiver(0, 0, 0, a, b, c, color=color, arrow_length_ratio=0.08)
    ax.text(a, b, c + lift.get(token, 0.02), token, color=color)
ax.set(xlim=(0, 1), ylim=(0, 1), zlim=(0, 1), title="The same six as arrows")
ax.view_init(elev=22, azim=-42)
fig.tight_layout()
plt.show()

# %% [markdown]
# *Journey* and *starts* point almost the same way. *One* points elsewhere. Attention will notice.
#
# ## The plan
#
# For each word we want a **context vector** $z$: a mixture of all embeddings, with more of those
# that matter. Three steps lead there, and the rest of the chapter only walks them.
#
# | step | what it is | for one word | for all |
# | --- | --- | --- | --- |
# | **scores** | how much does each word matter to this one? any number | 6 numbers | 6 x 6 |
# | **weights** | the same, made positive and adding up to one | 6 numbers | 6 x 6 |
# | **context** | the mixture, by these weights | 3 numbers | 6 x 3 |

# %% [markdown]
# ## Scores, by a dot product
#
# We follow the second word, *journey*. It asks every word, itself included: how much do you matter
# to me? The answer is a dot product: multiply number by number, add up.
#
# $$\omega_{s} = x_\text{journey} \cdot x_s = \sum_{i=1}^{D} x_{\text{journey},i} \; x_{s,i}$$
#
# With *Your*, by hand:

# %%
journey = x[1]
by_hand = 0.55 * 0.43 + 0.87 * 0.15 + 0.66 * 0.89
print(f"journey . Your = {by_hand:.4f}")
np.testing.assert_allclose(jnp.dot(journey, x[0]), by_hand, rtol=1e-6)

# %% [markdown]
# Now with all six, by a loop.

# %%
scores_journey = jnp.stack([jnp.dot(journey, x[s]) for s in range(6)])  # T
print(scores_journey)
np.testing.assert_allclose(
    np.round(scores_journey, 4), [0.9544, 1.495, 1.4754, 0.8434, 0.707, 1.0865], rtol=1e-6
)

# %% [markdown]
# ## Why a dot product measures likeness
#
# $$a \cdot b = |a| \, |b| \cos\theta$$
#
# where $\theta$ is the angle between the two. Arrows that point the same way have a large product,
# arrows at a right angle have zero, opposite ones a negative number.

# %%
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.2))
a = np.array([1.0, 0.5])
others = {
    "nearly the same way": (0.9, 0.8),
    "at a right angle": (-0.5, 1.0),
    "opposite": (-1, -0.3),
}
for ax, (name, b) in zip(axes, others.items(), strict=True):
    for vector, label, color in ((a, "a", "tab:blue"), (np.array(b), "b", "tab:orange")):
        ax.quiver(0, 0, *vector, color=color, angles="xy", scale_units="xy", scale=1, width=0.015)
        ax.text(*(1.15 * vector), label, color=color, ha="center", va="center")
    ax.set(xlim=(-1.3, 1.3), ylim=(-0.5, 1.3), aspect="equal")
    ax.set_title(f"{name}\na . b = {a @ np.array(b):.2f}")
    ax.axis("off")
fig.tight_layout()
plt.show()

# %% [markdown]
# The formula says one thing more: a dot product is likeness **times both lengths**. Divide the
# lengths out and the cosine remains. *With* points more the way of *journey* than *step* does, but
# it is a short arrow, and so its score is the lower one.

# %%
lengths = jnp.linalg.norm(x, axis=-1)  # T
cosines = scores_journey / (lengths * lengths[1])  # T
print("          length  cosine  score")
for row in zip(tokens, lengths, cosines, scores_journey, strict=True):
    print("{:8s}  {:6.2f}  {:6.2f}  {:5.2f}".format(*row))

WITH, STEP = 3, 5
assert cosines[WITH] > cosines[STEP]  # more alike ...
assert scores_journey[WITH] < scores_journey[STEP]  # ... and yet the lower score

# %% [markdown]
# That is no mistake. A model that learns its embeddings may use the length as loudness.
#
# ## From scores to weights
#
# Weights must be positive and add up to one, so that the mixture is an average and not a pile. The
# simplest idea is to divide by the sum:
#
# $$\alpha_s = \frac{\omega_s}{\sum_r \omega_r}$$

# %%
weights_by_sum = scores_journey / scores_journey.sum()
print(weights_by_sum, "sum", weights_by_sum.sum())
np.testing.assert_allclose(
    np.round(weights_by_sum, 4), [0.1455, 0.2278, 0.2249, 0.1285, 0.1077, 0.1656], rtol=1e-6
)

# %% [markdown]
# It works here, because all our numbers happen to be positive. A score may be negative, and then
# the sum may come close to zero, and the "weights" run away:

# %%
unlucky = jnp.array([1.0, -1.0, 0.1])
print(unlucky / unlucky.sum())
np.testing.assert_allclose(unlucky / unlucky.sum(), [10, -10, 1], rtol=1e-5)

# %% [markdown]
# ## Softmax
#
# The cure is to make every score positive first. The exponential does it, and keeps their order:
#
# $$\alpha_s = \operatorname{softmax}(\omega)_s = \frac{e^{\omega_s}}{\sum_r e^{\omega_r}}$$


# %%
def naive_softmax(scores):
    """The formula, word for word."""
    return jnp.exp(scores) / jnp.exp(scores).sum()


weights_journey = naive_softmax(scores_journey)
print(weights_journey, "sum", weights_journey.sum())
np.testing.assert_allclose(
    np.round(weights_journey, 4), [0.1385, 0.2379, 0.2333, 0.124, 0.1082, 0.1581], rtol=1e-6
)

# %% [markdown]
# What counts is a *difference* of scores: a word whose score is larger by one gets $e = 2.718$
# times the weight, wherever both stand. So unlucky scores are no trouble any more.

# %%
print(naive_softmax(unlucky))
assert (naive_softmax(unlucky) > 0).all()
np.testing.assert_allclose(naive_softmax(unlucky).sum(), 1, rtol=1e-6)
np.testing.assert_allclose(naive_softmax(unlucky + 5), naive_softmax(unlucky), rtol=1e-5)

# %% [markdown]
# ## Where the formula breaks
#
# $e^{89}$ is larger than the largest number that float32 can hold, which is about $3.4 \cdot
# 10^{38}$. The result is infinity over infinity, `nan`. Far below zero all exponentials vanish, and
# it is zero over zero. One such row, and the whole training run is lost.

# %%
print("scores of 0 and 80:     ", naive_softmax(jnp.array([0.0, 80.0])))
print("scores of 0 and 89:     ", naive_softmax(jnp.array([0.0, 89.0])))
print("scores of -200 and -201:", naive_softmax(jnp.array([-200.0, -201.0])))
assert jnp.isnan(naive_softmax(jnp.array([0.0, 89.0]))[1])
assert jnp.isnan(naive_softmax(jnp.array([-200.0, -201.0]))).all()

# %% [markdown]
# Since only differences count, subtract the largest score first. Nothing changes on paper:
#
# $$\frac{e^{\omega_s - m}}{\sum_r e^{\omega_r - m}}
#   = \frac{e^{-m} \, e^{\omega_s}}{e^{-m} \sum_r e^{\omega_r}}, \qquad m = \max_r \omega_r$$
#
# but now no exponent is above zero and the largest term is exactly one. Nothing overflows, and no
# sum is zero. This is what `jax.nn.softmax`, `torch.softmax` and this library compute.


# %%
def softmax(scores, axis=-1):
    """The formula, with the largest score taken off first."""
    powers = jnp.exp(scores - scores.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


print("scores of 0 and 80:     ", softmax(jnp.array([0.0, 80.0])))
print("scores of 0 and 89:     ", softmax(jnp.array([0.0, 89.0])))
print("scores of -200 and -201:", softmax(jnp.array([-200.0, -201.0])))
np.testing.assert_allclose(softmax(scores_journey), naive_softmax(scores_journey), rtol=1e-5)
np.testing.assert_allclose(softmax(scores_journey), jax.nn.softmax(scores_journey), rtol=1e-5)
assert not jnp.isnan(softmax(jnp.array([[0.0, 89.0], [-200.0, -201.0]]))).any()

# %%
second = jnp.linspace(80, 100, 201)
pairs = jnp.stack([jnp.zeros_like(second), second], axis=1)
naive = jax.vmap(naive_softmax)(pairs)[:, 1]
fig, ax = plt.subplots(figsize=(6, 2.3))
ax.plot(second, softmax(pairs)[:, 1], color="tab:blue", lw=5, alpha=0.35, label="largest taken off")
ax.plot(second, naive, color="tab:red", label="word for word")
ax.axvline(np.log(np.finfo(np.float32).max), color="gray", ls=":", label="log of float32's largest")
ax.set(xlabel="score of the second of two words; the first has 0", ylabel="its weight")
ax.set(ylim=(0, 1.1), title="The thick line is right, the red one fails")
ax.legend(loc="lower right")
plt.show()
assert jnp.isnan(naive[-1])

# %% [markdown]
# The red line may even drop to zero a little before it ends. Nothing says `nan` there, and the
# answer is wrong all the same: the device multiplies by one over the sum, and that has become too
# small a number to be held.

# %% [markdown]
# ## One context vector
#
# $$z_\text{journey} = \sum_s \alpha_s \, x_s$$
#
# Each embedding is scaled by its weight, and all are added.

# %%
context_journey = jnp.zeros(3)
for s in range(6):
    context_journey += weights_journey[s] * x[s]

print(context_journey)
np.testing.assert_allclose(np.round(context_journey, 4), [0.4419, 0.6515, 0.5683], rtol=1e-6)
np.testing.assert_allclose(context_journey, weights_journey @ x, rtol=1e-6)  # the loop is a product

# %%
fig, ax = plt.subplots(figsize=(7, 2.2))
left = np.zeros(3)
for token, part, color in zip(
    tokens, weights_journey[:, None] * x, plt.cm.tab10.colors, strict=False
):
    ax.barh(range(3), part, left=left, color=color, label=token)
    left += np.asarray(part)
ax.set(yticks=range(3), ylabel="number", title="What the context vector of journey is made of")
ax.invert_yaxis()
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
fig.tight_layout()
plt.show()

# %% [markdown]
# ## All scores at once
#
# Nothing is special about *journey*. Every word asks, every word answers: 36 dot products.
#
# $$\omega_{ts} = x_t \cdot x_s \qquad\Longleftrightarrow\qquad \Omega = X X^\top$$
#
# Row $t$ of the matrix product holds what word $t$ gave to each of the others. Two loops and one
# product give the same table.


# %%
def by_loops(x):
    """Every dot product, one after the other."""
    scores = np.empty((len(x), len(x)), x.dtype)
    for t in range(len(x)):
        for s in range(len(x)):
            scores[t, s] = x[t] @ x[s]
    return scores


scores = x @ x.T  # T T
np.testing.assert_allclose(by_loops(np.asarray(x)), scores, rtol=1e-6)
np.testing.assert_allclose(scores[1], scores_journey, rtol=1e-6)
print(scores)

# %% [markdown]
# The table is the same, the time is not. A loop in Python spends its time on Python; a product is
# one call, and whoever wrote it has thought about caches and many cores. With 200 words:

# %%
many = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
loop_time = min(timeit.repeat(lambda: by_loops(many), number=1, repeat=3))
product_time = min(timeit.repeat(lambda: many @ many.T, number=100, repeat=3)) / 100
print(f"Here the loops took about {loop_time / product_time:,.0f} times as long as the product.")

# %% [markdown]
# ## All weights at once, and which axis
#
# A row of scores belongs to the word that asks. Its weights must add up to one, so the softmax runs
# along the row, over the words that are looked at: the **last axis**.

# %%
weights = softmax(scores, axis=-1)  # T T
print(weights)
np.testing.assert_allclose(weights.sum(axis=-1), np.ones(6), rtol=1e-6)
np.testing.assert_allclose(weights[1], weights_journey, rtol=1e-5)
np.testing.assert_allclose(
    np.round(weights[0], 4), [0.2098, 0.2006, 0.1981, 0.1242, 0.122, 0.1452], rtol=1e-6
)

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.8, 3.9))
heat(axes[0], scores, tokens, tokens, "scores: symmetric")
heat(axes[1], weights, tokens, tokens, "weights: every row adds up to 1", "Greens", top=0.3)
for ax in axes:
    ax.set(xlabel="looked at", ylabel="the word that asks")
fig.tight_layout()
plt.show()

# %% [markdown]
# The scores are symmetric: *journey* gives *step* what *step* gives *journey*. The weights are not,
# since each row is divided by a sum of its own.
#
# Over the other axis the columns would add up to one instead, and a word's row would be no average
# any more. In this one table that mistake even looks tidy: since the scores are symmetric, it gives
# the right weights, transposed.

# %%
wrong = softmax(scores, axis=0)
print("rows of the wrong one add up to", wrong.sum(axis=-1))
np.testing.assert_allclose(wrong, weights.T, rtol=1e-5)
assert jnp.abs(wrong.sum(axis=-1) - 1).max() > 0.1

# %% [markdown]
# Say `axis=-1`, not `axis=1`. On one sentence they are the same axis. On a batch of sentences,
# of shape `(batch, T, T)`, axis 1 is the word that asks.

# %%
batch = jnp.stack([x, x[::-1]])  # 2 T D
batch_scores = batch @ batch.mT  # 2 T T
np.testing.assert_allclose(softmax(batch_scores, axis=-1)[0], weights, rtol=1e-5)
assert jnp.abs(softmax(batch_scores, axis=1)[0] - weights).max() > 0.05

# %% [markdown]
# ## All context vectors at once
#
# $$Z = \operatorname{softmax}(X X^\top) \, X$$
#
# That is the whole of attention without weights: three steps, three lines.

# %%
scores = x @ x.T  # T T
weights = softmax(scores)  # T T
context = weights @ x  # T D

print(context)
np.testing.assert_allclose(
    np.round(context, 4),
    [
        [0.4421, 0.5931, 0.5790],
        [0.4419, 0.6515, 0.5683],
        [0.4431, 0.6496, 0.5671],
        [0.4304, 0.6298, 0.5510],
        [0.4671, 0.5910, 0.5266],
        [0.4177, 0.6503, 0.5645],
    ],
    rtol=1e-6,
)
np.testing.assert_allclose(context[1], context_journey, rtol=1e-5)

# %%
fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.4), width_ratios=(6, 3, 3))
heat(axes[0], weights, tokens, tokens, "weights, T x T", "Greens", top=0.3)
heat(axes[1], x, tokens, ["0", "1", "2"], "embeddings, T x D", top=1)
heat(axes[2], context, tokens, ["0", "1", "2"], "context vectors, T x D", top=1)
fig.tight_layout(w_pad=4)
for ax, sign in ((axes[1], "@"), (axes[2], "=")):
    ax.text(-0.62, 0.5, sign, transform=ax.transAxes, fontsize=20, ha="center", va="center")
plt.show()

# %% [markdown]
# ## Embedding against context vector
#
# Both have three numbers a word. The **embedding** says what a word is, whatever stands around it.
# The **context vector** says what it is *here*. The picture shows both on one plane, the two
# directions in which the embeddings differ most; each arrow leads from a word to its context.

# %%
middle = x.mean(axis=0)
plane = jnp.linalg.svd(x - middle)[2][:2]  # 2 D
before, after = np.asarray((x - middle) @ plane.T), np.asarray((context - middle) @ plane.T)

fig, ax = plt.subplots(figsize=(6.6, 4))
for token, p, z, color in zip(tokens, before, after, plt.cm.tab10.colors, strict=False):
    ax.annotate("", z, p, arrowprops={"arrowstyle": "->", "color": color, "alpha": 0.6})
    ax.plot(*p, "o", color=color)
    ax.plot(*z, "s", color=color, ms=5)
    place = {"starts": (-24, 8), "journey": (1, 9), "step": (8, -3)}.get(token, (5, 6))
    ax.annotate(token, p, place, textcoords="offset points", color=color)
ax.plot([], [], "o", color="gray", label="embedding")
ax.plot([], [], "s", color="gray", label="context vector")
ax.set(title="Every word moves towards the words it looks at", xticks=[], yticks=[], aspect="equal")
ax.margins(0.18)
ax.legend(loc="lower left")
plt.show()

# %% [markdown]
# The squares huddle together. An average with positive weights can never leave the space between
# its parts, and these weights are nearly equal, so every word ends near the middle of the sentence.

# %%
assert (context > x.min(axis=0)).all() and (context < x.max(axis=0)).all()
assert (context.std(axis=0) < x.std(axis=0)).all()
print("spread of the embeddings:     ", x.std(axis=0))
print("spread of the context vectors:", context.std(axis=0))

# %% [markdown]
# ## The same as a layer
#
# `SimplifiedSelfAttention` is these three lines, and takes batches as well as one sentence. It has
# no parameters. With `normalise="sum"` it divides by the sum, our first idea.

# %%
layer = SimplifiedSelfAttention()
np.testing.assert_allclose(layer(x), context, rtol=1e-6)
np.testing.assert_allclose(layer(batch)[0], context, rtol=1e-6)

by_sum = SimplifiedSelfAttention(normalise="sum")
np.testing.assert_allclose(by_sum(x)[1], weights_by_sum @ x, rtol=1e-6)
print(layer(batch).shape)

# %% [markdown]
# Only want to see who looks at whom? `attention_weights` returns the table. It speaks of *queries*
# and *keys*, the one who asks and the one who is looked at; here both are `x`. It expects an axis
# of *heads* after the tokens, of which we have one, and it would scale the scores unless told not
# to. The next chapters explain these words.

# %%
one_head = x[:, None, :]  # T 1 D
np.testing.assert_allclose(attention_weights(one_head, one_head, scale=1.0)[0], weights, rtol=1e-5)

# %% [markdown]
# Is the layer the same function as a plain PyTorch one? Equal digits on one sentence would be weak
# evidence. The parity harness compares outputs, scores, weights and gradients in float64, where two
# ways to write one function differ by about $10^{-16}$ and a mistake by far more than $10^{-12}$.
# Where torch is missing, what it gave is replayed from a recording.

# %%
if HAS_TORCH:
    report = compare(Original(), layer, np.asarray(x))
else:
    report = Case(SimplifiedSelfAttention, {}, x=(6, 3)).report()
assert report.ok, report
print(report)

# %% [markdown]
# ## What it cannot do
#
# **It does not know the order.** Shuffle the words, and every word gets the same context vector as
# before. To this layer a sentence is a bag of words; later chapters will tell it where each stands.

# %%
order = jnp.array([5, 2, 0, 4, 1, 3])
print(" ".join(tokens[i] for i in order))
np.testing.assert_allclose(layer(x[order]), layer(x)[order], rtol=1e-6)

# %% [markdown]
# **It cannot learn.** Who looks at whom follows from the embeddings alone. *Journey* cannot come to
# look at *one* just because the task would gain by it: there is no number to turn. And since one
# vector must ask, answer and be mixed, *journey* and *step* score each other the same. The next
# chapter gives each role a vector of its own.
#
# ## In a nutshell
#
# | word | formula | shape here |
# | --- | --- | --- |
# | attention scores | $\Omega = X X^\top$ | 6 x 6 |
# | attention weights | $A = \operatorname{softmax}(\Omega)$, rows add up to one | 6 x 6 |
# | context vectors | $Z = A X$ | 6 x 3 |
#
# ## Exercise
#
# Make every embedding ten times as long. What happens to the scores, and to the weights? Guess
# first: does each word end up looking at itself alone? Then compute
# `softmax((10 * x) @ (10 * x).T)`, and say what you see.
#
# <details>
# <summary>Answer</summary>
#
# The scores grow a hundredfold, and so do the differences between them. The softmax turns a
# difference of 5 into a ratio of 148, so that most rows become all 0 with one 1: a hard choice in
# place of an average.
#
# The winner is the largest score of the row, and that need not be the word itself: length counts
# too. *Starts*, *with* and *step* choose *journey*, the longest arrow; *one* chooses *starts*;
# only *Your* and *journey* choose themselves.
#
# ```python
# hard = softmax((10 * x) @ (10 * x).T)
# print([tokens[i] for i in hard.argmax(axis=-1)])
# # ['Your', 'journey', 'journey', 'journey', 'starts', 'journey']
# assert (hard.max(axis=-1) > 0.69).all()
# ```
#
# So the size of the scores decides how sharp attention is. The next chapter will take care of it.
# </details>
#
# Next: [2. Trainable weights](02_trainable_weights.ipynb)
