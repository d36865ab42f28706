"""The score of a reward model as it is: what a run with a reward model and no reward function of its own is paid by."""

from collections.abc import Mapping
from typing import Any

from verl.rewards.functions import register_reward


@register_reward("model_score", bounded=True, accuracy=False)
def model_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """extra_info["rm_score"], which every reward function is given in a run with a reward model."""
    if "rm_score" not in extra_info:
        raise ValueError("model_score: no reward model has scored the answer: set reward.reward_model.enable=true")
    return extra_info["rm_score"]
