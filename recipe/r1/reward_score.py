"""The score of a reasoning model's response: the text after its reasoning, by the rule of its data source.

A model like R1 reasons between <think> and </think> and gives its final answer afterwards. Rules must not see numbers
in the reasoning.
"""

from typing import Any

from verl.rewards.resolve import rule_for
from verl.rewards.rules.maths import math_dapo, math_reward

# Datasets of the R1 evaluation whose names do not begin with a data source that has a rule.
MATHEMATICS = ("Maxwell-Jia/AIME_2024", "opencompass/cnmo2024_en", "opencompass/cnmo2024_zh")


def final_part(response: str) -> str | None:
    """The text after the reasoning; None if the reasoning does not end. A response without tags has no reasoning."""
    _, end_of_thought, final = response.rpartition("</think>")
    if end_of_thought:
        return final.strip()
    return None if "<think>" in response else response


def reward_func(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """The score of the final part; 0 if the reasoning was truncated.

    Mathematics by equivalence (0 or 1 for every source), GPQA by its letter, LiveCodeBench by its tests:
    `verl.rewards.resolve.rule_for`, whose ValueError lists the known sources.
    """
    known = None if data_source in MATHEMATICS else rule_for(data_source)
    rule = math_reward if known is None or known.func is math_dapo else known
    answer = final_part(solution_str)
    if answer is None:
        return 0.0
    return rule(data_source=data_source, solution_str=answer, ground_truth=ground_truth, extra_info=extra_info)
