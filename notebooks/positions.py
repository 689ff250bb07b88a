# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Positions
#
# *17 minutes to read, 20 seconds to run on a quiet machine with two cores.*
# [Shuffled words](#Shuffled-words) ·
# [A vector for each place](#A-vector-for-each-place) ·
# [Distance as a penalty](#Distance-as-a-penalty) ·
# [A point that turns](#A-point-that-turns) ·
# [Many hands](#Many-hands) ·
# [Longer texts](#Beyond-the-trained-length) ·
# [Three ways to stretch](#Three-ways-to-stretch-the-angles) ·
# [Exercises](#Exercises)
#
# Attention compares words, and it never asks where they stand. So a model has to be given the
# places of its words. Most models of today do it with clocks: every word carries hands, which are
# turned a little further at each place.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

# %%
words = "Your journey starts with one step".split()
fig, ax = plt.subplots(figsize=(9, 2.1), layout="constrained")
for t, word in enumerate(words):
    ax.add_patch(plt.Circle((3 * t, 0), 1.2, facecolor="0.97", edgecolor="0.3"))
    for rate, length, color in ((1.0, 1.1, "tab:blue"), (0.2, 0.75, "tab:orange")):
        tip = 3 * t + length * np.sin(rate * t), length * np.cos(rate * t)
        ax.annotate("", tip, (3 * t, 0), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2})
    ax.text(3 * t, 1.4, word, ha="center")
    ax.text(3 * t, -1.75, f"place {t}", ha="center", color="0.4")
ax.set(xlim=(-1.5, 16.5), ylim=(-2, 2), aspect="equal", title="Each word carries the time")
ax.axis("off")
plt.show()

# %% [markdown]
# The blue hand goes far from word to word, the orange one goes slowly. The angle between the blue
# hands of two words says how far the words are apart, and it is the same at the beginning of a text
# and at its end. At the end of this chapter you will understand
#
# * why attention without positions cannot tell *dog bites man* from *man bites dog*;
# * four remedies: sinusoids, a learned table, a penalty for the distance (ALiBi), and rotation
#   (RoPE), each written in a few lines;
# * why a rotation depends only on the distance of two words;
# * what goes wrong in texts longer than those of the training, and how angles are stretched.
#
# `x` is the sentence above: six words with three numbers each, as in
# [chapter 1](01_attention_without_weights.ipynb). It comes from `climb.py`, as do `heat`, which
# draws tables, and `same`, which compares two arrays.

# %%
from climb import heat, same, tokens, x

# %% [markdown]
# ## Shuffled words
#
# Take attention without weights, and give it the words in another order.


# %%
def attention_weights_of(x):
    return jax.nn.softmax(x @ x.T, axis=-1)  # T T


# %%
order = jnp.array([5, 2, 0, 4, 1, 3])
shuffled = x[order]  # step starts Your one journey with
plain_context = attention_weights_of(x) @ x  # T D
same(attention_weights_of(shuffled) @ shuffled, plain_context[order])

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.7), layout="constrained")
mixed = [tokens[t] for t in order]
heat(axes[0], attention_weights_of(x), "the sentence", most=0.3)
heat(axes[1], attention_weights_of(shuffled), "the same words, shuffled", mixed, mixed, most=0.3)
plt.show()

# %% [markdown]
# The tables have the same numbers in other places: *Your* looks at *starts* with the weight 0.20 in
# both. Each word therefore gets the same context vector as before. Queries, keys and values made by
# matrices do not change this, because each is made of one word alone. Attention sees a *bag* of
# words: *dog bites man* is the same bag as *man bites dog*.
#
# > **Try it.** Cover the future, as in [chapter 3](03_looking_back_only.ipynb), and shuffle only
# > the first five words. Which context vector stays the same?
#
# <details><summary>Answer</summary>
#
# ```python
# def causal_context(x):
#     future = jnp.triu(jnp.ones((6, 6), dtype=bool), k=1)  # T T
#     return jax.nn.softmax(jnp.where(future, -jnp.inf, x @ x.T), axis=-1) @ x  # T D
#
#
# first_five = jnp.array([3, 1, 4, 0, 2, 5])
# before, after = causal_context(x), causal_context(x[first_five])
# same(after[5], before[5])
# assert all(abs(after[place] - before[t]).max() > 0.01 for place, t in enumerate(first_five[:5]))
# ```
#
# The last one. It sees the five others in any case, and does not know their order. The other words
# do change, because each of them now sees another part of the sentence. So a causal mask gives away
# a little about places, but a word still sees its own past as a bag.
#
# </details>
#
# ## A vector for each place
#
# The first remedy (2017) is to add a vector $p_t$ to the word at place $t$, before the first layer.
# One can *learn* a table with a row for each place, as chapter 6 will do. Such a table ends
# somewhere: BERT has 512 rows, GPT-2 has 1,024, and no row for a place beyond.
#
# Or one can *compute* the rows. The first transformer took waves, from fast ones to slow ones:
#
# $$p_{t,2i} = \sin(t\,\theta_i), \qquad p_{t,2i+1} = \cos(t\,\theta_i), \qquad
# \theta_i = 10000^{-2i/D} .$$


