"""HuggingFace configs and weights, read strictly: an unknown override or a missing weight is an error."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from verl.registry import did_you_mean


def read_config(path: str, overrides: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """The HuggingFace config of a model.

    Args:
        path: of a local folder, or the name of a hub model.
        overrides: attributes to set (`model.override_config`).
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ValueError: there is no model, or its config has no attribute of an override's name.
    """
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise ValueError(f"no HuggingFace model at {path!r}: {error}") from error
    known = config.to_dict()
    for name, value in overrides.items():
        if name not in known:
            raise ValueError(f"override_config: the model's configuration has no {name!r}: {did_you_mean(name, known)}")
        setattr(config, name, value)
    return config


def load_pretrained(
    auto: Any, path: str, config: Any, dtype: torch.dtype, new_prefix: str | None = None, **build: Any
) -> tuple[nn.Module, set[str]]:
    """A model with the weights of its files.

    Args:
        auto: the Auto class of transformers.
        path: as in `read_config`.
        config: the HuggingFace config.
        dtype: of the parameters.
        new_prefix: parameters whose names start with it may be missing from the files.
        build: further arguments of `from_pretrained`.

    Returns:
        The module and the names of the missing parameters, which transformers has initialized at random.

    Raises:
        ValueError: other weights are missing, or have another shape.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of missing keys is replaced by the error below
    try:
        module, report = auto.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **build)
    finally:
        logging.set_verbosity(verbosity)
    new = {name for name in report["missing_keys"] if new_prefix is not None and name.startswith(new_prefix)}
    missing = sorted(set(report["missing_keys"]) - new)
    if missing or report["mismatched_keys"]:
        raise ValueError(
            f"{path!r} lacks weights of {type(module).__name__}, which would stay random: missing {missing[:5]}, "
            f"with another shape {list(report['mismatched_keys'])[:5]}"
        )
    return module, new
