"""Agent loops turn a prompt into a trajectory, with tool calls and other turns between completions.

    @register_agent_loop("calculator")
    class CalculatorLoop:
        def __init__(self, config, tokenizer): ...

        async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
            trajectory = Trajectory(prompt)
            while (request := trajectory.next_request()) is not None:
                trajectory.add_completion(await generate(request))
                ...
                trajectory.add_tokens(self.tokenizer.encode(result))
            return trajectory

Load the file with `imports=[path/to/file.py]` and select the loop with
`actor_rollout_ref.rollout.agent.default_agent_loop=calculator`. Many loops run concurrently, one per sample, and share
the batch of the rollout engine.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel

from verl.registry import Registry, load_object
from verl.rollout.request import Completion, FinishReason, Request, SamplingParams, media_of
from verl.rollout.routed_experts import extended
from verl.utils.rng import fork_seed

logger = logging.getLogger("verl.rollout")

#: one request in, one completion out; the caller does not know which engine serves it
GenerateFn = Callable[[Request], Awaitable[Completion]]

#: `Segment.author` of the tokens that the policy sampled
POLICY = "policy"
#: names of the built-in loop of one turn
SINGLE_TURN = ("single_turn", "single_turn_agent")
#: entries of extra_info for the reward function, of a trajectory without tools: number of messages, rewards of tool
#: calls and of turns of an interaction in order, and the rewards of tools at the end by name
NO_TRAJECTORY_INFO = {"num_turns": 2, "tool_rewards": [], "turn_scores": [], "rollout_reward_scores": {}}


@dataclass(frozen=True)
class Prompt:
    """The input of a loop.

    Args:
        token_ids: the prompt.
        params: sampling parameters; `max_tokens` limits the whole trajectory after the prompt.
        sample_id: identifies the sample and determines its random numbers.
        columns: the other columns of the sample in the batch, such as raw_prompt, data_source and extra_info.
    """

    token_ids: list[int]
    params: SamplingParams
    sample_id: int
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens by one author."""

    token_ids: list[int]
    author: str  # POLICY, or another source such as "tool" or "user"
    # one per token of the policy, as reported by the engine; empty for other authors
    log_probs: list[float] = field(default_factory=list)


