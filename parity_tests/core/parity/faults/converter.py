"""Faults of converters: the port is right, the weights are not."""

import numpy as np

from .fault import A, Fault, column, edited

Q, K, V, O = (f"{A}{name}_proj.kernel" for name in "qkvo")


def transposed(path):
    return edited(lambda w, z: {path: w[path].T}, pair="square")


def exchanged(one, two, pair="apart"):
    return edited(lambda w, z: {one: w[two], two: w[one]}, pair=pair)


def exchanged_layers(owner, other, pair="apart"):
    roles = ("kernel", "bias")
    pairs = [(f"{owner}.{role}", f"{other}.{role}") for role in roles]
    return edited(lambda w, z: {k: w[v] for a, b in pairs for k, v in ((a, b), (b, a))}, pair=pair)


def constant(path, value):
    return edited(lambda w, z: {path: np.full_like(w[path], value)})


def heads_of(array, heads):
    return array.reshape(*array.shape[:-1], heads, -1)


def flat(array):
    return array.reshape(*array.shape[:-2], -1)


def permuted_heads(name, order):
    """Heads of a projection's outputs in another order, bias too."""

    def edit(w, z):
        heads = z.N if name == "q_proj" else z.K
        return {
            p: flat(np.take(heads_of(w[p], heads), order(heads), axis=-2))
            for p in (f"{A}{name}.kernel", f"{A}{name}.bias")
        }

    return edited(edit)


def output_rows(change):
    """Rows of o_proj's kernel, N h by D, laid out anew."""
    return edited(lambda w, z: {O: change(w[O].reshape(z.N, z.h, z.D)).reshape(-1, z.D)})


def head_width_first(w, z):
    paths = (Q, f"{A}q_proj.bias")
    return {p: flat(np.swapaxes(heads_of(w[p], z.N), -1, -2)) for p in paths}


def interleaved_rows(w, z):
    """Channels of each head in the order of interleaved rotary pairs."""

    def change(array, heads):
        halves = heads_of(array, heads).reshape(*array.shape[:-1], heads, 2, -1)
        return np.swapaxes(halves, -1, -2).reshape(array.shape)

    paths = ((f"{A}q_proj.{r}", f"{A}k_proj.{r}") for r in ("kernel", "bias"))
    return {p: change(w[p], n) for q, k in paths for p, n in ((q, z.N), (k, z.K))}


def fused_in_heads(w, z):
    """A fused (3 n h) split as (n 3 h)."""
    fused = np.concatenate([w[Q], w[K], w[V]], axis=-1).reshape(z.D, z.N, 3, z.h)
    return dict(zip((Q, K, V), (flat(fused[:, :, i]) for i in range(3)), strict=True))


def last_head_random(w, z):
    kernel = heads_of(np.array(w[Q]), z.N)
    kernel[:, -1] = np.random.RandomState(1).standard_normal((z.D, z.h)) * 0.2
    return {Q: flat(kernel)}


def through(path, dtype):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    edit = lambda w, z: {path: w[path].astype(kind).astype(np.float64)}  # noqa: E731
    return edited(edit, low=column(edit))


def layers_exchanged(w, z):
    names = [p for p in w if p.startswith("layers.0.")]
    others = [p.replace("layers.0.", "layers.1.") for p in names]
    return {a: w[b] for x, y in zip(names, others, strict=True) for a, b in ((x, y), (y, x))}


def mlp_as_stored(w, z):
    return {f"layers.0.mlp.{x}.kernel": w[f"layers.0.mlp.{x}.kernel"].T for x in ("up", "down")}


def _reverse(heads):
    return np.arange(heads)[::-1]


def _roll(heads):
    return np.roll(np.arange(heads), 1)


C = "converter"
FAULTS = [
    Fault("q_proj not transposed", C, transposed(Q), f"{A}q_proj", "untransposed"),
    Fault("k_proj not transposed", C, transposed(K), f"{A}k_proj", "untransposed"),
    Fault("o_proj not transposed", C, transposed(O), f"{A}o_proj", "untransposed"),
    Fault(
        "MLP kernels not transposed",
        C,
        edited(mlp_as_stored, pair="square"),
        "layers.0.mlp.up",
        "untransposed",
    ),
    Fault("head not transposed", C, transposed("head.kernel"), "head", "untransposed"),
    Fault(
        "q_proj and k_proj exchanged",
        C,
        exchanged_layers(f"{A}q_proj", f"{A}k_proj", "square"),
        f"{A}q_proj",
        "exchanged",
    ),
    Fault(
        "k_proj and v_proj exchanged",
        C,
        exchanged_layers(f"{A}k_proj", f"{A}v_proj"),
        f"{A}k_proj",
        "exchanged",
    ),
    Fault(
        "the two layers exchanged",
        C,
        edited(layers_exchanged, deep=True),
        "layers.0.norm1",
        "the weights of layers.1",
    ),
    Fault(
        "bias of q_proj missing", C, constant(f"{A}q_proj.bias", 0.0), f"{A}q_proj", "bias missing"
    ),
    Fault(
        "bias of o_proj missing", C, constant(f"{A}o_proj.bias", 0.0), f"{A}o_proj", "bias missing"
    ),
    Fault(
        "gain of norm1 left at one",
        C,
        constant("layers.0.norm1.scale", 1.0),
        "layers.0.norm1",
        "gain missing",
    ),
    Fault(
        "gain of norm2 stored less one",
        C,
        edited(lambda w, z: {"layers.0.norm2.scale": w["layers.0.norm2.scale"] - 1}),
        "layers.0.norm2",
        "gain",
    ),
    Fault("query heads rolled", C, permuted_heads("q_proj", _roll), f"{A}q_proj", "heads"),
    Fault("key heads reversed", C, permuted_heads("k_proj", _reverse), f"{A}k_proj", "heads"),
    Fault(
        "o_proj's heads reversed", C, output_rows(lambda rows: rows[::-1]), f"{A}o_proj", "heads"
    ),
    Fault(
        "o_proj's rows as (h n)",
        C,
        output_rows(lambda rows: rows.swapaxes(0, 1)),
        f"{A}o_proj",
        "heads",
    ),
    Fault("q_proj's columns as (h n)", C, edited(head_width_first), f"{A}q_proj", "heads"),
    Fault("rows in interleaved rotary order", C, edited(interleaved_rows), f"{A}q_proj"),
    Fault("fused (3 n h) split as (n 3 h)", C, edited(fused_in_heads, pair="square"), f"{A}q_proj"),
    Fault(
        "embedding one row off",
        C,
        edited(lambda w, z: {"embed.embedding": np.roll(w["embed.embedding"], 1, axis=0)}),
        "embed",
        "rows",
    ),
    Fault(
        "head tied to the embedding",
        C,
        edited(lambda w, z: {"head.kernel": w["embed.embedding"].T}),
        "head",
    ),
    Fault("last query head not carried", C, edited(last_head_random), f"{A}q_proj"),
    Fault("q_proj through bfloat16", C, through(Q, "bfloat16"), f"{A}q_proj", "bfloat16"),
]
