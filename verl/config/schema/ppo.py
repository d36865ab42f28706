"""The configuration of an RL run: `load_config()`.

Keys and defaults are those of the scripts of verl users. Defaults that differ work in one process: the rollout engine
`native`, one process, the console as logger, `auto` for device and dtype.
"""

from typing import Any, ClassVar

from verl.config.fields import Section, StrList, field, fields_of, section
from verl.config.naming import RunSchema
from verl.config.public.aliases import RL
from verl.config.schema.actor import ActorConfig, CriticConfig, RefConfig
from verl.config.schema.algorithm import AlgorithmConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.distillation import DistillationConfig
from verl.config.schema.model import ModelConfig
from verl.config.schema.reward import RewardConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.trainer import PlacementConfig, RayConfig, TrainerConfig


class ActorRolloutRefConfig(Section):
    """`actor_rollout_ref`: the policy as actor, rollout and reference."""

    hybrid_engine: bool = field(True, "actor and rollout share processes; false: the rollout has separate devices")
    nccl_timeout: float | None = field(
        None, "timeout of collectives in seconds; null: trainer.worker_timeout applies", gt=0
    )
    model: ModelConfig = section(ModelConfig, "the model")
    actor: ActorConfig = section(ActorConfig, "the policy update")
    ref: RefConfig = section(RefConfig, "the frozen reference")
    rollout: RolloutConfig = section(RolloutConfig, "generation")


class Config(RunSchema):
    """The root of an RL configuration."""

    aliases: ClassVar = RL
    upstream: ClassVar = "ppo"

    data: DataConfig = section(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "the policy")
    critic: CriticConfig = section(CriticConfig, "the value model")
    reward: RewardConfig = section(RewardConfig, "how responses are scored")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "from scores to advantages")
    distillation: DistillationConfig = section(
        DistillationConfig, "teachers of the policy", active_when=("distillation.enabled", True)
    )
    trainer: TrainerConfig = section(TrainerConfig, "the run")
    placement: PlacementConfig = section(PlacementConfig, "devices of the roles")
    imports: StrList = field([], "Python files or modules that every process imports first (custom code)")
    ray_kwargs: RayConfig = section(RayConfig, "how Ray is started", active_when=("trainer.backend", "ray"))

    @property
    def rollout_is_separate(self) -> bool:
        """Whether the rollout has separate devices, other than the actor's."""
        rollout, actor = self.placement.rollout_devices, self.placement.actor_devices
        everywhere = range(self.trainer.nnodes * self.trainer.n_gpus_per_node)
        return rollout is not None and set(rollout) != set(everywhere if actor is None else actor)

    @classmethod
    def derive(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """A batch smaller than the default mini-batch is one mini-batch; bypass_mode selects the loss of that name, and
        multi_turn.enable and mode=server the agent loops tool_agent and server_agent; rollout.nnodes adds devices."""
        settings = _with_rollout_hosts(settings)
        rollout = "actor_rollout_ref.rollout."
        loop, loss = rollout + "agent.default_agent_loop", "actor_rollout_ref.actor.policy_loss.loss_mode"
        for key, cause, values, value in (
            (loop, rollout + "multi_turn.enable", _TRUE, "tool_agent"),
            (loop, rollout + "mode", ("server",), "server_agent"),
            (loss, "algorithm.rollout_correction.bypass_mode", _TRUE, "bypass_mode"),
        ):
            if key not in settings and settings.get(cause) in values:
                settings = settings | {key: value}
        batch = settings.get("data.train_batch_size")
        batch = int(batch) if isinstance(batch, str) and batch.isdigit() else batch
        mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
        if mini in settings or not isinstance(batch, int) or batch >= fields_of(cls)[mini].default:
            return settings
        return settings | {mini: batch}


#: before validation
_TRUE = (True, "true", "True")


def _with_rollout_hosts(settings: dict[str, Any]) -> dict[str, Any]:
    """Set `placement` and the size of the run from `rollout.nnodes`, unless `placement.rollout_devices` is set. One
    host for training and one for the rollout are the same host; equal numbers of hosts with other numbers of processes
    run both."""
    rollout, devices = "actor_rollout_ref.rollout.", "placement.rollout_devices"
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node", rollout + "nnodes", rollout + "n_gpus_per_node")
    sizes = [str(settings.get(key) or default) for key, default in zip(keys, (1, 1, 0, 0))]
    if not all(map(str.isdigit, sizes)) or int(sizes[2]) == 0 or settings.get(devices) is not None:
        return settings
    hosts, gpus, rollout_hosts, rollout_gpus = map(int, sizes)
    rollout_gpus = rollout_gpus or gpus
    if hosts == rollout_hosts and (hosts == 1 or gpus != rollout_gpus):
        per_host = gpus + rollout_gpus
        size = {"trainer.n_gpus_per_node": per_host}
        actor = [rank for rank in range(hosts * per_host) if rank % per_host < gpus]
        generating = [rank for rank in range(hosts * per_host) if rank % per_host >= gpus]
    elif gpus == rollout_gpus:
        size = {"trainer.nnodes": hosts + rollout_hosts}
        actor = list(range(hosts * gpus))
        generating = list(range(hosts * gpus, (hosts + rollout_hosts) * gpus))
    else:
        return settings  # rejected by the checks
    return settings | size | {"placement.actor_devices": actor, devices: generating}
