"""LoRA by peft (Hu et al. 2021, arXiv 2106.09685): a module gets low-rank adapters, and these alone are trained.

W x + scale * B A x, where scale is alpha / rank. The rest of the project sees a model as always: `weights` gives the
merged W + scale * B A under HuggingFace names, and the model that training started from is the same module with its
adapters switched off (or set to those it started with), so that a reference costs no second copy.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from verl.engines.checkpoint import copy_into
from verl.engines.distributed import full_tensor
from verl.registry import did_you_mean

#: peft's names of the adapter that is trained, and of the one that training started from where it was given
TRAINED, START = "default", "start"
#: what peft puts before a module's own names in its files
_PREFIX = "base_model.model."
_SEED = 0  # of the random half of new adapters: the same in every run and on every rank


@dataclass(frozen=True)
class LoraConfig:
    """Which adapters a model gets.

    rank, alpha: their size, and the strength alpha / rank. target_modules: ends of module names, or ("all-linear",) for
    every linear layer but the output; exclude_modules: names kept out. adapter_path: peft's folder of adapters to start
    from, which brings all of these itself.
    """

    rank: int = 0
    alpha: float = 16
    target_modules: tuple[str, ...] = ("all-linear",)
    exclude_modules: tuple[str, ...] = ()
    adapter_path: str | None = None


def add_adapters(module: nn.Module, config: LoraConfig, base: str) -> nn.Module:
    """Put adapters into a causal language model or a value model, in place; what is trained has requires_grad.

    New ones change nothing yet (B is 0). base: where the weights under them come from, for the record. Raises
    ValueError for adapters that fit no module, or of a kind that cannot be merged.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ImportError("LoRA (model.lora_rank, model.lora_adapter_path) needs peft: pip install peft") from error
    settings = _settings(module, config, base)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of peft: on two adapters, which are meant, and on what follows
        torch.manual_seed(_SEED)
        for adapter in (TRAINED, START) if config.adapter_path is not None else (TRAINED,):
            inject_adapter_in_model(settings, module, adapter)
    _check_layers(module)
    adapters = Adapters(module)
    adapters.switch(on=True)
    for parameter in module.parameters():
        if parameter.requires_grad:  # small steps of what is trained are lost in 16 bits
            parameter.data = parameter.data.to(torch.promote_types(module.dtype, torch.float32))
    if config.adapter_path is not None and module.device.type != "meta":
        for adapter in (TRAINED, START):
            adapters.load(Path(config.adapter_path), adapter)
    return module


def _settings(module: nn.Module, config: LoraConfig, base: str):
    """peft's configuration: that of the adapter to start from, or one made from ours."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftConfig

    head = ["score"] if not module.can_generate() else []  # a value head is trained whole
    if config.adapter_path is None:
        _check_names(module, config)
        targets = list(config.target_modules)
        return PeftLoraConfig(
            r=config.rank,
            lora_alpha=int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            exclude_modules=[*config.exclude_modules, *head] or None,
            base_model_name_or_path=base,
            task_type="TOKEN_CLS" if head else "CAUSAL_LM",
        )
    settings = PeftConfig.from_pretrained(config.adapter_path)
    if settings.peft_type != "LORA":
        raise ValueError(f"{config.adapter_path} holds {settings.peft_type} adapters, expected LORA")
    ours, theirs = (config.rank, config.alpha), (settings.r, settings.lora_alpha)
    if config.rank and ours != theirs:
        raise ValueError(
            f"lora_rank and lora_alpha are {ours}, those of {config.adapter_path} {theirs}: leave lora_rank at 0, the "
            "adapter brings its own"
        )
    unknown = {k: v for k, v in (("use_dora", settings.use_dora), ("bias", settings.bias)) if v not in (False, "none")}
    whole = [name for name in settings.modules_to_save or () if name not in head]
    if unknown or whole:
        raise ValueError(f"{config.adapter_path}: cannot go on with {unknown or f'modules_to_save {whole}'}")
    settings.modules_to_save, settings.inference_mode, settings.lora_dropout = None, False, 0.0
    settings.base_model_name_or_path = base  # which may lie elsewhere than where the adapter was trained first
    return settings


def _check_names(module: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError for a name that no module ends in: it would choose, or leave out, nothing."""
    layers = dict(module.named_modules())
    for key, ends in (("target_modules", config.target_modules), ("exclude_modules", config.exclude_modules)):
        for end in ends:
            if end != "all-linear" and not any(f".{name}".endswith(f".{end}") for name in layers):
                known = {name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, nn.Linear)}
                raise ValueError(f"model.{key}: no linear layer is called {end!r}: {did_you_mean(end, known)}")


