"""Draws the README's picture: a right port and a wrong one, and how far each is from PyTorch.

`python docs/picture.py [FILE]` writes it; float64, random weights, carried from torch to Flax. The
wrong port divides its scores by the root of the input's width in place of the head's: nobody sees
it in the weights, and the difference shows it.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from flax import nnx
from matplotlib.colors import LinearSegmentedColormap, LogNorm

import torch_ref
from flax_attn import CausalAttention
from flax_attn.parity import Report, compare, judge, port
from flax_attn.taps import listen

TOKENS = "Your journey starts with one step".split()
WIDTH, HEAD = 8, 5
LIMIT = judge.SAME_FUNCTION
LEAST, MOST = 1e-17, 1.0  # of the scale of differences
GREY, LOUD = "#dddddd", ("#f9d030", "#e8590c", "#b00020")


def of_torch(module: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    """The attention weights in torch, as its dropout receives them."""
    received = []
    module.dropout.register_forward_hook(lambda _, args, __: received.append(args[0]))
    module(torch.tensor(x))
    return received[0].detach().numpy()


def of_flax(module: nnx.Module, x: np.ndarray) -> np.ndarray:
    """The attention weights in Flax."""
    taps = {}
    with listen(taps.__setitem__):
        module(x)
    return np.asarray(taps["weights"])


def ports() -> list[tuple[str, Report, np.ndarray, np.ndarray]]:
    """A right port and a wrong one: name, report, and the weights of torch and of Flax."""
    torch.manual_seed(6)
    theirs = torch_ref.CausalAttention(WIDTH, HEAD, context_length=6, dropout=0.0).double()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    x = np.random.default_rng(6).normal(size=(6, WIDTH))
    drawn = []
    for name, factor in (("a right port", 1.0), ("a wrong port", (HEAD / WIDTH) ** 0.5)):
        mine = CausalAttention(
            WIDTH, HEAD, context_length=6, dropout=0.0, rngs=nnx.Rngs(0), param_dtype=jnp.float64
        )
        port(theirs, mine)
        mine.W_query.kernel[...] *= factor
        report = compare(theirs, mine, x, dtypes=("float64",), weights="as_is")
        drawn.append((name, report, of_torch(theirs, x), of_flax(mine, x)))
    return drawn


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


def loud() -> LinearSegmentedColormap:
    """Grey up to the limit, and from there on yellow to red."""
    at = (np.log(LIMIT) - np.log(LEAST)) / (np.log(MOST) - np.log(LEAST))
    steps = np.linspace(at, 1.0, len(LOUD))
    stops = [(0.0, GREY), (at, GREY), *zip([at + 1e-6, *steps[1:]], LOUD, strict=True)]
    return LinearSegmentedColormap.from_list("loud", stops, N=1024)


def draw(path: Path) -> None:
    """Writes the picture."""
    with jax.enable_x64(True):
        drawn = ports()
    figure, rows = plt.subplots(2, 3, figsize=(10.2, 6.1), layout="constrained")
    for axes, (name, report, theirs, mine) in zip(rows, drawn, strict=True):
        blues = {"cmap": "Blues", "vmin": 0, "vmax": 1}
        show(axes[0], theirs, "PyTorch: attention weights", **blues)
        show(axes[1], mine, f"Flax, {name}", **blues)
        apart = np.abs(mine - theirs)
        verdict = "equal" if report.ok else "DIFFERENT"
        bar = show(
            axes[2],
            np.maximum(apart, LEAST),
            f"|difference|: at most {apart.max():.1e}, {verdict}",
            cmap=loud(),
            norm=LogNorm(LEAST, MOST),
        )
        bar.ax.set_yticks([LEAST, LIMIT, 1e-6, MOST], ["0", f"limit {LIMIT:.0e}", "1e-06", "1"])
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    worst = max(row.verdict.error for row in drawn[0][1].rows)
    print(f"{path}: largest error of any output, tap or gradient {worst:.1e}")


if __name__ == "__main__":
    here = Path(__file__).with_name("identical.png")
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else here)
