"""LocalPPOTrainer: everything on this host, without Ray.

With one process (`trainer.n_gpus_per_node: 1`) all of it is *this* process: for laptops, notebooks and debuggers, where
a breakpoint just works. With more, the roles live in as many processes of this host, which share each model.
"""

from typing import Any

from verl.single_controller import colocate
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.roles import roles_of_actor
from verl.trainer.setup import check_one_host
from verl.utils.device import resolve_device


class LocalPPOTrainer(PPOTrainer):
    """Policy optimisation on one host.

    >>> LocalPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        trainer = self.config.trainer
        check_one_host(trainer)
        # of the last process: fewer GPUs than processes are found out now
        self.on_gpu = resolve_device(trainer.device, trainer.n_gpus_per_node - 1).type == "cuda"

    def init_workers(self) -> None:
        config, trainer = self.config, self.config.trainer
        specs = self.worker_specs()
        for placed in self.pools.values():
            pool = placed[0][1]
            # one process for everything is this one; several, or several pools, are processes of their own
            apart = pool.world_size > 1 or len(self.pools) > 1 or bool(trainer.worker_env)
            where = {
                "timeout": trainer.worker_timeout,
                "devices": pool.devices if self.on_gpu and apart else None,
                "env": trainer.worker_env,
                "apart": apart,
            }
            self.roles.update(colocate({role: specs[role] for role, _ in placed}, pool.world_size, **where))
        self.roles.update(dict.fromkeys(roles_of_actor(config), self.roles["actor"]))
