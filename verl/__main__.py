"""python -m verl: the command `verl`. A missing package is named with the command that installs it."""

import atexit
import gc
import sys


def main() -> None:
    atexit.register(gc.freeze)  # at its end, Python would search the objects of torch for garbage for seconds
    try:
        from verl.cli.app import app
    except ModuleNotFoundError as error:
        from verl.trainer.startup.command_line import print_missing_package

        sys.exit(print_missing_package(error))
    app(prog_name="verl")


if __name__ == "__main__":
    main()
