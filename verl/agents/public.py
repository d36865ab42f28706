"""Agent loops written for public verl, and loops by name (`make_agent_loop`).

    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

    @register("my_agent")
    class MyAgent(AgentLoopBase):
        async def run(self, sampling_params, **kwargs) -> AgentLoopOutput: ...

`kwargs` are the columns of the sample. A `reward_score` is the reward of the sample. Differences: `self.config` is the
`rollout` section below the keys that public verl has above it; tokens of the response with mask 1 must be those that
`server_manager.generate` returned, in order, and their log-probs are taken from there.
"""

import asyncio
import dataclasses
import functools
import inspect
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict

from verl.agents.chat import ChatContinuation
from verl.agents.loop import (
    AGENT_LOOPS,
    AgentLoop,
    GenerateFn,
    Prompt,
    Trajectory,
    log_ignored_sampling,
)
from verl.agents.tools.load import load_class, load_tools, read_yaml_list
from verl.rollout.request import Completion, Request, SamplingParams, media_of
from verl.utils.rng import fork_seed
from verl.utils.tokenizer import with_id_lists

#: sampling parameters that an agent cannot change, and those that it can
_FIXED = ("temperature", "top_k", "top_p", "min_p", "ignore_eos")
_APPLIED = {"max_tokens", "max_new_tokens", "stop", "stop_token_ids"}
#: parameters that are always so: token ids include those of a stop string
_IMPLIED = {"logprobs", "include_stop_str_in_output"}


class AgentLoopMetrics(BaseModel):
    """Metrics of one trajectory."""

    model_config = ConfigDict(extra="allow")

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """The result of `AgentLoopBase.run`. response_mask: 1 for tokens that the policy sampled."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = AgentLoopMetrics()
    extra_fields: dict[str, Any] = {}


class TokenOutput(BaseModel):
    """The result of `server_manager.generate`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}


class ServerManager:
    """The `server_manager` of one trajectory. It records what the engine returned."""

    def __init__(self, prompt: Prompt, generate: GenerateFn, tokenizer: Any):
        self._prompt, self._generate, self._tokenizer = prompt, generate, tokenizer
        self.calls: list[tuple[list[int], Completion]] = []  # the prompts, with all turns so far, and the completions
        self.returns_ids = False

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput | list[int]:
        """Generate one completion.

        Args:
            request_id: has no effect.
            prompt_ids: the prompt and all turns so far.
            sampling_params: `max_tokens` (or `max_new_tokens`), `stop` and `stop_token_ids` are applied. Other values
                are those of the run, because training computes log-probs with these.
            image_data: not supported.
        """
        if image_data or media_of(self._prompt.columns):
            raise ValueError(
                "expected prompts without images, found images: agent loops of public verl (AgentLoopBase) do not send "
                "them to the engine; use rollout.agent.default_agent_loop=tool_agent or a custom AgentLoop "
                "(docs/custom_agent_loop.md)"
            )
        params = self._params(sampling_params, len(prompt_ids))
        sample_id, turn = self._prompt.sample_id, len(self.calls)
        turn_id = sample_id if turn == 0 else fork_seed(sample_id, turn)
        completion = await self._generate(Request(list(prompt_ids), params, turn_id, f"{sample_id}:{turn}"))
        self.calls.append((list(prompt_ids), completion))
        if self.returns_ids:
            return completion.token_ids
        reason = "aborted" if completion.finish_reason == "abort" else "completed"
        return TokenOutput(token_ids=completion.token_ids, log_probs=completion.log_probs, stop_reason=reason)

    def _params(self, requested: Mapping[str, Any], length: int) -> SamplingParams:
        params = self._prompt.params
        fixed = {name: getattr(params, name) for name in (*_FIXED, "seed")} | {"repetition_penalty": 1.0, "n": 1}
        if unknown := requested.keys() - fixed.keys() - _APPLIED - _IMPLIED:
            raise ValueError(f"sampling_params: {sorted(unknown)} not supported: use {sorted(_APPLIED)}")
        log_ignored_sampling({name: value for name, value in requested.items() if name in fixed}, fixed)
        strings = requested.get("stop") or ()
        strings = (strings,) if isinstance(strings, str) else strings
        params = params.with_stops(strings, requested.get("stop_token_ids") or (), self._tokenizer.decode)
        remaining = len(self._prompt.token_ids) + params.max_tokens - length
        limit = requested.get("max_tokens") or requested.get("max_new_tokens") or remaining
        return dataclasses.replace(params, max_tokens=max(1, min(limit, remaining)))


