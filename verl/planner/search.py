"""The best placement of the roles on N devices (HybridFlow, Sheng et al. 2024, arXiv 2409.19256, algorithm 1).

For every set partition of the roles, every allocation of devices to its sets and every layout of the models, the cost
model of `placement` gives the seconds of a step; the fastest placement that fits into memory wins. Layouts are chosen
once per (set, devices). An allocation that another one beats with fewer devices in every stage is dropped, and a branch
ends when even the fastest rest cannot beat the best placement so far: the result is that of brute force.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any

from verl.planner.devices import Device
from verl.planner.placement import STAGES, Group, Plan, is_possible, plan_groups, step_seconds
from verl.planner.workload import Job, Layout, Role

#: (tensor, pipeline) sizes of Megatron: tensor parallelism stays in a node, pipelines begin where it ends
MEGATRON_SIZES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))
ROLLOUT_SIZES = (1, 2, 4, 8)
#: plans within this factor of the fastest one are a tie: the error of the model is larger
NEAR = 1.05
#: largest number of different sizes that are tried for a group
MOST_SIZES = 64

Partition = tuple[tuple[str, ...], ...]


def partitions(names: Sequence[str]) -> Iterator[Partition]:
    """All set partitions of the names; their number is the Bell number. The first name is in the first set."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for mask in range(2 ** len(rest)):
        together = tuple(name for i, name in enumerate(rest) if not mask >> i & 1)
        others = [name for i, name in enumerate(rest) if mask >> i & 1]
        for tail in partitions(others):
            yield ((first, *together), *tail)


