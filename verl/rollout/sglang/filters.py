"""Top-k, top-p and min-p in SGLang's scheduler, as a logit processor.

SGLang applies its own filters to the probabilities that it samples from, but reports log-probs of the unfiltered
distribution. A logit processor changes the logits before both, so that they agree.
"""

import functools
import json
from typing import Any

import torch

from verl.rollout.request import FILTERS, SamplingParams
from verl.rollout.sampling import filter_logits

_KEYS = ("temperature", *FILTERS)


@functools.cache
def processor() -> str:
    """`LogitFilter` in the form in which SGLang sends it to its scheduler."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    return CustomLogitProcessor.__dict__["to_str"].__func__(LogitFilter)


def filter_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters of `LogitFilter` for one request."""
    return {"filters": json.dumps({name: getattr(params, name) for name in _KEYS})}


class LogitFilter:
    """Excludes tokens by the request's top-k, top-p and min-p, as `verl.rollout.sampling` does."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        """Filter logits (B, V), which are not divided by the temperature. One dict of `filter_params` per row."""
        rows: dict[str, list[int]] = {}
        for row, given in enumerate(custom_param_list):
            rows.setdefault(given["filters"], []).append(row)
        for text, chosen in rows.items():
            params = SamplingParams(1, (), **json.loads(text))
            index = torch.tensor(chosen, device=logits.device)
            selected = logits[index]
            logits[index] = selected.masked_fill(filter_logits(selected, params).isneginf(), float("-inf"))
        return logits
