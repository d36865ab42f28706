"""Merge a checkpoint into a verified HuggingFace folder, or compare it with one."""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from verl.checkpoints.atomic import fsync
from verl.checkpoints.safetensors_files import INDEX, SafetensorsFiles
from verl.model_merger.checkpoint import find_base, open_checkpoint
from verl.model_merger.huggingface import (
    WeightSource,
    check_folder,
    checksums,
    describe,
    disk_tensors,
    first_difference,
    load,
)
from verl.model_merger.lora import MergedAdapters
from verl.modeling.huggingface import VALUE_HEADS
from verl.utils.paths import read_json, resolved

logger = logging.getLogger("verl.model_merger")

#: weight files of a HuggingFace folder, of all formats
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


@contextmanager
def staged(target: Path, in_place: bool = False) -> Iterator[Path]:
    """Yield an empty folder next to `target`, which becomes `target` when the block ends. If there is a target, its
    weights are replaced, and its other files are kept (in_place: all files). If the block raises, it is not changed.
    The folder of a killed process is removed by the next call."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.merging")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.iterdir(), draft]:
            fsync(path)
        if not target.exists():
            draft.rename(target)
            return
        for path in weight_files(target):
            path.unlink()
        for path in draft.iterdir():
            if not (in_place and (target / path.name).exists()):
                path.replace(target / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in the folder."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], max_shard_size: str | int) -> None:
    """Write tensors into safetensors files of at most `max_shard_size`, with an index if there are several."""
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        contents = {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in names}
        save_file(contents, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(source: Path, folder: Path, architecture: str, dtype: torch.dtype, num_labels: int | None) -> None:
    """Copy config and tokenizer, and set architecture, dtype and num_labels (of a critic) in the config. Other entries
    are not changed: rewritten by transformers, the file might not be readable by older releases."""
    weights = set(weight_files(source))
    for path in source.iterdir():
        if path.is_file() and path not in weights:
            shutil.copy2(path, folder / path.name)
    config: dict[str, Any] = read_json(source / "config.json")
    changed = dict(config)
    changed["architectures"] = [architecture]
    changed["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    if num_labels is not None and len(config.get("id2label", ())) != num_labels:
        changed["id2label"] = {str(i): f"LABEL_{i}" for i in range(num_labels)}
        changed["label2id"] = {label: int(i) for i, label in changed["id2label"].items()}
    if changed != config:
        (folder / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergeOptions:
    """The command line options of `merge`, explained by `python -m verl.model_merger merge --help`."""

    local_dir: Path
    target_dir: Path
    dtype: str = "keep"
    max_shard_size: str | int = "5GB"
    base: str | None = None
    allow_unchanged: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False


def merge(options: MergeOptions) -> Path:
    """Write the model of a checkpoint as a HuggingFace folder, verify it, and return the folder. Raises ValueError,
    without a change of the target, if the checkpoint is incomplete, does not match the config, or the result differs
    from it or lost what was learned by rounding."""
    target, dtype = resolved(options.target_dir), DTYPES[options.dtype]
    # public verl's scripts name the actor's own folder: only what it lacks is written
    in_place = target == resolved(options.local_dir) / "huggingface" and target.parent.name == "actor"
    if not in_place:
        _check_target(target, resolved(options.local_dir), options.overwrite)
    elif dtype is not None:
        raise ValueError(
            f"--target_dir {target} is in the checkpoint, whose weights --dtype {options.dtype} would change: choose "
            "another folder"
        )
    elif weight_files(target):
        if faults := compare(options.local_dir, target, options.trust_remote_code, options.base):
            raise ValueError(f"--target_dir {target} has other weights than the checkpoint: {'; '.join(faults)}")
        logger.info("%s has the weights of the checkpoint already: nothing to merge", target)
        return target
    checkpoint = open_checkpoint(options.local_dir, options.base, options.trust_remote_code)
    source = checkpoint.source
    model = describe(checkpoint.config_folder, source.names(), options.trust_remote_code)
    logger.info("%s: %s, %s", checkpoint.folder, checkpoint.format_name, type(model).__name__)
    base = _base_folder(checkpoint.folder, options.base)
    if base is not None and resolved(base) == target:
        raise ValueError(f"--target_dir {target} is the base model: choose another folder")
    module = load(source, model, dtype)
    tensors, expected = disk_tensors(model, module), checksums(module)
    count, parameters, stored_dtype = len(tensors), module.num_parameters(), module.dtype
    with staged(target, in_place) as folder:
        has_head = any(f"{name}.weight" in tensors for name in VALUE_HEADS)
        labels = model.config.num_labels if has_head else None
        write_config(checkpoint.config_folder, folder, type(model).__name__, stored_dtype, labels)
        generation = "generation_config.json"  # of a language model, with its stop tokens; if missing, of the base
        if labels is None and base and not (folder / generation).is_file() and (base / generation).is_file():
            shutil.copy2(base / generation, folder / generation)
        write_weights(folder, tensors, options.max_shard_size)
        del module, tensors  # one model is in memory at a time
        if not options.allow_unchanged:
            _check_changed(folder, base, source, dtype)
        check_folder(folder, model, stored_dtype, expected)
    logger.info(
        "%s: %d tensors, %d parameters, %s; verified: every tensor is that of the checkpoint",
        target,
        count,
        parameters,
        str(stored_dtype).removeprefix("torch."),
    )
    return target


def compare(local_dir: Path, folder: Path, trust_remote_code: bool = False, base: str | None = None) -> list[str]:
    """Descriptions of the differences between a checkpoint, merged in memory and rounded to the folder's dtype, and a
    HuggingFace folder. None is tolerated: a step of reinforcement learning may change a weight by one part in a
    million."""
    checkpoint = open_checkpoint(local_dir, base, trust_remote_code)
    model = describe(checkpoint.config_folder, checkpoint.source.names(), trust_remote_code)
    other = SafetensorsFiles(folder)
    others, tensors, faults = set(other.names()), disk_tensors(model, load(checkpoint.source, model, None)), []
    for name, tensor in tensors.items():
        if name not in others:
            faults.append(f"{name} is only in {local_dir}")
            continue
        expected = other.read(name)
        if expected.shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)} in the checkpoint, {tuple(expected.shape)} in the folder"
            faults.append(f"{name} has shape {shapes}")
        elif difference := (tensor.to(expected.dtype).double() - expected.double()).abs().max().item():
            faults.append(f"{name} differs by up to {difference:.3g}")
    return [f"{name} is only in {folder}" for name in other.names() if name not in tensors] + faults


def _check_target(target: Path, checkpoint: Path, overwrite: bool) -> None:
    """Raise ValueError if writing to the target would overwrite something that is not a merged model."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"--target_dir {target}: expected a folder, found a file")
    if checkpoint.is_relative_to(target):
        raise ValueError(f"--target_dir {target} contains the checkpoint itself: choose a separate folder")
    if target.is_relative_to(checkpoint):
        raise ValueError(f"--target_dir {target} is in the checkpoint, which must not change: choose another folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ValueError(
            f"--target_dir {target} is not empty: choose another folder, or replace its weights with --overwrite"
        )


