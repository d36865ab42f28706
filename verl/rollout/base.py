"""The contract of a rollout engine: token ids in, token ids and log-probs out. It knows no text and no DataProto.

A custom engine is a subclass of `RolloutEngine` and a registered factory:

    @register_rollout_engine("mine")
    def make_mine(config, model, env, train_engine=None) -> RolloutEngine:
        return MyEngine(model.path, device=env.device)

Load its file with `imports=[path/to/file.py]` and select it with `actor_rollout_ref.rollout.name=mine`.
"""

import asyncio
import threading
from abc import ABC
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel

from verl.registry import Registry, load_object
from verl.rollout.stop_strings import StopStrings

if TYPE_CHECKING:
    from verl.rollout.weight_sync import WeightReceiver

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingParams:
    """How the response to one prompt is sampled.

    Args:
        max_tokens: most response tokens, the stop token included.
        stop_token_ids: a response ends with the first of these, which belongs to it.
        temperature: 0 is greedy.
        top_k: -1 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: together with the request's `sample_id` it fixes the random numbers of the response.
        ignore_eos: generate `max_tokens` tokens whatever they are (benchmarks).
        stop: strings that end a response, too.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop: StopStrings | None = None

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
        ):
            if not fits:
                raise ValueError(f"sampling: {name} must be {expected}, found {self.__dict__[name]}")

    @classmethod
    def from_config(
        cls, section: BaseModel, *, stop_token_ids: tuple[int, ...], stop: StopStrings | None = None
    ) -> "SamplingParams":
        """The parameters that a `rollout` section sets: every field is read by its name.

        Args:
            section: `verl.config.schema.SamplingConfig` or a subclass.
            stop_token_ids: the tokens that end a response, as the tokenizer and the model have them.
            stop: `section.stop` with the tokenizer's `decode` (`stop_strings`).
        """
        given = section.model_dump()
        values = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        return cls(**values | {"max_tokens": given["response_length"], "stop_token_ids": stop_token_ids, "stop": stop})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether tokens are excluded, so that log-probs are not those of the model's distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def active_stop_ids(self) -> tuple[int, ...]:
        """The token ids that end a response; none with `ignore_eos`."""
        return () if self.ignore_eos else self.stop_token_ids

    @property
    def shared(self) -> "SamplingParams":
        """The part that all requests of one batch must agree on: all but max_tokens, seed and stop."""
        return replace(self, max_tokens=1, seed=0, stop=None)


def stop_strings(strings: Sequence[str], tokenizer: Any) -> StopStrings | None:
    """`rollout.stop` with the tokenizer that decodes responses; None without strings."""
    return StopStrings(tuple(strings), tokenizer.decode) if strings else None


@dataclass(frozen=True)
class Request:
    """One prompt to respond to.

    Args:
        prompt_ids: token ids, not padded, at least one.
        params: how to sample.
        sample_id: with `params.seed`, fixes the random numbers of the response, whatever else is in the batch.
        request_id: the name that `abort` knows the request by.
        multi_modal_data: images and the like, for engines that support them.
    """

    prompt_ids: list[int]
    params: SamplingParams
    sample_id: int
    request_id: str = ""
    multi_modal_data: Any = None


FinishReason = Literal["stop", "length", "abort"]


@dataclass
class Completion:
    """The response to one request.

    Args:
        token_ids: the response, its stop token included.
        log_probs: one per token, of the distribution that it was sampled from (after temperature, top-k, top-p and
            min-p); of the unscaled distribution when greedy.
        finish_reason: "stop" (a stop token or string), "length" (max_tokens), or "abort".
        weight_versions: spans (first token, version of the weights that sampled from there on). An engine may leave it
            empty: the whole response is then of the version that was last synchronized.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class RolloutStats:
    """What the last `generate` did: response tokens, decoding steps, seconds."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class RolloutEngine(ABC):  # noqa: B024 (`__init_subclass__` asks for one method of two)
    """Generates responses. Define `generate`, or `generate_one`, or both: each has a default in terms of the other."""

    #: of the last `generate`
    stats: RolloutStats = RolloutStats()
    #: version of the weights that it generates with: the number of completed training steps. Set by the weight sync
    weight_version: int = 0

    _gathering: "GatheredRequests | None" = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.generate is RolloutEngine.generate and cls.generate_one is RolloutEngine.generate_one:
            raise TypeError(f"{cls.__name__} defines neither generate() nor generate_one(): define one of them")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Respond to a whole batch and wait for it.

        Returns:
            One completion per request, in the order of the requests. Requests with equal prompts are samples of one
            group: an engine may share their work.
        """
        return run_coroutine(gather_coroutines([self.generate_one(request) for request in requests]))

    async def generate_one(self, request: Request) -> Completion:
        """Respond to one request. Call it from many coroutines at once: they share the engine's batch.

        The default sends all requests that are waiting at the same time through `generate`, which blocks the event
        loop meanwhile.
        """
        if self._gathering is None:
            self._gathering = GatheredRequests(self.generate)
        return await self._gathering.submit(request)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests of `generate_one` now, all of them for None.

        Each returns the tokens that it has, with finish_reason "abort". The default reaches those that have not begun.
        """
        if self._gathering is not None:
            self._gathering.abort(request_ids)

    def sleep(self) -> None:  # noqa: B027
        """Free the memory that only generation needs, such as the KV cache. Weights stay."""

    def wake(self) -> None:  # noqa: B027
        """Be ready to generate again after `sleep`."""

    def receiver(self) -> "WeightReceiver | None":
        """What takes new weights in; None for an engine that generates with the trainer's own parameters."""
        return None


