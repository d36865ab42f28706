"""Checks of the paths of a configuration, for `load_config(extra_checks=[...])`: models and data are set and exist."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from verl.checkpoints.store import CheckpointError, step_of_saved
from verl.config.errors import Problem
from verl.config.fields import Schema, flatten

_MODELS = ("actor_rollout_ref.model.path", "critic.model.path", "model.path", "reward.reward_model.model_path")
#: files that belong to a model
_TOKENIZERS = "tokenizer_path"
_ADAPTERS = "lora_adapter_path"
#: found next to the config of a checkpoint whose weights are not merged
_CHECKPOINT = ("shards", "lora_adapter", "model_world_size_*")
_FILES = ("data.train_files", "data.val_files", "data.path")


def check_inputs(config: Schema) -> Iterator[Problem]:
    """For `extra_checks`: model and data are set, and local files exist."""
    yield from check_models(config)
    yield from check_data(config)


def check_models(config: Schema) -> Iterator[Problem]:
    """For `extra_checks`: the model is set, and the folders of models and checkpoints exist."""
    values = flatten(config.model_dump(), type(config))
    paths = {key: values[key] for key in _MODELS if key in values}
    first = next(iter(paths))
    if paths[first] is None:
        yield Problem(first, "missing: set it to a model folder or a Hugging Face Hub id")
    for path in dict.fromkeys(paths.values()):
        yield from _model(next(key for key in paths if paths[key] == path), path)
    for key, path in values.items():
        name = key.rpartition(".")[2]
        if name in (_TOKENIZERS, _ADAPTERS) and path:
            yield from _files_of_model(key, path, ("adapter_config.json",) if name == _ADAPTERS else ())
    checkpoint = values.get("trainer.resume_from_path") if values.get("trainer.resume_mode") == "resume_path" else None
    if checkpoint and not Path(checkpoint).is_dir():
        yield Problem("trainer.resume_from_path", f"there is no folder {checkpoint!r}")
    elif checkpoint:
        try:
            step_of_saved(Path(checkpoint))
        except CheckpointError as error:
            yield Problem("trainer.resume_from_path", str(error))


def check_data(config: Schema) -> Iterator[Problem]:
    """For `extra_checks`: data files are set, and all of them exist."""
    values = flatten(config.model_dump(), type(config))
    files = {key: values[key] for key in _FILES if key in values}
    first = next(iter(files))
    if not files[first]:
        yield Problem(first, "missing: set it to one or more .parquet, .json or .jsonl files")
    for key, paths in files.items():
        yield from _files(key, paths)


def _model(key: str, path: str | None) -> Iterator[Problem]:
    """A model that looks like a local path must exist; other names are Hub ids."""
    if not path:
        return
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield Problem(key, f"{path!r} has no config.json: expected the folder of a Hugging Face model")
        elif not _holds(folder, "*.safetensors", "*.bin") and _holds(folder.parent, *_CHECKPOINT):
            yield Problem(
                key,
                f"{path!r} holds only the config and tokenizer of a checkpoint: merge its shards "
                f"(python -m verl.model_merger merge --backend fsdp --local_dir {folder.parent} --target_dir FOLDER) "
                "and use FOLDER",
            )
    elif is_local(path):
        yield Problem(key, f"there is no folder {path!r}")


def _files_of_model(key: str, path: str, files: tuple[str, ...]) -> Iterator[Problem]:
    """A tokenizer or adapter that looks like a local path must exist."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        for name in files:
            if not (folder / name).is_file():
                yield Problem(key, f"{path!r} has no {name}")
    elif is_local(path):
        yield Problem(key, f"there is no folder {path!r}")


def is_local(path: str) -> bool:
    """Whether a model's name is a path, not a Hub id (`name` or `namespace/name`).

    A name in a folder that exists is a path too: with a folder `outputs`, `outputs/modle` is not looked up on the Hub.
    """
    if path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1:
        return True
    above, slash, _ = path.partition("/")
    return bool(slash) and Path(above).is_dir()


def _holds(folder: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _files(key: str, paths: Iterable[str]) -> Iterator[Problem]:
    for path in paths:
        file = Path(path).expanduser()
        if file.suffix not in (".parquet", ".json", ".jsonl"):
            yield Problem(key, f"{path!r}: expected a .parquet, .json or .jsonl file")
        elif not file.is_file():
            yield Problem(key, f"there is no file {path!r} (looked at {file.resolve()})")
