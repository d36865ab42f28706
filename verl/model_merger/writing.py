"""Atomic writing of a HuggingFace folder: safetensors files with an index."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from verl.checkpoints.atomic import fsync
from verl.checkpoints.safetensors_files import INDEX, SINGLE_FILE
from verl.model_merger.sources import TensorInfo
from verl.utils.paths import read_json

#: weight files of a HuggingFace folder, of all formats
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target` that replaces `target` when the block ends.

    Other files in `target` are kept, except weights. If the block raises, `target` is not changed. Temporary folders of
    a killed process are removed by the next call.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.merging")
    replaced = target.with_name(f".{target.name}.replaced")
    if replaced.exists() and not target.exists():  # killed between the two renames below
        replaced.rename(target)
    for leftover in (draft, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    draft.mkdir()
    try:
        yield draft
        if target.exists():
            _carry_over(target, draft)
        for path in [*draft.rglob("*"), draft]:
            fsync(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if target.exists():
        target.rename(replaced)
    draft.rename(target)
    if replaced.exists():
        shutil.rmtree(replaced)


def _carry_over(old: Path, new: Path) -> None:
    weights = set(weight_files(old))
    for path in old.rglob("*"):
        copy = new / path.relative_to(old)
        if path.is_file() and path not in weights and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in the folder."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def write_weights(
    folder: Path, plan: Mapping[str, TensorInfo], tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> None:
    """Write tensors into safetensors files, with one file in memory at a time.

    Args:
        plan: Shape and dtype of every tensor, in the order of `tensors`.
        max_bytes: Maximum size of a file; a file contains at least one tensor.
    """
    sizes = {name: info.meta().numel() * info.dtype.itemsize for name, info in plan.items()}
    files: list[list[str]] = []
    filled = max_bytes
    for name, size in sizes.items():
        if filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    stream = iter(tensors)
    weight_map = {}
    for number, names in enumerate(files, start=1):
        file = SINGLE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        contents = {name: tensor.contiguous() for name, (_, tensor) in zip(names, _checked(stream, names))}
        save_file(contents, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)


def _checked(stream: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the next items of the stream, which must have these names."""
    for expected in names:
        name, tensor = next(stream)
        assert name == expected, f"expected {expected}, found {name}"
        yield name, tensor


def write_config(source: Path, folder: Path, architecture: str, dtype: torch.dtype, num_labels: int | None) -> None:
    """Copy config and tokenizer, and set architecture and dtype in the config.

    Other entries are not changed: rewritten by transformers, the file might not be readable by older releases.

    Args:
        num_labels: Number of outputs of a critic, otherwise None.
    """
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
        write_json(folder / "config.json", changed)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON with a final newline, as HuggingFace does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
