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
# In chapter 1 the embeddings alone decided who looks at whom. Now come three matrices that can be
# trained, and with them the formula that every transformer computes:
#
# $$Z = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V,
#   \qquad Q = X W_q, \quad K = X W_k, \quad V = X W_v$$
#
# At the end of this chapter you will
#
# * know what queries, keys and values are for, and have computed each by hand;
# * tell weight parameters from attention weights, and frozen parameters from trainable ones;
# * know why the scores are divided by $\sqrt d$: what it does to their variance and to gradients;
# * have carried the weights of one layer into another, and shown that both are the same function.

# %%
import importlib.util

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from flax_attn import SelfAttentionV1, SelfAttentionV2
from flax_attn.parity import Case, Rule, compare, plan, port

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch

    from torch_ref.self_attention_v1 import SelfAttentionV1 as OriginalV1
    from torch_ref.self_attention_v2 import SelfAttentionV2 as OriginalV2

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
# The sentence of chapter 1, six words of three numbers each.

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
)  # T d_in
JOURNEY, STEP = 1, 5

# %% [markdown]
# ## Why query, key and value?
#
# The names come from looking things up. In a dictionary you ask with a **query**, it is held
# against the **keys**, and you get the **value** of the key that fits:

# %%
pages = {"red": 10.0, "green": 50.0, "blue": 90.0}
print(pages["red"])

# %% [markdown]
# Attention is a dictionary that never says no. Query and keys are vectors; how well they fit is
# their dot product; and the answer is a mixture of *all* values, most of it from the keys that fit
# best. A sharper query brings it closer to the plain lookup, and a query of zeros gets the mean.

# %%
keys = jnp.eye(3)  # red, green, blue
values = jnp.array([10.0, 50.0, 90.0])
for sharpness in (0, 2, 20):
    query = sharpness * keys[0]  # asks for red
    print(f"sharpness {sharpness:2d}: {jax.nn.softmax(keys @ query) @ values:.4f}")

np.testing.assert_allclose(jax.nn.softmax(keys @ (20 * keys[0])) @ values, pages["red"], rtol=1e-5)

# %% [markdown]
# In chapter 1 one vector played all three parts. But what a word looks for, what it can be found by
# and what it has to tell are different things. So each word gets three vectors:
#
# | | it says | made by |
# | --- | --- | --- |
# | **query** $q_t$ | what I am looking for | $x_t W_q$ |
# | **key** $k_t$ | what I can be found by | $x_t W_k$ |
# | **value** $v_t$ | what I hand over when found | $x_t W_v$ |
#
# ## Three matrices
#
# $$W_q, W_k, W_v \in \mathbb{R}^{d_\text{in} \times d_\text{out}}, \qquad d_\text{in} = 3, \quad
#   d_\text{out} = 2$$
#
# The numbers are random to begin with. These are the ones that PyTorch draws from the seed 123, so
# that you can follow along with a book or a video that uses them.

# %%
W_query = jnp.array([[0.29611194, 0.5165623], [0.25167072, 0.6885568], [0.07397246, 0.86652195]])
W_key = jnp.array([[0.13657987, 0.10247904], [0.18405646, 0.72644675], [0.3152539, 0.68710667]])
W_value = jnp.array([[0.075635314, 0.19663817], [0.31641197, 0.40174013], [0.1185683, 0.8273954]])

if HAS_TORCH:
    torch.manual_seed(123)
    for W in (W_query, W_key, W_value):
        np.testing.assert_array_equal(W, torch.rand(3, 2).numpy())

# %% [markdown]
# Two things are called weights, and it pays to keep them apart.
#
# | | **weight parameters** | **attention weights** |
# | --- | --- | --- |
# | here | $W_q, W_k, W_v$ | $A = \operatorname{softmax}(\ldots)$ |
# | come from | training | the sentence at hand, anew each time |
# | shape | $(d_\text{in}, d_\text{out})$, whatever the sentence | $(T, T)$ |
# | rows add up to one | no | yes |
# | after training | fixed | as different as the sentences |
#
# ## Queries, keys, values: step by step
#
# *Journey* asks. Its query is its embedding times $W_q$, a product of shapes
# $(3) \cdot (3 \times 2) \rightarrow (2)$.

