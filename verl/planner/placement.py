"""The cost of a placement: memory of every group of devices, and seconds of the stages of a step.

Inside a group of devices, latencies add up; across groups, the slowest counts; stages add up (HybridFlow, Sheng et al.
2024, arXiv 2409.19256, section 6). In asynchronous training the rollout generates on separate devices during
preparation and training, and a weight push interrupts it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from verl.planner import step_time
from verl.planner.devices import Device
from verl.planner.memory import Items, group_memory, optimizer_bytes, total, weights
from verl.planner.workload import Job, Role

#: roles that only run forward passes -> their operator
_SCORES = {"ref": "ref", "reward": "rm", "cost": "cost", "teacher": "teacher"}
#: a push is a stage of asynchronous steps only; otherwise it is a part of training
STAGES = ("generation", "preparation", "training", "push")


@dataclass(frozen=True)
class Group:
    """Devices that roles share.

    Attributes:
        job: the run, with the tensor-parallel size of the rollout.
        roles: the roles, with their layouts, all of them on the same number of devices.
        generator: the role that generates, here or on other devices.
    """

    job: Job
    device: Device
    roles: tuple[Role, ...]
    generator: Role

    @property
    def devices(self) -> int:
        return self.roles[0].layout.devices

    @cached_property
    def memory(self) -> Mapping[str, Items]:
        """Phase -> what -> bytes per device."""
        return group_memory(self.job, self.device, self.roles)

    @cached_property
    def seconds(self) -> Mapping[str, tuple[str, float]]:
        """Operator -> (stage, seconds)."""
        return role_seconds(self.job, self.device, self.roles, self.generator)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.roles)

    @cached_property
    def stages(self) -> tuple[float, ...]:
        """Seconds of each stage."""
        return tuple(sum(s for name, s in self.seconds.values() if name == stage) for stage in STAGES)

    @cached_property
    def peak(self) -> tuple[str, float]:
        """(phase, bytes) of the phase that needs most memory."""
        phase = max(self.memory, key=lambda phase: total(self.memory[phase]))
        return phase, total(self.memory[phase])


@dataclass(frozen=True)
class Plan:
    """A placement with its cost.

    Attributes:
        job: the run, with the tensor-parallel size of the rollout.
        groups: the groups, the actor's first.
        concurrent: whether groups work at the same time (trainer.overlap).
        placed: the devices of each group; None: one after the other, from 0.
    """

    job: Job
    device: Device
    groups: tuple[Group, ...]
    concurrent: bool = True
    placed: Sequence[Sequence[int]] | None = None

    @cached_property
    def stages(self) -> tuple[float, ...]:
        """Seconds of each stage of a step."""
        combine = max if self.concurrent else sum
        return tuple(combine(group.stages[i] for group in self.groups) for i in range(len(STAGES)))

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step."""
        return step_seconds(self.stages, self.job, self.device)

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @property
    def numbers(self) -> Sequence[Sequence[int]]:
        """The devices of each group."""
        if self.placed is not None:
            return self.placed
        ends = list(accumulate(group.devices for group in self.groups))
        return [range(end - group.devices, end) for group, end in zip(self.groups, ends)]

    @property
    def overlaps_roles(self) -> bool:
        """Whether groups have work for the same stage, which `trainer.overlap` lets them do at the same time."""
        return sum(group.names != ("rollout",) for group in self.groups) > 1

    @cached_property
    def peak(self) -> float:
        """Bytes of the device that needs most."""
        return max(group.peak[1] for group in self.groups)

    @property
    def fits(self) -> bool:
        return self.peak <= self.available

    @property
    def available(self) -> float:
        """Bytes of memory that one process may use."""
        return self.device.available(self.devices)

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Of two plans that are equally fast, the lower one is simpler: groups, sizes of model parallelism, devices."""
        layouts = [role.layout for group in self.groups for role in group.roles if role.name != "rollout"]
        sizes = [layout.tensor * layout.pipeline * layout.sequence * layout.expert for layout in layouts]
        return len(self.groups), max(sizes) * self.job.rollout_tensor, self.devices


def step_seconds(stages: Sequence[float], job: Job, device: Device) -> float:
    """Seconds of a step from those of its stages."""
    generation, preparation, training, push = stages
    busy = max(generation, preparation + training) if job.overlaps else generation + preparation + training
    return busy + push + device.step_seconds


def role_seconds(job: Job, device: Device, roles: Sequence[Role], generator: Role) -> dict[str, tuple[str, float]]:
    """Operator -> (stage, seconds)."""
    operators: dict[str, tuple[str, float]] = {}
    taken = sum(weights(job, role) + optimizer_bytes(job, role) for role in roles if role.name != "rollout")
    for role in roles:
        if role.name == job.generator:
            operators["gen"] = ("generation", step_time.generation_seconds(job, role, device, taken))
        if role.name == "actor":
            if job.old_log_probs:
                operators["old_log_prob"] = ("preparation", step_time.infer_seconds(job, role, device))
            operators["update_actor"] = ("training", step_time.update_seconds(job, role, device, taken))
            stage = "push" if job.overlaps else "training"
            operators["sync_weights"] = (stage, step_time.push_seconds(job, role, device, generator))
        elif role.name == "critic":
            operators["values"] = ("preparation", step_time.infer_seconds(job, role, device))
            operators["update_critic"] = ("training", step_time.update_seconds(job, role, device, taken))
        elif role.name in _SCORES:
            name = _SCORES[role.name]
            operators[name] = ("preparation", step_time.infer_seconds(job, role, device))
    return operators


def is_possible(job: Job, role: Role) -> bool:
    """Whether the layout divides the model and, for a strict job, the batch."""
    if not role.layout.is_possible(role.shape):
        return False
    if role.name == job.generator and role.layout.devices % job.rollout_tensor:
        return False
    if not job.strict or role.name == "rollout":  # prompts are spread over any number of engines
        return True
    return job.responses // role.updates % role.layout.data == 0


def plan_groups(job: Job, device: Device, groups: Sequence[tuple[Sequence[str], int]], concurrent: bool = True) -> Plan:
    """The plan of groups [(role names, devices), ...] with the layouts of the job's roles."""
    placed = [[job.role(name).on(count) for name in names] for names, count in groups]
    generator = next(role for roles in placed for role in roles if role.name == job.generator)
    return Plan(job, device, tuple(Group(job, device, tuple(roles), generator) for roles in placed), concurrent)
