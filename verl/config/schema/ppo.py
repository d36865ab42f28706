"""The whole configuration of an RL run, typed: one key, one default, one line of meaning.

    actor_rollout_ref   model, actor, ref, rollout          tree_model, tree_actor, tree_rollout
    critic              the value model                     tree_actor
    data, reward        prompts and scores                  tree_data
    algorithm, trainer  advantages; the run                 tree_trainer
    placement, ray_kwargs, imports                          tree_trainer

The keys and defaults are those that verl users' scripts have. Where a default differs, it is one that works in one
process: `rollout.name: native`, one process, the console as logger, `auto` for device and dtype.
"""

from typing import Any, ClassVar

from verl.config.aliases import RL
from verl.config.fields import Node, Texts, Tree, key, leaves, part
from verl.config.known_keys import KNOWN
from verl.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig, RefConfig
from verl.config.schema.data import DataConfig, RewardConfig
from verl.config.schema.model import EngineConfig, ModelConfig, OptimConfig
from verl.config.schema.rollout import RolloutConfig, ValSamplingConfig
from verl.config.schema.trainer import AlgorithmConfig, PlacementConfig, RayConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EngineConfig",
    "ModelConfig",
    "OptimConfig",
    "PlacementConfig",
    "PolicyLossConfig",
    "RayConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValSamplingConfig",
]


class ActorRolloutRefConfig(Node):
    """`actor_rollout_ref`: one model in its three roles."""

    hybrid_engine: bool = key(True, "policy and rollout live in the same processes")
    nccl_timeout: float | None = key(
        None, "seconds that a rank waits for the others in a collective; null: trainer.worker_timeout ends it", gt=0
    )
    model: ModelConfig = part(ModelConfig, "the model")
    actor: ActorConfig = part(ActorConfig, "its update")
    ref: RefConfig = part(RefConfig, "the frozen reference")
    rollout: RolloutConfig = part(RolloutConfig, "generation")


class Config(Tree):
    """The root."""

    dialect: ClassVar = RL
    known: ClassVar = KNOWN

    data: DataConfig = part(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = part(ActorRolloutRefConfig, "the policy")
    critic: CriticConfig = part(CriticConfig, "the value model")
    reward: RewardConfig = part(RewardConfig, "scores")
    algorithm: AlgorithmConfig = part(AlgorithmConfig, "advantages")
    trainer: TrainerConfig = part(TrainerConfig, "the run")
    placement: PlacementConfig = part(PlacementConfig, "roles on devices")
    imports: Texts = key([], "Python files or modules that every process imports first: one's own code")
    ray_kwargs: RayConfig = part(RayConfig, "how Ray is started")

    @classmethod
    def settle(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What nobody must say twice: a small batch is one mini-batch, and bypass_mode has a loss of that name."""
        loss, bypass = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.rollout_correction.bypass_mode"
        if loss not in given and given.get(bypass) in (True, "true", "True"):
            given = given | {loss: "bypass_mode"}
        batch = given.get("data.train_batch_size")
        batch = int(batch) if isinstance(batch, str) and batch.isdigit() else batch
        mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
        if mini in given or not isinstance(batch, int) or batch >= leaves(cls)[mini].default:
            return given
        return given | {mini: batch}
