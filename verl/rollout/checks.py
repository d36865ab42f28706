"""Checks that the engines of this package share: of a request, which fails alone before it joins a batch, and of models
with images."""

import math
from collections.abc import Sequence
from operator import index as as_int
from typing import Any

from verl.modeling.vision import BIDIRECTIONAL, is_vision_config
from verl.rollout.request import Request
from verl.rollout.traits import EngineTraits


def check_request(
    name: str,
    request: Request,
    engine: str,
    vocab_size: int,
    max_positions: int | None,
    positions_reason: str,
    images: bool = False,
    scores: bool = False,
) -> list[int]:
    """Check a request.

    Args:
        name: what error messages call the request, such as "prompt 3".
        engine: name of the rollout engine.
        vocab_size: number of tokens of the model.
        max_positions: max length of prompt plus response; None: no limit.
        positions_reason: the cause of `max_positions`.
        images: whether the model of the engine reads images.
        scores: whether the engine gives log-probs of other tokens than the sampled ones.

    Returns:
        The prompt's token ids, as a new list.

    Raises:
        ValueError: media, an empty prompt, a token outside the vocabulary, a number that is not an integer or does not
            fit, or a sequence longer than `max_positions`. The message names the request and the field.
    """
    params = request.params
    if request.has_images and not images:
        raise ValueError(
            f"{name}: expected text, found images: rollout.name={engine} runs a text model, or does not support images "
            "of this model, which rollout.name=hf does for every vision-language model"
        )
    if not scores and (params.top_logprobs or params.prompt_logprobs is not None):
        raise ValueError(f"{name}: top_logprobs and prompt_logprobs are not given by rollout.name={engine}: use native")
    prompt = _token_ids(f"{name}: prompt_ids", request.prompt_ids)
    if not prompt:
        raise ValueError(f"{name} has no tokens")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ValueError(f"{name} has a token outside the vocabulary of {vocab_size}")
    if not isinstance(params.stop_token_ids, tuple):  # requests are grouped by their parameters, which are hashed
        raise ValueError(f"{name}: stop_token_ids: expected a tuple, found a {type(params.stop_token_ids).__name__}")
    stops = _token_ids(f"{name}: stop_token_ids", params.active_stop_ids)
    if stops and (min(stops) < 0 or max(stops) >= vocab_size):
        raise ValueError(f"{name}: stop_token_ids: expected tokens of the vocabulary of {vocab_size}, found {stops}")
    _check_int64(f"{name}: sample_id", request.sample_id)
    _check_int64(f"{name}: seed", params.seed)
    _check_int64(f"{name}: max_tokens", params.max_tokens)
    if max_positions is not None and len(prompt) + params.max_tokens > max_positions:
        raise ValueError(
            f"{name}: {len(prompt)} prompt and {params.max_tokens} response tokens exceed {max_positions} positions "
            f"({positions_reason}); shorten the prompt or the response"
        )
    return prompt


def unexpanded_prompt(name: str, request: Request) -> list[int]:
    """The prompt for an engine that processes images itself: one placeholder token per image.

    Raises:
        ValueError: the request lacks `multi_modal_data` or `raw_prompt_ids`.
    """
    if request.multi_modal_data is None or request.raw_prompt_ids is None:
        raise ValueError(
            f"{name}: expected the columns multi_modal_data (images) and raw_prompt_ids (the prompt before its "
            "placeholders were expanded), found a prompt with multi_modal_inputs only: use rollout.name=native or hf"
        )
    return list(request.raw_prompt_ids)


def check_finite(request: Request, log_probs: Sequence[float]) -> None:
    """Raise ValueError if a log-prob of a response is not finite."""
    wrong = next((t for t, value in enumerate(log_probs) if not math.isfinite(value)), None)
    if wrong is not None:
        raise ValueError(
            f"sample id {request.sample_id}, token {wrong}: its logits are not finite: training may have diverged "
            "(check the learning rate and the last gradient norms)"
        )


def _token_ids(field: str, values: Any) -> list[int]:
    try:
        ids = list(values)
        as_int(sum(ids))  # a sum is an integer only if all terms are
        return ids
    except TypeError:
        raise ValueError(f"{field}: expected a list of integers, found {str(values)[:80]}") from None


def _check_int64(field: str, value: Any) -> None:
    try:
        fits = -(2**63) <= as_int(value) < 2**63
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{field}: expected a 64-bit signed integer, found {value!r}")


def check_images(traits: EngineTraits, hf_config: Any) -> None:
    """Raise ValueError for a model with images that the engine does not compute as training does."""
    kind = hf_config.model_type
    if traits.images is None or kind in traits.images or not is_vision_config(hf_config):
        return
    if not traits.images:
        raise ValueError(
            f"rollout.name={traits.name}: expected a model without images, found {kind}: use rollout.name=native, vllm "
            "or hf (docs/vlm.md)"
        )
    if kind in BIDIRECTIONAL:
        reason, others = (
            f"the tokens of an image attend to each other in both directions, which {traits.name} computes with some "
            "of its attention kernels only; with others the log-probs are not those of training",
            "native or hf",
        )
    else:
        reason, others = "its weights and positions have not been compared with those of training", "hf"
    raise ValueError(
        f"rollout.name={traits.name}: expected a vision-language model of {', '.join(traits.images)}, found {kind}: "
        f"{reason}. Use rollout.name={others} (docs/vlm.md)"
    )
