# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11. Linear attention and state
#
# *24 minutes to read, 1 minute to run on a quiet machine with two cores.*
# [Without the softmax](#Without-the-softmax) ·
# [Another order](#The-same-sum-in-another-order) ·
# [What it saves](#What-it-saves) ·
# [What a sum forgets](#What-a-sum-cannot-do) ·
# [Decay](#Decay) ·
# [The delta rule](#The-delta-rule) ·
# [Qwen3-Next](#Both-together:-Qwen3-Next) ·
# [Documents](#Documents-in-one-row) ·
# [Decoding](#Decoding-with-a-state) ·
# [Exercises](#Exercises)
#
# In [chapter 10](10_generate.ipynb) a model kept the key and the value of every token. This chapter
# puts all of the past into one matrix, whose size does not depend on the length of the text.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
H, lengths = 128, 2 ** np.arange(4, 18)
numbers = {"softmax": 2 * lengths * H, "linear": np.full(len(lengths), H**2 + H)}
fig, ax = plt.subplots(figsize=(5.5, 2.8), layout="constrained")
ax.loglog(lengths, numbers["softmax"], "o-", label="keys and values", markersize=4)
ax.loglog(lengths, numbers["linear"], "o-", label="one matrix and one vector", markersize=4)
ax.set_xticks([16, 128, 1024, 8192, 65_536], ["16", "128", "1,024", "8,192", "65,536"])
ax.minorticks_off()
ax.axvline((H + 1) / 2, color="gray", ls="--", lw=1)
ax.set(xlabel="tokens so far", ylabel="numbers that a head keeps")
ax.set_title("A cache grows with the text, a state does not")
ax.legend()
plt.show()

# %% [markdown]
# The picture counts for one head of width H = 128: a cache keeps $2\,T\,H$ numbers, and a state
# $H^2 + H$. The price is the softmax, which something simpler replaces.
#
# At the end you will understand
#
# * why the softmax needs all keys, and what **linear attention** has in its place;
# * that the same sum, taken in another order, is a recurrent network with a **state**;
# * what such a state cannot remember, shown by two tests;
# * how **decay** and the **delta rule** help, and what Qwen3-Next makes of both;
# * how packed documents, padding and decoding go with a state.
#
# `x` is the sentence of chapter 1: six words, three numbers each. It comes from `climb.py`, the
# file beside these notebooks, with what draws (`heat`, `diagram`) and compares (`same`).

# %%
from climb import diagram, heat, same, x

# %% [markdown]
# ## Without the softmax
#
# This is attention as we know it, for the token at position $t$ of a causal layer:
#
# $$c_t = \frac{\sum_{s \le t} e^{q_t \cdot k_s}\, v_s}{\sum_{s \le t} e^{q_t \cdot k_s}}.$$
#
# The exponential of a dot product needs the query and the key *together*. Nobody can add up the
# past before the query is known, so all keys have to be kept.
#
# Now replace $e^{q \cdot k}$ by $\phi(q) \cdot \phi(k)$, a dot product of two vectors that are
# computed apart. Weights must not be negative, so $\phi$ makes every number positive. A usual
# choice is $x + 1$ above zero and $e^x$ below
# ([Katharopoulos and others](https://arxiv.org/abs/2006.16236), 2020).


# %%
def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


# %%
line = np.linspace(-4, 3, 200)
fig, ax = plt.subplots(figsize=(4.5, 2.3), layout="constrained")
ax.plot(line, phi(line))
ax.axhline(0, color="gray", lw=1)
ax.set(xlabel="x", ylabel=r"$\phi(x)$")
ax.set_title("Every number becomes positive")
plt.show()
assert phi(line).min() > 0

# %% [markdown]
# Here are both kinds of weights for the six words. Queries, keys and values come from random
# matrices, as in [chapter 2](02_trainable_weights.ipynb).

# %%
words = np.asarray(x, float)  # T D
q, k, v = words @ np.random.RandomState(1).standard_normal((3, 3, 4))  # T H each
past = np.tril(np.ones((6, 6)))


# %%
def weights(table):
    """A table of positive numbers as weights: what lies ahead is zero, each row sums to one."""
    return table * past / (table * past).sum(-1, keepdims=True)


# %%
by_softmax, linear = weights(np.exp(q @ k.T)), weights(phi(q) @ phi(k).T)
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
heat(axes[0], by_softmax, "softmax")
heat(axes[1], linear, "linear")
plt.show()
same(linear.sum(-1), np.ones(6), within=1e-12)

