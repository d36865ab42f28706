"""The planner for a run: its estimate, the memory check of the preflight, and `placement: auto`."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.checkpoints.store import CheckpointStore
from verl.config import schema
from verl.config.fields import to_flat_dict
from verl.config.load import with_overrides
from verl.modeling.vision import is_vision_config, language_model_of, tower_of, tower_sizes
from verl.planner.devices import Device
from verl.planner.host import host_profile
from verl.planner.placement import Plan, plan_groups
from verl.planner.search import Change, describe, first_that_fits, smallest_change
from verl.planner.settings import groups_of, job_of, overrides_of
from verl.planner.shapes import ModelShape, VisionShape
from verl.planner.workload import Job
from verl.rollout.loading import auto_class
from verl.trainer.checks.models import readable_config
from verl.trainer.checks.preflight import Run
from verl.trainer.startup.roles import roles_of
from verl.trainer.state.saved_state import load_state

if TYPE_CHECKING:
    from verl.planner.search import Search

logger = logging.getLogger("verl.trainer")

#: a run is refused if its estimate exceeds the memory by more than the error of the model
REFUSED_FROM = 1.1
#: settings that a placement has beside the section `placement`
_PLACED = ("trainer.overlap", "actor_rollout_ref.rollout.tensor_model_parallel_size")
_MEGATRON_SIZES = ("megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size")


@dataclass(frozen=True)
class Estimate:
    """What the planner finds for a configuration: its job, the groups of its placement, and the plan."""

    job: Job
    device: Device
    groups: Sequence[tuple[Sequence[str], int]]
    plan: Plan

    def change(self) -> tuple[Change, Plan] | None:
        """The smallest change with which the plan fits."""
        return smallest_change(self.job, self.device, self.groups)


def shape_of(path: str, model: schema.ModelConfig | None = None, trust_remote_code: bool = False) -> ModelShape:
    overrides = model.override_config if model is not None else {}
    trust = model.trust_remote_code if model is not None else trust_remote_code
    return shape_of_config(readable_config(path, overrides, trust), path)


def shape_of_config(hf: Any, name: str) -> ModelShape:
    """The shape of a model, from its HuggingFace config. name: in errors and tables."""
    config = {**hf.get_text_config().to_dict(), "tie_word_embeddings": hf.tie_word_embeddings}
    shape = ModelShape.from_config(config, name)
    return replace(shape, vision=_vision_of(hf)) if is_vision_config(hf) else shape


def _vision_of(hf: Any) -> VisionShape:
    """The vision tower of a model, which is built without weights. Raises ValueError for one that is not known."""
    with torch.device("meta"):
        module = auto_class(hf).from_config(hf)
    inside = sum(p.numel() for p in language_model_of(module).parameters())
    head = 0 if hf.tie_word_embeddings else module.get_output_embeddings().weight.numel()
    sizes = tower_sizes(hf)
    if sizes is None:
        raise ValueError(f"the planner does not model the vision tower of {hf.model_type}")
    outside = sum(p.numel() for p in module.parameters()) - inside - head
    vision = hf.vision_config.to_dict()
    values = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    return VisionShape(outside, sum(p.numel() for p in tower_of(module)[1].parameters()), *sizes, values)


def shapes_of(config: schema.Config, names: Sequence[str]) -> dict[str, ModelShape]:
    policy, reward = config.actor_rollout_ref.model, config.reward.reward_model
    policy_shape = functools.cache(lambda: shape_of(policy.path, policy))  # of several roles
    shapes = {}
    for name in names:
        if name == "critic":
            shapes[name] = shape_of(config.critic.model.path, config.critic.model)
        elif name == "reward":
            shapes[name] = shape_of(reward.model_path, trust_remote_code=reward.trust_remote_code)
        else:
            shapes[name] = policy_shape()
    return shapes


def estimate(config: schema.Config, names: Sequence[str]) -> Estimate:
    """Memory and time of a configuration on the device of this host. names: its roles with separate workers.

    Raises:
        ValueError: a model or an engine that the planner does not model.
    """
    device = host_profile(config.trainer.device)
    job = job_of(config, shapes_of(config, names), names, device.kind == "cuda")
    groups = [(roles, len(numbers)) for roles, numbers in _placed(config, names)]
    concurrent = config.trainer.overlap or len(groups) == 1
    return Estimate(job, device, groups, plan_groups(job, device, groups, concurrent))


def _placed(config: schema.Config, names: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """[(roles, devices)] of the placement of a configuration."""
    return groups_of(config.placement.model_dump(exclude={"auto"}), names, _devices(config))


def describe_estimate(config: schema.Config, names: Sequence[str]) -> str:
    """The lines that `verl plan` adds to the plan of a run."""
    from verl.planner import report

    try:
        result = estimate(config, names)
    except ValueError as error:
        return f"no estimate of memory and time: {error}"
    lines = [*report.memory_lines(result.plan), *report.time_lines(result.plan)]
    if not result.plan.fits:
        lines.append(_describe_change(result.change()))
    if sum(count for _, count in result.groups) > 1:
        total, search = _devices(config), _search(config, result)
        configured = replace(result.plan, placed=[numbers for _, numbers in _placed(config, names)])
        plans = search.plans(total, len(search.partitions()))
        lines += ["", *report.choice_lines(plans, total, configured)]
    return "\n".join(lines)


def _describe_change(change: tuple[Change, Plan] | None) -> str:
    if change is None:
        return "no change of micro-batches, checkpointing, offloading, LoRA or up to 128 times the devices fits"
    from verl.planner.report import gib

    return f"smallest change that fits ({gib(change[1].peak)} GiB): {describe(*change)}"


def check_memory(run: Run) -> None:
    """Raise ValueError if the run needs more memory than there is; warn if it may. On Ray, devices are not known here.

    Models and engines that are not modelled are not checked.
    """
    if run.backend == "ray":
        return
    try:
        result = estimate(run.config, roles_of(run.config))
    except ValueError as error:
        logger.debug("memory is not checked: %s", error)
        return
    plan = result.plan
    if plan.fits:
        return
    from verl.planner.report import gib

    group = max(plan.groups, key=lambda group: group.peak[1])
    message = (
        f"{group.peak[0]} needs about {gib(plan.peak)} GiB per device, but there are {gib(plan.available)} GiB "
        f"({plan.device.name}); {_describe_change(result.change())}; `verl plan` prints the table"
    )
    if plan.peak > REFUSED_FROM * plan.available:
        raise ValueError(f"memory: {message}")
    logger.warning("memory: %s", message)


# ---- placement: auto ------------------------------------------------------------------------------------------------


def _devices(config: schema.Config) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def _search(config: schema.Config, result: Estimate) -> "Search":
    from verl.planner.search import MEGATRON_SIZES, ROLLOUT_SIZES, Search, Space

    rollout, policy = config.actor_rollout_ref.rollout, config.actor_rollout_ref
    job = replace(result.job, roles=tuple(role for role in result.job.roles if role.name != "rollout"))
    fixed = policy.model.has_adapters or not job.traits.tensor_parallel or rollout.deterministic
    sizes = (rollout.tensor_model_parallel_size,) if fixed else ROLLOUT_SIZES
    models = None
    if job.model_parallel:  # the sizes of the settings, and those of the search
        now = job.role("actor").layout
        free = () if policy.actor.megatron.virtual_pipeline_model_parallel_size else MEGATRON_SIZES
        models = tuple(dict.fromkeys(((now.tensor, now.pipeline), *free)))
    # a rollout with separate devices idles during training, unless training is asynchronous
    return Search(job, result.device, Space(job.overlaps, sizes, models, expert_sizes=None, same_sizes=True))


def _nothing_fits(config: schema.Config, result: Estimate) -> str:
    """Why no placement is possible, and what to change."""
    total, k = _devices(config), config.trainer.max_staleness
    if k and total == 1:
        return (
            f"trainer.async.max_staleness={k} needs a rollout on separate devices, but there is one device: use "
            "trainer.n_gpus_per_node=2 or more, or trainer.async.max_staleness=0"
        )

    def plan_of(change: Change) -> Plan | None:
        changed = replace(result, job=change.apply(result.job))
        plans = _search(config, changed).plans(total * change.factor, 1)
        return plans[0] if plans else None

    separate = f" with a rollout on separate devices, which trainer.async.max_staleness={k} needs," if k else ""
    change_text = _describe_change(first_that_fits(result.job, result.device, plan_of))
    change_text += "; or use trainer.async.max_staleness=0" if k else ""
    return f"no placement on {total} devices{separate} fits; {change_text}"


def _resumed_placement(config: schema.Config) -> dict[str, Any] | None:
    """The settings of the placement of the checkpoint that a run resumes from, on as many devices; None: choose one."""
    trainer, folder = config.trainer, None
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        folder = Path(trainer.resume_from_path)
    elif trainer.resume_mode == "auto":
        folder = CheckpointStore(trainer.default_local_dir).newest()
    if folder is None or not (folder / "trainer.json").is_file():
        return None
    saved = load_state(folder, "trainer")["config"]
    then = saved["trainer.nnodes"] * saved["trainer.n_gpus_per_node"]
    if then != _devices(config):
        logger.warning("placement=auto: %s is of %d devices, so the placement is chosen again", folder, then)
        return None
    known, kept = to_flat_dict(config), {"placement.auto": False}
    for key in saved.keys() & known.keys():
        if key.startswith("placement.") or key in _PLACED or key.endswith(_MEGATRON_SIZES):
            kept |= {key: saved[key]} if saved[key] != known[key] and key != "placement.auto" else {}
    overrides = " ".join(f"{key}={value}" for key, value in sorted(kept.items())).replace(", ", ",")
    logger.info("placement=auto: as in %s, from which the run resumes; sets %s", folder, overrides)
    return kept


def apply_auto_placement(config: schema.Config) -> schema.Config:
    """The configuration of `placement: auto` with the devices of the best plan, or of the run that it resumes.

    Of plans within 5 % of the best, the simplest is chosen. The choice is logged.

    Raises:
        ValueError: devices are set too, a model is not modelled, or nothing fits (in asynchronous training, with a
            rollout on separate devices).
    """
    from verl.planner import report
    from verl.planner.search import preferred

    set_keys = [key for key, value in config.placement.model_dump(exclude={"auto"}).items() if value is not None]
    if set_keys:
        raise ValueError(f"placement.auto chooses the devices, but placement.{set_keys[0]} is set: remove one of them")
    if (kept := _resumed_placement(config)) is not None:
        return with_overrides(config, kept)
    try:
        result = estimate(config, roles_of(config))
    except ValueError as error:
        raise ValueError(f"placement=auto is not possible: {error}; set placement.*_devices, or remove it") from error
    plans = _search(config, result).plans(_devices(config))
    if not plans:
        raise ValueError(f"placement=auto: {_nothing_fits(config, result)}")
    best = preferred(plans)
    overrides = overrides_of(best, _devices(config))
    reason = report.reason(plans) if len(plans) > 1 else "no other placement fits"
    if best.devices < _devices(config):
        reason += f"; more of the {_devices(config)} devices gain less than 5 %, or do not divide the batch"
    logger.info(
        "placement=auto: %s, about %.3g s per step (%s; rates: %s); sets %s",
        report.format_placement(best),
        best.seconds,
        reason,
        best.device.source,
        " ".join(f"{key}={value}" for key, value in overrides.items()).replace(", ", ","),
    )
    return with_overrides(config, overrides)
