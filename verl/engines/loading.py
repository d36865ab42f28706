"""Model of a training engine: configuration, loading, and the forward pass to the outputs."""

import copy
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from verl.checkpoints.safetensors_files import SafetensorsFiles, has_weights
from verl.config import schema
from verl.engines.base import EngineSpec, Tensors
from verl.engines.memory import HOST
from verl.engines.parallel import sharded_layers
from verl.modeling import attention, vision
from verl.modeling.casting import autocast_dtype
from verl.modeling.huggingface import (
    VALUE_HEADS,
    LMHead,
    load_pretrained,
    needs_trust,
    read_config,
    trunk_of,
    value_head,
)
from verl.modeling.layers import Kernels
from verl.modeling.log_probs import token_statistics
from verl.modeling.moe import install_routing
from verl.modeling.packing import ModelInput, build_input, padding_reason
from verl.modeling.sequence_parallel import check_heads
from verl.modeling.vision import VisionForward
from verl.utils.device import resolve_dtype
from verl.utils.paths import expanded

logger = logging.getLogger("verl.engines")

#: dropout probabilities without "dropout" in their names; with dropout, the log-probs of the same weights would differ
_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


# ---- what the configuration means on this device --------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSpec:
    """A `model` section with the settings that the engine derived from the configuration and the device.

    Attributes:
        kind: as in `EngineSpec`.
        compute_dtype: dtype of the forward pass; see `modeling.casting` if it differs from model_dtype.
        kernels: how norms, MLPs and rotary embeddings are computed (`modeling.layers`).
        random_init: initialize at random instead of loading weights (for tests and benchmarks).
        new_head: of a reward model, may be missing in the files.
    """

    section: schema.ModelConfig
    kind: str = "causal_lm"
    device: torch.device = HOST
    model_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    kernels: Kernels = "plain"
    random_init: bool = False
    new_head: bool = False

    @cached_property
    def hf_config(self) -> Any:
        """The HuggingFace config of the model."""
        return read_config(self.section.path, self.section.override_config, self.section.trust_remote_code)

    @property
    def autocast_to(self) -> torch.dtype | None:
        """See `autocast_dtype`."""
        return autocast_dtype(self.model_dtype, self.compute_dtype)

    @property
    def casts_at_use(self) -> bool:
        """Whether layers cast their parameters, which autocast does not support."""
        return self.compute_dtype != self.model_dtype and self.autocast_to is None


def resolve_model(spec: EngineSpec) -> ModelSpec:
    """Dtypes and kernels of the model that `spec` describes. Raises like `check_kernels`."""
    compute_dtype = resolve_dtype(spec.engine.dtype, spec.device)
    # trained weights stay float32: in bf16, updates below 2**-8 of a weight are lost; those under adapters are frozen
    default = compute_dtype if spec.model.has_adapters else torch.float32
    model_dtype = spec.engine.model_dtype
    model = ModelSpec(
        section=spec.model,
        kind=spec.kind,
        device=spec.device,
        new_head=spec.kind == "reward" and spec.optimizer is not None,
        model_dtype=default if model_dtype == "auto" else resolve_dtype(model_dtype, spec.device),
        compute_dtype=compute_dtype,
        kernels="batch_invariant" if spec.deterministic else choose_kernels(spec.model, spec.device, compute_dtype),
    )
    if not model.casts_at_use or model.kernels == "plain":
        return model
    if model.kernels != "fused":
        raise ValueError(
            f"dtype={spec.engine.dtype} with model_dtype={model_dtype}: rollout.deterministic and use_liger do "
            "not support weights in fewer bits than the computation: set both to the same dtype"
        )
    return replace(model, kernels="plain")


