# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10. Generate
#
# *16 minutes to read, 1 minute to run on a quiet machine with two cores.*
# [Work done twice](#Work-done-twice) ·
# [Keys that are kept](#Keys-that-are-kept) ·
# [The cache](#The-cache-of-the-library) ·
# [A model that counts](#A-model-that-counts) ·
# [Let it write](#Let-it-write) ·
# [Padded prompts](#Prompts-of-different-lengths) ·
# [A ring](#A-window-needs-a-ring) ·
# [Times](#Times) ·
# [Exercises](#Exercises)
#
# A language model writes one token after the other. In [chapter 6](06_train_a_small_gpt.ipynb) it
# read the whole text again for each new one, and computed the same scores again and again.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

# %%
row, column = np.indices((6, 6))
needed = np.where(column <= row, row + 1, np.nan)  # the call that needs this score
times = np.where(column <= row, 6 - row, np.nan)  # how often it is computed
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained")
for ax, table, title in zip(
    axes,
    (needed, times),
    ("the call that needs this score", "how often it is computed"),
    strict=True,
):
    ax.imshow(table, cmap="Blues", vmin=0, vmax=9)
    for i, j in zip(*np.nonzero(column <= row), strict=True):
        ax.text(j, i, int(table[i, j]), ha="center", va="center")
    ax.set(title=title, xlabel="key", ylabel="query", facecolor="0.95")
plt.show()

# %% [markdown]
# The picture shows the scores of a causal layer that writes six tokens. This chapter keeps what can
# be kept, so that each is computed once, and proves that the text does not change.
#
# At the end you will understand
#
# * what a **cache** of keys and values is, and why queries are not in it;
# * the two phases of writing: read the prompt at once, then go on token by token;
# * what *temperature* does to the choice of the next token;
# * how prompts of different lengths share a batch, and how a window bounds the memory.
#
# `x` is the sentence of chapter 1: six words, three numbers each. It comes from `climb.py`, the
# file beside these notebooks, as `diagram` and `same` do.

# %%
from climb import HAS_TORCH, diagram, same, x

# %% [markdown]
# ## Work done twice
#
# After each token the layer of the picture is called with everything so far, and only the last row
# of its output is used. The first score is computed six times, and needed once. For $n$ tokens the
# calls compute $1 + 4 + 9 + \dots + n^2$ scores (with those that the mask hides), and needed are
# $1 + 2 + \dots + n$.

# %%
for n in (6, 100, 1000):
    done, useful = sum(t**2 for t in range(1, n + 1)), n * (n + 1) // 2
    print(f"{n:>5} tokens: {done:>12,} scores computed, {useful:>8,} needed, {done / useful:.0f}x")
assert done / useful == (2 * 1000 + 1) / 3

# %% [markdown]
# ## Keys that are kept
#
# What does the output of a new token need? Its own query, and the keys and values of all tokens so
# far. In a causal model nothing before a token depends on it. So the keys and values of earlier
# tokens are what they were, and can be kept:
#
# $$o_t = \text{softmax}\Big(\frac{q_t\, [k_1 \dots k_t]^\top}{\sqrt{H}}\Big)\, [v_1 \dots v_t].$$
#
# Earlier *queries* are never asked again, so nobody keeps them. The list of keys and values is the
# **cache**. Let us write it down for the six words, with the layer of
# [chapter 3](03_looking_back_only.ipynb).

# %%
from flax_attn import CausalAttention

layer = CausalAttention(3, 2, context_length=6, dropout=0.0, rngs=nnx.Rngs(0))
words = np.asarray(x)  # T D
keys, values, rows = [], [], []
for word in words:  # D
    q, k, v = (np.asarray(part(word)) for part in (layer.W_query, layer.W_key, layer.W_value))  # H
    keys.append(k)
    values.append(v)
    w = np.exp(np.stack(keys) @ q / 2**0.5)  # S
    rows.append(w / w.sum() @ np.stack(values))
run = nnx.jit(lambda layer, x, cache=None: layer(x, cache=cache))  # compiled, as in chapter 0
same(rows, run(layer, x))

# %% [markdown]
# Six steps with one query each give the same numbers as one call with six queries.

