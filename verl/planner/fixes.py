"""The smallest change that makes a plan fit: settings in the order of what they cost, alone and then combined."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from verl.planner.devices import Device
from verl.planner.placement import Plan, is_possible, plan_groups
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
#: (tensor, pipeline) sizes of Megatron, by what they cost
MEGATRON_SIZES = ((2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))


@dataclass(frozen=True)
class Change:
    """A change of the settings.

    Attributes:
        settings: the overrides, such as "actor_rollout_ref.model.enable_gradient_checkpointing=true".
        factor: how many times as many devices.
        apply: the job with that change.
    """

    settings: tuple[str, ...]
    apply: Callable[[Job], Job]
    factor: int = 1


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
    single = list(_changes(job, device))
    combined = [c for i in range(2, len(single) + 1) for c in [_joined(single[:i])]]
    harmless = [change for change in single if change.factor == 1 and "lora" not in change.settings[0]]
    everything = _joined(harmless)
    more = [Change((), lambda job: job, factor) for factor in (2, 4, 8, 16, 32, 64, 128)]
    lora = _lora(job)
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
    def apply(job: Job) -> Job:
        for change in changes:
            job = change.apply(job)
        return job

    settings: dict[str, str] = {}
    factor = 1
    for change in changes:
        settings |= {setting.partition("=")[0]: setting for setting in change.settings}
        factor *= change.factor
    return Change(tuple(settings.values()), apply, factor)


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
                yield Change(
                    (f"{_ROLLOUT}gpu_memory_utilization={share}",), lambda job, s=share: replace(job, memory_share=s)
                )
    if any(job.role(name).checkpointing is not True for name in trained):
        yield _of_roles(job, trained, {"checkpointing": True}, _MODEL, "enable_gradient_checkpointing")
    if job.model_parallel:
        yield from _megatron_sizes(job)
    elif device.kind == "cuda":
        frozen = [role.name for role in job.roles if not role.trains and role.name in _SECTION]
        if frozen:
            yield _of_roles(job, frozen, {"param_offload": True}, _SECTION, "param_offload")
        yield _of_roles(job, trained, {"optimizer_offload": True}, _SECTION, "optimizer_offload")
        yield _of_roles(job, trained, {"param_offload": True}, _SECTION, "param_offload")
    if device.kind == "cuda":
        for tensor in (2, 4, 8):
            if tensor > job.rollout_tensor:
                setting = f"{_ROLLOUT}tensor_model_parallel_size={tensor}"
                yield Change((setting,), lambda job, t=tensor: replace(job, rollout_tensor=t))


def _megatron_sizes(job: Job) -> Iterator[Change]:
    """Divide the models of all roles into more shards."""
    names = [role.name for role in job.roles if role.name in MEGATRON_SECTION]
    now = job.role("actor").layout
    for tensor, pipeline in MEGATRON_SIZES:
        if tensor < now.tensor or pipeline < now.pipeline or tensor * pipeline == now.tensor * now.pipeline:
            continue
        sizes = {"tensor": tensor, "pipeline": pipeline}

        def apply(job: Job, sizes: dict[str, int] = sizes) -> Job:
            for role in job.roles:
                job = job.with_role(role.name, layout=replace(role.layout, **sizes))
            return job

        settings = [f"{key}_model_parallel_size={size}" for key, size in sizes.items()]
        yield Change(tuple(f"{MEGATRON_SECTION[name]}.{text}" for name in names for text in settings), apply)


def _of_roles(job: Job, names: Sequence[str], values: dict[str, object], keys: dict[str, str], last: str) -> Change:
    """Set an attribute of roles, which is the key `last` of their sections, to true."""

    def apply(job: Job) -> Job:
        for name in names:
            job = job.with_role(name, **values)
        return job

    return Change(tuple(f"{keys[name]}.{last}=true" for name in names), apply)


def _micro_tokens(job: Job, tokens: int) -> Change:
    """Limit the tokens of every micro-batch. Sizes by sequences are replaced."""
    settings = []
    for role in job.roles:
        if role.name in _UPDATE and _is_more(role.update_tokens, tokens):
            key = _UPDATE[role.name]
            settings += [f"{key}.use_dynamic_bsz=true", f"{key}.ppo_max_token_len_per_gpu={tokens}"]
        infers = role.name != "actor" or job.old_log_probs
        if role.name in _INFER and infers and _is_more(role.infer_tokens, tokens):
            dynamic, limit = _INFER[role.name]
            settings += [f"{dynamic}=true", f"{limit}={tokens}"]

    def apply(job: Job) -> Job:
        for role in job.roles:
            update = tokens if role.update_tokens is None else min(tokens, role.update_tokens)
            infer = tokens if role.infer_tokens is None else min(tokens, role.infer_tokens)
            job = job.with_role(role.name, update_tokens=update, infer_tokens=infer)
        return job

    return Change(tuple(dict.fromkeys(settings)), apply)


def _is_more(current: int | None, tokens: int) -> bool:
    return current is None or current > tokens


def _lora(job: Job) -> list[Change]:
    """Train adapters instead of all weights, if no role is tensor-parallel."""
    trained = [role for role in job.roles if role.trains]
    if any(role.lora_rank or role.layout.tensor > 1 for role in trained) or job.model_parallel:
        return []

    def apply(job: Job) -> Job:
        for role in trained:
            job = job.with_role(role.name, lora_rank=LORA_RANK)
        return job

    return [Change(tuple(f"{_MODEL[role.name]}.lora_rank={LORA_RANK}" for role in trained), apply)]


def describe(change: Change, plan: Plan) -> str:
    """Such as "set a=1 b=2" or "use 4 devices"."""
    steps = []
    if change.settings:
        steps.append("set " + " ".join(change.settings))
    if change.factor > 1:
        steps.append(f"use {plan.devices} devices")
    return " and ".join(steps)
