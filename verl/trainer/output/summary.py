"""The last lines of a run: its results, the paths of its files, and the next commands."""

import importlib.util
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.checkpoints.atomic import set_aside_irregular
from verl.config import schema, to_flat_dict
from verl.config.schema.offline import GenerationConfig
from verl.data.dataset import TokenizedDataset
from verl.data.mixture import datasets_of
from verl.data.rlhf_dataset import RLHFDataset
from verl.tracking.curves import read_metrics, save_curves
from verl.tracking.summary import Series, summary_lines
from verl.trainer.view import RunView

logger = logging.getLogger("verl.trainer")

_JSONL = {"jsonl", "file"}


def run_summary(view: RunView, folder: Path, history: Mapping[str, Series], resumed: int, seconds: float) -> list[str]:
    """Lines with the results so far, the paths of the run, and the next command.

    Args:
        folder: folder of its record.
        history: metrics of this attempt.
        resumed: the step that it has resumed from; 0: none.
        seconds: its duration.
    """
    has_file = bool(_JSONL & set(view.config.trainer.logger))
    if history and resumed and has_file:
        history = _with_earlier_steps(history, folder, resumed)
    lines = summary_lines(history, view.step, view.total_steps, seconds, resumed)
    return [*lines, *_results(view, folder, has_file)] if lines else []


def _with_earlier_steps(history: Mapping[str, Series], folder: Path, resumed: int) -> Mapping[str, Series]:
    """The history with the steps before the resume, from metrics.jsonl."""
    try:
        recorded = read_metrics(folder / "metrics.jsonl")
    except (OSError, ValueError) as error:
        logger.warning("the summary has only the steps since the resume: %s", error)
        return history
    earlier = {name: [point for point in recorded[name] if point[0] <= resumed] for name in recorded}
    later = {name: [point for point in history[name] if point[0] > resumed] for name in history}
    return {name: earlier.get(name, []) + later.get(name, []) for name in earlier | later}


def _results(view: RunView, folder: Path, has_file: bool) -> list[str]:
    """Paths of the run, one per line, and what to do with the model."""
    lines, commands, typed = [], [], _short_path(folder)
    saved = None if view.config.trainer.val_only else view.checkpointer.store.newest()
    model = None if saved is None else saved / "actor" / "huggingface"
    if model is not None and any(model.glob("*.safetensors")):
        lines.append(f"model:   {_short_path(model)}")
        responses, run = view.folder / f"responses_{saved.name}.parquet", view.run
        dataset = run.inputs.train_dataset if run.inputs.val_dataset is None else run.inputs.val_dataset
        commands += offline_commands(run.config, model, responses, run.reward_given, dataset)
    elif saved is not None:
        lines.append(f"checkpoint: {_short_path(saved)}")
        commands.append(f"verl merge --local_dir {_typed(saved / 'actor')} --target_dir {_typed(saved / 'merged')}")
    if has_file:
        lines.insert(min(1, len(lines)), f"metrics: {typed / 'metrics.jsonl'}{_curves(folder)}")
        commands.append(f"verl report {_typed(typed)}")
    return lines + next_lines(commands)


