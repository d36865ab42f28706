"""Agent loops as two releases of public verl have them, unchanged."""

import pytest

from tests.rollout.test_agent_loop_tools import Policy, rollout, run, tokenizer  # noqa: F401
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
