"""LocalPPOTrainer: everything on this host, without Ray.

With one process (`trainer.n_gpus_per_node: 1`) all of it is *this* process: for laptops, notebooks and debuggers, where
a breakpoint just works. With more, the roles live in as many processes of this host, which share each model.
"""

from verl.config import schema
from verl.engines.loading import check_kernels
from verl.single_controller import LocalWorkerGroup, WorkerSpec, colocate
from verl.single_controller.placement import ResourcePool
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.roles import roles_of, roles_of_actor, start_pools
from verl.trainer.setup import check_one_host
from verl.utils.device import resolve_device


class LocalPPOTrainer(PPOTrainer):
    """Policy optimisation on one host.

    >>> LocalPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()
    """

    def prepare_executor(self, config: schema.Config) -> None:
        trainer = config.trainer
        check_one_host(trainer)
        # of the last process: fewer GPUs than processes are found out now
        device = resolve_device(trainer.device, trainer.n_gpus_per_node - 1)
        self.on_gpu = device.type == "cuda"
        check_kernels(config.actor_rollout_ref.model, device)
        if "critic" in roles_of(config):
            check_kernels(config.critic.model, device)

    def init_workers(self) -> None:
        config, trainer = self.config, self.config.trainer

        def start(roles: dict[str, WorkerSpec], pool: ResourcePool) -> dict[str, LocalWorkerGroup]:
            # one process for everything is this one; several, or several pools, are processes of their own
            apart = pool.world_size > 1 or len(self.pools) > 1 or bool(trainer.worker_env)
            devices = pool.devices if self.on_gpu and apart else None
            where = {"timeout": trainer.worker_timeout, "devices": devices, "env": trainer.worker_env, "apart": apart}
            return colocate(roles, pool.world_size, **where)

        self.roles.update(start_pools(self.pools, self.specs, start))
        self.roles.update(dict.fromkeys(roles_of_actor(config), self.roles["actor"]))
