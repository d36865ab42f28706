"""The agent loop of one completion."""

from typing import Any

from pydantic import BaseModel

from verl.agents.loop import GenerateFn, Prompt, Trajectory, register_agent_loop


@register_agent_loop("single_turn")
@register_agent_loop("single_turn_agent")
class SingleTurn:
    """One completion per prompt. Batches call `RolloutEngine.generate` directly."""

    def __init__(self, config: BaseModel | None = None, tokenizer: Any = None):
        """The arguments are ignored."""

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        """See `AgentLoop.run`."""
        trajectory = Trajectory(prompt)
        trajectory.add_completion(await generate(trajectory.next_request()))
        return trajectory
