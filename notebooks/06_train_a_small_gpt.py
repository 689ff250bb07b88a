# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. Train a small GPT
#
# *21 minutes to read, 3 minutes to run on a quiet machine with two cores.*
# [The text](#The-text) ·
# [A first training](#A-first-training) ·
# [The model](#The-model) ·
# [Train](#Train) ·
# [What counting reaches](#What-counting-reaches) ·
# [Let it write](#Let-it-write) ·
# [What the heads look at](#What-the-heads-look-at) ·
# [Are the parts right?](#Are-the-parts-right?) ·
# [Ask PyTorch](#Ask-PyTorch) ·
# [Exercises](#Exercises)
#
# A language model guesses what comes next. Here we build one around the multi-head attention of
# [chapter 4](04_many_heads.ipynb) and train it on Python's own documentation, character by
# character.

# %%
import re
from collections import Counter
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np

# %%
behind = Counter(letter for page in topics.values() for letter in re.findall("th(.)", page))
letters, counts = zip(*behind.most_common(10), strict=True)
fig, ax = plt.subplots(figsize=(6, 2.2), layout="constrained")
ax.bar([letter.replace(" ", "space") for letter in letters], np.array(counts) / behind.total())
ax.set(ylabel="share", title='What follows "th" in the documentation of Python')
plt.show()

# %% [markdown]
# For two characters, counting is enough to guess the next one. A model learns it for whole
# paragraphs. There is no recurrent network any more.
#
# At the end you will understand
#
# * what a GPT is: embeddings, blocks of attention and a small network, one linear map at the end;
# * what "predict the next character" means as a loss, and which loss mere counting already reaches;
# * how to write a training step with Flax, Optax and `jit`, and let the trained model write;
# * how to show afterwards that a training run is right: 50 losses are those of the same model in
#   PyTorch, with the same weights, the same data and the same dropout masks.
#
# `climb` is a small file beside these notebooks. It draws boxes (`diagram`), compares two arrays
# (`same`), and says whether PyTorch is installed (`HAS_TORCH`).

# %%
from climb import HAS_TORCH, diagram, same

# %% [markdown]
# ## The text
#
# What `help("assert")` prints is stored in the standard library, in `pydoc_data.topics`. It is the
# language reference, cut into topics. Some paragraphs occur in several topics. We keep each one
# once. Otherwise the part that is held out for testing would have been seen in training. Tables
# drawn with bars are left out, and wide gaps are narrowed to eight spaces, because a model that
# looks back only 64 characters cannot count its way through them.

# %%
plain = str.maketrans(
    "\u2018\u2019\u201c\u201d\u2013\u2014\u2026", "''\"\"--."
)  # quotes, dashes, dots
everything = "\n\n".join(topics[name].strip() for name in sorted(topics)).translate(plain)
paragraphs = dict.fromkeys(everything.split("\n\n"))
prose = [p for p in paragraphs if not re.search(r"^ *[|+]", p, re.MULTILINE)]
text = re.sub(" {9,}", " " * 8, "\n\n".join(prose))

# %%
print(f"{len(everything):,} characters, {len(text):,} without repetitions and tables\n")
print("\n\n".join(prose[:6]))

# %% [markdown]
# A model sees numbers. Here each character is a token. Our alphabet is the line break and the 95
# printable characters of ASCII, so the model has the same size in every version of Python, although
# the text differs a little.

# %%
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
V = len(ALPHABET)
NUMBER = {character: number for number, character in enumerate(ALPHABET)}


# %%
def encode(text):
    return np.array([NUMBER[c] for c in text if c in NUMBER], dtype=np.int32)


# %%
def decode(numbers):
    return "".join(ALPHABET[n] for n in numbers)


# %%
data = encode(text)
held_out = int(0.95 * len(data))
training, testing = data[:held_out], data[held_out:]
assert decode(encode("import flax_attn")) == "import flax_attn"
print(encode("import"), f"{len(training):,} to learn from, {len(testing):,} to be tested on")

