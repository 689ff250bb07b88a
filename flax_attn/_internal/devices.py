"""Devices that one CPU stands for."""


def fake_devices(count: int) -> dict[str, str]:
    """The environment in which a new process has so many, where it has no accelerator.

    >>> fake_devices(8)
    {'JAX_NUM_CPU_DEVICES': '8'}
    """
    return {"JAX_NUM_CPU_DEVICES": str(count)}
