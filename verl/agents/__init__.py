"""Agent loops turn a prompt into a trajectory: one completion, or several with tool calls and user turns between them.

loop         Prompt, Trajectory, AgentLoop, the registry, and the loop of one completion
chat         the tokens that the chat template puts between two turns
multi_turn   tool calls and interactions
public       loops written for public verl, and loops by name

Names are loaded at first use.
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "AGENT_LOOPS": "verl.agents.loop",
    "NO_FACTS": "verl.agents.loop",
    "NO_TRAJECTORY_INFO": "verl.agents.loop",
    "POLICY": "verl.agents.loop",
    "SINGLE_TURN": "verl.agents.loop",
    "AgentLoop": "verl.agents.loop",
    "AgentLoopFactory": "verl.agents.loop",
    "GenerateFn": "verl.agents.loop",
    "MultiTurnLoop": "verl.agents.multi_turn",
    "Prompt": "verl.agents.loop",
    "Segment": "verl.agents.loop",
    "SingleTurn": "verl.agents.loop",
    "Trajectory": "verl.agents.loop",
    "make_agent_loop": "verl.agents.public",
    "register_agent_loop": "verl.agents.loop",
}

__all__ = [*_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
