"""`ToolAgentLoop` of public verl, the state machine of tool calls that its users subclass.

    @register("patient_agent")
    class PatientLoop(ToolAgentLoop):
        async def _handle_processing_tools_state(self, agent_data):
            state = await super()._handle_processing_tools_state(agent_data)
            return AgentState.TERMINATED if "done" in agent_data.messages[-1]["content"] else state

As in public verl, each call creates, executes and releases an instance of its tool, in the process of the rollout:
`multi_turn.tool_isolation` has no effect. `verl.agents.multi_turn` is the loop of this package.
"""

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from verl.agents.public import AgentLoopBase, AgentLoopOutput, ToolListWrap
from verl.agents.tools.function_tool import FunctionTool
from verl.agents.tools.host import read_result, truncate_text, with_response
from verl.agents.tools.load import describe, load_interactions
from verl.agents.tools.parsers import FunctionCall, ToolParser, extract_calls
from verl.agents.tools.schemas import ToolResponse, read_json
from verl.registry import did_you_mean

logger = logging.getLogger("verl.rollout")

#: what a trajectory does next
AgentState = Enum(
    "AgentState", {s.upper(): s for s in ("pending", "generating", "processing_tools", "terminated", "interacting")}
)
_ARGUMENTS = "messages image_data video_data metrics request_id tools_kwargs interaction interaction_kwargs"
_EMPTY = "prompt_ids response_ids response_mask response_logprobs turn_scores tool_rewards tool_calls"


class AgentData(SimpleNamespace):
    """The state of one trajectory, and what a subclass adds to it. Arguments: those of `_ARGUMENTS`, in this order,
    where releases before 0.7 have no video_data. prompt_ids: the prompt and all turns so far; response_ids: the last
    turn."""

    def __init__(self, *args: Any, **kwargs: Any):
        names = _ARGUMENTS.split()
        if len(args) > 3 and isinstance(args[3], str):  # the id of the request: there is no video_data
            names.remove("video_data")
        values = dict.fromkeys([*_ARGUMENTS.split(), "audio_data", "mm_processor_kwargs", "routed_experts"])
        values |= {name: [] for name in _EMPTY.split()} | {"user_turns": 0, "assistant_turns": 0}
        values |= {name: {} for name in ("extra_fields", "tools_kwargs", "interaction_kwargs")}
        named = dict(zip(names, args, strict=False)) | kwargs
        super().__init__(**values | {name: value for name, value in named.items() if value is not None})