# %%
query_journey = x[JOURNEY] @ W_query  # d_out
print(query_journey)
np.testing.assert_allclose(np.round(query_journey, 4), [0.4306, 1.4551], rtol=1e-6)

# %% [markdown]
# To be found and mixed, every word needs a key and a value; and since every word will ask, all
# get a query too.

# %%
queries = x @ W_query  # T d_out
keys = x @ W_key  # T d_out
values = x @ W_value  # T d_out

np.testing.assert_allclose(queries[JOURNEY], query_journey, rtol=1e-6)
np.testing.assert_allclose(np.round(keys[JOURNEY], 4), [0.4433, 1.1419], rtol=1e-6)
np.testing.assert_allclose(np.round(values[JOURNEY], 4), [0.3951, 1.0037], rtol=1e-6)

# %%
fig, axes = plt.subplots(1, 4, figsize=(9, 3.2), width_ratios=(3, 2, 2, 2))
heat(axes[0], x, tokens, ["0", "1", "2"], "embeddings", top=1.5)
for ax, table, name in zip(
    axes[1:], (queries, keys, values), ("queries", "keys", "values"), strict=True
):
    heat(ax, table, tokens, ["0", "1"], name, top=1.5)
    ax.set_yticks([])
fig.tight_layout()
plt.show()

# %% [markdown]
# ## Scores
#
# How much does *step* matter to *journey*? Its key against the query of *journey*. And so for every
# word:
#
# $$\omega_s = q_\text{journey} \cdot k_s$$

# %%
scores_journey = keys @ query_journey  # T
print(scores_journey)
np.testing.assert_allclose(scores_journey[STEP], jnp.dot(query_journey, keys[STEP]), rtol=1e-6)
np.testing.assert_allclose(
    np.round(scores_journey, 4), [1.2705, 1.8524, 1.8111, 1.0795, 0.5577, 1.544], rtol=1e-6
)

# %% [markdown]
# ## Weights and context
#
# The scores are divided by $\sqrt{d_\text{out}}$, a step that has a section of its own below. Then
# come the softmax and the mixture, as before, except that now the *values* are mixed.
#
# $$\alpha = \operatorname{softmax}\!\left(\frac{\omega}{\sqrt{d_\text{out}}}\right), \qquad
#   z_\text{journey} = \sum_s \alpha_s v_s$$

# %%
d_out = keys.shape[-1]
weights_journey = jax.nn.softmax(scores_journey / d_out**0.5)  # T
context_journey = weights_journey @ values  # d_out

print("weights", weights_journey, "sum", weights_journey.sum())
print("context", context_journey)
np.testing.assert_allclose(
    np.round(weights_journey, 4), [0.15, 0.2264, 0.2199, 0.1311, 0.0906, 0.182], rtol=1e-6
)
np.testing.assert_allclose(np.round(context_journey, 4), [0.3061, 0.821], rtol=1e-6)

# %% [markdown]
# ## For all words at once
#
# The whole formula, one line a step.


# %%
def self_attention(x, W_query, W_key, W_value):
    """Scaled dot-product attention of a sentence with itself: its context vectors and weights."""
    queries, keys, values = x @ W_query, x @ W_key, x @ W_value  # T d_out
    scores = queries @ keys.T / keys.shape[-1] ** 0.5  # T T
    weights = jax.nn.softmax(scores, axis=-1)  # T T
    return weights @ values, weights  # T d_out


context, weights = self_attention(x, W_query, W_key, W_value)
print(context)

TABLE_V1 = [
    [0.2996, 0.8053],
    [0.3061, 0.8210],
    [0.3058, 0.8203],
    [0.2948, 0.7939],
    [0.2927, 0.7891],
    [0.2990, 0.8040],
]
np.testing.assert_allclose(np.round(context, 4), TABLE_V1, rtol=1e-6)
np.testing.assert_allclose(context[JOURNEY], context_journey, rtol=1e-6)

