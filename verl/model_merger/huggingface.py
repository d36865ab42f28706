"""The HuggingFace model of a checkpoint: its class, its tensors, and their names on disk."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from verl.modeling.huggingface import VALUE_HEADS, load_with_report
from verl.weight_sync.verify import equal_bits

_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
}


class WeightSource(Protocol):
    """The weights of a model: `SafetensorsFiles`, `checkpoint.DistributedCheckpoint` or `lora.MergedAdapters`."""

    def names(self) -> list[str]: ...
    def read(self, name: str) -> torch.Tensor: ...


def describe(config_folder: Path, names: Iterable[str], trust_remote_code: bool) -> Any:
    """The model described by the config and the tensor names, without weights. A critic, with one output per token, is
    recognized by its `score.` weights, since its config may be that of a language model. Raises ValueError if
    transformers cannot build the model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = transformers.AutoConfig.from_pretrained(config_folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {config_folder / 'config.json'}: {error}") from error
    architecture = (config.architectures or ["ForCausalLM"])[0]
    is_value = any(f"{name}.weight" in names for name in VALUE_HEADS)
    if is_value and not architecture.endswith(("ForTokenClassification", "ForSequenceClassification")):
        architecture, config.num_labels = "ForTokenClassification", 1
    ending = next((ending for ending in _AUTO_CLASSES if architecture.endswith(ending)), None)
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():  # such as GPT2LMHeadModel
        ending = "ForCausalLM"
    if ending is None:
        raise ValueError(
            f"{config_folder / 'config.json'}: expected an architecture that ends with {', '.join(_AUTO_CLASSES)}, "
            f"found {architecture}"
        )
    auto = getattr(transformers, _AUTO_CLASSES[ending])
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def build(model: Any, folder: Path | None, weights: dict[str, torch.Tensor] | None, dtype: torch.dtype) -> Any:
    """Build a model with the weights of a folder or of a dict.

    Args:
        model: From `describe`.
        weights: Name -> tensor, or None. Tensors that already have `dtype` are not copied.

    Raises:
        ValueError: Missing, unexpected or mismatched weights.
    """
    config = None if folder is not None else model.config
    module, report = load_with_report(type(model), folder, config=config, state_dict=weights, dtype=dtype)
    faults = [f"missing: {name}" for name in sorted(report["missing_keys"])]
    faults += [f"not in the model: {name}" for name in sorted(report["unexpected_keys"])]
    faults += [
        f"{name}: expected shape {tuple(expected)}, found {tuple(shape)}"
        for name, shape, expected in sorted(report["mismatched_keys"])
    ]
    faults += map(str, report["error_msgs"])
    if faults:
        raise ValueError(
            f"the weights do not match {type(module).__name__} with this config.json: "
            f"{'; '.join(faults[:6])}{f'; and {len(faults) - 6} more' if len(faults) > 6 else ''}"
        )
    return module


def main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The floating-point dtype of most values."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal (NaN equals itself)."""
    return a.shape == b.shape and a.dtype == b.dtype and equal_bits(a, b)


def load(source: WeightSource, model: Any, dtype: torch.dtype | None) -> Any:
    """Read the weights of a checkpoint into a model of transformers.

    Args:
        model: From `describe`.
        dtype: of floating-point tensors; None: unchanged.

    Raises:
        ValueError: weights that are not those of the model, NaN or infinite values, or tied tensors with different
            contents.
    """
    names = source.names()
    tied = {name: target for name, target in model.all_tied_weights_keys.items() if {name, target} <= {*names}}
    for name, target in tied.items():
        if not same_bits(source.read(name), source.read(target)):
            raise ValueError(
                f"{name} and {target} differ, but config.json ties them (tie_word_embeddings): "
                "set it to false if they were trained separately"
            )
    tensors = {name: _checked(name, source.read(name), dtype) for name in names if name not in tied}
    return build(model, None, tensors, main_dtype(tensors.values()))


def _checked(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} contains NaN or infinite values: training diverged")
    return tensor if dtype is None else tensor.to(dtype)


def disk_tensors(model: Any, module: Any) -> dict[str, torch.Tensor]:
    """The weights of a model by their names on disk, where transformers stores some differently than in memory (the
    experts of a layer in one tensor)."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor for name, tensor in module.state_dict().items() if name not in model.all_tied_weights_keys}
    return revert_weight_conversion(model, state)


# ---- verification ---------------------------------------------------------------------------------------------------


def check_folder(folder: Path, model: Any, dtype: torch.dtype, expected: dict[str, str]) -> None:
    """Load a folder with transformers, and compare it with the `checksums` of the checkpoint's model. Raises ValueError
    for missing or unexpected weights, or if a tensor differs."""
    result = checksums(build(model, folder, None, dtype))
    if differing := [name for name, checksum in expected.items() if result[name] != checksum]:
        raise ValueError(
            f"{differing[0]} of the merged model differs from the checkpoint: the merge failed, nothing was written"
        )


def checksums(module: Any) -> dict[str, str]:
    """The checksum of every tensor of a model."""
    state = module.state_dict()
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        return dict(zip(state, pool.map(_checksum, state.values())))


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def first_difference(written: WeightSource, base: WeightSource) -> str | None:
    """The name of the first tensor that differs from the base model, which is rounded to the dtype of the merged model,
    or None."""
    base_names = set(base.names())
    for name in written.names():
        if name not in base_names:
            return name
        tensor = written.read(name)
        if not same_bits(tensor, base.read(name).to(tensor.dtype)):
            return name
    return None
