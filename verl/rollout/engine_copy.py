"""What vLLM and SGLang share: engines of other libraries, with their own copy of the weights."""

import asyncio
import importlib
import importlib.metadata
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl.config import schema
from verl.config.errors import nearest_key
from verl.modeling.huggingface import model_source, read_config
from verl.rollout.base import RolloutEngine, RolloutEnv, RolloutStats, SharesWeights
from verl.rollout.checks import check_finite, check_images
from verl.rollout.loading import engine_dtype, load_module, parameter_shapes
from verl.rollout.request import Completion, FinishReason, Request
from verl.rollout.routed_experts import cut, layers_with_experts
from verl.rollout.sampling import SAMPLING_KEYS
from verl.rollout.traits import engine_traits
from verl.utils.packages import Package
from verl.weight_sync import WeightReceiver
from verl.weight_sync.adapters import Part
from verl.weight_sync.base import require_weights
from verl.weight_sync.verify import Loading


@dataclass(frozen=True)
class EngineCopy:
    """The model of such an engine, and where its weights come from.

    Attributes:
        model: the `model` section, with a local path.
        hf_config: HuggingFace config of the model.
        dtype: of the weights and the computation.
        is_trained: the trainer pushes the weights before the first generation.
        merges: the weights are those of the files with adapters merged.
        records: the experts that the routers choose are reported (`Completion.routed_experts`).
    """

    model: schema.ModelConfig
    hf_config: Any
    dtype: torch.dtype
    is_trained: bool
    merges: bool
    records: bool = False

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
        records = isinstance(config, schema.RolloutConfig) and config.enable_rollout_routing_replay
        return cls(model, hf_config, engine_dtype(config, env), is_trained, merges, records)

    @property
    def reads_files(self) -> bool:
        """Whether the engine itself reads the weights from the model's files."""
        return not self.is_trained and not self.merges

    def recorded_layers(self, engine: str) -> list[int] | None:
        """The layers whose choices of experts are reported; None: none are asked for.

        Args:
            engine: vllm or sglang.

        Raises:
            ValueError: the model has no experts.
        """
        return layers_with_experts(engine, parameter_shapes(self.model)) if self.records else None

    def fill(self, receiver: WeightReceiver) -> None:
        """Load the weights that the engine has not read; those that the trainer will push use no memory until then."""
        if self.merges:
            module = load_module(self.model, self.dtype, torch.device("cpu"))
            Loading(receiver, version=0, compares=True).load(Part(None, module.named_parameters()))
        elif self.is_trained:
            receiver.release()


@dataclass(eq=False)
class EngineJob:
    """A request in such an engine, and its tokens so far.

    Attributes:
        is_aborted: whether `abort` named it.
        versions: spans (first token, weight version).
        routed_experts: the experts that were chosen, of at least these tokens; None: not recorded.
    """

    request: Request
    is_aborted: bool = field(default=False, kw_only=True)
    token_ids: list[int] = field(default_factory=list, kw_only=True)
    log_probs: list[float] = field(default_factory=list, kw_only=True)
    versions: list[tuple[int, int]] = field(default_factory=list, kw_only=True)
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


class CopyRollout(RolloutEngine):
    """Base class of the engines of vLLM and SGLang, which run requests in a thread of the engine.

    Event loops of several threads share the batch, and so does a `generate` that runs at the same time.
    """

    sampling_keys = SAMPLING_KEYS
    supports_tensor_parallel = True

    def check(self, name: str, request: Request) -> None:
        """Raise ValueError for a request that is not valid. name: of the request, in the message."""
        raise NotImplementedError

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

    @property
    def steps(self) -> int:
        """Decode steps since the engine was made; 0: not known."""
        return 0

    def wake(self) -> None:
        """Does nothing: weights and KV cache are allocated when they are used."""


class EngineReceiver:
    """Base class of the receivers of vLLM and SGLang: parameter shapes, and whether weights were received.

    Args:
        shapes: returns HuggingFace name -> shape of every parameter.
        filled: whether the model has its weights.
    """

    def __init__(self, shapes: Callable[[], dict[str, torch.Size]], filled: bool):
        self._read_shapes = shapes
        self.filled = filled

    def check_filled(self) -> None:
        """Raise ValueError before the first `receive` and after `release`."""
        require_weights(self.filled)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """HuggingFace name of every parameter -> its shape."""
        return self._read_shapes()


