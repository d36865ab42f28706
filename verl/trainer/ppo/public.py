"""Programs of public verl that build their trainer themselves: roles, pools and worker classes as arguments.

    mapping = {Role.ActorRollout: ray.remote(MyWorker), Role.Critic: ray.remote(CriticWorker)}
    pools = ResourcePoolManager({"global": [8] * 2}, {role: "global" for role in mapping})
    trainer = RayPPOTrainer(config, tokenizer, role_worker_mapping=mapping, resource_pool_manager=pools)
    trainer.init_workers()
    trainer.fit()

A class of `verl.workers.public` is the worker that the role has anyway; a subclass of it replaces that worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler

from verl.config import load_section
from verl.config.public.objects import plain_config
from verl.registry import load_object
from verl.single_controller import Worker, WorkerSpec
from verl.trainer.startup.inputs import dataset_of_files, load_sampler

WorkerType = type[Worker]


class Role(Enum):
    """Roles of public verl; the value is the name that their workers receive. `Role("critic")` is Role.Critic."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"

    def __str__(self) -> str:
        return self.value

    from_string = classmethod(lambda cls, name: cls(name))


#: by name, since programs define this enumeration themselves, too
_ROLES = {"Actor": "actor", "ActorRollout": "actor", "ActorRolloutRef": "actor", "Rollout": "rollout"}
_ROLES |= {"Critic": "critic", "RefPolicy": "ref", "RewardModel": "reward"}


def role_of(role: Any) -> str:
    """The role of a run that a role of public verl is. Raises ValueError if there is none."""
    if role.name not in _ROLES:
        raise ValueError(f"role_worker_mapping: {role} is no role of a PPO run: expected one of {', '.join(_ROLES)}")
    return _ROLES[role.name]


def with_workers(specs: Mapping[str, WorkerSpec], role_worker_mapping: Mapping[Any, Any]) -> dict[str, WorkerSpec]:
    """Replace the workers of the roles for which the mapping has another class than those of `verl.workers.public`.
    Raises ValueError for a class that is no subclass of these, or a role that the configuration does not use."""
    from verl.single_controller.ray.public import class_of
    from verl.workers import public

    replaced = dict(specs)
    bases = {"actor": public.ActorRolloutRefWorker, "ref": public.ActorRolloutRefWorker}
    bases |= {"critic": public.CriticWorker, "reward": public.RewardModelWorker}
    for role, cls in role_worker_mapping.items():
        name, cls = role_of(role), class_of(cls)
        base = bases.get(name)
        if cls is base:
            continue
        if base is None or not issubclass(cls, base):
            expected = f"a subclass of {base.__module__}.{base.__name__}" if base else "no class: it has its own worker"
            raise ValueError(f"role_worker_mapping: {role}: expected {expected}, found {cls.__name__}")
        if name not in specs:
            raise ValueError(f"role_worker_mapping: {role}: {cls.__name__}, but this configuration has no such worker")
        settings = dict(specs[name].kwargs)
        kwargs = {"config": settings.pop("config")}
        if base is public.ActorRolloutRefWorker:
            kwargs["role"] = "ref" if name == "ref" else "actor_rollout"
        replaced[name] = replace(specs[name], cls=cls, kwargs=kwargs, attributes={"settings": settings})
    return replaced


def placement_of(pools: Any) -> dict[str, Any]:
    """The settings that place roles as a ResourcePoolManager does. Raises ValueError for pools over different nodes, or
    nodes with different numbers of processes."""
    spec = {name: list(processes) for name, processes in pools.resource_pool_spec.items()}
    nodes = {len(processes) for processes in spec.values()}
    uneven = any(len(set(processes)) > 1 for processes in spec.values())
    if len(nodes) != 1 or uneven:
        raise ValueError(
            f"resource_pool_spec: expected pools over the same nodes, with equal numbers on each, found {spec}: "
            "set placement.actor_devices and its siblings instead"
        )
    nnodes, per_node = nodes.pop(), sum(processes[0] for processes in spec.values())
    settings: dict[str, Any] = {"trainer.nnodes": nnodes, "trainer.n_gpus_per_node": per_node}
    if len(spec) == 1:
        return settings
    first, devices = 0, {}
    for name, processes in spec.items():
        local = range(first, first + processes[0])
        devices[name] = [node * per_node + device for node in range(nnodes) for device in local]
        first += processes[0]
    return settings | {f"placement.{role_of(role)}_devices": devices[pool] for role, pool in pools.mapping.items()}


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: Any,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """The dataset of files: RLHFDataset, or the class of `data.custom_cls`. is_train has no effect."""
    paths = [data_paths] if isinstance(data_paths, str) else list(data_paths)
    data = load_section("data", plain_config(data_config))
    return dataset_of_files(data, paths, max_samples, tokenizer, processor)


def create_rl_sampler(data_config: Any, dataset: Dataset) -> Sampler[int]:
    """The sampler of `data.sampler`, or one by `data.shuffle` and `data.seed`."""
    data = load_section("data", plain_config(data_config))
    custom = load_sampler(data, dataset)
    if custom is not None:
        return custom
    if not data.shuffle:
        return SequentialSampler(dataset)
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(data.seed))


def custom_sampler(sampler: Sampler[int] | None) -> Sampler[int] | None:
    """None for the samplers of `create_rl_sampler` that repeat `data.shuffle`."""
    return None if type(sampler) in (RandomSampler, SequentialSampler) else sampler


class TaskRunner:
    """The main program of public verl. A subclass replaces workers, pools, or the whole of `run`.

    Attributes:
        role_worker_mapping: role -> worker class; roles that are not in it have their own workers.
        mapping: role -> pool.
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Any, Any] = {}
        self.mapping: dict[Any, str] = {}

    def add_actor_rollout_worker(self, config: Any) -> tuple[type, type]:
        """Add the worker class of the actor. Returns it and the class of worker groups."""
        from verl.single_controller.ray.public import RayWorkerGroup
        from verl.workers.public import ActorRolloutRefWorker

        self.role_worker_mapping[Role.ActorRollout] = ActorRolloutRefWorker
        return ActorRolloutRefWorker, RayWorkerGroup

    def add_critic_worker(self, config: Any) -> None:
        """The critic has its own worker."""

    def add_reward_model_worker(self, config: Any) -> None:
        """The reward model has its own worker."""

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: type) -> None:
        """The reference policy has its own worker."""

    def init_resource_pool_mgr(self, config: Any) -> Any:
        """The pools; None: all devices for all roles, unless the configuration has a placement."""

    def run(self, config: Any) -> None:
        """Train. config: a DictConfig, or a dictionary."""
        trainer_class = load_object("verl.trainer.ray_trainer", "RayPPOTrainer")
        actor, _ = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, actor)
        pools = self.init_resource_pool_mgr(config)
        workers = self.role_worker_mapping
        trainer_class(config, role_worker_mapping=workers, resource_pool_manager=pools).fit()


def run_ppo(config: Any, task_runner_class: Any = TaskRunner) -> None:
    """Train with a configuration of public verl. task_runner_class: a TaskRunner, or `ray.remote` of one."""
    from verl.single_controller.ray.public import class_of

    class_of(task_runner_class)().run(config)


def migrate_legacy_reward_impl(config: Any) -> Any:
    """Return the configuration: older names of reward settings are read as they are."""
    return config


def is_distillation_enabled(config: Any) -> bool:
    """Whether the section `distillation` trains on the log-probs of teachers."""
    return config is not None and bool(config.enabled)


def need_teacher_policy(config: Any) -> bool:
    """The same of a whole configuration."""
    return is_distillation_enabled(config.get("distillation"))
