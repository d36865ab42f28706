"""Which roles share processes, and which devices these see: pure functions over the configuration."""

from collections.abc import Sequence


def visible_devices(devices: Sequence[int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a pool that uses the GPUs `devices`, counted among those visible here now.

    >>> visible_devices([2, 3], "4,5,6,7")
    '6,7'
    """
    if visible is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    missing = [d for d in devices if d >= len(names)]
    if missing:
        raise ValueError(f"GPU {missing[0]} was asked for, but CUDA_VISIBLE_DEVICES={visible} shows {len(names)}")
    return ",".join(names[d] for d in devices)