# %%
boxes = {
    "new token": (0, 0.5, "lightsteelblue"),
    "query": (1.6, 1.1, "lightsteelblue"),
    "key, value": (1.6, -0.1, "navajowhite"),
    "cache: keys and\nvalues so far": (3.7, -0.1, "navajowhite"),
    "attention": (5.6, 0.5, "palegreen"),
    "output of the\nnew token": (7.5, 0.5, "lightsteelblue"),
}
new, q_box, kv_box, cache_box, attention_box, out_box = boxes
arrows = [(new, q_box), (new, kv_box), (kv_box, cache_box, "append")]
arrows += [(q_box, attention_box), (cache_box, attention_box), (attention_box, out_box)]
diagram(boxes, arrows, size=(8.6, 1.9), title="One step")

# %% [markdown]
# ## The cache of the library
#
# A list that grows is bad for `jit`: another length is another shape, and each shape is compiled
# again. So the cache has a fixed number of places, here six, and says how many are taken.
# `init_cache` makes an empty one. A call with `cache=` returns the output *and the new cache*,
# since arrays do not change.

# %%
cache = layer.init_cache((), length=6)  # () means: no batch axes
print(cache.keys.shape, cache.values.shape, cache.length)  # heads, places, width
first, cache = run(layer, words[:4], cache)
print("after four tokens:", cache.length)

# %%
step_by_step = [first]
for t in (4, 5):
    y, cache = run(layer, words[t : t + 1], cache)
    step_by_step.append(y)
same(np.concatenate(step_by_step), run(layer, x))
assert int(cache.length) == 6

# %% [markdown]
# Any cut will do: a prompt of four and then one by one, or one, four and one. `compare` tests
# them (`Decode`) against PyTorch's whole output, in float64.

# %%
from flax_attn.parity import Decode, compare

if HAS_TORCH:
    from torch_ref.causal_attention import CausalAttention as Theirs

    twin = Theirs(3, 2, 6, 0.0)
    sentence = np.asarray(x)[None]
    cuts = Decode(cuts=[(4, 1, 1), (1, 4, 1)])
    report = compare(twin, layer, sentence, decode=cuts, dtypes=("float64",), eager=False)
    assert report.ok, report
    print(report)

# %% [markdown]
# And if a seventh token comes? It is refused before anything is written.

# %%
try:
    layer(x[:1], cache=cache)
except ValueError as error:
    print(error)

# %% [markdown]
# > **Try it.** Call `layer(x[:1], cache=...)` with the cache that had four tokens. Does the one
# > that you used before still have four, and why?
#
# <details><summary>Answer</summary>
#
# ```python
# _, four = run(layer, words[:4], layer.init_cache((), length=6))
# _, five = layer(x[:1], cache=four)
# assert (int(four.length), int(five.length)) == (4, 5)
# ```
#
# It still has four, because arrays do not change: the call returned a *new* cache with five. So one
# prompt can be continued in several ways from the same cache.
#
# </details>
#
# ## A model that counts
#
# Now a whole model, and one whose text can be checked: it counts. Its text is the numbers from 100
# to 999 with a space behind each, and its tokens are the ten digits and the space.

# %%
text = "".join(f"{n} " for n in range(100, 1000))
ALPHABET = " 0123456789"
data = np.array([ALPHABET.index(c) for c in text])
print(text[:40], "...", len(text), "characters")

# %% [markdown]
# The model has two blocks. Its attention is Llama's from
# [chapter 9](09_what_todays_models_changed.ipynb): four query heads share two key heads, and
# positions are rotations. Each layer has a cache of its own, so the model takes a list of caches
# and returns the new ones. Without caches it reads the whole text, as in training.

# %%
from flax_attn import CAUSAL, GroupedQueryAttention, RMSNorm, Rotary

WIDTH = 64


# %%
class Block(nnx.Module):
    def __init__(self, mask, *, rngs):
        self.norm1, self.norm2 = RMSNorm(WIDTH, eps=1e-6), RMSNorm(WIDTH, eps=1e-6)
        self.attention = GroupedQueryAttention(
            WIDTH, 4, 2, 16, rotary=Rotary(), mask=mask, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, cache, valid):  # B T D
        y = self.attention(self.norm1(x), cache=cache, valid=valid)
        y, cache = (y, None) if cache is None else y
        x = x + y
        return x + self.down(nnx.gelu(self.up(self.norm2(x)))), cache


# %%
class Counter(nnx.Module):
    def __init__(self, mask=CAUSAL, *, rngs):
        self.embed = nnx.Embed(len(ALPHABET), WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(mask, rngs=rngs) for _ in range(2)])
        self.norm = RMSNorm(WIDTH, eps=1e-6)
        self.scores = nnx.Linear(WIDTH, len(ALPHABET), use_bias=False, rngs=rngs)

    def init_cache(self, batch, length, **options):
        return [block.attention.init_cache(batch, length, **options) for block in self.blocks]

    def __call__(self, tokens, caches=(None, None), valid=None):  # B T
        x, after = self.embed(tokens), []  # B T D
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, cache, valid)
            after.append(cache)
        return self.scores(self.norm(x)), after  # B T V


