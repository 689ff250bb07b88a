"""`python -m parity_tests.core.parity.large [--faulty]`: what comparing GPT-2 small costs.

The figures of docs/porting.md: float64 with all gradients, 16 tokens, eagerly and under jit; CPU
seconds without imports, and the highest use of memory above that of the two modules in float32.
`--faulty` plants another epsilon in layer 7.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import CAUSAL, attend, merge_heads, split_heads
from flax_attn.parity import Rule, compare

RULES = (
    Rule("transformer.{wte,wpe,ln_f} -> {wte,wpe,ln_f}"),
    Rule("transformer.h.*.{ln_1,ln_2,mlp.c_fc,mlp.c_proj} -> layers.*.{ln_1,ln_2,up,down}"),
    Rule("transformer.h.*.attn.{c_attn,c_proj} -> layers.*.{qkv,out}"),
    Rule.tied("lm_head.weight -> transformer.wte.weight"),
)


class Block(nnx.Module):
    """One layer: attention and an MLP, each behind its norm."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.head_dim = width // heads
        eps = {"epsilon": 1e-5, "rngs": rngs}
        self.ln_1, self.ln_2 = nnx.LayerNorm(width, **eps), nnx.LayerNorm(width, **eps)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # B T D
        parts = jnp.split(self.qkv(self.ln_1(x)), 3, axis=-1)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)  # B T N H
        x = x + self.out(merge_heads(attend(q, k, v, mask=CAUSAL)))
        return x + self.down(jax.nn.gelu(self.up(self.ln_2(x)), approximate=True))


class Port(nnx.Module):
    """GPT-2 with its tied head."""

    def __init__(self, config, rngs: nnx.Rngs):
        width = config.n_embd
        self.wte = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.wpe = nnx.Embed(config.n_positions, width, rngs=rngs)
        self.layers = nnx.List([Block(width, config.n_head, rngs) for _ in range(config.n_layer)])
        self.ln_f = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:  # B T
        x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.wte.attend(self.ln_f(x))


@contextmanager
def highest() -> Iterator[list[float]]:
    """GiB of memory in use before, and the most meanwhile."""
    used, with_end = [_used(), _used()], False

    def watch() -> None:
        while not with_end:
            used[1] = max(used[1], _used())
            time.sleep(0.05)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield used
    finally:
        with_end = True
        thread.join()


def _used() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 2**20


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config()
    theirs, mine = GPT2LMHeadModel(config).eval(), Port(config, nnx.Rngs(0))
    if "--faulty" in sys.argv[1:]:
        mine.layers[7].ln_2.epsilon = 1e-6
    ids = np.random.RandomState(0).randint(0, config.vocab_size, (1, 16))
    call = {"torch_call": lambda module, ids: module(ids, use_cache=False).logits}
    start = time.process_time()
    with highest() as used:
        print(compare(theirs, mine, ids, rules=RULES, dtypes=("float64",), **call))
    seconds = time.process_time() - start
    print(f"{seconds:.0f} CPU seconds, {used[1] - used[0]:.1f} GiB above the two modules")


if __name__ == "__main__":
    main()
