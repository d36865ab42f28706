"""Checks of the models of a run and of the devices that compute them."""

from typing import TYPE_CHECKING

from verl.config import schema
from verl.engines.base import check_device
from verl.engines.loading import check_kernels, check_model
from verl.trainer.startup.roles import roles_of
from verl.utils.device import resolve_device

if TYPE_CHECKING:
    from verl.trainer.checks.preflight import Run


def model_configs(run: "Run") -> None:
    """The config of each model exists and accepts the overrides; LoRA finds its modules."""
    config = run.config
    if not isinstance(config, schema.Config):
        check_model(config.model, "causal_lm")
        return
    policy, critic, reward = config.actor_rollout_ref.model, config.critic.model, config.reward.reward_model
    check_model(policy, "causal_lm")
    if "critic" in roles_of(config):
        check_model(critic, "value")
    if reward.enable:
        section = schema.ModelConfig(path=reward.model_path, trust_remote_code=reward.trust_remote_code)
        check_model(section, "reward")


def devices(run: "Run") -> None:
    """The training engines and the chosen kernels run on the device."""
    config = run.config
    if run.backend == "ray":  # the nodes may differ from this host: the workers check
        return
    device = resolve_device(config.trainer.device)
    if isinstance(config, schema.SFTConfig):
        check_device(config.engine.strategy, device)
        check_kernels(config.model, device)
        return
    policy, roles = config.actor_rollout_ref, roles_of(config)
    check_device(policy.actor.strategy, device)
    check_kernels(policy.model, device)
    if "ref" in roles:
        check_device(policy.ref.strategy, device)
    if "critic" in roles:
        check_device(config.critic.strategy, device)
        check_kernels(config.critic.model, device)