@dataclasses.dataclass
class DictConfigWrap:
    """Wraps a configuration, so that it is passed on without a copy."""

    config: Any


@dataclasses.dataclass
class ToolListWrap:
    """Wraps the tools of `multi_turn.tool_config_path` and `function_tool_path`."""

    tools: list[Any]

    @classmethod
    def load(cls, turns: Any) -> "ToolListWrap":
        """The tools of the section `multi_turn`."""
        return cls(list(load_tools(turns.tool_config_path, turns.function_tool_path).values()))


class AgentLoopBase(ABC):
    """Base class of the loops of public verl: one object per trajectory.

    Args:
        trainer_config: has `config`, the configuration.
        server_manager: generates.
        tokenizer: the policy's tokenizer.
        processor: always None; multimodal input is not supported.
        **kwargs: further entries of the loop in `agent_loop_config_path`.
    """

    _class_initialized = False  # older releases: read and set by `init_class` of a subclass

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        """Called before each trajectory, for what a subclass sets up once per process."""
        cls._class_initialized = True

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any = None, **kwargs: Any):
        self.config = trainer_config.config if isinstance(trainer_config, DictConfigWrap) else trainer_config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length
        self.data_config, self.loop = self.config.data, asyncio.get_running_loop()
        self.apply_chat_template_kwargs = self.data_config.apply_chat_template_kwargs
        self._calls = getattr(server_manager, "calls", ())  # a program that runs a loop itself has its own manager
        self.init_class(self.config, tokenizer, processor=processor, **kwargs)

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory. kwargs: the columns of the sample, raw_prompt among them."""

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """No images or videos: prompts that have them end in an error of `server_manager.generate`."""
        return {}

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **media: Any,
    ) -> list[int]:
        """Token ids of messages with the generation prompt.

        With remove_system_prompt, for messages between two turns: without the text that the template adds before them.
        """
        if images or videos or any(media.values()):
            raise ValueError("images, video and audio are not supported by agent loops")
        kwargs = dict(self.rollout_config.multi_turn.apply_chat_template_kwargs)
        if remove_system_prompt:
            chat = ChatContinuation(self.tokenizer, tools or (), kwargs)
            last = self._calls[-1][1].token_ids if self._calls else [self.tokenizer.eos_token_id]
            return chat.next_tokens(last, [], messages)
        settings = {**kwargs, "tools": tools, "add_generation_prompt": True, "tokenize": False}
        text = self.tokenizer.apply_chat_template(messages, **settings)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class SingleTurnAgentLoop(AgentLoopBase):
    """One completion for the prompt: the base class of loops that change the result of `run`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            uuid.uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        mask = [1] * len(output.token_ids)
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=output.token_ids, response_mask=mask, num_turns=2)