# %% [markdown]
# Both tables hide the future, and the rows of both add up to one. The linear weights are flatter.
# An exponential can make one key win by far, and a product of positive numbers hardly can. Remember
# this. It will matter below.
#
# ## The same sum in another order
#
# What was gained? The query no longer stands inside the sum:
#
# $$c_t = \frac{\phi(q_t)^\top M_t}{\phi(q_t) \cdot z_t}, \qquad
# M_t = \sum_{s \le t} \phi(k_s)\, v_s^\top, \qquad z_t = \sum_{s \le t} \phi(k_s).$$
#
# $M$ is a matrix with H rows, and as many columns as a value has numbers. $z$ is a vector. Together
# they are the **state**: all that the layer knows of the past. A new token adds its own part, and
# then its query reads.

# %%
boxes = {
    "state before\nM, z": (0, 0.2, "navajowhite"),
    "key, value": (1.9, 1.0, "lightsteelblue"),
    "state after\nM, z": (3.8, 0.2, "navajowhite"),
    "query": (3.8, 1.0, "lightsteelblue"),
    "read": (5.7, 0.6, "palegreen"),
    "context c": (7.4, 0.6, "lightsteelblue"),
}
before, pair, after, query, read, context = boxes
arrows = [(before, after, "the same size"), (pair, after, "add"), (after, read), (query, read)]
diagram(boxes, [*arrows, (read, context)], size=(8.6, 1.6), title="One token")

# %%
M, z, contexts = np.zeros((4, 4)), np.zeros(4), []
for t in range(6):
    M = M + np.outer(phi(k[t]), v[t])  # H h
    z = z + phi(k[t])  # H
    contexts.append(phi(q[t]) @ M / (phi(q[t]) @ z))  # h
same(contexts, linear @ v, within=1e-12)

# %% [markdown]
# A loop over tokens with a state: that is a recurrent network, like those of [chapter
# 5](05_before_transformers.ipynb). But in training it does not have to run as one. The table with
# all tokens at once gives the same numbers. The library's layer has both forms. The call takes the
# tokens in chunks, and `recurrent` takes them one by one.

# %%
from flax_attn import LinearAttention

layer = LinearAttention(3, 2, 4, causal=True, rngs=nnx.Rngs(0))  # two heads of width 4
same(layer.recurrent(x), layer(x))

# %% [markdown]
# `step` is one turn of the loop: a token and the state before it go in, and the output and the next
# state come out. There is no cache that grows.

# %%
state = layer.initial_state()
print("M:", state.kv.shape, "z:", state.z.shape, "(two heads)")
rows = []
for word in x:  # D
    y, state = layer.step(word, state)
    rows.append(y)
same(jnp.stack(rows), layer(x))

# %% [markdown]
# And it is the layer that it is meant to be: the table above, for each head, with the layer's own
# weights.


# %%
def projected(linear):
    return np.split(words @ np.asarray(linear.kernel[...]), 2, axis=-1)  # T H for each of two heads


# %%
qkv = zip(*map(projected, (layer.q_proj, layer.k_proj, layer.v_proj)), strict=True)
by_table = [weights(phi(q) @ phi(k).T) @ v for q, k, v in qkv]  # T H each
same(np.hstack(by_table) @ np.asarray(layer.o_proj.kernel[...]), layer(x))

# %% [markdown]
# > **Try it.** Let `phi` be `np.exp`, and draw the two tables again. Are the linear weights sharper
# > now? Why are they still not those of the softmax?
#
# <details><summary>Answer</summary>
#
# ```python
# phi = np.exp
# sharper = weights(phi(q) @ phi(k).T)
# fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
# heat(axes[0], by_softmax, "softmax")
# heat(axes[1], sharper, "linear, with exp")
# plt.show()
# largest = [table[1:].max(-1).mean() for table in (linear, sharper, by_softmax)]
# np.testing.assert_allclose(largest, [0.300, 0.313, 0.631], atol=2e-3)
# ```
#
# Hardly. The largest weight of a row is 0.31 on average, where it was 0.30, and 0.63 with the
# softmax. The softmax has $e^{q \cdot k}$, the *product* of all $e^{q_i k_i}$. Here $\phi(q) \cdot
# \phi(k)$ is the *sum* of all $e^{q_i + k_i}$. In it the query and the key are added and not
# multiplied, so a large number of the key helps with every query.
#
# </details>
#
# ## What it saves
#
# The picture at the top counts the memory. Now the work of one head of width H: with the softmax a
# text of T tokens takes about $T^2/2$ scores of H multiplications each, and as many for the
# mixture. With a state every token adds $H^2$ products and reads $H^2$. From which length on is the
# state the smaller one? Compare the two sides of each:
#
# $$\text{work: } T^2 H = 2\,T H^2 \;\Leftrightarrow\; T = 2H, \qquad
# \text{memory: } 2\,T H = H^2 + H \;\Leftrightarrow\; T = \tfrac{H + 1}{2}.$$
#
# So the work is equal at $T = 2H = 256$, and the memory at $T = 64.5$. From 65 tokens on the state
# is smaller than the cache.