# %% [markdown]
# It is trained as in chapter 6, on windows of 32 characters. The first eight characters of a window
# do not count in the loss, because nobody can know at which number it begins.

# %%
import optax

model = Counter(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(4e-3), wrt=nnx.Param)


# %%
def mean_loss(model, batch):
    scores, _ = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch[:, 1:])[:, 8:].mean()


# %%
@nnx.jit
def train(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(mean_loss)(model, batch)
    optimizer.update(model, gradients)
    return loss


# %%
rng = np.random.default_rng(0)
losses = []
for _ in range(120):
    starts = rng.integers(len(data) - 32, size=(16, 1))
    losses.append(float(train(model, optimizer, jnp.asarray(data[starts + np.arange(33)]))))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.3

# %% [markdown]
# ## Let it write
#
# Writing has two phases. First the whole prompt goes through the model in one call. This is called
# **prefill**. Then each step takes one token, and is called **decode**. Both are the same function,
# and `jit` compiles it twice, once for each shape.


# %%
@nnx.jit
def forward(model, tokens, caches=(None, None), valid=None):
    return model(tokens, caches, valid)


# %%
def encode(text):
    return np.array([[ALPHABET.index(c) for c in text]])  # B T


# %%
def write(prompt, count, choose):
    """`count` characters behind the prompt; `choose` takes scores and gives a token."""
    scores, caches = forward(model, encode(prompt), model.init_cache(1, 64))  # prefill
    found = []
    for _ in range(count):
        token = choose(np.asarray(scores)[:, -1])  # B
        found.append(ALPHABET[int(token[0])])
        scores, caches = forward(model, token[:, None], caches)  # decode
    return "".join(found)


# %%
def greedy(scores):
    return scores.argmax(-1)  # the likeliest


# %%
written = write("347 348 ", 24, greedy)
print("347 348 ...", written)

# %% [markdown]
# Without a cache the model reads everything again for each character. (Behind the text so far lie
# zeros, so that every call has one shape. A causal model does not look at what comes later.) The
# text must be the same, and so must the scores.


# %%
def read(text):
    """The scores behind each character of a text, without a cache."""
    row = np.pad(encode(text), [(0, 0), (0, 32 - len(text))])
    return np.asarray(forward(model, row)[0])[:, : len(text)]  # B T V


# %%
def write_without(prompt, count):
    text = prompt
    for _ in range(count):
        text += ALPHABET[read(text)[0, -1].argmax()]  # from the start
    return text[len(prompt) :]


# %%
assert write_without("347 348 ", 24) == written

# %%
some, caches = forward(model, encode("347 348 "), model.init_cache(1, 64))
rest = [some]
for character in "349 ":
    scores, caches = forward(model, encode(character), caches)
    rest.append(scores)
same(np.concatenate(rest, axis=1), read("347 348 349 "), within=1e-4)

# %% [markdown]
# ### Temperature
#
# The likeliest token each time is one choice. To get different texts one draws the next token from
# the probabilities. They can be made sharper or flatter first, by a **temperature** $\tau$:
#
# $$p = \text{softmax}(\text{scores} / \tau).$$
#
# $\tau = 1$ is what the model says. As $\tau$ goes to 0 only the likeliest token remains, and a
# large $\tau$ makes all alike. What may follow "34"?

# %%
scores = read("345 346 34")
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.2), sharey=True, layout="constrained")
for ax, tau in zip(axes, (1.0, 3.0, 10.0), strict=True):
    p = jax.nn.softmax(scores[0, -1] / tau)
    ax.bar(["space", *ALPHABET[1:]], p)
    ax.set_title(rf"$\tau$ = {tau:.0f}")
    ax.tick_params(axis="x", rotation=60)
axes[0].set_ylabel("probability")
plt.show()
assert int(p.argmax()) == int(scores[0, -1].argmax())  # the order stays


# %%
def sample(tau, seed=0):
    rng = np.random.default_rng(seed)

    def choose(scores):  # B V
        p = np.exp(scores.astype(float) / tau)
        return np.array([rng.choice(len(ALPHABET), p=row / row.sum()) for row in p])

    return choose


