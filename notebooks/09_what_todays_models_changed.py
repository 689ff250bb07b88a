# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 9. What today's models changed
#
# *17 minutes to read, 1 minute to run on a quiet machine with two cores.*
# [Shared keys](#Shared-keys) ·
# [Is it the published layer?](#Is-it-the-published-layer?) ·
# [Norms](#Norms-for-queries-and-keys) ·
# [Windows](#Windows) ·
# [Sinks](#Sinks) ·
# [Softcap](#A-soft-cap) ·
# [Latent](#One-latent-for-all-heads) ·
# [Exercises](#Exercises)
#
# The attention of [chapter 4](04_many_heads.ipynb) is from 2017. The models of today still have its
# formula, and each of them changes one or two of its parts.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
from flax_attn import CAUSAL, Softcap, Window, attention_weights

words = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64]]
words += [[0.22, 0.58, 0.33], [0.77, 0.25, 0.10], [0.05, 0.80, 0.55]]
y = 2 * jnp.array(words)[:, None]  # T N H, with one head
changed = {
    "2017: all of the past": {},
    "a window of three": {"mask": CAUSAL & Window(2, 0)},
    "a soft cap of 2": {"score": Softcap(2.0)},
    "a sink takes its share": {"sinks": jnp.array([2.0])},
}
fig, axes = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained")
for ax, (title, change) in zip(axes, changed.items(), strict=True):
    table = attention_weights(y, y, **{"mask": CAUSAL, **change})[0]  # T T
    ax.imshow(table, cmap="Blues", vmin=0, vmax=1)
    for (t, j), weight in np.ndenumerate(table):
        color = "white" if weight > 0.6 else "black"
        ax.text(j, t, f"{weight:.2f}", ha="center", va="center", fontsize=8, color=color)
    ax.set(title=title, xlabel="key", ylabel="query")
plt.show()

# %% [markdown]
# The picture shows the weights of the six words of [chapter 1](01_attention_without_weights.ipynb),
# unchanged and with three of the changes. This chapter takes six published models and shows each
# change three times: as a picture, as a line of code, and as a proof that our layer equals the
# class that the model was published with. The code of the proof comes after the first of them.
#
# | change | a model that has it | what it is good for |
# | --- | --- | --- |
# | several query heads share one key head | Llama 3 | less memory while writing |
# | queries and keys are normalised | Qwen3 | stable training |
# | a token sees the last few tokens only | Mistral 7B v0.1 | time and memory for long texts |
# | a learned number joins the softmax | gpt-oss | a head may look at nothing |
# | scores are bounded | Gemma 2 | stable training |
# | keys and values come from one small vector | DeepSeek-V3 | far less memory while writing |
#
# All six rotate queries and keys by their [positions](positions.ipynb), so there is nothing new to
# say about that.
#
# `climb`, the small file beside these notebooks, draws tables (`heat`) and boxes (`diagram`), and
# compares two arrays (`same`). `quiet_transformers` imports the library transformers without its
# warnings.

# %%
from climb import HAS_TRANSFORMERS, diagram, heat, quiet_transformers, same

# %% [markdown]
# ## Shared keys
#
# A model writes one token after the other, and keeps the keys and values of all earlier tokens in
# memory. For long texts this memory becomes larger than the weights. So Llama 3 has fewer **key
# heads** than query heads: each key head, with its values, serves a group of query heads. This is
# *grouped-query attention* ([Ainslie and others](https://arxiv.org/abs/2305.13245), 2023). With
# K = N it is chapter 4, and with K = 1 it is called *multi-query* attention.

# %%
queries = {f"query {n}": (1.1 * n, 0.9, "lightsteelblue") for n in range(6)}
keys = {f"key, value {n}": (1.1 * (2 * n + 0.5), 0, "navajowhite") for n in range(3)}
arrows = [(f"query {n}", f"key, value {n // 2}") for n in range(6)]
diagram({**queries, **keys}, arrows, size=(8.4, 1.7), title="N = 6 query heads, K = 3 key heads")