# %%
multiplications = {"softmax": lengths**2 * H, "linear": 2 * lengths * H**2}
equal_work, smaller_state = 2 * H, (H + 1) // 2 + 1
print(f"H = {H}. Equal work at {equal_work} tokens, a smaller state from {smaller_state} on")
assert (equal_work, smaller_state) == (256, 65)
for T in (equal_work - 1, equal_work, equal_work + 1):
    assert np.sign(T**2 * H - 2 * T * H**2) == np.sign(T - equal_work)
assert 2 * (smaller_state - 1) * H < H**2 + H < 2 * smaller_state * H

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.8), layout="constrained")
for name, count in multiplications.items():
    ax.loglog(lengths, count, "o-", label=name, markersize=4)
ax.set_xticks([16, 128, 1024, 8192, 65_536], ["16", "128", "1,024", "8,192", "65,536"])
ax.minorticks_off()
ax.axvline(equal_work, color="gray", ls="--", lw=1)
ax.set(xlabel="tokens", ylabel="multiplications")
ax.set_title("In a long text a state saves work too")
ax.legend()
plt.show()

# %% [markdown]
# At 131,072 tokens the softmax multiplies 512 times as much and keeps 2,032 times as much.

# %%
for found, ratio in ((multiplications, 512), (numbers, 2032)):
    print(f"{found['softmax'][-1] / found['linear'][-1]:,.0f} times")
    assert round(found["softmax"][-1] / found["linear"][-1]) == ratio

# %% [markdown]
# ## What a sum cannot do
#
# Nothing is free. A table of T keys can tell T tokens apart. A matrix with H rows cannot, if T is
# much larger than H. We test it with a list of names and places:
#
# > *Ada is at pier 3. Ben is at pier 11. Cyd is at pier 3. ... Where is Ben?*
#
# A name is a random key of length one, with 16 numbers. A pier is a value, one of 16, which has a
# single 1. Every pair is written into the state, $M \leftarrow M + k v^\top$. Then we ask for each
# name: the answer is the largest of the numbers $k^\top M$. This is called *associative recall*.
# (We leave out $\phi$ and $z$. What $\phi$ makes of a key is a key again, and dividing by one
# number changes no answer.)

# %%
rng = np.random.default_rng(0)
TEXTS, T, WIDTH = 200, 64, 16
names = rng.standard_normal((TEXTS, T, 1, WIDTH)).astype("float32")  # B T N H
names /= np.linalg.norm(names, axis=-1, keepdims=True)
piers = rng.integers(WIDTH, size=(TEXTS, T))  # B T
values = np.eye(WIDTH, dtype="float32")[piers][:, :, None]  # B T N h

# %% [markdown]
# `linear_recurrence` is the library's function for all states of this chapter. It returns the
# outputs of all tokens and the last state. With `valid` we tell it how many pairs were written.


# %%
from flax_attn.recurrence import linear_recurrence


def recalled(written, **rule):
    """The piers that 200 states say for all 64 names, after the first `written` pairs."""
    valid = np.broadcast_to(np.arange(T) < written, (TEXTS, T))
    _, M = linear_recurrence(names, names, values, valid=valid, **rule)  # B N H h
    return np.einsum("btnh,bnhd->btd", names, M).argmax(-1)  # B T


# %%
def recalled_by_softmax(written):
    """The same of attention over all names written, with sharp weights."""
    scores = 30 * names[:, :, 0] @ names[:, :written, 0].mT  # B T S
    w = np.exp(scores - scores.max(-1, keepdims=True))
    return (w @ values[:, :written, 0]).argmax(-1)


# %%
counts = [2, 4, 8, 16, 32, 64]
right = {
    "softmax": [(recalled_by_softmax(n) == piers)[:, :n].mean() for n in counts],
    "a sum": [(recalled(n) == piers)[:, :n].mean() for n in counts],
}
print("names: ", *(f"{n:>5}" for n in counts))
for name, share in right.items():
    print(f"{name:>7}", *(f"{100 * r:>4.0f}%" for r in share))
assert min(right["softmax"]) > 0.99 and right["a sum"][0] > 0.99 and right["a sum"][-1] < 0.65

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.6), layout="constrained")
for name, share in right.items():
    ax.semilogx(counts, share, "o-", base=2, label=name)
