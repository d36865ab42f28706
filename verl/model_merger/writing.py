"""Atomic writing of a HuggingFace folder: safetensors files with an index."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from verl.checkpoints.atomic import fsync
from verl.checkpoints.safetensors_files import INDEX, SINGLE_FILE
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


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> int:
    """Write tensors into safetensors files, with one file in memory at a time. Returns their number.

    Args:
        max_bytes: Maximum size of a file; a file contains at least one tensor.
    """
    file_of: dict[str, int] = {}
    contents: dict[str, torch.Tensor] = {}
    count, filled, total = 1, 0, 0
    for name, tensor in tensors:
        if contents and filled + tensor.nbytes > max_bytes:
            save_file(contents, folder / f"{count}.part", metadata={"format": "pt"})
            contents, filled, count = {}, 0, count + 1
        contents[name], file_of[name] = tensor.contiguous(), count
        filled += tensor.nbytes
        total += tensor.nbytes
    save_file(contents, folder / f"{count}.part", metadata={"format": "pt"})
    files = {n: f"model-{n:05}-of-{count:05}.safetensors" if count > 1 else SINGLE_FILE for n in range(1, count + 1)}
    for number, file in files.items():
        (folder / f"{number}.part").rename(folder / file)
    if count > 1:
        weight_map = {name: files[number] for name, number in sorted(file_of.items())}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(file_of)


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
