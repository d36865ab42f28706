"""The contract of a rollout engine: token ids in, token ids and log-probs out. No text and no DataProto.

A custom engine is a subclass of `RolloutEngine` and a registered factory:

    @register_rollout_engine("mine")
    def make_mine(config, model, env, train_engine=None) -> RolloutEngine:
        return MyEngine(model.path, device=env.device)

Load its file with `imports=[path/to/file.py]` and select it with `actor_rollout_ref.rollout.name=mine`.
"""

import asyncio
import threading
from abc import ABC
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from pydantic import BaseModel

from verl.registry import Registry, load_object
from verl.rollout.request import (  # noqa: F401 (the contract of an engine, importable from one module)
    SAMPLING_DEFAULTS,
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    check_completions,
    make_requests,
    matches_ids,
    stop_strings,
)
from verl.rollout.routed_experts import check_records
from verl.rollout.traits import EngineTraits, built_in_engines, check_speculation, declare_traits
from verl.utils.coroutines import gather_coroutines, run_coroutine

if TYPE_CHECKING:
    from verl.weight_sync import WeightReceiver


@dataclass
class RolloutStats:
    """Statistics of the last `generate`: response tokens, decode steps, seconds, drafts of speculative decoding and
    how many of them were accepted."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    drafts: int = 0
    accepted: int = 0


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

    _gathering: "GatheredRequests | None" = None

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
        if self._gathering is None:
            # setdefault: another thread may do the same
            vars(self).setdefault("_gathering", GatheredRequests(self._complete))
        return await self._gathering.submit(request)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests of `generate_one`; None: all of them.

        Each returns its tokens so far, with finish_reason "abort". The default aborts requests that have not started.
        """
        if self._gathering is not None:
            self._gathering.abort(lambda request: matches_ids(request, request_ids), Completion([], [], "abort"))

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Call `generate`. Raises ValueError if it does not return one valid completion per request."""
        result = self.generate(requests)
        if not isinstance(result, Iterable):
            if isinstance(result, Coroutine):
                result.close()
            raise ValueError(
                f"{type(self).__name__}.generate() returned a {type(result).__name__}: expected a list with one "
                "Completion per request. It must not be `async`; define `async generate_one` for single requests"
            )
        completions = list(result)
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


# ---- the default of `generate_one` ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Waiting:
    """A request whose coroutine is waiting. aborted: its completion, once it has been aborted."""

    request: Request
    future: asyncio.Future[Completion]
    aborted: Completion | None = None


class GatheredRequests:
    """Collects the concurrent requests of an event loop for one call of `complete`.

    Event loops of several threads take turns.

    Args:
        complete: requests -> one completion per request. Its errors reach every request of the call.
    """

    def __init__(self, complete: Callable[[Sequence[Request]], list[Completion]]):
        self._complete = complete
        self._waiting: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
        self._turn = threading.Lock()

    async def submit(self, request: Request) -> "Completion":
        loop = asyncio.get_running_loop()
        for closed in [other for other in list(self._waiting) if other.is_closed()]:
            self._waiting.pop(closed, None)
        waiting = self._waiting.setdefault(loop, [])
        if not waiting:
            loop.call_soon(self._flush, loop)  # after the coroutines that are ready now have submitted theirs
        mine = _Waiting(request, loop.create_future())
        waiting.append(mine)
        return await mine.future

    def abort(self, matches: Callable[[Request], bool], completion: Completion) -> None:
        """Abort waiting requests with this completion. Thread-safe: their event loop resolves them."""
        for waiting in list(self._waiting.values()):
            for each in list(waiting):
                if matches(each.request):
                    each.aborted = completion

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._turn:
            batch = []
            for each in self._waiting.pop(loop):
                if each.future.done():
                    continue
                if each.aborted is not None:
                    each.future.set_result(each.aborted)
                else:
                    batch.append(each)
            if not batch:
                return
            try:
                completions = self._complete([each.request for each in batch])
            except BaseException as error:
                for each in batch:
                    fail(each.future, error)
                if not isinstance(error, Exception):
                    raise
                return
        for each, completion in zip(batch, completions, strict=True):
            each.future.set_result(completion)


def fail(future: "asyncio.Future[Any] | Future[Any]", error: BaseException) -> None:
    """Deliver an error to the coroutine that waits for `future`; one that is not an `Exception` cancels it."""
    if future.done():
        return
    if isinstance(error, StopIteration):  # cannot be raised into a future
        wrapped = RuntimeError("the rollout engine raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    elif isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.cancel()


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


def register_rollout_engine(
    name: str, traits: EngineTraits | None = None
) -> Callable[[RolloutFactory], RolloutFactory]:
    """Decorator: register a factory as `rollout.name=<name>`.

    Args:
        name: the name of the engine.
        traits: what settings, checks and the planner may assume of the engine; None: nothing.
    """
    if traits is not None:
        declare_traits(name, traits)
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
    if (speculative := getattr(config, "speculative", None)) is not None:
        check_speculation(name, speculative.method)
    check_sampling_keys(config, name, engine.sampling_keys)
    return engine


def check_sampling_keys(config: BaseModel, name: str, supported: Collection[str] | None) -> None:
    """Raise ValueError for a sampling key that is set and not supported. None: not declared."""
    for key, default in SAMPLING_DEFAULTS.items() if supported is not None else ():
        value = getattr(config, key, default)
        if value != default and key not in supported:
            raise ValueError(
                f"rollout.{key}={value}: the rollout engine {name!r} does not support it (it supports "
                f"{', '.join(sorted(supported))}): leave it at {default}"
            )


def _register_built_in(name: str) -> None:
    @register_rollout_engine(name)
    def make(*args: Any, **keys: Any) -> RolloutEngine:  # at use: imports the engine
        return load_object(f"verl.rollout.{name}.factory", f"make_{name}")(*args, **keys)


for _name in built_in_engines():
    _register_built_in(_name)
