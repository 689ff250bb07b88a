# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Before transformers
#
# Attention is older than transformers. It was found in 2014, by people who translated with
# recurrent networks and saw them fail on long sentences. This chapter goes back to that place.
#
# At the end you will understand
#
# * what an encoder and a decoder are, and why one vector between them is too narrow;
# * two ways to score how well a place of the input fits: a small network (Bahdanau) and a dot
#   product (Luong);
# * that nobody has to tell the model what belongs to what: it finds the alignment, and we can
#   look at it;
# * what happens to the same model without attention when the input grows.

# %%
import datetime
import importlib.util

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from flax_attn import BahdanauAttention, Lengths, LuongAttention
from flax_attn.parity import compare

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch_ref.bahdanau
    import torch_ref.luong

plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.titlesize": 10})
print("compared with", "PyTorch, live" if HAS_TORCH else "numbers that PyTorch gave once")

# %% [markdown]
# ## A small translation
#
# From English into a language that every reader knows: dates in words become dates in digits.
# English has several ways to say a date, and none of them is in the order of the digits.

# %%
ONES = (
    "- one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
ORDINALS = (
    "- first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth "
    "thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"
).split()
TENS = "- ten twenty thirty forty fifty sixty seventy eighty ninety".split()
ROUND = {20: "twentieth", 30: "thirtieth"}
MONTHS = (
    "january february march april may june july august september october november december"
).split()
WEEKDAYS = "monday tuesday wednesday thursday friday saturday sunday".split()


def cardinal(n):
    small = [ONES[n % 10]] if n % 10 else []
    return [ONES[n]] if n < 20 else [TENS[n // 10], *small]


def ordinal(n):
    return (
        [ORDINALS[n]] if n < 20 else [ROUND[n]] if n in ROUND else [TENS[n // 10], ORDINALS[n % 10]]
    )


def in_words(date, style):
    day, month, weekday = ordinal(date.day), MONTHS[date.month - 1], WEEKDAYS[date.weekday()]
    year = cardinal(date.year // 100) + cardinal(date.year % 100)
    return [
        ["the", *day, "of", month, *year],
        [month, "the", *day, *year],
        [weekday, *day, month, *year],
    ][style]


day = datetime.date(1984, 3, 22)
for style in range(3):
    print(f"{' '.join(in_words(day, style)):45} {day}")

# %% [markdown]
# A line has one, two or three dates, joined by "and": so the input can grow. Every fifth day of
# the calendar is kept for testing and never occurs in training.

# %%
CALENDAR = [
    datetime.date(year, 1, 1) + datetime.timedelta(days)
    for year in [*range(1910, 2000), *range(2010, 2100)]
    for days in range(365)
]
TRAINING = [date for date in CALENDAR if date.toordinal() % 5]
TESTING = [date for date in CALENDAR if date.toordinal() % 5 == 0]


def draw_line(rng, dates, count):
    words, digits = [], []
    for _ in range(count):
        date = dates[rng.integers(len(dates))]
        words += ["and"] * bool(words) + in_words(date, rng.integers(3))
        digits.append(str(date))
    return words, " ".join(digits)


for count in (1, 2, 3):
    words, digits = draw_line(np.random.default_rng(count), TRAINING, count)
    print(" ".join(words), "\n   ", digits)

# %% [markdown]
# Words go in as numbers, characters come out as numbers. A batch is a rectangle, so short lines
# are filled up with zeros, and we note how many words each line really has. Among the characters,
# 0 is the line break. So a short answer is filled up with line breaks, and they say "done".

# %%
WORDS = sorted({word for date in CALENDAR[::3] for s in range(3) for word in in_words(date, s)})
WORDS = ["(nothing)", "and", *WORDS]
CHARACTERS = "\n -0123456789"  # the line break stands before the first and after the last
MOST = 3  # dates in a line
S, T = 8 * MOST + MOST - 1, 11 * MOST
WORD = {word: number for number, word in enumerate(WORDS)}
CHARACTER = {character: number for number, character in enumerate(CHARACTERS)}


def as_arrays(lines):
    x, y = np.zeros((len(lines), S), np.int32), np.zeros((len(lines), T), np.int32)
    for b, (words, digits) in enumerate(lines):
        x[b, : len(words)] = [WORD[word] for word in words]
        y[b, : len(digits)] = [CHARACTER[character] for character in digits]
    return x, (x > 0).sum(axis=1), y  # B S, B, B T


def batch(rng, dates, size, count=None):
    counts = rng.integers(1, MOST + 1, size) if count is None else [count] * size
    return as_arrays([draw_line(rng, dates, n) for n in counts])


print(f"{len(WORDS)} words in, {len(CHARACTERS)} characters out; up to {S} words, {T} characters")

# %% [markdown]
# ## One vector between two networks
#
# A **recurrent network** reads one word after the other and keeps a **state**, a vector that it
# rewrites at each word. The kind we use is the GRU, *gated recurrent unit*. From a word's
# embedding $x$ and the state so far, $h$, it makes
#
# $$\mathrm{GRU}(x, h) = z \odot h + (1 - z) \odot n, \qquad
# n = \tanh(W x + r \odot U h).$$
#
# The new state is a mixture of the old one and of a proposal $n$, number by number ($\odot$). The
# gates $z$ and $r$ say how much is kept. Each number in them is between 0 and 1, made from $x$ and
# $h$ by further weights.
#
# As Bahdanau did, we take one that reads forwards and one that reads backwards:
#
# $$\overrightarrow h_i = \mathrm{GRU}(x_i, \overrightarrow h_{i-1}), \qquad
# \overleftarrow h_i = \mathrm{GRU}(x_i, \overleftarrow h_{i+1}), \qquad
# h_i = [\overrightarrow h_i; \overleftarrow h_i]$$
#
# This is the **encoder**. The **decoder** is a GRU that writes. Its state $s_t$ starts from what
# the encoder had in mind at its two ends, $\bar h = [\overrightarrow h_S; \overleftarrow h_1]$,
# and is rewritten at each character. So all that the decoder will ever know of the line is
# $\bar h$: one vector of fixed width, whether the line has five words or twenty-six. That is the
# bottleneck.

# %% [markdown]
# ## Look back instead
#
# The encoder's states $h_1 \ldots h_S$ are all still there. Before each character, let the
# decoder ask which of them it needs now:
#
# $$c_t = \sum_i a_{t,i}\, h_i, \qquad a_t = \mathrm{softmax}_i\ \mathrm{score}(s_t, h_i)$$
#
# You know this sum from [chapter 1](01_attention_without_weights.ipynb). What is new is that the
# one who asks, $s_t$, and those who are asked, $h_i$, come from two different sequences. Later
# this will be called **cross-attention**.
#
# Bahdanau (2014) let a small network with one hidden layer score the pair. Because $W_1 h$ and
# $W_2 s$ are added, it is called **additive**:
#
# $$\mathrm{score}(s, h) = v^\top \tanh(W_1 h + W_2 s)$$


# %%
def additive(layer, h, s):  # B S D, B T D
    sums = layer.W1(h)[:, None, :, :] + layer.W2(s)[:, :, None, :]  # B T S units
    return layer.v(jnp.tanh(sums))[..., 0]  # B T S


# %% [markdown]
# Luong (2015) took what chapter 1 took, a dot product. It has no weights of its own:
#
# $$\mathrm{score}(s, h) = s \cdot h$$


# %%
def dot(layer, h, s):
    return s @ h.mT  # B T S


# %% [markdown]
# The rest is the same for both. Words that are only filling get $-\infty$ and so the weight 0.
# The library is told how many words of each line are real by its mask `Lengths`.


# %%
def align(layer, score, h, s, lengths):
    filling = jnp.arange(h.shape[1]) >= lengths[:, None, None]  # B 1 S
    scores = jnp.where(filling, -jnp.inf, score(layer, h, s))
    return jax.nn.softmax(scores, axis=-1)  # B T S


# %% [markdown]
# These few lines are the library's `BahdanauAttention` and `LuongAttention`. We try both on two
# lines of seven words, where the last two words of the second line are filling.


# %%
def wave(*shape):  # some numbers that are the same everywhere
    return jnp.asarray(np.sin(np.arange(1.0, 1 + np.prod(shape)) ** 2).reshape(shape), jnp.float32)


h, s, lengths = wave(2, 7, 4), 2 * wave(2, 3, 4), jnp.array([7, 5])
bahdanau = BahdanauAttention(4, 4, 6, rngs=nnx.Rngs(0))
bahdanau.W1.kernel[...], bahdanau.W2.kernel[...] = wave(4, 6), wave(4, 6)[::-1]
bahdanau.v.kernel[...] = wave(6, 1)
luong = LuongAttention(4, 4, score="dot", rngs=nnx.Rngs(0))

for layer, score in [(bahdanau, additive), (luong, dot)]:
    weights = align(layer, score, h, s, lengths)
    assert (weights[1, :, 5:] == 0).all()
    np.testing.assert_allclose(weights @ h, layer(h, s, mask=Lengths(lengths)), rtol=1e-5)

# %% [markdown]
# And the library's layers are PyTorch's: in float64, with random weights, every step and every
# gradient is the same to 1e-12. Where torch is missing, the context vectors that it gave for the
# numbers above stand in.

# %%
from_torch = {
    bahdanau: [0.59581265, -0.35667265, -0.06449901, 0.61652229],
    luong: [0.59241931, -0.73515278, -0.14934346, -0.52125752],
}
for layer, context in from_torch.items():
    np.testing.assert_allclose(layer(h, s)[1, 2], context, rtol=1e-5)

if HAS_TORCH:
    twins = {
        bahdanau: torch_ref.bahdanau.BahdanauAttention(4, 4, 6),
        luong: torch_ref.luong.LuongAttention(4, 4, score="dot"),
    }
    for layer, twin in twins.items():
        report = compare(twin, layer, np.asarray(h), np.asarray(s))
        assert report.ok
        print(report)

# %% [markdown]
# ## The model
#
# One class for three models: no attention, additive, dot product. The only difference is where
# the context vector $c_t$ comes from: from an attention layer, or, where there is none, it is the
# summary $\bar h$ at every step. Then
#
# $$p(\text{character}_t) = \mathrm{softmax}(W_o \tanh(W_c [s_t; c_t])).$$
#
# (Bahdanau also feeds $c_t$ into the next state of the decoder. We leave that out, so all states
# of the decoder are known before the first look back, and one call does all looks at once.)

# %%
WIDTH = 64


class Translator(nnx.Module):
    def __init__(self, attention=None, *, rngs):
        half = WIDTH // 2
        self.words = nnx.Embed(len(WORDS), half, rngs=rngs)
        self.characters = nnx.Embed(len(CHARACTERS), half, rngs=rngs)
        forwards, backwards = (nnx.RNN(nnx.GRUCell(half, half, rngs=rngs)) for _ in range(2))
        self.encoder = nnx.Bidirectional(forwards, backwards)
        self.decoder = nnx.RNN(nnx.GRUCell(half, WIDTH, rngs=rngs))
        self.attention = attention
        self.mix = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, len(CHARACTERS), rngs=rngs)

    def encode(self, x, lengths):  # B S
        ends, h = self.encoder(self.words(x), seq_lengths=lengths, return_carry=True)
        return h, jnp.concatenate(ends, axis=-1)  # B S D, B D

    def scores(self, h, summary, s, lengths):
        if self.attention is None:
            context = jnp.broadcast_to(summary[:, None], s.shape)  # B T D
        else:
            context = self.attention(h, s, mask=Lengths(lengths))  # B T D
        mixed = jnp.tanh(self.mix(jnp.concatenate([s, context], axis=-1)))
        return self.out(mixed)  # B T characters

    def states(self, summary, y):
        before = jnp.pad(y[:, :-1], ((0, 0), (1, 0)))  # what was written so far: a line break first
        return self.decoder(self.characters(before), initial_carry=summary)  # B T D

    def __call__(self, x, lengths, y):
        h, summary = self.encode(x, lengths)
        return self.scores(h, summary, self.states(summary, y), lengths)


# %% [markdown]
# Three of them, and how many parameters they have. The comparison is fair: dot product attention
# adds not one. It is only a way to look.

# %%
looking = {
    "no attention": None,
    "additive": BahdanauAttention(WIDTH, WIDTH, WIDTH, rngs=nnx.Rngs(1)),
    "dot product": LuongAttention(WIDTH, WIDTH, score="dot", rngs=nnx.Rngs(1)),
}
models = {name: Translator(attention, rngs=nnx.Rngs(0)) for name, attention in looking.items()}
sizes = {
    name: sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    for name, model in models.items()
}
assert sizes["dot product"] == sizes["no attention"]
for name, size in sizes.items():
    print(f"{name:13} {size:,} parameters")

# %% [markdown]
# ## Train
#
# The decoder is shown the right characters so far, whatever it would have written itself, and
# asked for the next one. The loss is the mean of
#
# $$-\log p(\text{the right character}).$$
#
# It is 0 for whoever is sure and right, and $\log 13 \approx 2.56$ for whoever has no idea which
# of the 13 characters comes.
#
# All three start from the same weights and see the same lines. The optimizer is Adam of chapter
# 2. Its steps get smaller along a cosine, and a gradient longer than 1 is cut to length 1: it has
# come back through dozens of states, and may have grown on the way.


# %%
def mean_loss(model, x, lengths, y):
    scores = model(x, lengths, y)
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


@nnx.jit
def step(model, optimizer, x, lengths, y):
    loss, gradients = nnx.value_and_grad(mean_loss)(model, x, lengths, y)
    optimizer.update(model, gradients)
    return loss


# %%
STEPS, BATCH = 400, 64
LOOKS = (50, 100, STEPS)  # when we will look at the alignment


def train(model, steps=STEPS):
    rate = optax.cosine_decay_schedule(5e-3, steps)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    rng, losses, looks = np.random.default_rng(0), [], {}
    for number in range(1, steps + 1):
        losses.append(step(model, optimizer, *batch(rng, TRAINING, BATCH)))
        if number in LOOKS:
            looks[number] = nnx.clone(model)
    return np.array(losses), looks


# %%
curves, looks = {}, {}
for name, model in models.items():
    curves[name], looks[name] = train(model)
    print(f"{name:13} loss {curves[name][0]:.2f} -> {curves[name][-20:].mean():.4f}")

worst = max(curves[name][-20:].mean() for name in ("additive", "dot product"))
assert worst < 0.05 and curves["no attention"][-20:].mean() > 5 * worst

# %% [markdown]
# The model without attention is far behind. Perhaps it is only slower? We train it once more,
# from the start, with four times the steps.

# %%
models["no attention, 4 x the steps"] = patient = Translator(rngs=nnx.Rngs(0))
curves["no attention, 4 x the steps"], _ = train(patient, 4 * STEPS)
after = curves["no attention, 4 x the steps"][-20:].mean()
assert curves["no attention"][-20:].mean() > after > 5 * worst
print(f"loss after {4 * STEPS} steps: {after:.4f}")

# %%
COLORS = dict(zip(models, ("0.7", "tab:orange", "tab:blue", "0.4"), strict=True))
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, curve in curves.items():
    mean = np.convolve(curve, np.ones(10) / 10, mode="valid")
    ax.semilogy(mean, color=COLORS[name], label=name)
ax.set(xlabel="step", ylabel="loss", title="Training, mean of 10 steps")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What it looks at
#
# Nobody told the model which word belongs to which digit. The weights $a_{t,i}$ show what it
# found: one column for each character it writes, one row for each word, dark where it looks.

# %%
words = (
    "the twenty second of march nineteen eighty four and december the thirteenth twenty sixty one"
).split()
digits = "1984-03-22 2061-12-13"
line = as_arrays([(words, digits)])


def alignment(model, score, x, lengths, y):
    h, summary = model.encode(x, lengths)
    return align(model.attention, score, h, model.states(summary, y), lengths)  # B T S


def heat(ax, weights, title):
    ax.imshow(weights[0, : len(digits), : len(words)].T, cmap="Blues", vmin=0, vmax=1)
    ax.set_xticks(range(len(digits)), digits.replace(" ", "\u2423"))
    ax.set_yticks(range(len(words)), words)
    ax.set(title=title, xlabel="character written")


additive_weights = alignment(models["additive"], additive, *line)
dot_weights = alignment(models["dot product"], dot, *line)
fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
heat(axes[0], additive_weights, "additive (Bahdanau)")
heat(axes[1], dot_weights, "dot product (Luong)")
plt.show()

# %% [markdown]
# "1984" is read from the end of the first date, "03" from its middle, "22" from its start; then
# the second date, which stands in another order. And some looks are idle: after four digits comes
# a dash, and after the "2" of 2061 a "0", so nothing has to be looked up, and it does not matter
# where the model looks.
#
# For the twelve digits that do have to be looked up, we know the word that says it.

# %%
places = [2, 3, 5, 6, 8, 9, 13, 14, 16, 17, 19, 20]
right = (
    "eighty four march march twenty second sixty one december december thirteenth thirteenth"
).split()
for weights in (additive_weights, dot_weights):
    looked_at = [words[i] for i in np.asarray(weights)[0, places].argmax(axis=1)]
    found = sum(mine == said for mine, said in zip(looked_at, right, strict=True))
    print(f"{found} of {len(right)}:", *looked_at)
    assert found >= 9

# %% [markdown]
# It was not always so. The same line, early in training:

# %%
fig, axes = plt.subplots(1, len(LOOKS), figsize=(12, 3.6), sharey=True, layout="constrained")
for ax, (number, model) in zip(axes, looks["additive"].items(), strict=True):
    heat(ax, alignment(model, additive, *line), f"after {number} steps")
plt.show()

# %% [markdown]
# ## When the input grows
#
# Now the test, on 500 lines of one, two and three dates each, with days that were kept out of
# training. The model writes by itself, each character after its own previous one, always the most
# likely, and a line counts only if every character of it is right.


# %%
@nnx.jit
def translate(model, x, lengths):
    h, summary = model.encode(x, lengths)

    def write(carry, _):
        s, character = carry
        s, _ = model.decoder.cell(s, model.characters(character))
        character = model.scores(h, summary, s[:, None], lengths)[:, 0].argmax(axis=-1)
        return (s, character), character

    first = jnp.zeros(len(x), int)
    return jax.lax.scan(write, (summary, first), length=T)[1].T  # B T


accuracy, words_in = {name: [] for name in models}, []
for count in range(1, MOST + 1):
    x, lengths, y = batch(np.random.default_rng(count), TESTING, 500, count)
    words_in.append(float(lengths.mean()))
    for name, model in models.items():
        accuracy[name].append((translate(model, x, lengths) == y).all(axis=1).mean())

for name, shares in accuracy.items():
    print(f"{name:27}", *(f"{share:7.1%}" for share in shares))

# %%
assert min(accuracy["additive"] + accuracy["dot product"]) > 0.9
one, two, three = accuracy["no attention, 4 x the steps"]
assert one > 0.5 and one > two > three and three < 0.2

fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, shares in accuracy.items():
    size = 8 if name == "additive" else 5  # two of the curves lie upon each other
    ax.plot(words_in, shares, "o-", color=COLORS[name], label=name, markersize=size)
dates = [f"{n} date{'s' * (n > 1)}\n{mean:.0f} words" for n, mean in enumerate(words_in, 1)]
ax.set_xticks(words_in, dates)
ax.set(ylabel="lines without an error", ylim=(-0.03, 1.05), title="Accuracy as the input grows")
ax.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.6))
plt.show()

# %% [markdown]
# With patience, one vector of 64 numbers learns to hold one date. With three it did not get there:
# it would have to be a code for everything that may stand in a line. With attention nobody has to
# remember all of it. The decoder must only know what to ask for next.

# %% [markdown]
# ## What was left for transformers
#
# | here | from now on |
# |---|---|
# | the decoder's state $s_t$ | the query |
# | the encoder's state $h_i$, when it is scored | the key |
# | the same $h_i$, when it is summed | the value |
# | $s \cdot h$ | $q \cdot k / \sqrt{d}$, scaled as in chapter 2 |
# | two sequences | two (cross-attention) or one (self-attention) |
#
# One thing remained slow: state 26 waits for state 25, and that for state 24. The transformer's
# step was to leave the recurrent network out and keep only the looking. Then all places of a
# sequence can be computed at once. The next chapter builds such a model.
#
# ## Exercise
#
# The dot product has no weights. How can $s$ and $h$, which two different networks make, be
# compared at all? Say why first. Then train a third way to score, Luong's "general" one, $s
# \cdot W h$, which is `LuongAttention(WIDTH, WIDTH, score="general", rngs=nnx.Rngs(1))`: does
# $W$ help?
#
# <details><summary>Answer</summary>
#
# Both networks are trained through the score. Where $s_t$ should have found $h_i$ and did not,
# the gradient turns both vectors towards each other, until they speak one language. The price
# is that $h$ must serve twice, to be found and to be read. A matrix $W$ takes one of these
# tasks from it. Three matrices, one each for query, key and value, take all: that is the
# attention of chapter 2.
#
# ```python
# attention = LuongAttention(WIDTH, WIDTH, score="general", rngs=nnx.Rngs(1))
# general = Translator(attention, rngs=nnx.Rngs(0))
# losses, _ = train(general)
# print(losses[-20:].mean(), (translate(general, x, lengths) == y).all(axis=1).mean())
# ```
#
# It does not hurt: three dates come out right in as good as every line, as they did before. This
# task is too easy to need more.
#
# </details>
#
# Next: [6. Train a small GPT](06_train_a_small_gpt.ipynb), attention without any recurrent
# network.
