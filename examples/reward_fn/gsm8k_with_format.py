"""A custom reward function: 1 for the correct number, 0.1 for an incorrect one in the right format.

python -m verl.trainer.main_ppo ... \\
    reward.custom_reward_function.path=examples/reward_fn/gsm8k_with_format.py \\
    reward.custom_reward_function.name=compute_score
"""

import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"#### *(-?[\d,]*\.?\d+)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Score one response. Validation reports `acc`; the other values are logged as training metrics."""
    match = _ANSWER.findall(solution_str)
    pred = match[-1].replace(",", "") if match else ""
    correct = bool(pred) and float(pred) == float(ground_truth)
    return {"score": 1.0 if correct else 0.1 if pred else 0.0, "acc": correct, "marked": bool(pred), "pred": pred}
