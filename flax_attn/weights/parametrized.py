"""Weights that torch computes from others: parametrizations, and the old weight norm."""

OLD = {"weight_g": "weight_norm", "weight_v": "weight_norm", "weight_orig": "spectral_norm"}


def not_removed(name: str) -> str | None:
    """Explains why a part of a computed weight has no target, and what to do; None for others.

    >>> not_removed("conv.weight") is None
    True
    >>> "remove_weight_norm(module.conv)" in not_removed("conv.weight_g")
    True
    """
    before, mark, after = f".{name}".partition(".parametrizations.")
    owner, role = (before, after.partition(".")[0]) if mark else f".{name}".rsplit(".", 1)
    if not mark and role not in OLD:
        return None
    owner = owner.removeprefix(".")
    module = f"module.{owner}" if owner else "module"
    weight, method = (role, "parametrizations") if mark else ("weight", OLD[role])
    remove = f"torch.nn.utils.remove_{method}({module})"
    if mark:
        remove = f'torch.nn.utils.parametrize.remove_parametrizations({module}, "{weight}")'
    return (
        f"{owner}{'.' * bool(owner)}{weight} is computed from other tensors ({method}): to carry "
        f"the result, first call {remove}; to train the parts, hold each as a Param in Flax and "
        "say a Rule for it."
    )