# %%
scores = queries @ keys.T  # T T
fig, axes = plt.subplots(1, 2, figsize=(8.8, 3.9))
heat(axes[0], scores, tokens, tokens, "scores: no longer symmetric")
heat(axes[1], weights, tokens, tokens, "attention weights", "Greens", top=0.3)
for ax in axes:
    ax.set(xlabel="key: looked at", ylabel="query: asks")
fig.tight_layout()
plt.show()
assert jnp.abs(scores - scores.T).max() > 0.1

# %% [markdown]
# *Journey* gives *step* 1.54, *step* gives *journey* 1.32: asking and being asked differ now. Still
# all weights are nearly the same. The parameters are random, and nothing has been learned.
#
# The parameters fit any sentence; the attention weights belong to one. Four words, in another
# order, give another table of another shape, from the same 18 numbers:

# %%
other = x[jnp.array([4, 5, 0, 1])]  # one step, Your journey
other_weights = self_attention(other, W_query, W_key, W_value)[1]
print(f"{W_query.size + W_key.size + W_value.size} parameters")
print(f"{weights.size} attention weights for six words, {other_weights.size} for four")
assert other_weights.shape == (4, 4)

# %% [markdown]
# ## Tokens do not communicate before q @ k
#
# The three projections treat each word by itself: the query of *journey* would be the same in any
# other sentence. Words meet for the first time in the product of queries and keys. You can see it
# in the derivatives. How strongly does row $t$ of a result depend on word $s$?
#
# $$\left\| \frac{\partial q_t}{\partial x_s} \right\| \qquad \text{and} \qquad
#   \left\| \frac{\partial z_t}{\partial x_s} \right\|$$


# %%
def dependence(function):
    """The norms of all derivatives of row t of a result by word s, `T T`."""
    jacobian = jax.jacobian(function)(x)  # T d_out T d_in
    return jnp.sqrt((jacobian**2).sum(axis=(1, 3)))


of_queries = dependence(lambda x: x @ W_query)
of_context = dependence(lambda x: self_attention(x, W_query, W_key, W_value)[0])

off_diagonal = ~np.eye(6, dtype=bool)
assert (of_queries[off_diagonal] == 0).all()  # exactly nothing
assert (of_context > 0).all()  # everything on everything

fig, axes = plt.subplots(1, 2, figsize=(8.8, 3.9))
heat(axes[0], of_queries, tokens, tokens, "query of each word", "Purples")
heat(axes[1], of_context, tokens, tokens, "context vector of each word", "Purples")
for ax in axes:
    ax.set(xlabel="depends on the embedding of", ylabel="row t")
fig.tight_layout()
plt.show()

# %% [markdown]
# The same holds for keys and values. All talking between the words of a transformer happens in
# attention.
#
# ## Why divide by $\sqrt d$?
#
# Softmax looks at differences, so the *size* of the scores decides how sharp its answer is. Take
# five numbers, and then eight times these numbers:

# %%
numbers = jnp.array([0.1, -0.2, 0.3, -0.2, 0.5])
soft, sharp = jax.nn.softmax(numbers), jax.nn.softmax(8 * numbers)
print(soft)
print(sharp)
np.testing.assert_allclose(np.round(soft, 4), [0.1925, 0.1426, 0.2351, 0.1426, 0.2872], rtol=1e-6)
np.testing.assert_allclose(np.round(sharp, 4), [0.0326, 0.003, 0.1615, 0.003, 0.8], rtol=1e-5)

fig, ax = plt.subplots(figsize=(5.4, 2.3))
ax.bar(np.arange(5) - 0.2, soft, 0.4, label="softmax of x")
ax.bar(np.arange(5) + 0.2, sharp, 0.4, label="softmax of 8x")
ax.set(xticks=range(5), ylabel="weight", title="The same order, another temper")
ax.set_xticklabels([f"x = {n:.1f}" for n in numbers])
ax.legend()
plt.show()

