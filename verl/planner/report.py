"""A plan as text: memory per phase, seconds of a step, and the comparison of placements."""

from collections.abc import Sequence

from verl.planner.devices import GIB
from verl.planner.memory import PHASES, total
from verl.planner.placement import STAGES, Group, Plan

#: columns of the memory table -> items that they sum
COLUMNS = {
    "weights": ("weights", "gathered weights", "rollout weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits, working memory"),
    "KV cache": ("KV cache",),
    "other": ("buffers", "CUDA context"),
}


def gib(size: float) -> str:
    """Such as "12.3"; smaller sizes with more digits."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
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
        lines += ["", f"memory of {', '.join(group.names)} on {count}", *table(rows)]
    peak, available = plan.peak, plan.available
    verb = "fits into" if plan.fits else "DOES NOT FIT into"
    return [*lines, "", f"peak {gib(peak)} GiB per device: {verb} {gib(available)} GiB ({plan.device.name})"]


def time_lines(plan: Plan) -> list[str]:
    """Seconds of a step by operator."""
    operators = [(name, seconds) for group in plan.groups for name, (_, seconds) in group.seconds.items()]
    words = ", ".join(f"{name} {seconds:.3g}" for name, seconds in operators)
    tokens = plan.job.responses * plan.job.response_tokens / plan.seconds
    return [
        f"step about {plan.seconds:.3g} s with responses of full length: {words}; {tokens:,.0f} response tokens/s",
        f"rates: {plan.device.source}",
    ]


def choice_lines(plans: Sequence[Plan]) -> list[str]:
    """The best placement, the runner-up, and why."""
    if not plans:
        return ["no placement fits"]
    rows = [["", "placement", "s/step", *STAGES, "GiB"]]
    for label, plan in zip(("best", "runner-up"), plans):
        stages = [f"{seconds:.3g}" for seconds in plan.stages]
        rows.append([label, placement_words(plan), f"{plan.seconds:.3g}", *stages, gib(plan.peak)])
    return [*table(rows), *([reason(*plans[:2])] if len(plans) > 1 else [])]


def placement_words(plan: Plan) -> str:
    """The groups with their sizes, and the sizes of model parallelism that are not 1."""
    return "; ".join(_group_words(plan, group) for group in plan.groups)


def _group_words(plan: Plan, group: Group) -> str:
    sizes = dict.fromkeys((role.layout.tensor, role.layout.pipeline) for role in group.roles if role.name != "rollout")
    words = [f"TP {t}" + (f" PP {p}" if p > 1 else "") for t, p in sizes if t * p > 1]
    if plan.job.generator in group.names and plan.job.rollout_tensor > 1:
        words.append(f"rollout TP {plan.job.rollout_tensor}")
    return f"{', '.join(group.names)} on {group.devices}" + (f" ({', '.join(words)})" if words else "")


def reason(best: Plan, other: Plan) -> str:
    """In which stage the best plan is faster than another one."""
    gains = {stage: theirs - ours for stage, ours, theirs in zip(STAGES, best.stages, other.stages)}
    faster = max(gains, key=lambda stage: gains[stage])
    slower = min(gains, key=lambda stage: gains[stage])
    words = f"the runner-up takes {other.seconds / best.seconds - 1:.0%} longer: {faster} {gains[faster]:+.3g} s"
    return words + (f", although {slower} {gains[slower]:+.3g} s" if gains[slower] < -0.005 * best.seconds else "")
