"""What vLLM and SGLang share: engines of other libraries, with their own copy of the weights."""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl.config import schema
from verl.modeling.huggingface import experts_of, model_source, read_config
from verl.modeling.vision import is_vision_config
from verl.rollout.base import RolloutEngine, RolloutEnv, RolloutStats, SharesWeights
from verl.rollout.checks import check_finite, check_images, check_request
from verl.rollout.engine_thread import EngineThread
from verl.rollout.loading import engine_dtype, load_module, parameter_shapes
from verl.rollout.request import Completion, FinishReason, Request, matches_ids
from verl.rollout.routed_experts import cut, layers_with_experts
from verl.rollout.sampling import SAMPLING_KEYS
from verl.rollout.traits import engine_traits
from verl.weight_sync import WeightReceiver
from verl.weight_sync.base import require_weights
from verl.weight_sync.verify import Loading

_LENGTH = "rollout.max_model_len, by default data.max_prompt_length + data.max_response_length"


@dataclass(frozen=True)
class EngineCopy:
    """The model of such an engine, and where its weights come from."""

    config: schema.RolloutEngineConfig  # the `rollout` section
    model: schema.ModelConfig  # the `model` section, with a local path
    hf_config: Any  # HuggingFace config of the model
    dtype: torch.dtype  # of the weights and the computation
    is_trained: bool  # the trainer pushes the weights before the first generation
    merges: bool = False  # the weights are those of the files with adapters merged

    @classmethod
    def from_arguments(
        cls,
        config: schema.RolloutEngineConfig,
        model: schema.ModelConfig,
        env: RolloutEnv,
        train_engine: SharesWeights | None,
    ) -> "EngineCopy":
        """For the arguments of a factory. Raises ValueError for a model with images that is not supported."""
        is_trained = train_engine is not None or env.compute_dtype is not None
        model = model.model_copy(update={"path": model_source(model.path)})
        hf_config = read_config(model.path, model.override_config, model.trust_remote_code)
        check_images(engine_traits(config.name), hf_config)
        merges = not is_trained and model.lora_adapter_path is not None
        return cls(config, model, hf_config, engine_dtype(config, env), is_trained, merges)

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt plus response."""
        return self.config.max_model_len or self.config.prompt_length + self.config.response_length

    @property
    def reads_images(self) -> bool:
        """Whether the model is a vision-language model."""
        return is_vision_config(self.hf_config)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(experts_of(self.hf_config))

    @property
    def records(self) -> bool:
        """Whether the experts that the routers choose are reported (`Completion.routed_experts`)."""
        return isinstance(self.config, schema.RolloutConfig) and self.config.enable_rollout_routing_replay

    @property
    def seed(self) -> int:
        return self.config.seed if isinstance(self.config, schema.RolloutConfig) else 0

    @property
    def reads_files(self) -> bool:
        """Whether the engine itself reads the weights from the model's files."""
        return not self.is_trained and not self.merges

    def recorded_layers(self) -> list[int] | None:
        """The layers whose choices of experts are reported; None: none are asked for. Raises ValueError for a model
        without experts."""
        return layers_with_experts(self.config.name, parameter_shapes(self.model)) if self.records else None

    def shapes(self) -> dict[str, torch.Size]:
        """HuggingFace name of every parameter -> its shape."""
        return parameter_shapes(self.model)

    def fill(self, receiver: WeightReceiver) -> None:
        """Load the weights that the engine has not read; those that the trainer will push use no memory until then."""
        if self.merges:
            module = load_module(self.model, self.dtype, torch.device("cpu"))
            Loading(receiver, version=0, compares=True).load(module.named_parameters())
        elif self.is_trained:
            receiver.release()


@dataclass(eq=False)
class EngineJob:
    """A request in such an engine, and its tokens so far."""

    request: Request
    is_aborted: bool = field(default=False, kw_only=True)  # whether `abort` named it
    token_ids: list[int] = field(default_factory=list, kw_only=True)
    log_probs: list[float] = field(default_factory=list, kw_only=True)
    versions: list[tuple[int, int]] = field(default_factory=list, kw_only=True)  # spans (first token, weight version)
    # routed experts, of at least these tokens; None: not recorded
    routed_experts: np.ndarray | None = field(default=None, kw_only=True)

    def completion(self, reason: FinishReason) -> Completion:
        """The completion with these tokens. Raises ValueError if a log-prob is not finite."""
        check_finite(self.request, self.log_probs)
        spans = self.versions if len({version for _, version in self.versions}) > 1 else []
        tokens = len(self.request.prompt_ids) + len(self.token_ids) - 1
        experts = None if self.routed_experts is None else cut(self.routed_experts, tokens)
        return Completion(self.token_ids, self.log_probs, reason, spans, experts)


def running_error(caller: str) -> ValueError:
    """The error of a call that needs an idle engine."""
    return ValueError(f"{caller} was called while requests are running: wait for them or abort them")


class EngineRequests:
    """The requests of such an engine, which run in a thread of it.

    A subclass defines what runs there: `_abort(matches)`, and the coroutines `_close(caller, idle)` and `_reopen()`.
    """

    def __init__(self, engine: str):
        self.thread = EngineThread(engine)

    def abort(self, matches: Callable[[Request], bool]) -> None:
        """Abort requests; each is finished with its tokens so far."""
        self.thread.call(self._abort, matches)

    def exclusive(self, caller: str, idle: bool = False) -> AbstractContextManager[Any]:
        """Context in which no request is computed.

        Args:
            caller: for the error.
            idle: no request may be running.

        Raises:
            ValueError: requests are running, and `idle` is set or they cannot be interrupted.
        """
        return self.thread.exclusive(self._close(caller, idle), self._reopen)