# %% [markdown]
# In numbers: query head $n$ reads key head $\lfloor n K / N \rfloor$. The result is the same as if
# each key head were *repeated*, but `attend` does not make the copies.

# %%
from flax_attn import attend

q = jax.random.normal(jax.random.key(0), (7, 6, 8))  # T N H
k, v = jax.random.normal(jax.random.key(1), (2, 7, 3, 8))  # S K H each
shared = attend(q, k, v, mask=CAUSAL)
repeated = attend(q, jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1), mask=CAUSAL)
same(shared, repeated)

# %% [markdown]
# How much is it worth? Count the numbers that a model keeps for each token of the text: a key and a
# value, in every key head of every layer. These are the sizes in the published files.


# %%
def kept(layers, key_heads, width):
    return 2 * layers * key_heads * width


# %%
numbers = {
    "Llama 2, 7B (K = N = 32)": kept(32, 32, 128),
    "Llama 3, 8B (K = 8)": kept(32, 8, 128),
}
for name, count in numbers.items():
    print(
        f"{name}: {count:>8,} numbers a token, {2 * count * 2**17 / 2**30:.0f} GiB at 128K tokens"
    )
assert numbers["Llama 2, 7B (K = N = 32)"] == 4 * numbers["Llama 3, 8B (K = 8)"]

# %% [markdown]
# (A number takes two bytes, and 128K tokens are 131,072.) The weights of the 8B model take 16 GB.

# %% [markdown]
# ## Is it the published layer?
#
# So much for the idea. Is it what Llama 3 does? Every published model comes with a file
# `config.json`, which lists its sizes and settings. The library *transformers* reads it and builds
# the model in PyTorch. `families.attention` reads the same file and builds our layer. If both are
# right, they are the same function.
#
# These are the sizes that our six models have in common. They are tiny, and all different, so that
# no two axes can be confused.

# %%
SIZES = {
    "hidden_size": 48,  # D, the width of a token
    "num_attention_heads": 6,  # N query heads
    "num_key_value_heads": 3,  # K key heads
    "head_dim": 10,  # H
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},  # the rotation
}
OUTSIDE = {"intermediate_size": 9, "vocab_size": 5, "max_position_embeddings": 64}
OUTSIDE |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
words = np.random.RandomState(0).standard_normal((2, 7, 48))  # B T D

# %% [markdown]
# In transformers the model computes the rotation and the mask once and hands both to the attention
# of each layer. So `published` returns two things: the attention, and a function that calls it as
# the model would. The mask is *additive*: 0 where a token may look, and the most negative number
# where it may not.


# %%
if HAS_TRANSFORMERS:
    import torch

    transformers = quiet_transformers()


def published(config, window=None):
    """The first layer's attention in transformers, and how its model calls it."""
    settings = transformers.AutoConfig.for_model(**config, **OUTSIDE)
    model = transformers.AutoModel.from_config(settings, attn_implementation="eager")

    def called(attention, x):
        at = torch.arange(x.shape[1])
        back = at[:, None] - at  # how far back each key lies
        hidden = (back < 0) | (back >= (window or len(at)))
        lowest = torch.finfo(x.dtype).min
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, lowest)
        angles = type(model.rotary_emb)(settings)(x, at[None])
        return attention(x, position_embeddings=angles, attention_mask=mask[None, None])[0]

    return model.layers[0].self_attn, called


# %% [markdown]
# `compare` is the comparison of chapter 7: it draws random weights, gives them to both, and then
# compares outputs, intermediate values and all gradients in float64. Where transformers is not
# installed, `proof` only builds our layer and checks its shape.


# %%
from flax_attn import families
from flax_attn.parity import compare


