"""Draws docs/report.png, the page of a wrong port's report: `python docs/report.py [FILE]`.

The original is a residual block with a norm and two linear layers. The port calls `nnx.gelu`, which
is the tanh approximation by default. The picture is taken by Chromium, which must be on the PATH.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from flax import nnx
from PIL import Image

from flax_attn.parity import Report, compare

HERE = Path(__file__).parent
WIDTH, HEIGHT = 880, 762  # pixels: the verdict, what it does, and the errors by depth


class Theirs(torch.nn.Module):
    """The original."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up, self.down = torch.nn.Linear(6, 11), torch.nn.Linear(11, 6)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Mine(nnx.Module):
    """The port, with the wrong activation."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.up, self.down = nnx.Linear(6, 11, rngs=rngs), nnx.Linear(11, 6, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def report() -> Report:
    """What the judge says of the port."""
    x = np.random.default_rng(0).normal(size=(2, 5, 6))
    return compare(Theirs(), Mine(nnx.Rngs(0)), x)


def draw(path: Path) -> None:
    """Writes the picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("docs/report.py needs chromium or google-chrome on the PATH.")
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "report.html", Path(folder) / "shot.png"
        report().to_html(page)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}"]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
        Image.open(shot).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(
            path, optimize=True
        )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "report.png")
