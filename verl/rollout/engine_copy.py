"""What vLLM and SGLang share: engines of other libraries, with their own copy of the weights."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from verl.config import schema
from verl.config.errors import nearest_key
from verl.modeling.huggingface import model_source, read_config
from verl.rollout.base import RolloutEnv, SharesWeights
from verl.rollout.loading import engine_dtype, load_module, parameter_shapes
from verl.rollout.routed_experts import layers_with_experts
from verl.rollout.vision_models import check_images
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
    def of(
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
        check_images(config.name, hf_config)
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


def check_not_deterministic(config: schema.RolloutEngineConfig) -> None:
    """Raise ValueError for `rollout.deterministic`."""
    if isinstance(config, schema.RolloutConfig) and config.deterministic:
        raise ValueError("rollout.deterministic needs the layers of the trainer: set rollout.name=native")


def check_engine_kwargs(
    engine: str,
    given: Mapping[str, Any],
    owned: Mapping[str, str],
    not_supported: Mapping[str, str],
    known: Collection[str] = (),
) -> None:
    """Raise ValueError for arguments in `engine_kwargs.<engine>` that contradict the adapter or another key, and for
    those that the engine does not have.

    Args:
        engine: vllm or sglang.
        given: the arguments.
        owned: argument -> the key that sets it.
        not_supported: argument -> why it cannot be set.
        known: all arguments of the installed version; empty: not checked.
    """
    for name in given:
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