class PublicLoop:
    """An `AgentLoop` that runs a loop of public verl. kwargs: further arguments of its constructor."""

    def __init__(self, cls: type[AgentLoopBase], config: BaseModel, tokenizer: Any, kwargs: Mapping[str, Any] = {}):
        self.cls, self.tokenizer, self.prompt_length = cls, with_id_lists(tokenizer), config.prompt_length
        rollout = config.model_dump()
        data = {"apply_chat_template_kwargs": rollout["multi_turn"]["apply_chat_template_kwargs"]}
        self.config = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": data}))
        data_config = DictConfigWrap(self.config.config.data)
        extra = {"tools": ToolListWrap.load(config.multi_turn), "dataset_cls": None, "data_config": data_config}
        accepted = inspect.signature(cls).parameters
        accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        self.kwargs = {name: value for name, value in extra.items() if accepts_any or name in accepted} | dict(kwargs)

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        server = ServerManager(prompt, generate, self.tokenizer)
        loop = self.cls(
            trainer_config=self.config, server_manager=server, tokenizer=self.tokenizer, processor=None, **self.kwargs
        )
        params = {name: getattr(prompt.params, name) for name in _FIXED[:3]}
        if "messages" in inspect.signature(self.cls.run).parameters:  # before 0.6, when generate returned token ids
            server.returns_ids = True
            output = await loop.run(list(prompt.columns["raw_prompt"]), params)
        else:
            output = await loop.run(params, **prompt.columns)
        return self._trajectory(prompt, output, server.calls)

    def _trajectory(
        self, prompt: Prompt, output: AgentLoopOutput, calls: Sequence[tuple[list[int], Completion]]
    ) -> Trajectory:
        """The output as a trajectory. Raises ValueError if it has tokens with mask 1 that were not sampled."""
        name = self.cls.__name__
        if len(output.prompt_ids) > max(self.prompt_length, len(prompt.token_ids)):
            raise ValueError(
                f"the agent loop {name}: the prompt has {len(output.prompt_ids)} tokens, expected at most "
                f"data.max_prompt_length={self.prompt_length}"
            )
        if len(output.response_ids) != len(output.response_mask):
            raise ValueError(f"the agent loop {name}: response_ids and response_mask have different lengths")
        prompt_ids, ids, mask = list(output.prompt_ids), list(output.response_ids), list(output.response_mask)
        trajectory, position = Trajectory(prompt, prompt_ids), 0
        for sent, completion in calls:
            start = len(sent) - len(prompt_ids)
            if start < position or sent != prompt_ids + ids[:start]:  # generated after other tokens than those returned
                start = next((k for k in range(position, len(mask)) if mask[k]), len(mask))
            sampled = completion.token_ids[: len(ids) - start]  # the last turn may be truncated
            if ids[start : start + len(sampled)] != sampled or (completion.token_ids and not sampled):
                continue  # not part of the response
            trajectory.add_tokens(ids[position:start])
            versions = [span for span in completion.weight_versions if span[0] < len(sampled)]
            truncated = dataclasses.replace(
                completion, token_ids=sampled, log_probs=completion.log_probs[: len(sampled)], weight_versions=versions
            )
            trajectory.add_completion(truncated)
            position = start + len(sampled)
        trajectory.add_tokens(ids[position:])
        wrong = [k for k, (trained, sampled) in enumerate(zip(mask, trajectory.response_mask)) if trained > sampled]
        if wrong:
            raise ValueError(
                f"the agent loop {name}: token {wrong[0]} of the response has mask 1, but "
                "the engine did not sample it there: append the token ids of server_manager.generate, unchanged"
            )
        trajectory.mask = mask
        trajectory.info |= {"num_turns": output.num_turns, **output.extra_fields}
        if output.reward_score is not None:
            trajectory.info["reward_score"] = output.reward_score
        return trajectory


def register(agent_name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Decorator of public verl: register a subclass of `AgentLoopBase` as an agent loop."""

    def decorate(cls: type[AgentLoopBase]) -> type[AgentLoopBase]:
        AGENT_LOOPS[agent_name] = functools.partial(PublicLoop, cls)
        return cls

    return decorate


# ---- loops by name --------------------------------------------------------------------------------------------------


def make_agent_loop(name: str, config: BaseModel, tokenizer: Any) -> AgentLoop:
    """Make the loop registered under `name`, or listed under it in `agent.agent_loop_config_path`."""
    loops = read_loops(config.agent.agent_loop_config_path)
    if name not in loops:
        return AGENT_LOOPS[name](config, tokenizer)
    cls, kwargs = loops[name]
    if issubclass(cls, AgentLoopBase):
        return PublicLoop(cls, config, tokenizer, kwargs)
    return cls(config, tokenizer, **kwargs)


def may_score(agent: BaseModel) -> bool:
    """Whether the default agent loop of a section `rollout.agent` is one of public verl, which may return rewards."""
    loops, name = read_loops(agent.agent_loop_config_path), agent.default_agent_loop
    if name in loops:
        return issubclass(loops[name][0], AgentLoopBase)
    return isinstance(AGENT_LOOPS.get(name), functools.partial)


def read_loops(path: str | None) -> dict[str, tuple[type, dict[str, Any]]]:
    """The loops of a YAML file, `[{name, _target_, ...}]`: name -> class and further arguments.

    Raises:
        ValueError: an invalid file or entry, or a class without `run`.
    """
    loops: dict[str, tuple[type, dict[str, Any]]] = {}
    for position, entry in enumerate(read_yaml_list(path, None) if path else ()):
        location = f"{path}: [{position}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{location}: expected name and _target_, found {entry!r}")
        cls = load_class(entry, location, path, key="_target_")
        if not inspect.iscoroutinefunction(getattr(cls, "run", None)):
            raise ValueError(f"{location}: expected a class with `async def run`, found {cls.__name__}")
        loops[entry["name"]] = cls, {k: v for k, v in entry.items() if k not in ("name", "_target_")}
    return loops
