"""The contract of a rollout engine: token ids in, token ids and log-probs out. No text and no DataProto.

A custom engine is a subclass of `RolloutEngine` and a registered factory:

    @register_rollout_engine("mine")
    def make_mine(config, model, env, train_engine=None) -> RolloutEngine:
        return MyEngine(model.path, device=env.device)

Load its file with `imports=[path/to/file.py]` and select it with `actor_rollout_ref.rollout.name=mine`.
"""

from abc import ABC
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, make_dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from pydantic import BaseModel, ValidationError

from verl.config.schema.rollout import LOWEST_TEMPERATURE, SamplingConfig
from verl.registry import Registry, load_object
from verl.rollout.gathering import GatheredRequests
from verl.rollout.routed_experts import check_records
from verl.rollout.stop_strings import StopStrings
from verl.utils.coroutines import gather_coroutines, run_coroutine

if TYPE_CHECKING:
    from verl.rollout.adapters import AdaptedLayers
    from verl.rollout.weight_sync import WeightReceiver
    from verl.rollout.weight_sync.grouping import HybridGroups

#: fields of `schema.SamplingConfig` that `SamplingParams` has in another form: max_tokens, and stop with its tokenizer
_OTHER_FORM = ("response_length", "stop")
#: the others -> their defaults
_DEFAULTS = {name: f.default for name, f in SamplingConfig.model_fields.items() if name not in _OTHER_FORM}
FILTERS = SamplingConfig.filters()

#: a keyword-only dataclass with the fields of `schema.SamplingConfig`: temperature, top_k, top_p, min_p, ignore_eos
_SamplingFields = make_dataclass(
    "_SamplingFields",
    [(name, SamplingConfig.model_fields[name].annotation, default) for name, default in _DEFAULTS.items()],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True)
class SamplingParams(_SamplingFields):
    """How the response to one prompt is sampled.

    Args:
        max_tokens: maximum response length in tokens, including the stop token.
        stop_token_ids: a response ends with the first of these tokens, which is part of the response.
        seed: random seed; with the request's `sample_id` it determines the random numbers of the response.
        stop: stop strings.
        temperature, top_k, top_p, min_p, ignore_eos: keyword-only fields, declared with defaults and bounds by
            `verl.config.schema.SamplingConfig`; a field that is added there is a field here. temperature=0 is greedy
            decoding, and top_k=-1, top_p=1 and min_p=0 are off.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int = 0
    stop: StopStrings | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"sampling: max_tokens must be at least 1, found {self.max_tokens}")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"sampling: temperature={self.temperature}: expected 0 or at least {LOWEST_TEMPERATURE:g}")
        if self.top_k == 0:
            raise ValueError("sampling: top_k must be -1 (off) or at least 1, found 0")
        try:
            SamplingConfig(**{name: getattr(self, name) for name in _DEFAULTS})
        except ValidationError as error:
            (found, *_) = error.errors()
            expected = found["msg"].replace("Input should be", "expected a value")
            raise ValueError(f"sampling: {found['loc'][0]}={found['input']!r}: {expected}") from None

    @classmethod
    def from_config(
        cls, section: BaseModel, *, stop_token_ids: tuple[int, ...], stop: StopStrings | None = None
    ) -> "SamplingParams":
        """Make the parameters from a `rollout` section, field by field.

        Args:
            section: `verl.config.schema.SamplingConfig` or a subclass.
            stop_token_ids: the end tokens of the tokenizer and the model.
            stop: `section.stop` with the tokenizer's `decode` (`stop_strings`).
        """
        given = section.model_dump()
        values = {name: given[name] for name in (*_DEFAULTS, "seed") if name in given}
        return cls(given["response_length"], stop_token_ids, stop=stop, **values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether one of `FILTERS` is on, so that log-probs are not those of the model's distribution."""
        return not self.greedy and any(getattr(self, name) != off for name, off in FILTERS.items())

    @property
    def active_stop_ids(self) -> tuple[int, ...]:
        """The token ids that end a response; empty with `ignore_eos`."""
        return () if self.ignore_eos else self.stop_token_ids

    def with_stops(self, strings: Iterable[str], token_ids: Iterable[int], decode: Callable) -> "SamplingParams":
        """Add stop strings and stop tokens. decode: the tokenizer's method."""
        every = dict.fromkeys((*(self.stop.strings if self.stop else ()), *strings))
        stop = StopStrings(tuple(every), decode) if every else None
        return replace(self, stop=stop, stop_token_ids=tuple(dict.fromkeys((*self.stop_token_ids, *token_ids))))

    @property
    def shared(self) -> "SamplingParams":
        """The parameters that all requests of a batch must share: all except max_tokens, seed and stop."""
        return replace(self, max_tokens=1, seed=0, stop=None)


