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
# *20 minutes to read, 15 seconds to run on a quiet machine with two cores.*
# [Six words](#Six-words,-three-numbers-each) ·
# [Scores](#Scores-by-a-dot-product) ·
# [Weights](#From-scores-to-weights) ·
# [Softmax](#Softmax) ·
# [Context](#One-context-vector) ·
# [All words at once](#All-scores-at-once) ·
# [As a layer](#The-same-as-a-layer) ·
# [Exercises](#Exercises)
#
# A single word says little. *Step* is a stair, a dance move or a measure taken, and the words
# around it decide which. **Self-attention** lets every word look at every word of the sentence and
# take a mixture of what it saw.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

# %%
tokens = "Your journey starts with one step".split()
x = jnp.array(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)  # three numbers for each word
shares = jax.nn.softmax(x @ x[1])  # what this chapter builds up; x[1] is journey
fig, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
for j, share in enumerate(shares):
    ax.plot([1, j], [0, 1], color="tab:blue", lw=40 * share, alpha=0.6)
    ax.text(j, 1.1, f"{share:.0%}\n{tokens[j]}", ha="center")
ax.text(1, -0.1, tokens[1], ha="center", va="top")
ax.set(xlim=(-0.5, 5.5), ylim=(-0.3, 1.5))
ax.set_title("How much journey looks at each word")
ax.axis("off")
plt.show()

# %% [markdown]
# The picture shows what we are after: six shares that add up to 100 %. The line that begins with
# `shares` computes them. It uses `jax.nn.softmax`, which this chapter explains and then writes
# itself.
#
# At the end of this chapter you will
#
# * compute attention by hand, for one word and then for all of them, in three lines;
# * know why a dot product measures similarity, and what it measures besides;
# * know why the softmax is there, over which axis it runs, and where the textbook formula breaks;
# * have checked a library layer against your own numbers.
#
# Nothing is trained here, and there are no parameters. If a name of JAX is new to you, see
# [chapter 0](00_jax_for_numpy_readers.ipynb).
#
# > **Where this comes from.** The six words, their numbers and the way from chapter 1 to 4 follow
# > Sebastian Raschka, *Build a Large Language Model (From Scratch)*, chapter 3, and his article
# > [Understanding and coding self-attention](https://magazine.sebastianraschka.com/p/understanding-and-coding-self-attention).
# > The average of the past and the unscaled head in chapter 3 follow Andrej Karpathy,
# > [Let's build GPT](https://www.youtube.com/watch?v=kCc8FmEb1nY). A good overview to read beside
# > these pages is Lilian Weng,
# > [Attention? Attention!](https://lilianweng.github.io/posts/2018-06-24-attention/).
#
# `climb` is a small file beside these notebooks. It draws tables (`heat`) and boxes (`diagram`).
# `same(a, b)` checks that two arrays are equal and prints their largest difference, and
# `as_printed` does so for a table that shows four decimals.

# %%
from climb import as_printed, diagram, heat, same

# %% [markdown]
# ## Six words, three numbers each
#
# The sentence is *Your journey starts with one step*. Four words are used for the way from text to
# numbers:
#
# * A **token** is a piece of text that the model reads at once. Here every word is a token.
# * The **vocabulary** lists all tokens that a model knows, and the **id** of a token is its number
#   in that list.
# * The **embedding** of a token is a vector of numbers, a row of a table with one row for each id.
#
# Real models use hundreds or thousands of numbers for each token, and learn them. Three made-up
# ones can be printed, and drawn.
#
# $$X \in \mathbb{R}^{T \times D}, \qquad T = 6 \text{ tokens}, \quad D = 3 \text{ numbers each}$$

# %%
for token, embedding in zip(tokens, x, strict=True):
    print(f"{token:8s}", embedding)
print("T, D:", x.shape)

# %%
fig = plt.figure(figsize=(8.4, 3.7))
heat(fig.add_subplot(1, 2, 1), x, "The embeddings, a row each", columns=["0", "1", "2"])
ax = fig.add_subplot(1, 2, 2, projection="3d")
place = {"journey": 0.1, "with": -0.16}  # moves labels that would lie on an arrow
for token, (a, b, c), color in zip(tokens, np.asarray(x), plt.cm.tab10.colors, strict=False):
    ax.quiver(0, 0, 0, a, b, c, color=color, arrow_length_ratio=0.08)
    ax.text(a, b, c + place.get(token, 0.02), token, color=color)
