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
# *19 minutes to read, 3 minutes to run on a quiet machine with two cores.*
# [A small translation](#A-small-translation) ·
# [One vector between two networks](#One-vector-between-two-networks) ·
# [Look back instead](#Look-back-instead) ·
# [The model](#The-model) ·
# [What it looks at](#What-it-looks-at) ·
# [When the input grows](#When-the-input-grows) ·
# [Exercises](#Exercises)
#
# Attention is older than transformers. It was found in 2014 by people who translated sentences with
# recurrent networks, and who saw these networks fail on long sentences.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
words, digits = "march third nineteen eighty seven".split(), "1987-03-03"
says = {0: (5, 6), 1: (8, 9), 2: (0, 1), 3: (2,), 4: (3,)}  # which characters each word tells
fig, ax = plt.subplots(figsize=(7, 2.4), layout="constrained")
for word, characters in says.items():
    for character in characters:
        ax.plot([character, 2 * word + 0.5], [0, 1], color="tab:blue", lw=3, alpha=0.6)
    ax.text(2 * word + 0.5, 1.06, words[word], ha="center")
for place, character in enumerate(digits):
    ax.text(place, -0.06, character, ha="center", va="top")
ax.set(ylim=(-0.3, 1.3), title="Which word each character needs")
ax.axis("off")
plt.show()

# %% [markdown]
# A date is read in words and written in digits, in another order. Each digit needs one word. A
# network that hands over a single vector has to put all words into it. This chapter lets the
# network look back at the words instead.
#
# At the end you will understand
#
# * what an encoder and a decoder are, and why one vector between them is too narrow;
# * two ways to score how well a place of the input fits: a small network (Bahdanau) and a dot
#   product (Luong);
# * that nobody has to tell the model which word belongs to which: it finds this **alignment** by
#   itself, and we can look at it;
# * what happens to the same model without attention when the input grows.
#
# `climb` is a small file beside these notebooks. It draws boxes (`diagram`), and `same(a, b)`
# checks that two arrays are equal.

# %%
from climb import HAS_TORCH, diagram, same

# %% [markdown]
# ## A small translation
#
# We translate from English into a language that every reader knows: dates in words become dates in
# digits. English has several ways to say a date, and none of them is in the order of the digits.
# First come the words for numbers.

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