# %%
def sinusoids(length, width, base=10_000.0):
    rates = base ** (-np.arange(0, width, 2) / width)  # D/2
    angles = np.arange(length)[:, None] * rates  # T D/2
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, width)  # T D


# %%
p = sinusoids(64, 32)
products = p @ p.T  # T T
for distance in range(64):
    np.testing.assert_allclose(np.diagonal(products, distance), products[0, distance])

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 2.9), layout="constrained")
axes[0].imshow(p.T, cmap="RdBu_r", aspect="auto")
axes[0].set(xlabel="place", ylabel="number of the vector", title="32 numbers for each of 64 places")
for t, style in ((5, "-"), (30, "--"), (55, ":")):
    axes[1].plot(np.arange(64) - t, products[t], style, lw=2, label=f"place {t}")
axes[1].set(xlabel="distance to another place", title="Products of the vectors of two places")
axes[1].legend(frameon=False)
plt.show()

# %% [markdown]
# Each row of the left picture is one wave; the lower ones hardly move within 64 places. Each column
# is the vector of a place, and no two columns are equal. On the right are products of two such
# vectors: three places, and one curve. The product depends only on the *distance* of two places.
#
# But a layer does not see $p_t$ alone. It sees the sum of word and place, and a score of two sums
# has four terms:
#
# $$(x_t + p_t)\cdot(x_j + p_j) = x_t\cdot x_j + x_t\cdot p_j + p_t\cdot x_j + p_t\cdot p_j .$$
#
# Two of them mix words with places, and do not depend on the distance alone. "Three words back" has
# to be learned. The next two remedies leave the words alone and put the distance into the scores.
#
# ## Distance as a penalty
#
# **ALiBi** (*attention with linear biases*, 2021) is the shortest remedy. The farther away a word,
# the more is subtracted from its score:
#
# $$s_{tj} = \frac{q_t \cdot k_j}{\sqrt H} - m\,(t - j), \qquad j \le t .$$
#
# The slope $m$ is not learned. Each of N heads has another: $2^{-8/N}, 2^{-16/N}, \dots, 2^{-8}$.
# Here are the slopes of eight heads, and the scores of our words in all of them:

# %%
from flax_attn import CAUSAL, Alibi, alibi_slopes, attention_weights

slopes = alibi_slopes(8)
back = np.arange(6)[:, None] - np.arange(6)  # T T: how many places back
penalty = np.where(back < 0, -np.inf, 0 - slopes[:, None, None] * back)  # N T T
by_hand = jax.nn.softmax(x @ x.T / 3**0.5 + penalty, axis=-1)  # N T T
heads = jnp.repeat(x[:, None], 8, axis=1)  # T N H, eight equal heads
same(attention_weights(heads, heads, mask=CAUSAL, score=Alibi(slopes)), by_hand)

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained", width_ratios=(2, 3))
heat(axes[0], penalty[0], "added to the scores of head 1", cmap="Blues_r", least=-3, most=0)
for n, slope in enumerate(slopes, 1):
    axes[1].plot(np.exp(-slope * np.arange(200)), color=plt.cm.viridis(n / 9), label=f"head {n}")
axes[1].set(xlabel="distance", ylabel="factor", title=r"$e^s$ is multiplied by $e^{-md}$")
axes[1].legend(frameon=False, ncols=2)
plt.show()

