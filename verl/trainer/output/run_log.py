"""Output of a run: the display, the trackers, and the record for `verl runs` and `verl report`."""

import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from verl.agents import SINGLE_TURN
from verl.config import differences, schema, to_flat_dict
from verl.config.fields import Schema, fields_of, plain_defaults
from verl.protocol import DataProto
from verl.rollout.request import FILTERS
from verl.single_controller.worker_group import take_spans
from verl.tracking.console import TrainingProgress
from verl.tracking.curves import read_metrics
from verl.tracking.formatting import Series, summary_lines
from verl.tracking.run_record import RunRecord
from verl.tracking.runs import read_about
from verl.tracking.trackers import Rows
from verl.tracking.tracking import Tracking
from verl.trainer.checks.agents import runs_tools
from verl.trainer.guards.interruption import Stopped
from verl.trainer.output.divergence import DivergenceWatch
from verl.trainer.startup.command_line import shell_command
from verl.trainer.state.identity import package_versions
from verl.trainer.view import RunView, StepReport
from verl.utils import log
from verl.utils.redaction import redact_text, redacted

logger = logging.getLogger("verl.trainer")

# ---- the last lines of a run ----------------------------------------------------------------------------------------

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
        commands += serve_command(view.config, model) + evaluation_commands(view.config, saved)
    elif saved is not None:
        lines.append(f"checkpoint: {_short_path(saved)}")
        commands.append(f"verl merge --local_dir {_typed(saved / 'actor')} --target_dir {_typed(saved / 'merged')}")
    if has_file:
        lines.insert(min(1, len(lines)), f"metrics: {typed / 'metrics.jsonl'}")
        commands.append(f"verl report {_typed(typed)}")
    return lines + next_lines(commands)


def next_lines(commands: Sequence[str]) -> list[str]:
    """Commands as the last lines of a summary."""
    return [f"{'' if i else 'next:':9}{command}" for i, command in enumerate(commands)]


def serve_command(config: Any, model: Path) -> list[str]:
    """`verl serve` for the trained model of a run; none for a reward model, or if its chat template is a text, which
    has no option."""
    if isinstance(config, schema.RMConfig):
        return []
    section = config.actor_rollout_ref.model if isinstance(config, schema.Config) else config.model
    if section.custom_chat_template is not None:
        return []
    flags = ["--trust-remote-code"] if section.trust_remote_code else []
    flags += [word for name in config.imports for word in ("--imports", _file(name))]
    return [shlex.join(["verl", "serve", str(_short_path(model)), *flags])]


def evaluation_commands(config: Any, checkpoint: Path) -> list[str]:
    """The commands that evaluate a model with the tools, agents or environments of its run; none without."""
    if not isinstance(config, schema.Config):
        return []
    policy, data, reward = config.actor_rollout_ref, config.data, config.reward
    if policy.rollout.agent.default_agent_loop in SINGLE_TURN or not data.val_files:
        return []
    changed = (reward.reward_manager, type(reward.reward_manager)()), (data.ground_truth_key, "answer")
    changed += (data.custom_cls.path, None), (policy.model.custom_chat_template, None)
    is_server = policy.rollout.mode == "server"
    if (
        reward.reward_model.enable
        or not (is_server or runs_tools(policy.rollout))
        or any(value != other for value, other in changed)
    ):
        return [f"verl train --config {_typed(checkpoint / 'config.yaml')} trainer.val_only=true"]
    val, responses = policy.rollout.val_kwargs, _file(str(checkpoint.with_name(f"responses_{checkpoint.name}.jsonl")))
    shared = ("rollout.", "model.trust", "data.", "trainer.device", "trainer.n_gpus", "imports")
    flat = to_flat_dict(config)
    keys = [key for key in fields_of(schema.GenerationConfig) if key.startswith(shared)]
    generation = {key: flat.get(key, flat.get(f"actor_rollout_ref.{key}")) for key in keys}
    generation |= {f"rollout.{name}": getattr(val, name, off) for name, off in FILTERS.items()}
    generation["rollout.temperature"] = val.temperature if val.do_sample else 0.0
    generation |= {"data.path": data.val_files, "data.max_samples": data.val_max_samples, "data.n_samples": val.n}
    generation |= {"data.output_path": responses, "model.path": str(checkpoint / "actor" / "huggingface")}
    scoring = {key: flat.get(key) for key in fields_of(schema.EvalConfig) if key.startswith("reward.")}
    if is_server and not reward.custom_reward_function.path:
        scoring["reward.reward_function"] = reward.reward_function or "agent_score"
    scoring |= {"data.path": [responses], "data.data_source_key": data.reward_fn_key, "imports": config.imports}
    return [_command("generate", schema.GenerationConfig, generation), _command("eval", schema.EvalConfig, scoring)]


def _command(name: str, kind: type[Schema], settings: Mapping[str, Any]) -> str:
    """A command with the settings that are not the default."""
    arguments, defaults = ["verl", name], plain_defaults(kind)
    for key, value in settings.items():
        if value is not None and value != defaults[key]:
            arguments.append(f"{key}={_file(value) if isinstance(value, str) else json.dumps(value)}")
    return shlex.join(arguments)


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


# ---- the log --------------------------------------------------------------------------------------------------------

#: seconds between two choices of samples for the panel
_SAMPLE_SECONDS = 3.0
_SAMPLES = 2