def proof(config, window=None):
    """Our layer for a config, after it was found equal to the published class."""
    layer = families.attention(config, 0, rngs=nnx.Rngs(0))
    assert layer(jnp.asarray(words, jnp.float32)).shape == words.shape
    if not HAS_TRANSFORMERS:
        print(f"{config['model_type']}: not compared, since transformers is not installed")
        return layer
    theirs, called = published(config, window)
    once = {"dtypes": ("float64",), "eager": False, "rules": families.rules(config, 0)}
    report = compare(theirs, layer, words, torch_call=called, **once)
    assert report.ok, report
    print("\n".join(str(report).splitlines()[:2]))
    return layer


# %%
from flax_attn import GroupedQueryAttention

llama = proof({"model_type": "llama", **SIZES})
assert isinstance(llama, GroupedQueryAttention)

# %% [markdown]
# ## Norms for queries and keys
#
# A score is the product of a query and a key, so it grows with the *square* of their size. If they
# grow during training, the softmax becomes a choice of one key, and its gradient almost vanishes.
# Qwen3 divides each query and each key by its own size first, and then multiplies it by learned
# factors $g$, one for each of its H numbers:
#
# $$\mathrm{norm}(q) = g \odot \frac{q}{\sqrt{\mathrm{mean}(q^2) + \varepsilon}}.$$
#
# This is *RMSNorm* (root mean square). It is the norm of [chapter 6](06_train_a_small_gpt.ipynb)
# without subtracting the mean.

# %%
from flax_attn import RMSNorm

norm = RMSNorm(8, eps=1e-6)  # g starts as ones
same(norm(q), q / jnp.sqrt((q**2).mean(-1, keepdims=True) + 1e-6))

# %% [markdown]
# Let the same queries and keys grow, and look at the largest weight of each row. Without the norm
# it goes to 1: the head looks at one token. With the norm nothing changes.

# %%
sizes = 2.0 ** np.arange(5)
one_key = jnp.repeat(k, 2, axis=1)
largest = {
    "as they are": [attention_weights(s * q, s * one_key).max(-1).mean() for s in sizes],
    "normalised": [attention_weights(norm(s * q), norm(s * one_key)).max(-1).mean() for s in sizes],
}
assert largest["as they are"][-1] > 0.9
np.testing.assert_allclose(largest["normalised"], largest["normalised"][0], rtol=1e-3)

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.6), layout="constrained")
for name, found in largest.items():
    ax.semilogx(sizes, found, "o-", base=2, label=name)
ax.set_xticks(sizes, [f"{s:.0f}x" for s in sizes])
ax.set(xlabel="size of queries and keys", ylabel="largest weight of a row", ylim=(0, 1.05))
ax.set_title("Large queries and keys sharpen the weights, unless normalised")
ax.legend(loc="center right")
plt.show()

# %%
qwen = proof({"model_type": "qwen3", **SIZES})
assert isinstance(qwen.q_norm, RMSNorm) and llama.q_norm is None

# %% [markdown]
# The order matters: Qwen3 normalises *before* it rotates. `GroupedQueryAttention` takes a norm for
# each, and `norm_after_rotary=True` turns the order round.
#
# > **Try it.** Set `sizes` to numbers below 1. Why does the first line fall to a certain value and
# > no further? Which value is it?
#
# <details><summary>Answer</summary>
#
# ```python
# sizes = 2.0 ** -np.arange(5)
# falls = [float(attention_weights(s * q, s * one_key).max(-1).mean()) for s in sizes]
# print(np.array(falls))
# assert 1 / 7 < falls[-1] < 1.02 / 7
# ```
#
# It falls to 1/7 = 0.143. As queries and keys go to zero, all scores go to zero, and the softmax
# gives each of the seven keys the same weight. The largest of seven weights that add up to one
# cannot be smaller.
#
# </details>
#
# ## Windows
#
# In a long text most of what matters is near. Mistral 7B lets each token see only the last W
# tokens, itself included (in its version 0.1; from 0.2 on it has no window). In the library a
# window says how many tokens a query sees to its left and to its right, besides its own, and `&`
# joins two masks.

