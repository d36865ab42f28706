"""LoRA with peft (Hu et al. 2021, arXiv 2106.09685): low-rank adapters are added to a module and only they are trained.

The output of an adapted layer is (W + scale * B A) x with scale = alpha / rank. Other modules see an ordinary model:
`merged` returns W + scale * B A under HuggingFace names. The reference policy is the same module with its
adapters disabled (or set to the initial ones), so it needs no second copy.

In 16 bits, W + scale * B A is W again where the change is less than half of the last bit of W. A rollout with merged
weights would then be another policy than W x + scale * B A x, by more with every update. So training computes with the
same rounded sum (`_MergedLinear`), as training of all weights computes with rounded master weights.
"""

import functools
import inspect
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.config import schema
from verl.engines.checkpoint import copy_into
from verl.engines.quantization import QUANTIZED, dequantized, is_quantized
from verl.modeling.huggingface import value_head
from verl.modeling.linear import compute_dtype
from verl.modeling.vision import is_vision_config, outside_language_model
from verl.registry import did_you_mean
from verl.utils.paths import read_json

#: peft's name of the trained adapter, and of the one that training started from, if it was given
TRAINED, START = "default", "start"
#: prefix of a module's parameter names in peft's files
_PREFIX = "base_model.model."
#: in target_modules: every linear layer that an adapter can change; in target_parameters: all experts
ALL_LINEAR, ALL_EXPERTS = "all-linear", "all-experts"
#: the weight of a layer as a tensor. Bloom reads rows of it to emulate the rounding of its training
_WEIGHT_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|data)\b|\[)")
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
    # without the config of a model, peft uses the targets as they are: for model types in its tables it would replace
    # layers called gate_proj by the fused experts
    children = nn.ModuleDict(dict(module.named_children()))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft warns about two adapters, which are intended
        torch.manual_seed(_SEED)
        for adapter in (TRAINED, START) if model.lora_adapter_path is not None else (TRAINED,):
            inject_adapter_in_model(settings, children, adapter)
    for name, child in children.items():
        setattr(module, name, child)
    module.peft_config = children.peft_config
    _check_layers(module)
    for layer in _layers(module).values():
        if not _is_of_experts(layer):
            layer.__class__ = _merging(type(layer))
    adapters = Adapters(module)
    adapters.switch(on=True)
    for parameter in module.parameters():
        if parameter.requires_grad:  # small updates are lost in 16 bits
            parameter.data = parameter.data.to(torch.promote_types(module.dtype, torch.float32))
    if model.lora_adapter_path is not None and module.device.type != "meta":
        for adapter in (TRAINED, START):
            adapters.load(Path(model.lora_adapter_path), adapter)
    return module


# ---- which layers get adapters --------------------------------------------------------------------------------------


def _peft_config(module: nn.Module, model: schema.ModelConfig):
    """PEFT configuration: that of the adapter to start from, or one built from the section."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftConfig

    head = [] if module.can_generate() else [value_head(module)]  # a value head is trained in full
    if model.lora_adapter_path is None:
        _check_names(module, model)
        excluded = list(model.exclude_modules or ())
        if model.exclude_modules is None and is_vision_config(module.config):
            excluded = outside_language_model(module)
        alpha = model.lora_alpha
        return PeftLoraConfig(
            r=model.lora_rank,
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
            target_modules=_expanded(model.target_modules, ALL_LINEAR, adaptable_layers(module)),
            target_parameters=_expanded(model.target_parameters or (), ALL_EXPERTS, expert_tensors(module)) or None,
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
    linear = {f"{name}.weight": name for name, layer in module.named_modules() if is_linear(layer)}
    by_weight = linear.keys() & (settings.target_parameters or ())  # see `Adapters._peft_targets`
    if by_weight:
        settings.target_modules = sorted({*settings.target_modules, *(linear[name] for name in by_weight)})
        settings.target_parameters = [name for name in settings.target_parameters if name not in by_weight] or None
    return settings


def _expanded(names: Sequence[str], shorthand: str, selected: Iterable[str]) -> list[str]:
    """The names, with `shorthand` replaced by those that it selects."""
    return sorted({*selected, *names} - {shorthand}) if shorthand in names else list(names)


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer computes x W^T + b, unlike routers that are subclasses of `nn.Linear`."""
    from transformers.pytorch_utils import Conv1D

    return type(layer).forward in (nn.Linear.forward, Conv1D.forward)


