"""A reward as a plugin: a function of two texts, registered under a name that the configuration uses.

imports: [examples/reward_fn/similarity.py]
reward_function: similarity
"""

from difflib import SequenceMatcher

from verl.rewards import register_reward


@register_reward("similarity")
def similarity(sampled_response: str, reference_answer: str) -> float:
    """How much of the two texts agrees in order, from 0 to 1."""
    return SequenceMatcher(None, sampled_response, reference_answer, autojunk=False).ratio()
