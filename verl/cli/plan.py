"""`verl plan`: the plan of a run with its memory and time, and a simulation without files."""

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from verl.engines.traits import built_in_strategies, strategy_traits
from verl.processes.streams import command_output
from verl.rollout.traits import built_in_engines
from verl.utils.redaction import console_text

if TYPE_CHECKING:
    from verl.planner.shapes import ModelShape
    from verl.planner.workload import Job

HELP = """usage: verl plan [FILE.yaml] key=value ...
       verl plan --gpus N [--gpu H200] [--model 70B] [options]

The first form runs all checks of `verl train`, prints its plan, the memory per device in each phase, the time of a step
and the best placement. `placement=auto` in a run applies that placement.
"""


#: of the device memory, for the rollout of a simulation
MEMORY_SHARES = (0.6, 0.4, 0.2)
#: largest number of an option
_MOST = 10**9
#: exit status of a simulation with wrong options, as of argparse; 1: no placement fits
_WRONG = 2


@command_output()
def main(arguments: list[str] | None = None, program: str = "verl plan") -> int:
    """Run the command. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(HELP)
        _parser().print_help()
        return 0
    if any(argument.partition("=")[0] == "--gpus" for argument in arguments):
        return _simulate(arguments)
    if wrong := _wrong_first_form(arguments):
        print(console_text(f"error: {wrong}"), file=sys.stderr)
        return _WRONG
    from verl.trainer import main_ppo

    return main_ppo.main(["--dry-run", *_with_config_flag(arguments)], program=program)


def _wrong_first_form(arguments: list[str]) -> str | None:
    """What is wrong with a command without --gpus: an option of another form, or a file of another type."""
    options = {name for action in _parser()._actions for name in action.option_strings}
    option = next((argument for argument in arguments if argument.partition("=")[0] in options), None)
    if option is not None:
        return f"{option.partition('=')[0]} is an option of a simulation, which needs the number of GPUs: add --gpus N"
    for argument in arguments:
        name = argument.partition("=")[0].lower().lstrip("-")
        meant = [option for option in sorted(options) if len(name) > 1 and option.startswith(f"--{name}")]
        if argument.startswith("-") and meant:
            return f"found {argument!r}; did you mean {' or '.join(meant)}?"
    first = arguments[0] if arguments else "-"
    if "=" in first or first.startswith(("-", "~")) or first.endswith((".yaml", ".yml")):
        return None
    return f"found {first!r}, expected FILE.yaml, key=value or --gpus N; `verl plan --help` has examples"


def _with_config_flag(arguments: list[str]) -> list[str]:
    """`run.yaml` -> `--config run.yaml`, unless the flag is there."""
    first = arguments[0] if arguments else ""
    is_file = first.endswith((".yaml", ".yml")) and "=" not in first
    return ["--config", *arguments] if is_file else arguments


def _parser() -> argparse.ArgumentParser:
    from verl.planner import devices, shapes
    from verl.trainer.startup.command_line import whole_number

    positive = whole_number(1, _MOST)
    parser = argparse.ArgumentParser(prog="verl plan", description="Simulate a run without files.", add_help=False)
    models = f"a size ({', '.join(shapes.BUILT_IN)}), the folder of a model, or its name on the Hugging Face Hub"
    parser.add_argument("--gpus", type=positive, required=True, help="number of GPUs")
    parser.add_argument("--gpu", default="H200", help=f"one of {', '.join(devices.BUILT_IN)}")
    parser.add_argument("--model", default="7B", help=models)
    parser.add_argument("--critic", default="", help="model of the critic; empty: none")
    parser.add_argument("--reward", default="", help="reward model; empty: none")
    parser.add_argument("--ref", action="store_true", help="with a reference policy")
    parser.add_argument("--strategy", choices=tuple(built_in_strategies()), default="fsdp2")
    parser.add_argument("--engine", choices=tuple(built_in_engines()), default="vllm", help="rollout engine")
    parser.add_argument("--prompts", type=positive, default=1024, help="prompts per step")
    parser.add_argument("--samples", type=positive, default=1, help="responses per prompt")
    parser.add_argument("--prompt-tokens", type=positive, default=1024)
    parser.add_argument("--response-tokens", type=positive, default=1024)
    parser.add_argument("--updates", type=positive, default=1, help="updates per step")
    parser.add_argument("--lora-rank", type=whole_number(0, _MOST), default=0, help="0: no LoRA")
    return parser


def _simulate(arguments: list[str]) -> int:
    """Print the best placement of a simulated run and its memory."""
    from verl.planner import devices, report
    from verl.planner.placement import Plan
    from verl.planner.search import MEGATRON_SIZES, Change, Search, first_that_fits, preferred
    from verl.planner.workload import Job

    args = _parser().parse_args(arguments)
    try:
        device, job = devices.built_in(args.gpu), _job(args)
    except ValueError as error:
        print(console_text(f"error: {error}"), file=sys.stderr)
        return _WRONG
    sizes = MEGATRON_SIZES if job.model_parallel else None
    print(console_text("\n".join([*_model_lines(job), *_workload_lines(args, device.name)])))

    def plans_of(job: Job, gpus: int, count: int) -> list[Plan]:
        """The plans with the largest share of the memory for the rollout with which there are any."""
        for share in MEMORY_SHARES if job.traits.own_memory_share else (job.memory_share,):
            job = replace(job, memory_share=share)
            if plans := Search(job, device, separate_rollout=False, model_sizes=sizes).plans(gpus, count):
                return plans
        return []

    plans = plans_of(job, args.gpus, 2)
    print("\n".join(report.choice_lines(plans, args.gpus)))
    if plans:
        best = preferred(plans)
        print("\n".join([*report.memory_lines(best), *report.time_lines(best)]))
        if job.traits.own_memory_share:
            print(f"with rollout.gpu_memory_utilization={best.job.memory_share}")
        return 0

    def plan_of(change: Change) -> Plan | None:
        plans = plans_of(change.apply(job), args.gpus * change.factor, 1)
        return plans[0] if plans else None

    fix = first_that_fits(job, device, plan_of)
    placement = f": {report.format_placement(fix[1])}" if fix is not None else ""
    print(f"{report.describe_change(fix)}{placement}")
    return 1


def _job(args: argparse.Namespace) -> "Job":
    """The simulated run. Raises ValueError for a model that is unknown or not modelled, or options that contradict."""
    from verl.planner.workload import Job, Role

    if args.updates > args.prompts:
        raise ValueError(
            f"--updates {args.updates}: every update needs a prompt, and a step has {args.prompts}: use at most "
            f"{args.prompts} updates, or more --prompts"
        )
    model_parallel = bool(strategy_traits(args.strategy).model_parallel)
    if args.lora_rank and model_parallel:
        raise ValueError(
            f"--lora-rank {args.lora_rank}: --strategy {args.strategy} does not support LoRA adapters: use --strategy "
            "fsdp2"
        )

    # Megatron stores 16-bit weights; its optimizer has the float32 ones
    common = {"weight_bytes": 2 if model_parallel else 4}
    policy = _shape(args.model)
    roles = [Role("actor", policy, trains=True, updates=args.updates, lora_rank=args.lora_rank, **common)]
    roles += [Role("ref", policy, **common)] if args.ref else []
    if args.critic:
        critic = Role("critic", _shape(args.critic), trains=True, value_head=True, updates=args.updates, **common)
        roles.append(critic)
    roles += [Role("reward", _shape(args.reward), value_head=True, **common)] if args.reward else []
    return Job(
        tuple(roles),
        args.prompts,
        args.samples,
        args.prompt_tokens,
        args.response_tokens,
        old_log_probs=args.updates > 1,
        engine=args.engine,
        memory_share=MEMORY_SHARES[0],
        model_parallel=model_parallel,
        strict=False,
    )


def _model_lines(job: "Job") -> list[str]:
    """The number of parameters of each model."""
    roles_of: dict[str, list[str]] = {}
    for role in job.roles:
        shape = role.shape
        active = f", {shape.active_parameters / 1e9:.3g} billion active" if shape.experts else ""
        size = f"{shape.name}: {shape.parameters() / 1e9:.3g} billion parameters{active}"
        roles_of.setdefault(size, []).append(role.name)
    return [f"{size} ({', '.join(names)})" for size, names in roles_of.items()]


def _workload_lines(args: argparse.Namespace, gpu: str) -> list[str]:
    """What is simulated, with the options that change it."""
    return [
        f"simulated: {args.prompts} prompts x {args.samples} responses per step, {args.prompt_tokens} + "
        f"{args.response_tokens} tokens, {args.updates} update{'s' * (args.updates > 1)};",
        f"{args.strategy}, rollout {args.engine}, {args.gpus} x {gpu}; `verl plan --help` lists the options",
    ]


def _shape(name: str) -> "ModelShape":
    """The shape of a built-in size, of a folder, or of a model of the Hub, whose config is downloaded.

    Raises:
        ValueError: there is none of that name.
    """
    from pathlib import Path

    from verl.planner import shapes

    if "/" not in name and not Path(name).is_dir():
        return shapes.built_in(name)
    from verl.trainer.checks.planning import shape_of

    try:
        return shape_of(name)
    except ValueError as error:
        known = ", ".join(shapes.BUILT_IN)
        raise ValueError(f"{error}\na size needs no files: {known}") from error