def choose_kernels(model: schema.ModelConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Select the kernels of the layers: the built-in fused kernels, unless configured otherwise.

    Raises:
        ValueError: see `check_kernels`.
    """
    check_kernels(model, device)
    if device.type != "cuda":
        return "fused" if dtype in (torch.float32, torch.float64) else "plain"  # the CPU kernels have no autocast
    if model.use_liger:
        return "liger"
    return "plain" if dtype == torch.float64 else "fused"  # our kernels compute in float32


def check_kernels(model: schema.ModelConfig, device: torch.device) -> None:
    """Raise ValueError if Liger is selected on a CPU or its package is missing."""
    if not model.use_liger:
        return
    if device.type != "cuda":
        raise ValueError(f"model.use_liger: Liger kernels need a GPU, found {device.type}: set it to false")
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("model.use_liger: liger-kernel is not installed: pip install liger-kernel, or set it to false")


# ---- loading --------------------------------------------------------------------------------------------------------


def load_module(spec: ModelSpec) -> nn.Module:
    """Load the model, with dropout disabled. Raises ValueError with the path if it cannot be loaded."""
    auto, hf, build = _recipe(spec)
    if spec.random_init:
        with spec.device:
            module = _with_head(auto.from_config(hf, dtype=spec.model_dtype, **build), spec)
    else:
        module = _from_pretrained(auto, spec, hf, build)
    module, has_4_bits = _with_attention(module, spec), spec.section.quantization == "nf4"
    if not has_4_bits:
        module = module.to(spec.device)
    if not spec.random_init:
        check_finite(module.named_parameters(), spec.section.path)
    if not has_4_bits:
        return _with_adapters(module, spec)
    from verl.engines import lora, quantization

    names = list(lora.adaptable_layers(module))
    module = _with_adapters(module, spec)
    quantization.quantize(module, names, spec.device, spec.compute_dtype)
    return module.to(spec.device)


@torch.no_grad()
def check_finite(
    tensors: Iterable[tuple[str, torch.Tensor]], path: str, any_rank: Callable[[list[float]], list[float]] = list
) -> None:
    """Raise ValueError if a parameter has NaN or infinite values. One pass over the weights, no copy.

    Args:
        any_rank: the maximum over all ranks, if the tensors are shards.
    """
    parameters = [(name, p if p.numel() else p.new_zeros(1)) for name, p in tensors]
    extremes = torch.stack([torch.stack(p.aminmax()).float() for _, p in parameters])  # NaN if there is a NaN
    flags = any_rank((~extremes.isfinite().all(1)).float().tolist())
    broken = [name for (name, _), flag in zip(parameters, flags) if flag]
    if broken:
        raise ValueError(
            f"model.path={path}: expected finite weights, found NaN or infinite values in {len(broken)} of "
            f"{len(parameters)} parameters, the first is {broken[0]}: the files are damaged, or were saved from a "
            "diverged run. Use an earlier checkpoint, or download the model again"
        )


def empty_module(spec: ModelSpec) -> nn.Module:
    """Build the model on the device "meta", without memory."""
    auto, hf, build = _recipe(spec)
    with torch.device("meta"):
        module = _with_attention(_with_head(auto.from_config(hf, dtype=spec.model_dtype, **build), spec), spec)
        return _with_adapters(module, spec)


def _with_attention(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """Use the attention of packed rows, unless rows of the model are padded, in place."""
    if spec.section.use_remove_padding and padding_reason(module) is None:
        packed = attention.NAME
        if spec.kernels == "batch_invariant":
            from verl.modeling.batch_invariant.model import NAME as packed  # registers it
        parts = {"": packed, "text_config": packed, "vision_config": "sdpa"}
        module.set_attn_implementation(parts if vision.is_vision_config(module.config) else packed)
    else:
        attention.use_default_attention(module)
    return attention.use_vision_attention(module)


def _with_adapters(module: nn.Module, spec: ModelSpec) -> nn.Module:
    if not spec.section.has_adapters:
        return module
    from verl.engines.lora import add_adapters

    return add_adapters(module, spec.section)


def check_model(model: schema.ModelConfig, kind: str = "causal_lm", new_head: bool = False) -> None:
    """Raise ValueError for a `model` section whose model cannot be built. Reads its config.json only."""
    spec = ModelSpec(model, kind, new_head=new_head)
    _recipe(spec)
    if spec.section.has_adapters:
        from verl.engines.lora import Adapters

        logger.info("LoRA adapters of %s: %s", model.path, Adapters(empty_module(spec)).describe())


def check_layers(
    model: schema.ModelConfig, kind: str, engine: schema.EngineConfig, deterministic: bool, replays: bool
) -> None:
    """Raise ValueError for settings that the layers of a model do not support, and log why its rows are padded.

    Reads its config.json only.

    Args:
        kind: as in `EngineSpec`, like deterministic.
        replays: router replay records or repeats the choices of experts.
    """
    spec = ModelSpec(model, kind, kernels="batch_invariant" if deterministic else "plain")
    token_model = TokenModel(empty_module(spec), spec)
    module = token_model.module
    if replays and token_model.routing is None:
        raise ValueError(
            f"router replay is not supported for the routers of {type(module).__name__}: set "
            "actor.router_replay.mode=disabled and rollout.enable_rollout_routing_replay=false"
        )
    if engine.ulysses_sequence_parallel_size > 1:
        check_sequence_parallel(module, engine.ulysses_sequence_parallel_size, engine.tensor_parallel_size)
    if engine.tensor_parallel_size > 1:
        sharded_layers(module, engine.tensor_parallel_size)
    if engine.expert_parallel_size > 1:
        from verl.engines.expert_parallel import supported_experts

        supported_experts(module, engine.expert_parallel_size)
    if model.use_remove_padding and (reason := padding_reason(module)):
        log_padding(type(module).__name__, reason)


def check_sequence_parallel(module: nn.Module, size: int, tensor_size: int) -> None:
    """Raise ValueError for a model whose rows are padded, or whose heads `size` ranks cannot share."""
    if reason := padding_reason(module):
        raise ValueError(
            f"sequence parallelism splits packed sequences, and those of {type(module).__name__} are padded: {reason}. "
            "Set ulysses_sequence_parallel_size=1"
        )
    check_heads(module.config.get_text_config().num_attention_heads // tensor_size, size)


@functools.cache  # several engines of a process have one model
def log_padding(name: str, reason: str) -> None:
    """Log once why the rows of a model are padded. name: its class."""
    logger.info("%s: rows are padded instead of packed, and each computes its prompt: %s", name, reason)


def _recipe(spec: ModelSpec) -> tuple[Any, Any, dict[str, Any]]:
    """The Auto class, the HuggingFace config and the arguments to build the model."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    section, hf = spec.section, copy.deepcopy(spec.hf_config)
    has_images = vision.is_vision_config(hf) and type(hf) in AutoModelForImageTextToText._model_mapping
    auto = {
        "causal_lm": AutoModelForImageTextToText if has_images else AutoModelForCausalLM,
        "value": AutoModelForImageTextToText if has_images else AutoModelForTokenClassification,
        "reward": AutoModelForSequenceClassification,
    }[spec.kind]
    _check_architecture(auto, hf, section)
    if has_images:
        _check_vision(spec, hf)
    for config in (hf, *vision.sub_configs(hf).values()):
        for name in config.to_dict():
            if ("dropout" in name or name in _DROPOUT) and name not in section.override_config:
                value = getattr(config, name)
                setattr(config, name, 0 if type(value) is int else 0.0)
    if spec.kind == "value" or spec.new_head:
        hf.num_labels = 1
    if spec.kind == "reward" and hf.num_labels != 1:
        raise ValueError(
            f"expected a reward model, a sequence classifier with one label, at {section.path!r}, found "
            f"{hf.architectures} with {hf.num_labels} labels"
        )
    return auto, hf, {"trust_remote_code": section.trust_remote_code}


def _check_vision(spec: ModelSpec, hf: Any) -> None:
    """Raise ValueError for settings that a vision-language model does not support."""
    if spec.kernels in ("batch_invariant", "liger"):
        key = "rollout.deterministic" if spec.kernels == "batch_invariant" else "model.use_liger"
        raise ValueError(f"{key} is not supported for vision-language models ({hf.model_type}): set it to false")
    vision.position_axes(hf)


def _check_architecture(auto: Any, hf: Any, section: schema.ModelConfig) -> None:
    """Raise ValueError if transformers has no model of this kind for the config."""
    has_own_code = auto.__name__ in (hf.to_dict().get("auto_map") or {})
    if (has_own_code and section.trust_remote_code) or type(hf) in auto._model_mapping:
        return
    if has_own_code:
        raise ValueError(needs_trust(section.path))
    if {"vision_config", "audio_config"} & set(type(hf).sub_configs):
        raise ValueError(
            f"{section.path}: {type(hf).__name__} is a multimodal model that transformers does not offer as "
            f"{auto.__name__}: use a text model, or a vision-language model"
        )
    raise ValueError(f"{section.path}: {type(hf).__name__} has no {auto.__name__.removeprefix('AutoModelFor')} model")


def _from_pretrained(auto: Any, spec: ModelSpec, hf: Any, build: dict[str, Any]) -> nn.Module:
    """Load the model from its files. The head of a value model may be missing, or of a reward model to train."""
    path = spec.section.path
    has_images = vision.is_vision_config(hf)
    prefixes = ("lm_head.",) if has_images else tuple(f"{name}." for name in VALUE_HEADS)
    new_prefix = prefixes if spec.kind == "value" or spec.new_head else None
    module, new_head = load_pretrained(auto, path, hf, spec.model_dtype, new_prefix, **build)
    if has_images and spec.kind == "value":
        module = _with_head(module, spec)
        new_head = set() if load_value_head(module.score, path) else {"score.weight", "score.bias"}
    if new_head:
        # values start at 0 rather than at noise, so the first advantages are the returns themselves
        logger.info("%s has no head for values: initializing it with zeros", path)
        for name in new_head:
            nn.init.zeros_(module.get_parameter(name))
    return module


def _with_head(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """The module, with a value head if a vision-language model, which transformers has none for, is a value model."""
    return add_value_head(module) if spec.kind == "value" and vision.is_vision_config(module.config) else module


def add_value_head(module: nn.Module) -> nn.Module:
    """Replace the language-model head by `score`, hidden size -> 1, initialized with zeros, in place.

    Args:
        module: a vision-language model of transformers.
    """
    cls = type(module)
    head = module.get_output_embeddings().weight
    with head.device:
        score = nn.Linear(module.config.get_text_config().hidden_size, 1, dtype=head.dtype)
    nn.init.zeros_(score.weight)
    nn.init.zeros_(score.bias)
    del module.lm_head
    module.score = score
    module.config.tie_word_embeddings = False
    # the methods of transformers that look for the head find none
    members = {
        "_tied_weights_keys": {},
        "get_output_embeddings": lambda self: None,
        "can_generate": lambda self: False,
    }
    module.__class__ = type(cls.__name__, (cls,), members)
    module.all_tied_weights_keys = {}
    return module


@torch.no_grad()
def load_value_head(score: nn.Linear, path: str) -> bool:
    """Load the head from a folder that `save_pretrained` of a value model wrote.

    Returns:
        Whether the files have one.
    """
    folder = expanded(path)
    files = SafetensorsFiles(folder) if has_weights(folder) else None
    if files is None or not {"score.weight", "score.bias"} <= set(files.names()):
        return False
    score.weight.copy_(files.read("score.weight"))
    score.bias.copy_(files.read("score.bias"))
    return True


@torch.no_grad()
def checked(module: nn.Module, spec: ModelSpec) -> nn.Module:
    """Check that rows in one forward pass get the logits that each row gets alone. Returns the module.

    If they do not get them packed, they are padded (`attention.is_packed`).

    Raises:
        ValueError: nor do they if they are padded, so log-probs would silently be wrong.
    """
    if spec.kind == "reward" and "score" not in dict(module.named_children()):
        raise ValueError(
            f"{type(module).__name__} is not a decoder with a head called `score`: it is not supported as a reward "
            "model"
        )
    if spec.kind == "value":
        return module
    model, is_policy = TokenModel(module, spec), spec.kind == "causal_lm"
    lengths, vocab_size, device = (5, 6), model.vocab_size, module.device
    ids = torch.tensor([[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 8]]) % vocab_size
    if (pad_id := getattr(module.config.get_text_config(), "pad_token_id", None)) is not None:
        ids[ids == pad_id] = (pad_id + 9) % vocab_size  # a classifier reads the last token that is no padding
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    columns = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 3:]}
    columns["position_ids"] = torch.arange(6).expand(2, 6)
    packs = attention.is_packed(module)
    model_input = build_input(columns, packs, packs and is_policy).to(device)
    implementation = vision.attention_of(module.config)
    try:
        hidden = model.hidden_states(model_input).flatten(0, 1)
    except attention.NoPacking:  # a layer does not pass it on
        attention.use_default_attention(module)
        return checked(module, spec)
    # a classifier returns the logits of the last token of a row
    computed = model.head(hidden[model_input.states] if is_policy else hidden[model_input.states[[1, 4]] + 1])
    module.set_attn_implementation("eager")  # other implementations ignore arguments, such as a softcap
    alone = [module(row[None, :n].to(device), use_cache=False).logits[0] for row, n in zip(ids, lengths)]
    expected = torch.cat([logits[2:-1] for logits in alone] if is_policy else [logits[None] for logits in alone])
    difference, scale = (computed - expected).abs().max().item(), expected.abs().max().item()
    # 16 bits: two kernels round differently
    if difference <= (1e-3 if module.dtype.itemsize > 2 else 0.1) * scale + 1e-4:
        module.set_attn_implementation(implementation)
        return module
    if packs:
        attention.use_default_attention(module)
    if packs or "sdpa" in implementation.values():
        return checked(module, spec)  # padded, or padded with the implementation that is set now
    raise ValueError(
        f"{type(module).__name__}: padded rows get other logits than each row alone (by {difference:.2g}), so their "
        "log-probs would be wrong: it is not causal, or it reads the padding. It is not supported"
    )


