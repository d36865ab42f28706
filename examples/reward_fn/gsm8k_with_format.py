"""A reward function of one's own: a right number counts 1, a wrong one that is at least marked as the answer 0.1.

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
    """Score of one answer. `acc` is what validation reports; the other values are metrics of the training steps."""
    found = _ANSWER.findall(solution_str)
    pred = found[-1].replace(",", "") if found else ""
    right = bool(pred) and float(pred) == float(ground_truth)
    return {"score": 1.0 if right else 0.1 if pred else 0.0, "acc": right, "marked": bool(pred), "pred": pred}
