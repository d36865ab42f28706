"""From a folder to the weights in it: which kind of checkpoint it is, whether it is whole, and what it grew from."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.model_merger.distributed_checkpoint import DistributedCheckpoint
from verl.model_merger.fsdp import RankFiles, is_rank_file
from verl.model_merger.safetensors_folder import SafetensorsFolder, has_weights
from verl.model_merger.source import WeightSource
from verl.utils.checkpoint_store import MANIFEST

_LOOKS_LIKE = (
    "expected one of: model_world_size_W_rank_R.pt files, a folder shards/, or huggingface/*.safetensors, "
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

    def base_models(self) -> list[str]:
        """The model that training started from, as the checkpoint names it: paths or HuggingFace ids."""
        config = json.loads((self.config_folder / "config.json").read_text())
        run_config = self.folder.parent / "config.yaml"  # this project's checkpoints: the settings of the run
        settings = yaml.safe_load(run_config.read_text()) if run_config.is_file() else {}
        # a critic starts from the policy's model where it has none of its own; supervised training has one section
        sections = [settings.get("critic", {})] if self.folder.name == "critic" else []
        sections += [settings.get("actor_rollout_ref", {}), settings]
        named = [config.get("_name_or_path"), *(section.get("model", {}).get("path") for section in sections)]
        return [name for name in named if name]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Look at what is in the folder and check that it is whole.

    Raises ValueError that says what is missing or damaged, or what kind of folder this is instead.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: {_LOOKS_LIKE}")
    recorded = _check_recorded(folder)
    kinds = {
        "rank files": any(is_rank_file(path) for path in folder.iterdir()),
        "shards/": (folder / "shards").is_dir(),
    }
    if all(kinds.values()):
        raise ValueError(f"{folder} holds both {' and '.join(kinds)}: move one of them away")
    hugging_face = folder / "huggingface"
    if not any(kinds.values()) and not has_weights(hugging_face):
        raise ValueError(_what_it_is_instead(folder))
    if not (hugging_face / "config.json").is_file():
        raise ValueError(
            f"{hugging_face / 'config.json'} is missing: copy the config and tokenizer of the model there "
            "(from the base model, if training did not change them)"
        )
    if kinds["rank files"]:
        source: WeightSource = RankFiles(folder)
        return Checkpoint(folder, source, f"{len(source.files)} rank files", recorded)
    if kinds["shards/"]:
        source = DistributedCheckpoint(folder / "shards")
        if source.names():
            return Checkpoint(folder, source, "shards of torch.distributed.checkpoint", recorded)
        if not has_weights(hugging_face):
            raise ValueError(
                f"{folder / 'shards'} holds no weights: the run saved without 'model' (checkpoint.save_contents)"
            )
    return Checkpoint(folder, SafetensorsFolder(hugging_face), "a HuggingFace model already", recorded)


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
        return f"{folder} has a config but no weights: the run saved without 'model' (checkpoint.save_contents)"
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
    read = [name for name in recorded if name.startswith((f"{role}/shards/", f"{role}/huggingface/"))]
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
