"""A `MultiTurnEnv` of the package verifiers 0.1 as an interaction; `setup_state`, turns, and its rubric at the end.

    interaction:
      - name: wordle
        class_name: examples/tools/verifiers_environment.py:VerifiersInteraction
        config: {env_id: wordle, arguments: {}}          # of verifiers.load_environment
    reward.reward_function=agent_score

A row of the dataset has the prompt of a row of the environment's dataset, and the other columns of that row as
`extra_info.interaction_kwargs`: answer, info, task, example_id. Environments that offer tools to the policy
(`ToolEnv`) are not supported: use tools of the run. No reward is given for a trajectory without a turn.
"""

from typing import Any

from verl.agents.tools.base_tool import BaseInteraction


class VerifiersInteraction(BaseInteraction):
    """All trajectories of a process share the environment, and each has a state."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        import verifiers

        self.env = verifiers.load_environment(config["env_id"], **config.get("arguments", {}))
        self.states: dict[str, Any] = {}

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """The response of the environment to a turn."""
        from verifiers.utils.message_utils import normalize_messages

        chat = list(normalize_messages(messages, field_name="prompt"))
        state = self.states.get(instance_id)
        if state is None:
            state = self.states[instance_id] = new_state(chat[:-1], kwargs)
            await self.env.setup_state(state)
        state["completion"] = chat[len(state["prompt"]) :]
        state["trajectory"].append(turn_of(chat))
        if await self.env.is_completed(state):
            return True, "", None, {}
        reply = await self.env.env_response(chat, state)
        text = reply if isinstance(reply, str) else "\n".join(str(message["content"]) for message in reply)
        return state.get("final_env_response") is not None, text, None, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the rubric."""
        state = self.states.pop(instance_id, None)
        if state is None:
            return None
        await self.env.rubric.score_rollout(state)
        return state["reward"]


def new_state(prompt: list[Any], row: dict[str, Any]) -> Any:
    """The state of a trajectory, as `Environment.init_state` makes it, without a client."""
    from verifiers.types import State

    state = State(input={"answer": "", "info": {}, "example_id": 0, **row, "prompt": prompt})
    for name, value in {"task": row.get("task", ""), "model": "", "trajectory_id": "", "metrics": None}.items():
        state[name] = value
    state["trajectory"], state["completion"], state["is_completed"], state["reward"] = [], [], False, None
    return state


def turn_of(chat: list[Any]) -> dict[str, Any]:
    turn = {"prompt": chat[:-1], "completion": chat[-1:], "response": None, "tokens": None, "extras": {}}
    return turn | {"reward": None, "advantage": None, "is_truncated": False, "trajectory_id": ""}
