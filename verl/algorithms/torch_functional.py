"""Tensor functions under the names and with the arguments of public verl's `verl.utils.torch_functional`."""

from collections.abc import Sequence
from typing import Any

import torch

from verl.algorithms import masked as _masked
from verl.algorithms.kl import entropy_from_logits
from verl.algorithms.kl import sum_pi_squared_from_logits as calculate_sum_pi_squared_from_logits
from verl.algorithms.masked import masked_var, masked_whiten

__all__ = [
    "calculate_sum_pi_squared_from_logits",
    "clip_by_value",
    "compute_position_id_with_mask",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "get_response_mask",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "postprocess_data",
    "tokenize_and_postprocess_data",
]


# ---- masks and statistics -------------------------------------------------------------------------------------------


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Sum of the values where `mask` is not 0, over all dimensions or one."""
    return _masked.masked_sum(values, mask, axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Mean of the values where `mask` is not 0, over all dimensions or one; 0 where there is none."""
    return _masked.masked_mean(values, mask, axis)


def clip_by_value(x: torch.Tensor, tensor_min: torch.Tensor | float, tensor_max: torch.Tensor | float) -> torch.Tensor:
    """Clamp a tensor to bounds that may be tensors."""
    return torch.maximum(torch.minimum(x, torch.as_tensor(tensor_max).to(x)), torch.as_tensor(tensor_min).to(x))


def get_response_mask(
    response_id: torch.Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return (B, T): 1 up to and including the first EOS token of each response (B, T), 0 after it."""
    is_eos = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device))
    return (is_eos.cumsum(-1) - is_eos.long() == 0).to(dtype)


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the position ids (B, L) of an attention mask (B, L): the attended tokens before each, at least 0."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


# ---- log-probs ------------------------------------------------------------------------------------------------------


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """Log-probs of the labels (...) under logits (..., V), in float32 at least.

    `inplace_backward` is accepted and has no effect: it changes the memory of a kernel, not the result.
    """
    logits = _masked.at_least_float32(logits)
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def entropy_from_logits_with_chunking(logits: torch.Tensor, chunk_size: int = 2048) -> torch.Tensor:
    """Entropy of each position: logits (B, V) -> (B,), `chunk_size` positions at a time, which needs less memory."""
    return torch.cat([entropy_from_logits(chunk) for chunk in logits.split(chunk_size)])


# ---- padding --------------------------------------------------------------------------------------------------------


def pad_sequence_to_length(
    tensors: torch.Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False
) -> torch.Tensor:
    """Pad the last dimension to at least `max_seq_len`; a longer one is unchanged."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> torch.Tensor:
    """Return token lists as a tensor (B, T), padded on the right to the longest list and at least `max_length`."""
    width = max([len(row) for row in response] + [max_length or 0])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad or truncate token ids and their attention mask, (B, L), to (B, max_length).

    Args:
        truncation: "left" removes tokens from the left, "right" from the right, "middle" keeps both ends; "error"
            raises ValueError if there are more than `max_length` tokens.
    """
    length = input_ids.shape[-1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}
    if truncation == "error":
        raise ValueError(f"expected at most {max_length} tokens, found {length}: raise max_length or set truncation")
    if truncation not in head:
        raise ValueError(f"truncation: expected one of error, left, right, middle, found {truncation!r}")
    first, last = head[truncation], max_length - head[truncation]
    indices = torch.tensor([*range(first), *range(length - last, length)], device=input_ids.device)
    return input_ids.index_select(-1, indices), attention_mask.index_select(-1, indices)


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask (1, max_length) of a text, padded or truncated as by `postprocess_data`."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    return postprocess_data(ids, mask, max_length, pad_token_id, left_pad, truncation)