# %% [markdown]
# ## A first training
#
# The smallest model that can learn is a table: for each character a row of 96 scores for the next
# one. `nnx.Embed` is such a table. It takes seconds, and all that trains it will train the GPT.
#
# A batch is some windows of the text. The model reads all characters of a window but the last, and
# is asked for all but the first. Its loss is the mean of $-\log p$ of the characters that came,
# with the natural logarithm, whose unit is called *nat*:
#
# $$\mathrm{loss} = -\frac{1}{BT} \sum_{b,t} \log p(c_{b,t+1} \mid c_{b,1} \ldots c_{b,t})$$
#
# A model that knows nothing gives every character probability 1/96, and its loss is
# $\log 96 \approx 4.56$.


# %%
CONTEXT = 64  # characters of a window


def windows(data, count, rng):
    starts = rng.integers(len(data) - CONTEXT, size=count)
    return data[starts[:, None] + np.arange(CONTEXT + 1)]  # B T+1


# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx


def mean_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])
    return losses.mean()


# %% [markdown]
# `nnx.jit` compiles a step once, with gradient and optimizer. The optimizer is **AdamW**: it is
# Adam, and with each step all weights become a little smaller (*weight decay*).


# %%
@nnx.jit
def step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(mean_loss)(model, batch)
    optimizer.update(model, gradients)
    return loss


# %% [markdown]
# The learning rate rises for a while, because AdamW's first steps are taken on little evidence, and
# then sinks along a cosine.


# %%
STEPS, BATCH = 1600, 16


