# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12. Many devices
#
# *19 minutes to read, 1 minute to run on a quiet machine with two cores.*
# [Eight devices](#Eight-devices-from-one-processor) ·
# [Batch and heads](#Batch-and-heads) ·
# [A long text](#A-text-that-lies-on-several-devices) ·
# [The ring](#The-ring-hop-by-hop) ·
# [Three strategies](#Three-strategies) ·
# [Zigzag](#Under-a-causal-mask-the-first-device-waits) ·
# [A layer](#A-layer-and-its-gradients) ·
# [Exercises](#Exercises)
#
# Large models are trained on many devices, GPUs or TPUs, because they are too slow or too large for
# one. The arrays are cut into parts, which are called **shards**, and what a device does not have
# has to be sent to it.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

# %%
fig, ax = plt.subplots(figsize=(8.6, 2.7), layout="constrained")
for device in range(4):
    shard = f"of tokens {16 * device} to {16 * device + 15}"
    ax.text(device, 1.5, f"device {device}", ha="center")
    for up, part, color in ((0.95, "queries", "lightsteelblue"), (0.1, "keys, values", "orange")):
        box = {"boxstyle": "round", "facecolor": color, "edgecolor": "0.3"}
        ax.text(device, up, f"{part}\n{shard}", ha="center", va="center", bbox=box)
    last = device == 3
    curve = {"arrowstyle": "-|>", "color": "tab:red", "lw": 1.5}
    curve["connectionstyle"] = f"arc3,rad={-0.13 if last else 0.35}"
    to, start = ((device + 1) % 4 - 0.1, -0.25), (device + 0.1, -0.25)
    ax.annotate("", to, start, arrowprops=curve)
ax.set(xlim=(-0.5, 3.5), ylim=(-1.15, 1.75))
ax.set_title("One text on four devices: queries stay, keys and values travel round")
ax.axis("off")
plt.show()

# %% [markdown]
# This chapter cuts attention in every way that is in use, and shows each time that the result is
# what one device computes.
#
# At the end you will understand
#
# * how an array is cut over a *mesh* of devices, and how to see what devices send to each other;
# * why batch and heads need nothing to be sent, and the length of a text does;
# * **ring attention**, hop by hop, and its two alternatives, all-gather and Ulysses;
# * why a causal mask gives some devices more work than others, and how *zigzag* mends it.
#
# ## Eight devices from one processor
#
# No hardware is needed. JAX can pretend that one processor is eight devices. It has to be told
# before the first array is made. All arrays have 64 bits here, so that a mistake cannot hide among
# rounding errors.

# %%
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
print(len(jax.devices()), "devices:", *jax.devices()[:2], "...")
assert len(jax.devices()) == 8

# %% [markdown]
# Such devices share one processor, so nothing gets faster. We will measure no times. But who holds
# what, what is sent, and how much memory a device needs are the same as on real ones.
#
# A **mesh** is a table of devices whose axes have names. `P` (for *partition*) says, for each axis
# of an array, along which axis of the mesh it is cut. `None` is not cut.

# %%
from jax import P

mesh = jax.make_mesh((2, 4), ("data", "model"))
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((4, 64, 8, 16))) for _ in "qkv")  # B T N H each
by_head = jax.NamedSharding(mesh, P("data", None, "model"))
cut = [jax.device_put(array, by_head) for array in (q, k, v)]
print("the whole:", cut[0].shape, "on each device:", cut[0].addressable_shards[0].data.shape)

# %% [markdown]
# The whole array still looks like one array. JAX knows where its parts are. Let us draw this: a
# colour, and a number, for each device.


# %%
def draw(ax, sharding, shape, title, names):
    """Which device has which part of a table of this shape."""
    owner = np.zeros(shape, int)
    for device, part in sharding.devices_indices_map(shape).items():
        owner[part] = device.id
    ax.imshow(owner, cmap="Pastel1", vmin=0, vmax=8)
    for (i, j), device in np.ndenumerate(owner):
        ax.text(j, i, device, ha="center", va="center", fontsize=8)
    ax.set(title=title, ylabel=names[0], xlabel=names[1], xticks=[], yticks=[])


