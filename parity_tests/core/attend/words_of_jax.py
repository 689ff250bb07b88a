"""What JAX says where a custom rule has no derivative; at night the oldest JAX is asked."""

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning

from flax_attn.attend import FORWARD_MODE, SEVERAL_DEVICES, without_rule


@jax.custom_vjp
def ruled(x):
    return x


ruled.defvjp(lambda x: (x, None), lambda _, dx: (dx,))


@custom_partitioning
def divided(x):
    return x


divided.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x: x, result.sharding, (result.sharding,)),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i -> i",
)


def check() -> None:
    x = jnp.ones(2)
    for rule, kind, words in (
        (ruled, TypeError, FORWARD_MODE),
        (divided, NotImplementedError, SEVERAL_DEVICES),
    ):
        for call in (rule, jax.jit(rule), lambda x, rule=rule: rule(x).sum()):
            try:
                jax.jvp(call, (x,), (x,))
            except Exception as error:
                found = without_rule(error)
                assert type(found) is kind and str(found) == words, (jax.__version__, error)
            else:
                raise AssertionError("JAX has this derivative now: `without_rule` is too much.")
    assert without_rule(TypeError("another")) is without_rule(ValueError("custom_vjp")) is None


if __name__ == "__main__":
    check()
    print(f"JAX {jax.__version__} says what is read.")
