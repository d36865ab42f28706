"""The command line: python -m verl.model_merger merge | test."""

import argparse
import re
import sys
from pathlib import Path

from verl.processes.streams import command_output

#: options of public scripts
_WITHOUT_EFFECT = {
    "tie_word_embedding": "read from the config",
    "is_value_model": "read from the checkpoint",
    "use_cpu_initialization": "no GPU is used",
}

_EPILOG = """\
examples:
  {program} merge --backend fsdp \\
      --local_dir checkpoints/gsm8k/global_step_410/actor --target_dir merged/gsm8k-410
  {program} test --backend fsdp \\
      --local_dir checkpoints/gsm8k/global_step_410/actor --test_hf_dir merged/gsm8k-410
"""


def _size(text: str) -> str:
    if re.fullmatch(r"[0-9.]+\s*[KMGT]B", text.upper()) is None:
        raise argparse.ArgumentTypeError(f"expected a size like 5GB or 500MB, found {text!r}")
    return text


def _underscores(argument: str) -> str:
    """Accept hyphens in option names: `--local-dir=x` is `--local_dir=x`."""
    name, equals, value = argument.partition("=")
    return (f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name) + equals + value


def parser(program: str = "python -m verl.model_merger") -> argparse.ArgumentParser:
    """Return the argument parser. `program` is the name in --help."""
    top = argparse.ArgumentParser(
        prog=program,
        description="Convert a training checkpoint to a HuggingFace model and verify the result.",
        epilog=_EPILOG.format(program=program).replace("verl merge merge", "verl merge"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--backend", choices=("fsdp", "megatron"), help="no effect: the format is detected")
    common.add_argument("--local_dir", type=Path, required=True, help="the checkpoint: .../global_step_N/actor")
    common.add_argument(
        "--base",
        help="the base model: required for adapters, and a merged model must differ from it; "
        "default: the one recorded in the checkpoint",
    )
    for name, reason in _WITHOUT_EFFECT.items():
        common.add_argument(f"--{name}", action="store_true", help=f"no effect: {reason}")
    common.add_argument("--trust_remote_code", action="store_true", help="allow custom code of the model")

    merge = commands.add_parser(
        "merge", parents=[common], help="write the model of a checkpoint as a HuggingFace folder"
    )
    merge.add_argument("--target_dir", type=Path, required=True, help="the folder to write")
    merge.add_argument(
        "--dtype",
        choices=("keep", "float32", "bfloat16", "float16"),
        default="keep",
        help="dtype of the weights; keep (default): as in the checkpoint",
    )
    merge.add_argument("--max_shard_size", type=_size, default="5GB", help="maximum size of a weight file; default 5GB")
    merge.add_argument("--allow_unchanged", action="store_true", help="do not compare the result with the base model")
    merge.add_argument("--overwrite", action="store_true", help="replace the weights in a non-empty target_dir")

    test = commands.add_parser("test", parents=[common], help="compare a checkpoint with a HuggingFace folder")
    test.add_argument("--test_hf_dir", type=Path, required=True, help="the folder to compare with")
    return top


@command_output()
def main(arguments: list[str] | None = None, program: str = "python -m verl.model_merger") -> int:
    """Run one command. Returns 0 on success, 1 after an error or if `test` found differences."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = parser(program).parse_args([_underscores(word) for word in arguments])
    # imported after parsing, so that --help and invalid arguments return immediately
    from verl.trainer.startup.command_line import print_error, print_missing_package

    try:
        from verl.model_merger.merge import MergeOptions, compare, merge
    except ModuleNotFoundError as error:
        return print_missing_package(error)
    from verl.utils.log import setup_logging

    setup_logging()
    try:
        if parsed.command == "test":
            faults = compare(parsed.local_dir, parsed.test_hf_dir, parsed.trust_remote_code, parsed.base)
            print(
                "\n".join(faults) if faults else f"{parsed.local_dir} and {parsed.test_hf_dir} contain the same model"
            )
            return 1 if faults else 0
        unused = ("command", "backend", *_WITHOUT_EFFECT)
        options = {name: value for name, value in vars(parsed).items() if name not in unused}
        merge(MergeOptions(**options))
    except (ValueError, OSError) as error:
        return print_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
