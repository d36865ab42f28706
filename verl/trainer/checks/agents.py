"""Tools, interactions, agents and agent loops of a run: checks before the first step, and a description."""

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from verl.agents.loop import AGENT_LOOPS, SINGLE_TURN, make_multi_turn
from verl.agents.tools.load import interaction_classes, tool_schemas
from verl.config import Problem, schema
from verl.trainer.checks.preflight import Run

logger = logging.getLogger("verl.trainer")

_SERVER_LOOP = "server_agent"


def agent_loop_names(rollout: schema.AgentRolloutConfig) -> set[str]:
    """The agent loops that are registered or listed in `agent.agent_loop_config_path`. A missing file has none."""
    path = rollout.agent.agent_loop_config_path
    return {*AGENT_LOOPS, *(_loops_of_file(path) if path and Path(path).is_file() else ())}


def _loops_of_file(path: str | None) -> Collection[str]:
    if not path:
        return ()
    from verl.agents.public import read_loops  # imports the tools

    return read_loops(path)


def policy_of(config: schema.Config | schema.GenerationConfig) -> tuple[str, Any]:
    """The prefix of the keys of the policy, and the section with its model and its rollout."""
    return ("actor_rollout_ref.", config.actor_rollout_ref) if isinstance(config, schema.Config) else ("", config)


def check_agent_loop(config: schema.Config | schema.GenerationConfig) -> Iterator[Problem]:
    """rollout.mode, the agent loop, and what it runs fit together. Raises ValueError if a file of tools, interactions,
    agents or loops cannot be used."""
    prefix, policy = policy_of(config)
    key, rollout = f"{prefix}rollout", policy.rollout
    turns, is_server, loop = rollout.multi_turn, rollout.mode == "server", rollout.agent.default_agent_loop
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
        from verl.server.agents import load_agent

        load_agent(rollout.server.agent)
    elif runs_tools(rollout) and not (_tools_of(turns) or interaction_classes(turns.interaction_config_path)):
        name = "multi_turn.enable" if turns.enable else "agent.default_agent_loop"
        yield Problem(
            f"{key}.{name}",
            f"{'true' if turns.enable else loop}, but there are no tools and no interactions: set {key}.multi_turn."
            "tool_config_path, function_tool_path or interaction_config_path",
        )


def runs_tools(rollout: schema.AgentRolloutConfig) -> bool:
    """Whether the default agent loop is that of tools and interactions."""
    loop, path = rollout.agent.default_agent_loop, rollout.agent.agent_loop_config_path
    return AGENT_LOOPS.get(loop) is make_multi_turn and loop not in _loops_of_file(path)


def check_tools_of_run(run: Run) -> None:
    """`check_tools_in_prompts` of a training run."""
    check_tools_in_prompts(run.config, run.inputs.tokenizer)


def check_tools_in_prompts(config: schema.Config | schema.GenerationConfig, tokenizer: Any) -> None:
    """Warn if the chat template does not describe the tools to the policy. Raises ValueError if the tokenizer of a
    multi-turn or server run has no chat template that supports it."""
    prefix, policy = policy_of(config)
    rollout, data = policy.rollout, config.data
    if rollout.mode == "server" and tokenizer.chat_template is None:
        raise ValueError(
            f"{prefix}rollout.mode=server needs a chat template, which the tokenizer does not have: use the tokenizer "
            f"of an instruction-tuned model, or set {prefix}model.custom_chat_template"
        )
    if runs_tools(rollout):
        from verl.agents.chat import ChatContinuation

        ChatContinuation(tokenizer, _tools_of(rollout.multi_turn), rollout.multi_turn.apply_chat_template_kwargs)
    names = _names(data if isinstance(config, schema.Config) else rollout.multi_turn)
    if not names or tokenizer.chat_template is None:
        return
    from verl.agents.chat import reads

    if not reads(tokenizer, "tools", data.apply_chat_template_kwargs):
        logger.warning(
            "THE PROMPTS DO NOT DESCRIBE THE TOOLS (%s): the chat template of %s renders the same text with and "
            "without `tools`. Use a model whose template has tools, set %smodel.custom_chat_template, or describe "
            "them in the messages of the dataset",
            ", ".join(names),
            policy.model.tokenizer_path or policy.model.path,
            prefix,
        )


def _tools_of(section: schema.MultiTurnConfig | schema.DataConfig) -> list[dict[str, Any]]:
    return tool_schemas(section.tool_config_path, section.function_tool_path)


def _names(section: schema.MultiTurnConfig | schema.DataConfig) -> list[str]:
    return [tool["function"]["name"] for tool in _tools_of(section)]


def describe_agents(config: schema.Config) -> dict[str, str]:
    """What runs between the completions of a sample: topic -> names. Empty for one completion per prompt."""
    rollout = config.actor_rollout_ref.rollout
    loop, turns = rollout.agent.default_agent_loop, rollout.multi_turn
    if loop == _SERVER_LOOP:
        return {"agent": f"{rollout.server.agent.name}() of {rollout.server.agent.path}, calls the policy over HTTP"}
    if not runs_tools(rollout):
        return {} if loop in SINGLE_TURN else {"agent loop": loop}
    topics = {"tools": _names(turns), "interaction": interaction_classes(turns.interaction_config_path)}
    return {topic: ", ".join(names) for topic, names in topics.items() if names}