# %%
for tau in (0.5, 1.0, 2.0):
    print(f"temperature {tau}: {write('347 348 ', 24, sample(tau))}")

# %% [markdown]
# The hotter, the more slips. The model reads its own slips as it reads a prompt, so it goes on
# counting from whatever it wrote.
#
# > **Try it.** Let it count from 995 on. What does it write behind 999, which it has never seen?
#
# <details><summary>Answer</summary>
#
# ```python
# beyond = write("995 996 ", 24, greedy)
# print(beyond)
# assert beyond.startswith("997 998 999 ")
# ```
#
# It counts up to 999 and then slips: 990 on the machine that made this page, and on from there. It
# has learned how digits follow each other, and three digits in each number. It has never seen a
# number with four, so it knows nothing of 1000. (Yours may write another number.)
#
# </details>
#
# ## Prompts of different lengths
#
# Several texts share a batch, and their prompts are not equally long. So the shorter ones are
# padded, and `valid` says which tokens are there. The others are neither stored in the cache nor
# seen by anybody, and the next token follows the last one that is there.

# %%
long, short = encode("810 811 812 "), encode("57")
padded = np.concatenate([long, np.pad(short, [(0, 0), (0, 10)])])  # B T
valid = np.arange(12) < np.array([[12], [2]])
both, caches = forward(model, padded, model.init_cache(2, 64), valid)
print("tokens in the caches:", caches[0].length)

# %%
same(both[1, :2], read("57")[0], within=1e-4)
last = np.asarray(both)[[0, 1], caches[0].length - 1]  # B V: behind the last token that is there
print([ALPHABET[i] for i in last.argmax(-1)])

# %% [markdown]
# Take the scores behind the last *real* token, as this cell does. `both[:, -1]` would be those of
# padding, a common slip.
#
# > **Try it.** Print what the model would write from `both[:, -1]`. For which of the two texts is
# > it right, and why?
#
# <details><summary>Answer</summary>
#
# ```python
# at_the_end = np.asarray(both)[:, -1]  # B V
# print([ALPHABET[i] for i in at_the_end.argmax(-1)], [ALPHABET[i] for i in last.argmax(-1)])
# assert (at_the_end[0] == last[0]).all() and (at_the_end[1] != last[1]).any()
# ```
#
# For the first. It has no padding, so its last place is its last token, and 8 is right: after 812
# comes 813. For the second text the last place is padding, and the scores there are those of a
# token that nobody wrote. They say 8 here, where a space or another digit has to follow "57".
#
# </details>
#
# ## A window needs a ring
#
# The cache grows by one place with each token. A layer with a window (chapter 9) looks at the last
# few tokens only, so older ones can be overwritten: the places form a **ring**. The token at
# position $t$ goes to place $t$ modulo the number of places.

# %%
from matplotlib.colors import ListedColormap

t = np.arange(12)
ring = np.full((12, 4), np.nan)
for step in t:
    ring[step] = [
        max(p for p in range(step + 1) if p % 4 == place) if place <= step else np.nan
        for place in range(4)
    ]
fig, ax = plt.subplots(figsize=(7, 2.2), layout="constrained")
fresh = ring.T == t
ax.imshow(np.where(np.isnan(ring.T), np.nan, fresh), cmap=ListedColormap(["aliceblue", "C1"]))
for (place, step), position in np.ndenumerate(ring.T):
    ax.text(step, place, "" if np.isnan(position) else int(position), ha="center", va="center")
ax.set(xlabel="step", ylabel="place", title="Which position lies where, in a ring of four")
plt.show()

# %% [markdown]
# `init_cache(..., window="mask")` makes a ring that is as long as the mask needs. It holds four
# tokens here, and the text may be as long as one likes.

# %%
from flax_attn import Window

narrow = GroupedQueryAttention(
    WIDTH, 4, 2, 16, rotary=Rotary(), mask=CAUSAL & Window(3, 0), rngs=nnx.Rngs(0)
)
y = rng.standard_normal((1, 20, WIDTH)).astype("float32")  # B T D
cache, outputs = narrow.init_cache(1, length=20, window="mask"), []
for t in range(20):
    out, cache = run(narrow, y[:, t : t + 1], cache)
    outputs.append(out)
print("places in the ring:", cache.keys.shape[-2], "tokens seen:", cache.length)
same(np.concatenate(outputs, axis=1), run(narrow, y))

# %% [markdown]
# ## Times
#
# What is it worth? We time one new token behind a text of T - 1 tokens: by a step with the cache,
# and by reading the whole text again. (Most texts are far longer than those of the training. The
# time does not depend on what the model says.)


