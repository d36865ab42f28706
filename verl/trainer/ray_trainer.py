"""RayPPOTrainer: PPOTrainer on a Ray cluster (docs/multinode.md)."""

from collections.abc import Mapping
from typing import Any

from verl.data.collate import collate_fn as default_collate_fn
from verl.single_controller import WorkerSpec
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.startup.arguments import with_settings

#: attribute of public verl's trainer -> its name here
_RENAMED = {"global_steps": "global_step", "total_training_steps": "total_steps", "_save_checkpoint": "save"}
_RENAMED |= {"_load_checkpoint": "load"}
_OF_PUBLIC = {"async_rollout_manager", "train_dataloader", "val_dataloader", "checkpoint_manager", "_balance_batch"}
_OF_PUBLIC |= {"use_critic", "use_reference_policy", "use_rm", "reward_fn", "val_reward_fn", "resource_pool_to_cls"}


class RayPPOTrainer(PPOTrainer):
    """Policy optimization on a Ray cluster.

        RayPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()

    Args:
        role_worker_mapping: role -> worker class of public verl (`verl.trainer.ppo.public`); None: those of the roles.
        resource_pool_manager: the pools of the roles; None: trainer.nnodes, trainer.n_gpus_per_node and `placement`.
        collate_fn: that of public verl; another one is an error.
        ray_worker_group_cls, processor, device_name: accepted from programs for public verl, and not used: the groups
            are those of Ray, the processor that of the model, the device trainer.device.
        Otherwise as for `PPOTrainer`.
    """

    backend = "ray"

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        role_worker_mapping: Mapping[Any, Any] | None = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        **arguments: Any,
    ):
        self.role_worker_mapping, self._starts = role_worker_mapping, False
        if collate_fn not in (None, default_collate_fn):
            raise ValueError(
                "collate_fn: prompts are collated by verl.data.collate.PromptCollator, so another one has no effect: "
                "return what the batch needs from the items of a custom dataset (data.custom_cls)"
            )
        if role_worker_mapping is not None or resource_pool_manager is not None:
            from verl.trainer.ppo import public

            config, train_sampler = public.plain_config(config), public.custom_sampler(train_sampler)
            if resource_pool_manager is not None:
                settings = public.placement_of(resource_pool_manager)
                arguments["overrides"] = with_settings(arguments.get("overrides", ()), settings)
        super().__init__(
            config,
            tokenizer=tokenizer,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            train_sampler=train_sampler,
            **arguments,
        )

    def __getattr__(self, name: str) -> Any:
        """Attributes of public verl's trainer under their names here. AttributeError that says what to use instead."""
        if name in _RENAMED:
            return getattr(self, _RENAMED[name])
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.endswith("_wg") or name in _OF_PUBLIC:
            text += (
                ": it is part of public verl's `fit`: edit the flow (build_flow, docs/custom_trainer.md); a custom "
                "`fit` calls start(), step() for each step, and shutdown(); worker groups are self.roles"
            )
        raise AttributeError(text, name=name, obj=self)

    def worker_specs(self) -> dict[str, WorkerSpec]:
        specs = super().worker_specs()
        if not self.role_worker_mapping:
            return specs
        from verl.trainer.ppo.public import with_workers

        return with_workers(specs, self.role_worker_mapping)

    def start(self) -> None:
        self._starts = True
        super().start()

    def init_workers(self) -> None:
        """Start the workers. A program for public verl calls it before `fit`, which then has nothing to start."""
        if self.role_worker_mapping is not None and not self._starts:
            self.start()
            return
        super().init_workers()
        for role, spec in self.specs.items():
            if "settings" in spec.attributes:  # a worker of public verl, which loads its model now
                self.roles[role].init_model()
