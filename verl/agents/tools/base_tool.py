"""The base class of tools with state.

    class Counter(BaseTool):
        def __init__(self, config, tool_schema):
            super().__init__(config, tool_schema)
            self.counts = {}

        async def create(self, instance_id=None, **kwargs):
            self.counts[instance_id] = 0
            return instance_id, ToolResponse()

        async def execute(self, instance_id, parameters, **kwargs):
            self.counts[instance_id] += parameters["by"]
            return ToolResponse(text=str(self.counts[instance_id])), 0.0, {}

A tool without state is simpler as a function: `verl.agents.tools.function_tool`.
"""

from typing import Any
from uuid import uuid4

from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """A tool. One object serves all trajectories of a process; each trajectory has an instance.

    Args:
        config: `config` of the entry in the file of `rollout.multi_turn.tool_config_path`.
        tool_schema: `tool_schema` of the entry; None: `get_openai_tool_schema()`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no schema: set tool_schema or define get_openai_tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema, for tools whose configuration has none."""
        return None

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse] | str:
        """Create the instance of a trajectory, before its first `execute`.

        Args:
            instance_id: id of the instance.
            **kwargs: `tools_kwargs[name]["create_kwargs"]` of the sample, also as one argument `create_kwargs`.

        Returns:
            The id, alone or with a response, which is ignored.
        """
        return (instance_id or str(uuid4())), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run one call of the policy.

        Args:
            instance_id: id of the instance.
            parameters: arguments written by the policy.
            **kwargs: `tools_kwargs[name]["execute_kwargs"]` of the sample.

        Returns:
            The response, the reward of this call, and metrics, which are ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define execute()")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the instance at the end of the trajectory. kwargs: `calc_reward_kwargs` of the sample."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Discard the instance. kwargs: `release_kwargs` of the sample."""


# ---- interactions ---------------------------------------------------------------------------------------------------


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

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> float | None:
        """End the interaction of a trajectory. Returns a reward for the whole of it, if there is one."""
