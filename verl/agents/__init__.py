"""Agent loops turn a prompt into a trajectory: one completion, or several with tool calls and user turns between them.

base         Prompt, Trajectory, AgentLoop and the registry
single_turn  one completion per prompt
chat         the tokens that the chat template puts between two turns
multi_turn   tool calls and interactions
public       loops written for public verl, and loops by name
"""

from verl.agents.loop import (
    AGENT_LOOPS,
    NO_FACTS,
    POLICY,
    SINGLE_TURN,
    AgentLoop,
    AgentLoopFactory,
    GenerateFn,
    Prompt,
    Segment,
    Trajectory,
    register_agent_loop,
)
from verl.agents.multi_turn import MultiTurnLoop
from verl.agents.public import make_agent_loop
from verl.agents.single_turn import SingleTurn

__all__ = [
    "AGENT_LOOPS",
    "NO_FACTS",
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