def warn_nothing_to_train(view: RunView) -> None:
    """Log why a run that resumes at its end has no further steps, and how to continue."""
    if view.step < view.total_steps:
        logger.warning(
            "nothing to train: the run ended at step %d of %d, because %s. To continue, raise "
            "trainer.early_stopping.patience, or set it to null",
            *(view.step, view.total_steps, view.end_reason),
        )
    else:
        logger.warning(
            "nothing to train: the checkpoint is at step %d and the run ends at step %d. To continue, raise "
            "trainer.total_training_steps or trainer.total_epochs; to start a fresh run, set a new "
            "trainer.experiment_name or trainer.default_local_dir (now %s)",
            *(view.step, view.total_steps, view.folder),
        )


#: subfolder for the record of `trainer.val_only=true` in the folder of a training run
VAL_ONLY = "val_only"


def record_folder(folder: Path, val_only: bool) -> Path:
    """The folder of the record of a run in `folder`. A validation (`trainer.val_only`) is no step of a training run,
    whose record is kept: its own is in a subfolder."""
    if not val_only or not any((folder / name).is_file() for name in ("run.json", "metrics.jsonl")):
        return folder
    is_validation = read_about(folder).get("config", {}).get("trainer.val_only") is True
    return folder if is_validation else folder / VAL_ONLY


def _tracker_name(name: str) -> str:
    """The name of a run in a service, where a value of the environment is the name of its variable."""
    return redact_text(name).replace("${oc.env:", "").replace("}", "")


class RunLog:
    """The log of a run. The tracker `console` adds a panel and a summary.

    Args:
        draw: (batch, count) -> samples of a batch, as rows of a table.
        record: batch -> what `verl report` shows of it.

    Attributes:
        record: context manager around the run, from before its workers start.
    """

    def __init__(
        self,
        view: RunView,
        draw: Callable[[DataProto, int], Rows],
        record: Callable[[DataProto], Mapping[str, Any]],
    ):
        self._view, self._draw, self._make_record = view, draw, record
        self._settings = trainer = view.config.trainer
        self._folder = record_folder(view.folder, trainer.val_only)
        self._flat, defaults = redacted(to_flat_dict(view.config)), to_flat_dict(type(view.config)())
        about = {
            "project": redact_text(trainer.project_name),
            "experiment": redact_text(trainer.experiment_name),
            "total_steps": view.total_steps,
            "command": redact_text(shell_command()),
            "packages": package_versions(),
            "config": self._flat,
            "changed": {key: {"value": self._flat[key], "default": defaults[key]} for key in differences(view.config)},
        }
        is_new = not view.run.is_recorded
        self.record = RunRecord(self._folder, about, view.run.warnings, lambda: view.step, is_new)
        dataset = view.run.inputs.val_dataset
        self._divergence = DivergenceWatch(prompts=None if dataset is None else len(dataset))
        self._count = self._settings.get("log_samples", 0)  # not in SFT
        self._sampled_at = 0.0  # when the panel got its samples
        self._progress: TrainingProgress | None = None
        self._tracking: Tracking

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Context of the steps, after the checkpoint is loaded."""
        view, settings, start = self._view, self._settings, time.monotonic()
        resumed = view.step  # 0: the run has not been resumed
        recorded = resumed if self._folder == view.folder else 0
        self.record.resume(recorded)
        view.run.is_recorded = True
        if "console" in settings.logger:
            title = f"{settings.project_name}/{settings.experiment_name}"
            running = view.running_operators
            self._progress = TrainingProgress(
                view.total_steps, title, print_every=1, quiet=False, details=False, running=running
            )
        try:
            with self._progress or nullcontext():
                self._tracking = Tracking(
                    settings.logger,
                    *map(_tracker_name, (settings.project_name, settings.experiment_name)),
                    config=self._flat,
                    default_local_dir=self._folder,
                    resume_step=recorded,
                    progress=self._progress,
                )
                with self._tracking:
                    yield
        except KeyboardInterrupt as stop:
            if not isinstance(stop, Stopped) or stop.finished:  # not at once: plotting takes seconds
                self._summarize(resumed, start)
            raise
        self._summarize(resumed, start)

    def _summarize(self, resumed: int, start: float) -> None:
        if self._progress is not None:
            seconds = time.monotonic() - start
            for line in run_summary(self._view, self._folder, self._divergence.history, resumed, seconds):
                log.steps.info("%s", line)

    def step(self, report: StepReport) -> None:
        """Log a step."""
        batch, step = report.batch, report.step
        progress, now = self._progress, time.monotonic()
        if progress is not None and progress.is_live and now - self._sampled_at >= _SAMPLE_SECONDS:
            self._sampled_at = now
            progress.show_samples([(row["input"], row["output"], row["score"]) for row in self._draw(batch, _SAMPLES)])
        self._log(step, report.metrics)
        if self._count:
            self._tracking.log_samples("train/generations", self._draw(batch, self._count), step)
        spans = take_spans(time.time() - report.metrics["timing_s/step"])
        start = min((span.start for span in spans), default=0.0)
        calls = [[*span[:4], round(span.start - start, 4), round(span.end - span.start, 4)] for span in spans]

        def record() -> dict[str, Any]:
            made = self._make_record(batch)
            return {**made, "calls": calls} if made else {}

        self.record.add_step(step, record, step == self._view.total_steps)

    def validation(self, metrics: Mapping[str, float], samples: Rows) -> None:
        """Log a validation."""
        self._log(self._view.step, metrics)
        self._tracking.log_samples("val/generations", samples, self._view.step)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracking.log(metrics, step)
        for line in self._divergence.update(step, metrics):
            logger.warning("%s", line)