# %% [markdown]
# And scores do grow, with the width of queries and keys. Let all their numbers be independent, with
# mean 0 and variance 1. Each product $q_i k_i$ has mean 0 and variance 1 again, and variances of
# independent terms add up:
#
# $$\operatorname{Var}(q \cdot k) = \sum_{i=1}^{d} \operatorname{Var}(q_i k_i) = d, \qquad
#   \operatorname{Var}\!\left(\frac{q \cdot k}{\sqrt d}\right) = 1$$
#
# Not $d$ but $\sqrt d$ is the divisor, because a number that is divided by $c$ has its variance
# divided by $c^2$. Measured on 20,000 pairs for each width:

# %%
WIDTHS = (5, 20, 100, 1000)
variances = {}
for d in WIDTHS:
    q, k = jax.random.normal(jax.random.key(d), (2, 20_000, d))
    products = (q * k).sum(axis=-1)
    variances[d] = products.var(), (products / d**0.5).var()
    print("d = {:4d}: variance {:7.1f}, after division {:.2f}".format(d, *variances[d]))

np.testing.assert_allclose([variances[d][0] for d in WIDTHS], WIDTHS, rtol=0.1)
np.testing.assert_allclose([variances[d][1] for d in WIDTHS], np.ones(4), rtol=0.1)

# %% [markdown]
# (If you meet this experiment elsewhere with a variance near 100 labelled "dimension 20": it was
# computed at 100. At 20 it is 20.)
#
# Raw scores are larger than one may think even at small widths. A head of 16 numbers, with
# PyTorch's random start and standard normal words of 32, has queries and keys of variance
# $\frac13$, and so scores of variance $16 \cdot \frac19$, a spread of 1.33. Such a table of 64
# unscaled scores has been described as running "from -2 to 2". It runs from -3.3 to 3.4.

# %%
if HAS_TORCH:
    torch.manual_seed(1337)
    words = torch.randn(4, 8, 32)
    key, query = (torch.nn.Linear(32, 16, bias=False) for _ in range(2))
    raw = (query(words) @ key(words).mT)[0].detach().numpy()  # 8 8
    print(f"spread {raw.std():.2f}")
else:  # the two rows with the extremes, as recorded
    raw = np.array(
        [
            [-3.3334, -1.6556, 0.104, 3.3782, -2.1825, 1.0415, -0.0557, 0.2927],
            [-0.3126, 2.4152, -0.1106, -0.9931, 3.3449, -2.5229, 1.4187, 1.2196],
        ]
    )
print(f"from {raw.min():.1f} to {raw.max():.1f}")
np.testing.assert_allclose(np.round([raw.min(), raw.max()], 4), [-3.3334, 3.3782], rtol=1e-5)

# %% [markdown]
# ### What it does to gradients
#
# A sharp softmax is not wrong in itself; a trained model may want one. But it is a bad place to
# *start*, since it hardly learns. The derivative of the weights $p$ by the scores is
#
# $$\frac{\partial p_i}{\partial \omega_j} = p_i (\delta_{ij} - p_j)$$
#
# If one weight is nearly 1 and the others nearly 0, every such product is nearly 0: whatever the
# loss says, next to nothing of it gets through to the scores, nor to $W_q$ and $W_k$ behind them.
# Here is the size of that derivative for one query and six keys, on average over 1,000 draws.


# %%
@jax.vmap
def gradient_size(scores):
    """The norm of all derivatives of the weights by the scores."""
    p = jax.nn.softmax(scores)
    derivative = p[:, None] * (jnp.eye(len(p)) - p[None, :])  # T T
    return jnp.linalg.norm(derivative)


np.testing.assert_allclose(  # the formula is what jax.jacobian finds
    gradient_size(numbers[None])[0],
    jnp.linalg.norm(jax.jacobian(jax.nn.softmax)(numbers)),
    rtol=1e-5,
)

unscaled, scaled = [], []
for d in WIDTHS:
    q, *k = jax.random.normal(jax.random.key(d), (7, 1000, d))
    raw = jnp.stack([(q * one).sum(axis=-1) for one in k], axis=-1)  # 1000 6
    unscaled.append(gradient_size(raw).mean())
    scaled.append(gradient_size(raw / d**0.5).mean())

