# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 0. JAX for numpy readers
#
# *12 minutes to read, 20 seconds to run on a quiet machine with two cores.*
# [Arrays](#Arrays-that-do-not-change) ·
# [Keys](#Random-numbers-from-keys) ·
# [Gradients](#Gradients) ·
# [jit](#Compiling-with-jit) ·
# [vmap](#A-batch-with-vmap) ·
# [Modules](#A-module) ·
# [Optimizers](#An-optimizer) ·
# [Exercises](#Exercises)
#
# If you know numpy, you know most of JAX already. One thing that numpy lacks: `jax.grad` takes a
# function and returns the function of its slopes.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from flax import nnx


# %%
def wave(t):
    return jnp.sin(t) * jnp.exp(-t / 4)


t = jnp.linspace(0, 9, 200)
fig, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
ax.plot(t, wave(t), lw=3, alpha=0.4, label="a function, in numpy's words")
for place in t[10::24]:
    slope = jax.grad(wave)(place)
    near = place + jnp.array([-0.7, 0.7])
    ax.plot(near, wave(place) + slope * (near - place), color="tab:orange")
ax.plot([], [], color="tab:orange", label="its slopes, by jax.grad")
ax.set_title("JAX differentiates what you wrote")
ax.legend()
plt.show()

# %% [markdown]
# The chapters that follow explain attention, and their code is JAX. This one shows what is new for
# a reader of numpy: seven ideas, each in a few lines. If you know JAX and Flax, go on to
# [chapter 1](01_attention_without_weights.ipynb).
#
# To run these pages yourself, get a checkout of this project, install it with
# `pip install ".[notebooks]"`, and start `jupyter lab notebooks`. You do not need a GPU.
#
# Three libraries appear here:
#
# | library | imported as | what it brings |
# | --- | --- | --- |
# | JAX | `jax`, `jax.numpy as jnp` | numpy's functions, gradients, a compiler |
# | Flax | `from flax import nnx` | modules: functions that own their parameters |
# | Optax | `optax` | optimizers, which change parameters step by step |
#
# `climb` is a small file beside these notebooks. It draws tables and diagrams, and `same(a, b)`
# checks that two arrays are equal and prints their largest difference.

# %%
from climb import diagram, same

# %% [markdown]
# ## Arrays that do not change
#
# `jnp` has numpy's functions under numpy's names. `jnp.array` makes an array, `@` multiplies
# matrices, `.sum(axis=-1)` adds along the last axis.

# %%
a = jnp.array([[1.0, 2.0], [3.0, 4.0]])
print(a @ a, a.sum(axis=-1), a.dtype)

# %% [markdown]
# One thing is forbidden: an array never changes after it was made. Assigning to an element raises
# a `TypeError`.

# %%
try:
    a[0, 0] = 100.0
except TypeError as error:
    print(str(error).split(". ")[0])

# %% [markdown]
# You make a new array instead. `a.at[0, 0].set(100.0)` returns a copy with that element replaced,
# and `jnp.where(condition, yes, no)` picks between two arrays, as in numpy. The old array is still
# there, so no other part of the program can be surprised. When the code is compiled, the compiler
# leaves out copies that nobody needs.

# %%
b = a.at[0, 0].set(100.0)
print(b)
assert a[0, 0] == 1.0

# %% [markdown]
# Two more differences are worth knowing. First, numbers have 32 bits unless you ask for more. The
# block `with jax.enable_x64(True):` allows 64 bits, and later chapters use it for proofs.

# %%
print("32 bits:", jnp.sin(jnp.array(1.0)))
with jax.enable_x64(True):
    print("64 bits:", jnp.sin(jnp.array(1.0)))
assert jnp.array(1.0).dtype == jnp.float32

# %% [markdown]
# Second, `jax.nn` holds functions that neural networks need and numpy lacks. The one that you will
# see most is `jax.nn.softmax`, which turns numbers into positive weights that add up to one.
# [Chapter 1](01_attention_without_weights.ipynb) derives it.

# %%
weights = jax.nn.softmax(jnp.array([1.0, 2.0, 3.0]))
print(weights, "sum", weights.sum())
same(weights.sum(), 1.0)
assert (weights > 0).all()

