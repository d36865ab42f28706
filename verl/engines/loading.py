"""The model that an engine trains: loaded whole or refused, and one forward pass from token ids to outputs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from verl.engines.base import Tensors
from verl.engines.lora import LoraConfig, add_adapters
from verl.modeling import attention
from verl.modeling.batch_invariant import model
from verl.modeling.layers import Kernels
from verl.modeling.log_probs import token_statistics
from verl.modeling.packing import ModelInput
from verl.registry import did_you_mean

logger = logging.getLogger("verl.engines")


@dataclass(frozen=True)
class ModelConfig:
    """Where a model comes from and how it computes.

    path: HuggingFace id or folder. kind: "causal_lm" (policy, reference), "value" (critic: one number per token) or
    "reward" (the same numbers, of a sequence classifier that is complete).
    model_dtype: dtype of the parameters. compute_dtype: dtype of the forward pass (autocast when it differs).
    gradient_checkpointing: compute activations again in the backward pass; "auto": where memory asks for it (`memory`).
    override_config: values set in the HuggingFace config. use_remove_padding: packed rows.
    random_init: weights from the config and the seed, nothing loaded (tests, benchmarks).
    lora: adapters to train in place of the weights. kernels: how norms, MLPs and rotary embeddings run (`layers`).
    """

    path: str
    kind: str = "causal_lm"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool | Literal["auto"] = False
    use_remove_padding: bool = True
    trust_remote_code: bool = False
    override_config: tuple[tuple[str, Any], ...] = ()
    random_init: bool = False
    lora: LoraConfig | None = None
    kernels: Kernels = "plain"


def load_module(config: ModelConfig) -> nn.Module:
    """The model of `config`, dropout off. Raises ValueError that names the path when it cannot be loaded."""
    auto, hf, build = _recipe(config)
    if config.random_init:
        with config.device:
            module = auto.from_config(hf, dtype=config.model_dtype, **build)
    else:
        module = _from_pretrained(auto, config, hf, build)
    module = module.to(config.device)
    return module if config.lora is None else add_adapters(module, config.lora, config.path)


def empty_module(config: ModelConfig) -> nn.Module:
    """The model of `config` without memory behind its parameters and buffers (device "meta")."""
    auto, hf, build = _recipe(config)
    with torch.device("meta"):
        module = auto.from_config(hf, dtype=config.model_dtype, **build)
        return module if config.lora is None else add_adapters(module, config.lora, config.path)


def check_model(config: ModelConfig) -> None:
    """Raise ValueError for a model that cannot be built as asked; of its files, the config alone is read."""
    _recipe(config)
    if config.lora is not None:
        empty_module(config)


def _recipe(config: ModelConfig) -> tuple[Any, Any, dict[str, Any]]:
    """The Auto class, the HuggingFace config and the arguments that `config` is built with."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    auto = {
        "causal_lm": AutoModelForCausalLM,
        "value": AutoModelForTokenClassification,
        "reward": AutoModelForSequenceClassification,
    }[config.kind]
    try:
        hf = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except OSError as error:
        raise ValueError(f"no HuggingFace model at {config.path!r}: {error}") from error
    # dropout would make the log-probs of one and the same weights differ from pass to pass
    off = {k: 0.0 for k in hf.to_dict() if "dropout" in k or k in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    known = hf.to_dict()
    for name in dict(config.override_config):
        if name not in known:
            raise ValueError(f"override_config: the model's configuration has no {name!r}: {did_you_mean(name, known)}")
    for name, value in {**off, **dict(config.override_config)}.items():
        setattr(hf, name, value)
    if config.kind == "value":
        hf.num_labels = 1
    if config.kind == "reward" and hf.num_labels != 1:
        raise ValueError(
            f"expected a reward model, a sequence classifier with one label, at {config.path!r}, found "
            f"{hf.architectures} with {hf.num_labels} labels"
        )
    build: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.use_remove_padding:
        build["attn_implementation"] = model.NAME if config.kernels == "invariant" else attention.NAME
    return auto, hf, build


def _from_pretrained(auto: Any, config: ModelConfig, hf: Any, build: dict[str, Any]) -> nn.Module:
    """Load weights, and refuse a checkpoint that leaves some of them random."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # its table of missing keys is answered below
    try:
        module, report = auto.from_pretrained(
            config.path, config=hf, dtype=config.model_dtype, output_loading_info=True, **build
        )
    finally:
        hf_logging.set_verbosity(verbosity)
    missing = set(report["missing_keys"])
    new_head = {name for name in missing if name.startswith("score.")} if config.kind == "value" else set()
    if missing - new_head or report["mismatched_keys"]:
        raise ValueError(
            f"{config.path!r} lacks weights of {type(module).__name__}, which would stay random: "
            f"missing {sorted(missing - new_head)[:5]}, of other shape {list(report['mismatched_keys'])[:5]}"
        )
    if new_head:
        # values start at 0, not at noise: the first advantages are then the returns themselves
        logger.info("%s has no value head: a new one starts at 0", config.path)
        for name in new_head:
            nn.init.zeros_(module.get_parameter(name))
    return module


def trunk_and_head(module: nn.Module, kind: str) -> tuple[nn.Module, Callable]:
    """The decoder that gives hidden states, and the function from them to logits or values."""
    trunk = module.base_model
    if kind != "causal_lm":
        return trunk, module.score
    projection = module.get_output_embeddings()
    softcap = module.config.to_dict().get("final_logit_softcapping")

    def head(states: torch.Tensor) -> torch.Tensor:
        logits = projection(states)
        return softcap * torch.tanh(logits / softcap) if softcap is not None else logits

    return trunk, head


def load_checked(config: ModelConfig) -> nn.Module:
    """`load_module`, and `checked`."""
    return checked(load_module(config), config.kind)


@torch.no_grad()
def checked(module: nn.Module, kind: str) -> nn.Module:
    """The module, if the logits of `trunk_and_head` are its own.

    Raises ValueError for an architecture whose logits are not its last projection of the hidden states (and, where the
    config says so, their soft-capping): log-probs computed here would silently be others than the model's.
    """
    if kind == "value":
        return module
    if kind == "reward" and "score" not in dict(module.named_children()):
        raise ValueError(
            f"{type(module).__name__} is no decoder with a head called `score`: it cannot be a reward model"
        )
    trunk, head = trunk_and_head(module, kind)
    ids = torch.arange(min(4, module.config.vocab_size), device=module.device)[None]
    implementation = module.config._attn_implementation
    module.set_attn_implementation("eager")
    expected, ours = module(ids).logits, head(trunk(ids).last_hidden_state)
    module.set_attn_implementation(implementation)
    if kind == "reward":  # a classifier gives the logits of the last token
        ours = ours[:, -1]
    if not torch.allclose(expected.float(), ours.float(), rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"{type(module).__name__} changes its logits after the last projection in a way this engine does not know; "
            "its log-probs or scores would be wrong here"
        )
    return module


class TokenModel(nn.Module):
    """A HuggingFace model whose forward pass gives what objectives read, at the response tokens only.

    One entry point for everything that wraps a forward pass: sharding, compilation, autocast.
    """

    def __init__(self, module: nn.Module, config: ModelConfig):
        super().__init__()
        self.module = module
        self.kind = config.kind
        self.autocast_to = None if config.compute_dtype == config.model_dtype else config.compute_dtype
        trunk, self.head = trunk_and_head(module, config.kind)
        self.trunk_of: Callable[[], nn.Module] = lambda: trunk  # not a second child of the same modules
        self.vocab_size = module.config.vocab_size
        self.invariant = config.kernels == "invariant"

    def forward(self, model_input: ModelInput, outputs: tuple[str, ...], temperature: float) -> Tensors:
        """Each asked output, (b, T), float32 (float64 for a float64 model), 0 outside the response."""
        extra = {"packing": model_input.packing} if model_input.packing is not None else {}
        with torch.autocast(model_input.input_ids.device.type, self.autocast_to, enabled=self.autocast_to is not None):
            hidden = self.trunk_of()(
                input_ids=model_input.input_ids,
                attention_mask=model_input.attention_mask,
                position_ids=model_input.position_ids,
                use_cache=False,
                **extra,
            ).last_hidden_state
            states = hidden.flatten(0, 1)[model_input.states]
            if self.kind != "causal_lm":
                if set(outputs) != {"values"}:
                    raise ValueError(f"a critic or reward model gives values, not {sorted(set(outputs) - {'values'})}")
                found = {"values": self.head(states)[:, 0]}
            else:
                found = token_statistics(
                    states, model_input.targets, self.head, self.vocab_size, outputs, temperature, self.invariant
                )
        scattered = {
            name: model_input.scatter(values if values.dtype == torch.float64 else values.float())
            for name, values in found.items()
        }
        ranks = model_input.packing.ranks if model_input.packing is not None else None
        return scattered if ranks is None else {k: ranks.sum_of_shares(v) for k, v in scattered.items()}