# %%
def cardinal(n):
    small = [ONES[n % 10]] if n % 10 else []
    return [ONES[n]] if n < 20 else [TENS[n // 10], *small]


# %%
def ordinal(n):
    return (
        [ORDINALS[n]] if n < 20 else [ROUND[n]] if n in ROUND else [TENS[n // 10], ORDINALS[n % 10]]
    )


# %%
def in_words(date, style):
    day, month, weekday = ordinal(date.day), MONTHS[date.month - 1], WEEKDAYS[date.weekday()]
    year = cardinal(date.year // 100) + cardinal(date.year % 100)
    return [
        ["the", *day, "of", month, *year],
        [month, "the", *day, *year],
        [weekday, *day, month, *year],
    ][style]


# %%
import datetime

day = datetime.date(1984, 3, 22)
for style in range(3):
    print(f"{' '.join(in_words(day, style)):45} {day}")

# %% [markdown]
# A line has one, two or three dates, joined by "and", so the input can grow. Every fifth day of the
# calendar is kept for testing and never occurs in training.

# %%
CALENDAR = [
    datetime.date(year, 1, 1) + datetime.timedelta(days)
    for year in [*range(1910, 2000), *range(2010, 2100)]
    for days in range(365)
]
TRAINING = [date for date in CALENDAR if date.toordinal() % 5]
TESTING = [date for date in CALENDAR if date.toordinal() % 5 == 0]


# %%
def draw_line(rng, dates, count):
    words, digits = [], []
    for _ in range(count):
        date = dates[rng.integers(len(dates))]
        words += ["and"] * bool(words) + in_words(date, rng.integers(3))
        digits.append(str(date))
    return words, " ".join(digits)


# %%
for count in (1, 2, 3):
    words, digits = draw_line(np.random.default_rng(count), TRAINING, count)
    print(" ".join(words), "\n   ", digits)

# %% [markdown]
# Words go in as ids, and characters come out as ids. A batch is a rectangle, so short lines are
# filled up with zeros. This is called **padding**, and we note how many words each line really has.
# Among the characters, 0 is the line break. So a short answer is filled up with line breaks, which
# mean "done".

# %%
WORDS = sorted({word for date in CALENDAR[::3] for s in range(3) for word in in_words(date, s)})
WORDS = ["(nothing)", "and", *WORDS]
CHARACTERS = "\n -0123456789"  # the line break stands before the first and after the last
MOST = 3  # dates in a line
S, T = 8 * MOST + MOST - 1, 11 * MOST
WORD = {word: number for number, word in enumerate(WORDS)}
CHARACTER = {character: number for number, character in enumerate(CHARACTERS)}


# %%
def as_arrays(lines):
    x, y = np.zeros((len(lines), S), np.int32), np.zeros((len(lines), T), np.int32)
    for b, (words, digits) in enumerate(lines):
        x[b, : len(words)] = [WORD[word] for word in words]
        y[b, : len(digits)] = [CHARACTER[character] for character in digits]
    return x, (x > 0).sum(axis=1), y  # B S, B, B T


# %%
def batch(rng, dates, size, count=None):
    counts = rng.integers(1, MOST + 1, size) if count is None else [count] * size
    return as_arrays([draw_line(rng, dates, n) for n in counts])


# %%
print(f"{len(WORDS)} words in, {len(CHARACTERS)} characters out; up to {S} words, {T} characters")

# %% [markdown]
# ## One vector between two networks
#
# A **recurrent network** reads one word after the other and keeps a **state**, a vector that it
# rewrites at each word. Two kinds were in use: the **LSTM** (*long short-term memory*, 1997), and
# the simpler **GRU** (*gated recurrent unit*, 2014). We take the GRU. From a word's embedding $x$
# and the state so far, $h$, it makes
#
# $$\mathrm{GRU}(x, h) = z \odot h + (1 - z) \odot n, \qquad
# n = \tanh(W x + r \odot U h).$$
#
# The new state is a mixture of the old one and of a proposal $n$, number by number ($\odot$). The
# gates $z$ and $r$ say how much is kept. Each number in them is between 0 and 1, and is computed
# from $x$ and $h$ with further weights.
#
# As Bahdanau did, we take one GRU that reads forwards and one that reads backwards:
#
# $$\overrightarrow h_i = \mathrm{GRU}(x_i, \overrightarrow h_{i-1}), \qquad
# \overleftarrow h_i = \mathrm{GRU}(x_i, \overleftarrow h_{i+1}), \qquad
# h_i = [\overrightarrow h_i; \overleftarrow h_i]$$
#
# This is the **encoder**. The **decoder** is a GRU that writes. Its state $s_t$ starts from the
# last state of each of the encoder's two GRUs, $\bar h = [\overrightarrow h_S; \overleftarrow
# h_1]$, and is rewritten at each character. (In this chapter $s$ is a state, as in the papers, and
# a score is written out.) So all that the decoder ever knows of the line is $\bar h$: one vector of
# fixed width, whether the line has five words or twenty-six. That is the bottleneck. And it gets
# worse with distance: what the first word said has been rewritten at every later word. This is why
# recurrent networks lose **long-range** dependencies.

# %%
blue, orange, green = "lightsteelblue", "navajowhite", "palegreen"
diagram(
    {
        "the": (0, -0.5, "white"),
        "twenty": (1.2, -0.5, "white"),
        "second ...": (2.4, -0.5, "white"),
        "h 1": (0, 0.5, orange),
        "h 2": (1.2, 0.5, orange),
        "h 3 ...": (2.4, 0.5, orange),
        "one vector": (3.9, 0.5, blue),
        "s 1": (5.4, 0.5, green),
        "s 2": (6.6, 0.5, green),
        "s 3 ...": (7.8, 0.5, green),
        "1": (5.4, -0.5, "white"),
        "9": (6.6, -0.5, "white"),
        "8 ...": (7.8, -0.5, "white"),
    },
    [
        *[("the", "h 1"), ("twenty", "h 2"), ("second ...", "h 3 ...")],
        *[("h 1", "h 2"), ("h 2", "h 3 ..."), ("h 3 ...", "one vector"), ("one vector", "s 1")],
        *[("s 1", "s 2"), ("s 2", "s 3 ..."), ("s 1", "1"), ("s 2", "9"), ("s 3 ...", "8 ...")],
    ],
    title="Encoder (orange) and decoder (green). Everything passes through one vector",
)

# %% [markdown]
# ## Look back instead
#
# The encoder's states $h_1 \ldots h_S$ are all still there. Before each character, let the decoder
# ask which of them it needs now:
#
# $$c_t = \sum_j w_{tj}\, h_j, \qquad w_t = \mathrm{softmax}_j\ \mathrm{score}(s_t, h_j)$$
#
# You know this sum from [chapter 1](01_attention_without_weights.ipynb). What is new is that the
# one who asks, $s_t$, and those who are asked, $h_j$, come from two different sequences. Today this
# is called **cross-attention**.
#
# [Bahdanau](https://arxiv.org/abs/1409.0473) (2014) let a small network with one hidden layer score
# the pair. Because $W_1 h$ and $W_2 s$ are added, this is **additive** attention:
#
# $$\mathrm{score}(s, h) = v^\top \tanh(W_1 h + W_2 s)$$


# %%
def additive(layer, h, s):  # B S D, B T D
    sums = layer.W1(h)[:, None, :, :] + layer.W2(s)[:, :, None, :]  # B T S units
    return layer.v(jnp.tanh(sums))[..., 0]  # B T S


# %% [markdown]
# [Luong](https://arxiv.org/abs/1508.04025) (2015) took what chapter 1 took, a dot product. It has
# no weights of its own:
#
# $$\mathrm{score}(s, h) = s \cdot h$$


# %%
def dot(layer, h, s):
    return s @ h.mT  # B T S


# %% [markdown]
# There is one more difference between the papers. Bahdanau scores with the **previous** decoder
# state, $\mathrm{score}(s_{t-1}, h_j)$, and uses the context to compute $s_t$. Luong computes $s_t$
# first and scores with it. We do as Luong does in both cases: then all states of the decoder are
# known before the first look back, and one call does all looks at once.
#
# The rest is the same for both. Padding gets $-\infty$ and so the weight 0. For the library's
# layers, the mask `Lengths` says how many words of each line are real.


# %%
def align(layer, score, h, s, lengths):
    padding = jnp.arange(h.shape[1]) >= lengths[:, None, None]  # B 1 S
    scores = jnp.where(padding, -jnp.inf, score(layer, h, s))
    return jax.nn.softmax(scores, axis=-1)  # B T S


# %% [markdown]
# These few lines are the library's `BahdanauAttention` and `LuongAttention`. We try both on two
# lines of seven words, where the last two words of the second line are padding. The numbers come
# from a sine, so that they are the same everywhere.


# %%
def wave(*shape):
    return jnp.asarray(np.sin(np.arange(1.0, 1 + np.prod(shape)) ** 2).reshape(shape), jnp.float32)


# %%
from flax_attn import BahdanauAttention, Lengths, LuongAttention

h, s, lengths = wave(2, 7, 4), 2 * wave(2, 3, 4), jnp.array([7, 5])
bahdanau = BahdanauAttention(4, 4, 6, rngs=nnx.Rngs(0))
bahdanau.W1.kernel[...], bahdanau.W2.kernel[...] = wave(4, 6), wave(4, 6)[::-1]
bahdanau.v.kernel[...] = wave(6, 1)
luong = LuongAttention(4, 4, score="dot", rngs=nnx.Rngs(0))

# %%
for layer, score in [(bahdanau, additive), (luong, dot)]:
    weights = align(layer, score, h, s, lengths)
    assert (weights[1, :, 5:] == 0).all()
    same(weights @ h, layer(h, s, mask=Lengths(lengths)))

# %% [markdown]
# And the library's layers are PyTorch's: in float64, with random weights, every step and every
# gradient agrees to 1e-12. Where PyTorch is missing, you see at least that both layers give the
# context vectors that PyTorch gave for the numbers above.

# %%
from_torch = {
    bahdanau: [0.59581265, -0.35667265, -0.06449901, 0.61652229],
    luong: [0.59241931, -0.73515278, -0.14934346, -0.52125752],
}
for layer, context in from_torch.items():
    same(layer(h, s)[1, 2], context)

# %%
from flax_attn.parity import compare

if HAS_TORCH:
    import torch_ref.bahdanau
    import torch_ref.luong

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
# There is one class for three models: no attention, additive, dot product. The only difference is
# where the context vector $c_t$ comes from. Without an attention layer, it is $\bar h$ at every
# step. Then
#
# $$p(\text{character}_t) = \mathrm{softmax}(W_o \tanh(W_c [s_t; c_t])).$$
#
# Flax brings the parts: `nnx.Embed` is a table of embeddings, `nnx.GRUCell` one step of a GRU,
# `nnx.RNN` runs it over a sequence, and `nnx.Bidirectional` runs two in both directions. `encode`
# reads the line, `states` runs the decoder over what was written so far, and `scores` rates the
# next character.

# %%
WIDTH = 64


# %%
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
        context = jnp.broadcast_to(summary[:, None], s.shape)  # B T D
        if self.attention is not None:
            context = self.attention(h, s, mask=Lengths(lengths))  # B T D
        mixed = jnp.tanh(self.mix(jnp.concatenate([s, context], axis=-1)))
        return self.out(mixed)  # B T characters

    def states(self, summary, y):
        before = jnp.pad(y[:, :-1], ((0, 0), (1, 0)))  # what was written before each character
        return self.decoder(self.characters(before), initial_carry=summary)  # B T D

    def __call__(self, x, lengths, y):
        h, summary = self.encode(x, lengths)
        return self.scores(h, summary, self.states(summary, y), lengths)


# %% [markdown]
# Here are three of them, and how many parameters they have. The comparison is fair: the dot product
# adds no parameters at all. It is only a way to look.

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
# > **Try it.** Set `bahdanau.v.kernel[...]` to zeros. What are the weights now, and why?
#
# <details><summary>Answer</summary>
#
# ```python
# blank = nnx.clone(bahdanau)
# blank.v.kernel[...] = jnp.zeros_like(blank.v.kernel[...])
# even = align(blank, additive, h, s, lengths)  # B T S
# same(even[0], np.full((3, 7), 1 / 7))
# same(even[1], np.tile([1 / 5] * 5 + [0, 0], (3, 1)))
# ```
#
# Every score is a product with $v$, so all of them are zero, and the softmax of equal scores is
# even: 1/7 for each word of the first line, 1/5 for each of the five real words of the second.
# Padding keeps the weight 0, because its score is minus infinity and not zero.
#
# </details>
#
# ## Train
#
# In training, the decoder is shown the right characters so far, whatever it would have written
# itself, and has to predict the next one. The loss is the mean of
#
# $$-\log p(\text{the right character}).$$
#
# A model that is sure and right has a loss of 0. A model that gives each of the 13 characters the
# same probability has a loss of $\log 13 \approx 2.56$.
#
# All three start from the same weights and see the same lines. The optimizer is Adam
# ([chapter 0](00_jax_for_numpy_readers.ipynb)). Its learning rate gets smaller along a cosine. A
# gradient longer than 1 is cut to length 1, because it has come back through dozens of states and
# may have grown on the way.


# %%
import optax


def mean_loss(model, x, lengths, y):
    scores = model(x, lengths, y)
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


# %%
@nnx.jit
def step(model, optimizer, x, lengths, y):
    loss, gradients = nnx.value_and_grad(mean_loss)(model, x, lengths, y)
    optimizer.update(model, gradients)
    return loss


# %%
STEPS, BATCH = 400, 64
LOOKS = (50, 100, STEPS)  # when we will look at the alignment


# %%
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

# %%
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
# Nobody told the model which word belongs to which digit. The weights $w_{tj}$ show what it found:
# one column for each character that it writes, one row for each word, dark where it looks.

# %%
words = (
    "the twenty second of march nineteen eighty four and december the thirteenth twenty sixty one"
).split()
digits = "1984-03-22 2061-12-13"
line = as_arrays([(words, digits)])


# %%
def alignment(model, score, x, lengths, y):
    h, summary = model.encode(x, lengths)
    return align(model.attention, score, h, model.states(summary, y), lengths)  # B T S


# %%
def draw(ax, weights, title):
    ax.imshow(weights[0, : len(digits), : len(words)].T, cmap="Blues", vmin=0, vmax=1)
    ax.set_xticks(range(len(digits)), digits.replace(" ", "\u2423"))
    ax.set_yticks(range(len(words)), words)
    ax.set(title=title, xlabel="character written")


# %%
additive_weights = alignment(models["additive"], additive, *line)
dot_weights = alignment(models["dot product"], dot, *line)
fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
draw(axes[0], additive_weights, "additive (Bahdanau)")
draw(axes[1], dot_weights, "dot product (Luong)")
plt.show()

# %% [markdown]
# "1984" is read from the end of the first date, "03" from its middle, "22" from its start. Then
# comes the second date, whose words are in another order. Some looks are idle: after four digits
# comes a dash, and after the "2" of 2061 a "0". Nothing has to be looked up there, so it does not
# matter where the model looks.
#
# For the twelve digits that do have to be looked up, we know which word says it.

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
# It was not so from the start. Here is the same line early in training:

# %%
fig, axes = plt.subplots(1, len(LOOKS), figsize=(12, 3.6), sharey=True, layout="constrained")
for ax, (number, model) in zip(axes, looks["additive"].items(), strict=True):
    draw(ax, alignment(model, additive, *line), f"after {number} steps")
plt.show()

# %% [markdown]
# > **Try it.** Draw the alignment of a line of your own: change `words` and `digits`.
#
# <details><summary>Answer</summary>
#
# ```python
# words, digits = in_words(datetime.date(1990, 7, 14), 1), "1990-07-14"
# line = as_arrays([(words, digits)])
# of_mine = alignment(models["additive"], additive, *line)  # B T S
# fig, ax = plt.subplots(figsize=(5, 2.6), layout="constrained")
# draw(ax, of_mine, " ".join(words))
# plt.show()
# looked_at = [words[int(of_mine[0, place].argmax())] for place in (2, 6, 9)]
# print(*looked_at)
# assert sum(a == b for a, b in zip(looked_at, ("ninety", "july", "fourteenth"), strict=True)) > 1
# ```
#
# For this line the year's "90" is read from *ninety*, the "07" from *july* and the "14" from
# *fourteenth*. `in_words(date, style)` makes the words of any date, with a style of 0, 1 or 2.
#
# </details>
#
# ## When the input grows
#
# Now the test, on 500 lines each of one, two and three dates, with days that were kept out of
# training. The model writes by itself: it always takes the most likely character, and goes on from
# there. A line counts only if every character of it is right. (`jax.lax.scan` is a loop that the
# compiler understands.)


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


# %%
accuracy, words_in = {name: [] for name in models}, []
for count in range(1, MOST + 1):
    x, lengths, y = batch(np.random.default_rng(count), TESTING, 500, count)
    words_in.append(float(lengths.mean()))
    for name, model in models.items():
        accuracy[name].append((translate(model, x, lengths) == y).all(axis=1).mean())

# %%
for name, shares in accuracy.items():
    print(f"{name:27}", *(f"{share:7.1%}" for share in shares))

# %%
assert min(accuracy["additive"] + accuracy["dot product"]) > 0.9
one, two, three = accuracy["no attention, 4 x the steps"]
assert one > 0.5 and one > two > three and three < 0.2

# %%
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
# With enough steps, one vector of 64 numbers learns to hold one date. It did not learn to hold
# three. With attention, no vector has to remember all of them. The decoder must only know what to
# ask for next.
#
# > **Try it.** Train with `WIDTH = 128`. How far does one vector get now?
#
# <details><summary>Answer</summary>
#
# ```python
# WIDTH = 128
# wide = Translator(rngs=nnx.Rngs(0))
# losses, _ = train(wide, 4 * STEPS)
# shares = []
# for count in range(1, MOST + 1):
#     x, lengths, y = batch(np.random.default_rng(count), TESTING, 500, count)
#     shares.append(float((translate(wide, x, lengths) == y).all(axis=1).mean()))
# print(f"loss {losses[-20:].mean():.4f},", *(f"{share:.1%}" for share in shares))
# assert shares[0] > one and shares[0] > shares[2]
# ```
#
# Farther, with the same 1,600 steps: all lines of one date are right, 99 % of two and 65 % of
# three, where a width of 64 had 96 %, 22 % and none. So a wider vector moves the bottleneck, and
# does not remove it. With attention the narrower model gets nearly all lines of three dates right,
# after a quarter of the steps.
#
# </details>

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
# One thing remained slow: state 26 waits for state 25, and that one for state 24. The transformer
# left the recurrent network out and kept only the attention. Then all places of a sequence can be
# computed **in parallel**, and the first word is as near as the last one. The next chapter builds
# such a model.
#
# ## Exercises
#
# **1.** The dot product has no weights. How can $s$ and $h$, which come from two different
# networks, be compared at all? Say why first. Then train a third way to score, Luong's "general"
# one, $s \cdot W h$, which is `LuongAttention(WIDTH, WIDTH, score="general", rngs=nnx.Rngs(1))`.
# Does $W$ help?
#
# <details><summary>Answer</summary>
#
# Both networks are trained through the score. Where $s_t$ should have found $h_j$ and did not, the
# gradient turns both vectors towards each other. The price is that $h$ has two tasks, to be found
# and to be read. A matrix $W$ takes one of these tasks from it. Three matrices, one each for query,
# key and value, take all of them: that is the attention of chapter 2.
#
# ```python
# attention = LuongAttention(WIDTH, WIDTH, score="general", rngs=nnx.Rngs(1))
# general = Translator(attention, rngs=nnx.Rngs(0))
# losses, _ = train(general)
# print(losses[-20:].mean(), (translate(general, x, lengths) == y).all(axis=1).mean())
# ```
#
# It does not hurt: nearly every line of three dates comes out right, as before. This task is too
# easy to need more.
#
# </details>
#
# **2.** Hide the words of the second date from the decoder, with a mask, and translate `line`
# again. What does the model write for the second date? (`Lengths(jnp.array([8]))` shows only eight
# words.)
#
# <details><summary>Answer</summary>
#
# ```python
# x, lengths, _ = line
# h, summary = models["dot product"].encode(x, lengths)  # the encoder reads all of it
# states = models["dot product"].states(summary, line[2])
# scores = models["dot product"].scores(h, summary, states, jnp.array([8]))
# written = "".join(CHARACTERS[n] for n in scores[0].argmax(axis=-1)[: len(digits)])
# print(written)
# assert written[:10] == digits[:10] and written[11:] != digits[11:]
# ```
#
# The first date stays right. The second one becomes wrong, although the decoder was shown the right
# characters before each step and started from a summary of the whole line: it cannot look up what
# it has not seen.
#
# </details>
#
# **To read:** Bahdanau and others,
# [Neural machine translation by jointly learning to align and translate](https://arxiv.org/abs/1409.0473);
# Luong and others,
# [Effective approaches to attention-based neural machine translation](https://arxiv.org/abs/1508.04025);
# Lilian Weng, [Attention? Attention!](https://lilianweng.github.io/posts/2018-06-24-attention/).
#
# Next: [6. Train a small GPT](06_train_a_small_gpt.ipynb), attention without any recurrent
# network.