ax.axhline(1 / 16, color="gray", ls="--")
ax.text(2, 0.09, "guessing", color="gray")
ax.set_xticks(counts, counts)
ax.set(xlabel="names in the text", ylabel="right answers", ylim=(0, 1.05))
ax.set_title("A sum mixes up names when there are many")
ax.legend(loc="lower left", bbox_to_anchor=(0, 0.15))
plt.show()

# %% [markdown]
# Why? Ask for a name $k_j$, and the state answers
#
# $$k_j^\top M = v_j + \sum_{i \ne j} (k_j \cdot k_i)\, v_i.$$
#
# The first part is the answer. The rest is noise, and there is more of it with every name. In 16
# dimensions only 16 directions can be at right angles to each other, and random ones never quite
# are. The softmax turns a difference in scores into an enormous difference in weights, and so it
# does not hear the noise.
#
# > **Try it.** Set `WIDTH` to 64. How many names can the state hold now? (The piers are 64 then.)
#
# <details><summary>Answer</summary>
#
# ```python
# WIDTH, TEXTS, T = 64, 50, 1024  # and longer texts, to see an end
# rng = np.random.default_rng(0)
# names = rng.standard_normal((TEXTS, T, 1, WIDTH)).astype("float32")  # B T N H
# names /= np.linalg.norm(names, axis=-1, keepdims=True)
# piers = rng.integers(WIDTH, size=(TEXTS, T))  # B T
# values = np.eye(WIDTH, dtype="float32")[piers][:, :, None]  # B T N h
# shares = {n: (recalled(n) == piers)[:, :n].mean() for n in (64, 128, 256, 512, 1024)}
# print(*(f"{n} names: {share:.0%}" for n, share in shares.items()), sep="\n")
# assert shares[64] > 0.99 and shares[128] > 0.97 and shares[1024] < 0.5
# ```
#
# All 64 of them. In longer texts 99 % of 128 names are right, 90 % of 256, 64 % of 512 and 37 % of
# 1,024. The state has 16 times as many numbers, 64 x 64, and in 64 dimensions random keys are
# nearer to right angles. But there is an end here too.
#
# </details>
#
# The second test is about *changes*. Eight names, at right angles this time, so that there is no
# noise. But they move:
#
# > *Ada is at pier 3. Ben is at pier 11. Ada is at pier 7. ... Where is Ada?*

# %%
who = rng.integers(8, size=(TEXTS, T))  # which name a message is about
eight = np.eye(WIDTH, dtype="float32")[who][:, :, None]  # B T N H
last = np.full((TEXTS, 8), -1)  # where each name was seen last; all turn up in nearly every text
for t in range(T):
    last[np.arange(TEXTS), who[:, t]] = piers[:, t]


# %%
def moved(**rule):
    """What the states answer for each of the eight names, after all messages, B 8 h."""
    return np.asarray(linear_recurrence(eight, eight, values, **rule)[1][:, 0, :8])


# %%
def score(answers):
    """The share of right answers, and how far they are from the value that was written."""
    asked, want = answers[last >= 0], np.eye(WIDTH)[last[last >= 0]]
    distance = np.linalg.norm(asked - want, axis=-1).mean()
    return (asked.argmax(-1) == want.argmax(-1)).mean(), distance


# %%
tried = {"a sum": score(moved())}
print("a sum: {:.0%} right, distance {:.2f}".format(*tried["a sum"]))
assert tried["a sum"][0] < 0.4

# %% [markdown]
# The sum has seen Ada at eight piers, and answers with all eight. It has no way to take anything
# back. (A softmax without positions would do no better: the key is the same each time. It needs the
# [positions](positions.ipynb) to prefer the last one.)
#
# ## Decay
#
# The first idea is to let the past fade. Before a token is added, the state is multiplied by a
# number $a$ between 0 and 1:
#
# $$M_t = a_t\, M_{t-1} + k_t v_t^\top.$$
#
# What was written $n$ tokens ago then has the factor $a^n$. As a table, it is the linear one with a
# factor for each distance.

# %%
a = 0.6
distance = np.subtract.outer(np.arange(6), np.arange(6))  # t - s
faded = np.where(distance >= 0, a ** np.maximum(distance, 0), 0.0)  # T S
heads = [array.astype("float32")[:, None] for array in (q, k, v)]  # T N H
o, _ = linear_recurrence(*heads, log_decay=np.full((6, 1), np.log(a), "float32"))
same(o[:, 0], (q @ k.T * faded) @ v)

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.3), layout="constrained")
for factor in (0.6, 0.9, 0.98):
    ax.plot(factor ** np.arange(64), label=f"a = {factor}")
