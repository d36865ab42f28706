"""`verl plan`: the plan of a run with its memory and time, and a prediction for other GPUs."""

import argparse
import sys

from verl.processes.streams import command_output
from verl.utils.redaction import console_text

USAGE = """verl plan [FILE.yaml] key=value ...
       verl plan --gpus N [--gpu H200] [--model 7B] [FILE.yaml] key=value ..."""
DESCRIPTION = """The first form runs all checks of `verl train`, prints its plan, the memory per device in each phase,
the time of a step and the best placement. `placement=auto` in a run applies that placement. The second form predicts
the same settings on other GPUs; it needs no files and no GPU.
"""

#: largest number of an option
_MOST = 10**9
#: exit status of wrong options, as of argparse; 1: wrong settings, or no placement fits
_WRONG = 2


@command_output()
def main(arguments: list[str] | None = None, program: str = "verl plan") -> int:
    """Run the command. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        _parser().print_help()
        return 0
    if wrong := _wrong_form(arguments):
        print(console_text(f"error: {wrong}"), file=sys.stderr)
        return _WRONG
    options, rest = _parser().parse_known_args(arguments)
    if options.gpus is not None:
        return _simulate(options, _with_config_flag(rest))
    from verl.trainer import main_ppo

    return main_ppo.main(["--dry-run", *_with_config_flag(arguments)], program=program)


def _wrong_form(arguments: list[str]) -> str | None:
    """What is wrong with the form of a command: an option of another form, or a file of another type."""
    names = [argument.partition("=")[0] for argument in arguments]
    option = next((name for name in names if name in ("--gpu", "--model")), None)
    if option is not None and "--gpus" not in names:
        return f"{option} is an option of a simulation, which needs the number of GPUs: add --gpus N"
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

    parser = argparse.ArgumentParser("verl plan", USAGE, DESCRIPTION, allow_abbrev=False, add_help=False)
    models = f"a size ({', '.join(shapes.BUILT_IN)}), the folder of a model, or its name on the Hugging Face Hub"
    parser.add_argument("--gpus", type=whole_number(1, _MOST), help="number of GPUs")
    parser.add_argument("--gpu", default="H200", help=f"one of {', '.join(devices.BUILT_IN)}")
    parser.add_argument("--model", help=f"actor_rollout_ref.model.path, also for other models: {models}")
    return parser


def _simulate(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the best placement of the settings on other GPUs, or their own, with its memory and time."""
    from verl.config import batch_summary, load_config
    from verl.planner.devices import built_in
    from verl.trainer.checks import planning
    from verl.trainer.startup.command_line import split_arguments, user_errors
    from verl.trainer.startup.roles import roles_of

    with user_errors():
        device = built_in(options.gpu)
        nodes, per_node = max(1, options.gpus // device.per_node), min(options.gpus, device.per_node)
        if nodes * per_node != options.gpus:
            raise ValueError(f"--gpus {options.gpus}: expected a multiple of {per_node}, the GPUs of a node")
        path, overrides, _ = split_arguments(arguments)
        overrides += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}"]
        overrides += [] if options.model is None else [f"actor_rollout_ref.model.path={options.model}"]
        config = load_config(path, overrides, base={"actor_rollout_ref.model.path": "7B"})
        if not any(config.placement.devices.values()):
            config = planning.apply_auto_placement(config, device)
        print(console_text(batch_summary(config, critic="critic" in roles_of(config))))
        print(console_text(planning.describe_estimate(config, roles_of(config), device)))
    return 0
