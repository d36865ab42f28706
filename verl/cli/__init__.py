"""Command-line programs. `verl.cli.app` is the command `verl`."""