ax.set(xlabel="tokens ago", ylabel="what is left", ylim=(0, 1.05))
ax.set_title("Decay forgets what is far back")
ax.legend()
plt.show()

# %% [markdown]
# The library takes the logarithm of $a$, one for each token and head. Now the names that move:


# %%
def fading(a):
    return np.full((TEXTS, T, 1), np.log(a), "float32")  # B T N


# %%
for factor in (0.98, 0.9, 0.6):
    tried[f"decay {factor}"] = score(moved(log_decay=fading(factor)))
    print("a = {}: {:.0%} right, distance {:.2f}".format(factor, *tried[f"decay {factor}"]))
assert tried["decay 0.9"][0] > 0.9 and tried["decay 0.6"][1] > 0.7

# %% [markdown]
# With a strong decay the last pier wins, so the answers are right. But look at the distance. A name
# that nobody mentioned for a while has faded too, together with all others. Decay cannot tell what
# is out of date from what is merely old.
#
# ## The delta rule
#
# Better: before writing, *read*. What does the state say for this key already? Then write only the
# difference to what it should say:
#
# $$M_t = M_{t-1} + \beta_t\, k_t\, (v_t - M_{t-1}^\top k_t)^\top.$$
#
# This is the **delta rule** (Widrow and Hoff, 1960). If a key has length one and the strength
# $\beta$ is one, then afterwards the state answers $k_t$ with exactly $v_t$, whatever it said
# before. And keys at right angles to $k_t$ do not notice.

# %%
key, new = names[0, 0, 0], values[0, 0, 0]  # H, h
M = rng.standard_normal((WIDTH, WIDTH))  # a state full of other things
M = M + np.outer(key, new - M.T @ key)
same(M.T @ key, new)

# %% [markdown]
# Here is one message as a picture: Ada moves from pier 1 to pier 3. The sum has her at both piers
# afterwards. The delta rule moves her, and leaves Ben and Cyd where they are.

# %%
ada_ben_cyd = np.eye(3)  # three keys at right angles, H = 3
there = np.array([[0, 1.0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]])  # H h: the piers 1, 2 and 0
pier3 = np.eye(4)[3]
added = there + np.outer(ada_ben_cyd[0], pier3)
corrected = there + np.outer(ada_ben_cyd[0], pier3 - there.T @ ada_ben_cyd[0])
assert (corrected == np.eye(4)[[3, 2, 0]]).all() and added[0].sum() == 2

# %%
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.2), layout="constrained")
three, labels = ["Ada", "Ben", "Cyd"], [f"pier {n}" for n in range(4)]
for ax, table, title in zip(
    axes, (there, added, corrected), ("before", "a sum", "the delta rule"), strict=True
):
    heat(ax, table.astype(int), title, rows=three, columns=labels, most=1.5)
plt.show()

# %% [markdown]
# There is another way to see it. How wrong is the state about a pair? Take the loss
# $\frac12 \lVert M^\top k - v \rVert^2$. Its gradient with respect to $M$ is $k\,(M^\top k -
# v)^\top$. So the delta rule is one step of gradient descent, and $\beta$ is its learning rate. The
# state is a small model that is *trained while the text is read*.


# %%
def wrong(M):
    return 0.5 * jnp.sum((M.T @ key - new) ** 2)


# %%
M = rng.standard_normal((WIDTH, WIDTH)).astype("float32")
by_gradient = M - 0.3 * jax.grad(wrong)(M)
same(M + 0.3 * np.outer(key, new - M.T @ key), by_gradient)

# %%
tried["delta rule"] = score(moved(delta=True))
for name, (share, distance) in tried.items():
    print(f"{name:>10}: {share:>4.0%} right, distance {distance:.2f}")
assert tried["delta rule"] == (1.0, 0.0)

# %% [markdown]
# All right, and no distance at all. Is the delta rule then better at everything? Take the first
# test again, with all 64 names and no changes, and look at how long ago a name was written.

# %%
rules = {"a sum": {}, "decay 0.9": {"log_decay": fading(0.9)}, "delta rule": {"delta": True}}
fig, ax = plt.subplots(figsize=(5.5, 2.6), layout="constrained")
for name, rule in rules.items():
    share = (recalled(T, **rule) == piers).mean(0)  # T
    ax.plot(np.arange(T)[::-1], np.convolve(share, np.ones(5) / 5, "same"), label=name)
    rules[name] = share
ax.set(xlabel="names ago", ylabel="right answers", xlim=(60, 2), ylim=(0, 1.05))
ax.set_title("Decay and the delta rule recall what is near")
ax.legend()
plt.show()

# %%
for name, share in rules.items():
    print(f"{name:>10}: {share.mean():.0%} of all, {share[-8:].mean():.0%} of the last eight")
