"""The `trainer`, `placement` and `ray_kwargs` sections: the run and where it is executed."""

from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Ge

from verl.config.fields import FilePath, Section, StrList, field, is_positive, is_set, other_than, section
from verl.config.naming import EXPERIMENT, PROJECT

_Steps = Annotated[int, Ge(-1)]


BestMode = Literal["auto", "max", "min"]


class EarlyStoppingConfig(Section):
    """`trainer.early_stopping`: on with `patience`."""

    patience: int | None = field(None, "end after this many validations in a row without improvement; null: off", ge=1)
    min_delta: float = field(0.0, "smallest change that counts as an improvement", ge=0)


class RunConfig(Section):
    """Fields of every trainer: length, name, output, executor, validation and checkpoints."""

    total_epochs: int = field(30, "training epochs", ge=1)
    total_training_steps: int | None = field(None, "number of training steps; null: by total_epochs", ge=1)
    project_name: str = field(
        PROJECT, "project name for trackers and folders; {data}: name of the data set", default_from=PROJECT
    )
    experiment_name: str = field(
        EXPERIMENT,
        "name of the run; {digest}: of the settings that define it (docs/checkpoints.md)",
        default_from=EXPERIMENT,
    )
    default_local_dir: FilePath = field(
        f"checkpoints/{PROJECT}/{EXPERIMENT}",
        "folder of checkpoints and logs",
        default_from="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    )
    logger: StrList = field(
        ["console", "jsonl"],
        "trackers: console, jsonl (files in default_local_dir), tensorboard, wandb, mlflow, swanlab",
    )
    log_level: Literal["debug", "info", "warning", "error"] | None = field(
        None, "level of log lines; steps are printed at any level; null: VERL_LOGGING_LEVEL, or info"
    )
    callbacks: StrList = field(
        [], "file.py:name of guards, or of functions of (view, report), called after each step (docs/custom_trainer.md)"
    )
    log_operators: bool | None = field(
        None, "log the seconds of each operator of each step; null: only LocalPPOTrainer does"
    )
    profile_steps: list[Annotated[int, Ge(1)]] | None = field(
        None, "steps of which every process writes a trace of torch.profiler (docs/scale.md#profile-a-step); null: none"
    )
    seed: int = field(42, "seed of all random number generators", ge=0, le=2**62)
    device: Literal["auto", "cpu", "cuda"] = field("auto", "auto: a GPU if there is one")
    backend: Literal["local", "ray"] = field("local", "executor: processes of this host, or a Ray cluster")
    nnodes: int = field(1, "number of hosts", ge=1)
    n_gpus_per_node: int = field(1, "processes per host, one per GPU (or CPU rank)", ge=1)
    worker_env: dict[str, str] = field(
        {},
        "environment variables of the workers, such as NCCL_SOCKET_IFNAME, and of processes of reward functions, tools "
        "and agents",
    )
    val_before_train: bool = field(True, "validate before the first step")
    val_only: bool = field(False, "validate and stop")
    test_freq: _Steps | Literal["after_each_epoch"] = field(
        -1, "validate every N steps, and after the last one; -1: never"
    )
    save_freq: _Steps | Literal["after_each_epoch"] = field(-1, "save a checkpoint every N steps; -1: never by step")
    save_at_end: bool = field(True, "save a checkpoint after the last step, and when SIGINT or SIGTERM ends the run")
    save_best: bool | str = field(
        False,
        "keep the checkpoint with the best value of this validation metric; true: the main one (docs/checkpoints.md)",
    )
    save_best_mode: BestMode = field(
        "auto",
        "whether the best value is the largest; auto: min for names ending in loss",
        active_when=(("save_best", other_than(False)), ("early_stopping.patience", is_set)),
    )
    early_stopping: EarlyStoppingConfig = section(
        EarlyStoppingConfig,
        "end the run when validation stops improving",
        active_when=("early_stopping.patience", is_set),
    )
    max_skipped_steps: int = field(
        5, "bad steps in a row after which on_bad_steps applies (docs/internals/trust.md); 0: never", ge=0
    )
    on_bad_steps: Literal["stop", "rollback"] = field(
        "stop", "after max_skipped_steps: stop, or return once to the last checkpoint and skip the prompts since then"
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = field(
        "auto", "resume from the newest checkpoint, not at all, or from resume_from_path"
    )
    allow_change: StrList = field(
        [],
        "differences from the checkpoint that a resumed run accepts: model, data, reward, code, or settings such as "
        "algorithm.adv_estimator (docs/checkpoints.md)",
        active_when=("resume_mode", other_than("disable")),
    )
    resume_from_path: FilePath | None = field(
        None, "the global_step_N folder to resume from (resume_path)", active_when=("resume_mode", "resume_path")
    )
    start_timeout: float = field(3600.0, "seconds for the workers to start and to load their models", gt=0)
    worker_timeout: float = field(
        3600.0, "maximum seconds of a wait, and the limit of an operator that has not run yet (docs/multinode.md)", gt=0
    )
    wait_factor: float | None = field(
        10.0, "a wait ends after this multiple of the operator's median duration; null: after worker_timeout", ge=1
    )
    wait_minimum: float = field(120.0, "smallest of these limits in seconds", active_when=("wait_factor", is_set), gt=0)
    max_restarts: int = field(
        0, "how often the run restarts from its newest checkpoint after a worker or a node is lost, or hangs", ge=0
    )
    allow_smaller: bool = field(
        False, "a restart may use fewer devices than before", active_when=("max_restarts", is_positive)
    )


class AsyncConfig(Section):
    """`trainer.async`: generation of the next batches during training, with `placement.rollout_devices`."""

    max_staleness: int = field(
        0, "maximum staleness of a sample, in updates; 0: generation and training alternate", ge=0, le=1000
    )
    partial_rollout: bool = field(
        True,
        "continue interrupted responses with new weights; false: a weight push waits for the running ones",
        active_when=("max_staleness", is_positive),
    )


# a keyword cannot be declared in the body of a class
_WithAsync = pydantic.create_model(
    "_WithAsync", __base__=RunConfig, **{"async": (AsyncConfig, section(AsyncConfig, "asynchronous training"))}
)


class TrainerConfig(_WithAsync):
    """`trainer`: the RL run."""

    max_actor_ckpt_to_keep: int | None = field(None, "number of actor checkpoints to keep; null: all", ge=1)
    max_critic_ckpt_to_keep: int | None = field(None, "number of critic checkpoints to keep; null: all", ge=1)
    critic_warmup: int = field(0, "steps in which only the critic is updated", ge=0)
    overlap: bool = field(False, "run independent operators of different resource pools concurrently")
    log_samples: int = field(0, "number of samples of each step sent to the trackers, drawn at random", ge=0)
    log_val_generations: int = field(0, "number of validation samples sent to the trackers", ge=0)
    log_tokens: int = field(
        4, "number of samples of each step whose tokens are recorded for `verl report`; 0: no record of steps", ge=0
    )
    rollout_data_dir: FilePath | None = field(None, "folder for the responses of each step (JSONL)")
    validation_data_dir: FilePath | None = field(None, "folder for the responses of each validation (JSONL)")

    @property
    def max_staleness(self) -> int:
        """`trainer.async.max_staleness`."""
        return self["async"].max_staleness


class PlacementConfig(Section):
    """`placement`: separate devices per role; null: on the devices of the actor.

    `placement: auto` sets `auto`.
    """

    actor_devices: list[int] | None = field(None, "devices of the actor and of roles that have none; null: all")
    rollout_devices: list[int] | None = field(None, "devices of the rollout engine")
    ref_devices: list[int] | None = field(None, "devices of the reference")
    critic_devices: list[int] | None = field(None, "devices of the critic")
    reward_devices: list[int] | None = field(None, "devices of the reward model")
    teacher_devices: list[int] | None = field(None, "devices of the teachers of distillation")
    local_roles: list[Literal["ref", "critic", "reward", "teacher"]] = field(
        [], "roles in the process that starts the run, such as [critic, ref]; the others run on trainer.backend"
    )
    auto: bool = field(False, "let the planner choose the devices of all roles, and the size of rollout engines")

    @property
    def devices(self) -> dict[str, list[int] | None]:
        """The keys `*_devices`."""
        return self.model_dump(exclude={"auto", "local_roles"})


class RayConfig(Section):
    """`ray_kwargs`: how Ray is started."""

    ray_init: dict[str, Any] = field({}, "arguments of ray.init, such as num_cpus and runtime_env")
