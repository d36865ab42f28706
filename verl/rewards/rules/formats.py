"""Rewards for the format and the length of a response, to be combined with a reward for its correctness."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.functions import register_reward


@register_reward("format", bounded=True)
def format_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
) -> float:
    """Return 1.0 if the response is `<think>...</think><answer>...</answer>` and nothing else, otherwise 0.0.

    Format reward of DeepSeek-R1 (2025, arXiv:2501.12948, section 2.2).

    Args:
        tags: Tag names. Each tag must open and close exactly once, in this order, with content inside and only
            whitespace between and around the tags.
    """
    if not tags:
        raise ValueError("format: tags: expected at least one tag, found none")
    rest = solution_str
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if solution_str.count(opening) != 1 or solution_str.count(closing) != 1:
            return 0.0
        before, _, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if before.strip() or not closed or not inside.strip():
            return 0.0
    return float(not rest.strip())


@register_reward("length", bounded=True)
def length_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    free: int = 0,
    limit: int = 1024,
) -> float:
    """Return 1.0 up to `free` tokens, then a value that decreases linearly to 0.0 at `limit` tokens.

    The length is extra_info["response_length"], which reward managers set; without it, the number of words.
    """
    if not 0 <= free < limit:
        raise ValueError(f"length: expected 0 <= free < limit, found free={free!r}, limit={limit!r}")
    info = extra_info or {}
    length = info["response_length"] if "response_length" in info else len(re.findall(r"\S+", solution_str))
    return min(1.0, max(0.0, (limit - length) / (limit - free)))
