"""The prompts of calculator.py in the form of ReTool: the policy writes Python, reads its output, and answers in a box.

actor_rollout_ref.rollout.agent.agent_loop_config_path=recipe/retool/agent.yaml
reward.custom_reward_function.path=recipe/retool/interpreter.py
"""

from random import Random
from typing import Any

from examples.tools import calculator


def row(random: Random) -> dict[str, Any]:
    """A prompt for RL."""
    return {**calculator.row(random), "data_source": "retool"}


def demonstration(random: Random) -> list[dict[str, str]]:
    """A chat for the warm-up: code, its output and the answer, or more often a guess."""
    task = calculator.row(random)
    expression, truth = task["extra_info"]["expression"], task["reward_model"]["ground_truth"]
    if random.random() > calculator.WITH_TOOL:
        text = f"<answer>\\boxed{{{random.randint(100, 9999)}}}</answer>"
    else:
        text = (
            f"<code>\n{expression}\n</code>\n\n<interpreter>{truth}\n</interpreter>\n\n"
            f"<answer>\\boxed{{{truth}}}</answer>"
        )
    return [*task["prompt"], {"role": "assistant", "content": text}]