class TokenModel(nn.Module):
    """A HuggingFace model whose forward pass returns the inputs of losses, at response tokens only.

    It is the single entry point for everything that wraps a forward pass: sharding, compilation, autocast.
    """

    def __init__(self, module: nn.Module, spec: ModelSpec):
        super().__init__()
        self.module = module
        self.kind = spec.kind
        self.autocast_to = spec.autocast_to
        trunk = trunk_of(module)
        self.head = LMHead(module) if spec.kind == "causal_lm" else module.get_submodule(value_head(module))
        # a function: as an attribute, the trunk would be a second child with the same parameters
        self.get_trunk: Callable[[], nn.Module] = lambda: trunk
        self.vocab_size = module.config.get_text_config().vocab_size
        self.vision = VisionForward(module) if vision.is_vision_config(module.config) else None
        self.batch_invariant = spec.kernels == "batch_invariant"
        self.routing = install_routing(module)
        if self.batch_invariant and (self.routing is not None or not attention.is_packed(module)):
            reason = "pads its rows" if self.routing is None else "is a mixture of experts"
            raise ValueError(
                f"rollout.deterministic=true: {type(module).__name__} {reason}, for which there are no batch-invariant "
                "kernels: use false"
            )

    def forward(self, model_input: ModelInput, outputs: tuple[str, ...], temperature: float) -> Tensors:
        """Each requested output, (b, T) or (b, T, K), float32 (float64 for a float64 model), 0 outside the response.

        With a filter as `ModelInput.kept`, also the columns of `pack_kept`.
        """
        with torch.autocast(model_input.input_ids.device.type, self.autocast_to, enabled=self.autocast_to is not None):
            hidden = self.hidden_states(model_input)
            states = hidden.flatten(0, 1)[model_input.states]
            if self.kind != "causal_lm":
                if set(outputs) != {"values"}:
                    unknown = sorted(set(outputs) - {"values"})
                    raise ValueError(f"a critic or reward model outputs values, not {unknown}")
                values_by_name = {"values": self.head(states)[:, 0]}
            else:
                read = states, model_input.targets, self.head, self.vocab_size, outputs, temperature
                tokens = {"candidates": model_input.candidates, "kept": model_input.kept}
                values_by_name = token_statistics(*read, batch_invariant=self.batch_invariant, **tokens)
        return model_input.outputs(values_by_name)

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        """Last hidden states (1, N, H) or (b, L, H)."""
        if self.routing is not None:
            self.routing.start(model_input.routed_experts)
        extra = {} if model_input.packing is None else {"packing": model_input.packing}
        if self.vision is not None:
            return self.vision(model_input, extra)
        # padded rows begin in the first column, and no layer of a causal model looks ahead: without a mask and
        # positions, the model computes each row as if it were alone
        if extra:
            extra["position_ids"] = model_input.position_ids
        return self.get_trunk()(input_ids=model_input.input_ids, use_cache=False, **extra)[0]