ax.set(xlim=(0, 1), ylim=(0, 1), zlim=(0, 1), title="The same six as arrows")
ax.view_init(elev=22, azim=-42)
fig.tight_layout()
plt.show()

# %% [markdown]
# *Journey* and *starts* point almost the same way. *One* points elsewhere. Attention will notice.
#
# ### Aside: words or pieces of words
#
# You may skip this section: we go on with six whole words. A vocabulary of whole words has
# a gap: it does not know the next new word. So real models cut text into **subwords**, often by
# *byte-pair encoding*. It begins with single characters, and repeatedly joins the pair of adjacent
# pieces that is most frequent.


# %%
from collections import Counter
from itertools import pairwise


def merged(pieces, pair):
    """The pieces of a word, with each such pair of neighbours as one piece."""
    result = []
    for piece in pieces:
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return result


# %%
words = [list(word) for word in "step steps stepped start starts started journey".split()]
merges = []
for _ in range(8):
    counts = Counter(pair for word in words for pair in pairwise(word))
    merges.append(counts.most_common(1)[0][0])
    words = [merged(word, merges[-1]) for word in words]
print("merged:", *("".join(pair) for pair in merges))
print("words: ", *("|".join(word) for word in words))

# %% [markdown]
# *Step* and *start* have become one piece each. *Journey* came once, and is still in letters. To
# cut a new word, the same merges are applied in the same order. A word that was never seen gets
# several tokens, and none is unknown.

# %%
for word in ("starts", "stepping", "restarted"):
    pieces = list(word)
    for pair in merges:
        pieces = merged(pieces, pair)
    print(f"{word}: {' | '.join(pieces)}")
    assert "".join(pieces) == word

# %% [markdown]
# GPT-2 has 50,257 such tokens, and each common word is a token of its own. We go on with six words.
#
# ### Three steps
#
# For each word we want a **context vector** $c$: a mixture of all embeddings, with more of those
# that matter. Three steps lead there, and the rest of the chapter takes them one by one.

# %%
row = {
    "embeddings\nT D": (0, 0, "lightsteelblue"),
    "scores s\nT T": (2, 0, "navajowhite"),
    "weights w\nT T": (4, 0, "navajowhite"),
    "context c\nT D": (6, 0, "lightsteelblue"),
}
start, scores_box, weights_box, end = row
arrows = [
    (start, scores_box, "dot products"),
    (scores_box, weights_box, "softmax"),
    (weights_box, end, "mix embeddings"),
]
diagram(row, arrows, size=(8.4, 1.1))

# %% [markdown]
# | step | what it is | for one word | for all |
# | --- | --- | --- | --- |
# | **scores** | how much does each word matter to this one? Any number | 6 numbers | 6 x 6 |
# | **weights** | the same, made positive and adding up to one | 6 numbers | 6 x 6 |
# | **context** | the mixture with these weights | 3 numbers | 6 x 3 |
#
# ## Scores by a dot product
#
# We follow the second word, *journey*. It asks every word, itself included: how much do you matter
# to me? The answer is a dot product: multiply number by number, and add up.
#
# $$s_{j} = x_\text{journey} \cdot x_j = \sum_{i=1}^{D} x_{\text{journey},i} \; x_{j,i}$$
#
# With *Your*, by hand:

# %%
journey = x[1]
by_hand = 0.55 * 0.43 + 0.87 * 0.15 + 0.66 * 0.89
print(f"{by_hand:.4f}")
same(jnp.dot(journey, x[0]), by_hand)

# %% [markdown]
# Now with all six, in a loop:

# %%
scores_journey = jnp.stack([jnp.dot(journey, x[j]) for j in range(6)])  # T
print(scores_journey)
as_printed(scores_journey, [0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865])

# %% [markdown]
# ### Why a dot product measures similarity
#
# $$a \cdot b = |a| \, |b| \cos\theta,$$
#
# where $\theta$ is the angle between the two. Arrows that point the same way have a large product,
# arrows at a right angle have zero, opposite ones have a negative number.

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
# The formula says one thing more: a dot product is similarity of direction **times both lengths**.
# Divide by the lengths, and the cosine remains. *With* points more in the direction of *journey*
# than *step* does. But it is a short arrow, and so its score is lower.

