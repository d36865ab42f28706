"""`verl quickstart`: examples/quickstart/run.py, also from an installed package."""

import importlib
import sys

from verl.cli.examples import FOLDER


def main(arguments: list[str], program: str) -> int:
    """Run the script with the arguments. Returns the exit status."""
    root, before = str(FOLDER.resolve().parent), sys.argv
    sys.path.insert(0, root)
    try:
        importlib.import_module("examples.quickstart")
    finally:
        sys.path.remove(root)  # of an installed package it is the folder verl, whose modules would hide others
    sys.argv = [program, *arguments]
    try:
        return importlib.import_module("examples.quickstart.run").main(arguments)
    finally:
        sys.argv = before