async def gather_coroutines(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run at the same time. The first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class GatheredRequests:
    """`generate_one` in terms of `generate`: requests that wait at the same time are one batch."""

    def __init__(self, generate: Callable[[Sequence[Request]], list[Completion]]):
        self._generate = generate
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []

    async def submit(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)  # after the coroutines that are ready now have submitted theirs
        self._waiting.append((request, future))
        return await future

    def abort(self, request_ids: Sequence[str] | None) -> None:
        for request, future in self._waiting:
            if is_named(request, request_ids) and not future.done():
                future.set_result(Completion([], [], "abort"))

    def _flush(self) -> None:
        batch = [(request, future) for request, future in self._waiting if not future.done()]
        self._waiting = []
        if not batch:
            return
        try:
            completions = self._generate([request for request, _ in batch])
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), completion in zip(batch, completions, strict=True):
            future.set_result(completion)


def is_named(request: Request, request_ids: Sequence[str] | None) -> bool:
    """Whether `abort(request_ids)` means this request."""
    return request_ids is None or request.request_id in request_ids


def make_requests(
    prompts: Sequence[list[int]],
    params: SamplingParams,
    sample_ids: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
) -> list[Request]:
    """One request per prompt.

    Args:
        prompts: token ids of each.
        params: of all.
        sample_ids: of each; None is 0, 1, 2 ...
        limits: most response tokens of each; None is params.max_tokens for all.

    Raises:
        ValueError: lists of different length.
    """
    for name, values in (("sample_ids", sample_ids), ("limits", limits)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"expected as many {name} as prompts ({len(prompts)}), found {len(values)}")
    ids = range(len(prompts)) if sample_ids is None else sample_ids
    each = [params] * len(prompts) if limits is None else [replace(params, max_tokens=n) for n in limits]
    return [Request(list(p), own, int(i)) for p, own, i in zip(prompts, each, ids)]


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook cell)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="rollout")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


# ---- engines by name ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutEnv:
    """Where an engine runs, in plain values.

    Args:
        rank: of this process among those of the rollout role. world_size: how many there are. local_rank: on this host.
        device: of the engine.
        pad_token_id: fills rows where an engine pads.
        compute_dtype: of the training computation; None where nothing is trained.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    pad_token_id: int
    compute_dtype: torch.dtype | None = None


class SharesWeights(Protocol):
    """What a factory may ask of the training engine in the same process (see verl.engines.base.TrainEngine)."""

    def shared_module(self) -> torch.nn.Module | None:
        """The module with all parameters unsharded on this device; None where there is none."""

    def model_forward(self) -> Any:
        """The batch-invariant forward pass of the trained model; None where it is computed in another way."""

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
            env: where it runs.
            train_engine: the training engine in the same process, if there is one. An engine that generates with its
                `shared_module()` has no receiver; any other is given its weights through `receiver()`.
        """


#: name -> factory; `actor_rollout_ref.rollout.name` selects one
ROLLOUT_ENGINES: Registry[RolloutFactory] = Registry("rollout engine")


def register_rollout_engine(name: str) -> Callable[[RolloutFactory], RolloutFactory]:
    """Decorator: register a factory as `rollout.name=<name>`."""
    return ROLLOUT_ENGINES.register(name)


def make_rollout_engine(
    name: str, config: BaseModel, model: BaseModel, env: RolloutEnv, train_engine: SharesWeights | None = None
) -> RolloutEngine:
    """The engine registered under `name`. Raises ValueError that lists the registered names."""
    return ROLLOUT_ENGINES[name](config, model, env, train_engine)


@register_rollout_engine("native")
def _native(
    config: BaseModel, model: BaseModel, env: RolloutEnv, train_engine: SharesWeights | None = None
) -> RolloutEngine:
    return load_object("verl.rollout.native.factory", "make_native")(config, model, env, train_engine)


@register_rollout_engine("hf")
def _hf(
    config: BaseModel, model: BaseModel, env: RolloutEnv, train_engine: SharesWeights | None = None
) -> RolloutEngine:
    return load_object("verl.rollout.hf", "make_hf")(config, model, env, train_engine)