# ---- the base model -------------------------------------------------------------------------------------------------


def _base_folder(checkpoint: Path, name: str | None) -> Path | None:
    """Return the folder of the base model, if it is on this machine."""
    folder, problem = find_base(checkpoint, name)
    if folder is None and name is not None:
        raise ValueError(
            f"--base {name}: expected a folder with safetensors files, or a model in the HuggingFace cache"
        )
    if folder is None:
        logger.warning("not compared with the base model: %s; set it with --base", problem)
    return folder


def _check_changed(folder: Path, base: Path | None, source: WeightSource, dtype: torch.dtype | None) -> None:
    """Warn if training changed nothing. Raises ValueError if the result lost the changes by rounding to --dtype."""
    if isinstance(source, MergedAdapters) and source.is_untrained:
        logger.warning("all LoRA adapters are zero: they were saved before the first step, or never trained")
        return
    if base is None:
        return
    difference = first_difference(SafetensorsFiles(folder), SafetensorsFiles(base))
    if difference is not None:
        logger.info("differs from the base model %s (first difference: %s)", base, difference)
        return
    if dtype is not None:
        raise ValueError(
            f"the result equals the base model {base}: the trained weights were not saved, or the changes are lost by "
            f"rounding to {dtype} (use --dtype float32). "
            "To write the model anyway, use --allow_unchanged"
        )
    logger.warning(
        "THE RESULT EQUALS THE BASE MODEL %s: training changed no weight. Check the metrics of the run: rewards that "
        "are all equal, a learning rate of 0, or skipped updates leave the model unchanged",
        base,
    )
