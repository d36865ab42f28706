"""The base class of interactions: a simulated user or an environment that replies to the policy."""

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """A user or an environment. One object serves all trajectories of a process.

    Args:
        config: `config` of the entry in the file of `rollout.multi_turn.interaction_config_path`, with its `name`.
    """

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start the interaction of a trajectory. kwargs: `extra_info["interaction_kwargs"]` of the sample."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Reply to the last message of the policy.

        Args:
            instance_id: id of the trajectory.
            messages: all messages so far, the prompt included.
            **kwargs: as in `start_interaction`.

        Returns:
            Whether the interaction ends (the reply is then not shown), the reply, the reward of this turn, and metrics,
            which are ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define generate_response()")

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Called by interactions that compute their reward separately."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End the interaction of a trajectory."""