def stop_strings(strings: Sequence[str], tokenizer: Any) -> StopStrings | None:
    """Make the `StopStrings` of `rollout.stop`; None if there are none."""
    return StopStrings(tuple(strings), tokenizer.decode) if strings else None


@dataclass(frozen=True)
class Request:
    """A request for one response to a prompt.

    Args:
        prompt_ids: token ids, unpadded, at least one.
        params: sampling parameters.
        sample_id: determines, with `params.seed`, the random numbers of the response, independent of the batch.
        request_id: identifies the request in `abort`.
        multi_modal_data: the images and videos of the prompt, for engines that process them themselves.
        on_tokens: called by `generate_one` with new token ids and their log-probs, by engines that report progress. The
            completion has all tokens.
        multi_modal_inputs: these as tensors of the processor, for engines that run the model; one object per prompt.
        raw_prompt_ids: the prompt with one placeholder token per image, for engines that process images; `prompt_ids`
            has as many as an image has features.
        continued: number of tokens of earlier turns at the end of `prompt_ids`; placeholder tokens among them are text.
    """

    prompt_ids: list[int]
    params: SamplingParams
    sample_id: int
    request_id: str = ""
    multi_modal_data: Any = None
    on_tokens: Callable[[list[int], list[float]], None] | None = None
    multi_modal_inputs: Mapping[str, Any] | None = None
    raw_prompt_ids: list[int] | None = None
    continued: int = 0

    @property
    def has_images(self) -> bool:
        """Whether the prompt has images or videos."""
        return bool(self.multi_modal_data) or bool(self.multi_modal_inputs)


#: columns of a batch that are fields of a request with images
MEDIA_COLUMNS = ("multi_modal_data", "multi_modal_inputs", "raw_prompt_ids")


def media_of(columns: Mapping[str, Any], sampled: Sequence[int] = ()) -> dict[str, Any]:
    """The fields of a request for a prompt with images; empty without images.

    Args:
        columns: the columns of one sample.
        sampled: tokens after the prompt, which the request continues.
    """
    found = {name: columns[name] for name in MEDIA_COLUMNS if columns.get(name) is not None}
    if not (found.get("multi_modal_data") or found.get("multi_modal_inputs")):
        return {}
    if "raw_prompt_ids" in found:
        found["raw_prompt_ids"] = [*found["raw_prompt_ids"], *sampled]
    return found


FinishReason = Literal["stop", "length", "abort"]


@dataclass
class Completion:
    """The response to one request.

    Args:
        token_ids: the response, including its stop token.
        log_probs: one per token, of the distribution that it was sampled from (after temperature, top-k, top-p and
            min-p); of the unscaled distribution when greedy.
        finish_reason: "stop" (a stop token or string), "length" (max_tokens), or "abort".
        weight_versions: spans (first token, weight version from that token on). May be empty: the whole response was
            then sampled with the last synchronized version.
        routed_experts: the experts that the routers chose (`verl.rollout.routed_experts`); None: not recorded.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    routed_experts: Any = None


def batches_of(requests: Sequence[Request]) -> list[tuple[SamplingParams, list[int]]]:
    """Group requests that can share a batch: (shared parameters, indices), in order of first appearance.

    max_tokens, seed and stop may differ within a batch.
    """
    shared: dict[int, SamplingParams] = {}  # most requests have the same parameters object
    batches: dict[SamplingParams, list[int]] = {}
    for index, request in enumerate(requests):
        params = shared.get(id(request.params))
        if params is None:
            params = shared[id(request.params)] = request.params.shared
        batches.setdefault(params, []).append(index)
    return list(batches.items())


def check_completions(requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Raise ValueError for completions that break the contract of `RolloutEngine.generate`."""
    if len(completions) != len(requests):
        raise ValueError(f"the rollout engine returned {len(completions)} completions for {len(requests)} requests")
    for index, (request, completion) in enumerate(zip(requests, completions)):
        problem = _problem_of(request, completion)
        if problem:
            raise ValueError(
                f"the rollout engine's completion of request {index} (sample_id {request.sample_id}): {problem}"
            )


def _problem_of(request: Request, completion: Completion) -> str | None:
    if not isinstance(completion, Completion):
        return f"expected a Completion, found {type(completion).__name__}"
    tokens = len(completion.token_ids)
    if len(completion.log_probs) != tokens:
        return f"expected one log-prob per token, found {len(completion.log_probs)} for {tokens} tokens"
    if completion.finish_reason not in get_args(FinishReason):
        return f"expected finish_reason {' or '.join(get_args(FinishReason))}, found {completion.finish_reason!r}"
    if wrong := [kind for kind in set(map(type, completion.token_ids)) if not issubclass(kind, Integral)]:
        return f"expected token ids that are ints, found {wrong[0].__name__}"
    if any(version < 0 for _, version in completion.weight_versions):
        return f"expected weight versions of at least 0, found {completion.weight_versions}"
    if tokens > request.params.max_tokens:
        return f"expected at most max_tokens={request.params.max_tokens} tokens, found {tokens}"
    if not tokens and completion.finish_reason != "abort":
        return "it has no tokens, but was not aborted"
    return None


