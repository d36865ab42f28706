"""Agent loops turn a prompt into a trajectory: one completion, or several with tool calls and user turns between them.

loop         Prompt, Trajectory, AgentLoop, the registry, and the loop of one completion
chat         the tokens that the chat template puts between two turns
multi_turn   tool calls and interactions
public       loops written for public verl, and loops by name
"""

from verl.agents.loop import (
    AGENT_LOOPS,
    NO_FACTS,
    NO_TRAJECTORY_INFO,
    POLICY,
    SINGLE_TURN,
    AgentLoop,
    AgentLoopFactory,
    GenerateFn,
    Prompt,
    Segment,
    SingleTurn,
    Trajectory,
    register_agent_loop,
)
from verl.agents.multi_turn import MultiTurnLoop
from verl.agents.public import make_agent_loop

__all__ = [
    "AGENT_LOOPS",
    "NO_FACTS",
    "NO_TRAJECTORY_INFO",
    "POLICY",
    "SINGLE_TURN",
    "AgentLoop",
    "AgentLoopFactory",
    "GenerateFn",
    "MultiTurnLoop",
    "Prompt",
    "Segment",
    "SingleTurn",
    "Trajectory",
    "make_agent_loop",
    "register_agent_loop",
]