def _curves(folder: Path) -> str:
    """Plot the learning curves, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return ""
    picture = folder / "curves.png"
    try:
        set_aside_irregular(picture)
        path = save_curves(folder / "metrics.jsonl", picture)
    except OSError as error:
        logger.warning("%s cannot be written: %s", picture, error)
        return ""
    except ValueError as error:  # a custom flow without the metrics that are plotted
        logger.debug("no curves: %s", error)
        return ""
    return f", {path.name}"


def next_lines(commands: Sequence[str]) -> list[str]:
    """Commands as the last lines of a summary."""
    return [f"{'' if i else 'next:':9}{command}" for i, command in enumerate(commands)]


def offline_commands(
    config: Any, model: Path, responses: Path, reward_given: bool = False, dataset: Any = None
) -> list[str]:
    """`verl generate` and `verl eval` with the data, chat template and reward function of a run, sampling as at
    validation. After SFT without validation data, `verl serve`: responses to the training data say little.

    Args:
        config: the configuration of an RL or SFT run.
        model: folder of the trained model.
        responses: file for the responses.
        reward_given: the reward was given as an object in Python, which no command can name.
        dataset: of the validation, otherwise of the training; it knows columns that were detected.

    Returns:
        The commands that can be given completely, at most two.
    """
    data, is_rl = config.data, isinstance(config, schema.Config)
    files = data.val_files or data.train_files
    if not is_rl and not data.val_files:
        return _serving(config, model)
    columns = _columns(data, dataset)
    # SFT: a column of chats contains the responses, so only a column of prompts is suitable
    if not files or not (is_rl or (columns["prompt_key"] and not data.prompt_dict_keys)):
        return []
    section = config.actor_rollout_ref.model if is_rl else config.model
    generation = _as_at_validation(config) if is_rl else {}
    data_keys = ("prompt_format", "apply_chat_template_kwargs", *schema.MediaSection.model_fields)
    settings = {"data.prompt_key": columns["prompt_key"]} | {f"data.{name}": data[name] for name in data_keys}
    model_keys = ("tokenizer_path", "trust_remote_code", "custom_chat_template")
    settings |= {f"model.{name}": section[name] for name in model_keys}
    settings |= {f"rollout.{name}": value for name, value in generation.items()} | {"imports": list(config.imports)}
    defaults = to_flat_dict(GenerationConfig())
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    path = {"model.path": _short_path(model), "data.path": _file(files[0]), "data.output_path": _short_path(responses)}
    commands = [_command("verl generate", path | changed)]
    # `verl eval` has no key for another column of ground truths
    has_truth = is_rl and columns["ground_truth_key"] == "answer"
    if has_truth and not reward_given and (scoring := _scoring(config)) is not None:
        same = {key: value for key, value in changed.items() if key in ("data.prompt_key", "imports")}
        commands.append(_command("verl eval", {"data.path": _short_path(responses)} | same | scoring))
    return commands


def _serving(config: schema.SFTConfig, model: Path) -> list[str]:
    """`verl serve` for a model; none if its chat template is a text, for which there is no option."""
    if config.model.custom_chat_template is not None:
        return []
    flags = ["--trust-remote-code"] if config.model.trust_remote_code else []
    flags += [word for name in config.imports for word in ("--imports", _file(name))]
    return [shlex.join(["verl", "serve", str(_short_path(model)), *flags])]


def _columns(data: Any, dataset: Any) -> dict[str, str | None]:
    """The columns that a run has read, set or detected: prompt_key; in RL also ground_truth_key."""
    dataset = datasets_of(dataset)[0]  # the commands read the first file
    if isinstance(dataset, TokenizedDataset) and not isinstance(dataset, RLHFDataset):  # an SFTDataset
        return {"prompt_key": dataset.prompt_column}
    section = dataset.config if isinstance(dataset, RLHFDataset) else data
    return {name: section[name] for name in ("prompt_key", "ground_truth_key") if name in type(section).model_fields}


def _as_at_validation(config: Any) -> dict[str, Any]:
    """Keys of `rollout` of `verl generate` with which it generates as validation does."""
    data, val = config.data, config.actor_rollout_ref.rollout.val_kwargs
    sampling = {name: val[name] for name in ("temperature", "top_k", "top_p")} if val.do_sample else {"temperature": 0}
    return {"prompt_length": data.max_prompt_length, "response_length": data.max_response_length} | sampling


def _scoring(config: Any) -> dict[str, Any] | None:
    """Keys of `verl eval` for the reward function of a run; None if it cannot evaluate with it."""
    reward = config.reward
    if reward.reward_model.enable or reward.reward_manager.source != "register":
        return None
    if reward.reward_function:
        return {"reward.reward_function": reward.reward_function}
    section, keys = "reward.custom_reward_function", {}
    if config.data.reward_fn_key != "data_source":
        keys["data.data_source_key"] = config.data.reward_fn_key
    function = reward.custom_reward_function
    if function.path:
        keys |= {f"{section}.path": _file(function.path), f"{section}.name": function.name}
        keys |= {f"{section}.reward_kwargs": function.reward_kwargs} if function.reward_kwargs else {}
    return keys


def _command(name: str, settings: Mapping[str, Any]) -> str:
    """A command line that a shell reads."""
    texts = {key: str(v) if isinstance(v, str | Path) else json.dumps(v) for key, v in settings.items()}
    return " ".join([name, *(shlex.quote(f"{key}={text}") for key, text in texts.items())])


def _file(name: str) -> str:
    """A file of a setting; a module or a hub name stays as it is."""
    return str(_short_path(Path(name))) if Path(name).is_absolute() else name


def _typed(path: Path) -> str:
    """A path as a word of a command line."""
    return shlex.quote(str(_short_path(path)))


def _short_path(path: Path) -> Path:
    """A path as the user would type it: relative to the working directory, if it is below."""
    path, folder = Path(path), Path.cwd()
    return path.relative_to(folder) if path.is_absolute() and path.is_relative_to(folder) else path
