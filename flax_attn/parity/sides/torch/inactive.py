"""Finds clamps, masks and branches of torch that a run does not test: they changed nothing."""

from typing import Any

CLAMPS = {"clamp", "clamp_min", "clamp_max"}
INACTIVE = "never active in this run, so not tested: {}"


class Inactive:
    """Tracks clamps, `where` and `masked_fill` by submodule: whether any call had an effect."""

    def __init__(self) -> None:
        self.active: dict[str, bool] = {}

    def note(self, name: str, args: tuple[Any, ...], before: Any, out: Any, path: str) -> None:
        """Records one operation; `before` is a clamp's operand before it ran."""
        if name.rstrip("_") in CLAMPS:
            active = bool((out != before).any())
        elif name.rstrip("_") == "masked_fill":
            active = bool(args[1].any())
        else:
            condition = args[0]
            active = bool(condition.any()) and not bool(condition.all())
        what = f"{name.rstrip('_')} in {path or 'the module'}"
        self.active[what] = self.active.get(what, False) or active

    def operand(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns what must be known before the operation runs, or None if it is not tracked."""
        import torch

        if not args or not torch.is_tensor(args[0]) or not args[0].numel():
            return None
        if name in ("masked_fill", "masked_fill_") or (name == "where" and len(args) == 3):
            return args[0]
        if name.rstrip("_") in CLAMPS and args[0].is_floating_point():
            return args[0].clone() if name.endswith("_") else args[0]
        return None

    def notes(self) -> list[str]:
        names = [what for what, active in self.active.items() if not active]
        return [INACTIVE.format(", ".join(names))] if names else []