def adaptable_layers(module: nn.Module) -> Iterator[str]:
    """Names of the linear layers that "all-linear" selects.

    All but the head, routers, layers that share their weight with another one, and layers that are not called.
    """
    head = module.get_output_embeddings() if module.can_generate() else None
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    # the module of a mixture of experts, with the router and the experts -> number of experts
    mixtures = {name.rsplit(".", 2)[0] + ".": len(experts) for name, experts in expert_tensors(module).items()}
    for owner, parent in module.named_modules():
        for last, layer in parent.named_children():
            if not is_linear(layer) or layer is head or uses[id(layer.weight)] > 1:
                continue
            name = f"{owner}.{last}" if owner else last
            routes = any(name.startswith(start) and len(layer.weight) == size for start, size in mixtures.items())
            if not routes and last not in _weights_read_by(type(parent)):
                yield name


@functools.cache
def _weights_read_by(cls: type) -> frozenset[str]:
    """Names of the layers whose weights the code of a class passes to functions, such as the kernels of Mamba, instead
    of calling the layers: an adapter would have no effect."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base.__name__ == "PreTrainedModel" or base is object:
            continue
        try:
            names.update(_WEIGHT_READ.findall(inspect.getsource(base)))
        except OSError:  # a class without source code, such as one that was made by a program
            continue
    return frozenset(names)


def expert_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> fused weights of the experts of a layer: (experts, out, in), or (experts, in, out)."""
    config = module.config.get_text_config().to_dict()
    sizes = {value for key, value in config.items() if "expert" in key and isinstance(value, int)}
    return {
        f"{owner}.{name}".replace(".base_layer", ""): parameter
        for owner, layer in module.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.ndim == 3 and min(parameter.shape) > 1 and len(parameter) in sizes
    }


