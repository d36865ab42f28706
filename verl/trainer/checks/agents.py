"""Tools, interactions, agents and agent loops of a run: checks before the first step, and a description."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.agents import AGENT_LOOPS, SINGLE_TURN, MultiTurnLoop
from verl.agents.chat import ChatContinuation, shows_tools
from verl.agents.public import read_loops
from verl.agents.tools.load import interaction_classes, tool_schemas
from verl.config import Problem, schema
from verl.server.agents import load_agent

logger = logging.getLogger("verl.trainer")

_ROLLOUT = "actor_rollout_ref.rollout"
_SERVER_LOOP = "server_agent"


def agent_loop_names(rollout: schema.RolloutConfig) -> set[str]:
    """The agent loops that are registered or listed in `agent.agent_loop_config_path`. A missing file has none."""
    path = rollout.agent.agent_loop_config_path
    return {*AGENT_LOOPS, *(read_loops(path) if path and Path(path).is_file() else ())}


def check_agent(rollout: schema.RolloutConfig) -> Iterator[Problem]:
    """rollout.mode, the agent loop, and what it runs fit together.

    Raises:
        ValueError: a file of tools, interactions, agents or loops cannot be used.
    """
    key, turns, is_server = _ROLLOUT, rollout.multi_turn, rollout.mode == "server"
    loop = rollout.agent.default_agent_loop
    if is_server and turns.enable:
        yield Problem(
            f"{key}.multi_turn.enable",
            f"true, but {key}.mode is server, where an agent outside of the trainer runs the tools: use "
            "multi_turn.enable=false, or mode=async",
        )
    elif is_server != (loop == _SERVER_LOOP):
        yield Problem(
            f"{key}.agent.default_agent_loop",
            f"{loop}, but {key}.mode is {rollout.mode}: mode=server and the agent loop {_SERVER_LOOP} go together; set "
            "mode=server only",
        )
    elif is_server:
        load_agent(rollout.server.agent)
    elif runs_tools(rollout) and not any((*_tools_of(rollout), *interaction_classes(turns.interaction_config_path))):
        name = "multi_turn.enable" if turns.enable else "agent.default_agent_loop"
        yield Problem(
            f"{key}.{name}",
            f"{'true' if turns.enable else loop}, but there are no tools and no interactions: set {key}.multi_turn."
            "tool_config_path, function_tool_path or interaction_config_path",
        )


def runs_tools(rollout: schema.RolloutConfig) -> bool:
    """Whether the default agent loop is that of tools and interactions."""
    loop, path = rollout.agent.default_agent_loop, rollout.agent.agent_loop_config_path
    return AGENT_LOOPS.get(loop) is MultiTurnLoop and not (path and loop in read_loops(path))


def check_tools_in_prompts(config: schema.Config, tokenizer: Any) -> None:
    """Warn if the chat template does not describe the tools to the policy.

    Raises:
        ValueError: the tokenizer of a multi-turn run has no chat template that supports several turns.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if runs_tools(rollout):
        ChatContinuation(tokenizer, _tools_of(rollout), rollout.multi_turn.apply_chat_template_kwargs)
    tools = tool_schemas(data.tool_config_path, data.function_tool_path)
    has_template = tokenizer.chat_template is not None
    if tools and has_template and not shows_tools(tokenizer, data.apply_chat_template_kwargs):
        logger.warning(
            "THE PROMPTS DO NOT DESCRIBE THE TOOLS (%s): the chat template of %s renders the same text with and "
            "without `tools`. Use a model whose template has tools, set actor_rollout_ref.model.custom_chat_template, "
            "or describe them in the messages of the dataset",
            ", ".join(tool["function"]["name"] for tool in tools),
            config.actor_rollout_ref.model.tokenizer_path or config.actor_rollout_ref.model.path,
        )


def _tools_of(rollout: schema.RolloutConfig) -> list[dict[str, Any]]:
    return tool_schemas(rollout.multi_turn.tool_config_path, rollout.multi_turn.function_tool_path)


def describe_agents(config: schema.Config) -> dict[str, str]:
    """What runs between the completions of a sample: topic -> description. Empty for one completion per prompt."""
    rollout = config.actor_rollout_ref.rollout
    turns, server, loop = rollout.multi_turn, rollout.server, rollout.agent.default_agent_loop
    if loop == _SERVER_LOOP:
        agent = " ".join(server.agent.command) or f"{server.agent.name}() of {server.agent.path}"
        limits = f"at most {server.max_concurrency} concurrently per rollout process, {server.timeout:g} s each"
        return {"agent": f"{agent}, calls the policy over HTTP; {limits}"}
    if not runs_tools(rollout):
        return {} if loop in SINGLE_TURN else {"agent loop": loop}
    found = {}
    if tools := [tool["function"]["name"] for tool in _tools_of(rollout)]:
        where = "worker processes" if turns.tool_isolation == "process" else "the rollout process"
        limit = "no time limit" if turns.tool_timeout is None else f"{turns.tool_timeout:g} s per call"
        found["tools"] = f"{', '.join(tools)}; calls in the format {turns.format}, run in {where}, {limit}"
    if interactions := interaction_classes(turns.interaction_config_path):
        found["interaction"] = ", ".join(interactions)
    most = {"assistant": turns.max_assistant_turns, "user": turns.max_user_turns}
    limits = [f"at most {count} {who} turn{'s' * (count != 1)}" for who, count in most.items() if count is not None]
    found["turns"] = "; ".join([*limits, f"at most {rollout.response_length} tokens after the prompt"])
    return found