class Trajectory:
    """Everything after the prompt: an append-only list of segments.

    Args:
        prompt: the input of the loop.
        prompt_ids: the prompt that the policy sees, if it differs from that of `prompt`.
    """

    def __init__(self, prompt: Prompt, prompt_ids: list[int] | None = None):
        self.prompt = prompt
        self.prompt_ids = prompt.token_ids if prompt_ids is None else prompt_ids
        self.segments: list[Segment] = []
        #: for each token after the prompt, 0 to exclude one that the policy sampled from training; None: none
        self.mask: list[int] | None = None
        self.finish_reason: FinishReason = "length"
        #: spans (first token, version of the weights), over the response
        self.weight_versions: list[tuple[int, int]] = []
        #: choices of the routers, from the first prompt token on (`Completion.routed_experts`)
        self.routed_experts: np.ndarray | None = None
        #: completions of the policy, and messages of tools and users
        self.turns = self.user_turns = 0
        #: counts of the loop; the metric rollout/<name> is the mean over all trajectories
        self.metrics: dict[str, float] = {}
        #: entries that the reward function gets in extra_info
        self.info: dict[str, Any] = {}

    def add_completion(self, completion: Completion) -> None:
        """Append a completion of the policy."""
        start = len(self)
        self.weight_versions += [(start + first, version) for first, version in completion.weight_versions]
        self.routed_experts = extended(self.routed_experts, completion.routed_experts, len(self.prompt_ids) + start)
        self._add(Segment(list(completion.token_ids), POLICY, list(completion.log_probs)))
        self.finish_reason = completion.finish_reason
        self.turns += 1

    def add_tokens(self, token_ids: list[int], author: str = "tool") -> None:
        """Append tokens that the policy did not sample, such as tool output. The policy is not trained on them."""
        if author == POLICY:
            raise ValueError("add_tokens is for tokens of other authors: use add_completion for those of the policy")
        self._add(Segment(list(token_ids), author))

    def count(self, name: str, value: float = 1) -> None:
        """Add to a metric."""
        self.metrics[name] = self.metrics.get(name, 0) + value

    def _add(self, segment: Segment) -> None:
        if segment.token_ids:
            self.segments.append(segment)

    def next_request(self) -> Request | None:
        """The request that continues after all tokens so far; None once `max_tokens` is reached."""
        left = self.prompt.params.max_tokens - len(self)
        if left <= 0:
            return None
        # every turn has different random numbers; the first has those of a single-turn loop
        sample_id = self.prompt.sample_id
        turn_id = sample_id if self.turns == 0 else fork_seed(sample_id, self.turns)
        params = replace(self.prompt.params, max_tokens=left)
        sampled = self.token_ids
        media = media_of(self.prompt.columns, sampled) | {"continued": len(sampled)}
        return Request(self.prompt_ids + sampled, params, turn_id, f"{sample_id}:{self.turns}", **media)

    @property
    def extra_info(self) -> dict[str, Any]:
        """Entries of extra_info for the reward function: `NO_TRAJECTORY_INFO` updated with `info`."""
        return {**NO_TRAJECTORY_INFO, "num_turns": 1 + self.turns + self.user_turns, **self.info}

    def __len__(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def token_ids(self) -> list[int]:
        """All tokens after the prompt."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def response_mask(self) -> list[int]:
        """1 where the policy sampled the token, 0 elsewhere and where `mask` is."""
        sampled = [int(segment.author == POLICY) for segment in self.segments for _ in segment.token_ids]
        return sampled if self.mask is None else [a * b for a, b in zip(sampled, self.mask)]

    @property
    def log_probs(self) -> list[float]:
        """The engine's log-prob of each token; 0 where `response_mask` is."""
        values = [p for s in self.segments for p in (s.log_probs if s.author == POLICY else [0.0] * len(s.token_ids))]
        return values if self.mask is None else [a * b for a, b in zip(values, self.mask)]


_logged: set[str] = set()


def log_ignored_sampling(requested: Mapping[str, Any], applied: Mapping[str, Any]) -> None:
    """Log sampling parameters of an agent that differ from those of the run, once each."""
    message = "the agent sets %s=%s, which is not applied: the run is configured with %s=%s"
    for name, value in requested.items():
        if value is not None and value != applied[name] and name not in _logged:
            _logged.add(name)
            logger.warning(message, name, value, name, applied[name])


class AgentLoop(Protocol):
    """Turns a prompt into a trajectory. One object per process serves all samples concurrently."""

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        """
        Args:
            prompt: the prompt of the sample.
            generate: the rollout engine; call `await generate(request)` any number of times.
        """


class AgentLoopFactory(Protocol):
    """A class with this constructor, or a function."""

    def __call__(self, config: BaseModel, tokenizer: Any) -> AgentLoop:
        """Make the loop from the `rollout` section and the policy's tokenizer."""


#: name -> factory; `rollout.agent.default_agent_loop` selects one
AGENT_LOOPS: Registry[AgentLoopFactory] = Registry("agent loop")


def register_agent_loop(name: str) -> Callable[[AgentLoopFactory], AgentLoopFactory]:
    """Decorator: register a loop as `rollout.agent.default_agent_loop=<name>`."""
    return AGENT_LOOPS.register(name)


def score_group_of(agent: BaseModel) -> Callable | None:
    """The function `score_group` of the default agent loop of a section `rollout.agent`, if its class has one."""
    path, name = agent.agent_loop_config_path, agent.default_agent_loop
    listed = load_object("verl.agents.public", "read_loops")(path) if path else {}  # at use: imports the tools
    return getattr(listed[name][0] if name in listed else AGENT_LOOPS.get(name), "score_group", None)


@register_agent_loop("single_turn")
@register_agent_loop("single_turn_agent")
class SingleTurn:
    """One completion per prompt. Batches call `RolloutEngine.generate` directly."""

    def __init__(self, config: BaseModel | None = None, tokenizer: Any = None):
        """The arguments are ignored."""

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        trajectory = Trajectory(prompt)
        trajectory.add_completion(await generate(trajectory.next_request()))
        return trajectory


@register_agent_loop("tool_agent")
@register_agent_loop("tool_agent_loop")
@register_agent_loop("interaction")
def make_multi_turn(config: BaseModel, tokenizer: Any) -> AgentLoop:
    """Tool calls, an interaction, or both."""
    return load_object("verl.agents.multi_turn", "MultiTurnLoop")(config, tokenizer)  # at use: imports the tools


@register_agent_loop("server_agent")
def _make_server_agent(config: BaseModel, tokenizer: Any) -> AgentLoop:
    """Agents that call the policy over HTTP. Its packages are optional."""
    try:
        return load_object("verl.server.agent_loop", "ServerAgentLoop")(config, tokenizer)
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ImportError(f"rollout.mode=server needs {error.name}: pip install -e '.[server]' in a clone") from error
