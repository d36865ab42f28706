"""`verl quickstart`: examples/quickstart/run.py, also from an installed package."""

import runpy
import sys

from verl.cli.examples import FOLDER


def main(arguments: list[str], program: str) -> int:
    """Run the script with the arguments. Returns the exit status."""
    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        runpy.run_path(str(FOLDER / "quickstart" / "run.py"), run_name="__main__")
    finally:
        sys.argv = before
    return 0