@dataclass
class RolloutStats:
    """Statistics of the last `generate`: response tokens, decode steps, seconds."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class RolloutEngine(ABC):  # noqa: B024 (`__init_subclass__` asks for one method of two)
    """Base class of rollout engines. Define `generate` or `generate_one`; each has a default that calls the other."""

    #: of the last `generate`
    stats: RolloutStats = RolloutStats()
    #: weight version of the engine: the number of completed training steps. Set by the weight sync
    weight_version: int = 0

    #: whether it generates with the policy. False, for an engine that replays or repeats text: its log-probs are not
    #: compared with those of the trainer (`rollout.check_every`)
    samples_policy: bool = True

    #: the sampling keys of `schema.SamplingConfig` that it applies: setting another one is an error. None: not declared
    sampling_keys: frozenset[str] | None = None

    #: whether several ranks can generate together (`RolloutEnv.tp_size`); it then defines `leading` and `follow`
    supports_tensor_parallel: bool = False

    #: whether its completions have `routed_experts` with `rollout.enable_rollout_routing_replay`
    records_routing: bool = False

    _gathering: GatheredRequests | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.generate is RolloutEngine.generate and cls.generate_one is RolloutEngine.generate_one:
            raise TypeError(f"{cls.__name__} defines neither generate() nor generate_one(): define one of them")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate responses to a batch of requests. Blocking.

        Returns:
            One completion per request, in order. Requests with equal prompts are samples of one group, so an engine can
            compute their prefix once.
        """
        return run_coroutine(gather_coroutines([self.generate_one(request) for request in requests]))

    async def generate_one(self, request: Request) -> Completion:
        """Generate the response to one request. Concurrent calls share the engine's batch.

        The default collects concurrent requests and calls `generate`, which blocks the event loop meanwhile.
        """
        if self._gathering is None:  # setdefault: another thread may do the same
            vars(self).setdefault("_gathering", GatheredRequests(self._complete))
        return await self._gathering.submit(request)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests of `generate_one`; None: all of them.

        Each returns its tokens so far, with finish_reason "abort". The default aborts requests that have not started.
        """
        if self._gathering is not None:
            self._gathering.abort(lambda request: is_named(request, request_ids), Completion([], [], "abort"))

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Call `generate`. Raises ValueError if it does not return one valid completion per request."""
        found = self.generate(requests)
        if not isinstance(found, Iterable):
            if isinstance(found, Coroutine):
                found.close()
            raise ValueError(
                f"{type(self).__name__}.generate() returned a {type(found).__name__}: expected a list with one "
                "Completion per request. It must not be `async`; define `async generate_one` for single requests"
            )
        completions = list(found)
        check_completions(requests, completions)
        return completions

    def sleep(self) -> None:  # noqa: B027
        """Free the memory that only generation needs, such as the KV cache. The weights are kept."""

    def wake(self) -> None:  # noqa: B027
        """Prepare to generate again after `sleep`."""

    # ---- tensor parallelism: rank 0 of a group receives the requests, and the others follow it

    def leading(self) -> AbstractContextManager[None]:
        """On rank 0 of a tensor-parallel group: the context of all calls of `generate` and `generate_one`.

        When it exits, also with an error, `follow` returns on the other ranks.
        """
        return nullcontext()

    def follow(self) -> None:
        """On the other ranks: take part in the generation of rank 0 until it exits `leading`."""
        raise NotImplementedError(f"{type(self).__name__} declares supports_tensor_parallel: define leading and follow")

    def receiver(self) -> "WeightReceiver | None":
        """The receiver of new weights; None for an engine that generates with the trainer's parameters."""
        return None


def is_named(request: Request, request_ids: Sequence[str] | None) -> bool:
    """Whether `abort(request_ids)` applies to this request."""
    return request_ids is None or request.request_id in request_ids


def make_requests(
    prompts: Sequence[list[int]],
    params: SamplingParams,
    sample_ids: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
) -> list[Request]:
    """Make one request per prompt.

    Args:
        prompts: token ids of each prompt.
        params: sampling parameters of all requests.
        sample_ids: one per prompt; None: 0, 1, 2 ...
        limits: max response tokens, one per prompt; None: params.max_tokens.

    Raises:
        ValueError: lists of different length.
    """
    for name, values in (("sample_ids", sample_ids), ("limits", limits)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"expected as many {name} as prompts ({len(prompts)}), found {len(values)}")
    ids = range(len(prompts)) if sample_ids is None else sample_ids
    each = [params] * len(prompts) if limits is None else [replace(params, max_tokens=n) for n in limits]
    return [Request(list(p), own, int(i)) for p, own, i in zip(prompts, each, ids)]


