"""RayPPOTrainer: the same flow, its workers Ray actors on the nodes of a cluster."""

import os

import ray

from verl.config import schema
from verl.single_controller.placement import ResourcePool
from verl.single_controller.ray.group import colocate
from verl.single_controller.ray.placement import START_TIMEOUT, reserve
from verl.single_controller.ray.runtime_env import prepare_runtime_env
from verl.single_controller.worker import WorkerSpec
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.roles import roles_of_actor, start_pools

_ALONE_TIMEOUT = 3.0  # seconds
_ALONE = (
    "No cluster was there to join, so Ray was started for this run alone, on this host: start Ray on every node first "
    "(`ray start`), and name the cluster by RAY_ADDRESS or ray_kwargs.ray_init.address where this host is none of its "
    "nodes (docs/multinode.md); or lower trainer.nnodes or trainer.n_gpus_per_node"
)


class RayPPOTrainer(PPOTrainer):
    """Policy optimisation on a Ray cluster: nodes x processes in placement groups.

    >>> RayPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()

    A running cluster is used: that of a `ray.init` before, of ray_kwargs.ray_init.address or RAY_ADDRESS, or one that
    `ray start` made on this host. Otherwise (and with address=local) one is started here, and ended after `fit`.
    docs/multinode.md has the way to several nodes.
    """

    def prepare_executor(self, config: schema.Config) -> None:
        given = config.ray_kwargs.ray_init
        if given and ray.is_initialized():
            raise ValueError(
                f"ray_kwargs.ray_init sets {', '.join(given)}, but Ray is running in this process already, so that it "
                "would change nothing: give that to your own ray.init, or leave it out here"
            )
        self._ray_init = {"log_to_driver": True, "include_dashboard": False, **given}
        if given.get("runtime_env"):
            self._ray_init["runtime_env"] = prepare_runtime_env(given["runtime_env"])

    def init_workers(self) -> None:
        config, trainer = self.config, self.config.trainer
        self._started = not ray.is_initialized()
        can_grow = True
        if self._started:
            session = ray.init(**self._ray_init).address_info["session_dir"]
            can_grow = not session.endswith(f"_{os.getpid()}")  # Ray names a session after the process that started it
        # this host may have no GPU where the nodes do
        use_gpu = trainer.device == "cuda" or (trainer.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        # in this thread, which hears Ctrl-C; a Ray that was started here gives what it has at once, or never
        reserved = reserve(
            dict.fromkeys(placed[0][1] for placed in self.pools.values()),
            use_gpu=use_gpu,
            timeout=START_TIMEOUT if can_grow else _ALONE_TIMEOUT,
            advice="" if can_grow else _ALONE,
        )

        def start(specs: dict[str, WorkerSpec], pool: ResourcePool) -> dict[str, WorkerGroup]:
            how = {"use_gpu": use_gpu, "timeout": trainer.worker_timeout, "env": trainer.worker_env}
            return colocate(specs, pool, placement=reserved[pool], **how)

        self.roles.update(start_pools(self.pools, self.specs, start))
        self.roles.update(dict.fromkeys(roles_of_actor(config), self.roles["actor"]))

    def shutdown(self) -> None:
        super().shutdown()
        if self._started:
            ray.shutdown()