# %%
lengths = jnp.linalg.norm(x, axis=-1)  # T
cosines = scores_journey / (lengths * lengths[1])  # T
print("          length  cosine  score")
for row in zip(tokens, lengths, cosines, scores_journey, strict=True):
    print("{:8s}  {:6.2f}  {:6.2f}  {:5.2f}".format(*row))

WITH, STEP = 3, 5
assert cosines[WITH] > cosines[STEP] and scores_journey[WITH] < scores_journey[STEP]

# %% [markdown]
# That is no mistake. A model that learns its embeddings may use the length to say how important a
# word is.
#
# > **Try it.** Follow *one* instead of *journey*. Which word gets its highest score?
#
# <details><summary>Answer</summary>
#
# ```python
# scores_one = x @ x[4]  # T
# same(scores_one, [0.4576, 0.7070, 0.7154, 0.3474, 0.6654, 0.2935], within=1e-4)
# assert tokens[scores_one.argmax()] == "starts"
# ```
#
# *Starts* gets 0.7154, and *journey* 0.7070. *One* gives itself only 0.6654. It is a short arrow,
# and the longer arrows win, although they point elsewhere.
#
# </details>
#
# ## From scores to weights
#
# Weights must be positive and add up to one, so that the mixture is an average. The simplest idea
# is to divide by the sum:
#
# $$w_j = \frac{s_j}{\sum_i s_i}$$

# %%
weights_by_sum = scores_journey / scores_journey.sum()
print(weights_by_sum, "sum", weights_by_sum.sum())
as_printed(weights_by_sum, [0.1455, 0.2278, 0.2249, 0.1285, 0.1077, 0.1656])

# %% [markdown]
# It works here, because all our numbers happen to be positive. But a score may be negative. Then
# the sum may come close to zero, and the "weights" become huge or negative:

# %%
unlucky = jnp.array([1.0, -1.0, 0.1])
print(unlucky / unlucky.sum())

# %% [markdown]
# ## Softmax
#
# The cure is to make every score positive first. The exponential does that, and it keeps their
# order:
#
# $$w_j = \operatorname{softmax}(s)_j = \frac{e^{s_j}}{\sum_i e^{s_i}}$$


# %%
def naive_softmax(scores):
    return jnp.exp(scores) / jnp.exp(scores).sum()


weights_journey = naive_softmax(scores_journey)  # T
print(weights_journey, "sum", weights_journey.sum())
as_printed(weights_journey, [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581])

# %% [markdown]
# A row of weights reads well in per cent: this is the picture at the top.

# %%
ranked = np.argsort(-np.asarray(weights_journey))
print("journey looks", ", ".join(f"{weights_journey[j]:.0%} at {tokens[j]}" for j in ranked))

# %% [markdown]
# *Journey* takes almost half of its mixture from itself and *starts*, and least of *one*.
#
# Only *differences* of scores count: a word whose score is larger by one gets $e = 2.718$ times the
# weight. So adding 5 to every score changes nothing, and the unlucky scores are no problem any
# more.

# %%
print(naive_softmax(unlucky))
same(naive_softmax(unlucky + 5), naive_softmax(unlucky))

# %% [markdown]
# ### Where the formula breaks
#
# The largest number that float32 can hold is about $3.4 \cdot 10^{38}$, and $e^{89}$ is larger. The
# result is infinity over infinity, which is `nan` ("not a number"). Far below zero, all
# exponentials become zero, and it is zero over zero. One such row spoils a whole training run.

# %%
for scores in ([0.0, 80.0], [0.0, 89.0], [-200.0, -201.0]):
    print(scores, naive_softmax(jnp.array(scores)))

assert jnp.isnan(naive_softmax(jnp.array([-200.0, -201.0]))).all()

# %% [markdown]
# Since only differences count, subtract the largest score $m$ first. On paper nothing changes:
#
# $$\frac{e^{s_j - m}}{\sum_i e^{s_i - m}}
#   = \frac{e^{-m} \, e^{s_j}}{e^{-m} \sum_i e^{s_i}}, \qquad m = \max_i s_i$$
#
# But now no exponent is above zero, and the largest term is exactly one. Nothing overflows, and no
# sum is zero. This is what `jax.nn.softmax`, `torch.softmax` and this library compute.