class EngineMemory(ABC):
    """The GPU memory of such an engine: weights and KV cache, which can be freed and allocated again.

    Args:
        is_on: whether the engine can free memory; not on a CPU, nor with free_cache_engine=false.
    """

    def __init__(self, is_on: bool):
        self._is_on = is_on
        self._freed: set[str] = set()  # of "weights" and "kv_cache"
        self._lock = threading.Lock()

    @abstractmethod
    def sleep(self) -> None:
        """Free the KV cache. Weights may be moved to host memory."""

    @abstractmethod
    def drop(self) -> None:
        """Free the KV cache and the weights."""

    def allocate(self, *tags: str) -> None:
        """Allocate memory that was freed. tags: of "weights" and "kv_cache"."""
        with self._lock:
            for tag in [tag for tag in tags if tag in self._freed]:
                torch.cuda.empty_cache()
                self._allocate(tag)
                self._freed.remove(tag)

    @abstractmethod
    def _allocate(self, tag: str) -> None: ...


class CopyRollout(RolloutEngine):
    """Base class of the engines of vLLM and SGLang, which run requests in a thread of the engine.

    Event loops of several threads share the batch, and so does a `generate` that runs at the same time.

    Args:
        copy: the model.
        requests: runs the requests.
        memory: GPU memory of the engine.
    """

    sampling_keys = SAMPLING_KEYS
    supports_tensor_parallel = True
    _receiver: "EngineReceiver"

    def __init__(self, copy: EngineCopy, requests: EngineRequests, memory: EngineMemory):
        self.name, self.memory = copy.config.name, memory
        self.vocab_size, self.max_length = copy.hf_config.get_text_config().vocab_size, copy.max_length
        self.reads_images, self.records_routing = copy.reads_images, copy.records
        self.stats = RolloutStats()
        self._requests = requests

    def check(self, name: str, request: Request) -> None:
        """Raise ValueError for a request that is not valid. name: of the request, in the message."""
        check_request(name, request, self.name, self.vocab_size, self.max_length, _LENGTH, self.reads_images)

    def submit(self, requests: Sequence[Request], is_batch: bool) -> "list[Future[Completion]]":
        """Start requests. Cancelling a future aborts its request. is_batch: all of them are waited for."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutEngine.generate`. May run at the same time as requests of `generate_one`.

        Raises:
            ValueError: an invalid request (see `check_request`), non-finite logits, or weights that were not received.
        """
        for index, request in enumerate(requests):
            self.check(f"prompt {index}", request)
        start, steps = time.perf_counter(), self.steps
        futures = self.submit(requests, is_batch=True)
        try:
            completions = [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        tokens = sum(len(completion.token_ids) for completion in completions)
        self.stats = RolloutStats(tokens, self.steps - steps, time.perf_counter() - start)
        return completions

    async def generate_one(self, request: Request) -> Completion:
        """See `RolloutEngine.generate_one`. Continuous batching."""
        self.check(f"the prompt of sample_id {request.sample_id!r}", request)
        (future,) = self.submit([request], is_batch=False)
        return await asyncio.wrap_future(future)  # a cancelled coroutine cancels the future

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Requests of a running `generate` end too, with vLLM without tokens unless they
        have stop strings."""
        self._requests.abort(lambda request: matches_ids(request, request_ids))

    @property
    def steps(self) -> int:
        """Decode steps since the engine was made; 0: not known."""
        return 0

    def receiver(self) -> "EngineReceiver":
        return self._receiver

    def sleep(self) -> None:
        """Free the KV cache. Does nothing on a CPU.

        Raises:
            ValueError: requests are running.
        """
        with self._requests.exclusive("sleep()", idle=True):
            self.memory.sleep()


class EngineReceiver:
    """Base class of the receivers of vLLM and SGLang.

    Args:
        requests: of the engine.
        memory: of the engine.
        shapes: returns HuggingFace name -> shape of every parameter.
        filled: whether the model has its weights.
    """

    def __init__(
        self,
        requests: EngineRequests,
        memory: EngineMemory,
        shapes: Callable[[], dict[str, torch.Size]],
        filled: bool,
    ):
        self._requests, self._memory = requests, memory
        self._read_shapes = shapes
        self.filled = filled

    @contextmanager
    def _updating(self, version: int) -> Iterator[Any]:
        """Context of a push, in which no request is computed. Nothing is generated if it raises."""
        with self._requests.exclusive("a weight push") as running:
            self.filled = False
            self._memory.allocate("weights")
            with self._session(version, running) as session:
                yield session
            self.filled = True

    def _session(self, version: int, running: Any) -> AbstractContextManager[Any]:
        """What the engine does around the update of its weights. running: yielded by `EngineRequests.exclusive`."""
        raise NotImplementedError

    def release(self) -> None:
        """See `WeightReceiver.release`. The KV cache is freed as well."""
        with self._requests.exclusive("release()", idle=True):
            self.filled = False
            self._memory.drop()

    def check_filled(self) -> None:
        """Raise ValueError before the first `receive` and after `release`."""
        require_weights(self.filled)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """HuggingFace name of every parameter -> its shape."""
        return self._read_shapes()
