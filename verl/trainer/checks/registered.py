"""Checks of the settings with the modules that they import."""

from verl.config import Problem, check_registered, schema
from verl.config.inputs import check_code_file
from verl.engines.base import ENGINES
from verl.registry import import_module
from verl.rollout.base import ROLLOUT_ENGINES
from verl.trainer.checks.agents import agent_loop_names
from verl.trainer.checks.preflight import Run


def check_imports(run: Run) -> None:
    """Import the user's files and modules, which register losses, estimators and rewards."""
    for address in run.config.imports:
        if not [*check_code_file("imports", address)]:  # a missing one is a problem of `check_files`
            import_module(address)


def check_engines(run: Run) -> list[Problem]:
    """Engines, agent loops and tool parsers are registered under the configured names."""
    names = {"rollout.name": ROLLOUT_ENGINES, "strategy": ENGINES}
    if isinstance(run.config, schema.Config):
        rollout = run.config.actor_rollout_ref.rollout
        names["rollout.agent.default_agent_loop"] = agent_loop_names(rollout)
        if rollout.multi_turn.format != type(rollout.multi_turn)().format:
            from verl.agents.tools.parsers import TOOL_PARSERS

            names["rollout.multi_turn.format"] = TOOL_PARSERS
    return check_registered(run.config, names)
