"""The score of a reasoning model's answer: what follows its thoughts, by the rule of its data source.

A model of the R1 kind thinks between <think> and </think> and answers afterwards. Numbers in its thoughts are no
answer, so a rule must not see them.
"""

from typing import Any

from verl.rewards.rules.maths import math_reward
from verl.rewards.resolve import rule_for

END_OF_THOUGHT = "</think>"

# Data sets of the R1 evaluation whose names do not begin with one that the rules know.
MATHEMATICS = ("Maxwell-Jia/AIME_2024", "opencompass/cnmo2024_en", "opencompass/cnmo2024_zh")


def final_part(response: str) -> str | None:
    """What follows the thoughts; None where they never end. A response without marks has no thoughts."""
    if END_OF_THOUGHT in response:
        return response.rpartition(END_OF_THOUGHT)[2].strip()
    return None if "<think>" in response else response


def reward_func(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """The score of the final part; 0 where the model was cut off in its thoughts.

    Mathematics by equivalence, GPQA by its letter, LiveCodeBench by its tests: `verl.rewards.resolve.rule_for`, whose
    ValueError lists the known sources.
    """
    rule = math_reward if data_source in MATHEMATICS else rule_for(data_source)
    answer = final_part(solution_str)
    if answer is None:
        return 0.0
    return rule(data_source=data_source, solution_str=answer, ground_truth=ground_truth, extra_info=extra_info)