assert min(scaled) > 0.3  # the same at every width
assert unscaled == sorted(unscaled, reverse=True) and unscaled[-1] < scaled[-1] / 5

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3))
axes[0].loglog(WIDTHS, [variances[d][0] for d in WIDTHS], "o-", color="tab:red", label="q . k")
axes[0].loglog(
    WIDTHS, [variances[d][1] for d in WIDTHS], "o-", color="tab:blue", label="q . k / sqrt(d)"
)
axes[0].set(title="Variance of the scores", xlabel="width d")
axes[1].semilogx(WIDTHS, unscaled, "o-", color="tab:red", label="unscaled")
axes[1].semilogx(WIDTHS, scaled, "o-", color="tab:blue", label="scaled")
axes[1].set(title="Size of the softmax's derivative", xlabel="width d", ylim=(0, 0.5))
for ax in axes:
    ax.set_xticks(WIDTHS, WIDTHS)
    ax.minorticks_off()
    ax.legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# Unscaled, a wider layer would start with less gradient, for no other reason than its width. The
# division takes the width out of the matter.
#
# ## Version 1: a layer with three matrices
#
# A layer is the same function with a place to keep its parameters. In Flax that place is an
# `nnx.Module`, and an `nnx.Param` is a parameter.


# %%
class MySelfAttention(nnx.Module):
    """Scaled dot-product self-attention, three matrices to the right of x."""

    def __init__(self, d_in, d_out, *, rngs):
        self.W_query = nnx.Param(jax.random.uniform(rngs.params(), (d_in, d_out)))
        self.W_key = nnx.Param(jax.random.uniform(rngs.params(), (d_in, d_out)))
        self.W_value = nnx.Param(jax.random.uniform(rngs.params(), (d_in, d_out)))

    def __call__(self, x):
        queries = x @ self.W_query[...]  # *B T d_out
        keys = x @ self.W_key[...]  # *B T d_out
        values = x @ self.W_value[...]  # *B T d_out
        scores = queries @ keys.mT / keys.shape[-1] ** 0.5  # *B T T
        return jax.nn.softmax(scores, axis=-1) @ values  # *B T d_out


mine = MySelfAttention(3, 2, rngs=nnx.Rngs(0))
v1 = SelfAttentionV1(3, 2, rngs=nnx.Rngs(0))
np.testing.assert_allclose(mine(x), v1(x), rtol=1e-6)

# %% [markdown]
# The library's `SelfAttentionV1` is that class. With our three matrices in it, it gives our table.

# %%
v1.W_query[...], v1.W_key[...], v1.W_value[...] = W_query, W_key, W_value
print(v1(x))
np.testing.assert_allclose(np.round(v1(x), 4), TABLE_V1, rtol=1e-6)

# %% [markdown]
# And it is the function of its PyTorch twin, with any weights: outputs, scores, attention weights
# and gradients agree to the last digits of float64.

# %%
if HAS_TORCH:
    torch.manual_seed(123)
    original = OriginalV1(3, 2)
    np.testing.assert_array_equal(
        port(original, v1).W_query[...], W_query
    )  # torch's seed, our table
    report = compare(original, v1, np.asarray(x))
else:
    report = Case(SelfAttentionV1, {"d_in": 3, "d_out": 2}, x=(6, 3)).report()
assert report.ok, report
print(report)

# %% [markdown]
# ## Version 2: three Linear layers
#
# `SelfAttentionV2` says the same with `nnx.Linear`, which brings two things along: a bias if wanted
# (`qkv_bias=True`), and a better random start. Version 1 starts from numbers between 0 and 1, all
# positive, so that positive words have but positive scores, all much alike. Version 2 starts from
# both sides of zero, within $\pm 1/\sqrt{d_\text{in}}$, as `torch.nn.Linear` does.

# %%
v2 = SelfAttentionV2(3, 2, rngs=nnx.Rngs(0))
print(v2.W_query.kernel[...])
assert (v1.W_query[...] >= 0).all()
assert v2.W_query.kernel[...].min() < 0 and jnp.abs(v2.W_query.kernel[...]).max() < 3**-0.5
assert v2.W_query.bias is None

