"""Agent loops as two releases of public verl have them, unchanged."""

import pytest

from tests.rollout.test_agent_loop_tools import Policy, files, rollout, run, tokenizer  # noqa: F401
from verl.agents.loop import AGENT_LOOPS
from verl.registry import import_module

SINGLE_TURN = """
import asyncio
from typing import Any
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

@register("old_form")  # of the releases before 0.6
class OldLoop(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.lengths = [config.actor_rollout_ref.rollout.response_length]

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        metrics = {}
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
        prompt_ids = self.tokenizer(text)["input_ids"]
        assert self.tokenizer.apply_chat_template(messages, add_generation_prompt=True) == prompt_ids  # a list of ids
        with simple_timer("generate_sequences", metrics):
            ids = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        ids = ids[: self.lengths[0]]
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids), num_turns=2, metrics=metrics
        )

class Changed(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = 0.5
        return output

register("changed")(Changed)

@register("new_form")
class NewLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        multi_modal_data = await self.process_vision_info(messages)
        images = multi_modal_data.get("images")
        prompt_ids = await self.apply_chat_template(messages, images=images, videos=multi_modal_data.get("videos"))
        output: TokenOutput = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=images,
            video_data=None,
        )
        metrics = {"num_preempted": output.num_preempted if output.num_preempted is not None else -1}
        output = AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=output.token_ids, response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs, multi_modal_data=multi_modal_data, num_turns=2, metrics=metrics,
            extra_fields=output.extra_fields,
        )
        output.extra_fields.update({"turn_scores": [], "tool_rewards": []})
        return output
"""


@pytest.mark.parametrize("name", ["old_form", "changed", "new_form"])
def test_single_turn_loops_of_two_releases_of_public_verl(name, tmp_path, tokenizer):  # noqa: F811
    (tmp_path / "single.py").write_text(SINGLE_TURN)
    import_module(str(tmp_path / "single.py"))
    loop, columns = AGENT_LOOPS[name](rollout(), tokenizer), {"raw_prompt": [{"role": "user", "content": "hi"}]}
    trajectory = run(loop, Policy(tokenizer, "yes"), **columns)
    assert tokenizer.decode(trajectory.token_ids) == "yes<|im_end|>" and all(trajectory.response_mask)
    assert trajectory.info["num_turns"] == 2
    assert trajectory.info.get("reward_score") == (0.5 if name == "changed" else None)


TOOL_LOOPS = """
import copy
import json
from typing import Any
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse

@register("patient")  # a handler, a limit for each turn, and all tokens excluded if it has not finished
class Patient(ToolAgentLoop):
    def __init__(self, *args, per_turn=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.per_turn = per_turn

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> AgentLoopOutput:
        output = await super().run({**sampling_params, "max_tokens": 400}, priority=priority, **kwargs)
        if output.extra_fields["texts"][-1] == "give up":
            output.response_mask = [0] * len(output.response_mask)
        return output

    async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        text = self.tokenizer.decode(agent_data.response_ids, skip_special_tokens=True)
        agent_data.extra_fields.setdefault("texts", []).append(text)
        return state

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        if len(agent_data.tool_calls) > 1:
            return AgentState.TERMINATED
        state = await super()._handle_processing_tools_state(agent_data)
        return AgentState.TERMINATED if agent_data.messages[-1]["content"] == "0" else state

@register("session")  # one session for all calls, and the reward of the episode
class Session(ToolAgentLoop):
    async def run(self, sampling_params, **kwargs):
        tool = self.tools["count"]
        self.session, _ = await tool.create(create_kwargs={"seed": 1})
        self.calls = 0
        kwargs["raw_prompt"] = [*kwargs["raw_prompt"], {"role": "user", "content": "begin"}]
        try:
            output = await super().run(sampling_params, **kwargs)
            output.reward_score = float(self.calls)
            output.extra_fields["reward_extra_info"] = {"calls": self.calls, "texts": ["not a number"]}
            return output
        finally:
            await tool.release(self.session)

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float, dict]:
        if tool_call.name != "count":
            return await super()._call_tool(tool_call, tools_kwargs, agent_data)
        self.calls += 1
        text, reward, _ = await self.tools["count"].execute(self.session, json.loads(tool_call.arguments))
        return ToolResponse(text=f"{text} {self.calls}"), reward, {}

@register("talk")  # the loop itself, as in the releases before 0.7, with an interaction
class Talk(ToolAgentLoop):
    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if cls._class_initialized:
            return
        super().init_class(config, tokenizer, processor, **kwargs)
        cls.names = sorted(cls.tools)

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        request_id = uuid4().hex
        given = kwargs["extra_info"]["interaction_kwargs"]
        interaction = self.interaction_map[given["name"]]
        await interaction.start_interaction(request_id, **given)
        data = AgentData(copy.deepcopy(list(kwargs["raw_prompt"])), None, {}, request_id, {}, interaction, given)
        state = AgentState.PENDING
        while state != AgentState.TERMINATED:
            if state == AgentState.PENDING:
                state = await self._handle_pending_state(data, sampling_params)
            elif state == AgentState.GENERATING:
                state = await self._handle_generating_state(data, sampling_params)
            elif state == AgentState.PROCESSING_TOOLS:
                state = await self._handle_processing_tools_state(data)
            elif state == AgentState.INTERACTING:
                state = await self._handle_interacting_state(data)
        length = len(data.response_mask)
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[: len(data.prompt_ids) - length],
            response_ids=data.prompt_ids[-length:][: self.response_length],
            response_mask=data.response_mask[: self.response_length],
            response_logprobs=data.response_logprobs[: self.response_length] if data.response_logprobs else None,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields={"turn_scores": data.turn_scores, "messages": data.messages, "names": self.names},
        )

    async def _call_tool(self, tool_call, tools_kwargs):
        response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs)
        return ToolResponse(text=response.text.upper()), reward, metrics
"""
_COUNT = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
_ADD = '<tool_call>{{"name": "add", "arguments": {{"a": 0, "b": {}}}}}</tool_call>'
_BAD = "<tool_call>{no json}</tool_call>"


