"""`verl check`: the environment check, as `python -m verl.utils.env_check`."""

import argparse


def main(arguments: list[str], program: str) -> int:
    """Print the checks. Returns 1 if a required component is missing or broken."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Check the packages and devices of this machine, and print the fix for every problem. "
        "`verl train --dry-run` checks a configuration and its data.",
    )
    parser.add_argument("--quiet", action="store_true", help="print only problems and remarks")
    options = parser.parse_args(arguments)
    from verl.env_check.check import check_env

    check_env(verbose=not options.quiet)
    return 0
