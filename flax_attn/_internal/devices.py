"""Simulated CPU devices."""


def fake_devices(count: int) -> dict[str, str]:
    """Environment variables with which a CPU-only process has `count` devices.

    >>> fake_devices(8)
    {'JAX_NUM_CPU_DEVICES': '8'}
    """
    return {"JAX_NUM_CPU_DEVICES": str(count)}
