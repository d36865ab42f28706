"""LoRA with peft (Hu et al. 2021, arXiv 2106.09685): low-rank adapters are added to a module and only they are trained.

The output of an adapted layer is W x + scale * B A x with scale = alpha / rank. Other modules see an ordinary model:
`merged` returns W + scale * B A under HuggingFace names. The reference policy is the same module with its
adapters disabled (or set to the initial ones), so it needs no second copy.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.config import schema
from verl.engines.checkpoint import copy_into
from verl.modeling.moe import expert_modules
from verl.modeling.vision import is_vision_config, outside_language_model
from verl.registry import did_you_mean
from verl.utils.paths import read_json

#: peft's name of the trained adapter, and of the one that training started from, if it was given
TRAINED, START = "default", "start"
#: prefix of a module's parameter names in peft's files
_PREFIX = "base_model.model."
_SEED = 0  # seed of A of new adapters, so that it is the same in every run and on every rank


def add_adapters(module: nn.Module, model: schema.ModelConfig) -> nn.Module:
    """Add adapters to a causal language model or a value model, in place, and set requires_grad.

    New adapters do not change the outputs (B is 0).

    Args:
        model: the `model` section: its lora_* keys, or the adapter to start from.

    Raises:
        ValueError: adapters that match no module, or of a type that cannot be merged.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ImportError("LoRA (model.lora_rank, model.lora_adapter_path) needs peft: pip install peft") from error
    settings = _peft_config(module, model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft warns about two adapters, which are intended
        torch.manual_seed(_SEED)
        for adapter in (TRAINED, START) if model.lora_adapter_path is not None else (TRAINED,):
            inject_adapter_in_model(settings, module, adapter)
    _check_layers(module)
    adapters = Adapters(module)
    adapters.switch(on=True)
    for parameter in module.parameters():
        if parameter.requires_grad:  # small updates are lost in 16 bits
            parameter.data = parameter.data.to(torch.promote_types(module.dtype, torch.float32))
    if model.lora_adapter_path is not None and module.device.type != "meta":
        for adapter in (TRAINED, START):
            adapters.load(Path(model.lora_adapter_path), adapter)
    return module


def _peft_config(module: nn.Module, model: schema.ModelConfig):
    """PEFT configuration: that of the adapter to start from, or one built from the section."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftConfig

    head = ["score"] if not module.can_generate() else []  # a value head is trained in full
    if model.lora_adapter_path is None:
        _check_names(module, model)
        targets = _targets(module, model)
        excluded = list(model.exclude_modules or ())
        if model.exclude_modules is None and is_vision_config(module.config):
            excluded = outside_language_model(module)
        alpha = model.lora_alpha
        return PeftLoraConfig(
            r=model.lora_rank,
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            exclude_modules=[*excluded, *head] or None,
            base_model_name_or_path=model.path,
            task_type="TOKEN_CLS" if head else "CAUSAL_LM",
        )
    path = model.lora_adapter_path
    settings = PeftConfig.from_pretrained(path)
    if settings.peft_type != "LORA":
        raise ValueError(f"{path} contains {settings.peft_type} adapters, expected LORA")
    if model.lora_rank and (model.lora_rank, model.lora_alpha) != (settings.r, settings.lora_alpha):
        raise ValueError(
            f"lora_rank {model.lora_rank} and lora_alpha {model.lora_alpha:g} differ from those of {path}, "
            f"{settings.r} and {settings.lora_alpha:g}: set lora_rank=0, since the adapter defines both"
        )
    unsupported = {
        k: v for k, v in (("use_dora", settings.use_dora), ("bias", settings.bias)) if v not in (False, "none")
    }
    full = [name for name in settings.modules_to_save or () if name not in head]
    if unsupported or full:
        raise ValueError(f"{path}: training with {unsupported or f'modules_to_save {full}'} is not supported")
    settings.modules_to_save, settings.inference_mode, settings.lora_dropout = None, False, 0.0
    settings.base_model_name_or_path = model.path  # the base model may have moved since the adapter was trained
    return settings


def _targets(module: nn.Module, model: schema.ModelConfig) -> list[str]:
    """Names of the layers that get adapters. Experts and routers are not linear layers and stay frozen."""
    targets = list(model.target_modules)
    if targets != ["all-linear"] or not expert_modules(module):
        return targets
    head = module.get_output_embeddings() if module.can_generate() else None
    names = (name for name, layer in module.named_modules() if type(layer) is nn.Linear and layer is not head)
    return sorted({name.rpartition(".")[2] for name in names})


def _check_names(module: nn.Module, model: schema.ModelConfig) -> None:
    """Raise ValueError for a name that matches no module."""
    layers = dict(module.named_modules())
    for key, suffixes in (("target_modules", model.target_modules), ("exclude_modules", model.exclude_modules or ())):
        for suffix in suffixes:
            if suffix != "all-linear" and not any(f".{name}".endswith(f".{suffix}") for name in layers):
                linear_names = {
                    name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, nn.Linear)
                }
                raise ValueError(
                    f"model.{key}: no linear layer is called {suffix!r}: {did_you_mean(suffix, linear_names)}"
                )


def _check_layers(module: nn.Module) -> None:
    """Raise ValueError for adapters on anything but a linear layer with an untied weight."""
    from peft.tuners.lora import Linear

    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, layer in _layers(module).items():
        if not isinstance(layer, Linear):
            raise ValueError(f"target_modules: {name} is a {type(layer.get_base_layer()).__name__}, expected Linear")
        tied = names[id(layer.get_base_layer().weight)]
        if len(tied) > 1:
            raise ValueError(f"target_modules: the weight of {name} is shared ({tied}); exclude it")


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


class Adapters:
    """The adapters of a module, whose parameters may be sharded."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.settings = module.peft_config[TRAINED]
        self._layers = _layers(module)
        self._value_model = not module.can_generate()

    def describe(self) -> str:
        """Rank, layers and the number of trained parameters, for the log."""
        trained = sum(parameter.numel() for _, parameter in self.parameters())
        total = sum(parameter.numel() for parameter in self.module.parameters())
        return f"rank {self.settings.r} on {len(self._layers)} layers; {trained:,} of {total:,} parameters are trained"

    def parameters(self, adapter: str = TRAINED) -> Iterator[tuple[str, nn.Parameter]]:
        """(PEFT name, parameter) of one adapter and of a value head."""
        for name, parameter in self.module.named_parameters():
            module, _, last = name.rpartition(f".{adapter}.")
            if module.endswith((".lora_A", ".lora_B")):
                yield f"{_PREFIX}{module}.{last}", parameter
            elif self._value_model and name.startswith("score."):
                yield _PREFIX + name, parameter

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, parameter) with the adapters merged; as sharded as the module."""
        for name, layer, value in self._without_adapters():
            if layer is not None:
                value = (value + layer.get_delta_weight(TRAINED).detach()).to(value.dtype)
            yield name, value

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, parameter) without the adapters; as sharded as the module."""
        for name, _, value in self._without_adapters():
            yield name, value

    def _without_adapters(self) -> Iterator[tuple[str, nn.Module | None, torch.Tensor]]:
        """Yield (HuggingFace name, its adapted layer or None, parameter) of all parameters but the adapters."""
        for name, parameter in self.module.named_parameters():
            layer_name, inside, last = name.rpartition(".base_layer.")
            if ".lora_" in name:
                continue
            layer = self._layers[layer_name] if inside and last == "weight" else None
            yield f"{layer_name}.{last}" if inside else name, layer, parameter.detach()

    def config(self) -> dict[str, Any]:
        """The configuration in PEFT format, and `scaling`: name of each layer -> factor of B A."""
        settings = {key: sorted(v) if isinstance(v, set) else v for key, v in self.settings.to_dict().items()}
        return settings | {"scaling": {name: layer.scaling[TRAINED] for name, layer in self._layers.items()}}

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Context in which the module uses the initial weights."""
        self.switch(on=False)
        try:
            yield
        finally:
            self.switch(on=True)

    def switch(self, on: bool) -> None:
        """Use the trained adapters, or the initial ones, if any."""
        for layer in self._layers.values():
            if START in self.module.peft_config:
                layer.set_adapter([TRAINED if on else START])
            else:
                layer.enable_adapters(on)
        self.module.requires_grad_(False)  # peft freezes disabled adapters; FSDP must always see the same as trained
        for _, parameter in self.parameters():
            parameter.requires_grad_(True)

    # ---- peft's files ---------------------------------------------------------------------------------------------

    def save(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Write the full tensors of `parameters`, in host memory, as a folder in PEFT format."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.settings.save_pretrained(folder)
        path = folder / "adapter_config.json"
        # peft writes sets, whose order differs between processes
        ordered = {key: sorted(v) for key, v in self.settings.to_dict().items() if isinstance(v, set)}
        if self._value_model:  # tells peft that the head in the file replaces the model's
            ordered["modules_to_save"] = ["score"]
        text = json.dumps(read_json(path) | ordered, indent=2)
        path.write_text(text, encoding="utf-8")

    @torch.no_grad()
    def load(self, folder: Path, adapter: str = TRAINED) -> None:
        """Load the adapters from a folder in PEFT format. Raises ValueError if they do not match."""
        from safetensors.torch import load_file

        path, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
        if not path.is_file() or not config.is_file():
            raise ValueError(f"{folder} contains no adapters: expected {path.name} and {config.name}")
        saved, saved_config = load_file(path), read_json(config)
        if (saved_config["r"], saved_config["lora_alpha"]) != (self.settings.r, self.settings.lora_alpha):
            raise ValueError(
                f"{folder} contains adapters of rank {saved_config['r']} and alpha {saved_config['lora_alpha']}, "
                f"expected {self.settings.r} and {self.settings.lora_alpha}"
            )
        parameters = dict(self.parameters(adapter))
        differing = [n for n in parameters.keys() & saved.keys() if parameters[n].shape != saved[n].shape]
        if saved.keys() != parameters.keys() or differing:
            raise ValueError(
                f"the adapters in {folder} do not match the model: missing "
                f"{sorted(parameters.keys() - saved.keys())[:3]}, unknown "
                f"{sorted(saved.keys() - parameters.keys())[:3]}, mismatched {differing[:3]}"
            )
        for name, parameter in parameters.items():
            copy_into(parameter, saved[name])
