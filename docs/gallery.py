"""Draws the gallery: each mask and score by its own `_repr_svg_`, and the page around them.

`python docs/gallery.py` writes docs/gallery.md and docs/gallery/; a FOLDER after it is written
in place of docs/.
"""

import html
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import flax_attn

HERE = Path(__file__).parent
NAMES = {"jnp": jnp, "np": np, **{name: getattr(flax_attn, name) for name in flax_attn.__all__}}
MASKS = {
    "CAUSAL": "A token attends to itself and to those before it.",
    "FULL": "Every token attends to every token, as in an encoder.",
    "Window(3, 0)": "A sliding window: the token and the three before it.",
    "Window(2, 2)": "Local attention to both sides.",
    "Chunked(3) & CAUSAL": "Causal inside chunks of three positions.",
    "Prefix(3) | CAUSAL": "A prompt of three tokens that sees all of itself, then causal.",
    "Lengths(jnp.array([5]))": "Padding behind five real keys.",
    "Documents([3, 2, 3]) & CAUSAL": "Three packed documents in a row, by their lengths.",
    "Segments(jnp.array([0, 0, 1, 1, 1, 2, 2, 2]))": "The same kind of mask by the ids of tokens.",
    "CAUSAL & ~Window(0, 0)": "The past alone, without the token itself.",
    "CAUSAL & (Window(2, 0) | Prefix(1))": "A window and a first token that all attend to.",
    "MaskFn(lambda b, n, q, k: (q >= k) & ((q - k) % 2 == 0))": "Any function: every second key.",
    "Dense(np.eye(8, dtype=bool)[::-1])": "Any boolean array.",
}
SCORES = {
    "Alibi(jnp.array([0.5]))": "A penalty that grows with the distance.",
    "T5Bias(jnp.linspace(-2, 2, 32)[:, None])": "A learned bias for each bucket of distances.",
    "Additive(jnp.arange(64.0).reshape(8, 8) / 64)": "Any array that is added.",
    "ScoreFn(lambda x, b, n, q, k: x - 0.1 * (q - k) ** 2)": "Any function.",
    "Softcap(20.0)": "A cap: logits from -100 to 100, and what becomes of them.",
    "Softcap(20.0) >> Alibi(jnp.array([0.5]))": "A chain: first capped, then biased.",
}
HEAD = """# A gallery of masks and scores

Every picture was drawn by the library from the line beside it. Rows are queries, columns are keys.
For a mask, a dark cell means "may attend". For a score, the colour is what it makes of a logit of
zero: blue is less, red is more. In a notebook, a mask or a score at the end of a cell shows its
picture; `draw` gives text anywhere:

```python
import jax.numpy as jnp
from flax_attn import CAUSAL, Alibi, Documents, Window

print((CAUSAL & Window(2, 0)).draw(5))  # five queries and keys
print(Documents([3, 2]).draw(5))
print(Alibi(jnp.array([0.5])).draw(3))
```

`&`, `|` and `~` combine masks, and `>>` chains scores. Give them to `attend(..., mask=, score=)`,
or masks to a layer as `mask=`, scores as `rules=Rules(score=...)` when it is built.
"""


def files() -> dict[str, str]:
    """The page and the pictures, by their paths below docs/."""
    made, lines = {}, [HEAD]
    for title, shown in (("Masks", MASKS), ("Scores", SCORES)):
        lines += [f"## {title}", "", "| drawn | by |", "| --- | --- |"]
        for line, about in shown.items():
            name = f"gallery/{title.lower()}-{1 + [*shown].index(line)}.svg"
            made[name] = eval(line, NAMES)._repr_svg_()
            code = html.escape(line).replace("|", "&#124;")
            lines.append(f"| ![{about}]({name}) | <code>{code}</code><br>{about} |")
        lines.append("")
    made["gallery.md"] = "\n".join(lines)
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        (folder / path).write_text(text, "utf-8")
