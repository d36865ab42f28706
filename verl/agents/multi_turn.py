"""The agent loop of tool calls and interactions (`rollout.multi_turn`).

generate -> parse -> run the tools concurrently -> append their responses -> generate, until the policy writes a turn
without a call. With an interaction, the simulated user replies to such a turn, until the interaction ends.
Trajectories are append-only: sampled tokens are never decoded and tokenized again.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from verl.agents.chat import ChatContinuation
from verl.agents.loop import GenerateFn, Prompt, Trajectory
from verl.agents.tools.host import (
    Observation,
    Reply,
    Rewards,
    ToolFailure,
    ToolRunner,
    ToolSettings,
    ToolsInProcess,
    failure,
    truncate_text,
)
from verl.agents.tools.load import interaction_classes, is_environment, tool_schemas
from verl.agents.tools.parsers import TOOL_PARSERS, FunctionCall, extract_calls
from verl.agents.tools.processes import ToolProcesses
from verl.registry import did_you_mean
from verl.rollout.request import Completion
from verl.utils.rng import fork_seed

logger = logging.getLogger("verl.rollout")

_EMPTY: Mapping[str, Any] = {}


@dataclass
class _State:
    """The state of one trajectory."""

    id: str  # identifies it in the tool processes
    tools_kwargs: dict[str, Any]  # arguments of the tools for this sample, by name
    interaction: str | None  # its name
    interaction_kwargs: dict[str, Any]
    messages: list[dict[str, Any]]  # those that an interaction reads
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    has_started: bool = False
    failure: str | None = None  # why the interaction failed to start or to reply


class MultiTurnLoop:
    """Tool calls, an interaction, or both. The tokenizer has a chat template."""

    def __init__(self, config: BaseModel, tokenizer: Any):
        self.config, self.tokenizer = config.multi_turn, tokenizer
        files = self.config.tool_config_path, self.config.function_tool_path
        schemas = tool_schemas(*files)
        self.tool_names = [schema["function"]["name"] for schema in schemas]
        self._unknown: set[str] = set()  # tools of samples that do not exist, each logged once
        self._ignores_interactions = False
        classes = interaction_classes(self.config.interaction_config_path)
        self.interactions = list(classes)
        self.environments = [name for name, (cls, _) in classes.items() if is_environment(cls)]
        self.prompt_length = config.prompt_length
        if not schemas and not self.interactions:
            raise ValueError(
                "the agent loop tool_agent has no tools and no interactions: set rollout.multi_turn.tool_config_path, "
                "function_tool_path or interaction_config_path"
            )
        self.chat, self.parser = self._form(schemas)
        settings = ToolSettings(
            *files,
            self.config.interaction_config_path,
            self.config.max_tool_response_length,
            self.config.tool_response_truncate_side,
        )
        self.runner: ToolRunner
        if self.config.tool_isolation == "none":
            self.runner = ToolsInProcess(settings)
        else:
            self.runner = ToolProcesses(settings, self.config.tool_processes)
        self._number = 0

    def _form(self, schemas: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
        """What writes the tokens between two turns, and what reads the calls of a turn."""
        chat = ChatContinuation(self.tokenizer, schemas, self.config.apply_chat_template_kwargs)
        return chat, TOOL_PARSERS[self.config.format](self.tokenizer) if schemas else None

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        state = self._state_of(prompt)
        trajectory = Trajectory(prompt)
        trajectory.metrics.update(dict.fromkeys(("tool_calls", "tool_errors", "tool_timeouts"), 0.0))
        if state.interaction is not None:
            trajectory.metrics["interaction_errors"] = 0.0
        try:
            try:
                if state.interaction in self.environments:
                    await self._open(trajectory, state)
                while state.failure is None and (request := trajectory.next_request()) is not None:
                    completion = await generate(request)
                    trajectory.add_completion(completion)
                    messages = await self._next_messages(trajectory, state, completion, request.prompt_ids)
                    if not messages:
                        break
                    stop_ids = prompt.params.stop_token_ids
                    tokens = self.chat.next_tokens(completion.token_ids, stop_ids, messages)
                    if len(trajectory) + len(tokens) >= prompt.params.max_tokens:
                        trajectory.finish_reason = "length"
                        break
                    trajectory.add_tokens(tokens, author=messages[0]["role"])
                    trajectory.user_turns += 1
            finally:  # release the instances also after an error
                await self._finish(trajectory, state)
        finally:
            self.runner.forget(state.id)
        return trajectory

    async def _open(self, trajectory: Trajectory, state: _State) -> None:
        """Start the environment. Its first observation becomes the end of the prompt.

        Without one, the trajectory is one end token, which the policy is not trained on.
        """
        prompt = trajectory.prompt
        # the samples of a prompt start in the same state
        seed = fork_seed(str(prompt.columns.get("uid"))) % 2**31
        kwargs = {"default_seed": seed} | {k: v for k, v in state.interaction_kwargs.items() if k != "name"}
        state.has_started = True
        text = await self._ask(trajectory, state, "start", {"kwargs": kwargs})
        if state.failure is not None:
            trajectory.add_tokens([(*prompt.params.stop_token_ids, self.tokenizer.eos_token_id)[0]], author="user")
            trajectory.finish_reason = "abort"
            return
        last = state.messages[-1] if state.messages else {}
        if last.get("role") == "user" and isinstance(last["content"], str):
            last["content"] += f"\n\n{text}"
        else:
            state.messages.append({"role": "user", "content": text})
        trajectory.prompt_ids = self.chat.start_tokens(state.messages)
        if len(trajectory.prompt_ids) > self.prompt_length:
            raise ValueError(
                f"environment {state.interaction}: the prompt with the first observation has "
                f"{len(trajectory.prompt_ids)} tokens, expected at most data.max_prompt_length={self.prompt_length}"
            )

    async def _ask(self, trajectory: Trajectory, state: _State, method: str, arguments: dict[str, Any]) -> Any:
        """Call the interaction. If it fails, the failure is that of the trajectory, and the result is None."""
        arguments = {"name": state.interaction, **arguments}
        try:
            return await self.runner.call(state.id, method, arguments, self.config.tool_timeout)
        except ToolFailure as error:
            hint = "" if state.interaction_kwargs else " (the sample has no extra_info.interaction_kwargs)"
            state.failure = f"interaction {state.interaction}: {error}{hint}"
            trajectory.count("interaction_errors")
            trajectory.count("tool_errors")
            trajectory.count("tool_timeouts", error.timed_out)

    def _state_of(self, prompt: Prompt) -> _State:
        """The initial state. Raises ValueError for a sample whose tools_kwargs or interaction_kwargs are invalid."""
        columns = prompt.columns
        extra = columns.get("extra_info") or _EMPTY
        kwargs = self._tools_kwargs(columns.get("tools_kwargs") or extra.get("tools_kwargs"))
        if extra.get("need_tools_kwargs") and not kwargs:
            raise ValueError("extra_info.need_tools_kwargs is true, but the sample has no tools_kwargs")
        interaction_kwargs = columns.get("interaction_kwargs") or extra.get("interaction_kwargs")
        interaction_kwargs = dict(_checked("interaction_kwargs", interaction_kwargs))
        if interaction_kwargs and not self.interactions:  # data that is also used without its interactions
            interaction_kwargs = {}
            if not self._ignores_interactions:
                self._ignores_interactions = True
                logger.warning(
                    "interaction_kwargs of samples have no effect: multi_turn.interaction_config_path is null"
                )
        name = interaction_kwargs.get("name") or (self.interactions[0] if len(self.interactions) == 1 else None)
        if self.interactions and name not in self.interactions:
            raise ValueError(
                f"interaction_kwargs of the sample: expected the name of an interaction, found {name!r}: "
                f"{did_you_mean(str(name), self.interactions)}"
            )
        raw = columns.get("raw_prompt")
        if raw is None or isinstance(raw, str):
            raw = [] if raw is None else [{"role": "user", "content": raw}]
        messages = [dict(message) for message in raw]  # raw is a list or an array
        self._number += 1
        return _State(f"{os.getpid()}-{self._number}", kwargs, name, interaction_kwargs, messages)

    def _tools_kwargs(self, value: Any) -> dict[str, Any]:
        """Arguments by tool. Logs tools that do not exist, and raises ValueError for anything but mappings."""
        kwargs = {tool: entry for tool, entry in _checked("tools_kwargs", value).items() if entry is not None}
        for tool, entry in kwargs.items():
            _checked(f"tools_kwargs[{tool!r}]", entry)
            if tool not in self.tool_names and tool not in self._unknown:
                self._unknown.add(tool)
                fix = did_you_mean(tool, self.tool_names)
                logger.warning("tools_kwargs of a sample: there is no tool %r: %s", tool, fix)
        return kwargs

    # ---- between two turns --------------------------------------------------------------------------------------

    async def _next_messages(
        self, trajectory: Trajectory, state: _State, completion: Completion, prompt_ids: Sequence[int]
    ) -> list[dict[str, Any]]:
        """The messages that follow a turn; none if the trajectory ends with it."""
        if completion.finish_reason != "stop":
            return []
        calls: list[FunctionCall] = []
        if self.parser is not None:
            _, calls = await extract_calls(self.parser, self.tokenizer, prompt_ids, completion.token_ids)
        limits = (
            (self.config.max_assistant_turns, trajectory.turns),
            (self.config.max_user_turns, trajectory.user_turns),
        )
        is_last = any(limit is not None and count >= limit for limit, count in limits)
        if calls and is_last:
            return []
        if state.interaction is not None:
            text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            state.messages.append({"role": "assistant", "content": text})
        if calls:
            messages = await self._run_tools(trajectory, state, calls)
        elif state.interaction is not None:
            messages = await self._ask_user(trajectory, state)
        else:
            return []
        state.messages += messages
        return [] if is_last else messages

    async def _run_tools(
        self, trajectory: Trajectory, state: _State, calls: Sequence[FunctionCall]
    ) -> list[dict[str, Any]]:
        limit = self.config.max_parallel_calls
        observations = await asyncio.gather(*(self._run_tool(state, call) for call in calls[:limit]))
        rejected = failure(f"at most {limit} tool calls per turn are run, and this is one more")
        observations += [rejected] * len(calls[limit:])
        for observation in observations:
            trajectory.count("tool_calls")
            trajectory.count("tool_errors", observation.failed)
            trajectory.count("tool_timeouts", observation.timed_out)
            state.tool_rewards.append(observation.reward)
        return [{"role": "tool", "name": c.name, "content": o.text} for c, o in zip(calls, observations)]

    async def _run_tool(self, state: _State, call: FunctionCall) -> Observation:
        try:
            parameters = call.read_arguments()
        except ValueError as error:
            return self._failed(str(error))
        kwargs = state.tools_kwargs.get(call.name) or {}
        arguments = {"name": call.name, "parameters": parameters, "kwargs": kwargs}
        try:
            return await self.runner.call(state.id, "execute", arguments, self.config.tool_timeout)
        except ToolFailure as error:
            logger.debug("tool %s: %s", call.name, error)
            return self._failed(str(error), error.timed_out)

    def _failed(self, message: str, timed_out: bool = False) -> Observation:
        limit, side = self.config.max_tool_response_length, self.config.tool_response_truncate_side
        return failure(truncate_text(message, limit, side), timed_out)

    async def _ask_user(self, trajectory: Trajectory, state: _State) -> list[dict[str, Any]]:
        """The reply of the interaction; none if it ends or fails."""
        kwargs = state.interaction_kwargs
        if not state.has_started:
            state.has_started = True
            await self._ask(trajectory, state, "start", {"kwargs": kwargs})
        reply: Reply | None = None
        if state.failure is None:
            reply = await self._ask(trajectory, state, "respond", {"messages": state.messages, "kwargs": kwargs})
        if reply is None:
            return []
        if reply.reward is not None:
            state.turn_scores.append(reply.reward)
        return [] if reply.ends else [{"role": "user", "content": reply.text}]

    # ---- end of a trajectory ------------------------------------------------------------------------------------

    async def _finish(self, trajectory: Trajectory, state: _State) -> None:
        """Collect the rewards and release the instances."""
        scores: dict[str, float] = {}
        called_tools = trajectory.metrics["tool_calls"] and self.config.tool_config_path is not None
        limit = self.config.tool_timeout
        try:
            if called_tools or state.tools_kwargs:
                result: Rewards = await self.runner.call(state.id, "rewards", {"kwargs": state.tools_kwargs}, limit)
                scores = result.rewards
                for name, error in result.errors.items():
                    self._count_failure(trajectory, f"calc_reward or release of the tool {name}", ToolFailure(error))
        except ToolFailure as error:
            self._count_failure(trajectory, "calc_reward or release of the tools", error)
        try:
            if state.has_started:
                reward = await self.runner.call(state.id, "finish", {"name": state.interaction}, limit)
                state.turn_scores += [] if reward is None else [reward]
        except ToolFailure as error:
            self._count_failure(trajectory, f"interaction {state.interaction}", error)
        trajectory.info = {
            "tool_rewards": state.tool_rewards,
            "turn_scores": state.turn_scores,
            "rollout_reward_scores": scores,
        }
        if state.interaction is not None:
            trajectory.info["agent_score"] = sum(state.turn_scores)
        if state.failure is not None:
            trajectory.info["agent_failure"] = state.failure

    def _count_failure(self, trajectory: Trajectory, operation: str, error: ToolFailure) -> None:
        logger.warning("%s: %s", operation, error)
        trajectory.count("tool_errors")
        trajectory.count("tool_timeouts", error.timed_out)


def _checked(name: str, value: Any) -> Mapping[str, Any]:
    """Arguments of a sample; empty for None. Raises ValueError unless they are a mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} of the sample: expected a mapping, found {type(value).__name__} {value!r:.80}")
    return value or {}
