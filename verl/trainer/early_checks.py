"""What is refused in the first second: all that the settings and the configs of the models can tell.

The tokenizer, the data and the weights, which may take minutes, are read after this.
"""

from verl.config import schema
from verl.data.rlhf_dataset import RLHFDataset
from verl.engines.loading import check_model
from verl.tracking.tracking import check_trackers
from verl.trainer import setup
from verl.trainer.roles import pools_of, roles_of
from verl.trainer.rollout_correction import check_correction


def check_early(config: schema.Config) -> None:
    """Raise ValueError, or what a file of the user's raises, for settings that cannot be run."""
    check_trackers(config.trainer.logger)
    setup.check_folders(config.trainer)
    setup.check_critic_setting(config)
    setup.check_reward_model(config)
    setup.check_settings(config)
    setup.check_group_size(config)
    check_correction(config)
    pools_of(config, roles_of(config))
    setup.dataset_class(config, RLHFDataset)
    _check_models(config)


def _check_models(config: schema.Config) -> None:
    """The config of each model is there and takes the overrides; adapters find their modules."""
    policy, reward = config.actor_rollout_ref.model, config.reward.reward_model
    models = {"actor": (policy, "causal_lm"), "critic": (config.critic.model, "value")}
    for role, (model, kind) in models.items():
        if role in roles_of(config):
            check_model_section(model, kind)
    if reward.enable:
        section = schema.ModelConfig(path=reward.model_path, trust_remote_code=reward.trust_remote_code)
        check_model(section, "reward")


def check_model_section(model: schema.ModelConfig, kind: str) -> None:
    """Raise ValueError for a `model` section whose model cannot be built. kind: as in `EngineSpec`."""
    check_model(model, kind)