# %%
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.2), layout="constrained")
for ax, spec in zip(axes, (P("data"), P(None, "model"), P("data", "model")), strict=True):
    title = f"P{tuple(spec)}".replace(",)", ")")
    draw(ax, jax.NamedSharding(mesh, spec), (4, 8), title, ("four texts", "eight heads"))
plt.show()

# %% [markdown]
# In the first two pictures one axis is not cut. Several devices have the same part, and only the
# last of them is drawn. In the third picture each device has two texts and two heads. This is the
# one that we use.
#
# ## Batch and heads
#
# Texts do not look at each other, and heads do not look at each other either. So every device can
# attend to its own part alone. Nothing has to be written for that. (`same`, from `climb.py` beside
# these notebooks, compares two arrays.)


# %%
from climb import same

from flax_attn import CAUSAL, attend


@jax.jit
def causal(q, k, v):
    return attend(q, k, v, mask=CAUSAL)


# %%
out = causal(*cut)
same(out, causal(q, k, v), within=1e-12)
assert out.sharding.is_equivalent_to(by_head, out.ndim)  # it stays where it was computed

# %% [markdown]
# How do we know that no device asked another for anything? We read the compiled program. When
# devices exchange numbers, it has one of five operations, the **collectives**.

# %%
import re
from collections import Counter

COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