# %% [markdown]
# ## Carrying version 2's weights into version 1
#
# Two layers that compute the same function give the same output as soon as they hold the same
# numbers. The catch is how the numbers lie:
#
# | | holds | shape | computes |
# | --- | --- | --- | --- |
# | version 1, torch or Flax | `W_query` | $(d_\text{in}, d_\text{out})$ | $x W$ |
# | `torch.nn.Linear` | `W_query.weight` | $(d_\text{out}, d_\text{in})$ | $x W^\top$ |
# | `nnx.Linear` | `W_query.kernel` | $(d_\text{in}, d_\text{out})$ | $x W$ |
#
# So PyTorch's version 2 goes into version 1 **transposed**. These are the weights of one, as
# PyTorch drew them from the seed 789, after it had built a version 1.

# %%
torch_weights = {
    "W_query": [[0.30742657, 0.34845704, 0.15828492], [-0.17734346, -0.3440913, -0.4311712]],
    "W_key": [[-0.04451297, 0.23666754, -0.1329499], [-0.221118, 0.20495632, -0.465811]],
    "W_value": [[0.5479912, 0.247615, -0.027615687], [-0.2342338, 0.048407875, -0.43855363]],
}
torch_weights = {name: np.array(w, np.float32) for name, w in torch_weights.items()}  # d_out d_in

if HAS_TORCH:
    torch.manual_seed(789)
    _, original = OriginalV1(3, 2), OriginalV2(3, 2)
    for name, weight in torch_weights.items():
        np.testing.assert_array_equal(getattr(original, name).weight.detach(), weight)

# %% [markdown]
# ### By hand

# %%
for name, weight in torch_weights.items():
    getattr(v1, name)[...] = weight.T
    getattr(v2, name).kernel[...] = weight.T

print(v1(x))
np.testing.assert_allclose(v1(x), v2(x), rtol=1e-6)
np.testing.assert_allclose(
    np.round(v1(x), 4),
    [
        [0.3671, -0.3086],
        [0.3675, -0.3095],
        [0.3675, -0.3094],
        [0.3670, -0.3073],
        [0.3670, -0.3061],
        [0.3672, -0.3085],
    ],
    rtol=1e-6,
)

# %% [markdown]
# Forget the transposition, and with luck the shapes protest:

# %%
try:
    x @ torch_weights["W_query"]
except TypeError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Without luck the matrix is square, as in most real models, and everything runs. Only the numbers
# are wrong, and nobody is told.

# %%
square = jax.random.normal(jax.random.key(0), (3, 3))
right, wrong = x @ square.T, x @ square
assert right.shape == wrong.shape
assert jnp.abs(right - wrong).max() > 0.1

# %% [markdown]
# ### By `port`
#
# That is why this library carries weights by name and type, and proves the result. Between twins
# nothing has to be said: a `torch.nn.Linear` is transposed because it is one. From version 2 into
# version 1 the names and the layout differ, and one sentence says how:

# %%
rules = [Rule("*.weight -> *", "o i -> i o")]

if HAS_TORCH:
    print(plan(original, v1, rules))
    ported = port(original, SelfAttentionV1(3, 2, rngs=nnx.Rngs(1)), rules)
    for name in torch_weights:  # the same bits as by hand
        np.testing.assert_array_equal(getattr(ported, name)[...], getattr(v1, name)[...])
    back = port(ported, OriginalV2(3, 2), rules)  # the same sentence leads back
    assert torch.equal(back.W_key.weight, original.W_key.weight)

# %% [markdown]
# And the proof that version 1 with version 2's weights is version 2, not on one sentence but as a
# function, gradients included. (Live, the report adds what it saw on one side only: PyTorch's three
# Linear layers, which have no counterpart in a version 1.)

# %%
if HAS_TORCH:
    report = compare(original, v1, np.asarray(x), rules=rules)
else:
    witness = "torch_ref.self_attention_v2.SelfAttentionV2"
    config = {"d_in": 3, "d_out": 2}
    report = Case(SelfAttentionV1, config, witness=witness, rules=rules, x=(6, 3)).report()
assert report.ok, report
print(report)

