"""A plan as text: memory per phase, seconds of a step, and the comparison of placements."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from verl.planner.devices import GIB
from verl.planner.memory import PHASES, total
from verl.planner.placement import STAGES, Group, Plan
from verl.planner.search import NEAR, Change, preferred
from verl.planner.workload import Layout
from verl.single_controller.cluster import format_devices

#: columns of a terminal
WIDTH = 80

#: what the memory of GPUs does not contain (docs/scaling.md)
CACHED = "free blocks that the allocator keeps are not counted: 13 to 16 % in records"

#: columns of the memory table -> items that they sum
COLUMNS = {
    "weights": ("weights", "gathered weights", "rollout weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits, working memory"),
    "KV": ("KV cache",),
    "other": ("buffers", "process"),
}


def gib(size: float) -> str:
    """Such as "12.3"; smaller sizes with more digits."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def table(rows: Sequence[Sequence[str]], spaces: int = 2) -> list[str]:
    """Aligned columns: the first one to the left, with `spaces` between them."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        (" " * spaces).join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def memory_lines(plan: Plan) -> list[str]:
    """Memory per device in each phase, one table per group."""
    lines = []
    for group in plan.groups:
        rows = [["GiB per device", *COLUMNS, "total"]]
        for phase in PHASES:
            if phase in group.memory:
                items = group.memory[phase]
                sums = [sum(items.get(name, 0.0) for name in names) for names in COLUMNS.values()]
                rows.append([phase, *(gib(size) if size else "-" for size in sums), gib(total(items))])
        count = f"{group.devices} device{'s' * (group.devices > 1)}"
        lines += ["", f"memory of {', '.join(group.names)} on {count}", *table(rows, spaces=1)]
    peak, available = plan.peak, plan.available
    verb = "fits into" if plan.fits else "DOES NOT FIT into"
    lines += ["", f"peak {gib(peak)} GiB per device: {verb} {gib(available)} GiB ({plan.device.name})"]
    return lines + ([CACHED] if plan.device.kind == "cuda" else [])


def time_lines(plan: Plan) -> list[str]:
    """Seconds of a step by operator."""
    operators = [(name, seconds) for group in plan.groups for name, (_, seconds) in group.seconds.items()]
    operators += [("waiting for images", plan.waiting)] if plan.waiting else []
    durations = ", ".join(f"{name} {seconds:.3g}" for name, seconds in operators)
    tokens = plan.job.responses * plan.job.response_tokens / plan.seconds
    return [
        f"step about {plan.seconds:.3g} s with responses of full length, {tokens:,.0f} response tokens/s",
        *_wrapped(f"seconds: {durations}"),
        *_wrapped(f"rates: {plan.device.source}"),
    ]


def _wrapped(text: str, indent: int = 2, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _sizes(plan: Plan) -> tuple[int, dict[frozenset[str], dict[str, Layout]]]:
    groups = {frozenset(group.names): {role.name: role.layout for role in group.roles} for group in plan.groups}
    return plan.job.rollout_tensor, groups


def choice_lines(plans: Sequence[Plan], devices: int, configured: Plan | None = None) -> list[str]:
    """The best placement on this number of devices, the runner-up, that of the configuration, and why.

    Args:
        plans: as `Search.plans` returns them; with a configured placement, the fastest of every partition of the roles.
        devices: that there are.
        configured: the placement that is compared with them, if there is one.
    """
    if not plans:
        separate = " with a rollout on separate devices" if configured and configured.job.overlaps else ""
        return [f"no placement on {devices} device{'s' * (devices > 1)} fits{separate}"]
    current, plans = configured, list(plans)
    if configured is not None:
        numbers_of = {frozenset(group.names): each for group, each in zip(configured.groups, configured.numbers)}
        for i, plan in enumerate(plans):
            if _sizes(plan) == _sizes(configured) and math.isclose(plan.seconds, configured.seconds):
                current = replace(plan, placed=[numbers_of[frozenset(group.names)] for group in plan.groups])
                plans[i] = current
                break
    labels = dict(zip(("best", "runner-up"), plans))
    simplest = preferred(plans)
    if simplest not in labels.values():
        labels["preferred"] = simplest
    ranked = plans
    if current is not None and current not in plans and current.fits:
        ranked = sorted([*plans, current], key=lambda plan: plan.seconds)
    if current is not None and current not in labels.values():
        labels["configured"] = current
    stages = STAGES if plans[0].job.overlaps else STAGES[:-1]
    rows = [["", *([] if configured is None else ["rank"]), "s/step", *stages, "GiB"]]
    group_lines = []
    for label, plan in labels.items():
        name = f"{label} *" if plan is current else label
        rank = [] if configured is None else [str(ranked.index(plan) + 1) if plan in ranked else "-"]
        seconds = [f"{seconds:.3g}" for seconds in (plan.seconds, *plan.stages[: len(stages)])]
        rows.append([name, *rank, *seconds, gib(plan.peak)])
        groups = [_roles_on(plan, *each) for each in zip(plan.groups, plan.numbers)]
        lines = [line for text in groups for line in _wrapped(text, width=WIDTH - 14)]
        group_lines += [f"{name if i == 0 else '':12}  {line}" for i, line in enumerate(lines)]
    reasons = _wrapped(reason(plans)) if len(plans) > 1 else []
    head = f"placements on {devices} device{'s' * (devices > 1)}"
    return [head, *table(rows), *group_lines, *_rank_lines(plans, current), *reasons]


def _rank_lines(plans: Sequence[Plan], current: Plan | None) -> list[str]:
    """What the ranks of a table count, and what is wrong with the configured placement."""
    if current is None:
        return []
    ways = f"{len(plans)} way{'s' * (len(plans) > 1)} to group the roles"
    lines = _wrapped(f"* is the configured placement; ranks are among the fastest one of {ways} that fit, and *")
    if not current.fits:
        lines.append("* does not fit into memory, so it has no rank")
    if not current.concurrent and current.overlaps_roles:
        lines += _wrapped("in *, devices wait for one another; trainer.overlap=true lets them work at the same time")
    return lines


def _roles_on(plan: Plan, group: Group, numbers: Sequence[int]) -> str:
    """Such as "actor, rollout, ref on devices 0-3 (rollout TP 2)"."""
    names = list(group.names)
    if plan.job.generator == "actor" and "actor" in names:
        names.insert(1, "rollout")
    return f"{', '.join(names)} on {format_devices(numbers)}{_format_sizes(plan, group)}"


def format_placement(plan: Plan) -> str:
    """The groups with their sizes, and the sizes of model parallelism that are not 1."""
    return "; ".join(
        f"{', '.join(group.names)} on {group.devices}{_format_sizes(plan, group)}" for group in plan.groups
    )


def _format_sizes(plan: Plan, group: Group) -> str:
    """Sizes of model parallelism that are not 1, such as " (TP 2, rollout TP 4)"."""
    layouts = dict.fromkeys(role.layout for role in group.roles if role.name != "rollout")
    sizes = [(("TP", x.tensor), ("PP", x.pipeline), ("CP", x.sequence), ("EP", x.expert)) for x in layouts]
    parts = list(dict.fromkeys(" ".join(f"{name} {size}" for name, size in sizes_of if size > 1) for sizes_of in sizes))
    parts = [word for word in parts if word]
    if plan.job.generator in group.names and plan.job.rollout_tensor > 1:
        parts.append(f"rollout TP {plan.job.rollout_tensor}")
    return f" ({', '.join(parts)})" if parts else ""


def reason(plans: Sequence[Plan]) -> str:
    """Why the best plan is better than the runner-up, or which plan to prefer if others are as fast."""
    best, other, simplest = plans[0], plans[1], preferred(plans)
    longer = other.seconds / best.seconds - 1
    comparison = f"the runner-up takes {longer:.1%} longer: {_difference(best, other)}"
    if simplest is not best:
        name = "the runner-up" if simplest is other else format_placement(simplest)
        return f"{comparison}; within 5 % of the best: prefer {name}, the simpler one"
    return comparison + ("; within 5 % of the best, which is the simpler one" if longer <= NEAR - 1 else "")


def _difference(best: Plan, other: Plan) -> str:
    """Seconds that another plan takes longer in the stages that differ most."""
    gains = {stage: theirs - ours for stage, ours, theirs in zip(STAGES, best.stages, other.stages)}
    faster = max(gains, key=lambda stage: gains[stage])
    slower = min(gains, key=lambda stage: gains[stage])
    difference = f"{faster} {gains[faster]:+.3g} s"
    return difference + (f", although {slower} {gains[slower]:+.3g} s" if gains[slower] < -0.005 * best.seconds else "")


def describe_change(fix: tuple[Change, Plan] | None) -> str:
    """The smallest change that fits, such as "set a=1 b=2" or "use 4 devices"."""
    if fix is None:
        return "no change of micro-batches, checkpointing, offloading, LoRA or up to 128 times the devices fits"
    change, plan = fix
    settings = " ".join(f"{key}={value}" for key, value in change.settings.items())
    devices = f"use {plan.devices} devices" if change.factor > 1 else ""
    text = " and ".join(filter(None, [settings and f"set {settings}", devices]))
    return f"smallest change that fits ({gib(plan.peak)} GiB): {text}"