# %% [markdown]
# Head 1 sees a few words, and head 8 sees hundreds. No table ends, so ALiBi works in texts longer
# than those of its training. But a far word never counts fully, even where it is the one that
# matters. (T5 *learns* what it adds, one number for each distance and head.)
#
# > **Try it.** At which distance is the factor of head 8 down to one half? And that of head 1?
#
# <details><summary>Answer</summary>
#
# ```python
# half = np.log(2) / slopes
# print(half.round(1))
# assert 177 < half[7] < 178 and 1.3 < half[0] < 1.4
# ```
#
# $e^{-md} = 1/2$ at $d = \log 2 / m$. With $m = 1/256$ that is 177 words, and with $m = 1/2$ it is
# 1.4 words. Each head reaches twice as far as the one before.
#
# </details>
#
# ## A point that turns
#
# Now the clocks. Two numbers $(a, b)$ of a query or a key are a point in the plane: the tip of a
# hand. Turning it by an angle $\varphi$ (counterclockwise, as in mathematics) makes
#
# $$a' = a\cos\varphi - b\sin\varphi, \qquad b' = b\cos\varphi + a\sin\varphi .$$
#
# **Rotary positions** (RoPE, [Su and others](https://arxiv.org/abs/2104.09864), 2021) turn the
# query at place $t$ by $t\,\theta$, and the key at place $j$ by $j\,\theta$. The rate $\theta$ is
# half a radian a place here.


# %%
def turn(point, angle):
    a, b = point
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([a * cos - b * sin, b * cos + a * sin])


# %%
query, key, rate = np.array([0.9, -0.5]), np.array([0.8, 0.3]), 0.5
places = [(2, 0), (5, 3), (7, 1)]  # of the query and of the key
scores = [turn(query, t * rate) @ turn(key, j * rate) for t, j in places]


# %%
def draw(ax, title=""):
    """A circle to draw on."""
    ax.add_patch(plt.Circle((0, 0), 1, facecolor="0.97", edgecolor="0.7"))
    ax.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=title)
    ax.axis("off")


# %%
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3), layout="constrained")
for ax, (t, j), score in zip(axes, places, scores, strict=True):
    draw(ax, f"query at {t}, key at {j}: product {score:.2f}")
    for name, point, at, color in (("q", query, t, "tab:blue"), ("k", key, j, "tab:orange")):
        tip = turn(point, at * rate)
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", 0.3 * point / np.hypot(*point), (0, 0), arrowprops={**arrow, "alpha": 0.25})
        ax.annotate("", tip, (0, 0), arrowprops=arrow)
        ax.text(*(1.2 * tip), name, color=color, ha="center", va="center", fontsize=11)
plt.show()

# %% [markdown]
# The short pale arrows show where both began. From the first picture to the second, both move three
# places along the text, and both turn by the same angle. Their lengths stay, the angle between them
# stays, and so does their product. In the third picture they are six places apart, and the product
# is another. So one may turn both back by $t\,\theta$, until the query is where it began. With
# $R_\varphi$ for the rotation,
#
# $$(R_{t\theta}\, q)\cdot(R_{j\theta}\, k) = q \cdot R_{(j-t)\theta}\, k .$$
#
# On the right the places have gone, and only their distance is left.

# %%
np.testing.assert_allclose(scores[0], scores[1])
np.testing.assert_allclose(scores[2], query @ turn(key, (1 - 7) * rate))
assert abs(scores[2] - scores[0]) > 0.5

# %% [markdown]
# ## Many hands
#
# One hand is not enough. If it is fast, it soon comes round to where it was: at one radian a place,
# places 0 and 44 are nearly the same, since 44 radians are 7.003 turns. If it is slow, neighbours
# look alike. So a head of H numbers is cut into H/2 pairs, and each pair turns at its own rate:
#
# $$\theta_i = \mathrm{base}^{-2i/H}, \qquad i = 0, \dots, H/2 - 1 ,$$
#
# as second, minute and hour hands do. The base is 10,000 in the paper. The picture has 100, so that
# you see the slow hands move.

# %%
fig, axes = plt.subplots(1, 4, figsize=(9, 2.7), layout="constrained")
for i, ax in enumerate(axes):
    rate = 100.0 ** (-2 * i / 8)
    draw(ax, f"pair {i}: {rate:.3g} rad a place")
    for t in range(12):
        a, b = np.cos(t * rate), np.sin(t * rate)
        ax.plot(a, b, "o", color=plt.cm.viridis(t / 12), markersize=5)
        if rate > 0.2 or t in (0, 11):
            ax.text(1.17 * a, 1.17 * b, t, ha="center", va="center", fontsize=8)
fig.suptitle("The first twelve places on the clocks of a head of width 8", fontsize=10)
plt.show()

