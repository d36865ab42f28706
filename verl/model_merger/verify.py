"""Proof that a merged folder is the model of the checkpoint, and not the one that training started from."""

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.huggingface import Export, build, refuse_faults
from verl.model_merger.safetensors_folder import SafetensorsFolder
from verl.model_merger.source import same_bits

logger = logging.getLogger("verl.model_merger")

#: share of the largest logit by which two passes over equal weights may differ, for the order of additions is not fixed
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def check_against_checkpoint(folder: Path, export: Export) -> float:
    """Load the folder with transformers and compare it with the checkpoint's weights, put together a second time.

    Every tensor by its checksum, and the logits of a few tokens. One model is in memory at a time.

    Returns:
        The largest difference of two logits.

    Raises:
        ValueError: weights that the model lacks or does not know, another tensor, other logits.
    """
    found, found_sums = _load(export, folder, None)
    again = export.again()
    if not export.source.exact:
        _compare_rounded(SafetensorsFolder(folder), again)
    expected, expected_sums = _load(export, None, again)
    wrong = [name for name, checksum in expected_sums.items() if found_sums[name] != checksum]
    if export.source.exact and wrong:
        raise ValueError(f"{wrong[0]} of the merged model is not that of the checkpoint: the merge is wrong")
    difference = (found - expected).abs().max().item()
    if not difference <= _TOLERANCE[export.main_dtype] * expected.abs().max().item():
        raise ValueError(
            f"the logits of the merged model differ from the checkpoint's by up to {difference:.3g} "
            f"(they reach {expected.abs().max().item():.3g}): the merge is wrong, nothing was written"
        )
    return difference


def _load(
    export: Export, folder: Path | None, weights: dict[str, torch.Tensor] | None
) -> tuple[torch.Tensor, dict[str, str]]:
    """Logits and the checksum of every tensor, of a model that is gone again afterwards."""
    module, faults = build(export.model, folder, weights, export.main_dtype)
    refuse_faults(export.model, faults)
    with ThreadPoolExecutor(8) as pool:  # checksums release the interpreter lock
        state = module.state_dict()
        return _logits(module), dict(zip(state, pool.map(_checksum, state.values())))


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _logits(module: Any) -> torch.Tensor:
    """Of 16 tokens from all over the vocabulary, (1, 16, V) or (1, 16, labels), float32."""
    vocabulary = module.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(16)[None] * 7919 + 1) % vocabulary  # in steps of a large prime
    with torch.no_grad():
        return module.eval()(input_ids=ids).logits.float()


def _compare_rounded(written: SafetensorsFolder, expected: dict[str, torch.Tensor]) -> None:
    """Compare tensors that were calculated and not copied, as adapters are: equal but for the last bits."""
    for name in written.names():
        if name not in expected:  # not under one name in memory and on disk: compared by their logits alone
            continue
        found = written.read(name).double()
        spacing = 2 * torch.finfo(expected[name].dtype).eps if expected[name].is_floating_point() else 0.0
        if not torch.allclose(found, expected[name].double(), spacing, spacing):
            raise ValueError(f"{name} of the merged model is not that of the checkpoint: the merge is wrong")


def first_difference(written: SafetensorsFolder, base: SafetensorsFolder) -> str | None:
    """The first tensor that the base model lacks or has with other values; None when the models are the same.

    The base is rounded to the dtype of the merged model first.
    """
    of_base = set(base.names())
    for name in written.names():
        if name not in of_base:
            return name
        tensor = written.read(name)
        if not same_bits(tensor, base.read(name).to(tensor.dtype)):
            return name
    return None
