"""`verl quickstart`: examples/quickstart/run.py, also from an installed package."""

import sys

from verl.cli.examples import FOLDER
from verl.registry import import_module


def main(arguments: list[str], program: str) -> int:
    """Run the script with the arguments. Returns the exit status."""
    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        return import_module(str(FOLDER / "quickstart" / "run.py")).main(arguments)
    finally:
        sys.argv = before
