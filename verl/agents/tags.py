"""Tool calls between tags in one text, without turns of a chat: the form of Search-R1 and ReTool.

    <think>...</think> <search>query</search> <information>result</information> <answer>...</answer>

The policy stops at the end of a call, the result is appended between its own tags and masked from the loss, and the
policy continues. An entry of the file of `rollout.agent.agent_loop_config_path`:

    - name: search_r1
      _target_: verl.agents.tags.TagLoop
      tools: tools.yaml           # as multi_turn.tool_config_path, also beside this file: one tool with one argument
      call_tag: search
      result_tag: information

Other settings are those of `rollout.multi_turn`.
"""

import json
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from verl.agents.loop import GenerateFn, Prompt, Trajectory
from verl.agents.multi_turn import MultiTurnLoop
from verl.agents.tools.load import beside
from verl.agents.tools.parsers import FunctionCall, ToolParser
from verl.rollout.request import Completion, Request


class TagLoop(MultiTurnLoop):
    """The text between <call_tag> and </call_tag> is the argument of the tool. See the top of this file.

    Raises:
        ValueError: the file does not have one tool with one required argument.
    """

    def __init__(self, config: BaseModel, tokenizer: Any, *, tools: str, call_tag: str, result_tag: str):
        self.tags = call_tag, result_tag
        path = beside(config.agent.agent_loop_config_path, tools)
        turns = config.multi_turn.model_copy(update={"tool_config_path": path})
        super().__init__(config.model_copy(update={"multi_turn": turns}), tokenizer)

    def _form(self, schemas: Sequence[Mapping[str, Any]]) -> "tuple[TagText, TagText]":
        functions = [schema["function"] for schema in schemas]
        arguments = [name for function in functions for name in function.get("parameters", {}).get("required", ())]
        if len(functions) != 1 or len(arguments) != 1:
            raise ValueError(
                f"{self.config.tool_config_path}: expected one tool with one required argument, the text between "
                f"<{self.tags[0]}> and </{self.tags[0]}>, found {len(functions)} tools with {len(arguments)}"
            )
        form = TagText(self.tokenizer, *self.tags, functions[0]["name"], arguments[0])
        return form, form

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        def until_call(request: Request) -> Awaitable[Completion]:
            params = request.params.with_stops([f"</{self.tags[0]}>"], (), self.tokenizer.decode)
            return generate(replace(request, params=params))

        return await super().run(prompt, until_call)


class TagText(ToolParser):
    """Finds the call at the end of a completion, and writes its result."""

    def __init__(self, tokenizer: Any, call_tag: str, result_tag: str, tool: str, argument: str):
        super().__init__(tokenizer)
        self.call, self.result_tag = re.compile(rf"(?s)(.*)<{call_tag}>(.*?)</{call_tag}>\s*\Z"), result_tag
        self.tool, self.argument = tool, argument

    def parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        if (match := self.call.match(text)) is None:
            return text, []
        return match[1], [FunctionCall(self.tool, json.dumps({self.argument: match[2].strip()}))]

    def next_tokens(self, sampled: Sequence[int], stop_ids: Sequence[int], messages: Sequence[Mapping]) -> list[int]:
        """The tokens of the result of a call (`ChatContinuation.next_tokens`)."""
        text = messages[0]["content"].encode(errors="replace").decode()  # tools can return lone surrogates
        end = self.tokenizer.decode(list(sampled[-3:]))  # the last token of a call may end with line breaks
        lines = "\n" * max(0, 2 - (len(end) - len(end.rstrip("\n"))))
        text = f"{lines}<{self.result_tag}>{text}</{self.result_tag}>\n\n"
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