def _check_layers(module: nn.Module) -> None:
    """Raise ValueError for adapters on anything but a linear layer with a weight of its own."""
    from peft.tuners.lora import Linear

    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, layer in _layers(module).items():
        if not isinstance(layer, Linear):
            raise ValueError(f"target_modules: {name} is a {type(layer.get_base_layer()).__name__}, expected Linear")
        shared = names[id(layer.get_base_layer().weight)]
        if len(shared) > 1:
            raise ValueError(f"target_modules: the weight of {name} is shared ({shared}); leave it out")


def merge_adapters(module: nn.Module) -> nn.Module:
    """The module with its adapters merged into the weights under them, and gone; in place."""
    for name, layer in _layers(module).items():
        layer.merge(adapter_names=[TRAINED])
        module.set_submodule(name, layer.get_base_layer())
    return module.requires_grad_(False)


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


class Adapters:
    """The adapters in a module, whether its parameters are whole or sharded."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.settings = module.peft_config[TRAINED]
        self._layers = _layers(module)
        self._value_model = not module.can_generate()

    def describe(self) -> str:
        """How much of the model is trained, in words."""
        trained = sum(parameter.numel() for _, parameter in self.parameters())
        total = sum(parameter.numel() for parameter in self.module.parameters())
        return f"rank {self.settings.r} on {len(self._layers)} layers; {trained:,} of {total:,} parameters are trained"

    def parameters(self, adapter: str = TRAINED) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in peft's files, parameter) of one adapter, and of a value head."""
        for name, parameter in self.module.named_parameters():
            module, _, last = name.rpartition(f".{adapter}.")
            if module.endswith((".lora_A", ".lora_B")):
                yield f"{_PREFIX}{module}.{last}", parameter
            elif self._value_model and name.startswith("score."):
                yield _PREFIX + name, parameter

    def mark_trained(self) -> None:
        """requires_grad of every parameter: whether it is trained."""
        self.module.requires_grad_(False)
        for _, parameter in self.parameters():
            parameter.requires_grad_(True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HuggingFace name, full tensor) of the model with the adapters merged into it. All ranks together."""
        for name, parameter in self.module.named_parameters():
            layer_name, inside, last = name.rpartition(".base_layer.")
            if ".lora_" in name:
                continue
            value = parameter.detach()
            if inside and last == "weight":
                change = self._layers[layer_name].get_delta_weight(TRAINED).detach()
                value = (value + change).to(value.dtype)
            yield f"{layer_name}.{last}" if inside else name, full_tensor(value)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The model that training started from: with the adapters that it had then, if any."""
        self.switch(on=False)
        try:
            yield
        finally:
            self.switch(on=True)

    def switch(self, on: bool) -> None:
        """Let the module compute with what is trained, or with what training started from."""
        for layer in self._layers.values():
            if START in self.module.peft_config:
                layer.set_adapter([TRAINED if on else START])
            else:
                layer.enable_adapters(on)
        self.mark_trained()  # peft freezes what is off; FSDP must always see the same parameters as trained

    # ---- peft's files ---------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is trained: (name in peft's files, full tensor). All ranks together."""
        for name, parameter in self.parameters():
            yield name, full_tensor(parameter.detach())

    def save(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Write what `tensors` gave, in host memory, as a folder that peft loads."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        found = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.settings.save_pretrained(folder)
        if self._value_model:  # peft must know that the head in the file takes the place of the model's
            path = folder / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": ["score"]}, indent=2))

    @torch.no_grad()
    def load(self, folder: Path, adapter: str = TRAINED) -> None:
        """Fill the adapters from such a folder. Raises ValueError when it holds others."""
        from safetensors.torch import load_file

        path, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
        if not path.is_file() or not config.is_file():
            raise ValueError(f"{folder} holds no adapters: expected {path.name} and {config.name}")
        saved, strength = load_file(path), json.loads(config.read_text())
        if (strength["r"], strength["lora_alpha"]) != (self.settings.r, self.settings.lora_alpha):
            raise ValueError(
                f"{folder} holds adapters of rank {strength['r']} and alpha {strength['lora_alpha']}, here they are "
                f"{self.settings.r} and {self.settings.lora_alpha}"
            )
        own = dict(self.parameters(adapter))
        differing = [n for n in own.keys() & saved.keys() if own[n].shape != saved[n].shape]
        if saved.keys() != own.keys() or differing:
            raise ValueError(
                f"{folder} holds other adapters than the model: missing {sorted(own.keys() - saved.keys())[:3]}, "
                f"unknown {sorted(saved.keys() - own.keys())[:3]}, of other shape {differing[:3]}"
            )
        for name, parameter in own.items():
            copy_into(parameter, saved[name])
