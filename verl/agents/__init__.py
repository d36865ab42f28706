"""Agent loops turn a prompt into a trajectory: one completion, or several with tool calls and user turns between them.

loop         Prompt, Trajectory, AgentLoop, the registry, and the loop of one completion
chat         the tokens that the chat template puts between two turns
multi_turn   tool calls and interactions
public       loops written for public verl, and loops by name

Names are loaded at first use.
"""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.agents.loop": (
        "AGENT_LOOPS NO_TRAJECTORY_INFO POLICY SINGLE_TURN AgentLoop AgentLoopFactory GenerateFn Prompt "
        "Segment SingleTurn Trajectory register_agent_loop"
    ),
    "verl.agents.multi_turn": "MultiTurnLoop",
    "verl.agents.public": "make_agent_loop",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
