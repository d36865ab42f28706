"""RayPPOTrainer: the same flow, its workers Ray actors on the nodes of a cluster."""

import ray

from verl.single_controller.ray_group import colocate
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.roles import pools_of, roles_of_actor


class RayPPOTrainer(PPOTrainer):
    """Policy optimisation on a Ray cluster: nodes x processes in placement groups.

    >>> RayPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()

    A running cluster is used: that of a `ray.init` before, of ray_kwargs.ray_init.address or RAY_ADDRESS, or one that
    `ray start` made on this host. Otherwise (and with address=local) one is started here, and ended after `fit`.
    """

    def init_workers(self) -> None:
        config = self.config
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(**{"log_to_driver": True, "include_dashboard": False, **config.ray_kwargs.ray_init})
        specs = self.worker_specs()
        # this host may have no GPU where the nodes do
        use_gpu = config.trainer.device == "cuda" or (
            config.trainer.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        )
        for placed in pools_of(config, list(specs)).values():
            roles = {role: specs[role] for role, _ in placed}
            self.roles.update(colocate(roles, placed[0][1], use_gpu=use_gpu, timeout=config.trainer.worker_timeout))
        self.roles.update(dict.fromkeys(roles_of_actor(config), self.roles["actor"]))

    def shutdown(self) -> None:
        super().shutdown()
        if self._started:
            ray.shutdown()
