"""A plan as text: memory per phase, seconds of a step, and the comparison with the best placement."""

import math
import textwrap
from collections.abc import Sequence

from verl.planner.devices import GIB
from verl.planner.memory import PHASES, total
from verl.planner.placement import STAGES, Group, Plan
from verl.planner.search import Change
from verl.planner.workload import Layout
from verl.single_controller.cluster import format_devices

#: columns of a terminal
WIDTH = 80

#: what the memory of GPUs does not contain (docs/internals/scaling.md)
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


def choice_lines(best: Plan | None, devices: int, configured: Plan) -> list[str]:
    """The best placement on this number of devices, and that of the configuration, marked with *.

    Args:
        best: None: no placement fits.
        devices: that there are.
    """
    head = f"{devices} device{'s' * (devices > 1)}"
    if best is None:
        return [f"no placement on {head} fits{' with a rollout on separate devices' * configured.job.overlaps}"]
    is_best = _sizes(best) == _sizes(configured) and math.isclose(best.seconds, configured.seconds)
    plans = {"best *": configured} if is_best else {"best": best, "configured *": configured}
    stages = STAGES if best.job.overlaps else STAGES[:-1]
    rows, group_lines = [["", "s/step", *stages, "GiB"]], []
    for label, plan in plans.items():
        seconds = [f"{seconds:.3g}" for seconds in (plan.seconds, *plan.stages[: len(stages)])]
        rows.append([label, *seconds, gib(plan.peak)])
        groups = [_roles_on(plan, *each) for each in zip(plan.groups, plan.numbers)]
        lines = [line for text in groups for line in _wrapped(text, width=WIDTH - 14)]
        group_lines += [f"{label if i == 0 else '':12}  {line}" for i, line in enumerate(lines)]
    notes = []
    if not configured.fits:
        notes.append("* does not fit into memory")
    if not configured.concurrent and configured.overlaps_roles:
        notes += _wrapped("in *, devices wait for one another; trainer.overlap=true lets them work at the same time")
    return [f"placements on {head}", *table(rows), *group_lines, *notes]


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


def describe_change(fix: tuple[Change, Plan] | None) -> str:
    """The smallest change that fits, such as "set a=1 b=2" or "use 4 devices"."""
    if fix is None:
        return "no change of micro-batches, checkpointing, offloading or up to 128 times the devices fits"
    change, plan = fix
    settings = " ".join(f"{key}={value}" for key, value in change.settings.items())
    devices = f"use {plan.devices} devices" if change.factor > 1 else ""
    text = " and ".join(filter(None, [settings and f"set {settings}", devices]))
    return f"smallest change that fits ({gib(plan.peak)} GiB): {text}"