# %% [markdown]
# ## Frozen against trainable
#
# What makes a parameter trainable? In PyTorch each one carries a switch, `requires_grad`, and
# where it is off no gradient is kept. In JAX a parameter is an array like any other; whoever takes
# the gradient says with respect to what, and the optimizer is told the same. The rest is frozen.
#
# Let *journey* learn to look at *step*: its context vector shall become the value of *step*.
# Queries and keys may change. The values may not, or the layer could cheat and make all values
# the same.

# %%
learner = SelfAttentionV2(3, 2, rngs=nnx.Rngs(7))
target = learner.W_value(x[STEP])  # d_out
trainable = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("W_value")))
optimizer = nnx.Optimizer(learner, optax.adam(0.1), wrt=trainable)


@nnx.jit
def train_step(learner, optimizer):
    """One step towards the target; returns the loss."""

    def distance(learner):
        return ((learner(x)[JOURNEY] - target) ** 2).sum()

    loss, gradients = nnx.value_and_grad(distance, argnums=nnx.DiffState(0, trainable))(learner)
    optimizer.update(learner, gradients)
    return loss


def look(layer):
    """The attention weights of a version 2."""
    return jax.nn.softmax(layer.W_query(x) @ layer.W_key(x).T / layer.d_out**0.5, axis=-1)  # T T


before, frozen, moving = look(learner), learner.W_value.kernel[...], learner.W_query.kernel[...]
losses = [float(train_step(learner, optimizer)) for _ in range(300)]
after = look(learner)

np.testing.assert_array_equal(learner.W_value.kernel[...], frozen)  # not one bit
assert jnp.abs(learner.W_query.kernel[...] - moving).max() > 0.1
assert after[JOURNEY].argmax() == STEP and after[JOURNEY, STEP] > 0.8
print(
    f"journey looks at step by {before[JOURNEY, STEP]:.2f} before, {after[JOURNEY, STEP]:.2f} after"
)

# %%
fig, axes = plt.subplots(1, 3, figsize=(10.4, 3.3), width_ratios=(6, 6, 5))
heat(axes[0], before, tokens, tokens, "before", "Greens", top=1)
heat(axes[1], after, tokens, tokens, "after 300 steps", "Greens", top=1)
axes[2].semilogy(losses)
axes[2].set(title="loss", xlabel="step")
fig.tight_layout()
plt.show()

# %% [markdown]
# That is what chapter 1 could not do. The other words changed their minds too, since all share the
# same three matrices.
#
# ## In a nutshell
#
# | word | formula | shape here |
# | --- | --- | --- |
# | weight parameters | $W_q, W_k, W_v$, learned | 3 x 2 each |
# | queries, keys, values | $Q = X W_q,\ K = X W_k,\ V = X W_v$, each word by itself | 6 x 2 each |
# | scores | $Q K^\top / \sqrt{d}$, where words meet | 6 x 6 |
# | attention weights | $A = \operatorname{softmax}(\ldots)$, rows add up to one | 6 x 6 |
# | context vectors | $Z = A V$ | 6 x 2 |
#
# ## Exercise
#
# Scores are $Q K^\top = X W_q W_k^\top X^\top$. So the two matrices could be one,
# $M = W_q W_k^\top$, and $X M X^\top$ would give the same scores. Check it. Then say why models
# keep two: how many numbers has $M$, how many have $W_q$ and $W_k$, if a word has 768 numbers and a
# head has 64? And what is the rank of $M$?
#
# <details>
# <summary>Answer</summary>
#
# ```python
# M = W_query @ W_key.T  # d_in d_in
# np.testing.assert_allclose(x @ M @ x.T, queries @ keys.T, rtol=1e-5)
# assert M.shape == (3, 3) and jnp.linalg.matrix_rank(M) == 2
# ```
#
# $M$ has $768^2 = 589{,}824$ numbers, the two have $2 \cdot 768 \cdot 64 = 98{,}304$, a sixth. The
# rank of $M$ is at most 64: two words are compared by 64 features, which are learned, and not by
# all 768. And keys of 64 numbers are what a model keeps in memory for every word it has read.
# </details>
#
# Next: [3. Looking back only](03_looking_back_only.ipynb)