# %% [markdown]
# > **Try it.** Replace the whole first row of `a` with zeros: `a.at[0].set(0.0)`. What does
# > `a.at[0].add(10.0)` do?
#
# <details><summary>Answer</summary>
#
# ```python
# same(a.at[0].set(0.0), [[0.0, 0.0], [3.0, 4.0]])
# same(a.at[0].add(10.0), [[11.0, 12.0], [3.0, 4.0]])
# assert a[0, 0] == 1.0
# ```
#
# `add` adds 10 to each number of the first row. Both return a new array, and `a` stays as it was.
#
# </details>
#
# ## Random numbers from keys
#
# numpy keeps a hidden random state that changes with each draw. JAX has no hidden state. You make
# a **key** from a seed with `jax.random.key`, and hand it to the function that draws. The same key
# always gives the same numbers. Here `jax.random.normal` draws from the normal distribution.

# %%
key = jax.random.key(0)
first = jax.random.normal(key, (3,))
print(first)
assert (jax.random.normal(key, (3,)) == first).all()

# %% [markdown]
# So use a key once. When you need other numbers, make new keys from it with `jax.random.split`.
# The other distributions work alike, for instance `jax.random.uniform` and
# `jax.random.bernoulli` (True or False).

# %%
key_1, key_2 = jax.random.split(key)
print(jax.random.normal(key_1, (3,)))
print(jax.random.uniform(key_2, (3,)))
assert (jax.random.normal(key_1, (3,)) != first).all()

# %% [markdown]
# > **Try it.** Draw from `key_1` twice. Then split `key_1`, and draw from both halves.
#
# <details><summary>Answer</summary>
#
# ```python
# assert (jax.random.normal(key_1, (3,)) == jax.random.normal(key_1, (3,))).all()
# left, right = (jax.random.normal(half, (3,)) for half in jax.random.split(key_1))
# assert (left != right).all() and (left != jax.random.normal(key_1, (3,))).all()
# ```
#
# The two draws from `key_1` are equal. The halves are two new keys. Each gives numbers of its own,
# and neither gives those of `key_1`.
#
# </details>
#
# ## Gradients
#
# Learning means: change the parameters so that one number, the **loss**, becomes smaller. For that
# you need the slope of the loss in the direction of each parameter. These slopes together are the
# **gradient**. `jax.grad` takes a function that returns one number, and returns the function that
# computes its gradient.


# %%
def loss(w):
    return ((w - 3.0) ** 2).sum()


slope = jax.grad(loss)
print(slope(jnp.array([0.0, 3.0, 5.0])))
same(slope(jnp.array([0.0, 3.0, 5.0])), [-6.0, 0.0, 4.0])  # 2 (w - 3)

# %% [markdown]
# `jax.value_and_grad` returns the loss as well, which is free, since it has to be computed anyway.
# If a function returns many numbers, `jax.jacobian` gives the slope of each of them.

# %%
value, gradient = jax.value_and_grad(loss)(jnp.array([0.0, 5.0]))
print(value, gradient)
print(jax.jacobian(lambda w: w**2)(jnp.array([1.0, 2.0, 3.0])))

# %% [markdown]
# Is it right? A gradient can always be checked against a small step to either side. Let us do so
# for a function that nobody wants to differentiate by hand. (`jax.vmap` runs the slope at all 200
# places at once. It is explained below.)


# %%
def wild(w):
    return jnp.sin(w**2) * jnp.exp(-w)


w = jnp.linspace(0.0, 3.0, 200)
by_steps = (wild(w + 1e-3) - wild(w - 1e-3)) / 2e-3
by_jax = jax.vmap(jax.grad(wild))(w)
same(by_jax, by_steps, within=1e-2)

# %%
fig, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
ax.plot(w, wild(w), label="the function")
ax.plot(w, by_jax, color="tab:orange", label="its slope, by jax.grad")
ax.plot(w[::10], by_steps[::10], "k.", label="its slope, by small steps")
ax.set_title("The slope by jax.grad is the slope by small steps")
ax.legend(loc="lower left")
plt.show()

# %% [markdown]
# One condition comes with gradients, compiling and batches alike: your function should be
# **pure**. It computes its result from its arguments and changes nothing outside. Arrays that do
# not change and keys that you hand over make that easy.
#
# ## Compiling with jit
#
# Python runs a function one operation at a time. `jax.jit` returns a compiled version: on the
# first call JAX runs the function once with stand-ins for the arrays, notes down every operation
# (this is called **tracing**), and compiles the whole list. A `print` inside shows it: it runs
# while JAX traces, and never again for arrays of the same shape.


# %%
@jax.jit
def normalised(v):
    print("tracing with", v.shape)
    return (v - v.mean()) / v.std()


for seed in range(3):
    normalised(jax.random.normal(jax.random.key(seed), (5,)))
