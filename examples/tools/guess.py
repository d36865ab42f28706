"""A guessing game with an environment: an interaction, configured by guess_interaction.yaml.

    rollout.multi_turn.interaction_config_path=examples/tools/guess_interaction.yaml
    rollout.multi_turn.max_assistant_turns=3
    reward.custom_reward_function.path=examples/tools/guess.py

The environment has a number from 1 to 7 and replies "higher" or "lower". Three random guesses find it with probability
0.37; the best strategy, binary search, always finds it.
"""

from random import Random
from typing import Any

from verl.agents.tools.base_tool import BaseInteraction

NUMBERS = range(1, 8)
GUESSES = 3
#: fraction of the demonstrations of the warm-up that use the hints
GOOD = 0.3


class GuessInteraction(BaseInteraction):
    """Replies to guesses. `interaction_kwargs`: name, secret."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """See `BaseInteraction.generate_response`. The reward is 1 for the right number."""
        guess, secret = messages[-1]["content"].strip(), kwargs["secret"]
        if guess == str(secret):
            return True, "right", 1.0, {}
        return False, hint(guess, secret), 0.0, {}


def hint(guess: str, secret: int) -> str:
    if not guess.isdigit():
        return "not a number"
    return "higher" if int(guess) < secret else "lower"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The sum of the rewards of the environment."""
    return float(sum(extra_info.get("turn_scores", [])))


# ---- the toy task of run.py ---------------------------------------------------------------------------------------


def row(random: Random) -> dict[str, Any]:
    """A prompt for RL."""
    secret = random.choice(NUMBERS)
    return {
        "data_source": "guess",
        "prompt": [{"role": "user", "content": "Guess a number from 1 to 7."}],
        "reward_model": {"style": "rule", "ground_truth": str(secret)},
        "extra_info": {"interaction_kwargs": {"name": "guess", "secret": secret}},
    }


def demonstration(random: Random) -> list[dict[str, str]]:
    """A chat for the warm-up: binary search, or more often random guesses, regardless of the hints."""
    task, low, high, is_good = row(random), NUMBERS[0], NUMBERS[-1], random.random() < GOOD
    secret, messages = task["extra_info"]["interaction_kwargs"]["secret"], list(task["prompt"])
    for turn in range(GUESSES):
        guess = (low + high) // 2 if is_good else random.choice(NUMBERS)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == GUESSES - 1:
            break
        messages.append({"role": "user", "content": hint(str(guess), secret)})
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return messages
