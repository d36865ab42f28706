"""The smallest change that makes a plan fit: settings in the order of what they cost, alone and then combined."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.planner.devices import Device
from verl.planner.placement import Plan, is_possible, plan_groups
from verl.planner.search import MEGATRON_SIZES
from verl.planner.workload import Job

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
LORA_RANK = 32


@dataclass(frozen=True)
class Change:
    """A change of the settings.

    Attributes:
        settings: key -> value, such as "actor_rollout_ref.model.enable_gradient_checkpointing" -> "true".
        roles: role -> its attributes with that change.
        job: the attributes of the job.
        factor: how many times as many devices.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    factor: int = 1

    def apply(self, job: Job) -> Job:
        """The job with this change."""
        for name, values in self.roles.items():
            job = job.with_role(name, **values)
        return replace(job, **self.job)


def smallest_change(job: Job, device: Device, groups: Groups) -> tuple[Change, Plan] | None:
    """The first change that makes the plan of `groups` fit, by the same model, and the plan with it."""
    return first_that_fits(job, device, lambda change: plan_with(change, job, device, groups))


def first_that_fits(job: Job, device: Device, plan_of: Callable[[Change], Plan | None]) -> tuple[Change, Plan] | None:
    """The first change whose plan fits, and that plan.

    Changes of one setting come first, then settings that cost speed but not results, combined in their order, then
    these with LoRA and with more devices.

    Args:
        job: the run that does not fit.
        device: the device.
        plan_of: the plan with a change; None if there is none.
    """
    single = [change for change in _changes(job, device) if change.settings]
    combined = [_joined(single[:count]) for count in range(2, len(single) + 1)]
    everything, lora = _joined(single), _lora(job)
    more = [Change(factor=factor) for factor in (2, 4, 8, 16, 32, 64, 128)]
    last = [_joined([everything, change]) for change in [*lora, *more]]
    last += [_joined([everything, *lora, change]) for change in more]
    for change in (*single, *lora, *more[:1], *combined, *more[1:], *last):
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


def _joined(changes: Sequence[Change]) -> Change:
    """One change; of an attribute that several of them change, the last one counts."""
    settings: dict[str, str] = {}
    roles: dict[str, dict[str, Any]] = {}
    attributes: dict[str, Any] = {}
    for change in changes:
        settings |= change.settings
        attributes |= change.job
        for name, values in change.roles.items():
            roles[name] = roles.get(name, {}) | values
    return Change(settings, roles, attributes, math.prod(change.factor for change in changes))


def _changes(job: Job, device: Device) -> Iterator[Change]:
    """Changes that keep the results, the cheapest first."""
    trained = [role.name for role in job.roles if role.trains]
    least = -(-job.length // 256) * 256
    for tokens in (16384, 8192, 4096, 2048):
        if tokens >= least:
            yield _micro_tokens(job, tokens)
    if least > 2048:
        yield _micro_tokens(job, least)
    if job.traits.own_memory_share:
        for share in (0.5, 0.4, 0.3, 0.2, 0.1):
            if share < job.memory_share:
                yield Change({f"{_ROLLOUT}gpu_memory_utilization": str(share)}, job={"memory_share": share})
    if any(job.role(name).checkpointing is not True for name in trained):
        keys = [f"{_MODEL[name]}.enable_gradient_checkpointing" for name in trained]
        yield Change(dict.fromkeys(keys, "true"), {name: {"checkpointing": True} for name in trained})
    if job.model_parallel:
        yield from _megatron_sizes(job)
    elif device.kind == "cuda":
        frozen = [role.name for role in job.roles if not role.trains and role.name in _SECTION]
        offloads = [(frozen, "param_offload"), (trained, "optimizer_offload"), (trained, "param_offload")]
        for names, key in offloads:
            settings = {f"{_SECTION[name]}.{key}": "true" for name in names}
            yield Change(settings, {name: {key: True} for name in names})
    if device.kind == "cuda":
        for tensor in (2, 4, 8):
            if tensor > job.rollout_tensor:
                setting = {f"{_ROLLOUT}tensor_model_parallel_size": str(tensor)}
                yield Change(setting, job={"rollout_tensor": tensor})


def _megatron_sizes(job: Job) -> Iterator[Change]:
    """Divide the models of all roles into more shards."""
    sections = [MEGATRON_SECTION[role.name] for role in job.roles if role.name in MEGATRON_SECTION]
    now = job.role("actor").layout
    for tensor, pipeline in MEGATRON_SIZES:
        if tensor < now.tensor or pipeline < now.pipeline or tensor * pipeline == now.tensor * now.pipeline:
            continue
        sizes = {"tensor": tensor, "pipeline": pipeline}
        settings = {f"{key}.{name}_model_parallel_size": str(n) for key in sections for name, n in sizes.items()}
        yield Change(settings, {role.name: {"layout": replace(role.layout, **sizes)} for role in job.roles})


def _micro_tokens(job: Job, tokens: int) -> Change:
    """Limit the tokens of every micro-batch. Sizes by sequences are replaced."""
    settings, roles = {}, {}
    for role in job.roles:
        update, infer = (min(tokens, size or tokens) for size in (role.update_tokens, role.infer_tokens))
        roles[role.name] = {"update_tokens": update, "infer_tokens": infer}
        if role.name in _UPDATE and update != role.update_tokens:
            key = _UPDATE[role.name]
            settings |= {f"{key}.use_dynamic_bsz": "true", f"{key}.ppo_max_token_len_per_gpu": str(tokens)}
        infers = role.name != "actor" or job.old_log_probs
        if role.name in _INFER and infers and infer != role.infer_tokens:
            dynamic, limit = _INFER[role.name]
            settings |= {dynamic: "true", limit: str(tokens)}
    return Change(settings, roles)


def _lora(job: Job) -> list[Change]:
    """Train adapters instead of all weights, if no role is tensor-parallel."""
    trained = [role for role in job.roles if role.trains]
    if any(role.lora_rank or role.layout.tensor > 1 for role in trained) or job.model_parallel:
        return []
    settings = {f"{_MODEL[role.name]}.lora_rank": str(LORA_RANK) for role in trained}
    return [Change(settings, {role.name: {"lora_rank": LORA_RANK} for role in trained})]


def describe(change: Change, plan: Plan) -> str:
    """Such as "set a=1 b=2" or "use 4 devices"."""
    settings = " ".join(f"{key}={value}" for key, value in change.settings.items())
    devices = f"use {plan.devices} devices" if change.factor > 1 else ""
    return " and ".join(filter(None, [settings and f"set {settings}", devices]))
