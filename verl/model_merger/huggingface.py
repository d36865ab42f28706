"""The HuggingFace model of a checkpoint: its class, its tensors, and their names on disk."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.sources import SafetensorsFolder, WeightSource, main_dtype, same_bits

_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
}


def describe(config_folder: Path, names: Iterable[str], trust_remote_code: bool) -> Any:
    """Return the model described by the config and the tensor names, without weights.

    A critic is recognized by its `score.` weights, since its config may be that of the language model it was
    initialized from. It has one output per token.

    Raises:
        ValueError: If transformers cannot build the model.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = transformers.AutoConfig.from_pretrained(config_folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {config_folder / 'config.json'}: {error}") from error
    architecture = (config.architectures or ["ForCausalLM"])[0]
    if "score.weight" in names and not architecture.endswith(("ForTokenClassification", "ForSequenceClassification")):
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
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of missing keys is replaced by the error below
    logging.disable_progress_bar()
    try:
        module, report = type(model).from_pretrained(
            folder,
            config=None if folder is not None else model.config,
            state_dict=weights,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, with all others at once
        )
    finally:
        logging.set_verbosity(verbosity)
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


class Export:
    """The weights of a checkpoint as a model.

    Args:
        dtype: of floating-point tensors; None: unchanged.
    """

    def __init__(self, source: WeightSource, model: Any, dtype: torch.dtype | None):
        self.source, self.model, self.dtype = source, model, dtype
        names = source.names()
        self._tied = {
            name: target for name, target in model.all_tied_weights_keys.items() if name in names and target in names
        }
        self._names = [name for name in names if name not in self._tied]

    def load(self) -> Any:
        """Read the weights into a model of transformers.

        Raises:
            ValueError: weights that are not those of the model, NaN or infinite values, or tied tensors with different
                contents.
        """
        for name, target in self._tied.items():
            if not same_bits(self.source.read(name), self.source.read(target)):
                raise ValueError(
                    f"{name} and {target} differ, but config.json ties them (tie_word_embeddings): "
                    "set it to false if they were trained separately"
                )
        tensors = {name: self._read(name) for name in self._names}
        return build(self.model, None, tensors, main_dtype(tensors.values()))

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        if not tensor.is_floating_point():
            return tensor
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} contains NaN or infinite values: training diverged")
        return tensor if self.dtype is None else tensor.to(self.dtype)


def disk_tensors(model: Any, module: Any) -> dict[str, torch.Tensor]:
    """The weights of a model by their names on disk.

    transformers stores some weights differently in memory than on disk (the experts of a layer in one tensor).
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor for name, tensor in module.state_dict().items() if name not in model.all_tied_weights_keys}
    return revert_weight_conversion(model, state)


# ---- verification ---------------------------------------------------------------------------------------------------


def check_folder(folder: Path, model: Any, dtype: torch.dtype, expected: dict[str, str]) -> None:
    """Load a folder with transformers, and compare it with the `checksums` of the checkpoint's model.

    Raises:
        ValueError: For missing or unexpected weights, or if a tensor differs.
    """
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


def first_difference(written: SafetensorsFolder, base: SafetensorsFolder) -> str | None:
    """Return the name of the first tensor that differs from the base model, or None.

    The base model is rounded to the dtype of the merged model.
    """
    base_names = set(base.names())
    for name in written.names():
        if name not in base_names:
            return name
        tensor = written.read(name)
        if not same_bits(tensor, base.read(name).to(tensor.dtype)):
            return name
    return None