assert rules["delta rule"][-1] == 1 and rules["delta rule"].mean() < rules["a sum"].mean()

# %% [markdown]
# A state of 16 rows cannot hold 64 names, and no rule changes that. What a rule decides is *which*
# names it loses. The sum knows all of them a little. The delta rule knows the newest for certain,
# and pays with the old ones. That is why models with a state keep some layers with a softmax.
#
# > **Try it.** Set `beta` to 2, with `moved(delta=True, beta=np.full((TEXTS, T, 1), 2.0,
# > "float32"))`. What does a state answer after it has read the same message twice?
#
# <details><summary>Answer</summary>
#
# ```python
# M = np.random.default_rng(1).standard_normal((WIDTH, WIDTH))
# says = [M.T @ key]
# for _ in range(2):
#     M = M + 2 * np.outer(key, new - M.T @ key)
#     says.append(M.T @ key)
# same(says[1], 2 * new - says[0])
# same(says[2], says[0])
# share, distance = score(moved(delta=True, beta=np.full((TEXTS, T, 1), 2.0, "float32")))
# print(f"{share:.0%} right, distance {distance:.2f}")
# assert share < 0.5
# ```
#
# What it answered before it read the message. The first time it says $2v - M^\top k$: it goes as
# far beyond the new value as it was away from it before. The second time it comes back by the same
# amount. That is gradient descent with a learning rate so large that it never arrives. Of the names
# that move, 35 % are right.
#
# </details>
#
# ## Both together: Qwen3-Next
#
# Decay clears the whole state, and the delta rule corrects one key. The **gated delta rule** has
# both ([Yang and others](https://arxiv.org/abs/2412.06464), 2024), and each token chooses its own
# $a$ and $\beta$. Three layers of four in Qwen3-Next are made of it. The published layer has a few
# more parts:

# %%
boxes = {
    "token x": (0, 0, "lightsteelblue"),
    "convolution\nof 4 tokens": (1.9, 0.7, "navajowhite"),
    "q, k, v": (3.6, 0.7, "navajowhite"),
    "decay a,\nstrength β": (1.9, -0.1, "navajowhite"),
    "state M": (5.2, 0.3, "palegreen"),
    "norm": (6.5, 0.3, "navajowhite"),
    "times gate": (7.9, 0.3, "navajowhite"),
    "gate": (1.9, -1.0, "navajowhite"),
}
x_, conv_, qkv_, ab_, m_, norm_, times_, gate_ = boxes
joins = [(x_, conv_), (conv_, qkv_), (x_, ab_), (qkv_, m_), (ab_, m_), (m_, norm_)]
joins += [(norm_, times_), (gate_, times_), (x_, gate_)]
diagram(boxes, joins, size=(8.8, 2.5), title="The gated delta layer, before its output matrix")

# %% [markdown]
# * The *convolution* mixes each number of q, k and v with those of the three tokens before.
# * Queries and keys are scaled to length one, as the delta rule likes them.
# * The result of reading is normalised, and multiplied by a *gate* that the token computes.
#
# Is our layer the one that was published? The class in the library *transformers* fuses several
# matrices into one, so we need rules that say where their rows go, as [chapter
# 7](07_port_a_real_model.ipynb) explains. Without transformers the case is compared with what the
# class gave when it was recorded.

# %%
from flax_attn.parity import Rule

PUBLISHED = "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet"
SIZES = {"in_features": 18, "num_heads": 6, "key_dim": 4, "value_dim": 5}
SIZES |= {"num_key_heads": 3, "conv_size": 3}  # two heads of values share each head of keys
fused, heads_first = "in_proj_qkvz.weight -> {q,k,v,g}_proj.kernel", "(g n o) i -> n i (g o)"
RULES = (
    Rule(fused, heads_first, o=(4, 4, 10, 10)),
    Rule("in_proj_ba.weight -> {b,a}_proj.kernel", heads_first, o=(2, 2)),
    Rule("norm.weight -> o_norm.scale"),
    Rule("out_proj -> o_proj"),
)


# %%
def their_sizes():
    from transformers import Qwen3NextConfig

    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    heads = {"linear_num_value_heads": 6, "linear_num_key_heads": 3}
    widths = {"linear_key_head_dim": 4, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3}
    return {"config": Qwen3NextConfig(hidden_size=18, **kinds, **heads, **widths), "layer_idx": 0}


# %%
from climb import HAS_TRANSFORMERS, quiet_transformers

from flax_attn import GatedDeltaAttention
from flax_attn.parity import Case

if HAS_TRANSFORMERS:
    quiet_transformers()