# %%
def softmax(scores, axis=-1):
    powers = jnp.exp(scores - scores.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


for scores in ([0.0, 80.0], [0.0, 89.0], [-200.0, -201.0]):
    print(scores, softmax(jnp.array(scores)))

same(softmax(scores_journey), jax.nn.softmax(scores_journey))

# %% [markdown]
# Here is the weight of the second of two words, as its score grows. (`jax.vmap` runs a function on
# every row.)

# %%
second = jnp.linspace(80, 100, 201)
two_scores = jnp.stack([jnp.zeros_like(second), second], axis=1)  # 201 2
naive = jax.vmap(naive_softmax)(two_scores)[:, 1]

# %%
fig, ax = plt.subplots(figsize=(6, 2.3))
ax.plot(second, softmax(two_scores)[:, 1], lw=5, alpha=0.35, label="largest subtracted first")
ax.plot(second, naive, color="tab:red", label="the textbook formula")
ax.axvline(np.log(np.finfo(np.float32).max), color="gray", ls=":", label="log of float32's largest")
ax.set(xlabel="score of the second of two words; the first has 0", ylabel="its weight")
ax.set(ylim=(0, 1.1), title="The thick line is right, the red one fails")
ax.legend(loc="lower right")
plt.show()
assert jnp.isnan(naive[-1])

# %% [markdown]
# The red line may even drop to zero a little before it ends. Nothing says `nan` there, and the
# answer is wrong all the same: the device multiplies by one over the sum, and one over such a large
# sum rounds to zero.
#
# > **Try it.** `softmax(jnp.array([1e9, 1e9 + 1]))` gives two equal weights. Is that the softmax's
# > fault? Print `jnp.array([1e9, 1e9 + 1])`.
#
# <details><summary>Answer</summary>
#
# ```python
# two = jnp.array([1e9, 1e9 + 1])
# assert two[0] == two[1]
# with jax.enable_x64(True):
#     same(softmax(jnp.array([1e9, 1e9 + 1])), [0.2689, 0.7311], within=1e-4)
# ```
#
# No. The two scores are equal before the softmax sees them: near $10^9$ the numbers of float32 are
# 64 apart, so the 1 is lost. In float64 it is not lost, and the weights are 0.27 and 0.73.
#
# </details>
#
# ## One context vector
#
# $$c_\text{journey} = \sum_j w_j \, x_j$$
#
# Each embedding is multiplied by its weight, and all are added. This loop over words is a matrix
# product.

# %%
context_journey = sum(weights_journey[j] * x[j] for j in range(6))  # D
print(context_journey)
as_printed(context_journey, [0.4419, 0.6515, 0.5683])
same(weights_journey @ x, context_journey)

# %%
fig, ax = plt.subplots(figsize=(7, 2.2))
left, colors = np.zeros(3), plt.cm.tab10.colors
for token, part, color in zip(tokens, weights_journey[:, None] * x, colors, strict=False):
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
# Nothing is special about *journey*. Every word asks and every word answers, which makes 36 dot
# products. First as two loops, one over the words that ask and one over those that answer:


# %%
def by_loops(x):
    scores = np.empty((len(x), len(x)), np.float32)  # T T
    for t, asking in enumerate(x):
        for j, answering in enumerate(x):
            scores[t, j] = asking @ answering
    return scores


print(by_loops(np.asarray(x)))

# %% [markdown]
# These are the numbers of one matrix product, of $X$ with its own transpose:
#
# $$s_{tj} = x_t \cdot x_j \qquad\Longleftrightarrow\qquad S = X X^\top$$

# %%
scores = x @ x.T  # T T
same(scores, by_loops(np.asarray(x)))
same(scores[1], scores_journey)

# %% [markdown]
# Row $t$ of the table holds the scores that word $t$ gives to each word.
#
# The table is the same, the time is not. A loop in Python spends its time on Python. A product is
# one call, written by people who thought about caches and many cores. With 200 words:

# %%
import timeit

many = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
loop_time = min(timeit.repeat(lambda: by_loops(many), number=1, repeat=3))
product_time = min(timeit.repeat(lambda: many @ many.T, number=100, repeat=3)) / 100
print(f"Here the loops took about {loop_time / product_time:,.0f} times as long as the product.")

# %% [markdown]
# ### All weights at once and which axis
#
# A row of scores belongs to the word that asks. Its weights must add up to one, so the softmax runs
# along the row, over the words that are looked at: the **last axis**.

# %%
weights = softmax(scores, axis=-1)  # T T
print(weights)
same(weights.sum(axis=-1), np.ones(6))

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.8, 3.9), layout="constrained")
heat(axes[0], scores, "scores: symmetric")
heat(axes[1], weights, "weights: every row adds up to 1", cmap="Greens", most=0.3)
for ax in axes:
    ax.set(xlabel="the word looked at", ylabel="the word that asks")
