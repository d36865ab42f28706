"""Verify that a merged folder contains the model of the checkpoint, and not the base model."""

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.huggingface import Export, build, refuse_faults
from verl.model_merger.sources import SafetensorsFolder, same_bits

logger = logging.getLogger("verl.model_merger")

#: tolerated difference relative to the largest logit: with equal weights, the order of summation may still differ
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def check_against_checkpoint(folder: Path, export: Export) -> float:
    """Load the folder with transformers and compare it with the checkpoint's weights, read a second time.

    Compares the checksum of every tensor, and the logits of a few tokens. One model is in memory at a time.

    Returns:
        The largest absolute difference of logits.

    Raises:
        ValueError: For missing or unexpected weights, or if a tensor or the logits differ.
    """
    merged, merged_sums = _load(export, folder, None)
    expected, expected_sums = _load(export, None, export.source_tensors())
    differing = [name for name, checksum in expected_sums.items() if merged_sums[name] != checksum]
    if differing:
        raise ValueError(
            f"{differing[0]} of the merged model differs from the checkpoint: the merge failed, nothing was written"
        )
    difference = (merged - expected).abs().max().item()
    if not difference <= _TOLERANCE[export.main_dtype] * expected.abs().max().item():
        raise ValueError(
            f"the logits of the merged model differ from the checkpoint's by up to {difference:.3g} "
            f"(largest logit: {expected.abs().max().item():.3g}): the merge failed, nothing was written"
        )
    return difference


def _load(
    export: Export, folder: Path | None, weights: dict[str, torch.Tensor] | None
) -> tuple[torch.Tensor, dict[str, str]]:
    """Return logits and the checksum of every tensor of a model that is freed afterwards."""
    module, faults = build(export.model, folder, weights, export.main_dtype)
    refuse_faults(export.model, faults)
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        state = module.state_dict()
        return _logits(module), dict(zip(state, pool.map(_checksum, state.values())))


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _logits(module: Any) -> torch.Tensor:
    """Return the logits of 16 tokens spread over the vocabulary, (1, 16, V) or (1, 16, labels) float32."""
    vocabulary = module.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(16)[None] * 7919 + 1) % vocabulary  # multiples of a large prime
    with torch.no_grad():
        return module.eval()(input_ids=ids).logits.float()


def first_difference(written: SafetensorsFolder, base: SafetensorsFolder) -> str | None:
    """Return the name of the first tensor that differs from the base model, or None.

    The base model is rounded to the dtype of the merged model.
    """
    base_names = set(base.names())
    for name in written.names():
        if name not in base_names:
            return name
        tensor = written.read(name)
        if not same_bits(tensor, base.read(name).to(tensor.dtype)):
            return name
    return None