def _check_names(module: nn.Module, model: schema.ModelConfig) -> None:
    """Raise ValueError for a name that matches nothing."""
    layers, experts = dict(module.named_modules()), expert_tensors(module)
    linear = {name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    if model.target_parameters and not experts:
        raise ValueError(f"model.target_parameters: {type(module).__name__} has no fused experts: remove the key")
    tensors = {".".join(name.split(".")[-2:]) for name in experts}
    for key, kind, names, near in (
        ("target_modules", "linear layer", layers, linear),
        ("exclude_modules", "linear layer", layers, linear),
        ("target_parameters", "tensor of experts", experts, tensors),
    ):
        for suffix in {*(getattr(model, key) or ())} - {ALL_LINEAR, ALL_EXPERTS}:
            if not any(f".{name}".endswith(f".{suffix}") for name in names):
                raise ValueError(f"model.{key}: no {kind} is called {suffix!r}: {did_you_mean(suffix, near)}")


def _check_layers(module: nn.Module) -> None:
    """Raise ValueError for adapters on anything but a linear layer with an untied weight, or experts."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, layer in _layers(module).items():
        base, (owner, _, last) = layer.get_base_layer(), name.rpartition(".")
        parent = type(module.get_submodule(owner))
        if _is_of_experts(layer):
            continue
        if not is_linear(base):
            raise ValueError(f"target_modules: {name} is a {type(base).__name__}, expected Linear")
        if last in _weights_read_by(parent):
            raise ValueError(
                f"target_modules: {parent.__name__} passes the weight of {name} to a kernel, so an adapter there has "
                "no effect: remove it, or use all-linear"
            )
        if len(tied := names[id(base.weight)]) > 1:
            raise ValueError(f"target_modules: the weight of {name} is shared ({tied}); exclude it")


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


# ---- the forward pass -----------------------------------------------------------------------------------------------


def _merged(layer: nn.Module, weight: torch.Tensor, adapter: str) -> torch.Tensor:
    """The weight of a linear layer with an adapter, W + scale B A, in the dtype of W and rounded once."""
    a, b = layer.lora_A[adapter].weight.to(weight.dtype), layer.lora_B[adapter].weight.to(weight.dtype)
    if layer.fan_in_fan_out:  # W is (in, out)
        a, b = b.T, a.T
    return torch.addmm(weight, b, a, alpha=layer.scaling[adapter])


class _MergedLinear(torch.autograd.Function):
    """x (..., in) -> x (W + scale B A)^T + bias. The rounding of the sum passes gradients on as they are."""

    @staticmethod
    def forward(ctx, x, a, b, layer, adapter):
        ctx.save_for_backward(x, a, b)
        ctx.layer, ctx.adapter, base = layer, adapter, layer.get_base_layer()
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x, _MergedLinear.weight(ctx, x), None if base.bias is None else base.bias.to(x))

    @staticmethod
    def weight(ctx, x: torch.Tensor) -> torch.Tensor:
        """(out, in), in the dtype of x. Computed in both passes: it is not kept."""
        merged = _merged(ctx.layer, dequantized(ctx.layer.get_base_layer().weight), ctx.adapter).to(x.dtype)
        return merged.T if ctx.layer.fan_in_fan_out else merged

    @staticmethod
    def backward(ctx, gradient):
        x, a, b = ctx.saved_tensors
        scale = ctx.layer.scaling[ctx.adapter]
        with torch.autocast(x.device.type, enabled=False):
            rows, flat = gradient.flatten(0, -2), x.flatten(0, -2)
            for_a = ((rows @ b.to(x.dtype)).T @ flat).to(a.dtype) * scale
            for_b = (rows.T @ (flat @ a.to(x.dtype).T)).to(b.dtype) * scale
            for_x = gradient @ _MergedLinear.weight(ctx, x) if ctx.needs_input_grad[0] else None
        return for_x, for_a, for_b, None, None


@functools.cache
def _merging(cls: type) -> type:
    """A peft layer whose computations in 16 bits are those of the merged weight."""

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        dtype = compute_dtype(x, x)
        if self.disable_adapters or dtype.itemsize > 2:
            return cls.forward(self, x, *args, **kwargs)
        (active,) = self.active_adapters
        return _MergedLinear.apply(x.to(dtype), self.lora_A[active].weight, self.lora_B[active].weight, self, active)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


class Adapters:
    """The adapters of a module, whose parameters may be sharded."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.settings = module.peft_config[TRAINED]
        self._layers = _layers(module)
        #: HuggingFace name of a parameter -> the layer that adapts it
        self._adapted = {
            f"{name.replace('.base_layer', '')}.{layer.parameter_name if _is_of_experts(layer) else 'weight'}": layer
            for name, layer in self._layers.items()
        }
        #: names of the adapted weights of experts; of one module, the innermost adapter first
        self.experts = [name for name, layer in self._adapted.items() if _is_of_experts(layer)][::-1]
        self._value_model = not module.can_generate()

    def describe(self) -> str:
        """Rank, layers, the number of trained parameters, and the weights that stay frozen, for the log."""
        weights = {name: p for name, p in self.base() if p.ndim > 1}
        total = sum(parameter.numel() for parameter in self.module.parameters())
        trained = sum(parameter.numel() for _, parameter in self.parameters())
        adapted, frozen = Counter(), Counter()
        for name, parameter in weights.items():
            (adapted if name in self._adapted else frozen)[_kind_of(name)] += parameter.numel()
        line = f"rank {self.settings.r} on {len(self._layers)} layers ({', '.join(sorted(adapted))}); "
        line += f"{trained:,} of {total:,} parameters are trained"
        shares = [f"{name} {100 * size / total:.2g}%" for name, size in frozen.most_common()]
        line += f"; weights without adapters, in % of all parameters: {', '.join(shares)}" if shares else ""
        if any(name in weights and name not in self._adapted for name in expert_tensors(self.module)):
            line += f"; model.target_parameters=[{ALL_EXPERTS}] adapts the experts"
        return line

    def parameters(self, adapter: str = TRAINED) -> Iterator[tuple[str, nn.Parameter]]:
        """(PEFT name, parameter) of one adapter and of a value head."""
        for name, parameter in self.module.named_parameters():
            module, _, last = name.rpartition(f".{adapter}.")
            if module.endswith((".lora_A", ".lora_B")):
                yield f"{_PREFIX}{module}.{last}", parameter
            elif self._value_model and name.startswith(f"{value_head(self.module)}."):
                yield _PREFIX + name, parameter

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, parameter) with the adapters merged; as sharded as the module."""
        for name, value in self.base():
            layer = self._adapted.get(name)
            if layer is not None:
                if _is_of_experts(layer):
                    merged = (value + layer.get_delta_weight(TRAINED).detach()).to(value.dtype)
                else:
                    merged = _merged(layer, value, TRAINED).detach()
                if isinstance(value, DTensor) and merged.placements != value.placements:
                    merged = merged.redistribute(placements=value.placements)
                value = merged
            yield name, value

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HuggingFace name, parameter) without the adapters; as sharded as the module."""
        for name, parameter in self.module.named_parameters():
            if ".lora_" not in name:
                yield name.replace(".base_layer", ""), dequantized(parameter)

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
        names = [name.replace(".base_layer", "") for name, p in self.module.named_parameters() if is_quantized(p)]
        if names:  # `verl merge` adds the adapters to the weights that they were trained with
            (folder / QUANTIZED).write_text(json.dumps(names, indent=2), encoding="utf-8")
        path = folder / "adapter_config.json"
        # peft writes sets, whose order differs between processes
        ordered = {key: sorted(v) for key, v in self.settings.to_dict().items() if isinstance(v, set)}
        ordered |= self._peft_targets()
        if self._value_model:  # tells peft that the head in the file replaces the model's
            ordered["modules_to_save"] = [value_head(self.module)]
        text = json.dumps(read_json(path) | ordered, indent=2)
        path.write_text(text, encoding="utf-8")

    def _peft_targets(self) -> dict[str, list[str]]:
        """target_modules and target_parameters from which peft adapts the same layers of this model.

        Of a mixture, peft takes names such as gate_proj for the experts, whose layers had them before they were fused.
        A layer with such a name is listed by its weight.
        """
        layers = [name for name, layer in self._layers.items() if not _is_of_experts(layer)]
        last_names = {name.rpartition(".")[2] for name in layers}
        experts = {name for name in last_names if _means_experts(name, self.module)}
        by_weight = [f"{name}.weight" for name in layers if name.rpartition(".")[2] in experts]
        if not by_weight and not self.experts:
            return {}
        modules = sorted(name for name in layers if f"{name}.weight" not in by_weight)
        return {"target_modules": modules, "target_parameters": [*self.experts, *by_weight]}

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


def _is_of_experts(layer: nn.Module) -> bool:
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(layer, ParamWrapper)


def _means_experts(name: str, module: nn.Module) -> bool:
    """Whether peft replaces a target module of this name by the fused experts of a model."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, module, None)
    except ValueError:  # only one of the names that are fused into one tensor
        return True
    return name not in config.target_modules


def _kind_of(name: str) -> str:
    """What a parameter is, without the number of its layer: model.layers.0.mlp.up_proj.weight -> mlp.up_proj."""
    owner = name.removesuffix(".weight").split(".")
    return ".".join(owner[-2:] if len(owner) > 2 and not owner[-2].isdigit() else owner[-1:])
