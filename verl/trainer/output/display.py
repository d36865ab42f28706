"""Console output of a run: a panel or one line per step, warnings about divergence, and a summary at the end."""

import importlib.util
import json
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from verl.checkpoints.atomic import set_aside_irregular
from verl.config import schema, to_flat_dict
from verl.config.schema.offline import GenerationConfig
from verl.data.mixture import datasets_of
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.protocol import DataProto
from verl.tracking.console import TrainingProgress
from verl.tracking.curves import read_metrics, save_curves
from verl.tracking.summary import Series, summary_lines
from verl.trainer.guards.interruption import Stopped
from verl.trainer.output.divergence import DivergenceWatch
from verl.utils import log

if TYPE_CHECKING:
    from verl.trainer.base import Trainer

logger = logging.getLogger("verl.trainer")

#: seconds between two choices of samples for the panel
_SAMPLE_SECONDS = 3.0
_SAMPLES = 2
_JSONL = {"jsonl", "file"}


class RunDisplay:
    """Context manager around the steps of a run. The tracker `console` turns on all but the warnings.

    Args:
        trainer: of the run.
        folder: of its record.
    """

    def __init__(self, trainer: "Trainer", folder: Path):
        self._trainer, self._folder = trainer, folder
        self._trackers = set(trainer.config.trainer.logger)
        self._watch = DivergenceWatch(prompts=None if trainer.val_dataset is None else len(trainer.val_dataset))
        self._start = time.monotonic()
        self._resumed = trainer.global_step  # 0: the run has not been resumed
        self._sampled = 0.0
        #: shows the steps; None without the tracker `console`
        self.progress: TrainingProgress | None = None
        if "console" in self._trackers:
            run = trainer.config.trainer
            self.progress = TrainingProgress(
                trainer.total_steps,
                f"{run.project_name}/{run.experiment_name}",
                print_every=1,
                quiet=False,
                details=False,
                running=trainer.running_operators,
            )

    def show_samples(self, batch: DataProto) -> None:
        """Show samples of a batch in the panel, if it is time for others."""
        if self.progress is None or not self.progress.is_live or time.monotonic() - self._sampled < _SAMPLE_SECONDS:
            return
        self._sampled = time.monotonic()
        rows = self._trainer.draw_samples(batch, _SAMPLES)
        self.progress.show_samples([(row["input"], row["output"], row["score"]) for row in rows])

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of divergence."""
        for line in self._watch.update(step, metrics):
            logger.warning("%s", line)

    def __enter__(self) -> "RunDisplay":
        if self.progress is not None:
            self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.progress is None:
            return
        self.progress.__exit__(kind, error, trace)
        at_once = isinstance(error, Stopped) and not error.finished  # plotting takes seconds
        if kind is None or (issubclass(kind, KeyboardInterrupt) and not at_once):
            for line in self.summary():
                log.steps.info("%s", line)

    def summary(self) -> list[str]:
        """Lines with the results so far, the paths of the run, and the next command."""
        trainer, history = self._trainer, self._watch.history
        seconds = time.monotonic() - self._start
        if history and self._resumed and self._trackers & _JSONL:
            history = self._with_earlier_steps(history)
        lines = summary_lines(history, trainer.global_step, trainer.total_steps, seconds, self._resumed)
        return [*lines, *self._results()] if lines else []

    def _with_earlier_steps(self, history: Mapping[str, Series]) -> Mapping[str, Series]:
        """The history with the steps before the resume, from metrics.jsonl."""
        try:
            recorded = read_metrics(self._folder / "metrics.jsonl")
        except (OSError, ValueError) as error:
            logger.warning("the summary has only the steps since the resume: %s", error)
            return history
        earlier = {name: [point for point in recorded[name] if point[0] <= self._resumed] for name in recorded}
        later = {name: [point for point in history[name] if point[0] > self._resumed] for name in history}
        return {name: earlier.get(name, []) + later.get(name, []) for name in earlier | later}

    def _results(self) -> list[str]:
        """Paths of the run, one per line, and what to do with the model."""
        lines, commands, folder = [], [], _shown(self._folder)
        is_trained = not self._trainer.config.trainer.val_only
        saved = self._trainer.checkpoints.newest() if is_trained else None
        model = None if saved is None else saved / "actor" / "huggingface"
        if model is not None and any(model.glob("*.safetensors")):
            lines.append(f"model:   {_shown(model)}")
            responses = self._trainer.folder / f"responses_{saved.name}.parquet"
            run = self._trainer.run
            val, train = run.inputs.val_dataset, run.inputs.train_dataset
            dataset = train if val is None else val
            commands += offline_commands(run.config, model, responses, run.reward_given, dataset)
        elif saved is not None:
            lines.append(f"checkpoint: {_shown(saved)}")
            commands.append(f"verl merge --local_dir {_typed(saved / 'actor')} --target_dir {_typed(saved / 'merged')}")
        if self._trackers & _JSONL:
            lines.insert(min(1, len(lines)), f"metrics: {folder / 'metrics.jsonl'}{self._curves()}")
            commands.append(f"verl report {_typed(folder)}")
        return lines + next_lines(commands)

    def _curves(self) -> str:
        """Plot the learning curves, if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return ""
        picture = self._folder / "curves.png"
        try:
            set_aside_irregular(picture)
            path = save_curves(self._folder / "metrics.jsonl", picture)
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
    wanted = {"data.prompt_key": columns["prompt_key"]} | {f"data.{name}": data[name] for name in data_keys}
    model_keys = ("tokenizer_path", "trust_remote_code", "custom_chat_template")
    wanted |= {f"model.{name}": section[name] for name in model_keys}
    wanted |= {f"rollout.{name}": value for name, value in generation.items()} | {"imports": list(config.imports)}
    defaults = to_flat_dict(GenerationConfig())
    changed = {key: value for key, value in wanted.items() if value != defaults[key]}
    path = {"model.path": _shown(model), "data.path": _file(files[0]), "data.output_path": _shown(responses)}
    commands = [_command("verl generate", path | changed)]
    # `verl eval` has no key for another column of ground truths
    has_truth = is_rl and columns["ground_truth_key"] == "answer"
    if has_truth and not reward_given and (scoring := _scoring(config)) is not None:
        same = {key: value for key, value in changed.items() if key in ("data.prompt_key", "imports")}
        commands.append(_command("verl eval", {"data.path": _shown(responses)} | same | scoring))
    return commands


def _serving(config: schema.SFTConfig, model: Path) -> list[str]:
    """`verl serve` for a model; none if its chat template is a text, for which there is no option."""
    if config.model.custom_chat_template is not None:
        return []
    flags = ["--trust-remote-code"] if config.model.trust_remote_code else []
    flags += [word for name in config.imports for word in ("--imports", _file(name))]
    return [shlex.join(["verl", "serve", str(_shown(model)), *flags])]


def _columns(data: Any, dataset: Any) -> dict[str, str | None]:
    """The columns that a run has read, set or detected: prompt_key; in RL also ground_truth_key."""
    dataset = datasets_of(dataset)[0]  # the commands read the first file
    if isinstance(dataset, SFTDataset):
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
    return str(_shown(Path(name))) if Path(name).is_absolute() else name


def _typed(path: Path) -> str:
    """A path as a word of a command line."""
    return shlex.quote(str(_shown(path)))


def _shown(path: Path) -> Path:
    """A path as the user would type it: relative to the working directory, if it is below."""
    path, here = Path(path), Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