# %% [markdown]
# In code, pair $i$ consists of numbers $i$ and $i + H/2$ of the head, as in the files of Llama.
# ([Chapter 7](07_port_a_real_model.ipynb) shows the other layout, in which neighbours are a pair.)
# All pairs of all words turn at once:


# %%
def rates_of(width, base=10_000.0):
    return base ** (-np.arange(0, width, 2) / width)  # H/2


def rotated(y, places):
    angles = places[:, None] * rates_of(y.shape[-1])  # T H/2
    a, b = np.split(y, 2, axis=-1)  # T H/2 each
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)  # T H


# %% [markdown]
# In the library this is `Rotary()`. It takes heads, `T N H`, and counts the places itself.

# %%
from flax_attn import Rotary

random = np.random.RandomState(0)
q, k, v = random.standard_normal((3, 6, 8)).astype(np.float32)  # T H each
same(Rotary()(q[:, None])[:, 0], rotated(q, np.arange(6)))

# %% [markdown]
# The weights stay the same if the whole text moves a hundred places along. And shuffled words are
# no longer the same words in other places:


# %%
def rotary_weights(q, k, places):
    q, k = (rotated(y, places)[:, None] for y in (q, k))  # T N H each, with one head
    return attention_weights(q, k)[0]  # T T


# %%
here, later = rotary_weights(q, k, np.arange(6)), rotary_weights(q, k, np.arange(6) + 100)
same(later, here)
rows_and_columns_shuffled = here[order][:, order]
change = abs(rotary_weights(q[order], k[order], np.arange(6)) - rows_and_columns_shuffled)
print(f"shuffled: a weight changes by up to {change.max():.2f}")
assert change.max() > 0.1

# %% [markdown]
# Rotation costs no parameters. It is done in every layer, to queries and keys. Values are left
# alone: exercise 2 shows why.
#
# > **Try it.** After how many words has the slowest hand gone round once? Llama 2 has the base
# > 10,000, heads of width 128, and was trained on 4,096 tokens. Llama 3 has 500,000, 128 and 8,192.
#
# <details><summary>Answer</summary>
#
# ```python
# once_round = [2 * np.pi / rates_of(128, base)[-1] for base in (10_000.0, 500_000.0)]
# print([f"{places:,.0f}" for places in once_round])
# assert once_round[0] > 54_000 and once_round[1] > 2_500_000
# ```
#
# After about 54,000 and 2.6 million tokens. In all of its training, the slowest hand of Llama 2
# went through a thirteenth of its circle. What does the model make of the rest? That is the next
# section.
#
# </details>
#
# ## Beyond the trained length
#
# A model was trained on texts of 64 tokens, and is now given 256. Let its heads have the width 12,
# that is six pairs, and let the base be 500, which suits so short a text. Which angles are new to
# the model?

# %%
from matplotlib.patches import Wedge

plain = rates_of(12, base=500.0)  # six rates


def draw_arcs(axes, rates):
    """Blue: angles of 64 places in training. Orange: new ones of 256 places."""
    for ax, trained_rate, rate in zip(axes, plain, rates, strict=True):
        draw(ax)
        old, new = np.degrees([64 * trained_rate, 256 * rate]).clip(max=360)
        ax.add_patch(Wedge((0, 0), 1, 0, old, width=0.4, color="lightsteelblue"))
        if new > old + 0.01:
            ax.add_patch(Wedge((0, 0), 1, old, new, width=0.4, color="tab:orange"))
        ax.text(0, 0, f"{rate / trained_rate:.2g}", ha="center", va="center")


# %%
fig, axes = plt.subplots(1, 6, figsize=(9, 1.9), layout="constrained")
draw_arcs(axes, plain)
for i, ax in enumerate(axes):
    ax.set_title(f"pair {i}")
fig.suptitle("Blue: angles of the training. Orange: new at 256 tokens", fontsize=10)
plt.show()

# %% [markdown]
# The three fast hands have been everywhere: no angle is new to them. The slow hands come to angles
# that no gradient ever asked for. Does that hurt? Let us make a head that passes over the nearest
# words: its score is to be $1 - e^{-d/10}$ at the distance $d$. A score is a sum of waves in $d$,
# two for each pair. If each pair of the query is the point (1, 0), the numbers of the key are the
# heights of the waves. Least squares finds them from the 64 trained distances.


# %%
def waves(rates):
    angles = np.arange(256)[:, None] * rates  # 256 6
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)  # 256 12