# ---- the installed package -----------------------------------------------------------------------------------------


def installed_version(package: Package) -> str:
    """The installed version of a package, for messages."""
    for distribution in package.distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "(an unversioned copy)"


def probe_package(
    package: Package, attributes: Mapping[str, Sequence[str]], parameters: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Import what an adapter uses of a package, and check that it has what the adapter needs.

    Args:
        package: the package.
        attributes: "module:Class" -> attributes that the adapter uses.
        parameters: "module:Class" or "module:Class.method" -> parameters that the adapter passes.

    Returns:
        The classes by name.

    Raises:
        ImportError: one does not import.
        ValueError: something is missing; the message lists what, with the tested versions.
    """
    version = f"rollout.name={package.module}: {package.title} {installed_version(package)}"
    classes: dict[str, Any] = {}
    missing: list[str] = []
    try:
        for path in (*attributes, *parameters):
            module, _, name = path.partition(":")
            classes[name.partition(".")[0]] = _import(module, name.partition(".")[0])
    except ImportError as error:
        raise ImportError(
            f"{version} does not import: {error} (tested: {package.tested_versions}). To install: "
            f"{package.how_to_install}"
        ) from error
    for path, names in attributes.items():
        name = path.partition(":")[2]
        missing += [f"{name}.{attribute}" for attribute in names if attribute not in dir(classes[name])]
    for path, names in parameters.items():
        name, _, method = path.partition(":")[2].partition(".")
        if f"{name}.{method}" not in missing:
            known = parameters_of(inspect.getattr_static(classes[name], method) if method else classes[name])
            missing += [f"{path.partition(':')[2]}({parameter})" for parameter in names if parameter not in known]
    if missing:
        raise ValueError(
            f"{version} lacks {', '.join(missing)}; tested versions: {package.tested_versions}. To install: "
            f"{package.how_to_install}"
        )
    return classes


def parameters_of(function: Any) -> frozenset[str]:
    """Names of the parameters of a function, or of a class."""
    return frozenset(inspect.signature(function).parameters)


def _import(module: str, name: str) -> Any:
    imported = importlib.import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError:
        raise ImportError(f"{module} has no {name}") from None


# ---- settings ------------------------------------------------------------------------------------------------------


def check_not_deterministic(config: schema.RolloutEngineConfig) -> None:
    """Raise ValueError for `rollout.deterministic`."""
    if isinstance(config, schema.RolloutConfig) and config.deterministic:
        raise ValueError("rollout.deterministic needs the layers of the trainer: set rollout.name=native")


def check_engine_kwargs(
    engine: str,
    kwargs: Mapping[str, Any],
    owned: Mapping[str, str],
    not_supported: Mapping[str, str],
    known: Collection[str] = (),
) -> None:
    """Raise ValueError for arguments in `engine_kwargs.<engine>` that contradict the adapter or another key, and for
    those that the engine does not have.

    Args:
        engine: vllm or sglang.
        kwargs: the arguments.
        owned: argument -> the key that sets it.
        not_supported: argument -> why it cannot be set.
        known: all arguments of the installed version; empty: not checked.
    """
    for name in kwargs:
        if name in owned:
            raise ValueError(f"rollout.engine_kwargs.{engine}.{name}: set {owned[name]} instead")
        if name in not_supported:
            raise ValueError(
                f"rollout.engine_kwargs.{engine}.{name} is not supported: {not_supported[name]}; remove it"
            )
        if known and name not in known:
            near = nearest_key(name, known)
            hint = f"did you mean {near}?" if near else "remove it"
            raise ValueError(
                f"rollout.engine_kwargs.{engine}.{name}: the installed {engine} has no such argument; {hint}"
            )


def max_model_len(config: schema.RolloutEngineConfig) -> int:
    """Longest sequence, prompt plus response."""
    return config.max_model_len or config.prompt_length + config.response_length


def cache_bytes_per_token(hf_config: Any, dtype: torch.dtype, tp_size: int = 1) -> int:
    """Bytes of the KV cache of one token, on one of `tp_size` ranks."""
    text = hf_config.get_text_config()
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(heads // tp_size, 1) * head_dim * dtype.itemsize