proof = Case(
    GatedDeltaAttention,
    SIZES,
    reference=PUBLISHED,
    reference_config=their_sizes,
    torch_call=lambda module, x: module(x),
    rules=RULES,
    dtypes=("float64",),
    x=(2, 70, 18),
)
report = proof.report(eager=False)
assert report.ok, report
print("\n".join(str(report).splitlines()[:2]))

# %% [markdown]
# ## Documents in one row
#
# Texts for training have all lengths. To waste nothing one packs several into one row, back to
# back. With attention a mask keeps them apart. A state has no mask. It has to be *emptied* where a
# new document begins, and the convolution must not look back across the border either. For this the
# layer takes `segments`, an id for each token.

# %%
model = GatedDeltaAttention(**SIZES, rngs=nnx.Rngs(0))
run = nnx.jit(lambda model, x, **given: model(x, **given))
documents = jax.random.normal(jax.random.key(0), (13, 18))  # T D: of 5, 3 and 5 tokens
ids = jnp.array([0] * 5 + [1] * 3 + [2] * 5)
packed = run(model, documents, segments=ids)
alone = [run(model, documents[ids == n]) for n in range(3)]
same(packed, jnp.concatenate(alone))

# %% [markdown]
# Without the ids it would not be so: a document would go on where the one before it ended.

# %%
gap = np.abs(run(model, documents) - packed).max(-1)  # T
print("largest difference in each document:", *(f"{gap[ids == n].max():.1e}" for n in range(3)))
assert gap[:5].max() == 0 and gap[5:8].max() > 1e-3

# %% [markdown]
# And what about training? The gradient must not cross a border either, or a document would be
# changed by the loss of its neighbour. We take the derivative of each output token (the sum of its
# numbers) by each input token, and draw its size. The blocks are the documents, and inside them is
# the causal triangle.


# %%
@nnx.jit
def influence(model, x, ids):
    slopes = jax.jacrev(lambda x: model(x, segments=ids).sum(-1))(x)  # T T D
    return jnp.sqrt((slopes**2).sum(-1))  # T T


# %%
maps = [np.asarray(influence(model, documents, s)) for s in (jnp.zeros_like(ids), ids)]
fig, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
for ax, table, title in zip(axes, maps, ("no ids", "segments=ids"), strict=True):
    ax.imshow(np.where(table > 0, np.log10(table + 1e-12), np.nan), cmap="Blues", vmin=-3, vmax=1)
    ax.set(title=title, xlabel="input token", ylabel="output token", xticks=range(0, 13, 2))
plt.show()

# %%
apart = np.asarray(ids)[:, None] != np.asarray(ids)
print("across a border:", maps[1][apart].max(), "with ids,", f"{maps[0][apart].max():.1e} without")
assert maps[1][apart].max() == 0 and maps[0][apart].max() > 1e-3

# %% [markdown]
# ### Padding
#
# The other way to make texts equally long is padding. `valid` says which tokens are there. The
# others change nothing, wherever they stand and whatever they hold: here they hold NaN, the mark
# for *not a number*, which would spoil every sum that it enters.

# %%
valid = np.array([0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0], bool)
holes = jnp.where(valid[:, None], documents, jnp.nan)
with_holes = run(model, holes, valid=jnp.asarray(valid))
same(with_holes[valid], run(model, documents[valid]))
assert not with_holes[~valid].any()

# %% [markdown]
# ## Decoding with a state
#
# Such a layer takes the place of attention in the model of chapter 10 as it stands: `init_cache`
# makes an empty cache, and a call with `cache=` returns the output and the new cache. Only that it
# is no list of keys. It is a `State`, with the matrices M and the last tokens for the convolution.

# %%
cache = model.init_cache((), length=13)  # () means: no batch axes
y, cache = run(model, documents[:5], cache=cache)  # the prompt
pieces = [y]
for t in range(5, 13):
    y, cache = run(model, documents[t : t + 1], cache=cache)  # token by token
    pieces.append(y)
same(jnp.concatenate(pieces), run(model, documents))

# %%
print("M:", cache.recurrent.shape, "convolution:", cache.convolution.shape)
size = sum(array.size for array in (cache.recurrent, cache.convolution))
assert size == 6 * 4 * 5 + 2 * 54 and int(cache.length) == 13

# %% [markdown]
# These sizes are the same after five tokens and after a million. How large are they in the
# published model? In Qwen3-Next a layer of this kind has 32 heads of values and 16 of keys, all 128
# wide, and a convolution of four tokens. A layer with a softmax has two key heads of width 256. Of
# its 48 layers 36 are of the first kind, and 12 of the second.