# %%
import time


def quickest(function, *arguments):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments)[0])
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)  # milliseconds


# %%
lengths = [16, 64, 256, 512, 1024, 2048]
again, cached = [], []
for T in lengths:
    everything = jnp.asarray(data[None, :T]), model.init_cache(1, T)
    scores, caches = forward(model, *everything)
    without_last = [cache.truncate(T - 1) for cache in caches]
    one_step = everything[0][:, -1:], without_last  # the last token, beside all others
    same(forward(model, *one_step)[0], scores[:, -1:], within=1e-3)
    again.append(quickest(forward, model, *everything))
    cached.append(quickest(forward, model, *one_step))

# %%
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.semilogx(lengths, again, "o-", label="everything read again")
ax.semilogx(lengths, cached, "o-", label="one step with the cache")
ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
ax.minorticks_off()
ax.set(xlabel="tokens in the text", ylabel="milliseconds for one token")
ax.set_title("In a long text the next token is cheaper with a cache")
ax.legend()
plt.show()

# %%
for T, a, b in zip(lengths, again, cached, strict=True):
    print(f"{T:>5} tokens: {a:6.1f} ms again, {b:4.1f} ms with the cache, {a / b:.1f}x")

# %% [markdown]
# These are the times of one machine, and yours will differ. In a short text there is little to
# gain. Reading again takes longer the longer the text is. The step with the cache hardly grows,
# although its one query looks at every key: it does little arithmetic, and for far longer texts
# what takes its time is reading the cache from memory. That is why chapter 9's models try so hard
# to make the cache small.
#
# ## In a nutshell
#
# | word | meaning |
# | --- | --- |
# | cache | the keys and values of all tokens so far, for each layer |
# | prefill, decode | the prompt in one call; then one token a call |
# | temperature | scores are divided by it before the softmax |
# | ring | a cache whose oldest tokens are overwritten |
#
# ## Exercises
#
# **1.** *Top-k sampling*: draw among the k likeliest tokens only. Write `top_k(k)`, which returns a
# function for `write`. What should `top_k(1)` write?
#
# <details><summary>Answer</summary>
#
# ```python
# def top_k(k, seed=0):
#     keys = iter(jax.random.split(jax.random.key(seed), 1000))
#
#     def choose(scores):  # B V
#         least = jax.lax.top_k(scores, k)[0][:, -1:]
#         return jax.random.categorical(next(keys), jnp.where(scores < least, -jnp.inf, scores))
#
#     return choose
#
# assert write("347 348 ", 12, top_k(1)) == written[:12]
# print(write("347 348 ", 12, top_k(3)))
# ```
#
# With one token to choose from, it is the greedy choice.
#
# </details>
#
# **2.** A cheap way to guess several tokens at once is called *speculative decoding*: somebody
# guesses four tokens, the model reads all four in **one** step, and what is wrong is taken back.
# Guess "9 36" behind "347 348 34", of which the model agrees with some part. `cache.truncate(n)`
# gives the cache with its first n tokens. Show that going on from there is the same as never having
# guessed.
#
# <details><summary>Answer</summary>
#
# ```python
# prompt, guess = "347 348 34", "9 36"
# scores, caches = forward(model, encode(prompt), model.init_cache(1, 64))
# says = [int(scores[0, -1].argmax())]
# scores, caches = forward(model, encode(guess), caches)
# says += [int(token) for token in scores[0].argmax(-1)]  # what the model says at each place
# right = 0
# while right < 4 and ALPHABET.index(guess[right]) == says[right]:
#     right += 1
# caches = [cache.truncate(len(prompt) + right) for cache in caches]
# after, _ = forward(model, jnp.array([[says[right]]]), caches)
# text = prompt + guess[:right] + ALPHABET[says[right]]
# same(after[:, -1], read(text)[:, -1], within=1e-4)
# print(right, "of 4 were right, and one more token is known:", text)
# ```
#
# One step gave several tokens. The text is what the model alone would have written, only sooner.
#
# </details>
#
# **To read:** Pope and others,
# [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102); Leviathan and
# others,
# [Fast Inference from Transformers via Speculative Decoding](https://arxiv.org/abs/2211.17192);
# and the recipes on [generating](../docs/recipes.md), which compile the whole loop.
#
# Next: [11. Linear attention and state](11_linear_attention_and_state.ipynb), in which the past has
# one size, however long the text is.
