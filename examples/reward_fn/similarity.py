"""A reward function as a plugin: registered under a name that the config refers to.

imports: [examples/reward_fn/similarity.py]
reward_function: similarity
"""

from difflib import SequenceMatcher

from verl.rewards import register_reward


@register_reward("similarity")
def similarity(sampled_response: str, reference_answer: str) -> float:
    """Similarity of the two texts, in [0, 1]."""
    return SequenceMatcher(None, sampled_response, reference_answer, autojunk=False).ratio()