# %%
mask = CAUSAL & Window(2, 0)  # W = 3: two to the left, none to the right, and its own
causal, weights = (attention_weights(q[:, :1], k[:, :1], mask=m)[0] for m in (CAUSAL, mask))  # T S

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
at = [str(t) for t in range(7)]
heat(axes[0], causal, "causal", rows=at, columns=at)
heat(axes[1], weights, "a window of 3", rows=at, columns=at)
plt.show()

# %% [markdown]
# Each row still adds up to one, and now a row has at most three weights.

# %%
assert int((weights > 0).sum(-1).max()) == 3
same(weights.sum(-1), jnp.ones(7))

# %% [markdown]
# Is everything farther back lost? No, since layers are stacked. A token of the second layer sees
# three tokens of the first, and the earliest of them saw two more. With $L$ layers a token is
# reached by $L(W - 1) + 1$ tokens. We count: which inputs reach the last of 12 tokens?

# %%
t = np.arange(12)
sees = (t[:, None] >= t) & (t[:, None] - t < 3)  # one layer: T S
reached = [np.linalg.matrix_power(sees.astype(int), layers)[-1] > 0 for layers in range(1, 6)]
for layers, row in enumerate(reached, 1):
    print("layers:", layers, "".join("#" if seen else "." for seen in row))
    assert row.sum() == min(12, layers * 2 + 1)

# %%
mistral = proof({"model_type": "mistral", **SIZES, "sliding_window": 3}, window=3)
config = {"model_type": "mistral", **SIZES, "sliding_window": None}  # as from v0.2 on
later = families.attention(config, 0, rngs=nnx.Rngs(0))
print("v0.1:", mistral.mask)
print("later:", later.mask)

# %% [markdown]
# Gemma 2 and gpt-oss, which follow, have a window in every second layer and see everything in the
# others. `families.attention(config, index)` therefore asks which layer it is to build.
#
# ## Sinks
#
# The weights of a row add up to one. A head that finds nothing of interest must put its weight
# somewhere all the same, and trained models put it on the first token, whatever it says. That token
# is called an *attention sink* ([Xiao and others](https://arxiv.org/abs/2309.17453), 2023).
#
# gpt-oss gives each head a learned number $b$ for this. It joins the softmax as one more score,
# but it has no value:
#
# $$w_{ts} = \frac{e^{s_{ts}}}{e^{b} + \sum_j e^{s_{tj}}}.$$
#
# Small numbers first. A row of three scores, without a sink and with one:

# %%
s = jnp.array([1.0, 0.5, 0.0])
for b in (-jnp.inf, 0.0, 3.0):
    w = jax.nn.softmax(jnp.append(s, b))[:3]
    print(f"b = {b:>4}: weights {w}, sum {w.sum():.2f}")

# %%
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.0), sharey=True, layout="constrained")
for ax, sink in zip(axes, (-jnp.inf, 0.0, 3.0), strict=True):
    w = jax.nn.softmax(jnp.append(s, sink))
    ax.bar(["key 0", "key 1", "key 2", "sink"], w, color=["C0", "C0", "C0", "0.8"])
    ax.set_title(f"b = {sink}".replace("-inf", r"$-\infty$"))
axes[0].set_ylabel("weight")
plt.show()

# %% [markdown]
# With a large $b$ the head is almost silent: nearly all weight is on the sink, which adds nothing
# to the output. In `attend` there is one sink for each query head.

