"""Value models of vision-language models: the model with a linear layer `score` instead of its language-model head."""

import json
import os
from pathlib import Path

import torch
from torch import nn

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def value_model(module: nn.Module) -> nn.Module:
    """Replace the language-model head by `score`, hidden size -> 1, initialized with zeros, in place.

    Args:
        module: a vision-language model of transformers.
    """
    cls = type(module)
    head = module.get_output_embeddings().weight
    with head.device:
        score = nn.Linear(module.config.get_text_config().hidden_size, 1, dtype=head.dtype)
    nn.init.zeros_(score.weight)
    nn.init.zeros_(score.bias)
    del module.lm_head
    module.score = score
    module.config.tie_word_embeddings = False
    # the methods of transformers that look for the head find none
    members = {"_tied_weights_keys": {}, "get_output_embeddings": _none, "can_generate": _no}
    module.__class__ = type(cls.__name__, (cls,), members)
    module.all_tied_weights_keys = {}
    return module


def _none(self: nn.Module) -> None:
    return None


def _no(self: nn.Module) -> bool:
    return False


@torch.no_grad()
def load_head(score: nn.Linear, path: str) -> bool:
    """Load the head from a folder that `save_pretrained` of a value model wrote.

    Returns:
        Whether the files have one.
    """
    from safetensors import safe_open

    folder = Path(os.path.expanduser(path))
    weights: dict[str, torch.Tensor] = {}
    for name in ("score.weight", "score.bias"):
        file = folder / _SINGLE
        if (folder / _INDEX).is_file():
            file = folder / json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].get(name, _SINGLE)
        if not file.is_file():
            return False
        with safe_open(file, "pt") as tensors:
            if name not in tensors.keys():  # noqa: SIM118  not a dictionary
                return False
            weights[name] = tensors.get_tensor(name)
    score.weight.copy_(weights["score.weight"])
    score.bias.copy_(weights["score.bias"])
    return True
