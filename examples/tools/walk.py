"""A text environment with the interface of gymnasium (`reset`, `step`), configured by walk_environment.yaml.

    rollout.multi_turn.interaction_config_path=examples/tools/walk_environment.yaml
    rollout.multi_turn.max_assistant_turns=4
    reward.reward_function=agent_score

A walker and a goal are on a line, at most three steps apart. The first observation, which is a part of the prompt, says
where they are. Four random steps reach the goal with probability 0.44; steps towards it always do.
"""

from random import Random
from typing import Any

CELLS = 7
STEPS = 4
ACTIONS = ("left", "right")
PROMPT = "Walk to the goal: left or right."
#: fraction of the demonstrations of the warm-up that walk towards the goal
GOOD = 0.3


class Walk:
    """The environment of one trajectory. cells: length of the line."""

    def __init__(self, cells: int = CELLS):
        self.cells = cells

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """The first observation, and information that is ignored."""
        random = Random(seed)
        self.goal = random.randrange(self.cells)
        self.place = random.choice([i for i in range(self.cells) if 0 < abs(i - self.goal) <= 3])
        self.left = STEPS
        return self._observation(), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward (1 at the goal), terminated, truncated, and information that is ignored."""
        self.place = min(max(self.place + (1 if action else -1), 0), self.cells - 1)
        self.left -= 1
        at_goal = self.place == self.goal
        return self._observation(), float(at_goal), at_goal, self.left == 0, {}

    def _observation(self) -> str:
        return f"you {self.place} goal {self.goal}"


# ---- the toy task of run.py ---------------------------------------------------------------------------------------


def row(random: Random) -> dict[str, Any]:
    """A prompt for RL. All samples of a prompt have its seed."""
    return {
        "data_source": "walk",
        "prompt": [{"role": "user", "content": PROMPT}],
        "reward_model": {"style": "rule", "ground_truth": "goal"},
        "extra_info": {"interaction_kwargs": {"seed": random.randrange(2**31)}},
    }


def demonstration(random: Random) -> list[dict[str, str]]:
    """A chat for the warm-up: steps towards the goal, or more often random ones."""
    walk, is_good = Walk(), random.random() < GOOD
    observation, ends = walk.reset(seed=random.randrange(2**31))[0], False
    messages = [{"role": "user", "content": f"{PROMPT}\n\n{observation}"}]
    while not ends:
        action = int(walk.goal > walk.place) if is_good else random.randrange(2)
        observation, _, terminated, truncated, _ = walk.step(action)
        ends = terminated or truncated
        messages.append({"role": "assistant", "content": ACTIONS[action]})
        messages += [] if ends else [{"role": "user", "content": observation}]
    return messages
