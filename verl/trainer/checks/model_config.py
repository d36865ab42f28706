"""The config of a model: one error for everything that makes it unusable."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.modeling.huggingface import read_config
from verl.utils.paths import expanded

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


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
    text = found.get_text_config()
    for name in _SIZES:
        if isinstance(size := getattr(text, name, None), int) and size < 1:
            raise ValueError(f"{path!r}: its config.json has {name}={size}: expected int >= 1")
    return found


def _check_folder(path: str) -> None:
    folder = expanded(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{path!r} has no config.json: expected the folder of a Hugging Face model")
    if (Path(path).is_absolute() or path.startswith((".", "~"))) and not folder.exists():
        raise ValueError(f"there is no folder {path!r}")