# %%
wanted = 1 - np.exp(-np.arange(256) / 10)
key = np.linalg.lstsq(waves(plain)[:64], wanted[:64], rcond=1e-3)[0]  # rcond: no huge numbers
unscaled = waves(plain) @ key
print(f"largest error up to 63: {abs(unscaled - wanted)[:64].max():.2f}")
print(f"largest score beyond:   {unscaled[64:].max():.2f}")
assert abs(unscaled - wanted)[:64].max() < 0.05 and unscaled[64:].max() > 5
query = jnp.tile(jnp.repeat(jnp.array([1.0, 0.0]), 6), (256, 1, 1))  # T N H
same(Rotary(500.0)(query)[:, 0] @ key, unscaled)

# %%
fig, ax = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
ax.axvspan(0, 63, color="lightsteelblue", alpha=0.4, label="trained")
ax.plot(wanted, "--", color="0.5", label="wanted")
ax.plot(unscaled, color="tab:orange", label="what the head gives")
ax.set(xlabel="distance", ylabel="score", title="Right up to 63, and wild beyond")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Within the trained distances the large waves of slow hands cancel each other. Beyond, nothing
# makes them cancel: words some 150 places back now beat all others by a factor of $e^5$. So a model
# with RoPE can write nonsense beyond its trained length, although no table ends and no error is
# raised.
#
# ## Three ways to stretch the angles
#
# The remedy changes the rates, so that 256 places use angles that are known. Let $s = 256/64 = 4$.
#
# **Linear interpolation** (2023) divides all rates by $s$. Place 256 gets the angles of place 64.
# The price: neighbours are only a quarter as far apart as before, on the fast hands too.
#
# **A larger base**, also called *NTK-aware* scaling (2023), leaves the fastest hand alone and
# divides the slowest rate, $\mathrm{base}^{-(H-2)/H}$, by $s$. The base that does it is
# $\mathrm{base}\cdot s^{H/(H-2)}$. The hands between are slowed down a little or much.
#
# **Yarn** ([Peng and others](https://arxiv.org/abs/2309.00071), 2023) asks what each hand did in
# training. Who went round 32 times or more keeps its rate. Who did not go round once is divided by
# $s$. Between them a ramp leads from the one to the other. (In 64 places nobody goes round 32
# times, so the ramp begins at pair 0.)

# %%
linear = plain / 4
larger_base = rates_of(12, base=500.0 * 4 ** (12 / 10))
turns = np.array([32, 1])  # within 64 places
first, last = 6 * np.log(64 / (2 * np.pi * turns)) / np.log(500.0)  # the i that makes so many
first, last = max(np.floor(first), 0), np.ceil(last)  # pairs 0 and 3
ramp = np.clip((np.arange(6) - first) / (last - first), 0, 1)  # 0: as it was, 1: divided by 4
yarn = plain * (1 - ramp) + plain / 4 * ramp

# %%
fig, axes = plt.subplots(4, 6, figsize=(9, 5.6), layout="constrained")
names = "no change", "linear", "larger base", "Yarn"
for row, name, rates in zip(axes, names, (plain, linear, larger_base, yarn), strict=True):
    draw_arcs(row, rates)
    row[0].text(-1.5, 0, name, ha="right", va="center", fontsize=11)
for i, ax in enumerate(axes[0]):
    ax.set_title(f"pair {i}")
fig.suptitle("Angles at 256 tokens, and what each rate was multiplied by", fontsize=10)
plt.show()

# %% [markdown]
# Linear interpolation leaves nothing orange, and makes every hand four times slower. The larger
# base keeps the fastest hand, divides the slowest by 4, and goes too far between them. Yarn keeps
# the fastest hand, and reaches no new angle.
#
# The library has all three, and others, as a `scaling` of `Rotary`. (`DynamicScaling` makes the
# base larger as the text grows. With the factor 1 and 256 tokens its base is ours.)

# %%
from flax_attn import DynamicScaling, LinearScaling, Yarn

np.testing.assert_allclose(LinearScaling(4.0).rates(500.0, 12), linear)
np.testing.assert_allclose(DynamicScaling(1.0, 64).rates(500.0, 12, length=256), larger_base)
np.testing.assert_allclose(Yarn(4.0, 64).rates(500.0, 12), yarn)
assert (256 * linear <= 64 * plain).all() and (256 * larger_base > 64 * plain)[3:5].all()
assert (np.minimum(256 * yarn, 2 * np.pi) <= 64 * plain).all() and yarn[0] == plain[0]