def train(model, steps, watch=None):
    """Trains on windows of the text, and returns the loss of each step."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 20, steps, end_value=1e-4)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.01)
    optimizer, rng = nnx.Optimizer(model, adamw, wrt=nnx.Param), np.random.default_rng(0)
    curve = []
    model.train()
    for number in range(1, steps + 1):
        curve.append(step(model, optimizer, windows(training, BATCH, rng)))
        if watch and number % 20 == 0:
            watch(number, float(curve[-1]))
    model.eval()
    return np.array(curve)


# %%
table = nnx.Embed(V, V, rngs=nnx.Rngs(0))
curve = train(table, STEPS)
for number in (1, 100, 400, STEPS):
    print(f"step {number:4}: loss {curve[number - 1]:.2f}")

# %% [markdown]
# The loss falls, and soon stops: a table sees one character and no more. For the next model, keep
# everything, and put a GPT in the place of the table.
#
# ## The model
#
# Each character becomes a vector that says what it is and at which place it is:
#
# $$x_t = E_{c_t} + P_t$$
#
# $E$ has a row for each character of the alphabet and $P$ has one for each place, and both are
# learned. Without $P$ the past would be a bag of characters ([Positions](positions.ipynb)). The
# number of places is the **context length**: the model reads at most 64 characters at once.
#
# Then come a few **blocks**. In each of them, attention moves information between places, and a
# small network, called feed-forward, works on every place by itself. Both add to $x$ and do not
# replace it:
#
# $$x \leftarrow x + \mathrm{attention}(\mathrm{norm}(x)), \qquad
# x \leftarrow x + W_2\, \mathrm{gelu}(W_1\, \mathrm{norm}(x))$$
#
# The **norm** (`nnx.LayerNorm`) brings the numbers of each vector to mean 0 and standard deviation
# 1. **gelu** lets large positive numbers pass, and turns strongly negative ones to almost nothing.
# Their formulas come [after the training](#Are-the-parts-right?).
#
# A last norm and a last linear map give one score to each character of the alphabet. The softmax of
# these scores is the prediction.

# %%
blue, orange, green = "lightsteelblue", "navajowhite", "palegreen"
diagram(
    {
        "characters\n+ places": (0, 0, blue),
        "norm": (1.5, 0.7, orange),
        "attention": (2.9, 0.7, green),
        "+": (3.9, 0, "white"),
        "norm ": (4.9, 0.7, orange),
        "feed-forward": (6.4, 0.7, green),
        "+ ": (7.6, 0, "white"),
        "norm, linear,\nsoftmax": (9.1, 0, blue),
    },
    [
        *[("characters\n+ places", "norm"), ("norm", "attention"), ("attention", "+")],
        *[("characters\n+ places", "+"), ("+", "norm "), ("norm ", "feed-forward")],
        *[("feed-forward", "+ "), ("+", "+ "), ("+ ", "norm, linear,\nsoftmax")],
    ],
    title="One block, between the embeddings and the prediction. A GPT has several",
)

# %% [markdown]
# As classes. (`**types` passes on the dtype of the parameters. We will need it to compute in
# float64.)

# %%
from flax_attn import MultiHeadAttention

WIDTH, HEADS, BLOCKS = 96, 4, 2


class Block(nnx.Module):
    def __init__(self, rate, *, rngs, **types):
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs, **types)
        self.attention = MultiHeadAttention(
            WIDTH, WIDTH, CONTEXT, rate, num_heads=HEADS, rngs=rngs, **types
        )
        self.dropout1 = nnx.Dropout(rate, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs, **types)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, **types)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, **types)
        self.dropout2 = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):  # B T D
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.down(nnx.gelu(self.up(self.norm2(x)))))


# %%
class GPT(nnx.Module):
    def __init__(self, rate=0.0, *, rngs, **types):
        self.characters = nnx.Embed(V, WIDTH, rngs=rngs, **types)
        self.places = nnx.Embed(CONTEXT, WIDTH, rngs=rngs, **types)
        self.blocks = nnx.List([Block(rate, rngs=rngs, **types) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs, **types)
        self.scores = nnx.Linear(WIDTH, V, use_bias=False, rngs=rngs, **types)

    def __call__(self, tokens):  # B T
        x = self.characters(tokens) + self.places(jnp.arange(tokens.shape[-1]))  # B T D
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))  # B T V


# %%
model = GPT(rngs=nnx.Rngs(0))
size = sum(parameter.size for parameter in jax.tree.leaves(nnx.state(model, nnx.Param)))
print(f"{size:,} parameters; the smallest GPT-2 has 124 million")

# %% [markdown]
# ## Train
#
# The same `train` now takes the GPT. The text is read about five times. That is too little for a
# quarter of a million weights to learn it by heart, so this run needs no dropout.

# %%
from IPython.display import display
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

columns = "[progress.description]loss {task.fields[loss]:.2f}", "step {task.completed}/{task.total}"
bar = Progress(TextColumn(columns[0]), BarColumn(50), TextColumn(columns[1]), TimeElapsedColumn())
task = bar.add_task("", total=STEPS, loss=np.log(V))
display(bar, display_id="training")


# %%
def watch(number, loss):
    bar.update(task, completed=number, loss=loss)
    display(bar, display_id="training", update=True)


untrained = nnx.clone(model)
curve = train(model, STEPS, watch)
for number in (1, 100, 400, STEPS):
    print(f"step {number:4}: loss {curve[number - 1]:.2f}")

# %% [markdown]
# ## What counting reaches
#
# Is that good? A model that knows nothing has the loss 4.56. A model that has counted how often
# each character occurs does better. A model that has counted which character follows which does
# better again, and it is what the table above has learned. These are the three marks that attention
# has to beat, on the text that was held out.

# %%
single = np.bincount(training, minlength=V) + 1.0  # everything has been seen once
pairs = np.ones((V, V))
np.add.at(pairs, (training[:-1], training[1:]), 1)
follows = pairs / pairs.sum(axis=1, keepdims=True)

# %%
knows_nothing = np.log(V)
counts_characters = -np.log(single / single.sum())[testing].mean()
counts_pairs = -np.log(follows)[testing[:-1], testing[1:]].mean()
assert counts_pairs < counts_characters < knows_nothing
print(f"{knows_nothing:.2f}, {counts_characters:.2f}, {counts_pairs:.2f} nats a character")

# %% [markdown]
# A model that had learned its text by heart would be much worse on the text that was held out. This
# one is a little worse there than on the text that it has read, and far better than counting.

# %%
every = testing[: len(testing) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)


def held_out_loss(model):
    return float(nnx.jit(mean_loss)(model, every))


# %%
assert abs(held_out_loss(table) - counts_pairs) < 0.05  # the table has learned to count pairs
tested = held_out_loss(model)
trained = curve[-100:].mean()
assert trained < tested + 0.1 and tested < trained + 0.5
assert tested < counts_pairs - 0.6
print(f"{trained:.2f} nats a character at the end of training, {tested:.2f} on the held-out text;")
print(f"counting pairs gave {counts_pairs:.2f}")

# %%
smooth = np.convolve(curve, np.ones(20) / 20, mode="valid")
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(curve, color="tab:blue", alpha=0.25, linewidth=0.7)
ax.plot(np.arange(len(smooth)) + 19, smooth, color="tab:blue", label="training, mean of 20 steps")
ax.plot(STEPS, tested, "o", color="tab:red", label="held-out text")
for level, name in [
    (knows_nothing, "knows nothing"),
    (counts_characters, "has counted characters"),
    (counts_pairs, "has counted pairs"),
]:
    ax.axhline(level, color="0.6", linewidth=0.8, linestyle="--")
    ax.text(STEPS, level + 0.04, name, ha="right", color="0.4")
ax.set(xlabel="step", ylabel="nats a character", ylim=(1, 5))
ax.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.8))
plt.show()

# %% [markdown]
# > **Try it.** Print the five characters that most often follow a "q".
#
# <details><summary>Answer</summary>
#
# ```python
# after_q = pairs[NUMBER["q"]] - 1  # without the one that each pair began with
# for number in after_q.argsort()[::-1][:5]:
#     print(repr(ALPHABET[number]), int(after_q[number]))
# assert ALPHABET[after_q.argmax()] == "u"
# ```
#
# In English a "u" follows almost every "q". Here it is 317 times a "u", 12 times an underscore, in
# `__eq__`, and hardly ever anything else. (The counts differ a little between versions of Python.)
#
# </details>

# %% [markdown]
# ## Let it write
#
# Give the model 64 characters, draw the next one from its probabilities, move the window by one,
# and so on. Dividing the scores by a *temperature* below 1 makes likely characters more likely.
# (This computes all 64 characters again for each new one. Real models keep the keys and values of
# the past, in a *cache*.)


# %%
@nnx.jit(static_argnames="length")
def write(model, window, key, length=420, temperature=0.6):
    def one(window, key):
        scores = model(window[None])[0, -1] / temperature
        new = jax.random.categorical(key, scores)
        return jnp.append(window[1:], new), new

    return jax.lax.scan(one, window, jax.random.split(key, length))[1]


# %%
import textwrap


def show(text):
    print("\n".join(textwrap.fill(line, 90) for line in text.split("\n")))


# %%
prompt = "The value of the expression is a new object. If it has a method of that name, "
window = jnp.asarray(encode(prompt)[-CONTEXT:])
untrained.eval()
show("BEFORE\n" + decode(write(untrained, window, jax.random.key(1), length=120)))

# %%
sample = decode(write(model, window, jax.random.key(1)))
show("AFTER\n" + prompt + sample)

# %% [markdown]
# A model that has only counted pairs writes this:

# %%
draw, counted = np.random.default_rng(1), [NUMBER[" "]]
for _ in range(420):
    likely = follows[counted[-1]] ** (1 / 0.6)  # the same temperature
    counted.append(draw.choice(V, p=likely / likely.sum()))
counted = decode(counted)
show(counted)

# %% [markdown]
# Does the sample read like the documentation? A count can tell: how many of its words are words of
# the documentation?

# %%
known = set(re.findall(r"[a-z]{3,}", text.lower()))


# %%
def share_known(sample):
    return np.mean([word in known for word in re.findall(r"[a-z]{3,}", sample.lower())])


# %%
longer = decode(write(model, window, jax.random.key(2), length=2000))
print(f"model {share_known(longer):.0%}, pairs {share_known(counted):.0%}")
assert share_known(longer) > 0.75 > share_known(counted)

# %% [markdown]
# > **Try it.** Write with `temperature=0.1` and with `temperature=2.0`. (Call `write` with it.)
#
# <details><summary>Answer</summary>
#
# ```python
# share = {}
# for temperature in (0.1, 2.0):
#     sample = decode(write(model, window, jax.random.key(1), length=2000, temperature=temperature))
#     show(f"{temperature}: {sample[:200]}")
#     share[temperature] = share_known(sample)
# print(share)
# assert share[0.1] > share_known(longer) > share[2.0]
# ```
#
# At 0.1 the likeliest character is drawn nearly always. Every word is known, but the text soon
# walks in a circle: *the statement the statement the statement*. At 2.0 unlikely characters come so
# often that only about one word in seven is known. In between there is a text that is neither dull
# nor broken.
#
# </details>
#
# ## What the heads look at
#
# `attention_weights` gives the weights for any queries and keys. We take both from the trained
# layers, for one line of text. For each head we ask how much of its weight goes to the character
# before, to the one before that, and to spaces. The heads with the largest shares are drawn: one
# row for each character that looks, dark where it looks.


# %%
from flax_attn import CAUSAL, attention_weights


def weights_of_all_heads(model, tokens):
    x, found = model.characters(tokens) + model.places(jnp.arange(len(tokens))), []  # T D
    for block in model.blocks:
        layer, normed = block.attention, block.norm1(x)
        q, k = layer.W_query(normed), layer.W_key(normed)
        q, k = (part.reshape(len(tokens), HEADS, -1) for part in (q, k))  # T N H
        found.append(attention_weights(q, k, mask=CAUSAL))  # N T T
        x = block(x)
    return np.concatenate(found)  # all heads of all blocks


# %%
line = "the first argument of the method"
weights = weights_of_all_heads(model, jnp.asarray(encode(line)))
goes_to = {
    "one back": weights.diagonal(-1, 1, 2).mean(axis=1),
    "two back": weights.diagonal(-2, 1, 2).mean(axis=1),
    "spaces": weights[:, 4:, [c == " " for c in line]].sum(axis=2).mean(axis=1),
}
assert goes_to["one back"].max() > 0.5

# %%
fig, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
for ax, (name, share) in zip(axes, goes_to.items(), strict=True):
    block, head = divmod(int(share.argmax()), HEADS)
    ax.imshow(weights[share.argmax()], cmap="Blues", vmin=0, vmax=1)
    ax.set_xticks(range(len(line)), line.replace(" ", "\u00b7"), fontsize=7)
    ax.set_yticks(range(len(line)), line.replace(" ", "\u00b7"), fontsize=7)
    ax.set(title=f"{name}: {share.max():.0%} of block {block + 1}, head {head + 1}")
    ax.set(xlabel="is looked at", ylabel="looks")
plt.show()

# %% [markdown]
# Nobody asked for a head that copies the character before. A model that only counts pairs knows one
# character. A head like this gives the next block the second one. The last picture is less clear:
# this head gives much of its weight to spaces, where words begin and end, and not always to the
# nearest one.
#
# > **Try it.** Choose another `line`. Does the head that looks one back still do so?
#
# <details><summary>Answer</summary>
#
# ```python
# line = "a list of the names of all modules"
# again = weights_of_all_heads(model, jnp.asarray(encode(line))).diagonal(-1, 1, 2).mean(axis=1)
# same_head = goes_to["one back"].argmax()
# print(f"{goes_to['one back'][same_head]:.0%} before, {again[same_head]:.0%} now")
# assert again[same_head] > 0.3 and again.argmax() == same_head
# ```
#
# Yes, it is the same head: some 80 % of its weight goes one back, in the first line and in this
# one. It does not look for certain characters. It looks for a place.
#
# </details>
#
# ## Are the parts right?
#
# These are the formulas of the two small parts. The norm has a learned factor $g$ and offset $b$
# for each number, and gelu is smooth where other functions have a corner:
#
# $$\mathrm{norm}(x) = g \odot \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + 10^{-5}}} + b,
# \qquad \mathrm{gelu}(u) \approx \tfrac{u}{2}
# \Big(1 + \tanh\big(\sqrt{2/\pi}\,(u + 0.0447\, u^3)\big)\Big)$$

# %%
numbers = jax.random.normal(jax.random.key(3), (5, WIDTH))
layer, centred = model.norm, numbers - numbers.mean(-1, keepdims=True)
normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
same(layer(numbers), layer.scale[...] * normed + layer.bias[...])
cubic = np.sqrt(2 / np.pi) * (numbers + 0.044715 * numbers**3)
same(nnx.gelu(numbers), numbers / 2 * (1 + jnp.tanh(cubic)))

# %% [markdown]
# [Chapter 3](03_looking_back_only.ipynb) promised that a causal mask hides the future. That is
# worth a test in the whole model: if a character changes, nothing before it may change, not by one
# bit. This is why one pass over 64 characters gives 64 predictions at once, and none of them has
# seen its answer.

# %%
here = jnp.asarray(training[:CONTEXT])[None]
other = here.at[0, 40].set(NUMBER["?"])
before, after = model(here), model(other)
assert np.array_equal(before[:, :40], after[:, :40])
assert not np.array_equal(before[:, 40:], after[:, 40:])

# %% [markdown]
# ## Ask PyTorch
#
# A wrong training step often trains too, only worse, and nobody notices. Was ours right? We take
# the same `step` for a short run that can be checked number by number: 50 steps here, and 50 steps
# of a model of the same sizes in PyTorch. Three things must be the same in both.
#
# * **The weights.** `port` copies them.
# * **The data.** We take a short text, written out below, so that it is the same in every Python.
# * **The dropout masks.** The two libraries never draw the same random numbers. So JAX draws, and
#   PyTorch is given what was drawn.
#
# We compute in float64. There the only difference left is the order of additions, and it shows in
# the sixteenth digit.

# %%
RATE = 0.1
EXCERPT = """\
Assert statements are a convenient way to insert debugging assertions into a program. The simple
form, "assert expression", is equivalent to "if __debug__: if not expression: raise AssertionError".
The extended form, "assert expression1, expression2", is equivalent to "if __debug__: if not
expression1: raise AssertionError(expression2)". These equivalences assume that "__debug__" and
"AssertionError" refer to the built-in variables with those names. In the current implementation,
the built-in variable "__debug__" is "True" under normal circumstances, "False" when optimization is
requested. Assignments to "__debug__" are illegal. The value for the built-in variable is determined
when the interpreter starts.
"""
rng = np.random.RandomState(0)
starts = rng.randint(len(EXCERPT) - CONTEXT, size=(50, 4))
batches = encode(EXCERPT)[starts[..., None] + np.arange(CONTEXT + 1)]  # 50 batches, B T+1
print(batches.shape, repr(decode(batches[0, 0])))

# %% [markdown]
# How do we find out what a dropout is going to draw? We copy the model with its random state, and
# send ones through each dropout of the copy. What comes back as zero will be dropped.


# %%
def keep_masks(model, batch):
    masks = {}
    for path, part in nnx.iter_modules(nnx.clone(model)):
        if isinstance(part, nnx.Dropout):
            B, T = batch[:, :-1].shape
            shape = (B, HEADS, T, T) if "attention" in path else (B, T, WIDTH)
            masks[".".join(map(str, path))] = np.asarray(part(jnp.ones(shape)) > 0)
    return masks


# %%
with jax.enable_x64(True):
    ours = GPT(RATE, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    beginning = nnx.clone(ours)  # the weights that PyTorch will start from
    optimizer = nnx.Optimizer(ours, optax.adamw(1e-3, weight_decay=0.01), wrt=nnx.Param)
    masks, losses = [], []
    for batch in batches:
        masks.append(keep_masks(ours, batch))
        losses.append(float(step(ours, optimizer, batch)))

# %%
kept = np.mean(np.concatenate([mask.ravel() for mask in masks[0].values()]))
assert abs(kept - (1 - RATE)) < 0.01
print(f"{len(masks[0])} masks a step, {kept:.1%} kept; loss {losses[0]:.3f} to {losses[-1]:.3f}")

# %% [markdown]
# The next cells hold the same model in PyTorch. The names are those of our model, so `port` needs
# no rule. They do nothing where PyTorch is not installed.

# %%
if HAS_TORCH:
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, gelu

    from torch_ref import multi_head

    class TorchBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(WIDTH)
            self.attention = multi_head.MultiHeadAttention(
                WIDTH, WIDTH, CONTEXT, RATE, num_heads=HEADS
            )
            self.dropout1 = nn.Dropout(RATE)
            self.norm2 = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)
            self.dropout2 = nn.Dropout(RATE)

        def forward(self, x):
            x = x + self.dropout1(self.attention(self.norm1(x)))
            return x + self.dropout2(self.down(gelu(self.up(self.norm2(x)), approximate="tanh")))


# %%
if HAS_TORCH:

    class TorchGPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.characters = nn.Embedding(V, WIDTH)
            self.places = nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList([TorchBlock() for _ in range(BLOCKS)])
            self.norm = nn.LayerNorm(WIDTH)
            self.scores = nn.Linear(WIDTH, V, bias=False)

        def forward(self, tokens):
            x = self.characters(tokens) + self.places(torch.arange(tokens.shape[-1]))
            for block in self.blocks:
                x = block(x)
            return self.scores(self.norm(x))


# %%
from flax_attn.parity import compare, port

if HAS_TORCH:
    jax_gpt, torch_gpt = GPT(RATE, rngs=nnx.Rngs(0)), TorchGPT()
    tokens = batches[0, :2, :-1]
    report = compare(torch_gpt, jax_gpt, tokens, train=True, dtypes=("float64",), eager=False)
    assert report.ok
    print(report)

# %% [markdown]
# That was one forward and one backward pass with dropout: every intermediate value and every
# gradient. Now the 50 steps. Where PyTorch is missing, the losses that it gave once are written
# down here. They belong to the weights and masks that JAX drew then. If a future JAX draws
# different numbers, the checksums `DRAWN` will not match, and then only a live PyTorch can answer.

# %%
# fmt: off
RECORDED = [
    5.02316255, 4.27921630, 3.89891691, 3.70362295, 3.63025164, 3.40112359, 3.43388593, 3.34245777,
    3.32225690, 3.16044836, 3.25316978, 3.11865201, 3.09910070, 3.07815663, 2.98927457, 2.99421547,
    2.89639452, 2.86576261, 2.77587313, 2.72886515, 2.78517894, 2.78683067, 2.76419789, 2.52981674,
    2.50269311, 2.66659017, 2.66035812, 2.42353330, 2.36871716, 2.52261795, 2.38074721, 2.38851806,
    2.39000649, 2.32465649, 2.17098834, 2.46693304, 2.28504442, 2.13951066, 2.35586998, 2.29486976,
    2.29794296, 2.07377297, 2.14470768, 2.02897636, 2.14541518, 2.26012176, 2.16966346, 2.14457120,
    2.22998372, 2.22702333,
]
# fmt: on
DRAWN = 10_323_728, 478.6653769  # places kept in all masks, sum of all starting weights
places_kept = sum(mask.sum() for handed in masks for mask in handed.values())
weights = jax.tree.leaves(nnx.state(beginning, nnx.Param))
on_record = np.allclose((places_kept, sum(np.asarray(one).sum() for one in weights)), DRAWN)
print("the weights and masks are", "those on record" if on_record else "not those on record")

# %%
if HAS_TORCH:

    class HandedDropout(nn.Module):
        def forward(self, x):
            return x * torch.tensor(self.keep) / (1 - RATE)

    theirs = TorchGPT().double()
    dropouts = [name for name, part in theirs.named_modules() if isinstance(part, nn.Dropout)]
    for name in dropouts:
        theirs.set_submodule(name, HandedDropout())
    port(beginning, theirs)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.01)

    torch_losses = []
    for batch, handed in zip(batches, masks, strict=True):
        for name in dropouts:
            theirs.get_submodule(name).keep = handed[name]
        tokens = torch.tensor(batch).long()
        loss = cross_entropy(theirs(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        torch_losses.append(loss.item())

    np.testing.assert_allclose(losses, torch_losses, rtol=1e-12)
else:
    torch_losses = RECORDED

# %%
if on_record:
    np.testing.assert_allclose(losses, RECORDED)
largest = np.abs(np.subtract(losses, torch_losses)).max()
print(f"largest difference {largest:.0e}", "" if HAS_TORCH else "(eight places were written down)")

# %%
fig, (above, below) = plt.subplots(
    2, 1, figsize=(7, 3.8), sharex=True, height_ratios=(3, 2), layout="constrained"
)
above.plot(torch_losses, "o", color="tab:orange", markersize=4, label="PyTorch")
above.plot(losses, color="tab:blue", linewidth=1, label="this model")
above.set(ylabel="loss", title="The first 50 losses, twice")
above.legend(frameon=False)
below.semilogy(np.abs(np.subtract(losses, torch_losses)) + 1e-17, ".", color="tab:red")
below.set(xlabel="step", ylabel="difference", ylim=(1e-17, 1e-6))
below.axhline(np.finfo(np.float64).eps, color="0.6", linewidth=0.8)
below.text(49, 1e-9, "grey line: the last digit of float64", ha="right", color="0.4")
below.text(49, 1e-12, "at the bottom: no difference at all", ha="right", color="0.4")
plt.show()

# %% [markdown]
# Two lines could not be told apart, so one of them is drawn as dots. The training step is right,
# with dropout and optimizer, and what was trained above is what PyTorch would have trained.
#
# ## Exercises
#
# **1.** Take the attention out: write a `Block` whose `__call__` has no line with `self.attention`,
# and train again. What loss do you expect on the held-out text? Which of the three counting losses
# is the right one to compare with? (300 steps are enough to see it.)
#
# <details><summary>Answer</summary>
#
# ```python
# class NoAttention(Block):
#     def __call__(self, x):  # B T D
#         return x + self.dropout2(self.down(nnx.gelu(self.up(self.norm2(x)))))
#
#
# blind = GPT(rngs=nnx.Rngs(0))
# blind.blocks = nnx.List([NoAttention(0.0, rngs=nnx.Rngs(n)) for n in range(BLOCKS)])
# train(blind, 300)
# loss = held_out_loss(blind)
# print(f"without attention {loss:.2f}, counting pairs {counts_pairs:.2f}")
# assert abs(loss - counts_pairs) < 0.1
# ```
#
# Without attention no place gets anything from another. The model sees one character and its place
# in the window, and the place says nothing. So it can learn what counting pairs knows, and no more:
# all 1600 steps lead to 2.56 nats, where counting gave 2.57. Everything better than that came
# through attention.
#
# </details>
#
# **2.** Take the places out: write a `GPT` whose `__call__` leaves out `self.places(...)`, and
# train again. Is the model now as blind to order as the layer of chapter 1? Guess first.
#
# <details><summary>Answer</summary>
#
# ```python
# class NoPlaces(GPT):
#     def __call__(self, tokens):  # B T
#         x = self.characters(tokens)  # B T D
#         for block in self.blocks:
#             x = block(x)
#         return self.scores(self.norm(x))  # B T V
#
#
# lost, whole = NoPlaces(rngs=nnx.Rngs(0)), GPT(rngs=nnx.Rngs(0))
# train(lost, 300), train(whole, 300)
# with_places, without = held_out_loss(whole), held_out_loss(lost)
# print(f"300 steps: {with_places:.2f} with places, {without:.2f} without")
# assert with_places < without - 0.1 < counts_pairs - 0.1
# ```
#
# Not quite. After all 1600 steps the loss on the held-out text is 2.18 nats: much worse than with
# places, and better than the 2.57 of counting pairs. The causal mask itself tells places apart: the
# first character sees one token, the second sees two, and so on. So two blocks can work out
# something about the order. Without the mask they could not.
#
# </details>
#
# **To read:** Radford and others,
# [Language models are unsupervised multitask learners](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)
# (GPT-2); Andrej Karpathy, [Let's build GPT](https://www.youtube.com/watch?v=kCc8FmEb1nY); Olsson
# and others, [In-context learning and induction heads](https://arxiv.org/abs/2209.11895), on what
# such heads do.
#
# Next: [7. Port a real model](07_port_a_real_model.ipynb), with weights that somebody else trained.
