"""From a folder to the weights in it: which kind of checkpoint it is, whether it is whole, and what it grew from."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.checkpoints.store import MANIFEST
from verl.model_merger.adapter_folder import AdaptersOverBase, has_adapters, recorded_base
from verl.model_merger.distributed_checkpoint import DistributedCheckpoint
from verl.model_merger.fsdp import RankFiles, is_rank_file
from verl.model_merger.safetensors_folder import SafetensorsFolder, has_weights, local_folder
from verl.model_merger.source import WeightSource

_LOOKS_LIKE = (
    "expected one of: model_world_size_W_rank_R.pt files, a folder shards/, lora_adapter/, or "
    "huggingface/*.safetensors, "
    "each beside a folder huggingface/ with the config; --local_dir is .../global_step_N/actor (or .../critic)"
)


@dataclass(frozen=True)
class Checkpoint:
    """One role's part of a checkpoint.

    folder: `.../actor`. source: its weights. kind: words for the log.
    recorded: path relative to the checkpoint -> {"bytes", "sha256"}, of this project's checkpoints; else empty.
    """

    folder: Path
    source: WeightSource
    kind: str
    recorded: dict[str, dict[str, Any]]

    @property
    def config_folder(self) -> Path:
        """The HuggingFace config and tokenizer."""
        return self.folder / "huggingface"

    @property
    def is_merged(self) -> bool:
        """Whether the weights lie in `huggingface/` already."""
        return isinstance(self.source, SafetensorsFolder)


def base_models(folder: Path) -> list[str]:
    """The model that training started from, as a checkpoint (.../actor) names it: paths or HuggingFace ids."""
    config = json.loads((folder / "huggingface" / "config.json").read_text())
    run_config = folder.parent / "config.yaml"  # this project's checkpoints: the settings of the run
    settings = yaml.safe_load(run_config.read_text()) if run_config.is_file() else {}
    # a critic starts from the policy's model where it has none of its own; supervised training has one section
    sections = [settings.get("critic", {})] if folder.name == "critic" else []
    sections += [settings.get("actor_rollout_ref", {}), settings]
    named = [recorded_base(folder / "lora_adapter"), config.get("_name_or_path")]
    named += [section.get("model", {}).get("path") for section in sections]
    return list(dict.fromkeys(name for name in named if name))


def open_checkpoint(folder: Path, base: str | None = None) -> Checkpoint:
    """Look at what is in the folder and check that it is whole.

    base: where the model lies that adapters sit on; None to look for it as the checkpoint names it. Raises ValueError
    that says what is missing or damaged, or what kind of folder this is instead.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: {_LOOKS_LIKE}")
    recorded = _check_recorded(folder)
    ranks, shards = any(is_rank_file(path) for path in folder.iterdir()), (folder / "shards").is_dir()
    if ranks and shards:
        raise ValueError(f"{folder} holds both rank files and shards/: move one of them away")
    source, kind = _weights(folder, ranks, shards)
    adapters = source is None and has_adapters(folder / "lora_adapter")
    if source is None and not adapters:
        raise ValueError(_what_it_is_instead(folder))
    config = folder / "huggingface" / "config.json"
    if not config.is_file():
        raise ValueError(
            f"{config} is missing: copy the config and tokenizer of the model there "
            "(from the base model, if training did not change them)"
        )
    if adapters:
        return _adapters(folder, base, recorded)
    return Checkpoint(folder, source, kind, recorded)


def _weights(folder: Path, ranks: bool, shards: bool) -> tuple[WeightSource | None, str]:
    """The weights of a whole model in the folder, or None, and words for them."""
    if ranks:
        files = RankFiles(folder)
        return files, f"{len(files.files)} rank files"
    if shards:
        source = DistributedCheckpoint(folder / "shards")
        if source.names():
            return source, "shards of torch.distributed.checkpoint"
    if has_weights(folder / "huggingface"):
        return SafetensorsFolder(folder / "huggingface"), "a HuggingFace model already"
    return None, ""


def _adapters(folder: Path, base: str | None, recorded: dict[str, dict[str, Any]]) -> Checkpoint:
    """A checkpoint of adapters alone, over the model that they were trained on."""
    adapters = folder / "lora_adapter"
    named = [base] if base is not None else base_models(folder)
    found = next((place for name in named if (place := local_folder(name)) is not None), None)
    if found is None:
        raise ValueError(
            f"{adapters} holds LoRA adapters, and the weights that they sit on are those of {named or 'a model'}, "
            f"{'' if named else 'not named anywhere, '}which is not on this machine (relative paths start from the "
            "present folder): --base says where it is"
        )
    return Checkpoint(folder, AdaptersOverBase(adapters, found), f"LoRA adapters over {found}", recorded)


def _what_it_is_instead(folder: Path) -> str:
    roles = [name for name in ("actor", "critic") if (folder / name).is_dir()]
    steps = sorted(path.name for path in folder.glob("global_step_*"))
    if roles:
        return f"{folder} is a whole checkpoint: name the part to merge, {' or '.join(str(folder / r) for r in roles)}"
    if steps:
        return f"{folder} is a run: name one checkpoint and its part, for instance {folder / steps[-1] / 'actor'}"
    if (folder / "dist_ckpt").is_dir():
        return f"{folder} is a checkpoint of Megatron (dist_ckpt/): use --backend megatron"
    if has_weights(folder):
        return f"{folder} is a HuggingFace model: there is nothing to merge"
    if (folder / "huggingface" / "config.json").is_file():
        return f"{folder} holds no weights: the run saved without 'model' (checkpoint.save_contents)"
    found = sorted(path.name for path in folder.iterdir())
    return f"{folder} is no checkpoint: {_LOOKS_LIKE}; found {found[:8] or 'nothing'}"


def _check_recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Compare weights and config with the manifest of the checkpoint, if it has one; return what it records."""
    root, role = folder.parent, folder.name
    if not (root / MANIFEST).is_file():
        return {}
    try:
        recorded = json.loads((root / MANIFEST).read_text())["files"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise ValueError(f"{root / MANIFEST} cannot be read: {error}") from error
    parts = tuple(f"{role}/{part}/" for part in ("shards", "lora_adapter", "huggingface"))
    read = [name for name in recorded if name.startswith(parts)]
    with ThreadPoolExecutor(8) as pool:  # checksums release the interpreter lock
        faults = [fault for fault in pool.map(lambda name: _fault(root / name, recorded[name]), read) if fault]
    if faults:
        raise ValueError(f"{root} is damaged: {'; '.join(faults)}")
    return recorded


def _fault(path: Path, entry: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path} has {path.stat().st_size} bytes, written were {entry['bytes']}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == entry["sha256"] else f"{path} holds something else than was written (sha256)"
