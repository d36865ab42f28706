"""Checks of the paths of a configuration, for `load_config(extra_checks=[...])`: models and data are set and exist."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from verl.checkpoints.store import CheckpointError, newest_actor, saved_step
from verl.config.errors import Problem
from verl.config.fields import Schema, flatten
from verl.config.schema.offline import GenerationConfig
from verl.utils.data_names import SUFFIXES, DataName, is_data_file
from verl.utils.paths import expanded, resolved

_MODELS = ("actor_rollout_ref.model.path", "critic.model.path", "model.path", "reward.reward_model.model_path")
#: files that belong to a model
_TOKENIZERS = "tokenizer_path"
_ADAPTERS = "lora_adapter_path"
#: found next to the config of a checkpoint whose weights are not merged
_CHECKPOINT = ("shards", "lora_adapter")
_FILES = ("data.train_files", "data.val_files", "data.path")
#: ends of keys with files of tools, agents and custom code; those of a YAML file, and others, which may be modules
_YAML = ("multi_turn.tool_config_path", "multi_turn.interaction_config_path", "agent.agent_loop_config_path")
_YAML += ("data.tool_config_path",)
_CODE = ("multi_turn.function_tool_path", "server.agent.path", "data.function_tool_path", "custom_cls.path")
_CODE += ("data.sampler.class_path",)
_CODE += ("custom_reward_function.path", "reward_manager.module.path")


def check_inputs(config: Schema) -> Iterator[Problem]:
    """For `extra_checks`: model and data are set, and local files exist."""
    yield from check_models(config)
    yield from check_code(config)
    yield from check_data(config)


def check_code(config: Schema) -> Iterator[Problem]:
    """For `extra_checks`: files of tools, agents and custom code exist. A Python module is not looked for."""
    values = flatten(config.model_dump(), type(config))
    for path in values.get("imports", ()):
        yield from check_code_file("imports", path)
    seen: set[str] = set()
    for end in (*_YAML, *_CODE):
        for key in (key for key in values if key.endswith("." + end) or key == end):
            path = values[key]
            if not path or path in seen:  # `data` has the tools of `multi_turn` by default
                continue
            seen.add(path)
            yield from check_code_file(key, path, is_module=end in _CODE)


def check_generation(config: GenerationConfig) -> Iterator[Problem]:
    """For `extra_checks`: the settings of generation without training."""
    path = config.data.output_path
    if path is None or Path(path).suffix not in (".parquet", ".jsonl"):
        actual = "missing" if path is None else f"found {path!r}"
        yield Problem("data.output_path", f"{actual}, expected a file that ends with .parquet or .jsonl")
    if config.data.n_samples > 1 and config.rollout.temperature == 0:
        yield Problem(
            "data.n_samples",
            f"found {config.data.n_samples} with rollout.temperature 0, which generates the same response "
            f"{config.data.n_samples} times: use a temperature > 0, or data.n_samples=1",
        )
    if config.trainer.backend != "local":
        yield Problem(
            "trainer.backend", f"{config.trainer.backend} is not supported by generation without training: use local"
        )
    if config.trainer.nnodes > 1:
        yield Problem(
            "trainer.nnodes",
            f"found {config.trainer.nnodes}, but generation runs on one host: use 1, and split the file between hosts",
        )


def check_models(config: Schema) -> Iterator[Problem]:
    """For `extra_checks`: the model is set, and the folders of models and checkpoints exist."""
    values = flatten(config.model_dump(), type(config))
    paths = {key: values[key] for key in _MODELS if key in values}
    first = next(iter(paths))
    if paths[first] is None:
        yield Problem(first, "missing: set it to a model folder or a Hugging Face Hub id")
    if (distillation := getattr(config, "distillation", None)) is not None:
        local = {name: each for name, each in distillation.teacher_models.items() if each.server_url is None}
        paths |= {f"distillation.teacher_models.{name}.model_path": each.model_path for name, each in local.items()}
    for path in dict.fromkeys(paths.values()):
        yield from check_model_path(next(key for key in paths if paths[key] == path), path)
    for key, path in values.items():
        name = key.rpartition(".")[2]
        if name not in (_TOKENIZERS, _ADAPTERS) or not path:
            continue
        folder = expanded(path)
        if not os.path.isdir(folder) and is_local(path):
            yield Problem(key, f"there is no folder {path!r}")
        elif name == _ADAPTERS and os.path.isdir(folder) and not os.path.isfile(folder / "adapter_config.json"):
            yield Problem(key, f"{path!r} has no adapter_config.json")
    checkpoint = values.get("trainer.resume_from_path") if values.get("trainer.resume_mode") == "resume_path" else None
    if checkpoint and not os.path.isdir(checkpoint):
        yield Problem("trainer.resume_from_path", f"there is no folder {checkpoint!r}")
    elif checkpoint:
        try:
            saved_step(Path(checkpoint))
        except CheckpointError as error:
            yield Problem("trainer.resume_from_path", str(error))


def check_data(config: Schema) -> Iterator[Problem]:
    """For `extra_checks`: data files are set, and all of them exist."""
    values = flatten(config.model_dump(), type(config))
    files = {key: values[key] for key in _FILES if key in values}
    first = next(iter(files))
    if not files[first]:
        yield Problem(first, "missing: set it to one or more .parquet, .jsonl, .json or .csv files")
    for key, paths in files.items():
        yield from _files(key, paths)


def check_code_file(key: str, path: str, is_module: bool = True) -> Iterator[Problem]:
    """A file must exist. is_module: a name such as my_package.tools is a Python module."""
    name = path.removeprefix("pkg://")  # public verl's form of a module
    file = expanded(name)
    if not os.path.isfile(file) and not (is_module and file.suffix != ".py" and "/" not in name):
        yield Problem(key, f"there is no file {path!r} (looked at {resolved(file)})")


def check_model_path(key: str, path: str | None) -> Iterator[Problem]:
    """A model that looks like a local path must exist; other names are Hub ids."""
    if not path:
        return
    folder = expanded(path)
    if os.path.isdir(folder):
        if not os.path.isfile(folder / "config.json"):
            actor = newest_actor(folder)
            example = f", such as {str(actor / 'huggingface')!r}" if actor else ""
            yield Problem(key, f"{path!r} has no config.json: expected the folder of a Hugging Face model{example}")
        elif not _holds(folder, "*.safetensors", "*.bin") and _holds(folder.parent, *_CHECKPOINT):
            yield Problem(
                key,
                f"{path!r} holds only the config and tokenizer of a checkpoint: merge its shards "
                f"(python -m verl.model_merger merge --backend fsdp --local_dir {folder.parent} --target_dir FOLDER) "
                "and use FOLDER",
            )
    elif is_local(path):
        yield Problem(key, f"there is no folder {path!r}")


def is_local(path: str) -> bool:
    """Whether a model's name is a path, not a Hub id (`name` or `namespace/name`). So is a name in a folder that
    exists: with a folder `outputs`, `outputs/modle` is not looked up on the Hub."""
    if path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1:
        return True
    above, slash, _ = path.partition("/")
    return bool(slash) and os.path.isdir(above)


def _holds(folder: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _files(key: str, paths: Iterable[str]) -> Iterator[Problem]:
    for path in paths:
        file, name = expanded(path), DataName.parse(path)
        if is_data_file(path):
            if not os.path.isfile(file):
                yield Problem(key, f"there is no file {path!r} (looked at {resolved(file)})")
        elif os.path.isfile(file) or not (name.is_folder or name.is_hub_name):
            suffixes = ", ".join(SUFFIXES)
            yield Problem(key, f"{path!r}: expected a file ({suffixes}), a folder, or a hub dataset OWNER/NAME:SPLIT")