_ = normalised(jnp.arange(8.0))
# %% [markdown]
# Two shapes, two traces, although the function ran four times. While tracing, the shapes are
# known, and the numbers are not. So `if v.shape[0] > 3:` is fine under `jit`, and `if v[0] > 3:`
# raises an error. Use `jnp.where` there.
#
# `jax.make_jaxpr` shows the list of operations.

# %%
print(jax.make_jaxpr(lambda v: 2 * v + 1)(jnp.arange(4.0)))

# %% [markdown]
# JAX starts work and returns at once, before the result is there. When you time something, wait
# for it with `jax.block_until_ready`. Printing an array waits too.
#
# ## A batch with vmap
#
# You write a function for one sentence, and later you have thirty. `jax.vmap` returns a version
# with one more axis in front of each argument and of the result. It is a loop that runs as one
# operation.


# %%
def pairs(x):  # T D
    return x @ x.T  # T T


batch = jax.random.normal(jax.random.key(0), (30, 6, 3))  # B T D
print(pairs(batch[0]).shape, jax.vmap(pairs)(batch).shape)
same(jax.vmap(pairs)(batch), jnp.stack([pairs(x) for x in batch]))

# %% [markdown]
# The comments at line ends are shapes, with a letter for each axis. These letters are the same in
# all chapters: `B` sentences in a batch, `T` tokens in a sentence, `D` numbers for each token.
#
# `jax.grad`, `jax.jit` and `jax.vmap` all take a function and return a function, so you can put
# them inside each other.

# %%
chain = {
    "f\none sentence to\none loss": (0, 0, "lightsteelblue"),
    "grad(f)\none sentence to\nits slopes": (2.2, 0, "navajowhite"),
    "vmap(grad(f))\na batch to the\nslopes of each": (4.4, 0, "navajowhite"),
    "jit(vmap(grad(f)))\nthe same,\ncompiled": (6.6, 0, "lightsteelblue"),
}
f, of_one, of_batch, compiled = chain
arrows = [(f, of_one, "jax.grad"), (of_one, of_batch, "jax.vmap"), (of_batch, compiled, "jax.jit")]
diagram(chain, arrows, size=(8.6, 1.3))

# %% [markdown]
# > **Try it.** `jax.vmap(pairs, in_axes=1)(batch)` takes axis 1 as the batch. Which shape comes
# > out, and does it mean anything?
#
# <details><summary>Answer</summary>
#
# ```python
# other = jax.vmap(pairs, in_axes=1)(batch)
# assert other.shape == (6, 30, 30)
# same(other[0], batch[:, 0] @ batch[:, 0].T)
# ```
#
# The shape is `(6, 30, 30)`: for each of the six places, the products of the tokens that 30
# different sentences have there. These are proper numbers, but nobody asked for them. The sentences
# of a batch have nothing to do with each other.
#
# </details>
#
# ## A module
#
# A layer is a function with parameters. Flax keeps both together in a class that inherits from
# `nnx.Module`. `nnx.Param` marks an array as a parameter, something that training may change. You
# read and write its array with `[...]`. `nnx.Rngs(0)` is a box of keys made from the seed 0: each
# call of `rngs.params()` hands out a new one.


# %%
class MyLinear(nnx.Module):
    def __init__(self, inputs, outputs, *, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x):  # ... inputs
        return x @ self.kernel[...] + self.bias[...]  # ... outputs


mine = MyLinear(3, 2, rngs=nnx.Rngs(0))
print(mine(batch).shape)

# %% [markdown]
# Flax has this layer: `nnx.Linear`. With the same numbers in it, it gives the same result. (If
# you know PyTorch: `torch.nn.Linear` stores the transposed matrix, of shape (outputs, inputs).)

# %%
linear = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
linear.kernel[...], linear.bias[...] = mine.kernel[...], mine.bias[...]
same(linear(batch), mine(batch))

# %% [markdown]
# `nnx.state(module, nnx.Param)` collects the parameters of a module and of the modules inside it.
# It is a *tree*, which in JAX means nested containers with arrays at the ends. `jax.tree.leaves`
# lists these arrays. (`jax.tree.map` applies a function to each of them.)

# %%
leaves = jax.tree.leaves(nnx.state(linear, nnx.Param))
print([leaf.shape for leaf in leaves], sum(leaf.size for leaf in leaves), "numbers to learn")

# %% [markdown]
# A network is a module with modules in it. This one bends a line: two linear maps with `jnp.tanh`
# between them.


# %%
class Curve(nnx.Module):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(1, 32, rngs=rngs)
        self.down = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):  # B 1
        return self.down(jnp.tanh(self.up(x)))  # B 1