@pytest.mark.parametrize(
    ("name", "turns", "expected", "info"),
    [
        ("patient", [_ADD.format(2), "2"], ["tool\n2", ""], {"tool_rewards": [0.25], "num_turns": 4}),
        ("patient", [_ADD.format(0)], ["tool\n0"], {"num_turns": 3}),
        ("patient", [_ADD.format(1) * 2], [""], {"num_turns": 2}),
        ("patient", [_BAD], [""], {"num_turns": 2}),  # as in public verl
        ("patient", [_ADD.format(3).replace("add", "ad"), "give up"], ["tool\nUnknown function "
         "'ad': did you mean 'add'? known: add, count, nap", ""], {"num_turns": 4}),
        ("session", [_COUNT, _ADD.format(5), _COUNT, "3"], ["tool\ncounted 1", "tool\n5", "tool\ncounted 2", ""],
         {"reward_score": 2.0, "tool_rewards": [0.5, 0.25, 0.5], "num_turns": 8}),
        ("talk", [_ADD.format(7), "a", "b"], ["tool\n7", "user\nyou said a", "user\nyou said b"],
         {"turn_scores": [0.5, 0.5], "names": ["add", "count", "nap"], "num_turns": 7}),
        ("talk", [_COUNT, "b"], ["tool\nCOUNTED", "user\nyou said b"], {"turn_scores": [0.5], "num_turns": 5}),
    ],
)  # fmt: skip
def test_subclasses_of_the_tool_agent_loop_of_public_verl(name, turns, expected, info, files, tokenizer):  # noqa: F811
    (files / "loops.py").write_text(TOOL_LOOPS)
    import_module(str(files / "loops.py"))
    overrides = [f"multi_turn.{key}={files / file}" for key, file in
                 (("tool_config_path", "tools.yaml"), ("function_tool_path", "tools.py"))]  # fmt: skip
    if name == "talk":
        overrides.append(f"multi_turn.interaction_config_path={files / 'talk.yaml'}")
    loop = AGENT_LOOPS[name](rollout(*overrides), tokenizer)
    given = {"name": "echo", "replies": len(turns) - 2}
    columns = {"raw_prompt": [{"role": "user", "content": "hi"}], "extra_info": {"interaction_kwargs": given}}
    policy = Policy(tokenizer, *turns)
    trajectory = run(loop, policy, **columns)
    parts = []
    for turn, reply in zip(turns, expected):
        parts += [turn + "<|im_end|>", f"\n<|im_start|>{reply}<|im_end|>\n<|im_start|>assistant\n"][: 1 + bool(reply)]
    assert [tokenizer.decode(segment.token_ids) for segment in trajectory.segments] == parts
    own = [1 if k % 2 == 0 else 0 for k, segment in enumerate(trajectory.segments) for _ in segment.token_ids]
    assert trajectory.response_mask == ([0] * len(own) if turns[-1] == "give up" else own)
    assert {key: trajectory.info.get(key) for key in info} == info and not policy.turns
    assert trajectory.log_probs == [-float(mask) for mask in trajectory.response_mask]
