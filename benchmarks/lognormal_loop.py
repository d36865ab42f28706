"""The agent loop of async_step.py: one turn, with a length from a log-normal distribution."""

import math
import random
from dataclasses import replace

from verl.agents import GenerateFn, Prompt, Trajectory, register_agent_loop

#: shape of the distribution: median as a fraction of the maximum, and sigma of the logarithm
MEDIAN, SIGMA = 1 / 8, 1.0


def response_length(sample_id: int, longest: int) -> int:
    """The number of tokens of one response."""
    drawn = random.Random(sample_id).lognormvariate(math.log(MEDIAN * longest), SIGMA)
    return max(1, min(longest, round(drawn)))


@register_agent_loop("lognormal")
class LogNormalLengths:
    """One turn. With `rollout.ignore_eos` it always has the length that was drawn."""

    def __init__(self, config, tokenizer):
        """The arguments are ignored."""

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        trajectory = Trajectory(prompt)
        request = trajectory.next_request()
        limit = response_length(prompt.sample_id, request.params.max_tokens)
        trajectory.add_completion(await generate(replace(request, params=replace(request.params, max_tokens=limit))))
        return trajectory