# %%
curves = {"linear": linear, "larger base": larger_base, "Yarn": yarn}
curves = {name: waves(rates) @ key for name, rates in curves.items()}
np.testing.assert_allclose(curves["linear"][::4], unscaled[:64])  # distance 4 d is what d was
assert max(curves["linear"].max(), curves["Yarn"].max()) < 1.2 < curves["larger base"].max()
assert abs(curves["Yarn"] - wanted).mean() < 0.2 < abs(curves["larger base"] - wanted).mean()

# %%
fig, ax = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
ax.set_prop_cycle(color=["tab:orange", "tab:blue", "tab:green", "tab:purple"])
for name, curve in {"no change": unscaled, **curves}.items():
    ax.plot(curve, label=name, lw=1 if name == "no change" else 2)
ax.plot(wanted, "--", color="0.5", label="wanted")
ax.set(xlabel="distance", ylabel="score", title="The same head with stretched angles")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Nothing was trained anew. Linear interpolation and Yarn tame the head, and a larger base does so
# in part. What this head does not show is the price of linear interpolation: a head that looks
# exactly one word back needs the fast hands as they were. (Yarn also multiplies queries and keys
# by $0.1\log s + 1$, so all scores by 1.3, which makes up for a softmax over so many more words.)
#
# In practice a model is then trained a little more at the new length. Its `config.json` says which
# scaling it has: Yarn in DeepSeek-V3 and gpt-oss, a ramp of its own in Llama 3.1
# (`Llama3Scaling`), linear in some layers of Gemma 3.
#
# ## In a nutshell
#
# | positions | where they enter | beyond the trained length | in the library |
# | --- | --- | --- | --- |
# | learned table | added to words | there is no row | `nnx.Embed` |
# | sinusoids | added to words | vectors that are new | a few lines |
# | ALiBi | subtracted from scores | far words fade | `Alibi(alibi_slopes(N))` |
# | RoPE | turns queries and keys | angles that are new | `Rotary()` |
# | RoPE, stretched | the same, with slower hands | known angles | `Rotary(scaling=Yarn(s, L))` |
#
# ## Exercises
#
# **1.** Sinusoids and RoPE are relatives. Show that the vector $p_{t+d}$ of the sinusoids is $p_t$
# with its pairs turned by angles that do not depend on $t$. Take $d = 5$, all $t$ below 59, and
# `p` from above.
#
# <details><summary>Answer</summary>
#
# Call sine and cosine of place $t$ the point $(\cos t\theta_i, \sin t\theta_i)$. Five places on,
# its angle has grown by $5\,\theta_i$.
#
# ```python
# sines, cosines = p[:, 0::2], p[:, 1::2]  # T D/2 each
# angle = 5 * rates_of(32)  # the same for all t
# np.testing.assert_allclose(cosines[5:], cosines[:-5] * np.cos(angle) - sines[:-5] * np.sin(angle))
# np.testing.assert_allclose(sines[5:], sines[:-5] * np.cos(angle) + cosines[:-5] * np.sin(angle))
# ```
#
# So the authors of 2017 had the same clocks, and added what they show to the words. RoPE
# uses them to turn the words.
#
# </details>
#
# **2.** Why are values not rotated? Rotate them too, and move the text by 100 places. What happens
# to the context vectors? Which rotation of the *output* mends it?
#
# <details><summary>Answer</summary>
#
# ```python
# def context(places, back=False):
#     c = rotary_weights(q, k, places) @ rotated(v, places)  # T H
#     return rotated(c, -places) if back else c
#
#
# start, moved = np.arange(6), np.arange(6) + 100
# assert abs(context(moved) - context(start)).max() > 0.5
# same(context(moved, back=True), context(start, back=True))
# ```
#
# A sum of rotated values depends on where the text stands, and the layers above would have to undo
# it. Turned back by the place of the query, each value counts as turned by its distance alone. Some
# models do that; most leave values as they are.
#
# </details>
#
# **To read:** Su and others, [RoFormer](https://arxiv.org/abs/2104.09864); Press and others,
# [Train Short, Test Long](https://arxiv.org/abs/2108.12409), on ALiBi; Chen and others,
# [Extending Context Window of Large Language Models via Positional Interpolation](https://arxiv.org/abs/2306.15595).
#
# Next: [5. Before transformers](05_before_transformers.ipynb), where attention came from.
