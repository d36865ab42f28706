"""Automatic padding: whether `chunk` may return chunks of unequal size."""

import os


class _AutoPadding(type):
    """Gives `DataProtoConfig` a class property."""

    auto_padding_key = "_verl_auto_padding"
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        """Whether every batch may be split into chunks of unequal size; VERL_AUTO_PADDING=1 sets it too."""
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise ValueError(f"DataProtoConfig.auto_padding: expected True or False, found {enabled!r}")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """Settings of all batches of this process.

    Attributes:
        auto_padding: let `chunk` split a number of rows that the number of chunks does not divide.
        auto_padding_key: the `meta_info` entry that does the same for one batch.
    """