def sizes_up_to(devices: int, per_node: int) -> list[int]:
    """Sizes of a group that are tried: all within a node, then whole nodes, then multiples of several nodes."""
    small = list(range(1, min(devices, per_node) + 1))
    unit = per_node * max(1, -(-devices // (per_node * MOST_SIZES)))
    return small + [size for size in range(unit, devices + 1, unit) if size > per_node]


@dataclass(eq=False, repr=False)
class Search:
    """Finds placements of a job on devices of one kind.

    Args:
        job: the run, without a role `rollout`. In asynchronous training it gets one, on separate devices.
        rollout_sizes: tensor-parallel sizes of the rollout.
        model_sizes: (tensor, pipeline) sizes of training; None: those of the job.
        same_sizes: all models of a group have the same ones, also if they differ in shape.
    """

    job: Job
    device: Device
    rollout_sizes: tuple[int, ...] = ROLLOUT_SIZES
    model_sizes: tuple[tuple[int, int], ...] | None = None
    same_sizes: bool = False

    def __post_init__(self) -> None:
        self._names = self.job.names
        if self.job.overlaps:
            rollout = replace(self.job.role("actor"), name="rollout", trains=False)
            self.job = replace(self.job, roles=(*self.job.roles, rollout))
        self.group = functools.cache(self.group)

    def partitions(self) -> list[Partition]:
        """The partitions to try. In asynchronous training the rollout is alone; otherwise it would idle in training."""
        alone = (("rollout",),) if self.job.overlaps else ()
        return [(*partition, *alone) for partition in partitions(self._names)]

    def group(self, names: tuple[str, ...], devices: int) -> Group | None:
        """The fastest layout of these roles on this many devices that fits; None if there is none. Cached."""
        groups = [
            Group(job, self.device, tuple(roles), self._generator(job, roles))
            for job, roles in self._layouts(names, devices)
        ]
        fastest_first = sorted(groups, key=lambda group: sum(seconds for _, seconds in group.seconds.values()))
        return next((group for group in fastest_first if group.peak[1] <= self.device.available(devices)), None)

    def _generator(self, job: Job, roles: list[Role]) -> Role:
        """The role that generates. On other devices, only their number matters, and that little: as many as here."""
        if job.overlaps:
            return replace(job.role("rollout"), layout=Layout(roles[0].layout.devices))
        return next((role for role in roles if role.name == "actor"), roles[0])

    def _layouts(self, names: tuple[str, ...], devices: int) -> Iterator[tuple[Job, list[Role]]]:
        """Every layout of the roles. Models of one shape have one layout."""
        tensors = (self.job.rollout_tensor,)
        if self.job.generator in names:
            tensors = self.rollout_sizes if self.job.traits.tensor_parallel else (1,)
        roles = [self.job.role(name) for name in names]
        shapes = list(dict.fromkeys(role.shape for role in roles))
        if self.same_sizes:
            layouts = ((sizes,) * len(shapes) for sizes in self._sizes(devices))
        else:
            layouts = product(self._sizes(devices), repeat=len(shapes))
        for sizes in layouts:
            placed = []
            for role in roles:
                parallel = sizes[shapes.index(role.shape)]
                is_rollout = role.name == "rollout"
                layout = Layout(devices) if is_rollout else replace(role.layout, devices=devices, **parallel)
                placed.append(replace(role, layout=layout))
            heads, kv_heads = placed[0].shape.heads, placed[0].shape.kv_heads
            for tensor in tensors:
                job = replace(self.job, rollout_tensor=tensor)
                splits = heads % tensor == 0 and kv_heads % tensor == 0 and tensor <= self.device.per_node
                if splits and all(is_possible(job, role) for role in placed):
                    yield job, placed

    def _sizes(self, devices: int) -> list[dict[str, Any]]:
        """The sizes of model parallelism, as attributes of a layout; without an entry, that of the role."""
        if self.model_sizes is None:
            return [{}]
        pairs = [(t, p) for t, p in self.model_sizes if devices % (t * p) == 0 and t <= self.device.per_node]
        return [{"tensor": tensor, "pipeline": pipeline} for tensor, pipeline in pairs]

    # ---- allocations ------------------------------------------------------------------------------------------------

    def candidates(self, names: tuple[str, ...], devices: int) -> list[Group]:
        """The groups of all sizes that fit, without those that are not faster than a smaller one."""
        kept: list[Group] = []
        for size in sizes_up_to(devices, self.device.per_node):
            group = self.group(names, size)
            if group is not None and not any(
                all(ours <= theirs for ours, theirs in zip(smaller.stages, group.stages)) for smaller in kept
            ):
                kept.append(group)
        return kept

    def best_of(self, partition: Partition, devices: int, limit: float = float("inf")) -> Plan | None:
        """The fastest allocation of at most `devices` devices to the sets of a partition, if it is below `limit`."""
        options = [self.candidates(names, devices) for names in partition]
        if not all(options):
            return None
        fewest = [min(group.devices for group in groups) for groups in options]
        fastest = [tuple(map(min, zip(*(group.stages for group in groups)))) for groups in options]
        best: list[tuple[float, list[Group]]] = [(limit, [])]

        def extend(groups: list[Group], left: int, stages: tuple[float, ...]) -> None:
            depth = len(groups)
            if depth == len(options):
                seconds = step_seconds(stages, self.job, self.device)
                if seconds < best[0][0]:
                    best[0] = (seconds, list(groups))
                return
            reserved = sum(fewest[depth + 1 :])
            rest = [fastest[i] for i in range(depth + 1, len(options))]
            for group in reversed(options[depth]):
                if group.devices > left - reserved:
                    continue
                now = tuple(map(max, stages, group.stages))
                bound = tuple(max(column) for column in zip(now, *rest))
                if step_seconds(bound, self.job, self.device) < best[0][0]:
                    extend([*groups, group], left - group.devices, now)

        extend([], devices, (0.0,) * len(STAGES))
        groups = best[0][1]
        if not groups:
            return None
        owner = next(group for group in groups if self.job.generator in group.names)
        return Plan(owner.job, self.device, tuple(groups))

    def plans(self, devices: int, count: int = 2) -> list[Plan]:
        """The fastest plan of each partition, the best first: the best `count`, and all within 5 % of the best."""
        plans: list[Plan] = []
        limit = float("inf")
        for partition in self.partitions():
            plan = self.best_of(partition, devices, limit)
            if plan is not None:
                plans = sorted([*plans, plan], key=lambda plan: plan.seconds)
                near = sum(plan.seconds <= NEAR * plans[0].seconds for plan in plans)
                plans = plans[: max(count, near)]
                limit = max(plans[count - 1].seconds, NEAR * plans[0].seconds) if len(plans) >= count else limit
        return plans


def preferred(plans: Sequence[Plan]) -> Plan:
    """The simplest of the plans within 5 % of the fastest one, which is the first."""
    near = [plan for plan in plans if plan.seconds <= NEAR * plans[0].seconds]
    return min(near, key=lambda plan: (plan.complexity, plan.seconds))


# ---- the smallest change that fits ----------------------------------------------------------------------------------

Groups = Sequence[tuple[Sequence[str], int]]

_ROLLOUT = "actor_rollout_ref.rollout."
_POLICY = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref"}
_VALUE = {"critic": "critic", "reward": "reward.reward_model"}
_SECTION = {name: f"{section}.fsdp_config" for name, section in _POLICY.items()}
_SECTION |= {name: f"{section}.fsdp" for name, section in _VALUE.items()}
MEGATRON_SECTION = {name: f"{section}.megatron" for name, section in (_POLICY | {"critic": "critic"}).items()}
_UPDATE = {"actor": "actor_rollout_ref.actor", "critic": "critic"}
_MODEL = {"actor": "actor_rollout_ref.model", "critic": "critic.model"}
#: role -> the keys of the micro-batches of its forward passes: by tokens, how many
_INFER = {
    "actor": (f"{_ROLLOUT}log_prob_use_dynamic_bsz", f"{_ROLLOUT}log_prob_max_token_len_per_gpu"),
    "ref": tuple(f"{_POLICY['ref']}.log_prob_{name}" for name in ("use_dynamic_bsz", "max_token_len_per_gpu")),
    **{
        name: (f"{section}.use_dynamic_bsz", f"{section}.forward_max_token_len_per_gpu")
        for name, section in _VALUE.items()
    },
}


@dataclass(frozen=True)
class Change:
    """A change of the settings.

    Attributes:
        settings: key -> value, such as "actor_rollout_ref.model.enable_gradient_checkpointing" -> "true".
        apply: the job -> the job with this change.
        factor: how many times as many devices.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    apply: Callable[[Job], Job] = lambda job: job
    factor: int = 1


def smallest_change(plan: Plan) -> tuple[Change, Plan] | None:
    """The first change that makes a plan fit, by the same model, and the plan with it."""
    groups = [(group.names, group.devices) for group in plan.groups]
    return first_that_fits(plan.job, plan.device, lambda change: plan_with(change, plan.job, plan.device, groups))


def first_that_fits(job: Job, device: Device, plan_of: Callable[[Change], Plan | None]) -> tuple[Change, Plan] | None:
    """The first change whose plan fits, and that plan.

    Changes of one setting, which cost speed but not results, come first, then the first ones together, then more
    devices, without and with all of them.

    Args:
        job: the run that does not fit.
        plan_of: the plan with a change; None if there is none.
    """
    single = [change for change in _changes(job, device) if change.settings]
    together = list(accumulate(single, _both))
    more = [Change(factor=factor) for factor in (2, 4, 8, 16, 32, 64, 128)]
    last = [_both(everything, change) for everything in together[-1:] for change in more]
    for change in (*single, *more[:1], *together[1:], *more[1:], *last):
        plan = plan_of(change)
        if plan is not None and plan.fits:
            return change, plan
    return None


def plan_with(change: Change, job: Job, device: Device, groups: Groups) -> Plan | None:
    """The plan with a change; None if the change is not possible."""
    changed = change.apply(job)
    placed = [(names, devices * change.factor) for names, devices in groups]
    roles = [changed.role(name).on(devices) for names, devices in placed for name in names]
    if not all(is_possible(changed, role) for role in roles):
        return None
    return plan_groups(changed, device, placed)


def _both(first: Change, second: Change) -> Change:
    """One change after the other."""
    settings = {**first.settings, **second.settings}
    return Change(settings, lambda job: second.apply(first.apply(job)), first.factor * second.factor)


def _of_roles(names: Sequence[str], settings: Mapping[str, str], **values: Any) -> Change:
    return Change(settings, lambda job: job.with_roles(names, **values))


def _changes(job: Job, device: Device) -> Iterator[Change]:
    """Changes that keep the results, the cheapest first."""
    trained = [role.name for role in job.roles if role.trains]
    least = -(-job.length // 256) * 256
    for tokens in (16384, 8192, 4096, max(2048, least)):
        if tokens >= least:
            yield _micro_tokens(job, tokens)
    if job.traits.own_memory_share:
        for share in (0.5, 0.4, 0.3, 0.2, 0.1):
            if share < job.memory_share:
                yield _of_job(f"{_ROLLOUT}gpu_memory_utilization", memory_share=share)
    if any(job.role(name).checkpointing is not True for name in trained):
        settings = {f"{_MODEL[name]}.enable_gradient_checkpointing": "true" for name in trained}
        yield _of_roles(trained, settings, checkpointing=True)
    if job.model_parallel:
        yield from _megatron_sizes(job)
    elif device.kind == "cuda":
        frozen = [role.name for role in job.roles if not role.trains and role.name in _SECTION]
        for names, key in ((frozen, "param_offload"), (trained, "optimizer_offload"), (trained, "param_offload")):
            yield _of_roles(names, {f"{_SECTION[name]}.{key}": "true" for name in names}, **{key: True})
    if device.kind == "cuda":
        for tensor in (2, 4, 8):
            if tensor > job.rollout_tensor:
                yield _of_job(f"{_ROLLOUT}tensor_model_parallel_size", rollout_tensor=tensor)


def _of_job(key: str, **values: Any) -> Change:
    return Change(dict.fromkeys([key], str(*values.values())), lambda job: replace(job, **values))


def _megatron_sizes(job: Job) -> Iterator[Change]:
    """Divide the models of all roles into more shards."""
    sections = [MEGATRON_SECTION[role.name] for role in job.roles if role.name in MEGATRON_SECTION]
    now = job.role("actor").layout
    for tensor, pipeline in MEGATRON_SIZES:
        if tensor < now.tensor or pipeline < now.pipeline or tensor * pipeline == now.tensor * now.pipeline:
            continue
        sizes = {"tensor": tensor, "pipeline": pipeline}
        settings = {f"{key}.{name}_model_parallel_size": str(n) for key in sections for name, n in sizes.items()}

        def divide(job: Job, sizes: Mapping[str, int] = sizes) -> Job:
            return replace(job, roles=tuple(replace(x, layout=replace(x.layout, **sizes)) for x in job.roles))

        yield Change(settings, divide)


def _micro_tokens(job: Job, tokens: int) -> Change:
    """Limit the tokens of every micro-batch. Sizes by sequences are replaced."""

    def limit(role: Role) -> Role:
        update, infer = (min(tokens, size or tokens) for size in (role.update_tokens, role.infer_tokens))
        return replace(role, update_tokens=update, infer_tokens=infer)

    settings = {}
    for role in job.roles:
        if role.name in _UPDATE and limit(role).update_tokens != role.update_tokens:
            key = _UPDATE[role.name]
            settings |= {f"{key}.use_dynamic_bsz": "true", f"{key}.ppo_max_token_len_per_gpu": str(tokens)}
        infers = role.name != "actor" or job.old_log_probs
        if role.name in _INFER and infers and limit(role).infer_tokens != role.infer_tokens:
            settings |= dict(zip(_INFER[role.name], ("true", str(tokens))))
    return Change(settings, lambda job: replace(job, roles=tuple(map(limit, job.roles))))
