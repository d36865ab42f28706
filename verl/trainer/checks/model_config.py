"""The config of a model: one error for everything that makes it unusable."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.modeling.huggingface import read_config
from verl.utils.paths import expanded

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_key_value_heads", "head_dim")


def readable_config(path: str, overrides: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """`read_config`, with a ValueError also for sizes that no model has, and for what else transformers refuses."""
    if path:
        _check_folder(path)
    try:
        found = read_config(path, overrides, trust_remote_code)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # strict dataclasses raise a separate error type, checks of single models any
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{path!r}: transformers refuses its config.json ({reason}): expected that of a model"
        ) from error
    _check_sizes(path, found.get_text_config())
    return found


def _check_sizes(path: str, config: Any) -> None:
    sizes = {name: size for name in _SIZES if isinstance(size := getattr(config, name, None), int)}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"the config of {path!r} has {name}={size}: expected int >= 1")
    heads, of_keys = (sizes.get(name, 1) for name in ("num_attention_heads", "num_key_value_heads"))
    if "num_attention_heads" in sizes and heads % of_keys:
        raise ValueError(
            f"the config of {path!r} has num_attention_heads={heads} and num_key_value_heads={of_keys}: expected a "
            "multiple"
        )


def _check_folder(path: str) -> None:
    folder = expanded(path)  # os.path: methods of Path raise OSError for a name that is too long
    if os.path.isdir(folder) and not os.path.isfile(folder / "config.json"):
        raise ValueError(f"{path!r} has no config.json: expected the folder of a Hugging Face model")
    if (Path(path).is_absolute() or path.startswith((".", "~"))) and not os.path.exists(folder):
        raise ValueError(f"there is no folder {path!r}")
