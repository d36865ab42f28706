"""The configuration of the algorithm, of the run, and of who executes it."""

from typing import Any, Literal

from verl.config.fields import FilePath, Node, Texts, key, part
from verl.config.schema.actor import KLEstimator


class KLControlConfig(Node):
    """`algorithm.kl_ctrl`: the weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = key("fixed", "keep the weight, or steer it towards target_kl")
    kl_coef: float = key(0.001, "weight (adaptive: at the start)", ge=0)
    horizon: int = key(10000, "adaptive: sequences over which the weight follows", gt=0)
    target_kl: float = key(0.1, "adaptive: KL aimed at", gt=0)


class FilterGroupsConfig(Node):
    """`algorithm.filter_groups`: dynamic sampling (DAPO), groups whose answers all score alike are sampled again."""

    enable: bool = key(False, "drop groups without a difference and sample others")
    metric: str = key("reward", "what is compared in a group: reward, or a value that the reward function returns")
    max_num_gen_batches: int = key(0, "at most so many generations for one step; 0: no limit", ge=0)
    at_limit: Literal["error", "fill"] = key(
        "error", "end the run there, or fill the step with groups without a difference, which teach nothing"
    )


class RolloutCorrectionConfig(Node):
    """`algorithm.rollout_correction`: weights and masks for the gap between sampler and trainer."""

    rollout_is: Literal["token", "sequence"] | None = key(None, "importance weights per token or sequence; null: none")
    rollout_is_threshold: float | str = key(2.0, "bound of the weights, or 'low_high' to zero those outside")
    rollout_rs: str | None = key(None, "rejection: a comma list such as token_k1,seq_mean_k3")
    rollout_rs_threshold: float | str | None = key(None, "bounds for rollout_rs, one or as many as modes")
    rollout_is_batch_normalize: bool = key(False, "scale the weights of a batch to mean 1")
    bypass_mode: bool = key(False, "take the sampler's log-probs as old log-probs")
    loss_type: Literal["ppo_clip", "reinforce"] = key("ppo_clip", "loss in bypass mode")


class PFPPOConfig(Node):
    """`algorithm.pf_ppo`: resampling of the batch by reward."""

    reweight_method: Literal["pow", "max_min", "max_random"] = key("pow", "how rows are weighted")
    weight_pow: float = key(2.0, "exponent of pow")


class AlgorithmConfig(Node):
    """`algorithm`: from scores to advantages."""

    name: str | None = key(None, "a preset: one word that sets the keys of a published algorithm")
    adv_estimator: str = key("gae", "registered name of the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", ge=0, le=1)
    lam: float = key(1.0, "lambda of GAE", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the standard deviation of the group (Dr.GRPO: false)")
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference from the reward")
    kl_penalty: KLEstimator = key("kl", "estimator of that KL")
    kl_ctrl: KLControlConfig = part(KLControlConfig, "weight of that KL")
    filter_groups: FilterGroupsConfig = part(FilterGroupsConfig, "dynamic sampling")
    rollout_correction: RolloutCorrectionConfig = part(RolloutCorrectionConfig, "gap between sampler and trainer")
    passk_k: int | None = key(None, "k of pass@k estimators; null: the published one", ge=1)
    passk_threshold: float | None = key(None, "analytic_passk: a score above this is a right answer; null: 0.5")
    f_norm: float | None = key(None, "gpg: divisor of the advantage; null: 1", gt=0)
    gdpo_reward_keys: Texts | None = key(None, "gdpo: the components of the reward, as the reward function names them")
    gdpo_reward_weights: list[float] | None = key(None, "gdpo: their weights; null: 1 each")
    reward_dpo_coef: float | None = key(None, "prime: weight of the process rewards; null: 5", ge=0)
    reward_gt_coef: float | None = key(None, "prime: weight of the outcome; null: 5", ge=0)
    sppo_beta: float | None = key(None, "sppo: sharpness of the softmean of a prompt's rewards; null: 1", gt=0)
    use_pf_ppo: bool = key(False, "resample the batch by reward")
    pf_ppo: PFPPOConfig = part(PFPPOConfig, "how it is resampled")
    shuffle_rewards: bool = key(False, "negative control: every answer gets the reward of another")


class RunConfig(Node):
    """What every trainer has: how long, under which name and where, on what, and when to validate and to save."""

    total_epochs: int = key(30, "passes over the training rows", ge=1)
    total_training_steps: int | None = key(None, "end after so many steps; null: total_epochs decides", ge=1)
    project_name: str = key("verl_examples", "name of the project for trackers and folders")
    experiment_name: str = key("gsm8k", "name of the run")
    default_local_dir: FilePath = key(
        "checkpoints/verl_examples/gsm8k",
        "folder of checkpoints and logs",
        follows="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    )
    logger: Texts = key(["console"], "where metrics go: console, jsonl, tensorboard, wandb, mlflow, swanlab")
    seed: int = key(42, "seed of everything random", ge=0)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: a GPU where there is one")
    backend: Literal["local", "ray"] = key("local", "who executes: this host, or a Ray cluster")
    nnodes: int = key(1, "number of hosts", ge=1)
    n_gpus_per_node: int = key(1, "processes per host, one for each GPU (or CPU rank)", ge=1)
    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate and stop")
    test_freq: int = key(-1, "validate every so many steps; -1: never", ge=-1)
    save_freq: int = key(-1, "checkpoint every so many steps; -1: never", ge=-1)
    max_skipped_steps: int = key(
        5, "end after so many steps without an update, as no gradient was finite; 0: never", ge=0
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key("auto", "go on from the newest checkpoint, or not")
    resume_from_path: FilePath | None = key(None, "the global_step_N folder of resume_path")


class TrainerConfig(RunConfig):
    """`trainer`: the run."""

    max_actor_ckpt_to_keep: int | None = key(None, "keep the newest so many checkpoints of the actor; null: all", ge=1)
    max_critic_ckpt_to_keep: int | None = key(None, "the same for the critic", ge=1)
    critic_warmup: int = key(0, "steps in which only the critic learns", ge=0)
    balance_batch: bool = key(True, "give every rank the same number of tokens")
    worker_timeout: float = key(3600.0, "seconds that one call of the workers may take before a hang is reported", gt=0)
    worker_env: dict[str, str] = key({}, "environment of the worker processes, such as NCCL_SOCKET_IFNAME")
    overlap: bool = key(False, "run independent operators of different resource pools at the same time")
    log_samples: int = key(0, "sampled answers shown now and then", ge=0)
    log_val_generations: int = key(0, "answers of a validation handed to the trackers", ge=0)
    rollout_data_dir: FilePath | None = key(None, "write the answers of each step here as JSONL")
    validation_data_dir: FilePath | None = key(None, "write the answers of each validation here as JSONL")


class PlacementConfig(Node):
    """`placement`: roles on devices of their own; null: together with the actor."""

    actor_devices: list[int] | None = key(None, "devices of the actor and its rollout")
    ref_devices: list[int] | None = key(None, "devices of the reference")
    critic_devices: list[int] | None = key(None, "devices of the critic")
    reward_devices: list[int] | None = key(None, "devices of the reward model")


class RayConfig(Node):
    """`ray_kwargs`: how Ray is started."""

    ray_init: dict[str, Any] = key({}, "arguments of ray.init, such as num_cpus and runtime_env")
    timeline_json_file: str | None = key(None, "write Ray's timeline here")
