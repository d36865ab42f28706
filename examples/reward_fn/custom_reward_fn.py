"""A custom reward function: 1 if the last number of the response is the ground truth, otherwise 0.

python -m verl.trainer.main_ppo ... \\
    --custom_reward_function.path=./examples/reward_fn/custom_reward_fn.py \\
    --custom_reward_function.name=compute_score \\
    --reward_model.reward_manager=naive
"""

import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Score one response. The ground truth may be a full solution: its last number counts."""
    numbers = [_NUMBER.findall(str(text)) for text in (solution_str, ground_truth)]
    found, expected = (
        float(found_numbers[-1].replace(",", "")) if found_numbers else None for found_numbers in numbers
    )
    return float(found is not None and found == expected)