# %%
def sent(function, *arrays):
    """How many collectives of each kind the compiled program has."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    return dict(Counter(re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text)))


# %%
print("attention:", sent(causal, *cut))
print("a sum over all heads:", sent(lambda x: x.sum(axis=2), cut[0]))
assert sent(causal, *cut) == {}

# %% [markdown]
# Attention has none. A sum over all heads does have one, as it must: some heads are elsewhere.
# *All-reduce* adds up what the devices have, and gives the sum to all of them.
#
# > **Try it.** Make the mesh `(8, 1)`, and then `(1, 8)`. Which of them does JAX refuse, and why?
#
# <details><summary>Answer</summary>
#
# ```python
# for shape in ((8, 1), (1, 8)):
#     other = jax.make_mesh(shape, ("data", "model"))
#     try:
#         parts = jax.device_put(q, jax.NamedSharding(other, P("data", None, "model")))
#         print(shape, parts.addressable_shards[0].data.shape)
#         assert shape == (1, 8)
#     except ValueError as error:
#         print(shape, str(error).split(". ")[0])
#         assert shape == (8, 1)
# ```
#
# It refuses `(8, 1)`: four texts cannot be cut into eight equal parts. `(1, 8)` works, since there
# are eight heads. Each device then has one head of all four texts.
#
# </details>
#
# ## A text that lies on several devices
#
# What if one text is too long for a device? Then its *length* is cut. Now each device has some of
# the tokens: their queries, keys and values. But a query has to look at all keys, and most of them
# are elsewhere.
#
# [Chapter 8](08_fast_attention.ipynb) has the answer. Attention can be computed for a part of the
# keys at a time, if the log-sum-exp $L$ of the scores is kept beside the context $c$. Two parts
# become one like this:
#
# $$c = e^{L_1 - L}\, c_1 + e^{L_2 - L}\, c_2, \qquad L = \log(e^{L_1} + e^{L_2}).$$


# %%
def merge(c1, L1, c2, L2):
    L = np.logaddexp(L1, L2)  # T N
    return np.exp(L1 - L)[..., None] * c1 + np.exp(L2 - L)[..., None] * c2, L


# %% [markdown]
# ## The ring hop by hop
#
# Let the devices stand in a circle. Each keeps its own queries. The keys and values go round: after
# each step every device hands those that it has to the next one, and gets others from the one
# before. Such a move is called a *hop*. After $n - 1$ hops everybody has seen all keys, and nobody
# ever held more than a part of them. This is **ring attention**
# ([Liu and others](https://arxiv.org/abs/2310.01889), 2023).

# %%
angle = np.pi / 2 - 2 * np.pi * np.arange(4) / 4
ring = np.stack([np.cos(angle), np.sin(angle)], axis=1)  # four places, clockwise
box = {"boxstyle": "circle", "facecolor": "lightsteelblue", "edgecolor": "0.3"}
hand_on = {"arrowstyle": "-|>", "color": "0.4", "shrinkA": 24, "shrinkB": 24}
fig, axes = plt.subplots(1, 4, figsize=(8.8, 2.6), layout="constrained")
for hop, ax in enumerate(axes):
    for device, (right, up) in enumerate(ring):
        label = f"q {device}\nk, v {(device - hop) % 4}"
        ax.text(right, up, label, ha="center", va="center", bbox=box, fontsize=8)
        curve = {"connectionstyle": "arc3,rad=-0.3", **hand_on}
        if hop < 3:
            ax.annotate("", ring[(device + 1) % 4], (right, up), arrowprops=curve)
    ax.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal", title=f"step {hop}")
    ax.axis("off")
plt.show()

# %% [markdown]
# Here it is by hand, for one text on four devices. `owner` says whose keys a device holds.

# %%
parts = [np.split(np.asarray(array[0]), 4) for array in (q, k, v)]  # 4 shards of T N H each
attend_part = jax.jit(lambda q, k, v: attend(q, k, v, return_lse=True))
c = [np.zeros((16, 8, 16))] * 4  # T N H on each device
L = [np.full((16, 8), -np.inf)] * 4  # T N
owner = [0, 1, 2, 3]

# %%
for step in range(4):
    print("step", step, "keys on the four devices:", owner)
    for device in range(4):
        mine, theirs = parts[0][device], (part[owner[device]] for part in parts[1:])
        c[device], L[device] = merge(c[device], L[device], *attend_part(mine, *theirs))
    owner = owner[-1:] + owner[:-1]  # everybody hands on to the next
same(np.concatenate(c), attend(q[0], k[0], v[0]), within=1e-12)

# %% [markdown]
# ## Three strategies
#
# In the library you shard the length, and call `attend` as always. `context_parallel` chooses how
# the keys meet the queries:
#
# | strategy | what is sent | what a device holds |
# | --- | --- | --- |
# | "all_gather" | keys and values of all, at once | all keys and values |
# | "ring" | keys and values, shard by shard | two shards of them |
# | "ulysses" | queries, keys, values, and then the output | all tokens of some heads |
#
# The third is the idea of [DeepSpeed Ulysses](https://arxiv.org/abs/2309.14509). Heads are
# independent, so each device hands out its tokens head by head until it has *all tokens of one
# head*. Then it attends alone, and everything goes back. For this there must be as many heads as
# devices.
#
# The picture shows which keys and values a device holds at once, with four devices and four heads.
# Each row is one head on one device.


# %%
def holds(strategy, n=4):
    """For each head on each device (rows), and each shard of the text: own 2, sent 1, absent 0."""
    device, head, shard = np.indices((n, n, n))
    seen = {
        "all_gather": device >= 0,  # everything
        "ring": (device - shard) % n < 2,  # its own, or the one that has just arrived
        "ulysses": head == device,  # one head, and all shards of it
    }
    return (seen[strategy] * (1 + (shard == device))).reshape(n * n, n)


# %%
from matplotlib.colors import ListedColormap

fig, axes = plt.subplots(1, 3, figsize=(8.4, 3), layout="constrained")
for ax, strategy in zip(axes, ("all_gather", "ring", "ulysses"), strict=True):
    colors = ListedColormap(["0.93", "orange", "tab:blue"])
    ax.imshow(holds(strategy), cmap=colors, vmin=0, vmax=2, aspect="auto")
    ax.hlines(np.arange(0.5, 15), -0.5, 3.5, color="white", lw=1)
    ax.hlines([3.5, 7.5, 11.5], -0.5, 3.5, color="black", lw=1.5)
    ax.set_yticks([1.5, 5.5, 9.5, 13.5], [f"device {d}" for d in range(4)])
    ax.set(title=strategy, xlabel="shard of the text", xticks=range(4))
fig.suptitle("Keys and values on each device: blue its own, orange sent to it", fontsize=10)
plt.show()

# %%
from flax_attn import explain
from flax_attn.sharding import context_parallel

line = jax.make_mesh((8,), ("seq",))
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.8), layout="constrained")
lies, gathered = P("seq"), P(None, "seq")
for ax, spec, title in zip(
    axes, (lies, gathered, lies), ("as it lies", "to attend", "back again"), strict=True
):
    draw(ax, jax.NamedSharding(line, spec), (8, 8), title, ("tokens, eight shards", "heads"))
fig.suptitle("Ulysses: which device has what")
plt.show()

# %% [markdown]
# We take outputs *and gradients* of all three, with a random array in place of the loss's gradient,
# and compare them with one device.

# %%
do = jnp.asarray(rng.standard_normal((64, 8, 16)))  # the gradient of some loss by the output


# %%
def both_ways(q, k, v, do):
    """The output, and the gradients of q, k and v."""
    out, pull = jax.vjp(causal, q, k, v)
    return out, *pull(do)


# %%
one_text = [array[0] for array in (q, k, v)]
by_length = jax.NamedSharding(line, P("seq"))
tokens_cut = [jax.device_put(array, by_length) for array in (*one_text, do)]
want = jax.jit(both_ways)(*one_text, do)

# %%
for strategy in ("all_gather", "ring", "ulysses"):
    with context_parallel(strategy):
        compiled = jax.jit(both_ways).lower(*tokens_cut).compile()
        lines = str(explain(*tokens_cut[:3], mask=CAUSAL)).splitlines()
    (sends,) = [line for line in lines if line.startswith("sends")]
    print(f"{strategy}:", *sends.split())
    assert ("7 times" if strategy == "ring" else "once") in sends
    for got, expected in zip(compiled(*tokens_cut), want, strict=True):
        same(got, expected, within=1e-12)

# %% [markdown]
# The line `sends` of `explain` says what is sent, and each comparison is the output or one
# gradient. All agree with one device to the last digits. (The line after it, `blocks`, says how
# much work each device has. It is the subject of a section below.)
#
# > **Try it.** Call `attend(*(array[:, :6] for array in tokens_cut[:3]))`, with six heads, inside
# > `context_parallel("ulysses")`. What does the error propose?
#
# <details><summary>Answer</summary>
#
# ```python
# with context_parallel("ulysses"):
#     try:
#         attend(*(array[:, :6] for array in tokens_cut[:3]))
#     except ValueError as error:
#         print(error)
#         assert 'Take strategy="ring" or "all_gather"' in str(error)
#     else:
#         raise AssertionError("six heads cannot be spread over eight devices")
# ```
#
# Six heads cannot be spread over eight devices. It proposes "ring" or "all_gather", which leave the
# heads alone. For "ulysses" the number of query heads would have to be a multiple of 24, that is,
# of the six key heads and of the eight devices.
#
# </details>
#
# ### Memory of a device
#
# Why three? They need different amounts of memory, and of sending. As in chapter 8 we compile for a
# long text without running it, and ask how many bytes *each device* needs: for its parts of the
# arrays, and as scratch memory. The text has 32,768 tokens, in eight heads of width 64, in float32.


# %%
def memory(strategy=None):
    """MiB on a device: of queries, keys, values and output, and scratch."""
    where = by_length if strategy else None
    x = jax.ShapeDtypeStruct((32_768, 8, 64), jnp.float32, sharding=where)
    with context_parallel(strategy or "all_gather"):
        found = jax.jit(causal).lower(x, x, x).compile().memory_analysis()
    arrays = found.argument_size_in_bytes + found.output_size_in_bytes
    return arrays / 2**20, found.temp_size_in_bytes / 2**20


# %%
ways = {"one device": memory()}
ways |= {strategy: memory(strategy) for strategy in ("all_gather", "ring", "ulysses")}
for name, (arrays, scratch) in ways.items():
    print(f"{name:>10}: {arrays:4.0f} MiB of arrays, {scratch:4.0f} MiB of scratch memory")
assert ways["ring"][0] == ways["one device"][0] / 8
assert ways["ulysses"][1] < ways["ring"][1] < ways["all_gather"][1] / 2

# %%
fig, ax = plt.subplots(figsize=(6.5, 2.2), layout="constrained")
arrays, scratch = np.array([*ways.values()]).T
ax.barh(list(ways), arrays, label="arrays")
ax.barh(list(ways), scratch, left=arrays, label="scratch")
ax.set(xlabel="MiB", title="Memory of each device")
ax.invert_yaxis()
ax.legend()
plt.show()

# %% [markdown]
# With eight devices the arrays take an eighth. "all_gather" holds all keys and values besides, and
# this part does *not* get smaller with more devices. On the other hand it sends only once, and all
# at once, which suits fast links. Ulysses needs least, if there are heads enough. The ring always
# goes, however long the text, and it can send the next keys while it computes with the present
# ones.
#
# ## Under a causal mask the first device waits
#
# With a causal mask the first token sees one key, and the last sees all. If shard 0 has the first
# tokens, then its device has next to nothing to do, and the last device has the most. But a ring
# goes at the pace of the slowest.
#
# So the tokens are dealt out differently. In the **zigzag** layout the text is cut into twice as
# many runs as there are devices, and a device gets one from the front and one from the back.
# *Striped* deals the tokens out like cards.

# %%
from flax_attn.sharding import positions

fig, axes = plt.subplots(3, 1, figsize=(8.4, 2.6), layout="constrained")
layouts = ("contiguous", "zigzag", "striped")
for ax, layout in zip(axes, layouts, strict=True):
    device_of = np.empty(32, int)
    device_of[positions(32, 4, layout)] = np.repeat(np.arange(4), 8)
    ax.imshow(device_of[None], cmap="Pastel1", vmin=0, vmax=8, aspect="auto")
    for t, device in enumerate(device_of):
        ax.text(t, 0, device, ha="center", va="center", fontsize=8)
    ax.set(yticks=[], xticks=[], ylabel=layout)
    ax.yaxis.label.set(rotation=0, ha="right", va="center")
axes[-1].set_xlabel("32 tokens, and the device that each lies on")
plt.show()

# %% [markdown]
# How much work is there in each step of a ring of eight? For each device and step we count the
# share of scores that the mask lets through. All wait for the slowest, so the title of each picture
# adds up the largest number of each step.


# %%
def work(layout, length=64, n=8):
    """For each step and device, which share of the scores at hand is seen."""
    at = positions(length, n, layout).reshape(n, -1)  # the tokens of each device
    seen = at[:, None, :, None] >= at[None, :, None, :]  # device owner T S
    share = seen.mean((2, 3))
    return np.array([[share[d, (d - step) % n] for d in range(n)] for step in range(n)])


# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.1), layout="constrained")
for ax, layout in zip(axes, layouts, strict=False):
    table = work(layout)
    ax.imshow(table, cmap="Blues", vmin=0, vmax=1.3)
    for (step, device), share in np.ndenumerate(table):
        ax.text(device, step, f"{share:.1f}".rstrip("0").rstrip("."), ha="center", va="center")
    total = table.max(1).sum()
    ax.set(title=f"{layout}: the ring waits for {total:.1f}", xlabel="device", ylabel="step")
plt.show()

# %% [markdown]
# With contiguous shards devices are idle almost half of the time, and the ring still has to wait
# for a full share in each step. With zigzag everybody has about one half, in every step. The longer
# the text, the nearer the two sums come to 7.5 and 4.

# %%
slowest = {layout: work(layout, length=512).max(1).sum() for layout in layouts}
print({layout: round(float(total), 2) for layout, total in slowest.items()})
assert slowest["contiguous"] > 1.8 * slowest["zigzag"]
for layout in layouts:
    np.testing.assert_allclose(work(layout).sum(), 64 * 65 / 2 / 8**2)  # nothing is lost

# %% [markdown]
# In real programs the scores are computed in blocks, and a block is skipped only if all of it is
# hidden (chapter 8). So let us count blocks: 8,192 tokens on eight devices, in blocks of 128.


# %%
def blocks(layout):
    """How many blocks of keys the blocks of queries of each device may see."""
    at = positions(8192, 8, layout).reshape(8, 8, 128)  # device, block, token
    sees = at.max(-1)[:, :, None] >= at.min(-1).reshape(-1)
    return sees.sum((1, 2))


# %%
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.2), sharey=True, layout="constrained")
for ax, layout in zip(axes, layouts, strict=True):
    ax.bar(range(8), blocks(layout))
    ax.set(title=f"{layout}: at most {blocks(layout).max()}", xlabel="device")
axes[0].set_ylabel("blocks")
plt.show()
assert blocks("contiguous").max() == 484 and {*blocks("zigzag")} == {260}

# %% [markdown]
# Zigzag gives every device 260 blocks, and contiguous shards give 484 to the last. Striped shards
# are balanced too, but their tokens lie so far apart that more blocks are partly visible.
#
# > **Try it.** Draw the table of steps for "striped". Why are its numbers not all the same, and why
# > does it matter less and less as the text gets longer?
#
# <details><summary>Answer</summary>
#
# ```python
# table = work("striped")
# fig, ax = plt.subplots(figsize=(4.2, 3.1), layout="constrained")
# ax.imshow(table, cmap="Blues", vmin=0, vmax=1.3)
# for (step, device), share in np.ndenumerate(table):
#     ax.text(device, step, f"{share:.2f}", ha="center", va="center")
# ax.set(title="striped", xlabel="device", ylabel="step")
# plt.show()
# assert {*table.ravel()} == {0.4375, 0.5625}
# assert {*work("striped", length=4096).ravel()} == {0.5 - 1 / 1024, 0.5 + 1 / 1024}
# ```
#
# Each device has $m = T / 8$ tokens, 8 here. Token $i$ of one device sees the first $i$ or the
# first $i + 1$ tokens of another. It is $i + 1$ if the other's tokens stand before its own, and
# when a device looks at its own tokens. That makes $(m + 1) / 2m$ of all pairs, 0.5625, and in the
# other case $(m - 1) / 2m$, 0.4375. The two differ by $1 / m$, so in a long text both are one half.
#
# </details>
#
# ## A layer and its gradients
#
# Now all together: a layer with rotary positions, two texts on each row of the mesh, the length
# over four devices, in zigzag order, by a ring. The weights are the same on every device. `place`
# puts the tokens in order before they are sharded, and `unplace` undoes it. Masks and rotations
# know by themselves where a token really stands.

# %%
from flax import nnx

from flax_attn import GroupedQueryAttention, Rotary
from flax_attn.sharding import place, unplace

grid = jax.make_mesh((2, 4), ("data", "seq"))
rngs = nnx.Rngs(0)
layer = GroupedQueryAttention(12, 8, 2, 6, rotary=Rotary(), rngs=rngs, param_dtype=jnp.float64)
tokens, target = (jnp.asarray(rng.standard_normal((4, 64, 12))) for _ in range(2))  # B T D each
graph, weights = nnx.split(layer)


# %%
@jax.jit
def step(weights, tokens, target):
    """The output, and the gradients of a loss with respect to all weights."""

    def loss(weights):
        out = nnx.merge(graph, weights)(tokens)
        return ((out - target) ** 2).sum(), out

    gradients, out = jax.grad(loss, has_aux=True)(weights)
    return out, gradients


# %%
want, want_gradients = step(weights, tokens, target)
with context_parallel("ring", layout="zigzag"), jax.set_mesh(grid):
    dealt = [place(array, 4, "zigzag", axis=1) for array in (tokens, target)]
    on_grid = [jax.device_put(array, P("data", "seq")) for array in dealt]
    out, gradients = step(jax.device_put(weights, P()), *on_grid)
same(unplace(jax.device_get(out), 4, "zigzag", axis=1), want, within=1e-12)

# %%
pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True)
for got, expected in pairs:
    same(got, expected, within=1e-12)

# %% [markdown]
# The output and the gradients of all four matrices are those of one device. JAX adds up the
# gradients of the devices by itself, since the weights are the same everywhere.
#
# One trap is left. What *you* compute from positions has to know the layout as well. Learned
# position embeddings, for instance, need `positions(length, shards, layout)` in place of 0, 1, 2.
# And for the loss of a language model the labels are shifted *before* they are placed: in zigzag
# order the next slot is not always the next token.

# %%
print("zigzag, eight tokens on two devices:", positions(8, 2, "zigzag"))
labels_then_place = place(np.arange(1, 9), 2, "zigzag", axis=0)
place_then_labels = np.append(place(np.arange(8), 2, "zigzag", axis=0)[1:], 8)
print(labels_then_place, "are the labels, and not", place_then_labels)
assert (labels_then_place == positions(8, 2, "zigzag") + 1).all()
assert (labels_then_place != place_then_labels).sum() == 3

# %% [markdown]
# Every layer that is built on `attend` is tested in this way, against PyTorch on one device: the
# command `flax-attn parity --devices 8` runs these tests, and the column "devices" of the
# [certificate](../docs/certificate.md) lists them. [docs/scale.md](../docs/scale.md) has more, for
# instance what to do with several hosts.
#
# ## In a nutshell
#
# | word | meaning | in the library |
# | --- | --- | --- |
# | mesh, shard | a table of devices; the part of an array on one of them | `jax.make_mesh`, `P` |
# | collective | an operation in which devices exchange numbers | |
# | all-gather | every device gets all keys and values | `context_parallel("all_gather")` |
# | ring | keys and values go round | `context_parallel("ring")` |
# | Ulysses | each device gets all tokens of some heads | `context_parallel("ulysses")` |
# | zigzag | early and late tokens on every device | `layout="zigzag"`, `place`, `unplace` |
#
# ## Exercises
#
# **1.** With a window of W tokens a ring need not go all the way round. How many steps are needed,
# with $n$ devices and shards of $T / n$ tokens? Count them for T = 64, n = 8 and W = 12, and see
# what `explain` says.
#
# <details><summary>Answer</summary>
#
# The first token of a shard looks back $W - 1$ tokens, into $\lceil (W - 1) / (T / n) \rceil$
# shards before its own. So there is one step more than that, and one hop less than steps.
#
# ```python
# from flax_attn import Window
#
# at = np.arange(64).reshape(8, 8)
# back = at[:, None, :, None] - at[None, :, None, :]  # device owner T S
# seen = ((back >= 0) & (back < 12)).any((2, 3))
# steps = [any(seen[d, (d - step) % 8] for d in range(8)) for step in range(8)]
# assert sum(steps) == 1 + -(-11 // 8) == 3
# with context_parallel("ring"):
#     told = str(explain(*tokens_cut[:3], mask=CAUSAL & Window(11, 0)))
# assert "2 times" in told
# ```
#
# This holds for contiguous shards. In zigzag order a shard has tokens from both ends, and its
# neighbours are not next to it. With a window the work is balanced anyway.
#
# </details>
#
# **2.** How many numbers does a device send, forward, with a ring and with Ulysses? Take one text
# of T tokens and N heads of width H for queries, keys and values alike, on $n$ devices.
#
# <details><summary>Answer</summary>
#
# In a ring a device sends its shard of keys and values, $2\,T N H / n$ numbers, $n - 1$ times. In
# Ulysses it keeps one part in $n$ of its shard and sends the rest, for q, k, v and the output.
#
# ```python
# def numbers_sent(T, N, H, n):
#     shard = T * N * H / n
#     return {"ring": (n - 1) * 2 * shard, "ulysses": (n - 1) / n * 4 * shard}
#
# for n in (2, 8, 64):
#     found = numbers_sent(32_768, 64, 64, n)
#     print(n, {name: f"{count / 1e6:.0f} million" for name, count in found.items()})
#     assert found["ring"] / found["ulysses"] == n / 2
# ```
#
# Ulysses sends less, by a factor of $n/2$. The ring sends while it computes, so that much of its
# sending costs no time. And if few key heads are shared by many query heads, as in Llama 3, keys
# and values are small beside the queries, which a ring never sends.
#
# </details>
#
# **To read:** Liu and others,
# [Ring Attention with Blockwise Transformers](https://arxiv.org/abs/2310.01889); Jacobs and others,
# [DeepSpeed Ulysses](https://arxiv.org/abs/2309.14509); Brandon and others,
# [Striped Attention](https://arxiv.org/abs/2311.09431); and JAX's own pages on
# [parallel programming](https://docs.jax.dev/en/latest/sharded-computation.html).
#
# ## Where you are now
#
# You began with six words and a dot product. You gave it weights, covered the future, split it into
# heads, put it into a recurrent model, trained a small GPT with it, ported it from PyTorch,
# computed it without its table, saw what today's models changed, let a model write from its cache,
# gave it a state in place of the cache, and spread it over eight devices. Nearly all of it was one
# formula:
#
# $$\text{softmax}\Big(\frac{q k^\top}{\sqrt{H}} + \text{mask}\Big)\, v.$$
#
# Where to go from here:
#
# * [the README](../README.md): what the library holds, and the table of what is proven;
# * [docs/recipes.md](../docs/recipes.md): generating in one compiled loop, padding masks, mixed
#   precision, export, checkpoints, Linen, and moving from other attention modules, each in one
#   piece that runs;
# * [docs/porting.md](../docs/porting.md): port a module of your own from PyTorch, and prove it;
# * the layers themselves, in `flax_attn/layers`: one variant in each file, as short as what you
#   wrote here.
#
# Or go back to the start: [1. Attention without weights](01_attention_without_weights.ipynb).