# ---- engines by name ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutEnv:
    """Where an engine runs, as plain values.

    Args:
        rank: rank of this process in the rollout role.
        world_size: number of rollout ranks.
        local_rank: rank on this host.
        device: device of the engine.
        pad_token_id: padding token, for engines that pad.
        compute_dtype: compute dtype of training; None without training.
        tp_rank, tp_size: rank in the tensor-parallel group, and its size. The ranks of a group get the same prompts;
            the process group of all ranks has been initialized.
        tp_stride: distance of two ranks of a group: 1 (consecutive), except for `native` on the devices of training.
        grouping: which ranks of training generate together; None: separate devices, or sizes that do not fit.
        adapted_layers: the layers whose LoRA adapters are trained; engines that merge all adapters do not read it.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    pad_token_id: int
    compute_dtype: torch.dtype | None = None
    tp_rank: int = 0
    tp_size: int = 1
    tp_stride: int = 1
    grouping: "HybridGroups | None" = None
    adapted_layers: "AdaptedLayers | None" = None

    @property
    def tp_group(self) -> int:
        """The number of this rank's tensor-parallel group, which is its data-parallel rank."""
        block = self.tp_size * self.tp_stride
        return self.rank // block * self.tp_stride + self.rank % self.tp_stride


class SharesWeights(Protocol):
    """The part of a training engine in the same process that a factory uses (see verl.engines.base.TrainEngine)."""

    def shared_module(self) -> torch.nn.Module | None:
        """The module with all parameters, unsharded on this device; None if there is none."""

    def model_forward(self) -> Any:
        """The batch-invariant forward pass of the trained model; None if training is not batch-invariant."""

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's buffers by name, on this device."""


class RolloutFactory(Protocol):
    """Makes the engine of one process."""

    def __call__(
        self, config: BaseModel, model: BaseModel, env: RolloutEnv, train_engine: SharesWeights | None = None
    ) -> RolloutEngine:
        """
        Args:
            config: the `rollout` section (verl.config.schema.RolloutEngineConfig).
            model: the `model` section (verl.config.schema.ModelConfig).
            env: where the engine runs.
            train_engine: the training engine in the same process, if there is one. A rollout engine that generates with
                its `shared_module()` has no receiver; others receive weights through `receiver()`.
        """


#: name -> factory; `actor_rollout_ref.rollout.name` selects one
ROLLOUT_ENGINES: Registry[RolloutFactory] = Registry("rollout engine")


def register_rollout_engine(name: str) -> Callable[[RolloutFactory], RolloutFactory]:
    """Decorator: register a factory as `rollout.name=<name>`."""
    return ROLLOUT_ENGINES.register(name)


def make_rollout_engine(
    name: str, config: BaseModel, model: BaseModel, env: RolloutEnv, train_engine: SharesWeights | None = None
) -> RolloutEngine:
    """The engine registered under `name`.

    Raises:
        ValueError: there is none (the message lists the registered names), the factory returned something else, or a
            sampling key or tensor parallelism is set that the engine does not support.
    """
    engine = ROLLOUT_ENGINES[name](config, model, env, train_engine)
    if not isinstance(engine, RolloutEngine):
        raise ValueError(f"rollout.name={name}: expected its factory to return a RolloutEngine, found {engine!r}")
    if env.tp_size > 1 and not engine.supports_tensor_parallel:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={env.tp_size}: the rollout engine {name!r} does not support it "
            f"({type(engine).__name__}.supports_tensor_parallel is False): leave it at 1, or use rollout.name=native"
        )
    check_records(config, name, engine.records_routing)
    if engine.sampling_keys is not None:
        for key, default in _DEFAULTS.items():
            value = getattr(config, key, default)
            if value != default and key not in engine.sampling_keys:
                raise ValueError(
                    f"rollout.{key}={value}: the rollout engine {name!r} does not support it (it supports "
                    f"{', '.join(sorted(engine.sampling_keys))}): leave it at {default}"
                )
    return engine


def _register_built_in(name: str, module: str, factory: str) -> None:
    @register_rollout_engine(name)
    def make(*args: Any, **keys: Any) -> RolloutEngine:
        return load_object(module, factory)(*args, **keys)


_BUILT_IN = {"native": "native.factory", "hf": "hf", "vllm": "vllm.factory", "sglang": "sglang.factory"}
for _name, _module in _BUILT_IN.items():
    _register_built_in(_name, f"verl.rollout.{_module}", f"make_{_name}")