plt.show()

# %% [markdown]
# The scores are symmetric: *journey* gives *step* what *step* gives *journey*. The weights are not,
# because each row is divided by a sum of its own.
#
# Over the other axis, the columns would add up to one instead, and no row would be an average.

# %%
wrong = softmax(scores, axis=0)
print("rows of the wrong one add up to", wrong.sum(axis=-1))
assert jnp.abs(wrong.sum(axis=-1) - 1).max() > 0.1

# %% [markdown]
# Say `axis=-1`, not `axis=1`. On one sentence they are the same axis. On a batch of sentences, of
# shape `(batch, T, T)`, axis 1 is the word that asks.

# %%
batch = jnp.stack([x, x[::-1]])  # 2 T D
batch_scores = batch @ batch.mT  # 2 T T
same(softmax(batch_scores, axis=-1)[0], weights)
assert jnp.abs(softmax(batch_scores, axis=1)[0] - weights).max() > 0.05

# %% [markdown]
# ### All context vectors at once
#
# $$C = \operatorname{softmax}(X X^\top) \, X$$
#
# That is the whole of attention without weights: three steps, three lines.

# %%
scores = x @ x.T  # T T
weights = softmax(scores)  # T T
context = weights @ x  # T D

print(context)
same(context[1], context_journey)

# %%
fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.4), width_ratios=(6, 3, 3))
heat(axes[0], weights, "weights, T x T", cmap="Greens", most=0.3)
heat(axes[1], x, "embeddings, T x D", columns=["0", "1", "2"], most=1)
heat(axes[2], context, "context vectors, T x D", columns=["0", "1", "2"], most=1)
fig.tight_layout(w_pad=4)
for ax, sign in ((axes[1], "@"), (axes[2], "=")):
    ax.text(-0.62, 0.5, sign, transform=ax.transAxes, fontsize=20, ha="center", va="center")
plt.show()

# %% [markdown]
# ### Embedding against context vector
#
# Both have three numbers for each word. The **embedding** says what a word is, whatever stands
# around it. The **context vector** says what it is *here*. The picture shows both on one plane: the
# two directions in which the embeddings differ most. Each arrow leads from a word to its context.

# %%
middle = x.mean(axis=0)
plane = jnp.linalg.svd(x - middle)[2][:2]  # 2 D
before, after = np.asarray((x - middle) @ plane.T), np.asarray((context - middle) @ plane.T)

# %%
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
# The squares lie close together. An average with positive weights never leaves the space between
# its parts. And these weights are nearly equal, so every word ends near the middle of the sentence.

# %%
print("spread of the embeddings:     ", x.std(axis=0))
print("spread of the context vectors:", context.std(axis=0))
assert (context.std(axis=0) < x.std(axis=0)).all()

# %% [markdown]
# ## The same as a layer
#
# The library's `SimplifiedSelfAttention` is these three lines. It has no parameters, and it takes
# batches as well as one sentence. With `normalise="sum"` it divides by the sum, our first idea.

# %%
from flax_attn import SimplifiedSelfAttention, attention_weights

layer = SimplifiedSelfAttention()
same(layer(x), context)
same(layer(batch)[0], context)
same(SimplifiedSelfAttention(normalise="sum")(x)[1], weights_by_sum @ x)

# %% [markdown]
# `attention_weights` returns only the table of weights. It takes *queries* and *keys*, the words
# that ask and the words that are looked at. Here both are `x`. It expects an axis of *heads* after
# the tokens, of which we have one, and it would scale the scores unless you say `scale=1.0`. The
# next chapters explain these words.

# %%
one_head = x[:, None, :]  # T 1 D
same(attention_weights(one_head, one_head, scale=1.0)[0], weights)