# %%
in_state = 32 * 128 * 128 + 3 * (2 * 16 + 32) * 128  # numbers, however long the text
per_token = 2 * 2 * 256  # numbers a token, a key and a value in two heads
tokens = 2 ** np.arange(7, 19)
print(f"a state: {in_state:,} numbers, as many as a cache of {in_state / per_token:.0f} tokens")
assert in_state == 548_864 and in_state / per_token == 536

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.8), layout="constrained")
ax.loglog(tokens, 48 * per_token * tokens, "o-", label="48 layers with a cache", markersize=4)
both = 36 * in_state + 12 * per_token * tokens
ax.loglog(tokens, both, "o-", label="36 with a state, 12 with a cache", markersize=4)
ax.axhline(48 * in_state, color="C2", label="48 with a state")
ax.set_xticks([128, 1024, 8192, 65_536], ["128", "1,024", "8,192", "65,536"])
ax.minorticks_off()
ax.set(xlabel="tokens", ylabel="numbers kept")
ax.set_title("A state in most layers keeps most of the memory free")
ax.legend()
plt.show()

# %% [markdown]
# The twelve layers with a softmax can find any token of the text, and the others are cheap. For a
# long text the model keeps a quarter of what it would keep with attention alone.

# %%
share = 48 * per_token * tokens[-1] / both[-1]
print(f"at {tokens[-1]:,} tokens: {share:.2f} times less")
assert 3.9 < share < 4

# %% [markdown]
# ## In a nutshell
#
# | word | meaning | in the library |
# | --- | --- | --- |
# | linear attention | $\phi(q) \cdot \phi(k)$ in place of $e^{q \cdot k}$ | `LinearAttention` |
# | state | the sum of all $k v^\top$ so far: the past, in one matrix | `layer.step(x, state)` |
# | decay | the past fades by a factor at each token | `log_decay=` |
# | delta rule | write what the state lacks, and no more | `delta=True` |
# | gated delta rule | both, chosen by each token | `GatedDeltaAttention` |
# | packed documents | several texts in a row, apart from each other | `segments=` |
#
# ## Exercises
#
# **1.** Two machines read a half of a text each, beginning with an empty state. How do you get the
# state of the whole text from the two, for a sum, and for a sum with decay? Why does it not work
# for the delta rule?
#
# <details><summary>Answer</summary>
#
# Sums are added. With decay the first state fades once more, by all factors of the second half.
#
# ```python
# halves = [(names[:, part], names[:, part], values[:, part]) for part in (slice(32), slice(32, T))]
# (_, first), (_, second) = (linear_recurrence(*half) for half in halves)
# _, whole = linear_recurrence(names, names, values)
# same(first + second, whole)
# factors = fading(0.9)[:, :32]
# (_, first), (_, second) = (linear_recurrence(*half, log_decay=factors) for half in halves)
# _, whole = linear_recurrence(names, names, values, log_decay=fading(0.9))
# same(0.9**32 * first + second, whole)
# ```
#
# With the delta rule the second half *reads* the state before it writes, and the second machine
# does not have it. But reading and writing are linear: the second half turns $M$ into $A M + B$,
# with matrices $A$ and $B$ that do not depend on $M$. So a machine can compute $A$ and $B$ without
# knowing $M$. The library's chunks work in this way.
#
# </details>
#
# **2.** Do what `segments` does without it: empty the state where a document begins, by
# `log_decay`. Take `names` and `values` as three documents of 20, 20 and 24 tokens.
#
# <details><summary>Answer</summary>
#
# A factor of zero empties the state, and its logarithm is minus infinity. The first document goes
# on from what was there before, here from nothing.
#
# ```python
# ids3 = np.broadcast_to(np.repeat([0, 1, 2], (20, 20, 24)), (TEXTS, T))
# emptied = np.zeros((TEXTS, T, 1), "float32")  # the logarithm of 1: nothing fades
# emptied[:, [20, 40]] = -np.inf
# by_decay, _ = linear_recurrence(names, names, values, log_decay=emptied)
# by_ids, _ = linear_recurrence(names, names, values, segments=ids3)
# same(by_decay, by_ids)
# ```
#
# </details>
#
# **To read:** Katharopoulos and others,
# [Transformers are RNNs](https://arxiv.org/abs/2006.16236); Schlag and others,
# [Linear Transformers Are Secretly Fast Weight Programmers](https://arxiv.org/abs/2102.11174),
# who brought the delta rule to attention; Arora and others,
# [Zoology](https://arxiv.org/abs/2312.04927), for more on recall; Yang and others,
# [Gated Delta Networks](https://arxiv.org/abs/2412.06464).
#
# Next: [12. Many devices](12_many_devices.ipynb), in which one text lies on eight devices.