# %% [markdown]
# ## An optimizer
#
# We want the curve to go through some noisy points of a sine.

# %%
inputs = jnp.linspace(-3, 3, 60)[:, None]  # B 1
targets = jnp.sin(2 * inputs) + 0.1 * jax.random.normal(jax.random.key(2), inputs.shape)  # B 1


def mean_loss(model):
    return ((model(inputs) - targets) ** 2).mean()


# %% [markdown]
# Gradient descent moves each parameter a little against its slope. `optax.adam(0.03)` does the
# same with steps of better size, because it remembers the recent slopes of each parameter. The
# number 0.03 is the **learning rate**: it says about how far one step goes. `nnx.Optimizer` ties
# the optimizer to a model, and `wrt=nnx.Param` (with respect to) says what may change. For the
# picture at the end, `nnx.clone` keeps a copy of the model as it is now.

# %%
import optax

model = Curve(rngs=nnx.Rngs(0))
untrained = nnx.clone(model)
optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.Param)

# %% [markdown]
# One **training step** is: loss and gradient, then update. For modules
# you use `nnx.value_and_grad` and `nnx.jit`. They are `jax.value_and_grad` and `jax.jit` for
# functions that take modules, and `nnx.jit` also writes the new parameters back into the model.


# %%
@nnx.jit
def step(model, optimizer):
    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


losses = [float(step(model, optimizer)) for _ in range(1000)]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.02 < losses[0]

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.8), layout="constrained")
axes[0].plot(inputs, targets, "k.", label="points")
axes[0].plot(inputs, untrained(inputs), color="0.6", label="before")
axes[0].plot(inputs, model(inputs), color="tab:orange", label="after 1,000 steps")
axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
axes[1].semilogy(losses)
axes[1].set(xlabel="step", title="loss")
plt.show()

# %% [markdown]
# The loss ends near 0.01. That is the square of the noise, 0.1, and a smooth curve cannot do much
# better.
#
# ## In a nutshell
#
# | you want | numpy or PyTorch | here |
# | --- | --- | --- |
# | change an element | `a[0] = 1` | `a = a.at[0].set(1)` |
# | random numbers | `np.random.normal(size=3)` | `jax.random.normal(key, (3,))` |
# | a gradient | `loss.backward()` | `jax.grad(loss)(w)` |
# | speed | `torch.compile(f)` | `jax.jit(f)` |
# | a batch | a loop, or one more axis | `jax.vmap(f)` |
# | a layer | `torch.nn.Linear(3, 2)` | `nnx.Linear(3, 2, rngs=nnx.Rngs(0))` |
# | a step of training | `optimizer.step()` | `optimizer.update(model, gradients)` |
#
# ## Exercises
#
# **1.** Write `rows(x)`, which divides each row of a table by its sum, without changing the table
# that it was given. First for one table, then for a batch of tables with `jax.vmap`.
#
# <details><summary>Answer</summary>
#
# ```python
# def rows(x):  # T D
#     return x / x.sum(axis=-1, keepdims=True)
#
# tables = jax.random.uniform(jax.random.key(0), (4, 6, 3))
# same(jax.vmap(rows)(tables).sum(axis=-1), jnp.ones((4, 6)))
# ```
#
# Division makes a new array, so there is nothing to copy. Since it works on the last axis only,
# `rows(tables)` gives the same result without `jax.vmap`.
#
# </details>
#
# **2.** Train with plain gradient descent, without Optax: in each step set every parameter to
# itself minus 0.05 times its gradient. Is the loss after 1,000 steps as small as Adam's?
#
# <details><summary>Answer</summary>
#
# ```python
# plain = Curve(rngs=nnx.Rngs(0))
#
# @nnx.jit
# def descend(plain):
#     loss, gradients = nnx.value_and_grad(mean_loss)(plain)
#     new = jax.tree.map(lambda p, g: p - 0.05 * g, nnx.state(plain, nnx.Param), gradients)
#     nnx.update(plain, new)
#     return loss
#
# descents = [float(descend(plain)) for _ in range(1000)]
# print(f"{descents[-1]:.3f} against {losses[-1]:.3f}")
# assert descents[-1] > 3 * losses[-1]
# ```
#
# No, it is still more than three times as large. Every parameter moves in proportion to its own
# slope, so where the slope is small, nothing much happens for a long time. `nnx.update` writes new
# parameters into a module.
#
# </details>
#
# Next: [1. Attention without weights](01_attention_without_weights.ipynb)