# %% [markdown]
# Is the layer the same function as a plain PyTorch one? Equal digits on one sentence would be weak
# evidence. `compare` checks outputs, scores, weights and gradients in float64. There, two ways to
# write one function differ by about $10^{-16}$, and a mistake by far more than its limit,
# $10^{-12}$. Where PyTorch is missing, a `Case` compares with recorded results of PyTorch.

# %%
from climb import HAS_TORCH

from flax_attn.parity import Case, compare

if HAS_TORCH:
    from torch_ref.simplified_self_attention import SimplifiedSelfAttention as Original

    report = compare(Original(), layer, np.asarray(x))
else:
    report = Case(SimplifiedSelfAttention, {}, x=(6, 3)).report()
assert report.ok, report
print(report)

# %% [markdown]
# ### What it cannot do
#
# **It does not know the order.** Shuffle the words, and every word gets the same context vector as
# before. To this layer a sentence is a bag of words. Later chapters tell it where each word stands.

# %%
order = jnp.array([5, 2, 0, 4, 1, 3])
print(" ".join(tokens[i] for i in order))
same(layer(x[order]), layer(x)[order])

# %% [markdown]
# **It cannot learn.** Which word looks at which follows from the embeddings alone. *Journey* cannot
# begin to look at *one* because that would help with some task: there is no number to adjust. And
# since one vector is used for asking, for answering and for mixing, *journey* and *step* give each
# other the same score. The next chapter gives each of these roles a vector of its own.
#
# > **Try it.** Add a seventh word, the same as *journey*. What happens to the weights that
# > *journey* gave before?
#
# <details><summary>Answer</summary>
#
# ```python
# seven = jnp.vstack([x, x[1]])  # 7 D
# new = softmax(seven @ x[1])  # 7
# same(new[:6], weights[1] / (1 + weights[1, 1]))
# print(f"{weights[1, 1]:.0%} before, {new[1] + new[6]:.0%} now")
# ```
#
# All six are multiplied by the same factor, $1 / (1 + 0.238) = 0.81$. The sum under the fraction
# line has one more term, and the terms above it are what they were. The two copies of *journey*
# have 38 % together, where one had 24 %.
#
# </details>
#
# ## In a nutshell
#
# | word | formula | shape here |
# | --- | --- | --- |
# | attention scores | $S = X X^\top$ | 6 x 6 |
# | attention weights | $W = \operatorname{softmax}(S)$, rows add up to one | 6 x 6 |
# | context vectors | $C = W X$ | 6 x 3 |
#
# ## Exercises
#
# **1.** Make every embedding ten times as long. What happens to the scores, and to the weights?
# Guess first: does each word end up looking at itself alone?
#
# <details>
# <summary>Answer</summary>
#
# The scores become a hundred times as large, and so do the differences between them. The softmax
# turns a difference of 5 into a ratio of 148, so most rows become a single 1 and zeros: a hard
# choice in place of an average.
#
# The winner is the largest score of the row, and that need not be the word itself, since length
# counts too. *Starts*, *with* and *step* choose *journey*, the longest arrow. *One* chooses
# *starts*. Only *Your* and *journey* choose themselves.
#
# ```python
# hard = softmax((10 * x) @ (10 * x).T)
# choices = [tokens[i] for i in hard.argmax(axis=-1)]
# assert choices == ["Your", "journey", "journey", "journey", "starts", "journey"]
# assert (hard.max(axis=-1) > 0.69).all()
# ```
#
# So the size of the scores decides how sharp attention is. The next chapter takes care of it.
# </details>
#
# **2.** Divide each embedding by its length, and compute scores and weights again. Which score is
# now the largest of each row, and why?
#
# <details>
# <summary>Answer</summary>
#
# ```python
# unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # T D
# cosine_scores = unit @ unit.T  # T T
# assert (cosine_scores.argmax(axis=-1) == jnp.arange(6)).all()
# same(jnp.diagonal(cosine_scores), np.ones(6))
# ```
#
# The scores are cosines now, and nothing is more similar to a word than the word itself. So the
# diagonal wins, always with a score of one.
# </details>
#
# **To read:** the three sources in the box above.
#
# Next: [2. Trainable weights](02_trainable_weights.ipynb)
