"""Draws the README's picture: one attention in torch, in Flax, and how far apart the two are.

`python docs/picture.py [FILE]` writes it; float64, random weights, carried from torch to Flax.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from flax import nnx
from matplotlib.colors import LogNorm

import torch_ref
from flax_attn import CausalAttention
from flax_attn.parity import compare, judge, port
from flax_attn.taps import listen

TOKENS = "Your journey starts with one step".split()
LIMIT = judge.SAME_FUNCTION


def of_torch(module: torch.nn.Module, x: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, ...]:
    """The attention weights, and the gradient that reaches them, in torch."""
    held = []
    module.dropout.register_forward_hook(lambda _, args, __: held.append(args[0]))
    out = module(torch.tensor(x))
    held[0].retain_grad()
    (out * torch.tensor(seen)).sum().backward()
    return held[0].detach().numpy(), held[0].grad.numpy()


def of_flax(module: nnx.Module, x: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same two in Flax: the gradient is that of a zero added to the weights."""

    def loss(probe):
        held = {}

        def hear(name, value):
            if name == "weights":
                held[name] = value
                return value + probe

        with listen(hear):
            out = module(x)
        return jnp.sum(out * seen), held["weights"]

    gradient, weights = jax.grad(loss, has_aux=True)(jnp.zeros((len(x), len(x))))
    return np.asarray(weights), np.asarray(gradient)


def pair() -> tuple[list[tuple[np.ndarray, np.ndarray]], float]:
    """Weights and gradients, each of torch and of Flax, and the worst error of the report."""
    torch.manual_seed(6)
    theirs = torch_ref.CausalAttention(8, 5, context_length=6, dropout=0.0).double()
    mine = CausalAttention(
        8, 5, context_length=6, dropout=0.0, rngs=nnx.Rngs(0), param_dtype=jnp.float64
    )
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    port(theirs, mine)
    draw = np.random.default_rng(6)
    x, seen = draw.normal(size=(6, 8)), draw.normal(size=(6, 5))
    report = compare(theirs, mine, x, dtypes=("float64",))
    assert report.ok, report
    worst = max(row.verdict.error for row in report.rows)
    pairs = zip(of_torch(theirs, x, seen), of_flax(mine, x, seen), strict=True)
    return list(pairs), worst


def show(ax, values, title, **colours):
    """One map with the tokens on its axes; what nobody may look at stays white."""
    hidden = np.triu(np.ones_like(values, dtype=bool), k=1)
    image = ax.imshow(np.ma.array(values, mask=hidden), **colours)
    ax.set_xticks(range(6), TOKENS, rotation=40, ha="right", fontsize=8)
    ax.set_yticks(range(6), TOKENS, fontsize=8)
    ax.set_title(title, fontsize=10)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.78)
    bar.ax.tick_params(labelsize=7)
    return bar


def draw(path: Path) -> None:
    """Writes the picture."""
    with jax.enable_x64(True):
        pairs, worst = pair()
    figure, rows = plt.subplots(2, 3, figsize=(10.2, 6.1), layout="constrained")
    for axes, (theirs, mine), what in zip(rows, pairs, ("weights", "gradient"), strict=True):
        reach = np.abs(theirs).max()
        colours = (
            {"cmap": "Blues", "vmin": 0, "vmax": reach}
            if what == "weights"
            else {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach}
        )
        show(axes[0], theirs, f"PyTorch: {what}", **colours)
        show(axes[1], mine, f"flax_attn: {what}", **colours)
        apart = np.abs(mine - theirs)
        bar = show(
            axes[2],
            np.maximum(apart, 1e-17),
            f"|difference|: at most {apart.max():.1e}",
            cmap="YlOrRd",
            norm=LogNorm(1e-17, LIMIT),
        )
        bar.ax.set_yticks([1e-17, 1e-15, LIMIT], ["0", "1e-15", f"limit {LIMIT:.0e}"])
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    print(f"{path}: largest error of any output, tap or gradient {worst:.1e}")


if __name__ == "__main__":
    here = Path(__file__).with_name("identical.png")
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else here)
