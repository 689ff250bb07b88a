"""What the chapters share: the six words, the look of the plots, drawing and comparing."""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_TRANSFORMERS = HAS_TORCH and importlib.util.find_spec("transformers") is not None

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
)  # T D: one row for each word

jax.config.update("jax_default_matmul_precision", "float32")  # all digits, on every device
np.set_printoptions(precision=4, suppress=True, linewidth=100)
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.titlesize": 10})


def quiet_transformers():
    """The library transformers, without its progress bars and its warnings of missing kernels."""
    with warnings.catch_warnings(action="ignore"):
        import transformers

        transformers.AutoModel  # noqa: B018, imports what a model needs
    transformers.logging.set_verbosity_error()
    return transformers


def same(got, want, within=1e-5):
    """Raises unless both arrays agree; prints the largest difference. Infinities must coincide."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    finite = np.isfinite(want)
    gap = np.abs(got[finite] - want[finite]).max()
    assert gap <= within, f"largest difference {gap:.0e}, more than {within:.0e}"
    print(f"equal: largest difference {gap:.0e}, allowed {within:.0e}")


def as_printed(got, table):
    """The same for a table that shows four decimals."""
    same(got, table, within=5.1e-5)


def heat(ax, table, title="", rows=tokens, columns=tokens, cmap="Blues", least=0.0, most=None):
    """Draws a table as colours and numbers; a cell of minus infinity stays grey."""
    table = np.asarray(table)
    image = ax.imshow(np.where(np.isfinite(table), table, np.nan), cmap=cmap, vmin=least, vmax=most)
    ax.set(title=title, facecolor="0.85")
    ax.set_xticks(range(len(columns)), columns, rotation=40)
    ax.set_yticks(range(len(rows)), rows)
    digits = 2 if table.dtype.kind == "f" else 0
    for (i, j), number in np.ndenumerate(table):
        text = f"{number:.{digits}f}".replace("-inf", r"$-\infty$")
        red, green, blue, _ = image.cmap(image.norm(number)) if np.isfinite(number) else [1] * 4
        color = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
        ax.text(j, i, text, ha="center", va="center", color=color, fontsize=8)


def diagram(boxes, arrows, size=(8.4, 2.6), title=""):
    """Draws boxes, `name: (x, y, color)`, and arrows, `(from, to)` or `(from, to, label)`."""
    fig, ax = plt.subplots(figsize=size)
    fig.subplots_adjust(0, 0, 1, 0.9 if title else 1)
    drawn = {}
    for name, (right, up, color) in boxes.items():
        look = {"boxstyle": "round,pad=0.45", "facecolor": color, "edgecolor": "0.3"}
        drawn[name] = ax.text(right, up, name, ha="center", va="center", bbox=look)
    fig.canvas.draw()
    for start, end, *label in arrows:
        (x0, y0), (x1, y1) = boxes[start][:2], boxes[end][:2]
        patches = {"patchA": drawn[start].get_bbox_patch(), "patchB": drawn[end].get_bbox_patch()}
        style = {"arrowstyle": "-|>", "color": "0.3", "shrinkA": 1, "shrinkB": 2}
        ax.annotate("", (x1, y1), (x0, y0), arrowprops={**style, **patches})
        if label:
            place = {"ha": "center", "va": "bottom", "color": "0.3", "fontsize": 8}
            ax.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.04, *label, **place)
    across, upwards, _ = zip(*boxes.values(), strict=True)
    ax.set(xlim=(min(across) - 0.7, max(across) + 0.7), title=title)
    ax.set(ylim=(min(upwards) - 0.6, max(upwards) + 0.6))
    ax.axis("off")
    plt.show()
