"""`verl plan`: the plan of a run with its memory and time, a simulation without files, and the calibration."""

import argparse
import sys
from dataclasses import replace

HELP = """usage: verl plan [--config FILE.yaml] key=value ...
       verl plan --gpus N --gpu H200 --model 70B [options]
       verl plan --calibrate

The first form runs all checks of `verl train`, prints its plan, the memory per device in each phase, the time of a step
and the best placement. `placement=auto` in a run applies that placement.
"""


def main(arguments: list[str] | None = None, program: str = "verl plan") -> int:
    """Run the command. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--calibrate" in arguments:
        return _calibrate()
    if any(argument.partition("=")[0] == "--gpus" for argument in arguments):
        return _simulate(arguments)
    if {"--help", "-h"} & set(arguments):
        print(HELP)
        _parser().print_help()
        return 0
    from verl.trainer import main_ppo

    return main_ppo.main(["--dry-run", *arguments], program=program)


def _calibrate() -> int:
    """Measure this host and store its profile."""
    from verl.planner import devices, host
    from verl.planner.calibrate import calibrate
    from verl.utils.device import resolve_device

    device = resolve_device("auto")
    print(f"calibrating {host.host_name(device)}")
    path = devices.save(calibrate(device, print), host.host_versions())
    print(f"written to {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl plan", description="Simulate a run without files.", add_help=False)
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    parser.add_argument("--gpu", default="H200", help="built-in profile: H200, H100, A100")
    parser.add_argument("--model", default="7B", help="built-in shape (0.5B to 70B), or the folder of a model")
    parser.add_argument("--critic", default="", help="shape of the critic; empty: none")
    parser.add_argument("--reward", default="", help="shape of the reward model; empty: none")
    parser.add_argument("--ref", action="store_true", help="with a reference policy")
    parser.add_argument("--strategy", choices=("fsdp2", "megatron"), default="fsdp2")
    parser.add_argument("--engine", default="vllm", help="rollout engine")
    parser.add_argument("--prompts", type=int, default=1024, help="prompts per step")
    parser.add_argument("--samples", type=int, default=1, help="responses per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=1, help="updates per step")
    parser.add_argument("--lora-rank", type=int, default=0)
    return parser


def _simulate(arguments: list[str]) -> int:
    """Print the best placement of a simulated run and its memory."""
    from verl.planner import devices, report
    from verl.planner.fixes import describe, smallest_change
    from verl.planner.search import MEGATRON_SIZES, ROLLOUT_SIZES, Search, Space
    from verl.planner.workload import Job, Role

    args = _parser().parse_args(arguments)
    try:
        device, policy = devices.built_in(args.gpu), _shape(args.model)
        actor = Role("actor", policy, trains=True, updates=args.updates, lora_rank=args.lora_rank)
        roles = [actor]
        roles += [Role("ref", policy)] if args.ref else []
        if args.critic:
            roles.append(Role("critic", _shape(args.critic), trains=True, value_head=True, updates=args.updates))
        roles += [Role("reward", _shape(args.reward), value_head=True)] if args.reward else []
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    kind = "megatron" if args.strategy == "megatron" else "torch"
    job = Job(
        tuple(roles),
        args.prompts,
        args.samples,
        args.prompt_tokens,
        args.response_tokens,
        old_log_probs=args.updates > 1,
        engine=args.engine,
        memory_share=0.6,
        kind=kind,
        strict=False,
    )
    sizes = MEGATRON_SIZES if kind == "megatron" else None
    search = Search(job, device, Space(separate_rollout=False, rollout_sizes=ROLLOUT_SIZES, model_sizes=sizes))
    plans = search.plans(args.gpus)
    print("\n".join(report.choice_lines(plans)))
    if plans:
        print("\n".join([*report.memory_lines(plans[0]), *report.time_lines(plans[0])]))
        return 0
    change = smallest_change(replace(job, rollout_tensor=1), device, [(job.names, args.gpus)])
    print(f"smallest change that fits: {describe(*change)}" if change else "no change fits")
    return 1


def _shape(name: str):
    from pathlib import Path

    from verl.planner import shapes

    if Path(name).is_dir():
        from verl.trainer.checks.planning import shape_of

        return shape_of(name)
    return shapes.built_in(name)