class ToolAgentLoop(AgentLoopBase):
    """Calls of tools, and an interaction if `multi_turn.interaction_config_path` names one."""

    tool_timeout: float | None = None  # of a call, in seconds

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Load the tools and interactions, once per configuration."""
        if vars(cls).get("_loaded_for") is config:
            return
        cls._loaded_for, cls._class_initialized = config, True
        turns = config.actor_rollout_ref.rollout.multi_turn
        for name, value in turns.items():  # max_user_turns, tool_response_truncate_side, ...
            setattr(cls, name, value)
        tools = kwargs.get("tools") or ToolListWrap.load(turns)
        cls.tools = {tool.name: tool for tool in tools.tools}
        cls.tool_schemas = [tool.tool_schema.for_template() for tool in cls.tools.values()]
        cls.tool_parser_name = turns.format
        cls.tool_parser = ToolParser.get_tool_parser(turns.format, tokenizer)
        cls.interaction_config_file = turns.interaction_config_path
        cls.interaction_map = load_interactions(turns.interaction_config_path)
        if turns.tool_isolation != "none" and cls.tools:
            logger.warning("the tools of %s run in the process of the rollout, not isolated", cls.__name__)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        extra = kwargs.get("extra_info") or {}
        data = AgentData(list(kwargs["raw_prompt"]), metrics={}, request_id=uuid4().hex)
        data.tools_kwargs = kwargs.get("tools_kwargs") or extra.get("tools_kwargs") or {}
        if self.interaction_config_file:
            data.interaction_kwargs = dict(extra.get("interaction_kwargs") or {})
            if (name := data.interaction_kwargs.get("name")) not in self.interaction_map:
                raise ValueError(f"there is no interaction {name!r}: {did_you_mean(str(name), self.interaction_map)}")
            data.interaction = self.interaction_map[name]
            await data.interaction.start_interaction(data.request_id, **data.interaction_kwargs)
        if selected := extra.get("tool_selection"):
            data._active_tools = {name: tool for name, tool in self.tools.items() if name in selected}
            data._active_tool_schemas = [tool.tool_schema.for_template() for tool in data._active_tools.values()]
        state = AgentState.PENDING
        while state != AgentState.TERMINATED:
            if not isinstance(state, AgentState):
                raise ValueError(f"{type(self).__name__}: expected an AgentState from a handler, found {state!r}")
            generates = state in (AgentState.PENDING, AgentState.GENERATING)
            handle = getattr(self, f"_handle_{state.value}_state")
            state = await (handle(data, sampling_params) if generates else handle(data))
        start = len(data.prompt_ids) - len(data.response_mask)
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:start],
            response_ids=data.prompt_ids[start:][: self.response_length],
            response_mask=data.response_mask[: self.response_length],
            response_logprobs=data.response_logprobs[: self.response_length] or None,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields=data.extra_fields | {"turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards},
        )

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        """Make the prompt."""
        schemas = getattr(agent_data, "_active_tool_schemas", self.tool_schemas)
        media = {"images": agent_data.image_data, "videos": agent_data.video_data}
        agent_data.prompt_ids = await self.apply_chat_template(agent_data.messages, tools=schemas, **media)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Generate a turn, and read its calls unless a limit ends the trajectory."""
        prompt_ids = list(agent_data.prompt_ids)
        request = {"prompt_ids": prompt_ids, "sampling_params": sampling_params, "image_data": agent_data.image_data}
        output = await self.server_manager.generate(agent_data.request_id, **request)
        agent_data.assistant_turns += 1
        agent_data.response_ids = list(output.token_ids)
        self._add(agent_data, agent_data.response_ids, 1, output.log_probs)
        is_full = len(agent_data.response_mask) >= self.response_length and not ignore_termination
        limits = (self.max_assistant_turns, agent_data.assistant_turns), (self.max_user_turns, agent_data.user_turns)
        if is_full or any(limit and count >= limit for limit, count in limits):
            return AgentState.TERMINATED
        _, calls = await extract_calls(self.tool_parser, self.tokenizer, prompt_ids, agent_data.response_ids)
        agent_data.tool_calls = [call for call in calls if getattr(call, "error", None) is None]
        if agent_data.interaction is not None:
            text = self.tokenizer.decode(agent_data.response_ids, skip_special_tokens=True)
            agent_data.messages.append({"role": "assistant", "content": text})
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if agent_data.interaction is None else AgentState.INTERACTING

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Run the calls of a turn, and append their responses if there is room."""
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        # before 0.7, a `_call_tool` has no agent_data
        has_data = [*inspect.signature(self._call_tool).parameters] != ["tool_call", "tools_kwargs"]
        arguments = (agent_data.tools_kwargs, agent_data)[: 1 + has_data]
        limited = (asyncio.wait_for(self._call_tool(call, *arguments), self.tool_timeout) for call in calls)
        results = await asyncio.gather(*limited, return_exceptions=True)
        late = ToolResponse(text=f"Error when executing tool: timed out after {self.tool_timeout} s"), 0.0, {}
        results = [late if isinstance(result, TimeoutError) else result for result in results]
        for error in (result for result in results if isinstance(result, BaseException)):
            raise error
        for response, _, _ in results:
            if response.image or response.video:
                raise ValueError(f"{type(self).__name__}: images and video of tools are not supported")
        agent_data.tool_rewards += [reward for _, reward, _ in results if reward is not None]
        texts = [response.text or "" for response, _, _ in results]
        messages = [{"role": "tool", "name": call.name, "content": text} for call, text in zip(calls, texts)]
        agent_data.messages += messages
        token_ids = await self.apply_chat_template(messages, remove_system_prompt=True)
        if len(agent_data.response_mask) + len(token_ids) >= self.response_length:
            return AgentState.TERMINATED
        self._add(agent_data, token_ids, 0)
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Append the reply of the interaction."""
        ends, text, reward, *_ = await agent_data.interaction.generate_response(
            agent_data.request_id, agent_data.messages, **agent_data.interaction_kwargs
        )
        agent_data.user_turns += 1
        agent_data.turn_scores += [] if reward is None else [reward]
        message = {"role": "user", "content": text}
        agent_data.messages.append(message)
        self._add(agent_data, await self.apply_chat_template([message], remove_system_prompt=True), 0)
        return AgentState.TERMINATED if ends else AgentState.GENERATING

    @staticmethod
    def _add(data: AgentData, token_ids: Sequence[int], mask: int, log_probs: Sequence[float] | None = None) -> None:
        data.prompt_ids = [*data.prompt_ids, *token_ids]
        data.response_mask += [mask] * len(token_ids)
        if log_probs or data.response_logprobs:
            data.response_logprobs += log_probs or [0.0] * len(token_ids)

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any], agent_data: AgentData | None = None
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run one call: its response, reward and metrics. An error of the tool is its response."""
        name, tools = tool_call.name, getattr(agent_data, "_active_tools", self.tools)
        if name not in tools:
            return ToolResponse(text=f"Unknown function {name!r}: {did_you_mean(name, tools)}"), 0.0, {}
        try:
            arguments = read_json(tool_call.arguments or "")
        except ValueError as error:
            return ToolResponse(text=f"Invalid JSON in the arguments of {name!r}: {error}"), 0.0, {}
        tool = tools[name]
        try:
            if isinstance(tool, FunctionTool):
                result = tool.func(**arguments) if tool.is_async else asyncio.to_thread(tool.func, **arguments)
                result = await result
            else:
                instance = await tool.create(create_kwargs=(tools_kwargs.get(name) or {}).get("create_kwargs") or {})
                instance = instance[0] if isinstance(instance, tuple) else instance
                try:
                    result = with_response(await tool.execute(instance, arguments, agent_data=agent_data))
                finally:
                    await tool.release(instance)
            observation = read_result(result)
        except Exception as error:
            logger.warning("tool %s: %s", name, describe(error))
            return ToolResponse(text=f"Error when executing tool {name!r}: {error}"), 0.0, {}
        text = truncate_text(observation.text, self.max_tool_response_length, self.tool_response_truncate_side)
        metrics = result[2] if isinstance(result, tuple) and len(result) > 2 else {}
        return ToolResponse(text=text), observation.reward, metrics
