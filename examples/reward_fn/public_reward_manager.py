"""A reward manager in the form of public verl. It runs here unchanged.

python -m verl.trainer.main_ppo ... imports='[examples/reward_fn/public_reward_manager.py]' \\
    reward_model.reward_manager=brief +reward_model.reward_kwargs.limit=64
"""

from collections import defaultdict

import torch
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register

from verl import DataProto


@register("brief")
class BriefRewardManager:
    """Halves the score of responses with more than `limit` tokens."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **reward_kwargs):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.limit = reward_kwargs.get("limit", 512)

    def __call__(self, data: DataProto, return_dict: bool = False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_width = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][prompt_width:].sum())
            result = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info"),
            )
            score = result["score"] if isinstance(result, dict) else result
            rewards[i, length - 1] = score if length <= self.limit else 0.5 * score
            extra["brief"].append(length <= self.limit)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