# %%
b = jnp.linspace(-2.0, 4.0, 6)  # N
by_hand = []
for n in range(6):
    scores = q[:, n] @ k[:, n // 2].T / 8**0.5  # T S
    scores = jnp.where(jnp.tril(jnp.ones((7, 7), bool)), scores, -jnp.inf)
    with_sink = jnp.hstack([scores, jnp.full((7, 1), b[n])])  # T S+1
    by_hand.append(jax.nn.softmax(with_sink)[:, :-1] @ v[:, n // 2])  # T H
same(attend(q, k, v, mask=CAUSAL, sinks=b), jnp.stack(by_hand, axis=1))

# %%
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
oss = proof({"model_type": "gpt_oss", **SIZES, **WINDOWS}, window=3)
assert oss.sinks[...].shape == (6,)

# %% [markdown]
# > **Try it.** Which $b$ makes the weights of the three scores add up to one half?
#
# <details><summary>Answer</summary>
#
# ```python
# b = jax.nn.logsumexp(s)
# same(b, 1.6803, within=1e-4)
# same(jax.nn.softmax(jnp.append(s, b))[:3].sum(), 0.5)
# ```
#
# The sink must be as heavy as the three scores together: $e^b = e^1 + e^{0.5} + e^0$. So $b$ is
# their log-sum-exp, 1.68.
#
# </details>
#
# ## A soft cap
#
# Gemma 2 bounds its scores instead. Each score $s$ becomes
#
# $$c \tanh(s / c),$$
#
# which is $s$ near zero and never leaves $-c \ldots c$. Gemma 2 has $c = 50$.

# %%
s = jnp.linspace(-150, 150, 301)
capped = Softcap(50.0)
fig, ax = plt.subplots(figsize=(5.5, 2.4), layout="constrained")
ax.plot(s, s, ":", color="gray", label="as it is")
ax.plot(s, 50 * jnp.tanh(s / 50), label="capped at 50")
ax.set(xlabel="score", ylabel="score, capped", ylim=(-100, 100))
ax.set_title("A soft cap bounds every score")
ax.legend()
plt.show()

# %% [markdown]
# In the library such a change of scores is an object that you give to `attend`. Scores can be
# chained by `>>`.

# %%
scores = jnp.einsum("tnh,snh->nts", q, one_key) / 8**0.5
w = jax.nn.softmax(2.0 * jnp.tanh(scores / 2.0), axis=-1)
same(attention_weights(q, one_key, score=Softcap(2.0)), w)

# %% [markdown]
# With a cap there is a largest weight, however large a score becomes. Of two keys, the better one
# gets at most $e^{2c}$ times the weight of the other.

# %%
far = jnp.array([[[1000.0]], [[-1000.0]]])  # S N H: one key far up, one far down
w = attention_weights(jnp.ones((1, 1, 1)), far, score=Softcap(2.0)).ravel()
print(w, "ratio", w[0] / w[1])
same(jnp.log(w[0] / w[1]), 4.0)

# %%
own = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9}
gemma = proof({"model_type": "gemma2", **SIZES, **WINDOWS, **own}, window=3)
print(gemma.rules.score, gemma.rules.scale)

# %% [markdown]
# `query_pre_attn_scalar` is one more setting of Gemma: the scores are divided by the root of this
# number, and not by the root of a head's width. If a port overlooks it, its shapes are still right.
#
# ## One latent for all heads
#
# DeepSeek goes further than sharing keys. For each token it keeps one small vector, the **latent**
# $c$, and makes the keys and values of all heads from it
# ([DeepSeek-V2](https://arxiv.org/abs/2405.04434), 2024). The latent is normalised before it is
# expanded, by the RMSNorm from above:
#
# $$c_s = \mathrm{norm}(W_c\, x_s), \qquad k_{s,n} = W_k^n c_s, \qquad v_{s,n} = W_v^n c_s.$$

# %%
latent_boxes = {
    "token x\nD": (0, 0, "lightsteelblue"),
    "latent c\nL": (1.8, 0.5, "palegreen"),
    "rotated key r\nH_r": (1.8, -0.7, "palegreen"),
    "keys of all heads\nN H": (4.2, 1.0, "navajowhite"),
    "values of all heads\nN h": (4.2, 0.2, "navajowhite"),
    "attention": (6.4, 0, "lightsteelblue"),
}
x_, c_, r_, k_, v_, a_ = latent_boxes
joins = [(x_, c_), (x_, r_), (c_, k_, "W_k"), (c_, v_, "W_v"), (k_, a_), (v_, a_), (r_, a_)]
diagram(latent_boxes, joins, size=(8.4, 2.5), title="Only the green ones are kept in memory")

# %% [markdown]
# Why is there a second key? The rotation depends on the position, so a rotated key cannot be made
# from $c$ alone. A small part of the key, $r$, is therefore rotated and kept beside the latent, one
# for all heads. Both parts add to the score.
#
# Now the fine point. The keys never need to be computed. The score of a query $q$ and a key
# $W_k c$ is
#
# $$q \cdot (W_k c) = (W_k^\top q) \cdot c,$$
#
# so one multiplies the *query* by $W_k^\top$, once, and then compares it with the latents as they
# are. All heads look at the same list, as in multi-query attention. This form is called
# **absorbed**.

# %%
random = np.random.RandomState(1)
W_k, query, latents = (random.standard_normal(shape) for shape in ((8, 5), (8,), (7, 5)))
print(latents @ W_k.T @ query)
print(latents @ (W_k.T @ query))
same(latents @ W_k.T @ query, latents @ (W_k.T @ query), within=1e-12)

# %% [markdown]
# The layer has both forms. With the same weights they are the same function.

# %%
from flax_attn import LatentAttention, Rotary

small = {"kv_rank": 9, "nope_dim": 7, "rotary_dim": 4, "value_dim": 5}
turn = Rotary(layout="interleaved")
expanded, absorbed = (
    LatentAttention(48, 6, **small, rotary=turn, absorbed=form, rngs=nnx.Rngs(0))
    for form in (False, True)
)
same(expanded(jnp.asarray(words)), absorbed(jnp.asarray(words)))

# %% [markdown]
# What a cache keeps is the latent after its norm, and beside it the rotated key:

# %%
made = expanded.kv_a_proj_with_mqa(jnp.asarray(words))[..., :9]  # B T L: W_c x, before the norm
latent = made / jnp.sqrt((made**2).mean(-1, keepdims=True) + 1e-6)
_, cache = expanded(jnp.asarray(words), cache=expanded.init_cache(2, length=7))
same(cache.keys[:, 0, :, :9], latent)

# %%
sizes = {"q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4}
sizes |= {"v_head_dim": 5, "head_dim": 4, "num_key_value_heads": 6}
deepseek = proof({"model_type": "deepseek_v3", **SIZES, **sizes})
assert isinstance(deepseek, LatentAttention)

# %% [markdown]
# DeepSeek-V3 has 61 layers, 128 heads with keys of width 128 + 64 and values of width 128, a latent
# of 512 numbers, and a rotated key of 64. What would it keep for a token if it kept the keys and
# values of all heads? And what does it keep?

# %%
numbers["DeepSeek-V3 if it kept all heads"] = 61 * 128 * (128 + 64 + 128)
numbers["DeepSeek-V3 (latent)"] = 61 * (512 + 64)
fig, ax = plt.subplots(figsize=(7.5, 2.2), layout="constrained")
bars = ax.barh(list(numbers), list(numbers.values()), color=["C0", "C0", "0.8", "C0"])
ax.bar_label(bars, [f"{count:,}" for count in numbers.values()], padding=3)
ax.set(xscale="log", xlim=(1e4, 1.5e7), xlabel="numbers kept for each token")
ax.set_title("Shared heads and latents keep less")
ax.invert_yaxis()
plt.show()

# %%
share = numbers["DeepSeek-V3 if it kept all heads"] / numbers["DeepSeek-V3 (latent)"]
print(f"one part in {share:.0f}")
assert 71 < share < 72

# %% [markdown]
# The largest of these models keeps the least.
#
# > **Try it.** Give `LatentAttention` a `kv_rank` of 30. How do the numbers kept compare with those
# > of six heads that keep their own keys and values?
#
# <details><summary>Answer</summary>
#
# ```python
# stored = {}
# for rank in (9, 30):
#     options = {**small, "kv_rank": rank}
#     wider = LatentAttention(48, 6, **options, rotary=turn, rngs=nnx.Rngs(0))
#     stored[rank] = wider.init_cache((), length=1).keys.size  # for one token
#     assert stored[rank] == rank + small["rotary_dim"]
# all_heads = 6 * (small["nope_dim"] + small["rotary_dim"] + small["value_dim"])
# print(stored, all_heads)
# assert stored == {9: 13, 30: 34} and all_heads == 96
# ```
#
# A token has 30 + 4 = 34 numbers: the latent, and the rotated key that all heads share. Six heads
# with keys of 7 + 4 numbers and values of 5 would keep $6 \cdot 16 = 96$. So it is about a third,
# where a rank of 9 keeps 13, less than a seventh.
#
# </details>
#
# ## In a nutshell
#
# | word | meaning | in the library |
# | --- | --- | --- |
# | grouped queries | N query heads share K key heads | `GroupedQueryAttention(D, N, K, H)` |
# | query and key norm | each divided by its size | `q_norm=RMSNorm(H)` |
# | window | only the last W tokens | `CAUSAL & Window(W - 1, 0)` |
# | sink | one more score, without a value | `sinks=True`, `attend(..., sinks=b)` |
# | soft cap | scores stay between -c and c | `Softcap(c)` |
# | latent | keys and values from one small vector | `LatentAttention` |
#
# ## Exercises
#
# **1.** Write a sink without the argument `sinks`: give `attend` one more key and one more value
# that have the same effect. Take one head and no mask.
#
# <details><summary>Answer</summary>
#
# The key must give the score $b$ to every query, and its value is zero. One way is to make queries
# and keys one number wider: every query gets a 1 there, real keys a 0, and the new key $b$, in
# place of zeros everywhere else. The scale has to stay that of the old width.
#
# ```python
# one = q[:, :1], k[:, :1], v[:, :1]
# wide_q = jnp.concatenate([one[0], jnp.ones((7, 1, 1))], axis=-1)  # T 1 H+1
# wide_k = jnp.pad(one[1], [(0, 1), (0, 0), (0, 1)]).at[-1, 0, -1].set(3.0 * 8**0.5)
# wide_v = jnp.pad(one[2], [(0, 1), (0, 0), (0, 0)])
# got = attend(wide_q, wide_k, wide_v, scale=8**-0.5)
# same(got, attend(*one, sinks=jnp.array([3.0])))
# ```
#
# </details>
#
# **2.** Turn a layer with shared keys into one without: build a `GroupedQueryAttention` with K = 6
# that gives the same output as `llama`. Where do the columns of the old matrices go?
#
# <details><summary>Answer</summary>
#
# ```python
# wide = GroupedQueryAttention(48, 6, 6, 10, rotary=llama.rotary, rngs=nnx.Rngs(1))
# for name in ("q_proj", "o_proj"):
#     getattr(wide, name).kernel[...] = getattr(llama, name).kernel[...]
# for name in ("k_proj", "v_proj"):
#     columns = getattr(llama, name).kernel[...].reshape(48, 3, 10)  # D K H
#     getattr(wide, name).kernel[...] = jnp.repeat(columns, 2, axis=1).reshape(48, 60)
# inputs = jnp.asarray(words, jnp.float32)
# same(wide(inputs), llama(inputs))
# ```
#
# Each head's columns are there twice, side by side. The other direction is how models were
# converted in practice: take the mean of each group's columns, and train a little more.
#
# </details>
#
# **To read:** the technical reports of [Qwen3](https://arxiv.org/abs/2505.09388),
# [Mistral 7B](https://arxiv.org/abs/2310.06825), [gpt-oss](https://arxiv.org/abs/2508.10925),
# [Gemma 2](https://arxiv.org/abs/2408.00118) and [DeepSeek-V3](https://arxiv.org/abs/2412.19437);
# and [docs/models.md](../docs/models.md), for how to load the weights of a published model.
#
# Next: [10. Generate](10_generate.ipynb), where a small model writes token by token, and keeps what
# it has read.
